"""Scores of membership: an independent LiRA and RMIA, chance, and what a leaking model proves."""

import math

import numpy as np
import pytest
from scipy import stats

import attacks
from accounting import ConfigError, Guarantee
from attacks.membership_inference import lira, logit_of_confidence, rmia, scores_of_models


def paired_coins(shadows, units, draws):
    half = draws.random((shadows // 2, units)) < 0.5
    return np.concatenate([half, ~half])


def signals(coins, strength, draws):
    """Signals of models: units differ, and taking part adds ``strength`` deviations."""
    of_units = 5 * draws.standard_normal(coins.shape[1])
    return of_units + strength * coins + draws.standard_normal(coins.shape)


def test_lira_is_the_log_ratio_of_two_densities_with_common_deviations():
    draws = np.random.default_rng(0)
    coins = paired_coins(6, 4, draws)
    values = signals(coins, 2.0, draws)
    target = values[0] + 0.3
    scores = lira(target, values, coins)
    residuals = {True: [], False: []}
    for unit in range(4):
        for side in (True, False):
            own = [values[s, unit] for s in range(6) if coins[s, unit] == side]
            residuals[side] += [value - sum(own) / len(own) for value in own]
    deviation = {
        s: math.sqrt(sum(r * r for r in rs) / (len(rs) - 4)) for s, rs in residuals.items()
    }
    for unit in range(4):
        log = {}
        for side in (True, False):
            own = [values[s, unit] for s in range(6) if coins[s, unit] == side]
            log[side] = stats.norm(sum(own) / len(own), deviation[side]).logpdf(target[unit])
        assert scores[unit] == pytest.approx(log[True] - log[False])


def test_rmia_counts_the_public_units_that_a_unit_stands_out_from():
    draws = np.random.default_rng(1)
    losses, shadows = draws.random(5), draws.random((3, 5))
    public, of_public = draws.random(7), draws.random((3, 7))

    def ratio(loss, others):
        return math.exp(-loss) / np.mean(np.exp(-others))

    expected = [
        np.mean(
            [ratio(public[z], of_public[:, z]) <= ratio(losses[x], shadows[:, x]) for z in range(7)]
        )
        for x in range(5)
    ]
    assert rmia(losses, shadows, public, of_public) == pytest.approx(expected)


def test_nothing_is_found_by_chance_and_what_leaks_is_bounded():
    """Bounds keep their level, without a signal and at the strongest of an epsilon, and bite."""
    draws = np.random.default_rng(2)
    above = np.zeros(4, int)
    for _ in range(200):
        present = draws.random(200) < 0.5
        noise = draws.standard_normal(200)
        scores = {"chance": noise, "Gaussian mechanism": noise + present}
        rows = attacks.membership(scores, present, delta=1e-5)
        claims = (0.0, Guarantee(1.0).epsilon(1e-5))
        above += [
            b.epsilon > claim for row, claim in zip(rows, claims, strict=True) for b in row.bounds
        ]
    assert above.max() <= stats.binom.isf(1e-6, 200, 0.05)
    coins = paired_coins(8, 1000, draws)
    shadows = signals(coins, 3.0, draws)
    present = draws.random(1000) < 0.5
    mean = (shadows - 3 * coins).mean(0)
    target = mean + 3 * present + draws.standard_normal(1000)
    rows = {
        row.attack: row
        for row in attacks.membership(
            {"LiRA": lira(target, shadows, coins), "loss": target}, present, delta=1e-5
        )
    }
    # A unit's own level hides it from a threshold that is common to all; LiRA subtracts it.
    assert rows["LiRA"].auc > 0.95 > rows["loss"].auc > 0.55
    assert (
        1.5 < rows["LiRA"].bounds[0].epsilon < attacks.lower_bounds.bounds.epsilon_below(3.0, 1e-5)
    )
    few, many = rows["LiRA"].found
    assert few.rate is None  # about 500 others cannot tell a thousandth from nothing
    assert many.low < many.rate < many.high


def test_signals_are_logits_and_finite_at_both_ends():
    p = np.array([0.1, 0.5, 0.9])
    assert logit_of_confidence(-np.log(p)) == pytest.approx(np.log(p / (1 - p)))
    assert np.isfinite(logit_of_confidence([0.0, 1e-300, 1e3])).all()


def test_all_attacks_are_scored_at_once_and_a_loss_below_0_is_its_own_signal():
    draws = np.random.default_rng(3)
    coins, losses, norms = paired_coins(4, 6, draws), draws.random((6, 6)), draws.random((6, 6))
    public = draws.random((6, 9))
    scores = scores_of_models(losses, norms, coins, public)
    assert scores["loss"].tolist() == [*-losses[4], *-losses[5]]
    assert scores["gradient"].tolist() == [*-norms[4], *-norms[5]]
    logits = logit_of_confidence(losses)
    assert scores["LiRA"][6:].tolist() == lira(logits[5], logits[:4], coins).tolist()
    assert (
        scores["RMIA"][:6].tolist() == rmia(losses[4], losses[:4], public[4], public[:4]).tolist()
    )
    below = scores_of_models(losses - 2, norms, coins)
    assert below.keys() == {"loss", "gradient", "LiRA"}
    assert below["LiRA"][:6] == pytest.approx(lira(-losses[4], -losses[:4], coins))


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda: attacks.membership({"a": [1.0, 2.0]}, [True, True], delta=0.1), "alike"),
        (lambda: attacks.membership({"a": [1.0, 2.0]}, [1, 0], delta=0.1), "truth values"),
        (lambda: attacks.membership({"a": [1.0]}, [True, False], delta=0.1), "shape"),
        (lambda: attacks.membership({"a": [1.0, math.nan]}, [True, False], delta=0.1), "finite"),
        (lambda: lira([1.0], [[1.0], [2.0]], [[True], [True]]), "in all shadow models"),
        (lambda: logit_of_confidence([0.5, -0.1]), "at least 0"),
        (lambda: logit_of_confidence([math.nan]), "finite"),
        (lambda: scores_of_models([[1.0]], [[1.0]], [[True]]), "1 shadow models; there are 1"),
        (lambda: lira([1.0, 2.0], [[1.0], [2.0]], [[True], [False]]), "shape"),
    ],
)
def test_wrong_input_is_named(call, fault):
    with pytest.raises(ConfigError, match=fault):
        call()
