"""The budget book adds up all runs about the same people, and refuses what passes their limit."""

import json
import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from runs import train

import privpart as package
from accounting import ConfigError, Guarantee, Independent, Participation
from privpart import PrivacyPlan, RunFolder
from privpart.run import budget_book as book
from privpart.run import log
from privpart.run.begin import create_run, fork
from privpart.run.ledger import Ledger
from privpart.run.log import Entry
from privpart.run.report import run_report
from privpart.run.store import StorageError
from privpart.training.plan_file import validated
from privpart.training.training import population_name
from privpart.training.verify import check_run

FACTS = {"delta": 1e-6, "population_name": "keyboard-de"}
PLAN = PrivacyPlan(
    mechanism=Independent(3),
    participation=Participation(3),
    clip_norm=1.0,
    noise_multiplier=1.5,  # mu = 1 / 1.5
    report_goal=2,
)
MU = PLAN.guarantee().mu


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch) -> Path:
    """A machine of its own for every test."""
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def begin(folder: Path, *, rounds: int = 0, plan=PLAN, seed=None, **facts) -> Path:
    with create_run(folder, plan, seed=seed, own=FACTS | facts) as run:
        if rounds:
            train(run, rounds)
    return folder


def test_a_run_that_was_closed_here_and_continued_elsewhere_is_paid_for_by_its_fork(
    tmp_path, monkeypatch
):
    run = begin(tmp_path / "run")
    copy = shutil.copytree(run, tmp_path / "copy")
    with RunFolder.open(run) as closed:
        closed.end_early()
    assert book.account("keyboard-de").total is None
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("PRIVPART_STATE_DIR", str(tmp_path / "elsewhere"))
        with RunFolder.open(copy, adopt=True) as continued:
            train(continued, 1)
    fork(copy, tmp_path / "fork", PLAN, facts={"delta": 1e-6}).close()
    assert spent() == pytest.approx(MU * math.sqrt(2))


def test_a_round_that_was_about_to_be_committed_is_paid_for(tmp_path, monkeypatch):
    """Its row may have been read before the disk, or somebody, took it back."""
    with create_run(tmp_path / "run", PLAN, own=FACTS) as run, monkeypatch.context() as full:
        full.setattr(Ledger, "append", refused)
        with pytest.raises(StorageError):
            train(run, 1)
    with RunFolder.open(tmp_path / "run") as run:
        run.end_early()
    assert spent() == MU


def refused(*_: object) -> None:
    raise OSError("No space left on device")


def spent(name: str = "keyboard-de") -> float:
    total = book.account(name).total
    return 0.0 if total is None else total.mu


def limited(runs: float, delta: float = 1e-6) -> None:
    """Set a limit that this many runs of ``PLAN`` fit."""
    epsilon = Guarantee(MU * math.sqrt(runs)).epsilon(delta)
    book.set_limit("keyboard-de", book.Limit(epsilon, delta), looser=True)


@pytest.fixture
def family(tmp_path) -> list[Path]:
    """A run after 2 of 3 rounds, and two forks of it."""
    parent, forks = begin(tmp_path / "parent", rounds=2), [tmp_path / "a", tmp_path / "b"]
    for one in forks:
        fork(parent, one, PLAN, facts={"delta": 1e-6}).close()
    return [parent, *forks]


def test_a_run_and_two_forks_cost_what_all_three_cost(family, privpart):
    """Each report for itself says .943, .943 and .667; all that was released costs 1.155."""
    reports = [run_report(folder) for folder in family]
    alone = [round(report.guarantee.mu, 3) for report in reports]
    assert alone == [0.667, 0.943, 0.943]
    for report in reports:
        assert report.all_runs.mu == pytest.approx(math.sqrt(3) * MU, rel=1e-12)
        assert report.all_runs.mu >= math.sqrt(3) * MU
        assert report.all_runs.epsilon == Guarantee(report.all_runs.mu).epsilon(1e-6)
        assert report.to_dict()["all_runs"]["runs"] == 3
    told = privpart("report", str(family[1]))
    assert "(this run)" in told.stdout
    assert "mu 1.1548: 3 runs on this machine about 'keyboard-de'" in told.stdout
    prose = privpart("report", str(family[1]), "--format", "statement").stdout
    assert "All that this machine released about these people: epsilon" in prose
    parent, *forks = (charge.entry for charge in book.account("keyboard-de").charges)
    assert [one.parent for one in forks] == [parent.run] * 2
    assert [one.mu for one in (parent, *forks)] == [MU] * 3


