"""Observation: everything that an attacker may use, by parameter name.

An attack receives an ``Observation`` and the model's code. It never receives the images, so it
cannot be tuned, stopped or selected by them.
"""

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accounting import checks
from accounting.checks import ConfigError
from attacks.transforms import NONE, Declared, declared
from attacks.update import (
    LEAST,
    LocalSteps,
    Loss,
    as_double,
    clip_scale,
    double_state,
    flat,
    norm,
    ready,
    simulated_update,
    squarable,
)


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """What an attacker sees of one client's update (one round, one batch).

    Args:
        update: visible parameters only, by name: the gradient, or the change of the weights by
            ``local``, after clip and noise.
        state: ALL parameters and buffers of the model. Frozen ones are public: they come from a
            seed or a previous release, and an attacker without them would only look weak.
        shape: (B, C, H, W) of the batch; (B, T) of token ids, see ``TextObservation``.
        labels: (B,) integer labels, or None where the client does not reveal them.
        clip: the joint L2 bound that the update was clipped to, or None.
        noise_std: standard deviation of the Gaussian noise on each visible value, >= 0.
        loss: (logits (B, K), labels (B,)) -> scalar; the client's training loss.
        local: how the client trained, where ``update`` is a change of weights (after - before);
            None where it is the gradient of the batch.
        training: whether the client's model was in training mode (batch statistics).
        sent: all parameters that trained and were clipped jointly, where some of them are not
            visible; () means the visible ones.
        buffers: running statistics of batch normalisation after the client's training, by name,
            where the client sends them; they are not clipped, and no noise covers them.
        transform: what became of the update before the clip, such as "top-k:0.1", as a text, a
            function, or several in their order; a sum of clients has the ``shape`` of all their
            examples, client by client.

    Real values are kept in float64 on the CPU, whatever they came in.

    Raises:
        ConfigError: an empty update, a name or shape that is not the model's, or a value that is
            not finite.
    """

    update: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    shape: tuple[int, ...]
    labels: Tensor | None = None
    clip: float | None = None
    noise_std: float = 0.0
    loss: Loss = cross_entropy
    local: LocalSteps | None = None
    training: bool = False
    sent: tuple[str, ...] = ()
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    transform: Declared = NONE

    def __post_init__(self) -> None:
        for name in ("update", "state", "buffers"):
            wide = {k: as_double(value) for k, value in getattr(self, name).items()}
            object.__setattr__(self, name, wide)
        object.__setattr__(self, "transform", declared(self.transform))
        if not self.update:
            raise ConfigError("update={}: is empty; pass at least one parameter to attack.")
        if len(self.shape) not in (2, 4) or min(self.shape) < 1:
            raise ConfigError(
                f"shape={self.shape}: must be (B, C, H, W) or, of token ids, (B, T), all at least "
                "1."
            )
        for name, value in self.state.items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise ConfigError(f"state[{name!r}]: has values that are not finite.")
        check_entries("update", self.update, self.state)
        check_entries("buffers", self.buffers, self.state)
        if self.sent and not set(self.update) <= set(self.sent) <= set(self.state):
            raise ConfigError("sent: must contain every visible name, and only names of the model.")
        self.transform.shared_out("shape", self.shape[0])
        if self.clip is not None:
            squarable("clip", self.clip)
        checks.nonnegative("noise_std", self.noise_std)

    @property
    def clients(self) -> int:
        """The number of clients whose updates were summed."""
        return self.transform.clients

    def restrict(self, names: Collection[str]) -> Self:
        """Return the observation of an attacker who looks at these visible parameters only.

        The others still took part in the client's training and clip, and the attacker knows that.
        """
        unknown = [name for name in names if name not in self.update]
        if unknown:
            raise ConfigError(
                f"names: {unknown[0]!r} is not in view. {near(unknown[0], self.update)}"
            )
        part = {name: value for name, value in self.update.items() if name in names}
        alone = self.local is None and self.clip is None and not self.transform.steps
        return replace(self, update=part, sent=() if alone else self.sent or tuple(self.update))


