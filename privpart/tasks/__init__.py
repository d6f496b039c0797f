"""Tasks: real data, and partitions of it among simulated users."""

from privpart.tasks.digits import digits
from privpart.tasks.fashion_mnist import fashion_mnist
from privpart.tasks.partition import cohorts_in_turn, cohorts_once_each, iid_users
from privpart.tasks.task import Task

__all__ = ["Task", "cohorts_in_turn", "cohorts_once_each", "digits", "fashion_mnist", "iid_users"]
