"""Canaries: clients that an auditor made up, in the cohorts of a run.

A canary's update is a direction of the auditor's choice instead of training. It goes through the
server: its messages, clip, limits and divisor, one update per client. Where an engine of this
package hands over sums, it clips and sums the canaries as its clients; over a network, a node of
the auditor's answers for them. Which canaries there are,
and which of them take part by a secret coin, is up to whoever implements ``CanaryClients``; the
audit compares the released models of those that took part with those that did not.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from accounting.checks import ConfigError
from privpart.data.clients import RemoteClients
from privpart.messages import ClientId, ClientUpdate, RoundTask


class CanaryClients(Protocol):
    """Clients of an auditor, and what the auditor reads from a released model.

    ``width`` is the number of directions; ``ids`` are those of all canaries, also of absent ones.
    """

    @property
    def width(self) -> int: ...  # noqa: D102

    @property
    def ids(self) -> Sequence[ClientId]: ...  # noqa: D102

    def clients(self, round_: int) -> Sequence[ClientId]:
        """Return the ids of the canaries that take part in a round; an absent one sends nothing."""
        ...

    def update(self, client: ClientId, round_: int, clip_norm: float) -> Tensor:
        """Return a canary's update, shape (c,) for the c active parameters, float32.

        The tensor may be overwritten by the next call.
        """
        ...

    def project(self, parameters: Tensor) -> Tensor:
        """Return the products of a model, shape (d,), with all directions: (width,), float64."""
        ...


def others_and_canaries(
    task: RoundTask, canaries: CanaryClients
) -> tuple[RoundTask, Iterator[ClientUpdate]]:
    """Return the task of the other clients, and the updates of the canaries that it asks."""
    planted, asked = canaries.clients(task.round), set(task.clients)
    others = tuple(client for client in task.clients if client not in set(planted))
    updates = (
        task.update(client, canaries.update(client, task.round, task.clip_norm))
        for client in planted
        if client in asked
    )
    return replace(task, clients=others), updates


def cohorts_with_canaries(
    cohorts: Sequence[Sequence[ClientId]], canaries: CanaryClients
) -> list[list[ClientId]]:
    """Return the cohorts of a run with the canaries that take part in each round.

    Raises:
        ConfigError: a client of a cohort has the id of a canary.
    """
    refuse_same_ids({client for cohort in cohorts for client in cohort}, canaries)
    planted = [canaries.clients(round_) for round_ in range(len(cohorts))]
    return [[*cohort, *planted_ids] for cohort, planted_ids in zip(cohorts, planted, strict=True)]


def refuse_same_ids(clients: Iterable[ClientId], canaries: CanaryClients) -> None:
    """Check that no client has the id of a canary, whether the canary is present or absent.

    Raises:
        ConfigError: one has.
    """
    ids = set(canaries.ids)
    if (taken := next((client for client in clients if client in ids), None)) is not None:
        raise ConfigError(
            f"canaries: a client has the id {taken!r}, which is a canary's. Rename it."
        )


class CanaryEngine:
    """Answers for canaries on a node of the auditor's; the server knows which of them to ask.

    The node needs nothing secret: directions and rounds are public, only the coins are not.
    """

    def __init__(self, canaries: CanaryClients) -> None:
        self._canaries = canaries
        self.clients = RemoteClients(canaries.ids)
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> "CanaryEngine":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield the updates of the canaries that a task asks for, whatever the model is.

        Raises:
            ConfigError: one of them does not take part in this round.
        """
        for client in task.clients:
            update = self._canaries.update(client, task.round, task.clip_norm)
            yield task.update(client, update.clone())
