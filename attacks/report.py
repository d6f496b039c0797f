"""Leakage reports on images and text: verdicts per view and adversary, beside baselines.

Nothing here certifies privacy: a score is a lower bound on what leaks, and the accountant's bound
is printed beside it, never derived from it. What each
verdict means: docs/how-to/audit-leakage.md.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

from torch import Tensor

from accounting import Guarantee
from attacks.explain import Explanation
from attacks.metrics import wilson
from attacks.reconstruction.reconstruct import Reconstruction
from attacks.text.read import ReadText
from attacks.text.score import TextScore

Verdict = Literal[
    "recovered", "partial", "no gain", "ambiguous", "attack failed", "nothing sent", "void"
]
Adversary = Literal["server", "recipient"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)  # the most severe first

RECOVERED_DB = 30.0
GAIN_DB = 3.0  # over the best baseline; a score below that says nothing
RECOVERED_ROUGE = 0.9  # one token in ten missing or false: who reads it reads the sentence
GAIN = 0.2  # over the best guess: a token in five
MATCHED = 1e-6  # relative residual; above it the attack failed
UNION = "all rounds together"  # view that shows what any round of a schedule shows

ResultT = TypeVar("ResultT", bound=Reconstruction | ReadText)


@dataclass(frozen=True, slots=True, eq=False)
class Trial(Generic[ResultT]):
    """One example as one attack found it.

    Args:
        truth_match: residual of the true batch; above 0 only because of noise and rounding, unless
            the update has another origin.
        untried: "nothing sent" or "void" where there was nothing to attack; the result is then a
            stand-in, and its score says nothing.
    """

    view: str  # the parameters that the attack used
    attack: str
    result: ResultT  # the whole batch
    truth_match: float = field(default=0.0, kw_only=True)
    untried: Verdict | None = field(default=None, kw_only=True)

    @property
    def matched(self) -> bool:
        """Whether the result explains the update, up to rounding and noise."""
        return self.result.match <= max(MATCHED, self.truth_match)


@dataclass(frozen=True, slots=True, eq=False)
class ImageTrial(Trial[Reconstruction]):
    """One image as one attack reconstructed it."""

    psnr: float
    baseline: float  # best PSNR of an image that needs no attack and does not know the truth
    ssim: float = 0.0
    index: int = 0  # of this image in the reconstructed batch, after pairing
    chance: float = -math.inf  # PSNR that one in a thousand other images of the class passes

    @property
    def gain(self) -> float:
        """Decibels above the best image that needs no attack."""
        return self.psnr - self.baseline

    @property
    def verdict(self) -> Verdict:
        """What may be concluded; an image that gains nothing may still be the picture itself."""
        if self.untried is not None:
            return self.untried
        complete = self.psnr >= RECOVERED_DB
        if self.gain >= GAIN_DB and (complete or self.psnr > self.chance):
            return "recovered" if complete else "partial"
        if not self.matched:
            return "attack failed"
        return "no gain" if complete else "ambiguous"

    @property
    def rank(self) -> tuple[float, ...]:
        """Order by PSNR, best last."""
        return (self.psnr,)


def least_gain(guess: float) -> float:
    """Return the score that says more than a guess of this score.

    That is 0.2 more, or half of what the guess lacks where it lacks less than 0.4.

    >>> least_gain(0.25), least_gain(0.9)
    (0.45, 0.95)
    """
    return guess + min(GAIN, (1 - guess) / 2)


@dataclass(frozen=True, slots=True)
class Guess:
    """Best token F1 and ROUGE-L of a sentence, and F1 of its batch's tokens, without any update.

    Args:
        chance: token F1 that one in a thousand public sentences passes; ROUGE-L is never above it.
        chance_bag: of a batch's distinct tokens, that one in a thousand public batches passes.
    """

    f1: float
    rouge: float
    bag: float
    chance: float = 0.0
    chance_bag: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class TextTrial(Trial[ReadText]):
    """One sentence as one attack read it."""

    score: TextScore
    bag: float  # F1 of the distinct tokens of the batch that the attack shows
    guess: Guess  # best scores without the update

    @property
    def verdict(self) -> Verdict:
        """What may be concluded; each of three scores may say more than its guess, and chance."""
        if self.untried is not None:
            return self.untried
        complete = self.score.rouge >= RECOVERED_ROUGE
        guess = self.guess
        gain, *others = (
            (score >= least_gain(floor) and score > floor, score > chance)
            for score, floor, chance in (
                (self.score.rouge, guess.rouge, guess.chance),
                (self.score.f1, guess.f1, guess.chance),
                (self.bag, guess.bag, guess.chance_bag),
            )
        )
        if gain[0] and complete:
            return "recovered"
        if any(map(all, (gain, *others))):
            return "partial"
        if complete:
            return "no gain"
        return "ambiguous" if self.matched else "attack failed"

    @property
    def rank(self) -> tuple[float, ...]:
        """Order by verdict, and then by score, best last."""
        return (-VERDICTS.index(self.verdict), self.score.exact, self.score.rouge, self.bag)


AnyTrial = ImageTrial | TextTrial
TrialT = TypeVar("TrialT", bound=AnyTrial)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ViewRow(Generic[TrialT]):
    """One view, and one adversary: what the rows of images and of sentences share.

    Args:
        trials: per example, every trial on this view and on the audited views inside it. Whoever
            sees more may discard the rest, so a view never scores below a part of it.
        adversary: "server" sees one client's update after its clip and before any noise;
            "recipient" sees the noised sum and knows every other client's update.
        labels_right: share of the labels that were inferred right; None where they were revealed,
            are the tokens themselves, or nothing was attacked.
    """

    view: str
    patterns: tuple[str, ...]
    visible: int  # number of parameters that it shows
    share: float  # of the model's parameters
    trials: tuple[tuple[TrialT, ...], ...]
    adversary: Adversary
    update_norm: float  # median over the batches, of what is visible
    labels_right: float | None = None

    examples: ClassVar[str]  # what the trials are of
    worst: ClassVar[str]  # the entry of ``scores`` that orders rows of one verdict

    @staticmethod
    def scores(trials: Sequence[TrialT]) -> dict[str, float | None]:
        """Summarise the scores of several trials."""
        raise NotImplementedError

    @property
    def best(self) -> tuple[TrialT, ...]:
        """The best trial of each example.

        It is chosen afterwards, by the truth: the row bounds the attacks that were tried, each of
        which chose without the truth.
        """
        return tuple(max(trials, key=lambda trial: trial.rank) for trials in self.trials)

    @property
    def alone(self) -> tuple[tuple[TrialT, ...], ...]:
        """The trials of each example on this view itself."""
        return tuple(tuple(t for t in trials if t.view == self.view) for trials in self.trials)

    @property
    def verdict(self) -> Verdict:
        """The most severe one over all examples, attacks and views inside this one."""
        return most_severe(trial for trials in self.trials for trial in trials)

    @property
    def attacked(self) -> list[TrialT]:
        """The best trials, without those of examples that could not be attacked."""
        return [trial for trial in self.best if trial.untried is None]

    @property
    def by_attack(self) -> dict[str, list[TrialT]]:
        """The trials of each attack on this view itself, in the order in which they were run."""
        trials: dict[str, list[TrialT]] = {}
        for trial in (trial for trials in self.alone for trial in trials if trial.untried is None):
            trials.setdefault(trial.attack, []).append(trial)
        return trials

    @property
    def worst_score(self) -> dict[str, float | None]:
        """The name and value of the score by which rows of one verdict are ordered."""
        return {self.worst: self.scores(self.attacked)[self.worst]}

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types; only ``seconds`` differs between two equal runs."""
        best = self.best
        recovered = sum(trial.verdict == "recovered" for trial in best)
        results = {id(t.result): t.result for trials in self.alone for t in trials}.values()
        return {
            "view": self.view,
            "adversary": self.adversary,
            "patterns": list(self.patterns),
            "visible": self.visible,
            "share": self.share,
            "update_norm": self.update_norm,
            "attack": " + ".join(sorted({trial.attack for trial in best})),
            **self.scores(self.attacked),
            "found_in": [trial.view for trial in best],
            "verdict": self.verdict,
            "verdicts": _counts(best),
            "by_attack": {name: self._summary(trials) for name, trials in self.by_attack.items()},
            "recovered": recovered,
            "recovered_rate_95": list(wilson(recovered, len(best))),
            "labels_right": self.labels_right,
            "truth_match_max": _finite(max(trial.truth_match for trial in best)),
            "seconds": sum(result.seconds for result in results),
        }

    def _summary(self, trials: Sequence[TrialT]) -> dict[str, Any]:
        """Summarise one attack on this view, over the examples that none before recovered."""
        return {
            self.examples: len(trials),
            **self.scores(trials),
            "match_median": _finite(median(trial.result.match for trial in trials)),
            "verdict": most_severe(trials),
            "verdicts": _counts(trials),
        }


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LeakageRow(ViewRow[ImageTrial]):
    """One view of an update of images, and one adversary."""

    examples = "images"
    worst = "psnr_max"

    ranks: tuple[int, ...] = ()  # of the true images among decoys
    feature_error: Mapping[str, float] = field(default_factory=dict)  # of dense layers' inputs
    labels_doubtful: bool = False  # an attack with wrong labels fails

    @property
    def own(self) -> tuple[ImageTrial, ...]:
        """Per image, the trial of least residual on this view: the one an attacker would choose."""
        return tuple(min(trials, key=lambda trial: trial.result.match) for trials in self.alone)

    @property
    def psnr(self) -> tuple[float, ...]:
        """Best score of each image, in dB."""
        return tuple(trial.psnr for trial in self.best)

    @staticmethod
    def scores(trials: Sequence[ImageTrial]) -> dict[str, float | None]:
        """Return the median and the greatest PSNR."""
        psnr = [trial.psnr for trial in trials]
        return {"psnr_median": _of(median, psnr), "psnr_max": _of(max, psnr)}

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types; only ``seconds`` differs between two equal runs."""
        best, own, attacked = self.best, self.own, self.attacked
        return {
            **ViewRow.to_dict(self),
            "psnr": [None if trial.untried else trial.psnr for trial in best],
            "psnr_alone": [None if trial.untried else trial.psnr for trial in own],
            "ssim_median": _of(median, [trial.ssim for trial in attacked]),
            "baseline_median": median(trial.baseline for trial in best),
            "gain_median": _of(median, [trial.gain for trial in attacked]),
            "match_median": _finite(median(trial.result.match for trial in own)),
            "status": [trial.result.status for trial in own],
            "reid_rank": list(self.ranks),
            "feature_error": dict(self.feature_error),
            "labels_doubtful": self.labels_doubtful,
        }


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TextRow(ViewRow[TextTrial]):
    """One view of an update of sentences, and one adversary."""

    examples = "sentences"
    worst = "exact"

    lengths_right: float | None = None  # share; None where none is padded, or none was read
    doubtful: bool = False  # whether what was read does not explain the update

    @property
    def exact(self) -> int:
        """Number of sentences that were read token for token."""
        return sum(trial.score.exact for trial in self.best)

    @staticmethod
    def scores(trials: Sequence[TextTrial]) -> dict[str, float | None]:
        """Return the number of exact sentences, and medians of scores and of best guesses."""
        return {
            "exact": sum(trial.score.exact for trial in trials),
            "rouge_median": _of(median, [trial.score.rouge for trial in trials]),
            "f1_median": _of(median, [trial.score.f1 for trial in trials]),
            "bag_f1_median": _of(median, [trial.bag for trial in trials]),
            "guess_rouge_median": _of(median, [trial.guess.rouge for trial in trials]),
            "guess_f1_median": _of(median, [trial.guess.f1 for trial in trials]),
            "guess_bag_f1_median": _of(median, [trial.guess.bag for trial in trials]),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types; only ``seconds`` differs between two equal runs."""
        best = self.best
        return {
            **ViewRow.to_dict(self),
            "match_median": _finite(median(trial.result.match for trial in best)),
            "sentences": [list(trial.score.found) for trial in best],
            "lengths_right": self.lengths_right,
            "doubtful": self.doubtful,
        }


