"""Freeze search: which layers can stay at their start values (FedPT, section 3.1).

The paper's procedure: freeze the largest block, then the next largest, and so on. A block whose
freezing costs accuracy trains again, and the search continues with the next smaller one. The search
looks at accuracies, so on private data it is a release of its own, which no epsilon of the later
training covers: search on public or proxy data.
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
class FreezeTrial:
    """One training of the search.

    Attributes:
        frozen: blocks that did not train, in the order in which they were tried.
        parameter_count: parameters in these blocks.
        accuracy: what the training reached, in [0, 1].
        kept: whether the last of these blocks stays frozen in the later trials.
    """

    frozen: tuple[str, ...]
    parameter_count: int
    accuracy: float
    kept: bool


def freeze_search(
    blocks: Mapping[str, int], accuracy: Callable[[tuple[str, ...]], float], *, tolerance: float
) -> Iterator[FreezeTrial]:
    """Yield each trial as it ends: first the full model, then one per block, largest first.

    The last trial that was kept holds the result. A trial is kept if its accuracy, with one more
    block frozen than in the last one kept, is at most ``tolerance`` below the full model's.

    Args:
        blocks: parameters per block, see ``layer_blocks``; at least two blocks.
        accuracy: trains with the named blocks frozen and returns the accuracy in [0, 1], on public
            or proxy data. Use the same seeds each time, and several.
        tolerance: loss of accuracy that is accepted, >= 0; 0.01 is one point.

    >>> hurts = lambda frozen: 0.9 - 0.2 * ("conv" in frozen) - 0.01 * len(frozen)
    >>> sizes = {"dense1": 500, "conv": 80, "dense2": 40, "head": 20}
    >>> [t.frozen for t in freeze_search(sizes, hurts, tolerance=0.025) if t.kept]
    [(), ('dense1',), ('dense1', 'dense2')]
    """
    checks.nonnegative("tolerance", tolerance)
    if len(blocks) < 2:
        raise ConfigError(f"blocks={dict(blocks)}: a search needs at least two to choose from.")
    least = _accuracy(accuracy, ()) - tolerance
    yield FreezeTrial((), 0, least + tolerance, kept=True)
    frozen: tuple[str, ...] = ()
    for block in sorted(blocks, key=blocks.__getitem__, reverse=True):
        candidate = (*frozen, block)
        if len(candidate) == len(blocks):
            return  # nothing would train
        reached = _accuracy(accuracy, candidate)
        frozen_count = sum(blocks[name] for name in candidate)
        kept = reached >= least
        yield FreezeTrial(candidate, frozen_count, reached, kept)
        if kept:
            frozen = candidate


def layer_blocks(module: nn.Module) -> dict[str, int]:
    """Return the number of parameters of each layer, by its name; tied ones count once.

    Normalization layers are left out, so they always train: they are small, and freezing them costs
    accuracy (FedPT, section 3.1).
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
