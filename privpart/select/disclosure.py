"""Disclosure: three types for who may know a value, and the ledger of who came to know what.

``DeviceOnly``, ``ServerSees`` and ``Released`` cannot be mixed up: a function that publishes takes
``Released`` and nothing else, for the type checker and when it runs. The only way from a device to
a server or a store is ``DeviceOnly.show``, which writes it down.

Select report: two lines that must not be read as one.

Differential privacy bounds what recipients of the model learn. It says nothing against the parties
that deliver slices and add updates up: what those see in the clear, they know.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, NoReturn, TypeVar, get_args

from accounting import Guarantee, checks
from accounting.checks import ConfigError
from accounting.report import up

Party = Literal["server", "store", "second store"]
"""Who might look. Server: runs the rounds and adds the updates up. Store: hands out slices."""

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Sighting:
    """That a party saw something of a client in a round, in the clear.

    Attributes:
        party: who.
        round: from 0.
        client: of whom.
        what: for instance "keys"; never the value itself.
    """

    party: Party
    round: int
    client: int
    what: str


@dataclass(slots=True)
class SelectLedger:
    """What delivering slices took and revealed. For the operator: it is not covered, not released.

    Attributes:
        bytes_down: to each client.
        bytes_up: from each client.
        computed_by_server: evaluations of the select function before or while slices go out.
        computed_on_devices: evaluations by clients.
        sightings: what was seen in the clear.
    """

    bytes_down: Counter[int] = field(default_factory=Counter)
    bytes_up: Counter[int] = field(default_factory=Counter)
    computed_by_server: int = 0
    computed_on_devices: int = 0
    sightings: set[Sighting] = field(default_factory=set)

    def seen_by(self, party: Party) -> tuple[str, ...]:
        """Return the kinds of things that ``party`` saw of any client, sorted."""
        return tuple(sorted({s.what for s in self.sightings if s.party == party}))


class _Guarded(Generic[_T]):
    """A value that neither prints nor pickles."""

    __slots__ = ("_value",)

    def __init__(self, value: _T) -> None:
        self._value = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<not for release>)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"{type(self).__name__}: does not leave this process.")


class ServerSees(_Guarded[_T]):
    """A value in the clear at a party that is trusted with it; it may not be released."""

    __slots__ = ()

    def at_party(self) -> _T:
        """Return the value to the party that holds it."""
        return self._value


class DeviceOnly(_Guarded[_T]):
    """A value that stays on its device."""

    __slots__ = ()

    def on_device(self, use: Callable[[_T], _R]) -> "DeviceOnly[_R]":
        """Return what the device computes from it; that stays there as well."""
        return DeviceOnly(use(self._value))

    def show(
        self, ledger: SelectLedger, party: Party, *, round_: int, client: int, what: str
    ) -> ServerSees[_T]:
        """Send the value to ``party`` in the clear, and write that down."""
        checks.choice("party", party, get_args(Party))
        ledger.sightings.add(Sighting(party, round_, client, what))
        return ServerSees(self._value)

    def for_training(self) -> _T:
        """Return the value to code that runs on the device: local training, and its clipping."""
        return self._value


@dataclass(frozen=True, slots=True)
class Released(Generic[_T]):
    """A value that anyone may see.

    Attributes:
        value: itself.
        why: what it costs, or, in words, why it says nothing about any client.
    """

    value: _T
    why: Guarantee | str

    def __post_init__(self) -> None:
        if isinstance(self.value, _Guarded):
            raise ConfigError(f"{type(self.value).__name__}: must not be wrapped for release.")
        if not self.why:
            raise ConfigError("why='': say what the release costs, or why it costs nothing.")


def publish(value: Released[_T]) -> _T:
    """Return the value, for a file or a screen.

    Raises:
        ConfigError: anything but ``Released``.
    """
    if type(value) is not Released:
        raise ConfigError(
            f"{type(value).__name__}: must not be released. Only what noise covers, or what "
            "depends on no client, is Released."
        )
    return value.value


SeenByParty = tuple[tuple[Party, tuple[str, ...]], ...]
"""Per party, the kinds of things that it sees of clients in the clear."""


def seen_in(ledger: SelectLedger) -> SeenByParty:
    """Return what a ledger says, by party."""
    return tuple((party, ledger.seen_by(party)) for party in get_args(Party))


def merge_seen(*seen: SeenByParty | None) -> SeenByParty | None:
    """Return what several runs show, of the same model; None if none of them selects."""
    if not any(seen):
        return None
    kinds: dict[Party, set[str]] = {party: set() for party in get_args(Party)}
    for own in seen:
        for party, what in own or ():
            kinds[party] |= set(what)
    return tuple((party, tuple(sorted(what))) for party, what in kinds.items())


@dataclass(frozen=True, slots=True)
class SelectReport:
    """What is claimed of a run with selection, and against whom.

    Attributes:
        guarantee: of everything released: model, and histograms of keys if there are any; None
            where there is none, because the run had no noise or the noise was seeded.
        delta: in (0, 1).
        seen: per party, what it saw in the clear.
    """

    guarantee: Guarantee | None
    delta: float
    seen: SeenByParty

    def __post_init__(self) -> None:
        checks.probability("delta", self.delta)

    @classmethod
    def of(cls, guarantee: Guarantee | None, delta: float, ledger: SelectLedger) -> "SelectReport":
        """Read off the ledger who saw what; only what kinds of things, so it may be printed."""
        return cls(guarantee, delta, seen_in(ledger))

    def lines(self) -> tuple[str, str]:
        """Return the line on recipients of the model, and the line on those who run the rounds."""
        if self.guarantee is None:
            first = "against recipients of the model: no guarantee"
        else:
            epsilon = up(self.guarantee.epsilon(self.delta))
            first = f"against recipients of the model: epsilon {epsilon} at delta {self.delta:g}"
        parts = [f"{party}: {', '.join(what)}" for party, what in self.seen if what]
        second = f"keys seen in the clear, without any epsilon: {'; '.join(parts) or 'none'}"
        if any(party == "second store" and what for party, what in self.seen):
            second += " (and the keys themselves, should the two stores collude)"
        if any("random " in kind for _, what in self.seen for kind in what):
            second += "; random keys carry no data"
        return first, second
