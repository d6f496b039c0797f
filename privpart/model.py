"""Partial model: which parameters of a network train, and the one flat vector that they live in.

A client trains, clips and sends only the trainable part (FedPT, Algorithm 1). All trainable
parameters are views of one contiguous vector, and so are their gradients: a local step, an update
and a clip are each one operation on it, whatever the number of layers.

Networks that cannot be trained in part under differential privacy are refused, with the reason.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from accounting.checks import ConfigError
from privpart.patterns import matching_parameters, trained_groups
from privpart.start_values import (
    Initializer,
    default_initializers,
    seeded_tensor,
    tensors_fingerprint,
)


class PartialModel:
    """A module of which some parameters train and the others are a function of a public seed.

    The model takes ownership of the module: it sets every parameter from the seed, stops the
    gradients of the frozen ones, and moves the trainable ones into one flat float32 vector. A tied
    parameter counts once, under its first name. Buffers keep the values that the module's
    constructor gave them: they do not follow from the seed, but they enter the fingerprint.

    Args:
        module: a function that builds a float32 module on the CPU, without batch statistics; or
            such a module, if no other ``PartialModel`` holds it.
        train: patterns on parameter names or layer types, see ``privpart.patterns``.
        seed: public seed of all start values, 0 <= seed < 2^128. None keeps the module's own
            weights, for a pretrained model: they must be shipped to clients once, and the
            fingerprint says whether a client has the right ones.
        overwrite: required to let a seed replace the weights of a module that already exists.
        initializers: by pattern, in addition to ``default_initializers``; later ones win.
        groups: patterns of each group of parameters that may train without the others, see
            ``privpart.patterns``; ``flat`` then holds one group after the other. None is one group.
        fingerprint: fingerprint that the frozen part must have, for instance from a message.

    Attributes:
        module: the module.
        seed: the seed, as given.
        flat: the trainable parameters, shape (d,); writing to it changes the module.
        gradient: their gradients, shape (d,); ``backward`` adds to it.
        trainable: names of the trainable parameters, in the order of ``flat``.
        frozen: names of the frozen parameters.
        groups: names of the trainable parameters of each group, in order.
        group_sizes: number of entries of ``flat`` that belong to each group, in order.
        fingerprint: 32 hex digits of every bit, name and shape of the frozen part and of the
            buffers, persistent or not.
        trainable_hash: 20 hex digits of the names and shapes of the trainable part, in order.

    Raises:
        ConfigError: a pattern that matches nothing; a seed for a module that already exists,
            without ``overwrite``; a parameter without initialiser; batch statistics; an embedding
            that rescales itself; weights that are lazy or not finite float32; another fingerprint;
            a module that another ``PartialModel`` holds.

    >>> model = PartialModel(lambda: nn.Linear(4, 2), train=["weight"], seed=7)
    >>> model.trainable, model.flat.shape
    (('weight',), torch.Size([8]))
    """

    def __init__(
        self,
        module: nn.Module | Callable[[], nn.Module],
        *,
        train: Sequence[str] = ("*",),
        seed: int | None,
        overwrite: bool = False,
        initializers: Mapping[str, Initializer] | None = None,
        groups: Sequence[Sequence[str]] | None = None,
        fingerprint: str | None = None,
    ) -> None:
        module = _built(module, seed, overwrite=overwrite)
        refuse_batch_statistics(module)
        refuse_max_norm(module)
        parameters = dict(module.named_parameters())
        refuse_lazy(module)
        _refuse_taken(parameters)
        self.module = module
        self.seed = seed
        self.trainable = matching_parameters(module, train)
        self.groups: tuple[tuple[str, ...], ...] = (self.trainable,)
        if groups is not None:
            self.groups = trained_groups(module, groups, self.trainable)
            self.trainable = tuple(name for names in self.groups for name in names)
        trained = set(self.trainable)
        self.frozen = tuple(name for name in parameters if name not in trained)
        refuse_other_types(parameters)
        if seed is not None:
            _initialize(parameters, seed, _initializers(module, initializers or {}))
        elif initializers:
            raise ConfigError(
                "initializers with seed=None: a pretrained model keeps its weights. Leave them out."
            )
        refuse_non_finite(parameters)
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trained)
        self.flat, self.gradient = _join([parameters[name] for name in self.trainable])
        self.own, self.own_gradient, self.own_start = (self.flat.new_empty(0) for _ in range(3))
        self._frozen = [parameters[name] for name in self.frozen]
        self._buffers = _kept_buffers(module)
        self.fingerprint = tensors_fingerprint(
            dict(zip(self.frozen, self._frozen, strict=True))
            | {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
        )
        if fingerprint not in (None, self.fingerprint):
            raise ConfigError(
                f"the frozen part has fingerprint {self.fingerprint}, expected {fingerprint}: its "
                "seed, network, initialisers, frozen set or generator version differs. Training "
                "would train another model."
            )
        self.group_sizes = tuple(
            sum(parameters[name].numel() for name in names) for names in self.groups
        )
        self.trainable_hash = self.trainable_hash_of(range(len(self.groups)))
        _OWNERS.update((id(parameter), self) for parameter in parameters.values())

    def on(self, device: torch.device) -> "PartialModel":
        """Return a copy of this model in a device's memory, or this model if it is there already.

        Neither sees what the other trains, nor a later change of the other's frozen part.
        """
        if self.flat.device == device:
            return self
        self.load(self.flat)  # resets the buffers, which a forward pass may have changed
        other = copy(self)
        other.module = deepcopy(self.module).to(device)
        parameters = dict(other.module.named_parameters())
        other.flat, other.gradient = _join([parameters[name] for name in self.trainable])
        other._frozen = [parameters[name] for name in self.frozen]
        other._buffers = _kept_buffers(other.module)
        return other

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
        """Compute gradients of some groups only; None is all groups.

        The backward pass stops at the earliest layer that trains.
        """
        wanted = range(len(self.groups)) if active is None else set(active)
        parameters = dict(self.module.named_parameters())
        for group, names in enumerate(self.groups):
            for name in names:
                parameters[name].requires_grad_(group in wanted)

    def describe(self) -> "Description":
        """Return one row per named parameter; ``print`` shows a table with shares and totals."""
        trained = set(self.trainable)
        count = self.parameter_count
        return Description(
            ParameterRow(name, tuple(p.shape), p.numel(), p.numel() / count, name in trained)
            for name, p in self.module.named_parameters()
        )

    def load(self, flat: Tensor) -> None:
        """Overwrite the trainable part with a vector of shape (d,), and reset all buffers.

        What a client's data left in a buffer is neither clipped nor noised, so it must reach
        neither the next client nor the model. Buffers that a forward pass replaced are restored;
        buffers that it added are dropped.
        """
        self.flat.copy_(flat)
        for layer, saved in self._buffers:
            layer._buffers.clear()
            for name, (buffer, value) in saved.items():
                if buffer is not None and value is not None:
                    buffer.data = value.clone()
                layer._buffers[name] = buffer

    @contextmanager
    def lent(self, start: Tensor) -> Iterator[None]:
        """Lend the model for training from ``start``, shape (d,), and reset it afterwards.

        Outside this context nobody can see what one client's raw data made of the module.

        Raises:
            ConfigError: a forward pass wrote to a frozen parameter, or ``start`` is ``flat``.
        """
        if start.data_ptr() == self.flat.data_ptr():
            raise ConfigError("start=model.flat: training would overwrite it. Pass a clone.")
        self.load(start)
        versions = [parameter._version for parameter in self._frozen]
        try:
            yield
        finally:
            self.load(start)
            self.gradient.zero_()
        for name, parameter, version in zip(self.frozen, self._frozen, versions, strict=True):
            if parameter._version != version:
                raise ConfigError(
                    f"frozen parameter {name!r} was written to during training: such a change is "
                    "neither clipped nor noised. Let it train, or do not write to it; and build "
                    "the model again."
                )


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One named parameter of a model.

    Attributes:
        name: name in the module.
        shape: shape of the tensor.
        parameter_count: number of its entries.
        share: ``parameter_count`` as a share of the whole model, in [0, 1].
        trained: whether it trains.
    """

    name: str
    shape: tuple[int, ...]
    parameter_count: int
    share: float
    trained: bool


