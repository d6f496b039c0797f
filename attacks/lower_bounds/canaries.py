"""Canaries: known directions that some clients send, and what an observer sees of them.

Of m canaries, coins choose who takes part; an absent canary sends nothing. Each is one unit vector,
sent at full clip norm in every round of its pattern. Whoever sees the noised sums

    Y = X + s N z        (s = noise_multiplier x clip_norm, N N^T = K, one column per parameter)

projects them on the direction u of a canary with pattern p and weights the rounds by

    w = K^-1 p / (z sqrt(p^T K^-1 p)),        score = w . (Y u) / clip_norm.

That is the most powerful statistic (Neyman and Pearson): N(0, 1) without the canary, N(mu, 1) with
it, where mu = sqrt(p^T K^-1 p) / z is what this observer sees of the accountant's mu. With
K = D S D^T, where S = B B^T is the covariance of the prefix sums and D takes differences, it is
the statistic a^T S^-1 (R u) of all prefix sums R, a = A p.

The directions have disjoint supports, so they are orthonormal and all of them are projected by
reading a vector once. They come from the raw output of PCG64, which NumPy never changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accounting import FixedOrder, Participation, checks
from accounting.checks import ConfigError

Array = NDArray[np.float64]
_EDGE = 1.1  # times the largest variance that a finite sample of noise is expected to show
_MOST_STARTS = 256  # rounds from which ``worst_view`` begins its search


@dataclass(frozen=True)
class Canaries:
    """Orthonormal directions of ``count`` canaries in a vector of ``dim`` parameters.

    Every canary owns about dim / count coordinates, chosen at random, with random signs. The seed
    need not be secret; the coins must be. ``within`` is the first coordinate and the end of the
    part that the directions lie in, such as a group that trains in turns; None is the whole vector.

    >>> canaries = Canaries(seed=1, count=2, dim=6)
    >>> canaries.project(canaries.update(1, norm=0.5)).round(decimals=6)
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """

    seed: int
    count: int
    dim: int
    within: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        checks.count("seed", self.seed, minimum=0)
        checks.count("count", self.count)
        checks.count("dim", self.dim)
        start, end = self._part()
        if not 0 <= start < end <= self.dim:
            raise ConfigError(
                f"within={self.within}: must be a first coordinate and an end, from 0 to {self.dim}"
            )
        if self.count > end - start:
            raise ConfigError(
                f"count={self.count}: each canary needs a coordinate of its own, and there are "
                f"{end - start}. Use fewer canaries."
            )

    def _part(self) -> tuple[int, int]:
        return (0, self.dim) if self.within is None else self.within

    @cached_property
    def _supports(self) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
        """Coordinates of the part in random order, of which canary j owns j, j + count, ...

        And the owner and the entry of each coordinate; a vector is read fastest in its own order.
        """
        start, end = self._part()
        raw = np.random.PCG64(np.random.SeedSequence([self.seed, self.count, self.dim, start, end]))
        order = np.argsort(raw.random_raw(end - start), kind="stable")
        signs = np.where(raw.random_raw(end - start) >> np.uint64(63), 1.0, -1.0)
        turn = np.arange(end - start) % self.count
        owners, entries = np.empty_like(turn), np.empty_like(signs)
        owners[order] = turn
        entries[order] = signs / np.sqrt(np.bincount(turn, minlength=self.count))[turn]
        return order, owners, entries

    def update(self, j: int, norm: float = 1.0) -> Tensor:
        """Return canary j's update, shape (dim,), float32, of length ``norm``."""
        j = checks.count("j", j, minimum=0, maximum=self.count - 1)
        norm = checks.positive("norm", norm)
        order, _, entries = self._supports
        places = order[j :: self.count]
        sent = torch.zeros(self.dim)
        sent[places + self._part()[0]] = torch.from_numpy(entries[places] * norm).float()
        return sent

    def project(self, vector: Tensor) -> Tensor:
        """Return the projections of a vector (dim,) on all directions: (count,), float64."""
        if vector.shape != (self.dim,):
            raise ConfigError(f"vector: shape {tuple(vector.shape)}; must be ({self.dim},).")
        _, owners, entries = self._supports
        part = vector.detach().cpu().numpy()[slice(*self._part())]
        sums = np.bincount(owners, weights=part * entries, minlength=self.count)
        return torch.from_numpy(sums)


