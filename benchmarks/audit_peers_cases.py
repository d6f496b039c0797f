"""Cases of the audit's peers: networks, images and a batch, as every side attacks them.

Needs torch and numpy only, so that a peer's environment can import it too. Images are in [0, 1].
A case's network takes images that are already normalised; ours attacks ``Normalised``, the peers
attack the inside with normalised images, each as its own papers do. The gradient is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10
SIZE = 32


@dataclass(frozen=True)
class Network:
    """A network: how to build it, and the mean and standard deviation of its inputs.

    Start values are U(-bound, bound); without a bound torch's own, U(-1/sqrt(fan_in), ...).
    """

    build: Callable[[], nn.Module]
    mean: float
    std: float
    bound: float | None = None

    def seeded(self, seed: int) -> nn.Module:
        """Return the network in eval mode, with the start values of a seed."""
        generator = torch.Generator().manual_seed(seed)
        model = self.build()
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                bound = self.bound or layer.weight[0].numel() ** -0.5
                for parameter in layer.parameters():
                    nn.init.uniform_(parameter, -bound, bound, generator)
        return model.eval()


class Normalised(nn.Module):
    """A network that takes images in [0, 1]."""

    def __init__(self, network: Network, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.mean = network.mean
        self.std = network.std

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 3, 32, 32) to logits."""
        logits: Tensor = self.inside((x - self.mean) / self.std)
        return logits


def lenet() -> nn.Sequential:
    """Return DLG's LeNet: three 5x5 convolutions with sigmoid; start values U(-0.5, 0.5)."""
    layers: list[nn.Module] = []
    for inputs, stride in ((3, 2), (12, 2), (12, 1)):
        layers += [nn.Conv2d(inputs, 12, 5, stride, padding=2), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * (SIZE // 4) ** 2, CLASSES))


def convnet(width: int = 8) -> nn.Sequential:
    """Return the ConvNet of Inverting Gradients at an eighth of its width; ReLU, batch norm."""
    widths = [1, 2, 2, 4, 4, 4, "pool", 4, 4, "pool"]
    layers: list[nn.Module] = []
    inputs = 3
    for times in widths:
        if isinstance(times, str):
            layers.append(nn.MaxPool2d(3))
            continue
        outputs = times * width
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs * 9, CLASSES))


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return features of half the size where the channels double."""
        inner = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(inner + self.shortcut(x))


def resnet8(width: int = 16) -> nn.Sequential:
    """Return FedPart's ResNet-8 at a quarter of its width: 7x7 stem, max-pool, three blocks."""
    return nn.Sequential(
        nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        Block(width, width),
        Block(width, 2 * width),
        Block(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, CLASSES),
    )


NETWORKS = {
    "LeNet, sigmoid": Network(lenet, 0.0, 1.0, bound=0.5),
    "ConvNet, ReLU": Network(convnet, 0.5, 0.25),
    "ResNet-8, ReLU": Network(resnet8, 0.5, 0.25),
}


@cache
def photographs() -> Tensor:
    """Return 32 colour images (3, 32, 32) in [0, 1]: windows of scikit-learn's two photographs."""
    from sklearn.datasets import load_sample_images

    windows = []
    for picture in load_sample_images().images:
        scaled = torch.from_numpy(np.array(picture[:384, :640])).float() / 255
        for row in scaled.reshape(4, 96, 640, 3):
            for left in range(0, 384, 96):
                window = row[:, left : left + 96].reshape(SIZE, 3, SIZE, 3, 3).mean((1, 3))
                windows.append(window.permute(2, 0, 1))
    half = len(windows) // 2
    mixed = [windows[i // 2 + half * (i % 2)] for i in range(len(windows))]
    return torch.stack(mixed)


def batch_of(images: Tensor, size: int, trial: int) -> tuple[Tensor, Tensor]:
    """Return a batch of different images with different labels; the next trial takes others."""
    rows = [(trial * size + i) % len(images) for i in range(size)]
    order = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(trial))
    return images[rows], order[:size]
