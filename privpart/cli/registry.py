"""Registry: a run's report as an entry of OpenDP's registry of deployments.

What a report can know comes from the report; what only people know comes from their file, and is
asked for by name. Nothing is made up, so an entry without that file cannot be written.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from accounting import ConfigError, PrivacyReport
from accounting.report import claims, printable, up
from privpart.cli.pages.run import without_places
from privpart.run.report import RunReport

_LARGEST = 2**22
_SPECIAL = frozenset("\\`*_[]<>$#|~")
"""Characters that Markdown or LaTeX, as which the registry renders every text, would obey."""
_SECTORS = ("Technology", "Healthcare", "Education", "Government", "Energy", "Finance")


@dataclass(frozen=True, slots=True)
class _Field:
    """A key of the file: its table, the least tier that needs it, what to write, allowed values."""

    table: str
    name: str
    tier: int | None
    write: str
    several: bool = False
    choices: tuple[str, ...] = ()


_FIELDS = (
    _Field("entry", "url_slug", 1, "short name in the registry's address, as in my-model-2026"),
    _Field("basic", "name", 1, "name of what is published"),
    _Field("basic", "data_curators", 1, "who publishes it, a list of names", several=True),
    _Field("basic", "intended_use", 1, "what it is for"),
    _Field("basic", "description", 1, "what it is, in a sentence or two"),
    _Field("basic", "data_product_region", 1, "the region that the data are from"),
    _Field("basic", "publication_date", 1, "day of the (first) publication, YYYY-MM-DD"),
    _Field("basic", "data_product_sector", None, "sector", choices=_SECTORS),
    _Field("privacy_loss", "unit_is", 2, "what one unit of the report is: a person, a device ..."),
    _Field(
        "deployment_model", "release_type", 2, "what is published",
        choices=("One release", "Many releases"),
    ),
    _Field("deployment_model", "release_type_details", None, "further uses of the same data"),
    _Field(
        "deployment_model", "data_source_type", 2, "whether data keep coming in",
        choices=("Static", "Dynamic"),
    ),
    _Field("deployment_model", "data_source_type_details", None, "how they come in"),
    _Field(
        "deployment_model", "access_type", 2, "whether people query the data under DP",
        choices=("Interactive", "Non-interactive"),
    ),
    _Field("deployment_model", "access_type_details", None, "how queries share the budget"),
    _Field("deployment_model", "actors", 3, "who holds and sees what, and why each is trusted"),
    _Field("dp_variant", "data_domain", 3, "which data could have been used"),
    _Field("accounting", "post_processing", None, "what is done to the model after training"),
    _Field("implementation", "tuning", None, "how hyperparameters were chosen, and on which data"),
    _Field("implementation", "security", None, "who has access to the data before training"),
    _Field("implementation", "justification", 3, "why these choices, and who checked them"),
    _Field("administrative", "registry_authors", 1, "who wrote this entry, a list", several=True),
    _Field("administrative", "sources", None, "papers, posts, the model itself"),
    _Field("administrative", "notes", None, "anything else"),
)  # fmt: skip


def template() -> str:
    """Return the file to be filled in, with what to write in each place."""
    lines = [
        "# What only you know about a deployment, for: privpart report RUN --registry FILE",
        "# --about THIS_FILE. The registry renders texts as Markdown. Leave empty what is unknown.",
        "",
        "[entry]",
        "tier = 3            # how complete the entry is: 1, 2 or 3",
    ]
    table = "entry"
    for field in _FIELDS:
        if field.table != table:
            table = field.table
            lines += ["", f"[{table}]"]
        needed = "optional" if field.tier is None else f"needed from tier {field.tier}"
        choices = f": {' | '.join(field.choices)}" if field.choices else ""
        lines.append(f"# {field.write}{choices} ({needed})")
        empty = "[]" if field.several else '""'
        lines.append(f"{field.name} = {empty}")
    return "\n".join(lines)


def read_about(path: Path) -> dict[str, Any]:
    """Return the tables of a filled-in file; texts that were left empty are left out.

    Raises:
        ConfigError: it does not exist, and is then written to be filled in; it cannot be read, has
            unknown keys or values of another kind, or lacks what its tier needs.
    """
    tables = _tables(path)
    entry = tables.get("entry")
    tier = entry.pop("tier", None) if isinstance(entry, dict) else None
    # True equals 1 in Python, and is no tier.
    if tier not in (1, 2, 3) or isinstance(tier, bool):
        raise ConfigError(f"about={path}: [entry] tier={tier!r}: must be 1, 2 or 3.")
    fields = {(field.table, field.name): field for field in _FIELDS}
    answers: dict[str, Any] = {"entry": {"tier": tier}}
    for table, values in tables.items():
        for name, value in values.items() if isinstance(values, dict) else [("", values)]:
            field = fields.get((table, name))
            if field is None:
                allowed = ", ".join(f.name for f in _FIELDS if f.table == table) or "none"
                raise ConfigError(
                    f"about={path}: [{table}] {name}: is not a known key; of this table: {allowed}."
                )
            if answer := _value(field, value, path):
                answers.setdefault(table, {})[name] = answer
    missing = [
        f"[{f.table}] {f.name} ({f.write})"
        for f in _FIELDS
        if f.tier is not None and f.tier <= tier and f.name not in answers.get(f.table, {})
    ]
    if missing:
        raise ConfigError(f"about={path}: an entry of tier {tier} needs {'; '.join(missing)}.")
    return answers


def _tables(path: Path) -> dict[str, Any]:
    try:
        if not path.exists():
            path.write_text(template() + "\n", encoding="utf-8")
            raise ConfigError(f"about={path}: is new; fill it in, and run the same command again.")
        # No more than an entry can need: a file without end would fill the memory.
        with path.open("rb") as file:
            return tomllib.loads(file.read(_LARGEST).decode())
    except OSError as error:
        raise ConfigError(f"about={path}: cannot be read or written: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"about={path}: is not TOML: {error}.") from None


def _value(field: _Field, value: object, path: Path) -> str | list[str]:
    """Return the value of a key, checked."""
    fault = ""
    if field.several:
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            return [text.strip() for text in value if text.strip()]
        fault = "must be a list of texts"
    elif field.name == "publication_date":
        try:
            return date.fromisoformat(str(value)).isoformat() if value else ""
        except ValueError:
            fault = "must be a day, YYYY-MM-DD"
    elif not isinstance(value, str):
        fault = "must be a text"
    elif not value or not field.choices or value in field.choices:
        return value.strip()
    else:
        fault = f"must be one of {', '.join(field.choices)}"
    raise ConfigError(f"about={path}: [{field.table}] {field.name}={value!r}: {fault}.")


def entry_of(result: RunReport, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a run.

    Args:
        result: its report.
        about: what ``read_about`` returned.

    Raises:
        ConfigError: no guarantee holds, or the run is a simulation.
    """
    report = result.guarantee
    if result.wrong or report.status in ("does-not-hold", "not-private"):
        raise ConfigError(
            "registry: this run has no guarantee to register: "
            + ("it is a simulation." if report.status == "not-private" else "see its report.")
        )
    tables = {name: dict(values) for name, values in about.items()}
    unit_is = tables.get("privacy_loss", {}).pop("unit_is", None)
    implementation = tables.get("implementation", {})
    tuning, security = implementation.pop("tuning", None), implementation.pop("security", None)
    deployment = {
        "basic": tables["basic"] | {"data_product_type": "Machine learning model"},
        "dp_variant": tables.get("dp_variant", {})
        | {
            "variant_name": "Approximate DP",
            "unprotected_quantities": _points(f"{text}." for text in report.not_covered),
        },
        "privacy_loss": _privacy_loss(result, unit_is),
        "deployment_model": tables.get("deployment_model", {})
        | {"model_name": "Central", "model_name_details": _plain(report.trust_model)},
        "accounting": tables.get("accounting", {}) | {"composition": _composition(result)},
        "implementation": implementation
        | {
            "preprocessing_and_hyperparameter_tuning": _tuning(report, tuning),
            "mechanisms": _mechanisms(result, security),
        },
        "administrative": tables["administrative"],
    }
    entry = tables["entry"]
    slug, tier = entry["url_slug"], entry["tier"]
    return {"url_slug": slug, "status": "Draft", "tier": tier, "deployment": deployment}


