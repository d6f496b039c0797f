"""Frames: clients from a pandas DataFrame, a CSV file or a Parquet file. Hides pandas."""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from accounting.checks import ConfigError, MissingExtraError
from privpart.data.arrays import refuse_objects
from privpart.data.batches import Batch, as_tensor, as_tensors
from privpart.data.clients import IndexedClients
from privpart.data.index import Index
from privpart.data.users import Users, refuse_not_finite

if TYPE_CHECKING:
    import pandas as pd

_MARK = "="


@overload
def from_frame(
    frame: "pd.DataFrame | str | Path", *, user: str, x: Sequence[str], y: str
) -> Users: ...
@overload
def from_frame(
    frame: "pd.DataFrame | str | Path",
    *,
    user: str,
    examples: "Callable[[pd.DataFrame], Any]",
) -> IndexedClients: ...
def from_frame(
    frame: "pd.DataFrame | str | Path",
    *,
    user: str,
    x: Sequence[str] | None = None,
    y: str | None = None,
    examples: "Callable[[pd.DataFrame], Any] | None" = None,
) -> Users | IndexedClients:
    """Return the clients of a table with a row per example, which is held in memory.

    A Parquet file larger than memory can be read by ``datasets.load_dataset`` and ``from_dataset``.

    Args:
        frame: a DataFrame, or the path of a .csv (also compressed) or .parquet file. The users of a
            CSV file are whole numbers if all are written as such, and text as written otherwise:
            007 stays another client than 7.
        user: column with the id of each example's client.
        x: columns of numbers; they become float32, shape (n, number of columns).
        y: column of labels: whole numbers and truth values become int64, others float32.
        examples: instead of x and y, a function from the rows of one client, a DataFrame, to a nest
            of tensors or arrays with a row each, such as the output of a tokenizer. It is called
            when a client takes part.

    Raises:
        ConfigError: pandas or the file is missing, or by column, row (counted from 0) and client: a
            column that is not there, a gap, or values that are not finite numbers.
    """
    table = _table(frame, user)
    owners = _column(table, user, "user")
    index = Index.of_owners(_ids(owners, user), f"column {user!r}")
    if examples is not None:
        if x is not None or y is not None:
            raise ConfigError("examples: cannot be combined with x or y; use one or the other.")
        return IndexedClients(index, _Made(table, examples))
    if x is None or y is None:
        raise ConfigError(
            "x, y: name the columns of the inputs and of the label, such as x=['age', 'height'], "
            "y='income', or pass examples, a function from a client's rows to tensors."
        )
    if isinstance(x, str) or not x:
        raise ConfigError(f"x={x!r}: must be a list of columns, such as x=['age', 'height'].")
    inputs = torch.empty(len(table), len(x))
    for place, name in enumerate(x):
        inputs[:, place] = _values(table, name, "x", index)
    return Users(inputs, _values(table, y, "y", index), index)


class _Made:
    """Calls the user's function with a client's rows."""

    def __init__(self, table: "pd.DataFrame", examples: "Callable[[pd.DataFrame], Any]") -> None:
        self.table = table
        self.examples = examples

    def __call__(self, rows: Tensor) -> Batch:
        return as_tensors(self.examples(self.table.iloc[rows.numpy()]))


def _pandas() -> Any:  # noqa: ANN401  a module
    try:
        import pandas as pd
    except ImportError:
        raise MissingExtraError("tables need pandas: pip install 'privpart[frames]'.") from None
    return pd


def _table(frame: object, user: str) -> "pd.DataFrame":
    pd = _pandas()
    if isinstance(frame, str | Path):
        frame = _read(pd, Path(frame), user)
    if not isinstance(frame, pd.DataFrame):
        raise ConfigError(
            f"frame: is a {type(frame).__name__}; must be a pandas DataFrame, or the path of a "
            ".csv or .parquet file."
        )
    if not len(frame):
        raise ConfigError("frame: has no rows; must have one per example.")
    return frame


def _read(pd: Any, path: Path, user: str) -> "pd.DataFrame":  # noqa: ANN401
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file.")
    kind = next((s for s in reversed(path.suffixes) if s in (".csv", ".parquet", ".pq")), None)
    try:
        if kind == ".csv":
            # without a mark, pandas would make 7 of 007, and a gap of a user whose name is NA
            table = pd.read_csv(path, converters={user: _MARK.__add__})
            if user in table.columns:
                table[user] = _as_written(pd, table[user])
            return table
        if kind is not None:
            return pd.read_parquet(path)
    except Exception as error:
        # the bytes are not trusted
        why = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path}: cannot be read ({type(error).__name__}: {why}).") from None
    raise ConfigError(f"{path}: must end in .csv, .csv.gz or .parquet; or pass a DataFrame.")


def _as_written(pd: Any, owners: "pd.Series[Any]") -> "pd.Series[Any]":  # noqa: ANN401
    """Return ids of a CSV file as whole numbers if the text of each is that of its number."""
    values = [text.removeprefix(_MARK) for text in owners.tolist()]
    numbers = {text: _number(text) for text in set(values)}
    if any(number is None for number in numbers.values()):
        return pd.Series(values, index=owners.index, dtype=object)
    return pd.Series([numbers[text] for text in values], index=owners.index, dtype=object)


def _number(text: str) -> int | None:
    if not text.removeprefix("-").isdecimal() or len(text) > 77:  # of 2^256
        return None
    return int(text) if str(int(text)) == text else None


def _column(table: "pd.DataFrame", name: str, role: str) -> "pd.Series[Any]":
    if name not in table.columns:
        columns = [str(column) for column in table.columns]
        near = get_close_matches(str(name), columns, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        shown = ", ".join(columns[:20]) + ", ..." * (len(columns) > 20)
        raise ConfigError(f"{role}={name!r}: the table has no such column, but {shown}{hint}")
    column = table[name]
    if column.ndim != 1:
        raise ConfigError(f"{role}={name!r}: the table has several columns of this name.")
    return column


def _ids(owners: "pd.Series[Any]", name: str) -> object:
    """Return the column of ids as an array of whole numbers or a list."""
    missing = owners.isna().to_numpy()
    if missing.any():
        row = int(missing.argmax())
        raise ConfigError(
            f"column {name!r}, row {row}: has no user; every row needs one. Remove the row or fill "
            "the gap."
        )
    dtype: Any = owners.dtype
    if dtype.kind in "iu":
        return owners.to_numpy(dtype=getattr(dtype, "numpy_dtype", dtype))
    if dtype.kind in "fbcmM":
        hint = ".astype('int64')" if dtype.kind == "f" else ".astype(str)"
        raise ConfigError(
            f"column {name!r}: has type {dtype}; users must be whole numbers or strings: convert "
            f"it with {hint}."
        )
    return owners.astype(object).tolist()


def _values(table: "pd.DataFrame", name: str, role: str, index: Index) -> Tensor:
    """Return a column of finite numbers: int64, or float32 of other numbers."""
    column = _column(table, name, role)
    where, dtype = f"column {name!r}", column.dtype
    if dtype.kind not in "fiub":
        refuse_objects(where, column.to_numpy(dtype=object), index)
    if column.isna().any():  # whole numbers of pandas may have gaps
        values = column.to_numpy(dtype="float64", na_value=np.nan)
    else:
        values = column.to_numpy(dtype=getattr(dtype, "numpy_dtype", dtype))
    numbers = as_tensor(values, where)
    refuse_not_finite(where, numbers, index)
    return numbers
