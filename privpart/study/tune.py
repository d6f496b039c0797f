"""Tune: a private selection among candidates, from a TOML file to the run that it releases.

Candidates are changed copies of one plan: a list, points of a space, or both, or the arms,
mechanisms and points of a study file. They become one fixed list before anything is drawn, and all
get the noise with which the whole selection meets the target. A secret number of trainings, each of
a candidate that is drawn anew, run one after the other; the one with the best score is released
(``privpart.run.selection``, ``accounting.selection``). No score changes the list.
"""

import contextlib
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import to_json

from accounting import Guarantee, SelectedGuarantee, checks, gaussian, most_mu
from accounting.checks import ConfigError
from accounting.guarantee import mu_upper
from accounting.report import down, up
from accounting.selection import Repetitions, fields_of, quantile, repetitions_of, selected_of
from privpart.engines.options import EngineOptions
from privpart.loop import RoundRecord, StopTraining
from privpart.noise.source import SeededSource
from privpart.run.folder import RunFolder, holds_a_run
from privpart.run.noised_metrics import noised_metrics
from privpart.run.selection import NOISED, RUN, Selection, Terms, Trial
from privpart.study.cell import BasePlan, Cell, Changes, FileTable, checked, read_file
from privpart.study.runner import refuse_unfit
from privpart.study.study_file import Range, StudyFile, Trials
from privpart.training.plan_file import PlanFile
from privpart.training.private_metrics import released_metrics
from privpart.training.train import Run, begin, engine_options, passed_objects, resume_run
from privpart.training.training import Own, Training, population_name, training

_SHARE = 0.95
_MOST_CANDIDATES = 1_000
_REHEARSED = 6
"""Rounds that are timed; the first two also check the method of the clients."""
_OTHER_WAYS = (
    "other ways    choose on public or proxy data, for free (privpart sweep, privpart frontier); "
    "or by noised metrics of users who never train, who pay a budget of their own"
)
_BETTER = {"accuracy": "higher", "noised:accuracy": "higher", "noised:loss": "lower"}
"""Scores of which everybody knows which end is the better one."""
_SET_HERE = ("privacy.noise_multiplier", "privacy.target_epsilon")
"""Fields of the plan that the selection determines for all candidates."""
_MAY_DIFFER = {
    "data": {"clients_per_round"},
    "privacy": {
        "rounds",
        "clip_norm",
        "noise_multiplier",
        "target_epsilon",
        "report_goal",
        "mechanism",
        "adaptive_clipping",
    },
}
"""Keys of the tables [data] and [privacy] in which candidates may differ."""


class Space(FileTable):
    """Table ``[space]``: ``points`` of the ``fields``, each a range or a list of choices."""

    points: int = Field(ge=1, le=_MOST_CANDIDATES)
    seed: int = 0
    fields: dict[str, Range | list[Any]] = Field(min_length=1)


class TuneFile(FileTable):
    """A whole selection, as people write it; docs/how-to/tune.md shows one.

    ``runs`` is the distribution of the number of trainings, as of ``--best-of``. ``score`` is
    "accuracy", on the test examples of a built-in task, "metric", the plan's own, or "noised:NAME",
    the newest value of a metric of [privacy.metrics]. ``seconds`` of one training are measured if
    they are missing.
    """

    tune_schema: Literal["privpart/tune/1"] = Field(alias="schema")
    plan: str | dict[str, Any] | None = None
    study: str | None = None
    candidates: dict[str, dict[str, Any]] = Field(default_factory=dict)
    space: Space | None = None
    target_epsilon: float = Field(gt=0)
    runs: float | str = 10.0
    score: str = "accuracy"
    better: Literal["higher", "lower"] | None = None
    seconds: float | None = Field(None, gt=0)
    engine: dict[str, Any] = Field(default_factory=dict)

    @property
    def noised(self) -> str:
        """Name of the noised metric that is the score; "" if it is another one."""
        kind, _, name = self.score.partition(":")
        return name if kind == NOISED else ""

    @property
    def is_lower_better(self) -> bool:
        """Whether the lowest score wins."""
        return (self.better or _BETTER.get(self.score, "higher")) == "lower"

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.plan is None) == (self.study is None):
            raise ConfigError("needs either plan or study, whose arms are then the candidates.")
        if self.study is not None and (self.candidates or self.space):
            raise ConfigError("study: has arms and a space of its own; leave candidates and space.")
        if self.study is None and not (self.candidates or self.space):
            raise ConfigError("candidates: there are none; list them, or give a [space].")
        return self


