"""Bag: the tokens of a batch, read off the rows of the embedding's gradient."""

import torch
from torch import Tensor, nn

from attacks.text.observation import TextObservation, token_embedding

_ROUNDING = 100.0


def bag_of_tokens(model: nn.Module, seen: TextObservation) -> Tensor | None:
    """Return the ids whose embedding moved: exactly the tokens of the batch, without padding.

    Returns:
        None where the embedding is not in view, where noise covers its rows, and where the output
        layer shares its weight, so that every row moves.
    """
    name, _ = token_embedding(model)
    rows = seen.update.get(f"{name}.weight")
    if rows is None or seen.noise_std > 0:
        return None
    size = rows.double().norm(dim=1)
    moved = size > _ROUNDING * seen.resolution * torch.finfo(torch.float32).eps * size.max()
    found: Tensor = moved.nonzero()[:, 0]
    batch, length = seen.shape
    if len(found) > batch * length or not len(found):
        return None
    return found
