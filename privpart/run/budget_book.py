"""Budget book: what all runs on this machine cost the people that they trained on.

The book is what the log of runs says about each population; all charges compose: mu^2 adds. A run
is charged when it is created, for its whole plan and alone, under one lock with the check of a
limit; what it was forked from is a charge of its own. Only a run that was closed before its first
round is free, if the log shows that it was created here and that no copy of it was adopted. A
sampled run is charged its amplified cost, if a proof says that it composes.

A run with noise from a seed, or without noise, has no bound: it is listed and not added. The total
of its population is then "not-private", unless the people are a built-in task's, whose data are
public. docs/how-to/budget.md has the reasons, and what the book cannot know.
"""

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from accounting import ComposedGuarantee, EstimatedGuarantee, Guarantee, checks, gaussian
from accounting.checks import ConfigError
from accounting.claims import earlier_runs, plain, read_releases, releases_of, samplers
from accounting.cohorts import Sampled
from accounting.composed import Release
from accounting.report import up
from accounting.selection import selected_of
from privpart.plan import PrivacyPlan
from privpart.run import log
from privpart.run.lives import Life, lives
from privpart.run.log import Entry
from privpart.run.population import LONGEST_NAME, is_public, refuse_population, spoken

Status = Literal["holds", "not-private", "nothing released", "unknown"]
_HIDDEN = {
    False: ", some of which hold while nobody learns who was sampled",
    True: ", some of which are the best of several trainings, and hold while nobody learns of how "
    "many, or anything of the others",
}
"""What is to stay hidden, by whether a charge is that of a selection."""


class BudgetExceededError(ConfigError):
    """A run or fork would pass the limit of its population. Nothing was created."""


@dataclass(frozen=True, slots=True)
class Charge:
    """What one run costs one population: the line of the log that says so, and the run's life."""

    entry: Entry
    life: Life

    def to_dict(self) -> dict[str, Any]:
        """Return the charge as plain values, ready for JSON, with how far the run is."""
        names = [
            *("population", "run", "mu", "sampled", "epsilon", "delta", "by"),
            *("parent", "at", "planned", "folder"),
        ]
        values = {name: getattr(self.entry, name) for name in names}
        return values | {"released": self.released, "status": self.status}

    @property
    def releases(self) -> tuple[Release, ...]:
        """What the run costs alone; empty without a bound."""
        if (amplified := self.entry.amplified) is not None:
            return amplified
        return () if self.entry.mu is None else (Guarantee(self.entry.mu),)

    @property
    def hides(self) -> bool:
        """Whether the cost holds while something stays secret: who was sampled, or how many ran."""
        return self.entry.is_selection or samplers(self.releases) != ()

    @property
    def released(self) -> int | None:
        """The most rounds of the run that this machine saw; None if there may be others."""
        return self.life.rounds if self.life.is_ours or self.life.rounds else None

    @property
    def status(self) -> str:
        """How far the run is: "closed", "complete", "running", "unknown"; or "stated"."""
        if self.entry.event == "stated":
            return "stated"
        if self.life.closed:
            return "closed"
        if self.released is None or self.entry.planned is None:
            return "unknown"
        return "complete" if self.released >= self.entry.planned else "running"


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that all runs about a population may cost together.

    Raises:
        ConfigError: epsilon or delta is out of range, or so small that no mu can be computed.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        checks.positive("limit_epsilon", self.epsilon)
        checks.probability("delta", self.delta)
        try:
            Guarantee(self.mu)
        except ConfigError as error:
            raise ConfigError(f"limit_epsilon={self.epsilon:g}: {error}") from None

    @property
    def mu(self) -> float:
        """The greatest mu within the limit, rounded down."""
        return gaussian.mu(self.epsilon, self.delta)

    def allows(self, cost: ComposedGuarantee | None) -> bool:
        """Return whether a cost is within the limit; of a delta that it cannot reach, it is not."""
        spent = 0.0 if cost is None else epsilon_of(cost, self.delta)
        return spent is not None and spent <= self.epsilon

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g} with delta {self.delta:g}"


@dataclass(frozen=True, slots=True)
class AllRuns:
    """What all runs on this machine told about the people of one of them, for its report.

    ``status`` says whether mu, and epsilon at the report's delta, bound what was told; both are of
    the private runs together, and None if unknown. ``runs`` counts those without a bound, too.
    """

    population: str
    status: Status
    runs: int
    mu: float | None
    epsilon: float | None
    says: str


