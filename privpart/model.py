"""Partial model: which parameters of a network train, and the one flat vector that they live in.

A client trains, clips and sends only the trainable part (FedPT, Algorithm 1). All trainable
parameters are views of one contiguous vector, and so are their gradients: a local step, an update
and a clip are each one operation on it, whatever the number of layers.

The other parameters are frozen, or local: those train on each client and never leave it. They live
in a second vector, which has no part in updates, clip, noise or messages.

A client borrows the model (``PartialModel.lent``). Whatever its data made of the module besides the
two vectors (buffers, gradients, modes, states that layers keep) is put back when it returns it, or
is an error: neither clip nor noise covers it.

Networks that cannot be trained in part under differential privacy are refused, with the reason.
"""

import hashlib
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from itertools import accumulate
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from accounting.checks import ConfigError
from privpart.patterns import first_names, matching_parameters, trained_groups
from privpart.start_values import Initializer, built, has_statistics, set_start_values


class PartialModel:
    """A module of which some parameters train; the others are kept or follow from a public seed.

    The model takes ownership of the module: it sets every parameter from the seed except those that
    ``keep`` names, stops the gradients of the frozen ones, and moves the trainable ones into one
    flat float32 vector. A tied parameter counts once, under its first name. Buffers keep the values
    that the module's constructor gave them: they do not follow from the seed, but they enter the
    fingerprint.

    A client rebuilds the frozen part from the seed and the kept weights, which must be shipped to
    it once; the fingerprint says whether it has the right ones.

    Args:
        module: a function that builds a module on the CPU, without batch statistics; or such a
            module, if no other ``PartialModel`` holds it. What trains, or is local, is float32. The
            frozen part keeps its types, such as bfloat16, or integers that ``keep`` names.
        train: patterns on parameter names or layer types, see ``privpart.patterns``; None trains
            the parameters that require gradients.
        seed: public seed of the start values, 0 <= seed < 2^128. None keeps all of the module's own
            weights.
        keep: patterns of parameters that keep the module's own weights, which are pretrained; the
            others follow from the seed.
        local: patterns of parameters that train on each client and never leave it, such as a
            personal head. Each client starts from the same values. What it makes of them is in
            ``own`` while it holds the model, and nowhere afterwards.
        overwrite: required to let a seed replace all weights of a module that already exists.
        initializers: by pattern, in addition to ``default_initializers``; later ones win.
        groups: patterns of each group of parameters that may train without the others, see
            ``privpart.patterns``; ``flat`` then holds one group after the other. None is one group.
        fingerprint: fingerprint that the frozen part must have, for instance from a message.

    Attributes:
        flat: the trainable parameters, shape (d,); writing to it changes the module.
        gradient: their gradients, shape (d,); ``backward`` adds to it.
        own: the local parameters, shape (l,), l >= 0; writing to it changes the module.
        own_gradient: their gradients, shape (l,).
        own_start: their start values, shape (l,); ``load`` sets ``own`` to it.
        trainable: names of the trainable parameters, in the order of ``flat``.
        local: names of the local parameters, in the order of ``own``.
        frozen: names of the frozen parameters.
        kept: names of the parameters that keep the module's own weights.
        groups: names of the trainable parameters of each group, in order.
        group_sizes: number of entries of ``flat`` that belong to each group, in order.
        fingerprint: 32 hex digits of every bit, name and shape of the frozen part, of the buffers,
            persistent or not, and of the local part's start values.
        trainable_hash: 20 hex digits of the names and shapes of the trainable part, in order.

    >>> model = PartialModel(lambda: nn.Linear(4, 2), train=["weight"], seed=7)
    >>> model.trainable, model.flat.shape
    (('weight',), torch.Size([8]))
    """

    # set by _take, which also gives a device's copy its own
    module: nn.Module
    flat: Tensor
    gradient: Tensor
    own: Tensor
    own_gradient: Tensor
    own_start: Tensor

    def __init__(
        self,
        module: nn.Module | Callable[[], nn.Module],
        *,
        train: Sequence[str] | None = None,
        seed: int | None,
        keep: Sequence[str] = (),
        local: Sequence[str] = (),
        overwrite: bool = False,
        initializers: Mapping[str, Initializer] | None = None,
        groups: Sequence[Sequence[str]] | None = None,
        fingerprint: str | None = None,
    ) -> None:
        module = built(module, seed, keep, overwrite=overwrite)
        refuse_batch_statistics(module)
        refuse_max_norm(module)
        parameters = dict(module.named_parameters())
        _refuse_taken(parameters)
        self.seed = seed
        self.trainable = matching_parameters(module, train)
        self.local = _local_names(module, local, self.trainable)
        self.groups: tuple[tuple[str, ...], ...] = (self.trainable,)
        if groups is not None:
            self.groups = trained_groups(module, groups, self.trainable)
            self.trainable = tuple(name for names in self.groups for name in names)
        moving = {*self.trainable, *self.local}
        self.frozen = tuple(name for name in parameters if name not in moving)
        self.kept = set_start_values(module, seed, keep, initializers or {}, moving)
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in moving)
        self._take(module)
        self.fingerprint = self._fingerprint()
        if fingerprint not in (None, self.fingerprint):
            raise ConfigError(
                f"the frozen part has fingerprint {self.fingerprint}, expected {fingerprint}: its "
                "seed, kept weights, network, initialisers, frozen or local set or generator "
                "version differs. Training would train another model."
            )
        self.group_sizes = tuple(
            sum(parameters[name].numel() for name in names) for names in self.groups
        )
        self.trainable_hash = self.trainable_hash_of(range(len(self.groups)))
        _OWNERS.update((id(parameter), self) for parameter in parameters.values())

    def _take(self, module: nn.Module) -> None:
        """Move the module's parameters into vectors, and note what training must not change."""
        parameters = dict(module.named_parameters())
        self.module = module
        self.flat, self.gradient = _join([parameters[name] for name in self.trainable], module)
        self.own, self.own_gradient = _join([parameters[name] for name in self.local], module)
        self.own_start = self.own.clone()
        self._frozen = [parameters[name] for name in self.frozen]
        for parameter in self._frozen:
            parameter.grad = None
        self._layers = dict(module.named_modules())
        # each layer's buffers and a copy of their values
        self._buffers: dict[nn.Module, dict[str, tuple[Tensor | None, Tensor | None]]] = {
            layer: {n: (b, None if b is None else b.clone()) for n, b in layer._buffers.items()}
            for layer in module.modules()
        }
        norms = ((name, layer) for name, layer in self._layers.items() if has_statistics(layer))
        self._norms = [(name, layer, self._buffers[layer]) for name, layer in norms]
        self._places = [(n, p, p.data, p.grad) for n, p in parameters.items()]

    def on(self, device: torch.device) -> "PartialModel":
        """Return a copy of this model in a device's memory, or this model if it is there already.

        Neither sees what the other trains, nor a later change of the other's frozen part.
        """
        if self.flat.device == device:
            return self
        self.load(self.flat)  # resets the buffers, which a forward pass may have changed
        other = copy(self)
        moved = deepcopy(self.module).to(device)
        parameters = dict(moved.named_parameters(remove_duplicate=False))
        for name, first in first_names(self.module).items():
            if parameters[name] is not parameters[first]:  # some devices get parameters anew
                layer, _, own = name.rpartition(".")
                setattr(moved.get_submodule(layer), own, parameters[first])
        other._take(moved)
        return other

    def verify(self) -> None:
        """Raise ConfigError if the frozen part no longer has the fingerprint; reset the model.

        It reads every bit, and so finds what ``lent`` cannot see: writing to ``parameter.data``.
        """
        self.load(self.flat)
        if self._fingerprint() != self.fingerprint:
            raise ConfigError(
                "the frozen part has changed since the model was built: such a change is neither "
                "clipped nor noised. Do not write to frozen parameters; and build the model again."
            )

    def frozen_checksum(self) -> int:
        """Return a checksum of the frozen part: ``verify``, in a fraction of the time."""
        return checksum(self._frozen)

    def _fingerprint(self) -> str:
        parameters = dict(self.module.named_parameters())
        return tensors_fingerprint(
            {name: parameters[name] for name in self.frozen}
            | {f"buffer {name}": buffer.clone() for name, buffer in self.module.named_buffers()}
            | {f"local {name}": parameters[name] for name in self.local}
        )

    @property
    def dim(self) -> int:
        """Number of trainable parameters d."""
        return self.flat.numel()

    def active_dim(self, active: Iterable[int] | None) -> int:
        """Return the number of parameters in some groups; None is all groups."""
        return sum(span.stop - span.start for span in self.spans(active))

    @property
    def frozen_version(self) -> int:
        """Counter that grows with every in-place change of the frozen part, except by ``.data``."""
        return sum(parameter._version for parameter in self._frozen)

    @property
    def parameter_count(self) -> int:
        """Number of parameters, trained and frozen."""
        return sum(p.numel() for p in self.module.parameters())

    def spans(self, active: Iterable[int] | None = None) -> list[slice]:
        """Return the slices of ``flat`` that hold some groups; None is all groups.

        Slices of neighbouring groups are joined.
        """
        ends = list(accumulate(self.group_sizes, initial=0))
        spans: list[slice] = []
        for group in range(len(self.group_sizes)) if active is None else active:
            start, stop = ends[group], ends[group + 1]
            if spans and spans[-1].stop == start:
                start = spans.pop().start
            spans.append(slice(start, stop))
        return spans

    def trainable_hash_of(self, active: Iterable[int]) -> str:
        """Return 20 hex digits of the names and shapes in some groups, in order."""
        parameters = dict(self.module.named_parameters())
        names = [name for group in active for name in self.groups[group]]
        shapes = [f"{name}|{tuple(parameters[name].shape)}" for name in names]
        return hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:20]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of a vector, shape (d,), by the name of each trainable parameter."""
        parameters = dict(self.module.named_parameters())
        sizes = [parameters[name].numel() for name in self.trainable]
        return {
            name: part.view(parameters[name].shape)
            for name, part in zip(self.trainable, torch.split(flat, sizes), strict=True)
        }

    def train_only(self, active: Iterable[int] | None = None) -> None:
        """Compute gradients of some groups only; None is all groups. Local parts always train.

        The backward pass stops at the earliest layer that trains.
        """
        # autograd then keeps no activation below the lowest layer that trains
        wanted = range(len(self.groups)) if active is None else set(active)
        parameters = dict(self.module.named_parameters())
        for group, names in enumerate(self.groups):
            for name in names:
                parameters[name].requires_grad_(group in wanted)
        for name in self.local:
            parameters[name].requires_grad_(True)

    def load(self, flat: Tensor) -> None:
        """Overwrite the trainable part with a vector of shape (d,), and reset everything else.

        What a client's data left in a buffer or in a local part is neither clipped nor noised, so
        it must reach neither the next client nor the model. Buffers that a forward pass replaced
        are restored; buffers that it added are dropped. Frozen BatchNorm is in evaluation mode.
        """
        self.flat.copy_(flat)
        self.own.copy_(self.own_start)
        # a forward pass may replace, resize, add or delete buffers
        for layer, saved in self._buffers.items():
            layer._buffers.clear()
            for name, (buffer, value) in saved.items():
                if buffer is not None and value is not None:
                    buffer.data = value.clone()
                layer._buffers[name] = buffer
        for _, layer, _ in self._norms:
            layer.training = False

    @contextmanager
    def lent(self, start: Tensor) -> Iterator[None]:
        """Lend the model for training from ``start``, shape (d,), and reset it afterwards.

        Outside this context nobody can see what one client's raw data made of the module. What an
        attribute of a layer holds is followed through lists, dicts, sets and tuples, to tensors and
        arrays, and not through other objects.

        Raises:
            ConfigError: training wrote to a frozen parameter or to a tensor that a layer keeps as a
                plain attribute, moved or replaced a parameter, or put frozen BatchNorm into
                training mode; or ``start`` is ``flat``.
        """
        if start.data_ptr() == self.flat.data_ptr():
            raise ConfigError("start=model.flat: training would overwrite it. Pass a clone.")
        if moved := self._moved():
            raise ConfigError(moved)
        self.load(start)
        # cheap, but blind to writes through .data: ``verify`` reads the bits
        versions = [parameter._version for parameter in self._frozen]
        layers = LayerStates(self._layers)
        try:
            yield
        finally:
            fault = self._written(versions) or layers.written() or self._moved()
            layers.restore()
            self._put_back()
            self.load(start)
        if fault:
            raise ConfigError(fault)

    def _written(self, versions: Sequence[int]) -> str | None:
        """Return what is wrong if training changed the frozen part."""
        for name, parameter, version in zip(self.frozen, self._frozen, versions, strict=True):
            if parameter._version != version:
                return (
                    f"frozen parameter {name!r} was written to during training: such a change is "
                    "neither clipped nor noised. Let it train, or do not write to it; and build "
                    "the model again."
                )
        for name, layer, saved in self._norms:
            # by value: batch_norm does not count its writes in the tensor's version
            if layer.training or any(
                value is not None
                and ((now := layer._buffers.get(buffer)) is None or not now.equal(value))
                for buffer, (_, value) in saved.items()
            ):
                return (
                    f"layer {name!r} was in training mode during training: its statistics mix the "
                    "examples of a batch and would leave the client without noise. Do not call "
                    "module.train() in the client; set the mode of single layers."
                )
        return None

    def _moved(self) -> str | None:
        """Return what is wrong if the vectors no longer hold the module's parameters."""
        for name, parameter, data, _ in self._places:
            if parameter.data_ptr() != data.data_ptr():
                return (
                    f"parameter {name!r} was moved, for instance by module.to(...) or by writing "
                    "to .data: the model no longer holds it. Write in place; and build it again."
                )
        return None

    def _put_back(self) -> None:
        """Give every parameter its memory, gradient and role again, and zero the gradients."""
        self.gradient.zero_()
        self.own_gradient.zero_()
        for _, parameter, data, gradient in self._places:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for parameter in self._frozen:
            parameter.requires_grad_(False)


