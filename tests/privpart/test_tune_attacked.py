"""A membership test on the winner of real selections, and on what a broken one would release.

One client of four may take part: its update is the clip norm in one direction, or zero. A training
is one round, so that its model, in units of the noise, is a normal number u with mean 0 or mu. The
score is the adversary's, by the model: {kappa < u <= tau} scores lowest, then the event u > tau,
then u <= kappa. The test on the winner is the event.

All models of a game are recorded, so that the same games give what is released where the number of
trainings and all of them leave, where the score reads who took part, and where the secret is drawn
again after a crash.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from accounting import Guarantee, NegativeBinomialRuns, SelectedGuarantee
from privpart.data import from_tensors
from privpart.run.ledger import Ledger
from privpart.run.store import read_state
from privpart.study.tune import prepared, select, tune_of
from privpart.training.training import Own, Training

MU, DELTA, USERS = 0.7, 1e-3, 4
TAU, KAPPA = 2.02, -1.2245
"""The best two thresholds at a false-positive rate of 5 % and ten trainings on average."""
TEN = NegativeBinomialRuns(10, eta=1)
CLAIM = SelectedGuarantee(Guarantee(MU), TEN)
PLAN = {
    "privacy": {
        "rounds": 1,
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "delta": DELTA,
        "mechanism": {"name": "tree"},
    },
    "data": {"clients_per_round": USERS, "population": "four"},
    "client": {"learning_rate": 10.0, "steps": 1},
    "server": {"learning_rate": float(USERS)},
}
TABLES = {
    "plan": PLAN,
    "target_epsilon": CLAIM.epsilon(DELTA),
    "runs": 10,
    "score": "metric",
    "seconds": 1.0,
    "candidates": {"a": {"client.learning_rate": 10.0}, "b": {"client.learning_rate": 20.0}},
}


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return x @ self.weight


def towards(module, batch):
    return -(batch[0] @ module.weight).mean()


@dataclass(frozen=True)
class Score:
    """The adversary's order of models whose noise has this standard deviation."""

    noise: float

    def __call__(self, module):
        u = module.weight[0].item() / self.noise
        return 1.0 if u > TAU else 2.0 if u <= KAPPA else 0.0


class Games:
    """Selections with and without the member: the winner's u, and those of all trainings."""

    def __init__(self, folder: Path, monkeypatch):
        monkeypatch.setenv("PRIVPART_STATE_DIR", str(folder / "state"))
        self.folder, self.models = folder, []
        evaluate = Training.evaluate

        def recorded(setup, parameters):
            self.models.append(parameters[0].item())
            return evaluate(setup, parameters)

        monkeypatch.setattr(Training, "evaluate", recorded)
        self.sides = [self._side(member) for member in (0.0, 1.0)]

    def _side(self, member):
        x = torch.zeros(USERS, 2)
        x[0, 0] = member
        clients = from_tensors((x, torch.zeros(USERS, dtype=torch.int64)), user=range(USERS))
        noise = 1 / MU
        own = Own(module=Point(), clients=clients, loss=towards, metric=Score(noise))
        chosen = tune_of(TABLES, own)
        assert math.isclose(chosen.mu, MU, rel_tol=1e-4)
        return chosen, prepared(chosen)[0]

    def play(self, member: int) -> tuple[float, np.ndarray]:
        """Return the winner's u, and that of every training."""
        chosen, setup = self.sides[member]
        noise = chosen.candidates[0].plan.privacy.noise_multiplier
        self.models.clear()
        run = select(chosen, self.folder / "out", setup)
        # A rehearsal measures the start.
        self.models = [value for value in self.models if value]
        ledger = Ledger(run)
        name, digest = ledger.newest()
        won = read_state(run / name, digest)[0]["parameters"][0].item()
        shutil.rmtree(self.folder / "out")
        assert won in self.models
        return won / noise, np.array(self.models) / noise


def rates(hits: np.ndarray, others: np.ndarray) -> tuple[float, float]:
    """Return a lower bound on the true-positive rate, an upper one on the false, each at 99 %."""

    def interval(events):
        return stats.binomtest(int(events.sum()), len(events)).proportion_ci(0.98, "exact")

    return interval(hits).low, interval(others).high


def violates(claim, hits: np.ndarray, others: np.ndarray) -> bool:
    """Whether a test shows more than the claim allows, in either direction."""
    for one, other in ((hits, others), (~others, ~hits)):
        low, high = rates(one, other)
        if low > claim.tpr_at_fpr(min(max(high, 1e-6), 1 - 1e-6)):
            return True
    return False


def likelier(models: np.ndarray, rate: float = 0.02) -> bool:
    """The best test on all models and their number, at this false-positive rate of ten of them."""
    bound = stats.norm.isf(rate) * math.sqrt(len(models)) * MU - len(models) * MU**2 / 2
    return float((models * MU - MU**2 / 2).sum()) > bound


def outcomes(played) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return, by what is released, whether a test says "member", without and with the member."""
    tests = {
        "winner": lambda side, _: np.array([won > TAU for won, _ in side]),
        "all and their number": lambda side, _: np.array([likelier(m) for _, m in side]),
        "score reads who took part": lambda side, member: np.array(
            [(m.max() if member else m.min()) > 1.5 for _, m in side]
        ),
        "drawn again after a crash": lambda side, _: _again(side),
    }
    return {name: (test(played[0], False), test(played[1], True)) for name, test in tests.items()}


@pytest.mark.slow
def test_a_membership_test_on_the_winner_stays_within_the_claim(tmp_path, monkeypatch):
    games = Games(tmp_path, monkeypatch)
    played = [[games.play(member) for _ in range(500)] for member in (0, 1)]
    found, one = outcomes(played), Guarantee(MU)
    assert not violates(CLAIM, *reversed(found["winner"]))
    # It is no claim of one training, which somebody who pays nothing for the choice would make.
    assert all(violates(one, *reversed(both)) for both in found.values())
    assert violates(CLAIM, *reversed(found["score reads who took part"]))


def _again(side) -> np.ndarray:
    """The test where a crash lets four selections be drawn, and the best of all be released."""
    models = [m for _, m in side]
    pools = [np.concatenate(models[i : i + 4]) for i in range(0, len(models) - 3, 4)]

    def best(pool):
        order = np.where(pool > TAU, 1, np.where(pool <= KAPPA, 2, 0))
        return pool[order == order.max()][0] > TAU

    return np.array([best(np.sort(pool)[::-1]) for pool in pools])


def test_games_are_of_the_real_code(tmp_path, monkeypatch):
    """The smallest game: the winner is the adversary's best, and u has its mean and deviation."""
    games = Games(tmp_path, monkeypatch)
    models = [[], []]
    for member in (0, 1, 0, 1):
        won, every = games.play(member)
        order = Score(1.0)
        scores = [order(_Weight(u)) for u in every]
        assert order(_Weight(won)) == max(scores)
        models[member].extend(every)
    assert len(models[0]) + len(models[1]) >= 4
    for values in models:
        assert all(abs(u) < 7 for u in values)


class _Weight:
    def __init__(self, u):
        self.weight = torch.tensor([u])
