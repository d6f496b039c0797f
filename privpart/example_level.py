"""Example-level DP-FTRL for an ordinary PyTorch loop, on Opacus's per-example gradients.

``FTRLEngine.make_private`` returns module, optimizer and loader, as Opacus's ``PrivacyEngine``
does; the loop stays the user's. The loader deals the examples in passes of one public order, so
that each example takes part once per pass and at the same place of it: how often and how far apart
is known before training, and so is epsilon, without any assumption about sampling.

A step sums per-example gradients, each rounded to whole numbers of the plan's public grid within
the clip norm, and adds the mechanism's noise, which is correlated over all steps. So every batch
that was dealt must become one step, in order. Whatever departs from that is refused.

Loader, optimizer and run folder are one file: each refuses what the guarantee of another rests on.
"""

import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeGuard, cast, get_args

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.layers.dp_rnn import DPRNNBase
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler

from accounting import (
    Independent,
    Mechanism,
    Participation,
    PoissonSampling,
    PrivacyReport,
    calibrate,
    checks,
    dp_sgd,
    guarantee,
)
from accounting.checks import ConfigError
from accounting.mechanisms.by_name import MechanismChoice, MechanismName
from accounting.report import up
from privpart.grid import Grid, noise_bits, refuse_noise
from privpart.messages import ClientId
from privpart.model import state_of
from privpart.noise.source import NoiseSource, SecretSource, SeededSource
from privpart.noise.stream import NoiseStream
from privpart.plan import PrivacyPlan
from privpart.run.folder import ROWS, RunFolder, create_run, holds_a_run
from privpart.server import RoundCounts
from privpart.start_values import same_bits

GradSampleMode = Literal["hooks", "ghost"]
_SCHEMA = "privpart/example-level/1"


