"""Ledger: the facts and committed rounds of a run, a file of lines chained by hashes and signed.

A line is a chain value, a signature and an entry, which is JSON: facts about the run, or a row. The
chain value hashes chain value and signature of the line before, and the entry as it is written, so
nothing can be changed, dropped or moved without changing all later lines; the run's signing key
(Ed25519, RFC 8032) signs it, so nobody without that key can write the chain anew. It does not show
that its holder was honest: the owner of the machine can sign anything while the run lasts.

A line is appended in one piece and flushed. What a crash leaves of one lacks its end, or holds
zeros where blocks were not written. Readers skip it, and it is cut off before the next line is
written, so a file that is read while a run writes it shows every line that was there before.

About clients, the ledger holds which of them entered the sum of which round or evaluation, by
their ids as they are, and how many updates each round received: no update, no example, no reason of
a refusal. So it names clients; it stays with the server and is never released.
"""

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from accounting.checks import ConfigError, parsed_json
from privpart.messages import ClientId, is_client_id
from privpart.run import store
from privpart.run.evaluations import Evaluation, read_evaluation

LEDGER = "ledger.log"
SCHEMA = "privpart/ledger/10"
LATER_FACTS = ("closed", "late_rounds", "moves", "packages", "rows_differ", "sampling_checked")
"""Facts that are added after a run began; all others are in the first line."""
KEY_BYTES = 32
_RUN_ID = re.compile("[0-9a-f]{32}")
_HASH = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One committed round."""

    round: int  # number of the round, from 0
    state: str  # hash of the state file after the round, see ``state_hash``
    model: str  # hash of the released parameters, see ``model_hash``
    clip_norm: float  # clip norm of the round
    received: int  # number of updates received
    clients: tuple[ClientId, ...]  # ids of the clients whose updates entered the sum, each once
    # how many of these updates who clipped last, see ``RoundCounts.clipped_by``
    clipped_by: Mapping[str, int]
    sum: str = ""  # hash of the file with the recorded sum; "" if it was not recorded
    chain: str = ""  # chain value of its line; "" until it is computed

    @property
    def counted(self) -> int:
        """Number of updates that entered the sum."""
        return len(self.clients)


class SigningKey:
    """The private half of a run's key pair, from 32 secret bytes.

    Attributes:
        public_key: the other half, in hex.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public_key = self._key.public_key().public_bytes_raw().hex()

    def sign(self, chain: str) -> str:
        """Return the signature of a chain value, in hex."""
        return self._key.sign(_message(chain)).hex()