def test_two_runs_of_two_plans_meet_and_other_people_do_not(tmp_path):
    begin(tmp_path / "one")
    begin(tmp_path / "two", plan=replace(PLAN, noise_multiplier=1.0))
    begin(tmp_path / "other", population_name="keyboard-fr")
    assert spent() == pytest.approx(math.hypot(MU, 1.0))
    assert spent("keyboard-fr") == MU
    with create_run(tmp_path / "nobody", PLAN, facts={"delta": 1e-6}):
        assert run_report(tmp_path / "nobody").all_runs is None
    assert [own.population for own in book.accounts()] == ["keyboard-de", "keyboard-fr"]


def test_a_fork_about_people_of_another_name_brings_the_cost_of_its_parent(tmp_path):
    parent = begin(tmp_path / "parent", rounds=1)
    child = tmp_path / "child"
    with fork(parent, child, PLAN, facts=FACTS | {"population_name": "de"}) as run:
        train(run, 1)
    fork(child, tmp_path / "third", PLAN, facts=FACTS | {"population_name": "de"}).close()
    assert spent("de") == pytest.approx(math.sqrt(3) * MU)
    assert run_report(child).guarantee.mu == pytest.approx(math.sqrt(2) * MU)
    assert spent() == MU


def test_a_limit_refuses_a_run_and_a_fork_before_anything_is_created(tmp_path, privpart):
    parent = begin(tmp_path / "parent", rounds=1)
    limited(1)
    assert not book.account("keyboard-de").passed
    for start in (
        lambda: begin(tmp_path / "new"),
        lambda: fork(parent, tmp_path / "new", PLAN, facts={"delta": 1e-6}),
        lambda: begin(tmp_path / "new", seed=3),  # has no bound
        lambda: begin(tmp_path / "new", plan=replace(PLAN, noise_multiplier=0.0)),
    ):
        with pytest.raises(book.BudgetExceededError, match="would pass the limit of population"):
            start()
        assert not (tmp_path / "new").exists()
    assert len(book.account("keyboard-de").charges) == 1
    limited(2)
    begin(tmp_path / "new")
    shown = privpart("budget", "keyboard-de")
    assert shown.returncode == 0
    limited(1)
    assert privpart("budget").returncode == privpart("budget", "keyboard-de").returncode == 3


def test_what_is_left_is_what_one_more_run_may_cost(tmp_path):
    begin(tmp_path / "one")
    limited(2.5)
    left = book.account("keyboard-de").left()
    assert left == pytest.approx(math.sqrt(1.5) * MU)
    with pytest.raises(book.BudgetExceededError):
        begin(tmp_path / "no", plan=replace(PLAN, noise_multiplier=1 / (left * (1 + 1e-6))))
    begin(tmp_path / "two", plan=replace(PLAN, noise_multiplier=1 / (left * (1 - 1e-12))))
    assert book.account("keyboard-de").left() < 1e-4


def test_of_many_that_begin_at_once_only_those_within_the_limit_pass(tmp_path):
    limited(2)

    def start(number: int) -> bool:
        try:
            begin(tmp_path / str(number))
        except book.BudgetExceededError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        passed = list(pool.map(start, range(6)))
    assert sum(passed) == 2
    assert [(tmp_path / str(i)).exists() for i in range(6)] == passed
    assert spent() == pytest.approx(math.sqrt(2) * MU)


def test_a_run_that_cannot_be_created_costs_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        begin(tmp_path / "file" / "run")
    monkeypatch.setattr(Ledger, "create", refused)
    with pytest.raises(StorageError, match="cannot be begun"):
        begin(tmp_path / "run")
    assert spent() == 0


@pytest.mark.parametrize("costs", [(0.5, 1.0), (1.0, 0.5)])
def test_a_run_that_two_lines_name_costs_what_the_dearer_one_says(costs):
    for mu in costs:
        with log.writing():
            log.append(Entry(event="charged", run="ab" * 16, population="keyboard-de", mu=mu))
    assert spent() == 1.0


