"""Selection: a secret number of runs in one folder, of which the best is released and nothing else.

    OUT/selection.json         random name of the selection
    OUT/trials/NAME            runs that are being trained, under random names; none after the end
    OUT/run                    the winner, after the end
    STATE/selections/ID        in the log's directory, until the end: the secret, the scores, and a
                               log of the runs, which would tell how many there were

One secret of 256 bits determines the number of runs, the candidate of each, and how ties end. It is
on the disk, and its hash is in the log of runs with what the selection costs, before a client
trains: nothing is ever drawn again. After the last run, these steps end a selection; a crash
between two of them is mended by the next call:

    1. the winner is moved to OUT/run, with the times of its files set to now;
    2. the log gets the winner's lines, and that the selection ended with it;
    3. all other runs, their keys and scores, and the secret are overwritten and removed.

Whoever gives a selection up pays for all its runs: having seen any, one could decide by them. A
copy of OUT elsewhere has no secret, and an older one lacks runs that this machine saw.
"""

import hashlib
import json
import math
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from accounting.checks import ConfigError, parsed_json
from accounting.report import AssumptionStatus
from accounting.selection import Repetitions, draw, selected_of
from privpart.run import budget_book, log, store
from privpart.run.folder import LOCK, RunFolder, holds_a_run, locked, on_disk
from privpart.run.ledger import Ledger
from privpart.run.lives import Life, life, lives

