import pytest
from small_cohorts import cnn as network
from torch import nn

from accounting import ConfigError
from privpart import PartialModel
from privpart.patterns import matching_parameters


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["conv1.*"], ["conv1.weight", "conv1.bias"]),
        (["dense2.bias", "conv?.bias"], ["conv1.bias", "conv2.bias", "dense2.bias"]),
        (["type:GroupNorm"], ["norm.weight", "norm.bias"]),
        (["type:*Norm*"], ["norm.weight", "norm.bias"]),
        (["type:_ConvNd", "!*.bias"], ["conv1.weight", "conv2.weight"]),
        (["!conv*", "!type:Linear"], ["norm.weight", "norm.bias"]),
        (["!*.weight", "dense*"], ["dense1.bias", "dense2.bias"]),
    ],
)
def test_what_a_list_means(patterns, names):
    assert list(matching_parameters(network(), patterns)) == names


def test_without_patterns_what_requires_gradients_trains():
    module = network()
    module.conv1.requires_grad_(False)
    assert "dense1.weight" in matching_parameters(module, None)
    assert not [name for name in matching_parameters(module, None) if name.startswith("conv1")]
    assert PartialModel(module, seed=None).frozen == ("conv1.weight", "conv1.bias")
    with pytest.raises(ConfigError, match="no parameter of the module requires a gradient"):
        PartialModel(network().requires_grad_(False), seed=None)


@pytest.mark.parametrize(("pattern", "near"), [("!dnse1.*", "dense1"), ("type:Lineal", "Linear")])
def test_a_pattern_that_matches_nothing_names_its_neighbours(pattern, near):
    with pytest.raises(ConfigError, match=f"matches no parameter.*Near it:.*{near}"):
        matching_parameters(network(), ["conv1.*", pattern])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], "must be a list"),
        ("conv1.*", "must be a list"),
        (["conv1.*", "!conv*"], "excludes every parameter"),
    ],
)
def test_lists_that_choose_nothing_are_errors(wrong, said):
    with pytest.raises(ConfigError, match=said):
        matching_parameters(network(), wrong)


def tied() -> nn.Module:
    embedding, output = nn.Embedding(7, 3), nn.Linear(3, 7)
    output.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(3, 3), output)


@pytest.mark.parametrize(
    ("patterns", "numbers"),
    [(["0.*"], 21), (["2.weight"], 21), (["2.*"], 28), (["!2.*"], 12), (["type:Linear"], 40)],
)
def test_a_tied_parameter_answers_to_all_its_names_and_counts_once(patterns, numbers):
    assert PartialModel(tied, train=patterns, seed=0).dim == numbers
