"""``privpart sweep``, as a person calls it."""

import csv
import json
import re
import signal
import sys
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from multiprocessing import Pipe
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from small_study import PLAN, result
from swept import sweep_and_tell
from typer.testing import CliRunner

from accounting import ConfigError
from accounting.checks import MissingExtraError
from privpart.cli.main import app
from privpart.engines.options import EngineOptions
from privpart.pool import WorkerError
from privpart.study import runner as module
from privpart.study.runner import Runner, run_cell
from privpart.study.store import Store
from privpart.study.sweep import read_sweep

SWEEP = """
schema = "privpart/sweep/1"
plan = "plan.toml"
seeds = [0, 1]
[grid]
"model.train" = { full = ["*"], last = ["dense2.*"] }
[joint.noise."none"]
"privacy.noise_multiplier" = 0.0
[joint.noise."some"]
"privacy.noise_multiplier" = 2.0
"server.learning_rate" = 0.1
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "sweep.toml").write_text(SWEEP)
    return tmp_path


def rows_of(out):
    lines = map(json.loads, (out / "sweep.jsonl").read_text().splitlines())
    return [line for line in lines if "key" in line]


def errors_of(out):
    with Store(out) as store:
        return store.errors()


def results_of(out):
    with Store(out) as store:
        return [*store.results().values()]


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def sweep(folder, *more):
    return call("sweep", folder / "sweep.toml", "--out", folder / "out", "-j", "1", *more)


def test_a_sweep_is_shown_resumed_by_content_and_marked_as_not_private(folder):
    told = sweep(folder, "--format", "json")
    assert told.exit_code == 0, told.stderr
    assert "8 cells, 8 to train" in told.stderr
    table = json.loads(told.stdout)
    assert "NOT private" in table["notes"][0]
    rows = table["rows"]
    assert [(r["model.train"], r["noise"], r["seeds"]) for r in rows] == [
        ("full", "none", 2),
        ("full", "some", 2),
        ("last", "none", 2),
        ("last", "some", 2),
    ]
    assert [r["epsilon"] is None for r in rows] == [True, False, True, False]
    assert rows[1]["epsilon"] == rows[3]["epsilon"]
    assert [r["trained"] for r in rows] == [330, 330, 90, 90]
    before = rows_of(folder / "out")
    for row in rows:
        metrics = [
            found.accuracy
            for found in results_of(folder / "out")
            if found.noise_multiplier == row["noise_multiplier"] and found.trained == row["trained"]
        ]
        assert row["mean_accuracy"] == pytest.approx(sum(metrics) / 2)
        assert row["standard_deviation"] == pytest.approx(abs(metrics[0] - metrics[1]) / 2**0.5)
    # another seed and a reordered file: only what is new is trained
    (folder / "sweep.toml").write_text(SWEEP.replace("[0, 1]", "[2, 1, 0]"))
    told = sweep(folder)
    assert "12 cells, 4 to train" in told.stderr
    assert rows_of(folder / "out")[:8] == before
    shown = call("sweep", "--out", folder / "out", "--format", "csv")
    assert [row["seeds"] for row in csv.DictReader(shown.stdout.splitlines())] == ["3"] * 4
    for name in ("sweep.csv", "accuracy-noise.png", "accuracy-epsilon.png"):
        assert (folder / "out" / name).stat().st_size > 100


def test_a_killed_sweep_goes_on_without_repeating_a_cell(folder, process_with_torch):
    """The killed process comes from one that has imported torch, and has computed nothing."""
    here, there = Pipe(duplex=False)
    child = process_with_torch.Process(target=sweep_and_tell, args=(folder, there))
    child.start()
    there.close()
    assert here.recv_bytes() == here.recv_bytes() == b"."
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    here.close()
    kept = rows_of(folder / "out")
    assert 2 <= len(kept) < 8
    assert not errors_of(folder / "out")
    told = sweep(folder)
    assert f"8 cells, {8 - len(kept)} to train" in told.stderr
    after = rows_of(folder / "out")
    assert after[: len(kept)] == kept  # the same rows: none was written again
    assert len({row["key"] for row in after}) == len(after) == 8


LOOP = EngineOptions(batching="loop")


def test_cells_of_one_process_share_nothing_but_what_no_result_depends_on(folder, monkeypatch):
    """And shares of rounds are told, which add up to the rounds."""
    cells = read_sweep(folder / "sweep.toml").cells
    together, rounds, parts = {}, Counter(), Counter()
    monkeypatch.setattr(module, "_REPORT_INTERVAL", 0.0)

    def advanced(cell, count):
        rounds[cell.key] += count
        parts[cell.key] += 0 < count < 1

    with Runner(1, options=LOOP) as runner:
        runner.train(cells, lambda cell, outcome: together.setdefault(cell.key, outcome), advanced)
    assert rounds == {cell.key: pytest.approx(2) for cell in cells}
    assert min(parts[cell.key] for cell in cells) > 2
    for cell in (cells[0], cells[-1], cells[4]):
        alone = run_cell(cell, LOOP)
        assert alone.plan == cell.plan.to_json()
        assert replace(together[cell.key], cpu_seconds=0.0) == replace(alone, cpu_seconds=0.0)


def test_a_cell_whose_process_fails_is_one_sentence_and_the_others_continue(folder, monkeypatch):
    """The pool's own tests kill and stop processes; here one says what happened to a cell."""
    (folder / "sweep.toml").write_text(SWEEP.split("[grid]")[0])
    cells = read_sweep(folder / "sweep.toml").cells
    outcomes, rounds = {}, Counter()

    jobs, died = [], WorkerError("its process was ended by SIGKILL.")
    pool = SimpleNamespace(busy=False, idle=lambda: pool, close=lambda: None)
    pool.give = lambda _, job: jobs.append(job)
    pool.heard = lambda: [(jobs[0], False, 1), (jobs[0], True, "ends"), (jobs[1], True, died)]
    monkeypatch.setattr(module, "Pool", lambda *_, **__: pool)
    with Runner(2) as runner:
        runner.train(
            cells,
            lambda cell, outcome: outcomes.setdefault(cell.seed, outcome),
            lambda cell, count: rounds.update({cell.seed: count}),
        )
    assert outcomes[0] == "ends"
    assert outcomes[1].startswith("its process was ended by SIGKILL. Run the same command again")
    assert "-j 1" in outcomes[1]
    assert rounds == {0: 2, 1: 2}


