"""Device: where clients are computed, on the CPU or on one accelerator."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from accounting.checks import ConfigError

_Result = TypeVar("_Result", Tensor, list[Tensor])


def find_device(device: str | torch.device) -> torch.device:
    """Return torch's device, which must exist on this machine.

    Raises:
        ConfigError: there is no such device here, or this torch would round convolutions unasked.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(
            f"device={device!r}: torch knows no such device; use 'cpu', 'cuda' or 'cuda:1'."
        ) from None
    if found.type == "cpu":
        return torch.device("cpu")
    module = getattr(torch, found.type, None)
    count = module.device_count() if module is not None and module.is_available() else 0
    if (found.index or 0) >= count:
        seen = ", ".join(["cpu", *(f"{found.type}:{k}" for k in range(count))])
        raise ConfigError(
            f"device='{found}': torch {torch.__version__} sees {seen} here; use one of these, or "
            "install a torch and a driver for the accelerator."
        )
    # ``float32_products`` needs this setting, which torch 2.9 introduced
    if not hasattr(torch.backends.cudnn, "conv"):
        raise ConfigError(f"device='{found}': needs torch 2.9, here is {torch.__version__}.")
    return found


def namespace(device: torch.device) -> Any:  # noqa: ANN401
    """Return torch's module for a kind of device, such as ``torch.cuda``."""
    return getattr(torch, device.type)


_REHEARSALS = 2
"""Calls before a recording, in which libraries choose their kernels and get memory."""


class Recorder:
    """Records work on a CUDA device as graphs, which share memory for what happens in between.

    Args:
        device: the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Any = None

    def record(self, work: Callable[[], _Result]) -> tuple[Callable[[], None], _Result]:
        """Return a function that repeats ``work``, and its result: tensors that each call writes.

        Args:
            work: called a few times before the recording. What it reads and writes must stay where
                it is in memory.
        """
        cuda: Any = torch.cuda
        other, before = cuda.Stream(self._device), cuda.current_stream(self._device)
        other.wait_stream(before)
        with cuda.stream(other):
            for _ in range(_REHEARSALS):
                work()
        before.wait_stream(other)
        self._memory = self._memory or cuda.graph_pool_handle()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=self._memory):
            result = work()
        return graph.replay, result


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64."""
    try:
        torch.ones((), dtype=torch.float64, device=device).mul_(2)
    except (RuntimeError, TypeError):
        return False
    return True


def host_memory(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return memory of the CPU to which a device copies fast."""
    # page-locked, which torch keeps for the next round: otherwise a copy takes ten times as long
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def free_memory(device: torch.device) -> int:
    """Return the free bytes of an accelerator."""
    return int(namespace(device).mem_get_info(device)[0])


def clock(device: torch.device) -> float:
    """Return seconds for timing work on a device; only differences have a meaning.

    On the CPU this is processor time, so that other programs do not influence the choice of a
    method. On an accelerator it is wall time, read once all queued work has finished.
    """
    if device.type == "cpu":
        return time.process_time()
    namespace(device).synchronize(device)
    return time.perf_counter()


@contextmanager
def float32_products(device: torch.device, *, tf32: bool = False) -> Iterator[None]:
    """Within this context, compute float32 convolutions in float32 on CUDA devices.

    By default torch lets cuDNN round the inputs of convolutions to TF32's 10 bits; two methods of
    the same training would then differ by more than float32's rounding. Matrix products are float32
    by default (torch's "CUDA semantics", section TensorFloat-32), so that setting is left alone:
    a user who changed it asked for it. With ``tf32``, all of them are rounded so instead.
    """
    if device.type != "cuda":
        yield
        return
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


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Within this context, compute on one thread, so that sums are always rounded in one order.

    Args:
        wanted: False leaves the number of threads as it is.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if wanted else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
