r"""Examples sampled on their own, under a guarantee for the user who has several of them.

Each example joins a step with probability q, and its gradient is clipped (example-level sampling of
Charles et al. 2024, arXiv 2401.10294). The unit is a user with at most G examples, under zero-out
adjacency: their gradients are replaced by zero. If k of them were sampled, they add up to k clip
norms at most, in whatever direction. So the theorem of ``docs/concepts/sampling.md``, with k in
place of the 0 or 1 of a member, says that a step is dominated by

    P = sum_k w_k N(k / z, 1)   with the user,   Q = N(0, 1)   without,    k ~ Binomial(G, q),

and steps, whose draws are independent, by the product. With fewer examples some gradients are zero.
The likelihood ratio L(x) = sum_k w_k exp(k x / z - k^2 / (2 z^2)) grows with x, so that with
L(x_e) = e^epsilon

    delta_remove = P(x > x_e) - e^epsilon Q(x > x_e),
    delta_add    = Q(x < x_-e) - e^epsilon P(x < x_-e),

at epsilons of any sign; both are known at every epsilon, and a step composes by its profile
(``accounting.composed``). At the edge the densities of P and e^epsilon Q agree, so that an error of
x_e costs its square.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from accounting import accountants, checks
from accounting.checks import ConfigError
from accounting.composed import BEYOND, Amplified, reach_of
from accounting.guarantee import mu_upper
from accounting.report import Assumption
from accounting.sensitivity import Array
from accounting.subsampled import sampling_assumptions

_MOST_EXAMPLES = 1000
_ROUNDED = 2.0**-42
"""Relative error of what is subtracted, with room: (1 - q)^1000 has a thousand roundings of one."""
_FAR = 38.0  # standard deviations beyond which a float has no mass
_MOST_STEPS = 100  # of Newton's method; three or four are usual


@dataclass(frozen=True, slots=True)
class ExampleSampling:
    """Each example joins a step on its own; a user, who is the unit, has several.

    Args:
        expected_batch: expected number of examples per step, > 0 and at most ``examples``; the
            public constant that sums are divided by.
        examples: number of examples to sample from, of all users, >= 1; public.
        per_user: most examples of one user, 1 to 1,000.
    """

    expected_batch: float
    examples: int
    per_user: int

    def __post_init__(self) -> None:
        checks.positive("expected_batch", self.expected_batch)
        if not self.expected_batch <= checks.count("examples", self.examples):
            raise ConfigError(
                f"expected_batch={self.expected_batch:g}: at most all examples, {self.examples}, "
                "can join a step."
            )
        checks.count("per_user", self.per_user, maximum=_MOST_EXAMPLES)

    @property
    def probability(self) -> float:
        """Probability that an example joins a step, rounded up."""
        return min(1.0, math.nextafter(self.expected_batch / self.examples, 1.0))


@dataclass(frozen=True)
class UserGuarantee(Amplified):
    """The guarantee of users of whom each example is sampled on its own.

    Args:
        noise_multiplier: noise standard deviation on the sum / clip norm of one example, 1e-2 to
            1e4.
        probability: probability that a step samples a given example, in (0, 1].
        per_user: most examples of one user, 1 to 1,000.
        steps: number of steps, 1 to a million.

    >>> one, two = (UserGuarantee(4.0, 0.01, per_user=n, steps=100) for n in (1, 2))
    >>> one.epsilon(1e-6) < two.epsilon(1e-6) < 1
    True
    """

    noise_multiplier: float
    probability: float
    per_user: int
    steps: int

    def __post_init__(self) -> None:
        covered = "several examples of one user are accounted for from 0.01 to 10000"
        checks.between("noise_multiplier", self.noise_multiplier, 1e-2, 1e4, covered)
        checks.rate("probability", self.probability)
        checks.count("per_user", self.per_user, maximum=_MOST_EXAMPLES)
        checks.count("steps", self.steps, maximum=checks.MOST_ROUNDS)

    @property
    def mu(self) -> float:
        """If it is known which examples were sampled, rounded up."""
        return mu_upper(float(self.steps * self.per_user**2), self.noise_multiplier)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The conditions of the amplification, besides clipping and secret noise."""
        return sampling_assumptions(
            "sampling",
            f"every step samples each example on its own with probability {self.probability:g}, "
            f"and no user has more than {self.per_user} examples",
            sees="which examples were sampled",
            public="the probability and the divisor are public constants",
        )

    def removed(self, epsilons: Array) -> Array:
        """Return upper bounds on delta_remove of one step, at epsilons of any sign."""
        from scipy.special import ndtr

        edge = self._edges(epsilons)
        first = sum(w * ndtr(shift - edge) for w, shift in self._mixture)
        return _above(first, np.exp(epsilons) * ndtr(-edge))

    def added(self, epsilons: Array) -> Array:
        """Return upper bounds on delta_add of one step, at epsilons of any sign."""
        from scipy.special import ndtr

        edge = self._edges(-epsilons)
        second = sum(w * ndtr(edge - shift) for w, shift in self._mixture)
        return _above(ndtr(edge), np.exp(epsilons) * second)

    @cached_property
    def reach(self) -> float:
        """Loss of one step beyond which it counts as infinite, as there is hardly any mass."""
        least = BEYOND / self.steps + 2 * accountants.transforms_lose(1)
        return reach_of((self.removed, self.added), 1e-3 / self.noise_multiplier, least)

    @property
    def spread(self) -> float:
        """About one standard deviation of the loss of all steps, or more if one reaches far."""
        alone = math.sqrt(self.steps) * self.per_user * self.probability / self.noise_multiplier
        return max(alone, self.reach / 10)

    @cached_property
    def _mixture(self) -> list[tuple[float, float]]:
        """Chances that 0, 1, ... examples are sampled, and the means then; those that floats have.

        >>> UserGuarantee(2.0, 0.5, per_user=2, steps=1)._mixture
        [(0.25, 0.0), (0.5, 0.5), (0.25, 1.0)]
        """
        n, q, z = self.per_user, self.probability, self.noise_multiplier
        chances = [math.comb(n, k) * q**k * (1 - q) ** (n - k) for k in range(n + 1)]
        return [(w, k / z) for k, w in enumerate(chances) if w]

    def _edges(self, epsilons: Array) -> Array:
        """Return x where the logarithm of the likelihood ratio is epsilon."""
        x = np.linspace(-_FAR, _FAR + self._mixture[-1][1], 20_001)
        above = np.searchsorted(self._loss(x)[0], epsilons)
        edges = x[np.minimum(above, len(x) - 1)]
        # The loss is convex in x, so that Newton's steps from above stay above.
        for _ in range(_MOST_STEPS):
            loss, slope = self._loss(edges)
            step = np.maximum(loss - epsilons, 0.0) / np.maximum(slope, 1e-300)
            step = np.minimum(step, edges + _FAR)
            edges = edges - step
            if step.max() < 1e-9:
                return edges
        raise ConfigError("this mixture of Gaussians has no edges in floats; use more noise.")

    def _loss(self, x: Array) -> tuple[Array, Array]:
        """Return log L at x, and its derivative."""
        total, slopes = np.zeros_like(x), np.zeros_like(x)
        largest = np.max([math.log(w) + m * x - m * m / 2 for w, m in self._mixture], axis=0)
        for w, m in self._mixture:
            term = np.exp(math.log(w) + m * x - m * m / 2 - largest)
            total += term
            slopes += m * term
        return largest + np.log(total), slopes / total


def _above(first: Array, second: Array) -> Array:
    """Return a difference, rounded up."""
    rounded = np.maximum(first - second, 0.0) + _ROUNDED * (first + second)
    return np.minimum(rounded + accountants.transforms_lose(1), 1.0)
