"""Methods: the ways to compute the updates of simulated clients, and which of them may apply.

``LocalComputation`` computes clients with a given method. ``candidates`` returns the methods that
the structure of a network and its training permit; ``engines/choice.py`` finds the fastest. Both
are one file, because what a method needs of clients and training is what makes it a candidate.
"""

import hashlib
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from accounting.checks import ConfigError
from privpart.client import (
    Descend,
    LocalTraining,
    Watch,
    client_update,
    error_in,
    moved,
    seeded,
    unclipped_update,
)
from privpart.clip import add_in_place, clip_and_measure, clip_rows
from privpart.data.batches import Batch, count_rows, map_tensors
from privpart.data.clients import Clients
from privpart.data.users import Users
from privpart.engines.device import Recorder, float32_products, free_memory, has_float64
from privpart.engines.frozen_prefix import Features, feature_bytes
from privpart.engines.ghost_sum import GhostSum
from privpart.engines.layers import (
    StepsInPlace,
    channels_last,
    replaced_dense,
    worth_in_place,
    worth_onednn,
)
from privpart.engines.recorded import RecordedTraining
from privpart.engines.vectorized import (
    LARGEST_PASS,
    VectorizedTraining,
    losses_of,
    padded_batches,
    single_step,
)
from privpart.messages import ClientId, RoundTask
from privpart.model import PartialModel

_PASS_BYTES = 2**24
"""Limit on the examples of one ghost-clipping pass, and on its gradients of single clients."""
_SMALL_STEP = 2**23
"""Filters' parameters times pixels of a batch up to which convolutions are vectorized on a CPU."""
_SUMMED = 2**25
"""Numbers of updates that an accelerator widens to float64 at once, to add them up."""
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Method:
    """How clients are computed. All methods are the same training, up to rounding.

    Attributes:
        vectorized: many clients as one batched computation; otherwise one client after another.
        recorded: steps as CUDA graphs, see ``RecordedTraining``.
        channels_last: convolutions on images whose channels are adjacent in memory.
        onednn: large dense layers multiplied by oneDNN; only one client after another.
        in_place: steps of plain SGD added to large dense weights without writing their gradient;
            only one client after another.
        bfloat16: matrix products and convolutions rounded to 8 bits (torch.autocast), with float32
            parameters. Never chosen automatically.
        ghost_sum: ghost clipping in one pass, which returns only the sum of the clipped updates;
            see ``GhostSum``.
    """

    vectorized: bool = False
    recorded: bool = False
    channels_last: bool = False
    onednn: bool = False
    in_place: bool = False
    bfloat16: bool = False
    ghost_sum: bool = False

    def __str__(self) -> str:
        if self.ghost_sum:
            return "ghost clipping"
        name = "vectorized (vmap)" if self.vectorized else "one client after another"
        layout = ", channels last" if self.channels_last else ""
        products = ", dense layers by oneDNN" if self.onednn else ""
        steps = ", steps in place" if self.in_place else ""
        name += ", steps recorded" if self.recorded else ""
        return name + layout + products + steps + (", bfloat16" if self.bfloat16 else "")


