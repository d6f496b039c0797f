"""``privpart audit defences``: the same attack at every clip and noise, beside epsilon."""

import json
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import typer

from privpart.cli.audit.leakage import VOID, audit_of
from privpart.cli.audit.options import DefencesOptions, takes
from privpart.cli.options import Format

# Imported where used: the other commands must not pay for torch.
if TYPE_CHECKING:
    from collections.abc import Sequence

    from attacks import DefencePoint

_SCORES = {
    "psnr": "-10 log10 MSE per image, data range 1",
    "rouge": "ROUGE-L (F1) per sentence",
}


@takes(DefencesOptions)
def defences(options: DefencesOptions) -> None:
    """Attack the same examples at every clip and noise, beside the accountant's epsilon.

    Images by --model and --data; sentences by --plan, or by --model and --tokens. Without noise
    the attacker is the server; with it, the recipient of one noised update. After Ctrl-C, the same
    command resumes.
    """
    import attacks
    from privpart.cli.audit.store import resumable

    audit, _ = audit_of(options)
    # What was typed twice is attacked once.
    clips = list(dict.fromkeys(options.clip))
    noises = list(dict.fromkeys(options.noise_multiplier))
    (patterns, *_) = audit.views.values()
    with resumable(options.out, len(clips) * len(noises) * len(audit.batches)) as progress:
        swept = replace(audit, views={"swept": patterns}, progress=progress)
        points = attacks.defences(swept, clips=clips, noise_multipliers=noises)
    _write(points, options)
    if any(point.verdict == "void" for point in points):
        typer.echo("privpart: void: two updates of the same examples differ.", err=True)
        raise typer.Exit(VOID)


def _write(points: "Sequence[DefencePoint]", options: DefencesOptions) -> None:
    from privpart.cli.audit import tables
    from privpart.cli.audit.store import writing
    from privpart.cli.pages import plots

    out = options.out
    score = "rouge" if options.of_text else "psnr"
    content = {
        "schema": "privpart/text-defences/1" if options.of_text else "privpart/defences/1",
        "options": options.identity(),
        score: f"{_SCORES[score]}; no epsilon is computed from it",
        "points": [p.to_dict() | {f"{score}_median": median(p.scores)} for p in points],
    }
    text = json.dumps(content, indent=2, allow_nan=False)
    with writing(out):
        (out / "defences.json").write_text(text + "\n")
        plots.draw_defences(points, out / "defences.png")
    if options.form is Format.JSON:
        typer.echo(text)
    elif options.form is Format.CSV:
        typer.echo(tables.defences_csv(points), nl=False)
    else:
        tables.show_defences(points)
    warnings = []
    if options.send_buffers:
        warnings.append(
            "buffers are sent besides the update: no clip and no noise covers them, and no epsilon "
            "of the table is theirs."
        )
    if points[0].missing:
        missing = ", ".join(points[0].missing)
        warnings.append(
            f"nothing besides the examples attacked: the baseline {missing} is missing."
        )
    if all(point.verdict == "attack failed" for point in points):
        warnings.append(
            "the attack failed at every clip and noise: nothing follows about privacy; try "
            "--effort long."
        )
    for warning in warnings:
        typer.echo(f"privpart: warning: {warning}", err=True)
    typer.echo(f"privpart: written: {out / 'defences.json'}, {out / 'defences.png'}", err=True)
