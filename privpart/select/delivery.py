"""Delivery: how slices reach the clients, what each way costs and reveals, and the report of it.

Charles et al. 2022, section 3.2, has the first three ways. All four deliver the same rows of a
matrix x; key k selects row k. They differ in bytes and in who sees the keys:

    broadcast      the server sends all of x and the devices select; nobody sees keys
    on_demand      the server sends the requested slices; the server sees keys
    pregenerated   a store holds all K slices; the store sees keys, the server does not
    private        two stores hold all K slices and answer queries of ``private_retrieval``; neither
                   sees keys unless they collude, but both see how many each client requests

A value of a client is ``DeviceOnly``. It reaches a server or a store only through ``show``, which
records that in the ledger. ``select_claims`` keeps two claims apart. Differential privacy bounds
what recipients of the model learn. It gives no protection against the parties that deliver slices
and sum updates: they know everything that they see in the clear.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Generic, Literal, NoReturn, TypeVar, get_args

import torch
from torch import Tensor

from accounting import checks
from accounting.guarantee import Cost
from accounting.report import up
from privpart.select import private_retrieval
from privpart.select.layout import Keys

KEY_BYTES = 4
"""Size of a key on the wire: a whole number below 2^32."""

Party = Literal["server", "store", "second store"]
"""A party that may see data. The server runs the rounds and sums updates; stores serve slices."""

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(slots=True)
class SelectLedger:
    """Bytes to and from each client, and ``sightings``: who saw what kind of data in the clear.

    For the operator only: no guarantee covers these values, and they must not be released.
    """

    bytes_down: Counter[int] = field(default_factory=Counter)
    bytes_up: Counter[int] = field(default_factory=Counter)
    sightings: set[tuple[Party, str]] = field(default_factory=set)


class DeviceOnly(Generic[_T]):
    """A value that must stay on its device: it cannot be printed or pickled by accident."""

    __slots__ = ("_value",)

    def __init__(self, value: _T) -> None:
        self._value = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}(<not for release>)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"{type(self).__name__}: must not leave this process.")

    def on_device(self, use: Callable[[_T], _R]) -> "DeviceOnly[_R]":
        """Apply ``use`` on the device; the result must stay on the device as well."""
        return DeviceOnly(use(self._value))

    def show(self, ledger: SelectLedger, party: Party, what: str) -> _T:
        """Send the value to ``party`` in the clear and record that in the ledger."""
        # a party that no report names must not see anything
        checks.choice("party", party, get_args(Party))
        ledger.sightings.add((party, what))
        return self._value

    def for_training(self) -> _T:
        """Return the value, for code that runs on the device: local training and clipping."""
        return self._value


Fetch = Callable[[int, str, DeviceOnly[Keys]], Tensor]
"""Return the slices, shape (m, width), that a client requests of a key space."""
Delivery = Callable[[Tensor, SelectLedger], Fetch]
"""Prepare the slices of a round, shape (K, width); the ledger gets bytes, and who saw what."""


def broadcast(x: Tensor, ledger: SelectLedger) -> Fetch:
    """Send all of x to every client; each device selects its rows (option 1)."""

    def fetch(client: int, space: str, keys: DeviceOnly[Keys]) -> Tensor:
        ledger.bytes_down[client] += x.nbytes
        # the device selects, so the ledger records no sighting of keys
        return x[list(keys.for_training())]

    return fetch


def on_demand(x: Tensor, ledger: SelectLedger) -> Fetch:
    """Serve requests from the server (option 2)."""
    return _in_the_clear(x, ledger, "server")


def pregenerated(x: Tensor, ledger: SelectLedger) -> Fetch:
    """Serve requests from a store (option 3)."""
    return _in_the_clear(x, ledger, "store")


def _in_the_clear(x: Tensor, ledger: SelectLedger, party: Party) -> Fetch:
    def fetch(client: int, space: str, keys: DeviceOnly[Keys]) -> Tensor:
        shown = keys.show(ledger, party, f"{space} keys")
        slices = x[list(shown)]
        ledger.bytes_up[client] += KEY_BYTES * len(shown)
        ledger.bytes_down[client] += slices.nbytes
        return slices

    return fetch


def private(x: Tensor, ledger: SelectLedger) -> Fetch:
    """Serve requests from two stores; neither learns the keys unless the two collude."""
    # stores see bytes, of whatever type
    records = x.contiguous().view(torch.uint8).numpy()

    def fetch(client: int, space: str, keys: DeviceOnly[Keys]) -> Tensor:
        queries = keys.on_device(lambda wanted: private_retrieval.queries(wanted, len(x)))
        stores: tuple[Party, Party] = ("store", "second store")
        answers = []
        for number, store in enumerate(stores):
            query = queries.on_device(itemgetter(number))
            # one query alone is uniform whatever the key: a store learns only how many there are
            shown = query.show(ledger, store, f"number of {space} keys")
            answers.append(private_retrieval.products(records, shown))
            ledger.bytes_up[client] += shown.nbytes
            ledger.bytes_down[client] += answers[-1].nbytes
        return torch.from_numpy(private_retrieval.decode(*answers)).view(x.dtype)

    return fetch


SeenByParty = tuple[tuple[Party, tuple[str, ...]], ...]
"""Per party, the kinds of client data that it sees in the clear."""


def seen_in(ledger: SelectLedger) -> SeenByParty:
    """Return the kinds of data that the ledger records, by party."""
    return merge_seen([[seen, [what]] for seen, what in ledger.sightings])


def merge_seen(*seen: Iterable[Sequence[Any]]) -> SeenByParty:
    """Return the union over several runs of one model."""
    pairs = [(who, kinds) for parties in seen for who, kinds in parties]
    return tuple(
        (party, tuple(sorted({kind for who, kinds in pairs if who == party for kind in kinds})))
        for party in get_args(Party)
    )


def select_claims(guarantee: Cost | None, delta: float, seen: SeenByParty) -> tuple[str, str]:
    """Return one line on recipients of the model and one on the parties that run the rounds.

    The guarantee covers the released model; None if the run had no noise or seeded noise. No
    guarantee covers the kinds of data that each party saw in the clear.
    """
    checks.probability("delta", delta)
    first = "against recipients of the model: no guarantee"
    if guarantee is not None:
        epsilon = up(guarantee.epsilon(delta))
        first = f"against recipients of the model: epsilon {epsilon} at delta {delta:g}"
    parts = [f"{party}: {', '.join(what)}" for party, what in seen if what]
    second = f"keys seen in the clear, without any epsilon: {'; '.join(parts) or 'none'}"
    if any(party == "second store" and what for party, what in seen):
        second += " (and the keys themselves, should the two stores collude)"
    if any("random " in kind for _, what in seen for kind in what):
        second += "; random keys carry no data"
    return first, second
