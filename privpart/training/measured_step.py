"""Step: measured time and peak memory of a client's local step, in a separate process.

Linux only, one thread. Memory is the peak resident set during the step (VmHWM, reset after the
model is built and has trained one step) minus the resident set before, when the libraries were
loaded already. It includes parameters, gradients, optimiser state, activations and the workspaces
that ``costs.StepMemory`` omits. malloc is configured to return large blocks to the system
immediately, because freed blocks would count as resident otherwise. That takes time, so time is
measured in another process.
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

_STATUS = Path("/proc/self/status")
_RESET_PEAK = Path("/proc/self/clear_refs")
_RETURN_FREED_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One local step, as measured on this machine.

    Attributes:
        seconds: processor time of each repeat, which other programs do not affect. It covers
            loading the trainable part, one batch, the optimiser and the clip.
        peak_bytes: peak resident memory during a step, minus that of the process without a model.
    """

    seconds: tuple[float, ...]
    peak_bytes: int

    @property
    def median_seconds(self) -> float:
        """Median over the repeats."""
        return median(self.seconds)


def measured_step(
    name: str,
    train: Sequence[str],
    *,
    local: LocalTraining,
    repeats: int = 5,
) -> MeasuredStep:
    """Measure local steps of a named network on one batch of ``local.batch_size`` examples.

    Args:
        name: name in ``privpart.models.MODELS``; the sizes are those of ``example_network``.
        train: patterns of trainable parameters.
        local: optimiser and batch size; the loss is the network's.
        repeats: number of timed steps, after one warm-up step.

    Raises:
        ConfigError: the system is not Linux.
    """
    if not _RESET_PEAK.exists():
        raise ConfigError("measure=True: needs Linux, to reset a process's peak memory.")
    # JSON holds no functions
    named = replace(local, loss="cross_entropy", augment=None)
    job = json.dumps([name, list(train), asdict(named), repeats])
    # two processes, because returning freed blocks takes time
    time = _child(job, os.environ)
    memory = _child(job, os.environ | _RETURN_FREED_BLOCKS)
    return MeasuredStep(tuple(time["seconds"]), int(memory["peak_bytes"]))


def _child(job: str, environment: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "privpart.training.measured_step"]
    done = subprocess.run(
        command, input=job, env=dict(environment), capture_output=True, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _run(job: str) -> dict[str, Any]:
    """Build the model, warm up, reset the peak, then train ``repeats`` times."""
    import torch

    from privpart.client import client_update
    from privpart.model import PartialModel
    from privpart.models import MODELS, example_batch, example_network

    name, train, options, repeats = json.loads(job)
    torch.set_num_threads(1)
    local = LocalTraining(**options)

    def build(name: str, train: Sequence[str], batch_size: int) -> Callable[[], float]:
        start_values = MODELS[name].initializers
        model = PartialModel(
            lambda: example_network(name), train=train, seed=0, initializers=start_values
        )
        start, batch = model.flat.clone(), example_batch(name, batch_size)
        training = replace(local, loss=MODELS[name].loss)

        def step() -> float:
            began = process_time()
            client_update(
                model, start, batch, local=training, clip_norm=1.0, generator=torch.Generator()
            )
            return process_time() - began

        return step

    # loads the libraries, which are not memory of the model
    build("small_cnn", ["*"], 2)()
    empty = _resident("VmRSS")
    step = build(name, train, local.batch_size)
    step()
    _RESET_PEAK.write_text("5")
    seconds = [step() for _ in range(repeats)]
    return {"seconds": seconds, "peak_bytes": _resident("VmHWM") - empty}


def _resident(field: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_run(sys.stdin.read())))
