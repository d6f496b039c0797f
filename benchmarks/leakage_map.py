"""Leakage map: which part of a model gives away what, for the papers' networks and a LoRA one.

Run: ``python benchmarks/leakage_map.py --processes 2``; writes results/leakage_map.json and prints
the table that docs/what-leaks.md shows. It resumes: what a run that was cut off has found is in
--out, and is not computed again. Images are attacked at start values, in batches of one, with
labels known; a second update of four images, labels hidden, is for the column of labels.

On the two ResNets, which are deep and have ReLU, matching gradients finds no picture in an
affordable time, so only closed forms and the inversion of a dense layer's input are tried, unless
--search is given; a row that none of them solves says "not searched".

Two small smooth networks stand first: attacks work there, so that a part's row says what the part
holds, and not what the attack lacks.
"""

import argparse
import json
import os
import time
import zlib
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy loads

import torch
from audit_peers import photographs
from machine import machine
from processes import finished
from torch import Tensor, nn

from accounting.checks import ConfigError
from attacks import LeakageReport, leakage, networks, observe, suite
from attacks.audit import Found
from attacks.reconstruction.labels import label_candidates
from attacks.suite import Attack
from attacks.text.bag import bag_of_tokens
from attacks.text.observation import TextObservation, observe_text
from attacks.text.read import span_test
from attacks.text.score import rouge_l, text_scores, token_f1, unigram_guess
from privpart.cli.audit.store import TrialFolder
from privpart.data.tasks import fashion_mnist
from privpart.models import MODELS, build_network
from privpart.patterns import matching_parameters

RESULT = Path(__file__).parent / "results" / "leakage_map.json"
DECOYS = 9
EXACT = 1e-3  # relative error below which the input of a dense layer counts as read
LABELLED = 4  # images of the update whose labels are hidden
DATA = Path(os.environ["FASHION_MNIST"]) if "FASHION_MNIST" in os.environ else None


@dataclass(frozen=True)
class Images:
    """Public and private images of one kind; those of one batch differ in their labels."""

    x: Tensor
    y: Tensor

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the first images."""
        return self.x[:size], self.y[:size]

    def decoys(self, first: int) -> tuple[Tensor, Tensor]:
        """Return images that come after the first ones."""
        return self.x[first : first + DECOYS], self.y[first : first + DECOYS]


@dataclass(frozen=True)
class Subject:
    """A network, the parts that are audited, and the budget of the attacks.

    ``search`` says whether gradient matching is tried, beside closed forms.
    """

    name: str
    build: Callable[[], nn.Module]
    images: Callable[[], Images]
    views: Mapping[str, tuple[str, ...]]
    budget: Mapping[str, float]
    search: bool = False
    trials: int = 1


def clothes() -> Images:
    """Return Fashion-MNIST's first test image of each label, and more images after them."""
    task = fashion_mnist(DATA)
    x, y = task.test_x[:400], task.test_y[:400]
    first = [int((y == label).nonzero()[0]) for label in range(10)]
    rest = [i for i in range(len(y)) if i not in first]
    rows = torch.tensor([*first, *rest])
    return Images(x[rows], y[rows])


def photos(size: int) -> Callable[[], Images]:
    """Return a function that returns photographs cut to a size, with ten labels in turn."""

    def cut() -> Images:
        x = photographs()
        edge = (x.shape[-1] - size) // 2
        return Images(x[..., edge : edge + size, edge : edge + size], torch.arange(len(x)) % 10)

    return cut


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """Return a network in eval mode with torch's start values of seed 0."""
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        return build().eval()


def trained_lenet() -> nn.Module:
    """Return the smooth LeNet after 150 steps of Adam on 32 clothes each."""
    task = fashion_mnist(DATA)
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

    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    return ViTForImageClassification(config)


