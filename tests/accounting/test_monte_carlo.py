"""Amplified correlated noise: bounds and estimates against sums over every draw and a grid."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from mixtures import bin_rows, deltas, separated_rows

from accounting import (
    AllocatedGuarantee,
    BallsInBins,
    BinaryTree,
    BMinSep,
    ConfigError,
    Dense,
    EstimatedGuarantee,
    Grouped,
    Guarantee,
    Independent,
    Participation,
    PoissonSampling,
    Toeplitz,
    cohorts,
    optimize,
    random_allocation,
    sampled_guarantee,
)
from accounting.cohorts import sampling_from_dict, sampling_to_dict
from accounting.monte_carlo import _Draws, _Separated, highest_mean
from accounting.random_allocation import _both, _delta

pytestmark = pytest.mark.usefixtures("coarse_bins")


@pytest.fixture(scope="module")
def coarse_bins():
    """A grid for balls in bins whose bounds stay bounds and take an eighth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_allocation, "_LEAST_POINTS", 2**12)
        random_allocation._sums_above.cache_clear()
        random_allocation._sums_below.cache_clear()
        yield
    random_allocation._sums_above.cache_clear()
    random_allocation._sums_below.cache_clear()


EPSILONS = (0.0, 0.4, 1.0, 2.0)
Z = 1.5
GRID = 1.002
"""A kink between two points of a grid costs this factor at most, as finer grids show."""


def signs(seed):
    """Return an adversary: updates of 1, -1 or a number between, by what was released before."""
    rng = np.random.default_rng(seed)
    tilt = rng.normal(size=(4, 4))

    def update(t, before):
        seen = tilt[t, : len(before)] @ before + tilt[t, 3]
        return np.sign(seen) if seed % 2 else np.tanh(seen)

    return update


ENCODERS = {
    "square root": Toeplitz.square_root(3).encoder(),
    "signed": Toeplitz(3, (1.0, -0.8, 0.3)).encoder(),
}


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize(
    "rows", [bin_rows(3, 2), separated_rows(3, 2, 0.3)], ids=["bins", "b-min-sep"]
)
def test_no_adversary_beats_constant_updates_and_an_encoder_without_signs(name, rows):
    """The theorem behind every figure of this file, at three rounds and adaptive updates."""
    encoder = ENCODERS[name]
    claimed = deltas(np.abs(encoder), rows, Z, EPSILONS, 61)
    for seed in range(4):
        tried = deltas(encoder, rows, Z, EPSILONS, 61, signs(seed))
        assert (tried <= claimed * GRID + 1e-12).all()


def test_the_signs_of_an_encoder_protect_nobody():
    """Whoever took C for |C| would be wrong: updates can alternate as C does."""
    encoder, rows = ENCODERS["signed"], bin_rows(3, 2)
    with_signs = deltas(encoder, rows, Z, EPSILONS, 61)
    alternating = deltas(encoder, rows, Z, EPSILONS, 61, lambda t, _: np.array((-1.0) ** t))
    assert (alternating > with_signs * 1.2).any()


@pytest.mark.parametrize(
    "mechanism",
    [
        Toeplitz.square_root(3),
        Toeplitz(3, (1.0, -0.8, 0.3)),
        Dense([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.9, 0.1, 0.6]]),
    ],
)
@pytest.mark.parametrize("bins", [2, 3])
def test_the_bound_in_closed_form_is_never_below_the_truth(mechanism, bins):
    truth = deltas(np.abs(mechanism.encoder()), bin_rows(3, bins), Z, EPSILONS, 81)
    run = AllocatedGuarantee(Z, BallsInBins(bins, 3), mechanism)
    for epsilon, least in zip(EPSILONS, truth.T, strict=True):
        for shares in run._bounds():
            assert (np.array(_both(shares, epsilon, 6.5)) >= least / GRID - 1e-15).all()
        assert run.delta(epsilon) >= least.max() / GRID
        assert run.delta(epsilon) <= Guarantee(run.mu).delta(epsilon)


