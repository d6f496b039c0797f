"""Device classes: weaker devices train less, in the same round (FedPT, section 5, future work).

Every device receives the server's whole vector, so that it trains against the current model; a
weak one keeps part of it still, and so spends no gradient, no optimiser state and no uplink on it.
Its update, a vector over its own part, is filled with zeros up to the server's.

Zeros leave the norm as it is, so one client still moves the sum by at most clip_norm and the
accountant has nothing new to know. The divisor stays the plan's report_goal for every coordinate:
dividing a coordinate by the number of devices that trained it would let a single device on it move
the mean by its whole update. So a coordinate that half of the devices train moves half as far.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.engines.embedded import EmbeddedEngine
from privpart.messages import ClientUpdate, RoundTask
from privpart.model import PartialModel


class DeviceClasses:
    """An engine over one ``EmbeddedEngine`` per class of devices.

    Args:
        server_model: trains whatever any class trains; the vectors that go in and out are its
            ``flat``, shape (d,).
        engines: one per class, each with its own ``PartialModel`` of the same network, built from
            the same seed, whose trained part lies within the server's.
        class_of: which engine runs a client, from 0; public, and the same whatever the client
            holds.

    This is a simulation inside one process. A message on the wire carries the mask and the
    fingerprint of one part, so ``decode_update`` of the server's model refuses that of a class.

    Raises:
        ConfigError: no engine, another network or another frozen part than the server's, or a part
            that the server does not train. ``run``: a class without engine.
    """

    def __init__(
        self,
        server_model: PartialModel,
        engines: Sequence[EmbeddedEngine],
        class_of: Callable[[int], int],
    ) -> None:
        if not engines:
            raise ConfigError("engines=[]: must be at least one, one per class of devices.")
        spans = _spans(server_model)
        for number, engine in enumerate(engines):
            _refuse_another_model(server_model, engine.model, number)
        self.engines = engines
        self.class_of = class_of
        self._trained = [
            torch.cat([torch.arange(*spans[name]) for name in engine.model.trainable])
            for engine in engines
        ]
        self._still = [
            [
                (parameter, spans[name])
                for name, parameter in engine.model.module.named_parameters()
                if name in spans and not parameter.requires_grad
            ]
            for engine in engines
        ]

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield each client's clipped update, zero outside its class's part, shape (d,)."""
        for client in task.clients:
            number = self._class(client)
            rows = self._trained[number]
            with torch.no_grad():
                for parameter, span in self._still[number]:
                    parameter.copy_(start[slice(*span)].view(parameter.shape))
            for update in self.engines[number].run(replace(task, clients=(client,)), start[rows]):
                filled = torch.zeros_like(start)
                filled[rows] = update.update
                yield replace(update, update=filled)

    def _class(self, client: int) -> int:
        number = checks.count("class_of", self.class_of(client), minimum=0)
        if number >= len(self.engines):
            raise ConfigError(
                f"class_of={number} for client {client}: must be below {len(self.engines)}, the "
                "number of engines."
            )
        return number


def _spans(model: PartialModel) -> dict[str, tuple[int, int]]:
    """Where each trained parameter lies in ``model.flat``."""
    parameters = dict(model.module.named_parameters())
    spans, begin = {}, 0
    for name in model.trainable:
        end = begin + parameters[name].numel()
        spans[name] = (begin, end)
        begin = end
    return spans


def _refuse_another_model(server: PartialModel, device: PartialModel, number: int) -> None:
    theirs, own = (dict(model.module.named_parameters()) for model in (server, device))
    same = server.module is not device.module and (
        {name: p.shape for name, p in theirs.items()} == {name: p.shape for name, p in own.items()}
        and all(torch.equal(theirs[name], own[name]) for name in server.frozen)
    )
    if not same:
        raise ConfigError(
            f"class {number} must have its own copy of the server's network, with the same frozen "
            f"part: build it from the server's seed, {server.seed}."
        )
    if more := [name for name in device.trainable if name not in server.trainable]:
        raise ConfigError(f"class {number} trains {', '.join(more)}, which the server does not.")
