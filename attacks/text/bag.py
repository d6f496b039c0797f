"""Bag: the tokens of a batch, read off the embedding's gradient, or that of the output layer."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from attacks.reconstruction.labels import output_layer
from attacks.rounding import same
from attacks.text.observation import NextToken, TextObservation, text_model, token_embedding

_ROUNDING = 100.0
_OUTSIDE = 1e-3  # share of a row that leaves a span at most, by rounding or by chance
_SURE = 0.5  # of what one token adds: below it, weight decay may be what moved an entry
_MOSTLY = 0.7  # share of what moved towards tokens that must be sure
_TOLD = 1e-2  # share of a bias that must be left in its sum, so that rounding stays small
_BALANCED = 3e-3  # sum of the rows of a softmax's gradient, relative to their lengths


def bag_of_tokens(model: nn.Module, observed: TextObservation) -> Tensor | None:
    """Return the ids that the model read: exactly the tokens of the batch, without padding.

    Weight decay moves every row along its own weights; only rows that moved aside are then taken.
    Where the output layer shares the embedding's weight, every row moves; see ``_tied``. A token
    that stands only last in its sentences is then predicted and not read, and is left out.

    Return None where the embedding is not in view, where noise covers its rows, and where the rows
    tell too little.
    """
    name, _ = token_embedding(model)
    rows = observed.update.get(f"{name}.weight")
    if rows is None or observed.noise_std > 0:
        return None
    rows = rows.double()
    size = rows.norm(dim=1)
    moved = size > _ROUNDING * observed.resolution * torch.finfo(torch.float32).eps * size.max()
    if not bool(moved.any()):
        return None
    size_limit = observed.shape[0] * observed.shape[1]
    if int(moved.sum()) > size_limit:
        if _used_elsewhere(model, observed, f"{name}.weight"):
            return _tied(rows, observed)
        weights = observed.state[f"{name}.weight"].double()
        along = (rows * weights).sum(1) / weights.square().sum(1).clamp(min=1e-300)
        beyond = (rows - along[:, None] * weights).norm(dim=1)
        moved = beyond > _OUTSIDE * beyond.max()
    return _ids(moved, size_limit)


def _used_elsewhere(model: nn.Module, observed: TextObservation, name: str) -> bool:
    """Return whether the logits depend on rows of the embedding that were not read."""
    net = text_model(model, observed.pad)
    probe = torch.zeros((1, observed.shape[1]), dtype=torch.long)
    changed = observed.state[name].double().clone()
    draw = torch.Generator().manual_seed(0)  # a constant would vanish behind a layer norm
    changed[1:] += torch.randn(changed[1:].shape, generator=draw, dtype=changed.dtype)
    with torch.no_grad():
        before, after = (
            functional_call(net, {**observed.state, name: rows}, (probe,))
            for rows in (observed.state[name].double(), changed)
        )
    return not same(before, after)


def predicted_tokens(model: nn.Module, observed: TextObservation) -> Tensor | None:
    """Return ids that the batch has after other tokens, by the gradient of the output layer.

    The gradient of its bias is the mean softmax minus the frequency of each next token: an entry is
    negative only for a token of the batch, and so is any sum of them with weights above 0, as steps
    of SGD and of Adam make. Weight decay of SGD is taken away first: the sum of the entries tells
    it. Label smoothing and AdamW's decay in a given update move other entries, too; an entry counts
    if it moved by more than half of what one token adds. A token that the model expects about as
    often as it stands there is missed. Adam that adds the decay to the gradient moves expected and
    decayed entries alike: an audit must not ask here where it does not explain the update.

    Without a bias, each row of the weight's gradient is a mean of the layer's inputs in the same
    proportions. Tokens that are not in the batch have rows that point one way, that of all inputs,
    and the others point against it: likely tokens, not certain ones.

    Return None where the model does not predict its own tokens, where the layer is not in view,
    where noise covers it, and where too much moved that is not surely a token: more entries than
    the batch has tokens, or without a bias, Adam's steps or weight decay.
    """
    if not isinstance(observed.loss, NextToken) or observed.noise_std > 0:
        return None
    probe = torch.zeros((1, observed.shape[1]), dtype=torch.long)
    layer, _ = output_layer(text_model(model), observed.state, probe)
    pull = _pull(observed, layer)
    if pull is None:
        return None
    pull = pull.clamp(min=0)
    size_limit = observed.shape[0] * (observed.shape[1] - 1)
    sure = pull > _SURE * pull.sum() / max(size_limit, 1)
    mostly = bool(pull[sure].sum() >= _MOSTLY * pull.sum())
    return _ids(sure, size_limit) if mostly else None


def _pull(observed: TextObservation, layer: str) -> Tensor | None:
    """Return how far the update raises each token's logit at all positions alike, (V,)."""
    bias, weight = observed.update.get(f"{layer}.bias"), observed.update.get(f"{layer}.weight")
    if bias is not None:
        moved = bias.double()
        if observed.local is None or observed.local.optimizer == "sgd":
            moved = _without_decay(moved, observed.state[f"{layer}.bias"].double())
        return -moved if observed.local is None else moved
    if weight is None or (observed.local is not None and observed.local.optimizer != "sgd"):
        return None
    rows = weight.double()
    size = rows.norm(dim=1)
    if float(rows.sum(0).norm()) > _BALANCED * float(size.sum()):
        return None
    absent = rows[size.argsort()[: len(rows) // 2]].sum(0)
    pull: Tensor = -rows @ absent / absent.norm().clamp(min=1e-300)
    return pull


def _without_decay(moved: Tensor, bias: Tensor) -> Tensor:
    """Return the update of a bias without weight decay, which alone changes the bias's sum.

    The gradients of a softmax add up to 0, so that the sums tell the decay, also after many steps
    of SGD. Where those of a bias nearly cancel out, they do not, and nothing is taken away.
    """
    total = float(bias.sum())
    if abs(total) <= _TOLD * float(bias.abs().sum()):
        return moved
    return moved - bias * (float(moved.sum()) / total)


def _tied(rows: Tensor, observed: TextObservation) -> Tensor | None:
    """Return the ids whose rows leave the span of the output layer's inputs.

    The output layer moves each row by a combination of its inputs, which are fewer than their
    width; a token that was read moves its row by something else as well.
    """
    batch, length = observed.shape
    size = rows.norm(dim=1)
    quiet = size.argsort()[: len(rows) // 2]  # tokens that were read or predicted move most
    _, values, basis = torch.linalg.svd(rows[quiet], full_matrices=False)
    floor = _ROUNDING * observed.resolution * float(values[0])
    rank = min(int((values > floor).sum()), batch * length)
    if rank == rows.shape[1]:
        return None
    basis = basis[:rank]
    beyond = (rows - (rows @ basis.T) @ basis).norm(dim=1)
    return _ids(beyond > _OUTSIDE * size, batch * length)


def _ids(rows: Tensor, most: int) -> Tensor | None:
    """Return which rows are true; None where none is, or more than the batch has tokens."""
    tokens: Tensor = rows.nonzero()[:, 0]
    return tokens if 0 < len(tokens) <= most else None