@pytest.mark.parametrize("z", [1.5, 4.0])
def test_the_bound_is_the_truth_where_all_bins_share_as_much(z):
    mechanism = Dense([[1.0, 0.0], [0.5, math.sqrt(1.25)]])  # equal columns
    epsilons = np.array([0.0, 0.5, 1.0, 2.0]) * 1.5 / z
    truth = deltas(mechanism.encoder(), bin_rows(2, 2), z, epsilons, 1201)
    run = AllocatedGuarantee(z, BallsInBins(2, 2), mechanism)
    (shares,) = run._bounds()
    assert shares.shared > 0
    for epsilon, exact in zip(epsilons, truth.T, strict=True):
        found = np.array(_both(shares, epsilon, 6.5))  # each direction
        assert (exact * (1 - 1e-4) <= found).all()
        assert (found <= exact * 1.01 + 1e-12).all()
        least = min(_delta(shares, epsilon, far) for far in random_allocation._FAR)
        assert run.delta(epsilon) == pytest.approx(least, rel=1e-9)


def test_distant_bins_of_a_banded_encoder_share_nothing():
    """A band of 2 of 8 bins: told 4 of them, the rest is random allocation in 4 bins."""
    mechanism = Toeplitz(16, (1.0, 0.9))
    run = AllocatedGuarantee(4.0, BallsInBins(8, 16), mechanism)
    apart = run._bounds()[-1]
    assert (apart.bins, apart.shared) == (4, 0.0)
    alone = AllocatedGuarantee(4.0 / math.sqrt(1.81), BallsInBins(4, 8))
    least = min(_delta(apart, 0.3, far) for far in random_allocation._FAR)
    assert least == pytest.approx(alone.delta(0.3), rel=1e-6)
    assert run.epsilon(1e-5) <= alone.epsilon(1e-5) * (1 + 1e-6)


SEPARATED = [(2, 0.3, (1.0, 0.6)), (2, 1.0, (1.0, 0.6)), (3, 0.6, (1.0, 0.5, 0.4)), (1, 0.2, (1,))]


@pytest.mark.parametrize(("b", "p", "coefficients"), SEPARATED)
@pytest.mark.parametrize("normalize", [False, True])
def test_the_chain_is_the_sum_over_all_rounds_it_can_join(b, p, coefficients, normalize):
    rounds = 6
    encoder = Toeplitz(rounds, coefficients, normalize).encoder()
    bands = np.zeros((len(coefficients), rounds))
    for lag in range(len(coefficients)):
        bands[lag, : rounds - lag] = np.diagonal(encoder, -lag)
    chain = _Separated(bands, p, b)
    rows = separated_rows(rounds, b, p)
    assert sum(rows.values()) == pytest.approx(1)
    released = np.random.default_rng(1).normal(size=(rounds, 5)) * 2
    terms = encoder.T @ released - (encoder**2).sum(axis=0)[:, None] / 2
    means = {joined: encoder @ np.array(joined) for joined in rows}
    for power in (1.0, 2.5, -1.5):
        summed = sum(
            weight * np.exp(power * (means[joined] @ released - means[joined] @ means[joined] / 2))
            for joined, weight in rows.items()
        )
        assert chain.log_mean(terms, power) == pytest.approx(np.log(summed), abs=1e-11)
    squares = {joined: float(mean @ mean) for joined, mean in means.items()}
    summed = sum(weight * math.exp(0.7 * squares[joined]) for joined, weight in rows.items())
    assert chain.log_weight(np.array([0.7]))[0] == pytest.approx(math.log(summed), abs=1e-12)
    assert chain.most() == pytest.approx(max(squares.values()), rel=1e-12)


def run_of(sampler, mechanism, samples=100_000, seed=0, z=Z):
    return EstimatedGuarantee(z, sampler, mechanism, samples, seed)


CASES = [
    (BallsInBins(2, 4), Toeplitz.square_root(4), bin_rows(4, 2)),
    (BMinSep(1, 4, 2), Toeplitz(4, (1.0, 0.6)), separated_rows(4, 2, 1 / 3)),
    (BMinSep(1, 4, 3), Toeplitz(4, (1.0, 0.6, 0.4), True), separated_rows(4, 3, 0.5)),
]


@pytest.mark.parametrize(("sampler", "mechanism", "rows"), CASES)
@pytest.mark.parametrize("direction", [0, 1])
def test_estimates_are_the_truth_up_to_their_error_with_every_tilt(
    sampler, mechanism, rows, direction
):
    """Four rounds; unbiased whatever R is drawn from, and nothing averaged is above B."""
    truth = deltas(mechanism.encoder(), rows, Z, (0.5, 1.5), 33)[direction]
    hypotheses = run_of(sampler, mechanism)._hypotheses
    tilts = set()
    for near in (0.0, 1.0, 3.0):
        draws = _Draws.of(hypotheses, near, 100_000, 0.0, [5, direction], direction)
        tilts.add(draws.tilt)
        for epsilon, exact in zip((0.5, 1.5), truth, strict=True):
            gains = -np.expm1(np.minimum(epsilon - draws.losses, 0)) * np.exp(draws.log_weights)
            most = math.exp(draws.log_bound(epsilon))
            assert gains.max(initial=0.0) <= most * (1 + 1e-9)
            spread = math.sqrt(float((gains**2).sum()) / draws.count / draws.count)
            share = draws.share(epsilon)
            assert share * most == pytest.approx(gains.sum() / draws.count, rel=1e-8)
            assert abs(share * most - exact) <= 4.5 * spread + 0.004 * exact
            assert most * highest_mean(share, math.log(1e7) / draws.count) >= exact
    assert len(tilts) == 3


