import copy

import pytest
import torch
from small_cohorts import cnn as network
from torch import nn
from torch.nn.utils import parameters_to_vector

from accounting import ConfigError
from privpart import Constant, Normal, PartialModel


def test_flat_is_the_trainable_part_and_so_is_its_gradient():
    model = PartialModel(network, train=["conv1.*", "dense2.*"], seed=0)
    parameters = dict(model.module.named_parameters())
    model.load(torch.arange(model.dim, dtype=torch.float32))
    assert parameters["conv1.weight"].flatten()[5] == 5
    model.module(torch.rand(3, 1, 8, 8)).square().sum().backward()
    expected = torch.cat([parameters[name].grad.flatten() for name in model.trainable])
    assert torch.equal(model.gradient, expected)
    assert model.gradient.abs().sum() > 0
    assert all(parameters[name].grad is None for name in model.frozen)


def test_tied_parameters_count_once():
    embedding, output = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
    output.weight = embedding.weight
    model = PartialModel(lambda: nn.Sequential(embedding, output), seed=0)
    assert model.trainable == ("0.weight",)
    assert model.dim == 21
    model.load(torch.ones(21))
    assert output.weight.sum() == 21


def test_a_parameter_without_initialiser_asks_for_one():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(3))

    with pytest.raises(ConfigError, match="no initialiser for scale"):
        PartialModel(Scaled, seed=0)
    model = PartialModel(Scaled, seed=0, initializers={"scale": Constant(2.0)})
    assert model.flat.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(ConfigError, match="'scala' matches no parameter"):
        PartialModel(Scaled, seed=0, initializers={"scale": Constant(2.0), "scala": Normal(1.0)})


def test_a_pretrained_model_keeps_its_weights_and_is_known_by_its_fingerprint():
    weights = network().state_dict()

    def pretrained(**options):
        module = network()
        module.load_state_dict(weights)
        return PartialModel(module, train=["dense2.*"], seed=None, **options)

    server = pretrained()
    assert all(torch.equal(server.module.state_dict()[name], weights[name]) for name in weights)
    assert server.seed is None
    assert torch.equal(pretrained(fingerprint=server.fingerprint).flat, server.flat)
    weights["conv1.weight"][0, 0, 0, 0] += 1e-6
    with pytest.raises(ConfigError, match=f"expected {server.fingerprint}"):
        pretrained(fingerprint=server.fingerprint)
    with pytest.raises(ConfigError, match="keeps its weights"):
        pretrained(initializers={"*": Constant(0.0)})


def test_a_seed_overwrites_the_weights_of_a_module_only_where_the_caller_says_so():
    pretrained = network()
    weights = parameters_to_vector(pretrained.parameters()).clone()
    with pytest.raises(ConfigError, match="seed=7 would replace all weights of the module"):
        PartialModel(pretrained, train=["dense2.*"], seed=7)
    assert torch.equal(parameters_to_vector(pretrained.parameters()), weights)
    kept = PartialModel(copy.deepcopy(pretrained), train=["dense2.*"], seed=None).module
    assert torch.equal(parameters_to_vector(kept.parameters()), weights)
    built = PartialModel(network, train=["dense2.*"], seed=7)
    drawn = PartialModel(pretrained, train=["dense2.*"], seed=7, overwrite=True)
    assert drawn.module is pretrained
    assert torch.equal(drawn.flat, built.flat)
    assert drawn.fingerprint == built.fingerprint


