"""Engine: carries a round's work to the clients and brings their updates back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from accounting import checks
from privpart.client import LocalTraining, client_update
from privpart.messages import ClientUpdate, RoundTask
from privpart.partial import PartialModel


class Engine(Protocol):
    """Runs clients, wherever they are."""

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the task that trained from ``start``, shape (d,)."""
        ...


@dataclass(frozen=True, slots=True)
class Users:
    """Examples and who holds which.

    Attributes:
        x: all examples, shape (n, ...).
        y: their classes, shape (n,).
        indices: per user, the rows that are theirs.
    """

    x: Tensor
    y: Tensor
    indices: Sequence[Tensor]

    def __len__(self) -> int:
        return len(self.indices)


class EmbeddedEngine:
    """Simulated clients, one after another, in this process.

    Args:
        model: shared by all clients; rebuilt part and trained part as in ``PartialModel``.
        users: the clients' data.
        local: how each trains.
        data_seed: order of examples; each (round, client) has its own generator, so the result
            does not depend on the order in which clients run.
    """

    def __init__(
        self,
        model: PartialModel,
        users: Users,
        *,
        local: LocalTraining,
        data_seed: int,
    ) -> None:
        self.model = model
        self.users = users
        self.local = local
        self._previous: dict[int, Tensor] = {}  # of "moon": what each device keeps to itself
        self.data_seed = checks.count("data_seed", data_seed, minimum=0)

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield each client's clipped update, shape (d,)."""
        for client in task.clients:
            rows = self.users.indices[client]
            delta = client_update(
                self.model,
                start,
                self.users.x[rows],
                self.users.y[rows],
                local=self.local,
                clip_norm=task.clip_norm,
                generator=self._generator(task.round, client),
                active=task.active,
                previous=self._previous.get(client),
            )
            if self.local.objective == "moon":
                self._previous[client] = self.model.flat.clone()
            yield task.update(client, delta)

    def _generator(self, round_: int, client: int) -> torch.Generator:
        address = np.random.SeedSequence((self.data_seed, round_, client)).generate_state(1)
        return torch.Generator().manual_seed(int(address[0]))
