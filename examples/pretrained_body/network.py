"""Dense residual blocks, with adapters or LoRA if wanted, which leave them as they are at first."""

from torch import Tensor, nn
from torch.nn.functional import gelu, linear

PIXELS, WIDTH, BLOCKS, LABELS = 14 * 14, 96, 3, 5


class LoRALinear(nn.Linear):
    """A dense layer plus B A, whose rank is ``rank`` (Hu et al. 2021); B starts at zero."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__(inputs, outputs)
        self.lora_A = nn.Linear(inputs, rank, bias=False)
        self.lora_B = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        return linear(x, self.weight, self.bias) + self.lora_B(self.lora_A(x))


class Adapter(nn.Module):
    """A narrow detour, added to its input (Houlsby et al. 2019); ``up`` starts at zero."""

    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, narrow), nn.Linear(narrow, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input and the detour."""
        return x + self.up(gelu(self.down(x)))


class Block(nn.Module):
    """A norm and two dense layers, added to the input."""

    def __init__(self, width: int, rank: int, narrow: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = (
            LoRALinear(width, width, rank) if rank else nn.Linear(width, width) for _ in range(2)
        )
        self.adapter = Adapter(width, narrow) if narrow else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's outputs."""
        return self.adapter(x + self.second(gelu(self.first(self.norm(x)))))


class Residual(nn.Module):
    """Images of 28 x 28 pixels, averaged to 14 x 14, then dense residual blocks and a head.

    Args:
        rank: of LoRA in both dense layers of each block; 0 for none.
        narrow: width of an adapter behind each block; 0 for none.
        labels: outputs of the head.
    """

    def __init__(self, rank: int = 0, narrow: int = 0, labels: int = LABELS) -> None:
        super().__init__()
        self.embed = nn.Linear(PIXELS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, rank, narrow) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, labels)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits for pixels in [0, 1], (n, 1, 14, 14) or (n, 196)."""
        x = self.embed(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
