"""Patterns: strings that name parameters of a module, and groups of parameters.

- ``conv*``, ``*.bias``, ``dense[12].weight``: parameters by name; ``*`` crosses dots.
- ``type:GroupNorm``, ``type:*Norm*``: parameters held directly by layers of that class or a
  subclass of it.
- ``!conv1.*``, ``!type:Conv2d``: all parameters except these. An exclusion wins over every other
  pattern; a list of exclusions alone means all the other parameters.

A group is a set of parameters that train in the same rounds; each parameter is in exactly one.
FedPart groups every convolution or dense layer with the normalisation that follows it.
"""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from accounting import Mechanism
from accounting.checks import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Outline:
    """The parameters of a network, without the network: all that patterns and groups depend on."""

    # of each parameter, in the network's order, by the first of its names
    shapes: Mapping[str, tuple[int, ...]]
    # the first name of the same parameter, by each name of every parameter
    first: Mapping[str, str]
    # class names of the layer that holds it and of that class's bases, by each name
    kinds: Mapping[str, tuple[str, ...]]
    # first names of those that require gradients, in the network's order
    learnable: tuple[str, ...]

    @classmethod
    def of(cls, module: "nn.Module") -> "Outline":
        """Return the outline of a module; refuse one without parameters."""
        from torch.nn.parameter import is_lazy

        parameters = dict(module.named_parameters())
        shapes = {n: () if is_lazy(p) else tuple(p.shape) for n, p in parameters.items()}
        if not shapes:
            raise ConfigError(
                f"the module, a {type(module).__name__}, has no parameters: nothing can train."
            )
        kinds = {
            name: tuple(kind.__name__ for kind in type(layer).__mro__)
            for prefix, layer in module.named_modules(remove_duplicate=False)
            for name, _ in layer.named_parameters(prefix, recurse=False, remove_duplicate=False)
        }
        learnable = tuple(name for name, p in parameters.items() if p.requires_grad)
        return cls(shapes, first_names(module), kinds, learnable)

    def size(self, names: Iterable[str]) -> int:
        """Return how many numbers these parameters have together, by their first names."""
        return sum(math.prod(self.shapes[name]) for name in names)


def matching_parameters(
    network: "nn.Module | Outline", patterns: Sequence[str] | None, option: str = "train"
) -> tuple[str, ...]:
    """Return the names of the parameters that match the patterns, in the network's order.

    None matches the parameters that require gradients, as an optimiser of PyTorch would train.

    A tied parameter is returned under its first name; a pattern may match any of its names.

    A pattern that matches nothing is an error: a typo must not freeze a layer silently. Errors call
    the patterns ``option``.

    >>> from torch import nn
    >>> network = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    >>> matching_parameters(network, ["!0.*"])
    ('1.weight', '1.bias', '2.weight', '2.bias')
    >>> matching_parameters(network, ["type:LayerNorm", "*.bias", "!0.bias"])
    ('1.weight', '1.bias', '2.bias')
    """
    if isinstance(patterns, str) or (patterns is not None and not patterns):
        raise ConfigError(f"{option}={patterns!r}: must be a list with at least one pattern.")
    outline = _outline(network)
    if patterns is None:
        if outline.learnable:
            return outline.learnable
        raise ConfigError(
            "no parameter of the module requires a gradient: nothing can train. Call "
            "requires_grad_(True) on what shall train."
        )
    # exclusions alone mean all the other parameters
    positive = [p for p in patterns if not p.startswith("!")] or ["*"]
    wanted = {name for p in positive for name in _matches(outline, p, option)}
    excluded = [p[1:] for p in patterns if p.startswith("!")]
    unwanted = {name for p in excluded for name in _matches(outline, p, option)}
    if not wanted - unwanted:
        raise ConfigError(f"{option}={list(patterns)}: excludes every parameter of the model.")
    return tuple(name for name in outline.shapes if name in wanted - unwanted)


