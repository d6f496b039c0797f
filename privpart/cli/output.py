"""Output: results on standard output, as text for people or as JSON or CSV for programs."""

import csv
import io
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from types import MappingProxyType
from typing import Any

import typer

from accounting import Assumption, PrivacyReport
from accounting.report import printable, up
from privpart.cli.options import Format

WIDTH = 96
_TABLE_WIDTH = 128
_NARROWEST = 40
_MOST_SHOWN = 6
"""Numbers of a sequence that the text form of a report lists."""


def say(text: str) -> None:
    """Tell whoever runs the command, on standard error; no screen obeys a character of it."""
    typer.echo(printable(f"privpart: {text}"), err=True)


def print_result(
    form: Format,
    document: Mapping[str, Any],
    rows: Sequence[dict[str, Any]],
    print_text: Callable[[], None],
) -> None:
    """Print a result as JSON, its rows as CSV, or by a function, as text."""
    if form == "json":
        # JSON has no NaN: strict readers would refuse the whole document
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    elif form == "csv":
        typer.echo(as_csv(rows) if rows else "", nl=False)
    else:
        print_text()


def print_report(
    report: PrivacyReport,
    form: Format,
    *,
    beside: Sequence[tuple[str, str]] = (),
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Print one guarantee, and its warnings on standard error.

    ``beside`` are extra lines of the text, below the sensitivity; ``more`` fields of the JSON.
    """
    document = report.to_dict() | dict(more)
    print_result(form, document, [report_row(report)], lambda: typer.echo(_as_text(report, beside)))
    for warning in report.warnings:
        say(f"warning: {warning}")


_NUMBER = re.compile(r"[-+≤<>~ ]*[0-9]")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header, printed or on a page; a narrow terminal lacks ``spare`` columns."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    spare: Sequence[str] = ()

    @property
    def words(self) -> frozenset[int]:
        """The columns in which no cell is a number, which stand on the left of a page's table."""
        columns = range(len(self.header))
        return frozenset(
            i for i in columns if not any(_NUMBER.match(str(row[i])) for row in self.rows)
        )


def print_all(parts: "Sequence[Table | str]") -> None:
    """Print tables, and sentences in between."""
    for part in parts:
        if isinstance(part, str):
            typer.echo(part)
        else:
            print_table(part)


def print_table(table: Table) -> None:
    """Print a table whose first column, a name, is on the left and the others on the right.

    It is laid out here, as rich would: importing rich takes a tenth of the whole command's time. On
    a terminal that is too narrow, spare columns are left out, the first ones first.
    """
    header, spare = table.header, table.spare
    width = terminal_width(_TABLE_WIDTH)
    body = [[str(cell) for cell in row] for row in table.rows]
    for left_out in range(len(spare) + 1):
        shown = [i for i, name in enumerate(header) if name not in spare[:left_out]]
        widths = [max(len(line[i]) for line in (header, *body)) for i in shown]
        across = sum(widths) + 3 * len(widths) - 1
        if across + 2 <= width:
            break

    def laid_out(cells: Sequence[str]) -> str:
        name, *others = (cells[i] for i in shown)
        right = (cell.rjust(size) for cell, size in zip(others, widths[1:], strict=True))
        return "   ".join(["  " + name.ljust(widths[0]), *right])

    lines = [laid_out(header), " " + "─" * across, *map(laid_out, body)]
    typer.echo("\n".join([fill(table.title, width), "", *lines, ""]))


def terminal_width(most: int) -> int:
    """Return the terminal's width, up to ``most``; ``most`` if the output goes elsewhere."""
    # a file or a pipe gets the same lines on every machine
    if not sys.stdout.isatty():
        return most
    return max(_NARROWEST, min(most, shutil.get_terminal_size((most, 24)).columns))


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
    lines: list[tuple[str, str]] = []
    for name, figure in report.figures().items():
        lines.append((name, figure.text))
        if name == "mechanism":
            lines += _parameters(report.mechanism_parameters)
        elif name == "sensitivity^2":
            lines += beside
    text = [f"  {name:<17} {value}" for name, value in (*lines, *_realised(report))]
    conditions = fill_lines(map(_condition, report.assumptions))
    return "\n".join([*text, "", "  It holds if", *conditions])


def _condition(assumption: Assumption) -> str:
    """Return a line of the list of conditions, with the evidence that one is not met."""
    unmet = f" (NOT MET: {assumption.evidence})" if assumption.status == "violated" else ""
    return f"{assumption.text}{unmet}. If not, {assumption.consequence}"


def fill_lines(sentences: Iterable[str]) -> list[str]:
    """Return sentences as a list with dashes, broken at the width of the terminal."""
    width = terminal_width(WIDTH)
    return [fill(s, width, initial_indent="  - ", subsequent_indent="    ") for s in sentences]


def _parameters(parameters: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return a line with what the mechanism has besides its name and rounds, if anything."""
    if parameters is None:
        return [("parameters", "more than can be listed")]
    listed = [
        f"{name.replace('_', ' ')} {_shown(value)}"
        for name, value in parameters.items()
        if name not in ("schema", "name", "rounds") and value not in (None, False)
        if not (isinstance(value, list) and value and isinstance(value[0], list | dict))
    ]
    return [("parameters", "; ".join(listed))] if listed else []


def _shown(value: object) -> str:
    if not isinstance(value, list):
        return "yes" if value is True else str(value)
    more = f", ... ({len(value)} of them)" if len(value) > _MOST_SHOWN else ""
    return ", ".join(f"{number:.6g}" for number in value[:_MOST_SHOWN]) + more


def _realised(report: PrivacyReport) -> list[tuple[str, str]]:
    if (seen := report.realised) is None:
        return []
    apart = f", {seen.min_separation} or more apart" if seen.max_participations > 1 else ""
    squared = ("" if seen.sensitivity_exact else "at most ") + up(seen.sensitivity_squared, 5)
    return [
        ("by the log", f"{seen.clients} clients, each in at most {seen.max_participations}{apart}"),
        ("", f"epsilon {up(seen.epsilon, 5)}, mu {up(seen.mu, 5)}, sensitivity^2 {squared}"),
        ("promise", "; ".join(seen.deviations) or "kept"),
    ]
