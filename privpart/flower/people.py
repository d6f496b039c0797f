"""People: a node's own ledger of which of its clients answered which round of which population.

It is in a folder of the node, and says yes before an answer leaves: what was decided is on the
disk, or nothing is sent. So a client of this node takes part no more often than the plan that the
node's owner accepted allows, whatever a server asks. All runs of one plan have one timeline: a
client answers at most ``max_participations`` rounds of it, ``min_separation`` apart, in all runs
together, each round in one run and for one model. Answers under all plans about a population count
against one number, which is that of the plan unless the owner allows more.

The server's word is taken for which run it is; no clock is read.
"""

import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from accounting import Participation
from accounting.checks import ConfigError, parsed_json
from privpart.flower.agreement import DeclinedError, id_text
from privpart.messages import ClientId
from privpart.run import store
from privpart.run.ledger import KEY_BYTES, read_key, signed_by
from privpart.run.members import MOVE, STATEMENT, histories, signed, unsealed

DATABASE, KEY = "answers.db", "key"
_TABLES = """\
CREATE TABLE IF NOT EXISTS about (public_key TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
  population TEXT NOT NULL, client TEXT NOT NULL, plan TEXT NOT NULL, round INTEGER NOT NULL,
  run TEXT NOT NULL, model TEXT NOT NULL, PRIMARY KEY (population, client, plan, round)
) WITHOUT ROWID;
"""
_PATIENCE = 60.0
"""Seconds to wait for another process of the same node."""
_LONGEST_MOVES = 2**24
"""Characters of all moves in a message: what is parsed takes up to twenty times as many bytes."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a server asks clients of a node for.

    Attributes:
        population: whom the plan is about, by the name that is heard; "" if it names nobody.
        plan: hash of the node's own plan.
        run: id of the run, on the server's word.
        round: from 0.
        model: hash of the model and task that the clients begin with.
    """

    population: str
    plan: str
    run: str
    round: int
    model: str


