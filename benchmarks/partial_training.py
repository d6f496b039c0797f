"""Partial training: peak memory and time of a client step, ResNet-18, frozen blocks or none.

Run: ``python benchmarks/partial_training.py``; writes benchmarks/results/partial_training.json.

FedPT's ResNet-18 (Sidahmed et al. 2022, Tables 2, 4 and 10) with group normalisation, one batch of
CIFAR size, SGD with momentum. Both figures of a row come from this run, each from separate
processes on one thread (see ``privpart.measure.step``). Memory is the resident set minus that of a
process with the libraries loaded but without the model. Time is processor time, which other
programs affect least. Each row also has the values that ``privpart costs`` computes.
"""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch loads

from machine import machine

from privpart import LocalTraining, PartialModel
from privpart.measure.costs import client_costs
from privpart.measure.step import measured_step
from privpart.models import MODELS
from privpart.models.examples import example_batch, example_network

RESULT = Path(__file__).parent / "results" / "partial_training.json"
NAME = "resnet18_gn"


def row(part: str, local: LocalTraining, repeats: int) -> dict[str, Any]:
    """Measure one freeze step."""
    architecture = MODELS[NAME]
    train = architecture.ladder[part]
    model = PartialModel(
        lambda: example_network(NAME), train=train, seed=0, initializers=architecture.initializers
    )
    batch = example_batch(NAME, local.batch_size)
    computed = client_costs(model, batch, local=local, examples=local.batch_size)
    step = measured_step(NAME, train, local=local, repeats=repeats)
    return {
        "part": part,
        "trained": model.dim,
        "numbers": model.parameter_count,
        "seconds_median": median(step.seconds),
        "seconds_least": min(step.seconds),
        "seconds_most": max(step.seconds),
        "peak_bytes": step.peak_bytes,
        "computed_memory_bytes": computed.memory.total,
        "computed_flops": computed.forward_flops + computed.backward_flops,
        "bytes_up": computed.bytes_up,
    }


def main() -> None:
    """Write the results and print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    local = LocalTraining(0.1, batch_size=options.batch_size, momentum=0.9)
    x, _ = example_batch(NAME, options.batch_size)
    rows = []
    for part in MODELS[NAME].ladder:
        rows.append(row(part, local, options.repeats))
        last = rows[-1]
        print(
            f"{part:<16} {last['trained'] / last['numbers']:>8.2%} trains   "
            f"{last['peak_bytes'] / 2**20:7.1f} MiB   {last['seconds_median']:.3f} s "
            f"({last['seconds_least']:.3f} to {last['seconds_most']:.3f})",
            flush=True,
        )
    document = {
        "method": {
            "time": "processor seconds of one client_update of one batch, one thread; median, "
            f"least and most of {options.repeats} after one that is not counted",
            "memory": "VmHWM, reset after one step, less VmRSS before the model was built, in a "
            "process whose libraries had trained a small network; malloc returns blocks of 64 KiB "
            "and more at once",
        },
        "network": NAME,
        "input": list(x.shape),
        "local": asdict(local),
        "machine": machine("torch"),
        "rows": rows,
    }
    options.result.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
