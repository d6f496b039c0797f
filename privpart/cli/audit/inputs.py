"""Audit inputs: the model, images and update that the options name, as tensors."""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from attacks import LocalSteps, change_of_weights, for_model, networks, read_update, suite
from attacks.suite import Attack
from attacks.update import MOST_STEPS, STEPS_COST, ready
from privpart.cli.audit.options import BUDGETS, AuditOptions, Mode
from privpart.cli.audit.store import TrialFolder
from privpart.data.tasks import digits, fashion_mnist
from privpart.training import own_code

_NETWORKS: Mapping[str, Callable[..., nn.Module]] = {
    "lenet": networks.smooth_lenet,
    "relu-lenet": networks.relu_lenet,
    "mlp": networks.smooth_mlp,
    "resnet8": networks.relu_resnet8,
}
_MOST_LABELS = 100_000  # the networks here have a logit for each


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """What is attacked: ``x`` and ``y`` are the truth, all other data is public."""

    model: nn.Module
    x: Tensor
    y: Tensor
    batches: int
    update: dict[str, Tensor] | None
    dataset_mean: Tensor | None
    class_means: Tensor | None
    decoys: tuple[Tensor, Tensor] | None

    def digest(self) -> str:
        """Return a hash of the images, the weights and the update."""
        state = hashlib.sha256()
        hash_tensors(state, self.model.state_dict(), self.update or {}, {"x": self.x})
        state.update(self.y.numpy().tobytes())
        return state.hexdigest()


def hash_tensors(state: "hashlib._Hash", *named: Mapping[str, Tensor]) -> None:
    """Add the names and the bytes of tensors of any type, also of one that NumPy does not have."""
    for name, value in (pair for tensors in named for pair in tensors.items()):
        state.update(name.encode())
        state.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def prepare(options: AuditOptions, out: Path) -> tuple[Inputs, dict[str, Any]]:
    """Return what is attacked, and the arguments that every audit passes to ``attacks``.

    Among them is ``done``, the results so far in ``out``.

    Raises:
        ConfigError: an option that does not fit the model or the data, or a folder with the
            results of other options.
    """
    torch.set_num_threads(1)  # so that the numbers do not depend on the machine's processors
    attacks = _attacks(options)
    local = local_steps_of(options)
    inputs = load_inputs(options)
    inputs.model.train(options.mode is Mode.TRAIN)
    if options.send_buffers and not any(True for _ in inputs.model.buffers()):
        raise ConfigError(f"model={options.model!r}: has no buffers; leave out send_buffers.")
    return inputs, {
        "attacks": attacks,
        "batch": options.batch,
        "local": local,
        "delta": options.delta,
        "dataset_mean": inputs.dataset_mean,
        "class_means": inputs.class_means,
        "decoys": inputs.decoys,
        "reveal_labels": not options.hide_labels,
        "send_buffers": options.send_buffers,
        "seed": options.seed,
        "done": TrialFolder(out, options.identity(), inputs.digest()),
    }


def load_inputs(options: AuditOptions) -> Inputs:
    """Return the model and the first images of the data, ``--trials`` batches of them."""
    assert options.model is not None  # noqa: S101  refused by the options
    assert options.data is not None  # noqa: S101
    (x, y), (rest, labels) = _images(options.data, options.data_dir)
    wanted = options.batch * (1 if options.gradient else options.trials)
    if wanted > len(x):
        raise ConfigError(f"trials={options.trials}: needs {wanted} images; there are {len(x)}.")
    if rest is x:  # a file: its public images are those that are not attacked
        rest, labels = x[wanted:], y[wanted:]
    classes = int(torch.cat([y, labels]).max()) + 1
    model = _model(options.model, x, max(classes, 10), options.seed)
    if options.weights is not None:
        load_given(model, options.weights)
    update = given_update(model, options.gradient, options.before)
    _check_fit(options.model, model, x[:2], classes)
    count = min(options.decoys, len(rest))
    if count < options.decoys and options.batch == 1:
        typer.echo(
            f"privpart: decoys={options.decoys}: there are only {count} other images; the truth is "
            "ranked among these.",
            err=True,
        )
    return Inputs(
        model=model,
        x=x[:wanted],
        y=y[:wanted],
        batches=wanted // options.batch,
        update=update,
        dataset_mean=rest.mean(0) if len(rest) else None,
        class_means=_class_means(rest, labels, y[:wanted]),
        decoys=(rest[:count], labels[:count]) if count and options.batch == 1 else None,
    )


def _attacks(options: AuditOptions) -> dict[str, Attack]:
    budget: Any = BUDGETS[options.effort]
    known = suite(**budget)
    for name in options.attack or ():
        checks.choice("attack", name, list(known))
    return {name: a for name, a in known.items() if not options.attack or name in options.attack}


def local_steps_of(options: AuditOptions) -> LocalSteps | None:
    """Return how the client trains, or None where it sends a gradient."""
    if options.local_steps == 0:
        return None
    checks.count("local_steps", options.local_steps, maximum=MOST_STEPS, hint=STEPS_COST)
    return LocalSteps(
        learning_rate=options.learning_rate,
        steps=options.local_steps,
        momentum=options.momentum,
        optimizer=options.optimizer.value,
    )


