"""Select engine: rounds in which every client trains only what it selected.

Algorithm 2 of Charles et al. 2022 behind the ordinary ``Server``: this engine hands over each
update on the server's coordinates, with zeros where the client selected nothing. The update is
clipped before, and deselecting keeps its norm, so the accountant has nothing new to know. The
server adds noise to every coordinate, also of slices that nobody selected: with keys from private
data, noise on the selected ones alone would show which they were. So selecting saves clients bytes
and memory, and saves the model no noise. Public keys are the exception, see ``Turns``.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.client import LocalTraining, client_update
from privpart.data.users import Users
from privpart.engines.methods import client_generator
from privpart.messages import ClientUpdate, RoundTask
from privpart.model import PartialModel
from privpart.select.delivery import KEY_BYTES, ROWS, Delivery, Fetch, Request, Select, on_demand
from privpart.select.disclosure import DeviceOnly, Released, SelectLedger
from privpart.select.keys import IndependentKeys, KeyChooser
from privpart.select.layout import KeySpace, Layout, assemble, deselect
from privpart.select.primitive import Keys
from privpart.select.turns import Turns

Localize = Callable[[Tensor, Tensor, Sequence[Keys]], tuple[Tensor, Tensor]]
"""Examples and classes, in terms of the client's smaller network; per key space, its keys."""

_KEPT = 8  # client networks in memory: one per combination of numbers of keys


