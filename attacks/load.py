"""Loading: updates and weights from files, matched to parameters by name, place and layout."""

import io
import zipfile
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from accounting.checks import ConfigError
from attacks.observation import near
from attacks.torch_file import MOST_BYTES, OF_ZIP, the_tensors, unpickled

Note = Callable[[str], None]
"""Is told what was done to a file beside reading it."""

_OF_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_OF_KERAS = (".h5", ".hdf5", ".keras", ".pb", ".tflite")
_ZIP = b"PK\x03\x04"
_DIGITS = 10
_SHOWN = 3
_WRAPPERS = {"_module", "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of a name that Opacus, DataParallel, torch.compile, FSDP and checkpointing add."""


def read_update(path: Path, note: Note | None = None) -> dict[str, Tensor]:
    """Return the tensors of a file or an adapter's folder by name.

    Read are .safetensors (in the order of the names), .npz, what ``torch.save`` wrote (a dict of
    tensors, a list of them, or a checkpoint with one of these in it), and a folder that peft wrote
    (its adapter_model.safetensors). None of these can run code here. The reader of .safetensors
    returns tensors in random order, so sums over an update, and hashes of it, would differ from run
    to run.

    Raises:
        ConfigError: the file does not exist, has another format, or holds more than tensors.
    """
    content = _content(path / "adapter_model.safetensors" if path.is_dir() else path)
    if path.suffix == ".npz":
        return _arrays(path, content)
    if path.suffix in _OF_KERAS:
        raise ConfigError(
            f"{path}: {path.suffix} is not read; numpy.savez(FILE, *model.get_weights()) writes an "
            ".npz file that is, and so does numpy.savez(FILE, *gradients)."
        )
    if path.suffix in _OF_TORCH or (path.suffix != ".safetensors" and content[:4] == _ZIP):
        return _saved_by_torch(path, content, note)
    try:
        tensors: dict[str, Tensor] = decode(content)
    except SafetensorError as error:
        raise ConfigError(f"{path}: is not a valid .safetensors file: {error}.") from None
    for name, value in tensors.items():
        if value.is_floating_point() and value.element_size() == 1:  # torch computes with no such
            tensors[name] = value.float()
    return dict(sorted(tensors.items()))


def _content(path: Path) -> bytes:
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: is not a file; name one, or a folder that peft wrote.")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None


def _saved_by_torch(path: Path, content: bytes, note: Note | None) -> dict[str, Tensor]:
    if content[:4] != _ZIP:
        raise ConfigError(
            f"{path}: is not a file of torch.save (1.6 or later). Another pickle is not opened, "
            "because it can run code; save tensors by torch.save, or as .safetensors."
        )
    try:
        whole = unpickled(content)
        name, found = the_tensors(whole)
    except ValueError as error:
        raise ConfigError(f"{path}: is not a file of tensors by torch.save: {error}.") from None
    if note is not None and name is not None:
        note(f"the tensors are those of {name!r} in a checkpoint")
    return found


def _arrays(path: Path, content: bytes) -> dict[str, Tensor]:
    """Return the arrays of an .npz file, in the order of the names; numbered ones by number."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > MOST_BYTES:
            raise ConfigError(f"{path}: unpacks to {size} bytes; at most {MOST_BYTES} are read.")
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name]) for name in sorted(file, key=_by_number)}
    except ConfigError:
        raise
    except (ValueError, KeyError, EOFError, *OF_ZIP) as error:
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


def for_model(
    model: nn.Module, tensors: Mapping[str, Tensor], note: Note | None = None
) -> dict[str, Tensor]:
    """Return ``tensors`` by the names, and in the layout, of the model's parameters and buffers.

    - Names may have a prefix that the model's lack ("module.fc.bias", "model.fc.bias"), or lack
      one, where that fits all of them in one way; a file of peft leaves the adapter's name out
      ("lora_A.weight" for "lora_A.default.weight").
    - A list of arrays without names ("arr_0", "arr_1", as ``numpy.savez`` writes it) has the order
      of the ``state_dict``, with or without counts of batches; or of the parameters, all or those
      that require gradients.
    - Kernels in the layout of Keras (of a convolution: height, width, in, out; of a dense layer:
      in, out) are turned where the shapes of all kernels tell that they are.

    ``note`` is told of each of these.

    Raises:
        ConfigError: names or shapes that are not the model's, all of them in one sentence.
    """
    told = note or (lambda _: None)
    numbered = bool(tensors) and all(name == f"arr_{i}" for i, name in enumerate(tensors))
    matched = _by_place(model, tensors, told) if numbered else _by_name(model, tensors, told)
    laid = _as_in_torch(model, matched, told, doubtful=numbered)
    state = model.state_dict()
    first = {value.data_ptr(): name for name, value in reversed(state.items()) if value.numel()}
    for name in [name for name in laid if name in state]:
        own = first.get(state[name].data_ptr(), name)
        if own not in laid:
            told(f"{name!r} is tied to {own!r}, and was read as that")
            laid[own] = laid.pop(name)
    faults = [f"{name!r} is not a name of the model" for name in laid if name not in state]
    faults += [
        f"{name!r} has shape {tuple(value.shape)}, not {tuple(state[name].shape)}"
        for name, value in laid.items()
        if name in state and value.shape != state[name].shape
    ]
    if faults:
        more = f", and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        unknown = [name for name in laid if name not in state]
        hint = f" {near(unknown[0], state)}" if unknown else ""
        raise ConfigError(
            f"{len(faults)} of {len(laid)} tensors do not fit the model: "
            f"{', '.join(faults[:_SHOWN])}{more}.{hint}"
        )
    return laid


def _by_place(model: nn.Module, tensors: Mapping[str, Tensor], note: Note) -> dict[str, Tensor]:
    state, parameters = list(model.state_dict()), dict(model.named_parameters())
    orders = {
        "the state_dict": state,
        "the state_dict without counts of batches": [
            name for name in state if not name.endswith("num_batches_tracked")
        ],
        "the parameters": list(parameters),
        "the parameters that require gradients": [
            name for name, value in parameters.items() if value.requires_grad
        ],
    }
    for order, names in orders.items():
        if len(names) == len(tensors):
            note(f"arrays without names were matched in the order of {order}")
            return dict(zip(names, tensors.values(), strict=True))
    counts = ", ".join(f"{len(names)} in {order}" for order, names in orders.items())
    raise ConfigError(
        f"arr_0 ...: {len(tensors)} arrays without names; the model has {counts}. A part of an "
        "update needs names."
    )


def _by_name(model: nn.Module, tensors: Mapping[str, Tensor], note: Note) -> dict[str, Tensor]:
    state = model.state_dict()
    if all(name in state for name in tensors):
        return dict(tensors)
    known = {_bare(name): name for name in state}
    bare = [_bare(name) for name in tensors]
    if len(known) < len(state) or len(set(bare)) < len(bare):
        return dict(tensors)
    fitting: dict[tuple[str, str], list[str]] = {}
    for old, new in {("", ""): None, **dict.fromkeys(_prefixes(bare[0], known))}:
        names = [new + name.removeprefix(old) for name in bare if name.startswith(old)]
        if len(names) == len(bare) and all(name in known for name in names):
            fitting[old, new] = names
        if fitting and (old, new) == ("", ""):
            break
    if len(fitting) > 1:
        raise ConfigError(
            f"names such as {bare[0]!r} fit the model in {len(fitting)} ways, after "
            f"{', '.join(repr(new) for _, new in fitting)}; save tensors by their full names."
        )
    if not fitting:
        return dict(tensors)
    (((old, new), names),) = fitting.items()
    full = [known[name] for name in names]
    pairs = [(typed, name) for typed, name in zip(tensors, full, strict=True) if typed != name]
    typed, name = pairs[0]
    note(f"{len(pairs)} names were changed to the model's, such as {typed!r} to {name!r}")
    return dict(zip(full, tensors.values(), strict=True))


def _bare(name: str) -> str:
    """Return a name without the parts that wrappers and peft put in."""
    parts = name.split(".")
    adapter = any(part.startswith("lora_") for part in parts)
    return ".".join(p for p in parts if p not in _WRAPPERS and not (adapter and p == "default"))


def _prefixes(name: str, known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what may stand in the place of what at the beginning of a name."""
    for old in accumulate(f"{part}." for part in name.split(".")[:-1]):
        yield old, ""
    for full in known:
        if full.endswith(f".{name}"):
            yield "", full.removesuffix(name)


def _as_in_torch(
    model: nn.Module, tensors: Mapping[str, Tensor], note: Note, *, doubtful: bool
) -> dict[str, Tensor]:
    """Return tensors with the kernels turned that are in Keras's layout: (..., in, out)."""
    kernels = {
        f"{name}.weight": layer.weight.shape
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | _ConvNd)
    }
    turned = {
        name: value.permute(-1, -2, *range(value.ndim - 2)).contiguous()
        for name, value in tensors.items()
        if name in kernels and value.ndim == len(kernels[name])
    }
    fit = [name for name in turned if tensors[name].shape == kernels[name]]
    fit_turned = [name for name, value in turned.items() if value.shape == kernels[name]]
    if len(fit) < len(turned) == len(fit_turned):
        note("kernels are in the layout of Keras (..., in, out), and were turned into torch's")
        return {**tensors, **turned}
    if doubtful and turned and len(fit) == len(fit_turned) == len(turned):
        note("all kernels fit in the layout of torch and in that of Keras; torch's was taken")
    return dict(tensors)


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
