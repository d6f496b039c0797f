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
    case = _Case(model, observation, x, y)
    u = case.update
    size = float(u @ u)
    gap = float((case.replay() - u).square().sum())
    if size == 0:
        causes = () if gap == 0 else ("it is zero, and that of these examples is not",)
        return Explanation(math.inf if gap else 0.0, 0.0, EXPLAINED, causes)
    noise = observation.noise_std**2
    low = noise * float(chi2.ppf(_CHANCE, len(u))) / size
    high = noise * float(chi2.isf(_CHANCE, len(u))) / size
    explanation = Explanation(gap / size, low, (math.sqrt(high) + math.sqrt(EXPLAINED)) ** 2)
    if not explanation.explained:
        return replace(explanation, causes=(case.cause(explanation),))
    statistics = statistics_gap(model, observation)
    with torch.no_grad():
        left_over = 0.0 if statistics is None else float(statistics(as_double(x)))
    if left_over <= EXPLAINED:
        return explanation
    clause = (
        "buffers: the running statistics that were sent are not those that one batch of these "
        "images leaves; leave the buffers out of the update"
    )
    return Explanation(left_over, 0.0, EXPLAINED, (clause,))


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """An update, as somebody states that it came about, and the examples said to explain it."""

    model: nn.Module
    stated: Observation
    x: Tensor
    y: Tensor

    @property
    def update(self) -> Tensor:
        return flat(self.stated.update.values())

    @property
    def weights(self) -> Tensor:
        return flat(self.stated.state[name] for name in self.stated.update)

    def replay(self, y: Tensor | None = None, **changes: Any) -> Tensor:  # noqa: ANN401
        """Return the visible update of the examples, had the client been as ``changes`` say."""
        observed = replace(self.stated, **changes) if changes else self.stated
        net = ready(self.model, observed.training)
        update = update_of(net, observed, as_double(self.x), self.y if y is None else y)
        return clipped_values(observed, update)

    def residual(self, replayed: Tensor) -> float:
        u = self.update
        return float((replayed - u).square().sum() / u.square().sum())

    def scaled(self, replayed: Tensor) -> tuple[float, float]:
        """Return the factor that brings a vector nearest to the update, and the residual then."""
        length = float(replayed.square().sum())
        if length == 0:
            return 0.0, 1.0
        scale = float(replayed @ self.update) / length
        return scale, self.residual(scale * replayed)

    def cause(self, explanation: Explanation) -> str:
        """Say what is likely wrong; of what was tried, only what would explain the update."""
        if explanation.residual < explanation.least:
            return "it contains less noise than the noise multiplier says"
        if not same(self.replay(), self.replay()):
            return (
                "mode: the model's forward pass is random, so that no examples explain its update"
            )
        if self.residual(self.weights) < _NEAR_WEIGHTS:
            return "it is weights, not an update: subtract those before the round (before)"
        fits = [
            (residual, clause) for residual, clause in self.fits() if residual < explanation.most
        ]
        if fits:
            best = max(_EXACT, min(residual for residual, _ in fits))
            return next(clause for residual, clause in fits if residual <= _TIE * best)
        return self.descent() or (
            "other weights (of another round?), other examples, labels or scaling of the inputs, "
            "another loss, or noise that is not stated"
        )

    def fits(self) -> Iterator[tuple[float, str]]:
        """Yield (residual, clause) of updates with which this one may have been confused.

        The simplest come first: of those that explain it as well as the best, the first is
        believed.
        """
        for mode, local, clause in self.variants():
            try:
                scale, residual = self.scaled(self.replay(training=mode, local=local, clip=None))
            except ConfigError:  # dropout, which this mode would need
                continue
            yield residual, clause + self.of_scale(scale, mode, local)
        if self.stated.local is not None:
            yield self.another_rate(self.stated.local)
            yield self.exchanged()
        yield from self.another_loss()
        if self.y.shape == (1,):  # not several, nor the tokens of a language model
            yield self.another_label()

    def variants(self) -> Iterator[tuple[bool, LocalSteps | None, str]]:
        """Yield (training, local, clause) of updates that are easily mistaken for one another."""
        mode, local = self.stated.training, self.stated.local
        other = f"mode: the examples explain it in {'eval' if mode else 'train'} mode"
        yield mode, local, ""
        yield not mode, local, other
        if local is not None:
            yield mode, None, "it is a gradient, not a change of the weights"
            yield not mode, None, f"{other}, and as a gradient, not a change of the weights"

    def of_scale(self, scale: float, mode: bool, local: LocalSteps | None) -> str:
        """Say what a factor between the update and that of the images means."""
        stated = self.stated
        joint = "; " if mode != stated.training or local != stated.local else ""
        if math.isclose(scale, 1, rel_tol=0.02) and (joint or stated.clip is not None):
            return "" if joint else f"it is not clipped to a norm of {stated.clip:g}"
        times = f"{joint}it is {_figure(scale)} times the gradient"
        if local is None and scale < 0:
            rate = _figure(-scale)
            return f"{times}: a change of the weights after one step of learning rate {rate}"
        if local is not None:
            if math.isclose(scale, -1, rel_tol=0.02):
                return f"{joint}it is before - after; send after - before"
            return f"{joint}it is {_figure(scale)} times that change: another learning rate or clip"
        if scale < 1 and stated.clip is None:
            norm = _figure(float(self.update.norm()))
            return f"{times}: clipped to its norm {norm}, or another reduction of the loss"
        return f"{times}: another reduction of the loss, or clip"

    def another_label(self) -> tuple[float, str]:
        """Return the residual and a clause of the label of one image that fits best."""
        with torch.no_grad():
            logits = ready(self.model, self.stated.training).double()(as_double(self.x))
        labels = [torch.full_like(self.y, k) for k in range(min(logits.shape[1], _LABELS))]
        residuals = [self.residual(self.replay(label)) for label in labels]
        best = first_least(residuals)
        return residuals[best], f"labels: {best} explains it, not {int(self.y)}"

    def exchanged(self) -> tuple[float, str]:
        """Return the residual and a clause of weights before the round that are those after it."""
        state, update = self.stated.state, self.stated.update
        begin = {**state, **{name: state[name] + change for name, change in update.items()}}
        clause = "the weights before and after the round are exchanged"
        return self.residual(-self.replay(state=begin)), clause

    def another_rate(self, local: LocalSteps) -> tuple[float, str]:
        """Return the residual that the learning rate leaves that fits best, and a clause on it."""
        residual, rate = math.inf, local.learning_rate
        for _ in range(_RATES):
            steps = replace(local, learning_rate=rate)
            scale, residual = self.scaled(self.replay(local=steps, clip=None))
            if not 0 < scale * rate < math.inf:
                return math.inf, ""
            if math.isclose(scale, 1, rel_tol=1e-6):
                break
            rate *= scale
        return (
            residual,
            f"the learning rate: {_figure(rate)} explains it, not {local.learning_rate:g}",
        )

    def another_loss(self) -> Iterator[tuple[float, str]]:
        """Yield the residual and a clause of label smoothing, of weight decay, and of both.

        Both add to the gradient linearly, so that a least-squares fit finds them. Each is tried
        without the other, so that no share decides that is 0 but for rounding.
        """
        u = self.update
        if self.stated.loss is not cross_entropy or len(u) < _MANY:
            return
        plain: dict[str, Any] = {"local": None, "clip": None}
        given, uniform = self.replay(**plain), self.replay(**plain, loss=_uniform_loss)
        for smooths, decays in ((True, False), (False, True), (True, True)):
            terms = torch.stack([given, *[uniform] * smooths, *[self.weights] * decays], 1)
            shares = torch.linalg.lstsq(terms, u[:, None]).solution[:, 0]
            total = float(shares[: 1 + smooths].sum()) or math.nan
            smoothing = float(shares[1]) / total if smooths else 0.0
            decay = float(shares[-1]) / total if decays else 0.0
            if 0 <= smoothing <= 1 and 0 <= decay <= _MOST_DECAY:
                parts = [f"label smoothing {_figure(smoothing, 2)}"] * smooths
                parts += [f"weight decay {_figure(decay, 2)}"] * decays
                clause = f"loss: cross-entropy with {' and '.join(parts)} explains it"
                yield self.residual(terms @ shares), clause

    def descent(self) -> str:
        """Return a clause on an update that is stated to be a gradient and points against it."""
        if self.stated.local is not None:
            return ""
        gradient = self.replay(clip=None)
        cosine = float(torch.cosine_similarity(gradient, self.update, 0, eps=1e-300))
        if cosine > _POINTS_BACK:
            return ""
        return (
            f"it points against the gradient (cosine {cosine:.2f}): rather a change of the weights "
            "after several local steps than a gradient"
        )


def _figure(value: float, digits: int = 3) -> str:
    """Return a number in so many digits, which its last bits do not decide: 1.125 is a tie."""
    return f"{float(f'{value:.6g}'):.{digits}g}"


def _uniform_loss(logits: Tensor, _labels: Tensor) -> Tensor:
    """Return the part of a smoothed cross-entropy that every label shares."""
    return -log_softmax(logits, 1).mean()
