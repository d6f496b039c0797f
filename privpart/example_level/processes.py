"""Processes: several of one machine take each step of a run together, under one noise.

Each has a part of every batch, and clips and rounds the gradients of its examples. The first one
adds up the integers of all, draws the noise, which no other has, and hands on the released
gradient, so that all have the same parameters. Only it has the run folder. What one of them cannot
do, none does: a fault of one is a fault of all, and no step of it is released.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, distributed

from accounting.checks import ConfigError
from privpart.run import package


class Processes:
    """All processes of ``torch.distributed``, or this one alone.

    Numbers go through the CPU, by gloo, whatever the backend of the default group is.

    Attributes:
        rank: number of this process, from 0.
        count: how many there are.
    """

    def __init__(self) -> None:
        together = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if together else 0
        self.count = distributed.get_world_size() if together else 1
        self._group = distributed.new_group(backend="gloo") if self.count > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this process has the noise and the run folder."""
        return self.rank == 0

    def gather(self, value: object) -> list[Any]:
        """Return the values of all processes, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value, group=self._group)
        return values

    @contextmanager
    def together(self, *, part: bool = False) -> Iterator[None]:
        """Within this context, every process does the same, or none goes on.

        Args:
            part: of a step; how many parts it has differs, so only a fault of one is told.

        Raises:
            ConfigError: another process raised; where this one did, its own exception.
        """
        try:
            yield
        except Exception as fault:
            self.gather(f"{type(fault).__name__}: {fault}")
            raise
        if part:
            return
        for rank, told in enumerate(self.gather("")):
            if told:
                raise ConfigError(f"process {rank} of {self.count} stopped: {told}")

    def refuse_others(self, arguments: str) -> None:
        """Check that all have the same arguments and code, on one machine."""
        if self._group is None:
            return
        mine = platform.node(), (package.running(), arguments)
        nodes, others = zip(*self.gather(mine), strict=True)
        if len(set(nodes)) > 1:
            raise ConfigError(
                "torch.distributed: its processes are on several machines, and sums without noise "
                "would travel between them. Use the processes of one."
            )
        if len(set(others)) > 1:
            raise ConfigError(
                "torch.distributed: its processes have different arguments, modules, data or "
                "versions of this package. Call make_private with the same in each."
            )

    def of_first(self, value: object) -> Any:  # noqa: ANN401  whatever it is
        """Return what the first process has."""
        if self._group is None:
            return value
        values = [value if self.is_first else None]
        distributed.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def add_up(self, total: Tensor) -> None:
        """Put the sum of all processes' vectors, float64, into that of the first."""
        if self._group is not None:
            distributed.reduce(total, dst=0, group=self._group)

    def hand_on(self, released: Tensor) -> None:
        """Put the first process's vector into those of all others."""
        if self._group is not None:
            distributed.broadcast(released, src=0, group=self._group)
