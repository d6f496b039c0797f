"""Secure sums: the sum is exact or there is none, and no message makes a party give away more."""

import hashlib
import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from scipy.stats import hypergeom
from secure_parties import BITS, FIVE, LENGTH, RING, TWENTY, Attempt, roster, signers

from accounting import ConfigError
from privpart.secure import coordinator, party, shamir
from privpart.secure.masks import add_mask, pack, packed_bytes, reduced, residues_of, unpack
from privpart.secure.messages import EVERYBODY, SecureSumError, Terms, encode
from privpart.secure.party import Memory, Party
from privpart.secure.rules import SecureSums, tail

STAGES = ("advertise", "share", "mask", "agree", "unmask")
STAYS = len(STAGES)


def is_prime(number):
    """Miller and Rabin, with 64 bases: a composite passes with odds below 2^-128."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 66):
        power = pow(base, odd, number)
        squares = [power := power * power % number if i else power for i in range(twos)]
        if squares[0] != 1 and number - 1 not in squares:
            return False
    return True


def test_the_field_is_the_smallest_one_that_holds_32_bytes():
    assert is_prime(shamir.PRIME)
    assert not any(is_prime(number) for number in range(2**256 + 1, shamir.PRIME, 2))
    assert (shamir.PRIME - 1).bit_length() <= 8 * shamir.SHARE_BYTES


def test_any_shares_of_the_threshold_give_the_secret_back():
    secret = bytes(range(224, 256))
    holders = [2, 3, 5, 40, 999]
    shares = dict(zip(holders, shamir.deal(secret, 3, holders), strict=True))
    for chosen in itertools.combinations(holders, 3):
        assert shamir.joined({holder: shares[holder] for holder in chosen}) == secret
    two = {holder: shares[holder] for holder in holders[:2]}
    assert shamir.joined(two) != secret


def test_fewer_shares_tell_nothing(monkeypatch):
    """Over all polynomials of a field of 7: any two of four shares are uniform at threshold 3."""
    monkeypatch.setattr(shamir, "PRIME", 7)
    seen = {}
    for secret in range(7):
        found = seen[secret] = {pair: Counter() for pair in itertools.combinations(range(4), 2)}
        for coefficients in itertools.product(range(7), repeat=2):
            given = iter(coefficients)
            shares = shamir.deal(
                secret.to_bytes(32), 3, [1, 2, 3, 4], below=lambda _, given=given: next(given)
            )
            for pair, count in found.items():
                count[tuple(shares[i] for i in pair)] += 1
    assert all(found == seen[0] for found in seen.values())
    assert {len(count) for count in seen[0].values()} == {49}


@pytest.mark.parametrize("bits", [1, 7, 8, 9, 28, 31, 32, 33, 51])
def test_packed_numbers_are_their_bits_and_nothing_else_unpacks(bits):
    random = np.random.default_rng(bits)
    for length in (1, 8, 100):
        numbers = residues_of(random.integers(0, 2**bits, length), bits)
        data = pack(numbers, bits)
        whole = int.from_bytes(data, "little")
        assert [whole >> (bits * i) & (2**bits - 1) for i in range(length)] == numbers.tolist()
        assert len(data) == packed_bytes(length, bits)
        assert (unpack(data, length, bits) == numbers).all()
        assert unpack(data + b"\0", length, bits) is None
    assert unpack(b"\xff" * packed_bytes(1, bits), 1, bits) is None


def test_masks_of_one_key_cancel_and_their_numbers_are_uniform():
    total = residues_of(np.arange(200_000) % 256, 8)
    before = total.copy()
    add_mask(total, b"k" * 32, sign=1)
    counts = np.bincount(reduced(total.copy(), 8), minlength=256)
    expected = len(total) / 256
    assert ((counts - expected) ** 2 / expected).sum() < 360  # 1e-5 of chi-square with 255
    add_mask(total, b"k" * 32, sign=-1)
    assert (total == before).all()


def test_odds_of_neighbourhoods_are_hypergeometric():
    for numbers in [(9, 3, 4), (30, 10, 12), (99, 20, 30)]:
        for least in range(6):
            population, marked, drawn = numbers
            expected = hypergeom(population, marked, drawn).sf(least - 1)
            assert float(tail(*numbers, least)) == pytest.approx(expected)
    wide = SecureSums(
        smallest_cohort=600, largest_cohort=1000, threshold=105, colluding=50, neighbours=120
    )
    assert wide.bad_graph() == 1000 * tail(599, 50, 120, 45)
    assert FIVE.bad_graph() == 0
    assert FIVE.stuck(5, 2) == 1
    assert TWENTY.stuck(20, 8) == 0
    assert 0 < wide.stuck(1000, 20) < Fraction(1, 10**6)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"colluding": -1}, "colluding=-1: must be at least 0"),
        ({"smallest_cohort": 1}, "smallest_cohort=1: must be at least 2"),
        ({"smallest_cohort": 4, "colluding": 3}, "smallest_cohort=4: must be at least 5"),
        ({"largest_cohort": 3}, "largest_cohort=3: must be at least 4"),
        ({"threshold": 4}, "threshold=4: must be below smallest_cohort=4"),
        ({"threshold": 2}, "threshold=2: must be at least 3"),
        ({"neighbours": 3}, "neighbours=3: must be even"),
        ({"neighbours": 4}, "neighbours=4: must be even and at most smallest_cohort - 2"),
        ({"neighbours": 2}, "threshold=3: must be above half of the 2 neighbours"),
        ({"neighbours": 2, "threshold": 1}, "threshold=1: must be above half"),
        (
            {"smallest_cohort": 50, "largest_cohort": 90, "threshold": 14, "colluding": 10,
             "neighbours": 20},
            "must be at most 2\\^-80",
        ),
    ],
)  # fmt: skip
def test_rules_that_would_not_hide_a_party_are_refused(fields, says):
    sound = {"smallest_cohort": 4, "largest_cohort": 5, "threshold": 3, "colluding": 0}
    with pytest.raises(ConfigError, match=says):
        SecureSums(**sound | fields)


def possible(rules, lost_at):
    """Whether a sum can be unmasked, said anew from who is left at each stage."""
    left = [{p for p, stage in lost_at.items() if stage > at} for at in range(len(STAGES))]
    keys, dealt, came, signed, gave = left
    if len(keys) < rules.smallest_cohort:
        return None
    quorum = max(rules.smallest_cohort, (len(keys) + rules.colluding) // 2 + 1)
    enough = min(len(came), len(signed)) >= quorum
    given = all(len(gave - {dealer}) >= rules.threshold for dealer in dealt)
    return came if enough and given else None


def check_pattern(rules, stages):
    keys = KEYS[len(stages)]
    attempt = Attempt(rules, keys=keys)
    lost_at = dict(zip(keys, stages, strict=True))
    expected = possible(rules, lost_at)
    try:
        for at, stage in enumerate(STAGES):
            result = getattr(attempt, stage)([p for p, s in lost_at.items() if s == at])
    except SecureSumError:
        assert expected is None, stages
        return False
    assert attempt.summed.members == expected, stages
    assert (result == attempt.expected(expected)).all(), stages
    return True


KEYS = {5: signers(5), 20: signers(20)}


def test_one_or_two_parties_lost_at_any_stage_give_the_exact_sum_or_none():
    patterns = itertools.combinations_with_replacement(range(STAYS + 1), 2)
    came = [check_pattern(FIVE, (*stages, STAYS, STAYS, STAYS)) for stages in patterns]
    assert sum(came) == STAYS + 1  # one of five may be lost, anywhere
    assert len(came) == 21


@pytest.mark.slow
def test_every_pattern_of_five_parties_gives_the_exact_sum_or_none():
    patterns = itertools.product(range(STAYS + 1), repeat=5)
    came = sum(check_pattern(FIVE, stages) for stages in patterns)
    assert came == 1 + 5 * STAYS


def check_random_patterns(number, seed):
    random = np.random.default_rng(seed)
    came = 0
    for _ in range(number):
        lost = random.random(20) < random.uniform(0.1, 0.8)
        stages = np.where(lost, random.integers(0, STAYS, 20), STAYS)
        came += check_pattern(TWENTY, stages.tolist())
    assert number / 4 < came < number


def test_random_patterns_of_twenty_parties_give_the_exact_sum_or_none():
    check_random_patterns(5, 2)


@pytest.mark.slow
def test_a_thousand_random_patterns_of_twenty_parties_give_the_exact_sum_or_none():
    check_random_patterns(1000, 1)


def test_on_a_ring_the_sum_is_exact_and_each_party_talks_to_its_neighbours_alone():
    attempt = Attempt(RING)
    lost = sorted(attempt.parties)[:2]
    attempt.advertise()
    attempt.share(lost[:1])
    attempt.mask(lost[1:])
    attempt.agree()
    assert (attempt.unmask() == attempt.expected(attempt.summed.members)).all()
    assert len(attempt.summed.members) == 18
    for _, message in attempt.sent.shares:
        assert len(message) == len(
            encode("shares", bytes(32), 0, {i: bytes(94) for i in range(12)})
        )
    for one, other in itertools.combinations(attempt.parties, 2):
        near = other in attempt.cohort.neighbours(one)
        assert near == attempt.cohort.are_neighbours(one, other)


def test_wrong_shares_of_some_parties_are_left_out():
    attempt = Attempt(FIVE)
    attempt.until("unmask")
    liar, message = attempt.sent.shares_given[0]
    others = attempt.sent.shares_given[1:]
    wrong = (liar, message[:-1] + bytes([message[-1] ^ 1]))
    for given in ([wrong, *others], [*others, wrong]):
        total = coordinator.unmasked(attempt.summed, given, {})
        assert (total == attempt.expected(attempt.parties)).all()


def test_wrong_shares_of_two_are_left_out_wherever_their_holders_stand():
    """Of the 19 holders 11 are needed, and no 11 that stand side by side are all right."""
    attempt = Attempt(TWENTY)
    attempt.until("unmask")
    liars, digest = attempt.cohort.ring[::10], attempt.cohort.digest
    given = dict(attempt.sent.shares_given)
    for liar in liars:
        wrong = {p: bytes(33) for p in attempt.parties if p != liar}
        given[liar] = encode("unmask", digest, liar, wrong)
    total = coordinator.unmasked(attempt.summed, given.items(), {})
    assert (total == attempt.expected(attempt.parties)).all()


def test_shares_from_strangers_and_of_oneself_are_not_read():
    attempt = Attempt(FIVE)
    attempt.until("unmask")
    first, *_ = attempt.parties
    share = {first: bytes(33)}
    strange = encode("unmask", attempt.cohort.digest, 99, share)
    own = encode("unmask", attempt.cohort.digest, first, share)
    given = [(99, strange), (first, own), *attempt.sent.shares_given[1:]]
    total = coordinator.unmasked(attempt.summed, given, {})
    assert (total == attempt.expected(attempt.parties)).all()


def refused(act, says):
    """The sentence of a refusal."""
    with pytest.raises(SecureSumError, match=says) as caught:
        act()
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return sentence


def some(attempt):
    return next(iter(attempt.parties.values()))


def test_a_party_refuses_keys_that_were_swapped_replayed_or_made_up():
    attempt = Attempt(FIVE)
    attempt.advertise()
    digest, records = attempt.terms.digest, dict(attempt.cohort.records)
    first, second, third, *_ = records

    def keys(changed, digest=digest):
        message = encode("keys", digest, EVERYBODY, changed)
        state, _ = party.advertise(attempt.terms, first, attempt.keys[first])
        own = records | changed
        own[first] = state.record
        message = encode("keys", digest, EVERYBODY, {p: own[p] for p in own if own[p]})
        return lambda: party.share(state, message)

    swapped = {second: records[third], third: records[second]}
    refused(keys(swapped), f"party {second} did not sign these keys")
    made = Ed25519PrivateKey.generate()
    forged = party.advertise(attempt.terms, second, made)[0].record
    refused(keys({second: forged}), f"party {second} did not sign")
    refused(keys({99: forged, third: b""}), "party 99 is not in the roster")
    earlier = Attempt(FIVE, keys=attempt.keys, number_of=(0, 1))
    earlier.advertise()
    refused(keys({second: earlier.cohort.records[second]}), f"party {second} did not sign")
    refused(keys({}, earlier.terms.digest), "belongs to another plan, round, attempt")
    refused(keys({second: b"", third: b""}), "keys: of 3 parties; the plan has cohorts of 4 to 5")
    refused(lambda: some(attempt).share(earlier.all_keys), "another plan, round, attempt")
    refused(lambda: some(attempt).share(attempt.all_keys), "is at another stage")


def test_a_party_refuses_keys_that_hold_others_of_its_own():
    attempt = Attempt(FIVE)
    attempt.advertise()
    one = some(attempt)
    signer = attempt.keys[one.party]
    records = dict(attempt.cohort.records)
    records[one.party] = party.advertise(attempt.terms, one.party, signer)[0].record
    message = encode("keys", attempt.terms.digest, EVERYBODY, records)
    refused(lambda: one.share(message), "other keys of this party than it advertised")


def test_keys_that_give_everybody_the_same_secret_are_refused():
    attempt = Attempt(FIVE)
    attempt.advertise()
    bad, *_ = attempt.cohort.records
    own = party.advertise(attempt.terms, bad, attempt.keys[bad])[0].record
    for at in (0, 32):
        keys = own[:at] + bytes(32) + own[at + 32 : 128]
        record = keys + attempt.keys[bad].sign(party.signed_keys(attempt.terms, bad, keys))
        sent = [(p, m) for p, m in attempt.sent.keys if p != bad]
        sent.append((bad, encode("advertise", attempt.terms.digest, bad, {bad: record})))
        found = {}
        cohort, _ = coordinator.gather(attempt.terms, sent, found)
        assert bad not in cohort.records
        assert found[bad] == "keys: one gives no secret."


@pytest.mark.parametrize("field", ["threshold", "neighbours", "smallest_cohort", "colluding"])
def test_a_server_with_other_rules_agrees_with_no_party(field):
    """A small threshold, another graph, a smaller cohort: the digest of the terms differs."""
    changed = {name: getattr(RING, name) for name in RING.__slots__}
    changed[field] += {"neighbours": -2, "smallest_cohort": 1, "threshold": 1}.get(field, -1)
    attempt = Attempt(RING)
    rules = SecureSums(**changed)
    own = Terms("plan", *attempt.fixed, rules, attempt.roster)
    sent = [(p, one.advertise(*attempt.fixed)) for p, one in attempt.parties.items()]
    found = {}
    refused(lambda: coordinator.gather(own, sent, found), "of 0 parties")
    assert all("another plan, round, attempt, roster" in why for why in found.values())


def test_a_party_refuses_boxes_of_another_graph_and_to_stand_alone():
    attempt = Attempt(RING)
    attempt.until("share")
    one = some(attempt)
    boxes = {n: bytes(94) for n in attempt.cohort.neighbours(one.party)}
    stranger = next(p for p in attempt.parties if p not in {*boxes, one.party})
    digest, vector = attempt.cohort.digest, attempt.vectors[one.party]
    state = one._state

    def boxed(given):
        message = encode("boxes", digest, one.party, given)
        return lambda: party.mask(state, message, vector)

    refused(boxed(boxes | {stranger: bytes(94)}), "not neighbours in this graph")
    refused(boxed(boxes | {one.party: bytes(94)}), "not neighbours in this graph")
    few = dict(list(boxes.items())[: RING.threshold - 1])
    refused(boxed(few), "9 neighbours dealt shares, the threshold is 10; no vector is sent")
    refused(boxed({}), "0 neighbours dealt shares")
    refused(lambda: one.mask(attempt.boxes[stranger], vector, "model"), "not from or for party")


def test_a_party_refuses_lists_that_are_short_or_wrong():
    attempt = Attempt(TWENTY)
    attempt.until("mask")
    one = some(attempt)
    state = one._state
    everybody = dict(attempt.summed.survivors)

    def listed(changed, drop=()):
        survivors = {p: mark for p, mark in (everybody | changed).items() if p not in drop}
        message = encode("survivors", attempt.cohort.digest, EVERYBODY, survivors)
        return lambda: party.agree(state, message, attempt.keys[one.party], lambda _: None)

    lost = dict.fromkeys(list(everybody)[-9:], b"\0")
    refused(listed(lost), "the vectors of 11 parties came, 12 of 20 are the least")
    refused(listed({one.party: b"\0"}), "this party sent its vector, and is not in the list")
    refused(listed({list(everybody)[-1]: b"\2"}), "other marks than 0 and 1")
    refused(listed({99: b"\1"}), "names parties that advertised no keys")
    refused(listed({}, drop=[list(everybody)[-1]]), "other neighbours dealt shares")
    assert listed(dict.fromkeys(list(everybody)[-8:], b"\0"))()


def test_two_lists_never_both_get_enough_signatures():
    """A server tells half of the parties another list; so no one gives either secret of anybody."""
    attempt = Attempt(TWENTY)
    attempt.until("mask")
    half = sorted(attempt.parties)[:10]
    other = attempt.summed.survivors | {max(attempt.parties): b"\0"}
    second = encode("survivors", attempt.cohort.digest, EVERYBODY, other)
    signed = {
        p: one.agree(attempt.listed if p in half else second)[-64:]
        for p, one in attempt.parties.items()
        if p in half or p != max(attempt.parties)
    }
    one = attempt.parties[half[0]]
    refused(lambda: one.agree(second), "is at another stage")
    for given, says in (
        ({p: s for p, s in signed.items() if p in half}, "10 parties signed the list .* 12 of 20"),
        (signed, "party .* did not sign this list"),
    ):
        one = attempt.parties[half[len(given) % 2 + 1]]
        message = encode("signatures", attempt.cohort.digest, EVERYBODY, given)
        refused(lambda one=one, message=message: one.unmask(message), says)


def test_no_party_gives_both_shares_of_one_or_answers_twice():
    attempt = Attempt(FIVE)
    lost = sorted(attempt.parties)[-1]
    attempt.advertise()
    attempt.share()
    attempt.mask([lost])
    attempt.agree()
    attempt.unmask()
    for p, message in attempt.sent.shares_given:
        assert len(message) == len(encode("unmask", bytes(32), p, {i: bytes(33) for i in range(4)}))
    refused(lambda: some(attempt).unmask(attempt.signatures), "is at another stage")
    # a late vector is in no sum, and the seed of its mask is with its party
    assert lost not in attempt.summed.members


def test_attempts_never_repeat_and_a_round_has_one_list():
    attempt = Attempt(TWENTY)
    attempt.until("agree")
    one = some(attempt)
    for earlier in ((0, 0), (-1, 5)):
        refused(lambda e=earlier: one.advertise(*e, LENGTH, BITS, "model"), "was begun before")
    again = attempt.again(0, 1)
    again.advertise()
    again.share()
    again.mask([max(attempt.parties)])
    refused(lambda: one.agree(again.listed), "another list was signed in this round")
    same = attempt.again(0, 2)
    assert (same.until("unmask") == same.expected(same.parties)).all()
    keys = [{m[-192:-128] for _, m in a.sent.keys} for a in (attempt, same)]
    assert not keys[0] & keys[1]


def test_who_signed_in_a_round_is_not_summed_with_others_in_it():
    """Else a second list could have a quorum of those whom the server let not sign the first."""
    rules = SecureSums(smallest_cohort=8, largest_cohort=14, threshold=7, colluding=0)
    first = Attempt(rules, number=16)
    everybody = dict(first.parties)
    agreed, silent, newcomers = (sorted(everybody)[i:j] for i, j in ((0, 8), (8, 14), (14, 16)))
    first.parties = {p: everybody[p] for p in agreed + silent}
    first.advertise()
    first.share()
    first.mask()
    for one in agreed:
        everybody[one].agree(first.listed)
    # of these 14, 8 may sign; less the first, their sum is of 2 newcomers less 2 that are gone
    asked = {p: everybody[p] for p in agreed[2:] + silent + newcomers}
    second = Attempt(rules, parties=asked, keys=first.keys, number_of=(0, 1))
    keys = second.advertise()
    for one in agreed[2:]:
        refused(lambda p=one: everybody[p].share(keys), "not those of the list that this party")
    assert len(silent + newcomers) == rules.quorum(14)
    honest = Attempt(rules, parties=everybody, keys=first.keys, number_of=(0, 2))
    honest.sent.keys = [(p, it.advertise(*honest.fixed)) for p, it in everybody.items()]
    arrived = honest.terms, honest.sent.keys, honest.refused
    cohort, _ = coordinator.gather(*arrived, listed=first.summed.members)
    assert cohort.records.keys() == first.summed.members


def test_who_signed_is_not_outvoted_by_a_smaller_quorum_of_a_part_of_the_list():
    """Of 17 of 20 parties 9 are a quorum, as many as did not sign: the sums differ by 3."""
    rules = SecureSums(smallest_cohort=8, largest_cohort=20, threshold=4, colluding=0, neighbours=6)
    first = Attempt(rules)
    first.until("mask")
    everybody = sorted(first.parties)
    agreed, silent = everybody[:11], everybody[11:]
    assert (rules.quorum(20), rules.quorum(17)) == (len(agreed), len(silent))
    for p in agreed:
        first.parties[p].agree(first.listed)
    fewer = {p: first.parties[p] for p in everybody[3:]}
    second = Attempt(rules, parties=fewer, keys=first.keys, number_of=(0, 1))
    keys = second.advertise()
    for p in everybody[3:11]:
        refused(lambda p=p: first.parties[p].share(keys), "not those of the list that this party")


@pytest.mark.parametrize(("apart", "goes"), [(0, True), (1, False), (5, False)])
def test_lists_of_two_rounds_differ_by_nobody_or_by_a_cohort(apart, goes):
    first = Attempt(TWENTY)
    first.until("unmask")
    later = first.again(1, 0)
    later.advertise()
    later.share()
    later.mask(sorted(first.parties)[:apart])
    one = first.parties[max(first.parties)]
    if goes:
        assert one.agree(later.listed)
        return
    refused(
        lambda: one.agree(later.listed), f"{apart} parties are in one of this list and the last"
    )
    before = first.summed.members
    given = later.cohort, later.dealers, later.sent.vectors, {}
    refused(lambda: coordinator.add_up(*given, before=before), "the difference of the two sums")
    # a party that was restarted with its memory refuses as well, one without does not know
    for memory in (one.memory, Memory()):
        new = Party(one.party, first.keys[one.party], "plan", TWENTY, first.roster, memory=memory)
        check = new._refuse_close
        new.memory = party.replace(new.memory, started=(1, 0))
        if memory.signed_in < 0:
            check(later.summed.members)
        else:
            refused(lambda check=check: check(later.summed.members), "the last")


def test_a_round_has_one_vector_of_a_party_and_one_start_of_all():
    """Else a server repeats a round without a client of a party, or with a model made for it."""
    attempt = Attempt(FIVE)
    attempt.until("share")
    one = some(attempt)
    boxes = attempt.boxes[one.party]
    refused(lambda: one.mask(boxes, attempt.vectors[one.party], "another"), "has another start")
    attempt = attempt.again(0, 1)
    attempt.until("unmask")
    again = attempt.again(0, 2)
    again.until("share")
    boxes, other = again.boxes[one.party], again.vectors[one.party] + 1
    refused(lambda: one.mask(boxes, other, "model"), "another one was sent in this round")
    later = attempt.again(1, 0)
    assert (later.until("unmask") == later.expected(later.parties)).all()
    told = Attempt(FIVE)
    victim, *others = told.parties
    sent = [(p, told.parties[p].advertise(*told.fixed)) for p in others]
    sent.append((victim, told.parties[victim].advertise(*told.fixed[:4], "made for it")))
    found = {}
    cohort, _ = coordinator.gather(told.terms, sent, found)
    assert sorted(cohort.records) == sorted(others)
    assert "another plan, round, attempt" in found[victim]


def test_a_party_needs_its_own_key_in_the_roster():
    keys = signers(5)
    refused(
        lambda: Party(10, keys[11], "plan", FIVE, roster(keys)), "another public key of party 10"
    )


@pytest.mark.parametrize(
    "change",
    [{"round": -1}, {"attempt": 2**63}, {"length": 0}, {"bits": 52}, {"bits": 0},
     {"roster": {-1: bytes(32)}}, {"roster": {EVERYBODY: bytes(32)}}, {"roster": {0: b"short"}},
     {"roster": {0: bytes(32), 1: bytes(32)}}],
)  # fmt: skip
def test_terms_out_of_range_are_refused(change):
    fields = {
        "plan": "plan",
        "round": 0,
        "attempt": 0,
        "length": 1,
        "bits": 28,
        "start": "",
        "roster": {},
    }
    refused(
        lambda: Terms(rules=FIVE, **fields | change), "out of range|must map ids from 0|one key"
    )


def test_a_vector_of_another_length_is_not_masked():
    attempt = Attempt(FIVE)
    attempt.until("share")
    one = some(attempt)
    refused(
        lambda: one.mask(attempt.boxes[one.party], np.zeros(8, int), "model"), "must have 9 numbers"
    )


def mutated(message, others, random):
    """A message with a change that a stranger on the line, or a hostile side, might make."""
    kind, at = random.integers(7), int(random.integers(len(message)))
    if kind == 0:
        return (
            message[:at] + bytes([message[at] ^ (1 << int(random.integers(8)))]) + message[at + 1 :]
        )
    if kind == 1:
        return message[:at]
    if kind == 2:
        return message + random.bytes(int(random.integers(1, 200)))
    if kind == 3:
        return message[:at] + random.bytes(8) + message[at + 8 :]
    if kind == 4:
        return others[int(random.integers(len(others)))]
    if kind == 5:
        other = others[int(random.integers(len(others)))]
        return message[:at] + other[at:]
    return random.bytes(int(random.integers(200)))


def check_mutations(number, seed):
    """Feed changed messages to every stage of both sides; return how many were refused."""
    random = np.random.default_rng(seed)
    attempt, states = Attempt(FIVE), {}
    for stage in STAGES:
        states[stage] = some(attempt)._state
        getattr(attempt, stage)()
    one, sent = some(attempt), attempt.sent
    own, vector = attempt.keys[one.party], attempt.vectors[one.party]
    sides = [
        (attempt.all_keys, lambda m: party.share(states["share"], m)),
        (attempt.boxes[one.party], lambda m: party.mask(states["mask"], m, vector)),
        (attempt.listed, lambda m: party.agree(states["agree"], m, own, lambda _: None)),
        (attempt.signatures, lambda m: party.unmask(states["unmask"], m)),
    ]
    for answers, read in [
        (sent.keys, lambda a, r: coordinator.gather(attempt.terms, a, r)),
        (sent.shares, lambda a, r: coordinator.deliver(attempt.cohort, a, r)),
        (sent.vectors, lambda a, r: coordinator.add_up(attempt.cohort, attempt.dealers, a, r)),
        (sent.signatures, lambda a, r: coordinator.confirm(attempt.summed, a, r)),
        (sent.shares_given, lambda a, r: coordinator.unmasked(attempt.summed, a, r)),
    ]:
        (liar, message), others = answers[0], answers[1:]
        sides.append((message, lambda m, p=liar, o=others, read=read: read([(p, m), *o], reasons)))
    messages = [message for message, _ in sides]
    refusals = 0
    for _ in range(number):
        message, read = sides[int(random.integers(len(sides)))]
        changed, reasons = mutated(message, messages, random), {}
        try:
            read(changed)
        except SecureSumError:
            refusals += 1
        else:
            refusals += bool(reasons)
    return refusals


def test_mutated_messages_are_refused_and_crash_nothing():
    assert check_mutations(1000, 0) > 800


@pytest.mark.slow
def test_a_hundred_thousand_mutated_messages_crash_nothing():
    assert check_mutations(100_000, 1) > 80_000  # others change what nobody can check, as a vector


def test_what_is_no_bytes_is_no_message():
    attempt = Attempt(FIVE)
    for thing in (None, "text", bytearray(100), 7):
        found = {}
        with pytest.raises(SecureSumError, match="of 0 parties"):
            coordinator.gather(attempt.terms, [(10, thing)], found)
        assert found == {10: "advertise: is not a message of secure sums."}


def test_secrets_are_dropped_with_the_attempt_and_shown_nowhere():
    attempt = Attempt(FIVE)
    attempt.until("agree")
    one = some(attempt)
    seed = one._state.masked.dealt.own.seed
    for state in (one._state, one._state.masked, one._state.masked.dealt, one):
        assert repr(seed) not in repr(state)
        assert "seed" not in repr(state)
    one.unmask(attempt.signatures)
    assert one._state is None
    hashed = hashlib.sha256(seed).digest()
    assert attempt.cohort.seed_hash(one.party) == hashed


def test_a_party_continues_in_another_process_from_what_it_saved():
    attempt = Attempt(FIVE)

    def moved():
        for p, one in attempt.parties.items():
            other = Party(p, attempt.keys[p], "plan", FIVE, attempt.roster, memory=one.memory)
            if values := one.saved():
                other.restore(values)
            attempt.parties[p] = other

    for stage in STAGES:
        result = getattr(attempt, stage)()
        assert ("secrets" in some(attempt).saved()) == (stage != "unmask")
        moved()
    assert (result == attempt.expected(attempt.parties)).all()
    assert some(attempt).memory.members == tuple(attempt.parties)
    refused(lambda: some(attempt).advertise(0, 0, LENGTH, BITS, "model"), "was begun before")


@pytest.mark.parametrize("stage", STAGES[1:])
def test_what_was_saved_before_an_answer_does_not_give_another_one(stage):
    """Two vectors under one attempt's masks differ by what is in them, in the clear."""
    attempt = Attempt(FIVE)
    attempt.until(STAGES[STAGES.index(stage) - 1])
    one = some(attempt)
    before = one.saved()
    getattr(attempt, stage)()
    given = attempt.keys[one.party], "plan", FIVE, attempt.roster
    again = Party(one.party, *given, memory=one.memory)
    again.restore(before)
    assert again.saved() == {}
    refused(lambda: again.mask(attempt.boxes[one.party], np.ones(9, int), "model"), "another stage")
    # the twin that forgets what it answered gives another
    forgets = party.replace(one.memory, answered=len(before["read"]) + 1)
    forgetful = Party(one.party, *given, memory=forgets)
    forgetful.restore(before)
    assert forgetful.saved() == before
