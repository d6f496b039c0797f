"""Partial training: peak memory and time of a client step, ResNet-18, frozen blocks or none.

Run: ``python benchmarks/partial_training.py``; writes benchmarks/results/partial_training.json.

FedPT's ResNet-18 (Sidahmed et al. 2022, Tables 2, 4 and 10) with group normalisation, one batch of
CIFAR size, SGD with momentum. Both figures of a row come from this run, each from separate
processes on one thread (``privpart.training.measured_step``). Memory is the resident set minus that
of a process with the libraries loaded but without the model. Time is processor time, which other
programs affect least. Each row also has the values that ``privpart costs`` computes.
"""

import frame

from dataclasses import asdict
from typing import Any

from privpart import LocalTraining, PartialModel
from privpart.models import MODELS, example_batch, example_network
from privpart.training.costs import client_costs
from privpart.training.measured_step import measured_step

NAME = "resnet18_gn"
METHOD = {
    "time": "processor seconds of one client_update of one batch, one thread; median, least and "
    "most of the repeats after one that is not counted",
    "memory": "VmHWM, reset after one step, less VmRSS before the model was built, in a process "
    "whose libraries had trained a small network; malloc returns blocks of 64 KiB and more at once",
}


def row(part: str, local: LocalTraining, repeats: int) -> dict[str, Any]:
    """Measure one freeze step."""
    start, train = MODELS[NAME].initializers, MODELS[NAME].ladder[part]
    model = PartialModel(lambda: example_network(NAME), train=train, seed=0, initializers=start)
    batch = example_batch(NAME, local.batch_size)
    computed = client_costs(model, batch, local=local, examples=local.batch_size)
    step = measured_step(NAME, train, local=local, repeats=repeats)
    return {
        "part": part,
        "trained": model.dim,
        "numbers": model.parameter_count,
        **frame.spread(step.seconds, "seconds_{}"),
        "peak_bytes": step.peak_bytes,
        "computed_memory_bytes": computed.memory.total,
        "computed_flops": computed.forward_flops + computed.backward_flops,
        "bytes_up": computed.bytes_up,
    }


def main() -> None:
    quick = {"repeats": 1, "batch_size": 2}
    given = frame.options(__doc__, "partial_training.json", quick=quick, repeats=5, batch_size=16)
    result = frame.Result(given.result, "torch")
    local = LocalTraining(0.1, batch_size=given.batch_size, momentum=0.9)
    rows = []
    for part in list(MODELS[NAME].ladder)[: 1 if given.quick else None]:
        rows.append(row(part, local, given.repeats))
        frame.show(part, rows[-1], "trained", "peak_bytes", "seconds_median", "seconds_least")
    shape = list(example_batch(NAME, given.batch_size)[0].shape)
    about = {"repeats": given.repeats, "network": NAME, "input": shape, "local": asdict(local)}
    result.write(method=METHOD, **about, rows=rows)


if __name__ == "__main__":
    main()