_TORCHS_OWN = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)
_FOLLOWED = (*_CONTAINERS, tuple, Tensor, np.ndarray)


class LayerStates:
    """The attributes of layers before a client trains: a forward pass may set any of them.

    A recurrent network that keeps its hidden state in ``self.hidden`` would carry one client's data
    into the next client's training.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[str, Tensor, Tensor, Tensor, int]] = []
        # containers, which may hold themselves; and buffers, which are reset apart
        self._noted = {id(b) for layer in layers.values() for b in layer._buffers.values()}
        self._layers, self._next_hook = layers, RemovableHandle.next_id
        for prefix, layer in layers.items():
            attributes = vars(layer)
            self._attributes.append((attributes, attributes.copy()))
            for name in ("_parameters", "_modules"):
                self._containers.append((attributes[name], attributes[name].copy()))
            for name in attributes.keys() - _TORCHS_OWN:
                if isinstance(attributes[name], _FOLLOWED):
                    self._note(f"{prefix}.{name}".strip("."), attributes[name])

    def _note(self, path: str, value: Any) -> None:  # noqa: ANN401
        """Keep what an attribute holds, through lists, dicts, sets and tuples."""
        if isinstance(value, nn.Parameter) or id(value) in self._noted:
            return
        if isinstance(value, np.ndarray):
            is_kept = value.flags.writeable and value.dtype.kind in "fiu"
            value = torch.from_numpy(value.view(np.ndarray)) if is_kept else ()
        if isinstance(value, Tensor):
            if not value.is_inference():
                copied = value.detach().clone()
                self._tensors.append((path, value, value.data, copied, value._version))
            return
        self._noted.add(id(value))
        if type(value) in _CONTAINERS:
            self._containers.append((value, value.copy()))
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, _FOLLOWED):
                self._note(path, item)

    def written(self) -> str | None:
        """Return what is wrong if a tensor or array among the attributes was written to."""
        for name, tensor, memory, before, version in self._tensors:
            if _overwritten(tensor, memory, before, version):
                return (
                    f"{name!r}, a tensor that a layer keeps, was written to during training: it "
                    "would carry one client's data to the next. Register it as a buffer, which is "
                    "reset for each client."
                )
        return None

    def changed(self) -> bool:
        """Return whether an attribute, or an item of one, is another object or was written to."""
        pairs = (*self._attributes, *self._containers)
        replaced = any(_identities(now) != _identities(saved) for now, saved in pairs)
        return replaced or self.written() is not None

    def restore(self) -> None:
        """Put every attribute back, with its items and values; remove hooks that came since."""
        if RemovableHandle.next_id != self._next_hook:
            self._remove_hooks()
        for now, saved in (*self._containers, *self._attributes):
            now.clear()
            if isinstance(now, list | deque):
                now.extend(saved)
            else:
                now.update(saved)
        for _, tensor, memory, before, version in self._tensors:
            if _overwritten(tensor, memory, before, version):
                tensor.data = memory
                tensor.detach().copy_(before)

    def _remove_hooks(self) -> None:
        for layer in self._layers.values():
            of_layer = [value for name, value in vars(layer).items() if name.endswith("hooks")]
            of_parameters = [p._backward_hooks or {} for p in layer.parameters(recurse=False)]
            for hooks in (*of_layer, *of_parameters):
                for number in [key for key in hooks if key >= self._next_hook]:
                    del hooks[number]


def _overwritten(tensor: Tensor, memory: Tensor, before: Tensor, version: int) -> bool:
    """Whether a layer's tensor was written to; of one that is dense, also by ``.data``."""
    if tensor._version != version or tensor.layout is not torch.strided:
        return tensor._version != version
    return tensor.data_ptr() != memory.data_ptr() or not same_bits(tensor, before)


