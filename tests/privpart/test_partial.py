import pytest
import torch
from torch import nn

from accounting import ConfigError
from privpart import Constant, Normal, PartialModel
from privpart.models import small_cnn


def network() -> nn.Module:
    return small_cnn(channels=(4, 8), hidden=16, image_size=8)


def test_patterns_choose_and_describe():
    model = PartialModel(network(), train=["conv2.*", "dense2.bias"], seed=0)
    assert model.trainable == ("conv2.weight", "conv2.bias", "dense2.bias")
    assert model.dim == 4 * 8 * 9 + 8 + 10
    rows = model.describe()
    assert sum(row.numbers for row in rows) == model.numbers
    assert {row.name for row in rows if row.trained} == set(model.trainable)
    assert set(model.trainable) | set(model.frozen) == {row.name for row in rows}


def test_a_pattern_that_matches_nothing_names_its_neighbours():
    with pytest.raises(ConfigError, match=r"'dnse1\.\*' matches no parameter.*dense1"):
        PartialModel(network(), train=["conv1.*", "dnse1.*"], seed=0)
    for nothing in ([], "conv1.*"):
        with pytest.raises(ConfigError, match="must be a list"):
            PartialModel(network(), train=nothing, seed=0)


def test_flat_is_the_trainable_part_and_so_is_its_gradient():
    model = PartialModel(network(), train=["conv1.*", "dense2.*"], seed=0)
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
    model = PartialModel(nn.Sequential(embedding, output), seed=0)
    assert model.trainable == ("0.weight",)
    assert model.dim == 21
    model.load(torch.ones(21))
    assert output.weight.sum() == 21


def test_batch_statistics_are_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"layer '1' is a BatchNorm.*replace_batch_norm"):
        PartialModel(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), seed=0)


def test_a_parameter_without_initialiser_asks_for_one():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(3))

    with pytest.raises(ConfigError, match="no initialiser for scale"):
        PartialModel(Scaled(), seed=0)
    model = PartialModel(Scaled(), seed=0, initializers={"scale": Constant(2.0)})
    assert model.flat.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(ConfigError, match="'scala' matches no parameter"):
        PartialModel(Scaled(), seed=0, initializers={"scale": Constant(2.0), "scala": Normal(1.0)})


def test_running_statistics_of_any_kind_are_refused():
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    with pytest.raises(ConfigError, match="layer '0' is a InstanceNorm1d"):
        PartialModel(nn.Sequential(norm, nn.Flatten(), nn.Linear(8, 2)), seed=0)


def test_buffers_never_pass_from_one_client_to_the_next():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(2, 2)
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x):
            self.seen += x.detach().sum(dim=0)
            return self.dense(x)

    model = PartialModel(Counting(), seed=0)
    model.module(torch.ones(3, 2))
    model.load(model.flat.clone())
    assert model.module.seen.tolist() == [0.0, 0.0]
