"""Sentences: put the tokens that spans revealed in order, and complete them by the gradient.

In a decoder the inputs of the second layer depend on the tokens before them, so sentences grow from
the left. In an encoder they depend on the whole sentence: query and key of the first layer tell
which tokens attended to one another, and tokens that remain doubtful are replaced one or two at a
time (DAGER searches there exhaustively). What a classifier's known sentences sent is subtracted, so
that fewer tokens are doubtful in the others.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse.linalg import LinearOperator, lsqr
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import pad

from attacks.observation import residual_of
from attacks.rounding import HALF, differs, first_least, less
from attacks.text.attention import attending
from attacks.text.observation import TextObservation
from attacks.text.spans import Columns, Reader, Source, Span, span, tokens_in_span
from attacks.update import flat, norm, simulated_update

Array = npt.NDArray[np.float64]
_PREFIXES = 16  # prefixes per sentence of the batch
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


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """A layer in view whose inputs depend on several tokens, and the span of its inputs."""

    reader: Reader
    source: Source
    span: Span

    def distances(self, sentences: Tensor) -> Tensor:
        """Return the distance of each sentence: the root mean square of those of its inputs."""
        observed, width = self.reader.seen, sentences.shape[1]
        filled = sentences
        if observed.pad is not None:
            filled = pad(sentences, (0, observed.shape[1] - width), value=observed.pad)
        rows = self.reader.inputs(self.source, filled)[:, :width]
        return self.span.distance(rows).square().mean(1).sqrt()


def _telling_layer(reader: Reader) -> _Layer | None:
    """Return the layer in view whose span tells most of whole sentences, or of their prefixes.

    Its rank must show every token: a classifier's last layer sends fewer directions than tokens.
    """
    layers = [
        _Layer(reader, source, span(reader.seen, source))
        for source in reader.sources
        if source.reach != "token"
    ]
    useful = [layer for layer in layers if layer.span.rank > 0 and layer.span.open > 0]
    wide = [layer for layer in useful if layer.span.open >= _ENOUGH] or useful
    return max(wide, key=lambda layer: (layer.span.rank, layer.span.condition), default=None)


def assembled(reader: Reader, tokens: Columns) -> list[Sentence]:
    """Return the sentences of the batch, as far as a layer in view tells; [] where none does."""
    layer = _telling_layer(reader)
    if layer is None or not tokens[0]:
        return []
    if layer.source.reach == "prefix":
        return _grown(layer, tokens)
    batch = reader.seen.shape[0]
    columns = [torch.tensor(column) for column in tokens if column]
    sentences = _improved(layer, columns, attending(reader, tokens))
    if len(_nearest(sentences)) < batch:
        sentences |= _improved(layer, columns, _drawn(columns))
    done = _nearest(sentences)[:batch]
    if 0 < len(done) < batch and (remainder := without(reader, done)) is not None:
        remaining = tokens_in_span(remainder)
        if remaining is not None and _complete(remaining, remainder.seen.pad):
            return [*done, *assembled(remainder, remaining)][:batch]
    return sorted(sentences, key=sentences.__getitem__)[:batch]


def _drawn(columns: Sequence[Tensor]) -> list[Sentence]:
    """Return random sentences, as many for each token of the position with fewest."""
    draw = torch.Generator().manual_seed(0)
    anchor = min(range(len(columns)), key=lambda i: len(columns[i]))
    count = _STARTS * len(columns[anchor])
    picked = [column[torch.randint(len(column), (count,), generator=draw)] for column in columns]
    picked[anchor] = columns[anchor].repeat(_STARTS)
    return [tuple(sentence) for sentence in torch.stack(picked, 1).tolist()]


def _complete(tokens: Columns, pad: int | None) -> bool:
    """Return whether sentences can be made of the tokens; padding may follow a sentence."""
    filled = [bool(column) for column in tokens]
    return filled[0] and (all(filled) if pad is None else filled == sorted(filled, reverse=True))


def without(reader: Reader, sentences: Sequence[Sentence]) -> Reader | None:
    """Return a reader of what the other sentences of the batch sent, once some are known.

    The update of a classifier is the mean of those of its sentences. Of all labels of a known
    sentence, the right one leaves the gradients of fewest directions.

    Return None where the update is not such a mean, and where no label explains a sentence.
    """
    observed, local = reader.seen, reader.seen.local
    mean = local is None or (local.steps == 1 and local.optimizer == "sgd")
    if observed.language or observed.clip is not None or observed.noise_std > 0 or not mean:
        return None
    source = next(s for s in reader.sources if s.reach == "token")
    if reader.classes > _MOST_LABELS:
        return None
    known = observed.labels
    labels = range(reader.classes) if known is None else sorted(set(known.tolist()))
    for sentence in sentences:
        tokens = padded([sentence], reader.seen)
        remainders = []
        for label in labels:
            sent = _update(reader, tokens, torch.tensor([label]))
            part = {k: v - sent[k] / reader.seen.shape[0] for k, v in observed.update.items()}
            rounding = observed.resolution * norm(observed.update) / max(norm(part), 1e-300)
            remainders.append(replace(observed, update=part, rounding=rounding))
        # rounding leaves more of a known sentence than of others: the rank may be too high
        ranks = [_rank(remainder, source) for remainder in remainders]
        if min(ranks) >= _rank(observed, source):
            return None
        best = remainders[ranks.index(min(ranks))]
        observed = replace(best, shape=(observed.shape[0] - 1, observed.shape[1]))
    return reader.of(observed)


def _update(reader: Reader, tokens: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the update of these sentences, before any clip."""
    seen, names = reader.seen, reader.seen.sent or tuple(reader.seen.update)
    return simulated_update(reader.net, seen.state, names, tokens, y, seen.loss, seen.local)


