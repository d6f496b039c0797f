"""Text report: verdicts per view and adversary, beside guesses that need no update.

The words are those of the audit of images. Nothing here certifies privacy: a score is a lower bound
on what leaks, and the accountant's bound is printed beside it, never derived from it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from attacks.explain import EXPLAINED
from attacks.metrics import wilson
from attacks.report import MATCHED, UNION, VERDICTS, Adversary, Report, Verdict
from attacks.text.read import ReadText
from attacks.text.score import TextScore

TEXT_SCHEMA = "privpart/text-leakage/1"
RECOVERED_ROUGE = 0.9  # one token in ten missing or false: who reads it reads the sentence
GAIN = 0.2  # over the best guess: a token in five
_NOTHING_READ = TextScore((), exact=False, f1=0.0, rouge=0.0)


def least_gain(guess: float) -> float:
    """Return the score that says more than a guess of this score.

    That is 0.2 more, or half of what the guess lacks where it lacks less than 0.4.

    >>> least_gain(0.25), least_gain(0.9)
    (0.45, 0.95)
    """
    return guess + min(GAIN, (1 - guess) / 2)


@dataclass(frozen=True, slots=True)
class Guess:
    """Best scores of one sentence, and of its batch, without any update.

    Args:
        f1: token F1 of the sentence.
        rouge: ROUGE-L of the sentence.
        bag: F1 of the distinct tokens of the batch.
    """

    f1: float
    rouge: float
    bag: float


@dataclass(frozen=True, slots=True, eq=False)
class TextTrial:
    """One sentence as one attack read it: its score, and that of the best guess.

    Args:
        view: the parameters that the attack used.
        attack: name of the attack.
        read: the whole batch, as read.
        score: of this sentence.
        bag: F1 of the distinct tokens of the batch that the attack shows.
        guess: of this sentence.
        truth_match: residual of the true batch; above 0 only because of noise and rounding.
        untried: "nothing sent" or "void" where there was nothing to attack.
    """

    view: str
    attack: str
    read: ReadText
    score: TextScore
    bag: float
    guess: Guess
    truth_match: float = 0.0
    untried: Verdict | None = None

    @property
    def matched(self) -> bool:
        """Whether what was read explains the update, up to rounding and noise."""
        return self.read.match <= max(MATCHED, self.truth_match)

    @property
    def verdict(self) -> Verdict:
        """What may be concluded.

        "recovered": ROUGE-L is at least 0.9, and says more than the best guess (``least_gain``).
        "partial": ROUGE-L, token F1 or the F1 of the batch's distinct tokens says more than the
        best guess. "no gain": the sentence itself came back, but a guess is as close. "ambiguous":
        another text matches the update. "attack failed": the update is not matched.
        """
        if self.untried is not None:
            return self.untried
        whole = self.score.rouge >= RECOVERED_ROUGE
        if self.score.rouge >= least_gain(self.guess.rouge) and self.score.rouge > self.guess.rouge:
            return "recovered" if whole else "partial"
        for found, guess in ((self.score.f1, self.guess.f1), (self.bag, self.guess.bag)):
            if found >= least_gain(guess) and found > guess:
                return "partial"
        if whole:
            return "no gain"
        return "ambiguous" if self.matched else "attack failed"

    @property
    def rank(self) -> tuple[float, ...]:
        """Order by what was found, best last; the truth decides."""
        return (-VERDICTS.index(self.verdict), self.score.exact, self.score.rouge, self.bag)


def worst_of(trials: Iterable[TextTrial]) -> Verdict:
    """Return the most severe verdict."""
    return min((trial.verdict for trial in trials), key=VERDICTS.index)


@dataclass(frozen=True, slots=True, eq=False)
class TextRow:
    """One view, and one adversary.

    Args:
        view: name of the view.
        patterns: patterns of the parameter names that it shows.
        visible: number of parameters that it shows.
        share: ``visible`` as a share of the model's parameters.
        tokens: of one batch.
        alone: per sentence, a trial of each attack on this view itself.
        best: per sentence, the best trial on this view and on the audited views inside it. It is
            chosen by the truth; each attack chose without.
        verdict: the most severe one over all sentences, attacks and views inside this one.
        adversary: see ``LeakageRow``.
        update_norm: median L2 norm of the visible update.
        lengths_right: share of the sentences whose length was inferred right; None where no
            sentence is padded, or none was read.
        labels_right: share of the labels that were inferred right; None where they were revealed,
            are the tokens themselves, or nothing was read.
        doubtful: whether the text that was read does not explain the update, so that its lengths
            and labels are guesses.
    """

    view: str
    patterns: tuple[str, ...]
    visible: int
    share: float
    tokens: int
    alone: tuple[tuple[TextTrial, ...], ...]
    best: tuple[TextTrial, ...]
    verdict: Verdict
    adversary: Adversary = "server"
    update_norm: float = 0.0
    lengths_right: float | None = None
    labels_right: float | None = None
    doubtful: bool = False

    @property
    def recovered(self) -> int:
        """Number of sentences that were recovered."""
        return sum(trial.verdict == "recovered" for trial in self.best)

    @property
    def exact(self) -> int:
        """Number of sentences that were read token for token."""
        return sum(trial.score.exact for trial in self.best)

    @property
    def by_attack(self) -> dict[str, list[TextTrial]]:
        """What each attack read in this view itself, in the order in which they were tried."""
        found: dict[str, list[TextTrial]] = {}
        for trial in (trial for one in self.alone for trial in one if trial.untried is None):
            found.setdefault(trial.attack, []).append(trial)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types; only ``seconds`` differs between two equal runs."""
        scored = [trial for trial in self.best if trial.untried is None]
        reads = list({id(t.read): t.read for one in self.alone for t in one}.values())
        return {
            "view": self.view,
            "adversary": self.adversary,
            "patterns": list(self.patterns),
            "visible": self.visible,
            "share": self.share,
            "tokens": self.tokens,
            "update_norm": self.update_norm,
            "attack": " + ".join(sorted({trial.attack for trial in self.best})),
            "exact": self.exact,
            "recovered": self.recovered,
            "recovered_rate_95": list(wilson(self.recovered, len(self.best))),
            **_medians(scored),
            "match_median": _finite(median(t.read.match for t in self.best)),
            "truth_match_max": _finite(max(t.truth_match for t in self.best)),
            "found_in": [trial.view for trial in self.best],
            "sentences": [list(trial.score.found) for trial in self.best],
            "verdict": self.verdict,
            "verdicts": _counted(self.best),
            "by_attack": {name: _attack_summary(t) for name, t in self.by_attack.items()},
            "lengths_right": self.lengths_right,
            "labels_right": self.labels_right,
            "doubtful": self.doubtful,
            "seconds": sum(read.seconds for read in reads),
        }


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TextReport(Report):
    """A row per view and adversary, on the same sentences and weights; see also ``Report``.

    Args:
        rows: a row per adversary and view, in the order of the views.
        truth: the true sentences, without padding.
        guesses: scores of each sentence without any update, by the name of the guess.
        schedule: the view that each round of a training sends.
        public: number of public sentences that the guesses are made of.
    """

    rows: tuple[TextRow, ...]
    truth: tuple[tuple[int, ...], ...]
    guesses: Mapping[str, tuple[TextScore, ...]]
    schedule: tuple[str, ...] = ()
    public: int = 0

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of guesses that are missing, for want of public sentences."""
        return () if self.guesses else ("unigram", "bigram")

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdict of each row."""
        return tuple(row.verdict for row in self.rows)

    @property
    def worst_round(self) -> TextRow | None:
        """The worst row over the rounds of the schedule and their union; None without one."""
        sent = [row for row in self.rows if row.view in self.schedule or row.view == UNION]
        return min(sent, key=lambda row: (VERDICTS.index(row.verdict), -row.exact), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        worst = self.worst_round if self.schedule else None
        return {
            "schema": TEXT_SCHEMA,
            **self.shared(),
            "sentences": len(self.truth),
            "truth": [list(sentence) for sentence in self.truth],
            "thresholds": {
                "recovered_rouge": RECOVERED_ROUGE,
                "gain": GAIN,
                "matched": MATCHED,
                "explained": EXPLAINED,
            },
            "guesses": {name: _score_medians(scores) for name, scores in self.guesses.items()},
            "public_sentences": self.public,
            "missing_baselines": list(self.missing),
            "rows": [row.to_dict() for row in self.rows],
            "schedule": None
            if worst is None
            else {
                "rounds": dict(Counter(self.schedule)),
                "worst_view": worst.view,
                "adversary": worst.adversary,
                "verdict": worst.verdict,
                "exact": worst.exact,
            },
        }


def _medians(scored: Sequence[TextTrial]) -> dict[str, float | None]:
    def over(values: Iterable[float]) -> float | None:
        found = list(values)
        return median(found) if found else None

    return {
        "rouge_median": over(t.score.rouge for t in scored),
        "f1_median": over(t.score.f1 for t in scored),
        "bag_f1_median": over(t.bag for t in scored),
        "guess_rouge_median": over(t.guess.rouge for t in scored),
        "guess_f1_median": over(t.guess.f1 for t in scored),
        "guess_bag_f1_median": over(t.guess.bag for t in scored),
    }


def _attack_summary(trials: Sequence[TextTrial]) -> dict[str, Any]:
    return {
        "sentences": len(trials),
        "exact": sum(trial.score.exact for trial in trials),
        **_medians(trials),
        "match_median": _finite(median(trial.read.match for trial in trials)),
        "verdicts": _counted(trials),
    }


def _counted(trials: Sequence[TextTrial]) -> dict[str, int]:
    return {v: sum(trial.verdict == v for trial in trials) for v in VERDICTS}


def _score_medians(scores: Sequence[TextScore]) -> dict[str, Any]:
    of: Mapping[str, Callable[[TextScore], float]] = {
        "f1_median": lambda score: score.f1,
        "rouge_median": lambda score: score.rouge,
    }
    told = {name: median(map(value, scores)) for name, value in of.items()}
    return {"exact": sum(score.exact for score in scores), **told}


def _finite(value: float) -> float | None:
    return value if value < math.inf else None  # JSON has no infinity
