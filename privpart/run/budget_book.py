"""Budget book: what every run on this machine costs the people that it trained on.

A report is about one run, and a fork's report adds the runs that it came from. Nobody's exposure
ends there: two forks of one run, or two runs of two plans, are seen by the same people's adversary.
The book has an entry per run and population, in one file of the user's state directory, beside the
rollback guard. All entries of a population compose: mu^2 adds.

A run is charged when it is created, for its whole plan and alone; what it was forked from is
an entry of its own. Entry and run come into being in one transaction, so two processes that begin
at the same time cannot both pass a limit. A run that was closed before its first round costs
nothing if the rollback guard shows that nobody saw a model of it: its record is there, of no round
and of no adopted copy. Every other one costs its whole plan, however early it ended: less would
need a proof for each mechanism. A run whose members are sampled is charged as if they were not.

Names that differ only in what is not heard when they are read out (case, spaces, hyphens, forms of
a letter, characters without width) are one population.

A run with noise from a seed, or without noise, has no bound. It is listed and not added, because
such runs are simulations; but the total of its population is then "not-private", unless the
population is a built-in task's, whose data are public. A population with a limit refuses such runs.

What the book cannot know: runs on other machines, other names for the same people, people in parts
of two populations, runs that were made by hand without a name, and that the whole state directory
was deleted or restored. A mark beside the file notices that the file alone was.
"""

import hashlib
import json
import math
import os
import re
import secrets
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from accounting import Guarantee, checks, gaussian, guarantee
from accounting.checks import ConfigError, parsed_json
from accounting.report import up
from privpart.plan import PrivacyPlan
from privpart.run import witness
from privpart.run.store import (
    damage_named,
    lock,
    make_private,
    read_small,
    refuse_odd,
    refuse_shared,
    write_durably,
)

PUBLIC_DATA = "task:"
"""How the names of populations of built-in tasks begin. Nobody can type such a name in a plan."""
Kind = Literal["private", "seeded", "no noise"]
Status = Literal["holds", "not-private", "nothing released"]
_FILE = "budget.book"
"""A digest of the second line, and the entries and limits as JSON."""
_MARK = "budget.mark"
_LOCK = "budget.lock"
_RUN_ID = re.compile("[0-9a-f]{32}")
_LONGEST = 100
"""Characters of a name."""
_LONGEST_MARK = 4096
_LARGEST = 2**28
_SILENT = {"Cc", "Cf", "Pc", "Pd", "Zl", "Zp", "Zs"}
"""Categories of characters that are not heard: controls, connectors, dashes and spaces."""
_WITHOUT_WIDTH = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\ufe00-\ufe0f\U0001d159\U000e0100-\U000e01ef]"
)
"""Characters of other categories that show nothing."""
_PATIENCE = 60.0
"""Seconds to wait for another process that begins a run."""


