"""Lives of runs: how far each went by the log of runs, and whether a copy of it is the newest.

A commit is a round, or an evaluation of metrics; a copy stands after so many commits, and so does
what this machine saw of the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from privpart.run import log
from privpart.run.log import Entry

_STANDS = {
    "unseen": "this machine has no record of the run, so a newer copy may exist",
    "newest": "",
    "older": "this folder is an older copy: it stands after {commits} {what}, while {seen} were "
    "released on this machine",
    "another": "this machine saw another chain of the run, of {seen} {what}",
    "closed": "the run was closed after {seen} {what} on this machine, and this copy was not",
    "newer": "this machine saw {seen} of the {commits} {what}; the others were made elsewhere",
}
"""What is wrong with a copy of a run, by how it stands beside the log."""


@dataclass(slots=True)
class Life:
    """What the log says of one run; where it came from and what it cost follow from it alone."""

    rounds: int = 0  # committed rounds that this machine saw
    head: str = ""  # head of the ledger's chain after them; "" if it saw none of the run
    coming: str = ""  # head after what is being committed; "" if nothing is
    is_ours: bool = False  # whether a private run was created here, and no copy of it was adopted
    # whether a model of it may be known: a round was about to be committed, or people pay for it
    # because another run came from it
    is_spent: bool = False
    closed: bool = False  # whether it was ended early
    evaluations: int = 0  # committed evaluations of metrics that it saw

    @property
    def commits(self) -> int:
        """Rounds and evaluations that this machine saw."""
        return self.rounds + self.evaluations

    def add(self, entry: Entry) -> None:
        """Take the next line into account."""
        if entry.event == "begun":
            self.is_ours = entry.mu is not None
        elif entry.event == "adopted":
            self.is_ours = False
        self.is_spent |= entry.event in ("coming", "charged")
        self.closed |= entry.event == "closed"
        if entry.event == "coming":
            self.coming = entry.head
        elif entry.head:
            self.rounds, self.evaluations = entry.rounds, entry.evaluations
            self.head, self.coming = entry.head, ""

    @property
    def is_free(self) -> bool:
        """Whether nobody can have seen a model of it: what is not known to be unspent is spent."""
        return self.is_ours and self.closed and not (self.rounds or self.is_spent)

    def standing(self, chains: Sequence[str], *, closed: bool) -> str:
        """Return how a copy of the run stands beside the log, see ``_STANDS``.

        Args:
            chains: heads of the copy's chain after 0, 1, ... commits.
            closed: whether the copy was ended early; "closed" if only the log says so.
        """
        commits, seen = len(chains) - 1, self.commits
        if not self.head:
            return "unseen"
        # A round is in the log before its release, so the log is never behind what was released.
        if commits < seen:
            return "older"
        if chains[seen] != self.head:
            return "another"
        # Copies that were made before the closing still have the key.
        if self.closed and not closed:
            return "closed"
        noted = commits == seen or chains[seen + 1 :] == [self.coming]
        return "newest" if noted else "newer"

    def fault(self, chains: Sequence[str], *, closed: bool) -> str:
        """Return what is wrong with a copy that is not the newest, or ""; see ``standing``."""
        says = _STANDS[self.standing(chains, closed=closed)]
        what = "rounds and evaluations" if self.evaluations else "rounds"
        return says.format(commits=len(chains) - 1, seen=self.commits, what=what)


def lives(entries: Sequence[Entry]) -> dict[str, Life]:
    """Map each run to what these lines say of it."""
    runs: dict[str, Life] = {}
    for entry in entries:
        runs.setdefault(entry.run, Life()).add(entry)
    return runs


def life(run: str, entries: Sequence[Entry] | None = None) -> Life:
    """Return what these lines, or all that the log has on it, say of a run."""
    return lives(log.lines_of(run) if entries is None else entries).get(run) or Life()
