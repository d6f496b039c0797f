"""Update: what a client computes from a batch, in a form that an attacker can differentiate."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, replace_all_batch_norm_modules_
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from accounting import checks
from accounting.checks import ConfigError

Loss = Callable[[Tensor, Tensor], Tensor]
State = Mapping[str, Tensor]
Momenta = tuple[Tensor, Tensor]  # first and second, of one parameter

_BETAS = (0.9, 0.999)  # as in torch.optim.Adam
EPSILON = 1e-8
MOST_STEPS = 1000  # an attack evaluates an update hundreds of times, and keeps the graph of each
STEPS_COST = "Each evaluation of an attack repeats them all; audit a round with fewer."
_TINY = 1e-30  # far below Adam's epsilon squared; keeps the root differentiable at gradient 0
LEAST = 1e-100  # its square is a number, and that of its inverse


def squarable(name: str, value: float) -> float:
    """Return a scale of an update, > 0, under which no norm is lost to underflow or overflow."""
    scale = checks.positive(name, value)
    if not LEAST < scale < 1 / LEAST:
        raise ConfigError(
            f"{name}={scale:g}: must be above {LEAST:g} and below {1 / LEAST:g}, so that its "
            "square is a number."
        )
    return scale


@dataclass(frozen=True, slots=True)
class Smoothed:
    """Cross-entropy with label smoothing: (logits (B, K), labels (B,)) -> scalar."""

    smoothing: float

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        return cross_entropy(logits, labels, label_smoothing=self.smoothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSteps:
    """Local training, after which the client sends the change of its weights.

    Args:
        learning_rate: > 0; or one of each step.
        steps: from 1 to 1000; each evaluation of an attack repeats them all.
        momentum: of SGD, in [0, 1), as in ``torch.optim.SGD``.
        optimizer: "sgd", or "adam" or "adamw" with the constants of ``torch.optim``. An audit takes
            the gradient off a single step of them, see ``attacks.reconstruction.single_step``;
            after three steps, ``cosine_tv`` finds the image where ``dlg`` does not.
        weight_decay: >= 0; beside the step in "adamw", else a part of the gradient.
        batch: examples per step, where a client shuffles its examples in each epoch; nobody is told
            the order, and attacks match them as a set. None takes all of them in each step.
    """

    learning_rate: float | Sequence[float]
    steps: int = 1
    momentum: float = 0.0
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    weight_decay: float = 0.0
    batch: int | None = None

    def __post_init__(self) -> None:
        checks.count("steps", self.steps, maximum=MOST_STEPS, hint=STEPS_COST)
        if len(self.rates) != self.steps:
            raise ConfigError(
                f"learning_rate={self.learning_rate}: must be a number, or one of each of the "
                f"{self.steps} steps."
            )
        for rate in self.rates:
            squarable("learning_rate", rate)
        checks.nonnegative("weight_decay", self.weight_decay)
        if self.batch is not None:
            checks.count("batch", self.batch)
        checks.choice("optimizer", self.optimizer, ["sgd", "adam", "adamw"])
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum}: must be at least 0 and below 1.")
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(f"momentum={self.momentum}: is only for sgd; leave it out with adam.")

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of each step."""
        rate = self.learning_rate
        return tuple(rate) if isinstance(rate, Sequence) else (rate,) * self.steps

    def rows(self, examples: int, order: torch.Generator | None = None) -> Iterator[Tensor | slice]:
        """Yield which examples each step takes; without an ``order`` they are never shuffled.

        Raises:
            ConfigError: the batch of a step does not divide the number of examples.
        """
        batch = self.batch or examples
        if examples % batch:
            raise ConfigError(f"batch={batch}: of a local step must divide {examples} examples.")
        for first in range(0, self.steps * batch, batch):
            if order is None or batch == examples:
                yield slice(first % examples, first % examples + batch)
                continue
            if first % examples == 0:
                epoch = torch.randperm(examples, generator=order)
            yield epoch[first % examples : first % examples + batch]


