"""Fork: a new run that starts from a run that cannot be continued, charged for both."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from accounting import PrivacyReport
from accounting.checks import ConfigError
from privpart.plan import PrivacyPlan
from privpart.run.folder import RunFolder, create_run, locked
from privpart.run.ledger import Ledger
from privpart.run.report import run_report
from privpart.run.store import read_state
from privpart.select.delivery import merge_seen


def fork(
    old: str | Path, new: str | Path, plan: PrivacyPlan, *, facts: dict[str, Any] | None = None
) -> RunFolder:
    """Begin a new run from the last committed model of an old one, with a new key.

    The old run may be an older copy, or have lost its key. Its whole plan is charged, however much
    of it was run, so rounds that were run after the copy was taken are covered too. The new run's
    report adds that cost to its own, as mu^2, and repeats the old run's unchecked assumptions and
    what was seen in the clear. It is about the population of the old run unless ``facts`` say
    otherwise, and the budget book counts the old run there, too.

    Args:
        old: folder of the old run.
        new: folder of the new run; it must not exist yet or be empty.
        plan: plan of the new run.
        facts: further values to keep in the new ledger, ready for JSON.

    Raises:
        ConfigError: a plan samples; the old run was not private, left its plan, has another model,
            has no committed state, is damaged, or is open; or a fact has a reserved name.
        BudgetExceededError: the new run would pass the limit of its population.
    """
    if plan.sampling is not None:
        raise ConfigError(
            "sampling: an amplified epsilon does not compose with that of the old run; fork under "
            "a plan without sampling."
        )
    before, was, start = _forked(Path(old))
    # The new run starts from that model, so what was open about it stays open.
    open_ones = [asdict(a) for a in before.assumptions if a.status in ("asserted", "violated")]
    about = {"earlier_mu": before.mu, "fork_of": was["run_id"], "inherited": open_ones}
    given = facts or {}
    if taken := sorted(given.keys() & about.keys()):
        raise ConfigError(f"facts: {', '.join(taken)} are the fork's own names. Choose others.")
    # The fact "rest" is the hash of the frozen part and of the order of slices.
    if given.get("rest") != was.get("rest"):
        raise ConfigError(
            f"{old} is of another model: its trained parameters do not fit this plan's frozen part "
            "or order of slices. Use the same table [model] and, if slices take turns, the same "
            "number of rounds and shared keys."
        )
    population = given.get("population_name", was.get("population_name"))
    if population is not None:
        about["population_name"] = population
    # What was seen of the old run's clients cannot be unseen.
    sightings = [seen for facts in (was, given) if (seen := facts.get("seen_in_clear"))]
    disclosed = merge_seen(*sightings) if sightings else None
    about = {**given, **about, "seen_in_clear": disclosed}
    return create_run(new, plan, facts=about, start=start)


def _forked(old: Path) -> tuple[PrivacyReport, dict[str, Any], Tensor]:
    """Return report, facts and released parameters of the run to start from."""
    # While its state is read, nobody may commit another round of it.
    lock = locked(old)
    try:
        # For mu, which does not depend on delta.
        before = run_report(old, delta=0.5).guarantee
        broken = "; ".join(a.evidence for a in before.assumptions if a.status == "violated")
        unfit = {
            "is a run on examples; a fork adds costs of clients": before.unit != "client",
            "was not private: its noise is seeded, so its cost has no bound": (
                before.noise_source != "os"
            ),
            f"its guarantee does not hold ({broken}), so its cost has no bound that could be "
            "added": before.status == "does-not-hold",
            "samples who takes part: it is never forked. Begin a new run": (
                before.sampling is not None
            ),
        }
        for why, applies in unfit.items():
            if applies:
                raise ConfigError(f"{old}: {why}.")
        ledger = Ledger(old)
        # Called for its checks of chain and signature.
        ledger.rows()
        name, expected = ledger.newest()
        tensors, _ = read_state(old / name, expected)
    finally:
        lock.release()
    return before, ledger.facts, tensors["parameters"]