def _identities(items: Any) -> list[int]:  # noqa: ANN401  any of _CONTAINERS
    return [*map(id, items), *map(id, items.values() if isinstance(items, dict) else ())]


_OWNERS: WeakValueDictionary[int, PartialModel] = WeakValueDictionary()
"""The model that each parameter belongs to, by id; an entry ends with its model."""


def _local_names(
    module: nn.Module, local: Sequence[str], trainable: Sequence[str]
) -> tuple[str, ...]:
    if not isinstance(local, str) and not local:
        return ()
    names = matching_parameters(module, local, "local")
    if both := [name for name in names if name in trainable]:
        raise ConfigError(
            f"parameter {both[0]!r} is in train and in local: what trains either leaves the client "
            f"or does not. Exclude it from train, for instance by '!{both[0]}'."
        )
    return names


def _join(parameters: Sequence[nn.Parameter], module: nn.Module) -> tuple[Tensor, Tensor]:
    """Move parameters and gradients into two flat vectors, and make them views of those."""
    none = torch.empty(0, device=next(module.parameters()).device)
    flat = torch.cat([none, *(p.detach().reshape(-1) for p in parameters)])
    gradient = torch.zeros_like(flat)
    sizes = [parameter.numel() for parameter in parameters]
    parts = torch.split(flat, sizes), torch.split(gradient, sizes)
    for parameter, data, grad in zip(parameters, *parts, strict=True):
        parameter.data = data.view(parameter.shape)
        parameter.grad = grad.view(parameter.shape)
    return flat, gradient