FACT = "selection"
"""Name of the fact in the ledger of each run."""
NOISED = "noised"
"""How the names of scores begin that are noised metrics of the runs."""
FILE, RUN, TRIALS = "selection.json", "run", "trials"
_SECRET, _SCORES = "secret", "scores.json"
_SCHEMA = "privpart/selection/1"
_SECRET_BYTES = 32
_MOST_BYTES = 2**24
_ID = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is public of a selection, and fixed before its first run."""

    hash: str  # SHA-256, in hex, of the candidates, their order and code, and all that follows
    # what the whole costs, as ``accounting.selection.fields_of`` gives it
    cost: Mapping[str, int | float]
    candidates: int  # number of candidates, from which each run draws its own, each as likely
    score: str  # name of the score
    # whether the score is known to read nothing but public data and what the run released, by no
    # author's word
    is_public: bool
    population: str  # name of the people
    delta: float  # of the target

    @property
    def repetitions(self) -> Repetitions:
        """The distribution of the number of runs."""
        return selected_of(self.cost).repetitions


@dataclass(frozen=True, slots=True)
class Abandoned:
    """What giving a selection up costs."""

    runs: int  # runs that are charged; 0 if no round of any was committed
    mu: float  # of the charge; 0 likewise


class Selection:
    """A selection on disk, locked while it is open; use it in a ``with`` statement.

    Attributes:
        path: its folder.
        id: its random name.
        terms: what is public of it.
        is_over: whether it ended before, with the winner in ``path / RUN``.
    """

    def __init__(self, path: Path, name: str, terms: Terms, locks: ExitStack) -> None:
        self.path, self.id, self.terms = path, name, terms
        self._locks = locks
        self._place = _place(name)
        self._secret = b""
        self.is_over = False

    @classmethod
    def open(cls, folder: Path, terms: Terms) -> Self:
        """Begin a selection in an empty folder, and charge it; or continue the one in it.

        Raises:
            ConfigError: the folder holds something else, a selection of other terms, one that was
                given up, or one that this machine did not begin, or whose secret is lost; or it is
                in use.
            BudgetExceededError: it would pass the limit of its population.
            StorageError: the disk refused.
        """
        if holds_a_run(folder):
            raise ConfigError(
                f"{folder} holds a run: a selection begins in a folder of its own, and trains "
                "every candidate from the start."
            )
        with on_disk(f"{folder} cannot be written"), ExitStack() as locks:
            store.make_private(folder)
            locks.callback(locked(folder).release)
            name = _about(folder).get("id") or _new(folder, terms)
            locks.callback(log.hold(name).release)
            selection = cls(folder, name, terms, locks)
            selection._continue()
            selection._locks = locks.pop_all()
        return selection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._locks.close()

    def _continue(self) -> None:
        _, its = _begun(self.id)
        if its.closed:
            self._erase()
            raise ConfigError(f"{self.path}: the selection was given up; begin another folder.")
        if its.rounds:
            if _about(self.path).get("terms") != self.terms.hash:
                raise ConfigError(
                    f"{self.path}: holds the end of a selection by another tune file, plan or "
                    f"code; its winner is in {self.path / RUN}. Begin in another folder."
                )
            self.is_over = True
            self._erase()
            return
        kept = _kept(self._place)
        if kept is None or (its.head and its.head != kept.commitment):
            where = "is lost or was changed" if its.head else "is not on this machine"
            raise ConfigError(
                f"{self.path}: the secret of this selection {where}, and nothing is drawn a second "
                "time. Continue it where it began; or give it up there (--abandon), which charges "
                "all of its trainings, and begin in another folder."
            )
        if kept.terms != self.terms.hash:
            raise ConfigError(
                f"{self.path}: the tune file, its plan or its code changed since the selection "
                "began. Restore them; or begin in another folder, after giving this one up "
                "(--abandon)."
            )
        self._secret = kept.secret
        if not its.head:
            entry = log.Entry(
                event="begun",
                run=self.id,
                head=kept.commitment,
                at=log.now(),
                population=self.terms.population,
                mu=selected_of(self.terms.cost).mu,
                sampled=[dict(self.terms.cost)],
                delta=self.terms.delta,
                planned=1,
                folder=log.shown(self.path),
            )
            with log.writing():
                budget_book.enter_selection(entry)

    @property
    def fact(self) -> dict[str, Any]:
        """What the ledger of each run says of the selection."""
        terms = self.terms
        return {
            "id": self.id,
            "cost": dict(terms.cost),
            "candidates": terms.candidates,
            "score": terms.score,
            "is_public": terms.is_public,
            "terms": terms.hash,
        }

    def runs(self) -> "Iterator[Trial]":
        """Yield each run that is to be trained, in order. How many there are is secret."""
        for number in range(_runs(self.terms.repetitions, self._secret)):
            name = _bits(self._secret, f"name {number}", 64).to_bytes(8).hex()
            candidate = _bits(self._secret, f"candidate {number}", 256) % self.terms.candidates
            yield Trial(number, candidate, self.path / TRIALS / name)

    @contextmanager
    def log(self) -> Iterator[None]:
        """Keep the log of runs apart, where nobody sees how many there are."""
        with log.apart(self._place):
            yield

    def refuse_other(self, trial: "Trial") -> None:
        """Check that a run of which a round may be known is not begun again, nor another's copy."""
        with self.log():
            lines = log.lines_of()
        named = {entry.run for entry in lines if Path(entry.folder or "").name == trial.path.name}
        seen, winner = lives(lines), self.path / RUN
        if holds_a_run(winner) and Ledger(winner).facts["run_id"] in named:
            return
        if holds_a_run(trial.path):
            if Ledger(trial.path).facts["run_id"] not in named:
                raise ConfigError(f"{trial.path}: holds another run than the one begun in it.")
        elif any(seen[run].is_spent or seen[run].rounds for run in named):
            raise ConfigError(
                f"{trial.path} is missing: this folder is an older copy, or a training was removed "
                "from it, and none is made a second time. Restore it, or give the selection up "
                "(--abandon), which charges all of its trainings."
            )

    def scores(self) -> dict[str, tuple[float, str]]:
        """Map each folder of a run that was trained and measured to its score and the run."""
        try:
            with store.damage_named(self._place / _SCORES):
                return dict(parsed_json(store.read_small(self._place / _SCORES, _MOST_BYTES)))
        except FileNotFoundError:
            return {}

    def note(self, trial: "Trial", run: str, score: float) -> None:
        """Keep the score of a run; one that is not finite is the lowest."""
        finite = score if math.isfinite(score) else -sys.float_info.max
        values = self.scores() | {trial.path.name: (finite, run)}
        with on_disk(f"{self._place} cannot be written"):
            store.write_durably(self._place / _SCORES, json.dumps(values).encode())

    def release(self) -> Path:
        """End the selection with the run of the highest score; return its folder."""
        scores, trials = self.scores(), list(self.runs())
        best = max(
            trials,
            key=lambda t: (scores[t.path.name][0], _bits(self._secret, f"tie {t.number}", 128)),
        )
        run = self.path / RUN
        with on_disk(f"{self.path} cannot be written"):
            if not holds_a_run(run):
                # Which of the runs it was, and so how many there were, must not be in its times.
                for file in (*best.path.iterdir(), best.path):
                    os.utime(file)
                best.path.rename(run)
                store.flush_directory(run.parent)
                store.flush_directory(best.path.parent)
            with self.log(), RunFolder.open(run) as opened:
                rounds, planned, name = opened.rounds, opened.plan.rounds, opened.facts["run_id"]
                evaluations, due = len(opened.evaluations), opened.evaluation_due
            if rounds < planned or due or name != scores[best.path.name][1]:
                raise ConfigError(f"{run}: is not the training that had the highest score.")
            chains, mu = Ledger(run).chains, float(self.terms.cost["mu"])
            begun = log.Entry(event="begun", run=name, head=chains[0], mu=mu, planned=planned)
            ended = log.Entry(event="round", run=name, rounds=rounds, head=chains[-1])
            with log.writing():
                log.append(
                    replace(begun, at=log.now(), folder=log.shown(run)),
                    replace(ended, evaluations=evaluations),
                    replace(ended, run=self.id, rounds=1),
                )
            self._erase()
        self.is_over = True
        return run

    def _erase(self) -> None:
        """Overwrite and remove the other runs, the scores, the log of runs and the secret."""
        # The secret last: it says what else there is to erase.
        for folder in (self.path / TRIALS, self._place):
            if folder.is_dir():
                _erase_folder(folder)


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a selection: its number and its candidate, from 0, and its folder."""

    number: int
    candidate: int
    path: Path


def abandon(folder: Path) -> Abandoned:
    """Give a selection up, for good: charge all of its runs, and erase them and their keys.

    Whoever gives it up may have seen every run, so that the number of runs counts, and at least
    what the selection would have cost. Where the secret is lost, the greatest number counts.

    Raises:
        ConfigError: there is no selection that has not ended, or it is in use.
        StorageError: the disk refused.
    """
    name = _about(folder).get("id") or _begun_in(folder)
    if name is None:
        raise ConfigError(f"{folder} holds no selection that could be given up.")
    with on_disk(f"{folder} cannot be written"), ExitStack() as locks:
        locks.callback(log.hold(name).release)
        if folder.is_dir():
            locks.callback(locked(folder).release)
        return _abandoned(folder, name, locks)


def _abandoned(folder: Path, name: str, locks: ExitStack) -> Abandoned:
    begun, its = _begun(name)
    terms = Terms(hash="", cost={}, candidates=1, score="", is_public=False, population="", delta=1)
    selection = Selection(folder, name, terms, locks)
    if begun is None or begun.sampled is None:
        raise ConfigError(f"{folder}: the selection was not begun on this machine.")
    if its.rounds:
        raise ConfigError(f"{folder}: the selection has ended; its winner is in {folder / RUN}.")
    kept, runs, mu = _kept(_place(name)), 0, 0.0
    known = kept is not None and kept.commitment == its.head
    if not (known and _is_unspent(_place(name))):
        repetitions = selected_of(begun.sampled[0]).repetitions
        secret = kept.secret if kept is not None and known else None
        runs = _most(repetitions) if secret is None else _runs(repetitions, secret)
        all_runs = math.nextafter(begun.sampled[0]["mu"] * math.sqrt(runs) * (1 + 1e-15), math.inf)
        mu = max(begun.mu or 0.0, all_runs)
    charge = log.Entry(event="charged", run=name, mu=mu or None, at=log.now())
    charge = replace(charge, population=begun.population, delta=begun.delta)
    if not its.closed:
        with log.writing():
            log.append(*([charge] if runs else []), log.Entry(event="closed", run=name))
    if holds_a_run(folder / RUN):
        _erase_folder(folder / RUN)
    selection._erase()
    return Abandoned(runs, mu)


def words(facts: Mapping[str, Any], head: str) -> dict[str, tuple[AssumptionStatus, str]]:
    """Map the conditions of a selection to what this machine's log says of a run of it."""
    fact = facts[FACT]
    listed: tuple[AssumptionStatus, str] = (
        "enforced",
        f"each training drew one of {fact['candidates']} candidates, each as likely, from the "
        "selection's secret; the hash of the list was fixed with it before the first",
    )
    score: tuple[AssumptionStatus, str] = (
        "asserted",
        f"by the plan's own {fact['score']}; its author says that it reads public data",
    )
    if fact["is_public"] is True:
        score = ("enforced", f"{fact['score']} on the public test examples of a built-in task")
        if str(fact["score"]).startswith(NOISED):
            score = ("enforced", "the newest noised metric, which a training releases and pays for")
    status, why = standing(facts, head)
    if status != "enforced":
        listed = (status, why)
    return {"choices": listed, "selection": (status, why), "score": score}


