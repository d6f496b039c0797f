import pytest
import torch
from torch import nn

from accounting import ConfigError
from privpart import PartialModel
from privpart.models import small_cnn
from privpart.patterns import freeze_ladder, matching_parameters


def network() -> nn.Module:
    return small_cnn(channels=(4, 8), hidden=16, image_size=8)


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


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("dnse1.*", "dense1"),
        ("!dnse1.*", "dense1"),
        ("type:Groupnorm", "GroupNorm"),
        ("!type:Lineal", "Linear"),
    ],
)
def test_a_pattern_that_matches_nothing_names_its_neighbours(pattern, near):
    with pytest.raises(ConfigError, match=f"matches no parameter.*Near it:.*{near}"):
        matching_parameters(network(), ["conv1.*", pattern])


@pytest.mark.parametrize("nothing", [[], "conv1.*", ()])
def test_patterns_come_as_a_list(nothing):
    with pytest.raises(ConfigError, match="must be a list"):
        matching_parameters(network(), nothing)


@pytest.mark.parametrize("everything", [["!*"], ["conv1.*", "!conv*"]])
def test_freezing_everything_is_an_error(everything):
    with pytest.raises(ConfigError, match="excludes every parameter"):
        matching_parameters(network(), everything)


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


def test_the_ladder_freezes_one_more_block_per_rung():
    module = network()
    ladder = freeze_ladder(module)
    assert list(ladder) == [
        "full",
        "freeze dense1.*",
        "freeze dense1.*, conv2.*",
        "freeze dense1.*, conv2.*, conv1.*",
    ]
    dims = [PartialModel(network, train=train, seed=0).dim for train in ladder.values()]
    assert dims == [1050, 522, 226, 186]


def dims(module: nn.Module, ladder: dict[str, tuple[str, ...]]) -> list[int]:
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    return [sum(sizes[n] for n in matching_parameters(module, train)) for train in ladder.values()]


def test_a_ladder_of_layers_that_hold_layers_freezes_each_number_once():
    module = nn.Sequential(
        nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16), nn.Linear(8, 3, bias=False)
    )
    ladder = freeze_ladder(module)
    assert list(ladder)[1] == "freeze 1.self_attn"
    assert ladder["freeze 1.self_attn"] == (
        "!1.self_attn.in_proj_weight",
        "!1.self_attn.in_proj_bias",
    )
    total = sum(p.numel() for p in module.parameters())
    frozen = [3 * 72, 9 * 16, 17 * 8, 72, 72]  # attention in, dense 1 and 2, dense 0, attention out
    left = [total - sum(frozen[:i]) for i in range(6)]
    assert dims(module, ladder) == left
    assert left[-1] == 3 * 8 + 2 * 2 * 8  # head and normalisation


def test_a_ladder_never_freezes_what_is_tied_to_the_head():
    module = tied()
    ladder = freeze_ladder(module)
    assert list(ladder) == ["full", "freeze 1.*"]
    assert dims(module, ladder) == [40, 28]


def test_a_ladder_freezes_parameters_of_the_module_itself_and_ties_once():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.head = nn.Linear(3, 2)

    ladder = freeze_ladder(Root())
    assert list(ladder) == [
        "full",
        "freeze first.*",
        "freeze first.*, scale",
        "freeze first.*, scale, second",
    ]
    assert dims(Root(), ladder) == [3 + 12 + 3 + 8, 14, 11, 8]
