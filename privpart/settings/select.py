"""Select table: what clients select, as written in a plan's table ``[select]``.

[select]
delivery = "pir"
words = { keys = "top", m = 500 }        # the most frequent words of a client's text
hidden = { keys = "independent", m = 64 }
"""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from accounting import checks
from accounting.checks import ConfigError

KeyKind = Literal["top", "random", "random-top", "independent", "shared"]
DeliveryName = Literal["broadcast", "on-demand", "pre-generated", "pir"]

_KINDS = {True: ("top", "random", "random-top"), False: ("independent", "shared")}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChoice:
    """How the keys of one key space are chosen.

    Args:
        keys: "top", "random" or "random-top" choose among a client's own words; "independent" keys
            are drawn by each client; "shared" keys are drawn from public coins for a whole round.
        m: number of keys, >= 1; clients with fewer words add decoys.
        seed: seed of the public coins of "shared", >= 0.
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
        """Whether the keys depend on a client's data."""
        return self.keys in _KINDS[True]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectChoice:
    """What clients select and how the slices reach them.

    Args:
        delivery: see ``privpart.select.delivery``. Slices under shared keys are always broadcast.
        words: keys of the words of ``word_lm``.
        hidden: keys of the feed-forward neurons of ``word_lm``.
        filters: keys of the second convolution's filters in ``small_cnn`` and its variants.
        neurons: keys of the first hidden layer's neurons in ``mcmahan_2nn``.
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
        """The choices that are set, by key space, words first."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self)[1:])
        return {name: choice for name, choice in named if choice is not None}

    @property
    def takes_turns(self) -> bool:
        """Whether some slices train only in rounds that public coins draw (keys = "shared")."""
        return any(choice.keys == "shared" for choice in self.chosen.values())
