"""Updates from files: by name, and never cut to fit."""

import io
import sys
import zipfile

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from accounting import ConfigError
from attacks import Observation, change_of_weights, dlg, for_model, psnr, read_update
from attacks.update import double_state


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_file_of_an_opacus_model_is_attacked(lenet, digits, tmp_path):
    x, y = digits[0][:1], digits[1][:1]
    wrapped = GradSampleModule(lenet)
    cross_entropy(wrapped(x.float()), y).backward()
    save_file({n: p.grad for n, p in wrapped.named_parameters()}, tmp_path / "u.safetensors")
    update = read_update(tmp_path / "u.safetensors")
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


def test_npz_with_names_and_without(lenet, digits, tmp_path):
    state = {name: value.numpy() for name, value in lenet.state_dict().items()}
    np.savez_compressed(tmp_path / "named.npz", **state)
    np.savez(tmp_path / "bare.npz", *state.values(), *[np.zeros(1)] * 4)
    named = read_update(tmp_path / "named.npz")
    assert list(named) == sorted(state)
    assert all(np.array_equal(named[name].numpy(), state[name]) for name in state)
    bare = read_update(tmp_path / "bare.npz")
    assert list(bare) == [f"arr_{i}" for i in range(12)]  # arr_2 before arr_10
    with pytest.raises(ConfigError, match="12 arrays without names for the 8"):
        for_model(lenet, bare)
    del bare["arr_8"], bare["arr_9"], bare["arr_10"], bare["arr_11"]
    assert list(for_model(lenet, bare)) == list(state)


def test_an_npz_that_unpacks_to_too_much_is_refused(monkeypatch, tmp_path):
    np.savez_compressed(tmp_path / "u.npz", a=np.zeros(10**5))
    assert (tmp_path / "u.npz").stat().st_size < 2000
    monkeypatch.setattr(sys.modules["attacks.load"], "_MOST_BYTES", 10**5)
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
