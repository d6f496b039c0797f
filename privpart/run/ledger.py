"""Ledger: the committed rounds of a run and their clients, in SQLite, chained by hashes and signed.

Row r holds the hashes of the state and of the released model after round r. Each row's chain value
hashes the previous row's and the whole content of the row, including its clients, so no row can be
changed, dropped or moved without changing all later ones. The head names the last row and hashes
all facts; the run's signing key signs it in the transaction that adds the row, so nobody without
that key can write the chain anew.

About clients, the ledger holds which of them entered the sum of which round, by their ids as they
are, and how many updates each round received: no update, no example, no reason of a refusal. So it
names clients; it stays with the server and is never released.

An id that is a whole number of 64 bits is an INTEGER; every other id is a TEXT, its JSON: the
decimal digits of a larger number, or a string in quotes. The number 1 and the string "1" are
therefore two clients, here and everywhere else.

Ledgers of the two schemas before are read and continued as they were begun: unsigned, without the
hash of the model; in the oldest, all ids are whole numbers of 64 bits.
"""

import hashlib
import json
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

from accounting import checks
from accounting.checks import ConfigError
from privpart.messages import ClientId, id_order, is_client_id
from privpart.run.database import create_database, damage_said, open_database, reading, snapshot
from privpart.run.identity import SigningKey, is_signed

SCHEMA = "privpart/ledger/5"
UNSIGNED = "privpart/ledger/3"
INTEGERS_ONLY = "privpart/ledger/2"
_LATER = (
    "adopted_at",
    "closed",
    "genesis",
    "rows_differ",
    "sampling_checked",
    "self_clipped_since",
)
_RUN_ID = re.compile("[0-9a-f]{32}")
_HASH = re.compile("[0-9a-f]{64}")
_TABLES = """
CREATE TABLE run (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE head (
    rounds INTEGER NOT NULL, chain TEXT NOT NULL, facts TEXT NOT NULL, signature TEXT NOT NULL
) STRICT;
CREATE TABLE rounds (
    round INTEGER PRIMARY KEY, state TEXT NOT NULL, model TEXT NOT NULL, clip_norm REAL NOT NULL,
    received INTEGER NOT NULL, counted INTEGER NOT NULL, summed INTEGER NOT NULL,
    summed_by TEXT NOT NULL, chain TEXT NOT NULL
) STRICT;
CREATE TABLE participations (
    round INTEGER, client ANY, PRIMARY KEY (round, client)
) STRICT, WITHOUT ROWID;
"""
_UNSIGNED_TABLES = """
CREATE TABLE run (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE rounds (
    round INTEGER PRIMARY KEY, state TEXT NOT NULL, clip_norm REAL NOT NULL,
    received INTEGER NOT NULL, counted INTEGER NOT NULL, summed INTEGER NOT NULL,
    chain TEXT NOT NULL
) STRICT;
CREATE TABLE participations (
    client ANY, round INTEGER REFERENCES rounds, PRIMARY KEY (client, round)
) STRICT, WITHOUT ROWID;
CREATE INDEX participations_by_round ON participations (round);
"""
_ACCEPTED = {
    SCHEMA: _TABLES,
    UNSIGNED: _UNSIGNED_TABLES,
    INTEGERS_ONLY: _UNSIGNED_TABLES.replace("client ANY", "client INTEGER"),
}
_LARGER_NUMBER = re.compile("-?[1-9][0-9]{18,77}")
_LONGEST_ROW = 2**16
"""Bytes of the longest row of a round or participation; the JSON of an id has at most 3074."""
MOST_FACTS = 100
"""Of a run, with those that are added after it began."""


@dataclass(frozen=True, slots=True)
class Row:
    """One committed round.

    Attributes:
        round: number of the round, from 0.
        state: SHA-256, in hex, of the state file after the round.
        model: hash of the released parameters, see ``model_hash``; None in an unsigned ledger.
        clip_norm: clip norm of the round.
        received: number of updates received.
        counted: number of updates that entered the sum.
        summed: number of counted updates that an engine clipped in the server's place.
        summed_by: that engine, if it is this package's, or else ""; None in an unsigned ledger.
        chain: hash of this row and all before it.
    """

    round: int
    state: str
    model: str | None
    clip_norm: float
    received: int
    counted: int
    summed: int
    summed_by: str | None
    chain: str


@dataclass(frozen=True, slots=True)
class Head:
    """What the run's signing key signed last.

    Attributes:
        rounds: number of committed rounds.
        chain: chain value of the last row, or ``genesis``.
        facts: SHA-256, in hex, of all facts.
        signature: Ed25519 signature of ``signed_message``, in hex.
    """

    rounds: int
    chain: str
    facts: str
    signature: str