def test_an_executor_trains_the_same_cells_and_a_lost_worker_is_one_sentence(folder):
    (folder / "sweep.toml").write_text(SWEEP.split("[grid]")[0])
    cells = read_sweep(folder / "sweep.toml").cells
    outcomes, rounds = {}, Counter()
    with ThreadPoolExecutor(2) as threads, Runner(threads, options=LOOP) as runner:
        runner.train(
            cells,
            lambda cell, outcome: outcomes.setdefault(cell.seed, outcome),
            lambda cell, count: rounds.update({cell.seed: count}),
        )
    assert rounds == {0: 2, 1: 2}
    for cell in cells:
        alone = run_cell(cell, LOOP)
        assert replace(outcomes[cell.seed], cpu_seconds=0.0) == replace(alone, cpu_seconds=0.0)
    lost = Future()
    lost.set_exception(OSError("it went away"))
    threads.submit = lambda *_: lost
    with Runner(threads) as runner:
        runner.train(cells[:1], lambda _, outcome: outcomes.update(lost=outcome))
    assert outcomes["lost"] == "its worker was lost (OSError: it went away)"


@pytest.mark.parametrize(
    ("client", "error", "sentence"),
    [
        (None, MissingExtraError, "needs Dask: pip install 'privpart[dask]'"),
        (
            Mock(side_effect=OSError("refused")),
            ConfigError,
            "no Dask scheduler answers there (refused)",
        ),
        (Mock(return_value=Mock(run=lambda _: {})), ConfigError, "has no worker"),
        (
            Mock(return_value=Mock(run=lambda code: {"tcp://b:1": "x", "tcp://a:1": code()})),
            ConfigError,
            "jobs=dask:tcp://h:1: tcp://b:1 has other code of privpart",
        ),
        (
            Mock(return_value=Mock(run=Mock(side_effect=ImportError("no privpart")))),
            ConfigError,
            "jobs=dask:tcp://h:1: a worker cannot import privpart (no privpart)",
        ),
    ],
)
def test_a_cluster_that_cannot_train_is_one_sentence(folder, monkeypatch, client, error, sentence):
    module = client and SimpleNamespace(Client=client)
    monkeypatch.setitem(sys.modules, "distributed", module)
    told = sweep(folder, "-j", "dask:tcp://h:1")
    assert type(told.exception) is error
    assert sentence in str(told.exception)
    assert not (folder / "out").exists()


