"""Recorded: a client's step as a CUDA graph, which the device replays without Python.

A step of a small network is dozens of short kernels, and a GPU finishes each before Python has
started the next one. A graph holds the addresses of what a step reads and writes: the model's
parameters, everyone's examples and the rows of the batch. So one recording serves all clients and
rounds: the start and the rows are copied in, and the graph is replayed. Its kernels are those of
the plain loop, one client after another.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from privpart.client import loss_gradients
from privpart.engines.vectorized import Batches, batches_on, nothing_kept
from privpart.model import PartialModel, logits_of, state_of
from privpart.settings.client import LocalTraining

_REHEARSALS = 2  # calls before a recording, in which libraries choose their kernels and get memory


def record(work: Callable[[], None], device: torch.device, memory: Any) -> Callable[[], None]:  # noqa: ANN401
    """Return what repeats work, whose tensors stay where they are, on the current CUDA device.

    ``memory`` is a ``torch.cuda.graph_pool_handle()``, for what happens in between.
    """
    cuda: Any = torch.cuda
    other, before = cuda.Stream(device), cuda.current_stream(device)
    other.wait_stream(before)
    with cuda.stream(other):
        for _ in range(_REHEARSALS):
            work()
    before.wait_stream(other)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, pool=memory):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


class RecordedTraining:
    """Trains one client after another by recorded steps of plain SGD on the mean cross-entropy.

    Args:
        model: on a CUDA device; its memory and that of ``x`` and ``y`` must stay where they are.
        x: everyone's examples, shape (n, ...); ``y`` are their labels.
    """

    def __init__(self, model: PartialModel, x: Tensor, y: Tensor) -> None:
        self._model = model
        self._x, self._y = x, y
        self._rate = torch.zeros((), device=x.device)
        cuda: Any = torch.cuda
        self._memory = cuda.graph_pool_handle() if x.is_cuda else None
        # by the size of the batch: what repeats a step, and the rows that it reads
        self._steps: dict[int, tuple[Callable[[], None], Tensor]] = {}
        # those of the module are replaced for each client, and a recording holds addresses
        self._buffers = {name: b.clone() for name, b in model.module.named_buffers()}

    def updates(
        self, start: Tensor, batches: Batches, local: LocalTraining, *, out: Tensor
    ) -> None:
        """Write each client's update, not clipped, into its row of ``out``, shape (V, d).

        Clients train by plain SGD from ``start``, shape (d,).

        Raises:
            RuntimeError: the network keeps something in its layers or buffers, or does something
                on the CPU that a recording cannot hold.
        """
        batches = batches_on(start.device, batches)
        self._rate.fill_(local.learning_rate)
        with self._model.lent(start), nothing_kept(self._model):
            self._model.train_only()
            for size in sorted({len(batch) for client_rows in batches for batch in client_rows}):
                if size not in self._steps:
                    self._steps[size] = self._recorded(size)
            for place, client_rows in enumerate(batches):
                self._model.flat.copy_(start)
                for batch in client_rows:
                    repeat, rows = self._steps[len(batch)]
                    rows.copy_(batch)
                    repeat()
                torch.sub(self._model.flat, start, out=out[place])

    def _recorded(self, size: int) -> tuple[Callable[[], None], Tensor]:
        rows = torch.zeros(size, dtype=torch.int64, device=self._x.device)
        buffers = state_of(self._buffers.values())
        repeat = record(lambda: self._step(rows), rows.device, self._memory)
        if buffers != state_of(self._buffers.values()):
            raise RuntimeError("the network writes to its buffers; use batching='loop'")
        return repeat, rows

    def _step(self, rows: Tensor) -> None:
        module = self._model.module
        logits = logits_of(functional_call(module, self._buffers, (self._x[rows],)))
        total = cross_entropy(logits.flatten(0, -2), self._y[rows].flatten())
        trained = [p for p in module.parameters() if p.requires_grad]
        with torch.no_grad():
            gradients = loss_gradients(total, trained)
            used = [(p, g) for p, g in zip(trained, gradients, strict=True) if g is not None]
            # the rate is in the device's memory, because a schedule changes it
            moves = torch._foreach_mul([g for _, g in used], self._rate)
            torch._foreach_sub_([p for p, _ in used], moves)
