"""Transforms: what is sent of an update, what an attack finds in it, and what an audit says of it.

The twins of each kind (own data, other data, chance) are in test_twins.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from subjects import Recurrent, seeded
from torch import nn
from torch.nn.functional import cross_entropy

from accounting.checks import ConfigError
from attacks import LocalSteps, dlg, leakage, observe, observe_text, psnr, suite, text_leakage
from attacks.explain import explain
from attacks.networks import smooth_lenet
from attacks.observation import residual_of
from attacks.reconstruction.reconstruct import matching_residual
from attacks.text.observation import text_model
from attacks.transforms import KINDS, declared
from attacks.update import flat, ready

KIND = ["top-k:0.1", "prune:0.9", "signs", "signs:bare", "bits:4", "clip-per-tensor:0.05"]
FULL = {"full": ["*"]}


def halved(update):
    return {name: value / 2 for name, value in update.items()}


@pytest.fixture
def client(lenet, digits):
    """Return a network, and an image with its label."""
    return lenet, digits[0][:1], digits[1][:1]


def values(model, x, y, **options):
    return flat(observe(model, x, y, **options).update.values())


# What is sent.


def test_what_each_kind_sends(client):
    plain = observe(*client).update
    whole = flat(plain.values())
    sent = {kind: observe(*client, transform=kind).update for kind in KIND}
    top = flat(sent["top-k:0.1"].values())
    assert int((top != 0).sum()) == round(0.1 * len(whole))
    assert torch.equal(top[top != 0], whole[top != 0])
    assert float(whole[top == 0].abs().max()) <= float(top[top != 0].abs().min())
    for name, value in plain.items():
        kept = sent["prune:0.9"][name]
        assert int((kept != 0).sum()) == max(round(0.1 * value.numel()), 1)
        assert torch.equal(sent["signs:bare"][name], value.sign())
        torch.testing.assert_close(sent["signs"][name], value.sign() * value.abs().mean())
        levels = sent["bits:4"][name] / value.abs().max() * 7
        torch.testing.assert_close(levels, levels.round())
        assert float((sent["bits:4"][name] - value).abs().max()) <= float(value.abs().max()) / 14
        clipped = sent["clip-per-tensor:0.05"][name]
        torch.testing.assert_close(clipped.norm(), value.norm().clamp(max=0.05))
        torch.testing.assert_close(clipped / clipped.norm(), value / value.norm())


def test_the_clip_comes_after_the_transform_and_before_the_sum(client, digits):
    (model, *_), (x, y) = client, digits
    assert float(values(model, x[:1], y[:1], transform="signs:bare", clip=0.5).norm()) == (
        pytest.approx(0.5)
    )
    each = [values(model, x[i : i + 2], y[i : i + 2], clip=0.1) for i in (0, 2, 4)]
    summed = values(model, x[:6], y[:6], clip=0.1, transform="sum:3")
    torch.testing.assert_close(summed, torch.stack(each).sum(0))


@pytest.mark.parametrize("local", [None, LocalSteps(learning_rate=0.1, steps=2)])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_sum_is_matched_client_by_client(client, digits, local, clip):
    """Both ways to compute it, one loss of all clients and one update of each, are exact."""
    (model, *_), (x, y) = client, digits
    seen = observe(model, x[:6], y[:6], transform="sum:3", local=local, clip=clip)
    for differentiable in (False, True):
        residual = matching_residual(model, seen, y[:6], differentiable=differentiable)
        assert float(residual(x[:6].double()).detach().norm()) < 1e-12
    assert residual_of(ready(model, False), seen, x[:6], y[:6]) < 1e-24
    moved = x[[2, 1, 0, 3, 4, 5]], y[[2, 1, 0, 3, 4, 5]]  # between two clients
    assert (residual_of(ready(model, False), seen, *moved) > 1e-6) == (
        clip is not None or local is not None
    )


def test_a_loss_of_a_sum_is_that_of_each_client(client, digits):
    (model, *_), (x, y) = client, digits
    total = {"loss": lambda logits, y: cross_entropy(logits, y).square()}
    seen = observe(model, x[:4], y[:4], transform="sum:2", **total)
    assert residual_of(ready(model, False), seen, x[:4], y[:4]) < 1e-24


def test_batch_normalisation_in_training_mode_sees_one_client(digits):
    x, y = digits[0][:4], digits[1][:4]
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 10))
    seen = observe(model.train(), x, y, transform="sum:2")
    assert residual_of(ready(model, True), seen, x, y) < 1e-24
    assert residual_of(ready(model, True), seen, x[[0, 2, 1, 3]], y[[0, 2, 1, 3]]) > 1e-6


# What an attack finds.


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        *(("top-k:0.5", 140), ("top-k:0.05", 76), ("prune:0.9", 76), ("bits:8", 60)),
        *(("bits:4", 33), ("clip-per-tensor:0.05", 140), ("signs", 18), (halved, 140)),
        (["clip-per-tensor:0.1", "top-k:0.1", "bits:6"], 33),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_an_attack_finds(client, kind, least):
    model, x, y = client
    seen = observe(model, x, y, transform=kind)
    found = dlg(model, seen, restarts=1, max_evaluations=400, newton_steps=0)
    assert float(psnr(found.x, x)) > least
    assert (
        residual_of(ready(model, False), seen, x, y) < 1e-20
    )  # the truth matches, whatever is lost


def test_a_part_of_a_clipped_sparse_update_is_matched_exactly(client):
    model, x, y = client
    seen = observe(model, x, y, transform="top-k:0.1", clip=0.01).restrict(["conv2.weight"])
    assert residual_of(ready(model, False), seen, x, y) < 1e-20


def test_noise_covers_which_entries_were_sent(client):
    model, x, y = client
    noise = {"clip": 1.0, "noise_multiplier": 1e-3, "generator": seeded(0)}
    for kind in KIND:
        assert explain(model, observe(model, x, y, transform=kind, **noise), x, y).explained, kind


def test_sums_of_sentences_are_read():
    model, tokens = Recurrent(), torch.randint(1, 400, (6, 8), generator=seeded(0))
    report = text_leakage(model, tokens, views=FULL, transform="sum:3", batch=2)
    assert report.verdict == "partial"  # of a network without attention: its words
    assert report.threat["transform"] == ["sum:3"]
    seen = observe_text(model, tokens, transform="sum:3")
    assert residual_of(text_model(model), seen, tokens, tokens) < 1e-24


# What an audit says.


@pytest.mark.parametrize("kind", KIND)
def test_a_given_update_is_void_until_its_transform_is_declared(client, kind):
    model, x, y = client
    update = {k: v.float() for k, v in observe(model, x, y, transform=kind).update.items()}
    attacks = {"dlg": suite(restarts=1, max_evaluations=60, newton_steps=0)["dlg"]}
    options = {"views": FULL, "update": update, "attacks": attacks}
    report = leakage(model, x, y, **options)
    assert report.void
    named = report.explanation.causes[0].removesuffix(")").rpartition("--transform ")[2]
    assert named == ("top-k:0.1" if kind == "prune:0.9" else kind)
    for stated in (named, kind):
        assert not leakage(model, x, y, **options, transform=stated).void
    other = observe(model, x + 0.1 * (x < 0.5), y, transform=kind).update
    assert leakage(model, x, y, **options | {"update": other}, transform=kind).void


@pytest.mark.parametrize(
    ("sent", "stated"),
    [
        ("top-k:0.1", "top-k:0.05"),
        ("prune:0.9", "prune:0.95"),
        ("bits:4", "bits:3"),
        ("clip-per-tensor:0.05", "clip-per-tensor:0.1"),
        ("signs", "signs:bare"),
        ("none", "signs"),
    ],
)
def test_another_transform_than_the_declared_one_is_void(client, sent, stated):
    model, x, y = client
    update = observe(model, x, y, transform=sent).update
    assert leakage(model, x, y, views=FULL, update=update, transform=stated, attacks={}).void


def test_an_update_with_zeros_of_its_own_looks_like_no_transform(digits):
    """Silent units and dark pixels send rows and columns of zeros."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10)).double()
    x, y = digits
    for i in range(5):
        seen = observe(net, x[i : i + 1], y[i : i + 1])
        (cause,) = explain(net, seen, x[5:6], y[5:6]).causes
        assert "transform" not in cause


