"""The gate of ``privpart audit leakage``: which views fail a job, by a verdict or by a baseline.

A baseline is ``report.json`` or ``defences.json`` of an earlier audit, kept in the repository. A
view fails if its verdict is more severe than there, if nothing follows about it any more, or if
either audit lacks it. ``junit.xml`` says so to a CI server, a test case for each view.
"""

import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from accounting import checks
from accounting.checks import ConfigError
from attacks.report import VERDICTS, Verdict
from privpart.cli.audit.options import FailOn

JUNIT = "junit.xml"
_NOTHING_FOLLOWS = ("attack failed", "void")
_LARGEST = 64 * 2**20  # bytes of a baseline that is read
_KEYS = ("view", "adversary", "clip", "noise_multiplier")

_THRESHOLDS = ", ".join(repr(verdict) for verdict in get_args(FailOn))

Key = tuple[str, ...]
"""What is told apart: a view and an adversary, or a clip and a noise multiplier."""
Limit = Verdict | Mapping[Key, Verdict]
"""The least severe verdict that fails, or the verdicts of a baseline."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One row of an audit: its verdict, and why it fails the gate; None if it does not."""

    name: str
    verdict: Verdict
    failure: str | None


def read_limit(fail_on: str | None) -> "Limit | None":
    """Return the limit of a gate: a verdict, or those of the baseline at this path.

    Raises:
        ConfigError: it is neither.
    """
    if fail_on is None:
        return None
    named = next((verdict for verdict in VERDICTS if verdict == fail_on), None)
    if named is None:
        return _baseline(Path(fail_on))
    if named not in get_args(FailOn):
        raise ConfigError(f"fail_on={fail_on!r}: must be one of {_THRESHOLDS}, or a report.")
    return named


def judged(rows: Sequence[Mapping[str, Any]], limit: "Limit | None") -> list[Judged]:
    """Judge the rows of an audit, each with a verdict; without a limit none fails."""
    verdicts: dict[Key, Verdict] = {_key(row): row["verdict"] for row in rows}
    if limit is None or isinstance(limit, str):
        last = -1 if limit is None else VERDICTS.index(limit)
        reason = f"the verdict is {limit!r} or more severe"
        return [
            Judged(", ".join(key), verdict, reason if VERDICTS.index(verdict) <= last else None)
            for key, verdict in verdicts.items()
        ]
    lacking = "was not audited, and the baseline has it"
    return [
        Judged(", ".join(key), verdict, _worse(verdict, limit.get(key)))
        for key, verdict in verdicts.items()
    ] + [Judged(", ".join(key), "void", lacking) for key in limit if key not in verdicts]


def _worse(now: Verdict, before: Verdict | None) -> str | None:
    """Return why a verdict fails against that of the baseline."""
    if before is None:
        return f"{now}, and the baseline has no such row"
    if VERDICTS.index(now) < VERDICTS.index(before):
        return f"{now}, and {before} in the baseline"
    if now in _NOTHING_FOLLOWS and now != before:
        return f"{now}, so nothing follows any more, and {before} in the baseline"
    return None


def _key(row: Mapping[str, Any]) -> Key:
    """Return what tells a row apart; a parameter that is not set counts, too."""
    names = [name for name in _KEYS if name in row]
    if not names:
        raise KeyError("view")
    return tuple(f"{name} {row[name]}" for name in names)


def _baseline(path: Path) -> dict[Key, Verdict]:
    """Read the verdicts of an earlier report, from anybody.

    Raises:
        ConfigError: it is not one.
    """
    # neither a pipe, which would wait for ever, nor a file that fills the memory
    if not path.is_file() or path.stat().st_size > _LARGEST:
        raise ConfigError(
            f"fail_on={str(path)!r}: must be one of {_THRESHOLDS}, or the file report.json of an "
            f"earlier audit, at most {_LARGEST >> 20} MiB."
        )
    try:
        document = checks.parsed_json(path.read_bytes())
        rows = document["rows"] if "rows" in document else document["points"]
        verdicts = {_key(row): row["verdict"] for row in rows}
        if set(verdicts.values()) <= set(VERDICTS) and verdicts:
            return verdicts
    except OSError as error:
        raise ConfigError(f"fail_on={path}: cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        pass  # refused below, as a report without rows is
    raise ConfigError(f"fail_on={path}: is not a report of privpart audit leakage.")


def write_junit(results: Sequence[Judged], kind: str, path: Path) -> None:
    """Write a test case for each row: a void one is an error, one that fails the gate a failure."""
    failures = [row for row in results if row.failure is not None]
    void = [row for row in results if row.failure is None and row.verdict == "void"]
    counts = {"tests": len(results), "failures": len(failures), "errors": len(void)}
    suite = ET.Element(
        "testsuite", {"name": "privpart audit leakage"} | {k: str(n) for k, n in counts.items()}
    )
    for row in results:
        case = ET.SubElement(suite, "testcase", {"classname": f"leakage.{kind}", "name": row.name})
        if row.failure is not None:
            ET.SubElement(case, "failure", {"message": row.failure, "type": row.verdict})
        elif row.verdict == "void":
            ET.SubElement(case, "error", {"message": "nothing was attacked", "type": "void"})
        ET.SubElement(case, "system-out").text = f"verdict: {row.verdict}"
    ET.indent(suite)
    path.write_bytes(ET.tostring(suite, encoding="utf-8", xml_declaration=True) + b"\n")
