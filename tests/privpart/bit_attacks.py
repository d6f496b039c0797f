"""Attacks on the bits of released models: was the update of one client there, or zeros?

The attacker is differential privacy's strongest: it knows all but the noise and one coin. The sums,
from consecutive models, less the updates that it knows, leave two candidates for the noise: without
the target's update ("absent") and with it ("present"). An attack is a function of ``Evidence`` that
says which of the two is noise: a score per game, >= 0 for "present".

A run is many games at once: game j owns pairs of coordinates, where only its own target's update is
not zero. Noise is independent between coordinates, so the games are independent; one game is the
plain case. A game's numbers have shape (2, m): coordinates i and i + 2^14 of the model.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom, norm

from accounting import Mechanism, Participation
from privpart import ClientUpdate, PrivacyPlan, ServerOptimizer

Array = NDArray[np.float64]
Whole = NDArray[np.int64]

STEPS = 20
"""The noise's standard deviation is 2^20 steps of the grid."""


@dataclass(frozen=True)
class Setting:
    """What everybody knows about a run."""

    mechanism: Mechanism
    """With groups: the first has ``size`` parameters, and all of them train in every round."""
    mu: float
    clients: int = 1
    """In the target's round, the target among them. Also the report goal."""
    round: int = 0
    """The target's."""
    ordinary: bool = False
    """Start values, server rate and momentum as in training; else the attacker sees the sum."""
    games: int = 1
    """A power of two, at most ``size`` / 2."""
    last: int | None = None
    """The last round that is played; the target's if None."""
    size: int = 2**15
    """Coordinates that belong to games."""

    @cached_property
    def plan(self) -> PrivacyPlan:
        participation = Participation(self.mechanism.rounds, 1, 1)
        z = self.mechanism.sensitivity(participation).squared ** 0.5 / self.mu
        return PrivacyPlan(
            mechanism=self.mechanism,
            participation=participation,
            clip_norm=2.0 ** round(math.log2(z)) / z,  # float32 holds whole steps exactly
            noise_multiplier=z,
            report_goal=self.clients,
        )

    @property
    def stddev(self) -> float:
        return 2.0 ** round(math.log2(self.plan.noise_multiplier))

    @property
    def optimizer(self) -> ServerOptimizer:
        """Return settings that float32 holds exactly, so that no server rounds them."""
        if self.ordinary:
            return ServerOptimizer(learning_rate=0.3125, momentum=0.875)
        return ServerOptimizer()

    @property
    def step(self) -> float:
        return self.stddev / 2.0**STEPS

    @property
    def dim(self) -> int:
        groups = self.mechanism.groups
        return self.size if groups is None else sum(groups.sizes)

    @cached_property
    def start(self) -> torch.Tensor:
        return self._vector(0, 0.05 * self.dim**0.5 if self.ordinary else 0.0)

    @cached_property
    def target(self) -> torch.Tensor:
        """The targets' updates in one vector, each a little shorter than the clip norm."""
        vector = self._vector(1, 1.0)
        vector[self.size :] = 0
        own = self.by_game(vector)
        own *= 0.999 * self.plan.clip_norm / own.norm(dim=(1, 2), keepdim=True)
        return vector

    @cached_property
    def others(self) -> list[list[torch.Tensor]]:
        """Per round, the updates of clients of which everybody knows that they take part."""
        rounds = range(1 + (self.round if self.last is None else self.last))
        counts = [self.clients - 1 if t == self.round else 1 for t in rounds]
        return [
            [self._vector(1000 * t + c, 0.9 * self.plan.clip_norm) for c in range(2, 2 + count)]
            for t, count in enumerate(counts)
        ]

    def updates(self, round_: int, present: Sequence[bool]) -> Iterator[ClientUpdate]:
        """Make a round's updates; a target that is absent sends zeros."""
        sent, plan_hash = self.others[round_], self.plan.hash
        if round_ == self.round:
            sent = chain(sent, (self._alone(game, coin) for game, coin in enumerate(present)))
        for client, update in enumerate(sent):
            yield ClientUpdate(100_000 * round_ + client, update, round_, plan_hash)

    def by_game(self, vector: Any) -> Any:
        """Return a view on the coordinates of each game, shape (games, 2, m)."""
        return vector[: self.size].reshape(2, self.games, -1).swapaxes(0, 1)

    def _alone(self, game: int, present: bool) -> torch.Tensor:
        update = torch.zeros(self.dim)
        if present:
            self.by_game(update)[game] = self.by_game(self.target)[game]
        return update

    def _vector(self, seed: int, length: float) -> torch.Tensor:
        vector = torch.randn(self.dim, generator=torch.Generator().manual_seed(seed))
        return vector * (length / vector.norm())