LAYERS = {
    "everything": ("*",),
    "conv1": ("conv1.*",),
    "conv2": ("conv2.*",),
    "dense1": ("dense1.*",),
    "dense1, weight alone": ("dense1.weight",),
    "dense2 (the head)": ("dense2.*",),
    "all biases": ("*.bias",),
}
NORMS = {"all norms": ("type:GroupNorm",)}
SMALL = {"restarts": 1, "max_evaluations": 300, "newton_steps": 0, "steps": 150, "tv": 1e-2}
RELU = {"restarts": 1, "max_evaluations": 200, "newton_steps": 0, "steps": 1000, "tv": 1e-2}
LARGE = {"restarts": 1, "max_evaluations": 60, "newton_steps": 0, "steps": 60, "tv": 1e-2}
FEATURES = {"restarts": 1, "max_evaluations": 200, "newton_steps": 0, "steps": 0, "tv": 0.0}
TOKEN = 12  # evaluations of gradient matching where it is not searched: some attack must apply
UNSEARCHED = "not searched"


def _ladder(name: str) -> dict[str, tuple[str, ...]]:
    return {"everything": ("*",)} | {k: v for k, v in MODELS[name].ladder.items() if k != "full"}


SUBJECTS = (
    Subject(
        "LeNet, tanh (small, smooth)",
        lambda: networks.smooth_lenet(torch.Generator().manual_seed(0), size=28),
        clothes,
        LAYERS,
        SMALL,
        search=True,
    ),
    Subject(
        "LeNet, tanh, after 150 steps of Adam",
        trained_lenet,
        clothes,
        LAYERS,
        SMALL,
        search=True,
    ),
    Subject(
        "EMNIST CNN (FedPT)",
        lambda: seeded(lambda: build_network("emnist_cnn")),
        clothes,
        {"everything": ("*",)} | _ladder("emnist_cnn") | LAYERS | NORMS,
        RELU,
        search=True,
    ),
    Subject(
        "ViT, 4 layers",
        lambda: seeded(vit),
        photos(32),
        {
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
        },
        SMALL,
        search=True,
    ),
    Subject(
        "ResNet-8 (FedPart)",
        lambda: seeded(lambda: build_network("resnet8")),
        photos(32),
        _ladder("resnet8")
        | {
            f"#{i + 1} ({g[0].removesuffix('.*')})": g
            for i, g in enumerate(MODELS["resnet8"].groups)
        }
        | NORMS,
        LARGE,
    ),
    Subject(
        "ResNet-18 with group norm (FedPT)",
        lambda: seeded(lambda: build_network("resnet18_gn")),
        photos(24),
        _ladder("resnet18_gn") | {"stem": ("stem.*",), "head": ("head.*",)} | NORMS,
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
    views: Mapping[str, tuple[str, ...]]
    classes: int = 0


def small_bert(positions: int = WORDS) -> nn.Module:
    """Return a BERT of two layers that classifies."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=positions,
    )
    return BertForSequenceClassification(config)


def lora(first_round: bool) -> nn.Module:
    """Return a small BERT with LoRA on query and value, of rank 32."""
    from peft import LoraConfig, get_peft_model

    wanted = LoraConfig(r=32, lora_alpha=32, target_modules=["query", "value"])
    model = get_peft_model(small_bert(), wanted)
    model.requires_grad_(True)
    if not first_round:
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
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


LORA = {
    "A and B": ("*lora_[AB]*",),
    "A": ("*lora_A*",),
    "B": ("*lora_B*",),
    "A of the first layer's query": ("*layer.0.*query.lora_A*",),
    "A of the second layer": ("*layer.1.*lora_A*",),
    "the head": ("*classifier.*",),
}
ADAPTERS = {
    "all adapters": ("*.dense.1.*",),
    "the first adapter": ("*layer.0.attention.output.dense.1.*",),
    "its first layer": ("*layer.0.attention.output.dense.1.down.*",),
    "the last adapter": ("*layer.1.output.dense.1.*",),
    "adapters and head": ("*.dense.1.*", "classifier.*"),
}
PROMPT = {
    "the prompt": ("prompt_encoder.*",),
    "prompt and head": ("prompt_encoder.*", "*classifier.*"),
}
TEXTS = (
    TextSubject(
        "Word transformer (FedPT)",
        lambda: build_network("word_lm", vocabulary=VOCABULARY),
        _ladder("word_lm")
        | {
            "embedding": ("embedding.*",),
            "first attention": ("layers.0.attention.*",),
            "first dense layer of layer 0": ("layers.0.linear1.*",),
            "last dense layer of layer 2": ("layers.2.linear2.*",),
            "all norms": ("type:LayerNorm",),
            "all biases": ("*.bias",),
        },
    ),
    TextSubject(
        "Text classifier (FedPart)",
        lambda: build_network("text_transformer", vocabulary=VOCABULARY),
        _ladder("text_transformer")
        | {f"#{i + 1}": g for i, g in enumerate(MODELS["text_transformer"].groups)},
        classes=5,
    ),
    TextSubject("LoRA transformer, a later round", partial(lora, False), LORA, classes=2),
    TextSubject("LoRA transformer, the first round", partial(lora, True), LORA, classes=2),
    TextSubject("Transformer with adapters", adapted, ADAPTERS, classes=2),
    TextSubject("Transformer with a prompt", prompted, PROMPT, classes=2),
)


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
        row["guess_rouge"] = sum(rouge_l(guess, one) for one in truth) / len(truth)
        row["guess_f1"] = sum(token_f1(guess, one) for one in truth) / len(truth)
        print(f"{subject.name} | {name}: {row['verdict']}", flush=True)
        rows.append(row)
    return rows


def read(
    model: nn.Module, seen: TextObservation, truth: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """Return what the span test and the rows of the embedding give away."""
    if not any(bool(value.any()) for value in seen.update.values()):
        return {"verdict": "nothing sent", "bag_f1": None, "rouge": None, "exact": 0}
    flat = {token for one in truth for token in one}
    found = span_test(model, seen, exchanges=EXCHANGES)
    bags = [set(found.bag)] if found is not None else []
    rows = bag_of_tokens(model, seen)
    if rows is not None:
        bags.append(set(rows.tolist()))
    bag = max((token_f1(sorted(one), sorted(flat)) for one in bags), default=0.0)
    scores = text_scores(found.sentences, truth) if found is not None else []
    exact = sum(one.exact for one in scores)
    rouge = sum(one.rouge for one in scores) / len(truth)
    verdict = "not read"
    if bag > KNOWN:
        verdict = "its words"
    if rouge >= ORDERED:
        verdict = "read" if exact == len(truth) else "nearly read"
    return {
        "verdict": verdict,
        "exact": exact,
        "rouge": rouge,
        "bag_f1": bag,
        "match": found.match if found is not None and found.match < float("inf") else None,
    }


KNOWN = 0.9  # F1 of the bag of words above which it counts as known
ORDERED = 0.8  # mean ROUGE-L above which the sentences count as nearly read
EXCHANGES = 2000  # updates computed to put tokens into sentences
TEXT = {
    "vocabulary": VOCABULARY,
    "words": WORDS,
    "sentences": len(PRIVATE),
    "exchanges": EXCHANGES,
}


def settings(subject: Subject, search: bool) -> dict[str, Any]:
    """Return what the rows of a subject depend on, beside the code."""
    searched = search or subject.search
    budget = subject.budget if searched else FEATURES
    return {"budget": dict(budget), "searched": searched} | {
        "trials": subject.trials,
        "decoys": DECOYS,
    }


def attacks_of(chosen: Mapping[str, Any]) -> dict[str, Attack]:
    """Return the attacks, the one first that is cheapest where it works."""
    every = suite(**chosen["budget"])
    if not chosen["searched"]:
        brief = suite(**{**chosen["budget"], "max_evaluations": TOKEN})
        return every | {"dlg": brief["dlg"], "dlg + statistics": brief["dlg + statistics"]}
    return {"dlg": every["dlg"], **every}


def audit(
    subject: Subject,
    chosen: Mapping[str, Any],
    done: MutableMapping[str, Found],
    only: str | None = None,
) -> LeakageReport:
    """Attack every part, or only one; what ``done`` holds is not computed again."""
    model, images = subject.build(), subject.images()
    x, y = images.batch(subject.trials)
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
        decoys=None if only else images.decoys(max(subject.trials, LABELLED)),
        done=done,
        progress=lambda message: print(f"{subject.name} | {message}", flush=True),
    )


class Kept:
    """What has been found of each part of a network, and the processor seconds spent on it."""

    def __init__(self, subject: Subject, chosen: Mapping[str, Any], out: Path) -> None:
        self.folder = out / subject.name.split(" (")[0].replace(", ", "-").replace(" ", "-")
        self.chosen = dict(chosen)
        self.name = subject.name

    def part(self, number: int) -> TrialFolder:
        """Return the store of one part: each has its own, for processes side by side."""
        return TrialFolder(self.folder / f"{number:02}", self.chosen, self.name)

    def add_seconds(self, number: int, seconds: float) -> None:
        """Add processor seconds to those of a part."""
        path = self.folder / f"{number:02}" / "seconds"
        before = float(path.read_text()) if path.exists() else 0.0
        path.write_text(repr(before + seconds))

    def seconds(self) -> float:
        """Return the processor seconds of all parts, over all runs."""
        return sum(float(path.read_text()) for path in self.folder.glob("*/seconds"))


def explore(name: str, number: int, chosen: Mapping[str, Any], out: Path) -> None:
    """Attack one part of a network; what it finds is kept in ``out``."""
    torch.set_num_threads(1)
    began = time.process_time()
    subject = next(one for one in SUBJECTS if one.name == name)
    kept = Kept(subject, chosen, out)
    audit(subject, chosen, kept.part(number), only=list(subject.views)[number])
    kept.add_seconds(number, time.process_time() - began)


def told(name: str, chosen: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """Return the rows of a network, of what ``explore`` has found of its parts."""
    torch.set_num_threads(1)
    began = time.process_time()
    subject = next(one for one in (*SUBJECTS, *TEXTS) if one.name == name)
    if isinstance(subject, TextSubject):
        rows, before = audit_text(subject), 0.0
    else:
        kept = Kept(subject, chosen, out)
        before = kept.seconds()
        parts = [kept.part(number) for number in range(len(subject.views))]
        report = audit(subject, chosen, ChainMap({}, *parts))
        model, images = subject.build(), subject.images()
        rows = [
            brief(row.to_dict(), chosen["searched"])
            | {"labels": inferred(model, images, row.patterns)}
            for row in report.rows
        ]
    at = machine("torch")
    return {
        "name": name,
        "machine": f"{at['processor']}, {at['cores']} cores, torch {at['packages']['torch']}",
        "kind": "text" if isinstance(subject, TextSubject) else "images",
        "settings": dict(chosen),
        "cpu_seconds": before + time.process_time() - began,
        "rows": rows,
    }


def inferred(model: nn.Module, images: Images, names: tuple[str, ...]) -> str:
    """Return how many hidden labels of an update of several images a part gives away."""
    x, y = images.batch(LABELLED)
    seen = observe(model, x, y, visible=names, reveal_labels=False)
    try:
        found = label_candidates(model, seen)[0]
    except ConfigError:
        return "not in this part"
    right = sum(min(int((found == k).sum()), int((y == k).sum())) for k in set(y.tolist()))
    return f"{right} of {LABELLED}"


def brief(row: dict[str, Any], searched: bool) -> dict[str, Any]:
    """Return what the map shows of a row of the report."""
    if not searched and row["verdict"] in {"attack failed", "ambiguous"}:
        row = row | {"verdict": UNSEARCHED, "attack": "-", "psnr": [None] * len(row["psnr"])}
    kept = ("view", "visible", "share", "verdict", "verdicts", "attack", "found_in", "psnr")
    kept += ("psnr_alone", "baseline_median", "reid_rank", "by_attack", "match_median", "seconds")
    read = [name for name, error in row["feature_error"].items() if error <= EXACT]
    return {name: row[name] for name in kept} | {"inputs_read": read}


def table(document: Mapping[str, Any]) -> str:
    """Return the map as markdown."""
    lines = []
    for subject in document["subjects"]:
        text = subject["kind"] == "text"
        lines += [f"**{subject['name']}**", "", *(TEXT_HEAD if text else HEAD)]
        lines += [_text_line(row) if text else _line(row) for row in subject["rows"]]
        lines.append("")
    return "\n".join(lines)


HEAD = (
    "| part sent | share | verdict | PSNR (no attack) | best attack | rank of 10 | labels "
    "| inputs read |",
    "|---|---|---|---|---|---|---|---|",
)


TEXT_HEAD = (
    "| part sent | share | verdict | ROUGE-L (guess) | F1 of the words (guess) |",
    "|---|---|---|---|---|",
)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share > 0.01 else f"{100 * share:.1g} %"


def _text_line(row: Mapping[str, Any]) -> str:
    scores = ["-", "-"]
    if row["bag_f1"] is not None:
        kinds = (("rouge", "guess_rouge"), ("bag_f1", "guess_f1"))
        scores = [f"{row[found]:.2f} ({row[guess]:.2f})" for found, guess in kinds]
    cells = (row["view"], f"{_percent(row['share'])}", row["verdict"], *scores)
    return f"| {' | '.join(cells)} |"


def _line(row: Mapping[str, Any]) -> str:
    ranks = ", ".join(str(rank) for rank in row["reid_rank"]) or "-"
    scores = sorted(value for value in row["psnr"] if value is not None)
    psnr = f"{scores[len(scores) // 2]:.1f}" if scores else "-"
    cells = (
        row["view"],
        f"{_percent(row['share'])}",
        row["verdict"],
        f"{psnr} ({row['baseline_median']:.1f})",
        row["attack"],
        ranks,
        row["labels"],
        ", ".join(row["inputs_read"]) or "-",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Audit every subject that the results lack, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out") / "leakage-map")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--only", nargs="*", default=None, help="parts of the subjects' names")
    parser.add_argument("--search", action="store_true", help="search on all networks: 30 minutes")
    parser.add_argument("--processes", type=int, default=1, help="parts at a time")
    options = parser.parse_args()
    done = {}
    if options.result.exists():
        done = {one["name"]: one for one in json.loads(options.result.read_text())["subjects"]}
    todo: dict[str, tuple[Subject | TextSubject, dict[str, Any]]] = {}
    for subject in (*TEXTS, *SUBJECTS):
        text = isinstance(subject, TextSubject)
        chosen = TEXT if text else settings(subject, options.search)
        wanted = options.only is None or any(part in subject.name for part in options.only)
        if wanted and done.get(subject.name, {}).get("settings") != chosen:
            todo[subject.name] = subject, chosen
    parts = [
        partial(explore, name, number, chosen, options.out)
        for name, (subject, chosen) in todo.items()
        if isinstance(subject, Subject)
        for number in range(len(subject.views))
    ]
    for _ in finished(parts, options.processes):
        pass  # kept in --out
    rows = [partial(told, name, chosen, options.out) for name, (_, chosen) in todo.items()]
    for one in finished(rows, options.processes):
        done[one["name"]] = one
        document = {
            "method": __doc__,
            "machine": machine("torch", "numpy", "scipy", "transformers", "peft")
            | {"processes": options.processes},
            "subjects": [done[one.name] for one in (*SUBJECTS, *TEXTS) if one.name in done],
        }
        options.result.write_text(json.dumps(document, indent=1) + "\n")
    print(table(json.loads(options.result.read_text())))


if __name__ == "__main__":
    main()
