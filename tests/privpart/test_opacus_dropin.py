"""In the place of Opacus's PrivacyEngine: its keywords and methods, Poisson samples, parts."""

import inspect
import io
import re
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from loops import (
    BATCH,
    CLIP,
    EPOCHS,
    STEPS,
    Breaks,
    beside_the_noise,
    data,
    in_turn,
    net,
    private,
    released,
    sampled,
    sizes,
    step,
    steps_of,
    train,
)
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant
from opacus.grad_sample import grad_sample_module
from opacus.layers import DPLSTM
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accounting import ConfigError, PoissonSampling, SampledGuarantee
from privpart.example_level import FTRLEngine
from privpart.example_level.keywords import _MEANINGS
from privpart.example_level.loader import Passes, Rows
from privpart.example_level.optimizer import FTRLOptimizer, sampled_sum_error, weighted_sum
from privpart.run.budget_book import all_runs
from privpart.run.folder import RunFolder
from privpart.run.report import run_report
from privpart.training.verify import check_run

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def test_every_keyword_of_opacus_is_known():
    """With the value that means the same, a run is the one without it."""
    here = {*inspect.signature(FTRLEngine.make_private).parameters, *_MEANINGS}
    of_opacus = inspect.signature(PrivacyEngine.make_private).parameters.keys()
    assert of_opacus - {"kwargs"} <= here
    same = {"poisson_sampling": False, "grad_sample_mode": "hooks", "loss_reduction": "mean"}
    same |= {"batch_first": True, "clipping": "flat", "noise_generator": None, "criterion": None}
    same |= {"wrap_model": True, "rand_on_empty": False}
    plain = train(*private()[1:], epochs=1)
    assert torch.equal(train(*private(**same)[1:], epochs=1), plain)
    by_functorch = train(*private(grad_sample_mode="functorch")[1:], epochs=1)
    assert torch.allclose(by_functorch, plain, atol=1e-5)
    engine = FTRLEngine(accountant="gdp", secure_mode=True)
    assert engine.accountant is not None


REFUSED = {
    "clipping": [("per_layer", "over all trained parameters jointly"), ("adaptive", "flat")],
    "noise_generator": [(torch.Generator(), r"FTRLEngine\(seed=0\)")],
    "grad_sample_mode": [
        ("ghost", "BatchMemoryManager"),
        ("ew", "past the hooks"),
        ("other", "must be 'hooks' or 'functorch'"),
    ],
    "criterion": [(nn.CrossEntropyLoss(), "call the loss in the loop")],
    "wrap_model": [(False, "compares what it is called with"), (1, "must be True")],
    "rand_on_empty": [(True, "its step is noise alone")],
    "batch_first": [("yes", "must be True or False")],
    "poisson_sampling": [(None, "must be True or False")],
    "loss_reduction": [("none", "loss_reduction")],
    "max_grad_norm": [([1.0, 1.0], "is one number"), ("1", "max_grad_norm")],
    "target_unclipped_quantile": [(0.5, "clipping='adaptive'")],
    "epsilon_tolerance": [(0.1, "within 1e-4")],
    "max_grad_nrm": [(1.0, "Did you mean max_grad_norm")],
    "mechanism": [(3, "is a int; must be a name"), (BATCH, "must be a name")],
    "module": [
        (None, "must be a torch.nn.Module"),
        (nn.Linear, "Module that was called"),
        (nn.DataParallel(net()), "Pass the module inside of it"),
    ],
    "optimizer": [("sgd", "must be a torch.optim optimizer"), (torch.optim.SGD, "that was called")],
    "data_loader": [
        ([1, 2], "must be a torch.utils.data.DataLoader"),
        (DataLoader(data(), sampler=range(3)), "a sampler of its own"),
        (DataLoader(data(), batch_size=None), "Make it with batch_size"),
    ],
    "out": [(3, "is a int"), ("", "must be a name")],
    "population": [(["a"], "is a list; must be a name")],
    "resume": [("yes", "must be True or False")],
    "allow_large_delta": [(1, "must be True or False")],
    "scheduler": [("cosine", "must be one of torch.optim.lr_scheduler")],
    "epochs": [(None, "epochs is missing"), (2.5, "epochs")],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_means_something_else_has_a_sentence_of_its_own(name):
    for value, words in REFUSED[name]:
        module = net()
        given = {
            "module": module,
            "optimizer": torch.optim.SGD(module.parameters(), lr=1.0),
            "data_loader": DataLoader(data(), batch_size=BATCH),
            "epochs": EPOCHS,
            "max_grad_norm": CLIP,
            "noise_multiplier": 1.0,
        }
        with pytest.raises(ConfigError, match=words) as refused:
            FTRLEngine().make_private(**given | {name: value})
        assert str(refused.value).startswith((name, f"{name}=", "module: is"))
        assert str(refused.value).endswith((".", "?"))
        assert not any(layer._forward_hooks for layer in module.modules())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accountant": "rdp"}, "is looser"),
        ({"accountant": 3}, "accountant=3: must be 'prv'"),
        ({"secure_mode": "yes"}, "secure_mode='yes': must be True or False"),
        ({"secure_mode": True, "seed": 0}, "seed: noise from a seed is not secure"),
    ],
)
def test_the_constructor_refuses_what_it_does_not_do(options, words):
    with pytest.raises(ConfigError, match=words):
        FTRLEngine(**options)


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.lstm(x[:, None])[0][:, -1])


