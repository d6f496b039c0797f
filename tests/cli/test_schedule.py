"""A plan with a schedule, as a person meets it: drawn, accounted, compared, trained, resumed."""

import json
import runpy

import pytest
from small_study import PLAN, changed
from typer.testing import CliRunner

from accounting import ConfigError
from privpart.cli.main import app

EXAMPLE = "examples/fedpart_digits.toml"
SMALL = changed(
    ("rounds = 2", "rounds = 8"),
    ("[model]", '[schedule]\ncycles = 2\nrounds_per_group = 1\norder = "reverse"\n[model]'),
    ("[model]", "warm_up = 1\nbetween = 1\n[model]"),
    ("seed = 7", 'train = ["conv*", "norm.*", "dense2.*"]\nseed = 7'),
    ("round = 6", "round = 4"),
    ("[server]", 'objective = "fedprox"\nmu = 0.1\n[server]\nmomentum = 0.9'),
    text=PLAN,
)


@pytest.fixture
def privpart():
    """Run a command in this process, for torch takes seconds to load; an error is raised."""

    def run(*arguments):
        done = CliRunner().invoke(app, arguments)
        if done.exception is not None:
            raise done.exception
        return done

    return run


def test_the_groups_and_the_costs(privpart):
    assert "#2 conv2, norm" in privpart("costs", "--plan", EXAMPLE).stdout
    document = json.loads(privpart("costs", "--plan", EXAMPLE, "--format", "json").stdout)
    schedule = document["schedule"]
    assert len(schedule["rounds"]) == 72
    assert [row["active_rounds"] for row in schedule["groups"]] == [36] * 4
    assert [row["layers"] for row in schedule["groups"]][1] == "conv2, norm"
    full, partial = document["rows"]
    assert partial["bytes_up"] < 0.51 * full["bytes_up"]
    assert partial["bytes_down"] == full["bytes_down"]
    assert partial["forward_flops"] == full["forward_flops"]
    assert partial["backward_flops"] < 0.6 * full["backward_flops"]
    assert partial["memory_bytes"] == full["memory_bytes"]


def test_epsilon_of_a_plan_is_that_of_its_groups(privpart):
    done = privpart("epsilon", "--plan", EXAMPLE, "--format", "json")
    report = json.loads(done.stdout)
    assert (report["mechanism"], report["sensitivity_squared"]) == ("grouped", 6)
    assert report["sensitivity_exact"]
    one = ["epsilon", "--rounds", "72", "--noise-multiplier", "1", "--delta", "1e-5"]
    single = json.loads(privpart(*one, "--format", "json").stdout)
    assert single["sensitivity_squared"] == 7
    assert report["epsilon"] < single["epsilon"]


def test_a_stream_per_group_has_less_noise_at_the_same_epsilon(privpart):
    done = privpart("mechanisms", "--plan", EXAMPLE, "--format", "json")
    rows = {row["mechanism"]: row for row in json.loads(done.stdout)["rows"]}
    for kind in ("tree", "blt", "independent"):
        own, one = rows[f"{kind}, per group"], rows[f"{kind}, one stream"]
        assert own["epsilon"] == pytest.approx(one["epsilon"], rel=1e-3)
        assert own["rmse"] < 0.94 * one["rmse"]
        assert own["max_error"] < 0.94 * one["max_error"]
        again = 13 / 12 if kind == "tree" else 1.0  # three nodes of 36 rounds are drawn again
        assert own["draws_per_round"] == pytest.approx(0.5 * again)
    assert rows["tree, one, pruned"]["max_error"] > rows["tree, per group"]["max_error"]


def test_a_comparison_needs_a_plan_or_its_options(privpart):
    with pytest.raises(ConfigError, match="--rounds and --delta are needed"):
        privpart("mechanisms")


def test_a_run_with_groups(privpart, tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "state"))
    plan, out = tmp_path / "plan.toml", str(tmp_path / "run")
    plan.write_text(SMALL)
    done = privpart("train", "--plan", str(plan), "--out", out, "--format", "json")
    report = json.loads(done.stdout)
    assert (report["complete"], report["deviations"]) == (True, [])
    assert report["guarantee"]["mechanism"] == "grouped"
    # 2 full rounds and 2 of its own: 4 steps, a tree of 3 levels
    assert report["guarantee"]["sensitivity_squared"] == 3
    again = json.loads(privpart("report", out, "--format", "json").stdout)
    assert again == report


@pytest.mark.slow  # its parts: tests/privpart/test_inspect.py
def test_the_diagnostics_of_a_run_and_of_two(privpart, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "state"))
    script = runpy.run_path("examples/studies/fedpart_inspect.py")
    pictures = tmp_path / "pictures"

    def trained(name, *change):
        plan, out = tmp_path / f"{name}.toml", str(tmp_path / name)
        plan.write_text(SMALL.replace(*change) if change else SMALL)
        privpart("train", "--plan", str(plan), "--out", out, "--seed", "1")
        return out

    def inspected(*words):
        return script["main"]([*words[:1], str(pictures), *words[1:], "--channels", "1"])

    run, other = trained("one"), trained("two", "learning_rate = 0.1", "learning_rate = 0.5")
    before = sorted((f.name, f.read_bytes()) for f in (tmp_path / "one").iterdir())
    rows = inspected(run, "--against", other, "--rounds", "2")
    assert rows["Assumption 3, k of the layers' masks"] > 1.2
    assert rows["Assumption 3, k of random masks"] >= 1
    assert len(list(pictures.iterdir())) == 4
    assert sorted((f.name, f.read_bytes()) for f in (tmp_path / "one").iterdir()) == before
    same = inspected(run, "--against", run, "--rounds", "2")

    def similarity(values, name):
        return [v for k, v in values.items() if k.endswith(f"run and {name}")]

    assert similarity(same, "against") == pytest.approx([1.0] * 4)  # frozen dense1 included
    assert min(similarity(rows, "against")) < 0.9
    assert similarity(rows, "untrained") == similarity(same, "untrained")
    assert min(similarity(same, "untrained")) < 0.9


def test_plans_whose_parts_do_not_fit_each_other_say_so(privpart, tmp_path):
    for change, message in (
        (("rounds = 8", "rounds = 9"), r"rounds=9: the schedule has 8 rounds for 3 groups"),
        (("seed = 7", 'groups = [["*"], []]\nseed = 7'), "groups: group 2 is empty"),
        (('"reverse"', '"shuffled"'), "'sequential', 'reverse' or 'random'"),
        (("cycles = 2", "cycles = 0"), "cycles=0: must be at least 1"),
    ):
        path = tmp_path / "plan.toml"
        path.write_text(SMALL.replace(*change, 1))
        with pytest.raises(ConfigError, match=message):
            privpart("costs", "--plan", str(path))
