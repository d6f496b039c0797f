"""Audit peers: what each attack reconstructs from the same update within the same budget.

Run: ``python benchmarks/audit_peers.py --processes 4``; writes results/audit_peers.json after each
run, and resumes: runs that the file holds, made with the same settings, are not repeated. The first
run creates an environment for breaching under .peers/ (1.3 GB); ``--breaching PYTHON`` names an
interpreter that has it.

Sides: privpart (its attacks one after the other, the result chosen by its own residual), breaching
0.1.2 ("invertinggradients", "deepleakage" and "modern" as configured there), and DLG, iDLG and
Inverting Gradients as their papers give them (``audit_peers_stock``). All see the same float32
gradient of the same images on the same start values, in eval mode, and may spend the same processor
seconds (those of one thread). Labels are known to all, except to the sides that search for them as
their papers do (DLG, deepleakage) and to iDLG, which infers its one.
"""

import frame

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import audit_peers_stock as stock
import numpy as np
import torch
from audit_peers_cases import NETWORKS, Block, Network, Normalised, batch_of, photographs
from peers_environment import NotInstalledError, environment, installed, run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attacks import Observation, Reconstruction, cosine_tv, dense_then_invert, dlg
from attacks.metrics import match_batch, psnr, wilson
from attacks.reconstruction.reconstruct import FALLING, GOOD_ENOUGH
from attacks.report import RECOVERED_DB

RESULT = frame.RESULTS / "audit_peers.json"
TRIALS = {1: 8, 2: 6, 4: 5, 8: 4}  # batches of each size, each of other images and start values
BUDGET = 10.0  # processor seconds
OURS = "privpart"
BREACHING = {
    "breaching, invertinggradients": "invertinggradients",
    "breaching, deepleakage": "deepleakage",
    "breaching, modern": "modern",
}
MOST_TIMED = 1024  # steps of the longest trial
RESAMPLES = 2000  # of the bootstrap
FEATURES = 0.1  # share of our seconds for the features of the dense layer; matching gets the rest
LARGE = 4  # images of a batch from which on too few evaluations are left for the prior to fade out
TIMING = 0.1  # share of the budget that a trial lasts, which tells the seconds of a step


@dataclass(frozen=True)
class Case:
    """One batch: the network inside its normalisation, and the update that a client sends."""

    name: str
    trial: int
    x: Tensor
    y: Tensor
    budget: float

    @property
    def network(self) -> Network:
        """The network and its normalisation."""
        return NETWORKS[self.name]

    def inside(self) -> nn.Module:
        """Return the network that takes normalised images."""
        return self.network.seeded(self.trial)

    def gradient(self) -> list[Tensor]:
        """Return the float32 gradient that the client sends."""
        model = self.inside()
        x = (self.x - self.network.mean) / self.network.std
        return list(torch.autograd.grad(cross_entropy(model(x), self.y), model.parameters()))


def ours(case: Case) -> dict[str, Any]:
    """Return what our attacks find within the budget, the best by its own residual."""
    model = Normalised(case.network, case.inside()).eval()
    names = [name for name, _ in model.named_parameters()]
    seen = Observation(
        update=dict(zip(names, case.gradient(), strict=True)),
        state=dict(model.state_dict()),
        shape=tuple(case.x.shape),
        labels=case.y,
    )
    left = case.budget
    tried: dict[str, Reconstruction] = {}
    for name, attack, share in _plan(model, seen):
        steps = max(1, int(share * left / _each(attack, case.budget)))
        began = time.process_time()
        image = attack(steps)
        left -= time.process_time() - began
        if image is not None:
            tried[name] = image
            if image.match <= GOOD_ENOUGH:
                break
    chosen = min(tried, key=lambda name: tried[name].match)
    return {
        "x": tried[chosen].x,
        "seconds": case.budget - left,
        "chosen": chosen,
        "psnr_by_attack": {name: _decibels(one.x, case.x) for name, one in tried.items()},
        "match_by_attack": {name: one.match for name, one in tried.items()},
    }


Counted = Callable[[int], Reconstruction | None]


def _plan(model: nn.Module, seen: Observation) -> list[tuple[str, Counted, float]]:
    """Return our attacks, as functions of their steps, and their shares of the seconds left.

    Second-order matching has no useful curvature on ReLU, which an attacker knows.
    """
    features = partial(dense_then_invert, model, seen, restarts=1, newton_steps=0)
    weights = FALLING if seen.shape[0] < LARGE else FALLING[:2]
    falling = partial(dlg, model, seen, restarts=1, newton_steps=0, tv=weights)
    plan: list[tuple[str, Counted, float]] = []
    if seen.shape[0] == 1:
        plan.append(("dense_then_invert", lambda n: features(max_evaluations=n), FEATURES))
    if any(isinstance(module, nn.ReLU | Block) for module in model.modules()):
        cosine = partial(cosine_tv, model, seen, restarts=1)
        return [*plan, ("cosine_tv", lambda n: cosine(steps=min(n, stock.STEPS)), 1.0)]
    return [*plan, ("dlg + falling tv", lambda n: falling(max_evaluations=n), 1.0)]


