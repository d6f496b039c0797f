"""Example-level DP-FTRL: what ran is what was accounted for, and departures are refused."""

import copy
import re
from functools import partial, wraps
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loops import (
    BATCH,
    CLIP,
    EPOCHS,
    EXAMPLES,
    STEPS,
    Breaks,
    data,
    net,
    private,
    released,
    step,
    train,
)
from opacus.layers import DPLSTM, DPMultiheadAttention
from opacus.utils.batch_memory_manager import BatchMemoryManager
from safetensors.torch import load_file
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typer.testing import CliRunner

from accounting import BinaryTree, ConfigError, Grouped, Participation, guarantee
from privpart import SeededSource
from privpart.cli.main import app
from privpart.example_level.optimizer import FTRLOptimizer
from privpart.noise.stream import NoiseStream
from privpart.run.evidence import gather
from privpart.run.report import report_of, run_report
from privpart.run.store import decode_state
from privpart.training.verify import check_run

# torch's, of Opacus's hooks: the input of the first layer needs no gradient
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


@pytest.fixture(scope="module")
def undisturbed():
    """The noised sum of every step of a run that nothing disturbs."""
    return train(*private()[1:])


@pytest.mark.parametrize("mechanism", ["blt", "tree", "toeplitz", "independent"])
def test_the_noise_of_the_steps_is_the_accountants(mechanism):
    engine, module, optimizer, loader = private(mechanism=mechanism, dataset=data(scale=0.0))
    noised = train(module, optimizer, loader)
    own = optimizer.noise.mechanism
    dim = noised.shape[1]
    bits = optimizer._grid.bits
    stream = NoiseStream(own, dim=dim, stddev=2.0**bits, source=SeededSource(7))
    drawn = torch.stack([stream.next().double() for _ in range(STEPS)])
    drawn *= optimizer._grid.step(CLIP)
    sums = noised - drawn
    assert (sums.norm(dim=1) <= BATCH * CLIP).all()
    report = engine.report(1e-5)
    order = Participation(STEPS, EPOCHS, 3)
    assert report.mu == guarantee(own, order, noise_multiplier=1.0).mu
    assert (report.unit, report.status) == ("example", "not-private")


def test_one_example_moves_every_sum_by_the_clip_norm_at_most_and_only_its_own():
    whole = data(scale=40.0)
    with_it = train(*private(dataset=whole)[1:], epochs=1)
    loader = private(dataset=whole)[3]
    place = next(t for t, batch in enumerate(loader.batch_sampler._batches) if 2 in batch)
    for unusual in (torch.zeros(5), torch.full((5,), torch.nan), torch.full((5,), 1e30)):
        x, y = (t.clone() for t in whole.tensors)
        x[2] = unusual
        without = train(*private(dataset=TensorDataset(x, y))[1:], epochs=1)
        moved = (with_it - without).norm(dim=1)
        assert (moved[:place] == 0).all()
        assert torch.isfinite(without[: place + 1]).all()
        assert moved[place] <= 2 * CLIP  # exchanged, so twice the clip norm


