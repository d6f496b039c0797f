"""Mistakes that people make with code and data of their own: each gives one sentence and code 2."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import privpart as package
from accounting import ConfigError
from privpart.data import from_tensors

PLAN = """
schema = "privpart/plan/1"
[privacy]
rounds = 4
clip_norm = 0.5
noise_multiplier = 1.0
delta = 1e-5
max_participations = 1
mechanism = { name = "tree" }
[model]
factory = "./NAME.py:network"
sizes = { hidden = 4 }
train = ["2.*"]
seed = 1
keep = []
[data]
clients = "./NAME.py:clients"
options = { each = 3 }
metric = "./NAME.py:metric"
clients_per_round = 5
[client]
learning_rate = 0.1
loss = "./NAME.py:loss"
augment = "./NAME.py:augment"
[server]
"""
CODE = """
import numpy as np
import torch
from torch import nn
from privpart.data import from_tensors


def network(hidden):
    return nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def population(each):
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(20 * each, 3, generator=draws)
    return x, (x[:, 0] > 0).long(), [f"user {i // each}" for i in range(len(x))]


def clients(each):
    x, y, user = population(each)
    return from_tensors((x, y), user=user)


class Own:
    ids = tuple(range(20))

    def __init__(self, ids=ids, say=lambda client, x, y: (x, y)):
        self.ids, self.say = ids, say

    def examples(self, client):
        x = torch.randn(3, 3)
        return self.say(client, x, (x[:, 0] > 0).long())


def metric(module):
    return 0.5


def loss(module, batch):
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def augment(batch):
    return batch
"""
BUILTIN = {'"./NAME.py:loss"': '"cross_entropy"', 'augment = "./NAME.py:augment"\n': ""}
"""For mistakes that a built-in loss meets."""


@dataclass(frozen=True)
class Mistake:
    """What is wrong: texts of the plan and of the code that others replace, and code at the end.

    ``says`` are patterns, all of which the sentence must have.
    """

    name: str
    says: tuple[str, ...]
    plan: dict[str, str] = field(default_factory=dict)
    code: str = ""

    def write(self, folder: Path) -> Path:
        """Write the plan and its code into a folder; return the plan's path."""
        module = self.plan.get("NAME", f"mistake_{self.name.replace(' ', '_')}")
        plan = PLAN
        for old, new in self.plan.items():
            assert old in plan, old
            plan = plan.replace(old, new)
        (folder / "plan.toml").write_text(plan.replace("NAME", module))
        (folder / f"{module}.py").write_text((CODE + self.code).replace("NAME", module))
        return folder / "plan.toml"


def named(key: str, text: str) -> dict[str, str]:
    """Return the change of a plan that makes ``key`` a text."""
    line = next(line for line in PLAN.splitlines() if line.startswith(f"{key} = "))
    return {line + "\n": f"{key} = {text}\n" if text else ""}