class BudgetExceededError(ConfigError):
    """A run or fork would pass the limit of its population. Nothing was created."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One run about one population.

    Attributes:
        population: name of the people.
        run: random name of the run.
        kind: "private", or why the run has no bound: "seeded" or "no noise".
        mu: cost of the run alone; None if it has no bound.
        delta: delta that the run was planned with, if any.
        parent: run that it was forked from.
        begun: when it was entered, in UTC.
        rounds: planned rounds; None for a parent of which only the cost is known.
        folder: where the run was when this machine last opened it.
        opened: committed rounds when it was resumed last, if it was.
        closed: rounds after which it was closed early; None if it was not.
    """

    population: str
    run: str
    kind: Kind
    mu: float | None
    delta: float | None = None
    parent: str | None = None
    begun: str = ""
    rounds: int | None = None
    folder: str | None = None
    opened: int | None = None
    closed: int | None = None

    def __post_init__(self) -> None:
        refuse_population(self.population)
        checks.choice("kind", self.kind, ("private", "seeded", "no noise"))
        if not _RUN_ID.fullmatch(self.run) or (self.mu is None) != (self.kind != "private"):
            raise ConfigError(f"run {self.run[:40]!r}: has an odd name, or an odd cost.")
        if self.mu is not None:
            # Which refuses what is out of range.
            Guarantee(self.mu)
        if self.delta is not None:
            checks.probability("delta", self.delta)

    @property
    def counts(self) -> bool:
        """Whether anybody may have seen a model of the run, as far as this machine can tell."""
        # Only a run that was closed before its first round can be free, if the guard says so.
        record = self._seen() if self.closed == 0 and not self.opened else None
        return record is None or not (record.closed and record.unspent)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as plain values, ready for JSON, with how far the run is."""
        done = self.released()
        return asdict(self) | {"released": done, "status": self.status(done)}

    def released(self) -> int | None:
        """Return the most rounds of the run that this machine knows of; None if that is unknown."""
        if self.closed == 0 and self.counts:
            return None
        record = self._seen()
        counts = (self.closed, self.opened, None if record is None else record.rounds)
        return max((rounds for rounds in counts if rounds is not None), default=None)

    def _seen(self) -> witness.Seen | None:
        """Return what the rollback guard saw of the run; None if that is lost."""
        try:
            return witness.last_seen(self.run)
        except ConfigError:  # who continues the run is told
            return None

    def status(self, released: int | None) -> str:
        """Return "closed", "complete", "running" or "unknown"."""
        if self.closed is not None:
            return "closed"
        if released is None or self.rounds is None:
            return "unknown"
        return "complete" if released >= self.rounds else "running"


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that all runs about a population may cost together.

    Args:
        epsilon: > 0.
        delta: in (0, 1).
        since: when it was set, in UTC.
    """

    epsilon: float
    delta: float
    since: str = ""

    def __post_init__(self) -> None:
        checks.positive("limit_epsilon", self.epsilon)
        checks.probability("delta", self.delta)

    @property
    def mu(self) -> float:
        """The greatest mu within the limit, rounded down."""
        return gaussian.mu(self.epsilon, self.delta)

    def allows(self, cost: Guarantee) -> bool:
        """Return whether a cost is within the limit."""
        return cost.epsilon(self.delta) <= self.epsilon


@dataclass(frozen=True, slots=True)
class Account:
    """What one population has spent.

    Attributes:
        population: its name.
        entries: the runs, in the order in which they were entered.
        limit: the limit that holds now, if there is one.
        history: every change of the limit, the oldest first; None removed it.
    """

    population: str
    entries: tuple[Entry, ...]
    limit: Limit | None
    history: tuple[tuple[str, Limit | None], ...]

    def total(self) -> Guarantee | None:
        """Return the cost of all private runs together; None if there are none."""
        return composed([e.mu for e in self.entries if e.counts and e.mu is not None])

    @property
    def unbounded(self) -> tuple[Entry, ...]:
        """The runs without a bound, which are not in the total."""
        return tuple(e for e in self.entries if e.counts and e.kind != "private")

    @property
    def status(self) -> Status:
        """Whether the total bounds what all runs tell about one member of the population."""
        # Simulations on public data tell nothing about anybody.
        if any(not is_public(entry.population) for entry in self.unbounded):
            return "not-private"
        return "nothing released" if self.total() is None else "holds"

    @property
    def passed(self) -> bool:
        """Whether the private runs alone are above the limit."""
        total = self.total()
        return self.limit is not None and total is not None and not self.limit.allows(total)

    def delta(self) -> float | None:
        """Return the limit's delta, or the least of the runs', which gives the most epsilon."""
        if self.limit is not None:
            return self.limit.delta
        return min((e.delta for e in self.entries if e.delta is not None), default=None)

    def left(self) -> float | None:
        """Return the mu that one more run may have, rounded down; None without a limit."""
        if self.limit is None:
            return None
        budget, total = self.limit.mu, self.total()
        spent = 0.0 if total is None else total.mu
        if not spent < budget:
            return 0.0
        # The factors keep digits that a difference of squares loses; the last one rounds down.
        return math.sqrt(budget - spent) * math.sqrt(budget + spent) * (1 - 1e-12)

    def to_dict(self, delta: float | None = None) -> dict[str, Any]:
        """Return the account as plain values, ready for JSON; ``delta`` None takes ``delta()``."""
        chosen, total = self.delta() if delta is None else delta, self.total()
        return {
            "population": self.population,
            "status": self.status,
            "mu": None if total is None else total.mu,
            "epsilon": None if total is None or chosen is None else total.epsilon(chosen),
            "delta": chosen,
            "without_bound": len(self.unbounded),
            "limit": None if self.limit is None else asdict(self.limit),
            "mu_left": self.left(),
            "passed": self.passed,
            "runs": [entry.to_dict() for entry in self.entries],
            "limits": [
                {"since": since, "limit": None if limit is None else asdict(limit)}
                for since, limit in self.history
            ],
        }