@pytest.mark.slow
def test_a_local_dask_cluster_trains_what_this_machine_trains(folder):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None) as two:
        told = sweep(folder, "-j", f"dask:{two.scheduler_address}")
        assert told.exit_code == 0, told.stderr
    assert sweep(folder, "--out", folder / "here").exit_code == 0
    here, there = (
        sorted(repr(replace(r, cpu_seconds=0.0)) for r in results_of(folder / name))
        for name in ("here", "out")
    )
    assert here == there
    assert len(here) == 8


def test_failures_are_recorded_not_fatal_and_tried_again(folder, monkeypatch):
    (folder / "sweep.toml").write_text(SWEEP.replace("[0, 1]", "[0]"))
    train = run_cell

    def fails(cell, *options, **more):
        if cell.labels["noise"] == "some":
            raise ValueError("from the network")
        return train(cell, *options, **more)

    monkeypatch.setattr(module, "run_cell", fails)
    told = sweep(folder)
    assert told.exit_code == 0
    assert "from the network" in told.stderr
    assert len(errors_of(folder / "out")) == 2
    told = sweep(folder)  # what was trained before is there, and this command trained nothing
    assert "4 cells, 2 to train" in told.stderr
    assert isinstance(told.exception, WorkerError)


@pytest.mark.parametrize("error", [ConfigError, ValueError])
def test_a_sweep_whose_every_training_failed_says_so_and_exits_with_its_code(
    folder, monkeypatch, error
):
    def fails(*_, **__):
        raise error("no training ends")

    monkeypatch.setattr(module, "run_cell", fails)
    told = sweep(folder)
    assert isinstance(told.exception, ConfigError if error is ConfigError else WorkerError)
    assert "all 8 trainings failed, the first with: " in str(told.exception)
    assert "no training ends" in str(told.exception)
    assert len(errors_of(folder / "out")) == 8


def test_a_cell_that_diverged_has_no_mean(folder, monkeypatch):
    (folder / "sweep.toml").write_text(SWEEP.replace("[0, 1]", "[0]"))
    train, metrics = run_cell, cycle([float("nan"), float("inf")])
    monkeypatch.setattr(
        module, "run_cell", lambda *a, **b: replace(train(*a, **b), accuracy=next(metrics))
    )
    told = sweep(folder)
    assert (told.exit_code, told.stdout.count("not finite")) == (0, 4), told.exception
    told = call("sweep", "--out", folder / "out", "--format", "json")
    assert {row["mean_accuracy"] for row in json.loads(told.stdout)["rows"]} == {None}


