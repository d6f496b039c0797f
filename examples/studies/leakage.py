"""Leakage of the arms of a study: what ``privpart frontier --audit`` finds, without the trainings.

Run: ``python examples/studies/leakage.py STUDY.toml --out FILE.csv``; seconds per arm. Updates are
those of the start values, so no training is needed.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import frame

import time
from functools import lru_cache

import torch

from privpart.cli.frontier_leakage import leakage_of
from privpart.study.study_file import read_study
from privpart.training.task_data import read_task


def main() -> None:
    """Attack an update of every arm, and write a row for each."""
    given = frame.options(__doc__, study={"positional": True}, out={"type": Path})
    torch.set_num_threads(1)
    study, read = read_study(given.study), lru_cache(maxsize=1)(read_task)
    rows = []
    for arm in list(study.arms)[: 1 if given.quick else None]:
        group = next(group for group in study.groups if group.arm == arm)
        plan = study.final_cells(group, study.points[0])[0].plan
        began = time.process_time()
        found = leakage_of(plan, read)
        rows.append({"arm": arm, **found, "cpu_seconds": round(time.process_time() - began, 1)})
        frame.show(arm, rows[-1])
    frame.write_csv(given.out, rows)


if __name__ == "__main__":
    main()