class Rows:
    """Compares the rows that reach the network in a step with those that the loader dealt.

    By a checksum of each row of each tensor, after collation. Without it, a loop that calls the
    network with half of a batch twice, or with one batch in every step, passes every other check:
    as many gradients come as examples were dealt.
    """

    def __init__(self) -> None:
        self._dealt: list[list[int]] = []
        self._begin()

    def _begin(self) -> None:
        self._calls: list[_Call] = []
        self._running: _Call | None = None
        self._gradients: dict[nn.Parameter, list[tuple[Tensor, int]]] = {}
        self._faults: set[str] = set()

    def deal(self, batch: object, size: int) -> None:
        """Note the rows of a batch of ``size`` examples."""
        tensors = (leaf for leaf in _leaves(batch) if _is_dense(leaf) and leaf.dim())
        self._dealt = [_row_checksums(tensor) for tensor in tensors if len(tensor) == size]

    @contextmanager
    def calling(self, inputs: object) -> "Iterator[_Call]":
        """Within this context, the network computes from ``inputs``."""
        self._running = _Call(inputs)
        try:
            yield self._running
        finally:
            self._running = None

    def capture(self) -> None:
        """Note that a layer kept its input, from which gradients will be computed."""
        if self._running is None:
            self._faults.add("outside")
        elif self._running not in self._calls:
            self._calls.append(self._running)

    def use(self, call: "_Call") -> None:
        """Note that a backward pass through a call of the network begins."""
        call.uses += 1
        if call.checksums() != call.rows:
            self._faults.add("backward")

    def note_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note the per-example gradients that a backward pass has just computed."""
        self._gradients |= {p: [(t, t._version) for t in _samples(p)] for p in parameters}

    def check_gradients(self) -> None:
        """Note whether the per-example gradients are still those that were computed."""
        for p, computed in self._gradients.items():
            now = [(id(t), t._version) for t in _samples(p)]
            if now != [(id(t), version) for t, version in computed]:
                self._faults.add("backward")
        self._gradients = {}

    def compare(self) -> str:
        """Return the name in ``ROWS`` of how the step differs from what was dealt, or "".

        The next step begins.
        """
        dealt, calls, faults = self._dealt, self._calls, self._faults
        if any(call.uses != 1 for call in calls):
            faults.add("backward")
        if not dealt:
            faults.add("unseen")
        # of each input, the rows of all calls: each may be with a part of the batch
        parts = zip_longest(*(call.rows for call in calls), fillvalue=())
        inputs = [list(chain(*each)) for each in parts]
        if any(rows not in dealt for rows in inputs):
            faults.add("inputs")
        # most, not all: a single example should not decide about a word of the report
        if all(2 * len(set(rows)) <= len(rows) for rows in inputs):
            faults.add("alike")
        self._begin()
        return next((name for name in ROWS if name in faults), "")


class _Call:
    """A call of the network: what entered it, and how many backward passes used it."""

    def __init__(self, inputs: object) -> None:
        self._inputs = list(_leaves(inputs))
        self.rows = self.checksums() if torch.is_grad_enabled() else []
        self.uses = 0

    def checksums(self) -> list[list[int]]:
        """Return the checksum of each row of each input; of one that cannot be read, no rows."""
        return [_row_checksums(leaf) if _is_dense(leaf) else [] for leaf in self._inputs]


class FixedPasses(Sampler[list[int]]):
    """Batches of the same public order in every pass; one pass is one epoch.

    A pass that is begun again continues with the batch that has not become a step.

    Args:
        examples: number of examples, >= 1.
        batch_size: examples per batch, >= 1; the last batch of a pass may be smaller.
        epochs: passes, >= 1.
        seed: public seed of the order, >= 0.

    Attributes:
        order: numbers of the examples in the order of every pass.
        batches: number of batches of a pass.
        rows: compares what was dealt with what reached the network.
        done: number of batches that became a step.
    """

    def __init__(self, examples: int, batch_size: int, epochs: int, seed: int = 0) -> None:
        examples = checks.count("examples", examples)
        size = checks.count("batch_size", batch_size)
        coins = torch.Generator().manual_seed(checks.count("order_seed", seed, minimum=0))
        self.order = torch.randperm(examples, generator=coins).tolist()
        self._batches = [self.order[i : i + size] for i in range(0, examples, size)]
        self.batches = len(self._batches)
        self.epochs = checks.count("epochs", epochs)
        self.rows = Rows()
        self.done = 0
        self._dealt = 0
        self._summed = 0
        self._pass = 0
        self._reads_ahead = False

    @property
    def participation(self) -> Participation:
        """What an example can take part in: once per pass, at one place of it."""
        return Participation(self.batches * self.epochs, self.epochs, self.batches)

    def batch(self, step: int) -> Sequence[int]:
        """Return the numbers of the examples of a step, from 0."""
        return self._batches[step % self.batches]

    def resume(self, done: int) -> None:
        """Continue after so many steps."""
        self.done = self._dealt = checks.count("steps", done, minimum=0)

    def __len__(self) -> int:
        """Return the number of batches of a pass."""
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches that are left of the current pass.

        Raises:
            ConfigError: all passes are done, or a batch that was dealt did not become a step.
        """
        left = self._batches[self.done % self.batches :]
        return iter(left) if self._reads_ahead else self.deal(iter(left))

    def read_ahead(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Deal what a loader yields, which may ask for its batches before they are due."""
        self._refuse_done()
        self._reads_ahead = True
        try:
            return self.deal(begin())
        finally:
            self._reads_ahead = False

    def deal(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a pass, each after a step with the one before.

        Raises:
            ConfigError: see ``__iter__``.
        """
        self._refuse_done()
        if self._summed:
            raise ConfigError(
                f"batch {self.done}: a part of it was added up, and no step followed. Take the "
                "step before another pass over the loader. This run cannot continue."
            )
        self._dealt = self.done
        self._pass += 1
        return self._dealing(batches, self._pass)

    def _dealing(self, batches: Iterator[Any], own: int) -> Iterator[Any]:
        for batch in batches:
            if self._pass != own:
                raise ConfigError(
                    "the loader: another pass over it was begun meanwhile. Iterate over it in one "
                    "place at a time."
                )
            if self._dealt != self.done:
                raise ConfigError(
                    f"batch {self.done} was dealt, but no optimizer.step() followed: every example "
                    "would move to another round than the guarantee assumes. Take one step per "
                    "batch. BatchMemoryManager needs a loader with num_workers=0, since its own "
                    "reads ahead. Begin the pass again: it continues with that batch."
                )
            self._dealt += 1
            self.rows.deal(batch, len(self.batch(self.done)))
            yield batch

    def _refuse_done(self) -> None:
        if self.done >= self.batches * self.epochs:
            raise ConfigError(
                f"all {self.epochs} epochs are done, and the guarantee covers no further one. Plan "
                "more epochs from the start."
            )

    def add(self, examples: int) -> None:
        """Count examples of the batch that was dealt, whose gradients were added up.

        Raises:
            ConfigError: no batch was dealt.
        """
        if self._dealt != self.done + 1:
            raise ConfigError(
                "optimizer.step(): the loader has dealt no batch for it. Take one step per batch "
                "of the loader that make_private returned."
            )
        self._summed += examples

    def finish(self) -> None:
        """Count the batch that was dealt as done.

        Raises:
            ConfigError: another number of examples than the batch has were added up.
        """
        expected = len(self._batches[self.done % self.batches])
        if self._summed != expected:
            raise ConfigError(
                f"optimizer.step(): the per-example gradients are of {self._summed} examples, and "
                f"the batch has {expected}. Call backward() once per batch, on all of it and "
                "nothing else, and zero_grad() before it; the first dimension of every layer's "
                "input is the example (see batch_first)."
            )
        self.done += 1
        self._summed = 0


class _Loader(DataLoader[Any]):
    """A loader of fixed passes, whose worker processes may read ahead."""

    def __iter__(self) -> Any:  # noqa: ANN401  torch's type is private
        passes = cast("FixedPasses", self.batch_sampler)
        return passes.read_ahead(super().__iter__)


class FTRLOptimizer(DPOptimizer):  # type: ignore[misc]  # Opacus is untyped
    """The user's optimiser, which sees only noised sums of clipped per-example gradients.

    Guarantees:
        One example changes the sum of a step by at most the clip norm, in integers on the public
        grid; an example whose gradient is not finite counts as zeros. Noise is drawn once per
        batch.

    Made by ``FTRLEngine.make_private``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: nn.Module,
        passes: FixedPasses,
        noise: NoiseStream,
        grid: Grid,
        *,
        max_grad_norm: float,
        batch_size: int,
        loss_reduction: str,
    ) -> None:
        super().__init__(
            optimizer,
            noise_multiplier=grid.noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=batch_size,
            loss_reduction=loss_reduction,
        )
        self._module = module
        self.passes = passes
        self.noise = noise
        self._grid = grid
        self._promised = (float(max_grad_norm), float(grid.noise_multiplier), batch_size)
        self.trained = list(self.params)
        self._total = torch.zeros(noise.dim, dtype=torch.float64)
        self._drawn = torch.empty(noise.dim, dtype=noise.dtype)
        self._halted = ""
        self._stepping = False
        self._folder: RunFolder | None = None
        self._steps: _Steps | None = None
        self._scheduler: _Scheduler | None = None
        self._checked = False
        self._released: list[Tensor] = []
        self._fixed: dict[str, tuple[Tensor, Any]] = {}
        self._guard = -1
        self._rows_differ = ""
        self._not_finite = 0

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a private optimizer is never copied; a copy would repeat its noise.")

    def begin(self, folder: RunFolder | None, steps: "_Steps", scheduler: "_Scheduler") -> None:
        """Commit every step to a run folder, if there is one; continue its run."""
        if folder is not None:
            folder.restore(steps)
        self._folder, self._steps, self._scheduler = folder, steps, scheduler
        self._guard = self.original_optimizer.register_step_pre_hook(self._refuse_other_steps).id
        self._released = [p.detach().clone() for p in self.trained]
        self._fixed = {name: (t, state_of([t])) for name, t in _fixed(self._module, self.trained)}

    def attach_step_hook(self, *_: object) -> NoReturn:
        """Refuse code that would run between the noise and the release of a step."""
        raise ConfigError(_HOOKS.format("the private optimizer"))

    register_step_pre_hook = register_step_post_hook = attach_step_hook

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401  torch's signature
        """Take one step with the noised sum; commit it, if the run has a folder.

        If it raises, the parameters are those after the last step that did not.

        Raises:
            ConfigError: the step is not the one that the guarantee assumes.
            StorageError: the disk refused. Resume the run.
        """
        if closure is not None:
            raise ConfigError("optimizer.step(closure): would compute gradients more than once.")
        done = self.passes.done
        if not self.pre_step():
            return None
        self._halted = f"step {done} was not committed."
        try:
            found = self._take()
        except BaseException:
            self._take_back()
            raise
        self._halted = ""
        return found

    def _take(self) -> Any:  # noqa: ANN401  what the user's optimiser returns
        self._stepping = True
        try:
            found = self.original_optimizer.step()
        finally:
            self._stepping = False
        if self._scheduler is not None:
            self._scheduler.step(self.passes.done)
        if self._folder is not None and self._steps is not None:
            examples = len(self._steps.cohort)
            counts = RoundCounts(examples, examples, 0, rows_differ=self._rows_differ)
            self._folder.commit(self._steps, counts)
        with torch.no_grad():
            for kept, p in zip(self._released, self.trained, strict=True):
                kept.copy_(p)
        return found

    def _take_back(self) -> None:
        """Return to the last parameters that were released: a resumed run takes the step again."""
        with torch.no_grad():
            for kept, p in zip(self._released, self.trained, strict=True):
                p.copy_(kept)
                p.grad = None

    def _refuse_other_steps(self, *_: object) -> None:
        if not self._stepping:
            raise ConfigError(
                "the optimizer that was passed to make_private: its step() would use gradients "
                "without noise. Call step() of the one that make_private returned."
            )

    def pre_step(self, closure: Any = None) -> bool:  # noqa: ANN401  Opacus's signature
        """Sum the clipped gradients, and unless the step is to be skipped, release them noised.

        Raises:
            ConfigError: the step is not the one that the guarantee assumes.
        """
        if self._halted:
            raise ConfigError(f"this run has stopped: {self._halted} Begin it again.")
        self._halted = "a step was interrupted."
        try:
            self._refuse_changes()
            self.passes.rows.check_gradients()
            self.passes.add(self._add_up())
            if self._check_skip_next_step():
                self._is_last_step_skipped = True
                self._halted = ""
                return False
            self._refuse_not_finite()
            self.passes.finish()
            self._rows_differ = self.passes.rows.compare()
        except Exception as error:
            self._halted = str(error)
            raise
        self._release(self.noise.next(out=self._drawn))
        self._is_last_step_skipped = False
        self._halted = ""
        return True

    def _refuse_not_finite(self) -> None:
        done = self.passes.done
        count, examples = self._not_finite, len(self.passes.batch(done))
        self._not_finite = 0
        if 2 * count > examples:
            raise ConfigError(
                f"step {done}: the gradients of {count} of {examples} examples are not finite, or "
                f"longer than {_LONGEST:g}, and would count as zeros: the step would spend its "
                "part of epsilon on noise alone. Nothing of it was released. Look for NaN in the "
                "data, lower the learning rate, and begin another run."
            )

    def _refuse_changes(self) -> None:
        now = (float(self.max_grad_norm), float(self.noise_multiplier), self.expected_batch_size)
        if now != self._promised:
            raise ConfigError(
                f"max_grad_norm, noise_multiplier, batch size: are {now}, and the guarantee is for "
                f"{self._promised}. They cannot change during a run."
            )
        if self.step_hook is not None:
            self.attach_step_hook()
        _refuse_hooks(self.original_optimizer, self._guard)
        own = self.params
        if len(own) != len(self.trained) or any(
            p is not q for p, q in zip(own, self.trained, strict=True)
        ):
            raise ConfigError(
                "optimizer: has other parameters than make_private was given. Add or freeze "
                "parameters before it."
            )
        _refuse_batch_statistics(self._module)
        self._refuse_changed_model()

    def _refuse_changed_model(self) -> None:
        """Check that nothing but this optimizer changed what leaves with the model."""
        for kept, p in zip(self._released, self.trained, strict=True):
            if not same_bits(kept, p):
                self._refuse_changed(next(n for n, q in _named(self._module) if q is p))
        fixed = dict(_fixed(self._module, self.trained))
        for name in sorted(fixed.keys() | self._fixed.keys()):
            before, found = self._fixed.get(name), fixed.get(name)
            if before is None or found is None or state_of([found]) != before[1]:
                self._refuse_changed(name)
            elif found.requires_grad:
                raise ConfigError(
                    f"{name}: requires a gradient now, and no noise covers it. Set requires_grad "
                    "before make_private."
                )

    def _refuse_changed(self, name: str) -> NoReturn:
        raise ConfigError(
            f"{name}: was changed, replaced or moved by something else than optimizer.step(), such "
            "as another optimizer or a layer with running statistics, and no noise covers that. "
            "Change or move parameters and buffers before make_private."
        )

    def _add_up(self) -> int:
        """Add the clipped gradients to the sum, as integers; return the number of examples."""
        samples = [_per_example(p) for p in self.trained]
        counts = {len(sample) for sample in samples if sample is not None}
        if len(counts) != 1:
            raise ConfigError(
                f"backward(): some parameters have per-example gradients of {min(counts)} "
                f"examples, others of {max(counts)}. Every parameter that trains must be used once "
                "for each example."
                if counts
                else _NO_GRADIENT
            )
        examples = counts.pop()
        self._refuse_other_gradients(samples, first=not self._checked)
        self._checked = True
        factors = self._factors(samples)
        start = 0
        for p, sample in zip(self.trained, samples, strict=True):
            if sample is not None:
                self._total[start : start + p.numel()] += _sum(sample, factors).cpu()
            start += p.numel()
        for p in self.trained:
            p.grad_sample = None
        return examples

    def _refuse_other_gradients(self, samples: Sequence[Tensor | None], *, first: bool) -> None:
        """Check in the first step of a process that its examples are all of the gradient."""
        for p, sample in zip(self.trained, samples, strict=True):
            if sample is None:
                if first or (p.grad is not None and bool(p.grad.any())):
                    raise ConfigError(_NO_GRADIENT)
                continue
            if not first or p.grad is None or not len(sample):
                continue
            found = p.grad.to_dense() if p.grad.is_sparse else p.grad
            mean = torch.zeros_like(sample[0])
            for part in torch.split(sample, [len(some) for some in _samples(p)]):
                mean += part.sum(0) / (len(part) if self.loss_reduction == "mean" else 1)
            longest = torch.linalg.vector_norm(sample, dim=1).max()
            if bool((found.reshape(-1) - mean).norm() > 1e-2 * longest + 1e-6):
                name = next(n for n, q in _named(self._module) if q is p)
                raise ConfigError(
                    f"{name}: its gradient is not the mean of its per-example gradients. It was "
                    "used outside its layer, in a penalty for instance; or its gradient was "
                    "changed before the step, by clip_grad_norm_ or a GradScaler for instance; or "
                    "its per-example gradients are wrong (see privpart verify-gradients)."
                )

    def _factors(self, samples: list[Tensor | None]) -> Tensor:
        """Return by how much each example's gradient is multiplied, shape (B,).

        A gradient that is not finite, or longer than ``_LONGEST``, is set to zeros in ``samples``.
        """
        used = [_squared_norms(sample) for sample in samples if sample is not None]
        squares = torch.stack(used).sum(0)
        finite = squares <= _LONGEST**2
        if not bool(finite.all()):
            self._not_finite += int((~finite).sum())
            for i, sample in enumerate(samples):
                if sample is not None:
                    samples[i] = torch.where(finite[:, None], sample, 0.0)
            squares = torch.where(finite, squares, 0.0)
        norms = squares.sqrt() * (1 + _ROUNDING * _COLUMNS)
        most = self._grid.sum_clip_norm(self.max_grad_norm) * (1 - _FLOAT_SUM)
        return torch.where(norms > most, most / norms, 1.0)

    def _release(self, noise: Tensor) -> None:
        """Put the noised mean into the parameters' gradients."""
        scale = self._grid.step(self.max_grad_norm)
        self._total.mul_(1 / scale).round_()
        if self.loss_reduction == "mean":
            scale /= cast("int", self.expected_batch_size)
        flat = self._total.add_(noise).mul_(scale).float()
        start = 0
        for p in self.trained:
            part = flat[start : start + p.numel()].view_as(p)
            p.grad = part.to(device=p.device, dtype=p.dtype)
            start += p.numel()
        self._total.zero_()


class _Watched:
    """A module that Opacus wrapped, of which every call, and the use of its output, is noted."""

    rows: Rows
    hooks_enabled: bool

    def forward(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        """Call the user's network."""
        with self.rows.calling((arguments, options)) as call:
            output = super().forward(*arguments, **options)  # type: ignore[misc]
        if used := [leaf for leaf in _leaves(output) if _is_dense(leaf) and leaf.requires_grad]:
            register_multi_grad_hook(used, lambda _: self._use(call), mode="any")
        return output

    def _use(self, call: _Call) -> None:
        if self.hooks_enabled:
            self.rows.use(call)

    def capture_activations_hook(self, module: nn.Module, *arguments: Any) -> None:  # noqa: ANN401
        """Note which call of the network a layer's input is of."""
        if self.hooks_enabled and module.training and torch.is_grad_enabled():
            self.rows.capture()
        super().capture_activations_hook(module, *arguments)  # type: ignore[misc]


class _HooksModule(_Watched, GradSampleModule):  # type: ignore[misc]
    """A module whose per-example gradients are kept."""

    def capture_backprops_hook(self, module: nn.Module, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        """Refuse gradients of a pass whose inputs were not kept."""
        if self.hooks_enabled:
            _refuse_evaluation_mode(module)
        super().capture_backprops_hook(module, *arguments, **options)
        if self.hooks_enabled:
            self.rows.note_gradients(module.parameters())


def _leaves(value: object) -> Iterator[object]:
    """Yield what a nest of mappings, lists and tuples holds; None and truth values hold no data."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif value is not None and not isinstance(value, bool):
        yield value


def _is_dense(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def _row_checksums(tensor: Tensor) -> list[int]:
    """Return the checksum of each row, on the CPU: a move to a device keeps bytes."""
    count = len(tensor) if tensor.dim() else 1
    rows = tensor.detach().cpu().resolve_conj().reshape(count, tensor.numel() // max(1, count))
    return [zlib.crc32(row) for row in rows.contiguous().view(torch.uint8).numpy()]


def _refuse_evaluation_mode(layer: nn.Module) -> None:
    """Refuse a layer in evaluation mode: its gradients would be taken with an earlier input."""
    if not layer.training:
        raise ConfigError(
            f"backward(): a {type(layer).__name__} whose parameters train is not in training mode, "
            "and Opacus keeps inputs only there. Call module.train() before a batch."
        )


class _GhostModule(_Watched, GradSampleModuleFastGradientClipping):  # type: ignore[misc]
    """A module whose gradients are clipped by their norms alone, in a second backward pass.

    Attributes:
        examples: number of examples whose gradients were clipped since the last step.
        summed: their clipped sum, by parameter.
        unclipped: whether a backward pass has not been clipped.
        compared: whether the norms of a batch were compared with those of examples alone.
    """

    def __init__(self, module: nn.Module, *, clip_norm: float, **options: Any) -> None:  # noqa: ANN401
        super().__init__(module, max_grad_norm=clip_norm, **options)
        self.examples = 0
        self.summed: list[Tensor | None] = []
        self.unclipped = False
        self.compared = False

    def capture_backprops_hook(self, module: nn.Module, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        """Note that gradients of an unclipped loss have been added."""
        if self.hooks_enabled:
            self.unclipped = True
            _refuse_evaluation_mode(module)
        super().capture_backprops_hook(module, *arguments, **options)

    def get_clipping_coef(self) -> Tensor:
        """Return the factor of each example's loss.

        Raises:
            ConfigError: a gradient is not finite, and cannot be left out of a sum; or a parameter
                has no norms of this batch.
        """
        if any(getattr(p, "_norm_sample", None) is None for p in self.trainable_parameters):
            raise ConfigError(
                "backward(): a parameter that trains was not used once for each example of this "
                "batch, and ghost clipping needs its norms. Use grad_sample_mode='hooks'."
            )
        norms = self.get_norm_sample().float()
        if not bool(torch.isfinite(norms).all()):
            raise ConfigError(
                "backward(): the gradient of an example is not finite, and ghost clipping cannot "
                "leave it out. Use grad_sample_mode='hooks', which counts it as zeros."
            )
        for p in self.trainable_parameters:
            p._norm_sample = None  # of this batch alone: it must not clip another
        return torch.clamp(self.max_grad_norm / (norms * (1 + 1e-4) + 1e-30), max=1.0)


class _GhostLoss:
    """The loss of a batch, which can only be looked at and differentiated, once per step.

    Opacus's can be added to other terms, whose gradients nothing would clip.
    """

    def __init__(self, module: _GhostModule, parameters: list[nn.Parameter], each: Tensor) -> None:
        self._module, self._parameters, self._each = module, parameters, each

    def detach(self) -> Tensor:
        """Return the loss without its graph."""
        found = self._each.detach()
        return found.mean() if self._module.loss_reduction == "mean" else found.sum()

    def item(self) -> float:
        """Return the loss."""
        return float(self.detach())

    def backward(self) -> None:
        """Add the clipped gradients of the batch's examples to the parameters' gradients.

        Raises:
            ConfigError: called before in this step, or the losses are not one for each example.
        """
        module, each = self._module, self._each
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._parameters):
            raise ConfigError(
                "backward(): a parameter has a hook, which could change the clipped sum. Remove "
                "it, or use grad_sample_mode='hooks'."
            )
        if module.examples:
            raise ConfigError(
                "backward(): was called before in this step. With ghost clipping call it once per "
                "optimizer.step(); BatchMemoryManager trains on parts of a batch."
            )
        whole = each.mean() if module.loss_reduction == "mean" else each.sum()
        torch.autograd.backward(whole, retain_graph=True)
        for p in self._parameters:
            p.grad = None
        factors = module.get_clipping_coef()
        if not module.compared:
            self._compare(module.per_sample_gradient_norms)
        if factors.shape != each.shape:
            raise ConfigError(
                f"criterion: gave {len(each)} losses for {len(factors)} examples. Its "
                "reduction='none' must give a row for each example."
            )
        module.disable_hooks()
        try:
            torch.autograd.backward((factors.to(each.device) * each).sum())
        finally:
            module.enable_hooks()
        module.examples, module.unclipped = len(factors), False
        module.summed = [p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None

    def _compare(self, norms: Tensor) -> None:
        """Check that the first and the last norm are those of the examples' own gradients."""
        module = self._module
        module.disable_hooks()
        try:
            for i in {0, len(self._each) - 1} if len(norms) == len(self._each) else ():
                own = torch.autograd.grad(
                    self._each[i], self._parameters, retain_graph=True, allow_unused=True
                )
                norm = torch.stack([g.norm() for g in own if g is not None]).norm()
                if not bool((norm - norms[i]).abs() <= 1e-2 * norms.max() + 1e-6):
                    raise ConfigError(
                        f"backward(): the gradient of an example has norm {float(norm):g} alone "
                        f"and {float(norms[i]):g} by Opacus in its batch. A parameter is used "
                        "outside its layer, or examples are mixed (see privpart verify-gradients)."
                    )
        finally:
            module.enable_hooks()
        module.compared = True


class _GhostCriterion:
    """The user's loss module, which gives losses that clip."""

    def __init__(self, module: _GhostModule, parameters: list[nn.Parameter], own: Any) -> None:  # noqa: ANN401
        if getattr(own, "reduction", None) != module.loss_reduction:
            raise ConfigError(
                f"criterion: needs reduction={module.loss_reduction!r}, as loss_reduction says, "
                "and must give a loss for each example with reduction='none'."
            )
        self._module, self._parameters, self._own = module, parameters, own

    def __call__(self, *arguments: Any, **options: Any) -> _GhostLoss:  # noqa: ANN401
        before, self._own.reduction = self._own.reduction, "none"
        try:
            found = self._own(*arguments, **options)
        finally:
            self._own.reduction = before
        rows = found.reshape(len(found), -1)
        each = rows.mean(1) if before == "mean" else rows.sum(1)
        return _GhostLoss(self._module, self._parameters, each)


class _GhostOptimizer(FTRLOptimizer):
    """The same for ghost clipping: gradients come as a clipped sum."""

    def _add_up(self) -> int:
        module = cast("_GhostModule", self._module)
        besides = any(p.grad is not None and bool(p.grad.any()) for p in self.trained)
        if module.unclipped or besides or not module.examples:
            raise ConfigError(
                "optimizer.step(): backward() was called on a loss that clips nothing. Use the "
                "criterion that make_private returned, once per batch."
            )
        start = 0
        for p, summed in zip(self.trained, module.summed, strict=True):
            if summed is not None:
                own = summed.to_dense() if summed.is_sparse else summed
                self._total[start : start + p.numel()] += own.reshape(-1).double().cpu()
            start += p.numel()
        if not bool(torch.isfinite(self._total).all()):
            raise ConfigError("optimizer.step(): the sum of the gradients is not finite.")
        examples, module.examples = module.examples, 0
        return examples


_NO_GRADIENT = (
    "optimizer.step(): a parameter has no per-example gradient. Call backward() on the loss of a "
    "batch first, without torch.compile; freeze parameters that the loss does not use "
    "(requires_grad=False)."
)


_HOOKS = (
    "a hook on {}: would run between the noise and the release of a step, and no noise covers what "
    "it changes. Remove it; epsilon is known beforehand, and learning rates belong into scheduler."
)


def _refuse_hooks(optimizer: torch.optim.Optimizer, own: int | None = None) -> None:
    """Refuse code in an optimizer beside its own step; ``own`` is the hook that watches it."""
    hooks = [v for name, v in vars(optimizer).items() if name.endswith("_hooks")]
    hooks += [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    step = vars(optimizer).get("step")
    replaced = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
    if replaced or any(number != own for each in hooks for number in each):
        raise ConfigError(_HOOKS.format(f"{type(optimizer).__name__}, or on all optimizers"))


def _samples(parameter: nn.Parameter) -> list[Tensor]:
    """Return a parameter's per-example gradients of each backward pass."""
    found = getattr(parameter, "grad_sample", None)
    if found is None:
        return []
    return list(found) if isinstance(found, list) else [found]


def _per_example(parameter: nn.Parameter) -> Tensor | None:
    """Return a parameter's per-example gradients, shape (B, d), of one or more backward passes.

    None if there are none.
    """
    parts = _samples(parameter)
    if not parts:
        return None
    found = torch.cat(parts) if len(parts) > 1 else parts[0]
    if found.shape[1:] != parameter.shape:
        raise ConfigError(
            f"backward(): per-example gradients of shape {list(found.shape[1:])} for a parameter "
            f"of shape {list(parameter.shape)}."
        )
    return found.detach().reshape(len(found), parameter.numel()).to(parameter.dtype)


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module that Opacus wrapped, by the user's names."""
    return ((name.removeprefix("_module."), p) for name, p in module.named_parameters())


def _fixed(module: nn.Module, trained: Sequence[nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    """Yield what does not train: the other parameters, and all buffers."""
    own = {id(p) for p in trained}
    yield from ((name, p) for name, p in _named(module) if id(p) not in own)
    yield from ((name.removeprefix("_module."), b) for name, b in module.named_buffers())


def _refuse_batch_statistics(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            raise ConfigError(
                f"layer {name.removeprefix('_module.')!r} is a {type(layer).__name__} in training "
                "mode, or without running statistics, which mixes the examples of a batch. Call "
                ".eval() on it after module.train(), or replace it: "
                "privpart.models.replace_batch_norm(module)."
            )


_ROUNDING = 2.0**-24
_COLUMNS = 4096
_ROWS = 64
_LEAST, _MOST = 1e-6, 1e6
"""Clip norms between which lengths neither underflow nor overflow in float32."""
_LONGEST = 1e30
"""Length above which a factor may be below float32's normal numbers, which have fewer bits."""
_FLOAT_SUM = 4 * _ROWS**2 * _ROUNDING
"""How much shorter a gradient must be for what floating point adds to it.

The gradients of 64 examples are multiplied and summed in float32, in any order, with an error of at
most 66 u times the sum of their lengths, u = 2^-24 (Higham 2002, "Accuracy and Stability of
Numerical Algorithms", section 3.1). Without one of them it is as large again, so the example moves
the sum by 2 * 66 * 64 u clip norms more than its own length, less than this. No other 64 examples
are touched. Their sums are added in float64, and rounded to integers, for which
``Grid.sum_clip_norm`` allows.
"""


def _squared_norms(flat: Tensor) -> Tensor:
    """Return squared norms of the rows, shape (B,), to a relative error of ``_COLUMNS`` u.

    Of columns in blocks, in float32: float64 takes ten times as long. Squares that underflow change
    a norm by 2^-63 sqrt(d) at most, which is nothing beside ``_LEAST`` and the error above.
    """
    whole = flat.shape[1] // _COLUMNS * _COLUMNS
    blocks = flat[:, :whole].reshape(len(flat), whole // _COLUMNS, _COLUMNS)
    rest = torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True)
    parts = [torch.linalg.vector_norm(blocks, dim=2), rest]
    return torch.cat(parts, dim=1).double().square().sum(1)


def _sum(flat: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of the rows times their factors, float64, on the error of ``_FLOAT_SUM``.

    By numpy, or without a product of matrices: torch's may round to 10 bits or 7, as its settings
    say.
    """
    total = torch.zeros(flat.shape[1], dtype=torch.float64, device=flat.device)
    factors = factors.to(flat.dtype)
    for start in range(0, len(flat), _ROWS):
        some, own = flat[start : start + _ROWS], factors[start : start + _ROWS]
        if flat.is_cpu:
            total += torch.from_numpy(own.numpy() @ some.numpy())
        else:
            total += (own[:, None] * some).sum(0)
    return total


class _Steps:
    """What a run folder keeps after each step, and gives back when the run is resumed.

    Attributes:
        round: number of steps done.
        cohort: numbers of the examples of the last step.
    """

    def __init__(
        self, plan: PrivacyPlan, optimizer: "FTRLOptimizer", scheduler: "_Scheduler"
    ) -> None:
        self.plan_hash = plan.hash
        self.last_clip_norm = plan.clip_norm
        self._plan = plan
        self._optimizer = optimizer
        self._scheduler = scheduler

    @property
    def round(self) -> int:
        return self._optimizer.passes.done

    @property
    def source(self) -> NoiseSource:
        return self._optimizer.noise.source

    @property
    def _device(self) -> torch.device:
        first: Tensor = self._optimizer.trained[0]
        return first.device

    @property
    def cohort(self) -> tuple[int, ...]:
        return tuple(self._optimizer.passes.batch(self.round - 1))

    @property
    def parameters(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1).float().cpu() for p in self._optimizer.trained])

    def load_start(self, start: Tensor) -> None:
        raise ConfigError("a run of examples is not a fork: it has no start model of its own.")

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        noise = self._optimizer.noise.state_dict()
        original = self._optimizer.original_optimizer
        _refuse_unkept(original)
        tensors = {"parameters": self.parameters, "random": torch.get_rng_state().to(torch.int32)}
        if self._device.type == "cuda":
            tensors["random_device"] = torch.cuda.get_rng_state(self._device).to(torch.int32)
        tensors |= {f"optimizer.{k}": t.cpu() for k, t in _optimizer_tensors(original).items()}
        if "state" in noise:
            tensors["noise"] = noise.pop("state")
        groups = [
            {k: v for k, v in group.items() if k != "params"} for group in original.param_groups
        ]
        values = {"schema": _SCHEMA, "plan": self.plan_hash, "round": self.round, "noise": noise}
        values |= {"groups": groups, "scheduler": self._scheduler.state_dict()}
        try:
            return tensors, json.loads(json.dumps(values, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"optimizer, scheduler: their settings cannot be kept in a file: {error}."
            ) from None

    def load_state_dict(
        self,
        tensors: dict[str, Tensor],
        values: dict[str, Any],
        participations: dict[ClientId, list[int]],
    ) -> None:
        if values.get("schema") != _SCHEMA or values.get("plan") != self.plan_hash:
            raise ConfigError("the state is of another run, or not of one of examples.")
        own = dict(tensors)
        parameters, random = own.pop("parameters"), own.pop("random")
        if parameters.shape != self.parameters.shape:
            raise ConfigError("the state is of another module.")
        if (coins := own.pop("random_device", None)) is not None and self._device.type == "cuda":
            torch.cuda.set_rng_state(coins.to(torch.uint8), self._device)
        noise = dict(values["noise"])
        if (state := own.pop("noise", None)) is not None:
            noise["state"] = state
        self._optimizer.noise.load_state_dict(noise)
        start = 0
        with torch.no_grad():
            for p in self._optimizer.trained:
                p.copy_(parameters[start : start + p.numel()].view_as(p))
                start += p.numel()
        original = self._optimizer.original_optimizer
        _load_optimizer_tensors(
            original, {name.removeprefix("optimizer."): tensor for name, tensor in own.items()}
        )
        for group, settings in zip(original.param_groups, values["groups"], strict=True):
            group.update(settings)
        self._scheduler.load_state_dict(values["scheduler"])
        torch.set_rng_state(random.to(torch.uint8))
        self._optimizer.passes.resume(values["round"])


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state by "parameter.name"; there is none before the first step."""
    return {
        f"{number}.{name}": value
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def _load_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore the state that ``_optimizer_tensors`` returned."""
    whole = optimizer.state_dict()
    whole["state"] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        whole["state"].setdefault(int(number), {})[name] = value
    optimizer.load_state_dict(whole)


def _refuse_unkept(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state_dict()["state"].values():
        for name, value in state.items():
            if value is not None and not isinstance(value, Tensor):
                raise ConfigError(
                    f"optimizer: keeps {name!r} as a {type(value).__name__}, and a run folder only "
                    "tensors, so a resumed run would differ. Use another optimizer, or no folder."
                )


class _Scheduler:
    """A learning-rate scheduler that the optimizer steps, so that its state is kept with the run.

    Stepped by the loop it would be one step behind in a run that was killed after a commit.
    """

    def __init__(self, scheduler: LRScheduler | None, every: int) -> None:
        self._own = scheduler
        self._every = every

    def step(self, done: int) -> None:
        """Step it, if ``done`` steps of the optimizer are when it is due.

        Raises:
            ConfigError: somebody else stepped it as well.
        """
        if self._own is None:
            return
        if self._own.last_epoch != (done - 1) // self._every:
            raise ConfigError(
                "scheduler: was stepped by the loop as well; the optimizer steps it. Leave out "
                "scheduler.step()."
            )
        if done % self._every == 0:
            self._own.step()

    def state_dict(self) -> dict[str, Any] | None:
        return None if self._own is None else self._own.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if (self._own is None) != (state is None):
            raise ConfigError("scheduler: the run was begun with one; pass it again, or none.")
        if self._own is not None and state is not None:
            self._own.load_state_dict(state)


class FTRLEngine:
    """Makes an ordinary PyTorch loop private by DP-FTRL, as Opacus does by DP-SGD.

    Args:
        seed: takes the noise from a seed, for simulations: the run is then not private. None draws
            a secret key from the operating system.

    >>> import torch
    >>> from torch import nn
    >>> net, data = nn.Linear(4, 2), torch.utils.data.TensorDataset(torch.ones(64, 4))
    >>> engine = FTRLEngine()
    >>> module, optimizer, loader = engine.make_private(
    ...     module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), dataset=data,
    ...     batch_size=16, epochs=2, max_grad_norm=1.0, target_epsilon=4.0, delta=1e-5)
    >>> round(engine.epsilon(1e-5), 2)
    4.0
    """

    def __init__(self, *, seed: int | None = None) -> None:
        self._seed = None if seed is None else checks.count("seed", seed, minimum=0)
        self._plan: PrivacyPlan | None = None
        self._passes: FixedPasses | None = None
        self._folder: RunFolder | None = None
        self._allows_large = False

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        epochs: int,
        max_grad_norm: float,
        data_loader: DataLoader[Any] | None = None,
        dataset: Dataset[Any] | None = None,
        batch_size: int | None = None,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float | None = None,
        allow_large_delta: bool = False,
        mechanism: str | MechanismChoice | Mechanism = "blt",
        grad_sample_mode: GradSampleMode = "hooks",
        criterion: nn.Module | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
        batch_first: bool = True,
        order_seed: int = 0,
        out: str | Path | None = None,
        resume: bool = False,
        population: str | None = None,
        scheduler: LRScheduler | None = None,
        scheduler_every: Literal["step", "epoch"] = "step",
        **loader: Any,  # noqa: ANN401  DataLoader's own
    ) -> Any:  # noqa: ANN401  three things, or four with a criterion
        """Return module, optimizer and loader for the user's loop; epsilon is known from here on.

        With ``grad_sample_mode="ghost"`` also the criterion, which clips when its loss is
        differentiated; it takes the place of the one that was passed.

        Args:
            module: any network that Opacus takes; parameters with ``requires_grad`` train.
            optimizer: any ``torch.optim`` optimiser of exactly these parameters.
            epochs: passes over the examples, >= 1.
            max_grad_norm: clip norm of one example's gradient, 1e-6 to 1e6.
            data_loader: gives data set, batch size and its other options; it must not shuffle. Or
                pass the next two.
            dataset: map-style; its length is public.
            batch_size: examples per step, >= 1, and the public divisor of the sum.
            noise_multiplier: standard deviation of one i.i.d. coordinate that enters the mechanism
                / clip norm, > 0; or pass ``target_epsilon``.
            target_epsilon: least noise for this epsilon at ``delta``.
            delta: in (0, 1), below 0.1 / number of examples; a warning says so if it is not.
            allow_large_delta: accepts a delta of 1 / number of examples or more, here and later;
                reports say that it is too large.
            mechanism: name, choice with options, or a mechanism for as many rounds as steps.
            grad_sample_mode: "hooks" keeps each example's gradient; "ghost" only their norms, in
                less memory and a second backward pass.
            criterion: loss module, for "ghost" only.
            loss_reduction: of the loss, "mean" or "sum" over the batch.
            batch_first: whether the first dimension of the layers' inputs is the example, not the
                second.
            order_seed: public seed of the order of the examples, >= 0.
            out: folder of the run; every step is committed to it before ``optimizer.step()``
                returns. None keeps nothing.
            resume: continue the run in ``out`` if it has begun, with the same arguments.
            population: name of the people in the budget book, where " (examples)" is added to it:
                costs of examples and of clients do not add up; needs ``out``.
            scheduler: of the optimizer's learning rates; ``optimizer.step()`` steps it, not the
                loop.
            scheduler_every: when: after each "step", or after the last step of each "epoch".
            loader: further options of ``DataLoader``, such as ``collate_fn`` or ``num_workers``.

        Raises:
            ConfigError: a value out of range, or a module or optimizer that cannot be private.
        """
        if self._plan is not None:
            raise ConfigError("make_private was called before: its noise is for one run only.")
        _refuse_folder_options(out, scheduler, scheduler_every, resume or population is not None)
        _refuse_loss_options(grad_sample_mode, loss_reduction, criterion)
        dataset, size, loader = _data(data_loader, dataset, batch_size, loader)
        passes = FixedPasses(_length(dataset, loader), size, epochs, order_seed)
        if not _LEAST <= checks.positive("max_grad_norm", max_grad_norm) <= _MOST:
            raise ConfigError(
                f"max_grad_norm={max_grad_norm:g}: must be {_LEAST:g} to {_MOST:g}. Scale the loss."
            )
        examples, self._allows_large = len(passes.order), allow_large_delta
        _accept_delta(delta, examples, allow_large_delta)
        own = _mechanism(mechanism, passes.participation)
        z = _noise(own, passes.participation, noise_multiplier, target_epsilon, delta)
        trained = _trained(module, optimizer)
        refuse_noise(z, sum(p.numel() for p in trained))
        about = examples, order_seed, grad_sample_mode, loss_reduction
        plan = PrivacyPlan(
            mechanism=own,
            participation=passes.participation,
            clip_norm=float(max_grad_norm),
            noise_multiplier=z,
            report_goal=size,
            context=_context(module, trained, *about),
        )
        names = {id(p): name for name, p in module.named_parameters()}
        facts: dict[str, Any] = {"delta": delta, "unit": "example", "mode": grad_sample_mode}
        facts["compares_rows"] = True
        facts["parameters"] = [[names[id(p)], list(p.shape)] for p in trained]
        facts["population_size"] = examples
        if population is not None:
            facts["population_name"] = f"{population} (examples)"
        # a generator of its own: a loader draws from torch's as often as it is begun
        loader = {"generator": torch.Generator().manual_seed(0)} | loader
        dealt = _Loader(dataset, batch_sampler=passes, **loader)
        steps = _Scheduler(scheduler, 1 if scheduler_every == "step" else passes.batches)
        wrapped = _wrapped(module, plan, grad_sample_mode, loss_reduction, batch_first)
        try:
            clips = None if criterion is None else _GhostCriterion(wrapped, trained, criterion)
            source = self._source(plan, out, facts, resume=resume)
            private = _private(optimizer, wrapped, passes, plan, source)
            private.begin(self._folder, _Steps(plan, private, steps), steps)
        except BaseException:
            wrapped.cleanup()
            self.close()
            raise
        made = wrapped, private, dealt
        self._plan, self._passes = plan, passes
        return made if clips is None else (*made, clips)

    def make_private_with_epsilon(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        **options: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Return what ``make_private`` returns, from the arguments that Opacus's method has."""
        return self.make_private(target_epsilon=target_epsilon, delta=target_delta, **options)

    def _source(
        self, plan: PrivacyPlan, out: str | Path | None, facts: dict[str, Any], *, resume: bool
    ) -> NoiseSource:
        """Return the source of the noise, of the run in ``out`` if there is one."""
        if out is None:
            return SecretSource() if self._seed is None else SeededSource(self._seed)
        if not resume or not holds_a_run(out):
            self._folder = create_run(out, plan, seed=self._seed, facts=facts)
            return self._folder.source()
        self._folder = RunFolder.open(out)
        if self._folder.plan.hash != plan.hash or self._folder.facts["seed"] != self._seed:
            raise ConfigError(
                f"{out}: was begun with another plan, module, data or seed. Pass the same as then."
            )
        for name in ("delta", "population_name"):
            if self._folder.facts.get(name) != facts.get(name):
                raise ConfigError(
                    f"{name.removesuffix('_name')}={facts.get(name)!r}: the run in {out} was begun "
                    f"with {self._folder.facts.get(name)!r}. Pass the same as then."
                )
        return self._folder.source()

    @property
    def epochs_left(self) -> int:
        """Passes of the loader that are left, the first of which may be the rest of one."""
        passes = self._of_run()[1]
        return -(-(passes.batches * passes.epochs - passes.done) // passes.batches)

    def epsilon(self, delta: float) -> float:
        """Return epsilon of the whole run at ``delta`` in (0, 1), before or after training.

        Raises:
            ConfigError: delta is 1 / number of examples or more, and ``allow_large_delta`` was not
                passed.
        """
        return self.report(delta).epsilon

    def get_epsilon(self, delta: float) -> float:
        """Return ``epsilon``, under the name that Opacus's engine has for it."""
        return self.epsilon(delta)

    def report(self, delta: float) -> PrivacyReport:
        """Return the guarantee of the whole run at ``delta`` in (0, 1), and its assumptions.

        Nothing in it was checked: ``privpart report`` says of a run in a folder what was.
        """
        plan, passes = self._of_run()
        examples = len(passes.order)
        if not self._allows_large and checks.is_large_delta(delta, examples):
            checks.accept_delta(delta, examples, unit="example")  # raises
        return plan.report(
            delta,
            noise_source="os" if self._seed is None else "seeded",
            unit="example",
            population=examples,
        )

    def privacy_statement(self, delta: float) -> str:
        """Return the report at ``delta`` in (0, 1) in plain English, with every condition."""
        return self.report(delta).statement()

    def comparison(self, delta: float) -> "Comparison":
        """Return what DP-SGD costs at ``delta`` in (0, 1), with the same noise, batch and steps."""
        plan, passes = self._of_run()
        z, order = plan.noise_multiplier, passes.participation
        sampling = PoissonSampling(min(plan.report_goal, len(passes.order)), len(passes.order))
        amplified = dp_sgd(noise_multiplier=z, sampling=sampling, steps=order.rounds)
        alone = guarantee(Independent(order.rounds), order, noise_multiplier=z)
        return Comparison(
            delta, z, self.epsilon(delta), amplified.epsilon(delta), alone.epsilon(delta)
        )

    def close(self) -> None:
        """Release the run folder for other processes; a run that is not complete can be resumed."""
        if self._folder is not None:
            self._folder.close()

    def _of_run(self) -> tuple[PrivacyPlan, FixedPasses]:
        if self._plan is None or self._passes is None:
            raise ConfigError("call make_private first: it fixes what the guarantee is for.")
        return self._plan, self._passes


@dataclass(frozen=True, slots=True)
class Comparison:
    """Epsilon of a run, and of DP-SGD with the same noise multiplier, batch and number of steps.

    Equal noise multipliers are not equal accuracy: DP-SGD's noise is independent in each step,
    while correlated noise cancels over the steps.

    Attributes:
        delta: of all three.
        noise_multiplier: of all three.
        epsilon: of the run, under zero-out adjacency.
        poisson: of DP-SGD if each step sampled each example on its own, in secret, under
            add-or-remove adjacency.
        fixed_passes: of DP-SGD in the run's own passes, where nothing amplifies.
    """

    delta: float
    noise_multiplier: float
    epsilon: float
    poisson: float
    fixed_passes: float

    def __str__(self) -> str:
        """Return three lines."""
        return (
            f"epsilon {up(self.epsilon)} at delta {self.delta:g}: this run\n"
            f"epsilon {up(self.poisson)}: DP-SGD with this noise and hidden Poisson samples\n"
            f"epsilon {up(self.fixed_passes)}: DP-SGD with this noise, in passes as here"
        )


def _refuse_folder_options(
    out: str | Path | None, scheduler: LRScheduler | None, every: str, of_folder: bool
) -> None:
    if out is None and of_folder:
        raise ConfigError("resume, population: are about a run in a folder; pass out.")
    checks.choice("scheduler_every", every, ("step", "epoch"))
    if scheduler is None and every != "step":
        raise ConfigError("scheduler_every: is about a scheduler; pass one, or leave it out.")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "scheduler: ReduceLROnPlateau follows a metric, which no epsilon covers. Use one that "
            "counts steps."
        )


def _accept_delta(delta: float | None, examples: int, allow_large: bool) -> None:
    """Refuse a large delta, and warn of one that is not far below 1 / examples."""
    if delta is None:
        return
    said = checks.accept_delta(delta, examples, allow_large=allow_large, unit="example")
    if said:
        sys.stderr.write(f"privpart: warning: {said}\n")


def _refuse_loss_options(mode: str, loss_reduction: str, criterion: nn.Module | None) -> None:
    checks.choice("grad_sample_mode", mode, get_args(GradSampleMode))
    checks.choice("loss_reduction", loss_reduction, ("mean", "sum"))
    if (mode == "ghost") != (criterion is not None):
        raise ConfigError("criterion: needed for grad_sample_mode='ghost', and only for it.")


_OF_LOADER = (
    "collate_fn",
    "generator",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)


def _data(
    given: DataLoader[Any] | None,
    dataset: Dataset[Any] | None,
    batch_size: int | None,
    options: dict[str, Any],
) -> tuple[Dataset[Any], int, dict[str, Any]]:
    """Return data set, batch size and the loader's other options, from either way to say them."""
    if given is None:
        if dataset is None or batch_size is None:
            raise ConfigError("pass data_loader, or dataset and batch_size.")
        return dataset, batch_size, options
    if dataset is not None or batch_size is not None or options:
        typed = ", ".join(["dataset, batch_size", *options])
        raise ConfigError(f"{typed}: the data_loader has these already; leave them out.")
    if isinstance(given.dataset, IterableDataset):
        raise ConfigError(
            "data_loader: its data set has no length or numbers; use a map-style one."
        )
    if given.batch_size is None or not isinstance(given.sampler, SequentialSampler):
        raise ConfigError(
            "data_loader: shuffles, or has a sampler of its own. The passes have one fixed order, "
            "which order_seed shuffles once: make it with batch_size alone."
        )
    if given.drop_last:
        raise ConfigError("data_loader: drop_last=True leaves examples out; make it without.")
    own = {name: getattr(given, name) for name in _OF_LOADER}
    return given.dataset, given.batch_size, {n: v for n, v in own.items() if v is not None}


def _length(dataset: Dataset[Any], loader: dict[str, Any]) -> int:
    if not isinstance(dataset, Sized):
        raise ConfigError("dataset: has no length; passes of a fixed order need one.")
    of_order = {"batch_sampler", "drop_last", "in_order", "sampler", "shuffle"}
    if taken := sorted(loader.keys() & of_order):
        raise ConfigError(f"{', '.join(taken)}: the order of the examples is fixed; leave out.")
    return len(dataset)


def _wrapped(
    module: nn.Module, plan: PrivacyPlan, mode: str, loss_reduction: str, batch_first: bool
) -> Any:  # noqa: ANN401  Opacus is untyped
    """Return the module with Opacus's hooks.

    Raises:
        ConfigError: it has them already, or Opacus does not take it.
    """
    options: dict[str, Any] = {"loss_reduction": loss_reduction, "batch_first": batch_first}
    try:
        if mode == "ghost":
            return _GhostModule(module, clip_norm=plan.clip_norm, **options)
        return _HooksModule(module, **options)
    except (NotImplementedError, ValueError) as error:
        said = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"module: Opacus does not take it: {said}. A module that was made private before is "
            "not made private again; see opacus.validators.ModuleValidator.fix for layers."
        ) from None


def _private(
    optimizer: torch.optim.Optimizer,
    wrapped: Any,  # noqa: ANN401  Opacus is untyped
    passes: FixedPasses,
    plan: PrivacyPlan,
    source: NoiseSource,
) -> FTRLOptimizer:
    """Return the private optimiser, with the noise of the plan and the grid that it is on."""
    dim = sum(
        p.numel() for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    )
    z, own = plan.noise_multiplier, plan.mechanism
    bits = noise_bits(z, dim)
    stream = NoiseStream(own, dim=dim, stddev=2.0**bits, source=source)
    charge = (dim * own.rounds) ** 0.5 * stream.filter_error(passes.epochs * 2.0**bits / z)
    grid = Grid.of(bits, z, dim, filter_charge=charge)
    kind, wrapped.rows = FTRLOptimizer, passes.rows
    if isinstance(wrapped, _GhostModule):
        kind, wrapped.max_grad_norm = _GhostOptimizer, grid.sum_clip_norm(plan.clip_norm)
    return kind(
        optimizer,
        wrapped,
        passes,
        stream,
        grid,
        max_grad_norm=plan.clip_norm,
        batch_size=plan.report_goal,
        loss_reduction=wrapped.loss_reduction,
    )


def _context(module: nn.Module, trained: Sequence[nn.Parameter], *about: object) -> str:
    """Return a hash of all that was fixed beforehand: frozen part, order and the loss's form."""
    digest = hashlib.sha256(json.dumps(["privpart examples", *about]).encode())
    for name, tensor in _fixed(module, trained):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    names = {id(p): name for name, p in module.named_parameters()}
    digest.update(json.dumps([[names[id(p)], list(p.shape)] for p in trained]).encode())
    return digest.hexdigest()


def _mechanism(chosen: str | MechanismChoice | Mechanism, order: Participation) -> Mechanism:
    if isinstance(chosen, Mechanism):
        if chosen.rounds != order.rounds:
            raise ConfigError(
                f"mechanism: is for {chosen.rounds} rounds; these epochs have {order.rounds} steps."
            )
        return chosen
    if isinstance(chosen, str):
        checks.choice("mechanism", chosen, [str(name) for name in MechanismName])
        chosen = MechanismChoice(name=MechanismName(chosen))
    return chosen.build(order)


def _noise(
    mechanism: Mechanism,
    participation: Participation,
    noise_multiplier: float | None,
    target_epsilon: float | None,
    delta: float | None,
) -> float:
    if (noise_multiplier is None) == (target_epsilon is None):
        raise ConfigError("pass either noise_multiplier or target_epsilon, with delta.")
    if noise_multiplier is not None:
        return checks.positive("noise_multiplier", noise_multiplier)
    if target_epsilon is None or delta is None:
        raise ConfigError("delta is missing: target_epsilon needs one.")
    return calibrate(mechanism, participation, target_epsilon=target_epsilon, delta=delta)


def _trained(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters that train, in the optimizer's order, after checking both."""
    _refuse_unsupported(module, optimizer)
    named = {n: p for n, p in _of_layers(module) if p.requires_grad}
    seen: dict[int, str] = {}
    for name, p in named.items():
        if (other := seen.setdefault(id(p), name)) != name:
            raise ConfigError(
                f"{other} and {name} are one tensor: per-example gradients of tied parameters are "
                "wrong in Opacus. Freeze it, or untie the two."
            )
        if p.dtype is not torch.float32:
            raise ConfigError(
                f"{name}: is {p.dtype}; train in float32 (module.float()), whose rounding the clip "
                "norm allows for. torch.autocast may still compute in less."
            )
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if held != set(seen):
        extra, missing = len(held - set(seen)), [seen[i] for i in seen if i not in held]
        raise ConfigError(
            f"optimizer: lacks {', '.join(missing) or 'nothing'} of the module's parameters that "
            f"train, and has {extra} of no such parameter. Give it exactly those with "
            "requires_grad."
        )
    if not any(p.numel() for p in named.values()):
        raise ConfigError("module: no parameter trains (requires_grad).")
    if len({p.device for p in named.values()}) > 1:
        raise ConfigError("module: its parameters are on several devices; use one.")
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _of_layers(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters by every name, without the second names that Opacus's DPLSTM gives."""
    for prefix, layer in module.named_modules():
        if not isinstance(layer, DPRNNBase):
            for name, p in layer.named_parameters(recurse=False, remove_duplicate=False):
                yield f"{prefix}.{name}".removeprefix("."), p


def _refuse_unsupported(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(module, torch._dynamo.OptimizedModule):
        raise ConfigError(
            "module: is compiled (torch.compile), and Opacus's hooks do not run in compiled code. "
            "Pass the module itself; the one that make_private returns may be compiled."
        )
    if isinstance(optimizer, DPOptimizer):
        raise ConfigError("optimizer: is private already. Pass the one that it was made from.")
    _refuse_hooks(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("optimizer: LBFGS computes gradients more than once per step.")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise ConfigError("torch.distributed: is in use; DP-FTRL on examples runs in one process.")
    _refuse_batch_statistics(module)
