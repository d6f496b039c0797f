"""``privpart epsilon --sampling``: each sampler with the one accountant that covers it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from accounting import (
    AllocatedGuarantee,
    BallsInBins,
    BMinSep,
    EstimatedGuarantee,
    PoissonSampling,
    Toeplitz,
    amplified,
    dp_sgd,
    random_allocation,
)
from accounting.mechanisms.by_name import MechanismChoice, MechanismName
from privpart.cli.budget.epsilon import epsilon
from privpart.cli.budget.options import Limits
from privpart.cli.budget.sampled import SamplingName
from privpart.cli.options import Format, MethodName

RUN = ["epsilon", "--delta", "1e-6", "--format", "json"]
POISSON = ["--sampling", "poisson", "--expected-batch", "100", "--population", "1000"]
BINS = ["--sampling", "balls-in-bins", "--bins", "8"]
ALONE = ["--mechanism", "independent"]


def test_dp_sgd_of_jax_privacy(privpart):
    run = [*RUN, *ALONE, "--rounds", "512", "--noise-multiplier", "3", *POISSON]
    report = json.loads(privpart(*run).stdout)
    assert report["epsilon"] == pytest.approx(3.7697, rel=1e-4)
    assert (report["adjacency"], report["steps"]) == ("add-or-remove", 512)
    assert {a["status"] for a in report["assumptions"]} == {"asserted"}
    assert privpart(*run, "--max-epsilon", "3.7").returncode == 3
    assert json.loads(privpart(*run, "--method", "rdp").stdout)["epsilon"] > 3.77


def test_a_banded_mechanism_takes_its_groups_in_turn(privpart):
    run = [*RUN, "--rounds", "30", "--noise-multiplier", "4", "--mechanism", "toeplitz",
           "--bands", "3", *POISSON]  # fmt: skip
    expected = amplified(
        Toeplitz.square_root(30, 3), noise_multiplier=4,
        sampling=PoissonSampling(100, 1000, groups=3),
    )  # fmt: skip
    report = json.loads(privpart(*run).stdout)
    assert (report["epsilon"], report["groups"]) == (expected.epsilon(1e-6), 3)
    assert "in 3 groups" in report["assumptions"][0]["text"]


def test_balls_in_bins(privpart):
    run = [*RUN, *ALONE, "--rounds", "32", "--noise-multiplier", "4", *BINS]
    report = json.loads(privpart(*run).stdout)
    assert report["epsilon"] == AllocatedGuarantee(4.0, BallsInBins(8, 32)).epsilon(1e-6)
    assert report["epsilon"] < report["epsilon_unsampled"]
    assert "uniformly" in privpart(*run[:3], *run[5:]).stdout


SQUARE = ["--rounds", "16", "--noise-multiplier", "4", "--mechanism", "toeplitz", "--bands", "4"]
DRAWS = ["--draws", "10000"]


def test_balls_in_bins_of_correlated_noise(privpart):
    report = json.loads(privpart(*RUN, *SQUARE, *BINS).stdout)
    mechanism = Toeplitz.square_root(16, 4)
    run = AllocatedGuarantee(4.0, BallsInBins(8, 16), mechanism)
    assert report["epsilon"] == run.epsilon(1e-6) < report["epsilon_unsampled"]
    assert "draws" not in report
    drawn = json.loads(privpart(*RUN, *SQUARE, *BINS, *DRAWS, "--draw-seed", "0").stdout)
    estimate = EstimatedGuarantee(4.0, BallsInBins(8, 16), mechanism, 10_000, 0)
    assert drawn["epsilon"] == estimate.epsilon(1e-6)
    assert (drawn["draws"], drawn["draw_seed"]) == (10_000, 0)


def test_the_seed_is_fresh_and_printed_so_that_a_figure_can_be_repeated(privpart):
    run = [*RUN, *SQUARE, *BINS, *DRAWS]
    first, other = (json.loads(privpart(*run).stdout) for _ in range(2))
    assert first["draw_seed"] != other["draw_seed"]
    again = json.loads(privpart(*run, "--draw-seed", str(first["draw_seed"])).stdout)
    assert again == first
    shown = " ".join(privpart(*run[:3], *run[5:], "--draw-seed", "17").stdout.split())
    assert "17, the seed of the draws, is random" in shown
    assert "a seed that somebody chose is not a random one" in shown
    assert "choosing among k estimates makes one too low with up to k times" in shown


def test_little_noise_is_not_taken_for_privacy(privpart):
    run = [*RUN[:1], "--format", "json", *ALONE, "--rounds", "1", "--noise-multiplier", "0.02",
           "--delta", "1e-4", "--sampling", "b-min-sep", "--expected-batch", "1",
           "--population", "1"]  # fmt: skip
    report = json.loads(privpart(*run, "--draws", "200000").stdout)
    assert report["epsilon"] == pytest.approx(1434.986, abs=1e-3)
    assert report["epsilon"] == pytest.approx(report["epsilon_unsampled"], rel=1e-8)


def test_b_min_sep_says_in_one_line_how_likely_it_is_wrong(privpart):
    run = [*RUN[:3], *SQUARE, "--sampling", "b-min-sep", *POISSON[2:], *DRAWS]
    shown = privpart(*run, "--draw-seed", "3").stdout
    line = next(line for line in shown.splitlines() if line.startswith("  epsilon  "))
    assert "by Monte Carlo; too low for 1e-08 of all seeds at most, which is part of" in line
    report = json.loads(privpart(*run, "--draw-seed", "3", "--format", "json").stdout)
    sampler = BMinSep(100, 1000, 4)
    expected = EstimatedGuarantee(4.0, sampler, Toeplitz.square_root(16, 4), 10_000, 3)
    assert report["epsilon"] == expected.epsilon(1e-6)
    assert (report["min_separation"], report["probability"]) == (4, sampler.probability)
    assert report["failure_probability"] == pytest.approx(1e-8)
    wider = json.loads(privpart(*run, "--min-separation", "5", "--format", "json").stdout)
    assert wider["min_separation"] == 5
    assert privpart(*run, "--max-epsilon", "0.01").returncode == 3


APART = ["--sampling", "b-min-sep", *POISSON[2:]]


@pytest.mark.parametrize(
    ("typed", "fault"),
    [
        ([*APART, "--mechanism", "tree"], "tree: b-min-sep needs a square lower-triangular"),
        ([*APART, *SQUARE[4:], "--min-separation", "3"], "has 4 bands"),
        ([*APART, *SQUARE[4:], "--max-participations", "2"], "leave out --max-participations"),
        (
            [*APART, *SQUARE[4:], "--bins", "2"],
            "--sampling b-min-sep: has no bins, and is estimated by draws; leave out --bins.",
        ),
        ([*APART[:2], *SQUARE[4:]], "needs --expected-batch and --population"),
        ([*APART, *SQUARE[4:], "--draws", "10"], "must be at least 10000"),
        ([*APART, "--mechanism", "toeplitz"], "at most population / min_separation"),
        ([*POISSON, *ALONE, *DRAWS], "needs no draws; leave out --draws"),
        ([*BINS, *ALONE, "--draw-seed", "0"], "without --draws: nothing is drawn; add --draws"),
        ([*BINS, *SQUARE[4:], "--min-separation", "4"], "leave out --min-separation"),
        (["--draws", "10000"], "add --sampling, or leave out --draws"),
        (["--draw-seed", "1"], "add --sampling, or leave out --draw-seed"),
        ([*APART, *SQUARE[4:], "--method", "pld"], "estimated by draws; leave out --method"),
        ([*APART, *SQUARE[4:], "--fixed-order"], "leave out --fixed-order"),
        ([*POISSON, "--mechanism", "tree"], "is not known to amplify tree"),
        ([*POISSON, *ALONE, "--bins", "8"], "has no bins, and needs no draws; leave out --bins"),
        ([*BINS, *ALONE, "--method", "exact"], "needs the bins alone; leave out --method"),
        ([*POISSON, *ALONE, "--method", "exact"], "is 'pld' (default) or 'rdp'"),
        ([*POISSON, *ALONE, "--max-participations", "1"], "leave out --max-participations"),
        ([*POISSON[:4], *ALONE], "needs --expected-batch and --population"),
        ([*BINS[:2], *ALONE], "bins is missing"),
        ([*BINS[:2], *ALONE, "--bins", "1"], "--bins 1: must be at least 2"),
        ([*POISSON[:2], *ALONE, "--expected-batch", "9", "--population", "3"], "expected-batch 9"),
        (
            ["--expected-batch", "9"],
            "without --sampling: nobody is sampled; add --sampling, or leave out --expected-batch",
        ),
        (
            ["--bins", "9"],
            "without --sampling: nobody is sampled; add --sampling, or leave out --bins",
        ),
        (["--sampling", "shuffled"], "balls-in-bins"),
    ],
)
def test_other_combinations_are_refused(privpart, typed, fault):
    done = privpart(*RUN, "--rounds", "32", "--noise-multiplier", "4", *typed)
    assert (done.returncode, done.stdout) == (2, "")
    assert fault in " ".join(done.stderr.split())


FOR_TARGET = ["calibrate", "--rounds", "16", "--delta", "1e-5", "--target-epsilon", "2"]
BANDED = ["--mechanism", "toeplitz", "--bands", "4"]


def test_calibrate_finds_the_noise_of_a_sampled_run(privpart):
    own = [*ALONE, *POISSON, "--method", "rdp", "--format", "json"]
    found = json.loads(privpart(*FOR_TARGET, *own).stdout)
    assert 2 * (1 - 1e-4) <= found["epsilon"] <= 2
    noise = str(found["noise_multiplier"])
    typed = ["--rounds", "16", "--delta", "1e-5", "--noise-multiplier", noise]
    assert json.loads(privpart("epsilon", *typed, *own).stdout)["epsilon"] == found["epsilon"]


@pytest.fixture
def coarse(monkeypatch):
    """The same accountant on a grid of fewer points, whose edge is found sooner."""
    monkeypatch.setattr(random_allocation, "_POINTS", 2**12)
    caches = (random_allocation._allocation, random_allocation._sum)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("4", "ends before it, so the least noise is not known; account without the sampling"),
        ("1.5", "ends before it, at epsilon 0.9"),
    ],
)
def test_calibrate_does_not_stop_at_the_edge_of_a_grid(privpart, target, says):
    line = ["calibrate", "--rounds", "8", "--delta", "1e-6", *ALONE]
    line += ["--sampling", "balls-in-bins", "--bins", "8", "--target-epsilon"]
    done = privpart(*line, target)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "noise_multiplier=" in done.stderr
    assert "use more noise" not in done.stderr
    assert privpart(*line, "0.2").returncode == 0


def test_calibrate_estimates_once(privpart):
    line = [*FOR_TARGET, *BANDED, "--sampling", "b-min-sep", "--expected-batch", "5",
            "--population", "100", "--draws", "50000"]  # fmt: skip
    found = json.loads(privpart(*line, "--format", "json").stdout)
    assert found["epsilon"] <= 2
    assert found["failure_probability"] == pytest.approx(1e-7)
    assert f"{found['draws']}" == "50000"
    refused = privpart(*line, "--max-participations", "2")
    assert refused.returncode == 2
    assert "leave out --max-participations" in refused.stderr


def test_values_are_what_the_command_got_not_the_text_in_its_context(capsys):
    """Some versions of typer keep the text of a choice there, which is the name of none."""
    context = SimpleNamespace(
        params={"sampling": "poisson", "form": "json", "method": "rdp"},
        get_parameter_source=lambda name: SimpleNamespace(name="COMMANDLINE"),
    )
    epsilon.__wrapped__(
        context, rounds=16, noise_multiplier=4.0, delta=1e-5, sampling=SamplingName.POISSON,
        expected_batch=9.0, population=90, method=MethodName.RDP, form=Format.JSON,
        choice=MechanismChoice(name=MechanismName.INDEPENDENT), limits=Limits(None, None, False),
    )  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    expected = dp_sgd(
        noise_multiplier=4.0, sampling=PoissonSampling(9, 90), steps=16, method="rdp"
    )  # fmt: skip
    assert (found["sampling"], found["epsilon"]) == ("poisson", expected.epsilon(1e-5))


def test_a_restart_after_the_last_round_is_refused(privpart):
    line = ["--rounds", "16", "--delta", "1e-5", "--max-participations", "1"]
    for every, code in (("16", 2), ("15", 0)):
        found = privpart(
            "epsilon", *line, "--noise-multiplier", "4", "--restart-every", every
        )  # fmt: skip
        assert found.returncode == code
    assert privpart(
        "calibrate", *line, "--target-epsilon", "2", "--restart-every", "20"
    ).returncode == 2  # fmt: skip


def test_a_plan_that_samples_is_accounted_for_or_refused_in_a_sentence(privpart, tmp_path):
    text = Path("examples/digits.toml").read_text()
    for old, new in (
        ("minimum_cohort = 10\n", ""),
        ('"blt" }', '"toeplitz" }\n[privacy.sampling]\nname = "balls-in-bins"\nbins = 24'),
        ("clients_per_round = 19\n", ""),
    ):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    plan = tmp_path / "sampled.toml"
    plan.write_text(text)
    found = json.loads(privpart("epsilon", "--plan", plan, "--format", "json").stdout)
    assert found["sampling"]["bins"] == 24
    assert found["adjacency"] == "add-or-remove"
    assert "not hidden" in privpart("epsilon", "--plan", plan).stdout
    for refused, said in (
        (["epsilon", "--plan", plan, "--cross-check"], "leave out --cross-check"),
        (["mechanisms", "--plan", plan], "calibrate --sampling"),
        (["schedule", "--plan", plan], "no table [schedule]"),
    ):
        result = privpart(*refused)
        assert (result.returncode, said in result.stderr) == (2, True), result.stderr
