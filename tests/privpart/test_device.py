"""Clients on another device than the CPU.

CUDA where there is one. And a pretend device, on which nothing may meet a tensor that was left on
the CPU: it registers itself for a whole process, so that process is another one.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import small_cohorts
import torch
from small_cohorts import random_users, run_on_a_pretend_device
from torch import nn

from accounting import ConfigError
from privpart import EmbeddedEngine, LocalTraining, PartialModel, RoundTask, Users
from privpart.clip import clip, clip_rows
from privpart.engines import methods as local_work
from privpart.engines import recorded
from privpart.engines.device import float32_products, namespace
from privpart.engines.methods import LocalComputation, Method
from privpart.engines.options import EngineOptions
from privpart.model import checksum, same_bits

pytestmark = pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv"), reason="on accelerators privpart needs torch 2.9"
)
HERE = Path(__file__).parent
SIZES = (8, 3, 5, 0, 8)
TASK = RoundTask(3, tuple(range(len(SIZES))), 0.2, "plan")
LOCAL = LocalTraining(0.2, epochs=2, batch_size=3)


EVERY_WAY = f"{HERE / 'test_engine.py'}::test_every_way_is_the_same_training"
FEW = (
    "pretend and not on_a_pretend_device and (not every_way or part-epochs and cnn)"
    " and not (take_turns and 1)"
)


@pytest.mark.parametrize(
    "tests",
    [
        ["-k", FEW, str(HERE / "test_device.py"), str(HERE / "test_engine.py")],
        # not where pretending ends, see pretend_device.py
        pytest.param(["-k", "not (cnn and one)", EVERY_WAY], marks=pytest.mark.slow),
    ],
    ids=["one way", "every way"],
)
def test_the_engine_on_a_pretend_device(tests, process_with_torch, tmp_path):
    path = tmp_path / "said"
    process = process_with_torch.Process(target=run_on_a_pretend_device, args=(tests, path))
    process.start()
    process.join()
    said = path.read_text()
    assert process.exitcode == 0, said
    assert int(re.search(r"(\d+) passed", said)[1]) >= 17


def cnn(train=("*",), **options):
    return PartialModel(small_cohorts.cnn, train=train, seed=1, **options)


def users():
    return random_users(SIZES)


def updates(model, local=LOCAL, task=TASK, **options):
    options = {"batching": "loop", "report": lambda _: None} | options
    engine = EmbeddedEngine(model, users(), local=local, data_seed=5, **options)
    return torch.stack([u.update for u in engine.run(task, model.flat.clone())])


@pytest.mark.parametrize("batching", ["loop", "vmap"])
def test_updates_are_clipped_on_the_device_at_once_and_the_model_stays(
    accelerator, batching, monkeypatch
):
    clipped, model = [], cnn()
    monkeypatch.setattr(
        local_work, "clip_rows", lambda rows, c: clipped.append(rows) or clip_rows(rows, c)
    )
    before = {name: p.clone() for name, p in model.module.state_dict().items()}
    found = updates(model, device=accelerator, batching=batching)
    assert (type(found), found.is_cpu, found.dtype) == (torch.Tensor, True, torch.float32)
    assert (found.double().norm(dim=1) <= TASK.clip_norm).all()
    assert (found.norm(dim=1) > 0.1 * TASK.clip_norm).sum() == 4
    assert [(rows.device.type, len(rows)) for rows in clipped] == [(accelerator, len(SIZES))]
    for name, value in model.module.state_dict().items():
        assert value.is_cpu
        assert torch.equal(value, before[name])


def repeated(work, *_):
    """Calls the step again, where a CUDA graph would repeat its kernels."""
    work()
    return work


def test_recorded_steps_are_the_plain_training(accelerator, monkeypatch):
    if accelerator == "pretend":
        monkeypatch.setattr(recorded, "record", repeated)
    device, model, method = torch.device(accelerator), cnn(), Method(recorded=True)
    there = LocalComputation(model.on(device), users().on(device), local=LOCAL, data_seed=5)
    found = torch.empty(len(SIZES), model.dim)
    for round_, rate in ((1, 0.4), (3, 0.2)):  # the rate of a schedule, and another order
        there.local, task = replace(LOCAL, learning_rate=rate), replace(TASK, round=round_)
        there.updates(task, TASK.clients, model.flat.clone(), method, found)
    here = updates(cnn())
    assert (found - here).norm(dim=1).max() < 1e-5 * TASK.clip_norm
    assert (here.norm(dim=1) > 0.1 * TASK.clip_norm).sum() == 4  # power


def test_what_a_recording_would_not_see_is_not_recorded(accelerator, monkeypatch):
    if accelerator == "pretend":
        monkeypatch.setattr(recorded, "record", repeated)
    device, out = torch.device(accelerator), torch.empty(len(SIZES), 650)
    model = PartialModel(Counting, seed=0).on(device)
    there = LocalComputation(model, users().on(device), local=LOCAL, data_seed=5)
    method = Method(recorded=True)
    with pytest.raises(RuntimeError, match=r"writes to its buffers|in-place|inplace"):
        there.updates(TASK, TASK.clients, model.flat.cpu().clone(), method, out)


def test_as_many_clients_are_computed_at_once_as_fit_into_free_memory(accelerator, monkeypatch):
    real, chunks = local_work.LocalComputation.updates, []

    def counting(self, task, clients, *others):
        chunks.append(len(clients))
        return real(self, task, clients, *others)

    monkeypatch.setattr(local_work.LocalComputation, "updates", counting)
    kind = namespace(torch.device(accelerator))
    model = cnn()
    for free, wanted in ((2**30, [5]), (4 * model.dim * 16 * 2, [1, 2, 2])):
        chunks.clear()
        monkeypatch.setattr(kind, "mem_get_info", lambda _, free=free: (free, 2**31))
        updates(model, LocalTraining(0.2, batch_size=8), device=accelerator, batching="vmap")
        assert sorted(chunks) == wanted


@pytest.mark.parametrize("left", ["users", "model"])
@pytest.mark.parametrize("batching", ["loop", "vmap"])
def test_what_was_left_on_the_cpu_is_noticed(accelerator, monkeypatch, left, batching):
    updates(cnn(), device=accelerator, batching=batching)
    if left == "users":
        monkeypatch.setattr(Users, "on", lambda self, _: self)
    else:
        moved = users().on(torch.device(accelerator))
        monkeypatch.setattr(PartialModel, "on", lambda self, _: self)
        monkeypatch.setattr(Users, "on", lambda _, __: moved)
    # which of the two sentences of torch depends on the device, and on what meets first
    with pytest.raises(
        (RuntimeError, ConfigError), match=r"device|Input type .* should be the same"
    ):
        updates(cnn(), device=accelerator, batching=batching)


class Counting(nn.Module):
    """Every pass sees how many were before it."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.dense, self.dropout = nn.Linear(64, 10), nn.Dropout(dropout)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 64))

    def forward(self, x):
        self.passes += 1
        return self.dense(self.dropout(x.flatten(1) * self.scale)) * (1 + self.passes)


