"""Fork: the honest way on from a run that cannot be continued, at the cost of both."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from accounting.checks import ConfigError
from privpart.plan import PrivacyPlan
from privpart.run.files import read_state
from privpart.run.folder import RunFolder, locked, state_name
from privpart.run.ledger import Ledger
from privpart.run.report import run_report
from privpart.select.disclosure import merge_seen


def fork(
    old: str | Path, new: str | Path, plan: PrivacyPlan, *, facts: dict[str, Any] | None = None
) -> RunFolder:
    """Begin a new run from the last committed model of an old one, with a new key.

    The old run may be an older copy, or have lost its key. Its whole plan is charged, whatever
    part of it was run: rounds after the copy was taken are covered as well. The new run's report
    adds that cost to its own, mu^2 by mu^2, and repeats what nobody checked about the old one, and
    what was seen in it.

    Raises:
        ConfigError: the old run was not private, left its plan, has no committed state, is
            damaged, or is open.
    """
    folder = Path(old)
    lock = locked(folder)
    try:
        before = run_report(folder, delta=0.5).guarantee  # for mu, which does not depend on delta
        if before.noise_source != "os":
            raise ConfigError(f"{old} was not private: its noise is seeded, its cost unbounded.")
        if before.status == "does-not-hold":
            raise ConfigError(f"{old} left its plan: its cost has no bound to add.")
        ledger = Ledger(folder / "ledger.sqlite", read_only=True)
        rows = ledger.rows()
        ledger.close()
        if not rows:
            raise ConfigError(f"{old} has no committed round to go on from: begin a new run.")
        tensors, _ = read_state(folder / state_name(len(rows)), rows[-1].state)
    finally:
        lock.release()
    open_ones = [asdict(a) for a in before.assumptions if a.status in ("asserted", "violated")]
    about = {"earlier_mu": before.mu, "fork_of": ledger.facts["run_id"], "inherited": open_ones}
    said = facts or {}
    if taken := sorted(said.keys() & about.keys()):
        raise ConfigError(f"facts: {', '.join(taken)} are the fork's own; choose other names.")
    if said.get("rest") != ledger.facts.get("rest"):
        raise ConfigError(
            f"{old} is of another model: its numbers would mean something else beside this plan's "
            "frozen part, or in its order of slices. Fork it under the same table [model] and, if "
            "slices take turns, the same number of rounds and shared keys."
        )
    seen = merge_seen(ledger.facts.get("seen_in_clear"), said.get("seen_in_clear"))
    about = {**said, **about, "seen_in_clear": seen}
    return RunFolder.create(new, plan, facts=about, start=tensors["parameters"])
