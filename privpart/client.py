"""Client: local training of the trainable part, and the update that leaves the device.

Freezing saves memory and time as in FedPT (Sidahmed et al. 2022, section 3.2): gradients, optimiser
state and the copy of the start exist for the trained part only, and the backward pass ends at the
lowest trained layer, below which no activation is kept.

A client minimises its loss plus a term that its objective adds, over the active parameters:

fedavg   nothing (McMahan et al. 2017)
fedprox  mu/2 ||w - start||^2 (Li et al. 2020); frozen and inactive parameters contribute 0
moon     mu times a contrastive loss (Li et al. 2021), which is small if the features are close to
         those of the received model and far from those of the client's own model after its last
         participation. That model stays in the device's memory; a resumed simulation has lost it
         and reports so.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits, cosine_similarity, cross_entropy
from torch.optim import SGD, Adam, Optimizer

from accounting import checks
from accounting.checks import ConfigError
from privpart.clip import clip
from privpart.model import PartialModel

OptimizerName = Literal["sgd", "adam"]
Objective = Literal["fedavg", "fedprox", "moon"]
LossName = Literal["cross_entropy", "binary_cross_entropy"]
_MOST_STEPS = 100_000
"""Vectorized clients list all batches of a round in memory before they train."""
_LARGEST_BATCH = 2**31


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """How a client trains on its own examples; only "moon" keeps anything for the next round.

    Args:
        learning_rate: > 0.
        epochs: passes over the client's examples, 1 to 100,000.
        batch_size: 1 to 2^31; the last batch of a pass may be smaller.
        steps: total number of batches, 1 to 100,000, instead of epochs; None trains whole passes.
        optimizer: ClientOpt of FedPT's Algorithm 1, "sgd" or "adam" with torch's default betas.
        momentum: for "sgd", in [0, 1).
        objective: "fedavg", "fedprox" or "moon", see ``privpart.client``.
        mu: weight of the term that "fedprox" or "moon" adds, > 0.
        temperature: for "moon", > 0.
        loss: see ``loss``; "binary_cross_entropy" is for tags, any number of which may apply.

    Raises:
        ConfigError: a value out of range, or options that contradict each other.
    """

    learning_rate: float
    epochs: int = 1
    batch_size: int = 16
    steps: int | None = None
    optimizer: OptimizerName = "sgd"
    momentum: float = 0.0
    objective: Objective = "fedavg"
    mu: float | None = None
    temperature: float = 0.5
    loss: LossName = "cross_entropy"

    def __post_init__(self) -> None:
        checks.positive("learning_rate", self.learning_rate)
        checks.count("epochs", self.epochs, maximum=_MOST_STEPS)
        checks.count("batch_size", self.batch_size, maximum=_LARGEST_BATCH)
        if self.steps is not None:
            checks.count("steps", self.steps, maximum=_MOST_STEPS)
            if self.epochs != 1:
                raise ConfigError(f"epochs={self.epochs}: leave it out, steps={self.steps} is set.")
        checks.choice("optimizer", self.optimizer, get_args(OptimizerName))
        checks.choice("loss", self.loss, get_args(LossName))
        if not checks.nonnegative("momentum", self.momentum) < 1:
            raise ConfigError(f"momentum={self.momentum}: must be at least 0 and below 1.")
        if self.momentum and self.optimizer == "adam":
            raise ConfigError(f"momentum={self.momentum}: only for sgd; adam has its own.")
        self._check_objective()

    def _check_objective(self) -> None:
        checks.choice("objective", self.objective, get_args(Objective))
        if (self.mu is None) != (self.objective == "fedavg"):
            raise ConfigError(f"mu={self.mu}: fedprox and moon need it, and fedavg has none.")
        if self.mu is not None:
            checks.positive("mu", self.mu)
        checks.positive("temperature", self.temperature)
        if self.objective != "moon" and self.temperature != 0.5:
            raise ConfigError(f"temperature={self.temperature}: only for moon.")

    def batches(self, examples: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield the rows of each batch: passes in fresh random orders, cut off after ``steps``.

        A client without examples has no batches.

        Args:
            examples: number of examples, >= 0.
            generator: draws the orders.
        """
        if not examples:
            return iter(())
        passes = range(self.epochs) if self.steps is None else count()
        every = (
            batch
            for _ in passes
            for batch in torch.split(torch.randperm(examples, generator=generator), self.batch_size)
        )
        return islice(every, self.steps)

    @property
    def plain_sgd(self) -> bool:
        """Whether a step subtracts the gradient of the loss times the learning rate."""
        return self.optimizer == "sgd" and not self.momentum and self.objective != "fedprox"

    def fresh_optimizer(
        self, model: PartialModel, active: Sequence[int] | None = None
    ) -> Optimizer:
        """Return an optimiser, with state, for the active parts of ``model.flat`` only."""
        parts = [model.flat[span] for span in model.spans(active)]
        for part, span in zip(parts, model.spans(active), strict=True):
            part.grad = model.gradient[span]
        if self.optimizer == "adam":
            return Adam(parts, lr=self.learning_rate, fused=True)
        return SGD(parts, lr=self.learning_rate, momentum=self.momentum)


