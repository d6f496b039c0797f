"""Results: the files of benchmarks/results as one page of tables."""

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tables import sentence, table

from accounting.report import up

ROOT = Path(__file__).parent.parent


def results_page() -> str:
    """Return the files of benchmarks/results as tables, each with its machine."""
    parts = [
        "# Results of benchmarks\n",
        "Read off `benchmarks/results` at each build. A figure belongs to the machine, the load "
        "and the versions beside it. The scripts are `benchmarks/NAME.py` or, for what a method "
        "reaches, `examples/studies/NAME.py`; `make bench` runs those that take minutes. What the "
        "figures mean is said in the pages that quote them.\n",
        (ROOT / "benchmarks/results/ratios.md").read_text().replace("# Ratios", "## ratios", 1),
    ]
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        parts.append(f"## {path.stem}\n")
        parts += _value("", json.loads(path.read_text()), depth=3)
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.csv")):
        with path.open(newline="") as file:
            head, *rows = csv.reader(file)
        parts.append(f"## {path.stem}\n\n{_rows(head, rows)}")
    return "\n".join(parts)


SHOWN = 60
"""Rows of a table that the page shows; the file has the others."""


def _value(name: str, value: Any, *, depth: int) -> list[str]:
    """Return Markdown for a JSON value: a line, a list, a table, or parts under headings."""
    if name == "machine":
        return [_machine(value)]
    if name == "method":
        return [f"{_plain(value)}\n"]
    if (rows := _as_rows(value)) is not None:
        return [_records(rows)]
    return _parts(value, depth) if isinstance(value, dict) else [f"{_cell(value)}\n"]


def _as_rows(value: Any) -> list[dict[str, Any]] | None:
    """Return a list of objects, or an object of alike objects, as rows; None if it is neither."""
    if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        return [flat(own) for own in value]
    if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
        return None
    rows = [{"": key} | flat(own) for key, own in value.items()]
    nested = any(isinstance(v, list) for row in rows for v in row.values())
    return None if nested or not rows else rows


def _parts(value: dict[str, Any], depth: int) -> list[str]:
    lines, parts = [], []
    for key, own in value.items():
        if key == "method":
            parts.insert(0, f"{_plain(own)}\n")
        elif isinstance(own, dict | list) and own and not _short(own):
            title = "" if key == "machine" else f"{'#' * min(depth, 6)} {key}\n"
            parts += [title, *_value(key, own, depth=depth + 1)]
        else:
            lines.append(f"- {key}: {_cell(own, key)}")
    return [*lines, "", *parts]


def _short(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(v, dict | list) for v in value)


def flat(value: dict[str, Any]) -> dict[str, Any]:
    """Return nested tables as one, with dotted names."""
    found = {}
    for key, own in value.items():
        if isinstance(own, dict):
            found |= {f"{key}.{inner}": v for inner, v in flat(own).items()}
        else:
            found[key] = own
    return found


def _records(rows: list[dict[str, Any]]) -> str:
    head = list(dict.fromkeys(key for row in rows for key in row))
    return _rows(head, [[_cell(row.get(key, ""), key) for key in head] for row in rows])


def _rows(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    more = f"\n{len(rows) - SHOWN} more rows are in the file.\n" if len(rows) > SHOWN else ""
    shown = [list(map(_number, row, head)) for row in rows[:SHOWN]]
    return table(head, shown) + more


def _number(cell: Any, name: str) -> str:
    try:
        return _short_number(float(cell), name) if re.search(r"[.e]", str(cell)) else str(cell)
    except ValueError:
        return str(cell)


def _short_number(value: float, name: str) -> str:
    """Return four digits of a number, rounded up where it is an epsilon."""
    return up(value) if name.endswith("epsilon") else f"{value:.4g}"


def _cell(value: Any, name: str = "") -> str:
    if isinstance(value, bool | None):
        return {True: "yes", False: "no"}.get(value, "")
    if isinstance(value, list):
        text = ", ".join(_cell(one) for one in value)
    else:
        text = " ".join(str(value).split())
        text = _short_number(value, name) if isinstance(value, float) else text
    text = text if len(text) <= 160 else text[:157] + "..."
    return re.sub(r"([<>*_`\[\]{}])", r"\\\1", text)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"- {key}: {_cell(own)}" for key, own in value.items())
    return sentence(str(value))


def _machine(value: dict[str, Any]) -> str:
    packages = ", ".join(f"{k} {v}" for k, v in value.get("packages", {}).items())
    own = ", ".join(f"{k} {_cell(v)}" for k, v in value.items() if k != "packages")
    return f"Machine: {own}; {packages}.\n"
