import pytest
import torch
from torch import nn

from privpart import EmbeddedEngine, LocalTraining, PartialModel, RoundTask, Users, client_update
from privpart.engines import layers as products
from privpart.engines.methods import LocalComputation, Method, client_generator

pytestmark = pytest.mark.skipif(not products._available(), reason="torch without oneDNN")

SHAPES = {"rows": (7, 12), "words": (3, 5, 12), "one": (1, 12)}


@pytest.fixture
def always(monkeypatch):
    """Every layer is large enough; counts the products."""
    monkeypatch.setattr(products, "_WORTH_ONEDNN", 0)
    counted, own = [], products._by_onednn

    def counting(*inputs):
        counted.append(inputs)
        return own(*inputs)

    monkeypatch.setattr(products, "_by_onednn", counting)
    return counted


def gradients(layer, x):
    out = layer(x)
    wanted = [x, *layer.parameters()]
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), wanted)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_products_and_gradients_are_torchs_up_to_rounding(always, shape, bias):
    generator = torch.Generator().manual_seed(0)
    layer, x = nn.Linear(12, 6, bias=bias), torch.randn(shape, generator=generator)
    x.requires_grad_()
    expected = gradients(layer, x)
    with products.replaced_dense(layer, onednn=True):
        found = gradients(layer, x)
    assert len(always) == 3  # forwards, and for what came and for the weights
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_nothing_is_computed_for_frozen_weights_or_for_inputs(always):
    layer = nn.Linear(12, 6).requires_grad_(False)
    with products.replaced_dense(layer, onednn=True):
        layer(torch.randn(4, 12, requires_grad=True)).sum().backward()
        assert len(always) == 2
        layer.requires_grad_(True)
        layer(torch.randn(4, 12)).sum().backward()
    assert len(always) == 4


@pytest.mark.parametrize("raises", [True, False])
def test_layers_are_torchs_own_again_afterwards(always, raises):
    class Own(nn.Linear):
        pass

    network = nn.Sequential(nn.Linear(12, 6), nn.ReLU(), Own(6, 2))
    try:
        with products.replaced_dense(network, onednn=True):
            assert "forward" in vars(network[0])
            assert "forward" not in vars(network[2])  # a subclass may do anything
            if raises:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    network(torch.randn(4, 12)).sum().backward()
    assert not always
    assert all("forward" not in vars(layer) for layer in network)


def test_small_layers_and_other_types_stay_with_torch(monkeypatch):
    monkeypatch.setattr(products, "_by_onednn", None)
    small, double = nn.Linear(12, 6), nn.Linear(2**11, 2**11).double()
    with products.replaced_dense(small, onednn=True), products.replaced_dense(double, onednn=True):
        small(torch.randn(4, 12))
        double(torch.randn(4, 2**11, dtype=torch.float64))
    assert not products.worth_onednn(small, 16)
    assert products.worth_onednn(nn.Linear(2**9, 2**9), 16)


def test_infinities_and_nans_stay_what_they_are(always):
    layer = nn.Linear(12, 6)
    x = torch.zeros(3, 12)
    x[0, 0], x[1, 0] = float("nan"), float("inf")
    with products.replaced_dense(layer, onednn=True):
        out = layer(x)
    assert not torch.isfinite(out[:2]).any()
    assert torch.isfinite(out[2]).all()


@pytest.mark.parametrize("train", [["*"], ["2.*"], ["0.*"]])
def test_clients_train_as_they_do_by_torch(always, train):
    def model():
        network = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 5))
        return PartialModel(network, train=train, seed=0, overwrite=True)

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 12, generator=generator), torch.arange(30) % 5
    users, local = Users(x, y, torch.arange(30).split(10)), LocalTraining(0.1, batch_size=4)
    task, found = RoundTask(0, (0, 1, 2), 0.05, "plan"), {}
    for method in (Method(), Method(onednn=True)):
        work = LocalComputation(model(), users, local=local, data_seed=1)
        out = found[method] = torch.empty(3, work.model.dim)
        work.updates(task, task.clients, work.model.flat.clone(), method, out)
    plain, fast = found.values()
    assert always
    assert (fast - plain).norm(dim=1).max() < 1e-5 * task.clip_norm
    assert (fast.double().norm(dim=1) <= task.clip_norm).all()
    assert (plain.norm(dim=1) > 0.9 * task.clip_norm).all()  # power


def test_the_engine_tries_it_only_where_it_may_choose():
    def engine(**options):
        network = nn.Sequential(nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 4))
        users = Users(torch.randn(16, 2048), torch.arange(16) % 4, torch.arange(16).split(8))
        local = LocalTraining(0.1, batch_size=4)
        said = []
        engine = EmbeddedEngine(
            PartialModel(network, seed=0, overwrite=True), users, local=local, data_seed=1,
            report=said.append, explain=True, **options,
        )  # fmt: skip
        task, start = RoundTask(0, (0, 1), 1.0, "plan"), engine.model.flat.clone()
        for _ in range(6):  # two clients are few: a round tries one method
            found = list(engine.run(task, start))
        return engine, said, found

    _, said, _ = engine()
    assert "dense layers by oneDNN" in said[0]
    fixed, said, found = engine(deterministic=True)
    assert said == ["engine: one client after another: as the options say"]
    assert not fixed.method.onednn
    model, users = fixed.model, fixed.users
    own = client_update(
        model, model.flat.clone(), users.examples(1), local=fixed.local, clip_norm=1.0,
        generator=client_generator(1, 0, 1),
    )  # fmt: skip
    assert torch.equal(found[1].update, own)
