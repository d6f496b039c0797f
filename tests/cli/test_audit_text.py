"""``privpart audit leakage`` on text: of a plan, of a file of tokens, and of a given update."""

import csv
import json
import math
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import save_file

from accounting import ConfigError
from attacks import ReadText, observe_text
from privpart.cli.audit.store import TrialFolder
from privpart.cli.audit.text_inputs import _examples, _together
from privpart.run.store import encode_state

CODE = """
import torch
from torch import nn
from privpart.data import from_tensors
WORDS = 40
class Net(nn.Module):
    def __init__(self, outputs=WORDS):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 24)
        self.lstm = nn.LSTM(24, 48, batch_first=True)
        self.head = nn.Linear(48, outputs)
        self.last = outputs == 2
    def forward(self, ids):
        states = self.lstm(self.embedding(ids))[0]
        return self.head(states[:, -1] if self.last else states)
def classifier(): return Net(2)
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(32, 2)
    def forward(self, ids):
        places = torch.linspace(0, 1, ids.shape[1])[:, None] * self.head.weight[0]
        return self.head(self.encoder(self.embedding(ids) + places).mean(1))
def clients():
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, WORDS, (24, 7), generator=draw)
    return from_tensors((ids[:, :-1], ids[:, 1:]), user=[i // 2 for i in range(24)])
clients.words = [f"word{i}" for i in range(WORDS)]
"""
PLAN = """
schema = "privpart/plan/1"
[privacy]
rounds = 2
clip_norm = 0.5
noise_multiplier = 1.0
delta = 1e-2
max_participations = 1
mechanism = { name = "blt" }
[model]
factory = "./text_code.py:Net"
train = ["*"]
[data]
clients = "./text_code.py:clients"
clients_per_round = 4
[server]
[client]
learning_rate = 0.5
"""
OF_FILE = ["--model", "./text_code.py:Net", "--view", "full", "--trials", "1", "--tokens"]
TOKENS = torch.randint(1, 40, (8, 6), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    (path / "text_code.py").write_text(CODE)
    (path / "plan.toml").write_text(PLAN)
    for name, line in (
        ("short", "length = 4"),
        ("many", "local_steps = 1001"),
        ("padded", "pad = 99"),
        ("hidden", "hide_labels = true"),
    ):
        (path / f"{name}.toml").write_text(line)
    save_file({"tokens": TOKENS}, path / "tokens.safetensors")
    save_file({"tokens": TOKENS, "labels": TOKENS[:, 0] % 2}, path / "labelled.safetensors")
    for name, odd in (
        ("bool", TOKENS > 3),
        ("complex", TOKENS.to(torch.complex64)),
        ("single", TOKENS[:, :1]),
        ("long", TOKENS[:1].repeat(10, 1500)),
    ):
        save_file({"tokens": odd.contiguous()}, path / f"{name}.safetensors")
    return path


@pytest.fixture
def audited(privpart, folder, monkeypatch):
    monkeypatch.chdir(folder)

    def run(*words, out):
        done = privpart("audit", "leakage", *words, "--out", str(folder / out))
        path = folder / out / "report.json"
        return done, json.loads(path.read_text()) if path.exists() else {}

    return run


def test_a_plan_of_text_is_audited_by_what_it_trains(audited, folder):
    done, report = audited(
        *("--plan", "plan.toml", "--trials", "1", "--format", "csv", "--fail-on", "partial"),
        out="plan",
    )
    assert done.returncode == 4, done.stderr
    (row,) = csv.DictReader(done.stdout.splitlines())
    assert (row["view"], row["verdict"], row["exact"]) == ("trained", "recovered", "1")
    assert report["schema"] == "privpart/text-leakage/1"
    assert report["guesses"].keys() == {"unigram", "bigram"}
    assert report["rows"][0]["guess_rouge_median"] < 0.5
    assert report["rows"][0]["sentences"] == report["truth"]
    assert report["rows"][0]["share"] == 1
    page = (folder / "plan" / "leakage.html").read_text()
    assert page.count("<mark>word") == 7
    assert "Recovered: the update gives data" in page
    assert len(list((folder / "plan" / "trials").iterdir())) == 1


def test_noise_is_beside_its_epsilon_and_lets_nothing_be_read(audited):
    plan = ("--plan", "plan.toml", "--trials", "1", "--settings", "short.toml")
    done, report = audited(*plan, "--clip", "0.5", "--noise-multiplier", "0.5", out="noise")
    assert done.returncode == 0, done.stderr
    verdicts = {row["adversary"]: row["verdict"] for row in report["rows"]}
    assert verdicts["server"] in ("recovered", "partial")
    assert verdicts["recipient"] == "attack failed"
    assert len(report["truth"][0]) == 4
    assert 5 < report["accountant"]["epsilon"] < 12
    assert "Accountant: epsilon" in done.stdout
    assert "the attack failed on trained: nothing follows about privacy" in done.stderr


def test_a_sweep_over_noises_is_beside_epsilon(audited, folder):
    plan = ("--plan", "plan.toml", "--trials", "1", "--clip", "0.5")
    done, _ = audited(*plan, "--noise-multiplier", "0,0.5", out="sweep")
    assert done.returncode == 0, done.stderr
    told = json.loads((folder / "sweep" / "defences.json").read_text())
    assert told["schema"] == "privpart/text-defences/1"
    bare, noisy = told["points"]
    assert (bare["verdict"], noisy["verdict"]) == ("recovered", "attack failed")
    assert (bare["exact"], noisy["exact"]) == (1, 0)
    assert bare["epsilon"] is None
    assert 5 < noisy["epsilon"] < 12
    assert bare["rouge_median"] == 1 > bare["guess_rouge"][0]
    assert "'attack failed' says nothing" in " ".join(done.stdout.split())
    assert (folder / "sweep" / "defences.png").read_bytes().startswith(b"\x89PNG")


def test_an_update_of_other_sentences_is_void_and_no_finding(audited, folder):
    names = {}
    exec(compile(CODE, "text_code.py", "exec"), names)
    net = names["Net"]()
    right = {k: v.float() for k, v in observe_text(net, TOKENS[:1]).update.items()}
    save_file(right, folder / "right.safetensors")
    save_file({k: 0.5 * v for k, v in right.items()}, folder / "half.safetensors")
    given = ["--model", "./text_code.py:Net", "--tokens", "tokens.safetensors", "--view", "full"]
    done, report = audited(*given, "--gradient", "right.safetensors", out="right")
    assert done.returncode == 0, done.stderr
    assert report["verdict"] == "recovered"
    assert report["threat"]["origin"] == "given"
    for name, cause in (("half", "0.5 times the gradient"), ("other", "other examples")):
        if name == "other":
            other = observe_text(net, TOKENS[1:2]).update
            save_file({k: v.float() for k, v in other.items()}, folder / "other.safetensors")
        done, report = audited(
            *given, "--gradient", f"{name}.safetensors", "--fail-on", "ambiguous", out=name
        )
        assert done.returncode == 5, done.stderr
        assert report["verdict"] == "void"
        assert cause in " ".join(done.stderr.split())


def test_a_text_classifier_gives_away_the_tokens_of_its_embedding(audited):
    done, report = audited(
        *("--model", "./text_code.py:classifier", "--tokens", "labelled.safetensors"),
        *("--view", "embedding.*", "--view", "head.*", "--trials", "1", "--batch", "4"),
        *("--view", "both=embedding.*,head.*", "--settings", "hidden.toml"),
        out="classifier",
    )
    assert done.returncode == 0, done.stderr
    bag, head, both = report["rows"]
    assert (bag["verdict"], bag["attack"], bag["bag_f1_median"]) == ("partial", "bag_of_tokens", 1)
    assert (head["verdict"], head["attack"]) == ("attack failed", "none")
    assert both["verdict"] == "partial"
    said = " ".join(done.stderr.split())
    assert "no attack could read head.*: none applies there" in said
    assert "both contains head.*, which no attack could read" in said
    assert "embedding.* contains" not in said


def test_attention_of_torch_is_read(audited):
    done, report = audited(
        *("--model", "./text_code.py:Encoder", "--tokens", "labelled.safetensors"),
        *("--view", "*.in_proj_weight", "--view", "full", "--trials", "1"),
        out="encoder",
    )
    assert done.returncode == 0, done.stderr
    assert [row["verdict"] for row in report["rows"]] == ["recovered", "recovered"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--plan", "plan.toml", "--model", "lenet"], "has a model of its own"),
        (["--plan", "plan.toml", "--effort", "quick"], "needs no search; leave out --effort"),
        (["--plan", "plan.toml", "--batch", "9"], "choose fewer trials"),
        (["--view", "full"], "model is missing"),
        (["--model", "./text_code.py:Net", "--view", "full"], "data is missing"),
        (["--plan", "plan.toml", "--attack", "dlg"], "bag_of_tokens"),
        (["--plan", "plan.toml", "--tokens", "plan.toml"], "not a valid .safetensors"),
        (["--plan", "plan.toml", "--settings", "many.toml"], "must be at most 1000"),
        ([*OF_FILE, "tokens.safetensors", "--settings", "padded.toml"], "must be at most 39"),
        ([*OF_FILE, "bool.safetensors"], "tokens is torch.bool (8, 6); must be whole numbers"),
        ([*OF_FILE, "complex.safetensors"], "tokens is torch.complex64"),
        (["--model", "torch.nn:Identity", *OF_FILE[2:], "tokens.safetensors"], ""),
        ([*OF_FILE, "single.safetensors"], "after which nothing is predicted"),
        ([*OF_FILE, "long.safetensors"], "9000 in one update; must be at most 8192"),
    ],
)
def test_mistakes_are_told(audited, words, told):
    done, _ = audited(*words, out="mistake")
    assert done.returncode == 2
    assert told in " ".join(done.stderr.split())


