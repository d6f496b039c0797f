"""Engine: makes module, optimizer and loader of an ordinary PyTorch loop private.

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
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from opacus.layers.dp_rnn import DPRNNBase
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from accounting import Mechanism, Participation, PrivacyReport, calibrate, checks
from accounting.checks import ConfigError
from accounting.mechanisms import MechanismChoice
from privpart.example_level.gradients import WatchedModule
from privpart.example_level.loader import FixedPasses, Loader, Rows
from privpart.example_level.optimizer import (
    MAX_CLIP_NORM,
    MIN_CLIP_NORM,
    FTRLOptimizer,
    fixed_tensors,
    refuse_hooks,
)
from privpart.example_level.state import StepState, settings_of
from privpart.grid import refuse_noise
from privpart.model import refuse_batch_statistics
from privpart.noise.source import NoiseSource, SecretSource, SeededSource
from privpart.noise.stream import noise_and_grid
from privpart.plan import PrivacyPlan
from privpart.run.begin import create_run
from privpart.run.folder import RunFolder, holds_a_run


class FTRLEngine:
    """Makes an ordinary PyTorch loop private by DP-FTRL, as Opacus does by DP-SGD.

    Args:
        seed: takes the noise from a seed, for simulations: the run is then not private. None draws
            a secret key from the operating system.

    >>> import torch
    >>> from torch import nn
    >>> net, data = nn.Linear(4, 2), torch.utils.data.TensorDataset(torch.ones(64, 4))
    >>> engine, loader = FTRLEngine(), torch.utils.data.DataLoader(data, batch_size=16)
    >>> module, optimizer, loader = engine.make_private(
    ...     module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), data_loader=loader,
    ...     epochs=2, max_grad_norm=1.0, target_epsilon=4.0, delta=1e-5)
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
        data_loader: DataLoader[Any],
        epochs: int,
        max_grad_norm: float,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float | None = None,
        allow_large_delta: bool = False,
        mechanism: str | MechanismChoice | Mechanism = "blt",
        loss_reduction: Literal["mean", "sum"] = "mean",
        batch_first: bool = True,
        order_seed: int = 0,
        out: str | Path | None = None,
        resume: bool = False,
        population: str | None = None,
        scheduler: LRScheduler | None = None,
        scheduler_every: Literal["step", "epoch"] = "step",
    ) -> tuple[WatchedModule, FTRLOptimizer, Loader]:
        """Return module, optimizer and loader for the user's loop; epsilon is known from here on.

        Args:
            module: any network that Opacus takes; parameters with ``requires_grad`` train.
            optimizer: any ``torch.optim`` optimiser of exactly these parameters.
            data_loader: of a map-style data set, whose length is public. It must neither shuffle
                nor drop examples. Its batch size is the public divisor of the sum.
            epochs: passes over the examples, >= 1.
            max_grad_norm: clip norm of one example's gradient, 1e-6 to 1e6.
            noise_multiplier: standard deviation of one i.i.d. coordinate that enters the mechanism
                / clip norm, > 0; or pass ``target_epsilon``.
            target_epsilon: least noise for this epsilon at ``delta``.
            delta: in (0, 1), below 0.1 / number of examples; a warning says so if it is not.
            allow_large_delta: accepts a delta of 1 / number of examples or more, here and later;
                reports say that it is too large.
            mechanism: name, choice with options, or a mechanism for as many rounds as steps.
            loss_reduction: of the loss, over the batch.
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

        Raises:
            ConfigError: a value out of range, or a module or optimizer that cannot be private.
        """
        if self._plan is not None:
            raise ConfigError("make_private was called before: its noise is for one run only.")
        if out is None and (resume or population is not None):
            raise ConfigError("resume, population: are about a run in a folder; pass out.")
        checks.choice("loss_reduction", loss_reduction, ("mean", "sum"))
        _refuse_scheduler(scheduler, scheduler_every, optimizer)
        size = _batch_size(data_loader)
        # The order is public and fixed before anything is drawn.
        passes = FixedPasses(len(data_loader.dataset), size, epochs, order_seed)  # type: ignore[arg-type]
        if not MIN_CLIP_NORM <= checks.positive("max_grad_norm", max_grad_norm) <= MAX_CLIP_NORM:
            raise ConfigError(
                f"max_grad_norm={max_grad_norm:g}: must be {MIN_CLIP_NORM:g} to "
                f"{MAX_CLIP_NORM:g}. Scale the loss."
            )
        examples, self._allows_large = len(passes.order), allow_large_delta
        if delta is not None and (
            warning := checks.accept_delta(
                delta, examples, allow_large=allow_large_delta, unit="example"
            )
        ):
            sys.stderr.write(f"privpart: warning: {warning}\n")
        chosen = _mechanism(mechanism, passes.participation)
        z = _noise(chosen, passes.participation, noise_multiplier, target_epsilon, delta)
        trained = _trained(module, optimizer)
        dim = sum(p.numel() for p in trained)
        # Before a folder exists and is charged.
        refuse_noise(z, dim)
        if out is not None:
            settings_of(optimizer, scheduler)
        plan = PrivacyPlan(
            mechanism=chosen,
            participation=passes.participation,
            clip_norm=float(max_grad_norm),
            noise_multiplier=z,
            report_goal=size,
            context=_context(module, trained, examples, order_seed, "hooks", loss_reduction),
        )
        facts: dict[str, Any] = {
            "delta": delta,
            "unit": "example",
            "compares_rows": True,
            "parameters": _layout(module, trained),
            "population_size": examples,
        }
        if population is not None:
            facts["population_name"] = f"{population} (examples)"
        dealt = Loader(data_loader.dataset, batch_sampler=passes, **_options(data_loader))
        interval = 1 if scheduler_every == "step" else passes.batches
        wrapped = _wrapped(
            module, passes.rows, loss_reduction=loss_reduction, batch_first=batch_first
        )
        try:
            source = self._source(plan, out, facts, resume=resume)
            noise, grid = noise_and_grid(plan, dim, z, source, 0)
            about = noise, grid, plan, loss_reduction, scheduler, interval
            private = FTRLOptimizer(optimizer, wrapped, passes, *about)
            private.begin(self._folder, StepState(plan, source, private))
        except BaseException:
            # Hooks must not stay on the user's module.
            wrapped.cleanup()
            self.close()
            raise
        self._plan, self._passes = plan, passes
        return wrapped, private, dealt

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
            self._folder = create_run(out, plan, seed=self._seed, own=facts)
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

    def close(self) -> None:
        """Release the run folder for other processes; a run that is not complete can be resumed."""
        if self._folder is not None:
            self._folder.close()

    def _of_run(self) -> tuple[PrivacyPlan, FixedPasses]:
        if self._plan is None or self._passes is None:
            raise ConfigError("call make_private first: it fixes what the guarantee is for.")
        return self._plan, self._passes


