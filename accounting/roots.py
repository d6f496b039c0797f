"""The root of a monotone function of one number, rounded to the side where it holds.

To load scipy.optimize takes longer than everything else that a command does.
"""

from collections.abc import Callable

_UNITS = 2.0**-50  # a few units in the last place


def safe_root(
    excess: Callable[[float], float], *, infeasible: float, feasible: float, close: float = _UNITS
) -> float:
    """Return a feasible point within about ``close``, relatively, of the root of ``excess``.

    Args:
        excess: above 0 where a point is infeasible, at most 0 where it is feasible; finite.
        infeasible: a point on the one side of the root.
        feasible: a point on the other, greater or smaller.
        close: how far from the root the point may be, as a part of it.

    >>> safe_root(lambda x: 2 - x * x, infeasible=0.0, feasible=2.0) ** 2 >= 2
    True
    """
    root = _root(excess, infeasible, feasible, close)
    step = abs(root) * close * (1 if feasible > infeasible else -1)
    while excess(root) > 0:
        root, step = root + step, 2 * step
    return root


def _root(f: Callable[[float], float], a: float, b: float, close: float) -> float:
    """Return the root of ``f`` between a and b, where it has opposite signs (Chandrupatla 1997).

    Inverse quadratic interpolation where that is safe, else bisection.
    """
    fa, fb = f(a), f(b)
    c, fc, step = a, fa, 0.5
    while fa and fb:
        x = a + step * (b - a)
        fx = f(x)
        c, fc = a, fa
        if (fx > 0) != (fa > 0):  # the root is between x and a, which becomes the other end
            c, fc, b, fb = b, fb, a, fa
        a, fa = x, fx
        nearest = a if abs(fa) < abs(fb) else b
        shortest = (close * abs(nearest) + 1e-300) / abs(b - a)
        if shortest > 0.5:
            return nearest
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        step = 0.5
        if phi * phi < xi and (1 - phi) ** 2 < 1 - xi:
            step = fa / (fb - fa) * fc / (fb - fc)
            step += (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        step = min(1 - shortest, max(shortest, step))
    return b if fa else a
