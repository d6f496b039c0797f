"""Loader: deals examples in passes, and whether the network computes from what it deals."""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, zip_longest
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from accounting import checks
from accounting.checks import ConfigError
from privpart.run.report import ROWS


class Rows:
    """Compares what a step computed from with what the loader dealt for it.

    By a checksum of each row of each tensor, after collation. Without it, a loop that calls the
    network with half of a batch twice, or with one batch in every step, passes every other check:
    as many gradients come as examples were dealt. A gradient is of a call of the network if it came
    back through the very outputs of layers that kept their inputs in that call: Opacus multiplies
    whatever comes back with the newest inputs that were kept.
    """

    def __init__(self) -> None:
        self._dealt: list[list[int]] = []
        self._begin()

    def _begin(self) -> None:
        self.faults: set[str] = set()
        self._calls: list[Call] = []
        self._running: Call | None = None
        self._used: set[object] = set()
        self._unmatched: Counter[nn.Module] = Counter()

    def deal(self, batch: object, size: int) -> None:
        """Note the rows of a batch of ``size`` examples."""
        tensors = (leaf for leaf in batch_leaves(batch) if is_strided(leaf) and leaf.dim())
        self._dealt = [_row_checksums(tensor) for tensor in tensors if len(tensor) == size]

    @contextmanager
    def calling(self, inputs: object) -> "Iterator[Call]":
        """Within this context, the network computes from ``inputs``."""
        self._running = Call(inputs)
        try:
            yield self._running
        finally:
            self._running = None

    def capture(self, layer: nn.Module) -> Callable[[], None]:
        """Note that a layer kept its input; return what notes that its gradient came back."""
        # a layer that is called on its own bypasses the rows that were compared
        if self._running is None:
            self.faults.add("outside")
        elif self._running not in self._calls:
            self._calls.append(self._running)
        return partial(self._use, layer, self._running, object())

    def _use(self, layer: nn.Module, call: "Call | None", captured: object) -> None:
        self._unmatched[layer] += 1
        # a second time, or an output that an earlier step left behind
        if captured in self._used or call not in self._calls:
            self.faults.add("backward")
        self._used.add(captured)
        if call is not None and not call.used:
            call.used = True
            # inputs may be changed in place between forward and backward
            if call.checksums() != call.rows:
                self.faults.add("backward")
            if any(output._backward_hooks for output in call.outputs):
                self.faults.add("hooks")

    def backprop(self, layer: nn.Module) -> None:
        """Note that a layer's per-example gradients were computed from the newest input kept."""
        self._unmatched[layer] -= 1

    def compare(self) -> str:
        """Return the name in ``ROWS`` of how the step differs from what was dealt, or "".

        The next step begins.
        """
        dealt, calls, faults = self._dealt, self._calls, self.faults
        if any(self._unmatched.values()) or not all(call.used for call in calls):
            faults.add("backward")
        if not dealt:
            faults.add("unseen")
        # of each input, the rows of all calls: each may be with a part of the batch
        parts = zip_longest(*(call.rows for call in calls), fillvalue=())
        inputs = [list(chain(*calls_rows)) for calls_rows in parts]
        if any(rows not in dealt for rows in inputs):
            faults.add("inputs")
        # most, not all: a single example should not decide about a word of the report
        if all(2 * len(set(rows)) <= len(rows) for rows in inputs):
            faults.add("alike")
        for call in calls:
            # they hold the graph, and the graph holds the call
            call.outputs.clear()
        self._begin()
        return next((name for name in ROWS if name in faults), "")


class Call:
    """A call of the network: what entered and left it, and whether its gradients came back."""

    def __init__(self, inputs: object) -> None:
        self._inputs = list(batch_leaves(inputs))
        self.rows = self.checksums() if torch.is_grad_enabled() else []
        self.outputs: list[Tensor] = []
        self.used = False

    def checksums(self) -> list[list[int]]:
        """Return the checksum of each row of each input; of one that cannot be read, no rows."""
        return [_row_checksums(leaf) if is_strided(leaf) else [] for leaf in self._inputs]


