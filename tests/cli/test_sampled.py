"""``privpart epsilon --sampling``: each sampler with the one accountant that covers it."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from accounting import (
    AllocatedGuarantee,
    BallsInBins,
    BMinSep,
    EstimatedGuarantee,
    Guarantee,
    PoissonSampling,
    ReplacedGuarantee,
    Toeplitz,
    TruncatedGuarantee,
    UserGuarantee,
    sampled_guarantee,
)
from privpart.cli.budget.solve import solve

RUN = ["epsilon", "--delta", "1e-6", "--format", "json"]
OF_1000 = ["--population", "1000"]
POISSON = ["--sampling", "poisson:expected_batch=100", *OF_1000]
BINS = ["--sampling", "balls-in-bins:bins=8"]
ALONE = ["--mechanism", "independent"]


def test_dp_sgd_of_jax_privacy(privpart):
    run = [*RUN, *ALONE, "--rounds", "512", "--noise-multiplier", "3", *POISSON]
    report = json.loads(privpart(*run).stdout)
    assert report["epsilon"] == pytest.approx(3.7697, rel=1e-4)
    assert (report["adjacency"], report["sampling"]["steps"]) == ("add-or-remove", 512)
    assert {"poisson-sampling", "hidden-sample"} <= {a["code"] for a in report["assumptions"]}
    assert privpart(*run, "--max-epsilon", "3.7").returncode == 3
    assert json.loads(privpart(*run, "--method", "rdp").stdout)["epsilon"] > 3.77


@pytest.mark.parametrize(
    ("sampler", "cost"),
    [
        ("truncated-poisson:expected_batch=20,most=32", (0.02, 1000, 32)),
        ("without-replacement:batch=20", (1.0, 1000, 20)),
        ("with-replacement:batch=20", None),
    ],
)
def test_samples_of_bounded_size(privpart, sampler, cost):
    run = [*RUN, *ALONE, "--rounds", "20", "--noise-multiplier", "4", "--sampling", sampler]
    report = json.loads(privpart(*run, *OF_1000).stdout)
    run = TruncatedGuarantee(4.0, *cost, 20) if cost else ReplacedGuarantee(4.0, 20, 1000, 20)
    expected = run.epsilon(1e-6)
    assert report["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert {"stateless-members", "hidden-sample"} <= {a["code"] for a in report["assumptions"]}


def test_a_banded_mechanism_takes_its_groups_in_turn(privpart):
    run = [*RUN, "--rounds", "30", "--noise-multiplier", "4", "--mechanism",
           "toeplitz:bands=3", *POISSON]  # fmt: skip
    groups, mechanism = PoissonSampling(100, 1000, groups=3), Toeplitz.square_root(30, 3)
    expected = sampled_guarantee(mechanism, groups, noise_multiplier=4)
    report = json.loads(privpart(*run).stdout)
    assert (report["epsilon"], report["sampling"]["groups"]) == (expected.epsilon(1e-6), 3)
    assert any("in 3 groups" in a["text"] for a in report["assumptions"])


BANDED = ["--mechanism", "toeplitz:bands=4"]
SQUARE = ["--rounds", "16", "--noise-multiplier", "4", *BANDED]
DRAWN = ["--sampling", "balls-in-bins:bins=8,draws=10000"]


def test_balls_in_bins_of_correlated_noise(privpart):
    report = json.loads(privpart(*RUN, *SQUARE, *BINS).stdout)
    mechanism = Toeplitz.square_root(16, 4)
    run = AllocatedGuarantee(4.0, BallsInBins(8, 16), mechanism)
    assert report["epsilon"] == run.epsilon(1e-6) < Guarantee(report["mu"]).epsilon(1e-6)
    assert "draws" not in report["sampling"]
    drawn = json.loads(privpart(*RUN, *SQUARE, DRAWN[0], f"{DRAWN[1]},draw_seed=0").stdout)
    estimate = EstimatedGuarantee(4.0, BallsInBins(8, 16), mechanism, 10_000, 0)
    assert drawn["epsilon"] == estimate.epsilon(1e-6)
    assert (drawn["sampling"]["draws"], drawn["sampling"]["draw_seed"]) == (10_000, 0)


def test_the_seed_is_printed_and_one_that_somebody_chose_is_not_random(privpart):
    run = [*RUN, *SQUARE, *DRAWN]
    shown = " ".join(privpart(*run[:3], *run[5:-1], f"{run[-1]},draw_seed=17").stdout.split())
    assert "17, the seed of the draws, is random" in shown
    assert "a seed that somebody chose is not a random one" in shown
    assert "choosing among k estimates makes one too low with up to k times" in shown


def test_b_min_sep_says_in_one_line_how_likely_it_is_wrong(privpart):
    apart = ["--sampling", "b-min-sep:expected_batch=100,draws=10000,draw_seed=3", *OF_1000]
    run = [*RUN[:3], *SQUARE]
    shown = privpart(*run, *apart).stdout
    line = next(line for line in shown.splitlines() if line.startswith("  epsilon  "))
    assert "by Monte Carlo with 10000 draws of seed 3; too low for 1e-08 of all seeds" in line
    report = json.loads(privpart(*run, *apart, "--format", "json").stdout)
    sampler, sampling = BMinSep(100, 1000, 4), report["sampling"]
    expected = EstimatedGuarantee(4.0, sampler, Toeplitz.square_root(16, 4), 10_000, 3)
    assert report["epsilon"] == expected.epsilon(1e-6)
    assert (sampling["min_separation"], sampling["probability"]) == (4, sampler.probability)
    assert sampling["failure_probability"] == pytest.approx(1e-8)
    apart[1] += ",min_separation=5"
    wider = json.loads(privpart(*run, *apart, "--format", "json").stdout)
    assert wider["sampling"]["min_separation"] == 5
    assert privpart(*run, *apart, "--max-epsilon", "0.01").returncode == 3


APART = "b-min-sep:expected_batch=100"


@pytest.mark.parametrize(
    ("sampling", "typed", "fault"),
    [
        (APART, [*OF_1000, "--mechanism", "tree"], "only a square lower-triangular"),
        (f"{APART},min_separation=3", [*OF_1000, *BANDED], "has 4 bands"),
        ("b-min-sep", [*OF_1000, *BANDED], "expected_batch: is missing"),
        (APART, BANDED, "population is missing"),
        (APART, [*OF_1000, "--mechanism", "toeplitz"], "at most population / min_separation"),
        (APART, [*OF_1000, *BANDED, "--method", "pld"], "every other sampler one accountant"),
        ("poisson:expected_batch=9,bins=8", [*OF_1000, *ALONE], "no option 'bins'"),
        ("poisson:expected_batch=9", [*OF_1000, *ALONE, "--method", "exact"], "has 'pld' (def"),
        ("poisson:expected_batch=9", ["--population", "3", *ALONE], "expected_batch=9"),
        ("balls-in-bins:bins=8,draw_seed=0", ALONE, "nothing is drawn; add draws"),
        ("balls-in-bins:bins=8", [*ALONE, "--log", "log.csv"], "leave out --log"),
        ("balls-in-bins:bins=1", ALONE, "bins=1: must be at least 2"),
    ],
)
def test_other_combinations_are_refused(privpart, sampling, typed, fault):
    run = ["--rounds", "32", "--noise-multiplier", "4", "--sampling", sampling]
    done = privpart(*RUN, *run, *typed)
    assert (done.returncode, done.stdout) == (2, "")
    assert fault in " ".join(done.stderr.split())


FOR_TARGET = ["calibrate", "--rounds", "16", "--delta", "1e-5", "--target-epsilon", "2"]


def test_calibrate_finds_the_noise_of_a_sampled_run(privpart):
    own = [*ALONE, *POISSON, "--method", "rdp", "--format", "json"]
    found = json.loads(privpart(*FOR_TARGET, *own).stdout)
    assert 2 * (1 - 1e-4) <= found["epsilon"] <= 2
    noise = str(found["noise_multiplier"])
    typed = ["--rounds", "16", "--delta", "1e-5", "--noise-multiplier", noise]
    assert json.loads(privpart("epsilon", *typed, *own).stdout)["epsilon"] == found["epsilon"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["0.2", "4"])
def test_calibrate_finds_the_least_noise_of_bins(privpart, target):
    line = ["calibrate", "--rounds", "8", "--delta", "1e-6", *ALONE, *BINS, "--format", "json"]
    found = json.loads(privpart(*line, "--target-epsilon", target).stdout)
    assert float(target) * (1 - 1e-4) <= found["epsilon"] <= float(target)


def test_a_plan_that_samples_is_accounted_for_or_refused_in_a_sentence(privpart, tmp_path):
    text = Path("examples/digits.toml").read_text()
    for old, new in (
        ("minimum_cohort = 10\n", ""),
        ("rounds = 72", "rounds = 24"),
        ('"blt" }', '"toeplitz" }\n[privacy.sampling]\nname = "balls-in-bins"\nbins = 12'),
        ("clients_per_round = 19\n", ""),
    ):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    plan = tmp_path / "sampled.toml"
    plan.write_text(text)
    shown = " ".join(privpart("epsilon", "--plan", plan).stdout.split())
    for words in ("add-or-remove adjacency", "not hidden epsilon", "into one of 12 bins"):
        assert words in shown
    for refused, said in (
        (["epsilon", "--plan", plan, "--method", "rdp"], "leave out --method"),
        (["mechanisms", "--plan", plan], "calibrate --sampling"),
    ):
        result = privpart(*refused)
        assert (result.returncode, said in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize("population", [None, 4])
def test_the_greatest_batch_of_examples_is_not_bounded_by_the_number_of_clients(population):
    def costs_its_batch(_, sampling):
        cost = Mock(return_value=float(sampling.rpartition("=")[2]))
        return Mock(delta=1e-6, guarantee=lambda: Mock(epsilon=cost))

    sampler = "poisson-examples:examples=60,per_user=20"
    found = solve(costs_its_batch, 8.5, 2, sampler, population)
    assert (found.number, found.neighbour) == (8, 9)
    assert solve(costs_its_batch, 99, 2, sampler, population).number == 60


def test_more_examples_than_the_clients_can_have_are_refused(privpart):
    sampler = "poisson-examples:expected_batch=9,examples=60,per_user=14"
    run = ["--rounds", "20", "--noise-multiplier", "4", "--population", "4", "--sampling", sampler]
    refused = privpart(*RUN, *ALONE, *run)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "per_user=14: a population of 4" in refused.stderr


@pytest.mark.slow
def test_users_with_several_examples(privpart):
    sampler = "poisson-examples:expected_batch=20,examples=1000"
    run = [*RUN, *ALONE, "--rounds", "20", "--noise-multiplier", "4", "--sampling", sampler]
    report = json.loads(privpart(*run[:-1], f"{sampler},per_user=3").stdout)
    assert report["epsilon"] == UserGuarantee(4.0, 0.02, 3, 20).epsilon(1e-6)
    assert report["mu"] == pytest.approx(3 * 20**0.5 / 4)
    assert (report["sampling"]["per_user"], report["sensitivity_squared"]) == (3, 180)
    refused = privpart(*run)
    assert (refused.returncode, "per_user: is missing" in refused.stderr) == (2, True)


def test_several_bins_of_each_member(privpart):
    run = [*RUN, *ALONE, "--rounds", "20", "--noise-multiplier", "2", "--sampling"]
    report = json.loads(privpart(*run, "balls-in-bins:bins=20,chosen=3").stdout)
    expected = AllocatedGuarantee(2.0, BallsInBins(20, 20, chosen=3)).epsilon(1e-6)
    assert report["epsilon"] == expected < Guarantee(report["mu"]).epsilon(1e-6)
    assert (report["sampling"]["chosen"], report["max_participations"]) == (3, 3)
    assert any("3 different ones of 20 bins" in a["text"] for a in report["assumptions"])
    refused = privpart(*run, "balls-in-bins:bins=20,chosen=21")
    assert (refused.returncode, "chosen=21: must be at most 20" in refused.stderr) == (2, True)


def test_bins_that_are_drawn_anew_cost_less(privpart):
    line = ["epsilon", "--rounds", "16", "--delta", "1e-5", "--noise-multiplier", "2", *ALONE]
    once, anew = (
        json.loads(privpart(*line, "--sampling", text, "--format", "json").stdout)
        for text in ("balls-in-bins:bins=4", "balls-in-bins:bins=4,redraw")
    )
    assert anew["epsilon"] < once["epsilon"]
    assert anew["sampling"]["redraw"] is True
    refused = privpart(*line, "--sampling", "poisson:expected_batch=2,redraw")
    assert (refused.returncode, "redraw" in refused.stderr) == (2, True)


GIVEN = ["calibrate", "--target-epsilon", "2", "--noise-multiplier", "1", "--delta", "1e-6", *ALONE]


@pytest.mark.parametrize(
    ("typed", "option", "text"),
    [
        pytest.param(
            ["--sampling", "poisson:expected_batch=20", "--population", "800"],
            "--rounds",
            "{}",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--rounds", "20", "--population", "500"],
            "--sampling",
            "poisson:expected_batch={}",
            marks=pytest.mark.slow,
        ),
        (["--rounds", "30"], "--sampling", "balls-in-bins:bins={}"),
        pytest.param(
            ["--rounds", "40"],
            "--sampling",
            "balls-in-bins:bins=40,chosen={}",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--rounds", "80"],
            "--sampling",
            "balls-in-bins:chosen=2,bins={}",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_left_out_is_found_beside_noise(privpart, typed, option, text):
    given = text.rpartition("," if "," in text else ":")[0]
    left_out = [] if option == "--rounds" else [option, given]
    found = json.loads(privpart(*GIVEN, *typed, *left_out, "--format", "json").stdout)
    solution = found["solution"]
    line = ["epsilon", "--noise-multiplier", "1", "--delta", "1e-6", *ALONE, *typed, option]

    def epsilon(number):
        typed = text.format(number)
        return json.loads(privpart(*line, typed, "--format", "json").stdout)["epsilon"]

    assert epsilon(solution["number"]) == found["epsilon"] <= 2
    assert epsilon(solution["neighbour"]) == solution["epsilon_of_neighbour"] > 2
    assert abs(solution["neighbour"] - solution["number"]) == 1


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        (["--rounds", "10"], "nothing is left out"),
        (["--noise-multiplier", "0"], "--noise-multiplier 0: must be positive"),
        (["--rounds", "9", "--sampling", "nonsense"], "must be one of poisson"),
        (["--sampling", "poisson", "--population", "100"], "rounds and expected_batch are missing"),
        (["--rounds", "9", "--sampling", "b-min-sep", "--population", "9"], "by draws cannot"),
        (["--rounds", "9", "--sampling", "balls-in-bins:draws=10000"], "by draws cannot find it"),
        (["--max-participations", "30"], "with rounds=30 this noise costs epsilon"),
    ],
)
def test_what_cannot_be_found_is_said(privpart, typed, why):
    refused = privpart(*GIVEN, *typed)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert why in refused.stderr
