"""Tasks: real data, and partitions of it among simulated users."""

from privpart.data.partition import (
    cohorts_in_turn,
    cohorts_once_each,
    dirichlet_users,
    iid_users,
    natural_users,
    pathological_users,
    users_of,
)
from privpart.data.tasks.digits import digits
from privpart.data.tasks.fashion_mnist import fashion_mnist
from privpart.data.tasks.federated_hdf5 import federated_hdf5
from privpart.data.tasks.image_files import cifar10, cifar100, emnist
from privpart.data.tasks.shakespeare import next_word, speaking_roles, which_play
from privpart.data.tasks.task import Task

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
