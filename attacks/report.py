"""Leakage report: verdicts per view and adversary, with baselines and residuals beside each score.

Nothing here certifies privacy: a score is a lower bound on what leaks, and the accountant's bound
is printed beside it, never derived from it.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

from torch import Tensor, stack

from accounting import Guarantee
from accounting.checks import ConfigError
from attacks.explain import EXPLAINED, Explanation
from attacks.metrics import wilson
from attacks.reconstruction.reconstruct import Reconstruction

Verdict = Literal[
    "recovered", "partial", "no gain", "ambiguous", "attack failed", "nothing sent", "void"
]
Adversary = Literal["server", "recipient"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)  # the most severe first
SCHEMA = "privpart/leakage/3"

RECOVERED_DB = 30.0
GAIN_DB = 3.0  # over the best baseline; a score below that says nothing
MATCHED = 1e-6  # relative residual; above it the attack failed
UNION = "all rounds together"  # view that shows what any round of a schedule shows


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One image as one attack reconstructed it: its score, and that of the best baseline (dB).

    Args:
        view: the parameters that the attack used.
        attack: name of the attack.
        reconstruction: the whole batch, as found.
        psnr: score of this image.
        baseline: best PSNR of an image that needs no attack and does not know the truth.
        ssim: structural similarity of this image.
        truth_match: residual of the true batch; above 0 only because of noise and rounding, unless
            the update has another origin.
        index: position of this image in the reconstructed batch, after pairing.
        untried: "nothing sent" or "void" where there was nothing to attack; the reconstruction is
            then a grey image, and its score says nothing.
    """

    view: str
    attack: str
    reconstruction: Reconstruction
    psnr: float
    baseline: float
    ssim: float = 0.0
    truth_match: float = 0.0
    index: int = 0
    untried: Verdict | None = None

    @property
    def gain(self) -> float:
        """Decibels above the best image that needs no attack."""
        return self.psnr - self.baseline

    @property
    def verdict(self) -> Verdict:
        """What may be concluded.

        "recovered": at least 30 dB, and at least 3 dB above the baseline. "partial": at least 3 dB
        above the baseline. "no gain": the update is matched by the same picture, 30 dB or more, but
        an image that needs no attack is as close. "ambiguous": another image matches the update, to
        1e-6 or as well as the truth matches it through the noise. What was seen does not determine
        the image, or only barely; a prior might, so the image is not protected. "attack failed":
        the update is not matched; nothing follows about privacy. "nothing sent": the update is
        zero. "void": the true images do not explain the update, so no score means anything.
        """
        if self.untried is not None:
            return self.untried
        if self.gain >= GAIN_DB:
            return "recovered" if self.psnr >= RECOVERED_DB else "partial"
        if self.reconstruction.match > max(MATCHED, self.truth_match):
            return "attack failed"
        return "no gain" if self.psnr >= RECOVERED_DB else "ambiguous"


class Tried(Protocol):
    """What the trials of images and of sentences share."""

    @property
    def view(self) -> str:
        """The parameters that the attack used."""

    @property
    def attack(self) -> str:
        """Name of the attack."""

    @property
    def untried(self) -> Verdict | None:
        """The verdict where there was nothing to attack."""

    @property
    def verdict(self) -> Verdict:
        """What may be concluded."""


