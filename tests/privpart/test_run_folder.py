"""The run folder: what it keeps, what it refuses, and what it says."""

import json
import os
import pickle
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from runs import COHORTS, DIM, Clients, add_row, changed, flip, plan, refusal, server, train

from accounting import BinaryTree, BufferedToeplitz, ConfigError, Independent
from privpart import AdaptiveClipping, RunFolder, SeededSource, Server, fit
from privpart.noise import stream
from privpart.run import canaries, log
from privpart.run import folder as folder_module
from privpart.run.begin import create_run
from privpart.run.evidence import gather
from privpart.run.store import (
    StorageError,
    decode_state,
    encoded_hash,
    model_hash,
    state_hash,
    write_state,
)

SETTINGS = [
    ({}, {"kind": "sgd", "momentum": 0.9}),
    ({}, {"kind": "adam"}),
    ({"mechanism": Independent(4)}, {"kind": "adagrad"}),
    (
        {
            "mechanism": BinaryTree(4, 2),
            "adaptive_clipping": AdaptiveClipping(bit_noise_multiplier=2.0),
        },
        {},
    ),
    (
        {
            "mechanism": BinaryTree(4, 2, estimator="online"),
            "adaptive_clipping": AdaptiveClipping(bit_noise_multiplier=2.0),
        },
        {},
    ),
    ({"mechanism": BufferedToeplitz(4, (0.9, 0.4), (0.3, 0.2))}, {"momentum": 0.9}),
]


@pytest.mark.parametrize(("change", "optimizer"), SETTINGS)
@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(tmp_path, change, optimizer, stop):
    a_plan = plan(**change)
    with create_run(tmp_path / "whole", a_plan, seed=3) as run:
        whole = train(run, 4, **optimizer)
    with create_run(tmp_path / "halves", a_plan, seed=3) as run:
        train(run, stop, **optimizer)
    with RunFolder.open(tmp_path / "halves") as run:
        halves = train(run, 4, **optimizer)
    assert torch.equal(whole.parameters, halves.parameters)
    assert whole.clip_norm == halves.clip_norm
    name = "state-000004.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "halves" / name).read_bytes()


BLT = plan(mechanism=BufferedToeplitz(4, (0.9, 0.4), (0.3, 0.2)))


def test_registers_of_the_noise_are_saved_now_and_then(tmp_path, monkeypatch):
    """A state names those that it needs; a run that ended has none, and nobody can read them."""
    monkeypatch.setattr(stream, "MOST_SECONDS", 2.1e-4)
    folder, states = tmp_path / "run", []

    def look():
        files = sorted(file.name for file in folder.iterdir() if "-0" in file.name)
        tensors, values = decode_state(folder / files[-1])
        assert set(tensors) == {"parameters"}
        states.append((files[:-1], values.get("registers", {}).get("round")))

    create_run(folder, BLT).close()
    for rounds in range(1, 5):
        with RunFolder.open(folder) as run:
            train(run, rounds)
        look()
        if rounds == 3:
            kept = (folder / "noise-000002.safetensors").open("rb")
    two = "noise-000002.safetensors"
    assert states == [([], 0), ([two], 2), ([two], 2), ([], None)]
    (folder / "noise-000000.safetensors").touch()  # no run writes one, and none that ended keeps it
    RunFolder.open(folder).close()
    assert not list(folder.glob("noise-*"))
    with kept:
        assert not any(kept.read())  # overwritten before it lost its name


def test_registers_that_are_not_the_state_s_are_named_and_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "MOST_SECONDS", 2.1e-4)
    with create_run(tmp_path / "run", BLT) as run:
        train(run, 3)
    file = tmp_path / "run" / "noise-000002.safetensors"
    state = {check.what: check.status for check in gather(tmp_path / "run").checks}["state"]
    assert state == "verified"
    for change in (lambda: flip(file, -1), file.unlink):
        change()
        checks = {check.what: check for check in gather(tmp_path / "run").checks}
        assert checks["state"].status == "wrong"
        assert file.name in checks["state"].says
        assert file.name in refusal(tmp_path / "run")


def test_participation_limits_survive_a_resumption(folder):
    with RunFolder.open(folder) as run:
        one = server(run)
        assert one.ineligible(range(6)).keys() == {0, 1, 2}
        assert one.run_round([one.task([]).update(0, torch.zeros(DIM))]).released is False


def test_what_lies_in_the_folder(folder):
    names = {file.name for file in folder.iterdir()}
    assert names == {"key", "ledger.log", "lock", "signing-key", "state-000002.safetensors"}
    assert folder.stat().st_mode & 0o077 == 0
    for name in names - {"lock"}:
        assert (folder / name).stat().st_mode & 0o077 == 0, name
    # Every pickle since protocol 2 begins with this byte; a key may, by chance.
    for name in names - {"lock", "key", "signing-key"}:
        assert (folder / name).read_bytes()[:1] != pickle.PROTO, name


