"""Conversion: make a module with batch normalisation fit for user-level DP.

A pretrained network keeps its statistics, frozen; a new one gets other normalisation layers.
"""

import copy
import math
from typing import cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from accounting.checks import ConfigError
from privpart.start_values import has_statistics


def freeze_batch_norm(module: nn.Module) -> int:
    """Put every layer with running statistics into evaluation mode, and return their number.

    BatchNorm is then a constant scale and shift of each channel, which mixes no examples. Its own
    weight and bias may train. ``module.train()`` would undo it; a ``PartialModel`` keeps it.

    >>> freeze_batch_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    1
    """
    count = 0
    for name, layer in module.named_modules():
        if has_statistics(layer):
            layer.eval()
            count += 1
        elif isinstance(layer, _BatchNorm):
            raise ConfigError(
                f"layer {name!r} is a {type(layer).__name__} without running statistics: nothing "
                "can be frozen. Use privpart.models.replace_batch_norm(module)."
            )
    return count


def replace_batch_norm(module: nn.Module) -> nn.Module:
    """Return a copy in which every BatchNorm, trainable or not, is a GroupNorm.

    A GroupNorm has gcd(32, channels) groups and starts at weight 1 and bias 0. In place of a
    BatchNorm1d it has one group, because on (B, C) a group of one value would always be zero. Then
    Opacus's ``ModuleValidator.fix`` replaces LSTM, GRU and MultiheadAttention by its own layers.
    All other layers keep their weights. ``PartialModel`` refuses layers that cannot be converted,
    for instance an InstanceNorm that tracks statistics.

    >>> replace_batch_norm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1].num_groups
    16
    """
    # slow to import, and few networks need it
    from opacus.validators import ModuleValidator

    norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    # deepcopy takes an object that is in its memo for a finished copy
    copied = copy.deepcopy(module, {id(layer): _group_norm(layer) for layer in norms})
    return cast("nn.Module", ModuleValidator.fix(copied))


def _group_norm(layer: _BatchNorm) -> nn.GroupNorm:
    channels = layer.num_features
    if isinstance(layer, LazyModuleMixin):
        raise ConfigError(f"{layer}: its channels are not known yet; run it on a batch first.")
    one_dimensional = isinstance(layer, nn.BatchNorm1d)
    if one_dimensional and channels == 1:
        raise ConfigError(f"{layer}: normalising one feature gives a constant; remove it.")
    groups = 1 if one_dimensional else math.gcd(32, channels)
    return nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
