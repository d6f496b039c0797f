"""What the best of several runs costs, on the command line."""

import json

import pytest

TYPED = ["epsilon", "--rounds", "8", "--mechanism", "independent", "--max-participations", "1"]
ONE = [*TYPED, "--noise-multiplier", "2", "--delta", "1e-6"]


def selection(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["selection"]


@pytest.mark.parametrize(
    ("text", "epsilon", "share"),
    [
        ("10", 3.26, 29),
        ("negative-binomial:expected=3,eta=-0.5", 2.64, 11),
        ("poisson:expected=10", 4.11, 15),
        ("binomial:expected=3,most=4", 3.02, 4),
    ],
)
def test_the_price_beside_counting_all(privpart, text, epsilon, share):
    told = selection(privpart(*ONE, "--best-of", text, "--format", "json"))
    assert told["epsilon"] == pytest.approx(epsilon, abs=0.006)
    assert told["runs_95_percent"] == share
    assert told["epsilon_of_counting_all"] > told["epsilon"]
    shown = privpart(*ONE, "--best-of", text).stdout
    assert "best of K" in shown
    assert "counting all" in shown


def test_noise_for_a_target_of_the_selection(privpart):
    target = ["calibrate", "--target-epsilon", "3.26", "--best-of", "10", "--delta", "1e-6"]
    told = selection(privpart(*target, *TYPED[1:], "--format", "json"))
    assert 3.2595 < told["epsilon"] <= 3.26


@pytest.mark.slow
def test_samplers_have_a_price_and_estimates_have_none(privpart):
    sampled = [*ONE[:5], "--noise-multiplier", "2", "--delta", "1e-6", "--population", "1000"]
    poisson = [*sampled, "--sampling", "poisson:expected_batch=10", "--best-of", "3"]
    one = json.loads(privpart(*poisson, "--format", "json").stdout)
    assert one["epsilon"] < one["selection"]["epsilon"] < 3 * one["epsilon"]
    bins = [*sampled, "--sampling", "balls-in-bins:bins=8", "--best-of", "3"]
    priced = json.loads(privpart(*bins, "--format", "json").stdout)
    assert priced["epsilon"] < priced["selection"]["epsilon"] < 3 * priced["epsilon"]
    estimated = [*sampled, "--sampling", "balls-in-bins:bins=8,draws=10000", "--best-of", "3"]
    refused = privpart(*estimated)
    assert refused.returncode == 2
    assert "bins without draws" in refused.stderr


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("many", "must be a mean number of runs, or"),
        ("1", "must be above 1"),
        ("nan", "must be positive"),
        ("poisson", "expected is missing"),
        ("binomial:expected=3", "most is missing"),
        ("poisson:expected=3,eta=1", "no option 'eta'"),
        ("negative-binomial:expected=3,eta=-1", "must be above -1"),
    ],
)
def test_wrong_input_is_one_sentence(privpart, text, why):
    done = privpart(*ONE, "--best-of", text)
    assert done.returncode == 2
    assert why in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("form", ["statement", "csv", "events"])
def test_no_form_states_one_run_in_place_of_the_selection(privpart, form):
    done = privpart(*ONE, "--best-of", "10", "--format", form)
    assert done.returncode == 2
    assert "states the cost of one run, not of the best of several" in done.stderr
    assert done.stdout == ""


def test_no_page_or_row_states_one_run_in_place_of_the_selection(privpart, tmp_path):
    page = tmp_path / "page.html"
    done = privpart(*ONE, "--best-of", "10", "--html", str(page))
    assert done.returncode == 2
    assert "states the cost of one run" in done.stderr
    assert not page.exists()
    target = ["calibrate", "--target-epsilon", "3", "--best-of", "10", "--delta", "1e-6"]
    assert privpart(*target, *TYPED[1:], "--format", "csv").returncode == 2