def coins(count: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return which canaries take part: one fair coin each.

    Whoever could guess a coin could guess a canary, so ``rng`` must be secret until the scores are
    made: ``numpy.random.default_rng()`` without a seed, except in simulations.
    """
    return rng.integers(2, size=checks.count("count", count)).astype(bool)


def round_covariance(decoder: Array) -> Array:
    """Return K (n, n), the covariance of the noise of the rounds' sums at unit draws.

    The decoder B (n, draws) is ``Mechanism.decoder()``: the noise of the prefix sums.

    >>> from accounting import BinaryTree
    >>> round_covariance(BinaryTree(2).decoder())
    array([[ 1., -1.],
           [-1.,  2.]])
    """
    steps = np.diff(np.asarray(decoder, dtype=np.float64), axis=0, prepend=0.0)
    return np.asarray(steps @ steps.T)


@dataclass(frozen=True)
class View:
    """What an observer sees of one canary."""

    pattern: NDArray[np.int64]  # per round: its direction is sent with this sign, or not at all (0)
    mu: float  # distance between the scores with and without it, in standard deviations
    weights: Array  # per round, of the projection of its noised sum in units of the clip norm

    @property
    def rounds(self) -> tuple[int, ...]:
        """The rounds in which it takes part, from 0."""
        return tuple(int(t) for t in np.flatnonzero(self.pattern))


def view(
    covariance: Array, pattern: Sequence[int] | NDArray[np.int64], noise_multiplier: float
) -> View:
    """Return what an observer of all released models sees of a canary with this pattern.

    ``covariance`` is K of ``round_covariance``; the pattern has -1, 0 or 1 per round, not all 0.
    """
    covariance = _checked(covariance)
    z = checks.positive("noise_multiplier", noise_multiplier)
    sent = np.asarray(pattern, dtype=np.int64)
    if sent.shape != (len(covariance),) or not np.isin(sent, (-1, 0, 1)).all() or not sent.any():
        raise ConfigError(
            f"pattern: must have -1, 0 or 1 for each of {len(covariance)} rounds, and not only 0."
        )
    best = np.linalg.solve(covariance, sent.astype(np.float64))
    weights = best / (z * np.sqrt(sent @ best))
    return View(sent, float(weights @ sent), weights)


def worst_view(covariance: Array, participation: Participation, noise_multiplier: float) -> View:
    """Return the view of the most visible canary that the plan admits.

    A search: ``|L^-1 p|^2`` is convex in p, so that replacing p by the admissible pattern that
    agrees best with the slope at p never lowers it; begun at single rounds. It is certain for one
    participation; elsewhere it might stop short of the maximum, though it never did where all
    patterns could be tried. Any admissible pattern gives sound bounds; a better one higher ones.

    The rounds of ``participation`` are those of ``covariance``; for the others see ``view``.
    """
    covariance = _checked(covariance)
    n = len(covariance)
    if participation.rounds != n:
        raise ConfigError(
            f"participation has rounds={participation.rounds}: must be those of the noise, {n}."
        )
    gram: Array = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
    starts = np.argsort(-np.diag(gram), kind="stable")[:_MOST_STARTS]
    patterns = [_climb(gram, int(start), participation) for start in starts]
    best = max(patterns, key=lambda p: float(p @ gram @ p))
    return view(covariance, best, noise_multiplier)


def drifting_view(
    covariance: Array,
    pattern: Sequence[int] | NDArray[np.int64],
    noise_multiplier: float,
    unsent: Tensor | Array,
) -> View:
    """Return a view that also allows for what the other clients add to every direction.

    They push the model the same way in many rounds, and the best weights against noise alone add
    that up. Directions that nobody sends show it: the principal components of their whitened
    projections that noise does not explain (above Marchenko and Pastur's edge) count less. The
    weights depend on no canary and no coin.

    ``unsent`` are projections of the rounds' noised sums, in units of the clip norm, on directions
    that no client sends: shape (n, r), r >= 2 n to tell drift from noise. Take them from the same
    ``Canaries``, which then have r more, without a coin.
    """
    plain = view(covariance, pattern, noise_multiplier)
    projections = np.asarray(unsent, dtype=np.float64)
    n = len(plain.pattern)
    if (
        projections.ndim != 2
        or len(projections) != n
        or projections.shape[1] < 2 * n
        or not np.isfinite(projections).all()
    ):
        raise ConfigError(
            f"unsent: shape {projections.shape}; must be finite, ({n}, directions), with at least "
            f"{2 * n} directions."
        )
    root = np.linalg.cholesky(covariance) * noise_multiplier
    white = np.linalg.solve(root, projections)
    sent = np.linalg.solve(root, plain.pattern.astype(np.float64))
    variances, shapes = np.linalg.eigh(white @ white.T / projections.shape[1])
    loud = variances > (1 + np.sqrt(n / projections.shape[1])) ** 2 * _EDGE
    drift, shapes = variances[loud] - 1, shapes[:, loud]
    best = sent - shapes @ (drift / (1 + drift) * (shapes.T @ sent))
    deviation = np.sqrt(best @ best + drift @ (shapes.T @ best) ** 2)
    return View(
        plain.pattern, float(best @ sent / deviation), np.linalg.solve(root.T, best) / deviation
    )


def _climb(gram: Array, start: int, participation: Participation) -> NDArray[np.int64]:
    pattern = np.zeros(len(gram), dtype=np.int64)
    pattern[start] = 1
    value = float(gram[start, start])
    while True:
        slope = gram @ pattern
        # What a round would add if it came, or takes away if it left: this may find more.
        gain = np.abs(slope) + np.where(pattern == 0, 0.5, -0.5) * np.diag(gram)
        candidates = [_agreeing(slope, weights, participation) for weights in (np.abs(slope), gain)]
        values = [float(candidate @ gram @ candidate) for candidate in candidates]
        if not max(values) > value * (1 + 1e-12):
            return pattern
        value = max(values)
        pattern = candidates[values.index(value)]


def _agreeing(slope: Array, weights: Array, participation: Participation) -> NDArray[np.int64]:
    """Return the admissible pattern of the largest sum of weights, with the signs of the slope."""
    pattern = np.zeros(len(slope), dtype=np.int64)
    chosen = list(heaviest_rounds(np.maximum(weights, 0.0), participation))
    pattern[chosen] = np.where(slope[chosen] < 0, -1, 1)
    return pattern


def heaviest_rounds(weights: Array, participation: Participation) -> Sequence[int]:
    """Return the admissible rounds with the largest sum of weights, all of them >= 0."""
    if isinstance(participation, FixedOrder):
        return max(participation.places(), key=lambda places: float(weights[list(places)].sum()))
    n, k, b = len(weights), participation.max_participations, participation.min_separation
    if b == 1:
        return [int(t) for t in np.argsort(-weights, kind="stable")[:k]]
    best = np.zeros((k + 1, n + 1))  # [m, i]: of at most m of the first i rounds
    ends = np.maximum(np.arange(1, n + 1) - b, 0)
    for m in range(1, k + 1):
        taken = weights + best[m - 1, ends]
        best[m, 1:] = np.maximum.accumulate(np.maximum(taken, best[m - 1, 1:]))
    rounds = []
    i, m = n, k
    while i and m:
        if best[m, i] == best[m, i - 1]:
            i -= 1
        elif best[m, i] == best[m - 1, i]:
            m -= 1
        else:
            rounds.append(i - 1)
            i, m = int(ends[i - 1]), m - 1
    return rounds[::-1]


def _checked(covariance: Array) -> Array:
    matrix = np.asarray(covariance, dtype=np.float64)
    if matrix.shape != (len(matrix), len(matrix)) or not np.isfinite(matrix).all():
        raise ConfigError(f"covariance: shape {matrix.shape}; must be square and finite.")
    return matrix
