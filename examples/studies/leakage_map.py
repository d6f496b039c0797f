"""Leakage map: which part of a model gives away what, for the papers' networks and a LoRA one.

Run: ``python examples/studies/leakage_map.py --processes 2``; writes results/leakage_map.json in
benchmarks, and prints the table that docs/what-leaks.md shows. It resumes: what a run that was cut
off has found is in --out, and is not computed again. Images are attacked at start values, in
batches of one, with labels known; a second update of four images, labels hidden, is for the column
of labels. Sums are of the updates of clients with one image each, labels known, or one sentence of
random words; "members told apart" is the probability that the cosine of a member's update and the
sum is greater than that of another image's.

On the two ResNets, which are deep and have ReLU, matching gradients finds no picture in an
affordable time, so only closed forms and the inversion of a dense layer's input are tried, unless
--search is given; a row that none of them solves says "not searched".

Two small smooth networks stand first: attacks work there, so that a part's row says what the part
holds, and not what the attack lacks.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import frame

import time
import zlib
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median_high
from typing import Any

import torch
from audit_peers_cases import photographs
from scipy.stats import mannwhitneyu
from torch import Tensor, nn

from accounting import Independent, Participation, guarantee
from accounting.checks import ConfigError
from accounting.report import up
from attacks import LeakageReport, Reconstruction, leakage, networks, observe, suite
from attacks.image_audit import ImageAttack
from attacks.reconstruction.labels import label_candidates
from attacks.text.bag import bag_of_tokens
from attacks.text.observation import TextObservation, observe_text
from attacks.text.read import span_test
from attacks.text.score import rouge_l, text_scores, token_f1, unigram_guess
from privpart.cli.audit.store import TrialFolder
from privpart.data.tasks import fashion_mnist
from privpart.models import MODELS, build_network
from privpart.patterns import matching_parameters

RESULT = frame.RESULTS / "leakage_map.json"
DECOYS = 9
EXACT = 1e-3  # relative error below which the input of a dense layer counts as read
LABELLED = 4  # images of the update whose labels are hidden
Views = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Images:
    """Public and private images of one kind; those of one batch differ in their labels."""

    x: Tensor
    y: Tensor

    def rows(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        return self.x[first : first + count], self.y[first : first + count]


@dataclass(frozen=True)
class Subject:
    """A network, the parts that are audited, and the budget of the attacks.

    ``search`` says whether gradient matching is tried, beside closed forms.
    """

    name: str
    build: Callable[[], nn.Module]
    images: Callable[[], Images]
    views: Views
    budget: Mapping[str, float]
    search: bool = False
    trials: int = 1


def clothes() -> Images:
    """Return Fashion-MNIST's first test image of each label, and more images after them."""
    task = fashion_mnist(frame.DATA)
    x, y = task.test_x[:400], task.test_y[:400]
    first = [int((y == label).nonzero()[0]) for label in range(10)]
    rows = torch.tensor([*first, *(i for i in range(len(y)) if i not in first)])
    return Images(x[rows], y[rows])


def photos(size: int) -> Images:
    """Return photographs cut to a size, with ten labels in turn."""
    x = photographs()
    edge = (x.shape[-1] - size) // 2
    return Images(x[..., edge : edge + size, edge : edge + size], torch.arange(len(x)) % 10)


def seeded(build: Callable[..., nn.Module], *arguments: Any, **keywords: Any) -> nn.Module:
    """Return a network in eval mode with torch's start values of seed 0."""
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        return build(*arguments, **keywords).eval()


def lenet() -> nn.Module:
    return networks.smooth_lenet(torch.Generator().manual_seed(0), size=28)


def trained_lenet() -> nn.Module:
    """Return the smooth LeNet after 150 steps of Adam on 32 clothes each."""
    task = fashion_mnist(frame.DATA)
    generator = torch.Generator().manual_seed(0)
    model = networks.smooth_lenet(generator, size=28)
    solver = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(150):
        rows = torch.randint(len(task.train_y), (32,), generator=generator)
        solver.zero_grad()
        nn.functional.cross_entropy(model(task.train_x[rows]), task.train_y[rows]).backward()
        solver.step()
    return model.eval()


