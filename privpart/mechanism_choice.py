"""Mechanism choice: a mechanism as people describe it, in options or in a plan file."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from accounting import (
    BinaryTree,
    BufferedToeplitz,
    ConfigError,
    Grouped,
    Independent,
    Mechanism,
    Participation,
    Toeplitz,
    optimize,
)


class MechanismName(StrEnum):
    """Mechanisms by the name that people type."""

    TREE = "tree"
    INDEPENDENT = "independent"
    TOEPLITZ = "toeplitz"
    BLT = "blt"


class EstimatorName(StrEnum):
    """How a tree's nodes make a prefix sum."""

    VANILLA = "vanilla"
    ONLINE = "online"


class ReleaseName(StrEnum):
    """What of a tree leaves the server."""

    NODES = "nodes"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True, kw_only=True)
class MechanismChoice:
    """Name and options of a mechanism; ``build`` makes it for a given participation.

    Args:
        name: which one.
        restart_every: of a tree, as are estimator, completed and release; see ``BinaryTree``.
        estimator: "vanilla" or "online".
        completed: whether each tree is completed before a restart.
        release: "nodes" or "prefix".
        bands: of "toeplitz", the square-root matrix; None takes all.
        coefficients: of "toeplitz", in place of the square root.
        buffers: of "blt", which is then fitted to the participation; None takes 3.
        decay: of "blt", together with scale, in place of a fit.
        scale: see decay.
    """

    name: MechanismName
    restart_every: int | None = None
    estimator: EstimatorName = EstimatorName.VANILLA
    completed: bool = False
    release: ReleaseName = ReleaseName.NODES
    bands: int | None = None
    coefficients: tuple[float, ...] | None = None
    buffers: int | None = None
    decay: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None

    def build(self, participation: Participation) -> Mechanism:
        """Return the mechanism; fitting a BLT takes a few seconds at thousands of rounds."""
        self._refuse_what_does_not_apply()
        rounds = participation.rounds
        if self.name is MechanismName.TREE:
            return BinaryTree(
                rounds,
                restart_every=self.restart_every,
                estimator=self.estimator.value,
                completed=self.completed,
                release=self.release.value,
            )
        if self.name is MechanismName.TOEPLITZ:
            if self.coefficients is not None:
                return Toeplitz(rounds, self.coefficients)
            return Toeplitz.square_root(rounds, bands=self.bands)
        if self.name is MechanismName.BLT:
            if self.decay is not None and self.scale is not None:
                return BufferedToeplitz(rounds, self.decay, self.scale)
            return optimize("blt", participation, buffers=self.buffers)
        return Independent(rounds)

    def build_grouped(
        self, schedule: Sequence[Sequence[int]], sizes: Sequence[int], participation: Participation
    ) -> Grouped:
        """Return this mechanism for every group, each over its own active rounds.

        Args:
            schedule: per round, the groups that train; ``restart_every`` counts a group's rounds.
            sizes: per group, its number of parameters.
            participation: over all rounds; a BLT is fitted to what it leaves of each group's.
        """
        active = [[t for t, own in enumerate(schedule) if g in own] for g in range(len(sizes))]
        within = [_within(own, participation) for own in active]
        built = {own: self.build(own) for own in dict.fromkeys(within)}  # most groups are alike
        return Grouped(
            tuple(tuple(own) for own in schedule),
            tuple(built[own] for own in within),
            tuple(sizes),
        )

    def _refuse_what_does_not_apply(self) -> None:
        for field in fields(self):
            owner, value = _OWNERS.get(field.name, self.name), getattr(self, field.name)
            if owner is not self.name and value != field.default:
                raise ConfigError(
                    f"{field.name}={value}: only for --mechanism {owner}; "
                    f"leave it out with {self.name}."
                )
        if (self.decay is None) != (self.scale is None):
            raise ConfigError("decay and scale of a BLT belong together: give both, or neither.")
        if self.decay is not None and self.buffers is not None:
            raise ConfigError(f"buffers={self.buffers}: decay and scale say how many.")
        if self.coefficients is not None and self.bands is not None:
            raise ConfigError(f"bands={self.bands}: the coefficients say how many.")


def _within(active: Sequence[int], participation: Participation) -> Participation:
    """A client's worst participation counted in the rounds of one group: for fitting only."""
    b = participation.min_separation
    steps = [bisect_left(active, t + b) - i for i, t in enumerate(active) if t + b <= active[-1]]
    if not active or not steps or participation.max_participations == 1:
        return Participation(max(1, len(active)))
    most = -(-len(active) // min(steps))
    return Participation(len(active), min(participation.max_participations, most), min(steps))


_OWNERS = {
    "restart_every": MechanismName.TREE,
    "estimator": MechanismName.TREE,
    "completed": MechanismName.TREE,
    "release": MechanismName.TREE,
    "bands": MechanismName.TOEPLITZ,
    "coefficients": MechanismName.TOEPLITZ,
    "buffers": MechanismName.BLT,
    "decay": MechanismName.BLT,
    "scale": MechanismName.BLT,
}
