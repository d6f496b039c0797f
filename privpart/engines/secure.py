"""SecureEngine: runs the protocol of secure sums over simulated parties, in one process.

It shows that a plan trains to the same bits and what the protocol costs. It hides nothing from
whoever runs the process, which holds every party: the report says so.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.engines.protocol import Engine
from privpart.grid import Grid
from privpart.messages import ClientId, ClientUpdate, RoundTask
from privpart.plan import PrivacyPlan
from privpart.secure import coordinator
from privpart.secure.messages import SecureSumError, Terms
from privpart.secure.party import Party
from privpart.secure.sums import ModularSum, modulus_bits, residues

STAGES = ("keys", "shares", "vector", "signature", "unmask")
"""The answers of a party in an attempt."""
Lost = Callable[[int, int, str, Sequence[int]], Collection[int]]
"""(round, attempt, stage, parties) -> those that are lost before they answer."""


class SecureEngine:
    """Trains clients by another engine, and sums their updates by the protocol; see ``Engine``.

    Args:
        engine: trains the clients of one party at a time.
        plan: has ``secure``.
        parties: ids of the clients of each party, by the party's number.
        lost: loses parties on purpose, for tests and measurements; nobody by default.
        attempts: how often a round is tried, with fresh keys and the parties that are not lost.
        report: gets a sentence about each attempt that failed.

    Attributes:
        refused: why an answer of a party was refused in the last attempt, by party.

    Raises:
        ConfigError: the plan has no ``secure``, or a client is with two parties.
    """

    def __init__(
        self,
        engine: Engine,
        plan: PrivacyPlan,
        *,
        parties: Mapping[int, Collection[ClientId]],
        lost: Lost = lambda *_: (),
        attempts: int = 1,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        if plan.secure is None:
            raise ConfigError("plan: has no secure; pass secure=SecureSums(...) to PrivacyPlan.")
        self._engine, self._plan, self._rules, self._lost = engine, plan.hash, plan.secure, lost
        self._attempts, self._report = checks.count("attempts", attempts), report
        self._home = {client: number for number, names in parties.items() for client in names}
        if len(self._home) < sum(map(len, parties.values())):
            raise ConfigError("parties: a client is with two of them; it must be with one.")
        signers = {number: Ed25519PrivateKey.generate() for number in parties}
        self._roster = {n: key.public_key().public_bytes_raw() for n, key in signers.items()}
        fixed = self._plan, self._rules, self._roster
        self._parties = {number: Party(number, key, *fixed) for number, key in signers.items()}
        self._attempt = 0
        self._before: frozenset[int] | None = None
        self._listed: frozenset[int] | None = None
        self.refused: coordinator.Refused = {}

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Refuse: no update leaves a party in the clear."""
        raise ConfigError("SecureEngine: hands over secure sums only, of a plan with secure.")

    def secure_sums(self, task: RoundTask, start: Tensor) -> Iterator[ModularSum]:
        """Yield the sum of a round; nothing if every attempt failed."""
        if task.plan != self._plan or task.grid is None:
            raise ConfigError("SecureEngine: was made for another plan than this server's.")
        asked: dict[int, list[ClientId]] = {}
        for client in task.clients:
            if client not in self._home:
                raise ConfigError(f"parties: client {client!r} is with none of them.")
            asked.setdefault(self._home[client], []).append(client)
        bits = modulus_bits(task.grid, len(task.clients))
        summed = {
            number: self._summed(replace(task, clients=tuple(clients)), task.grid, start, bits)
            for number, clients in asked.items()
        }
        vectors = {number: vector for number, (_, vector) in summed.items()}
        self._listed = None
        model = hashlib.sha256(start.detach().numpy().tobytes()).hexdigest()
        for _ in range(self._attempts):
            try:
                total, among = self._attempted(task.round, vectors, bits, model)
            except SecureSumError as error:
                self._report(f"round {task.round}, attempt {self._attempt}: {error}")
                continue
            self._before = among
            clients = tuple(client for n in sorted(among) for client in summed[n][0])
            fixed = task.clip_norm, task.round, task.plan
            yield ModularSum(clients, torch.from_numpy(total), bits, *fixed, parties=len(among))
            return

    def _summed(
        self, task: RoundTask, grid: Grid, start: Tensor, bits: int
    ) -> tuple[list[ClientId], NDArray[np.int64]]:
        """Train a party's clients; return who answered, and the sum of their integers."""
        clients, parts = [], []
        for answer in self._engine.run(task, start):
            clients.append(answer.client)
            parts.append(residues(answer.update, task.clip_norm, grid, bits))
        if not parts:
            raise ConfigError("engine: gave no update of a party's clients.")
        total: NDArray[np.int64] = np.sum(parts, axis=0) & (2**bits - 1)
        return clients, total

    def _attempted(
        self, round_: int, vectors: Mapping[int, NDArray[np.int64]], bits: int, start: str
    ) -> tuple[NDArray[np.int64], frozenset[int]]:
        """Run the five stages once.

        Raises:
            SecureSumError: too few parties were left at one of them.
        """
        attempt, length = self._attempt, len(next(iter(vectors.values())))
        self._attempt += 1
        self.refused = refused = {}

        def answers(
            stage: str, asked: Collection[int], act: Callable[[int], bytes]
        ) -> Iterator[tuple[int, bytes]]:
            lost = set(self._lost(round_, attempt, stage, sorted(asked)))
            for party in sorted(set(asked) - lost):
                try:
                    yield party, act(party)
                except SecureSumError as error:
                    refused[party] = str(error)

        parties, fixed = self._parties, (round_, attempt, length, bits, start)
        terms = Terms(self._plan, *fixed, self._rules, self._roster)
        sent = answers("keys", vectors, lambda p: parties[p].advertise(*fixed))
        cohort, keys = coordinator.gather(terms, sent, refused, listed=self._listed)
        sent = answers("shares", cohort.records, lambda p: parties[p].share(keys))
        dealers, boxes = coordinator.deliver(cohort, sent, refused)
        sent = answers("vector", dealers, lambda p: parties[p].mask(boxes[p], vectors[p], start))
        summed, listed = coordinator.add_up(cohort, dealers, sent, refused, before=self._before)
        self._listed = came = summed.members
        sent = answers("signature", came, lambda p: parties[p].agree(listed))
        signers, signatures = coordinator.confirm(summed, sent, refused)
        sent = answers("unmask", signers, lambda p: parties[p].unmask(signatures))
        return coordinator.unmasked(summed, sent, refused), came
