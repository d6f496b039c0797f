"""A real deployment on this machine: TLS, nodes that sign, a ServerApp killed and run again."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not in this environment: make flower")

from deployment import Deployment
from flwr.app import Array
from node import Node
from small import SEED, committed, plan_of, train_here, write_app

from privpart import client_app
from privpart.training.export import released_parameters

pytestmark = pytest.mark.slow


@pytest.fixture
def deployed(tmp_path):
    with Deployment(tmp_path / "deployment") as found:
        found.start_superlink()
        found.register("north", "south")
        for number, name in enumerate(("north", "south")):
            found.start_node(name, f"partition-id={number} num-partitions=2")
        yield found


def test_a_server_app_killed_and_run_again_ends_as_one_process_does(deployed, tmp_path, privpart):
    out = tmp_path / "run"
    app = write_app(tmp_path / "app", out, plan_of(rounds=2), seed=SEED)
    first = deployed.submit(app)
    deployed.wait_in(first, lambda: committed(out), "a round is committed")
    deployed.kill_server_app()
    assert committed(out) == 1
    second = deployed.submit(app)
    assert deployed.result(second) == "finished:completed", deployed.said(second)
    assert deployed.status(first) != "finished:completed"
    assert torch.equal(released_parameters(out)[0], train_here(app, SEED))
    assert privpart("report", str(out)).returncode == 0
    assert privpart("verify", str(out)).returncode == 0


@pytest.mark.parametrize("database", [False, True])
def test_no_update_of_a_client_is_in_a_file_unless_the_superlink_has_a_database(tmp_path, database):
    """Each update is a mark, and all files are searched, with the SuperLink and after its end."""
    out, marks = tmp_path / "run", []
    app = write_app(tmp_path / "app", out, plan_of(rounds=2), f"marked{database}", timeout=60.0)

    def answer(message, context):
        reply = client_app(app / "plan.toml")(message, context)
        for name in reply.content.get("updates", {}):
            dim = len(reply.content["updates"][name].numpy())
            mark = np.random.default_rng(len(marks)).normal(size=dim).astype(np.float32)
            marks.append(mark[: dim // 2].tobytes())
            reply.content["updates"][name] = Array(mark)
        return [reply]

    def seen():
        files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        return sum(any(mark in content for content in files) for mark in marks)

    with Deployment(tmp_path / "deployment", database=database) as deployed, ExitStack() as stack:
        deployed.start_superlink()
        names = ("north", "south")
        deployed.register(*names)
        for number, name in enumerate(names):
            share = {"partition_id": number, "num_partitions": 2}
            stack.enter_context(Node(deployed, name, answer, **share))
        run = deployed.submit(app)
        assert deployed.result(run) == "finished:completed", deployed.said(run)
        found = seen()
        assert not [p for p in deployed.folder.glob("superlink.db*") if p.stat().st_mode & 0o077]
    assert len(marks) == 8
    assert {found, seen()} == ({8} if database else {0})
