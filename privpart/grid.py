"""Grid: the public steps in which updates are summed and noise is added, as integers.

Floating-point noise has low-order bits that tell which sum it covers, whatever its variance is
(Mironov 2012). So nothing is summed or noised in floating point here: an update becomes whole
numbers of a public step, of which the noise's standard deviation is 2^``bits``; the server adds
integers, and only the noised sum becomes floating point again. Any rule that turns an update into
integers of bounded norm is allowed, because the adjacency compares with a client whose integers
are all zero; ``quantise`` rounds to the nearest and tests the norm of the result in integers.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from accounting.checks import ConfigError
from privpart.clip import clip_and_measure, l2_norm
from privpart.settings.ranges import at_least_tiny

_BITS = 20
# With each bit twice as many draws are too close to a half for float64 and take longer.
_MOST_BITS = 24
# So that sums of squares of an update's integers stay below 2^53, where float64 adds exactly.
_MOST_CLIP_BITS = 26
_FINE = 128
# Clip norm over the norm of a vector of single steps: what more bits aim for, and the least.
_COARSE = 8
_PART = 2**16
_MOST_TURNS = 8


@dataclass(frozen=True, slots=True)
class Grid:
    """The grid of a run, in units of the clip norm, fixed by the noise multiplier and the model."""

    bits: int  # the noise's standard deviation is 2^bits steps
    noise_multiplier: float  # that of the updates; the clip norm is 2^bits / noise_multiplier steps
    # bound on the norm of an update's integers, in steps: the clip norm, less what the floating
    # point of a mechanism's filter may add to the effect of a client
    norm: float
    # the same for updates that are summed before they are rounded: less by the square root of their
    # length, which is what rounding a sum may add to the effect of a client. 0 if nothing is left
    sum_norm: float

    @classmethod
    def of(cls, bits: int, noise_multiplier: float, dim: int, *, filter_charge: float) -> "Grid":
        """Return the grid of a run whose noise has a standard deviation of 2^bits steps.

        A mechanism of sensitivity S costs mu = (S c + sqrt(sum_t d (eta / b_t)^2)) / 2^bits for
        integer updates of norm c, if its filter's floating-point error differs by at most eta
        between two histories, in each of d coordinates, and the draw of round t has the factor
        b_t. Entry (t, t) of the encoder is 1 / b_t, so S >= 1 / b_t, and the accounted
        mu = S / noise_multiplier is kept by c = 2^bits / noise_multiplier - sqrt(d n) eta, where
        the last term is ``filter_charge``, in steps, and d is ``dim``.
        """
        norm = (2.0**bits / noise_multiplier) * (1 - 2.0**-50) - filter_charge * (1 + 2.0**-50)
        if not norm >= _COARSE * math.sqrt(dim):
            raise ConfigError(
                f"noise_multiplier={noise_multiplier:g} with {dim} parameters: an update of the "
                "clip norm would be lost in the steps of the grid, which the noise fixes. Use "
                f"less noise (for this model up to {2.0**_MOST_BITS / _COARSE / math.sqrt(dim):.3g}"
                "), or train fewer parameters."
            )
        sum_norm = max(0.0, norm - math.sqrt(dim) * (1 + 2.0**-50))
        return cls(bits, noise_multiplier, norm, sum_norm)

    def step(self, clip_norm: float) -> float:
        """Return the length of a step when updates are clipped to ``clip_norm``."""
        return clip_norm * self.noise_multiplier / 2.0**self.bits

    def sum_clip_norm(self, clip_norm: float) -> float:
        """Return the clip norm of updates that are summed before they are rounded; 0 if none."""
        return self.sum_norm * self.step(clip_norm) * (1 - 2.0**-50)


def noise_bits(noise_multiplier: float, dim: int) -> int:
    """Return the bits of the noise's standard deviation in steps, for noise_multiplier > 0.

    20; up to 24 if an update would otherwise have few steps per coordinate, and fewer if there is
    so little noise that an update would have more than 2^26 steps.
    """
    bits = _BITS
    while bits < _MOST_BITS and 2.0**bits / noise_multiplier < _FINE * math.sqrt(dim):
        bits += 1
    while 2.0**bits / noise_multiplier > 2.0**_MOST_CLIP_BITS:
        bits -= 1
    if bits < 1:
        raise ConfigError(
            f"noise_multiplier={noise_multiplier:g}: must be 0, or at least {2.0**-25:.2g}; "
            "less noise than that protects nobody."
        )
    return bits


def refuse_noise(noise_multiplier: float, dim: int) -> None:
    """Refuse a noise multiplier for which there is no grid, before a run begins."""
    if noise_multiplier:
        Grid.of(noise_bits(noise_multiplier, dim), noise_multiplier, dim, filter_charge=0.0)


def quantise(update: Tensor, clip_norm: float, grid: Grid, out: NDArray[np.int32]) -> float:
    """Write an update as whole numbers of steps, jointly scaled down to the clip norm.

    Args:
        update: shape (d,), floating point, of any content.
        clip_norm: > 0; the steps are in proportion to it.
        grid: the grid of the run.
        out: shape (d,); receives the integers nearest to the clipped update.

    Returns:
        The norm of ``update``; NaN if an entry is not finite.

    Guarantees:
        The sum of squares of ``out`` is at most ``grid.norm`` squared, in integers, whatever
        ``update`` holds, also if its memory changes meanwhile. An update that is not finite
        becomes zeros: the client counts as absent.

    >>> import torch
    >>> grid = Grid.of(20, 1.0, 2, filter_charge=0.0)
    >>> whole = np.zeros(2, np.int32)
    >>> quantise(torch.tensor([0.75, 1.0]), 1.25, grid, whole), whole.tolist()
    (1.25, [629144, 838859])
    """
    clip_norm = at_least_tiny(clip_norm)
    norm = received = l2_norm(update)
    scale = 1 / grid.step(clip_norm)
    if not norm * scale < 2.0**60:  # far too long, or not finite
        update, received = clip_and_measure(update, clip_norm)
        norm = l2_norm(update)
        if math.isnan(norm):
            out[:] = 0
            return received
    factor = scale
    if norm * scale > grid.norm:
        # Rounding lengthens a vector by d/24 norms at the mean, and by less than 2 steps of chance.
        factor = grid.norm * (1 - (len(out) / 24 / grid.norm + 2) / grid.norm) / norm
    longest = math.floor(Fraction(grid.norm) ** 2)
    numbers = _numpy(update)
    for _ in range(_MOST_TURNS):
        if _round(numbers, factor, out) <= longest:
            return received
        # Rounding lengthens by half a step per coordinate at most: the next turn is the last one.
        factor *= max(0.0, 1 - max(math.sqrt(len(out)) / grid.norm, 2.0**-20))
    out[:] = 0  # somebody keeps changing the update
    return received


def _round(numbers: NDArray[Any], factor: float, out: NDArray[np.int32]) -> float:
    """Write the integers nearest to factor x numbers; return their sum of squares.

    Squares of integers that sum to less than 2^53 sum exactly in float64, in any order; of more,
    the sum can only come out too large to pass.
    """
    squares = 0.0
    nearest = np.empty(min(_PART, len(numbers)))
    for start in range(0, len(numbers), _PART):
        part = nearest[: len(numbers) - start]
        np.multiply(numbers[start : start + _PART], factor, out=part, dtype=np.float64)
        np.rint(part, out=part)
        squares += float(part @ part)
        with np.errstate(invalid="ignore"):  # too large for int32: the squares are as well
            np.copyto(out[start : start + _PART], part, casting="unsafe")
    return squares


def _numpy(update: Tensor) -> NDArray[Any]:
    wide = update if update.dtype.itemsize >= 4 else update.float()  # numpy has no bfloat16
    numbers: NDArray[Any] = wide.resolve_neg().numpy()
    return numbers
