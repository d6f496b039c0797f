"""Frozen parts of 16 and 8 bits, wrapped networks, and those that cannot be trained in part."""

import warnings
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

from accounting import ConfigError
from privpart import EmbeddedEngine, LocalTraining, PartialModel
from privpart.data import from_tensors
from privpart.messages import RoundTask
from privpart.start_values import Normal, load_weights
from privpart.training.costs import client_costs


class Half(nn.Module):
    """A frozen layer of some type below a float32 head."""

    def __init__(self, dtype=torch.bfloat16, *, quantised=False):
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.below = nn.Linear(64, 32, bias=False, dtype=dtype).requires_grad_(False)
        self.below.weight.data = torch.randn(32, 64, generator=draws).to(dtype)
        if quantised:
            whole = torch.randint(-127, 128, (32, 64), dtype=torch.int8, generator=draws)
            self.below.weight = nn.Parameter(whole, requires_grad=False)
            self.below.register_buffer("scale", torch.full((32, 1), 2**-6))
        self.head = nn.Linear(32, 3)
        self.head.weight.data = torch.randn(3, 32, generator=draws)

    def forward(self, x):
        weight = self.below.weight
        if hasattr(self.below, "scale"):
            weight = weight * self.below.scale
        return self.head(nn.functional.relu(x.to(weight.dtype) @ weight.T).float())


FROZEN = {
    "bfloat16": Half,
    "float16": lambda: Half(torch.float16),
    "float64": lambda: Half(torch.float64),
    "int8": lambda: Half(quantised=True),
}


def users():
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(24, 64, generator=draws)
    return from_tensors((x, (x[:, 0] > 0).long()), user=[i % 8 for i in range(24)])


def updates(model, **options):
    task = RoundTask(0, tuple(range(8)), 1e6, "plan")
    local = LocalTraining(0.1, epochs=2, batch_size=2)
    options |= {"local": local, "data_seed": 5, "report": lambda _: None}
    with EmbeddedEngine(model, users(), **options) as engine:
        return torch.stack([u.update for u in engine.run(task, model.flat.clone())])


@pytest.mark.parametrize("kind", FROZEN)
def test_a_frozen_part_keeps_its_type_and_every_way_trains_above_it_alike(kind):
    network = FROZEN[kind]()
    before = network.below.weight.clone()
    model = PartialModel(network, seed=None)
    assert model.trainable == ("head.weight", "head.bias")
    assert model.flat.dtype is torch.float32
    loop = updates(model, batching="loop")
    assert torch.equal(network.below.weight, before)
    assert network.below.weight.dtype is before.dtype
    assert loop.norm() > 1
    assert (updates(model, batching="vmap") - loop).norm() < 1e-4 * loop.norm()
    model.verify()


@pytest.mark.parametrize("kind", FROZEN)
def test_the_fingerprint_is_of_the_frozen_bits(kind):
    fingerprints = {PartialModel(FROZEN[kind](), seed=None).fingerprint for _ in range(2)}
    changed = FROZEN[kind]()
    bits = changed.below.weight.data.view(torch.uint8)
    bits[3, 5] ^= 1
    fingerprints.add(PartialModel(changed, seed=None).fingerprint)
    fingerprints |= {PartialModel(build(), seed=None).fingerprint for build in FROZEN.values()}
    assert len(fingerprints) == 1 + len(FROZEN)


def test_a_seed_draws_the_frozen_part_in_its_own_type():
    model = PartialModel(Half, train=["head.*"], seed=7)
    wide = PartialModel(lambda: Half(torch.float32), train=["head.*"], seed=7)
    assert model.module.below.weight.equal(wide.module.below.weight.bfloat16())
    assert model.flat.equal(wide.flat)
    initializers = {"below.weight": Normal(1.0)}
    with pytest.raises(ConfigError, match=r"'below\.weight' is torch\.int8.*Name it in keep"):
        PartialModel(FROZEN["int8"], train=["head.*"], seed=7, initializers=initializers)
    kept = PartialModel(FROZEN["int8"], train=["head.*"], seed=7, keep=["below.*"])
    assert kept.kept == ("below.weight",)


