"""Membership: how well a released model tells who took part in its training.

An attack scores each unit (a client with all of its examples, or an example); higher means "took
part". Four scores, from what a model says of a unit's own examples:

    loss          -loss                            no other model needed (Yeom et al. 2018)
    gradient      -norm of the loss's gradient     white box (Nasr et al. 2019, in one number)
    LiRA          log N(s; in) - log N(s; out)     shadow models (Carlini et al. 2022)
    RMIA          how many public units z have     shadow models and public units
                  (p_x / E p_x) / (p_z / E p_z) >= 1 (Zarifzadeh et al. 2024)

A shadow model is trained as the target was, on units that the auditor's coins chose; s is the logit
of p = exp(-loss), which is nearly Gaussian, and E is the mean over shadow models.

``membership`` turns scores into an area under the curve, true positives at few false ones, and
bounds on epsilon. The bounds need that a fair, independent coin decided for each unit whether it
took part; they then hold for any score, whatever it was computed from beside those coins. Scores
that look at the coins of the target, or thresholds that were chosen on them, prove nothing: the
bounds used here take the highest and lowest scores, and pay for the choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from accounting.checks import ConfigError
from attacks.lower_bounds.bounds import Bound, one_run, one_run_gdp

Array = NDArray[np.float64]
RATES = (0.001, 0.01)
"""Shares of false positives at which true ones are stated."""
_LEAST_DEVIATION = 1e-6
_ROUNDING = 1e-6  # below 0, a cross entropy may be by so much


@dataclass(frozen=True, slots=True)
class TruePositives:
    """Share of those who took part that a score finds, where few others are taken for them.

    Attributes:
        at: share of false positives, at most.
        rate: of true positives; None where there are fewer than 1 / ``at`` others, so that the
            share cannot be told from 0.
        low, high: a 95 % interval of it (Clopper and Pearson), at the threshold that was found: it
            does not cover how the threshold varies, nor what units of one model have in common.
    """

    at: float
    rate: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class MembershipScore:
    """What one attack's scores tell of who took part.

    Attributes:
        attack: its name.
        auc: area under the ROC curve, 0.5 at chance.
        found: true positives at ``RATES``.
        bounds: on epsilon, from below: of one run without any assumption, and for mu-GDP runs.
    """

    attack: str
    auc: float
    found: tuple[TruePositives, ...]
    bounds: tuple[Bound, ...]


def membership(
    scores: Mapping[str, ArrayLike],
    present: ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
) -> list[MembershipScore]:
    """Return what each attack's scores tell of who took part.

    Args:
        scores: per attack, a finite score for each of m units, (m,); higher means "took part".
        present: the fair coins that decided who took part, (m,) truth values. Units of several
            target models may stand in one vector: each has a coin of its own.
        delta: of the bounds on epsilon, in (0, 1).
        confidence: of each bound, in (0, 1).

    Raises:
        ConfigError: shapes differ, a score is not finite, or all coins fell alike.
    """
    took_part = np.asarray(present)
    if took_part.dtype != np.bool_ or took_part.ndim != 1 or took_part.all() or not took_part.any():
        raise ConfigError("present: must be a vector of truth values, not all of them alike.")
    results = []
    for attack, values in scores.items():
        score = _matrix(f"scores of {attack}", values, took_part.shape)
        inside, outside = score[took_part], score[~took_part]
        at = {"delta": delta, "confidence": confidence}
        results.append(
            MembershipScore(
                attack,
                _auc(inside, outside),
                tuple(_found(inside, outside, rate) for rate in RATES),
                (one_run(score, took_part, **at), one_run_gdp(score, took_part, **at)),
            )
        )
    return results


def scores_of_models(
    losses: ArrayLike,
    gradients: ArrayLike,
    shadow_present: ArrayLike,
    public: ArrayLike | None = None,
) -> dict[str, Array]:
    """Return the scores of every attack on T target models, in one vector each, (T m,).

    Args:
        losses: of S shadow models and then of the targets, on m units, (S + T, m).
        gradients: norms of those losses' gradients, (S + T, m).
        shadow_present: who took part in the shadow models, (S, m) truth values.
        public: losses of the same models on n units that trained none of them, (S + T, n); None
            leaves RMIA out.

    Raises:
        ConfigError: shapes differ, a number is not finite, or see ``lira``.
    """
    loss = _matrix("losses", losses, None)
    norm = _matrix("gradients", gradients, loss.shape)
    s = len(np.asarray(shadow_present))
    if not 0 < s < len(loss):
        raise ConfigError(f"shadow_present: {s} shadow models; there are {len(loss)} models.")
    # A loss of one's own may be below 0 and is then a signal itself.
    signal = -loss if (loss < -_ROUNDING).any() else logit_of_confidence(loss)
    rows: dict[str, Sequence[Array] | Array] = {
        "loss": -loss[s:],
        "gradient": -norm[s:],
        "LiRA": [lira(target, signal[:s], shadow_present) for target in signal[s:]],
    }
    if public is not None:
        z = _matrix("public", public, (len(loss), np.shape(public)[-1]))
        rows["RMIA"] = [rmia(loss[t], loss[:s], z[t], z[:s]) for t in range(s, len(loss))]
    return {attack: np.concatenate([*values]) for attack, values in rows.items()}


def lira(signals: ArrayLike, shadow_signals: ArrayLike, shadow_present: ArrayLike) -> Array:
    """Return the log of LiRA's likelihood ratio for each unit, (m,).

    Each unit has a mean of its own with and without it; the two deviations are common to all units,
    as Carlini et al. recommend for fewer than 64 shadow models.

    Args:
        signals: of the target model, (m,).
        shadow_signals: of S shadow models, (S, m).
        shadow_present: who took part in each, (S, m) truth values; each unit did in one at least,
            and did not in another.

    Raises:
        ConfigError: shapes differ, a signal is not finite, or a unit was always in or always out.
    """
    shadows = _matrix("shadow_signals", shadow_signals, None)
    signal = _matrix("signals", signals, shadows.shape[1:])
    took_part = np.asarray(shadow_present)
    if took_part.dtype != np.bool_ or took_part.shape != shadows.shape:
        raise ConfigError(f"shadow_present: must be truth values of shape {shadows.shape}.")
    counts = took_part.sum(0), (~took_part).sum(0)
    if not min(count.min() for count in counts):
        raise ConfigError("shadow_present: a unit took part in all shadow models, or in none.")
    inside, outside = (_log_density(signal, shadows, chosen) for chosen in (took_part, ~took_part))
    return inside - outside


def rmia(
    losses: ArrayLike, shadow_losses: ArrayLike, public: ArrayLike, shadow_public: ArrayLike
) -> Array:
    """Return RMIA's score of each unit, (m,): the share of public units that it stands out from.

    Args:
        losses: of the target model on the units, (m,).
        shadow_losses: of S shadow models on them, (S, m); the mean over all shadow models takes the
            place of the mean over those with and those without the unit.
        public: of the target model on n units that trained no model, (n,).
        shadow_public: of the shadow models on those, (S, n).

    Raises:
        ConfigError: shapes differ, or a loss is not finite.
    """
    of_units = _log_ratio(losses, shadow_losses, "losses")
    of_public = np.sort(_log_ratio(public, shadow_public, "public"))
    return np.asarray(np.searchsorted(of_public, of_units, side="right") / len(of_public))


def logit_of_confidence(losses: ArrayLike) -> Array:
    """Return log p - log(1 - p) of p = exp(-loss), the signal that LiRA takes.

    Raises:
        ConfigError: a loss is NaN, infinite or below 0, so that p is not a probability.
    """
    loss = np.asarray(losses, dtype=np.float64)
    if not (np.isfinite(loss) & (loss >= -_ROUNDING)).all():
        raise ConfigError(
            "losses: must be finite and at least 0, so that exp(-loss) is a probability; give LiRA "
            "the negative loss where they are not."
        )
    loss = np.maximum(loss, 1e-12)
    return np.asarray(-loss - np.log(-np.expm1(-loss)))


def _log_ratio(losses: ArrayLike, shadow_losses: ArrayLike, name: str) -> Array:
    """Return log(p / E p) per unit, of p = exp(-loss)."""
    shadows = _matrix(f"shadow_{name}", shadow_losses, None)
    values = _matrix(name, losses, shadows.shape[1:])
    mean = np.logaddexp.reduce(-shadows, axis=0) - np.log(len(shadows))
    return np.asarray(-values - mean)


def _log_density(signal: Array, shadows: Array, chosen: NDArray[np.bool_]) -> Array:
    """Return the log density of each signal under the Gaussian of the chosen shadow models."""
    mean = np.where(chosen, shadows, 0.0).sum(0) / chosen.sum(0)
    squares = np.where(chosen, (shadows - mean) ** 2, 0.0).sum()
    free = max(1, int(chosen.sum()) - shadows.shape[1])
    deviation = max(float(np.sqrt(squares / free)), _LEAST_DEVIATION)
    return np.asarray(stats.norm.logpdf(signal, mean, deviation))


def _auc(inside: Array, outside: Array) -> float:
    ranks = stats.rankdata(np.concatenate([inside, outside]))[: len(inside)]
    above = float(ranks.sum()) - len(inside) * (len(inside) + 1) / 2
    return above / (len(inside) * len(outside))


def _found(inside: Array, outside: Array, at: float) -> TruePositives:
    allowed = int(at * len(outside) + 1e-9)
    if not allowed:
        return TruePositives(at, None, None, None)
    threshold = np.sort(outside)[-allowed - 1] if allowed < len(outside) else -np.inf
    right, number = int((inside > threshold).sum()), len(inside)
    low, high = stats.binomtest(right, number).proportion_ci(0.95, method="exact")
    return TruePositives(at, right / number, float(low), float(high))


def _matrix(name: str, values: ArrayLike, shape: tuple[int, ...] | None) -> Array:
    array = np.asarray(values, dtype=np.float64)
    expected = array.shape if shape is None and array.ndim == 2 else shape
    if array.shape != expected or not array.size or not np.isfinite(array).all():
        wanted = "(S, m)" if shape is None else str(shape)
        raise ConfigError(f"{name}: shape {array.shape}; must be finite, of shape {wanted}.")
    return array
