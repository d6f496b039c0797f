"""Vectorized training: the local training of many clients as one batched computation.

Every client of a chunk takes its k-th step at the same time, on its own copy of the trained part;
clients without a k-th step are left out. If the plan sets a single step of SGD (``single_step``),
all clients hold the same parameters, so one batched pass gives every update. Short batches are then
padded with one of the client's own examples under the label -100, which the mean loss ignores. This
is the same training as ``client_update``, up to rounding.

There are two forward passes. torch.func.vmap follows most networks: ``BatchedLayers`` keeps it from
mixing embedding tables, and from computing attention word by word.
Sequences of dense layers have a shorter one, ``dense_logits``: vmap spends as long on bookkeeping
as a small network spends on its products. Both are one file with the steps that they serve, because
each layer's product is chosen for the layout that a step writes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import compress, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from privpart.client import ClientOptimizer, LocalTraining, logits_of, mean_loss
from privpart.engines.frozen_prefix import functions_of_the_example, named_layers
from privpart.model import LayerStates, PartialModel, state_of

LARGEST_PASS = 256
"""Examples in one pass: of each client here, of all clients in ``ghost_sum``."""
_PADDING = -100  # the label that ``mean_loss`` ignores

_Logits = Callable[[Sequence[Tensor], Tensor], Tensor]
"""Maps each client's parameters and examples to its logits, shape (V, n, ..., labels)."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """The trained parts of V clients and their gradients, each of shape (V, d)."""

    flat: Tensor
    gradient: Tensor


@dataclass(frozen=True, slots=True)
class _Work:
    """What a step computes, and how it moves parameters."""

    examples: Callable[[Tensor], tuple[Tensor, Tensor]]
    logits: _Logits
    optimizer: ClientOptimizer | None
    learning_rate: float
    """Of plain SGD, without optimiser."""


