"""A private selection from its file to its end: what is refused, kept, charged, said and erased."""

import json
import math
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from plans import tables
from torch import nn

from accounting import ConfigError, Guarantee, NegativeBinomialRuns, SelectedGuarantee
from privpart import Run, train, tune
from privpart.data import from_tensors
from privpart.run import log
from privpart.run import selection as selections
from privpart.run.begin import fork
from privpart.run.budget_book import BudgetExceededError, Limit, account, set_limit
from privpart.run.folder import RunFolder
from privpart.run.noised_metrics import noised_metrics
from privpart.run.report import run_report
from privpart.run.selection import Selection, abandon
from privpart.run.witness import witness
from privpart.study.tune import bill_of, prepared, tune_of
from privpart.training.export import export
from privpart.training.training import Own, Training
from privpart.training.verify import check_run

PEOPLE = "nobody"
PLAN = {
    "privacy": {
        "rounds": 2,
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "mechanism": {"name": "tree"},
    },
    "data": {"clients_per_round": 2, "population": PEOPLE},
    "client": {"learning_rate": 1.0, "steps": 1},
}
TWO = "binomial:expected=1.999,most=2"
"""Of two hundred selections, one trains once."""
TABLES = {
    "plan": PLAN,
    "target_epsilon": 3.0,
    "runs": TWO,
    "score": "metric",
    "seconds": 1.0,
    "candidates": {
        "small": {"server.learning_rate": 0.5},
        "large": {"server.learning_rate": 2.0, "privacy.clip_norm": 2.0},
    },
}


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return x @ self.weight


def towards(module, batch):
    return -(batch[0] @ module.weight).mean()


def first(module):
    return module.weight[0].item()


@pytest.fixture(autouse=True)
def own_log(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "state"))


def people(member=1.0):
    x = torch.zeros(4, 2)
    x[0, 0] = member
    return from_tensors((x, torch.zeros(4, dtype=torch.int64)), user=[0, 1, 2, 3])


def objects(metric=first):
    return {"module": Point(), "clients": people(), "loss": towards, "metric": metric}


def tuned(out, tables=TABLES, metric=first, **change) -> Run:
    return tune({**tables, **change}, out, show=lambda _: None, **objects(metric))


def opened(out, tables=TABLES):
    """Return an open selection, its tune and the folder of its first training."""
    chosen = tune_of(tables, Own(**objects()))
    setup, _ = prepared(chosen)
    return Selection.open(out, chosen.terms(setup)), chosen


def refused(out, match, **change):
    with pytest.raises(ConfigError, match=match):
        tuned(out, **change)


def words(report):
    return {a.code: (a.status, a.evidence) for a in report.guarantee.assumptions}


class StopError(BaseException):
    """The process ends here, as by kill -9."""


def stopped(out, monkeypatch, after: int, **change):
    """Run a selection until ``after`` of its trainings were measured, and stop there."""
    note, done = Selection.note, []

    def noted(self, *arguments):
        note(self, *arguments)
        done.append(arguments)
        if len(done) == after:
            raise StopError

    with monkeypatch.context() as patch:
        patch.setattr(Selection, "note", noted)
        with pytest.raises(StopError):
            tuned(out, **change)


def test_the_winner_says_that_the_choice_is_paid_and_what_is_not_known(tmp_path):
    run = tuned(tmp_path / "out")
    report = run.report()
    g, said = report.guarantee, words(report)
    assert g.epsilon <= 3.0 < g.epsilon * 1.001
    assert g.selection["epsilon_of_one"] < g.epsilon
    assert {code: said[code][0] for code in ("choices", "selection", "candidates", "score")} == {
        "choices": "enforced",
        "selection": "enforced",
        "candidates": "asserted",
        "score": "asserted",
    }
    assert "choices: paid:" in " ".join(f"{a.code}: {a.text}" for a in g.assumptions)
    assert said["noise"][0] == "enforced"
    assert run.path == tmp_path / "out" / "run"
    assert isinstance(run.module()(torch.ones(1, 2)), torch.Tensor)
    assert not [check for check in check_run(run.path) if check.status == "wrong"]
    # Nothing is left but the winner and one entry.
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"run", "lock", "selection.json"}
    assert not list((log.directory() / "selections").iterdir())
    (charge,) = account(PEOPLE).charges
    assert charge.status == "complete"
    assert account(PEOPLE).total.epsilon(1e-3) == g.epsilon
    # Each run and each selection has lines; a witness may be published.
    assert len(log.lines_of()) == 4
    assert len(witness().runs) == 2


