"""No verdict is untrue: of updates that nothing explains, of oracles, of guessed labels."""

import json

import pytest
import torch
from subjects import LoRA, seeded
from torch import nn
from torch.nn.functional import cross_entropy, interpolate

from attacks import dlg, leakage, observe, suite
from attacks.networks import smooth_lenet
from attacks.reconstruction.labels import label_candidates
from attacks.report import VERDICTS
from privpart.cli.audit.tables import summary

FAST = suite(newton_steps=0, steps=0, tv=0)
FULL = {"full": ["*"]}


def audited(model, x, y, update, *, views=FULL, **options):
    """Return the report on a given update, with an attack that must not run when it is void."""
    called = []

    def attack(*arguments):
        called.append(1)
        return FAST["dlg"](*arguments)

    attacks = {"dlg": attack}
    report = leakage(
        model, x, y, views=views, attacks=attacks, batch=len(x), update=update, **options
    )
    assert report.void == (report.verdict == "void") == (not called)
    return report


CRAFTED = {
    "permuted": lambda v, _: v.flatten()[torch.randperm(v.numel(), generator=seeded(1))].view_as(v),
    "two clients summed": lambda v, other: v + other,
    "the mean of two clients": lambda v, other: (v + other) / 2,
    "signs": lambda v, _: v.sign(),
    "the largest tenth": lambda v, _: v * (v.abs() >= v.abs().quantile(0.9)),
    "nothing": lambda v, _: 0 * v,
    "scaled far up": lambda v, _: 1e30 * v,
    "scaled far down": lambda v, _: 1e-30 * v,
}


@pytest.mark.parametrize("made", sorted(CRAFTED))
def test_a_crafted_update_is_void(mlp, digits, made):
    x, y = digits[0][:1], digits[1][:1]
    sent, other = observe(mlp, x, y).update, observe(mlp, digits[0][1:2], y).update
    report = audited(mlp, x, y, {k: CRAFTED[made](v, other[k]) for k, v in sent.items()})
    assert report.void
    if made == "nothing":
        assert report.to_dict()["void"]["residual"] is None
        assert "it is zero" in report.explanation.causes[0]


@pytest.mark.parametrize(
    "rounded",
    [lambda v: v.bfloat16(), lambda v: (v / v.abs().max() * 127).round()],
    ids=["bfloat16", "eight bits"],
)
def test_a_rounded_update_still_gives_the_image_away(mlp, digits, rounded):
    x, y = digits[0][:1], digits[1][:1]
    update = {}
    for name, value in observe(mlp, x, y).update.items():
        coarse = rounded(value)
        update[name] = coarse * float(value.abs().max() / coarse.abs().max())
    report = audited(mlp, x, y, update)
    assert report.verdict == "recovered"
    assert report.explanation.residual > 1e-7


def test_another_mode_is_named(digits):
    x, y = digits[0][:4], digits[1][:4]
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 10))
    update = observe(model.eval(), x, y).update
    report = audited(model.train(), x, y, update)
    assert "in eval mode" in report.explanation.causes[0]


def test_a_forward_pass_that_is_random_is_void(digits):
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(64, 10)

        def forward(self, x):
            return self.dense(nn.functional.dropout(x.flatten(1), 0.5))

    (x, y) = digits[0][:1], digits[1][:1]
    report = leakage(Dropping(), x, y, views=FULL, attacks={"never": None})
    assert report.verdict == "void"
    assert "random" in report.explanation.causes[0]


def test_a_given_update_may_contain_the_noise_that_it_is_stated_to_contain(lenet, digits):
    x, y = digits[0][:1], digits[1][:1]
    noise = {"clip": 1.0, "noise_multiplier": 0.01}
    update = observe(lenet, x, y, generator=seeded(0), **noise).update
    report = audited(lenet, x, y, update, **noise)
    assert [row.adversary for row in report.rows] == ["recipient"]
    assert not report.void
    assert report.explanation.residual > 0.1
    assert audited(lenet, x, y, update).void
    more = audited(lenet, x, y, update, clip=1.0, noise_multiplier=0.02)
    assert more.explanation.causes == ("it contains less noise than the noise multiplier says",)


