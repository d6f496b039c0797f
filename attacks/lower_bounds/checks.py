"""Check: one named comparison of what ran with what was planned, and what it can see."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison, as a report names it.

    Attributes:
        name: what was checked.
        compared: number of cells, clients or draws that were compared.
        level: probability, at most, that sound code fails it; 0 where nothing is random.
        sees: the smallest fault that it finds, in words.
        faults: what is not as planned, a sentence each; none if it passed.
    """

    name: str
    compared: int
    level: float
    sees: str
    faults: tuple[str, ...] = ()

    @property
    def result(self) -> str:
        """What a report prints: "as planned", or "VIOLATION"."""
        return "VIOLATION" if self.faults else "as planned"