def test_declarations():
    assert str(declared(["clip-per-tensor:0.1", "top-k:0.1", "bits:4", "sum:20"])) == (
        "clip-per-tensor:0.1, top-k:0.1, bits:4, sum:20"
    )
    assert declared("none") == declared(()) == declared(None)
    assert [str(declared(form)) for kind in KINDS.values() for form in kind.form.split(", ")] == [
        form for kind in KINDS.values() for form in kind.form.split(", ")
    ]
    for wrong in (
        *("top-k", "top-k:0", "top-k:nan", "top-k:2", "prune:1", "bits:1", "bits:4.5", "bits:99"),
        *("signs:x", "sum:1", "sum:1e3", "clip-per-tensor:inf", "clip-per-tensor:-1", "zip", ""),
        *(["none", "signs"], ["sum:2", "signs"], ["signs", "clip-per-tensor:1"], ["signs", halved]),
    ):
        with pytest.raises(ConfigError, match="transform"):
            declared(wrong)


def test_what_cannot_be_audited_is_refused(client, digits):
    (model, *_), (x, y) = client, digits
    with pytest.raises(ConfigError, match="3 clients"):
        observe(model, x[:4], y[:4], transform="sum:3")
    with pytest.raises(ConfigError, match="3 clients"):
        leakage(model, x[:4], y[:4], views=FULL, transform="sum:3")
    with pytest.raises(ConfigError, match="names and shapes"):
        observe(model, x[:1], y[:1], transform=lambda update: {})


