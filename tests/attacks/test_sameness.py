"""Sameness: nothing that an audit says rests on the last bits of a number.

The processor, its threads, and a row's place and company in its batch change how sums are rounded.
Here every output of a layer, its slope, and every value of an update move by at most one rounding.
"""

import json
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from subjects import seeded
from torch import nn
from torch.nn.functional import layer_norm

from attacks import LocalSteps, leakage, observe, suite, text_leakage
from attacks.reconstruction.labels import likely_labels
from attacks.reconstruction.reconstruct import reid_rank
from attacks.text import spans
from attacks.text.bag import bag_of_tokens
from attacks.text.observation import observe_text
from attacks.text.spans import Reader
from attacks.text_audit import text_suite

ROUNDINGS = 100  # of each audit, shared among its cases


def moved(x, draw):
    """Return each value moved up, down or not at all, by one rounding."""
    signs = torch.randint(-1, 2, x.shape, generator=draw).to(x.dtype)
    return x * (1 + signs * torch.finfo(x.dtype).eps)


class Rounded(nn.Module):
    draw: ClassVar[torch.Generator | None] = None

    def forward(self, x):
        return x if Rounded.draw is None else moved(x, Rounded.draw)


def outcomes(audit, count):
    """Return the distinct results of an audit on so many processors, the first without any draw."""
    results = [audit(lambda x: x)]
    for seed in range(count):
        Rounded.draw = seeded(seed)
        try:
            results.append(audit(lambda x: moved(x, Rounded.draw)))
        finally:
            Rounded.draw = None
    return [one for i, one in enumerate(results) if one not in results[:i]]


class Mixed(nn.Module):
    """A dense layer, and two beside each other; each token learns of those before it, or of all."""

    def __init__(self, reach):
        super().__init__()
        self.reach, self.rounded = reach, Rounded()
        self.tokens, self.places = nn.Embedding(30, 32), nn.Parameter(torch.empty(5, 32))
        self.first, self.second, self.twin = (nn.Linear(32, 32) for _ in range(3))
        self.out = nn.Linear(32, 3 if reach == "sentence" else 30)
        draw = seeded(0)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.3, generator=draw)

    def forward(self, tokens):
        x = self.rounded(self.tokens(tokens) + self.places[: tokens.shape[1]])
        x = self.rounded(self.first(x)).tanh()
        others = x.cumsum(1) if self.reach == "prefix" else x.mean(1, keepdim=True)
        x = self.rounded(x + 100 + (0 if self.reach == "token" else others))  # of which digits
        x = layer_norm(x, (32,)).tanh()  # cancel out
        x = (self.second(self.rounded(x)) + self.twin(self.rounded(x))).tanh()
        return self.out(x.mean(1) if self.reach == "sentence" else x)


