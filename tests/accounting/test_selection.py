"""Private selection: its price against exact random cases, an attack, and published figures."""

import bisect
import dataclasses
import functools
import itertools
import json
import math
import secrets
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray
from scipy import stats
from scipy.optimize import brentq

from accounting import (
    BinomialRuns,
    ComposedGuarantee,
    ConfigError,
    Guarantee,
    NegativeBinomialRuns,
    PoissonRuns,
    SelectedGuarantee,
    StatedGuarantee,
    gaussian,
    most_mu,
)
from accounting.selection import (
    Array,
    Repetitions,
    _profile,
    draw,
    fields_of,
    quantile,
    selected_of,
)

EPSILONS = (0.0, 0.3, 1.0, 2.5)
KINDS: Sequence[Repetitions] = (
    NegativeBinomialRuns(10, eta=-0.5),
    NegativeBinomialRuns(3, eta=0),
    NegativeBinomialRuns(30, eta=1),
    NegativeBinomialRuns(5, eta=2),
    PoissonRuns(4),
    BinomialRuns(3, most=5),
)


def generating(repetitions: Repetitions, x: Array) -> Array:
    """f(x) in closed form, which the accountant does not use."""
    match repetitions:
        case NegativeBinomialRuns(eta=0) as runs:
            return np.asarray(np.log1p(-(1 - runs.gamma) * x) / math.log(runs.gamma))
        case NegativeBinomialRuns() as runs:
            grown = (1 - (1 - runs.gamma) * x) ** -runs.eta
            return np.asarray((grown - 1) / (runs.gamma**-runs.eta - 1))
        case PoissonRuns() as runs:
            return np.expm1(runs.rate * x) / math.expm1(runs.rate)
        case BinomialRuns() as runs:
            none = (1 - runs.chance) ** runs.most
            powers = (1 - runs.chance + runs.chance * x) ** runs.most
            return np.asarray((powers - none) / (1 - none))
    raise AssertionError(repetitions)


@dataclasses.dataclass(frozen=True)
class Discrete:
    """A base of a few outcomes, with its exact profile and trade-off in both directions."""

    first: Array
    second: Array

    def delta(self, epsilon: float) -> float:
        one = hockey_stick(self.first, self.second, epsilon)
        return max(one, hockey_stick(self.second, self.first, epsilon))

    @functools.cached_property
    def _curves(self) -> list[tuple[list[float], list[float]]]:
        curves = []
        for low, high in ((self.first, self.second), (self.second, self.first)):
            order = np.argsort(-high / np.maximum(low, 1e-300))
            x, y = (np.cumsum(np.append(0, part[order])).tolist() for part in (low, high))
            curves.append((x, y))
        return curves

    def tpr_at_fpr(self, fpr: float) -> float:
        rates = []
        for x, y in self._curves:
            at = bisect.bisect_right(x, fpr)
            share = (fpr - x[at - 1]) / (x[at] - x[at - 1]) if at < len(x) else 0.0
            rates.append(y[at - 1] + share * (y[min(at, len(x) - 1)] - y[at - 1]))
        return min(1.0, max(rates) * (1 + 1e-12))


def hockey_stick(first: Array, second: Array, epsilon: float) -> float:
    return float(np.maximum(first - math.exp(epsilon) * second, 0).sum())


def winner(repetitions: Repetitions, chances: Array, scores: NDArray[np.int64]) -> Array:
    """Distribution of the run with the highest score; ties are broken at random."""
    winners = np.zeros_like(chances)
    for score in np.unique(scores):
        tied = scores == score
        low, mass = chances[scores < score].sum(), chances[tied].sum()
        gain = np.diff(generating(repetitions, np.minimum([low, low + mass], 1.0)))[0]
        winners[tied] = gain * chances[tied] / max(mass, 1e-300)
    return winners


def random_repetitions(rng: np.random.Generator) -> Repetitions:
    """One of the listed distributions of K, or one with numbers drawn at random."""
    fixed = KINDS[rng.integers(len(KINDS))]
    if rng.random() < 0.5:
        return fixed
    expected = math.exp(rng.uniform(math.log(1.1), math.log(60)))
    if isinstance(fixed, NegativeBinomialRuns):
        return NegativeBinomialRuns(expected, eta=rng.uniform(-0.6, 4))
    if isinstance(fixed, PoissonRuns):
        return PoissonRuns(expected)
    return BinomialRuns(expected, most=math.ceil(expected) + int(rng.integers(1, 40)))


