"""Twins of the server, for the attacks on released bits: each has a fault that must be found.

They need no clip: w_t = (s z_t - sum_{j<t} C_tj w_j) / C_tt, in integers or in floats.
"""

import math
import secrets

import numpy as np
import torch
from bit_attacks import whitener

BLOCK = 2**15


def box_muller(stddev):
    """A block in float32: coordinates i and i + 2^14 are the cosine and the sine of one pair."""
    words = torch.frombuffer(bytearray(secrets.token_bytes(8 * BLOCK)), dtype=torch.int64)
    radius, angle = words.view(2, -1).to(torch.float32)
    radius.abs_().mul_(2.0**-63).add_(2.0**-64).log_().mul_(-2.0 * stddev**2).sqrt_()
    angle.mul_(math.pi * 2.0**-63)
    return torch.cat([torch.cos(angle) * radius, torch.sin(angle) * radius]).numpy()


class IntegerServer:
    """Whole steps of the grid; ``fault`` is what to do to them, which then are no longer sound."""

    def __init__(self, setting, *, fault=lambda w: w, rounds_updates=True):
        self.plan, self.encoder = setting.plan, whitener(setting.mechanism)
        self.step, self.stddev = setting.step, setting.stddev
        self.parameters = setting.start.clone()
        self.fault = fault
        self.rounded = torch.round if rounds_updates else (lambda steps: steps)
        self.past = []
        settings = setting.optimizer
        self.optimizer = torch.optim.SGD(
            [self.parameters], lr=settings.learning_rate, momentum=settings.momentum
        )

    def noise(self, past, own, count):
        z = np.random.default_rng().standard_normal(count) * self.stddev  # the system's entropy
        return self.step * self.fault(np.rint((z - past) / own / self.step))

    def run_round(self, updates):
        steps = sum(self.rounded(update.update.double() / self.step) for update in updates)
        *row, own = self.encoder[len(self.past), : len(self.past) + 1]
        past = sum(c * w for c, w in zip(row, self.past, strict=True))
        self.past.append(self.noise(past, own, len(steps)))
        total = steps * self.step + torch.from_numpy(self.past[-1]).double()
        self.parameters.grad = -(total / self.plan.report_goal).float()
        self.optimizer.step()


class FloatServer(IntegerServer):
    """Float32 of Box and Muller, as the server's noise was before it was integers."""

    def __init__(self, setting):
        super().__init__(setting, rounds_updates=False)

    def noise(self, past, own, count):
        z = np.concatenate([box_muller(self.stddev) for _ in range(-(-count // BLOCK))])[:count]
        return (z - np.float32(past)) / np.float32(own)
