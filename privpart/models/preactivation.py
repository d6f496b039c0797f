"""Pre-activation ResNet with group normalisation: the network of FedPT's CIFAR-10 rows.

It follows ``create_resnet18`` of github.com/google-research/federated (He et al. 2016, ResNet v2).
The stages keep the resolution; only the stem reduces it, by 4 in each direction.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from accounting import checks
from privpart.start_values import Initializer, Normal

# FedPT, Table 10: blocks 0 to 3 are the 3x3 convolutions of a stage, the widest stage first.
# Shortcuts, normalisation, stem and head always train.
RESNET18_GN_LADDER: Mapping[str, tuple[str, ...]] = {
    "full": ("*",),
    "freeze-0": ("!stages.3.*.conv?.weight",),
    "freeze-0-1": ("!stages.[23].*.conv?.weight",),
    "freeze-0-1-2": ("!stages.[123].*.conv?.weight",),
    "freeze-0-1-2-3": ("!stages.*.conv?.weight",),
}
RESNET18_GN_START: Mapping[str, Initializer] = {"head.weight": Normal(0.01)}


def resnet18_gn(*, classes: int = 100) -> nn.Module:
    """Return FedPT's ResNet-18: (B, 3, H, W) -> logits (B, classes), 11,227,812 parameters.

    The head has 100 outputs although CIFAR-10 has 10 classes, as in the code of the published
    experiment; the shares of FedPT's Table 2 require it.
    """
    stages: list[nn.Module] = []
    width = 64
    for outputs in (64, 128, 256, 512):
        first = PreactivationBlock(width, outputs, normalize_input=bool(stages))
        stages.append(nn.Sequential(first, PreactivationBlock(outputs, outputs)))
        width = outputs
    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False))
    model.add_module("stem_norm", _norm(64))
    model.add_module("stem_relu", nn.ReLU())
    model.add_module("pool", nn.MaxPool2d(3, stride=2, padding=1))
    model.add_module("stages", nn.Sequential(*stages))
    model.add_module("norm", _norm(512))
    model.add_module("relu", nn.ReLU())
    model.add_module("mean", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    model.add_module("head", nn.Linear(512, checks.count("classes", classes)))
    return model


class PreactivationBlock(nn.Module):
    """Twice norm, ReLU and 3x3 convolution, added to the input or to its 1x1 projection."""

    def __init__(self, inputs: int, outputs: int, *, normalize_input: bool = True) -> None:
        super().__init__()
        start = [_norm(inputs), nn.ReLU()] if normalize_input else []
        self.norm1 = nn.Sequential(*start)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.Sequential(_norm(outputs), nn.ReLU())
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Sequential()
        if inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, bias=False))
            self.shortcut.append(_norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, H, W) to (B, outputs, H, W)."""
        residual: Tensor = self.conv2(self.norm2(self.conv1(self.norm1(x))))
        total: Tensor = residual + self.shortcut(x)
        return total


def _norm(channels: int) -> nn.Module:
    # 32 groups and eps 1e-3 are the defaults of tensorflow_addons' GroupNormalization
    return nn.GroupNorm(32, channels, eps=1e-3)
