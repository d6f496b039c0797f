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
            the normalisation layers, which FedPT always trains, and the last, the head.

    Returns:
        By name, from "full" on: patterns for ``PartialModel(train=...)``.

    >>> network = nn.Sequential(nn.Linear(4, 9), nn.LayerNorm(9), nn.Linear(9, 9), nn.Linear(9, 2))
    >>> list(freeze_ladder(network))
    ['full', 'freeze 2.*', 'freeze 2.*, 0.*']
    """
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    sized = {
        block: sum(sizes[name] for name in matching_parameters(module, [block]))
        for block in blocks or _layers(module)
    }
    largest = sorted(sized, key=lambda block: -sized[block])
    ladder: dict[str, tuple[str, ...]] = {"full": ("*",)}
    for count in range(1, len(largest) + 1):
        frozen = largest[:count]
        ladder[f"freeze {', '.join(frozen)}"] = tuple(f"!{block}" for block in frozen)
    return ladder


def _layers(module: nn.Module) -> list[str]:
    """One pattern per layer that holds parameters, but normalisation layers and the last one."""
    found = [
        (prefix, layer)
        for prefix, layer in module.named_modules()
        if next(layer.parameters(recurse=False), None) is not None
    ]
    return [f"{prefix}.*" for prefix, layer in found[:-1] if "Norm" not in type(layer).__name__]


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
