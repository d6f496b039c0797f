"""Data: simulated clients and their examples, adapters for other people's data, built-in tasks."""

from privpart.data.arrays import from_tensors
from privpart.data.clients import Clients, IndexedClients, check_clients
from privpart.data.datasets import from_dataset
from privpart.data.frames import from_frame
from privpart.data.index import Index
from privpart.data.partition import (
    cohorts_in_turn,
    cohorts_once_each,
    dirichlet_users,
    iid_users,
    pathological_users,
)
from privpart.data.users import Users

__all__ = [
    "Clients",
    "Index",
    "IndexedClients",
    "Users",
    "check_clients",
    "cohorts_in_turn",
    "cohorts_once_each",
    "dirichlet_users",
    "from_dataset",
    "from_frame",
    "from_tensors",
    "iid_users",
    "pathological_users",
]