class People:
    """The ledger of a node, in a folder for its owner only, which is made if there is none.

    Args:
        folder: of this node alone; a copy of it counts by itself.
        most: answers of one client about a population, under all plans; None takes the plan's.
        operator: public key, in hex, of whoever may say what clients did on another node.

    Raises:
        ConfigError: the folder is shared, damaged, or lacks the key or the answers.
    """

    def __init__(self, folder: Path, *, most: int | None = None, operator: str = "") -> None:
        self._path, self._most, self._operator = folder / DATABASE, most, operator
        self._taken_over = set[tuple[str, str, str]]()
        store.make_private(folder)
        store.refuse_planted(folder)
        held = store.lock(folder / "lock", f"{folder}: is in use.", patience=_PATIENCE)
        try:
            secret = self._secret(folder)
        finally:
            held.release()
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public_key = signed_by(secret)

    def _secret(self, folder: Path) -> bytes:
        key = folder / KEY
        lost = ConfigError(
            f"{folder}: {DATABASE} is missing or empty beside its key, and with it who has "
            "answered. Put it back. If it is lost, remove the key: the node is then another one, "
            "whose clients the operator moves to it (docs/how-to/flower.md)."
        )
        if not self._path.exists():
            if key.exists():
                raise lost
            store.write_durably(self._path, b"")
        with self._open() as database:
            database.executescript(_TABLES)
            named = [public for (public,) in database.execute("SELECT public_key FROM about")]
            if not named:
                if key.exists():
                    raise lost
                secret = secrets.token_bytes(KEY_BYTES)
                store.write_durably(key, secret)
                database.execute("INSERT INTO about VALUES (?)", (signed_by(secret),))
                return secret
        secret_or_none = read_key(key, named[0], signed_by)
        if secret_or_none is None:
            raise ConfigError(f"{key}: is missing. Put it back, or begin a folder as a new node.")
        return secret_or_none

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the answers; what is committed is on the disk, also after a power failure."""
        try:
            with closing(sqlite3.connect(self._path, _PATIENCE, isolation_level=None)) as database:
                database.execute("PRAGMA synchronous = EXTRA")
                yield database
        except sqlite3.Error as error:
            raise ConfigError(f"{self._path}: {store.one_line(error)}.") from None

    def answer(
        self,
        asked: Asked,
        clients: Sequence[ClientId],
        limits: Participation,
        *,
        together: bool = False,
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Enter who answers, durably; return the signed statement, and who does not and why.

        A client that answered this round answers again only in the same run and for the same model:
        the answer is then the same, and counts once. Of clients that answer ``together``, as one
        sum, nobody is entered if one declines.
        """
        rounds, declined, rows = dict[str, list[int]](), dict[str, str](), []
        with self._open() as database, _transaction(database):
            for name in map(id_text, clients):
                before = database.execute(
                    "SELECT plan, round, run, model FROM answers WHERE population=? AND client=?",
                    (asked.population, name),
                ).fetchall()
                why, is_new = self._why_not(asked, before, limits)
                if why:
                    declined[name] = why
                    continue
                if is_new:
                    about = asked.population, name, asked.plan
                    rows.append((*about, asked.round, asked.run, asked.model))
                mine = {number for plan, number, *_ in before if plan == asked.plan}
                rounds[name] = sorted({*mine, asked.round})
            if not (together and declined):
                database.executemany("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)", rows)
        said = {"schema": STATEMENT, "plan": asked.plan, "run": asked.run, "round": asked.round}
        return signed(self._key, {**said, "rounds": rounds}), declined

    def _why_not(
        self, asked: Asked, before: Sequence[tuple[str, int, str, str]], limits: Participation
    ) -> tuple[str, bool]:
        """Return why a client does not answer, or "", and whether its answer is a new one."""
        here = {number: (run, model) for plan, number, run, model in before if plan == asked.plan}
        if (was := here.get(asked.round)) is not None:
            if was == (asked.run, asked.model):
                return "", False
            return "it answered this round of the plan, in another run or for another model", False
        most = limits.max_participations if self._most is None else self._most
        if len(before) >= most:
            return f"it has answered {len(before)} times about this population", True
        if len(here) >= limits.max_participations:
            return f"it has answered {len(here)} rounds of the plan", True
        near = [n for n in here if abs(n - asked.round) < limits.min_separation]
        return (f"it answered round {near[0]}, which is too near" if near else ""), True

    def take_over(self, asked: Asked, moves: Sequence[Mapping[str, Any]]) -> None:
        """Enter what the operator signed of clients that were on another node.

        Raises:
            DeclinedError: somebody else signed it, or this node's owner named no operator.
        """
        for move in moves:
            # a server passes the same ones on with every task
            seen = asked.population, asked.run, str(move.get("text"))
            if seen in self._taken_over:
                continue
            try:
                if not self._operator:
                    raise ValueError("the node's owner has named no operator")
                values = unsealed(move, self._operator, MOVE)
                moved = histories(values, plan=asked.plan, run=asked.run)
            except store.HANDLED as error:
                raise DeclinedError(f"clients were moved here, but {error}") from None
            with self._open() as database, _transaction(database):
                for client, rounds in moved.items():
                    for number in rounds:
                        # what this node knows itself is not replaced
                        row = asked.population, id_text(client), asked.plan, number, asked.run, ""
                        database.execute("INSERT OR IGNORE INTO answers VALUES (?,?,?,?,?,?)", row)
            self._taken_over.add(seen)


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Decide and write in one piece, while no other process of the node does."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def moves_in(text: object) -> list[dict[str, Any]]:
    """Return the moves that a server passes on, a list in JSON of anybody's."""
    try:
        moves = parsed_json(text) if type(text) is str and len(text) <= _LONGEST_MOVES else None
    except (ValueError, RecursionError):
        moves = None
    if not isinstance(moves, list) or not all(isinstance(move, dict) for move in moves):
        raise DeclinedError(f"the server's moves are not a list in at most {_LONGEST_MOVES} bytes")
    return moves
