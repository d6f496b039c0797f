"""Results on standard output, as a table for people or as JSON or CSV for programs."""

import csv
import io
import json
from collections.abc import Sequence
from decimal import ROUND_CEILING, Context
from textwrap import fill
from typing import Any

import typer

from accounting import PrivacyReport
from privpart.cli.options import Format

_HOW = {"exact": "exact Gaussian trade-off", "rdp": "Renyi DP, converted; never tighter than exact"}


def up(value: float, digits: int = 5) -> str:
    """Return ``value`` with so many significant digits, rounded up: against us."""
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(value)
    return f"{rounded.normalize():f}" if 1e-4 <= value < 1e9 else f"{rounded.normalize():E}"


def print_report(report: PrivacyReport, form: Format) -> None:
    """Print one guarantee."""
    if form is Format.JSON:
        typer.echo(json.dumps(report.to_dict(), indent=2, allow_nan=False))
    elif form is Format.CSV:
        row = report.to_dict()
        row["assumptions"] = " ".join(a["code"] for a in row["assumptions"])
        typer.echo(as_csv([row]), nl=False)
    else:
        typer.echo(_as_text(report))


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows of equal keys as CSV with a header line."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _as_text(report: PrivacyReport) -> str:
    squared = up(report.sensitivity_squared)
    known = "" if report.sensitivity_exact else ", an upper bound"
    rounds = f"{report.rounds} rounds, a {report.unit} in at most {report.max_participations}"
    if report.max_participations > 1:
        rounds += f", {report.min_separation} or more apart"
    lines = [
        ("epsilon", f"{up(report.epsilon)}   ({_HOW[report.method]})"),
        ("delta", f"{report.delta:g}"),
        ("unit", f"{report.unit}, {report.adjacency} adjacency"),
        ("covers", "every model that the rounds release"),
        ("mechanism", f"{report.mechanism}, {rounds}"),
        ("noise multiplier", f"{report.noise_multiplier:.6g}"),
        ("sensitivity^2", f"{squared}   ({report.sensitivity_rule}{known})"),
        ("mu", f"{up(report.mu)}   (effective noise multiplier 1/mu = {1 / report.mu:.5g})"),
        ("rho", up(report.rho)),
        ("advantage", f"at most {up(report.advantage, 3)} for any membership test"),
    ]
    text = [f"  {name:<17} {value}" for name, value in lines]
    text += ["", "  It holds if"]
    for assumption in report.assumptions:
        sentence = f"{assumption.text}; else: {assumption.consequence}"
        text.append(fill(sentence, 96, initial_indent="  - ", subsequent_indent="    "))
    return "\n".join(text)