def _refuse_scheduler(
    scheduler: LRScheduler | None, scheduler_every: str, optimizer: torch.optim.Optimizer
) -> None:
    checks.choice("scheduler_every", scheduler_every, ("step", "epoch"))
    if scheduler is None and scheduler_every != "step":
        raise ConfigError("scheduler_every: is about a scheduler; pass one, or leave it out.")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "scheduler: ReduceLROnPlateau follows a metric, which no epsilon covers. Use one that "
            "counts steps."
        )
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise ConfigError("scheduler: is of another optimizer. Make it from the one that you pass.")
    if scheduler is not None and not hasattr(scheduler, "last_epoch"):
        raise ConfigError(
            f"scheduler: a {type(scheduler).__name__} does not count its steps. Use one that does, "
            "such as SequentialLR or LambdaLR."
        )


_OF_LOADER = (
    "collate_fn",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)


def _batch_size(loader: DataLoader[Any]) -> int:
    """Return the loader's batch size; refuse a loader that has an order of its own."""
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise ConfigError(
            "data_loader: its data set has no length or numbers; use a map-style one."
        )
    if loader.batch_size is None or not isinstance(loader.sampler, SequentialSampler):
        raise ConfigError(
            "data_loader: shuffles, or has a sampler of its own. The passes have one fixed order, "
            "which order_seed shuffles once: make it with batch_size alone."
        )
    if loader.drop_last or not getattr(loader, "in_order", True):
        raise ConfigError(
            "data_loader: leaves examples out, or hands batches over in any order; make it without "
            "drop_last and in_order."
        )
    return loader.batch_size


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what a loader does besides choosing the examples of a batch."""
    values = {name: getattr(loader, name) for name in _OF_LOADER}
    # A generator of its own: a loader draws from torch's as often as it is begun.
    values["generator"] = loader.generator or torch.Generator().manual_seed(0)
    return {name: value for name, value in values.items() if value is not None}


def _wrapped(module: nn.Module, rows: Rows, **options: Any) -> WatchedModule:  # noqa: ANN401
    """Return the module with Opacus's hooks; refuse one that has them, or that Opacus refuses."""
    try:
        return WatchedModule(module, rows, **options)
    except (NotImplementedError, ValueError) as error:
        why = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"module: Opacus does not take it: {why}. A module that was made private before is "
            "not made private again; see opacus.validators.ModuleValidator.fix for layers."
        ) from None


