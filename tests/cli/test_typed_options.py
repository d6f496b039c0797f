"""What was typed counts: every option of every command beside everything that makes it idle.

The options come from the parser itself, so that a new one is missing from the table until somebody
says what it depends on; each is typed with its own default where it has one, which must make no
difference.
"""

import inspect
import json
from pathlib import Path

import pytest
from typer.main import get_command

from accounting import BandedInverse, BinaryTree, BufferedToeplitz, Independent, Toeplitz
from accounting.checks import ConfigError
from privpart.cli.idle import TABLE, refuse_idle
from privpart.cli.main import app

PLAN = "examples/digits.toml"
SAMPLES = {
    "plan": PLAN, "target_epsilon": "1", "rounds": "72", "only": "dense",
    "sampling": "poisson", "expected_batch": "10", "bins": "8", "draws": "10000",
    "draw_seed": "0", "noise_multiplier": "1.0", "delta": "1e-5", "log": "log.csv",
    "population": "1000", "max_epsilon": "20", "plot": "x.png",
    "plot_against": "noise", "max_participations": "1", "min_separation": "1",
    "mechanism_file": "m.json", "restart_every": "8", "bands": "2", "coefficients": "1,0.5",
    "objective": "rmse", "buffers": "3", "decay": "0.9", "scale": "0.1", "vouch": "choices",
    "out": "out", "against": "run", "train": "dense1.*", "jobs": "1", "data_dir": "folder",
    "model": "lenet", "data": "digits", "view": "full", "weights": "w.safetensors",
    "gradient": "g.safetensors", "attack": "dlg", "schedule": "full:1", "clip": "1",
    "before": "b.safetensors", "tokens": "t.safetensors", "words": "v.txt", "length": "8",
    "pad": "0",
    "fail_on": "partial", "fork_of": "old", "seed": "1", "worker_timeout": "60",
    "cell_timeout": "60", "limit_epsilon": "4",
    "public_key": "0" * 64, "html": "x.html", "registry": "x.yaml", "about": "about.toml",
    "schema": "schema.yaml",
}  # fmt: skip
"""Values of options that have no default, or a list."""
OWN_SAMPLES = {("audit epsilon", "fail_on"): "violation"}
"""Values where an option of one command has others than its namesakes."""
TYPED = ["--rounds", "64", "--delta", "1e-6", "--noise-multiplier", "4"]
PLANNED = ["--plan", PLAN]
FITTED = ["--rounds", "64", "--delta", "1e-6", "--target-epsilon", "4"]
OF_POISSON = ["--sampling", "poisson", "--expected-batch", "10", "--population", "100"]
OF_BINS = ["--sampling", "balls-in-bins", "--bins", "8"]
OF_APART = ["--sampling", "b-min-sep", "--expected-batch", "10", "--population", "100"]
POISSON, BINS, APART = ([*TYPED, *own] for own in (OF_POISSON, OF_BINS, OF_APART))
FITTED_POISSON, FITTED_BINS, FITTED_APART = (
    [*FITTED, *own] for own in (OF_POISSON, OF_BINS, OF_APART)
)
ATTACKED = ["--model", "lenet", "--data", "digits", "--out", "out"]
LEAKING = [*ATTACKED, "--view", "full"]
OF_A_PLAN = [*PLANNED, "--out", "out"]
OF_A_FILE = ["--model", "m:f", "--tokens", "t.safetensors", "--out", "out", "--view", "full"]
DEFENDED = [*ATTACKED, "--clip", "1"]
DEFENDED_PLAN = [*OF_A_PLAN, "--clip", "1"]
DEFENDED_FILE = [*OF_A_FILE, "--clip", "1"]
LOCAL = ["--local-steps", "2"]
FASHION = ["--data", "fashion-mnist"]
SIMULATED = [*PLANNED, "--simulate"]
RESUMED = ["--resume", "--out", "run"]
CASES = {
    "epsilon": [TYPED, [*TYPED, "--plot", "x.png"]],
    "calibrate": [FITTED, [*FITTED, "--solve", "rounds", "--noise-multiplier", "4"]],
    "mechanisms": [["--rounds", "64", "--delta", "1e-6"]],
    "init": [["mine"]],
    "flower init": [["mine"]],
    "doctor": [PLANNED],
    "train": [[*PLANNED, "--out", "run"], RESUMED, [*RESUMED, "--workers", "2"]],
    "close": [["run"]],
    "export": [["run", "--out", "m.safetensors"]],
    "report": [["run", "--delta", "1e-6"], ["run", "--registry", "x.yaml"]],
    "budget": [[], ["mine"], ["mine", "--limit-epsilon", "4"]],
    "verify": [["run", "m.safetensors"]],
    "verify-gradients": [["./task.py:gradients"]],
    "schedule": [PLANNED],
    "inspect": [["run", "--out", "out"]],
    "costs": [["emnist_cnn"]],
    "frontier": [["study.toml", "--out", "out"]],
    "demo": [[], FASHION],
    "sweep run": [["sweep.toml", "--out", "out"]],
    "sweep show": [["out"]],
    "audit leakage": [
        LEAKING, [*LEAKING, *LOCAL], [*LEAKING, *FASHION],
        [*LEAKING, "--clip", "1", "--noise-multiplier", "1"], OF_A_PLAN, OF_A_FILE,
    ],
    "audit defences": [
        DEFENDED, [*DEFENDED, *LOCAL], [*DEFENDED, *FASHION], DEFENDED_PLAN, DEFENDED_FILE,
    ],
    "audit epsilon": [["run"], SIMULATED, [*PLANNED, "--replay"]],
}  # fmt: skip
"""Complete command lines that nothing idle is in; every option matters in one of them."""
SITUATIONS = {
    ("epsilon", "plan"): [PLANNED],
    ("epsilon", "statement"): [[*TYPED, "--statement"]],
    ("epsilon", "plot"): [TYPED],
    ("epsilon", "sampling"): [TYPED, POISSON, BINS, POISSON, BINS, APART],
    ("calibrate", "sampling"): [
        FITTED,
        FITTED_POISSON,
        FITTED_BINS,
        FITTED_POISSON,
        FITTED_BINS,
        FITTED_APART,
    ],
    ("epsilon", "draws"): [BINS],
    ("calibrate", "solve"): [
        FITTED,
        [*FITTED, "--solve", "max-participations", "--noise-multiplier", "4"],
        [*FITTED, "--solve", "min-separation", "--noise-multiplier", "4"],
        [*FITTED, "--solve", "rounds", "--noise-multiplier", "4"],
        [*FITTED, "--solve", "rounds", "--noise-multiplier", "4"],
    ],
    ("mechanisms", "plan"): [PLANNED],
    ("mechanisms", "only"): [["--rounds", "64", "--delta", "1e-6", "--only", "bandmf"]] * 2,
    ("doctor", "plan"): [[]],
    ("train", "resume"): [RESUMED, [*PLANNED, "--out", "run"]],
    ("train", "fork_of"): [[*PLANNED, "--out", "run", "--fork-of", "old"]],
    ("train", "workers"): [RESUMED],
    ("export", "part"): [["run", "--out", "m.safetensors", "--part", "trained"]],
    ("report", "statement"): [["run", "--statement"]],
    ("report", "delta"): [["run"]],
    ("report", "registry"): [["run"]],
    ("report", "about_template"): [["run", "--about-template"]],
    ("budget", "population"): [[]],
    ("budget", "remove_limit"): [["mine", "--remove-limit"]],
    ("budget", "limit_epsilon"): [["mine"]],
    ("costs", "plan"): [PLANNED],
    ("costs", "optimizer"): [["emnist_cnn", "--optimizer", "adam"]],
    ("demo", "data"): [[]],
    ("sweep run", "jobs"): [["sweep.toml", "--out", "out", "--jobs", "1"]],
    ("audit leakage", "plan"): [OF_A_PLAN, OF_A_PLAN, OF_A_FILE],
    ("audit leakage", "tokens"): [
        OF_A_FILE,
        [*OF_A_PLAN, "--tokens", "t.safetensors"],
        OF_A_PLAN,
        OF_A_PLAN,
    ],
    ("audit defences", "plan"): [DEFENDED_PLAN, DEFENDED_PLAN, DEFENDED_FILE],
    ("audit defences", "tokens"): [
        DEFENDED_FILE,
        [*DEFENDED_PLAN, "--tokens", "t.safetensors"],
        DEFENDED_PLAN,
    ],
    ("audit defences", "batch"): [DEFENDED_FILE],
    ("audit leakage", "data"): [LEAKING],
    ("audit leakage", "local_steps"): [LEAKING],
    ("audit leakage", "optimizer"): [[*LEAKING, *LOCAL, "--optimizer", "adam"]],
    ("audit leakage", "attack"): [[*LEAKING, "--attack", "invert_dense"]],
    ("audit leakage", "gradient"): [
        LEAKING,
        [*LEAKING, "--gradient", "g.safetensors"],
        [*LEAKING, "--gradient", "g.safetensors"],
    ],
    ("audit leakage", "mode"): [[*LEAKING, "--mode", "eval"]],
    ("audit defences", "mode"): [[*DEFENDED, "--mode", "eval"]],
    ("audit leakage", "clip"): [LEAKING],
    ("audit leakage", "noise_multiplier"): [LEAKING],
    ("audit leakage", "batch"): [OF_A_FILE, [*LEAKING, "--batch", "2"]],
    ("audit defences", "data"): [DEFENDED],
    ("audit defences", "local_steps"): [DEFENDED],
    ("audit defences", "optimizer"): [[*DEFENDED, *LOCAL, "--optimizer", "adam"]],
    ("audit defences", "attack"): [[*DEFENDED, "--attack", "invert_dense"]],
    ("audit epsilon", "run"): [["run"]],
    ("audit epsilon", "simulate"): [[*PLANNED, "--replay"]],
    ("audit defences", "noise_multiplier"): [[*DEFENDED, "--noise-multiplier", "0"]],
}
"""Per command and deciding option, a line without idle options for each rule, in their order."""
OPTIONS_OF = {
    "tree": BinaryTree, "independent": Independent, "toeplitz": Toeplitz, "blt": BufferedToeplitz,
    "banded-inverse": BandedInverse,
}  # fmt: skip
NOT_THE_MECHANISM = {
    "help", "rounds", "noise_multiplier", "delta", "plan", "log", "method", "population",
    "cross_check", "max_epsilon", "plot", "plot_against", "statement", "form", "mechanism",
    "max_participations", "min_separation", "fixed_order", "mechanism_file", "target_epsilon",
    "solve", "optimal", "only", "sampling", "expected_batch", "bins", "draws",
    "draw_seed", "html", "allow_large_delta",
}  # fmt: skip


