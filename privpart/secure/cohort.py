"""Cohort: the keys that parties advertised, checked, and who is whose neighbour."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from privpart.secure.masks import derived
from privpart.secure.messages import SIGNATURE_BYTES, SecureSumError, Terms


def signed_keys(terms: Terms, party: int, keys: bytes) -> bytes:
    """Return what a party signs when it advertises its keys."""
    return b"privpart/secure/1 keys" + terms.digest + party.to_bytes(8) + keys


def check_record(terms: Terms, party: int, record: bytes) -> None:
    """Check that a party of the roster signed its keys for these terms.

    Raises:
        SecureSumError: it did not.
    """
    if party not in terms.roster:
        raise SecureSumError(f"keys: party {party} is not in the roster.")
    message = signed_keys(terms, party, record[:-SIGNATURE_BYTES])
    if not signed_by(terms, party, message, record[-SIGNATURE_BYTES:]):
        raise SecureSumError(f"keys: party {party} did not sign these keys for this attempt.")


def exchanged(private: X25519PrivateKey, public: bytes) -> bytes:
    """Return the secret of a private and a public key.

    Raises:
        SecureSumError: the public key is one of the few with which everybody's secret is zero.
    """
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise SecureSumError("keys: one gives no secret.") from None


def signed_by(terms: Terms, party: int, message: bytes, signature: bytes) -> bool:
    """Whether a message has the signature of a party of the roster."""
    return _verified(terms.roster.get(party, b""), message, signature)


# the server reads the same keys three times, and a party in each stage
@lru_cache(2**12)
def _verified(public: bytes, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Cohort:
    """The parties of an attempt and their keys, as one message told all of them.

    Attributes:
        terms: of the attempt.
        records: what each advertised, by party, ascending.
        digest: SHA-256 of terms and records: who was told of other keys disagrees in it.
        ring: the parties in the order of their neighbourhoods, by a hash of everybody's coins.
        place: of each party on the ring.
    """

    terms: Terms
    records: Mapping[int, bytes]
    digest: bytes
    ring: tuple[int, ...]
    place: Mapping[int, int]

    @classmethod
    def of(cls, terms: Terms, records: Mapping[int, bytes]) -> "Cohort":
        """Return the cohort of these keys.

        Raises:
            SecureSumError: too few or too many, or a record that ``check_record`` refuses.
        """
        rules = terms.rules
        if not rules.smallest_cohort <= len(records) <= rules.largest_cohort:
            raise SecureSumError(
                f"keys: of {len(records)} parties; the plan has cohorts of {rules.smallest_cohort} "
                f"to {rules.largest_cohort}."
            )
        hashed = hashlib.sha256(b"privpart/secure/1 cohort" + terms.digest)
        for party, record in records.items():
            check_record(terms, party, record)
            hashed.update(party.to_bytes(8) + record)
        digest = hashed.digest()

        def order(party: int) -> bytes:
            return hashlib.sha256(digest + party.to_bytes(8)).digest()

        ring = tuple(sorted(records, key=order))
        place = {party: at for at, party in enumerate(ring)}
        return cls(terms, dict(records), digest, ring, place)

    def neighbours(self, party: int) -> tuple[int, ...]:
        """Return the parties that one exchanges masks and shares with, ascending."""
        if self.terms.rules.neighbours is None:
            return tuple(other for other in self.records if other != party)
        at, half = self.place[party], self.terms.rules.neighbours // 2
        steps = (*range(-half, 0), *range(1, half + 1))
        return tuple(sorted(self.ring[(at + step) % len(self.ring)] for step in steps))

    def are_neighbours(self, one: int, other: int) -> bool:
        """Whether two parties exchange masks and shares."""
        if not {one, other} <= self.place.keys() or one == other:
            return False
        apart = self.number(one, other)
        half = (self.terms.rules.neighbours or 2 * len(self.ring)) // 2
        return min(apart, len(self.ring) - apart) <= half

    def number(self, holder: int, dealer: int) -> int:
        """Return the number of a holder's share of a dealer's secrets: its place after it."""
        return (self.place[holder] - self.place[dealer]) % len(self.ring)

    def mask_key(self, one: int, other: int, private: X25519PrivateKey) -> bytes:
        """Return the key of the mask of two parties, from the private key of the first one."""
        shared = exchanged(private, self.records[other][:32])
        return derived(shared, self.digest, b"mask " + _both(min(one, other), max(one, other)))

    def box_key(self, dealer: int, holder: int, own: int, private: X25519PrivateKey) -> bytes:
        """Return the key of the box from dealer to holder, from the private key of ``own``."""
        shared = exchanged(private, self.records[holder if own == dealer else dealer][32:64])
        return derived(shared, self.digest, b"box " + _both(dealer, holder))

    def bound_to(self, dealer: int, holder: int) -> bytes:
        """Return what a box is bound to: all terms, everybody's keys, whose it is and for whom."""
        return self.digest + _both(dealer, holder)

    def own_mask_key(self, party: int, seed: bytes) -> bytes:
        """Return the key of the mask that a party shares with nobody, from its seed."""
        return derived(seed, self.digest, b"own " + party.to_bytes(8))

    def seed_hash(self, party: int) -> bytes:
        """Return the hash of the seed of a party's own mask, as it advertised it."""
        return self.records[party][96:128]

    def signed_list(self, survivors: Mapping[int, bytes]) -> bytes:
        """Return what a party signs of who dealt shares and whose vector came."""
        listed = b"".join(p.to_bytes(8) + mark for p, mark in sorted(survivors.items()))
        return b"privpart/secure/1 survivors" + self.digest + listed

    def refuse_list(self, survivors: Mapping[int, bytes]) -> None:
        """Check a list of survivors.

        Raises:
            SecureSumError: it names others, has other marks, or is shorter than the quorum.
        """
        if not survivors.keys() <= self.records.keys():
            raise SecureSumError("survivors: names parties that advertised no keys.")
        if not set(survivors.values()) <= {b"\0", b"\1"}:
            raise SecureSumError("survivors: has other marks than 0 and 1.")
        quorum, came = self.terms.rules.quorum(len(self.records)), len(members(survivors))
        if came < quorum:
            raise SecureSumError(
                f"survivors: the vectors of {came} parties came, {quorum} of "
                f"{len(self.records)} are the least; nothing is unmasked."
            )

    def signers(self, survivors: Mapping[int, bytes], signatures: Mapping[int, bytes]) -> None:
        """Check that enough members of a list signed it.

        Raises:
            SecureSumError: one is of another list or party, or they are too few.
        """
        message = self.signed_list(survivors)
        among = members(survivors)
        for party, signature in signatures.items():
            if party not in among or not signed_by(self.terms, party, message, signature):
                raise SecureSumError(f"signatures: party {party} did not sign this list.")
        quorum = self.terms.rules.quorum(len(self.records))
        if len(signatures) < quorum:
            raise SecureSumError(
                f"signatures: {len(signatures)} parties signed the list of survivors, {quorum} of "
                f"{len(self.records)} are the least; nothing is unmasked."
            )


def _both(one: int, other: int) -> bytes:
    return one.to_bytes(8) + other.to_bytes(8)


def members(survivors: Mapping[int, bytes]) -> frozenset[int]:
    """Return the parties whose vector is in the sum."""
    return frozenset(party for party, mark in survivors.items() if mark == b"\1")


def refuse_close(
    smallest: int, before: frozenset[int], now: frozenset[int], *, same_round: bool
) -> None:
    """Refuse a sum whose difference to an earlier one would be a sum of few parties.

    Raises:
        SecureSumError: in one round, the lists differ; in two, by 1 to smallest - 1 parties.
    """
    apart = len(before ^ now)
    if same_round and apart:
        raise SecureSumError(
            "survivors: another list was signed in this round; a round has one sum of a party."
        )
    if 0 < apart < smallest:
        raise SecureSumError(
            f"survivors: {apart} parties are in one of this list and the last, and not in both; "
            f"must be none, or at least {smallest}, or the difference of the two sums is of few."
        )