@pytest.mark.parametrize(("sampler", "mechanism", "rows"), CASES)
def test_epsilon_is_above_the_truth_and_near_it(sampler, mechanism, rows):
    delta = 1e-3
    epsilon = run_of(sampler, mechanism).epsilon(delta)
    at = (epsilon, epsilon * 0.93)
    truth = deltas(mechanism.encoder(), rows, Z, at, 33).max(axis=0)
    assert truth[0] < delta < truth[1]


def test_separation_of_one_is_poisson_sampling_of_dp_accounting():
    sampled = run_of(BMinSep(10, 100, 1), Independent(32), 200_000, z=2.0).epsilon(1e-3)
    exact = sampled_guarantee(
        Independent(32), PoissonSampling(10, 100), noise_multiplier=2.0
    ).epsilon(1e-3)
    assert exact < sampled < exact * 1.06


def test_the_example_of_opake():
    """It prints 3.470, and 2.960 with 2.94 million plain draws; with a tilt fewer are enough."""
    mechanism = optimize("blt", Participation(32, 4, 8), objective="max")
    run = run_of(BallsInBins(8, 32), mechanism, z=4.0)
    assert Guarantee(run.mu).epsilon(1e-5) == pytest.approx(3.470, abs=6e-4)
    closed = AllocatedGuarantee(4.0, BallsInBins(8, 32), mechanism).epsilon(1e-5)
    assert 2.7606 < run.epsilon(1e-5) < 2.960 < closed < 3.470


def test_the_bound_fails_no_more_often_than_it_says():
    """With f = 0.2 in 200 runs; the mean alone, its twin, is too low about every second time."""
    exact = AllocatedGuarantee(2.0, BallsInBins(4, 4)).delta(0.5)
    hypotheses = run_of(BallsInBins(4, 4), Independent(4), z=2.0)._hypotheses
    low = bare = 0
    for seed in range(200):
        draws = _Draws.of(hypotheses, 0.5, 2_000, 0.0, [seed], 0)
        share, most = draws.share(0.5), math.exp(draws.log_bound(0.5))
        low += most * highest_mean(share, math.log(5) / draws.count) < exact * 0.999
        bare += share * most < exact * 0.999
    assert low <= 40
    assert 60 < bare < 140


def test_the_chernoff_bound_is_inverted():
    assert highest_mean(0.0, 0.1) == pytest.approx(-math.expm1(-0.1))
    assert highest_mean(1.0, 0.1) == 1.0
    for mean in (1e-6, 0.01, 0.5):
        most = highest_mean(mean, 0.02)
        spent = mean * math.log(mean / most) + (1 - mean) * math.log((1 - mean) / (1 - most))
        assert spent == pytest.approx(0.02, rel=1e-5)
        assert most > mean


LITTLE = [1e-3, 3e-3, 0.01, 0.02, 0.04, 0.06, 0.1, 0.3, 1.0]
"""Noise multipliers at which likelihoods exceed every float, down to where they do not."""


@pytest.mark.parametrize("z", LITTLE)
def test_one_round_of_everybody_is_not_amplified(z):
    exact = Guarantee(1 / z).epsilon(1e-2)  # a delta that draws of nothing would satisfy
    found = run_of(BMinSep(1, 1, 1), Independent(1), 10_000, z=z).epsilon(1e-2)
    assert found == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize("z", [0.02, 0.06])
def test_full_batches_are_balls_in_bins_at_little_noise(z):
    mechanism = Toeplitz.square_root(16, 4)
    separated = run_of(BMinSep(2, 8, 4), mechanism, 10_000, z=z).epsilon(1e-2)
    bins = run_of(BallsInBins(4, 16), mechanism, 10_000, z=z).epsilon(1e-2)
    assert separated == pytest.approx(bins, rel=1e-3)


