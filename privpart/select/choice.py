"""Choice: the keys and the delivery that a plan's table ``[select]`` names."""

from collections.abc import Callable, Sequence

from torch import nn

from accounting.checks import ConfigError
from privpart.data.tasks.shakespeare import BEGIN, UNKNOWN
from privpart.select.delivery import Delivery, broadcast, on_demand, pregenerated, private
from privpart.select.key_spaces import key_spaces
from privpart.select.keys import (
    Counts,
    IndependentKeys,
    KeyChooser,
    SharedKeys,
    Strategy,
    StructuredKeys,
    random,
    random_top,
    top,
)
from privpart.select.layout import KeySpace
from privpart.settings.select import DeliveryName, SelectChoice

_ALWAYS = (UNKNOWN, BEGIN)
"""Words that every client selects."""
_STRATEGIES: dict[str, Strategy] = {"top": top, "random": random, "random-top": random_top}
_DELIVERIES: dict[DeliveryName, Delivery] = {
    "broadcast": broadcast,
    "on-demand": on_demand,
    "pre-generated": pregenerated,
    "pir": private,
}


def fetched_by(choice: SelectChoice) -> Delivery:
    """Return the function that delivers slices."""
    return _DELIVERIES[choice.delivery]


def spaces_of(choice: SelectChoice, network: nn.Module) -> list[KeySpace]:
    """Return the chosen key spaces of ``network``, in the order of ``choice.chosen``."""
    spaces = key_spaces(network)
    for name in choice.chosen:
        if name not in spaces:
            raise ConfigError(
                f"select.{name}: this network has none. Clients can select its "
                f"{' and '.join(spaces) or 'nothing'}."
            )
    return [spaces[name] for name in choice.chosen]


def choosers_of(
    select: SelectChoice,
    sizes: Sequence[int],
    *,
    counts: Callable[[int], Counts] | None = None,
    data_seed: int = 0,
) -> list[KeyChooser]:
    """Return one chooser of keys per key space, of ``sizes`` keys each.

    ``counts`` are those of the words in a client's data, None if only public keys matter.
    ``data_seed`` is the seed of the devices' draws.
    """
    choosers: list[KeyChooser] = []
    for (name, choice), size in zip(select.chosen.items(), sizes, strict=True):
        # The words that every client selects leave room for one of its own.
        minimum = len(_ALWAYS) + 1 if choice.structured else 1
        if not minimum <= choice.m <= size:
            raise ConfigError(f"select.{name}.m={choice.m}: must be from {minimum} to K={size}.")
        if choice.keys == "shared":
            choosers.append(SharedKeys(size, choice.m, choice.seed))
        elif choice.structured and counts is not None:
            strategy = _STRATEGIES[choice.keys]
            choosers.append(StructuredKeys(counts, choice.m, strategy, data_seed, _ALWAYS))
        else:
            # structured keys, too, if there are no counts: only their number matters then
            choosers.append(IndependentKeys(size, choice.m, data_seed))
    return choosers