def _each(attack: Counted, budget: float) -> float:
    """Return the processor seconds of a step, by trials that last until the start counts little."""
    attack(1)
    steps = 4
    while True:
        spent = frame.seconds(partial(attack, steps)).cpu
        if spent >= TIMING * budget or steps >= MOST_TIMED:  # an attack may end by itself
            return spent / steps
        steps *= 4


def by_stock(side: str, case: Case) -> dict[str, Any]:
    """Return what a stock attack finds; the image is in [0, 1]."""
    network, shape = case.network, tuple(case.x.shape)
    model, target = case.inside(), case.gradient()
    generator = torch.Generator().manual_seed(case.trial)
    start = time.process_time()
    if side == "Inverting Gradients, as published":
        bounds = ((0 - network.mean) / network.std, (1 - network.mean) / network.std)
        args = model, target, case.y, shape, bounds, case.budget, generator
        x = stock.inverting_gradients(*args)
    else:
        attack = stock.dlg if side == "DLG, as published" else stock.idlg
        x = attack(model, target, shape, case.budget, generator)
    return {"x": x * network.std + network.mean, "seconds": time.process_time() - start}


STOCK = ("Inverting Gradients, as published", "DLG, as published", "iDLG, as published")
SIDES = [OURS, *STOCK, *BREACHING]


def by_breaching(side: str, case: Case, python: Path) -> dict[str, Any]:
    """Return what breaching finds; it runs in an environment of its own."""
    with tempfile.TemporaryDirectory(prefix="audit-peers") as folder:
        job, answer = Path(folder) / "job.npz", Path(folder) / "answer.npz"
        np.savez(
            job,
            network=case.name,
            seed=case.trial,
            mode=BREACHING[side],
            budget=case.budget,
            labels=case.y.numpy(),
            **{f"g{i}": g.numpy() for i, g in enumerate(case.gradient())},
        )
        script = Path(__file__).parent / "audit_peers_breaching.py"
        run([str(python), str(script), str(job), str(answer)])
        with np.load(answer) as found:
            if "error" in found:
                return {"error": str(found["error"])}
            return {"x": torch.from_numpy(found["x"]), "seconds": float(found["seconds"])}


def _decibels(x: Tensor, truth: Tensor) -> list[float]:
    """Return the PSNR of each true image, after the best pairing; an image with NaN is grey."""
    images = x.double().nan_to_num(0.5).clamp(0, 1)
    found: list[float] = psnr(images[match_batch(images, truth)], truth.double()).tolist()
    return found


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per network, batch and side."""
    table = []
    group = ("network", "budget", "batch", "side")
    keys = dict.fromkeys(tuple(r[k] for k in group) for r in runs)
    for values in sorted(keys, key=lambda k: (list(NETWORKS).index(k[0]), *k[1:3])):
        own = [r for r in runs if tuple(r[k] for k in group) == values]
        failed = [r["error"] for r in own if "error" in r]
        done = [r for r in own if "error" not in r]
        scores = [value for r in done for value in r["psnr"]]
        line: dict[str, Any] = dict(zip(group, values, strict=True))
        if failed:
            line["errors"] = {"runs": len(failed), "first": failed[0]}
        if scores:
            above = sum(value >= RECOVERED_DB for value in scores)
            batches = sum(max(r["psnr"]) >= RECOVERED_DB for r in done)
            guesses = [value for r in done for value in r["psnr_of_the_mean_image"]]
            line |= {
                "images": len(scores),
                "batches": len(done),
                "psnr_median": median(scores),
                "psnr_median_95": _spread([r["psnr"] for r in done]),
                "psnr_least": min(scores),
                "psnr_most": max(scores),
                "mean_image_median": median(guesses),
                "recovered": above,
                "batches_with_one_recovered": batches,
                "batch_rate_95": list(wilson(batches, len(done))),
                "cpu_seconds_median": median(r["seconds"] for r in done),
            }
        table.append(line)
    return table


def _spread(batches: list[list[float]]) -> list[float]:
    """Return the 95 % interval of the median by bootstrap over batches, whose images depend."""
    rng = np.random.default_rng(0)
    draws = rng.integers(len(batches), size=(RESAMPLES, len(batches)))
    medians = [median(value for i in draw for value in batches[i]) for draw in draws]
    ends: list[float] = np.quantile(medians, (0.025, 0.975)).tolist()
    return ends


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the summary as Markdown: a row per network, budget and batch, a column per side."""
    head = ["network, batch", "images", "mean image", *SIDES]
    rows: dict[tuple[Any, ...], dict[str, str]] = {}
    for line in lines:
        cells = rows.setdefault((line["network"], line["budget"], line["batch"]), {})
        if "images" not in line:
            cells[line["side"]] = "failed"
            continue
        if line["images"] >= int(cells.get("images", 0)):  # sides may have run on fewer batches
            cells["images"] = str(line["images"])
            cells["mean image"] = f"{line['mean_image_median']:.1f}"
        low, high = line["psnr_median_95"]
        least, most = line["batch_rate_95"]
        spread = f" ({low:.1f} to {high:.1f})" if line["batches"] > 1 else ""
        cells[line["side"]] = (
            f"{line['psnr_median']:.1f}{spread}; {line['batches_with_one_recovered']} of "
            f"{line['batches']} ({least:.0%} to {most:.0%}); {line['cpu_seconds_median']:.0f} s"
        )
    text = []
    for (network, budget, batch), cells in rows.items():
        much = "" if budget == BUDGET else f", {budget:.0f} s"
        text.append([f"{network}, {batch}{much}", *(cells.get(name, "-") for name in head[1:])])
    return frame.markdown(head, text)


