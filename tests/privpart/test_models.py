"""The papers' networks: their sizes, their tables, and that they train."""

import inspect

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from accounting import ConfigError
from privpart import PartialModel
from privpart.client import mean_loss
from privpart.models import (
    MODELS,
    build_network,
    example_batch,
    example_network,
    replace_batch_norm,
    resnet8,
    resnet18,
)
from privpart.patterns import Outline, matching_parameters
from privpart.settings.outlines import OUTLINES, outline_of


def meta(name, **sizes) -> nn.Module:
    """A network's shapes, without its numbers."""
    with torch.device("meta"):
        return build_network(name, **sizes)


def numbers(module: nn.Module, patterns=("*",)) -> int:
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    return sum(sizes[name] for name in matching_parameters(module, patterns))


SIZES = {
    "small_cnn": [
        {"channels": (16, 32), "hidden": 512, "image_size": 8},
        {"channels": [3, 5], "hidden": 7, "image_size": 11, "classes": 2, "kernel": 5, "groups": 0},
    ],
    "mcmahan_2nn": [{}, {"inputs": 5, "hidden": 6, "classes": 7}],
    "bag_of_words": [{}, {"words": 3, "tags": 4}],
    "resnet8": [{}, {"classes": 3, "width": 6, "channels": 1}, {"norm": "batch"}],
    "resnet18": [{}, {"classes": 3, "width": 6, "channels": 1}, {"norm": "batch"}],
    "word_lm": [{}, {"vocabulary": 9, "width": 6, "heads": 3, "hidden": 5, "layers": 2}],
    "text_transformer": [
        {},
        {"vocabulary": 9, "classes": 4, "width": 6, "heads": 3, "hidden": 5, "layers": 1},
    ],
}


@pytest.mark.parametrize("name", MODELS)
def test_plans_are_read_from_an_outline_that_is_the_networks_own(name):
    assert list(OUTLINES) == list(MODELS)
    assert (
        inspect.signature(OUTLINES[name]).parameters
        == inspect.signature(MODELS[name].build).parameters
    )
    for sizes in SIZES.get(name, [{}, {"classes": 3}]):
        own, network = outline_of(name, **sizes), Outline.of(meta(name, **sizes))
        assert own == network
        assert [*own.shapes] == [*network.shapes]


def test_fedpt_table_6():
    """Sidahmed et al. 2022, Table 6: the EMNIST network, layer by layer."""
    module = meta("emnist_cnn")
    layers = ["conv1", "conv2", "norm", "dense1", "dense2"]
    found = [numbers(module, [f"{layer}.*"]) for layer in layers]
    assert found == [832, 51264, 128, 1606144, 31806]
    assert numbers(module) == 1_690_174
    assert numbers(module, MODELS["emnist_cnn"].ladder["freeze-dense1"]) == 84_030


@pytest.mark.parametrize(
    ("name", "rung", "share", "reduction"),
    [
        ("emnist_cnn", "freeze-dense1", "4.97", "20.11"),
        ("resnet18_gn", "full", "100.00", "1.0"),
        # The paper prints 26.25: a misprint, for its 3.8 is 1 / 26.45 % (and 1 / 26.25 %), and the
        # three rows below come out exactly.
        ("resnet18_gn", "freeze-0", "26.45", "3.8"),
        ("resnet18_gn", "freeze-0-1", "8.07", "12.4"),
        ("resnet18_gn", "freeze-0-1-2", "3.47", "28.8"),
        ("resnet18_gn", "freeze-0-1-2-3", "2.16", "46.3"),
        ("word_lm", "full", "100.0", "1.0"),
        ("word_lm", "freeze-2", "91.3", "1.1"),
        ("word_lm", "freeze-1-2", "82.6", "1.2"),
        ("word_lm", "freeze-0-1-2", "73.8", "1.4"),
    ],
)
def test_fedpt_tables_1_2_3_10_and_11(name, rung, share, reduction):
    """Trainable percent and reduction in communication, by frozen blocks, to the printed digit."""
    module = meta(name)
    part, whole = numbers(module, MODELS[name].ladder[rung]), numbers(module)
    for value, printed in ((100 * part / whole, share), (whole / part, reduction)):
        assert f"{value:.{len(printed.partition('.')[2])}f}" == printed


