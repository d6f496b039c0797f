"""``privpart frontier``: what to freeze, by a study of arms that were tuned alike."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import ConfigError, checks
from accounting.report import up
from privpart.cli import options
from privpart.cli.options import Format
from privpart.cli.output import as_csv, plain_console
from privpart.cli.progress import trainings_told
from privpart.cli.sweep import NOT_PRIVATE, delta_warnings, processors

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from collections.abc import Mapping

    from privpart.cli.progress import TrainingsTold
    from privpart.experiment.study.frontier import Reached
    from privpart.experiment.study.stages import ChosenPoint
    from privpart.experiment.study.study_file import Group, Study
    from privpart.experiment.sweep import CellTrainer, Outcome
    from privpart.experiment.sweep_file import Cell
    from privpart.experiment.sweep_store import CellResult, SweepStore

_WIDTH = 132  # characters of the table
_NOT_FOR_AUDIT = (
    "not audited: clients select, their loss is not cross-entropy, or their examples are not "
    "images with values in [0, 1] and a label each. See privpart audit leakage."
)
TUNED = (
    "Values were chosen on held-out users, who are public and whom nothing else uses; no test "
    "example was read for a choice. Chosen on the clients' own data, each trial would be a release "
    "that no epsilon here covers."
)


def frontier(
    file: Annotated[
        Path, typer.Argument(help="TOML file with a base plan, arms, levels of noise and a tuning.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the study.")],
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", help="Processes; by default one per processor.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="Where clients are computed: 'cpu', or an accelerator such as 'cuda', which the "
            "processes share."
        ),
    ] = "cpu",
    tune_only: Annotated[
        bool, typer.Option("--tune-only", help="Choose values, and test nothing.")
    ] = False,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit", help="Also attack, by a short search, what a client of each arm sends."
        ),
    ] = False,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Compare parts of a model under privacy, each tuned by the same budget: what to freeze.

    Each arm, at each level of noise, tries the same points of the tuning space, measured on
    held-out users. The best one is then trained with the final seeds and tested. The same command
    again resumes: finished trainings are kept.

    Example: privpart frontier examples/study_digits.toml --out study -j 2
    """
    jobs = checks.count("jobs", jobs if jobs is not None else processors())
    from privpart.engines.options import EngineOptions
    from privpart.experiment.study.study_file import read_study
    from privpart.experiment.sweep import CellTrainer
    from privpart.experiment.sweep_store import SweepStore

    study = read_study(file)
    trainer = CellTrainer(jobs, options=EngineOptions(device=device))
    with (
        SweepStore(out / "tune", create=True) as tuned,
        SweepStore(out / "final", create=True) as final,
    ):
        told = _train(study, trainer, tuned, final, out, tune_only=tune_only)
        found = _show(study, tuned, final, out, form, audit=audit, tune_only=tune_only)
    told.refuse_no_result()
    if not found:
        _refuse_no_result(told.failures, tune_only=tune_only)


def _train(
    study: "Study",
    trainer: "CellTrainer",
    tuned: "SweepStore",
    final: "SweepStore",
    out: Path,
    *,
    tune_only: bool,
) -> "TrainingsTold":
    from privpart.cli.train import tell_of_code
    from privpart.experiment.study.stages import remaining, run_study

    first = study.points[0]
    cells = [c for g in study.groups for c in study.tuning_cells(g, 0, first)]
    cells += [c for g in study.groups for c in study.final_cells(g, first)]
    plans = [cell.candidates[0] for cell in cells]
    for plan in {tuple(plan.references().items()): plan for plan in plans}.values():
        tell_of_code(plan)
    rounds = remaining(study, tuned, final, tune_only=tune_only)
    if rounds:
        trainer.check(cells)
    trials, seeds = study.trials, len(study.file.final.seeds)
    typer.echo(
        f"{len(study.groups)} groups of {trials} trials and {seeds} final seeds; {rounds:,} rounds "
        f"to train. {NOT_PRIVATE}",
        err=True,
    )
    with trainings_told(rounds, out) as told, trainer:

        def finished(cell: "Cell", outcome: "Outcome") -> None:
            stage = "tuning" if "trial" in cell.labels else "final"
            told.trained(cell, outcome, f"trained, {stage}")

        run_study(
            study,
            trainer,
            tuned,
            final,
            tune_only=tune_only,
            advanced=told.advanced,
            finished=finished,
        )
    return told


def _refuse_no_result(failures: "list[str]", *, tune_only: bool) -> None:
    """Raise the error of a study without a result: the chosen values, or the table.

    Raises:
        ConfigError: no metric was finite, or each training that failed was refused.
        WorkerError: a training failed otherwise.
    """
    from privpart.experiment.sweep import error_of_failures

    said = "no arm has chosen values" if tune_only else "no arm has a result"
    if failures:
        raise error_of_failures(
            failures, f"{said}; {len(failures)} trainings failed, the first with"
        )
    raise ConfigError(f"{said}: no metric was finite. Lower the learning rates.")