KEY = ("network", "batch", "side", "trial", "budget")
Cell = tuple[str, int, str, int, float]
"""What a run is known by."""


def result_of(cell: Cell, python: Path | None) -> dict[str, Any]:
    """Run one side on one batch; ``python`` is the interpreter that has breaching."""
    name, batch, side, trial, budget = cell
    torch.set_num_threads(1)
    images = photographs()
    _warm()
    case = Case(name, trial, *batch_of(images, batch, trial), budget)
    if side in BREACHING and python is not None:
        found = by_breaching(side, case, python)
    else:
        found = ours(case) if side == OURS else by_stock(side, case)
    row = dict(zip(KEY, cell, strict=True)) | {"machine": frame.where()}
    if "error" in found:
        return row | found
    guess = images.mean(0).expand_as(case.x).double()
    return row | {
        "psnr": _decibels(found.pop("x"), case.x),
        "psnr_of_the_mean_image": psnr(guess, case.x.double()).tolist(),
        **found,
    }


@cache
def _warm() -> None:
    """Differentiate twice, once per process: the first time costs seconds of its own."""
    by_stock("DLG, as published", Case("LeNet, sigmoid", 0, *batch_of(photographs(), 1, 0), 0.1))


def main() -> None:
    """Run what is missing, trial by trial, and write the results after each run."""
    quick = {"networks": ["LeNet, sigmoid"], "batches": [1], "trials": 1, "budget": 0.5}
    given = frame.options(
        __doc__,
        RESULT.name,
        quick=quick | {"sides": [OURS, *STOCK]},
        networks=frame.among(NETWORKS),
        batches=tuple(TRIALS),
        trials=max(TRIALS.values()),
        sides=frame.among(SIDES),
        budget=BUDGET,
        processes=1,
        breaching={"type": Path, "help": "interpreter that has it"},
    )
    result = frame.Result(
        given.result, "torch", "numpy", "scipy", indent=1, processes=given.processes
    )
    settings = {"features": FEATURES, "success_db": RECOVERED_DB}
    runs = result.old["runs"] if result.old.get("settings") == settings else []
    python, versions = None, result.old.get("breaching", {})
    if set(given.sides) & set(BREACHING):
        try:
            known = given.breaching
            env = installed(known, "breaching") if known else environment("breaching")
            python, versions = env.python, env.versions
        except NotInstalledError as error:
            versions = {"left_out": f"not installed: {error}"}
            frame.show("breaching", versions)
    have = {tuple(r[k] for k in KEY) for r in runs}
    todo = [
        cell
        for cell in cells(given)
        if cell not in have and (python is not None or cell[2] not in BREACHING)
    ]
    for row in frame.finished([partial(result_of, cell, python) for cell in todo], given.processes):
        runs.append(row)
        result.write(
            method=__doc__, breaching=versions, settings=settings, table=summary(runs), runs=runs
        )
    print(table(summary(runs)))


def cells(given: Any) -> Iterator[Cell]:
    """Return every run that the options ask for: all sides of a batch, batch after batch."""
    for trial, name, batch, side in product(
        range(given.trials), given.networks, given.batches, given.sides
    ):
        alone = side.startswith("iDLG") and batch > 1
        if trial < TRIALS.get(batch, given.trials) and not alone:
            yield name, batch, side, trial, given.budget


if __name__ == "__main__":
    main()