def random_base(rng: np.random.Generator) -> tuple[Array, Array]:
    """Chances of 2 to 8 outcomes on two neighbouring inputs; some are 0 on one of them."""
    outcomes = rng.integers(2, 9)
    first = rng.dirichlet(np.ones(outcomes) * rng.choice([0.1, 0.5, 1, 3]))
    second = first * np.exp(rng.normal(0, rng.choice([0.1, 0.5, 2]), outcomes))
    if rng.random() < 0.2:
        second[rng.integers(outcomes)] = 0
    return first, second / second.sum()


def random_scores(rng: np.random.Generator, first: Array, second: Array) -> NDArray[np.int64]:
    """Any order of the outcomes, with ties; half of the time that of the attack."""
    scores = rng.integers(0, len(first), len(first))
    if rng.random() < 0.5:  # likely outcomes best, the next worst
        order = np.argsort(-second / np.maximum(first, 1e-300))
        best, worst = np.sort(rng.integers(0, len(first) + 1, 2))
        scores[order] = 1
        scores[order[:best]], scores[order[best:worst]] = 2, 0
    return scores


def nearest_of_random(cases: int, seed: int, *, fineness: float) -> tuple[float, Counter[str]]:
    """Compare true and claimed deltas of random discrete bases, scores and K.

    Returns:
        The greatest ratio to a claim below 1, and by distribution of K how many bases were compared
        in both directions.
    """
    rng = np.random.default_rng(seed)
    nearest, compared = 0.0, Counter[str]()
    while compared.total() < cases:
        first, second = random_base(rng)
        repetitions, scores = random_repetitions(rng), random_scores(rng, first, second)
        claim = SelectedGuarantee(Discrete(first, second), repetitions, fineness)
        winners = [winner(repetitions, part, scores) for part in (first, second)]
        bounds = np.array([claim.delta(epsilon) for epsilon in EPSILONS])
        directions = 0
        for one, other in (winners, winners[::-1]):
            # Sums of floats can pass 1, which no delta does.
            truths = np.minimum([hockey_stick(one, other, epsilon) for epsilon in EPSILONS], 1.0)
            # A truth of few digits says nothing, and a bound of 1 is near by itself.
            counts = truths > 1e-6
            assert (truths[counts] <= bounds[counts]).all()
            near = counts & (bounds < 1)
            nearest = max(nearest, (truths[near] / bounds[near]).max(initial=0.0))
            directions += bool(counts.any())
        compared[type(repetitions).__name__] += directions == 2
    return nearest, compared


def attacked(mu: float, repetitions: Repetitions, delta: float) -> float:
    """Epsilon that scores by two thresholds prove for a Gaussian base.

    {kappa < z <= tau} scores lowest, then the event S = {z > tau}, then {z <= kappa}.
    """
    tau, kappa = np.meshgrid(np.linspace(-6, 9, 700) + mu, np.linspace(-9, 9 + mu, 700))
    kappa = np.minimum(kappa, tau)

    def chance_of_event(shift: float) -> Array:
        event, low = stats.norm.sf(tau - shift), stats.norm.sf(kappa - shift)
        return generating(repetitions, low) - generating(repetitions, low - event)

    won, lost = chance_of_event(mu), chance_of_event(0.0)
    return float(brentq(lambda e: np.max(won - math.exp(e) * lost) - delta, 0.01, 60, xtol=1e-4))


def test_no_random_base_exceeds_the_price_and_one_per_cent_less_would_be_false() -> None:
    nearest, compared = nearest_of_random(40, seed=20, fineness=0.1)
    assert 0.99 < nearest <= 1
    assert len(compared) == 3


