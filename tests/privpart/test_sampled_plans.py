"""Plan files with [privacy.sampling]: what they promise, what they refuse, and how they train."""

import json

import pytest
import torch

import privpart
from accounting import (
    AllocatedGuarantee,
    BallsInBins,
    ConfigError,
    Independent,
    PoissonSampling,
    ScheduledPoissonSampling,
    sampled_guarantee,
)
from privpart.data import from_tensors
from privpart.engines.methods import Method
from privpart.engines.options import EngineOptions
from privpart.run.budget_book import account
from privpart.run.ledger import Ledger
from privpart.training import plan_file
from privpart.training.training import Own, training

TEXT = """
schema = "privpart/plan/1"
[privacy]
rounds = 6
clip_norm = 1.0
noise_multiplier = 4.0
delta = 1e-5
mechanism = { name = "independent" }
[privacy.sampling]
name = "poisson"
expected_batch = 3
population = 9
[model]
[data]
[client]
learning_rate = 0.1
[server]
"""
OWN = {"in_python": True}


def read(old="", new=""):
    assert old in TEXT
    return plan_file.parse(TEXT.replace(old, new, 1), **OWN)


POISSON = 'name = "poisson"\nexpected_batch = 3'
BINS = 'name = "balls-in-bins"\nbins = 3'
APART = 'name = "b-min-sep"\nexpected_batch = 3'


def test_a_plan_promises_what_its_sampler_keeps_to():
    promised = read().privacy_plan()
    assert promised.sampling == PoissonSampling(3, 9)
    assert (promised.report_goal, promised.minimum_cohort, promised.estimate) == (3, 0, None)
    whole = sampled_guarantee(Independent(6), PoissonSampling(3, 9), noise_multiplier=4.0)
    assert promised.guarantee() == whole
    bins = read(POISSON, BINS).privacy_plan()
    assert bins.guarantee() == AllocatedGuarantee(4.0, BallsInBins(3, 6))
    assert bins.report_goal == 3
    several = read(POISSON, BINS + "\nchosen = 2").privacy_plan()
    assert several.sampling == BallsInBins(3, 6, chosen=2)
    assert (several.report_goal, several.participation.max_participations) == (6, 4)
    assert privpart.PrivacyPlan.from_dict(several.to_dict()) == several


def test_a_plan_has_schedules_of_noise_and_of_rates():
    rates = 'name = "scheduled-poisson"\nfrom_round = [0, 4]\nexpected_batches = [3, 6]'
    noise = 'name = "scheduled", from_round = [0, 2], factor = [1.0, 0.5]'
    text = TEXT.replace(POISSON, rates).replace('name = "independent"', noise)
    promised = plan_file.parse(text, **OWN).privacy_plan()
    assert promised.sampling == ScheduledPoissonSampling((0, 4), (3.0, 6.0), 9)
    kinds = [(s.noise_multiplier, s.steps) for s in promised.guarantee().steps]
    assert kinds == [(pytest.approx(4.0), 2), (pytest.approx(2.0), 2), (pytest.approx(2.0), 2)]
    alone = read().privacy_plan().guarantee()
    assert alone.epsilon(1e-5) < promised.report(1e-5).epsilon == promised.guarantee().epsilon(1e-5)


def test_an_estimate_has_a_fresh_seed_each_time_and_its_plan_one_hash():
    chosen = read(POISSON, APART + "\ndraws = 10000")
    first, second = chosen.privacy_plan(), chosen.privacy_plan()
    assert first.estimate.draws == 10_000
    assert first.estimate.seed != second.estimate.seed
    report = first.report(1e-5)
    assert f"seed {first.estimate.seed}" in report.formula
    assert report.sampling["failure_probability"] == pytest.approx(1e-7)
    assert report.epsilon == privpart.PrivacyPlan.from_dict(first.to_dict()).report(1e-5).epsilon


def test_a_target_is_met_in_closed_form_and_refused_for_an_estimate():
    text = TEXT.replace("noise_multiplier = 4.0", "target_epsilon = 1.0")
    bins = text.replace(POISSON, BINS.replace("3", "2")).replace("rounds = 6", "rounds = 2")
    promised = plan_file.parse(bins, **OWN).privacy_plan()
    assert 0.9999 <= promised.report(1e-5).epsilon <= 1.0
    with pytest.raises(ConfigError, match="cannot be met by an estimate"):
        plan_file.parse(text.replace(POISSON, APART), **OWN).privacy_plan()


