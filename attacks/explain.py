"""Explanation: whether an update is that of given examples, and if not, what is likely wrong.

An attack on an update that the true examples do not explain looks for something that is not there:
it fails, or finds another example, and neither says anything about privacy. So an audit asks this
first.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from scipy.stats import chi2
from torch import Tensor, nn

from accounting.checks import ConfigError
from attacks.observation import Observation, sender, visible_parts
from attacks.reconstruction.batch_statistics import statistics_gap
from attacks.transforms import KINDS, Transform
from attacks.update import LocalSteps, as_double, flat, ready

EXPLAINED = 1e-3  # relative residual that reduced precision may leave; 3 % of the norm
_CHANCE = 1e-9  # that true noise is called false
_TRIED = 6  # orders of the examples
_ORDERS = 2.0  # times the squared distance of two orders, which another one may have at most
_EXACT = 1e-12  # residuals below it are equal: float32 leaves no less
_TIE = 4.0  # residuals within this factor are equal: another mode fits some rounding, too
_NEAR_WEIGHTS = 0.05  # relative squared distance from the weights before the round, of those after


@dataclass(frozen=True, slots=True)
class Explanation:
    """How well given examples explain an update.

    Args:
        residual: ||u(x) - u||^2 / ||u||^2; infinite where only the observed update is zero.
        least: least residual that the stated noise leaves; 0 without noise.
        most: greatest residual that rounding and the stated noise leave.
        causes: what is likely wrong; () where the examples explain the update.
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
        residual = self.residual if self.residual < math.inf else None
        return asdict(self) | {"residual": residual, "causes": list(self.causes)}


def explain(model: nn.Module, observation: Observation, x: Tensor, y: Tensor) -> Explanation:
    """Return whether the update is that of ``x`` and ``y``, and if not, what is likely wrong.

    Tried are the other mode, another scale, and a gradient in place of a change of weights. Other
    weights and other examples cannot be told apart.
    The observation says with which clip, noise and local steps somebody states that it was made, of
    images x (B, C, H, W) and labels (B,), or of sentences (B, T) and what is predicted of them.
    """

    def replay(order: torch.Generator | None = None, **changes: Any) -> Tensor:  # noqa: ANN401
        client = replace(observation, **changes)
        net, send = ready(model, client.training), sender(client, checked=True)
        return flat(visible_parts(net, client, as_double(x), y, send, order=order).values())

    u = flat(observation.update.values())
    size = float(u @ u)
    gap = float((replay() - u).square().sum())
    if size == 0:
        causes = () if gap == 0 else ("it is zero, and that of these examples is not",)
        return Explanation(math.inf if gap else 0.0, 0.0, EXPLAINED, causes)
    noise = observation.noise_std**2
    low = noise * float(chi2.ppf(_CHANCE, len(u))) / size
    high = noise * float(chi2.isf(_CHANCE, len(u))) / size
    near, apart = _shuffled(observation, replay, u)
    gap, room = min(gap, near), max(EXPLAINED, _ORDERS * apart / size)
    explanation = Explanation(gap / size, low, (math.sqrt(high) + math.sqrt(room)) ** 2)
    if not explanation.explained:
        return replace(explanation, causes=(_cause(observation, replay, u, explanation),))
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


def _shuffled(stated: Observation, replay: Callable[..., Tensor], u: Tensor) -> tuple[float, float]:
    """Return the least squared distance of ``u`` over some orders, and the greatest of two orders.

    Nobody is told in which order a client shuffled its local batches.
    """
    if stated.local is None or stated.local.batch is None:
        return math.inf, 0.0
    orders = [replay(torch.Generator().manual_seed(2 + seed)) for seed in range(_TRIED)]
    pairs = itertools.combinations(orders, 2)
    return (
        min(float((replayed - u).square().sum()) for replayed in orders),
        max(float((a - b).square().sum()) for a, b in pairs),
    )


def _cause(
    stated: Observation, replay: Callable[..., Tensor], u: Tensor, explanation: Explanation
) -> str:
    """Say what is likely wrong; of what was tried, only what would explain the update."""
    if explanation.residual < explanation.least:
        return "it contains less noise than the noise multiplier says"
    weights = flat(stated.state[name] for name in stated.update)
    if _gap(weights, u) < _NEAR_WEIGHTS:
        return "it is weights, not an update: subtract those before the round (before)"
    looks = [] if stated.transform.steps else _transforms(stated, replay)
    if declared := [look for look in looks if _gap(replay(transform=look), u) <= EXPLAINED]:
        return f"a transform that is not declared: {declared[0]} (--transform {declared[0]})"
    fits = []
    for training, local, clause in _variants(stated):
        try:
            replayed = replay(training=training, local=local, clip=None)
        except ConfigError:  # dropout, which this mode would need
            continue
        scale = float(replayed @ u) / max(float(replayed.square().sum()), 1e-300)
        residual = _gap(scale * replayed, u)
        if residual < explanation.most:
            fits.append((residual, clause + _of_scale(stated, scale, local, clause)))
    if not fits:
        names = " or ".join(map(str, looks))
        return (
            f"{names and f'a transform that is not declared ({names}, by its looks); '}"
            "other weights (of another round?), other examples, labels or scaling of the inputs, "
            "another loss or learning rate, random layers, or noise that is not stated"
        )
    best = max(_EXACT, min(residual for residual, _ in fits))
    return next(clause for residual, clause in fits if residual <= _TIE * best)


def _gap(other: Tensor, u: Tensor) -> float:
    return float((other - u).square().sum() / u.square().sum())


def _transforms(stated: Observation, replay: Callable[..., Tensor]) -> list[Transform]:
    """Return the transforms that the update looks to have had."""
    sizes = [value.numel() for value in stated.update.values()]
    parts = zip(stated.update.items(), torch.split(replay(clip=None), sizes), strict=True)
    plain = {name: part.view_as(value) for (name, value), part in parts}
    looks = [kind.recognised(stated.update, plain) for kind in KINDS.values()]
    return [transform for transform in looks if transform is not None]


def _variants(stated: Observation) -> Iterator[tuple[bool, LocalSteps | None, str]]:
    """Yield (training, local, clause) of updates that are easily mistaken for one another."""
    mode, local = stated.training, stated.local
    other = f"mode: the examples explain it in {'eval' if mode else 'train'} mode"
    gradient = "it is a gradient, not a change of the weights"
    yield mode, local, ""
    yield not mode, local, other
    if local is not None:
        yield mode, None, gradient
        yield not mode, None, f"{other}; {gradient}"


def _of_scale(stated: Observation, scale: float, local: LocalSteps | None, clause: str) -> str:
    """Say what a factor between the update and that of the examples means."""
    joint = "; " if clause else ""
    if math.isclose(scale, 1, rel_tol=0.02) and (clause or stated.clip is not None):
        return "" if clause else f"it is not clipped to a norm of {stated.clip:g}"
    # Six digits first: the last bits of a scale must not decide how 1.125 is rounded.
    times = f"{joint}it is {float(f'{scale:.6g}'):.3g} times"
    if local is not None:
        if math.isclose(scale, -1, rel_tol=0.02):
            return f"{joint}it is before - after; send after - before"
        return f"{times} that change: another learning rate or clip"
    if scale < 0:
        return f"{times} the gradient: a change of the weights after a step of learning rate"
    return f"{times} the gradient: another loss or reduction of it, or a clip"