def test_a_constant_image_that_comes_back_is_recovered(lenet, digits):
    """Its own mean is itself: an oracle, which no attacker can hand in."""
    x = torch.full((1, 1, 8, 8), 0.3, dtype=torch.float64)
    (row,) = leakage(lenet, x, digits[1][:1], views=FULL, attacks=FAST).rows
    assert row.psnr[0] > 100
    assert row.verdict == "recovered"
    assert row.best[0].baseline < 15


@pytest.mark.parametrize("reveal", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_class_means_are_an_oracle_where_they_are_known_and_labels_hidden(
    lenet, digits, reveal, known
):
    means = digits[0][:1].repeat(2, 1, 1, 1) if known else None
    report = leakage(
        *(lenet, digits[0][:2], digits[1][:2]),
        **{"views": FULL, "attacks": FAST, "class_means": means, "reveal_labels": reveal},
    )
    oracles = {"own mean", "class mean"} if known and not reveal else {"own mean"}
    assert set(report.to_dict()["oracles"]) == oracles
    assert not oracles & set(report.to_dict()["baselines"])
    assert summary(report).tables


def found_near(x):
    """Return an attack that hands in the background, and claims to match the update."""

    def attack(model, seen, seed):
        found = dlg(model, seen, restarts=1, max_evaluations=1, newton_steps=0)
        shown = x.mean(0, keepdim=True)
        return type(found)(shown, found.labels, 1e-9, "stalled", 1, (1e-9,))

    return {"background": attack}


@pytest.mark.parametrize("source", ["decoys", "others", "given", "nothing"])
def test_a_background_that_all_images_share_is_not_recovered(lenet, digits, source):
    x, y = 0.02 * digits[0] + 0.9 * interpolate(digits[0][:1, :, :4, :4], size=8), digits[1]
    given = {
        "decoys": {"decoys": (x[2:], y[2:])},
        "others": {},
        "given": {"dataset_mean": x[2:].mean(0)},
        "nothing": {},
    }[source]
    seen = slice(0, 1 if source != "others" else 5)
    report = leakage(lenet, x[seen], y[seen], views=FULL, attacks=found_near(x), **given)
    missing = ["dataset mean"] if source == "nothing" else []
    assert report.to_dict()["missing_baselines"] == missing
    assert min(report.rows[0].psnr) > 30
    if not missing:
        assert report.verdict == "no gain"  # the same picture came back: it is not another image


def test_a_view_without_gradient_is_a_row(digits):
    x, y = digits[0][:2], digits[1][:2]
    model, views = LoRA(), {"A": ["lora_A.*"], "B": ["lora_B.*"], "both": ["lora_*"]}
    nn.init.zeros_(model.lora_B.weight)  # as in every first round
    attacks = {"dlg": lambda m, o, _: dlg(m, o, restarts=1, max_evaluations=5, newton_steps=0)}
    report = leakage(
        model, x, y, views=views, attacks=attacks, decoys=(digits[0][2:], digits[1][2:])
    )
    rows = {row.view: row for row in report.rows}
    assert rows["A"].verdict == "nothing sent"
    assert rows["A"].ranks == ()
    told = rows["A"].to_dict()
    assert told["psnr"] == [None, None]
    assert told["update_norm"] == 0
    assert rows["B"].verdict in VERDICTS[:5]
    assert rows["both"].to_dict()["found_in"] != ["A", "A"]
    json.dumps(report.to_dict(), allow_nan=False)


def trained(digits):
    """Return a network on which the softmax depends on the image."""
    model = smooth_lenet(seeded(0))
    solver = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):
        solver.zero_grad()
        cross_entropy(model(digits[0].float()), digits[1]).backward()
        solver.step()
    return model


def test_labels_are_doubtful_where_they_are_wrong(lenet, digits):
    model, wrong = trained(digits), 0
    for first in range(7):
        x, y = digits[0][first : first + 4], digits[1][first : first + 4]
        sure = label_candidates(lenet, observe(lenet, x, y, reveal_labels=False))
        assert torch.equal(sure[0], y.sort().values)
        assert len(sure) == 1
        guesses = label_candidates(model, observe(model, x, y, reveal_labels=False))
        if not torch.equal(guesses[0], y.sort().values):
            wrong += 1
            assert len(guesses) > 1
    assert wrong > 0