def observe(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    visible: Sequence[str] | None = None,
    loss: Loss = cross_entropy,
    local: LocalSteps | None = None,
    clip: float | None = None,
    noise_multiplier: float = 0.0,
    generator: torch.Generator | None = None,
    reveal_labels: bool = True,
    transform: Any = (),  # noqa: ANN401 - see ``declared``
) -> Observation:
    """Return what a client that trains on (x, y) sends: the true update of the true loss.

    A copy of the model runs in float64 on the CPU, in the model's present mode (train or eval).
    Only the visible parameters train; the others are frozen, and public.

    Args:
        model: any module whose output is (B, K) logits.
        x: (B, C, H, W) images.
        y: (B,) integer labels.
        visible: patterns of parameter names (``"dense1.*"``); None shows every parameter.
        loss: see ``Observation``, also for ``local``.
        local: None for a gradient.
        clip: joint L2 bound over all visible parameters; None does not clip.
        noise_multiplier: noise standard deviation of one coordinate / clip, >= 0; needs ``clip``.
        generator: draws the noise; needed when there is noise.
        reveal_labels: whether the attacker is told ``y``.
        transform: see ``Observation``; of a sum, (x, y) are the examples of all clients.

    Raises:
        ConfigError: a pattern that matches no parameter, an empty view, or a value out of range.
    """
    _check_batch(x, y)
    y = y.detach().to("cpu", copy=True)
    fields = sent_fields(
        *(model, ready(model, model.training), as_double(x), y),
        visible=visible,
        loss=loss,
        local=local,
        clip=clip,
        noise_multiplier=noise_multiplier,
        generator=generator,
        transform=transform,
    )
    labels = y if reveal_labels else None
    return Observation(**fields, shape=tuple(x.shape), labels=labels, training=model.training)


def sent_fields(
    model: nn.Module,
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    loss: Loss,
    visible: Sequence[str] | None = None,
    local: LocalSteps | None = None,
    clip: float | None = None,
    noise_multiplier: float = 0.0,
    generator: torch.Generator | None = None,
    transform: Any = (),  # noqa: ANN401 - see ``declared``
) -> dict[str, Any]:
    """Return the fields of an observation that do not depend on what is attacked.

    ``net`` is the model made by ``ready``; it maps ``x`` to what the loss compares with ``y``. The
    other arguments are those of ``observe``.
    """
    names = select([name for name, _ in model.named_parameters()], visible)
    std = noise_std_of(clip, noise_multiplier)
    if std > 0 and generator is None:
        raise ConfigError(
            f"noise_multiplier={noise_multiplier:g}: pass a torch.Generator to draw the noise."
        )
    state, chain = double_state(model), declared(transform)
    chain.shared_out("x", len(x))
    update, order = dict[str, Tensor](), torch.Generator().manual_seed(1)
    for examples in zip(x.chunk(chain.clients), y.chunk(chain.clients), strict=True):
        sent = chain(simulated_update(net, state, names, *examples, loss, local, order=order))
        scale = clip_scale(sent, clip)
        update = {name: update.get(name, 0.0) + value * scale for name, value in sent.items()}
    if std > 0:
        for name, value in update.items():
            drawn = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            update[name] = value + std * drawn
    options = {"clip": clip, "noise_std": std, "loss": loss, "local": local}
    return {"update": update, "state": state, "transform": chain, **options}


def sender(
    observed: Observation,
    dtype: torch.dtype = torch.float64,
    *,
    clipped: bool = True,
    checked: bool = False,
) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Return what maps one client's update to what would be in view, after transform and clip.

    Where a transform loses a part of the update, that is the nearest to what was sent of all that
    the update may have led to, or if ``checked``, by any convention of the transform. Where noise
    or other clients cover what was sent, it is what the client would send.
    """
    transform = observed.transform
    covered = observed.noise_std > 0 or observed.clients > 1
    sent = {name: value.to(dtype) for name, value in observed.update.items()}
    towards = None if covered else transform.towards(sent, checked=checked)

    def send(update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = transform(update)
        scale = clip_scale(whole, observed.clip) if clipped else 1.0
        if towards is None:
            return {name: scale * whole[name] for name in sent}
        return towards({name: scale * value for name, value in transform.before(update).items()})

    return send


def visible_parts(
    net: nn.Module,
    observed: Observation,
    x: Tensor,
    y: Tensor,
    send: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    *,
    state: Mapping[str, Tensor] | None = None,
    functional: bool = False,
    differentiable: bool = False,
    order: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Return what would be in view, had the observed clients trained on (x, y), by name.

    ``net`` is made by ``ready``, ``send`` by ``sender``; real examples are in the precision of
    ``state``, by default the observed one. It is computed as ``simulated_update`` says.
    """
    names = observed.sent or tuple(observed.update)
    fixed = (observed.state if state is None else state), names

    how: dict[str, Any] = {"functional": functional, "differentiable": differentiable}
    how |= {} if order is None else {"order": order}

    def one(x: Tensor, y: Tensor, **changed: bool) -> dict[str, Tensor]:
        training = observed.loss, observed.local
        return send(simulated_update(net, *fixed, x, y, *training, **how | changed))

    if observed.clients == 1:
        return one(x, y)
    if _linear(net, observed):
        each_loss = partial(_summed, observed.loss, observed.clients)
        return send(simulated_update(net, *fixed, x, y, each_loss, **how))
    shares = [part.view(observed.clients, -1, *part.shape[1:]) for part in (x, y)]
    if functional or differentiable:  # one after the other takes far longer
        each = torch.vmap(partial(one, functional=True))(*shares)
        return {name: value.sum(0) for name, value in each.items()}
    parts = [one(*share) for share in zip(*shares, strict=True)]
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in observed.update}


