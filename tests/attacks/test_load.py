"""Updates from files: by name, and never cut to fit."""

import argparse
import contextlib
import io
import pickle
import sys
import zipfile

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

from accounting import ConfigError
from attacks import Observation, change_of_weights, dlg, for_model, psnr, read_update
from attacks.torch_file import the_tensors, unpickled
from attacks.update import double_state


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_file_of_an_opacus_model_is_attacked(lenet, digits, tmp_path):
    x, y = digits[0][:1], digits[1][:1]
    wrapped = GradSampleModule(lenet)
    cross_entropy(wrapped(x.float()), y).backward()
    save_file({n: p.grad for n, p in wrapped.named_parameters()}, tmp_path / "u.safetensors")
    update = for_model(lenet, read_update(tmp_path / "u.safetensors"))
    assert set(update) == set(double_state(lenet))
    wrapped.remove_hooks()
    seen = Observation(update, double_state(lenet), (1, 1, 8, 8), y, training=lenet.training)
    found = dlg(lenet, seen, restarts=1, newton_steps=0)
    assert float(psnr(found.x, x)) > 30  # float32


def test_a_file_is_read_in_one_order(lenet, tmp_path):
    """The reader of the format returns names in random order, which changes sums and hashes."""
    save_file(dict(lenet.state_dict()), tmp_path / "update.safetensors")
    for _ in range(5):
        names = list(read_update(tmp_path / "update.safetensors"))
        assert names == sorted(lenet.state_dict())


def test_npz_with_names_and_without(lenet, tmp_path):
    state = {name: value.numpy() for name, value in lenet.state_dict().items()}
    np.savez_compressed(tmp_path / "named.npz", **state)
    np.savez(tmp_path / "bare.npz", *state.values(), *[np.zeros(1)] * 4)
    named = read_update(tmp_path / "named.npz")
    assert list(named) == sorted(state)
    assert all(np.array_equal(named[name].numpy(), state[name]) for name in state)
    bare = read_update(tmp_path / "bare.npz")
    assert list(bare) == [f"arr_{i}" for i in range(12)]  # arr_2 before arr_10
    with pytest.raises(ConfigError, match="12 arrays without names; the model has 8 in the state"):
        for_model(lenet, bare)
    del bare["arr_8"], bare["arr_9"], bare["arr_10"], bare["arr_11"]
    assert list(for_model(lenet, bare)) == list(state)


def network():
    """A convolution, its statistics, and a dense layer with as many inputs as outputs."""
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 4)
    return nn.Sequential(*layers)


def drawn(model, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return {n: torch.randn(v.shape, generator=draw).to(dtype) for n, v in model.named_parameters()}


def loaded(model, path):
    """Return what is read, and what is said of it."""
    told = []
    found = for_model(model, read_update(path, told.append), told.append)
    return found, " ".join(told)


def as_views(sent):
    vector = torch.cat([value.flatten() for value in sent.values()])
    parts = vector.split([value.numel() for value in sent.values()])
    return {name: part.view_as(sent[name]) for name, part in zip(sent, parts, strict=True)}


SAVED = {
    "state": (lambda sent: sent, ""),
    "bfloat16": (lambda sent: {name: value.bfloat16() for name, value in sent.items()}, ""),
    "list": (lambda sent: list(sent.values()), "in the order of the parameters"),
    "parameters": (lambda sent: {k: nn.Parameter(v) for k, v in sent.items()}, ""),
    "views of one vector": (as_views, ""),
    "transposed": (
        lambda sent: sent | {"3.weight": sent["3.weight"].T.contiguous().T},
        "",
    ),
    "checkpoint": (
        lambda sent: {
            **{"epoch": 3, "state_dict": sent, "args": argparse.Namespace(rate=0.1), "seen": {1}},
            "optimizer": {"state": {0: {"step": torch.ones(1)}}, "param_groups": [{"lr": 1e-3}]},
        },
        "those of 'state_dict' in a checkpoint",
    ),
    "wrapped": (
        lambda sent: {f"module._orig_mod.{name}": value for name, value in sent.items()},
        "such as 'module._orig_mod.0.weight' to '0.weight'",
    ),
    "inside another": (
        lambda sent: {f"model.net.{name}": value for name, value in sent.items()},
        "such as 'model.net.0.weight' to '0.weight'",
    ),
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("case", SAVED)
def test_a_file_of_torch_save_is_read_as_torch_reads_it(case, protocol, tmp_path):
    model, (change, said) = network(), SAVED[case]
    sent = drawn(model)
    torch.save(change(sent), tmp_path / "u.pt", pickle_protocol=protocol)
    found, told = loaded(model, tmp_path / "u.pt")
    assert said in told
    assert bool(said) == bool(told)
    rounded = {n: v.bfloat16() if case == "bfloat16" else v for n, v in sent.items()}
    assert all(torch.equal(found[name], rounded[name]) for name in rounded)
    assert found.keys() == sent.keys()


def test_names_below_the_models_own_are_found_where_one_way_fits_them(tmp_path):
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.ModuleList([nn.Linear(2, 3)])})
    found = for_model(model, {"0.weight": torch.ones(3, 2)})
    assert list(found) == ["second.0.weight"]
    with pytest.raises(ConfigError, match="'weight' fit the model in 2 ways"):
        for_model(model, {"weight": torch.ones(2, 2)})
    with pytest.raises(ConfigError, match=r"2 of 3 tensors do not fit.*'a'.*shape") as refused:
        for_model(
            model,
            {"a": torch.ones(1), "first.bias": torch.ones(3)} | {"first.weight": torch.ones(2, 2)},
        )
    assert "(3,), not (2,)" in str(refused.value)


