"""Twins of the server, for the attacks on released bits: each has a fault that must be found.

``FloatServer`` draws as the server did before its noise was integers: AES-256 in counter mode and
the transform of Box and Muller in float32, where coordinates i and i + 2^14 of a block of 2^15 are
the cosine and the sine of one pair. It shares the program with the server, and no arithmetic.
``IntegerServer`` adds integer noise with a fault of choice, or with none.
"""

import math
import secrets

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from accounting.mechanisms.program import OUT

BLOCK = 2**15
PAIRS = BLOCK // 2


def keystream_words(key, stream, index, block):
    """The 64-bit words of one block of coordinates of a draw: radii, then angles."""
    counter = (stream << 96 | index << 48) + block * PAIRS
    cipher = Cipher(algorithms.AES256(key), modes.CTR(counter.to_bytes(16, "big")))
    words = bytearray(cipher.encryptor().update(bytes(16 * PAIRS)))
    return torch.frombuffer(words, dtype=torch.int64).view(2, PAIRS)


def box_muller(words, stddev):
    radius, angle = words.to(torch.float32)
    radius.abs_().mul_(2.0**-63).add_(2.0**-64).log_().mul_(-2.0 * stddev**2).sqrt_()
    angle.mul_(math.pi * 2.0**-63)
    return torch.cat([torch.cos(angle) * radius, torch.sin(angle) * radius])


class FloatNoise:
    """A program's noise in float32, one block of coordinates after the other."""

    def __init__(self, program, dim, stddev, key, stream=0):
        self.program, self.dim, self.stddev = program, dim, stddev
        self.key, self.stream = key, stream
        self.round = 0
        self.state = torch.zeros(program.state_rows(), dim)

    def next(self):
        noise = torch.empty(self.dim)
        for block in range(-(-self.dim // BLOCK)):
            piece = slice(block * BLOCK, min((block + 1) * BLOCK, self.dim))
            self._execute(block, self.state[:, piece], noise[piece])
        self.round += 1
        return noise

    def _execute(self, block, state, out):
        registers = {OUT: out, **dict(enumerate(state))}
        for target, terms, draws in self.program.round(self.round):
            fresh = [self._draw(index, block, len(out)) * c for index, c in draws]
            past = [registers[r] * c for r, c in terms]
            registers.setdefault(target, torch.empty_like(out)).copy_(sum(fresh + past))

    def _draw(self, index, block, count):
        words = keystream_words(self.key, self.stream, index, block)
        return box_muller(words, self.stddev)[:count]


def sgd(parts, settings):
    return torch.optim.SGD(parts, lr=settings.learning_rate, momentum=settings.momentum)


class FloatServer:
    """The server's round on float32 noise, for updates that need no clip.

    A plan with groups has all groups active in every round.
    """

    def __init__(self, setting, *, key=None):
        plan = self.plan = setting.plan
        self.parameters = setting.start.clone()
        groups = plan.mechanism.groups
        sizes = [setting.dim] if groups is None else list(groups.sizes)
        mechanisms = [plan.mechanism] if groups is None else groups.mechanisms
        self.parts = torch.split(self.parameters, sizes)
        key, first = key or secrets.token_bytes(32), 0 if groups is None else 2
        self.noises = [
            FloatNoise(own.noise_program(), size, plan.noise_multiplier, key, first + g)
            for g, (own, size) in enumerate(zip(mechanisms, sizes, strict=True))
        ]
        self.optimizer = sgd(self.parts, setting.optimizer)

    def run_round(self, updates):
        total = torch.zeros(len(self.parameters), dtype=torch.float64)
        for update in updates:
            total += update.update
        total += torch.cat([noise.next() for noise in self.noises]) * self.plan.clip_norm
        mean = total / self.plan.report_goal
        for part, own in zip(self.parts, mean.split([len(p) for p in self.parts]), strict=True):
            part.grad = -own.float()
        self.optimizer.step()


class IntegerServer:
    """A round on integers: w_t = round((s z_t - sum_{j<t} C_tj w_j) / C_tt), in steps of the grid.

    Args:
        encoder: C, lower triangular.
        fault: what to do to w_t, which then is no longer sound.
        rounds_updates: whether updates are rounded to the grid, as they must be.
    """

    def __init__(self, setting, encoder, *, fault=None, rounds_updates=True):
        self.plan, self.encoder, self.step = setting.plan, encoder, setting.step
        self.parameters = setting.start.clone()
        self.fault = fault or (lambda w: w)
        self.rounded = torch.round if rounds_updates else (lambda steps: steps)
        self.random = np.random.default_rng()  # from the system's entropy
        self.past = []
        self.optimizer = sgd([self.parameters], setting.optimizer)

    def run_round(self, updates):
        total = sum(self.rounded(update.update.double() / self.step) for update in updates)
        z = self.random.standard_normal(len(total)) * (self.plan.noise_multiplier / self.step)
        *row, own = self.encoder[len(self.past), : len(self.past) + 1]
        past = sum(c * w for c, w in zip(row, self.past, strict=True))
        self.past.append(self.fault(np.rint((z - past) / own)))
        total += torch.from_numpy(self.past[-1])
        self.parameters.grad = -(total * self.step / self.plan.report_goal).float()
        self.optimizer.step()
