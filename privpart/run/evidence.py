"""Evidence: what a run folder shows about its run, checked now and on this machine.

Each ``Check`` says what was compared with what. "verified" is said only of what was compared with
something that a forger of the folder could not change as well, or with the folder's own records
where a mistake, not a forger, is looked for; the sentence says which. What nothing contradicts and
nothing confirms is "asserted".

Whose words the ledger holds decides how far a report may go:

    here      the rollback guard of this machine saw these rounds being committed, and no copy of
              the run was ever adopted here
    signed    the head is signed by a public key that the reader had from elsewhere
    unknown   neither: whoever made the folder may have made all of it
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open

from accounting.checks import ConfigError, parsed_json
from privpart.messages import ClientId
from privpart.run import witness
from privpart.run.database import damage_said
from privpart.run.files import opened
from privpart.run.folder import newest_state, newest_state_hash
from privpart.run.identity import KEY_BYTES, SigningKey, model_hash, source_of
from privpart.run.ledger import Head, Ledger, Row

CheckStatus = Literal["verified", "asserted", "wrong"]
Origin = Literal["here", "signed", "unknown"]
_MOVING = ("state", "released model", "key", "signing key", "rollback guard")
_STANDS: Mapping[witness.Standing, str] = {
    "older": "this folder is an older copy: it stands after {rounds} rounds, while {seen} were "
    "released on this machine",
    "another": "this machine saw another chain of the run, of {seen} rounds",
    "closed": "the run was closed after {seen} rounds on this machine, and this copy was not",
    "newer": "this machine saw {seen} of the {rounds} rounds; the others were made elsewhere",
}
"""What is wrong with a folder that does not stand where this machine saw its run."""
_LOOKS = 5
"""Times that files are read again because the run advanced while they were read."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a verification.

    Attributes:
        what: what was checked, such as "chain".
        status: "verified", "asserted" (nothing contradicts it, nothing confirms it) or "wrong".
        says: what was compared with what, or what is wrong.
    """

    what: str
    status: CheckStatus
    says: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """The ledger of a run, and what was checked about it.

    Attributes:
        facts: values that were recorded about the run, by name.
        rows: committed rounds.
        histories: each client's rounds.
        head: what was signed last; None in a ledger of an earlier schema.
        origin: whose words the ledger holds, see the module.
        checks: lines on chain, signature, state, released model, keys and rollback guard.
    """

    facts: Mapping[str, Any]
    rows: list[Row]
    histories: Mapping[ClientId, list[int]]
    head: Head | None
    origin: Origin
    checks: tuple[Check, ...]

    def status(self, what: str) -> CheckStatus:
        """Return the status of one line."""
        return self.line(what).status

    def line(self, what: str) -> Check:
        """Return one line."""
        return next(check for check in self.checks if check.what == what)


def gather(folder: str | Path, public_key: str | None = None) -> Evidence:
    """Check a run folder, which is only read and may still be running.

    Args:
        folder: the run folder.
        public_key: key that the run is known by, in hex, from anywhere but the folder.

    Raises:
        ConfigError: there is no run, its ledger cannot be read, or ``public_key`` is malformed.
    """
    path = Path(folder)
    expected = None if public_key is None else public_key_of(public_key)
    for _ in range(_LOOKS):
        ledger = Ledger(path / "ledger.sqlite", read_only=True)
        with damage_said(path / "ledger.sqlite"):
            found = _checked(path, ledger, expected)
        if not any(found.status(what) == "wrong" for what in _MOVING):
            break
        again = Ledger(path / "ledger.sqlite", read_only=True)
        if (again.head, again.committed()) == (ledger.head, found.rows):
            break
    return found


def public_key_of(text: str) -> str:
    """Return a public key in the form of the ledger, from its hex.

    Raises:
        ConfigError: it is not 64 hex digits.
    """
    found = text.strip().lower()
    if len(found) != 2 * KEY_BYTES or set(found) - set("0123456789abcdef"):
        raise ConfigError(
            f"public_key={text[:80]!r}: must be 64 hex digits, as a run's report prints them."
        )
    return found


def _checked(path: Path, ledger: Ledger, expected: str | None) -> Evidence:
    chain, signature = _chain(ledger), _signature(ledger, expected)
    rows = ledger.committed()
    state, model = _state_and_model(path, ledger.facts, rows)
    ended = len(rows) >= ledger.planned_rounds or "closed" in ledger.facts
    keys = (_noise_key(path, ledger, ended=ended), _signing_key(path, ledger, ended=ended))
    checks = (chain, signature, state, model, *keys, _guard(ledger, rows))
    sound = chain.status != "wrong" and signature.status != "wrong"
    origin: Origin = "unknown"
    if sound and checks[-1].status == "verified":
        origin = "here"
    elif sound and signature.status == "verified":
        origin = "signed"
    return Evidence(ledger.facts, rows, ledger.rounds_by_client(), ledger.head, origin, checks)


def _chain(ledger: Ledger) -> Check:
    if (fault := ledger.chain_fault()) is not None:
        return Check("chain", "wrong", fault)
    rounds = len(ledger.committed())
    return Check("chain", "verified", f"{rounds} rounds, their clients and all facts hash to it")


def _signature(ledger: Ledger, expected: str | None) -> Check:
    if not ledger.signed:
        said = f"a ledger of schema {ledger.facts['schema']!r} is not signed"
        return Check("signature", "asserted" if expected is None else "wrong", said)
    if (fault := ledger.head_fault()) is not None:
        return Check("signature", "wrong", fault)
    own = ledger.facts["public_key"]
    if expected is None:
        said = (
            f"made by {own}, a key that the folder itself names; compare it with the one you know"
        )
        return Check("signature", "asserted", said)
    if expected != own:
        return Check("signature", "wrong", f"made by {own}, not by {expected}, the key given")
    return Check("signature", "verified", f"made by {own}, the key given")


def _state_and_model(path: Path, facts: Mapping[str, Any], rows: list[Row]) -> tuple[Check, Check]:
    if not rows:
        none = "no round is committed"
        return Check("state", "verified", none), Check("released model", "verified", none)
    file = path / newest_state(facts, len(rows))
    what, row = "released model", rows[-1]
    try:
        if (found := file_hash(file)) != newest_state_hash(facts, rows):
            state = Check("state", "wrong", f"{file.name} is not the one that the ledger names")
            return state, Check(what, "wrong", f"is missing: {file.name} is another one")
        with safe_open(file, framework="pt") as tensors:
            parameters = tensors.get_tensor("parameters")
            source = _sources(parsed_json((tensors.metadata() or {})["values"]))
    except Exception as error:  # the library raises types of its own
        said = f"{file.name} cannot be read: {_one_line(error)}"
        return Check("state", "wrong", said), Check(what, "wrong", said)
    state = Check("state", "verified", f"{file.name} has the hash in the ledger, {found[:12]}")
    if (key := facts.get("key")) is not None and set(source) - {key}:
        state = Check("state", "wrong", f"{file.name} is of noise from another key")
    if row.model is None:
        return state, Check(what, "asserted", "the ledger's schema does not name it")
    if (own := model_hash(parameters)) != row.model:
        return state, Check(what, "wrong", f"{file.name} holds another model than the ledger names")
    said = f"{len(parameters):,} parameters have the hash in the ledger, {own[:12]}"
    return state, Check(what, "verified", said)


def file_hash(path: Path) -> str:
    """Return the SHA-256, in hex, of a file.

    Raises:
        OSError: see ``opened``.
    """
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sources(values: object) -> Iterator[str]:
    """Yield the identity of every noise source that a state names."""
    for name, value in values.items() if isinstance(values, dict) else ():
        if name == "source" and isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from _sources(value)


def _noise_key(path: Path, ledger: Ledger, *, ended: bool) -> Check:
    facts = ledger.facts
    seed, named = facts["seed"], facts.get("key")
    if seed is None and not str(named).startswith("seeded:"):

        def identity(secret: bytes) -> str:
            return source_of(secret, None).identity

        return Check("key", *_kept_key(path / "key", named, identity, ended=ended))
    if named not in (None, f"seeded:{seed}"):
        said = f"the ledger says seed {seed} and names {str(named)[:40]}"
        return Check("key", "wrong", said)
    return Check("key", "verified", f"seed {seed}: anybody can compute the noise")


def _signing_key(path: Path, ledger: Ledger, *, ended: bool) -> Check:
    if not ledger.signed:
        return Check("signing key", "asserted", "the ledger's schema has none")

    def public(secret: bytes) -> str:
        return SigningKey(secret).public_key

    named = ledger.facts["public_key"]
    return Check("signing key", *_kept_key(path / "signing-key", named, public, ended=ended))


def _kept_key(
    file: Path, named: str | None, identity: Callable[[bytes], str], *, ended: bool
) -> tuple[CheckStatus, str]:
    """Return status and words for a key that lies in the folder until the run ends."""
    if not os.path.lexists(file):
        if ended:
            return "verified", "erased from this folder, as of a run that has ended"
        return "asserted", "not in this folder, so it was not compared with the ledger"
    if ended:
        return "wrong", "still in this folder, although the run has ended: open the run to erase it"
    try:
        secret = _short_file(file)
    except OSError as error:
        return "asserted", f"cannot be read: {_one_line(error)}"
    if len(secret) != KEY_BYTES or named not in (None, identity(secret)):
        return "wrong", "not the one that this run was begun with: it was changed or replaced"
    if named is None:
        return "asserted", "the ledger's schema holds no hash of it"
    return "verified", "is the one that the ledger names"


def _short_file(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path.name} is not a file")
        return file.read(KEY_BYTES + 1)


def _guard(ledger: Ledger, rows: list[Row]) -> Check:
    what, facts = "rollback guard", ledger.facts
    if facts["seed"] is not None:
        return Check(what, "asserted", "a seeded run has none")
    try:
        seen = witness.last_seen(facts["run_id"])
    except ConfigError as error:
        return Check(what, "asserted", str(error))
    if seen is None:
        return Check(what, "asserted", "this machine has no record of the run")
    chains = [facts["genesis"], *(row.chain for row in rows)]
    standing = seen.standing(chains, closed="closed" in facts)
    if standing != "newest":
        return Check(what, "wrong", _STANDS[standing].format(rounds=len(rows), seen=seen.rounds))
    adopted = facts.get("adopted_at") if seen.adopted_at is None else seen.adopted_at
    if adopted is not None:
        said = f"the run was adopted after {adopted} rounds, which this machine need not have seen"
        return Check(what, "asserted", f"{said}; nothing shows that its original stopped")
    return Check(what, "verified", f"this machine saw the same {len(rows)} rounds, and no more")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
