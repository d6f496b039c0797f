"""Conversion: a module with batch normalisation becomes one fit for user-level DP."""

import copy
import math
from typing import cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from accounting.checks import ConfigError


def replace_batch_norm(module: nn.Module) -> nn.Module:
    """Return a copy in which every BatchNorm, trained or not, is a GroupNorm.

    It has gcd(32, channels) groups; a BatchNorm1d gets one group, for where it normalises (B, C)
    a group of one number would always be zero. Then Opacus's ``ModuleValidator.fix`` exchanges
    LSTM, GRU and MultiheadAttention for its own layers. Other layers keep their weights; a
    GroupNorm starts at weight 1 and bias 0. What nobody can convert, for instance an InstanceNorm
    that tracks statistics, ``PartialModel`` refuses.

    Raises:
        ConfigError: a BatchNorm whose number of channels is not known yet, or a BatchNorm1d of one
            feature, which normalised alone is constant.

    >>> replace_batch_norm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1].num_groups
    16
    """
    from opacus.validators import ModuleValidator  # slow to import, and few networks need it

    norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    # what deepcopy finds in its memo it takes for the copy
    copied = copy.deepcopy(module, {id(layer): _group_norm(layer) for layer in norms})
    return cast("nn.Module", ModuleValidator.fix(copied))


def _group_norm(layer: _BatchNorm) -> nn.GroupNorm:
    channels = layer.num_features
    if isinstance(layer, LazyModuleMixin):
        raise ConfigError(f"{layer}: its channels are not known yet. Run the module on a batch.")
    one_dimensional = isinstance(layer, nn.BatchNorm1d)
    if one_dimensional and channels == 1:
        raise ConfigError(f"{layer}: one feature, normalised alone, is constant. Leave it out.")
    groups = 1 if one_dimensional else math.gcd(32, channels)
    return nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
