"""Clip per tensor: each tensor is scaled to a norm of its own, as layer-wise clipping does."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from attacks.transforms.transform import Transform, Update

_EQUAL = 1e-3  # relative difference of norms that count as one
_FEW = 2  # tensors


@dataclass(frozen=True)
class ClipPerTensor(Transform):
    """Each tensor is scaled to an L2 norm of at most ``clip``; the attack matches its direction."""

    clip: float
    form: ClassVar[str] = "clip-per-tensor:0.05"

    @classmethod
    def parsed(cls, argument: str) -> Self:
        """Return "clip-per-tensor:NORM", above 0."""
        clip = float(argument)
        if not 1e-100 < clip < 1e100:
            raise ValueError
        return cls(clip)

    def __str__(self) -> str:
        return f"clip-per-tensor:{self.clip:g}"

    def __call__(self, update: Update) -> dict[str, Tensor]:
        """Return the update with each tensor clipped."""
        return {
            name: v * (self.clip / v.square().sum().clamp(min=1e-200).sqrt()).clamp(max=1.0)
            for name, v in update.items()
        }

    @classmethod
    def recognised(cls, sent: Update, plain: Update) -> Self | None:
        """Return it where the longest tensors are equally long, and those of no transform not."""
        norms, before = (
            torch.stack([u[name].norm() for name in sent]).sort(descending=True).values
            for u in (sent, plain)
        )
        equal, by_itself = (int((n >= n[0] * (1 - _EQUAL)).sum()) for n in (norms, before))
        if not norms[0] > 0 or equal < _FEW or by_itself == equal:
            return None
        return cls(float(f"{float(norms[0]):.6g}"))
