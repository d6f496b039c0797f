"""What the operator signs, read as it comes: lines, nodes that wait, and runs that are resumed."""

import json
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower has an environment of its own: make messages")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Error, Message, RecordDict
from in_process import InProcessGrid
from torch import nn

from privpart import PartialModel
from privpart.flower.agreement import SCHEMA, id_text
from privpart.flower.living import Living
from privpart.run.members import MOVE, MOVES, OPERATOR, signed

KEY = Ed25519PrivateKey.generate()
MODEL = PartialModel(lambda: nn.Linear(3, 1), seed=7)
PLAN = "p" * 64


class World:
    """Two nodes with clients 0 to 3, a third with nobody yet, and a run as far as Living sees."""

    def __init__(self, folder):
        self.clients = {1: [0, 1], 2: [2, 3], 3: []}
        self.ledger_keys = {3: "a" * 64}
        self.grid = InProcessGrid({node: self._lists(node) for node in self.clients})
        self.moves, self.said, self.taken = folder / "moves", [], {}
        self.owners = {0: 1, 1: 1, 2: 2, 3: 2}
        facts = {"run_id": "run", OPERATOR: KEY.public_key().public_bytes_raw().hex(), MOVES: []}
        self.run = SimpleNamespace(
            facts=facts, rounds=1, plan=SimpleNamespace(hash=PLAN), is_new=True,
            rounds_by_client=lambda: self.taken, note_move=facts[MOVES].append,
        )  # fmt: skip
        data = SimpleNamespace(data=SimpleNamespace(population="people"))
        self.setup = SimpleNamespace(cohorts=[[0, 2], [1, 3]] * 2, plan=data, model=MODEL)
        self.begin()

    def _lists(self, node):
        def act(message, _):
            key = {"key": self.ledger_keys[node]} if node in self.ledger_keys else {}
            ids = {"schema": SCHEMA, "ids": [*map(id_text, self.clients[node])], **key}
            return Message(RecordDict({"clients": ConfigRecord(ids)}), reply_to=message)

        return act

    def begin(self):
        """Begin to serve the run, or resume it."""
        self.engine = SimpleNamespace(
            grid=self.grid, owners=dict(self.owners), keys={}, moves={}, timeout=60.0
        )
        moves, say = str(self.moves), self.said.append
        self.living = Living(self.engine, self.run, self.setup, moves, say)

    def sign(self, node, *clients, end="\n"):
        rounds = {json.dumps(c): self.taken.get(c, []) for c in clients}
        values = {"schema": MOVE, "plan": PLAN, "run": "run", "node": str(node), "rounds": rounds}
        with self.moves.open("a") as file:
            file.write(json.dumps(signed(KEY, values)) + end)

    def look(self, times=3):
        for _ in range(times):
            self.living.look()
        return self.engine.owners


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_clients_move_to_a_node_that_was_there_from_the_start_once_it_has_them(world):
    world.clients[2] += [0]
    world.sign(2, 0)
    assert world.look() == {0: 2, 1: 1, 2: 2, 3: 2}
    world.sign(2, 1)
    assert world.look()[1] == 1
    assert "client 1 is not on node 2" in world.said[-1]
    # the node got it later; the operator signs again, and a message is lost
    world.clients[2] += [1]
    world.sign(2, 1)
    push, world.grid.push_messages = world.grid.push_messages, lambda _: [None]
    assert world.look()[1] == 1
    world.grid.push_messages = push
    assert world.look()[1] == 2


def test_a_move_to_a_node_that_never_comes_holds_up_no_other_one_and_the_last_word_counts(world):
    world.look()
    world.clients[3] += [0, 1]
    world.sign(99, 0)
    world.sign(3, 1)
    assert world.look() == {0: 1, 1: 3, 2: 2, 3: 2}
    assert sum("waits until node 99 is connected" in line for line in world.said) == 1
    world.sign(3, 0)
    assert world.look()[0] == 3
    world.grid.apps[99] = world.grid.apps[3]
    world.clients[99] = [0, 1]
    assert world.look()[0] == 3


