"""Serialized mechanisms: a JSON round trip, and a fingerprint to tell two mechanisms apart."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from accounting.checks import ConfigError
from accounting.mechanisms.buffered_toeplitz import BufferedToeplitz
from accounting.mechanisms.dense import Dense
from accounting.mechanisms.grouped import Grouped
from accounting.mechanisms.independent import Independent
from accounting.mechanisms.mechanism import SCHEMA, Mechanism
from accounting.mechanisms.pruned_tree import PrunedTree
from accounting.mechanisms.toeplitz import Toeplitz
from accounting.mechanisms.tree import BinaryTree

_CLASSES: dict[str, Any] = {
    "blt": BufferedToeplitz,
    "dense": Dense,
    "grouped": Grouped,
    "independent": Independent,
    "pruned tree": PrunedTree,
    "toeplitz": Toeplitz,
    "tree": BinaryTree,
}


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
    if not isinstance(name, str) or name not in _CLASSES:
        raise ConfigError(f"name={name!r}: must be one of {', '.join(_CLASSES)}.")
    expected = {field.name for field in fields(_CLASSES[name])}
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
    if name == "grouped":
        values["mechanisms"] = _members(values["mechanisms"])
    mechanism: Mechanism = _CLASSES[name](**values)
    return mechanism


def _members(listed: object) -> list[Mechanism]:
    """Read the groups' mechanisms; groups inside groups would recurse as deep as a file says."""
    if not isinstance(listed, list) or any(
        isinstance(data, Mapping) and data.get("name") == "grouped" for data in listed
    ):
        raise ConfigError("mechanisms: must be a list with one ungrouped mechanism per group.")
    return [mechanism_from_dict(data) for data in listed]


def fingerprint(mechanism: Mechanism) -> str:
    """Return the SHA-256, in hex, of the mechanism's canonical JSON.

    Equal for equal mechanisms, on every machine; written into checkpoints and reports, so that
    noise and accounting can be held to the same mechanism.
    """
    canonical = json.dumps(
        mechanism.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return hashlib.sha256(canonical.encode()).hexdigest()