def _context(module: nn.Module, trained: Sequence[nn.Parameter], *about: object) -> str:
    """Return a hash of all that was fixed beforehand: frozen part, order and the loss's form."""
    digest = hashlib.sha256(json.dumps(["privpart examples", *about]).encode())
    # a resumed run must continue with the same frozen part
    for name, tensor in fixed_tensors(module, trained):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    digest.update(json.dumps(_layout(module, trained)).encode())
    return digest.hexdigest()


def _layout(module: nn.Module, trained: Sequence[nn.Parameter]) -> list[tuple[str, list[int]]]:
    names = {id(p): name for name, p in module.named_parameters()}
    return [(names[id(p)], list(p.shape)) for p in trained]


def _mechanism(chosen: str | MechanismChoice | Mechanism, order: Participation) -> Mechanism:
    if isinstance(chosen, Mechanism):
        if chosen.groups is not None:
            raise ConfigError("mechanism: has groups; every step trains all parameters.")
        if chosen.rounds != order.rounds:
            raise ConfigError(
                f"mechanism: is for {chosen.rounds} rounds; these epochs have {order.rounds} steps."
            )
        return chosen
    if isinstance(chosen, str):
        chosen = MechanismChoice.parse(chosen)
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
    first_names: dict[int, str] = {}
    for name, p in named.items():
        if (other := first_names.setdefault(id(p), name)) != name:
            raise ConfigError(
                f"{other} and {name} are one tensor: per-example gradients of tied parameters are "
                "wrong in Opacus. Freeze it, or untie the two."
            )
        if p.dtype is not torch.float32:
            raise ConfigError(
                f"{name}: is {p.dtype}; train in float32 (module.float()), whose rounding the clip "
                "norm allows for. torch.autocast may still compute in less."
            )
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    optimized = {id(p) for p in trained}
    if optimized != set(first_names):
        extra = len(optimized - set(first_names))
        missing = [name for i, name in first_names.items() if i not in optimized]
        raise ConfigError(
            f"optimizer: lacks {', '.join(missing) or 'nothing'} of the module's parameters that "
            f"train, and has {extra} of no such parameter. Give it exactly those with "
            "requires_grad."
        )
    if not any(p.numel() for p in named.values()):
        raise ConfigError("module: no parameter trains (requires_grad).")
    if len({p.device for p in named.values()}) > 1:
        raise ConfigError("module: its parameters are on several devices; use one.")
    return trained


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
    refuse_hooks(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("optimizer: LBFGS computes gradients more than once per step.")
    differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    if differentiable or isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            "optimizer: SparseAdam and differentiable=True take no step with a dense, noised "
            "gradient. Use another one."
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise ConfigError("torch.distributed: is in use; DP-FTRL on examples runs in one process.")
    refuse_batch_statistics(module)