class Outside(nn.Module):
    """A network that uses a weight outside its layer, where no hook sees it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x) + nn.functional.linear(x, self.layer.weight)


def test_a_weight_that_is_used_outside_its_layer_is_refused():
    """In the network, or in a penalty."""
    for own, weight in ((Outside(), 0), (net(), 1)):
        _, module, optimizer, loader = private(own)
        x, y = next(iter(loader))
        penalty = sum(p.square().sum() for p in module.parameters())
        (nn.functional.cross_entropy(module(x), y) + weight * penalty).backward()
        with pytest.raises(ConfigError, match="used outside its layer"):
            optimizer.step()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_the_module_may_be_compiled_afterwards(undisturbed):
    _, module, optimizer, loader = private()
    compiled = torch.compile(module, backend="eager")
    for batch in loader:
        step(compiled, optimizer, batch)
    assert torch.allclose(released(module), undisturbed[2], atol=1e-5)


def test_a_summed_loss_has_the_divisor_1_and_the_report_says_so(undisturbed):
    engine, module, optimizer, loader = private(loss_reduction="sum")
    x, y = next(iter(loader))
    nn.functional.cross_entropy(module(x), y, reduction="sum").backward()
    optimizer.step()
    assert torch.allclose(released(module) / BATCH, undisturbed[0])
    assert "or 1 for a summed loss" in engine.report(1e-5).statement()


def backward(made, x, y):
    nn.functional.cross_entropy(made.module(x), y).backward()


def another_loader(made, x, y):
    for batch in DataLoader(made.loader.dataset, batch_size=BATCH, shuffle=True):
        step(made.module, made.optimizer, batch)


def another_optimizer(made, x, y):
    backward(made, x, y)
    torch.optim.SGD(made.module.parameters(), lr=1.0).step()


def change_what_is_frozen(made, x, y):
    with torch.no_grad():
        made.module._module[0].weight += x.mean()


def scaled(made, x, y):
    backward(made, x, y)
    nn.utils.clip_grad_norm_(made.module.parameters(), 1e-3)


def a_step(made, x, y):
    backward(made, x, y)
    made.optimizer.step()


MISTAKES = {
    "has dealt no batch for it": [[a_step, a_step], [another_loader]],
    "all 3 epochs are done": [
        [lambda made, x, y: train(made.module, made.optimizer, made.loader, EPOCHS + 1)]
    ],
    "has no per-example gradient": [[], [lambda made, x, y: made.module(x), backward]],
    "are of 8 examples, and the batch has 4": [
        [lambda made, x, y: backward(made, torch.cat([x, x]), torch.cat([y, y]))],
        [backward, backward],
    ],
    "cannot change during a run": [
        [lambda made, x, y: setattr(made.optimizer, "max_grad_norm", 2 * CLIP), backward]
    ],
    "has other parameters": [
        [lambda made, x, y: made.optimizer.add_param_group({"params": [x.requires_grad_()]})]
    ],
    "would use gradients without noise": [
        [backward, lambda made, x, y: made.optimizer.original_optimizer.step()]
    ],
    "2.weight: was changed, replaced or moved by something else": [[another_optimizer]],
    "0.bias: requires a gradient now": [
        [lambda made, x, y: made.module._module[0].requires_grad_(True), backward]
    ],
    "0.weight: was changed, replaced or moved by something else": [
        [change_what_is_frozen, backward]
    ],
    "changed before the step, by clip_grad_norm_": [[scaled]],
    "would compute gradients more than once": [
        [lambda made, x, y: made.optimizer.step(lambda: None)]
    ],
}


@pytest.mark.parametrize(
    ("words", "acts"), [(words, acts) for words, all_ in MISTAKES.items() for acts in all_]
)
def test_what_departs_from_the_guarantee_is_refused_and_ends_the_run(words, acts):
    """With a frozen layer; the acts come before a step."""
    own = net()
    own[0].requires_grad_(False)
    _, module, optimizer, loader = private(own)
    made = SimpleNamespace(module=module, optimizer=optimizer, loader=loader)

    def loop():
        x, y = next(iter(loader))
        for act in acts:
            act(made, x, y)
        optimizer.step()

    with pytest.raises(ConfigError, match=words):
        loop()
    if words.startswith("would"):
        return  # it was refused before anything happened
    optimizer.max_grad_norm = CLIP
    done = optimizer.passes.done
    with pytest.raises(ConfigError):
        train(module, optimizer, loader, 1)
    assert optimizer.passes.done == done


def test_a_batch_that_was_not_trained_on_comes_again(undisturbed):
    engine, module, optimizer, loader = private()
    next(iter(loader))  # a look at the data
    batches = iter(loader)
    step(module, optimizer, next(batches))
    next(batches)
    with pytest.raises(ConfigError, match=r"was dealt, but no optimizer.step\(\) followed"):
        next(batches)
    assert optimizer.passes.done == 1
    for _ in range(engine.epochs_left):
        for batch in loader:
            step(module, optimizer, batch)
    assert torch.equal(released(module), undisturbed[-1])


def test_worker_processes_read_ahead(undisturbed):
    made = private(loader={"num_workers": 1, "persistent_workers": True})[1:]
    assert torch.equal(train(*made), undisturbed)
    _, module, optimizer, loader = private(loader={"num_workers": 1})
    small = BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer)
    with small as parts, pytest.raises(ConfigError, match="needs a loader with num_workers=0"):
        train(module, optimizer, parts)
    assert optimizer.passes.done == 0


def test_one_pass_at_a_time():
    _, module, optimizer, loader = private()
    one, other = iter(loader), iter(loader)
    step(module, optimizer, next(other))
    with pytest.raises(ConfigError, match="another pass over it was begun meanwhile"):
        next(one)


HOOKS = {
    "attach_step_hook": lambda optimizer, hook: optimizer.attach_step_hook(hook),
    "step_hook": lambda optimizer, hook: setattr(optimizer, "step_hook", hook),
    "before": lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
    "after": lambda optimizer, hook: optimizer.register_step_post_hook(hook),
    "own before": lambda made, hook: made.original_optimizer.register_step_pre_hook(hook),
    "own after": lambda made, hook: made.original_optimizer.register_step_post_hook(hook),
    "own state": lambda made, hook: made.original_optimizer.register_state_dict_post_hook(hook),
    "all before": lambda _, hook: register_optimizer_step_pre_hook(hook),
    "all after": lambda _, hook: register_optimizer_step_post_hook(hook),
    "instead": lambda optimizer, hook: setattr(optimizer.original_optimizer, "step", hook),
}


@pytest.mark.parametrize("attach", HOOKS.values(), ids=HOOKS)
def test_no_code_runs_between_the_noise_and_the_release(attach):
    ran, handles = [], []
    _, module, optimizer, loader = private()
    before = [p.detach().clone() for p in module.parameters()]

    def hooked_step():
        handles.append(attach(optimizer, lambda *arguments: ran.append(arguments)))
        step(module, optimizer, next(iter(loader)))

    with pytest.raises(ConfigError, match="would run between the noise and the release"):
        hooked_step()
    for handle in filter(None, handles):
        handle.remove()
    assert not ran
    assert optimizer.noise.round == 0
    assert all(map(torch.equal, module.parameters(), before))


def test_an_optimizer_with_hooks_is_refused_and_a_scheduler_is_none():
    module = net()
    sgd = torch.optim.SGD(module.parameters(), lr=1.0)
    hook = sgd.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="a hook on SGD"):
        private(module, optimizer=sgd)
    hook.remove()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
    with pytest.raises(ConfigError, match="follows a metric"):
        private(module, optimizer=sgd, scheduler=plateau)
    slower = torch.optim.lr_scheduler.StepLR(sgd, 2)
    assert len(train(*private(module, optimizer=sgd, scheduler=slower)[1:])) == STEPS


def test_steps_that_would_fail_or_could_not_be_kept_are_refused_before_a_run_begins(tmp_path):
    """Their budget would be spent."""
    adam, sgd, sparse = torch.optim.Adam, torch.optim.SGD, torch.optim.SparseAdam
    slower = torch.optim.lr_scheduler.ExponentialLR
    another = slower(sgd(net().parameters(), lr=1.0), 0.9)
    chained = lambda own: torch.optim.lr_scheduler.ChainedScheduler([slower(own, 0.9)])  # noqa: E731
    for kind, options, scheduler, words in (
        (sgd, {"lr": 1.0}, chained, "a ChainedScheduler does not count its steps"),
        (sgd, {"lr": 1.0}, lambda _: another, "is of another optimizer"),
        (adam, {"lr": torch.tensor(0.1)}, lambda _: None, "settings cannot be kept in a file"),
        (sgd, {"differentiable": True}, lambda _: None, "take no step with a dense"),
        (sparse, {}, lambda _: None, "take no step with a dense"),
    ):
        module = net()
        own = kind(module.parameters(), **options)
        with pytest.raises(ConfigError, match=words):
            private(module, optimizer=own, out=tmp_path / "run", scheduler=scheduler(own))
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_changes_no_sum(kind, undisturbed):
    def add(given):
        given.grad = given.grad + 9 if isinstance(given, nn.Parameter) else given + 9
        return None if isinstance(given, nn.Parameter) else given + 9

    _, module, optimizer, loader = private()
    found = [train(module, optimizer, loader, 1)]
    getattr(optimizer.trained[0], kind)(add)
    found.append(train(module, optimizer, loader, EPOCHS - 1))
    assert torch.equal(torch.cat(found), undisturbed)


def test_running_statistics_do_not_leave_with_the_model():
    """Nor does a layer that changes its mode mix examples later."""
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))
    module[1].eval()
    _, wrapped, optimizer, loader = private(module)
    batch = next(iter(loader))
    wrapped.train()
    with pytest.raises(ConfigError, match="layer '1' is a BatchNorm1d: its statistics mix"):
        step(wrapped, optimizer, batch)
    rows = nn.Unflatten(1, (1, 5)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten()
    with pytest.raises(ConfigError, match=r"layer '0.1' is a InstanceNorm1d: its statistics mix"):
        private(nn.Sequential(nn.Sequential(*rows), net()))
    norm = nn.BatchNorm1d(5, affine=False, track_running_stats=False).eval()
    with pytest.raises(ConfigError, match="layer '0' is a BatchNorm1d: its statistics mix"):
        private(nn.Sequential(norm, net()))


def test_a_step_that_fails_is_taken_back_and_stays_refused():
    module = net()
    _, wrapped, optimizer, loader = private(module, optimizer=Breaks(module.parameters(), lr=1.0))
    with pytest.raises(RuntimeError, match="a fault"):
        step(wrapped, optimizer, next(iter(loader)))
    assert all(map(torch.equal, module.parameters(), net().parameters()))
    with pytest.raises(ConfigError, match="this run has stopped: step 0 was not committed"):
        train(wrapped, optimizer, loader)


def test_an_interrupt_while_gradients_are_added_up_ends_the_run(monkeypatch):
    _, module, optimizer, loader = private()

    def interrupt(*_, **options):
        raise KeyboardInterrupt

    batch = next(iter(loader))
    with monkeypatch.context() as patched:
        patched.setattr("privpart.example_level.optimizer.weighted_sum", interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(module, optimizer, batch)
    with pytest.raises(ConfigError, match="a step was interrupted"):
        optimizer.step()


@pytest.mark.parametrize(("scale", "rows"), [(1e-30, slice(None)), (1e25, slice(1))])
def test_lengths_that_float32_cannot_square(scale, rows):
    """A gradient that underflows is short; one that overflows counts as zeros."""
    scaled, zeros = data(), data()
    for some, factor in ((scaled, scale), (zeros, 0.0)):
        some.tensors[0][rows] *= factor
    noised = train(*private(dataset=scaled)[1:], epochs=1)
    same = train(*private(dataset=zeros)[1:], epochs=1)
    assert torch.isfinite(noised).all()
    assert ((noised - same).norm(dim=1) <= 2 * BATCH * CLIP).all()


@pytest.mark.parametrize(("parts", "value"), [(False, torch.nan), (True, torch.inf)])
def test_a_run_stops_before_a_step_of_which_most_gradients_are_not_finite(parts, value, tmp_path):
    """Half of them are zeros; of more, nothing is released, and no noise is spent."""
    some = data()
    engine, module, optimizer, loader = private(
        dataset=some, seed=None, out=tmp_path / "run", delta=1e-5
    )
    second, third = (list(loader.batch_sampler.batch(number)) for number in (1, 2))
    some.tensors[0][second[:2] + third[:2]] = value
    physical = BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=1 if parts else BATCH, optimizer=optimizer
    )
    with physical as small, pytest.raises(ConfigError, match=r"step 2: .* of 2 of 3 examples"):
        train(module, optimizer, small)
    assert (optimizer.passes.done, optimizer.noise.round) == (2, 2)
    with pytest.raises(ConfigError, match="this run has stopped"):
        optimizer.step()
    engine.close()
    assert run_report(tmp_path / "run").rounds == 2


class Sometimes(nn.Module):
    """Tokens, attention, recurrence, and a layer that one batch does not use."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(7, 6), nn.GroupNorm(2, 6)
        self.look = DPMultiheadAttention(6, 2, batch_first=True)
        self.recur = DPLSTM(6, 4, batch_first=True)
        self.extra, self.out = nn.Linear(4, 4), nn.Linear(4, 3)
        self.uses = 0

    def forward(self, x):
        self.uses += 1
        x = self.norm(self.tokens(x).transpose(1, 2)).transpose(1, 2)
        x = self.recur(self.look(x, x, x)[0])[0][:, -1]
        x = self.extra(x) if self.uses != 2 else x
        return self.out(x)