@dataclass(frozen=True)
class Account:
    """What one population has spent."""

    population: str
    charges: tuple[Charge, ...]  # one per run, in the order in which they were entered
    limit: Limit | None  # that holds now
    lost: bool  # whether an earlier log is missing, so that more may be spent

    @cached_property
    def total(self) -> ComposedGuarantee | None:
        """The cost of all private runs together; None if there are none."""
        return composed(charge for charge in self.charges if not charge.life.is_free)

    @cached_property
    def unbounded(self) -> int:
        """Number of runs without a bound, which are not in the total."""
        return sum(not charge.releases for charge in self.charges)

    @property
    def status(self) -> Status:
        """Whether the total bounds what all runs tell about one member of the population."""
        # Simulations on public data tell nothing about anybody.
        if self.unbounded and not is_public(self.population):
            return "not-private"
        if self.lost:
            return "unknown"
        return "nothing released" if self.total is None else "holds"

    @property
    def passed(self) -> bool:
        """Whether the private runs alone are above the limit."""
        return self.limit is not None and not self.limit.allows(self.total)

    @property
    def delta(self) -> float | None:
        """The limit's delta, or the least of the runs', which gives the most epsilon."""
        if self.limit is not None:
            return self.limit.delta
        # Below what is stated to fail, the total has no epsilon.
        runs = (charge.entry for charge in self.charges if charge.entry.event != "stated")
        return min((entry.delta for entry in runs if entry.delta is not None), default=None)

    def left(self) -> float | None:
        """Return the mu that one more run may have, rounded down.

        None without a limit, or if what was spent is not one Gaussian.
        """
        spent = 0.0 if self.total is None else self.total.mu
        if self.limit is None or spent is None:
            return None
        budget = self.limit.mu
        if not spent < budget:
            return 0.0
        # The factors keep digits that a difference of squares loses; the last one rounds down.
        return math.sqrt(budget - spent) * math.sqrt(budget + spent) * (1 - 1e-12)

    def shown(self, delta: float | None) -> AllRuns:
        """Return what a report says of the account."""
        mu = epsilon = None
        sentence = f"{counted(len(self.charges), 'run')} on this machine about {self.population!r}"
        if self.total is not None:
            mu = self.total.mu
            words = [] if mu is None else [f"mu {up(mu, 5)}"]
            epsilon = None if delta is None else epsilon_of(self.total, delta)
            if epsilon is not None:
                words.insert(0, f"epsilon {up(epsilon, 5)}")
            elif delta is not None:
                words.insert(0, f"no epsilon at delta {delta:g}, which is below what is stated")
            sentence = f"{', '.join(words)}: {sentence}" if words else sentence
            kinds = {charge.entry.is_selection for charge in self.charges if charge.hides}
            sentence += "".join(text for kind, text in _HIDDEN.items() if kind in kinds)
        if self.status == "not-private":
            simulations = counted(self.unbounded, "run")
            sentence = f"NOT PRIVATE: {simulations} without secret noise. The others: {sentence}"
        elif self.unbounded:
            sentence += f", of which {counted(self.unbounded, 'simulation')} not added"
        if self.lost:
            sentence += "; an earlier log of runs is lost, so there may be more"
        return AllRuns(self.population, self.status, len(self.charges), mu, epsilon, sentence)

    def to_dict(self, delta: float | None = None) -> dict[str, Any]:
        """Return the account as plain values, ready for JSON; ``delta`` None takes its own."""
        chosen = self.delta if delta is None else delta
        return asdict(self.shown(chosen)) | {
            "delta": chosen,
            "without_bound": self.unbounded,
            "limit": None if self.limit is None else asdict(self.limit),
            "mu_left": self.left(),
            "passed": self.passed,
            "runs": [charge.to_dict() for charge in self.charges],
        }


def all_runs(facts: Mapping[str, Any], delta: float) -> AllRuns | None:
    """Return what all runs about the people of a run with these facts cost; None if unnamed."""
    name = facts.get("population_name")
    try:
        run = charged_as(facts)
        entries = log.lines_of()
        # A run that named nobody may be in the book as the parent of a fork.
        name = name or next((e.population for e in entries if e.run == run and e.population), None)
        if name is None:
            return None
        account = _account(entries, refuse_population(name))
        if any(charge.entry.run == run for charge in account.charges):
            return account.shown(delta)
        sentence = f"unknown: this machine's log has no charge of this run about {name!r}"
        return AllRuns(name, "unknown", len(account.charges), None, None, sentence)
    except ConfigError as error:
        sentence = f"unknown: {error}".rstrip(".")
        return AllRuns(str(name or "")[:LONGEST_NAME], "unknown", 0, None, None, sentence)


def charged_as(facts: Mapping[str, Any]) -> str:
    """Return the name under which people pay for a run: its own, or that of its selection."""
    named = facts.get("selection", facts)
    name = named.get("id", facts["run_id"])
    if not isinstance(name, str) or not log.RUN_ID.fullmatch(name):
        raise ConfigError("selection: the ledger does not name it.")
    return name