def _rank(observed: TextObservation, source: Source) -> int:
    return span(replace(observed, rounding=max(HALF, observed.resolution)), source).rank


def _improved(
    layer: _Layer, columns: Sequence[Tensor], sentences: Sequence[Sentence]
) -> dict[Sentence, float]:
    """Return the sentences after replacing one or two tokens at a time, and their distances."""
    several = [i for i, column in enumerate(columns) if len(column) > 1]
    doubtful = [i for i in several if len(columns[i]) > layer.reader.seen.shape[0]]
    pairs = [(i, j) for i in doubtful for j in doubtful if i < j]
    if sum(len(columns[i]) * len(columns[j]) for i, j in pairs) > _MOST_PAIRS:
        pairs = []
    moves = [*((i,) for i in several), *pairs]
    return dict(_climbed(layer, columns, moves, list(sentence)) for sentence in sentences)


def _climbed(
    layer: _Layer, columns: Sequence[Tensor], moves: Sequence[tuple[int, ...]], best: list[int]
) -> tuple[Sentence, float]:
    """Return the sentence that no single move improves, and its distance.

    ``best`` has tokens for all positions; those from ``length`` on may be padding.
    """
    length, distance = _best_length(layer, best)
    for _ in range(_SWEEPS):
        before = distance
        for places in moves:
            if distance <= _EXACT or places[-1] >= length:
                continue
            choices = torch.cartesian_prod(*(columns[i] for i in places)).reshape(-1, len(places))
            changed = torch.tensor(best[:length]).repeat(len(choices), 1)
            changed[:, list(places)] = choices
            distances = layer.distances(changed)
            if less(float(distances.min()), distance, HALF):
                best[:length] = changed[distances.argmin()].tolist()
                distance = float(distances.min())
        if distance <= _EXACT:
            break
        length, distance = _best_length(layer, best)
        if distance == before:
            break
    return tuple(best[:length]), distance


def _best_length(layer: _Layer, sentence: Sequence[int]) -> tuple[int, float]:
    """Return the length to which padding best cuts the sentence, and the distance then."""
    tokens = torch.tensor(sentence)[None]
    shortest = len(sentence) if layer.reader.seen.pad is None else 1
    lengths = range(shortest, len(sentence) + 1)
    distances = [float(layer.distances(tokens[:, :length])) for length in lengths]
    nearest = first_least(distances, HALF)
    return lengths[nearest], distances[nearest]


def _grown(layer: _Layer, tokens: Columns) -> list[Sentence]:
    """Return sentences grown from the left, a token at a time."""
    batch = layer.reader.seen.shape[0]
    alive: list[Sentence] = [()]
    ended: list[Sentence] = []
    for position, column in enumerate(tokens):
        longer = [(*prefix, token) for prefix in alive for token in column]
        if not longer:
            break
        rows = layer.reader.inputs(layer.source, torch.tensor(longer))
        distances = layer.span.distance(rows[:, position])
        threshold = layer.span.threshold(len(longer))
        if position:
            told = differs(rows[:, position], rows[:, position - 1]).any(1)
            near = (told & (distances <= threshold)).tolist()
            stems = {
                sentence[:-1] for sentence, is_near in zip(longer, near, strict=True) if is_near
            }
            # rotated positions: a first word again makes the same input, which is in every span
            idle = [s[:-1] in stems for s in longer]
            distances = distances.where(told | ~torch.tensor(idle), torch.inf)
        grown = [longer[i] for i in _before_gap(distances, len(column), batch, threshold)]
        stems = {sentence[:-1] for sentence in grown}
        ended += [prefix for prefix in alive if prefix and prefix not in stems]
        alive = grown
    return [*alive, *ended][:batch]