def with_nan():
    broken = network()
    broken.dense1.bias.data[3] = float("nan")
    return broken


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (network(), {"seed": None}, "overwrite=True: nothing is overwritten"),
        (network().half(), {}, r"'conv1.weight' trains, and is torch\.float16.*\.float"),
        (with_nan(), {"seed": None, "overwrite": False}, r"'dense1\.bias' holds NaN"),
        (nn.Sequential(nn.LazyConv2d(3, 1)), {}, "no shape yet"),
        (nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Linear(8, 2)), {},
         "layer '0' is a InstanceNorm1d"),
        *(
            (nn.Sequential(kind(5, 2, max_norm=1.0), nn.Linear(2, 2)),
             {"train": ["1.*"], "seed": None, "overwrite": False},
             r"layer '0' has max_norm=1\.0.*max_norm=None")
            for kind in (nn.Embedding, nn.EmbeddingBag)
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_modules_that_cannot_train_or_be_overwritten_are_refused(module, options, message):
    with pytest.raises(ConfigError, match=message):
        PartialModel(module, **{"seed": 0, "overwrite": True} | options)


def test_a_parameter_that_came_frozen_trains_when_asked():
    module = network()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    model = PartialModel(module, train=["dense2.*"], seed=None)
    model.module(torch.rand(3, 1, 8, 8)).square().sum().backward()
    assert model.gradient.norm() > 0


def test_initializers_go_by_pattern_and_the_later_wins():
    model = PartialModel(
        network, seed=0, initializers={"*.bias": Constant(3.0), "dense?.bias": Constant(2.0)}
    )
    found = dict(model.module.named_parameters())
    assert found["conv1.bias"].unique().tolist() == [3.0]
    assert found["dense1.bias"].unique().tolist() == [2.0]


class Remembers(nn.Module):
    """Every way in which a forward pass can leave a client's data in buffers."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(2, 2)
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("none", None)
        self.register_buffer("grown", torch.zeros(1), persistent=False)
        self.register_buffer("deleted", torch.ones(1))
        self.register_buffer("counted", torch.zeros(1))

    def forward(self, x):
        self.counted += x.detach().sum()
        self.replaced = x.detach().clone()
        self.none = x.detach().mean(dim=0)
        self.grown.resize_(4).fill_(7.0)
        self.register_buffer("added", x.detach().clone())
        del self.deleted
        return self.dense(x)


def test_buffers_that_a_forward_pass_replaced_are_put_back():
    model = PartialModel(Remembers, seed=0)
    model.module(torch.ones(3, 2))
    model.load(model.flat.clone())
    left = model.module._buffers
    assert left.pop("none") is None
    found = {name: buffer.tolist() for name, buffer in left.items()}
    assert found == {"replaced": [0.0], "grown": [0.0], "deleted": [1.0], "counted": [0.0]}
    model.module(torch.ones(3, 2))  # and a second client can run


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.complex128])
def test_the_fingerprint_sees_buffers(persistent, dtype):
    class Features(nn.Module):
        def __init__(self, last):
            super().__init__()
            self.register_buffer(
                "features", torch.tensor([1, 2, last]).to(dtype), persistent=persistent
            )
            self.head = nn.Linear(3, 2)

    def fingerprint(last):
        return PartialModel(lambda: Features(last), train=["head.bias"], seed=1).fingerprint

    assert fingerprint(3) == fingerprint(3) != fingerprint(4)


def test_a_module_has_one_partial_model_at_a_time():
    module = network()
    first = PartialModel(module, train=["dense2.*"], seed=0, overwrite=True)
    with pytest.raises(ConfigError, match=r"belongs to another PartialModel.*deepcopy"):
        PartialModel(module, seed=0, overwrite=True)
    with pytest.raises(ConfigError, match="belongs to another"):
        PartialModel(lambda: nn.Sequential(module.dense1, nn.Linear(16, 2)), seed=0)
    PartialModel(lambda: copy.deepcopy(module), seed=1)
    first.load(torch.ones(first.dim))
    assert module.dense2.weight.unique().tolist() == [1.0]
    del first
    PartialModel(module, seed=0, overwrite=True)


def test_the_mask_sees_names_shapes_and_order():
    def mask(*layers, train=("*",)):
        return PartialModel(lambda: nn.Sequential(*layers), train=train, seed=0).trainable_hash

    base = mask(nn.Linear(2, 3), nn.Linear(3, 2))
    assert mask(nn.Linear(2, 3), nn.Linear(3, 2)) == base
    assert mask(nn.Linear(3, 2), nn.Linear(2, 3)) != base  # as many numbers
    assert mask(nn.Linear(2, 3), nn.Linear(3, 2), train=["*.weight"]) != base
    assert mask(nn.Linear(2, 3), nn.Identity(), nn.Linear(3, 2)) != base
