"""Signs: each entry is sent as its sign, scaled to the mean magnitude of its tensor or not."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from attacks.transforms.transform import Step, Transform, Update, straight

_SAME = 1e-3  # relative difference of magnitudes that count as one
_FEW = 8  # entries of a tensor, below which equal magnitudes may be chance


@dataclass(frozen=True)
class Signs(Transform):
    """Each entry is sent as plus or minus the mean magnitude of its tensor, or 1 if ``bare``."""

    bare: bool = False
    loses: ClassVar[bool] = True
    form: ClassVar[str] = "signs, signs:bare"

    @classmethod
    def parsed(cls, argument: str) -> Self:
        """Return "signs", scaled, or "signs:bare"."""
        if argument not in ("", "bare"):
            raise ValueError
        return cls(argument == "bare")

    def __str__(self) -> str:
        return "signs:bare" if self.bare else "signs"

    def __call__(self, update: Update) -> dict[str, Tensor]:
        """Return the signs."""
        return {
            name: straight(v.detach().sign() * (1.0 if self.bare else v.detach().abs().mean()), v)
            for name, v in update.items()
        }

    def towards(self, sent: Update) -> Step:
        """Match entries of the other sign, and the mean magnitude where signs are scaled."""
        signs = {name: value.sign() for name, value in sent.items()}
        sizes = {name: value.abs().amax() for name, value in sent.items()}

        def near(update: Update) -> dict[str, Tensor]:
            moved = {}
            for name, sign in signs.items():
                value = update[name]
                wrong = torch.where(sign == 0, value, sign * (sign * value).clamp(max=0))
                scale = 0.0 if self.bare else value.abs().mean() - sizes[name]
                moved[name] = sent[name] + wrong + sign * scale
            return moved

        return near

    @classmethod
    def recognised(cls, sent: Update, plain: Update) -> Self | None:
        """Return it where the entries of each tensor have one magnitude, or are zero."""
        sizes = [v[v != 0].abs() for name, v in sent.items() if plain[name].count_nonzero() > _FEW]
        if not sizes or any(len(s) <= _FEW or s.min() < s.max() * (1 - _SAME) for s in sizes):
            return None
        return cls(bare=all(bool(((size - 1).abs() < _SAME).all()) for size in sizes))
