"""Measured step: seconds and peak memory of a client's local step, in a process of its own.

Linux only, one thread. Memory is the rise of the resident set (VmHWM, reset once the model is built
and has trained one step) over what the process held before, with its libraries already at work:
parameters, gradients, optimiser state, activations and the workspaces that ``costs.StepMemory``
leaves out. malloc is told to return large blocks at once, for otherwise it keeps what was freed;
that costs time, so time is taken in another process.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from accounting.checks import ConfigError
from privpart.client import LocalTraining

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RETURN_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One local step as this machine ran it.

    Attributes:
        seconds: of one processor, per repeat, so that other programs do not count: loading the
            trained part, one batch, the optimiser, the clip.
        peak_bytes: most resident memory during a step, over the process without a model.
    """

    seconds: tuple[float, ...]
    peak_bytes: int

    @property
    def median_seconds(self) -> float:
        """The middle one of the repeats."""
        return median(self.seconds)


def measured_step(
    name: str,
    train: Sequence[str],
    *,
    local: LocalTraining,
    repeats: int = 5,
) -> MeasuredStep:
    """Run one batch of ``local.batch_size`` through the network of that name.

    Args:
        name: of ``privpart.models.MODELS``, at the sizes of ``example_network``.
        train: patterns.
        local: optimiser and batch size; the loss is the network's own.
        repeats: timed steps, after one that is not.

    Raises:
        ConfigError: not on Linux.
    """
    if not _RESET.exists():
        raise ConfigError("measure=True: needs Linux, which alone resets a process's peak memory.")
    job = json.dumps([name, list(train), asdict(local), repeats])
    time = _child(job, os.environ)
    memory = _child(job, os.environ | _RETURN_AT_ONCE)
    return MeasuredStep(tuple(time["seconds"]), int(memory["peak_bytes"]))


def _child(job: str, environment: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "privpart.measure.step"]
    done = subprocess.run(
        command, input=job, env=dict(environment), capture_output=True, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _run(job: str) -> dict[str, Any]:
    """Build, warm up, reset the peak, then train ``repeats`` times."""
    import torch

    from privpart.client import client_update
    from privpart.model import PartialModel
    from privpart.models import MODELS
    from privpart.models.examples import example_batch, example_network

    name, train, options, repeats = json.loads(job)
    torch.set_num_threads(1)
    local = LocalTraining(**options)

    def build(name: str, train: Sequence[str], batch_size: int) -> Callable[[], float]:
        start_values = MODELS[name].initializers
        model = PartialModel(
            lambda: example_network(name), train=train, seed=0, initializers=start_values
        )
        start, batch = model.flat.clone(), example_batch(name, batch_size)
        own = replace(local, loss=MODELS[name].loss)

        def step() -> float:
            began = process_time()
            client_update(
                model, start, *batch, local=own, clip_norm=1.0, generator=torch.Generator()
            )
            return process_time() - began

        return step

    build("small_cnn", ["*"], 2)()  # loads the libraries, which are no part of a model
    empty = _resident("VmRSS")
    step = build(name, train, local.batch_size)
    step()
    _RESET.write_text("5")
    seconds = [step() for _ in range(repeats)]
    return {"seconds": seconds, "peak_bytes": _resident("VmHWM") - empty}


def _resident(field: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_run(sys.stdin.read())))
