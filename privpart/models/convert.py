"""Conversion: a module with batch normalisation becomes one fit for user-level DP."""

from typing import cast

from torch import nn


def replace_batch_norm(module: nn.Module) -> nn.Module:
    """Return a copy in which every BatchNorm is a GroupNorm of gcd(32, channels) groups.

    By Opacus's ``ModuleValidator.fix``, which also exchanges LSTM, GRU and MultiheadAttention for
    its own layers. Other layers keep their weights; a GroupNorm starts at weight 1 and bias 0.
    What it cannot convert, for instance an InstanceNorm that tracks statistics, ``PartialModel``
    refuses.

    >>> replace_batch_norm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))[1].num_groups
    16
    """
    from opacus.validators import ModuleValidator  # slow to import, and few networks need it

    return cast("nn.Module", ModuleValidator.fix(module))
