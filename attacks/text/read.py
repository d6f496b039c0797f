"""Read: the text of a client's batch, from its update alone."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

import torch
from torch import Tensor, nn

from attacks.observation import residual_of
from attacks.reconstruction.analytic import ordered
from attacks.rounding import first_least, less
from attacks.text.bag import bag_of_tokens
from attacks.text.observation import TextObservation, one_batch
from attacks.text.sentences import Sentence, assembled, completed, padded
from attacks.text.spans import Reader, tokens_in_span
from attacks.update import norm

_UNMATCHED = 1e-6  # residual above which the sentences do not explain the update
_SOLVED = 1e-12
_KICK = 0.15  # share of the tokens replaced before a search begins again
_MOST_CHOICES = 16  # tokens of a position that replace one another; more would take too long
_MOST_LABELS = 64  # combinations of labels tried before they are improved one by one


@dataclass(frozen=True, slots=True, eq=False)
class ReadText:
    """What an attack read in an update.

    Args:
        sentences: up to B sentences of token ids, without padding.
        bag: ids that the update shows to be in the batch.
        match: relative residual of the update of these sentences, ||u(s) - u||^2 / ||u||^2;
            infinite where they are not a whole batch.
        by_position: for each position, the tokens that the span test accepted.
        labels: of a classifier, as matched; None for a language model.
        seconds: that it took, measured by the audit.
    """

    sentences: tuple[Sentence, ...]
    bag: frozenset[int]
    match: float
    by_position: tuple[tuple[int, ...], ...] = ()
    labels: Tensor | None = None
    seconds: float = 0.0

    @property
    def tokens(self) -> frozenset[int]:
        """The ids that the update shows, or that stand in the sentences."""
        return self.bag or frozenset(token for row in self.sentences for token in row)


def span_test(
    model: nn.Module, observed: TextObservation, *, exchanges: int = 0
) -> ReadText | None:
    """Return what the spans of the visible dense gradients tell; see ``spans``.

    ``exchanges`` are updates that may be computed to put tokens of several sentences into the right
    ones, where the spans do not tell. Not under noise, nor of a language model, whose last tokens
    no span shows, so that other sentences may match better.

    Return None where no dense layer in view reads single tokens, or there are as many tokens as
    directions.
    """
    if norm(observed.update) == 0:
        return None
    observed = one_batch(observed)
    reader = Reader(model, observed)
    columns = tokens_in_span(reader, bag_of_tokens(model, observed))
    if columns is None:
        return None
    bag = frozenset(token for column in columns for token in column)
    batch, _ = observed.shape
    sentences: Sequence[Sentence] = assembled(reader, columns)
    if not sentences and batch == 1 and columns[0]:
        sentences = [tuple(column[0] for column in columns if column)]
    if observed.language and sentences:
        sentences = completed(reader, sentences)
    labels, match = None, math.inf
    if sentences:
        tokens = _padded(sentences, observed)
        if observed.language:
            match = residual_of(reader.net, observed, tokens, tokens)
        else:
            labels, match = _labelled(reader, tokens)
    else:
        # the right tokens at the right positions, each sentence mixed from several
        rows = [tuple(c[min(i, len(c) - 1)] for c in columns if c) for i in range(batch)]
        sentences = [row for row in rows if row]
    comparable = observed.noise_std == 0 and not observed.language and batch > 1
    if exchanges and comparable and sentences and match > _UNMATCHED:
        sentences, labels, match = _exchanged(reader, columns, sentences, exchanges)
    return ReadText(tuple(sentences), bag, match, columns, labels)


def _exchanged(
    reader: Reader, columns: Sequence[Sequence[int]], sentences: Sequence[Sentence], budget: int
) -> tuple[list[Sentence], Tensor, float]:
    """Return sentences, labels and residual after tokens moved between sentences.

    Coordinate descent on the update's own residual: at one position after the other, two sentences
    exchange their tokens, or one takes another token of the position. Labels are a position more.
    Where no move helps, the search begins again from the best with some tokens replaced.
    """
    observed, draw = reader.seen, torch.Generator().manual_seed(0)
    tokens = _padded(sentences, observed)
    labels, match = _labelled(reader, tokens)
    classes = range(min(reader.classes, _MOST_LABELS))
    choices = [*columns, () if observed.labels is not None else classes]

    def residual(state: Tensor) -> float:
        return residual_of(reader.net, observed, state[:, :-1], state[:, -1])

    state = best = torch.cat([tokens, labels[:, None]], 1)
    value = match
    while budget > 0 and match > _SOLVED:
        before = value
        for place in torch.randperm(len(choices), generator=draw).tolist():
            moves = [state, *_moves(state, place, choices[place])]
            values = [value, *map(residual, moves[1:])]
            budget -= len(moves)
            nearest = first_least(values)
            state, value = moves[nearest], values[nearest]
            if less(value, match):
                best, match = state, value
            if budget <= 0 or match <= _SOLVED:
                break
        if not less(value, before):
            state = _kicked(best, choices, draw)
            value = residual(state)
    rows = [tuple(token for token in row if token != observed.pad) for row in best[:, :-1].tolist()]
    return rows, best[:, -1], match


def _moves(state: Tensor, place: int, choices: Sequence[int]) -> Iterator[Tensor]:
    """Yield the state with two entries of a column exchanged, or one of them replaced."""
    column = state[:, place].tolist()
    changes = [{i: column[j], j: column[i]} for i, j in combinations(range(len(column)), 2)]
    if len(choices) <= _MOST_CHOICES:
        changes += [{i: token} for i in range(len(column)) for token in choices]
    for change in changes:
        if any(column[i] != token for i, token in change.items()):
            moved = state.clone()
            moved[list(change), place] = torch.tensor(list(change.values()))
            yield moved


def _kicked(state: Tensor, choices: Sequence[Sequence[int]], draw: torch.Generator) -> Tensor:
    """Return the state with a share of its entries replaced by others of their column."""
    moved = state.clone()
    for place, column in enumerate(choices):
        if column:
            drawn = torch.randint(len(column), (len(state),), generator=draw)
            kicked = torch.rand(len(state), generator=draw) < _KICK
            moved[kicked, place] = torch.tensor(column)[drawn][kicked]
    return moved


def _padded(sentences: Sequence[Sentence], observed: TextObservation) -> Tensor:
    """Return the sentences as (B, T) ids; missing ones repeat the first."""
    batch, length = observed.shape
    cut = [sentence[:length] for sentence in sentences]
    return padded([*cut, *cut[:1] * (batch - len(cut))], observed)


def _labelled(reader: Reader, tokens: Tensor) -> tuple[Tensor, float]:
    """Return the labels that match best of all, or where these are many, of single changes."""
    if reader.seen.labels is not None:
        return ordered(
            reader.seen.labels, lambda y: residual_of(reader.net, reader.seen, tokens, y)
        )
    batch, count = len(tokens), reader.classes

    def residual(y: Sequence[int]) -> float:
        return residual_of(reader.net, reader.seen, tokens, torch.tensor(y))

    if count**batch <= _MOST_LABELS:
        choices = list(product(range(count), repeat=batch))
        tried = [residual(labels) for labels in choices]
        best = first_least(tried)
        return torch.tensor(choices[best]), tried[best]
    y = [0] * batch
    match = residual(y)
    for i in [*range(batch)] * 2:
        for label in range(min(count, _MOST_LABELS)):
            other = [*y[:i], label, *y[i + 1 :]]
            if less(changed := residual(other), match):
                y, match = other, changed
    return torch.tensor(y), match
