"""Lockstep: the local training of many clients at once, as one batched computation (torch.func).

All clients of a chunk take their k-th step together, each on its own copy of the trained part. Short
batches are padded with examples whose class is -100, which the mean loss does not count; clients
that have no k-th step are left out of it. If every client takes one step of SGD they all still hold
the same parameters, so one batched pass over them gives every update. That is the same training as
``client_update``'s, up to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.utils.rnn import pad_sequence

from privpart.client import LocalTraining, loss
from privpart.partial import PartialModel

_PADDING = -100  # the class that ``loss`` does not count


@dataclass(frozen=True, slots=True)
class _Stack:
    """Trained parts of V clients and their gradients, each of shape (V, d)."""

    flat: Tensor
    gradient: Tensor


class Lockstep:
    """Local training of several clients at once.

    Args:
        model: its trained part is not touched; its frozen part is shared by all clients.
        local: how each client trains.
    """

    def __init__(self, model: PartialModel, local: LocalTraining) -> None:
        self._model = model
        self._local = local
        parameters = dict(model.module.named_parameters())
        self._shapes = [parameters[name].shape for name in model.trainable]
        self._sizes = [shape.numel() for shape in self._shapes]
        gradient = grad(self._loss)
        self._gradients = vmap(gradient)
        self._gradients_at_one_point = vmap(gradient, in_dims=(None, 0, 0))
        self._buffer: _Stack | None = None

    def changes(
        self,
        start: Tensor,
        x: Tensor,
        y: Tensor,
        rows: Sequence[Tensor],
        generators: Sequence[torch.Generator],
    ) -> Tensor:
        """Return after - before of each client, not clipped, shape (V, d).

        Args:
            start: the round's trained part, shape (d,).
            x: everyone's examples, shape (n, ...).
            y: their classes, shape (n,) or (n, length).
            rows: per client, the rows of its examples, shape (its n,).
            generators: per client, the order of its examples.

        Raises:
            RuntimeError: the network draws random numbers, writes to its buffers, or does what
                ``torch.func.vmap`` cannot follow.
        """
        batches = [
            [own[batch] for batch in self._local.batches(len(own), generator)] if len(own) else []
            for own, generator in zip(rows, generators, strict=True)
        ]
        longest = max((len(own) for own in batches), default=0)
        if longest <= 1 and self._local.optimizer == "sgd":
            return self._one_step(start, x, y, batches)
        order = sorted(range(len(batches)), key=lambda client: -len(batches[client]))
        stack = self._stack(start, len(batches))
        optimizer = self._local.fresh_optimizer(stack)
        result = torch.zeros_like(stack.flat)
        active = len(batches)
        for step in range(longest + 1):
            going = sum(len(own) > step for own in batches)
            for place in range(going, active):  # done: later steps may move its copy, not this
                result[order[place]] = stack.flat[place] - start
            active = going
            if active:
                inputs = _padded(x, y, [batches[order[place]][step] for place in range(active)])
                parts = self._split(stack.flat[:active])
                found = self._gradients(parts, *inputs)
                for to, part in zip(self._split(stack.gradient[:active]), found, strict=True):
                    to.copy_(part)
                optimizer.step()
        return result

    def _one_step(
        self, start: Tensor, x: Tensor, y: Tensor, batches: Sequence[Sequence[Tensor]]
    ) -> Tensor:
        """Momentum changes nothing in a first step."""
        result = torch.zeros(len(batches), len(start))
        came = [client for client, own in enumerate(batches) if own]
        if came:
            inputs = _padded(x, y, [batches[client][0] for client in came])
            found = self._gradients_at_one_point(self._split(start), *inputs)
            parts = self._split(result)
            if len(came) == len(batches):
                for to, part in zip(parts, found, strict=True):
                    torch.mul(part, -self._local.learning_rate, out=to)
            else:
                for to, part in zip(parts, found, strict=True):
                    to[came] = part * -self._local.learning_rate
        return result

    def _stack(self, start: Tensor, clients: int) -> _Stack:
        """Two buffers, used again and again: fresh pages for them cost as much as the training."""
        if self._buffer is None or len(self._buffer.flat) < clients:
            self._buffer = _Stack(*(torch.empty(clients, len(start)) for _ in range(2)))
        flat, gradient = self._buffer.flat[:clients], self._buffer.gradient[:clients]
        flat.copy_(start)
        flat.grad = None
        return _Stack(flat, gradient)

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Views of one part per parameter; leading dimensions stay."""
        parts = flat.split(self._sizes, dim=-1)
        return [
            part.view(*flat.shape[:-1], *shape)
            for part, shape in zip(parts, self._shapes, strict=True)
        ]

    def _loss(self, parts: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
        named = dict(zip(self._model.trainable, parts, strict=True))
        return loss(functional_call(self._model.module, named, (x,)), y)


def _padded(x: Tensor, y: Tensor, batches: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Examples of each batch, shape (batches, longest, ...), and their classes."""
    rows = pad_sequence(list(batches), batch_first=True, padding_value=-1)
    missing = rows < 0
    rows = rows.clamp(min=0)
    classes = y[rows]
    classes[missing] = _PADDING
    return x[rows], classes