@pytest.mark.slow
def test_the_table_of_the_docs(lenet, digits):
    lines = (
        (Path(__file__).parents[2] / "docs" / "how-to" / "audit-leakage.md")
        .read_text()
        .splitlines()
    )
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| `")]
    named = {row[0].strip(" `"): row[-1] for row in rows}
    table = {kind: last for kind, last in named.items() if kind.partition(":")[0] in KINDS}
    assert table.pop("sum:20")
    assert {kind.partition(":")[0] for kind in table} == KINDS.keys() - {"sum"}
    for kind, figures in table.items():
        for number, figure in enumerate(figures.split(",")):
            x, y = digits[0][number : number + 1], digits[1][number : number + 1]
            seen = observe(lenet, x, y, transform=kind)
            found = dlg(lenet, seen, restarts=1, max_evaluations=500, newton_steps=0)
            assert float(psnr(found.x, x)) == pytest.approx(float(figure), abs=1.5), kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", *KIND, "sum:2"])
def test_no_false_finding_in_a_thousand_random_updates(digits, kind):
    """An audit of random values is void; attacks, which it would not start, gain nothing either."""
    (x, y), model = digits, smooth_lenet(seeded(0))
    size = declared(kind).clients
    x, y, rest = x[:size], y[:size], digits[0][2:].mean(0)
    plain = observe(model, x, y, transform="none").update
    floor, client = psnr(rest.expand_as(x), x), observe(model, x, y, transform=kind)
    for seed in range(1000):
        draw = seeded(seed)
        drawn = {k: v.norm() * torch.randn(v.shape, generator=draw) for k, v in plain.items()}
        drawn = {k: v.double() / v.numel() ** 0.5 for k, v in drawn.items()}
        seen = replace(client, update=declared(kind)(drawn))
        assert not explain(model, seen, x, y).explained
        if seed % 20 == 0:
            found = dlg(model, seen, restarts=1, max_evaluations=50, newton_steps=0, seed=seed)
            assert bool((psnr(found.x, x) < floor + 3).all())
