"""Everything that the attacker may use, keyed by parameter name; nothing else exists.

An attack receives an ``Observation`` and the model's code. It never receives the images, so it
cannot be tuned, stopped or selected by them.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from accounting import checks
from accounting.checks import ConfigError

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """What one client's update shows to whoever holds it (one gradient step, one batch).

    Args:
        update: visible parameters only, by name: the gradient, after clip and noise.
        state: ALL parameters and buffers of the model. Frozen ones are public: they come from a
            seed or a previous release, and an attacker who lacks them only looks weak.
        shape: (B, C, H, W) of the batch.
        labels: (B,) class indices, or None where the client does not reveal them.
        clip: the joint L2 bound that the update was clipped to, or None.
        noise_std: standard deviation of the Gaussian noise on each visible number, >= 0.
        loss: (logits (B, K), labels (B,)) -> scalar; the client's training loss.

    Raises:
        ConfigError: an empty update, a name or shape that is not the model's, a value that is
            not finite.
    """

    update: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    shape: tuple[int, int, int, int]
    labels: Tensor | None = None
    clip: float | None = None
    noise_std: float = 0.0
    loss: Loss = cross_entropy

    def __post_init__(self) -> None:
        if not self.update:
            raise ConfigError("update={}: shows nothing, so there is nothing to attack.")
        for name, value in self.update.items():
            _check_entry(name, value, self.state)
        if self.clip is not None:
            checks.positive("clip", self.clip)
        checks.nonnegative("noise_std", self.noise_std)


def observe(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    visible: Sequence[str] | None = None,
    loss: Loss = cross_entropy,
    clip: float | None = None,
    noise_multiplier: float = 0.0,
    generator: torch.Generator | None = None,
    reveal_labels: bool = True,
) -> Observation:
    """Return what a client that trains on (x, y) sends: the true gradient of the true loss.

    A copy of the model is run in float64 on the CPU, in the mode (train or eval) that it is in.

    Args:
        model: any module whose output is (B, K) logits.
        x: (B, C, H, W) images.
        y: (B,) hard labels.
        visible: patterns of parameter names (``"dense1.*"``); None shows every parameter.
        loss: see ``Observation``.
        clip: joint L2 bound over all visible parameters; None does not clip.
        noise_multiplier: noise standard deviation of one coordinate / clip, >= 0; needs ``clip``.
        generator: draws the noise; needed when there is noise.
        reveal_labels: whether the attacker is told ``y``.

    Raises:
        ConfigError: a pattern that matches no parameter, an empty view, a value out of range.
    """
    names = select([name for name, _ in model.named_parameters()], visible)
    _check_batch(x, y)
    std = _noise_std(clip, noise_multiplier, generator)
    state = double_state(model)
    y = y.detach().to("cpu", copy=True)
    update = gradient(model, state, names, as_double(x), y, loss)
    update = {name: value.detach() for name, value in clipped(update, clip).items()}
    if std > 0:
        update = {name: value + std * _normal(value, generator) for name, value in update.items()}
    b, c, h, w = x.shape
    return Observation(update, state, (b, c, h, w), y if reveal_labels else None, clip, std, loss)


def select(names: Sequence[str], patterns: Sequence[str] | None) -> tuple[str, ...]:
    """Return the ``names`` that match any of the ``patterns``, in their own order.

    Raises:
        ConfigError: no pattern, or one that matches nothing: a typing error must never become
            "this view leaks nothing".

    >>> select(["conv1.weight", "dense1.weight", "dense1.bias"], ["dense1.*"])
    ('dense1.weight', 'dense1.bias')
    """
    if patterns is None:
        patterns = ["*"]
    if isinstance(patterns, str):
        raise ConfigError(f"visible={patterns!r}: must be a list of patterns, as [{patterns!r}].")
    if not patterns:
        raise ConfigError("visible=[]: an empty view shows nothing; None shows every parameter.")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"visible={pattern!r}: matches no parameter. {_near(pattern, names)}")
    return tuple(name for name in names if any(fnmatchcase(name, p) for p in patterns))


def double_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a float64 copy of every parameter and buffer of ``model``, by name."""
    both = [*model.named_parameters(), *model.named_buffers()]
    return {name: as_double(value) for name, value in both}


def as_double(value: Tensor) -> Tensor:
    """Return a copy of ``value`` on the CPU, in float64 unless it counts something."""
    dtype = torch.float64 if value.is_floating_point() else value.dtype
    return value.detach().to("cpu", dtype, copy=True)


def gradient(
    model: nn.Module,
    state: Mapping[str, Tensor],
    names: Iterable[str],
    x: Tensor,
    y: Tensor,
    loss: Loss,
    *,
    differentiable: bool = False,
) -> dict[str, Tensor]:
    """Return the gradient of ``loss`` in the parameters ``names`` at ``state``, by name.

    ``differentiable`` keeps the graph, so that the result can be differentiated in ``x``.
    """
    leaves = {name: state[name].detach().requires_grad_(True) for name in names}
    logits = functional_call(model, {**state, **leaves}, (x,))
    values = torch.autograd.grad(
        loss(logits, y), list(leaves.values()), create_graph=differentiable, materialize_grads=True
    )
    return dict(zip(leaves, values, strict=True))


def clipped(update: dict[str, Tensor], clip: float | None) -> dict[str, Tensor]:
    """Return ``update`` scaled to a joint L2 norm of at most ``clip``; None leaves it alone."""
    if clip is None:
        return update
    norm = torch.stack([value.square().sum() for value in update.values()]).sum().sqrt()
    scale = (clip / norm).clamp(max=1.0)
    return {name: value * scale for name, value in update.items()}


def _normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


def _noise_std(
    clip: float | None, noise_multiplier: float, generator: torch.Generator | None
) -> float:
    z = checks.nonnegative("noise_multiplier", noise_multiplier)
    if clip is not None:
        clip = checks.positive("clip", clip)
    if z == 0:
        return 0.0
    if clip is None:
        raise ConfigError(f"noise_multiplier={z:g}: is relative to clip; pass clip.")
    if generator is None:
        raise ConfigError(f"noise_multiplier={z:g}: pass a torch.Generator to draw the noise.")
    return z * clip


def _check_batch(x: Tensor, y: Tensor) -> None:
    if x.ndim != 4 or x.shape[0] < 1:
        raise ConfigError(f"x: shape {tuple(x.shape)}; must be (B, C, H, W) with B >= 1.")
    if not bool(x.isfinite().all()):
        raise ConfigError("x: has values that are not finite.")
    if y.shape != x.shape[:1] or y.is_floating_point():
        raise ConfigError(f"y: {y.dtype} {tuple(y.shape)}; must be ({x.shape[0]},) class indices.")


def _check_entry(name: str, value: Tensor, state: Mapping[str, Tensor]) -> None:
    if name not in state:
        raise ConfigError(f"update[{name!r}]: is no parameter of the model. {_near(name, state)}")
    if value.shape != state[name].shape:
        raise ConfigError(
            f"update[{name!r}]: shape {tuple(value.shape)}; must be {tuple(state[name].shape)}."
        )
    if not bool(value.isfinite().all()):
        raise ConfigError(f"update[{name!r}]: has values that are not finite.")


def _near(name: str, names: Iterable[str]) -> str:
    known = list(names)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"Did you mean {', '.join(near)}?" if near else f"Names: {', '.join(known)}."