def test_weights_from_a_file_take_the_type_of_the_network(tmp_path):
    from safetensors.torch import save_file

    weight = torch.randn(32, 64)
    save_file({"below.weight": weight}, tmp_path / "w.safetensors")
    network = Half()
    load_weights(network, tmp_path / "w.safetensors", ["below.weight"])
    assert network.below.weight.equal(weight.bfloat16())
    save_file({"below.weight": 1e6 * weight}, tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match=r"NaN or infinity in torch\.float16"):
        load_weights(Half(torch.float16), tmp_path / "w.safetensors", ["below.weight"])


def test_costs_show_the_memory_of_a_frozen_part_as_it_is():
    batch, local = (torch.randn(2, 64), torch.tensor([0, 1])), LocalTraining(0.1, batch_size=2)
    found = {
        kind: client_costs(PartialModel(build(), seed=None), batch, local=local, examples=2)
        for kind, build in FROZEN.items()
    }
    head = 4 * (3 * 32 + 3)
    parameters = {kind: costs.memory.parameters - head for kind, costs in found.items()}
    of_one = 32 * 64
    sizes = {"bfloat16": 2 * of_one, "float16": 2 * of_one, "float64": 8 * of_one}
    assert parameters == sizes | {"int8": of_one + 4 * 32}


# Wrapped networks.


def plain():
    layers = nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)
    draws = torch.Generator().manual_seed(3)
    for layer in (layers[0], layers[2]):
        layer.weight.data = 0.1 * torch.randn(layer.weight.shape, generator=draws)
        layer.bias.data.zero_()
    return nn.Sequential(*layers)


def in_part(wrap):
    network = plain()
    network[0] = wrap(network[0])
    return network


def in_place():
    network = plain()
    network.compile(backend="eager")
    return network


compiled = partial(torch.compile, backend="eager")  # others import for seconds
WRAPPED = {
    "compiled": lambda: compiled(plain()),
    "compiled in part": lambda: in_part(compiled),
    "compiled in place": in_place,
    "data parallel": lambda: nn.DataParallel(plain()),
    "both": lambda: compiled(nn.DataParallel(in_part(nn.DataParallel))),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapped_network_is_the_network_that_it_wraps(kind):
    expected = PartialModel(plain(), train=["2.*"], seed=None)
    for wrapped in (WRAPPED[kind](), deepcopy(WRAPPED[kind]())):
        model = PartialModel(wrapped, train=["2.*"], seed=None)
        assert model.trainable == ("2.weight", "2.bias")
        assert model.fingerprint == expected.fingerprint
        assert updates(model, deterministic=True).equal(updates(expected, deterministic=True))


# Refusals.


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.w = nn.Linear(64, 3), nn.Parameter(torch.ones(3, dtype=torch.complex64))


class Packed(nn.Parameter):
    """As of libraries that keep the scale of quantised numbers beside the tensor."""


def packed():
    network = FROZEN["int8"]()
    network.below.weight = Packed(network.below.weight.data, requires_grad=False)
    return network


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(plain(), {nn.Linear})


def scripted(make):
    def build():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(plain())

    return build


REFUSED = {
    "script": (scripted(torch.jit.script), "is TorchScript.*Pass the nn.Module"),
    "trace": (scripted(lambda m: torch.jit.trace(m, torch.ones(1, 64))), "is TorchScript"),
    "script inside": (lambda: nn.Sequential(scripted(torch.jit.script)()), "is TorchScript"),
    "packed": (quantised, "packed.*no fingerprint sees.*before quantize_dynamic"),
    "own class": (packed, r"'below\.weight' is a Packed, whose values depend on more"),
    "complex": (Complex, r"'w' is torch\.complex64.*view_as_real\(w\).*view_as_complex in forward"),
    "half that trains": (
        lambda: Half().requires_grad_(True),
        r"'below\.weight' trains, and is torch\.bfloat16: must be torch\.float32.*\.float\(\)",
    ),
    "meta": (lambda: plain().to("meta"), "is on meta: must be on cpu"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_in_part_is_one_sentence(kind):
    build, says = REFUSED[kind]
    with pytest.raises(ConfigError, match=says):
        PartialModel(build(), seed=None)
