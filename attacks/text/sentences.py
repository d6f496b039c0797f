"""Sentences: put the tokens that spans revealed in order, and complete them by the gradient.

In a decoder the inputs of the second layer depend on the tokens before them, so sentences grow from
the left; in an encoder they depend on the whole sentence, and one token after another is replaced
by a better one (DAGER searches there exhaustively). Either search costs forward passes only.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from attacks.text.observation import TextObservation, text_residual
from attacks.text.spans import FoundTokens, Reader, Source, Span, span
from attacks.update import norm, simulated_update

_KEPT = 16  # prefixes per sentence of the batch
_GAP = 3.0  # between the distances of true and of false prefixes
_STARTS = 1  # searches for each sentence in a turn
_TURNS = 6
_SWEEPS = 8
_ALIKE = 100.0  # how much farther than the nearest a true sentence may be
_ENOUGH = 8  # open directions that tell sentences apart
_NEAREST = 12  # last tokens tried per sentence
_STEP = 1e-3  # length of the step in a difference quotient

Sentence = tuple[int, ...]


def sentence_source(reader: Reader) -> tuple[Source, Span] | None:
    """Return the layer in view whose span tells most of whole sentences, or of their prefixes.

    Its rank must show every token: a classifier's last layer sends fewer directions than tokens.
    """
    found = [(s, span(reader.seen, s)) for s in reader.sources if s.reach != "token"]
    useful = [(s, one) for s, one in found if one.rank > 0 and one.open > 0]
    wide = [(s, one) for s, one in useful if one.open >= _ENOUGH] or useful
    return max(wide, key=lambda pair: (pair[1].rank, pair[1].condition), default=None)


def assembled(reader: Reader, tokens: FoundTokens) -> list[Sentence]:
    """Return the sentences of the batch, as far as a layer in view tells; [] where none does."""
    best = sentence_source(reader)
    if best is None or not tokens.by_position[0]:
        return []
    source, seen = best
    if source.reach == "prefix":
        return _grown(reader, source, seen, tokens)
    return _replaced(reader, source, seen, tokens)


def _grown(reader: Reader, source: Source, seen: Span, tokens: FoundTokens) -> list[Sentence]:
    """Return sentences grown from the left, a token at a time."""
    batch = reader.seen.shape[0]
    alive: list[Sentence] = [()]
    ended: list[Sentence] = []
    for position, column in enumerate(tokens.by_position):
        longer = [(*prefix, token) for prefix in alive for token, _ in column]
        if not longer:
            break
        rows = reader.inputs(source, torch.tensor(longer))[:, position]
        distances = seen.distance(rows)
        kept = _before_gap(distances, len(column), batch, seen.threshold(len(longer)))
        grown = [longer[i] for i in kept]
        stems = {one[:-1] for one in grown}
        ended += [prefix for prefix in alive if prefix and prefix not in stems]
        alive = grown
    return [*alive, *ended][:batch]


def _before_gap(distances: Tensor, least: int, most: int, threshold: float) -> list[int]:
    """Return the positions of the nearest, up to the widest gap among their distances."""
    order = distances.argsort()
    order = order[distances[order] <= threshold]
    least = min(least, most, len(order))
    if len(order) <= least:
        return order.tolist()
    logs = distances[order].clamp(min=1e-16).log()
    gaps = (logs[1:] - logs[:-1])[max(least - 1, 0) : most]
    count = max(least - 1, 0) + int(gaps.argmax()) + 1 if len(gaps) else least
    if len(gaps) and float(gaps.max()) < torch.tensor(_GAP).log():
        count = most * _KEPT  # no gap: a later position decides
    return order[:count].tolist()


def _replaced(reader: Reader, source: Source, seen: Span, tokens: FoundTokens) -> list[Sentence]:
    """Return sentences found by replacing one token at a time, nearest first.

    Tokens of sentences that were found are left out of the next turn, as far as others remain.
    """
    columns = [[token for token, _ in column] for column in tokens.by_position if column]
    batch = reader.seen.shape[0]
    generator = torch.Generator().manual_seed(0)
    found: dict[Sentence, float] = {}
    for _ in range(_TURNS):
        done = _nearest(found)[:batch]
        if len(done) == batch:
            break
        used = [{sentence[i] for sentence in done} for i in range(len(columns))]
        open_columns = [
            [token for token in column if token not in known] or column
            for column, known in zip(columns, used, strict=True)
        ]
        found |= _descended(reader, source, seen, open_columns, generator)
    return (_nearest(found) + sorted(found.keys() - _nearest(found), key=found.__getitem__))[:batch]


def _nearest(found: Mapping[Sentence, float]) -> list[Sentence]:
    """Return the sentences that are nearly as near as the nearest, in this order."""
    if not found:
        return []
    limit = _ALIKE * max(min(found.values()), 1e-12)
    return sorted((s for s in found if found[s] <= limit), key=found.__getitem__)


def _descended(
    reader: Reader,
    source: Source,
    seen: Span,
    columns: Sequence[Sequence[int]],
    generator: torch.Generator,
) -> dict[Sentence, float]:
    """Return sentences that no single other token improves, and the distance of each.

    All searches advance together; each keeps the token of the position with most choices.
    """
    anchor = max(range(len(columns)), key=lambda i: len(columns[i]))
    count = len(columns[anchor]) * _STARTS
    choices = [torch.tensor(column) for column in columns]
    state = torch.stack(
        [column[torch.randint(len(column), (count,), generator=generator)] for column in choices], 1
    )
    state[:, anchor] = choices[anchor].repeat(_STARTS)
    least = torch.full((count,), torch.inf, dtype=torch.float64)
    moving = torch.arange(count)
    for _ in range(_SWEEPS):
        before = least[moving].clone()
        for i, column in enumerate(choices):
            if i == anchor or (len(column) < 2 and bool(least[moving].isfinite().all())):
                continue
            tried = state[moving].repeat_interleave(len(column), 0)
            tried[:, i] = column.repeat(len(moving))
            left = seen.distance(reader.inputs(source, tried)).square().mean(1).sqrt()
            least[moving], best = left.reshape(len(moving), -1).min(1)
            state[moving, i] = column[best]
        moving = moving[least[moving] < before]
        if not len(moving):
            break
    return {tuple(s): d for s, d in zip(state.tolist(), least.tolist(), strict=True)}


def completed(reader: Reader, sentences: Sequence[Sentence]) -> list[Sentence]:
    """Return the sentences with their last tokens, which a decoder predicts but never reads.

    Of the gradient, only the label at the position before depends on such a token. What the known
    tokens leave of the update is compared with all labels at once: a step of the weights along it
    raises the likelihood of the true one most. The nearest are then tried exactly.
    """
    seen = reader.seen
    batch, length = seen.shape
    open_rows = [i for i, s in enumerate(sentences) if len(s) < length]
    if not open_rows or len(sentences) < batch:
        return list(sentences)
    gain = _along(reader, [[*s, _any_token(seen)] if len(s) < length else s for s in sentences])
    whole = [list(s) for s in sentences]
    nearest = {i: gain[i].argsort(descending=True)[:_NEAREST].tolist() for i in open_rows}
    for i in open_rows:
        whole[i].append(nearest[i][0])
    least = _residual(reader, whole)
    for _ in range(2):
        before = least
        for i in open_rows:
            for token in nearest[i]:
                tried = [[*s[:-1], token] if j == i else s for j, s in enumerate(whole)]
                residual = _residual(reader, tried)
                if residual < least:
                    whole, least = tried, residual
        if least == before:
            break
    return [tuple(s) for s in whole]


def _residual(reader: Reader, sentences: Sequence[Sequence[int]]) -> float:
    tokens = _filled(reader, sentences)
    return text_residual(reader.net, reader.seen, tokens, tokens)


def _filled(reader: Reader, sentences: Sequence[Sequence[int]]) -> Tensor:
    length = reader.seen.shape[1]
    fill = reader.seen.pad or 0
    return torch.tensor([[*s, *[fill] * (length - len(s))] for s in sentences])


def _any_token(seen: TextObservation) -> int:
    return 1 if seen.pad == 0 else 0


def _along(reader: Reader, sentences: Sequence[Sequence[int]]) -> Tensor:
    """Return how much each last label of sentences with any last token gains, (B, V).

    That is, from a step of the weights along what these sentences leave of the update.
    """
    seen = reader.seen
    tokens = _filled(reader, sentences)
    names = seen.sent or tuple(seen.update)
    said = simulated_update(reader.net, seen.state, names, tokens, tokens, seen.loss, seen.local)
    ours = torch.cat([said[name].flatten() for name in seen.update])
    theirs = torch.cat([value.double().flatten() for value in seen.update.values()])
    scale = float(ours @ theirs / (ours @ ours)) if seen.clip is not None else 1.0
    sign = -1.0 if seen.local is None else 1.0
    left = {name: value / scale - said[name] for name, value in seen.update.items()}
    step = sign * _STEP / max(norm(left), 1e-300)
    with torch.no_grad():
        up, down = (
            functional_call(
                reader.net,
                {**seen.state, **{n: seen.state[n] + s * step * v for n, v in left.items()}},
                (tokens,),
            )
            for s in (1, -1)
        )
    rows = torch.arange(len(sentences))
    last = torch.tensor([len(s) - 2 for s in sentences])
    gain: Tensor = (up - down)[rows, last]
    return gain