def test_layers_are_validated_before_training_and_have_a_replacement():
    normed = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    for module, words in ((Letters(), "with a DPLSTM of the same weights"), (normed, "its stat")):
        with pytest.raises(ConfigError, match=words):
            private(module)
        others = {"optimizer": None, "data_loader": None}
        assert not FTRLEngine().is_compatible(module=module, **others)
        fixed = FTRLEngine.get_compatible_module(module)
        assert FTRLEngine().is_compatible(module=fixed, **others)
        assert len(train(*private(fixed)[1:], epochs=1)) == 3
    x = torch.randn(2, 5)
    before = Letters()
    after = FTRLEngine.get_compatible_module(before)
    assert isinstance(after.lstm, DPLSTM)
    assert torch.allclose(before(x), after(x), atol=1e-6)


class Twice(nn.Module):
    """A layer whose weights are used twice for each example."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Tied(nn.Module):
    """Two layers of which the weights are one tensor, and the biases are not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Language(nn.Module):
    """Tokens whose embedding is the output's matrix as well, as in GPT-2."""

    def __init__(self):
        super().__init__()
        self.tokens, self.middle = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, x):
        return self.out(torch.tanh(self.middle(self.tokens((x > 0).long()))).mean(1))


@pytest.mark.parametrize("kind", [Twice, Tied, Language])
def test_shared_parameters_are_clipped_once_over_both_uses(kind):
    """By one backward pass for each example; the clip norm is over both uses together."""
    module, whole = kind(), data(scale=3.0)
    made = private(module, whole, noise_multiplier=1e-3, max_grad_norm=CLIP)
    x, y = next(iter(made[3]))
    start = [p.detach().clone() for p in module.parameters()]
    expected = torch.zeros(sum(p.numel() for p in module.parameters()))
    alone = kind()
    for one, label in zip(x, y, strict=True):
        for p, q in zip(alone.parameters(), start, strict=True):
            p.data.copy_(q)
            p.grad = None
        nn.functional.cross_entropy(alone(one[None]), label[None]).backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in alone.parameters()])
        expected += gradient * min(1.0, CLIP / float(gradient.norm()))
    step(*made[1:3], (x, y))
    assert (released(module) - expected).norm() < 0.02 * CLIP


def forgets(*, param, grad_sample, max_batch_len):
    param._current_grad_sample = grad_sample


@pytest.mark.parametrize("kind", [Twice, Tied, Language])
def test_a_version_of_opacus_that_forgets_a_use_is_refused(kind, monkeypatch):
    made = private(kind(), data(scale=3.0))
    monkeypatch.setattr(grad_sample_module, "create_or_accumulate_grad_sample", forgets)
    with pytest.raises(ConfigError, match="its gradient is not the mean of its per-example"):
        step(*made[1:3], next(iter(made[3])))


# Poisson samples


