"""Groups: the layers of a model that train together, each parameter in exactly one.

FedPart groups every convolution or dense layer with the normalisation that follows it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from accounting import Grouped, Mechanism
from accounting.checks import ConfigError
from privpart.patterns import matching_parameters


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
