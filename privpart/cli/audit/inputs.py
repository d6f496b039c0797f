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
        "reveal_labels": not keys.hide_labels,
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


def from_files(
    model: nn.Module, options: LeakageOptions
) -> tuple[dict[str, Tensor] | None, tuple[str, ...]]:
    """Load weights into the model; return the given update, and what was done to the files.

    The update has the buffers that were sent.

    Raises:
        ConfigError: what is wrong with each file, in one message.
    """
    files = {
        "weights": options.weights,
        "before": options.keys.before,
        "gradient": options.gradient,
    }
    read, notes, faults = dict[str, dict[str, Tensor]](), list[str](), list[str]()
    for option, path in files.items():
        if path is None:
            continue
        told: list[str] = []
        try:
            read[option] = for_model(model, read_update(path, told.append), told.append)
            if option != "gradient":
                _load(model, read[option], partly=option == "before")
        except ConfigError as error:
            faults.append(f"{option}={path}: {str(error).removeprefix(f'{path}: ')}")
        notes += [f"Of {option}, {note}." for note in told]
    if faults:
        raise ConfigError(" ".join(faults))
    for note in notes:
        typer.echo(f"privpart: {note}", err=True)
    update = read.get("gradient")
    if update is not None and "before" in read:
        update = change_of_weights(update, read["before"])
    return update, tuple(notes)


def _load(model: nn.Module, state: Mapping[str, Tensor], *, partly: bool) -> None:
    """Load all weights, or ``partly`` those that there are; the others stay as they are."""
    for name, value in state.items():
        if not bool(value.isfinite().all()):
            raise ConfigError(f"{name!r} has values that are not finite.")
    whole = model.state_dict()
    shared = {whole[name].data_ptr() for name in state}  # a file may name a tied weight once
    kept = {
        name: value
        for name, value in whole.items()
        if partly or value.data_ptr() in shared or name.endswith("num_batches_tracked")
    }
    try:
        model.load_state_dict({**kept, **state})
    except RuntimeError as error:
        text = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"the tensors do not fit the model: {text}.") from None
