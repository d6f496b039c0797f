"""Updates from elsewhere: files, other libraries, other languages; by name, never by luck."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode
from torch import Tensor, nn

from accounting.checks import ConfigError

_WRAPPERS = ("_module.", "module.", "_orig_mod.")  # Opacus, DataParallel, torch.compile


def read_update(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file by name, in the order of the names.

    Such a file cannot run code. Its own order is that of a hash table, another one at each reading:
    sums over an update, and hashes of it, would differ from run to run.

    Raises:
        ConfigError: no such file, or not of that format.
    """
    try:
        tensors: dict[str, Tensor] = decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except SafetensorError as error:
        raise ConfigError(f"{path}: is no .safetensors file: {error}.") from None
    return unwrapped(dict(sorted(tensors.items())))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return what ``loss.backward()`` left in ``.grad``, by the plain model's names.

    Of a model under Opacus, ``.grad`` is what its optimiser's ``step`` or ``pre_step`` put there:
    clipped and noised. Parameters without a gradient are left out.

    Raises:
        ConfigError: no parameter has a gradient.
    """
    found = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    if not found:
        raise ConfigError("model: no parameter has a gradient; call backward() first.")
    return unwrapped(found)


def from_arrays(
    model: nn.Module,
    after: Sequence[npt.NDArray[np.floating]],
    before: Sequence[npt.NDArray[np.floating]] | None = None,
) -> dict[str, Tensor]:
    """Return a Flower client's weights, or their change, by parameter name.

    Flower sends ``state_dict().values()`` as a bare list, so the order is all there is: the number
    and every shape must fit the whole model. A shorter list is an error, never cut to fit.

    Args:
        model: whose ``state_dict`` has the same order as the client's.
        after: what the client sent.
        before: what it had received; then the change is returned (``kind`` "delta").

    Raises:
        ConfigError: another number of arrays, or a shape that does not fit.
    """
    state = model.state_dict()
    parameters = {name for name, _ in model.named_parameters()}
    for label, arrays in (("after", after), ("before", before)):
        if arrays is None:
            continue
        if len(arrays) != len(state):
            raise ConfigError(
                f"{label}: {len(arrays)} arrays for the {len(state)} tensors of the model's "
                "state_dict; a part of an update needs names, as in a .safetensors file."
            )
        for (name, value), array in zip(state.items(), arrays, strict=True):
            if tuple(np.shape(array)) != tuple(value.shape):
                raise ConfigError(
                    f"{label}[{name!r}]: shape {np.shape(array)}; must be {tuple(value.shape)}."
                )
    start = [0.0] * len(after) if before is None else before
    return {
        name: torch.as_tensor(np.asarray(new, dtype=np.float64) - np.asarray(old))
        for name, new, old in zip(state, after, start, strict=True)
        if name in parameters
    }


def unwrapped(update: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``update`` without the prefix that Opacus, DataParallel or compile put on each name.

    >>> list(unwrapped({"_module.fc.bias": torch.zeros(1)}))
    ['fc.bias']
    """
    for prefix in _WRAPPERS:
        if update and all(name.startswith(prefix) for name in update):
            return {name.removeprefix(prefix): value for name, value in update.items()}
    return dict(update)
