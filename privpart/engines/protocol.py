"""Protocol: what the round loop asks of an engine, and what an engine may offer besides."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from torch import Tensor

from privpart.engines.secure_sums import ModularSum
from privpart.messages import ClientHealth, ClientUpdate, CohortSum, RoundTask

OWN_ENGINES = ("EmbeddedEngine",)
"""This package's engines that sum clients, as a ledger's rows name them."""


class Engine(Protocol):
    """Trains clients, simulated or remote."""

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the task that trained from ``start``, shape (d,)."""
        ...


@runtime_checkable
class SummingEngine(Engine, Protocol):
    """An engine of the operator's own that clips and sums updates in the server's place.

    The report says that the clipping is enforced if it is one of this package's (``own_engine``),
    and asserted otherwise.
    """

    def sums(self, task: RoundTask, start: Tensor) -> Iterator[CohortSum] | None:
        """Return sums that contain each client of the task once, or None to have ``run`` called."""
        ...


@runtime_checkable
class SecureEngine(Engine, Protocol):
    """An engine over a protocol of secure aggregation, which shows the server sums only."""

    def secure_sums(self, task: RoundTask, start: Tensor) -> Iterator[ModularSum]:
        """Return sums modulo 2^k of clients that clipped and rounded to the task's grid."""
        ...


@runtime_checkable
class AccompaniedEngine(SummingEngine, Protocol):
    """An engine with clients that are never in its sums, such as an auditor's."""

    def beside(self, task: RoundTask) -> Iterator[ClientUpdate]:
        """Yield the update of each client of the task that ``sums`` leaves out."""
        ...


@runtime_checkable
class MeasuringEngine(Engine, Protocol):
    """An engine of the operator's own that may measure how its simulated clients train."""

    def health(self) -> ClientHealth | None:
        """Return how the clients of the last round trained; None if it did not measure it."""
        ...


@runtime_checkable
class ChoosingEngine(Engine, Protocol):
    """An engine that may be vectorized, so that one client's rounding depends on others."""

    @property
    def each_alone(self) -> bool:
        """Whether every bit of an update is a function of its client's own data."""
        ...
