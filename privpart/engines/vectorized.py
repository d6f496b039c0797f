"""Own rows: embeddings of which vmap may not mix the tables of several clients.

vmap stacks the clients' tables into one and shifts each client's words into its part. A word that
is not in a client's table is then a row of a neighbour's, which it reads and trains; and only the
first table has ``padding_idx``. Indexing has no such shift: such a word is an error, as it is where
one client trains after another.

Dense: the forward pass of clients who each hold dense layers of their own, without torch.func.

vmap's bookkeeping takes a small network as long as its products, and it returns a weight's gradient
transposed, which takes longer to add to the weight than the product did. Here an example is a
column, and the gradient of a weight is laid out as the weight is.

Lockstep: the local training of many clients at once, as one batched computation.

torch.func follows most networks through it; dense ones have a shorter way, see ``dense_logits``.
All clients of a chunk take their k-th step together, each on its own copy of the trained part, and
those that have no k-th step are left out. If the plan says a single step of SGD (``one_pass``) they
all hold the same parameters, so one batched pass gives every update; short batches are then padded
with an example of theirs whose class is -100, which the mean loss does not count. That is the same
training as ``client_update``'s, up to rounding.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim import SGD, Adam, Optimizer
from torch.overrides import TorchFunctionMode

from privpart.client import LocalTraining, loss
from privpart.engines.frozen_prefix import functions_of_the_example, named_layers
from privpart.model import PartialModel


class OwnRows(TorchFunctionMode):
    """Within this context, look words up by indexing."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call what was to be called."""
        if func is functional.embedding:
            return _looked_up(*args, **(kwargs or {}))
        if func is torch.embedding:
            raise RuntimeError("torch.embedding mixes clients under vmap; use nn.Embedding")
        return func(*args, **(kwargs or {}))


def _looked_up(
    input: Tensor,  # noqa: A002  torch's name
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``torch.nn.functional.embedding``, its arguments."""
    if max_norm is not None or scale_grad_by_freq:
        raise RuntimeError("embeddings with max_norm or scale_grad_by_freq: not by vmap")
    # a negative word would count from the end of the table
    words = torch.where(input < 0, len(weight), input)
    rows = weight[words]
    if padding_idx is None:
        return rows
    padding = padding_idx % len(weight)
    return torch.where((input == padding).unsqueeze(-1), rows.detach(), rows)


_LAYERS = (nn.Linear, nn.ReLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Identity, nn.Flatten)


def is_dense(network: nn.Module, x: Tensor) -> bool:
    """Whether ``dense_logits`` computes what a network does of examples x, shape (n, ...).

    It does of layers that follow each other, none of them tied to another, once each example is a
    single row of numbers.
    """
    if type(network) is not nn.Sequential or not functions_of_the_example(network):
        return False
    parameters = list(network.named_parameters(remove_duplicate=False))
    flattened = x.dim() == 2 or (len(network) > 0 and _flattens(network[0]))
    return (
        flattened
        and all(type(layer) in _LAYERS for layer in network)
        and all(_flattens(layer) for layer in network if type(layer) is nn.Flatten)
        and len({id(parameter) for _, parameter in parameters}) == len(parameters)
    )


def _flattens(layer: nn.Module) -> bool:
    """Whether one row of each example's numbers comes out."""
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)


