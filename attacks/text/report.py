"""Text report: verdicts per view and adversary, beside guesses that need no update.

The words are those of the audit of images. Nothing here certifies privacy: a score is a lower bound
on what leaks, and the accountant's bound is printed beside it, never derived from it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from attacks.explain import EXPLAINED
from attacks.metrics import wilson
from attacks.report import (
    MATCHED,
    VERDICTS,
    Report,
    Verdict,
    ViewRow,
    counts,
    finite,
    over,
    worst_row,
)
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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TextRow(ViewRow[TextTrial]):
    """One view of an update of sentences, and one adversary; see also ``ViewRow``.

    Args:
        tokens: of one batch.
        lengths_right: share of the sentences whose length was inferred right; None where no
            sentence is padded, or none was read.
        labels_right: share of the labels that were inferred right; None where they were revealed,
            are the tokens themselves, or nothing was read.
        doubtful: whether the text that was read does not explain the update, so that its lengths
            and labels are guesses.
    """

    tokens: int
    lengths_right: float | None = None
    labels_right: float | None = None
    doubtful: bool = False

    @property
    def exact(self) -> int:
        """Number of sentences that were read token for token."""
        return sum(trial.score.exact for trial in self.best)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types; only ``seconds`` differs between two equal runs."""
        reads = list({id(t.read): t.read for one in self.alone for t in one}.values())
        return {
            **self.shared(tokens=self.tokens),
            "exact": self.exact,
            "recovered": self.recovered,
            "recovered_rate_95": list(wilson(self.recovered, len(self.best))),
            **_medians(self.attacked),
            "match_median": finite(median(t.read.match for t in self.best)),
            "truth_match_max": finite(max(t.truth_match for t in self.best)),
            "found_in": [trial.view for trial in self.best],
            "sentences": [list(trial.score.found) for trial in self.best],
            "verdict": self.verdict,
            "verdicts": counts(self.best),
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
    def worst_round(self) -> TextRow | None:
        """The worst row over the rounds of the schedule and their union; None without one."""
        if not self.schedule:
            return None
        return worst_row(self.rows, self.schedule, lambda row: row.exact)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        worst = self.worst_round
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
    return {
        "rouge_median": over(median, [t.score.rouge for t in scored]),
        "f1_median": over(median, [t.score.f1 for t in scored]),
        "bag_f1_median": over(median, [t.bag for t in scored]),
        "guess_rouge_median": over(median, [t.guess.rouge for t in scored]),
        "guess_f1_median": over(median, [t.guess.f1 for t in scored]),
        "guess_bag_f1_median": over(median, [t.guess.bag for t in scored]),
    }


def _attack_summary(trials: Sequence[TextTrial]) -> dict[str, Any]:
    return {
        "sentences": len(trials),
        "exact": sum(trial.score.exact for trial in trials),
        **_medians(trials),
        "match_median": finite(median(trial.read.match for trial in trials)),
        "verdicts": counts(trials),
    }


def _score_medians(scores: Sequence[TextScore]) -> dict[str, Any]:
    of: Mapping[str, Callable[[TextScore], float]] = {
        "f1_median": lambda score: score.f1,
        "rouge_median": lambda score: score.rouge,
    }
    told = {name: median(map(value, scores)) for name, value in of.items()}
    return {"exact": sum(score.exact for score in scores), **told}
