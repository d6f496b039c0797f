"""Guarantee: what a release promises, with mu as the currency.

Every mechanism without amplification is one Gaussian, described completely by
mu = sensitivity / noise_multiplier, and mu^2 adds under composition (Dong, Roth and Su 2022,
Corollary 3.3). Epsilon, delta, rho, the Renyi curve and the attacker's success follow from it. The
methods other than ``"exact"`` reproduce papers and serve as cross-checks; they are never tighter.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

from accounting import accountants, checks, gaussian, quadrature
from accounting.checks import ConfigError
from accounting.mechanisms import Mechanism
from accounting.participation import Participation

Method = Literal["exact", "pld", "rdp"]
METHODS: tuple[str, ...] = get_args(Method)
FORMULAS: dict[Method, str] = {
    "exact": "Gaussian trade-off (Balle and Wang 2018, Theorem 8)",
    "pld": "privacy loss distribution of dp-accounting, pessimistic grid (Doroshenko et al. 2022)",
    "rdp": "Renyi DP of dp-accounting (Canonne, Kamath and Steinke 2020, Proposition 12)",
}
_TOLERANCE = 1e-3
"""Relative difference allowed between two accountants of the same curve (PLD's grid costs 1e-9)."""
_LOOSE = "rdp"  # the method whose bounds lie several per cent above the exact curve


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """The epsilon of a second accountant, compared with the reported one.

    Attributes:
        method: name of the second accountant.
        epsilon: its epsilon at the same delta.
        agree_to: relative difference between the two epsilons.
        consistent: False if the two contradict each other: two accountants of the same curve differ
            by more than 1e-3 relatively and 1e-12 absolutely, or an upper bound lies below the
            curve that it bounds.
    """

    method: str
    epsilon: float
    agree_to: float
    consistent: bool

    def __post_init__(self) -> None:
        checks.nonnegative("cross_check epsilon", self.epsilon)
        checks.nonnegative("cross_check agree_to", self.agree_to)


class Cost(ABC):
    """What a report claims, and all that follows from it; every figure is rounded up."""

    __slots__ = ()

    @abstractmethod
    def epsilon(self, delta: float) -> float:
        """Return an epsilon that holds with ``delta`` in (0, 1)."""

    def coarse_epsilon(self, delta: float) -> float:
        """Return the same, or up to 0.02 or 2 % more where that is much faster: for curves."""
        return self.epsilon(delta)

    @abstractmethod
    def advantage(self) -> float:
        """Return the most that any membership test's rates may differ by."""

    @abstractmethod
    def tpr_at_fpr(self, fpr: float) -> float:
        """Return the most that any membership test detects at ``fpr`` in (0, 1)."""


@dataclass(frozen=True, slots=True)
class Guarantee(Cost):
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
        checks.between("mu", self.mu, 1e-100, 1e100, "must lie between 1e-100 and 1e100")
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


def compare(
    method: str, epsilon: float, second_method: str, second: float, *, slack: float
) -> CrossCheck:
    """Compare two epsilons at the same delta; ``slack`` (mu) is the scale of the losses."""
    largest = max(epsilon, second)
    agree_to = abs(epsilon - second) / largest if largest else 0.0
    same = math.isclose(epsilon, second, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * slack + 1e-12)
    ordered = (method == _LOOSE and epsilon >= second) or (
        second_method == _LOOSE and second >= epsilon
    )
    return CrossCheck(second_method, second, agree_to, same or ordered)
