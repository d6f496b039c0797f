"""Coordinator: the server's side of a secure sum, a function per stage.

Each takes what arrived from the parties, in any order, and returns its state and what to send next.
A party whose answer does not come, or is refused, is lost from there on; why is noted by party.
Below the quorum or the threshold an error says so, and nothing was unmasked.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from privpart.secure.cohort import (
    Cohort,
    check_record,
    exchanged,
    members,
    refuse_close,
    signed_by,
)
from privpart.secure.masks import Vector, add_mask, reduced, unpack, zeros
from privpart.secure.messages import EVERYBODY, Kind, SecureSumError, Terms, decode, encode
from privpart.secure.shamir import is_share, joined

Answers = Iterable[tuple[int, bytes]]
"""What arrived: pairs of a party, as the transport authenticated it, and bytes."""
Refused = dict[int, str]
"""Why the answer of a party was refused, by party."""

_TRIES = 200
"""Sets of shares that are tried for a secret: if two of nine shares are wrong and five are needed,
all of them hold a wrong one with odds of 1e-16."""
_PROBE = X25519PrivateKey.from_private_bytes(bytes(32))


@dataclass(frozen=True, slots=True)
class Summed:
    """Masked vectors, added up, and the list of those whose vector came."""

    cohort: Cohort
    total: Vector
    survivors: Mapping[int, bytes]

    @property
    def members(self) -> frozenset[int]:
        """The parties whose vector is in the sum."""
        return members(self.survivors)


def gather(
    terms: Terms, answers: Answers, refused: Refused, *, listed: frozenset[int] | None = None
) -> tuple[Cohort, bytes]:
    """Return the cohort of those that advertised keys, and the message of all keys.

    Args:
        terms: of the attempt.
        answers: the advertised keys.
        refused: why one was refused, by party.
        listed: members of the list that was to be signed in an earlier attempt at this round, to
            whom it is left; None if none was.
    """
    records = {}
    for party, content in _read(answers, "advertise", terms, terms.digest, refused):
        if listed is not None and party not in listed:
            refused[party] = "keys: a list without this party was signed in this round."
            continue
        try:
            check_record(terms, party, content.get(party, b""))
            for key in (content[party][:32], content[party][32:64]):
                exchanged(_PROBE, key)
        except SecureSumError as error:
            refused[party] = str(error)
        else:
            records[party] = content[party]
    cohort = Cohort.of(terms, dict(sorted(records.items())))
    return cohort, encode("keys", terms.digest, EVERYBODY, cohort.records)


def deliver(
    cohort: Cohort, answers: Answers, refused: Refused
) -> tuple[frozenset[int], dict[int, bytes]]:
    """Return who dealt shares, and for each of them the message with the boxes for it."""
    dealt: dict[int, dict[int, bytes]] = {}
    for party, boxes in _read(answers, "shares", cohort.terms, cohort.digest, refused):
        if tuple(boxes) == cohort.neighbours(party):
            dealt[party] = boxes
        else:
            refused[party] = "shares: are not one for each of the party's neighbours."
    messages = {}
    for party in dealt:
        boxes = {n: dealt[n][party] for n in cohort.neighbours(party) if n in dealt}
        messages[party] = encode("boxes", cohort.digest, party, boxes)
    return frozenset(dealt), messages


def add_up(
    cohort: Cohort,
    dealers: frozenset[int],
    answers: Answers,
    refused: Refused,
    *,
    before: frozenset[int] | None = None,
) -> tuple[Summed, bytes]:
    """Add the masked vectors as they arrive; return the list of those that came.

    A vector that arrives later is never added: nobody will unmask it.

    Args:
        cohort: of this attempt.
        dealers: who dealt shares.
        answers: the masked vectors.
        refused: why one was refused, by party.
        before: members of the last sum that was unmasked, if there was one.
    """
    terms = cohort.terms
    total = zeros(terms.length, terms.bits)
    came = set()
    for party, content in _read(answers, "vector", terms, cohort.digest, refused):
        vector = unpack(content.get(party, b""), terms.length, terms.bits)
        if party in dealers and vector is not None:
            total += vector
            came.add(party)
        else:
            refused[party] = "vector: has other bits than a packed vector of a dealer."
    survivors = {party: b"\1" if party in came else b"\0" for party in sorted(dealers)}
    cohort.refuse_list(survivors)
    if before is not None:
        smallest = terms.rules.smallest_cohort
        refuse_close(smallest, before, members(survivors), same_round=False)
    listed = encode("survivors", cohort.digest, EVERYBODY, survivors)
    return Summed(cohort, total, survivors), listed


def confirm(state: Summed, answers: Answers, refused: Refused) -> tuple[frozenset[int], bytes]:
    """Return who signed the list of survivors, and the message with their signatures."""
    cohort, signatures = state.cohort, {}
    message, among = cohort.signed_list(state.survivors), state.members
    for party, content in _read(answers, "signature", cohort.terms, cohort.digest, refused):
        signature = content.get(party, b"")
        if party in among and signed_by(cohort.terms, party, message, signature):
            signatures[party] = signature
        else:
            refused[party] = "signature: is not of this list of survivors."
    cohort.signers(state.survivors, signatures)
    return frozenset(signatures), encode("signatures", cohort.digest, EVERYBODY, signatures)


def unmasked(state: Summed, answers: Answers, refused: Refused) -> NDArray[np.int64]:
    """Return the sum of the members' vectors modulo 2^bits, shape (d,).

    Raises:
        SecureSumError: fewer shares of a secret came than the threshold, or they are wrong.
    """
    cohort, total, survivors = state.cohort, state.total.copy(), state.survivors
    shares: dict[int, dict[int, bytes]] = {dealer: {} for dealer in survivors}
    for holder, content in _read(answers, "unmask", cohort.terms, cohort.digest, refused):
        for dealer, share in content.items():
            # whoever is no neighbour has no number, and nobody a share of its own
            if dealer in shares and cohort.are_neighbours(holder, dealer) and is_share(share):
                shares[dealer][cohort.number(holder, dealer)] = share
    among = state.members
    for dealer, given in shares.items():
        if dealer in among:
            seed = _recovered(cohort, dealer, given, _is_seed)
            add_mask(total, cohort.own_mask_key(dealer, seed), sign=-1)
            continue
        private = X25519PrivateKey.from_private_bytes(_recovered(cohort, dealer, given, _is_key))
        for member in among.intersection(cohort.neighbours(dealer)):
            key = cohort.mask_key(dealer, member, private)
            add_mask(total, key, sign=-1 if member < dealer else 1)
    return reduced(total, cohort.terms.bits).astype(np.int64)


def _recovered(
    cohort: Cohort,
    dealer: int,
    shares: Mapping[int, bytes],
    is_right: Callable[[bytes, Cohort, int], bool],
) -> bytes:
    """Return a dealer's secret from t of its shares that give the one that it advertised.

    If the first ones do not, others are tried at random: wrong shares of a few are left out.
    """
    threshold, holders = cohort.terms.rules.threshold, sorted(shares)
    if len(holders) < threshold:
        raise SecureSumError(
            f"unmask: {len(holders)} shares of party {dealer} came, {threshold} are the threshold; "
            "the sum stays masked."
        )
    chosen, chance = holders[:threshold], secrets.SystemRandom()
    for _ in range(_TRIES if len(holders) > threshold else 1):
        secret = joined({holder: shares[holder] for holder in chosen})
        if secret is not None and is_right(secret, cohort, dealer):
            return secret
        chosen = sorted(chance.sample(holders, threshold))
    raise SecureSumError(f"unmask: shares of party {dealer} are wrong; the sum stays masked.")


def _is_seed(secret: bytes, cohort: Cohort, dealer: int) -> bool:
    return hashlib.sha256(secret).digest() == cohort.seed_hash(dealer)


def _is_key(secret: bytes, cohort: Cohort, dealer: int) -> bool:
    public = X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
    return public == cohort.records[dealer][:32]


def _read(
    answers: Answers, kind: Kind, terms: Terms, digest: bytes, refused: Refused
) -> Iterator[tuple[int, dict[int, bytes]]]:
    """Yield each party's first answer that is a message of this stage."""
    seen = set[int]()
    for party, data in answers:
        if party in seen:
            continue
        seen.add(party)
        try:
            yield party, decode(data, kind, terms, digest, party)
        except SecureSumError as error:
            refused[party] = str(error)
