"""Datasets: clients from a map-style dataset of torch, or from a Hugging Face dataset."""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor

from accounting.checks import ConfigError
from privpart.data.batches import Batch, as_tensors, stack
from privpart.data.clients import IndexedClients
from privpart.data.index import Index


def from_dataset(
    dataset: Any,  # noqa: ANN401
    *,
    user: str | Iterable[object],
    examples: Callable[[dict[str, Any]], Any] | None = None,
) -> IndexedClients:
    """Return the clients of a dataset; items are read when their client takes part.

    Args:
        dataset: a map-style dataset of torch, whose items are nests of tensors, arrays and numbers,
            such as (image, label); or a Hugging Face dataset (one split, not streamed).
        user: the id of each item's client; or, of a Hugging Face dataset, the column of ids.
        examples: of a Hugging Face dataset, a function from the rows of one client, a dict of lists
            by column as ``Dataset.map(batched=True)`` passes it, to a nest of tensors or arrays, as
            a tokenizer returns. By default all other columns as a dict of tensors.
    """
    if (
        isinstance(dataset, dict | str)
        or not hasattr(dataset, "__getitem__")
        or not hasattr(dataset, "__len__")
    ):
        raise ConfigError(
            f"dataset: is a {type(dataset).__name__}; must have a length and items by number: one "
            "split, such as dataset['train'], and not streamed."
        )
    # whoever has such a dataset has imported it
    kind = getattr(sys.modules.get("datasets"), "Dataset", ())
    index = _index_of_column(dataset, user) if isinstance(user, str) else Index.of_owners(user)
    if index.rows != len(dataset):
        raise ConfigError(
            f"user: has {index.rows} ids, the dataset has {len(dataset)} items; each item needs "
            "the id of its client."
        )
    if isinstance(dataset, kind):
        # without examples, a column's values must be arrays; lists of texts stay what they are
        formatted = dataset.with_format(None if examples else "numpy")
        return IndexedClients(index, partial(_rows, formatted, user, examples))
    if examples is not None:
        raise ConfigError(
            "examples: is for Hugging Face datasets; put the conversion into the dataset's "
            "__getitem__."
        )
    return IndexedClients(index, partial(_items, dataset))


def _items(dataset: Any, rows: Tensor) -> Batch:  # noqa: ANN401
    return stack([dataset[row] for row in rows.tolist()])


def _rows(
    dataset: Any,  # noqa: ANN401
    user: object,
    examples: Callable[[dict[str, Any]], Any] | None,
    rows: Tensor,
) -> Batch:
    columns = dict(dataset[rows.tolist()])
    if examples is not None:
        return as_tensors(examples(columns))
    return {
        name: as_tensors(values, f"column {name!r}")
        for name, values in columns.items()
        if not isinstance(user, str) or name != user
    }


def _index_of_column(dataset: Any, user: str) -> Index:  # noqa: ANN401
    """Read the column of ids and no other one."""
    columns = getattr(dataset, "column_names", [])
    if user not in columns:
        raise ConfigError(
            f"user={user!r}: must be a column of a Hugging Face dataset, of which this has "
            f"{', '.join(columns) or 'none'}; or a list with the id of each item's client."
        )
    column = dataset.select_columns([user]).with_format("arrow")[:].column(user)
    return Index.of_owners(column.to_pylist(), f"column {user!r}")
