"""Isolation: refuse networks, losses and augmentations that carry data from client to client.

A client's update may depend on its own examples and on the model that it received, and on nothing
else: otherwise one client moves the sum by more than the clip norm. ``PartialModel.lent`` puts back
what a module keeps; a function, a global or an object inside the module may keep more.
"""

from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from accounting.checks import ConfigError
from privpart.client import LocalTraining, client_update
from privpart.data.batches import count_rows
from privpart.data.clients import Clients
from privpart.engines.device import one_thread
from privpart.engines.methods import client_generator, fetched
from privpart.messages import ClientId
from privpart.model import PartialModel

_STEPS = 2
_TRIED = 50
"""Clients that are asked for examples before the check is given up."""
_UNCLIPPED = 1e6


def refuse_carriers(model: PartialModel, clients: Clients, local: LocalTraining) -> None:
    """Train two clients in turn, each twice; the two updates of each must have the same bits.

    The check finds what a few steps show; it proves nothing about code that means to hide
    something.

    Args:
        model: in its start state, to which it is reset.
        clients: the population; without two clients that hold examples nothing is checked.
        local: how clients train; at most two steps are taken.

    Raises:
        ConfigError: the updates differ, or the frozen part has changed.
    """
    pair = _two_with_examples(clients)
    if len(pair) < 2:
        return
    start = model.flat.clone()
    short = replace(local, epochs=1, steps=min(_STEPS, local.steps or _STEPS))

    def update(client: ClientId) -> Tensor:
        generator = client_generator(0, 0, client)
        return client_update(
            model,
            start,
            fetched(clients, client, generator),
            local=short,
            clip_norm=_UNCLIPPED,
            generator=generator,
            previous=start.clone() if local.objective == "moon" else None,
        )

    with one_thread():
        before, after = ([update(client) for client in pair] for _ in range(2))
    model.verify()
    for client, one, again in zip(pair, before, after, strict=True):
        if not torch.equal(one.nan_to_num(), again.nan_to_num()):
            raise ConfigError(
                f"clients: client {client!r} trained twice, with another one in between, and gave "
                "two different updates. The network, the loss, the augmentation or the data keeps "
                "something of a client (a list, a global, a hook), or is not the same when called "
                "again. Keep nothing between clients."
            )


def _two_with_examples(clients: Clients) -> list[ClientId]:
    """Return the first two clients that hold examples, among those that are tried."""
    found: list[ClientId] = []
    for client in islice(clients.ids, _TRIED):
        if count_rows(fetched(clients, client, client_generator(0, 0, client))):
            found.append(client)
        if len(found) == 2:
            break
    return found