def test_a_tied_weight_may_have_either_name(tmp_path):
    model = nn.ModuleDict({"words": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["words"].weight
    told = []
    found = for_model(model, {"head.weight": torch.ones(5, 3)}, told.append)
    assert list(found) == ["words.weight"]
    assert "tied" in told[0]


@pytest.mark.parametrize("layers", ["all", "dense"])
def test_the_layout_of_keras_is_told_by_shapes(layers, tmp_path):
    """Kernels are (height, width, in, out) and (in, out); statistics have no count of batches."""
    model = network() if layers == "all" else nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4))
    state = {n: v for n, v in model.state_dict().items() if "num_batches" not in n}
    draw = torch.Generator().manual_seed(0)
    state = {name: torch.randn(v.shape, generator=draw) for name, v in state.items()}
    keras = [
        v.permute(*range(2, v.ndim), 1, 0) if v.ndim > 1 and "1." not in n else v
        for n, v in state.items()
    ]
    np.savez(tmp_path / "u.npz", *[value.numpy() for value in keras])
    found, told = loaded(model, tmp_path / "u.npz")
    assert ("layout of Keras (..., in, out), and were turned" in told) == (layers == "all")
    assert ("in that of Keras; torch's was taken" in told) == (layers == "dense")
    if layers == "all":
        assert all(torch.equal(found[name].float(), state[name]) for name in state)
    (tmp_path / "u.h5").write_bytes(b"")
    with pytest.raises(ConfigError, match="get_weights"):
        read_update(tmp_path / "u.h5")


def test_an_npz_that_unpacks_to_too_much_is_refused(monkeypatch, tmp_path):
    np.savez_compressed(tmp_path / "u.npz", a=np.zeros(10**5))
    assert (tmp_path / "u.npz").stat().st_size < 2000
    monkeypatch.setattr(sys.modules["attacks.load"], "MOST_BYTES", 10**5)
    with pytest.raises(ConfigError, match="unpacks to"):
        read_update(tmp_path / "u.npz")


def test_an_adapter_folder_is_matched_by_name(tmp_path):
    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            part = torch.nn.ModuleDict({"default": torch.nn.Linear(3, 2, bias=False)})
            self.base_model = torch.nn.ModuleDict({"lora_A": part})

    model = Adapted()
    sent = {"base_model.lora_A.weight": torch.ones(2, 3)}
    save_file(sent, tmp_path / "adapter_model.safetensors")
    found = for_model(model, read_update(tmp_path))
    assert list(found) == ["base_model.lora_A.default.weight"]
    with pytest.raises(ConfigError, match="cannot be read"):
        read_update(tmp_path / "none")


def test_a_change_of_weights_is_by_name():
    before, after = {"a": torch.ones(2), "b": torch.zeros(1)}, {"b": torch.ones(1)}
    assert change_of_weights(after, {"b": torch.zeros(1)})["b"].tolist() == [1.0]
    with pytest.raises(ConfigError, match="'a' is only in the weights before"):
        change_of_weights(after, before)
    with pytest.raises(ConfigError, match="shape"):
        change_of_weights(after, {"b": torch.zeros(2)})