def test_epsilon_of_samples_is_that_of_the_sampled_gaussian():
    made = sampled(noise_multiplier=2.0)
    engine, steps = made[0], len(sizes(made))
    probability = PoissonSampling(2, 11).probability
    assert engine.get_epsilon(1e-5) == SampledGuarantee(2.0, probability, steps).epsilon(1e-5)
    assert engine.accountant.get_epsilon(1e-5) == engine.get_epsilon(1e-5)
    # Opacus samples with 1 / batches, 1/6 here, which is less than 2/11
    opacus = PRVAccountant()
    opacus.history = [(2.0, probability, steps)]
    assert engine.get_epsilon(1e-5) == pytest.approx(opacus.get_epsilon(1e-5), rel=0.02)
    assert engine.accountant.history == []
    steps_of(made, 1)
    assert engine.accountant.history == [(2.0, probability, 6)]
    assert engine.report(1e-5).adjacency == "add-or-remove"
    calibrated = sampled(noise_multiplier=None, target_epsilon=3.0, delta=1e-5)
    assert 2.999 < calibrated[0].get_epsilon(1e-5) <= 3.0


def silent_if_nobody_came(optimizer, noise, own=FTRLOptimizer._release):
    own(optimizer, noise * bool(optimizer.passes.batch(optimizer.passes.done - 1)))


@pytest.mark.parametrize("breaks", [False, True])
def test_a_batch_of_nobody_is_a_step_of_noise_alone(breaks, monkeypatch):
    if breaks:
        monkeypatch.setattr(FTRLOptimizer, "_release", silent_if_nobody_came)
    made = sampled(noise_multiplier=50.0)
    noised = steps_of(made)
    assert len(noised) == 60
    assert (sizes(made) == 0).sum() > 3
    differs = beside_the_noise(made, noised)
    # float32 of the released gradient
    whole = bool((differs <= sizes(made) * CLIP + 1e-3).all())
    assert whole != breaks


def test_an_example_joins_with_its_probability_and_nobody_else_is_dealt():
    made = sampled(epochs=400)
    batches = [made[2].passes.batch(t) for t in range(2400)]
    counts = np.bincount(list(chain.from_iterable(batches)), minlength=11)
    expected, spread = 2400 * 2 / 11, np.sqrt(2400 * 2 / 11 * 9 / 11)
    assert (abs(counts - expected) < 5 * spread).all()
    assert len({tuple(b) for b in batches[:60]}) > 30
    fresh = [sampled(seed=None)[2].passes.batch(t) for t in range(60)]
    assert fresh != batches[:60]


def test_samples_under_ledger_report_verify_and_book(tmp_path):
    folder = tmp_path / "run"
    ends = []
    for part, epochs in ((1, 3), (2, 10)):
        options = {"out": folder, "resume": True, "delta": 1e-5, "population": "sampled ones"}
        made = sampled(seed=None, noise_multiplier=2.0, **options)
        engine, module, optimizer, loader = made
        assert optimizer.passes.done == (18 if part == 2 else 0)
        for _ in range(min(epochs, engine.epochs_left)):
            for batch in loader:
                step(module, optimizer, batch)
        ends.append(optimizer.passes.done)
        engine.close()
    assert ends == [18, 60]
    found = run_report(folder)
    words = {a.code: a.status for a in found.guarantee.assumptions}
    assert words["poisson-sampling"] == words["participation"] == "verified"
    assert words["clipping"] == words["noise"] == words["divisor"] == "enforced"
    assert words["hidden-sample"] == words["loop"] == words["floating-point"] == "asserted"
    assert found.guarantee.epsilon == engine.epsilon(1e-5)
    assert found.complete
    assert found.realised is None
    assert not [c for c in check_run(folder) if c.status == "wrong"]
    with RunFolder.open(folder) as run:
        assert all_runs(run.facts, 1e-5).runs == 1


@pytest.mark.parametrize("breaks", [False, True])
def test_who_is_not_drawn_moves_the_sum_of_the_others_by_no_rounding(breaks):
    """Rows behind it move up into other groups, which float32 would round in another way."""
    rows = torch.randn(1000, 50, generator=torch.Generator().manual_seed(0))
    factors = torch.rand(1000, generator=torch.Generator().manual_seed(1))
    lengths = float((rows * factors[:, None]).norm(dim=1).max())
    whole = weighted_sum(rows, factors, wide=not breaks)
    single = weighted_sum(rows[3:4], factors[3:4], wide=not breaks)
    others = torch.arange(1000) != 3
    without = weighted_sum(rows[others], factors[others], wide=not breaks)
    moved = (whole - single - without).norm()
    assert bool(moved <= sampled_sum_error(1000) * lengths) != breaks


