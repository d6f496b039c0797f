"""Evidence: what a run folder shows about its run, checked now and on this machine.

Each ``Check`` says what was compared with what. "verified" is said only of what was compared with
something that a forger of the folder could not change as well, or with the folder's own records
where a mistake, not a forger, is looked for; the sentence says which. What nothing contradicts and
nothing confirms is "asserted".

Whose words the ledger holds decides how far a report may go:

    here      this machine's log of runs saw these rounds being committed, and no copy of
              the run was ever adopted here
    signed    the head is signed by a public key that the reader had from elsewhere
    unknown   neither: whoever made the folder may have made all of it
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open

from accounting.checks import ConfigError, parsed_json
from privpart.plan import PrivacyPlan
from privpart.run import lives, members, package
from privpart.run.folder import named_secret
from privpart.run.ledger import KEY_BYTES, LEDGER, Ledger, Row, noise_name, read_key, signed_by
from privpart.run.members import MOVES, NODE_KEYS
from privpart.run.store import HANDLED, damage_named, model_hash, one_line, state_hash

CheckStatus = Literal["verified", "asserted", "wrong"]
Origin = Literal["here", "signed", "unknown"]
_MOVING = ("state", "released model", "key", "signing key", "log of runs")
_LOOKS = 5
"""Times that files are read again because the run advanced while they were read."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a verification: of what, how it ended, and what was compared with what."""

    what: str
    status: CheckStatus
    says: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """The ledger of a run, and what was checked about it."""

    ledger: Ledger
    origin: Origin  # whose words the ledger holds
    checks: tuple[Check, ...]
    package: package.Word  # whether the code that made the run is a release's

    @property
    def facts(self) -> dict[str, Any]:
        """Values that were recorded about the run, by name."""
        return self.ledger.facts

    @property
    def rows(self) -> list[Row]:
        """The committed rounds."""
        return self.ledger.committed()

    @property
    def head(self) -> str:
        """Chain value after the last of them."""
        return self.ledger.chains[-1]

    def status(self, what: str) -> CheckStatus:
        """Return the status of one line."""
        return self.line(what).status

    def line(self, what: str) -> Check:
        """Return one line."""
        return next(check for check in self.checks if check.what == what)


def gather(folder: str | Path, public_key: str | None = None) -> Evidence:
    """Check a run folder, which is only read and may still be running.

    ``public_key`` is the key that the run is known by, in hex, from anywhere but the folder.

    Raises:
        ConfigError: there is no run, its ledger cannot be read, or ``public_key`` is malformed.
    """
    path = Path(folder)
    expected = None if public_key is None else public_key_of(public_key)
    for _ in range(_LOOKS):
        ledger = Ledger(path)
        with damage_named(path / LEDGER):
            evidence = _checked(path, ledger, expected)
        moved = any(evidence.status(what) == "wrong" for what in _MOVING)
        # A run that committed a round in the meantime has other files than this ledger names.
        if not moved or Ledger(path).head == ledger.head:
            break
    return evidence


def public_key_of(text: str) -> str:
    """Return a public key in the form of the ledger, from its hex.

    Raises:
        ConfigError: it is not 64 hex digits.
    """
    key = text.strip().lower()
    if len(key) != 2 * KEY_BYTES or set(key) - set("0123456789abcdef"):
        raise ConfigError(
            f"public_key={text[:80]!r}: must be 64 hex digits, as a run's report prints them."
        )
    return key


def _checked(path: Path, ledger: Ledger, expected: str | None) -> Evidence:
    chain, signature = _chain(ledger), _signature(ledger, expected)
    state, model = _state_and_model(path, ledger)
    named, ended = ledger.facts["public_key"], ledger.has_ended
    signing = _key("signing key", path / "signing-key", named, signed_by, ended=ended)
    key = _noise_key(path, ledger)
    guard = Check("log of runs", *_guard(ledger))
    made_by, says = package.worst(ledger.facts)
    # Whoever edits files can edit what they write of themselves: no hash in a folder verifies.
    code = Check("package", "asserted", f"{made_by}: {says}")
    checks = [chain, signature, state, model, key, signing, guard, code]
    if NODE_KEYS in ledger.facts or MOVES in ledger.facts:
        checks.append(Check("node statements", *_statements(path, ledger)))
    # A log or a key that matches says nothing about rows that are not in one chain.
    sound = chain.status != "wrong" and signature.status != "wrong"
    origin: Origin = "unknown"
    if sound and guard.status == "verified":
        origin = "here"
    elif sound and signature.status == "verified":
        origin = "signed"
    return Evidence(ledger, origin, tuple(checks), made_by)


def _chain(ledger: Ledger) -> Check:
    if (fault := ledger.chain_fault()) is not None:
        return Check("chain", "wrong", fault)
    rounds = len(ledger.committed())
    return Check("chain", "verified", f"{rounds} rounds, their clients and all facts hash to it")


def _signature(ledger: Ledger, expected: str | None) -> Check:
    if (fault := ledger.head_fault()) is not None:
        return Check("signature", "wrong", fault)
    maker = f"made by {ledger.facts['public_key']}"
    if expected is None:
        why = "a key that the folder itself names; compare it with the one you know"
        return Check("signature", "asserted", f"{maker}, {why}")
    if expected != ledger.facts["public_key"]:
        return Check("signature", "wrong", f"{maker}, not by {expected}, the key given")
    return Check("signature", "verified", f"{maker}, the key given")


