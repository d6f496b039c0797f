"""Example-level DP-FTRL for an ordinary PyTorch loop, on Opacus's per-example gradients.

``FTRLEngine.make_private`` returns module, optimizer and loader, as Opacus's ``PrivacyEngine``
does; the loop stays the user's. The loader deals the examples in passes of one public order, so
that each example takes part once per pass and at the same place of it: how often and how far apart
is known before training, and so is epsilon, without any assumption about sampling.

A step sums per-example gradients, each rounded to whole numbers of the plan's public grid within
the clip norm, and adds the mechanism's noise, which is correlated over all steps. So every batch
that was dealt must become one step, in order. Whatever departs from that is refused.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler

from accounting import Mechanism, Participation, PrivacyReport, calibrate, checks
from accounting.checks import ConfigError
from accounting.mechanisms.by_name import MechanismChoice, MechanismName
from privpart.clip import at_least_tiny
from privpart.grid import Grid, noise_bits
from privpart.messages import ClientId
from privpart.noise.source import NoiseSource, SecretSource, SeededSource
from privpart.noise.stream import NoiseStream
from privpart.plan import PrivacyPlan
from privpart.run.folder import RunFolder, holds_a_run
from privpart.server import RoundCounts, load_optimizer_tensors, optimizer_tensors

GradSampleMode = Literal["hooks", "ghost"]
_SCHEMA = "privpart/example-level/1"


class FixedPasses(Sampler[list[int]]):
    """Batches of the same public order in every pass; one pass is one epoch.

    Args:
        examples: number of examples, >= 1.
        batch_size: examples per batch, >= 1; the last batch of a pass may be smaller.
        epochs: passes, >= 1.
        seed: public seed of the order, >= 0.

    Attributes:
        batches: number of batches of a pass.
        done: number of batches that became a step.
    """

    def __init__(self, examples: int, batch_size: int, epochs: int, seed: int = 0) -> None:
        examples = checks.count("examples", examples)
        size = checks.count("batch_size", batch_size)
        coins = torch.Generator().manual_seed(checks.count("order_seed", seed, minimum=0))
        order = torch.randperm(examples, generator=coins).tolist()
        self._batches = [order[i : i + size] for i in range(0, examples, size)]
        self.batches = len(self._batches)
        self.epochs = checks.count("epochs", epochs)
        self.done = 0
        self._dealt = 0

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
        self._refuse_open_batch()
        if self.done >= self.batches * self.epochs:
            raise ConfigError(
                f"all {self.epochs} epochs are done, and the guarantee covers no further one. Plan "
                "more epochs from the start."
            )
        for place in range(self.done % self.batches, self.batches):
            self._refuse_open_batch()
            self._dealt += 1
            yield self._batches[place]

    def _refuse_open_batch(self) -> None:
        if self._dealt != self.done:
            raise ConfigError(
                f"batch {self.done} was dealt, but no optimizer.step() followed: every example "
                "would move to another round than the guarantee assumes. Take one step per batch, "
                "with num_workers=0 if another loader reads ahead. This run cannot continue."
            )

    def finish(self, examples: int) -> None:
        """Count the batch that was dealt as done, after a backward pass of so many examples.

        Raises:
            ConfigError: no batch was dealt, or it has another number of examples.
        """
        if self._dealt != self.done + 1:
            raise ConfigError(
                "optimizer.step(): the loader has dealt no batch for it. Take one step per batch "
                "of the loader that make_private returned."
            )
        expected = len(self._batches[self.done % self.batches])
        if examples != expected:
            raise ConfigError(
                f"optimizer.step(): the per-example gradients are of {examples} examples, and the "
                f"batch has {expected}. Call backward() once per batch, on all of it and nothing "
                "else, and zero_grad() before it."
            )
        self.done += 1


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
        self._examples = 0
        self._halted = ""
        self._folder: RunFolder | None = None
        self._steps: _Steps | None = None
        self._scheduler: _Scheduler | None = None

    def begin(self, folder: RunFolder | None, steps: "_Steps", scheduler: "_Scheduler") -> None:
        """Commit every step to a run folder, if there is one; continue its run."""
        if folder is not None:
            folder.restore(steps)
        self._folder, self._steps, self._scheduler = folder, steps, scheduler

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401  torch's signature
        """Take one step with the noised sum; commit it, if the run has a folder.

        Raises:
            ConfigError: the step is not the one that the guarantee assumes.
            StorageError: the disk refused; nobody may use the parameters. Resume the run.
        """
        if closure is not None:
            raise ConfigError("optimizer.step(closure): would compute gradients more than once.")
        done = self.passes.done
        if not self.pre_step():
            return None
        self._halted = f"step {done} was not committed."
        found = self.original_optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step(self.passes.done)
        if self._folder is not None and self._steps is not None:
            examples = len(self._steps.cohort)
            self._folder.commit(self._steps, RoundCounts(examples, examples, 0))
        self._halted = ""
        return found

    def pre_step(self, closure: Any = None) -> bool:  # noqa: ANN401  Opacus's signature
        """Sum the clipped gradients, and unless the step is to be skipped, release them noised.

        Raises:
            ConfigError: the step is not the one that the guarantee assumes.
        """
        if self._halted:
            raise ConfigError(f"this run has stopped: {self._halted} Begin it again.")
        try:
            self._refuse_changes()
            self._examples += self._add_up()
            if self._check_skip_next_step():
                self._is_last_step_skipped = True
                return False
            self.passes.finish(self._examples)
        except Exception as error:
            self._halted = str(error)
            raise
        self._halted = "a step was interrupted after its noise was drawn."
        self._release(self.noise.next(out=self._drawn))
        if self.step_hook:
            self.step_hook(self)
        self._is_last_step_skipped = False
        self._examples = 0
        self._halted = ""
        return True

    def _refuse_changes(self) -> None:
        now = (float(self.max_grad_norm), float(self.noise_multiplier), self.expected_batch_size)
        if now != self._promised:
            raise ConfigError(
                f"max_grad_norm, noise_multiplier, batch size: are {now}, and the guarantee is for "
                f"{self._promised}. They cannot change during a run."
            )
        own = self.params
        if len(own) != len(self.trained) or any(
            p is not q for p, q in zip(own, self.trained, strict=True)
        ):
            raise ConfigError(
                "optimizer: has other parameters than make_private was given. Add or freeze "
                "parameters before it."
            )
        for name, layer in self._module.named_modules():
            if isinstance(layer, _BatchNorm) and layer.training:
                raise ConfigError(
                    f"layer {name!r} is a {type(layer).__name__} in training mode, which mixes the "
                    "examples of a batch. Call .eval() on it after module.train(), or replace it: "
                    "privpart.models.replace_batch_norm(module)."
                )

    def _add_up(self) -> int:
        """Add the clipped gradients to the sum, as integers; return the number of examples."""
        if not self.passes.done and not self._examples:
            self._refuse_other_gradients()
        samples = [_per_example(p) for p in self.trained]
        counts = {len(sample) for sample in samples}
        if len(counts) != 1:
            raise ConfigError(
                f"backward(): some parameters have per-example gradients of {min(counts)} "
                f"examples, others of {max(counts)}. Every parameter that trains must be used once "
                "for each example."
            )
        factors = self._factors(samples)
        start = 0
        for sample in samples:
            part = _sum(sample.reshape(len(sample), -1), factors)
            self._total[start : start + len(part)] += part.cpu()
            start += len(part)
        for p in self.trained:
            p.grad_sample = None
        return counts.pop()

    def _refuse_other_gradients(self) -> None:
        """Check in the first step that the module's own examples are all of the gradient."""
        for p in self.trained:
            sample = getattr(p, "grad_sample", None)
            if p.grad is None or not isinstance(sample, Tensor):
                continue
            mean = sample.sum(0) / (len(sample) if self.loss_reduction == "mean" else 1)
            longest = sample.reshape(len(sample), -1).norm(dim=1).max()
            if bool((p.grad - mean).norm() > 1e-2 * longest + 1e-6):
                name = next(n for n, q in self._module.named_parameters() if q is p)
                raise ConfigError(
                    f"{name.removeprefix('_module.')}: its gradient is not the mean of its "
                    "per-example gradients: it was used outside its layer, in a penalty for "
                    "instance, or loss_reduction is not the loss's, or its per-example gradients "
                    "are wrong (see privpart verify-gradients)."
                )

    def _factors(self, samples: Sequence[Tensor]) -> Tensor:
        """Return by how much each example's gradient is multiplied, shape (B,); zeros stay zeros.

        A gradient that is not finite is set to zeros.
        """
        squares = torch.zeros(len(samples[0]), dtype=torch.float64, device=samples[0].device)
        for sample in samples:
            squares += _squared_norms(sample.reshape(len(sample), -1))
        if not bool((finite := torch.isfinite(squares)).all()):
            for sample in samples:
                sample[~finite] = 0
            squares[~finite] = 0
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


class _GhostModule(GradSampleModuleFastGradientClipping):  # type: ignore[misc]
    """A module whose gradients are clipped by their norms alone, in a second backward pass.

    Attributes:
        examples: number of examples whose gradients were clipped since the last step.
        unclipped: whether a backward pass has not been clipped.
    """

    def __init__(self, module: nn.Module, *, clip_norm: float, loss_reduction: str) -> None:
        super().__init__(module, max_grad_norm=clip_norm, loss_reduction=loss_reduction)
        self.examples = 0
        self.unclipped = False

    def capture_backprops_hook(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        """Note that gradients of an unclipped loss have been added."""
        if self.hooks_enabled:
            self.unclipped = True
        super().capture_backprops_hook(*arguments, **options)

    def get_clipping_coef(self) -> Tensor:
        """Return the factor of each example's loss.

        Raises:
            ConfigError: a gradient is not finite; it cannot be left out of a sum.
        """
        norms = self.get_norm_sample()
        if not bool(torch.isfinite(norms).all()):
            raise ConfigError(
                "backward(): the gradient of an example is not finite, and ghost clipping cannot "
                "leave it out. Use grad_sample_mode='hooks', which counts it as zeros."
            )
        self.examples += len(norms)
        self.unclipped = False
        return torch.clamp(self.max_grad_norm / (norms * (1 + 1e-4) + 1e-30), max=1.0)


class _GhostOptimizer(FTRLOptimizer):
    """The same for ghost clipping: gradients come as a clipped sum."""

    def _add_up(self) -> int:
        module = cast("_GhostModule", self._module)
        if module.unclipped or not module.examples:
            raise ConfigError(
                "optimizer.step(): backward() was called on a loss that clips nothing. Use the "
                "criterion that make_private returned, once per batch."
            )
        start = 0
        for p in self.trained:
            if p.grad is not None:
                self._total[start : start + p.numel()] += p.grad.reshape(-1).double().cpu()
            start += p.numel()
        if not bool(torch.isfinite(self._total).all()):
            raise ConfigError("optimizer.step(): the sum of the gradients is not finite.")
        examples, module.examples = module.examples, 0
        return examples


def _per_example(parameter: nn.Parameter) -> Tensor:
    """Return a parameter's per-example gradients, shape (B, ...), of one or more backward passes.

    Raises:
        ConfigError: there are none.
    """
    found = getattr(parameter, "grad_sample", None)
    if isinstance(found, list) and found:
        return torch.cat(found)
    if not isinstance(found, Tensor):
        raise ConfigError(
            "optimizer.step(): a parameter has no per-example gradient. Call backward() on the "
            "loss of a batch first; freeze parameters that the loss does not use "
            "(requires_grad=False)."
        )
    return found


_ROUNDING = 2.0**-24
_COLUMNS = 4096
_ROWS = 64
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

    Of columns in blocks, in float32: float64 takes ten times as long.
    """
    whole = flat.shape[1] // _COLUMNS * _COLUMNS
    blocks = flat[:, :whole].reshape(len(flat), -1, _COLUMNS)
    parts = [torch.linalg.vector_norm(blocks, dim=2), flat[:, whole:].norm(dim=1, keepdim=True)]
    return torch.cat(parts, dim=1).double().square().sum(1)


def _sum(flat: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of the rows times their factors, float64, on the error of ``_FLOAT_SUM``."""
    total = torch.zeros(flat.shape[1], dtype=torch.float64, device=flat.device)
    factors = factors.to(flat.dtype)
    for start in range(0, len(flat), _ROWS):
        total += factors[start : start + _ROWS] @ flat[start : start + _ROWS]
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
        tensors = {"parameters": self.parameters, "random": torch.get_rng_state().to(torch.int32)}
        tensors |= {f"optimizer.{k}": t for k, t in optimizer_tensors(original).items()}
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
        load_optimizer_tensors(
            original, {name.removeprefix("optimizer."): tensor for name, tensor in own.items()}
        )
        for group, settings in zip(original.param_groups, values["groups"], strict=True):
            group.update(settings)
        self._scheduler.load_state_dict(values["scheduler"])
        torch.set_rng_state(random.to(torch.uint8))
        self._optimizer.passes.resume(values["round"])


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

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Dataset[Any],
        batch_size: int,
        epochs: int,
        max_grad_norm: float,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float | None = None,
        mechanism: str | MechanismChoice | Mechanism = "blt",
        grad_sample_mode: GradSampleMode = "hooks",
        criterion: nn.Module | None = None,
        loss_reduction: Literal["mean", "sum"] = "mean",
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
            dataset: map-style; its length is public.
            batch_size: examples per step, >= 1, and the public divisor of the sum.
            epochs: passes over the examples, >= 1.
            max_grad_norm: clip norm of one example's gradient, > 0.
            noise_multiplier: standard deviation of one i.i.d. coordinate that enters the mechanism
                / clip norm, > 0; or pass ``target_epsilon``.
            target_epsilon: least noise for this epsilon at ``delta``.
            delta: in (0, 1).
            mechanism: name, choice with options, or a mechanism for as many rounds as steps.
            grad_sample_mode: "hooks" keeps each example's gradient; "ghost" only their norms, in
                less memory and a second backward pass.
            criterion: loss module, for "ghost" only.
            loss_reduction: of the loss, "mean" or "sum" over the batch.
            order_seed: public seed of the order of the examples, >= 0.
            out: folder of the run; every step is committed to it before ``optimizer.step()``
                returns. None keeps nothing.
            resume: continue the run in ``out`` if it has begun, with the same arguments.
            population: name of the people in the budget book; needs ``out``.
            scheduler: of the optimizer's learning rates; ``optimizer.step()`` steps it, not the
                loop.
            scheduler_every: when: after each "step", or after the last step of each "epoch".
            loader: further options of ``DataLoader``, such as ``collate_fn``.

        Raises:
            ConfigError: a value out of range, or a module or optimizer that cannot be private.
        """
        if self._plan is not None:
            raise ConfigError("make_private was called before: its noise is for one run only.")
        if out is None and (resume or population is not None):
            raise ConfigError("resume, population: are about a run in a folder; pass out.")
        checks.choice("scheduler_every", scheduler_every, ("step", "epoch"))
        checks.choice("grad_sample_mode", grad_sample_mode, get_args(GradSampleMode))
        if (grad_sample_mode == "ghost") != (criterion is not None):
            raise ConfigError("criterion: needed for grad_sample_mode='ghost', and only for it.")
        if not isinstance(dataset, Sized):
            raise ConfigError("dataset: has no length; passes of a fixed order need one.")
        passes = FixedPasses(len(dataset), batch_size, epochs, order_seed)
        clip_norm = at_least_tiny(max_grad_norm)
        own = _mechanism(mechanism, passes.participation)
        z = _noise(own, passes.participation, noise_multiplier, target_epsilon, delta)
        trained = _trained(module, optimizer)
        dim = sum(p.numel() for p in trained)
        plan = PrivacyPlan(
            mechanism=own,
            participation=passes.participation,
            clip_norm=clip_norm,
            noise_multiplier=z,
            report_goal=batch_size,
            context=_context(module, len(dataset), order_seed, grad_sample_mode, loss_reduction),
        )
        self._passes = passes
        source = self._source(plan, module, out, resume=resume, delta=delta, population=population)
        bits = noise_bits(z, dim)
        stream = NoiseStream(own, dim=dim, stddev=2.0**bits, source=source)
        charge = (dim * own.rounds) ** 0.5 * stream.filter_error(epochs * 2.0**bits / z)
        grid = Grid.of(bits, z, dim, filter_charge=charge)
        ghost = grad_sample_mode == "ghost"
        wrapped = (
            _GhostModule(
                module,
                clip_norm=grid.sum_clip_norm(clip_norm),
                loss_reduction=loss_reduction,
            )
            if ghost
            else GradSampleModule(module, loss_reduction=loss_reduction)
        )
        private = (_GhostOptimizer if ghost else FTRLOptimizer)(
            optimizer,
            wrapped,
            passes,
            stream,
            grid,
            max_grad_norm=clip_norm,
            batch_size=batch_size,
            loss_reduction=loss_reduction,
        )
        self._plan = plan
        steps = _Scheduler(scheduler, 1 if scheduler_every == "step" else passes.batches)
        private.begin(self._folder, _Steps(plan, private, steps), steps)
        # a generator of its own: a loader draws from torch's as often as it is begun
        loader = {"generator": torch.Generator().manual_seed(0)} | loader
        made = wrapped, private, DataLoader(dataset, batch_sampler=passes, **loader)
        if criterion is None:
            return made
        return *made, DPLossFastGradientClipping(wrapped, private, criterion, loss_reduction)

    def _source(
        self,
        plan: PrivacyPlan,
        module: nn.Module,
        out: str | Path | None,
        *,
        resume: bool,
        delta: float | None,
        population: str | None,
    ) -> NoiseSource:
        """Return the source of the noise, of the run in ``out`` if there is one."""
        if out is None:
            return SecretSource() if self._seed is None else SeededSource(self._seed)
        if resume and holds_a_run(out):
            self._folder = RunFolder.open(out)
            if self._folder.plan.hash != plan.hash or self._folder.facts["seed"] != self._seed:
                self._folder.close()
                raise ConfigError(
                    f"{out}: was begun with another plan, module, data or seed. Pass the same as "
                    "then."
                )
            return self._folder.source()
        facts: dict[str, Any] = {"delta": delta, "unit": "example"}
        facts["parameters"] = [
            [name, list(p.shape)] for name, p in module.named_parameters() if p.requires_grad
        ]
        if population is not None:
            facts["population_name"] = population
        self._folder = RunFolder.create(out, plan, seed=self._seed, facts=facts)
        return self._folder.source()

    @property
    def epochs_left(self) -> int:
        """Passes of the loader that are left, the first of which may be the rest of one."""
        passes = self._of_run()[1]
        return -(-(passes.batches * passes.epochs - passes.done) // passes.batches)

    def epsilon(self, delta: float) -> float:
        """Return epsilon of the whole run at ``delta`` in (0, 1), before or after training."""
        return self.report(delta).epsilon

    def report(self, delta: float) -> PrivacyReport:
        """Return the guarantee of the whole run at ``delta`` in (0, 1), and its assumptions."""
        plan, _ = self._of_run()
        return plan.report(
            delta, noise_source="os" if self._seed is None else "seeded", unit="example"
        )

    def close(self) -> None:
        """Release the run folder for other processes; a run that is not complete can be resumed."""
        if self._folder is not None:
            self._folder.close()

    def _of_run(self) -> tuple[PrivacyPlan, FixedPasses]:
        if self._plan is None or self._passes is None:
            raise ConfigError("call make_private first: it fixes what the guarantee is for.")
        return self._plan, self._passes


def _context(module: nn.Module, *about: object) -> str:
    """Return a hash of all that was fixed beforehand: frozen part, order and the loss's form."""
    digest = hashlib.sha256(json.dumps(["privpart examples", *about]).encode())
    frozen = [(n, p) for n, p in module.named_parameters() if not p.requires_grad]
    for name, tensor in [*frozen, *module.named_buffers()]:
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    shapes = [[n, list(p.shape)] for n, p in module.named_parameters() if p.requires_grad]
    digest.update(json.dumps(shapes).encode())
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
    """Return the parameters that train, after checking that the optimizer has just these."""
    named = {n: p for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    seen: dict[int, str] = {}
    for name, p in named.items():
        if (other := seen.setdefault(id(p), name)) != name:
            raise ConfigError(
                f"{other} and {name} are one tensor: per-example gradients of tied parameters are "
                "wrong in Opacus. Freeze it, or untie the two."
            )
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if held != set(seen):
        extra, missing = len(held - set(seen)), [seen[i] for i in seen if i not in held]
        raise ConfigError(
            f"optimizer: lacks {', '.join(missing) or 'nothing'} of the module's parameters that "
            f"train, and has {extra} of no such parameter. Give it exactly those with "
            "requires_grad."
        )
    if not seen:
        raise ConfigError("module: no parameter trains (requires_grad).")
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