def _outline(network: "nn.Module | Outline") -> Outline:
    return network if isinstance(network, Outline) else Outline.of(network)


def parameters_by_layer(network: "nn.Module | Outline") -> dict[str, list[str]]:
    """Return the names of each layer's own parameters, by the layer's name; "" is the network.

    A tied parameter belongs to the first layer that holds it.
    """
    layers: dict[str, list[str]] = {}
    for name in _outline(network).shapes:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return layers


def first_names(module: "nn.Module") -> dict[str, str]:
    """Return, for every name of every parameter, the first name of that parameter."""
    first = {id(p): name for name, p in module.named_parameters()}
    return {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}


def _matches(outline: Outline, pattern: str, option: str) -> set[str]:
    kind, is_type, wanted = pattern.partition("type:")
    if is_type and not kind:
        kinds = outline.kinds.items()
        matches = {name for name, of in kinds if any(fnmatchcase(k, wanted) for k in of)}
        near = sorted({of[0] for _, of in kinds})
    else:
        wanted = pattern
        matches = {name for name in outline.first if fnmatchcase(name, pattern)}
        near = list(outline.first)
    if not matches:
        close = difflib.get_close_matches(wanted.rstrip(".*"), near, n=3, cutoff=0.3)
        raise ConfigError(
            f"{option}: pattern {pattern!r} matches no parameter. Near it: "
            f"{', '.join(close or near[:5])}."
        )
    return {outline.first[name] for name in matches}


def layer_groups(network: "nn.Module | Outline") -> tuple[tuple[str, ...], ...]:
    """Return a group of parameter names for each weight layer and its normalisation, in order.

    A layer whose type has "Norm" in its name joins the group of the layer before it, or of the
    layer after it if it comes first. A tied parameter belongs to the layer where it first appears.

    >>> from torch import nn
    >>> layer_groups(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)))
    (('0.weight', '0.bias', '1.weight', '1.bias'), ('2.weight', '2.bias'))
    """
    outline = _outline(network)
    groups: list[list[str]] = []
    waiting: list[str] = []
    for names in parameters_by_layer(outline).values():
        if "Norm" not in outline.kinds[names[0]][0]:
            groups.append(waiting + names)
            waiting = []
        elif groups:
            groups[-1] += names
        else:
            waiting += names
    if waiting:
        groups.append(waiting)
    return tuple(map(tuple, groups))


def trained_groups(
    network: "nn.Module | Outline", groups: Sequence[Sequence[str]], trainable: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Return the names of the trainable parameters in each group.

    Each must be in exactly one. A group without any is dropped, and later groups move up by one.
    """
    home: dict[str, int] = {}
    for number, patterns in enumerate(groups):
        if not patterns:
            raise ConfigError(f"groups: group {number + 1} is empty. Leave it out.")
        for name in matching_parameters(network, patterns, "groups"):
            if home.setdefault(name, number) != number:
                raise ConfigError(
                    f"parameter {name!r} is in groups {home[name] + 1} and {number + 1}: it must "
                    "be in exactly one."
                )
    if lost := [name for name in trainable if name not in home]:
        raise ConfigError(
            f"no group has {', '.join(lost)}: every trainable parameter must be in one."
        )
    trained = (tuple(n for n in trainable if home[n] == number) for number in range(len(groups)))
    return tuple(names for names in trained if names)


def parts_of(mechanism: Mechanism, flat: "Tensor") -> "list[Tensor]":
    """Return a view of ``flat``, shape (d,), for each group that may take a step on its own."""
    groups = mechanism.groups
    if groups is None:
        return [flat]
    if sum(groups.sizes) != flat.numel():
        raise ConfigError(
            f"start has {flat.numel()} parameters, the plan's groups have "
            f"{sum(groups.sizes)}. Build the model with the groups of the plan."
        )
    import torch

    return list(torch.split(flat, list(groups.sizes)))
