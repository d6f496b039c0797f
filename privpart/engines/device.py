"""Device: where clients are computed, on the CPU or on one accelerator."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accounting.checks import ConfigError


def find_device(device: str | torch.device) -> torch.device:
    """Return torch's device, which must exist on this machine.

    Raises:
        ConfigError: there is no such device here, or this torch would round convolutions unasked.
    """
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(
            f"device={device!r}: torch knows no such device; use 'cpu', 'cuda' or 'cuda:1'."
        ) from None
    if chosen.type == "cpu":
        return torch.device("cpu")
    module = getattr(torch, chosen.type, None)
    count = module.device_count() if module is not None and module.is_available() else 0
    if (chosen.index or 0) >= count:
        available = ", ".join(["cpu", *(f"{chosen.type}:{k}" for k in range(count))])
        raise ConfigError(
            f"device='{chosen}': torch {torch.__version__} sees {available} here; use one of "
            "these, or install a torch and a driver for the accelerator."
        )
    # ``float32_products`` needs this setting, which torch 2.9 introduced
    if not hasattr(torch.backends.cudnn, "conv"):
        raise ConfigError(f"device='{chosen}': needs torch 2.9, here is {torch.__version__}.")
    return chosen


def namespace(device: torch.device) -> Any:  # noqa: ANN401
    """Return torch's module for a kind of device, such as ``torch.cuda``."""
    return getattr(torch, device.type)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of an accelerator."""
    return int(namespace(device).mem_get_info(device)[0])


@contextmanager
def float32_products(*, tf32: bool = False) -> Iterator[None]:
    """Within this context, compute float32 convolutions in float32 on CUDA devices.

    By default torch lets cuDNN round the inputs of convolutions to TF32's 10 bits; two methods of
    the same training would then differ by more than float32's rounding. Matrix products are float32
    by default (torch's "CUDA semantics", section TensorFloat-32), so that setting is left alone:
    a user who changed it asked for it. With ``tf32``, all of them are rounded so instead.
    """
    cudnn: Any = torch.backends.cudnn
    cuda: Any = torch.backends.cuda
    kinds = (cudnn.conv, cudnn.rnn, *((cuda.matmul,) if tf32 else ()))
    before = [kind.fp32_precision for kind in kinds]
    for kind in kinds:
        kind.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision
