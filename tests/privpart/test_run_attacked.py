"""What forgers, careless owners and two processes at once do to runs, reports and the book."""

import errno
import os
import shutil
import sys
import unicodedata
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from runs import PLAN, begun, contents, train
from safetensors.torch import load, save_file
from test_run_verify import forged, statuses, wrong

from accounting import ConfigError
from privpart import RunFolder
from privpart.run import begin, budget_book, evidence, report, store
from privpart.run.begin import create_run
from privpart.run.ledger import Ledger, SigningKey
from privpart.run.population import spoken
from privpart.run.report import run_report, vouched
from privpart.run.store import StorageError, tensor_hash
from privpart.training.export import export
from privpart.training.verify import check_run


@pytest.fixture(autouse=True)
def _machine(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "machine"))


def named(path: Path, population: str = "keyboard-de") -> RunFolder:
    """Begin a run about these people."""
    facts = {"delta": 1e-6, "population_name": population}
    return create_run(path, PLAN, facts=facts)


def test_a_stranger_gets_no_stronger_word_by_being_adopted(folder, tmp_path, monkeypatch):
    """The whole run is made up and signed with the forger's key; then its victim continues it."""
    with RunFolder.open(folder) as run:
        key = (folder / "key").read_bytes()
    assert run.rounds == 2
    forged(folder, SigningKey(signing := bytes(range(32))), 2)
    (folder / "signing-key").write_bytes(signing)
    assert (folder / "key").read_bytes() == key
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "victim"))
    with RunFolder.open(folder, adopt=True) as run:
        train(run, 4)
    found = statuses(check_run(folder))
    assert found["log of runs"] == found["participation"] == found["guarantee"] == "asserted"
    assert not {a.status for a in run_report(folder).guarantee.assumptions} - {"asserted"}


def words(folder: Path) -> set[str]:
    """Return the strongest words that a report of a folder says or may be brought to say."""
    found = run_report(folder)
    if found.wrong:
        with pytest.raises(ConfigError, match="nobody can vouch"):
            vouched(found, "choices")
        assert "enforced" not in {a.status for a in found.guarantee.assumptions}
        return {"wrong"}
    words = {a.status for a in found.guarantee.assumptions if a.code != "choices"}
    return words & {"enforced", "verified"} or words


@pytest.mark.parametrize("forge", [False, True])
def test_adopting_one_copy_vouches_for_no_other(folder, tmp_path, monkeypatch, privpart, forge):
    if forge:  # by somebody whose server added no noise
        forged(folder, SigningKey(bytes(range(32))), 2)
        (folder / "signing-key").write_bytes(bytes(range(32)))
    else:
        assert words(folder) == {"enforced", "verified"}
    for name in ("copy", "third"):
        shutil.copytree(folder, tmp_path / name)
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "victim"))
    RunFolder.open(tmp_path / "copy", adopt=True).close()
    for other in (folder, tmp_path / "third"):
        assert words(other) == {"asserted"}
    assert privpart("train", "--close", "--out", str(tmp_path / "copy"), "--yes").returncode == 0
    assert words(tmp_path / "copy") == {"asserted"}
    for other in (folder, tmp_path / "third"):
        assert words(other) == {"wrong"}
        for adopt in (False, True):
            with pytest.raises(ConfigError, match="was closed after 2 rounds on this machine"):
                RunFolder.open(other, adopt=adopt)


def test_rounds_that_this_machine_did_not_see_are_never_called_its_own(
    folder, tmp_path, monkeypatch
):
    """A copy was continued elsewhere by a round and brought back."""
    shutil.copytree(folder, back := tmp_path / "back")
    with monkeypatch.context() as patched:
        patched.setenv("PRIVPART_STATE_DIR", str(tmp_path / "elsewhere"))
        with RunFolder.open(back, adopt=True) as run:
            train(run, 3)
    assert words(back) == {"wrong"}
    with pytest.raises(ConfigError, match="this machine saw 2 of the 3 rounds"):
        RunFolder.open(back)
    RunFolder.open(back, adopt=True).close()
    assert (words(back), words(folder)) == ({"asserted"}, {"wrong"})
    with pytest.raises(ConfigError, match="older copy"):
        RunFolder.open(folder, adopt=True)


