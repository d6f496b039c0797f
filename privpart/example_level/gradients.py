"""Gradients: Opacus's modules, whose calls are noted, and ghost clipping by norms alone."""

from itertools import chain
from typing import Any, cast

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from accounting.checks import ConfigError
from privpart.example_level.loader import Rows, batch_leaves, is_strided
from privpart.example_level.optimizer import GRAD_SAMPLE, FTRLOptimizer

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Watched:
    """A module that Opacus wrapped, of whose layers each use of a kept input is noted."""

    rows: Rows
    first_hooks: set[int]
    hooks_enabled: bool

    def watch(self, rows: Rows) -> None:
        """Begin to note; hooks that are added to layers from now on are a fault."""
        self.rows, self.first_hooks = rows, self._hooks()

    def _hooks(self) -> set[int]:
        """Return the numbers of the hooks of all layers, and of those for all modules."""
        layers = [
            getattr(layer, name) for layer in cast("nn.Module", self).modules() for name in _HOOKS
        ]
        return set(
            chain(*layers, *(getattr(torch.nn.modules.module, f"_global{n}") for n in _HOOKS))
        )

    def _compare_hooks(self) -> None:
        if self._hooks() != self.first_hooks:
            self.rows.faults.add("hooks")

    def forward(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        """Call the user's network."""
        with self.rows.calling((arguments, options)) as call:
            output = super().forward(*arguments, **options)  # type: ignore[misc]
        self._compare_hooks()
        call.outputs += [leaf for leaf in batch_leaves(output) if is_strided(leaf)]
        return output

    def capture_activations_hook(self, module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ANN401
        """Note which call of the network a layer's input is of, and when its gradient comes."""
        if self.hooks_enabled and module.training and torch.is_grad_enabled():
            use, leaves = self.rows.capture(module), filter(is_strided, batch_leaves(output))
            if used := [leaf for leaf in leaves if leaf.requires_grad]:
                register_multi_grad_hook(used, lambda _: self.hooks_enabled and use(), mode="any")
        super().capture_activations_hook(module, inputs, output)  # type: ignore[misc]

    def capture_backprops_hook(self, module: nn.Module, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        """Refuse gradients of a pass whose inputs were not kept."""
        if self.hooks_enabled:
            self._compare_hooks()
            self.rows.backprop(module)
            # its gradients would be taken with an earlier input
            if not module.training:
                raise ConfigError(
                    f"backward(): a {type(module).__name__} whose parameters train is not in "
                    "training mode, and Opacus keeps inputs only there. Call module.train() before "
                    "a batch."
                )
        super().capture_backprops_hook(module, *arguments, **options)  # type: ignore[misc]


class HooksModule(_Watched, GradSampleModule):  # type: ignore[misc]
    """A module whose per-example gradients are kept.

    Attributes:
        samples: those of each backward pass, by parameter. They are taken from the parameters, so
            that nothing can exchange them or write to them before the step.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:  # noqa: ANN401
        super().__init__(module, **options)
        self.samples: dict[nn.Parameter, list[Tensor]] = {}

    def set_grad_sample_to_none(self) -> None:
        """Forget the gradients since the last step."""
        super().set_grad_sample_to_none()
        self.samples.clear()

    def capture_backprops_hook(self, module: nn.Module, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        """Take the per-example gradients from the parameters."""
        super().capture_backprops_hook(module, *arguments, **options)
        parameters: list[Any] = [*module.parameters()] if self.hooks_enabled else []
        for p in parameters:
            sample = getattr(p, "grad_sample", None)
            if isinstance(sample, list):
                raise ConfigError(GRAD_SAMPLE)
            if sample is not None:
                self.samples.setdefault(p, []).append(sample)
                p.grad_sample = None


class GhostModule(_Watched, GradSampleModuleFastGradientClipping):  # type: ignore[misc]
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
        self.unclipped |= self.hooks_enabled
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
            # norms of this batch must not clip another one
            p._norm_sample = None
        return torch.clamp(self.max_grad_norm / (norms * (1 + 1e-4) + 1e-30), max=1.0)


class _GhostLoss:
    """The loss of a batch, which can only be looked at and differentiated, once per step.

    Opacus's can be added to other terms, whose gradients nothing would clip.
    """

    def __init__(self, module: GhostModule, parameters: list[nn.Parameter], losses: Tensor) -> None:
        self._module, self._parameters, self._losses = module, parameters, losses

    def detach(self) -> Tensor:
        """Return the loss without its graph."""
        losses = self._losses.detach()
        return losses.mean() if self._module.loss_reduction == "mean" else losses.sum()

    def item(self) -> float:
        """Return the loss."""
        return float(self.detach())

    def backward(self) -> None:
        """Add the clipped gradients of the batch's examples to the parameters' gradients.

        Raises:
            ConfigError: called before in this step, or the losses are not one for each example.
        """
        module, losses = self._module, self._losses
        # autograd would apply it to the clipped sum
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
        total = losses.mean() if module.loss_reduction == "mean" else losses.sum()
        # first pass: norms only; its gradients are dropped
        torch.autograd.backward(total, retain_graph=True)
        for p in self._parameters:
            p.grad = None
        # second pass: the gradient of the weighted losses is the clipped sum
        factors = module.get_clipping_coef()
        if not module.compared:
            self._compare(module.per_sample_gradient_norms)
        if factors.shape != losses.shape:
            raise ConfigError(
                f"criterion: gave {len(losses)} losses for {len(factors)} examples. Its "
                "reduction='none' must give a row for each example."
            )
        module.disable_hooks()
        try:
            torch.autograd.backward((factors.to(losses.device) * losses).sum())
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
            # two of a batch: each takes a backward pass of its own
            for i in {0, len(self._losses) - 1} if len(norms) == len(self._losses) else ():
                gradients = torch.autograd.grad(
                    self._losses[i], self._parameters, retain_graph=True, allow_unused=True
                )
                norm = torch.stack([g.norm() for g in gradients if g is not None]).norm()
                if not bool((norm - norms[i]).abs() <= 1e-2 * norms.max() + 1e-6):
                    raise ConfigError(
                        f"backward(): the gradient of an example has norm {float(norm):g} alone "
                        f"and {float(norms[i]):g} by Opacus in its batch. A parameter is used "
                        "outside its layer, or examples are mixed (see privpart audit gradients)."
                    )
        finally:
            module.enable_hooks()
        module.compared = True


class GhostCriterion:
    """The user's loss module, which gives losses that clip."""

    def __init__(self, module: GhostModule, parameters: list[nn.Parameter], criterion: Any) -> None:  # noqa: ANN401
        if getattr(criterion, "reduction", None) != module.loss_reduction:
            raise ConfigError(
                f"criterion: needs reduction={module.loss_reduction!r}, as loss_reduction says, "
                "and must give a loss for each example with reduction='none'."
            )
        self._module, self._parameters, self._criterion = module, parameters, criterion

    def __call__(self, *arguments: Any, **options: Any) -> _GhostLoss:  # noqa: ANN401
        """Return the loss of a batch, whose ``backward`` clips."""
        # one loss per example, by the user's own module
        before, self._criterion.reduction = self._criterion.reduction, "none"
        try:
            output = self._criterion(*arguments, **options)
        finally:
            self._criterion.reduction = before
        rows = output.reshape(len(output), -1)
        losses = rows.mean(1) if before == "mean" else rows.sum(1)
        return _GhostLoss(self._module, self._parameters, losses)


class GhostOptimizer(FTRLOptimizer):
    """The same for ghost clipping: gradients come as a clipped sum."""

    def _add_up(self) -> int:
        module = cast("GhostModule", self._module)
        besides = any(p.grad is not None and bool(p.grad.any()) for p in self.trained)
        if module.unclipped or besides or not module.examples:
            raise ConfigError(
                "optimizer.step(): backward() was called on a loss that clips nothing. Use the "
                "criterion that make_private returned, once per batch."
            )
        start = 0
        for p, summed in zip(self.trained, module.summed, strict=True):
            if summed is not None:
                dense = summed.to_dense() if summed.is_sparse else summed
                self._total[start : start + p.numel()] += dense.reshape(-1).double().cpu()
            start += p.numel()
        if not bool(torch.isfinite(self._total).all()):
            raise ConfigError("optimizer.step(): the sum of the gradients is not finite.")
        examples, module.examples = module.examples, 0
        return examples