def test_a_profile_below_zero_is_that_of_the_other_direction() -> None:
    """The random bases above hardly depend on it: with a tenth less, none exceeded its price."""
    rng = np.random.default_rng(4)
    for _ in range(50):
        first, second = random_base(rng)
        for epsilon in (-4.0, -0.7, -0.01):
            both = (hockey_stick(first, second, epsilon), hockey_stick(second, first, epsilon))
            claimed = _profile(Discrete(first, second), epsilon)
            assert max(both) <= claimed <= max(both) * (1 + 1e-9)


@pytest.mark.slow
def test_no_random_base_exceeds_the_price_at_length() -> None:
    nearest, compared = nearest_of_random(100_000, seed=2, fineness=0.1)
    assert 0.99 < nearest <= 1
    assert compared.total() == 100_000
    assert min(compared.values()) > 10_000


@pytest.mark.parametrize("repetitions", [KINDS[0], KINDS[2], PoissonRuns(10)], ids=repr)
def test_an_attack_attains_the_price(repetitions: Repetitions) -> None:
    """The power twin of a bound: 1 % less would be false."""
    claimed = SelectedGuarantee(Guarantee(mu=0.5), repetitions).epsilon(1e-6)
    assert 0.99 * claimed < attacked(0.5, repetitions, 1e-6) <= claimed


@pytest.mark.parametrize(
    ("mu", "expected", "eta", "epsilon"),
    [
        (0.5, 3, -0.5, 2.64),
        (0.5, 10, 0, 3.09),
        (0.5, 10, 1, 3.26),
        (1, 10, 1, 6.90),
        (0.2, 10, -0.5, 1.12),
    ],
)
def test_the_table_of_the_design(mu: float, expected: float, eta: float, epsilon: float) -> None:
    selected = SelectedGuarantee(Guarantee(mu), NegativeBinomialRuns(expected, eta))
    assert selected.epsilon(1e-6) == pytest.approx(epsilon, abs=0.005)


@pytest.mark.parametrize("repetitions", KINDS, ids=repr)
def test_the_distribution_is_that_of_the_generating_function(repetitions: Repetitions) -> None:
    masses = [float(mass) for mass in itertools.islice(repetitions.probabilities(), 5_000)]
    powers = np.arange(1, len(masses) + 1)
    assert math.fsum(masses) == pytest.approx(1, abs=1e-9)
    assert math.fsum(masses * powers) == pytest.approx(repetitions.expected, rel=1e-6)
    for x in (0.3, 0.9):
        assert np.sum(masses * x**powers) == pytest.approx(
            float(generating(repetitions, np.array(x)))
        )
        slope = np.sum(masses * powers * x ** (powers - 1.0))
        assert slope == pytest.approx(float(repetitions.slope(np.array(1 - x))))


def test_draws_follow_the_distribution_and_a_wrong_mean_is_caught() -> None:
    repetitions = NegativeBinomialRuns(4, eta=1)
    draws = np.array([draw(repetitions, secrets.randbits) for _ in range(3_000)])
    counts = np.array([np.sum(draws == k) for k in range(1, 12)] + [np.sum(draws >= 12)])

    def p_value(other: Repetitions) -> float:
        masses = [float(mass) for mass in itertools.islice(other.probabilities(), 11)]
        return float(stats.chisquare(counts, 3_000 * np.array([*masses, 1 - sum(masses)])).pvalue)

    assert p_value(repetitions) > 1e-6
    assert p_value(NegativeBinomialRuns(4.6, eta=1)) < 1e-6


def test_quantile_and_cap() -> None:
    assert quantile(NegativeBinomialRuns(10, eta=1), 0.99) == 44
    assert max(draw(BinomialRuns(3, most=4), lambda bits: 2**bits - 1) for _ in range(3)) == 4


@pytest.mark.parametrize("repetitions", KINDS, ids=repr)
def test_most_mu_meets_the_target_from_below(repetitions: Repetitions) -> None:
    mu = most_mu(repetitions, target_epsilon=2.0, delta=1e-6)
    assert SelectedGuarantee(Guarantee(mu), repetitions).epsilon(1e-6) <= 2.0 * (1 + 1e-6)
    assert SelectedGuarantee(Guarantee(mu * 1.0002), repetitions).epsilon(1e-6) > 2.0


