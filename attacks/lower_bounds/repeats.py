"""Repeats: whether independent noise occurs twice, and whether it is Gaussian.

``blocks`` are whitened noise of parts of a model, or of runs: arrays of shape (rounds, parameters)
that independent standard normal draws fill if the noise is sound. A copy is found wherever it is:

between blocks      every round of one with every round of the other, and all rounds together
inside a block      the noise at every distance of parameters, and its reversal about every point:
                    in each round, in all rounds together, and between rounds at every distance
                    of rounds, or reversed in time

A copy with its sign changed has the same size of correlation. Products are computed by FFT. The
product of two normal draws has mean 0 and variance 1; a mean of n of them is beyond the limit of
a normal distribution, raised by a tenth, less often than the level says if n >= 200 and the level
is above 1e-12 (Bernstein); means of fewer are not tested.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from attacks.lower_bounds.checks import Check

Array = NDArray[np.float64]
Block = tuple[str, Array]
_LEAST = 400  # products of which a mean is tested
_BINS = 32
_SMALL = 1e-4  # draws, in standard deviations, that count as missing noise
_EDGES = (2.5, 3.0, 3.5, 4.0, 4.5)  # standard deviations beyond which draws are counted
_MOST_PRODUCTS = 2 * 10**8  # rounds x rounds x parameters between rounds


def repeats(blocks: Sequence[Block], false_alarm: float) -> Check:
    """Return whether noise of these blocks repeats, also shifted, reversed or with another sign."""
    found: list[tuple[float, float, str]] = []  # size over its deviation, number of tests, where
    for (one, a), (other, b) in combinations(blocks, 2):
        found += _between(f"{one} and {other}", a, b)
    for name, block in blocks:
        found += _within(name, block)
    tests = sum(number for _, number, _ in found) or 1
    limit = float(stats.norm.isf(false_alarm / 2 / tests)) * 1.1
    faults = [f"Noise repeats: {where}." for size, _, where in found if size > limit]
    smallest = limit / math.sqrt(max((b.size for _, b in blocks), default=1))
    return Check(
        "noise that repeats",
        int(tests),
        false_alarm,
        f"copies, reversed, shifted or negated, of {min(1.0, smallest):.1%} of a block's draws",
        tuple(faults[:3]),
    )


def gaussian(blocks: Sequence[Block], false_alarm: float) -> Check:
    """Return whether whitened noise has a Gaussian's histogram and tails, and no missing draws."""
    values = np.concatenate([block.ravel() for _, block in blocks])
    edges = stats.norm.ppf(np.linspace(0, 1, _BINS + 1)[1:-1])
    counts = np.bincount(np.searchsorted(edges, values), minlength=_BINS)
    expected = len(values) / _BINS
    statistic = float(np.square(counts - expected).sum() / expected)
    faults = []
    # The approximation by chi-square is close for so many expected counts.
    if expected >= 50 and stats.chi2.sf(statistic, _BINS - 1) < false_alarm / 4:
        faults.append(
            f"Noise is not Gaussian: a histogram of {len(values):,} draws has a chi-square of "
            f"{statistic:.4g} for {_BINS - 1} degrees of freedom."
        )
    # The histogram says nothing of few draws, in its tails or around zero.
    sizes = np.abs(values)
    few = [(f"beyond {edge:g}", sizes > edge, 2 * stats.norm.sf(edge)) for edge in _EDGES]
    few.append((f"below {_SMALL:g}", sizes < _SMALL, 2 * _SMALL * stats.norm.pdf(0)))
    for where, those, chance in few:
        count, n = int(those.sum()), len(values)
        if min(stats.binom.sf(count - 1, n, chance), stats.binom.cdf(count, n, chance)) < (
            false_alarm / 8 / len(few)
        ):
            faults.append(
                f"Noise is not Gaussian: {count:,} of {n:,} draws are {where} standard deviations, "
                f"where {n * chance:,.0f} are expected."
            )
    sees = f"another distribution of {math.sqrt(80 / len(values)) / 2:.2%} of the draws"
    return Check("Gaussian noise", len(values), false_alarm, sees, tuple(faults))


def missing(
    noise: Array, tensors: Mapping[str, int], rounds: Sequence[int], false_alarm: float
) -> Check:
    """Return whether draws are missing in a tensor and a round.

    Args:
        noise: (T, d), each round's noise in its own standard deviations, before whitening.
        tensors: sizes, by name, of the tensors that the d parameters belong to, in order.
        rounds: numbers of the T rounds.
        false_alarm: probability, at most, that sound noise fails.
    """
    names = [name for name, size in tensors.items() if size]
    sizes = np.array([tensors[name] for name in names])
    starts = np.cumsum(sizes) - sizes
    counts = np.add.reduceat(np.abs(noise) < _SMALL, starts, axis=1, dtype=np.int64)
    chances = stats.binom.sf(counts - 1, sizes, 2 * _SMALL * stats.norm.pdf(0))
    faults = [
        f"{counts[t, k]} of {sizes[k]} draws of the noise of {names[k]} in round {rounds[t]} are "
        "missing."
        for t, k in np.argwhere(chances < false_alarm / counts.size)[:3]
    ]
    fewest = int(stats.binom.isf(false_alarm / counts.size, int(sizes.min()), _SMALL)) + 1
    sees = f"{fewest} missing draws of the smallest tensor in a round"
    return Check("noise of every tensor in every round", counts.size, false_alarm, sees, (*faults,))


