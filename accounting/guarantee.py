"""Guarantee: what a release promises, with mu as the currency.

Every mechanism without amplification is one Gaussian, described completely by
mu = sensitivity / noise_multiplier, and mu^2 adds under composition (Dong, Roth and Su 2022,
Corollary 3.3). Epsilon, delta, rho, the Renyi curve and the attacker's success follow from it. The
methods other than ``"exact"`` reproduce papers and serve as cross-checks; they are never tighter.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from accounting import accountants, checks, gaussian, quadrature
from accounting.checks import ConfigError
from accounting.cross_check import CrossCheck, compare
from accounting.mechanisms import Mechanism
from accounting.participation import Participation

Method = Literal["exact", "pld", "rdp"]
METHODS: tuple[str, ...] = get_args(Method)
FORMULAS: dict[Method, str] = {
    "exact": "Gaussian trade-off (Balle and Wang 2018, Theorem 8)",
    "pld": "privacy loss distribution of dp-accounting, pessimistic grid (Doroshenko et al. 2022)",
    "rdp": "Renyi DP of dp-accounting (Canonne, Kamath and Steinke 2020, Proposition 12)",
}


@dataclass(frozen=True, slots=True)
class Guarantee:
    """A mu-GDP guarantee.

    Args:
        mu: sensitivity / noise standard deviation, > 0; smaller is more private.
        method: how epsilon and delta are computed from mu: "exact" (the Gaussian trade-off), or by
            dp-accounting and never below exact: "pld" (privacy loss distribution on a grid) or
            "rdp" (Renyi DP at dp-accounting's orders, with its improved conversion; that of zCDP
            is the same for a Gaussian).

    Adjacency is zero-out: a client's updates are replaced by zero; cohort, schedule and divisor
    stay. Replacing them by another client's doubles mu. Add-or-remove is not claimed.

    >>> Guarantee(mu=1.0).epsilon(delta=1e-5)  # doctest: +ELLIPSIS
    4.37717...
    """

    mu: float
    method: Method = "exact"

    def __post_init__(self) -> None:
        if not 1e-100 <= checks.positive("mu", self.mu) <= 1e100:
            raise ConfigError(f"mu={self.mu:g}: must lie between 1e-100 and 1e100.")
        checks.choice("method", self.method, METHODS)

    @property
    def rho(self) -> float:
        """Zero-concentrated DP parameter, mu^2 / 2 (Bun and Steinke 2016), rounded up."""
        return math.nextafter(self.mu * self.mu / 2, math.inf)

    @property
    def effective_noise_multiplier(self) -> float:
        """1 / mu, rounded down: the one noise figure that is comparable across mechanisms."""
        return math.nextafter(1 / self.mu, 0.0)

    def epsilon(self, delta: float) -> float:
        """Return the least epsilon that holds with ``delta`` in (0, 1), rounded up."""
        delta = checks.probability("delta", delta)
        exact = gaussian.epsilon(self.mu, delta)
        if self.method == "exact":
            return exact
        accountant = accountants.one_gaussian(self.method, self.mu)
        return max(exact, accountants.epsilon(accountant, delta))

    def delta(self, epsilon: float) -> float:
        """Return the least delta that holds with ``epsilon`` >= 0, rounded up."""
        epsilon = checks.nonnegative("epsilon", epsilon)
        exact = gaussian.delta(self.mu, epsilon)
        if self.method == "exact":
            return exact
        accountant = accountants.one_gaussian(self.method, self.mu)
        return max(exact, accountants.delta(accountant, epsilon))

    def advantage(self) -> float:
        """Return the greatest true-positive minus false-positive rate of any membership test."""
        return gaussian.delta(self.mu, 0.0)

    def tpr_at_fpr(self, fpr: float) -> float:
        """Return the greatest true-positive rate of any membership test, rounded up.

        Args:
            fpr: the false-positive rate of the test, in (0, 1).

        >>> round(Guarantee(mu=1.0).tpr_at_fpr(0.01), 4)
        0.0924
        """
        return gaussian.true_positive_rate(self.mu, checks.probability("fpr", fpr))

    def compose(self, other: "Guarantee") -> "Guarantee":
        """Return the guarantee of both releases together: mu^2 adds.

        >>> Guarantee(mu=3.0).compose(Guarantee(mu=4.0)).mu
        5.000000000000001
        """
        if not isinstance(other, Guarantee):
            raise ConfigError(f"{type(other).__name__}: add-or-remove and zero-out do not compose.")
        total = math.nextafter(math.hypot(self.mu, other.mu), math.inf)
        loosest = max(self.method, other.method, key=METHODS.index)
        return Guarantee(total, loosest)

    def cross_check(self, delta: float) -> CrossCheck:
        """Compare ``epsilon(delta)`` with an accountant that shares no code with this one."""
        first, second = self.epsilon(delta), quadrature.epsilon(self.mu, delta)
        return compare(self.method, first, "quadrature", second, slack=self.mu)


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

    >>> from accounting import BinaryTree
    >>> run = guarantee(BinaryTree(1600), Participation(1600), noise_multiplier=1.13)
    >>> round(run.epsilon(delta=1e-6), 3)
    17.667
    """
    return Guarantee(
        mu_upper(mechanism.sensitivity(participation).squared, noise_multiplier), method
    )


def mu_upper(sensitivity_squared: float, noise_multiplier: float) -> float:
    """Return sqrt(sensitivity_squared) / noise_multiplier, rounded up after each operation."""
    z = checks.positive(
        "noise_multiplier", noise_multiplier, hint="Without noise there is no guarantee to report."
    )
    return _up(_up(math.sqrt(sensitivity_squared) / z))


def _up(value: float) -> float:
    return math.nextafter(value, math.inf)
