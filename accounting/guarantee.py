"""Guarantee: what a release promises, with mu as the currency.

Every unamplified mechanism here is one Gaussian: mu = sensitivity / noise_multiplier says all
there is to say, and mu^2 adds under composition (Dong, Roth and Su 2022, Corollary 3.3). Epsilon,
delta, rho and the attacker's advantage are read off it. ``method="rdp"`` is there to reproduce
papers: it is never tighter than ``"exact"``.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from accounting import checks, gaussian
from accounting.mechanisms import Mechanism
from accounting.participation import Participation

Method = Literal["exact", "rdp"]
METHODS: tuple[str, ...] = get_args(Method)


@dataclass(frozen=True, slots=True)
class Guarantee:
    """A mu-GDP guarantee for one client, zero-out adjacency.

    Args:
        mu: sensitivity / noise standard deviation, > 0; smaller is more private.
        method: how epsilon and delta are computed from it: "exact" (the Gaussian trade-off), or
            "rdp" (Renyi DP with dp-accounting's orders and its improved conversion).

    >>> Guarantee(mu=1.0).epsilon(delta=1e-5)  # doctest: +ELLIPSIS
    4.37717...
    """

    mu: float
    method: Method = "exact"

    def __post_init__(self) -> None:
        checks.positive("mu", self.mu)
        checks.choice("method", self.method, METHODS)

    @property
    def rho(self) -> float:
        """Zero-concentrated DP parameter, mu^2 / 2 (Bun and Steinke 2016)."""
        return math.nextafter(self.mu * self.mu / 2, math.inf)

    @property
    def effective_noise_multiplier(self) -> float:
        """1 / mu: the one noise figure that is comparable across mechanisms."""
        return 1 / self.mu

    def epsilon(self, delta: float) -> float:
        """Return the least epsilon that holds with ``delta`` in (0, 1), rounded up."""
        delta = checks.probability("delta", delta)
        if self.method == "rdp":
            return float(_rdp(self.mu).get_epsilon(delta))
        return gaussian.epsilon(self.mu, delta)

    def delta(self, epsilon: float) -> float:
        """Return the least delta that holds with ``epsilon`` >= 0, rounded up."""
        epsilon = checks.nonnegative("epsilon", epsilon)
        if self.method == "rdp":
            return float(_rdp(self.mu).get_delta(epsilon))
        return gaussian.delta(self.mu, epsilon)

    def advantage(self) -> float:
        """Most that true-positive rate minus false-positive rate of any membership test can be."""
        return gaussian.delta(self.mu, 0.0)

    def compose(self, other: "Guarantee") -> "Guarantee":
        """Return the guarantee of both releases together: mu^2 adds.

        >>> Guarantee(mu=3.0).compose(Guarantee(mu=4.0)).mu
        5.000000000000001
        """
        total = math.nextafter(math.hypot(self.mu, other.mu), math.inf)
        return Guarantee(total, "rdp" if "rdp" in (self.method, other.method) else "exact")


def guarantee(
    mechanism: Mechanism,
    participation: Participation,
    *,
    noise_multiplier: float,
    method: Method = "exact",
) -> Guarantee:
    """Return what releasing every iterate of a run costs one client.

    Args:
        mechanism: the encoder whose noise the server adds.
        participation: how often one client may take part.
        noise_multiplier: standard deviation of one i.i.d. Gaussian coordinate that enters the
            mechanism / clip_norm, on the scale of the sum; > 0. Never relative to the mechanism's
            sensitivity.
        method: see ``Guarantee``.

    Raises:
        ConfigError: a value out of range, or rounds that differ.

    >>> from accounting import BinaryTree
    >>> run = guarantee(BinaryTree(1600), Participation(1600), noise_multiplier=1.13)
    >>> round(run.epsilon(delta=1e-6), 3)
    17.667
    """
    z = checks.positive(
        "noise_multiplier", noise_multiplier, hint="Without noise there is no guarantee to report."
    )
    return Guarantee(mu_upper(mechanism.sensitivity(participation).squared, z), method)


def mu_upper(sensitivity_squared: float, noise_multiplier: float) -> float:
    """Return sqrt(sensitivity_squared) / noise_multiplier; two roundings, so two units up."""
    quotient = math.sqrt(sensitivity_squared) / noise_multiplier
    return math.nextafter(math.nextafter(quotient, math.inf), math.inf)


@lru_cache(maxsize=64)
def _rdp(mu: float) -> Any:  # noqa: ANN401  dp-accounting ships no types
    """An accountant that has seen one Gaussian release; imported late, it takes a second."""
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    return RdpAccountant().compose(GaussianDpEvent(1 / mu))