def test_an_adopted_run_is_entered_and_stays_within_the_limit(tmp_path, state, monkeypatch):
    fresh, begun, done = (begin(tmp_path / str(n), rounds=n) for n in (0, 1, 3))
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "elsewhere"))
    assert "no charge of this run" in run_report(begun).all_runs.says
    assert run_report(begun).all_runs.status == "unknown"
    assert next(c for c in check_run(begun) if c.what == "budget book").status == "asserted"
    limited(0.5)
    for folder in (fresh, begun):
        with pytest.raises(book.BudgetExceededError):
            RunFolder.open(folder, adopt=True)
    assert spent() == pytest.approx(math.sqrt(2) * MU)  # nothing shows that the first is unspent
    RunFolder.open(done, adopt=True).close()
    RunFolder.open(begun).close()  # what is charged already is not charged again
    limited(9)
    RunFolder.open(fresh).close()
    assert spent() == pytest.approx(math.sqrt(3) * MU)
    rows = [(c.released, c.status) for c in book.account("keyboard-de").charges]
    assert rows == [(None, "unknown"), (1, "running"), (3, "complete")]


@pytest.mark.parametrize(
    "facts",
    [
        {"population_name": 3},
        {"population_name": "a\x1b[2J"},
        {"delta": "0.1"},
        {"fork_of": "0" * 32},
        {"fork_of": "x", "earlier": [{"mu": 1.0}]},
        {"fork_of": "0" * 32, "earlier": [{"mu": -1.0}]},
        {"fork_of": "0" * 32, "earlier": [{"mu": "1"}]},
        {"fork_of": "0" * 32, "earlier": [{"epsilon": 1.0}]},
    ],
)
def test_facts_of_a_stranger_are_refused_and_enter_nothing(tmp_path, facts):
    with pytest.raises(ConfigError):
        begin(tmp_path / "run", **facts)
    assert book.accounts() == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_closed_run_costs_nothing_only_if_nobody_saw_a_model(tmp_path, rounds):
    folder = begin(tmp_path / "run", rounds=rounds)
    shutil.copytree(folder, tmp_path / "copy")
    RunFolder.open(folder).end_early()
    assert spent() == (MU if rounds else 0)
    assert book.account("keyboard-de").charges[0].status == "closed"
    with pytest.raises(ConfigError, match=f"was closed after {rounds} rounds"):
        RunFolder.open(tmp_path / "copy")  # which still has the key


def test_a_simulation_is_listed_and_not_added(tmp_path, privpart):
    begin(tmp_path / "run")
    begin(tmp_path / "seeded", seed=3)
    begin(tmp_path / "loud", plan=replace(PLAN, noise_multiplier=0.0))
    found = book.account("keyboard-de")
    assert (found.status, found.total.mu, found.unbounded) == ("not-private", MU, 2)
    assert "NOT PRIVATE: 2 runs without secret noise" in run_report(tmp_path / "run").all_runs.says
    assert "NOT PRIVATE: 2 runs" in privpart("budget", "keyboard-de").stdout
    begin(tmp_path / "public", seed=3, population_name="task:digits")
    assert book.account("task:digits").status == "nothing released"
    begin(tmp_path / "task", population_name="task:digits")
    assert book.account("task:digits").status == "holds"
    assert "1 simulation not added" in run_report(tmp_path / "task").all_runs.says


def test_limits_are_raised_and_removed_only_on_purpose(privpart, state):
    budget = partial(privpart, "budget", "de")
    told = privpart("budget")
    assert (told.returncode, told.stderr) == (0, "")
    assert "No run on this machine has named a population yet" in told.stdout
    assert not state.exists()
    first = budget("--limit-epsilon", "4", "--delta", "1e-6")
    assert "no run names the population 'de' yet" in first.stderr
    higher = budget("--limit-epsilon", "5", "--delta", "1e-6")
    assert (higher.returncode, higher.stdout) == (2, "")
    assert "--limit-epsilon 5: with delta=1e-06 it is above the limit" in higher.stderr
    assert budget("--limit-epsilon", "4", "--delta", "1e-5").returncode == 2  # higher as well
    assert budget("--limit-epsilon", "3.5", "--delta", "1e-6").returncode == 0
    assert budget("--limit-epsilon", "5", "--delta", "1e-6", "--raise-limit").returncode == 0
    assert budget("--limit-epsilon", "5").returncode == 2
    assert budget("--limit-epsilon", "nan", "--delta", "1e-6").returncode == 2
    assert budget("--limit-epsilon", "1e-300", "--delta", "1e-300").returncode == 2
    assert book.account("de").limit == book.Limit(5, 1e-6)


