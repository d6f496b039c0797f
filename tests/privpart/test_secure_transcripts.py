"""What server and colluding parties see of a secure sum says nothing but the sum.

Exactly, on tiny moduli: every value of every mask is tried, and views are counted. On real moduli a
distinguisher looks for what implementations get wrong, and finds it in twins that do.
"""

import itertools
from collections import Counter
from functools import cache

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from secure_parties import BITS, FIVE, LENGTH, Attempt

from privpart.secure import cohort, masks, party, shamir
from privpart.secure.cohort import members
from privpart.secure.messages import decode
from privpart.secure.rules import SecureSums

FOUR = SecureSums(smallest_cohort=3, largest_cohort=4, threshold=2, colluding=0)


class Seen(Attempt):
    """An attempt of four, in which one party is lost after it dealt shares, and one colludes."""

    def __init__(self, rules=FOUR):
        super().__init__(rules)
        self.colluder, self.lost, *self.honest = self.parties
        self.advertise()
        self.share()
        self.states = {p: one._state for p, one in self.parties.items()}
        self.mask([self.lost])
        self.masked = self.parties[self.colluder]._state
        self.agree()
        self.unmask()

    def own_key(self, p):
        return self.cohort.own_mask_key(p, self.states[p].own.seed)

    def pair_key(self, one, other):
        return self.cohort.mask_key(one, other, self.states[one].own.mask_private)

    def keys(self):
        """The keys of all masks."""
        pairs = itertools.combinations(self.parties, 2)
        return [*map(self.own_key, self.parties), *itertools.starmap(self.pair_key, pairs)]

    def known(self):
        """The keys that server and colluder can compute, from messages and the colluder's state."""
        shares = {(p, kind): {} for p in self.parties for kind in ("seed", "private")}
        for holder, message in self.sent.shares_given:
            found = decode(message, "unmask", self.terms, self.cohort.digest, holder)
            for dealer, share in found.items():
                kind = "seed" if dealer in members(self.summed.survivors) else "private"
                shares[dealer, kind][self.cohort.number(holder, dealer)] = share
        own = self.masked.dealt.own
        for dealer, box in self.masked.boxes.items():
            key = self.cohort.box_key(dealer, own.party, own.party, own.box_private)
            opened = party._opened(key, box, self.cohort.bound_to(dealer, own.party))
            number = self.cohort.number(own.party, dealer)
            shares[dealer, "seed"][number] = opened[:33]
            shares[dealer, "private"][number] = opened[33:]
        known = {self.own_key(own.party)}
        known |= {self.pair_key(own.party, p) for p in self.parties if p != own.party}
        threshold = self.rules.threshold
        for (dealer, kind), given in shares.items():
            if len(given) < threshold:
                continue
            secret = shamir.joined(dict(sorted(given.items())[:threshold]))
            if kind == "seed":
                known.add(self.cohort.own_mask_key(dealer, secret))
            else:
                private = X25519PrivateKey.from_private_bytes(secret)
                others = [p for p in self.parties if p != dealer]
                known |= {self.cohort.mask_key(dealer, p, private) for p in others}
        return known

    def views(self, monkeypatch, modulus, known, same=(), *, late=True):
        """Count what is seen over all values of all masks, by what the parties sent.

        ``same`` are keys that a faulty protocol would use twice; ``late`` lets the lost party send.
        """
        table, counts = {}, {}

        def add_mask(total, key, *, sign):
            total += np.uint32(sign * table[key] % modulus)

        monkeypatch.setattr(party, "add_mask", add_mask)
        senders = [*self.honest, *[self.lost] * late]
        needed = {*map(self.own_key, senders)} | {
            self.pair_key(p, q) for p in senders for q in self.parties if p != q
        }
        free = sorted(needed - set(same[1:]))
        bits = modulus.bit_length() - 1
        terms = party.replace(self.terms, length=1, bits=bits)
        states = {p: self.tiny(p, terms) for p in senders}
        for sent in itertools.product(range(modulus), repeat=len(senders)):
            count = counts[sent] = Counter()
            for values in itertools.product(range(modulus), repeat=len(free)):
                table.update(zip(free, values, strict=True))
                table.update(dict.fromkeys(same, table[same[0]]) if same else {})
                seen = [
                    party.mask(states[p], self.boxes[p], np.array([x]))[1]
                    for p, x in zip(senders, sent, strict=True)
                ]
                count[(*seen, *(table[key] for key in sorted(known & needed)))] += 1
        return counts

    def tiny(self, p, terms):
        """The state of a party before its vector, with a vector of one small number."""
        state = self.states[p]
        return party.replace(state, own=party.replace(state.own, terms=terms))


def groups(counts, modulus):
    """Group what was counted by the sum of the honest members; the lost party is free."""
    found = {}
    for (first, second, *_), count in counts.items():
        found.setdefault((first + second) % modulus, []).append(count)
    return found


def depends_on_the_sum_alone(counts, modulus):
    by_sum = groups(counts, modulus)
    assert len(by_sum) == modulus
    return all(count == group[0] for group in by_sum.values() for count in group)