def test_samples_are_summed_in_float64_with_their_error_off_the_clip_norm(monkeypatch):
    widths, own = [], weighted_sum

    def noted(flat, factors, *, wide):
        widths.append(wide)
        return own(flat, factors, wide=wide)

    monkeypatch.setattr("privpart.example_level.optimizer.weighted_sum", noted)
    fixed, drawn = private(), sampled()
    train(*fixed[1:], epochs=1)
    assert set(widths) == {False}
    widths.clear()
    steps_of(drawn, 1)
    assert set(widths) == {True}
    assert drawn[2]._sum_error == fixed[2]._sum_error + sampled_sum_error(11)


def test_who_is_not_drawn_moves_nobody_to_another_process():
    whole, without = [1, 2, 5, 8], [2, 5, 8]
    for rank in range(2):
        one, other = (Passes([batch], 1, Rows(), rank, 2).own(0) for batch in (whole, without))
        assert [i for i in one if i != 1] == other


def test_worker_processes_read_samples_ahead():
    workers = {"batch_size": 2, "num_workers": 1, "persistent_workers": True}
    assert torch.equal(steps_of(sampled(loader=workers)), steps_of(sampled()))


def test_a_changed_optimizer_is_nobodys_word_also_where_nobody_came(monkeypatch, tmp_path):
    made = sampled(seed=None, out=tmp_path / "run", delta=1e-5, noise_multiplier=2.0)
    own, (engine, _, optimizer, loader) = FTRLOptimizer._factors, made

    def broken():
        with monkeypatch.context() as patch:
            patch.setattr(FTRLOptimizer, "_factors", partial(own))
            FTRLOptimizer.step(optimizer)

    optimizer.passes.step = broken
    for _ in range(10):
        for batch in loader:
            step(made[1], optimizer, batch)
    engine.close()
    words = {a.code: a.status for a in run_report(tmp_path / "run").guarantee.assumptions}
    assert words["clipping"] == words["participation"] == "asserted"


def test_a_report_of_samples_does_not_name_the_step_whose_rows_differ(tmp_path):
    made = sampled(seed=None, out=tmp_path / "run", delta=1e-5, epochs=1)
    for x, y in made[3]:
        step(*made[1:3], (x + 1e-3, y))
    made[0].close()
    line = next(
        a for a in run_report(tmp_path / "run").guarantee.assumptions if a.code == "participation"
    )
    assert line.status == "asserted"
    assert "since some step" in line.evidence


def test_a_banded_mechanism_takes_turns_and_others_are_refused():
    made = sampled(mechanism="toeplitz:bands=2", noise_multiplier=50.0)
    assert all(i % 2 == t % 2 for t in range(60) for i in made[2].passes.batch(t))
    assert (beside_the_noise(made, steps_of(made)) <= sizes(made) * CLIP + 1e-3).all()
    for options, words in (
        ({"mechanism": "blt"}, "'independent' noise is DP-SGD"),
        ({"order_seed": 0}, "order_seed: is of fixed passes"),
        ({"loader": {"batch_size": 12}}, "above the number of examples, 11"),
        ({"loader": {"batch_size": 2, "drop_last": True}}, "leaves examples out"),
    ):
        with pytest.raises(ConfigError, match=words):
            sampled(**options)
    with pytest.raises(ConfigError, match="no upper bound with poisson_sampling"):
        sampled(engine=FTRLEngine(accountant="gdp"))


# Gradient accumulation


def by_backward_passes(made, batch):
    _, module, optimizer, _ = made
    optimizer.zero_grad()
    for x, y in zip(*batch, strict=True):
        nn.functional.cross_entropy(module(x[None]), y[None]).backward()
    optimizer.step()


def by_manager(made, epochs):
    _, module, optimizer, loader = made
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=1, optimizer=optimizer)
    with manager as small:
        for _ in range(epochs):
            for batch in small:
                step(module, optimizer, batch)


WAYS = {"skipped steps": in_turn, "backward passes": by_backward_passes}


def first_sum(way, dataset, **options):
    made = private(dataset=dataset, noise_multiplier=50.0, **options)
    way(made, next(iter(made[3])))
    return made, released(made[1])


def jointly(optimizer, samples, own=FTRLOptimizer._factors):
    """Clip the sum of a part in place of its examples: wrong of examples that agree."""
    total = [None if s is None else s.sum(0, keepdim=True) for s in samples]
    return own(optimizer, total).expand(max(len(s) for s in samples if s is not None))