@dataclass(frozen=True, slots=True)
class AllRuns:
    """What all runs on this machine told about the people of one of them, for its report.

    Attributes:
        population: name of the people.
        status: see ``Account``; "unknown" if this machine cannot tell.
        runs: number of runs in the book, those without a bound included.
        mu: cost of the private runs together; None if unknown.
        epsilon: the same at the report's delta; None if unknown.
        says: the sentence for people.
    """

    population: str
    status: Status | Literal["unknown"]
    runs: int
    mu: float | None
    epsilon: float | None
    says: str


def all_runs(facts: Mapping[str, Any], delta: float) -> AllRuns | None:
    """Return what all runs about a run's people cost; None if nobody named them.

    Args:
        facts: facts of the run's ledger.
        delta: in (0, 1).
    """
    name = facts.get("population_name")
    try:
        # A run that named nobody may be in the book as the parent of a fork.
        name = name or next(iter(populations_of(facts["run_id"])), None)
        if name is None:
            return None
        spent = account(refuse_population(name))
    except ConfigError as error:
        sentence = f"unknown: {error}".rstrip(".")
        return AllRuns(str(name or "")[:_LONGEST], "unknown", 0, None, None, sentence)
    if facts["run_id"] not in {e.run for e in spent.entries}:
        sentence = f"unknown: this machine's budget book has no entry of this run about {name!r}"
        return AllRuns(name, "unknown", len(spent.entries), None, None, sentence)
    total, unbounded = spent.total(), len(spent.unbounded)
    mu, epsilon = (None, None) if total is None else (total.mu, total.epsilon(delta))
    sentence = f"{counted(len(spent.entries), 'run')} on this machine about {name!r}"
    if epsilon is not None and mu is not None:
        sentence = f"epsilon {up(epsilon, 5)}, mu {up(mu, 5)}: {sentence}"
    if spent.status == "not-private":
        sentence = (
            f"NOT PRIVATE: {counted(unbounded, 'run')} without secret noise. The others: {sentence}"
        )
    elif unbounded:
        sentence += f", of which {counted(unbounded, 'simulation')} not added"
    return AllRuns(name, spent.status, len(spent.entries), mu, epsilon, sentence)


