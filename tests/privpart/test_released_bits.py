"""The bits of released models: no attack learns more from them than mu allows.

Two sums that differ in one client's update must look alike to the last bit. Float noise fails at
any epsilon: a wrong sum leaves what is no pair of float32 numbers of Box and Muller. A twin of the
server that draws such noise is caught in every trial, so the attacks can fail; see ``bit_attacks``.
"""

import numpy as np
import pytest
from bit_attacks import (
    ATTACKS,
    EXACT,
    Setting,
    allowed,
    distance_from_pairs,
    likelihood,
    most,
    noised_sums,
    play,
    right_answers,
    whitener,
)
from float_noise import FloatServer, IntegerServer, box_muller, keystream_words
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


def integers(**fault):
    return lambda setting: IntegerServer(setting, whitener(setting.mechanism), **fault)


def first_and_plain(name, epsilon, games=256):
    """One client, first round, no start values: the attacker sees the sum to its last bits."""
    return Setting(MECHANISMS[name], MU[epsilon], games=games)


def middle_and_ordinary(name, epsilon, games=16):
    """Fifty clients, a middle round, momentum, a server rate, start values."""
    return Setting(
        MECHANISMS[name], MU[epsilon], clients=50, round=MIDDLE, ordinary=True, games=games
    )


def lucky(won, setting, trials):
    """Return the attacks that were right, or wrong, more often than the guarantee allows."""
    limits = {name: most(trials, allowed(name, setting), LEVEL) for name in won}
    return {
        name: f"{right} of {trials}"
        for name, right in won.items()
        if not trials - limits[name] <= right <= limits[name]
    }


def lucky_attacks(make, setting, runs, attacks=ATTACKS):
    won = right_answers(make, setting, runs, attacks)
    return lucky(won, setting, runs * setting.games)


@ALL
@EPSILONS
def test_the_settings_are_what_they_say(name, epsilon):
    assert first_and_plain(name, epsilon).plan.guarantee().epsilon(1e-5) == pytest.approx(epsilon)


def whole_steps(make, setting):
    """Return the share of released sums that are whole steps, and the share that are odd ones."""
    models = play(make, setting, [True])
    steps = np.stack([total / setting.step for total, _ in noised_sums(setting, models)])
    return (steps == np.rint(steps)).mean(), (steps % 2 == 1).mean()


@ALL
def test_released_sums_are_whole_steps_of_the_grid(name):
    """Else the attacks look at bits of another grid than the server's."""
    one = Setting(MECHANISMS[name], MU[1.8], round=MIDDLE)
    whole, odd = whole_steps(server, one)
    assert whole == 1
    assert 0.45 < odd < 0.55
    assert whole_steps(FloatServer, one)[0] < 1


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


@pytest.mark.parametrize("attack", ["floats", "small sums"])
def test_float_noise_is_caught_by_single_values(attack):
    """Also without pairs; where the noise is not much larger than the update."""
    one = first_and_plain("independent", 1.8, games=4)
    assert lucky_attacks(FloatServer, one, 80, {attack: ATTACKS[attack]})


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


@pytest.mark.parametrize("attack", FAULTS)
def test_integers_with_a_fault_are_caught(attack):
    one = first_and_plain("independent", 0.03)
    assert attack in lucky_attacks(integers(**FAULTS[attack]), one, 1)


@pytest.mark.parametrize("name", ["independent", "BLT"])
@pytest.mark.parametrize("setting", [first_and_plain, middle_and_ordinary])
def test_sound_integers_are_not(name, setting):
    """The attacks accuse nobody else."""
    assert not lucky_attacks(integers(), setting(name, 0.03), runs=2)


def test_every_attack_is_known_to_work():
    """The likelihood ratio: in the next tests."""
    assert {*FAULTS, "pairs", "floats", "small sums", "likelihood"} == ATTACKS.keys()
    assert EXACT.keys() < FAULTS.keys()


def test_pairs_are_near_themselves_and_other_numbers_are_not():
    pair = box_muller(keystream_words(bytes(32), 0, 0, 0), 3.0).double().numpy().reshape(1, 2, -1)
    error = np.spacing(np.abs(pair).astype(np.float32)).astype(np.float64) / 2
    assert distance_from_pairs(pair, error) == 0
    assert distance_from_pairs(pair + 1e-3, error) > 1


def against_the_bound(make, name, runs=6):
    """The likelihood ratio of a whole run, against the client that has most to fear."""
    columns = np.linalg.norm(whitener(MECHANISMS[name]), axis=0)
    one = Setting(
        MECHANISMS[name],
        1.0,
        round=int(np.argmax(columns)),
        games=512,
        last=ROUNDS - 1,
        size=2**10,
    )
    share = norm.cdf(0.999 * columns.max() / one.plan.noise_multiplier / 2)
    won = right_answers(make, one, runs, {"likelihood": likelihood})["likelihood"]
    return won, runs * one.games, share


def assert_attained(runs, name):
    won, trials, share = against_the_bound(server, name, runs)
    assert share <= norm.cdf(1 / 2)  # what is released costs no more than is claimed: 69 %
    assert trials - most(trials, 1 - share, LEVEL) <= won <= most(trials, share, LEVEL)


@pytest.mark.parametrize("name", UNGROUPED)
def test_the_likelihood_ratio_attains_its_bound_and_does_not_pass_it(name):
    assert_attained(6, name)


def test_less_noise_passes_the_bound():
    """The power of the test above: noise smaller by a third."""
    won, trials, share = against_the_bound(
        integers(fault=lambda w: np.rint(2 / 3 * w)), "independent"
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
            one = Setting(
                MECHANISMS[name],
                mu,
                clients=50 if clients else 1,
                round=MIDDLE * round_,
                ordinary=bool(ordinary),
                games=games,
            )
            own = right_answers(server, one, runs)
            assert not lucky(own, one, runs * games)
            total += runs * games
            for attack, right in own.items():
                won[attack] += right
                expected[attack] += runs * games * allowed(attack, one)
    assert all(won[a] <= most(total, expected[a] / total, LEVEL) for a in ATTACKS), won


@pytest.mark.slow
@ALL
@pytest.mark.parametrize("setting", [first_and_plain, middle_and_ordinary])
def test_no_bit_tells_whether_a_whole_update_came(name, setting):
    """One target for all coordinates, 200 runs; the twin is caught in all."""
    one = setting(name, 0.03, games=1)
    assert not lucky_attacks(server, one, 200)
    pairs = {"pairs": ATTACKS["pairs"]}
    assert right_answers(FloatServer, one, 200, pairs) == {"pairs": 200}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNGROUPED)
def test_the_likelihood_ratio_attains_its_bound_to_a_percent(name):
    assert_attained(128, name)