OWN = """
import torch
from privpart.data.users import Users

def clients():
    x = torch.arange(64.0).reshape(16, 1, 2, 2).repeat(1, 1, 4, 4) / 64
    return Users(x, torch.arange(16) % 10, {i: [i] for i in range(16)})
"""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"rounds = 2": "rounds = 5"},
            "from round 4 on, the limits on participation leave no",
        ),
        ({'noise_multiplier" = 2.0': 'noise_multiplier" = 1e9'}, "noise_multiplier=1e+09"),
        ({"[client]": "[canaries]\ncount = 20\n[client]"}, "nothing here makes them"),
        ({"hidden = 8, image_size = 8": "hidden = 8, image_size = 12"}, "does not take the exam"),
    ],
)
def test_what_train_refuses_is_refused_before_any_cell_is_trained(
    folder, monkeypatch, changes, says
):
    code = "own_" + re.sub(r"\W", "", says)  # a process takes one module of a name
    (folder / f"{code}.py").write_text(OWN)
    own = {
        'task = "digits"\nusers = 1437': f'clients = "./{code}.py:clients"',
        "round = 6": "round = 4",
    }
    plan, text = PLAN, SWEEP.replace('none"]', 'little"]').replace("0.0", "1.0")
    for old, new in {**own, **changes}.items():
        assert old in plan + text
        plan, text = plan.replace(old, new), text.replace(old, new)
    (folder / "plan.toml").write_text(plan)
    (folder / "sweep.toml").write_text(text)
    monkeypatch.setattr(module, "run_cell", None)
    told = sweep(folder)
    assert isinstance(told.exception, ConfigError)
    assert re.match(r"the cell with model.train=full, noise=\w+, seed 0: ", str(told.exception))
    assert says in str(told.exception)
    assert rows_of(folder / "out") == []


def test_a_large_delta_is_refused_before_any_cell_and_repeated_in_the_table(folder):
    small = SWEEP.replace("[0, 1]", "[0]").replace('full = ["*"], ', "")
    (folder / "sweep.toml").write_text(small)
    (folder / "plan.toml").write_text(PLAN.replace("1e-5", "0.02"))
    assert "is 1 / 1,437 or more" in str(sweep(folder).exception)
    assert not (folder / "out").exists()
    (folder / "plan.toml").write_text(PLAN.replace("= 1e-5", "= 0.02\nallow_large_delta = true"))
    assert "Warning: delta=0.02: is 1 / 1,437 or more" in sweep(folder).stdout
    shown = json.loads(call("sweep", "--out", folder / "out", "--format", "json").stdout)
    assert [note for note in shown["notes"] if "is 1 / 1,437 or more" in note]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("seeds", "seedz"), "seedz"),
        (('"model.train"', '"model.trian"'), "nearest is train"),
        (("seeds = [0, 1]", "seeds = [0, 0]"), "same cell twice"),
        (("plan.toml", "none.toml"), "no such file"),
        (("dense2.*", "dense9.*"), r"model.train=\['dense9.\*'\]"),
        (("seeds = [0, 1]", "seeds = [0, true]"), r"seeds.1: Input should be a valid integer"),
        (("[grid]", '[grid]\n"client.epochs" = [true]'), r"client.epochs: .* valid integer"),
    ],
)
def test_sweeps_that_say_what_is_wrong(folder, change, says):
    (folder / "sweep.toml").write_text(SWEEP.replace(*change))
    with pytest.raises(ConfigError, match=says):
        read_sweep(folder / "sweep.toml")


def test_a_folder_without_a_sweep_is_not_shown(tmp_path):
    assert "has no sweep" in str(call("sweep", "--out", tmp_path).exception)


@pytest.mark.parametrize(
    ("data", "column", "text"),
    [({"metric": "./task.py:error"}, "metric", "37.83 ± 1"), ({}, "accuracy (%)", "3783.00 ± 100")],
)
def test_a_metric_of_ones_own_is_not_shown_as_a_percentage(tmp_path, privpart, data, column, text):
    with Store(tmp_path, create=True) as store:
        store.describe(["model.train"], [])
        for seed, value in enumerate((37.83 - 0.5**0.5, 37.83 + 0.5**0.5)):
            made = result(value, plan=json.dumps({"data": data}))
            store.add(str(seed), {"model.train": "all"}, seed, made)
    told = privpart("sweep", "--out", str(tmp_path))
    assert column in told.stdout
    assert text in told.stdout
    shown = json.loads(privpart("sweep", "--out", str(tmp_path), "--format", "json").stdout)
    (row,) = shown["rows"]
    known, other = ("mean_metric", "mean_accuracy") if data else ("mean_accuracy", "mean_metric")
    assert row[known] == pytest.approx(37.83)
    assert row[other] is None
