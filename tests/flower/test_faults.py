"""A real SuperLink and ServerApp, and everything that goes wrong around them.

Nothing is lost: whatever is killed, the run is continued from its folder and ends with the
parameters of an undisturbed one. Whatever a node sends, a round goes on without it, and says why.
The nodes are threads of the test, which speak to the SuperLink as a SuperNode does.
"""

import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not in this environment: make flower")

from deployment import Deployment, Proxy, write_certificates
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from node import Node
from small import KILLED, PLAN, SEED, committed, train_here, write_app

from privpart.engines import flower
from privpart.engines.flower import client_app
from privpart.experiment.export import released_parameters
from privpart.run.ledger import Ledger

pytestmark = pytest.mark.slow
NAMES = ("north", "east", "south")
SHORT = 15.0
"""Seconds that a round waits for its answers."""


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    state = str(tmp_path_factory.getbasetemp() / "witnesses")
    folder = tmp_path_factory.mktemp("flower") / "deployment"
    with Deployment(folder, {"PRIVPART_STATE_DIR": state}) as found:
        found.start_superlink()
        found.register(*NAMES)
        yield found


@pytest.fixture(scope="module")
def app(deployed):
    """The app of every test: an ordinary one, whose server kills what it is told to."""
    plan = PLAN.replace("rounds = 4", "rounds = 10").replace(
        "_participations = 4", "_participations = 10"
    )
    plan = plan.replace("clients_per_round = 4", "clients_per_round = 6")
    settings = {"seed": SEED, "timeout": SHORT}
    text = "/nowhere"
    folder = write_app(deployed.folder.parent / "app", Path(text), plan, nodes=3, **settings)
    order = deployed.folder / "order"
    (folder / "server_app.py").write_text(KILLED.replace("ORDER_FILE", str(order)))
    return folder


def honest(app: Path):
    """Return what an honest node answers with."""
    own = client_app(app / "plan.toml")
    return lambda message, context: [own(message, context)]


def nodes(deployed: Deployment, app: Path, stack: ExitStack, **answers) -> list[Node]:
    """Start the three nodes; those that are not named are honest."""
    found = []
    for number, name in enumerate(NAMES):
        answer = answers.get(name) or honest(app)
        node = Node(deployed, name, answer, partition_id=number, num_partitions=len(NAMES))
        found.append(stack.enter_context(node))
    return found


def submit(deployed: Deployment, app: Path, out: Path) -> int:
    return deployed.submit(app, f'out="{out}"')


def counted(out: Path) -> list[int]:
    """Return how many clients counted in each round."""
    ledger = Ledger(out / "ledger.sqlite", read_only=True)
    try:
        return [row.counted for row in ledger.rows()]
    finally:
        ledger.close()


PHASES = ("begun", "answered", "summed", "committed")


def kill(deployed: Deployment, app: Path, out: Path, what: str, phase: str, at: int) -> None:
    """Begin or continue a run, and kill the ServerApp or the SuperLink in a phase of a round."""
    order, link = deployed.folder / "order", deployed.processes["superlink"]
    order.write_text(f"{phase} {at} {0 if what == 'ServerApp' else link.pid}")
    run = submit(deployed, app, out)
    deployed.wait_in(run, lambda: not order.exists(), f"{what} is killed in round {at}, {phase}")
    if what == "SuperLink":
        link.wait()
        del deployed.processes["superlink"]
        deployed.start_superlink()
    deployed.wait_for(lambda: not deployed.server_app(), f"the ServerApp without {what} ends")
    assert committed(out) in (at, at + 1)
    assert phase == "summed" or committed(out) == at + (phase == "committed")


def test_whatever_is_killed_at_any_phase_nothing_is_lost(deployed, app, tmp_path):
    out = tmp_path / "run"
    with ExitStack() as stack:
        nodes(deployed, app, stack)
        for number, phase in enumerate(PHASES):
            kill(deployed, app, out, "ServerApp", phase, 2 * number)
            kill(deployed, app, out, "SuperLink", phase, 2 * number + 1)
        last = submit(deployed, app, out)
        assert deployed.result(last) == "finished:completed", deployed.said(last)
    assert torch.equal(released_parameters(out)[0], train_here(app, SEED))
    assert counted(out) == [6] * 10