def test_a_run_that_began_while_another_process_was_beginning_is_not_overwritten(
    tmp_path, monkeypatch
):
    path, usual = tmp_path / "run", begin.locked

    def slowly(folder):
        monkeypatch.setattr(begin, "locked", usual)
        begun(path, 1, seed=3)
        return usual(folder)

    monkeypatch.setattr(begin, "locked", slowly)
    with pytest.raises(ConfigError, match="is not empty"):
        create_run(path, PLAN)
    assert run_report(path).rounds == 1
    assert not wrong(check_run(path))


def test_a_round_that_is_committed_while_files_are_read_is_not_called_a_rollback(
    folder, monkeypatch
):
    usual = evidence._noise_key

    def advanced(*arguments, **options):
        monkeypatch.setattr(evidence, "_noise_key", usual)
        with RunFolder.open(folder) as run:
            train(run, 3)
        return usual(*arguments, **options)

    monkeypatch.setattr(evidence, "_noise_key", advanced)
    checks = check_run(folder)
    assert not wrong(checks)
    assert "the same 3 rounds" in next(c.says for c in checks if c.what == "log of runs")


def test_a_frozen_tensor_that_is_a_trained_one_in_disguise_is_named(tmp_path):
    frozen = torch.ones(2)
    facts = {
        "delta": 1e-6,
        "parameters": [["weight", [2, 3]], ["bias", [2]]],
        "frozen": {"scale": tensor_hash(frozen)},
    }
    with create_run(tmp_path / "run", PLAN, facts=facts) as run:
        train(run, 1)
    model = export(tmp_path / "run", tmp_path / "model.safetensors", part="trained")
    tensors = load(model.read_bytes())  # load_file may map the file, which is written anew
    save_file({**tensors, "scale": frozen}, model)
    lines = {c.what: c for c in check_run(tmp_path / "run", model=model)}
    assert lines["model file"].status == "verified"
    save_file({**tensors, "scale": tensors["bias"].clone()}, model)
    lines = {c.what: c for c in check_run(tmp_path / "run", model=model)}
    assert lines["model file"].status == "wrong"
    assert "scale" in lines["model file"].says


def test_a_sparse_state_of_any_size_is_not_read(folder):
    with (folder / "state-000002.safetensors").open("ab") as file:
        file.truncate(2**42)
    assert wrong(check_run(folder)) == ["state", "released model"]
    assert "memory" in next(c.says for c in check_run(folder) if c.what == "state")


def test_a_strangers_run_gives_no_orders_to_the_terminal(folder, privpart):
    said = dict.fromkeys(("code", "text", "evidence", "consequence"), "\x1b[2Jall is well\u202e")
    forged(
        folder, SigningKey(bytes(32)), 2, inherited=[said | {"status": "asserted"}], delta="\x1b"
    )
    for command in (["verify"], ["report", "--delta", "1e-6"], ["report", "--format", "statement"]):
        told = privpart(command[0], str(folder), *command[1:])
        shown = told.stdout + told.stderr
        assert r"\x1b" in shown
        assert not {"\x1b", "\u202e"} & set(shown)


