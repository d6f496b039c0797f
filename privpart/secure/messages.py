"""Messages of secure sums: bytes that can be written in one way only, and the terms behind them.

A message is a kind, the digest of what both sides agree on, the party that it is from or for, and
records of one size by party, ascending. Whatever else arrives is refused by one error; nothing is
unpickled, and no length is believed before the bytes are there.

    advertise   party -> server  its record of ``keys``: two X25519 keys, a coin, and the hash of
                                 the seed of its own mask, signed
    keys        server -> all    those records of all n parties
    shares      party -> server  a sealed box for each neighbour, with shares of two secrets
    boxes       server -> one    the boxes for it
    vector      party -> server  its masked vector, packed
    survivors   server -> all    who dealt shares (0), and whose vector came (1)
    signature   party -> server  its signature of that list
    signatures  server -> all    those of all
    unmask      party -> server  a share of one secret of each neighbour in the list
"""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from privpart.secure.masks import packed_bytes
from privpart.secure.rules import SecureSums
from privpart.secure.shamir import SHARE_BYTES

Kind = Literal[
    "advertise",
    "keys",
    "shares",
    "boxes",
    "vector",
    "survivors",
    "signature",
    "signatures",
    "unmask",
]
EVERYBODY = 2**64 - 1
"""The party of a message to all; no party has this id."""
SIGNATURE_BYTES = 64
SECRETS_BYTES = 2 * SHARE_BYTES
_NONCE_BYTES, _TAG_BYTES = 12, 16
BOX_BYTES = _NONCE_BYTES + SECRETS_BYTES + _TAG_BYTES
KEY_BYTES = 4 * 32 + SIGNATURE_BYTES
_NUMBERS: Mapping[Kind, int] = {
    "advertise": 1,
    "keys": 2,
    "shares": 3,
    "boxes": 4,
    "vector": 5,
    "survivors": 6,
    "signature": 7,
    "signatures": 8,
    "unmask": 9,
}
_HEADER = struct.Struct(">4sB32sQI")
_MAGIC = b"PPS1"


class SecureSumError(Exception):
    """A message of a secure sum, or what it asks for, was refused: this attempt is over.

    Nothing of a vector is in the sentence. A party forgets its keys; the round may be tried again.
    """


@dataclass(frozen=True, slots=True)
class Terms:
    """What all parties of an attempt must agree on; every message and signature depends on it.

    Attributes:
        plan: hash of the plan.
        round: from 0.
        attempt: number of the attempt at this round, from 0.
        length: of a vector.
        bits: vectors are summed modulo 2^bits, 1 to 51.
        start: hash of all that a vector is computed from but the party's own data, such as the
            model: a server that sent others a model whose updates are zero would see a vector.
        rules: of the plan.
        roster: Ed25519 public key of 32 bytes of each party that may take part, by id.
        digest: SHA-256 of all of these.

    Raises:
        SecureSumError: a value out of range.
    """

    plan: str
    round: int
    attempt: int
    length: int
    bits: int
    start: str
    rules: SecureSums
    roster: Mapping[int, bytes]
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        numbers = min(self.round, self.attempt, self.length - 1) >= 0 and 0 < self.bits <= 51
        if not numbers or max(self.round, self.attempt, self.length) >= 2**63:
            raise SecureSumError("terms: a round, attempt, length or modulus is out of range.")
        parties = (0 <= party < EVERYBODY and len(k) == 32 for party, k in self.roster.items())
        if not all(parties):
            raise SecureSumError(
                "roster: must map ids from 0 to 2^64 - 2 to Ed25519 public keys of 32 bytes."
            )
        if len(set(self.roster.values())) < len(self.roster):
            raise SecureSumError("roster: two parties have one key; one owner would count twice.")
        agreed = self.plan, self.round, self.attempt, self.length, self.bits
        values = (*agreed, self.start, self.rules, sorted(self.roster.items()))
        digest = hashlib.sha256(b"privpart/secure/1 terms" + repr(values).encode()).digest()
        object.__setattr__(self, "digest", digest)

    def size(self, kind: Kind) -> int:
        """Return the bytes of a record."""
        sizes: dict[Kind, int] = {
            "advertise": KEY_BYTES,
            "keys": KEY_BYTES,
            "shares": BOX_BYTES,
            "boxes": BOX_BYTES,
            "vector": packed_bytes(self.length, self.bits),
            "survivors": 1,
            "signature": SIGNATURE_BYTES,
            "signatures": SIGNATURE_BYTES,
            "unmask": SHARE_BYTES,
        }
        return sizes[kind]


def party_of(data: bytes) -> int:
    """Return which party a message says that it is from, before anything of it is checked.

    Raises:
        SecureSumError: it is too short to say so.
    """
    if type(data) is not bytes or len(data) < _HEADER.size:
        raise SecureSumError("is not a message of secure sums.")
    party: int = _HEADER.unpack_from(data)[3]
    return party


def encode(kind: Kind, digest: bytes, party: int, records: Mapping[int, bytes]) -> bytes:
    """Return a message."""
    header = _HEADER.pack(_MAGIC, _NUMBERS[kind], digest, party, len(records))
    parts = [struct.pack(">Q", name) + record for name, record in sorted(records.items())]
    return b"".join([header, *parts])


def decode(data: bytes, kind: Kind, terms: Terms, digest: bytes, party: int) -> dict[int, bytes]:
    """Return the records of a message, by party.

    Raises:
        SecureSumError: it is anything but a message of this kind, agreement and party.
    """
    if type(data) is not bytes or len(data) < _HEADER.size:
        raise SecureSumError(f"{kind}: is not a message of secure sums.")
    magic, number, agreed, of, count = _HEADER.unpack_from(data)
    if (magic, number, of) != (_MAGIC, _NUMBERS[kind], party):
        raise SecureSumError(f"{kind}: is another message, or not from or for party {party}.")
    if agreed != digest:
        raise SecureSumError(
            f"{kind}: belongs to another plan, round, attempt, roster or set of keys than round "
            f"{terms.round}, attempt {terms.attempt}."
        )
    size = 8 + terms.size(kind)
    if len(data) != _HEADER.size + count * size:
        raise SecureSumError(f"{kind}: {len(data)} bytes are not {count} records of {size}.")
    records, last = {}, -1
    for start in range(_HEADER.size, len(data), size):
        name = int.from_bytes(data[start : start + 8])
        if not last < name < EVERYBODY:
            raise SecureSumError(f"{kind}: its records are not by party, ascending, each once.")
        last, records[name] = name, data[start + 8 : start + size]
    return records