def test_layers_of_every_kind_and_one_that_a_batch_does_not_use():
    module = Sometimes()
    some = torch.Generator().manual_seed(3)
    tokens = torch.randint(7, (EXAMPLES, 5), generator=some)
    labels = torch.randint(3, (EXAMPLES,), generator=some)
    made = private(module, TensorDataset(tokens, labels))
    noised = train(*made[1:], epochs=2)
    assert torch.isfinite(noised).all()
    assert made[2].passes.done == 6


def test_autocast_computes_in_less_and_clips_in_float32():
    expected = train(*private(dataset=data(scale=40.0))[1:], epochs=1)[0]
    _, module, optimizer, loader = private(dataset=data(scale=40.0))
    x, y = next(iter(loader))
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(module(x), y)
    loss.backward()
    optimizer.step()
    assert 0 < (released(module) - expected).norm() < 0.05 * BATCH * CLIP


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(3))


REFUSED = [
    ({"loader": {"shuffle": True}}, "data_loader: shuffles"),
    ({"loader": {"drop_last": True}}, "leaves examples out"),
    ({"loader": {"in_order": False, "num_workers": 2}}, "in any order"),
    ({"loader": {"dataset": Numbers()}}, "has no length"),
    ({"module": net().bfloat16()}, "0.weight: is torch.bfloat16; train in float32"),
    ({"module": torch.compile(net(), backend="eager")}, "is compiled"),
    ({"optimizer": torch.optim.LBFGS(net().parameters())}, "LBFGS"),
    ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "lacks 0.weight, "),
    ({"max_grad_norm": 1e-9}, "must be 1e-06 to 1e"),
    ({"max_grad_norm": np.nan}, "max_grad_norm"),
    ({"epochs": 0}, "epochs"),
    ({"order_seed": 2**63}, "order_seed=9223372036854775808: must be at most"),
    ({"noise_multiplier": 1e9}, "noise_multiplier"),
    ({"delta": 2.0, "target_epsilon": 1.0, "noise_multiplier": None}, "delta"),
    ({"target_epsilon": 1.0}, "either noise_multiplier or target_epsilon"),
    ({"mechanism": "oak"}, "mechanism"),
    ({"mechanism": BinaryTree(5)}, "is for 5 rounds"),
    ({"mechanism": Grouped([[0]], [BinaryTree(1)], [1])}, "has groups"),
]


