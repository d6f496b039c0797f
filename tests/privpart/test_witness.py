"""What one machine's log says of a run, compared on another."""

import json
import shutil
from pathlib import Path

import pytest
from runs import begun, train

from accounting import ConfigError
from privpart import RunFolder
from privpart.run import budget_book, log
from privpart.run.evidence import Check
from privpart.run.ledger import Ledger
from privpart.run.witness import read_witness, write_witness
from privpart.training.verify import check_run


@pytest.fixture
def machines(tmp_path, monkeypatch):
    """Go to a machine by its number; the first one made a run of two rounds."""

    def enter(number: int) -> Path:
        monkeypatch.setenv(log.VARIABLE, str(tmp_path / f"machine-{number}"))
        return tmp_path

    enter(0)
    begun(tmp_path / "run", 2)
    return enter


def line(folder: Path, *witnesses: Path) -> Check:
    return next(c for c in check_run(folder, witnesses=witnesses) if c.what == "witness")


def witnessed(machines, number: int) -> Path:
    """Write what a machine saw until now, and return to the first one."""
    path = machines(number) / f"witness-{number}.json"
    write_witness(path)
    machines(0)
    return path


def continued(folder: Path, rounds: int, **options) -> None:
    with RunFolder.open(folder, **options) as run:
        train(run, rounds)


def test_a_copy_that_was_continued_elsewhere_shows_beside_its_witness(machines):
    base = machines(0)
    shutil.copytree(base / "run", base / "copy")
    assert line(base / "run", witnessed(machines, 1)).status == "verified"
    machines(1)
    RunFolder.open(base / "copy", adopt=True).close()
    shown = line(base / "run", witnessed(machines, 1))
    assert (shown.status, "the first 2 of these 2" in shown.says) == ("verified", True)
    machines(1)
    continued(base / "copy", 3)
    path = witnessed(machines, 1)
    assert "3 rounds were committed, and this folder has 2" in line(base / "run", path).says
    continued(base / "run", 4)
    shown = line(base / "run", path)
    assert (shown.status, "another copy was continued" in shown.says) == ("wrong", True)
    machines(1)
    assert line(base / "copy", path).status == "verified"
    assert line(base / "copy", witnessed(machines, 0)).status == "wrong"


def out_of_memory(*_: object) -> None:
    raise MemoryError


def test_a_round_that_a_crash_cut_off_elsewhere_is_not_called_none(machines, monkeypatch):
    base = machines(0)
    shutil.copytree(base / "run", base / "copy")
    machines(1)
    monkeypatch.setattr(Ledger, "append", out_of_memory)
    with pytest.raises(MemoryError):
        continued(base / "copy", 3, adopt=True)
    shown = line(base / "run", witnessed(machines, 1))
    assert (shown.status, "was cut off" in shown.says) == ("asserted", True)


def test_closing_losing_and_seeding_are_named(machines):
    base = machines(0)
    shutil.copytree(base / "run", base / "copy")
    machines(1)
    RunFolder.open(base / "copy", adopt=True).end_early()
    assert "was closed after 2 rounds" in line(base / "run", path := witnessed(machines, 1)).says
    with RunFolder.open(shutil.copytree(base / "run", base / "other")) as run:
        train(run, 3)
        run.end_early()
    assert line(base / "other", path).status == "wrong"
    (base / "machine-1" / "runs.log").unlink()
    shown = line(base / "run", witnessed(machines, 1))
    assert (shown.status, "an earlier one is lost" in shown.says) == ("asserted", True)
    begun(base / "seeded", 1, seed=3)
    assert line(base / "seeded", path).status == "asserted"


def test_a_state_directory_restored_to_an_older_copy_is_told_by_its_own_witness(machines):
    """Together with the folder, so that nothing else can tell."""
    base = machines(0)
    for name in ("run", "machine-0"):
        shutil.copytree(base / name, base / f"older-{name}")
    budget_book.set_limit("keyboard-de", budget_book.Limit(20, 1e-6))
    path = witnessed(machines, 0)
    continued(base / "run", 3)
    shown = line(base / "run", path)
    assert (shown.status, "of this machine" in shown.says) == ("verified", True)
    for name in ("run", "machine-0"):
        shutil.rmtree(base / name)
        shutil.copytree(base / f"older-{name}", base / name)
    shown = line(base / "run", path)
    assert (shown.status, "is an older copy" in shown.says) == ("wrong", True)


def test_a_changed_ledger_is_beside_no_witness(machines):
    base = machines(0)
    path = witnessed(machines, 0)
    ledger = base / "run" / "ledger.log"
    ledger.write_bytes(ledger.read_bytes().replace(b'"received": 2', b'"received": 9', 1))
    assert line(base / "run", path).status == "asserted"


HOSTILE = {
    "a key twice": lambda v: json.dumps(v)[:-1] + ', "lost": false}',
    "another schema": lambda v: json.dumps(v | {"schema": "privpart/run/1"}),
    "a field of its own": lambda v: json.dumps(v | {"more": 1}),
    "no lines and a head": lambda v: json.dumps(v | {"lines": 0}),
    "fewer than no lines": lambda v: json.dumps(v | {"lines": -1}),
    "true rounds": lambda v: json.dumps(v | {"runs": [v["runs"][0] | {"rounds": True}]}),
    "negative rounds": lambda v: json.dumps(v | {"runs": [v["runs"][0] | {"rounds": -1}]}),
    "a run twice": lambda v: json.dumps(v | {"runs": v["runs"] * 2}),
    "orders in a time": lambda v: json.dumps(v | {"at": "\x1b[2J"}),
    "NaN": lambda v: json.dumps(v | {"lines": float("nan")}),
    "depth": lambda _: "[" * 100_000,
    "no JSON": lambda _: "\x1b[2J",
    "too many bytes": lambda _: " " * (2**24 + 1),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_witness_is_refused_in_a_sentence(machines, kind):
    path = witnessed(machines, 0)
    path.write_text(HOSTILE[kind](json.loads(path.read_text())))
    with pytest.raises(ConfigError, match="is not a witness") as refused:
        read_witness(path)
    assert len(str(refused.value)) < 600
    assert str(refused.value).isprintable()


def test_what_is_no_file_is_no_witness(machines):
    for path in (machines(0), machines(0) / "none", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is not a witness"):
            read_witness(path)


def test_witnesses_are_written_and_compared_by_commands(machines, privpart):
    path = machines(0) / "witness.json"
    assert "1 run, log" in privpart("budget", "--write-witness", str(path)).stdout
    shown = privpart("budget", "--write-witness", str(path), "--format", "json").stdout
    assert json.loads(shown) == json.loads(path.read_text())
    told = privpart("verify", str(machines(0) / "run"), *["--witness", str(path)] * 2)
    assert (told.returncode, told.stdout.count("verified  witness:")) == (0, 2)
    assert "keyboard" not in path.read_text()
    path.write_text("{}")
    told = privpart("verify", str(machines(0) / "run"), "--witness", str(path))
    assert (told.returncode, told.stderr.count("\n")) == (2, 1)
