"""Client: local training of the trainable part, and the update that leaves the device.

A client minimises its loss plus a term that its objective adds, over the active parameters:

fedavg   nothing (McMahan et al. 2017)
fedprox  mu/2 ||w - start||^2 (Li et al. 2020); frozen and inactive parameters contribute 0
moon     mu times a contrastive loss (Li et al. 2021), which is small if the features are close to
         those of the received model and far from those of the client's own model after its last
         participation, which stays in the device's memory
"""

import random  # noqa: TID251  only to seed what other people's code draws
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from accounting.checks import ConfigError
from privpart.clip import clip_and_measure
from privpart.data.batches import Batch, count_rows, take, tensors_of
from privpart.data.index import batch_rows, moved
from privpart.model import PartialModel, logits_of
from privpart.optimizer import FlatOptimizer
from privpart.settings.client import LocalTraining, LossName

Loss = Callable[[nn.Module, Batch], Tensor]
"""Returns the mean loss of a batch, of shape (), from the module and the batch."""
Augment = Callable[[Batch], Batch]
"""Returns a changed batch, such as one of random crops; draws from torch's random numbers."""


def fresh_optimizer(
    local: LocalTraining, model: PartialModel, active: Sequence[int] | None = None
) -> tuple[FlatOptimizer, list[Tensor]]:
    """Return an optimiser of the active parts of ``model.flat`` and of ``model.own``.

    Beside it are the tensors where ``model`` has the gradient of each part at every step.
    """
    vectors = [(model.flat[span], model.gradient[span]) for span in model.spans(active)]
    vectors += [(model.own, model.own_gradient)] if model.own.numel() else []
    return FlatOptimizer(local, [p for p, _ in vectors]), [g for _, g in vectors]


def client_update(
    model: PartialModel,
    start: Tensor,
    examples: Batch,
    *,
    clip_norm: float,
    **training: Any,  # noqa: ANN401  as of ``unclipped_update``
) -> Tensor:
    """Train from ``start`` and return the clipped update of the active groups.

    Args:
        model: rebuilt from its seed. Afterwards it holds ``start``, and its gradients are zero.
        start: this round's trainable part, shape (d,); like the examples, on the model's device.
        examples: the client's n examples: a nest of tensors of shape (n, ...), for example
            ``(x, y)`` with labels y of shape (n,), see ``batch_loss``.
        clip_norm: bound on the joint L2 norm of the result.
        training: the others of ``unclipped_update``, by keyword; all but two may be missing.
        local: how to train.
        generator: draws the order of the examples; its seed also seeds dropout and ``augment``.
        active: groups of the model that train in this round; None trains all.
        previous: for "moon", the client's own trained part after its last participation, shape
            (d,); None takes ``start``. It is overwritten with the new one, which must not leave the
            device.
        own: the client's local part after its last participation, shape (l,); None takes
            ``model.own_start``. It is overwritten with the new one, which must not leave the
            device.
        after_step: called after every step, for example to read ``model.flat``.

    Returns:
        after - before of the c active parameters, group by group, jointly clipped (see ``clip``),
        on the CPU. If all groups are active, c = d. If training did not stay finite, every entry
        is NaN: the server counts the update as zeros, and sees why.

    Raises:
        ConfigError: ``start`` is memory of the model, the network wrote to a frozen parameter, the
            loss or ``augment`` failed on a batch, or either is a name that was not replaced by its
            function.
    """
    update = unclipped_update(model, start, examples, **training).cpu()
    return clip_and_measure(update, clip_norm, out=update)[0]


