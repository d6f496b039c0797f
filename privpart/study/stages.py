"""Stages: tune every group of a study on held-out users, then train the final seeds.

Mechanism by mechanism, so that a study that is stopped has whole comparisons. What is to be trained
follows from the results so far: the same study resumes, and after a change only what is new is
trained. A search for what to freeze is a study that gets one arm after the other.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import mean

from torch import nn

from privpart.patterns import parameters_by_layer
from privpart.study.cell import Cell, Changes
from privpart.study.store import CellResult, Store
from privpart.study.study_file import Group, Study

AXES = ("arm", "mechanism", "level", "trial")
Results = Mapping[str, CellResult]
"""By the key of the cell."""
Trial = tuple[Changes, list[Cell]]
"""A point that a group tries, and its trainings, one per tuning seed."""


@dataclass(frozen=True, slots=True)
class ChosenPoint:
    """The trial of a group with the best metric on held-out users, the mean over tuning seeds."""

    trial: int
    point: Changes
    score: float


def trials_of(study: Study, group: Group, results: Results) -> list[Trial]:
    """Return the trials of a group: those that refine are known once the first are done."""
    points = study.points
    trials = [(p, study.tuning_cells(group, number, p)) for number, p in enumerate(points)]
    best = _best(study, trials, results)
    if best is None:
        return trials
    near = enumerate(study.file.tuning.near(best.point), len(points))
    return trials + [(p, study.tuning_cells(group, number, p)) for number, p in near]


def chosen_point(study: Study, group: Group, results: Results) -> ChosenPoint | None:
    """Return the best trial of a group; None until all its trials are done.

    It looks at nothing but the metrics of trials, which are measured on held-out users. Of equal
    trials the first wins; a metric that is not finite loses. None too if every trial's is.
    """
    trials = trials_of(study, group, results)
    return _best(study, trials, results) if len(trials) == study.trials else None


def chosen_points(study: Study, results: Results) -> dict[Group, ChosenPoint]:
    """Return the choice of each group that has one."""
    choices = {group: chosen_point(study, group, results) for group in study.groups}
    return {group: best for group, best in choices.items() if best is not None}


def _best(study: Study, trials: Sequence[Trial], results: Results) -> ChosenPoint | None:
    # a choice among some of the trials would change when the others are done
    if any(cell.key not in results for _, cells in trials for cell in cells):
        return None
    choices = [
        ChosenPoint(number, point, mean(results[cell.key].accuracy for cell in cells))
        for number, (point, cells) in enumerate(trials)
    ]
    finite = [choice for choice in choices if math.isfinite(choice.score)]
    return max(finite, key=lambda choice: study.sign * choice.score, default=None)


def remaining(study: Study, store: Store) -> int:
    """Return the rounds that are still to be trained."""
    done = store.results()
    missing: list[Cell] = []
    for group in study.groups:
        trials = trials_of(study, group, done)
        missing += [c for _, cells in trials for c in cells if c.key not in done]
        # any trial stands for one that is not known yet, as all have as many rounds
        missing += [*trials[0][1]] * (study.trials - len(trials))
        best = chosen_point(study, group, done)
        cells = study.final_cells(group, study.points[0] if best is None else best.point)
        missing += [c for c in cells if best is None or c.key not in done]
    return sum(cell.plan.privacy.rounds for cell in missing)


def stages(study: Study, store: Store) -> Iterator[list[Cell]]:
    """Yield the cells of each stage of a study, which depend on what the store has by then."""
    for _, part in groupby(study.groups, key=lambda group: group.mechanism):
        groups, tried = list(part), set[str]()
        for _ in ("the whole space", "near the best"):
            results = store.results()
            trials = [trial for group in groups for trial in trials_of(study, group, results)]
            untried = [cell for _, cells in trials for cell in cells if cell.key not in tried]
            yield untried
            # those that failed would fail again
            tried |= {cell.key for cell in untried}
        results = store.results()
        choices = [(group, chosen_point(study, group, results)) for group in groups]
        yield [c for g, best in choices if best for c in study.final_cells(g, best.point)]


def next_arm(
    study: Study, layers: Mapping[str, Mapping[str, nn.Parameter]], results: Results
) -> Study | None:
    """Return the study with the arm that its search tries next; None if the search has ended.

    Args:
        study: with the arms that were tried.
        layers: see ``layers_of``.
        results: of trials.
    """
    if len(chosen_points(study, results)) < len(study.groups):
        # a training failed, or diverged: nothing follows for the layer
        return None
    frozen = next_frozen(
        {layer: sum(p.numel() for p in named.values()) for layer, named in layers.items()},
        [_within_tolerance(study, arm, results) for arm in [*study.arms][1:]],
    )
    patterns = [f"!{name}" for layer in frozen for name in layers[layer]]
    arms = {**study.arms, f"freeze {', '.join(frozen)}": {"model.train": patterns}}
    return replace(study, arms=arms) if frozen else None


def frozen_arm(study: Study, results: Results) -> str:
    """Return the arm that freezes most among those that its search keeps."""
    return [arm for arm in study.arms if _within_tolerance(study, arm, results)][-1]


def _within_tolerance(study: Study, arm: str, results: Results) -> bool:
    """Whether an arm is as good as the whole network, at every level of noise."""
    scores: dict[tuple[str, str], dict[str, float]] = {}
    for group, choice in chosen_points(study, results).items():
        level = scores.setdefault((group.mechanism, group.level), {})
        level[group.arm] = study.sign * choice.score
    tolerance = study.file.freeze.tolerance if study.file.freeze else 0.0
    return all(at[arm] >= at[study.reference] - tolerance for at in scores.values())


def next_frozen(sizes: Mapping[str, int], kept: Sequence[bool]) -> tuple[str, ...]:
    """Return the layers to freeze next; none if the search has ended (FedPT, section 3.1).

    The paper's steps: freeze the largest layer, then also the next largest, and so on. A layer
    whose freezing costs accuracy trains again, and the search continues with the next smaller one.

    Args:
        sizes: layer -> parameters.
        kept: of each layer that was tried, the largest first, whether it stays frozen.

    >>> next_frozen({"conv": 80, "dense": 500, "head": 20}, [True, False])
    ('dense', 'head')
    """
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)
    frozen = [layer for layer, stays in zip(largest, kept, strict=False) if stays]
    if len(kept) == len(largest) or len(frozen) + 1 == len(largest):
        # all were tried, or nothing would train
        return ()
    return (*frozen, largest[len(kept)])


def layers_of(module: nn.Module) -> dict[str, dict[str, nn.Parameter]]:
    """Return the parameters of each layer, by name; tied ones count once.

    Normalization layers are left out, so they always train: they are small, and freezing them costs
    accuracy (FedPT, section 3.1).
    """
    parameters = dict(module.named_parameters())
    return {
        layer: {name: parameters[name] for name in names}
        for layer, names in parameters_by_layer(module).items()
        if "Norm" not in type(module.get_submodule(layer)).__name__
    }