def _linear(net: nn.Module, observed: Observation) -> bool:
    """Return whether the sum of the clients' updates is the gradient of the sum of their losses."""
    mixing = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in net.modules())
    plain = observed.local is None and observed.clip is None and len(observed.transform.steps) == 1
    return plain and not (mixing and observed.training)


def _summed(loss: Loss, clients: int, logits: Tensor, y: Tensor) -> Tensor:
    pairs = zip(logits.chunk(clients), y.chunk(clients), strict=True)
    return torch.stack([loss(*pair) for pair in pairs]).sum()


def residual_of(net: nn.Module, observed: Observation, x: Tensor, y: Tensor) -> float:
    """Return ||u(x) - u||^2 / ||u||^2 over what is visible; see ``visible_parts``."""
    u = flat(observed.update.values())
    seen = visible_parts(net, observed, as_double(x), y, sender(observed))
    gap = flat(seen.values()) - u
    size = float(u @ u)
    return float(gap @ gap) / size if size > 0 else math.inf


def select(
    names: Sequence[str], patterns: Sequence[str] | None, option: str = "visible"
) -> tuple[str, ...]:
    """Return the ``names`` that match any of the ``patterns``, in their own order.

    An error calls a pattern by the name of its ``option``.

    Raises:
        ConfigError: no pattern, or one that matches nothing: a typing error must never be
            reported as "this view leaks nothing".

    >>> select(["conv1.weight", "dense1.weight", "dense1.bias"], ["dense1.*"])
    ('dense1.weight', 'dense1.bias')
    """
    patterns = ["*"] if patterns is None else patterns
    if isinstance(patterns, str):
        raise ConfigError(f"visible={patterns!r}: must be a list of patterns, as [{patterns!r}].")
    if not patterns:
        raise ConfigError("visible=[]: is an empty view; None shows every parameter.")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = near(pattern, names)
            raise ConfigError(f"{option}={pattern!r}: matches no parameter. {hint}")
    return tuple(name for name in names if any(fnmatchcase(name, p) for p in patterns))


def noise_std_of(clip: float | None, noise_multiplier: float) -> float:
    """Return the standard deviation of the noise, ``noise_multiplier * clip``."""
    z = checks.nonnegative("noise_multiplier", noise_multiplier)
    if clip is not None:
        clip = squarable("clip", clip)
    if z == 0:
        return 0.0
    if clip is None:
        raise ConfigError(f"noise_multiplier={z:g}: is relative to clip; pass clip.")
    if not LEAST < z * clip < 1 / LEAST:
        raise ConfigError(
            f"noise_multiplier={z:g}: times clip, {clip:g}, is {z * clip:g}; must be above "
            f"{LEAST:g} and below {1 / LEAST:g}, so that its square is a number."
        )
    return z * clip


def _check_batch(x: Tensor, y: Tensor) -> None:
    if x.ndim != 4 or x.shape[0] < 1:
        raise ConfigError(f"x: shape {tuple(x.shape)}; must be (B, C, H, W) with B >= 1.")
    if not bool(x.isfinite().all()):
        raise ConfigError("x: has values that are not finite.")
    if y.shape != x.shape[:1] or y.is_floating_point():
        raise ConfigError(f"y: {y.dtype} {tuple(y.shape)}; must be ({x.shape[0]},) integers.")


def check_entries(where: str, sent: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise a ConfigError unless each tensor is finite, and has the shape of the state's."""
    for name, value in sent.items():
        entry = f"{where}[{name!r}]"
        if name not in state:
            raise ConfigError(f"{entry}: is not a parameter of the model. {near(name, state)}")
        if value.shape != state[name].shape:
            raise ConfigError(
                f"{entry}: shape {tuple(value.shape)}; must be {tuple(state[name].shape)}."
            )
        if state[name].is_floating_point() and not value.is_floating_point():
            raise ConfigError(f"{entry}: holds {value.dtype}; must hold real numbers.")
        if not bool(value.isfinite().all()):
            raise ConfigError(f"{entry}: has values that are not finite.")
    if not norm(sent) < math.inf:
        raise ConfigError(
            f"{where}: is too long for its norm to be a number (1e154 or more); check the learning "
            "rate."
        )


def near(name: str, names: Iterable[str]) -> str:
    """Return a sentence with the ``names`` like ``name``, or with all of them."""
    candidates = list(names)
    alike = difflib.get_close_matches(name, candidates, n=3, cutoff=0.5)
    return f"Did you mean {', '.join(alike)}?" if alike else f"Names: {', '.join(candidates)}."
