"""A node of the auditor's: canaries that go through Flower's messages to the server's clip."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower has an environment of its own: make messages")

from in_process import InProcessGrid
from small import TASK, plan_of

import attacks
from accounting.checks import ConfigError
from privpart import server
from privpart.cli.audit.lower_bounds import of_run
from privpart.flower.node import client_app
from privpart.flower.server import Settings, serve
from privpart.run.ledger import Ledger
from privpart.training.verify import check_run

pytestmark = pytest.mark.usefixtures("fresh_code")

AUDITOR = 9
COUNT = 20
CANARIES = {"canaries": attacks.canary_clients}


@pytest.fixture
def planned(tmp_path):
    """A plan with canaries, whose rounds have all of the ordinary clients."""
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    path = folder / "plan.toml"
    text = plan_of(rounds=4, clients=6).replace("noise_multiplier = 1.5", "noise_multiplier = 0.05")
    path.write_text(text + f"\n[canaries]\ncount = {COUNT}\n")
    return path


def settings(path, **changes):
    given = {"out": str(path.parents[1] / "run"), "nodes": 2, "authenticated": True, "timeout": 9.0}
    return Settings(**{**given, "seed": 3, **changes})


def federation(path):
    apps = {3: client_app(path), AUDITOR: client_app(path, **CANARIES)}
    return InProcessGrid(apps, shares=False)


def trained(path):
    serve(federation(path), path, settings(path), poll=0.01, **CANARIES)
    return path.parents[1] / "run"


@pytest.mark.parametrize("too_long", [1, 2])
def test_canaries_of_an_auditors_node_show_the_servers_clip(planned, too_long, monkeypatch):
    """They send four clip norms; scores are mu where the server clips, twice that at 2."""
    right = server.quantise

    def clipped_to(update, clip_norm, grid, out):
        wrong = replace(grid, norm=too_long * grid.norm)
        return right(update, too_long * clip_norm, wrong, out)

    monkeypatch.setattr(server, "quantise", clipped_to)
    run = trained(planned)
    histories = Ledger(run).rounds_by_client()
    names = {client for client in histories if str(client).startswith("canary-")}
    assert 0 < len(names) < COUNT  # an absent one was asked by nobody, and counts for nobody
    assert len(histories) == 6 + len(names)
    assert not [check for check in check_run(run) if check.status == "wrong"]
    audit = of_run(run, 0.95)
    assert audit.about["clipping"].startswith("by the server")
    scores, present = audit.scored.scores, audit.scored.present
    assert (scores[present] / audit.scored.mu).mean() == pytest.approx(too_long, rel=0.2)
    assert np.abs(scores[~present]).max() < 5  # standard deviations


def test_a_canary_is_answered_for_by_the_auditors_node_alone(planned):
    others = InProcessGrid({3: client_app(planned)}, shares=False)
    with pytest.raises(ConfigError, match="no node answers for 'canary-0'"):
        serve(others, planned, settings(planned, nodes=1), poll=0.01, **CANARIES)
    with pytest.raises(ConfigError, match="give both, or neither"):
        serve(others, planned, settings(planned, nodes=1), poll=0.01)
    with pytest.raises(ConfigError, match="leave clients out"):
        client_app(planned, clients=lambda _: None, **CANARIES)