def standing(facts: Mapping[str, Any], head: str) -> tuple[AssumptionStatus, str]:
    """Return what this machine's log says of a run as the winner of its selection."""
    fact, name = facts[FACT], budget_book.charged_as(facts)
    try:
        begun, its = _begun(name)
    except ConfigError as error:
        return "asserted", str(error).rstrip(".")
    if begun is None:
        return "asserted", "this machine has no record of the selection"
    if begun.sampled != [fact["cost"]]:
        return "violated", "the selection that was charged has another cost than the ledger says"
    if its.closed:
        return "violated", "the selection was given up, so that all of its trainings count"
    if not its.rounds:
        return "violated", "the selection has not ended: this may be any of its trainings"
    if its.head != head:
        return "violated", "this is not the winner: another training of the selection was released"
    return (
        "enforced",
        "their number was drawn from the operating system's random bits before the first, and "
        "shown to nobody; all of them ended, and the others were erased, with their keys and their "
        "number",
    )


def refuse_unreleased(folder: Path, facts: Mapping[str, Any], head: str) -> None:
    """Check that this machine does not know a run to be one that its selection never released."""
    if FACT in facts and (judged := standing(facts, head))[0] == "violated":
        raise ConfigError(f"{folder}: {judged[1]}; nothing of it is released.")


