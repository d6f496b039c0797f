"""``privpart demo``: train, account and audit on real data, and say what the results mean.

The trainings are a sweep over noise and trained part, ``study/plans/digits.toml``. Its three
tables, budget, accuracy and leakage, are each followed by what they mean.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median, stdev
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import checks
from accounting.checks import ConfigError
from accounting.report import up
from privpart.cli.output import WIDTH, Table, print_all
from privpart.cli.trainings import processes, shown_trainings
from privpart.engines.options import EngineOptions

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from rich.progress import Progress

    from accounting import PrivacyReport
    from attacks import LeakageReport
    from privpart.study.cell import BasePlan, Cell
    from privpart.study.runner import Outcome
    from privpart.study.sweep import SweepFile
    from privpart.training.plan_file import PlanFile
    from privpart.training.task_data import PlanData

AUDITED_IMAGES = 4
_SEED = 0
"""Of the attacks, and the first of the trainings."""
ENGINE = EngineOptions(batching="vmap")
"""Vectorized clients take less than half of the processor time of one client after another, on both
networks. With "auto", the numbers would depend on how busy the machine is."""
_PLAN = Path(__file__).parents[1] / "study" / "plans" / "digits.toml"


def demo(
    out: Annotated[Path, typer.Option(help="Folder for report.json and the pictures.")] = Path(
        "out"
    ),
    seeds: Annotated[
        int, typer.Option(help="Trainings per noise level and part; the first has seed 0.")
    ] = 5,
) -> None:
    """Train full and partial models at several noise levels; report privacy and leakage.

    It takes about a minute on two cores.
    """
    checks.count("seeds", seeds)
    file, base = sweep_file(range(seeds))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be made: {error.strerror}.") from None

    from privpart.cli.pages import plots
    from privpart.study.runner import Runner
    from privpart.study.sweep import sweep_of
    from privpart.training.task_data import plan_data

    cells = sweep_of(file, base).cells
    plan = cells[0].plan
    examples = plan_data(plan.data, plan.model.network())
    with (
        shown_trainings(sum(cell.plan.privacy.rounds for cell in cells)) as trainings,
        Runner(processes(None), options=ENGINE) as runner,
    ):
        runner.train(cells, trainings.finished, trainings.advanced)
        audits = _audit(examples, trainings.progress)
    if trainings.failures:
        trainings.refuse_no_result("the demo is incomplete")
    levels = {cell.labels["noise"]: cell.plan for cell in cells}.values()
    budgets = [
        level.privacy_plan().report(level.privacy.delta, noise_source="seeded")
        for level in levels
        if level.privacy.noise_multiplier
    ]
    rows = _rows(cells, trainings.outcomes)
    report = {
        "schema": "privpart/demo/1",
        "version": version("privpart"),
        "noise_source": "seeded: not private",
        "seed": _SEED,
        "recipe": file.model_dump(mode="json", by_alias=True),
        "budget": [budget.to_dict() for budget in budgets],
        "accuracy": rows,
        "leakage": {name: _without_times(audit) for name, audit in audits.items()},
        "notes": _notes(plan),
    }
    (out / "report.json").write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    plots.draw_accuracy(rows, budgets, out / "accuracy.png")
    plots.draw_reconstructions(list(audits.values()), out / "leakage.png")
    print_all(_tables(plan, budgets, rows, audits))
    typer.echo(f"\nWritten: {out / 'report.json'}, {out / 'accuracy.png'}, {out / 'leakage.png'}")


def sweep_file(seeds: Sequence[int]) -> "tuple[SweepFile, BasePlan]":
    """Return the trainings of the demo, with these seeds."""
    from privpart.study.cell import read_file
    from privpart.study.sweep import SweepFile

    file, base = read_file(_PLAN, SweepFile, "sweep")
    return file.model_copy(update={"seeds": list(seeds)}), base


def _rows(cells: "Sequence[Cell]", results: "Mapping[str, Outcome]") -> list[dict[str, Any]]:
    """Return a row per part and noise level: test accuracy in [0, 1], over the seeds."""
    from privpart.training.costs import message_bytes

    points: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        points.setdefault((cell.labels["part"], cell.labels["noise"]), []).append(cell)
    rows = []
    for (part, _), group in points.items():
        done: list[Any] = [results[cell.key] for cell in group]
        accuracies = [result.accuracy for result in done]
        rows.append(
            {
                "part": part,
                "noise_multiplier": done[0].noise_multiplier,
                "seeds": [cell.seed for cell in group],
                "accuracies": accuracies,
                "trained": done[0].trained,
                "update_bytes": message_bytes(group[0].plan.model.partial()),
                "numbers": done[0].parameter_count,
                "mean": mean(accuracies),
                "standard_deviation": stdev(accuracies) if len(accuracies) > 1 else None,
            }
        )
    return rows


def _audit(examples: "PlanData", progress: "Progress") -> dict[str, "LeakageReport"]:
    """Attack an untrained convolutional network and a dense one, one image at a time."""
    import torch

    from attacks import leakage, suite
    from attacks.networks import smooth_lenet, smooth_mlp

    torch.set_num_threads(1)  # the last digits depend on the number of threads
    size = examples.test_x.shape[-1]
    generator = torch.Generator().manual_seed(_SEED)
    views = {"full": ["*"], "all but dense1": ["conv*", "dense2.*"]}
    views |= {"conv2 only": ["conv2.*"], "conv1 only": ["conv1.*"]}
    dense = {"first layer only": ["dense1.*"], "last layer only": ["dense2.*"]}
    networks = {
        "conv net": (smooth_lenet(generator, size=size), views),
        "dense net": (smooth_mlp(generator, size=size), dense),
    }
    bar, shown = progress.add_task("audit", total=6 * AUDITED_IMAGES), set[str]()

    def advance(name: str, step: str) -> None:
        line = f"audit ({name}, {step.split('/')[1]})"
        if not progress.console.is_terminal and line not in shown:  # a log has no bar
            shown.add(line)
            typer.echo(line, err=True)
        progress.update(bar, advance=1, description=f"audit ({name}, {step})")

    return {
        name: leakage(
            network,
            examples.test_x[:AUDITED_IMAGES],
            examples.test_y[:AUDITED_IMAGES],
            views=views,
            dataset_mean=examples.users.x.mean(dim=0),
            attacks=suite(restarts=2, max_evaluations=300, newton_steps=0, steps=0, tv=0),
            seed=_SEED,
            progress=partial(advance, name),
        )
        for name, (network, views) in networks.items()
    }


def _without_times(audit: "LeakageReport") -> dict[str, Any]:
    """Return a report without the times, which differ between equal runs."""
    report = audit.to_dict()
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in report["rows"]]
    return report | {"rows": rows}


def _tables(
    plan: "PlanFile",
    budgets: "Sequence[PrivacyReport]",
    accuracies: Sequence[Mapping[str, Any]],
    audits: "Mapping[str, LeakageReport]",
) -> list[Table | str]:
    budget_note, accuracy_note, leakage_note, limits = _notes(plan)
    budgeted = []
    for b in budgets:
        costs = f"{b.sensitivity_squared:g}", up(b.mu, 4), up(b.epsilon, 4), f"{b.delta:g}"
        budgeted.append((f"{b.noise_multiplier:g}", *costs, f"{b.unit}, {b.adjacency}"))
    budget = Table(
        f"1. Budget: one tree over {plan.privacy.rounds} rounds, {plan.data.users} users taking "
        f"part at most once, clip norm {plan.privacy.clip_norm:g}",
        ("noise multiplier", "sensitivity^2", "mu", "epsilon", "delta", "unit, adjacency"),
        [("0", "", "", "no guarantee", "", ""), *budgeted],
    )
    leaked = []
    for name, row in ((name, row) for name, audit in audits.items() for row in audit.rows):
        baseline = median(trial.baseline for trial in row.best)
        decibels = (f"{value:.1f}" for value in (median(row.psnr), max(row.psnr), baseline))
        visible = f"{row.visible:,} ({row.share:.0%})"
        leaked.append((name, row.view, visible, *decibels, row.verdict))
    images = len(next(iter(audits.values())).truth)
    leakage = Table(
        f"3. Leakage by view: PSNR in dB over {images} images, against images that need no attack",
        ("network", "view", "parameters seen", "median", "max", "best baseline", "verdict"),
        leaked,
    )
    return [
        budget,
        fill(budget_note, WIDTH) + "\n",
        _accuracies(budgets, accuracies),
        fill(_cost_note(accuracies) + " " + accuracy_note, WIDTH) + "\n",
        leakage,
        fill(leakage_note, WIDTH) + "\n\n" + fill(limits, WIDTH),
    ]


def _notes(plan: "PlanFile") -> list[str]:
    """Return what each of the three tables means, and then what none of them shows."""
    return [
        f"What it means: this bounds how much all {plan.privacy.rounds} released models together "
        "depend on any one user. It is the same for full and for partial training: the cost "
        "depends on the noise multiplier and on how often a user takes part, not on how many "
        "parameters train.",
        "Each figure is a mean and standard deviation over seeds; full and partial share seeds. "
        "Differences below their standard deviation mean nothing.",
        "What it means: the attacker is an honest-but-curious server that sees one gradient of one "
        "image at untrained weights, without clipping or noise, and knows the network, the frozen "
        "part and the label. The score of a view is the best over itself and the views inside it, "
        "because an attacker who sees more may ignore some of it. 'recovered' means at least 30 dB "
        "and 3 dB above the best image that needs no attack. 'ambiguous' does not mean safe: the "
        "gradients match but do not determine the image, and a prior on images may. Fewer "
        "parameters do not mean less leakage.",
        f"What this does not show: {plan.data.users} simulated users cannot give a meaningful "
        "user-level epsilon at high accuracy; only the mechanics and the trade-off are real. "
        "The noise comes from a seed, so these models are not private. Learning rates and clip "
        "norm were chosen by hand, for digits on these test images; no epsilon covers that. "
        "Decibels certify nothing, and are never converted into an epsilon.",
    ]


def _accuracies(
    budgets: "Sequence[PrivacyReport]", accuracies: Sequence[Mapping[str, Any]]
) -> Table:
    epsilon = {b.noise_multiplier: up(b.epsilon, 4) for b in budgets}
    seeds = accuracies[0]["seeds"]
    by_cell = {(row["part"], row["noise_multiplier"]): row["accuracies"] for row in accuracies}
    rows = []
    for z in dict.fromkeys(row["noise_multiplier"] for row in accuracies):
        full, partial = by_cell["full", z], by_cell["partial", z]
        paired = [p - f for p, f in zip(partial, full, strict=True)]
        result = (_percent(full), _percent(partial), _percent(paired, sign="+"))
        rows.append((f"{z:g}", epsilon.get(z, "no guarantee"), *result))
    return Table(
        f"2. Test accuracy (%) by noise, seeds {seeds[0]} to {seeds[-1]}",
        ("noise multiplier", "epsilon", "full", "partial", "partial - full"),
        rows,
    )


def _percent(values: Sequence[float], sign: str = "") -> str:
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * mean(values):{sign}.1f}{spread}"


def _cost_note(accuracies: Sequence[Mapping[str, Any]]) -> str:
    by_part = {row["part"]: row for row in accuracies}
    full, partial = by_part["full"]["update_bytes"], by_part["partial"]["update_bytes"]
    trained, count = by_part["partial"]["trained"], by_part["partial"]["numbers"]
    return (
        f"What it means: partial training changes {trained:,} of {count:,} parameters "
        f"({trained / count:.1%}); the others are rebuilt from a seed. A client sends {partial:,} "
        f"bytes instead of {full:,}, {full / partial:.1f} times less."
    )