def test_buffers_are_reset_on_the_device(accelerator):
    found = []
    for device in ("cpu", accelerator):
        model = PartialModel(Counting, seed=0)
        model.module.passes += 7  # as a look at the model may leave it
        found.append(updates(model, device=device))
    assert (found[0] - found[1]).norm(dim=1).max() < 1e-5 * TASK.clip_norm
    assert found[0].any()


def test_dropout_is_seeded_on_the_device_and_leaves_its_generator_alone(accelerator):
    states, found = [], []
    for _ in range(2):
        model = PartialModel(Counting(0.5), seed=0, overwrite=True)
        found.append(updates(model, device=accelerator))
        states.append(namespace(torch.device(accelerator)).get_rng_state(accelerator))
        torch.rand(3, device=accelerator)
    assert torch.equal(*found)
    assert not torch.equal(found[0], updates(PartialModel(Counting, seed=0), device=accelerator))
    if accelerator == "pretend":
        assert namespace(torch.device(accelerator)).seeds
        assert not states[0].any()


def test_a_checksum_sees_every_kind_of_rewriting_on_the_device(accelerator, rewrite):
    one, other = torch.randn(2, 64, 3, generator=torch.Generator().manual_seed(0))
    one[0] = 0.0  # whose sign is a bit as well
    one, other = one.to(accelerator), other.to(accelerator)
    before, copy = checksum([one, other]), one.clone()
    assert before == checksum([copy, other])
    assert same_bits(one, copy)
    rewrite(one, other, 0.5)
    assert before != checksum([one, other])
    assert not same_bits(one, copy)


