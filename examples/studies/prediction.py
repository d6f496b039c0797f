"""Prediction of a study: what noise should cost each arm, from trainings without noise.

Run: ``python examples/studies/prediction.py STUDY.toml --out DIR [--jobs N]``; writes
DIR/predicted.csv. Each training is kept in DIR as soon as it ends, and is not repeated.

It trains every arm without noise, with each of the study's first trials (``--trials N``: with N of
them), and measures on held-out users only. docs/study.md derives the two predictions from theta_0,
theta_T, the clip norm C, the cohort N, the learning rate a and momentum m of the server, and the
variance e^2 of the mechanism's last prefix sum:

- injected: the best accuracy, over trials and learning rates f a, of
  theta_0 + f (theta_T - theta_0) with Gaussian noise of f a C z e / ((1 - m) N) on every trained
  coordinate;
- closed form: the loss L + G x / (1 + x), where L is the loss at theta_T, G is what training gained
  and x = c (R k)^2 / G, with the length R of theta_T - theta_0, the noise k per unit of length, and
  c, the loss per unit of variance on each coordinate, which is half the trace of the Hessian.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import frame

import csv
import inspect
import json
import math
from collections.abc import Sequence
from functools import lru_cache, partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from privpart.engines.options import EngineOptions
from privpart.noise.source import SeededSource
from privpart.study.study_file import WITHOUT_NOISE, Group, Study, read_study
from privpart.training.metric import accuracy
from privpart.training.task_data import read_task
from privpart.training.training import Training, training

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""Of the server's learning rate."""
DRAWS = 2
EXAMPLES = 1500  # of the held-out users
PROBE = (0.05, 0.1)  # noise of the probe of the curvature, as shares of R / sqrt(d)


def silent_groups(study: Study) -> list[Group]:
    """Return a group without noise per arm, whether or not the study has that level."""
    silent = {"privacy.noise_multiplier": 0.0}
    return [
        Group(arm, WITHOUT_NOISE, WITHOUT_NOISE, (silent, own))
        for arm, own in study.arms.items()
        if "select" not in own and "schedule" not in own
    ]