def noise_by_part(optimizer, own=FTRLOptimizer._add_up):
    if optimizer.noise.round < BATCH - 1:
        optimizer._total.add_(optimizer.noise.next().double() * optimizer._grid.step(CLIP))
    return own(optimizer)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("breaks", [None, "_factors"])
def test_accumulated_gradients_are_clipped_by_example(way, breaks, monkeypatch):
    """One example moves the sum by the clip norm, also where a part has several."""
    if breaks:
        monkeypatch.setattr(FTRLOptimizer, breaks, lambda own, s: torch.ones(len(s[0])))
    whole = data(scale=40.0)
    made, with_it = first_sum(way, whole)
    member = made[2].passes.batch(0)[1]
    x, y = (t.clone() for t in whole.tensors)
    x[member] = 0.0
    without = first_sum(way, TensorDataset(x, y))[1]
    assert ((with_it - without).norm() <= 2 * CLIP) != bool(breaks)


@pytest.mark.parametrize("breaks", [False, True])
def test_accumulated_gradients_have_noise_once(breaks, monkeypatch):
    made = private(noise_multiplier=50.0)
    if breaks:
        monkeypatch.setattr(FTRLOptimizer, "_add_up", noise_by_part)
    in_turn(made, next(iter(made[3])))
    differs = beside_the_noise(made, released(made[1])[None])
    assert bool(differs <= BATCH * CLIP) != breaks
    assert made[2].noise.round == (1 if not breaks else BATCH)


def test_every_way_to_accumulate_takes_the_steps_of_whole_batches():
    plain = train(*private()[1:])[-1]
    for way in WAYS.values():
        made = private()
        for _ in range(EPOCHS):
            for batch in made[3]:
                way(made, batch)
        assert torch.allclose(released(made[1]), plain, atol=1e-5)
        assert made[2].noise.round == STEPS
    made = private()
    by_manager(made, EPOCHS)
    assert torch.allclose(released(made[1]), plain, atol=1e-5)
    whole, parts = sampled(), sampled()
    last = steps_of(whole)[-1]
    by_manager(parts, 10)
    grads = torch.cat([p.grad.reshape(-1) for p in parts[1].parameters()]).double()
    assert torch.allclose(2 * grads, last, atol=1e-5)
    assert parts[2].passes.done == 60


def test_several_batches_without_a_step_are_refused_with_what_to_do():
    _, module, optimizer, loader = private()
    batches = iter(loader)
    x, y = next(batches)
    nn.functional.cross_entropy(module(x), y).backward()
    with pytest.raises(ConfigError, match=r"take it apart by optimizer.signal_skip_step"):
        next(batches)
    assert optimizer.passes.done == 0


# Checkpoints


def at(folder, **options):
    module = net()
    adam = torch.optim.Adam(module.parameters(), lr=0.1)
    return private(module, optimizer=adam, out=folder, resume=True, delta=1e-5, **options)


def some_steps(made, count):
    if count < 1:
        return
    for batch in made[3]:
        step(*made[1:3], batch)
        if not (count := count - 1):
            return


def saved(made, **values):
    file = io.BytesIO()
    made[0].save_checkpoint(
        path=file, module=made[1], optimizer=made[2], checkpoint_dict=dict(values)
    )
    file.seek(0)
    return file


