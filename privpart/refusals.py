"""Refusals: networks that cannot be trained in part under differential privacy, and why."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from accounting.checks import ConfigError


def refuse_batch_statistics(module: nn.Module) -> None:
    """Refuse layers whose statistics mix the examples of a batch."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) or getattr(layer, "running_mean", None) is not None:
            kind = type(layer).__name__
            raise ConfigError(
                f"layer {name!r} is a {kind}: its statistics mix the examples of a batch and "
                "would leave the client without noise. Replace it by GroupNorm, for instance with "
                "privpart.models.replace_batch_norm(module)."
            )


def refuse_max_norm(module: nn.Module) -> None:
    """Refuse embeddings that rewrite their rows."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise ConfigError(
                f"layer {name!r} has max_norm={layer.max_norm}: it rewrites the rows of a client's "
                "tokens in every forward pass, frozen or not. Use max_norm=None."
            )


def refuse_lazy(module: nn.Module) -> None:
    """Refuse layers without shapes."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ConfigError(
                f"{name!r} has no shape yet: its layer is lazy. Run the module once on a batch."
            )


def refuse_other_types(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse what is not float32 on the CPU."""
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ConfigError(
                f"parameter {name!r} is {parameter.dtype} on {parameter.device}: must be "
                "torch.float32 on cpu. Use module.float().cpu()."
            )


def refuse_non_finite(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse NaN and infinity."""
    for name, parameter in parameters.items():
        if not parameter.isfinite().all():
            raise ConfigError(f"parameter {name!r} holds NaN or infinity: must be finite.")
