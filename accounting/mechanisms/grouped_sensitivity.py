"""Grouped sensitivity: one joint clip over the active groups, one encoder per group.

A client's update of round t is split over the groups g that are active then, with parts d_tg and
sum_g ||d_tg||^2 <= 1. All groups' noised streams together are ONE Gaussian release with a
block-diagonal encoder, so nothing is composed M-fold. With X_g = C_g^T C_g its squared sensitivity
over a pattern u is

    sup sum_g sum_{t,t' in u} X_g[t,t'] <d_tg, d_t'g>
        <= sum_{t,t' in u} Q[t,t'],   Q[t,t'] = max_{g active in t and t'} |X_g[t,t']|, or 0,

because sum_g ||d_tg|| ||d_t'g|| <= 1 (Cauchy and Schwarz). So it is a maximum over groups, not a
sum. It is attained if every round of the worst pattern can put all of its mass into one group such
that each pair's coefficient is that of the group that both chose, or is zero; only then is the
result called exact. Clipping each group on its own would turn the maximum into a sum.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from accounting.participation import Participation
from accounting.sensitivity import Sensitivity, gram_sensitivity, worst_pattern

Array = NDArray[np.float64]
_ROUNDING = 1e-12


def grouped_sensitivity(
    grams: Sequence[Array], rounds: Sequence[Sequence[int]], participation: Participation
) -> Sensitivity:
    """Return the squared sensitivity of all groups' releases together, jointly clipped to 1.

    Args:
        grams: per group X_g, shape (T_g, T_g).
        rounds: per group its T_g active rounds, ascending.
        participation: who may take part.
    """
    bound = np.zeros((participation.rounds, participation.rounds))
    for gram, own in zip(grams, rounds, strict=True):
        cells = np.ix_(own, own)
        bound[cells] = np.maximum(bound[cells], np.abs(gram))
    found = gram_sensitivity(bound, participation)
    interact = np.triu(bound, participation.min_separation).any()
    exact = found.exact
    if exact and interact and participation.max_participations > 1:
        exact = _attained(grams, rounds, bound, worst_pattern(bound, participation))
    return Sensitivity(found.squared, exact=exact, rule=found.rule)


def _attained(
    grams: Sequence[Array], rounds: Sequence[Sequence[int]], bound: Array, pattern: Sequence[int]
) -> bool:
    """Whether some choice of one group per round of the pattern reaches the bound.

    Tries each group as the one that every round chooses if it can; a round in which it is not
    active chooses the group that counts most there. More choices would only find more.
    """
    inside = [_restricted(gram, own, pattern) for gram, own in zip(grams, rounds, strict=True)]
    target = float(bound[np.ix_(pattern, pattern)].sum())
    dearest = np.argmax([np.diag(gram) for gram in inside], axis=0)
    for group, gram in enumerate(inside):
        chosen = np.where(np.diag(gram) > 0, group, dearest)
        same = chosen[:, None] == chosen
        own_gram = np.stack(inside)[chosen, np.arange(len(chosen))]  # row t: of the group t chose
        if float(own_gram[same].sum()) >= target * (1 - _ROUNDING):
            return True
    return False


def _restricted(gram: Array, rounds: Sequence[int], pattern: Sequence[int]) -> Array:
    """X_g over the rounds of a pattern, zero where the group is not active."""
    place = {t: i for i, t in enumerate(rounds)}
    active = [(at, place[t]) for at, t in enumerate(pattern) if t in place]
    small = np.zeros((len(pattern), len(pattern)))
    if active:
        at, own = (list(column) for column in zip(*active, strict=True))
        small[np.ix_(at, at)] = gram[np.ix_(own, own)]
    return small
