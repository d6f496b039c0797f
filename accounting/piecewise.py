"""Numbers that change at rounds fixed beforehand, as two lists: from which round on, and what."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from accounting import checks
from accounting.checks import ConfigError
from accounting.sensitivity import Array

Starts = tuple[int, ...]


def checked(name: str, from_round: object, values: object) -> tuple[Starts, tuple[float, ...]]:
    """Return both lists as tuples of numbers.

    Raises:
        ConfigError: they are not lists of one length, the rounds do not begin with 0 or do not
            ascend, or a value is not positive and finite.
    """
    if not isinstance(from_round, list | tuple) or not isinstance(values, list | tuple):
        raise ConfigError(f"from_round and {name}: must be lists.")
    if not from_round or len(from_round) != len(values):
        raise ConfigError(
            f"from_round has {len(from_round)} entries, {name} {len(values)}: must have as many, "
            "and at least one."
        )
    starts = tuple(checks.count("from_round", start, minimum=0) for start in from_round)
    if starts[0] or any(later <= start for start, later in pairwise(starts)):
        listed = ", ".join(map(str, starts))[:80]
        raise ConfigError(f"from_round={listed}: must begin with 0 and ascend.")
    return starts, tuple(float(checks.positive(name, value)) for value in values)


def refuse_beyond(from_round: Starts, rounds: int) -> None:
    """Raise ``ConfigError`` if a change comes after the last round."""
    if from_round[-1] >= rounds:
        raise ConfigError(
            f"from_round={from_round[-1]}: has no effect, as the run has rounds={rounds}, from 0."
        )


def at(from_round: Starts, values: Sequence[float], round_: int) -> float:
    """Return the value of a round, >= 0.

    >>> at((0, 2), (1.0, 0.5), 1), at((0, 2), (1.0, 0.5), 2)
    (1.0, 0.5)
    """
    return values[bisect_right(from_round, round_) - 1]


def over(from_round: Starts, values: Sequence[float], rounds: int) -> Array:
    """Return the value of every round, shape (rounds,).

    Raises:
        ConfigError: a change comes after the last round.
    """
    refuse_beyond(from_round, rounds)
    return np.repeat(np.asarray(values, dtype=np.float64), np.diff([*from_round, rounds]))
