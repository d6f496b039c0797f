"""Output: results on standard output, as text for people or as JSON or CSV for programs."""

import csv
import io
import json
from collections.abc import Sequence
from textwrap import fill
from typing import Any

import typer

from accounting import PrivacyReport
from accounting.report import up
from privpart.cli.options import Format

_WIDTH = 96


def print_report(
    report: PrivacyReport, form: Format, *, beside: Sequence[tuple[str, str]] = ()
) -> None:
    """Print one guarantee, and its warnings on standard error.

    Args:
        report: guarantee to print.
        form: text, JSON or CSV.
        beside: extra lines (name, value) of the text form, below the sensitivity.
    """
    if form is Format.JSON:
        typer.echo(json.dumps(report.to_dict(), indent=2, allow_nan=False))
    elif form is Format.CSV:
        typer.echo(as_csv([report_row(report)]), nl=False)
    else:
        typer.echo(_as_text(report, beside))
    for warning in report.warnings:
        typer.echo(f"privpart: warning: {warning}", err=True)


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows with equal keys as CSV with a header line."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def report_row(report: PrivacyReport) -> dict[str, Any]:
    """Return the scalar values of a report and the codes of its assumptions."""
    values = report.to_dict()
    row = {k: v for k, v in values.items() if not isinstance(v, list | dict)}
    return row | {"assumptions": " ".join(a.code for a in report.assumptions)}


def _as_text(report: PrivacyReport, beside: Sequence[tuple[str, str]]) -> str:
    known = "" if report.sensitivity_exact else ", an upper bound"
    rounds = f"{report.rounds} rounds, a {report.unit} in at most {report.max_participations}"
    if report.max_participations > 1:
        rounds += f", {report.min_separation} or more apart"
    lines = [
        ("epsilon", f"{up(report.epsilon, 5)}   ({report.formula})"),
        ("delta", f"{report.delta:g}"),
        ("unit", f"{report.unit}, {report.adjacency} adjacency"),
        ("covers", "every model that the rounds release"),
        ("mechanism", f"{report.mechanism}, {rounds}"),
        ("noise multiplier", up(report.noise_multiplier, 6)),
        (
            "sensitivity^2",
            f"{up(report.sensitivity_squared, 5)}   ({report.sensitivity_rule}{known})",
        ),
        *beside,
        ("mu", f"{up(report.mu, 5)}   (effective noise multiplier 1/mu = {1 / report.mu:.5g})"),
        ("rho", up(report.rho, 5)),
        ("advantage", f"at most {up(report.advantage, 3)} for any membership test"),
        ("cross-check", _cross_check(report)),
    ]
    text = [f"  {name:<17} {value}" for name, value in lines]
    text += ["", "  It holds if"]
    for assumption in report.assumptions:
        sentence = f"{assumption.text}; else: {assumption.consequence}"
        text.append(fill(sentence, _WIDTH, initial_indent="  - ", subsequent_indent="    "))
    return "\n".join(text)


def _cross_check(report: PrivacyReport) -> str:
    second = report.cross_check
    verdict = "agrees" if second.consistent else "CONTRADICTS"
    return f"{verdict}: {second.method} says {up(second.epsilon, 5)}"
