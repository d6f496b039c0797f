"""Methods: the ways to compute the updates of simulated clients.

``engines/choice.py`` says which one a training takes.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from accounting.checks import ConfigError
from privpart.client import error_in, seeded, unclipped_update
from privpart.clip import add_in_place, clip_and_measure, clip_rows
from privpart.data.batches import Batch, count_rows, map_tensors
from privpart.data.clients import Clients
from privpart.data.index import batch_rows, moved
from privpart.data.users import Users
from privpart.engines.device import float32_products
from privpart.engines.frozen_prefix import Features
from privpart.engines.ghost_sum import GhostSum
from privpart.engines.recorded import RecordedTraining
from privpart.engines.vectorized import (
    LARGEST_PASS,
    VectorizedTraining,
    rounded_products,
    single_step,
)
from privpart.messages import ClientId, RoundTask
from privpart.model import PartialModel
from privpart.settings.client import LocalTraining

if TYPE_CHECKING:
    from privpart.engines.memory import Memory

_PASS_BYTES = 2**24
"""Limit on the examples of one ghost-clipping pass, and on its gradients of single clients."""
_SUMMED = 2**25  # numbers of updates that an accelerator widens to float64 at once, to add them up

Chunk = Sequence[ClientId]


@dataclass(frozen=True, slots=True)
class Method:
    """How clients are computed. All methods are the same training, up to rounding.

    Attributes:
        vectorized: many clients as one batched computation; otherwise one client after another.
        recorded: steps as CUDA graphs, see ``RecordedTraining``; only one client after another.
        bfloat16: factors of matrix products and convolutions rounded to 8 bits (torch.autocast),
            with float32 parameters and updates. Never chosen automatically. Ghost clipping,
            recorded steps and convolutions under vmap do not round.
        ghost_sum: ghost clipping in one pass, which returns only the sum of the clipped updates;
            see ``GhostSum``.
    """

    vectorized: bool = False
    recorded: bool = False
    bfloat16: bool = False
    ghost_sum: bool = False

    def __str__(self) -> str:
        if self.ghost_sum:
            return "ghost clipping"
        name = "vectorized (vmap)" if self.vectorized else "one client after another"
        return name + ", steps recorded" * self.recorded + ", bfloat16" * self.bfloat16


class LocalComputation:
    """Computes the updates of one population's clients.

    Args:
        model: clients are computed on its device; its trained part is overwritten.
        clients: the data of ``Users`` is on the model's device. Of any other kind, each client's
            examples are fetched when the client is computed, one after another.
        data_seed: order of examples; each (round, client) has its own generator, so no result
            depends on which clients ran before it.
        features: outputs of the frozen prefix, if ``model`` is only the layers behind it.
        tf32: whether a CUDA device rounds the factors of products to 10 bits.

    Attributes:
        local: how each client trains from now on; a schedule sets it in every round.
        memory: what clients keep from round to round, if anything; they train with it.
        device: where clients are computed.
        ends_only: whether clients in memory have only the examples of a full batch and of their
            last one, so that two steps show both.
    """

    def __init__(
        self,
        model: PartialModel,
        clients: Users | Clients,
        *,
        local: LocalTraining,
        data_seed: int,
        features: Features | None = None,
        tf32: bool = False,
    ) -> None:
        self.model = model
        self.clients = clients
        self.local = local
        self.features = features
        self.device = model.flat.device
        self.ends_only = False
        self.memory: Memory | None = None
        self._tf32 = tf32
        self._data_seed = data_seed
        self._vectorized: VectorizedTraining | None = None
        self._ghost_sum: GhostSum | None = None
        self._recorded: RecordedTraining | None = None
        if isinstance(clients, Users):
            self._vectorized = VectorizedTraining(model, self.x, clients.y)
            if GhostSum.supports(model):
                self._ghost_sum = GhostSum(model, self.x, clients.y)

    @property
    def users(self) -> Users:
        """The clients' data, if all of it is in memory."""
        return cast("Users", self.clients)

    @property
    def x(self) -> Tensor:
        """All examples as the model takes them, shape (n, ...): features if there is a cache."""
        return self.users.x if self.features is None else self.features.values

    @property
    def words(self) -> int:
        """Labels of an example: 1, or those of all its words."""
        y = self.users.y
        return y[0].numel() if len(y) else 1

    @property
    def batch_rows(self) -> int:
        """Examples of a typical client's batch."""
        index = self.users.indices
        return min(self.local.batch_size, -(-index.rows // len(index)))

    @property
    def one_at_a_time(self) -> bool:
        """Whether the clients can only be computed one after another, without a check.

        Those are fetched or augmented, or have a loss of which padding is a part; and torch.func
        has no batched ``nn.EmbeddingBag``.
        """
        bags = any(isinstance(layer, nn.EmbeddingBag) for layer in self.model.module.modules())
        named = self.local.augment is None and self.local.loss == "cross_entropy"
        return bags or not named or not isinstance(self.clients, Users)

    @property
    def vectorizable(self) -> bool:
        """Whether clients can be vectorized: their objective is fedavg, too."""
        shared = not self.model.local  # all but the trained part is
        return shared and not self.one_at_a_time and self.local.objective == "fedavg"

    def recordable(self, task: RoundTask) -> bool:
        """Return whether one recorded step serves all: plain SGD that moves everything."""
        plain = self.local.plain_sgd and not self.local.alternate
        return plain and self.vectorizable and task.active is None

    def any_examples(self, clients: Chunk) -> bool:
        """Return whether one of the clients has examples; those that are fetched count as some."""
        if not isinstance(self.clients, Users):
            return bool(clients)
        return any(len(self.clients.indices[client]) for client in clients)

    def updates(
        self, task: RoundTask, clients: Chunk, start: Tensor, method: Method, out: Tensor
    ) -> None:
        """Write each client's clipped update into a row of ``out``, shape (clients, c).

        An update that is not finite becomes NaN throughout, and counts as zeros. A vectorized
        ``method`` falls back to one client after another where clients cannot be vectorized.

        ``start`` is the round's trained part, shape (d,), on the CPU, and so is ``out``; c is the
        number of active parameters. The method is not ``ghost_sum``.

        Raises:
            ConfigError: a client's examples cannot be trained on; the sentence names the client.
        """
        this, to = _Part(task, clients, start.to(self.device), method), out[: len(clients)]
        with self._guarded(this):
            if self.device.type == "cpu":
                for _ in _clipped(self._trained(this, to), task.clip_norm, to):
                    pass
            else:
                clipped, norms = self._on_device(this, task.clip_norm)
                to.copy_(clipped)
                to[[place for place, norm in enumerate(norms) if math.isnan(norm)]] = math.nan

    def summed(
        self, task: RoundTask, clients: Chunk, start: Tensor, method: Method, out: Tensor
    ) -> Sequence[float]:
        """Write the sum of clients' clipped updates into ``out``, shape (c,), float64.

        Only where ``sums_each`` or ``clients_per_ghost_sum`` allows it.

        Returns:
            The norm of each client's update before clipping; NaN of one that is not finite, and
            counts as zeros.
        """
        longest = _longest(task)
        this = _Part(task, clients, start.to(self.device), method)
        with self._guarded(this):
            if method.ghost_sum:
                return self._ghost_summed(this, longest, out)
            if self.device.type == "cpu":
                updates = torch.empty(len(clients), len(out))
                return _added(
                    _clipped(self._trained(this, updates), longest, updates), updates, out
                )
            updates, norms = self._on_device(this, longest)
            _added_on_device(updates, out)
        return norms

    def summed_given(
        self, task: RoundTask, updates: Tensor, method: Method, out: Tensor
    ) -> Sequence[float]:
        """Write the sum of updates into ``out`` as ``summed`` does, but of given ones, not clipped.

        ``updates``, shape (V, c), float32, on the CPU, are overwritten.
        """
        longest = _longest(task)
        if method.ghost_sum and self._ghost_sum is not None:
            total = out.to(self.device)
            found = self._ghost_sum.sum_given(updates.to(self.device), clip_norm=longest, out=total)
            out.copy_(total)
            listed: list[float] = found.cpu().tolist()
            return listed
        if self.device.type == "cpu":
            return _added(_clipped(range(len(updates)), longest, updates), updates, out)
        updates = updates.to(self.device)
        norms = clip_rows(updates, longest)
        _added_on_device(updates, out)
        return norms

    def sums_each(self, task: RoundTask, method: Method) -> bool:
        """Return whether ``summed`` applies: to all methods on an accelerator, to one here."""
        # the server can refuse a client's second update only if it gets each update
        distinct = len(set(task.clients)) == len(task.clients)
        on_cpu = method.vectorized and self.vectorizable
        return distinct and (on_cpu or self.device.type != "cpu")

    @contextmanager
    def _guarded(self, this: "_Part") -> Iterator[None]:
        """Within this context, clients train: in the precision that was asked for."""
        on_cuda = self.device.type == "cuda"
        products = float32_products(tf32=self._tf32) if on_cuda else nullcontext()
        with products, unwritten(self.model):
            try:
                yield
            except (IndexError, RuntimeError) as error:
                if "device-side assert" in str(error):
                    raise ConfigError(
                        f"device='{self.device}': a word, label or row of a client is out of "
                        "range, and the device stopped. On the CPU a sentence names the client: "
                        "run this round with device='cpu'."
                    ) from error
                if isinstance(error, IndexError) or "out of bounds" in str(error):
                    # one client after another says whose word or label it is
                    out = torch.empty(len(this.clients), self.model.active_dim(this.task.active))
                    for _ in self._trained(this._replace(method=Method()), out):
                        pass
                raise

    def _trained(self, this: "_Part", out: Tensor) -> Iterator[int]:
        """Write updates that are not clipped; yield the place of each as soon as it is written."""
        local, active = self.local, this.task.active
        if this.method.vectorized and self.vectorizable and self._vectorized is not None:
            batches = self._batches(this)
            yield from self._vectorized.updates(
                this.start, batches, local, out=out, active=active, bfloat16=this.method.bfloat16
            )
        elif this.method.recorded and self.recordable(this.task):
            self._recorded = self._recorded or RecordedTraining(self.model, self.x, self.users.y)
            self._recorded.updates(this.start, self._batches(this), local, out=out)
            yield from range(len(this.clients))
        else:
            yield from self._one_by_one(this, out)

    def _one_by_one(self, this: "_Part", out: Tensor) -> Iterator[int]:
        rounded = rounded_products(self.device, bfloat16=this.method.bfloat16)
        generators = self._generators(this)
        triples = zip(
            this.clients, self._examples(this.clients, generators), generators, strict=True
        )
        for place, (client, examples, generator) in enumerate(triples):
            previous = own = None
            if self.memory is not None:
                previous, own = self.memory.of(client, self.local, this.start)
            with rounded, naming(client):
                unclipped_update(
                    self.model,
                    this.start,
                    examples,
                    local=self.local,
                    generator=generator,
                    active=this.task.active,
                    previous=previous,
                    own=own,
                    out=out[place],
                )
            yield place

    def _generators(self, this: "_Part") -> list[torch.Generator]:
        return [client_generator(self._data_seed, this.task.round, c) for c in this.clients]

    def _examples(self, clients: Chunk, generators: Sequence[torch.Generator]) -> Iterator[Batch]:
        """Yield each client's examples."""
        if isinstance(self.clients, Users):
            x, y = self.x, self.clients.y
            for rows in moved(self._rows(clients), self.device):
                yield x[rows], y[rows]
            return
        for client, generator in zip(clients, generators, strict=True):
            examples = fetched(self.clients, client, generator)
            yield map_tensors(lambda tensor: tensor.to(self.device), examples)

    def _on_device(self, this: "_Part", clip_norm: float) -> tuple[Tensor, list[float]]:
        """Return clients' clipped updates, shape (clients, c), and their norms before.

        Nothing between the first client and the last one waits for the device.
        """
        dim = self.model.active_dim(this.task.active)
        out = torch.empty(len(this.clients), dim, device=self.device)
        for _ in self._trained(this, out):
            pass
        return out, clip_rows(out, clip_norm)

    def _ghost_summed(self, this: "_Part", clip_norm: float, out: Tensor) -> Sequence[float]:
        if self._ghost_sum is None:
            raise RuntimeError("ghost clipping does not support this network")
        total, batches = out.to(self.device), self._batches(this)
        norms = self._ghost_sum.sum(this.start, batches, self.local, clip_norm=clip_norm, out=total)
        out.copy_(total)  # which does nothing on the CPU
        listed: list[float] = norms.cpu().tolist()
        return listed

    def clients_per_ghost_sum(self, task: RoundTask) -> int:
        """Return the largest number of clients for one ghost sum; 0 if it does not apply.

        It does not where it would not be the clients' training. The number is public: it depends
        neither on who is asked nor on what clients hold.
        """
        local = self.local
        if self._ghost_sum is None or not single_step(local) or not self.vectorizable:
            return 0
        # the server can refuse a client's second update only if it gets each update
        if task.active is not None or len(set(task.clients)) < len(task.clients):
            return 0
        examples = min(LARGEST_PASS, _PASS_BYTES // (4 * max(1, self.x[:1].numel())))
        materialized = _PASS_BYTES // (4 * max(1, self._ghost_sum.materialized))
        return min(examples // local.batch_size, max(1, materialized))

    def _batches(self, this: "_Part") -> list[list[Tensor]]:
        """Return the rows of each client's batches."""
        pairs = zip(self._rows(this.clients), self._generators(this), strict=True)
        return [
            [rows[batch] for batch in batch_rows(self.local, len(rows), generator)]
            for rows, generator in pairs
        ]

    def _rows(self, clients: Chunk) -> list[Tensor]:
        """Return each client's rows of ``x``, and compute the features that are missing there."""
        rows = [self.users.indices[client] for client in clients]
        if self.ends_only:
            size = self.local.batch_size
            rows = [
                client_rows[max(0, (len(client_rows) - 1) // size * size - size) :]
                for client_rows in rows
            ]
        if self.features is not None and rows:
            self.features.compute(rows)
        return rows


def _longest(task: RoundTask) -> float:
    """Return the clip norm of updates that are summed here."""
    return task.clip_norm if task.sum_clip_norm is None else task.sum_clip_norm


def _clipped(
    places: Iterable[int], clip_norm: float, updates: Tensor
) -> Iterator[tuple[int, float]]:
    """Clip rows of updates, on the CPU; yield the place and the norm of each before clipping.

    Each is clipped, and read by the caller, while it is in the cache.
    """
    for place in places:
        update = updates[place]
        clipped, norm = clip_and_measure(update, clip_norm, out=update)
        if clipped is not update:
            update.copy_(clipped)
        yield place, norm


def _added(clipped: Iterable[tuple[int, float]], updates: Tensor, out: Tensor) -> Sequence[float]:
    """Write the sum of clipped updates into ``out``; return their norms before clipping."""
    norms = []
    out.zero_()
    for place, norm in clipped:
        norms.append(norm)
        if not math.isnan(norm):
            add_in_place(out, updates[place])
    return norms


def _added_on_device(updates: Tensor, out: Tensor) -> None:
    width = max(1, _SUMMED // len(updates))  # torch writes what it widens
    parts = torch.split(updates, width, 1)
    out.copy_(torch.cat([part.sum(0, dtype=torch.float64) for part in parts]))


class _Part(NamedTuple):
    """Clients of a round, who train from ``start``, on the device, by a method."""

    task: RoundTask
    clients: Chunk
    start: Tensor
    method: Method


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Within this context, if ``wanted``, compute on one thread: sums are rounded in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if wanted else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Work:
    """What is computed of a round's clients: their sum, or each update."""

    task: RoundTask
    local: LocalTraining
    method: Method
    summed: bool


@dataclass(frozen=True, slots=True)
class Result:
    """Results of a chunk of clients.

    Attributes:
        clients: the chunk.
        updates: clipped updates, each of shape (c,), to be read once; or one, their sum.
        norms: of a sum's updates before clipping.
    """

    clients: Chunk
    updates: Iterable[Tensor]
    norms: Sequence[float]


def compute(
    computation: LocalComputation, work: Work, chunk: Chunk, start: Tensor, out: Tensor
) -> Sequence[float]:
    """Write the updates of a chunk, or their sum, into ``out``; return the norms of a sum."""
    if work.summed:
        return computation.summed(work.task, chunk, start, work.method, out)
    computation.updates(work.task, chunk, start, work.method, out)
    return ()


@contextmanager
def naming(client: ClientId) -> Iterator[None]:
    """Within this context, name the client in every ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"client {client!r}: {error}") from error


@contextmanager
def unwritten(model: PartialModel) -> Iterator[None]:
    """Within this context, clients train; raise ConfigError if that changed the frozen part.

    ``PartialModel.lent`` sees ordinary writes, but not those to ``parameter.data``, by which one
    client's data would reach the updates of others.
    """
    before = model.frozen_checksum()
    yield
    if model.frozen_checksum() != before:
        raise ConfigError(
            "a frozen parameter was written to through .data during training: such a change is "
            "neither clipped nor noised. Let it train, or do not write to it; and build the model "
            "again."
        )


def fetched(clients: Clients, client: ClientId, generator: torch.Generator) -> Batch:
    """Return one client's examples; the seed of ``generator`` also seeds torch's random numbers.

    Raises:
        ConfigError: they cannot be fetched, or are not a nest of tensors with a row per example.
    """
    # another seed than those of the order of examples and of dropout
    seed = generator.initial_seed() ^ 2
    with seeded(seed, torch.device("cpu"), everything=True), naming(client):
        try:
            examples = clients.examples(client)
        except (ConfigError, MemoryError):
            raise
        except Exception as error:
            raise ConfigError(
                f"its examples cannot be fetched: {error_in(error, clients.examples)}"
            ) from error
        count_rows(examples)
        return examples


def client_generator(data_seed: int, round_: int, client: ClientId) -> torch.Generator:
    """Return the generator of one client in one round; other clients have no influence on it."""
    if isinstance(client, int) and client >= 0:
        number = client
    else:
        digest = hashlib.sha256(b"privpart/client id/" + json.dumps(client).encode())
        number = int.from_bytes(digest.digest(), "big")
    address = np.random.SeedSequence((data_seed, round_, number)).generate_state(1)
    return torch.Generator().manual_seed(int(address[0]))
