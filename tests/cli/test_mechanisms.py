"""``privpart mechanisms``: the comparison of the literature, at 1600 rounds."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from accounting import (
    BinaryTree,
    ConfigError,
    Participation,
    Workload,
    error,
    footprint,
    mechanism_from_dict,
)
from accounting.mechanisms.mechanism import noise_matrix
from privpart.cli.main import app

RUN = ["--rounds", "1600", "--delta", "1e-6", "--max-participations", "1"]


def in_page():
    page = Path("docs/concepts/dp-ftrl.md").read_text()
    shown = page.partition(f"$ privpart mechanisms {' '.join(RUN)} --mechanism dense\n")[2]
    return [line for line in shown.partition("```")[0].splitlines() if line]


def rows_of(table):
    cells = [re.split(r"\s{2,}", line.strip()) for line in table if line.startswith("  ")]
    header, *found = cells
    return {row[0].removeprefix("* "): dict(zip(header, row, strict=True)) for row in found}


@pytest.mark.slow
def test_the_page_on_dp_ftrl_shows_the_table(privpart):
    done = privpart("mechanisms", *RUN, "--mechanism", "dense")
    assert done.returncode == 0, done.stderr
    assert [line.rstrip() for line in done.stdout.splitlines() if line.strip()] == in_page()


def test_the_page_shows_what_the_command_gives(privpart):
    """But for what depends on other rows, whose fits take minutes."""
    shown = rows_of(in_page())
    names = ["tree", "tree:estimator=online", "independent", "blt:buffers=3", "toeplitz"]
    typed = [word for name in names for word in ("--mechanism", name)]
    found = rows_of(privpart("mechanisms", *RUN, *typed).stdout.splitlines())
    assert set(found) == set(names)
    for name, row in found.items():
        for column in row.keys() - {"mechanism", "rmse ratio"}:
            own, page = row[column], shown[name][column]  # a fit's last digit is the processor's
            assert own == page or float(own) == pytest.approx(float(page), rel=1e-4), column


def test_blt_is_within_four_percent_of_the_optimum_and_the_tree_is_not():
    rows = rows_of(in_page())
    for row in rows.values():
        ratio = float(row["rmse"]) / float(rows["dense, optimal"]["rmse"])
        assert ratio == pytest.approx(float(row["rmse ratio"]), rel=1e-3)
    assert float(rows["blt:buffers=3"]["rmse ratio"]) < 1.04
    assert float(rows["tree:estimator=online"]["rmse ratio"]) > 1.8


def test_every_row_meets_the_same_target(privpart):
    done = privpart(
        "mechanisms", "--rounds", "32", *RUN[2:], "--mechanism", "dense", "--format", "json"
    )
    document = json.loads(done.stdout)
    assert (document["unit"], document["adjacency"]) == ("client", "zero-out")
    assert len(document["rows"]) > 5
    for row in document["rows"]:
        assert 0.9999 <= row["epsilon"] <= 1
        mechanism = mechanism_from_dict(row["mechanism_parameters"])
        unit = error(mechanism, Participation(32))
        assert unit.rmse == pytest.approx(row["unit_rmse"], rel=1e-12)
        assert unit.max_error == pytest.approx(row["unit_max_error"], rel=1e-12)
        assert footprint(mechanism).state_vectors == row["state_vectors"]


def test_the_name_of_a_row_makes_that_row_and_is_taken_by_other_commands(privpart):
    run = ["--rounds", "64", "--delta", "1e-6", "--max-participations", "3",
           "--min-separation", "16", "--format", "json"]  # fmt: skip
    rows = json.loads(privpart("mechanisms", *run).stdout)["rows"]
    for row in rows:
        typed = [*run, "--mechanism", row["mechanism"]]
        (again,) = json.loads(privpart("mechanisms", *typed).stdout)["rows"]
        report = json.loads(privpart("epsilon", *typed, "--noise-multiplier", "4").stdout)
        for key in ("mechanism_parameters", "sensitivity_squared"):
            assert again[key] == row[key] == report[key]
    assert "bandmf:bands=16" in {row["mechanism"] for row in rows}


def test_the_front_is_what_no_other_row_beats(privpart):
    done = privpart("mechanisms", "--rounds", "100", "--delta", "1e-6", "--max-participations",
                         "5", "--min-separation", "20", "--format", "json")  # fmt: skip
    rows = json.loads(done.stdout)["rows"]
    for row in rows:
        beaten = any(
            other["rmse"] <= row["rmse"] and other["state_vectors"] <= row["state_vectors"]
            for other in rows
            if other is not row
        )
        assert row["front"] == (not beaten)
    assert rows == sorted(rows, key=lambda row: row["state_vectors"])
    (best,) = {row["rmse_ratio_to"] for row in rows}
    assert best == min(rows, key=lambda row: row["rmse"])["mechanism"] == "bandmf:bands=20"


def test_the_error_of_models_is_shown_and_fitted_for_the_servers_momentum(privpart, tmp_path):
    """By an option, and by a plan's own optimiser; plain SGD and Adam have none to show."""
    run = Participation(72)
    typed = ["--rounds", "72", "--delta", "1e-5", "--max-participations", "1"]
    names = ["--mechanism", "tree", "--mechanism", "blt:buffers=2,momentum=0.9"]
    few = ["mechanisms", *names, "--format", "json"]
    document = json.loads(privpart(*few, *typed, "--workload", "momentum=0.9").stdout)
    assert document["workload"] == {"momentum": 0.9, "learning_rates": "constant"}
    for row in document["rows"]:
        made = mechanism_from_dict(row["mechanism_parameters"])
        scale = row["rmse"] / row["unit_rmse"]
        found = error(made, run, Workload(momentum=0.9))
        assert row["model_rmse"] == pytest.approx(scale * found.rmse, rel=1e-9)
        assert row["model_max_error"] == pytest.approx(scale * found.max_error, rel=1e-9)
        rounds = (noise_matrix(made) ** 2).sum(axis=1).mean() * row["sensitivity_squared"]
        assert row["round_rmse"] == pytest.approx(scale * rounds**0.5, rel=1e-9)
    assert document["rows"][0]["model_rmse_ratio_to"] == "blt:buffers=2,momentum=0.9"

    text = Path("examples/digits.toml").read_text()
    plan = tmp_path / "plan.toml"
    for line, shown in (
        ("momentum = 0.9", "constant"),
        ("momentum = 0.0", None),
        ('kind = "adam"', None),
        ("momentum = 0.9\nweight_decay = 0.1", None),
        ('momentum = 0.9\n[learning_rates.server]\nkind = "linear"', "by round"),
    ):
        plan.write_text(text.replace("momentum = 0.9", line))
        planned = json.loads(privpart(*few, "--plan", str(plan)).stdout)
        assert (planned["workload"] or {}).get("learning_rates") == shown
        assert ("model_rmse" in planned["rows"][0]) == (shown is not None)
    falling = Workload(0.9, tuple(1 - t / 72 for t in range(72)))
    for row in planned["rows"]:
        made = mechanism_from_dict(row["mechanism_parameters"])
        scale = row["rmse"] / row["unit_rmse"]
        assert row["model_rmse"] == pytest.approx(scale * error(made, run, falling).rmse, rel=1e-6)
    rows = privpart("mechanisms", "--plan", "examples/digits.toml", "--format", "json").stdout
    fits = {row["mechanism"]: row["model_rmse"] for row in json.loads(rows)["rows"]}
    page = Path("docs/concepts/dp-ftrl.md").read_text()
    for name in ("blt", "blt:buffers=2,momentum=0.9"):
        assert f"adds {fits[name]:.1f} to" in page or f"adds {fits[name]:.1f} with" in page


