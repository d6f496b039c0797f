"""MOON clients: each keeps its own last model from round to round.

Those models stay in memory. On disk they would be updates that nobody clipped or noised.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from privpart.client import LocalTraining, client_update
from privpart.data.users import Users
from privpart.engines.methods import client_generator
from privpart.messages import ClientUpdate, RoundTask
from privpart.model import PartialModel


class MoonClients:
    """Computes one client after another, in this process.

    Args:
        model: shared by all clients; its trained part is overwritten.
        users: the clients' data.
        data_seed: order of examples, as for ``LocalComputation``.
        report: called with a sentence if the clients' last models were lost.
    """

    def __init__(
        self, model: PartialModel, users: Users, data_seed: int, report: Callable[[str], None]
    ) -> None:
        self._model = model
        self._users = users
        self._data_seed = data_seed
        self._report = report
        self._previous: dict[int, Tensor] = {}

    @property
    def empty(self) -> bool:
        """Whether no client has taken part yet."""
        return not self._previous

    def run(self, task: RoundTask, start: Tensor, local: LocalTraining) -> Iterator[ClientUpdate]:
        """Yield each client's clipped update, shape (d,), in the order of the task."""
        if self.empty and task.round:
            self._report(
                f"engine: begins with round {task.round}, so moon's clients have lost the last "
                "models that they kept. From here on the run differs from an uninterrupted one; "
                "its guarantee is the same"
            )
        now: dict[int, Tensor] = {}
        for client in task.clients:
            now[client] = self._previous.get(client, start).clone()
            update = client_update(
                self._model,
                start,
                self._users.examples(client),
                local=local,
                clip_norm=task.clip_norm,
                generator=client_generator(self._data_seed, task.round, client),
                active=task.active,
                previous=now[client],
            )
            yield task.update(client, update)
        # Only after the last client, because a round that was interrupted may be run again. A model
        # that diverged is not kept: it would make every later update of its client non-finite.
        self._previous |= {client: own for client, own in now.items() if own.isfinite().all()}