def test_a_state_directory_that_moves_with_the_caller_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("PRIVPART_STATE_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv("PRIVPART_STATE_DIR", raising=False)
        monkeypatch.setenv(name, "state")
        with pytest.raises(ConfigError, match="must be an absolute path"):
            named(tmp_path / "other")
    assert not (tmp_path / "other").exists()


SPELLINGS = ["Keyboard-DE", "key board  de", "\uff4beyboard-de", "key\u034fboard\u2014de"]


@pytest.mark.parametrize("name", SPELLINGS)
def test_another_spelling_of_a_name_is_the_same_population(tmp_path, monkeypatch, name):
    """Also of a run that comes from a machine whose book has only the other spelling."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("PRIVPART_STATE_DIR", str(tmp_path / "elsewhere"))
        named(tmp_path / "come", name).close()
    named(tmp_path / "run").close()
    spent = budget_book.account("keyboard-de").total
    budget_book.set_limit("keyboard-de", budget_book.Limit(spent.epsilon(1e-6), 1e-6))
    for call in (
        lambda: named(tmp_path / "no", name),
        lambda: budget_book.set_limit(name, budget_book.Limit(99, 1e-6)),
    ):
        with pytest.raises(ConfigError, match="the budget book has 'keyboard-de'"):
            call()
    with pytest.raises(budget_book.BudgetExceededError):
        RunFolder.open(tmp_path / "come", adopt=True)
    (own,) = budget_book.accounts()
    assert len(own.charges) == 2
    assert own.passed
    assert budget_book.account(name).charges == own.charges
    named(tmp_path / "other", "keyboard").close()


def test_no_character_tells_two_spellings_apart():
    """Of each character: its other cases and compatibility forms, and itself where it is silent."""
    for sign in filter(str.isprintable, map(chr, range(sys.maxunicode))):
        forms = {unicodedata.normalize(form, sign) for form in ("NFC", "NFD", "NFKC", "NFKD")}
        forms |= {
            case for case in (sign.lower(), sign.upper()) if case.casefold() == sign.casefold()
        }
        assert len({spoken(f"a{form}b") for form in forms}) == 1, hex(ord(sign))
    for (
        silent
    ) in " \t_-\u00a0\u2010\u2014\u3000\u200b\u200d\u2060\ufeff\u00ad\u034f\u115f\u2800\ufe0f":
        assert spoken(f"a{silent}b") == "ab", hex(ord(silent))


SHAPES = [
    [["w", [10**4000] * 300]],
    [["w", [10**14] * 10**5]],
    [["w", [True] * 8]],
    [["w", [-8]]],
    [[1, [8]]],
    [["w", [9]]],
    True,
]


@pytest.mark.parametrize("shapes", SHAPES, ids=range(len(SHAPES)))
def test_shapes_of_a_stranger_neither_hang_nor_crash(folder, tmp_path, shapes):
    """The product of the first has more than a million digits."""
    forged(folder, SigningKey(bytes(32)), 2, parameters=shapes)
    for look in (run_report, check_run, partial(export, out=tmp_path / "model", part="trained")):
        with suppress(ConfigError):
            look(folder)
    assert not (tmp_path / "model").exists()
    if shapes != [["w", [9]]]:  # a shape, but not the model's
        with pytest.raises(ConfigError, match="damaged"):
            run_report(folder)


def test_a_ledger_of_zeros_costs_no_memory(folder, monkeypatch):
    with (folder / "ledger.log").open("ab") as file:
        file.truncate(2**42)
    monkeypatch.setattr(store, "_memory", lambda: 2**43)
    with pytest.raises(ConfigError, match="bytes are a hole"):
        run_report(folder)
    monkeypatch.setattr(store, "_LARGE", 2**43)
    monkeypatch.setattr(store, "LONGEST_LINE", 2**22)
    with pytest.raises(ConfigError, match="line 3 is longer than"):
        run_report(folder)


def test_a_line_that_was_damaged_later_is_not_cut_off(folder):
    path = folder / "ledger.log"
    whole = path.read_bytes()
    for damaged in (whole[:-100] + b"\0" + whole[-99:], whole[:-1] + b"\v", whole[:-50]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="older copy"):
            RunFolder.open(folder)
        assert path.read_bytes() == damaged
    path.write_bytes(whole)
    with RunFolder.open(folder) as run:
        train(run, 4)


def test_what_is_read_of_a_ledger_was_flushed_before(folder, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.fstat(fd).st_ino))
    export(folder, folder.with_name("model"), part="trained")
    assert flushed[0] == (folder / "ledger.log").stat().st_ino


@pytest.mark.parametrize(
    "command",
    [["report", "a" * 300], ["verify", "a" * 300], ["verify", "run", "--public-key", "a" * 300]],
)
def test_a_name_that_is_too_long_is_one_sentence(privpart, folder, monkeypatch, command):
    monkeypatch.chdir(folder.parent)
    told = privpart(*command)
    assert (told.returncode, told.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("rounds", [0, 2])
def test_a_copy_that_may_lack_a_round_is_not_adopted(tmp_path, monkeypatch, rounds):
    """The newline of its last row was damaged on the way here."""
    folder = begun(tmp_path / "run", rounds + 1)
    path = folder / "ledger.log"
    damaged = path.read_bytes()[:-1] + b"\v"
    path.write_bytes(damaged)
    before = contents(folder)
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "victim"))
    with pytest.raises(ConfigError, match="may have been cut off or damaged"):
        RunFolder.open(folder, adopt=True)
    assert contents(folder) == before


def test_a_seeded_run_that_lost_a_row_keeps_its_state(tmp_path):
    folder = begun(tmp_path / "run", 2, seed=3)
    path = folder / "ledger.log"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    before = contents(folder)
    with pytest.raises(ConfigError, match=r"state-000001\S+, the state after its last row"):
        RunFolder.open(folder)
    assert contents(folder) == before


def test_bytes_behind_the_last_row_are_named(folder):
    assert statuses(check_run(folder))["ledger"] == "verified"
    with (folder / "ledger.log").open("ab") as file:
        file.write(b"more")
    line = check_run(folder)[0]
    assert (line.status, "4 bytes behind the last are no row" in line.says) == ("asserted", True)


def test_a_damaged_signature_of_an_earlier_row_breaks_the_chain(folder):
    path = folder / "ledger.log"
    lines = path.read_bytes().splitlines(keepends=True)
    chain, signature, entry = lines[1].split(b" ", 2)
    lines[1] = b" ".join([chain, bytes(reversed(signature)), entry])
    path.write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match="line 2 does not follow"):
        run_report(folder)


def test_a_row_that_the_disk_refused_does_not_count(folder, monkeypatch):
    """The failure is reported once: whoever flushes the row afterwards is told that it is there."""
    path, usual = folder / "ledger.log", os.fsync
    before = path.read_bytes()
    refused = []

    def fails(handle):
        if not refused and path.stat().st_size > len(before):
            refused.append(path.read_bytes())
            raise OSError(errno.EIO, "I/O error")
        usual(handle)

    with monkeypatch.context() as patch, RunFolder.open(folder) as run:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(StorageError, match="could not be saved"):
            train(run, 3)
    assert path.read_bytes() == before
    path.write_bytes(refused[0])  # a disk that does not cut it off either
    line = next(c for c in check_run(folder) if c.what == "log of runs")
    assert (line.status, "its commit failed" in line.says) == ("asserted", True)
    os.utime(path, (0, 0))
    with RunFolder.open(folder) as run:
        assert run.rounds == 3
    assert path.stat().st_mtime > 0  # written again, not only flushed
    assert path.read_bytes() == refused[0]


def test_a_row_that_is_cut_off_while_it_is_read_does_not_count(folder, monkeypatch):
    path, usual = folder / "ledger.log", os.fsync
    whole = path.read_bytes()

    def cut(handle):
        usual(handle)
        path.write_bytes(whole[: whole[:-1].rindex(b"\n") + 1])

    monkeypatch.setattr(os, "fsync", cut)
    assert len(Ledger(folder).rows()) == 1


def test_a_strangers_plan_that_takes_minutes_is_not_derived(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_MOST_WORK", 3)
    assert run_report(folder).rounds == 2
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "victim"))
    with pytest.raises(ConfigError, match="takes minutes to account for"):
        run_report(folder)
    line = next(c for c in check_run(folder) if c.what == "guarantee")
    assert (line.status, "takes minutes" in line.says) == ("asserted", True)


def test_a_state_of_holes_is_not_read(folder):
    with (folder / "state-000002.safetensors").open("wb") as file:
        file.truncate(20 * 2**30)
    assert wrong(check_run(folder)) == ["state", "released model"]
    assert "are a hole" in next(c.says for c in check_run(folder) if c.what == "state")
