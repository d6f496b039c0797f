"""Arrays: clients from tensors or NumPy arrays and a column that names each example's client."""

from functools import partial

import torch
from torch import Tensor

from accounting.checks import ConfigError
from privpart.data.batches import Batch, as_tensor, as_tensors, leaves_of, take
from privpart.data.clients import IndexedClients
from privpart.data.index import Index
from privpart.data.users import Users, refuse_not_finite

_OF_USERS = {torch.float32, torch.int64}


def from_tensors(examples: Batch, *, user: object) -> Users | IndexedClients:
    """Return the clients of tensors or arrays, which are held in memory.

    float16 and float64 become float32, whole numbers int64. A pair (x, y) becomes ``Users``, which
    engines compute fastest, other nests ``IndexedClients``.

    Args:
        examples: a nest of tensors or arrays with a row per example, such as ``(x, y)``.
        user: the id of each example's client, n whole numbers or strings.
    """
    index = Index.of_owners(user)
    pair = isinstance(examples, tuple | list) and len(examples) == 2
    parts = list(zip("xy", examples, strict=True)) if pair else [("examples", examples)]
    for name, part in parts:
        _refuse_shapes(name, part, index)
    tensors = [as_tensors(part, name) for name, part in parts]
    for (name, _), part in zip(parts, tensors, strict=True):
        refuse_not_finite(name, part, index)
    if not pair:
        return IndexedClients(index, partial(take, tensors[0]))
    x, y = tensors
    if isinstance(x, Tensor) and isinstance(y, Tensor) and {x.dtype, y.dtype} <= _OF_USERS:
        return Users(x, y, index)
    return IndexedClients(index, partial(take, (x, y)))


def _refuse_shapes(name: str, part: Batch, index: Index) -> None:
    for leaf_name, leaf in leaves_of(part, name):
        shape = getattr(leaf, "shape", None)
        if shape is None:
            # raises the error that it is not an array
            as_tensor(leaf, leaf_name)
        if not shape or shape[0] != index.rows:
            raise ConfigError(
                f"{leaf_name} has {f'{shape[0]} rows' if shape else 'no rows'}, and {index.rows} "
                "ids of clients were given: each row needs the id of its client."
            )