class Ledger:
    """The ledger of one run; every change is on the disk when its call returns.

    Args:
        folder: the run folder; it is only read until something is added.

    Attributes:
        facts: values that were recorded about the run, by name.
        head: chain value of the last line, which was signed last.
        chains: chain values after 0, 1, ... commits, of rounds and of evaluations.
        evaluations: the committed evaluations of metrics, in order.
        unread: bytes behind the last line: what a crash left of one, or a damaged one.
        signer: key that signs every change; None refuses changes.

    Raises:
        ConfigError: there is no ledger, or it is damaged, changed or of another schema.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEDGER
        self.signer: SigningKey | None = None
        self.facts: dict[str, Any] = {}
        self.head = self._signature = ""
        self._rows: list[Row] = []
        self.evaluations: list[Evaluation] = []
        self._chain_fault: str | None = None
        self._is_settled = False
        try:
            with store.opened(self._path) as file:
                lines = store.complete_lines(file)
                # Who reads a round may release it, and a killed process may not have flushed it.
                os.fsync(file.fileno())
                size = os.fstat(file.fileno()).st_size
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{folder} holds no run: {LEDGER} is missing.") from None
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {store.one_line(error)}.") from None
        # Of complete lines: the next append cuts off what a crash left behind them.
        self._size = sum(map(len, lines))
        # The disk refused the last line in the meantime, so its writer cut it off.
        if size < self._size:
            size -= len(lines[-1])
            self._size -= len(lines.pop())
        self.unread = size - self._size
        self._last = lines[-1] if lines else b""
        with store.damage_named(self._path):
            self.chains = [lines[0].split(b" ")[0].decode()]
            for number, line in enumerate(lines):
                self._read(number, line)
            self._check_facts()

    @classmethod
    def create(cls, folder: Path, facts: Mapping[str, Any], signer: SigningKey) -> "Ledger":
        """Write a ledger without rounds that holds ``facts``, which include "schema"; read it."""
        store.write_durably(folder / LEDGER, _line("", _encoded("facts", facts), signer))
        ledger = cls(folder)
        ledger.signer = signer
        return ledger

    def _read(self, number: int, line: bytes) -> None:
        chain, signature, entry = line.rstrip(b"\n").split(b" ", 2)
        # Noted and not raised: a report still reads a changed ledger, to say so.
        if _link(self._end, entry) != chain.decode() and self._chain_fault is None:
            self._chain_fault = (
                f"line {number} does not follow from the lines before it. The ledger was changed "
                "after the fact, so no guarantee can be derived from it"
            )
        self.head, self._signature = chain.decode(), signature.decode()
        ((kind, values),) = parsed_json(entry).items()
        if kind == "row":
            row = Row(**values | {"clients": tuple(values["clients"])})
            _refuse_odd_row(row)
            self._take(row)
            return
        if kind == "metrics":
            evaluation = read_evaluation(values, len(self._rows), self.evaluations)
            _refuse_clients(evaluation.round, evaluation.clients)
            self._take(evaluation)
            return
        # Half a character cannot be printed.
        json.dumps(values, ensure_ascii=False).encode()
        # The first line fixes seed, plan and keys: a later one could replace the promise.
        if kind != "facts" or (number and not values.keys() <= {*LATER_FACTS}):
            raise ValueError(f"line {number} is no row, and no facts that may follow")
        self.facts |= values

    def _take(self, row: Row | Evaluation) -> None:
        """Count the commit in the last line."""
        if isinstance(row, Row):
            self._rows.append(replace(row, chain=self.head))
        else:
            self.evaluations.append(row)
        self.chains.append(self.head)

    def _check_facts(self) -> None:
        facts = self.facts
        if (schema := facts.get("schema")) != SCHEMA:
            raise ConfigError(f"{self._path} has schema {schema!r}; this version reads {SCHEMA!r}.")
        if not isinstance(facts.get("run_id"), str) or not _RUN_ID.fullmatch(facts["run_id"]):
            raise ValueError("run_id is missing or has the wrong type")
        # By type: bool is an int in Python, and true is no seed.
        seeded = "seed" in facts and (facts["seed"] is None or type(facts["seed"]) is int)
        keyed = isinstance(facts.get("key"), str) and _HASH.fullmatch(facts["public_key"])
        if not seeded or not keyed or not isinstance(facts.get("plan"), dict):
            raise ValueError("seed, plan or a key is missing or has the wrong type")
        closed = facts.get("closed", {"rounds": 0})["rounds"]
        if (type(self._planned_rounds), type(closed)) != (int, int):
            raise ValueError("how it was planned or ended has the wrong type")

    @property
    def is_complete(self) -> bool:
        """Whether all planned rounds and evaluations are committed."""
        planned = (self.facts["plan"].get("metrics") or {}).get("rounds", ())
        return len(self._rows) >= self._planned_rounds and len(self.evaluations) >= len(planned)

    @property
    def has_ended(self) -> bool:
        """Whether the run draws no more noise: it is complete, or was ended early."""
        return self.is_complete or "closed" in self.facts

    @property
    def _planned_rounds(self) -> Any:  # noqa: ANN401  checked when the ledger is read
        return self.facts["plan"].get("participation", {}).get("rounds", 0)

    @property
    def _end(self) -> str:
        """What the next line hashes of the last one."""
        return self.head + self._signature

    def settle(self) -> None:
        """Flush the ledger, without what a crash or a failure left behind its last line."""
        if not self._is_settled:
            store.flush_end(self._path, self._last, self._size)
            self._is_settled, self.unread = True, 0

    def add_fact(self, name: str, value: Any) -> None:  # noqa: ANN401  any JSON
        """Record another fact about the run, one of ``LATER_FACTS``."""
        self._append(_encoded("facts", {name: value}))
        self.facts[name] = value

    def following(self, row: Row | Evaluation) -> str:
        """Return the chain value of a row, or an evaluation, if it is appended next."""
        return _link(self._end, _committed(row))

    def append(self, row: Row | Evaluation) -> None:
        """Commit a round, or an evaluation of the model after the newest one.

        Raises:
            ConfigError: nobody could read the ledger with that row in it.
        """
        try:
            if isinstance(row, Row):
                _refuse_odd_row(row)
        except ValueError as error:
            raise ConfigError(f"{self._path}: {error}. Nothing was added.") from None
        self._append(_committed(row))
        self._take(row)

    def _append(self, entry: bytes) -> None:
        if self.signer is None:
            raise ConfigError(
                f"{self._path}: the run's signing key is missing, so nothing can be added to its "
                "ledger. Restore the file signing-key, or begin a fork."
            )
        line = _line(self._end, entry, self.signer)
        self._is_settled = False
        store.append_durably(self._path, line, self._size)
        # Only after the append: if it fails, the next one begins where this one did.
        self._size += len(line)
        self._last = line
        self._is_settled = True
        self.head, self._signature = line.decode().split(" ", 2)[:2]

    def rows(self) -> list[Row]:
        """Return the committed rounds in order, after checking that they form one signed chain.

        Raises:
            ConfigError: a line was changed, dropped or moved, or the signature is not that of the
                key that the ledger names.
        """
        if fault := self.chain_fault() or self.head_fault():
            raise ConfigError(f"{self._path}: {fault}.")
        return self._rows

    def committed(self) -> list[Row]:
        """Return the committed rounds as they are written."""
        return self._rows

    def newest(self) -> tuple[str, str]:
        """Return the name and hash of the file with the model after the last committed round.

        Raises:
            ConfigError: no round is committed.
        """
        if not self._rows:
            raise ConfigError(
                f"{self._path.parent}: no round is committed, so nothing was released that could "
                "be exported, or from which a fork could begin."
            )
        if (closed := self.facts.get("closed")) is not None:
            return closed_name(closed["rounds"]), str(closed["state"])
        return state_name(len(self._rows)), self._rows[-1].state

    def chain_fault(self) -> str | None:
        """Return why the lines do not form one chain, or None if they do."""
        numbers = [row.round for row in self._rows]
        # Who signs could leave out a round and still make a chain without faults.
        if self._chain_fault is None and numbers != list(range(len(numbers))):
            return "its rounds are not numbered in order: it was changed after the fact"
        return self._chain_fault

    def head_fault(self) -> str | None:
        """Return why the head is not that of this run, or None if it is.

        The signature is compared with the key that the ledger itself names.
        """
        public_key, closed = self.facts["public_key"], self.facts.get("closed")
        if not _is_signed(public_key, _message(self.head), self._signature):
            return (
                f"the signature of its head is not that of the run's key {public_key}: it was "
                "changed after the fact"
            )
        if closed is not None and closed["rounds"] != len(self._rows):
            return f"it was ended after {closed['rounds']} rounds, but holds {len(self._rows)}"
        return None

    def rounds_by_client(self) -> dict[ClientId, list[int]]:
        """Map each client to its rounds, ascending."""
        rounds = defaultdict(list)
        for row in self._rows:
            for client in row.clients:
                rounds[client].append(row.round)
        return dict(rounds)


def noise_name(rounds: int) -> str:
    """Return the name of the file with the noise's registers after so many rounds."""
    return f"noise-{rounds:06d}.safetensors"


