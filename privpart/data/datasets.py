"""Datasets: clients from a map-style dataset of torch, or from a Hugging Face dataset."""

import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

from accounting.checks import ConfigError
from privpart.data.batches import Batch, as_tensors, stack
from privpart.data.clients import IndexedClients
from privpart.data.index import Index


class Items(Protocol):
    """A map-style dataset, such as ``torch.utils.data.Dataset`` with a length; a list conforms."""

    def __len__(self) -> int: ...
    def __getitem__(self, row: int, /) -> Any: ...  # noqa: ANN401  a nest


def from_dataset(
    dataset: Items,
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

    Raises:
        ConfigError: a dataset without length or index, another number of ids than of items, a
            column that is not there, or as for ``IndexedClients``.
    """
    _refuse_others(dataset)
    hugging_face = _is_hugging_face(dataset)
    if isinstance(user, str):
        index = _index_of_column(dataset, user, hugging_face=hugging_face)
    else:
        index = Index.of_owners(user)
    if index.rows != len(dataset):
        raise ConfigError(
            f"user: has {index.rows} ids, the dataset has {len(dataset)} items; each item needs "
            "the id of its client."
        )
    if hugging_face:
        return IndexedClients(index, _HuggingFaceRows(dataset, user, examples))
    if examples is not None:
        raise ConfigError(
            "examples: is for Hugging Face datasets; put the conversion into the dataset's "
            "__getitem__."
        )
    return IndexedClients(index, _ItemRows(dataset))


class _ItemRows:
    """Reads items one by one."""

    def __init__(self, dataset: Items) -> None:
        self.dataset = dataset

    def __call__(self, rows: Tensor) -> Batch:
        return stack([self._item(row) for row in rows.tolist()])

    def _item(self, row: int) -> Any:  # noqa: ANN401
        try:
            return self.dataset[row]
        except ConfigError:
            raise
        except Exception as error:
            # the user's code
            why = " ".join(str(error).split())[:500]
            raise ConfigError(f"dataset[{row}] raised {type(error).__name__}: {why}") from error


class _HuggingFaceRows:
    """Reads the rows of one client from a Hugging Face dataset."""

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401
        user: object,
        examples: Callable[[dict[str, Any]], Any] | None,
    ) -> None:
        # without examples, a column's values must be arrays; lists of texts stay what they are
        self.dataset = dataset.with_format(None if examples else "numpy")
        self.user = user
        self.examples = examples

    def __call__(self, rows: Tensor) -> Batch:
        columns = dict(self.dataset[rows.tolist()])
        if self.examples is not None:
            return as_tensors(self.examples(columns))
        return {
            name: as_tensors(values, f"column {name!r}")
            for name, values in columns.items()
            if not isinstance(self.user, str) or name != self.user
        }


def _is_hugging_face(dataset: object) -> bool:
    # whoever has such a dataset has imported it
    library = sys.modules.get("datasets")
    kind = getattr(library, "Dataset", None)
    return isinstance(kind, type) and isinstance(dataset, kind)


def _refuse_others(dataset: object) -> None:
    if isinstance(dataset, dict):
        splits = ", ".join(map(str, list(dataset)[:5]))
        raise ConfigError(
            f"dataset: is a {type(dataset).__name__} with {splits}: pass one of them, such as "
            f"dataset[{next(iter(dataset), 'train')!r}]."
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"dataset: is a {type(dataset).__name__}; must have a length and items by number. A "
            "streamed dataset must be stored first."
        )


def _index_of_column(dataset: Any, user: str, *, hugging_face: bool) -> Index:  # noqa: ANN401
    """Read the column of ids and no other one."""
    if not hugging_face:
        raise ConfigError(
            f"user={user!r}: only a Hugging Face dataset has columns; must be a list with the id "
            "of each item's client."
        )
    if user not in dataset.column_names:
        raise ConfigError(
            f"user={user!r}: the dataset has no such column, but {', '.join(dataset.column_names)}."
        )
    # Arrow reads whole numbers without Python objects, but makes floats of a column with gaps
    column = dataset.select_columns([user]).with_format("arrow")[:].column(user)
    values = column.to_pylist() if column.null_count else column.to_numpy()
    return Index.of_owners(values, f"column {user!r}")