def dense_logits(network: nn.Module, own: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return V clients' logits, shape (V, n, classes).

    Args:
        network: as ``is_dense`` allows; the parameters that are not in ``own`` are everyone's.
        own: by name, each client's parameters, shapes (V, ...).
        x: each client's examples, shape (V, n, ...).
    """
    columns = x.flatten(2).mT
    for name, layer in named_layers(network):
        if type(layer) is not nn.Linear:
            columns = columns if type(layer) is nn.Flatten else layer(columns)
            continue
        weight = own.get(f"{name}.weight", layer.weight).expand(len(x), -1, -1)
        bias: Tensor | None = own.get(f"{name}.bias", layer.bias)
        if bias is None:
            columns = torch.bmm(weight, columns)
        else:
            columns = torch.baddbmm(bias.unsqueeze(-1), weight, columns)
    return columns.mT


_EXAMPLES = 256  # of each client, in one pass, whatever it holds
_PADDING = -100  # the class that ``loss`` does not count

_Logits = Callable[[Sequence[Tensor], Tensor], Tensor]
"""Of each client, shape (V, n, ..., classes), from its own part and examples."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """Trained parts of V clients and their gradients, each of shape (V, d)."""

    flat: Tensor
    gradient: Tensor


class Lockstep:
    """Local training of several clients at once.

    Args:
        model: its trained part then holds the start; its frozen part is shared by all clients.
        local: how each client trains.
    """

    def __init__(self, model: PartialModel, local: LocalTraining) -> None:
        self._model = model
        self.local = local
        parameters = dict(model.module.named_parameters())
        self._shapes = [parameters[name].shape for name in model.trainable]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._gradients_at_one_point = vmap(grad(self._loss), in_dims=(None, 0, 0))
        self._buffer: _Stack | None = None

    def changes(
        self,
        start: Tensor,
        x: Tensor,
        y: Tensor,
        rows: Sequence[Tensor],
        generators: Sequence[torch.Generator],
        *,
        out: Tensor,
        channels_last: bool = False,
    ) -> Iterator[int]:
        """Write after - before of each client, not clipped, into its row of ``out``, shape (V, d).

        Yields:
            Each row once it is written.

        Args:
            start: the round's trained part, shape (d,).
            x: everyone's examples, shape (n, ...).
            y: their classes, shape (n,) or (n, length).
            rows: per client, the rows of its examples, shape (its n,).
            generators: per client, the order of its examples.
            out: overwritten; on the device of ``start``, ``x`` and ``y``.
            channels_last: the layout of images, shape (n, channels, height, width).

        Raises:
            RuntimeError: the network draws random numbers, writes to its buffers, or does what
                ``torch.func.vmap`` cannot follow.
            ConfigError: it writes to a frozen parameter.
        """
        if self.local.loss != "cross_entropy":
            raise RuntimeError(f"loss={self.local.loss!r}: vectorized clients need labels")
        batches = [
            [own[batch] for batch in self.local.batches(len(own), generator)]
            for own, generator in zip(rows, generators, strict=True)
        ]
        with self._model.lent(start), self._buffers_unchanged():
            if one_pass(self.local):
                found = [own[0] if own else torch.empty(0, dtype=torch.int64) for own in batches]
                self._one_step(start, x, y, found, out, channels_last)
                yield from range(len(out))
                return
            sizes = [[len(batch) for batch in own] for own in batches]
            order = sorted(range(len(batches)), key=lambda place: (len(sizes[place]), sizes[place]))
            order.reverse()
            examples = partial(_examples, x, y, channels_last)
            logits = self._dense if is_dense(self._model.module, x) else vmap(self._forward)
            stack = self._stack(start, len(batches))
            optimizer = None if self.local.plain_sgd else self._optimizer(stack)
            active = len(batches)
            for step in range(max(map(len, batches), default=0) + 1):
                going = sum(len(own) > step for own in batches)
                for place in range(going, active):  # done: later steps may move its copy, not this
                    torch.sub(stack.flat[place], start, out=out[order[place]])
                    yield order[place]
                active = going
                these = [batches[order[place]][step] for place in range(active)]
                self._step(stack, these, examples, logits, optimizer)

    @contextmanager
    def _buffers_unchanged(self) -> Iterator[None]:
        """All clients share them: what one client's examples leave there would reach the others."""
        before = [(id(buffer), buffer._version) for buffer in self._model.module.buffers()]
        yield
        if before != [(id(buffer), buffer._version) for buffer in self._model.module.buffers()]:
            raise RuntimeError("the network writes to its buffers; use batching='loop'")

    def _step(
        self,
        stack: _Stack,
        batches: Sequence[Tensor],
        examples: Callable[[Tensor], tuple[Tensor, Tensor]],
        logits: _Logits,
        optimizer: Optimizer | None,
    ) -> None:
        """Step the first clients, batches as large together; no optimizer is plain SGD.

        Nothing is padded: another number of rows is other rounding. (So is another place in
        memory, which one client's data can still give the others.)
        """
        first = 0
        for _, run in groupby(batches, len):
            rows = torch.stack(list(run))
            span = slice(first, first + len(rows))
            first = span.stop
            parts = self._split(stack.flat[span])
            found = _gradients(logits, parts, *examples(rows))
            if optimizer is None:
                for part, own in zip(parts, found, strict=True):
                    part.add_(own, alpha=-self.local.learning_rate)
                continue
            for to, own in zip(self._split(stack.gradient[span]), found, strict=True):
                to.copy_(own)
        if optimizer is not None and batches:
            optimizer.step()

    def _one_step(
        self,
        start: Tensor,
        x: Tensor,
        y: Tensor,
        batches: Sequence[Tensor],
        out: Tensor,
        channels_last: bool,
    ) -> None:
        """Momentum changes nothing in a first step."""
        if not batches:
            return
        inputs = padded(x, y, batches, self.local.batch_size, channels_last=channels_last)
        found = self._gradients_at_one_point(self._split(start), *inputs)
        for place, part in zip(self._split(out), found, strict=True):
            torch.mul(part, -self.local.learning_rate, out=place)
        out[torch.tensor([len(rows) == 0 for rows in batches])] = 0.0

    def _stack(self, start: Tensor, clients: int) -> _Stack:
        """Two buffers, used again and again: fresh pages for them cost as much as the training."""
        if self._buffer is None or len(self._buffer.flat) < clients:
            self._buffer = _Stack(*(start.new_empty(clients, len(start)) for _ in range(2)))
        flat, gradient = self._buffer.flat[:clients], self._buffer.gradient[:clients]
        flat.copy_(start)
        return _Stack(flat, gradient)

    def _optimizer(self, stack: _Stack) -> Optimizer:
        """All optimisers act on each number by itself, so one serves all clients."""
        stack.flat.grad = stack.gradient
        if self.local.optimizer == "adam":
            return Adam([stack.flat], lr=self.local.learning_rate, fused=True)
        return SGD([stack.flat], lr=self.local.learning_rate, momentum=self.local.momentum)

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Views of one part per parameter; leading dimensions stay."""
        parts = torch.split(flat, self._sizes, dim=-1)
        return [
            part.view(*flat.shape[:-1], *shape)
            for part, shape in zip(parts, self._shapes, strict=True)
        ]

    def _dense(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        named = dict(zip(self._model.trainable, parts, strict=True))
        return dense_logits(self._model.module, named, x)

    def _forward(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        named = dict(zip(self._model.trainable, parts, strict=True))
        with OwnRows():
            logits: Tensor = functional_call(self._model.module, named, (x,))
        return logits

    def _loss(self, parts: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(self._forward(parts, x), y)


def one_pass(local: LocalTraining) -> bool:
    """Whether clients take a single step of SGD, by what is public, and few examples each."""
    return local.steps == 1 and local.optimizer == "sgd" and local.batch_size <= _EXAMPLES


def _gradients(
    logits: _Logits, parts: Sequence[Tensor], x: Tensor, y: Tensor
) -> tuple[Tensor, ...]:
    """Each client's gradient at its own point, shapes (V, ...).

    No client's loss depends on another's part, so the sum of the losses has them all. At most the
    forward pass is followed by torch.func: its backward pass costs a small network twice.
    """
    leaves = [part.detach().requires_grad_() for part in parts]
    total = sum_of_losses(logits(leaves, x), y)
    return torch.autograd.grad(total, leaves, materialize_grads=True)


def sum_of_losses(logits: Tensor, y: Tensor) -> Tensor:
    """Return the sum over clients of ``loss``; logits (V, n, ..., classes), y (V, n, ...)."""
    each = cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none").view(len(y), -1)
    return (each.sum(dim=1) / (y != _PADDING).flatten(1).sum(dim=1)).sum()


def padded(
    x: Tensor, y: Tensor, batches: Sequence[Tensor], length: int, *, channels_last: bool = False
) -> tuple[Tensor, Tensor]:
    """Examples of each batch, shape (batches, length, ...), zeros for empty ones, and classes.

    The length is public: another one is other rounding.
    """
    room = torch.empty(length, dtype=torch.int64)
    rows = pad_sequence([*batches, room], batch_first=True, padding_value=-1)[:-1].to(x.device)
    missing = rows < 0
    # by an example of its own: even 0 times another client's infinity is NaN
    own = torch.where(missing, rows[:, :1], rows)
    examples, classes = _examples(x, y, channels_last, own)
    examples[own[:, 0] < 0], classes[missing] = 0, _PADDING
    return examples, classes


def _examples(x: Tensor, y: Tensor, channels_last: bool, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Shape (clients, rows, ...), and their classes."""
    rows = rows.to(x.device)
    if not channels_last:
        return x[rows], y[rows]
    images = to_channels_last(x[rows.flatten()])
    return images.view(*rows.shape, *images.shape[1:]), y[rows]


def to_channels_last(x: Tensor) -> Tensor:
    """Return images (n, channels, height, width) whose channels are next to each other in memory.

    ``x.to(memory_format=...)`` calls both layouts of a single channel equal, and keeps the one that
    convolutions do not take for this one.
    """
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)
