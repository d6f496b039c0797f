"""Schedule: which groups of parameters train in which round (FedPart, Wang et al. 2024).

A function of public numbers alone. It sees neither data nor updates, so who trains what costs no
privacy; and the mechanism of the run, ``accounting.Grouped``, is built from what it returns.

Warm-up rounds train everything, then a cycle trains one group after the other, each for a few
rounds; between two cycles come full rounds again. FedPart's Tables 1 to 3 have warm_up = between =
5 and 2 rounds per group, its ablations (Tables 5 to 7) between = 0.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from accounting import checks
from accounting.checks import ConfigError

Order = Literal["sequential", "reverse", "random"]
Rounds = tuple[tuple[int, ...], ...]
"""Per round, the groups that train in it, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Full and partial rounds, alternating.

    Args:
        cycles: passes over all groups, >= 1.
        rounds_per_group: consecutive rounds of each group in a cycle, >= 1 (the paper's R/L).
        warm_up: full rounds before the first cycle, >= 0.
        between: full rounds before each later cycle, >= 0.
        order: of the groups in a cycle: "sequential" from the input on, "reverse", or "random",
            shuffled anew in each cycle by public coins.
        seed: of the coins of "random", >= 0; public.

    >>> Schedule(cycles=2, rounds_per_group=1, warm_up=1, between=1).rounds(2)
    ((0, 1), (0,), (1,), (0, 1), (0,), (1,))
    """

    cycles: int
    rounds_per_group: int = 2
    warm_up: int = 5
    between: int = 5
    order: Order = "sequential"
    seed: int = 0

    def __post_init__(self) -> None:
        checks.count("cycles", self.cycles)
        checks.count("rounds_per_group", self.rounds_per_group)
        checks.count("warm_up", self.warm_up, minimum=0)
        checks.count("between", self.between, minimum=0)
        checks.choice("order", self.order, get_args(Order))
        if checks.count("seed", self.seed, minimum=0) and self.order != "random":
            raise ConfigError(f"seed={self.seed}: only for order='random'; leave it out.")

    def length(self, groups: int) -> int:
        """Number of rounds with so many groups."""
        partial = self.cycles * self.rounds_per_group * checks.count("groups", groups)
        return self.warm_up + (self.cycles - 1) * self.between + partial

    def rounds(self, groups: int) -> Rounds:
        """Return, per round, which of the groups 0, 1, ... train."""
        everything = tuple(range(checks.count("groups", groups)))
        rounds: list[tuple[int, ...]] = []
        for cycle in range(self.cycles):
            rounds += [everything] * (self.between if cycle else self.warm_up)
            for group in self._cycle(cycle, groups):
                rounds += [(group,)] * self.rounds_per_group
        return tuple(rounds)

    def _cycle(self, cycle: int, groups: int) -> Sequence[int]:
        if self.order == "sequential":
            return range(groups)
        if self.order == "reverse":
            return range(groups)[::-1]

        def coin(group: int) -> bytes:  # the same on every machine and with every version
            return hashlib.sha256(f"privpart order|{self.seed}|{cycle}|{group}".encode()).digest()

        return sorted(range(groups), key=coin)


def active_rounds(rounds: Rounds) -> list[list[int]]:
    """Return, per group, the rounds in which it trains."""
    groups = 1 + max(group for active in rounds for group in active)
    return [[t for t, active in enumerate(rounds) if group in active] for group in range(groups)]


def strip_chart(rounds: Rounds, *, names: Sequence[str] | None = None, width: int = 100) -> str:
    """Return a chart: a row per group, a column per round, # where the group trains.

    Args:
        rounds: see ``Schedule.rounds``.
        names: of the groups; None numbers them #1, #2, ... as FedPart does.
        width: most rounds beside each other; the others follow below.

    >>> print(strip_chart(Schedule(cycles=1, warm_up=2, rounds_per_group=1).rounds(3)))
           0
    #1     ###..
    #2     ##.#.
    #3     ##..#
    """
    active = active_rounds(rounds)
    labels = names or [f"#{g + 1}" for g in range(len(active))]
    margin = max(6, *map(len, labels))
    lines: list[str] = []
    for start in range(0, len(rounds), checks.count("width", width)):
        columns = range(start, min(start + width, len(rounds)))
        ruler = "".join(f"{t:<10}" for t in columns if t % 10 == 0 and t >= start)
        lines.append(f"{'':<{margin}} {' ' * (-start % 10)}{ruler}".rstrip())
        for label, own in zip(labels, map(set, active), strict=True):
            marks = "".join("#" if t in own else "." for t in columns)
            lines.append(f"{label:<{margin}} {marks}")
    return "\n".join(lines)