@pytest.mark.parametrize("count", [1, 4])
def test_the_log_the_folder_and_the_report_are_the_same_however_many_there_were(
    tmp_path, monkeypatch, count
):
    note, ended = Selection.note, []

    def noted(self, *arguments):
        note(self, *arguments)
        ended.append(time.time())
        time.sleep(0.05)

    monkeypatch.setattr(Selection, "note", noted)
    monkeypatch.setattr(selections, "_runs", lambda *_: count)
    run = tuned(tmp_path / "out", runs=10)
    assert [entry.event for entry in log.lines_of()] == ["begun", "begun", "round", "round"]
    text = run.statement() + json.dumps(run.report().to_dict())
    assert "trials" not in text
    # When each round was committed would tell which of them it was.
    times = {file.stat().st_mtime for file in run.path.iterdir() if file.name != "lock"}
    assert min(times) > max(ended)
    assert log.lines_of()[1].at >= log.lines_of()[0].at


class Scores:
    """Scores in place of those by the metric, printed as an author's code may."""

    def __init__(self, monkeypatch, *values):
        self.values, self.models = list(values), []
        monkeypatch.setattr(Training, "evaluate", self.evaluate)
        monkeypatch.setattr(selections, "_runs", lambda *_: len(values))

    def evaluate(self, parameters):
        if not parameters.any():  # a rehearsal
            return 0.0
        sys.stdout.write("measured")
        sys.stderr.write("measured")
        self.models.append(parameters[0].item())
        value = self.values[len(self.models) - 1]
        if value is None:
            raise ValueError("no score")
        return value


@pytest.mark.parametrize(
    ("better", "scores", "best"),
    [
        ("higher", (0.2, 0.9, 0.5), 1),
        ("lower", (0.2, 0.9, 0.1), 2),
        ("higher", (None, math.nan, -math.inf, -5.0), 3),
        ("lower", (None, math.nan, math.inf, 5.0), 3),
    ],
)
def test_the_best_one_wins_and_what_trainings_print_is_thrown_away(
    tmp_path, monkeypatch, capfd, better, scores, best
):
    """A training that diverges, or whose score fails, loses, and does not end the selection."""
    found = Scores(monkeypatch, *scores)
    run = tuned(tmp_path / "out", better=better, runs=10)
    assert first(run.module()) == found.models[best]
    assert "measured" not in "".join(capfd.readouterr())


def test_ties_end_by_the_secret(tmp_path, monkeypatch):
    winners = set()
    for number in range(24):
        found = Scores(monkeypatch, 1.0, 1.0)
        run = tuned(tmp_path / f"{number}", runs=10)
        winners.add(found.models.index(first(run.module())))
        if winners == {0, 1}:
            return
    raise AssertionError(winners)


def test_one_command_resumes_and_nothing_is_drawn_again(tmp_path, monkeypatch):
    monkeypatch.setattr(selections, "_runs", lambda *_: 3)
    out = tmp_path / "out"
    stopped(out, monkeypatch, after=2, runs=10)
    (place,) = (log.directory() / "selections").iterdir()
    secret, scores = (
        (place / "secret").read_bytes(),
        json.loads((place / "scores.json").read_text()),
    )
    stopped(out, monkeypatch, after=1, runs=10)
    assert (place / "secret").read_bytes() == secret
    assert json.loads((place / "scores.json").read_text()).items() >= scores.items()
    run = tuned(out, runs=10)
    assert words(run.report())["selection"][0] == "enforced"
    assert len(account(PEOPLE).charges) == 1
    # Again: nothing is trained.
    assert tuned(out, runs=10).path == run.path


