"""``privpart audit defences``: the same attack at every clip and noise, beside epsilon."""

import json
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from privpart.cli.audit.leakage import VOID
from privpart.cli.audit.options import DefencesOptions, takes, views
from privpart.cli.options import Format

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from attacks import DefencePoint, TextDefencePoint


_SCORES = {
    "psnr": "-10 log10 MSE per image, data range 1",
    "rouge": "ROUGE-L (F1) per sentence",
}


@takes(DefencesOptions)
def defences(
    options: DefencesOptions,
    *,
    out: Annotated[Path, typer.Option(help="Folder for defences.json, defences.png and trials/.")],
    form: Annotated[Format, typer.Option("--format", help="table, json or csv.")] = Format.TABLE,
) -> None:
    """Attack the same examples at every clip and noise, beside the accountant's epsilon.

    Images by --model and --data; sentences by --plan, or by --model and --tokens. Without noise
    the attacker is the server; with it, the recipient of one noised update. After Ctrl-C, the same
    command resumes.
    """
    points: list[DefencePoint] | list[TextDefencePoint]
    if options.of_text:
        from privpart.cli.audit.text import text_points

        points = text_points(options, out)
    else:
        points = _run(options, out)
    _write(points, options, out, form)
    if any(point.verdict == "void" for point in points):
        typer.echo("privpart: void: two updates of the same examples differ.", err=True)
        raise typer.Exit(VOID)


def _run(options: DefencesOptions, out: Path) -> "list[DefencePoint]":
    import attacks
    from privpart.cli.audit.inputs import prepare
    from privpart.cli.audit.store import resumable

    inputs, shared = prepare(options, out)
    (patterns,) = views([options.view or "full"]).values()
    clips = list(dict.fromkeys(options.clip))
    noises = list(dict.fromkeys(options.noise_multiplier))
    with resumable(shared["done"], len(clips) * len(noises) * inputs.batches) as progress:
        return attacks.defences(
            inputs.model,
            inputs.x,
            inputs.y,
            visible=patterns,
            clips=clips,
            noise_multipliers=noises,
            progress=progress,
            **shared,
        )


def _write(
    points: "list[DefencePoint] | list[TextDefencePoint]",
    options: DefencesOptions,
    out: Path,
    form: Format,
) -> None:
    from privpart.cli.audit import tables
    from privpart.cli.audit.store import writing
    from privpart.cli.pages import picture

    score = "rouge" if options.of_text else "psnr"
    content = {
        "schema": "privpart/text-defences/1" if options.of_text else "privpart/defences/1",
        "options": options.typed(),
        score: f"{_SCORES[score]}; no epsilon is computed from it",
        "points": [p.to_dict() | {f"{score}_median": median(p.scores)} for p in points],
    }
    text = json.dumps(content, indent=2, allow_nan=False)
    with writing(out):
        (out / "defences.json").write_text(text + "\n")
        picture.defence_curve(points, out / "defences.png")
    if form is Format.JSON:
        typer.echo(text)
    elif form is Format.CSV:
        typer.echo(tables.defences_csv(points), nl=False)
    else:
        tables.show_defences(points)
    if options.send_buffers:
        typer.echo(
            "privpart: warning: buffers are sent besides the update: no clip and no noise covers "
            "them, and no epsilon of the table is theirs.",
            err=True,
        )
    if points[0].missing:
        typer.echo(
            "privpart: warning: nothing besides the examples attacked: the baseline "
            f"{', '.join(points[0].missing)} is missing.",
            err=True,
        )
    if all(point.verdict == "attack failed" for point in points):
        typer.echo(
            "privpart: warning: the attack failed at every clip and noise: nothing follows about "
            "privacy; try --effort long.",
            err=True,
        )
    typer.echo(f"privpart: written: {out / 'defences.json'}, {out / 'defences.png'}", err=True)
