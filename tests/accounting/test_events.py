"""Events of dp-accounting: read as its own accountant reads them, and written for it."""

import json
import math
from fractions import Fraction

import dp_accounting as dp
import pytest
from dp_accounting import pld

from accounting import (
    ComposedGuarantee,
    ConfigError,
    Guarantee,
    SampledGuarantee,
    StatedGuarantee,
    composed_events,
)
from accounting.events import event_of

GAUSSIAN = dp.GaussianDpEvent(2.0)
POISSON = dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(1.5))


def plain(value):
    """Return an event's named tuples as JSON has them, by docs/concepts/sampling.md."""
    if hasattr(value, "_asdict"):
        return {name: plain(v) for name, v in value._asdict().items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def as_json(event):
    return json.loads(json.dumps(plain(event.to_named_tuple())))


def theirs(event, delta):
    return pld.PLDAccountant().compose(event).get_epsilon(delta)


@pytest.mark.parametrize(
    "event",
    [
        GAUSSIAN,
        dp.SelfComposedDpEvent(GAUSSIAN, 9),
        pytest.param(dp.SelfComposedDpEvent(POISSON, 200), marks=pytest.mark.slow),
        dp.ComposedDpEvent(
            [
                dp.SelfComposedDpEvent(POISSON, 50),
                dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, GAUSSIAN), 30),
                dp.NoOpDpEvent(),
                GAUSSIAN,
            ]
        ),
        dp.SelfComposedDpEvent(dp.ComposedDpEvent([POISSON, GAUSSIAN]), 3),
        dp.PoissonSampledDpEvent(0.2, dp.SelfComposedDpEvent(GAUSSIAN, 4)),
    ],
    ids=["gaussian", "nine", "poisson", "rates", "nested", "one sample, four releases"],
)
def test_events_cost_what_dp_accounting_says(event):
    if isinstance(event, dp.PoissonSampledDpEvent):  # which it does not take; one of half the noise
        told = dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(1.0))
    else:
        told = event
    ours = composed_events(as_json(event)).epsilon(1e-5)
    assert ours == pytest.approx(theirs(told, 1e-5), rel=2e-3)


def test_laplace_is_its_pure_epsilon():
    three = dp.SelfComposedDpEvent(dp.LaplaceDpEvent(10.0), 3)
    ours = composed_events(as_json(three))
    assert theirs(three, 1e-6) <= ours.epsilon(1e-6) <= 0.3 * (1 + 1e-3)


@pytest.mark.parametrize("run", [Guarantee(0.7), SampledGuarantee(1.3, 0.02, 100)])
def test_what_is_written_is_read_by_both(run):
    written = event_of(run)
    epsilon = run.epsilon(1e-6)
    assert epsilon <= composed_events(written).epsilon(1e-6) * (1 + 1e-9)
    assert composed_events(written).epsilon(1e-6) <= epsilon * 1.001

    def rebuilt(values):
        kind = getattr(dp, values["class_name"])
        inner = {k: rebuilt(v) if isinstance(v, dict) else v for k, v in values.items()}
        del inner["class_name"]
        return kind(**inner)

    assert theirs(rebuilt(written), 1e-6) == pytest.approx(epsilon, rel=1e-3)


def test_a_run_of_which_the_last_bits_are_lost_has_a_profile():
    """dp-accounting's sums of 1 leave deltas of -2e-14 here, which were refused."""
    run = SampledGuarantee(1.0, 0.010000000000000002, 1000)
    ours = composed_events(event_of(run)).epsilon(1e-5)
    assert run.epsilon(1e-5) <= ours * (1 + 1e-6) <= run.epsilon(1e-5) * 1.001