def state_name(rounds: int) -> str:
    """Return the name of the state file after a number of rounds."""
    return f"state-{rounds:06d}.safetensors"


def sum_name(number: int) -> str:
    """Return the name of the file with the recorded sum of a round."""
    return f"sum-{number:06d}.safetensors"


def closed_name(rounds: int) -> str:
    """Return the name of the file that holds the model of a run that was ended early."""
    return f"closed-{rounds:06d}.safetensors"


def genesis(facts: Mapping[str, Any]) -> str:
    """Return the chain value of the first line, which holds all facts from the run's begin."""
    return _link("", _encoded("facts", facts))


def read_key(file: Path, named: str, identity: Callable[[bytes], str]) -> bytes | None:
    """Return the noise or signing key in a file of a run, None if there is no such file.

    ``named`` is what the ledger names of the key, and ``identity`` computes that from a secret.

    Raises:
        ConfigError: the file holds another key.
        OSError: it cannot be read.
    """
    try:
        secret = store.read_small(file, 2**10)
    except FileNotFoundError:
        return None
    if len(secret) != KEY_BYTES or named != identity(secret):
        raise ConfigError(
            f"{file} is not the key that this run was begun with: it was changed or replaced. "
            "Restore it, or begin a fork: a run with a new key, and the cost of both."
        )
    return secret


def signed_by(secret: bytes) -> str:
    """Return the public key that belongs to a signing key, in hex."""
    return SigningKey(secret).public_key


def _committed(row: Row | Evaluation) -> bytes:
    values = {name: getattr(row, name) for name in row.__slots__ if name != "chain"}
    return _encoded("row" if isinstance(row, Row) else "metrics", values)


def _encoded(kind: str, values: Mapping[str, Any]) -> bytes:
    return json.dumps({kind: values}, allow_nan=False).encode()


def _link(before: str, entry: bytes) -> str:
    return hashlib.sha256(before.encode() + b"|" + entry).hexdigest()


def _line(before: str, entry: bytes, signer: SigningKey) -> bytes:
    chain = _link(before, entry)
    return f"{chain} {signer.sign(chain)} ".encode() + entry + b"\n"


def _message(chain: str) -> bytes:
    """Return what is signed: the chain covers the run's id, its plan and the ledger's schema."""
    return f"privpart signed head|{chain}".encode()


def _is_signed(public_key: str, message: bytes, signature: str) -> bool:
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _refuse_odd_row(row: Row) -> None:
    values = row.round, row.state, row.model, row.clip_norm, row.received, row.sum
    if tuple(map(type, values)) != (int, str, str, float, int, str):
        raise ValueError(f"row {row.round!r} holds values of other kinds")
    numbers = list(row.clipped_by.values())
    if any(type(n) is not int or n < 0 for n in numbers) or sum(numbers) != row.counted:
        raise ValueError(f"round {row.round!r} does not say who clipped each of its updates")
    _refuse_clients(row.round, row.clients)


def _refuse_clients(number: int, clients: tuple[ClientId, ...]) -> None:
    # One client under two ids would have two histories.
    if not all(map(is_client_id, clients)) or len(set(clients)) != len(clients):
        raise ValueError(f"round {number!r} names a client twice, or what is no client")
