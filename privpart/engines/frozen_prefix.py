"""Frozen prefix: the layers below the lowest trained one, whose outputs are computed once and kept.

A client that trains the top of a network sends every example through the same frozen layers in
every pass of every round. If those layers are neither random nor stateful, their output is a
function of the example alone, and the rest of the network can train on it in place of the example.
"""

import math
import os
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from privpart.engines.device import free_memory
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
_SHARED_MEMORY = Path("/dev/shm")
_PASS = 64  # examples that pass through the frozen layers together


def split(model: PartialModel) -> tuple[nn.Sequential, PartialModel] | None:
    """Return the frozen layers at the front, and a model of the layers behind them.

    The second shares its trained part, and the memory of it, with ``model``.

    Returns:
        None if the network is not an ``nn.Sequential``, or if it does not start with a frozen layer
        that has parameters and is known to be a function of the example alone.
    """
    network = model.module
    if type(network) is not nn.Sequential or hooked(network):
        return None
    parameters = dict(network.named_parameters())
    # by name, because requires_grad changes from round to round if groups take turns
    trained = {id(parameters[name]) for name in (*model.trainable, *model.local)}
    # ``named_children`` lists a layer that occurs twice once, which would be another network
    layers = [(name, network.get_submodule(name)) for name in network._modules]
    fixed = (
        functions_of_the_example(layer) and not trained & set(map(id, layer.parameters()))
        for _, layer in layers
    )
    length = next((k for k, holds in enumerate(fixed) if not holds), len(layers))
    below = nn.Sequential(OrderedDict(layers[:length]))
    if not list(below.parameters()):
        return None
    above = copy(model)
    above.module = nn.Sequential(OrderedDict(layers[length:]))
    return below, above


def functions_of_the_example(layer: nn.Module) -> bool:
    """Return whether a layer is known to treat each example separately and to keep no state."""
    return all(
        type(part) in _FUNCTIONS_OF_THE_EXAMPLE and not hooked(part) and not _of_the_batch(part)
        for part in layer.modules()
    )


def _of_the_batch(layer: nn.Module) -> bool:
    if type(layer) is nn.Flatten:
        return layer.start_dim < 1
    return type(layer) is nn.Embedding and layer.scale_grad_by_freq


def hooked(layer: nn.Module) -> bool:
    """Return whether hooks or a replaced ``forward`` change what the layer's type computes."""
    hooks = [layer._forward_hooks, layer._forward_pre_hooks]
    hooks += [layer._backward_hooks, layer._backward_pre_hooks]
    of_parameters = [p._backward_hooks for p in layer.parameters(recurse=False)]
    return any([*hooks, *of_parameters]) or "forward" in vars(layer)


class Features:
    """Outputs of a frozen prefix, each computed when its example is first needed.

    No row depends on what another one holds, but its rounding may depend on how many pass together.

    Args:
        below: the frozen layers.
        x: everyone's examples, shape (n, ...); ``values`` is memory of their outputs, as long.
        shared: whether several processes use it. Two may compute the same output; both write it, up
            to rounding.

    Attributes:
        values: outputs; undefined for examples that ``compute`` has not seen.
    """

    def __init__(
        self, below: nn.Sequential, x: Tensor, values: Tensor, *, shared: bool = False
    ) -> None:
        self._below = below
        self._x = x
        self.values = values
        self._known = torch.zeros(len(x), dtype=torch.bool)
        if shared:
            self._known.share_memory_()  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, below: nn.Sequential, x: Tensor, *, shared: bool = False) -> "Features | None":
        """Return features to be computed; None if they would take most of a device's memory."""
        with torch.no_grad():
            output: Tensor = below(x[:1].clone())
        shape = (len(x), *output.shape[1:])
        if 4 * math.prod(shape) > _free_memory(x.device) // 2:
            return None
        dtype = output.dtype
        values = shared_memory(*shape, dtype=dtype) if shared else output.new_empty(shape)
        return cls(below, x, values, shared=shared)

    @torch.no_grad()
    def compute(self, clients: Sequence[Tensor]) -> None:
        """Compute the missing ``values`` at the rows of each client, shape (k,)."""
        rows = torch.cat(list(clients))
        missing: Tensor = rows[~self._known[rows]].unique()  # type: ignore[no-untyped-call]
        for some in torch.split(missing, _PASS) if len(missing) else ():
            # of few sizes, for which libraries choose their kernels once
            length = 1 << (len(some) - 1).bit_length()
            filled = torch.cat([some, some[:1].expand(length - len(some))])
            self.values[some] = self._below(self._x[filled])[: len(some)]
            self._known[some] = True


def _free_memory(device: torch.device) -> int:
    if device.type != "cpu":
        return free_memory(device)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # workers share the outputs, and a container may limit shared memory further
    if _SHARED_MEMORY.is_dir():
        free = min(free, shutil.disk_usage(_SHARED_MEMORY).free)
    return free


def shared_memory(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return shared memory, zeros at first; no page of it exists before it is written to."""
    storage: Any = torch.UntypedStorage
    tensor, size = torch.empty(0, dtype=dtype), math.prod(shape)
    memory: torch.UntypedStorage = storage._new_shared(size * tensor.element_size())
    return tensor.set_(memory, 0, (size,), (1,)).view(shape)