class Passes(Sampler[list[int]]):
    """The batches of all steps, in order; so many of them make a pass, which is one epoch.

    A pass that is begun again continues with the batch that has not become a step. A batch of
    nobody, as Poisson sampling may draw it, never reaches the loop: its step is taken here.

    Args:
        batches: numbers of the examples of each step.
        epochs: number of passes.
        rows: compares what was dealt with what reached the network.
        rank: number of this process.
        processes: how many share each batch, by number of the example: another example that is not
            in it moves none from one to the other.

    Attributes:
        batches: number of batches of a pass.
        done: number of batches that became a step.
        step: takes the step of a batch of nobody.
    """

    def __init__(
        self,
        batches: Sequence[Sequence[Any]],
        epochs: int,
        rows: Rows,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        self._batches = batches
        self.batches = len(batches) // epochs
        self.epochs = epochs
        self.rows = rows
        self.done = 0
        self.step: Callable[[], object] = lambda: None
        self._rank, self._processes = rank, processes
        self._dealt = 0
        self._summed = 0
        self._pass = 0
        self._repeated = 0
        self._reads_ahead = False

    def batch(self, step: int) -> Sequence[int]:
        """Return the numbers of the examples of a step, from 0, in all processes."""
        return self._batches[step]

    def own(self, step: int) -> list[int]:
        """Return those that this process has."""
        return [i for i in self._batches[step] if i % self._processes == self._rank]

    @property
    def nobody(self) -> bool:
        """Whether this process has no example of the next step."""
        return not self.is_done and not self.own(self.done)

    @property
    def is_done(self) -> bool:
        """Whether all steps are done."""
        return self.done >= len(self._batches)

    def resume(self, done: int) -> None:
        """Continue after so many steps."""
        self.done = self._dealt = checks.count("steps", done, minimum=0)

    def loop_is_at(self, steps: int) -> None:
        """Deal nothing in passes that are done, which a loop from so many steps begins again."""
        self._repeated = self.done // self.batches - steps // self.batches

    def _is_repeated(self) -> bool:
        repeated = self._repeated > 0
        self._repeated -= repeated
        return repeated

    def __len__(self) -> int:
        """Return the number of batches of a pass."""
        return self.batches

    @property
    def _end(self) -> int:
        """Number of the step that the next pass begins with."""
        return (self.done // self.batches + 1) * self.batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches that are left of the current pass; raises as ``deal``."""
        # from the batch that has not become a step, also after a resumption
        remaining = filter(None, map(self.own, range(self.done, self._end)))
        if self._reads_ahead:
            return remaining
        return iter(()) if self._is_repeated() else self.deal(remaining)

    def read_ahead(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Deal what a loader yields, which may ask for its batches before they are due."""
        if self._is_repeated():
            return iter(())
        self._refuse_done()
        self._reads_ahead = True
        try:
            return self.deal(begin())
        finally:
            self._reads_ahead = False

    def deal(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a pass, each after a step with the one before.

        Raises:
            ConfigError: all passes are done, or a batch that was dealt did not become a step.
        """
        self._refuse_done()
        if self._summed:
            raise ConfigError(
                f"batch {self.done}: a part of it was added up, and no step followed. Take the "
                "step before another pass over the loader. This run cannot continue."
            )
        self._dealt = self.done
        # iterators of earlier passes see this and refuse to continue
        self._pass += 1
        return self._dealing(batches, self._pass, self._end)

    def _dealing(self, batches: Iterator[Any], number: int, end: int) -> Iterator[Any]:
        while self._dealt < end:
            if self._pass != number:
                raise ConfigError(
                    "the loader: another pass over it was begun meanwhile. Iterate over it in one "
                    "place at a time."
                )
            # the batch before must have become a step
            if self._dealt != self.done:
                raise ConfigError(
                    f"batch {self.done} was dealt, but no optimizer.step() followed: every example "
                    "would move to another round than the guarantee assumes. Take one step per "
                    "batch. To add up several batches, pass a loader with the batch_size of all of "
                    "them, and take it apart by optimizer.signal_skip_step or BatchMemoryManager, "
                    "which needs a loader with num_workers=0, since its own reads ahead. Begin the "
                    "pass again: it continues with that batch."
                )
            self._dealt += 1
            if members := self.own(self.done):
                batch = next(batches)
                self.rows.deal(batch, len(members))
                yield batch
            else:
                self.step()

    def _refuse_done(self) -> None:
        if self.is_done:
            raise ConfigError(
                f"all {self.epochs} epochs are done, and the guarantee covers no further one. Plan "
                "more epochs from the start."
            )

    def add(self, examples: int) -> None:
        """Count examples of the batch that was dealt, whose gradients were added up."""
        if self._dealt != self.done + 1:
            raise ConfigError(
                "optimizer.step(): the loader has dealt no batch for it. Take one step per batch "
                "of the loader that make_private returned."
            )
        self._summed += examples

    def refuse_others(self) -> None:
        """Check that the examples of the batch that was dealt, and no others, were added up."""
        expected = len(self.own(self.done))
        # fewer or more examples than were dealt: the clip would bound other units
        if self._summed != expected:
            raise ConfigError(
                f"optimizer.step(): the per-example gradients are of {self._summed} examples, and "
                f"the batch has {expected}. Call backward() once per batch, on all of it and "
                "nothing else, and zero_grad() before it; the first dimension of every layer's "
                "input is the example (see batch_first)."
            )

    def finish(self) -> None:
        """Count the batch that was dealt as done."""
        self.done += 1
        self._summed = 0


def fixed_passes(examples: int, batch_size: int, seed: int) -> list[list[int]]:
    """Return the batches of a pass in an order that a public seed shuffles once."""
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[i : i + batch_size] for i in range(0, examples, batch_size)]


class Loader(DataLoader[Any]):
    """A loader of passes, whose worker processes may read ahead."""

    def __iter__(self) -> Any:  # noqa: ANN401  torch's type is private
        passes = cast("Passes", self.batch_sampler)
        return passes.read_ahead(super().__iter__)


def batch_leaves(value: object) -> Iterator[object]:
    """Yield what a nest of mappings, lists and tuples holds; None and truth values hold no data."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from batch_leaves(item)
    elif value is not None and not isinstance(value, bool):
        yield value


def is_strided(leaf: object) -> TypeGuard[Tensor]:
    """Whether a leaf is a tensor whose rows can be read."""
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def _row_checksums(tensor: Tensor) -> list[int]:
    """Return the checksum of each row, on the CPU: a move to a device keeps bytes."""
    count = len(tensor) if tensor.dim() else 1
    rows = tensor.detach().cpu().resolve_conj().reshape(count, tensor.numel() // max(1, count))
    return [zlib.crc32(row) for row in rows.contiguous().view(torch.uint8).numpy()]
