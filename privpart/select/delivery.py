"""Delivery: how slices reach the clients, and what each way costs and reveals.

Charles et al. 2022, section 3.2, has the first three ways. All four deliver the same slices of a
matrix x, whose row k is what key k selects. They differ in bytes, in computations, and in who sees
the keys:

    broadcast      the server sends all of x and the devices select; nobody sees keys
    on_demand      the server computes the requested slices, each one once; the server sees keys
    pregenerated   a store holds all K slices; the store sees keys, the server does not
    private        two stores hold all K slices and answer queries of ``private_retrieval``; neither
                   sees keys unless they collude, but both see how many each client requests
"""

from collections.abc import Callable, Sequence
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
class Select:
    """Select function psi, and the decoder that a device applies to the slices it receives.

    Attributes:
        slice_of: psi: (x of shape (K, width), key) -> tensor; shape and dtype are the same for
            all keys.
        decode: m slices, stacked -> float32, shape (m, width).
    """

    slice_of: Callable[[Tensor, int], Tensor]
    decode: Callable[[Tensor], Tensor]

    def slices(self, x: Tensor, keys: Sequence[int]) -> Tensor:
        """Return the slices of ``keys``, stacked, in the encoding that is sent."""
        return torch.stack([self.slice_of(x, key) for key in keys])


@dataclass(frozen=True, slots=True)
class Request:
    """One client's request for slices of one key space.

    Attributes:
        round: round number, from 0.
        client: number of the client.
        space: name of the key space.
        keys: selected keys; they stay on the device.
    """

    round: int
    client: int
    space: str
    keys: DeviceOnly[Keys]


Fetch = Callable[[Request], Tensor]
"""Return the requested slices as the device decodes them, float32, shape (m, width)."""


class Delivery(Protocol):
    """Prepare the slices of one round for its clients."""

    def __call__(self, x: Tensor, select: Select, ledger: SelectLedger) -> Fetch:
        """Return the function that serves the round's requests.

        Args:
            x: matrix of all slices, shape (K, width).
            select: computes and decodes slices.
            ledger: receives bytes, computations, and what each party saw.
        """
        ...


def broadcast(x: Tensor, select: Select, ledger: SelectLedger) -> Fetch:
    """Send all of x to every client; each device selects its rows (option 1)."""

    def fetch(request: Request) -> Tensor:
        keys = request.keys.for_training()
        ledger.bytes_down[request.client] += x.nbytes
        ledger.computed_on_devices += len(keys)
        return select.decode(select.slices(x, keys))

    return fetch


def on_demand(x: Tensor, select: Select, ledger: SelectLedger) -> Fetch:
    """Compute each requested slice at the server, at most once per round (option 2)."""
    ready: dict[int, Tensor] = {}

    def fetch(request: Request) -> Tensor:
        keys = _show(request, ledger, "server")
        for key in keys:
            if key not in ready:
                ready[key] = select.slice_of(x, key)
                ledger.computed_by_server += 1
        return _deliver(torch.stack([ready[key] for key in keys]), request, select, ledger)

    return fetch


def on_demand_uncached(x: Tensor, select: Select, ledger: SelectLedger) -> Fetch:
    """Compute every request afresh at the server (option 2 in the paper's first form)."""

    def fetch(request: Request) -> Tensor:
        keys = _show(request, ledger, "server")
        ledger.computed_by_server += len(keys)
        return _deliver(select.slices(x, keys), request, select, ledger)

    return fetch


def pregenerated(x: Tensor, select: Select, ledger: SelectLedger) -> Fetch:
    """Serve requests from a store in which all K slices are precomputed (option 3)."""
    store = _all_slices(x, select, ledger)

    def fetch(request: Request) -> Tensor:
        keys = _show(request, ledger, "store")
        return _deliver(store[list(keys)], request, select, ledger)

    return fetch


def private(x: Tensor, select: Select, ledger: SelectLedger) -> Fetch:
    """Serve requests from two stores; neither learns the keys unless the two collude."""
    store = _all_slices(x, select, ledger)
    records = store.reshape(len(x), -1).contiguous().view(torch.uint8).numpy()

    def fetch(request: Request) -> Tensor:
        asked = request.keys.on_device(lambda keys: private_retrieval.queries(keys, len(x)))
        what = f"number of {request.space} keys"
        at = {"round_": request.round, "client": request.client}
        one = asked.on_device(lambda both: both[0]).show(ledger, "store", what=what, **at)
        two = asked.on_device(lambda both: both[1]).show(ledger, "second store", what=what, **at)
        first = private_retrieval.answers(records, one.at_party())
        second = private_retrieval.answers(records, two.at_party())
        ledger.bytes_up[request.client] += one.at_party().nbytes + two.at_party().nbytes
        ledger.bytes_down[request.client] += first.nbytes + second.nbytes
        slices = torch.from_numpy(private_retrieval.decode(first, second)).view(store.dtype)
        return select.decode(slices.reshape(-1, *store.shape[1:]))

    return fetch


def _all_slices(x: Tensor, select: Select, ledger: SelectLedger) -> Tensor:
    ledger.computed_by_server += len(x)
    return select.slices(x, range(len(x)))


def _show(request: Request, ledger: SelectLedger, party: Party) -> Keys:
    seen = request.keys.show(
        ledger,
        party,
        round_=request.round,
        client=request.client,
        what=f"{request.space} keys",
    )
    ledger.bytes_up[request.client] += KEY_BYTES * len(seen.at_party())
    return seen.at_party()


def _deliver(slices: Tensor, request: Request, select: Select, ledger: SelectLedger) -> Tensor:
    ledger.bytes_down[request.client] += slices.nbytes
    return select.decode(slices)


def quantize_row(x: Tensor, key: int) -> Tensor:
    """Return row ``key`` quantized to one byte per parameter.

    The error is at most half a step, (max - min) / 510.

    Returns:
        Shape (8 + width,), uint8: minimum and step as float32, then one code per parameter.
    """
    row = x[key].float()
    low, high = row.aminmax()
    step = (high - low) / 255
    codes = ((row - low) / step).nan_to_num().round().to(torch.uint8)  # a constant row gives 0 / 0
    return torch.cat([torch.stack([low, step]).view(torch.uint8), codes])


def dequantize_rows(slices: Tensor) -> Tensor:
    """Decode rows from ``quantize_row``, shape (m, 8 + width), to float32, shape (m, width)."""
    low, step = slices[:, :8].flatten().clone().view(torch.float32).view(-1, 2).unbind(dim=1)
    return low.unsqueeze(1) + slices[:, 8:].float() * step.unsqueeze(1)


ROWS = Select(lambda x, key: x[key], lambda slices: slices)
"""Select rows unchanged."""

QUANTIZED_ROWS = Select(quantize_row, dequantize_rows)
"""Select rows quantized to one byte per parameter (section 4)."""
