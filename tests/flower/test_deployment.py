"""A real deployment on this machine: TLS, nodes that sign, a ServerApp killed and run again."""

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not in this environment: make flower")

from deployment import Deployment
from small import SEED, committed, plan_of, train_here, write_app

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
