"""Frozen prefix: layers below the lowest trained one, whose outputs are computed once and kept.

A client that trains the top of a network sends every example through the same frozen layers in
every pass and round. If nothing in them is random or remembers, their output is a function of the
example alone, and the rest of the network can train on it in place of the example.
"""

from collections import OrderedDict
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor, nn

from privpart.model import PartialModel

_FUNCTIONS_OF_THE_EXAMPLE = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Linear,
    nn.Embedding,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.ReLU,
    nn.GELU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Flatten,
    nn.Identity,
    nn.Sequential,
)
_AT_ONCE = 16


def split(model: PartialModel) -> tuple[nn.Sequential, PartialModel] | None:
    """Return the frozen layers at the front, and the model of the layers behind them.

    The second is ``model`` in every other respect: the same trained part, in the same memory.

    Returns:
        None if the network is no ``nn.Sequential``, if no layer with parameters can be split off,
        or if a layer there is not known to be a function of the example alone.
    """
    network = model.module
    if type(network) is not nn.Sequential or _hooked(network):
        return None
    parameters = dict(network.named_parameters())
    # by name: whether gradients flow may differ from round to round
    trained = {id(parameters[name]) for name in model.trainable}
    layers = named_layers(network)
    length = next(
        (k for k, (_, layer) in enumerate(layers) if not _fixed(layer, trained)), len(layers)
    )
    below = nn.Sequential(OrderedDict(layers[:length]))
    if not list(below.parameters()):
        return None
    above = copy(model)
    above.module = nn.Sequential(OrderedDict(layers[length:]))
    return below, above


def named_layers(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return its layers; unlike ``named_children``, also one that comes twice."""
    return [(name, network.get_submodule(name)) for name in network._modules]


def _fixed(layer: nn.Module, trained: set[int]) -> bool:
    known = functions_of_the_example(layer)
    return known and not any(id(p) in trained for p in layer.parameters())


def functions_of_the_example(layer: nn.Module) -> bool:
    """Whether a layer is known to see each example by itself, and to remember nothing."""
    return all(
        type(part) in _FUNCTIONS_OF_THE_EXAMPLE and not _hooked(part) and not _of_the_batch(part)
        for part in layer.modules()
    )


def _of_the_batch(layer: nn.Module) -> bool:
    if type(layer) is nn.Flatten:
        return layer.start_dim < 1
    return type(layer) is nn.Embedding and layer.scale_grad_by_freq


def _hooked(layer: nn.Module) -> bool:
    """Whether the layer, or a gradient of its own parameters, does what its type does not say."""
    hooks = [layer._forward_hooks, layer._forward_pre_hooks]
    hooks += [layer._backward_hooks, layer._backward_pre_hooks]
    of_parameters = [p._backward_hooks for p in layer.parameters(recurse=False)]
    return any([*hooks, *of_parameters]) or "forward" in vars(layer)


class Features:
    """Outputs of a frozen prefix, computed when an example is first asked for.

    Args:
        below: the frozen layers.
        x: everyone's examples, shape (n, ...).
        shared: whether processes share them; two may then compute the same one, to the same end.

    Attributes:
        values: shape (n, ...), of the examples asked for so far.
    """

    def __init__(self, below: nn.Sequential, x: Tensor, *, shared: bool = False) -> None:
        self._below, self._x = below, x
        with torch.no_grad():
            one = below(x[:1])
        self.values = one.new_empty(len(x), *one.shape[1:])
        self._known = torch.zeros(len(x), dtype=torch.bool)
        if shared:
            for tensor in (self.values, self._known):
                share(tensor)

    @torch.no_grad()
    def compute(self, clients: Sequence[Tensor]) -> None:
        """Make sure that ``values[rows]`` are there, for the rows of each client, shape (k,).

        In pieces of one size, filled up with the client's own: another number of rows is other
        rounding, by which what one client holds would reach the others' updates.
        """
        if self._known[torch.cat(list(clients))].all():
            return
        for some in (piece for rows in clients for piece in torch.split(rows, _AT_ONCE)):
            missing = ~self._known[some]
            if not missing.any():
                continue
            filled = torch.cat([some, some[:1].expand(_AT_ONCE - len(some))])
            self.values[some[missing]] = self._below(self._x[filled])[: len(some)][missing]
            self._known[some] = True


def feature_bytes(below: nn.Sequential, x: Tensor) -> int:
    """Return the memory that the outputs of all examples need."""
    with torch.no_grad():
        one: Tensor = below(x[:1])
    return 4 * len(x) * one.numel()


def share(tensor: Tensor) -> Tensor:
    """Move a tensor into memory that other processes see, and return it."""
    return tensor.share_memory_()  # type: ignore[no-untyped-call,no-any-return]
