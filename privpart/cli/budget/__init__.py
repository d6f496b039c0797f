"""Budget commands: ``privpart epsilon``, ``calibrate`` and ``mechanisms``.

They report what a planned run costs, find the least noise or the most training that meets a
budget, and show what memory buys at the same guarantee. None of them imports torch, except for a
plan whose clients select slices.
"""

from privpart.cli.budget.calibrate import calibrate
from privpart.cli.budget.epsilon import epsilon
from privpart.cli.budget.front import mechanisms

__all__ = ["calibrate", "epsilon", "mechanisms"]
