"""Lent models: nothing that a client's data made of a module outlives the client, but its update.

Each way out has a twin with power: without the reset, or without the refusal, it would get out.
"""

from collections import deque

import pytest
import torch
from rewrites import REWRITES
from small_cohorts import computed
from torch import nn
from torch.nn.functional import cross_entropy

from accounting import ConfigError
from privpart import LocalTraining, PartialModel, RoundTask, Users, client_update
from privpart.engines.methods import LocalComputation, Method
from privpart.model import LayerStates
from privpart.models import freeze_batch_norm


def fill(network, seed=5):
    generator = torch.Generator().manual_seed(seed)
    for layer in network.modules():
        if getattr(layer, "running_mean", None) is not None:
            layer.running_mean.normal_(generator=generator)
            layer.running_var.uniform_(0.5, 2.0, generator=generator)
    return network


def normalised():
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(1)
        layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
        return fill(nn.Sequential(*layers))


def images(clients=6, each=4, shape=(1, 8, 8)):
    generator = torch.Generator().manual_seed(2)
    n = clients * each
    x = torch.randn(n, *shape, generator=generator) + 0.5
    return Users(x, torch.randint(10, (n,), generator=generator), list(torch.arange(n).split(each)))


def frozen_norm(module=None, **options):
    module = module or normalised()
    freeze_batch_norm(module)
    return PartialModel(module, seed=None, **options)


def train(model, users, client, local=LocalTraining(0.1, batch_size=2), **options):  # noqa: B008
    x, y = users.examples(client)
    generator = torch.Generator().manual_seed(client)
    return client_update(
        model,
        model.flat.clone(),
        (x, y),
        local=local,
        clip_norm=9.0,
        generator=generator,
        **options,
    )


@pytest.mark.parametrize("local", [LocalTraining(0.1, steps=1), LocalTraining(0.1, batch_size=2)])
def test_vectorized_clients_compute_frozen_batch_norm_as_the_loop_does(local):
    task = RoundTask(0, tuple(range(6)), 9.0, "plan")
    model = frozen_norm()
    work = LocalComputation(model, images(), local=local, data_seed=5)
    assert work.clients_per_ghost_sum(task) == 0  # ghost clipping leaves it to the others
    found = [computed(model, images(), m, local, task) for m in (Method(), Method(True))]
    assert (found[1] - found[0]).norm(dim=1).max() < 1e-5 * found[0].norm(dim=1).min()


def test_batch_norm_in_training_mode_or_without_statistics_is_refused_with_advice():
    with pytest.raises(ConfigError, match=r"'1' is a BatchNorm2d.*freeze_batch_norm"):
        PartialModel(normalised(), seed=None)
    without = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False).eval())
    with pytest.raises(ConfigError, match=r"'0' is a BatchNorm1d.*replace_batch_norm"):
        PartialModel(without, seed=None)
    with pytest.raises(ConfigError, match="layer '0' is a BatchNorm1d without running statistics"):
        freeze_batch_norm(without)
    broken = normalised().eval()
    broken[1].running_var[2] = torch.nan
    with pytest.raises(ConfigError, match=r"buffer '1\.running_var' holds NaN"):
        PartialModel(broken, seed=None)


class Flips(nn.Module):
    """A network whose forward pass, like some loss, changes modes."""

    def __init__(self, back, momentum=0.1):
        super().__init__()
        self.back, self.norm, self.drop = back, nn.BatchNorm1d(64, momentum=momentum), nn.Dropout()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        self.train()
        x = self.drop(self.norm(x))
        self.train(not self.back)
        return self.head(x)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_whoever_puts_frozen_batch_norm_into_training_mode_is_told(back, counted):
    module = Flips(back)
    freeze_batch_norm(module)
    if not counted:
        module.norm.num_batches_tracked = None  # the only buffer whose version counts writes
    model = PartialModel(module, seed=None)
    mean, modes = module.norm.running_mean.clone(), [m.training for m in module.modules()]
    with pytest.raises(ConfigError, match="layer 'norm' was in training mode during training"):
        train(model, images(shape=(64,)), 0)
    assert torch.equal(module.norm.running_mean, mean)  # and nothing of it is left
    assert [m.training for m in module.modules()] == modes


