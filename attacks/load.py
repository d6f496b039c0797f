"""Loading: updates from files and from other libraries, matched to parameters by name."""

import io
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError

_NO_PICKLE = " It may be a pickle, which can run code; save its tensors with safetensors."
_MOST_BYTES = 2**33  # of the arrays of an .npz file, which may unpack to much more than its size
_DIGITS = 10
_LENGTH, _VARINT, _FIXED = 2, 0, {1: 8, 5: 4}  # types of fields in a protocol buffer
_VARINT_BYTES = 10
_ARRAY_KIND, _ARRAY_DATA = 3, 4  # fields of Flower's Array
_WRAPPERS = ("_module.", "module.", "_orig_mod.")  # Opacus, DataParallel, torch.compile


def read_update(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file or an adapter's folder by name, in the order of the names.

    Read are .safetensors, .npz, .pb (Flower's ArrayRecord, or a RecordDict with one, in protocol
    buffers), and a folder that peft wrote (its adapter_model.safetensors). None of these can run
    code; a pickle can, and is refused. The reader of .safetensors returns tensors in random order,
    so sums over an update, and hashes of it, would differ from run to run.

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
    if path.suffix == ".pb":
        return _flower_names(_flower_arrays(path, content))
    try:
        tensors: dict[str, Tensor] = decode(content)
    except SafetensorError as error:
        hint = _NO_PICKLE if content[:2] == b"PK" or content[:1] == b"\x80" else ""
        raise ConfigError(f"{path}: is not a valid .safetensors file: {error}.{hint}") from None
    return unwrapped({name: _computable(value) for name, value in sorted(tensors.items())})


def _computable(value: Tensor) -> Tensor:
    """Return numbers of eight bits in a type that torch computes with."""
    return value.float() if value.is_floating_point() and value.element_size() == 1 else value


def _arrays(path: Path, content: bytes) -> dict[str, Tensor]:
    """Return the arrays of an .npz file, in the order of the names; numbered ones by number."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > _MOST_BYTES:
            raise ConfigError(f"{path}: unpacks to {size} bytes; at most {_MOST_BYTES} are read.")
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name]) for name in sorted(file, key=_by_number)}
    except (OSError, ValueError, KeyError, EOFError, MemoryError, NotImplementedError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: is not a valid .npz file of numbers: {error}.") from None
    except (zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise ConfigError(f"{path}: is not a valid .npz file: {error}.") from None
    return {name: _tensor(path, name, array) for name, array in arrays.items()}


def _tensor(path: Path, name: str, array: npt.NDArray[Any]) -> Tensor:
    if array.dtype.kind not in "fiu":
        raise ConfigError(f"{path}: {name!r} is {array.dtype}; must be real numbers.")
    wide = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    return torch.from_numpy(np.ascontiguousarray(wide))


def _flower_arrays(path: Path, content: bytes, *, inner: bool = False) -> dict[str, Tensor]:
    """Return the arrays of an ArrayRecord: items (1) of key (1) and Array (2).

    An item of a RecordDict holds an ArrayRecord in place of the Array, at the same field.
    """
    try:
        items = [dict(_fields(item)) for number, item in _fields(content) if number == 1]
        fields = {item[1].decode(): dict(_fields(item[2])) for item in items if 2 in item}
        if not inner and len(fields) == 1 and _ARRAY_DATA not in next(iter(fields.values())):
            (record,) = (item[2] for item in items if 2 in item)
            return _flower_arrays(path, record, inner=True)
        arrays = {name: _flower_array(name, array) for name, array in fields.items()}
    except (ValueError, KeyError, IndexError, EOFError, MemoryError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: is not a valid ArrayRecord of Flower: {error}.") from None
    if not arrays:
        raise ConfigError(f"{path}: holds no ArrayRecord, or an empty one.")
    return {name: _tensor(path, name, array) for name, array in arrays.items()}


def _flower_array(name: str, array: Mapping[int, bytes]) -> npt.NDArray[Any]:
    kind = array.get(_ARRAY_KIND, b"").decode()
    if kind != "numpy.ndarray":
        raise ConfigError(f"{name!r}: is stored as {kind!r}; must be numpy.ndarray.")
    loaded: npt.NDArray[Any] = np.load(io.BytesIO(array[_ARRAY_DATA]), allow_pickle=False)
    return loaded


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each field of variable length in a protocol buffer."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == _LENGTH:
            size, at = _varint(message, at)
            if size > len(message) - at:
                raise EOFError("it ends in the middle of a field")
            yield number, message[at : at + size]
            at += size
        elif kind == _VARINT:
            _, at = _varint(message, at)
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise ValueError(f"a field has the unknown type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return a number of seven bits per byte, least significant first, and where it ends."""
    value = 0
    for place in range(_VARINT_BYTES):
        byte = message[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("a number is too long")


def _by_number(name: str) -> tuple[str, int]:
    stem, _, number = name.rpartition("_")
    return (stem, int(number)) if number.isdecimal() and len(number) < _DIGITS else (name, 0)


def for_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` by the names of the model's parameters and buffers.

    A file of peft leaves the adapter's name out ("lora_A.weight" for "lora_A.default.weight"). A
    list of arrays without names ("arr_0", "arr_1", as ``numpy.savez`` writes it) is that of the
    whole ``state_dict``, in its order.

    Raises:
        ConfigError: a list that does not fit the model.
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
    """Return after - before, by name, in float64.

    Raises:
        ConfigError: names or shapes that differ.
    """
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


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return what ``loss.backward()`` left in ``.grad``, by the names of the unwrapped model.

    Under Opacus, ``.grad`` is what the optimizer's ``step`` or ``pre_step`` wrote: clipped and
    noised. Parameters without a gradient are left out.

    Raises:
        ConfigError: no parameter has a gradient.
    """
    gradients = {
        n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None
    }
    if not gradients:
        raise ConfigError("model: no parameter has a gradient; call backward() first.")
    return unwrapped(gradients)


def from_array_record(record: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the arrays of a Flower ``ArrayRecord`` by name; ``for_model`` matches a list."""
    return _flower_names({k: torch.as_tensor(v.numpy().copy()) for k, v in record.items()})


def _flower_names(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``arrays`` by name; Flower numbers those of a list "0", "1", and so on."""
    numbers = [str(i) for i in range(len(arrays))]
    if set(arrays) == set(numbers):
        return {f"arr_{number}": arrays[number] for number in numbers}
    return unwrapped(dict(sorted(arrays.items())))


def from_pfl(statistics: Any) -> dict[str, Tensor]:  # noqa: ANN401 - pfl is not imported
    """Return the change of weights in the ``MappedVectorStatistics`` of pfl-research, by name.

    They are after - before, multiplied by the weight of the user, which is divided out.

    Raises:
        ConfigError: a weight that is not above 0.
    """
    weight = checks.positive("weight", float(statistics.weight))
    sums = {name: torch.as_tensor(value).double() for name, value in statistics.items()}
    return unwrapped({name: value / weight for name, value in sums.items()})


def unwrapped(update: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``update`` without the prefix that Opacus, DataParallel or compile adds to each name.

    >>> list(unwrapped({"_module.fc.bias": torch.zeros(1)}))
    ['fc.bias']
    """
    for prefix in _WRAPPERS:
        if update and all(name.startswith(prefix) for name in update):
            return {name.removeprefix(prefix): value for name, value in update.items()}
    return dict(update)
