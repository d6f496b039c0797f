"""Tasks: real data, and partitions of it among simulated users."""

from privpart.tasks.digits import digits
from privpart.tasks.fashion_mnist import fashion_mnist
from privpart.tasks.federated_hdf5 import federated_hdf5
from privpart.tasks.heterogeneous import (
    dirichlet_users,
    natural_users,
    pathological_users,
    users_of,
)
from privpart.tasks.image_files import cifar10, cifar100, emnist
from privpart.tasks.partition import cohorts_in_turn, cohorts_once_each, iid_users
from privpart.tasks.shakespeare import next_word, speaking_roles, which_play
from privpart.tasks.task import Task

__all__ = [
    "Task",
    "cifar10",
    "cifar100",
    "cohorts_in_turn",
    "cohorts_once_each",
    "digits",
    "dirichlet_users",
    "emnist",
    "fashion_mnist",
    "federated_hdf5",
    "iid_users",
    "natural_users",
    "next_word",
    "pathological_users",
    "speaking_roles",
    "users_of",
    "which_play",
]
