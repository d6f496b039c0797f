"""Check per-example gradients: Opacus's, of a whole batch, against one backward pass per example.

Clipping bounds what one example does only if its gradient is its own. A layer that mixes examples,
is used twice, or has a faulty hook gives other gradients, silently.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from opacus import GradSampleModule
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from privpart.data.batches import Batch, count_rows, take

LossOfBatch = Callable[[nn.Module, Batch], Tensor]
"""Mean loss of a batch's examples."""


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """Per-example gradients of one parameter.

    Attributes:
        parameter: its name.
        shape: its shape.
        error: largest norm of a difference between the two gradients of an example, relative to
            the longest gradient of an example over all parameters; infinite if there is none.
        example: the example of that difference.
    """

    parameter: str
    shape: tuple[int, ...]
    error: float
    example: int


def verify_gradients(module: nn.Module, loss: LossOfBatch, batch: Batch) -> list[GradientCheck]:
    """Compare the per-example gradients of every parameter that trains.

    Module and batch are copied. Layers of dropout are switched off, since the two ways would draw
    different elements; all others keep their mode.

    Args:
        module: any network that Opacus takes.
        loss: mean loss of a batch, from module and batch.
        batch: 2 examples or more, of rows in every tensor.

    Raises:
        ConfigError: fewer than 2 examples, no parameter that trains, a loss that is not one finite
            number, or a module that Opacus does not take.
    """
    rows = checks.count("rows of the batch", count_rows(batch), minimum=2)
    network = copy.deepcopy(module)
    # both ways must compute the same function
    for layer in network.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.eval()
    named = {name: p for name, p in network.named_parameters() if p.requires_grad}
    if not named:
        raise ConfigError("module: no parameter trains (requires_grad).")
    alone = [_gradients(network, loss, take(batch, torch.tensor([i])), named) for i in range(rows)]
    together = _of_opacus(network, loss, batch, named)
    longest = max(float(g.double().norm()) for gradients in alone for g in gradients.values())
    return [
        _compared(name, together[name], [gradients[name] for gradients in alone], longest)
        for name in named
    ]


def _gradients(
    module: nn.Module, loss: LossOfBatch, batch: Batch, named: dict[str, nn.Parameter]
) -> dict[str, Tensor]:
    computed = torch.autograd.grad(
        _checked(loss(module, batch)), list(named.values()), allow_unused=True
    )
    return {
        name: torch.zeros_like(p) if gradient is None else gradient
        for (name, p), gradient in zip(named.items(), computed, strict=True)
    }


def _checked(value: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1 or not bool(torch.isfinite(value).all()):
        raise ConfigError("loss: must be one finite number, the mean over the batch.")
    return value


def _of_opacus(
    module: nn.Module, loss: LossOfBatch, batch: Batch, named: dict[str, nn.Parameter]
) -> dict[str, Tensor | None]:
    """Return Opacus's gradients, shape (B, ...); None where it has none."""
    try:
        wrapped = GradSampleModule(module, loss_reduction="mean")
        torch.autograd.backward(loss(wrapped, batch))
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise ConfigError(f"module: Opacus does not take it: {str(error).strip()}") from None
    samples = {name: getattr(p, "grad_sample", None) for name, p in named.items()}
    return {
        name: sample if isinstance(sample, Tensor) else None for name, sample in samples.items()
    }


def _compared(
    name: str, together: Tensor | None, alone: list[Tensor], longest: float
) -> GradientCheck:
    shape = tuple(alone[0].shape)
    if together is None or together.shape != (len(alone), *shape):
        used = any(bool(gradient.any()) for gradient in alone)
        return GradientCheck(name, shape, math.inf if used else 0.0, 0)
    pairs = zip(together, alone, strict=True)
    lengths = [float((gradient.double() - single.double()).norm()) for gradient, single in pairs]
    differences = [math.inf if math.isnan(length) else length for length in lengths]
    worst = max(range(len(alone)), key=differences.__getitem__)
    error = differences[worst] / longest if longest else math.inf if differences[worst] else 0.0
    return GradientCheck(name, shape, error, worst)
