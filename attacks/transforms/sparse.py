"""Sparse updates: only the largest entries are sent, of the whole update or of each tensor."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from attacks.transforms.transform import Step, Transform, Update, share

_LARGE = 100  # entries of a tensor whose share is as declared, up to rounding
_MORE = 1.06  # times the declared share, which may have two digits
_TINY = 0.01  # size of the least of many entries, relative to the median
_KEPT = 0.9  # share of the entries that are not zero by themselves, above which none was dropped


@dataclass(frozen=True)
class TopK(Transform):
    """Only a share of all entries is sent, those of greatest magnitude; the others are zero."""

    sent: float
    loses: ClassVar[bool] = True
    form: ClassVar[str] = "top-k:0.1"

    @classmethod
    def parsed(cls, argument: str) -> Self:
        """Return "top-k:SHARE", the share that is sent."""
        return cls(share(argument))

    def __str__(self) -> str:
        return f"top-k:{self.sent:g}"

    def __call__(self, update: Update) -> dict[str, Tensor]:
        """Return the update with zeros in place of the entries that are not sent."""
        threshold = _threshold(torch.cat([value.flatten() for value in update.values()]), self.sent)
        return {name: torch.where(v.abs() >= threshold, v, 0.0) for name, v in update.items()}

    def towards(self, sent: Update) -> Step:
        """Match the entries that were sent; the others may be any smaller ones."""
        masks = {name: value != 0 for name, value in sent.items()}
        return lambda update: {k: torch.where(mask, update[k], 0.0) for k, mask in masks.items()}

    def checked(self, sent: Update) -> Step:
        """Match the entries that were sent, if they are few enough, however they were chosen."""
        few = all(_nonzero(part) <= _MORE * self.sent for part in self._ranked(sent))
        return self.towards(sent) if few else self.__call__

    @classmethod
    def recognised(cls, sent: Update, plain: Update) -> Self | None:
        """Return it where many entries are zero, beside others, that are not zero by themselves."""
        blocks = [_block(sent[name], value) for name, value in plain.items()]
        nonzero = sum(int((value_before != 0).sum()) for _, value_before in blocks)
        remaining = sum(
            int(((value != 0) & (value_before != 0)).sum()) for value, value_before in blocks
        )
        parts = cls._ranked(sent)
        if remaining == 0 or remaining > _KEPT * nonzero or not all(map(_cut, parts)):
            return None
        return cls(float(f"{max(map(_nonzero, parts)):.2g}"))

    @classmethod
    def _ranked(cls, sent: Update) -> list[Tensor]:
        """Return the values that were ranked against one another, each as one vector."""
        return [torch.cat([value.flatten() for value in sent.values()])]


@dataclass(frozen=True)
class Prune(TopK):
    """The smallest entries of each tensor are zero; ``sent`` is the share of the others."""

    form: ClassVar[str] = "prune:0.9"

    @classmethod
    def parsed(cls, argument: str) -> Self:
        """Return "prune:SHARE", the share of each tensor that is not sent."""
        return cls(share(str(1 - float(argument))))

    def __str__(self) -> str:
        return f"prune:{1 - self.sent:g}"

    def __call__(self, update: Update) -> dict[str, Tensor]:
        """Return the update with zeros in place of the smallest entries of each tensor."""
        return {
            name: torch.where(v.abs() >= _threshold(v.flatten(), self.sent), v, 0.0)
            for name, v in update.items()
        }

    @classmethod
    def _ranked(cls, sent: Update) -> list[Tensor]:
        flat = [value.flatten() for value in sent.values()]
        return [values for values in flat if len(values) >= _LARGE] or flat


def _threshold(values: Tensor, kept: float) -> Tensor:
    """Return the magnitude of the smallest entry that is kept."""
    count = max(round(kept * len(values)), 1)
    least: Tensor = values.detach().abs().topk(count).values[-1]
    return least


def _nonzero(values: Tensor) -> float:
    return int((values != 0).sum()) / len(values)


def _block(sent: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
    """Return both without rows and columns that are not sent at all, as those of silent units."""
    matrix, own = (value.flatten(1) if value.ndim > 1 else value[None] for value in (sent, plain))
    rows, columns = matrix.any(1), matrix.any(0) | (sent.ndim < 2)
    return matrix[rows][:, columns], own[rows][:, columns]


def _cut(values: Tensor) -> bool:
    """Return whether the smallest entries are missing: of many entries, some are tiny."""
    size = values[values != 0].abs()
    return len(size) > 1 and bool(size.min() > _TINY * size.median())
