"""Party: one side of a secure sum, as functions from a state and a message to the next.

A party checks everything that the server says against its own copy of the plan's rules and the
roster. Whatever it refuses ends the attempt. ``Party`` keeps the state of the attempt under way and
what must be remembered of earlier ones; the functions are pure but for what they draw from the
operating system.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from numpy.typing import NDArray

from privpart.secure.cohort import Cohort, members, refuse_close, signed_keys
from privpart.secure.masks import add_mask, pack, reduced, residues_of
from privpart.secure.messages import (
    EVERYBODY,
    SECRETS_BYTES,
    SecureSumError,
    Terms,
    decode,
    encode,
)
from privpart.secure.rules import SecureSums
from privpart.secure.shamir import SHARE_BYTES, deal, is_share

_State = TypeVar("_State")


@dataclass(frozen=True, slots=True, repr=False)
class Advertised:
    """A party that advertised its keys; all secrets of the attempt are drawn."""

    terms: Terms
    party: int
    mask_private: X25519PrivateKey
    box_private: X25519PrivateKey
    seed: bytes
    record: bytes


@dataclass(frozen=True, slots=True, repr=False)
class Dealt:
    """A party that dealt shares of its secrets to its neighbours."""

    own: Advertised
    cohort: Cohort
    neighbours: tuple[int, ...]
    read: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Masked:
    """A party whose masked vector was sent; its neighbours' boxes are still sealed."""

    dealt: Dealt
    boxes: Mapping[int, bytes]
    read: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Signed:
    """A party that signed a list of survivors, the only one of this attempt."""

    masked: Masked
    survivors: Mapping[int, bytes]
    read: tuple[bytes, ...]


_UnderWay = Advertised | Dealt | Masked | Signed


def advertise(terms: Terms, party: int, signer: Ed25519PrivateKey) -> tuple[Advertised, bytes]:
    """Draw fresh secrets, and return the signed keys and the hash of the seed."""
    mask_private, box_private = X25519PrivateKey.generate(), X25519PrivateKey.generate()
    seed, coin = os.urandom(32), os.urandom(32)
    public = (mask_private.public_key(), box_private.public_key())
    keys = b"".join(key.public_bytes_raw() for key in public)
    keys += coin + hashlib.sha256(seed).digest()
    record = keys + signer.sign(signed_keys(terms, party, keys))
    state = Advertised(terms, party, mask_private, box_private, seed, record)
    return state, encode("advertise", terms.digest, party, {party: record})


def _read_keys(state: Advertised, message: bytes) -> Dealt:
    """Check everybody's keys."""
    terms, party = state.terms, state.party
    records = decode(message, "keys", terms, terms.digest, EVERYBODY)
    cohort = Cohort.of(terms, records)
    if records.get(party) != state.record:
        raise SecureSumError("keys: hold other keys of this party than it advertised, or none.")
    return Dealt(state, cohort, cohort.neighbours(party), (message,))


def _read_boxes(state: Dealt, message: bytes) -> Masked:
    """Check whose boxes came."""
    terms, party = state.own.terms, state.own.party
    boxes = decode(message, "boxes", terms, state.cohort.digest, party)
    if not boxes.keys() <= set(state.neighbours):
        raise SecureSumError("boxes: some are from parties that are not neighbours in this graph.")
    if len(boxes) < terms.rules.threshold:
        raise SecureSumError(
            f"boxes: {len(boxes)} neighbours dealt shares, the threshold is "
            f"{terms.rules.threshold}; no vector is sent."
        )
    return Masked(state, boxes, (*state.read, message))


def _read_list(state: Masked, message: bytes) -> Signed:
    """Check a list of survivors against what this party saw of the attempt."""
    cohort, first = state.dealt.cohort, state.dealt.own
    survivors = decode(message, "survivors", first.terms, cohort.digest, EVERYBODY)
    cohort.refuse_list(survivors)
    if first.party not in members(survivors):
        raise SecureSumError("survivors: this party sent its vector, and is not in the list.")
    if state.boxes.keys() != survivors.keys() & set(state.dealt.neighbours):
        raise SecureSumError("survivors: other neighbours dealt shares than those whose came here.")
    return Signed(state, survivors, (*state.read, message))