def noisy(study: Study, arm: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Return z e, the deviation of the last sum per clip norm, and z, by mechanism and level."""
    found = {}
    for group in study.groups:
        if group.arm == arm and group.level != WITHOUT_NOISE:
            cell = study.tuning_cells(group, 0, study.points[0])[0]
            plan = cell.plan.privacy_plan()
            z, last = float(plan.noise_multiplier), float(plan.mechanism.prefix_variance()[-1])
            found[group.mechanism, group.level] = (z * math.sqrt(last), z)
    return found


def measured(setup: Training, flat: Tensor) -> tuple[float, float]:
    """Return accuracy and loss on held-out examples."""
    own = inspect.unwrap(setup.metric)  # an Accuracy, also where the plan names it
    x, y = own.x[:EXAMPLES], own.y[:EXAMPLES]
    setup.model.load(flat)
    with torch.no_grad():
        loss = mean(
            float(cross_entropy(setup.model.module(a), b))
            for a, b in zip(x.split(500), y.split(500), strict=True)
        )
    return accuracy(setup.model.module, x, y), loss


def one(path: str, arm: str, number: int) -> dict[str, Any]:
    """Train one arm with one trial's values, without noise, and measure it under injected noise."""
    torch.set_num_threads(1)
    study = read_study(path)
    group = next(own for own in silent_groups(study) if own.arm == arm)
    cell = study.tuning_cells(group, number, study.points[number])[0]
    plan = cell.plan
    setup = training(
        plan,
        options=EngineOptions(cache_prefix=False),
        report=lambda _: None,
        read=lru_cache(maxsize=1)(read_task),
    )
    server, _ = setup.run(setup.promise(), SeededSource(cell.seed))
    start, end = setup.first, server.parameters.clone()
    way = end - start
    length, dim = float(way.norm()), len(way)
    momentum = plan.server.momentum
    reach = plan.server.learning_rate * plan.privacy.clip_norm / (1 - momentum)
    clean, loss = measured(setup, end)
    before, loss_before = measured(setup, start)
    generator = torch.Generator().manual_seed(cell.seed)
    directions = [torch.randn(dim, generator=generator) for _ in range(DRAWS)]

    def under(share: float, sigma: float) -> float:
        spots = [start + share * way + sigma * own for own in directions]
        return mean(measured(setup, spot)[0] for spot in spots)

    curvature = []
    for part in PROBE:
        sigma = part * length / math.sqrt(dim)
        up = [measured(setup, end + s * sigma * own)[1] for own in directions for s in (1, -1)]
        curvature.append((mean(up) - loss) / sigma**2)
    cohort = plan.data.clients_per_round or 1
    injected = {}
    for (mechanism, level), (deviation, _) in noisy(study, arm).items():
        sigma = reach * deviation / cohort
        found = {share: under(share, share * sigma) for share in SHARES}
        best = max(found, key=lambda share: found[share])
        injected[f"{mechanism} {level}"] = {"share": best, "accuracy": found[best], "sigma": sigma}
    return {
        "arm": arm,
        "trial": number,
        "dim": dim,
        "length": length,
        "reach": reach,
        "alignment": length / (reach * plan.privacy.rounds),
        "accuracy": clean,
        "accuracy_before": before,
        "loss": loss,
        "loss_before": loss_before,
        "curvature": max(*curvature, 0.0),
        "curvatures": curvature,
        "injected": injected,
    }


def closed_form(found: dict[str, Any], sigma: float) -> float:
    """Return the predicted loss; the noise per unit of length is sigma / R, whatever the rate."""
    gained = found["loss_before"] - found["loss"]
    if gained <= 0:
        return float(found["loss"])
    x = found["curvature"] * sigma**2 / gained
    return float(found["loss"] + gained * x / (1 + x))


def rows(study: Study, trained: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per arm, mechanism and level; each takes the best of the arm's trials."""
    made = []
    for arm in dict.fromkeys(own["arm"] for own in trained):
        own = [found for found in trained if found["arm"] == arm]
        for key in own[0]["injected"]:
            best = max(own, key=lambda found: found["injected"][key]["accuracy"])
            least = min(own, key=lambda found: closed_form(found, found["injected"][key]["sigma"]))
            chosen = best["injected"][key]
            noise = chosen["sigma"] * math.sqrt(best["dim"])
            mechanism, level = key.split(" ")
            made.append(
                {
                    "arm": arm,
                    "mechanism": mechanism,
                    "level": level,
                    "trained": best["dim"],
                    "predicted_metric": chosen["accuracy"],
                    "predicted_loss": closed_form(least, least["injected"][key]["sigma"]),
                    "trial": best["trial"],
                    "rate_share": chosen["share"],
                    "signal_length": best["length"],
                    "noise_length": noise,
                    "noise_share": noise / (noise + best["length"]),
                    "noise_per_coordinate": chosen["sigma"],
                    "half_trace": best["curvature"],
                    "alignment": best["alignment"],
                }
            )
    return made


def beside(table: list[dict[str, Any]], measured: list[dict[str, str]]) -> None:
    """Put the measured metric and its interval beside each prediction."""
    found = {(row["arm"], row["mechanism"], row["level"]): row for row in measured}
    for row in table:
        own = found.get((row["arm"], row["mechanism"], row["level"]), {})
        for column in ("epsilon", "metric", "low", "high"):
            row[f"measured_{column}"] = float(own[column]) if own.get(column) else None


def markdown(table: list[dict[str, Any]], reference: str) -> str:
    """Return predicted and measured accuracy, and difference to the reference, as a table."""
    head = ["mechanism", "level", "arm", "noise share", "predicted", "measured"]
    first = {(r["mechanism"], r["level"]): r for r in table if r["arm"] == reference}
    lines = []
    for row in sorted(table, key=lambda r: (r["mechanism"], -float(r["level"]))):
        base = first[row["mechanism"], row["level"]]
        both = row["measured_metric"] is not None and base["measured_metric"] is not None
        cells = [row["mechanism"], row["level"], row["arm"], f"{row['noise_share']:.0%}"]
        cells.append(f"{100 * row['predicted_metric']:.1f}")
        cells.append(f"{100 * row['measured_metric']:.1f}" if both else "")
        gained = 100 * (row["predicted_metric"] - base["predicted_metric"])
        cells.append(f"{gained:+.1f}")
        gained = 100 * (row["measured_metric"] - base["measured_metric"]) if both else 0.0
        lines.append([*cells, f"{gained:+.1f}" if both else ""])
    return frame.markdown([*head, "predicted - first", "measured - first"], lines)


def keep(out: Path, study: Study, arm: str, number: int, path: str) -> None:
    """Train what ``one`` trains, and keep it in a file."""
    target = _file(out, study, arm, number)
    part = target.with_suffix(".part")
    part.write_text(json.dumps(one(path, arm, number)), encoding="utf-8")
    part.replace(target)


def main() -> None:
    """Train what is missing, and write the table."""
    given = frame.options(
        __doc__,
        study={"positional": True},
        out={"type": Path, "required": True},
        jobs=1,
        trials=0,
        measured={"type": Path, "help": "the study's frontier.csv, shown beside it"},
    )
    study = read_study(given.study)
    given.out.mkdir(parents=True, exist_ok=True)
    todo = [
        partial(keep, given.out, study, group.arm, number, given.study)
        for number in range(1 if given.quick else given.trials or len(study.points))
        for group in silent_groups(study)[: 1 if given.quick else None]
        if not _file(given.out, study, group.arm, number).exists()
    ]
    for count, _ in enumerate(frame.finished(todo, given.jobs), 1):
        print(f"{count} of {len(todo)}", flush=True)
    files = sorted(given.out.glob(f"{_mark(study)}-*.json"))
    table = rows(study, [json.loads(path.read_text()) for path in files])
    if given.measured is not None:
        with given.measured.open(encoding="utf-8") as file:
            beside(table, list(csv.DictReader(file)))
        print(markdown(table, study.reference))
    frame.write_csv(given.out / "predicted.csv", table)


def _mark(study: Study) -> str:
    return study.hash[:12]


def _file(out: Path, study: Study, arm: str, number: int) -> Path:
    return out / f"{_mark(study)}-{arm}-{number:03}.json"


if __name__ == "__main__":
    main()
