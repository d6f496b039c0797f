"""Protocol: what the round loop asks of an engine, and what an engine may offer besides."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from privpart.messages import ClientUpdate, CohortSum, RoundTask
from privpart.secure.sums import ModularSum

OWN_ENGINES = ("EmbeddedEngine",)
"""This package's engines that sum clients, as a ledger's rows name them."""
OPTIMIZER = "FTRLOptimizer"
"""What clips the gradients of examples, as a ledger's rows name it."""


class Engine(Protocol):
    """Trains clients, simulated or remote; it may also have any method of ``Abilities``."""

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the task that trained from ``start``, shape (d,)."""
        ...


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an engine can do beside ``run``: its methods of these names, or what stands for them.

    Attributes:
        sums: of an engine of the operator's own that clips and sums updates in the server's place:
            returns sums that contain each client of the task once, or None to have ``run`` called.
            The report says that the clipping is enforced if the engine is one of this package's
            (``own_engine``), and asserted otherwise.
        sums_of: of an engine with ``sums``: returns sums of an auditor's updates, clipped by the
            code that clips this round's clients; None leaves them to the server's clip.
        secure_sums: of an engine over a protocol of secure aggregation, in place of ``run``:
            returns sums modulo 2^k of clients that clipped and rounded to the task's grid.
        each_alone: a property: whether every bit of an update is a function of its client's own
            data, which vectorized clients do not promise.
    """

    sums: Callable[[RoundTask, Tensor], Iterator[CohortSum] | None]
    sums_of: Callable[[RoundTask, Iterable[ClientUpdate]], Iterator[CohortSum]] | None
    secure_sums: Callable[[RoundTask, Tensor], Iterator[ModularSum]] | None
    each_alone: Callable[[], bool]

    @classmethod
    def of(cls, engine: Engine) -> "Abilities":
        """Return what an engine can do."""
        return cls(
            sums=getattr(engine, "sums", lambda *_: None),
            sums_of=getattr(engine, "sums_of", None),
            secure_sums=getattr(engine, "secure_sums", None),
            each_alone=lambda: getattr(engine, "each_alone", True),
        )