def test_what_cannot_be_private_leaves_the_module_and_no_run_behind(tmp_path):
    module = net()
    for wrong, words in REFUSED:
        with pytest.raises((ConfigError, ValueError), match=words):
            private(**{"module": module, "out": tmp_path / "run"} | wrong)
    assert not (tmp_path / "run").exists()
    engine, wrapped, *_ = private(module, out=tmp_path / "run")
    engine.close()
    with pytest.raises(ConfigError, match="was called before"):
        private(module, engine=engine)
    for again in (module, wrapped):
        with pytest.raises(ConfigError, match="Opacus does not take it"):
            private(again)


def in_folder(folder, *, resume=False, seed=7, **options):
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 3))
    for p, q in zip(module.parameters(), net().parameters(), strict=True):
        p.data = q.data
    adam = torch.optim.Adam(module.parameters(), lr=0.1)
    slower = torch.optim.lr_scheduler.StepLR(adam, 2, gamma=0.5)
    more = {"out": folder, "resume": resume, "scheduler": slower, "delta": 1e-5} | options
    return slower, *private(module, optimizer=adam, seed=seed, **more)


def train_some(made, steps):
    _, engine, module, optimizer, loader = made
    for _ in range(engine.epochs_left):
        for batch in loader:
            step(module, optimizer, batch)
            steps -= 1
            if not steps:
                return


