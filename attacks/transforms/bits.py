"""Bits: entries rounded to few levels, as clients do that send bytes or less of each."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from attacks.transforms.transform import Step, Transform, Update, number, straight

_MOST = 16
_ROUNDING = 1e-6  # of float32, relative to the greatest value
_FEW = 4  # entries of a tensor per level, below which few distinct values say nothing


@dataclass(frozen=True)
class Bits(Transform):
    """Each entry of a tensor is rounded to one of 2^bits - 1 levels from -max to max."""

    bits: int
    loses: ClassVar[bool] = True
    form: ClassVar[str] = "bits:4"

    @classmethod
    def parsed(cls, argument: str) -> Self:
        """Return "bits:NUMBER", from 2 to 16."""
        return cls(number(argument, _MOST))

    def __str__(self) -> str:
        return f"bits:{self.bits}"

    def __call__(self, update: Update) -> dict[str, Tensor]:
        """Return the rounded update."""
        half = 2 ** (self.bits - 1) - 1
        rounded = {}
        for name, value in update.items():
            step = (value.detach().abs().amax() / half).clamp(min=1e-300)
            rounded[name] = straight((value.detach() / step).round() * step, value)
        return rounded

    def towards(self, sent: Update) -> Step:
        """Match what lies beyond half a step of the level that was sent."""
        steps = {name: _steps(value) for name, value in sent.items()}
        halves = {
            name: float(gaps.amin()) / 2 if len(gaps) else 0.0 for name, gaps in steps.items()
        }

        def near(update: Update) -> dict[str, Tensor]:
            gaps = {name: update[name] - value for name, value in sent.items()}
            return {
                name: sent[name] + gap - gap.detach().clamp(-halves[name], halves[name])
                for name, gap in gaps.items()
            }

        return near

    def checked(self, sent: Update) -> Step:
        """Match what lies beyond half a step, if there are few enough levels, wherever they are."""
        few = all(len(_steps(value)) <= 2**self.bits for value in sent.values())
        return self.towards(sent) if few else self.__call__

    @classmethod
    def recognised(cls, sent: Update, plain: Update) -> Self | None:
        """Return it where each large tensor has few distinct values."""
        levels = [
            len(_steps(sent[name]))
            for name, value in plain.items()
            if len(_steps(value)) > _FEW * len(_steps(sent[name]))
        ]
        if not levels or max(levels) > 2**_MOST:
            return None
        return cls(max(max(levels).bit_length(), 2))


def _steps(values: Tensor) -> Tensor:
    """Return the distances of neighbouring values that differ by more than rounding."""
    gaps = torch.unique(values).diff()
    real: Tensor = gaps[gaps > _ROUNDING * values.abs().amax()]
    return real