def check_exactly(monkeypatch, modulus, *, late):
    for name in ("exchanged", "derived"):  # as slow as they are the same
        monkeypatch.setattr(cohort, name, cache(getattr(cohort, name)))
    seen = Seen()
    known = seen.known()
    first, second = seen.honest
    assert seen.pair_key(first, second) not in known
    assert seen.own_key(seen.lost) not in known
    assert {*map(seen.own_key, seen.honest), seen.pair_key(seen.lost, first)} <= known
    counts = seen.views(monkeypatch, modulus, known, late=late)
    assert depends_on_the_sum_alone(counts, modulus)
    by_sum = groups(counts, modulus)
    assert by_sum[0][0] != by_sum[1][0]  # the sum is seen
    return seen, known


def test_the_view_depends_on_the_honest_sum_alone_also_with_a_late_vector(monkeypatch):
    """A party that was lost sends its vector late; one that remained colludes with the server."""
    seen, known = check_exactly(monkeypatch, 2, late=True)
    first, second = seen.honest
    both = known | {seen.own_key(seen.lost)}  # had parties given both shares of the lost one
    assert not depends_on_the_sum_alone(seen.views(monkeypatch, 2, both), 2)
    same = (seen.own_key(first), seen.pair_key(first, second))
    counts = seen.views(monkeypatch, 2, known, same)
    assert not depends_on_the_sum_alone(counts, 2)


@pytest.mark.slow
def test_the_view_depends_on_the_honest_sum_alone_modulo_four(monkeypatch):
    check_exactly(monkeypatch, 4, late=False)


def small_key_fits(vector, guess, bits):
    """Search all keys of a small generator for one whose mask turns the vector into a guess."""
    wanted = (np.asarray(vector) - guess) % 2**bits
    for seed in range(2**12):
        mask = np.zeros(2, np.uint32)
        masks.add_mask(mask, seed.to_bytes(32), sign=1)
        if (mask.astype(np.int64) % 2**bits == wanted[:2]).all():
            return True
    return False


def sent_by_first(attempt):
    message = attempt.sent.vectors[0][1]
    p, size = attempt.sent.vectors[0][0], attempt.terms
    packed = decode(message, "vector", size, attempt.cohort.digest, p)[p]
    return masks.unpack(packed, LENGTH, BITS).astype(np.int64)


def test_masks_have_keys_of_256_bits_and_the_twin_with_a_small_seed_is_caught(monkeypatch):
    """The twin's seeds have 12 bits, so that a test can search them; 32 take a GPU some minutes."""
    attempt = Attempt(FIVE)
    attempt.until("mask")
    guess = attempt.vectors[min(attempt.parties)]
    assert not small_key_fits(sent_by_first(attempt), guess, BITS)

    def small(total, key, *, sign):
        if key == own_key:  # the others are taken off by whoever knows them
            masks.add_mask(total, (int.from_bytes(key) % 2**12).to_bytes(32), sign=sign)

    attempt = Attempt(FIVE)
    attempt.until("share")
    own = attempt.parties[min(attempt.parties)]._state.own
    own_key = attempt.cohort.own_mask_key(own.party, own.seed)
    monkeypatch.setattr(party, "add_mask", small)
    attempt.mask()
    guess = attempt.vectors[own.party]
    assert small_key_fits(sent_by_first(attempt), guess, BITS)


def looks_like_a_difference(first, second):
    """Whether two masked vectors differ by little: both masks were the same."""
    apart = (first - second) % 2**BITS
    return bool((np.minimum(apart, 2**BITS - apart) < 2**20).all())


def test_attempts_share_no_mask_and_the_twin_that_keeps_its_keys_is_caught(monkeypatch):
    def two_attempts():
        attempt = Attempt(FIVE)
        attempt.vectors = {p: np.full(LENGTH, 7) for p in attempt.parties}
        attempt.until("mask")
        again = attempt.again(1, 0)
        again.vectors = {p: np.full(LENGTH, 1007) for p in attempt.parties}
        again.until("mask")
        return looks_like_a_difference(*map(sent_by_first, (attempt, again)))

    assert not any(two_attempts() for _ in range(5))
    # another attempt has another digest, so keys alone do not repeat a mask: drop the salt, too
    fixed = [X25519PrivateKey.generate() for _ in range(10)]
    plain = masks.derived
    turns = itertools.cycle(fixed)
    monkeypatch.setattr(party.os, "urandom", bytes)
    monkeypatch.setattr(party.X25519PrivateKey, "generate", lambda: next(turns), raising=False)
    assert not two_attempts()
    monkeypatch.setattr(cohort, "derived", lambda secret, _, what: plain(secret, b"", what))
    assert two_attempts()


def test_masked_vectors_are_uniform_whatever_is_in_them():
    attempt = Attempt(FIVE)
    attempt.vectors = {p: np.zeros(LENGTH, np.int64) for p in attempt.parties}
    sent = []
    for round_ in range(40):
        one = attempt.again(round_, 0) if round_ else attempt
        one.vectors = attempt.vectors
        one.until("mask")
        for p, message in one.sent.vectors:
            packed = decode(message, "vector", one.terms, one.cohort.digest, p)[p]
            sent.append(masks.unpack(packed, LENGTH, BITS))
    for shift in (0, BITS - 4):  # the lowest and the highest bits
        counts = np.bincount(np.concatenate(sent) >> shift & 15, minlength=16)
        expected = counts.sum() / 16
        assert ((counts - expected) ** 2 / expected).sum() < 50  # 1e-5 of chi-square with 15
