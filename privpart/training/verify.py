"""Verify: every claim of a run folder, compared again with what it rests on, line by line.

Nothing that the plan names is imported or run, and nothing is written. A model file that was
exported from the run may be given, and the public key that the run is known by.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from accounting.checks import ConfigError, delta_warning, is_large_delta
from accounting.report import up
from privpart.plan import PrivacyPlan
from privpart.run.begin import versions
from privpart.run.budget_book import all_runs, counted
from privpart.run.evidence import Check, CheckStatus, Evidence, gather, public_key_of
from privpart.run.folder import holds_a_run
from privpart.run.members import MOVES, Members
from privpart.run.report import AUTHENTICATED, RunReport, not_derivable, report_of
from privpart.run.store import file_hash, model_hash, one_line, read_small, tensor_hash
from privpart.run.witness import compared, read_witness
from privpart.training.export import privacy_metadata
from privpart.training.plan_file import plan_in

Verdict = tuple[CheckStatus, str]
"""Status and reason of a line."""
_ANY_DELTA = 1e-9
"""For a run that was planned without delta: its mu does not depend on it."""


def check_run(
    folder: str | Path,
    *,
    model: str | Path | None = None,
    public_key: str | None = None,
    witnesses: Sequence[str | Path] = (),
) -> tuple[Check, ...]:
    """Return a line per claim of a run, which is only read and may still be running.

    Args:
        folder: the run folder.
        model: a file that ``export`` wrote, "full" or "trained"; compared with the newest round.
        public_key: key that the run is known by, in hex, from anywhere but the folder.
        witnesses: files that ``write_witness`` wrote on other machines, or earlier on this one.
    """
    path, others = Path(folder), [read_witness(file) for file in witnesses]
    if public_key is not None:
        public_key_of(public_key)
    if not holds_a_run(path):
        raise ConfigError(f"{path} holds no run: its ledger is missing.")
    try:
        evidence = gather(path, public_key)
    except ConfigError as error:
        return (Check("ledger", "wrong", str(error).rstrip(".")),)
    checks = [Check("ledger", *_ledger(evidence)), *evidence.checks]
    checks.append(_guarded("plan", lambda: _plan(path, evidence)))
    checks.append(_guarded("code", lambda: _code(evidence)))
    checks += _derived_again(path, evidence)
    if "identity" in evidence.facts:
        checks.append(_guarded("identity", lambda: _identity(evidence)))
    checks.append(_guarded("budget book", lambda: _book(evidence)))
    checks += [compared(other, evidence) for other in others]
    if model is not None:
        checks += _model_file(Path(model), path, evidence)
    return tuple(checks)


def left_its_plan(checks: tuple[Check, ...]) -> bool:
    """Return whether all that is wrong is that the run did not keep to its plan."""
    return {c.what for c in checks if c.status == "wrong"} == {"participation"}


def _guarded(what: str, check: Callable[[], Verdict]) -> Check:
    """Return the line of a check; whatever odd values make it raise is what is wrong."""
    try:
        return Check(what, *check())
    except Exception as error:  # values of any kind, parsed by libraries
        return Check(what, "wrong", one_line(error))


def _ledger(evidence: Evidence) -> Verdict:
    content = f"schema {evidence.facts['schema']}, {len(evidence.rows)} rounds"
    if unread := evidence.ledger.unread:
        size = counted(unread, "byte")
        return "asserted", f"{content}; {size} behind the last are no row, and not read"
    return "verified", f"{content}, and no more"


def _plan(path: Path, evidence: Evidence) -> Verdict:
    facts = evidence.facts
    plan, text = PrivacyPlan.from_dict(facts["plan"]), facts.get("plan_file")
    if not {"plan_file", "plan_tables"} & facts.keys():
        return "asserted", f"{plan.hash}; the ledger holds no plan file"
    if plan_in(facts).context(facts.get("code")) != plan.context:
        return "wrong", "the plan file in the ledger is not that of its privacy plan"
    if text is None or not (copy := path / "plan.toml").exists():
        return "verified", f"{plan.hash}; from the plan in the ledger"
    content = text.encode()
    # No more of it is read than the ledger's text is long.
    with suppress(OSError):
        if read_small(copy, len(content)) == content:
            return "verified", f"{plan.hash}; plan.toml is the text in the ledger"
    return "wrong", "plan.toml is not the text in the ledger, which counts"


def _code(evidence: Evidence) -> Verdict:
    record = evidence.facts.get("code")
    if record is None and (passed := evidence.facts.get("passed")):
        names = ", ".join(str(name)[:20] for name in passed)
        where = "compared only where the run is resumed"
        return "asserted", f"{names}: passed from Python, and {where}"
    if record is None and not {"plan_file", "plan_tables"} & evidence.facts.keys():
        return "asserted", "a loop of its author's own, which the ledger cannot name"
    if record is None:
        return "verified", "the plan names no code of its own"
    files = {str(name): str(digest) for name, digest in record["files"].items()}
    # Paths in a stranger's ledger are not followed.
    if evidence.origin != "here":
        where = "compared only where the run was made"
        return "asserted", f"the ledger names {counted(len(files), 'file')} by hash; {where}"
    # The run was made here, so its plan's folder is this user's own.
    root = Path(str(evidence.facts["plan_folder"]))
    present = {name for name in files if (root / name).is_file()}
    if changed := sorted(name for name in present if file_hash(root / name) != files[name]):
        return "wrong", f"{', '.join(changed)} changed since the run began"
    if missing := sorted(files.keys() - present):
        return "asserted", f"{', '.join(missing)} not found in {root}"
    count = counted(len(files), "file")
    return "verified", f"{count} in {root}: the hashes are those in the ledger"


def _derived_again(path: Path, evidence: Evidence) -> Iterator[Check]:
    reason = "" if evidence.facts["plan"].get("noise_multiplier") else "the plan adds no noise"
    if any(evidence.status(what) == "wrong" for what in ("chain", "signature")):
        reason = "the ledger was changed"
    if reason := reason or not_derivable(evidence, path):
        for what in ("participation", "guarantee"):
            yield Check(what, "asserted", f"not derived: {reason}")
        return
    delta = evidence.facts.get("delta")
    try:
        report = report_of(evidence, path, delta=_ANY_DELTA if delta is None else delta)
    except ConfigError as error:
        yield Check("guarantee", "wrong", str(error).rstrip("."))
        return
    yield Check("participation", *_participation(evidence, report))
    yield Check("guarantee", *_guarantee(evidence, report, stated=delta is not None))


def _participation(evidence: Evidence, report: RunReport) -> Verdict:
    if report.deviations:
        return "wrong", "; ".join(report.deviations)
    reason = report.worst()
    if report.guarantee.sampling is not None:
        reason += "; the limits that follow from the sampling were kept"
    if (identity := evidence.facts.get("identity")) not in (None, AUTHENTICATED):
        by = f"by names that nodes without authentication gave ({str(identity)[:40]})"
        return "asserted", f"{reason}, {by}"
    shown = next(a for a in report.guarantee.assumptions if a.code == "participation")
    if report.guarantee.unit == "example" and shown.status == "asserted":
        return "asserted", f"{reason}, as dealt. {shown.evidence}"
    return _if_origin(evidence, f"{reason}, as planned")


def _if_origin(evidence: Evidence, reason: str) -> Verdict:
    """Return "verified", unless whoever made the folder may have made all of it."""
    return "asserted" if evidence.origin == "unknown" else "verified", reason


def _identity(evidence: Evidence) -> Verdict:
    """Compare everybody who counted with the owners that the ledger names."""
    facts = evidence.facts
    first = [name for names in facts["owners"].values() for name in names]
    if len(set(first)) < len(first):
        return "wrong", "the ledger names two nodes of one client"
    members = Members.of(facts)
    for client, rounds in evidence.ledger.rounds_by_client().items():
        if None in {members.owner(client, number) for number in rounds}:
            return "wrong", f"client {client!r} took part, and no node has it"
    owned, nodes = {*members.clients}, counted(len(members.nodes), "node")
    if facts["identity"] != AUTHENTICATED:
        return "asserted", f"{len(owned)} clients of {nodes}, who were not authenticated"
    moves = counted(len(facts.get(MOVES, ())), "later change")
    reason = f"{len(owned)} clients, each of one of {nodes}, with {moves}"
    return _if_origin(evidence, f"{reason}; that they were authenticated is declared")


def _guarantee(evidence: Evidence, report: RunReport, *, stated: bool) -> Verdict:
    guarantee = report.guarantee
    condition = " if it is known who was sampled" if guarantee.samplers else ""
    figures = f"mu {up(guarantee.mu)}{condition}"
    if stated:
        figures = f"epsilon {up(guarantee.epsilon)} at delta {guarantee.delta:g}, {figures}"
    if guarantee.status == "not-private":
        return "asserted", f"none: the noise comes from a seed ({figures})"
    violated = [a for a in guarantee.assumptions if a.status == "violated"]
    broken = {a.code for a in violated if a.severity == "critical"} - {"participation"}
    if broken or not guarantee.cross_check.consistent:
        return "wrong", f"does not hold: {', '.join(sorted(broken))}"
    if report.deviations:
        return "asserted", "none: the run did not keep to its plan"
    asserted = ", ".join(a.code for a in guarantee.assumptions if a.status == "asserted")
    basis = f" on {asserted}" if asserted else ""
    reason = f"{figures}, derived again; {guarantee.status}{basis}"
    delta, population = guarantee.delta, guarantee.population
    if warning := delta_warning(delta, population, unit=guarantee.unit):
        reason += f"; {warning.rstrip('.')}"
    if is_large_delta(delta, population):
        return "asserted", reason
    return _if_origin(evidence, reason)


def _book(evidence: Evidence) -> Verdict:
    if evidence.origin != "here":
        return "asserted", "it is kept on the machine that made the run"
    account = all_runs(evidence.facts, _ANY_DELTA)
    if account is None:
        return "asserted", "none: the run does not name the people that it is about"
    # A crash may come between a run and its entry, not later.
    if account.status == "unknown":
        return "wrong" if evidence.rows else "asserted", account.says
    cost = "no bound" if account.mu is None else f"mu {up(account.mu)}"
    runs = f"{counted(account.runs, 'run')} about {account.population!r}"
    return "verified", f"this run is one of {runs}, {cost}: {account.status}"


def _model_file(model: Path, path: Path, evidence: Evidence) -> Iterator[Check]:
    try:
        # An ordinary file that can be read.
        file_hash(model)
        with safe_open(model, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = dict(file.metadata() or {})
    except Exception as error:  # the library raises types of its own
        yield Check("model file", "wrong", f"{model} cannot be read: {one_line(error)}")
        return
    yield _guarded("model file", lambda: _tensors(tensors, evidence))
    yield _guarded("model metadata", lambda: _metadata(metadata, path, evidence))


def _tensors(tensors: Mapping[str, Tensor], evidence: Evidence) -> Verdict:
    """Compare the trained tensors with the newest row, and all others with the first facts."""
    facts, rows = evidence.facts, evidence.rows
    if not rows or "parameters" not in facts:
        return "asserted", "the ledger does not name its parameters and their hash"
    trained = [name for name, _ in facts["parameters"]]
    for name, shape in facts["parameters"]:
        tensor = tensors.get(name)
        if tensor is None or list(tensor.shape) != shape or tensor.dtype is not torch.float32:
            return "wrong", f"{name} is missing, or of another shape or type"
    digest = model_hash(torch.cat([tensors[name].reshape(-1) for name in trained]))
    if digest != rows[-1].model:
        return "wrong", _which_round(digest, evidence)
    untrained = sorted(tensors.keys() - set(trained))
    reason = f"its {len(trained)} trained tensors are the model after round {len(rows) - 1}"
    if not untrained:
        return "verified", reason
    if (frozen := facts.get("frozen")) is None:
        reason += f"; its {len(untrained)} other tensors were not compared"
        return "asserted", f"{reason}: the ledger does not name them"
    # What is neither frozen nor trained may be a trained tensor under a second name.
    tied = {tensor_hash(tensors[name]) for name in trained}
    allowed = {name: {frozen[name]} if name in frozen else tied for name in untrained}
    odd = [name for name in untrained if tensor_hash(tensors[name]) not in allowed[name]]
    odd += sorted(frozen.keys() - set(untrained))
    if odd:
        return "wrong", f"{odd[0]} is not the run's, nor are {len(odd) - 1} others"
    return "verified", f"{reason}; its {len(untrained)} others are those it began with"


def _which_round(digest: str, evidence: Evidence) -> str:
    if rounds := [row.round for row in evidence.rows if row.model == digest]:
        return f"it is the model after round {rounds[-1]}, not after the newest"
    return "its trained tensors are not those of any round in the ledger"


def _metadata(metadata: Mapping[str, str], path: Path, evidence: Evidence) -> Verdict:
    part = metadata.get("privpart.part", "")
    derived = privacy_metadata(path, part, evidence=evidence)
    if unknown := sorted(metadata.keys() - derived.keys()):
        return "wrong", f"{unknown[0][:60]} is not a field of an export of this run"
    differ = {name for name in metadata if metadata[name] != derived[name]}
    for name in sorted(differ - {"privpart.statement", "privpart.status"}):
        return "wrong", f"{name} is {metadata[name][:80]!r}, the run's {derived[name]!r}"
    if part not in ("full", "trained"):
        return "wrong", f"privpart.part is {part[:20]!r}: must be full or trained"
    if missing := sorted(derived.keys() - metadata.keys()):
        return "asserted", f"it does not name {', '.join(missing)}"
    if not differ:
        return "verified", "its figures and statement are those derived from the ledger"
    if versions()["privpart"] != evidence.facts.get("versions", {}).get("privpart"):
        return "asserted", "its statement is in the words of another version"
    return "wrong", "its statement is not one that follows from the ledger"
