"""Fork: the honest way on from a run that cannot be continued, at the cost of both."""

from pathlib import Path
from typing import Any

from accounting.checks import ConfigError
from privpart import state_file
from privpart.plan import PrivacyPlan
from privpart.run_folder import RunFolder
from privpart.run_report import run_report


def fork(
    old: str | Path, new: str | Path, plan: PrivacyPlan, *, facts: dict[str, Any] | None = None
) -> RunFolder:
    """Begin a new run from the model of an old one, with a new key.

    The old run may be an older copy, have lost its key, or have left nothing but its ledger and
    its state. Its whole plan is charged, whatever part of it was run: rounds after the copy was
    taken are covered as well. The new run's report adds that cost to its own, mu^2 by mu^2.

    Raises:
        ConfigError: the old run was not private, left its plan, has no state, or is damaged.
    """
    before = run_report(old, delta=0.5)  # for mu, which does not depend on delta
    if before.guarantee.noise_source != "os":
        raise ConfigError(f"{old} was not private: its noise is seeded, so its cost is unbounded.")
    if before.deviations:
        raise ConfigError(
            f"{old} left its plan ({'; '.join(before.deviations)}): its cost has no bound to add."
        )
    tensors, _ = state_file.newest(Path(old))
    about = {"earlier_mu": before.guarantee.mu, "fork_of": before.run_id, **(facts or {})}
    return RunFolder.create(new, plan, facts=about, start=tensors["parameters"])