@pytest.mark.parametrize(
    ("build", "classes", "count"),
    [
        (resnet8, 10, 1_235_274),
        (resnet8, 200, 1_284_104),
        (resnet18, 10, 11_181_642),
        (resnet18, 200, 11_279_112),
    ],
)
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_fedpart_resnets(build, classes, count, norm):
    """Wang et al. 2024, Tables 1 and 2, through their communication columns."""
    assert numbers(meta(build.__name__, classes=classes, norm=norm)) == count


@pytest.mark.parametrize(
    ("name", "sizes", "count"),
    [
        ("text_transformer", {"vocabulary": 30_333}, 6_793_605),  # FedPart, AG News
        ("text_transformer", {"vocabulary": 75_242}, 15_775_405),  # FedPart, Sogou
        ("mcmahan_cnn", {}, 1_690_046),  # Charles et al. 2022
        ("mcmahan_2nn", {}, 209_662),
        ("bag_of_words", {}, 5_000_500),
    ],
)
def test_published_sizes(name, sizes, count):
    assert numbers(meta(name, **sizes)) == count


SMALL: dict[str, dict[str, object]] = {name: {} for name in MODELS} | {
    "small_cnn": {"channels": (4, 8), "hidden": 16, "image_size": 8},
    "mcmahan_2nn": {"hidden": 20},
    "bag_of_words": {"words": 30, "tags": 5},
    "resnet8": {"width": 16},
    "resnet18": {"width": 16},
    "word_lm": {"vocabulary": 50, "width": 16, "hidden": 32},
    "text_transformer": {"vocabulary": 50, "width": 16},
}


@pytest.mark.parametrize("name", MODELS)
def test_every_rung_of_a_ladder_trains_less(name):
    module = meta(name, **SMALL[name])
    parts = [numbers(module, train) for train in MODELS[name].ladder.values()]
    assert parts == sorted(set(parts), reverse=True)
    assert parts[0] == numbers(module)


def test_batch_norm_is_converted_and_what_remains_is_refused():
    network = resnet8(width=16, norm="batch")
    with pytest.raises(ConfigError, match=r"'norm' is a BatchNorm2d.*replace_batch_norm"):
        PartialModel(network, seed=0, overwrite=True)
    converted = replace_batch_norm(network)
    assert numbers(converted) == numbers(network)
    assert PartialModel(converted, seed=0, overwrite=True).dim == numbers(network)
    tracking = nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True))
    with pytest.raises(ConfigError, match="InstanceNorm1d"):
        PartialModel(lambda: replace_batch_norm(tracking), seed=0)


def test_unknown_networks_and_sizes_are_errors():
    for name, sizes, fault in (
        ("resnet_8", {}, r"'resnet_8': unknown\. Near it: resnet8"),
        ("resnet8", {"depth": 3}, r"'resnet8'.*unexpected keyword argument 'depth'"),
        ("resnet8", {"norm": "layer"}, "norm='layer': must be"),
        ("word_lm", {"width": 10}, "width=10: must be even and a multiple of heads=8"),
        ("small_cnn", SMALL["small_cnn"] | {"groups": 3}, "groups=3: must divide"),
        ("small_cnn", SMALL["small_cnn"] | {"groups": -1}, "groups=-1"),
        ("small_cnn", SMALL["small_cnn"] | {"kernel": 4}, "kernel=4: must be odd"),
        ("small_cnn", SMALL["small_cnn"] | {"channels": (0, 8)}, "channels=0"),
    ):
        with pytest.raises(ConfigError, match=fault):
            build_network(name, **sizes)


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_whole_numbers_from_1(name):
    for size, parameter in inspect.signature(MODELS[name].build).parameters.items():
        if parameter.annotation is int and size != "groups":
            for nonsense in (0, 1.5, True):
                with pytest.raises(ConfigError, match=f"{size}="):
                    meta(name, **SMALL[name] | {size: nonsense})


