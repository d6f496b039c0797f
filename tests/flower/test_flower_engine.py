"""The Flower engine over Flower's own messages, in one process and as bytes."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="Flower has an environment of its own: make messages")

from in_process import NODES, InProcessGrid, write_plan

import privpart
from accounting.checks import ConfigError
from privpart.engines.flower import Settings, client_app, serve
from privpart.run.report import run_report
from privpart.run.verify import check_run


def released(run: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    (state,) = run.glob("state-*.safetensors")
    return load_file(state)["parameters"]


def settings(out: Path, **changes) -> Settings:
    given = {"out": str(out), "nodes": 2, "authenticated": True, "timeout": 1.0, "seed": 3}
    return Settings(**{**given, **changes})


@pytest.mark.parametrize("noise", [1.0, 0.0])
def test_the_last_model_is_the_embedded_engines_bit_for_bit_also_when_resumed(tmp_path, noise):
    plan = write_plan(tmp_path, noise)
    privpart.train(plan=plan, out=tmp_path / "embedded", seed=3, deterministic=True, progress=False)
    apps = {node: client_app(plan) for node in NODES}
    out = tmp_path / "flower"

    class StoppedError(Exception):
        pass

    def stop(record):
        if record.round == 1:
            raise StoppedError

    with pytest.raises(StoppedError):
        serve(InProcessGrid(apps), plan, settings(out), callbacks=[stop], poll=0.01)
    serve(InProcessGrid(apps), plan, settings(out), poll=0.01)
    assert torch.equal(released(out), released(tmp_path / "embedded"))


@pytest.mark.parametrize("authenticated", [True, False])
def test_participation_is_verified_only_where_nodes_are_authenticated(tmp_path, authenticated):
    plan = write_plan(tmp_path)
    apps = {node: client_app(plan) for node in NODES}
    out = tmp_path / "run"
    given = settings(out, authenticated=authenticated, seed=None)
    serve(InProcessGrid(apps), plan, given, poll=0.01)
    word = "verified" if authenticated else "asserted"
    report = run_report(out)
    (said,) = (a for a in report.guarantee.assumptions if a.code == "participation")
    assert said.status == word
    checks = {check.what: check for check in check_run(out)}
    assert checks["participation"].status == checks["identity"].status == word
    assert not [check for check in checks.values() if check.status == "wrong"]
    with pytest.raises(ConfigError, match="was made with"):
        serve(InProcessGrid(apps), plan, settings(out, authenticated=not authenticated), poll=0.01)
