"""``privpart audit leakage``: what an adversary recovers from a whole update and from its parts."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privpart.cli.audit.options import LeakageOptions, rounds, takes, views
from privpart.cli.options import Format, HtmlOption

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from attacks import LeakageReport, TextReport

THRESHOLD_PASSED = 4
VOID = 5
_PICTURE = "leakage.png"


class FailOn(StrEnum):
    """Verdicts that can fail a job, the most severe first."""

    RECOVERED = "recovered"
    PARTIAL = "partial"
    AMBIGUOUS = "ambiguous"


@takes(LeakageOptions)
def leakage(
    options: LeakageOptions,
    *,
    out: Annotated[
        Path,
        typer.Option(help="Folder for report.json, leakage.png (text: leakage.html) and trials/."),
    ],
    fail_on: Annotated[
        FailOn | None, typer.Option(help="Exit with 4 at this verdict or a more severe one.")
    ] = None,
    html: HtmlOption = None,
    form: Annotated[Format, typer.Option("--format", help="table, json or csv.")] = Format.TABLE,
) -> None:
    """Attack the update of each batch, per view, and say what may be concluded.

    Images by --model and --data; sentences by --plan, or by --model and --tokens. An update that
    these do not explain is void: exit code 5. After Ctrl-C, the same command resumes.
    """
    report: LeakageReport | TextReport
    if options.of_text:
        from privpart.cli.audit.text import audit_text

        report = audit_text(options, out, form, html)
    else:
        report = _run(options, out)
        _write(report, out, form, html)
    if report.void:
        raise typer.Exit(VOID)
    if fail_on is not None and _at_least(report, fail_on):
        typer.echo(f"privpart: {report.verdict}: threshold {fail_on.value} passed.", err=True)
        raise typer.Exit(THRESHOLD_PASSED)


def _run(options: LeakageOptions, out: Path) -> "LeakageReport":
    import attacks
    from privpart.cli.audit.inputs import prepare
    from privpart.cli.audit.store import resumable

    inputs, shared = prepare(options, out)
    shown = views(options.view or ())
    adversaries = 2 if options.noise_multiplier and options.gradient is None else 1
    with resumable(shared["done"], adversaries * len(shown) * inputs.batches) as progress:
        return attacks.leakage(
            inputs.model,
            inputs.x,
            inputs.y,
            views=shown,
            update=inputs.update,
            clip=options.clip,
            noise_multiplier=options.noise_multiplier,
            schedule=rounds(options.schedule),
            progress=progress,
            **shared,
        )


def _write(report: "LeakageReport", out: Path, form: Format, html: Path | None) -> None:
    from privpart.cli.audit import tables
    from privpart.cli.audit.store import writing
    from privpart.cli.pages import picture

    told = tables.told(report)
    with writing(out):
        (out / tables.REPORT).write_text(tables.as_json(report))
        picture.grid([report], out / _PICTURE)
    if html is not None:
        from privpart.cli.pages.leakage import leakage_page

        leakage_page(report, told, out / _PICTURE).write(html)
    tables.publish(report, told, form, out, _PICTURE)


def _at_least(report: "LeakageReport | TextReport", threshold: FailOn) -> bool:
    from attacks.report import VERDICTS

    return VERDICTS.index(report.verdict) <= VERDICTS.index(threshold.value)
