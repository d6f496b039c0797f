"""Evaluations: noised metrics that a run commits, each like a round, before anyone may see them.

An evaluation is of the model after the newest round, and is committed before the next one. Its
noise is fresh whenever a run is opened, so what a crash cut off is evaluated again under other
noise, and nobody saw the first.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accounting.checks import ConfigError
from accounting.metrics import Metrics
from privpart.messages import ClientId, id_order
from privpart.noise.metrics import MetricsRelease
from privpart.server import ANOTHER_SERVER, SERVER, is_unchanged, methods_of

_OWN = methods_of(MetricsRelease)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Noised metrics that were committed, of the model after a round."""

    round: int  # number of the round, from 0
    values: tuple[float, ...]  # noised mean of each metric, in the order of the plan's names
    clients: tuple[ClientId, ...]  # ids of the users who evaluated, each once
    noised_by: str  # "server", or whose code else clipped, summed and noised


def read_evaluation(
    values: Mapping[str, Any], rounds: int, before: Sequence[Evaluation]
) -> Evaluation:
    """Return the evaluation of a line of a ledger after so many rounds and these evaluations.

    Raises:
        ValueError: it has other values, or is not of the newest round, or that has one.
    """
    evaluation = Evaluation(**{**values, **{k: tuple(values[k]) for k in ("values", "clients")}})
    numbers = all(type(v) is float and math.isfinite(v) for v in evaluation.values)
    newest = type(evaluation.round) is int and evaluation.round == rounds - 1
    if not numbers or not newest or evaluation.round in {one.round for one in before[-1:]}:
        raise ValueError(f"metrics of round {evaluation.round!r}: no numbers, or out of place")
    return evaluation


def is_due(metrics: Metrics | None, rounds: int, done: Sequence[Evaluation]) -> bool:
    """Whether the model after so many rounds is to be evaluated before the next one."""
    if metrics is None or rounds - 1 not in metrics.rounds:
        return False
    return not done or done[-1].round != rounds - 1


def checked_evaluation(
    release: MetricsRelease,
    metrics: Metrics | None,
    rounds: int,
    done: Sequence[Evaluation],
    trained: Collection[ClientId],
) -> Evaluation:
    """Return what a release noised last, ready to be committed.

    Raises:
        ConfigError: it is not the evaluation that is due, or somebody in it has trained.
    """
    if metrics is None or not is_due(metrics, rounds, done):
        raise ConfigError("metrics: none are due after the newest committed round.")
    if (release.done, release.round) != (len(done) + 1, rounds - 1):
        raise ConfigError(
            f"metrics: are those of round {release.round}; must be the next ones that are due."
        )
    _refuse_both(metrics, release.clients, trained)
    return Evaluation(
        round=release.round,
        values=release.values,
        clients=tuple(sorted(release.clients, key=id_order)),
        noised_by=SERVER if is_unchanged(release, MetricsRelease, _OWN) else ANOTHER_SERVER,
    )


def refuse_before(
    metrics: Metrics, rounds: int, done: Sequence[Evaluation], cohort: Collection[ClientId]
) -> None:
    """Refuse a round while an evaluation is due, or with somebody who evaluates."""
    if is_due(metrics, rounds, done):
        raise ConfigError(
            f"the metrics after round {rounds - 1} are not committed: evaluate its model, and pass "
            "the MetricsRelease to commit_metrics, before the next round."
        )
    _refuse_both(metrics, {client for evaluation in done for client in evaluation.clients}, cohort)


def _refuse_both(
    metrics: Metrics, evaluate: Collection[ClientId], train: Collection[ClientId]
) -> None:
    """Check that nobody pays for training and for metrics, unless the plan counts both."""
    both = () if metrics.also_train else sorted({*evaluate}.intersection(train), key=id_order)
    if both:
        raise ConfigError(
            f"client {both[0]!r}: evaluates and trains, and this plan counts only the larger of "
            "the two costs. Nothing was released."
        )
