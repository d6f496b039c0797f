"""Secure sums: what the protocol costs a party and the server, beside the sum in the clear.

Run: ``python benchmarks/secure_sums.py``; writes benchmarks/results/secure_sums.json.

All parties are in one process; processor seconds of each side are counted apart. A party's seconds
are the mean over parties of its stages, and clipping and rounding beside them. Parties are lost
after they dealt shares, which costs the server most: it computes the masks of each with all others.
In the clear the server clips, rounds and adds every update, and a party sends float32.

A cohort of 1,000, or 10^7 parameters of 100 parties, would take minutes of the same work again and
again. There three parties do all of theirs, and the server all of its own; the others send messages
of the same size: real keys, signed lists and shares of real secrets, but boxes and vectors of
zeros. So the sum is not checked there.
"""

import frame

import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from privpart.clip import add_in_place
from privpart.grid import Grid, quantise
from privpart.secure import coordinator
from privpart.secure.messages import Kind, Terms, encode
from privpart.secure.party import Party
from privpart.secure.rules import SecureSums
from privpart.secure.shamir import deal
from privpart.secure.sums import modulus_bits, residues

RULES = {
    10: SecureSums(smallest_cohort=6, largest_cohort=10, threshold=5, colluding=0),
    100: SecureSums(smallest_cohort=56, largest_cohort=100, threshold=55, colluding=10),
    1000: SecureSums(
        smallest_cohort=700, largest_cohort=1000, threshold=141, colluding=10, neighbours=260
    ),
}
FAR, WHOLE = 10**11, 3
"""From parameters x parties^2 on, so many parties do all of their work."""


class Attempt:
    """One attempt, with the seconds and bytes of each side."""

    def __init__(self, dim: int, parties: int, update: torch.Tensor) -> None:
        self.keys = keys = {number: Ed25519PrivateKey.generate() for number in range(parties)}
        roster = {number: key.public_key().public_bytes_raw() for number, key in keys.items()}
        grid = Grid.of(20, 1.0, dim, filter_charge=0.0)
        self.bits, rules = modulus_bits(grid, parties), RULES[parties]
        self.own = {n: Party(n, key, "plan", rules, roster) for n, key in keys.items()}
        self.terms = Terms("plan", 0, 0, dim, self.bits, "model", rules, roster)
        self.seconds: dict[str, float] = defaultdict(float)
        self.each: dict[str, list[float]] = defaultdict(list)
        self.bytes: dict[str, int] = defaultdict(int)
        begun = time.process_time()
        self.vector = residues(update, 1.0, grid, self.bits)
        self.clip = time.process_time() - begun

    def answers(
        self, stage: str, asked: Collection[int], act: Callable[[int], bytes]
    ) -> Iterator[tuple[int, bytes]]:
        """Yield answers one by one; the server adds vectors as they arrive."""
        for party in sorted(asked):
            begun = time.process_time()
            answer = act(party)
            spent = time.process_time() - begun
            self.seconds["parties"] += spent
            if self.is_whole(party):
                self.each[stage].append(spent)
            self.bytes[f"{stage} up"] = max(self.bytes[f"{stage} up"], len(answer))
            yield party, answer

    def is_whole(self, party: int) -> bool:
        """Whether a party does all of its work."""
        return party < WHOLE or len(self.own) ** 2 * self.terms.length < FAR

    def zeros(self, kind: Kind, party: int, names: Iterable[int]) -> bytes:
        """Return a message of zeros."""
        records = dict.fromkeys(names, bytes(self.terms.size(kind)))
        return encode(kind, self.cohort.digest, party, records)

    def signed(self, party: int, survivors: Mapping[int, bytes]) -> bytes:
        """Return the signature of a list, without checking it."""
        signature = self.keys[party].sign(self.cohort.signed_list(survivors))
        return encode("signature", self.cohort.digest, party, {party: signature})

    def shares(self, survivors: Mapping[int, bytes]) -> dict[int, dict[int, bytes]]:
        """Return what each holder gives to unmask, by dealer, from the dealers' own secrets."""
        given: dict[int, dict[int, bytes]] = {party: {} for party in survivors}
        for dealer, mark in survivors.items():
            seed, private = self.secrets[dealer]
            holders = self.cohort.neighbours(dealer)
            numbers = [self.cohort.number(holder, dealer) for holder in holders]
            secret = seed if mark == b"\1" else private
            dealt = deal(secret, self.terms.rules.threshold, numbers)
            for holder, share in zip(holders, dealt, strict=True):
                given[holder][dealer] = share
        return given

    def run(self, lost: int) -> None:
        """Run all stages; the last ``lost`` parties are lost after they dealt shares."""
        own, refused = self.own, {}
        fixed = 0, 0, self.terms.length, self.bits, "model"
        whole, begun = self.is_whole, time.process_time()
        sent = self.answers("keys", own, lambda p: own[p].advertise(*fixed))
        self.cohort, keys = coordinator.gather(self.terms, sent, refused)
        states = {p: one._state for p, one in own.items()}
        self.secrets = {p: (s.seed, s.mask_private.private_bytes_raw()) for p, s in states.items()}
        near = self.cohort.neighbours
        sent = self.answers(
            "shares",
            own,
            lambda p: own[p].share(keys) if whole(p) else self.zeros("shares", p, near(p)),
        )
        dealers, boxes = coordinator.deliver(self.cohort, sent, refused)
        left, vector = sorted(own)[: len(own) - lost], self.vector
        sent = self.answers(
            "vector",
            left,
            lambda p: (
                own[p].mask(boxes[p], vector, "model") if whole(p) else self.zeros("vector", p, [p])
            ),
        )
        summed, listed = coordinator.add_up(self.cohort, dealers, sent, refused)
        marks = summed.survivors
        sent = self.answers(
            "signature", left, lambda p: own[p].agree(listed) if whole(p) else self.signed(p, marks)
        )
        signers, signatures = coordinator.confirm(summed, sent, refused)
        aside = time.process_time()
        given = {} if all(map(whole, own)) else self.shares(marks)
        aside = time.process_time() - aside
        digest = self.cohort.digest
        sent = self.answers(
            "unmask",
            signers,
            lambda p: (
                own[p].unmask(signatures) if whole(p) else encode("unmask", digest, p, given[p])
            ),
        )
        total = coordinator.unmasked(summed, sent, refused)
        spent = time.process_time() - begun
        self.seconds["server"] = spent - self.seconds["parties"] - aside
        wrong = not given and (total != self.vector * len(left) % 2**self.bits).any()
        if refused or wrong:
            raise SystemExit(f"the sum is wrong: {refused}")
        down = keys, boxes[0], listed, signatures
        self.bytes["down"] = sum(map(len, down))


