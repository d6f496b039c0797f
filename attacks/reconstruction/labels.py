"""Labels: known, inferred from the update, or candidates to be tried one by one."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from accounting import checks
from accounting.checks import ConfigError
from attacks.observation import Observation
from attacks.update import Smoothed, ready, recording

_DOUBT = 1.5  # of 2: below it another label in place of one fits almost as well
_ASTRAY = 0.25  # squared distance to whole counts above which the assumed softmax is wrong
_GRID = 2.0**-20  # expected counts are rounded to it, so that equal ones are equal
_ZERO = 2**10 * torch.finfo(torch.float64).eps  # an entry below it, relative to the largest, is 0
_PROBES = 64  # random images from which the model's mean prediction is estimated


def infer_labels(
    weight_grad: Tensor | None,
    bias_grad: Tensor | None,
    batch: int = 1,
    *,
    mean_prediction: Tensor | None = None,
) -> Tensor:
    """Return the labels of a batch from the gradient of the last dense layer, in ascending order.

    Under cross-entropy the gradient of the logits is softmax - onehot. For one image the bias's
    gradient has one negative entry, the label (Zhao, Mopuri and Bilen 2020); without a bias the
    label's row of the weight's gradient is the one that points against all others. For a batch the
    bias's gradient is mean softmax - count / batch, so count = batch (mean softmax - gradient),
    as exactly as the attacker knows the mean softmax. A label with a negative entry is certainly
    in the batch, unless there are more of these than images: noise or weight decay made some.

    The weight's gradient (K, I) is used where the bias's (K,) is not in view, for a batch of one;
    a ``mean_prediction`` of None is 1/K.

    Raises:
        ConfigError: neither gradient given, no bias for more than one image, or values that are
            not finite.

    >>> infer_labels(None, torch.tensor([0.2, -0.9, 0.7]))
    tensor([1])
    >>> infer_labels(None, torch.tensor([-0.5, 0.25, 0.0, 0.25]), batch=4)
    tensor([0, 0, 0, 2])
    """
    batch = checks.count("batch", batch)
    if bias_grad is not None:
        return likely_labels(bias_grad, batch, mean_prediction=mean_prediction)[0]
    if weight_grad is None or batch != 1:
        raise ConfigError(
            f"bias_grad=None: without it only the label of one image can be inferred, from the "
            f"gradient of the weight; batch={batch}."
        )
    gw = weight_grad.detach().double()
    if gw.ndim != 2 or len(gw) < 3 or not bool(gw.isfinite().all()):
        raise ConfigError(f"weight_grad: shape {tuple(gw.shape)}; must be (K, I), K >= 3, finite.")
    return (gw @ gw.sum(0) - gw.square().sum(1)).argmin().reshape(1)


def likely_labels(
    bias_grad: Tensor, batch: int = 1, *, mean_prediction: Tensor | None = None, at_most: int = 8
) -> list[Tensor]:
    """Return the labels of ``infer_labels``, and after them others that are almost as likely.

    The counts are as good as the mean softmax that is assumed. On untrained weights the guess is
    close, and the expected counts are whole; on trained ones it depends on the images. Where the
    expected counts are far from whole, or another label in place of one of these fits them almost
    as well, the labels are doubtful, and up to ``at_most`` tensors are returned.

    >>> g = torch.tensor([-0.25, -0.24, 0.24, 0.25])
    >>> likely_labels(g, batch=2)
    [tensor([0, 1])]
    >>> likely_labels(torch.tensor([-0.25, 0.0, 0.02, 0.23]), batch=2, at_most=2)
    [tensor([0, 1]), tensor([0, 2])]
    """
    gb = bias_grad.detach().double()
    if gb.ndim != 1 or len(gb) < 2 or not bool(gb.isfinite().all()):
        raise ConfigError(f"bias_grad: shape {tuple(gb.shape)}; must be (K,), K >= 2, and finite.")
    if batch == 1:
        return [gb.argmin().reshape(1)]
    mean = torch.full_like(gb, 1 / len(gb)) if mean_prediction is None else mean_prediction.double()
    expected = (batch * (mean - gb) / _GRID).round() * _GRID
    certain = (gb < -_ZERO * gb.abs().max()).long()  # only an image with that label makes it so
    if int(certain.sum()) > batch:  # not those of a batch: nothing is certain then
        certain.zero_()
    counts = certain.clone()
    for _ in range(batch - int(counts.sum())):
        counts[(expected - counts).argmax()] += 1
    surplus = expected - counts
    # what a swap of one image from label i (rows) to label j adds to the squared distance
    worse = 2 + 2 * surplus[:, None] - 2 * surplus[None]
    worse[counts <= certain] = math.inf
    worse.fill_diagonal_(math.inf)
    limit = math.inf if float(surplus.square().sum()) > _ASTRAY else _DOUBT
    candidates = [counts]
    for place in worse.flatten().argsort(stable=True)[: at_most - 1].tolist():
        out, into = divmod(place, len(gb))
        if float(worse[out, into]) < limit:
            swapped = counts.clone()
            swapped[out] -= 1
            swapped[into] += 1
            candidates.append(swapped)
    return [torch.arange(len(gb)).repeat_interleave(labels) for labels in candidates]


def label_candidates(model: nn.Module, observation: Observation) -> list[Tensor]:
    """Return the (B,) labels that an attack should try: one tensor if they are known or certain.

    Labels that were not revealed are inferred from the layer that makes the logits, the most likely
    ones first; the others are there because these are doubtful. Where that layer is not in view, a
    batch of one has as many candidates as the model has logits.
    """
    if observation.labels is not None:
        return [observation.labels]
    smoothed = isinstance(observation.loss, Smoothed)
    if observation.loss is not cross_entropy and not smoothed:
        raise ConfigError(
            "labels=None: labels can be inferred only under cross-entropy; observe with "
            "reveal_labels=True."
        )
    generator = torch.Generator().manual_seed(0)
    probes = torch.rand(_PROBES, *observation.shape[1:], generator=generator, dtype=torch.float64)
    net = ready(model, observation.training)
    layer, logits = output_layer(net, observation.state, probes)
    batch, update, local = observation.shape[0], observation.update, observation.local
    weight, bias = update.get(f"{layer}.weight"), update.get(f"{layer}.bias")
    hidden = {
        "steps of Adam, which hide the size of a gradient": local and local.optimizer != "sgd",
        f"what {observation.transform} leaves": observation.transform.loses,
        "a loss with label smoothing": smoothed,
    }
    if batch > 1 and (causes := [cause for cause, hides in hidden.items() if hides]):
        raise ConfigError(
            f"labels=None: those of {batch} images cannot be inferred from {causes[0]}; observe "
            "with reveal_labels=True."
        )
    weight, bias = (grad if grad is not None and grad.any() else None for grad in (weight, bias))
    if bias is not None or (weight is not None and batch == 1):
        sign = 1.0 if local is None else -1 / sum(local.rates)
        sign /= observation.clients
        weight, bias = (None if grad is None else sign * grad for grad in (weight, bias))
        if bias is None:
            return [infer_labels(weight, bias, batch)]
        return likely_labels(bias, batch, mean_prediction=logits.softmax(1).mean(0))
    if batch == 1:
        return [torch.tensor([label]) for label in range(logits.shape[1])]
    raise ConfigError(
        f"labels=None: those of {batch} images can be inferred only from the bias of the last "
        f"dense layer ({layer or 'the model has none'}), which is not in view; show it, or observe "
        "with reveal_labels=True."
    )


def output_layer(net: nn.Module, state: Mapping[str, Tensor], inputs: Tensor) -> tuple[str, Tensor]:
    """Return the name of the dense layer that makes the logits ("" if none), and the logits."""
    with torch.no_grad(), recording(net, nn.Linear) as calls:
        logits = functional_call(net, dict(state), (inputs,))
    return next((call.name for call in calls if call.output is logits), ""), logits