@pytest.mark.parametrize("mechanism", ["blt", "independent"])
def test_a_run_that_is_resumed_ends_as_an_undisturbed_one(tmp_path, mechanism):
    torch.set_rng_state(torch.Generator().manual_seed(5).get_state())
    whole = in_folder(tmp_path / "whole", mechanism=mechanism)
    train_some(whole, STEPS)
    whole[1].close()
    torch.set_rng_state(torch.Generator().manual_seed(5).get_state())
    for steps in (2, 3, STEPS):
        made = in_folder(tmp_path / "parts", resume=True, mechanism=mechanism)
        train_some(made, steps)
        made[1].close()
    assert all(map(torch.equal, whole[2].parameters(), made[2].parameters()))
    assert made[0].get_last_lr() == whole[0].get_last_lr()
    assert made[1].epochs_left == 0
    # Whoever read noise of a run that has ended could subtract it.
    (state,) = (tmp_path / "parts").glob("*-0*.safetensors")
    tensors, values = decode_state(state)
    assert ("noise" in tensors, values["noise"]) == (False, None)
    again = in_folder(tmp_path / "parts", resume=True, mechanism=mechanism)
    assert all(map(torch.equal, whole[2].parameters(), again[2].parameters()))
    again[1].close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here")
def test_a_run_on_cuda_is_committed_and_resumed(tmp_path):
    def begun(folder):
        module = net().cuda()
        adam = torch.optim.Adam(module.parameters(), lr=0.1)
        held = TensorDataset(*(t.cuda() for t in data().tensors))
        return None, *private(module, held, optimizer=adam, out=folder, resume=True, delta=1e-5)

    ends = []
    for name, parts in (("whole", [STEPS]), ("parts", [4, STEPS])):
        for steps in parts:
            made = begun(tmp_path / name)
            train_some(made, steps)
            made[1].close()
        ends.append(torch.cat([p.detach().reshape(-1) for p in made[2].parameters()]))
    assert torch.equal(*ends)


def test_a_scheduler_is_stepped_by_the_optimizer_alone(tmp_path):
    made = in_folder(tmp_path / "run", scheduler_every="epoch")
    train_some(made, 4)
    assert made[0].last_epoch == 1
    made[0].step()
    with pytest.raises(ConfigError, match=r"Leave out scheduler.step"):
        train_some(made, 1)
    made[1].close()


def test_the_report_of_a_run_is_the_engines(tmp_path):
    made = in_folder(tmp_path / "run", seed=None)
    train_some(made, STEPS)
    made[1].close()
    found = run_report(tmp_path / "run")
    assert (found.complete, found.deviations) == (True, ())
    assert found.guarantee.unit == "example"
    assert found.guarantee.epsilon == made[1].epsilon(1e-5)
    assert (found.realised.max_participations, found.realised.min_separation) == (EPOCHS, 3)
    assert found.guarantee.status == "conditional"
    open_ones = {a.code for a in found.guarantee.assumptions if a.status == "asserted"}
    assert open_ones == {"choices", "gradients", "loop", "data"}
    said = found.guarantee.statement()
    assert not re.search(r"server|client|cohort", said)
    shown = made[1].report(1e-5).statement()
    assert "one example's gradients and with zeros" in shown
    assert "trains sees every example" in shown


def test_the_commands_about_runs_take_one_on_examples(tmp_path):
    run, out = tmp_path / "run", tmp_path / "trained.safetensors"
    made = in_folder(run, seed=None, population="digits")
    train_some(made, 2)
    made[1].close()
    call = CliRunner().invoke
    shown = call(app, ["report", str(run)])
    assert "9 rounds, an example in at most 3" in shown.stdout
    assert call(app, ["export", str(run), "--out", str(out), "--part", "trained"]).exit_code == 0
    weights = load_file(out)
    assert all(torch.equal(weights[n], p) for n, p in made[2]._module.named_parameters())
    verified = call(app, ["verify", str(run), str(out)])
    assert verified.exit_code == 0, verified.stdout
    assert "wrong" not in verified.stdout
    assert "digits (examples)" in call(app, ["budget"]).stdout
    for command in (["export", str(run), "--out", "x"], ["train", "--out", str(run), "--resume"]):
        with pytest.raises(ConfigError, match="is a run of FTRLEngine on examples"):
            call(app, command, catch_exceptions=False)
    with pytest.raises(ConfigError, match="population='other"):
        in_folder(run, seed=None, population="other", resume=True)
    assert call(app, ["train", "--close", "--out", str(run), "--yes"]).exit_code == 0
    with pytest.raises(ConfigError, match="ended early, after 2 of 9 rounds"):
        in_folder(run, seed=None, population="digits", resume=True)


class Two(nn.Module):
    """A network that may take a second input, and ignores it."""

    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x, second=None):
        return self.body(x)


def loss(output, labels):
    return nn.functional.cross_entropy(output, labels)


