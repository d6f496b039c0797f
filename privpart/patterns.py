"""Patterns: strings that a person types to say which parameters of a module are meant.

- ``conv*``, ``*.bias``, ``dense[12].weight``: parameters by name; ``*`` crosses dots.
- ``type:GroupNorm``, ``type:*Norm*``: parameters held directly by layers of that class or a
  subclass of it.
- ``!conv1.*``, ``!type:Conv2d``: all but these. It wins over every other pattern; a list of such
  patterns alone means all the others.
"""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

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