def weights(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize("more", [1, 3, 4])
def test_a_loop_with_opacus_checkpoints_continues_where_its_run_is(tmp_path, capsys, more):
    """Also where a pass was done, and the crash came before its checkpoint."""
    whole = at(tmp_path / "whole")
    for _ in range(EPOCHS):
        some_steps(whole, 3)
    whole[0].close()
    made = at(tmp_path / "run")
    some_steps(made, 3)
    file = saved(made, epoch=1)
    some_steps(made, min(more, 3))
    some_steps(made, more - 3)
    made[0].close()  # a crash, some steps after the checkpoint
    made = at(tmp_path / "run")
    back = made[0].load_checkpoint(path=file, module=made[1], optimizer=made[2])
    assert back["epoch"] == 1
    assert f"is of step 3; the run's folder is at step {3 + more}" in capsys.readouterr().err
    for _ in range(back["epoch"], EPOCHS):
        some_steps(made, 9)
    assert torch.equal(weights(made[1]), weights(whole[1]))
    assert made[2].passes.done == STEPS
    made[0].close()


def test_a_checkpoint_takes_no_step_back_and_has_nothing_secret(tmp_path):
    made = at(tmp_path / "run", seed=None)
    engine, module, optimizer, _ = made
    some_steps(made, 1)
    early, early_weights = saved(made), weights(module)
    some_steps(made, 1)
    late = saved(made)
    values = torch.load(late, weights_only=True)
    assert values.keys() == {
        "module_state_dict",
        "optimizer_state_dict",
        "privacy_accountant_state_dict",
    }
    assert (tmp_path / "run" / "key").read_bytes() not in late.getvalue()
    pair = {"module": module, "optimizer": optimizer}
    late.seek(0)
    engine.load_checkpoint(path=late, **pair)
    some_steps(made, 1)  # nothing was touched
    early.seek(0)
    with pytest.raises(ConfigError, match="Going back would take steps twice"):
        engine.load_checkpoint(path=early, **pair)
    plain = net()
    early.seek(0)
    engine.load_checkpoint(path=early, module=plain)
    assert torch.equal(weights(plain), early_weights)
    other = private()
    late.seek(0)
    with pytest.raises(ConfigError, match="is of another run"):
        other[0].load_checkpoint(path=late, module=other[1], optimizer=other[2])
    late.seek(0)
    with pytest.raises(ConfigError, match="optimizer: is not the one"):
        FTRLEngine().load_checkpoint(path=late, module=net(), optimizer=other[2])
    while optimizer.passes.done < STEPS:
        some_steps(made, 9)
    early.seek(0)
    engine.load_checkpoint(path=early, module=module)
    assert torch.equal(weights(module), early_weights)
    engine.close()


def test_weights_of_a_run_begin_no_other_one(tmp_path):
    made = private()
    some_steps(made, 1)
    file, engine = saved(made), FTRLEngine()
    module = net()
    engine.load_checkpoint(path=file, module=module)
    assert torch.equal(weights(module), weights(made[1]))
    with pytest.raises(ConfigError, match="the weights cost what the run cost"):
        private(module, engine=engine)


def test_checkpoints_that_would_mislead_are_refused(tmp_path):
    module = net()
    made = private(module, optimizer=Breaks(module.parameters(), lr=1.0))
    pair = {"module": made[1], "optimizer": made[2]}
    with pytest.raises(RuntimeError, match="a fault"):
        step(*made[1:3], next(iter(made[3])))
    with pytest.raises(ConfigError, match="this run has stopped"):
        made[0].save_checkpoint(path=io.BytesIO(), **pair)
    made = private()
    pair = {"module": made[1], "optimizer": made[2]}
    for changes, words in (
        ({"module": net()}, "pass those that make_private returned"),
        ({"noise_scheduler": 1}, "noise_scheduler: noise and clip norm are planned"),
        ({"grad_clip_scheduler": 1}, "grad_clip_scheduler: noise"),
    ):
        with pytest.raises(ConfigError, match=words):
            made[0].save_checkpoint(path=io.BytesIO(), **pair | changes)
    with pytest.raises(ConfigError, match="call make_private first"):
        FTRLEngine().save_checkpoint(path=io.BytesIO(), **pair)
    torch.save({"module_state_dict": {}}, tmp_path / "other.pt")
    torch.save({"object": DPOptimizer}, tmp_path / "code.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    for name, words in (
        ("other", "was not written by"),
        ("code", "cannot be read as"),
        ("text", "cannot be read"),
        ("none", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            made[0].load_checkpoint(path=tmp_path / f"{name}.pt", **pair)
    with pytest.raises(ConfigError, match="runs code from the file"):
        made[0].load_checkpoint(path=saved(made), **pair, torch_load_kwargs={"weights_only": False})


def test_the_accountant_answers_as_opacus_does():
    engine, *made = private()
    assert (len(engine.accountant), engine.accountant.mechanism()) == (0, "blt")
    step(*made[:2], next(iter(made[2])))
    assert engine.accountant.state_dict() == {"mechanism": "blt", "steps": 1}
    with pytest.raises(ConfigError, match=re.escape("see FTRLEngine.report(delta)")):
        _ = engine.accountant.history
    with pytest.raises(ConfigError, match="call make_private first"):
        FTRLEngine().accountant.get_epsilon(1e-5)
    assert isinstance(made[2].batch_sampler, Passes)
