"""The bits of released models: no attack learns more from them than mu allows.

Two sums that differ in one client's update must look alike to the last bit. Float noise fails at
any epsilon: a wrong sum leaves what is no pair of float32 numbers of Box and Muller. A twin of the
server that draws such noise is caught in every trial, so the attacks can fail; see ``bit_attacks``.
"""

from functools import partial

import numpy as np
import pytest
from bit_attacks import (
    ATTACKS,
    EXACT,
    Setting,
    allowed,
    likelihood,
    most,
    noised_sums,
    play,
    right_answers,
    whitener,
)
from float_noise import FloatServer, IntegerServer
from scipy.stats import norm

from accounting import BinaryTree, BufferedToeplitz, Dense, Grouped, Independent, Toeplitz
from privpart import SecretSource, Server

ROUNDS, MIDDLE = 4, 2
BLT = BufferedToeplitz(
    ROUNDS, decay=(0.703864, 0.970182, 0.998105), scale=(0.295937, 0.131099, 0.057899)
)
MECHANISMS = {
    "independent": Independent(ROUNDS),
    "tree": BinaryTree(ROUNDS),
    "restarted tree": BinaryTree(ROUNDS, 3),
    "online tree": BinaryTree(ROUNDS, estimator="online"),
    "banded Toeplitz": Toeplitz.square_root(ROUNDS, bands=3),
    "BLT": BLT,
    "dense": Dense([[1, 0, 0, 0], [0.5, 1, 0, 0], [0.25, 0.5, 2, 0], [1, 0, 1, 1]]),
    "groups": Grouped([[0, 1]] * ROUNDS, [BLT, BLT], [2**15, 100]),
}

MU = {0.03: 0.010913662844, 1.8: 0.456324487329, 14: 2.61769389546}
"""By epsilon at delta = 1e-5."""

LEVEL = 5e-10
"""Probability that one attack on sound noise looks lucky; the default suite tries about 1000."""

UNGROUPED = [name for name in MECHANISMS if name != "groups"]
ALL = pytest.mark.parametrize("name", MECHANISMS)
EPSILONS = pytest.mark.parametrize("epsilon", [0.03, 14])


def server(setting):
    return Server(setting.plan, setting.start, source=SecretSource(), optimizer=setting.optimizer)


def first_and_plain(name, epsilon, games=256):
    """One client, first round, no start values: the attacker sees the sum to its last bits."""
    return Setting(MECHANISMS[name], MU[epsilon], games=games)


def middle_and_ordinary(name, epsilon, games=16):
    """Fifty clients, a middle round, momentum, a server rate, start values."""
    fields = {"clients": 50, "round": MIDDLE, "ordinary": True, "games": games}
    return Setting(MECHANISMS[name], MU[epsilon], **fields)


def lucky(won, setting, trials):
    """Return the attacks that were right, or wrong, more often than the guarantee allows."""
    limits = {name: most(trials, allowed(name, setting), LEVEL) for name in won}
    return {
        name: f"{right} of {trials}"
        for name, right in won.items()
        if not trials - limits[name] <= right <= limits[name]
    }


def lucky_attacks(make, setting, runs):
    return lucky(right_answers(make, setting, runs), setting, runs * setting.games)


def steps_of(make, setting):
    """The released sums in steps of the grid."""
    models = play(make, setting, [True])
    return np.stack([total / setting.step for total, _ in noised_sums(setting, models)])


@ALL
def test_released_sums_are_whole_steps_of_the_grid(name):
    """Else the attacks look at bits of another grid than the server's."""
    one = Setting(MECHANISMS[name], MU[1.8], round=MIDDLE)
    for epsilon, mu in MU.items():
        promised = Setting(MECHANISMS[name], mu).plan.guarantee()
        assert promised.epsilon(1e-5) == pytest.approx(epsilon)
    steps, twin = steps_of(server, one), steps_of(FloatServer, one)
    assert (steps == np.rint(steps)).all()
    assert 0.45 < (steps % 2 == 1).mean() < 0.55
    assert (twin != np.rint(twin)).any()


