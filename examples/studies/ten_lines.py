"""The README's ten lines, and their tuned twin of docs/how-to/tune.md, at the same total epsilon.

Run: ``python examples/studies/ten_lines.py --result FILE.json``; two minutes of one core.

A row "rate R" is one training with that rate of the clients and all of epsilon; the README has rate
1. "tune" is the twin: each of its about three trainings draws one of the five rates, has the noise
with which all of it meets the same epsilon, and is scored by 50 public writers. All train on the
same 500 writers, and are measured by 49 others, whom nothing else reads. The best of the rates is
known to nobody before it has been looked at; a row shows what it would have been. Seeds are those
of weights and cohorts; noise is secret, so figures of another run differ by it.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import frame

import os
import tempfile
from statistics import mean, stdev
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch.nn import Linear

from privpart import Accuracy, data, train, tune
from privpart.data import Clients

EPSILON = 10.0
RATES = (0.1, 0.3, 1.0, 3.0, 10.0)


def writers() -> tuple[Clients, Accuracy, Accuracy]:
    """Return the clients, and the accuracy on writers who score and on those who test."""
    pixels, digit = load_digits(return_X_y=True, as_frame=True)
    table = (pixels / 16).assign(digit=digit, writer=pixels.index // 3)
    parts = table[table.writer.between(500, 549)], table[table.writer >= 550]
    score, test = (
        Accuracy(
            torch.tensor(part[list(pixels)].to_numpy()).float(), torch.tensor(part.digit.array)
        )
        for part in parts
    )
    table = table[table.writer < 500]
    return data.from_frame(table, user="writer", x=list(pixels), y="digit"), score, test


def plan_of(seed: int, rate: float) -> dict[str, Any]:
    """Return the README's plan with a rate, without noise yet."""
    return {
        "privacy": {"rounds": 10, "clip_norm": 2.0, "delta": 1e-4, "mechanism": {"name": "blt"}},
        "data": {"clients_per_round": 50, "seed": seed},
        "client": {"learning_rate": rate, "steps": 5},
        "model": {"seed": seed, "keep": []},
    }


def trial(seed: int, runs: str, folder: Path) -> dict[str, float]:
    """Return the test accuracy of each way, at one seed."""
    clients, score, test = writers()
    module, found = Linear(64, 10), {}
    for rate in RATES:
        plan = plan_of(seed, rate)
        plan["privacy"]["target_epsilon"] = EPSILON
        run = train(module, clients, plan=plan, out=folder / f"{rate}", progress=False)
        found[f"rate {rate:g}"] = test(run.module())
    changes = {f"rate {rate:g}": {"client.learning_rate": rate} for rate in RATES}
    tables = {"plan": plan_of(seed, 1.0), "target_epsilon": EPSILON, "runs": runs}
    tables |= {"score": "metric", "candidates": changes, "seconds": 1.0}
    own = {"module": module, "clients": clients, "metric": score}
    best = tune(tables, folder / "tune", show=lambda _: None, **own)
    return found | {"tune": test(best.module())}


def main() -> None:
    """Train every way at every seed, and write the table."""
    given = frame.options(
        __doc__,
        result="ten_lines.json",
        quick={"seeds": 1, "runs": "binomial:expected=1.5,most=2"},
        seeds=20,
        runs="3",
    )
    with tempfile.TemporaryDirectory() as folder:
        # What these simulations spend of nobody's budget is not for this user's book.
        os.environ["PRIVPART_STATE_DIR"] = str(Path(folder) / "state")
        found = [trial(s, given.runs, Path(folder) / f"{s}") for s in range(given.seeds)]
    rows = []
    for way in found[0]:
        values = [one[way] for one in found]
        spread = stdev(values) if len(values) > 1 else None
        rows.append({"way": way, "accuracies": values, "mean": mean(values)})
        rows[-1]["standard_deviation"] = spread
        print(way, f"{mean(values):.3f}", spread)
    frame.Result(given.result, "torch").write(method=__doc__, runs=given.runs, rows=rows)


if __name__ == "__main__":
    main()
