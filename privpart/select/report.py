"""Select report: two lines that must not be read as one.

Differential privacy bounds what recipients of the model learn. It says nothing against the parties
that deliver slices and add updates up: what those see in the clear, they know.
"""

from dataclasses import dataclass
from typing import get_args

from accounting import Guarantee, checks
from accounting.statement import up
from privpart.select.disclosure import Party, SelectLedger

Seen = tuple[tuple[Party, tuple[str, ...]], ...]
"""Per party, the kinds of things that it sees of clients in the clear."""


def seen_in(ledger: SelectLedger) -> Seen:
    """Return what a ledger says, by party."""
    return tuple((party, ledger.seen_by(party)) for party in get_args(Party))


def together(*seen: Seen | None) -> Seen | None:
    """Return what several runs show, of the same model; None if none of them selects."""
    if not any(seen):
        return None
    kinds: dict[Party, set[str]] = {party: set() for party in get_args(Party)}
    for own in seen:
        for party, what in own or ():
            kinds[party] |= set(what)
    return tuple((party, tuple(sorted(what))) for party, what in kinds.items())


@dataclass(frozen=True, slots=True)
class SelectReport:
    """What is claimed of a run with selection, and against whom.

    Attributes:
        guarantee: of everything released: model, and histograms of keys if there are any; None
            where there is none, because the run had no noise or the noise was seeded.
        delta: in (0, 1).
        seen: per party, what it saw in the clear.
    """

    guarantee: Guarantee | None
    delta: float
    seen: Seen

    def __post_init__(self) -> None:
        checks.probability("delta", self.delta)

    @classmethod
    def of(cls, guarantee: Guarantee | None, delta: float, ledger: SelectLedger) -> "SelectReport":
        """Read off the ledger who saw what; only what kinds of things, so it may be printed."""
        return cls(guarantee, delta, seen_in(ledger))

    def lines(self) -> tuple[str, str]:
        """Return the line on recipients of the model, and the line on those who run the rounds."""
        if self.guarantee is None:
            first = "against recipients of the model: no guarantee"
        else:
            epsilon = up(self.guarantee.epsilon(self.delta))
            first = f"against recipients of the model: epsilon {epsilon} at delta {self.delta:g}"
        parts = [f"{party}: {', '.join(what)}" for party, what in self.seen if what]
        second = f"keys seen in the clear, without any epsilon: {'; '.join(parts) or 'none'}"
        if any(party == "second store" and what for party, what in self.seen):
            second += " (and the keys themselves, should the two stores collude)"
        if any("random " in kind for _, what in self.seen for kind in what):
            second += "; random keys carry no data"
        return first, second