@pytest.mark.parametrize("wrong", ["momentum=1", "momentum=nan", "0.9", "momentum=", "rate=0.5"])
def test_a_workload_that_is_none_is_refused(privpart, wrong):
    done = privpart("mechanisms", *RUN, "--workload", wrong)
    assert done.returncode == 2
    assert "momentum=M" in done.stderr
    beside = privpart("mechanisms", "--plan", "examples/digits.toml", "--workload", "momentum=0.5")
    assert (beside.returncode, "already contains" in beside.stderr) == (2, True)


def test_csv_on_standard_output_only(privpart):
    few = ["mechanisms", "--rounds", "32", "--delta", "1e-6", "--max-participations", "1"]
    (first, *_) = csv.DictReader(io.StringIO(privpart(*few, "--format", "csv").stdout))
    assert set(first) >= {"mechanism", "rmse", "state_vectors", "noise_multiplier", "epsilon"}


def test_shared_keys_of_a_plan_are_compared_group_by_group(tmp_path):
    def call(command, *more):
        return CliRunner().invoke(app, [command, "--plan", str(plan), "--format", "json", *more])

    text = Path("examples/federated_select.toml").read_text()
    independent = '{ keys = "independent", m = 16 }'
    assert independent in text
    plan = tmp_path / "plan.toml"
    plan.write_text(text.replace(independent, '{ keys = "shared", m = 4, seed = 3 }'))
    rows = {row["mechanism"]: row for row in json.loads(call("mechanisms").stdout)["rows"]}
    told = json.loads(call("epsilon").stdout)
    per_group, one = rows["tree, per group"], rows["tree, one stream"]
    assert told["sensitivity_squared"] == per_group["sensitivity_squared"]
    tree = footprint(BinaryTree(36))
    assert per_group["draws_per_round"] < one["draws_per_round"] == tree.draws_per_round
    assert per_group["rmse"] < 0.8 * one["rmse"]
    assert "not known for groups" in str(call("mechanisms", "--mechanism", "dense").exception)


def test_what_is_refused_comes_before_what_takes_long(monkeypatch):
    monkeypatch.setattr("privpart.cli.budget.front._row", lambda *_: pytest.fail("computed"))
    run = ["mechanisms", "--rounds", "100", "--delta", "1e-6"]
    wrong = ["--mechanism", "tree", "--mechanism", "blt:decay=2,scale=1"]
    with pytest.raises(ConfigError, match="one participation, not for 100 and 2"):
        CliRunner().invoke(
            app, [*run, "--max-participations", "2", "--mechanism", "dense"], catch_exceptions=False
        )
    with pytest.raises(ConfigError, match=r"decay\[0\]=2"):
        CliRunner().invoke(app, [*run, *wrong], catch_exceptions=False)
