"""Audit inputs: the model, the examples and the update that the options name, as tensors."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from attacks import LocalSteps, change_of_weights, for_model, read_update
from attacks.update import MOST_STEPS, STEPS_COST
from privpart.cli.audit.options import AnyOptions
from privpart.training import own_code


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """What is attacked: ``examples`` and ``labels`` are the truth, all other data is public.

    Attributes:
        update: a given one, of all examples as one batch.
        public: arguments of the audit that only images, or only sentences, have.
        views: name -> patterns.
        words: text of each token by id.
    """

    model: nn.Module
    examples: Tensor
    labels: Tensor | None
    update: dict[str, Tensor] | None
    public: Mapping[str, Any]
    views: Mapping[str, Sequence[str]]
    words: tuple[str, ...] = ()

    def digest(self) -> str:
        """Return a hash of the examples, the weights and the update."""
        state = hashlib.sha256(repr(self.public.get("public")).encode())
        truth = {"x": self.examples} | ({} if self.labels is None else {"y": self.labels})
        for tensors in (self.model.state_dict(), self.update or {}, truth):
            for name, value in tensors.items():
                state.update(name.encode())
                # as bytes: NumPy does not have every type of torch's
                data = value.detach().contiguous().flatten().view(torch.uint8)
                state.update(data.numpy().tobytes())
        return state.hexdigest()


def local_steps_of(options: AnyOptions) -> LocalSteps | None:
    """Return how the client trains, or None where it sends a gradient."""
    if options.local_steps == 0:
        return None
    checks.count("local_steps", options.local_steps, maximum=MOST_STEPS, hint=STEPS_COST)
    return LocalSteps(
        learning_rate=options.learning_rate,
        steps=options.local_steps,
        momentum=options.momentum,
        optimizer=options.optimizer,
    )


def wanted(options: AnyOptions) -> int:
    """Return the number of examples to attack."""
    return options.batch * (1 if options.gradient else options.trials)


def own_model(name: str, builtin: Collection[str] = ()) -> nn.Module:
    """Return the network that a function of the user's builds; its code is imported and run.

    Raises:
        ConfigError: ``name`` is not a valid reference, or what it names builds no network.
    """
    if not own_code.is_reference(name):
        raise ConfigError(
            f"model={name!r}: must be {''.join(f'{known}, ' for known in builtin)}MODULE:FUNCTION "
            "or ./FILE.py:FUNCTION."
        )
    typer.echo(f"privpart: imports {name} (model)", err=True)
    try:
        build = own_code.load(name, Path())
    except ConfigError as error:
        raise ConfigError(f"model={name!r}: cannot be imported: {error}") from error
    try:
        network = own_code.call(build, name, "model")
    except ConfigError as error:
        raise ConfigError(
            f"model={name!r}: must build a model without arguments: {error}"
        ) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"model={name!r}: must return a torch.nn.Module.")
    return network


def given_update(model: nn.Module, options: AnyOptions) -> dict[str, Tensor] | None:
    """Return the given update, with the buffers that were sent; load the weights before, if any."""
    if options.gradient is None:
        return None
    update = for_model(model, read_update(options.gradient))
    if options.before is None:
        return update
    start = for_model(model, read_update(options.before))
    _load(model, options.before, model.state_dict() | start)
    return change_of_weights(update, start)


def load_weights(model: nn.Module, path: Path | None) -> None:
    """Load the weights in a file, if one is named.

    Raises:
        ConfigError: they are not finite, or do not fit the model.
    """
    if path is not None:
        _load(model, path, for_model(model, read_update(path)))


def _load(model: nn.Module, path: Path, state: Mapping[str, Tensor]) -> None:
    for name, value in state.items():
        if not bool(value.isfinite().all()):
            raise ConfigError(f"weights={path}: {name!r} has values that are not finite.")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        text = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"weights={path}: do not fit the model: {text}.") from None