def test_a_coarser_cover_is_never_cheaper() -> None:
    near = SelectedGuarantee(Guarantee(0.5), KINDS[2])
    far = dataclasses.replace(near, fineness=0.3)
    assert near.delta(3.0) < far.delta(3.0) < 5 * near.delta(3.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NegativeBinomialRuns(1, 1), "must be above 1"),
        (lambda: NegativeBinomialRuns(math.nan), "must be positive"),
        (lambda: NegativeBinomialRuns(10, -1), "must be above -1"),
        (lambda: NegativeBinomialRuns(10, math.nan), "must be finite"),
        (lambda: PoissonRuns(1e9), "at most 1,000"),
        (lambda: BinomialRuns(5, 5), "must be below most=5"),
        (lambda: SelectedGuarantee(Guarantee(1), PoissonRuns(2)).epsilon(0), "strictly between"),
        (lambda: SelectedGuarantee(Guarantee(1), PoissonRuns(2)).delta(-1), "zero or more"),
        (lambda: most_mu(PoissonRuns(2), target_epsilon=0, delta=1e-6), "must be positive"),
    ],
)
def test_wrong_input(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.filterwarnings("error")
def test_slopes_that_underflow_are_refused_in_a_sentence():
    """With 1,000 runs expected, and a base that tells nearly all, B is 0 as a float."""
    run = SelectedGuarantee(Guarantee(20.0), PoissonRuns(1000), fineness=0.1)
    with pytest.raises(ConfigError, match="reached by no epsilon up to 10,000"):
        run.epsilon(1e-6)
    # Here the price of counting all runs and their number holds.
    counted = SelectedGuarantee(Guarantee(3.0), PoissonRuns(1000), fineness=0.1).epsilon(1e-6)
    assert 4_000 < counted < Guarantee(3.0 * math.sqrt(1200)).epsilon(1e-6)


def cut(mu: float, generator: np.random.Generator, count: int = 8) -> tuple[Array, Array]:
    """Chances of cells of the line under N(0, 1) and N(mu, 1): no more is told than by mu."""
    edges = np.sort(generator.normal(mu / 2, 1.5, count - 1))
    both = (np.diff(stats.norm.cdf(edges, shift), prepend=0, append=1) for shift in (0, mu))
    first, second = both
    return first, second


@pytest.mark.parametrize("repetitions", KINDS, ids=repr)
def test_no_cut_gaussian_exceeds_the_price_at_any_epsilon(repetitions: Repetitions) -> None:
    """Also at small epsilons, where counting all runs is cheaper than the nearer bound."""
    generator, mu = np.random.default_rng(7), 0.8
    price = SelectedGuarantee(Guarantee(mu), repetitions, fineness=0.02)
    epsilons = (0.0, 0.1, 0.5, 1.0, 2.0)
    deltas, dominating = [price.delta(e) for e in epsilons], Guarantee(price.mu)
    greatest = np.zeros(len(epsilons))
    for _ in range(400):
        chances = cut(mu, generator)
        scores = generator.permutation(len(chances[0]))
        won = [winner(repetitions, part, scores) for part in chances]
        for one, other in (won, won[::-1]):
            sticks = [hockey_stick(one, other, e) for e in epsilons]
            greatest = np.maximum(greatest, sticks)
    assert (greatest <= deltas).all()
    assert all(dominating.delta(e) >= delta for e, delta in zip(epsilons, deltas, strict=True))
    # The price without the count of all runs would be 1.
    assert deltas[0] < 0.9
    assert (greatest > 0.2 * np.array(deltas)).any()


@pytest.mark.slow
def test_one_gaussian_costs_no_less_at_any_delta() -> None:
    for mu, repetitions in ((0.5, KINDS[2]), (1.5, KINDS[0]), (0.1, KINDS[4])):
        price = SelectedGuarantee(Guarantee(mu), repetitions)
        assert price.mu > mu
        for delta in (0.3, 0.01, 1e-4, 1e-8, 1e-20, 1e-60):
            assert price.epsilon(delta) <= Guarantee(price.mu).epsilon(delta)
        for fpr in (0.5, 0.1, 1e-3):
            assert Guarantee(mu).tpr_at_fpr(fpr) < price.tpr_at_fpr(fpr)
            assert price.tpr_at_fpr(fpr) <= Guarantee(price.mu).tpr_at_fpr(fpr)


def test_a_selection_composes_with_other_releases_from_above() -> None:
    """Beside products of cut Gaussians; a bound that takes one release away is caught."""
    generator, mu, beside = np.random.default_rng(3), 0.8, 0.7
    repetitions = NegativeBinomialRuns(5, eta=1)
    price = SelectedGuarantee(Guarantee(mu), repetitions, fineness=0.02)
    both = ComposedGuarantee((price, Guarantee(beside)))
    assert ComposedGuarantee((price,)).epsilon(1e-6) == price.epsilon(1e-6)
    assert both.mu is None
    caught = False
    for _ in range(300):
        chances = cut(mu, generator, 12)
        won = [winner(repetitions, part, np.arange(12)) for part in chances]
        more = cut(beside, generator, 12)
        first, second = (np.outer(one, other).ravel() for one, other in zip(won, more, strict=True))
        for epsilon in (0.0, 0.5, 1.5):
            stick = max(hockey_stick(first, second, epsilon), hockey_stick(second, first, epsilon))
            assert stick <= both.delta(epsilon)
            caught |= stick > Guarantee(beside).delta(epsilon)
    assert caught
    assert price.epsilon(1e-6) < both.epsilon(1e-6)
    assert both.epsilon(1e-6) < Guarantee(math.hypot(price.mu, beside)).epsilon(1e-6)


def test_a_selection_is_named_by_its_numbers() -> None:
    for repetitions in KINDS:
        price = SelectedGuarantee(Guarantee(0.4), repetitions)
        assert selected_of(json.loads(json.dumps(fields_of(price)))) == price
    with pytest.raises(ConfigError, match="not the numbers of a known distribution"):
        selected_of({"mu": 0.4, "expected": 3.0, "odd": 1})
    with pytest.raises(ConfigError, match="must be a Guarantee"):
        fields_of(SelectedGuarantee(ComposedGuarantee((Guarantee(0.4),)), KINDS[0]))


@pytest.mark.parametrize("eta", [1e-7, -1e-50, 5e-324])
def test_a_shape_too_near_zero_for_exact_chances_is_refused(eta):
    with pytest.raises(ConfigError, match="use 0 itself"):
        NegativeBinomialRuns(10, eta=eta)


def test_a_mean_that_a_shape_cannot_reach_is_refused():
    with pytest.raises(ConfigError, match="no K of this shape has a mean of 1000"):
        NegativeBinomialRuns(1000, eta=-0.95)


def test_a_target_below_what_is_told_apart_ends_in_a_sentence():
    with pytest.raises(ConfigError, match="below what a selection"):
        most_mu(NegativeBinomialRuns(10), target_epsilon=1e-4, delta=1e-13)
    # By the count of all runs, where that is told apart.
    small = most_mu(NegativeBinomialRuns(10), target_epsilon=0.001, delta=1e-6)
    assert SelectedGuarantee(Guarantee(small), NegativeBinomialRuns(10)).epsilon(1e-6) <= 0.001


@pytest.mark.parametrize(
    ("repetitions", "epsilon"), [(PoissonRuns(900), 38.1), (BinomialRuns(441.2, most=452), 32.1)]
)
def test_slopes_of_few_digits_end_the_refinement(repetitions: Repetitions, epsilon: float) -> None:
    """Neighbouring floats below 1e-308 differ by more than any fineness: it went on for ever."""
    run = SelectedGuarantee(Guarantee(0.5), repetitions, fineness=0.5)
    assert epsilon < run.epsilon(1e-6) < epsilon + 2


def test_a_delta_below_every_product_of_slopes_is_not_lost() -> None:
    """An attack has 2e-227; points of the hull were dropped, as their products were 0."""
    run = SelectedGuarantee(Guarantee(0.5), BinomialRuns(300, most=310), fineness=0.5)
    assert run.delta(200.0) > 2e-227


@pytest.mark.parametrize(("eta", "published"), [(0, 2.0), (1, 3.0)])
def test_a_pure_base_approaches_the_published_price(eta: float, published: float) -> None:
    """(2 + eta) epsilon (Papernot and Steinke 2022; Liu and Talwar 2019 for eta = 1)."""
    base = ComposedGuarantee((StatedGuarantee(1.0),))
    epsilon = SelectedGuarantee(base, NegativeBinomialRuns(100, eta), 0.02).epsilon(1e-9)
    assert 0.98 * published < epsilon < published + 0.04


@pytest.mark.parametrize(("shape", "published"), [(0, 3.868), (1, 4.545), (math.inf, 5.182)])
def test_the_price_is_below_that_of_renyi_divergence(shape: float, published: float) -> None:
    """dp_accounting's, which docs/concepts/choices.md has beside it."""
    event = dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(2.0), 10, shape)
    orders = [1 + step / 20 for step in range(1, 400)]
    theirs = RdpAccountant(orders).compose(event).get_epsilon(1e-6)
    ours = PoissonRuns(10) if shape == math.inf else NegativeBinomialRuns(10, shape)
    assert theirs == pytest.approx(published, abs=0.001)
    assert SelectedGuarantee(Guarantee(0.5), ours, 0.02).epsilon(1e-6) < 0.85 * theirs


