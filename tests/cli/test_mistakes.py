"""Mistakes that people make with code and data of their own: each gives one sentence and code 2."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import privpart as package
from accounting import ConfigError
from privpart.data import check_clients, from_dataset, from_frame, from_tensors
from privpart.run import log

RAW = r"Traceback|\[Errno|KeyError|AttributeError|TypeError"
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


def written_in(*folders: Path) -> dict[Path, bytes]:
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    return {f: f.read_bytes() for f in files if f.suffix not in (".pyc", ".lock")}


def refuse(mistake: Mistake, folder: Path, privpart, *options: str) -> None:
    plan, run, before = mistake.write(folder), folder / "run", written_in(log.directory())
    sentence = told(privpart("train", "--plan", str(plan), "--out", str(run), *options))
    for words in mistake.says:
        assert re.search(words, sentence), (words, sentence)
    assert run.exists() or written_in(log.directory()) == before


@pytest.mark.parametrize(
    "mistake", [*PLANS, *NETWORKS, *POPULATIONS, *CALLS, *LATE], ids=lambda mistake: mistake.name
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
    assert written[-1]["metrics"] == {"metric": None}


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
    "a seed as a text": ({"seed": "1"}, ("seed='1'", "whole number")),
    "no plan file": ({"plan": "gone.toml"}, ("gone.toml", "no such file")),
    "a plan is a number": ({"plan": 3}, ("plan: is an int", "tables")),
    "delta of 1": ({"plan": tables("privacy", delta=1.0)}, ("delta=1", "between 0 and 1")),
    "delta as a text": ({"plan": tables("privacy", delta="1e-5")}, ("privacy.delta", "'1e-5'")),
    "noise below 0": ({"plan": tables("privacy", noise_multiplier=-1.0)}, ("noise_multiplier=-1",)),
    "epsilon and noise": ({"plan": tables("privacy", target_epsilon=2.0)}, ("has both",)),
    "no clip norm": ({"plan": tables("privacy", clip_norm=0.0)}, ("clip_norm=0", "positive")),
    "rounds are a float": ({"plan": tables("privacy", rounds=2.0)}, ("privacy.rounds", "integer")),
    "mechanism as a text": ({"plan": tables("privacy", mechanism="tree")}, ("mechanism", "object")),
    "misspelt mechanism": (
        {"plan": tables("privacy", mechanism={"name": "tre"})},
        ("mechanism.name", "'tree', 'independent'"),
    ),
    "more often than rounds": (
        {"plan": tables("privacy", max_participations=9)},
        ("max_participations=9", "at most 2"),
    ),
    "nobody in a round": ({"plan": tables("data", clients_per_round=0)}, ("clients_per_round",)),
    "rate below 0": ({"plan": tables("client", learning_rate=-0.1)}, ("learning_rate=-0.1",)),
    "rate is no number": ({"plan": tables("client", learning_rate="0.1")}, ("rate", "'0.1'")),
    "no batch": ({"plan": tables("client", batch_size=0)}, ("batch_size=0", "at least 1")),
    "no such optimizer": ({"plan": tables("client", optimizer="adamw")}, ("'sgd' or 'adam'",)),
    "decay of 1": ({"plan": tables("client", weight_decay=1.0)}, ("weight_decay=1", "below 1")),
    "no such server": ({"plan": tables("server", kind="lamb")}, ("server.kind", "'yogi'")),
    "a misspelt rate": ({"plan": tables("client", learning_rte=0.1)}, ("is learning_rate;",)),
    "no such schedule": (
        {"plan": TABLES | {"learning_rates": {"client": {"kind": "cos"}}}},
        ("learning_rates.client.kind", "'cosine'"),
    ),
    "a warm-up without end": (
        {"plan": TABLES | {"learning_rates": {"client": {"kind": "linear", "warmup": 5}}}},
        ("learning_rates.client", "below the plan's 2 rounds"),
    ),
    "a step after the end": (
        {"plan": TABLES | {"learning_rates": {"server": {"kind": "steps", "at": [1, 2]}}}},
        ("learning_rates.server", "below the plan's 2 rounds"),
    ),
    "train is a text": ({"plan": tables("model", train="weight")}, ("model.train", "array")),
    "train is misspelt": ({"plan": tables("model", train=["wieght"])}, ("Near it: weight",)),
    "out under a file": ({"out": Path(__file__) / "run"}, ("test_mistakes.py is a file",)),
    "out is a file": ({"out": Path(__file__)}, ("is a file", "folder")),
    "resume is a text": ({"resume": "yes"}, ("resume: is a str", "True or False")),
    "progress is a text": ({"progress": "no"}, ("progress: is a str", "True or False")),
    "evaluations as a text": ({"evaluate_every": "10"}, ("evaluate_every='10'",)),
    "one callback": ({"callbacks": print}, ("callbacks", "list of functions")),
    "workers as a text": ({"workers": "2"}, ("workers='2'", "whole number")),
    "no such device": ({"device": "gpu"}, ("device='gpu'", "'cpu', 'cuda'")),
    "no device here": ({"device": "hpu"}, ("device='hpu'", "use one of these")),
    "a name of a loss": ({"loss": "mse"}, ("loss='mse'", "mean_squared_error")),
    "loss is None": ({"loss": lambda *_: None}, ("returned a NoneType", r"\.item\(\)")),
    "metric of a vector": ({"metric": lambda _: torch.ones(3)}, (r"shape \(3,\)", "one number")),
    "another network": ({"module": nn.Linear(4, 2)}, ("does not take the examples", r"\(3,\)")),
    "a network of images": ({"module": nn.Conv2d(1, 2, 3)}, ("does not take the examples",)),
    "labels from 1": ({"module": nn.Linear(3, 1)}, ("1 outputs", "labels count from 0")),
    "a name of a network": ({"module": "resnet18"}, ("module: is a str", "nn.Module")),
    "weights for a network": ({"module": nn.Linear(3, 2).state_dict()}, ("an OrderedDict",)),
    "a lazy network": ({"module": nn.LazyLinear(2)}, ("is lazy", "Run the module once")),
    "two outputs": ({"module": nn.LSTM(3, 2)}, ("returns a tuple", "must return a tensor")),
    "half precision": ({"module": nn.Linear(3, 2).half()}, ("torch.float16", r"\.float\(\)")),
    "a dataset for clients": (
        {"clients": torch.utils.data.TensorDataset(torch.ones(3, 3))},
        ("a TensorDataset", "from_tensors"),
    ),
    "a generator of clients": ({"clients": (c for c in range(3))}, ("a generator", "from_tensors")),
    "a dict of clients": ({"clients": {1: torch.ones(3, 3)}}, ("a dict", "from_tensors")),
}  # fmt: skip


@pytest.mark.parametrize("name", PYTHON)
def test_a_mistake_from_python_is_a_config_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes, says = PYTHON[name]
    before = written_in(log.directory())
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
    assert not re.search(RAW, sentence.replace("TypeError: ", "")), sentence
    assert not (tmp_path / "run").exists()
    assert written_in(log.directory()) == before


# What is typed on a command line, and leaves nothing in the folder where it is typed.

EPSILON = "epsilon --rounds 100 --noise-multiplier 1 --delta 1e-5 --max-participations 1"
CALIBRATE = "calibrate --target-epsilon 2 --delta 1e-5 --rounds 100 --max-participations 1"
TRAIN = "train --plan plan.toml --out new"
TYPED = {
    "trian --plan plan.toml": "No such command 'trian'.*Did you mean 'train'",
    "epsilon": "--rounds, --noise-multiplier and --delta are needed",
    EPSILON.replace("100", "abc"): "'--rounds': 'abc'.*valid integer",
    EPSILON.replace("100", "0"): "--rounds 0: must be at least 1",
    EPSILON.replace("100", "-5"): "--rounds -5: must be at least 1",
    EPSILON.replace("multiplier 1", "multiplier -1"): "--noise-multiplier -1: must be positive",
    EPSILON.replace("multiplier 1", "multiplier 0"): "--noise-multiplier 0: must be positive",
    EPSILON.replace("multiplier 1", "multiplier nan"): "--noise-multiplier nan: must be positive",
    EPSILON.replace("multiplier 1", "multiplier 0,5"): "'0,5'.*A decimal number has a point",
    EPSILON.replace("1e-5", "1"): "--delta 1: must lie strictly between 0 and 1",
    EPSILON.replace("1e-5", "1.5"): "--delta 1.5: must lie strictly",
    EPSILON.replace("1e-5", "0"): "--delta 0: must lie strictly",
    EPSILON.replace("1e-5", "-1e-5"): "--delta -1e-05: must lie strictly",
    EPSILON.replace("pations 1", "pations 200"): "--max-participations 200: at most 100 fit",
    EPSILON.replace("pations 1", "pations 0"): "--max-participations 0: must be at least 1",
    f"{EPSILON} --mechanism treee": "--mechanism 'treee': must be one of tree",
    f"{EPSILON} --mechanism tree:restart=64": "tree: no option 'restart'",
    f"{EPSILON} --mechanism blt:buffers=two": "buffers=two: must be a whole number",
    f"{EPSILON} --mechanism file:gone.json": r"gone\.json: there is no such file",
    f"{EPSILON} --nosie-multiplier 2": "No such option:? .*--nosie-multiplier.*--noise-multiplier",
    f"{EPSILON} --format jsn": "'--format': 'jsn'",
    f"{EPSILON} --sampling poisson:expected_batch=20": "leave out --max-participations",
    f"{EPSILON} --plan plan.toml": "already contains these values; leave out --rounds",
    f"{EPSILON} --min-separation 200": "--max-participations of 2 or more",
    f"{EPSILON} extra": "unexpected extra argument",
    "epsilon --plan gone.toml": r"gone\.toml: there is no such file",
    "epsilon --events gone.json": "--events needs --delta",
    CALIBRATE.replace("epsilon 2", "epsilon -3"): "--target-epsilon -3: must be positive",
    CALIBRATE.replace("epsilon 2", "epsilon 0"): "--target-epsilon 0: must be positive",
    CALIBRATE.replace("epsilon 2", "epsilon two"): "'two'.*valid (number|float)",
    CALIBRATE.replace("--target-epsilon", "--epsilon"): "No such option:? .*--epsilon",
    "calibrate --target-epsilon 2 --delta 1e-5": "rounds is missing",
    "mechanisms": "--rounds and --delta are needed",
    "costs": "model: is missing; name a network",
    "costs resnet": "model 'resnet' is unknown.*resnet18_gn",
    "costs emnist_cnn --train dense9.*": r"'dense9\.\*' matches no parameter. Near it: dense2",
    "train --plan plan.toml": "Missing option '--out'",
    "train --out new": "plan is missing: pass --plan FILE",
    "train --plan . --out new": "it is not a file",
    "train --plan empty.toml --out new": "schema: is missing",
    "train --plan bom.toml --out new": "rounds=0: must be at least 1",
    "train --plan utf16.toml --out new": "is not UTF-8 text",
    "train --plan plan.json --out new": r"plan\.json: is not valid TOML",
    "train --plan comma.toml --out new": "is not valid TOML",
    "train --plan plan.toml --out plan.toml": r"plan\.toml is a file; name a folder",
    "train --plan plan.toml --out plan.toml/run": r"plan\.toml is a file; name a folder",
    "train --plan plan.toml --out used": "used is not empty",
    "train --resume --out gone": "gone holds no run",
    "train --resume --out plan.toml": "plan.toml holds no run",
    f"{TRAIN} --fork-of gone": "gone holds no run: there is no such folder",
    f"{TRAIN} --fork-of plan.toml": "plan.toml holds no run: it is a file",
    f"{TRAIN} --adopt": "without --resume: there is no run to adopt",
    f"{TRAIN} --device gpu": "--device 'gpu': torch knows no such device; use 'cpu'",
    f"{TRAIN} --device hpu": "--device 'hpu': torch .* sees .* here; use one of these",
    f"{TRAIN} --workers 0": "--workers 0: must be at least 1",
    f"{TRAIN} --worker 2": "No such option:? .*--worker[ ']",
    f"{TRAIN} --rounds 3": "No such option:? .*--rounds",
    f"{TRAIN} --seed -1": "--seed -1: must be at least 0",
    f"{TRAIN} --seed abc": "'--seed': 'abc'.*valid integer",
    f"{TRAIN} --evaluate-every 0": "--evaluate-every 0: must be at least 1",
    f"{TRAIN} --precision fp16": "'fp16' is not one of 'float32', 'tf32', 'bfloat16'",
    f"{TRAIN} --policy gone.toml": r"--policy gone\.toml: there is no such file",
    f"{TRAIN} --record-sums": "whoever has the sums can remove the noise",
    "export gone --out m.safetensors": "gone holds no run",
    "export used --out m.safetensors": "used holds no run",
    "export used": "Missing option '--out'",
    "export used --out m.safetensors --part lora": "'--part': 'lora'",
    "report gone": "gone holds no run",
    "verify gone": "gone holds no run",
    "train --close --out gone --yes": "gone holds no run",
    "train --close --out used --seed 1": "--close: only ends a run; leave out --seed",
    "train --resume --out used --yes": "without --close: nothing is asked",
    "report used --max-epsilon -1": "--max-epsilon -1: must be positive",
    "budget nobody": "--population 'nobody'|no run",
    "budget people --limit-epsilon 2 --delta 3": "--delta 3: must lie strictly",
    "budget people --add epsilon=1": "by is missing: say who",
    "budget people --add eps=1 --by me": r"--add eps=1: must be epsilon=\.\.\.",
    "budget people --add epsilon=1,delta=1 --by me": "--add epsilon=1,delta=1: delta=1: must be",
    "sweep gone.toml --out new": r"gone\.toml: there is no such file",
    "frontier gone.toml --out new": r"gone\.toml: there is no such file",
    "tune": "file: is missing",
    "doctor --suggest": "without --plan",
    "init plan.toml": "is a file; name a folder",
    "init": "Missing argument '(folder|FOLDER)'",
    "demo --out plan.toml": "cannot be made",
    "audit epsilon": "run is missing: name the folder of a run, or a plan",
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a plan, others with mistakes, and files of somebody."""
    folder = tmp_path_factory.mktemp("typed")
    text = Mistake("typed", ()).write(folder).read_text()
    (folder / "empty.toml").write_text("")
    (folder / "bom.toml").write_text(text.replace("rounds = 4", "rounds = 0"), "utf-8-sig")
    (folder / "utf16.toml").write_text(text, "utf-16")
    (folder / "comma.toml").write_text(text.replace("clip_norm = 0.5", "clip_norm = 0,5"))
    (folder / "plan.json").write_text('{"privacy": {"rounds": 4}}')
    (folder / "used").mkdir(mode=0o700)
    (folder / "used" / "notes.txt").write_text("mine")
    return folder