def _refuse_taken(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        owner = _OWNERS.get(id(parameter))
        if owner is not None and any(parameter is p for p in owner.module.parameters()):
            raise ConfigError(
                f"parameter {name!r} belongs to another PartialModel, which would silently lose "
                "it. Build a second network, or pass copy.deepcopy(module)."
            )


def refuse_batch_statistics(module: nn.Module) -> None:
    """Raise ConfigError for layers whose statistics mix the examples of a batch.

    Layers in evaluation mode that use running statistics are accepted: those are constants.
    """
    for name, layer in module.named_modules():
        frozen = has_statistics(layer) and not layer.training
        if (has_statistics(layer) or isinstance(layer, _BatchNorm)) and not frozen:
            raise ConfigError(
                f"layer {name!r} is a {type(layer).__name__}: its statistics mix the examples of a "
                "batch and would leave the client without noise. privpart.models has "
                "replace_batch_norm(module), and freeze_batch_norm(module) for one that has "
                "running statistics."
            )


def refuse_max_norm(module: nn.Module) -> None:
    """Raise ConfigError for embeddings that rewrite their own rows."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise ConfigError(
                f"layer {name!r} has max_norm={layer.max_norm}: every forward pass would rewrite "
                "the rows of a client's tokens, even if they are frozen. Use max_norm=None."
            )


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = 0x9E3779B97F4A7C15 - 2**64
"""2^64 over the golden ratio, as a signed integer: its multiples are spread over all bits."""


def tensors_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Return 32 hex digits that change with any bit, name, shape or dtype of ``tensors``."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        # NumPy has no bfloat16
        bits = real.view(_INTEGERS[real.itemsize]).numpy()
        digest.update(bits.astype(bits.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()[:32]


def same_bits(first: Tensor, other: Tensor) -> bool:
    """Whether two dense tensors agree in shape, dtype, device and every bit, also of NaN or -0."""
    kinds = {(tensor.shape, tensor.dtype, tensor.device) for tensor in (first, other)}
    return len(kinds) == 1 and torch.equal(_words(first), _words(other))


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return a number that other bits, or the same bits in another order, change.

    Unlike ``tensors_fingerprint`` it is fast, but weak against somebody who chooses the bits.
    """
    total, elsewhere = 0, []
    for tensor in tensors:
        words = _words(tensor)
        if tensor.is_cpu:
            total = zlib.crc32(words.numpy().data, total)
        else:
            elsewhere.append(_weighted(words))
    # read at once, because each reading waits for an accelerator
    if elsewhere:
        total = zlib.crc32(torch.stack(elsewhere).cpu().numpy().data, total)
    return total


def _words(tensor: Tensor) -> Tensor:
    """Return a dense tensor's bits as integers, shape (n,)."""
    flat = tensor.detach().contiguous().flatten()
    return flat.view(_INTEGERS[min(flat.itemsize, 8)])


def _weighted(words: Tensor) -> Tensor:
    """Return the sum of words modulo 2^64, each times an odd number that depends on its place."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    # each takes several vectors of 64-bit integers
    for part in torch.split(words, 2**22):
        weights = torch.arange(1, len(part) + 1, device=part.device) * _MIX
        for shift in (30, 27, 31):  # as in SplitMix64
            weights = (weights ^ (weights >> shift)) * _MIX
        total = total * _MIX + (part * (weights | 1)).sum()
    return total


def state_of(tensors: Iterable[Tensor]) -> tuple[list[tuple[int, int]], int]:
    """Return what an exchange of dense tensors, or any write to one, changes."""
    listed = list(tensors)
    return [(id(tensor), tensor._version) for tensor in listed], checksum(listed)


def logits_of(outputs: Any) -> Tensor:  # noqa: ANN401
    """Return what a network returned, or its ``logits`` if it has that attribute.

    Raises:
        ConfigError: that is not a tensor.
    """
    logits = getattr(outputs, "logits", outputs)
    if not isinstance(logits, Tensor):
        raise ConfigError(
            f"the network returns a {type(logits).__name__}; must return a tensor, or an object "
            "with the attribute logits. For others, pass a function loss(module, batch)."
        )
    return logits
