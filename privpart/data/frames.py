"""Frames: clients from a pandas DataFrame. Hides pandas, which whoever has one has imported."""

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from accounting.checks import ConfigError
from privpart.data.batches import Batch, as_tensor, as_tensors
from privpart.data.clients import IndexedClients
from privpart.data.index import Index
from privpart.data.users import Users, refuse_not_finite

if TYPE_CHECKING:
    import pandas as pd


def from_frame(
    frame: "pd.DataFrame",
    *,
    user: str,
    x: Sequence[str] | None = None,
    y: str | None = None,
    examples: "Callable[[pd.DataFrame], Any] | None" = None,
) -> Users | IndexedClients:
    """Return the clients of a table with a row per example.

    Args:
        frame: a DataFrame, such as ``pd.read_csv(path, dtype={user: str})`` returns; without the
            type, pandas would take the users 007 and 7 for one.
        user: column with the id of each example's client.
        x: columns of numbers; they become float32, shape (n, number of columns).
        y: column of labels: whole numbers and truth values become int64, others float32.
        examples: instead of x and y, a function from the rows of one client, a DataFrame, to a nest
            of tensors or arrays with a row each, such as the output of a tokenizer. It is called
            when a client takes part.
    """
    kind = getattr(sys.modules.get("pandas"), "DataFrame", None)
    if kind is None or not isinstance(frame, kind):
        raise ConfigError(
            f"frame: is a {type(frame).__name__}; must be a pandas DataFrame with a row per "
            "example. pandas.read_csv and read_parquet read files."
        )
    if not len(frame):
        raise ConfigError("frame: has no rows; must have one per example.")
    index = Index.of_owners(_column(frame, user, "user"), f"column {user!r}")
    if examples is not None:
        if x is not None or y is not None:
            raise ConfigError("examples: cannot be combined with x or y; use one or the other.")
        return IndexedClients(index, partial(_made, frame, examples))
    if isinstance(x, str) or not x or y is None:
        raise ConfigError(
            f"x={x!r}, y={y!r}: name the columns of the inputs, a list, and of the label, such as "
            "x=['age', 'height'], y='income'; or pass examples, a function from a client's rows to "
            "tensors."
        )
    if y in x:
        raise ConfigError(
            f"x: has the label, column {y!r}, which a network would copy; leave it out."
        )
    inputs = torch.empty(len(frame), len(x))
    for place, name in enumerate(x):
        inputs[:, place] = _values(frame, name, "x", index)
    return Users(inputs, _values(frame, y, "y", index), index)


def _made(table: "pd.DataFrame", examples: "Callable[[pd.DataFrame], Any]", rows: Tensor) -> Batch:
    return as_tensors(examples(table.iloc[rows.numpy()]))


def _column(table: "pd.DataFrame", name: str, role: str) -> "pd.Series[Any]":
    if list(table.columns).count(name) != 1:
        columns = [str(column) for column in table.columns]
        near = get_close_matches(str(name), columns, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        shown = ", ".join(columns[:20]) + ", ..." * (len(columns) > 20)
        raise ConfigError(f"{role}={name!r}: must be one column of {shown}{hint}")
    return table[name]


def _values(table: "pd.DataFrame", name: str, role: str, index: Index) -> Tensor:
    """Return a column of finite numbers: int64, or float32 of other numbers."""
    column = _column(table, name, role)
    where, dtype = f"column {name!r}", column.dtype
    if dtype.kind not in "fiub" and column.astype(str).str.fullmatch(r"[-+\d.]*\d,\d+").all():
        raise ConfigError(
            f"{where}: holds texts of numbers with a decimal comma; pandas.read_csv(..., "
            "decimal=',') reads them as numbers."
        )
    if dtype.kind not in "fiub":
        values = column.to_numpy(dtype=object)  # refused below
    elif column.isna().any():  # whole numbers of pandas may have gaps
        values = column.to_numpy(dtype="float64", na_value=np.nan)
    else:
        values = column.to_numpy(dtype=getattr(dtype, "numpy_dtype", dtype))
    numbers = as_tensor(values, where)
    refuse_not_finite(where, numbers, index)
    return numbers
