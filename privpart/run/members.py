"""Members: which node answers for which client of a federation, and what nodes signed of it.

A node with a ledger of its own signs, with each answer, in which rounds of the plan its clients
have answered. The run keeps these statements beside its ledger, before the round is committed.
They are compared with the ledger's rows, by the keys that the ledger names, whenever it is read.

Clients may come and move: what a federation was is in the first facts, what changed in later ones,
each with the round from which on it holds. Whoever moves a client signs in which rounds it was, so
that the node that takes it over counts on.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from accounting import Participation
from accounting.checks import ConfigError, parsed_json
from privpart.messages import ClientId, is_client_id, limit_reached
from privpart.plan import PrivacyPlan
from privpart.run import store
from privpart.run.ledger import Ledger, Row

STATEMENTS = "statements.log"
"""File of a run folder with a line per statement."""
STATEMENT, MOVE = "privpart/node-statement/1", "privpart/move/1"
NODE_KEYS, MOVES, OPERATOR = "node_keys", "moves", "operator"
"""Facts: the nodes' public keys; later owners; the public key of whoever may move clients."""
_LONGEST = 2**24
"""Characters of what is signed."""


def signed(key: Ed25519PrivateKey, values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as text, and the signature of a key."""
    text = json.dumps(values, sort_keys=True, allow_nan=False)
    return {"text": text, "signature": key.sign(_message(text)).hex()}


def unsealed(entry: Mapping[str, Any], key: str, schema: str) -> dict[str, Any]:
    """Return the values of a text from anybody that a public key, in hex, has signed.

    Raises:
        ValueError: another key signed it, or nobody; or it is of another schema.
    """
    text, signature = entry["text"], entry["signature"]
    if type(text) is not str or type(signature) is not str or len(text) > _LONGEST:
        raise ValueError("what is signed has the wrong type or length")
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(signature), _message(text))
    except InvalidSignature:
        raise ValueError("its signature is not that of the key") from None
    values: dict[str, Any] = parsed_json(text)
    if type(values) is not dict or values.get("schema") != schema:
        raise ValueError(f"what is signed is not of schema {schema}")
    return values


def _message(text: str) -> bytes:
    return f"privpart statement|{text}".encode()


def histories(values: Mapping[str, Any], *, plan: str, run: str) -> dict[ClientId, list[int]]:
    """Return the rounds of each client in what is signed, if it is of this plan and run.

    Raises:
        ValueError: it is of another one, or its rounds are not ascending numbers.
    """
    if (values["plan"], values["run"]) != (plan, run):
        raise ValueError("what is signed is of another plan or run")
    rounds_of = {}
    for name, rounds in values["rounds"].items():
        client = parsed_json(name)
        if not is_client_id(client) or json.dumps(client) != name:
            raise ValueError("what is signed names what is no client")
        if any(type(number) is not int for number in rounds) or sorted({*rounds}) != rounds:
            raise ValueError("what is signed has rounds that are not ascending numbers")
        if rounds and not 0 <= rounds[0] <= rounds[-1] < 2**63:
            raise ValueError("what is signed has rounds that no plan has")
        rounds_of[client] = rounds
    return rounds_of


@dataclass(frozen=True, slots=True)
class Members:
    """Who answers for whom, by the facts of a ledger.

    Attributes:
        keys: public key of each node that keeps a ledger, in hex.
    """

    keys: Mapping[str, str]
    _owners: Mapping[ClientId, Sequence[tuple[int, str]]]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Members":
        """Read what a ledger names; a stranger's may raise what values of any kind do."""
        owners: defaultdict[ClientId, list[tuple[int, str]]] = defaultdict(list)
        for node, names in facts["owners"].items():
            for name in names:
                owners[parsed_json(name)].append((0, node))
        keys = dict(facts.get(NODE_KEYS, {}))
        for move in facts.get(MOVES, ()):
            keys |= {move["node"]: move["key"]} if move["key"] else {}
            for name in move["clients"]:
                owners[parsed_json(name)].append((int(move["round"]), move["node"]))
        return cls(keys, dict(owners))

    @property
    def clients(self) -> Iterator[ClientId]:
        """Everybody who is, or was, a member."""
        return iter(self._owners)

    def of_node(self, node: str, round_: int) -> list[ClientId]:
        """Return the clients that a node answers for in a round."""
        return [client for client in self._owners if self.owner(client, round_) == node]

    @property
    def nodes(self) -> set[str]:
        """Every node that answers, or answered, for somebody."""
        return {node for owned in self._owners.values() for _, node in owned}

    def owner(self, client: ClientId, round_: int) -> str | None:
        """Return the node that answers for a client in a round; None if there is none."""
        came = [node for since, node in self._owners.get(client, ()) if since <= round_]
        return came[-1] if came else None


def sign_move(
    run: str | Path,
    *,
    node: int,
    of: int | None = None,
    clients: Iterable[ClientId] | None = None,
    key: str | Path,
    out: str | Path,
) -> None:
    """Sign, as the operator, that a node answers for clients from now on, and where they were.

    Append it to a file that the ServerApp of the run reads between rounds. The node counts on from
    the rounds in it. Who answered in a round after it was signed is not moved: sign again.

    Args:
        run: the run folder.
        node: Flower's number of the node that has the clients now.
        of: that of the node whose clients all move, or
        clients: those that move.
        key: file with the operator's Ed25519 key, PEM.
        out: the file.

    Raises:
        ConfigError: there is no such run, key, node or client.
    """
    ledger = Ledger(Path(run))
    members = Members.of(ledger.facts)
    if (of is None) == (clients is None):
        raise ConfigError("of, clients: give the node whose clients all move, or those that move.")
    now = len(ledger.committed())
    moved = [*clients] if clients is not None else members.of_node(str(of), now)
    if not moved:
        raise ConfigError(f"of={of}: no client of {run} is on that node.")
    for client in moved:
        if members.owner(client, now) is None:
            raise ConfigError(f"client {client!r}: is not in the run {run}.")
    try:
        private = load_pem_private_key(Path(key).read_bytes(), None)
    except (OSError, ValueError, TypeError):
        private = None
    if not isinstance(private, Ed25519PrivateKey):
        raise ConfigError(f"key: {key} is not an Ed25519 private key in PEM.")
    taken = ledger.rounds_by_client()
    about = {"plan": PrivacyPlan.from_dict(ledger.facts["plan"]).hash, "node": str(node)}
    about |= {"schema": MOVE, "run": ledger.facts["run_id"]}
    rounds = {json.dumps(client): taken.get(client, []) for client in moved}
    line = json.dumps(signed(private, {**about, "rounds": rounds})) + "\n"
    # it says who took part when
    handle = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(line)


class Statements:
    """What nodes signed, in a run folder that is open."""

    def __init__(self, folder: Path) -> None:
        self._path, self._end = folder / STATEMENTS, sum(map(len, _lines(folder)))

    def add(self, node: int, entry: Mapping[str, str]) -> None:
        """Append what a node signed; it is on the disk afterwards.

        Raises:
            StorageError: the disk refused.
        """
        line = json.dumps({"node": str(node), **entry}).encode() + b"\n"
        try:
            store.append_durably(self._path, line, self._end)
        except OSError as error:
            raise store.StorageError(
                f"{self._path}: what a node signed could not be saved: {store.one_line(error)}."
            ) from None
        self._end += len(line)


def _lines(folder: Path) -> list[bytes]:
    """Return the whole lines of the statements; what a crash left of one is not."""
    if not (folder / STATEMENTS).exists():
        return []
    with store.opened(folder / STATEMENTS) as file:
        return store.complete_lines(file)


def compared(
    folder: Path, facts: Mapping[str, Any], rows: Sequence[Row], limits: Participation, plan: str
) -> tuple[bool, str]:
    """Compare rows with what nodes signed; return whether all of it is signed, and a sentence.

    Signed is: each client of each row was answered for by the node that the ledger names, which
    counted every earlier round of it, and no more rounds than the limits allow.

    Raises:
        ValueError: a statement is not signed by the node's key, or is of another run or plan.
    """
    members, taken = Members.of(facts), defaultdict[ClientId, list[int]](list)
    statements, fault = _read(folder, members, plan, str(facts["run_id"]))
    number = 0
    for row in rows:
        for client in row.clients:
            taken[client].append(row.round)
            number += 1
            owner = members.owner(client, row.round)
            if owner not in members.keys:
                return False, f"client {client!r} is on a node that keeps no ledger"
            counted = statements.get((str(owner), row.round, client))
            if counted is None:
                return False, f"round {row.round}: nothing signed says that {client!r} answered"
            if not set(taken[client]) <= set(counted):
                why = "does not count every earlier round; its ledger may be an older copy"
                return False, f"round {row.round}: what is signed of {client!r} {why}"
            if why := _beyond(counted, limits):
                return False, f"round {row.round}: what is signed of {client!r} is over: {why}"
    if fault:
        return False, fault
    nodes = len(members.keys)
    return number > 0, f"{number} answers, each counted and signed by its node, {nodes} in all"


def _beyond(rounds: Sequence[int], limits: Participation) -> str:
    before = (limit_reached(limits, rounds[:at], rounds[at]) for at in range(len(rounds)))
    return next(filter(None, before), "")


def _read(
    folder: Path, members: Members, plan: str, run: str
) -> tuple[dict[tuple[str, int, ClientId], list[int]], str]:
    """Return the signed rounds of a client by node, round and client, and what contradicts itself.

    Also answers that no row counts are signed, and a ledger that was put back does not know them.
    """
    found, fault = {}, ""
    before = defaultdict[tuple[str, ClientId], set[int]](set)
    for line in _lines(folder):
        entry = parsed_json(line)
        key = members.keys[entry["node"]]
        values = unsealed(entry, key, STATEMENT)
        for client, rounds in histories(values, plan=plan, run=run).items():
            found[entry["node"], values["round"], client] = rounds
            if lost := before[key, client].difference(rounds):
                fault = fault or (
                    f"round {values['round']}: node {entry['node']} no longer counts round "
                    f"{min(lost)} of {client!r}, which it had signed; its ledger may be an older "
                    "copy"
                )
            before[key, client].update(rounds)
    return found, fault