@pytest.mark.parametrize("typed", TYPED)
def test_a_mistake_on_the_command_line_is_one_sentence(typed, place, privpart, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "400")
    before = written_in(place, log.directory())
    done = privpart(*typed.split())
    assert done.returncode == 2
    shown = re.sub("[│╭╰─╮╯]", "", done.stdout + done.stderr)  # older typers draw narrow boxes
    assert re.search(TYPED[typed], " ".join(shown.split())), shown
    assert not re.search(RAW, shown), shown
    assert not done.stdout
    assert written_in(place, log.directory()) == before
    assert not {"new", "gone"} & {path.name for path in place.iterdir()}


# Data.


def data():
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    return x, torch.zeros(12, dtype=torch.long), [row // 3 for row in range(12)]


def frame():
    return pd.DataFrame(
        {
            "a": [1.0, 2.0, 3.0], "b": ["1,5", "2,5", "3,5"], "label": [0, 1, 0], "n": [1, None, 2],
            "who": ["x", "y", "x"], "text": ["cat", "dog", "cat"], "gap": [None, "y", "x"],
        }
    )  # fmt: skip


class Fails(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, item):
        raise KeyError(f"image_{item}.png")


class Ragged(Fails):
    def __getitem__(self, item):
        return torch.zeros(item + 1), 0


class Words(Fails):
    def __getitem__(self, item):
        return "a text", 0


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


X, Y, USER = data()
DATA = {
    "labels are too few": (lambda: from_tensors((X, Y[:5]), user=USER), "y has 5 rows, and 12 ids"),
    "users are too few": (lambda: from_tensors((X, Y), user=USER[:5]), "x has 12 rows, and 5 ids"),
    "a user is a float": (lambda: from_tensors((X, Y), user=[1.5] * 12), "1.5 of type float"),
    "a user is missing": (lambda: from_tensors((X, Y), user=[None] * 12), "None of type NoneType"),
    "one user for all": (lambda: from_tensors((X, Y), user="me"), "user: is a str; must be a list"),
    "users have gaps": (
        lambda: from_tensors((X, Y), user=np.full(12, np.nan)), "user: has type float64.*no gap"
    ),
    "lists": (lambda: from_tensors((X.tolist(), Y), user=USER), "torch.tensor converts lists"),
    "images in bytes": (
        lambda: from_tensors((np.zeros((12, 8, 8), np.uint8), Y), user=USER),
        r"uint8.*astype\('float32'\) / 255",
    ),
    "not a number": (lambda: from_tensors((X / 0, Y), user=USER), r"row 0 \(client 0\).*NaN"),
    "words": (lambda: from_tensors((np.array(["a"] * 12), Y), user=USER), "x: has type <U1"),
    "complex": (lambda: from_tensors((X.to(torch.cfloat), Y), user=USER), "must be real numbers"),
    "masked": (
        lambda: from_tensors((np.ma.masked_array(X.numpy(), X.numpy() > 0), Y), user=USER),
        "x: is masked; fill its gaps",
    ),
    "sparse": (lambda: from_tensors((X.to_sparse(), Y), user=USER), "x: is sparse"),
    "without numbers": (lambda: from_tensors((X.to("meta"), Y), user=USER), "on the device meta"),
    "no examples": (lambda: from_tensors((X[:0], Y[:0]), user=[]), "user: is empty"),
    "a generator of pairs": (
        lambda: from_tensors(((x, 0) for x in X), user=USER), "examples: is a generator"
    ),
    "a table for tensors": (lambda: from_tensors(frame(), user=[1, 2, 3]), "is a DataFrame"),
    "decimal commas": (
        lambda: from_frame(frame(), user="who", x=["a", "b"], y="label"),
        r"column 'b': holds texts of numbers with a decimal comma.*decimal=','",
    ),
    "no such column": (
        lambda: from_frame(frame(), user="who", x=["a"], y="lable"), "did you mean 'label'"
    ),
    "a gap in a column": (
        lambda: from_frame(frame(), user="who", x=["n"], y="label"),
        r"column 'n', row 1 \(client 'y'\): holds NaN",
    ),
    "a gap in the users": (
        lambda: from_frame(frame(), user="gap", x=["a"], y="label"), r"column 'gap'.*client id"
    ),
    "texts as labels": (
        lambda: from_frame(frame(), user="who", x=["a"], y="text"), "column 'text': has type object"
    ),
    "the label is an input": (
        lambda: from_frame(frame(), user="who", x=["a", "label"], y="label"), "x: has the label"
    ),
    "one column as a text": (
        lambda: from_frame(frame(), user="who", x="a", y="label"), "name the columns of the inputs"
    ),
    "the path of a table": (
        lambda: from_frame("a.csv", user="who", x=["a"], y="label"), "frame: is a str.*read_csv"
    ),
    "a table without rows": (
        lambda: from_frame(frame()[:0], user="who", x=["a"], y="label"), "frame: has no rows"
    ),
    "a stream": (lambda: from_dataset(Streamed(), user=USER), "must have a length.*not streamed"),
    "a loader": (
        lambda: from_dataset(torch.utils.data.DataLoader(Fails()), user=USER), "is a DataLoader"
    ),
    "a folder's path": (lambda: from_dataset("images/", user=USER[:7]), "dataset: is a str"),
    "items raise": (
        lambda: check_clients(from_dataset(Fails(), user=USER)), "client 0.*could not be made"
    ),
    "items of many sizes": (
        lambda: check_clients(from_dataset(Ragged(), user=USER)), "crop, resize or pad them"
    ),
    "items are words": (
        lambda: check_clients(from_dataset(Words(), user=USER)), "client 0.*a str.*tokenizer text"
    ),
    "a column of no dataset": (
        lambda: from_dataset(Words(), user="speaker"), "must be a column of a Hugging Face dataset"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_a_mistake_with_data_is_one_sentence(name):
    make, says = DATA[name]
    with pytest.raises(ConfigError, match=says) as refused:
        make()
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600


# An ordinary loop.


def loader(**options):
    examples = torch.utils.data.TensorDataset(X, Y)
    return torch.utils.data.DataLoader(examples, **({"batch_size": 4} | options))


LOOP = {
    "shuffles": ({"data_loader": loader(shuffle=True)}, "data_loader: shuffles"),
    "drops examples": ({"data_loader": loader(batch_size=5, drop_last=True)}, "leaves examples"),
    "streams": (
        {"data_loader": torch.utils.data.DataLoader(Streamed(), batch_size=4)}, "no length"
    ),
    "no epochs": ({"epochs": 0}, "epochs=0: must be at least 1"),
    "epochs as a text": ({"epochs": "1"}, "epochs='1': must be a whole number"),
    "delta of 1": ({"delta": 1.0}, "delta=1: must lie strictly between 0 and 1"),
    "epsilon below 0": ({"target_epsilon": -1.0, "noise_multiplier": None}, "target_epsilon=-1"),
    "both": ({"target_epsilon": 2.0}, "either noise_multiplier or target_epsilon"),
    "noise below 0": ({"noise_multiplier": -1.0}, "noise_multiplier=-1: must be positive"),
    "noise as a text": ({"noise_multiplier": "1"}, "noise_multiplier='1': must be a number"),
    "no clip norm": ({"max_grad_norm": 0.0}, "max_grad_norm=0: must be positive"),
    "a misspelt mechanism": ({"mechanism": "trea"}, "mechanism='trea': must be one of tree"),
    "resume of nothing": ({"resume": True}, "pass out"),
    "another network's optimizer": (
        {"optimizer": torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)},
        "optimizer: lacks weight, bias",
    ),
    "a frozen network": ({"module": nn.Linear(3, 2).requires_grad_(False)}, "no parameter trains"),
    "batch norm": (
        {"module": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))}, "'1' is a BatchNorm1d"
    ),
    "a dataset for a loader": ({"data_loader": loader().dataset}, "torch.utils.data.DataLoader"),
    "a list for a loader": ({"data_loader": [(X, Y)]}, "torch.utils.data.DataLoader"),
    "a name of an optimizer": ({"optimizer": "sgd"}, "must be a torch.optim optimizer"),
    "a name of a scheduler": ({"scheduler": "cosine"}, "scheduler: .*a str"),
    "a mechanism is a number": ({"mechanism": 3}, "mechanism: is a int; must be a name"),
    "a misspelt keyword": ({"noise_multipler": 1.0}, "Did you mean noise_multiplier"),
    "complex weights": (
        {"module": nn.Linear(3, 2, dtype=torch.cfloat)}, r"torch\.complex64; hold.*view_as_real"
    ),
    "an LSTM": ({"module": nn.LSTM(3, 2)}, "get_compatible_module.*DPLSTM"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOP)
def test_a_mistake_with_an_ordinary_loop_is_one_sentence(name):
    changes, says = LOOP[name]
    module = changes.get("module", nn.Linear(3, 2))
    arguments = {
        "module": module, "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
        "data_loader": loader(), "epochs": 1, "max_grad_norm": 1.0, "noise_multiplier": 1.0,
        "delta": 1e-5,
    } | changes  # fmt: skip
    with pytest.raises(ConfigError, match=says) as refused:
        package.FTRLEngine().make_private(**arguments)
    assert "\n" not in str(refused.value)


def test_there_are_many():
    lists = (PLANS, NETWORKS, POPULATIONS, CALLS, LATE, COMMANDS, PYTHON, TYPED, DATA, LOOP)
    assert sum(map(len, lists)) >= 240
