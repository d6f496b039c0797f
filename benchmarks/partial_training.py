"""Partial training: peak memory and time of a client step, ResNet-18, frozen blocks or none.

Run: ``python benchmarks/partial_training.py``; writes benchmarks/results/partial_training.json.

FedPT's ResNet-18 (Sidahmed et al. 2022, Tables 2, 4 and 10) with group normalisation, one batch of
CIFAR size, SGD with momentum. Both figures of a row come from this run, each from a process of its
own on one thread. Memory is the resident set minus that
of a process with the libraries loaded but without the model. Time is processor time, which other
programs affect least. Each row also has the values that ``privpart costs`` computes.
"""

import frame

from dataclasses import asdict
from pathlib import Path
from time import process_time
from typing import Any

import torch

from privpart import LocalTraining, PartialModel, client_update
from privpart.models import MODELS, example_batch, example_network
from privpart.training.costs import client_costs

NAME = "resnet18_gn"
METHOD = {
    "time": "processor seconds of one client_update of one batch, one thread; median, least and "
    "most of the repeats after one that is not counted",
    "memory": "VmHWM, reset after one step, less VmRSS before the model was built, in a process "
    "whose libraries had trained a small network; malloc returns blocks of 64 KiB and more at once",
}


def model_of(part: str) -> PartialModel:
    """Return the network of a freeze step."""
    start, train = MODELS[NAME].initializers, MODELS[NAME].ladder[part]
    return PartialModel(lambda: example_network(NAME), train=train, seed=0, initializers=start)


def local_training(batch_size: int) -> LocalTraining:
    return LocalTraining(0.1, batch_size=batch_size, momentum=0.9)


def measured(part: str, batch_size: int, repeats: int) -> dict[str, Any]:
    """Return the seconds of local steps, and the peak of memory above that of the libraries."""
    torch.set_num_threads(1)
    local = local_training(batch_size)

    def step(model: PartialModel, batch: Any, settings: LocalTraining) -> float:
        start, began = model.flat.clone(), process_time()
        client_update(
            model, start, batch, local=settings, clip_norm=1.0, generator=torch.Generator()
        )
        return process_time() - began

    # loads the libraries, which are not memory of the model
    small = PartialModel(lambda: example_network("small_cnn"), train=["*"], seed=0)
    step(small, example_batch("small_cnn", 2), LocalTraining(0.1))
    empty = frame.resident()
    model, batch = model_of(part), example_batch(NAME, batch_size)
    step(model, batch, local)
    Path("/proc/self/clear_refs").write_text("5")
    seconds = [step(model, batch, local) for _ in range(repeats)]
    return {"seconds": seconds, "peak_bytes": frame.resident("VmHWM") - empty}


def row(part: str, local: LocalTraining, repeats: int) -> dict[str, Any]:
    """Measure one freeze step."""
    model, batch = model_of(part), example_batch(NAME, local.batch_size)
    computed = client_costs(model, batch, local=local, examples=local.batch_size)
    times = frame.apart(measured, part, local.batch_size, repeats)["seconds"]
    # returning freed blocks takes time, so memory is of another process
    memory = frame.apart(measured, part, local.batch_size, repeats, **frame.RETURN_FREED_BLOCKS)
    return {
        "part": part,
        "trained": model.dim,
        "numbers": model.parameter_count,
        **frame.spread(times, "seconds_{}"),
        "peak_bytes": memory["peak_bytes"],
        "computed_memory_bytes": computed.memory.total,
        "computed_flops": computed.forward_flops + computed.backward_flops,
        "bytes_up": computed.bytes_up,
    }


def main() -> None:
    quick = {"repeats": 1, "batch_size": 2}
    given = frame.options(__doc__, "partial_training.json", quick=quick, repeats=5, batch_size=16)
    result = frame.Result(given.result, "torch")
    local = local_training(given.batch_size)
    rows = []
    for part in list(MODELS[NAME].ladder)[: 1 if given.quick else None]:
        rows.append(row(part, local, given.repeats))
        frame.show(part, rows[-1], "trained", "peak_bytes", "seconds_median", "seconds_least")
    shape = list(example_batch(NAME, given.batch_size)[0].shape)
    about = {"repeats": given.repeats, "network": NAME, "input": shape, "local": asdict(local)}
    result.write(method=METHOD, **about, rows=rows)


if __name__ == "__main__":
    main()
