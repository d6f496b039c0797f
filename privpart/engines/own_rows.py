"""Own rows: embeddings of which vmap may not mix the tables of several clients.

vmap stacks the clients' tables into one and shifts each client's words into its part. A word that
is not in a client's table is then a row of a neighbour's, which it reads and trains; and only the
first table has ``padding_idx``. Indexing has no such shift: such a word is an error, as it is where
one client trains after another.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class OwnRows(TorchFunctionMode):
    """Within this context, look words up by indexing."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call what was to be called."""
        if func is functional.embedding:
            return _looked_up(*args, **(kwargs or {}))
        if func is torch.embedding:
            raise RuntimeError("torch.embedding mixes clients under vmap; use nn.Embedding")
        return func(*args, **(kwargs or {}))


def _looked_up(
    input: Tensor,  # noqa: A002  torch's name
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``torch.nn.functional.embedding``, its arguments."""
    if max_norm is not None or scale_grad_by_freq:
        raise RuntimeError("embeddings with max_norm or scale_grad_by_freq: not by vmap")
    # a negative word would count from the end of the table
    words = torch.where(input < 0, len(weight), input)
    rows = weight[words]
    if padding_idx is None:
        return rows
    padding = padding_idx % len(weight)
    return torch.where((input == padding).unsqueeze(-1), rows.detach(), rows)
