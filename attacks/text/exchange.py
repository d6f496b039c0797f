"""Exchange: put the tokens that the span test found into sentences, by the update's own residual.

Where no layer in view tells sentences apart, the tokens of each position are known and not which
sentence had which: FedPart's classifier reads its last position alone. An attacker computes the
update of any arrangement, exchanges two tokens or replaces one where the residual falls, and starts
again from the best arrangement with some tokens replaced. Labels are exchanged or replaced too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacks.text.observation import text_residual
from attacks.text.spans import Reader

_FOUND = 1e-12  # residual at which nothing is left to find
_RANDOM = 3  # starts from random arrangements, after the given one
_KICK = 0.15  # share of the tokens replaced in later starts
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

    def __init__(self, reader: Reader, evaluations: int) -> None:
        self.reader = reader
        self.left = evaluations
        self.best: Arrangement | None = None

    def tried(self, tokens: Tensor, labels: Tensor | None) -> Arrangement:
        """Return the arrangement with its residual; ends the search where there is enough."""
        if self.left < 1:
            raise _EnoughError
        self.left -= 1
        y = tokens if labels is None else labels
        match = text_residual(self.reader.net, self.reader.seen, tokens, y)
        found = Arrangement(tokens, labels, match)
        if self.best is None or match < self.best.match:
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
    search = _Search(reader, evaluations)
    search.best = begin
    start, number = begin, 0
    try:
        while search.left > 0:
            before = search.left
            _descend(search, columns, start, classes, generator)
            number += 1
            share = 1.0 if number <= _RANDOM else _KICK
            tokens = _kicked(search.best.tokens, columns, share, generator)
            start = search.tried(tokens, search.best.labels)
            if search.left >= before - 1:  # nothing can be moved
                break
    except _EnoughError:
        pass
    return search.best


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
            now = min([now, *(search.tried(x, now.labels) for x in moved)], key=_match)
        if now.labels is not None:
            relabelled = list(_labels(now.labels, classes))
            now = min([now, *(search.tried(now.tokens, y) for y in relabelled)], key=_match)
        if now.match >= before:
            return


def _match(one: Arrangement) -> float:
    return one.match


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


def _kicked(
    tokens: Tensor, columns: Sequence[Sequence[int]], share: float, generator: torch.Generator
) -> Tensor:
    """Return the sentences with a share of the tokens replaced by others of their position."""
    moved = tokens.clone()
    for position, column in enumerate(columns):
        if column:
            drawn = torch.randint(len(column), (len(tokens),), generator=generator)
            change = torch.rand(len(tokens), generator=generator) < share
            moved[:, position] = torch.where(
                change, torch.tensor(column)[drawn], tokens[:, position]
            )
    return moved
