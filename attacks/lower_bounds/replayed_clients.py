"""Replayed clients: an auditor's clients, whose every contribution to a run is known in advance.

They ask for more than a plan allows. From its first round on, each client asks in every round, and
answers at times though it was not asked; some answer twice, or once more under another spelling of
their id. Updates are longer than the clip norm, a little longer, shorter, or not finite, and of
three types. What the
plan lets each of them add is computed here, by rules that share no code with the server: rounds
at least ``min_separation`` apart, ``max_participations`` at most, one answer per round, a length
of 1 clip norm at most. A client's update is a few coordinates in each group of parameters; half
of all coordinates stay zero, so that noise which needs an update is missed there.

The last client is the one that shows the most of a plan, ``worst_allocation``. Where groups train
together it spreads its update over them, as no client of a single group could. With K_g the
covariance of group g's noise, it sends a_tg along a direction of group g, sum_g a_tg^2 <= 1, and
shows

    mu^2 = sum_g a_g^T K_g^-1 a_g / z^2.

That is convex, so going where its slope points never lowers it: the search of
``attacks.lower_bounds.canaries.worst_view`` with a vector of groups in place of a sign.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accounting import Participation
from attacks.lower_bounds.canaries import heaviest_rounds

Array = NDArray[np.float64]
Id = int | str
_COORDINATES = 32  # of a client's update in each group, at most
_LENGTHS = (4.0, 4.0, 1.001, 4.0, 0.999, 4.0, 0.5, 1e6, 4.0, math.nan, 4.0, 1e20, math.inf)
_LONG = 4.0  # length of most updates, and of the worst client's, in clip norms
_TYPES = (torch.float32, torch.float64, torch.bfloat16)
_MOST_STARTS = 64


def worst_allocation(
    covariances: Sequence[Array], rounds: Sequence[Sequence[int]], participation: Participation
) -> Array:
    """Return what the most visible client sends: (n, groups), at most length 1 in a round.

    Args:
        covariances: K_g of each group's rounds at unit draws.
        rounds: the rounds in which each group trains, ascending.
        participation: of a client in the run.
    """
    n = participation.rounds
    inverses = [np.linalg.inv(k) for k in covariances]
    diagonal = np.zeros((n, len(rounds)))
    for g, own in enumerate(rounds):
        diagonal[list(own), g] = np.diag(inverses[g])

    def slope(sent: Array) -> Array:
        along = np.zeros_like(sent)
        for g, own in enumerate(rounds):
            along[list(own), g] = inverses[g] @ sent[list(own), g]
        return along

    best, most = np.zeros((n, len(rounds))), 0.0
    for start in np.argsort(-diagonal, axis=None, kind="stable")[:_MOST_STARTS].tolist():
        sent = np.zeros_like(diagonal)
        sent.flat[start] = 1.0
        value = float(diagonal.flat[start])
        while True:
            at = slope(sent)
            here = np.linalg.norm(at, axis=1)
            # What a round would add if it came, or take away if it left: this may find more.
            gain = here + np.where(sent.any(1), -0.5, 0.5) * diagonal.max(1)
            tried = [_towards(at, w, diagonal, participation) for w in (here, gain)]
            values = [float((one * slope(one)).sum()) for one in tried]
            if not max(values) > value * (1 + 1e-9):
                break
            value = max(values)
            sent = tried[values.index(value)]
        if value > most:
            best, most = sent, value
    return best


def visible(
    allocation: Array, covariances: Sequence[Array], rounds: Sequence[Sequence[int]]
) -> float:
    """Return mu^2, at noise multiplier 1, of a client that sends ``allocation`` (n, groups)."""
    total = 0.0
    for g, (covariance, own) in enumerate(zip(covariances, rounds, strict=True)):
        sent = allocation[list(own), g]
        total += float(sent @ np.linalg.solve(covariance, sent))
    return total


def _towards(at: Array, weights: Array, diagonal: Array, participation: Participation) -> Array:
    """Return the allocation of length 1 along the slope in the best admissible rounds."""
    chosen = list(heaviest_rounds(np.maximum(weights, 0.0), participation))
    sent = np.zeros_like(at)
    sent[chosen] = at[chosen]
    # A round without a slope takes the group that is seen best by itself.
    empty = [t for t in chosen if not sent[t].any()]
    sent[empty, diagonal[empty].argmax(1)] = diagonal[empty].max(1) > 0
    lengths = np.linalg.norm(sent, axis=1, keepdims=True)
    return np.asarray(np.divide(sent, lengths, out=sent, where=lengths > 0))


@dataclass(frozen=True)
class ReplayedClients:
    """``count`` clients and the worst one, in a run of a plan.

    Args:
        participation: how often one client may take part.
        parts: first coordinate and end of each group of parameters, in order.
        schedule: per round, the groups that train.
        allocation: of ``worst_allocation``, (n, groups).
        count: number of clients besides the worst one.
        seed: of their directions, which need not be secret.
    """

    participation: Participation
    parts: Sequence[slice]
    schedule: Sequence[Sequence[int]]
    allocation: Array
    count: int
    seed: int

    @cached_property
    def ids(self) -> list[Id]:
        """Whole numbers and strings, some of which spell the same number."""
        return [i if i % 8 else str(i + 1) for i in range(self.count)] + ["worst"]

    @cached_property
    def _vectors(self) -> tuple[NDArray[np.int64], Array, Array]:
        """Coordinates (clients, groups, c) of all directions, entries there, and their unit's norm.

        Entries times that norm have 8 bits, so that they are the same in every floating point.
        """
        rng = np.random.default_rng(self.seed)
        shape = self.count + 1, len(self.parts), _COORDINATES
        entries = torch.from_numpy(rng.standard_normal(shape)).bfloat16().double().numpy()
        places = np.empty(shape, dtype=np.int64)
        for g, part in enumerate(self.parts):
            size = part.stop - part.start
            odd = max(1, size // 2)
            # A group of few coordinates has each of them at most once in a direction.
            first = rng.integers(odd, size=(self.count + 1, 1))
            stride = max(1, odd // _COORDINATES)
            places[:, g] = (first + stride * np.arange(_COORDINATES)) % odd * 2 + (size > 1)
            entries[:, g, odd:] = 0.0
            places[:, g] += part.start
        sizes = np.linalg.norm(entries, axis=2, keepdims=True)
        return places, entries / sizes, sizes

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return int(self.parts[-1].stop)

    def first_round(self, i: int) -> int:
        """Return the round from which on client i asks; the worst one in those of its pattern."""
        return i % self.participation.rounds

    def asking(self, round_: int) -> list[int]:
        """Return the numbers of the clients that ask in a round."""
        worst = [self.count] * bool(self.allocation[round_].any())
        return [i for i in range(self.count) if self.first_round(i) <= round_] + worst

    def planned(self, i: int) -> list[int]:
        """Return the rounds that the plan gives to client i, if nothing is sampled."""
        if i == self.count:
            return np.flatnonzero(self.allocation.any(1)).tolist()
        p = self.participation
        rounds = range(self.first_round(i), p.rounds, p.min_separation)
        return list(rounds[: p.max_participations])

    def length(self, i: int) -> float:
        """Return the length of client i's updates in clip norms; some are not finite."""
        return _LONG if i == self.count else _LENGTHS[i % len(_LENGTHS)]

    def direction(self, i: int, round_: int) -> tuple[NDArray[np.int64], Array]:
        """Return the coordinates and entries of client i's direction in a round, of length 1."""
        places, entries, _ = self._vectors
        active = list(self.schedule[round_])
        weights = np.ones(len(active)) / np.sqrt(len(active))
        if i == self.count and self.allocation[round_].any():
            weights = self.allocation[round_, active]
        return places[i, active].ravel(), (entries[i, active] * weights[:, None]).ravel()

    def update(self, i: int, round_: int, clip_norm: float) -> Tensor:
        """Return client i's update of the round's active parameters, (c,), in a type of its own."""
        places, entries = self.direction(i, round_)
        length, kind = self.length(i), _TYPES[0]
        values = entries * (clip_norm * (length if math.isfinite(length) else 1.0))
        if length == _LONG and len(self.schedule[round_]) == 1:
            # A power of two keeps the bits; the clip makes nothing of the length.
            size = float(self._vectors[2][i, self.schedule[round_][0], 0])
            values = entries * size * 2.0 ** math.ceil(math.log2(clip_norm * length / size))
            kind = _TYPES[i % len(_TYPES)]
        whole = np.zeros(self.dim, dtype=np.float32)
        np.add.at(whole, places, values)
        if not math.isfinite(length):
            whole[places[0]] = length
        sent = np.concatenate([whole[self.parts[g]] for g in self.schedule[round_]])
        return torch.from_numpy(sent).to(kind)

    def answers(self, round_: int, asked: Collection[object]) -> Iterator[tuple[object, int]]:
        """Yield the id under which a client answers in a round, and its number, in order.

        Everybody who was asked answers, and an eighth of those who were not.
        """
        for i in self.asking(round_):
            client = self.ids[i]
            if client not in asked and (i + round_) % 8:
                continue
            yield client, i
            if i % 16 == 3:
                yield client, i
            if i % 64 == 5 and isinstance(client, int):
                yield np.int64(client), i  # an id is Python's int or str, and nothing like it
            if i == 1:
                yield True, i

    def contribution(self, round_: int, who: Collection[int]) -> Array:
        """Return what these clients add to a round's sum under the plan, (d,), in clip norms."""
        total = np.zeros(self.dim)
        for i in who:
            places, entries = self.direction(i, round_)
            length = self.length(i)
            np.add.at(total, places, entries * (min(1.0, length) if math.isfinite(length) else 0.0))
        return total

    def along_worst(self, sums: Array) -> Array:
        """Return the products of sums (n, d) with the worst client's directions, (n, groups)."""
        places, entries, _ = self._vectors
        return np.stack([sums[:, p] @ e for p, e in zip(places[-1], entries[-1], strict=True)], 1)

    def nearest(self, difference: Array, round_: int) -> tuple[int, float]:
        """Return the client that best explains a difference (d,), and by how many clip norms."""
        places, entries, _ = self._vectors
        active = list(self.schedule[round_])
        products = (difference[places[:, active]] * entries[:, active]).sum((1, 2))
        products /= np.sqrt(len(active))
        i = int(np.abs(products).argmax())
        return i, float(products[i])