REFUSED = [
    ("[data]", "[data]\nclients_per_round = 3", "clients_per_round: cannot be combined"),
    ("rounds = 6", "rounds = 6\nminimum_cohort = 1", "minimum_cohort: follows from"),
    ("rounds = 6", "rounds = 6\nmax_participations = 6", "max_participations: follows from"),
    ("[privacy.sampling]", "adaptive_clipping = { bit_noise_multiplier = 9.0 }\n[privacy.sampling]",
     "adaptive_clipping: cannot be combined"),
    ("[model]", "[schedule]\ncycles = 1\n[model]", "schedule: cannot be combined"),
    ("[model]", "[canaries]\ncount = 20\n[model]", "canaries: cannot be combined"),
    ("[model]", '[select]\ndelivery = "pir"\nfilters = { keys = "independent", m = 2 }\n[model]',
     "select: cannot be combined"),
    ("population = 9\n", "", "population: is missing"),
    ("expected_batch = 3\n", "", "expected_batch: is missing; poisson needs it"),
    ("expected_batch = 3", "expected_batch = 3\nbins = 3", "bins: is not of poisson"),
    ('"poisson"', '"shuffle"', "privacy.sampling.name"),
    ("[privacy.sampling]", "[privacy.smapling]", "The nearest is sampling"),
    (f"[privacy.sampling]\n{POISSON}\npopulation = 9\n", "", "clients_per_round: is missing"),
    ('{ name = "independent" }', '{ name = "tree", restart_every = 6 }', "has no effect"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "sentence"), REFUSED, ids=[own[2] for own in REFUSED])
def test_what_sampling_decides_or_does_not_cover_is_refused(old, new, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read(old, new)


CLIENTS = from_tensors(
    (torch.randn(18, 4, generator=torch.Generator().manual_seed(0)), torch.arange(18) % 2),
    user=[f"client {i % 9}" for i in range(18)],
)
SMALL = torch.nn.Linear(4, 2)


def trained(out, text=TEXT, **options):
    return privpart.train(
        SMALL, CLIENTS, plan=plan_file.parse(text, **OWN), out=out, progress=False, **options
    )


def test_a_run_trains_on_the_cohorts_of_its_key_whatever_they_are(tmp_path):
    rare = TEXT.replace("expected_batch = 3", "expected_batch = 0.9")
    run = trained(tmp_path / "run", rare)
    assert len(run.history) == 6
    report = run.report()
    assert report.complete
    status = {a.code: a.status for a in report.guarantee.assumptions}
    assert status["poisson-sampling"] == "verified"
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["guarantee"]["sampling"]["name"] == "poisson"
    assert Ledger(run.path).facts["population"]


def test_clients_are_computed_alone_so_that_no_rounding_tells_who_else_was_drawn(tmp_path):
    chosen = plan_file.parse(TEXT, **OWN)
    own = Own(SMALL, CLIENTS)
    setup = training(chosen, objects=own)
    assert setup.engine.options.deterministic
    assert setup.engine._fixed == Method()
    with pytest.raises(ConfigError, match="no client's rounding"):
        training(chosen, objects=own, options=EngineOptions(batching="vmap"))


def test_a_group_smaller_than_its_batch_and_a_population_of_another_size_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="a group has only"):
        read('{ name = "independent" }', '{ name = "blt" }').privacy_plan()
    examples = 'name = "poisson-examples"\nexpected_batch = 3\nexamples = 9\nper_user = 2'
    with pytest.raises(ConfigError, match="samples examples, and what a plan adds up"):
        read(POISSON, examples).privacy_plan()
    with pytest.raises(ConfigError, match="a client sends one update; use without-replacement"):
        read(POISSON, 'name = "with-replacement"\nbatch = 3').privacy_plan()
    with pytest.raises(ConfigError, match="population of 8, there are 9"):
        trained(tmp_path / "run", TEXT.replace("population = 9", "population = 8"))


def test_a_run_in_several_bins_is_verified_and_its_cost_is_in_the_book(tmp_path):
    several = TEXT.replace(POISSON, BINS + "\nchosen = 2")
    several = several.replace("[data]", '[data]\npopulation = "people in several bins"')
    run = trained(tmp_path / "run", several)
    status = {a.code: a.status for a in run.report().guarantee.assumptions}
    assert status["balls-in-bins"] == "verified"
    (charge,) = account("people in several bins").charges
    expected = AllocatedGuarantee(4.0, BallsInBins(3, 6, chosen=2)).dominating()
    assert (charge.releases, expected.chosen) == ((expected,), 2)


@pytest.mark.slow
def test_empty_cohorts_go_through_worker_processes(tmp_path):
    rare = TEXT.replace("expected_batch = 3", "expected_batch = 0.5")
    assert trained(tmp_path / "run", rare, workers=2).report().complete
