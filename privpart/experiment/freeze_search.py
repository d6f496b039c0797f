"""Freeze search: which layers can stay at their start values (FedPT, section 3.1).

The paper's procedure: freeze the largest block; freeze another one as long as accuracy holds; where
it does not, switch to a smaller block; repeat. It looks at accuracies, so on private data it is a
release of its own, which no epsilon of the later training covers: search on public or proxy data.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite

from torch import nn

from accounting import checks
from accounting.checks import ConfigError
from privpart.patterns import parameters_by_layer

_NORMALIZATION = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, slots=True)
class Trial:
    """One training of the search.

    Attributes:
        frozen: blocks that did not train, in the order in which they were tried.
        numbers: parameters in them.
        accuracy: what the training reached, in [0, 1].
        kept: whether the search goes on from here.
    """

    frozen: tuple[str, ...]
    numbers: int
    accuracy: float
    kept: bool


def freeze_search(
    blocks: Mapping[str, int], accuracy: Callable[[tuple[str, ...]], float], *, tolerance: float
) -> Iterator[Trial]:
    """Yield each trial as it ends: first the full model, then one per block, largest first.

    The last trial that was kept holds the result. A block is kept if the accuracy with it frozen,
    beside all those kept before, is at most ``tolerance`` below the full model's.

    Args:
        blocks: numbers per block, see ``layer_blocks``; at least two.
        accuracy: trains with the named blocks frozen and returns the accuracy in [0, 1], on public
            or proxy data; the same seeds each time, best several.
        tolerance: loss of accuracy that still counts as none, >= 0; in parts of one.

    >>> hurts = lambda frozen: 0.9 - 0.2 * ("conv" in frozen) - 0.01 * len(frozen)
    >>> sizes = {"dense1": 500, "conv": 80, "dense2": 40, "head": 20}
    >>> [t.frozen for t in freeze_search(sizes, hurts, tolerance=0.025) if t.kept]
    [(), ('dense1',), ('dense1', 'dense2')]
    """
    checks.nonnegative("tolerance", tolerance)
    if len(blocks) < 2:
        raise ConfigError(f"blocks={dict(blocks)}: a search needs at least two to choose from.")
    least = _accuracy(accuracy, ()) - tolerance
    yield Trial((), 0, least + tolerance, kept=True)
    frozen: tuple[str, ...] = ()
    for block in sorted(blocks, key=blocks.__getitem__, reverse=True):
        candidate = (*frozen, block)
        if len(candidate) == len(blocks):
            return  # a model of which nothing trains
        reached = _accuracy(accuracy, candidate)
        numbers = sum(blocks[name] for name in candidate)
        kept = reached >= least
        yield Trial(candidate, numbers, reached, kept)
        if kept:
            frozen = candidate


def layer_blocks(module: nn.Module) -> dict[str, int]:
    """Return the parameters of each layer, by its name, normalisation left out, tied ones once.

    Normalisation layers always train: they are small, and freezing them hurts (FedPT, section 3.1).
    """
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    return {
        prefix: sum(sizes[name] for name in names)
        for prefix, names in parameters_by_layer(module).items()
        if not isinstance(module.get_submodule(prefix), _NORMALIZATION)
    }


def _accuracy(accuracy: Callable[[tuple[str, ...]], float], frozen: tuple[str, ...]) -> float:
    reached = float(accuracy(frozen))
    if not (isfinite(reached) and 0 <= reached <= 1):
        raise ConfigError(f"accuracy={reached} with {frozen} frozen: must lie between 0 and 1.")
    return reached
