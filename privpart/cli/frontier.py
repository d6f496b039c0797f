"""``privpart frontier``: what to freeze, by a study of arms that were tuned alike."""

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting.report import up
from privpart.cli import options
from privpart.cli.options import Format
from privpart.cli.output import Table, as_csv, print_all
from privpart.cli.trainings import (
    NOT_PRIVATE,
    JobsOption,
    Trainings,
    delta_warnings,
    print_results,
    processes,
    tell_of_code,
    train_stages,
)

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from collections.abc import Mapping, Sequence

    from privpart.study.runner import Runner
    from privpart.study.stages import ChosenPoint
    from privpart.study.store import Store
    from privpart.study.study_file import Group, Study

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
    jobs: JobsOption = None,
    device: Annotated[
        str,
        typer.Option(
            help="Where clients are computed: 'cpu', or an accelerator such as 'cuda', which the "
            "processes share."
        ),
    ] = "cpu",
    audit: Annotated[
        bool,
        typer.Option(
            "--audit", help="Also attack, by a short search, what a client of each arm sends."
        ),
    ] = False,
    html: options.HtmlOption = None,
    form: options.FormatOption = "table",
) -> None:
    """Compare parts of a model under privacy, each tuned by the same budget: what to freeze.

    Each arm, at each level of noise, tries the same points of the tuning space, measured on
    held-out users. The best one is then trained with the final seeds and tested. The same command
    again resumes: finished trainings are kept. With a table freeze in place of arms, FedPT's four
    steps search for the layers to freeze.

    Example: privpart frontier examples/study_digits.toml --out study -j 2
    """
    from privpart.engines.options import EngineOptions
    from privpart.study.runner import Runner
    from privpart.study.stages import layers_of, next_arm
    from privpart.study.store import Store
    from privpart.study.study_file import read_study
    from privpart.training.training import training

    study = read_study(file)
    runner = Runner(processes(jobs), options=EngineOptions(device=device))
    with runner, Store(out, create=True) as store:
        trainings = _train(study, runner, store, out)
        layers = {}
        if study.file.freeze:
            plan = study.final_cells(study.groups[0], study.points[0])[0].plan
            layers = layers_of(training(plan, report=lambda _: None).model.module)
        while layers and (longer := next_arm(study, layers, store.results())):
            study = longer
            trainings = _train(study, runner, store, out)
        missing = _show(study, store, out, form, html, audit=audit)
    trainings.refuse_no_result(missing)


def _train(study: "Study", runner: "Runner", store: "Store", out: Path) -> Trainings:
    from privpart.study.stages import AXES, remaining, stages

    cells = study.checked_cells()
    tell_of_code(*(cell.plan for cell in cells))
    rounds = remaining(study, store)
    if rounds:
        runner.check(cells)
    typer.echo(
        f"{len(study.groups)} groups of {study.trials} trials and {len(study.file.final.seeds)} "
        f"final seeds; {rounds:,} rounds to train. {NOT_PRIVATE}",
        err=True,
    )
    store.describe(AXES)
    return train_stages(stages(study, store), runner, store, out, rounds)


def _show(
    study: "Study", store: "Store", out: Path, form: Format, html: Path | None, *, audit: bool
) -> str:
    """Print and write the tables; return what is missing, "" if nothing is."""
    from privpart.cli.pages.plots import draw_frontier
    from privpart.study.frontier import final_rows, reached_of, rows_of, tuning_rows
    from privpart.study.stages import chosen_points, frozen_arm

    results = store.results()
    chosen, reached = chosen_points(study, results), reached_of(study, results)
    by_arm = _by_arm(study, chosen, audit=audit)
    rows = [
        {**row, **by_arm[row["arm"]], "plan_hash": r.any.plan_hash}
        for row, r in zip(rows_of(study, reached), reached, strict=True)
    ]
    tables = {
        "tuning": list(tuning_rows(study, results)),
        "final": list(final_rows(reached)),
        "frontier": rows,
    }
    for name, table in tables.items():
        if table:
            (out / f"{name}.csv").write_text(as_csv(table), encoding="utf-8")
    if rows:
        draw_frontier(rows, study.file.title or "Study", out)
    document: dict[str, Any] = {
        "schema": "privpart/frontier/1",
        "study": study.hash,
        "rows": rows,
        "notes": [NOT_PRIVATE, TUNED, *delta_warnings(store)],
    }
    if study.file.freeze and len(chosen) == len(study.groups):
        arm = frozen_arm(study, results)
        result = {"arm": arm, "train": study.arms[arm]["model.train"]}
        document["freeze"] = {"tolerance": study.file.freeze.tolerance, **result}
    text = json.dumps(document, indent=2, allow_nan=False)
    (out / "study.json").write_text(text, encoding="utf-8")
    printed = _tables(document)
    print_results(document, form, store, lambda: print_all(printed))
    if html is not None:
        _write_page(study, printed, out, html)
    if study.file.freeze and "freeze" not in document:
        return "the search for what to freeze has ended early"
    return "" if rows else "no arm has a result"