class Ledger:
    """The open ledger of one run; every change is on the disk when its call returns.

    Args:
        path: the file.
        read_only: read it once, as it is now, and write nothing, not even beside it.

    Attributes:
        facts: values that were recorded about the run, by name.
        head: what was signed last; None in an unsigned ledger, which has none.
        signer: key that signs every change; None refuses changes, unless the ledger is unsigned.

    Raises:
        ConfigError: there is no ledger, or it is damaged, changed or of another schema.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self.signer: SigningKey | None = None
        if read_only:
            with snapshot(path, _ACCEPTED) as (db, schema):
                self._load(db, schema)
        else:
            self._db, schema = open_database(path, _ACCEPTED)
            try:
                with reading(self._db, path):
                    self._load(self._db, schema)
            except BaseException:
                self.close()
                raise
        with damage_said(path):
            self._check_facts(schema)

    @classmethod
    def create(
        cls, path: Path, facts: Mapping[str, Any], signer: SigningKey | None = None
    ) -> "Ledger":
        """Write a ledger without rounds that holds ``facts``, which include "schema"; open it."""
        said = {**facts, "genesis": genesis(facts)}
        contents: dict[str, list[tuple[object, ...]]] = {
            "run": [(name, json.dumps(value)) for name, value in said.items()]
        }
        if said["schema"] == SCHEMA:
            head = _signed(said, 0, said["genesis"], facts_hash(said), _need(signer, path))
            contents["head"] = [astuple(head)]
        create_database(path, _ACCEPTED[said["schema"]], contents)
        ledger = cls(path)
        ledger.signer = signer
        return ledger

    def _load(self, db: sqlite3.Connection, schema: str) -> None:
        """Read everything; the values may be of any kind."""
        texts = db.execute("SELECT name, value FROM run LIMIT ?", (MOST_FACTS,)).fetchall()
        self.facts: dict[str, Any] = {name: _parsed(value) for name, value in texts}
        usual = db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_ROW)
        try:
            self._rows = _read_rows(db, signed=schema == SCHEMA)
            self._clients = _clients_by_round(db)
            self.head = _read_head(db) if schema == SCHEMA else None
        finally:
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, usual)
        self._facts_hash = facts_hash(self.facts) if self.head else ""
        self._stale = False

    def _check_facts(self, found: str) -> None:
        facts = self.facts
        if (schema := facts.get("schema")) != found:
            self._refuse(
                f"has schema {schema!r} and the tables of {found!r}; this version reads "
                f"{', '.join(map(repr, _ACCEPTED))}."
            )
        named = isinstance(facts.get("run_id"), str) and _RUN_ID.fullmatch(facts["run_id"])
        seeded = "seed" in facts and (facts["seed"] is None or type(facts["seed"]) is int)
        if not named or not seeded or not isinstance(facts.get("plan"), dict):
            self._refuse("is damaged: run_id, seed or plan is missing or odd.")
        odd = schema == SCHEMA and not _HASH.fullmatch(str(facts.get("public_key")))
        if odd or type(self.planned_rounds) is not int:
            self._refuse("is damaged: the public key or the plan's rounds are missing or odd.")
        closed = facts.get("closed", {"rounds": 0, "state": None})
        if type(closed["rounds"]) is not int or type(facts.get("adopted_at", 0)) is not int:
            self._refuse("is damaged: how it was ended or adopted is odd.")
        if facts.get("genesis") != genesis(facts):
            self._refuse("was changed: facts recorded when the run began are others.")

    def _refuse(self, said: str) -> NoReturn:
        self.close()
        raise ConfigError(f"{self._path} {said}")

    @property
    def signed(self) -> bool:
        """Whether the ledger is of a schema whose head is signed."""
        return self.head is not None

    @property
    def planned_rounds(self) -> int:
        """Number of rounds that the plan covers."""
        rounds: int = self.facts["plan"].get("participation", {}).get("rounds", 0)
        return rounds

    def close(self) -> None:
        """Close the file."""
        if self._db is not None:
            self._db.close()

    def add_fact(self, name: str, value: Any) -> None:  # noqa: ANN401  any JSON
        """Record another fact about the run, as JSON."""
        facts = {**self.facts, name: value}
        found = facts_hash(facts) if self.signed else ""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (name, json.dumps(value)))
            if self.head is not None:
                self._sign(db, facts, self.head.rounds, self.head.chain, found)
        self.facts, self._facts_hash = facts, found

    def rows(self) -> list[Row]:
        """Return the committed rounds in order, after checking that they form one signed chain.

        Raises:
            ConfigError: a row was changed, dropped or moved, or the signature is not that of the
                key that the ledger names.
        """
        rows = self.committed()
        if fault := self.chain_fault() or self.head_fault():
            raise ConfigError(f"{self._path}: {fault}.")
        return rows

    def committed(self) -> list[Row]:
        """Return the committed rounds as they are written, in order of their numbers."""
        if self._stale and self._db is not None:
            with reading(self._db, self._path):
                self._load(self._db, self.facts["schema"])
        return self._rows

    def chain_fault(self) -> str | None:
        """Return why the rows do not form one chain, or None if they do."""
        chain = self.facts["genesis"]
        for number, row in enumerate(self._rows):
            clients = self._clients.get(number, [])
            chain = _link(chain, row, clients)
            if row.round != number or row.chain != chain or row.counted != len(clients):
                return (
                    f"row {number} does not follow from the rows before it. The ledger was changed "
                    "after the fact, so no guarantee can be derived from it"
                )
        if any(not 0 <= round_ < len(self._rows) for round_ in self._clients):
            return "it names clients of rounds that were never committed: it was changed"
        return None

    def head_fault(self) -> str | None:
        """Return why the head is not that of these rows and facts, or None if it is.

        The signature is compared with the key that the ledger itself names.
        """
        head, facts = self.head, self.facts
        if head is None:
            return None
        last = self._rows[-1].chain if self._rows else facts["genesis"]
        if (head.rounds, head.chain) != (len(self._rows), last):
            return (
                f"its signed head is of {head.rounds} rounds, but it holds {len(self._rows)} or "
                "others: it was changed after the fact"
            )
        if (closed := facts.get("closed")) is not None and closed["rounds"] != head.rounds:
            return f"it was ended after {closed['rounds']} rounds, but holds {head.rounds}"
        if head.facts != self._facts_hash:
            return "facts were changed after its head was signed"
        if not is_signed(facts["public_key"], signed_message(facts, head), head.signature):
            return (
                f"the signature of its head is not that of the run's key {facts['public_key']}: it "
                "was changed after the fact"
            )
        return None

    def rounds_by_client(self) -> dict[ClientId, list[int]]:
        """Return each client's rounds, ascending, as of the last call of ``committed``."""
        found: dict[ClientId, list[int]] = {}
        for round_, clients in self._clients.items():
            for client in clients:
                found.setdefault(client, []).append(round_)
        return found

    def refuse(self, clients: Sequence[ClientId]) -> None:
        """Check that the ledger can hold these ids.

        Raises:
            ConfigError: it was begun by an earlier version, and an id is of a kind that is new.
        """
        if self.facts["schema"] != INTEGERS_ONLY:
            return
        new = [client for client in clients if type(_to_column(client)) is not int]
        if new:
            raise ConfigError(
                f"client {new[0]!r}: the ledger of this run was begun by an earlier version, and "
                "holds only ids that are whole numbers of 64 bits. Name this client by one, or "
                "begin a fork, whose ledger takes any id."
            )

    def append(self, row: Row, clients: Sequence[ClientId]) -> None:
        """Commit a signed round and its clients, which ``refuse`` let pass, in one transaction."""
        values = [value for value in astuple(row) if value is not None]
        with self._transaction() as db:
            db.execute(f"INSERT INTO rounds VALUES ({', '.join('?' * len(values))})", values)
            db.executemany(
                "INSERT INTO participations (round, client) VALUES (?, ?)",
                [(row.round, _to_column(client)) for client in clients],
            )
            if self.head is not None:
                self._sign(db, self.facts, row.round + 1, row.chain, self._facts_hash)
        self._stale = True

    def _sign(
        self, db: sqlite3.Connection, facts: Mapping[str, Any], rounds: int, chain: str, found: str
    ) -> None:
        head = _signed(facts, rounds, chain, found, _need(self.signer, self._path))
        db.execute("UPDATE head SET rounds = ?, chain = ?, facts = ?, signature = ?", astuple(head))
        self.head = head

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if self._db is None:
            raise ConfigError(f"{self._path} was opened to be read only.")
        before = self.head
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            self.head = before
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