class VectorizedTraining:
    """Trains several clients at the same time.

    Args:
        model: its trained part holds the start while clients train; all share its frozen part.
    """

    def __init__(self, model: PartialModel) -> None:
        self._model = model
        self._is_dense: bool | None = None
        self._train(model.trainable)
        self._gradients_at_start = vmap(grad(self._loss), in_dims=(None, 0, 0))
        self._buffers: dict[tuple[str, ...], _Stack] = {}  # by what trains

    def _train(self, names: tuple[str, ...]) -> None:
        """Let these parameters train, in this order; the others are at the start of the round."""
        parameters = dict(self._model.module.named_parameters())
        self._names = names
        self._shapes = [parameters[name].shape for name in names]
        self._sizes = [shape.numel() for shape in self._shapes]

    def updates(
        self,
        start: Tensor,
        x: Tensor,
        y: Tensor,
        rows: Sequence[Tensor],
        generators: Sequence[torch.Generator],
        local: LocalTraining,
        *,
        out: Tensor,
        active: Sequence[int] | None = None,
        losses: list[float | Tensor | None] | None = None,
    ) -> Iterator[int]:
        """Write each client's update, not clipped, into its row of ``out``, shape (V, c).

        Yields:
            The index of each row as soon as it is written.

        Args:
            start: the round's trained part, shape (d,).
            x: everyone's examples, shape (n, ...).
            y: their labels, shape (n,) or (n, length).
            rows: per client, the rows of its examples, shape (its n,).
            generators: per client, the order of its examples.
            local: how each client trains; its loss must be "cross_entropy".
            out: overwritten; on the device of ``start``, ``x`` and ``y``.
            active: groups of the model that train in this round, with c parameters; None trains
                all, and c is d.
            losses: V times None; becomes the loss of each client's first step. Empty leaves it out.

        Raises:
            RuntimeError: the network draws random numbers, keeps anything in its layers, or does
                something that ``torch.func.vmap`` does not support; the model has local parameters;
                or the loss is not "cross_entropy".
            ConfigError: the network writes to a frozen parameter.
        """
        if local.loss != "cross_entropy":
            raise RuntimeError(f"loss={local.loss!r}: vectorized clients need labels")
        if self._model.local:
            raise RuntimeError("vectorized clients share all but the trained part; use 'loop'")
        batches = [
            [client_rows[batch] for batch in local.batches(len(client_rows), generator)]
            for client_rows, generator in zip(rows, generators, strict=True)
        ]
        groups = range(len(self._model.groups)) if active is None else active
        self._train(tuple(name for group in groups for name in self._model.groups[group]))
        with self._model.lent(start), nothing_kept(self._model):
            start = torch.cat([start[span] for span in self._model.spans(active)])
            if single_step(local):
                first = [
                    client_rows[0] if client_rows else torch.empty(0, dtype=torch.int64)
                    for client_rows in batches
                ]
                self._single_step(start, x, y, first, local, out, losses)
                yield from range(len(out))
            else:
                yield from self._many_steps(start, x, y, batches, local, out, losses)

    @torch.no_grad()  # torch.func's own gradients aside: parameters of idle groups ask for them
    def _single_step(
        self,
        start: Tensor,
        x: Tensor,
        y: Tensor,
        batches: Sequence[Tensor],
        local: LocalTraining,
        out: Tensor,
        losses: list[float | Tensor | None] | None,
    ) -> None:
        """Write the updates of one step of SGD, whose momentum starts at zero."""
        if not batches:
            return
        inputs = padded_batches(x, y, batches, local.batch_size)
        if not losses:
            gradients = self._gradients_at_start(self._split(start), *inputs)
        else:
            watched = vmap(grad_and_value(self._loss), in_dims=(None, 0, 0))
            gradients, values = watched(self._split(start), *inputs)
            losses[:] = [
                v if len(b) else None for v, b in zip(values.tolist(), batches, strict=True)
            ]
        for place, gradient in zip(self._split(out), gradients, strict=True):
            torch.mul(gradient, -local.learning_rate, out=place)
        out[torch.tensor([len(rows) == 0 for rows in batches])] = 0.0

    def _many_steps(
        self,
        start: Tensor,
        x: Tensor,
        y: Tensor,
        batches: Sequence[Sequence[Tensor]],
        local: LocalTraining,
        out: Tensor,
        losses: list[float | Tensor | None] | None,
    ) -> Iterator[int]:
        # Clients with the most steps first: those still in training are then a prefix of the stack.
        # Among them, clients with equal batch sizes are neighbours and share one product.
        batches = _moved(batches, x.device)
        sizes = [[len(batch) for batch in client_batches] for client_batches in batches]
        order = sorted(range(len(batches)), key=lambda place: (len(sizes[place]), sizes[place]))
        order.reverse()
        examples = partial(_examples, x, y)
        if self._is_dense is None:
            self._is_dense = is_dense_network(self._model.module, x)
        logits = self._dense if self._is_dense else vmap(self._forward)
        stack = self._stack(start, len(batches))
        # one optimiser serves all clients, because SGD and Adam treat each coordinate separately
        optimizer = (
            None if local.plain_sgd else ClientOptimizer(local, [stack.flat], [stack.gradient])
        )
        work = _Work(examples, logits, optimizer, local.learning_rate)
        active = len(batches)
        for step in range(max(map(len, batches), default=0) + 1):
            remaining = sum(len(client_batches) > step for client_batches in batches)
            # Read now: the optimiser moves every row of the stack, also those that have finished.
            for place in range(remaining, active):
                torch.sub(stack.flat[place], start, out=out[order[place]])
                yield order[place]
            active = remaining
            step_batches = [batches[order[place]][step] for place in range(active)]
            moving = local.moving(self._names, step) if step_batches else []
            parts = self._step(stack, step_batches, moving, work)
            if losses and not step:
                first = torch.cat(parts).cpu().tolist() if parts else []
                for place, loss in zip(order, first, strict=False):
                    losses[place] = loss

    def _step(
        self, stack: _Stack, batches: Sequence[Tensor], moving: Sequence[bool], work: _Work
    ) -> list[Tensor]:
        """Move the first clients of the stack by one step; return their losses, in parts."""
        first, losses = 0, []
        # Clients with batches of one size are computed together and nothing is padded: products
        # with another number of rows round differently, which would make one client's update depend
        # on how much data the others hold. (Alignment in memory still can.)
        for _, run in groupby(batches, len):
            rows = torch.stack(list(run))
            span = slice(first, first + len(rows))
            first = span.stop
            parts = self._split(stack.flat[span])
            gradients, part = _gradients(work.logits, parts, moving, *work.examples(rows))
            losses.append(part)
            if work.optimizer is None:
                for moved, gradient in zip(compress(parts, moving), gradients, strict=True):
                    moved.add_(gradient, alpha=-work.learning_rate)
            else:
                for to, gradient in zip(self._split(stack.gradient[span]), gradients, strict=True):
                    to.copy_(gradient)
        if work.optimizer is not None and batches:
            work.optimizer.step()
        return losses

    def _stack(self, start: Tensor, clients: int) -> _Stack:
        # Kept between chunks: clearing fresh pages takes as long as training a small network.
        buffer = self._buffers.get(self._names)
        if buffer is None or len(buffer.flat) < clients:
            buffer = _Stack(*(start.new_empty(clients, len(start)) for _ in range(2)))
            self._buffers[self._names] = buffer
        stack = _Stack(buffer.flat[:clients], buffer.gradient[:clients])
        stack.flat.copy_(start)
        return stack

    def _split(self, flat: Tensor) -> list[Tensor]:
        """Return one view per parameter of shape (..., *shape), for ``flat`` of shape (..., d)."""
        parts = torch.split(flat, self._sizes, dim=-1)
        return [
            part.view(*flat.shape[:-1], *shape)
            for part, shape in zip(parts, self._shapes, strict=True)
        ]

    def _dense(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        named = dict(zip(self._names, parts, strict=True))
        return dense_logits(self._model.module, named, x)

    def _forward(self, parts: Sequence[Tensor], x: Tensor) -> Tensor:
        named = dict(zip(self._names, parts, strict=True))
        # torch's fused attention has no batched form: vmap would call it client by client
        with BatchedLayers(), sdpa_kernel(SDPBackend.MATH):
            return logits_of(functional_call(self._model.module, named, (x,)))

    def _loss(self, parts: Sequence[Tensor], x: Tensor, y: Tensor) -> Tensor:
        return mean_loss(self._forward(parts, x), y)


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
    return local.steps == 1 and local.optimizer == "sgd" and local.batch_size <= LARGEST_PASS


def _moved(batches: Sequence[Sequence[Tensor]], device: torch.device) -> list[list[Tensor]]:
    """Return each client's batches on a device, in one copy, because each waits for the device."""
    flat_batches = [rows for client_batches in batches for rows in client_batches]
    if device.type != "cpu" and flat_batches:
        flat_batches = list(
            torch.split(torch.cat(flat_batches).to(device), [len(rows) for rows in flat_batches])
        )
    remaining = iter(flat_batches)
    return [[next(remaining) for _ in client_batches] for client_batches in batches]


def _gradients(
    logits: _Logits, parts: Sequence[Tensor], moving: Sequence[bool], x: Tensor, y: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return each client's loss, shape (V,), after its gradient at its own moving parameters."""
    # No client's loss depends on another's parameters, so the gradient of the sum holds them all.
    # Only the forward pass may use torch.func: its backward pass takes a small network twice as
    # long as autograd's.
    leaves_of_all = [
        part.detach().requires_grad_(now) for part, now in zip(parts, moving, strict=True)
    ]
    losses = losses_of(logits(leaves_of_all, x), y)
    leaves = list(compress(leaves_of_all, moving))
    return torch.autograd.grad(losses.sum(), leaves, materialize_grads=True), losses.detach()


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


def padded_batches(
    x: Tensor, y: Tensor, batches: Sequence[Tensor], length: int
) -> tuple[Tensor, Tensor]:
    """Return one batch per client, padded to a public length.

    Args:
        x: everyone's examples, shape (n, ...).
        y: their labels, shape (n,) or (n, length of a text).
        batches: per client, rows of ``x``; at most ``length``.
        length: rows of every padded batch; a public number, because products with another number
            of rows round differently.

    Returns:
        Examples, shape (batches, length, ...), zero where a client has none; and their labels,
        -100 where padded.
    """
    room = torch.empty(length, dtype=torch.int64)  # makes pad_sequence pad to ``length``
    rows = pad_sequence([*batches, room], batch_first=True, padding_value=-1)[:-1].to(x.device)
    missing = rows < 0
    # Padding repeats an example of the same client: even 0 times another's infinity is NaN.
    filled = torch.where(missing, rows[:, :1], rows)
    examples, labels = _examples(x, y, filled)
    examples[filled[:, 0] < 0] = 0
    labels[missing] = _PADDING
    return examples, labels


def _examples(x: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the examples at ``rows`` of shape (clients, rows), and their labels."""
    rows = rows.to(x.device)
    return x[rows], y[rows]


_LAYERS = (nn.Linear, nn.ReLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Identity, nn.Flatten)


def is_dense_network(network: nn.Module, x: Tensor) -> bool:
    """Return whether ``dense_logits`` computes what the network does with x, shape (n, ...).

    It does if the network is a plain sequence of dense layers and activations, without tied
    parameters, and each example is flattened to one row before the first of them.
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
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)


def dense_logits(network: nn.Module, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return V clients' logits, shape (V, n, labels), computed without torch.func.

    Args:
        network: accepted by ``is_dense_network``; clients share the others.
        parameters: by name, each client's parameters, shapes (V, ...).
        x: each client's examples, shape (V, n, ...).
    """
    # An example is a column here, so that a weight's gradient has the layout of the weight. vmap
    # returns it transposed, and adding it to the weight then takes longer than the product did.
    columns = x.flatten(2).mT
    for name, layer in named_layers(network):
        if type(layer) is not nn.Linear:
            columns = columns if type(layer) is nn.Flatten else layer(columns)
            continue
        weight = parameters.get(f"{name}.weight", layer.weight).expand(len(x), -1, -1)
        bias: Tensor | None = parameters.get(f"{name}.bias", layer.bias)
        if bias is None:
            columns = torch.bmm(weight, columns)
        else:
            columns = torch.baddbmm(bias.unsqueeze(-1), weight, columns)
    return columns.mT


class BatchedLayers(TorchFunctionMode):
    """Within this context, embeddings and attention are computed in ways that vmap batches.

    vmap stacks the clients' tables into one and offsets each client's words. A word outside a
    client's table is then a row of a neighbour's table, which the client reads and trains; and only
    the first table has ``padding_idx``. Indexing adds no offset, so such a word raises IndexError,
    as it does in the loop.

    torch's attention layers put a text's position before the text: vmap's clients would copy the
    weights for each position, and multiply the few words at that position.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call ``func``, or what stands in for ``embedding`` and self-attention."""
        if func is functional.embedding:
            return looked_up(*args, **(kwargs or {}))
        if func is torch.embedding:
            raise RuntimeError("torch.embedding mixes clients under vmap; use nn.Embedding")
        if func is functional.multi_head_attention_forward:
            with self:  # whose subclass follows the products
                attended = attention_by_rows(*args, **(kwargs or {}))
            if attended is not None:
                return attended, None
        return func(*args, **(kwargs or {}))


def _by_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b, shape (..., out), from one product of two matrices."""
    rows = functional.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return rows.view(*x.shape[:-1], -1)


def attention_by_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    **others: Any,  # noqa: ANN401
) -> Tensor | None:
    """Return what ``multi_head_attention_forward`` does; None for what is not self-attention.

    Texts have shape (length, n, width) here, as in torch's function.
    """
    plain = in_proj_weight is not None and not use_separate_proj_weight and not add_zero_attn
    if not plain or query is not key or key is not value or query.dim() != 3 or need_weights:
        return None
    unusual = (bias_k, bias_v, others.get("static_k"), others.get("static_v"), key_padding_mask)
    if any(option is not None for option in unusual) or (dropout_p and training):
        return None
    if attn_mask is None and others.get("is_causal"):
        return None
    length, texts, width = query.shape
    heads = _by_rows(query, in_proj_weight, in_proj_bias)  # type: ignore[arg-type]
    heads = heads.view(length, texts, 3, num_heads, width // num_heads).permute(2, 1, 3, 0, 4)
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.view(texts, num_heads, length, length)
    mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], attn_mask)
    mixed = mixed.permute(2, 0, 1, 3).reshape(length, texts, width)
    return _by_rows(mixed, out_proj_weight, out_proj_bias)


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