FACTORY, CLIENTS = "factory", "clients"
PLANS = [
    Mistake("no file", ("model.factory", r"there is no file .*other\.py"),
            named(FACTORY, '"./other.py:network"')),
    Mistake("misspelt function", ("model.factory", "does not define netwrok", "near it: network"),
            named(FACTORY, '"./NAME.py:netwrok"')),
    Mistake("part of python", ("json is part of Python", "your own"),
            named(FACTORY, '"json:loads"')),
    Mistake("no package", ("no module no_such_package", "pip install", "name the file"),
            named(FACTORY, '"no_such_package.model:network"')),
    Mistake("module for a file", ("no module mistake_", r"\./mistake_module_for_a_file\.py:netw"),
            named(FACTORY, '"NAME:network"')),
    Mistake("not a function", ("model.factory", "of type int", "must be a function"),
            named(FACTORY, '"./NAME.py:number"'), "\nnumber = 3\n"),
    Mistake("import raises", ("import failed", r"py:\d+", "ZeroDivisionError"),
            code="\nrate = 1 / 0\n"),
    Mistake("import exits", ("import failed", r"py:\d+", "SystemExit"),
            code="\nraise SystemExit(1)\n"),
    Mistake("unknown key", ("data.metrics: no such key", "nearest is metric"),
            {"metric = ": "metrics = "}),
    Mistake("task and clients", ("data.task: cannot be combined with data.clients",),
            {"[data]\n": '[data]\ntask = "digits"\n'}),
    Mistake("users of own clients", ("data.users", "leave it out"),
            {"[data]\n": "[data]\nusers = 20\n"}),
    Mistake("neither name nor factory", ("model: needs name", "or factory"), named(FACTORY, "")),
    Mistake("seed without keep", ("model.seed=1", "keep ="), named("keep", "")),
    Mistake("groups without schedule", ("model.groups", r"\[schedule\]"),
            {"seed = 1\n": 'seed = 1\ngroups = [["0.*"], ["2.*"]]\n'}),
    Mistake("schedule without groups", ("model.groups: is missing", "names its groups"),
            {"[server]\n": "[server]\n[schedule]\ncycles = 2\nrounds_per_group = 1\n"}),
    Mistake("misspelt loss", ("client: loss=", "crossentropy", "cross_entropy", "function"),
            named("loss", '"crossentropy"')),
    Mistake("misspelt name", ("unknown. Near it: small_cnn",),
            named("sizes", "") | named(FACTORY, "") | {"[model]": '[model]\nname = "smal_cnn"'}),
]  # fmt: skip
NETWORKS = [
    Mistake("factory raises", ("model.factory", r"py:\d+", "RuntimeError: no weights"),
            code="\ndef network(hidden):\n    raise RuntimeError('no weights')\n"),
    Mistake("factory returns a class", ("model.factory", "the class Linear itself", "nn.Module"),
            code="\ndef network(hidden):\n    return nn.Linear\n"),
    Mistake("other sizes", ("model.factory", r"\(hidden\)", "width"),
            named("sizes", "{ width = 4 }")),
    Mistake("no parameters", ("no parameters",),
            code="\ndef network(hidden):\n    return nn.Sequential(nn.ReLU())\n"),
    Mistake("train matches nothing", (r"4\.\*", "no parameter"), named("train", '["4.*"]')),
    Mistake("local and trained", ("local", "train", "2.weight"),
            {"keep = []\n": 'keep = []\nlocal = ["2.*"]\n'}),
    Mistake("batch norm", ("BatchNorm", "freeze_batch_norm"),
            code="\ndef network(hidden):\n"
            "    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))\n"),
    Mistake("no weights", ("model.weights", r"w\.safetensors"),
            named("keep", '["0.*"]\nweights = "w.safetensors"')),
]  # fmt: skip
POPULATIONS = [
    Mistake("clients raise", ("data.clients", r"py:\d+", "FileNotFoundError", r"gone\.csv"),
            code="\ndef clients(each):\n    return open('gone.csv')\n"),
    Mistake("clients are a pair", ("clients", "tuple", "from_tensors"),
            code="\ndef clients(each):\n    return population(each)[:2]\n"),
    Mistake("no clients", ("clients", "there are none"),
            code="\ndef clients(each):\n    return Own(ids=[])\n"),
    Mistake("too many a round", ("clients_per_round=50", "20 clients", "at most"),
            named("clients_per_round", "50")),
    Mistake("one id twice", ("clients", "id 1", "each must have its own"),
            code="\ndef clients(each):\n    return Own(ids=[*range(20), np.int64(1)])\n"),
    Mistake("ids are bools", ("id", "False", "whole number", "string"),
            code="\ndef clients(each):\n    return from_tensors(population(each)[:2], "
            "user=[False, True] * 30)\n"),
    Mistake("label 2 of 2", ("client 'user 1'", "label 2", "2 outputs"),
            BUILTIN,
            code="\ndef clients(each):\n    x, y, user = population(each)\n"
            "    return from_tensors((x, y * 2), user=user)\n"),
    Mistake("labels are floats", ("labels", "float32", "int64", "mean_squared_error"),
            BUILTIN,
            code="\ndef clients(each):\n    x, y, user = population(each)\n"
            "    return from_tensors((x, y.float()), user=user)\n"),
    Mistake("not finite", ("client 'user 3'", "row 9", "NaN"),
            code="\ndef clients(each):\n    x, y, user = population(each)\n    x[9] = torch.nan\n"
            "    return from_tensors((x, y), user=user)\n"),
    Mistake("examples of words", ("str", "tensor"),
            code="\ndef clients(each):\n    return Own(say=lambda client, x, y: ('a text', y))\n"),
]  # fmt: skip
CALLS = [
    Mistake("loss is a number", ("loss", "returned a float", r"\.item\(\)"),
            code="\ndef loss(module, batch):\n    return module(batch[0]).sum().item()\n"),
    Mistake("loss of three", ("loss", "missing 1 required"),
            code="\ndef loss(module, x, y):\n    return module(x).sum()\n"),
    Mistake("augment is nothing", ("augment", "None"),
            code="\ndef augment(batch):\n    pass\n"),
    Mistake("metric raises", ("data.metric", "ValueError: no test set", r"py:\d+"),
            code="\ndef metric(module):\n    raise ValueError('no test set')\n"),
    Mistake("metric is a string", ("metric", "returned a str", "number"),
            code="\ndef metric(module):\n    return '0.5'\n"),
    Mistake("examples are nothing", ("client 7", "None"),
            code="\ndef say(client, x, y):\n    return None if client == 7 else (x, y)\n"
            "\n\ndef clients(each):\n    return Own(say=say)\n"),
]  # fmt: skip
LATE = [
    Mistake("loss fails later", ("loss", "ValueError: the ninth"),
            code="\ncalls = 0\n\n\ndef loss(module, batch):\n    global calls\n    calls += 1\n"
            "    if calls > 11:\n        raise ValueError('the ninth')\n"
            "    return module(batch[0]).sum()\n"),
    Mistake("examples raise", ("client 3", "OSError: disk", r"py:\d+|line \d+"),
            code="\ndef say(client, x, y):\n    if client == 3:\n        raise OSError('disk')\n"
            "    return x, y\n\n\ndef clients(each):\n    return Own(say=say)\n"),
    Mistake("examples of another shape", ("client 7", "loss", r"\(3, 2\)"),
            code="\ndef say(client, x, y):\n    return (x[:, :2] if client == 7 else x), y\n"
            "\n\ndef clients(each):\n    return Own(say=say)\n"),
]  # fmt: skip