def share(state: Advertised, message: bytes) -> tuple[Dealt, bytes]:
    """Check everybody's keys; return sealed shares of the private key and the seed."""
    terms, party, dealer = state.terms, state.party, _read_keys(state, message)
    cohort, neighbours = dealer.cohort, dealer.neighbours
    numbers = [cohort.number(holder, party) for holder in neighbours]
    private = state.mask_private.private_bytes_raw()
    dealt = [deal(secret, terms.rules.threshold, numbers) for secret in (state.seed, private)]
    boxes = {}
    for holder, of_seed, of_key in zip(neighbours, *dealt, strict=True):
        key, nonce = cohort.box_key(party, holder, party, state.box_private), os.urandom(12)
        bound = cohort.bound_to(party, holder)
        boxes[holder] = nonce + AESGCM(key).encrypt(nonce, of_seed + of_key, bound)
    return dealer, encode("shares", cohort.digest, party, boxes)


def mask(state: Dealt, message: bytes, vector: NDArray[np.int64]) -> tuple[Masked, bytes]:
    """Return the vector plus the mask of the seed, and those of all neighbours that dealt.

    A box is opened only when its share is asked for: one that a neighbour filled with rubbish costs
    a share, and no party its place.
    """
    first, cohort, masked = state.own, state.cohort, _read_boxes(state, message)
    terms, party = first.terms, first.party
    if vector.shape != (terms.length,):
        raise SecureSumError(f"vector: must have {terms.length} numbers, as the terms say.")
    total = residues_of(vector, terms.bits)
    add_mask(total, cohort.own_mask_key(party, first.seed), sign=1)
    for other in masked.boxes:
        key = cohort.mask_key(party, other, first.mask_private)
        add_mask(total, key, sign=1 if party < other else -1)
    packed = pack(reduced(total, terms.bits), terms.bits)
    return masked, encode("vector", cohort.digest, party, {party: packed})


def agree(
    state: Masked,
    message: bytes,
    signer: Ed25519PrivateKey,
    check: Callable[[frozenset[int]], None],
) -> tuple[Signed, bytes]:
    """Check a list of survivors, and return its signature.

    Args:
        state: of the attempt.
        message: who dealt shares, and whose vector came.
        signer: the party's key in the roster.
        check: raises what the party's memory has against these members.
    """
    cohort, first = state.dealt.cohort, state.dealt.own
    signed = _read_list(state, message)
    check(members(signed.survivors))
    signature = signer.sign(cohort.signed_list(signed.survivors))
    return signed, encode("signature", cohort.digest, first.party, {first.party: signature})


def unmask(state: Signed, message: bytes) -> bytes:
    """Check that enough members signed the list; return one share of each neighbour in it.

    Of a member it is a share of the seed, of a party that was lost one of the private key. The list
    is the one that this party signed, so it never gives both of one party.
    """
    dealt = state.masked.dealt
    first, cohort = dealt.own, dealt.cohort
    signatures = decode(message, "signatures", first.terms, cohort.digest, EVERYBODY)
    cohort.signers(state.survivors, signatures)
    shares = {}
    for dealer, box in state.masked.boxes.items():
        key = cohort.box_key(dealer, first.party, first.party, first.box_private)
        opened = _opened(key, box, cohort.bound_to(dealer, first.party))
        member = state.survivors[dealer] == b"\1"
        share = opened[:SHARE_BYTES] if member else opened[SHARE_BYTES:]
        if is_share(share):
            shares[dealer] = share
    return encode("unmask", cohort.digest, first.party, shares)