def counted(number: int, noun: str) -> str:
    """Return "1 run", "2 runs" and the like."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def composed(costs: "list[float]") -> Guarantee | None:
    """Return the guarantee of runs of these mu together; None if there are none.

    >>> round(composed([2 / 3, 2 / 3, 2 / 3]).mu, 6)  # a run and two forks of it
    1.154701
    """
    return reduce(Guarantee.compose, map(Guarantee, costs)) if costs else None


def refuse_population(name: object) -> str:
    """Return the name of a population, after checking it.

    Raises:
        ConfigError: it is empty, too long, or not one line of printable characters in one form.
    """
    if not isinstance(name, str) or not _is_plain(name):
        raise ConfigError(
            f"population={str(name)[:_LONGEST]!r}: must be 1 to {_LONGEST} printable "
            'characters with a letter or digit, without spaces around them, such as "keyboard-de".'
        )
    return name


def _is_plain(name: str) -> bool:
    # NFC: two encodings of one accent would be two populations that look the same.
    shown = name.isprintable() and unicodedata.is_normalized("NFC", name) and name.strip() == name
    return shown and len(name) <= _LONGEST and bool(_spoken(name))


def is_public(population: str) -> bool:
    """Return whether a name is that of a built-in task, whose data are public."""
    return _spoken(population).startswith(PUBLIC_DATA)


@dataclass(slots=True)
class _Book:
    """All entries and limits of a machine, in the order in which they were entered."""

    id: str
    changes: int
    entries: list[Entry]
    limits: list[tuple[str, str, Limit | None]]
    """Population, when the limit was set, and the limit; None removed it."""

    def account(self, population: str) -> Account:
        spoken = _spoken(population)
        entries = tuple(e for e in self.entries if _spoken(e.population) == spoken)
        history = tuple(
            (since, limit) for name, since, limit in self.limits if _spoken(name) == spoken
        )
        return Account(population, entries, history[-1][1] if history else None, history)

    def populations(self) -> list[str]:
        """Return a name of each population."""
        named = {e.population for e in self.entries} | {name for name, _, _ in self.limits}
        names = sorted(named, reverse=True)
        return sorted({_spoken(name): name for name in names}.values())

    def refuse_alike(self, name: str) -> None:
        """Check that a new name is not another spelling of one in the book."""
        names = self.populations()
        alike = [other for other in names if _spoken(other) == _spoken(name)]
        if alike and name not in names:
            raise ConfigError(
                f"population={name!r}: the budget book has {alike[0]!r}, which differs only in "
                "case, spaces, hyphens or the like. Use that name for the same people; for others, "
                "a name that nobody could take for it."
            )


@contextmanager
def charged(plan: PrivacyPlan, facts: Mapping[str, Any], folder: Path) -> Iterator[None]:
    """Enter the run that the block creates; if the block fails, nothing is entered.

    Nothing happens if ``facts`` name no population.

    Raises:
        BudgetExceededError: the run would pass the limit of its population.
        ConfigError: the name is new and almost that of a population in the book; or the book is
            lost, damaged, foreign, or busy.
        OSError: the disk refused.
    """
    if facts.get("population_name") is None:
        yield
        return
    entry = _entry_of(plan, facts, facts["population_name"], folder)
    # Under the lock: two runs begun at once must not both fit into what is left.
    with _writing() as book:
        book.refuse_alike(entry.population)
        before = book.account(entry.population)
        new = [*_missing_parent(facts, entry, before), entry]
        _refuse_beyond_limit(before, new)
        book.entries += new
        yield


def enter(plan: PrivacyPlan, facts: Mapping[str, Any], folder: Path, *, rounds: int) -> None:
    """Enter a run that is opened, unless it is in the book; note where its folder is.

    A run comes without an entry from another machine, or from a crash while it was created. Unless
    the rollback guard shows that it released no round, it is entered whatever the limit says.

    Args:
        plan: plan of the run.
        facts: facts of its ledger.
        folder: its folder.
        rounds: its committed rounds.

    Raises:
        BudgetExceededError: the run has rounds to go, and would pass the limit.
        ConfigError: this machine has closed the run, or opened a newer copy of it; or the book is
            lost, damaged, foreign or busy.
        OSError: the disk refused.
    """
    name = facts.get("population_name")
    if name is None:
        return
    refuse_population(name)
    closed = None if facts.get("closed") is None else rounds
    entry = {e.run: e for e in account(name).entries}.get(facts["run_id"])
    if entry is None:
        entry = replace(_entry_of(plan, facts, name, folder), opened=rounds, closed=closed)
        _enter_late(plan, facts, entry)
        return
    if entry.closed is not None and closed is None:
        raise ConfigError(
            f"{folder}: this run was closed after {entry.closed} rounds, and this is an older copy "
            "of it. A closed run is not continued. Begin a new run."
        )
    # The rollback guard may be lost, and this book kept.
    if rounds < (entry.opened or 0):
        raise ConfigError(
            f"{folder} is an older copy: it stands after {rounds} rounds, and the budget book has "
            f"seen {entry.opened}. Continuing would reuse the noise of released rounds, and ending "
            "it early would take back what they cost. Restore the newest copy, or begin a fork."
        )
    standing = partial(replace, folder=_shown(folder), opened=rounds, closed=closed)
    if standing(entry) != entry:
        with _writing() as book:
            book.entries = [standing(e) if e.run == entry.run else e for e in book.entries]


def _enter_late(plan: PrivacyPlan, facts: Mapping[str, Any], entry: Entry) -> None:
    exceeded: BudgetExceededError | None = None
    with _writing() as book:
        before = book.account(entry.population)
        new = [*_missing_parent(facts, entry, before), entry]
        try:
            _refuse_beyond_limit(before, new)
        except BudgetExceededError as error:
            running = (entry.opened or 0) < plan.rounds and entry.closed is None
            exceeded = error if running else None
        record = entry._seen()
        if exceeded is None or entry.opened or record is None or not record.unspent:
            book.entries += new
    if exceeded is not None:
        raise exceeded


def accounts() -> list[Account]:
    """Return what every population has spent, by name.

    Raises:
        ConfigError: the book is lost, damaged or foreign.
    """
    book = _read()
    return [book.account(name) for name in book.populations()]


@lru_cache(4096)
def _spoken(name: str) -> str:
    """Return a name without what is not heard when it is read out."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    heard = (sign for sign in folded if unicodedata.category(sign) not in _SILENT)
    return _WITHOUT_WIDTH.sub("", "".join(heard))