class Description(tuple[ParameterRow, ...]):
    """Rows in the module's order; ``str`` returns them as a table with totals."""

    __slots__ = ()

    def __str__(self) -> str:
        lines = [("parameter", "shape", "count", "share", "")]
        lines += [
            _line(
                row.name,
                row.parameter_count,
                row.share,
                "trained" if row.trained else "frozen",
                row.shape,
            )
            for row in self
        ]
        for kind, wanted in (("trained", (True,)), ("frozen", (False,)), ("all", (True, False))):
            rows = [row for row in self if row.trained in wanted]
            lines.append(
                _line(kind, sum(r.parameter_count for r in rows), sum(r.share for r in rows))
            )
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        text = [
            f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {count:>{widths[2]}}  "
            f"{share:>{widths[3]}}  {state}".rstrip()
            for name, shape, count, share, state in lines
        ]
        rule = "-" * max(map(len, text))
        return "\n".join([text[0], rule, *text[1:-3], rule, *text[-3:]])


def _line(
    name: str, count: int, share: float, state: str = "", shape: tuple[int, ...] = ()
) -> tuple[str, str, str, str, str]:
    sizes = " x ".join(map(str, shape))
    return name, sizes, f"{count:,}", f"{100 * share:.2f} %", state


# The model that each parameter belongs to, by id. The model is referenced weakly: an entry ends
# with it.
_OWNERS: WeakValueDictionary[int, PartialModel] = WeakValueDictionary()


