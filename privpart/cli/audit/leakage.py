"""``privpart audit leakage``: what an adversary recovers from a whole update and from its parts."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import checks
from accounting.checks import ConfigError
from privpart.cli.audit import options as opt
from privpart.cli.options import Format

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from attacks import LeakageReport

THRESHOLD_PASSED = 4


class FailOn(StrEnum):
    """Verdicts from the most severe on."""

    RECOVERED = "recovered"
    PARTIAL = "partial"
    AMBIGUOUS = "ambiguous"


def leakage(
    model: opt.Model,
    data: opt.Data,
    view: Annotated[
        list[str],
        typer.Option(help="'full', a pattern as 'dense1.*', or NAME=PATTERN,PATTERN; repeatable."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for report.json, leakage.png and trials/.")],
    trials: opt.Trials = 10,
    batch: opt.Batch = 1,
    weights: opt.Weights = None,
    gradient: Annotated[
        Path | None,
        typer.Option(help=".safetensors with an update of your own, of the first --batch images."),
    ] = None,
    data_dir: opt.DataDir = None,
    schedule: Annotated[
        str | None, typer.Option(help="Rounds by view, as 'full:5,head:20'; reports the worst.")
    ] = None,
    mode: opt.ModeOption = opt.Mode.TRAIN,
    local_steps: opt.LocalStepsCount = 0,
    learning_rate: opt.LearningRate = 0.1,
    optimizer: opt.OptimizerOption = opt.Optimizer.SGD,
    momentum: opt.Momentum = 0.0,
    clip: Annotated[
        float | None, typer.Option(help="Joint L2 bound on the update.", rich_help_panel=opt.CLIENT)
    ] = None,
    noise_multiplier: Annotated[
        float,
        typer.Option(
            help="Noise standard deviation / clip; 0 is none.", rich_help_panel=opt.CLIENT
        ),
    ] = 0.0,
    delta: opt.Delta = 1e-5,
    hide_labels: opt.HideLabels = False,
    effort: opt.EffortOption = opt.Effort.NORMAL,
    attack: opt.Only = None,
    decoys: Annotated[
        int, typer.Option(help="Images to hide the truth among.", rich_help_panel=opt.ATTACK)
    ] = 50,
    seed: opt.Seed = 0,
    fail_on: Annotated[
        FailOn | None, typer.Option(help="Exit with 4 at this verdict or a more severe one.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="table or json.")] = Format.TABLE,
) -> None:
    """Attack the update of each batch, per view, and say what may be concluded.

    Interrupted with Ctrl-C, the same command goes on where it stopped.
    """
    checks.count("trials", trials)
    checks.count("decoys", decoys, minimum=0)
    if form is Format.CSV:
        raise ConfigError("format=csv: the report is nested; use table or json.")
    typed = {k: v for k, v in locals().items() if k not in ("out", "form", "fail_on")}
    report = _run(out, typed)
    _write(report, out, form)
    if fail_on is not None and _at_least(report, fail_on):
        typer.echo(f"privpart: {report.verdict}: threshold {fail_on.value} passed.", err=True)
        raise typer.Exit(THRESHOLD_PASSED)


def _run(out: Path, typed: dict[str, Any]) -> "LeakageReport":
    import attacks
    from privpart.cli.audit.inputs import rounds, views
    from privpart.cli.audit.run import prepared, resumable

    inputs, options, done = prepared(out, typed)
    shown = views(typed["view"])
    adversaries = 2 if typed["noise_multiplier"] else 1
    with resumable(done, adversaries * len(shown) * inputs.batches) as progress:
        return attacks.leakage(
            inputs.model,
            inputs.x,
            inputs.y,
            views=shown,
            update=inputs.update,
            clip=typed["clip"],
            noise_multiplier=typed["noise_multiplier"],
            schedule=rounds(typed["schedule"]),
            done=done,
            progress=progress,
            **options,
        )


def _write(report: "LeakageReport", out: Path, form: Format) -> None:
    from attacks import picture
    from privpart.cli.audit import tables

    text = json.dumps(report.to_dict(), indent=2, allow_nan=False)
    (out / "report.json").write_text(text + "\n")
    picture.grid([report], out / "leakage.png")
    if form is Format.JSON:
        typer.echo(text)
    else:
        tables.show(report)
    for warning in tables.warnings(report):
        typer.echo(f"privpart: warning: {warning}", err=True)
    typer.echo(f"privpart: written: {out / 'report.json'}, {out / 'leakage.png'}", err=True)


def _at_least(report: "LeakageReport", threshold: FailOn) -> bool:
    from attacks.report import VERDICTS

    return VERDICTS.index(report.verdict) <= VERDICTS.index(threshold.value)