def _state_and_model(path: Path, ledger: Ledger) -> tuple[Check, Check]:
    facts, rows = ledger.facts, ledger.committed()
    what = "released model"
    if not rows:
        none = "no round is committed"
        return Check("state", "verified", none), Check(what, "verified", none)
    name, expected = ledger.newest()
    file, row = path / name, rows[-1]
    try:
        if (digest := state_hash(file)) != expected:
            state = Check("state", "wrong", f"{file.name} is not the one that the ledger names")
            return state, Check(what, "wrong", f"is missing: {file.name} is another one")
        with safe_open(file, framework="pt") as tensors:
            parameters = tensors.get_tensor("parameters")
            values = parsed_json((tensors.metadata() or {})["values"])
        sources = set(_sources(values))
        registers = _registers_fault(path, values.get("registers"))
    except Exception as error:  # the library raises types of its own
        reason = f"{file.name} cannot be read: {one_line(error)}"
        return Check("state", "wrong", reason), Check(what, "wrong", reason)
    state = Check("state", "verified", f"{file.name} has the hash in the ledger, {digest[:12]}")
    if registers:
        state = Check("state", "wrong", registers)
    # Noise of another key than the one whose hash the ledger signed is of another run.
    if sources - {facts["key"]}:
        state = Check("state", "wrong", f"{file.name} is of noise from another key")
    if (model := model_hash(parameters)) != row.model:
        return state, Check(what, "wrong", f"{file.name} holds another model than the ledger names")
    reason = f"{len(parameters):,} parameters have the hash in the ledger, {model[:12]}"
    return state, Check(what, "verified", reason)


def _registers_fault(path: Path, saved: Any) -> str:  # noqa: ANN401
    """Return what is wrong with the registers that a state names; "" if it needs none."""
    if saved is None or not saved["round"]:
        return ""
    name = noise_name(saved["round"])
    right = os.path.lexists(path / name) and state_hash(path / name) == saved["file"]
    return "" if right else f"{name} is missing, or not the one that the state names"


def _sources(values: object) -> Iterator[str]:
    """Yield the identity of every noise source that a state names."""
    for name, value in values.items() if isinstance(values, dict) else ():
        if name == "source" and isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from _sources(value)


def _noise_key(path: Path, ledger: Ledger) -> Check:
    seed, named = ledger.facts["seed"], ledger.facts["key"]
    if seed is None and not named.startswith("seeded:"):
        return _key("key", path / "key", named, named_secret, ended=ledger.has_ended)
    if named != f"seeded:{seed}":
        return Check("key", "wrong", f"the ledger says seed {seed} and names {named[:40]}")
    return Check("key", "verified", f"seed {seed}: anybody can compute the noise")


def _key(
    what: str, file: Path, named: str, identity: Callable[[bytes], str], *, ended: bool
) -> Check:
    """Check a key, which lies in the folder until the run ends."""
    if not os.path.lexists(file):
        if ended:
            return Check(what, "verified", "erased from this folder, as of a run that has ended")
        return Check(what, "asserted", "not in this folder, so it was not compared with the ledger")
    if ended:
        why = "still in this folder, although the run has ended: open the run to erase it"
        return Check(what, "wrong", why)
    try:
        read_key(file, named, identity)
    except OSError as error:
        return Check(what, "asserted", f"cannot be read: {one_line(error)}")
    except ConfigError:
        why = "not the one that this run was begun with: it was changed or replaced"
        return Check(what, "wrong", why)
    return Check(what, "verified", "is the one that the ledger names")


def _statements(path: Path, ledger: Ledger) -> tuple[CheckStatus, str]:
    """Compare the rounds of all clients with what the nodes signed, by the keys in the ledger."""
    plan = PrivacyPlan.from_dict(ledger.facts["plan"])
    try:
        whole, says = members.compared(
            path, ledger.facts, ledger.committed(), plan.participation, plan.hash
        )
    except (OSError, *HANDLED) as error:
        return "wrong", f"{members.STATEMENTS} is damaged or forged: {one_line(error)}"
    return "verified" if whole else "asserted", says


def _guard(ledger: Ledger) -> tuple[CheckStatus, str]:
    """Compare the run with what this machine's log of runs saw of it."""
    facts, rounds = ledger.facts, len(ledger.committed())
    if facts["seed"] is not None:
        return "asserted", "a seeded run may be repeated by anybody"
    try:
        life = lives.life(facts["run_id"])
    except ConfigError as error:
        return "asserted", str(error)
    # The log may be behind by the round that is being committed.
    if fault := life.fault(ledger.chains, closed="closed" in facts):
        return "wrong" if life.head else "asserted", fault
    # What this machine knows of the run begins with a copy that somebody vouched for.
    if not life.is_ours:
        return (
            "asserted",
            "a copy of the run was adopted, of which this machine need not have seen every round; "
            "nothing shows that its original stopped",
        )
    if len(ledger.chains) - 1 != life.commits:
        why = f"round {rounds - 1} is being committed, or its commit failed: resume the run"
        return "asserted", why
    return "verified", f"this machine saw the same {rounds} rounds, and no more"
