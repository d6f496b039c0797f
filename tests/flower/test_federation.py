"""Nodes with ledgers of their own, in a population that lives: a script of faults."""

import json

import pytest

pytest.importorskip("flwr", reason="Flower has an environment of its own: make messages")

from federation import NODES, Federation
from in_process import InProcessGrid

from privpart.flower.server import Settings, serve
from privpart.run.ledger import Ledger
from privpart.run.members import MOVES, STATEMENTS
from privpart.run.report import run_report
from privpart.training.verify import check_run

pytestmark = pytest.mark.usefixtures("fresh_code")


def participation(out):
    report = run_report(out)
    (said,) = (a for a in report.guarantee.assumptions if a.code == "participation")
    return said


def test_a_script_of_faults_leaves_every_round_and_limit(tmp_path):
    script = Federation(tmp_path / "federation", rounds=18, each=6, stalls=2, seed=46)
    plan = tmp_path / "plan.toml"
    plan.write_text(script.plan())
    (tmp_path / "task.py").write_text(script.task())
    out, said, moving = tmp_path / "run", [], {}

    def app(number, ledger):
        answer = script.node(plan, number, ledger)
        return lambda message, context: next(iter(answer(message, context)), None)

    grid = InProcessGrid({n + 1: app(n, f"{n}") for n in range(NODES)})

    def happens(record):
        for node, number in moving.items():
            if not script.moved(out, node):
                # an operator may sign twice
                script.sign(out, node, number)
                script.sign(out, node, number)
        if (event := script.events.get(record.round + 1)) is not None:
            kind, number = event
            node = 100 + number
            if kind in ("lost", "replaced"):
                grid.offline.add(number + 1)
            # who lost a key alone has its ledger; the others begin one
            grid.apps[node] = app(number, f"{number}" if kind == "replaced" else f"{number} new")
            if kind != "joins":
                moving[node] = number

    given = Settings(
        out=str(out), nodes=NODES, authenticated=True, timeout=0.3,
        operator=script.operator, moves=str(script.moves),
    )  # fmt: skip
    serve(grid, plan, given, callbacks=[happens], poll=0.01, report=said.append)
    script.refuse_beyond_limits(out)
    assert len(Ledger(out).facts[MOVES]) == 4, said
    shown = participation(out)
    assert shown.status == "enforced", shown.evidence
    assert "enforced by the nodes (signed counts)" in shown.evidence
    assert not [check for check in check_run(out) if check.status == "wrong"]
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert script.marks
    assert not any(mark in content for content in files for mark in script.marks)
    # the word rests on what was signed, and on all of it
    path = out / STATEMENTS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))
    assert participation(out).status == "verified"
    assert "nothing signed says" in participation(out).evidence
    first = json.loads(lines[0])
    path.write_text("".join([json.dumps({**first, "signature": "0" * 128}) + "\n", *lines[1:]]))
    assert participation(out).status == "verified"
    assert [c.what for c in check_run(out) if c.status == "wrong"] == ["node statements"]
