"""Poisson steps whose noise, or whose rate, changes by round: by brute force and dp-accounting."""

import itertools

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from mixtures import deltas

from accounting import (
    BinaryTree,
    ConfigError,
    Independent,
    PoissonSampling,
    Scheduled,
    ScheduledGuarantee,
    ScheduledPoissonSampling,
    composed_events,
    sampled_guarantee,
)
from accounting.cohorts import SamplingChoice
from accounting.events import event_of

NOISE = Scheduled(3, (0, 1, 2), (1.0, 2.0, 1.5))
RATES = ScheduledPoissonSampling((0, 2), (30, 50), population=100)
EACH = PoissonSampling(30, 100)
CASES = [
    (NOISE, EACH, (0.3, 0.3, 0.3)),
    (Independent(3), RATES, (0.3, 0.3, 0.5)),
    (NOISE, RATES, (0.3, 0.3, 0.5)),
]


def truth(mechanism, rates, epsilons) -> np.ndarray:
    """Deltas in both directions, by summing over a grid of the release."""
    rows = {
        joined: float(np.prod([q if x else 1 - q for x, q in zip(joined, rates, strict=True)]))
        for joined in itertools.product((0, 1), repeat=3)
    }
    return deltas(mechanism.encoder(), rows, 1.0, epsilons, 101)


@pytest.mark.parametrize(("mechanism", "sampling", "rates"), CASES, ids=["noise", "rate", "both"])
def test_three_rounds_cost_just_above_the_truth(mechanism, sampling, rates) -> None:
    epsilons = (0.0, 0.5, 1.0)
    run = sampled_guarantee(mechanism, sampling, noise_multiplier=1.0)
    exact = truth(mechanism, rates, epsilons).max(axis=0)
    claims = np.array([run.delta(epsilon) for epsilon in epsilons])
    assert (exact <= claims * (1 + 1e-5)).all()  # the grid's own error is 4e-6
    assert (claims <= exact * 1.01).all()


def test_an_average_in_place_of_the_schedule_is_below_the_truth() -> None:
    """The power twins: the mean rate, and the mean noise, of a run that varies."""
    exact = truth(Independent(3), (0.1, 0.1, 0.9), [1.0]).max()
    mean = sampled_guarantee(Independent(3), PoissonSampling(1.1 / 3, 1), noise_multiplier=1.0)
    assert mean.delta(1.0) < exact
    varied = Scheduled(3, (0, 1), (0.5, 2.0))
    mean = sampled_guarantee(Independent(3), EACH, noise_multiplier=1.5)
    assert mean.delta(1.0) < truth(varied, (0.3,) * 3, [1.0]).max()


@pytest.mark.slow
def test_hundreds_of_rounds_are_dp_accountings_composition_and_its_events() -> None:
    noise = Scheduled(300, (0, 100), (1.0, 0.8))
    rates = ScheduledPoissonSampling((0, 200), (10, 30), population=1000)
    run = sampled_guarantee(noise, rates, noise_multiplier=1.2)
    other = PLDAccountant()
    for z, q in ((1.2, 0.01), (0.96, 0.01), (0.96, 0.03)):
        other.compose(PoissonSampledDpEvent(q, GaussianDpEvent(z)), 100)
    assert run.epsilon(1e-6) == pytest.approx(other.get_epsilon(1e-6), rel=0.01)
    assert composed_events(event_of(run)).epsilon(1e-6) == run.epsilon(1e-6)
    assert [step.steps for step in run.steps] == [100] * 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ScheduledPoissonSampling((1,), (5,), 10), "must begin with 0"),
        (lambda: ScheduledPoissonSampling((0, 3, 3), (5, 5, 5), 10), "ascend"),
        (lambda: ScheduledPoissonSampling((0,), (5, 6), 10), "must have as many"),
        (lambda: ScheduledPoissonSampling((0,), (float("nan"),), 10), "expected_batches=nan"),
        (lambda: ScheduledPoissonSampling((0,), (11,), 10), "at most the population"),
        (lambda: RATES.probabilities(2), "from_round=2: has no effect"),
        (
            lambda: sampled_guarantee(BinaryTree(3), RATES, noise_multiplier=1.0),
            "no proof covers correlated noise with a rate",
        ),
        (
            lambda: sampled_guarantee(NOISE, EACH, noise_multiplier=1.0, method="rdp"),
            "composed by 'pld'",
        ),
        (lambda: ScheduledGuarantee(()), "1 to 100"),
        (
            lambda: sampled_guarantee(
                Scheduled(101, range_ := tuple(range(101)), tuple(1 + 0.1 * t for t in range_)),
                EACH,
                noise_multiplier=1.0,
            ),
            "of 101 kinds",
        ),
        (lambda: SamplingChoice.parse("scheduled-poisson:from_round=0"), "expected_batches"),
        (lambda: SamplingChoice.parse("scheduled-poisson:expected_batches=5"), "from_round"),
        (lambda: SamplingChoice.parse("poisson:expected_batches=5,expected_batch=3"), "no option"),
    ],
)
def test_what_is_no_schedule_is_refused(call, message) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
