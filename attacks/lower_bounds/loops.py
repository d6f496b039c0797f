"""Loops: canaries among the examples of an ordinary PyTorch loop that an engine makes private.

``CanaryLoop`` wraps a network and its data set. The loop, the engine (this package's ``FTRLEngine``
or Opacus's) and their options stay the user's. A canary is an example whose gradient is known: the
wrapped network has one more layer, without influence on its output, of which canary j owns weight
j; a canary's gradient is that weight's and nothing else, longer than any clip norm, and of other
examples that layer's is zero. So canaries pass the engine's own per-example gradients, clip, sum,
noise and step, beside the examples, in the batches that the engine deals. Coins decide which of
them have a gradient at all. The weights before every batch are what the steps released of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from accounting import Guarantee, Mechanism, Participation, checks, guarantee
from accounting.checks import ConfigError
from accounting.report import up
from attacks.lower_bounds import bounds
from attacks.lower_bounds.bounds import Bound
from attacks.lower_bounds.canaries import coins, round_covariance, view
from attacks.lower_bounds.planted import sums_of_releases
from attacks.lower_bounds.replay import paired

Array = NDArray[np.float64]
_LONG = 1e12
"""Length of a canary's gradient: after division by any batch, above the clip norm."""
_MANY = 6.0
"""Standard deviations by which canaries of a sound engine are never too long."""
_SURE = 0.9999
"""Confidence of a violation by a bound, over all bounds together."""


@dataclass(frozen=True, slots=True)
class LoopAudit:
    """What the canaries of a loop prove.

    Attributes:
        claimed: the guarantee of what was stated.
        visible: share of its mu that these canaries can show, on average over their rounds.
        clipped_by: class of the optimizer whose clip they passed.
        bounds: each at the confidence that was asked for.
        faults: what contradicts the statement, a sentence each; those of a sound loop are in 1 of
            9,900 audits.
    """

    claimed: Guarantee
    visible: float
    clipped_by: str
    bounds: tuple[Bound, ...]
    faults: tuple[str, ...]

    @property
    def violation(self) -> bool:
        """Whether anything contradicts the statement."""
        return bool(self.faults)


class CanaryLoop:
    """A network and a data set with canaries, for one training loop.

    Args:
        module: the network; its output is one tensor, whose first dimension is the example.
        data: a map-style data set whose examples are tuples, of which the network gets the first.
        count: number of canaries, >= 20. They come after the examples; a fair coin of each, of the
            operating system, decides whether it has a gradient.

    Attributes:
        module: to be made private in place of the network; it takes the first of a batch.
        data: to be loaded in place of the data set.
    """

    def __init__(self, module: nn.Module, data: Any, *, count: int) -> None:  # noqa: ANN401
        checks.count("count", count, minimum=20)
        self._present = coins(count, np.random.default_rng())
        self.data: Dataset[Any] = _WithCanaries(data, self._present)
        self._watched = _Watched(module, count)
        self.module: nn.Module = self._watched

    def audit(
        self,
        optimizer: Any,  # noqa: ANN401  of Opacus's kind
        mechanism: Mechanism,
        participation: Participation,
        *,
        noise_multiplier: float,
        clip_norm: float,
        divisor: float,
        delta: float,
        confidence: float = 0.95,
    ) -> LoopAudit:
        """Score the canaries after the loop, and compare with what is stated of the engine.

        The statement: the step's gradient, times ``divisor``, is the sum of the examples'
        gradients, each clipped to ``clip_norm``, plus the mechanism's noise; an example takes part
        as ``participation`` allows, in rounds that are public.

        Args:
            optimizer: that stepped, over SGD without weight decay, at one learning rate.
            mechanism: without groups, over as many rounds as there were steps.
            participation: of an example.
            noise_multiplier: standard deviation of one draw that enters the mechanism /
                ``clip_norm``, on the scale of the sum, > 0.
            clip_norm: > 0.
            divisor: of the sum, > 0: the batch size of a loss that is a mean; 1 of a sum.
            delta: of the bounds, in (0, 1).
            confidence: of each bound, in (0, 1).

        Raises:
            ConfigError: another optimizer, another number of steps, or a canary in no step.
        """
        z = checks.positive("noise_multiplier", noise_multiplier)
        scale = checks.positive("divisor", divisor) / checks.positive("clip_norm", clip_norm)
        claimed = guarantee(mechanism, participation, noise_multiplier=z)
        rate, momentum = _of_sgd(optimizer)
        releases, patterns = self._watched.seen()
        rounds = len(releases) - 1
        if mechanism.groups is not None or mechanism.rounds != rounds:
            raise ConfigError(
                f"mechanism: must be one without groups, for the {rounds} steps that were taken."
            )
        means = sums_of_releases(releases, range(rounds), learning_rate=rate, momentum=momentum)
        sums, sent = -scale * means, patterns * self._present
        faults = _against_limits(patterns, participation)
        covariance = round_covariance(mechanism.decoder())
        scores, mus = np.empty(len(self._present)), np.empty(len(self._present))
        for pattern in np.unique(patterns, axis=1).T.clip(max=1):
            alike = ((patterns > 0) == pattern[:, None]).all(0)
            seen = view(covariance, pattern, z)
            scores[alike], mus[alike] = seen.weights @ sums[:, alike], seen.mu
        # The best estimate of what a canary adds, and of a sound one's error.
        weights = np.where(self._present, mus, 0.0)
        length, error = float(weights @ scores / (weights @ weights)), 1 / np.linalg.norm(weights)
        if length > 1 + _MANY * error:
            faults.append(f"A canary adds {length:.3g} clip norms to a sum, on average.")
        # What is left is noise, if each canary adds one clip norm in its steps.
        one = patterns[:, :1] * np.eye(1, len(scores))
        noise = paired(one, sums - sent, covariance, noise_multiplier=z)
        faults += [*noise.faults, *filter(None, [noise.off_plan])]
        mu = float(mus.mean())

        def proved(level: float) -> tuple[Bound, ...]:
            canaries: Any = {"delta": delta, "confidence": level}
            evidence = scores, self._present
            of_gdp = bounds.guesses(*evidence, claimed_mu=mu, **canaries)
            others = bounds.one_run, bounds.one_run_gdp, bounds.clopper_pearson
            return of_gdp, *(bound(*evidence, **canaries) for bound in others)

        printed = proved(confidence)
        epsilon = claimed.epsilon(delta)
        for bound in proved(1 - (1 - _SURE) / len(printed)):
            if bound.epsilon > epsilon:
                faults.append(f"{bound}; the statement says {up(epsilon)}.")
        kind = type(optimizer)
        name = f"{kind.__module__}.{kind.__qualname__}"
        return LoopAudit(claimed, mu / claimed.mu, name, printed, tuple(faults))


