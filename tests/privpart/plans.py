"""Small plans, and the tables of one on digits."""

from accounting import BinaryTree, Participation
from privpart import PrivacyPlan


def small_plan(mechanism=4, participation=(), **fields) -> PrivacyPlan:
    """A plan of a mechanism, or of a tree of so many rounds; of k participations, b apart.

    The clip norm is 0.5 and there is no noise, unless a test says otherwise.
    """
    mechanism = BinaryTree(mechanism) if isinstance(mechanism, int) else mechanism
    if isinstance(participation, tuple):
        participation = Participation(mechanism.rounds, *participation)
    defaults = {"clip_norm": 0.5, "noise_multiplier": 0.0, "report_goal": 4}
    return PrivacyPlan(mechanism=mechanism, participation=participation, **defaults | fields)


TABLES = {
    "schema": "privpart/plan/1",
    "privacy": {
        "rounds": 5, "clip_norm": 0.5, "target_epsilon": 8.0, "delta": 1e-4,
        "mechanism": {"name": "tree"},
    },
    "model": {
        "name": "small_cnn", "sizes": {"channels": [2, 4], "hidden": 8, "image_size": 8}, "seed": 7,
    },
    "data": {"task": "digits", "users": 300, "clients_per_round": 40},
    "client": {"learning_rate": 0.1},
    "server": {},
}  # fmt: skip


def tables(**changes):
    """Return these tables with values of some changed, and others beside them."""
    return TABLES | {name: TABLES.get(name, {}) | table for name, table in changes.items()}
