"""Processes: run jobs side by side, one thread each, and hand over each answer as it comes."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

Answer = TypeVar("Answer")


def finished(jobs: Sequence[Callable[[], Answer]], processes: int) -> Iterator[Answer]:
    """Return the answers of the jobs, which begin in their order, in the order they finish.

    Jobs can be pickled. With one process they run in this one, so that a debugger sees them.
    """
    if processes < 2:
        yield from (job() for job in jobs)
        return
    spawn = multiprocessing.get_context("spawn")  # fork would copy the threads of autograd
    with ProcessPoolExecutor(min(processes, len(jobs) or 1), mp_context=spawn) as pool:
        for done in as_completed([pool.submit(job) for job in jobs]):
            yield done.result()
