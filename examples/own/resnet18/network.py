"""ResNet-18 with group normalisation, for small images; it needs torch alone."""

from itertools import pairwise

from torch import nn


class Block(nn.Module):
    """Two convolutions, added to the input."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, outputs)
        self.shortcut = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        hidden = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(hidden)) + self.shortcut(x)).relu()


class ResNet18(nn.Module):
    """Four stages of two blocks; the stem does not shrink the images."""

    def __init__(self, width, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(Block(inputs, outputs, outputs // inputs), Block(outputs, outputs, 1))
                for inputs, outputs in pairwise(widths)
            )
        )
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x):
        return self.head(self.stages(self.norm(self.stem(x)).relu()).mean(dim=(2, 3)))
