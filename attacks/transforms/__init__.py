"""Transforms: how updates are changed on their way to the server, declared as "kind:argument"."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import Tensor

from accounting.checks import ConfigError
from attacks.transforms.bits import Bits
from attacks.transforms.clients import Sum
from attacks.transforms.signs import Signs
from attacks.transforms.sparse import Prune, TopK
from attacks.transforms.tensor_clip import ClipPerTensor
from attacks.transforms.transform import Step, Transform, Update

__all__ = ["KINDS", "NONE", "Declared", "Transform", "declared"]

KINDS: Mapping[str, type[Transform]] = {
    "top-k": TopK,
    "prune": Prune,
    "signs": Signs,
    "bits": Bits,
    "clip-per-tensor": ClipPerTensor,
    "sum": Sum,
}
FORMS = ", ".join([*(kind.form for kind in KINDS.values()), "none"])


@dataclass(frozen=True)
class Own(Transform):
    """A function of the user's: update by name -> what is sent, differentiable."""

    function: Callable[[Update], Mapping[str, Tensor]]

    def __str__(self) -> str:
        return getattr(self.function, "__name__", "own function")

    def __call__(self, update: Update) -> dict[str, Tensor]:
        """Return what the function returns, with the names of the update."""
        sent = self.function(dict(update))
        if sent.keys() != update.keys() or any(
            value.shape != update[name].shape for name, value in sent.items()
        ):
            raise ConfigError(f"transform={self}: must return the names and shapes that it gets.")
        return {name: sent[name] for name in update}


@dataclass(frozen=True)
class Declared:
    """The transforms between an update and what is sent, in their order; () is none."""

    steps: tuple[Transform, ...] = ()

    def __post_init__(self) -> None:
        names = [str(step) for step in self.steps]
        if any(step.clients > 1 for step in self.steps[:-1]):
            raise ConfigError(f"transform={names}: a sum comes last, and once.")
        exact = [step.loses for step in self.steps if step.clients == 1]
        if exact != sorted(exact):
            raise ConfigError(
                f"transform={names}: what scales an update, or a function, must come before "
                "top-k, prune, bits and signs."
            )

    def __str__(self) -> str:
        return ", ".join(map(str, self.steps)) or "none"

    @property
    def clients(self) -> int:
        """The number of clients whose updates are summed."""
        return self.steps[-1].clients if self.steps else 1

    @property
    def loses(self) -> bool:
        """Whether a part of an update is lost."""
        return any(step.loses for step in self.steps)

    def __call__(self, update: Update) -> dict[str, Tensor]:
        """Return what one client sends of ``update``."""
        return _applied(self.steps, update)

    def before(self, update: Update) -> dict[str, Tensor]:
        """Return the update before the first transform that loses a part of it."""
        return _applied([step for step in self.steps if not step.loses], update)

    def towards(self, sent: Update, *, checked: bool = False) -> Step:
        """Return what maps the result of ``before``, scaled as ``sent``, to the nearest to it."""
        losing = [step for step in self.steps if step.loses]
        steps = [step.checked(sent) if checked else step.towards(sent) for step in losing]
        return lambda update: _applied(steps, {name: update[name] for name in sent})

    def shared_out(self, name: str, examples: int) -> None:
        """Raise a ConfigError unless each client has as many of the examples."""
        if examples % self.clients:
            raise ConfigError(
                f"{name}: {examples} examples; must be as many of each of {self.clients} clients "
                f"(transform={self})."
            )


NONE = Declared()


def _applied(steps: Sequence[Step], update: Update) -> dict[str, Tensor]:
    return reduce(lambda value, step: step(value), steps, dict(update))


def declared(given: Any) -> Declared:  # noqa: ANN401 - what users may pass
    """Return the transforms that a text, a function, or a sequence of them declares.

    Raises:
        ConfigError: a kind that does not exist, an argument out of range, or an order in which
            updates cannot be matched.

    >>> str(declared(["top-k:0.1", "sum:5"]))
    'top-k:0.1, sum:5'
    """
    if isinstance(given, Declared):
        return given
    listed = [given] if isinstance(given, str) or callable(given) else list(given or ())
    return Declared(() if listed == ["none"] else tuple(map(_one, listed)))


def _one(item: Any) -> Transform:  # noqa: ANN401
    if isinstance(item, Transform):
        return item
    if callable(item):
        return Own(item)
    kind, _, argument = str(item).partition(":")
    try:
        return KINDS[kind].parsed(argument)
    except (KeyError, ValueError):
        raise ConfigError(f"transform={str(item)!r}: must be one of {FORMS}.") from None