def test_a_curve_of_a_selection_is_just_above_its_epsilons():
    run = SelectedGuarantee(Guarantee(0.7), NegativeBinomialRuns(4))
    for delta in (0.3, 1e-3, 1e-9):
        exact = run.epsilon(delta)
        assert exact <= run.coarse_epsilon(delta) <= max(exact * 1.02, exact + 0.02) * (1 + 1e-9)


def one_line(
    mu: float, repetitions: Repetitions, delta: float, *, at_the_end: bool = True
) -> float:
    """Epsilon by Y(x) <= exp(e1) x + delta(e1) at the best e1, as Koskela et al. (2024) bound it.

    The greatest ratio of slopes is then of a closed form. Of a binomial K, it is not that of the
    best position alone (x = 1), for which ``at_the_end`` is False.
    """
    lines = [(e1, gaussian.delta(mu, e1)) for e1 in np.linspace(0, 6 * mu + 3, 200).tolist()]

    def log_ratio(e1: float, failing: float) -> float:
        match repetitions:
            case NegativeBinomialRuns() as runs:
                odds = (1 - runs.gamma) / runs.gamma
                return (1 + runs.eta) * math.log(math.exp(e1) + odds * failing)
            case PoissonRuns() as runs:
                return runs.rate * (math.expm1(e1) + failing)
            case BinomialRuns() as runs:
                share = runs.chance / (1 - runs.chance if at_the_end else 1)
                return (runs.most - 1) * math.log1p(runs.chance * math.expm1(e1) + share * failing)
        raise AssertionError(repetitions)

    def excess(epsilon: float) -> float:
        shifted = [epsilon - log_ratio(*line) for line in lines]
        return repetitions.expected * gaussian.delta(mu, max([0.0, *shifted])) - delta

    return float(brentq(excess, 0.1, 100, xtol=1e-4))


