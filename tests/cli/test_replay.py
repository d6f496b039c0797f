"""A run is computed again from its recorded sums, and what was changed is named with its round."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_study import PLAN, changed

from accounting import ConfigError
from privpart.run.begin import create_run
from privpart.run.folder import RunFolder
from privpart.run.ledger import LEDGER, Ledger, SigningKey
from privpart.run.report import run_report
from privpart.run.store import StorageError, decode_state, write_state
from privpart.training.replay import replay

ROUNDS = 2


@pytest.fixture(scope="module")
def made(privpart, tmp_path_factory) -> Path:
    """A seeded run with momentum and a schedule of rates, whose sums are recorded."""
    folder = tmp_path_factory.mktemp("replay")
    rates = '[learning_rates]\nserver = { kind = "cosine" }\n[server]\nmomentum = 0.5'
    text = changed(("[server]", rates), text=PLAN)
    (folder / "plan.toml").write_text(text)
    seeded = ["--seed", "3", "--record-sums", "--out", str(folder / "run")]
    done = privpart("train", "--plan", str(folder / "plan.toml"), *seeded)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def run(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def test_recorded_sums_and_noise_give_every_released_model(made, privpart):
    again = replay(made)
    assert (again.rounds, again.differs) == (ROUNDS, None)
    done = privpart("verify", str(made), "--replay", "--format", "json")
    lines = {line["what"]: line for line in json.loads(done.stdout)["checks"]}
    assert lines["replay"]["status"] == "verified"
    assert "whose updates are in the sums, and who clipped them, it does not show" in done.stdout


def test_it_is_equal_with_other_threads_and_on_another_processor(made):
    code = f"from privpart.training.replay import replay; print(replay({str(made)!r}).differs)"
    command = [sys.executable, "-c", code]
    other = {"OMP_NUM_THREADS": "4", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
    done = subprocess.run(command, env=os.environ | other, capture_output=True, text=True)
    assert done.stdout == "None\n", done.stderr


def test_a_changed_integer_is_named_with_its_round(run, privpart):
    file = run / "sum-000001.safetensors"
    data = bytearray(file.read_bytes())
    data[-8] ^= 1
    file.write_bytes(data)
    again = replay(run)
    assert again.differs == 1
    assert "sum-000001.safetensors is not the one that the ledger names" in again.says
    assert privpart("verify", str(run), "--replay").returncode == 5


def test_a_changed_ledger_is_shown_with_all_lines_though_it_cannot_be_replayed(run, privpart):
    ledger = run / LEDGER
    ledger.write_bytes(ledger.read_bytes().replace(b'"received": 6', b'"received": 7', 1))
    done = privpart("verify", str(run), "--replay", "--format", "json")
    assert done.returncode == 5
    lines = {line["what"]: line for line in json.loads(done.stdout)["checks"]}
    assert lines["chain"]["status"] == "wrong"
    assert lines["replay"]["says"] == "not replayed: first, the ledger is wrong"


def resigned(run: Path, number: int, **change: object) -> None:
    """Let the holder of a signing key write the ledger anew, with one row changed."""
    facts, rows = Ledger(run).facts, Ledger(run).rows()
    signer = SigningKey(bytes(32))
    (run / LEDGER).unlink()
    ledger = Ledger.create(run, facts | {"public_key": signer.public_key}, signer)
    for row in rows:
        fields = {name: getattr(row, name) for name in row.__slots__ if name != "chain"}
        ledger.append(type(row)(**fields | (change if row.round == number else {})))


def test_a_sum_that_the_ledger_was_made_to_name_gives_another_model(run):
    file = run / "sum-000000.safetensors"
    tensors, values = decode_state(file)
    tensors["sum"][5] += 2**24  # fewer steps are less than the last bit of the model
    resigned(run, 0, sum=write_state(file, tensors, values).state)
    again = replay(run)
    assert again.differs == 0
    assert "sum and noise give another model than the one that the ledger names" in again.says


@pytest.mark.parametrize(
    ("tensors", "values", "why"),
    [
        ({"sum": torch.zeros(3, dtype=torch.int64)}, {}, "must be"),
        ({"sum": torch.zeros(3)}, {}, "must be"),
        ({}, {}, "damaged"),
        (None, {"salts": ["zz"]}, "damaged"),
        (None, {"bits": "many"}, "damaged"),
    ],
)
def test_sums_of_a_hostile_operator_are_one_sentence(run, tensors, values, why):
    file = run / "sum-000000.safetensors"
    was, said = decode_state(file)
    resigned(
        run, 0, sum=write_state(file, was if tensors is None else tensors, said | values).state
    )
    again = replay(run)
    assert again.differs == 0
    assert why in again.says


def test_files_that_are_no_sums_are_named(run, tmp_path):
    file = run / "sum-000000.safetensors"
    with file.open("r+b") as sparse:
        sparse.truncate(10**12)
    assert "is longer than a sum of this model" in replay(run).says
    file.unlink()
    assert replay(run).differs == 0
    file.symlink_to(tmp_path)
    assert replay(run).differs == 0


def test_sums_of_private_people_are_never_recorded(privpart, tmp_path):
    (tmp_path / "plan.toml").write_text(
        changed(("[data]", '[data]\npopulation = "ours"'), text=PLAN)
    )
    out = tmp_path / "run"
    done = privpart(
        "train", "--plan", str(tmp_path / "plan.toml"), "--out", str(out), "--record-sums"
    )
    assert done.returncode == 2
    assert "whoever has the sums can remove the noise" in done.stderr
    assert not out.exists()


def test_a_disclosed_key_replays_a_secret_run_and_its_noise_no_longer_counts(privpart, tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    out, key = tmp_path / "run", tmp_path / "key"
    typed = ["train", "--plan", str(tmp_path / "plan.toml"), "--out", str(out), "--record-sums"]
    patched = create_run

    def kept(*given, **more):
        folder = patched(*given, **more)
        shutil.copy(folder.path / "key", key)
        return folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("privpart.training.train.create_run", kept)
        assert privpart(*typed).returncode == 0
    assert replay(out, key=key).differs is None
    with pytest.raises(ConfigError, match="only an operator who kept the key"):
        replay(out)
    assert privpart("verify", str(out), "--replay").returncode == 2
    key.write_bytes(bytes(32))
    with pytest.raises(ConfigError, match="not the key"):
        replay(out, key=key)
    report = run_report(out).guarantee
    assert report.status == "does-not-hold"
    assert {a.code: a.status for a in report.assumptions}["noise"] == "violated"


def test_what_cannot_be_replayed_says_why(tmp_path, made, privpart):
    with pytest.raises(ConfigError, match="the noise of this run is from seed 3"):
        replay(made, key=tmp_path)
    (tmp_path / "plan.toml").write_text(PLAN)
    out = ["--out", str(tmp_path / "run"), "--seed", "1"]
    assert privpart("train", "--plan", str(tmp_path / "plan.toml"), *out).returncode == 0
    with pytest.raises(ConfigError, match="recorded no sums"):
        replay(tmp_path / "run")


@pytest.mark.parametrize("kind", ["resumed", "adaptive", "groups"])
def test_resumed_adaptive_and_grouped_runs_replay(privpart, tmp_path, kind):
    """A resumed secret run has a salt per attempt, which the sums name."""
    text = PLAN
    if kind == "adaptive":
        table = "[privacy.adaptive_clipping]\nbit_noise_multiplier = 5.0\n[model]"
        text = changed(("[model]", table), ('"tree"', '"independent"'), text=PLAN)
    if kind == "groups":
        turns = "[schedule]\ncycles = 1\nrounds_per_group = 1\n[data]"
        text = changed(("rounds = 2", "rounds = 9"), ("[data]", turns), text=PLAN)
    (tmp_path / "plan.toml").write_text(text)
    out, key = tmp_path / "run", tmp_path / "key"
    typed = ["train", "--plan", str(tmp_path / "plan.toml"), "--out", str(out), "--record-sums"]
    begun = RunFolder.commit

    def once(folder, server, counts):
        shutil.copy(folder.path / "key", key)
        begun(folder, server, counts)
        if folder.rounds == 1:
            raise StorageError("the power failed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "commit", once)
        assert privpart(*typed).returncode == 70
    done = privpart("train", "--resume", "--out", str(out))
    assert done.returncode == 0, done.stderr
    salts = [decode_state(out / f"sum-00000{t}.safetensors")[1]["salts"] for t in range(2)]
    assert salts[0] != salts[1]
    assert replay(out, key=key).differs is None
