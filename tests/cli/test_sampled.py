"""``privpart epsilon --sampling``: each sampler with the one accountant that covers it."""

import json

import pytest

from accounting import AllocatedGuarantee, BallsInBins, PoissonSampling, Toeplitz, amplified

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
        Toeplitz.square_root(30, 3), bands=3, noise_multiplier=4,
        sampling=PoissonSampling(100, 1000),
    )  # fmt: skip
    assert json.loads(privpart(*run).stdout)["epsilon"] == expected.epsilon(1e-6)


def test_balls_in_bins(privpart):
    run = [*RUN, *ALONE, "--rounds", "32", "--noise-multiplier", "4", *BINS]
    report = json.loads(privpart(*run).stdout)
    assert report["epsilon"] == AllocatedGuarantee(4.0, BallsInBins(8, 32)).epsilon(1e-6)
    assert report["epsilon"] < report["epsilon_unsampled"]
    assert "uniformly" in privpart(*run[:3], *run[5:]).stdout


@pytest.mark.parametrize(
    ("typed", "fault"),
    [
        ([*BINS, "--mechanism", "blt"], "is not known to amplify blt here; its proof covers"),
        ([*POISSON, "--mechanism", "tree"], "is not known to amplify tree"),
        ([*POISSON, *ALONE, "--bins", "8"], "has no bins; leave out --bins"),
        ([*BINS, *ALONE, "--population", "9"], "needs the bins alone; leave out --population"),
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
        (["--sampling", "b-min-sep"], "balls-in-bins"),
    ],
)
def test_other_combinations_are_refused(privpart, typed, fault):
    done = privpart(*RUN, "--rounds", "32", "--noise-multiplier", "4", *typed)
    assert (done.returncode, done.stdout) == (2, "")
    assert fault in " ".join(done.stderr.split())