@dataclass(frozen=True, slots=True)
class Candidate:
    """A name for people, and a whole plan with its noise."""

    name: str
    plan: PlanFile


@dataclass(frozen=True)
class Tune:
    """A tune file with its candidates.

    Attributes:
        mu: of one training, the greatest with which the selection meets the target.
        objects: in place of what the plans name.
    """

    file: TuneFile
    candidates: tuple[Candidate, ...]
    mu: float
    objects: Own

    @cached_property
    def repetitions(self) -> Repetitions:
        """The distribution of the number of trainings."""
        return _repetitions(self.file)

    @cached_property
    def cost(self) -> SelectedGuarantee:
        """What the whole selection costs."""
        # By its numbers, so that reports find what was computed of it.
        return selected_of(fields_of(SelectedGuarantee(Guarantee(self.mu), self.repetitions)))

    @property
    def delta(self) -> float:
        """At which the target holds."""
        return self.candidates[0].plan.privacy.delta

    @cached_property
    def options(self) -> EngineOptions:
        """How clients are computed."""
        return engine_options(self.file.engine)

    @cached_property
    def codes(self) -> tuple[dict[str, Any] | None, ...]:
        """What ``PlanFile.code`` returned of each candidate, before the first training."""
        return tuple(candidate.plan.code() for candidate in self.candidates)

    @cached_property
    def hash(self) -> str:
        """SHA-256, in hex, of all that the selection depends on, one's own code included."""
        pairs = zip(self.candidates, self.codes, strict=True)
        plans = [one.plan.context(code) for one, code in pairs]
        content = [self.file.model_dump_json(exclude={"plan", "study"}), plans]
        content.append(json.dumps(passed_objects(self.objects)))
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def terms(self, setup: Training) -> Terms:
        """Return what is public of the selection; ``setup`` is a candidate put together."""
        return Terms(
            hash=self.hash,
            cost=fields_of(self.cost),
            candidates=len(self.candidates),
            score=self.file.score,
            is_public=self.file.score == "accuracy" or bool(self.file.noised),
            population=population_name(setup.plan, setup.ids),
            delta=self.delta,
        )


def read_tune(path: str | Path) -> Tune:
    """Return the selection in a TOML file, after checking every candidate's plan.

    Raises:
        ConfigError: no such file, not valid TOML, unknown fields or values out of range; candidates
            that differ in who takes part, or how often; a score on data that are not public.
    """
    path = Path(path)
    file, base = read_file(path, TuneFile, "tune file")
    if file.study is None:
        return _tune(file, base, None)
    study, base = read_file(path.parent / file.study, StudyFile, "study")
    return _tune(file, base, None, study)


def tune_of(tables: Mapping[str, Any], objects: Own) -> Tune:
    """Return the selection in the tables of a tune file, for Python; raises as ``read_tune``."""
    values = {"schema": "privpart/tune/1", **tables}
    if not isinstance(plan := values.get("plan"), Mapping):
        raise ConfigError("plan: must be the tables of a plan; pass a tune file by its path.")
    plan = {"schema": "privpart/plan/1", "model": {}, "server": {}, **plan}
    content = to_json({**values, "plan": plan}, fallback=lambda value: value.item())
    file = checked(content, TuneFile, "the tables are not a valid tune file")
    return _tune(file, BasePlan(plan), objects)