@pytest.mark.parametrize(
    "number",
    [5, 25, 65, 125, *(pytest.param(n, marks=pytest.mark.slow) for n in (9, 45, 85, 105))],
)
def test_a_crash_at_any_write_to_the_disk_is_mended_by_the_same_command(
    tmp_path, monkeypatch, number
):
    """Whatever call of fsync is the last one, the secret is the same afterwards."""
    out, fsync, calls, drawn = tmp_path / "out", os.fsync, [], []
    draw = selections._runs

    def failing(handle):
        calls.append(handle)
        if len(calls) == number:
            raise StopError
        fsync(handle)

    def noted(repetitions, secret):
        drawn.append(secret)
        return draw(repetitions, secret)

    monkeypatch.setattr(selections, "_runs", noted)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        ended = False
        try:
            tuned(out)
            ended = True
        except StopError:
            pass
    run = tuned(out)
    assert ended == (len(calls) < number)
    assert len(set(drawn)) == 1
    assert words(run.report())["selection"][0] == "enforced"
    assert len(account(PEOPLE).charges) == 1
    # A secret whose selection was never charged may stay: nothing was drawn from it.
    left = [place.name for place in (log.directory() / "selections").iterdir()]
    assert not {entry.run for entry in log.lines_of()} & {*left}
    assert not (out / "trials").exists()


def test_a_training_that_a_look_would_judge_claims_nothing(tmp_path, monkeypatch):
    out = tmp_path / "out"
    stopped(out, monkeypatch, after=1)
    (trial,) = (out / "trials").iterdir()
    report = run_report(trial)
    assert report.guarantee.status == "does-not-hold"
    assert words(report)["selection"] == (
        "violated",
        "the selection has not ended: this may be any of its trainings",
    )
    with pytest.raises(ConfigError, match="nothing of it is released"):
        export(trial, tmp_path / "model.safetensors", part="trained")
    with pytest.raises(ConfigError, match="does not hold"):
        fork(trial, tmp_path / "fork", RunFolder.open(trial).plan)
    shutil.copytree(trial, tmp_path / "loser")
    tuned(out)
    if "another training" in words(run_report(tmp_path / "loser"))["selection"][1]:
        assert run_report(tmp_path / "loser").guarantee.status == "does-not-hold"


def test_a_loser_that_was_copied_is_no_winner(tmp_path, monkeypatch):
    out, copies = tmp_path / "out", tmp_path / "copies"
    monkeypatch.setattr(selections, "_runs", lambda *_: 3)
    stopped(out, monkeypatch, after=3, runs=10)
    shutil.copytree(out / "trials", copies)
    run = tuned(out, runs=10)
    found = [words(run_report(copy))["selection"] for copy in copies.iterdir()]
    assert sorted(status for status, _ in found) == ["enforced", "violated", "violated"]
    assert run_report(run.path).guarantee.status == "conditional"


def test_elsewhere_all_of_it_is_asserted(tmp_path, monkeypatch):
    run = tuned(tmp_path / "out")
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "elsewhere"))
    report = run_report(run.path)
    assert {status for status, _ in words(report).values()} == {"asserted"}
    assert report.guarantee.epsilon == pytest.approx(3.0, rel=1e-3)
    # Whoever opens it there is charged for the whole selection, as nobody was.
    RunFolder.open(run.path).close()
    assert account(PEOPLE).total.epsilon(1e-3) == report.guarantee.epsilon
    refused(tmp_path / "out", "is not on this machine|given up|changed")


def test_a_winner_is_not_forked_nor_adopted_nor_continued_alone(tmp_path, monkeypatch):
    run = tuned(tmp_path / "out")
    with pytest.raises(ConfigError, match="is the best of several"):
        fork(run.path, tmp_path / "fork", RunFolder.open(run.path).plan)
    with pytest.raises(ConfigError, match="one of the trainings of a selection"):
        RunFolder.open(run.path, adopt=True)
    stopped(tmp_path / "next", monkeypatch, after=1)
    (trial,) = (tmp_path / "next" / "trials").iterdir()
    ledger = (trial / "ledger.log").read_bytes()
    # A run that has rounds to go.
    (trial / "ledger.log").write_bytes(ledger[: ledger[:-1].rfind(b"\n") + 1])
    with pytest.raises(ConfigError, match="one of the trainings of a selection"):
        train(plan=PLAN, out=trial, resume=True, progress=False, **objects())


def test_giving_it_up_charges_every_training_and_erases_them(tmp_path, monkeypatch):
    monkeypatch.setattr(selections, "_runs", lambda *_: 40)
    out = tmp_path / "out"
    stopped(out, monkeypatch, after=1, runs=10)
    base = account(PEOPLE).charges[0].entry.sampled[0]["mu"]
    given_up = abandon(out)
    assert given_up.runs == 40
    assert given_up.mu == pytest.approx(base * math.sqrt(40))
    assert given_up.mu >= base * math.sqrt(40)
    (charge,) = account(PEOPLE).charges
    assert charge.status == "closed"
    assert account(PEOPLE).total.mu == given_up.mu
    assert not (out / "trials").exists()
    assert not list((log.directory() / "selections").iterdir())
    refused(out, "was given up", runs=10)
    # Again: nothing more is charged.
    abandon(out)
    assert account(PEOPLE).total.mu == given_up.mu


