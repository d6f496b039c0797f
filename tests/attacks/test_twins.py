"""Twins: every attack finds what is there, and nothing in an update of other data or of chance.

The table names every attack that an audit runs or that ``attacks`` exports; a test fails where one
is missing. Each attacks three updates: of its own data, of other data, and random values of the
same size. Verdicts are the report's own, so that its thresholds are tested as well.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from scipy.stats import binom
from sklearn.datasets import load_digits
from subjects import (
    AdaptedText,
    LoRA,
    Recurrent,
    Transformer,
    behind,
    dense,
    filled,
    normalised,
    seeded,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import attacks
from attacks import (
    ImageAudit,
    LocalSteps,
    Observation,
    Reconstruction,
    TextObservation,
    observe,
    observe_text,
)
from attacks.image_audit import score
from attacks.metrics import feature_error
from attacks.networks import relu_lenet, smooth_lenet, smooth_mlp
from attacks.reconstruction.batch_statistics import with_buffers
from attacks.reconstruction.labels import label_candidates
from attacks.reconstruction.single_step import before_step
from attacks.report import Guess, TextTrial
from attacks.text.read import ReadText
from attacks.text.score import text_scores, token_f1
from attacks.text_audit import text_suite
from privpart.data import tasks
from privpart.models.transformer import LanguageModel, TextClassifier

FAILED = "attack failed"
IMAGES = attacks.suite(restarts=1, max_evaluations=150, newton_steps=0, steps=150)
TEXTS = text_suite(exchanges=1500)
QUICK = attacks.suite(restarts=1, max_evaluations=20, newton_steps=0, steps=10)
QUICK_TEXTS = text_suite(exchanges=50)
DRAWS = 1000
CHANCE = {"chance", *(f"chance {seed}" for seed in range(DRAWS))}


@dataclass(frozen=True)
class Found:
    """What an attack found in one update."""

    own: set[str]  # verdicts against the attack's own data
    other: set[str]  # verdicts against the other data
    shown: frozenset[int] = frozenset()  # token ids that it says are in the update
    false: frozenset[int] = frozenset()  # those of them that the update is not of


def of_chance(seen: Observation, kind: str) -> Observation:
    """Return random values as long as each tensor of the update; "chance 7" draws by seed 7."""
    generator = seeded(int(kind.partition(" ")[2] or 2))
    update = {}
    for name, value in seen.update.items():
        drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        update[name] = drawn * (value.norm() / drawn.norm())
    return replace(seen, update=update)


# images


ROWS = [1500, 888, 10, 200, 57, 3, 700, 1234, 42, 1700]  # the first have a pixel of 1


@cache
def all_digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.images / 16)[:, None], torch.tensor(data.target)


def digits() -> tuple[Tensor, Tensor]:
    x, y = all_digits()
    return x[ROWS], y[ROWS]


@cache
def guesses(size: int) -> list[list[tuple[float, float]]]:
    """What an audit compares each image of both batches with."""
    (x, y), (images, labels) = digits(), all_digits()
    public = torch.ones(len(labels), dtype=torch.bool).index_fill(0, torch.tensor(ROWS), False)
    audit = ImageAudit(
        **{"model": lenet(), "x": x[: 2 * size], "y": y[: 2 * size], "views": {"v": ["*"]}},
        **{"dataset_mean": x[2 * size :].mean(0), "public": (images[public], labels[public])},
    )
    compared = list(zip(audit._floor, audit._chance, strict=True))
    return [compared[:size], compared[size:]]


def batches(size: int) -> dict[str, tuple[Tensor, Tensor]]:
    x, y = digits()
    return {"own": (x[:size], y[:size]), "other": (x[size : 2 * size], y[size : 2 * size])}


def on_images(
    attack: str,
    model: Callable[[], nn.Module],
    visible: list[str],
    *,
    size: int = 1,
    local: LocalSteps | None = None,
    buffers: bool = False,
    transform: str = "none",
) -> Callable[[str], Found]:
    @cache
    def sent(kind: str) -> tuple[nn.Module, Observation]:
        net, (x, y) = model(), batches(size)[kind]
        seen = observe(net, x, y, visible=visible, local=local, transform=transform)
        return net, before_step(with_buffers(net, seen, x) if buffers else seen)

    def run(kind: str) -> Found:
        net, seen = sent("own" if kind == "own" else "other")
        suite = QUICK if " " in kind else IMAGES
        found = suite[attack](net, of_chance(seen, kind) if kind in CHANCE else seen, 0)
        if found is None:
            return Found({FAILED}, {FAILED})
        verdicts = []
        for (truth, _), compared in zip(batches(size).values(), guesses(size), strict=True):
            trials = score("view", attack, found, truth, compared, {})
            verdicts.append({trial.verdict for trial in trials})
        return Found(*verdicts)

    return run


def features(kind: str) -> Found:
    """Read the input of the last dense layer."""
    net, data = smooth_lenet(seeded(0)).double(), batches(1)
    seen = observe(net, *data["own" if kind == "own" else "other"], visible=["dense2.*"])
    sent = (of_chance(seen, kind) if kind in CHANCE else seen).update
    found = attacks.invert_dense(sent["dense2.weight"], sent["dense2.bias"])
    errors = [feature_error(found, net[:-1](x)[0].detach()) for x, _ in data.values()]
    return Found(*({"recovered" if error < 1e-9 else FAILED} for error in errors))


def ranks(kind: str) -> Found:
    """Rank the image of each data set among all images."""
    net, (x, y) = smooth_lenet(seeded(0)), digits()
    sent = slice(0, 1) if kind == "own" else slice(1, 2)
    seen = observe(net, x[sent], y[sent], visible=["dense2.*"])
    seen = of_chance(seen, kind) if kind in CHANCE else seen
    verdicts = []
    for i in range(2):
        order = [i, *(j for j in range(len(x)) if j != i)]
        rank = attacks.reid_rank(net, seen, x[order[:1]], x[order[1:]], y[order])
        verdicts.append({"recovered" if rank == 1 else FAILED})
    return Found(*verdicts)


def labels(kind: str) -> Found:
    """Infer the labels of four images; what is doubtful is not claimed."""
    net, (x, y) = smooth_lenet(seeded(0)), digits()
    rows = torch.tensor([0, 1, 1, 4] if kind == "own" else [2, 3, 5, 6])
    seen = observe(net, x[rows], y[rows], visible=["dense2.bias"], reveal_labels=False)
    seen = of_chance(seen, kind) if kind in CHANCE else seen
    candidates = label_candidates(net, seen)
    assert kind == "chance" or torch.equal(
        attacks.infer_labels(None, seen.update["dense2.bias"], 4), candidates[0]
    )
    verdicts = []
    for mine in ([0, 1, 1, 4], [2, 3, 5, 6]):
        right = torch.equal(candidates[0], y[mine].sort().values)
        said = "recovered" if right else "ambiguous"
        verdicts.append({said if len(candidates) == 1 else FAILED})
    return Found(*verdicts)


def drawn(build: Callable[[torch.Generator], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build(seeded(0))


lenet, mlp, relu = map(drawn, (smooth_lenet, smooth_mlp, relu_lenet))
sparse = partial(dense, bound=0.2)
frozen = partial(behind, nn.LeakyReLU())


# text: own sentences have even ids, the other ones odd ids


def expecting() -> nn.Module:
    """A model that expects few tokens, as trained ones do: decay outweighs the others' softmax."""
    net = filled(Recurrent(), 0.2)
    with torch.no_grad():
        net.out.bias.uniform_(-4, 4, generator=seeded(3))
    return net