def unclipped_update(
    model: PartialModel,
    start: Tensor,
    examples: Batch,
    *,
    local: LocalTraining,
    generator: torch.Generator,
    active: Sequence[int] | None = None,
    previous: Tensor | None = None,
    own: Tensor | None = None,
    after_step: Callable[[], None] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Train as ``client_update`` does; return the update before clipping, shape (c,).

    It is written into ``out``, if that is given, and is on the model's device.
    """
    # another seed than that of the order, so that dropout masks do not repeat its random numbers
    user_code = callable(local.loss) or local.augment is not None
    seed = generator.initial_seed() ^ 1
    with model.lent(start), seeded(seed, model.flat.device, everything=user_code):
        model.train_only(active)
        if own is not None:
            model.own.copy_(own)
        received = start if previous is None else previous
        for _ in _steps(model, examples, local, generator, active, start, received):
            if after_step is not None:
                after_step()
        for memory, now in ((previous, model.flat), (own, model.own)):
            if memory is not None:
                memory.copy_(now)
        update, end = torch.empty_like(model.flat) if out is None else out, 0
        for span in model.spans(active):
            first, end = end, end + span.stop - span.start
            torch.sub(model.flat[span], start[span], out=update[first:end])
    return update[:end]


@contextmanager
def seeded(seed: int, device: torch.device, *, everything: bool = False) -> Iterator[None]:
    """Within this context, draw torch's random numbers from a seed, on the CPU and the device.

    With ``everything``, those of NumPy and of Python's module random, which other people's code may
    draw from, follow from the seed, too.
    """
    # drawing must not depend on, nor disturb, what the caller draws elsewhere
    before = (np.random.get_state(), random.getstate()) if everything else None  # noqa: NPY002
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.default_generator.manual_seed(seed)
        if devices:
            module = getattr(torch, device.type)  # such as torch.cuda
            with module.device(device):
                module.manual_seed(seed)
        if before is not None:
            np.random.seed(seed % 2**32)  # noqa: NPY002
            random.seed(seed)
        try:
            yield
        finally:
            if before is not None:
                np.random.set_state(before[0])  # noqa: NPY002
                random.setstate(before[1])


def _steps(
    model: PartialModel,
    examples: Batch,
    local: LocalTraining,
    generator: torch.Generator,
    active: Sequence[int] | None,
    start: Tensor,
    previous: Tensor,
) -> Iterator[None]:
    """Train, and yield after every step."""
    fresh = None if local.plain_sgd else fresh_optimizer(local, model, active)
    trained = [p for p in model.module.parameters() if p.requires_grad]
    gradients = [cast("Tensor", p.grad) for p in trained]  # the model's, which a loss may replace
    names = [name for name, p in model.module.named_parameters() if p.requires_grad]
    batches = batch_rows(local, count_rows(examples), generator)
    for step, rows in enumerate(moved(batches, model.flat.device)):
        batch = take(examples, rows)
        if local.augment is not None:
            batch = augmented(batch, local.augment)
        if local.objective == "moon":
            total = _moon_loss(model, batch, local, start, previous)
        else:
            total = batch_loss(model.module, batch, local.loss)
        if fresh is None:
            moving = local.moving(names, step)
            _descend(total, list(compress(trained, moving)), local.learning_rate)
            yield
            continue
        _differentiate(total, trained, gradients)
        if local.objective == "fedprox":
            mu = local.mu or 0.0
            for span in model.spans(active):
                model.gradient[span].add_(model.flat[span], alpha=mu).sub_(start[span], alpha=mu)
        optimizer, into = fresh
        optimizer.step(into)
        yield


def _descend(total: Tensor, trained: Sequence[Tensor], learning_rate: float) -> None:
    """Take the step of plain SGD; with dense gradients, the same bits as torch's optimiser."""
    # It uses the gradients where autograd allocates them: zeroing ``model.gradient`` and adding to
    # it in every step took a tenth of the time of a dense network.
    gradients = loss_gradients(total, trained)
    with torch.no_grad():
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                parameter.add_(gradient, alpha=-learning_rate)


def _differentiate(total: Tensor, trained: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Write the gradient of each parameter into its tensor of ``out``; zeros where it has none."""
    for gradient, to in zip(loss_gradients(total, trained), out, strict=True):
        to.zero_()
        if gradient is not None:
            to.add_(gradient)  # not copied, because it may be sparse


def loss_gradients(total: Tensor, trained: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradient of each parameter; None where the loss does not depend on it.

    Raises:
        ConfigError: the loss switched the gradient of a parameter off.
    """
    if not all(parameter.requires_grad for parameter in trained):
        raise ConfigError(
            "the loss or the network switched off the gradient of a parameter that trains "
            "(requires_grad_); choose what trains by the patterns in train."
        )
    return torch.autograd.grad(total, trained, allow_unused=True)


def _moon_loss(
    model: PartialModel, batch: Batch, local: LocalTraining, start: Tensor, previous: Tensor
) -> Tensor:
    """Return the loss of a batch and mu times MOON's contrastive loss, shape ().

    That is the mean cross-entropy of telling two models apart. For each example, the similarities
    of its features to those that the received and the previous model have, divided by the
    temperature, are two logits; the right answer is the received one. If both models are the same,
    it is log 2 and has no gradient.
    """
    with _features(model.module) as own:
        total = batch_loss(model.module, batch, local.loss)
    if not own:
        raise ConfigError("objective='moon': the loss did not use the network's last layer.")
    similarities = []
    for flat in (start, previous):
        parameters = {f"module.{name}": value for name, value in model.views(flat).items()}
        with _features(model.module) as other, torch.no_grad():
            functional_call(_LossOf(model.module, local.loss), parameters, (batch,))
        similarities.append(functional.cosine_similarity(torch.cat(own), torch.cat(other), dim=1))
    logits = torch.stack(similarities, dim=1) / local.temperature
    received = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return total + (local.mu or 0.0) * functional.cross_entropy(logits, received)


@contextmanager
def _features(module: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list to which forward passes append the input of the last layer with parameters."""
    # the input of the head is what MOON calls the representation (Li et al. 2021, section 3.2)
    features: list[Tensor] = []
    layers = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    handle = layers[-1].register_forward_pre_hook(
        lambda _, inputs: features.append(inputs[0].flatten(1))
    )
    try:
        yield features
    finally:
        handle.remove()


class _LossOf(nn.Module):
    """A network with its loss on top, so that ``functional_call`` reaches both."""

    def __init__(self, module: nn.Module, loss: str | Loss) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, batch: Batch) -> Any:  # noqa: ANN401
        return _computed_loss(self.module, batch, self.loss)


def batch_loss(module: nn.Module, batch: Batch, loss: str | Loss = "cross_entropy") -> Tensor:
    """Return the mean loss of a batch, of shape ().

    Args:
        module: the network.
        batch: ``(inputs, labels)``, or a dict whose "labels" (or "label") are the labels and all
            other entries the inputs, which the network takes by name. Inputs of a pair may be a
            dict, too. Functions and "model" take any nest of tensors.
        loss: a name of ``mean_loss``, computed from what the network returns, or from its
            ``logits`` if it has that attribute, as outputs of Hugging Face models do. "model" is
            the ``loss`` attribute of what the network returns for the whole batch, labels
            included. A function gets the module and the batch.

    Raises:
        ConfigError: the network or the loss fails on this batch, or the result is not a tensor of
            shape () that depends on what trains; the sentence names the loss. A language model's
            cross-entropy with labels that repeat its inputs: it would learn to copy.
    """
    total = _computed_loss(module, batch, loss)
    # a loss that no parameter reaches would train nothing, without a sign
    if isinstance(total, Tensor) and not total.dim() and total.requires_grad:
        return total
    returned = f"a {type(total).__name__}"
    if isinstance(total, Tensor):
        depends = "" if total.requires_grad else ", which depends on no parameter that trains"
        returned = f"a tensor of shape {tuple(total.shape)} and type {total.dtype}{depends}"
    raise ConfigError(
        f"{_named('loss', loss)}: returned {returned}; must return the mean loss of the batch, a "
        "floating-point tensor of shape () computed by the network with torch, without .item() or "
        ".detach()."
    )


def _computed_loss(module: nn.Module, batch: Batch, loss: str | Loss) -> Any:  # noqa: ANN401
    """Return what the loss returns."""
    with _told("loss", loss, batch):
        if not isinstance(loss, str):
            return loss(module, batch)
        if loss == "model":
            stated = getattr(called(module, batch), "loss", None)
            if stated is None:
                raise ConfigError(
                    "loss='model': the network returned no loss; it must return an object with the "
                    "attribute loss. A Hugging Face model does if the examples have an entry named "
                    "labels."
                )
            return stated
        if loss not in get_args(LossName):
            raise ConfigError(_not_replaced("loss", loss))
        inputs, labels = inputs_and_labels(batch, f"loss={loss!r}")
        outputs = logits_of(called(module, inputs))
        _refuse_copying(inputs, outputs, labels, loss)
        return mean_loss(outputs, labels, loss)


@contextmanager
def _told(field: str, function: str | Callable[..., Any], batch: Batch) -> Iterator[None]:
    """Within this context, turn the errors of a loss or augment into sentences."""
    try:
        yield
    except Exception as error:
        named = isinstance(error, ConfigError) and field == "loss"
        no_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
        # torch's allocator on the CPU raises no specific type
        if named or no_memory or "allocate memory" in str(error):
            raise
        raise ConfigError(
            f"{_named(field, function)}: {error_in(error, function)} The batch: {_shown(batch)}."
        ) from error


def augmented(batch: Batch, augment: str | Augment) -> Batch:
    """Return what ``augment`` makes of a batch.

    Raises:
        ConfigError: it fails, returns no examples, or is a name that was not replaced.
    """
    if isinstance(augment, str):
        raise ConfigError(_not_replaced("augment", augment))
    with _told("augment", augment, batch):
        changed = augment(batch)
        if count_rows(changed):
            return changed
    raise ConfigError(f"{_named('augment', augment)}: returned no examples; must keep some.")


def called(module: nn.Module, inputs: Batch) -> Any:  # noqa: ANN401
    """Return what a network makes of inputs, which it takes by name if they are a dict."""
    return module(**inputs) if isinstance(inputs, dict) else module(inputs)


def inputs_and_labels(batch: Batch, what: str) -> tuple[Batch, Tensor]:
    """Return the parts of a batch; without labels, raise ConfigError: ``what`` needs them."""
    if isinstance(batch, dict):
        for key in ("labels", "label"):
            if key in batch and len(batch) > 1:
                return {name: value for name, value in batch.items() if name != key}, batch[key]
    elif isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    raise ConfigError(
        f"{what}: the examples are {_shown(batch)}; must be a pair (inputs, labels), or a dict "
        "with an entry named labels. For others, pass a function of the module and the batch."
    )


def _refuse_copying(inputs: Batch, outputs: Tensor, labels: Tensor, loss: str) -> None:
    """Raise ConfigError if each position's label is the word at that position."""
    words = inputs.get("input_ids") if isinstance(inputs, dict) else inputs
    if loss != "cross_entropy" or not isinstance(words, Tensor) or words.is_floating_point():
        return
    if outputs.dim() != 3 or words.shape != labels.shape:
        return
    labelled = labels != -100
    repeats = torch.equal(torch.where(labelled, labels, words), words)
    # a text of one repeated word has such labels rightly, and so has a masked word that was kept
    if repeats and 2 * labelled.sum() > labelled.numel() and (words != words[:, :1]).any():
        raise ConfigError(
            "loss='cross_entropy': the labels repeat the inputs, so the network would learn to "
            "copy. Use loss='model', which compares each word with the next, or shift the labels."
        )


def _not_replaced(field: str, reference: str) -> str:
    return (
        f"{field}={reference!r}: names a function that was not loaded; pass the function itself, "
        "or train with a plan file, which loads it."
    )


def _named(field: str, function: str | Callable[..., Any]) -> str:
    if isinstance(function, str):
        return f"{field}={function!r}"
    return f"{field}={getattr(function, '__qualname__', type(function).__name__)}"


def error_in(error: Exception, function: str | Callable[..., Any]) -> str:
    """Return an error's type and message, and the line of the function's own file."""
    source = getattr(getattr(function, "__code__", None), "co_filename", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == source]
    place = f" ({source}, line {frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())[:500].rstrip(".")
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return f"{kind}{message}{place}."


def _shown(batch: Batch) -> str:
    """Return names, types and shapes of a batch's tensors, never their values."""
    try:
        leaves = [
            f"{name} {str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
            for name, t in tensors_of(batch)
        ]
    except ConfigError as error:
        return str(error).rstrip(".")
    return ", ".join(leaves[:6]) + (", ..." if len(leaves) > 6 else "")


def mean_loss(outputs: Tensor, y: Tensor, name: str = "cross_entropy") -> Tensor:
    """Return the mean loss, of shape ().

    Args:
        outputs: logits, shape (n, labels), or (n, length, labels) for a language model; (n, tags)
            for "binary_cross_entropy"; predictions, of y's shape, for "mean_squared_error". For
            the last two, a last dimension of 1 may be missing from y.
        y: labels, shape (n,) or (n, length); -100 is padding and does not count. For
            "binary_cross_entropy", 0.0 or 1.0 for each tag, shape (n, tags). For
            "mean_squared_error", the values to predict.
        name: the loss to compute.

    Raises:
        ConfigError: labels that the network has no output for, or of another shape than what it
            predicts.
    """
    if name == "cross_entropy":
        if y.dtype not in (torch.int64, torch.uint8):
            raise ConfigError(
                f"loss='cross_entropy': labels have type {y.dtype}; must be torch.int64. To "
                "predict values, use mean_squared_error."
            )
        logits = outputs.flatten(0, -2) if outputs.dim() > 1 else outputs
        try:
            return functional.cross_entropy(logits, y.flatten())
        except IndexError as error:
            low, high = int(y[y != -100].min()), int(y.max())
            raise ConfigError(
                f"loss='cross_entropy': label {low if low < 0 else high} is out of range; the "
                f"network has {outputs.shape[-1]} outputs, so labels must be 0 to "
                f"{outputs.shape[-1] - 1}, or -100 for padding."
            ) from error
    if y.shape != outputs.shape and (*y.shape, 1) == tuple(outputs.shape):
        outputs = outputs.squeeze(-1)
    if y.shape != outputs.shape:  # torch would repeat the smaller one, and learn something else
        raise ConfigError(
            f"loss={name!r}: the network returns shape {tuple(outputs.shape)} for labels of shape "
            f"{tuple(y.shape)}; must be equal."
        )
    y = y if y.is_floating_point() else y.to(outputs.dtype)
    if name == "mean_squared_error":
        return functional.mse_loss(outputs, y)
    return functional.binary_cross_entropy_with_logits(outputs, y)
