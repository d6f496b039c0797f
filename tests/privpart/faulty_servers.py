"""Faulty servers: silent failures of published code, put into the real server on purpose.

Each loses the guarantee without an error; an audit must find it.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from accounting import BinaryTree
from privpart import ClientUpdate, Server
from privpart.clip import clip
from privpart.noise.stream import noise_and_grid
from privpart.server import RoundSum

LAYERS = 8


class HalfTheNoise(Server):
    factor = 0.5

    def _draw(self) -> Tensor | None:
        noise = super()._draw()
        return noise.copy_((noise.double() * self.factor).round())


class SlightlyLessNoise(HalfTheNoise):
    factor = 0.98


class DoubledClip(Server):
    """Updates may be twice as long as the plan says."""

    times = 2.0

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self._grid = replace(self._grid, norm=self.times * self._grid.norm)


class NoClip(DoubledClip):
    """The client's own clip is trusted."""

    times = 100.0


class ClipPerLayer(DoubledClip):
    """Each layer is clipped on its own, so all of an update may be longer."""

    times = math.sqrt(LAYERS)

    def run_round(self, updates: Iterable[ClientUpdate], **options):
        return super().run_round(map(self._clipped, updates), **options)

    def _clipped(self, update: ClientUpdate) -> ClientUpdate:
        layers = torch.tensor_split(update.update, LAYERS)
        return replace(update, update=torch.cat([clip(own, self.clip_norm) for own in layers]))


class NoiseReused(Server):
    """Every second round adds the noise of the round before it."""

    def _draw(self) -> Tensor | None:
        before = None if self._drawn is None else self._drawn.clone()
        noise = super()._draw()
        return noise if self.round % 2 == 0 else noise.copy_(before)


def again(server: Server, plan) -> None:
    """Give a server the noise of a plan from the beginning, which a secret source refuses."""
    getattr(server.source, "_claimed", set()).clear()
    z, dim, salts = plan.update_noise_multiplier, server.parameters.numel(), server._noise._salts
    server._noise, _ = noise_and_grid(plan, dim, z, server.source, 0)
    server._noise._salts = [(0, salts[0][1])]


class KeyReusedAfterResume(Server):
    """Half-way, the noise begins anew under the same key, as of a run resumed without its state."""

    def _draw(self) -> Tensor | None:
        if self.round == self.plan.rounds // 2:
            again(self, self.plan)
        return super()._draw()


class MissingRestart(Server):
    """The accountant counts on restarts that the noise does not make."""

    def __init__(self, plan, start, *, source, optimizer) -> None:
        super().__init__(plan, start, source=source, optimizer=optimizer)
        again(self, replace(plan, mechanism=BinaryTree(plan.rounds)))


class RealisedDivisor(Server):
    """The sum is divided by the number of clients that came."""

    def _step(self, round_sum: RoundSum, noise: Tensor | None) -> None:
        plan = self.plan
        self.plan = replace(plan, report_goal=len(self.cohort))
        super()._step(round_sum, noise)
        self.plan = plan


class NoiseOnSelectedRows(Server):
    """Only parameters that somebody sent an update of get noise."""

    def _step(self, round_sum: RoundSum, noise: Tensor | None) -> None:
        super()._step(round_sum, torch.where(round_sum.total != 0, noise, torch.zeros_like(noise)))


FAULTY: dict[str, Callable[..., Server]] = {
    "doubled clip": DoubledClip,
    "client's clip trusted": NoClip,
    "clip per layer": ClipPerLayer,
    "sigma / 2": HalfTheNoise,
    "sigma x 0.98": SlightlyLessNoise,
    "noise reused": NoiseReused,
    "key reused after resume": KeyReusedAfterResume,
    "missing restart": MissingRestart,
    "realised-cohort divisor": RealisedDivisor,
    "noise on selected rows only": NoiseOnSelectedRows,
}