def test_batch_norm_of_plain_features_still_tells_examples_apart():
    network = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    part = PartialModel(lambda: replace_batch_norm(network), seed=0)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    logits = part.module(x)
    assert (logits[1:] - logits[0]).abs().amax(dim=1).min() > 0.1
    with pytest.raises(ConfigError, match=r"BatchNorm1d\(1, .*constant"):
        replace_batch_norm(nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)))


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(8, affine=False),
        nn.BatchNorm2d(8).requires_grad_(False),
        nn.BatchNorm3d(8, eps=0.1),
        nn.SyncBatchNorm(8),
    ],
    ids=repr,
)
def test_every_batch_norm_is_converted_wherever_it_sits(norm):
    module = nn.Sequential(nn.Linear(2, 2), norm, nn.ModuleDict({"again": norm}))
    converted = replace_batch_norm(module)
    assert isinstance(converted[1], nn.GroupNorm)
    assert converted[1] is converted[2]["again"]
    new = converted[1]
    assert (new.num_groups, new.eps, new.affine) == (8, norm.eps, norm.affine)
    assert converted[0].weight is not module[0].weight
    assert torch.equal(converted[0].weight, module[0].weight)
    assert module[1] is norm
    assert isinstance(replace_batch_norm(norm), nn.GroupNorm)
    PartialModel(converted, seed=0, overwrite=True)
    with pytest.raises(ConfigError, match="not known yet"):
        replace_batch_norm(nn.LazyBatchNorm2d())


# Fingerprint of what the deepest rung freezes, FLOPs of two examples, norm of their logits.
PINS = {
    "small_cnn": ("1e5b29c1265432ba7c1abcd2a8cf92a5", 614_400, 8.967142),
    "emnist_cnn": ("a3556360794d599321c8f0021f5f5755", 49_199_104, 16.97447),
    "mcmahan_cnn": ("a3556360794d599321c8f0021f5f5755", 49_199_104, 15.37573),
    "mcmahan_2nn": ("b0354f3b15b5f3853cf99c5fd5d66137", 836_800, 8.758286),
    "bag_of_words": ("7a56ce04ca537d1621e295be2f102e85", 20_000_000, 24.8343),
    "resnet18_gn": ("ee4dace8fe5e078adfd07cdc3ed1233b", 1_612_304_384, 1.513995),
    "resnet8": ("bf2fea5f17fefd8e426bbe1e482a8098", 57_878_528, 5.022646),
    "resnet18": ("ee4dace8fe5e078adfd07cdc3ed1233b", 148_066_304, 7.406374),
    "word_lm": ("f58ae2cfccf61a465556b0ecb518cda2", 182_446_080, 162.0713),
    "text_transformer": ("5846690c586b9eaf5f856e6fa741d9df", 2_732_855_200, 3.270376),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_network_computes_what_it_did_on_the_bits_that_it_had(name):
    """A dropped residual, stride, ReLU or position, another group count or start value."""
    deepest = list(MODELS[name].ladder.values())[-1]
    part = PartialModel(
        lambda: example_network(name),
        train=("*.bias",) if deepest == ("*",) else deepest,
        seed=0,
        initializers=MODELS[name].initializers,
    )
    batch, labels = example_batch(name, 2)
    numbers = torch.arange(batch.numel()).reshape(batch.shape) * 37
    x = numbers % 101 / 101 if batch.is_floating_point() else numbers % 1000
    with FlopCounterMode(display=False) as flops:
        logits = part.module(x)
    fingerprint, count, norm = PINS[name]
    assert part.fingerprint == fingerprint
    assert flops.get_total_flops() == count
    assert float(logits.detach().double().norm()) == pytest.approx(norm, rel=1e-4)
    mean_loss(logits, labels, MODELS[name].loss).backward()
    assert 0 < part.gradient.norm() < 100