def test_a_complete_run_keeps_neither_key_nor_noise(folder):
    with RunFolder.open(folder) as run:
        train(run, 4)
    assert not {"key", "signing-key"} & {file.name for file in folder.iterdir()}
    tensors, values = decode_state(folder / "state-000004.safetensors")
    assert set(tensors) == {"parameters"}
    assert "noise" not in values
    with RunFolder.open(folder) as run:
        assert server(run).round == 4


def test_an_older_copy_is_refused_also_in_the_place_of_the_run(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "twin")
    with RunFolder.open(folder) as run:
        train(run, 3)
    assert "older copy: it stands after 2 rounds, while 3 were" in refusal(tmp_path / "twin")
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "twin", folder)
    assert "begin a fork" in refusal(folder)


def test_a_copy_that_went_another_way_is_refused(folder, tmp_path):
    """As many rounds, but others: the log records the chain, not its length."""
    shutil.copytree(folder, tmp_path / "twin")
    with RunFolder.open(folder) as run:
        train(run, 3)
    add_row(tmp_path / "twin", round=2, clients=[])
    with pytest.raises(ConfigError, match="another chain of the run, of 3 rounds"):
        RunFolder.open(tmp_path / "twin")


READ = [  # ways in which the package reads a fact by name
    r'facts\[f?"(\w+)"\]',
    r'facts\.get\(\s*"(\w+)"',
    r'"(\w+)" (?:not )?in [\w.]*facts\b',
    r'add_fact\("(\w+)"',
]


def test_facts_never_set_what_the_package_reads(tmp_path):
    """Whoever calls ``create`` sets what is the caller's to say, and no word of a report."""
    source = "".join(
        path.read_text() for path in Path(folder_module.__file__).parents[1].rglob("*.py")
    )
    names = {name for pattern in READ for name in re.findall(pattern, source)}
    names |= {folder_module.CHECKED, canaries.FACT}
    callers = {"delta", "population", "population_name", "population_size", "parameters", "frozen"}
    callers.add("about")  # refused by its own check
    assert {"unit", "identity", "inherited", "earlier", "code", "plan"} | callers <= names
    for name in names - callers:
        with pytest.raises(ConfigError, match=f"facts: {name} are"):
            create_run(tmp_path / "run", plan(), facts={name: None})
    with pytest.raises(ConfigError, match="is for the public data of built-in tasks"):
        create_run(tmp_path / "run", plan(), facts={"population_name": "Task: digits"})
    assert not (tmp_path / "run").exists()


def test_facts_with_odd_keys_are_read_back_as_they_are_kept(tmp_path):
    create_run(tmp_path / "run", plan(), facts={"x": {10: 1, 9: 2}}).close()
    with RunFolder.open(tmp_path / "run") as run:
        assert run.facts["x"] == {"10": 1, "9": 2}


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        ({"run_id": "../../evil"}, "run_id is missing or has the wrong type"),
        ({"schema": "privpart/ledger/9"}, "this version reads 'privpart/ledger/"),
        ({"plan": None}, "seed, plan or a key is missing or has the wrong type"),
        ({"closed": {"rounds": "2"}}, "how it was planned or ended has the wrong type"),
    ],
)
def test_facts_of_another_kind_are_refused(folder, fact, reason):
    changed(folder, lambda entries: entries[0]["facts"].update(fact))
    with pytest.raises(ConfigError, match=reason):
        RunFolder.open(folder, adopt=True)


@pytest.mark.parametrize("copied", [False, True])
def test_a_run_is_open_once_also_as_a_copy(folder, tmp_path, copied):
    other = shutil.copytree(folder, tmp_path / "twin") if copied else folder
    busy = "open already, perhaps as a copy" if copied else "another process works on"
    with RunFolder.open(folder), pytest.raises(ConfigError, match=busy):
        RunFolder.open(other)
    RunFolder.open(other).close()


def test_an_older_state_file_is_refused(folder, tmp_path):
    old = (folder / "state-000002.safetensors").read_bytes()
    with RunFolder.open(folder) as run:
        train(run, 3)
    (folder / "state-000003.safetensors").write_bytes(old)
    with RunFolder.open(folder) as run, pytest.raises(ConfigError, match="not the state that the"):
        server(run)


def test_a_run_that_this_machine_never_saw_needs_adoption(folder, monkeypatch, tmp_path):
    monkeypatch.setenv(log.VARIABLE, str(tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match="has no record of the run"):
        RunFolder.open(folder)
    with RunFolder.open(folder, adopt=True) as run:
        train(run, 3)
    with RunFolder.open(folder) as run:  # from here on it is known
        assert run.rounds == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries[1]["row"].update(received=9),
        lambda entries: entries[2]["row"].update(state="a"),
        lambda entries: entries[2]["row"].update(clipped_by={"EmbeddedEngine": 2}),
        lambda entries: entries[1]["row"]["clients"].pop(),
        lambda entries: entries.pop(1),
        lambda entries: entries.reverse(),
        lambda entries: entries[0]["facts"].update(seed=9),
    ],
)
def test_a_ledger_that_was_changed_is_refused(folder, change):
    changed(folder, change)
    assert re.search("does not follow|no facts that may follow|who clipped", refusal(folder))


