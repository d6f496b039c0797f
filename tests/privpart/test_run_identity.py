"""A key, model, fact or file that is not the run's is refused by name, by whoever opens it."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from runs import COHORTS, DIM, PLAN, Clients, contents, refusal, server, train

from accounting import ConfigError
from privpart import RunFolder, Server, fit
from privpart.run import store
from privpart.run.begin import fork
from privpart.run.ledger import LEDGER, Ledger, SigningKey, _line
from privpart.run.report import run_report
from privpart.run.store import StorageError, model_hash
from privpart.training.export import released_parameters
from privpart.training.verify import check_run

OTHER_KEYS = {
    "zeros": lambda _: bytes(32),
    "one bit": lambda key: bytes([key[0] ^ 1]) + key[1:],
    "cut off": lambda _: b"",
    "too long": lambda _: bytes(33),
    "missing": None,
}


@pytest.mark.parametrize("name", ["key", "signing-key"])
@pytest.mark.parametrize("other", OTHER_KEYS)
def test_a_key_that_is_not_the_runs_is_refused_by_name_before_it_trains(folder, name, other):
    key = (folder / name).read_bytes()
    (folder / name).unlink()
    said = "is missing, so this run cannot be continued"
    if other != "missing":
        (folder / name).write_bytes(OTHER_KEYS[other](key))
        said = "is not the key that this run was begun with"
    assert f"{folder / name} {said}" in refusal(folder)
    (folder / name).write_bytes(key)
    with RunFolder.open(folder) as run:
        assert run.rounds == 2


def test_the_ledger_says_who_the_run_is_and_names_each_released_model(folder):
    facts = Ledger(folder).facts
    assert facts["key"].startswith("secret:")
    assert facts["public_key"] == SigningKey((folder / "signing-key").read_bytes()).public_key
    assert set(facts["versions"]) == {"privpart", "python", "torch", "numpy"}
    with RunFolder.open(folder) as run:
        released = train(run, 3).parameters
    rows = Ledger(folder).rows()
    assert rows[-1].model == model_hash(released)
    assert len({row.model for row in rows}) == 3


def test_a_head_that_somebody_else_signed_is_refused(folder):
    ledger = Ledger(folder)
    ledger.signer = SigningKey(bytes(32))
    ledger.add_fact("rows_differ", [0, "unseen"])
    assert "the signature of its head is not that of the run's key" in refusal(folder)


@pytest.mark.parametrize(
    "entry",
    [
        b"{}",
        b"[]",
        b"[" * 60_000,
        b'{"view": {}}',
        b'{"row": {}}',
        b'{"row": {"round": 2, "clients": []}, "facts": {}}',
        b'{"facts": {"seed": 1}}',
        b'{"facts": {"closed": 2}}',
        b'{"facts": {"rows_differ": "\\ud800"}}',
    ],
    ids=lambda entry: entry[:24].decode(),
)
def test_a_ledger_with_other_lines_than_ours_is_refused(folder, entry):
    """Also if the run's own key signed them."""
    signer = SigningKey((folder / "signing-key").read_bytes())
    with (folder / LEDGER).open("ab") as file:
        file.write(_line(Ledger(folder).head, entry, signer))
    with pytest.raises(ConfigError, match="is damaged, or not from privpart"):
        run_report(folder)
    assert "is damaged, or not from privpart" in refusal(folder)


TORN = [
    lambda line: line[:-1],
    lambda line: bytes(len(line)),
    lambda line: line[:100] + bytes(len(line) - 100),
]
"""What a crash may leave of a line that was being appended."""


@pytest.mark.parametrize("torn", TORN)
def test_a_commit_that_was_cut_off_is_read_without_a_write(folder, torn, tmp_path):
    path = folder / LEDGER
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole + torn(last))
    before = contents(folder)
    assert run_report(folder).rounds == 2
    assert not [check for check in check_run(folder) if check.status == "wrong"]
    assert contents(folder) == before
    RunFolder.open(folder).close()
    assert path.read_bytes() == whole
    with RunFolder.open(folder) as run:
        assert train(run, 4).round == 4


def test_a_line_that_another_one_follows_is_not_called_cut_off(folder):
    path = folder / LEDGER
    *first, middle, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*first, middle.replace(b" ", b"\0"), last]))
    assert "is damaged" in refusal(folder)


def test_a_round_that_could_not_be_saved_is_cut_off_before_its_state_is_replaced(
    folder, monkeypatch
):
    """The line is on the disk, but the disk says that it is not; a second attempt follows."""
    whole = len((folder / LEDGER).read_bytes())
    sync, write, lengths = os.fsync, store.write_state, []

    def refuses(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").readlink().name == LEDGER and ledger_grew():
            raise OSError("no")
        sync(handle)

    def ledger_grew() -> bool:
        return len((folder / LEDGER).read_bytes()) > whole

    def watched(path: Path, *state) -> str:
        lengths.append(len((folder / LEDGER).read_bytes()))
        return write(path, *state)

    def twice(committed, counts) -> None:
        monkeypatch.setattr(os, "fsync", refuses)
        with pytest.raises(StorageError, match="the run stands after 2 rounds"):
            run.commit(committed, counts)
        assert not ledger_grew()
        monkeypatch.setattr(os, "fsync", sync)
        # As if the disk had refused to cut it off, too.
        with (folder / LEDGER).open("ab") as file:
            file.write(b"a line that was never flushed\n")
        run.commit(committed, counts)

    monkeypatch.setattr(store, "write_state", watched)
    with RunFolder.open(folder) as run:
        fit(server(run), Clients(), COHORTS[:3], commit=twice)
    assert lengths == [whole, whole]
    with RunFolder.open(folder) as run:
        assert train(run, 4).round == 4


def test_an_early_end_erases_the_keys_and_keeps_the_model(folder):
    with RunFolder.open(folder) as run:
        trained = train(run, 3)
        run.end_early("enough")
    assert sorted(contents(folder)) == ["closed-000003.safetensors", LEDGER, "lock"]
    kept = Ledger(folder)
    assert kept.rows()[-1].model == model_hash(trained.parameters)
    assert kept.facts["closed"]["rounds"] == 3
    assert "was ended early, after 3 of 4 rounds" in refusal(folder)
    assert json.dumps(run_report(folder).to_dict())
    assert torch.equal(released_parameters(folder)[0], trained.parameters)
    with fork(folder, folder.parent / "fork", PLAN, facts={"delta": 1e-6}) as again:
        begun = Server(again.plan, torch.zeros(DIM), source=again.source())
        again.restore(begun)
    assert torch.equal(begun.parameters, trained.parameters)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**42)


@pytest.mark.parametrize("plant", [os.mkfifo, Path.mkdir, lambda _: None, sparse])
def test_a_ledger_that_is_not_an_ordinary_file_is_refused_at_once(folder, plant):
    """A link is refused beside those of other files: see test_hostile_folders."""
    (folder / LEDGER).unlink()
    plant(folder / LEDGER)
    reason = "is missing|cannot be read: it is a|do not fit|not a file. Remove it"
    with pytest.raises(ConfigError, match=reason):
        run_report(folder)
    assert re.search(reason, refusal(folder))
