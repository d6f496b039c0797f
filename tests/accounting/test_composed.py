"""Composition of unlike releases: against exact products of small pairs, and against simulation."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from mixtures import delta_of
from scipy import stats

from accounting import (
    AllocatedGuarantee,
    BallsInBins,
    ComposedGuarantee,
    ConfigError,
    EstimatedGuarantee,
    Guarantee,
    NegativeBinomialRuns,
    Participation,
    SampledGuarantee,
    SelectedGuarantee,
    StatedGuarantee,
    Toeplitz,
    guarantee,
    sampled_guarantee,
)
from accounting.composed import _corners, _deltas, _losses
from accounting.hull import least_epsilon, lower_hull
from accounting.mechanisms import MechanismChoice
from accounting.random_allocation import Allocation, Shares

POISSON = SampledGuarantee(1.0, probability=0.01, steps=1000)


def response(stated: StatedGuarantee) -> list[tuple[float, float]]:
    """Pairs of probabilities of the mechanism that attains (epsilon, delta)."""
    likely = (1 - stated.delta) / (1 + math.exp(-stated.epsilon))
    rest = 1 - stated.delta - likely
    return [(stated.delta, 0.0), (likely, rest), (rest, likely), (0.0, stated.delta)]


@pytest.mark.parametrize(
    "stated",
    [
        (StatedGuarantee(1.0, 1e-3), StatedGuarantee(0.5)),
        (StatedGuarantee(0.2, 1e-3),) * 5,
        (StatedGuarantee(2.0), StatedGuarantee(0.1, 1e-4), StatedGuarantee(1.0, 1e-2)),
    ],
    ids=len,
)
def test_stated_releases_cost_what_their_worst_mechanisms_do(
    stated: tuple[StatedGuarantee, ...],
) -> None:
    """All outcomes are enumerated; the claim is above the truth, and within 1 % of it."""
    claim = ComposedGuarantee(stated)
    for epsilon in (0.0, 0.3, 0.9, 1.4):
        truth = 0.0
        for outcome in itertools.product(*map(response, stated)):
            first = math.prod(one for one, _ in outcome)
            second = math.prod(other for _, other in outcome)
            truth += max(0.0, first - math.exp(epsilon) * second)
        assert truth <= claim.delta(epsilon) <= 1.01 * truth + 1e-12


def simulated(
    mu: float, poisson: SampledGuarantee, epsilon: float, *, removed: bool, draws: int
) -> tuple[float, float]:
    """Delta of a Gaussian and a Poisson run by importance sampling, and its standard error."""
    rng = np.random.default_rng(7)
    q, z = poisson.probability, poisson.noise_multiplier
    loss = rng.normal(mu / 2 if removed else -mu / 2, 1, draws) * mu
    for _ in range(poisson.steps):
        outputs = rng.normal(0, 1, draws)
        if removed:
            outputs += (rng.random(draws) < q) / z
        loss += np.log1p(q * np.expm1(outputs / z - 1 / (2 * z * z)))
    return delta_of(loss, epsilon, removed)


@pytest.mark.parametrize("removed", [True, False])
def test_a_gaussian_beside_a_poisson_run_by_simulation(removed: bool) -> None:
    poisson = SampledGuarantee(0.8, probability=0.05, steps=40)
    claim = ComposedGuarantee((poisson, Guarantee(0.6)))
    truth, error = simulated(0.6, poisson, 1.0, removed=removed, draws=200_000)
    assert truth - 4 * error < claim.delta(1.0)
    less = ComposedGuarantee((poisson, Guarantee(0.45)))
    if removed:  # the power twin: the direction that is dearer here
        assert truth - 4 * error > less.delta(1.0)


def test_gaussians_alone_stay_exact() -> None:
    both = ComposedGuarantee((Guarantee(3.0), Guarantee(4.0)))
    assert both.mu == Guarantee(3.0).compose(Guarantee(4.0)).mu
    assert both.epsilon(1e-6) == Guarantee(both.mu).epsilon(1e-6)
    assert both.tpr_at_fpr(0.01) == Guarantee(both.mu).tpr_at_fpr(0.01)


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9])
def test_one_release_costs_what_it_costs_alone(delta: float) -> None:
    assert ComposedGuarantee((POISSON,)).epsilon(delta) == pytest.approx(
        POISSON.epsilon(delta), rel=1e-4
    )
    nothing = ComposedGuarantee((Guarantee(0.5), StatedGuarantee(1e-9)))
    assert nothing.epsilon(delta) == pytest.approx(Guarantee(0.5).epsilon(delta), rel=1e-4)


def test_a_book_of_unlike_runs_is_near_dp_accounting_and_between_the_dearest_and_the_sum() -> None:
    """A run on Poisson samples, one under BLT noise, and somebody's (1, 1e-6)."""
    once = Participation(1000, 1)
    blt = guarantee(MechanismChoice.parse("blt").build(once), once, noise_multiplier=4.0)
    other = PLDAccountant()
    step = PoissonSampledDpEvent(POISSON.probability, GaussianDpEvent(POISSON.noise_multiplier))
    other.compose(SelfComposedDpEvent(step, POISSON.steps))
    other.compose(GaussianDpEvent(1 / blt.mu))
    both = ComposedGuarantee((POISSON, blt))
    assert both.epsilon(1e-5) == pytest.approx(other.get_epsilon(1e-5), rel=0.02)
    stated = StatedGuarantee(1.0, 1e-6)
    for gaussian, delta in ((blt, 4e-6), (blt, 1e-5), (Guarantee(0.5), 1e-5)):
        half = (delta - stated.delta) / 2
        each = (POISSON.epsilon(half), gaussian.epsilon(half), stated.epsilon)
        book = ComposedGuarantee((POISSON, gaussian, stated)).epsilon(delta)
        assert max(each) < book < sum(each)
        assert ComposedGuarantee((POISSON, gaussian)).epsilon(delta) < book


