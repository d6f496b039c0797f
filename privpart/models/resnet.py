"""ResNet: FedPart's post-activation networks (Wang et al. 2024), and FedPT's pre-activation one.

FedPart's follow github.com/FLAIR-Community/Fling: 7x7 stem, basic blocks, one dense layer. Group
normalisation replaces batch normalisation by default, with the same number of parameters.

FedPT's follows ``create_resnet18`` of github.com/google-research/federated (He et al. 2016, ResNet
v2). Its stages keep the resolution; only the stem reduces it, by 4 in each direction.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from privpart.settings import outlines
from privpart.settings.outlines import Norm
from privpart.start_values import Initializer, Normal


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
    outlines.resnet8(classes=classes, width=width, channels=channels, norm=norm)
    return _resnet((1, 1, 1), classes, width, channels, norm)


def resnet18(
    *, classes: int = 10, width: int = 64, channels: int = 3, norm: Norm = "group"
) -> nn.Module:
    """Return FedPart's ResNet-18: four stages of two blocks, 11,181,642 parameters."""
    outlines.resnet18(classes=classes, width=width, channels=channels, norm=norm)
    return _resnet((2, 2, 2, 2), classes, width, channels, norm)


# Freezes the largest group first; the norm of a frozen convolution trains, as in FedPT.
RESNET8_LADDER: Mapping[str, tuple[str, ...]] = {
    "full": ("*",),
    "freeze-8": ("!stages.2.0.conv2.*",),
    "freeze-7-8": ("!stages.2.0.conv?.*",),
    "freeze-5-7-8": ("!stages.2.0.conv?.*", "!stages.1.0.conv2.*"),
    "freeze-4-5-7-8": ("!stages.[12].0.conv?.*",),
}
# FedPT, Table 10, for both networks of 18 layers: blocks 0 to 3 are the 3x3 convolutions of a
# stage, the widest stage first. Shortcuts, normalisation, stem and head always train.
RESNET18_LADDER: Mapping[str, tuple[str, ...]] = {
    "full": ("*",),
    "freeze-0": ("!stages.3.*.conv?.weight",),
    "freeze-0-1": ("!stages.[23].*.conv?.weight",),
    "freeze-0-1-2": ("!stages.[123].*.conv?.weight",),
    "freeze-0-1-2-3": ("!stages.*.conv?.weight",),
}
RESNET18_GN_START: Mapping[str, Initializer] = {"head.weight": Normal(0.01)}


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
    stages: list[nn.Module] = []
    inputs = width
    for stage, depth in enumerate(blocks):
        outputs = width * 2**stage
        widths = [inputs] + [outputs] * (depth - 1)
        stages.append(nn.Sequential(*(ResidualBlock(w, outputs, norm=norm) for w in widths)))
        inputs = outputs
    return nn.Sequential(
        OrderedDict(
            stem=nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False),
            norm=_norm(width, norm),
            relu=nn.ReLU(),
            pool=nn.MaxPool2d(3, stride=2, padding=1),
            stages=nn.Sequential(*stages),
            mean=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=nn.Linear(inputs, classes),
        )
    )


def _norm(channels: int, norm: Norm) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(32, channels), channels)


def resnet18_gn(*, classes: int = 100) -> nn.Module:
    """Return FedPT's ResNet-18: (B, 3, H, W) -> logits (B, classes), 11,227,812 parameters.

    The head has 100 outputs although CIFAR-10 has 10 classes, as in the code of the published
    experiment; the shares of FedPT's Table 2 require it.
    """
    outlines.resnet18_gn(classes=classes)
    stages: list[nn.Module] = []
    width = 64
    for outputs in (64, 128, 256, 512):
        first = PreactivationBlock(width, outputs, normalize_input=bool(stages))
        stages.append(nn.Sequential(first, PreactivationBlock(outputs, outputs)))
        width = outputs
    return nn.Sequential(
        OrderedDict(
            stem=nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            stem_norm=_group_norm(64),
            stem_relu=nn.ReLU(),
            pool=nn.MaxPool2d(3, stride=2, padding=1),
            stages=nn.Sequential(*stages),
            norm=_group_norm(512),
            relu=nn.ReLU(),
            mean=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            head=nn.Linear(512, classes),
        )
    )


class PreactivationBlock(nn.Module):
    """Twice norm, ReLU and 3x3 convolution, added to the input or to its 1x1 projection."""

    def __init__(self, inputs: int, outputs: int, *, normalize_input: bool = True) -> None:
        super().__init__()
        start = [_group_norm(inputs), nn.ReLU()] if normalize_input else []
        self.norm1 = nn.Sequential(*start)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.Sequential(_group_norm(outputs), nn.ReLU())
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, bias=False))
            self.shortcut.append(_group_norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H, W)."""
        residual: Tensor = self.conv2(self.norm2(self.conv1(self.norm1(x))))
        total: Tensor = residual + self.shortcut(x)
        return total


def _group_norm(channels: int) -> nn.Module:
    # 32 groups and eps 1e-3 are the defaults of tensorflow_addons' GroupNormalization
    return nn.GroupNorm(32, channels, eps=1e-3)