def commands(group, *words):
    """Every command of the program, by the words that name it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *words, name)
        else:
            yield " ".join((*words, name)), command


COMMANDS = dict(commands(get_command(app)))


def options_of(command):
    """Return {name: what to type} for every option of a command."""
    found = {}
    for option in COMMANDS[command].params:
        typed = [option.opts[-1]] if option.param_type_name == "option" else []
        if typed and not option.is_flag:
            own = isinstance(option.default, str | int | float | Path)
            sample = OWN_SAMPLES.get((command, option.name), SAMPLES.get(option.name))
            typed.append(str(option.default) if own else sample)
        found[option.name] = typed
    return found


def ruled(command):
    return {name for rule in TABLE[command].idle for name in rule.options.split()}


def lines_of(command):
    """Every rule of a command with a line in which it holds."""
    left = {key: list(lines) for key, lines in SITUATIONS.items()}
    return [(rule, left[command, rule.owner].pop(0)) for rule in TABLE[command].idle]


def test_every_option_of_every_command_is_in_the_table_once():
    assert COMMANDS.keys() == TABLE.keys()
    for command, options in TABLE.items():
        free = set(options.free.split())
        assert not free & ruled(command)
        assert free | ruled(command) == set(options_of(command))
        assert {rule.owner for rule in options.idle} <= set(options_of(command))


def test_every_line_is_for_a_rule():
    for (command, owner), lines in SITUATIONS.items():
        assert len(lines) == sum(rule.owner == owner for rule in TABLE[command].idle)


def refused(command, line):
    """What is refused in a line that is not run."""
    context = root = get_command(app).make_context("privpart", ["--help"], resilient_parsing=True)
    *groups, name = command.split()
    for group in groups:
        inner = context.command.commands[group]
        context = inner.make_context(group, [], parent=context, resilient_parsing=True)
    assert root.parent is None
    with COMMANDS[command].make_context(name, list(line), parent=context) as own:
        try:
            refuse_idle(own)
        except ConfigError as error:
            return str(error)
    return ""


def idle_cases():
    for command in TABLE:
        for rule, line in lines_of(command):
            for name in rule.options.split():
                typed = options_of(command)[name]
                label = f"{command}-{rule.owner}-{name}"
                yield pytest.param(command.split(), line, typed, rule.why, id=label)


@pytest.mark.parametrize(("command", "line", "typed", "why"), [*idle_cases()])
def test_what_has_no_effect_is_refused_with_its_default_too(privpart, command, line, typed, why):
    done = privpart(*command, *line, *typed)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert why in done.stderr
    assert done.stderr.endswith(f"leave out {typed[0]}.\n")


@pytest.mark.parametrize("command", list(TABLE))
def test_what_has_an_effect_is_not(command):
    lines = [*CASES[command], *(line for _, line in lines_of(command))]
    for line in lines:
        assert refused(command, line) == ""
    for name, typed in options_of(command).items():
        assert any(refused(command, [*line, *typed]) == "" for line in lines), name


def test_the_mechanisms_rows_that_only_leaves_out():
    line = ["--rounds", "64", "--delta", "1e-6", "--mechanism", "tree"]
    assert refused("mechanisms", [*line, "--only", "given"]) == ""
    assert "leave out --mechanism." in refused("mechanisms", [*line, "--only", "blt"])


def foreign(command):
    """Every mechanism with every option that only other mechanisms have."""
    for mechanism, made in OPTIONS_OF.items():
        taken = set(inspect.signature(made.from_options).parameters)
        for name, typed in options_of(command).items():
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
