"""Clip: the one place where the length of a client's update is bounded.

For every input the result is finite and at most ``clip_norm`` long; the sensitivity of everything
downstream rests on this.

Norms and sums are computed in float64, a part of the vector at a time. torch widens a whole float32
vector before it sums it in float64; part by part, the wide copy stays in the cache, and the norm of
10 million entries takes a seventh of the time.
"""

import math

import torch
from torch import Tensor

from privpart.settings.ranges import at_least_tiny

# Scaling rounds each coordinate, and the factor itself, by up to 2^-24 relatively in float32.
_MARGIN = 1 - 2.0**-22
_REACHED = 1 - 1e-5
# Below 2^-126 float32 would round the factor itself by far more, and updates would be too long.
_LEAST_FACTOR = 2.0**-100


def clip(update: Tensor, clip_norm: float) -> Tensor:
    """Return ``update`` scaled down, jointly over all coordinates, to at most ``clip_norm``.

    Args:
        update: shape (d,), floating point.
        clip_norm: >= 1e-30 and finite.

    Returns:
        Shape (d,), float64 if ``update`` is, else float32.

    Guarantees:
        ============================  =========================================
        update                        result
        ============================  =========================================
        NaN or infinity anywhere      zero: the client counts as absent
        norm <= clip_norm             unchanged
        norm > clip_norm              same direction, norm in clip_norm (1 - 2^-21, 1]
        zero or empty                 unchanged
        ============================  =========================================

    >>> clip(torch.tensor([3.0, 4.0]), 1.0).norm() <= 1
    tensor(True)
    """
    clipped, norm = clip_and_measure(update, clip_norm)
    return clipped.zero_() if math.isnan(norm) else clipped


def clip_and_measure(
    update: Tensor, clip_norm: float, *, out: Tensor | None = None
) -> tuple[Tensor, float]:
    """Return what ``clip`` does, and the norm of ``update``: all NaN if an entry is not finite.

    The result may be written to ``out``, which may be ``update`` itself.
    """
    clip_norm = at_least_tiny(clip_norm)
    if update.dtype is not torch.float64:
        update = update.float()
    norm = before = l2_norm(update)
    if norm <= clip_norm:
        return update, before
    if not clip_norm / norm >= _LEAST_FACTOR:
        # Too long for one factor: shorten it first to coordinates of at most 1, in a copy, which no
        # other thread writes to. What is not finite, or only zeros by now, becomes NaN.
        update = update.clone()
        update.div_(update.abs().max())
        norm = l2_norm(update)
        if not math.isfinite(norm):
            return torch.full_like(update, math.nan), math.nan
    return torch.mul(update, clip_norm / norm * _MARGIN, out=out), before


def clip_rows(updates: Tensor, clip_norm: float) -> list[float]:
    """Clip each row as ``clip`` does, in place, on the device of the rows, which must have float64.

    Args:
        updates: shape (k, d), float32.
        clip_norm: as for ``clip``.

    Returns:
        The norm of each row before clipping; NaN if an entry was not finite. Reading them is the
        only time that this waits for the device.
    """
    clip_norm = at_least_tiny(clip_norm)
    some = max(1, _WIDE // max(1, updates.shape[1]))
    parts = torch.split(updates, some)
    norms = torch.cat([torch.linalg.vector_norm(p, dim=1, dtype=torch.float64) for p in parts])
    before: list[float] = norms.cpu().tolist()
    for place, norm in enumerate(before):
        if not (norm <= clip_norm or clip_norm / norm >= _LEAST_FACTOR):  # also if it is NaN
            clipped, before[place] = clip_and_measure(updates[place].cpu(), clip_norm)
            updates[place].copy_(clipped.nan_to_num_())
            norms[place] = 0.0
    updates.mul_(factors(norms, clip_norm).float().unsqueeze(1))
    return before


def factors(norms: Tensor, clip_norm: float) -> Tensor:
    """Return the factors by which ``clip`` would multiply k vectors, from their norms alone.

    Args:
        norms: upper bounds on the vectors' norms, shape (k,), float64.
        clip_norm: as for ``clip``.

    Guarantees:
        ``factors(norms, c) * norms <= c``, with room for the rounding of float64 sums; zero where a
        norm is NaN or infinite.
    """
    clip_norm = at_least_tiny(clip_norm)
    shorter = torch.where(norms <= clip_norm, 1.0, clip_norm / norms * _MARGIN)
    return torch.where(norms.isfinite(), shorter, 0.0)


def is_clipped(norm: float, clip_norm: float) -> bool:
    """Return whether an update counts as clipped, by its norm before or after ``clip``.

    One that reaches the clip norm does. ``clip`` leaves it up to 2^-21 shorter than that, and ways
    to compute one update differ by some roundings, so the line is drawn 1e-5 below the clip norm.
    An update that is not finite, whose norm is NaN, counts as zeros.

    >>> [is_clipped(norm, 0.5) for norm in (0.0, 0.4999, 0.5 * (1 - 2**-21), 0.5, 9.0, math.nan)]
    [False, False, True, True, True, False]
    """
    return norm >= clip_norm * _REACHED


_PART = 2**16
_WIDE = 2**25
"""Numbers that are widened to float64 at once on an accelerator: torch writes the wide copy."""


def l2_norm(vector: Tensor) -> float:
    """Return the L2 norm of a vector, shape (d,); NaN or infinity if an entry is."""
    norms = (torch.linalg.vector_norm(p, dtype=torch.float64) for p in torch.split(vector, _PART))
    return math.hypot(*map(float, norms))


def add_in_place(total: Tensor, vector: Tensor) -> None:
    """Add a vector to a float64 total, both of shape (d,)."""
    for to, part in zip(torch.split(total, _PART), torch.split(vector, _PART), strict=True):
        to.add_(part)
