"""Patterns: strings that a person types to say which parameters of a module are meant.

- ``conv*``, ``*.bias``, ``dense[12].weight``: parameters by name; ``*`` crosses dots.
- ``type:GroupNorm``, ``type:*Norm*``: parameters held directly by layers of that class or a
  subclass of it.
- ``!conv1.*``, ``!type:Conv2d``: all but these. It wins over every other pattern; a list of such
  patterns alone means all the others.

Groups: the layers of a model that train together, each parameter in exactly one.

FedPart groups every convolution or dense layer with the normalisation that follows it.
"""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from accounting import Grouped, Mechanism
from accounting.checks import ConfigError


def matching_parameters(module: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the parameters that the patterns mean, in the module's order.

    A tied parameter goes by its first name, and any of its names may match.

    Raises:
        ConfigError: a pattern that matches nothing (a typo must not freeze a layer silently), no
            pattern at all, or nothing left.

    >>> network = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    >>> matching_parameters(network, ["!0.*"])
    ('1.weight', '1.bias', '2.weight', '2.bias')
    >>> matching_parameters(network, ["type:LayerNorm", "*.bias", "!0.bias"])
    ('1.weight', '1.bias', '2.bias')
    """
    if isinstance(patterns, str) or not patterns:
        raise ConfigError(f"train={patterns!r}: must be a list with at least one pattern.")
    own_names = _first_names(module)
    positive = [p for p in patterns if not p.startswith("!")] or ["*"]
    wanted = {name for p in positive for name in _matches(module, p, own_names)}
    unwanted = {
        name for p in patterns if p.startswith("!") for name in _matches(module, p[1:], own_names)
    }
    if not wanted - unwanted:
        raise ConfigError(f"train={list(patterns)}: leaves no parameter of the model.")
    return tuple(n for n, _ in module.named_parameters() if n in wanted - unwanted)


def freeze_ladder(module: nn.Module, blocks: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Return what trains when the largest blocks freeze, one more per rung (FedPT, section 3.1).

    Args:
        module: any module.
        blocks: one pattern each, for instance ``stages.3.*``; left out, every layer is one but
            the normalisation layers, which FedPT always trains, and the last, the head, with
            whatever is tied to it. A weight that only ``forward`` uses twice is not seen as tied.

    Returns:
        By name, from "full" on: patterns for ``PartialModel(train=...)``.

    >>> network = nn.Sequential(nn.Linear(4, 9), nn.LayerNorm(9), nn.Linear(9, 9), nn.Linear(9, 2))
    >>> list(freeze_ladder(network))
    ['full', 'freeze 2.*', 'freeze 2.*, 0.*']
    """
    found = {block: (block,) for block in blocks} or _layers(module)
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    names = {block: set(matching_parameters(module, found[block])) for block in found}
    largest = sorted(names, key=lambda block: -sum(sizes[name] for name in names[block]))
    ladder: dict[str, tuple[str, ...]] = {"full": ("*",)}
    frozen: list[str] = []
    still: set[str] = set()
    for block in largest:
        if names[block] <= still:
            continue  # within a larger block
        still |= names[block]
        frozen.append(block)
        patterns = [f"!{pattern}" for one in frozen for pattern in found[one]]
        ladder[f"freeze {', '.join(frozen)}"] = tuple(patterns)
    return ladder


def parameters_by_layer(module: nn.Module) -> dict[str, list[str]]:
    """Return the parameters that each layer holds itself, by the layer's name; "" is the module.

    A tied parameter is its first layer's.
    """
    found: dict[str, list[str]] = {}
    for name, _ in module.named_parameters():
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def _layers(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Patterns of each layer's own parameters, but normalisation and what the last layer holds."""
    last = [
        layer
        for layer in module.modules()
        if next(layer.parameters(recurse=False), None) is not None
    ][-1]
    head = {id(parameter) for parameter in last.parameters(recurse=False)}
    parameters = dict(module.named_parameters())
    found: dict[str, tuple[str, ...]] = {}
    for prefix, names in parameters_by_layer(module).items():
        is_norm = "Norm" in type(module.get_submodule(prefix)).__name__
        if is_norm or any(id(parameters[name]) in head for name in names):
            continue
        whole = f"{prefix}.*"
        if prefix and matching_parameters(module, [whole]) == tuple(names):
            found[whole] = (whole,)
        else:  # the layer holds further layers, or tied parameters that are another's
            found[prefix or ", ".join(names)] = tuple(names)
    return found


def _first_names(module: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the name that the parameter goes by."""
    first = {id(p): name for name, p in module.named_parameters()}
    return {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}


def _matches(module: nn.Module, pattern: str, own_names: dict[str, str]) -> set[str]:
    kind, is_type, wanted = pattern.partition("type:")
    if is_type and not kind:
        candidates = _names_by_type(module)
        found = {
            name for name, kinds in candidates.items() if any(fnmatchcase(k, wanted) for k in kinds)
        }
        near = sorted({kinds[0] for kinds in candidates.values()})
    else:
        wanted = pattern
        found = {name for name in own_names if fnmatchcase(name, pattern)}
        near = list(own_names)
    if not found:
        close = difflib.get_close_matches(wanted.rstrip(".*"), near, n=3, cutoff=0.3)
        raise ConfigError(
            f"pattern {pattern!r} matches no parameter. Near it: {', '.join(close or near[:5])}."
        )
    return {own_names[name] for name in found}


def _names_by_type(module: nn.Module) -> dict[str, list[str]]:
    """Name of a parameter -> names of the classes of the layer that holds it."""
    return {
        name: [kind.__name__ for kind in type(layer).__mro__]
        for prefix, layer in module.named_modules(remove_duplicate=False)
        for name, _ in layer.named_parameters(prefix, recurse=False, remove_duplicate=False)
    }


def layer_groups(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return one group of parameter names per weight layer, with its normalisation, in order.

    A layer whose type has "Norm" in its name joins the layer before it; one that comes first joins
    the layer after it. A tied parameter belongs where it first appears.

    >>> layer_groups(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)))
    (('0.weight', '0.bias', '1.weight', '1.bias'), ('2.weight', '2.bias'))
    """
    known = {name for name, _ in module.named_parameters()}
    groups: list[list[str]] = []
    waiting: list[str] = []
    for prefix, layer in module.named_modules():
        own = [n for n, _ in layer.named_parameters(prefix, recurse=False) if n in known]
        if not own:
            continue
        if "Norm" not in type(layer).__name__:
            groups.append(waiting + own)
            waiting = []
        elif groups:
            groups[-1] += own
        else:
            waiting += own
    if waiting:
        groups.append(waiting)
    return tuple(map(tuple, groups))


def trained_groups(
    module: nn.Module, groups: Sequence[Sequence[str]], trainable: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Return the trainable parameters of each group, by name.

    Args:
        module: any module.
        groups: per group, patterns as for ``PartialModel``.
        trainable: names of the parameters that train at all. A group without any is left out, and
            the others move up.

    Raises:
        ConfigError: an empty group, a parameter in two groups, or a trainable one in none.
    """
    home: dict[str, int] = {}
    for number, patterns in enumerate(groups):
        if not patterns:
            raise ConfigError(f"groups: number {number + 1} is empty; leave it out.")
        for name in matching_parameters(module, patterns):
            if home.setdefault(name, number) != number:
                raise ConfigError(
                    f"parameter {name!r} is in groups {home[name] + 1} and {number + 1}: each "
                    "belongs to one."
                )
    if lost := [name for name in trainable if name not in home]:
        raise ConfigError(f"no group has {', '.join(lost)}: every trainable parameter needs one.")
    own = (tuple(n for n in trainable if home[n] == number) for number in range(len(groups)))
    return tuple(names for names in own if names)


def parts_of(mechanism: Mechanism, flat: Tensor) -> list[Tensor]:
    """Return one view of ``flat``, shape (d,), per group that may be stepped alone.

    Raises:
        ConfigError: the groups of the mechanism are not of that length together.
    """
    if not isinstance(mechanism, Grouped):
        return [flat]
    if sum(mechanism.sizes) != flat.numel():
        raise ConfigError(
            f"start: {flat.numel()} parameters, but the plan's groups have "
            f"{sum(mechanism.sizes)}. Build the model with the groups of the plan."
        )
    return list(torch.split(flat, list(mechanism.sizes)))
