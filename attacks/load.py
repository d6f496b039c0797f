"""Loading: updates from files, matched to parameters by name."""

import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode
from torch import Tensor, nn

from accounting.checks import ConfigError

_NO_PICKLE = " It may be a pickle, which can run code; save its tensors with safetensors."
_MOST_BYTES = 2**33  # of the arrays of an .npz file, which may unpack to much more than its size
_DIGITS = 10
_OF_ZIP = (zipfile.BadZipFile, zlib.error)
_WRAPPERS = ("_module.", "module.", "_orig_mod.")  # Opacus, DataParallel, torch.compile


def read_update(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file or an adapter's folder by name, in the order of the names.

    Read are .safetensors, .npz, and a folder that peft wrote (its adapter_model.safetensors). None
    of these can run code; a pickle can, and is refused. The reader of .safetensors returns tensors
    in random order, so sums over an update, and hashes of it, would differ from run to run.

    Raises:
        ConfigError: the file does not exist, or has another format.
    """
    if path.is_dir():
        path = path / "adapter_model.safetensors"
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: is not a file; name one, or a folder that peft wrote.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    if path.suffix == ".npz":
        return unwrapped(_arrays(path, content))
    try:
        tensors: dict[str, Tensor] = decode(content)
    except SafetensorError as error:
        hint = _NO_PICKLE if content[:2] == b"PK" or content[:1] == b"\x80" else ""
        raise ConfigError(f"{path}: is not a valid .safetensors file: {error}.{hint}") from None
    for name, value in tensors.items():
        if value.is_floating_point() and value.element_size() == 1:  # torch computes with no such
            tensors[name] = value.float()
    return unwrapped(dict(sorted(tensors.items())))


def _arrays(path: Path, content: bytes) -> dict[str, Tensor]:
    """Return the arrays of an .npz file, in the order of the names; numbered ones by number."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > _MOST_BYTES:
            raise ConfigError(f"{path}: unpacks to {size} bytes; at most {_MOST_BYTES} are read.")
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name]) for name in sorted(file, key=_by_number)}
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, EOFError, MemoryError, RuntimeError, *_OF_ZIP) as error:
        raise ConfigError(f"{path}: is not a valid .npz file of numbers: {error}.") from None
    return {name: _tensor(path, name, array) for name, array in arrays.items()}


def _tensor(path: Path, name: str, array: npt.NDArray[Any]) -> Tensor:
    if array.dtype.kind not in "fiu":
        raise ConfigError(f"{path}: {name!r} is {array.dtype}; must be real numbers.")
    wide = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    return torch.from_numpy(np.ascontiguousarray(wide))


def _by_number(name: str) -> tuple[str, int]:
    stem, _, number = name.rpartition("_")
    return (stem, int(number)) if number.isdecimal() and len(number) < _DIGITS else (name, 0)


def for_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` by the names of the model's parameters and buffers.

    A file of peft leaves the adapter's name out ("lora_A.weight" for "lora_A.default.weight"). A
    list of arrays without names ("arr_0", "arr_1", as ``numpy.savez`` writes it) is that of the
    whole ``state_dict``, in its order.
    """
    state = model.state_dict()
    if tensors and all(name == f"arr_{i}" for i, name in enumerate(tensors)):
        if len(tensors) != len(state):
            raise ConfigError(
                f"arr_0 ...: {len(tensors)} arrays without names for the {len(state)} tensors of "
                "the model's state_dict; a part of an update needs names."
            )
        return dict(zip(state, tensors.values(), strict=True))
    matched = {}
    for name, value in tensors.items():
        stem, _, last = name.rpartition(".")
        full = f"{stem}.default.{last}"
        matched[full if name not in state and full in state else name] = value
    return matched


def change_of_weights(
    after: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return after - before, by name, in float64."""
    odd = sorted(set(after) ^ set(before))
    if odd:
        where = "after" if odd[0] in after else "before"
        raise ConfigError(f"before: {odd[0]!r} is only in the weights {where}.")
    for name, value in after.items():
        if value.shape != before[name].shape:
            raise ConfigError(
                f"before[{name!r}]: shape {tuple(before[name].shape)}; must be "
                f"{tuple(value.shape)}."
            )
    return {name: value.double() - before[name].double() for name, value in after.items()}


def unwrapped(update: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``update`` without the prefix that Opacus, DataParallel or compile adds to each name.

    >>> list(unwrapped({"_module.fc.bias": torch.zeros(1)}))
    ['fc.bias']
    """
    for prefix in _WRAPPERS:
        if update and all(name.startswith(prefix) for name in update):
            return {name.removeprefix(prefix): value for name, value in update.items()}
    return dict(update)
