"""``privpart frontier``, as a person calls it: a study of one's own code, resumed and changed."""

import csv
import json
import sys

import pytest
import torch
from page_checks import page_text
from small_study import changed
from typer.testing import CliRunner

from accounting import ConfigError
from privpart.cli import frontier_leakage
from privpart.cli.main import app
from privpart.run import package
from privpart.study import runner
from privpart.study.runner import run_cell
from privpart.study.store import Store

TASK = """
import torch
from torch import nn
from privpart.data.users import Users
from privpart.training.metric import Accuracy

def examples(seed, count):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x.sum(1) > 0).long()

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))

def clients():
    return Users(*examples(0, 60), {i: range(3 * i, 3 * i + 3) for i in range(20)})

def public(module):
    return Accuracy(*examples(1, 30))(module)

def test(module):
    return Accuracy(*examples(2, 30))(module)
"""
STUDY = changed(
    ("[plan]\n", "smoke = true\n[plan]\n"),
    (
        'name = "small_cnn"\nsizes = { channels = [2, 4], hidden = 8, image_size = 8 }\nseed = 7',
        'factory = "./task.py:network"',
    ),
    (
        'task = "digits"\nusers = 100\nclients_per_round = 5',
        'clients = "./task.py:clients"\nmetric = "./task.py:test"\nclients_per_round = 4',
    ),
    ('last = { "model.train" = ["dense2.*"] }', 'head = { "model.train" = ["2.*"] }'),
    ("multiplier = [0.5]", "epsilon = [4.0]"),
    ("trials = 3\nrefine = 2\nseeds = [100]", "trials = 2\nseeds = [7]"),
    ("held_out = 20", 'held_out = 5\nmetric = "./task.py:public"'),
    ("high = 3.0", "high = 2.0"),
    ('"server.momentum" = [0.0, 0.5]\n', ""),
    ("seeds = [0, 1, 2, 3, 4]", "seeds = [0, 1]"),
)


