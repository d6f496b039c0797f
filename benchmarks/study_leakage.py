"""Leakage of the arms of a study: what ``privpart frontier --audit`` finds, without the trainings.

Run: ``python benchmarks/study_leakage.py STUDY.toml --out FILE.csv``; seconds per arm. Updates are
those of the start values, so no training is needed.
"""

import argparse
import csv
import time
from functools import lru_cache
from pathlib import Path

import torch

from privpart.cli.frontier_leakage import leakage_of
from privpart.experiment.task_data import read_task
from privpart.study.study_file import read_study


def main() -> None:
    """Attack an update of every arm, and write a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("study")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    study, read = read_study(options.study), lru_cache(maxsize=1)(read_task)
    rows = []
    for arm in study.arms:
        group = next(group for group in study.groups if group.arm == arm)
        plan = study.final_cells(group, study.points[0])[0].plan
        began = time.process_time()
        found = leakage_of(plan, read)
        rows.append({"arm": arm, **found, "cpu_seconds": round(time.process_time() - began, 1)})
        print(rows[-1], flush=True)
    if options.out:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
