"""ResNet: the post-activation networks of FedPart (Wang et al. 2024) and their layer groups.

They follow github.com/FLAIR-Community/Fling: 7x7 stem, basic blocks, one dense layer. Group
normalisation replaces batch normalisation by default, with the same number of parameters.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError

Norm = Literal["group", "batch"]


def resnet8(
    *, classes: int = 10, width: int = 64, channels: int = 3, norm: Norm = "group"
) -> nn.Module:
    """Return FedPart's ResNet-8: three stages of one block; 1,235,274 parameters at 10 classes.

    Args:
        classes: number of outputs.
        width: filters of the stem and of the first stage; each later stage has twice as many.
        channels: channels of the input, (B, channels, H, W).
        norm: "group", or "batch" as in the paper, which ``PartialModel`` refuses; see
            ``replace_batch_norm``.
    """
    return _resnet((1, 1, 1), classes, width, channels, norm)


def resnet18(
    *, classes: int = 10, width: int = 64, channels: int = 3, norm: Norm = "group"
) -> nn.Module:
    """Return FedPart's ResNet-18: four stages of two blocks; 11,181,642 parameters at 10 classes.

    The arguments are those of ``resnet8``.
    """
    return _resnet((2, 2, 2, 2), classes, width, channels, norm)


def _layer_groups(blocks: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Return FedPart's groups #1, #2, ...: each convolution with its norm, then the dense layer."""
    groups: list[tuple[str, ...]] = [("stem.*", "norm.*")]
    for stage, depth in enumerate(blocks):
        for block in range(depth):
            prefix = f"stages.{stage}.{block}"
            groups += [(f"{prefix}.conv{i}.*", f"{prefix}.norm{i}.*") for i in (1, 2)]
            if stage and not block:
                groups.append((f"{prefix}.shortcut.*",))
    return (*groups, ("head.*",))


RESNET8_GROUPS = _layer_groups((1, 1, 1))
RESNET18_GROUPS = _layer_groups((2, 2, 2, 2))
# Freezes the largest group first; the norm of a frozen convolution trains, as in FedPT.
RESNET8_LADDER: Mapping[str, tuple[str, ...]] = {
    "full": ("*",),
    "freeze-8": ("!stages.2.0.conv2.*",),
    "freeze-7-8": ("!stages.2.0.conv?.*",),
    "freeze-5-7-8": ("!stages.2.0.conv?.*", "!stages.1.0.conv2.*"),
    "freeze-4-5-7-8": ("!stages.[12].0.conv?.*",),
}
# Freezes 3x3 convolutions by stage, the widest stage first, as FedPT does in its own ResNet-18.
RESNET18_LADDER: Mapping[str, tuple[str, ...]] = {
    "full": ("*",),
    "freeze-0": ("!stages.3.*.conv?.weight",),
    "freeze-0-1": ("!stages.[23].*.conv?.weight",),
    "freeze-0-1-2": ("!stages.[123].*.conv?.weight",),
    "freeze-0-1-2-3": ("!stages.*.conv?.weight",),
}


class ResidualBlock(nn.Module):
    """3x3 convolution, norm, ReLU, convolution and norm, added to the input; then ReLU."""

    def __init__(self, inputs: int, outputs: int, *, norm: Norm) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = _norm(outputs, norm)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(outputs, norm)
        self.shortcut = nn.Sequential()
        if stride != 1:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False))
            self.shortcut.append(_norm(outputs, norm))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H / stride, W / stride)."""
        residual = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        total: Tensor = residual + self.shortcut(x)
        return total.relu()


def _resnet(
    blocks: Sequence[int], classes: int, width: int, channels: int, norm: Norm
) -> nn.Module:
    for name, value in {"classes": classes, "width": width, "channels": channels}.items():
        checks.count(name, value)
    stages: list[nn.Module] = []
    inputs = width
    for stage, depth in enumerate(blocks):
        outputs = width * 2**stage
        widths = [inputs] + [outputs] * (depth - 1)
        stages.append(nn.Sequential(*(ResidualBlock(w, outputs, norm=norm) for w in widths)))
        inputs = outputs
    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False))
    model.add_module("norm", _norm(width, norm))
    model.add_module("relu", nn.ReLU())
    model.add_module("pool", nn.MaxPool2d(3, stride=2, padding=1))
    model.add_module("stages", nn.Sequential(*stages))
    model.add_module("mean", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    model.add_module("head", nn.Linear(inputs, classes))
    return model


def _norm(channels: int, norm: Norm) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "group":
        return nn.GroupNorm(math.gcd(32, channels), channels)
    raise ConfigError(f"norm={norm!r}: must be 'group' or 'batch'.")
