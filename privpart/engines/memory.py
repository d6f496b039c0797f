"""Clients with a memory: each keeps its own last model, or a local part, from round to round.

MOON compares a client's model with its own last one, and a model's local part trains on the client
and never leaves it. Both stay in memory: on disk they would be what nobody clipped or noised.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from privpart.client import client_update
from privpart.data.batches import Batch
from privpart.data.clients import Clients
from privpart.data.users import Users
from privpart.engines.methods import client_generator, fetched, naming, unwritten
from privpart.messages import ClientId, ClientUpdate, RoundTask
from privpart.model import PartialModel
from privpart.settings.client import LocalTraining


class ClientsWithMemory:
    """Computes one client after another, in this process.

    Args:
        model: shared by all clients; its trained part and its local part are overwritten.
        clients: the clients' data.
        data_seed: order of examples, as for ``LocalComputation``.
        report: called with a sentence if what the clients kept was lost.

    Attributes:
        parts: the local part that each client kept, shape (l,).
    """

    def __init__(
        self,
        model: PartialModel,
        clients: Users | Clients,
        data_seed: int,
        report: Callable[[str], None],
    ) -> None:
        self._model = model
        self._clients = clients
        self._data_seed = data_seed
        self._report = report
        self._previous: dict[ClientId, Tensor] = {}
        self.parts: dict[ClientId, Tensor] = {}
        self._began = False

    def run(self, task: RoundTask, start: Tensor, local: LocalTraining) -> Iterator[ClientUpdate]:
        """Yield each client's clipped update, shape (c,), in the order of the task."""
        moon, keeps_part = local.objective == "moon", self._model.own.numel() > 0
        if task.round and not self._began:
            whose = "moon's clients" if moon else "clients"
            lost = ["the last models"] * moon + ["the local parts"] * keeps_part
            self._report(
                f"engine: begins with round {task.round}, so {whose} have lost "
                f"{' and '.join(lost)} that they kept. From here on the run differs from an "
                "uninterrupted one; its guarantee is the same"
            )
        self._began = True
        now: dict[ClientId, Tensor] = {}
        parts: dict[ClientId, Tensor] = {}
        with unwritten(self._model):
            for client in task.clients:
                generator = client_generator(self._data_seed, task.round, client)
                examples = self._examples(client, generator)
                if moon:
                    now[client] = self._previous.get(client, start).clone()
                if keeps_part:
                    parts[client] = self.parts.get(client, self._model.own_start).clone()
                with naming(client):
                    update = client_update(
                        self._model,
                        start,
                        examples,
                        local=local,
                        clip_norm=task.clip_norm,
                        generator=generator,
                        active=task.active,
                        previous=now.get(client),
                        own=parts.get(client),
                    )
                yield task.update(client, update)
        # Only after the last client, because a round that was interrupted may be run again. What
        # diverged is not kept: it would make every later update of its client non-finite.
        self._previous |= {
            client: vector for client, vector in now.items() if vector.isfinite().all()
        }
        self.parts |= {
            client: vector for client, vector in parts.items() if vector.isfinite().all()
        }

    def _examples(self, client: ClientId, generator: torch.Generator) -> Batch:
        if isinstance(self._clients, Users):
            return self._clients.examples(client)
        return fetched(self._clients, client, generator)