def simulated_update(
    model: nn.Module,
    state: State,
    names: Iterable[str],
    x: Tensor,
    y: Tensor,
    loss: Loss,
    local: LocalSteps | None = None,
    *,
    differentiable: bool = False,
    functional: bool = False,
    order: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Return the gradient at ``state`` by the parameters ``names``, or their change by ``local``.

    The model is made by ``ready``, ``state`` has every parameter and buffer, and those not named
    stay as they are. ``differentiable`` keeps the graph, so that the result can be differentiated
    by ``x``; ``functional`` uses ``torch.func``, which ``vmap`` can batch; slower for one batch.
    ``order`` shuffles local batches.
    """

    def slope(weights: State, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        def value(leaves: State) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):  # the only attention that is twice differentiable
                return loss(functional_call(model, {**state, **leaves}, (x,)), y)

        if functional:
            slopes: dict[str, Tensor] = torch.func.grad(value)(dict(weights))
            return slopes
        if not differentiable:  # no graph is kept from step to step
            weights = {name: weight.detach() for name, weight in weights.items()}
        leaves = {k: w if w.requires_grad else w.requires_grad_(True) for k, w in weights.items()}
        values = torch.autograd.grad(
            value(leaves),
            list(leaves.values()),
            create_graph=differentiable,
            materialize_grads=True,
        )
        return dict(zip(leaves, values, strict=True))

    before = {name: state[name].detach() for name in names}
    if local is None:
        return slope(before, x, y)
    weights, momenta = dict(before), dict[str, Momenta]()
    rows = local.rows(len(x), order)
    for step, (rate, taken) in enumerate(zip(local.rates, rows, strict=True), 1):
        for name, value in slope(weights, x[taken], y[taken]).items():
            decay = local.weight_decay * weights[name] if local.weight_decay else 0.0
            beside = local.optimizer == "adamw"
            raw = value if beside else value + decay
            move, momenta[name] = _move(local, raw, momenta.get(name), step)
            weights[name] = weights[name] - rate * (move + decay if beside else move)
    return {name: weights[name] - before[name] for name in before}


def _move(
    local: LocalSteps, slope: Tensor, before: Momenta | None, step: int
) -> tuple[Tensor, Momenta]:
    """Return what one step subtracts from a weight, per learning rate, and the new momenta."""
    first, second = before or (torch.zeros_like(slope), torch.zeros_like(slope))
    if local.optimizer == "sgd":
        first = local.momentum * first + slope if local.momentum else slope
        return first, (first, second)
    first = _BETAS[0] * first + (1 - _BETAS[0]) * slope
    second = _BETAS[1] * second + (1 - _BETAS[1]) * slope.square()
    scale = (second / (1 - _BETAS[1] ** step)).clamp(min=_TINY).sqrt() + EPSILON
    return first / (1 - _BETAS[0] ** step) / scale, (first, second)


def clip_scale(update: Mapping[str, Tensor], clip: float | None) -> Tensor | float:
    """Return the factor that brings ``update`` to a joint L2 norm of at most ``clip``."""
    if clip is None:
        return 1.0
    norm = torch.stack([value.square().sum() for value in update.values()]).sum().sqrt()
    return (clip / norm).clamp(max=1.0)


def ready(model: nn.Module, training: bool) -> nn.Module:
    """Return a copy of ``model`` in that mode, which no forward pass changes.

    Batch normalisation in training mode uses the statistics of the batch and does not update the
    running ones. The copy returns the logits of an object that has logits, as transformers' have.

    Raises:
        ConfigError: dropout in training mode: no attack here knows which units are dropped.
    """
    twin = copy.deepcopy(model).train(training).requires_grad_(False)
    if training:
        for name, module in twin.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                raise ConfigError(
                    f"model: {name!r} drops out at random in training mode; set p=0, or use eval()."
                )
        replace_all_batch_norm_modules_(twin)
    twin.register_forward_hook(lambda _module, _inputs, out: getattr(out, "logits", out))
    return twin


class LayerCall(NamedTuple):
    """One call of a layer in a forward pass."""

    name: str
    module: nn.Module
    inputs: Tensor
    output: Any
    given: tuple[Any, ...] = ()  # all arguments, those by keyword last


@contextmanager
def recording(
    net: nn.Module, kinds: type[nn.Module] | tuple[type[nn.Module], ...]
) -> Iterator[list[LayerCall]]:
    """Record the calls of layers of these kinds, in order, while the context is open."""
    calls: list[LayerCall] = []

    def record(
        name: str, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], out: object
    ) -> None:
        given = (*args, *named.values())
        calls.append(LayerCall(name, module, given[0], out, given))

    hooks = [
        module.register_forward_hook(partial(record, name), with_kwargs=True)
        for name, module in net.named_modules()
        if isinstance(module, kinds)
    ]
    try:
        with _layer_by_layer():
            yield calls
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _layer_by_layer() -> Iterator[None]:
    """Keep torch's fused encoder from leaving out the layers that a hook waits for."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _ReachedError(Exception):
    """Leaves a forward pass, of which the later layers are not needed."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


def entering(
    net: nn.Module, layer: str, state: State, *, leaving: bool = False
) -> Callable[[Tensor], Tensor | None]:
    """Return x -> what enters a layer at the weights ``state``; None where it is not called.

    With ``leaving`` it is the first of what a recurrent layer returns: its states.
    """

    def stop(
        _module: nn.Module,
        args: tuple[Any, ...],
        named: dict[str, Any],
        outputs: tuple[Tensor, ...],
    ) -> None:
        raise _ReachedError(outputs[0] if leaving else (*args, *named.values())[0])

    def reach(x: Tensor) -> Tensor | None:
        hook = net.get_submodule(layer).register_forward_hook(stop, with_kwargs=True)
        try:
            with (
                _layer_by_layer(),
                sdpa_kernel(SDPBackend.MATH),
            ):  # the only attention with forward derivatives
                functional_call(net, dict(state), (x,))
        except _ReachedError as reached:
            return reached.value
        finally:
            hook.remove()
        return None  # something else uses its weight

    return reach


def double_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a float64 copy of every parameter and buffer of ``model``, by name."""
    both = [*model.named_parameters(), *model.named_buffers()]
    return {name: as_double(value) for name, value in both}


def as_double(value: Tensor) -> Tensor:
    """Return a copy of ``value`` on the CPU, in float64 unless it holds integers."""
    dtype = torch.float64 if value.is_floating_point() else value.dtype
    return value.detach().to("cpu", dtype, copy=True)


def flat(parts: Iterable[Tensor]) -> Tensor:
    """Return the values of all tensors as one vector, in order."""
    return torch.cat([part.flatten() for part in parts])


def norm(update: Mapping[str, Tensor]) -> float:
    """Return the joint L2 norm of all tensors."""
    return math.sqrt(sum(float(value.double().square().sum()) for value in update.values()))