TrialT = TypeVar("TrialT", bound=Tried)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ViewRow(Generic[TrialT]):
    """One view, and one adversary: what the rows of images and of sentences share.

    Args:
        view: name of the view.
        patterns: patterns of the parameter names that it shows.
        visible: number of parameters that it shows.
        share: ``visible`` as a share of the model's parameters.
        best: per example, the best trial over all attacks on this view and on the audited views
            inside it. Whoever sees more may discard the rest, so a view never scores below a part
            of it. The best is chosen afterwards, by the truth: the row bounds the attacks that were
            tried, each of which chose without the truth.
        verdict: the most severe one over all examples, attacks and views inside this one.
        alone: per example, every trial on this view itself: matching alone may leave an image
            ambiguous that a prior then recovers.
        adversary: "server" sees one client's update after its clip and before any noise;
            "recipient" sees the noised sum and knows every other client's update.
        update_norm: median L2 norm of the visible update.
    """

    view: str
    patterns: tuple[str, ...]
    visible: int
    share: float
    best: tuple[TrialT, ...]
    verdict: Verdict
    alone: tuple[tuple[TrialT, ...], ...] = ()
    adversary: Adversary = "server"
    update_norm: float = 0.0

    @property
    def recovered(self) -> int:
        """Number of examples that were recovered."""
        return sum(trial.verdict == "recovered" for trial in self.best)

    @property
    def attacked(self) -> list[TrialT]:
        """The best trials, without those of examples that could not be attacked."""
        return [trial for trial in self.best if trial.untried is None]

    @property
    def by_attack(self) -> dict[str, list[TrialT]]:
        """What each attack found on this view itself, in the order in which they were tried."""
        found: dict[str, list[TrialT]] = {}
        for trial in (trial for one in self.alone for trial in one if trial.untried is None):
            found.setdefault(trial.attack, []).append(trial)
        return found

    def shared(self, **size: int) -> dict[str, Any]:
        """Return the fields as JSON types, with the size of one batch among them."""
        return {
            "view": self.view,
            "adversary": self.adversary,
            "patterns": list(self.patterns),
            "visible": self.visible,
            "share": self.share,
            **size,
            "update_norm": self.update_norm,
            "attack": " + ".join(sorted({trial.attack for trial in self.best})),
        }


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LeakageRow(ViewRow[Trial]):
    """One view of an update of images, and one adversary; see also ``ViewRow``.

    Args:
        unknowns: pixels of one batch.
        own: per image, the trial with the least residual on this view alone, which is the one that
            an attacker would choose.
        ranks: per image, the rank of the truth among decoys; () without decoys.
        feature_error: per visible dense layer, the greatest relative error of its input as computed
            from the update; for batches of one.
        labels_right: share of the labels that were inferred right, by the trials in ``own``; None
            where they were revealed, or nothing was attacked.
        labels_doubtful: whether some labels were guesses: an attack with wrong labels fails.
    """

    unknowns: int
    own: tuple[Trial, ...]
    ranks: tuple[int, ...] = ()
    feature_error: Mapping[str, float] = field(default_factory=dict)
    labels_right: float | None = None
    labels_doubtful: bool = False

    @property
    def psnr(self) -> tuple[float, ...]:
        """Best score of each image, in dB."""
        return tuple(trial.psnr for trial in self.best)

    @property
    def reconstructions(self) -> Tensor:
        """(N, C, H, W), the images that ``psnr`` scores."""
        return stack([trial.reconstruction.x[trial.index] for trial in self.best])

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types; only ``seconds`` differs between two equal runs."""
        found = [trial.reconstruction for trial in self.own]
        spent = list({id(r): r for r in found}.values())
        scored = self.attacked
        return {
            **self.shared(unknowns=self.unknowns),
            "psnr_median": over(median, [trial.psnr for trial in scored]),
            "psnr_max": over(max, [trial.psnr for trial in scored]),
            "psnr": [None if trial.untried else trial.psnr for trial in self.best],
            "psnr_alone": [None if trial.untried else trial.psnr for trial in self.own],
            "ssim_median": over(median, [trial.ssim for trial in scored]),
            "found_in": [trial.view for trial in self.best],
            "baseline_median": median(trial.baseline for trial in self.best),
            "gain_median": over(median, [trial.gain for trial in scored]),
            "match_median": finite(median(result.match for result in found)),
            "match_max": finite(max(result.match for result in found)),
            "truth_match_max": finite(max(trial.truth_match for trial in self.own)),
            "status": [result.status for result in found],
            "verdict": self.verdict,
            "verdicts": counts(self.best),
            "by_attack": {name: _summary(trials) for name, trials in self.by_attack.items()},
            "recovered": self.recovered,
            "recovered_rate_95": list(wilson(self.recovered, len(self.best))),
            "reid_rank": list(self.ranks),
            "feature_error": dict(self.feature_error),
            "labels_right": self.labels_right,
            "labels_doubtful": self.labels_doubtful,
            "evaluations": sum(result.evaluations for result in spent),
            "seconds": sum(result.seconds for result in spent),
        }


@dataclass(frozen=True, slots=True)
class ScheduleSummary:
    """The worst round of a client that takes part in all of them.

    A training that sends a part in most rounds and everything in a few leaks what the few leak;
    one that sends each part in turn has in the end sent everything. Every round is audited at the
    same weights.

    Args:
        rounds: number of rounds in which each view is sent.
        worst: the view that leaks most, or the union of all.
        adversary: of that view's row.
        verdict: of that row.
        psnr: best score of that row over all images, in dB; None if nothing was attacked.
    """

    rounds: Mapping[str, int]
    worst: str
    adversary: str
    verdict: Verdict
    psnr: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {
            "rounds": dict(self.rounds),
            "total_rounds": sum(self.rounds.values()),
            "worst_view": self.worst,
            "adversary": self.adversary,
            "verdict": self.verdict,
            "psnr_max": self.psnr,
        }


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Report:
    """What the reports on images and on text share.

    Args:
        rows: a row per adversary and view, in the order of the views.
        seed: of the starting points and of the noise.
        threat: what the attacker knows and what was done to the update, as JSON types.
        losses: the client's loss on each batch; near 0 the gradient is tiny.
        bound: the accountant's guarantee of the noised release, or None without noise.
        delta: at which its epsilon is printed.
        explanation: of the view that the true examples explain least. If they do not explain it,
            the audit is void.
    """

    rows: Sequence[ViewRow[Any]]
    seed: int
    threat: Mapping[str, Any] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    bound: Guarantee | None = None
    delta: float = 1e-5
    explanation: Explanation | None = None

    @property
    def void(self) -> bool:
        """Whether the true examples do not explain the update."""
        return self.explanation is not None and not self.explanation.explained

    @property
    def verdict(self) -> Verdict:
        """The most severe one of all rows."""
        return min((row.verdict for row in self.rows), key=VERDICTS.index)

    def shared(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {
            "verdict": self.verdict,
            "seed": self.seed,
            "threat": dict(self.threat),
            "losses": list(self.losses),
            "void": self.explanation.to_dict() if self.explanation and self.void else None,
            "accountant": self._accountant(),
        }

    def _accountant(self) -> dict[str, Any] | None:
        if self.bound is None:
            return None
        return {
            "covers": "one noised release, one client's update zeroed out",
            "mu": self.bound.mu,
            "epsilon": self.bound.epsilon(self.delta),
            "delta": self.delta,
            "relation": "independent of the scores: neither is computed from the other",
        }


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LeakageReport(Report):
    """A row per view and adversary, on the same images, weights and seeds; see also ``Report``.

    Args:
        truth: (N, C, H, W) true images.
        baselines: PSNR of each image in dB, by the name of the baseline.
        labels_revealed: whether the attacker was told the labels.
        baseline_images: (N, C, H, W), by the name of the baseline.
        schedule: the worst round of a training, or None without a schedule.
        decoys: number of images among which the truth was ranked.
        oracles: names of those baselines that know the truth. No verdict is measured against them.
        missing: names of baselines that a verdict should be measured against, for want of data.
    """

    rows: tuple[LeakageRow, ...]
    truth: Tensor
    baselines: Mapping[str, tuple[float, ...]]
    labels_revealed: bool
    baseline_images: Mapping[str, Tensor] = field(default_factory=dict)
    schedule: ScheduleSummary | None = None
    decoys: int = 0
    oracles: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return {
            "schema": SCHEMA,
            **self.shared(),
            "images": len(self.truth),
            "shape": list(self.truth.shape[1:]),
            "thresholds": {
                "recovered_db": RECOVERED_DB,
                "gain_db": GAIN_DB,
                "matched": MATCHED,
                "explained": EXPLAINED,
            },
            "psnr": "-10 log10 MSE per image, data range 1, capped at 313.07 dB (float64)",
            "baselines": self._scores(set(self.baselines) - set(self.oracles)),
            "oracles": self._scores(self.oracles),
            "missing_baselines": list(self.missing),
            "rows": [row.to_dict() for row in self.rows],
            "schedule": None if self.schedule is None else self.schedule.to_dict(),
            "decoys": self.decoys,
        }

    def _scores(self, names: Collection[str]) -> dict[str, Any]:
        return {
            name: {"median": median(scores), "max": max(scores), "psnr": list(scores)}
            for name, scores in self.baselines.items()
            if name in names
        }


def with_union(
    views: Mapping[str, Sequence[str]], schedule: Sequence[str]
) -> dict[str, Sequence[str]]:
    """Return the views, and the union of those that the schedule sends unless one view is all.

    Raises:
        ConfigError: a round that sends an unknown view.
    """
    for view in schedule:
        if view not in views:
            raise ConfigError(
                f"schedule={view!r}: is not a valid view; views are {', '.join(views)}."
            )
    sent = list(dict.fromkeys(schedule))
    if len(sent) < 2 or any("*" in views[view] for view in sent):
        return dict(views)
    union = [pattern for view in sent for pattern in views[view]]
    return dict(views) | {UNION: union}


RowT = TypeVar("RowT", bound=ViewRow[Any])


def worst_row(
    rows: Sequence[RowT], schedule: Sequence[str], score: Callable[[RowT], float]
) -> RowT:
    """Return the worst row over the rounds of the schedule and their union."""
    sent = [row for row in rows if row.view in schedule or row.view == UNION]
    return min(sent, key=lambda row: (VERDICTS.index(row.verdict), -score(row)))


def summarise(rows: Sequence[LeakageRow], schedule: Sequence[str]) -> ScheduleSummary:
    """Return the worst row over the rounds of the schedule and their union."""
    worst = worst_row(rows, schedule, lambda row: max(row.psnr))
    return ScheduleSummary(
        rounds=Counter(schedule),
        worst=worst.view,
        adversary=worst.adversary,
        verdict=worst.verdict,
        psnr=over(max, [trial.psnr for trial in worst.attacked]),
    )


def most_severe(trials: Iterable[Tried]) -> Verdict:
    """Return the worst verdict of several trials."""
    return min((trial.verdict for trial in trials), key=VERDICTS.index)


def _summary(trials: Sequence[Trial]) -> dict[str, Any]:
    """Return what one attack found on one view, over the images that no attack before recovered."""
    scores = [trial.psnr for trial in trials]
    return {
        "images": len(trials),
        "psnr_median": median(scores),
        "psnr_max": max(scores),
        "match_median": finite(median(trial.reconstruction.match for trial in trials)),
        "verdict": most_severe(trials),
        "verdicts": counts(trials),
    }


def counts(trials: Sequence[Tried]) -> dict[str, int]:
    """Return how many trials have each verdict."""
    return {v: sum(trial.verdict == v for trial in trials) for v in VERDICTS}


def over(of: Callable[[list[float]], float], values: list[float]) -> float | None:
    """Return ``of(values)``, None without values."""
    return of(values) if values else None


def finite(value: float) -> float | None:
    """Return the value, None for infinity, which JSON does not have."""
    return value if value < math.inf else None
