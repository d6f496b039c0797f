"""Witness: what one machine's log of runs says at a time, in a file for another machine.

A log knows its own machine. Whether a copy of a run was continued elsewhere shows only beside what
the others' logs say. A witness holds how far each run went on its machine, by random ids and
hashes, without names of people, and is compared with a run folder on any other. On its own machine
it tells that the state directory was restored to an older copy.

A witness is not signed: whoever hands it over can write any. It speaks of one state directory, up
to the time in it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, with_config

from accounting.checks import MOST_ROUNDS, ConfigError, parsed_json
from privpart.run import log
from privpart.run.evidence import Check, Evidence
from privpart.run.lives import lives
from privpart.run.store import HANDLED, one_line, read_small

_LARGEST = 2**24
"""Bytes of a file: some 70,000 runs."""
Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
HashOrNone = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a run went on a machine; see ``Life``."""

    run: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    rounds: Annotated[int, Field(ge=0, le=MOST_ROUNDS)]
    head: Hash
    coming: HashOrNone
    closed: bool
    evaluations: Annotated[int, Field(ge=0, le=MOST_ROUNDS)] = 0


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """A log of runs at a time."""

    schema: Literal["privpart/witness/1"] = "privpart/witness/1"
    # the time, in UTC, by the machine's clock
    at: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}\+00:00$")]
    lost: bool  # whether an earlier log of the machine is missing
    lines: Annotated[int, Field(ge=0)]  # number of lines of the log
    # hash of its first line about a run, which tells logs apart; "" if it has none
    first: HashOrNone
    head: HashOrNone  # hash of its last line; "" if it has none
    runs: tuple[Standing, ...]  # the runs that the machine made or continued

    def __post_init__(self) -> None:
        if bool(self.lines) != bool(self.head) or (self.first and not self.head):
            raise ValueError("a log without lines has no hashes, and any other has a head")
        if len({line.run for line in self.runs}) < len(self.runs):
            raise ValueError("a run is there twice")


_WITNESS = TypeAdapter(Witness)
_SEEN = [field.name for field in fields(Standing) if field.name != "run"]


def witness() -> Witness:
    """Return what this machine's log says now; errors are those of ``log.writing`` and ``log``."""
    with log.writing():
        entries, heads = log.lines_of(), log.heads()
    return Witness(
        at=log.now(),
        lost=bool(entries) and entries[0].event == "lost",
        lines=len(heads),
        first=_first(entries, heads),
        head=heads[-1] if heads else "",
        runs=tuple(
            Standing(run=run, **{name: getattr(life, name) for name in _SEEN})
            for run, life in lives(entries).items()
            if run and life.head
        ),
    )


def _first(entries: Sequence[log.Entry], heads: Sequence[str]) -> str:
    """Return what tells a log from others: limits alike may be set everywhere in one second."""
    return next((head for entry, head in zip(entries, heads, strict=False) if entry.run), "")


def write_witness(path: str | Path) -> Witness:
    """Write what this machine's log says now into a file, and return it.

    Raises:
        ConfigError: the file cannot be written, or the log cannot be read.
    """
    now = witness()
    try:
        Path(path).write_text(json.dumps(asdict(now), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {one_line(error)}.") from None
    return now


def read_witness(path: str | Path) -> Witness:
    """Return the witness in a file, which a stranger may have written.

    Raises:
        ConfigError: it cannot be read, or is not a valid witness.
    """
    try:
        text = read_small(Path(path), _LARGEST)
        # Which refuses a key that is there twice.
        parsed_json(text)
        return _WITNESS.validate_json(text, strict=True)
    except (OSError, *HANDLED) as error:
        raise ConfigError(
            f"{str(path)[:200]} is not a witness: {one_line(error)}. Pass a file that `privpart "
            "budget --write-witness` wrote on another machine."
        ) from None


def compared(shown: Witness, evidence: Evidence) -> Check:
    """Return whether a machine continued another copy of a run than the one in a folder."""
    facts = evidence.facts
    if facts["seed"] is not None:
        return _line("asserted", "a seeded run may be repeated by anybody")
    if evidence.status("chain") == "wrong":
        return _line("asserted", "not compared: the ledger was changed")
    try:
        entries, heads = log.lines_of(), log.heads()
    except ConfigError as error:
        return _line("asserted", str(error).rstrip("."))
    is_own = bool(shown.first) and _first(entries, heads) == shown.first
    whose = "this" if is_own else "that"
    if is_own and heads[shown.lines - 1 : shown.lines] != [shown.head]:
        return _line(
            "wrong",
            f"this machine's log of runs is an older copy: it had {shown.lines} lines at "
            f"{shown.at}, which are not those of now",
        )
    says = f"the log {shown.head[:12] or 'without a line'} of {whose} machine, {shown.at}: "
    if shown.lost:
        return _line("asserted", f"{says}an earlier one is lost, and with it what was continued")
    seen = {one.run: one for one in shown.runs}.get(facts["run_id"])
    if seen is None:
        return _line("verified", f"{says}no copy of the run was made or continued by then")
    return _beside(seen, evidence.ledger.chains, facts, says)


def _beside(seen: Standing, chains: list[str], facts: Mapping[str, Any], says: str) -> Check:
    """Compare the rounds that a machine saw with the heads of a folder."""
    here, there = len(chains) - 1, seen.rounds + seen.evaluations
    what = "rounds and evaluations" if seen.evaluations else "rounds"
    if there > here:
        reason = f"{there} {what} were committed, and this folder has {here}"
        return _line("wrong", f"{says}{reason}: it is an older copy, or another was continued")
    if chains[there] != seen.head:
        return _line("wrong", f"{says}another copy was continued, to {there} {what}")
    if seen.closed and ("closed" not in facts or there < here):
        return _line("wrong", f"{says}the run was closed after {there} {what}")
    if seen.coming and chains[there + 1 : there + 2] != [seen.coming]:
        reason = f"a commit after {there} {what} was cut off, and is not in this folder"
        return _line("asserted", f"{says}{reason}: resume the run there, and export again")
    reason = f"the first {there} of these {here} {what} were committed, and no others"
    return _line("verified", f"{says}{reason}")


def _line(status: Literal["verified", "asserted", "wrong"], says: str) -> Check:
    return Check("witness", status, says)
