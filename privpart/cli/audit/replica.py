"""Replica: the plan's own server, run with made-up clients, so that nothing real is touched.

The real ``Server`` runs the plan's mechanism, clip, divisor and optimiser through ``fit``. A few
clients send the same vectors in every round, which the auditor knows and subtracts; they are zero
in every other parameter, so that noise which needs an update is missed there. Beside them take
part canaries (``canary_scores``). All noise comes from seeds.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accounting import Mechanism
from accounting.checks import ConfigError
from attacks.lower_bounds.planted import PlantedCanaries, groups_of
from privpart.engines.canaries import CanaryClients, cohorts_with_canaries
from privpart.loop import fit
from privpart.messages import ClientId, ClientUpdate, RoundTask
from privpart.noise.source import SeededSource
from privpart.plan import PrivacyPlan
from privpart.server import RoundCounts, Server
from privpart.settings.server import ServerOptimizer

Array = NDArray[np.float64]
Step = Callable[[], None]
"""Called after each round of a replica."""
_OTHERS = 2
_SHORTER = 0.999
"""Length of the other clients' updates in clip norms: none is clipped."""


def audited_optimizer(plan: PrivacyPlan, optimizer: ServerOptimizer, who: str) -> ServerOptimizer:
    """Return the optimiser of an audited server, averaging in place of other kinds than SGD.

    What those make of the noised sums costs nothing and cannot be undone.
    Raises ConfigError for a plan without noise, or one with adaptive clipping.
    """
    if plan.noise_multiplier == 0:
        raise ConfigError("plan: adds no noise, so there is no epsilon to audit.")
    if plan.adaptive_clipping is not None:
        raise ConfigError(
            f"plan: has adaptive_clipping, under which a {who}'s update has no fixed length. "
            "Audit the plan without it."
        )
    return ServerOptimizer() if optimizer.kind != "sgd" or optimizer.weight_decay else optimizer


@dataclass(frozen=True, slots=True)
class Replica:
    """What is run again.

    Args:
        plan: the promise.
        dim: number of parameters that the server trains.
        optimizer: of the server, see ``audited_optimizer``.
        server: makes the server; another class than ``Server`` is a fault put in on purpose.
    """

    plan: PrivacyPlan
    dim: int
    optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)
    server: Callable[..., Server] = Server

    def __post_init__(self) -> None:
        optimizer = audited_optimizer(self.plan, self.optimizer, "canary")
        object.__setattr__(self, "optimizer", optimizer)
        object.__setattr__(self, "plan", replace(self.plan, minimum_cohort=1))

    @property
    def groups(self) -> list[tuple[Mechanism, Sequence[int], slice]]:
        """Mechanism, rounds and place of each group of parameters."""
        return groups_of(self.plan.mechanism, self.dim)

    def run(
        self, canaries: CanaryClients, seed: int, read: Callable[[Tensor], Tensor], step: Step
    ) -> Array:
        """Run all rounds; return what ``read`` makes of the start and every released model."""
        server = self.server(
            self.plan,
            torch.zeros(self.dim),
            source=SeededSource(_seed(seed, "noise")),
            optimizer=self.optimizer,
        )
        rows = [read(server.parameters)]

        def keep(server: Server, _: RoundCounts) -> None:
            rows.append(read(server.parameters))
            step()

        clients = _Others(self)
        ids: list[list[ClientId]] = [
            [f"other-{round_}-{i}" for i in range(_OTHERS)] for round_ in range(self.plan.rounds)
        ]
        cohorts = cohorts_with_canaries(ids, canaries)
        fit(server, clients, cohorts, canaries=canaries, commit=keep)
        return np.asarray(torch.stack(rows))

    def planted(self, count: int, **coins: Any) -> PlantedCanaries:  # noqa: ANN401  key or present
        """Return canaries of this plan, by the key of their coins, or by who is present."""
        public: Any = {"dim": self.dim, "seed": 0, "momentum": self.optimizer.momentum}
        mechanism, participation = self.plan.mechanism, self.plan.participation
        return PlantedCanaries(mechanism, participation, count=count, **public, **coins)


class _Others:
    """The clients that the auditor knows: the same vectors in every round."""

    def __init__(self, replica: Replica) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(_OTHERS, replica.dim, generator=generator, dtype=torch.float64)
        # Half of the parameters stay zero, so that noise that needs an update is missed there.
        drawn[:, ::2] = 0
        # A lone parameter is among them, and nothing is divided by its length of 0.
        lengths = drawn.norm(dim=1, keepdim=True).clamp(min=1e-300)
        drawn *= _SHORTER * replica.plan.clip_norm / lengths
        self._vectors, self._parts = drawn.float(), [part for _, _, part in replica.groups]
        self.sum = self._vectors.double().sum(0) / replica.plan.clip_norm
        """Sum of their updates of a round, (d,), in clip norms."""

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        active = range(len(self._parts)) if task.active is None else task.active
        for client, vector in zip(task.clients, self._vectors, strict=True):
            yield task.update(client, torch.cat([vector[self._parts[g]] for g in active]))


@dataclass(frozen=True, slots=True)
class Scored:
    """The canaries of one or several runs.

    Attributes:
        scores: N(0, 1) for who was absent, N(mu, 1) for who took part; (m,).
        present: who took part, (m,).
        mu: what the observer sees of the accountant's mu, on average over the canaries.
        others_known: whether all other clients' updates were subtracted, so that the score of an
            absent canary is noise alone.
    """

    scores: Array
    present: NDArray[np.bool_]
    mu: float
    others_known: bool = False


def canary_scores(
    replica: Replica, *, count: int, runs: int, seed: int, step: Step = lambda: None
) -> Scored:
    """Run a replica several times with ``count`` canaries, each with noise and coins of its own."""
    scores, present, visible = [], [], []
    sums = _Others(replica).sum
    for number in range(runs):
        run_seed = _seed(seed, f"run {number}")
        # Coins must not depend on the noise: a key of their own.
        key = hashlib.sha256(b"coins|%d" % run_seed).digest()
        planted = replica.planted(count, key=key)
        expected = np.broadcast_to(planted.project(sums).numpy(), (replica.plan.rounds, count))

        score, mu = planted.seen(
            replica.run(planted, run_seed, planted.project, step),
            noise_multiplier=replica.plan.update_noise_multiplier,
            clip_norm=replica.plan.clip_norm,
            report_goal=replica.plan.report_goal,
            learning_rate=replica.optimizer.learning_rate,
            known=expected,
        )
        scores.append(score)
        present.append(planted.present)
        visible.append(mu)
    everyone = np.concatenate(scores), np.concatenate(present)
    return Scored(*everyone, float(np.mean(visible)), others_known=True)


def _seed(seed: int, purpose: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{purpose}|{seed}".encode()).digest()[:7])
