"""Remembering: MOON's clients, which keep their last model to themselves from round to round.

In memory only: on a disk it would be an update that nobody clipped or noised.
"""

from collections.abc import Callable, Iterator

from torch import Tensor

from privpart.client import LocalTraining, client_update
from privpart.data.users import Users
from privpart.engines.methods import client_generator
from privpart.messages import ClientUpdate, RoundTask
from privpart.model import PartialModel


class Remembering:
    """Computes one client after another, in this process.

    Args:
        model: shared by all; its trained part is overwritten.
        users: the clients' data.
        data_seed: order of examples, as for ``LocalWork``.
        report: gets a sentence if clients have forgotten what they knew.
    """

    def __init__(
        self, model: PartialModel, users: Users, data_seed: int, report: Callable[[str], None]
    ) -> None:
        self._model, self._users, self._data_seed = model, users, data_seed
        self._report = report
        self._previous: dict[int, Tensor] = {}

    @property
    def empty(self) -> bool:
        """Whether no client has taken part."""
        return not self._previous

    def run(self, task: RoundTask, start: Tensor, local: LocalTraining) -> Iterator[ClientUpdate]:
        """Yield each client's clipped update, shape (d,), in the order of the task."""
        if self.empty and task.round:
            self._report(
                f"engine: begins with round {task.round}, so moon's clients that took part before "
                "have forgotten their own last model: from here on this is another run than one "
                "that never stopped. The guarantee is the same"
            )
        now: dict[int, Tensor] = {}
        for client in task.clients:
            x, y = self._users.examples(client)
            now[client] = self._previous.get(client, start).clone()
            delta = client_update(
                self._model,
                start,
                x,
                y,
                local=local,
                clip_norm=task.clip_norm,
                generator=client_generator(self._data_seed, task.round, client),
                active=task.active,
                previous=now[client],
            )
            yield task.update(client, delta)
        # here and not before: a round that was broken off may be run again
        self._previous |= {client: own for client, own in now.items() if own.isfinite().all()}