def _of_sgd(optimizer: Any) -> tuple[float, float]:  # noqa: ANN401
    """Return learning rate and momentum of a private optimizer's SGD."""
    inner = getattr(optimizer, "original_optimizer", None)
    groups = getattr(inner, "param_groups", [])
    plain = [g for g in groups if not any(g.get(k) for k in ("weight_decay", "nesterov"))]
    rates = {(float(g["lr"]), float(g["momentum"])) for g in plain if not g.get("dampening")}
    if type(inner) is not torch.optim.SGD or len(plain) < len(groups) or len(rates) != 1:
        raise ConfigError(
            "optimizer: must be a private one over torch.optim.SGD, of one learning rate and "
            "momentum, whose steps can be undone."
        )
    return rates.pop()


def _against_limits(patterns: NDArray[np.int64], participation: Participation) -> list[str]:
    """Name a canary that took part more often, or less far apart, than is stated."""
    for j, pattern in enumerate(patterns.T):
        steps = np.flatnonzero(pattern)
        close = len(steps) > 1 and int(np.diff(steps).min()) < participation.min_separation
        if len(steps) > participation.max_participations or close or pattern.max() > 1:
            return [
                f"Canary {j} was dealt to steps {steps.tolist()[:8]}; the statement says at most "
                f"{participation.max_participations}, {participation.min_separation} steps apart."
            ]
    return []


class _WithCanaries(Dataset[Any]):
    """A data set, and canaries after it: an example's first part becomes a pair with its number.

    The number is 0 of an example, j + 1 of canary j, and less than 0 of one that is absent.
    """

    def __init__(self, data: Any, present: NDArray[np.bool_]) -> None:  # noqa: ANN401
        self._data = data
        self._numbers = np.where(present, 1, -1) * np.arange(1, len(present) + 1)

    def __len__(self) -> int:
        return len(self._data) + len(self._numbers)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        beyond = index - len(self._data)
        first, *others = self._data[index if beyond < 0 else 0]
        number = 0 if beyond < 0 else int(self._numbers[beyond])
        return [first, torch.tensor([number])], *others


class _Watched(nn.Module):
    """The user's network, a layer of canaries, and its weights before every batch."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.network = module
        self.canaries = nn.Linear(count, 1, bias=False)
        nn.init.zeros_(self.canaries.weight)
        self._releases: list[Array] = []
        self._steps: list[NDArray[np.int64]] = []

    def forward(self, batch: Sequence[Any]) -> Any:  # noqa: ANN401
        first, numbers = batch
        number = numbers[:, 0]
        count = self.canaries.in_features
        if self.training and torch.is_grad_enabled():
            self._note(number)
        owned = functional.one_hot(number.clamp(min=0), count + 1)[:, 1:]
        added = self.canaries(owned.to(self.canaries.weight.dtype))
        return _Sent.apply(self.network(first), added, number)  # type: ignore[no-untyped-call]

    def _note(self, numbers: Tensor) -> None:
        weights = self.canaries.weight.detach().cpu().double().numpy().ravel().copy()
        # a batch in several parts is one step, and noise changes the weights in each
        if not self._releases or not np.array_equal(weights, self._releases[-1]):
            self._releases.append(weights)
            self._steps.append(np.zeros(len(weights) + 1, dtype=np.int64))
        np.add.at(self._steps[-1], numbers.abs().cpu().numpy(), 1)

    def seen(self) -> tuple[Array, NDArray[np.int64]]:
        """Return the released weights, (n + 1, count), and how often each came in a step."""
        last = self.canaries.weight.detach().cpu().double().numpy().ravel()
        if not self._steps or not np.stack(self._steps)[:, 1:].any(0).all():
            raise ConfigError("loop: some canaries were in no step. Train over all of the data.")
        return np.stack([*self._releases, last]), np.stack(self._steps)[:, 1:]


class _Sent(torch.autograd.Function):
    """Passes the output on; of a canary, the gradient is that of its own weight alone."""

    @staticmethod
    def forward(context: Any, output: Tensor, added: Tensor, number: Tensor) -> Tensor:  # noqa: ANN401
        context.save_for_backward(number)
        context.shape = added.shape
        return output.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ANN401
        (number,), (gradient,) = context.saved_tensors, gradients
        is_example = (number == 0).view(-1, *[1] * (gradient.dim() - 1))
        added = (number > 0).to(gradient.dtype)[:, None] * _LONG
        return gradient * is_example, added, None
