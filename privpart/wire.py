"""Wire: the two messages of a round as bytes, without pickle.

The server sends the trainable part and the seed; a client returns the change of the trainable part
(FedPT, Algorithm 1, lines 3 and 10). Weights that the model keeps beside the seed were shipped to
the client before, once; the fingerprint refuses a client that has others. Local parts are in no
message. Each message is a header of 64 bytes, followed by one float32
vector as safetensors:

    offset  size  content
         0     3  b"PPM"
         3     1  version of this layout, 1
         4     1  direction: 0 from the server, 1 from a client
         5     1  generator of the frozen part (``start_values.GENERATOR``); 0: pretrained, no seed
         6    10  trainable hash: which parameters the vector holds
        16    16  seed, big-endian
        32    16  fingerprint of the frozen part
        48    12  plan: the first 24 digits of ``PrivacyPlan.hash``, zeros if none
        60     4  round, from 0

The header protects against mistakes, not against forgery: use a secure transport. The server clips
whatever a client sends.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.model import PartialModel
from privpart.start_values import GENERATOR, seed_bytes

Direction = Literal["from server", "from client"]

HEADER_BYTES = 64
_LAYOUT = struct.Struct("!3sBBB10s16s16s12sI")
_MAGIC = b"PPM"
_VERSION = 1
_NAME = "trainable"
_NO_PLAN = "0" * 24
_SAFETENSORS_OVERHEAD = 128  # its header of one tensor takes 72 to 88 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of a message: the model, plan and round that its vector belongs to.

    Attributes:
        direction: the sender.
        seed: seed of all weights that the model does not keep; None if it keeps all.
        trainable_hash: 20 hex digits, ``PartialModel.trainable_hash``.
        fingerprint: 32 hex digits, ``PartialModel.fingerprint``.
        plan: 24 hex digits, the beginning of ``PrivacyPlan.hash``; zeros if there is no plan.
        round: round, from 0. Decoding does not check it: the server refuses an update of another
            round as replayed.
    """

    direction: Direction
    seed: int | None
    trainable_hash: str
    fingerprint: str
    plan: str
    round: int


def encode_model(
    model: PartialModel,
    *,
    plan: str = _NO_PLAN,
    round_number: int = 0,
    active: Sequence[int] | None = None,
) -> bytes:
    """Return the server's message: header and trainable part, 4 d + 64 + about 80 bytes.

    Args:
        model: the model whose ``flat`` is sent.
        plan: ``PrivacyPlan.hash``.
        round_number: 0 <= round_number < 2^32.
        active: groups to send, for a client that has the others; None is all groups.

    Raises:
        ConfigError: ``plan`` is not a hash, or ``round_number`` is out of range.

    >>> from torch import nn
    >>> message = encode_model(PartialModel(lambda: nn.Linear(9, 1), seed=7))
    >>> read_header(message).seed, len(message)
    (7, 176)
    """
    vector = torch.cat([model.flat[span] for span in model.spans(active)])
    return _encode(vector, _header(model, "from server", plan, round_number, active))


def encode_update(
    model: PartialModel,
    update: Tensor,
    *,
    plan: str = _NO_PLAN,
    round_number: int = 0,
    active: Sequence[int] | None = None,
) -> bytes:
    """Return a client's message: header and update of the active part.

    Args:
        model: the client's model.
        update: change of the c active parameters, shape (c,); sent as float32.
        plan: ``PrivacyPlan.hash``.
        round_number: 0 <= round_number < 2^32.
        active: groups that trained; None is all groups.

    Raises:
        ConfigError: ``update`` has another shape, ``plan`` is not a hash, or ``round_number`` is
            out of range.
    """
    if update.shape != (dim := _dim(model, active),):
        raise ConfigError(f"update of shape {tuple(update.shape)}: must be ({dim},).")
    return _encode(update, _header(model, "from client", plan, round_number, active))


def decode_model(
    message: bytes,
    model: PartialModel,
    *,
    plan: str = _NO_PLAN,
    active: Sequence[int] | None = None,
) -> Tensor:
    """Return the finite vector that the server sent, shape (c,), or (d,) for all groups.

    Args:
        message: untrusted bytes; nothing in them is ever executed.
        model: the client's model, rebuilt from ``read_header(message).seed`` and the weights that
            the model keeps, if any.
        plan: hash of the plan that the client agreed to.
        active: groups that the message must hold; None is all groups.

    Raises:
        ConfigError: the bytes are not a valid message, or belong to another model, plan or groups.
    """
    vector = _decode(message, model, _header(model, "from server", plan, 0, active), active)
    if not vector.isfinite().all():
        raise ConfigError("the message from the server holds NaN or infinity: it must be finite.")
    return vector


