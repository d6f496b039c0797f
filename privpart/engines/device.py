"""Device: where clients are computed, on the CPU or on one accelerator.

One thread: as each worker has, so that the same sums are rounded in the same order.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accounting.checks import ConfigError


def usable(device: str | torch.device) -> torch.device:
    """Return torch's device, which must exist on this machine.

    Raises:
        ConfigError: there is no such device here, or this torch would round convolutions unasked.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(
            f"device={device!r}: is no device of torch's; use 'cpu', 'cuda' or 'cuda:1'."
        ) from None
    if found.type == "cpu":
        return torch.device("cpu")
    there = getattr(torch, found.type, None)
    count = there.device_count() if there is not None and there.is_available() else 0
    if (found.index or 0) >= count:
        seen = ", ".join(["cpu", *(f"{found.type}:{k}" for k in range(count))])
        raise ConfigError(
            f"device='{found}': torch {torch.__version__} sees {seen} here; use one of these, or "
            "install a torch and a driver for the accelerator."
        )
    if not hasattr(torch.backends.cudnn, "conv"):
        raise ConfigError(f"device='{found}': needs torch 2.9, here is {torch.__version__}.")
    return found


def namespace(device: torch.device) -> Any:  # noqa: ANN401
    """Return torch's functions for a kind of device, as ``torch.cuda``."""
    return getattr(torch, device.type)


def clock(device: torch.device) -> float:
    """Return what a clock of the work on a device shows.

    Processor time, for other programs must not decide. It says nothing of an accelerator: there it
    is the wall's time, once all work that was handed over is done.
    """
    if device.type == "cpu":
        return time.process_time()
    namespace(device).synchronize(device)
    return time.perf_counter()


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Compute float32 in float32 on CUDA devices, in this context.

    torch lets cuDNN round the inputs of convolutions to TF32's 10 bits unless told otherwise; two
    ways of the same training would then differ by more than float32's rounding. For products of
    matrices its default is float32 (torch's "CUDA semantics", section TensorFloat-32): whoever set
    that otherwise has asked for it.
    """
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    kinds = (cudnn.conv, cudnn.rnn)
    before = [kind.fp32_precision for kind in kinds]
    for kind in kinds:
        kind.fp32_precision = "ieee"
    try:
        yield
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Compute on one thread in this context, and then on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if wanted else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