def vit() -> nn.Module:
    """Return a ViT of transformers: patches of 8 x 8 pixels, width 64, 4 layers, 2 heads."""
    from transformers import ViTConfig, ViTForImageClassification

    size = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    image = {"image_size": 32, "patch_size": 8, "num_labels": 10}
    return ViTForImageClassification(ViTConfig(intermediate_size=128, **size, **image))


LAYERS: Views = {
    "everything": ("*",),
    "conv1": ("conv1.*",),
    "conv2": ("conv2.*",),
    "dense1": ("dense1.*",),
    "dense1, weight alone": ("dense1.weight",),
    "dense2 (the head)": ("dense2.*",),
    "all biases": ("*.bias",),
}
NORMS: Views = {"all norms": ("type:GroupNorm",)}
VIT: Views = {
    "everything": ("*",),
    "patch and position embeddings": ("*embeddings.*",),
    "position embeddings": ("*position_embeddings",),
    "patch embeddings": ("*patch_embeddings.*",),
    "first attention": ("*layers.0.attention.*",),
    "first attention's query": ("*layers.0.attention.q_proj.weight",),
    "second attention": ("*layers.1.attention.*",),
    "first dense layers": ("*layers.0.mlp.*",),
    "the head": ("classifier.*",),
    "all norms": ("type:LayerNorm",),
    "all biases": ("*.bias",),
}


def _ladder(name: str) -> Views:
    return {"everything": ("*",)} | {k: v for k, v in MODELS[name].ladder.items() if k != "full"}


def _groups(name: str, named: bool = True) -> Views:
    groups = enumerate(MODELS[name].groups, 1)
    return {f"#{i}" + f" ({g[0].removesuffix('.*')})" * named: g for i, g in groups}


def _budget(evaluations: int, steps: int, tv: float = 1e-2) -> dict[str, float]:
    chosen = {"restarts": 1, "max_evaluations": evaluations, "newton_steps": 0}
    return chosen | {"steps": steps, "tv": tv}


SMALL, RELU, LARGE = _budget(300, 150), _budget(200, 1000), _budget(60, 60)
FEATURES = _budget(200, 0, 0.0)
TOKEN = 12  # evaluations of gradient matching where it is not searched: some attack must apply
UNSEARCHED = "not searched"
STEM: Views = {"stem": ("stem.*",), "head": ("head.*",)}
SUBJECTS = (
    Subject("LeNet, tanh (small, smooth)", lenet, clothes, LAYERS, SMALL, search=True),
    Subject(
        "LeNet, tanh, after 150 steps of Adam", trained_lenet, clothes, LAYERS, SMALL, search=True
    ),
    Subject(
        "EMNIST CNN (FedPT)",
        partial(seeded, build_network, "emnist_cnn"),
        clothes,
        _ladder("emnist_cnn") | LAYERS | NORMS,
        RELU,
        search=True,
    ),
    Subject("ViT, 4 layers", partial(seeded, vit), partial(photos, 32), VIT, SMALL, search=True),
    Subject(
        "ResNet-8 (FedPart)",
        partial(seeded, build_network, "resnet8"),
        partial(photos, 32),
        _ladder("resnet8") | _groups("resnet8") | NORMS,
        LARGE,
    ),
    Subject(
        "ResNet-18 with group norm (FedPT)",
        partial(seeded, build_network, "resnet18_gn"),
        partial(photos, 24),
        _ladder("resnet18_gn") | STEM | NORMS,
        LARGE,
    ),
)

SONNET = """shall i compare thee to a summers day thou art more lovely and more temperate
rough winds do shake the darling buds of may and summers lease hath all too short a date
sometime too hot the eye of heaven shines and often is his gold complexion dimmed
and every fair from fair sometime declines by chance or natures changing course untrimmed
but thy eternal summer shall not fade nor lose possession of that fair thou owst
nor shall death brag thou wanderst in his shade when in eternal lines to time thou growst
so long as men can breathe or eyes can see so long lives this and this gives life to thee"""
VOCABULARY, WORDS, SENTENCES, PRIVATE = 2000, 8, 12, (0, 5)
RARE = 5  # ids below it are left out, as special tokens are


def sentences() -> Tensor:
    """Return lines of a sonnet as ids (12, 8): a word's id is its hash."""
    ids = [RARE + zlib.crc32(word.encode()) % (VOCABULARY - RARE) for word in SONNET.split()]
    return torch.tensor(ids[: SENTENCES * WORDS]).reshape(SENTENCES, WORDS)


