"""Loop: ``fit``, the only round loop, and the record of a round that its callbacks get.

The loop does no accounting: the guarantee follows from the plan, and the server enforces the plan.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.engines.canaries import CanaryClients, others_and_canaries
from privpart.engines.embedded import EmbeddedEngine
from privpart.engines.protocol import Abilities, Engine
from privpart.messages import ClientId, ClientUpdate, CohortSum, Reason, RoundTask
from privpart.noise.cohorts import SampledCohorts, distinct_ids
from privpart.server import RoundCounts, Server, is_unchanged, methods_of


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One finished round.

    Attributes:
        round: from 0; -1 of the evaluation before the first round.
        counts: received, counted and refused updates; not covered by the guarantee.
        metrics: what ``evaluate`` returned, by name; empty if it did not run.
        not_asked: number of clients of the cohort that the limits forbade to ask, by reason; not
            covered by the guarantee.
        stopped: reason of the ``StopTraining`` that ended the training; None if none did.
    """

    round: int
    counts: RoundCounts
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    not_asked: Mapping[Reason, int] = field(default_factory=dict, hash=False)
    stopped: str | None = None

    @property
    def metric(self) -> float | None:
        """The first of the metrics; None if nothing was evaluated."""
        return next(iter(self.metrics.values()), None)

    def missing(self) -> str:
        """Return why fewer clients counted than the cohort has, or updates were refused; or ""."""
        counts = self.counts
        silent = max(0, counts.asked - counts.admitted - counts.refused_clients)
        parts = [
            _listed(sum(self.not_asked.values()), "not asked", self.not_asked),
            _listed(counts.refused, "refused", counts.refusals),
            _listed(silent, "without an answer", {}),
        ]
        return "; ".join(filter(None, parts))


Callback = Callable[[RoundRecord], None]
Heard = Callable[[int, int, int], None]
"""Gets round, clients whose updates arrived so far, and clients asked; for whoever waits."""
Evaluate = Callable[[Tensor], float | Mapping[str, float]]
"""Maps the trainable part, shape (d,), to a number or to several by name, from public data."""


class StopTraining(Exception):  # noqa: N818  a request, and no error
    """Raised by a callback, or by a metric on public data, it ends the training after a round.

    The round is committed, and all callbacks get its record. Ending early does not lower what the
    plan costs. To decide by metrics on public data, by noised metrics or by released models costs
    nothing; by anything else about clients, such as ``RoundRecord.counts``, it is a release that
    no guarantee covers.
    """


class CohortTooSmallError(RuntimeError):
    """A round had fewer well-formed updates than the plan's minimum; nothing was released.

    The server has not changed: ``fit`` may be called again.
    """


class CohortRefusedError(CohortTooSmallError):
    """The updates of most clients that were asked in a round were refused; nothing was released.

    To go on would divide the model as if all had come.
    """


class DivergedError(RuntimeError):
    """Most updates of a round were not finite, and counted as zeros.

    The round is committed and stays accounted; no later one was run. That a run stops here, and
    when, follows from clients' data without noise: no guarantee covers it. What was released keeps
    its guarantee.
    """


def _listed(number: int, what: str, reasons: Mapping[Reason, int]) -> str:
    """Return a number with its reasons: "3 refused (2 malformed, 1 separation)"; "" for 0."""
    if not number:
        return ""
    often_first = sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))
    listed = ", ".join(f"{count} {reason}" for reason, count in often_first)
    return f"{number} {what}" + (f" ({listed})" if listed else "")


_OWN = methods_of(EmbeddedEngine)


def own_engine(engine: object) -> str:
    """Return the name of this package's engine that sums clients, "" for any other one.

    Of its sums alone a report says that the clipping is enforced.
    """
    return EmbeddedEngine.__name__ if is_unchanged(engine, EmbeddedEngine, _OWN) else ""


