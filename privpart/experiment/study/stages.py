"""Stages: tune every group of a study on held-out users, then train the final seeds.

Mechanism by mechanism, so that a study that is stopped has whole comparisons. Finished cells are in
two stores, ``tune`` and ``final``, which are read before anything is trained: the same study
resumes, and after a change only what is new is trained.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import mean

from privpart.experiment.study.study_file import Group, Study
from privpart.experiment.sweep import Advanced, CellTrainer, Finished, rounds_of
from privpart.experiment.sweep_file import Cell, Changes
from privpart.experiment.sweep_store import CellResult, SweepStore

AXES = ("arm", "mechanism", "level")


@dataclass(frozen=True, slots=True)
class StudyTrial:
    """One point that a group tries.

    Attributes:
        number: from 0; those that refine come last.
        point: its values.
        cells: its trainings, one per tuning seed.
    """

    number: int
    point: Changes
    cells: Sequence[Cell]


@dataclass(frozen=True, slots=True)
class ChosenPoint:
    """The trial of a group with the best metric on held-out users.

    Attributes:
        trial: its number.
        point: its values.
        score: its metric on held-out users, the mean over tuning seeds.
    """

    trial: int
    point: Changes
    score: float


def trials_of(study: Study, group: Group, tuned: Mapping[str, CellResult]) -> list[StudyTrial]:
    """Return the trials of a group: those that refine are known once the first are done."""
    found = [_trial(study, group, number, point) for number, point in enumerate(study.points)]
    best = _best(study, found, tuned)
    if best is not None:
        found += [
            _trial(study, group, number, point)
            for number, point in enumerate(study.file.tuning.near(best.point), len(found))
        ]
    return found


def chosen_point(study: Study, group: Group, tuned: Mapping[str, CellResult]) -> ChosenPoint | None:
    """Return the best trial of a group; None until all its trials are done.

    It looks at nothing but the metrics of trials, which are measured on held-out users. Of equal
    trials the first wins; a metric that is not finite loses. None too if every trial's is.

    Args:
        study: to choose for.
        group: whose trials.
        tuned: results of trials, by the key of the cell.
    """
    trials = trials_of(study, group, tuned)
    return _best(study, trials, tuned) if len(trials) == study.trials else None


def _trial(study: Study, group: Group, number: int, point: Changes) -> StudyTrial:
    return StudyTrial(number, point, study.tuning_cells(group, number, point))


def _best(
    study: Study, trials: Sequence[StudyTrial], tuned: Mapping[str, CellResult]
) -> ChosenPoint | None:
    if any(cell.key not in tuned for trial in trials for cell in trial.cells):
        return None
    sign = 1.0 if study.file.better == "higher" else -1.0
    scored = [
        ChosenPoint(
            trial.number, trial.point, _score([tuned[cell.key].accuracy for cell in trial.cells])
        )
        for trial in trials
    ]
    finite = [own for own in scored if math.isfinite(own.score)]
    return max(finite, key=lambda own: sign * own.score, default=None)


def _score(metrics: Sequence[float | None]) -> float:
    """Return the mean; a store keeps NaN as None."""
    return math.nan if None in metrics else mean(m for m in metrics if m is not None)


def remaining(study: Study, tuned: SweepStore, final: SweepStore, *, tune_only: bool) -> int:
    """Return the rounds that are still to be trained."""
    done, kept = tuned.results(), final.finished()
    rounds = 0
    for group in study.groups:
        trials = trials_of(study, group, done)
        missing = [c for trial in trials for c in trial.cells if c.key not in done]
        # any trial stands for one that is not known yet, as all have as many rounds
        missing += [*trials[0].cells] * (study.trials - len(trials))
        best = chosen_point(study, group, done)
        if not tune_only:
            cells = study.final_cells(group, study.points[0] if best is None else best.point)
            missing += [c for c in cells if best is None or c.key not in kept]
        rounds += sum(map(rounds_of, missing))
    return rounds


def run_study(
    study: Study,
    trainer: CellTrainer,
    tuned: SweepStore,
    final: SweepStore,
    *,
    tune_only: bool = False,
    advanced: Advanced = lambda *_: None,
    finished: Finished = lambda *_: None,
) -> None:
    """Train what a study's stores lack; each result is kept as soon as it is there.

    Args:
        study: to train.
        trainer: trains the cells.
        tuned: store of the trials.
        final: store of the trainings with the chosen values.
        tune_only: whether to leave the final stage out.
        advanced: see ``CellTrainer.train``.
        finished: see ``CellTrainer.train``; called after a result is kept.

    Raises:
        WorkerError: a process could not start.
    """
    for store, axes in ((tuned, (*AXES, "trial")), (final, AXES)):
        store.describe(axes, ())
    for _, groups in groupby(study.groups, key=lambda group: group.mechanism):
        part, tried = list(groups), set[str]()
        for _ in ("the whole space", "near the best"):
            done = tuned.results()
            trials = [trial for group in part for trial in trials_of(study, group, done)]
            cells = [cell for trial in trials for cell in trial.cells]
            _train([c for c in cells if c.key not in tried], trainer, tuned, advanced, finished)
            tried |= {cell.key for cell in cells}  # those that failed would fail again
        if tune_only:
            continue
        results = tuned.results()
        chosen = [(group, chosen_point(study, group, results)) for group in part]
        cells = [c for g, own in chosen if own for c in study.final_cells(g, own.point)]
        _train(cells, trainer, final, advanced, finished)


def _train(
    cells: Sequence[Cell],
    trainer: CellTrainer,
    store: SweepStore,
    advanced: Advanced,
    finished: Finished,
) -> None:
    done = store.finished()

    def keep(cell: Cell, outcome: CellResult | str) -> None:
        store.add(cell.key, cell.labels, cell.seed, outcome)
        finished(cell, outcome)

    if missing := [cell for cell in cells if cell.key not in done]:
        trainer.train(missing, keep, advanced)