@ALL
@EPSILONS
def test_no_bit_tells_who_came_of_one_client(name, epsilon):
    assert not lucky_attacks(server, first_and_plain(name, epsilon), runs=2)


@ALL
@EPSILONS
def test_no_bit_tells_who_came_of_fifty(name, epsilon):
    assert not lucky_attacks(server, middle_and_ordinary(name, epsilon), runs=4)


@ALL
@pytest.mark.parametrize("setting", [first_and_plain, middle_and_ordinary])
def test_float_noise_is_caught_in_every_trial(name, setting):
    one = setting(name, 0.03, games=4)
    assert right_answers(FloatServer, one, 4, {"pairs": ATTACKS["pairs"]}) == {"pairs": 16}


FAULTS = {
    "low bit": {"fault": lambda w: 2 * np.rint(w / 2)},
    "low 4 bits": {"fault": lambda w: 16 * np.rint(w / 16) + 5},
    "low 10 bits": {"fault": lambda w: 1024 * np.rint(w / 1024) + 300},
    "residues of 3": {"fault": lambda w: 3 * np.rint(w / 3) + 1},
    "bits of pairs": {"fault": lambda w: w + (w + np.roll(w, len(w) // 2)) % 2 * second_half(w)},
    "on the grid": {"rounds_updates": False},
}


def second_half(w):
    return np.arange(len(w)) >= len(w) // 2


@pytest.mark.parametrize("attack", [*EXACT, "on the grid"])
def test_integers_with_a_fault_are_caught(attack):
    one = first_and_plain("independent", 0.03)
    assert attack in lucky_attacks(partial(IntegerServer, **FAULTS[attack]), one, 1)


def against_the_bound(make, name, runs=6):
    """The likelihood ratio of a whole run, against the client that has most to fear."""
    columns = np.linalg.norm(whitener(MECHANISMS[name]), axis=0)
    worst = int(np.argmax(columns))
    one = Setting(MECHANISMS[name], 1.0, round=worst, games=512, last=ROUNDS - 1, size=2**10)
    share = norm.cdf(0.999 * columns.max() / one.plan.noise_multiplier / 2)
    won = right_answers(make, one, runs, {"likelihood": likelihood})["likelihood"]
    return won, runs * one.games, share


@pytest.mark.parametrize("name", UNGROUPED)
def test_the_likelihood_ratio_attains_its_bound_and_does_not_pass_it(name):
    won, trials, share = against_the_bound(server, name)
    assert share <= norm.cdf(1 / 2)  # what is released costs no more than is claimed: 69 %
    assert trials - most(trials, 1 - share, LEVEL) <= won <= most(trials, share, LEVEL)


def test_less_noise_passes_the_bound():
    won, trials, share = against_the_bound(
        partial(IntegerServer, fault=lambda w: np.rint(2 / 3 * w)), "independent"
    )
    assert won > most(trials, share, LEVEL)


@pytest.mark.slow
@ALL
def test_no_bit_tells_who_came_in_any_setting(name):
    """The whole grid, 208 trials each; then all trials of an attack at once."""
    won, expected, total = dict.fromkeys(ATTACKS, 0), dict.fromkeys(ATTACKS, 0.0), 0
    runs, games = 13, 16
    for mu in MU.values():
        for clients, round_, ordinary in np.ndindex(2, 2, 2):
            fields = {"clients": 50 if clients else 1, "round": MIDDLE * round_, "games": games}
            one = Setting(MECHANISMS[name], mu, ordinary=bool(ordinary), **fields)
            own = right_answers(server, one, runs)
            assert not lucky(own, one, runs * games)
            total += runs * games
            for attack, right in own.items():
                won[attack] += right
                expected[attack] += runs * games * allowed(attack, one)
    assert all(won[a] <= most(total, expected[a] / total, LEVEL) for a in ATTACKS), won
