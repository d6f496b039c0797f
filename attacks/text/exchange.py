"""Exchange: put the tokens that the span test found into sentences, by the update's own residual.

Where no layer in view tells sentences apart, the tokens of each position are known and not which
sentence had which: FedPart's classifier reads its last position alone. An attacker computes the
update of any arrangement, exchanges two tokens or replaces one where the residual falls, and starts
again from the best arrangement with some tokens replaced. Labels are exchanged or replaced too.

The search starts, where the update is the mean of what its sentences would send alone, from the
sentences whose own updates point along it most: each is found token by token, and its share of the
update is taken away before the next (matching pursuit).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.reconstruction.reconstruct import flat
from attacks.rounding import first_least, less
from attacks.text.observation import text_residual
from attacks.text.sentences import additive
from attacks.text.spans import Reader
from attacks.update import simulated_update

_FOUND = 1e-12  # residual at which nothing is left to find
_STARTS = 6  # searches for each sentence alone
_KICK = 0.15  # share of the tokens replaced before the search begins again
_MOST_CHOICES = 16  # tokens of a position that replace one another; more would take too long
_MOST_LABELS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """Sentences (B, T), their labels (B,) or None of a language model, and the residual."""

    tokens: Tensor
    labels: Tensor | None
    match: float


class _EnoughError(Exception):
    """The evaluations are spent, or the update is matched."""


class _Search:
    """The best arrangement so far, and the evaluations left."""

    def __init__(self, reader: Reader, evaluations: int, begin: Arrangement) -> None:
        self.reader = reader
        self.left: float = evaluations
        self.best = begin

    def alone(self, tokens: Tensor, label: int) -> Tensor:
        """Return the update of one sentence (T,) alone, which costs as a share of the batch."""
        seen = self.reader.seen
        self.left -= 1 / seen.shape[0]
        if self.left < 1:
            raise _EnoughError
        y = tokens[None] if seen.language else torch.tensor([label])
        names = seen.sent or tuple(seen.update)
        sent = simulated_update(
            self.reader.net, seen.state, names, tokens[None], y, seen.loss, seen.local
        )
        return flat(sent[name] for name in seen.update)

    def tried(self, tokens: Tensor, labels: Tensor | None) -> Arrangement:
        """Return the arrangement with its residual; ends the search where there is enough."""
        if self.left < 1:
            raise _EnoughError
        self.left -= 1
        y = tokens if labels is None else labels
        match = text_residual(self.reader.net, self.reader.seen, tokens, y)
        found = Arrangement(tokens, labels, match)
        if less(match, self.best.match):
            self.best = found
        if match <= _FOUND:
            raise _EnoughError
        return found


def exchanged(
    reader: Reader,
    columns: Sequence[Sequence[int]],
    begin: Arrangement,
    *,
    evaluations: int,
    classes: int = 0,
) -> Arrangement:
    """Return the arrangement of least residual that the search meets; never a worse one.

    Args:
        reader: of the update.
        columns: for each position, the tokens that some sentence has there.
        begin: where the search starts.
        evaluations: updates that may be computed.
        classes: number of labels, where they are hidden; 0 keeps the given ones.
    """
    generator = torch.Generator().manual_seed(0)
    search = _Search(reader, evaluations, begin)
    try:
        start = begin
        if additive(reader.seen):
            start = search.tried(*_pursued(search, columns, classes, generator))
        while True:
            before = search.left
            _descend(search, columns, start, classes, generator)
            tokens = _kicked(search.best.tokens, columns, generator)
            if search.left == before:  # nothing can be moved
                break
            start = search.tried(tokens, search.best.labels)
    except _EnoughError:
        pass
    return search.best


def _pursued(
    search: "_Search", columns: Sequence[Sequence[int]], classes: int, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Return sentences and labels, each with the update that lies most along what is left."""
    seen = search.reader.seen
    whole = flat(seen.update.values()).double()
    left = whole
    known = None if seen.labels is None else Counter(seen.labels.tolist())
    found: list[_Alone] = []
    for _ in range(seen.shape[0]):
        labels = range(min(classes, _MOST_LABELS)) if known is None else sorted(known)
        tried = (_climbed(search, columns, labels, left, generator) for _ in range(_STARTS))
        found.append(_best(list(tried)))
        if known is not None:
            known = known - Counter([found[-1].label])
        sent = torch.stack([search.alone(one.tokens, one.label) for one in found], 1)
        left = whole - sent @ torch.linalg.lstsq(sent, whole[:, None]).solution[:, 0]
    tokens = torch.stack([one.tokens for one in found])
    return tokens, None if seen.language else torch.tensor([one.label for one in found])


