"""Sentences: put the tokens that spans revealed in order, and complete them by the gradient.

In a decoder the inputs of the second layer depend on the tokens before them, so sentences grow from
the left. In an encoder they depend on the whole sentence: query and key of the first layer tell
which tokens attended to one another, and tokens that remain doubtful are replaced one or two at a
time (DAGER searches there exhaustively). What a classifier's known sentences sent is subtracted, so
that fewer tokens are doubtful in the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call

from attacks.observation import residual_of
from attacks.rounding import HALF, first_least, less
from attacks.text.attention import attending
from attacks.text.observation import TextObservation
from attacks.text.spans import FoundTokens, Reader, Source, Span, span, tokens_in_span
from attacks.update import norm, simulated_update

_KEPT = 16  # prefixes per sentence of the batch
_GAP = 3.0  # between the distances of true and of false prefixes
_STARTS = 4  # random sentences for each token of a position
_SWEEPS = 8
_ALIKE = 100.0  # how much farther than the nearest a true sentence may be
_EXACT = 1e-9  # distance at which no search is needed
_MOST_PAIRS = 2**13
_MOST_LABELS = 64
_NEAR = 3e-4  # distance that a true sentence keeps in float32
_ENOUGH = 8  # open directions that tell sentences apart
_NEAREST = 12  # last tokens tried per sentence
_ITERATIONS = 60
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
    batch = reader.seen.shape[0]
    columns = [torch.tensor([t for t, _ in column]) for column in tokens.by_position if column]
    sentences = _improved(reader, source, seen, columns, attending(reader, tokens))
    if len(_nearest(sentences)) < batch:
        sentences |= _improved(reader, source, seen, columns, _drawn(columns))
    done = _nearest(sentences)[:batch]
    if 0 < len(done) < batch and (rest := without(reader, done)) is not None:
        others = tokens_in_span(rest)
        if others is not None and _whole(others, rest.seen.pad):
            return [*done, *assembled(rest, others)][:batch]
    return sorted(sentences, key=sentences.__getitem__)[:batch]


def _drawn(columns: Sequence[Tensor]) -> list[Sentence]:
    """Return random sentences, as many for each token of the position with fewest."""
    draw = torch.Generator().manual_seed(0)
    anchor = min(columns, key=len)
    picked = [c[torch.randint(len(c), (_STARTS * len(anchor),), generator=draw)] for c in columns]
    sentences = torch.stack(picked, 1)
    sentences[:, next(i for i, c in enumerate(columns) if c is anchor)] = anchor.repeat(_STARTS)
    return [tuple(sentence) for sentence in sentences.tolist()]


def _whole(tokens: FoundTokens, pad: int | None) -> bool:
    """Return whether sentences can be made of the tokens; padding may follow a sentence."""
    some = [bool(column) for column in tokens.by_position]
    return some[0] and (all(some) if pad is None else some == sorted(some, reverse=True))


def additive(seen: TextObservation) -> bool:
    """Return whether the update is the mean of those that its sentences would give alone."""
    if seen.clip is not None or seen.noise_std > 0 or (seen.language and seen.pad is not None):
        return False
    if seen.local is None:
        return True
    whole = seen.local.rows(0, seen.shape[0]) == list(range(seen.shape[0]))
    return whole and seen.local.steps == 1 and seen.local.optimizer == "sgd"


def without(reader: Reader, sentences: Sequence[Sentence]) -> Reader | None:
    """Return a reader of what the other sentences of the batch sent, once some are known.

    The update of a classifier is the mean of those of its sentences. Of all labels of a known
    sentence, the right one leaves the gradients of fewest directions.

    Returns:
        None where the update is not such a mean, and where no label explains a sentence.
    """
    seen = reader.seen
    if seen.language or not additive(seen):
        return None
    source = next(s for s in reader.sources if s.reach == "token")
    with torch.no_grad():
        count = reader.net(_filled(reader, sentences[:1])).shape[-1]
    if count > _MOST_LABELS:
        return None
    names = seen.sent or tuple(seen.update)
    labels = range(count) if seen.labels is None else sorted(set(seen.labels.tolist()))
    for sentence in sentences:
        tokens = _filled(reader, [sentence])
        tried = []
        for label in labels:
            y = torch.tensor([label])
            sent = simulated_update(reader.net, seen.state, names, tokens, y, seen.loss, seen.local)
            part = {k: v - sent[k] / reader.seen.shape[0] for k, v in seen.update.items()}
            rounding = seen.resolution * norm(seen.update) / max(norm(part), 1e-300)
            left = replace(seen, update=part, rounding=rounding)  # its rank may still be too high
            tried.append((_rank(left, source), label, left))
        best = min(tried, key=lambda one: one[:2])
        if best[0] >= _rank(seen, source):
            return None
        seen = replace(best[2], shape=(seen.shape[0] - 1, seen.shape[1]))
    return reader.of(seen)


def _rank(seen: TextObservation, source: Source) -> int:
    """Return the rank of what a layer sent, without what rounding leaves of a known sentence."""
    return span(replace(seen, rounding=max(HALF, seen.resolution)), source).rank


def _improved(
    reader: Reader,
    source: Source,
    seen: Span,
    columns: Sequence[Tensor],
    sentences: Sequence[Sentence],
) -> dict[Sentence, float]:
    """Return the sentences after replacing one or two tokens at a time, and their distances."""
    several = [i for i, column in enumerate(columns) if len(column) > 1]
    doubtful = [i for i in several if len(columns[i]) > reader.seen.shape[0]]
    pairs = [(i, j) for i in doubtful for j in doubtful if i < j]
    if sum(len(columns[i]) * len(columns[j]) for i, j in pairs) > _MOST_PAIRS:
        pairs = []
    moves = [*((i,) for i in several), *pairs]
    return dict(_climbed(reader, source, seen, columns, moves, list(one)) for one in sentences)


def _climbed(
    reader: Reader,
    source: Source,
    seen: Span,
    columns: Sequence[Tensor],
    moves: Sequence[tuple[int, ...]],
    best: list[int],
) -> tuple[Sentence, float]:
    """Return the sentence that no single move improves, and its distance.

    ``best`` has tokens for all positions; those from ``length`` on may be padding.
    """
    length, least = _best_length(reader, source, seen, best)
    for _ in range(_SWEEPS):
        before = least
        for places in moves:
            if least <= _EXACT or places[-1] >= length:
                continue
            tried = _changed(torch.tensor(best[:length]), columns, places)
            left = _distances(reader, source, seen, tried)
            if less(float(left.min()), least, HALF):
                best[:length], least = tried[left.argmin()].tolist(), float(left.min())
        if least <= _EXACT:
            break
        length, least = _best_length(reader, source, seen, best)
        if least == before:
            break
    return tuple(best[:length]), least


def _best_length(
    reader: Reader, source: Source, seen: Span, sentence: Sequence[int]
) -> tuple[int, float]:
    """Return the length to which padding best cuts the sentence, and the distance then."""
    whole = torch.tensor(sentence)
    if reader.seen.pad is None:
        return len(sentence), float(_distances(reader, source, seen, whole[None]))
    cuts = [whole[:n][None] for n in range(1, len(sentence) + 1)]
    left = [float(_distances(reader, source, seen, cut)) for cut in cuts]
    least = first_least(left, HALF)
    return least + 1, left[least]


def _changed(sentence: Tensor, columns: Sequence[Tensor], places: tuple[int, ...]) -> Tensor:
    """Return the sentence with every choice of tokens at these positions."""
    choices = torch.cartesian_prod(*(columns[i] for i in places)).reshape(-1, len(places))
    tried = sentence.repeat(len(choices), 1)
    tried[:, list(places)] = choices
    return tried


def _distances(reader: Reader, source: Source, seen: Span, sentences: Tensor) -> Tensor:
    """Return the distance of each sentence: the root mean square of those of its inputs."""
    filled = torch.full((len(sentences), reader.seen.shape[1]), reader.seen.pad or 0)
    width = sentences.shape[1]
    filled[:, :width] = sentences
    if reader.seen.pad is None:
        filled = sentences
    rows = reader.inputs(source, filled)[:, :width]
    return seen.distance(rows).square().mean(1).sqrt()


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
    """Return the positions of the nearest: all up to ``most``, else those before the widest gap."""
    order = distances.argsort(stable=True)
    order = order[distances[order] <= threshold]
    if len(order) <= most:  # gaps between as many as there are may be those of rounding
        return order.tolist()
    least = min(least, most)
    logs = distances[order].clamp(min=HALF).log()
    gaps = (logs[1:] - logs[:-1])[max(least - 1, 0) : most]
    count = max(least - 1, 0) + int(gaps.argmax()) + 1 if len(gaps) else least
    if len(gaps) and float(gaps.max()) < torch.tensor(_GAP).log():
        count = most * _KEPT  # no gap: a later position decides
    return order[:count].tolist()


def _nearest(found: Mapping[Sentence, float]) -> list[Sentence]:
    """Return the sentences that are nearly as near as the nearest, in this order."""
    if not found:
        return []
    limit = min(_ALIKE * max(min(found.values()), 1e-12), _NEAR)
    return sorted((s for s in found if found[s] <= limit), key=found.__getitem__)


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
                if less(residual, least):
                    whole, least = tried, residual
        if least == before:
            break
    return [tuple(s) for s in whole]


def _residual(reader: Reader, sentences: Sequence[Sequence[int]]) -> float:
    tokens = _filled(reader, sentences)
    return residual_of(reader.net, reader.seen, tokens, tokens)


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
    rows = torch.arange(len(sentences))
    last = torch.tensor([len(s) - 2 for s in sentences])
    sign = -1.0 if seen.local is None else 1.0
    return sign * _solved(reader, tokens, rows, last, left)


def _solved(
    reader: Reader, tokens: Tensor, rows: Tensor, last: Tensor, left: Mapping[str, Tensor]
) -> Tensor:
    """Return the least logit slopes at the last positions whose gradient is ``left``, (B, V).

    By conjugate gradients on the normal equations (CGLS).
    """
    state = reader.seen.state
    leaves = {name: state[name].detach().clone().requires_grad_(True) for name in left}

    def logits(weights: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = functional_call(reader.net, {**state, **weights}, (tokens,))[rows, last]
        return out

    out = logits(leaves)

    def back(z: Tensor) -> Tensor:
        found = torch.autograd.grad(out, list(leaves.values()), z, retain_graph=True)
        return torch.cat([value.flatten() for value in found])

    def forth(r: Tensor) -> Tensor:
        step = _STEP / max(float(r.norm()), 1e-300)
        parts = torch.split(r, [value.numel() for value in leaves.values()])
        move = {
            name: part.reshape(value.shape) * step
            for (name, value), part in zip(leaves.items(), parts, strict=True)
        }
        with torch.no_grad():
            up = logits({name: leaves[name] + value for name, value in move.items()})
            down = logits({name: leaves[name] - value for name, value in move.items()})
        return (up - down) / (2 * step)

    residual = torch.cat([left[name].flatten() for name in leaves])
    z = torch.zeros_like(out).detach()
    slope = forth(residual)
    direction, size = slope, float(slope.square().sum())
    for _ in range(_ITERATIONS):
        if size == 0:
            break
        moved = back(direction)
        along = size / float(moved.square().sum())
        z = z + along * direction
        residual = residual - along * moved
        slope = forth(residual)
        before, size = size, float(slope.square().sum())
        direction = slope + (size / before) * direction
    return z