def account(population: str) -> Account:
    """Return what a population has spent, nothing if it is not in the book; see ``accounts``."""
    return _read().account(population)


def populations_of(run: str) -> list[str]:
    """Return the populations under which a run is entered, more than one for a run with forks."""
    return sorted({entry.population for entry in _read().entries if entry.run == run})


def set_limit(population: str, limit: Limit | None, *, looser: bool = False) -> Account:
    """Set or remove the limit of a population; return its account.

    Args:
        population: name of the people; there need not be a run about them yet.
        limit: the limit; None removes the one that holds.
        looser: allows a limit that is above the one that holds.

    Raises:
        ConfigError: the limit is above the one that holds and ``looser`` is not given, there is
            none to remove, the name is almost that of a population in the book, or the book is
            lost, damaged, foreign or busy.
        OSError: the disk refused.
    """
    refuse_population(population)
    if limit is not None:
        _refuse_beyond_figures(limit)
    with _writing() as book:
        book.refuse_alike(population)
        old = book.account(population).limit
        if limit is None and old is None:
            raise ConfigError(f"population {population!r} has no limit to remove.")
        if limit is not None and old is not None and limit.mu > old.mu and not looser:
            raise ConfigError(
                f"limit_epsilon={limit.epsilon:g}: with delta={limit.delta:g} it is above the "
                f"limit of {population!r}, epsilon {old.epsilon:g} with delta={old.delta:g}. To "
                "raise it, add --raise-limit; the book keeps the old one."
            )
        since = _now()
        book.limits.append((population, since, limit and replace(limit, since=since)))
        return book.account(population)


def _refuse_beyond_figures(limit: Limit) -> None:
    """Check that what is left of a limit can be computed: every later command does."""
    try:
        Guarantee(limit.mu)
    except ConfigError as error:
        raise ConfigError(
            f"limit_epsilon={limit.epsilon:g}: with delta={limit.delta:g}, {error}"
        ) from None


def _entry_of(plan: PrivacyPlan, facts: Mapping[str, Any], name: str, folder: Path) -> Entry:
    kind: Kind = "private"
    if facts["seed"] is not None:
        kind = "seeded"
    elif plan.noise_multiplier == 0:
        kind = "no noise"
    mu = None
    # Not plan.guarantee(), which may count on members being sampled.
    if kind == "private":
        z = plan.noise_multiplier
        mu = guarantee(plan.mechanism, plan.participation, noise_multiplier=z).mu
    return Entry(
        population=name,
        run=facts["run_id"],
        kind=kind,
        mu=mu,
        delta=facts.get("delta"),
        parent=facts.get("fork_of"),
        begun=_now(),
        rounds=plan.rounds,
        folder=_shown(folder),
    )


def _missing_parent(facts: Mapping[str, Any], entry: Entry, before: Account) -> list[Entry]:
    """Return an entry for the run that another was forked from, if the population has none.

    The parent may be of another machine, or about people of another name. Its ancestors' cost
    cannot be told from its own and stays in it.
    """
    parent, mu = facts.get("fork_of"), facts.get("earlier_mu")
    if parent is None or parent in {e.run for e in before.entries}:
        return []
    if not isinstance(parent, str) or not isinstance(mu, int | float):
        raise ConfigError(f"run {entry.run}: its ledger does not say what its parent cost.")
    return [Entry(entry.population, parent, "private", float(mu), begun=entry.begun)]


