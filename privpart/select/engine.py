"""Select engine: simulated clients that train only the slices that they selected.

Runs Algorithm 2 of Charles et al. 2022 with the ordinary ``Server``: each update is yielded in the
server's coordinates, with zeros where the client selected nothing. Updates are clipped first and
deselecting preserves their norm, so the accounting is unchanged. The server adds noise to every
coordinate, including slices that nobody selected: if keys depend on private data, noise on the
selected slices alone would reveal them. Selecting therefore saves clients bytes and memory but does
not reduce the noise in the model. Public keys are the exception, see ``Turns``.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.client import client_update
from privpart.data.users import Users
from privpart.engines.methods import client_generator
from privpart.messages import ClientUpdate, RoundTask
from privpart.model import PartialModel
from privpart.select.delivery import KEY_BYTES, Delivery, DeviceOnly, Fetch, SelectLedger, on_demand
from privpart.select.keys import IndependentKeys, KeyChooser, Turns
from privpart.select.layout import Keys, KeySpace, Layout, assemble, deselect
from privpart.settings.client import LocalTraining

Localize = Callable[[Tensor, Tensor, Sequence[Keys]], tuple[Tensor, Tensor]]
"""Translate (x, y) to a client's smaller network, given the client's keys per key space."""

# one per combination of numbers of keys
_CACHED_NETWORKS = 8


class SelectEngine:
    """Run clients that select, one after another, in this process.

    Args:
        server_model: the whole network; the server trains its ``flat``.
        spaces: key spaces to select from; all other trainable parameters are broadcast.
        client_model: builds a client's network from its number of keys per space, with the same
            train patterns and seed.
        users: the clients' data.
        local: local training of each client.
        choosers: one chooser of keys per key space.
        data_seed: seed of the order of examples, used exactly as in ``EmbeddedEngine``.
        delivery: ``broadcast``, ``on_demand``, ``pregenerated`` or ``private``.
        localize: translates examples to the smaller network; None if inputs do not change.
        turns: groups of slices under shared keys; the server's vector is then the model's at
            ``turns.order``. None if the server trains, and adds noise to, the model's whole vector.

    Attributes:
        ledger: costs and disclosures of the delivery.
    """

    method = "one client after another"

    def __init__(
        self,
        server_model: PartialModel,
        spaces: Sequence[KeySpace],
        client_model: Callable[..., PartialModel],
        users: Users,
        *,
        local: LocalTraining,
        choosers: Sequence[KeyChooser],
        data_seed: int,
        delivery: Delivery = on_demand,
        localize: Localize | None = None,
        turns: Turns | None = None,
    ) -> None:
        if local.objective == "moon":
            raise ConfigError("objective='moon': clients that select keep no model of their own.")
        if len(choosers) != len(spaces):
            raise ConfigError(
                f"{len(choosers)} choosers for {len(spaces)} key spaces: give one each."
            )
        self.layout = Layout.of(server_model, spaces)
        self.users = users
        self.local = local
        self.choosers = choosers
        self.data_seed = checks.count("data_seed", data_seed, minimum=0)
        self.delivery = delivery
        self.localize = localize
        self.ledger = SelectLedger()
        self.turns = turns
        self._first = server_model.flat.clone()
        # names in the ledger: random keys say nothing about anyone's data
        self._names = [
            f"random {name}" if isinstance(choose, IndependentKeys) else name
            for name, choose in zip(self.layout.names, choosers, strict=True)
        ]

        @lru_cache(maxsize=_CACHED_NETWORKS)
        def network(counts: tuple[int, ...]) -> tuple[PartialModel, Layout]:
            model = client_model(*counts)
            return model, Layout.of(model, spaces)

        self._network = network

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: there are no other processes to stop."""

    def local_of(self, round_: int) -> LocalTraining:
        """Return the local training of a round; it is the same in all rounds."""
        return self.local

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield each client's clipped update, zero where it selected nothing.

        An update has shape (d,); with ``turns``, it has the length of the round's active groups.
        """
        model = start if self.turns is None else self.turns.whole(self._first, start)
        matrices = [model[table] for table in self.layout.tables]
        # one preparation per round and key space, for all clients
        fetches = [self.delivery(x, self.ledger) for x in matrices]
        for client in task.clients:
            if not isinstance(client, int) or client < 0:
                raise ConfigError(
                    f"client {client!r}: clients that select have whole numbers from 0 as ids, "
                    "from which their random keys are drawn."
                )
            update = self._train(task, client, model, matrices, fetches)
            if self.turns is not None:
                update = self.turns.active_part(update, task.round, task.active)
            yield task.update(client, update)

    def rehearse(self) -> SelectLedger:
        """Return the costs and disclosures of client 0 in round 0, without effect on the run.

        Every client reveals the same kinds of data in every round, so a report can state them
        before the run begins.
        """
        ledger = self.ledger
        self.ledger = SelectLedger()
        active = None if self.turns is None else self.turns.schedule[0]
        start = self._first if self.turns is None else self._first[self.turns.order]
        try:
            list(self.run(RoundTask(0, (0,), 1.0, "", active), start))
            return self.ledger
        finally:
            self.ledger = ledger

    def _train(
        self,
        task: RoundTask,
        client: int,
        start: Tensor,
        matrices: Sequence[Tensor],
        fetches: Sequence[Fetch],
    ) -> Tensor:
        chosen = [choose(task.round, client) for choose in self.choosers]
        slices = []
        for name, keys, x, fetch in zip(self._names, chosen, matrices, fetches, strict=True):
            if isinstance(keys, DeviceOnly):
                slices.append(fetch(client, name, keys))
            else:
                # public keys: the slices arrive by broadcast
                slices.append(x[list(keys)])
                self.ledger.bytes_down[client] += slices[-1].nbytes
        shared = start[self.layout.shared]
        self.ledger.bytes_down[client] += shared.nbytes
        selected = [k.for_training() if isinstance(k, DeviceOnly) else k for k in chosen]
        model, layout = self._network(tuple(map(len, selected)))
        rows = self.users.indices[client]
        x, y = self.users.x[rows], self.users.y[rows]
        if self.localize is not None:
            x, y = self.localize(x, y, selected)
        # clipped before it is deselected, which preserves its norm
        update = client_update(
            model,
            assemble(layout, shared, slices),
            (x, y),
            local=self.local,
            clip_norm=task.clip_norm,
            generator=client_generator(self.data_seed, task.round, client),
        )
        self._upload(client, update, chosen)
        return deselect(self.layout, layout, update, selected)

    def _upload(
        self, client: int, update: Tensor, chosen: Sequence[DeviceOnly[Keys] | Keys]
    ) -> None:
        """Record the upload: the client's update, and the keys of the slices that it updates.

        The server sums updates one by one and sees which slices each of them fills, however well
        the download hid the keys.
        """
        self.ledger.bytes_up[client] += update.nbytes
        for space, keys in zip(self._names, chosen, strict=True):
            if isinstance(keys, DeviceOnly):
                shown = keys.show(self.ledger, "server", f"{space} keys, with the update")
                self.ledger.bytes_up[client] += KEY_BYTES * len(shown)


def localize_tokens(unknown: int = 0) -> Localize:
    """Return a translation of token ids (B, T) to selected words, for next-word prediction.

    In x, words that are not selected become ``unknown``, a key that every client must select. In y
    they are ignored: the softmax covers the selected words, decoys included. Sentences with no
    label left are dropped.
    """

    def localize(x: Tensor, y: Tensor, keys: Sequence[Keys]) -> tuple[Tensor, Tensor]:
        if unknown not in keys[0]:
            raise ConfigError(
                f"key {unknown} stands for unknown words and must be selected: use always=(...)."
            )
        unknown_position = keys[0].index(unknown)
        labels = positions(keys[0], y, missing=-100)
        has_label = (labels >= 0).any(dim=1)
        return positions(keys[0], x[has_label], missing=unknown_position), labels[has_label]

    return localize


def positions(keys: Keys, ids: Tensor, *, missing: int) -> Tensor:
    """Return the index of each id in the ascending ``keys``, or ``missing`` if it is not there."""
    selected = torch.tensor(keys)
    place = torch.searchsorted(selected, ids).clamp(max=len(keys) - 1)
    return torch.where(selected[place] == ids, place, missing)
