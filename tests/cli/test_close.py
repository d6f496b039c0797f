"""``privpart train --close``: what it erases, what it keeps, and what can be done afterwards."""

import io
import json
import sys

import pytest
import runs

CLOSE = ("train", "--close", "--out")


@pytest.fixture
def begun(tmp_path):
    """Begin a run, and train a number of its four rounds."""
    return lambda rounds, seed=None: runs.begun(tmp_path / "run", rounds, seed=seed)


def test_a_closed_run_has_no_key_and_no_noise_and_still_a_report(begun, privpart):
    run = begun(2)
    before = json.loads(privpart("report", str(run), "--format", "json").stdout)
    with (run / "key").open("rb") as key, (run / "signing-key").open("rb") as signing:
        done = privpart(*CLOSE, str(run), "--yes")
        assert key.read() == signing.read() == bytes(32)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "ended after 2 of 4 rounds; it cannot be resumed" in said
    assert "covers the 2 released rounds by the guarantee of all 4 planned rounds" in said
    names = {file.name for file in run.iterdir()}
    assert names == {"ledger.log", "lock", "closed-000002.safetensors"}
    after = json.loads(privpart("report", str(run), "--format", "json").stdout)
    assert after["guarantee"]["epsilon"] == before["guarantee"]["epsilon"]
    for command in (["train", "--resume", "--out", str(run)], [*CLOSE, str(run), "--yes"]):
        again = privpart(*command)
        assert again.returncode == 2
        assert "ended early, after 2 of 4 rounds" in " ".join(again.stderr.split())


def test_nothing_is_closed_unless_somebody_says_so(begun, privpart, monkeypatch):
    run = begun(0)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    refused = privpart(*CLOSE, str(run))
    assert refused.returncode == 2
    assert "pass --yes" in refused.stderr
    for answer, status in (("n\n", 1), ("y\n", 0)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        assert (run / "key").exists()
        told = privpart(*CLOSE, str(run))
        assert told.returncode == status, told.stderr
        assert "End" in told.stderr
    assert "No model was released" in told.stdout
    assert not (run / "key").exists()


def test_a_complete_or_unknown_run_is_not_closed(begun, privpart, tmp_path):
    told = privpart(*CLOSE, str(begun(4)), "--yes")
    assert told.returncode == privpart(*CLOSE, str(tmp_path), "--yes").returncode == 2
    assert "is complete, and its keys are erased already" in " ".join(told.stderr.split())
