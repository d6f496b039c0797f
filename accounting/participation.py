"""Participation: how often, and how close together, one client may take part.

The sensitivity of every mechanism is a maximum over participation patterns. A pattern is a set of
at most ``max_participations`` rounds, any two of them at least ``min_separation`` apart,
|i - j| >= b (Choquette-Choo et al. 2023, "(Amplified) Banded Matrix Factorization", section 2).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, ClassVar

from accounting import checks
from accounting.checks import ConfigError


@dataclass(frozen=True, slots=True)
class Participation:
    """Limits on the rounds in which one client takes part.

    Args:
        rounds: number of rounds n, 1 to a million.
        max_participations: most rounds k that one client takes part in, >= 1.
        min_separation: least distance b = abs(i - j) between two of them, >= 1; 1 allows
            consecutive rounds. TF-Privacy counts the rounds strictly in between: use
            ``from_tf_privacy``.

    >>> Participation(rounds=1600)
    Participation(rounds=1600, max_participations=1, min_separation=1)
    """

    rounds: int
    max_participations: int = 1
    min_separation: int = 1

    fixed_order: ClassVar[bool] = False

    def __post_init__(self) -> None:
        n = checks.rounds(self.rounds)
        k = checks.count("max_participations", self.max_participations)
        b = checks.count(
            "min_separation",
            self.min_separation,
            hint="1 allows consecutive rounds. TF-Privacy counts the rounds in between: add 1, "
            "or use Participation.from_tf_privacy.",
        )
        for name, value in zip(
            ("rounds", "max_participations", "min_separation"), (n, k, b), strict=True
        ):
            object.__setattr__(self, name, value)  # plain ints: small integers of numpy overflow
        limit = -(-n // b)
        if k > limit:
            widest = (n - 1) // (k - 1)
            possible = f"max_participations of {limit} or less"
            if widest >= 1:
                possible += f", or min_separation of {widest} or less"
            raise ConfigError(
                f"max_participations={k}: at most {limit} fit into {n} rounds that are "
                f"{b} apart (min_separation). Use {possible}."
            )

    @classmethod
    def from_tf_privacy(
        cls, *, rounds: int, max_participations: int, min_separation: int
    ) -> "Participation":
        """Return the participation of TF-Privacy's convention: rounds strictly in between, plus 1.

        >>> Participation.from_tf_privacy(rounds=8, max_participations=2, min_separation=3)
        Participation(rounds=8, max_participations=2, min_separation=4)
        """
        between = checks.count("min_separation", min_separation, minimum=0)
        return cls(rounds, max_participations, between + 1)

    @classmethod
    def from_log(
        cls, rounds: int, rounds_by_client: Mapping[Any, Iterable[int]] | Iterable[Iterable[int]]
    ) -> "Participation":
        """Return the realised worst case of a finished (or stopped) run.

        k is the largest number of rounds of any client, b the least distance between two rounds of
        one client (1 if no client took part twice). Both are facts about this log only: a guarantee
        that is stated beforehand needs limits that the server enforces.

        Args:
            rounds: number of rounds n of the mechanism, 1 to a million; rounds count from 0.
            rounds_by_client: for each client, the rounds in which its update entered the sum, in
                any order. A retried update that entered the sums of two rounds counts twice.

        >>> Participation.from_log(10, {"ada": [0, 4, 9], "bob": [3], "eve": [7, 2]})
        Participation(rounds=10, max_participations=3, min_separation=4)
        """
        rounds = checks.rounds(rounds)
        named = (
            rounds_by_client.items()
            if isinstance(rounds_by_client, Mapping)
            else enumerate(rounds_by_client)
        )
        histories = [_history(client, taken, rounds) for client, taken in named]
        gaps = [later - earlier for rs in histories for earlier, later in pairwise(rs)]
        return cls(rounds, max(map(len, histories), default=0) or 1, min(gaps, default=1))

    def patterns(self) -> Iterator[tuple[int, ...]]:
        """Yield every admissible set of 1 to k rounds, for brute force on small n."""
        for size in range(1, self.max_participations + 1):
            for pattern in combinations(range(self.rounds), size):
                if all(
                    later - earlier >= self.min_separation for earlier, later in pairwise(pattern)
                ):
                    yield pattern


@dataclass(frozen=True, slots=True)
class FixedOrder(Participation):
    """k passes over the clients in one order, each of ``min_separation`` rounds, from round 0 on.

    The order is public and fixed beforehand: a client of place i may take part in rounds i, i + b,
    ..., i + (k-1) b and in no others. That is less than any rounds b or more apart, and after k b
    rounds nobody takes part. (Choquette-Choo et al. 2023, "Multi-epoch matrix factorization
    mechanisms for private machine learning"; for trees, Kairouz et al. 2021, DP-FTRL.) Whoever
    makes the cohorts must keep to it.

    >>> FixedOrder(8, max_participations=2, min_separation=3).places()
    [range(0, 6, 3), range(1, 6, 3), range(2, 6, 3)]
    """

    fixed_order: ClassVar[bool] = True

    def places(self) -> list[range]:
        """Return the rounds of each place in the order; the last pass may be cut off."""
        b = self.min_separation
        end = min(self.rounds, self.max_participations * b)
        return [range(place, end, b) for place in range(min(b, self.rounds))]

    def in_any_order(self) -> Participation:
        """Return the limits alone, which allow these patterns and more."""
        return Participation(self.rounds, self.max_participations, self.min_separation)

    def patterns(self) -> Iterator[tuple[int, ...]]:
        """Yield every admissible set of 1 to k rounds, for brute force on small n."""
        for place in self.places():
            for size in range(1, len(place) + 1):
                yield from combinations(place, size)


def _history(client: object, taken: Iterable[int], rounds: int) -> list[int]:
    """Return one client's rounds in order; refuse rounds outside the run and duplicates."""
    if not isinstance(taken, Iterable):
        raise ConfigError(f"client {client!r}: {taken!r} must be a sequence of rounds.")
    listed = list(taken)
    if set(map(type, listed)) - {int} or min(listed, default=0) < 0:
        listed = [checks.count(f"round of client {client!r}", r, minimum=0) for r in listed]
    history = sorted(listed)
    if history and history[-1] >= rounds:
        raise ConfigError(
            f"round {history[-1]} of client {client!r}: must be at most {rounds - 1}, because "
            f"rounds count from 0 and rounds={rounds}."
        )
    for earlier, later in pairwise(history):
        if earlier == later:
            raise ConfigError(
                f"client {client!r} is listed twice in round {earlier}: sum and clip all its "
                "updates of the round jointly, and list the client once."
            )
    return history