def as_dealt(module, x, y, before):
    loss(module(x.clone()), y).backward()


def in_parts(module, x, y, before):
    for part in (slice(0, 1), slice(1, None)):
        loss(module(x[part]), y[part]).backward()


def beside_metrics(module, x, y, before):
    with torch.no_grad():
        module(2 * x)
    loss(module(x, second=[x, None, True]), y).backward()
    module.eval()
    module(before)
    module.train()


def called_with(inputs):
    """Return a loop that calls the network with something else than what was dealt."""
    return lambda module, x, y, before: loss(module(*inputs(x, before)), y).backward()


def half_twice_in_parts(module, x, y, before):
    for part in (x[:2], x[: len(x) - 2]):
        loss(module(part), y[: len(part)]).backward()


def changed_in_place(module, x, y, before):
    output = module(x)
    x.data.copy_(before)
    loss(output, y).backward()


def the_network_itself(module, x, y, before):
    loss(module._module(before), y).backward()


def decoy_in_a_part(module, x, y, before):
    loss(module(x[:1]), y[:1]).backward()
    loss(module(x[1:], before[1:]), y[1:]).backward()


def without_opacus_hooks(module, x, y, before):
    """What was kept of a call is multiplied with the gradients of another, which was not kept."""
    output = module(x)
    module.disable_hooks()
    other = module._module(before)
    module.enable_hooks()
    torch.autograd.grad(output.sum(), output)
    loss(other, y).backward()


def behind(add, after=False):
    """Return a loop with a hook: ``add`` takes the network, earlier rows and the output."""

    def loop(module, x, y, before):
        output = module(x) if after else None
        hook = add(module, before, output)
        loss(module(x) if output is None else output, y).backward()
        hook.remove()

    return loop


def on_every_layer(module, before, _):
    return nn.modules.module.register_module_forward_pre_hook(
        lambda layer, inputs: (before,) if layer is module._module.body[0] else None
    )


def on_one_layer_backwards(module, *_):
    layer = module._module.body[2]
    return layer.register_full_backward_pre_hook(lambda _, gradients: (gradients[0].flip(0),))


INPUTS, BACKWARD = "something else than the rows that were dealt", "did not come unchanged"
HOOK = "has a hook that was added after make_private"
LOOPS = {
    None: {loop.__name__: loop for loop in (as_dealt, in_parts, beside_metrics)},
    INPUTS: {
        "augmented": called_with(lambda x, before: (x + 1e-3,)),
        "permuted": lambda module, x, y, before: loss(module(x.flip(0)), y.flip(0)).backward(),
        "one row swapped": called_with(lambda x, before: (torch.cat([before[:1], x[1:]]),)),
        "decoy": called_with(lambda x, before: (before, x)),
        "second decoy": called_with(lambda x, before: (x, {"rows": before})),
        "decoy of another kind": called_with(lambda x, before: (x, before.tolist())),
        "behind a hook": behind(
            lambda module, before, _: module.register_forward_pre_hook(lambda *_: (before,))
        ),
        **{loop.__name__: loop for loop in (half_twice_in_parts, decoy_in_a_part)},
    },
    BACKWARD: {loop.__name__: loop for loop in (changed_in_place, without_opacus_hooks)},
    HOOK: {
        "layer": behind(
            lambda module, before, _: module._module.body[0].register_forward_pre_hook(
                lambda *_: (before,)
            )
        ),
        "every layer": behind(on_every_layer),
        "backwards": behind(on_one_layer_backwards, after=True),
        "output": behind(lambda _1, _2, output: output.register_hook(lambda g: g.flip(0)), True),
    },
    "outside of a call of the network": {"the network itself": the_network_itself},
}


def participation(folder):
    words = {a.code: a for a in run_report(folder).guarantee.assumptions}
    (line,) = (check for check in check_run(folder) if check.what == "participation")
    assert line.status == words["participation"].status
    assert words["gradients"].status == "asserted"
    assert "takes data or labels from elsewhere" in words["gradients"].text
    return words["participation"]


def run_with(folder, loop, *, module=None, dataset=None, **options):
    """Train one pass, from the second batch on by ``loop``; return what participation rests on."""
    made = private(module or Two(), dataset, seed=None, out=folder, delta=1e-5, epochs=1, **options)
    engine, module, optimizer, loader, *_ = made
    first = None
    for batch in loader:
        x, y = batch.values() if isinstance(batch, dict) else batch
        optimizer.zero_grad()
        if first is None:
            first = x.clone()
            as_dealt(module, x, y, first)
        else:
            loop(module, x, y, first[: len(x)])
        optimizer.step()
    engine.close()
    return participation(folder)


def again(optimizer, samples, own=FTRLOptimizer._factors):
    return own(optimizer, samples)


