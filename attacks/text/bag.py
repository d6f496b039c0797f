"""Bag: the tokens of a batch, read off the embedding's gradient, or that of the last bias."""

import torch
from torch import Tensor, nn

from attacks.reconstruction.labels import output_layer
from attacks.text.observation import NextToken, TextObservation, text_model, token_embedding

_ROUNDING = 100.0
_OUTSIDE = 1e-3  # share of a row that leaves the span of the others, at most, by chance


def bag_of_tokens(model: nn.Module, seen: TextObservation) -> Tensor | None:
    """Return the ids that the model read: exactly the tokens of the batch, without padding.

    Where the output layer shares the embedding's weight, every row moves; see ``_tied``. A token
    that stands only last in its sentences is then predicted and not read, and is left out.

    Returns:
        None where the embedding is not in view, where noise covers its rows, and where the rows
        tell too little.
    """
    name, _ = token_embedding(model)
    rows = seen.update.get(f"{name}.weight")
    if rows is None or seen.noise_std > 0:
        return None
    size = rows.double().norm(dim=1)
    moved = size > _ROUNDING * seen.resolution * torch.finfo(torch.float32).eps * size.max()
    found: Tensor = moved.nonzero()[:, 0]
    batch, length = seen.shape
    if not len(found):
        return None
    return found if len(found) <= batch * length else _tied(rows.double(), seen)


def predicted_tokens(model: nn.Module, seen: TextObservation) -> Tensor | None:
    """Return ids that the batch has after other tokens, by the bias of the last layer.

    Its gradient is the mean softmax minus the frequency of each next token: an entry is negative
    only for a token of the batch, and so is any sum of them with weights above 0, as steps of SGD
    and of Adam make. A token that the model expects more often than it stands there is missed.
    Label smoothing and weight decay in a given update, also so little that the audit takes it for
    explained, make other entries negative: then an id may be false, or there are too many.

    Returns:
        None where the model does not predict its own tokens, where that bias is not in view, where
        noise covers it, where no entry is negative, and where more are than the batch has tokens.
    """
    if not isinstance(seen.loss, NextToken) or seen.noise_std > 0:
        return None
    probe = torch.zeros((1, seen.shape[1]), dtype=torch.long)
    layer, _ = output_layer(text_model(model), seen.state, probe)
    bias = seen.update.get(f"{layer}.bias")
    if bias is None:
        return None
    found: Tensor = (bias < 0 if seen.local is None else bias > 0).nonzero()[:, 0]
    return found if 0 < len(found) <= seen.shape[0] * seen.shape[1] else None


def _tied(rows: Tensor, seen: TextObservation) -> Tensor | None:
    """Return the ids whose rows leave the span of the output layer's inputs.

    The output layer moves each row by a combination of its inputs, which are fewer than their
    width; a token that was read moves its row by something else as well.
    """
    batch, length = seen.shape
    size = rows.norm(dim=1)
    quiet = size.argsort()[: len(rows) // 2]  # tokens that were read or predicted move most
    _, values, basis = torch.linalg.svd(rows[quiet], full_matrices=False)
    floor = _ROUNDING * seen.resolution * float(values[0])
    rank = min(int((values > floor).sum()), batch * length)
    if rank == rows.shape[1]:
        return None
    basis = basis[:rank]
    left = (rows - (rows @ basis.T) @ basis).norm(dim=1)
    outside: Tensor = (left > _OUTSIDE * size).nonzero()[:, 0]
    return outside if 0 < len(outside) <= batch * length else None