def test_another_plan_or_model(folder):
    with RunFolder.open(folder) as run:
        other = Server(plan(clip_norm=0.4), torch.zeros(DIM), source=run.source())
        with pytest.raises(ConfigError, match="the state belongs to plan"):
            run.restore(other)
    with (
        RunFolder.open(folder) as run,
        pytest.raises(ConfigError, match="has 8 parameters, the model 9"),
    ):
        server(run, dim=9)


def test_a_run_begins_in_a_folder_of_its_own(folder, tmp_path):
    with pytest.raises(ConfigError, match="is not empty: to continue that run, add --resume"):
        create_run(folder, plan())
    with pytest.raises(ConfigError, match="there is no such folder"):
        RunFolder.open(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"ledger\.log is missing"):
        RunFolder.open(tmp_path / "empty")


def test_one_source_per_opening_and_no_other(folder):
    with RunFolder.open(folder) as run:
        run.source()
        with pytest.raises(ConfigError, match="a second server would repeat its noise"):
            run.source()
        other = Server(run.plan, torch.zeros(DIM), source=SeededSource(1))
        with pytest.raises(ConfigError, match=r"state\['source'\]"):
            run.restore(other)
    with create_run(folder / "new", plan()) as run:
        other = Server(run.plan, torch.zeros(DIM), source=SeededSource(1))
        with pytest.raises(ConfigError, match="noise is not the run's"):
            fit(other, Clients(), COHORTS, commit=run.commit)


def test_a_forked_process_does_not_work_on_the_run(folder, monkeypatch):
    with RunFolder.open(folder) as run:
        one = server(run)
        with monkeypatch.context() as patched:
            patched.setattr("os.getpid", lambda: -1)
            with pytest.raises(ConfigError, match="forked"):
                run.source()
            with pytest.raises(ConfigError, match="forked"):
                run.commit(one, None)
            with pytest.raises(ConfigError, match="forked"):
                one.task([])


def test_a_model_that_was_not_committed_is_never_sent(folder, monkeypatch):
    """A caller that catches the error and keeps the server must not release its model."""
    with RunFolder.open(folder) as run:
        one = server(run)
        with monkeypatch.context() as patched:
            patched.setattr(RunFolder, "_commit", lambda *_: os.fsync(10**6))
            with pytest.raises(StorageError):
                fit(one, Clients(), COHORTS, commit=run.commit)
        with pytest.raises(ConfigError, match=r"round 2 was not committed \(StorageError\)"):
            fit(one, Clients(), COHORTS, commit=run.commit)
        with pytest.raises(ConfigError, match="halted"):
            one.run_round([])


def test_a_server_that_is_not_one_round_ahead_is_not_committed(folder):
    with RunFolder.open(folder) as run:
        one = server(run)
        with pytest.raises(ConfigError, match="the run has 2 rounds, the server 2"):
            run.commit(one, None)


def test_a_disk_that_fills_up_while_writing_loses_nothing(folder):
    """A real refusal by the system: files may not grow beyond 64 bytes for a while."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with RunFolder.open(folder) as run:
        one = server(run)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
            with pytest.raises(StorageError, match="the run stands after 2 rounds"):
                fit(one, Clients(), COHORTS, commit=run.commit)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, ignored)
    with RunFolder.open(folder) as run:
        assert train(run, 4).round == 4


def test_a_state_is_hashed_by_its_parts(tmp_path):
    """So a model has one hash, alone and in a state; what the hash names is every byte."""
    file = tmp_path / "state"
    tensors = {"parameters": torch.rand(5), "empty": torch.empty(0), "sum": torch.arange(3)}
    hashes = write_state(file, tensors, {"round": 1})
    data = file.read_bytes()
    assert hashes.state == state_hash(file) == encoded_hash(data) == encoded_hash(data)
    assert hashes.tensors.keys() == {"parameters", "sum"}
    assert hashes.tensors["parameters"] == model_hash(tensors["parameters"])
    for at in range(len(data)):
        changed_data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        try:
            assert encoded_hash(changed_data) != hashes.state
        except OSError as error:
            assert "not a safetensors file" in str(error)  # noqa: PT017
    for other in (data[:-1], data + b"x", data[:7], b"", b"\xff" * 16, data[:9]):
        with pytest.raises(OSError, match="not a safetensors file"):
            encoded_hash(other)


@pytest.mark.parametrize(
    "places", [[0, 4], [4, 8], [0, 9], [8, 0], [0, 8.0], [0.0, 8], [False, 8], "ab", 3]
)
def test_a_header_that_does_not_cover_its_file_is_refused(places):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": places}}).encode()
    with pytest.raises(OSError, match="not a safetensors file"):
        encoded_hash(len(header).to_bytes(8, "little") + header + bytes(8))


def test_states_that_are_none(tmp_path):
    for content in (b"", b"\x80\x04K\x01.", b"\xff" * 40):
        (tmp_path / "state").write_bytes(content)
        with pytest.raises(ConfigError, match="is not a valid state file"):
            decode_state(tmp_path / "state")