def test_between_clients_batch_norm_stays_frozen_and_other_layers_keep_their_mode():
    model = frozen_norm()
    model.module.train()
    train(model, images(), 0)
    assert not model.module[1].training
    assert model.module[0].training
    model.module.eval()
    train(model, images(), 0)
    assert not model.module[0].training


class Leaking(nn.Module):
    """Every way beside buffers in which a forward pass can leave a client's data in a layer."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 10)
        self.hidden = None
        self.seen, self.cache, self.recent = [], {}, deque([1])
        self.body.scale = 1.0

    def forward(self, x):
        if self.hidden is not None:
            x = x + self.hidden
        self.hidden = x.detach().mean(dim=0)
        self.seen.append(self.hidden)
        self.cache["last"] = self.hidden
        self.recent.append(float(x.sum()))
        self.body.scale = float(x.abs().mean())
        self.body.grown = x.detach()
        self.eval()
        return self.head(self.body(x) * self.body.scale)


def test_what_layers_keep_is_put_back(monkeypatch):
    model, users = PartialModel(Leaking, seed=1), images(shape=(64,))
    alone = train(model, users, 0)
    train(model, users, 1)
    assert torch.equal(train(model, users, 0), alone)
    module = model.module
    assert module.hidden is None
    assert (module.seen, module.cache, module.recent) == ([], {}, deque([1]))
    assert module.body.scale == 1.0
    assert not hasattr(module.body, "grown")
    assert module.training
    module.seen.append("mine")  # before the client
    module.body.scale = 3.0
    train(model, users, 0)
    assert (module.seen, module.body.scale) == (["mine"], 3.0)
    module.seen.clear()
    module.body.scale = 1.0
    monkeypatch.setattr(LayerStates, "restore", lambda _: None)  # power
    train(model, users, 1)
    assert not torch.equal(train(model, users, 0), alone)
    assert module.seen


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.calls = nn.Linear(64, 10), 0

    def forward(self, x):
        self.calls += 1
        return self.head(x) * self.calls


def test_vectorized_clients_do_not_share_what_layers_keep():
    """In the loop each client begins with no calls; side by side they would count together."""
    model = PartialModel(Counts, seed=1)

    def updates(method, clients):
        task, local = RoundTask(0, clients, 9.0, "plan"), LocalTraining(0.1, batch_size=2)
        return computed(model, images(shape=(64,)), method, local, task)

    with pytest.raises(RuntimeError, match="sets attributes of its layers"):
        updates(Method(True), (0, 1))
    assert model.module.calls == 0
    assert torch.equal(updates(Method(), (0, 1))[1], updates(Method(), (1,))[0])


WRITES = REWRITES | {"in place": lambda tensor, other, number: tensor.add_(number)}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_tensor_that_a_layer_keeps_and_writes_to_is_refused(write):
    class Ranks(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(64, 10)
            self.state, self.other = torch.arange(64.0).flip(0), torch.arange(64.0)

        def forward(self, x):
            write(self.state, self.other, float(x.mean()))
            return self.head(x + self.state)

    model = PartialModel(Ranks, seed=1)
    with pytest.raises(ConfigError, match=r"'(state|other)', a tensor that a layer keeps.*buffer"):
        train(model, images(shape=(64,)), 0, LocalTraining(0.1, steps=1))
    assert torch.equal(model.module.state, torch.arange(64.0).flip(0))
    assert torch.equal(model.module.other, torch.arange(64.0))


INSIDE = {
    "list": (lambda tensor: [tensor], lambda state: state[0]),
    "tuple in a dict": (lambda tensor: {"seen": (1, tensor)}, lambda state: state["seen"][1]),
    "array": (lambda tensor: tensor.numpy(), lambda state: state),
    "array in a list of lists": (lambda tensor: [[tensor.numpy()]], lambda state: state[0][0]),
}


@pytest.mark.parametrize(("put", "get"), INSIDE.values(), ids=INSIDE)
def test_a_tensor_or_array_inside_of_what_a_layer_keeps_is_found(put, get):
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.state = nn.Linear(64, 10), put(torch.arange(64.0))

        def forward(self, x):
            seen = get(self.state)
            seen += float(x.mean())
            return self.head(x + torch.as_tensor(seen))

    model = PartialModel(Sums, seed=1)
    with pytest.raises(ConfigError, match=r"'state', a tensor that a layer keeps.*buffer"):
        train(model, images(shape=(64,)), 0, LocalTraining(0.1, steps=1))
    assert torch.equal(torch.as_tensor(get(model.module.state)), torch.arange(64.0))


HOOKS = {
    "forward": lambda head, mean: head.register_forward_hook(lambda _1, _2, out: out * mean),
    "before": lambda head, mean: head.register_forward_pre_hook(lambda _, x: (x[0] + mean,)),
    "weight": lambda head, mean: head.weight.register_hook(lambda gradient: gradient * mean),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_hooks_that_a_loss_registers_end_with_the_client(register, monkeypatch):
    def loss(module, batch):
        register(module[0], batch[0].mean().detach())
        return cross_entropy(module(batch[0]), batch[1])

    model, users = (
        PartialModel(lambda: nn.Sequential(nn.Linear(64, 10)), seed=1),
        images(shape=(64,)),
    )
    model.module[0].register_forward_hook(lambda _1, _2, out: out * 2)  # somebody else's stays
    local = LocalTraining(0.1, steps=1, loss=loss)
    alone = train(model, users, 0, local)
    train(model, users, 1, local)
    assert torch.equal(train(model, users, 0, local), alone)
    assert len(model.module[0]._forward_hooks) == 1
    monkeypatch.setattr(LayerStates, "_remove_hooks", lambda _: None)  # power
    train(model, users, 1, local)
    assert not torch.equal(train(model, users, 0, local), alone)


class Momentum(nn.Module):
    """A frozen teacher that follows the trained part, as in self-supervised losses."""

    def __init__(self, how):
        super().__init__()
        self.how, self.teacher, self.head = how, nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x):
        teacher, trained = self.teacher.weight, self.head.weight
        if self.how == "in place":
            with torch.no_grad():
                teacher.mul_(0.9).add_(trained, alpha=0.1)
        elif self.how == "data":
            teacher.data = 0.9 * teacher.data + 0.1 * trained.data
        elif self.how == "trained data":
            trained.data = trained.data.clone()
        else:
            self.teacher.weight = nn.Parameter(trained.detach().clone())
        return self.head(x) + self.teacher(x)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("in place", "'teacher.weight' was written to"),
        ("data", "'teacher.weight' was moved"),
        ("trained data", "'head.weight' was moved"),
        ("replaced", None),
    ],
)
def test_a_frozen_teacher_that_follows_a_client_is_refused_or_put_back(how, said):
    model = PartialModel(lambda: Momentum(how), train=["head.*"], seed=1)
    start, before = model.flat.clone(), model.module.teacher.weight
    if said is None:
        train(model, images(shape=(64,)), 0)
        assert model.module.teacher.weight is before
        model.verify()
        return
    with pytest.raises(ConfigError, match=said):
        train(model, images(shape=(64,)), 0)
    assert torch.equal(model.module.head.weight.flatten(), start[:640])
    if how != "in place":  # of that there is no copy; whoever built the model has to do it again
        model.verify()


def test_a_module_that_was_moved_is_refused_before_it_trains():
    model = PartialModel(lambda: nn.Linear(64, 10), seed=1)
    model.module.double()
    with pytest.raises(ConfigError, match="'weight' was moved, for instance by module"):
        train(model, images(shape=(64,)), 0)


class Ungraded(nn.Module):
    """It switches gradients on where they do not belong, and drops the model's."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x):
        self.body.weight.requires_grad_(True)
        self.head.weight.grad = None
        return self.head(self.body(x))


def test_no_gradient_of_a_client_is_left_anywhere():
    model = PartialModel(Ungraded, train=["head.*"], seed=1)
    local = LocalTraining(0.1, batch_size=2, momentum=0.5)
    train(model, images(shape=(64,)), 0, local)
    body, head = model.module.body, model.module.head
    assert body.weight.grad is None
    assert not body.weight.requires_grad
    assert head.weight.grad.data_ptr() == model.gradient.data_ptr()
    assert not model.gradient.any()
