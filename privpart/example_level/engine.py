"""Engine: makes module, optimizer and loader of an ordinary PyTorch loop private.

``FTRLEngine.make_private`` returns module, optimizer and loader, as Opacus's ``PrivacyEngine``
does; the loop stays the user's. The loader deals the examples in passes of one public order, so
that each example takes part once per pass and at the same place of it: how often and how far apart
is known before training, and so is epsilon, without any assumption about sampling. Or it deals
Poisson samples, drawn from the secret key of the noise, and epsilon is amplified: DP-SGD.

A step sums per-example gradients, each rounded to whole numbers of the plan's public grid within
the clip norm, and adds the mechanism's noise, which is correlated over all steps. So every batch
that was dealt must become one step, in order. Whatever departs from that is refused.
"""

import hashlib
import json
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from opacus.layers.dp_rnn import DPRNNBase
from opacus.validators import ModuleValidator
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from accounting import Mechanism, PoissonSampling, PrivacyReport, calibrate, checks
from accounting.calibrate import least_sampled_noise
from accounting.checks import ConfigError
from accounting.mechanisms import MechanismChoice
from privpart.example_level import keywords
from privpart.example_level.checkpoint import Checkpoints, refuse_schedulers
from privpart.example_level.dealing import Dealing
from privpart.example_level.gradients import WatchedModule
from privpart.example_level.loader import Loader, Passes, Rows, fixed_passes
from privpart.example_level.optimizer import CLIP_NORMS, FTRLOptimizer, fixed_tensors, refuse_hooks
from privpart.example_level.processes import Processes
from privpart.example_level.state import StepState, settings_of
from privpart.grid import refuse_noise
from privpart.noise.cohorts import SampledCohorts, ids_hash
from privpart.noise.source import NoiseSource, SecretSource, SeededSource
from privpart.noise.stream import noise_and_grid
from privpart.plan import PrivacyPlan
from privpart.run.begin import create_run
from privpart.run.folder import RunFolder, holds_a_run


