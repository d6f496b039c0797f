"""Layer changes: what one step of each of V clients changes in a layer, measured and added up.

A function of what came to the layer and of the gradient that came back, in each client's rows. A
dense layer's is their product: its length is known without writing it out (ghost clipping:
Goodfellow 2015; Li et al. 2022, section 4), and so is the weighted sum over clients, which is one
product of two matrices.

One step: the sum of the clipped updates of clients that take a single step of SGD.

Before that step all clients hold the same parameters, so their examples pass through the network as
one batch, forwards and backwards, and nothing as long as an update exists per client.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.functional import group_norm, layer_norm
from torch.nn.grad import conv2d_weight

from privpart.clip import factors
from privpart.engines.frozen_prefix import functions_of_the_example
from privpart.engines.vectorized import OwnRows, to_channels_last
from privpart.model import PartialModel

_SLACK = 2.0**-46
"""Per row and column, of the square of the sum of the rows' lengths: 2^7 times what a Gram matrix
can lose by rounding. Where rows cancel, a length may be nothing but that."""


@dataclass(frozen=True, slots=True)
class Product:
    """Changes of a dense layer's weights, ``left[v].T @ right[v]``, not written out."""

    left: Tensor  # (V, rows, out), float64
    right: Tensor  # (V, rows, in), float64

    def squared_norms(self) -> Tensor:
        """Return each client's, shape (V,); not less than the true ones."""
        grams = (self.left @ self.left.mT) * (self.right @ self.right.mT)
        lengths = self.left.norm(dim=2) * self.right.norm(dim=2)
        slack = _SLACK * (self.left.shape[1] + self.left.shape[2] + self.right.shape[2])
        squared: Tensor = grams.sum(dim=(1, 2)) + slack * lengths.sum(dim=1).square()
        return squared

    def drop(self, absent: Tensor) -> None:
        """Zero some clients: zero times NaN would not."""
        self.left[absent], self.right[absent] = 0.0, 0.0

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum over clients, shape (out, in); weights of shape (V,)."""
        left = self.left * weights[:, None, None]
        total: Tensor = left.flatten(0, 1).T @ self.right.flatten(0, 1)
        return total


@dataclass(frozen=True, slots=True)
class Written:
    """Changes of another parameter, one client's after the other's."""

    each: Tensor  # (V, ...), float64

    def squared_norms(self) -> Tensor:
        """Return each client's, shape (V,)."""
        return self.each.flatten(1).square().sum(dim=1)

    def drop(self, absent: Tensor) -> None:
        """Zero some clients."""
        self.each[absent] = 0.0

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum over clients, shape (...); weights of shape (V,)."""
        return torch.einsum("v,v...->...", weights, self.each)


def layer_changes(
    layer: nn.Module, names: Sequence[str], came: Tensor, gradient: Tensor, learning_rate: float
) -> dict[str, Product | Written]:
    """Return what a step of SGD changes in some parameters of a layer.

    Args:
        layer: a function of each row.
        names: of the layer's parameters.
        came: what came to the layer, shape (V, n, ...).
        gradient: of the loss in what left it, shape (V, n, ...).
        learning_rate: of the step.
    """
    if type(layer) is nn.Linear:
        left, right = (rows.flatten(1, -2).double() for rows in (gradient, came))
        left *= -learning_rate
        every: dict[str, Product | Written] = {"weight": Product(left, right)}
        every["bias"] = Written(left.sum(dim=1))
        return {name: every[name] for name in names}
    padding = _padding(layer) if type(layer) is nn.Conv2d else None
    if type(layer) is nn.Conv2d and padding is not None:
        found = {"weight": _filters(layer, padding, came, gradient)}
        found["bias"] = gradient.sum(dim=(1, 3, 4))
    elif type(layer) is nn.GroupNorm or type(layer) is nn.LayerNorm:
        found = _scale_and_shift(layer, came, gradient)
    else:
        found = _by_autograd(layer, names, came, gradient)
    return {name: Written(found[name].double() * -learning_rate) for name in names}


def _padding(layer: nn.Conv2d) -> list[int] | None:
    """Zeros on either side; None if they are no zeros, or not as many on both."""
    if layer.padding_mode != "zeros":
        return None
    if layer.padding == "same":
        both = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return None if any(total % 2 for total in both) else [total // 2 for total in both]
    return [0, 0] if layer.padding == "valid" else [int(side) for side in layer.padding]


def _filters(layer: nn.Conv2d, padding: list[int], came: Tensor, gradient: Tensor) -> Tensor:
    """Each client's gradient of the filters: one grouped convolution, a group per client.

    Of images whose channels lie next to each other, where it takes half to a third of the time.
    """
    clients = len(came)
    filters: Tensor = conv2d_weight(  # type: ignore[no-untyped-call]
        _side_by_side(came),
        (clients * layer.out_channels, *layer.weight.shape[1:]),
        _side_by_side(gradient),
        stride=layer.stride,
        padding=padding,
        dilation=layer.dilation,
        groups=clients * layer.groups,
    )
    return filters.view(clients, *layer.weight.shape)


def _side_by_side(images: Tensor) -> Tensor:
    """Clients' images (V, n, channels, h, w) as the channels of n, (n, V channels, h, w)."""
    return images.permute(1, 3, 4, 0, 2).flatten(3).contiguous().permute(0, 3, 1, 2)