def _before_gap(distances: Tensor, low: int, high: int, threshold: float) -> list[int]:
    """Return the positions of the nearest: all up to ``high``, else those before the widest gap."""
    order = distances.argsort(stable=True)
    order = order[distances[order] <= threshold]
    if len(order) <= high:  # gaps between as many as there are may be those of rounding
        return order.tolist()
    low = min(low, high)
    logs = distances[order].clamp(min=HALF).log()
    gaps = (logs[1:] - logs[:-1])[max(low - 1, 0) : high]
    count = max(low - 1, 0) + int(gaps.argmax()) + 1 if len(gaps) else low
    if len(gaps) and float(gaps.max()) < math.log(_GAP):
        count = high * _PREFIXES  # no gap: a later position decides
    return order[:count].tolist()


def _nearest(distances: Mapping[Sentence, float]) -> list[Sentence]:
    """Return the sentences that are nearly as near as the nearest, in this order."""
    limit = min(_ALIKE * max(min(distances.values(), default=0.0), 1e-12), _NEAR)
    near = [sentence for sentence, distance in distances.items() if distance <= limit]
    return sorted(near, key=distances.__getitem__)


def completed(reader: Reader, sentences: Sequence[Sentence]) -> list[Sentence]:
    """Return the sentences with their last tokens, which a decoder predicts but never reads.

    Of the gradient, only the label at the position before depends on such a token. What the known
    tokens leave of the update is compared with all labels at once: a step of the weights along it
    raises the likelihood of the true one most. The nearest are then tried exactly.
    """
    observed = reader.seen
    batch, length = observed.shape
    open_rows = [i for i, s in enumerate(sentences) if len(s) < length]
    if not open_rows or len(sentences) < batch:
        return list(sentences)
    gain = _along(reader, [[*s, reader.stand_in] if len(s) < length else s for s in sentences])
    nearest = {i: gain[i].argsort(descending=True)[:_NEAREST].tolist() for i in open_rows}
    best = [[*s, nearest[i][0]] if i in nearest else list(s) for i, s in enumerate(sentences)]

    def residual(rows: Sequence[Sequence[int]]) -> float:
        tokens = padded(rows, observed)
        return residual_of(reader.net, observed, tokens, tokens)

    match = residual(best)
    for _ in range(2):
        before = match
        for i in open_rows:
            for token in nearest[i]:
                changed = [[*s[:-1], token] if j == i else s for j, s in enumerate(best)]
                value = residual(changed)
                if less(value, match):
                    best, match = changed, value
        if match == before:
            break
    return [tuple(s) for s in best]


def padded(sentences: Sequence[Sequence[int]], observed: TextObservation) -> Tensor:
    """Return the sentences as (S, T) ids."""
    length = observed.shape[1]
    fill = observed.pad or 0
    return torch.tensor([[*s, *[fill] * (length - len(s))] for s in sentences])


def _along(reader: Reader, sentences: Sequence[Sequence[int]]) -> Tensor:
    """Return how much each last label of sentences with any last token gains, (B, V).

    That is, from a step of the weights along what these sentences leave of the update: the least
    logit slopes at the last positions whose gradient is that remainder, by LSQR.
    """
    observed = reader.seen
    tokens = padded(sentences, observed)
    rows, last = torch.arange(len(sentences)), torch.tensor([len(s) - 2 for s in sentences])
    ours = _update(reader, tokens, tokens)
    u, v = flat(ours[name] for name in observed.update), flat(observed.update.values())
    scale = float(u @ v / (u @ u)) if observed.clip is not None else 1.0
    leaves = {name: observed.state[name].clone().requires_grad_(True) for name in observed.update}

    def logits(weights: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = functional_call(reader.net, {**observed.state, **weights}, (tokens,))[
            rows, last
        ]
        return out

    out = logits(leaves)

    def gradient(slopes: Array) -> Array:
        z = torch.from_numpy(slopes).view_as(out)
        return flat(torch.autograd.grad(out, list(leaves.values()), z, retain_graph=True)).numpy()

    def moved(direction: Array) -> Array:
        """The logits along a step of the weights; not every layer has a forward derivative."""
        r = torch.from_numpy(direction)
        step = _STEP / max(float(r.norm()), 1e-300)
        parts = torch.split(r * step, [value.numel() for value in leaves.values()])
        moves = dict(zip(leaves, parts, strict=True))
        with torch.no_grad():
            up, down = (
                logits({k: v + sign * moves[k].view_as(v) for k, v in leaves.items()})
                for sign in (1, -1)
            )
        return ((up - down) / (2 * step)).flatten().numpy()

    shape = (len(u), out.numel())
    system = LinearOperator(shape, matvec=gradient, rmatvec=moved, dtype=np.float64)
    slopes = lsqr(system, (v / scale - u).numpy(), atol=0, btol=0, iter_lim=_ITERATIONS)[0]
    sign = -1.0 if observed.local is None else 1.0
    return sign * torch.from_numpy(slopes).view_as(out)