@pytest.mark.parametrize("reach", ["token", "prefix", "sentence"])
def test_what_an_input_depends_on(reach):
    labels = torch.tensor([0, 2]) if reach == "sentence" else None
    model, tokens = Mixed(reach), torch.randint(1, 30, (2, 4), generator=seeded(0))

    def audit(_):
        reader = Reader(model, observe_text(model, tokens, labels))
        return [(*source.weights, source.reach) for source in reader.sources[:2]]

    expected = [("first.weight", "token"), ("second.weight", "twin.weight", reach)]
    assert outcomes(audit, ROUNDINGS // 3) == [expected]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("reach", ["prefix", "sentence"])
def test_tokens_and_sentences(reach, dtype, monkeypatch):
    labels = torch.tensor([0, 2]) if reach == "sentence" else None
    model, tokens = Mixed(reach), torch.randint(1, 30, (2, 4), generator=seeded(1))

    def audit(move):
        order, size = torch.arange(2), 2**14
        if Rounded.draw is not None:
            order = torch.randperm(2, generator=Rounded.draw)
            size = int(torch.randint(4, 99, (), generator=Rounded.draw))
        monkeypatch.setattr(spans, "_ROWS", size)  # inputs computed beside one another
        batch = tokens[order], None if labels is None else labels[order]
        update = {k: move(v.to(dtype)) for k, v in observe_text(model, *batch).update.items()}
        (row,) = text_leakage(
            *(model, *batch),
            views={"dense": ["first.*", "second.*"]},
            batch=2,
            update=update,
            attacks={"span_test": text_suite()["span_test"]},
        ).rows
        return row.verdict, {trial.score.found for trial in row.best}

    (result,) = outcomes(audit, ROUNDINGS // 33)
    assert result == ("recovered", {tuple(row) for row in tokens.tolist()})


def test_tokens_of_an_embedding_under_weight_decay():
    model, tokens = Mixed("prefix"), torch.randint(1, 30, (2, 4), generator=seeded(1))
    seen = observe_text(model, tokens, visible=["tokens.weight"])
    decayed = seen.update["tokens.weight"] + 1e-3 * model.tokens.weight.detach()

    def audit(move):
        sent = replace(seen, update={"tokens.weight": move(decayed)})
        return bag_of_tokens(model, sent).tolist()

    assert outcomes(audit, ROUNDINGS // 4) == [tokens[:, :-1].unique().tolist()]


def test_labels_that_are_equally_likely():
    slopes = torch.tensor([-0.3, 0.1, 0.1, 0.1]).double()  # the second label may be any of three

    def audit(move):
        return [labels.tolist() for labels in likely_labels(move(slopes), 2)]

    assert outcomes(audit, ROUNDINGS) == [[[0, 1], [0, 2], [0, 3], [0, 0]]]


def test_images_that_send_the_same_have_the_last_rank(digits):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 4), Rounded())
    nn.init.constant_(model[1].bias, -100.0)
    nn.init.constant_(model[1].weight, 0.1)
    nn.init.normal_(model[3].bias, generator=seeded(0))
    (x, _), y = digits, torch.full((10,), 2)
    seen = observe(model, x[:1], y[:1], visible=["3.bias"])

    def audit(move):
        sent = replace(seen, update={name: move(value) for name, value in seen.update.items()})
        return reid_rank(model, sent, x[:1], x[1:4], y[:4])

    assert outcomes(audit, ROUNDINGS // 4) == [4]


def network(seed=0):
    """Return a network of a near uniform softmax, as when it is new: it hides label smoothing."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), Rounded(), nn.Tanh(), nn.Linear(8, 4))
    draw = seeded(seed)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.05, generator=draw)
    return model


def times(factor):
    return lambda value, _: factor * value


def same(value, _):
    return value


ONE, TWO = (LocalSteps(learning_rate=0.1, steps=steps) for steps in (1, 2))
ANOTHER = "times the gradient: another loss or reduction of it, or a clip"
WEIGHTS = "it is weights, not an update: subtract those before the round"
# fault: (how the update was computed, what became of it, what the audit is told, the cause)
FAULTS = {
    "none": ({}, same, {}, ""),
    "none in two steps": ({"local": TWO}, same, {"local": TWO}, ""),
    "an eighth over": ({}, times(1.125), {}, f"it is 1.12 {ANOTHER}"),
    "in bfloat16": ({}, lambda value, _: 2 * value.bfloat16().double(), {}, f"it is 2 {ANOTHER}"),
    "clipped": ({"clip": 0.01}, same, {}, f"it is 0.00932 {ANOTHER}"),
    "unclipped": ({}, same, {"clip": 0.1}, "it is not clipped to a norm of 0.1"),
    "sign": (
        *({"local": TWO}, times(-1), {"local": TWO}),
        "it is before - after; send after - before",
    ),
    "rate": (
        *({"local": ONE}, same, {"local": replace(ONE, learning_rate=0.2)}),
        "it is 0.5 times that change: another learning rate or clip",
    ),
    "gradient": ({}, same, {"local": TWO}, "it is a gradient, not a change of the weights"),
    "delta": (
        *({"local": ONE}, same, {}),
        "it is -0.1 times the gradient: a change of the weights after a step of learning rate",
    ),
    **{
        f"undeclared {kind}": ({"transform": kind}, same, {}, f"{kind} (--transform {kind})")
        for kind in ("top-k:0.2", "signs", "bits:4", "clip-per-tensor:0.01")
    },
    "weights before": ({}, lambda _, weight: weight, {}, WEIGHTS),
    "weights after": ({"local": ONE}, lambda value, weight: value + weight, {}, WEIGHTS),
    "label": ({}, same, {"y": torch.tensor([3])}, "other examples, labels"),
    "image": ({}, same, {}, "other examples"),
    "weights": ({}, same, {}, "other weights"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_verdicts_and_causes(digits, fault):
    """The cause is the right one, and the same, also where two views are explained equally ill."""
    computed, changed, stated, cause = FAULTS[fault]
    model, x, called = network(), digits[0][:1], []
    update = observe(
        network(1) if fault == "weights" else model,
        digits[0][1:2] if fault == "image" else x,
        torch.tensor([2]),
        **computed,
    ).update
    for name, weight in model.double().named_parameters():
        update[name] = changed(update[name], weight.detach())

    def attack(*arguments):
        called.append(1)
        return suite()["invert_dense"](*arguments)

    def audit(move):
        report = leakage(
            **(
                {"model": model, "x": x, "y": torch.tensor([2])}
                | {"views": {"all": ["*"], "first": ["1.*"]}}
                | stated
            ),
            attacks={"invert_dense": attack},
            update={name: move(value) for name, value in update.items()},
        )
        told = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        if report.void:
            assert told["void"]["causes"] == list(report.explanation.causes)
            assert all((row["psnr"], row["by_attack"]) == ([None], {}) for row in told["rows"])
        return report.verdict, report.explanation.causes, [row.verdict for row in report.rows]

    ((verdict, causes, rows),) = outcomes(audit, ROUNDINGS // 20)
    assert verdict == ("void" if cause else "recovered")
    assert set(rows) == {verdict}
    assert len(causes) == bool(cause)
    assert cause in "".join(causes)
    assert bool(called) == (not cause)
