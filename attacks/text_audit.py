"""Text audit: what an update gives away of the sentences that a client trained on."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accounting.checks import ConfigError
from attacks.audit import Attack, Audit
from attacks.metrics import rarely_passed
from attacks.report import Guess, TextReport, TextRow, TextTrial
from attacks.text.bag import bag_of_tokens, predicted_tokens
from attacks.text.observation import (
    NextToken,
    TextObservation,
    check_tokens,
    observe_text,
    text_model,
    vocabulary,
    without_padding,
)
from attacks.text.read import ReadText, span_test
from attacks.text.score import TextScore, bigram_guess, text_scores, token_f1, unigram_guess
from attacks.update import Loss

TextAttack = Attack[TextObservation, ReadText]
MOST_TOKENS = 2**13  # of one update


def text_suite(*, exchanges: int = 4000) -> dict[str, TextAttack]:
    """Return every attack on text by name, cheapest first; each returns None where it cannot.

    Args:
        exchanges: updates that "span_test + exchange" may compute; 0 leaves it out.
    """

    def exchanged(model: nn.Module, observed: TextObservation, _: int) -> ReadText | None:
        if observed.shape[0] < 2 or observed.noise_std > 0 or observed.language:
            return None
        return span_test(model, observed, exchanges=exchanges)

    attacks: dict[str, TextAttack] = {
        "bag_of_tokens": _tokens_alone(bag_of_tokens),
        "predicted_tokens": _tokens_alone(predicted_tokens),
        "span_test": lambda model, observed, _: span_test(model, observed),
    }
    return attacks | ({"span_test + exchange": exchanged} if exchanges else {})


def _tokens_alone(read: Callable[[nn.Module, TextObservation], Tensor | None]) -> TextAttack:
    """Return an attack that shows the distinct tokens that ``read`` does."""

    def attack(model: nn.Module, observed: TextObservation, _: int) -> ReadText | None:
        bag = read(model, observed)
        return None if bag is None else ReadText((), frozenset(bag.tolist()), math.inf)

    return attack


def text_leakage(
    model: nn.Module,
    tokens: Tensor,
    labels: Tensor | None = None,
    **options: Any,  # noqa: ANN401 - fields of TextAudit, which checks them
) -> TextReport:
    """Attack the update of each batch of sentences; ``views`` and all options are of TextAudit."""
    return TextAudit(model=model, x=tokens, y=labels, **options).report()


@dataclass(frozen=True, kw_only=True, eq=False)
class TextAudit(Audit[TextObservation, ReadText, TextTrial]):
    """Sentences, and what is public of their language; for the other options see ``Audit``.

    The model maps token ids (B, T) to logits, or to an output that has logits; it is attacked in
    eval mode.

    The sentences are ``x`` (N, T); ``y`` are the labels (N,) of a text classifier, or None for a
    language model, which predicts its own tokens. Guesses are made of ``public`` sentences; without
    any, a verdict is measured against nothing, and the report says so.
    """

    kind = "sentences"
    suite = staticmethod(text_suite)

    pad: int | None = None  # id of the padding after a sentence
    public: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        check_tokens(self.model, self.x, self.y, self.pad)
        self.refuse()
        if not all(self._truth):
            raise ConfigError("tokens: a row is padding alone; leave it out.")
        with torch.no_grad():
            logits = self.net(self.x[:1])
        count = vocabulary(self.model)
        self._refuse_shapes(tuple(logits.shape))
        if self.y is not None:
            self.refuse_labels(logits, self.y)
        if any(not 0 <= token < count for sentence in self.public for token in sentence):
            raise ConfigError(f"public: has ids that are not 0 to {count - 1}, the model's.")

    def _refuse_shapes(self, logits: tuple[int, ...]) -> None:
        """Raise a ConfigError for batches too long or too short, and logits of another task."""
        size = self.examples * self.x.shape[1]
        if size > MOST_TOKENS:
            raise ConfigError(
                f"tokens: {size} in one update; must be at most {MOST_TOKENS}. Cut the sentences, "
                "or choose a smaller batch."
            )
        longest = [max(map(len, self._truth[self.rows_of(number)])) for number in self.batches]
        if isinstance(self.client_loss, NextToken) and min(longest) < 2:
            raise ConfigError(
                "tokens: all sentences of a batch have one token, after which nothing is "
                "predicted; pass sentences of two or more."
            )
        of_tokens = logits[:-1] == (1, self.x.shape[1]) and logits[-1] >= vocabulary(self.model)
        if self.loss is None and not (len(logits) == 2 if self.y is not None else of_tokens):
            raise ConfigError(
                f"labels: the model gives logits {logits} for one sentence; must be (1, K) with "
                "labels, and without labels one for each token and id of the embedding."
            )

    @property
    def client_loss(self) -> Loss:
        """Cross-entropy of the labels, or of the next tokens, unless another is named."""
        return self.loss or (NextToken(self.pad) if self.y is None else cross_entropy)

    @cached_property
    def net(self) -> nn.Module:
        """The model in eval mode, from ids to logits."""
        return text_model(self.model, self.pad)

    def _computed(self, number: int, options: dict[str, Any]) -> TextObservation:
        rows = self.rows_of(number)
        labels = None if self.y is None else self.y[rows]
        return observe_text(self.model, self.x[rows], labels, pad=self.pad, **options)

    def _given(self, fields: dict[str, Any]) -> TextObservation:
        return TextObservation(**fields, pad=self.pad, language=self.y is None)

    def _nothing(self, _: int) -> ReadText:
        return ReadText((), frozenset(), math.inf)

    def _scored(
        self, view: str, attack: str, result: ReadText, number: int, match: dict[str, Any]
    ) -> list[TextTrial]:
        rows = self.rows_of(number)
        bag = token_f1(sorted(result.tokens), sorted(self._tokens_of(number)))
        scores = text_scores(result.sentences, self._truth[rows])
        return [
            TextTrial(view, attack, result, score, bag, guess, **match)
            for score, guess in zip(scores, self._floor[rows], strict=True)
        ]

    def report(self) -> TextReport:
        """Run every attack on every view of every batch, for one adversary after the other."""
        threat: dict[str, Any] = {
            "longest": self.x.shape[1],
            "padding": "none" if self.pad is None else f"token {self.pad}, lengths inferred",
            "mode": "eval",
        }
        if self.y is None:
            threat["labels"] = "the tokens"
        return TextReport(
            rows=self.rows(self._text_row),
            truth=self._truth,
            guesses=self._guesses,
            public=len(self.public),
            missing=() if self._guesses else ("unigram", "bigram"),
            **self.shared(threat),
        )

    def _text_row(self, fields: dict[str, Any], _: list[TextObservation]) -> TextRow:
        row = TextRow(**fields)
        best = row.best
        if not (read := [trial for trial in best if trial.result.sentences]):
            return row
        lengths = [
            len(trial.score.found) == len(t) for trial, t in zip(best, self._truth, strict=True)
        ]
        return replace(
            row,
            lengths_right=None if self.pad is None else sum(lengths) / len(best),
            labels_right=self.labels_right(best),
            doubtful=any(not trial.matched for trial in read),
        )

    @cached_property
    def _truth(self) -> tuple[tuple[int, ...], ...]:
        return tuple(without_padding(row, self.pad) for row in self.x.tolist())

    @cached_property
    def _guesses(self) -> dict[str, tuple[TextScore, ...]]:
        """Scores of each sentence without any update; {} without public sentences."""
        guesses = {"unigram": unigram_guess, "bigram": bigram_guess} if self.public else {}
        return {
            name: tuple(
                text_scores([guess(self.public, len(true))], [true])[0] for true in self._truth
            )
            for name, guess in guesses.items()
        }

    @cached_property
    def _floor(self) -> list[Guess]:
        """The best guess of each sentence; zeros without public sentences."""
        counts = Counter(token for sentence in self.public for token in sentence)
        ranked = sorted(counts, key=lambda token: (-counts[token], token))
        # we let the guess know how many distinct tokens the batch has
        truths = [sorted(self._tokens_of(number)) for number in self.batches]
        bags = [token_f1(ranked[: len(truth)], truth) for truth in truths]
        size = self.examples
        batches = [self.public[i : i + size] for i in range(0, len(self.public) - size + 1, size)]
        drawn = [sorted({token for row in rows for token in row}) for rows in batches]
        chances = [rarely_passed([token_f1(one, truth) for one in drawn]) for truth in truths]
        return [
            Guess(
                f1=max((scores[i].f1 for scores in self._guesses.values()), default=0.0),
                rouge=max((scores[i].rouge for scores in self._guesses.values()), default=0.0),
                bag=bags[i // size],
                chance=rarely_passed([token_f1(sentence, true) for sentence in self.public]),
                chance_bag=chances[i // size],
            )
            for i, true in enumerate(self._truth)
        ]

    def _tokens_of(self, number: int) -> set[int]:
        return {token for sentence in self._truth[self.rows_of(number)] for token in sentence}
