"""Extraction: how far a released model of text gives away secrets that were planted in it.

A secret is a random sequence of tokens. A model's score of a sequence is its log-likelihood; the
exposure of a secret (Carlini et al. 2019, "The Secret Sharer") is

    log2(N + 1) - log2(rank among N random sequences and itself)    bits.

Here rank is counted, not fitted: nothing below 0 or above log2(N + 1) can come out. A secret that
the model never saw is exchangeable with the N others, so its rank is uniform on 1 ... N + 1,
whatever the model is: half of such secrets have an exposure of 1 bit or more, and one in 2^b has b
bits or more. ``Exposure.p_value`` tests that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from accounting.checks import ConfigError

Array = NDArray[np.float64]
_DRAWS = 1999
"""Permutations of the test; no p-value is below 1 / 2000."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """Exposure of secrets in one or several models.

    Attributes:
        bits: of each secret, the models' one after another, (m,).
        p_value: probability, at most, of ranks as high in sum if no model saw any of them.
    """

    bits: Array
    p_value: float


def exposure(scores: Sequence[ArrayLike], reference: Sequence[ArrayLike]) -> Exposure:
    """Return the exposure of secrets, and whether a model that never saw them has such ranks.

    The test is exact: of the sum of ranks, under random exchanges of secrets and reference.

    Args:
        scores: per model, its scores of its secrets, (m_t,); higher is likelier.
        reference: per model, its scores of random sequences of the secrets' law, (N_t,). None of
            them trained it, and each model has sequences of its own: else ranks in several models
            would depend on each other.

    Raises:
        ConfigError: there is no secret or no reference, or a score is not finite.
    """
    if len(scores) != len(reference) or not scores:
        raise ConfigError(f"scores, reference: {len(scores)} and {len(reference)} models.")
    draws, bits = np.random.default_rng(0), []
    observed, permuted = 0.0, np.zeros(_DRAWS)
    for of_secrets, of_others in zip(scores, reference, strict=True):
        secrets, others = _vector("scores", of_secrets), _vector("reference", of_others)
        # A tie counts against the secret: a model that says nothing exposes nothing.
        above = len(others) - np.searchsorted(np.sort(others), secrets, side="left")
        bits.append(np.log2(len(others) + 1) - np.log2(above + 1))
        ranks = stats.rankdata(np.concatenate([secrets, others]))
        observed += ranks[: len(secrets)].sum()
        permuted += [
            draws.choice(ranks, len(secrets), replace=False, shuffle=False).sum()
            for _ in range(_DRAWS)
        ]
    as_high = int((permuted >= observed - 1e-6).sum())
    return Exposure(np.concatenate(bits), (1 + as_high) / (1 + _DRAWS))


def standardised(scores: ArrayLike, reference: ArrayLike) -> Array:
    """Return scores on the scale of one model's reference, so that models can be pooled, (m,)."""
    secrets, others = _vector("scores", scores), _vector("reference", reference)
    return np.asarray((secrets - others.mean()) / max(float(others.std()), np.finfo(float).tiny))


def _vector(name: str, values: ArrayLike) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise ConfigError(f"{name}: shape {array.shape}; must be finite, one for each sequence.")
    return array
