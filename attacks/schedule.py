"""Schedule: what the rounds of a training run give away together."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accounting.checks import ConfigError
from attacks.report import VERDICTS, LeakageRow, Verdict

UNION = "all rounds together"


@dataclass(frozen=True, slots=True)
class ScheduleSummary:
    """The worst round of a client that takes part in all of them.

    A training that sends a part in most rounds and everything in a few leaks what the few leak;
    one that sends each part in turn has sent everything in the end. Every round is audited at the
    weights that the report names.

    Args:
        rounds: how often each view is sent.
        worst: the view that gives most away, or the union of all, and its adversary.
        verdict: of that row.
        psnr: its best score over all images, in dB.
    """

    rounds: Mapping[str, int]
    worst: str
    adversary: str
    verdict: Verdict
    psnr: float

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {
            "rounds": dict(self.rounds),
            "total_rounds": sum(self.rounds.values()),
            "worst_view": self.worst,
            "adversary": self.adversary,
            "verdict": self.verdict,
            "psnr_max": self.psnr,
        }


def with_union(
    views: Mapping[str, Sequence[str]], schedule: Sequence[str]
) -> dict[str, Sequence[str]]:
    """Return the views, and the union of those that the schedule sends, if that is no view yet.

    Raises:
        ConfigError: a round that sends an unknown view.
    """
    for view in schedule:
        if view not in views:
            raise ConfigError(f"schedule={view!r}: is no view; views are {', '.join(views)}.")
    sent = list(dict.fromkeys(schedule))
    if len(sent) < 2 or any("*" in views[view] for view in sent):
        return dict(views)
    union = [pattern for view in sent for pattern in views[view]]
    return dict(views) | {UNION: union}


def summarise(rows: Sequence[LeakageRow], schedule: Sequence[str]) -> ScheduleSummary:
    """Return the worst over the rounds, and over the union of them."""
    sent = [row for row in rows if row.view in schedule or row.view == UNION]
    worst = min(sent, key=lambda row: (VERDICTS.index(row.verdict), -max(row.psnr)))
    return ScheduleSummary(
        rounds=Counter(schedule),
        worst=worst.view,
        adversary=worst.adversary,
        verdict=worst.verdict,
        psnr=max(worst.psnr),
    )