def test_the_command_lists_populations_and_runs(family, privpart):
    limited(4)
    found = json.loads(privpart("budget", "--format", "json").stdout)
    assert found["schema"] == "privpart/budget/1"
    (own,) = found["populations"]
    assert (own["population"], own["status"], len(own["runs"])) == ("keyboard-de", "holds", 3)
    assert own["epsilon"] == Guarantee(own["mu"]).epsilon(1e-6)
    assert own["mu_left"] == pytest.approx(MU)
    first = own["runs"][0]
    assert (first["mu"], first["delta"], first["parent"]) == (MU, 1e-6, None)
    assert (first["folder"], first["status"]) == (str(family[0]), "running")
    assert (first["released"], first["planned"]) == (2, 3)
    table = privpart("budget")
    assert "keyboard-de" in table.stdout
    assert "runs on other machines" in table.stdout
    one = privpart("budget", "keyboard-de").stdout
    assert "2 of 3" in one
    assert "1.155" in one
    wider = privpart("budget", "keyboard-de", "--delta", "1e-3", "--format", "json")
    assert json.loads(wider.stdout)["populations"][0]["epsilon"] < own["epsilon"]
    unknown = privpart("budget", "keyboard-ed")
    assert unknown.returncode == 2
    assert "must be one of this machine's: keyboard-de" in unknown.stderr


TABLES = {
    "schema": "privpart/plan/1",
    "privacy": {
        "rounds": 2, "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5,
        "mechanism": {"name": "independent"},
    },
    "model": {},
    "data": {"clients_per_round": 2},
    "client": {"learning_rate": 0.1, "batch_size": 2},
    "server": {},
}  # fmt: skip


def tables(**data) -> dict:
    return TABLES | {"data": TABLES["data"] | data}


class People:
    def __init__(self, *ids):
        self.ids = ids

    def examples(self, client):
        return torch.ones(2, 3), torch.zeros(2, dtype=torch.long)


def test_runs_about_the_same_people_meet_without_a_name():
    own = validated(tables(), in_python=True)
    name = population_name(own, People(1, 2, "x").ids)
    assert name.startswith("ids:")
    assert name == population_name(own, People("x", 2, 1).ids)
    assert name != population_name(own, People(1, 2, "x", 3).ids)
    assert name != population_name(own, People("1", 2, "x").ids)
    named = validated(tables(population="keyboard-de"), in_python=True)
    assert population_name(named, People(1).ids) == "keyboard-de"
    digits = validated(tables(task="digits", users=30), in_python=True)
    assert population_name(digits, People(1).ids) == "task:digits"
    assert named.hash != own.hash


NOT_NAMES = [
    "",
    " x",
    "x" * 101,
    "a\nb",
    "\u202eab",
    "a\u200bb",
    "e\u0301",
    "--",
    "task:x",
    "Ta sk:x",
]


@pytest.mark.parametrize("name", NOT_NAMES)
def test_names_that_nobody_could_tell_apart_are_refused(name):
    with pytest.raises(ConfigError, match=r"data\.population="):
        validated(tables(population=name), in_python=True)


DIGITS = """
schema = "privpart/plan/1"
[privacy]
rounds = 1
clip_norm = 1.0
noise_multiplier = 1.5
delta = 1e-6
mechanism = { name = "independent" }
[model]
name = "small_cnn"
sizes = { channels = [2, 4], hidden = 8, image_size = 8 }
train = ["dense2.*"]
seed = 7
[data]
task = "digits"
users = 1437
clients_per_round = 2
population = "keyboard-de"
[client]
learning_rate = 0.1
[server]
learning_rate = 0.3
"""


