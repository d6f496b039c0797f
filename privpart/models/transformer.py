"""Transformers: a language model and a text classifier with one encoder (Vaswani et al. 2017).

There is no dropout, because all randomness of a client must come from the client's generator.
Attention consists of plain matrix products that vmap, Opacus and operation counters can see.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from privpart.settings import outlines
from privpart.start_values import Constant, Glorot, Initializer, Uniform

# FedPT, Table 11: freezes the first dense layer of these encoder layers.
LANGUAGE_LADDER: Mapping[str, tuple[str, ...]] = {
    "full": ("*",),
    "freeze-2": ("!layers.2.linear1.*",),
    "freeze-1-2": ("!layers.[12].linear1.*",),
    "freeze-0-1-2": ("!layers.?.linear1.*",),
}
CLASSIFIER_LADDER: Mapping[str, tuple[str, ...]] = {
    "full": ("*",),
    "freeze-embedding": ("!embedding.*",),
}
_DENSE_START: Mapping[str, Initializer] = {
    "type:Linear": Glorot(uniform=True),
    "*.bias": Constant(0.0),
}
# Keras's defaults for Dense and Embedding, which the language model's original code uses.
LANGUAGE_START = {**_DENSE_START, "embedding.weight": Uniform(0.05)}
CLASSIFIER_START = {**_DENSE_START, "embedding.weight": Uniform(0.1)}


class EncoderLayer(nn.Module):
    """Self-attention, then two dense layers, each added to its input and normalised."""

    def __init__(self, width: int, heads: int, hidden: int, *, causal: bool, eps: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal=causal)
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.linear1 = nn.Linear(width, hidden)
        self.linear2 = nn.Linear(hidden, width)
        self.norm2 = nn.LayerNorm(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to (B, T, width)."""
        x = self.norm1(x + self.attention(x))
        out: Tensor = self.norm2(x + self.linear2(self.linear1(x).relu()))
        return out


class Attention(nn.Module):
    """Multi-head self-attention with biases; if causal, positions attend to no later ones."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to (B, T, width)."""
        batch, length, width = x.shape

        def split(y: Tensor) -> Tensor:
            return y.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)

        query = split(self.query(x))
        key = split(self.key(x))
        value = split(self.value(x))
        scores = query @ key.transpose(2, 3) / math.sqrt(width // self.heads)
        if self.causal:
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        mixed = (scores.softmax(dim=3) @ value).transpose(1, 2).reshape(batch, length, width)
        out: Tensor = self.output(mixed)
        return out


class LanguageModel(nn.Module):
    """FedPT's Stack Overflow network: 2,277,984 parameters, next-word prediction.

    It follows fedopt_guide/stackoverflow_transformer of github.com/google-research/federated: the
    output is tied to the embedding, without bias, and a dense layer follows the embedding and
    precedes the logits. ``LANGUAGE_START`` has that code's start values; its dropout is left out.

    Args:
        vocabulary: 10,000 words, padding, begin, end, and one out-of-vocabulary token.
        width: width of embedding and encoder, even and a multiple of ``heads``.
        heads: number of attention heads.
        hidden: width of the feed-forward layers.
        layers: number of encoder layers, 1 to 1000.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 10_004,
        width: int = 96,
        heads: int = 8,
        hidden: int = 2048,
        layers: int = 3,
    ) -> None:
        super().__init__()
        outlines.word_lm(
            vocabulary=vocabulary, width=width, heads=heads, hidden=hidden, layers=layers
        )
        encoder = _encoder(width, heads, hidden, layers, causal=True, eps=1e-6)
        self.embedding = nn.Embedding(vocabulary, width)
        self.project_in = nn.Linear(width, width)
        self.layers = encoder
        self.project_out = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (B, T) to the logits of the next token, (B, T, vocabulary)."""
        x = self.project_in(_embed(self.embedding, tokens))
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.project_out(x), self.embedding.weight)


class TextClassifier(nn.Module):
    """FedPart's text classifier: 6,793,605 parameters (AG News), 15,775,405 (Sogou).

    It follows github.com/FLAIR-Community/Fling, without dropout. ``CLASSIFIER_START`` has that
    code's embedding; dense layers start with Glorot values instead of torch's defaults.

    Args:
        vocabulary: 30,333 tokens for AG News, 75,242 for Sogou.
        classes: number of outputs; the paper's code uses 5 for both data sets.
        width: as for ``LanguageModel``, and so are the others.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 30_333,
        classes: int = 5,
        width: int = 200,
        heads: int = 2,
        hidden: int = 200,
        layers: int = 3,
    ) -> None:
        super().__init__()
        outlines.text_transformer(
            vocabulary=vocabulary,
            classes=classes,
            width=width,
            heads=heads,
            hidden=hidden,
            layers=layers,
        )
        encoder = _encoder(width, heads, hidden, layers, causal=False, eps=1e-5)
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = encoder
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (B, T) to logits (B, classes), read at the last position."""
        x = _embed(self.embedding, tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x[:, -1])
        return out


word_lm, text_transformer = LanguageModel, TextClassifier


def _encoder(
    width: int, heads: int, hidden: int, layers: int, *, causal: bool, eps: float
) -> nn.ModuleList:
    return nn.ModuleList(
        EncoderLayer(width, heads, hidden, causal=causal, eps=eps) for _ in range(layers)
    )


def _embed(embedding: nn.Embedding, tokens: Tensor) -> Tensor:
    """Return embeddings times sqrt(width), plus sinusoidal positions, shape (B, T, width)."""
    width = embedding.embedding_dim
    device = tokens.device
    position = torch.arange(tokens.shape[1], device=device).unsqueeze(1)
    even = torch.arange(0, width, 2, device=device)
    angle = position * torch.exp(even * (-math.log(10_000) / width))
    waves = torch.stack([angle.sin(), angle.cos()], dim=2).reshape(tokens.shape[1], width)
    embedded: Tensor = embedding(tokens)
    return embedded * math.sqrt(width) + waves