def told(done) -> str:
    """Return the sentence of a refused command, and check that it is the only one."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    shown = ("privpart: imports ", "privpart: engine: ", "round ")
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith(shown)]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("privpart: ")
    assert lines[0].endswith(".")
    assert len(lines[0]) < 600
    return lines[0]


def refuse(mistake: Mistake, folder: Path, privpart, *options: str) -> None:
    plan, run = mistake.write(folder), folder / "run"
    sentence = told(privpart("train", "--plan", str(plan), "--out", str(run), *options))
    for words in mistake.says:
        assert re.search(words, sentence), (words, sentence)


@pytest.mark.parametrize(
    "mistake",
    [*PLANS, *NETWORKS, *POPULATIONS, *CALLS, *LATE],
    ids=lambda mistake: mistake.name,
)
def test_a_mistake_is_one_sentence_and_no_run_unless_a_later_round_meets_it(
    mistake, tmp_path, privpart
):
    refuse(mistake, tmp_path, privpart)
    assert (tmp_path / "run").exists() == (mistake in LATE)


def test_weights_that_do_not_fit_are_one_sentence(tmp_path, privpart):
    save_file({"0.weight": torch.zeros(5, 3)}, tmp_path / "w.safetensors")
    kept = named("keep", '["0.weight"]\nweights = "w.safetensors"')
    refuse(Mistake("weights", (r"0\.weight", r"5, 3", r"4, 3"), kept), tmp_path, privpart)
    assert not (tmp_path / "run").exists()


def test_a_diverged_metric_is_no_mistake(tmp_path, privpart):
    """NaN is written as null, and the run continues."""
    plan = Mistake(
        "metric is nan", (), code="\ndef metric(module):\n    return float('nan')\n"
    ).write(tmp_path)
    run = tmp_path / "run"
    done = privpart("train", "--plan", str(plan), "--out", str(run), "--evaluate-every", "2")
    assert done.returncode == 0, done.stderr
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["metric"] for row in written if "metric" in row][-1] is None


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("\ndef loss(module, batch):\n    raise ValueError('in a worker')\n"
         "\n\nimport multiprocessing\nif multiprocessing.parent_process() is None:\n"
         "    def loss(module, batch):\n        return module(batch[0]).square().mean()\n",
         ("client", "loss", "ValueError: in a worker")),
        ("\ndef clients(each):\n    return Own(say=lambda client, x, y: (x, y))\n",
         ("--workers 2", "top level of a module", "workers=1")),
    ],
    ids=["loss raises in a worker", "clients are not pickled"],
)  # fmt: skip
def test_a_mistake_that_workers_meet_is_one_sentence(code, says, tmp_path, privpart, monkeypatch):
    monkeypatch.setattr("privpart.engines.embedded._ALONE", 0.0)
    monkeypatch.setattr("privpart.pool.Pool.ready", lambda _: True)
    name = "worker loss" if "loss" in says else "worker clients"
    refuse(Mistake(name, says, code=code), tmp_path, privpart, "--workers", "2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, privpart):
    """A plan with own code, and its finished run."""
    folder = tmp_path_factory.mktemp("trained")
    plan = Mistake("none", ()).write(folder)
    done = privpart("train", "--plan", str(plan), "--out", str(folder / "run"))
    assert done.returncode == 0, done.stderr
    return folder


COMMANDS = {
    "run exists": (("train", "--plan", "PLAN", "--out", "RUN"), ("run", "is not empty")),
    "resume of nothing": (("train", "--resume", "--out", "GONE"), ("gone", "no run|no ledger")),
    "resume with another plan": (
        ("train", "--resume", "--adopt", "--plan", "OTHER", "--out", "RUN"),
        ("other.toml", "not the run's plan", "leave it out"),
    ),
    "no plan": (("train", "--out", "GONE"), ("--plan FILE", "--resume")),
    "plan is missing": (("train", "--plan", "GONE", "--out", "RUN"), ("gone", "no such file")),
    "plan is code": (("train", "--plan", "CODE", "--out", "GONE"), (r"mistake_none\.py", "TOML")),
    "plan to export": (("export", "PLAN", "--out", "NEW"), (r"plan\.toml", "no run|no ledger")),
    "export exists": (("export", "RUN", "--out", "PLAN"), (r"plan\.toml", "exists", "remove")),
    "export as a pickle": (
        ("export", "RUN", "--out", "m.pt"),
        (r"--out m\.pt", r"m\.safetensors", "load_file"),
    ),
    "no adapter": (("export", "RUN", "--part", "peft", "--out", "NEW"), ("Sequential", "Use full")),
    "export with another plan": (
        ("export", "RUN", "--plan", "OTHER", "--out", "NEW"),
        ("other.toml", "not the run's plan"),
    ),
    "start over the plan": (("init", "FOLDER"), ("plan.toml", "exists")),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistake_with_a_command_is_one_sentence(name, trained, privpart):
    arguments, says = COMMANDS[name]
    other = trained / "other.toml"
    other.write_text((trained / "plan.toml").read_text().replace("seed = 1", "seed = 2"))
    places = {
        "PLAN": trained / "plan.toml", "OTHER": other, "RUN": trained / "run", "FOLDER": trained,
        "CODE": trained / "mistake_none.py", "GONE": trained / "gone", "NEW": trained / "new",
    }  # fmt: skip
    sentence = told(privpart(*(str(places.get(part, part)) for part in arguments)))
    for words in says:
        assert re.search(words, sentence), (words, sentence)
    assert not (trained / "gone").exists()
    assert not (trained / "new").exists()


def population(count: int = 20, **options):
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(count * 3, 3, generator=draws)
    return from_tensors((x, (x[:, 0] > 0).long()), user=np.repeat(np.arange(count), 3), **options)


TABLES = {
    "privacy": {
        "rounds": 2, "clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 1e-5,
        "mechanism": {"name": "tree"},
    },
    "data": {"clients_per_round": 5},
    "client": {"learning_rate": 0.1},
}  # fmt: skip


def tables(table: str, **values: object) -> dict[str, object]:
    return TABLES | {table: TABLES.get(table, {}) | values}


CNN = {"channels": [2, 4], "hidden": 8, "image_size": 8}


class NoExamples:
    ids = (1, 2, 3)


class CalledIds:
    def ids(self):
        return [1, 2, 3]

    def examples(self, client):
        return torch.zeros(1, 3), torch.zeros(1, dtype=torch.long)


PYTHON = {
    "a class for a module": ({"module": nn.Linear}, ("module", "class Linear itself", "nn.Module")),
    "no module": ({"module": None}, ("module", "is missing")),
    "module and name": (
        {"plan": tables("model", name="small_cnn", seed=1, sizes=CNN)},
        ("module", "names one as well"),
    ),
    "a list of clients": ({"clients": [1, 2]}, ("list", "from_tensors")),
    "clients without examples": ({"clients": NoExamples()}, ("NoExamples", "examples")),
    "ids is a method": ({"clients": CalledIds()}, ("ids", "method", "property")),
    "a name of code": ({"loss": "./task.py:loss"}, ("loss", "function itself")),
    "loss is a module": ({"loss": nn.CrossEntropyLoss()}, ("CrossEntropyLoss", "Error: ")),
    "metric is a number": ({"metric": 0.5}, ("metric", "float", "function")),
    "no table": ({"plan": {k: TABLES[k] for k in ("privacy", "data")}}, ("client", "missing")),
    "a misspelt option": ({"worker": 2}, ("worker", "workers")),
    "out is missing": ({"out": None}, ("out", "None", "folder")),
    "a frozen layer in train": (
        {
            "module": nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 2)),
            "plan": tables("model", train=["*"]),
        },
        ("model.train", "0.weight", "and 1 more", "requires_grad"),
    ),
    "all is frozen": (
        {"module": nn.Linear(3, 2).requires_grad_(False)},
        ("no parameter", "requires a gradient"),
    ),
    "a seed of noise": ({"seed": -1}, ("seed", "-1")),
}  # fmt: skip


@pytest.mark.parametrize("name", PYTHON)
def test_a_mistake_from_python_is_a_config_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes, says = PYTHON[name]
    arguments = {
        "module": nn.Linear(3, 2), "clients": population(), "plan": TABLES,
        "out": tmp_path / "run", "progress": False,
    } | changes  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        package.train(**arguments)
    sentence = str(refused.value)
    assert "\n" not in sentence
    for words in says:
        assert re.search(words, sentence), (words, sentence)
    assert not (tmp_path / "run").exists()