def classifier() -> nn.Module:
    return filled(
        TextClassifier(vocabulary=60, classes=3, width=32, heads=2, hidden=32, layers=2).eval(), 0.2
    )


def decoder() -> nn.Module:
    return filled(LanguageModel(vocabulary=200, width=96, heads=8, hidden=64, layers=1).eval(), 0.2)


def with_decay(
    kind: str, model: nn.Module, tokens: Tensor, seen: TextObservation
) -> TextObservation:
    """Return what weight decay leaves of the update of three steps, in float32: all rows move."""
    twin = copy.deepcopy(model).float()
    before = {name: value.detach().clone() for name, value in twin.named_parameters()}
    solvers = {
        "adamw": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
        "sgd": partial(torch.optim.SGD, lr=0.1, weight_decay=5e-4),
    }
    solver = solvers[kind](twin.parameters())
    for _ in range(3):
        solver.zero_grad()
        cross_entropy(twin(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        solver.step()
    after = dict(twin.named_parameters())
    return replace(seen, update={k: (after[k].detach() - before[k]).double() for k in seen.update})


def on_text(
    attack: str,
    model: Callable[[], nn.Module],
    visible: list[str],
    *,
    shape: tuple[int, int] = (2, 8),
    labels: Tensor | None = None,
    local: LocalSteps | None = None,
    decay: str = "",
) -> Callable[[str], Found]:
    @cache
    def sent(kind: str) -> tuple[nn.Module, dict[str, Tensor], TextObservation]:
        net = model()
        half = token_count(net) // 2
        drawn = torch.stack(
            [torch.randperm(half, generator=seeded(i))[: shape[1]] for i in range(9)]
        )
        data = {"own": 2 * drawn[: shape[0]], "other": 2 * drawn[: shape[0]] + 1}
        seen = observe_text(net, data[kind], labels, visible=visible, local=local)
        return net, data, with_decay(decay, net, data[kind], seen) if decay else seen

    def run(kind: str) -> Found:
        true = "own" if kind == "own" else "other"
        net, data, seen = sent(true)
        suite = QUICK_TEXTS if " " in kind else TEXTS
        found = suite[attack](net, of_chance(seen, kind) if kind in CHANCE else seen, 0)
        read = found or ReadText((), frozenset(), float("inf"))
        shown = read.tokens
        verdicts = []
        for truth in data.values():
            bag = token_f1(sorted(shown), sorted(set(truth.flatten().tolist())))
            scores = text_scores(read.sentences, truth.tolist())
            trials = [TextTrial("view", attack, read, s, bag, Guess(0, 0, 0)) for s in scores]
            verdicts.append({trial.verdict for trial in trials})
        return Found(*verdicts, shown=shown, false=shown - set(data[true].flatten().tolist()))

    return run


def token_count(net: nn.Module) -> int:
    return next(m.num_embeddings for m in net.modules() if isinstance(m, nn.Embedding))


# lower bounds on epsilon: who was there is what canaries give away


def on_canaries(bound: str) -> Callable[[str], Found]:
    def run(kind: str) -> Found:
        rng = np.random.default_rng(16)
        mine, theirs = rng.random((2, 1000)) < 0.5
        sent = {"own": mine, "other": theirs, "chance": 0 * mine}[kind]
        scores = rng.standard_normal(1000) + 5 * sent
        options = {"claimed_mu": 5.0} if bound == "guesses" else {}
        found = (
            getattr(attacks, bound)(scores, present, delta=1e-5, **options).epsilon
            for present in (mine, theirs)
        )
        return Found(*({"recovered" if epsilon > 0 else FAILED} for epsilon in found))

    return run


STEPS = LocalSteps(learning_rate=0.1, steps=3)
SHUFFLED = LocalSteps(learning_rate=0.01, steps=4, batch=2)
ADAM = LocalSteps(learning_rate=1e-3, steps=3, optimizer="adam")
SURE, PART = "recovered", "partial"
SOME = "partial, of some images of the two updates: others are no closer than their class is"
TIED = "an embedding that is the output layer"
FEW = "weight decay of SGD where few tokens are expected"
SGD_DECAY, ADAM_DECAY = ({"local": STEPS, "decay": "sgd"}, {"local": ADAM, "decay": "adamw"})
MANY = {"shape": (6, 8)}
ASKED = {"shape": (2, 4), "labels": torch.tensor([0, 1])}

# attack, what it is tried on, model, what is visible, options, and the least verdict on its data
ON_IMAGES = [
    ("invert_dense", "one image", mlp, ["dense1.*"], {}, SURE),
    ("invert_dense", "without a bias", mlp, ["dense1.weight"], {}, SURE),
    ("invert_dense", "a batch behind ReLU", sparse, ["*"], {"size": 2}, SURE),
    ("april", "embeddings", Transformer, ["patch.*", "position"], {}, SURE),
    ("april", "q, k and v", Transformer, ["attention.in_proj_*"], {}, SURE),
    ("spear", "a batch behind ReLU", dense, ["1.*"], {"size": 4}, SURE),
    ("spear", "LoRA", LoRA, ["lora_*"], {"size": 2}, SURE),
    ("dense_then_invert", "after a frozen layer", frozen, ["3.*"], {}, SURE),
    ("dense_then_invert", "without its bias", frozen, ["3.weight"], {}, SURE),
    ("dlg", "everything", lenet, ["*"], {}, SURE),
    ("dlg", "a layer of 1.6 % of the parameters", lenet, ["conv1.*"], {}, SURE),
    ("dlg", "one layer", lenet, ["conv2.*"], {}, SURE),
    ("dlg", "three local steps", lenet, ["*"], {"local": STEPS}, SURE),
    *(
        ("dlg", transform, lenet, ["*"], {"transform": transform}, least)
        for transform, least in (
            *(("top-k:0.1", SURE), ("prune:0.9", SURE), ("clip-per-tensor:0.05", SURE)),
            *(("bits:4", SURE), ("signs", PART), ("signs:bare", SOME)),
        )
    ),
    ("dlg", "a sum of two clients", lenet, ["*"], {"size": 2, "transform": "sum:2"}, SURE),
    ("invert_dense", "a sum behind ReLU", sparse, ["*"], {"size": 2, "transform": "sum:2"}, SURE),
    ("dlg", "shuffled local batches", lenet, ["*"], {"size": 4, "local": SHUFFLED}, SOME),
    ("dlg", "a step of Adam", lenet, ["*"], {"local": replace(ADAM, steps=1)}, SURE),
    ("invert_dense", "a step of Adam", mlp, ["dense1.*"], {"local": replace(ADAM, steps=1)}, SURE),
    ("dlg + statistics", "buffers that were sent", normalised, ["0.*"], {"buffers": True}, PART),
    ("cosine_tv", "everything", relu, ["*"], {}, PART),
    ("dlg + tv", "everything", lenet, ["*"], {}, PART),
    ("dlg + falling tv", "everything", lenet, ["*"], {}, SURE),
]
ON_TEXT = [
    ("bag_of_tokens", "the embedding", Recurrent, ["tokens.*"], {}, PART),
    ("bag_of_tokens", "AdamW's weight decay", Recurrent, ["tokens.*"], ADAM_DECAY, PART),
    ("bag_of_tokens", TIED, decoder, ["embedding.*"], {}, PART),
    ("predicted_tokens", "the last bias", Recurrent, ["out.bias"], MANY, PART),
    ("predicted_tokens", FEW, expecting, ["out.bias"], MANY | SGD_DECAY, PART),
    ("predicted_tokens", "AdamW's decay", Recurrent, ["out.bias"], MANY | ADAM_DECAY, PART),
    ("predicted_tokens", "no bias", partial(Recurrent, bias=False), ["out.weight"], MANY, PART),
    ("span_test", "q, k and v", decoder, ["layers.0.attention.*"], {}, SURE),
    ("span_test", "LoRA A", AdaptedText, ["lora_A.*"], {"shape": (1, 12)}, PART),
    ("span_test + exchange", "q, k of a classifier", classifier, ["*query*", "*key*"], ASKED, SURE),
]
BOUNDS = ("clopper_pearson", "guesses", "one_run", "one_run_gdp", "pooled_t")
TWINS: dict[tuple[str, str], tuple[Callable[[str], Found], str]] = {
    **{(a, on): (on_images(a, *sent, **more), least) for a, on, *sent, more, least in ON_IMAGES},
    **{(a, on): (on_text(a, *sent, **more), least) for a, on, *sent, more, least in ON_TEXT},
    **{(bound, "canaries"): (on_canaries(bound), SURE) for bound in BOUNDS},
    ("invert_dense", "features of the last layer"): (features, SURE),
    ("infer_labels", "the last bias"): (labels, SURE),
    ("reid_rank", "the last layer"): (ranks, SURE),
}
NOT_ATTACKS = {
    "explain": "says whether given data explain an update",
    "paired": "compares two runs of a server that the auditor starts; see test_replay",
}
LONG = {"shuffled local batches", "signs"} | {
    ("cosine_tv", "everything"),
    ("dlg + tv", "everything"),
}
"""Cases of more than half a second on a network that faster ones try, too."""
CASES = [
    pytest.param(*key, id=": ".join(key), marks=[pytest.mark.slow] * bool({key, key[1]} & LONG))
    for key in sorted(TWINS)
]
NOTHING = {FAILED, "ambiguous"}


NO_VERDICT = {"reid_rank", "infer_labels", *BOUNDS}  # a rank, and levels tested elsewhere
CLAIMS = {key for key in TWINS if key[0] not in NO_VERDICT}


@cache
def found(attack: str, tried_on: str, kind: str) -> Found:
    return TWINS[attack, tried_on][0](kind)


@pytest.mark.parametrize(("attack", "tried_on"), CASES)
def test_it_finds_what_is_there_and_nothing_in_an_update_of_other_data(attack, tried_on):
    least = {SURE: {SURE}, PART: {SURE, PART}, SOME: {SURE, PART} | NOTHING}[
        TWINS[attack, tried_on][1]
    ]
    own, other = (found(attack, tried_on, kind) for kind in ("own", "other"))
    assert all((own.own, own.other, other.own, other.other))  # a verdict for each example
    assert own.own <= least
    assert own.other <= NOTHING
    assert other.other <= least
    assert (own.own | other.other) - NOTHING
    assert other.own <= NOTHING
    assert not own.false | other.false


@pytest.mark.parametrize(("attack", "tried_on"), CASES)
def test_it_claims_nothing_of_random_values(attack, tried_on):
    chance = found(attack, tried_on, "chance")
    assert chance.own | chance.other == {FAILED}
    assert not chance.shown


@pytest.mark.slow
@pytest.mark.parametrize(("attack", "tried_on"), [case for case in CASES if case.values in CLAIMS])
def test_nothing_is_claimed_of_a_thousand_random_updates(attack, tried_on):
    """Verdicts are those of reports, with few evaluations of what searches."""
    claimed = []
    for seed in range(DRAWS):
        chance = TWINS[attack, tried_on][0](f"chance {seed}")
        if (chance.own | chance.other) - NOTHING or chance.shown:
            claimed.append((seed, chance))
    assert not claimed


def others(kind: str, length: int, count: int, seed: int) -> list[list[int]]:
    """Return sentences of a thousand words, all as likely, or as in a language (Zipf)."""
    weights = torch.ones(1000) if kind == "uniform" else 1 / torch.arange(1, 1001)
    drawn = torch.multinomial(weights, count * length, replacement=True, generator=seeded(seed))
    return drawn.view(count, length).tolist()


@pytest.mark.parametrize(
    ("kind", "length", "count"),
    [
        ("Zipf", 4, 60),
        *(
            pytest.param(kind, length, 1000, marks=pytest.mark.slow)
            for kind in ("uniform", "Zipf")
            for length in (4, 8, 16)
        ),
    ],
)
def test_the_words_that_two_sentences_share_by_chance_are_no_partial_find(kind, length, count):
    """Somebody else's sentence, read whole, is hardly ever closer than one in a thousand is."""
    truth, read = others(kind, length, count, 2), others(kind, length, count, 3)
    net = LanguageModel(vocabulary=1000, width=8, heads=1, hidden=8, layers=1)
    public = others(kind, length, 5 * count, 1)
    views = {"v": ["*"]}
    audit = attacks.TextAudit(model=net, x=torch.tensor(truth), views=views, public=public)
    partial = 0
    for number, words in enumerate(read):
        result = ReadText((tuple(words),), frozenset(words), float("inf"))
        (trial,) = audit._scored("v", "attack", result, number, {})
        assert trial.verdict in {"partial", FAILED}
        partial += trial.verdict == "partial"
    assert partial <= count * 3 / 1000


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("task", ["digits", pytest.param("fashion_mnist", marks=pytest.mark.slow)])
def test_somebody_elses_image_is_no_partial_find(task, labelled):
    """Others of the same class are as rarely partial as chance says; a noisy truth is.

    The public images are the training set: 143 digits of a class, 6,000 clothes.
    """
    data = getattr(tasks, task)()
    public, (x, y) = (data.train_x, data.train_y), (data.test_x[:360], data.test_y[:360])
    means = torch.stack([public[0][public[1] == label].mean(0) for label in y])
    audit = ImageAudit(
        **{"model": smooth_lenet(seeded(0), size=x.shape[-1]), "x": x, "y": y},
        **{"views": {"v": ["*"]}, "dataset_mean": public[0].mean(0), "public": public},
        class_means=means if labelled else None,
    )
    alone = replace(audit, public=None)
    noise = 0.06 * torch.randn(x.shape, generator=seeded(1))
    counts = Counter()
    for number, label in enumerate(y):
        alike = (y == label).nonzero().flatten()
        others = alike[alike != number][torch.arange(3) + number % (len(alike) - 4)]
        sent = {"truth": x[number : number + 1] + noise[number]}
        sent |= {f"other {i}": x[i : i + 1] for i in others.tolist()}
        for name, image in sent.items():
            found = Reconstruction(image.clamp(0, 1).double(), y[:1], 1.0, "stalled", 1, ())
            for compared, by in ((audit, "public"), (alone, "alone")):
                (trial,) = compared._scored("v", "attack", found, number, {})
                assert trial.verdict in {"partial", FAILED}
                counts[name.split()[0], by] += trial.verdict == "partial"
    chance = 1 / 1000 if task == "fashion_mnist" else 1 / 143
    assert counts["other", "public"] <= binom.isf(1e-3, 3 * len(y), chance)
    assert counts["other", "alone"] > 2 * counts["other", "public"]
    assert counts["truth", "public"] >= 0.9 * len(y)


def test_every_attack_has_a_twin():
    exported = {name for name in attacks.__all__ if _attacks(getattr(attacks, name))}
    assert NOT_ATTACKS.keys() <= exported
    assert {attack for attack, _ in TWINS} == {*IMAGES, *TEXTS, *exported} - NOT_ATTACKS.keys()


def _attacks(named: object) -> bool:
    """Return whether a function takes what was seen, or returns what is proved of epsilon."""
    if not inspect.isfunction(named):
        return False
    signature = inspect.signature(named)
    seen = {parameter.annotation for parameter in signature.parameters.values()}
    gradient = "weight_grad" in signature.parameters
    proved = signature.return_annotation in (attacks.Bound, attacks.Replay)
    return gradient or proved or bool(seen & {Observation, TextObservation})
