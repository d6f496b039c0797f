"""Small plans: the clip norm is 0.5 and there is no noise, unless a test says otherwise."""

from accounting import BinaryTree, Participation
from privpart import PrivacyPlan


def small_plan(mechanism=4, participation=(), **fields) -> PrivacyPlan:
    """A plan of a mechanism, or of a tree of so many rounds; of k participations, b apart."""
    mechanism = BinaryTree(mechanism) if isinstance(mechanism, int) else mechanism
    if isinstance(participation, tuple):
        participation = Participation(mechanism.rounds, *participation)
    defaults = {"clip_norm": 0.5, "noise_multiplier": 0.0, "report_goal": 4}
    return PrivacyPlan(mechanism=mechanism, participation=participation, **defaults | fields)
