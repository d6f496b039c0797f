"""What was typed counts: every option of a budget command beside every plan and mechanism.

The options come from the parser itself, so that a new one is tried too; each is typed with its own
default where it has one, which must make no difference.
"""

import inspect
import json
from pathlib import Path

import pytest
from typer.main import get_command

from accounting import BandedInverse, BinaryTree, BufferedToeplitz, Independent, Toeplitz
from privpart.cli.budget.epsilon import _BESIDE_PLAN
from privpart.cli.budget.front import _BESIDE_PLAN as _BESIDE_PLANNED_FRONT
from privpart.cli.main import app

PLAN = "examples/digits.toml"
SAMPLES = {
    "plan": "plan.toml", "target_epsilon": "1", "rounds": "72", "only": "blt",
    "sampling": "poisson",
    "expected_batch": "10", "bins": "8", "draws": "10000", "draw_seed": "0",
    "noise_multiplier": "1.0",
    "delta": "1e-5", "log": "log.csv",
    "population": "1000", "max_epsilon": "20", "plot": "x.png", "plot_against": "noise",
    "max_participations": "1", "min_separation": "1", "mechanism_file": "m.json",
    "restart_every": "8", "bands": "2", "coefficients": "1,0.5", "objective": "rmse",
    "buffers": "3", "decay": "0.9", "scale": "0.1",
}  # fmt: skip
"""Values of options that have no default."""
OPTIONS_OF = {
    "tree": BinaryTree, "independent": Independent, "toeplitz": Toeplitz, "blt": BufferedToeplitz,
    "banded-inverse": BandedInverse,
}  # fmt: skip
NOT_THE_MECHANISM = {
    "help", "rounds", "noise_multiplier", "delta", "plan", "log", "method", "population",
    "cross_check", "max_epsilon", "plot", "plot_against", "statement", "form", "mechanism",
    "max_participations", "min_separation", "fixed_order", "mechanism_file", "target_epsilon",
    "solve", "optimal", "only", "sampling", "expected_batch", "bins", "draws",
    "draw_seed",
}  # fmt: skip


def options_of(command):
    """Return (name, what to type) for every option of a command."""
    for option in get_command(app).commands[command].params:
        typed = [option.opts[-1]]
        if not option.is_flag:
            default = option.default
            typed.append(SAMPLES[option.name] if default is None else str(default))
        yield option.name, typed


def cases(command, allowed):
    for name, typed in options_of(command):
        if name not in allowed | {"plan", "help"}:
            yield pytest.param(typed, id=f"{command}-{name}")


@pytest.mark.parametrize("typed", [*cases("epsilon", _BESIDE_PLAN)])
def test_beside_a_plan_epsilon_refuses_what_the_plan_says(privpart, typed):
    done = privpart("epsilon", "--plan", PLAN, *typed)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"leave out the options for them: {typed[0]}." in done.stderr


@pytest.mark.parametrize("typed", [*cases("mechanisms", _BESIDE_PLANNED_FRONT)])
def test_beside_a_plan_mechanisms_refuses_what_the_plan_says(privpart, typed):
    done = privpart("mechanisms", "--plan", PLAN, *typed)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"leave out the options for them: {typed[0]}." in done.stderr


SAMPLED = ["--sampling", "poisson", "--expected-batch", "10", "--population", "100"]


@pytest.mark.parametrize("typed", [*cases("epsilon", {
    "rounds", "noise_multiplier", "delta", "method", "population", "max_epsilon", "form",
    "sampling", "expected_batch", "mechanism",
})])  # fmt: skip
def test_beside_a_sampling_epsilon_refuses_what_does_not_apply(privpart, typed):
    run = ["--rounds", "64", "--delta", "1e-6", "--noise-multiplier", "4"]
    done = privpart("epsilon", *run, "--mechanism", "independent", *SAMPLED, *typed)
    assert (done.returncode, done.stdout) == (2, "")


def test_the_options_that_apply_beside_a_plan_are_options():
    assert {name for name, _ in options_of("epsilon")} >= _BESIDE_PLAN
    assert {name for name, _ in options_of("mechanisms")} >= _BESIDE_PLANNED_FRONT


def foreign(command):
    """Every mechanism with every option that only other mechanisms have."""
    for mechanism, made in OPTIONS_OF.items():
        taken = set(inspect.signature(made.from_options).parameters)
        for name, typed in options_of(command):
            if name not in taken | NOT_THE_MECHANISM:
                yield pytest.param(mechanism, typed, id=f"{command}-{mechanism}-{name}")


