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