@dataclass(frozen=True, slots=True)
class _Kept:
    """The secret, the hash of the terms, and what the log of runs names of both."""

    secret: bytes
    terms: str
    commitment: str


def _kept(place: Path) -> _Kept | None:
    file = place / _SECRET
    try:
        data = store.read_small(file, _MOST_BYTES)
    except OSError:
        return None
    with store.damage_named(file):
        values = parsed_json(data)
        secret = bytes.fromhex(values["secret"])
        if len(secret) != _SECRET_BYTES:
            raise ValueError("the secret has another length")
        return _Kept(secret, str(values["terms"]), hashlib.sha256(data).hexdigest())


def _new(folder: Path, terms: Terms) -> str:
    """Draw the secret of a new selection and keep it; return its name."""
    names = (file.name for file in folder.iterdir())
    # A call that was killed may have left a part of a file.
    if others := sorted(name for name in names if name != LOCK and not store.is_scratch(name)):
        raise ConfigError(
            f"{folder} is not empty ({others[0]}): a selection begins in a folder of its own."
        )
    name = secrets.token_hex(16)
    for place in (log.directory(), _place(name).parent, _place(name)):
        store.make_private(place)
    values = {"secret": secrets.token_bytes(_SECRET_BYTES).hex(), "terms": terms.hash}
    store.write_durably(_place(name) / _SECRET, json.dumps(values).encode())
    about = {"schema": _SCHEMA, "id": name, "terms": terms.hash}
    store.write_durably(folder / FILE, json.dumps(about).encode())
    return name


def _about(folder: Path) -> dict[str, Any]:
    file = folder / FILE
    try:
        with store.damage_named(file):
            values = parsed_json(store.read_small(file, _MOST_BYTES))
            if values["schema"] != _SCHEMA or not _ID.fullmatch(values["id"]):
                raise ValueError("schema or id is not a valid one")
            return dict(values)
    except FileNotFoundError:
        return {}


def _begun(name: str) -> tuple[log.Entry | None, Life]:
    """Return the line of the log that charges a selection, and how it stands."""
    lines = log.lines_of(name)
    begun = next((entry for entry in lines if entry.event == "begun" and entry.run == name), None)
    return begun, life(name, lines)


def _begun_in(folder: Path) -> str | None:
    """Return the selection that the log names for a folder which is gone or was emptied."""
    lines = log.lines_of()
    seen, shown = lives(lines), log.shown(folder)
    begun = (e.run for e in lines if e.is_selection and e.event == "begun" and e.folder == shown)
    open_ones = [run for run in begun if not (seen[run].rounds or seen[run].closed)]
    return open_ones[-1] if open_ones else None


def _is_unspent(place: Path) -> bool:
    """Whether no round of any run may be known."""
    with log.apart(place):
        return not any(run.is_spent or run.rounds for run in lives(log.lines_of()).values())


def _place(name: str) -> Path:
    return log.directory() / "selections" / name


def _bits(secret: bytes, what: str, count: int) -> int:
    data = hashlib.shake_256(f"privpart selection|{what}|".encode() + secret).digest(count // 8)
    return int.from_bytes(data)


def _runs(repetitions: Repetitions, secret: bytes) -> int:
    return draw(repetitions, lambda count: _bits(secret, "runs", count))


def _most(repetitions: Repetitions) -> int:
    """Return the greatest number of runs that ``draw`` returns."""
    return draw(repetitions, lambda count: 2**count - 1)


def _erase_folder(folder: Path) -> None:
    """Overwrite and remove the files of a folder, and remove it."""
    # The secret last, after what it names.
    files = sorted(folder.iterdir(), key=lambda file: (file.name == _SECRET, file.name))
    for file in files:
        if file.is_dir() and not file.is_symlink():
            _erase_folder(file)
        else:
            store.erase_durably(file)
    folder.rmdir()
    store.flush_directory(folder.parent)