def in_the_clear(dim: int, parties: int, update: torch.Tensor) -> float:
    """Return the processor seconds of clipping, rounding and adding all updates."""
    grid, whole = Grid.of(20, 1.0, dim, filter_charge=0.0), np.empty(dim, np.int32)
    total = torch.zeros(dim, dtype=torch.float64)
    begun = time.process_time()
    for _ in range(parties):
        quantise(update, 1.0, grid, whole)
        add_in_place(total, torch.from_numpy(whole))
    return time.process_time() - begun


def case(dim: int, parties: int, lost: float) -> dict[str, Any]:
    """Return the costs of one attempt."""
    update = torch.randn(dim, generator=torch.Generator().manual_seed(0))
    attempt = Attempt(dim, parties, update)
    gone = round(lost * parties)
    attempt.run(gone)
    clear = in_the_clear(dim, parties - gone, update)
    stages = {name: sum(times) / len(times) for name, times in attempt.each.items()}
    ups = {name: size for name, size in attempt.bytes.items() if name.endswith("up")}
    return {
        "party_seconds": sum(stages.values()) + attempt.clip,
        "party_stages": stages | {"clip and round": attempt.clip},
        "server_seconds": attempt.seconds["server"],
        "clear_server_seconds": clear,
        "bits": attempt.bits,
        "up_bytes": sum(ups.values()),
        "up": ups,
        "down_bytes": attempt.bytes["down"],
        "clear_up_bytes": 4 * dim,
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    given = frame.options(
        __doc__,
        "secure_sums.json",
        quick={"dims": [10_000], "parties": [10]},
        dims=[100_000, 1_000_000, 10_000_000],
        parties=[10, 100, 1000],
        lost=[0.0, 0.1, 0.3],
    )
    result = frame.Result(given.result, "cryptography", "numpy", "torch")
    cases = dict(result.old.get("cases", {}))
    for dim in given.dims:
        for parties in given.parties:
            if dim * parties**2 > FAR:
                continue
            for lost in given.lost:
                name = f"{dim:.0e} parameters, {parties} parties, {lost:.0%} lost"
                cases[name] = frame.apart(case, dim, parties, lost)
                frame.show(name, cases[name], "party_seconds", "server_seconds", "up_bytes")
                result.write(cases=cases)


if __name__ == "__main__":
    main()