def play(make: Callable, setting: Setting, present: Sequence[bool]) -> list[Array]:
    server = make(setting)
    models = [setting.start]
    for round_ in range(len(setting.others)):
        server.run_round(setting.updates(round_, present))
        models.append(server.parameters.detach().clone())
    return [model[: setting.size].double().numpy() for model in models]


def half_ulp(values: Array) -> Array:
    return np.spacing(np.abs(values).astype(np.float32)).astype(np.float64) / 2


def noised_sums(setting: Setting, models: Sequence[Array]) -> list[tuple[Array, Array]]:
    """Return each round's noised sum, undoing the server's step, and a bound on its error."""
    rate, momentum = setting.optimizer.learning_rate, setting.optimizer.momentum
    found = []
    velocity = error = np.zeros(setting.size)
    for before, after in pairwise(models):
        old, old_error = momentum * velocity, momentum * error
        velocity = (before - after) / rate
        error = half_ulp(after) * bool(before.any()) + half_ulp(rate * velocity) * (rate != 1)
        error = error / rate
        gradient = velocity - old
        rounded = half_ulp(gradient) + (half_ulp(velocity) + half_ulp(old)) * bool(old.any())
        goal = setting.plan.report_goal
        found.append((-goal * gradient, goal * (error + old_error + rounded)))
    return found


def whitener(mechanism: Mechanism) -> Array:
    """Return C, lower triangular: C times the noise of the rounds' sums is independent noise.

    It is the accountant's encoder where a round has one draw; of a tree's nodes, it keeps what the
    released sums depend on.
    """
    own = mechanism if mechanism.groups is None else mechanism.groups.mechanisms[0]
    difference = np.eye(own.rounds) - np.eye(own.rounds, k=-1)
    per_round = difference @ own.decoder()
    return np.linalg.inv(np.linalg.cholesky(per_round @ per_round.T))


@dataclass(frozen=True)
class Evidence:
    """What the attacker computed; every array has shape (games, 2, m), pairs: absent, present."""

    setting: Setting
    target: Array
    error: Array
    """Bound on that of the noised sum of the target's round."""
    noises: list[Array]
    """Of every round, absent."""
    noise: tuple[Array, Array]
    steps: tuple[Whole, Whole]
    """The noise in whole steps of the grid, if every update was rounded to it."""
    white: tuple[Array, Array]
    """The round's independent noise: a draw, for most mechanisms."""
    white_error: Array
    """But for the rounding of the noise itself."""


def evidence(setting: Setting, models: Sequence[Array]) -> Evidence:
    step, now = setting.step, setting.round
    target = setting.by_game(setting.target.double().numpy())
    sums = noised_sums(setting, models)
    known = [[u[: setting.size].double().numpy() for u in sent] for sent in setting.others]
    noises = [
        setting.by_game(total - sum(sent)) for (total, _), sent in zip(sums, known, strict=True)
    ]
    row = whitener(setting.mechanism)[now, : now + 1]
    white = sum(c * noise for c, noise in zip(row, noises, strict=False))
    error = sum(abs(c) * bound for c, (_, bound) in zip(row, sums, strict=False))
    rounded = sums[now][0] / step - sum(np.rint(update / step) for update in known[now])
    steps = setting.by_game(np.rint(rounded)).astype(np.int64)
    return Evidence(
        setting=setting,
        target=target,
        error=setting.by_game(sums[now][1]),
        noises=noises,
        noise=(noises[now], noises[now] - target),
        steps=(steps, steps - np.rint(target / step).astype(np.int64)),
        white=(white, white - row[now] * target),
        white_error=setting.by_game(error),
    )


def pairs(seen: Evidence) -> Array:
    """A float32 Box-Muller pair is a point of a grid in polar coordinates: prefer the nearer."""
    away = [distance_from_pairs(white, seen.white_error) for white in seen.white]
    return away[0] - away[1]


NEIGHBOURS = range(-3, 4)
_FAR = 2.0


