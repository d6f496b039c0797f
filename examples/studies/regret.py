"""What the choice of a part costs: ``privpart tune`` at epsilon 2, on two studies of parts.

Run: ``python examples/studies/regret.py``, after the studies themselves, whose chosen rates it
reads; writes benchmarks/results/study/chosen.csv, a row per selection; three minutes of one core.

Each selection is the command itself, with secret noise: it draws a number of trainings, four on
average, each of a part drawn anew with the rates that the study chose for it, and releases the one
that is best on public data. Seeds are those of model, deal and cohorts, as in the study, whose
final trainings have all of the epsilon. Noise is secret, so figures of another run differ by it.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import frame

import json
import os
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch
from bodies import BODY, CHOSEN_AT, RATES, RESULTS, RUNS, Row, chosen_of, rows_of

from privpart import tune
from privpart.cli.main import app
from privpart.run.ledger import Ledger
from privpart.study.study_file import Study, read_study
from privpart.training.metric import accuracy
from privpart.training.task_data import plan_data


@dataclass(frozen=True)
class Task:
    """A study, its table of results, the seeds of the selections and how many each has."""

    study: Path
    table: str
    seeds: range
    draws: int


TASKS = {
    "pretrained": Task(BODY / "study.toml", "body", range(10), 3),
    "narrow": Task(BODY.parent / "study_seeds.toml", "seeds", range(1000, 1020), 1),
}


def inline(value: object) -> str:
    """Return a value of a plan as TOML, its tables in one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {inline(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)


def tune_file(task: Task, study: Study, seed: int) -> str:
    """Return the file of a selection among the study's arms, each with its chosen rates."""
    tuning, held_out = rows_of(RESULTS / task.table / "tuning.csv"), study.file.tuning.held_out
    public = {"data.metric": study.file.tuning.metric}
    if study.file.tuning.metric is None:
        public = {"data.measured_on": "held-out", "data.held_out": held_out}
    seeds = {"data.seed": seed, "model.seed": seed}
    candidates = {}
    for name, changes in study.arms.items():
        chosen = chosen_of(tuning, {"arm": name, "level": CHOSEN_AT})
        rates = {field: float(chosen[field]) for field in RATES}
        mechanism = {"privacy.mechanism": study.file.mechanisms["blt"]}
        candidates[name] = {**changes, **mechanism, **rates, **seeds, **public}
    plan = study.file.plan
    tables = {
        "schema": "privpart/tune/1",
        "plan": plan if isinstance(plan, dict) else str(task.study.parent / plan),
        "target_epsilon": float(CHOSEN_AT),
        "runs": RUNS,
        "score": "accuracy" if study.file.tuning.metric is None else "metric",
        "seconds": 1.0,
        "candidates": candidates,
    }
    return "".join(f"{key} = {inline(value)}\n" for key, value in tables.items())


def of_part(tables: Row) -> list[Any]:
    """Return what the arms of a study change of a plan."""
    return [tables["model"].get(field) for field in ("train", "keep", "sizes")]


def selected(task: Task, study: Study, seed: int, folder: Path) -> Row:
    """Run the command; return which part it released, and its accuracy on test images."""
    folder.mkdir()
    file, began = folder / "tune.toml", time.process_time()
    file.write_text(tune_file(task, study, seed))
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        app(["tune", str(file), "--out", str(folder / "out")], standalone_mode=False)
    spent = time.process_time() - began
    run = tune(file, folder / "out", show=lambda _: None)  # it has ended: this opens it
    tables: Any = Ledger(run.path).facts["plan_tables"]
    plans = {own.arm: study.final_cells(own, study.points[0])[0].plan for own in study.groups}
    (part,) = [arm for arm, plan in plans.items() if of_part(tables) == of_part(plan.model_dump())]
    if task.table == "body":
        import task as clothes  # beside the study file

        metric = clothes.test_accuracy(run.module())
    else:
        data = plan_data(plans[part].data, torch.nn.Identity())
        metric = accuracy(run.module(), data.test_x, data.test_y)
    noise = run.report().guarantee.noise_multiplier
    return {"seed": seed, "epsilon": CHOSEN_AT, "noise_multiplier": f"{noise:.4g}"} | {
        "part": part,
        "metric": metric,
        "cpu_seconds": round(spent, 2),
    }


def main() -> None:
    """Run every selection that is missing, and write the table."""
    given = frame.options(
        __doc__,
        out={"type": Path, "default": RESULTS / "chosen.csv"},
        task=frame.among(TASKS),
        most=1000,
    )
    torch.set_num_threads(1)
    sys.path.insert(0, str(BODY))
    rows = rows_of(given.out)
    with tempfile.TemporaryDirectory() as name:
        # What these selections spend of nobody's budget is not for this user's book.
        os.environ["PRIVPART_STATE_DIR"] = str(Path(name) / "state")
        for own in given.task:
            task = TASKS[own]
            study, done = read_study(task.study), sum(r["task"] == own for r in rows)
            keys = [(seed, draw) for draw in range(task.draws) for seed in task.seeds]
            for seed, draw in keys[done : given.most]:
                folder = Path(name) / f"{own}-{seed}-{draw}"
                rows.append({"task": own} | selected(task, study, seed, folder))
                frame.write_csv(given.out, rows)
                print(*rows[-1].values(), flush=True)


if __name__ == "__main__":
    main()
