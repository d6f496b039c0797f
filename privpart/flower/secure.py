"""Secure sums over Flower: every node is a party, asked five times a round.

A node's secrets are in Flower's context, which a SuperNode keeps in memory and hands to the process
that it starts for a message; nothing of them is written to a disk. Flower sends an answer before it
keeps the context, and has a new one for each run that a server begins. So what a party must
remember is in a file, written before the answer leaves. Who may be a party is in a roster that each
node's owner has from somebody other than the server.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from numpy.typing import NDArray
from torch import Tensor

from accounting.checks import ConfigError, parsed_json, parsed_toml, text_of
from privpart.engines.protocol import Engine
from privpart.flower.agreement import (
    DeclinedError,
    Report,
    agreement,
    flower,
    id_text,
    plain_text,
    round_fields,
)
from privpart.flower.engine import FlowerEngine
from privpart.flower.mail import Asked, Look, pushed, readable, received
from privpart.grid import Grid
from privpart.messages import ClientId, ClientUpdate, RoundTask
from privpart.model import PartialModel
from privpart.noise.source import SeededSource
from privpart.noise.stream import noise_and_grid
from privpart.plan import PrivacyPlan
from privpart.run.store import HANDLED, lock, read_small, write_durably
from privpart.secure import coordinator
from privpart.secure.cohort import check_record
from privpart.secure.messages import SecureSumError, Terms, decode, party_of
from privpart.secure.party import Memory, Party
from privpart.secure.rules import SecureSums
from privpart.secure.sums import (
    MOST_MODULUS_BITS,
    ModularSum,
    is_modulus,
    modulus_bits,
    residues,
)

_STATE = "privpart-secure"
"""Record of Flower's context that holds a party between two messages."""
_SETTINGS = ("party", "party-key", "roster", "party-memory")
"""What ``--node-config`` says of a party: its number, and paths of its key, the roster and the file
that the party remembers in."""
_LONGEST_MEMORY = 2**24


def read_roster(path: Path) -> dict[int, bytes]:
    """Return the parties of a roster file, table ``[parties]``: number = "public key in hex".

    Raises:
        ConfigError: it is not such a file.
    """
    table: Any = parsed_toml(text_of(path, "roster"), str(path)).get("parties")
    try:
        roster = {int(number): bytes.fromhex(key) for number, key in table.items()}
        several = min(len(roster), len({*roster.values()})) < len(table)
    except (AttributeError, TypeError, ValueError):
        roster, several = {}, False
    if not roster or several or any(len(key) != 32 for key in roster.values()):
        raise ConfigError(
            f'{path}: must have a table [parties] with lines such as 1 = "...", the Ed25519 public '
            "key of each party in 64 hex digits, no number and no key twice."
        )
    return roster


