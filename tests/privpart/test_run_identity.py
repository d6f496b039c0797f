"""A key, model, fact or file that is not the run's is refused by name, by whoever opens it."""

import json
import os
import re
import sqlite3
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest
import torch
from runs import DIM, PLAN, begun, changed, contents, refusal, train

from accounting import ConfigError
from privpart import RunFolder, Server
from privpart.run import store
from privpart.run.folder import StorageError
from privpart.run.fork import fork
from privpart.run.identity import SigningKey, model_hash
from privpart.run.ledger import Ledger
from privpart.run.report import run_report
from privpart.training.export import released_parameters


@pytest.fixture
def folder(tmp_path) -> Path:
    """A secret run after two of its four rounds."""
    return begun(tmp_path / "run", 2)


@pytest.mark.parametrize("name", ["key", "signing-key"])
@pytest.mark.parametrize("other", [bytes(32), None, b"", bytes(33)], ids=repr)
def test_a_key_that_is_not_the_runs_is_refused_by_name(folder, name, other):
    """All zeros, one bit flipped, cut off, too long."""
    kept = (folder / name).read_bytes()
    (folder / name).write_bytes(bytes([kept[0] ^ 1]) + kept[1:] if other is None else other)
    assert f"{folder / name} is not the key that this run was begun with" in refusal(folder)
    (folder / name).write_bytes(kept)
    with RunFolder.open(folder) as run:
        assert train(run, 4).round == 4


@pytest.mark.parametrize("name", ["key", "signing-key"])
def test_a_run_that_lost_a_key_is_refused_before_it_trains(folder, name):
    (folder / name).unlink()
    assert f"{folder / name} is missing, so this run cannot be continued" in refusal(folder)


def test_a_ledger_that_is_locked_is_not_called_damaged(folder, monkeypatch):
    monkeypatch.setattr("privpart.run.store._PATIENCE", 0.0)
    with closing(sqlite3.connect(folder / "ledger.sqlite", isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(ConfigError, match="cannot be read: database is locked"):
            run_report(folder)
        with pytest.raises(StorageError, match="database is locked"):
            RunFolder.open(folder)


def test_the_first_facts_say_who_the_run_is(folder):
    facts = Ledger(folder / "ledger.sqlite", read_only=True).facts
    assert facts["key"].startswith("secret:")
    assert facts["public_key"] == SigningKey((folder / "signing-key").read_bytes()).public_key
    assert set(facts["versions"]) == {"privpart", "python", "torch", "numpy"}


def test_a_row_names_the_released_model(folder):
    with RunFolder.open(folder) as run:
        released = train(run, 3).parameters
    rows = Ledger(folder / "ledger.sqlite", read_only=True).rows()
    assert rows[-1].model == model_hash(released)
    assert len({row.model for row in rows}) == 3


def test_facts_are_signed(folder):
    changed(folder, "INSERT INTO run VALUES ('adopted_at', '0')")
    assert "facts were changed after its head was signed" in refusal(folder)


def test_a_head_that_somebody_else_signed_is_refused(folder):
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.signer = SigningKey(bytes(32))
    ledger.add_fact("adopted_at", 0)
    ledger.close()
    assert "the signature of its head is not that of the run's key" in refusal(folder)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i, '1' FROM n"


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW extra AS SELECT 1",
        "CREATE TABLE extra (a)",
        "CREATE TRIGGER t AFTER INSERT ON rounds BEGIN DELETE FROM rounds; END",
        "CREATE INDEX extra ON rounds (state)",
        "ALTER TABLE rounds ADD COLUMN extra INT AS (1)",
        f"DROP TABLE run; CREATE VIEW run (name, value) AS {ENDLESS}",
        f"DROP TABLE participations; CREATE VIEW participations (round, client) AS {ENDLESS}",
    ],
)
def test_a_ledger_with_more_than_its_tables_is_refused(folder, statement):
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        db.executescript(statement)
    with pytest.raises(ConfigError, match="its tables are not those that it writes"):
        run_report(folder)
    assert "its tables are not those" in refusal(folder)


def hot_journal(folder: Path) -> Path:
    """Leave ledger and journal as a crash in the middle of a commit does; return the journal."""
    path = folder / "ledger.sqlite"
    journal = path.with_name("ledger.sqlite-journal")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA cache_spill = 1")
        db.execute("PRAGMA cache_size = 1")
        db.execute("BEGIN")
        db.executemany("INSERT INTO participations VALUES (2, ?)", [(i,) for i in range(100, 3000)])
        db.execute("UPDATE rounds SET received = 7")
        written = (path.read_bytes(), journal.read_bytes())
        db.execute("ROLLBACK")
    path.write_bytes(written[0])
    journal.write_bytes(written[1])
    return journal