RowT = TypeVar("RowT", bound=ViewRow[Any])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Report(Generic[RowT]):
    """A row per adversary and view, on the same examples, weights and seeds."""

    schema: ClassVar[str]

    rows: tuple[RowT, ...]
    truth: Tensor | tuple[tuple[int, ...], ...]
    seed: int
    threat: Mapping[str, Any]  # what the attacker knows, and what was done to the update
    bound: Guarantee | None  # the accountant's, of the noised release
    delta: float
    schedule: tuple[str, ...]  # the view that each round of a training sends
    missing: tuple[str, ...]  # baselines that a verdict should be measured against, without data
    explanation: Explanation  # of the view that the true examples explain least

    @property
    def void(self) -> bool:
        """Whether the true examples do not explain the update."""
        return not self.explanation.explained

    @property
    def verdict(self) -> Verdict:
        """The most severe one of all rows."""
        return most_severe(self.rows)

    @property
    def worst_round(self) -> RowT | None:
        """The worst row over the rounds of the schedule and their union; None without one.

        A training that sends a part in most rounds and everything in a few leaks what the few leak;
        one that sends each part in turn has in the end sent everything. Every round is audited at
        the same weights.
        """
        rows = [row for row in self.rows if row.view in self.schedule or row.view == UNION]

        def severity(row: RowT) -> tuple[int, float]:
            (score,) = row.worst_score.values()
            return VERDICTS.index(row.verdict), -(score or 0.0)

        return min(rows, key=severity) if self.schedule else None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        worst, bound = self.worst_round, self.bound
        schedule = worst and {
            "rounds": dict(Counter(self.schedule)),
            "worst_view": worst.view,
            "adversary": worst.adversary,
            "verdict": worst.verdict,
            **worst.worst_score,
        }
        accountant = bound and {
            "covers": "one noised release, one client's update zeroed out",
            "mu": bound.mu,
            "epsilon": bound.epsilon(self.delta),
            "delta": self.delta,
        }
        return {
            "schema": self.schema,
            "verdict": self.verdict,
            "seed": self.seed,
            "threat": dict(self.threat),
            "void": self.explanation.to_dict() if self.void else None,
            "accountant": accountant,
            "missing_baselines": list(self.missing),
            "rows": [row.to_dict() for row in self.rows],
            "schedule": schedule,
        }


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LeakageReport(Report[LeakageRow]):
    """A report on images (N, C, H, W)."""

    schema: ClassVar[str] = "privpart/leakage/3"

    truth: Tensor
    baselines: Mapping[str, tuple[float, ...]]  # PSNR of each image in dB
    baseline_images: Mapping[str, Tensor]  # (N, C, H, W)
    decoys: int  # number of images among which the truth was ranked
    chance: tuple[float, ...]  # PSNR of each image that one in a thousand others passes, in dB
    oracles: tuple[str, ...]  # baselines that know the truth, which no verdict is measured against

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        scores = {
            name: {"median": median(values), "max": max(values), "psnr": list(values)}
            for name, values in self.baselines.items()
        }
        return {
            **Report.to_dict(self),
            "images": len(self.truth),
            "shape": list(self.truth.shape[1:]),
            "psnr": "-10 log10 MSE per image, data range 1, capped at 313.07 dB (float64)",
            "baselines": {k: v for k, v in scores.items() if k not in self.oracles},
            "oracles": {k: v for k, v in scores.items() if k in self.oracles},
            "decoys": self.decoys,
            "chance": [_finite(psnr) for psnr in self.chance],
        }


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TextReport(Report[TextRow]):
    """A report on sentences, without padding."""

    schema: ClassVar[str] = "privpart/text-leakage/1"

    truth: tuple[tuple[int, ...], ...]
    guesses: Mapping[str, tuple[TextScore, ...]]  # scores of each sentence without any update
    public: int  # number of sentences that the guesses are made of

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return {
            **Report.to_dict(self),
            "sentences": len(self.truth),
            "truth": [list(sentence) for sentence in self.truth],
            "guesses": {
                name: {
                    "exact": sum(score.exact for score in scores),
                    "f1_median": median(score.f1 for score in scores),
                    "rouge_median": median(score.rouge for score in scores),
                }
                for name, scores in self.guesses.items()
            },
            "public_sentences": self.public,
        }


def most_severe(judged: Iterable[AnyTrial | ViewRow[Any]]) -> Verdict:
    """Return the worst verdict of several trials, or rows."""
    return min((item.verdict for item in judged), key=VERDICTS.index)


def _counts(trials: Sequence[AnyTrial]) -> dict[str, int]:
    return {v: sum(trial.verdict == v for trial in trials) for v in VERDICTS}


def _of(statistic: Callable[[list[float]], float], values: list[float]) -> float | None:
    return statistic(values) if values else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity
