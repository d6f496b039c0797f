"""Optimizer: takes one step per batch with the noised sum of clipped per-example gradients."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from accounting.checks import ConfigError
from privpart.engines.protocol import OPTIMIZER
from privpart.example_level.loader import Passes
from privpart.example_level.processes import Processes
from privpart.grid import Grid
from privpart.model import refuse_batch_statistics, same_bits, state_of
from privpart.noise.stream import NoiseStream
from privpart.plan import PrivacyPlan
from privpart.run.folder import Committed, RunFolder
from privpart.server import RoundCounts, is_unchanged, methods_of


class FTRLOptimizer(DPOptimizer):  # type: ignore[misc]  # Opacus is untyped
    """The user's optimiser, which sees only noised sums of clipped per-example gradients.

    Guarantees:
        One example changes the sum of a step by at most the clip norm, in integers on the public
        grid; an example whose gradient is not finite counts as zeros. Noise is drawn once per
        batch, by the first of several processes.

    Made by ``FTRLEngine.make_private``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: nn.Module,
        passes: Passes,
        noise: NoiseStream,
        grid: Grid,
        plan: PrivacyPlan,
        loss_reduction: str,
        processes: Processes,
        examples: int,
        scheduler: LRScheduler | None = None,
        scheduler_interval: int = 1,
    ) -> None:
        super().__init__(
            optimizer,
            noise_multiplier=grid.noise_multiplier,
            max_grad_norm=plan.clip_norm,
            expected_batch_size=plan.report_goal,
            loss_reduction=loss_reduction,
        )
        self._module = module
        self._processes = processes
        self.passes = passes
        self.noise = noise
        self._grid = grid
        self._promised = self._settings
        self.trained = list(self.params)
        self._sizes = [p.numel() for p in self.trained]
        dim = sum(self._sizes)
        self._total = torch.zeros(dim, dtype=torch.float64)
        self._drawn = torch.empty(dim, dtype=noise.dtype)
        self._halted = ""
        self._stepping = False
        self._folder: RunFolder | None = None
        self._steps: Committed | None = None
        self.scheduler = scheduler
        self._scheduler_interval = scheduler_interval
        self._checked = False
        self._released: list[Tensor] = []
        self._fixed: dict[str, tuple[Tensor, Any]] = {}
        self._guard = -1
        self._rows_differ = ""
        self._unchanged = True
        self._not_finite = 0
        self._fewest = 0 if plan.sampling is None else plan.report_goal
        self._sum_error = _FLOAT_SUM
        if plan.sampling is not None:
            self._sum_error += sampled_sum_error(examples)
        passes.step = partial(FTRLOptimizer.step, self)

    @property
    def _settings(self) -> tuple[float, float, int]:
        """What the guarantee is for."""
        return float(self.max_grad_norm), float(self.noise_multiplier), self.expected_batch_size

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a private optimizer is never copied; a copy would repeat its noise.")

    def begin(self, folder: RunFolder | None, steps: Committed) -> None:
        """Commit every step to a run folder, if there is one, from the state that it is in."""
        self._folder, self._steps = folder, steps
        # the user still holds the optimizer that was passed, whose steps would have no noise
        self._guard = self.original_optimizer.register_step_pre_hook(self._refuse_other_steps).id
        self._released = [p.detach().clone() for p in self.trained]
        self._fixed = {
            name: (t, state_of([t])) for name, t in fixed_tensors(self._module, self.trained)
        }

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Forget the gradients since the last step, those of each example included."""
        super().zero_grad(set_to_none)
        cast("Any", self._module).set_grad_sample_to_none()

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
            with self._processes.together():
                result = self._take()
        except BaseException:
            self._take_back()
            raise
        with torch.no_grad():
            # these are what a failed step returns to, and what nothing else may change
            for released, p in zip(self._released, self.trained, strict=True):
                released.copy_(p)
        self._halted = ""
        return result

    def _take(self) -> Any:  # noqa: ANN401  what the user's optimiser returns
        # our own call is the only one that the hook of ``begin`` lets through
        self._stepping = True
        try:
            result = self.original_optimizer.step()
        finally:
            self._stepping = False
        # before the commit, so that the rate of the next step is kept with this one
        self._step_scheduler(self.passes.done)
        if self._folder is not None and self._steps is not None:
            examples = len(self._steps.cohort)
            counts = RoundCounts(
                examples,
                examples,
                0,
                summed=examples,
                summed_by=OPTIMIZER if self._unchanged and self._is_unchanged() else "",
                rows_differ=self._rows_differ,
            )
            self._folder.commit(self._steps, counts)
        return result

    def _is_unchanged(self) -> bool:
        step = vars(self).get("step")
        # A scheduler that was made for this optimizer wraps it, to count its calls.
        by_torch = getattr(step, "__globals__", None) is vars(lr_scheduler)
        wrapped = by_torch and getattr(step, "__wrapped__", None) is _OWN["step"]
        return is_unchanged(self, FTRLOptimizer, _OWN, but=("step",) if wrapped else ())

    def _step_scheduler(self, done: int) -> None:
        """Step the scheduler if it is due; refuse one that the loop stepped too."""
        if self.scheduler is None:
            return
        if self.scheduler.last_epoch != (done - 1) // self._scheduler_interval:
            raise ConfigError(
                "scheduler: was stepped by the loop as well; the optimizer steps it. Leave out "
                "scheduler.step()."
            )
        if done % self._scheduler_interval == 0:
            self.scheduler.step()

    def load_scheduler(self, state: dict[str, Any] | None) -> None:
        """Restore the state of the scheduler that the run was begun with; None if it had none."""
        if (self.scheduler is None) != (state is None):
            raise ConfigError("scheduler: the run was begun with one; pass it again, or none.")
        if self.scheduler is not None and state is not None:
            self.scheduler.load_state_dict(state)

    def _take_back(self) -> None:
        """Return to the last parameters that were released: a resumed run takes the step again."""
        with torch.no_grad():
            for released, p in zip(self._released, self.trained, strict=True):
                p.copy_(released)
                p.grad = None

    def _refuse_other_steps(self, *_: object) -> None:
        if not self._stepping:
            raise ConfigError(
                "the optimizer that was passed to make_private: its step() would use gradients "
                "without noise. Call step() of the one that make_private returned."
            )

    def pre_step(self, closure: Any = None) -> bool:  # noqa: ANN401  Opacus's signature
        """Sum the clipped gradients, and unless the step is to be skipped, release them noised."""
        self.refuse_halted()
        # an exception below must not leave a half-summed batch to the next step
        self._halted = "a step was interrupted."
        # a signal is about a part of a batch, and nobody's has none
        skips = not self.passes.nobody and self._check_skip_next_step()
        try:
            with self._processes.together(part=skips):
                self._refuse_changes()
                self.passes.add(self._add_up())
                if not skips:
                    self.passes.refuse_others()
            if skips:
                self._is_last_step_skipped = True
                self._halted = ""
                return False
            self._agree()
        except Exception as error:
            self._halted = str(error)
            raise
        self._release(self.noise.next(out=self._drawn) if self._processes.is_first else None)
        self._is_last_step_skipped = False
        self._halted = ""
        return True

    def refuse_halted(self) -> None:
        """Raise ConfigError if the run stopped in the middle of a step."""
        if self._halted:
            raise ConfigError(f"this run has stopped: {self._halted} Begin it again.")

    def _agree(self) -> None:
        """Count the batch as done, by what all processes say of their parts of it."""
        differ = "" if self.passes.nobody else self.passes.rows.compare()
        said = self._processes.gather((self._not_finite, differ, self._is_unchanged()))
        self._not_finite = 0
        # before the batch counts as done and noise is drawn
        self._refuse_not_finite(sum(count for count, *_ in said))
        self.passes.finish()
        self._rows_differ = next((name for _, name, _ in said if name), "")
        self._unchanged = all(unchanged for *_, unchanged in said)

    def _refuse_not_finite(self, count: int) -> None:
        done = self.passes.done
        examples = len(self.passes.batch(done))
        # of few, as a secret sample may be, one should not decide whether the run goes on
        if 2 * count > max(examples, self._fewest):
            raise ConfigError(
                f"step {done}: the gradients of {count} of {examples} examples are not finite, or "
                f"longer than {_LONGEST:g}, and would count as zeros. Nothing of it was released. "
                "Look for NaN in the data, lower the learning rate, and begin another run."
            )

    def _refuse_changes(self) -> None:
        if self._settings != self._promised:
            raise ConfigError(
                f"max_grad_norm, noise_multiplier, batch size: are {self._settings}, and the "
                f"guarantee is for {self._promised}. They cannot change during a run."
            )
        if self.step_hook is not None:
            self.attach_step_hook()
        refuse_hooks(self.original_optimizer, self._guard)
        if [*map(id, self.params)] != [*map(id, self.trained)]:
            raise ConfigError(
                "optimizer: has other parameters than make_private was given. Add or freeze "
                "parameters before it."
            )
        refuse_batch_statistics(self._module.get_submodule("_module"))
        self._refuse_changed_model()

    def _refuse_changed_model(self) -> None:
        """Check that nothing but this optimizer changed what leaves with the model."""
        for released, p in zip(self._released, self.trained, strict=True):
            if not same_bits(released, p):
                self._refuse_changed(self._name(p))
        fixed = dict(fixed_tensors(self._module, self.trained))
        for name in sorted(fixed.keys() | self._fixed.keys()):
            before, current = self._fixed.get(name), fixed.get(name)
            if before is None or current is None or state_of([current]) != before[1]:
                self._refuse_changed(name)
            elif current.requires_grad:
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
        if any(p.grad_sample is not None for p in self.trained):
            raise ConfigError(GRAD_SAMPLE)
        taken: dict[nn.Parameter, list[Tensor]] = cast("Any", self._module).samples
        samples = [_per_example(p, taken.get(p, [])) for p in self.trained]
        counts = sorted({len(sample) for sample in samples if sample is not None})
        if not counts and self.passes.nobody:
            return 0
        if not counts:
            raise ConfigError(_NO_GRADIENT)
        examples, *others = counts
        if others:
            raise ConfigError(
                f"backward(): some parameters have per-example gradients of {examples} examples, "
                f"others of {others[-1]}. Every parameter that trains must be used once for each "
                "example."
            )
        self._refuse_other_gradients(samples, taken, first=not self._checked)
        self._checked = True
        factors = self._factors(samples)
        for part, sample in zip(torch.split(self._total, self._sizes), samples, strict=True):
            if sample is not None:
                part.add_(weighted_sum(sample, factors, wide=bool(self._fewest)).cpu())
        taken.clear()
        return examples

    def _refuse_other_gradients(
        self,
        samples: Sequence[Tensor | None],
        taken: Mapping[nn.Parameter, Sequence[Tensor]],
        *,
        first: bool,
    ) -> None:
        """Check in the first step of a process that its examples are all of the gradient."""
        for p, sample in zip(self.trained, samples, strict=True):
            if sample is None and (first or (p.grad is not None and bool(p.grad.any()))):
                raise ConfigError(_NO_GRADIENT)
            if sample is None or not first or p.grad is None or not len(sample):
                continue
            gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
            mean = torch.zeros_like(sample[0])
            for part in torch.split(sample, [len(passed) for passed in taken[p]]):
                mean += part.sum(0) / (len(part) if self.loss_reduction == "mean" else 1)
            longest = torch.linalg.vector_norm(sample, dim=1).max()
            # wide enough for another order of summation, too narrow for a second use of a weight
            if bool((gradient.reshape(-1) - mean).norm() > 1e-2 * longest + 1e-6):
                raise ConfigError(
                    f"{self._name(p)}: its gradient is not the mean of its per-example gradients. "
                    "It was used outside its layer, in a penalty for instance; or changed before "
                    "the step, by clip_grad_norm_ or a GradScaler for instance; or its per-example "
                    "gradients are wrong (see opacus.utils.per_sample_gradients_utils)."
                )

    def _name(self, parameter: nn.Parameter) -> str:
        return next(name for name, p in _named(self._module) if p is parameter)

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
        # at least the true norm, whatever float32 lost
        norms = squares.sqrt() * (1 + _ROUNDING * _COLUMNS)
        limit = self._grid.sum_clip_norm(self.max_grad_norm) * (1 - self._sum_error)
        return torch.where(norms > limit, limit / norms, 1.0)

    def _release(self, noise: Tensor | None) -> None:
        """Put the noised mean into the parameters' gradients; only the first process has noise."""
        scale = self._grid.step(self.max_grad_norm)
        # to whole numbers before noise is added: rounding after it could reveal low-order bits
        self._total.mul_(1 / scale).round_()
        self._processes.add_up(self._total)
        if self.loss_reduction == "mean":
            scale /= cast("int", self.expected_batch_size)
        flat = self._total.add_(0 if noise is None else noise).mul_(scale).float()
        self._processes.hand_on(flat)
        for p, part in zip(self.trained, torch.split(flat, self._sizes), strict=True):
            p.grad = part.view_as(p).to(device=p.device, dtype=p.dtype)
        self._total.zero_()


_NO_GRADIENT = (
    "optimizer.step(): a parameter has no per-example gradient. Call backward() on the loss of a "
    "batch first, without torch.compile; freeze parameters that the loss does not use "
    "(requires_grad=False)."
)


GRAD_SAMPLE = (
    "grad_sample: was set by something else than a backward pass. Per-example gradients are the "
    "optimizer's alone, so that no sum is of others. Scale the loss of an example instead."
)
_HOOKS = (
    "a hook on {}: would run between the noise and the release of a step, and no noise covers what "
    "it changes. Remove it; epsilon is known beforehand, and learning rates belong into scheduler."
)


def refuse_hooks(optimizer: torch.optim.Optimizer, watching: int | None = None) -> None:
    """Refuse code in an optimizer beside its own step, but for the hook ``watching``."""
    hooks = [v for name, v in vars(optimizer).items() if name.endswith("_hooks")]
    hooks += [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    step = vars(optimizer).get("step")
    replaced = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
    # schedulers of torch wrap step() by themselves
    if replaced or any(number != watching for registered in hooks for number in registered):
        raise ConfigError(_HOOKS.format(f"{type(optimizer).__name__}, or on all optimizers"))


def _per_example(parameter: nn.Parameter, parts: list[Tensor]) -> Tensor | None:
    """Join the gradients of each backward pass, shape (B, d); None if there are none."""
    if not parts:
        return None
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    if joined.shape[1:] != parameter.shape:
        raise ConfigError(
            f"backward(): per-example gradients of shape {list(joined.shape[1:])} for a parameter "
            f"of shape {list(parameter.shape)}."
        )
    return joined.detach().reshape(len(joined), parameter.numel()).to(parameter.dtype)


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module that Opacus wrapped, by the user's names."""
    return ((name.removeprefix("_module."), p) for name, p in module.named_parameters())


def fixed_tensors(
    module: nn.Module, trained: Sequence[nn.Parameter]
) -> Iterator[tuple[str, Tensor]]:
    """Yield what does not train: the other parameters, and all buffers."""
    trained_ids = {id(p) for p in trained}
    yield from ((name, p) for name, p in _named(module) if id(p) not in trained_ids)
    yield from ((name.removeprefix("_module."), b) for name, b in module.named_buffers())


_ROUNDING = 2.0**-24
_COLUMNS = 4096
_ROWS = 64
CLIP_NORMS = 1e-6, 1e6
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
    a norm by 2^-63 sqrt(d) at most, which is nothing beside the least clip norm and that error.
    """
    blocked = flat.shape[1] // _COLUMNS * _COLUMNS
    blocks = flat[:, :blocked].reshape(len(flat), blocked // _COLUMNS, _COLUMNS)
    remainder = torch.linalg.vector_norm(flat[:, blocked:], dim=1, keepdim=True)
    parts = [torch.linalg.vector_norm(blocks, dim=2), remainder]
    return torch.cat(parts, dim=1).double().square().sum(1)


def sampled_sum_error(examples: int) -> float:
    """Return how much shorter a gradient must be for the sum of a sample, of n examples at most.

    An example that is not drawn has no row of zeros in its place: all rows behind it move up, and
    are added in other groups. So products and sums are of float64, v = 2^-53: in any order, and in
    parts of any size, with an error of at most (n + 2) v times the sum of the lengths, n clip
    norms. With the example and without, that is twice as much.
    """
    return 4 * (examples + 2) * examples * 2.0**-53


def weighted_sum(flat: Tensor, factors: Tensor, *, wide: bool = False) -> Tensor:
    """Return the sum of the rows times their factors, float64, on the error of ``_FLOAT_SUM``.

    By numpy, or without a product of matrices: torch's may round to 10 bits or 7, as its settings
    say. ``wide`` sums, in float64, are on the error of ``sampled_sum_error``.
    """
    total = torch.zeros(flat.shape[1], dtype=torch.float64, device=flat.device)
    factors = factors.to(torch.float64 if wide else flat.dtype)
    for start in range(0, len(flat), _ROWS):
        rows, weights = flat[start : start + _ROWS], factors[start : start + _ROWS]
        rows = rows.to(factors.dtype)
        if flat.is_cpu:
            total += torch.from_numpy(weights.numpy() @ rows.numpy())
        else:
            total += (weights[:, None] * rows).sum(0)
    return total


_OWN = methods_of(FTRLOptimizer)
