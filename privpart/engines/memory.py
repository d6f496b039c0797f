"""Memory of clients: each keeps its own last model, or a local part, from round to round.

MOON compares a client's model with its own last one, and a model's local part trains on the client
and never leaves it. Both stay in memory: on disk they would be what nobody clipped or noised.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from privpart.messages import ClientId, RoundTask
from privpart.model import PartialModel
from privpart.settings.client import LocalTraining


class Memory:
    """What the clients of a simulation keep.

    Args:
        model: shared by all clients.
        report: called with a sentence if what the clients kept was lost.

    Attributes:
        parts: the local part that each client kept, shape (l,).
    """

    def __init__(self, model: PartialModel, report: Callable[[str], None]) -> None:
        self._model, self._report = model, report
        self._last: dict[ClientId, Tensor] = {}
        self.parts: dict[ClientId, Tensor] = {}
        self._now: tuple[dict[ClientId, Tensor], dict[ClientId, Tensor]] = {}, {}
        self._began = False

    @contextmanager
    def round(self, task: RoundTask, local: LocalTraining) -> Iterator[None]:
        """Within this context, the clients of a round train; what they made is kept at its end."""
        if task.round and not self._began:
            moon = local.objective == "moon"
            whose = "moon's clients" if moon else "clients"
            lost = ["the last models"] * moon + ["the local parts"] * (self._model.own.numel() > 0)
            self._report(
                f"engine: begins with round {task.round}, so {whose} have lost "
                f"{' and '.join(lost)} that they kept. From here on the run differs from an "
                "uninterrupted one; its guarantee is the same"
            )
        self._began = True
        self._now = {}, {}
        yield
        # Only after the last client, because a round that was interrupted may be run again. What
        # diverged is not kept: it would make every later update of its client non-finite.
        for memory, now in zip((self._last, self.parts), self._now, strict=True):
            memory |= {client: vector for client, vector in now.items() if vector.isfinite().all()}

    def of(
        self, client: ClientId, local: LocalTraining, start: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return what a client kept as its last model and its local part, to be overwritten."""
        last, parts = self._now
        if local.objective == "moon":
            last[client] = self._last.get(client, start).clone()
        if self._model.own.numel():
            parts[client] = self.parts.get(client, self._model.own_start).clone()
        return last.get(client), parts.get(client)
