"""Memory of a client in a study: what `privpart frontier` computes, and what a process measures.

Run: ``python examples/studies/memory.py STUDY.toml --out FILE.csv``, on Linux; a few seconds.

Each arm trains one client's round in processes of their own: the peak of the resident set during a
local step (VmHWM, reset after a first step), less the resident set before the model was built, when
the libraries were loaded and had run. malloc returns large blocks at once, because freed ones would
count. The examples are there before, in both. A network of the plan's author, whose memory no
second copy would show, has what it sends and the least processor time of a step instead.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import frame

import time
from statistics import median

import torch

from privpart.client import client_update
from privpart.model import PartialModel
from privpart.study.study_file import Study, read_study
from privpart.training.costs import client_side
from privpart.training.plan_file import PlanFile
from privpart.training.training import training

PROCESSES = 5
STEPS = 5


def step_ms(path: str, arm: str) -> float:
    """Return the least processor time of a local step, in milliseconds."""
    torch.set_num_threads(1)
    setup = training(plan_of(read_study(path), arm), report=lambda _: None)
    local = setup.engine.local_of(0)
    batch = setup.clients.examples(setup.clients.ids[0])
    spent = []
    for _ in range(10 * STEPS):
        generator, began = torch.Generator().manual_seed(0), time.process_time()
        client_update(
            setup.model, setup.first, batch, local=local, clip_norm=0.3, generator=generator
        )
        spent.append(1e3 * (time.process_time() - began))
    return min(spent)


def plan_of(study: Study, arm: str) -> PlanFile:
    """Return the plan of an arm at the study's first level."""
    group = next(group for group in study.groups if group.arm == arm)
    return study.final_cells(group, study.points[0])[0].plan


def measured(path: str, arm: str) -> int:
    """Return the peak of a local step, less what the process held before it had a model."""
    torch.set_num_threads(1)
    plan = plan_of(read_study(path), arm)
    setup = training(plan, report=lambda _: None)
    local = setup.engine.local_of(0)
    batch = setup.clients.examples(setup.clients.ids[0])

    def step(model: PartialModel, start: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(0)
        client_update(model, start, batch, local=local, clip_norm=0.3, generator=generator)

    step(setup.model, setup.first.clone())  # the libraries load what they need
    held = setup.model, setup.first  # its memory stays, so it is not that of the next one
    before = frame.resident()
    model = plan.model.partial()
    start = model.flat.clone()
    step(model, start)
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(STEPS):
        step(model, start)
    found = frame.resident("VmHWM") - before - start.nbytes
    del held
    return found


def main() -> None:
    """Measure every arm of a study, and write a row for each."""
    given = frame.options(
        __doc__,
        quick={"processes": 1},
        study={"positional": True},
        out={"type": Path},
        processes=PROCESSES,
    )
    study, rows = read_study(given.study), []
    for arm in list(study.arms)[: 1 if given.quick else None]:
        plan = plan_of(study, arm)
        if plan.model.factory is not None:
            side = client_side(plan)
            found = {"bytes_up": side["bytes_up"], "computed_bytes": side["memory_bytes"]}
            least = min(
                frame.apart(step_ms, given.study, arm, **frame.RETURN_FREED_BLOCKS)
                for _ in range(given.processes)
            )
            rows.append({"arm": arm, **found, "step_ms": round(least, 3)})
            frame.show(arm, rows[-1])
            continue
        peaks = [
            frame.apart(measured, given.study, arm, **frame.RETURN_FREED_BLOCKS)
            for _ in range(given.processes)
        ]
        rows.append(
            {
                "arm": arm,
                "computed_bytes": client_side(plan)["memory_bytes"],
                "measured_bytes": median(peaks),
                "lowest": min(peaks),
                "highest": max(peaks),
                "processes": given.processes,
            }
        )
        frame.show(arm, rows[-1])
    frame.write_csv(given.out, rows)


if __name__ == "__main__":
    main()
