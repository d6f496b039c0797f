"""Leakage by view: what an attacker recovers from the whole update and from parts of it.

The report separates "protected" from "the attack failed", and puts beside every score the one of
an image that nobody had to attack for. PSNR certifies nothing: it is a lower bound on what leaks,
never to be turned into an epsilon.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from accounting.checks import ConfigError
from attacks.analytic import invert_first_dense
from attacks.metrics import baselines, psnr
from attacks.observation import Observation, observe, select
from attacks.reconstruct import SOLVED, Reconstruction, dlg
from attacks.report import VERDICTS, Attack, LeakageReport, LeakageRow, Trial


def leakage(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    views: Mapping[str, Sequence[str]],
    dataset_mean: Tensor | None = None,
    restarts: int = 3,
    max_evaluations: int = 1000,
    reveal_labels: bool = True,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> LeakageReport:
    """Attack the gradient of each image alone, once per view, without clip or noise.

    Args:
        model: with (B, K) logits; its own weights are those that the attacker knows.
        x: (N, C, H, W) in [0, 1]; every image is one trial with a batch of one.
        y: (N,) labels.
        views: name -> patterns of the parameters that the update shows, as in ``observe``.
        dataset_mean: (C, H, W) mean of public data, a baseline; None leaves it out.
        restarts: see ``dlg``.
        max_evaluations: see ``dlg``.
        reveal_labels: whether the attacker is told ``y``.
        seed: of the starting points; the same for all views.
        progress: called with a line before each attack.

    Raises:
        ConfigError: a pattern that matches no parameter, values out of range.
    """
    if not views:
        raise ConfigError("views={}: name at least one, such as {'full': ['*']}.")
    if len(x) < 1 or len(x) != len(y):
        raise ConfigError(f"x, y: {len(x)} images and {len(y)} labels; must be equally many.")
    names = {view: _names(model, patterns) for view, patterns in views.items()}
    guesses = baselines(x, dataset_mean, seed=seed)
    floor = [max(float(scores[i]) for scores in guesses.values()) for i in range(len(x))]
    own: dict[str, list[Trial]] = {view: [] for view in views}
    for view, patterns in views.items():
        for i in range(len(x)):
            if progress is not None:
                progress(f"{view}: image {i + 1} of {len(x)}")
            one = slice(i, i + 1)
            seen = observe(model, x[one], y[one], visible=patterns, reveal_labels=reveal_labels)
            attack, found = _attack(model, seen, restarts, max_evaluations, seed + i)
            score = float(psnr(found.x, x[one])[0])
            own[view].append(Trial(view, attack, found, score, floor[i]))
    return LeakageReport(
        rows=tuple(_row(model, view, views[view], names, own) for view in views),
        truth=x.detach().clone(),
        baselines={name: tuple(scores.tolist()) for name, scores in guesses.items()},
        labels_revealed=reveal_labels,
        seed=seed,
    )


def _names(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    return frozenset(select([name for name, _ in model.named_parameters()], patterns))


def _attack(
    model: nn.Module, seen: Observation, restarts: int, max_evaluations: int, seed: int
) -> tuple[Attack, Reconstruction]:
    """The better by match of the closed form and of ``dlg``; the first, if it leaves no doubt."""
    closed = invert_first_dense(model, seen)
    if closed is not None and closed.match <= SOLVED:
        return "invert_dense", closed
    found = dlg(model, seen, restarts=restarts, max_evaluations=max_evaluations, seed=seed)
    if closed is not None and closed.match < found.match:
        return "invert_dense", closed
    return "dlg", found


def _row(
    model: nn.Module,
    view: str,
    patterns: Sequence[str],
    names: Mapping[str, frozenset[str]],
    own: Mapping[str, Sequence[Trial]],
) -> LeakageRow:
    sizes = {name: value.numel() for name, value in model.named_parameters()}
    inside = [view, *(other for other in own if other != view and names[other] <= names[view])]
    pool = list(zip(*(own[other] for other in inside), strict=True))
    visible = sum(sizes[name] for name in names[view])
    verdicts = {trial.verdict for trials in pool for trial in trials}
    return LeakageRow(
        view=view,
        patterns=tuple(patterns),
        visible=visible,
        share=visible / sum(sizes.values()),
        unknowns=own[view][0].reconstruction.x.numel(),
        own=tuple(own[view]),
        best=tuple(max(trials, key=lambda trial: trial.psnr) for trials in pool),
        verdict=next(v for v in VERDICTS if v in verdicts),
    )
