"""Dealing: how examples come into batches, as the accountant and the loader both read it."""

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accounting import Mechanism, Participation, checks, participation_of
from accounting.checks import ConfigError
from accounting.cohorts import Sampling, SamplingChoice, sampled_passes
from accounting.mechanisms import MechanismChoice
from privpart.example_level.loader import Passes

_MOST_SAMPLED = 10_000_000
"""At which ``sampled_sum_error`` is a twentieth of the clip norm."""


@dataclass(frozen=True, slots=True)
class Dealing:
    """Passes of one public order, or a Poisson sample for each step, whose size is secret.

    Attributes:
        examples: how many there are, which is public.
        batch_size: the public divisor; the expected size of a sample.
        epochs: passes, or as many steps as these would have.
        order_seed: public seed of the order; None of samples.
        poisson: whether batches are samples.
    """

    examples: int
    batch_size: int
    epochs: int
    order_seed: int | None
    poisson: bool

    @classmethod
    def of(
        cls, loader: DataLoader[Any], epochs: int | None, order_seed: int | None, *, poisson: bool
    ) -> "Dealing":
        """Return how the examples of a user's loader are dealt; refuse an order of its own."""
        if epochs is None:
            raise ConfigError(
                "epochs is missing: the noise is planned over all steps, so pass how many passes "
                "over the data the loop takes."
            )
        size = _batch_size(loader, poisson=poisson)
        examples = checks.count("examples", len(loader.dataset))  # type: ignore[arg-type]
        if poisson and size > examples:
            raise ConfigError(
                f"data_loader: batch_size={size} is above the number of examples, {examples}, of "
                "which samples are drawn. Use a smaller one."
            )
        if poisson and examples > _MOST_SAMPLED:
            raise ConfigError(
                f"data_loader: has {examples:,} examples; samples are drawn from {_MOST_SAMPLED:,} "
                "at most, beyond which the sum of float64 is too coarse. Use fixed passes."
            )
        seed = order_seed
        if not poisson:
            seed = 0 if seed is None else seed
            checks.count("order_seed", seed, minimum=0, maximum=2**63 - 1)
        return cls(examples, size, checks.count("epochs", epochs), seed, poisson)

    @property
    def batches(self) -> int:
        """Number of batches of a pass."""
        return -(-self.examples // self.batch_size)

    @property
    def rounds(self) -> int:
        """Number of steps."""
        return self.batches * self.epochs

    def mechanism(self, chosen: str | MechanismChoice | Mechanism | None) -> Mechanism:
        """Return the mechanism of all steps; None is the default."""
        if chosen is None:
            chosen = "independent" if self.poisson else "blt"
        if isinstance(chosen, str):
            chosen = MechanismChoice.parse(chosen)
        if not isinstance(chosen, Mechanism):
            if not hasattr(chosen, "build"):
                raise ConfigError(
                    f"mechanism: is a {type(chosen).__name__}; must be a name such as 'blt' or "
                    "'tree', a MechanismChoice, or a mechanism of the accounting package."
                )
            chosen = chosen.build(sampled_passes(self.rounds, None) if self.poisson else self.fixed)
        if chosen.groups is not None:
            raise ConfigError("mechanism: has groups; every step trains all parameters.")
        if chosen.rounds != self.rounds:
            raise ConfigError(
                f"mechanism: is for {chosen.rounds} rounds; these epochs have {self.rounds} steps."
            )
        return chosen

    @property
    def fixed(self) -> Participation:
        """What an example of fixed passes takes part in: once per pass, at one place of it."""
        return Participation(self.rounds, self.epochs, self.batches)

    def sampling(self, mechanism: Mechanism) -> Sampling | None:
        """Return the sampler of the steps; None of fixed passes."""
        if not self.poisson:
            return None
        choice = SamplingChoice(name="poisson", expected_batch=float(self.batch_size))
        try:
            return choice.sampler(mechanism, self.examples)
        except ConfigError as error:
            raise ConfigError(
                f"mechanism: {mechanism.name} cannot be sampled in batches of {self.batch_size}: "
                f"{error} 'independent' noise is DP-SGD; of a banded mechanism, such as "
                "'toeplitz:bands=4', as many groups of examples as bands take turns."
            ) from None

    def participation(self, mechanism: Mechanism) -> Participation:
        """Return how often an example can take part, and how far apart."""
        if (sampling := self.sampling(mechanism)) is None:
            return self.fixed
        return participation_of(sampling, self.rounds)


def _batch_size(loader: DataLoader[Any], *, poisson: bool) -> int:
    """Return the loader's batch size; refuse a loader that has an order of its own."""
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise ConfigError(
            "data_loader: its data set has no length or numbers; use a map-style one."
        )
    if isinstance(loader.batch_sampler, Passes):
        raise ConfigError("data_loader: is private already. Pass the one that it was made from.")
    sampler: Any = loader.sampler
    shuffles = isinstance(sampler, RandomSampler) and not sampler.replacement
    whole = isinstance(sampler, SequentialSampler) or (poisson and shuffles)
    if loader.batch_size is None or not whole or len(sampler) != len(loader.dataset):
        raise ConfigError(
            "data_loader: shuffles, or has a sampler of its own. The passes have one fixed order, "
            "which order_seed shuffles once, and poisson_sampling=True draws samples; several "
            "processes share each batch by themselves. Make it with batch_size alone."
        )
    if loader.drop_last or not getattr(loader, "in_order", True):
        raise ConfigError(
            "data_loader: leaves examples out, or hands batches over in any order; make it without "
            "drop_last and in_order."
        )
    return loader.batch_size