def counted(number: int, noun: str) -> str:
    """Return "1 run", "2 runs" and the like."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def composed(charges: Iterable[Charge]) -> ComposedGuarantee | None:
    """Return what these runs cost together, None if no run has a bound."""
    releases = tuple(release for charge in charges for release in charge.releases)
    return ComposedGuarantee(releases) if releases else None


def epsilon_of(cost: ComposedGuarantee, delta: float) -> float | None:
    """Return the epsilon of a cost at a delta; None if no epsilon has it."""
    try:
        return cost.epsilon(delta)
    except ConfigError:
        return None


def accounts() -> list[Account]:
    """Return what every population has spent, by name; errors are those of ``log.lines_of``."""
    return sorted(_book(log.lines_of()).values(), key=lambda account: account.population)


def account(population: str) -> Account:
    """Return what a population has spent, nothing if no run named it; see ``accounts``."""
    return _account(log.lines_of(), population)


def _account(entries: Sequence[Entry], population: str) -> Account:
    lost = bool(entries) and entries[0].event == "lost"
    return _book(entries).get(spoken(population)) or Account(population, (), None, lost)


def _book(entries: Sequence[Entry]) -> dict[str, Account]:
    """Map each population, as it is spoken, to its account."""
    charges: dict[str, dict[str, Charge]] = {}
    limits: dict[str, Limit] = {}
    names: dict[str, str] = {}
    runs_of, lost = lives(entries), bool(entries) and entries[0].event == "lost"
    for entry in entries:
        if entry.population is None:
            continue
        people = spoken(entry.population)
        names[people] = min(entry.population, names.get(people, entry.population))
        runs = charges.setdefault(people, {})
        if entry.event == "limit":
            limits[people] = Limit(entry.epsilon or 0.0, entry.delta or 0.0)
        # A run that is named twice costs the most that any line says.
        elif entry.run not in runs or _price(entry) > _price(runs[entry.run].entry):
            runs[entry.run] = Charge(entry, runs_of[entry.run])
    return {
        people: Account(names[people], tuple(runs.values()), limits.get(people), lost)
        for people, runs in charges.items()
    }


def _price(entry: Entry) -> tuple[float, bool]:
    """Return what tells which of two lines charges a run more; without amplification is more."""
    return entry.mu or 0.0, entry.sampled is None


def enter(stands: Entry, plan: PrivacyPlan, facts: Mapping[str, Any], folder: Path) -> None:
    """Write in the log, inside of ``log.writing``, where a run stands and whom it costs what.

    A run that is about to begin is refused beyond the limit of its population. One that comes from
    elsewhere is charged first, because it may be spent, and refused if it has rounds to go.

    Args:
        stands: "begun", "adopted" or "charged", with what is committed, and the head of the ledger
            after that; "" if this machine cannot tell whether there is more.
        plan: plan of the run.
        facts: facts of its ledger.
        folder: its folder.

    Raises:
        BudgetExceededError: the run would pass the limit of its population.
        ConfigError: its population is another spelling of one in the book; or the log is damaged.
        StorageError: the disk refused.
    """
    event, run, people = stands.event, stands.run, facts.get("population_name")
    mu, sampled = None, None
    if (part_of := facts.get("selection")) is not None:
        # Its people paid for the whole selection when that began here, or pay for it now.
        if event == "begun" and not log.is_apart():
            raise ConfigError("selection: a run of one is begun by the selection alone.")
        mu = selected_of(part_of["cost"]).mu
        run, people = (run, None) if event == "begun" else (charged_as(facts), people)
        sampled = None if event == "begun" else [dict(part_of["cost"])]
    elif facts["seed"] is None and plan.noise_multiplier > 0:
        mu = plan.unsampled_guarantee().mu
        sampled = _amplified(plan.guarantee())
    entry = replace(
        stands,
        run=run,
        at=log.now(),
        population=people,
        mu=mu,
        delta=facts.get("delta"),
        parent=facts.get("fork_of"),
        planned=plan.rounds,
        folder=log.shown(folder),
        sampled=sampled,
    )
    if entry.population is None:
        log.append(entry)
        return
    before = account(entry.population)
    new = [*_missing_parent(facts, entry, before), entry]
    if event == "begun":
        _refuse_alike(before, entry.population)
        _refuse_beyond_limit(before, new)
    log.append(*new)
    is_new = all(charge.entry.run != entry.run for charge in before.charges)
    if is_new and entry.rounds < plan.rounds and "closed" not in facts:
        _refuse_beyond_limit(before, new)


def enter_selection(entry: Entry) -> None:
    """Charge a selection before its first run, as ``enter`` does; inside of ``log.writing``.

    Raises:
        BudgetExceededError: it would pass the limit of its population.
        ConfigError: another selection about the same people has not ended. If it could be left
            without a charge, a look at its runs would decide which selection counts.
    """
    before = account(entry.population or "")
    _refuse_alike(before, before.population)
    open_ones = [c for c in before.charges if c.entry.is_selection and c.status == "running"]
    if open_ones and not is_public(before.population):
        raise ConfigError(
            f"a selection about {before.population!r} has not ended, in "
            f"{open_ones[0].entry.folder}: resume it there, or give it up by privpart tune --out "
            f"{open_ones[0].entry.folder} --abandon, which charges all of its trainings."
        )
    _refuse_beyond_limit(before, [entry])
    log.append(entry)


def _amplified(run: Guarantee | Sampled) -> list[dict[str, int | float]] | None:
    """Return what an amplified run costs, as values; None if no proof says that it composes."""
    if isinstance(run, Guarantee | EstimatedGuarantee):
        return None
    releases = plain(releases_of(run))
    return releases if samplers(read_releases(releases)) else None


def set_limit(population: str, limit: Limit, *, looser: bool = False) -> Account:
    """Set the limit of a population, of whom there need not be a run yet; return its account.

    Raises:
        ConfigError: the limit is above the one that holds and ``looser`` is not given, the name is
            another spelling of one in the book, or the log is damaged, foreign or busy.
        StorageError: the disk refused.
    """
    values = {"population": refuse_population(population), **asdict(limit)}
    with log.writing():
        before = account(population)
        _refuse_alike(before, population)
        old = before.limit
        if old is not None and limit.mu > old.mu and not looser:
            raise ConfigError(
                f"limit_epsilon={limit.epsilon:g}: with delta={limit.delta:g} it is above the "
                f"limit of {population!r}, {old}. To raise it, add --raise-limit; the log keeps "
                "the old one."
            )
        log.append(Entry(event="limit", at=log.now(), **values))
    return replace(before, limit=limit)


def state(population: str, releases: Sequence[Release], by: str) -> Account:
    """Charge a population for somebody else's release, as somebody states; return its account.

    Raises:
        ConfigError: the name is another spelling of one in the book, nobody is named, there are
            more releases than a line of the log holds, or the log is damaged, foreign or busy.
        StorageError: the disk refused.
    """
    entry = Entry(
        event="stated",
        run=secrets.token_hex(16),
        at=log.now(),
        population=refuse_population(population),
        by=by,
        sampled=plain(releases),
    )
    with log.writing():
        _refuse_alike(account(population), population)
        log.append(entry)
    return account(population)


def _missing_parent(facts: Mapping[str, Any], entry: Entry, before: Account) -> list[Entry]:
    """Return a charge for the run that another was forked from, if the population has none.

    The parent may be of another machine, or about people of another name. Its ancestors' cost
    cannot be told from its own and stays in it.
    """
    charges = [c for c in before.charges if c.entry.run == entry.parent]
    # One that was closed unspent here was continued elsewhere, if a run came from its model.
    if entry.parent is None or any(not charge.life.is_free for charge in charges):
        return []
    if not isinstance(entry.parent, str) or "earlier" not in facts:
        raise ConfigError(f"run {entry.run}: its ledger does not say what its parent cost.")
    cost = earlier_runs(facts["earlier"])
    return [
        Entry(
            event="charged",
            run=entry.parent,
            population=entry.population,
            mu=cost.unhidden.mu if cost.unhidden else None,
            sampled=plain(cost.releases) if cost.mu is None else None,
            at=entry.at,
        )
    ]


def _refuse_alike(before: Account, name: str) -> None:
    """Check that a new name is not another spelling of one in the book."""
    if name not in {before.population, *(c.entry.population for c in before.charges)}:
        raise ConfigError(
            f"population={name!r}: the budget book has {before.population!r}, which differs only "
            "in case, spaces, hyphens or the like. Use that name for the same people; for others, "
            "a name that nobody could take for it."
        )


def _refuse_beyond_limit(before: Account, new: Sequence[Entry]) -> None:
    if (limit := before.limit) is None:
        return
    bound = f"the limit of population {before.population!r}, {limit}"
    if new[-1].mu is None:
        raise BudgetExceededError(
            f"a run with noise from a seed, or without noise, has no bound and would pass {bound}. "
            "Simulate on data of nobody, under a population of another name."
        )
    spent = [charge for charge in before.charges if not charge.life.is_free]
    alone = [Charge(entry, Life()) for entry in new]
    if not limit.allows(composed([*spent, *alone])):
        costs = [composed(part) for part in (spent, alone, [*spent, *alone])]
        told = [epsilon_of(cost, limit.delta) if cost else 0.0 for cost in costs]
        words = ["no epsilon" if epsilon is None else up(epsilon) for epsilon in told]
        raise BudgetExceededError(
            f"this run would pass {bound}: the runs so far have spent {words[0]}, this one costs "
            f"{words[1]}, and together they cost {words[2]}. Plan more noise or fewer rounds, or "
            "see `privpart budget`."
        )