def _privacy_loss(result: RunReport, unit_is: str | None) -> dict[str, Any]:
    report = result.guarantee
    claim, attacker, _ = claims(report)
    parameters = {"epsilon": report.epsilon, "delta": report.delta}
    # rho is never amplified: beside an amplified epsilon it would be of another guarantee.
    if report.sampling is None:
        parameters["rho"] = report.rho
    details = f"Epsilon, delta and rho are rounded up. mu = {up(report.mu, 5)}. {attacker}"
    details += "".join(f" Warning: {warning}" for warning in report.warnings)
    if not result.complete:
        details += f" {result.rounds} of {result.planned_rounds} rounds are done; this is for all."
    named = f"one {report.unit}"
    return {
        "privacy_unit": named if unit_is is None else f"{named}: {unit_is}",
        "privacy_unit_details": _plain(claim),
        "privacy_parameters": parameters,
        "privacy_parameters_details": _plain(details),
    }


def _composition(result: RunReport) -> str:
    text = _plain(claims(result.guarantee)[2])
    if result.all_runs is not None:
        text += " " + _plain(f"All that one machine released about these people: "
                             f"{without_places(result.all_runs.says)}.")  # fmt: skip
    return text


def _tuning(report: PrivacyReport, text: str | None) -> str:
    choices = next(a for a in report.assumptions if a.code == "choices")
    checked = f"Assumed: {choices.text}. Status: {choices.status}"
    checked += f" ({choices.evidence})." if choices.evidence else "."
    return _plain(checked) if text is None else f"{text}\n\n{_plain(checked)}"


def _mechanisms(result: RunReport, security: str | None) -> str:
    report = result.guarantee
    lines = [f"{report.mechanism}, noise multiplier {up(report.noise_multiplier, 6)}, by privpart "
             f"{report.version}; hash of the plan {result.plan}."]  # fmt: skip
    for a in report.assumptions:
        why = f" Evidence: {without_places(a.evidence)}." if a.evidence else ""
        lines.append(f"{a.code} ({a.status}): {a.text}.{why}")
    if result.measured is not None:
        lines.append(f"measured from below: {result.measured}.")
    text = _points(lines)
    return text if security is None else f"{text}\n\n{security}"


def _points(lines: Iterable[str]) -> str:
    return "\n".join(f"- {_plain(line)}" for line in lines)


def _plain(text: str) -> str:
    """Return a text that Markdown shows as it is."""
    return "".join(f"\\{c}" if c in _SPECIAL else c for c in printable(text))


def write_entry(result: RunReport, path: Path, about: Path) -> None:
    """Write the entry of a run, as JSON, which is YAML too.

    Raises:
        ConfigError: see ``read_about`` and ``entry_of``; or the file cannot be written.
    """
    entry = entry_of(result, read_about(about))
    try:
        path.write_text(json.dumps(entry, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"registry={path}: cannot be written: {error.strerror}.") from None
