"""Vectorized training: the local training of many clients as one batched computation.

Every client of a chunk takes its k-th step at the same time, on its own copy of the trained part;
clients without a k-th step are left out. If the plan sets a single step of SGD (``single_step``),
all clients hold the same parameters, so one batched pass gives every update: short batches are
padded to a public length, and no bit of an update depends on what the other clients hold.

This is the same training as ``client_update``, up to rounding. torch.func.vmap follows most
networks; ``BatchedLayers`` keeps it from mixing embedding tables.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress, groupby
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from privpart.client import mean_loss
from privpart.data.index import moved
from privpart.model import LayerStates, PartialModel, logits_of, state_of
from privpart.optimizer import FlatOptimizer
from privpart.settings.client import LocalTraining

LARGEST_PASS = 256
"""Examples in one pass: of each client here, of all clients in ``ghost_sum``."""
_PADDING = -100  # the label that ``mean_loss`` ignores
Batches = Sequence[Sequence[Tensor]]
"""Per client, the rows of the examples of each of its steps."""


class VectorizedTraining:
    """Trains several clients at the same time.

    Args:
        model: its trained part holds the start while clients train; all share its frozen part.
        x: everyone's examples, shape (n, ...), on the model's device.
        y: their labels, shape (n,) or (n, length).
    """

    def __init__(self, model: PartialModel, x: Tensor, y: Tensor) -> None:
        self._model, self._x, self._y = model, x, y
        # Kept between chunks, by what trains: to clear fresh pages takes as long as to train a
        # small network.
        self._buffers: dict[tuple[str, ...], Tensor] = {}

    def updates(
        self,
        start: Tensor,
        batches: Batches,
        local: LocalTraining,
        *,
        out: Tensor,
        active: Sequence[int] | None = None,
        bfloat16: bool = False,
    ) -> Iterator[int]:
        """Write each client's update, not clipped, into its row of ``out``, shape (V, c).

        Clients train on the mean cross-entropy, from ``start``, shape (d,). The groups ``active``
        have c parameters; None trains all, and c is d. ``bfloat16`` rounds the factors of products.

        Yields:
            The index of each row as soon as it is written.

        Raises:
            RuntimeError: the network draws random numbers, keeps anything in its layers, or does
                something that ``torch.func.vmap`` does not support.
            ConfigError: the network writes to a frozen parameter.
        """
        parameters = dict(self._model.module.named_parameters())
        groups = range(len(self._model.groups)) if active is None else active
        self._rounded = rounded_products(start.device, bfloat16=bfloat16)
        self._names = tuple(name for group in groups for name in self._model.groups[group])
        self._shapes = [parameters[name].shape for name in self._names]
        with self._model.lent(start), nothing_kept(self._model):
            start = torch.cat([start[span] for span in self._model.spans(active)])
            if single_step(local):
                self._single_step(start, batches, local, out)
                yield from range(len(out))
            else:
                yield from self._many_steps(start, batches_on(start.device, batches), local, out)

    @torch.no_grad()  # torch.func's own gradients aside: parameters of idle groups ask for them
    def _single_step(
        self, start: Tensor, batches: Batches, local: LocalTraining, out: Tensor
    ) -> None:
        """Write the updates of one step of SGD, whose momentum starts at zero."""
        examples, labels = padded_batches(self._x, self._y, batches, local.batch_size)
        gradients_at_start = vmap(grad(self._loss), in_dims=(None, 0, 0))
        with self._rounded:
            gradients = gradients_at_start(self._split(start), examples, labels)
        for place, gradient in zip(self._split(out), gradients, strict=True):
            torch.mul(gradient, -local.learning_rate, out=place)

    def _many_steps(
        self, start: Tensor, batches: Batches, local: LocalTraining, out: Tensor
    ) -> Iterator[int]:
        # Clients with the most steps first: those still in training are then a prefix of the stack.
        # Among them, clients with equal batch sizes are neighbours and share one product.
        sizes = [[len(batch) for batch in client_batches] for client_batches in batches]
        order = sorted(range(len(batches)), key=lambda place: (len(sizes[place]), sizes[place]))
        order.reverse()
        flat, gradient = self._stacks(start, len(batches))
        # one optimiser serves all clients, because SGD and Adam treat each coordinate separately
        optimizer = None if local.plain_sgd else FlatOptimizer(local, [flat])
        active = len(batches)
        for step in range(max(map(len, batches), default=0) + 1):
            remaining = sum(len(client_batches) > step for client_batches in batches)
            # Read now: the optimiser moves every row of the stack, also those that have finished.
            for place in range(remaining, active):
                torch.sub(flat[place], start, out=out[order[place]])
                yield order[place]
            active = remaining
            if active:
                rows = [batches[order[place]][step] for place in range(active)]
                moving = local.moving(self._names, step)
                rate = local.learning_rate if optimizer is None else None
                self._step(flat, gradient, rows, moving, rate)
                if optimizer is not None:
                    optimizer.step([gradient])

    def _step(
        self,
        flat: Tensor,
        gradient: Tensor,
        batches: Sequence[Tensor],
        moving: Sequence[bool],
        rate: float | None,
    ) -> None:
        """Move the first clients of the stack by one step of SGD; None writes their gradients."""
        first = 0
        # Clients with batches of one size are computed together and nothing is padded: products
        # with another number of rows round differently, which would make one client's update depend
        # on how much data the others hold. (Alignment in memory still can.)
        for _, run in groupby(batches, len):
            rows = torch.stack(list(run))
            span = slice(first, first + len(rows))
            first = span.stop
            parts = self._split(flat[span])
            gradients = self._gradients(parts, moving, self._x[rows], self._y[rows])
            if rate is not None:
                for part, move in zip(compress(parts, moving), gradients, strict=True):
                    part.add_(move, alpha=-rate)
            else:
                for place, move in zip(self._split(gradient[span]), gradients, strict=True):
                    place.copy_(move)

    def _gradients(
        self, parts: Sequence[Tensor], moving: Sequence[bool], x: Tensor, y: Tensor
    ) -> tuple[Tensor, ...]:
        """Return each client's gradient at its own moving parameters."""
        # No client's loss depends on another's parameters, so the gradient of the sum holds them
        # all. Only the forward pass may use torch.func: its backward pass takes a small network
        # twice as long as autograd's.
        parts = [part.detach().requires_grad_(now) for part, now in zip(parts, moving, strict=True)]
        with self._rounded:
            losses = losses_of(vmap(self._forward)(parts, x), y)
        leaves = list(compress(parts, moving))
        return torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)

    def _stacks(self, start: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the trained parts of clients and memory of their gradients, shape (count, d)."""
        buffer = self._buffers.get(self._names)
        if buffer is None or buffer.shape[1] < count:
            buffer = self._buffers[self._names] = start.new_empty(2, count, len(start))
        flat, gradient = buffer[:, :count]
        flat.copy_(start)
        return flat, gradient

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Return one view per parameter of shape (..., *shape), for ``flat`` of shape (..., d)."""
        parts = torch.split(flat, [shape.numel() for shape in self._shapes], dim=-1)
        return [
            part.view(*flat.shape[:-1], *shape)
            for part, shape in zip(parts, self._shapes, strict=True)
        ]

    def _forward(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        named = dict(zip(self._names, parts, strict=True))
        # torch's fused attention has no batched form: vmap would call it client by client
        with BatchedLayers(), sdpa_kernel(SDPBackend.MATH):
            return logits_of(functional_call(self._model.module, named, (x,)))

    def _loss(self, parts: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
        return mean_loss(self._forward(parts, x), y)


def rounded_products(device: torch.device, *, bfloat16: bool) -> torch.autocast:
    """Within this context, round the factors of products to 8 bits, if ``bfloat16``.

    Parameters and gradients stay float32, and so do losses and norms. Without ``bfloat16`` nothing
    is rounded, whatever an outer context of the caller says.
    """
    # autocast's cache would keep the weights of the first step for all later steps
    return torch.autocast(device.type, torch.bfloat16, enabled=bfloat16, cache_enabled=False)


@contextmanager
def nothing_kept(model: PartialModel) -> Iterator[None]:
    """Raise if the network kept anything: one client's data would reach the others."""
    before = state_of(model.module.buffers())
    layers = LayerStates(dict(model.module.named_modules()))
    yield
    if before != state_of(model.module.buffers()):
        raise RuntimeError("the network writes to its buffers; use batching='loop'")
    if layers.changed():
        raise RuntimeError("the network sets attributes of its layers; use batching='loop'")


def single_step(local: LocalTraining) -> bool:
    """Return whether every client takes one step of SGD on at most ``LARGEST_PASS`` examples.

    The answer is public: it depends on the plan and not on what the clients hold.
    """
    plain = local.optimizer == "sgd" and not local.weight_decay
    return local.steps == 1 and plain and local.batch_size <= LARGEST_PASS


def padded_batches(x: Tensor, y: Tensor, batches: Batches, length: int) -> tuple[Tensor, Tensor]:
    """Return the first batch of each of V clients, padded to ``length`` rows; none is zeros.

    Labels are -100 where padded, which the mean loss ignores.
    """
    none = torch.empty(0, dtype=torch.int64)
    room = torch.empty(length, dtype=torch.int64)  # makes pad_sequence pad to ``length``
    first = [client_batches[0] if client_batches else none for client_batches in batches]
    rows = pad_sequence([*first, room], batch_first=True, padding_value=-1)[:-1].to(x.device)
    # Padding repeats an example of the same client: even 0 times another's infinity is NaN.
    filled = torch.where(rows < 0, rows[:, :1], rows)
    examples, labels = x[filled], y[filled]
    examples[filled[:, 0] < 0] = 0
    labels[rows < 0] = _PADDING
    return examples, labels


def batches_on(device: torch.device, batches: Batches) -> list[list[Tensor]]:
    """Return each client's batches on a device."""
    every_batch = iter(moved([rows for client_rows in batches for rows in client_rows], device))
    return [[next(every_batch) for _ in client_rows] for client_rows in batches]


def losses_of(logits: Tensor, y: Tensor) -> Tensor:
    """Return each client's ``mean_loss``, shape (V,).

    Args:
        logits: shape (V, n, ..., labels).
        y: labels, shape (V, n, ...); -100 is padding and does not count.
    """
    token_losses = cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none").view(
        len(y), -1
    )
    return token_losses.sum(dim=1) / (y != _PADDING).flatten(1).sum(dim=1)


class BatchedLayers(TorchFunctionMode):
    """Within this context, embeddings and attention are computed in ways that vmap batches.

    vmap stacks the clients' tables into one and offsets each client's words. A word outside a
    client's table is then a row of a neighbour's table, which the client reads and trains; and only
    the first table has ``padding_idx``. Indexing adds no offset, so such a word raises IndexError,
    as it does in the loop.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call ``func``, or what stands in for ``embedding``."""
        if func is functional.embedding:
            return looked_up(*args, **(kwargs or {}))
        if func is torch.embedding:
            raise RuntimeError("torch.embedding mixes clients under vmap; use nn.Embedding")
        return func(*args, **(kwargs or {}))


def looked_up(
    input: Tensor,  # noqa: A002  torch's name
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Return what ``torch.nn.functional.embedding`` does for the same arguments."""
    if max_norm is not None or scale_grad_by_freq:
        raise RuntimeError("vmap does not support embeddings with max_norm or scale_grad_by_freq")
    # a negative word would count from the end of the table
    words = torch.where(input < 0, len(weight), input)
    rows = weight[words]
    if padding_idx is None:
        return rows
    padding = padding_idx % len(weight)
    return torch.where((input == padding).unsqueeze(-1), rows.detach(), rows)
