"""Image inputs: a network and labelled images, built in or from a file."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accounting.checks import ConfigError
from attacks import ImageAudit, networks, read_update, suite
from attacks.update import Smoothed, ready
from privpart.cli.audit.inputs import from_files, own_model, shared_fields, wanted
from privpart.cli.audit.options import LeakageOptions
from privpart.data.tasks import digits, fashion_mnist
from privpart.models import resnet8

_NETWORKS: Mapping[str, Callable[..., nn.Module]] = {
    "lenet": networks.smooth_lenet,
    "relu-lenet": networks.relu_lenet,
    "mlp": networks.smooth_mlp,
}
# The networks here have a logit for each.
_MOST_LABELS = 100_000
_DECOYS = 50
"""Public images among which the truth is ranked."""
_BUDGETS: Mapping[str, Any] = {
    "quick": {"restarts": 1, "max_evaluations": 300, "newton_steps": 0, "steps": 300},
    "normal": {"restarts": 2, "max_evaluations": 500, "newton_steps": 10, "steps": 1000},
    "long": {"restarts": 4, "max_evaluations": 3000, "newton_steps": 30, "steps": 6000},
}


def image_audit(options: LeakageOptions) -> ImageAudit:
    """Return the audit of the first images of the data, ``--trials`` batches of them.

    Raises:
        ConfigError: too few images, or a model that does not take them.
    """
    fields = shared_fields(options, suite(**_BUDGETS[options.effort]))
    assert options.model is not None  # noqa: S101  refused by the options
    assert options.data is not None  # noqa: S101
    (x, y), (public, labels) = _images(options.data, options.keys.data_dir)
    count = wanted(options)
    if count > len(x):
        raise ConfigError(f"trials={options.trials}: needs {count} images; there are {len(x)}.")
    # Of a file, those images are public that are not attacked.
    if public is x:
        public, labels = x[count:], y[count:]
    classes = int(torch.cat([y, labels]).max()) + 1
    model = _model(options.model, x, max(classes, 10), options.keys.seed)
    update, read = from_files(model, options)
    _check_fit(options.model, model, x[:2], classes)
    if options.keys.send_buffers and not any(True for _ in model.buffers()):
        raise ConfigError(f"model={options.model!r}: has no buffers; leave out send_buffers.")
    # A batch is not ranked, and several levels are not.
    one = fields["batch"] * fields["transform"].clients == 1
    ranked = one and len(public) > 0 and options.levels == 1
    return ImageAudit(
        model=model.train(options.keys.mode == "train"),
        x=x[:count],
        y=y[:count],
        update=update,
        read=read,
        views=options.views,
        class_means=_class_means(public, labels, y[:count]),
        decoys=(public[:_DECOYS], labels[:_DECOYS]) if ranked else None,
        public=(public, labels),
        send_buffers=options.keys.send_buffers,
        loss=Smoothed(options.keys.label_smoothing) if options.keys.label_smoothing else None,
        **fields,
    )


def _images(data: str, folder: Path | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return images to attack, and public images; for a file both are all of its images."""
    if data in ("digits", "fashion-mnist"):
        task = digits() if data == "digits" else fashion_mnist(folder)
        return (task.test_x, task.test_y), (task.train_x, task.train_y)
    if not data.endswith((".safetensors", ".npz", ".pt")):
        raise ConfigError(
            f"data={data!r}: must be digits, fashion-mnist, or a .safetensors, .npz or .pt file."
        )
    tensors = read_update(Path(data))
    x, y = tensors.get("x", torch.empty(0)), tensors.get("y", torch.empty(0))
    shaped = x.ndim == 4 and y.shape == x.shape[:1] and min(x.shape) > 0
    # This way round, NaN is refused, too.
    if not shaped or x.is_complex() or not bool(((x >= 0) & (x <= 1)).all()):
        raise ConfigError(
            f"data={data}: x {tuple(x.shape)}, y {tuple(y.shape)}; must be real images x "
            "(N, C, H, W), all at least 1, in [0, 1] (divide bytes by 255), and labels y (N,)."
        )
    labels = torch.zeros_like(y, dtype=torch.long) if y.is_complex() else y.long()
    if not bool(((y == labels) & (labels >= 0) & (labels < _MOST_LABELS)).all()):
        raise ConfigError(
            f"data={data}: y must be whole numbers from 0, and below {_MOST_LABELS}; label the "
            "classes 0, 1, 2 and so on."
        )
    images = x.float(), labels
    return images, images


def _model(name: str, x: Tensor, classes: int, seed: int) -> nn.Module:
    channels, size = x.shape[1], x.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    if name == "resnet8":
        build = partial(resnet8, classes=classes, channels=channels, norm="batch")
        return networks.drawn(build, generator)
    if name not in _NETWORKS:
        return own_model(name, [*_NETWORKS, "resnet8"])
    if x.shape[-2] != size:
        raise ConfigError(f"model={name!r}: needs square images; they are {tuple(x.shape[1:])}.")
    return _NETWORKS[name](generator, channels=channels, size=size, classes=classes)


def _check_fit(name: str, model: nn.Module, x: Tensor, classes: int) -> None:
    """Raise a ConfigError unless one forward pass gives logits for every label."""
    # Any code of the user's may raise anything.
    try:
        with torch.no_grad():
            shape = tuple(ready(model, training=False)(x).shape)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        images = tuple(x.shape[1:])
        raise ConfigError(
            f"model={name!r}: does not take images of shape {images}: {reason}."
        ) from error
    if len(shape) != 2 or shape[1] < classes:
        raise ConfigError(
            f"model={name!r}: gives {shape} for {len(x)} images of {classes} classes; must be "
            f"logits (B, K) with K at least {classes}."
        )


def _class_means(x: Tensor, y: Tensor, attacked: Tensor) -> Tensor | None:
    """Return that of each attacked label, or None unless every one has a public image."""
    if not set(attacked.tolist()) <= set(y.tolist()):
        return None
    return torch.stack([x[y == label].mean(0) for label in attacked])