def _show(
    study: "Study",
    tuned: "SweepStore",
    final: "SweepStore",
    out: Path,
    form: Format,
    *,
    audit: bool,
    tune_only: bool,
) -> bool:
    """Print and write the tables; return whether there is what was asked for."""
    from privpart.experiment.study.frontier import final_rows, rows_of, tuning_rows
    from privpart.experiment.study.stages import chosen_point, trials_of

    done = tuned.results()
    trials = {group: trials_of(study, group, done) for group in study.groups}
    found = {group: chosen_point(study, group, done) for group in study.groups}
    chosen = {group: best for group, best in found.items() if best is not None}
    reached = _reached(study, chosen, done, final.results())
    by_arm = _by_arm(study, chosen, audit=audit)
    rows = [
        {**row, **by_arm[row["arm"]], "plan_hash": own.any.plan_hash, "client_machine": _machine()}
        for row, own in zip(rows_of(study, reached), reached, strict=True)
    ]
    tables = {
        "tuning": list(tuning_rows(study, trials, done, chosen)),
        "final": list(final_rows(reached)),
        "frontier": rows,
    }
    for name, table in tables.items():
        if table:
            (out / f"{name}.csv").write_text(as_csv(table), encoding="utf-8")
    if rows:
        from privpart.cli.pages.plots import draw_frontier

        draw_frontier(rows, study.file.title or "Study", out)
    document = {
        "schema": "privpart/frontier/1",
        "study": study.hash,
        "rows": rows,
        "notes": [NOT_PRIVATE, TUNED, *delta_warnings(final)],
    }
    (out / "study.json").write_text(
        json.dumps(document, indent=2, allow_nan=False), encoding="utf-8"
    )
    if form is Format.JSON:
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    elif form is Format.CSV:
        typer.echo(as_csv(rows) if rows else "", nl=False)
    else:
        _print_table(rows, delta_warnings(final))
    for store in (tuned, final):
        for labels, seed, error in store.errors():
            typer.echo(f"privpart: failed: {labels}, seed {seed}: {error}", err=True)
    return bool(chosen if tune_only else rows)


def _reached(
    study: "Study",
    chosen: "dict[Group, ChosenPoint]",
    tuned: "Mapping[str, CellResult]",
    results: "Mapping[str, CellResult]",
) -> "list[Reached]":
    from privpart.experiment.study.frontier import Reached
    from privpart.experiment.study.stages import trials_of

    found = []
    for group, best in chosen.items():
        cells = study.final_cells(group, best.point)
        by_seed = {
            cell.seed: results[cell.key]
            for cell in cells
            if cell.key in results and _finite(results[cell.key].accuracy)
        }
        spent = sum(
            tuned[cell.key].cpu_seconds
            for trial in trials_of(study, group, tuned)
            for cell in trial.cells
        )
        spent += sum(result.cpu_seconds for result in by_seed.values())
        if by_seed:
            found.append(Reached(group, best, by_seed, spent))
    return found


def _finite(metric: float | None) -> bool:
    return metric is not None and math.isfinite(metric)  # a store keeps NaN as None


def _by_arm(
    study: "Study", chosen: "dict[Group, ChosenPoint]", *, audit: bool
) -> dict[str, dict[str, Any]]:
    """Return columns that do not depend on the noise: what a client sends and spends."""
    from functools import lru_cache

    from privpart.cli.frontier_leakage import NOT_AUDITED, leakage_of
    from privpart.experiment.study.client_side import client_side
    from privpart.experiment.task_data import read_task

    read = lru_cache(maxsize=1)(read_task)
    found: dict[str, dict[str, Any]] = {}
    for group, best in chosen.items():
        if group.arm not in found:
            typer.echo(f"measuring a client of {group.arm} ...", err=True)
            plan = study.final_cells(group, best.point)[0].candidates[0]
            found[group.arm] = client_side(plan, read).columns()
            if audit:
                typer.echo(f"attacking an update of {group.arm} ...", err=True)
                try:
                    leakage, why = leakage_of(plan, read), _NOT_FOR_AUDIT
                except (RuntimeError, TypeError, ValueError) as error:  # in a network of one's own
                    leakage, why = (
                        NOT_AUDITED,
                        f"not audited, in 64 bits the network fails: {error}",
                    )
                found[group.arm] |= leakage
                if leakage["leakage"] == NOT_AUDITED["leakage"]:
                    typer.echo(why, err=True)
    return found


def _machine() -> str:
    import platform

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, Python {platform.python_version()}"


def _print_table(rows: list[dict[str, Any]], warnings: list[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console = plain_console(_WIDTH)
    table = Table(box=SIMPLE_HEAD)
    for column in ("mechanism", "arm"):
        table.add_column(column)
    for column in ("epsilon", "z", "bytes up", "metric", "to the first arm", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["mechanism"],
            row["arm"],
            "no guarantee" if row["epsilon"] is None else up(row["epsilon"], 4),
            f"{row['noise_multiplier']:.4g}",
            f"{row['bytes_up']:,}",
            _interval(row["metric"], row["low"], row["high"]),
            "" if row["verdict"] in (None, "reference") else _signed(row),
            row["verdict"] or "",
        )
    console.print(table)
    if audited := {row["arm"]: row for row in rows if "leakage" in row}:
        table = Table(
            box=SIMPLE_HEAD, title="One image's update, before noise", title_justify="left"
        )
        for column in ("arm", "verdict", "dB", "dB without attack", "rank", "inputs read"):
            table.add_column(column)
        for arm, row in audited.items():
            scores = [row["leakage_psnr"], row["leakage_baseline"]]
            told = ["" if score is None else f"{score:.1f}" for score in scores]
            rank = row["leakage_rank"] or ""
            table.add_row(arm, row["leakage"], *told, rank, row["inputs_read"])
        console.print(table)
    typer.echo(f"Intervals are Student's t at 95 % over seeds. {TUNED} {NOT_PRIVATE}")
    for warning in warnings:
        typer.echo(f"Warning: {warning}")


def _interval(centre: float, low: float | None, high: float | None) -> str:
    return f"{centre:.4f}" + ("" if low is None or high is None else f" [{low:.4f}, {high:.4f}]")


def _signed(row: dict[str, Any]) -> str:
    low, high = row["difference_low"], row["difference_high"]
    ends = "" if low is None else f" [{low:+.4f}, {high:+.4f}]"
    return f"{row['difference']:+.4f}{ends}"
