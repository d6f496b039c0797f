"""Accountants: PLD and RDP by dp-accounting, guarded where it fails silently.

They reproduce papers, cross-check the exact Gaussian trade-off, and account for Poisson sampling.
dp-accounting clamps with ``max(0, x)``, which turns NaN into an epsilon of 0, and it reads a Renyi
divergence that was rounded to 0 as perfect privacy. Both are errors here.
"""

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from accounting.checks import ConfigError

if TYPE_CHECKING:  # imported late: dp-accounting takes longer to load than everything else here
    from dp_accounting import DpEvent, PrivacyAccountant

Accountant = Literal["pld", "rdp"]

GRID = 1e-4
"""Losses are rounded up to multiples of this, in standard deviations of the whole loss."""


def transforms_lose(steps: int) -> float:
    """Return the delta that Fourier transforms of so many steps may lose to rounding.

    1e-17 a step was seen, at 100,000 steps of dp-accounting.
    """
    return 1e-16 * steps


def gaussian_event(mu: float) -> "DpEvent":
    """Return one Gaussian release with noise multiplier 1/mu, rounded down."""
    from dp_accounting import GaussianDpEvent

    return GaussianDpEvent(math.nextafter(1 / mu, 0.0))


@lru_cache(maxsize=16)
def one_gaussian(method: Accountant, mu: float) -> "PrivacyAccountant":
    """Return an accountant of one mu-GDP Gaussian under zero-out adjacency."""
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    if not 1e-5 <= mu <= 1e4:
        raise ConfigError(
            f'mu={mu:g}: method="{method}" is reliable from 1e-5 to 1e4. Use method="exact".'
        )
    if method == "rdp":
        return _usable(RdpAccountant(neighboring_relation=_zero_out()).compose(gaussian_event(mu)))
    # The loss is N(mu^2/2, mu^2): the default grid, 1e-4 for every mu, is too coarse for a small
    # mu and needs gigabytes for a large one.
    grid = GRID * mu * max(1.0, mu / 30)
    return PLDAccountant(_zero_out(), grid).compose(gaussian_event(mu))


@lru_cache(maxsize=16)
def sampled_gaussians(
    method: Accountant, noise_multiplier: float, probability: float, steps: int
) -> "PrivacyAccountant":
    """Return an accountant of Poisson-sampled Gaussian steps under add-or-remove adjacency."""
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    event = sampled_event(noise_multiplier, probability, steps)
    if method == "rdp":
        return _usable(RdpAccountant().compose(event))
    return PLDAccountant(
        value_discretization_interval=GRID * sampled_spread(noise_multiplier, probability, steps)
    ).compose(event)


def sampled_spread(noise_multiplier: float, probability: float, steps: int) -> float:
    """Return the spread of the total loss, or more if one step's range is far wider."""
    spread = math.sqrt(steps) * probability / noise_multiplier
    hit = 10 / noise_multiplier + 0.5 / noise_multiplier**2  # ten deviations, if sampled
    widest = hit if hit > 500 else math.log1p(probability * math.expm1(hit))
    return max(spread, widest / 10)


def sampled_event(noise_multiplier: float, probability: float, steps: int) -> "DpEvent":
    """Return ``steps`` Gaussian steps on Poisson samples as dp-accounting's event."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent

    step = PoissonSampledDpEvent(probability, GaussianDpEvent(noise_multiplier))
    return SelfComposedDpEvent(step, steps)


def epsilon(accountant: "PrivacyAccountant", delta: float) -> float:
    """Return the accountant's epsilon, or raise ``ConfigError`` if it is not finite."""
    return _figure("delta", delta, float(accountant.get_epsilon(delta)))


def delta(accountant: "PrivacyAccountant", epsilon: float) -> float:
    """Return the accountant's delta, at most 1, or raise ``ConfigError`` if it is not finite."""
    # The masses of a discretised loss may add up to slightly more than 1.
    return min(1.0, _figure("epsilon", epsilon, float(accountant.get_delta(epsilon))))


def _figure(name: str, value: float, answer: float) -> float:
    if not 0 <= answer < math.inf:
        raise ConfigError(
            f"{name}={value:g}: this accountant has no finite answer (it says {answer}). "
            'Use method="exact", or "rdp" if the run is sampled.'
        )
    return answer


def _usable(accountant: "PrivacyAccountant") -> "PrivacyAccountant":
    """Refuse a Renyi curve that was lost to rounding: its epsilon would be 0."""
    if not all(divergence > 0 for divergence in accountant.rdp):
        raise ConfigError(
            "the Renyi divergence of this release is lost to rounding and would count as 0. "
            'Use method="exact" or "pld".'
        )
    return accountant


def _zero_out() -> object:
    from dp_accounting import NeighboringRelation

    return NeighboringRelation.REPLACE_SPECIAL
