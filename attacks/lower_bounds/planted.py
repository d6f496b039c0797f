"""Planted canaries: clients of an auditor in a run, and their scores from its released models.

``PlantedCanaries`` knows the run only by public values: mechanism, participation, number of
parameters, and the server's momentum. Its coins come from a key that stays secret until the end. It
gives a training loop the updates that canaries send, and a score to each canary afterwards, from
the products of every released model with every direction:

    v_t = (q_{t+1} - q_t) / learning_rate,        g_t = v_t - momentum v_{t-1}

undoes a step of SGD with momentum, and report_goal g_t / clip_norm is the round's noised sum on a
direction in clip norms, which ``attacks.lower_bounds.canaries`` weights.

Canaries send more than the clip norm, so that a server that does not clip is seen. Where groups of
parameters take turns, directions are spread over the groups and lie inside one group each.

In a real run the auditor does not know what the other clients send. Spare directions, which nobody
sends, show how they drift, and the weights allow for it
(``attacks.lower_bounds.canaries.drifting_view``).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accounting import Mechanism, Participation, checks
from accounting.checks import ConfigError
from attacks.lower_bounds.canaries import (
    Canaries,
    View,
    drifting_view,
    round_covariance,
    worst_view,
)

Array = NDArray[np.float64]
_LENGTH = 4.0  # of an update before the server clips it, in clip norms
_MOST_ROUNDS = 4096
_SPARE = 4  # directions per round, if there is room for them
_LEAST_SPARE = 2


@dataclass(frozen=True)
class _Part:
    """The canaries of one group of parameters; there is one part if there are no groups."""

    first: int  # number of its first canary
    count: int  # of its canaries; the directions after them are spare
    columns: slice  # of all products
    canaries: Canaries
    rounds: tuple[int, ...]  # in which it trains
    covariance: Array  # of the noise of its rounds' sums
    view: View  # at noise multiplier 1


class PlantedCanaries:
    """Canaries in a run, as ``privpart.engines.canaries`` expects its clients.

    Args:
        mechanism: of the run; public.
        participation: how often one client may take part.
        dim: number of parameters that the server trains, d.
        count: number of directions, >= 2; ``width`` are those with spare ones.
        seed: of the directions, which need not be secret.
        momentum: of the server's SGD, in [0, 1).
        key: 32 bytes, secret until the end, from which the coins come.
        present: which canaries take part, (count,), in place of coins; for paired replay.
        spare: whether to add directions that nobody sends; for runs whose other clients are
            unknown.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        participation: Participation,
        *,
        dim: int,
        count: int,
        seed: int,
        momentum: float = 0.0,
        key: bytes = b"",
        present: NDArray[np.bool_] | None = None,
        spare: bool = False,
    ) -> None:
        self.count = checks.count("count", count)
        self.dim = checks.count("dim", dim)
        self.momentum = momentum
        if mechanism.rounds > _MOST_ROUNDS:
            raise ConfigError(
                f"rounds={mechanism.rounds}: canaries work on n x n matrices, up to {_MOST_ROUNDS} "
                "rounds. Audit a shorter run."
            )
        self._schedule = None if mechanism.groups is None else mechanism.groups.schedule
        self._sizes = (dim,) if mechanism.groups is None else tuple(mechanism.groups.sizes)
        self._parts = self._place(mechanism, participation, seed, spare)
        self.width = self._parts[-1].columns.stop
        self.present = _coins(self.count, key) if present is None else present
        self.ids: Sequence[str] = [f"canary-{j}" for j in range(self.count)]
        self._numbers: dict[int | str, int] = {client: j for j, client in enumerate(self.ids)}

    def clients(self, round_: int) -> Sequence[str]:
        """Return the ids of the canaries that take part in a round."""
        return [
            self.ids[j]
            for part in self._parts
            if self._sign(part, round_)
            for j in range(part.first, part.first + part.count)
            if self.present[j]
        ]

    def update(self, client: int | str, round_: int, clip_norm: float) -> Tensor:
        """Return a canary's update, shape (c,) for the c active parameters, float32."""
        part, j = self._own(client)
        sign = self._sign(part, round_)
        if not sign:
            raise ConfigError(f"round {round_}: {client} does not take part in it.")
        sent = sign * part.canaries.update(j, _LENGTH * clip_norm)
        if self._schedule is None:
            return sent
        pieces = torch.split(sent, list(self._sizes))
        return torch.cat([pieces[g] for g in self._schedule[round_]])

    def direction(self, number: int) -> Tensor:
        """Return the direction of a canary, shape (d,), float32, of length 1."""
        part, j = self._own(self.ids[number])
        return part.canaries.update(j)

    def project(self, parameters: Tensor) -> Tensor:
        """Return the products of a vector (d,) with all directions: (width,), float64."""
        return torch.cat([part.canaries.project(parameters) for part in self._parts])

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Return the rounds of each canary by its id: none if it is absent."""
        return {
            self.ids[j]: tuple(part.rounds[t] for t in part.view.rounds) * bool(self.present[j])
            for part in self._parts
            for j in range(part.first, part.first + part.count)
        }

    def seen(
        self,
        releases: Array,
        *,
        noise_multiplier: float,
        clip_norm: float,
        report_goal: int,
        learning_rate: float,
        known: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return the scores (count,) of the canaries, and what is visible of mu, per canary.

        A score is N(0, 1) for who was absent, N(mu, 1) for who took part.

        ``releases`` (n + 1, width) are products of the start and of every released model; ``known``
        (n, width) those of the sum of all other clients' updates of each round, in clip norms, if
        the auditor knows them. The others are the run's.
        """
        z = checks.positive("noise_multiplier", noise_multiplier)
        scores, visible = [], []
        for part in self._parts:
            sums = sums_of_releases(
                releases[:, part.columns],
                part.rounds,
                learning_rate=learning_rate,
                momentum=self.momentum,
            ) * (report_goal / clip_norm)
            if known is not None:
                sums = sums - known[list(part.rounds), part.columns]
            mu, weights = part.view.mu / z, part.view.weights / z
            if part.canaries.count > part.count:  # spare directions show the drift
                unsent = sums[:, part.count :]
                drifting = drifting_view(part.covariance, part.view.pattern, z, unsent)
                mu, weights = drifting.mu, drifting.weights
            scores.append((weights[:, None] * sums[:, : part.count]).sum(0))
            visible.append(np.full(part.count, mu))
        return np.concatenate(scores), np.concatenate(visible)

    def _place(
        self, mechanism: Mechanism, participation: Participation, seed: int, spare: bool
    ) -> list[_Part]:
        """Return the canaries of each group, which begin where those of the group before end."""
        parts = []
        first = column = 0
        counts = _shares(self.count, self._sizes)
        groups = groups_of(mechanism, self.dim)
        for count, (of_group, rounds, place) in zip(counts, groups, strict=True):
            if not count:
                continue
            n, b = of_group.rounds, participation.min_separation
            limits = participation
            if mechanism.groups is not None:  # rounds of a group so far apart are so in the run
                limits = Participation(n, min(participation.max_participations, -(-n // b)), b)
            covariance = round_covariance(of_group.decoder())
            view = worst_view(covariance, limits, 1.0)
            room = min(_SPARE * n, place.stop - place.start - count)
            unsent = room if spare and room >= _LEAST_SPARE * n else 0
            columns = slice(column, column + count + unsent)
            canaries = Canaries(seed, count + unsent, self.dim, (place.start, place.stop))
            parts.append(_Part(first, count, columns, canaries, tuple(rounds), covariance, view))
            first += count
            column = columns.stop
        return parts

    def _own(self, client: int | str) -> tuple[_Part, int]:
        j = self._numbers[client]
        part = [part for part in self._parts if part.first <= j][-1]
        return part, j - part.first

    def _sign(self, part: _Part, round_: int) -> int:
        return int(part.view.pattern[part.rounds.index(round_)]) if round_ in part.rounds else 0


canary_clients = partial(PlantedCanaries, spare=True)
"""The canaries of a plan's table; for ``privpart.train(..., canaries=...)``."""


def sums_of_releases(
    releases: Array, rounds: Sequence[int], *, learning_rate: float, momentum: float
) -> Array:
    """Return the noised means that SGD with momentum stepped along, shape (len(rounds), ...).

    ``releases`` (n + 1, ...) are the start and every released model, or products of them; these
    parameters trained in ``rounds``, and momentum rests in the others.
    """
    at = np.asarray(rounds)
    velocity = (releases[at + 1] - releases[at]) / checks.positive("learning_rate", learning_rate)
    means = velocity.copy()
    means[1:] -= momentum * velocity[:-1]
    return np.asarray(means)


def groups_of(mechanism: Mechanism, dim: int) -> list[tuple[Mechanism, Sequence[int], slice]]:
    """Return mechanism, rounds and place of each group of ``dim`` parameters; there may be one."""
    if (groups := mechanism.groups) is None:
        return [(mechanism, range(mechanism.rounds), slice(0, dim))]
    ends = np.cumsum(groups.sizes).tolist()
    places = [slice(end - size, end) for end, size in zip(ends, groups.sizes, strict=True)]
    return list(zip(groups.mechanisms, groups.active_rounds(), places, strict=True))


def _shares(count: int, sizes: Sequence[int]) -> list[int]:
    """Return the number of canaries of each group: equal, as far as its parameters allow."""
    if count > sum(sizes):
        raise ConfigError(
            f"count={count}: each canary needs a parameter of its own, and {sum(sizes)} train. Use "
            "fewer canaries."
        )
    shares = [0] * len(sizes)
    groups = sorted(range(len(sizes)), key=sizes.__getitem__)  # small ones leave some to large ones
    for number, g in enumerate(groups):
        shares[g] = min(sizes[g], (count - sum(shares)) // (len(groups) - number))
    return shares


def _coins(count: int, key: bytes) -> NDArray[np.bool_]:
    """Return a fair coin per canary: the bits of SHAKE-256 of the key."""
    if not isinstance(key, bytes) or len(key) != 32:
        raise ConfigError("key: must be 32 bytes, secret until the canaries are scored.")
    drawn = hashlib.shake_256(b"privpart canary coins|" + key).digest(-(-count // 8))
    return np.unpackbits(np.frombuffer(drawn, np.uint8))[:count].astype(bool)