@dataclass(frozen=True, slots=True, eq=False)
class _Alone:
    """One sentence, its label, and the cosine of its update with what is left."""

    tokens: Tensor
    label: int
    score: float


def _climbed(
    search: "_Search",
    columns: Sequence[Sequence[int]],
    labels: Sequence[int],
    left: Tensor,
    generator: torch.Generator,
) -> _Alone:
    """Return a sentence that no other single token or label improves, from a random one."""
    pad = search.reader.seen.pad
    choices = [sorted({*column, *([] if pad is None else [pad])}) or [0] for column in columns]
    drawn = [int(torch.randint(len(one), (), generator=generator)) for one in choices]
    tokens = torch.tensor([one[i] for one, i in zip(choices, drawn, strict=True)])

    def scored(tokens: Tensor, label: int) -> _Alone:
        sent = search.alone(tokens, label)
        return _Alone(tokens, label, abs(float(torch.cosine_similarity(sent, left, 0))))

    now = _best([scored(tokens, label) for label in labels or (0,)])
    while True:
        before = now.score
        for position in torch.randperm(len(choices), generator=generator).tolist():
            for token in choices[position]:
                if token != now.tokens[position]:
                    moved = now.tokens.clone()
                    moved[position] = token
                    now = _best([now, scored(moved, now.label)])
        for label in labels:
            now = _best([now, scored(now.tokens, label)])
        if not less(before, now.score):
            return now


def _descend(
    search: _Search,
    columns: Sequence[Sequence[int]],
    start: Arrangement,
    classes: int,
    generator: torch.Generator,
) -> None:
    """Take the best move at one position after the other until no position has one."""
    now = start
    while True:
        before = now.match
        for position in torch.randperm(len(columns), generator=generator).tolist():
            moved = list(_moves(now.tokens, position, columns[position]))
            now = _nearest([now, *(search.tried(x, now.labels) for x in moved)])
        if now.labels is not None:
            relabelled = list(_labels(now.labels, classes))
            now = _nearest([now, *(search.tried(now.tokens, y) for y in relabelled)])
        if not less(now.match, before):
            return


def _best(tried: Sequence[_Alone]) -> _Alone:
    return tried[first_least([-one.score for one in tried], -math.inf)]


def _nearest(tried: Sequence[Arrangement]) -> Arrangement:
    return tried[first_least([one.match for one in tried])]


def _moves(tokens: Tensor, position: int, column: Sequence[int]) -> Iterator[Tensor]:
    """Yield the sentences with two tokens of a position exchanged, or one of them replaced."""
    here = tokens[:, position].tolist()
    for i, j in torch.combinations(torch.arange(len(here)), 2).tolist():
        if here[i] != here[j]:
            moved = tokens.clone()
            moved[i, position], moved[j, position] = here[j], here[i]
            yield moved
    if len(column) <= _MOST_CHOICES:
        for i, own in enumerate(here):
            for token in column:
                if token != own:
                    moved = tokens.clone()
                    moved[i, position] = token
                    yield moved


def _labels(labels: Tensor, classes: int) -> Iterator[Tensor]:
    """Yield the labels with two exchanged, or where they are hidden with one replaced."""
    for i, own in enumerate(labels.tolist()):
        others = range(min(classes, _MOST_LABELS)) if classes else ()
        for label in others:
            if label != own:
                moved = labels.clone()
                moved[i] = label
                yield moved
        for j in range(i) if not classes else ():
            if labels[j] != own:
                moved = labels.clone()
                moved[i], moved[j] = labels[j], own
                yield moved


def _kicked(tokens: Tensor, columns: Sequence[Sequence[int]], generator: torch.Generator) -> Tensor:
    """Return the sentences with a share of the tokens replaced by others of their position."""
    moved = tokens.clone()
    for position, column in enumerate(columns):
        if column:
            drawn = torch.randint(len(column), (len(tokens),), generator=generator)
            change = torch.rand(len(tokens), generator=generator) < _KICK
            moved[:, position] = torch.where(
                change, torch.tensor(column)[drawn], tokens[:, position]
            )
    return moved
