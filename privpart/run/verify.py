"""Verify: every claim of a run folder, compared again with what it rests on, line by line.

Nothing that the plan names is imported or run, and nothing is written. A model file that was
exported from the run may be given, and the public key that the run is known by.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from accounting.checks import ConfigError, delta_warning, is_large_delta
from accounting.report import up
from privpart.plan import PrivacyPlan
from privpart.run.budget_book import all_runs, counted
from privpart.run.evidence import Check, Evidence, Origin, file_hash, gather, public_key_of
from privpart.run.files import read_small
from privpart.run.identity import model_hash, tensor_hash, versions
from privpart.run.report import AUTHENTICATED, RunReport, report_of

_ANY_DELTA = 1e-9
"""For a run that was planned without delta: its mu does not depend on it."""


def check_run(
    folder: str | Path, *, model: str | Path | None = None, public_key: str | None = None
) -> tuple[Check, ...]:
    """Return a line per claim of a run, which is only read and may still be running.

    Args:
        folder: the run folder.
        model: a file that ``export`` wrote, "full" or "trained"; compared with the newest round.
        public_key: key that the run is known by, in hex, from anywhere but the folder.

    Raises:
        ConfigError: there is no ledger at all, or ``public_key`` is malformed.
    """
    path = Path(folder)
    if public_key is not None:
        public_key_of(public_key)
    if not (path / "ledger.sqlite").exists():
        raise ConfigError(f"{path} holds no run: ledger.sqlite is missing.")
    try:
        evidence = gather(path, public_key)
    except ConfigError as error:
        return (Check("ledger", "wrong", str(error).rstrip(".")),)
    said = f"schema {evidence.facts['schema']}, {len(evidence.rows)} rounds, nothing but its tables"
    checks = [Check("ledger", "verified", said), *evidence.checks]
    checks += [_guarded("plan", _plan, path, evidence), _guarded("code", _code, path, evidence)]
    checks += _derived_again(path, evidence)
    if "identity" in evidence.facts:
        checks.append(_guarded("identity", _identity, path, evidence))
    checks.append(_guarded("budget book", _book, path, evidence))
    if model is not None:
        checks += _model_file(Path(model), path, evidence)
    return tuple(checks)


def left_its_plan(checks: tuple[Check, ...]) -> bool:
    """Return whether all that is wrong is that the run did not keep to its plan."""
    return {c.what for c in checks if c.status == "wrong"} == {"participation"}


def _guarded(what: str, check: Any, path: Path, evidence: Evidence) -> Check:  # noqa: ANN401
    """Return the line of a check; whatever odd values make it raise is what is wrong."""
    try:
        found: Check = check(path, evidence)
    except Exception as error:  # values of any kind, parsed by libraries
        return Check(what, "wrong", " ".join(str(error).split())[:300])
    return found


def _plan(path: Path, evidence: Evidence) -> Check:
    from privpart.experiment.plan_file import parse, validated

    facts = evidence.facts
    plan = PrivacyPlan.from_dict(facts["plan"])
    text, tables = facts.get("plan_file"), facts.get("plan_tables")
    if text is None and tables is None:
        return Check("plan", "asserted", f"{plan.hash}; the ledger holds no plan file")
    options: dict[str, Any] = {"name": "the plan in the ledger", "in_python": True}
    kept = validated(tables, **options) if tables is not None else parse(str(text), **options)
    if kept.context(facts.get("code")) != plan.context:
        return Check("plan", "wrong", "the plan file in the ledger is not that of its privacy plan")
    if text is not None and (copy := path / "plan.toml").exists():
        if not _holds(copy, text.encode()):
            return Check("plan", "wrong", "plan.toml is not the text in the ledger, which counts")
        return Check("plan", "verified", f"{plan.hash}; plan.toml is the text in the ledger")
    return Check("plan", "verified", f"{plan.hash}; from the plan in the ledger")


def _holds(file: Path, content: bytes) -> bool:
    """Return whether a file has this content; no more of it is read than that."""
    try:
        return read_small(file, len(content)) == content
    except OSError:
        return False


def _code(_: Path, evidence: Evidence) -> Check:
    record = evidence.facts.get("code")
    if record is None:
        return Check("code", "verified", "the plan names no code of its own")
    files = {str(name): str(digest) for name, digest in record["files"].items()}
    if evidence.origin != "here":  # paths in a stranger's ledger are not followed
        said = f"the ledger names {len(files)} files by hash; compared only where the run was made"
        return Check("code", "asserted", said)
    root = Path(str(evidence.facts["plan_folder"]))
    here = {name for name in files if (root / name).is_file()}
    if other := sorted(name for name in here if file_hash(root / name) != files[name]):
        return Check("code", "wrong", f"{', '.join(other)} changed since the run began")
    if missing := sorted(files.keys() - here):
        return Check("code", "asserted", f"{', '.join(missing)} not found in {root}")
    return Check(
        "code",
        "verified",
        f"{counted(len(files), 'file')} in {root}: the hashes are those in the ledger",
    )


def _derived_again(path: Path, evidence: Evidence) -> Iterator[Check]:
    participation, guarantee = "participation", "guarantee"
    if any(evidence.status(what) == "wrong" for what in ("chain", "signature")):
        for what in (participation, guarantee):
            yield Check(what, "asserted", "not derived from a ledger that was changed")
        return
    if not evidence.facts["plan"].get("noise_multiplier"):
        yield Check(participation, "asserted", "not derived: the plan adds no noise")
        yield Check(guarantee, "asserted", "none: the plan adds no noise")
        return
    delta = evidence.facts.get("delta")
    try:
        report = report_of(evidence, path, delta=_ANY_DELTA if delta is None else delta)
    except ConfigError as error:
        yield Check(guarantee, "wrong", str(error).rstrip("."))
        return
    yield _participation(evidence, report)
    yield _guarantee(evidence, report, stated=delta is not None)


def _participation(evidence: Evidence, report: RunReport) -> Check:
    if report.deviations:
        return Check("participation", "wrong", "; ".join(report.deviations))
    real = report.realised
    said = f"no {report.guarantee.unit} took part yet"
    if report.guarantee.sampling is not None:
        said = "who took part is secret; the limits that follow from the sampling were kept"
    if real is not None:
        said = f"{report.guarantee.a_unit} in at most {real.max_participations} rounds"
        said += f", {real.min_separation} or more apart" if real.max_participations > 1 else ""
    if (identity := evidence.facts.get("identity")) not in (None, AUTHENTICATED):
        said = f"{said}, by names that nodes without authentication gave ({str(identity)[:40]})"
        return Check("participation", "asserted", said)
    shown = next(a for a in report.guarantee.assumptions if a.code == "participation")
    if report.guarantee.unit == "example" and shown.status == "asserted":
        return Check("participation", "asserted", f"{said}, as dealt. {shown.evidence}")
    known = evidence.origin != "unknown"
    return Check("participation", "verified" if known else "asserted", f"{said}, as planned")


def _identity(_: Path, evidence: Evidence) -> Check:
    """Compare everybody who counted with the owners that the ledger names."""
    facts, what = evidence.facts, "identity"
    owners = [name for names in facts["owners"].values() for name in names]
    known = set(owners)
    if len(known) < len(owners):
        return Check(what, "wrong", "the ledger names two nodes of one client")
    strangers = [client for client in evidence.histories if json.dumps(client) not in known]
    if strangers:
        return Check(what, "wrong", f"client {strangers[0]!r} took part, and no node has it")
    nodes = counted(len(facts["owners"]), "node")
    if facts["identity"] != AUTHENTICATED:
        said = f"{len(known)} clients of {nodes}, who were not authenticated"
        return Check(what, "asserted", said)
    said = f"{len(known)} clients, each of one of {nodes}; that they were authenticated is declared"
    return Check(what, "verified" if evidence.origin != "unknown" else "asserted", said)


def _guarantee(evidence: Evidence, report: RunReport, *, stated: bool) -> Check:
    found = report.guarantee
    figures = f"mu {up(found.mu)}"
    if stated:
        figures = f"epsilon {up(found.epsilon)} at delta {found.delta:g}, {figures}"
    if found.status == "not-private":
        return Check("guarantee", "asserted", f"none: the noise comes from a seed ({figures})")
    violated = (a for a in found.assumptions if (a.status, a.severity) == ("violated", "critical"))
    broken = {a.code for a in violated} - {"participation"}
    if broken or not found.cross_check.consistent:
        return Check("guarantee", "wrong", f"does not hold: {', '.join(sorted(broken))}")
    if report.deviations:
        return Check("guarantee", "asserted", "none: the run did not keep to its plan")
    rests = ", ".join(a.code for a in found.assumptions if a.status == "asserted")
    said = f"{figures}, derived again; {found.status}" + (f" on {rests}" if rests else "")
    if warning := delta_warning(found.delta, found.population, unit=found.unit):
        said += f"; {warning.rstrip('.')}"
    known = evidence.origin != "unknown"
    sound = not is_large_delta(found.delta, found.population)
    return Check("guarantee", "verified" if known and sound else "asserted", said)


def _book(_: Path, evidence: Evidence) -> Check:
    what = "budget book"
    if evidence.origin != "here":
        return Check(what, "asserted", "it is kept on the machine that made the run")
    found = all_runs(evidence.facts, _ANY_DELTA)
    if found is None:
        return Check(what, "asserted", "none: the run does not name the people that it is about")
    if found.status == "unknown":  # a crash may come between a run and its entry, not later
        return Check(what, "wrong" if evidence.rows else "asserted", found.says)
    cost = "no bound" if found.mu is None else f"mu {up(found.mu)}"
    said = f"{counted(found.runs, 'run')} about {found.population!r}, {cost}: {found.status}"
    return Check(what, "verified", f"this run is one of {said}")


def _model_file(model: Path, path: Path, evidence: Evidence) -> Iterator[Check]:
    try:
        file_hash(model)  # an ordinary file that can be read
        with safe_open(model, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = dict(file.metadata() or {})
    except Exception as error:  # the library raises types of its own
        said = " ".join(str(error).split())[:200]
        yield Check("model file", "wrong", f"{model} cannot be read: {said}")
        return
    yield _guarded("model file", lambda *_: _tensors(tensors, evidence), path, evidence)
    yield _guarded("model metadata", lambda *_: _metadata(metadata, path, evidence), path, evidence)


def _tensors(tensors: Mapping[str, Tensor], evidence: Evidence) -> Check:
    """Compare the trained tensors with the newest row, and all others with the first facts."""
    what, facts, rows = "model file", evidence.facts, evidence.rows
    if not rows or rows[-1].model is None or "parameters" not in facts:
        return Check(what, "asserted", "the ledger does not name its parameters and their hash")
    trained = [name for name, _ in facts["parameters"]]
    for name, shape in facts["parameters"]:
        own = tensors.get(name)
        if own is None or list(own.shape) != shape or own.dtype is not torch.float32:
            return Check(what, "wrong", f"{name} is missing, or of another shape or type")
    found = model_hash(torch.cat([tensors[name].reshape(-1) for name in trained]))
    if found != rows[-1].model:
        return Check(what, "wrong", _which_round(found, evidence))
    others = tensors.keys() - set(trained)
    said = f"its {len(trained)} trained tensors are the model after round {len(rows) - 1}"
    if not others:
        return Check(what, "verified", said)
    frozen = facts.get("frozen")
    if frozen is None:
        rest = f"its {len(others)} other tensors were not compared: the ledger does not name them"
        return Check(what, "asserted", f"{said}; {rest}")
    tied = {tensor_hash(tensors[name]) for name in trained}
    found_others = {name: tensor_hash(tensors[name]) for name in others}
    odd = [
        name  # tied to a trained one under another name, or else frozen
        for name, own in found_others.items()
        if (own != frozen[name] if name in frozen else own not in tied)
    ]
    odd += sorted(frozen.keys() - others)
    if odd:
        return Check(what, "wrong", f"{odd[0]} is not the run's, nor are {len(odd) - 1} others")
    return Check(what, "verified", f"{said}; its {len(others)} others are those it began with")


def _which_round(found: str, evidence: Evidence) -> str:
    rounds = [row.round for row in evidence.rows if row.model == found]
    if rounds:
        return f"it is the model after round {rounds[-1]}, not after the newest"
    return "its trained tensors are not those of any round in the ledger"


def _metadata(metadata: Mapping[str, str], path: Path, evidence: Evidence) -> Check:
    from privpart.experiment.export import privacy_metadata

    what = "model metadata"
    part = metadata.get("privpart.part", "")
    own = privacy_metadata(path, part, evidence=evidence)
    if unknown := sorted(metadata.keys() - own.keys()):
        return Check(what, "wrong", f"{unknown[0][:60]} is not a field of an export of this run")
    words = ("privpart.statement", "privpart.status")
    for name in sorted(metadata.keys() - set(words)):
        if metadata[name] != own[name]:
            said = f"{name} is {metadata[name][:80]!r}, the run's {own[name]!r}"
            return Check(what, "wrong", said)
    if part not in ("full", "trained"):
        return Check(what, "wrong", f"privpart.part is {part[:20]!r}: must be full or trained")
    if missing := sorted(own.keys() - metadata.keys()):
        return Check(what, "asserted", f"it does not name {', '.join(missing)}")
    if any(
        all(metadata[name] == said[name] for name in words)
        for said in _said_elsewhere(path, part, evidence)
    ):
        return Check(
            what, "verified", "its figures and statement are those derived from the ledger"
        )
    if versions()["privpart"] != evidence.facts.get("versions", {}).get("privpart"):
        return Check(what, "asserted", "its statement is in the words of another version")
    return Check(what, "wrong", "its statement is not one that follows from the ledger")


def _said_elsewhere(path: Path, part: str, evidence: Evidence) -> Iterator[Mapping[str, str]]:
    """Yield the metadata with the words for each origin: an export speaks of where it was made."""
    from privpart.experiment.export import privacy_metadata

    confirmed = tuple(replace(check, status="verified") for check in evidence.checks)
    origins: tuple[Origin, ...] = ("here", "signed", "unknown")
    for checks in (confirmed, evidence.checks):
        for origin in origins:
            told = replace(evidence, origin=origin, checks=checks)
            yield privacy_metadata(path, part, evidence=told)
