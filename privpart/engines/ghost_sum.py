"""Ghost clipping: the sum of the clipped updates of clients that take a single step of SGD.

Before that step all clients hold the same parameters, so their examples pass through the network as
one batch, forwards and backwards, and no tensor with an update's length exists per client.

A layer's update in that step is a function of the layer's input and of the gradient of its output,
in the client's own rows. For a dense layer it is their product: its norm is known without computing
the product (ghost clipping: Goodfellow 2015; Li et al. 2022, section 4), and the weighted sum over
clients is a single product of two matrices.

Networks are sequences of known layers. Others, such as transformers, take longer so than vectorized
or one client after another.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.grad import conv2d_weight

from privpart.clip import factors
from privpart.engines.frozen_prefix import functions_of_the_example
from privpart.engines.vectorized import BatchedLayers, Batches, losses_of, padded_batches
from privpart.model import PartialModel
from privpart.settings.client import LocalTraining

_SLACK = 2.0**-46
"""Added to a squared norm, per row and column, times the square of the sum of the rows' lengths.

It is 2^7 times what a Gram matrix can lose by rounding. Where rows cancel, the computed norm may
consist of nothing but that loss.
"""

_PRODUCTS = 2**22  # numbers of the products that are multiplied out at once, for their norms alone
_Backpropagated = tuple[nn.Module, dict[str, str], Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Factored:
    """Clients' updates of a dense layer's weights, ``left[v].T @ right[v]``, not multiplied out."""

    left: Tensor  # (V, rows, out), float64
    right: Tensor  # (V, rows, in), float64

    def squared_norms(self) -> Tensor:
        """Return each client's squared norm, shape (V,), rounded up: never below the true one."""
        (_, rows, out), columns = self.left.shape, self.right.shape[2]
        if rows * (out + columns) <= out * columns:  # which is less to multiply
            grams = (self.left @ self.left.mT) * (self.right @ self.right.mT)
            squares = grams.sum(dim=(1, 2))
        else:
            clients = max(1, _PRODUCTS // (out * columns))
            parts = zip(
                torch.split(self.left, clients), torch.split(self.right, clients), strict=True
            )
            squares = torch.cat(
                [(left.mT @ right).square().sum(dim=(1, 2)) for left, right in parts]
            )
        lengths = self.left.norm(dim=2) * self.right.norm(dim=2)
        slack = _SLACK * (rows + out + columns)
        bounds: Tensor = squares + slack * lengths.sum(dim=1).square()
        return bounds

    def drop(self, absent: Tensor) -> None:
        """Set some clients' updates to zero; a weight of zero would keep their NaN."""
        self.left[absent] = 0.0
        self.right[absent] = 0.0

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum over clients, shape (out, in), with weights of shape (V,)."""
        left = self.left * weights[:, None, None]
        total: Tensor = left.flatten(0, 1).T @ self.right.flatten(0, 1)
        return total


@dataclass(frozen=True, slots=True)
class Materialized:
    """Clients' updates of any other parameter, one after the other in memory."""

    each: Tensor  # (V, ...), float64, contiguous

    def squared_norms(self) -> Tensor:
        """Return each client's squared norm, shape (V,)."""
        lengths: Tensor = torch.linalg.vector_norm(self.each.flatten(1), dim=1)
        return lengths.square()

    def drop(self, absent: Tensor) -> None:
        """Set some clients' updates to zero."""
        self.each[absent] = 0.0

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum over clients, shape (...), with weights of shape (V,)."""
        return (weights @ self.each.flatten(1)).view(self.each.shape[1:])


class GhostSum:
    """Sums the clipped updates of clients that take one step, in one pass through the network.

    Args:
        model: a model that ``supports`` accepts.
        x: everyone's examples, shape (n, ...), on the model's device.
        y: their labels, shape (n,) or (n, length).
    """

    def __init__(self, model: PartialModel, x: Tensor, y: Tensor) -> None:
        self._model, self._x, self._y = model, x, y
        names = {id(p): name for name, p in model.module.named_parameters()}
        trained = set(model.trainable)
        self._layers: list[tuple[nn.Module, dict[str, str]]] = []
        for layer in _layers(model.module):
            named = {local_name: names[id(p)] for local_name, p in layer.named_parameters()}
            self._layers.append((layer, {o: name for o, name in named.items() if name in trained}))

    @staticmethod
    def supports(model: PartialModel) -> bool:
        """Return whether the network is a sequence of layers that keep examples apart.

        Each layer must be a function of the example alone, and occur once if it has parameters:
        only then does no client's example reach another client's rows.
        """
        layers = list(_layers(model.module))
        parameters = [p for _, p in model.module.named_parameters(remove_duplicate=False)]
        distinct = {id(parameter) for layer in layers for parameter in layer.parameters()}
        return (
            functions_of_the_example(model.module)
            # fewer if parameters are tied, or belong to the sequence and not to a layer
            and len(distinct) == len(parameters)
            and not any(getattr(layer, "inplace", False) for layer in layers)
        )

    @property
    def materialized(self) -> int:
        """Parameters whose update is materialized per client: trained ones outside dense layers."""
        return sum(
            layer.get_parameter(name).numel()
            for layer, named in self._layers
            if type(layer) is not nn.Linear
            for name in named
        )

    def sum(
        self,
        start: Tensor,
        batches: Batches,
        local: LocalTraining,
        *,
        clip_norm: float,
        out: Tensor,
    ) -> Tensor:
        """Write the sum of all clients' clipped updates into ``out``, shape (d,), float64.

        All clients start from ``start``, shape (d,), and take a ``single_step``.

        Returns:
            The norms of the updates before clipping, shape (V,); NaN of one that is not finite.

        Guarantees:
            One client moves the sum by at most ``clip_norm``, whatever the examples hold. A client
            whose update is not finite counts as absent and leaves the others' unchanged.
        """
        updates: dict[str, Factored | Materialized] = {}
        # ``batch_size`` rows for each client, whatever it holds: a product with another number of
        # rows rounds differently, by which one client's data would reach the others' updates.
        examples, labels = padded_batches(self._x, self._y, batches, local.batch_size)
        for layer, named, given, gradient in self._backpropagate(start, examples, labels):
            by_name = layer_updates(layer, list(named), given, gradient, local.learning_rate)
            updates |= {named[local_name]: update for local_name, update in by_name.items()}
        return self._weighted_sum(updates, clip_norm, out)

    def sum_given(self, rows: Tensor, *, clip_norm: float, out: Tensor) -> Tensor:
        """Write the sum of given updates, shape (V, d), as ``sum`` does that of clients.

        Every update is materialized, so a dense layer's norms without its product are not used.
        """
        views = self._model.views(out)
        parts = torch.split(rows.double(), [view.numel() for view in views.values()], dim=1)
        updates: dict[str, Factored | Materialized] = {
            name: Materialized(part.reshape(-1, *view.shape).contiguous())
            for part, (name, view) in zip(parts, views.items(), strict=True)
        }
        return self._weighted_sum(updates, clip_norm, out)

    def _weighted_sum(
        self, updates: Mapping[str, Factored | Materialized], clip_norm: float, out: Tensor
    ) -> Tensor:
        """Write the sum of clipped updates, by parameter; return their norms before clipping."""
        norms = (
            torch.stack([update.squared_norms() for update in updates.values()]).sum(dim=0).sqrt()
        )
        absent = ~norms.isfinite()
        if absent.any():
            norms = norms.masked_fill(absent, math.nan)
            for update in updates.values():
                update.drop(absent)
        weights = factors(norms, clip_norm)
        for name, place in self._model.views(out).items():
            if name in updates:
                place.copy_(updates[name].weighted_sum(weights))
            else:
                place.zero_()  # the network does not use it
        return norms

    def _backpropagate(self, start: Tensor, x: Tensor, y: Tensor) -> Iterator[_Backpropagated]:
        """Yield each trained layer, its parameters, its input and the gradient of its output."""
        shape = x.shape[:2]
        x = x.flatten(0, 1)
        if x.dim() == 4:
            # x.to(memory_format=...) treats the two layouts of a single channel as equal and keeps
            # the strides of the other one, which convolutions do not recognise as channels last.
            x = torch.empty_like(x, memory_format=torch.channels_last).copy_(x)
        passed = []
        with self._model.lent(start):
            self._model.train_only()
            for layer, named in self._layers:
                if not _has_batch_dimension(layer, x.dim()):
                    raise RuntimeError(f"{layer} takes the batch for one of its own dimensions")
                given, x = x, layer(x)
                if named:
                    passed.append((layer, named, given.detach(), x))
            loss = losses_of(x.view(*shape, *x.shape[1:]), y).sum()
            gradients = torch.autograd.grad(loss, [output for *_, output in passed])
            for (layer, named, given, _), gradient in zip(passed, gradients, strict=True):
                rows = [part.view(*shape, *part.shape[1:]) for part in (given, gradient)]
                yield layer, named, rows[0], rows[1]


def _layers(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of nested sequences in the order of the forward pass."""
    if type(network) is not nn.Sequential:
        yield network
        return
    for part in network:
        yield from _layers(part)


def _has_batch_dimension(layer: nn.Module, dimensions: int) -> bool:
    """Return whether an input with so many dimensions has one more than the layer's own."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        return dimensions == layer.weight.dim()
    if isinstance(layer, nn.LayerNorm):
        return dimensions > len(layer.normalized_shape)
    return dimensions > 1 or type(layer) is not nn.Linear


def layer_updates(
    layer: nn.Module, names: Sequence[str], given: Tensor, gradient: Tensor, learning_rate: float
) -> dict[str, Factored | Materialized]:
    """Return how a step of SGD moves some parameters of a layer, for each client.

    The layer is a function of each row. ``given`` is its input and ``gradient`` that of the loss in
    its output, both of shape (V, n, ...).
    """
    if type(layer) is nn.Linear:
        left, right = (rows.flatten(1, -2).double() for rows in (gradient, given))
        left *= -learning_rate
        updates: dict[str, Factored | Materialized] = {"weight": Factored(left, right)}
        updates["bias"] = Materialized(left.sum(dim=1))
        return {name: updates[name] for name in names}
    padding = _zero_padding(layer) if type(layer) is nn.Conv2d else None
    if type(layer) is nn.Conv2d and padding is not None:
        gradients = {"weight": _filter_gradients(layer, padding, given, gradient)}
        gradients["bias"] = gradient.sum(dim=(1, 3, 4))
    else:
        gradients = _autograd_gradients(layer, names, given, gradient)
    # a copy in another layout is fast within one type only
    doubles = {name: gradients[name].contiguous().double() for name in names}
    return {name: Materialized(move.mul_(-learning_rate)) for name, move in doubles.items()}


def _zero_padding(layer: nn.Conv2d) -> list[int] | None:
    """Return how many zeros pad each side of each dimension.

    None if the padding is not zero, or not the same on both sides.
    """
    if layer.padding_mode != "zeros":
        return None
    if layer.padding == "same":
        both = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return None if any(total % 2 for total in both) else [total // 2 for total in both]
    return [0, 0] if layer.padding == "valid" else [int(side) for side in layer.padding]


def _filter_gradients(
    layer: nn.Conv2d, padding: list[int], given: Tensor, gradient: Tensor
) -> Tensor:
    """Return each client's gradient of the filters, from one convolution with a group per client.

    With channels-last images it takes a third to half of the time.
    """
    clients = len(given)
    filters: Tensor = conv2d_weight(  # type: ignore[no-untyped-call]
        _clients_as_channels(given),
        (clients * layer.out_channels, *layer.weight.shape[1:]),
        _clients_as_channels(gradient),
        stride=layer.stride,
        padding=padding,
        dilation=layer.dilation,
        groups=clients * layer.groups,
    )
    return filters.view(clients, *layer.weight.shape)


def _clients_as_channels(images: Tensor) -> Tensor:
    """Return images (V, n, channels, h, w) as (n, V channels, h, w), in channels-last layout."""
    return images.permute(1, 3, 4, 0, 2).flatten(3).contiguous().permute(0, 3, 1, 2)


def _autograd_gradients(
    layer: nn.Module, names: Sequence[str], given: Tensor, gradient: Tensor
) -> dict[str, Tensor]:
    """Return each client's gradients of a layer's parameters, shapes (V, ...)."""
    parameters = {name: layer.get_parameter(name).detach() for name in names}

    def one(given: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        with BatchedLayers():
            pull = vjp(
                lambda parameters_of_one: functional_call(layer, parameters_of_one, (given,)),
                parameters,
            )[1]
        pulled: dict[str, Tensor] = pull(gradient)[0]
        return pulled

    return vmap(one)(given, gradient)