def name_another_file(journal: Path, victim: Path) -> None:
    """End a journal as those that make SQLite delete a file once they are rolled back."""
    name = str(victim).encode()
    ending = (2).to_bytes(4, "big") + name + len(name).to_bytes(4, "big")
    ending += sum(name).to_bytes(4, "big") + bytes.fromhex("d9d505f920a163d7")
    journal.write_bytes(journal.read_bytes() + ending)


def test_a_commit_that_was_cut_off_is_read_without_a_write(folder):
    hot_journal(folder)
    before = contents(folder)
    assert run_report(folder).rounds == 2
    assert contents(folder) == before
    with RunFolder.open(folder) as run:
        assert train(run, 4).round == 4


def test_a_journal_that_names_another_file_deletes_nothing(folder, tmp_path, monkeypatch):
    """Also if whoever owns the folder waits until its files were looked at."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    usual, journal = store._copy, hot_journal(folder)

    def exchanged(path: Path, into: Path) -> Path:
        name_another_file(journal, victim)
        return usual(path, into)

    with monkeypatch.context() as patched:
        patched.setattr(store, "_copy", exchanged)
        with pytest.raises(ConfigError, match="names another file"):
            run_report(folder)
    for opening in (run_report, RunFolder.open):
        with pytest.raises(ConfigError, match="names another file"):
            opening(folder)
    assert victim.read_bytes() == b"precious"


def test_an_early_end_erases_the_keys_and_keeps_the_model(folder):
    with RunFolder.open(folder) as run:
        server = train(run, 3)
        run.end_early("enough")
    assert sorted(contents(folder)) == ["closed-000003.safetensors", "ledger.sqlite", "lock"]
    kept = Ledger(folder / "ledger.sqlite", read_only=True)
    assert kept.rows()[-1].model == model_hash(server.parameters)
    assert kept.facts["closed"]["rounds"] == 3
    assert "was ended early, after 3 of 4 rounds" in refusal(folder)
    assert json.dumps(run_report(folder).to_dict())
    assert torch.equal(released_parameters(folder)[0], server.parameters)
    with fork(folder, folder.parent / "fork", PLAN, facts={"delta": 1e-6}) as again:
        begun = Server(again.plan, torch.zeros(DIM), source=again.source())
        again.restore(begun)
    assert torch.equal(begun.parameters, server.parameters)


def test_an_early_end_that_was_cut_off_is_completed_by_the_next_opening(folder, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "_remove_leftovers", lambda _: None)
        run = RunFolder.open(folder)
        run.end_early()
    assert {"key", "signing-key"} <= contents(folder).keys()
    assert "was ended early, after 2 of 4 rounds" in refusal(folder)
    assert contents(folder).keys() == {"closed-000002.safetensors", "ledger.sqlite", "lock"}


def test_a_query_that_never_ends_is_given_up(tmp_path):
    """The bound on work, alone: the check of the tables would refuse such a view before."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.execute(f"CREATE VIEW run (name, value) AS {ENDLESS}")
        (tmp_path / "file").write_bytes(b"")
        with (
            pytest.raises(ConfigError, match="interrupted"),
            store.reading(db, tmp_path / "file"),
        ):
            db.execute("SELECT count(*) FROM run").fetchall()
        assert db.execute("SELECT count(*) FROM (SELECT 1 FROM run LIMIT 9999)").fetchall()


REFUSED_FILE = "is missing|must be a file|its first bytes|not a file. Remove it"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *product(["ledger.sqlite", "ledger.sqlite-journal"], ["pipe", "link", "folder"]),
        ("ledger.sqlite", "write-ahead log"),
        ("ledger.sqlite", "nothing"),
    ],
)
def test_a_ledger_that_is_not_an_ordinary_file_is_refused_at_once(folder, tmp_path, kind, name):
    path = folder / name
    data = (folder / "ledger.sqlite").read_bytes()
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "other").write_bytes(data)
        path.symlink_to(tmp_path / "other")
    elif kind == "folder":
        path.mkdir()
    elif kind == "write-ahead log":
        path.write_bytes(data[:18] + bytes([2, 2]) + data[20:])
    with pytest.raises(ConfigError, match=REFUSED_FILE):
        run_report(folder)
    assert re.search(REFUSED_FILE, refusal(folder))