def _between(names: str, a: Array, b: Array) -> Iterator[tuple[float, float, str]]:
    size = min(a.shape[1], b.shape[1])
    if size >= _LEAST:
        products = a[:, :size] @ b[:, :size].T / math.sqrt(size)
        t, s = np.unravel_index(int(np.abs(products).argmax()), products.shape)
        where = f"{names}, rounds {t} and {s}, correlation {products[t, s] / math.sqrt(size):.2f}"
        yield abs(float(products[t, s])), products.size, where
    rounds = min(len(a), len(b))
    if (number := rounds * size) >= _LEAST:
        total = float((a[:rounds, :size] * b[:rounds, :size]).sum()) / math.sqrt(number)
        where = f"{names} in all rounds, correlation {total / math.sqrt(number):.2f}"
        yield abs(total), 1, where


def _within(name: str, block: Array) -> Iterator[tuple[float, float, str]]:
    rounds, size = block.shape
    width = 2 * size
    spectra = np.fft.rfft(block, width)
    squares = np.square(np.abs(spectra))
    if size >= _LEAST:
        for t in range(rounds):
            yield from _peaks(f"{name}, round {t}", squares[t], spectra[t] ** 2, size, 1, itself=1)
    yield from _peaks(
        f"{name}, in each round", squares.sum(0), (spectra**2).sum(0), size, rounds, itself=rounds
    )
    mirrored = spectra[::-1][: rounds // 2]
    first = spectra[: rounds // 2]
    where = f"{name}, rounds in reverse"
    forward, backward = (first * mirrored.conj()).sum(0), (first * mirrored).sum(0)
    yield from _peaks(where, forward, backward, size, rounds // 2)
    columns = min(size, _MOST_PRODUCTS // rounds**2)
    if columns < size:
        spectra = np.fft.rfft(block[:, :columns], 2 * columns)
    for lag in range(1, rounds):
        one, other = spectra[lag:], spectra[:-lag]
        where = f"{name}, {lag} rounds apart"
        forward = np.einsum("ij,ij->j", one, other.conj())
        backward = np.einsum("ij,ij->j", one, other)
        yield from _peaks(where, forward, backward, columns, rounds - lag)


def _peaks(
    name: str, forward: Array, backward: Array, size: int, rounds: int, *, itself: int = 0
) -> Iterator[tuple[float, float, str]]:
    """Yield the largest correlation over all shifts, and over all reversals.

    ``itself`` is the number of rounds that are compared with themselves: shift 0 is then no
    repeat, and in a reversal every product of two draws occurs twice.
    """
    width = 2 * size
    for kind, spectrum in (("shifted", forward), ("reversed", backward)):
        sums = np.fft.irfft(spectrum, width)
        at = np.arange(width)
        overlap = np.where(at < size, size - at, at - size) if kind == "shifted" else None
        if overlap is None:
            overlap = np.minimum(at + 1, width - 1 - at)
        number = np.maximum(overlap, 0) * float(rounds)
        if itself and kind == "reversed":
            sums = sums - itself * (at % 2 == 0) * (at < width - 1)
            number = number * 2
        tested = number >= _LEAST
        if itself and kind == "shifted":
            tested &= (at > 0) & (at < size)
        if not tested.any():
            continue
        scaled = np.abs(sums[tested]) / np.sqrt(number[tested])
        best = int(scaled.argmax())
        place = int(at[tested][best])
        place = place - width if kind == "shifted" and place >= size else place
        correlation = float(scaled[best]) / math.sqrt(float(number[tested][best]))
        correlation *= 1 + bool(itself and kind == "reversed")
        where = f"{name}, {kind} by {place} parameters, correlation {correlation:.2f}"
        yield float(scaled[best]), float(tested.sum()), where


def low_bits(steps: Array, error: float, false_alarm: float) -> Check:
    """Return whether noise that is counted in whole steps uses all of its low-order bits.

    Noise in coarser steps than the sums leaves their low-order bits bare (Mironov 2012).

    Args:
        steps: noise in steps, of any shape; its deviation is 2^20 or more.
        error: steps, at most, by which rounding of a release changed a value.
        false_alarm: probability, at most, that sound noise fails.
    """
    faults = []
    periods = [2.0**k for k in range(4, 17) if 2.0**k >= 8 * error]
    expected = steps.size / 16
    for period in periods if expected >= 50 else ():
        # A Gaussian this wide is uniform modulo a period, to far more digits than are tested.
        bins = np.floor(np.mod(steps.ravel() / period, 1.0) * 16).astype(np.int64)
        counts = np.bincount(np.minimum(bins, 15), minlength=16)
        statistic = float(np.square(counts - expected).sum() / expected)
        if stats.chi2.sf(statistic, 15) < false_alarm / len(periods):
            faults.append(
                f"Noise modulo {period:g} steps of the grid is not uniform (chi-square "
                f"{statistic:.4g} for 15 degrees of freedom): low-order bits of the sum are bare."
            )
    sees = f"noise in steps of {max(16.0, 8 * error):.0f} or more of the grid's"
    return Check("low-order bits of the noise", steps.size, false_alarm, sees, tuple(faults[:1]))