@pytest.mark.parametrize(("mechanism", "typed"), [*foreign("epsilon")])
def test_an_option_of_another_mechanism_is_refused_with_its_default_too(privpart, mechanism, typed):
    run = ["--rounds", "64", "--delta", "1e-6", "--noise-multiplier", "4"]
    done = privpart("epsilon", *run, "--mechanism", mechanism, *typed)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"privpart: {typed[0]} " in done.stderr
    assert "only for --mechanism" in done.stderr


@pytest.mark.parametrize(("mechanism", "typed"), [*foreign("calibrate")])
def test_calibrate_refuses_them_as_well(privpart, mechanism, typed):
    run = ["--rounds", "64", "--delta", "1e-6", "--target-epsilon", "4"]
    done = privpart("calibrate", *run, "--mechanism", mechanism, *typed)
    assert (done.returncode, done.stdout) == (2, "")
    assert "only for --mechanism" in done.stderr


@pytest.mark.parametrize(
    ("typed", "fault"),
    [
        (["--statement", "--format", "table"], "--statement True: is prose"),
        (["--mechanism", "tree", "--mechanism-file", "m.json"], "leave out --mechanism"),
        (["--mechanism", "file"], "name the file with --mechanism-file"),
        (["--mechanism-file", "m.json", "--bands", "3"], "leave it out with file"),
        (["--mechanism-file", "none.json"], "none.json: cannot be read"),
        (["--min-separation", "1"], "is between two rounds"),
        (["--max-participations", "1", "--min-separation", "1"], "is between two rounds"),
        (["--fixed-order", "--max-participations", "2"], "--fixed-order True: needs"),
        (["--completed"], "--completed True: is about restarts"),
        (["--mechanism", "toeplitz", "--objective", "rmse"], "is for a fit"),
        (["--mechanism", "toeplitz", "--fit", "--coefficients", "1"], "the coefficients are given"),
        (["--mechanism", "toeplitz", "--bands", "1", "--coefficients", "1"], "already say how"),
        (["--mechanism", "toeplitz", "--bands", "65"], "--bands 65: must be at most 64"),
        (["--mechanism", "toeplitz", "--coefficients", "1,b"], "--coefficients 1,b: must be"),
        (["--mechanism", "toeplitz", "--coefficients", "1,nan"], "coefficients[1]=nan"),
        (["--mechanism", "toeplitz", "--coefficients", ""], "must be numbers"),
        (["--mechanism", "blt", "--decay", "0.9"], "belong together"),
        (["--mechanism", "blt", "--decay", ".9", "--scale", ".1", "--buffers", "1"], "for a fit"),
        (
            ["--mechanism", "blt", "--decay", ".9", "--scale", ".1", "--objective", "rmse"],
            "for a fit",
        ),
        (["--mechanism", "blt", "--decay", "inf", "--scale", ".1"], "decay[0]=inf"),
        (["--mechanism", "banded-inverse"], "bands is missing"),
        (["--mechanism", "banded-inverse", "--bands", "65"], "--bands 65: must be at most 64"),
        (["--mechanism", "banded-inverse", "--coefficients", "1,0.5"], "must be 0 or negative"),
        (["--mechanism", "banded-inverse", "--coefficients", "1,-2"], "sum to -1"),
    ],
)
def test_options_that_contradict_each_other(privpart, typed, fault):
    run = ["--rounds", "64", "--delta", "1e-6", "--noise-multiplier", "4"]
    done = privpart("epsilon", *run, *typed)
    assert (done.returncode, done.stdout) == (2, "")
    assert fault in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_two_gates_that_passed(privpart):
    plan = ["epsilon", "--plan", PLAN, "--max-epsilon", "10"]
    for typed in (["--mechanism", "tree"], ["--max-participations", "1"]):
        done = privpart(*plan, *typed)
        assert (done.returncode, done.stdout) == (2, "")
    assert privpart(*plan).returncode == 0
    tree = privpart("epsilon", "--rounds", "72", "--noise-multiplier", "1", "--delta", "1e-5",
                         "--mechanism", "tree", "--max-participations", "1", "--max-epsilon", "10",
                         "--format", "json")  # fmt: skip
    assert tree.returncode == 3
    assert json.loads(tree.stdout)["epsilon"] == pytest.approx(14.191, abs=6e-4)


def test_what_is_typed_in_a_plan_counts_too(privpart, tmp_path):
    text = Path(PLAN).read_text()
    plan = tmp_path / "plan.toml"
    for table, fault in (
        ('{ name = "blt", estimator = "vanilla" }', "only for --mechanism tree"),
        ('{ name = "tree", fit = false }', "only for --mechanism toeplitz or banded-inverse"),
        ('{ name = "toeplitz", objective = "max" }', "is for a fit"),
    ):
        plan.write_text(text.replace('{ name = "blt" }', table))
        done = privpart("epsilon", "--plan", str(plan))
        assert (done.returncode, done.stdout) == (2, "")
        assert fault in done.stderr
