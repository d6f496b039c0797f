"""Scoring: an attacker's result against the truth, which only the auditor has."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from attacks.analytic import invert_dense, is_dense, visible_dense
from attacks.features import layer_input
from attacks.matching import match_batch
from attacks.metrics import feature_error, psnr, ssim
from attacks.observation import Observation
from attacks.reconstruct import Reconstruction, matching_loss
from attacks.report import VERDICTS, Trial, Verdict
from attacks.update import as_double


def score(
    view: str,
    attack: str,
    found: Reconstruction,
    truth: Tensor,
    floor: Sequence[float],
    truth_match: float,
) -> list[Trial]:
    """Return a trial per image of the batch; ``floor`` is the best baseline of each, in dB."""
    order = match_batch(found.x, truth)
    x, reference = found.x[order], truth.double()
    decibels, alike = psnr(x, reference).tolist(), ssim(x, reference).tolist()
    return [
        Trial(view, attack, found, decibels[i], floor[i], alike[i], truth_match, int(order[i]))
        for i in range(len(truth))
    ]


def most_severe(trials: Iterable[Trial]) -> Verdict:
    """Return the worst verdict of several trials of one image."""
    return min((trial.verdict for trial in trials), key=VERDICTS.index)


def truth_residual(model: nn.Module, seen: Observation, x: Tensor, y: Tensor) -> float:
    """Return how well the truth itself matches: 0 but for rounding, noise, or a wrong model."""
    return float(matching_loss(model, seen, y)(as_double(x)).detach())


def feature_errors(model: nn.Module, seen: Observation, x: Tensor) -> dict[str, float]:
    """Return the relative error of each visible dense layer's input, read off the update.

    Only for a batch of one, and for layers whose bias is in view. What is exact here identifies
    the image even where its pixels do not come back.
    """
    if seen.shape[0] != 1:
        return {}
    layers = visible_dense(seen, [name for name, m in model.named_modules() if is_dense(m)])
    errors = {}
    for name, weight, bias in layers:
        reached = layer_input(model, seen, name)(as_double(x))[0].detach()
        if bias is not None and bool(bias.any()) and bool(reached.any()):
            errors[name] = feature_error(invert_dense(weight, bias), reached)
    return errors