def _scale_and_shift(
    layer: nn.GroupNorm | nn.LayerNorm, came: Tensor, gradient: Tensor
) -> dict[str, Tensor]:
    """Each client's gradient of a norm's parameters: a fifth of the time that autograd takes.

    Of what came, normalised but not yet scaled; summed over whatever shares a weight.
    """
    rows = came.flatten(0, 1)
    if isinstance(layer, nn.GroupNorm):
        alike = group_norm(rows, layer.num_groups, eps=layer.eps)
        others = [1, *range(3, gradient.dim())]
    else:
        alike = layer_norm(rows, layer.normalized_shape, eps=layer.eps)
        others = list(range(1, gradient.dim() - len(layer.normalized_shape)))
    scaled = gradient * alike.view_as(gradient)
    return {"weight": scaled.sum(dim=others), "bias": gradient.sum(dim=others)}


def _by_autograd(
    layer: nn.Module, names: Sequence[str], came: Tensor, gradient: Tensor
) -> dict[str, Tensor]:
    """Each client's gradient of a layer's parameters, shapes (V, ...)."""
    parameters = {name: layer.get_parameter(name).detach() for name in names}

    def one(came: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        with OwnRows():
            pull = vjp(lambda own: functional_call(layer, own, (came,)), parameters)[1]
        found: dict[str, Tensor] = pull(gradient)[0]
        return found

    return vmap(one)(came, gradient)


_Passed = tuple[nn.Module, dict[str, str], Tensor, Tensor]


class OneStep:
    """A network whose clients' first steps can be taken in one pass.

    Args:
        model: as ``possible`` allows.
    """

    def __init__(self, model: PartialModel) -> None:
        self._model = model
        names = {id(p): name for name, p in model.module.named_parameters()}
        trained = set(model.trainable)
        self._layers: list[tuple[nn.Module, dict[str, str]]] = []
        for layer in _layers(model.module):
            named = {own: names[id(p)] for own, p in layer.named_parameters()}
            self._layers.append((layer, {o: name for o, name in named.items() if name in trained}))

    @staticmethod
    def possible(model: PartialModel) -> bool:
        """Whether layer follows layer, trained ones once, each a function of the example alone.

        Only then does no client's example reach another client's rows.
        """
        layers = list(_layers(model.module))
        parameters = [p for _, p in model.module.named_parameters(remove_duplicate=False)]
        own = {id(parameter) for layer in layers for parameter in layer.parameters()}
        return (
            functions_of_the_example(model.module)
            and len(own) == len(parameters)  # none tied, none a sequence's
            and not any(getattr(layer, "inplace", False) for layer in layers)
        )

    @property
    def written(self) -> int:
        """Numbers written out per client: those of trained layers that are not dense."""
        layers = [(layer, own) for layer, named in self._layers for own in named]
        return sum(
            layer.get_parameter(own).numel()
            for layer, own in layers
            if type(layer) is not nn.Linear
        )

    def sum(
        self,
        start: Tensor,
        x: Tensor,
        loss: Callable[[Tensor], Tensor],
        *,
        learning_rate: float,
        clip_norm: float,
        out: Tensor,
    ) -> int:
        """Write the sum of all clients' clipped changes; return how many were not clipped.

        Args:
            start: what all clients start from, shape (d,).
            x: n examples of each of V clients, shape (V, n, ...).
            loss: from the logits, shape (V n, ...), to the sum of the clients' losses.
            learning_rate: of the step.
            clip_norm: bound on each change.
            out: overwritten, shape (d,), float64.

        Guarantees:
            One client moves the sum by at most ``clip_norm``, whatever the examples hold. If its
            change is not finite it counts as absent, and the others' are what they were.
        """
        changes: dict[str, Product | Written] = {}
        for layer, named, came, gradient in self._passed(start, x, loss):
            found = layer_changes(layer, list(named), came, gradient, learning_rate)
            changes |= {named[own]: change for own, change in found.items()}
        norms = (
            torch.stack([change.squared_norms() for change in changes.values()]).sum(dim=0).sqrt()
        )
        absent = ~norms.isfinite()
        if absent.any():
            norms[absent] = 0.0
            for change in changes.values():
                change.drop(absent)
        weights = factors(norms, clip_norm)
        for name, place in self._model.views(out).items():
            place.copy_(changes[name].weighted_sum(weights))
        return int((norms <= clip_norm).sum())

    def _passed(
        self, start: Tensor, x: Tensor, loss: Callable[[Tensor], Tensor]
    ) -> Iterator[_Passed]:
        """Yield each trained layer, its parameters, what came to it and what came back."""
        shape, x = x.shape[:2], x.flatten(0, 1)
        if x.dim() == 4:
            x = to_channels_last(x)
        passed = []
        with self._model.lent(start):
            self._model.train_only()
            for layer, named in self._layers:
                if not _keeps_apart(layer, x.dim()):
                    raise RuntimeError(f"{layer} takes the batch for one of its own dimensions")
                came, x = x, layer(x)
                if named:
                    passed.append((layer, named, came.detach(), x))
            gradients = torch.autograd.grad(loss(x), [left for *_, left in passed])
            for (layer, named, came, _), gradient in zip(passed, gradients, strict=True):
                rows = [part.view(*shape, *part.shape[1:]) for part in (came, gradient)]
                yield layer, named, rows[0], rows[1]


def _layers(network: nn.Module) -> Iterator[nn.Module]:
    """In the order in which they are passed, if ``network`` is layers and sequences of them."""
    if type(network) is not nn.Sequential:
        yield network
        return
    for part in network:
        yield from _layers(part)


def _keeps_apart(layer: nn.Module, dimensions: int) -> bool:
    """Whether what comes to a layer has a dimension for the batch beside the layer's own."""
    if isinstance(layer, nn.Conv1d | nn.Conv2d):
        return dimensions == layer.weight.dim()
    if isinstance(layer, nn.LayerNorm):
        return dimensions > len(layer.normalized_shape)
    return dimensions > 1 or type(layer) is not nn.Linear
