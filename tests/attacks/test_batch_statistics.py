"""Running statistics that a client sends tell the mean and variance of its batch."""

from dataclasses import replace

import pytest
import torch
from subjects import normalised
from torch import nn

from accounting import ConfigError
from attacks import LocalSteps, explain, leakage, observe, suite
from attacks.reconstruction.batch_statistics import sent_statistics, statistics_gap, with_buffers
from attacks.report import VERDICTS
from privpart.cli.audit.tables import summary

ONLY = {"norm": ["1.*"]}
BRIEF = suite(restarts=1, max_evaluations=120, newton_steps=0, steps=0, tv=0)


@pytest.fixture
def model():
    return normalised()


def trained_by_torch(model, x, y, steps=1):
    """Return the state dict of a client that trains as torch does, momentum and all."""
    model = model.double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(steps):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    return {name: after[name] - before[name] for name in after}


def test_they_are_those_of_the_batch_as_torch_computes_them(model, digits):
    x, y = digits[0][:3], digits[1][:3]
    model(x.float())  # so that the buffers before the round are not 0 and 1
    change = trained_by_torch(model, x, y)
    seen = observe(model, x, y, local=LocalSteps(learning_rate=0.1))
    sent = replace(
        seen, buffers={k: seen.state[k] + change[k] for k in seen.state if "running" in k}
    )
    found = sent_statistics(model, sent)
    inner = model[0](x)
    assert torch.allclose(found["1.running_mean"], inner.mean((0, 2, 3)), atol=1e-12)
    assert torch.allclose(found["1.running_var"], inner.var((0, 2, 3)), atol=1e-12)
    assert set(found) == {f"{i}.running_{k}" for i in (1, 4) for k in ("mean", "var")}
    assert float(statistics_gap(model, sent)(x)) < 1e-20
    assert float(statistics_gap(model, sent)(digits[0][3:6])) > 1e-2
    made = with_buffers(model, seen, x)
    for name, value in sent.buffers.items():
        assert torch.allclose(made.buffers[name], value, atol=1e-12)


def test_they_say_nothing_after_several_steps_or_in_eval_mode(model, digits):
    x, y = digits[0][:2], digits[1][:2]
    seen = with_buffers(model, observe(model, x, y), x)
    steps = LocalSteps(learning_rate=0.1, steps=2)
    assert sent_statistics(model, replace(seen, local=steps)) == {}
    assert sent_statistics(model, replace(seen, training=False)) == {}
    assert statistics_gap(model, observe(model, x, y)) is None
    with pytest.raises(ConfigError, match="after 2 local steps"):
        with_buffers(model, replace(seen, local=steps), x)


def test_sent_buffers_change_the_verdict_and_are_told(model, digits):
    x, y = digits[0][:1], digits[1][:1]
    both = {name: BRIEF[name] for name in ("dlg", "dlg + statistics")}
    options = {"views": {"first": ["0.*"]}, "attacks": both, "clip": 100.0}
    sent = leakage(model, x, y, send_buffers=True, **options)
    assert sent.verdict == "recovered"
    assert sent.rows[0].to_dict()["by_attack"]["dlg + statistics"]["verdict"] == "recovered"
    kept = leakage(model, x, y, **options)
    assert kept.verdict != "recovered"
    assert list(kept.rows[0].to_dict()["by_attack"]) == ["dlg"]
    assert (sent.threat["buffers"], kept.threat["buffers"]) == ("sent", "not sent")
    assert not [told for told in summary(kept).warnings if "buffers" in told]
    options["attacks"] = {"dlg": suite(restarts=1, max_evaluations=2, newton_steps=0)["dlg"]}
    noisy = leakage(model, x, y, send_buffers=True, noise_multiplier=1.0, **options)
    assert (
        "no clip and no noise covers them, and epsilon 4.378 is not" in summary(noisy).warnings[0]
    )


def test_an_audit_uses_them_and_says_so(model, digits):
    x, y = digits[0][:1], digits[1][:1]
    change = trained_by_torch(model, x, y)
    local = LocalSteps(learning_rate=0.1)
    quick = suite(restarts=1, max_evaluations=10, newton_steps=0, steps=0, tv=0)
    options = {"views": ONLY, "local": local, "attacks": quick}
    report = leakage(model, x, y, update=change, **options)
    assert report.verdict in VERDICTS[:5]
    assert report.threat["buffers"] == "sent"
    assert "dlg + statistics" in report.rows[0].by_attack or report.verdict == "recovered"
    with pytest.raises(ConfigError, match="a given update"):
        leakage(model, x, y, update=change, send_buffers=True, **options)


def test_statistics_of_other_images_make_an_audit_void(model, digits):
    x, y = digits[0][:2], digits[1][:2]
    seen = with_buffers(model, observe(model, x, y), x)
    assert explain(model, seen, x, y).explained
    other = with_buffers(model, observe(model, x, y), digits[0][2:4])
    told = explain(model, other, x, y)
    assert not told.explained
    assert told.causes[0].startswith("buffers: the running statistics")
    bad = {name: value[:1] for name, value in seen.buffers.items()}
    with pytest.raises(ConfigError, match="shape"):
        replace(seen, buffers=bad)
