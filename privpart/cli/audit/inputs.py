"""Audit inputs: what images and text share of the model, the update and the attacks."""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from attacks import LocalSteps, change_of_weights, for_model, read_update
from attacks.audit import Audit
from attacks.transforms import declared
from attacks.update import MOST_STEPS, STEPS_COST
from privpart.cli.audit.options import LeakageOptions
from privpart.training import own_code


def shared_fields(options: LeakageOptions, suite: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an audit that do not depend on the model.

    Raises:
        ConfigError: an attack that ``suite`` does not have, or local steps out of range.
    """
    for name in options.attack or ():
        checks.choice("attack", name, list(suite))
    local, keys = None, options.keys
    if keys.local_steps:
        checks.count("local_steps", keys.local_steps, maximum=MOST_STEPS, hint=STEPS_COST)
        local = LocalSteps(
            learning_rate=keys.learning_rate,
            steps=keys.local_steps,
            momentum=keys.momentum,
            optimizer=keys.optimizer,
            weight_decay=keys.weight_decay,
            batch=keys.local_batch,
        )
    return {
        "attacks": {name: suite[name] for name in suite if name in (options.attack or suite)},
        "batch": options.batch,
        "transform": declared(options.transform),
        "local": local,
        "delta": keys.delta,
        "reveal_labels": not options.hide_labels,
        "seed": keys.seed,
    }


def digest(audit: Audit[Any, Any, Any]) -> str:
    """Return a hash of the examples, the weights, the update, and the public sentences."""
    state = hashlib.sha256(repr(getattr(audit, "public", None)).encode())
    truth = {"x": audit.x} | ({} if audit.y is None else {"y": audit.y})
    for tensors in (audit.model.state_dict(), audit.update or {}, truth):
        for name, value in tensors.items():
            state.update(name.encode())
            # As bytes, because NumPy does not have every type of torch's.
            data = value.detach().contiguous().flatten().view(torch.uint8)
            state.update(data.numpy().tobytes())
    return state.hexdigest()


def wanted(options: LeakageOptions) -> int:
    """Return the number of examples to attack."""
    updates = 1 if options.gradient else options.trials
    return options.batch * declared(options.transform).clients * updates


def own_model(name: str, builtin: Collection[str] = ()) -> nn.Module:
    """Return the network that a function of the user's builds; its code is imported and run.

    Raises:
        ConfigError: ``name`` is not a valid reference, or what it names builds no network.
    """
    if not own_code.is_reference(name):
        allowed = ", ".join([*builtin, "MODULE:FUNCTION or ./FILE.py:FUNCTION"])
        raise ConfigError(f"model={name!r}: must be {allowed}.")
    typer.echo(f"privpart: imports {name} (model)", err=True)
    try:
        network = own_code.call(own_code.load(name, Path()), name, "model")
    except ConfigError as error:
        raise ConfigError(
            f"model={name!r}: must be importable, and build a model without arguments: {error}"
        ) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"model={name!r}: must return a torch.nn.Module.")
    return network


def given_update(model: nn.Module, options: LeakageOptions) -> dict[str, Tensor] | None:
    """Return the given update, with the buffers that were sent; load the weights before, if any."""
    if options.gradient is None:
        return None
    update = for_model(model, read_update(options.gradient))
    if options.keys.before is None:
        return update
    start = for_model(model, read_update(options.keys.before))
    # A file may hold the trained part alone: the rest stays as it is.
    _load(model, f"before={options.keys.before}", model.state_dict() | start)
    return change_of_weights(update, start)


def load_weights(model: nn.Module, path: Path | None) -> None:
    """Load the weights in a file, if one is named.

    Raises:
        ConfigError: they are not finite, or do not fit the model.
    """
    if path is not None:
        _load(model, f"weights={path}", for_model(model, read_update(path)))


def _load(model: nn.Module, typed: str, state: Mapping[str, Tensor]) -> None:
    for name, value in state.items():
        if not bool(value.isfinite().all()):
            raise ConfigError(f"{typed}: {name!r} has values that are not finite.")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        text = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{typed}: do not fit the model: {text}.") from None
