"""Ledger: the committed rounds of a run and their clients, in SQLite, chained by hashes.

Row r holds the hash of the state after round r. Each row's chain value hashes the previous row's
and the whole content of the row, including its clients, so no row can be changed, dropped or moved
without changing all later ones.

About clients, the ledger holds which of them entered the sum of which round, by their ids as they
are, and how many updates each round received: no update, no example, no reason of a refusal. So it
names clients; it stays with the server and is never released.

An id that is a whole number of 64 bits is an INTEGER; every other id is a TEXT, its JSON: the
decimal digits of a larger number, or a string in quotes. The number 1 and the string "1" are
therefore two clients, here and everywhere else.
"""

import hashlib
import json
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from accounting.checks import ConfigError
from privpart.messages import ClientId, id_order, is_client_id

SCHEMA = "privpart/ledger/3"
INTEGERS_ONLY = "privpart/ledger/2"
"""The schema before it, still read and resumed: all ids are whole numbers of 64 bits."""
_LATER = ("adopted_at", "genesis", "sampling_checked")
_RUN_ID = re.compile("[0-9a-f]{32}")
_TABLES = """
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
_LARGER_NUMBER = re.compile("-?[1-9][0-9]{18,77}")
_LONGEST_ROW = 2**16
"""Bytes of the longest row of a round or participation; the JSON of an id has at most 3074."""


@dataclass(frozen=True, slots=True)
class Row:
    """One committed round.

    Attributes:
        round: number of the round, from 0.
        state: SHA-256, in hex, of the state file after the round.
        clip_norm: clip norm of the round.
        received: number of updates received.
        counted: number of updates that entered the sum.
        summed: number of counted updates that the run's own engine clipped in the server's place.
        chain: hash of this row and all before it.
    """

    round: int
    state: str
    clip_norm: float
    received: int
    counted: int
    summed: int
    chain: str


class Ledger:
    """The open ledger of one run; every change is on the disk when its call returns.

    Attributes:
        facts: values that were recorded about the run, by name.

    Raises:
        ConfigError: there is no ledger, or it is damaged, changed or of another schema.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        if not path.is_file():
            raise ConfigError(f"{path.parent} holds no run: {path.name} is missing.")
        self._path = path
        self._clients: dict[int, list[ClientId]] = {}
        # An interrupted commit leaves a journal; reading then rolls it back, which is a write.
        cut_off = path.with_name(path.name + "-journal").exists()
        uri = f"{path.resolve().as_uri()}?mode={'ro' if read_only and not cut_off else 'rw'}"
        try:
            self._db = sqlite3.connect(uri, uri=True, isolation_level=None)
            # EXTRA also flushes the directory after a commit.
            self._db.execute("PRAGMA synchronous = EXTRA")
            self.facts: dict[str, Any] = {
                name: json.loads(value) for name, value in self._db.execute("SELECT * FROM run")
            }
        except (sqlite3.Error, ValueError, RecursionError) as error:
            raise _damaged(path, error) from None
        if (schema := self.facts.get("schema")) not in (SCHEMA, INTEGERS_ONLY):
            raise ConfigError(
                f"{path} has schema {schema!r}; this version reads {SCHEMA!r} and "
                f"{INTEGERS_ONLY!r}."
            )
        self._check_facts()

    @classmethod
    def create(cls, path: Path, facts: Mapping[str, Any]) -> "Ledger":
        """Write a ledger without rounds that holds ``facts``, which include "schema"; open it."""
        scratch = path.with_name(path.name + ".part")
        scratch.unlink(missing_ok=True)
        db = sqlite3.connect(scratch, isolation_level=None)
        scratch.chmod(0o600)
        db.execute("PRAGMA synchronous = EXTRA")
        db.executescript(f"BEGIN;{_TABLES}COMMIT;")
        said = {**facts, "genesis": genesis(facts)}
        rows = [(name, json.dumps(value)) for name, value in said.items()]
        db.executemany("INSERT INTO run VALUES (?, ?)", rows)
        db.close()
        scratch.replace(path)
        return cls(path)

    def _check_facts(self) -> None:
        facts = self.facts
        named = isinstance(facts.get("run_id"), str) and _RUN_ID.fullmatch(facts["run_id"])
        seeded = "seed" in facts and (facts["seed"] is None or type(facts["seed"]) is int)
        if not named or not seeded or not isinstance(facts.get("plan"), dict):
            raise ConfigError(f"{self._path} is damaged: run_id, seed or plan is missing or odd.")
        if facts.get("genesis") != genesis(facts):
            raise ConfigError(f"{self._path}: facts recorded when the run began were changed.")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def add_fact(self, name: str, value: Any) -> None:  # noqa: ANN401  any JSON
        """Record another fact about the run, as JSON."""
        self._db.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (name, json.dumps(value)))
        self.facts[name] = value

    def rows(self) -> list[Row]:
        """Return the committed rounds in order, after checking that they form one chain.

        Raises:
            ConfigError: a row was changed, dropped or moved, or the file is damaged.
        """
        usual = self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_ROW)
        try:
            with self._transaction("BEGIN"):  # one snapshot, even while the run continues
                found = self._db.execute("SELECT * FROM rounds ORDER BY 1")
                rows = [Row(*values) for values in found]
                clients = self._clients_by_round()
        except (sqlite3.Error, TypeError, ValueError) as error:
            raise _damaged(self._path, error) from None
        finally:
            self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, usual)
        self._clients = dict(clients)
        chain = genesis(self.facts)
        for number, row in enumerate(rows):
            chain = _link(chain, row, clients.pop(number, []))
            if row.round != number or row.chain != chain:
                raise ConfigError(
                    f"{self._path}: row {number} does not follow from the rows before it. The "
                    "ledger was changed after the fact, so no guarantee can be derived from it."
                )
        if clients:
            raise ConfigError(
                f"{self._path} names clients of rounds that were never committed: it was changed."
            )
        return rows

    def _clients_by_round(self) -> dict[int, list[ClientId]]:
        """Return the ids of the clients in each round's sum, in the order of ``id_order``."""
        found: dict[int, list[ClientId]] = {}
        for column, round_ in self._db.execute("SELECT client, round FROM participations"):
            found.setdefault(round_, []).append(_from_column(column))
        for clients in found.values():
            clients.sort(key=id_order)
        return found

    def rounds_by_client(self) -> dict[ClientId, list[int]]:
        """Return each client's rounds, ascending, as of the last call of ``rows``."""
        found: dict[ClientId, list[int]] = {}
        for round_, clients in sorted(self._clients.items()):
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
        """Commit one round and its clients, which ``refuse`` let pass, in one transaction."""
        with self._transaction():
            self._db.execute(
                "INSERT INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?)",
                astuple(row),
            )
            self._db.executemany(
                "INSERT INTO participations VALUES (?, ?)",
                [(_to_column(client), row.round) for client in clients],
            )

    @contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
        self._db.execute(begin)
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


def genesis(facts: Mapping[str, Any]) -> str:
    """Return the hash that the first row is chained to, over all facts from the run's begin."""
    said = {name: value for name, value in facts.items() if name not in _LATER}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def next_row(
    before: str,
    *,
    round_: int,
    state: str,
    clip_norm: float,
    received: int,
    clients: Sequence[ClientId],
    summed: int = 0,
) -> Row:
    """Return the next row of a chain whose head is ``before``.

    ``clients`` must be in the order of ``id_order``.
    """
    row = Row(round_, state, clip_norm, received, len(clients), summed, "")
    return replace(row, chain=_link(before, row, clients))


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
    said = [before, *astuple(row)[:-1], *clients]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} is damaged, or not a ledger: {error}.")
