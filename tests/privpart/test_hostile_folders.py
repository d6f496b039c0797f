"""Folders that somebody else prepared, may write in, or looks into; and what is left of a key."""

import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs import PLAN

from accounting import ConfigError
from privpart import RunFolder
from privpart.loop import RoundRecord
from privpart.run import store
from privpart.run.begin import create_run
from privpart.run.report import run_report
from privpart.run.store import StorageError, erase_durably, read_state, write_durably
from privpart.server import RoundCounts
from privpart.training.callbacks import METRICS, MetricsError, MetricsFile

START = torch.zeros(3)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A secret run that has begun."""
    create_run(tmp_path / "run", PLAN, facts={"delta": 1e-5}).close()
    return tmp_path / "run"


@pytest.fixture
def prepared(tmp_path) -> Path:
    """An empty folder in which a run may begin."""
    (tmp_path / "prepared").mkdir(mode=0o700)
    return tmp_path / "prepared"


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", ["key.part", "ledger.log.part", "start.safetensors.part"])
@pytest.mark.parametrize("plant", ["file", "link", "pipe", "hard link"])
def test_a_planted_part_file_is_neither_written_nor_followed(prepared, tmp_path, name, plant):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    make = {
        "file": lambda path: (path.write_text(""), path.chmod(0o666)),
        "link": lambda path: path.symlink_to(elsewhere),
        "pipe": os.mkfifo,
        "hard link": lambda path: path.hardlink_to(elsewhere),
    }[plant]
    make(prepared / name)
    with pytest.raises(ConfigError, match="is not empty"):
        create_run(prepared, PLAN)
    assert elsewhere.read_text() == "mine"
    assert names(prepared) == [name]


PLANTS = {
    "is a link, not a file": Path.symlink_to,
    "is a pipe, not a file": lambda path, _: os.mkfifo(path),
    "has 2 names": Path.hardlink_to,
    "": lambda path, _: path.mkdir(),
}


@pytest.mark.parametrize("name", ["key", "lock", "start.safetensors"])
@pytest.mark.parametrize("says", PLANTS)
def test_what_is_planted_at_a_name_of_ours_is_refused_by_name(prepared, tmp_path, name, says):
    (tmp_path / "elsewhere").write_text("mine")
    PLANTS[says](prepared / name, tmp_path / "elsewhere")
    with pytest.raises((StorageError, ConfigError), match=rf"prepared.*{name}.*{says}"):
        create_run(prepared, PLAN, start=None if name == "lock" else START)
    assert (tmp_path / "elsewhere").read_text() == "mine"


@pytest.mark.parametrize("name", ["ledger.log", "ledger.log-journal", "key", "metrics.jsonl"])
def test_a_run_with_links_or_pipes_is_not_resumed(folder, tmp_path, name):
    path, aside = folder / name, tmp_path / "aside"
    if path.exists():
        path.rename(aside)
    path.symlink_to(aside)
    with pytest.raises(ConfigError, match=rf"{name} is a link, not a file"):
        RunFolder.open(folder)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=rf"{name} is a pipe, not a file"):
        RunFolder.open(folder)


def test_files_are_private_whatever_the_umask_is(tmp_path):
    for mask in (0o000, 0o777):
        before = os.umask(mask)
        try:
            (tmp_path / "state").mkdir(mode=0o700, exist_ok=True)
            (tmp_path / "state").chmod(0o700)
            create_run(tmp_path / "state" / f"run{mask}", PLAN).close()
        finally:
            os.umask(before)
        run = tmp_path / "state" / f"run{mask}"
        assert mode(run) == 0o700
        assert {mode(file) for file in run.iterdir()} == {0o600}


def test_a_folder_that_others_can_write_in_is_refused(folder, prepared, capsys):
    for path in (folder, prepared):
        path.chmod(0o770)
        with pytest.raises(ConfigError, match=r"written by other users \(mode 770\).*chmod go-w"):
            RunFolder.open(path) if path == folder else create_run(path, PLAN)
        path.chmod(0o755)
    assert not list(prepared.iterdir())
    assert capsys.readouterr().err == ""
    RunFolder.open(folder).close()
    assert "run is open to other users (mode 755)" in capsys.readouterr().err
    folder.chmod(0o777)
    assert run_report(folder).rounds == 0  # a report only reads


def test_a_folder_that_becomes_open_is_not_written_to(folder):
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod go-w"):
        write_durably(folder / "key", b"x" * 32)


def test_a_folder_or_file_of_another_user_is_refused(folder, monkeypatch):
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(ConfigError, match=rf"run belongs to another user \(number {me}\)"):
        RunFolder.open(folder)
    monkeypatch.undo()
    with monkeypatch.context() as patched:
        patched.setattr(store, "refuse_shared", lambda _: None)
        patched.setattr(os, "geteuid", lambda: me + 1)
        with pytest.raises(ConfigError, match=rf"belongs to another user \(number {me}\), who can"):
            store.refuse_planted(folder)


def test_only_our_own_unfinished_files_are_removed(folder):
    own = folder / f".privpart-{'0' * 32}.part"
    others = [folder / name for name in ("data.csv.part", "state-notes", ".privpart-x.part")]
    for file in (own, *others):
        file.write_text("")
    RunFolder.open(folder).close()
    assert [file.exists() for file in (own, *others)] == [False, True, True, True]


def test_an_unfinished_file_leaves_nothing_and_the_old_content(tmp_path, monkeypatch):
    write_durably(tmp_path / "x", b"old")

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_durably(tmp_path / "x", b"new")
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_nothing_but_a_file_is_read(tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.write_bytes(b"x" * 40)
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    for name, says in [("link", "is a link"), ("pipe", "is a pipe"), ("target", "larger than 32")]:
        with pytest.raises(OSError, match=says):
            store.read_small(tmp_path / name, 32)
    for name in ("link", "pipe"):
        with pytest.raises(ConfigError, match=f"{name} cannot be read"):
            read_state(tmp_path / name, "0" * 64)
    monkeypatch.setattr(store, "_memory", lambda: 39)
    with pytest.raises(ConfigError, match="its 40 bytes do not fit into this machine's memory"):
        read_state(target, "0" * 64)


def test_a_key_is_overwritten_before_it_is_removed(tmp_path):
    """By the bytes of the file itself, which a second opening keeps after its name is gone."""
    (tmp_path / "key").write_bytes(b"k" * 32)
    with (tmp_path / "key").open("rb") as still:
        erase_durably(tmp_path / "key")
        assert still.read() == bytes(32)
    assert not list(tmp_path.iterdir())
    erase_durably(tmp_path / "key")  # nothing to do
    (tmp_path / "other").write_text("mine")
    for plant in (Path.symlink_to, Path.hardlink_to):
        plant(tmp_path / "key", tmp_path / "other")
        erase_durably(tmp_path / "key")
    assert (tmp_path / "other").read_text() == "mine"
    assert names(tmp_path) == ["other"]


def test_no_core_is_dumped_of_a_process_with_a_key():
    """In a process of its own, whose limits were generous."""
    code = (
        "import ctypes, resource, privpart.noise.source as s\n"
        "print(ctypes.CDLL(None).prctl(3), resource.getrlimit(resource.RLIMIT_CORE)[0])\n"
        "s.SecretSource()\n"
        "print(ctypes.CDLL(None).prctl(3), resource.getrlimit(resource.RLIMIT_CORE)[0])"
    )
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (most, most)),
    )
    before, after = done.stdout.splitlines()
    assert before.split()[0] == "1"
    assert after == "0 0"


def test_metrics_are_appended_to_files_only(tmp_path):
    (tmp_path / "mine").write_text("mine")
    record = RoundRecord(0, RoundCounts(1, 1, 0), {"accuracy": 0.5})
    for plant, says in [
        (lambda path: path.symlink_to(tmp_path / "mine"), "it is a link"),
        (os.mkfifo, "it is a pipe"),
    ]:
        plant(tmp_path / METRICS)
        with pytest.raises(MetricsError, match=rf"{METRICS} cannot be read: {says}"):
            MetricsFile(tmp_path)(record)
        (tmp_path / METRICS).unlink()
    assert (tmp_path / "mine").read_text() == "mine"
    MetricsFile(tmp_path)(record)
    assert (tmp_path / METRICS).read_text() == '{"round": 0, "metrics": {"accuracy": 0.5}}\n'


def test_what_a_failed_append_left_is_gone_before_the_next_one(tmp_path):
    (tmp_path / "log").write_bytes(b"one\nhalf of a longer line")
    store.append_durably(tmp_path / "log", b"two\n", 4)
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"
    for append in (store.append_durably, store.flush_end):
        with pytest.raises(OSError, match="has lost bytes: it has 8 of 9"):
            append(tmp_path / "log", b"two\n", 9)
