"""Text observation: everything that an attacker may use of an update of token ids."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accounting import checks
from accounting.checks import ConfigError
from attacks.observation import Observation, sent_fields
from attacks.transforms import NONE
from attacks.update import Loss, flat, norm, ready, recording

_IGNORED = -100  # as in torch's cross_entropy
_EXACT_TYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class TextObservation(Observation):
    """What an attacker sees of one client's update of token ids; ``shape`` is (B, T).

    Args:
        pad: id of the padding, which no position attends to and no loss counts, if there is any.
        language: whether the labels are the tokens themselves (``NextToken``).
        rounding: relative rounding error of the update; None takes that of the smallest type that
            holds it.
    """

    pad: int | None = None
    language: bool = False
    rounding: float | None = None

    def __post_init__(self) -> None:
        super(TextObservation, self).__post_init__()  # slots make a second class
        if len(self.shape) != 2:
            raise ConfigError(f"shape={self.shape}: must be (B, T), all at least 1.")

    @property
    def resolution(self) -> float:
        """Relative rounding error of the update."""
        if self.rounding is not None:
            return self.rounding
        values = flat(self.update.values())
        exact = (t for t in _EXACT_TYPES if torch.equal(values.to(t).double(), values))
        eps = torch.finfo(next(exact, torch.float64)).eps
        if self.local is None:
            return eps
        # the change of a weight is rounded as the weight is
        before = norm({name: self.state[name] for name in self.update})
        return eps * max(1.0, before / max(norm(self.update), 1e-300))


def one_batch(observed: TextObservation) -> TextObservation:
    """Return what one client with all sentences would send, where that is the mean of the sum."""
    local, summed = observed.local, len(observed.transform.steps) == 1 and observed.clients > 1
    linear = local is None or (local.optimizer == "sgd" and local.steps == 1)
    if not (summed and linear and observed.clip is None):
        return observed
    mean = {name: value / observed.clients for name, value in observed.update.items()}
    std = observed.noise_std / observed.clients
    return replace(observed, update=mean, noise_std=std, transform=NONE)


@dataclass(frozen=True, slots=True)
class NextToken:
    """Mean cross-entropy of each next token: (logits (B, T, V), tokens (B, T)) -> scalar."""

    pad: int | None = None  # id that is never predicted

    def __call__(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the loss."""
        targets = tokens[:, 1:]
        if self.pad is not None:
            targets = targets.masked_fill(targets == self.pad, _IGNORED)
        return cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())


def text_model(model: nn.Module, pad: int | None = None) -> nn.Module:
    """Return ``model`` ready to attack: a float64 copy in eval mode that maps ids to logits.

    Where the model takes an attention mask, it receives that of the padding.
    """
    twin = ready(model, training=False).double()
    if pad is None or "attention_mask" not in inspect.signature(model.forward).parameters:
        return twin

    def add(
        _module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        return args, {**given, "attention_mask": (args[0] != pad).long()}

    twin.register_forward_pre_hook(add, with_kwargs=True)
    return twin


def observe_text(
    model: nn.Module,
    tokens: Tensor,
    labels: Tensor | None = None,
    *,
    loss: Loss | None = None,
    pad: int | None = None,
    reveal_labels: bool = True,
    **options: Any,  # noqa: ANN401 - visible, local, clip, noise_multiplier, generator
) -> TextObservation:
    """Return what a client that trains on these sentences sends.

    A copy of the model runs in float64 on the CPU in eval mode; only the visible parameters train.

    Args:
        model: token ids (B, T) -> logits, or an output that has logits.
        tokens: (B, T) ids.
        labels: (B,) of a text classifier; None trains a language model to predict its own tokens.
        loss: of the logits and the labels, or of a language model the tokens; cross-entropy.
        pad: see ``TextObservation``.
        reveal_labels: whether the attacker is told ``labels``.
        options: those of ``observe``, which also says what is refused.
    """
    check_tokens(model, tokens, labels, pad)
    language = labels is None
    loss = loss or (NextToken(pad) if language else cross_entropy)
    y = tokens if labels is None else labels
    fields = sent_fields(model, text_model(model, pad), tokens, y, loss=loss, **options)
    revealed = labels if reveal_labels else None
    shape = tuple(tokens.shape)
    return TextObservation(**fields, shape=shape, labels=revealed, pad=pad, language=language)


def check_tokens(
    model: nn.Module, tokens: Tensor, labels: Tensor | None, pad: int | None = None
) -> None:
    """Raise a ConfigError unless tokens (B, T) and pad are ids of the model, and labels fit."""
    if tokens.ndim != 2 or not _whole(tokens) or min(tokens.shape) < 1:
        raise ConfigError(f"tokens: {tokens.dtype} {tuple(tokens.shape)}; must be (B, T) ids.")
    count = vocabulary(model)
    if not bool(((tokens >= 0) & (tokens < count)).all()):
        raise ConfigError(f"tokens: must be ids from 0 to {count - 1}, those of the embedding.")
    if pad is not None:
        hint = "Name an id of the embedding, which stands after shorter sentences."
        checks.count("pad", pad, minimum=0, maximum=count - 1, hint=hint)
    if labels is not None and (labels.shape != tokens.shape[:1] or not _whole(labels)):
        raise ConfigError(
            f"labels: {labels.dtype} {tuple(labels.shape)}; must be ({len(tokens)},) integers."
        )


def without_padding(row: Sequence[int], pad: int | None) -> tuple[int, ...]:
    """Return a sentence without the padding after it."""
    last = max((i for i, token in enumerate(row) if token != pad), default=-1)
    return tuple(row[: last + 1])


def _whole(values: Tensor) -> bool:
    return values.dtype != torch.bool and not values.is_floating_point() | values.is_complex()


def token_embedding(model: nn.Module) -> tuple[str, nn.Embedding]:
    """Return the name of the embedding that reads the token ids, and the embedding."""
    probe = torch.tensor([[1, 0]])  # no positions, and no types
    try:
        with torch.no_grad(), recording(model, nn.Embedding) as calls:
            model(probe)
    except Exception as error:
        raise ConfigError(f"model: does not take token ids: {error}") from error
    for call in calls:
        if isinstance(call.module, nn.Embedding) and torch.equal(call.inputs, probe):
            return call.name, call.module
    raise ConfigError("model: has no torch.nn.Embedding that reads the token ids.")


def vocabulary(model: nn.Module) -> int:
    """Return the number of token ids."""
    return token_embedding(model)[1].num_embeddings
