"""The log of runs: what people do to folders and machines, against an oracle that saw all of it."""

import errno
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from runs import COHORTS, PLAN, Clients, add_row, flip, server

from accounting import ConfigError
from privpart import RunFolder, fit
from privpart.run import budget_book, log, store, witness
from privpart.run.begin import create_run, fork
from privpart.run.evidence import gather
from privpart.run.ledger import LEDGER, Ledger
from privpart.run.lives import Life
from privpart.run.report import run_report

PEOPLE = {"delta": 1e-6, "population_name": "keyboard-de"}
MU = PLAN.guarantee().mu
OFTEN = ("here", "unknown", "strong words", "killed inside", "unknown total", "witness verified")
WEIGHTS = {"round": 3, "stopped": 3, "copy": 2}
ACTIONS = ("begin", "round", "stopped", "copy", "move", "adopt", "close", "lose", "forge", "fork")


class Walk:
    """Two machines, copies of runs on them, and everything that honest code released."""

    def __init__(self, base: Path, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.base, self.rng, self.patch = base, np.random.default_rng(seed), patch
        self.folders: list[tuple[int, Path]] = []
        self.released: dict[int, dict[str, dict[int, set[str]]]] = {0: {}, 1: {}}
        self.forged: set[str] = set()
        self.parents: dict[str, str | None] = {}
        self.lost = [False, False]
        # Runs of which nothing is left outside of their folders: nobody can know of them.
        self.forgotten: list[set[str]] = [set(), set()]
        # Heads of rounds that were released, and of which no log knows any more.
        self.blank: list[set[str]] = [set(), set()]
        self.tally: Counter[str] = Counter()

    def step(self) -> None:
        """Do one thing, which may be refused, and judge all that is said afterwards."""
        actions = [action for action in ACTIONS for _ in range(WEIGHTS.get(action, 1))]
        action = actions[self.rng.integers(len(actions))] if self.folders else "begin"
        choices = self.folders or [(int(self.rng.integers(2)), self.base)]
        machine, folder = choices[self.rng.integers(len(choices))]
        self.patch.setenv(log.VARIABLE, str(self.base / f"machine-{machine}"))
        self.tally[action] += 1
        try:
            getattr(self, action)(machine, folder)
        except (ConfigError, store.StorageError):
            self.tally[f"{action} refused"] += 1
        if len(self.folders) > 12:
            _, gone = self.folders.pop(int(self.rng.integers(6)))
            shutil.rmtree(gone)
        self.folders = [(m, folder) for m, folder in self.folders if (folder / LEDGER).exists()]
        for machine, folder in self.folders:
            self.judge(machine, folder)
        if self.folders:
            machine, folder = self.folders[self.rng.integers(len(self.folders))]
            self.judge_words(machine, folder)
            self.judge_witness(machine, folder)

    def new(self, machine: int) -> Path:
        path = self.base / f"{machine}-{self.rng.integers(2**40):x}"
        self.folders.append((machine, path))
        return path

    def begin(self, machine: int, _: Path) -> None:
        create_run(self.new(machine), PLAN, facts=PEOPLE).close()

    def fork(self, machine: int, folder: Path) -> None:
        fork(folder, self.new(machine), PLAN, facts={"delta": 1e-6}).close()

    def round(self, machine: int, folder: Path, *, adopt: bool = False) -> None:
        with RunFolder.open(folder, adopt=adopt) as run:
            self.see(machine, folder)
            if run.rounds < 4:
                one = server(run)
                fit(one, Clients(), COHORTS[: run.rounds + 1], commit=run.commit)
                self.see(machine, folder)

    def adopt(self, machine: int, folder: Path) -> None:
        self.round(machine, folder, adopt=True)

    def stopped(self, machine: int, folder: Path) -> None:
        """Be killed before one of the next flushes, or let only that one fail."""
        usual, flushes, fails = os.fsync, self.rng.integers(1, 14), self.rng.random() < 0.3
        action = ("round", "round", "begin", "fork", "close", "adopt")[self.rng.integers(6)]

        def stop(handle: int) -> None:
            nonlocal flushes
            flushes -= 1
            if flushes <= 0 and not fails:
                raise KeyboardInterrupt
            if flushes == 0:
                raise OSError(errno.EIO, "I/O error")
            usual(handle)

        with self.patch.context() as patched:
            patched.setattr(os, "fsync", stop)
            try:
                getattr(self, action)(machine, folder)
            except KeyboardInterrupt:
                self.tally["killed inside"] += 1
            except store.StorageError:
                self.tally["failed inside"] += 1

    def copy(self, machine: int, folder: Path) -> None:
        shutil.copytree(folder, self.new(machine))

    def move(self, machine: int, folder: Path) -> None:
        shutil.copytree(folder, self.new(1 - machine))

    def close(self, machine: int, folder: Path) -> None:
        RunFolder.open(folder, adopt=self.rng.random() < 0.2).end_early()

    def lose(self, machine: int, _: Path) -> None:
        """Delete the log or its mark. The mark alone says that there was a log."""
        state = self.base / f"machine-{machine}"
        file = state / ("runs.log", "runs.mark")[self.rng.integers(2)]
        if self.rng.random() < 0.4 and file.exists():
            file.unlink()
            self.lost[machine] |= file.name == "runs.log"
            if not (state / "runs.log").exists() and not (state / "runs.mark").exists():
                self.tally["forgotten"] += 1
                self.forgotten[machine] = set(self.released[machine])
                for rounds in self.released[machine].values():
                    self.blank[machine].update(*rounds.values())

    def forge(self, machine: int, folder: Path) -> None:
        """Somebody else's code goes on with a copy, and signs what it likes."""
        ledger = Ledger(folder)
        if (folder / "signing-key").exists() and ledger.committed():
            last = ledger.committed()[-1]
            row = {"round": last.round + 1, "state": last.state, "model": last.model}
            self.forged.add(add_row(folder, clients=[0], **row).chain)

    def see(self, machine: int, folder: Path) -> None:
        """Note what a process may show: every round of a folder that it has opened or committed."""
        ledger = Ledger(folder)
        run = ledger.facts["run_id"]
        self.parents[run] = ledger.facts.get("fork_of")
        self.forgotten[machine].discard(run)
        rounds = self.released[machine].setdefault(run, {})
        for number, head in enumerate(ledger.chains[1:]):
            rounds.setdefault(number, set()).add(head)

    def judge(self, machine: int, folder: Path) -> None:
        if not (folder / LEDGER).exists():
            return
        self.patch.setenv(log.VARIABLE, str(self.base / f"machine-{machine}"))
        evidence = gather(folder)
        self.tally[evidence.origin] += 1
        released = self.released[machine]
        if evidence.origin == "here":
            rounds = released.get(evidence.facts["run_id"], {})
            for number, head in enumerate(evidence.ledger.chains[1:]):
                # A round of a process that was killed behind its commit was seen by nobody.
                assert rounds.get(number, set()) <= {head}, "released twice, and called enforced"
                assert head not in self.forged, "made by others, and called enforced"
        account = budget_book.account("keyboard-de")
        if account.status in ("holds", "nothing released"):
            told = {run for run, rounds in released.items() if rounds} - self.forgotten[machine]
            spent = math.sqrt(len(self.with_ancestors(told))) * MU
            total = 0.0 if account.total is None else account.total.mu
            assert total >= spent * (1 - 1e-12), "less is charged than was released"
        else:
            assert self.lost[machine], account.status
            self.tally["unknown total"] += 1

    def with_ancestors(self, runs: set[str]) -> set[str]:
        """Add the runs from whose models others were forked, which told of the same people."""
        while more := {p for run in runs if (p := self.parents.get(run))} - runs:
            runs = runs | more
        return runs

    def judge_words(self, machine: int, folder: Path) -> None:
        """Judge every word of a report by what was released, not by what it is derived from."""
        self.patch.setenv(log.VARIABLE, str(self.base / f"machine-{machine}"))
        ledger = Ledger(folder)
        rounds = self.released[machine].get(ledger.facts["run_id"], {})
        try:
            words = {a.status for a in run_report(folder).guarantee.assumptions}
        except ConfigError:
            # Such as of a closed run that somebody else's code went on with.
            return
        if words & {"enforced", "verified"}:
            self.tally["strong words"] += 1
            heads = ledger.chains[1:]
            assert not self.forged & set(heads), "made by others, and more than asserted"
            assert all(rounds[n] <= {heads[n]} for n in range(len(heads)) if n in rounds)
            assert max(rounds, default=-1) < len(heads), "an older copy is more than asserted"

    def judge_witness(self, machine: int, folder: Path) -> None:
        """A machine whose witness confirms a folder released no other round of its run."""
        self.patch.setenv(log.VARIABLE, str(self.base / f"machine-{1 - machine}"))
        shown = witness.witness()
        self.patch.setenv(log.VARIABLE, str(self.base / f"machine-{machine}"))
        evidence = gather(folder)
        run, heads = evidence.facts["run_id"], evidence.ledger.chains[1:]
        line = witness.compared(shown, evidence)
        self.tally[f"witness {line.status}"] += 1
        if line.status == "verified":
            for number, seen in self.released[1 - machine].get(run, {}).items():
                if known := seen - self.blank[1 - machine]:
                    assert number < len(heads), "more was released than the witness confirms"
                    assert known <= {heads[number]}, "released otherwise, and confirmed"


def walked(base: Path, seed: int, steps: int, patch: pytest.MonkeyPatch) -> Counter[str]:
    walk = Walk(base, seed, patch)
    for _ in range(steps):
        walk.step()
    return walk.tally


def test_no_sequence_of_actions_says_more_than_was_seen_or_charges_less(tmp_path, monkeypatch):
    tally = walked(tmp_path, 0, 90, monkeypatch)
    assert min(tally[what] for what in OFTEN) > 3, tally


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_no_long_sequence_does(tmp_path, monkeypatch, seed):
    tally = walked(tmp_path, seed, 1_000, monkeypatch)
    assert min(tally[what] for what in (*OFTEN, "failed inside")) > 3, tally


def adopted_is_ours(patch: pytest.MonkeyPatch) -> None:
    usual = Life.add

    def add(life: Life, entry: log.Entry) -> None:
        usual(life, entry)
        life.is_ours |= entry.event == "adopted"

    patch.setattr(Life, "add", add)


def taken_for_newest(standing: str, patch: pytest.MonkeyPatch) -> None:
    usual = Life.standing

    def lax(life: Life, chains: list[str], *, closed: bool) -> str:
        true = usual(life, chains, closed=closed)
        return "newest" if true == standing else true

    patch.setattr(Life, "standing", lax)


DEFECTS = {
    "an adopted run is ours": adopted_is_ours,
    "an older copy continues": partial(taken_for_newest, "older"),
    "a newer copy is seen": partial(taken_for_newest, "newer"),
    "a closed run is free": lambda p: p.setattr(Life, "is_free", property(lambda r: r.closed)),
    "a fork costs only itself": lambda p: p.setattr(budget_book, "_missing_parent", lambda *_: []),
    "a witness says yes": lambda p: p.setattr(
        witness, "_beside", lambda *_: witness._line("verified", "")
    ),
    "a lost log is new": lambda patch: patch.setattr(log, "_mark", lambda: (0, b"")),
}


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_rule_that_is_removed_is_missed(tmp_path, monkeypatch, defect):
    DEFECTS[defect](monkeypatch)
    for seed in range(8):
        (tmp_path / str(seed)).mkdir()
        try:
            walked(tmp_path / str(seed), seed, 400, monkeypatch)
        except AssertionError:
            return
    pytest.fail("no walk noticed")


@pytest.fixture
def state(tmp_path, monkeypatch) -> Path:
    """A machine with a run of one round, and a limit."""
    monkeypatch.setenv(log.VARIABLE, str(tmp_path / "state"))
    with create_run(tmp_path / "run", PLAN, facts=PEOPLE) as run:
        fit(server(run), Clients(), COHORTS[:1], commit=run.commit)
    budget_book.set_limit("keyboard-de", budget_book.Limit(20, 1e-6))
    return tmp_path / "state"


def answer(state: Path) -> str:
    """What is said of a log that cannot be read, through every way to ask."""
    folder = state.with_name("run")
    with pytest.raises(ConfigError, match=r"log of runs|by other users"):
        RunFolder.open(folder, adopt=True)
    assert "enforced" not in {a.status for a in run_report(folder).guarantee.assumptions}
    return unread(state)


def unread(state: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        budget_book.accounts()
    with pytest.raises(ConfigError, match=r"log of runs|by other users"):
        create_run(state.with_name("more"), PLAN, facts=PEOPLE)
    assert not state.with_name("more").exists()
    spent = run_report(state.with_name("run")).all_runs
    assert (spent.status, spent.mu) == ("unknown", None)
    return str(refused.value)


def written(path: Path, change: Callable[[list[dict]], object]) -> None:
    """Change the entries of a log and compute every hash anew, as its owner can."""
    entries = [json.loads(line.rpartition(" ")[0]) for line in path.read_text().splitlines()]
    change(entries)
    before, data = b"", b""
    for entry in entries:
        text = entry if isinstance(entry, bytes) else json.dumps(entry).encode()
        before = log._link(before, text)
        data += text + b" " + before + b"\n"
    path.write_bytes(data)
    mark = {"size": len(data), "head": before.decode()}
    (path.parent / "runs.mark").write_text(json.dumps(mark))


CHANGES = [
    lambda log: log[0].update(mu=-1.0),
    lambda log: log[0].update(run="x"),
    lambda log: log[0].update(planned=True),
    lambda log: log[0].update(population="a\x1b"),
    lambda log: log[0].update(event="free"),
    lambda log: log[2].update(rounds=-1),
    lambda log: log[3].update(epsilon=0.0),
    lambda log: log.insert(1, json.dumps(log[0])[:-1].encode() + b', "mu": 1e-9}'),
    lambda log: log.insert(1, b"[" * 100_000),
    lambda log: log.insert(1, b'{"event": "lost", "delta": 1e400}'),
]


@pytest.mark.parametrize("change", CHANGES)
def test_values_that_no_log_holds_are_one_sentence(state, change):
    """Also if every hash is computed anew; a key that is there twice would lower a cost."""
    written(state / "runs.log", change)
    assert len(unread(state)) < 700


def test_a_log_that_is_not_the_newest_is_never_a_silent_zero(state, tmp_path):
    path = state / "runs.log"
    older, mark = path.read_bytes(), (state / "runs.mark").read_bytes()
    create_run(tmp_path / "second", PLAN, facts=PEOPLE).close()
    newest = path.read_bytes()
    for damaged in (older, newest[:-300], b"", newest.replace(b'"mu"', b'"no"', 1)):
        path.write_bytes(damaged)
        # A run about nobody reads no account, and would write a mark that fits the damaged log.
        with pytest.raises(ConfigError, match="log of runs"):
            create_run(tmp_path / "of nobody", PLAN)
        assert not (tmp_path / "of nobody").exists()
        assert "Restore it, with runs.mark" in answer(state)
    lines = newest.splitlines(keepends=True)
    for without in (lines[1:], lines[:1] + lines[2:], [lines[1], lines[0], *lines[2:]]):
        path.write_bytes(b"".join(without))
        answer(state)
    for place in range(0, len(newest), 97):
        path.write_bytes(newest)
        flip(path, place, place % 8)
        with pytest.raises(ConfigError, match="log of runs"):
            budget_book.accounts()
    path.write_bytes(newest)
    assert len(budget_book.account("keyboard-de").charges) == 2
    (state / "runs.mark").write_bytes(b"{")
    answer(state)
    (state / "runs.mark").write_bytes(mark)
    assert len(budget_book.account("keyboard-de").charges) == 2


def test_what_a_crash_leaves_of_a_line_is_skipped_and_cut_off(state, tmp_path):
    path = state / "runs.log"
    whole = path.read_bytes()
    for torn in (b'{"event"', bytes(300), b'{"event": "cl\0\0\0\n'):
        path.write_bytes(whole + torn)
        assert gather(tmp_path / "run").origin == "here"
        with RunFolder.open(tmp_path / "run") as run:
            assert run.rounds == 1
    path.write_bytes(whole + bytes(300))
    with RunFolder.open(tmp_path / "run") as run:
        fit(server(run), Clients(), COHORTS[:2], commit=run.commit)
    assert path.read_bytes().startswith(whole + b'{"event": "coming"')
    assert gather(tmp_path / "run").origin == "here"


def test_a_line_that_a_killed_process_did_not_flush_is_flushed_before_the_next(state, monkeypatch):
    path, usual, sizes = state / "runs.log", os.fsync, []
    before = path.stat().st_size

    def note(handle):
        if os.path.samestat(os.fstat(handle), path.stat()):
            sizes.append(os.fstat(handle).st_size)
        usual(handle)

    monkeypatch.setattr(os, "fsync", note)
    with log.writing():
        log.append(log.Entry(event="limit", population="keyboard-de", epsilon=1.0, delta=1e-6))
    assert sizes == [before, path.stat().st_size]


@pytest.mark.parametrize("survives", range(5))
def test_a_log_begun_after_a_loss_is_legible_whenever_the_process_dies(
    state, monkeypatch, survives
):
    """The process dies after so many durable writes; the loss is known, before and after."""
    (state / "runs.log").unlink()
    entry = log.Entry(event="limit", population="keyboard-de", epsilon=1.0, delta=1e-6)
    left = iter([True] * survives)

    def dies(write):
        def until(*arguments):
            if not next(left, False):
                raise KeyboardInterrupt
            return write(*arguments)

        return until

    with monkeypatch.context() as patch:
        for name in ("append_durably", "write_durably"):
            patch.setattr(store, name, dies(getattr(store, name)))
        with suppress(KeyboardInterrupt), log.writing():
            log.append(entry)
    assert log.lines_of()[0].event == "lost"
    assert budget_book.account("keyboard-de").status == "unknown"
    budget_book.set_limit("keyboard-de", budget_book.Limit(2.0, 1e-6), looser=True)
    assert log.lines_of()[0].event == "lost"


def test_a_lost_log_is_said_for_good_and_every_run_is_charged_whole(state, tmp_path, privpart):
    create_run(tmp_path / "unspent", PLAN, facts=PEOPLE).end_early()
    (state / "runs.log").unlink()
    assert budget_book.account("keyboard-de").status == "unknown"
    with pytest.raises(ConfigError, match="no record of the run"):
        RunFolder.open(tmp_path / "run")
    RunFolder.open(tmp_path / "run", adopt=True).close()
    with pytest.raises(ConfigError, match="ended early"):
        RunFolder.open(tmp_path / "unspent")
    account = budget_book.account("keyboard-de")
    assert (account.status, len(account.charges)) == ("unknown", 2)
    assert account.total.mu == pytest.approx(math.sqrt(2) * MU)
    assert "earlier log of runs is lost" in run_report(tmp_path / "run").all_runs.says
    assert "an earlier log of runs is lost" in privpart("budget").stdout


PLANTS = {
    "is a folder": Path.mkdir,
    "is a pipe": os.mkfifo,
    "is a link": lambda path: path.symlink_to(path.with_name("aside")),
}


@pytest.mark.parametrize("name", ["runs.log", "runs.mark"])
@pytest.mark.parametrize("said", PLANTS)
def test_a_log_that_others_can_change_is_refused(state, name, said):
    path = state / name
    path.rename(state / "aside")
    PLANTS[said](path)
    assert said in answer(state)
    path.rmdir() if said == "is a folder" else path.unlink()
    (state / "aside").rename(path)
    state.chmod(0o777)
    assert "can be written by other users" in answer(state)
    state.chmod(0o700)
    run_id = gather(state.with_name("run")).facts["run_id"]
    (state / f"{run_id}.lock").unlink()
    (state / f"{run_id}.lock").symlink_to(state / "new")
    with pytest.raises(ConfigError, match="lock is a link"):
        RunFolder.open(state.with_name("run"))
    assert not (state / "new").exists()


def test_a_state_directory_that_cannot_be_written_is_named(state, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(log.VARIABLE, str(tmp_path / "file" / "state"))
    with pytest.raises(store.StorageError, match=r"log of runs in .*state cannot be written"):
        create_run(tmp_path / "more", PLAN, facts=PEOPLE)
    assert not (tmp_path / "more").exists()