@pytest.mark.parametrize("z", LITTLE)
@pytest.mark.parametrize("batch", [1, 2])
def test_no_pattern_of_rounds_costs_more_than_b_min_sep_at_any_noise(z, batch):
    """The mixture is at least pi N(|C| x, z^2 I), and at most the worst x without its secret."""
    mechanism, delta = Toeplitz.square_root(16, 4), 2e-3
    run = run_of(BMinSep(batch, 8, 4), mechanism, 20_000, z=z)
    least = 0.0
    for joined, weight in separated_rows(16, 4, run.sampling.probability).items():
        if weight > delta:
            mu = float(np.linalg.norm(mechanism.encoder() @ np.array(joined))) / z
            if mu > 0:
                least = max(least, Guarantee(mu).epsilon(delta / weight) + math.log(weight))
    assert least * (1 - 1e-7) <= run.epsilon(delta) <= Guarantee(run.mu).epsilon(delta)
    assert least > 0.5 * Guarantee(run.mu).epsilon(delta) or z > 0.1


class _Overflown:
    """Hypotheses whose log likelihood is not a number in one draw."""

    width = 1

    def __init__(self, lost, when):
        self._lost, self._when = lost, when

    def log_weight(self, factor):
        return 100.0 * factor

    def draw(self, rng, count, power):
        return rng.standard_normal((1, count))

    def log_mean(self, terms, power):
        found = power * terms[0]
        if self._when(power):
            found[7] = self._lost
        return found


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("of", ["the loss", "its weight"])
def test_a_draw_that_is_not_a_number_does_not_count_as_nothing(lost, direction, of):
    """It is 0 in a sum over losses above a floor, and epsilon falls towards 0."""
    fine = _Overflown(lost, lambda power: False)
    assert _Draws.of(fine, 60.0, 1000, 0.0, [0], direction).tilt > 1
    broken = _Overflown(lost, lambda power: (power == 1.0) == (of == "the loss"))
    with pytest.raises(ConfigError, match="the likelihood of a draw is not a number"):
        _Draws.of(broken, 60.0, 1000, 0.0, [0], direction)


ROOT = Toeplitz.square_root
GROUPED = Grouped(((0,), (1,)) * 2, (Independent(2), Independent(2)), (1, 1))


@pytest.mark.parametrize(
    ("mechanism", "sampler", "fault"),
    [
        (ROOT(8, 4), BMinSep(1, 8, 3), "min_separation=3: the encoder of toeplitz has 4 bands"),
        (BinaryTree(8), BMinSep(1, 8, 8), "tree: only a square lower-triangular"),
        (Independent(8), PoissonSampling(1, 8), r"must be BallsInBins\(...\) or BMinSep"),
        (GROUPED, BallsInBins(2, 4), "no amplification is known here for groups"),
        (Independent(9), BallsInBins(2, 8), "rounds=8: of the sampling; the mechanism has 9"),
        (ROOT(8), BallsInBins(9, 8), "bins=9: with correlated noise at most one per round"),
        (ROOT(5000), BallsInBins(9, 5000), "rounds=5000: at most 4096"),
    ],
)
def test_what_no_proof_covers_is_refused(mechanism, sampler, fault):
    kind = AllocatedGuarantee if "known here" in fault else EstimatedGuarantee
    with pytest.raises(ConfigError, match=fault):
        kind(4.0, sampler, mechanism)


def test_trees_are_covered_in_bins():
    """A tree's rows are nodes, each released after its last round; 4 bins of 8 rounds."""
    run = AllocatedGuarantee(4.0, BallsInBins(4, 8), BinaryTree(8))
    fixed = BinaryTree(8).sensitivity(Participation(8, 2, 4)).squared
    assert run.mu <= math.sqrt(fixed) / 4 * (1 + 1e-12)
    estimate = run_of(BallsInBins(4, 8), BinaryTree(8), z=4.0)
    assert estimate.epsilon(1e-4) < run.epsilon(1e-4) < Guarantee(run.mu).epsilon(1e-4)


def cut_draws(members, rows, most):
    """Yield the kept rounds of all members, and the probability, by drawing and cutting anyhow."""
    for patterns in itertools.product(rows, repeat=members):
        weight = math.prod(rows[pattern] for pattern in patterns)
        ways = []
        for t in range(len(patterns[0])):
            joined = [i for i in range(members) if patterns[i][t]]
            ways.append(list(itertools.combinations(joined, min(most, len(joined)))))
        for kept in itertools.product(*ways):
            yield kept, weight / math.prod(map(len, ways)), any(len(way) > 1 for way in ways)


