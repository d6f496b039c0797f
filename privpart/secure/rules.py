"""Rules: what a plan fixes of its secure sums, and the odds that a graph of parties is a bad one.

Notation: n parties advertise keys, c of them may collude with the server, every party deals
shares of its secrets to k others (all n - 1, or k neighbours on a ring in random order), and t
shares give a secret back. Three conditions, proved in docs/concepts/secure-sums.md:

    2t > k + c'        no server gets both secrets of a party, if c' of the k collude;
    t > k/2 + c'       on a ring: the survivors stay in one piece, so that their whole sum is all
                       that the server learns;
    2q > n + c         two lists of survivors cannot both have q signatures, and q >= the smallest
                       cohort.

With everybody a neighbour c' = c. On a ring c' is a hypergeometric number, and the second condition
implies the first.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import comb

from accounting import checks
from accounting.checks import ConfigError

_MOST_PARTIES = 10_000
_WORST_GRAPH = Fraction(1, 2**80)
"""Odds of a bad graph: a server that tries 2^40 sets of keys for a bad one has odds of 2^-40."""


def tail(population: int, marked: int, drawn: int, minimum: int) -> Fraction:
    """Return the probability of at least so many marked ones among those drawn, exactly.

    >>> tail(4, 2, 2, 2)
    Fraction(1, 6)
    """
    ways = sum(
        comb(marked, found) * comb(population - marked, drawn - found)
        for found in range(max(0, minimum), min(marked, drawn) + 1)
    )
    return Fraction(ways, comb(population, drawn))


@dataclass(frozen=True, slots=True, kw_only=True)
class SecureSums:
    """The promise that the server sees sums of many parties only.

    A party is a node: it sums the clipped and rounded updates of its own clients.

    Args:
        smallest_cohort: N: parties that must sign the list of a sum before any party helps to
            unmask it, >= colluding + 2.
        largest_cohort: most parties that may be asked at a time, up to 10,000.
        threshold: t: shares that give a secret of a party back; below smallest_cohort.
        colluding: c: most parties of a cohort that may work together with the server, >= 0. Nothing
            enforces it: the promise holds against so many.
        neighbours: k, an even number: parties that a party exchanges masks and shares with; None is
            all others. For cohorts of hundreds, whose cost would grow with their square.

    Raises:
        ConfigError: a number out of range, or a threshold for which the promise would not hold.

    >>> SecureSums(smallest_cohort=6, largest_cohort=10, threshold=5, colluding=0).quorum(10)
    6
    """

    smallest_cohort: int
    largest_cohort: int
    threshold: int
    colluding: int
    neighbours: int | None = None

    def __post_init__(self) -> None:
        checks.count("colluding", self.colluding, minimum=0)
        checks.count("smallest_cohort", self.smallest_cohort, minimum=self.colluding + 2)
        least = self.smallest_cohort
        checks.count("largest_cohort", self.largest_cohort, minimum=least, maximum=_MOST_PARTIES)
        checks.count("threshold", self.threshold)
        if self.threshold >= self.smallest_cohort:
            raise ConfigError(
                f"threshold={self.threshold}: must be below smallest_cohort="
                f"{self.smallest_cohort}, or the smallest cohort could not be unmasked."
            )
        if self.neighbours is not None:
            self._refuse_graph(self.neighbours)
        elif 2 * self.threshold < self.largest_cohort + self.colluding:
            least = (self.largest_cohort + self.colluding + 1) // 2
            raise ConfigError(
                f"threshold={self.threshold}: must be at least {least} with cohorts of up to "
                f"{self.largest_cohort}, or a server that tells parties different lists of "
                "survivors could get both secrets of one."
            )

    def _refuse_graph(self, neighbours: int) -> None:
        checks.count("neighbours", neighbours, minimum=2, maximum=_MOST_PARTIES)
        if neighbours % 2 or neighbours > self.smallest_cohort - 2:
            raise ConfigError(
                f"neighbours={neighbours}: must be even and at most smallest_cohort - 2 = "
                f"{self.smallest_cohort - 2}; leave it out where everybody is a neighbour."
            )
        if not neighbours < 2 * self.threshold <= 2 * neighbours:
            raise ConfigError(
                f"threshold={self.threshold}: must be above half of the {neighbours} neighbours "
                "and at most all of them."
            )
        if (odds := self.bad_graph()) > _WORST_GRAPH:
            raise ConfigError(
                f"neighbours={neighbours}, threshold={self.threshold}: with odds of "
                f"{float(odds):.2g} so many of a party's neighbours collude that its vector is not "
                "hidden; must be at most 2^-80. Ask for more neighbours or a higher threshold."
            )

    def bad_graph(self) -> Fraction:
        """Bound the probability that some party has too many colluding neighbours: 0 if all are.

        The union over parties of t - k/2 or more of c among k of n - 1, at the n in range that are
        worst: the largest for the union, the smallest for the share of those who collude.
        """
        if self.neighbours is None:
            return Fraction(0)
        margin = self.threshold - self.neighbours // 2
        others = self.smallest_cohort - 1
        one = tail(others, min(self.colluding, others), self.neighbours, margin)
        return min(Fraction(1), self.largest_cohort * one)

    def stuck(self, parties: int, lost: int) -> Fraction:
        """Bound the probability that a secret cannot be given back: that the sum fails.

        Args:
            parties: n, how many advertise keys.
            lost: how many of them are lost before the last stage, whoever they are.
        """
        if parties - lost < self.quorum(parties):
            return Fraction(1)
        neighbours = self.neighbours or parties - 1
        one = tail(parties - 1, lost, neighbours, neighbours - self.threshold + 1)
        return min(Fraction(1), parties * one)

    def quorum(self, parties: int) -> int:
        """Return q: signatures that one list of survivors must have, of n parties."""
        return max(self.smallest_cohort, (parties + self.colluding) // 2 + 1)