@pytest.mark.parametrize("how", ["object", "class", "step", "scheduler"])
def test_an_optimizer_that_was_changed_is_nobodys_word(how, monkeypatch, tmp_path):
    engine, module, optimizer, loader, *_ = private(
        Two(), seed=None, out=tmp_path / "run", delta=1e-5, epochs=1
    )
    own = FTRLOptimizer._factors
    changes = {"object": (optimizer, partial(own, optimizer)), "class": (FTRLOptimizer, again)}
    if how in changes:
        monkeypatch.setattr(changes[how][0], "_factors", changes[how][1])
    if how == "step":
        optimizer.step = wraps(FTRLOptimizer.step)(partial(FTRLOptimizer.step, optimizer))
    if how == "scheduler":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # torch wraps step, and that is all it does
    step(module, optimizer, next(iter(loader)))
    engine.close()
    words = {a.code: a.status for a in run_report(tmp_path / "run").guarantee.assumptions}
    assert set(words.values()) == (
        {"asserted", "enforced", "verified"} if how == "scheduler" else {"asserted"}
    )


@pytest.mark.parametrize(
    ("loop", "why"),
    [
        pytest.param(loop, why, id=name)
        for why, loops in LOOPS.items()
        for name, loop in loops.items()
    ],
)
def test_participation_is_verified_where_the_rows_were_compared(loop, why, tmp_path):
    found = run_with(tmp_path / "run", loop)
    assert found.status == ("asserted" if why else "verified")
    assert (why or "with the rows that were dealt, each once") in found.evidence
    assert ("since step 1" in found.evidence) == bool(why)
    assert "the network gets the rows of the examples dealt for it, each once" in found.text


def test_per_example_gradients_are_the_optimizers_alone(undisturbed):
    """Nobody reads or exchanges them, nor writes to them through .data, before the step."""
    for after in (False, True):
        _, module, optimizer, loader = private()
        x, y = next(iter(loader))
        sample = torch.ones(len(x), *optimizer.trained[0].shape)
        if after:
            loss(module(x), y).backward()
            assert {p.grad_sample for p in module.parameters()} == {None}
        optimizer.trained[0].grad_sample = sample
        act = optimizer.step if after else loss(module(x), y).backward
        with pytest.raises(ConfigError, match="was set by something else than a backward pass"):
            act()
    _, module, optimizer, loader = private()
    x, y = next(iter(loader))
    for forgets in (optimizer, module):
        loss(module(2 * x), y).backward()
        forgets.zero_grad()
    step(module, optimizer, (x, y))
    assert torch.equal(released(module), undisturbed[0])


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return self.first(x), self.second(x)


@pytest.mark.parametrize(("late", "status"), [(False, "verified"), (True, "asserted")])
def test_an_output_of_an_earlier_step_is_not_of_the_rows_of_this_one(late, status, tmp_path):
    options = {"seed": None, "delta": 1e-5, "epochs": 1}
    whole = TensorDataset(torch.randn(3 * BATCH, 5), torch.arange(3 * BATCH) % 3)
    made = private(TwoHeads(), whole, out=tmp_path / "run", **options)
    engine, module, optimizer, loader, *_ = made
    kept = []
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        first, second = module(x)
        total = loss(first, y)
        if number != 1 or not late:
            total = total + loss(second, y)
        if number == 2 and late:
            total = total + loss(*kept)
        kept = [second, y]
        total.backward()
        optimizer.step()
    engine.close()
    assert participation(tmp_path / "run").status == status


def as_dictionary(rows):
    x, y = zip(*rows, strict=True)
    return {"x": torch.stack(x), "y": torch.stack(y)}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"loader": {"collate_fn": as_dictionary}}, None),
        ({"loader": {"num_workers": 1}}, None),
        (
            {"loader": {"collate_fn": lambda rows: as_dictionary(rows).values()}},
            "nothing that could be compared",
        ),
        (
            {"dataset": TensorDataset(torch.ones(EXAMPLES, 5), data().tensors[1])},
            "the rows of the batch apart",
        ),
    ],
    ids=["dictionary", "workers", "objects", "constant"],
)
def test_what_can_be_compared_depends_on_what_is_dealt(options, why, tmp_path):
    found = run_with(tmp_path / "run", as_dealt, **options)
    assert found.status == ("asserted" if why else "verified")
    assert (why or "") in found.evidence


def test_rows_are_not_compared_in_parts_of_a_batch(tmp_path):
    options = {"seed": None, "delta": 1e-5, "epochs": 1}
    _, module, optimizer, loader = private(out=tmp_path / "parts", **options)
    small = BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer)
    with small as parts:
        train(module, optimizer, parts, 1)
    found = participation(tmp_path / "parts")
    assert found.status == "asserted"
    assert "BatchMemoryManager" in found.evidence


def test_an_earlier_backward_pass_is_not_repeated_for_another_batch(tmp_path):
    """Opacus multiplies its gradients with the newest inputs, whichever call they are of."""
    engine, module, optimizer, loader = private(nn.Linear(5, 3), out=tmp_path / "run", delta=1e-5)
    batches = iter(loader)
    x, y = next(batches)
    earlier = loss(module(x), y)
    earlier.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    module(next(batches)[0])
    earlier.backward()
    optimizer.step()
    engine.close()
    assert BACKWARD in participation(tmp_path / "run").evidence


