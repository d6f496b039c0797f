"""A single step of Adam or AdamW gives its gradient away: in float64 all of it."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from subjects import seeded
from torch.nn.functional import cross_entropy

from accounting.checks import ConfigError
from attacks import LocalSteps, dlg, leakage, observe, psnr, suite
from attacks.observation import residual_of
from attacks.reconstruction.labels import label_candidates
from attacks.reconstruction.single_step import before_step
from attacks.update import Smoothed, ready

STEP = LocalSteps(learning_rate=0.01, optimizer="adam")
STEPS = [STEP, replace(STEP, weight_decay=0.01), replace(STEP, optimizer="adamw", weight_decay=0.1)]
FULL = {"full": ["*"]}


def single(model, x, y, local):
    """Return the change of the weights of a client that trains in float32 with torch.optim."""
    twin = copy.deepcopy(model).float()
    before = {name: value.detach().clone() for name, value in twin.named_parameters()}
    make = torch.optim.Adam if local.optimizer == "adam" else torch.optim.AdamW
    solver = make(twin.parameters(), lr=local.learning_rate, weight_decay=local.weight_decay)
    cross_entropy(twin(x.float()), y).backward()
    solver.step()
    return {name: value.detach() - before[name] for name, value in twin.named_parameters()}


@pytest.mark.parametrize("local", STEPS, ids=str)
def test_the_gradient_is_told_exactly_in_float64(lenet, digits, local):
    x, y = digits[0][:1], digits[1][:1]
    told, plain = before_step(observe(lenet, x, y, local=local)), observe(lenet, x, y)
    assert told.local is None
    for name, value in plain.update.items():
        torch.testing.assert_close(told.update[name], value, rtol=1e-4, atol=1e-9)
    found = dlg(lenet, told, restarts=1, max_evaluations=300, newton_steps=0)
    assert float(psnr(found.x, x)) > 150


@pytest.mark.parametrize("local", STEPS, ids=str)
def test_what_float32_leaves_of_the_gradient_is_right(lenet, digits, local):
    x, y = digits[0][:1], digits[1][:1]
    seen = replace(observe(lenet, x, y, local=local), update=single(lenet, x, y, local))
    told, plain = before_step(seen), observe(lenet, x, y).update
    (known,) = told.transform.steps
    for name, cut in known(plain).items():
        inside = (plain[name] + known.decay[name]).abs() < 0.9 * known.bounds[name]
        decay = known.decay[name]
        shifted = (told.update[name] + decay)[inside], (cut + decay)[inside]
        torch.testing.assert_close(*shifted, rtol=0.1, atol=1e-7)
    assert residual_of(ready(lenet, False), told, x, y) < 1e-4
    found = dlg(lenet, told, restarts=1, max_evaluations=300, newton_steps=0)
    assert float(psnr(found.x, x)) > 25


@pytest.mark.slow
def test_the_table_of_the_docs(lenet, digits):
    """In float32 a few dB depend on the processor."""
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "audit-leakage.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| Adam")]
    assert len(rows) == 4
    for kind, rate, *columns, known in rows:
        name, _, decay = kind.strip().partition(", weight decay ")
        options = {"optimizer": name.lower(), "weight_decay": float(decay or 0)}
        local = LocalSteps(learning_rate=float(rate), **options)
        for number in range(3):
            x, y = digits[0][number : number + 1], digits[1][number : number + 1]
            exact = observe(lenet, x, y, local=local)
            coarse = replace(exact, update=single(lenet, x, y, local))
            for seen, figures in zip((exact, coarse), columns, strict=True):
                told = before_step(seen)
                found = dlg(lenet, told, restarts=1, max_evaluations=300, newton_steps=0)
                figure = float(figures.removesuffix(" dB ").split(",")[number])
                room = 8 if seen is exact else 5
                assert float(psnr(found.x, x)) == pytest.approx(figure, abs=room), (kind, rate)
        bounds, plain = told.transform.steps[0].bounds, observe(lenet, x, y).update
        sure = sum(int((bounds[name] > value.abs()).sum()) for name, value in plain.items())
        share = 100 * sure / sum(value.numel() for value in plain.values())
        assert known.strip() == ("2 %" if share < 3 else "8 to 9 %"), share


def test_an_audit_of_a_step_in_float32(lenet, digits):
    (x, y), local = digits, STEPS[2]
    x, y = x[1:2], y[1:2]
    attacks = {"dlg": suite(restarts=1, max_evaluations=300, newton_steps=0)["dlg"]}
    update = single(lenet, x, y, local)
    options = {"views": FULL, "attacks": attacks, "local": local, "update": update}
    assert leakage(lenet, x, y, **options).verdict == "recovered"
    for wrong in (replace(local, weight_decay=0.3), replace(local, learning_rate=0.0101)):
        report = leakage(lenet, x, y, **options | {"local": wrong})
        assert report.void
        assert "weight decay" in report.explanation.causes[0]
    assert leakage(lenet, x, y, **options | {"local": replace(local, optimizer="sgd")}).void


def test_other_updates_stay_as_they_are(lenet, digits):
    x, y = digits[0][:1], digits[1][:1]
    for changed in (
        {"local": replace(STEP, steps=2)},
        {"local": LocalSteps(learning_rate=0.01)},
        {"local": STEP, "transform": "signs"},
        {"local": STEP, "clip": 1e-3},
        {"local": STEP, "clip": 1.0, "noise_multiplier": 1e-3, "generator": seeded(0)},
    ):
        seen = observe(lenet, x, y, **changed)
        assert before_step(seen) is seen
    longer = observe(lenet, x, y, local=STEP, clip=100.0)
    assert before_step(longer).local is None


def test_labels_that_a_step_or_a_loss_hides_are_not_guessed(lenet, digits):
    x, y = digits[0][:3], digits[1][:3]
    smooth = {"loss": Smoothed(0.1)}
    for hiding in ({"local": STEP}, smooth, {"transform": "top-k:0.5"}):
        seen = before_step(observe(lenet, x, y, reveal_labels=False, **hiding))
        with pytest.raises(ConfigError, match="cannot be inferred"):
            label_candidates(lenet, seen)
        one = before_step(observe(lenet, x[:1], y[:1], reveal_labels=False, **hiding))
        assert label_candidates(lenet, one)[0].tolist() == y[:1].tolist()
    found = dlg(lenet, observe(lenet, x[:1], y[:1], **smooth), restarts=1, newton_steps=0)
    assert float(psnr(found.x, x[:1])) > 100
