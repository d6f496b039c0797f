"""``privpart audit defences``: the same attack under one clip and noise after the other."""

import json
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import checks
from accounting.checks import ConfigError
from privpart.cli.audit import options as opt
from privpart.cli.options import Format

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from attacks import DefencePoint

_NOISE = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0)


def defences(
    model: opt.Model,
    data: opt.Data,
    clip: Annotated[list[float], typer.Option(help="Joint L2 bound on the update; repeatable.")],
    out: Annotated[Path, typer.Option(help="Folder for defences.json, defences.png and trials/.")],
    noise_multiplier: Annotated[
        list[float], typer.Option(help="Noise standard deviation / clip; repeatable.")
    ] = list(_NOISE),  # noqa: B006 - typer reads it once, nobody writes to it
    view: Annotated[
        str, typer.Option(help="'full', a pattern as 'dense1.*', or NAME=PATTERN,PATTERN.")
    ] = "full",
    trials: opt.Trials = 5,
    batch: opt.Batch = 1,
    weights: opt.Weights = None,
    data_dir: opt.DataDir = None,
    mode: opt.ModeOption = opt.Mode.TRAIN,
    local_steps: opt.LocalStepsCount = 0,
    learning_rate: opt.LearningRate = 0.1,
    optimizer: opt.OptimizerOption = opt.Optimizer.SGD,
    momentum: opt.Momentum = 0.0,
    delta: opt.Delta = 1e-5,
    hide_labels: opt.HideLabels = False,
    effort: opt.EffortOption = opt.Effort.NORMAL,
    attack: opt.Only = None,
    seed: opt.Seed = 0,
    form: Annotated[Format, typer.Option("--format", help="table or json.")] = Format.TABLE,
) -> None:
    """Attack the same images at every clip and noise, beside the accountant's epsilon.

    Without noise the attacker is the server; with it, the recipient of one noised update.
    Interrupted with Ctrl-C, the same command goes on where it stopped.
    """
    checks.count("trials", trials)
    if form is Format.CSV:
        raise ConfigError("format=csv: the points are nested; use table or json.")
    for bound in clip:
        checks.positive("clip", bound)
    for z in noise_multiplier:
        checks.nonnegative("noise_multiplier", z)
    typed = {k: v for k, v in locals().items() if k not in ("out", "form", "bound", "z")}
    points = _run(out, typed | {"gradient": None, "decoys": 0})
    _write(points, typed, out, form)


def _run(out: Path, typed: dict[str, Any]) -> "list[DefencePoint]":
    import attacks
    from privpart.cli.audit.inputs import views
    from privpart.cli.audit.run import prepared, resumable

    inputs, options, done = prepared(out, typed)
    (patterns,) = views([typed["view"]]).values()
    clips, noises = dict.fromkeys(typed["clip"]), dict.fromkeys(typed["noise_multiplier"])
    with resumable(done, len(clips) * len(noises) * inputs.batches) as progress:
        return attacks.defences(
            inputs.model,
            inputs.x,
            inputs.y,
            visible=patterns,
            clips=list(clips),
            noise_multipliers=list(noises),
            done=done,
            progress=progress,
            **options,
        )


def _write(points: "list[DefencePoint]", typed: dict[str, Any], out: Path, form: Format) -> None:
    from attacks import picture
    from privpart.cli.audit.tables import show_defences

    content = {
        "schema": "privpart/defences/1",
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in typed.items()},
        "psnr": "-10 log10 MSE per image, data range 1; no epsilon is computed from it",
        "points": [point.to_dict() | {"psnr_median": median(point.psnr)} for point in points],
    }
    text = json.dumps(content, indent=2, allow_nan=False)
    (out / "defences.json").write_text(text + "\n")
    picture.defence_curve(points, out / "defences.png")
    if form is Format.JSON:
        typer.echo(text)
    else:
        show_defences(points)
    typer.echo(f"privpart: written: {out / 'defences.json'}, {out / 'defences.png'}", err=True)