@pytest.fixture
def folder(tmp_path, fresh_code):
    """Write the study and its code."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "study.toml").write_text(STUDY)
    return tmp_path


def frontier(folder, *more):
    call = ["frontier", folder / "study.toml", "--out", folder / "out", "-j", "1", *more]
    return CliRunner().invoke(app, [str(a) for a in call])


def rows_of(folder, name):
    with (folder / "out" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_study_of_ones_own_code_is_tuned_tested_and_resumed(folder):
    told = frontier(folder, "--format", "json", "--html", folder / "page.html")
    assert told.exit_code == 0, told.stderr
    page = page_text((folder / "page.html").read_text())
    assert all(word in page for word in ("Student's t at 95 %", "none of the models is private"))
    assert "4 groups of 2 trials and 2 final seeds; 32 rounds to train" in told.stderr
    document = json.loads(told.stdout)
    assert "NOT private" in document["notes"][0]
    rows = document["rows"]
    assert [(r["arm"], r["mechanism"], r["verdict"]) for r in rows][::2] == [
        ("full", "none", "reference"),
        ("full", "tree", "reference"),
    ]
    tuning, final = rows_of(folder, "tuning"), rows_of(folder, "final")
    assert len(final) == 8
    for row in rows:
        own = [
            float(f["metric"])
            for f in final
            if f["arm"] == row["arm"] and f["level"] == row["level"]
        ]
        assert row["metric"] == pytest.approx(sum(own) / 2)
        tried = [t for t in tuning if t["arm"] == row["arm"] and t["level"] == row["level"]]
        best = max(tried, key=lambda t: float(t["metric"]))
        assert [t["chosen"] for t in tried if t is best or t["chosen"] == "True"] == ["True"]
        assert float(best["server.learning_rate"]) == row["server.learning_rate"]
        assert row["held_out_metric"] == float(best["metric"])
        assert row["bytes_up"] > 4 * row["trained"]
        assert row["memory_bytes"] > 0
    assert [round(r["epsilon"], 3) for r in rows[2:]] == [4.0, 4.0]
    for name in ("accuracy-epsilon.png", "accuracy-bytes.png", "study.json"):
        assert (folder / "out" / name).stat().st_size > 100
    # nothing is trained twice; another arm trains its own cells only
    more = ("[mechanisms]", 'bias = { "model.train" = ["2.bias"] }\n[mechanisms]')
    (folder / "study.toml").write_text(changed(more, text=STUDY))
    told = frontier(folder)
    assert "; 16 rounds to train" in told.stderr
    assert len(rows_of(folder, "tuning")) == 12
    assert [row for row in rows_of(folder, "final") if row["arm"] != "bias"] == final


def test_what_train_refuses_is_refused_before_any_trial(folder, monkeypatch):
    """15 of 20 clients train, 4 in each round: nobody is left for round 3."""
    monkeypatch.setattr(runner, "run_cell", None)
    text = changed(("rounds = 2", "rounds = 4"), text=STUDY)
    (folder / "study.toml").write_text(text)
    told = frontier(folder)
    assert isinstance(told.exception, ConfigError)
    assert "from round 3 on, the limits on participation leave no client" in str(told.exception)
    assert Store(folder / "out").errors() == []


RATE = '"server.learning_rate" = {'


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([(RATE, '"privacy.clip_norm" = [1.0, 0.0]\n' + RATE), ("trials = 2", "trials = 4")],
         "seed 7: clip_norm=0: must be positive"),
        ([(RATE, '"server.momentum" = { low = 0.2, high = 1.0 }\n' + RATE),
          ("trials = 2\n", "trials = 2\nrefine = 1\n")], "momentum=1.0: must be"),
        ([("epsilon = [4.0]", "epsilon = [1e-300]")], "epsilon"),
    ],
)  # fmt: skip
def test_a_trial_that_cannot_finish_is_refused_before_the_first(folder, monkeypatch, changes, says):
    """A later point, an end of a range that refining may reach, a budget that no noise meets."""
    monkeypatch.setattr(runner, "run_cell", None)
    (folder / "study.toml").write_text(changed(*changes, text=STUDY))
    told = frontier(folder)
    assert isinstance(told.exception, ConfigError)
    assert says in str(told.exception)


def test_a_study_in_which_some_trial_of_every_group_failed_has_no_result(folder, monkeypatch):
    def fails(cell, *options, **more):
        if cell.labels["trial"] == "1":
            raise ConfigError("no such training")
        return run_cell(cell, *options, **more)

    monkeypatch.setattr(runner, "run_cell", fails)
    told = frontier(folder)
    assert isinstance(told.exception, ConfigError)
    assert "no arm has a result; 4 trainings failed, the first with: no such" in str(told.exception)


def test_an_audit_stands_beside_each_arm(tmp_path, monkeypatch):
    """Updates of both arms tell whose image it was; the whole one also what dense1 read."""
    monkeypatch.setattr(frontier_leakage, "_EVALUATIONS", 20)
    rank, labels = frontier_leakage.attacks.reid_rank, []
    monkeypatch.setattr(
        frontier_leakage.attacks,
        "reid_rank",
        lambda *args: (labels.append(args[-1]), rank(*args))[1],
    )
    text = changed(
        ("[plan]\n", "smoke = true\n[plan]\n"),
        ("trials = 3\nrefine = 2", "trials = 2"),
        ("seeds = [0, 1, 2, 3, 4]", "seeds = [0]"),
        ("none = true", "none = false"),
        ("rounds = 2", "rounds = 1"),
    )
    (tmp_path / "study.toml").write_text(text)
    told = frontier(tmp_path, "--audit")
    assert told.exit_code == 0, told.stderr
    assert "attacking an update of last" in told.stderr
    assert "6 trained, " in told.stderr  # a log has no bar
    rows = {row["arm"]: row for row in rows_of(tmp_path, "frontier")}
    assert rows["full"]["inputs_read"] == "dense1 dense2"
    assert rows["last"]["inputs_read"] == "dense2"
    for row in rows.values():
        assert row["leakage"] in ("recovered", "partial", "attack failed", "ambiguous")
        assert row["leakage_rank"].startswith("1 of ")
        assert float(row["leakage_psnr"]) > 0
        assert float(row["leakage_baseline"]) > 0
    assert row["leakage_rank"] in told.stdout
    assert len(labels) == 2 * len(rows)
    for own in labels:  # of users with other labels, the label alone tells the image
        assert len(own) > 3
        assert len(set(own.tolist())) == 1

    def fails(*_, **__):
        raise RuntimeError("mat1 and mat2 must have the same dtype")

    monkeypatch.setattr(frontier_leakage.attacks, "leakage", fails)
    told = frontier(tmp_path, "--audit")
    assert told.exit_code == 0
    assert "not audited, in 64 bits the network fails: mat1 and mat2" in told.stderr
    assert {row["leakage"] for row in rows_of(tmp_path, "frontier")} == {"not audited"}


def test_a_search_for_what_to_freeze_adds_arms_until_it_ends(folder):
    """Whatever is frozen costs nothing, or too much; a network of two layers has two rungs."""
    text = changed(
        ('full = { "model.train" = ["*"] }\nhead = { "model.train" = ["2.*"] }\n', ""),
        ("[arms]", "[freeze]\ntolerance = 0.1"),
        ("epsilon = [4.0]\n", ""),
        text=STUDY,
    )
    (folder / "study.toml").write_text(text)
    told = frontier(folder, "--format", "json")
    assert told.exit_code == 0, told.stderr
    document = json.loads(told.stdout)
    assert [row["arm"] for row in document["rows"]][:2] == ["full", "freeze 0"]
    held_out = {row["arm"]: row["held_out_metric"] for row in document["rows"]}
    within = [arm for arm, metric in held_out.items() if metric >= held_out["full"] - 0.1]
    assert document["freeze"]["arm"] == within[-1]
    assert document["rows"][1]["trained"] == 14
    told = frontier(folder)
    assert told.stderr.count("; 0 rounds to train") == len(document["rows"])
    assert f"The search ends with the arm {within[-1]}: train = [" in told.stdout


def test_results_of_another_version_are_refused_and_of_other_code_trained_anew(folder, monkeypatch):
    """What one folder compares was trained by one version of everything."""
    assert frontier(folder).exit_code == 0
    first, final = (folder / "out" / "sweep.jsonl").read_bytes(), rows_of(folder, "final")
    assert "; 0 rounds to train" in frontier(folder).stderr
    with monkeypatch.context() as other:
        other.setattr(package, "running", lambda: "f" * 64)
        refused = frontier(folder).exception
    assert isinstance(refused, ConfigError)
    assert "of another version (files " in str(refused)
    assert "; here files ffffffffffff)" in str(refused)
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "1.0.0")
        assert "(torch " in str(frontier(folder).exception)
    lines = first.splitlines(keepends=True)
    nameless = b"".join(line for line in lines if b'"made_by"' not in line)
    assert len(nameless) < len(first)
    (folder / "out" / "sweep.jsonl").write_bytes(nameless)
    assert "privpart unknown" in str(frontier(folder).exception)
    (folder / "out" / "sweep.jsonl").write_bytes(first)
    assert "; 0 rounds to train" in frontier(folder).stderr
    # one's own code is part of each key
    del sys.modules["task"]
    (folder / "task.py").write_text(TASK.replace("examples(0, 60)", "examples(3, 60)"))
    told = frontier(folder)
    assert "; 32 rounds to train" in told.stderr, told.exception
    again = rows_of(folder, "final")
    assert len(again) == len(final)
    assert [row["metric"] for row in again] != [row["metric"] for row in final]