def _images(data: str, folder: Path | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return images to attack, and public images; for a file both are all of its images."""
    if data in ("digits", "fashion-mnist"):
        task = digits() if data == "digits" else fashion_mnist(folder)
        return (task.test_x, task.test_y), (task.train_x, task.train_y)
    if not data.endswith(".safetensors"):
        raise ConfigError(f"data={data!r}: must be digits, fashion-mnist or a .safetensors file.")
    tensors = read_update(Path(data))
    if not {"x", "y"} <= set(tensors):
        raise ConfigError(f"data={data}: must hold x (N, C, H, W) in [0, 1] and y (N,).")
    if any(tensors[name].is_complex() for name in "xy"):
        raise ConfigError(f"data={data}: x or y is complex; must be real.")
    x = tensors["x"].float()
    y = tensors["y"].long()
    if x.ndim != 4 or y.shape != x.shape[:1] or min(x.shape) < 1:
        raise ConfigError(
            f"data={data}: x {tuple(x.shape)}, y {tuple(y.shape)}; must be (N, C, H, W) and (N,), "
            "all at least 1."
        )
    if not bool(((tensors["y"] == y) & (y >= 0) & (y < _MOST_LABELS)).all()):
        raise ConfigError(
            f"data={data}: y must be whole numbers from 0, and below {_MOST_LABELS}; label the "
            "classes 0, 1, 2 and so on."
        )
    if not bool(((x >= 0) & (x <= 1)).all()):  # also refuses NaN
        raise ConfigError(f"data={data}: x must be in [0, 1]; divide bytes by 255.")
    return (x, y), (x, y)


def _model(name: str, x: Tensor, classes: int, seed: int) -> nn.Module:
    channels = x.shape[1]
    size = x.shape[-1]
    if name in _NETWORKS and name != "resnet8" and x.shape[-2] != size:
        raise ConfigError(f"model={name!r}: needs square images; they are {tuple(x.shape[1:])}.")
    generator = torch.Generator().manual_seed(seed)
    if name == "resnet8":
        return networks.relu_resnet8(generator, channels=channels, classes=classes)
    if name in _NETWORKS:
        return _NETWORKS[name](generator, channels=channels, size=size, classes=classes)
    return own_model(name, _NETWORKS)


def own_model(name: str, others: Collection[str] = ()) -> nn.Module:
    """Return the network that a function of the user's builds; its code is imported and run.

    Raises:
        ConfigError: ``name`` is not a valid reference, or what it names builds no network.
    """
    if not own_code.is_reference(name):
        raise ConfigError(
            f"model={name!r}: must be {''.join(f'{own}, ' for own in others)}MODULE:FUNCTION or "
            "./FILE.py:FUNCTION."
        )
    typer.echo(f"privpart: imports {name} (model)", err=True)
    try:
        build = own_code.load(name, Path())
    except ConfigError as error:
        raise ConfigError(f"model={name!r}: cannot be imported: {error}") from error
    try:
        built = own_code.call(build, name, "model")
    except ConfigError as error:
        raise ConfigError(
            f"model={name!r}: must build a model without arguments: {error}"
        ) from error
    if not isinstance(built, nn.Module):
        raise ConfigError(f"model={name!r}: must return a torch.nn.Module.")
    return built


def given_update(
    model: nn.Module, sent: Path | None, before: Path | None
) -> dict[str, Tensor] | None:
    """Return the given update, with the buffers that were sent; load the weights before, if any."""
    if sent is None:
        return None
    update = for_model(model, read_update(sent))
    if before is not None:
        start = for_model(model, read_update(before))
        load_given(model, before, model.state_dict() | start)
        update = change_of_weights(update, start)
    return update


def load_given(model: nn.Module, path: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Load the weights in a file, or ``state``, which ``path`` then only names in errors."""
    state = for_model(model, read_update(path)) if state is None else state
    for name, value in state.items():
        if not bool(value.isfinite().all()):
            raise ConfigError(f"weights={path}: {name!r} has values that are not finite.")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        text = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"weights={path}: do not fit the model: {text}.") from None


def _check_fit(name: str, model: nn.Module, x: Tensor, classes: int) -> None:
    """Raise a ConfigError unless one forward pass gives logits for every label."""
    shape = tuple(x.shape[1:])
    try:
        with torch.no_grad():
            logits = ready(model, training=False)(x)
    except Exception as error:
        raise ConfigError(
            f"model={name!r}: does not take images of shape {shape}: {_first_line(error)}."
        ) from error
    found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < classes:
        raise ConfigError(
            f"model={name!r}: gives {found} for {len(x)} images of {classes} classes; must be "
            f"logits (B, K) with K at least {classes}."
        )


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _class_means(x: Tensor, y: Tensor, wanted: Tensor) -> Tensor | None:
    """Return (K, C, H, W), or None unless every class that is attacked has a public image."""
    if not set(wanted.tolist()) <= set(y.tolist()):
        return None
    classes = range(int(y.max()) + 1)
    zero = torch.zeros_like(x[0])
    return torch.stack([x[y == k].mean(0) if bool((y == k).any()) else zero for k in classes])