class LocalComputation:
    """Computes the updates of one population's clients.

    Args:
        model: shared by all clients, which are computed on its device; its trained part is
            overwritten.
        clients: the clients' data; that of ``Users`` is on the model's device. Of any other kind,
            each client's examples are fetched when the client is computed, one after another.
        local: how each client trains.
        data_seed: order of examples; each (round, client) has its own generator, so no result
            depends on which clients ran before it.
        features: outputs of the frozen prefix, if ``model`` is only the layers behind it.
        tf32: whether a CUDA device rounds the factors of products to 10 bits.

    Attributes:
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
        self.tf32 = tf32
        self.clients = clients
        self.features = features
        self.ends_only = False
        self.convolutional = any(isinstance(m, nn.Conv2d) for m in model.module.modules())
        self._data_seed = data_seed
        self._vectorized = VectorizedTraining(model, local)
        self._ghost_sum = GhostSum(model) if GhostSum.supports(model) else None
        self._recorded: RecordedTraining | None = None
        self._recordings: Recorder | None = None

    @property
    def local(self) -> LocalTraining:
        """How each client trains from now on; a schedule sets it in every round."""
        return self._vectorized.local

    @local.setter
    def local(self, local: LocalTraining) -> None:
        self._vectorized.local = local

    @property
    def device(self) -> torch.device:
        """Where clients are computed."""
        return self.model.flat.device

    @property
    def users(self) -> Users:
        """The clients' data, if all of it is in memory."""
        if not isinstance(self.clients, Users):
            raise TypeError("the examples of these clients are fetched one client at a time")
        return self.clients

    @property
    def x(self) -> Tensor:
        """All examples as the model takes them, shape (n, ...): features if there is a cache."""
        return self.users.x if self.features is None else self.features.values

    @property
    def one_at_a_time(self) -> str:
        """Why the clients can only be computed one after another; empty if other ways exist."""
        local = self.local
        if not isinstance(self.clients, Users):
            return "each client's examples are fetched when it trains"
        if local.augment is not None:
            return "batches are augmented"
        if not isinstance(local.loss, str):
            return "the loss is a function"
        if any(isinstance(layer, nn.EmbeddingBag) for layer in self.model.module.modules()):
            return "torch.func has no batched nn.EmbeddingBag"
        # padding needs labels
        return "" if local.loss == "cross_entropy" else f"the loss is {local.loss}"

    @property
    def recordable(self) -> bool:
        """Whether the device may repeat recorded steps of these clients."""
        return self.device.type == "cuda" and not self.model.local

    def any_examples(self, clients: Sequence[ClientId]) -> bool:
        """Return whether one of the clients has examples; those that are fetched count as some."""
        if not isinstance(self.clients, Users):
            return bool(clients)
        return any(len(self.clients.indices[client]) for client in clients)

    def updates(
        self,
        task: RoundTask,
        clients: Sequence[ClientId],
        start: Tensor,
        method: Method,
        out: Tensor,
        watch: Watch | None = None,
    ) -> None:
        """Write each client's clipped update into a row of ``out``, shape (clients, c).

        An update that is not finite becomes NaN throughout, and counts as zeros.

        A vectorized ``method`` falls back to one client after another where ``can_vectorize`` says
        no.

        Args:
            task: the round.
            clients: whose updates to compute.
            start: the round's trained part, shape (d,), on the CPU.
            method: how to compute them; not ``ghost_sum``.
            out: overwritten, on the CPU; c is the number of active parameters.
            watch: called once per client, in order.

        Raises:
            ConfigError: a client's examples cannot be trained on; the sentence names the client.
        """
        to, start = out[: len(clients)], start.to(self.device)
        with self._guarded():
            if self.device.type == "cpu":
                self._updates(task, clients, start, method, to, watch)
            else:
                found, norms = self._on_device(task, clients, start, method, task.clip_norm, watch)
                to.copy_(found)
                to[[place for place, norm in enumerate(norms) if math.isnan(norm)]] = math.nan

    def summed(
        self,
        task: RoundTask,
        clients: Sequence[ClientId],
        start: Tensor,
        method: Method,
        out: Tensor,
        watch: Watch | None = None,
    ) -> Sequence[float]:
        """Call ``sum``, or ``sum_each`` with another method than ghost clipping."""
        if method.ghost_sum:
            return self.sum(task, clients, start, out, watch)
        return self.sum_each(task, clients, start, method, out, watch)

    def sum_each(
        self,
        task: RoundTask,
        clients: Sequence[ClientId],
        start: Tensor,
        method: Method,
        out: Tensor,
        watch: Watch | None = None,
    ) -> Sequence[float]:
        """Write the sum of clients' clipped updates into ``out``, shape (c,), float64.

        Args: as for ``updates``; where ``sums_each`` allows it.

        Returns:
            The norm of each client's update before clipping; NaN of one that is not finite, and
            counts as zeros.
        """
        longest = task.clip_norm if task.sum_clip_norm is None else task.sum_clip_norm
        with self._guarded():
            start = start.to(self.device)
            if self.device.type == "cpu":
                return self._sum_vectorized(task, clients, start, method, longest, out, watch)
            updates, norms = self._on_device(task, clients, start, method, longest, watch)
            some = max(1, _SUMMED // len(clients))  # torch writes what it widens
            parts = [part.sum(0, dtype=torch.float64) for part in torch.split(updates, some, 1)]
            out.copy_(torch.cat(parts))
        return norms

    def sums_each(self, task: RoundTask, method: Method) -> bool:
        """Return whether ``sum_each`` applies: to all methods on an accelerator, to one here."""
        # the server can refuse a client's second update only if it gets each update
        distinct = len(set(task.clients)) == len(task.clients)
        here = method.vectorized and self._can_vectorize
        return distinct and (here or self.device.type != "cpu")

    def _sum_vectorized(
        self,
        task: RoundTask,
        clients: Sequence[ClientId],
        start: Tensor,
        method: Method,
        clip_norm: float,
        out: Tensor,
        watch: Watch | None,
    ) -> Sequence[float]:
        norms, each = [], torch.empty(len(clients), len(out))
        generators = self._generators(task, clients)
        out.zero_()
        try:
            for place, norm in self._vectorized_updates(
                task, clients, start, generators, method, clip_norm, each, watch
            ):
                norms.append(norm)
                if not math.isnan(norm):
                    add_in_place(out, each[place])
        except (IndexError, RuntimeError) as error:
            if not _out_of_range(error):
                raise
            # one client after another says whose word or label it is
            self._updates(task, clients, start, Method(), each, None)
            raise
        return norms

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Within this context, clients train: in the precision that was asked for."""
        with float32_products(self.device, tf32=self.tf32), unwritten(self.model):
            try:
                yield
            except RuntimeError as error:
                if "device-side assert" not in str(error):
                    raise
                raise ConfigError(
                    f"device='{self.device}': a word, label or row of a client is out of range, "
                    "and the device stopped. On the CPU a sentence names the client: run this "
                    "round with device='cpu'."
                ) from error

    def _updates(
        self,
        task: RoundTask,
        clients: Sequence[ClientId],
        start: Tensor,
        method: Method,
        out: Tensor,
        watch: Watch | None,
    ) -> None:
        generators = self._generators(task, clients)
        if method.vectorized and self._can_vectorize:
            try:
                written = self._vectorized_updates(
                    task, clients, start, generators, method, task.clip_norm, out, watch
                )
                deque(written, maxlen=0)
            except (IndexError, RuntimeError) as error:
                if not _out_of_range(error):
                    raise
            else:
                return
            # a word or label is out of range: one client after another says whose it is
            generators = self._generators(task, clients)
        with self._computing(method) as descend:
            each = zip(clients, self._examples(clients, generators), out, generators, strict=True)
            for client, examples, to, generator in each:
                with naming(client):
                    client_update(
                        self.model,
                        start,
                        examples,
                        local=self.local,
                        clip_norm=task.clip_norm,
                        generator=generator,
                        active=task.active,
                        out=to,
                        watch=watch,
                        descend=descend,
                    )

    def _generators(self, task: RoundTask, clients: Sequence[ClientId]) -> list[torch.Generator]:
        return [client_generator(self._data_seed, task.round, client) for client in clients]

    @property
    def _can_vectorize(self) -> bool:
        return not self.one_at_a_time and can_vectorize(self.local)

    @contextmanager
    def _computing(self, method: Method) -> Iterator[Descend | None]:
        """Within this context, the network computes as ``method`` says; yield how it descends."""
        # autocast's cache would keep the weights of the first step for all later steps
        rounded = torch.autocast(
            self.device.type, torch.bfloat16, enabled=method.bfloat16, cache_enabled=False
        )
        module = self.model.module
        with ExitStack() as how:
            if method.channels_last:
                how.enter_context(channels_last(module))
            steps = StepsInPlace() if method.in_place else None
            if method.onednn or steps:
                how.enter_context(replaced_dense(module, onednn=method.onednn, steps=steps))
            how.enter_context(rounded)
            yield steps.step if steps else None

    def _on_device(
        self,
        task: RoundTask,
        clients: Sequence[ClientId],
        start: Tensor,
        method: Method,
        clip_norm: float,
        watch: Watch | None,
    ) -> tuple[Tensor, list[float]]:
        """Return clients' clipped updates, shape (clients, c), and their norms before.

        Nothing between the first client and the last one waits for the device.
        """
        generators = self._generators(task, clients)
        shape = len(clients), self.model.active_dim(task.active)
        out = torch.empty(shape, device=self.device)
        losses: list[Any] = [None] * len(clients)
        if method.vectorized and self._can_vectorize:
            written = self._vectorized.updates(
                start,
                self.x,
                self.users.y,
                self._rows(clients),
                generators,
                out=out,
                active=task.active,
                channels_last=method.channels_last,
                losses=None if watch is None else losses,
                recorder=self._recorder() if method.recorded else None,
            )
            deque(written, maxlen=0)
        elif method.recorded and self._can_vectorize and can_record(self.local, task):
            if self._recorded is None:
                self._recorded = RecordedTraining(
                    self.model, self.x, self.users.y, self._recorder()
                )
            rows = self._rows(clients)
            self._recorded.updates(start, rows, generators, self.local, out=out, losses=losses)
        else:
            self._one_by_one(task, clients, start, generators, method, out, losses)
        if not has_float64(self.device):
            out = out.cpu()
        norms = clip_rows(out, clip_norm)
        if watch is not None:
            for loss, norm in zip(losses, norms, strict=True):
                watch(None if loss is None else float(loss), norm)
        return out, norms

    def _recorder(self) -> Recorder:
        self._recordings = self._recordings or Recorder(self.device)
        return self._recordings

    def _one_by_one(
        self,
        task: RoundTask,
        clients: Sequence[ClientId],
        start: Tensor,
        generators: Sequence[torch.Generator],
        method: Method,
        out: Tensor,
        losses: list[Any],
    ) -> None:
        """Write updates that are not clipped."""
        with self._computing(method) as descend:
            each = zip(clients, self._examples(clients, generators), generators, strict=True)
            for place, (client, examples, generator) in enumerate(each):
                training = unclipped_update(
                    self.model,
                    start,
                    examples,
                    local=self.local,
                    generator=generator,
                    active=task.active,
                    descend=descend,
                )
                with naming(client), training as (update, first):
                    out[place].copy_(update)
                    losses[place] = first

    def _examples(
        self, clients: Sequence[ClientId], generators: Sequence[torch.Generator]
    ) -> Iterator[Batch]:
        """Yield each client's examples."""
        if isinstance(self.clients, Users):
            rows = moved(self._rows(clients), self.device)
            x, y = self.x, self.clients.y
            yield from ((x[own], y[own]) for own in rows)
            return
        for client, generator in zip(clients, generators, strict=True):
            examples = fetched(self.clients, client, generator)
            yield map_tensors(lambda tensor: tensor.to(self.device), examples)

    def _vectorized_updates(
        self,
        task: RoundTask,
        clients: Sequence[ClientId],
        start: Tensor,
        generators: Sequence[torch.Generator],
        method: Method,
        clip_norm: float,
        out: Tensor,
        watch: Watch | None,
    ) -> Iterator[tuple[int, float]]:
        """Write clipped updates, on the CPU; yield the place and the norm of each before clipping.

        Each is clipped, and read by the caller, while it is in the cache.
        """
        rows = self._rows(clients)
        losses: list[float | None] | None = None if watch is None else [None] * len(rows)
        norms = [0.0] * len(rows)
        written = self._vectorized.updates(
            start,
            self.x,
            self.users.y,
            rows,
            generators,
            out=out,
            active=task.active,
            channels_last=method.channels_last,
            losses=losses,
        )
        for place in written:
            update = out[place]
            clipped, norms[place] = clip_and_measure(update, clip_norm, out=update)
            if clipped is not update:
                update.copy_(clipped)
            yield place, norms[place]
        if watch is not None and losses is not None:
            for loss, norm in zip(losses, norms, strict=True):
                watch(loss, norm)

    def sum(
        self,
        task: RoundTask,
        clients: Sequence[ClientId],
        start: Tensor,
        out: Tensor,
        watch: Watch | None = None,
    ) -> Sequence[float]:
        """Write the sum of clients' clipped updates into ``out``, shape (d,), float64.

        At most ``clients_per_ghost_sum(task)`` clients, which must not be 0.

        Returns:
            As ``sum_each``.
        """
        if self._ghost_sum is None:
            raise RuntimeError("ghost clipping does not support this network")
        rows = zip(clients, self._rows(clients), strict=True)
        batches = [self._first_batch(task, client, own) for client, own in rows]
        # ``batch_size`` rows for each client, whatever it holds: a product with another number of
        # rows rounds differently, by which one client's data would reach the others' updates.
        x, y = padded_batches(self.x, self.users.y, batches, self.local.batch_size)
        losses: list[float] = []

        def total_loss(logits: Tensor) -> Tensor:
            each = losses_of(logits.view(*y.shape[:2], *logits.shape[1:]), y)
            if watch is not None:
                losses.extend(each.cpu().tolist())
            return each.sum()

        total = out.to(self.device)
        try:
            with float32_products(self.device, tf32=self.tf32):
                each = self._ghost_sum.sum(
                    start.to(self.device),
                    x,
                    total_loss,
                    learning_rate=self.local.learning_rate,
                    clip_norm=task.clip_norm if task.sum_clip_norm is None else task.sum_clip_norm,
                    out=total,
                )
        except (IndexError, RuntimeError) as error:
            if not _out_of_range(error):
                raise
            # one client after another says whose word or label it is
            self.updates(task, clients, start, Method(), torch.empty(len(clients), len(out)))
            raise
        out.copy_(total)  # which does nothing on the CPU
        norms: list[float] = each.cpu().tolist()
        if watch is not None:
            for loss, norm, batch in zip(losses, norms, batches, strict=True):
                watch(loss if len(batch) else None, norm)
        return norms

    def _first_batch(self, task: RoundTask, client: ClientId, own: Tensor) -> Tensor:
        if len(own) <= self.local.batch_size:
            return own  # all of them, so their order does not matter
        generator = client_generator(self._data_seed, task.round, client)
        return own[next(self.local.batches(len(own), generator))]

    def clients_per_ghost_sum(self, task: RoundTask) -> int:
        """Return the largest number of clients for one call of ``sum``; 0 if it does not apply.

        It does not where ``sum`` would not be the clients' training. The number is public: it
        depends neither on who is asked nor on what clients hold.
        """
        local = self.local
        supported = single_step(local) and not self.one_at_a_time
        everything = task.active is None and can_vectorize(local)
        if self._ghost_sum is None or not supported or not everything:
            return 0
        if len(set(task.clients)) < len(task.clients):
            return 0  # the server can refuse a client's second update only if it gets each update
        examples = min(LARGEST_PASS, _PASS_BYTES // (4 * max(1, self.x[:1].numel())))
        materialized = _PASS_BYTES // (4 * max(1, self._ghost_sum.materialized))
        return min(examples // local.batch_size, max(1, materialized))

    def prepare(self, clients: Sequence[ClientId]) -> None:
        """Compute the features that are missing for clients with data in memory."""
        self._rows(clients)

    def _rows(self, clients: Sequence[ClientId]) -> list[Tensor]:
        """Return each client's rows of ``x``, and compute the features that are missing there."""
        rows = self.users.indices.of_each(clients)
        if self.ends_only:
            size = self.local.batch_size
            rows = [own[max(0, (len(own) - 1) // size * size - size) :] for own in rows]
        if self.features is not None and rows:
            self.features.compute(rows)
        return rows


def _out_of_range(error: Exception) -> bool:
    """Return whether torch, or vmap in its own words, says that a word or label is out of range."""
    return isinstance(error, IndexError) or "out of bounds" in str(error)


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


def can_vectorize(local: LocalTraining) -> bool:
    """Return whether clients can be vectorized: their objective is fedavg."""
    return local.objective == "fedavg"


def can_record(local: LocalTraining, task: RoundTask) -> bool:
    """Return whether one recorded step serves all: plain SGD that moves everything."""
    return local.plain_sgd and not local.alternate and task.active is None


def client_generator(data_seed: int, round_: int, client: ClientId) -> torch.Generator:
    """Return the generator of one client in one round; other clients have no influence on it."""
    number = client if isinstance(client, int) and client >= 0 else _number_of(client)
    address = np.random.SeedSequence((data_seed, round_, number)).generate_state(1)
    return torch.Generator().manual_seed(int(address[0]))


def _number_of(client: ClientId) -> int:
    """Return the hash of an id that is a string or a negative number, 256 bits."""
    digest = hashlib.sha256(b"privpart/client id/" + json.dumps(client).encode())
    return int.from_bytes(digest.digest(), "big")


def candidates(computation: LocalComputation, task: RoundTask, *, bfloat16: bool) -> list[Method]:
    """Return the methods worth timing; the first, one client after another, always works.

    Of methods that are equally fast, the first is taken.
    """
    convolutional, module = computation.convolutional, computation.model.module
    rows = _batch_rows(computation)
    methods = [Method(bfloat16=bfloat16)]
    on_cpu = computation.device.type == "cpu" and not bfloat16
    in_place = on_cpu and computation.local.plain_sgd and worth_in_place(module, rows)
    if convolutional or in_place:
        methods.append(Method(channels_last=convolutional, in_place=in_place, bfloat16=bfloat16))
    if on_cpu and worth_onednn(module, rows):
        methods.append(Method(channels_last=convolutional, onednn=True, in_place=in_place))
    if bfloat16 or not can_vectorize(computation.local):
        return methods
    if computation.recordable and can_record(computation.local, task):
        methods.append(Method(recorded=True))
    several = computation.local.plain_sgd and not single_step(computation.local)
    if computation.recordable and several:
        methods.append(Method(vectorized=True, recorded=True))
    # Vectorized convolutions become one grouped convolution, which is slow on a CPU unless it is
    # small. They do not in a single step, where all clients share the filters. An accelerator is
    # always timed.
    convolve = not on_cpu or single_step(computation.local) or _small_convolutions(computation)
    if not convolutional or convolve:
        methods.append(Method(vectorized=True))
    if convolutional and convolve:
        methods.append(Method(vectorized=True, channels_last=True))
    return methods


def _small_convolutions(computation: LocalComputation) -> bool:
    """Return whether a step multiplies so little that calls take longer than the products."""
    convolutions = (m for m in computation.model.module.modules() if isinstance(m, nn.Conv2d))
    filters = sum(layer.weight.numel() for layer in convolutions)
    # of the network's input: hardly any network convolves larger images than those
    pixels = computation.x[:1].numel() // max(1, computation.x.shape[1])
    return filters * pixels * computation.local.batch_size <= _SMALL_STEP


def _batch_rows(computation: LocalComputation) -> int:
    """Return how many rows a dense layer multiplies per batch; each word of a text is one."""
    y = computation.users.y
    return computation.local.batch_size * (y[0].numel() if len(y) else 1)


def prefix_fits(below: nn.Sequential, x: Tensor) -> bool:
    """Return whether the outputs of a frozen prefix fit into half the free memory of x's device."""
    return feature_bytes(below, x) <= _free_memory(x.device) // 2


def _free_memory(device: torch.device) -> int:
    if device.type != "cpu":
        return free_memory(device)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # workers share the outputs, and a container may limit shared memory further
    if _SHARED_MEMORY.is_dir():
        free = min(free, shutil.disk_usage(_SHARED_MEMORY).free)
    return free
