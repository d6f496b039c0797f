"""An attempt at a secure sum, stage by stage, for tests that step in between."""

from types import SimpleNamespace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from privpart.secure import coordinator
from privpart.secure.messages import Terms
from privpart.secure.party import Party
from privpart.secure.rules import SecureSums

FIVE = SecureSums(smallest_cohort=4, largest_cohort=5, threshold=3, colluding=0)
TWENTY = SecureSums(smallest_cohort=12, largest_cohort=20, threshold=11, colluding=2)
RING = SecureSums(smallest_cohort=14, largest_cohort=20, threshold=10, colluding=3, neighbours=12)
LENGTH, BITS = 9, 28


def signers(number):
    return {party: Ed25519PrivateKey.generate() for party in range(10, 10 + number)}


def roster(keys):
    return {party: key.public_key().public_bytes_raw() for party, key in keys.items()}


class Attempt:
    """Parties, and a coordinator's honest way through the stages up to any of them."""

    def __init__(self, rules=FIVE, *, number=None, parties=None, keys=None, number_of=(0, 0)):
        self.keys = keys or signers(number or rules.largest_cohort)
        self.rules, self.roster = rules, roster(self.keys)
        self.parties = parties or {
            party: Party(party, key, "plan", rules, self.roster) for party, key in self.keys.items()
        }
        self.fixed = (*number_of, LENGTH, BITS, "model")
        self.terms = Terms("plan", *self.fixed, rules, self.roster)
        random = np.random.default_rng(number_of[0])  # a round has one vector
        self.vectors = {party: random.integers(0, 2**BITS, LENGTH) for party in self.parties}
        self.refused = {}
        self.sent = SimpleNamespace()

    def again(self, round_, attempt):
        """The same parties, in another attempt."""
        return Attempt(
            self.rules, parties=self.parties, keys=self.keys, number_of=(round_, attempt)
        )

    def advertise(self, lost=()):
        self.sent.keys = [
            (p, party.advertise(*self.fixed)) for p, party in self.parties.items() if p not in lost
        ]
        self.cohort, self.all_keys = coordinator.gather(self.terms, self.sent.keys, self.refused)
        return self.all_keys

    def share(self, lost=()):
        asked = [p for p in self.cohort.records if p not in lost]
        self.sent.shares = [(p, self.parties[p].share(self.all_keys)) for p in asked]
        self.dealers, self.boxes = coordinator.deliver(self.cohort, self.sent.shares, self.refused)
        return self.boxes

    def mask(self, lost=()):
        asked = [p for p in sorted(self.dealers) if p not in lost]
        self.sent.vectors = [
            (p, self.parties[p].mask(self.boxes[p], self.vectors[p], "model")) for p in asked
        ]
        self.summed, self.listed = coordinator.add_up(
            self.cohort, self.dealers, self.sent.vectors, self.refused
        )
        return self.listed

    def agree(self, lost=()):
        asked = [p for p in sorted(self.summed.members) if p not in lost]
        self.sent.signatures = [(p, self.parties[p].agree(self.listed)) for p in asked]
        self.signed, self.signatures = coordinator.confirm(
            self.summed, self.sent.signatures, self.refused
        )
        return self.signatures

    def unmask(self, lost=()):
        asked = [p for p in sorted(self.signed) if p not in lost]
        self.sent.shares_given = [(p, self.parties[p].unmask(self.signatures)) for p in asked]
        return coordinator.unmasked(self.summed, self.sent.shares_given, self.refused)

    def until(self, stage):
        """Run the stages up to one, included; nobody is lost."""
        for name in ("advertise", "share", "mask", "agree", "unmask"):
            result = getattr(self, name)()
            if name == stage:
                return result
        raise ValueError(stage)

    def expected(self, members):
        return sum(self.vectors[p] for p in members) % 2**BITS
