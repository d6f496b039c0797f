"""Delivery: three ways to bring slices to clients, and a private one; one result, other ledgers.

Charles et al. 2022, section 3.2. All compute the same slices from the same matrix x, whose row k
is what key k selects; they differ in bytes, in computations, and in who sees the keys:

    broadcast      x goes out whole, devices select; nobody sees keys
    on_demand      the server selects what it is asked for, each slice once; it sees keys
    pregenerated   all K slices lie ready at a store; the store sees keys, the server does not
    private        as before at two stores, asked by ``private_retrieval``; nobody sees keys, if
                   the stores do not collude; both see how many each client asks for
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
"""A key travels as a whole number below 2^32."""


@dataclass(frozen=True, slots=True)
class Select:
    """What is selected from a matrix, and how a device reads it.

    Attributes:
        slice_of: psi: (x of shape (K, width), key) -> tensor of one shape and type for all keys.
        decode: m such slices, stacked -> float32, shape (m, width).
    """

    slice_of: Callable[[Tensor, int], Tensor]
    decode: Callable[[Tensor], Tensor]

    def slices(self, x: Tensor, keys: Sequence[int]) -> Tensor:
        """Return the slices of ``keys``, stacked, as they travel."""
        return torch.stack([self.slice_of(x, key) for key in keys])


@dataclass(frozen=True, slots=True)
class Request:
    """One client that asks for slices of one key space.

    Attributes:
        round: from 0.
        client: who.
        space: name of the key space.
        keys: stay on the device.
    """

    round: int
    client: int
    space: str
    keys: DeviceOnly[Keys]


Fetch = Callable[[Request], Tensor]
"""Answers a request with float32 slices, shape (m, width); they are on the device."""


class Delivery(Protocol):
    """Opens a round: prepares x, shape (K, width), and returns what answers the clients."""

    def __call__(self, x: Tensor, select: Select, ledger: SelectLedger) -> Fetch:
        """Return the answerer of one round."""
        ...


def broadcast(x: Tensor, select: Select, ledger: SelectLedger) -> Fetch:
    """Send x whole; each device selects for itself (option 1)."""

    def fetch(request: Request) -> Tensor:
        keys = request.keys.for_training()
        ledger.bytes_down[request.client] += x.nbytes
        ledger.computed_on_devices += len(keys)
        return select.decode(select.slices(x, keys))

    return fetch


def on_demand(x: Tensor, select: Select, ledger: SelectLedger) -> Fetch:
    """Let the server select what clients ask for, each key at most once a round (option 2)."""
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
    """Select again for every client (option 2 as the paper first puts it)."""

    def fetch(request: Request) -> Tensor:
        keys = _show(request, ledger, "server")
        ledger.computed_by_server += len(keys)
        return _deliver(select.slices(x, keys), request, select, ledger)

    return fetch


def pregenerated(x: Tensor, select: Select, ledger: SelectLedger) -> Fetch:
    """Let a store hand out slices that were all made beforehand (option 3)."""
    store = _all_slices(x, select, ledger)

    def fetch(request: Request) -> Tensor:
        keys = _show(request, ledger, "store")
        return _deliver(store[list(keys)], request, select, ledger)

    return fetch


def private(x: Tensor, select: Select, ledger: SelectLedger) -> Fetch:
    """Let two stores that do not collude hand out slices without learning which."""
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
    """Return row ``key`` in one byte per number: its least number and step, then codes.

    Shape (8 + width,), uint8. An error of at most half a step, (max - min) / 510.
    """
    row = x[key].float()
    low, high = row.aminmax()
    step = (high - low) / 255
    codes = ((row - low) / step).nan_to_num().round().to(torch.uint8)  # 0 / 0: a constant row
    return torch.cat([torch.stack([low, step]).view(torch.uint8), codes])


def dequantize_rows(slices: Tensor) -> Tensor:
    """Return what ``quantize_row`` packed, shape (m, width), float32."""
    low, step = slices[:, :8].flatten().clone().view(torch.float32).view(-1, 2).unbind(dim=1)
    return low.unsqueeze(1) + slices[:, 8:].float() * step.unsqueeze(1)


ROWS = Select(lambda x, key: x[key], lambda slices: slices)
"""Rows as they are."""

QUANTIZED_ROWS = Select(quantize_row, dequantize_rows)
"""Rows at a byte per number: a select function that transforms (section 4)."""