def test_bfloat16_is_asked_of_the_device(accelerator):
    seen, model = [], cnn()
    model.module.register_forward_hook(
        lambda *_: seen.append([torch.is_autocast_enabled(kind) for kind in (accelerator, "cpu")])
    )
    found = updates(model, precision="bfloat16", device=accelerator)
    assert found.dtype is torch.float32
    assert seen
    assert all(kinds == [True, False] for kinds in seen)


NO_DEVICE, NOT_HERE = "torch knows no such device; use 'cpu', 'cuda'", "torch .* sees cpu.*; use"


@pytest.mark.parametrize(
    ("device", "says"),
    [
        *((name, NO_DEVICE) for name in ("gpu", "cuda:-1", None, torch.float32)),
        *((name, NOT_HERE) for name in ("meta", torch.device("xpu:99"))),
    ],
)
def test_a_device_that_is_none_or_not_here(device, says):
    with pytest.raises(ConfigError, match=rf"device=.*: {says}"):
        updates(cnn(), device=device)


@pytest.mark.parametrize("tf32", [False, True])
def test_products_are_rounded_only_if_asked_and_the_setting_comes_back(tf32):
    kinds = (torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul)
    before = [kind.fp32_precision for kind in kinds]
    with float32_products(tf32=tf32):
        assert [kind.fp32_precision for kind in kinds[: 2 + tf32]] == (
            ["tf32"] * 3 if tf32 else ["ieee"] * 2
        )
    assert [kind.fp32_precision for kind in kinds] == before
    assert "ieee" not in before[:2]  # power: torch's default rounds
    assert EngineOptions(device="cuda:1", precision="tf32").precision == "tf32"
    with pytest.raises(ConfigError, match=r"tf32: only CUDA .* device=cpu; use device='cuda'"):
        updates(cnn(), precision="tf32")


@pytest.mark.parametrize("batching", ["loop", "auto"])
@pytest.mark.parametrize("local", [LocalTraining(0.2, batch_size=8, steps=1), LOCAL])
def test_sums_of_clipped_updates_are_computed_on_the_device(accelerator, local, batching):
    task, found = replace(TASK, clients=(0, 1, 2, 3), sum_clip_norm=0.199), []
    for device in ("cpu", accelerator):
        model = PartialModel(small_cohorts.dense, seed=1)  # pretending ends at vmapped norms
        engine = EmbeddedEngine(
            model, users(), local=local, data_seed=5, device=device, sums=True,
            batching="loop" if device == "cpu" else batching,
        )  # fmt: skip
        start = model.flat.clone()
        if device == "cpu":
            assert engine.sums(task, start) is None
            found.append(sum(clip(u.update, 0.199).double() for u in engine.run(task, start)))
            continue
        (part,) = engine.sums(task, start)
        assert (part.clients, part.unclipped, part.total.is_cpu) == (task.clients, 1, True)
        found.append(part.total)
        assert engine.sums(replace(task, clients=(0, 0)), start) is None
        assert engine.method.ghost_sum == (batching == "auto" and local.steps == 1)
    assert (found[0] - found[1]).norm() < 1e-5
    assert found[0].norm() > 0.1