def decode_update(
    message: bytes,
    model: PartialModel,
    *,
    plan: str = _NO_PLAN,
    active: Sequence[int] | None = None,
) -> Tensor:
    """Return the update that a client sent, shape (c,).

    NaN and infinity pass: the server's clip turns such an update into zeros.

    Args:
        message: untrusted bytes; nothing in them is ever executed.
        model: the server's model.
        plan: hash of the run's plan.
        active: groups that train in the round; None is all groups.

    Raises:
        ConfigError: the bytes are not a valid message, or belong to another model, plan or groups.
    """
    return _decode(message, model, _header(model, "from client", plan, 0, active), active)


def read_header(message: bytes) -> Header:
    """Return the header of an untrusted message, from which a client rebuilds the model.

    Raises:
        ConfigError: the first 64 bytes are not a header of this version and generator.
    """
    if not isinstance(message, bytes) or len(message) < HEADER_BYTES:
        raise ConfigError(f"message: must be bytes, and at least {HEADER_BYTES} of them.")
    fields = _LAYOUT.unpack(message[:HEADER_BYTES])
    magic, version, direction, generator, trainable, seed, fingerprint, plan, round_number = fields
    if (magic, version) != (_MAGIC, _VERSION) or direction >= len(get_args(Direction)):
        raise ConfigError(f"message begins with {message[:5]!r}: not a message of version 1.")
    if generator not in (0, GENERATOR) or (generator == 0 and any(seed)):
        raise ConfigError(
            f"message has generator {generator}: this version rebuilds frozen parameters with "
            f"generator {GENERATOR}, or takes shipped ones (0, no seed). Use the same version on "
            "both sides."
        )
    return Header(
        direction=get_args(Direction)[direction],
        seed=int.from_bytes(seed, "big") if generator else None,
        trainable_hash=trainable.hex(),
        fingerprint=fingerprint.hex(),
        plan=plan.hex(),
        round=round_number,
    )


def _dim(model: PartialModel, active: Sequence[int] | None) -> int:
    return sum(span.stop - span.start for span in model.spans(active))


def _header(
    model: PartialModel,
    direction: Direction,
    plan: str,
    round_number: int,
    active: Sequence[int] | None,
) -> Header:
    if not isinstance(plan, str) or not re.fullmatch("[0-9a-f]{24,}", plan):
        raise ConfigError(f"plan={plan!r}: must be a hash of 24 or more hex digits.")
    if checks.count("round_number", round_number, minimum=0) >= 1 << 32:
        raise ConfigError(f"round_number={round_number}: must be below 2^32.")
    return Header(
        direction=direction,
        seed=model.seed,
        trainable_hash=model.trainable_hash if active is None else model.trainable_hash_of(active),
        fingerprint=model.fingerprint,
        plan=plan[:24],
        round=round_number,
    )


def _encode(vector: Tensor, header: Header) -> bytes:
    return _pack(header) + save({_NAME: vector.detach().to(torch.float32).contiguous()})


def _pack(header: Header) -> bytes:
    return _LAYOUT.pack(
        _MAGIC,
        _VERSION,
        get_args(Direction).index(header.direction),
        0 if header.seed is None else GENERATOR,
        bytes.fromhex(header.trainable_hash),
        seed_bytes(header.seed or 0),
        bytes.fromhex(header.fingerprint),
        bytes.fromhex(header.plan),
        header.round,
    )


def _decode(
    message: bytes, model: PartialModel, expected: Header, active: Sequence[int] | None
) -> Tensor:
    found = read_header(message)
    dim = _dim(model, active)
    for field in ("direction", "seed", "trainable_hash", "fingerprint", "plan"):
        if (has := getattr(found, field)) != (wants := getattr(expected, field)):
            raise ConfigError(
                f"message has {field} {has}, expected {wants}: it belongs to another model, "
                "direction or plan."
            )
    if len(message) > HEADER_BYTES + 4 * dim + _SAFETENSORS_OVERHEAD:
        raise ConfigError(
            f"message of {len(message)} bytes: too long for {dim} trainable parameters."
        )
    try:
        tensors = load(message[HEADER_BYTES:])
    except (
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        AssertionError,
    ) as error:
        raise ConfigError(f"message of {len(message)} bytes holds no arrays: {error}") from None
    vector = tensors.get(_NAME)
    if len(tensors) != 1 or vector is None:
        raise ConfigError(f"message holds {sorted(tensors)}; expected one array, {_NAME!r}.")
    if vector.shape != (dim,) or vector.dtype != torch.float32:
        raise ConfigError(
            f"message holds {vector.dtype} of shape {tuple(vector.shape)}; "
            f"this model needs float32 of shape ({dim},)."
        )
    return vector