def test_giving_it_up_costs_at_least_the_selection_and_nothing_before_a_round(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(selections, "_runs", lambda *_: 2)
    stopped(tmp_path / "out", monkeypatch, after=1, runs=10)
    begun = account(PEOPLE).charges[0].entry
    assert abandon(tmp_path / "out").mu == begun.mu > begun.sampled[0]["mu"] * math.sqrt(2)
    spent = account(PEOPLE).total.epsilon(1e-3)
    with opened(tmp_path / "unspent")[0]:
        assert account(PEOPLE).total.epsilon(1e-3) > spent
    assert abandon(tmp_path / "unspent").runs == 0
    assert account(PEOPLE).total.epsilon(1e-3) == spent


def test_a_folder_that_is_gone_is_given_up_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(selections, "_runs", lambda *_: 9)
    stopped(tmp_path / "out", monkeypatch, after=1, runs=10)
    shutil.rmtree(tmp_path / "out")
    assert abandon(tmp_path / "out").runs == 9
    with pytest.raises(ConfigError, match="no selection that could be given up"):
        abandon(tmp_path / "out")


def test_a_lost_secret_costs_the_most_that_can_be_drawn(tmp_path, monkeypatch):
    out = tmp_path / "out"
    stopped(out, monkeypatch, after=1, runs=10)
    (place,) = (log.directory() / "selections").iterdir()
    kept = json.loads((place / "secret").read_text())
    # Another secret would draw another number.
    (place / "secret").write_text(json.dumps(kept | {"secret": "00" * 32}))
    refused(out, "the secret of this selection is lost or was changed", runs=10)
    (place / "secret").unlink()
    refused(out, "the secret of this selection is lost or was changed", runs=10)
    assert abandon(out).runs == 1263


def test_another_selection_waits_until_this_one_ended_or_was_charged(tmp_path, monkeypatch):
    stopped(tmp_path / "out", monkeypatch, after=1)
    refused(tmp_path / "next", "has not ended")
    abandon(tmp_path / "out")
    tuned(tmp_path / "next")


def test_copies_and_removed_trainings_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(selections, "_runs", lambda *_: 3)
    out, copy = tmp_path / "out", tmp_path / "copy"
    stopped(out, monkeypatch, after=1, runs=10)
    shutil.copytree(out, copy)
    stopped(out, monkeypatch, after=1, runs=10)
    # The copy lacks the second training.
    refused(copy, "is missing: this folder is an older copy", runs=10)
    one, other = sorted((out / "trials").iterdir())
    (log.directory() / "selections" / _id(out) / "scores.json").unlink()
    shutil.rmtree(one)
    shutil.copytree(other, one)
    refused(out, "another run than the one begun in it|older copy", runs=10)
    shutil.rmtree(one)
    refused(out, "is missing", runs=10)


def _id(out: Path) -> str:
    return json.loads((out / "selection.json").read_text())["id"]


def test_a_loser_that_is_put_in_the_winners_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(selections, "_runs", lambda *_: 2)
    out = tmp_path / "out"
    stopped(out, monkeypatch, after=2, runs=10)
    scores = json.loads((log.directory() / "selections" / _id(out) / "scores.json").read_text())
    loser = min(scores, key=lambda name: scores[name][0])
    (out / "trials" / loser).rename(out / "run")
    refused(out, "is not the training that had the highest score", runs=10)
    assert words(run_report(out / "run"))["selection"][0] == "violated"


def test_changed_files_are_refused_and_a_finished_selection_is_not_repeated(tmp_path, monkeypatch):
    out = tmp_path / "out"
    stopped(out, monkeypatch, after=1)
    refused(out, "changed since the selection began", target_epsilon=2.0)
    refused(out, "changed since the selection began", runs=10)
    about = json.loads((out / "selection.json").read_text())
    (out / "selection.json").write_text(json.dumps(about | {"id": "0" * 32}))
    refused(out, "is not on this machine")
    (out / "selection.json").write_text(json.dumps(about))
    tuned(out)
    refused(out, "holds the end of a selection by another tune file", runs=10)
    with train(plan=PLAN, out=tmp_path / "run", progress=False, **objects())._setup.trainer:
        refused(tmp_path / "run", "holds a run: a selection begins in a folder of its own")
    refused(out / "run", "holds a run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    refused(tmp_path / "full", "is not empty")


def test_code_that_changes_while_it_runs_trains_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(selections, "_runs", lambda *_: 2)
    monkeypatch.chdir(tmp_path)
    text = "def score(module):\n    return module.weight[0].item()\n"
    (tmp_path / "scores.py").write_text(text)
    note = Selection.note

    def noted(self, *arguments):
        note(self, *arguments)
        (tmp_path / "scores.py").write_text(text.replace("[0]", "[1]"))

    plan = {**PLAN, "data": PLAN["data"] | {"metric": "./scores.py:score"}}
    tables, own = {**TABLES, "plan": plan, "runs": 10}, objects()
    del own["metric"]
    with monkeypatch.context() as patch:
        patch.setattr(Selection, "note", noted)
        with pytest.raises(ConfigError, match="while the selection runs"):
            tune(tables, tmp_path / "out", show=lambda _: None, **own)
    with pytest.raises(ConfigError, match="changed since"):
        tune(tables, tmp_path / "out", show=lambda _: None, **own)
    (tmp_path / "scores.py").write_text(text)
    tune(tables, tmp_path / "out", show=lambda _: None, **own)


def test_a_killed_call_leaves_parts_of_files_and_nothing_that_is_in_the_way(tmp_path):
    (tmp_path / "out").mkdir(mode=0o700)
    (tmp_path / "out" / f".privpart-{'0' * 32}.part").touch(mode=0o600)
    assert tuned(tmp_path / "out").path == tmp_path / "out" / "run"


def test_the_limit_of_the_people_is_kept_before_anything_is_trained(tmp_path):
    set_limit(PEOPLE, Limit(2.9, 1e-3))
    with pytest.raises(BudgetExceededError, match="would pass the limit"):
        tuned(tmp_path / "out")
    assert not account(PEOPLE).charges
    set_limit(PEOPLE, Limit(3.01, 1e-3), looser=True)
    tuned(tmp_path / "out")
    with pytest.raises(BudgetExceededError):
        tuned(tmp_path / "next")


NOISED = {
    "plan": tables(
        privacy={
            "rounds": 3,
            "metrics": {
                "measures": ["accuracy", "loss"],
                "users": 60,
                "every": 2,
                "loss_bound": 4.0,
            },
        }
    ),
    "target_epsilon": 8.0,
    "runs": 2,
    "seconds": 1,
    "score": "noised:accuracy",
    "candidates": {"slow": {}, "fast": {"client.learning_rate": 0.3}},
}


@pytest.mark.parametrize(("name", "best"), [("accuracy", max), ("loss", min)])
def test_a_noised_metric_of_users_who_never_train_is_a_score(tmp_path, monkeypatch, name, best):
    seen = {}
    note = Selection.note

    def noted(self, trial, run, score):
        metrics = noised_metrics(trial.path)
        assert metrics.evaluations[-1][0] == 2
        seen[run] = metrics.score(name)
        assert score == (seen[run] if best is max else -seen[run])
        note(self, trial, run, score)

    monkeypatch.setattr(Selection, "note", noted)
    tables = {**NOISED, "score": f"noised:{name}", "runs": TWO}
    run = tune(tables, tmp_path / "out", show=lambda _: None)
    report = run.report()
    assert report.noised.score(name) == seen[report.run_id] == best(seen.values())
    assert words(report)["score"][0] == "enforced"
    assert words(report)["metrics"][0] == "verified"
    assert report.guarantee.epsilon <= 8.0
    # Those who evaluate pay for the selection, too, not for one training.
    assert report.guarantee.metrics["epsilon"] == report.guarantee.epsilon
    assert report.guarantee.metrics["mu"] == report.guarantee.mu
    assert not [check for check in check_run(run.path) if check.status == "wrong"]


def test_metrics_that_are_not_the_score_are_released_with_the_winner_and_cost_no_more(
    tmp_path, monkeypatch
):
    """Also after a crash between a round and its metrics."""

    def crash(*_):
        raise StopError

    tables = {**NOISED, "score": "accuracy", "runs": "binomial:expected=1.01,most=2"}
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "commit_metrics", crash)
        with pytest.raises(StopError):
            tune(tables, tmp_path / "out", show=lambda _: None)
    report = tune(tables, tmp_path / "out", show=lambda _: None).report()
    assert len(report.noised.evaluations) == 2
    assert words(report)["score"][0] == "enforced"
    assert report.guarantee.metrics["epsilon"] == report.guarantee.epsilon <= 8.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"score": "noised:recall"}, "no such measure"),
        ({"score": "noised:"}, "score=noised:: must be"),
        ({"score": "noised:loss", "better": "higher"}, "would release the worst model"),
    ],
)
def test_a_noised_score_is_one_that_every_candidate_releases(tmp_path, change, says):
    with pytest.raises(ConfigError, match=says):
        tune({**NOISED, **change}, tmp_path / "out", show=lambda _: None)
    table = NOISED["plan"]["privacy"]["metrics"] | {"also_train": True, "noise_multiplier": 9.0}
    dear = {"privacy.metrics": table | {"allow_large_noise": True}}
    both = {**NOISED, "candidates": {"slow": dear, "fast": dear | {"client.learning_rate": 0.3}}}
    with pytest.raises(ConfigError, match="releases more than the models"):
        tune(both, tmp_path / "out", show=lambda _: None)


