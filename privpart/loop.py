"""Loop: the only round loop, ``fit``.

The accountant is silent in here: the guarantee follows from the plan, which the server enforces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from accounting.checks import ConfigError
from privpart.engine import Engine
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


def fit(
    server: Server,
    engine: Engine,
    cohorts: Sequence[Sequence[int]],
    *,
    evaluate: Callable[[Tensor], float] | None = None,
    evaluate_every: int | None = None,
    callbacks: Sequence[Callable[[RoundRecord], None]] = (),
) -> list[RoundRecord]:
    """Run one round per cohort and return a record of each.

    Args:
        server: owns the model, the noise and the limits.
        engine: runs the clients.
        cohorts: client ids per round; chosen without looking at data. At most the planned rounds.
        evaluate: of the trainable part, shape (d,); on public data, for it is not accounted.
        evaluate_every: rounds between evaluations; None evaluates after the last round only.
        callbacks: called after each round, in order.
    """
    left = server.plan.mechanism.rounds - server.round
    if len(cohorts) > left:
        raise ConfigError(f"{len(cohorts)} cohorts, but the plan has {left} rounds left.")
    records = []
    for number, cohort in enumerate(cohorts, start=1):
        counts = server.run_round(engine.run(server.round, cohort, server.parameters))
        due = number == len(cohorts) or (evaluate_every and number % evaluate_every == 0)
        metric = evaluate(server.parameters) if evaluate is not None and due else None
        record = RoundRecord(server.round - 1, counts, metric)
        records.append(record)
        for callback in callbacks:
            callback(record)
    return records