def client_update(
    model: PartialModel,
    start: Tensor,
    x: Tensor,
    y: Tensor,
    *,
    local: LocalTraining,
    clip_norm: float,
    generator: torch.Generator,
    active: Sequence[int] | None = None,
    previous: Tensor | None = None,
    after_step: Callable[[], None] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Train from ``start`` and return the clipped update of the active groups.

    Args:
        model: rebuilt from its seed. Afterwards it holds ``start``, and its gradients are zero.
        start: this round's trainable part, shape (d,); like x and y, on the model's device.
        x: examples, shape (n, ...).
        y: labels, shape (n,), or (n, length) for a language model; see ``loss``.
        local: how to train.
        clip_norm: bound on the joint L2 norm of the result.
        generator: draws the order of the examples; its seed also seeds dropout.
        active: groups of the model that train in this round; None trains all.
        previous: for "moon", the client's own trained part after its last participation, shape
            (d,); None takes ``start``. It is overwritten with the new one, which must not leave the
            device.
        after_step: called after every step, for example to read ``model.flat``.
        out: memory for the result: float32, shape (c,), on the CPU, not overlapping ``start`` or
            the model.

    Returns:
        after - before of the c active parameters, group by group, jointly clipped (see ``clip``),
        on the CPU. If all groups are active, c = d.

    Raises:
        ConfigError: ``out`` has another type or shape, ``start`` is memory of the model, or the
            network wrote to a frozen parameter.
    """
    if out is not None and (out.shape, out.dtype) != ((model.active_dim(active),), torch.float32):
        raise ConfigError(
            f"out: {out.dtype}, shape {tuple(out.shape)}; the result is float32 and of shape "
            f"({model.active_dim(active)},)."
        )
    # another seed than that of the order, so that dropout masks do not repeat its random numbers
    with model.lent(start), _seeded(generator.initial_seed() ^ 1, model.flat.device):
        model.train_only(active)
        received = start if previous is None else previous
        for _ in _steps(model, x, y, local, generator, active, start, received):
            if after_step is not None:
                after_step()
        if previous is not None:
            previous.copy_(model.flat)
        # Written over the gradients, so that a client needs no memory beyond that for training.
        update = torch.sub(model.flat, start, out=model.gradient)
        spans = model.spans(active)
        sent = update[spans[0]] if len(spans) == 1 else torch.cat([update[span] for span in spans])
        # Clipped on the CPU, where the clip is tested: the guarantee rests on its rounding.
        sent = sent.cpu()
        clipped = clip(sent, clip_norm, out=out)
        if out is None:
            return sent.clone() if clipped is sent else clipped
        return clipped if clipped is out else out.copy_(clipped)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Within this context, draw torch's random numbers from a seed, on the CPU and the device."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.default_generator.manual_seed(seed)
        if devices:
            module = getattr(torch, device.type)  # such as torch.cuda
            with module.device(device):
                module.manual_seed(seed)
        yield


def _steps(
    model: PartialModel,
    x: Tensor,
    y: Tensor,
    local: LocalTraining,
    generator: torch.Generator,
    active: Sequence[int] | None,
    start: Tensor,
    previous: Tensor,
) -> Iterator[None]:
    """Train, and yield after every step."""
    optimizer = None if local.plain_sgd else local.fresh_optimizer(model, active)
    trained = [p for p in model.module.parameters() if p.requires_grad]
    for batch in local.batches(len(x), generator):
        if local.objective == "moon":
            total = _moon_loss(model, x[batch], y[batch], local, start, previous)
        else:
            total = loss(model.module(x[batch]), y[batch], local.loss)
        if optimizer is None:
            _descend(total, trained, local.learning_rate)
            yield
            continue
        model.gradient.zero_()
        total.backward()  # type: ignore[no-untyped-call]
        if local.objective == "fedprox":
            for span in model.spans(active):
                add_proximal_gradient(
                    model.gradient[span], model.flat[span], start[span], local.mu or 0.0
                )
        optimizer.step()
        yield


def _descend(total: Tensor, trained: Sequence[Tensor], learning_rate: float) -> None:
    """Take the step of plain SGD; with dense gradients, the same bits as torch's optimiser."""
    # It uses the gradients where autograd allocates them: zeroing ``model.gradient`` and adding to
    # it in every step took a tenth of the time of a dense network.
    gradients = torch.autograd.grad(total, trained, allow_unused=True)
    with torch.no_grad():
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                parameter.add_(gradient, alpha=-learning_rate)


def _moon_loss(
    model: PartialModel,
    x: Tensor,
    y: Tensor,
    local: LocalTraining,
    start: Tensor,
    previous: Tensor,
) -> Tensor:
    with watched_input(last_layer(model.module)) as seen:
        logits = model.module(x)
    received, own = (features_of(model.module, model.views(flat), x) for flat in (start, previous))
    term = contrastive_loss(seen[0], received, own, local.temperature)
    return loss(logits, y, local.loss) + (local.mu or 0.0) * term


def loss(logits: Tensor, y: Tensor, name: LossName = "cross_entropy") -> Tensor:
    """Return the mean loss, of shape ().

    Args:
        logits: shape (n, labels), or (n, length, labels) for a language model; (n, tags) for
            "binary_cross_entropy".
        y: labels, shape (n,) or (n, length); -100 is padding and does not count. For
            "binary_cross_entropy", 0.0 or 1.0 for each tag, shape (n, tags).
        name: the loss to compute.
    """
    if name == "binary_cross_entropy":
        return binary_cross_entropy_with_logits(logits, y)
    return cross_entropy(logits.flatten(0, -2), y.flatten())


def proximal_loss(now: Tensor, start: Tensor, weight: float) -> Tensor:
    """Return weight/2 ||now - start||^2, shape ()."""
    return weight / 2 * (now - start).square().sum()


def add_proximal_gradient(gradient: Tensor, now: Tensor, start: Tensor, weight: float) -> None:
    """Add the gradient of ``proximal_loss`` to ``gradient`` in place; all have shape (c,)."""
    gradient.add_(now, alpha=weight).sub_(start, alpha=weight)


def contrastive_loss(
    features: Tensor, received: Tensor, previous: Tensor, temperature: float
) -> Tensor:
    """Return MOON's contrastive loss, shape (): the cross-entropy of telling two models apart.

    For each example, the similarities of ``features`` to ``received`` and to ``previous``, divided
    by the temperature, are two logits; the right answer is ``received``. The result is the mean.

    Args:
        features: of the model in training, shape (n, f).
        received: features of the model that the server sent, shape (n, f).
        previous: features of the client's model after its last participation, shape (n, f). If that
            is the received model itself, the loss is log 2 and has no gradient.
        temperature: > 0.
    """
    near = cosine_similarity(features, received, dim=1)
    far = cosine_similarity(features, previous, dim=1)
    both = torch.stack([near, far], dim=1) / temperature
    return cross_entropy(both, torch.zeros(len(both), dtype=torch.long, device=both.device))


def last_layer(module: nn.Module) -> nn.Module:
    """Return the last layer with parameters; its input is what MOON calls features.

    Raises:
        ConfigError: the network has no parameters.
    """
    layers = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    if not layers:
        raise ConfigError("objective='moon': the network has no layer with parameters.")
    return layers[-1]


@contextmanager
def watched_input(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list to which every forward pass appends the layer's input, shape (n, f)."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(1)))
    try:
        yield seen
    finally:
        handle.remove()


@torch.no_grad()
def features_of(module: nn.Module, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the features of ``x`` under other parameters, shape (n, f)."""
    with watched_input(last_layer(module)) as seen:
        functional_call(module, dict(parameters), (x,))
    return seen[-1]