def _tune(
    file: TuneFile, base: BasePlan, objects: Own | None, study: StudyFile | None = None
) -> Tune:
    changes = _listed(file) if study is None else _of_study(study)
    if len(changes) > _MOST_CANDIDATES:
        raise ConfigError(f"candidates: are {len(changes)}; must be at most {_MOST_CANDIDATES}.")
    repetitions = _repetitions(file)
    in_python, objects = objects is not None, objects or Own()

    def planned(name: str, noise: float) -> PlanFile:
        parts = [*changes[name], {"privacy.noise_multiplier": noise}]
        return base.plan(parts, f"candidate {name}", in_python)

    plans = {name: planned(name, 1.0) for name in changes}
    _refuse_misfits(plans)
    first, *_ = plans.values()
    _refuse_score(file, first, objects)
    target, delta = file.target_epsilon, first.privacy.delta
    mu = most_mu(repetitions, target_epsilon=target, delta=delta)
    squared, hashes = dict[str, float](), dict[str, str]()
    noised = [Candidate(n, planned(n, _noise(plan, mu, squared))) for n, plan in plans.items()]
    for one in noised:
        if (other := hashes.setdefault(one.plan.hash, one.name)) != one.name:
            raise ConfigError(f"candidate {one.name}: is the same plan as candidate {other}.")
    return Tune(file, tuple(noised), mu, objects)


def _repetitions(file: TuneFile) -> Repetitions:
    try:
        return repetitions_of(str(file.runs), "runs")
    except ConfigError as error:
        reason = str(error).removeprefix(f"runs={file.runs}: ")
        raise ConfigError(f"runs = {file.runs}: {reason}") from None


def _listed(file: TuneFile) -> dict[str, tuple[Changes, ...]]:
    """Return name -> changes of each candidate of a tune file."""
    points: list[Changes] = [{}]
    if (space := file.space) is not None:
        drawn = Trials(trials=space.points, seed=space.seed, seeds=[0], space=space.fields)
        points = drawn.points()
    named = file.candidates or {"point": {}}
    for name, changes in {**named, "of [space]": {} if space is None else space.fields}.items():
        for key in changes:
            if key in _SET_HERE:
                raise ConfigError(
                    f"candidate {name}: {key}: every candidate gets the noise with which the whole "
                    "selection meets target_epsilon; leave it out."
                )
            if space is not None and changes is not space.fields and key in space.fields:
                raise ConfigError(f"candidate {name}: {key}: [space] changes it, too; leave one.")
    return {
        name if space is None else f"{name} {number}": (changes, point)
        for name, changes in named.items()
        for number, point in enumerate(points)
    }


def _of_study(study: StudyFile) -> dict[str, tuple[Changes, ...]]:
    """Return the arms of a study with each mechanism and each point of its tuning space."""
    if study.freeze is not None:
        raise ConfigError("study: [freeze] searches for its arms; name them in [arms].")
    held_out = study.tuning.held_out
    kept: Changes = {"data.held_out": held_out} if held_out else {}
    return {
        f"{arm} {name} {number}": (changes, {"privacy.mechanism": mechanism}, point, kept)
        for arm, changes in study.arms.items()
        for name, mechanism in study.mechanisms.items()
        for number, point in enumerate(study.tuning.points())
    }


def _refuse_misfits(plans: Mapping[str, PlanFile]) -> None:
    """Refuse candidates that no selection among runs of one population covers."""
    first, *_ = plans.values()
    for name, plan in plans.items():
        p = plan.privacy
        for key, present, why in (
            ("privacy.sampling", p.sampling, "noise is found for a mu, which it has not"),
            ("privacy.round_seconds", p.round_seconds, "no round is released before the end"),
            ("select", plan.select, "the server sees what clients select in every training"),
            ("canaries", plan.canaries, "an audit needs a run of its own"),
        ):
            if present:
                raise ConfigError(f"candidate {name}: {key}: {why}; leave it out.")
        for table, allowed in _MAY_DIFFER.items():
            same, other = (getattr(x, table).model_dump(exclude=allowed) for x in (first, plan))
            if differ := sorted(key for key in same if same[key] != other[key]):
                raise ConfigError(
                    f"candidate {name}: has another {table}.{differ[0]} than the first. All must "
                    "be about the same people, as often; candidates may differ in the rest."
                )