def test_train_charges_and_refuses_on_the_command_line_and_from_python(tmp_path, privpart):
    plan = tmp_path / "plan.toml"
    plan.write_text(DIGITS)
    limited(1)
    command = ["train", "--plan", str(plan), "--out"]
    first = privpart(*command, str(tmp_path / "one"), "--format", "json")
    assert first.returncode == 0, first.stderr
    spoken = json.loads(first.stdout)["all_runs"]
    assert (spoken["population"], spoken["runs"], spoken["mu"]) == ("keyboard-de", 1, MU)
    assert spoken["says"].startswith("epsilon 3.0977, mu 0.66667: 1 run on this machine about")
    refused = privpart(*command, str(tmp_path / "two"), "--fork-of", str(tmp_path / "one"))
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "would pass the limit of population 'keyboard-de'" in refused.stderr
    with pytest.raises(book.BudgetExceededError):
        package.train(plan=plan, out=tmp_path / "two", progress=False)
    assert not (tmp_path / "two").exists()
    assert spent() == MU


def test_the_whole_book_is_a_page_that_says_who_passed_a_limit(tmp_path, privpart):
    begin(tmp_path / "run")
    page = tmp_path / "page.html"
    for status, words in ((0, "1 population on this machine, 0 above its limit"), (3, "1 above")):
        told = privpart("budget", "--html", str(page), "--delta", "1e-6")
        assert told.returncode == status
        assert words in page.read_text()
        assert "keyboard-de" in page.read_text()
        book.set_limit("keyboard-de", book.Limit(0.1, 1e-6))


class Missing(People):
    """One of the clients cannot be read."""

    def examples(self, client):
        if client == 7:
            raise OSError("no such file")
        return super().examples(client)


def square_loss(module, batch):
    return module(batch[0]).square().mean()


def failing_beside(file: Path):
    """Return a loss that fails from the moment when a file exists."""

    def loss(module, batch):
        if file.exists():
            raise ValueError("no more")
        return square_loss(module, batch)

    return loss


def begun_from_python(tmp_path: Path, clients=People, **options):
    arguments = {"out": tmp_path / "run", "progress": False, "loss": square_loss} | options
    module, plan = torch.nn.Linear(3, 1), tables(population="keyboard-de", clients_per_round=8)
    plan["privacy"] = plan["privacy"] | {"max_participations": 2, "min_separation": 1}
    return package.train(module, clients(*range(8)), plan=plan, **arguments)


@pytest.mark.parametrize(
    ("clients", "options", "said"),
    [
        (Missing, {}, "no such file"),
        (People, {"callbacks": [3]}, "callbacks: have"),
        (People, {"evaluate_every": 0}, "evaluate_every=0"),
        (People, {"workers": 2, "loss": failing_beside(Path("no"))}, "cannot be sent"),
        (People, {"device": "cuda:99"}, "device='cuda:99'"),
        (People, {"seed": -1}, "seed=-1"),
        (People, {"metric": lambda _: float("nan") / []}, "metric"),
    ],
)
def test_what_can_be_refused_is_refused_before_a_run_exists(tmp_path, clients, options, said):
    with pytest.raises(ConfigError, match=said):
        begun_from_python(tmp_path, clients, **options)
    assert not (tmp_path / "run").exists()
    assert book.accounts() == []


@pytest.mark.parametrize(
    ("file", "rounds", "closed"), [("ledger.log", None, 0), ("state-000001.safetensors", 1, None)]
)
def test_a_run_whose_first_round_is_refused_is_closed_and_costs_nothing(
    tmp_path, file, rounds, closed
):
    with pytest.raises(ConfigError, match="no more") as told:
        begun_from_python(tmp_path, loss=failing_beside(tmp_path / "run" / file))
    ((charge,),) = (own.charges for own in book.accounts())
    assert (charge.life.closed, charge.life.is_free) == (closed == 0, closed == 0)
    assert (tmp_path / "run" / "key").exists() == (closed is None)
    assert ("closed: begin again in another folder" in str(told.value)) == (closed == 0)
    assert (charge.released or None) == rounds
