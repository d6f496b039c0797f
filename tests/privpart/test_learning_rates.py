"""Learning rates that change by round, weight decay and Yogi: formulas, plans and replayed runs."""

import numpy as np
import pytest
import torch
from small_study import PLAN, changed

from accounting import ConfigError
from privpart.optimizer import ExactOptimizer, ServerOptimizer
from privpart.settings.rates import RateSchedule
from privpart.training import plan_file
from privpart.training.train import train


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        (RateSchedule(warmup=3), [0.25, 0.5, 0.75, 1, 1, 1]),
        (RateSchedule(kind="linear", final=0.4), [1, 0.9, 0.8, 0.7, 0.6, 0.5]),
        (RateSchedule(kind="steps", at=(2, 4), factor=0.5), [1, 1, 0.5, 0.5, 0.25, 0.25]),
        (RateSchedule(kind="linear", warmup=9), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
    ],
)
def test_shares_by_round(schedule, shares):
    assert [schedule.share(r, 6) for r in range(6)] == pytest.approx(shares)


def test_a_cosine_is_that_of_torch_and_never_zero():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    ours = RateSchedule(kind="cosine")
    for round_ in range(20):
        assert ours.share(round_, 20) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        scheduler.step()
    assert ours.share(10**6 - 1, 10**6) > 0


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"kind": "constant"}, "changes nothing"),
        ({"kind": "steps"}, "needs rounds"),
        ({"kind": "linear", "at": (3,)}, "the others have none"),
        ({"kind": "steps", "at": (4, 2)}, "increasing"),
        ({"kind": "steps", "at": (2,), "final": 0.5}, "only for linear and cosine"),
        ({"kind": "cosine", "final": float("nan")}, "from 0 to 1"),
        ({"kind": "cosine", "warmup": -1}, "at least 0"),
        ({"kind": "fast"}, "must be one of"),
    ],
)
def test_schedules_that_mean_nothing_are_refused(values, says):
    with pytest.raises(ConfigError, match=says):
        RateSchedule(**values)


def test_yogi_and_decay_take_the_steps_of_their_papers():
    draws = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(5, generator=draws), torch.randn(4, 5, generator=draws)
    part = start.clone()
    settings = ServerOptimizer(kind="yogi", learning_rate=0.1, adaptivity=0.01, weight_decay=0.2)
    steps = ExactOptimizer(settings, [part])
    x, m, v = start.double().numpy(), np.zeros(5), np.full(5, 0.01**2)
    for share, gradient in zip((0.5, 1.0, 1.0, 0.1), gradients, strict=True):
        steps.begin([0], share)
        steps.move(0, slice(0, 5), gradient.clone().numpy())
        g, rate = gradient.double().numpy(), 0.1 * share
        x = x * (1 - rate * 0.2)
        m = 0.9 * m + 0.1 * g
        v = v - 0.001 * g**2 * np.sign(v - g**2)
        x = x - rate * m / (np.sqrt(v) + 0.01)
    assert part.numpy() == pytest.approx(x, rel=1e-5, abs=1e-6)


RATES = """[learning_rates]
{} = {{ kind = "steps", at = [1], factor = 1e-12 }}
[server]
kind = "yogi"
weight_decay = 0.1"""


def released(folder, name, server) -> torch.Tensor:
    text = changed(("[server]", server), text=PLAN)
    (folder / f"{name}.toml").write_text(text)
    run = train(plan=folder / f"{name}.toml", out=folder / name, seed=1, progress=False)
    return torch.cat([part.flatten() for part in run.module().state_dict().values()])


def test_rates_reach_the_clients_and_the_server(tmp_path):
    """Each schedule changes the model, and not as the other does."""
    plain = released(tmp_path, "plain", "[server]\nkind = 'yogi'\nweight_decay = 0.1")
    client = released(tmp_path, "clients", RATES.format("client"))
    server = released(tmp_path, "servers", RATES.format("server"))
    decay = released(tmp_path, "decay", "weight_decay = 0.5\n[server]\nkind = 'yogi'")
    assert not torch.equal(plain, client)
    assert decay.norm() < 0.99 * plain.norm()
    assert not torch.equal(plain, server)
    assert not torch.equal(client, server)


def test_plans_without_rates_keep_their_hash_and_misfits_are_refused():
    assert "learning_rates" not in plan_file.parse(PLAN).to_json()
    assert "weight_decay" not in plan_file.parse(PLAN).to_json()
    local = "weight_decay = 0.1\n[server]"
    assert "weight_decay" in plan_file.parse(changed(("[server]", local), text=PLAN)).to_json()
    beside = "[learning_rates]\nserver = { kind = 'cosine' }\n[canaries]\ncount = 20\n[server]"
    with pytest.raises(ConfigError, match=r"learning_rates\.server"):
        plan_file.parse(changed(("[server]", beside), text=PLAN))