def genesis(facts: Mapping[str, Any]) -> str:
    """Return the hash that the first row is chained to, over all facts from the run's begin."""
    return facts_hash({name: value for name, value in facts.items() if name not in _LATER})


def facts_hash(facts: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of facts as JSON with sorted names."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def signed_message(facts: Mapping[str, Any], head: Head) -> bytes:
    """Return the bytes that a head's signature signs."""
    said = [facts["schema"], facts["run_id"], head.rounds, head.chain, head.facts]
    return b"privpart signed head|" + json.dumps(said).encode()


def next_row(
    before: str,
    *,
    round_: int,
    state: str,
    clip_norm: float,
    received: int,
    clients: Sequence[ClientId],
    summed: int = 0,
    summed_by: str = "",
    model: str | None = None,
) -> Row:
    """Return the next row of a chain whose head is ``before``.

    ``clients`` must be in the order of ``id_order``; ``model`` is None for an unsigned ledger,
    which does not say who summed.
    """
    by = None if model is None else summed_by
    row = Row(round_, state, model, clip_norm, received, len(clients), summed, by, "")
    return replace(row, chain=_link(before, row, clients))


def _signed(
    facts: Mapping[str, Any], rounds: int, chain: str, found: str, signer: SigningKey
) -> Head:
    head = Head(rounds, chain, found, "")
    return replace(head, signature=signer.sign(signed_message(facts, head)))


def _need(signer: SigningKey | None, path: Path) -> SigningKey:
    if signer is None:
        raise ConfigError(
            f"{path}: the run's signing key is missing, so nothing can be added to its ledger. "
            "Restore the file signing-key, or begin a fork."
        )
    return signer


def _parsed(text: str) -> Any:  # noqa: ANN401  any JSON
    value = checks.parsed_json(text)
    json.dumps(value, ensure_ascii=False).encode()  # half a character cannot be printed
    return value


def _read_rows(db: sqlite3.Connection, *, signed: bool) -> list[Row]:
    model, by = ("model", "summed_by") if signed else ("NULL", "NULL")
    columns = f"round, state, {model}, clip_norm, received, counted, summed, {by}"
    found = db.execute(
        f"SELECT {columns}, chain FROM rounds ORDER BY round LIMIT ?", (2 * checks.MOST_ROUNDS,)
    )
    text = str if signed else type(None)
    kinds = [int, str, text, float, int, int, int, text, str]
    rows = []
    for values in found:
        if list(map(type, values)) != kinds:
            raise ValueError(f"row {values[0]!r} holds values of other kinds")
        rows.append(Row(*values))
    return rows


def _read_head(db: sqlite3.Connection) -> Head:
    ((rounds, chain, facts, signature),) = db.execute(
        "SELECT rounds, chain, facts, signature FROM head LIMIT 2"
    ).fetchall()
    if type(rounds) is not int or {type(chain), type(facts), type(signature)} != {str}:
        raise ValueError("its head holds values of other kinds")
    return Head(rounds, chain, facts, signature)


def _clients_by_round(db: sqlite3.Connection) -> dict[int, list[ClientId]]:
    """Return the ids of the clients in each round's sum, in the order of ``id_order``."""
    found: dict[int, list[ClientId]] = {}
    rows = db.execute("SELECT round, client FROM participations ORDER BY round, client")
    for round_, group in groupby(rows, itemgetter(0)):
        columns = [column for _, column in group]
        clients: list[ClientId] = columns
        if set(map(type, columns)) != {int}:  # SQLite's order of integers is that of id_order
            clients = sorted(map(_from_column, columns), key=id_order)
        if type(round_) is not int or round_ in found or len(set(clients)) != len(clients):
            raise ValueError(f"round {round_!r} names a client twice")
        found[round_] = clients
    return found


def _to_column(client: ClientId) -> int | str:
    """Return what the ledger writes for an id."""
    is_integer = isinstance(client, int) and -(2**63) <= client < 2**63
    return client if is_integer else json.dumps(client)


def _from_column(column: object) -> ClientId:
    """Return the id that the ledger wrote.

    Raises:
        ValueError: the ledger writes no id like this; each has one form only, or one client could
            have two histories.
    """
    found = column
    if isinstance(column, str) and _LARGER_NUMBER.fullmatch(column):
        found = int(column)
    elif isinstance(column, str) and column.startswith('"'):  # a list could be nested too deeply
        found = json.loads(column)
    elif isinstance(column, str):
        found = None
    if not is_client_id(found) or _to_column(found) != column:
        raise ValueError(f"{str(column)[:40]!r} is not an id of a client")
    return found


def _link(before: str, row: Row, clients: Sequence[ClientId]) -> str:
    files = [row.state] if row.model is None else [row.state, row.model]
    counts = [row.clip_norm, row.received, row.counted, row.summed]
    by = [] if row.summed_by is None else [row.summed_by]
    said = [before, row.round, *files, *counts, *by, *clients]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()
