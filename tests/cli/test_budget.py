"""``privpart epsilon`` and ``privpart calibrate``, as a person or a pipeline calls them."""

import csv
import io
import json
import subprocess
import sys

import pytest

from accounting import BinaryTree, Participation, calibrate

RUN = ["--mechanism", "tree", "--rounds", "1600", "--delta", "1e-6"]


def privpart(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "privpart.cli.main", *arguments], capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("z", "published"),
    [("1.13", 18.71), ("2.33", 7.83), ("4.03", 4.19), ("6.21", 2.60), ("8.83", 1.77)],
)
def test_fedpt_table_5_from_the_command_line(z, published):
    done = privpart("epsilon", *RUN, "--noise-multiplier", z, "--method", "rdp", "--format", "json")
    assert done.returncode == 0
    assert round(json.loads(done.stdout)["epsilon"], 2) == published


def test_exact_is_the_default_and_json_is_the_whole_of_stdout():
    done = privpart("epsilon", *RUN, "--noise-multiplier", "1.13", "--format", "json")
    report = json.loads(done.stdout)
    assert round(report["epsilon"], 3) == 17.667
    assert done.stderr == ""
    assert set(report) >= {
        "schema", "mechanism", "rounds", "max_participations", "min_separation",
        "noise_multiplier", "epsilon", "delta", "mu", "rho", "sensitivity_squared",
        "sensitivity_exact", "effective_noise_multiplier", "method", "unit", "adjacency",
        "assumptions",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (["--noise-multiplier", "nan"], "--noise-multiplier nan: must be positive and finite"),
        (["--noise-multiplier", "0"], "--noise-multiplier 0: must be positive and finite"),
        (["--noise-multiplier", "-1"], "--noise-multiplier -1: must be positive and finite"),
        (["--delta", "2"], "--delta 2: must lie strictly between 0 and 1"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--max-participations", "9", "--min-separation", "400"], "at most 4 fit into 1600"),
        (["--max-epsilon", "0"], "--max-epsilon 0: must be positive"),
        (["--mechanism", "independent", "--restart-every", "4"], "only a tree can restart"),
        (["--mechanism", "forest"], "'independent'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(change, fault):
    done = privpart("epsilon", *RUN, "--noise-multiplier", "1", *change)
    assert done.returncode == 2
    assert done.stdout == ""
    assert fault in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_table_rounds_against_us_and_names_what_epsilon_needs():
    done = privpart("epsilon", *RUN, "--noise-multiplier", "1.13")
    assert "epsilon           17.667" in done.stdout
    for word in ("1e-06", "client, zero-out adjacency", "at most one round", "clip_norm"):
        assert word in done.stdout


def test_calibrate_is_the_library_and_csv_is_readable():
    done = privpart("calibrate", "--target-epsilon", "2", *RUN, "--format", "csv")
    (row,) = csv.DictReader(io.StringIO(done.stdout))
    expected = calibrate(BinaryTree(1600), Participation(1600), target_epsilon=2, delta=1e-6)
    assert float(row["noise_multiplier"]) == expected
    assert 1.9998 < float(row["epsilon"]) <= 2
    assert privpart("calibrate", "--target-epsilon", "nan", *RUN).returncode == 2


def test_budget_gate_for_pipelines():
    over = privpart("epsilon", *RUN, "--noise-multiplier", "1.13", "--max-epsilon", "17")
    assert (over.returncode, "exceeds 17" in over.stderr) == (3, True)
    within = privpart("epsilon", *RUN, "--noise-multiplier", "1.13", "--max-epsilon", "18")
    assert within.returncode == 0


def test_budgets_never_pay_for_torch():
    code = (
        "import sys, privpart.cli.main, privpart, accounting;"
        "heavy = {'torch', 'opacus', 'dp_accounting', 'sklearn', 'matplotlib'};"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [[], ["epsilon"], ["calibrate"], ["demo"]])
def test_help(command):
    done = privpart(*command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_version():
    assert privpart("--version").stdout.strip() == "0.1.0"
