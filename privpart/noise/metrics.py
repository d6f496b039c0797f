"""Private metrics: means over users, with noise of their own, released beside the models.

A user who evaluates sends one vector, a number in [0, 1] for each of the plan's m metrics. It is at
most sqrt(m) long, and becomes integers on a public grid, as an update does. The sum gets exactly
rounded Gaussian noise and is divided by the planned number of users, never by how many answered:
who does not answer counts as 0, and so does one whose vector is not finite.

The noise comes from the run's key, in a stream of draws that no model's noise uses, and under a
fresh salt each time that a run is opened: an evaluation that was drawn and never committed has
noise that nobody sees again.
"""

import hashlib
from collections.abc import Collection, Iterable

import numpy as np
import torch
from torch import Tensor

from accounting.checks import ConfigError
from privpart.grid import quantise
from privpart.messages import ClientId
from privpart.noise.source import NoiseSource
from privpart.noise.stream import noise_and_grid
from privpart.plan import PrivacyPlan

STREAM = 2**31
"""Id of the draws; those of a model's groups begin at 0, and there are never as many."""


def evaluation_users(ids: Iterable[ClientId], count: int) -> list[ClientId]:
    """Return the users who evaluate: those ``count`` whose ids have the lowest public hashes.

    Nothing of the data decides, nor any seed: whoever changes the seed of a plan keeps them.

    Raises:
        ConfigError: there are not more ids than that.
    """
    ranked = sorted(ids, key=_rank)
    if count >= len(ranked):
        raise ConfigError(
            f"privacy.metrics.users={count}: there are {len(ranked)} clients; at least one must "
            "remain to train."
        )
    return ranked[:count]


def _rank(client: ClientId) -> bytes:
    # as in ``ids_hash``: the number 1 and the string "1" are two clients
    return hashlib.sha256(f"privpart evaluation user|{client!r}".encode()).digest()


class MetricsRelease:
    """The evaluations of one run, one after the other; a new one for each time it is opened.

    Args:
        plan: plan of the run, with metrics.
        source: of the run's noise.
        users: who may evaluate, as many as the plan says.
        done: evaluations that the run has committed.

    Attributes:
        plan_hash: hash of the plan.
        source: of the noise.
        done: evaluations, with the one that was noised last.
    """

    def __init__(
        self, plan: PrivacyPlan, source: NoiseSource, users: Collection[ClientId], *, done: int = 0
    ) -> None:
        if plan.metrics is None:
            raise ConfigError("plan: has no metrics, so there is nothing to release.")
        if len(users) != plan.metrics.users:
            raise ConfigError(f"users: are {len(users)}; must be the plan's {plan.metrics.users}.")
        self._metrics = metrics = plan.metrics
        # each evaluation is a round of a run of its own, whose clip norm no user can pass
        self._plan = PrivacyPlan(
            mechanism=metrics.mechanism,
            participation=metrics.participation,
            clip_norm=metrics.length,
            noise_multiplier=metrics.noise_multiplier,
            report_goal=metrics.users,
        )
        self.plan_hash, self.source, self.done = plan.hash, source, done
        self._users = frozenset(users)
        self._noise, self._grid = noise_and_grid(
            self._plan, len(metrics.names), metrics.noise_multiplier, source, STREAM
        )
        # Independent noise keeps no state: its draws are addressed by the evaluation's number.
        self._noise.round = done
        self._last: tuple[int, tuple[float, ...], tuple[ClientId, ...]] = (-1, (), ())

    @property
    def round(self) -> int:
        """The round whose model was evaluated last; -1 before the first one."""
        return self._last[0]

    @property
    def values(self) -> tuple[float, ...]:
        """The noised means of the last evaluation, in the order of the plan's names."""
        return self._last[1]

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """Who evaluated then."""
        return self._last[2]

    def release(self, round_: int, vectors: Iterable[tuple[ClientId, Tensor]]) -> None:
        """Sum the users' vectors of one evaluation and add its noise.

        Args:
            round_: whose model was evaluated; the next of the plan's rounds.
            vectors: of each user, shape (m,), floating point; clipped to [0, 1].

        Guarantees:
            Leaving one user out changes the sum by integers of a norm of at most ``grid.norm``.

        Raises:
            ConfigError: it is another round's turn, or somebody evaluates who may not, or twice;
                no noise was drawn.
        """
        if self._metrics.rounds[self.done : self.done + 1] != (round_,):
            raise ConfigError(f"round {round_}: its metrics are not the next ones of the plan.")
        total = np.zeros(len(self._metrics.names), np.int64)
        came: dict[ClientId, None] = {}
        for client, vector in vectors:
            if client in came or client not in self._users:
                raise ConfigError(f"client {client!r}: evaluates twice, or is no evaluation user.")
            total += self._steps(vector)
            came[client] = None
        # From here on the noise is drawn; whatever fails, ``done`` lets no second sum have it.
        self.done += 1
        noised = total + self._noise.next().numpy()
        step = self._grid.step(self._plan.clip_norm)
        values = tuple(float(v) * step / self._plan.report_goal for v in noised)
        self._last = round_, values, tuple(came)

    def _steps(self, vector: Tensor) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        whole = np.zeros(len(self._metrics.names), np.int32)
        if vector.shape != whole.shape or not vector.is_floating_point():
            raise ConfigError(
                f"metrics: of one user are {tuple(vector.shape)} {vector.dtype}; must be "
                f"{len(whole)} floating-point numbers."
            )
        # Not by clamp alone, which makes 1 of infinity.
        if bool(torch.isfinite(vector).all()):
            quantise(vector.double().clamp(0, 1), self._plan.clip_norm, self._grid, whole)
        return whole
