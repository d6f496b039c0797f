"""What was typed counts: every option of every command beside everything that makes it idle.

The options and their rules come from the parser itself; each option is typed with its own default
where it has one, which must make no difference.
"""

from pathlib import Path

import pytest
from typer.main import get_command

from accounting.checks import ConfigError
from privpart.cli.idle import refuse_idle, rules_of
from privpart.cli.main import app

PLAN = "examples/digits.toml"
SAMPLES = {
    "plan": PLAN, "target_epsilon": "1", "rounds": "72", "mechanism": "tree",
    "sampling": "poisson:expected_batch=10", "method": "exact", "form": "json",
    "noise_multiplier": "1.0", "delta": "1e-5", "log": "log.csv",
    "population": "1000", "max_epsilon": "20", "plot": "x.png",
    "max_participations": "1", "min_separation": "1",
    "vouch": "choices", "precision": "bfloat16",
    "out": "out", "against": "run", "train": "dense1.*", "jobs": "1", "data_dir": "folder",
    "model": "lenet", "data": "digits", "view": "full", "weights": "w.safetensors",
    "gradient": "g.safetensors", "attack": "dlg", "clip": "1",
    "transform": "signs", "tokens": "t.safetensors", "settings": "s.toml",
    "fail_on": "partial", "fork_of": "old", "seed": "1",
    "limit_epsilon": "4", "workload": "momentum=0.9",
    "public_key": "0" * 64, "html": "x.html", "registry": "x.yaml", "about": "about.toml",
    "policy": "policy.toml", "voucher": "Ada", "noise_key": "key", "best_of": "10",
    "noise_schedule": "noise.csv", "events": "events.json",
    "proxy": "./task.py:public",
    "add": "mu=1", "by": "Ada", "witness": "w.json", "write_witness": "w.json",
}  # fmt: skip
"""Values of options that have no default, or a list."""
OWN_SAMPLES = {("audit epsilon", "fail_on"): "violation"}
"""Values where an option of one command has others than its namesakes."""
TYPED = ["--rounds", "64", "--delta", "1e-6", "--noise-multiplier", "4"]
PLANNED = ["--plan", PLAN]
FITTED = ["--rounds", "64", "--delta", "1e-6", "--target-epsilon", "4"]
ATTACKED = ["--model", "lenet", "--data", "digits", "--out", "out"]
LEAKING = [*ATTACKED, "--view", "full"]
OF_A_PLAN = [*PLANNED, "--out", "out"]
OF_A_FILE = ["--model", "m:f", "--tokens", "t.safetensors", "--out", "out", "--view", "full"]
BINS = "balls-in-bins:bins=8"
SIMULATED = [*PLANNED, "--simulate"]
RESUMED = ["--resume", "--out", "run"]
CASES = {
    "epsilon": [TYPED],
    "calibrate": [FITTED],
    "mechanisms": [["--rounds", "64", "--delta", "1e-6"]],
    "init": [["mine"]],
    "doctor": [PLANNED, [*PLANNED, "--suggest"]],
    "train": [[*PLANNED, "--out", "run"], RESUMED, [*RESUMED, "--workers", "2"],
              ["--close", "--out", "run"]],
    "export": [["run", "--out", "m.safetensors"]],
    "report": [["run", "--delta", "1e-6"], ["run", "--registry", "x.yaml"],
               ["run", "--vouch", "choices"]],
    "budget": [[], ["mine"], ["mine", "--limit-epsilon", "4"], ["mine", "--add", "mu=1"]],
    "verify": [["run", "m.safetensors"], ["run", "--replay"]],
    "costs": [["emnist_cnn"]],
    "frontier": [["study.toml", "--out", "out"]],
    "demo": [[]],
    "sweep": [["sweep.toml", "--out", "out"]],
    "tune": [["tune.toml", "--out", "out"], ["--out", "out", "--abandon"]],
    "audit leakage": [
        LEAKING, [*LEAKING, "--clip", "1", "--noise-multiplier", "1"], OF_A_PLAN, OF_A_FILE,
    ],
    "audit epsilon": [["run"], SIMULATED, [*PLANNED, "--replay"]],
    "audit membership": [[PLAN, "--out", "out"]],
    "audit extraction": [["examples/own/lstm/plan.toml", "--out", "out"]],
}  # fmt: skip
"""Complete command lines that nothing idle is in; every option matters in one of them."""
SITUATIONS = {
    "epsilon": [
        PLANNED,
        [*TYPED, "--sampling", BINS],
        [*TYPED, "--noise-schedule", "noise.csv"],
        ["--events", "events.json", "--delta", "1e-6"],
        [*TYPED, "--html", "page.html"],
        [*TYPED, "--format", "statement"],
    ],
    "calibrate": [
        [*FITTED, "--sampling", BINS],
        [*FITTED, "--method", "pld"],
        [*FITTED, "--noise-schedule", "noise.csv"],
        [*FITTED, "--noise-multiplier", "1"],
        [*FITTED, "--format", "csv"],
    ],
    "mechanisms": [PLANNED],
    "doctor": [[]],
    "train": [[*PLANNED, "--out", "run", "--fork-of", "old"]],
    "export": [["run", "--out", "m.safetensors", "--part", "trained"]],
    "report": [["run"]],
    "budget": [[], ["--delta", "1e-6"]],
    "costs": [PLANNED],
    "sweep": [["--out", "out"]],
    "tune": [["tune.toml"], []],
    "audit leakage": [
        [*OF_A_PLAN, "--tokens", "t.safetensors"],
        [*LEAKING, "--attack", "invert_dense"],
        [*LEAKING, "--gradient", "g.safetensors"],
    ],
}
"""More complete lines of a command; each of its rules holds in one of all these."""