@pytest.mark.filterwarnings("ignore:invalid escape")
def test_no_changed_byte_of_a_file_does_more_than_be_refused():
    with zipfile.ZipFile(io.BytesIO(saved({"epoch": 1, "sent": {"a": torch.ones(2, 3)}}))) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    draw, read = np.random.default_rng(0), 0
    for _ in range(300):
        program = bytearray(parts["archive/data.pkl"])
        for _ in range(draw.choice([1, 2, 8])):
            place = draw.integers(len(program))
            program[place : place + draw.integers(2)] = draw.bytes(1)
        changed = io.BytesIO()
        with zipfile.ZipFile(changed, "w") as file:
            for name, content in (parts | {"archive/data.pkl": bytes(program)}).items():
                file.writestr(name, content)
        with contextlib.suppress(ValueError):
            the_tensors(unpickled(changed.getvalue()))
            read += 1
    assert 0 < read < 100


def npz(*arrays, **options):
    file = io.BytesIO()
    np.savez_compressed(file, *arrays, **options)
    return file.getvalue()


def zipped(content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.npy", content)
    return file.getvalue()


def huge():
    header = io.BytesIO()
    shape = {"descr": "<f8", "fortran_order": False, "shape": (2**62,)}
    np.lib.format.write_array_header_1_0(header, shape)
    return zipped(header.getvalue())


def saved(value=None, old=b"", new=b""):
    """Return a file of torch.save, with its pickle changed."""
    file, changed = io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.arange(4.0)} if value is None else value, file)
    with zipfile.ZipFile(file) as whole, zipfile.ZipFile(changed, "w") as copy:
        for name in whole.namelist():
            content = whole.read(name)
            assert not name.endswith("data.pkl") or old in content
            copy.writestr(name, content.replace(old, new) if old else content)
    return changed.getvalue()


def programmed(program):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", program)
    return file.getvalue()


class Runs:
    def __reduce__(self):
        return (sys.exit, (70,))


NESTED = b"\x80\x02})q\x00" + b"h\x00\x86q\x00" * 60  # tuples of tuples: the hash takes 2^60 steps
HOSTILE_TORCH = {
    "cut": saved()[:-30],
    "code": saved({"a": Runs()}),
    "code beside tensors": saved({"a": torch.ones(1), "b": Runs()}),
    "a longer shape": saved(old=b"K\x04\x85", new=b"J\x00\x00\x00\x10\x85"),
    "a stride that repeats": saved(
        old=b"K\x04\x85q\x08K\x01", new=b"\x8a\x05\0\0\0\0\x01\x85q\x08K\0"
    ),
    "another type": saved(old=b"FloatStorage", new=b"LongStorages"),
    "a tuple as a key": programmed(NESTED + b"K\x01s."),
    "a tuple as a shape": programmed(
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00" + NESTED[3:] + b"h\x00h\x00tR."
    ),
    "itself": programmed(b"\x80\x02]q\x00h\x00a."),
    "no end": programmed(b"\x80\x02}"),
    "nothing": programmed(b""),
    "a huge place": programmed(b"\x80\x02}r\xff\xff\xff\xff."),
    "a network": saved(nn.Linear(2, 2)),
    "two checkpoints": saved({"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(1)}}),
    "complex": saved({"a": torch.ones(2, dtype=torch.complex64)}),
    "sparse": saved({"a": torch.eye(2).to_sparse()}),
    "pickle": pickle.dumps({"a": 1}),
    "text": b"no pickle",
}


@pytest.mark.parametrize("kind", HOSTILE_TORCH)
def test_a_hostile_file_of_torch_save_is_refused(kind, tmp_path):
    (tmp_path / "u.pt").write_bytes(HOSTILE_TORCH[kind])
    with pytest.raises(ConfigError, match=r"u\.pt: is "):
        read_update(tmp_path / "u.pt")


HOSTILE = {
    "cut": npz(np.zeros(3))[:-30],
    "pickle": npz(np.array([{}], dtype=object), allow_pickle=True),
    "text": npz(np.array(["text"])),
    "two names": zipped(b"").replace(b"a.npy", b"b.npy"),
    "huge": huge(),
    "empty": b"",
}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        *(pytest.param("u.npz", content, "npz", id=kind) for kind, content in HOSTILE.items()),
        ("bad", b"\x80\x04pickle", r"not a valid \.safetensors file"),
        ("u.pt", b"\x80\x04pickle", "can run code"),
    ],
)
def test_a_file_that_is_damaged_or_hostile_is_refused(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_update(tmp_path / name)