@dataclass(frozen=True)
class TextSubject:
    """A network of token ids; ``classes`` is 0 for one that predicts the next token."""

    name: str
    build: Callable[[], nn.Module]
    views: Views
    classes: int = 0


def small_bert(positions: int = WORDS) -> nn.Module:
    """Return a BERT of two layers that classifies."""
    from transformers import BertConfig, BertForSequenceClassification

    size = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": positions}
    return BertForSequenceClassification(BertConfig(intermediate_size=256, **size, **text))


def lora(first_round: bool) -> nn.Module:
    """Return a small BERT with LoRA on query and value, of rank 32."""
    from peft import LoraConfig, get_peft_model

    wanted = LoraConfig(r=32, lora_alpha=32, target_modules=["query", "value"])
    model = get_peft_model(small_bert(), wanted)
    model.requires_grad_(True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name and not first_round:
            nn.init.normal_(parameter, std=0.02)
    return model


class Adapter(nn.Module):
    """A bottleneck beside the identity (Houlsby et al. 2019); its last layer is not zero."""

    def __init__(self, width: int, inner: int = 32) -> None:
        super().__init__()
        self.down = nn.Linear(width, inner)
        self.up = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same shape."""
        added: Tensor = self.up(nn.functional.gelu(self.down(x)))
        return x + added


def adapted() -> nn.Module:
    """Return a small BERT with an adapter after each attention and each dense pair."""
    model = small_bert()
    for layer in model.bert.encoder.layer:
        for part in (layer.attention.output, layer.output):
            part.dense = nn.Sequential(part.dense, Adapter(part.dense.out_features))
    return model


def prompted() -> nn.Module:
    """Return a small BERT with a prompt of four trained vectors."""
    from peft import PromptTuningConfig, get_peft_model

    wanted = PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4)
    model = get_peft_model(small_bert(WORDS + 4), wanted)
    model.requires_grad_(True)
    return model


WORD_LM: Views = {
    "embedding": ("embedding.*",),
    "first attention": ("layers.0.attention.*",),
    "first dense layer of layer 0": ("layers.0.linear1.*",),
    "last dense layer of layer 2": ("layers.2.linear2.*",),
    "all norms": ("type:LayerNorm",),
    "all biases": ("*.bias",),
}
LORA: Views = {
    "A and B": ("*lora_[AB]*",),
    "A": ("*lora_A*",),
    "B": ("*lora_B*",),
    "A of the first layer's query": ("*layer.0.*query.lora_A*",),
    "A of the second layer": ("*layer.1.*lora_A*",),
    "the head": ("*classifier.*",),
}
ADAPTERS: Views = {
    "all adapters": ("*.dense.1.*",),
    "the first adapter": ("*layer.0.attention.output.dense.1.*",),
    "its first layer": ("*layer.0.attention.output.dense.1.down.*",),
    "the last adapter": ("*layer.1.output.dense.1.*",),
    "adapters and head": ("*.dense.1.*", "classifier.*"),
}
PROMPT: Views = {
    "the prompt": ("prompt_encoder.*",),
    "prompt and head": ("prompt_encoder.*", "*classifier.*"),
}
TEXTS = (
    TextSubject(
        "Word transformer (FedPT)",
        partial(build_network, "word_lm", vocabulary=VOCABULARY),
        _ladder("word_lm") | WORD_LM,
    ),
    TextSubject(
        "Text classifier (FedPart)",
        partial(build_network, "text_transformer", vocabulary=VOCABULARY),
        _ladder("text_transformer") | _groups("text_transformer", named=False),
        classes=5,
    ),
    TextSubject("LoRA transformer, a later round", partial(lora, False), LORA, classes=2),
    TextSubject("LoRA transformer, the first round", partial(lora, True), LORA, classes=2),
    TextSubject("Transformer with adapters", adapted, ADAPTERS, classes=2),
    TextSubject("Transformer with a prompt", prompted, PROMPT, classes=2),
)
KNOWN = 0.9  # F1 of the bag of words above which it counts as known
ORDERED = 0.8  # mean ROUGE-L above which the sentences count as nearly read
EXCHANGES = 2000  # updates computed to put tokens into sentences
TEXT = {
    "vocabulary": VOCABULARY,
    "words": WORDS,
    "sentences": len(PRIVATE),
    "exchanges": EXCHANGES,
}


def audit_text(subject: TextSubject) -> list[dict[str, Any]]:
    """Return a row per part: what is read of two sentences, and what a guess would score."""
    model, lines = seeded(subject.build), sentences()
    tokens = lines[list(PRIVATE)]
    public = [line.tolist() for i, line in enumerate(lines) if i not in PRIVATE]
    truth = [tuple(line) for line in tokens.tolist()]
    guess = unigram_guess(public, WORDS)
    y = torch.arange(len(tokens)) % subject.classes if subject.classes else None
    total = sum(parameter.numel() for parameter in model.parameters())
    rows = []
    for name, patterns in subject.views.items():
        visible = matching_parameters(model, patterns)
        began = time.process_time()
        seen = observe_text(model, tokens, y, visible=visible, reveal_labels=False)
        count = sum(value.numel() for value in seen.update.values())
        row = {"view": name, "visible": count, "share": count / total}
        row |= read(model, seen, truth) | {"cpu_seconds": time.process_time() - began}
        row["guess_rouge"] = mean(rouge_l(guess, one) for one in truth)
        row["guess_f1"] = mean(token_f1(guess, one) for one in truth)
        frame.show(f"{subject.name} | {name}", row, "verdict")
        rows.append(row)
    return rows


def read(
    model: nn.Module, seen: TextObservation, truth: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """Return what the span test and the rows of the embedding give away."""
    if not any(bool(value.any()) for value in seen.update.values()):
        return {"verdict": "nothing sent", "bag_f1": None, "rouge": None, "exact": 0}
    flat = sorted({token for one in truth for token in one})
    spans, rows = span_test(model, seen, exchanges=EXCHANGES), bag_of_tokens(model, seen)
    bags = [set(spans.bag)] if spans is not None else []
    bags += [set(rows.tolist())] if rows is not None else []
    bag = max((token_f1(sorted(one), flat) for one in bags), default=0.0)
    scores = text_scores(spans.sentences, truth) if spans is not None else []
    exact = sum(one.exact for one in scores)
    rouge = sum(one.rouge for one in scores) / len(truth)
    verdict = "its words" if bag > KNOWN else "not read"
    if rouge >= ORDERED:
        verdict = "read" if exact == len(truth) else "nearly read"
    match = None if spans is None or spans.match == float("inf") else spans.match
    return {"verdict": verdict, "exact": exact, "rouge": rouge, "bag_f1": bag, "match": match}


@dataclass(frozen=True)
class SumSubject:
    """A network, of whose clients the server sees sums; all parameters are sent."""

    name: str
    build: Callable[[], nn.Module]
    images: Callable[[], Images] | None = None  # None for sentences of random words


def relu_dense() -> nn.Module:
    """Return two dense layers with ReLU between them."""
    layers = nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)
    return nn.Sequential(nn.Flatten(), *layers)


CLIENTS, NOISES = (1, 5, 20, 100), (0.0, 1.0)
SUM_BUDGET, NOISED_BUDGET = _budget(100, 60), _budget(20, 0)  # under noise each takes longer
SUM_SETTINGS = {"budget": SUM_BUDGET, "noised": NOISED_BUDGET, "clients": list(CLIENTS)}
OTHERS = 100  # images of no client, which members are told apart from
SUMS = (
    SumSubject("Sums of clients: LeNet, tanh", lenet, clothes),
    SumSubject("Sums of clients: dense network, ReLU", partial(seeded, relu_dense), clothes),
    SumSubject(
        "Sums of clients: word transformer",
        partial(seeded, build_network, "word_lm", vocabulary=VOCABULARY),
    ),
)


def audit_sum(subject: SumSubject, clients: int, noise: float) -> dict[str, Any]:
    """Return what a sum of the updates of clients with one example each gives away."""
    began, model = time.process_time(), subject.build()
    options = {"transform": f"sum:{clients}" if clients > 1 else "none"}
    options |= {"clip": 1.0, "noise_multiplier": noise} if noise else {}
    row: dict[str, Any] = {"clients": clients, "noise_multiplier": noise}
    if subject.images is None:
        draw = torch.Generator().manual_seed(0)
        lines = torch.randint(RARE, VOCABULARY, (clients + SENTENCES, WORDS), generator=draw)
        truth = [tuple(line) for line in lines[:clients].tolist()]
        seen = observe_text(model, lines[:clients], **options, generator=draw)
        row |= read(model, seen, truth)
        row["guess_f1"] = token_f1(unigram_guess(lines[clients:].tolist(), WORDS), truth[0])
    else:
        images = subject.images()
        (x, y), (decoys, labels) = images.rows(0, clients), images.rows(clients, OTHERS)
        told = {"adversaries": ("recipient" if noise else "server",), "batch": 1}
        attacks = suite(**(NOISED_BUDGET if noise else SUM_BUDGET))
        report = leakage(
            *(model, x, y),
            views={"everything": ["*"]},
            attacks=attacks,
            dataset_mean=decoys.mean(0),
            **told,
            **options,
        )
        whole = report.rows[0].to_dict()
        shown = ("verdict", "verdicts", "attack", "psnr", "baseline_median", "recovered")
        row |= {name: whole[name] for name in shown}
        draw = torch.Generator().manual_seed(0)
        seen = observe(model, x, y, **options, generator=draw)
        scores = [likeness(model, seen.update, *one) for one in ((x, y), (decoys, labels))]
        row["auc"] = float(mannwhitneyu(*scores).statistic) / (clients * OTHERS)
    if noise:
        row["epsilon"] = guarantee(
            Independent(1), Participation(1), noise_multiplier=noise
        ).epsilon(1e-5)
    row["cpu_seconds"] = time.process_time() - began
    frame.show(f"{subject.name} | {clients} | {noise:g}", row, "verdict")
    return row


def likeness(model: nn.Module, update: Mapping[str, Tensor], x: Tensor, y: Tensor) -> list[float]:
    """Return the cosine of an update and of the update of each candidate by itself."""
    scores = []
    for i in range(len(x)):
        own = observe(model, x[i : i + 1], y[i : i + 1]).update
        inner = sum(float((own[name] * value).sum()) for name, value in update.items())
        scores.append(inner / sum(float(value.square().sum()) for value in own.values()) ** 0.5)
    return scores


def rows_of_sums(name: str) -> dict[str, Any]:
    """Return the rows of sums of one network."""
    torch.set_num_threads(1)
    began = time.process_time()
    subject = next(one for one in SUMS if one.name == name)
    rows = [audit_sum(subject, clients, noise) for clients in CLIENTS for noise in NOISES]
    kind = "sums of text" if subject.images is None else "sums of images"
    spent = {"cpu_seconds": time.process_time() - began, "machine": frame.where()}
    return {"name": name, "kind": kind, "settings": SUM_SETTINGS, **spent, "rows": rows}


def settings(subject: Subject | TextSubject, search: bool) -> dict[str, Any]:
    """Return what the rows of a subject depend on, beside the code."""
    if isinstance(subject, TextSubject):
        return TEXT
    searched = search or subject.search
    budget = dict(subject.budget if searched else FEATURES)
    return {"budget": budget, "searched": searched, "trials": subject.trials, "decoys": DECOYS}


def attacks_of(chosen: Mapping[str, Any]) -> dict[str, ImageAttack]:
    """Return the attacks, the one first that is cheapest where it works."""
    every = suite(**chosen["budget"])
    if not chosen["searched"]:
        brief = suite(**{**chosen["budget"], "max_evaluations": TOKEN})
        return every | {"dlg": brief["dlg"], "dlg + statistics": brief["dlg + statistics"]}
    return {"dlg": every["dlg"], **every}


def audit(
    subject: Subject,
    chosen: Mapping[str, Any],
    done: MutableMapping[str, dict[str, Reconstruction]],
    only: str | None = None,
) -> LeakageReport:
    """Attack every part, or only one; what ``done`` holds is not computed again."""
    model, images = subject.build(), subject.images()
    x, y = images.rows(0, subject.trials)
    views = {
        name: matching_parameters(model, own)
        for name, own in subject.views.items()
        if only in {None, name}
    }
    return leakage(
        model,
        x,
        y,
        views=views,
        attacks=attacks_of(chosen),
        decoys=None if only else images.rows(max(subject.trials, LABELLED), DECOYS),
        done=done,
        progress=lambda message: print(f"{subject.name} | {message}", flush=True),
    )


def store(subject: Subject, out: Path, number: int) -> Path:
    """Return the folder of one part, in which its trials and processor seconds are kept."""
    name = subject.name.split(" (")[0].replace(", ", "-").replace(" ", "-")
    return out / name / f"{number:02}"


def explore(name: str, number: int, chosen: Mapping[str, Any], out: Path) -> None:
    """Attack one part of a network; what it finds is kept in ``out``."""
    torch.set_num_threads(1)
    began = time.process_time()
    subject = next(one for one in SUBJECTS if one.name == name)
    folder = store(subject, out, number)
    done = TrialFolder(folder, dict(chosen), name)
    audit(subject, chosen, done, only=list(subject.views)[number])
    path = folder / "seconds"
    before = float(path.read_text()) if path.exists() else 0.0
    path.write_text(repr(before + time.process_time() - began))


def rows_of(name: str, chosen: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Return the rows of a network, of what ``explore`` has found of its parts."""
    torch.set_num_threads(1)
    began, before = time.process_time(), 0.0
    subject = next(one for one in (*SUBJECTS, *TEXTS) if one.name == name)
    if isinstance(subject, TextSubject):
        rows = audit_text(subject)
    else:
        folders = [store(subject, out, number) for number in range(len(subject.views))]
        before = sum(float((folder / "seconds").read_text()) for folder in folders)
        parts = [TrialFolder(folder, dict(chosen), name) for folder in folders]
        report = audit(subject, chosen, ChainMap({}, *parts))
        model, images = subject.build(), subject.images()
        rows = [
            brief(row.to_dict(), chosen["searched"])
            | {"labels": inferred(model, images, row.patterns)}
            for row in report.rows
        ]
    return {
        "name": name,
        "machine": frame.where(),
        "kind": "text" if isinstance(subject, TextSubject) else "images",
        "settings": dict(chosen),
        "cpu_seconds": before + time.process_time() - began,
        "rows": rows,
    }


def inferred(model: nn.Module, images: Images, names: tuple[str, ...]) -> str:
    """Return how many hidden labels of an update of several images a part gives away."""
    x, y = images.rows(0, LABELLED)
    seen = observe(model, x, y, visible=names, reveal_labels=False)
    try:
        guessed = label_candidates(model, seen)[0]
    except ConfigError:
        return "not in this part"
    right = sum(min(int((guessed == k).sum()), int((y == k).sum())) for k in set(y.tolist()))
    return f"{right} of {LABELLED}"


def brief(row: dict[str, Any], searched: bool) -> dict[str, Any]:
    """Return what the map shows of a row of the report."""
    if not searched and row["verdict"] in {"attack failed", "ambiguous"}:
        row = row | {"verdict": UNSEARCHED, "attack": "-", "psnr": [None] * len(row["psnr"])}
    shown = ("view", "visible", "share", "verdict", "verdicts", "attack", "found_in", "psnr")
    shown += ("psnr_alone", "baseline_median", "reid_rank", "by_attack", "match_median", "seconds")
    exact = [name for name, error in row["feature_error"].items() if error <= EXACT]
    return {name: row[name] for name in shown} | {"inputs_read": exact}


HEAD = ["part sent", "share", "verdict", "PSNR (no attack)", "best attack", "rank of 10"]
HEAD += ["labels", "inputs read"]
TEXT_HEAD = [*HEAD[:3], "ROUGE-L (guess)", "F1 of the words (guess)"]
SUM_HEAD = ["the server sees", "noise multiplier", "epsilon", "verdict"]
IMAGE_SUM_HEAD = [*SUM_HEAD, "recovered", "PSNR: median, max (no attack)", "members told apart"]
TEXT_SUM_HEAD = [*SUM_HEAD, "sentences exact", "F1 of the words (guess)"]


def table(document: Mapping[str, Any]) -> str:
    """Return the map as Markdown."""
    parts = []
    for subject in document["subjects"]:
        head, line = {
            "text": (TEXT_HEAD, _text_line),
            "images": (HEAD, _line),
            "sums of images": (IMAGE_SUM_HEAD, _sum_line),
            "sums of text": (TEXT_SUM_HEAD, _sum_line),
        }[subject["kind"]]
        rows = [line(row) for row in subject["rows"]]
        parts.append(f"**{subject['name']}**\n\n{frame.markdown(head, rows)}\n")
    return "\n".join(parts)


def _cells(row: Mapping[str, Any]) -> list[str]:
    share = 100 * row["share"]
    return [row["view"], f"{share:.3g} %" if share > 1 else f"{share:.1g} %", row["verdict"]]


def _text_line(row: Mapping[str, Any]) -> list[str]:
    if row["bag_f1"] is None:
        return [*_cells(row), "-", "-"]
    pairs = (("rouge", "guess_rouge"), ("bag_f1", "guess_f1"))
    return _cells(row) + [f"{row[score]:.2f} ({row[guess]:.2f})" for score, guess in pairs]


def _sum_line(row: Mapping[str, Any]) -> list[str]:
    clients, noise = row["clients"], row["noise_multiplier"]
    cells = ["one client" if clients == 1 else f"a sum of {clients}", f"{noise:g}"]
    cells += [up(row["epsilon"], 3) if noise else "infinite", row["verdict"]]
    if "psnr" not in row:
        f1 = f"{row['bag_f1']:.2f} ({row['guess_f1']:.2f})"
        return [*cells, f"{row['exact']} of {clients}", f1]
    middle, most = median_high(row["psnr"]), max(row["psnr"])
    psnr = f"{middle:.1f}, {most:.1f} ({row['baseline_median']:.1f})"
    return [*cells, f"{row['recovered']} of {clients}", psnr, f"{row['auc']:.2f}"]


def _line(row: Mapping[str, Any]) -> list[str]:
    scores = [value for value in row["psnr"] if value is not None]
    psnr = f"{median_high(scores):.1f}" if scores else "-"
    return [
        *_cells(row),
        f"{psnr} ({row['baseline_median']:.1f})",
        row["attack"],
        ", ".join(map(str, row["reid_rank"])) or "-",
        row["labels"],
        ", ".join(row["inputs_read"]) or "-",
    ]


def main() -> None:
    """Audit every subject that the results lack, and print the table."""
    given = frame.options(
        __doc__,
        RESULT.name,
        quick={"only": ["first round", "ViT"], "out": Path("out") / "leakage-map-quick"},
        out=Path("out") / "leakage-map",
        only={"nargs": "*", "help": "parts of the subjects' names"},
        search=False,
        processes=1,
    )
    packages = ("torch", "numpy", "scipy", "transformers", "peft")
    result = frame.Result(given.result, *packages, indent=1, processes=given.processes)
    done = {one["name"]: one for one in result.old.get("subjects", ())}
    todo: dict[str, tuple[Subject | TextSubject, dict[str, Any]]] = {}
    for subject in (*TEXTS, *SUBJECTS):
        chosen = settings(subject, given.search)
        if given.quick and isinstance(subject, Subject):
            chosen |= {"budget": _budget(2, 1)}
        wanted = given.only is None or any(part in subject.name for part in given.only)
        if wanted and done.get(subject.name, {}).get("settings") != chosen:
            todo[subject.name] = subject, chosen
    parts = [
        partial(explore, name, number, chosen, given.out)
        for name, (subject, chosen) in todo.items()
        if isinstance(subject, Subject)
        for number in range(len(subject.views))
    ]
    for _ in frame.finished(parts, given.processes):
        pass  # kept in --out
    rows: list[Callable[[], dict[str, Any]]] = [
        partial(rows_of, name, chosen, given.out) for name, (_, chosen) in todo.items()
    ]
    subjects: list[dict[str, Any]] = []
    rows += [
        partial(rows_of_sums, subject.name)
        for subject in SUMS
        if given.only is None or any(part in subject.name for part in given.only)
        if done.get(subject.name, {}).get("settings") != SUM_SETTINGS
    ]
    for one in frame.finished(rows, given.processes):
        done[one["name"]] = one
        subjects = [done[each.name] for each in (*SUBJECTS, *TEXTS, *SUMS) if each.name in done]
        result.write(method=__doc__, subjects=subjects)
    print(table({"subjects": subjects or list(done.values())}))


if __name__ == "__main__":
    main()
