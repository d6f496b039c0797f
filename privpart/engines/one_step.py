"""One step: the sum of the clipped updates of clients that take a single step of SGD.

Before that step all clients hold the same parameters, so their examples pass through the network as
one batch, forwards and backwards, and nothing as long as an update exists per client.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from privpart.clip import factors
from privpart.engines.frozen_prefix import functions_of_the_example
from privpart.engines.layer_changes import Product, Written, layer_changes
from privpart.engines.lockstep import to_channels_last
from privpart.model import PartialModel

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