def _opened(key: bytes, box: bytes, bound: bytes) -> bytes:
    """Return what is in a box; nothing if its dealer did not seal it for this party."""
    try:
        opened = AESGCM(key).decrypt(box[:12], box[12:], bound)
    except InvalidTag:
        return b""
    return opened if len(opened) == SECRETS_BYTES else b""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a party remembers between attempts; no secret.

    A party that may be restarted stores it before an answer leaves. Without it a server could have
    two lists or two vectors of a round, and in one attempt two vectors under the same masks, whose
    difference is in the clear.

    Attributes:
        started: round and attempt that it last began: no attempt begins twice.
        answered: messages of that attempt that it answered: none is answered twice.
        signed_in: round of the list that it last signed.
        members: of that list, ascending.
        sent_in: round in which it last sent a vector.
        sent: keyed hash of that vector: a round has one, in every attempt.
    """

    started: tuple[int, int] = (-1, -1)
    answered: int = 0
    signed_in: int = -1
    members: tuple[int, ...] = ()
    sent_in: int = -1
    sent: str = ""


class Party:
    """A party in the attempts of one run, one at a time.

    Call ``advertise``, ``share``, ``mask``, ``agree`` and ``unmask`` in this order. Whatever one of
    them raises ends the attempt, and its secrets are dropped; so they are after ``unmask``. Python
    cannot overwrite them: they are gone when its memory is reused.

    Args:
        party: its id in the roster, 0 to 2^64 - 2.
        signer: its Ed25519 key; the others know the public half.
        plan: hash of the plan, from the party's own copy of it.
        rules: of that plan.
        roster: public key of every party that may take part, by id, from a source that is not the
            server.
        memory: of the same party before it was restarted.
    """

    def __init__(
        self,
        party: int,
        signer: Ed25519PrivateKey,
        plan: str,
        rules: SecureSums,
        roster: Mapping[int, bytes],
        *,
        memory: Memory | None = None,
    ) -> None:
        if roster.get(party) != signer.public_key().public_bytes_raw():
            raise SecureSumError(f"roster: has another public key of party {party}, or none.")
        self.party = party
        self.memory = memory or Memory()
        self._signer = signer
        self._plan, self._rules, self._roster = plan, rules, dict(roster)
        self._state: _UnderWay | None = None

    def advertise(self, round_: int, attempt: int, length: int, bits: int, start: str) -> bytes:
        """Begin an attempt, with fresh keys; what was left of an earlier one is dropped.

        Args:
            round_: of the plan.
            attempt: higher in each attempt at a round, from 0.
            length: of the vectors.
            bits: they are summed modulo 2^bits.
            start: see ``Terms``.

        Raises:
            SecureSumError: the attempt, or a later one, was begun already.
        """
        self._state = None
        if (round_, attempt) <= self.memory.started:
            raise SecureSumError(
                f"attempt: {attempt} at round {round_} was begun before; must be after attempt "
                f"{self.memory.started[1]} at round {self.memory.started[0]}."
            )
        terms = self._terms(round_, attempt, length, bits, start)
        state, answer = advertise(terms, self.party, self._signer)
        self.memory = replace(self.memory, started=(round_, attempt), answered=0)
        self._answered(state)
        return answer

    def share(self, message: bytes) -> bytes:
        """Answer everybody's keys by sealed shares of this party's secrets.

        In a round whose list it signed, to exactly the members of that list. Others, or fewer with
        a smaller quorum, might outvote it when its vector is masked in their sum: their sum, less
        the one that it signed for, would be of few.
        """
        dealt, answer = share(self._at(Advertised), message)
        round_, parties = dealt.own.terms.round, dealt.cohort.records
        if self.memory.signed_in == round_ and tuple(parties) != self.memory.members:
            raise SecureSumError(
                "keys: are not those of the list that this party signed in this round."
            )
        self._answered(dealt)
        return answer

    def mask(self, message: bytes, vector: NDArray[np.int64], start: str) -> bytes:
        """Answer the boxes for this party by its masked vector of numbers modulo 2^bits.

        Args:
            message: the boxes.
            vector: shape (length,).
            start: hash of what the vector was computed from, as ``advertise`` got it.

        Raises:
            SecureSumError: it is another vector than an earlier attempt at this round had, or was
                computed from something else than the parties agreed on.
        """
        state = self._at(Dealt)
        terms = state.own.terms
        if start != terms.start:
            raise SecureSumError(
                "vector: has another start than the one that all parties agreed on."
            )
        key = self._signer.private_bytes_raw()
        sent = hashlib.sha256(key + (vector & (2**terms.bits - 1)).tobytes()).hexdigest()
        if self.memory.sent_in == terms.round and self.memory.sent != sent:
            raise SecureSumError("vector: another one was sent in this round; a round has one.")
        masked, answer = mask(state, message, vector)
        self._answered(masked, sent_in=terms.round, sent=sent)
        return answer

    def agree(self, message: bytes) -> bytes:
        """Answer the list of survivors by a signature of it."""
        state = self._at(Masked)
        round_ = state.dealt.own.terms.round
        signed, answer = agree(state, message, self._signer, self._refuse_close)
        # whether or not an unmasking follows
        listed = tuple(sorted(members(signed.survivors)))
        self._answered(signed, signed_in=round_, members=listed)
        return answer

    def unmask(self, message: bytes) -> bytes:
        """Answer the signatures by shares, once."""
        answer = unmask(self._at(Signed), message)
        self._answered(None)
        return answer

    def saved(self) -> dict[str, Any]:
        """Return the attempt under way as plain values for ``restore``; none if there is none.

        For a party whose process ends between two messages. Its secrets are in them: they belong
        into another process's memory, never on a disk. ``memory`` belongs onto one.
        """
        state = self._state
        if state is None:
            return {}
        first = _own(state)
        keys = first.mask_private.private_bytes_raw(), first.box_private.private_bytes_raw()
        terms, read = first.terms, () if isinstance(state, Advertised) else state.read
        return {
            "fixed": [terms.round, terms.attempt, terms.length, terms.bits],
            "start": terms.start,
            "secrets": b"".join([*keys, first.seed, first.record]),
            "read": list(read),
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Continue where ``saved`` was called, in a party of the same arguments and memory.

        If an answer left since then, or another attempt began, this one is over.
        """
        round_, attempt, length, bits = values["fixed"]
        answered = (round_, attempt), len(values["read"]) + 1
        if answered != (self.memory.started, self.memory.answered):
            return
        secrets, key = values["secrets"], X25519PrivateKey.from_private_bytes
        terms = self._terms(round_, attempt, length, bits, values["start"])
        parts = key(secrets[:32]), key(secrets[32:64]), secrets[64:96], secrets[96:]
        state: Any = Advertised(terms, self.party, *parts)
        for message, reader in zip(values["read"], _READERS, strict=False):
            state = reader(state, message)
        self._state = state

    def _answered(self, state: _UnderWay | None, **remembered: Any) -> None:  # noqa: ANN401
        """Go to the next stage, and remember that this one was answered."""
        self._state = state
        answered = self.memory.answered + 1
        self.memory = replace(self.memory, answered=answered, **remembered)

    def _terms(self, round_: int, attempt: int, length: int, bits: int, start: str) -> Terms:
        terms = self._rules, self._roster
        return Terms(self._plan, round_, attempt, length, bits, start, *terms)

    def _refuse_close(self, among: frozenset[int]) -> None:
        if self.memory.signed_in >= 0:
            same = self.memory.signed_in == self.memory.started[0]
            smallest = self._rules.smallest_cohort
            refuse_close(smallest, frozenset(self.memory.members), among, same_round=same)

    def _at(self, kind: type[_State]) -> _State:
        """Take the state of a stage: it serves one message."""
        state, self._state = self._state, None
        if not isinstance(state, kind):
            raise SecureSumError("this party is at another stage; its attempt is over.")
        return state


_READERS: tuple[Callable[[Any, bytes], object], ...] = (_read_keys, _read_boxes, _read_list)


def _own(state: _UnderWay) -> Advertised:
    """Return what a party drew at the beginning of its attempt."""
    if isinstance(state, Signed):
        state = state.masked
    if isinstance(state, Masked):
        state = state.dealt
    return state.own if isinstance(state, Dealt) else state