def fit(
    server: Server,
    engine: Engine,
    cohorts: Sequence[Sequence[ClientId]],
    *,
    canaries: CanaryClients | None = None,
    commit: Callable[[Server, RoundCounts], None] | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    evaluate_at: Collection[int] = (),
    callbacks: Sequence[Callback] = (),
    untold: RoundCounts | None = None,
    heard: Heard | None = None,
    stop_if_diverged: bool = True,
) -> list[RoundRecord]:
    """Run the rounds from ``server.round`` to the last cohort and return a record of each.

    ``StopTraining`` of ``evaluate`` or a callback ends them; the last record has its reason.

    Args:
        server: owns the model, the noise and the participation limits.
        engine: trains the clients.
        cohorts: ids of the clients to ask in each round, from round 0 even when a run is resumed;
            chosen without looking at data. Ids are whole numbers or strings, see ``ClientId``;
            NumPy's become Python's. Clients that have reached their limit are not asked. If the
            plan samples, they are the ``SampledCohorts`` of this plan and this server's source.
        canaries: an auditor's clients, who are in the ``cohorts_with_canaries``; none by default.
        commit: makes a round durable, for instance ``RunFolder.commit``. It is called before
            anything else, inside or outside ``fit``, sees the round's model.
        evaluate: returns one or several metrics of the trainable part, from public data.
        evaluate_every: rounds between evaluations, >= 1; None evaluates after the last round only.
        evaluate_at: numbers of rounds done after which it evaluates as well; 0 is before training.
        callbacks: called after each committed round, and an evaluation before training, in order.
        untold: counts of the last committed round, if a crash kept its record from callbacks, who
            get it first; None if they have it.
        heard: called within a round as updates arrive; who and how many came is not for release.
        stop_if_diverged: whether to end after a round in which most updates were not finite, so
            that no more privacy is spent on noise alone.

    Raises:
        ConfigError: more cohorts than planned rounds, a cohort with something that is not an id or
            with one client twice (both before the first round), cohorts that the plan's sampling
            did not draw, or an engine that may be vectorized where clients are sampled.
        CohortTooSmallError, CohortRefusedError: nothing of a round was released.
        DivergedError: after a round was committed, if most of its updates were not finite.
    """
    at = _due(len(cohorts), evaluate, evaluate_every, evaluate_at)
    _refuse_cohorts(server, engine, cohorts)

    def tell(counts: RoundCounts, not_asked: Iterable[Reason] = ()) -> RoundRecord:
        measure = evaluate if server.round in at else None
        record = RoundRecord(server.round - 1, counts, not_asked=Counter(not_asked))
        return _told(record, measure, server.parameters, callbacks)

    if server.round == 0 and 0 in at:
        untold = RoundCounts(0, 0, 0)
    records = [] if untold is None else [tell(untold)]
    # every cohort was checked above: a run must not stop halfway over an id
    for number in range(server.round, len(cohorts)):
        if records and records[-1].stopped is not None:
            break
        cohort = _ids_of(number, cohorts[number])
        not_asked = server.ineligible(cohort)
        counts = _run_round(server, engine, cohort, not_asked, canaries, commit, heard)
        records.append(tell(counts, not_asked.values()))
        goes_on = records[-1].stopped is None
        if stop_if_diverged and goes_on and 2 * counts.not_finite > counts.counted:
            raise _diverged(server, records[-1])
    return records


def _due(
    rounds: int, evaluate: Evaluate | None, every: int | None, at: Collection[int]
) -> frozenset[int]:
    """Return the numbers of rounds done after which to evaluate, the last one among them."""
    for name, value in (("evaluate_every", every), ("evaluate_at", at or None)):
        if evaluate is None and value is not None:
            raise ConfigError(f"{name}={value}: there is no evaluate to call; leave it out.")
    for number in at:
        checks.count("evaluate_at", number, minimum=0)
        if number > rounds:
            raise ConfigError(f"evaluate_at={number}: must be at most {rounds}, all rounds.")
    step = rounds + 1 if every is None else checks.count("evaluate_every", every)
    return frozenset({*at, *range(step, rounds, step), rounds})


def _told(
    record: RoundRecord, evaluate: Evaluate | None, model: Tensor, callbacks: Sequence[Callback]
) -> RoundRecord:
    """Return a record with its metrics, after each callback got it, and whether one stopped."""
    if evaluate is not None:
        try:
            values = evaluate(model)
            metrics = values if isinstance(values, Mapping) else {"metric": values}
            record = replace(record, metrics=metrics)
        except StopTraining as request:
            record = replace(record, stopped=str(request))
    for callback in callbacks:
        try:
            callback(record)
        except StopTraining as request:
            if record.stopped is None:
                record = replace(record, stopped=str(request))
    return record


def _refuse_cohorts(server: Server, engine: Engine, cohorts: Sequence[Sequence[ClientId]]) -> None:
    """Refuse cohorts of no plan, and ones that its sampling did not draw from the run's key."""
    if len(cohorts) > server.plan.rounds:
        raise ConfigError(f"{len(cohorts)} cohorts, but the plan has {server.plan.rounds} rounds.")
    for number in range(server.round, len(cohorts)):
        _ids_of(number, cohorts[number])
    if server.plan.sampling is None:
        if isinstance(cohorts, SampledCohorts):
            raise ConfigError("cohorts: are sampled; this plan has no sampling.")
        return
    if not isinstance(cohorts, SampledCohorts):
        raise ConfigError(
            "cohorts: this plan samples who takes part, and its epsilon holds for no other "
            "cohorts. Pass SampledCohorts(plan, ids, server.source), or those of RunFolder.sample."
        )
    if cohorts.source is not server.source or cohorts.plan_hash != server.plan_hash:
        raise ConfigError(
            "cohorts: were drawn for another plan, or from another key than this server's noise."
        )
    if not Abilities.of(engine).each_alone():
        raise ConfigError(
            "engine: may vectorize over clients, and the rounding of one would tell who else was "
            "sampled. Make it with deterministic=True."
        )


