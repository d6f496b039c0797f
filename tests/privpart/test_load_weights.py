"""Pretrained weights from a file: all that is asked for, exactly, or nothing and one sentence."""

import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accounting import ConfigError
from privpart import PartialModel
from privpart.models import freeze_batch_norm
from privpart.patterns import matching_parameters
from privpart.start_values import load_weights


def network(seed=0):
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)
        norm = nn.BatchNorm1d(5)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        bare = nn.BatchNorm1d(5, affine=False)
        bare.running_mean.normal_()
        return nn.Sequential(nn.Linear(6, 5), norm, bare, nn.Linear(5, 3))


BODY = ("0.weight", "0.bias", "1.weight", "1.bias")
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.safetensors"


def saved(path, without=(), **changed):
    tensors = {n: t.clone() for n, t in network(1).state_dict().items() if n not in without}
    tensors |= {name.replace("__", "."): tensor for name, tensor in changed.items()}
    save_file(tensors, path)
    return tensors


def test_named_weights_come_with_the_statistics_of_their_layers(path):
    tensors, module, before = saved(path), network(), network().state_dict()
    load_weights(module, path, BODY)
    now = module.state_dict()
    for name in now:
        expected = before if name.startswith("3.") else tensors
        assert torch.equal(now[name], expected[name]), name
    assert not torch.equal(before["2.running_mean"], now["2.running_mean"])  # power
    module = network()
    load_weights(module, path, ["3.weight"])  # statistics of layers whose weights stay, stay
    assert torch.equal(module[1].running_mean, before["1.running_mean"])
    assert torch.equal(module[3].bias, before["3.bias"])


def test_a_partial_model_keeps_what_was_loaded(path):
    tensors, module = saved(path), network()
    load_weights(module, path, matching_parameters(module, ["!3.*"]))
    freeze_batch_norm(module)
    model = PartialModel(module, train=["3.*"], keep=["!3.*"], seed=7)
    assert torch.equal(model.module[0].weight, tensors["0.weight"])
    assert torch.equal(model.module[2].running_mean, tensors["2.running_mean"])
    assert not torch.equal(model.module[3].weight, tensors["3.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_floating_point_becomes_float32(path, dtype):
    weight = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    saved(path, without=["1.num_batches_tracked"], **{"0__weight": weight})  # torch allows that
    module = network()
    load_weights(module, path, BODY)
    assert module[0].weight.dtype == torch.float32
    assert torch.equal(module[0].weight, weight.float())


@pytest.mark.parametrize(
    ("without", "changed", "said"),
    [
        (["0.weight"], {}, "lacks '0.weight'. Near it: "),
        (["1.running_var"], {}, "lacks '1.running_var'"),
        ([], {"0__weight": torch.ones(6, 5)}, "(6, 5); must be floating point of shape (5, 6)"),
        ([], {"0__bias": torch.full((5,), torch.nan)}, "'0.bias' holds NaN"),
        ([], {"1__running_var": torch.full((5,), torch.inf)}, "'1.running_var' holds NaN"),
        ([], {"0__bias": torch.full((5,), 1e300, dtype=torch.float64)}, "holds NaN or inf"),
        ([], {"0__bias": torch.ones(5, dtype=torch.int64)}, "'0.bias' is torch.int64"),
        ([], {"1__num_batches_tracked": torch.tensor(1.5)}, "must be torch.int64"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_sentence_and_changes_nothing(path, without, changed, said):
    saved(path, without, **changed)
    module, before = network(), network().state_dict()
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: .*{re.escape(said)}"):
        load_weights(module, path, BODY)
    assert all(torch.equal(module.state_dict()[name], before[name]) for name in before)


def test_an_unreadable_file_is_one_sentence(path, tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        load_weights(network(), path, BODY)
    with pytest.raises(ConfigError, match="cannot be read as a safetensors file"):
        load_weights(network(), tmp_path, BODY)
    torch.save(network().state_dict(), path)
    with pytest.raises(ConfigError, match="Pickled weights"):
        load_weights(network(), path, BODY)
    with pytest.raises(ConfigError, match=r"names: '9\.bias' is not a parameter"):
        load_weights(network(), path, ["9.bias"])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(7, 3), nn.Linear(3, 7, bias=False)
        self.out.weight = self.words.weight


@pytest.mark.parametrize("inside", ["words.weight", "out.weight"])
@pytest.mark.parametrize("asked", ["words.weight", "out.weight"])
def test_a_tied_parameter_has_any_of_its_names_in_the_file(path, inside, asked):
    save_file({inside: torch.ones(7, 3)}, path)
    module = Tied()
    load_weights(module, path, [asked])
    assert module.words.weight.unique().tolist() == [1.0]


def test_two_values_of_one_tied_parameter_are_refused(path):
    save_file({"words.weight": torch.ones(7, 3), "out.weight": torch.zeros(7, 3)}, path)
    with pytest.raises(ConfigError, match=r"'out\.weight' and 'words\.weight' are one parameter"):
        load_weights(Tied(), path, ["words.weight"])
    save_file({"words.weight": torch.ones(7, 3), "out.weight": torch.ones(7, 3)}, path)
    load_weights(Tied(), path, ["words.weight"])
