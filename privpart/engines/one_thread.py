"""One thread: as each worker has, so that the same sums are rounded in the same order."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """Compute on one thread in this context, and then on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if wanted else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
