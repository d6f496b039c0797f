"""Mechanisms by name: as people describe them, as files record them, and their fingerprint.

A new mechanism is a file of its own and its class in ``OFFERED`` (if people may choose it) or
``RECORDED``. An offered class has ``name``, ``from_options(participation, *, ...)`` with a keyword
per option that it takes, and ``fitted``: whether it is fitted to the participation unless its
parameters are given, so that two participations give two different encoders.
"""

import hashlib
import inspect
import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from accounting import checks, fit_cache, typed
from accounting.checks import ConfigError, parsed_json
from accounting.mechanisms.banded_inverse import BandedInverse
from accounting.mechanisms.buffered_toeplitz import BufferedToeplitz
from accounting.mechanisms.dense import Dense
from accounting.mechanisms.grouped import Grouped
from accounting.mechanisms.independent import Independent
from accounting.mechanisms.mechanism import SCHEMA, Mechanism
from accounting.mechanisms.pruned_tree import PrunedTree
from accounting.mechanisms.scheduled import Scheduled
from accounting.mechanisms.toeplitz import Objective, Toeplitz
from accounting.mechanisms.tree import BinaryTree, Estimator
from accounting.participation import Participation


class BandMF:
    """BandMF by its name: a banded Toeplitz encoder, fitted and with normalised columns."""

    name = "bandmf"
    fitted = True

    @classmethod
    def from_options(
        cls,
        participation: Participation,
        *,
        bands: int | None = None,
        objective: Objective | None = None,
        momentum: float | None = None,
    ) -> Mechanism:
        """Fit the encoder to the participation; it is recorded as a Toeplitz one."""
        return Toeplitz.from_options(
            participation,
            bands=bands,
            fit=True,
            normalize_columns=True,
            objective=objective,
            momentum=momentum,
        )


class FromFile:
    """Stands for the mechanism in a file, whatever that is; see ``read_mechanism``."""

    name = "file"
    fitted = False

    @classmethod
    def from_options(
        cls,
        participation: Participation,
        *,
        file: Path | None = None,
        fingerprint: str | None = None,
    ) -> Mechanism:
        """Return the mechanism in ``file``, if it has this fingerprint and as many rounds."""
        if file is None:
            raise ConfigError("file is missing: name the file that holds the mechanism.")
        mechanism = read_mechanism(file)
        if mechanism.rounds != participation.rounds:
            raise ConfigError(
                f"mechanism file {file}: is for rounds={mechanism.rounds}; this run has "
                f"rounds={participation.rounds}."
            )
        if fingerprint is not None and fingerprint != (actual := _hash(mechanism)):
            raise ConfigError(
                f"fingerprint={fingerprint}: the mechanism in {file} has {actual}; it was changed, "
                "or is another one."
            )
        return mechanism


