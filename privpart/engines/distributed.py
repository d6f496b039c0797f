"""Distributed engine: clients are computed by the ranks of ``torch.distributed``, one per device.

Rank 0 has server, noise and ledger, and computes a share of each round itself; the others compute
theirs and send every update to it. Messages go over gloo, between CPUs, whatever the devices are.
The ranks are one operator's and trust each other: ``torch.distributed`` asks nobody for a key.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.engines.embedded import EmbeddedEngine, equal_chunks
from privpart.messages import ClientId, ClientUpdate, RoundTask
from privpart.pool import WorkerError

_UPDATE, _FAILED = 1, 0
"""Begin what a rank sends: an update, or the sentence that says why there is none."""


class DistributedEngine:
    """Computes the clients of a round on all ranks of a process group; see ``Engine``.

    Every rank makes the same engine, with its own device, and then rank 0 trains and the others
    serve (``torchrun --nproc-per-node 2 train.py``)::

        dist.init_process_group("gloo")
        engine = EmbeddedEngine(model, clients, local=local, data_seed=0, deterministic=True)
        with DistributedEngine(engine) as ranks:
            if ranks.leads:
                fit(server, ranks, cohorts, commit=folder.commit)
            else:
                ranks.serve()

    Each update is handed to the server, which clips it again. With ``deterministic=True`` and one
    kind of processor the bits are those of one process; the order of clients always is.

    Args:
        engine: computes this rank's clients; on every rank with the same model, clients and local
            training. Without parts or models that stay on clients: a client may change its rank.
        timeout: seconds after which a rank that does not answer ends the round, > 0.

    Attributes:
        leads: whether this is rank 0.

    Raises:
        ConfigError: there is no process group, or clients keep something between rounds.
    """

    def __init__(self, engine: EmbeddedEngine, *, timeout: float = 1800.0) -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "DistributedEngine: there is no process group. Call "
                "torch.distributed.init_process_group first, and start the script with torchrun."
            )
        patience = timedelta(seconds=checks.positive("timeout", timeout))
        self.engine = engine
        self.leads = dist.get_rank() == 0
        self._broken = ""
        # NCCL, which a script may have for its own, carries nothing between CPUs
        self._group = dist.new_group(backend="gloo", timeout=patience)
        self._ranks = dist.get_world_size()

    def __enter__(self) -> "DistributedEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the other ranks return from ``serve``; on them, close the engine."""
        if self.leads and not self._broken:
            self._broken = "was closed"
            self._to_all(None)
        self.engine.close()

    @property
    def each_alone(self) -> bool:
        """Whether every bit of an update is a function of its client's own data."""
        return self.engine.each_alone

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield each client's clipped update, shape (c,), in the order of the task.

        Raises:
            WorkerError: a rank failed, or did not answer in time. Nothing of the round was
                released. The ranks are out of step then: start all of them again.
            ConfigError: this is not rank 0.
        """
        if not self.leads:
            raise ConfigError("DistributedEngine: rank 0 trains; call serve() on the others.")
        if self._broken:
            raise WorkerError(f"the process group {self._broken}: start all ranks again.")
        # whoever stops before the end leaves ranks that are sending
        self._broken = "is out of step"
        shares = self._shares(task)
        try:
            self._to_all((task, start.detach()))
        except RuntimeError as error:
            raise _lost("a rank", error) from None
        yield from self._own(task, start, shares[0])
        dim = self.engine.model.active_dim(task.active)
        for rank in range(1, self._ranks):
            for client in shares[rank]:
                yield task.update(client, self._from(rank, dim))
        self._broken = ""

    def serve(self) -> None:
        """Compute this rank's clients of each round, until rank 0 closes its engine.

        Raises:
            WorkerError: rank 0 was lost.
            ConfigError: this is rank 0, or as the engine raises it; rank 0 gets the sentence.
        """
        if self.leads:
            raise ConfigError("DistributedEngine: rank 0 trains, and does not serve.")
        try:
            while (message := self._to_all(None)) is not None:
                self._answer(*message)
        except RuntimeError as error:
            if isinstance(error, WorkerError):
                raise
            raise _lost("rank 0", error) from None

    def _answer(self, task: RoundTask, start: Tensor) -> None:
        try:
            for answer in self._own(task, start, self._shares(task)[dist.get_rank()]):
                dist.send(torch.tensor([_UPDATE]), 0, group=self._group)
                dist.send(answer.update.contiguous().float(), 0, group=self._group)
        except (ConfigError, WorkerError) as error:
            dist.send(torch.tensor([_FAILED]), 0, group=self._group)
            dist.send_object_list([str(error)], 0, group=self._group)
            raise

    def _own(self, task: RoundTask, start: Tensor, share: list[ClientId]) -> Iterator[ClientUpdate]:
        local = self.engine.local_of(task.round)
        if local.objective == "moon" or self.engine.model.own.numel():
            raise ConfigError(
                "DistributedEngine: clients of this plan keep something between rounds, and may "
                "change their rank. Train it in one process, with workers=2 for instance."
            )
        if share:
            yield from self.engine.run(replace(task, clients=tuple(share)), start)

    def _shares(self, task: RoundTask) -> list[list[ClientId]]:
        """Return the clients of each rank; one share after the other is the task's order."""
        chunks = equal_chunks(task.clients, max(1, -(-len(task.clients) // self._ranks)), 1)
        return [list(chunk) for chunk in chunks] + [[] for _ in range(self._ranks - len(chunks))]

    def _to_all(self, message: object) -> Any:  # noqa: ANN401  a task and its model, or None
        """Pass rank 0's message to all ranks, and return it."""
        box = [message]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def _from(self, rank: int, dim: int) -> Tensor:
        """Return the next update of a rank."""
        kind, update = torch.empty(1, dtype=torch.int64), torch.empty(dim)
        try:
            dist.recv(kind, rank, group=self._group)
            if int(kind) == _UPDATE:
                dist.recv(update, rank, group=self._group)
                return update
            box: list[Any] = [None]
            dist.recv_object_list(box, rank, group=self._group)
        except RuntimeError as error:
            raise _lost(f"rank {rank}", error) from None
        raise WorkerError(f"rank {rank}: {box[0]}")


def _lost(who: str, error: RuntimeError) -> WorkerError:
    line = str(error).strip().partition("\n")[0][:200]
    return WorkerError(
        f"{who} was lost ({line}). Nothing of this round was released: start all ranks again, with "
        "the run folder, if there is one, to continue from its last committed round."
    )