def distance_from_pairs(white: Array, error: Array) -> Array:
    """Return the mean distance from possible pairs, in errors, per game; each counts 2 at most."""
    near = torch.from_numpy(white).float()
    lost = (torch.from_numpy(white) - near).float()
    scale = torch.from_numpy(1 / error).float()
    (x, y), (x_lost, y_lost), (x_scale, y_scale) = (v.unbind(1) for v in (near, lost, scale))
    least = torch.full_like(x, _FAR)
    for angle in neighbours(torch.atan2(y, x)):
        cosine, sine = torch.cos(angle), torch.sin(angle)
        for radius in neighbours(torch.hypot(x, y)):
            off = (cosine * radius).sub_(x).sub_(x_lost).abs_().mul_(x_scale)
            other = (sine * radius).sub_(y).sub_(y_lost).abs_().mul_(y_scale)
            torch.minimum(least, torch.maximum(off, other, out=off), out=least)
    return least.double().mean(dim=1).numpy()


def neighbours(values: torch.Tensor) -> list[torch.Tensor]:
    bits = values.view(torch.int32)
    return [(bits + k).view(torch.float32) for k in NEIGHBOURS]


def uneven(symbols: Callable[[Whole], Whole], kinds: int) -> Callable:
    """Return an attack on noise with a fault: a wrong update makes its symbols more even."""

    def attack(seen: Evidence) -> Array:
        games = len(seen.target)
        counts = []
        for steps in seen.steps:
            found = symbols(steps).reshape(games, -1) + kinds * np.arange(games)[:, None]
            counts.append(np.bincount(found.ravel(), minlength=kinds * games).reshape(games, -1))
        absent, present = ((each.astype(np.float64) ** 2).sum(axis=1) for each in counts)
        return present - absent

    return attack


def on_the_grid(seen: Evidence) -> Array:
    """Noise is on the grid; its sum with an update that was not rounded is not."""
    step = seen.setting.step
    away = [np.abs(noise - step * np.rint(noise / step)) for noise in seen.noise]
    absent, present = ((x <= seen.error).mean(axis=(1, 2)) for x in away)
    return present - absent


def likelihood(seen: Evidence) -> Array:
    """The test that the guarantee allows, on every round since the target's."""
    sigma, now = seen.setting.plan.noise_multiplier, seen.setting.round
    encoder = whitener(seen.setting.mechanism)[: len(seen.noises), : len(seen.noises)]
    white = np.tensordot(encoder, np.stack(seen.noises), 1) / sigma
    shift = np.multiply.outer(encoder[:, now], seen.target) / sigma
    return (shift * (white - shift / 2)).sum(axis=(0, 2, 3))


EXACT = {
    "low bit": uneven(lambda w: w & 1, 2),
    "low 4 bits": uneven(lambda w: w & 15, 16),
    "low 10 bits": uneven(lambda w: w & 1023, 1024),
    "residues of 3": uneven(lambda w: w % 3, 3),
    "bits of pairs": uneven(lambda w: (w[:, 0] & 3) * 4 + (w[:, 1] & 3), 16),
}
"""Attacks on what no update moves at all: against sound noise they know nothing."""

ATTACKS = EXACT | {
    "pairs": pairs,
    "on the grid": on_the_grid,
    "likelihood": likelihood,
}


def fair_coins(runs: int, games: int) -> NDArray[np.bool_]:
    """Return coins, shape (runs, games), as many heads as tails: one answer to all wins half."""
    coins = np.arange(runs * games) % 2 == 0
    return np.random.default_rng(0).permutation(coins).reshape(runs, games)


def right_answers(make: Callable, setting: Setting, runs: int, attacks=ATTACKS) -> dict[str, int]:
    won = dict.fromkeys(attacks, 0)
    for coins in fair_coins(runs, setting.games):
        seen = evidence(setting, play(make, setting, coins))
        for name, attack in attacks.items():
            won[name] += int(((attack(seen) >= 0) == coins).sum())
    return won


def most(trials: int, share: float, level: float) -> int:
    """Return how many trials are won at most, but for a probability of ``level``."""
    return int(binom.isf(level, trials, share))


def allowed(name: str, setting: Setting) -> float:
    if name in EXACT and not setting.ordinary:
        return 0.5
    return float(norm.cdf(setting.mu / 2))