def _refuse_beyond_limit(before: Account, new: list[Entry]) -> None:
    limit, name = before.limit, before.population
    if limit is None:
        return
    bound = (
        f"the limit of population {name!r}, epsilon {limit.epsilon:g} with delta={limit.delta:g}"
    )
    if new[-1].kind != "private":
        raise BudgetExceededError(
            f"a run with noise from a seed, or without noise, has no bound and would pass {bound}. "
            "Simulate on data of nobody, under a population of another name."
        )
    after = Account(name, (*before.entries, *new), limit, ()).total()
    if after is None or limit.allows(after):
        return
    spent, alone = before.total(), composed([e.mu for e in new if e.mu is not None])
    raise BudgetExceededError(
        f"this run would pass {bound}: the runs so far have spent "
        f"{_epsilon(spent, limit.delta)}, this one costs {_epsilon(alone, limit.delta)}, and "
        f"together they cost {_epsilon(after, limit.delta)}. Plan more noise or fewer rounds, or "
        f"see `privpart budget`."
    )


def _epsilon(cost: Guarantee | None, delta: float) -> str:
    return "0" if cost is None else up(cost.epsilon(delta))


def _read() -> _Book:
    """Return the book, an empty one if this machine has none yet."""
    # Before the book, which another process may be writing.
    mark = _mark()
    path = witness.directory() / _FILE
    try:
        refuse_odd(path)
        data = read_small(path, _LARGEST)
    except FileNotFoundError:
        if mark is None:
            return _Book(secrets.token_hex(16), 0, [], [])
        raise ConfigError(
            f"the budget book {path} is lost: {path.with_name(_MARK)} tells of {mark['changes']} "
            "changes. Restore it from a backup. To begin an empty one, which leaves out what was "
            "spent, remove that file as well."
        ) from None
    except OSError as error:
        raise ConfigError(f"the budget book {path} cannot be read: {error}.") from None
    with damage_named(path):
        digest, _, text = data.partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            raise ValueError("its entries or limits were changed")
        book = TypeAdapter(_Book).validate_json(text, strict=True)
    if mark is not None:
        _refuse_foreign(book, path, mark)
    return book


@contextmanager
def _writing() -> Iterator[_Book]:
    """Yield the book to be changed; it is written durably if the block succeeds."""
    directory = witness.directory()
    make_private(directory)
    busy = (
        f"the budget book in {directory} is in use: another process has been beginning a run for "
        f"{_PATIENCE:g} seconds. Try again."
    )
    book_lock = lock(directory / _LOCK, busy, patience=_PATIENCE)
    try:
        book = _read()
        yield book
        book.changes += 1
        text = json.dumps(asdict(book)).encode()
        digest = hashlib.sha256(text).hexdigest().encode()
        write_durably(directory / _FILE, digest + b"\n" + text)
        mark = {"id": book.id, "changes": book.changes}
        write_durably(directory / _MARK, json.dumps(mark).encode())
    finally:
        book_lock.release()


def _mark() -> dict[str, Any] | None:
    """Return which book this machine has, and after how many changes; None if it has none."""
    path = witness.directory() / _MARK
    try:
        refuse_shared(path.parent)
        refuse_odd(path)
        values = parsed_json(read_small(path, _LONGEST_MARK))
        return {"id": str(values["id"]), "changes": int(values["changes"])}
    except FileNotFoundError:
        return None
    except ConfigError:
        raise
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"the mark of the budget book, {path}, cannot be read: {error}. Restore it from a "
            "backup, or remove it to take the book as it is."
        ) from None


def _refuse_foreign(book: _Book, path: Path, mark: Mapping[str, Any]) -> None:
    """Check that the book is the one that this machine wrote last."""
    if mark["id"] != book.id:
        raise ConfigError(
            f"the budget book {path} is another machine's or another user's. Restore this one's; "
            f"to take over the other as it is, remove {path.with_name(_MARK)}."
        )
    if mark["changes"] > book.changes:
        raise ConfigError(
            f"the budget book {path} is an older copy: it has {book.changes} changes of "
            f"{mark['changes']}, so runs are missing. Restore the newest copy."
        )


def _shown(folder: Path) -> str:
    """Return the path of a folder as text, whatever bytes it has."""
    return os.fsencode(folder.resolve()).decode("utf-8", "backslashreplace")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
