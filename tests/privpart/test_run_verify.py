"""What a stranger can check of a run, what a forger cannot hide, and what each flipped bit does."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from runs import PLAN, STATE, add_row, begun, changed, flip, train

from accounting import ConfigError
from privpart import RunFolder
from privpart.cli.pages.run import checks_page
from privpart.run import log
from privpart.run.evidence import Check
from privpart.run.ledger import LEDGER, Ledger, SigningKey
from privpart.run.report import run_report
from privpart.run.store import decode_state, model_hash, write_state
from privpart.training.export import export
from privpart.training.verify import check_run, left_its_plan


@pytest.fixture
def whole(tmp_path) -> Path:
    """A complete secret run."""
    return begun(tmp_path / "whole", 4)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> None:
    """From here on, this is another machine."""
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "elsewhere"))


def statuses(checks: tuple[Check, ...]) -> dict[str, str]:
    return {check.what: check.status for check in checks}


def wrong(checks: tuple[Check, ...]) -> list[str]:
    return [check.what for check in checks if check.status == "wrong"]


def public_key(folder: Path) -> str:
    return Ledger(folder).facts["public_key"]


HERE = {
    "ledger": "verified",
    "chain": "verified",
    "signature": "asserted",
    "state": "verified",
    "released model": "verified",
    "key": "verified",
    "signing key": "verified",
    "log of runs": "verified",
    "package": "asserted",
    "plan": "asserted",  # the run was begun without a plan file
    "code": "asserted",
    "participation": "verified",
    "guarantee": "verified",
    "budget book": "asserted",
}


def test_a_run_of_this_machine(folder, whole):
    assert statuses(check_run(folder)) == HERE
    assert statuses(check_run(whole)) == HERE
    with_key = check_run(whole, public_key=public_key(whole))
    assert statuses(with_key) == HERE | {"signature": "verified"}


def test_on_another_machine_no_word_is_stronger_than_the_signature(whole, elsewhere):
    unknown = {"log of runs": "asserted", "participation": "asserted", "guarantee": "asserted"}
    assert statuses(check_run(whole)) == HERE | unknown
    found = run_report(whole).guarantee
    assert {a.status for a in found.assumptions} == {"asserted"}
    key = public_key(whole)
    signed = {"signature": "verified", "log of runs": "asserted"}
    assert statuses(check_run(whole, public_key=key)) == HERE | signed
    found = run_report(whole, public_key=key).guarantee
    assert {a.code for a in found.assumptions if a.status == "verified"} == {"participation"}
    assert not [a.code for a in found.assumptions if a.status == "enforced"]


def test_another_key_than_the_readers_is_wrong(whole):
    assert wrong(check_run(whole, public_key="0" * 64)) == ["signature"]
    with pytest.raises(ConfigError, match=r"made by [0-9a-f]{64}, not by 0000"):
        run_report(whole, public_key="0" * 64)
    with pytest.raises(ConfigError, match="must be 64 hex digits"):
        check_run(whole, public_key="secret")


FAULTS = {
    "a bit of the released model": (lambda f: flip(f / STATE, -1), ["state", "released model"]),
    "no released model": (lambda f: (f / STATE).unlink(), ["state", "released model"]),
    "a key of zeros": (lambda f: (f / "key").write_bytes(bytes(32)), ["key"]),
    "a bit of the key": (lambda f: flip(f / "key", 31, 7), ["key"]),
    "a bit of the signing key": (lambda f: flip(f / "signing-key", 0), ["signing key"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_is_not_the_runs_is_named(folder, fault, privpart):
    change, named = FAULTS[fault]
    change(folder)
    assert wrong(check_run(folder)) == named
    report = run_report(folder)
    assert [check.what for check in report.wrong] == named
    noise = next(a for a in report.guarantee.assumptions if a.code == "noise")
    if named == ["key"]:
        assert noise.status == "asserted"
        assert "it was changed or replaced" in noise.evidence
    told = privpart("report", str(folder))
    assert told.returncode == 5
    assert f"- {named[0]}: " in told.stdout


def test_a_state_with_noise_of_another_key_is_named(folder):
    tensors, values = decode_state(folder / STATE)
    key = Ledger(folder).facts["key"]
    other = json.loads(json.dumps(values).replace(key, f"secret:{'0' * 64}"))
    assert other != values
    state = write_state(folder / "state-000003.safetensors", tensors, other).state
    add_row(folder, round=2, state=state, model=model_hash(tensors["parameters"]), clients=[])
    line = next(check for check in check_run(folder) if check.what == "state")
    assert (line.status, "noise from another key" in line.says) == ("wrong", True)


def test_an_older_copy_is_named_by_report_and_verify(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    with RunFolder.open(folder) as run:
        train(run, 4)
    assert wrong(check_run(tmp_path / "copy")) == ["log of runs"]
    (said,) = run_report(tmp_path / "copy").wrong
    assert "stands after 2 rounds, while 4 were released on this machine" in said.says


def forged(folder: Path, signer: SigningKey | None, rounds: int = 4, **facts) -> None:
    """Write the ledger anew with other facts or fewer rounds, chained again, and signed or not."""
    path, old = folder / LEDGER, Ledger(folder)
    signature = path.read_text().splitlines()[-1].split(" ")[1]
    about = old.facts | facts
    if signer is not None:
        about["public_key"] = signer.public_key
    new = Ledger.create(folder, about, signer or SigningKey(bytes(32)))
    for row in old.rows()[:rounds]:
        new.append(row)
    if signer is None:  # the best that one without any key can do: the old signature
        *lines, last = path.read_text().splitlines()
        chain, _, entry = last.split(" ", 2)
        path.write_text("\n".join([*lines, f"{chain} {signature} {entry}\n"]))


def test_forgeries_are_named_by_the_signature_and_by_the_key_that_the_reader_has(tmp_path):
    """z changed, 3 of 4 rounds dropped, a seeded run relabelled secret; all of it chained anew."""
    less_noise = PLAN.to_dict() | {"noise_multiplier": 100.0}
    forgeries = {
        "z": (None, {"plan": less_noise}),
        "rounds": (None, {"rounds": 1}),
        "seed": (7, {"seed": None, "key": f"secret:{'0' * 64}"}),
    }
    for name, (seed, change) in forgeries.items():
        folder = begun(tmp_path / name, 4, seed=seed)
        key = public_key(folder)
        if name == "rounds":
            state = folder / "state-000004.safetensors"
            state.rename(folder / "state-000001.safetensors")
        shutil.copytree(folder, tmp_path / f"{name} again")
        forged(folder, None, **change)
        assert "signature" in wrong(check_run(folder)), name
        with pytest.raises(ConfigError, match="signature of its head is not that of the run's key"):
            run_report(folder)
        again = tmp_path / f"{name} again"
        forged(again, SigningKey(bytes(32)), **change)
        assert "signature" in wrong(check_run(again, public_key=key)), name
        with pytest.raises(ConfigError, match="not by"):
            run_report(again, public_key=key)
        report = run_report(again)  # who knows no key is told that nothing was checked
        assert {a.status for a in report.guarantee.assumptions} == {"asserted"}, name


def test_a_seeded_ledger_that_says_secret_contradicts_its_own_key(tmp_path):
    folder = begun(tmp_path / "seeded", 4, seed=7)
    forged(folder, SigningKey(bytes(32)), seed=None)
    assert "key" in wrong(check_run(folder))


def test_a_run_that_was_ended_early_says_so(folder, privpart):
    with RunFolder.open(folder) as run:
        run.end_early()
    assert statuses(check_run(folder)) == HERE
    report = run_report(folder)
    assert (report.closed, report.complete, report.rounds) == (True, False, 2)
    assert report.guarantee.epsilon == PLAN.guarantee().epsilon(1e-6)
    assert "closed after 2 of 4 rounds" in privpart("report", str(folder)).stdout
    changed(folder, lambda entries: entries[-1].update(facts={}))
    assert "chain" in wrong(check_run(folder))
    changed(folder, list.pop)
    assert "log of runs" in wrong(check_run(folder))


def test_an_exported_model_is_that_of_the_newest_round(whole, tmp_path, elsewhere, privpart):
    out = export(whole, tmp_path / "model.safetensors", part="trained")
    key = tmp_path / "key.txt"
    key.write_text(public_key(whole) + "\n")
    told = privpart("verify", str(whole), str(out), "--public-key", str(key), "--format", "json")
    assert told.returncode == 0
    found = json.loads(told.stdout)
    assert found["schema"] == "privpart/verify/1"
    assert [c["status"] for c in found["checks"][-2:]] == ["verified", "verified"]


def test_a_model_of_an_earlier_round_is_named(folder, tmp_path, privpart):
    out = export(folder, tmp_path / "model.safetensors", part="trained")
    with RunFolder.open(folder) as run:
        train(run, 4)
    checks = check_run(folder, model=out)
    assert wrong(checks) == ["model file", "model metadata"]
    assert "after round 1, not after the newest" in checks[-2].says
    page = tmp_path / "page.html"
    told = privpart("verify", str(folder), str(out), "--html", str(page))
    assert told.returncode == 5
    assert "Wrong: model file, model metadata" in page.read_text()
    assert str(tmp_path) not in page.read_text()
    for after, answer in ((checks[:-2], "not checked:"), (checks[:1], "Everything")):
        assert answer in checks_page(after, folder).html()
    assert "wrong     model file: it is the model after round 1" in told.stdout


def test_a_run_that_left_its_plan_has_an_exit_code_of_its_own(folder, privpart):
    last = Ledger(folder).rows()[-1]
    row = add_row(folder, round=2, clip_norm=9.0, clients=[0], state=last.state, model=last.model)
    run_id = run_report(folder).run_id
    with log.writing():
        log.append(log.Entry(event="round", run=run_id, rounds=3, head=row.chain))
    (folder / STATE).rename(folder / "state-000003.safetensors")
    assert left_its_plan(check_run(folder))
    assert privpart("verify", str(folder)).returncode == 6
    assert privpart("verify", str(folder / "nothing")).returncode == 2


def verdict(folder: Path, model: Path | None = None) -> tuple[Check, ...] | str:
    """Return what a reader and then the run itself say: lines, or the sentence of a refusal."""
    try:
        checks = check_run(folder, model=model)
        RunFolder.open(folder).close()
    except ConfigError as error:
        return str(error)
    return checks


def sweep(folder: Path, file: Path, flips, model: Path | None = None) -> Counter[str]:
    """Count what flipped bits do; anything but a refusal by name or the same answer fails."""
    usual, kept = verdict(folder, model), file.read_bytes()
    assert not wrong(usual)
    found: Counter[str] = Counter()
    for at, bit in flips:
        flip(file, at, bit)
        told = verdict(folder, model)
        file.write_bytes(kept)
        if told == usual:
            found["harmless"] += 1
            continue
        assert isinstance(told, str) or wrong(told), (file.name, at, bit, told)
        assert not isinstance(told, str) or str(folder) in told
        found["refused"] += 1
    return found


NAMES = [LEDGER, STATE, "key", "signing-key", "model.safetensors"]


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_refused_by_name_or_harmless(folder, name, tmp_path, whole):
    """A bit in a few places, or in every byte."""
    model = export(folder, tmp_path / "model.safetensors", part="trained")
    file = model if name == model.name else folder / name
    size = file.stat().st_size
    step = 1 if whole else size // (24 if name == LEDGER else 6) | 1
    bits = range(8) if whole and size < 100 else (0,)
    flips = [(at, bit or at % 8) for at in range(0, size, step) for bit in bits]
    count = sweep(folder, file, flips, model)
    assert count["refused"] > 0
    if name in (STATE, "key", "signing-key"):
        assert not count["harmless"]
