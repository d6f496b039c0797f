"""``privpart mechanisms``: the comparison of the literature, at 1600 rounds."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from accounting import ConfigError
from privpart.cli.main import app

RUN = ["--rounds", "1600", "--delta", "1e-6"]


def table_of(done):
    assert done.returncode == 0, done.stderr
    return [line.rstrip() for line in done.stdout.splitlines() if line.strip()]


def rows_of(lines):
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines if line.startswith("  ")]
    header, *found = cells
    return {row[0]: dict(zip(header, row, strict=True)) for row in found}


@pytest.fixture(scope="module")
def rows(privpart):
    return rows_of(table_of(privpart("mechanisms", *RUN)))


@pytest.fixture(scope="module")
def shown():
    readme = Path("README.md").read_text()
    block = readme.partition(f"$ privpart mechanisms {' '.join(RUN)} --optimal\n")[2]
    return [line for line in block.partition("```")[0].splitlines() if line]


def test_the_readme_shows_these_rows(rows, shown):
    told = rows_of(shown)
    assert told.pop("dense, optimal")["rmse ratio"] == "1.000"
    for row in (*rows.values(), *told.values()):
        row["rmse ratio"] = "to another best"
    assert told == rows


@pytest.mark.slow
def test_the_readme_shows_the_table(privpart, shown):
    assert table_of(privpart("mechanisms", *RUN, "--optimal")) == shown


def test_blt_is_within_four_percent_of_the_optimum_and_the_tree_is_not(shown):
    rows = rows_of(shown)
    assert float(rows["dense, optimal"]["rmse ratio"]) == 1
    assert float(rows["blt, 3 buffers"]["rmse ratio"]) < 1.04
    assert float(rows["tree"]["rmse ratio"]) == pytest.approx(2.43, abs=0.01)
    assert float(rows["tree, online"]["rmse ratio"]) == pytest.approx(1.85, abs=0.01)
    assert float(rows["independent"]["rmse ratio"]) == pytest.approx(9.14, abs=0.01)


def test_every_row_meets_the_same_target(privpart):
    done = privpart("mechanisms", "--rounds", "64", *RUN[2:], "--optimal", "--format", "json")
    document = json.loads(done.stdout)
    assert (document["unit"], document["adjacency"]) == ("client", "zero-out")
    assert len(document["rows"]) > 5
    *others, best = document["rows"]
    assert (best["mechanism"], best["rmse_ratio"]) == ("dense, optimal", 1)
    assert all(row["rmse_ratio"] > 1 for row in others)
    assert all(0.9999 <= row["epsilon"] <= 1 for row in document["rows"])


def test_memory_and_draws(rows):
    cost = {name: (int(row["state"]), float(row["draws"])) for name, row in rows.items()}
    assert cost["blt, 3 buffers"] == (3, 1)
    assert cost["tree"] == (10, 1)
    assert cost["tree, online"] == (10, 2)
    assert cost["independent"] == (0, 1)


def test_table_and_csv_on_standard_output_only(privpart, privpart_process):
    few = ["mechanisms", "--rounds", "32", "--delta", "1e-6"]
    (first, *_) = csv.DictReader(io.StringIO(privpart(*few, "--format", "csv").stdout))
    assert set(first) >= {
        "mechanism", "sensitivity_squared", "rmse", "max_error", "rmse_ratio", "state_vectors",
        "draws_per_round", "noise_multiplier", "epsilon",
    }  # fmt: skip
    table = privpart_process(*few)
    assert table.stdout.count("blt, 2 buffers") == 1
    assert "blt, 3 buffers" not in table.stdout  # at 32 rounds a third one gains nothing
    assert "fitting" not in table.stdout


def test_the_optimal_matrix_is_for_one_participation(privpart):
    done = privpart("mechanisms", *RUN, "--max-participations", "2", "--optimal")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


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
    assert per_group["draws_per_round"] < one["draws_per_round"] == 1
    assert per_group["rmse"] < 0.8 * one["rmse"]
    assert "not known for groups" in str(call("mechanisms", "--optimal").exception)
    plan.write_text(text.replace(independent, '{ keys = "shared", m = 65 }'))
    for command in ("mechanisms", "epsilon"):
        refused = call(command).exception
        assert isinstance(refused, ConfigError)
        assert "select.filters.m=65: must be from 1 to K=64" in str(refused)


def test_more_rounds_than_a_fit_takes_are_refused_before_anything_is_computed(monkeypatch):
    monkeypatch.setattr("privpart.cli.budget._row", lambda *_: pytest.fail("computed"))
    with pytest.raises(ConfigError, match=r"^rounds=1000000: must be at most 32768\. That is for"):
        CliRunner().invoke(
            app, ["mechanisms", "--rounds", "1000000", "--delta", "1e-6"], catch_exceptions=False
        )
