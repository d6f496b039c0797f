"""A BERT encoder with LoRA adapters and a head, in plain torch.

The same function as ``transformers.BertModel`` of the same weights, followed by the mean over the
tokens that are not padding, as all-MiniLM-L6-v2 takes it. Nothing in it depends on the data, so
``torch.func.vmap`` computes many clients at once, and none of its layers is frozen by itself: the
patterns of a plan say what trains.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention


class Adapted(nn.Linear):
    """A dense layer with a LoRA adapter: W x + b + scale B A x; with rank 0 it has none.

    A start value of 0 for B leaves the layer as it is.
    """

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float) -> None:
        super().__init__(inputs, outputs)
        self.scale = scale
        self.lora_A = nn.Parameter(torch.zeros(rank, inputs)) if rank else None
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank)) if rank else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs, shape (..., outputs)."""
        outputs = super().forward(x)
        if self.lora_A is None or self.lora_B is None:
            return outputs
        return outputs + self.scale * linear(linear(x, self.lora_A), self.lora_B)


class Layer(nn.Module):
    """A transformer layer as BERT has it, with adapters at queries and values."""

    def __init__(self, width: int, heads: int, hidden: int, rank: int, scale: float) -> None:
        super().__init__()
        self.heads = heads
        self.query = Adapted(width, width, rank, scale)
        self.key = nn.Linear(width, width)
        self.value = Adapted(width, width, rank, scale)
        self.attended = nn.Linear(width, width)
        self.attended_norm = nn.LayerNorm(width, eps=1e-12)
        self.wide = nn.Linear(width, hidden)
        self.narrow = nn.Linear(hidden, width)
        self.narrow_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        """Return the layer's outputs, shape (n, length, width); ``shown`` is 0 or -inf."""
        heads = [
            part(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for part in (self.query, self.key, self.value)
        ]
        mixed = scaled_dot_product_attention(heads[0], heads[1], heads[2], shown)
        x = self.attended_norm(x + self.attended(mixed.transpose(-2, -3).flatten(-2)))
        return self.narrow_norm(x + self.narrow(nn.functional.gelu(self.wide(x))))


class Encoder(nn.Module):
    """Token ids to the mean of the last layer's outputs; 0 is padding.

    Args:
        vocabulary: number of word pieces.
        length: tokens of a text.
        width: of the outputs.
        heads: of attention.
        hidden: width between the two dense layers.
        layers: number of layers.
        rank: of the adapters; 0 has none.
        scale: of the adapters, alpha / rank.
        labels: outputs of the head.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int = 32,
        width: int = 384,
        heads: int = 12,
        hidden: int = 1536,
        layers: int = 6,
        rank: int = 4,
        scale: float = 4.0,
        labels: int,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(Layer(width, heads, hidden, rank, scale) for _ in range(layers))
        self.head = nn.Linear(width, labels)
        self._sharpness = math.sqrt(width)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the mean outputs of texts, shape (n, width), for ids of shape (n, length)."""
        known = tokens != 0
        shown = torch.where(known, 0.0, -math.inf)[..., None, None, :]
        x = self.norm(self.words(tokens) + self.positions.weight[: tokens.shape[-1]])
        for layer in self.layers:
            x = layer(x, shown)
        weights = known.to(x.dtype).unsqueeze(-1)
        return (x * weights).sum(dim=-2) / weights.sum(dim=-2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of texts, shape (n, labels)."""
        means = self.embed(tokens)
        # of length sqrt(width), so that its entries are of the size that a head expects
        means = self._sharpness * nn.functional.normalize(means, dim=-1)
        return self.head(means)
