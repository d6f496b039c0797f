"""Wire: what crosses the network, as safetensors bytes; never pickle."""

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from accounting.checks import ConfigError

_NAME = "delta"


def encode_update(delta: Tensor) -> bytes:
    """Return a client's message: its change of the trainable part, shape (d,), as float32."""
    return save({_NAME: delta.detach().to(torch.float32).contiguous()})


def decode_update(message: bytes, *, dim: int) -> Tensor:
    """Return the vector of shape (dim,) that a client sent.

    Raises:
        ConfigError: the bytes are not such a message. Nothing in them is ever executed.
    """
    try:
        tensors = load(message)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"message of {len(message)} bytes is not an update: {error}") from None
    delta = tensors.get(_NAME)
    if len(tensors) != 1 or delta is None:
        raise ConfigError(f"message holds {sorted(tensors)}; an update holds one, {_NAME!r}.")
    if delta.shape != (dim,) or delta.dtype != torch.float32:
        raise ConfigError(
            f"message holds {delta.dtype} of shape {tuple(delta.shape)}; "
            f"this model's updates are float32 of shape ({dim},)."
        )
    return delta