OFFERED: tuple[Any, ...] = (
    BinaryTree,
    Independent,
    Scheduled,
    Toeplitz,
    BufferedToeplitz,
    BandedInverse,
    BandMF,
    FromFile,
)
"""Classes that people choose by name, in the order in which a command lists them."""
RECORDED: tuple[Any, ...] = (*OFFERED[:-2], Dense, Grouped, PrunedTree)
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
        restart_every: for "tree", like estimator; see ``BinaryTree``.
        estimator: "vanilla" or "online".
        bands: for "toeplitz": bands of the square-root matrix or of the fit; None is all of them.
            For "banded-inverse": draws per round.
        coefficients: for "toeplitz" and "banded-inverse": used instead of the square root.
        normalize_columns: for "toeplitz" and "banded-inverse": divide each column by its norm.
        fit: for "toeplitz" and "banded-inverse": fit the coefficients to the participation.
        objective: of a fit: "rmse" (None) or "max".
        momentum: of a fit: that of the server's optimiser, whose models get the least error; None
            is 0.
        buffers: for "blt", which is then fitted to the participation; None is 3.
        decay: for "blt": used, together with scale, instead of a fit.
        scale: see decay.
        from_round: for "scheduled": rounds at which the noise changes, the first of them 0.
        factor: for "scheduled": per such round, the noise / the noise multiplier.
        file: for "file": holds the mechanism, see ``read_mechanism``.
        fingerprint: for "file": what the mechanism in it must have; a plan needs it.
    """

    name: MechanismName
    restart_every: int | None = None
    estimator: Estimator = "vanilla"
    bands: int | None = None
    coefficients: tuple[float, ...] | None = None
    buffers: int | None = None
    decay: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None
    normalize_columns: bool = False
    fit: bool = False
    objective: Objective | None = None
    momentum: float | None = None
    from_round: tuple[int, ...] | None = None
    factor: tuple[float, ...] | None = None
    file: Path | None = None
    fingerprint: str | None = None

    @classmethod
    def parse(cls, text: str) -> "MechanismChoice":
        """Read a choice as people type it: ``blt:buffers=2``, ``file:mechanism.json``.

        >>> str(MechanismChoice.parse("toeplitz:bands=8,fit"))
        'toeplitz:bands=8,fit'
        """
        if text.partition(":")[0] == FromFile.name:  # a path may have commas
            return cls(name=MechanismName(FromFile.name), file=Path(text.partition(":")[2]))
        name, options = typed.split_text(text)
        checks.choice("mechanism", name, list(_OFFERED))
        values = typed.typed_values(cls, name, options, _options(_OFFERED[name]))
        return cls(name=MechanismName(name), **values)

    def __str__(self) -> str:
        return f"{self.name}:{self.file}" if self.file is not None else typed.as_text(self)

    @property
    def fitted(self) -> bool:
        """Whether the mechanism is fitted to its participation."""
        return self.fit or (bool(_OFFERED[self.name].fitted) and self.decay is None)

    def refuse_idle(self, options: Collection[str]) -> None:
        """Raise ``ConfigError`` if one of these options, whatever its value, is not this one's."""
        taken = {*_options(_OFFERED[self.name]), "name"}
        for option in (field.name for field in fields(self)):
            if option in options and option not in taken:
                owners = [name for name, kind in _OFFERED.items() if option in _options(kind)]
                raise ConfigError(
                    f"{option}: only for the mechanism {' or '.join(owners)}; leave it out with "
                    f"{self.name}."
                )

    def refuse_late_restart(self, rounds: int | None) -> None:
        """Raise ``ConfigError`` if a run of so many rounds ends before the first restart."""
        length = self.restart_every
        if length is not None and rounds is not None and length >= rounds:
            raise ConfigError(
                f"restart_every={length}: has no effect, as the run ends after {rounds} rounds; "
                "use fewer, or leave it out."
            )

    def build(self, participation: Participation) -> Mechanism:
        """Return the mechanism; a fit takes seconds to minutes, and is cached on the disk."""
        given = {
            field.name: value
            for field in fields(self)
            if field.name != "name" and (value := getattr(self, field.name)) != field.default
        }
        self.refuse_idle(given.keys())
        make: Callable[..., Mechanism] = _OFFERED[self.name].from_options
        if not self.fitted:
            return make(participation, **given)
        key = {"mechanism": str(self), **asdict(participation)}
        with suppress(ConfigError):
            stored = mechanism_from_dict(fit_cache.read_cached(key))
            if stored.rounds == participation.rounds:
                return stored
        mechanism = make(participation, **given)
        fit_cache.write_cached(key, mechanism.to_dict())
        return mechanism

    def build_grouped(
        self, schedule: Sequence[Sequence[int]], sizes: Sequence[int], participation: Participation
    ) -> Grouped:
        """Return this mechanism for every group, each over its own active rounds."""
        active = [[t for t, row in enumerate(schedule) if g in row] for g in range(len(sizes))]
        within = [_within(rounds, participation) for rounds in active]
        built = {run: self.build(run) for run in dict.fromkeys(within)}  # most groups are alike
        return Grouped(
            tuple(tuple(row) for row in schedule), tuple(built[run] for run in within), tuple(sizes)
        )


def options_by_name() -> dict[str, list[str]]:
    """Return the options of each offered mechanism, in its own order."""
    return {name: _options(kind) for name, kind in _OFFERED.items()}


def _options(kind: Any) -> list[str]:  # noqa: ANN401  an offered class
    return [o for o in inspect.signature(kind.from_options).parameters if o != "participation"]


def _within(active: Sequence[int], participation: Participation) -> Participation:
    """Return a client's worst participation counted in one group's rounds. For fitting only."""
    b = participation.min_separation
    steps = [bisect_left(active, t + b) - i for i, t in enumerate(active) if t + b <= active[-1]]
    if not active or not steps or participation.max_participations == 1:
        return Participation(max(1, len(active)))
    possible = -(-len(active) // min(steps))
    return Participation(len(active), min(participation.max_participations, possible), min(steps))


def mechanism_from_dict(data: Mapping[str, Any]) -> Mechanism:
    """Return the mechanism that ``to_dict`` described.

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
    if odd := expected - values.keys() or values.keys() - expected:
        fault = "missing" if odd <= expected else "unknown"
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


_hash = fingerprint  # which an option of ``FromFile`` has the name of


_MOST_BYTES = 256_000_000
_REPORT_KEY = "mechanism_parameters"


def read_mechanism(path: Path) -> Mechanism:
    """Return the mechanism in a file.

    A file can be changed after a plan was written, so a plan also names the fingerprint.
    """
    text = checks.text_of(path, f"mechanism file {path}", most=_MOST_BYTES)
    return mechanism_from_dict(_parameters(path, text))


def _parameters(path: Path, text: str) -> Mapping[str, Any]:
    try:
        content = parsed_json(text)
    except (ValueError, RecursionError) as error:
        reason = str(error) or "nested too deeply"
        raise ConfigError(f"mechanism file {path}: is not JSON: {reason}.") from None
    if isinstance(content, dict) and content.get("schema") != SCHEMA and _REPORT_KEY in content:
        content = content[_REPORT_KEY]
        if content is None:
            raise ConfigError(
                f"mechanism file {path}: this report leaves out the mechanism's parameters, "
                "because there are too many."
            )
    if not isinstance(content, dict):
        raise ConfigError(f"mechanism file {path}: must hold a JSON object.")
    return content
