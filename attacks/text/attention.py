"""Attention: which tokens stood in one sentence, from the gradients of query and key alone.

The gradient of a dense layer is the sum of dy x^T over the tokens. Once the inputs x are known and
independent, it gives every dy. In attention, with S the scores of one head before the softmax,

    dk_j = sum over i of dS_ij q_i        dq_i = sum over j of dS_ij k_j

where the sums run over one sentence. Both are linear in dS, which is thereby known while there are
fewer than twice as many tokens as a head has directions, and dS_ij = 0 for tokens of two sentences.
No later layer is needed, and no search.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacks.rounding import first_least
from attacks.text.spans import Columns, Reader, Source

_QUERY = ("query", "q_proj", "q_lin", "q")
_KEY = ("key", "k_proj", "k_lin", "k")
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "heads")
_ZERO = 1e-6  # of the greatest eigenvalue: a direction that no query and no key has
_MOST = 600  # tokens put in sentences
_TURNS = 10


def attending(reader: Reader, tokens: Columns) -> list[tuple[int, ...]]:
    """Return likely sentences: for each token of one position, those that attended to it.

    They are more than the batch has where tokens are doubtful, and none where no query and key in
    view read single tokens.
    """
    nodes = [(t, p) for p, column in enumerate(tokens) for t in column]
    if not nodes or len(nodes) > _MOST:
        return []
    for source in reader.sources:
        pair = _pair(reader, source) if source.reach == "token" else None
        if pair is not None:
            return _sentences(nodes, _affinity(reader, source, pair, nodes), reader.seen.shape[0])
    return []


@dataclass(frozen=True, slots=True)
class _Projection:
    """Query or key: rows of a weight (out, in), from ``first``, and of its bias."""

    weight: str
    bias: str
    first: int = 0
    rows: int | None = None  # all

    def of(self, tensors: Mapping[str, Tensor], name: str, turned: bool = False) -> Tensor:
        """Return the rows of a tensor."""
        value = tensors[name].double()
        last = None if self.rows is None else self.first + self.rows
        return (value.T if turned else value)[self.first : last]


def _pair(reader: Reader, source: Source) -> tuple[_Projection, _Projection, int] | None:
    """Return the query and the key layer with the same inputs, and their number of heads."""
    for name in source.weights:
        module, _, last = name.rpartition(".")
        attention = reader.net.get_submodule(module)
        if last == "in_proj_weight" and isinstance(attention, nn.MultiheadAttention):
            bias, size = f"{module}.in_proj_bias", attention.embed_dim
            query, key = (_Projection(name, bias, first, size) for first in (0, size))
            return query, key, attention.num_heads
    modules = [name.removesuffix(".weight") for name in source.weights]
    queries, keys = (
        [module for module in modules if module.rpartition(".")[2] in names]
        for names in (_QUERY, _KEY)
    )
    if not queries or not keys:
        return None
    parent = reader.net.get_submodule(queries[-1].rpartition(".")[0])
    counts = (getattr(parent, name, None) for name in _HEADS)
    heads = next((n for n in counts if isinstance(n, int)), 0)
    if not heads:
        return None
    query, key = (_Projection(f"{m[-1]}.weight", f"{m[-1]}.bias") for m in (queries, keys))
    return query, key, heads


def _affinity(
    reader: Reader,
    source: Source,
    pair: tuple[_Projection, _Projection, int],
    nodes: Sequence[tuple[int, int]],
) -> Tensor:
    """Return how strongly each token and each other attended to one another, (N, N)."""
    ids, places = torch.tensor(nodes).T.contiguous()
    used = ids.unique()
    rows = reader.inputs(source, used[:, None].expand(-1, reader.seen.shape[1]))
    x = rows[torch.searchsorted(used, ids), places]
    inverse = torch.linalg.pinv(x, rtol=1e-9)  # (width, N)
    total = torch.zeros(len(x), len(x), dtype=x.dtype)
    query, key, heads = pair

    def of(layer: _Projection) -> tuple[Tensor, Tensor]:
        """Return the outputs of a layer for each token, and the slopes of the loss by them."""
        turned, state = source.weights[layer.weight], reader.seen.state
        outputs = x @ layer.of(state, layer.weight, turned).T
        if layer.bias in state:
            outputs = outputs + layer.of(state, layer.bias)
        return outputs, (layer.of(reader.seen.update, layer.weight, turned) @ inverse).T

    (q, dq), (k, dk) = of(query), of(key)
    for parts in zip(*(v.chunk(heads, 1) for v in (q, k, dq, dk)), strict=True):
        slopes = _score_slopes(*parts).abs()
        total += slopes / slopes.mean().clamp(min=1e-300)
    total = total + total.T
    total.fill_diagonal_(0)
    size = total.sum(1).clamp(min=1e-300).rsqrt()
    return size[:, None] * total * size


def _score_slopes(q: Tensor, k: Tensor, dq: Tensor, dk: Tensor) -> Tensor:
    """Return the least S with S^T q = dk and S k = dq, in the sense of least squares."""
    a, u = torch.linalg.eigh(q @ q.T)
    b, v = torch.linalg.eigh(k @ k.T)
    both = a[:, None].clamp(min=0) + b[None].clamp(min=0)
    wanted = u.T @ (q @ dk.T + dq @ k.T) @ v
    determined = both > _ZERO * both.max()
    slopes: Tensor = u @ torch.where(determined, wanted / both, 0.0) @ v.T
    return slopes


def _sentences(
    nodes: Sequence[tuple[int, int]], affinity: Tensor, batch: int
) -> list[tuple[int, ...]]:
    """Return a sentence for each token of the position that has fewest, but one per sentence."""
    at: dict[int, list[int]] = {}
    for i, (_, place) in enumerate(nodes):
        at.setdefault(place, []).append(i)
    order = sorted(at)
    enough = [p for p in order if len(at[p]) >= batch] or order
    start = min(enough, key=lambda p: (len(at[p]), p))
    sentences: dict[tuple[int, ...], None] = {}
    for seed in at[start]:
        chosen = [seed]
        for _ in range(_TURNS):
            pull = affinity[:, chosen].sum(1)
            before = chosen
            columns = [at[p] for p in order if p != start]
            chosen = [i[first_least((-pull[i]).tolist(), -math.inf)] for i in columns]
            chosen.append(seed)
            if chosen == before:
                break
        sentences[tuple(nodes[i][0] for i in sorted(chosen, key=lambda i: nodes[i][1]))] = None
    return list(sentences)