def _ids_of(round_: int, cohort: Sequence[object]) -> list[ClientId]:
    """Return the ids of a cohort as Python's int and str, each once.

    Raises:
        ConfigError: it is not a sequence of ids, or it names a client twice.
    """
    try:
        listed = len(cohort) >= 0 and not isinstance(cohort, str | bytes)
    except TypeError:  # a single id, or a generator, which could be read only once
        listed = False
    if not listed:
        raise ConfigError(
            f"cohorts: round {round_} has a {type(cohort).__name__}: must be a sequence of ids. A "
            "cohort of one client is a list with one id."
        )
    try:
        return list(distinct_ids(cohort))
    except ConfigError as error:
        raise ConfigError(f"cohorts: round {round_}: {error}") from None


def _run_round(
    server: Server,
    engine: Engine,
    cohort: Sequence[ClientId],
    not_asked: Mapping[ClientId, Reason],
    canaries: CanaryClients | None,
    commit: Callable[[Server, RoundCounts], None] | None,
    heard: Heard | None,
) -> RoundCounts:
    """Run one round and commit it; halt the server if noise was drawn but not committed."""
    number = server.round
    task = server.task([client for client in cohort if client not in not_asked])
    try:
        counts = _aggregate(server, engine, task, canaries, heard)
        if counts.released and commit is not None:
            commit(server, counts)
    except BaseException as error:
        # If the round has not advanced, no noise was drawn, and the round may be tried again.
        if server.round != number:
            server.halt(f"round {number} was not committed ({type(error).__name__})")
        raise
    if not counts.released:
        record = RoundRecord(number, counts, not_asked=Counter(not_asked.values()))
        raise _not_released(record, server.plan.minimum_cohort)
    return counts


Answer = TypeVar("Answer", ClientUpdate, CohortSum)


def _counted(answers: Iterable[Answer], heard: Heard | None, task: RoundTask) -> Iterator[Answer]:
    done = 0
    for answer in answers:
        done += len(answer.clients) if isinstance(answer, CohortSum) else 1
        if heard is not None:
            heard(task.round, done, len(task.clients))
        yield answer


def _aggregate(
    server: Server,
    engine: Engine,
    task: RoundTask,
    canaries: CanaryClients | None,
    heard: Heard | None,
) -> RoundCounts:
    asked, start = task.clients, server.parameters
    names = {own_engine(engine)}  # before any of its code runs, which might change what it is
    abilities = Abilities.of(engine)
    beside: Iterable[ClientUpdate] = ()
    if canaries is not None:
        task, beside = others_and_canaries(task, canaries)
    elif abilities.secure_sums is not None:
        return server.run_round((), secure=abilities.secure_sums(task, start), asked=asked)
    sums = abilities.sums(task, start) if server.plan.sampling is None else None
    if sums is None:
        answers = _counted(engine.run(task, start), heard, task)
        return server.run_round(chain(answers, beside), asked=asked)
    if canaries is not None and abilities.sums_of is not None:
        # a clip that is not the server's is audited, too
        sums, beside = chain(sums, abilities.sums_of(task, beside)), ()

    def named() -> Iterator[CohortSum]:
        for part in _counted(sums, heard, task):
            # what an engine calls, such as a schedule, may replace a method during the round
            names.add(own_engine(engine))
            yield part
        names.add(own_engine(engine))

    counts = server.run_round(beside, sums=named(), asked=asked)
    if not counts.summed:
        return counts
    server.last_counts = replace(counts, summed_by=names.pop() if len(names) == 1 else "")
    return server.last_counts


def _not_released(record: RoundRecord, minimum: int) -> CohortTooSmallError:
    """Return the error of a round whose updates were too few, or mostly refused."""
    counts, missing = record.counts, record.missing() or "nobody was asked"
    if counts.mostly_refused:
        return CohortRefusedError(
            f"round {record.round}: most of the {counts.asked} clients that were asked were "
            f"refused: {missing}. Nothing was released. Correct what they send, then resume."
        )
    return CohortTooSmallError(
        f"round {record.round}: fewer than {minimum} well-formed updates among the "
        f"{counts.received} received: {missing}. Nothing was released; try again later."
    )


def _diverged(server: Server, record: RoundRecord) -> DivergedError:
    """Return the error of a round of which most updates were not finite."""
    how_many = f"{record.counts.not_finite} of the {record.counts.counted}"
    # how many took part in a sampled round is secret
    return DivergedError(
        f"round {record.round}: {'most' if server.plan.sampling else how_many} updates were not "
        "finite (NaN or infinity) and counted as zeros. The round is committed, and stays "
        "accounted; no later one was run. Look at the learning rate, the clients' input data, and "
        "half precision; then begin a new run. This sentence, and that the run stops, are not "
        "covered by the guarantee: not for release."
    )
