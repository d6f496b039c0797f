"""The greatest convex function that lies nowhere above given points."""

import numpy as np
from numpy.typing import NDArray

from accounting.sensitivity import Array


def lower_hull(x: Array, y: Array) -> NDArray[np.int64]:
    """Return the indices of the points that it passes through, in one pass (Andrew 1979).

    Args:
        x: ascending, each once, shape (n,).
        y: shape (n,).

    >>> lower_hull(np.array([0.0, 1.0, 2.0, 3.0]), np.array([1.0, 0.9, 0.2, 0.0])).tolist()
    [0, 2, 3]
    """
    # Slopes are compared, because products of small differences would underflow.
    corners: list[int] = []
    slopes: list[float] = []
    across, up = x.tolist(), y.tolist()
    for i in range(len(across)):
        while corners:
            slope = (up[i] - up[corners[-1]]) / (across[i] - across[corners[-1]])
            if not slopes or slope > slopes[-1]:
                slopes.append(slope)
                break
            corners.pop()
            slopes.pop()
        corners.append(i)
    return np.array(corners)