def _refuse_score(file: TuneFile, plan: PlanFile, objects: Own) -> None:
    """Refuse a score that reads private data, or that is not there."""
    own = plan.data.metric is not None or objects.metric is not None
    table = plan.privacy.metrics
    names = {} if table is None else table.by_name()
    checks.refuse_first(
        {
            f"score={file.score}: the plan has no such measure in [privacy.metrics], whose noised "
            "mean would be the score.": file.noised and file.noised not in names,
            f'score={file.score}: must be "accuracy", on the test examples of a built-in task, '
            '"metric", the plan\'s own (data.metric), or "noised:accuracy" and the like, a metric '
            "of [privacy.metrics].": not file.noised and file.score not in ("accuracy", "metric"),
            f'better="{file.better}": would release the worst model by {file.score}; leave it '
            "out.": file.better not in (None, _BETTER.get(file.score, file.better)),
            'score="metric": the plan has none; name a function in data.metric.': (
                file.score == "metric" and not own
            ),
            'score="accuracy": is that on the public test examples of a built-in task. On users\' '
            "data, without noise, each score would be a release that nothing here pays for: "
            "measure on public or proxy data by a metric of your own (data.metric, score = "
            '"metric").': file.score == "accuracy" and (plan.data.task is None or own),
        }
    )


def _noise(plan: PlanFile, mu: float, squared: dict[str, float]) -> float:
    """Return the least noise multiplier with which a training costs at most ``mu``.

    ``squared`` keeps sensitivities, because a mechanism that is fitted takes seconds.
    """
    key = plan.model_dump_json(include={"privacy", "schedule", "model"})
    if key not in squared:
        squared[key] = plan.mechanism().sensitivity(plan.participation()).squared
    noise = math.sqrt(squared[key]) / mu
    while mu_upper(squared[key], noise) > mu:
        noise = math.nextafter(noise * (1 + 1e-15), math.inf)
    return noise


@dataclass(frozen=True, slots=True)
class Bill:
    """What a selection takes, before its first training.

    Attributes:
        epsilon: of everything; ``delta``, ``mu`` and ``epsilon_of_one`` are of one training.
        noise: least and greatest noise multiplier of the candidates.
        expected: trainings on average; at most ``most`` in 95 % of all cases.
        seconds: of one training; ``is_timed`` if a rehearsal measured them.
        counted: pairs of a number of trainings, and the mu that each may have if all are counted.
    """

    candidates: int
    epsilon: float
    delta: float
    mu: float
    epsilon_of_one: float
    noise: tuple[float, float]
    expected: float
    most: int
    seconds: float
    is_timed: bool
    counted: tuple[tuple[int, float], ...]

    @property
    def cheaper(self) -> int | None:
        """The most trainings that could be counted, and all released, with no more noise each."""
        enough = [count for count, mu in self.counted if mu >= self.mu]
        return max(enough, default=None)