@pytest.mark.parametrize(
    ("repetitions", "line", "ours"),
    [
        (NegativeBinomialRuns(10, eta=0), 3.53, 3.09),
        (NegativeBinomialRuns(10, eta=0.5), 3.79, 3.19),
        (NegativeBinomialRuns(10, eta=1), 3.99, 3.26),
        (PoissonRuns(10), 4.47, 4.12),
        (BinomialRuns(10, most=20), 5.91, 4.58),
    ],
    ids=repr,
)
def test_the_price_is_below_that_of_one_line_of_the_profile(
    repetitions: Repetitions, line: float, ours: float
) -> None:
    """The table of docs/concepts/choices.md."""
    assert one_line(0.5, repetitions, 1e-6) == pytest.approx(line, abs=0.006)
    price = SelectedGuarantee(Guarantee(0.5), repetitions, 0.02).epsilon(1e-6)
    assert ours - 0.01 < price < ours + 0.03


def test_an_attack_refutes_a_line_that_is_read_at_one_end_alone() -> None:
    """The bound for a binomial K without the other end is no bound; the attack is above it."""
    runs = BinomialRuns(10, most=20)
    wrong = one_line(0.5, runs, 1e-6, at_the_end=False)
    assert wrong < attacked(0.5, runs, 1e-6) < one_line(0.5, runs, 1e-6)
