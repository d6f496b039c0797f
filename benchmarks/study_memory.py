"""Memory of a client in a study: what `privpart frontier` computes, and what a process measures.

Run: ``python benchmarks/study_memory.py STUDY.toml --out FILE.csv``, on Linux; a few seconds.

Each arm trains one client's round in processes of their own: the peak of the resident set during a
local step (VmHWM, reset after a first step), less the resident set before the model was built, when
the libraries were loaded and had run. malloc returns large blocks at once, because freed ones would
count. The examples are there before, in both.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch

from privpart.client import client_update
from privpart.experiment.plan_file import PlanFile
from privpart.experiment.training import training
from privpart.measure.step import _RESET_PEAK, _RETURN_FREED_BLOCKS, _resident
from privpart.model import PartialModel
from privpart.study.client_side import client_side
from privpart.study.study_file import Study, read_study

PROCESSES = 5
STEPS = 5


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
    before = _resident("VmRSS")
    model = plan.model.partial()
    start = model.flat.clone()
    step(model, start)
    _RESET_PEAK.write_text("5")
    for _ in range(STEPS):
        step(model, start)
    found = _resident("VmHWM") - before - start.nbytes
    del held
    return found


def main() -> None:
    """Measure every arm of a study, and write a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("study")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(measured(options.study, options.arm)))
        return
    study, rows = read_study(options.study), []
    for arm in study.arms:
        command = [sys.executable, __file__, options.study, "--arm", arm]
        environment = os.environ | _RETURN_FREED_BLOCKS
        found = [
            json.loads(subprocess.check_output(command, env=environment, text=True))
            for _ in range(PROCESSES)
        ]
        computed = client_side(plan_of(study, arm))["memory_bytes"]
        rows.append(
            {
                "arm": arm,
                "computed_bytes": computed,
                "measured_bytes": median(found),
                "lowest": min(found),
                "highest": max(found),
                "processes": PROCESSES,
            }
        )
        print(rows[-1], flush=True)
    if options.out:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
