"""Delivery: how slices reach the clients, and what each way costs and reveals.

Charles et al. 2022, section 3.2, has the first three ways. All four deliver the same rows of a
matrix x; key k selects row k. They differ in bytes and in who sees the keys:

    broadcast      the server sends all of x and the devices select; nobody sees keys
    on_demand      the server sends the requested slices; the server sees keys
    pregenerated   a store holds all K slices; the store sees keys, the server does not
    private        two stores hold all K slices and answer queries of ``private_retrieval``; neither
                   sees keys unless they collude, but both see how many each client requests
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from privpart.select import private_retrieval
from privpart.select.disclosure import DeviceOnly, Party, SelectLedger
from privpart.select.primitive import Keys

KEY_BYTES = 4
"""Size of a key on the wire: a whole number below 2^32."""


@dataclass(frozen=True, slots=True)
class Request:
    """One client's request for slices of one key space.

    Attributes:
        client: number of the client.
        space: name of the key space.
        keys: selected keys; they stay on the device.
    """

    client: int
    space: str
    keys: DeviceOnly[Keys]


Fetch = Callable[[Request], Tensor]
"""Return the requested slices, shape (m, width)."""


class Delivery(Protocol):
    """Prepare the slices of one round for its clients."""

    def __call__(self, x: Tensor, ledger: SelectLedger) -> Fetch:
        """Return the function that serves the round's requests.

        Args:
            x: matrix of all slices, shape (K, width).
            ledger: receives bytes, and what each party saw.
        """
        ...


def broadcast(x: Tensor, ledger: SelectLedger) -> Fetch:
    """Send all of x to every client; each device selects its rows (option 1)."""

    def fetch(request: Request) -> Tensor:
        ledger.bytes_down[request.client] += x.nbytes
        return x[list(request.keys.for_training())]

    return fetch


def on_demand(x: Tensor, ledger: SelectLedger) -> Fetch:
    """Serve requests from the server (option 2)."""
    return _in_the_clear(x, ledger, "server")


def pregenerated(x: Tensor, ledger: SelectLedger) -> Fetch:
    """Serve requests from a store (option 3)."""
    return _in_the_clear(x, ledger, "store")


def _in_the_clear(x: Tensor, ledger: SelectLedger, party: Party) -> Fetch:
    def fetch(request: Request) -> Tensor:
        keys = request.keys.show(ledger, party, f"{request.space} keys")
        slices = x[list(keys)]
        ledger.bytes_up[request.client] += KEY_BYTES * len(keys)
        ledger.bytes_down[request.client] += slices.nbytes
        return slices

    return fetch


def private(x: Tensor, ledger: SelectLedger) -> Fetch:
    """Serve requests from two stores; neither learns the keys unless the two collude."""
    # stores see bytes, of whatever type
    records = x.contiguous().view(torch.uint8).numpy()

    def fetch(request: Request) -> Tensor:
        queries = request.keys.on_device(lambda keys: private_retrieval.queries(keys, len(x)))
        what = f"number of {request.space} keys"
        first_query = queries.on_device(lambda both: both[0]).show(ledger, "store", what)
        second_query = queries.on_device(lambda both: both[1]).show(ledger, "second store", what)
        first = private_retrieval.answers(records, first_query)
        second = private_retrieval.answers(records, second_query)
        ledger.bytes_up[request.client] += first_query.nbytes + second_query.nbytes
        ledger.bytes_down[request.client] += first.nbytes + second.nbytes
        return torch.from_numpy(private_retrieval.decode(first, second)).view(x.dtype)

    return fetch
