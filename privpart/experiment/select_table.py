"""Select choice: what clients select under a plan, as people write it in a table ``[select]``.

[select]
delivery = "pir"
words = { keys = "top", m = 500 }        # most frequent words of a client's own text
hidden = { keys = "independent", m = 64 }
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from torch import nn

from accounting import checks
from accounting.checks import ConfigError
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
from privpart.select.primitive import Keys

KeyKind = Literal["top", "random", "random-top", "independent", "shared"]
DeliveryName = Literal["broadcast", "on-demand", "pre-generated", "pir"]

_STRATEGIES: dict[str, Strategy] = {"top": top, "random": random, "random-top": random_top}
_KINDS = {True: tuple(_STRATEGIES), False: ("independent", "shared")}
_DELIVERIES: dict[DeliveryName, Delivery] = {
    "broadcast": broadcast,
    "on-demand": on_demand,
    "pre-generated": pregenerated,
    "pir": private,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChoice:
    """How the keys of one space are chosen.

    Args:
        keys: "top", "random" or "random-top" of a client's own words; "independent", drawn by each
            client, or "shared", drawn from public coins for everyone in a round.
        m: how many, >= 1; decoys fill up where a client has fewer words.
        seed: of the public coins of "shared", >= 0.
    """

    keys: KeyKind
    m: int
    seed: int = 0

    def __post_init__(self) -> None:
        checks.choice("keys", self.keys, get_args(KeyKind))
        checks.count("m", self.m)
        if checks.count("seed", self.seed, minimum=0) and self.keys != "shared":
            raise ConfigError(f"seed={self.seed}: only for keys='shared'; leave it out.")

    @property
    def structured(self) -> bool:
        """Whether the keys come from a client's own data."""
        return self.keys in _STRATEGIES


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectChoice:
    """What clients select, and how it reaches them.

    Args:
        delivery: "broadcast", "on-demand", "pre-generated" or "pir"; see
            ``privpart.select.delivery``. Under shared keys slices are a broadcast anyway.
        words: of ``word_lm``.
        hidden: neurons of the feed-forward part of ``word_lm``.
        filters: of the second convolution of ``small_cnn`` and its relatives.
        neurons: of the first hidden layer of ``mcmahan_2nn``.
    """

    delivery: DeliveryName
    words: KeyChoice | None = None
    hidden: KeyChoice | None = None
    filters: KeyChoice | None = None
    neurons: KeyChoice | None = None

    def __post_init__(self) -> None:
        checks.choice("delivery", self.delivery, get_args(DeliveryName))
        if not self.chosen:
            raise ConfigError("say what to select: words, hidden, filters or neurons.")
        for name, choice in self.chosen.items():
            if choice.structured != (name == "words"):
                raise ConfigError(
                    f"{name}.keys={choice.keys!r}: words are chosen from a client's own data, all "
                    f"else at random. Use {' or '.join(_KINDS[name == 'words'])}."
                )

    @property
    def chosen(self) -> dict[str, KeyChoice]:
        """What is selected, by key space; words come first."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self)[1:])
        return {name: choice for name, choice in named if choice is not None}

    @property
    def takes_turns(self) -> bool:
        """Whether some slices train in rounds that public coins choose, and in no others."""
        return any(choice.keys == "shared" for choice in self.chosen.values())

    def fetch(self) -> Delivery:
        """Return the delivery."""
        return _DELIVERIES[self.delivery]

    def spaces(self, network: nn.Module) -> list[KeySpace]:
        """Return the key spaces of a network, in order.

        Raises:
            ConfigError: it has no such.
        """
        known = key_spaces(network)
        for name in self.chosen:
            if name not in known:
                raise ConfigError(
                    f"select.{name}: this network has none; clients can select its "
                    f"{' and '.join(known) or 'nothing'}."
                )
        return [known[name] for name in self.chosen]

    def choosers(
        self,
        sizes: Sequence[int],
        *,
        counts: Callable[[int], Counts] | None = None,
        always: Keys = (),
        data_seed: int = 0,
    ) -> list[KeyChooser]:
        """Return what chooses the keys, per key space.

        Args:
            sizes: K of each.
            counts: words of a client's data; None where only the public keys matter.
            always: words that everyone takes.
            data_seed: of the devices' draws.

        Raises:
            ConfigError: more keys than there are, or fewer than everyone takes.
        """
        found: list[KeyChooser] = []
        for (name, choice), size in zip(self.chosen.items(), sizes, strict=True):
            least = len(always) + 1 if choice.structured else 1
            if not least <= choice.m <= size:
                raise ConfigError(f"select.{name}.m={choice.m}: must be from {least} to K={size}.")
            if choice.keys == "shared":
                found.append(SharedKeys(size, choice.m, choice.seed))
            elif choice.structured and counts is not None:
                found.append(
                    StructuredKeys(counts, choice.m, _STRATEGIES[choice.keys], data_seed, always)
                )
            else:
                found.append(IndependentKeys(size, choice.m, data_seed))
        return found
