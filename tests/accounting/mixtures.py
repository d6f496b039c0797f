"""Mixtures of Gaussians by brute force: every draw of a sampler, every point of a grid."""

import itertools
import math
from functools import lru_cache

import numpy as np
from scipy.stats import norm


def bin_rows(rounds, bins):
    """Return {rounds joined: probability} of balls in bins, rounds as a tuple of 0 and 1."""
    return {tuple(int(t % bins == j) for t in range(rounds)): 1 / bins for j in range(bins)}


def chosen_rows(rounds, bins, chosen):
    """Return {rounds joined: probability} of members in ``chosen`` different bins."""
    sets = list(itertools.combinations(range(bins), chosen))
    return {tuple(int(t % bins in some) for t in range(rounds)): 1 / len(sets) for some in sets}


def separated_rows(rounds, b, p):
    """Return {rounds joined: probability} of b-min-sep, begun as if it had run before."""
    found = {}

    def walk(t, free, joined, weight):
        if t == rounds:
            found[joined] = found.get(joined, 0.0) + weight
            return
        if free > t:
            walk(t + 1, free, (*joined, 0), weight)
            return
        if p < 1:
            walk(t + 1, free, (*joined, 0), weight * (1 - p))
        walk(t + 1, t + b, (*joined, 1), weight * p)

    total = 1 + (b - 1) * p
    for free in range(b):
        walk(0, free, (), (1 if free == 0 else p) / total)
    return found


@lru_cache(maxsize=2)
def grid(rounds, points, reach=6.5):
    """Return points of a cubic grid, shape (rounds, points^rounds), and their N(0, I) masses."""
    axis = np.linspace(-reach, reach, points)
    mass = np.exp(-axis * axis / 2)
    mass /= mass.sum()
    masses = mass
    for _ in range(rounds - 1):
        masses = np.multiply.outer(masses, mass)
    return np.stack(
        [a.ravel() for a in np.meshgrid(*[axis] * rounds, indexing="ij")]
    ), masses.ravel()


def adaptive(_, releases):
    """Return updates of a round that follow what was released, as ``deltas`` takes them."""
    return np.where(releases.sum(axis=0) > 0.3, -1.0, 0.9) if len(releases) else 1.0


def delta_of(loss, epsilon, removed):
    """Return the delta of simulated losses in one direction, and its standard error."""
    gains = np.maximum(0, -np.expm1(epsilon - (1 if removed else -1) * loss))
    return gains.mean(), gains.std() / math.sqrt(len(loss))


def mean_of_products(numbers, chosen):
    """Return the mean product of ``chosen`` different rows: the likelihood ratio, per column."""
    means = np.zeros((chosen + 1, numbers.shape[1]))
    means[0] = 1.0
    for i, row in enumerate(numbers, start=1):
        for j in range(min(i, chosen), 0, -1):
            means[j] = means[j] * ((i - j) / i) + means[j - 1] * row * (j / i)
    return means[chosen]


def below_the_truth(mu, bins, chosen, epsilons, cells):
    """Both deltas with every number replaced by its mean in a cell, which can only lower them."""
    edges = norm.ppf(np.linspace(0, 1, cells + 1)[1:-1])
    edges = np.sort(np.concatenate([[-np.inf], edges, [mu + 2, np.inf]]))
    mass, mean = np.diff(norm.cdf(edges)), np.diff(norm.cdf(edges - mu))
    number = mean / mass
    removed, added = np.zeros(len(epsilons)), np.zeros(len(epsilons))
    for cell in itertools.combinations_with_replacement(range(len(mass)), bins):
        counts = np.bincount(cell, minlength=len(mass))
        ways = math.factorial(bins) / math.prod(math.factorial(int(k)) for k in counts)
        weight = ways * math.prod(mass**counts)
        f = mean_of_products(number[list(cell), None], chosen)[0]
        removed += weight * np.maximum(f - np.exp(epsilons), 0)
        added += weight * np.maximum(1 - np.exp(epsilons) * f, 0)
    return removed, added


def deltas(encoder, rows, z, epsilons, points, update=None):
    """Return delta_remove and delta_add at each epsilon, by summing over a grid of the release.

    ``update(t, releases so far)`` is the member's update of round t, in [-1, 1]; 1 by default.
    """
    released, masses = grid(len(encoder), points)
    updates = [1.0 if update is None else update(t, released[:t]) for t in range(len(encoder))]
    ratio = np.zeros(released.shape[1])
    for joined, weight in rows.items():
        loss = np.zeros(released.shape[1])
        for t, row in enumerate(encoder):
            mean = sum(row[s] * joined[s] * updates[s] / z for s in range(t + 1))
            loss += mean * (released[t] - mean / 2)
        ratio += weight * np.exp(loss)
    removed = [float(masses @ np.maximum(ratio - math.exp(e), 0)) for e in epsilons]
    added = [float(masses @ np.maximum(1 - math.exp(e) * ratio, 0)) for e in epsilons]
    return np.array([removed, added])
