import math

import pytest
import torch
from torch import nn

from accounting import ConfigError
from privpart import Constant, Glorot, He, Normal, PartialModel, Uniform
from privpart.start_values import at_shape, default_initializers, seeded_tensor


@pytest.mark.parametrize("shape", [(7, 5), (6, 4, 3, 3), (6, 4, 3)])
def test_scales_are_torch_s(shape):
    weight = torch.empty(shape)
    fan_in, fan_out = nn.init._calculate_fan_in_and_fan_out(weight)
    assert at_shape(He(), weight.shape).scale == pytest.approx(math.sqrt(2 / fan_in))
    glorot = at_shape(Glorot(), weight.shape)
    assert glorot.scale == pytest.approx(math.sqrt(2 / (fan_in + fan_out)))
    uniform = at_shape(Glorot(uniform=True), weight.shape)
    assert uniform.limit == pytest.approx(math.sqrt(3) * glorot.scale)


@pytest.mark.parametrize("initializer", [He(), Glorot()])
def test_a_bias_has_no_fan(initializer):
    with pytest.raises(ConfigError, match=r"shape \(3,\): the weight must have inputs"):
        at_shape(initializer, torch.Size([3]))


def test_default_initializers():
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Embedding(5, 3))
    found = default_initializers(network)
    assert found["0.weight"] == He()
    assert found["0.bias"] == found["1.bias"] == Constant(0.0)
    assert found["1.weight"] == Constant(1.0)
    assert found["2.weight"] == Normal(1.0)


@pytest.mark.parametrize("initializer", [Normal, Uniform, Constant])
def test_what_float32_can_hold_is_drawn_and_all_else_is_an_error(initializer):
    for value in (1e30, 1e-30):
        drawn = seeded_tensor(0, "w", torch.Size([70_000]), initializer(value))
        assert drawn.isfinite().all()
        assert drawn.all()
    for value in (1e31, 1e-31):
        with pytest.raises(ConfigError, match="must be 0, or between 1e-30 and 1e30"):
            initializer(value)
    for nonsense in (math.nan, math.inf, "1", None):
        with pytest.raises(ConfigError):
            initializer(nonsense)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_layer_without_inputs_is_an_error():
    with pytest.raises(ConfigError, match=r"He\(\) on shape \(3, 0\): the weight must have inputs"):
        PartialModel(lambda: nn.Sequential(nn.Linear(0, 3), nn.Linear(3, 2)), seed=0)
