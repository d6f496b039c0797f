"""Mechanisms by their parameters, from files and in plans; and files that hold something else."""

import json
from pathlib import Path

import numpy as np
import pytest

from accounting import Dense, fingerprint

RUN = ["--rounds", "64", "--noise-multiplier", "4", "--delta", "1e-6",
       "--max-participations", "3", "--min-separation", "16"]  # fmt: skip
CHOICES = [
    "tree:restart_every=16,estimator=online",
    "independent",
    "toeplitz:coefficients=1,0.5,0.25,normalize_columns",
    "toeplitz:fit,bands=16,normalize_columns",
    "blt:buffers=2,objective=max",
    "blt:decay=0.9,0.5,scale=0.2,0.1",
    "banded-inverse:fit,bands=3",
    "banded-inverse:coefficients=1,-0.9",
]


@pytest.mark.parametrize("choice", CHOICES)
def test_json_read_again_gives_the_same_numbers(privpart, tmp_path, choice):
    first = privpart("epsilon", *RUN, "--mechanism", choice, "--format", "json")
    report = json.loads(first.stdout)
    file = tmp_path / "mechanism.json"
    for text in (first.stdout, json.dumps(report["mechanism_parameters"])):
        file.write_text(text)
        again = privpart("epsilon", *RUN, "--mechanism", f"file:{file}", "--format", "json")
        assert json.loads(again.stdout) == report, again.stderr


def test_a_report_leaves_out_what_is_too_long_and_the_reader_says_so(privpart, tmp_path):
    run = ["--rounds", "20001", "--noise-multiplier", "4", "--delta", "1e-6",
           "--max-participations", "1"]  # fmt: skip
    done = privpart("epsilon", *run, "--mechanism", "toeplitz", "--format", "json")
    assert json.loads(done.stdout)["mechanism_parameters"] is None
    table = privpart("epsilon", *run, "--mechanism", "toeplitz")
    assert "more than can be listed" in table.stdout
    file = tmp_path / "report.json"
    file.write_text(done.stdout)
    refused = privpart("epsilon", *run, "--mechanism", f"file:{file}")
    assert "leaves out the mechanism's parameters" in refused.stderr


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "{",
        "[" * 100_000,
        '{"schema": "privpart/mechanism/1", "name": "tree", "rounds": 1000000000}',
        '{"schema": "privpart/mechanism/1", "name": "blt", "rounds": 64, "decay": [NaN], '
        '"scale": [0.1]}',
        '{"schema": "privpart/mechanism/1", "name": "file", "file": "/etc/passwd"}',
        '{"schema": "privpart/mechanism/1", "name": "tree", "rounds": 64, "rounds": 64}',
        "\ufeff{}",
    ],
)
def test_hostile_json_gives_one_sentence(privpart, tmp_path, text):
    file = tmp_path / "mechanism.json"
    file.write_text(text)
    done = privpart("epsilon", *RUN, "--mechanism", f"file:{file}")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_file_in_a_plan_is_bound_by_its_fingerprint(privpart, tmp_path):
    bidiagonal = Dense(np.eye(72) + np.diag(np.full(71, 0.5), -1))
    file = tmp_path / "mechanism.json"
    file.write_text(json.dumps(bidiagonal.to_dict()))
    text = Path("examples/digits.toml").read_text()
    plan = tmp_path / "plan.toml"

    def with_table(table):
        plan.write_text(text.replace('{ name = "blt" }', table))
        return privpart("epsilon", "--plan", str(plan), "--format", "json")

    missing = with_table(f'{{ name = "file", file = "{file}" }}')
    assert "mechanism.fingerprint: is missing" in missing.stderr
    other = with_table(f'{{ name = "file", file = "{file}", fingerprint = "{"0" * 64}" }}')
    assert "it was changed, or is another one" in other.stderr
    own = fingerprint(bidiagonal)
    read = with_table(f'{{ name = "file", file = "{file}", fingerprint = "{own}" }}')
    assert json.loads(read.stdout)["sensitivity_squared"] == pytest.approx(1.25)
    assert json.loads(read.stdout)["mechanism_fingerprint"] == own


def test_a_log_beside_a_promise(privpart, tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("client,round\nada,0\nada,20\nbob,63\n")
    run = ["epsilon", "--rounds", "64", "--noise-multiplier", "4", "--delta", "1e-6", "--log",
           str(log)]  # fmt: skip
    both = privpart(*run, "--max-participations", "3", "--min-separation", "16")
    assert both.returncode == 0
    assert "by the log        2 clients, each in at most 2, 20 or more apart" in both.stdout
    assert "promise           kept" in both.stdout
    alone = privpart(*run, "--format", "json", "--max-epsilon", "99")
    report = json.loads(alone.stdout)
    assert (report["max_participations"], report["min_separation"]) == (2, 20)
    assert report["participation_stated"]
    assert report["realised"]["epsilon"] <= report["epsilon"]
    broken = privpart(*run, "--max-participations", "1", "--max-epsilon", "99")
    assert broken.returncode == 6
    assert "the log breaks the promise: a client took part 2 times, 1 promised" in broken.stderr


@pytest.mark.parametrize(
    "mechanism",
    [
        "blt:buffers=2",
        "toeplitz:fit,bands=8,normalize_columns",
        "bandmf:bands=8",
        "banded-inverse:fit,bands=4",
    ],
)
def test_nothing_is_fitted_to_a_log(privpart, tmp_path, mechanism):
    """The encoder that ran was fixed before it, by a promise; one fitted to the log is cheaper."""
    log = tmp_path / "log.csv"
    log.write_text("client,round\nada,0\nada,20\nbob,63\n")
    run = ["epsilon", "--rounds", "64", "--noise-multiplier", "4", "--delta", "1e-6"]
    of = ["--mechanism", mechanism]
    alone = privpart(*run, *of, "--log", str(log))
    assert (alone.returncode, alone.stdout) == (2, "")
    assert ": is fitted to a promise" in alone.stderr
    promised = privpart(*run, *of, "--max-participations", "4", "--min-separation", "16",
                        "--format", "json")  # fmt: skip
    (tmp_path / "ran.json").write_text(promised.stdout)
    beside = ["--log", str(log), "--format", "json"]
    kept = privpart(*run, *of, "--max-participations", "4", "--min-separation", "16", *beside)
    own = ["--mechanism", f"file:{tmp_path}/ran.json"]
    file = privpart(*run, *own, *beside)
    costs = [json.loads(done.stdout)["realised"]["epsilon"] for done in (kept, file)]
    assert costs[0] == pytest.approx(costs[1], rel=1e-9)
