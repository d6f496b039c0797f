"""Explanation: whether an update is that of given images, and if not, what is likely wrong.

An attack on an update that the true images do not explain looks for something that is not there:
it fails, or finds another image, and neither says anything about privacy. So an audit asks this
first.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.stats import chi2
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from accounting.checks import ConfigError
from attacks.observation import Observation, clipped_values, update_of
from attacks.reconstruction.batch_statistics import statistics_gap
from attacks.rounding import first_least, same
from attacks.update import LocalSteps, as_double, flat, ready

EXPLAINED = 1e-3  # relative residual that reduced precision may leave; 3 % of the norm
_CHANCE = 1e-9  # that true noise is called false
_LABELS = 100  # greatest number of labels to try instead of the given one
_EXACT = 1e-12  # residuals below it are equal: float32 leaves no less
_TIE = 4.0  # residuals within this factor are equal: a term more fits some rounding, too
_RATES = 12  # learning rates to try, each corrected by what the one before left
_MANY = 30  # values that three terms of a loss cannot match by chance
_MOST_DECAY = 10.0  # weight decay above which a fit is chance
_NEAR_WEIGHTS = 0.05  # relative squared distance from the weights before the round, of those after
_POINTS_BACK = -0.5  # cosine with the gradient, below which an update is rather a descent


@dataclass(frozen=True, slots=True)
class Explanation:
    """How well given images explain an update.

    Args:
        residual: ||u(x) - u||^2 / ||u||^2; infinite where only the observed update is zero.
        least: least residual that the stated noise leaves; 0 without noise.
        most: greatest residual that rounding and the stated noise leave.
        causes: what is likely wrong, a clause each; () where the images explain the update.
    """

    residual: float
    least: float
    most: float
    causes: tuple[str, ...] = ()

    @property
    def explained(self) -> bool:
        """Whether the residual is what rounding and the stated noise leave."""
        return self.least <= self.residual <= self.most

    @property
    def excess(self) -> float:
        """The residual relative to the bound that it should keep; above 1 it does not."""
        if self.residual < self.least:
            return self.least / max(self.residual, math.ulp(0.0))
        return self.residual / self.most

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {
            "residual": self.residual if self.residual < math.inf else None,
            "least": self.least,
            "most": self.most,
            "causes": list(self.causes),
        }


def explain(model: nn.Module, observation: Observation, x: Tensor, y: Tensor) -> Explanation:
    """Return whether the update is that of ``x`` and ``y``, and if not, what is likely wrong.

    Tried are: the other mode, another scale, a gradient in place of a change of weights, another
    label, weight decay and label smoothing. Other weights and other images cannot be told apart.

    Args:
        model: the client's architecture; its weights are taken from ``observation``.
        observation: with the clip, the noise and the local steps that somebody states.
        x: (B, C, H, W), said to be the client's images; or (B, T), its sentences.
        y: (B,) their labels; or (B, T), the tokens that a language model predicts.
    """
    said = replay(model, observation, x, y)
    seen = flat(observation.update.values())
    size = float(seen.square().sum())
    gap = float((said - seen).square().sum())
    if size == 0:
        fits = gap == 0
        clause = () if fits else ("it is zero, and that of these examples is not",)
        return Explanation(0.0 if fits else math.inf, 0.0, EXPLAINED, clause)
    noise = observation.noise_std**2
    least = noise * float(chi2.ppf(_CHANCE, len(seen))) / size
    most = noise * float(chi2.isf(_CHANCE, len(seen))) / size
    found = Explanation(gap / size, least, (math.sqrt(most) + math.sqrt(EXPLAINED)) ** 2)
    if found.explained:
        return _with_statistics(model, observation, x, found)
    return replace(found, causes=_causes(model, observation, x, y, found))


def _with_statistics(
    model: nn.Module, observation: Observation, x: Tensor, found: Explanation
) -> Explanation:
    """Return ``found``, or why the running statistics that were sent are not those of ``x``."""
    gap = statistics_gap(model, observation)
    if gap is None:
        return found
    with torch.no_grad():
        left = float(gap(as_double(x)))
    if left <= EXPLAINED:
        return found
    clause = (
        "buffers: the running statistics that were sent are not those that one batch of these "
        "images leaves; leave the buffers out of the update"
    )
    return replace(found, residual=left, least=0.0, most=EXPLAINED, causes=(clause,))


def replay(model: nn.Module, observation: Observation, x: Tensor, y: Tensor) -> Tensor:
    """Return the visible values of the update of ``x`` and ``y``, after the clip, as one vector."""
    update = update_of(ready(model, observation.training), observation, as_double(x), y)
    return clipped_values(observation, update)


def _causes(
    model: nn.Module, observation: Observation, x: Tensor, y: Tensor, found: Explanation
) -> tuple[str, ...]:
    """Return what is likely wrong; of what was tried, only what would explain the update."""
    if found.residual < found.least:
        return ("it contains less noise than the noise multiplier says",)
    if not same(replay(model, observation, x, y), replay(model, observation, x, y)):
        return ("mode: the model's forward pass is random, so that no examples explain its update",)
    weights = flat(observation.state[name] for name in observation.update)
    seen = flat(observation.update.values())
    if float((weights - seen).square().sum()) < _NEAR_WEIGHTS * float(seen.square().sum()):
        return ("it is weights, not an update: subtract those before the round (before)",)
    fits = [(left, clause) for left, clause in _fits(model, observation, x, y) if left < found.most]
    if fits:
        least = max(_EXACT, min(left for left, _ in fits))
        return (next(clause for left, clause in fits if left <= _TIE * least),)
    return (
        _descent(model, observation, x, y)
        or "other weights (of another round?), other examples, labels or scaling of the inputs, "
        "another loss, or noise that is not stated",
    )


def _fits(
    model: nn.Module, observation: Observation, x: Tensor, y: Tensor
) -> Iterator[tuple[float, str]]:
    """Yield (residual, clause) of updates with which this one may have been confused.

    The simplest come first: of those that explain it as well as the best, the first is believed.
    """
    seen = flat(observation.update.values())
    for mode, local, clause in _variants(observation):
        other = replace(observation, training=mode, local=local, clip=None)
        try:
            scale, left = _scaled(replay(model, other, x, y), seen)
        except ConfigError:  # dropout, which this mode would need
            continue
        yield left, clause + _of_scale(scale, other, observation, float(seen.norm()))
    if observation.local is not None:
        yield _another_rate(model, observation, observation.local, x, y)
        yield _exchanged(model, observation, x, y)
    yield from _another_loss(model, replace(observation, local=None, clip=None), x, y)
    if y.shape == (1,):  # not several, nor the tokens of a language model
        yield _another_label(model, observation, x, y)


def _variants(observation: Observation) -> Iterator[tuple[bool, Any, str]]:
    """Yield (training, local, clause) of updates that are easily mistaken for one another."""
    mode = observation.training
    other = f"mode: the examples explain it in {'eval' if mode else 'train'} mode"
    yield mode, observation.local, ""
    yield not mode, observation.local, other
    if observation.local is not None:
        yield mode, None, "it is a gradient, not a change of the weights"
        yield not mode, None, f"{other}, and as a gradient, not a change of the weights"


def _of_scale(scale: float, used: Observation, stated: Observation, size: float) -> str:
    """Return what a factor between the update and that of the images means."""
    joint = "; " if used.training != stated.training or used.local != stated.local else ""
    if math.isclose(scale, 1, rel_tol=0.02) and (joint or stated.clip is not None):
        return "" if joint else f"it is not clipped to a norm of {stated.clip:g}"
    times = f"{joint}it is {_figure(scale)} times the gradient"
    if used.local is None and scale < 0:
        rate = _figure(-scale)
        return f"{times}: a change of the weights after one step of learning rate {rate}"
    if used.local is not None:
        if math.isclose(scale, -1, rel_tol=0.02):
            return f"{joint}it is before - after; send after - before"
        return f"{joint}it is {_figure(scale)} times that change: another learning rate or clip"
    if scale < 1 and stated.clip is None:
        return f"{times}: clipped to its norm {_figure(size)}, or another reduction of the loss"
    return f"{times}: another reduction of the loss, or clip"


def _figure(value: float, digits: int = 3) -> str:
    """Return a number in so many digits, which its last bits do not decide: 1.125 is a tie."""
    return f"{float(f'{value:.6g}'):.{digits}g}"


def _scaled(said: Tensor, seen: Tensor) -> tuple[float, float]:
    """Return the factor that brings ``said`` nearest to ``seen``, and the residual it leaves."""
    length = float(said.square().sum())
    if length == 0:
        return 0.0, 1.0
    scale = float(said @ seen) / length
    return scale, _residual(scale * said, seen)


def _residual(said: Tensor, seen: Tensor) -> float:
    return float((said - seen).square().sum() / seen.square().sum())


def _another_label(
    model: nn.Module, observation: Observation, x: Tensor, y: Tensor
) -> tuple[float, str]:
    """Return the residual and a clause of the label of one image that explains the update best."""
    seen = flat(observation.update.values())
    net = ready(model, observation.training).double()
    with torch.no_grad():
        logits = net(as_double(x))
    labels = [torch.full_like(y, label) for label in range(min(logits.shape[1], _LABELS))]
    left = [_residual(replay(model, observation, x, label), seen) for label in labels]
    best = first_least(left)
    return left[best], f"labels: {best} explains it, not {int(y)}"


def _exchanged(
    model: nn.Module, observation: Observation, x: Tensor, y: Tensor
) -> tuple[float, str]:
    """Return the residual and a clause of weights before the round that are those after it."""
    begin = dict(observation.state)
    for name, change in observation.update.items():
        begin[name] = begin[name] + change
    other = replay(model, replace(observation, state=begin), x, y)
    left = _residual(-other, flat(observation.update.values()))
    return left, "the weights before and after the round are exchanged"


def _another_rate(
    model: nn.Module, observation: Observation, local: LocalSteps, x: Tensor, y: Tensor
) -> tuple[float, str]:
    """Return the residual that the learning rate leaves that fits best, and a clause on it."""
    seen, left, rate = flat(observation.update.values()), math.inf, local.learning_rate
    for _ in range(_RATES):
        tried = replace(observation, local=replace(local, learning_rate=rate), clip=None)
        scale, left = _scaled(replay(model, tried, x, y), seen)
        if not 0 < scale * rate < math.inf:
            return math.inf, ""
        if math.isclose(scale, 1, rel_tol=1e-6):
            break
        rate *= scale
    return left, f"the learning rate: {_figure(rate)} explains it, not {local.learning_rate:g}"


def _another_loss(
    model: nn.Module, plain: Observation, x: Tensor, y: Tensor
) -> Iterator[tuple[float, str]]:
    """Yield the residual and a clause of label smoothing, of weight decay, and of both.

    Both add to the gradient linearly, so that a least-squares fit finds them. Each is tried without
    the other, so that no share decides that is 0 but for rounding.
    """
    seen = flat(plain.update.values())
    if plain.loss is not cross_entropy or len(seen) < _MANY:
        return
    given = replay(model, plain, x, y)
    uniform = replay(model, replace(plain, loss=_uniform_loss), x, y)
    weights = flat(plain.state[name] for name in plain.update)
    for smooths, decays in ((True, False), (False, True), (True, True)):
        columns = [given, *[uniform] * smooths, *[weights] * decays]
        terms = torch.stack(columns, 1)
        shares = torch.linalg.lstsq(terms, seen[:, None]).solution[:, 0]
        total = float(shares[: 1 + smooths].sum()) or math.nan
        smoothing = float(shares[1]) / total if smooths else 0.0
        decay = float(shares[-1]) / total if decays else 0.0
        if 0 <= smoothing <= 1 and 0 <= decay <= _MOST_DECAY:
            parts = [f"label smoothing {_figure(smoothing, 2)}"] * smooths
            parts += [f"weight decay {_figure(decay, 2)}"] * decays
            clause = f"loss: cross-entropy with {' and '.join(parts)} explains it"
            yield _residual(terms @ shares, seen), clause


def _uniform_loss(logits: Tensor, _labels: Tensor) -> Tensor:
    """Return the part of a smoothed cross-entropy that every label shares."""
    return -log_softmax(logits, 1).mean()


def _descent(model: nn.Module, observation: Observation, x: Tensor, y: Tensor) -> str:
    """Return a clause on an update that is stated to be a gradient and points against it."""
    seen = flat(observation.update.values())
    gradient = replay(model, replace(observation, local=None, clip=None), x, y)
    if observation.local is not None or not bool(gradient.any()):
        return ""
    cosine = float(gradient @ seen / (gradient.norm() * seen.norm()))
    if cosine > _POINTS_BACK:
        return ""
    return (
        f"it points against the gradient (cosine {cosine:.2f}): rather a change of the weights "
        "after several local steps than a gradient"
    )
