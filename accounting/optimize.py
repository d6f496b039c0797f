"""Optimise: the encoder of a kind with the least error of the models, for a participation.

Least ``accounting.error``, so at equal cost to the client. float64, L-BFGS-B; nothing is random.
The fit is an ordinary mechanism: its sensitivity is computed anew from the coefficients it has.
"""

from typing import Literal, get_args

from accounting import checks
from accounting.checks import ConfigError
from accounting.mechanisms import Mechanism
from accounting.mechanisms.banded_inverse import fit_banded_inverse
from accounting.mechanisms.buffered_toeplitz import fit_blt
from accounting.mechanisms.dense import fit_dense
from accounting.mechanisms.toeplitz import Objective, fit_toeplitz
from accounting.participation import Participation
from accounting.workload import PREFIX, Workload

Kind = Literal["blt", "toeplitz", "banded-inverse", "dense"]


def optimize(
    kind: Kind,
    participation: Participation,
    *,
    objective: Objective = "rmse",
    buffers: int | None = None,
    bands: int | None = None,
    workload: Workload = PREFIX,
) -> Mechanism:
    """Return the best encoder of a kind.

    Args:
        kind: "blt" (a few buffers), "toeplitz" (non-increasing coefficients), "banded-inverse" (no
            state, a few draws), or "dense" (the optimum over all matrices: rmse and one
            participation only, O(n^3), for reference).
        participation: rounds, and how often one client may take part.
        objective: "rmse", the root mean squared error over the models, or "max", the largest.
        buffers: for "blt": at most this many, 1 to 5; None is 3.
        workload: whose models get the least error; by default prefix sums, of plain SGD. Rates that
            change are for "dense" only.
        bands: for "toeplitz": number of coefficients, 1 .. rounds; None is all of them. For
            "banded-inverse": draws per round.

    >>> fit = optimize("blt", Participation(64), buffers=2)
    >>> fit.sensitivity(Participation(64)).exact
    True
    """
    checks.choice("kind", kind, get_args(Kind))
    checks.choice("objective", objective, get_args(Objective))
    if buffers is not None and kind != "blt":
        raise ConfigError(f"buffers={buffers}: only kind='blt' has buffers.")
    if bands is not None and kind not in ("toeplitz", "banded-inverse"):
        raise ConfigError(f"bands={bands}: only kind='toeplitz' and 'banded-inverse' have bands.")
    if kind == "blt":
        return fit_blt(participation, buffers, objective, workload)
    if kind == "toeplitz":
        return fit_toeplitz(participation, bands, objective, workload)
    if kind == "banded-inverse":
        return fit_banded_inverse(participation, bands, objective, workload)
    if objective != "rmse":
        raise ConfigError(f"objective={objective!r}: the dense optimum is for 'rmse'.")
    return fit_dense(participation, workload)
