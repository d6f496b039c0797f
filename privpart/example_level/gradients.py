"""Gradients: Opacus's per-example gradients, of which each use of a kept input is noted."""

from itertools import chain
from typing import Any

import torch
from opacus import GradSampleModule
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from accounting.checks import ConfigError
from privpart.example_level.loader import Rows, batch_leaves, is_strided
from privpart.example_level.optimizer import GRAD_SAMPLE

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class WatchedModule(GradSampleModule):  # type: ignore[misc]  # Opacus is untyped
    """The user's network, whose per-example gradients are kept for the optimizer alone.

    Hooks that are added to layers after it was made are a fault.

    Attributes:
        samples: gradients of each backward pass, by parameter. They are taken from the parameters,
            so that nothing can exchange them or write to them before the step.
    """

    def __init__(self, module: nn.Module, rows: Rows, **options: Any) -> None:  # noqa: ANN401
        super().__init__(module, **options)
        self.samples: dict[nn.Parameter, list[Tensor]] = {}
        self._rows = rows
        self._first_hooks = self._hooks()

    def _hooks(self) -> set[int]:
        """Return the numbers of the hooks of all layers, and of those for all modules."""
        layers = [getattr(layer, name) for layer in self.modules() for name in _HOOKS]
        return set(
            chain(*layers, *(getattr(torch.nn.modules.module, f"_global{n}") for n in _HOOKS))
        )

    def _compare_hooks(self) -> None:
        if self._hooks() != self._first_hooks:
            self._rows.faults.add("hooks")

    def forward(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        """Call the user's network."""
        with self._rows.calling((arguments, options)) as call:
            output = super().forward(*arguments, **options)
        self._compare_hooks()
        call.outputs += [leaf for leaf in batch_leaves(output) if is_strided(leaf)]
        return output

    def set_grad_sample_to_none(self) -> None:
        """Forget the gradients since the last step."""
        super().set_grad_sample_to_none()
        self.samples.clear()

    def capture_activations_hook(self, module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ANN401
        """Note which call of the network a layer's input is of, and when its gradient comes."""
        if self.hooks_enabled and module.training and torch.is_grad_enabled():
            use, leaves = self._rows.capture(module), filter(is_strided, batch_leaves(output))
            if used := [leaf for leaf in leaves if leaf.requires_grad]:
                register_multi_grad_hook(used, lambda _: self.hooks_enabled and use(), mode="any")
        super().capture_activations_hook(module, inputs, output)

    def capture_backprops_hook(self, module: nn.Module, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        """Take the per-example gradients from the parameters; refuse those of inputs not kept."""
        if not self.hooks_enabled:
            return
        self._compare_hooks()
        self._rows.backprop(module)
        # Its gradients would be taken with an earlier input.
        if not module.training:
            raise ConfigError(
                f"backward(): a {type(module).__name__} whose parameters train is not in training "
                "mode, and Opacus keeps inputs only there. Call module.train() before a batch."
            )
        super().capture_backprops_hook(module, *arguments, **options)
        parameters: list[Any] = [*module.parameters()]
        for p in parameters:
            sample = getattr(p, "grad_sample", None)
            if isinstance(sample, list):
                raise ConfigError(GRAD_SAMPLE)
            if sample is not None:
                self.samples.setdefault(p, []).append(sample)
                p.grad_sample = None
