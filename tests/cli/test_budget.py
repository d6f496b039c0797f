"""``privpart epsilon`` and ``privpart calibrate``, as a person or a pipeline calls them."""

import csv
import io
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from accounting import BinaryTree, Participation, calibrate

RUN = ["--mechanism", "tree", "--rounds", "1600", "--delta", "1e-6", "--max-participations", "1"]


def test_exact_is_the_default_and_json_is_the_whole_of_stdout(privpart):
    done = privpart("epsilon", *RUN, "--noise-multiplier", "1.13", "--format", "json")
    report = json.loads(done.stdout)
    assert round(report["epsilon"], 3) == 17.667
    assert done.stderr == "privpart: warning: " + report["warnings"][0] + "\n"


def test_figures_round_against_us(privpart):
    done = privpart("epsilon", *RUN, "--noise-multiplier", "1.13", "--delta", "1.23456789e-6")
    for word in ("epsilon           17.54", "client, zero-out adjacency", "at most one round"):
        assert word in done.stdout
    shown = dict(re.findall(r"^  (delta|mu) +(\S+)", done.stdout, re.MULTILINE))
    assert 1.23456789e-6 <= float(shown["delta"]) < 1.23458e-6
    reciprocal = float(re.search(r"1/mu = ([\d.]+)", done.stdout)[1])
    assert reciprocal <= 1.13 / 11**0.5 < reciprocal * (1 + 1e-4)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (["--noise-multiplier", "nan"], "--noise-multiplier nan: must be positive and finite"),
        (["--delta", "2"], "--delta 2: must lie strictly between 0 and 1"),
        (["--max-participations", "9", "--min-separation", "400"], "at most 4 fit into 1600"),
        (["--min-separation", "400"], "--min-separation 400: is between two rounds of one client"),
        (["--max-epsilon", "0"], "--max-epsilon 0: must be positive"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(privpart, change, fault):
    done = privpart("epsilon", *RUN, "--noise-multiplier", "1", *change)
    assert done.returncode == 2
    assert done.stdout == ""
    assert fault in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_calibrate_is_the_library_and_csv_is_readable(privpart):
    done = privpart("calibrate", "--target-epsilon", "2", *RUN, "--format", "csv")
    (row,) = csv.DictReader(io.StringIO(done.stdout))
    expected = calibrate(BinaryTree(1600), Participation(1600), target_epsilon=2, delta=1e-6)
    assert float(row["noise_multiplier"]) == expected
    assert 1.9998 < float(row["epsilon"]) <= 2
    assert privpart("calibrate", "--target-epsilon", "nan", *RUN).returncode == 2


def test_budget_gate_for_pipelines(privpart):
    over = privpart("epsilon", *RUN, "--noise-multiplier", "1.13", "--max-epsilon", "17")
    assert (over.returncode, "exceeds 17" in over.stderr) == (3, True)
    within = privpart("epsilon", *RUN, "--noise-multiplier", "1.13", "--max-epsilon", "18")
    assert within.returncode == 0


def test_budgets_and_the_cost_of_a_plan_never_pay_for_torch():
    """Also of a plan whose groups take turns, of which the cost depends on; one process for all."""
    lines = [
        ["epsilon", "--plan", "examples/digits.toml"],
        ["epsilon", "--plan", "examples/fedpart_digits.toml"],
        ["mechanisms", "--plan", "examples/digits.toml", "--mechanism", "independent"],
    ]
    code = (
        "import sys, privpart, accounting\nfrom privpart.cli.main import main\n"
        "heavy = {'torch', 'opacus', 'dp_accounting', 'sklearn', 'matplotlib', 'jinja2'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        f"for line in {lines}:\n"
        "    sys.argv = ['privpart', *line]\n"
        "    try:\n        main()\n    except SystemExit as ended:\n        assert not ended.code\n"
        "    assert 'torch' not in sys.modules, line\n    print('END')"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    *answers, rest = done.stdout.split("END\n")
    assert ["epsilon" in answer for answer in answers] == [True] * 3
    assert not rest


SHORT = ["--rounds", "16", "--max-participations", "1"]
SAMPLED = ["epsilon", "--rounds", "8", "--noise-multiplier", "4", "--sampling"]


@pytest.mark.parametrize(
    "line",
    [
        ["epsilon", *SHORT, "--noise-multiplier", "4"],
        ["calibrate", *SHORT, "--target-epsilon", "2"],
        [*SAMPLED, "balls-in-bins:bins=8"],
        [*SAMPLED, "poisson:expected_batch=1", "--mechanism", "independent"],
    ],
    ids=" ".join,
)
def test_delta_is_judged_against_the_population(privpart, line):
    """Warned of from 0.1 / population, refused at 1 / population, and repeated where allowed."""
    allow, as_json = "--allow-large-delta", ["--format", "json"]
    line = [*line, "--population", "100"]
    found = privpart(*line, "--delta", "5e-5", *as_json)
    assert (found.returncode, found.stderr) == (0, ""), found.stderr
    assert not json.loads(found.stdout)["warnings"]
    warned = privpart(*line, "--delta", "5e-3", *as_json)
    assert warned.returncode == 0
    assert "it should be below 0.1 / " in warned.stderr
    assert len(json.loads(warned.stdout)["warnings"]) == 1
    refused = privpart(*line, "--delta", "0.1")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "publishing the data of one client, chosen at random, has such a d" in refused.stderr
    allowed = privpart(*line, "--delta", "0.1", allow, *as_json)
    assert allowed.returncode == 0
    report = json.loads(allowed.stdout)
    assert "is 1 / " in report["warnings"][-1]
    assert [a["code"] for a in report["assumptions"] if a["status"] == "violated"] == ["delta"]
    statement = privpart(*line, "--delta", "0.1", allow).stdout
    assert "(NOT MET: delta 0.1 for 100 clients)" in " ".join(statement.split())
    idle = privpart(*line, "--delta", "1e-6", allow)
    assert "delta=1e-06 is allowed without it" in idle.stderr


def test_mechanisms_are_not_compared_at_a_large_delta(privpart, tmp_path):
    line = ["mechanisms", *SHORT, "--mechanism", "independent", "--delta"]
    assert (privpart(*line, "0.1").returncode, privpart(*line, "1e-6").returncode) == (2, 0)
    plan, text = tmp_path / "plan.toml", Path("examples/digits.toml").read_text()
    for delta, code in (("0.1", 2), ("6e-4", 0)):
        plan.write_text(re.sub("^delta = .*$", f"delta = {delta}", text, flags=re.MULTILINE))
        assert privpart("epsilon", "--plan", str(plan)).returncode == code
        line = ["mechanisms", "--plan", str(plan), "--mechanism", "independent"]
        done = privpart(*line, "--format", "json")
        assert done.returncode == code
    assert any("delta=0.0006: is " in warning for warning in json.loads(done.stdout)["warnings"])


def test_a_delta_beside_a_plan_or_a_log(privpart, tmp_path):
    """Another population than the plan's, and fewer clients than a log has, are refused."""
    planned = ["epsilon", "--plan", "examples/digits.toml"]
    assert "the plan is for 1437" in privpart(*planned, "--population", "9999999").stderr
    assert "leave out --allow-large-delta" in privpart(*planned, "--allow-large-delta").stderr
    log = tmp_path / "log.csv"
    log.write_text("client,round\n" + "".join(f"c{i},{i % 16}\n" for i in range(20)))
    logged = ["epsilon", *SHORT, "--noise-multiplier", "4", "--log", str(log)]
    assert "is 1 / 20 or more" in privpart(*logged, "--delta", "0.06").stderr
    fewer = privpart(*logged, "--delta", "1e-6", "--population", "19")
    assert (fewer.returncode, fewer.stdout) == (2, "")
    assert "the log has 20 clients" in fewer.stderr


@pytest.mark.parametrize("command", ["epsilon", "calibrate", "mechanisms"])
def test_one_participation_is_never_assumed_in_silence(privpart, command):
    run = ["--rounds", "64", "--delta", "1e-6"]
    own = {
        "epsilon": ["--noise-multiplier", "4"],
        "calibrate": ["--target-epsilon", "2"],
        "mechanisms": ["--mechanism", "tree"],
    }[command]
    silent = privpart(command, *run, *own, "--format", "json")
    document = json.loads(silent.stdout)
    assert "max_participations was not given" in document["warnings"][0]
    assert "privpart: warning: max_participations was not given" in silent.stderr
    stated = privpart(command, *run, *own, "--format", "json", "--max-participations", "1")
    assert json.loads(stated.stdout)["warnings"] == []
    assert "was not given" not in stated.stderr


def test_a_gate_needs_the_participations(privpart):
    gboard = ["epsilon", "--rounds", "2000", "--noise-multiplier", "7", "--delta", "1e-10",
              "--mechanism", "tree:estimator=online"]  # fmt: skip
    refused = privpart(*gboard, "--max-epsilon", "4")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--max-epsilon 4: a gate needs --max-participations" in refused.stderr
    six = ["--max-participations", "6", "--min-separation", "314"]
    assert privpart(*gboard, "--max-epsilon", "4", *six).returncode == 3


def test_calibrate_says_where_an_accountant_jumps(privpart):
    run = ["calibrate", "--rounds", "64", "--max-participations", "1", "--target-epsilon", "1e-4",
           "--delta", "1e-5", "--format", "json"]  # fmt: skip
    exact, done = privpart(*run), privpart(*run, "--method", "rdp")
    assert json.loads(exact.stdout)["epsilon"] > 0.9999e-4
    assert exact.stderr == ""
    assert json.loads(done.stdout)["epsilon"] < 0.9999e-4
    assert "jumps here" in done.stderr


def test_help_and_the_nearest_option_by_meaning(privpart, privpart_process):
    asked = [privpart("epsilon", "--help"), privpart("epsilon", "-h"), privpart("help", "epsilon")]
    assert len({done.stdout for done in asked}) == 1
    assert "--install-completion" in privpart("--help").stdout
    assert privpart_process("--version").stdout.strip() == version("privpart")
    assert __import__("privpart").__version__ == version("privpart")
    for typed, option in (("--noise", "--noise-multiplier"), ("--clients", "--population")):
        assert option in privpart("epsilon", typed, "3").stderr


def test_noise_that_changes_by_round_costs_its_quietest_rounds(privpart, tmp_path):
    schedule = tmp_path / "noise.csv"
    schedule.write_text("from_round,factor\n0,1\n50,0.5\n")
    limits = ("--rounds", "100", "--max-participations", "4", "--min-separation", "20")
    line = ("epsilon", *limits, "--noise-multiplier", "10", "--delta", "1e-6")
    scheduled = (*line, "--noise-schedule", str(schedule), "--format", "json")
    # rounds 50, 70 and 90, and one before them
    assert json.loads(privpart(*scheduled).stdout)["sensitivity_squared"] == pytest.approx(13)
    told = privpart(*scheduled, "--mechanism", "tree")
    assert told.returncode == 2
    assert "is of independent noise; leave out --mechanism" in told.stderr
    for text in (
        "round,factor\n0,1\n",
        "from_round,factor\n0,1\n0,2\n",
        "from_round,factor\n0,a\n",
    ):
        schedule.write_text(text)
        assert privpart(*scheduled).returncode == 2


def test_events_are_written_and_read(privpart, tmp_path):
    run = ("--rounds", "100", "--noise-multiplier", "1", "--delta", "1e-5")
    sampled = ("--sampling", "poisson:expected_batch=10", "--population", "1000")
    planned = ("epsilon", *run, *sampled, "--mechanism", "independent", "--format")
    events = tmp_path / "events.json"
    events.write_text(privpart(*planned, "events").stdout)
    read = ("epsilon", "--events", str(events), "--delta", "1e-5", "--format", "json")
    expected = json.loads(privpart(*planned, "json").stdout)["epsilon"]
    assert json.loads(privpart(*read).stdout)["epsilon"] == pytest.approx(expected, rel=1e-3)
    assert privpart(*read, "--max-epsilon", str(expected / 2)).returncode == 3
    assert privpart(*read, "--rounds", "3").returncode == 2
    assert privpart("epsilon", "--events", str(events)).returncode == 2
