"""A federation in which nodes die, come back with new keys, join, hand over, lie and stall.

The script is drawn from a seed. Nodes keep ledgers of their own, each update is a mark, and what
every person answered is noted where it leaves its node.
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not in this environment: make flower")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from small import TASK, plan_of

from privpart import client_app
from privpart.run.ledger import Ledger
from privpart.run.members import MOVES, Members, sign_move

NODES = 6
"""Nodes at the start; one more joins, with as many clients."""
LIES = (
    "twice", "not finite", "too long", "shape", "nothing", "unsigned", "forged", "other round",
    "somebody else's",
)  # fmt: skip
"""What a hostile node sends."""


class Federation:
    """The plan of a federation, its script, and what its nodes answered.

    Attributes:
        answered: the rounds that each client answered, as its node sent them.
        marks: what stood in the place of each update, as bytes.
        events: per round, what happens before it: a kind and the node's number.
    """

    def __init__(self, folder: Path, *, rounds: int, each: int, stalls: int, seed: int) -> None:
        self.folder, self.rounds, self.clients = folder, rounds, NODES * each
        self.turns, self.all = rounds // 6, (NODES + 1) * each
        self.answered: defaultdict[int, set[int]] = defaultdict(set)
        self.marks: list[bytes] = []
        self._key = Ed25519PrivateKey.generate()
        self.operator = self._key.public_key().public_bytes_raw().hex()
        pem = self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        folder.mkdir(parents=True)
        (folder / "operator.pem").write_bytes(pem)
        chance, kinds = np.random.default_rng(seed), [*LIES, *["stall"] * stalls]
        where = chance.choice(rounds, len(kinds), replace=False).tolist()
        who = chance.integers(NODES, size=len(kinds)).tolist()
        self.faults = dict(zip(where, zip(who, kinds, strict=True), strict=True))
        dead = chance.choice(NODES, 3, replace=False).tolist()
        happens = ["lost", "replaced", "hands over", "joins"]
        at = sorted((1 + chance.choice(3 * rounds // 4, len(happens), replace=False)).tolist())
        self.events = dict(zip(at, zip(happens, [*dead, NODES], strict=True), strict=True))

    def plan(self) -> str:
        """Return the plan: each client takes part six times at most, as far apart as can be."""
        plan = plan_of(rounds=self.rounds, clients=self.clients // self.turns)
        for old, new in (
            (f"max_participations = {self.rounds}", "max_participations = 6"),
            ("min_separation = 1", f"min_separation = {self.turns}"),
            ("[data]", '[data]\npopulation = "people of the test"'),
        ):
            assert old in plan
            plan = plan.replace(old, new)
        return plan

    def task(self) -> str:
        """Return the code of the plan, with a point for each client."""
        return TASK.replace("randn(30,", f"randn({self.all},").replace(
            "torch.arange(30), 5)", f"torch.arange({self.all}), 1)"
        )

    def node(self, plan: Path, number: int, ledger: str) -> Callable[..., list[Message]]:
        """Return what a node answers: the number of its share, and the folder of its ledger."""
        own = client_app(plan)
        config = {"partition-id": number, "num-partitions": NODES + 1, "operator": self.operator}
        config["ledger"] = str(self.folder / "ledgers" / ledger)

        def answer(message: Message, context: Context) -> list[Message]:
            known = Context(context.run_id, context.node_id, config, RecordDict(), {})
            reply = own(message, known)
            if "updates" not in reply.content:
                return [reply]
            return self._sent(number, message, reply)

        return answer

    def _sent(self, number: int, message: Message, reply: Message) -> list[Message]:
        content, round_ = reply.content, message.content["task"]["round"]
        for name, array in [*content["updates"].items()]:
            self.answered[int(name)].add(round_)
            dim, draws = len(array.numpy()), np.random.default_rng((int(name), round_))
            mark = draws.normal(size=dim).astype(np.float32)
            self.marks.append(mark[: dim // 2].tobytes())
            content["updates"][name] = Array(mark)
        who, kind = self.faults.get(round_, (None, ""))
        return changed(kind, reply, message) if who == number else [reply]

    def sign(self, out: Path, node: int, number: int) -> None:
        """Sign, as the operator, that a node has the clients of a share."""
        taken = [client for client in range(self.all) if client % (NODES + 1) == number]
        known = {*Members.of(Ledger(out).facts).clients}
        key = self.folder / "operator.pem"
        clients = [client for client in taken if client in known]
        sign_move(out, node=node, clients=clients, key=key, out=self.moves)

    @property
    def moves(self) -> Path:
        """The file of what the operator signed."""
        return self.folder / "moves"

    def moved(self, out: Path, node: int) -> bool:
        """Return whether the run has taken a node's clients over."""
        return any(move["node"] == str(node) for move in Ledger(out).facts.get(MOVES, ()))

    def refuse_beyond_limits(self, out: Path) -> None:
        """Count per person, by what left the nodes, and compare with the rows of the run."""
        ledger = Ledger(out)
        assert len(ledger.rows()) == self.rounds
        counted = ledger.rounds_by_client()
        assert {*counted} <= {*self.answered} <= {*range(self.all)}
        for client, rounds in self.answered.items():
            ordered = sorted(rounds)
            assert len(ordered) <= 6, (client, ordered)
            assert all(b - a >= self.turns for a, b in pairwise(ordered)), (client, ordered)
            assert {*counted.get(client, ())} <= rounds
        joined = [client for client in counted if client % (NODES + 1) == NODES]
        assert joined


def changed(kind: str, reply: Message, message: Message) -> list[Message]:
    """Return what a node sends that stalls or lies."""
    content = reply.content
    names = [*content["updates"]]
    whole = {
        "stall": [],
        "twice": [reply, Message(content, reply_to=message)],
        "nothing": [Message(RecordDict(), reply_to=message)],
    }
    if kind in whole:
        return whole[kind]
    if kind == "unsigned":
        del content["statement"]
    if kind == "forged":
        content["statement"]["signature"] = "0" * 128
    if kind == "other round":
        content["task"]["round"] += 1
    if kind == "somebody else's":
        vector = content["updates"][names[0]]
        content["updates"] = ArrayRecord({str(client): vector for client in range(10)})
    for name in names if kind in ("not finite", "too long", "shape") else ():
        vector = content["updates"][name].numpy()
        odd = {"not finite": vector * np.nan, "too long": vector * 1e30, "shape": vector[:-1]}
        content["updates"][name] = Array(odd[kind].astype(np.float32))
    return [reply]
