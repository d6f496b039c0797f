"""A real SuperLink and ServerApp, and everything that goes wrong around them.

Nothing is lost: whatever is killed, the run is continued from its folder and ends with the
parameters of an undisturbed one. Whatever a node sends, a round goes on without it, and says why.
The nodes are threads of the test, which speak to the SuperLink as a SuperNode does.
"""

import signal
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not in this environment: make flower")

from deployment import Deployment, DeploymentError
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from node import Node
from small import KILLED, SEED, committed, plan_of, train_here, write_app

from privpart import client_app
from privpart.run.ledger import Ledger
from privpart.training.export import released_parameters

pytestmark = pytest.mark.slow
NAMES = ("north", "east", "south")
SHORT = 15.0
"""Seconds that a round waits for its answers."""
KINDS = (
    "twice", "not finite", "too long", "shape", "bytes", "somebody else's", "nothing", "error",
    "silence",
)  # fmt: skip
"""What a hostile node sends, a kind in each round; the others are in test_flower_answers."""
COUNTED = {"not finite": 6, "too long": 6, "twice": 6, "somebody else's": 6}
"""Clients that count in a round with such an answer; 4 where the two of the node do not."""


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    state = str(tmp_path_factory.getbasetemp() / "witnesses")
    folder = tmp_path_factory.mktemp("flower") / "deployment"
    with Deployment(folder, {"PRIVPART_STATE_DIR": state}, database=True) as found:
        found.start_superlink()
        found.register(*NAMES, "west")
        yield found


@pytest.fixture(scope="module")
def app(deployed):
    """The app of every test: an ordinary one, whose server kills what it is told to."""
    plan = plan_of(rounds=len(KINDS), clients=6)
    settings = {"seed": SEED, "timeout": SHORT, "nodes": 3}
    folder = deployed.folder.parent / "app"
    write_app(folder, Path("/nowhere"), plan, "killed", **settings)
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
    return [row.counted for row in Ledger(out).rows()]


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
    if what == "ServerApp":
        assert committed(out) == at + (phase == "committed")
    else:  # the ServerApp lives on for seconds, and may commit a round that it has the answers of
        assert committed(out) in (at, at + 1)


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
    assert counted(out) == [6] * len(KINDS)


def changed(kind: str, reply: Message, message: Message) -> list[Message]:
    """Return what a hostile node sends in place of an honest reply."""
    content = reply.content
    updates = content["updates"]
    name = next(iter(updates))
    vector = updates[name].numpy()

    def records(arrays: dict[str, Array]) -> list[Message]:
        found = {"updates": ArrayRecord(arrays), "task": content["task"]}
        return [Message(RecordDict(found), reply_to=message)]

    def each(array: Array) -> list[Message]:
        return records(dict.fromkeys(updates, array))

    if kind == "twice":
        return [reply, Message(content, reply_to=message)]
    return {
        "not finite": lambda: each(Array(np.full_like(vector, np.nan))),
        "too long": lambda: each(Array(vector * 1e30)),
        "shape": lambda: each(Array(vector[:-1])),
        "bytes": lambda: each(Array("float32", (10**12,), "numpy.ndarray", b"\x93NUMPY" * 9)),
        "somebody else's": lambda: records({str(n): updates[name] for n in range(6)}),
        "nothing": lambda: [Message(RecordDict(), reply_to=message)],
        "error": lambda: [Message(Error(0, "no"), reply_to=message)],
        "silence": lambda: [],
    }[kind]()


def test_whatever_a_node_sends_the_round_goes_on_and_says_why(deployed, app, tmp_path):
    out, asked = tmp_path / "run", iter(KINDS)
    own = honest(app)

    def hostile(message: Message, context) -> list[Message]:
        replies = own(message, context)
        if message.metadata.message_type != "train":
            return replies
        kind = next(asked, None)
        return replies if kind is None else changed(kind, replies[0], message)

    with ExitStack() as stack:
        nodes(deployed, app, stack, south=hostile)
        run = submit(deployed, app, out)
        assert deployed.result(run) == "finished:completed", deployed.said(run)
    said = deployed.said(run)
    assert counted(out) == [COUNTED.get(kind, 4) for kind in KINDS], said
    for number, kind in enumerate(KINDS):
        assert kind in ("twice", "not finite", "too long") or f", round {number}: " in said, kind


def start_again(deployed: Deployment, name: str, share: str) -> None:
    """Start a killed node until it stays: the SuperLink takes it for alive for about a minute."""
    for _ in range(15):
        deployed.start_node(name, share)
        with suppress(subprocess.TimeoutExpired):
            deployed.processes[name].wait(timeout=12)
            deployed.processes.pop(name)
            continue
        return
    raise DeploymentError(f"{name} was never taken back")


def test_a_supernode_killed_or_stopped_misses_rounds_and_comes_back(deployed, tmp_path):
    out, share = tmp_path / "run", "partition-id=2 num-partitions=3"
    plan = plan_of(rounds=10, clients=6)
    app = write_app(tmp_path / "app", out, plan, "stopped", nodes=3, timeout=45.0)
    own = honest(app)

    def until(so_many: int, what: str) -> None:
        met = len(counted(out)) if committed(out) else 0
        deployed.wait_in(run, lambda: committed(out) and so_many in counted(out)[met:], what)

    with ExitStack() as stack:
        for number, name in enumerate(NAMES[:2]):
            node = Node(deployed, name, own, partition_id=number, num_partitions=3)
            stack.enter_context(node)
        deployed.start_node("west", share)
        stack.callback(deployed.kill, "west", signal.SIGTERM)
        run = submit(deployed, app, out)
        until(6, "a round of all nodes")
        deployed.kill("west")
        until(4, "a round without the node that was killed")
        start_again(deployed, "west", share)
        until(6, "a round with the node started again")
        deployed.signal("west", signal.SIGSTOP)
        until(4, "a round without the node that was stopped")
        deployed.signal("west", signal.SIGCONT)
        until(6, "a round with the node that goes on")
        assert deployed.result(run) == "finished:completed", deployed.said(run)
    said = deployed.said(run)
    assert said.count("2 of its clients are missing from the round") >= 2, said