class SelectEngine:
    """Simulated clients that select, one after another, in this process.

    Args:
        server_model: the whole network; its ``flat`` is what the server trains.
        spaces: what can be selected; everything else that trains is broadcast.
        client_model: builds a client's network from its number of keys per space, with the same
            train patterns and seed.
        users: the clients' data.
        local: how each trains.
        choosers: of keys, per space.
        data_seed: order of examples, exactly as in ``EmbeddedEngine``.
        delivery: how slices reach clients: ``broadcast``, ``on_demand``, ``pregenerated``,
            ``private``.
        select: the rows themselves, or transformed on the way.
        localize: from examples to the smaller network's; None where inputs stay as they are.
        ledger: what delivery took and revealed is added to it.
        turns: of the slices under shared keys; the server's vector is then ``turns.order`` of the
            model's. None: the server trains the model's vector, with noise on all of it.

    Raises:
        ConfigError: spaces that do not fit the model, not as many choosers, or a client that
            remembers its last model.
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
        select: Select = ROWS,
        localize: Localize | None = None,
        ledger: SelectLedger | None = None,
        turns: Turns | None = None,
    ) -> None:
        if local.objective == "moon":
            raise ConfigError("objective='moon': clients that select keep no model of their own.")
        if len(choosers) != len(spaces):
            raise ConfigError(f"{len(choosers)} choosers for {len(spaces)} key spaces: one each.")
        self.layout = Layout.of(server_model, spaces)
        self.users = users
        self.local = local
        self.choosers = choosers
        self.data_seed = checks.count("data_seed", data_seed, minimum=0)
        self.delivery = delivery
        self.select = select
        self.localize = localize
        self.ledger = SelectLedger() if ledger is None else ledger
        self.turns = turns
        self._first = server_model.flat.clone()
        self._names = [  # as the ledger has them: random keys say nothing about anyone's data
            f"random {name}" if isinstance(choose, IndependentKeys) else name
            for name, choose in zip(self.layout.names, choosers, strict=True)
        ]

        @lru_cache(maxsize=_KEPT)
        def network(counts: tuple[int, ...]) -> tuple[PartialModel, Layout]:
            model = client_model(*counts)
            return model, Layout.of(model, spaces)

        self._network = network

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end: there are no other processes."""

    def local_of(self, round_: int) -> LocalTraining:
        """Return how clients train in a round."""
        return self.local

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield each client's clipped update, zero where it selected nothing.

        Shape (d,), or, where slices take turns, that of what trains in the round.
        """
        whole = start if self.turns is None else self.turns.whole(self._first, start)
        matrices = [whole[table] for table in self.layout.tables]
        fetches = [self.delivery(x, self.select, self.ledger) for x in matrices]
        for client in task.clients:
            update = self._train(task, client, whole, matrices, fetches)
            if self.turns is not None:
                update = self.turns.active_part(update, task.round, task.active)
            yield task.update(client, update)

    def rehearse(self) -> SelectLedger:
        """Run client 0 through round 0, for nothing but what this would take and reveal.

        Every round of every client reveals the same kinds of things, so this is what a report says
        of a run before it begins.
        """
        kept, self.ledger = self.ledger, SelectLedger()
        active = None if self.turns is None else self.turns.schedule[0]
        start = self._first if self.turns is None else self._first[self.turns.order]
        try:
            list(self.run(RoundTask(0, (0,), 1.0, "", active), start))
            return self.ledger
        finally:
            self.ledger = kept

    def _train(
        self,
        task: RoundTask,
        client: int,
        start: Tensor,
        matrices: Sequence[Tensor],
        fetches: Sequence[Fetch],
    ) -> Tensor:
        chosen = [choose(task.round, client) for choose in self.choosers]
        slices = [
            self._receive(task.round, client, name, keys, x, fetch)
            for name, keys, x, fetch in zip(self._names, chosen, matrices, fetches, strict=True)
        ]
        shared = start[self.layout.shared]
        self.ledger.bytes_down[client] += shared.nbytes
        own = [k.value if isinstance(k, Released) else k.for_training() for k in chosen]
        model, layout = self._network(tuple(map(len, own)))
        rows = self.users.indices[client]
        x, y = self.users.x[rows], self.users.y[rows]
        if self.localize is not None:
            x, y = self.localize(x, y, own)
        delta = client_update(
            model,
            assemble(layout, shared, slices),
            x,
            y,
            local=self.local,
            clip_norm=task.clip_norm,
            generator=client_generator(self.data_seed, task.round, client),
        )
        self._upload(task.round, client, delta, chosen)
        return deselect(self.layout, layout, delta, own)

    def _receive(
        self,
        round_: int,
        client: int,
        space: str,
        keys: DeviceOnly[Keys] | Released[Keys],
        x: Tensor,
        fetch: Fetch,
    ) -> Tensor:
        """Slices of one key space; under public keys they are a broadcast like any other."""
        if isinstance(keys, DeviceOnly):
            return fetch(Request(round_, client, space, keys))
        slices = self.select.slices(x, keys.value)
        self.ledger.bytes_down[client] += slices.nbytes
        return self.select.decode(slices)

    def _upload(
        self,
        round_: int,
        client: int,
        delta: Tensor,
        chosen: Sequence[DeviceOnly[Keys] | Released[Keys]],
    ) -> None:
        """Enter what goes up: the small update, and the keys under which it is to be added.

        Whoever adds updates up sees them one by one, and in each the slices that it fills: however
        well the keys were hidden on the way down. Only secure aggregation or an enclave, neither of
        which is here, would hide them from it.
        """
        self.ledger.bytes_up[client] += delta.nbytes
        for space, keys in zip(self._names, chosen, strict=True):
            if isinstance(keys, DeviceOnly):
                what = f"{space} keys, with the update"
                seen = keys.show(self.ledger, "server", round_=round_, client=client, what=what)
                self.ledger.bytes_up[client] += KEY_BYTES * len(seen.at_party())


def localize_bags(x: Tensor, y: Tensor, keys: Sequence[Keys]) -> tuple[Tensor, Tensor]:
    """Bags of word ids (B, L) in terms of the selected words; others become ``ABSENT``."""
    return positions(keys[0], x, missing=-1), y


def localize_tokens(unknown: int = 0) -> Localize:
    """Return what puts token ids (B, T) in terms of the selected words, for next-word prediction.

    Args:
        unknown: the key that stands for words that are not selected; every client must select it.

    Returns:
        Words that are not selected are read as ``unknown``; as targets they do not count: the
        softmax is over the selected words only, decoys among them. Sentences without any that
        counts are left out. A ConfigError where ``unknown`` is not selected.
    """

    def localize(x: Tensor, y: Tensor, keys: Sequence[Keys]) -> tuple[Tensor, Tensor]:
        if unknown not in keys[0]:
            raise ConfigError(
                f"key {unknown} stands for unknown words and is not selected: use always=(...)."
            )
        stands_for_them = keys[0].index(unknown)
        classes = positions(keys[0], y, missing=-100)
        known = (classes >= 0).any(dim=1)
        return positions(keys[0], x[known], missing=stands_for_them), classes[known]

    return localize


def positions(keys: Keys, ids: Tensor, *, missing: int) -> Tensor:
    """Return where in ``keys``, ascending, each id stands; ``missing`` where it does not."""
    selected = torch.tensor(keys)
    place = torch.searchsorted(selected, ids).clamp(max=len(keys) - 1)
    return torch.where(selected[place] == ids, place, missing)