@pytest.mark.parametrize(
    ("sampler", "lag", "often"),
    [(BMinSep(0.5, 4, 2, most=2), 0.6, False), (BMinSep(2.7, 3, 1, most=2), 0.0, True)],
)
def test_a_greatest_batch_costs_no_more_than_the_cut_allows(sampler, lag, often):
    """Two members stay, and others send -1; a sampler of who stays, on their own, is below."""
    encoder, z, epsilons = np.array([[1.0, 0.0], [lag, 1.0]]), 0.5, [0.0, 1.0, 4.0, 7.0]
    rows = separated_rows(2, sampler.min_separation, sampler.probability)
    axis = np.linspace(-7.5, 5.5, 521)
    points = np.stack([one.ravel() for one in np.meshgrid(axis, axis, indexing="ij")])
    present, absent, cut = np.zeros(points.shape[1]), np.zeros(points.shape[1]), 0.0
    means = Counter()
    for kept, weight, is_cut in cut_draws(sampler.population, rows, 2):
        own = tuple(int(0 in some) for some in kept)
        others = tuple(len(some) - mine for some, mine in zip(kept, own, strict=True))
        means[own, others] += weight
        cut += weight * is_cut
    cell = (axis[1] - axis[0]) ** 2 / (2 * math.pi * z * z)
    for (own, others), weight in means.items():
        for sum_of, sent in ((present, own), (absent, (0, 0))):
            center = encoder @ (np.array(sent) - np.array(others))
            squared = ((points.T - center) ** 2).sum(axis=1)
            sum_of[:] += weight * cell * np.exp(-squared / (2 * z * z))
    assert often or 0.01 < cut <= sampler.cut_probability(2) < 3 * cut
    uncut = deltas(encoder, rows, z, epsilons, 401)
    stays = sum(weight for (own, _), weight in means.items() if own[0])
    rarer = deltas(encoder, separated_rows(2, 1, stays), z, epsilons, 401)
    forgotten = 0
    for at, epsilon in enumerate(epsilons):
        for direction, pair in enumerate(((present, absent), (absent, present))):
            truth = np.maximum(pair[0] - math.exp(epsilon) * pair[1], 0).sum()
            claim = uncut[direction, at] + (1 + math.exp(epsilon)) * cut
            assert truth <= claim + 1e-6
            forgotten += truth > rarer[direction, at] * 1.01
    assert forgotten or not often


def test_an_estimate_pays_for_a_greatest_batch_or_says_that_it_cannot():
    mechanism, delta = ROOT(16, 4), 1e-4
    cut, rare, never = (BMinSep(100, 10_000, 4, most=most) for most in (120, 165, 300))
    uncut = BMinSep(100, 10_000, 4)
    plain = run_of(uncut, mechanism, 20_000).epsilon(delta)
    assert plain * (1 - 1e-5) <= run_of(never, mechanism, 20_000).epsilon(delta) <= plain * 1.001
    assert plain < run_of(rare, mechanism, 20_000).epsilon(delta)
    # So few draws that the bound is far above the estimate.
    few = [run_of(some, mechanism, 10_000, z=1.0).epsilon(1e-5) for some in (never, uncut)]
    assert few[0] == pytest.approx(few[1], rel=1e-4)
    with pytest.raises(ConfigError, match="most: some round is cut with probability"):
        run_of(cut, mechanism, 20_000).epsilon(delta)
    with pytest.raises(ConfigError, match="most=100: cuts no round"):
        BMinSep(10, 100, 4, most=100)


def test_cohorts_of_a_greatest_batch_are_those_without_but_for_a_random_rest():
    free, cut = (BMinSep(10, 60, 3, most=most) for most in (None, 11))
    both = [cohorts(sampler, members=60, rounds=3000, key=bytes(32)) for sampler in (free, cut)]
    dropped = np.zeros(60)
    for before, after in zip(*both, strict=True):
        assert len(after) == min(11, len(before))
        rest = np.setdiff1d(before, after)
        assert len(rest) == len(before) - len(after)
        dropped[rest] += 1
    expected = dropped.mean()
    assert expected > 20
    assert ((dropped - expected) ** 2 / expected).sum() < 120  # chi-square of 59 degrees
    assert sampling_from_dict(sampling_to_dict(cut)) == cut
    assert "most" not in sampling_to_dict(free)
