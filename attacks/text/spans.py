"""Spans: which inputs of a dense layer can have made its gradient (DAGER, Petrov et al. 2024).

The gradient of a weight W of y = W x is the sum of dy x^T over all tokens, so its rows lie in the
span of the inputs x. While the tokens of a batch are fewer than the width, only their inputs lie in
that span, and whoever knows the weights tests every token of the vocabulary, or every sentence.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from scipy.stats import beta
from torch import Tensor, nn

from attacks.rounding import HALF, differs, same
from attacks.text.observation import TextObservation, text_model, vocabulary
from attacks.update import entering, recording

Reach = Literal["token", "prefix", "sentence"]
Columns = tuple[tuple[int, ...], ...]  # tokens of each position, nearest first

_FALSE = 1e-2  # expected false tokens, were the inputs of other tokens random directions
_MARGIN = 0.5  # they are not random: many share a position
_NOISE = 2.0  # how far above its expectation the length of the noise on a vector may be
_SURE = 1e-5  # distance below which an input that was searched for lies in the span
_SPARE = 16  # directions that a search leaves open
_ROUNDING = 10.0  # how far above its rounding error a singular value must be
_SAFE = 4.0  # how far above its rounding error a true input may be: in float64, 1.6 times was seen
_ROWS = 2**14  # inputs computed at a time
_PROBED = 64  # places at which a token is exchanged, to see which inputs depend on it


@dataclass(frozen=True, slots=True)
class Source:
    """Visible dense weights that multiply the same inputs, as those of query, key and value."""

    module: str  # the first of the layers
    weights: Mapping[str, bool]  # by name, and whether each is stored as (in, out)
    reach: Reach  # what an input depends on: its token and position, the tokens up to it, or all
    state: bool = False  # whether the inputs are the states of a recurrent layer, after each token
    turned: bool = False  # whether the inputs are (T, S, width), as torch's attention has them


class Reader:
    """Computes the inputs of a model's layers from token ids, at the observed weights."""

    def __init__(self, model: nn.Module, observed: TextObservation) -> None:
        self.net = text_model(model, observed.pad)
        state = {k: v for k, v in observed.state.items() if k in self.net.state_dict()}
        self.net.load_state_dict(state, strict=False)
        self.vocabulary = vocabulary(model)
        self.seen = observed

    @property
    def stand_in(self) -> int:
        """A token that is not the padding."""
        return 1 if self.seen.pad == 0 else 0

    @cached_property
    def classes(self) -> int:
        """Number of labels of a classifier: its logits for any tokens."""
        with torch.no_grad():
            return int(self.net(torch.full((1, self.seen.shape[1]), self.stand_in)).shape[1])

    def of(self, observed: TextObservation) -> "Reader":
        """Return a reader of another update of the same parameters."""
        other = copy.copy(self)
        other.seen = observed
        return other

    def inputs(self, source: Source, tokens: Tensor) -> Tensor:
        """Return the inputs of the source's layers, (S, T, width)."""
        reach = entering(self.net, source.module, self.seen.state, leaving=source.state)
        rows = []
        for part in torch.split(tokens, max(1, _ROWS // tokens.shape[1])):
            with torch.no_grad():
                inputs = reach(part)
            assert inputs is not None  # noqa: S101  a source is a layer that was called
            inputs = inputs if inputs.ndim == 3 else inputs[:, None]
            rows.append(inputs.transpose(0, 1) if source.turned else inputs)
        return torch.cat(rows)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The visible dense layers that read tokens, in the order in which they run."""
        length = self.seen.shape[1]
        generator = torch.Generator().manual_seed(0)
        allowed = torch.tensor([t for t in range(self.vocabulary) if t != self.seen.pad])
        first, other = allowed[torch.randperm(len(allowed), generator=generator)[:2]]
        places = torch.arange(0, length, max(1, length // _PROBED))
        probe = torch.full((len(places) + 1, length), int(first))
        probe[1:].scatter_(1, places[:, None], int(other))
        read = self._all_inputs(probe)
        sources: list[tuple[Source, Tensor]] = []
        for name, weights, state, entered in read:
            turned = entered.shape[0] != len(probe)
            rows = entered.transpose(0, 1) if turned else entered
            visible = {k: v for k, v in weights.items() if k in self.seen.update}
            if not visible:
                continue
            for i, (source, inputs) in enumerate(sources):
                if source.state == state and same(inputs, rows):
                    joint = {**source.weights, **visible}
                    sources[i] = replace(source, weights=joint), inputs
                    break
            else:
                reach = _reach(rows, places)
                sources.append((Source(name, visible, reach, state, turned), rows))
        return tuple(source for source, _ in sources)

    def _all_inputs(self, tokens: Tensor) -> list[tuple[str, dict[str, bool], bool, Tensor]]:
        """Return (module, its weights, whether states, inputs) of each dense layer, as they run."""
        dense = {type(m) for m in self.net.modules() if dense_weight(m)}
        kinds: tuple[type[nn.Module], ...] = (nn.LSTM, nn.MultiheadAttention, *dense)
        with torch.no_grad(), recording(self.net, kinds) as calls:
            self.net(tokens)
        read: list[tuple[str, dict[str, bool], bool, Tensor]] = []
        for call in calls:
            layer = call.module
            if isinstance(layer, nn.MultiheadAttention):
                if weights := _projections(layer, call.given[:3]):
                    named = {f"{call.name}.{weight}": False for weight in weights}
                    read.append((call.name, named, False, call.inputs))
                continue
            weight = "weight_ih_l0" if isinstance(layer, nn.LSTM) else "weight"
            stored_in = dense_weight(layer) == "in"
            read.append((call.name, {f"{call.name}.{weight}": stored_in}, False, call.inputs))
            if isinstance(layer, nn.LSTM) and layer.num_layers == 1 and not layer.bidirectional:
                states = call.output[0]
                read.append((call.name, {f"{call.name}.weight_hh_l0": False}, True, states))
        read = [(a, b, c, x[:, None] if x.ndim == 2 else x) for a, b, c, x in read]
        count, length = tokens.shape  # never equal: see the probe
        shapes = ((count, length), (count, 1), (length, count))
        return [row for row in read if row[-1].ndim == 3 and row[-1].shape[:2] in shapes]


def dense_weight(module: nn.Module) -> str:
    """Return which of its widths comes first in a dense layer's weight, "" for other modules."""
    if isinstance(module, nn.Linear):
        return "out"
    # of transformers, which is not imported for it
    return "in" if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else ""


def _projections(layer: nn.MultiheadAttention, given: Sequence[Any]) -> tuple[str, ...]:
    """Return which weights of the attention multiply its first input; in others it has several."""
    if not layer.embed_dim == layer.kdim == layer.vdim:
        return ("q_proj_weight",)
    return ("in_proj_weight",) if all(value is given[0] for value in given) else ()


def _reach(rows: Tensor, places: Tensor) -> Reach:
    """Return what the inputs depend on; the probe's row 1 + i differs from row 0 at places[i]."""
    if rows.shape[1] == 1:
        return "sentence"
    depends = differs(rows[1:], rows[0]).any(2)
    ahead = torch.arange(rows.shape[1]) - places[:, None]
    if bool(depends[ahead < 0].any()):
        return "sentence"
    return "prefix" if bool(depends[ahead > 0].any()) else "token"


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The inputs that made a gradient lie in the span of ``rows``.

    Rounding and noise give an input that lies in the span a distance of up to ``error``; the
    attacker's own rounding of the input is among it, which grows with the layers before.
    """

    rows: Tensor  # (rank, width), orthonormal
    condition: float = 0.0  # least singular value relative to the greatest
    error: float = 1.0

    @property
    def rank(self) -> int:
        """Number of independent inputs seen."""
        return len(self.rows)

    @property
    def open(self) -> int:
        """Directions outside the span; at 0 every input lies in it, and nothing can be told."""
        return self.rows.shape[1] - self.rank

    def distance(self, x: Tensor) -> Tensor:
        """Return the share of the length of each vector (..., width) that leaves the span."""
        if self.rank == 0:
            return torch.ones(x.shape[:-1], dtype=x.dtype)
        beyond = x - (x @ self.rows.T) @ self.rows
        share: Tensor = beyond.norm(dim=-1) / x.norm(dim=-1).clamp(min=1e-300)
        return share

    def threshold(self, candidates: int) -> float:
        """Return a distance that a random direction hardly keeps, in so many trials.

        Inputs that share a token or a position are alike, and lie nearer than random directions;
        so the threshold is no more than what rounding and noise explain.
        """
        if self.open == 0 or self.rank == 0:
            return 0.0
        share = float(beta.ppf(_FALSE / max(candidates, 1), self.open / 2, self.rank / 2))
        return min(_MARGIN * float(share**0.5), self.error)


def span(observed: TextObservation, source: Source) -> Span:
    """Return the span of the inputs of the source's layers, as far as rounding and noise show it.

    The rank is at most the number of tokens of the batch, which the attacker knows.
    """
    gradients = [
        observed.update[name].double() if not swapped else observed.update[name].double().T
        for name, swapped in source.weights.items()
    ]
    if observed.noise_std == 0:  # each is rounded relative to itself
        gradients = [gradient / gradient.norm() for gradient in gradients if bool(gradient.any())]
    if not gradients:
        return Span(torch.zeros(0, next(iter(observed.update.values())).shape[-1]).double())
    stacked = torch.cat(gradients)
    _, values, rows = torch.linalg.svd(stacked, full_matrices=False)
    floor = _ROUNDING * observed.resolution * float(values[0])
    if observed.noise_std > 0:  # greatest singular value of noise alone
        high, wide = stacked.shape
        floor = max(floor, observed.noise_std * (high**0.5 + wide**0.5))
    limit = observed.shape[0] * observed.shape[1]
    rank = min(int((values > floor).sum()), limit)
    if rank == 0:
        return Span(rows[:0])
    smallest = float(values[rank - 1])
    error = (
        _SAFE * observed.resolution * float(values[0])
        + _NOISE * observed.noise_std * rows.shape[1] ** 0.5
    )
    return Span(rows[:rank], smallest / float(values[0]), max(HALF, error / smallest))


def tokens_in_span(reader: Reader, candidates: Tensor | None = None) -> Columns | None:
    """Return the tokens whose inputs lie in the span of every layer that sees single tokens.

    Without ``candidates`` the whole vocabulary but the padding is tried. None where no layer
    in view reads single tokens, or its span is everything.
    """
    observed = reader.seen
    length = observed.shape[1]
    if candidates is None:
        candidates = torch.arange(reader.vocabulary)
    candidates = candidates[candidates != (-1 if observed.pad is None else observed.pad)]
    spans = [(s, span(observed, s)) for s in reader.sources if s.reach == "token"]
    useful = [(s, widest) for s, widest in spans if widest.rank > 0 and widest.open > 0]
    if not useful:
        return None
    # the widest span tells most; others only see fewer tokens (GPT-2's query: no first one)
    source, widest = max(useful, key=lambda pair: pair[1].rank)
    distances = torch.full((reader.vocabulary, length), torch.inf, dtype=torch.float64)
    high = sum(min(observed.update[name].shape) for name in source.weights)
    if widest.rank == high < observed.shape[0] * length:  # more tokens than directions were sent
        rows = reader.inputs(source, candidates[:, None].expand(-1, length))
        distances[candidates] = _pursued(widest, rows.flatten(0, 1)).reshape(rows.shape[:2])
        threshold = _SURE
    else:
        for part in torch.split(candidates, max(1, _ROWS // length)):
            rows = reader.inputs(source, part[:, None].expand(-1, length))
            distances[part] = widest.distance(rows)
        threshold = widest.threshold(len(candidates) * length)
    columns = []
    for column in distances.T:
        order = column.clamp(min=HALF).argsort(stable=True)  # rounding orders nothing
        # of (a, i), (b, i) and (b, j) in the batch, (a, j) is a combination: accept it as well
        inside = order[: observed.shape[0] * length].tolist()
        columns.append(tuple(t for t in inside if float(column[t]) <= threshold))
    return tuple(columns)


def _pursued(observed: Span, x: Tensor) -> Tensor:
    """Return the distance of each input from a span that shows only combinations of the inputs.

    Of k inputs, r combinations were sent, as by LoRA's A. With k - r of the inputs added, the span
    holds them all. The inputs that come nearest to it are added one at a time (rank-aware matching
    pursuit, Davies and Eldar 2012); a false one does no harm while directions remain. Once several
    inputs lie in the span, each added one is judged by the span of all the others. Where too few
    directions remain, all distances are 1.
    """
    x = x / x.norm(dim=1, keepdim=True)
    beyond, basis, chosen = x.clone(), observed.rows, list[int]()
    while len(basis) > 1 and len(chosen) + len(basis) + _SPARE <= x.shape[1]:
        away = _away(beyond, basis)
        if int((away < _SURE).sum()) > 1:
            return _judged(observed, x, chosen, away)
        nearest = int(away.argmin())
        chosen.append(nearest)
        axis = beyond[nearest] / beyond[nearest].norm()
        beyond = beyond - (beyond @ axis)[:, None] * axis
        _, values, rows = torch.linalg.svd(
            basis - (basis @ axis)[:, None] * axis, full_matrices=False
        )
        basis = rows[values > _SURE]
    return torch.ones(len(x), dtype=x.dtype)


def _away(beyond: Tensor, basis: Tensor) -> Tensor:
    """Return the distance of each vector from the span, 1 for those of which nothing is left."""
    size = beyond.norm(dim=1)
    share = (beyond - (beyond @ basis.T) @ basis).norm(dim=1) / size.clamp(min=1e-300)
    return torch.where(size > _SURE, share, 1.0)


def _judged(observed: Span, x: Tensor, chosen: list[int], away: Tensor) -> Tensor:
    inside = x[(away < _SURE).nonzero()[:, 0]]
    away = away.clone()
    for i in chosen:
        joint = torch.cat([observed.rows, inside, x[[j for j in chosen if j != i]]])
        _, values, rows = torch.linalg.svd(joint, full_matrices=False)
        away[i] = Span(rows[values > _SURE]).distance(x[i])
    return away
