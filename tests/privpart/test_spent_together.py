"""Unlike releases about the same people: one epsilon, by the book."""

import json
from dataclasses import replace

import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from runs import plan

from accounting import (
    BallsInBins,
    BufferedToeplitz,
    ConfigError,
    Guarantee,
    Independent,
    PoissonSampling,
    StatedGuarantee,
    participation_of,
    sampled_guarantee,
)
from accounting.accountants import sampled_event
from accounting.report import up
from privpart.run import budget_book as book
from privpart.run import log
from privpart.run.begin import create_run
from privpart.run.budget_book import BudgetExceededError, Limit
from privpart.run.report import run_report

ROUNDS, PEOPLE = 100, 1000
SAMPLING = PoissonSampling(20, PEOPLE)
SAMPLED = plan(
    ROUNDS,
    mechanism=Independent(ROUNDS),
    participation=participation_of(SAMPLING, ROUNDS),
    sampling=SAMPLING,
    minimum_cohort=0,
    report_goal=20,
)
BLT = plan(ROUNDS, mechanism=BufferedToeplitz(ROUNDS, (0.9,), (0.2,)), noise_multiplier=4.0)
NAMED = {"delta": 1e-5, "population_name": "keyboard-de"}
DELTA = 1e-5


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine of its own for every test."""
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def spent(tmp_path):
    create_run(tmp_path / "poisson", SAMPLED, facts=NAMED | {"population": "0" * 64}).close()
    create_run(tmp_path / "blt", BLT, facts=NAMED).close()
    return book.state("keyboard-de", (StatedGuarantee(1.0, 1e-6),), "the other team")


def test_a_sampled_run_a_blt_and_a_strangers_release_are_one_epsilon(spent):
    together = spent.total.epsilon(DELTA)
    run = sampled_guarantee(Independent(ROUNDS), SAMPLING, noise_multiplier=1.0)
    blt = BLT.guarantee()
    basic = run.epsilon(4.5e-6) + blt.epsilon(4.5e-6) + 1.0
    assert max(run.epsilon(DELTA), blt.epsilon(DELTA)) < together < basic
    assert spent.total.mu is None
    # a smaller price than if everybody knew who took part
    assert together < SAMPLED.noise_multiplier * 10 * basic
    (unsampled,) = (c.entry.mu for c in spent.charges if c.hides)
    assert Guarantee(unsampled).epsilon(DELTA) > 10 * run.epsilon(DELTA)


def test_a_run_in_bins_is_charged_what_it_costs_beside_another(tmp_path):
    bins = BallsInBins(20, ROUNDS)
    limits = participation_of(bins, ROUNDS)
    changed = {"sampling": bins, "participation": limits, "noise_multiplier": 4.0}
    binned = replace(SAMPLED, **changed)
    create_run(tmp_path / "bins", binned, facts=NAMED | {"population": "0" * 64}).close()
    create_run(tmp_path / "blt", BLT, facts=NAMED).close()
    account = book.account("keyboard-de")
    (charge,) = (c for c in account.charges if c.entry.sampled)
    cost = {"bins": 20, "own": charge.entry.mu, "shared": 0.0, "draws": 1, "chosen": 1}
    assert charge.entry.sampled == [cost]
    run, blt = binned.guarantee(), BLT.guarantee()
    together = account.total.epsilon(DELTA)
    assert max(run.epsilon(DELTA), blt.epsilon(DELTA)) < together
    assert together < min(
        run.epsilon(5e-6) + blt.epsilon(5e-6),
        Guarantee(charge.entry.mu).compose(blt).epsilon(DELTA),
    )


def test_it_is_dp_accountings_composition_where_that_has_one(tmp_path):
    create_run(tmp_path / "poisson", SAMPLED, facts=NAMED | {"population": "0" * 64}).close()
    create_run(tmp_path / "blt", BLT, facts=NAMED).close()
    event = ComposedDpEvent(
        [sampled_event(1.0, SAMPLING.probability, ROUNDS), GaussianDpEvent(1 / BLT.guarantee().mu)]
    )
    theirs = PLDAccountant().compose(event).get_epsilon(DELTA)
    assert book.account("keyboard-de").total.epsilon(DELTA) == pytest.approx(theirs, rel=0.02)


def test_the_book_is_read_back_and_reports_and_the_command_say_it(spent, privpart, tmp_path):
    (again,) = book.accounts()
    assert again.total.epsilon(DELTA) == spent.total.epsilon(DELTA)
    says = run_report(tmp_path / "blt").all_runs.says
    assert says.startswith("epsilon ")
    assert "hold while nobody learns who was sampled" in says
    shown = privpart("budget", "keyboard-de").stdout
    assert "stated by the other team" in shown
    (people,) = json.loads(privpart("budget", "--format", "json").stdout)["populations"]
    assert people["mu"] is None
    assert people["epsilon"] == pytest.approx(spent.total.epsilon(DELTA))
    assert [run["by"] for run in people["runs"]] == [None, None, "the other team"]


def test_the_page_of_a_population_has_the_curves_of_the_whole(spent, privpart, tmp_path):
    page = tmp_path / "page.html"
    done = privpart("budget", "keyboard-de", "--html", str(page), "--delta", "1e-5")
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert f"epsilon {up(spent.total.epsilon(DELTA))} at delta 1e-05 for all together" in text
    assert "No test that does not know who was sampled" in text
    assert "stated by the other team" in text
    assert str(tmp_path) not in text
    create_run(tmp_path / "seeded", BLT, seed=3, facts=NAMED).close()
    assert privpart("budget", "keyboard-de", "--html", str(page)).returncode == 0
    assert "Not private: a run has noise from a seed" in page.read_text()
    assert "data:image" not in page.read_text()
    assert privpart("budget", "--html", str(page)).returncode == 0
    assert "keyboard-de" in page.read_text()


def test_a_limit_holds_for_unlike_releases(spent, tmp_path):
    book.set_limit("keyboard-de", Limit(spent.total.epsilon(DELTA) + 0.1, DELTA))
    assert book.account("keyboard-de").left() is None
    with pytest.raises(BudgetExceededError, match="this run would pass the limit"):
        create_run(tmp_path / "more", BLT, facts=NAMED)
    # no epsilon holds at a delta below what is stated to fail
    book.set_limit("keyboard-de", Limit(50.0, 1e-7), looser=True)
    with pytest.raises(BudgetExceededError, match="have spent no epsilon"):
        create_run(tmp_path / "more", BLT, facts=NAMED)


@pytest.mark.parametrize(
    ("text", "epsilon"),
    [
        ("epsilon=1,delta=1e-6", 1.0),
        ("epsilon=0.5", 0.5),
        ("mu=0.5", 1.993),
        ("rho=0.1", 1.9143),
        ("events=FILE", 1.993),
        ("profile=FILE", 1.993),
    ],
)
def test_releases_of_others_are_added_from_the_command_line(privpart, text, epsilon, tmp_path):
    path = tmp_path / "release"
    step = {"class_name": "GaussianDpEvent", "noise_multiplier": 2.0}
    path.write_text(json.dumps(step))
    if text.startswith("profile"):
        pairs = "".join(f"{e / 50},{Guarantee(0.5).delta(e / 50)}\n" for e in range(300))
        path.write_text(f"epsilon,delta\n{pairs}")
    text = text.replace("FILE", str(path))
    done = privpart("budget", "people", "--add", text, "--by", "A. L.", "--delta", "1e-5")
    assert done.returncode == 0, done.stderr
    assert "nobody learns" not in done.stdout
    assert book.account("people").total.epsilon(DELTA) == pytest.approx(epsilon, rel=2e-3)


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        (["people", "--add", "epsilon=1"], "say who states"),
        (["people", "--add", "epsilon=x", "--by", "A"], "must be numbers"),
        (["people", "--add", "epsilon=nan", "--by", "A"], "epsilon=nan"),
        (["people", "--add", "epsilon=-1", "--by", "A"], "zero or more"),
        (["people", "--add", "rho=0.1,delta=1e-7", "--by", "A"], "must be epsilon="),
        (["people", "--add", "profile=none.csv", "--by", "A"], "no such file"),
        (["people", "--add", "events=none.json", "--by", "A"], "no such file"),
        (["people", "--add", "delta=0.1", "--by", "A"], "must be epsilon="),
        (["people", "--add", "epsilon=1,delta=1", "--by", "A"], "must be below 1"),
        (["people", "--add", "epsilon=1", "--by", ""], "must name who states"),
        (["--add", "epsilon=1", "--by", "A"], "a release is about one population"),
        (["people", "--by", "A"], "nothing is stated"),
    ],
)
def test_wrong_input_is_one_sentence_and_enters_nothing(privpart, typed, why):
    done = privpart("budget", *typed)
    assert done.returncode == 2
    assert why in done.stderr
    assert not log.lines_of()


@pytest.mark.parametrize(
    "change",
    [
        {"sampled": []},
        {"sampled": [{"noise_multiplier": 1.0}]},
        {"sampled": [{"noise_multiplier": 0.0, "probability": 0.1, "steps": 5, "groups": 1}]},
        {"event": "stated", "population": "people", "by": "A", "sampled": [{"epsilon": -1.0}]},
        {"event": "stated", "population": "people", "sampled": [{"epsilon": 1.0}]},
        {"event": "stated", "population": "people", "by": "A"},
        {"event": "stated", "population": "people", "by": "A", "sampled": [{"epsilons": 1.0}]},
        {"event": "stated", "population": "people", "by": "A", "sampled": [{"mu": 1.0}] * 201},
    ],
)
def test_a_line_that_costs_nonsense_is_refused(change):
    with pytest.raises((ConfigError, TypeError)):
        log.Entry(**{"event": "begun", "run": "0" * 32} | change)