class FTRLEngine:
    """Makes an ordinary PyTorch loop private by DP-FTRL, as Opacus does by DP-SGD.

    Args:
        accountant: "prv", Opacus's default; "gdp" is accepted of fixed passes, where it is exact.
        secure_mode: without a seed, noise is from the system's random numbers whatever this says.
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

    def __init__(
        self, *, accountant: str = "prv", secure_mode: bool = False, seed: int | None = None
    ) -> None:
        keywords.refuse_constructor(accountant, secure_mode, seeded=seed is not None)
        self._seed = None if seed is None else checks.count("seed", seed, minimum=0)
        self._method = accountant
        self._plan: PrivacyPlan | None = None
        self._examples = 0
        self._optimizer: FTRLOptimizer | None = None
        self._folder: RunFolder | None = None
        self._allows_large = False
        self._checkpoints = Checkpoints()
        self.accountant = Accountant(self)

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        epochs: int | None = None,
        max_grad_norm: float,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float | None = None,
        allow_large_delta: bool = False,
        mechanism: str | MechanismChoice | Mechanism | None = None,
        poisson_sampling: bool = False,
        grad_sample_mode: str = "hooks",
        loss_reduction: Literal["mean", "sum"] = "mean",
        batch_first: bool = True,
        order_seed: int | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        population: str | None = None,
        scheduler: LRScheduler | None = None,
        scheduler_every: Literal["step", "epoch"] = "step",
        **opacus: object,
    ) -> tuple[WatchedModule, FTRLOptimizer, Loader]:
        """Return module, optimizer and loader for the user's loop; epsilon is known from here on.

        Args:
            module: any network that Opacus takes; parameters with ``requires_grad`` train.
            optimizer: any ``torch.optim`` optimiser of exactly these parameters.
            data_loader: of a map-style data set, whose length is public. It must neither shuffle
                (unless examples are sampled) nor drop examples. Its batch size is the public
                divisor of the sum; of a sample, the expected size.
            epochs: passes over the examples, >= 1.
            max_grad_norm: clip norm of one example's gradient, 1e-6 to 1e6.
            noise_multiplier: standard deviation of one i.i.d. coordinate that enters the mechanism
                / clip norm, > 0; or pass ``target_epsilon``.
            target_epsilon: least noise for this epsilon at ``delta``.
            delta: in (0, 1), below 0.1 / number of examples; a warning says so if it is not.
            allow_large_delta: accepts a delta of 1 / number of examples or more, here and later;
                reports say that it is too large.
            mechanism: name, choice with options, or a mechanism for as many rounds as steps. None
                is "blt", and "independent" noise with ``poisson_sampling``.
            poisson_sampling: draws every batch from a secret key, each example on its own, and
                amplifies epsilon by that: DP-SGD, or a banded mechanism whose bands take turns.
                The claim is that nobody learns which examples were drawn.
            grad_sample_mode: "hooks", or "functorch": of layers of your own.
            loss_reduction: of the loss, over the batch; the divisor for a "sum" is 1.
            batch_first: whether the first dimension of the layers' inputs is the example, not the
                second.
            order_seed: public seed of the order of fixed passes, >= 0, by default 0.
            out: folder of the run; every step is committed to it before ``optimizer.step()``
                returns. None keeps nothing.
            resume: continue the run in ``out`` if it has begun, with the same arguments.
            population: name of the people in the budget book, where " (examples)" is added to it:
                costs of examples and of clients do not add up; needs ``out``.
            scheduler: of the optimizer's learning rates; ``optimizer.step()`` steps it, not the
                loop.
            scheduler_every: when: after each "step", or after the last step of each "epoch".
            opacus: other keywords of Opacus's method, with the value that means the same here,
                such as ``clipping="flat"``.

        Raises:
            ConfigError: a value out of range, or a module or optimizer that cannot be private.
        """
        processes = Processes()
        with processes.together():
            self._refuse_second(out, resume=resume, population=population)
            keywords.refuse_kinds(module, optimizer, data_loader)
            keywords.refuse_keywords(opacus, FTRLEngine.make_private.__annotations__)
            keywords.refuse_mode(grad_sample_mode)
            keywords.refuse_sampling(poisson_sampling, self._method, order_seed)
            keywords.refuse_switch("batch_first", batch_first)
            keywords.refuse_switch("allow_large_delta", allow_large_delta)
            checks.choice("loss_reduction", loss_reduction, ("mean", "sum"))
            _refuse_scheduler(scheduler, scheduler_every, optimizer)
            _refuse_clip_norm(max_grad_norm)
            dealing = Dealing.of(data_loader, epochs, order_seed, poisson=poisson_sampling)
            examples, self._allows_large = dealing.examples, allow_large_delta
            if delta is not None and (
                warning := checks.accept_delta(
                    delta, examples, allow_large=allow_large_delta, unit="example"
                )
            ):
                sys.stderr.write(f"privpart: warning: {warning}\n")
            chosen = dealing.mechanism(mechanism)
            z = _noise(chosen, dealing, noise_multiplier, target_epsilon, delta)
            trained = _trained(module, optimizer)
            dim = sum(p.numel() for p in trained)
            # Before a folder exists and is charged.
            refuse_noise(z, dim)
            if out is not None:
                settings_of(optimizer, scheduler)
            about_loss = grad_sample_mode, loss_reduction
            plan = PrivacyPlan(
                mechanism=chosen,
                participation=dealing.participation(chosen),
                clip_norm=float(max_grad_norm),
                noise_multiplier=z,
                report_goal=dealing.batch_size,
                minimum_cohort=0 if dealing.poisson else 1,
                sampling=dealing.sampling(chosen),
                context=_context(module, trained, examples, dealing.order_seed, *about_loss),
            )
        facts: dict[str, Any] = {
            "delta": delta,
            "unit": "example",
            "compares_rows": True,
            "parameters": _layout(module, trained),
            "population_size": examples,
        }
        if dealing.poisson:
            facts["population"] = ids_hash(range(examples))
        if population is not None:
            facts["population_name"] = f"{population} (examples)"
        processes.refuse_others(f"{plan.hash} {self._seed} {out} {resume} {facts}")
        interval = 1 if scheduler_every == "step" else dealing.batches
        rows = Rows()
        options = {"loss_reduction": loss_reduction, "batch_first": batch_first}
        options |= {"force_functorch": True} if grad_sample_mode == "functorch" else {}
        with processes.together():
            wrapped = _wrapped(module, rows, **options)
        try:
            # Of others than the first process, nothing draws from it.
            source: NoiseSource = SecretSource()
            batches: Sequence[Sequence[Any]] = ()
            with processes.together():
                if processes.is_first:
                    source = self._source(plan, out, facts, resume=resume)
                    batches = self._batches(plan, source, dealing)
            batches = processes.of_first(batches[:])
            passes = Passes(batches, dealing.epochs, rows, processes.rank, processes.count)
            noise, grid = noise_and_grid(plan, dim, z, source, 0)
            about = noise, grid, plan, loss_reduction, processes, examples, scheduler, interval
            private = FTRLOptimizer(optimizer, wrapped, passes, *about)
            state = StepState(plan, source, private)
            with processes.together():
                if self._folder is not None:
                    self._folder.restore(state)
            state.share(processes)
            private.begin(self._folder, state)
        except BaseException:
            # Hooks must not stay on the user's module.
            wrapped.cleanup()
            self.close()
            raise
        self._plan, self._examples, self._optimizer = plan, examples, private
        facts = {} if self._folder is None else self._folder.facts
        run_id = processes.of_first(facts.get("run_id", secrets.token_hex(16)))
        self._checkpoints = Checkpoints(wrapped, private, plan.hash, run_id)
        return (
            wrapped,
            private,
            Loader(data_loader.dataset, batch_sampler=passes, **_options(data_loader)),
        )

    def make_private_with_epsilon(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        **options: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Return what ``make_private`` returns, from the arguments that Opacus's method has."""
        return self.make_private(target_epsilon=target_epsilon, delta=target_delta, **options)

    def _refuse_second(
        self, out: str | Path | None, *, resume: bool, population: str | None
    ) -> None:
        if self._plan is not None:
            raise ConfigError("make_private was called before: its noise is for one run only.")
        if self._checkpoints.is_loaded:
            raise ConfigError(
                "load_checkpoint was called before: the weights cost what the run cost that they "
                "are of. Call make_private(out=..., resume=True) first, to continue that run."
            )
        keywords.refuse_switch("resume", resume)
        for name, value, kinds in (("out", out, (str, Path)), ("population", population, (str,))):
            if value is not None and (not isinstance(value, kinds) or not str(value).strip()):
                raise ConfigError(f"{name}: is a {type(value).__name__}; must be a name.")
        if out is None and (resume or population is not None):
            raise ConfigError("resume, population: are about a run in a folder; pass out.")

    def _batches(
        self, plan: PrivacyPlan, source: NoiseSource, dealing: Dealing
    ) -> Sequence[Sequence[Any]]:
        """Return the batches of all steps: fixed passes, or samples from the key of the noise."""
        if plan.sampling is None:
            one = fixed_passes(dealing.examples, dealing.batch_size, dealing.order_seed or 0)
            return one * dealing.epochs
        numbers = range(dealing.examples)
        if self._folder is None:
            return SampledCohorts(plan, numbers, source)
        return self._folder.sample(numbers)

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

    def save_checkpoint(
        self,
        *,
        path: Any,  # noqa: ANN401  what torch.save takes
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        noise_scheduler: None = None,
        grad_clip_scheduler: None = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Write weights, and state of the optimiser, after the last step; as Opacus's method.

        Nothing secret is in it, so that it can be published as the model can. What continues the
        run, its noise above all, stays in the folder ``out``.

        Args:
            path: what ``torch.save`` writes to.
            module: that ``make_private`` returned.
            optimizer: that it returned.
            noise_scheduler: not offered; the noise is planned over all steps.
            grad_clip_scheduler: not offered either.
            checkpoint_dict: further values, which ``load_checkpoint`` returns; plain ones.
            module_state_dict_kwargs: of ``module.state_dict``.
            torch_save_kwargs: of ``torch.save``.

        Raises:
            ConfigError: the run stopped in a step that was not committed, whose noise is not the
                one that a resumed run adds.
        """
        refuse_schedulers(noise_scheduler, grad_clip_scheduler)
        self._of_run()
        self._checkpoints.save(
            path,
            module,
            optimizer,
            dict(checkpoint_dict or {}),
            module_state_dict_kwargs or {},
            torch_save_kwargs or {},
        )

    def load_checkpoint(
        self,
        *,
        path: Any,  # noqa: ANN401  what torch.load takes
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        noise_scheduler: None = None,
        grad_clip_scheduler: None = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint and return its values; as Opacus's method, but no noise comes twice.

        To continue a run, call ``make_private(out=..., resume=True)`` first: its folder has the
        newest step, which this keeps. A checkpoint from before it takes nothing back. Into any
        other module, or into that of a complete run, the weights are loaded.

        Args:
            path: what ``torch.load`` reads; never unpickled.
            module: whose weights to load.
            optimizer: that ``make_private`` returned; None for the weights alone.
            noise_scheduler: not offered.
            grad_clip_scheduler: not offered.
            module_load_dict_kwargs: of ``module.load_state_dict``.
            torch_load_kwargs: of ``torch.load``.

        Raises:
            ConfigError: it is of another run, of a later step, or of an earlier one of this
                process; or no checkpoint of this engine.
        """
        refuse_schedulers(noise_scheduler, grad_clip_scheduler)
        return self._checkpoints.load(
            path, module, optimizer, module_load_dict_kwargs or {}, torch_load_kwargs or {}
        )

    def validate(self, *, module: nn.Module, optimizer: object, data_loader: object) -> None:
        """Raise ConfigError for a layer that ``make_private`` refuses, as Opacus's method does."""
        del optimizer, data_loader  # Opacus looks at the module alone, too
        keywords.refuse_layers(module)

    def is_compatible(self, *, module: nn.Module, optimizer: object, data_loader: object) -> bool:
        """Return whether ``validate`` raises nothing."""
        try:
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        except ConfigError:
            return False
        return True

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Return a copy whose layers have per-example gradients, by Opacus's ``ModuleValidator``.

        An LSTM becomes a DPLSTM of the same weights, for instance, and a BatchNorm a GroupNorm.
        """
        fixed: nn.Module = ModuleValidator.fix(module)
        keywords.refuse_layers(fixed)
        return fixed

    @property
    def epochs_left(self) -> int:
        """Passes of the loader that are left, the first of which may be the rest of one."""
        passes = self._of_run()[1].passes
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
        plan, examples = self._of_run()[0], self._examples
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

    def _of_run(self) -> tuple[PrivacyPlan, FTRLOptimizer]:
        if self._plan is None or self._optimizer is None:
            raise ConfigError("call make_private first: it fixes what the guarantee is for.")
        return self._plan, self._optimizer


class Accountant:
    """What Opacus's loops read of their engine's accountant, for a guarantee of the whole run."""

    def __init__(self, engine: FTRLEngine) -> None:
        self._engine = engine

    def get_epsilon(self, delta: float) -> float:
        """Return epsilon of the whole run at ``delta`` in (0, 1), before it and after it."""
        return self._engine.epsilon(delta)

    def mechanism(self) -> str:
        """Return the name of the noise's mechanism, such as "blt"."""
        return self._engine._of_run()[0].mechanism.name

    def __len__(self) -> int:
        """Return the number of steps that were taken."""
        return 0 if self._engine._optimizer is None else self._engine._optimizer.passes.done

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """Noise multiplier, sampling probability and number of the steps that were taken.

        Raises:
            ConfigError: the noise is correlated, or nothing is sampled; no such list gives epsilon.
        """
        plan, sampling = self._engine._of_run()[0], self._engine._of_run()[0].sampling
        if not isinstance(sampling, PoissonSampling) or plan.mechanism.name != "independent":
            raise ConfigError(
                "accountant.history: noise multipliers and sampling probabilities give no epsilon "
                "of correlated noise or fixed passes; see FTRLEngine.report(delta)."
            )
        return [(plan.noise_multiplier, sampling.probability, len(self))] if len(self) else []

    def state_dict(self) -> dict[str, Any]:
        """Return mechanism and number of steps."""
        return {"mechanism": self.mechanism(), "steps": len(self)}


def _refuse_scheduler(
    scheduler: LRScheduler | None, scheduler_every: str, optimizer: torch.optim.Optimizer
) -> None:
    checks.choice("scheduler_every", scheduler_every, ("step", "epoch"))
    given, kind = scheduler is not None, type(scheduler).__name__
    checks.refuse_first(
        {
            f"scheduler: is a {kind}; must be one of torch.optim.lr_scheduler.": (
                given and not isinstance(scheduler, LRScheduler)
            ),
            "scheduler_every: is about a scheduler; pass one, or leave it out.": (
                not given and scheduler_every != "step"
            ),
            "scheduler: ReduceLROnPlateau follows a metric, which no epsilon covers. Use one that "
            "counts steps.": isinstance(scheduler, ReduceLROnPlateau),
            "scheduler: is of another optimizer. Make it from the one that you pass.": (
                getattr(scheduler, "optimizer", optimizer) is not optimizer
            ),
            f"scheduler: a {kind} does not count its steps. Use one that does, such as "
            "SequentialLR or LambdaLR.": given and not hasattr(scheduler, "last_epoch"),
        }
    )


_OF_LOADER = (
    *("collate_fn", "multiprocessing_context", "num_workers", "persistent_workers"),
    *("pin_memory", "prefetch_factor", "timeout", "worker_init_fn"),
)


def _refuse_clip_norm(max_grad_norm: object) -> None:
    if isinstance(max_grad_norm, list | tuple):
        raise ConfigError(
            "max_grad_norm: is one number, for all trained parameters jointly. Clip norms by layer "
            "are not offered; their root of the sum of squares bounds the same."
        )
    norm = checks.positive("max_grad_norm", max_grad_norm)  # type: ignore[arg-type]
    least, most = CLIP_NORMS
    if not least <= norm <= most:
        raise ConfigError(f"max_grad_norm={norm:g}: must be {least:g} to {most:g}. Scale the loss.")


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


def _noise(
    mechanism: Mechanism,
    dealing: Dealing,
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
    if (sampling := dealing.sampling(mechanism)) is None:
        return calibrate(mechanism, dealing.fixed, target_epsilon=target_epsilon, delta=delta)
    return least_sampled_noise(mechanism, sampling, target_epsilon=target_epsilon, delta=delta)


def _trained(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters that train, in the optimizer's order, after checking both."""
    _refuse_unsupported(module, optimizer)
    named = {n: p for n, p in _of_layers(module) if p.requires_grad}
    first_names: dict[int, str] = {}
    for name, p in named.items():
        first_names.setdefault(id(p), name)
        if p.dtype is not torch.float32:
            advice = "train in float32 (module.float()), whose rounding the clip norm allows for"
            if p.is_complex():
                advice = (
                    "hold nn.Parameter(torch.view_as_real(w)); torch.view_as_complex in forward"
                )
            raise ConfigError(
                f"{name}: is {p.dtype}; {advice}. torch.autocast may still compute in less."
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
    refuse_hooks(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("optimizer: LBFGS computes gradients more than once per step.")
    differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    if differentiable or isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            "optimizer: SparseAdam and differentiable=True take no step with a dense, noised "
            "gradient. Use another one."
        )
    keywords.refuse_layers(module)
