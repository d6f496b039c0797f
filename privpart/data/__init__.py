"""Data: simulated clients and their examples, adapters for other people's data, built-in tasks."""

from privpart.data.hdf5 import federated_hdf5
from privpart.data.partition import (
    cohorts_in_turn,
    cohorts_once_each,
    dirichlet_users,
    iid_users,
    natural_users,
    pathological_users,
    users_of,
)
from privpart.data.users import Users

__all__ = [
    "Users",
    "cohorts_in_turn",
    "cohorts_once_each",
    "dirichlet_users",
    "federated_hdf5",
    "iid_users",
    "natural_users",
    "pathological_users",
    "users_of",
]
