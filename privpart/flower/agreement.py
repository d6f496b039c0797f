"""Agreement: what server and node read and write in one another's messages.

A task carries the whole trainable vector and what both sides must agree on: the hash of the plan,
the layout, fingerprint and seed of the model, the round, the clip norm and the active groups.
Whatever comes from the other side is of anybody.
"""

import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from accounting.checks import MissingExtraError
from privpart.messages import ClientId, RoundTask, is_client_id
from privpart.model import PartialModel

SCHEMA = "privpart/flower/2"
_LONGEST_HEADER = 1024
_LONGEST_NAME = 4096
_SHOWN = 300
_DIGITS = 20

Report = Callable[[str], None]


class DeclinedError(Exception):
    """A task that is not of this node's plan or clients; the message holds nothing of examples."""


def flower() -> ModuleType:
    """Return Flower's messages and records.

    Raises:
        MissingExtraError: Flower is not installed.
    """
    try:
        import flwr.app
    except ModuleNotFoundError:
        raise MissingExtraError(
            "Flower is not installed: pip install 'flwr>=1.42', in an environment of its own, "
            "since it pins packages that others use. docs/how-to/flower.md shows how."
        ) from None
    return cast("ModuleType", flwr.app)


def id_text(client: ClientId) -> str:
    """Return a client's id as JSON: the number 1 and the string "1" are two clients."""
    # the same text, in a tenth of the time: a population may have a million
    return str(client) if type(client) is int else json.dumps(client)


def id_of(name: object) -> ClientId | None:
    """Return the client with this name, from anybody; None if there is none."""
    if type(name) is not str or len(name) > _LONGEST_NAME:
        return None
    if name.isascii() and name.isdigit() and len(name) < _DIGITS and str(int(name)) == name:
        return client if is_client_id(client := int(name)) else None
    try:
        client = json.loads(name)
    except (ValueError, RecursionError):
        return None
    return client if is_client_id(client) and id_text(client) == name else None


def plain_text(value: object) -> str:
    """Return text or a number from anybody on one line of plain characters, not too long.

    Of anything else the type is named: the text of a long list takes several times its memory.
    """
    text = value if isinstance(value, str) else type(value).__name__
    if isinstance(value, int | float | Exception | None):
        text = str(value)
    return ascii(text[:_SHOWN])[1:-1]


def names_text(records: Iterable[str]) -> str:
    """Return the first names of the records in a message of anybody's."""
    return plain_text(", ".join(name[:_SHOWN] for name in islice(records, _SHOWN)))


def agreement(
    model: PartialModel, plan: str, active: Sequence[int] | None = None
) -> dict[str, str]:
    """Return what server and client must have in common, as texts."""
    layout = model.trainable_hash if active is None else model.trainable_hash_of(active)
    return {
        "schema": SCHEMA,
        "plan": plan,
        "layout": layout,
        "fingerprint": model.fingerprint,
        # a seed has 128 bits, a field of Flower only 64
        "seed": "" if model.seed is None else str(model.seed),
    }


def difference(fields: Mapping[str, object], expected: Mapping[str, str]) -> str | None:
    """Return in which field another side's agreement differs from one's own; None if in none."""
    for name, value in expected.items():
        if fields.get(name) != value:
            return f"{name} is {plain_text(fields.get(name))!r}, here it is {value!r}"
    return None


def round_fields(task: RoundTask) -> dict[str, Any]:
    """Return what a message says of its round."""
    return {
        "round": task.round,
        "clip_norm": float(task.clip_norm),
        "active": json.dumps(None if task.active is None else list(task.active)),
    }


def float_vector(array: Any, dim: int) -> Tensor | None:  # noqa: ANN401  of anybody
    """Return a float32 vector of Flower's ``Array``; None for anything else.

    ``Array.numpy`` would reserve as much memory as the bytes of a stranger claim to need.
    """
    data = array.data
    # the length is checked before any of it is parsed
    if type(data) is not bytes or len(data) > 4 * dim + _LONGEST_HEADER:
        return None
    file = io.BytesIO(data)
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            return None
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    except Exception:
        # NumPy's parser raises types of its own
        return None
    if shape != (dim,) or dtype != np.dtype("<f4") or len(data) - file.tell() != 4 * dim:
        return None
    return torch.from_numpy(np.frombuffer(data, "<f4", offset=file.tell()).copy())


def to_stderr(sentence: str) -> None:
    """Write a sentence to the log of this side."""
    sys.stderr.write(f"privpart: {sentence}\n")
    sys.stderr.flush()
