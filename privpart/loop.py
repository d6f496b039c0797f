"""Loop: the only round loop, ``fit``.

The accountant is silent in here: the guarantee follows from the plan, which the server enforces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from accounting.checks import ConfigError
from privpart.engine import Engine, SummingEngine
from privpart.messages import RoundTask
from privpart.server import RoundCounts, Server


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One finished round.

    Attributes:
        round: from 0.
        counts: received, counted and refused updates; not covered by the guarantee.
        metric: what ``evaluate`` returned, if it ran.
    """

    round: int
    counts: RoundCounts
    metric: float | None


class CohortTooSmallError(RuntimeError):
    """A round had fewer well-formed updates than the plan's minimum; nothing was released.

    The server stands where it stood before: ``fit`` may be called again.
    """


def fit(
    server: Server,
    engine: Engine,
    cohorts: Sequence[Sequence[int]],
    *,
    commit: Callable[[Server, RoundCounts], None] | None = None,
    evaluate: Callable[[Tensor], float] | None = None,
    evaluate_every: int | None = None,
    callbacks: Sequence[Callable[[RoundRecord], None]] = (),
) -> list[RoundRecord]:
    """Run the rounds from ``server.round`` to the last cohort and return a record of each.

    Args:
        server: owns the model, the noise and the limits.
        engine: runs the clients.
        cohorts: per round, counted from round 0 also when a run is resumed, the ids of the clients
            to ask; chosen without looking at data. Those whose limit is reached are not asked.
        commit: makes a round durable, as ``RunFolder.commit``. Called before anything else, here
            or outside, sees the round's model.
        evaluate: of the trainable part, shape (d,); on public data, for it is not accounted.
        evaluate_every: rounds between evaluations; None evaluates after the last round only.
        callbacks: called after each round, in order.

    Raises:
        ConfigError: more cohorts than planned rounds.
        CohortTooSmallError: see there.
    """
    if len(cohorts) > server.plan.rounds:
        raise ConfigError(f"{len(cohorts)} cohorts, but the plan has {server.plan.rounds} rounds.")
    records = []
    for number in range(server.round, len(cohorts)):
        task = server.task(server.eligible(cohorts[number]))
        try:
            counts = _run_round(server, engine, task)
            if counts.released and commit is not None:
                commit(server, counts)
        except BaseException as error:
            if server.round != number:  # else nothing was drawn, and the round may be tried again
                server.halt(f"round {number} was not committed ({type(error).__name__})")
            raise
        if not counts.released:
            raise CohortTooSmallError(
                f"round {number}: fewer than {server.plan.minimum_cohort} well-formed updates "
                f"among the {counts.received} that came. Nothing was released; try again later."
            )
        due = number + 1 == len(cohorts) or (evaluate_every and (number + 1) % evaluate_every == 0)
        metric = evaluate(server.parameters) if evaluate is not None and due else None
        record = RoundRecord(number, counts, metric)
        records.append(record)
        for callback in callbacks:
            callback(record)
    return records


def _run_round(server: Server, engine: Engine, task: RoundTask) -> RoundCounts:
    if isinstance(engine, SummingEngine):
        sums = engine.sums(task, server.parameters)
        if sums is not None:
            return server.run_round((), sums=sums)
    return server.run_round(engine.run(task, server.parameters))