@pytest.mark.parametrize("steps", [1000, 100_000, pytest.param(10**6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("delta", [1e-8, 2e-10, 2e-11])
def test_many_steps_never_cost_less_than_the_exact_gaussian(steps, delta):
    """Sampled with probability 1 they are one Gaussian of mu 1; transforms lost up to 5 % here."""
    run = SampledGuarantee(math.sqrt(steps), 1.0, steps)
    if delta <= 1e-16 * steps:
        with pytest.raises(ConfigError, match="lose to rounding"):
            run.epsilon(delta)
        return
    exact = Guarantee(1.0).epsilon(delta)
    assert run.epsilon(delta) >= exact
    assert ComposedGuarantee((run,)).epsilon(delta) >= exact


def test_a_release_that_costs_a_delta_alone_composes():
    composed = ComposedGuarantee((StatedGuarantee(0.0, 1e-6),))
    assert composed.epsilon(2e-6) == 0
    assert 1e-6 <= composed.delta(0.0) <= 1.001e-6


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (3, "is not an event"),
        ({"class_name": "os.system"}, "is not an event"),
        ({"class_name": "NonPrivateDpEvent"}, "has no accountant here"),
        ({"class_name": "GaussianDpEvent"}, "noise_multiplier is missing"),
        ({"class_name": "GaussianDpEvent", "noise_multiplier": 0}, "noise_multiplier"),
        ({"class_name": "GaussianDpEvent", "noise_multiplier": math.nan}, "noise_multiplier"),
        ({"class_name": "GaussianDpEvent", "noise_multiplier": "1"}, "noise_multiplier"),
        ({"class_name": "NoOpDpEvent"}, "none of them releases"),
        ({"class_name": "ComposedDpEvent", "events": {}}, "must be a list"),
        ({"class_name": "SelfComposedDpEvent", "count": 2}, "is not an event"),
        ({**plain(dp.SelfComposedDpEvent(GAUSSIAN, 10**9).to_named_tuple())}, "count"),
        (plain(dp.PoissonSampledDpEvent(1.5, GAUSSIAN).to_named_tuple()), "at most 1"),
        (
            {"class_name": "ComposedDpEvent", "events": [], "noise_multiplier": 9.0},
            "has no field 'noise_multiplier'",
        ),
        ({"class_name": "GaussianDpEvent", "noise_multiplier": 1e-200}, "too small to promise"),
        (plain(dp.PoissonSampledDpEvent(0.5, POISSON).to_named_tuple()), "only Gaussian events"),
    ],
)
def test_what_is_not_an_event_is_refused_in_a_sentence(event, says):
    with pytest.raises(ConfigError, match=says):
        composed_events(event)


def test_a_field_of_another_event_does_not_become_the_noise():
    """Several releases on one sample: epsilon was that of the noise beside them, 0.4 for 81."""
    many = as_json(dp.SelfComposedDpEvent(dp.GaussianDpEvent(1.0), 100))
    sampled = {"class_name": "PoissonSampledDpEvent", "sampling_probability": 0.01}
    assert composed_events(sampled | {"event": many}).epsilon(1e-6) > 80
    with pytest.raises(ConfigError, match="SelfComposedDpEvent: has no field"):
        composed_events(sampled | {"event": many | {"noise_multiplier": 1.0}})


def test_many_small_gaussians_are_not_lost_beside_a_great_one():
    """Each adds less than half of the sum's last bit."""
    small = {"class_name": "GaussianDpEvent", "noise_multiplier": 1.195e4}
    great = {"class_name": "GaussianDpEvent", "noise_multiplier": 1e-4}
    run = composed_events({"class_name": "ComposedDpEvent", "events": [great] + [small] * 20_000})
    assert Fraction(run.mu) ** 2 >= 1 / Fraction(1e-4) ** 2 + 20_000 / Fraction(1.195e4) ** 2


def test_samples_of_everybody_are_one_gaussian():
    sampled = dp.PoissonSampledDpEvent(1.0, dp.GaussianDpEvent(1.0))
    run = composed_events(as_json(dp.SelfComposedDpEvent(sampled, 10**6)))
    assert run.mu == pytest.approx(1000, rel=1e-12)


def test_nesting_is_bounded():
    event = as_json(GAUSSIAN)
    for _ in range(100):
        event = {"class_name": "SelfComposedDpEvent", "event": event, "count": 1}
    with pytest.raises(ConfigError, match="nested deeper"):
        composed_events(event)