def test_a_run_that_is_resumed_reads_no_line_as_newer_than_it_is(world):
    """A line that came too late once would otherwise end the turns of clients that moved on."""
    world.clients[3] += [0]
    world.look()
    world.taken = {0: [0]}
    world.sign(2, 0)  # to a node that does not have it
    world.sign(3, 0)
    assert world.look()[0] == 3
    world.taken = {0: [0, 1]}
    world.clients[2] += [0]
    for _ in range(2):
        world.begin()
        assert world.look()[0] == 3
        assert not world.living.cohorts.on_the_way
    assert len(world.run.facts[MOVES]) == 1


def test_who_joined_before_a_run_was_resumed_keeps_its_turns_and_the_key_of_its_node(world):
    world.clients[3] = [7, 8]
    world.look()
    turns, asked = [*world.living.cohorts], len(world.grid.sent)
    assert any(7 in cohort for cohort in turns)
    world.begin()
    assert [*world.living.cohorts] == turns
    assert world.look()[7] == 3
    assert world.engine.keys == {3: "a" * 64}
    assert len(world.grid.sent) == asked  # by what the ledger says


def test_a_node_may_answer_after_a_round_that_waited_for_others(world):
    """Its answer would expire again and again: who is looked for is a round apart."""
    world.grid.apps[3] = lambda message, _: Message(Error(4, "expired"), reply_to=message)
    world.look(30)
    waits = [m.metadata.ttl for m in world.grid.sent if m.metadata.dst_node_id == 3]
    assert waits[:3] == [120.0, 240.0, 480.0]
    assert waits[-1] == 86_400.0


def test_a_line_is_read_when_it_is_whole_and_a_file_that_cannot_be_read_ends_no_run(world):
    world.clients[3] += [0]
    world.look()
    world.sign(3, 0)
    whole = world.moves.read_bytes()
    world.moves.write_bytes(whole[:50])
    assert world.look()[0] == 1
    world.moves.write_bytes(b"[]\n" + whole)
    assert world.look()[0] == 3
    assert any("line 0 of" in line for line in world.said)
    world.moves.rename(world.moves.with_name("other"))
    world.moves.symlink_to(world.moves.with_name("other"))
    world.look(1)
    assert "cannot be read: it is a link" in world.said[-1]


def test_a_node_whose_ledger_has_another_key_takes_no_clients_over(world):
    world.clients[3] = [7]
    world.look()
    world.engine.owners.pop(7)
    world.ledger_keys[3] = "b" * 64
    world.clients[3] = [7, 0]
    world.sign(3, 0)
    assert world.look()[0] == 1
    assert any("another key than the run names" in line for line in world.said)


def test_a_move_that_waits_is_made_after_the_run_was_resumed(world):
    world.clients[99] = [0, 1]
    world.sign(99, 0)
    world.sign(99, 1)
    assert world.look()[0] == 1
    world.begin()
    world.living.settle(seconds=5, poll=0)
    assert world.engine.owners == world.owners
    assert sum("waits until node 99" in line for line in world.said) == 4  # once in each session
    world.grid.apps[99] = world._lists(99)
    world.taken = {1: [0]}  # a round that the second line does not have
    for _ in range(2):
        world.begin()
        world.living.settle(seconds=5, poll=0)
        assert world.engine.owners == world.owners | {0: 99}
        # nobody asks the other one meanwhile, however often the run is resumed
        assert world.living.cohorts.on_the_way == {1}
        assert not any(1 in cohort for cohort in world.living.cohorts)
    world.sign(99, 1)
    assert world.look() == world.owners | {0: 99, 1: 99}
    world.begin()
    world.living.settle(seconds=5, poll=0)
    assert world.engine.owners == world.owners | {0: 99, 1: 99}
    assert not world.living.cohorts.on_the_way
    assert [move["clients"] for move in world.run.facts[MOVES]] == [["0"], ["1"]]
