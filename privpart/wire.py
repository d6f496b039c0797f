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

Costs count these bytes. Flower's messages have arrays and fields of their own; see
``privpart.flower.mail``.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from safetensors.torch import save
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of a message: the model, plan and round that its vector belongs to.

    Attributes:
        direction: the sender.
        seed: seed of all weights that the model does not keep; None if it keeps all.
        trainable_hash: 20 hex digits, ``PartialModel.trainable_hash``.
        fingerprint: 32 hex digits, ``PartialModel.fingerprint``.
        plan: 24 hex digits, the beginning of ``PrivacyPlan.hash``; zeros if there is no plan.
        round: round, from 0.
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
    >>> len(encode_model(PartialModel(lambda: nn.Linear(9, 1), seed=7)))
    176
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
