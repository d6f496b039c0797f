"""Networks that several tests of the attacks share, filled from a seed."""

import torch
from torch import Tensor, nn


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def filled(model: nn.Module, bound: float = 0.3, seed: int = 1) -> nn.Module:
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-bound, bound, generator=generator)
    return model


def dense(
    hidden: int = 128, activation: nn.Module | None = None, bound: float = 0.125, seed: int = 1
) -> nn.Module:
    """Return two dense layers on the pixels of a digit."""
    layers = nn.Linear(64, hidden), activation or nn.ReLU(), nn.Linear(hidden, 10)
    return filled(nn.Sequential(nn.Flatten(), *layers), bound, seed)


def behind(activation: nn.Module) -> nn.Module:
    """Return a convolution, frozen where only the dense layer after it is in view."""
    front = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), activation, nn.Flatten())
    return filled(front.extend([nn.Linear(256, 32), nn.Tanh(), nn.Linear(32, 10)]), seed=0)


class LoRA(nn.Module):
    """A frozen dense layer with an adapter, which has been trained before."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.head = nn.Linear(64, 128), nn.Linear(128, 10)
        self.lora_A, self.lora_B = nn.Linear(64, 8, bias=False), nn.Linear(8, 128, bias=False)
        filled(self, 0.125)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return self.head(torch.relu(self.dense(flat) + self.lora_B(self.lora_A(flat))))


def normalised() -> nn.Module:
    """Return a narrow network with batch normalisation right after its first convolution."""
    front = nn.Sequential(nn.Conv2d(1, 8, 3, 2, padding=1), nn.BatchNorm2d(8), nn.Tanh())
    front.extend([nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=None), nn.Flatten()])
    return filled(front.append(nn.Linear(128, 10))).train()


class Transformer(nn.Module):
    """Patches and a class token with positions, one attention, and what may bypass it."""

    def __init__(self, width: int = 32, *, norm: bool = True, skip: bool = True) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, 2)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, 17, width))
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mix = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, 10)
        self.skip = skip
        filled(self, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).mT
        tokens = torch.cat([self.first.expand(len(x), -1, -1), tokens], 1) + self.position
        inner = self.norm(tokens)
        out = self.attention(inner, inner, inner, need_weights=False)[0]
        tokens = tokens + out if self.skip else out
        return self.head((tokens + self.mix(tokens)).square().mean(1))


class Recurrent(nn.Module):
    """A language model whose output layer has a weight of its own."""

    def __init__(self, vocabulary: int = 400, *, bias: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.out = nn.Linear(16, vocabulary, bias=bias)
        filled(self, 0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.lstm(self.tokens(tokens))[0])


class AdaptedText(nn.Module):
    """One dense layer with LoRA, whose B is not zero, before a causal layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(200, 64), nn.Embedding(12, 64)
        self.lora_A, self.lora_B = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        self.out = nn.Linear(64, 200)
        filled(self, 0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.out((x + self.lora_B(self.lora_A(x))).tanh().cumsum(1))