def test_a_step_that_was_not_compared_stays_so_and_so_does_a_run_of_before(tmp_path):
    for loop in (LOOPS[INPUTS]["augmented"], as_dealt):
        engine, module, optimizer, loader = private(out=tmp_path / "run", resume=True, delta=1e-5)
        x, y = next(iter(loader))
        loop(module, x, y, x)
        optimizer.step()
        engine.close()
    assert "since step 0" in participation(tmp_path / "run").evidence
    evidence = gather(tmp_path / "run")
    for name in ("compares_rows", "rows_differ"):
        del evidence.ledger.facts[name]
    words = report_of(evidence, tmp_path / "run").guarantee.assumptions
    assert next(a for a in words if a.code == "participation").status == "asserted"


def test_delta_is_judged_against_the_number_of_examples(tmp_path, capsys):
    private(delta=0.09 / EXAMPLES)
    assert not capsys.readouterr().err
    private(delta=0.5 / EXAMPLES)
    assert "for 11 examples it should be below 0.1 / 11" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="publishing the data of one example, chosen at random"):
        private(delta=1 / EXAMPLES, out=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    with pytest.raises(ConfigError, match="leave it out"):
        private(delta=1e-5, allow_large_delta=True)
    engine = private()[0]
    for method in (engine.epsilon, engine.get_epsilon, engine.report):
        with pytest.raises(ConfigError, match="allow_large_delta"):
            method(0.5)
    assert "below 0.1 / 11" in engine.report(0.5 / EXAMPLES).statement()
    engine, module, optimizer, loader = private(
        delta=0.5, allow_large_delta=True, seed=None, out=tmp_path / "run"
    )
    train(module, optimizer, loader)
    engine.close()
    for found in (engine.report(0.5), run_report(tmp_path / "run").guarantee):
        assert found.population == EXAMPLES
        assert "is 1 / 11 or more" in " ".join(found.warnings)
    for each in found.assumptions:
        if each.status == "asserted":
            found = found.with_status(each.code, "vouched", "by a test")
    assert found.status == "conditional"


def test_another_module_or_plan_is_not_resumed(tmp_path):
    made = in_folder(tmp_path / "run")
    train_some(made, 1)
    made[1].close()
    for other in ({"order_seed": 1}, {"max_grad_norm": 1.0}, {"seed": 8}):
        with pytest.raises(ConfigError, match="begun with another plan, module, data or seed"):
            in_folder(tmp_path / "run", resume=True, **other)
    with pytest.raises(ConfigError, match="is not empty"):
        in_folder(tmp_path / "run")


class Keeps(nn.Module):
    """A layer with buffers and frozen weights that its forward pass may rewrite."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ranks", torch.arange(5.0).flip(0))
        self.register_buffer("others", torch.arange(5.0) - 9)
        self.frozen = nn.Parameter(torch.arange(25.0).flip(0).view(5, 5), requires_grad=False)
        self.teacher = nn.Parameter(torch.arange(25.0).view(5, 5) - 7, requires_grad=False)
        self.rewrite = lambda number: None

    def forward(self, x):
        self.rewrite(float(x.mean()))
        return x + self.ranks @ self.frozen


@pytest.mark.parametrize(
    "names", [("0.ranks", "0.others"), ("0.frozen", "0.teacher"), ("1.weight", "2.weight")]
)
def test_nothing_rewrites_what_leaves_with_the_model(rewrite, names):
    own = nn.Sequential(Keeps(), nn.Linear(5, 5), nn.Linear(5, 5), net())
    one, other = ((dict(own.named_parameters()) | dict(own.named_buffers()))[n] for n in names)
    _, module, optimizer, loader = private(own)
    batches = iter(loader)
    step(module, optimizer, next(batches))
    own[0].rewrite = lambda number: rewrite(one, other, number)
    with pytest.raises(ConfigError, match="was changed, replaced or moved"):
        step(module, optimizer, next(batches))


def test_a_backward_pass_in_evaluation_mode_takes_no_earlier_batch():
    """Opacus would multiply its gradients with the inputs of the last pass in training mode."""
    _, module, optimizer, loader = private()
    batches = iter(loader)
    x, y = next(batches)
    loss(module(x), y).backward()
    optimizer.step()
    module(x)  # a metric, with gradients left on
    module.eval()
    other, y = next(batches)
    with pytest.raises(ConfigError, match="is not in training mode"):
        loss(module(other), y).backward()
    with pytest.raises(ConfigError):
        optimizer.step()


def test_a_factor_below_float32s_normal_numbers_is_not_used():
    """Of few bits, it would leave a gradient of 2.9e38 1.6 % too long."""
    _, module, optimizer, loader = private(
        nn.Linear(1, 1), TensorDataset(torch.zeros(1, 1)), max_grad_norm=1e-5
    )
    (module(next(iter(loader))[0]) * 2.9e38).sum().backward()
    samples = [module.samples[p][0].reshape(1, -1) for p in optimizer.trained]
    factors = optimizer._factors(samples).float()
    assert all(float((s * factors).norm()) <= 1e-5 for s in samples)


def test_the_optimizer_is_not_copied():
    with pytest.raises(TypeError, match="never copied"):
        copy.deepcopy(private()[2])