def test_the_rate_of_a_test_is_bounded_and_not_far_above_the_gaussian_one() -> None:
    claim = ComposedGuarantee((Guarantee(1.0), StatedGuarantee(1e-6)))
    for fpr in (1e-4, 0.01, 0.5):
        exact = float(stats.norm.cdf(stats.norm.ppf(fpr) + 1.0))
        assert exact <= claim.tpr_at_fpr(fpr) < 1.02 * exact


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ComposedGuarantee(()), "at least one"),
        (lambda: ComposedGuarantee((1.0,)), "float: has no proof"),
        (lambda: StatedGuarantee(math.nan), "epsilon=nan"),
        (lambda: StatedGuarantee(1.0, 1.0), "must be below 1"),
        (lambda: ComposedGuarantee((StatedGuarantee(1, 1e-5),)).epsilon(1e-6), "1e-05, what these"),
        (lambda: ComposedGuarantee((StatedGuarantee(1),)).epsilon(1e-300), "1e-11, below which"),
        (lambda: ComposedGuarantee((POISSON,)).epsilon(1e-12), "above 1e-11"),
    ],
)
def test_wrong_input(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        call()


BINS = [
    AllocatedGuarantee(1.0, BallsInBins(20, 20)),
    AllocatedGuarantee(4.0, BallsInBins(4, 8), Toeplitz.square_root(8)),
]


@pytest.mark.parametrize("run", BINS, ids=["independent", "correlated"])
def test_a_run_in_bins_alone_is_its_own_accountants_figure(run: AllocatedGuarantee) -> None:
    for delta in (1e-5, 1e-8):
        alone, told = run.epsilon(delta), ComposedGuarantee((run,)).epsilon(delta)
        # What bins share is rounded more coarsely alone than composed.
        assert alone * (1 - (1e-3 if run.mechanism else 3e-5)) <= told <= alone * 1.001


@pytest.mark.parametrize("epsilon", [0.5, pytest.param(2.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("removed", [True, False])
def test_bins_beside_a_gaussian_and_another_run_in_bins(epsilon: float, removed: bool) -> None:
    """Four releases by simulation of their losses; five percent less would be noticed."""
    both = (BINS[0], Guarantee(0.8), AllocatedGuarantee(1.2, BallsInBins(5, 5)), BINS[0])
    rng, draws = np.random.default_rng(3), 400_000
    loss = rng.normal(0.32 if removed else -0.32, 0.8, draws)
    for mu, bins in ((1.0, 20), (1 / 1.2, 5), (1.0, 20)):
        x = rng.standard_normal((draws, bins))
        x[:, 0] += mu * removed
        loss += np.log(np.exp(mu * x - mu * mu / 2).mean(axis=1))
    truth, error = delta_of(loss, epsilon, removed)
    claim = ComposedGuarantee(both).delta(epsilon)
    assert claim >= truth - 4 * error
    if removed:
        assert 0.95 * claim < truth - 4 * error
        assert claim < (truth + 4 * error) * 1.02


@pytest.mark.slow
def test_every_draw_and_every_transform_counts() -> None:
    twice = AllocatedGuarantee(1.0, BallsInBins(20, 40, redraw=True))
    apart = ComposedGuarantee((BINS[0], BINS[0])).epsilon(1e-6)
    assert twice.epsilon(1e-6) == pytest.approx(apart, rel=1e-6)
    assert BINS[0].epsilon(1e-6) * 1.1 < apart
    shares = Shares(4, own=0.3, shared=0.2)
    four = ComposedGuarantee((replace(shares, draws=4),))
    assert four.epsilon(1e-6) == pytest.approx(
        ComposedGuarantee((shares,) * 4).epsilon(1e-6), rel=1e-6
    )
    assert four.epsilon(1e-6) > ComposedGuarantee((Shares(4, 0.3, draws=4),)).epsilon(1e-6) * 1.1
    # What is added for the rounding of a transform is in a composition, too.
    far = np.array([5.0])
    allocation = Allocation(0.1, 4)
    assert min(allocation.removed(far)[0], allocation.added(far)[0]) >= 1e-12
    with pytest.raises(ConfigError, match="own=40: must be at most 12"):
        Shares(4, own=40.0)


def test_a_selection_whose_losses_are_beyond_every_float_composes() -> None:
    """Of training runs with little noise: grids of e^loss overflowed, and divided by 0."""
    selected = SelectedGuarantee(Guarantee(25.0), NegativeBinomialRuns(3), fineness=0.5)
    both = ComposedGuarantee((selected, Guarantee(0.3)))
    assert selected.delta(300.0) <= both.delta(300.0) <= 1
    selected = replace(selected, base=Guarantee(40.0))
    with pytest.raises(ConfigError, match="one of them promises nothing"):
        ComposedGuarantee((selected, Guarantee(0.3))).delta(400.0)


def test_a_pure_epsilon_that_promises_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 500 composes"):
        ComposedGuarantee((StatedGuarantee(1000.0),))


def test_the_least_epsilon_is_rounded_up() -> None:
    for root in (0.0, 1e-3, 0.7, 5.3):
        for steepness in (1.0, 30.0):  # a step of the profile is found, too
            for profile in (
                lambda e, root=root, k=steepness: 0.1 * math.exp(k * (root - e)),
                lambda e, root=root: 0.0 if e >= root else 1.0,
            ):
                least = least_epsilon(profile, 0.1, 10.0)
                assert root <= least * (1 + 1e-12) <= root * (1 + 1e-6)
    assert least_epsilon(lambda epsilon: 0.0 if epsilon >= 11.0 else 1.0, 0.1, 8.0) is None
    assert least_epsilon(lambda epsilon: 0.0, 5e-324, 8.0) == 0.0


def test_the_corners_are_the_greatest_convex_function_below() -> None:
    rng = np.random.default_rng(5)
    x = np.sort(rng.uniform(0, 10, 200))
    y = np.exp(-x) + rng.uniform(0, 0.01, 200)
    chosen = _corners(x, y)
    hull = np.interp(x, x[chosen], y[chosen])
    assert (hull <= y + 1e-15).all()
    assert (np.diff(np.diff(y[chosen]) / np.diff(x[chosen])) >= 0).all()
    assert chosen.tolist() == lower_hull(x, y).tolist()
    noise = 1e-13 * rng.standard_normal(50_000)  # of a sum, where a profile is nearly a line
    x = np.linspace(1, 2, 50_000)
    corners = _corners(x, noise)
    assert (np.diff(np.diff(noise[corners]) / np.diff(x[corners])) >= 0).all()
    assert (np.interp(x, x[corners], noise[corners]) <= noise + 1e-18).all()


@pytest.mark.slow
@pytest.mark.parametrize("removed", [True, False])
def test_bins_that_every_pass_draws_anew_by_simulation(removed: bool) -> None:
    """Three passes, the last one cut off, in which the member may not come at all."""
    mu, bins, epsilon, draws = 1.0, 4, 1.2, 400_000
    rng = np.random.default_rng(11)
    loss = np.zeros(draws)
    for rounds in (4, 4, 3):
        x = rng.standard_normal((draws, bins))
        place = rng.integers(0, bins, draws)
        x[np.arange(draws), place] += mu * removed
        ratios = np.exp(mu * x - mu * mu / 2)
        loss += np.log((ratios[:, :rounds].sum(axis=1) + bins - rounds) / bins)
    truth, error = delta_of(loss, epsilon, removed)
    run = AllocatedGuarantee(1 / mu, BallsInBins(bins, 11, redraw=True))
    assert truth - 4 * error < run.delta(epsilon)
    assert run.delta(epsilon) < Guarantee(run.mu).delta(epsilon)
    once = AllocatedGuarantee(1 / mu, BallsInBins(bins, 11))
    assert run.delta(epsilon) < 0.9 * once.delta(epsilon)
    if removed:  # a claim without the last pass is caught
        short = AllocatedGuarantee(1 / mu, BallsInBins(bins, 8, redraw=True))
        assert short.delta(epsilon) < truth - 4 * error


def test_redrawn_bins_are_refused_where_no_proof_covers_them() -> None:
    bins = BallsInBins(4, 8, redraw=True)
    correlated = Toeplitz.square_root(8)
    with pytest.raises(ConfigError, match="redraw: is accounted for in closed form, with indep"):
        sampled_guarantee(correlated, bins, noise_multiplier=1.0)
    with pytest.raises(ConfigError, match="redraw: is accounted for in closed form, with indep"):
        AllocatedGuarantee(1.0, bins, correlated)
    with pytest.raises(ConfigError, match="redraw: is accounted for in closed form"):
        EstimatedGuarantee(1.0, bins, correlated, 10_000, 1).epsilon(1e-5)


@pytest.mark.parametrize("release", [Guarantee(1.0), SampledGuarantee(1.0, 0.01, 100)], ids=str)
def test_deltas_are_those_of_the_library_to_the_last_bit(release):
    losses = _losses(release, 1e-3)
    epsilons = np.linspace(0.0, 20.0, 301)
    theirs = np.asarray(losses.get_delta_for_epsilon(epsilons))
    assert np.array_equal(_deltas(losses, epsilons), theirs)
    assert len({*theirs.tolist()}) > 50
