"""Loading: updates from files and from other libraries, matched to parameters by name."""

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

    Such a file cannot run code. The reader returns tensors in random order, so sums over an update,
    and hashes of it, would differ from run to run.

    Raises:
        ConfigError: the file does not exist, or has another format.
    """
    try:
        tensors: dict[str, Tensor] = decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None
    except SafetensorError as error:
        raise ConfigError(f"{path}: is not a valid .safetensors file: {error}.") from None
    return unwrapped(dict(sorted(tensors.items())))


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return what ``loss.backward()`` left in ``.grad``, by the names of the unwrapped model.

    Under Opacus, ``.grad`` is what the optimizer's ``step`` or ``pre_step`` wrote: clipped and
    noised. Parameters without a gradient are left out.

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

    Flower sends ``state_dict().values()`` as a list without names, so only the order identifies an
    array: their count and every shape must fit the whole model. A shorter list is an error.

    Args:
        model: whose ``state_dict`` has the same order as the client's.
        after: what the client sent.
        before: what the client had received; then the change of the weights is returned.

    Raises:
        ConfigError: too few or too many arrays, or a shape that does not fit.
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
    """Return ``update`` without the prefix that Opacus, DataParallel or compile adds to each name.

    >>> list(unwrapped({"_module.fc.bias": torch.zeros(1)}))
    ['fc.bias']
    """
    for prefix in _WRAPPERS:
        if update and all(name.startswith(prefix) for name in update):
            return {name.removeprefix(prefix): value for name, value in update.items()}
    return dict(update)