def commands(group, *words):
    """Every command of the program, by the words that name it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *words, name)
        else:
            yield " ".join((*words, name)), command


ROOT = get_command(app)
COMMANDS = dict(commands(ROOT))


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


def lines_of(command):
    return [*CASES[command], *SITUATIONS.get(command, [])]


def refused(command, line):
    """What is refused in a line that is not run."""
    *_, name = command.split()
    context = ROOT.make_context("privpart", ["--help"], resilient_parsing=True)
    with COMMANDS[command].make_context(name, list(line), parent=context) as own:
        try:
            refuse_idle(own)
        except ConfigError as error:
            return str(error)
    return ""


def test_there_are_few_commands_and_all_together_have_few_options():
    assert len(ROOT.commands) <= 16
    flags = [p for c in COMMANDS.values() for p in c.params if p.param_type_name == "option"]
    assert len([p for p in flags if p.name != "help"]) <= 150


@pytest.mark.parametrize("command", list(COMMANDS))
def test_an_option_matters_somewhere_and_each_of_its_rules_refuses_it_elsewhere(command):
    lines = lines_of(command)
    assert all(refused(command, line) == "" for line in lines)
    answers = {
        name: [refused(command, [*line, *typed]) for line in lines]
        for name, typed in options_of(command).items()
    }
    assert [name for name, said in answers.items() if "" not in said] == []
    for name, rule in rules_of(COMMANDS[command]):
        end = f": {rule.why}; leave out {options_of(command)[name][0]}."
        added = f"{rule.why}; add "
        assert any(said.endswith(end) or added in said for said in answers[name]), (name, rule)


@pytest.mark.parametrize("command", [c for c in COMMANDS if [*rules_of(COMMANDS[c])]])
def test_what_has_no_effect_is_refused_with_its_default_too(privpart, command):
    line, typed = next(
        (line, typed)
        for line in lines_of(command)
        for typed in options_of(command).values()
        if refused(command, [*line, *typed])
    )
    done = privpart(*command.split(), *line, *typed)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "leave out " in done.stderr


def test_a_decimal_comma_is_shown_with_advice(privpart):
    done = privpart("epsilon", "--rounds", "4", "--noise-multiplier", "1,5", "--delta", "1e-5")
    assert done.returncode == 2
    assert "'1,5'" in done.stderr
    assert "has a point" in " ".join(done.stderr.replace("\u2502", " ").split())


def test_noise_is_chosen_by_draws_of_its_own(privpart):
    done = privpart("calibrate", *FITTED, "--sampling", f"{BINS},draws=10000,draw_seed=0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "draw_seed=0: only with a given noise multiplier" in done.stderr


@pytest.mark.parametrize(
    ("mechanism", "fault"),
    [
        ("tree:bands=3", "tree: no option 'bands'; tree takes estimator"),
        ("independent:fit", "independent has no options"),
        ("forest", "must be one of tree, independent"),
        ("file:none.json", "none.json: there is no such file"),
        ("toeplitz:fit=1", "takes no value"),
        ("tree:restart_every=64", "has no effect, as the run ends after 64 rounds"),
        ("tree:=3", "must be written as name=value"),
        ("toeplitz:fit,coefficients=1", "the coefficients are given"),
        ("toeplitz:bands=1,bands=2", "is there twice"),
        ("toeplitz:coefficients=1,2x", "coefficients=1,2x: must be numbers"),
        ("blt:decay=.9,scale=.1,buffers=1", "for a fit"),
        ("banded-inverse", "bands is missing"),
        ("banded-inverse:bands=65", "bands=65: must be at most 64"),
        ("banded-inverse:coefficients=1,0.5", "must be 0 or negative"),
    ],
)
def test_a_mechanism_that_makes_no_sense(privpart, mechanism, fault):
    done = privpart("epsilon", *TYPED, "--mechanism", mechanism)
    assert (done.returncode, done.stdout) == (2, "")
    assert fault in done.stderr
    assert len(done.stderr.splitlines()) == 1