def test_sentences_of_clients_are_what_token_ids_describe():
    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 0, 0]])
    attended = (ids > 0).long()
    of_hugging_face = {
        "input_ids": ids,
        "attention_mask": attended,
        "labels": ids.masked_fill(ids == 0, -100),
    }
    assert list(_examples(of_hugging_face)) == [((5, 6, 7), None), ((5, 6), None)]
    following = torch.tensor([[6, 7, 8, -100], [-100, 9, -100, -100]])
    assert list(_examples((ids, following))) == [((5, 6, 7, 8), None)]
    labelled = {"input_ids": ids, "attention_mask": attended, "label": torch.tensor([1, 0])}
    assert list(_examples(labelled)) == [((5, 6, 7), 1), ((5, 6), 0)]
    tokens, labels, pad = _together(list(_examples(labelled)), 9)
    assert (tokens.tolist(), labels.tolist(), pad) == ([[5, 6, 7], [5, 6, 0]], [1, 0], 0)
    assert _together([((0, 1), None), ((0,), None)], 9)[2] == 2
    with pytest.raises(ConfigError, match="length is missing"):
        _together([((0, 1), None), ((1,), None)], 2)
    for odd in ((torch.zeros(2, 3), ids), ({"a": ids, "b": ids}, ids), ids):
        with pytest.raises(ConfigError, match="text"):
            list(_examples(odd))


def test_what_was_read_survives_an_interruption(tmp_path):
    labels = torch.tensor([1])
    read = ReadText(((3, 4),), frozenset({3, 4}), math.inf, ((3,), (4,)), labels, 1.5)
    kept = TrialFolder(tmp_path, {}, "0")
    kept["key"] = {"span_test": read}
    again = TrialFolder(tmp_path, {}, "0")["key"]["span_test"]
    assert asdict(again) == asdict(read)
    (file,) = kept.folder.iterdir()
    texts = {"span_test": '{"bag": [], "sentences": 3}'}
    file.write_bytes(encode_state({}, {"key": "key", "results": texts}))
    assert "key" not in TrialFolder(tmp_path, {}, "0")