WRONG = {
    "has another privacy.max_participations": {
        "candidates": {"a": {}, "b": {"privacy.max_participations": 2}}
    },
    "has another data.population": {"candidates": {"a": {}, "b": {"data.population": "others"}}},
    "has another privacy.delta": {"candidates": {"a": {}, "b": {"privacy.delta": 1e-4}}},
    "b: is the same plan as candidate a": {"candidates": {"a": {}, "b": {}}},
    "each score would be a release": {"score": "accuracy"},
    "score=private:accuracy: must be": {"score": "private:accuracy"},
    "candidates: there are none": {"candidates": {}},
    "runs = 0.5: expected=0.5: the mean number": {"runs": 0.5},
    "runs = ten: must be a mean number": {"runs": "ten"},
    "target_epsilon: Input should be greater": {"target_epsilon": 0.0},
    "target_epsilon = 1e-06: so little": {
        "target_epsilon": 1e-6,
        "runs": "binomial:expected=1.5,most=2",
        "plan": {**PLAN, "privacy": {**PLAN["privacy"], "delta": 1e-5}},
    },
    "worst model by accuracy": {"better": "lower", "score": "accuracy"},
    "a: privacy.noise_multiplier: every candidate gets": {
        "candidates": {"a": {"privacy.noise_multiplier": 0.1}}
    },
    "of [space]: privacy.target_epsilon: every candidate gets": {
        "space": {"points": 2, "fields": {"privacy.target_epsilon": [1.0, 2.0]}}
    },
    "small: server.learning_rate: [space] changes it, too": {
        "space": {"points": 2, "fields": {"server.learning_rate": [1.0, 2.0]}}
    },
    'quote its name: "client.epochs"': {"candidates": {"a": {"client": {"epochs": 2}}}},
    "space.fields.client.learning_rate: low=2: must be below": {
        "space": {"points": 2, "fields": {"client.learning_rate": {"low": 2.0, "high": 1.0}}}
    },
    "space.sed: no such key. The nearest is seed": {
        "space": {"points": 2, "sed": 1, "fields": {"client.learning_rate": [1.0, 2.0]}}
    },
    "privacy.round_seconds: no round is released": {
        "candidates": {"a": {"privacy.round_seconds": 1.0}}
    },
    "canaries: an audit needs a run of its own": {"candidates": {"a": {"canaries.count": 20}}},
    "learning_rat: no such key": {"candidates": {"a": {"client.learning_rat": 1.0}}},
    "either plan or study": {"study": "study.toml"},
    "file: schema: Input should be 'privpart/tune/1'": {"schema": "privpart/plan/1", "x": 1},
    "wokers: no such option": {"engine": {"wokers": 2}},
    "space.points": {"space": {"points": 0, "fields": {"client.learning_rate": [1.0]}}},
    "must be at most 1000": {
        "space": {"points": 600, "fields": {"client.learning_rate": {"low": 0.1, "high": 0.2}}}
    },
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_file_that_no_selection_covers_is_refused_in_one_sentence(tmp_path, sentence):
    change = WRONG[sentence]
    with pytest.raises(ConfigError) as error:
        tuned(tmp_path / "out", **change)
    assert sentence in str(error.value)
    assert not (tmp_path / "out").exists()
    assert not log.lines_of()


def test_points_of_a_space_are_one_fixed_list_beside_named_candidates():
    space = {"points": 5, "fields": {"client.learning_rate": {"low": 0.1, "high": 1.0}}}
    chosen, again = (tune_of({**TABLES, "space": space}, Own(**objects())) for _ in range(2))
    assert len(chosen.candidates) == 10
    assert chosen.hash == again.hash
    assert tune_of(TABLES, Own(**objects())).hash != chosen.hash
    names = {one.name for one in chosen.candidates}
    assert {"small 0", "large 4"} <= names


def test_every_candidate_has_the_least_noise_of_its_own_rounds_and_mechanism():
    candidates = {
        "few": {"privacy.rounds": 1},
        "more": {"privacy.rounds": 2},
        "blt": {"privacy.mechanism": {"name": "blt"}},
    }
    chosen = tune_of({**TABLES, "candidates": candidates}, Own(**objects()))
    for one in chosen.candidates:
        mu = one.plan.privacy_plan().guarantee().mu
        assert mu <= chosen.mu < mu * (1 + 1e-9)
    assert chosen.cost.epsilon(1e-3) <= 3.0
    assert len({one.plan.privacy.noise_multiplier for one in chosen.candidates}) == 3


def test_the_bill_says_when_counting_is_cheaper():
    few = {**TABLES, "runs": "negative-binomial:expected=30,eta=1"}
    chosen = tune_of(few, Own(**objects()))
    setup, bill = prepared(chosen)
    assert bill.cheaper == 2
    assert Guarantee(bill.mu * math.sqrt(2)).epsilon(bill.delta) <= 3.0
    assert (bill.expected, bill.most, bill.is_timed) == (30, 89, False)
    many = {
        **TABLES,
        "runs": 10,
        "space": {"points": 20, "fields": {"client.learning_rate": {"low": 0.1, "high": 1.0}}},
    }
    assert bill_of(tune_of(many, Own(**objects())), setup).cheaper is None


def test_seconds_are_timed_where_nobody_states_them(tmp_path):
    _, bill = prepared(tune_of({**TABLES, "seconds": None}, Own(**objects())))
    assert bill.is_timed
    assert 0 < bill.seconds < 60


def test_a_study_ends_in_a_selection_among_its_arms(tmp_path):
    from privpart.study.tune import read_tune

    study = (Path(__file__).parents[2] / "examples" / "study_digits.toml").read_text()
    (tmp_path / "study.toml").write_text(study)
    text = 'schema = "privpart/tune/1"\nstudy = "study.toml"\ntarget_epsilon = 8.0\n'
    (tmp_path / "tune.toml").write_text(text)
    chosen = read_tune(tmp_path / "tune.toml")
    assert len(chosen.candidates) == 2 * 4
    assert {tuple(one.plan.model.train) for one in chosen.candidates} == {("*",), ("!dense1.*",)}
    assert {one.plan.data.held_out for one in chosen.candidates} == {200}
    (tmp_path / "tune.toml").write_text(text + "[candidates.a]\n")
    with pytest.raises(ConfigError, match="arms and a space of its own"):
        read_tune(tmp_path / "tune.toml")


def test_a_run_of_another_cost_than_was_charged_claims_nothing(tmp_path, monkeypatch):
    """Whoever writes a ledger by hand can name a selection, and its cost; the log knows better."""
    fact = Selection.fact.fget

    def cheaper(self):
        values = fact(self)
        return values | {"cost": values["cost"] | {"expected": 1.5}}

    monkeypatch.setattr(Selection, "fact", property(cheaper))
    run = tuned(tmp_path / "out")
    assert words(run_report(run.path))["selection"] == (
        "violated",
        "the selection that was charged has another cost than the ledger says",
    )
    assert run_report(run.path).guarantee.status == "does-not-hold"


def test_the_claim_is_that_of_the_theorem(tmp_path):
    run = tuned(tmp_path / "out", runs="negative-binomial:expected=2,eta=0")
    g = run.report(1e-5).guarantee
    cost = SelectedGuarantee(Guarantee(g.selection["mu"]), NegativeBinomialRuns(2, eta=0))
    assert g.epsilon == cost.epsilon(1e-5)
    assert g.mu == cost.mu
    assert g.advantage == cost.delta(0.0)
