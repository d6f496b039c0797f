"""Clients: who may take part, and what each holds."""

from collections.abc import Sequence
from typing import Protocol

from privpart.data.batches import Batch
from privpart.messages import ClientId


class Clients(Protocol):
    """The population of a simulation. Anything with these two names conforms.

    ``examples`` is called when a client takes part, so the data may be larger than memory. torch's
    random numbers are then seeded by round and client.
    """

    @property
    def ids(self) -> Sequence[ClientId]:
        """Ids of all clients, each once; whole numbers or strings, see ``ClientId``."""
        ...

    def examples(self, client: ClientId, /) -> Batch:
        """Return one client's examples: a nest of tensors with a row per example, >= 1."""
        ...