class SecureFlowerEngine(FlowerEngine):
    """Asks the nodes of a federation for secure sums of their clients; see ``FlowerEngine``.

    A round is asked for again, with fresh keys, if a stage fails. Each stage waits at most
    ``timeout`` seconds.

    Args:
        arguments: of ``FlowerEngine``, as ``options``.
        rules: of the plan.
        roster: of all parties, see ``read_roster``.
        options: see there.
    """

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401  FlowerEngine checks them
        rules: SecureSums,
        roster: Mapping[int, bytes],
        **options: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(*arguments, **options)
        self.rules = rules
        self.roster = roster
        self.listed: frozenset[int] | None = None
        self._before: frozenset[int] | None = None

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Refuse: no update leaves a node in the clear."""
        raise ConfigError("SecureFlowerEngine: hands over secure sums only, of a plan with secure.")

    def secure_sums(self, task: RoundTask, start: Tensor) -> Iterator[ModularSum]:
        """Yield the sum of a round; nothing if every attempt failed."""
        self.listed = None
        self.late.take(self.grid)
        for _ in range(self.attempts):
            try:
                total, self._before = _Attempt(self, task, start, self._report).run(self._before)
            except SecureSumError as error:
                self._report(f"round {task.round}: {error}")
            else:
                yield total
                return


class _Attempt:
    """One attempt at a round: five messages to each node."""

    def __init__(
        self, engine: SecureFlowerEngine, task: RoundTask, start: Tensor, report: Report
    ) -> None:
        self._engine, self._task, self._report = engine, task, report
        self._model = flower().ArrayRecord({"trainable": flower().Array(start.detach().numpy())})
        self._start = start_hash(task, start)
        self._clients: dict[int, list[ClientId]] = {}
        for client in task.clients:
            self._clients.setdefault(engine.owners[client], []).append(client)
        self._bits = modulus_bits(cast("Grid", task.grid), len(task.clients))
        # a server that was started again must not begin an attempt that a node has begun
        self._attempt = time.time_ns()
        self._homes: dict[int, int] = {}
        self._refused: coordinator.Refused = {}

    def run(self, before: frozenset[int] | None) -> tuple[ModularSum, frozenset[int]]:
        """Return the sum and the parties in it.

        Raises:
            SecureSumError: too few parties were left at one of the stages.
        """
        engine, task, refused = self._engine, self._task, self._refused
        dim = engine.model.active_dim(task.active)
        fixed = task.round, self._attempt, dim, self._bits, self._start
        terms = Terms(task.plan, *fixed, engine.rules, engine.roster)
        try:
            named = self._named(terms)
            cohort, keys = coordinator.gather(terms, named, refused, listed=engine.listed)
            sent = self._stage("shares", dict.fromkeys(cohort.records, keys))
            dealers, boxes = coordinator.deliver(cohort, sent, refused)
            sent = self._stage("vector", boxes)
            summed, listed = coordinator.add_up(cohort, dealers, sent, refused, before=before)
            engine.listed = summed.members
            sent = self._stage("signature", dict.fromkeys(summed.members, listed))
            signers, signatures = coordinator.confirm(summed, sent, refused)
            sent = self._stage("unmask", dict.fromkeys(signers, signatures))
            total = torch.from_numpy(coordinator.unmasked(summed, sent, refused))
        finally:
            for party, why in refused.items():
                self._report(f"party {party}, round {task.round}: {why}")
        among = summed.members
        clients = tuple(c for party in sorted(among) for c in self._clients[self._homes[party]])
        fixed_task = task.clip_norm, task.round, task.plan
        return ModularSum(clients, total, self._bits, *fixed_task, parties=len(among)), among

    def _named(self, terms: Terms) -> Iterator[tuple[int, bytes]]:
        """Yield the keys that nodes advertise; each node is one party, and each party one node.

        A node that did not sign as the party that it says it is takes nobody's place.
        """
        for node, data in self._exchanged("keys", dict.fromkeys(self._clients, b"")):
            try:
                party = party_of(data)
                record = decode(data, "advertise", terms, terms.digest, party).get(party, b"")
                check_record(terms, party, record)
            except SecureSumError as error:
                self._report(f"node {node}: {error}")
                continue
            if party in self._homes:
                self._report(f"node {node}: says that it is party {party}, as another does.")
                continue
            self._homes[party] = node
            yield party, data

    def _stage(self, stage: str, messages: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield the answers of parties to messages by party."""
        parties = {self._homes[party]: party for party in messages}
        by_node = {node: messages[party] for node, party in parties.items()}
        for node, data in self._exchanged(stage, by_node):
            yield parties[node], data

    def _exchanged(self, stage: str, messages: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """Send each node its message; yield answers as they arrive, until the time is over."""
        engine, grid = self._engine, self._engine.grid
        end, waiting = time.monotonic() + engine.timeout, dict(messages)
        asked, looks = dict[str, Asked](), dict[str, Look]()
        while waiting or asked:
            for node in sorted(set(grid.get_node_ids()) & waiting.keys()):
                content = self._content(stage, node, waiting.pop(node))
                name = pushed(grid, "train.secure", content, node, engine.timeout)
                if name is None:
                    self._report(f"node {node}: the SuperLink took no message for it.")
                else:
                    asked[name] = Asked(node)
            for sender, content in received(grid, asked, looks):
                try:
                    data = _bytes_of(content)
                except Exception as error:
                    # whatever the objects of a reply raise
                    node = getattr(sender, "node", -1)
                    self._report(f"node {node}, {stage}: {readable(error)}")
                    continue
                if sender is not None:
                    yield sender.node, data
            remaining = end - time.monotonic()
            if remaining <= 0:
                engine.late.keep(asked, looks)
                return
            time.sleep(min(engine.poll, remaining) * bool(waiting or asked))

    def _content(self, stage: str, node: int, message: bytes) -> Any:  # noqa: ANN401  RecordDict
        flwr, task = flower(), self._task
        fields = {
            **agreement(self._engine.model, task.plan, task.active),
            **round_fields(task),
            "clients": [*map(id_text, self._clients[node])],
            "stage": stage,
            "attempt": self._attempt,
            "bits": self._bits,
            "start": self._start,
            "run": self._engine.run_id,
        }
        records = {"task": flwr.ConfigRecord(fields), "secure": _record(message)}
        if stage == "vector":
            records["model"] = self._model
        return flwr.RecordDict(records)


def start_hash(task: RoundTask, start: Tensor) -> str:
    """Return the hash of what every node's training begins with, in hex.

    All parties must agree on it: updates of a model that a server made for one node are zero, or
    tell what it wants (Pasquini, Francati, Ateniese, CCS 2022).
    """
    told = json.dumps(round_fields(task), sort_keys=True).encode()
    return hashlib.sha256(told + start.detach().numpy().tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class NodeRound:
    """A node's own view of the round that a message asks for.

    Attributes:
        plan: the node's own.
        model: likewise.
        engine: trains the node's clients.
        task: what the server asks for, checked against the plan.
    """

    plan: PrivacyPlan
    model: PartialModel
    engine: Engine
    task: RoundTask

    @property
    def grid(self) -> Grid:
        """The public grid of the plan; nothing of its noise is drawn."""
        z = self.plan.update_noise_multiplier
        return noise_and_grid(self.plan, self.model.dim, z, SeededSource(0), 0)[1]

    def summed(self, start: Tensor) -> NDArray[np.int64]:
        """Train the clients; return the sum of their clipped and rounded updates.

        It is modulo the largest modulus, which all others divide.
        """
        grid, answers = self.grid, list(self.engine.run(self.task, start))
        if {answer.client for answer in answers} != set(self.task.clients):
            raise DeclinedError("a client of this node has no update")
        clip_norm, bits = self.task.clip_norm, MOST_MODULUS_BITS
        parts = [residues(answer.update, clip_norm, grid, bits) for answer in answers]
        total: NDArray[np.int64] = np.sum(parts, axis=0) & (2**bits - 1)
        return total


def answer_stage(
    this: NodeRound,
    start: Callable[[], Tensor],
    content: Any,  # noqa: ANN401  Flower's RecordDict
    context: Any,  # noqa: ANN401  Flower's Context
) -> Any:  # noqa: ANN401  Flower's RecordDict
    """Answer the server's message of a stage as the node's party.

    Args:
        this: the round.
        start: returns the model that the server sent; called where the node trains.
        content: the message.
        context: keeps the party between two messages.

    Raises:
        DeclinedError: the message is not of this node's plan, clients and attempt.
    """
    party, path = _party(context.node_config, this.plan)
    held = lock(path.with_name(f"{path.name}.lock"), f"{path}: another message is being answered.")
    try:
        memories = _memories(path)
        party.memory = memories.get(this.plan.hash, party.memory)
        if _STATE in context.state:
            # an attempt that is over leaves no secret
            party.restore(context.state.pop(_STATE))
        answer = _answer(this, party, start, content)
        if values := party.saved():
            context.state[_STATE] = flower().ConfigRecord(values)
        memories[this.plan.hash] = party.memory
        records = {plan: asdict(memory) for plan, memory in memories.items()}
        write_durably(path, json.dumps(records).encode())
    except SecureSumError as error:
        raise DeclinedError(str(error)) from None
    finally:
        held.release()
    return flower().RecordDict({"secure": _record(answer)})


def _memories(path: Path) -> dict[str, Memory]:
    """Return what a party remembers, by the hash of the plan; nothing if there is no file."""
    if not path.exists():
        return {}
    try:
        values = parsed_json(read_small(path, _LONGEST_MEMORY)).items()
        return {
            plan: Memory(**fields | {n: tuple(fields[n]) for n in ("started", "members")})
            for plan, fields in values
        }
    except (OSError, *HANDLED) as error:
        raise ConfigError(
            f"party-memory: {path} cannot be read ({type(error).__name__}). Without it a server "
            "could have a second list of one round; put it back, or begin with another plan."
        ) from None


def _answer(
    this: NodeRound,
    party: Party,
    start: Callable[[], Tensor],
    content: Any,  # noqa: ANN401
) -> bytes:
    fields, message = content["task"], _bytes_of({"secure": content["secure"]})
    stage, task = fields.get("stage"), this.task
    if stage == "keys":
        attempt, bits, agreed = (fields.get(name) for name in ("attempt", "bits", "start"))
        kinds = type(attempt) is int, type(agreed) is str and len(agreed) == 64
        if not all(kinds) or not is_modulus(bits, this.grid, len(task.clients)):
            raise DeclinedError("the server's attempt, modulus or start is not a valid one")
        fixed = attempt, this.model.active_dim(task.active), bits, agreed
        return party.advertise(task.round, *fixed)
    if stage == "vector":
        model = start()
        return party.mask(message, this.summed(model), start_hash(task, model))
    steps = {"shares": party.share, "signature": party.agree, "unmask": party.unmask}
    if stage not in steps:
        raise DeclinedError(f"the server asks for {plain_text(stage)}, which is no stage")
    return steps[stage](message)


def _party(config: Mapping[str, Any], plan: PrivacyPlan) -> tuple[Party, Path]:
    if (rules := plan.secure) is None:
        raise DeclinedError("the server asks for a secure sum, and the plan has none")
    if missing := [name for name in _SETTINGS if name not in config]:
        raise ConfigError(
            f"node_config: needs {', '.join(missing)} for a plan with secure sums, as in "
            '--node-config \'party=1 party-key="/etc/party.pem" roster="/etc/roster.toml" '
            'party-memory="/var/lib/party/memory.json"\'.'
        )
    path = Path(str(config["party-key"]))
    try:
        signer = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError):
        signer = None
    if not isinstance(signer, Ed25519PrivateKey):
        raise ConfigError(f"party-key: {path} is not an Ed25519 private key in PEM.")
    number = config["party"]
    if type(number) is not int:
        raise ConfigError(f"party={number!r}: must be the number of this party in the roster.")
    try:
        roster = read_roster(Path(str(config["roster"])))
        party = Party(number, signer, plan.hash, rules, roster)
        return party, Path(str(config["party-memory"]))
    except SecureSumError as error:
        raise ConfigError(str(error)) from None


def _record(message: bytes) -> Any:  # noqa: ANN401  Flower's ArrayRecord
    """Return bytes as Flower sends long ones: in pieces."""
    flwr = flower()
    array = flwr.Array(dtype="uint8", shape=(len(message),), stype="bytes", data=message)
    return flwr.ArrayRecord({"message": array})


def _bytes_of(content: Any) -> bytes:  # noqa: ANN401  of anybody
    """Return the bytes of a message; raise the error that stands in its place."""
    if isinstance(content, Exception):
        raise content
    data = content["secure"]["message"].data if set(content) == {"secure"} else None
    if type(data) is not bytes:
        raise SecureSumError("sent something else than a message of secure sums.")
    return data