def _by_arm(
    study: "Study", chosen: "Mapping[Group, ChosenPoint]", *, audit: bool
) -> dict[str, dict[str, Any]]:
    """Return columns that do not depend on the noise: what a client sends and spends."""
    from privpart.cli.frontier_leakage import NOT_AUDITED, leakage_of
    from privpart.training.costs import client_side
    from privpart.training.task_data import read_task

    read = lru_cache(maxsize=1)(read_task)
    columns: dict[str, dict[str, Any]] = {}
    for group, best in chosen.items():
        if group.arm in columns:
            continue
        typer.echo(f"measuring a client of {group.arm} ...", err=True)
        plan = study.final_cells(group, best.point)[0].plan
        columns[group.arm] = client_side(plan, read)
        if audit:
            typer.echo(f"attacking an update of {group.arm} ...", err=True)
            try:
                leakage, reason = leakage_of(plan, read), _NOT_FOR_AUDIT
            except (RuntimeError, TypeError, ValueError) as error:  # in a network of one's own
                leakage = NOT_AUDITED
                reason = f"not audited, in 64 bits the network fails: {error}"
            columns[group.arm] |= leakage
            if leakage["leakage"] == NOT_AUDITED["leakage"]:
                typer.echo(reason, err=True)
    return columns


def _write_page(study: "Study", tables: "Sequence[Table | str]", out: Path, html: Path) -> None:
    from privpart.cli.pages.decision import tables_page
    from privpart.cli.pages.page import Picture

    pictures = [
        Picture(file.read_bytes(), f"The table, by {by}.", f"By {by}; intervals over seeds.")
        for by in ("epsilon", "bytes")
        if (file := out / f"accuracy-{by}.png").exists()
    ]
    title = study.file.title or "Study: what to train"
    answer = "Simulations: their noise comes from seeds, so none of the models is private"
    tables_page(title, tables, answer=answer, tone="caution", pictures=pictures).write(html)


def _tables(document: dict[str, Any]) -> "list[Table | str]":
    rows = []
    for row in document["rows"]:
        difference = ""
        if row["verdict"] not in (None, "reference"):
            ends = row["difference_low"], row["difference_high"]
            difference = _interval(row["difference"], *ends, sign="+")
        rows.append(
            (
                row["arm"],
                row["mechanism"],
                "no guarantee" if row["epsilon"] is None else up(row["epsilon"], 4),
                f"{row['noise_multiplier']:.4g}",
                f"{row['bytes_up']:,}",
                _interval(row["metric"], row["low"], row["high"]),
                difference,
                row["verdict"] or "",
            )
        )
    header = ("arm", "mechanism", "epsilon", "z", "bytes up", "metric", "to the first arm", "")
    tables: list[Table | str]
    tables = [Table("Intervals are Student's t at 95 % over seeds", header, rows)]
    audited = {row["arm"]: row for row in document["rows"] if "leakage" in row}
    leaks = []
    for arm, row in audited.items():
        values = (row[name] for name in ("leakage_psnr", "leakage_baseline"))
        decibels = ("" if value is None else f"{value:.1f}" for value in values)
        rank = row["leakage_rank"] or ""
        leaks.append((arm, row["leakage"], *decibels, rank, row["inputs_read"]))
    if leaks:
        columns = ("arm", "verdict", "dB", "dB without attack", "rank", "inputs read")
        tables.append(Table("One image's update, before noise", columns, leaks))
    if search := document.get("freeze"):
        patterns = ", ".join(f'"{pattern}"' for pattern in search["train"])
        tables.append(f"The search ends with the arm {search['arm']}: train = [{patterns}]")
    private, tuned, *warnings = document["notes"]
    return [*tables, f"{tuned} {private}", *(f"Warning: {warning}" for warning in warnings)]


def _interval(centre: float, low: float | None, high: float | None, sign: str = "") -> str:
    ends = "" if low is None or high is None else f" [{low:{sign}.4f}, {high:{sign}.4f}]"
    return f"{centre:{sign}.4f}{ends}"
