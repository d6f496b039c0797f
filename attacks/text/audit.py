"""Text audit: attack what a client that trains on sentences sends, and report what came back.

As the audit of images (``attacks.audit``): an update that the true sentences do not explain is not
attacked, and the score of a guess that needs no update stands beside every score.

It is one file above 500 lines because the options are documented once, where they are checked.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accounting.checks import ConfigError
from attacks.explain import Explanation
from attacks.observation import noise_std_of, select
from attacks.report import Adversary, most_severe
from attacks.setting import Setting
from attacks.text.bag import bag_of_tokens, predicted_tokens
from attacks.text.observation import (
    NextToken,
    TextObservation,
    check_tokens,
    observe_text,
    text_model,
    text_residual,
    vocabulary,
)
from attacks.text.read import ReadText, span_test
from attacks.text.report import Guess, TextReport, TextRow, TextTrial
from attacks.text.score import (
    TextScore,
    bigram_guess,
    text_scores,
    token_f1,
    unigram_guess,
)
from attacks.update import LocalSteps, Loss, as_double, double_state

TextAttack = Callable[[nn.Module, TextObservation], ReadText | None]
ReadByAttack = dict[str, ReadText | None]  # of one batch; None where an attack does not apply
NO_ATTACK = "none"  # name of the attack in a row of a view that no attack reads
MOST_TOKENS = 2**13  # of one update
_NOTHING = ReadText((), frozenset(), math.inf, 0.0)


def _tokens_alone(
    read: Callable[[nn.Module, TextObservation], Tensor | None],
    model: nn.Module,
    seen: TextObservation,
) -> ReadText | None:
    """Return the distinct tokens that ``read`` finds, as an attack of its own."""
    started = time.perf_counter()
    found = read(model, seen)
    if found is None:
        return None
    return ReadText((), frozenset(found.tolist()), math.inf, time.perf_counter() - started)


def text_suite(*, exchanges: int = 4000) -> dict[str, TextAttack]:
    """Return every attack on text by name, cheapest first; each returns None where it cannot.

    Args:
        exchanges: updates that "span_test + exchange" may compute; 0 leaves it out.
    """
    attacks: dict[str, TextAttack] = {
        "bag_of_tokens": partial(_tokens_alone, bag_of_tokens),
        "predicted_tokens": partial(_tokens_alone, predicted_tokens),
        "span_test": span_test,
    }
    if exchanges:
        attacks["span_test + exchange"] = partial(_exchange, exchanges=exchanges)
    return attacks


def _exchange(model: nn.Module, seen: TextObservation, *, exchanges: int) -> ReadText | None:
    """Return None where there is nothing to exchange; see ``span_test``."""
    if seen.shape[0] < 2 or seen.noise_std > 0 or seen.language:
        return None
    return span_test(model, seen, exchanges=exchanges)


def text_leakage(
    model: nn.Module,
    tokens: Tensor,
    labels: Tensor | None = None,
    *,
    views: Mapping[str, Sequence[str]],
    attacks: Mapping[str, TextAttack] | None = None,
    batch: int = 1,
    pad: int | None = None,
    loss: Loss | None = None,
    update: Mapping[str, Tensor] | None = None,
    local: LocalSteps | None = None,
    clip: float | None = None,
    noise_multiplier: float = 0.0,
    delta: float = 1e-5,
    adversaries: Sequence[Adversary] | None = None,
    schedule: Sequence[str] = (),
    public: Sequence[Sequence[int]] = (),
    reveal_labels: bool = True,
    seed: int = 0,
    done: MutableMapping[str, ReadByAttack] | None = None,
    progress: Callable[[str], None] | None = None,
) -> TextReport:
    """Attack the update of each batch of sentences, once per view and adversary.

    Args:
        model: token ids (B, T) -> logits, or an output that has logits; it is attacked in eval
            mode, at its present weights.
        tokens: (N, T) ids of the true sentences.
        labels: (N,) of a text classifier; None trains a language model to predict its own tokens.
        views: see ``leakage``.
        attacks: tried in this order until one recovers the batch; None is ``text_suite()``.
        batch: sentences per update; must divide N.
        pad: id of the padding after a sentence; None if there is none.
        loss: see ``observe_text``.
        update: a given update of all the sentences as one batch; None computes it. If the
            sentences do not explain it, nothing is attacked, and the report says what is likely
            wrong.
        local: see ``Observation``.
        clip: see ``observe_text``.
        noise_multiplier: see ``observe_text``.
        delta: at which the accountant's epsilon of the noised release is printed.
        adversaries: None is the server, and the recipient of the noised sum where there is noise.
        schedule: the view that each round of a training sends, see ``leakage``.
        public: sentences that nobody has to attack, of which the guesses are made. Without any, a
            verdict is measured against nothing, and the report says so.
        reveal_labels: whether the attacker is told ``labels``.
        seed: of the noise.
        done: results so far, see ``leakage``.
        progress: called with a line before each attack.

    Raises:
        ConfigError: a pattern that matches no parameter, or an option out of range.
    """
    audit = text_audit(
        model,
        tokens,
        labels,
        views=views,
        attacks=attacks,
        batch=batch,
        pad=pad,
        loss=loss,
        update=update,
        local=local,
        clip=clip,
        noise_multiplier=noise_multiplier,
        delta=delta,
        adversaries=adversaries,
        schedule=schedule,
        public=public,
        reveal_labels=reveal_labels,
        seed=seed,
        done=done,
        progress=progress,
    )
    return audit.report()


def text_audit(
    model: nn.Module,
    tokens: Tensor,
    labels: Tensor | None,
    *,
    attacks: Mapping[str, TextAttack] | None = None,
    pad: int | None = None,
    loss: Loss | None = None,
    done: MutableMapping[str, ReadByAttack] | None = None,
    **options: Any,  # noqa: ANN401 - fields of Setting and TextAudit, which check them
) -> "TextAudit":
    """Return the audit of ``text_leakage``, whose defaults depend on one another."""
    return TextAudit(
        model=model,
        tokens=tokens,
        labels=labels,
        attacks=text_suite() if attacks is None else attacks,
        pad=pad,
        loss=loss or (NextToken(pad) if labels is None else cross_entropy),
        done={} if done is None else done,
        **options,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class TextAudit(Setting):
    """Sentences and the options of ``text_leakage``, which documents them; checked when made.

    Raises:
        ConfigError: an option out of range, or two that contradict each other.
    """

    kind: ClassVar[str] = "sentences"

    tokens: Tensor
    labels: Tensor | None
    attacks: Mapping[str, TextAttack]
    pad: int | None
    public: Sequence[Sequence[int]] = ()
    done: MutableMapping[str, ReadByAttack]
    _tried: dict[str, list[list[TextTrial]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.refuse()

    @property
    def examples(self) -> int:
        """The number of sentences."""
        return len(self.tokens)

    def refuse(self) -> None:
        """Raise a ConfigError for options with which no audit is possible, before any attack."""
        check_tokens(self.model, self.tokens, self.labels, self.pad)
        self.refuse_setting()
        if not all(self._truth):
            raise ConfigError("tokens: a row is padding alone; leave it out.")
        self._refuse_lengths()
        with torch.no_grad():
            logits = text_model(self.model, self.pad)(self.tokens[:1])
        count = vocabulary(self.model)
        self._refuse_logits(tuple(logits.shape), count)
        if self.labels is not None:
            self.refuse_labels(logits, self.labels)
        if any(not 0 <= token < count for sentence in self.public for token in sentence):
            raise ConfigError(f"public: has ids that are not 0 to {count - 1}, the model's.")

    def _refuse_lengths(self) -> None:
        """Raise a ConfigError for a batch of too many tokens, or of none that is predicted."""
        most = self.batch * self.tokens.shape[1]
        if most > MOST_TOKENS:
            raise ConfigError(
                f"tokens: {most} in one update; must be at most {MOST_TOKENS}, far more than the "
                "spans of a layer can tell apart. Cut the sentences, or choose a smaller batch."
            )
        longest = [max(map(len, self._truth[self.rows_of(number)])) for number in self.batches]
        if isinstance(self.loss, NextToken) and min(longest) < 2:
            raise ConfigError(
                "tokens: all sentences of a batch have one token, after which nothing is "
                "predicted; pass sentences of two or more."
            )

    def _refuse_logits(self, shape: tuple[int, ...], words: int) -> None:
        """Raise a ConfigError for a classifier without labels, or labels without a classifier."""
        if self.labels is not None and self.loss is cross_entropy and len(shape) != 2:
            raise ConfigError(
                f"labels: the model gives logits {shape} for one sentence, one per token; leave "
                "the labels out, or pass a model that gives (1, K)."
            )
        places = self.tokens.shape[1]
        predicts = shape[:2] == (1, places) and len(shape) == 3 and shape[-1] >= words
        if isinstance(self.loss, NextToken) and not predicts:
            raise ConfigError(
                f"labels are missing: the model gives logits {shape} for one sentence of {places} "
                f"tokens, and one that predicts its tokens gives (1, {places}, K), K at least "
                f"{words}. Pass the labels of a classifier."
            )

    def report(self) -> TextReport:
        """Run every attack on every view of every batch, for one adversary after the other."""
        rows = tuple(self._row(view, who) for who in self.everyone for view in self.every_view)
        return TextReport(
            rows=rows,
            truth=self._truth,
            guesses=self._guesses,
            seed=self.seed,
            threat=self._threat(),
            losses=tuple(self._client_loss(number) for number in self.batches),
            bound=self.accounted(),
            delta=self.delta,
            schedule=tuple(self.schedule),
            public=len(self.public),
            explanation=self.explanation,
        )

    def sentences(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Return batch ``number`` and its labels."""
        rows = self.rows_of(number)
        return self.tokens[rows], None if self.labels is None else self.labels[rows]

    def observe(self, view: str, adversary: Adversary, number: int) -> TextObservation:
        """Return what that adversary sees of batch ``number``."""
        tokens, labels = self.sentences(number)
        if self.update is not None:
            return self._observe_given(self.update, view)
        noise: dict[str, Any] = {}
        if adversary == "recipient":
            generator = torch.Generator().manual_seed(self.seed + number)
            noise = {"noise_multiplier": self.noise_multiplier, "generator": generator}
        return observe_text(
            *(self.model, tokens, labels),
            visible=self.every_view[view],
            loss=self.loss,
            pad=self.pad,
            local=self.local,
            clip=self.clip,
            reveal_labels=self.reveal_labels,
            **noise,
        )

    @cached_property
    def _truth(self) -> tuple[tuple[int, ...], ...]:
        return tuple(_unpadded(row, self.pad) for row in self.tokens.tolist())

    @cached_property
    def explanation(self) -> Explanation:
        """Of the view, adversary and batch that the true sentences explain least."""
        found = self.least_explained(text_model(self.model, self.pad))
        drops = [n for n, m in self.model.named_modules() if getattr(m, "p", 0) and _drops(m)]
        if found.explained or not drops:
            return found
        told = (
            f"dropout ({drops[0]}): a client in training mode drops units at random, and no "
            "sentence explains that; send an update made in eval mode"
        )
        return replace(found, causes=(*found.causes, told))

    def client(self, number: int) -> tuple[Tensor, Tensor]:
        """Return batch ``number``, and what its loss predicts: labels, or the tokens."""
        tokens, labels = self.sentences(number)
        return tokens, tokens if labels is None else labels

    @cached_property
    def _guesses(self) -> dict[str, tuple[TextScore, ...]]:
        """Scores of each sentence without any update; {} without public sentences."""
        if not self.public:
            return {}
        of = {"unigram": unigram_guess, "bigram": bigram_guess}
        return {
            name: tuple(
                text_scores([guess(self.public, len(true))], [true])[0] for true in self._truth
            )
            for name, guess in of.items()
        }

    @cached_property
    def _floor(self) -> list[Guess]:
        """The best guess of each sentence; zeros without public sentences."""
        every = list(self._guesses.values())
        bags = [self._guessed_bag(number) for number in self.batches]
        return [
            Guess(
                f1=max((scores[i].f1 for scores in every), default=0.0),
                rouge=max((scores[i].rouge for scores in every), default=0.0),
                bag=bags[i // self.batch],
            )
            for i in range(len(self._truth))
        ]

    def _guessed_bag(self, number: int) -> float:
        """Return the F1 of the likeliest tokens, of which we let the guess know the number."""
        known = self._tokens_of(number)
        likely = Counter(token for sentence in self.public for token in sentence)
        ranked = sorted(likely, key=lambda token: (-likely[token], token))
        return token_f1(ranked[: len(known)], sorted(known))

    def _tokens_of(self, number: int) -> set[int]:
        rows = self.rows_of(number)
        return {token for sentence in self._truth[rows] for token in sentence}

    def _observe_given(self, update: Mapping[str, Tensor], view: str) -> TextObservation:
        state = double_state(self.model)
        names = [name for name, _ in self.model.named_parameters() if name in update]
        whole = TextObservation(
            update={name: as_double(update[name]) for name in names},
            state=state,
            shape=tuple(self.tokens.shape),
            labels=self.labels if self.reveal_labels else None,
            clip=self.clip,
            noise_std=noise_std_of(self.clip, self.noise_multiplier),
            loss=self.loss,
            local=self.local,
            pad=self.pad,
            language=self.labels is None,
        )
        return whole.restrict(select(names, self.every_view[view]))

    def _row(self, view: str, adversary: Adversary) -> TextRow:
        seen = [self.observe(view, adversary, number) for number in self.batches]
        tried = [
            trials
            for number in self.batches
            for trials in self.with_parts(self._attack, view, adversary, number, seen[number])
        ]
        alone = tuple(tuple(t for t in trials if t.view == view) for trials in tried)
        best = tuple(max(trials, key=lambda trial: trial.rank) for trials in tried)
        read = [trial for trial in best if trial.read.sentences]
        return TextRow(
            **self.row_of(view, adversary, seen),
            tokens=self.batch * self.tokens.shape[1],
            alone=alone,
            best=best,
            verdict=most_severe(trial for trials in tried for trial in trials),
            lengths_right=self._lengths_right(best) if read else None,
            labels_right=self._labels_right(best) if read else None,
            doubtful=any(not trial.matched for trial in read),
        )

    def _lengths_right(self, best: Sequence[TextTrial]) -> float | None:
        if self.pad is None:
            return None
        pairs = zip(best, self._truth, strict=True)
        return sum(len(trial.score.found) == len(true) for trial, true in pairs) / len(best)

    def _labels_right(self, best: Sequence[TextTrial]) -> float | None:
        """Return the share of the labels that were inferred right, in any order."""
        if self.labels is None or self.reveal_labels:
            return None
        right = 0
        for number in self.batches:
            guess = best[number * self.batch].read.labels
            known = Counter(self.labels[number * self.batch :][: self.batch].tolist())
            right += (known & Counter([] if guess is None else guess.tolist())).total()
        return right / len(self.labels)

    def _attack(
        self, sent: str, view: str, adversary: Adversary, number: int, seen: TextObservation
    ) -> list[list[TextTrial]]:
        """Run the attacks in turn until all sentences are recovered; never run one twice."""
        key = self.key(adversary, sent, view, number)
        if key in self._tried:
            return self._tried[key]
        untried = self.untried(seen)
        if untried is not None:
            trials = self._scored(view, NO_ATTACK, _NOTHING, number, self.explanation.residual)
            return [[replace(trial, untried=untried)] for trial in trials]
        net = text_model(self.model, self.pad)
        truth = text_residual(net, seen, *self.client(number))
        tried: list[list[TextTrial]] = [[] for _ in range(self.batch)]
        for name in self.attacks:
            found = self._find(key, name, seen)
            if found is None:
                continue
            for one, trial in zip(
                tried, self._scored(view, name, found, number, truth), strict=True
            ):
                one.append(trial)
            if all(most_severe(one) == "recovered" for one in tried):
                break
        if not tried[0]:
            tried = [[trial] for trial in self._scored(view, NO_ATTACK, _NOTHING, number, truth)]
        self._tried[key] = tried
        return tried

    def _find(self, key: str, name: str, seen: TextObservation) -> ReadText | None:
        before = self.done.get(key, {})
        if name not in before:
            if self.progress is not None:
                self.progress(f"{key}: {name}")
            before = {**before, name: self.attacks[name](self.model, seen)}
            self.done[key] = before
        return before[name]

    def _scored(
        self, view: str, attack: str, found: ReadText, number: int, truth_match: float
    ) -> list[TextTrial]:
        """Return a trial per sentence of the batch."""
        rows = self.rows_of(number)
        shown = found.bag or frozenset(token for one in found.sentences for token in one)
        bag = token_f1(sorted(shown), sorted(self._tokens_of(number)))
        scores = text_scores(found.sentences, self._truth[rows])
        return [
            TextTrial(view, attack, found, score, bag, guess, truth_match)
            for score, guess in zip(scores, self._floor[rows], strict=True)
        ]

    def _client_loss(self, number: int) -> float:
        tokens, y = self.client(number)
        with torch.no_grad():
            return float(self.loss(text_model(self.model, self.pad)(tokens), y))

    def _threat(self) -> dict[str, Any]:
        """Return what the attacker knows and what was done to the update, as JSON types."""
        told = {"labels": "the tokens"} if self.labels is None else {}
        return self.shared_threat() | {
            "longest": self.tokens.shape[1],
            "padding": "none" if self.pad is None else f"token {self.pad}, lengths inferred",
            "mode": "eval",
            "attacks": list(self.attacks),
            **told,
        }


def _unpadded(row: Sequence[int], pad: int | None) -> tuple[int, ...]:
    """Return a row without the padding after the sentence."""
    end = len(row)
    while pad is not None and end and row[end - 1] == pad:
        end -= 1
    return tuple(row[:end])


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd)