def bill_of(tune: Tune, setup: Training, *, put_together: float = 0.0) -> Bill:
    """Return the bill of a selection.

    Args:
        tune: the selection.
        setup: its first candidate, put together. Unless the file states the seconds of a training,
            some of its rounds are trained with noise from a seed, and thrown away.
        put_together: seconds that it took to put the candidate together.
    """
    seconds = tune.file.seconds
    if seconds is None:
        rounds = statistics.mean(candidate.plan.privacy.rounds for candidate in tune.candidates)
        seconds = put_together + rounds * _seconds_of_a_round(setup)
    noises = [
        float(candidate.plan.privacy.noise_multiplier or 0.0) for candidate in tune.candidates
    ]
    alone = gaussian.mu(tune.file.target_epsilon, tune.delta)
    counts = {len(tune.candidates), math.ceil(tune.repetitions.expected)}
    if (epsilon := tune.cost.epsilon(tune.delta)) > tune.file.target_epsilon * (1 + 1e-5):
        raise ConfigError(
            f"target_epsilon = {tune.file.target_epsilon:g}: so little is accounted for as "
            f"{up(epsilon)}; use a target above that."
        )
    return Bill(
        candidates=len(tune.candidates),
        epsilon=epsilon,
        delta=tune.delta,
        mu=tune.mu,
        epsilon_of_one=Guarantee(tune.mu).epsilon(tune.delta),
        noise=(min(noises), max(noises)),
        expected=tune.repetitions.expected,
        most=quantile(tune.repetitions, _SHARE),
        seconds=seconds,
        is_timed=tune.file.seconds is None,
        counted=tuple((count, alone / math.sqrt(count)) for count in sorted(counts)),
    )


def _seconds_of_a_round(setup: Training) -> float:
    times = [time.monotonic()]

    def watch(_: RoundRecord) -> None:
        times.append(time.monotonic())
        if len(times) > _REHEARSED:
            raise StopTraining

    setup.run(setup.promise(), SeededSource(0), callbacks=[watch], stop_if_diverged=False)
    spans = [after - before for before, after in pairwise(times)]
    return statistics.median(spans[2:] or spans)


def bill_lines(bill: Bill) -> list[str]:
    """Return the bill for people."""
    low, high = (f"{noise:.4g}" for noise in bill.noise)
    hours = [f"{count * bill.seconds / 3600:.3g}" for count in (bill.expected, bill.most)]
    how = "timed" if bill.is_timed else "as stated"
    lines = [
        f"candidates    {bill.candidates}, each as likely in each training",
        f"everything    epsilon {up(bill.epsilon)} at delta {bill.delta:g}",
        f"one training  epsilon {up(bill.epsilon_of_one)}, mu {up(bill.mu)}; noise multiplier "
        + (low if low == high else f"{low} to {high}"),
        f"trainings     {bill.expected:g} on average, at most {bill.most} in 95 % of all cases; "
        "how many is secret",
        f"hours         {hours[0]} on average, {hours[1]} in 95 % of all cases, at "
        f"{bill.seconds:.3g} seconds a training ({how})",
    ]
    for count, mu in bill.counted:
        lines.append(
            f"counting      all of {count} trainings, and releasing what you like of them, would "
            f"leave mu {down(mu)} for each"
        )
    if (cheaper := bill.cheaper) is not None:
        lines.append(
            f"CHEAPER       train {cheaper} candidates once each, with less noise than here: the "
            "budget book adds them up (privpart train, privpart budget)"
        )
    return [*lines, _OTHER_WAYS]


def prepared(tune: Tune) -> tuple[Training, Bill]:
    """Check every candidate as ``privpart train`` would, and return the first with the bill."""
    cells = [Cell({"candidate": c.name}, 0, c.plan) for c in tune.candidates]

    def first() -> Training:
        return training(tune.candidates[0].plan, objects=tune.objects, options=tune.options)

    with _quiet():
        refuse_unfit(cells, tune.options, objects=tune.objects, metrics=True)
        for one in tune.candidates:
            # What it costs, all releases included, is what the selection was accounted for.
            if not one.plan.privacy_plan().unsampled_guarantee().mu <= tune.mu:
                raise ConfigError(
                    f"candidate {one.name}: releases more than the models that its noise was found "
                    "for; leave that out."
                )
        began = time.monotonic()
        setup = first()
        taken = time.monotonic() - began
        # A rehearsal leaves a model behind that was trained.
        timed = setup if tune.file.seconds is not None else first()
        return setup, bill_of(tune, timed, put_together=taken)


