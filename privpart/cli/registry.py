"""Registry: a run's report as an entry of OpenDP's registry of deployments.

What a report can know comes from the report; what only people know comes from their file, and is
asked for by name. Nothing is made up, so an entry without that file cannot be written.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from accounting import ConfigError, PrivacyReport
from accounting.checks import parsed_toml, text_of
from accounting.report import claims, printable, up
from privpart.cli.pages.run import without_places
from privpart.run.report import RunReport

_LARGEST = 2**22
_SPECIAL = frozenset("\\`*_[]<>$#|~")
"""Characters that Markdown or LaTeX, as which the registry renders every text, would obey."""
_NEEDED = {
    1: "entry.url_slug basic.name basic.data_curators basic.intended_use basic.description "
    "basic.data_product_region basic.publication_date administrative.registry_authors",
    2: "privacy_loss.unit_is deployment_model.release_type deployment_model.data_source_type "
    "deployment_model.access_type",
    3: "deployment_model.actors dp_variant.data_domain implementation.justification",
}
"""Answers that an entry needs from a tier on."""
_OPTIONAL = (
    "basic.data_product_sector deployment_model.release_type_details "
    "deployment_model.data_source_type_details deployment_model.access_type_details "
    "accounting.post_processing implementation.tuning implementation.security "
    "administrative.sources administrative.notes"
)
_SEVERAL = ("basic.data_curators", "administrative.registry_authors")


def read_about(path: Path) -> dict[str, Any]:
    """Return the tables of a filled-in file; texts that were left empty are left out.

    The registry's own schema says which texts it takes where it offers a choice.

    Raises:
        ConfigError: it cannot be read, has unknown keys or values of another kind, or lacks what
            its tier needs.
    """
    name = f"about={path}"
    tables = parsed_toml(text_of(path, name, most=_LARGEST), name)
    entry = tables.get("entry")
    tier = entry.pop("tier", None) if isinstance(entry, dict) else None
    # True equals 1 in Python, and is no tier.
    if tier not in _NEEDED or isinstance(tier, bool):
        raise ConfigError(f"about={path}: [entry] tier={tier!r}: must be 1, 2 or 3.")
    allowed = " ".join((*_NEEDED.values(), _OPTIONAL)).split()
    answers: dict[str, Any] = {"entry": {"tier": tier}}
    for table, values in tables.items():
        for name, value in values.items() if isinstance(values, dict) else [("", values)]:
            key = f"{table}.{name}"
            if key not in allowed:
                raise ConfigError(f"about={path}: {key}: must be one of {', '.join(allowed)}.")
            if answer := _answer(key, value, path):
                answers.setdefault(table, {})[name] = answer
    needed = " ".join(keys for least, keys in _NEEDED.items() if least <= tier).split()
    given = {f"{table}.{name}" for table, values in answers.items() for name in values}
    if missing := [key for key in needed if key not in given]:
        raise ConfigError(f"about={path}: an entry of tier {tier} needs {', '.join(missing)}.")
    return answers


def _answer(key: str, value: object, path: Path) -> str | list[str]:
    several = key in _SEVERAL
    texts = value if isinstance(value, list) else [value]
    if several is not isinstance(value, list) or not all(isinstance(text, str) for text in texts):
        kind = "a list of texts" if several else "a text"
        raise ConfigError(f"about={path}: {key}={value!r}: must be {kind}.")
    stripped = [text for text in map(str.strip, texts) if text]
    if key == "basic.publication_date" and stripped:
        try:
            date.fromisoformat(stripped[0])
        except ValueError:
            raise ConfigError(f"about={path}: {key}={value!r}: must be YYYY-MM-DD.") from None
    return stripped if several else "".join(stripped)


def entry_of(result: RunReport, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a run with what ``read_about`` returned.

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
    slug, tier = (tables["entry"][name] for name in ("url_slug", "tier"))
    return {"url_slug": slug, "status": "Draft", "tier": tier, "deployment": deployment}


def _privacy_loss(result: RunReport, unit_is: str | None) -> dict[str, Any]:
    report = result.guarantee
    claim, attacker, _ = claims(report)
    parameters = {"epsilon": _up(report.epsilon), "delta": _up(report.delta)}
    # rho is never amplified: beside an amplified epsilon it would be of another guarantee.
    if not report.samplers:
        parameters["rho"] = _up(report.rho)
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


def _up(value: float) -> float:
    """Return a value rounded up to six digits, as the entry says."""
    return float(up(value, 6))


def _composition(result: RunReport) -> str:
    text = claims(result.guarantee)[2]
    if (together := result.all_runs) is not None:
        released = without_places(together.says)
        text += f" All that one machine released about these people: {released}."
    return _plain(text)


def _tuning(report: PrivacyReport, text: str | None) -> str:
    choices = next(a for a in report.assumptions if a.code == "choices")
    evidence = f" ({choices.evidence})." if choices.evidence else "."
    checked = _plain(f"Assumed: {choices.text}. Status: {choices.status}{evidence}")
    return checked if text is None else f"{text}\n\n{checked}"


def _mechanisms(result: RunReport, security: str | None) -> str:
    report, noise = result.guarantee, up(result.guarantee.noise_multiplier, 6)
    program = f"by privpart {report.version}; hash of the plan {result.plan}"
    lines = [f"{report.mechanism}, noise multiplier {noise}, {program}."]
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