def _built(
    module: nn.Module | Callable[[], nn.Module], seed: int | None, *, overwrite: bool
) -> nn.Module:
    """Return the module to take over, unless a seed would replace weights without being told to."""
    holds_weights = isinstance(module, nn.Module)
    if overwrite and (seed is None or not holds_weights):
        why = "seed=None keeps the weights" if seed is None else "the network is built here"
        raise ConfigError(f"overwrite=True: nothing is overwritten, since {why}. Leave it out.")
    if holds_weights and seed is not None and not overwrite:
        raise ConfigError(
            f"seed={seed} would replace all weights of the module. Pass a function that builds "
            "the network, or overwrite=True; to keep the weights, pass seed=None."
        )
    return module if isinstance(module, nn.Module) else module()


def _initializers(module: nn.Module, own: Mapping[str, Initializer]) -> dict[str, Initializer]:
    found = default_initializers(module)
    for pattern, initializer in own.items():
        found |= dict.fromkeys(matching_parameters(module, [pattern]), initializer)
    return found


def _initialize(
    parameters: Mapping[str, nn.Parameter], seed: int, initializers: Mapping[str, Initializer]
) -> None:
    if missing := [name for name in parameters if name not in initializers]:
        raise ConfigError(
            f"no initialiser for {', '.join(missing)}. Pass initializers={{name: Normal(scale)}}."
        )
    for name, parameter in parameters.items():
        parameter.data = seeded_tensor(seed, name, parameter.shape, initializers[name])


def _kept_buffers(
    module: nn.Module,
) -> list[tuple[nn.Module, dict[str, tuple[Tensor | None, Tensor | None]]]]:
    """Return each layer with its buffers and a copy of their values."""
    return [
        (layer, {n: (b, None if b is None else b.clone()) for n, b in layer._buffers.items()})
        for layer in module.modules()
    ]


def _join(parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Move parameters and gradients into two flat vectors, and make them views of those."""
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    gradient = torch.zeros_like(flat)
    start = 0
    for parameter in parameters:
        span = slice(start, start + parameter.numel())
        parameter.data = flat[span].view(parameter.shape)
        parameter.grad = gradient[span].view(parameter.shape)
        start = span.stop
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
    """Raise ConfigError for layers whose statistics mix the examples of a batch."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) or getattr(layer, "running_mean", None) is not None:
            kind = type(layer).__name__
            raise ConfigError(
                f"layer {name!r} is a {kind}: its statistics mix the examples of a batch and "
                "would leave the client without noise. Replace it by GroupNorm, for instance with "
                "privpart.models.replace_batch_norm(module)."
            )


def refuse_max_norm(module: nn.Module) -> None:
    """Raise ConfigError for embeddings that rewrite their own rows."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise ConfigError(
                f"layer {name!r} has max_norm={layer.max_norm}: every forward pass would rewrite "
                "the rows of a client's tokens, even if they are frozen. Use max_norm=None."
            )


def refuse_lazy(module: nn.Module) -> None:
    """Raise ConfigError for lazy layers, whose shapes are not known yet."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ConfigError(
                f"{name!r} has no shape yet: its layer is lazy. Run the module once on a batch."
            )


def refuse_other_types(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ConfigError for parameters that are not float32 on the CPU."""
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype} on {parameter.device}: must be "
                "torch.float32 on cpu. Use module.float().cpu()."
            )


def refuse_non_finite(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ConfigError for parameters with NaN or infinity."""
    for name, parameter in parameters.items():
        if not parameter.isfinite().all():
            raise ConfigError(f"parameter {name!r} holds NaN or infinity: must be finite.")
