"""Mechanisms by name: as people describe them, as files record them, and their fingerprint.

A new mechanism is a file of its own and its class in ``OFFERED`` (if people may choose it) or
``RECORDED``. An offered class has ``name``, ``from_options(participation, *, ...)`` with a keyword
per option that it takes, and ``fitted``: whether it is fitted to the participation, so that two
participations give two different encoders.
"""

import hashlib
import inspect
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from accounting.checks import ConfigError
from accounting.mechanisms.buffered_toeplitz import BufferedToeplitz
from accounting.mechanisms.dense import Dense
from accounting.mechanisms.grouped import Grouped
from accounting.mechanisms.independent import Independent
from accounting.mechanisms.mechanism import SCHEMA, Mechanism
from accounting.mechanisms.pruned_tree import PrunedTree
from accounting.mechanisms.toeplitz import Toeplitz
from accounting.mechanisms.tree import BinaryTree, EstimatorName, ReleaseName
from accounting.participation import Participation

OFFERED: tuple[Any, ...] = (BinaryTree, Independent, Toeplitz, BufferedToeplitz)
"""Classes that people choose by name, in the order in which a command lists them."""
RECORDED: tuple[Any, ...] = (*OFFERED, Dense, Grouped, PrunedTree)
"""Classes that ``mechanism_from_dict`` reads."""

_OFFERED = {made.name: made for made in OFFERED}
_RECORDED = {made.name: made for made in sorted(RECORDED, key=lambda made: made.name)}

MechanismName = StrEnum(  # type: ignore[misc]  # mypy asks for literal members
    "MechanismName", {made.name.upper(): made.name for made in OFFERED}
)
"""The names of the offered mechanisms, as people type them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MechanismChoice:
    """Name and options of a mechanism; ``build`` makes it for a given participation.

    Args:
        name: which mechanism.
        restart_every: for "tree", like estimator, completed and release; see ``BinaryTree``.
        estimator: "vanilla" or "online".
        completed: whether each tree is completed before a restart.
        release: "nodes" or "prefix".
        bands: for "toeplitz": bands of the square-root matrix; None is all of them.
        coefficients: for "toeplitz": used instead of the square root.
        buffers: for "blt", which is then fitted to the participation; None is 3.
        decay: for "blt": used, together with scale, instead of a fit.
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

    @property
    def fitted(self) -> bool:
        """Whether the mechanism is fitted to its participation."""
        return bool(_OFFERED[self.name].fitted)

    def build(self, participation: Participation) -> Mechanism:
        """Return the mechanism; fitting a BLT takes a few seconds for thousands of rounds.

        Raises:
            ConfigError: an option that this mechanism does not take, or a value out of range.
        """
        taken = _options(_OFFERED[self.name])
        given = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "name" or value == field.default:
                continue
            if field.name not in taken:
                owners = [name for name, made in _OFFERED.items() if field.name in _options(made)]
                raise ConfigError(
                    f"{field.name}={value}: only for --mechanism {' or '.join(owners)}; "
                    f"leave it out with {self.name}."
                )
            given[field.name] = value
        mechanism: Mechanism = _OFFERED[self.name].from_options(participation, **given)
        return mechanism

    def build_grouped(
        self, schedule: Sequence[Sequence[int]], sizes: Sequence[int], participation: Participation
    ) -> Grouped:
        """Return this mechanism for every group, each over its own active rounds.

        Args:
            schedule: per round, the groups that train; ``restart_every`` counts a group's rounds.
            sizes: per group, its number of parameters.
            participation: over all rounds. What it allows within a group's rounds is what a BLT is
                fitted to.
        """
        active = [[t for t, own in enumerate(schedule) if g in own] for g in range(len(sizes))]
        within = [_within(own, participation) for own in active]
        built = {own: self.build(own) for own in dict.fromkeys(within)}  # most groups are alike
        return Grouped(
            tuple(tuple(own) for own in schedule),
            tuple(built[own] for own in within),
            tuple(sizes),
        )


def _options(made: Any) -> set[str]:  # noqa: ANN401  an offered class
    return set(inspect.signature(made.from_options).parameters) - {"participation"}


def _within(active: Sequence[int], participation: Participation) -> Participation:
    """Return a client's worst participation counted in one group's rounds. For fitting only."""
    b = participation.min_separation
    steps = [bisect_left(active, t + b) - i for i, t in enumerate(active) if t + b <= active[-1]]
    if not active or not steps or participation.max_participations == 1:
        return Participation(max(1, len(active)))
    most = -(-len(active) // min(steps))
    return Participation(len(active), min(participation.max_participations, most), min(steps))


def mechanism_from_dict(data: Mapping[str, Any]) -> Mechanism:
    """Return the mechanism that ``to_dict`` described.

    Args:
        data: "schema", "name" and every field of that mechanism, none missing, none unknown.

    Raises:
        ConfigError: another schema, an unknown name, missing or unknown fields, or bad values.

    >>> mechanism_from_dict(BinaryTree(8).to_dict()) == BinaryTree(8)
    True
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"mechanism={data!r}: must be an object with schema, name and fields.")
    if data.get("schema") != SCHEMA:
        raise ConfigError(f"schema={data.get('schema')!r}: must be {SCHEMA!r}.")
    name = data.get("name")
    if not isinstance(name, str) or name not in _RECORDED:
        raise ConfigError(f"name={name!r}: must be one of {', '.join(_RECORDED)}.")
    expected = {field.name for field in fields(_RECORDED[name])}
    values = {key: value for key, value in data.items() if key not in ("schema", "name")}
    for fault, odd in (
        ("missing", expected - values.keys()),
        ("unknown", values.keys() - expected),
    ):
        if odd:
            raise ConfigError(
                f"mechanism {name!r}: {fault} {', '.join(sorted(map(str, odd)))}; its fields are "
                f"{', '.join(sorted(expected))}."
            )
    if name == Grouped.name:
        values["mechanisms"] = _members(values["mechanisms"])
    mechanism: Mechanism = _RECORDED[name](**values)
    return mechanism


def _members(listed: object) -> list[Mechanism]:
    """Return the groups' mechanisms; nested groups would recurse as deep as a file says."""
    nested = {"name": Grouped.name}.items()
    if not isinstance(listed, list) or any(
        isinstance(data, Mapping) and nested <= data.items() for data in listed
    ):
        raise ConfigError("mechanisms: must be a list with one ungrouped mechanism per group.")
    return [mechanism_from_dict(data) for data in listed]


def fingerprint(mechanism: Mechanism) -> str:
    """Return the SHA-256, in hex, of the mechanism's canonical JSON.

    Equal mechanisms have equal fingerprints on every machine. Checkpoints and reports contain it,
    so that noise and accounting are known to use the same mechanism.
    """
    canonical = json.dumps(
        mechanism.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return hashlib.sha256(canonical.encode()).hexdigest()
