"""Rounding: when two results of one computation count as the same.

The last bits of a result depend on the processor, on the number of threads, and on a row's place
and company in its batch: a sum has other bits in another order. So no choice of an audit may rest
on them. Results are compared to half of their digits, ``sqrt(eps)`` of their type: the operations
of a deep network cost a few of the last digits, and what one input does to another is far greater.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

HALF = torch.finfo(torch.float64).eps ** 0.5
RANK = 1e-6  # singular values below this, relative to the largest, are rounding of float32
NOTHING = HALF**2  # a relative squared distance at or below it is none


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Return where two tensors differ by more than rounding, relative to their greatest entry.

    >>> differs(torch.tensor([0.3, 0.3]), torch.tensor([0.1 + 0.2, 0.31]))
    tensor([False,  True])
    """
    gap, scale = (a - b).abs(), max(float(x.abs().max()) for x in (a, b))
    alike: Tensor = gap <= torch.finfo(a.dtype).eps ** 0.5 * scale
    return ~alike  # NaN differs from everything


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have one shape, and equal values up to rounding."""
    return a.shape == b.shape and not bool(differs(a, b).any())


def less(a: float, b: float, floor: float = NOTHING) -> bool:
    """Return whether a is below b by more than rounding; residuals below the floor are equal.

    >>> less(0.1, 0.2), less(0.3, 0.1 + 0.2), less(1e-32, 1e-30)
    (True, False, False)
    """
    a, b = max(a, floor), max(b, floor)
    return a < b and not math.isclose(a, b, rel_tol=HALF)


def first_least(values: Sequence[float], floor: float = NOTHING) -> int:
    """Return the position of the first value that only rounding tells from the least.

    >>> first_least([1.0, 0.3, 0.1 + 0.2, 0.3 - 1e-12])
    1
    """
    smallest = min(values)
    return next(i for i, value in enumerate(values) if not less(smallest, value, floor))