def select(tune: Tune, out: Path, setup: Training) -> Path:
    """Run a selection in a folder, from the start or from where it stopped; return the winner's.

    Nothing is shown of the trainings, nor how many there are.

    Raises:
        ConfigError: see ``Selection.open``; or a training cannot be made.
        BudgetExceededError: the selection would pass the limit of its population.
        StorageError, WorkerError: nothing was released; call again.
    """
    with Selection.open(out, tune.terms(setup)) as selection:
        if not selection.is_over:
            for trial in selection.runs():
                selection.refuse_other(trial)
                if trial.path.name not in selection.scores():
                    selection.note(trial, *_trained(tune, selection, trial))
            selection.release()
    return out / RUN


def _trained(tune: Tune, selection: Selection, trial: Trial) -> tuple[str, float]:
    """Train and measure one run of a selection; return its name and its score."""
    plan = tune.candidates[trial.candidate].plan
    # While the selection runs, what was learned of a training must not change a later one.
    if plan.code() != tune.codes[trial.candidate]:
        raise ConfigError(
            "plan: the code that it names changed while the selection runs. Restore it, and give "
            "the same command again."
        )
    path, objects, own = trial.path, tune.objects, {"selection": selection.fact}
    with _quiet(), selection.log():
        if holds_a_run(path):
            run, setup = resume_run(path, plan=plan, objects=objects, options=tune.file.engine)
        else:
            run, setup = begin(plan, path, own=own, objects=objects, options=tune.options)
        with run:
            source = run.source()
            measured = setup.evaluators, setup.model, setup.whole
            callbacks, restore = released_metrics(run, *measured, source, run.restore)
            server, _ = setup.run(
                run.plan,
                source,
                restore=restore,
                commit=run.commit,
                callbacks=callbacks,
                # One that diverges has the lowest score: whether one did is private.
                stop_if_diverged=False,
            )
            score = _score(tune, run, lambda: setup.evaluate(server.parameters))
            return run.facts["run_id"], score


def _score(tune: Tune, run: RunFolder, measure: Callable[[], float]) -> float:
    # A score that fails on a model would otherwise end the selection by what the model learned.
    try:
        name = tune.file.noised
        score = noised_metrics(run.path).score(name) if name else measure()
    except Exception:
        return -math.inf
    return -score if tune.file.is_lower_better else score


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Throw away what trainings print: a line for each would tell how many there were."""
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def tune(
    file: str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    show: Callable[[Bill], None] | None = None,
    **objects: Any,  # noqa: ANN401  fields of Own
) -> Run:
    """Train a secret number of candidates and release the best one, within one epsilon.

    Call it again with the same arguments after a crash. See docs/how-to/tune.md for what is
    guaranteed, and for the files.

    Args:
        file: a tune file, or its tables with a plan's tables under "plan".
        out: folder of the selection; the released run is in ``out / "run"``.
        show: called with the bill before the first training; None prints it on standard error.
        objects: ``module``, ``clients``, ``loss``, ``augment`` and ``metric``, as of ``train``,
            with tables only.

    Raises:
        ConfigError: a file that is not valid; a folder that holds something else.
        BudgetExceededError: the selection would pass the limit of its population.
        StorageError, WorkerError: nothing was released; call again.
    """
    if isinstance(file, Mapping):
        chosen = tune_of(file, Own(**objects))
    elif objects:
        raise ConfigError(f"{min(objects)}: a tune file names its own; pass tables instead.")
    else:
        chosen = read_tune(file)
    setup, bill = prepared(chosen)
    if show is None:
        sys.stderr.write("".join(f"{line}\n" for line in bill_lines(bill)))
    else:
        show(bill)
    path = select(chosen, Path(out), setup)
    with _quiet():
        run, released = resume_run(path, objects=chosen.objects, options=chosen.file.engine)
        run.close()
    return Run(path, (), released)
