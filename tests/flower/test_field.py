"""A federation in the field: TLS, node keys, 300 clients, 60 rounds, and a script of faults."""

import time
from contextlib import ExitStack

import pytest

pytest.importorskip("flwr", reason="Flower is not in this environment: make flower")

from deployment import Deployment
from federation import NODES, Federation
from node import Node
from small import committed, write_app

from privpart.run.ledger import Ledger
from privpart.run.members import MOVES
from privpart.run.report import run_report

pytestmark = pytest.mark.slow
PATIENCE = 30.0
"""Seconds that a round waits for its answers: enough for the answers of a machine that is busy."""


class Field:
    """The nodes of a script, started and ended as it says."""

    def __init__(self, script: Federation, deployed: Deployment, app, out, stack: ExitStack):
        self.script, self.deployed, self.app, self.out = script, deployed, app, out
        self.stack, self.events = stack, dict(script.events)
        self.moving, self.signed = {}, 0
        self.running = {n: self.start(n, f"node-{n}", f"{n}") for n in range(NODES)}

    def start(self, number: int, name: str, ledger: str) -> Node:
        """Register the key of a node that has the clients of a share, and start it."""
        self.deployed.register(name)
        answer = self.script.node(self.app / "plan.toml", number, ledger)
        return self.stack.enter_context(Node(self.deployed, name, answer))

    def look(self) -> None:
        """Do what is due, and sign as the operator for whoever has not moved yet."""
        done = committed(self.out)
        for at in [at for at in self.events if at <= done]:
            kind, number = self.events.pop(at)
            if kind in ("lost", "replaced"):
                self.running[number].__exit__()
            ledger = f"{number}" if kind == "replaced" else f"{number} new"
            node = self.start(number, f"again-{number}", ledger)
            self.moving |= {} if kind == "joins" else {node.id: number}
        if done > self.signed:
            self.signed = done
            for node, number in self.moving.items():
                if not self.script.moved(self.out, node):
                    self.script.sign(self.out, node, number)


def test_every_round_and_limit_is_kept_while_nodes_die_join_lie_and_stall(tmp_path, privpart):
    script = Federation(tmp_path / "federation", rounds=60, each=50, stalls=4, seed=46)
    out, app = tmp_path / "run", tmp_path / "app"
    settings = {"nodes": NODES, "timeout": PATIENCE, "start_timeout": 900.0, "attempts": 20}
    settings |= {"operator": f'"{script.operator}"', "moves": f'"{script.moves}"'}
    write_app(app, out, script.plan(), "field", **settings)
    (app / "field.py").write_text(script.task())
    with Deployment(tmp_path / "deployment") as deployed, ExitStack() as stack:
        deployed.start_superlink()
        field = Field(script, deployed, app, out, stack)
        run = deployed.submit(app)
        deployed.wait_for(deployed.server_app, "the ServerApp works")
        while deployed.server_app():
            field.look()
            time.sleep(1.0)
        said = deployed.said(run)
        assert deployed.status(run) == "finished:completed", said
    script.refuse_beyond_limits(out)
    assert not field.events
    assert len(Ledger(out).facts[MOVES]) == 4, said
    words = {a.code: a for a in run_report(out).guarantee.assumptions}["participation"]
    assert (words.status, "signed counts" in words.evidence) == ("enforced", True), words.evidence
    assert privpart("report", str(out)).returncode == 0
    assert privpart("verify", str(out)).returncode == 0
    files = b"\0".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert len(script.marks) > 500
    assert not [mark for mark in script.marks if mark in files]
