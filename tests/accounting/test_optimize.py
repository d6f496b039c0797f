"""Fits: published optima, gradients, and no fit better than what it claims."""

import tracemalloc

import numpy as np
import pytest
import scipy.optimize

from accounting import (
    BandedInverse,
    ConfigError,
    Dense,
    Participation,
    Toeplitz,
    Workload,
    error,
    optimize,
)
from accounting.mechanisms.banded_inverse import _inverse_loss
from accounting.mechanisms.buffered_toeplitz import _with_gradient, blt_loss
from accounting.mechanisms.toeplitz import coefficient_loss

ONCE = Participation(1600)
FIVE = Participation(1600, 5, 320)
OPTIMUM = 3.0950  # rmse, n = 1600, over all matrices: reference/mechanisms.md section 4


@pytest.mark.parametrize(
    ("participation", "objective", "buffers", "published"),
    [
        # reference/mechanisms.md section 4, n = 1600: rmse of the rmse fits, max of the max fits
        (ONCE, "rmse", 2, 3.239),
        (ONCE, "max", 2, 3.493),
        (FIVE, "rmse", 2, 8.00),
        (FIVE, "max", 2, 9.34),
        (Participation(200, 5, 40), "rmse", 2, 6.513),
    ],
)
def test_blt_reaches_the_published_error(participation, objective, buffers, published):
    fit = optimize("blt", participation, objective=objective, buffers=buffers)
    found = error(fit, participation)
    reached = found.rmse if objective == "rmse" else found.max_error
    assert reached == pytest.approx(published, rel=5e-4)
    assert fit.sensitivity(participation).exact
    assert fit.buffers == buffers


@pytest.mark.parametrize(
    ("participation", "objective", "bands", "published", "normalized"),
    [
        # reference/mechanisms.md section 4
        pytest.param(ONCE, "rmse", None, 3.198, 3.143, marks=pytest.mark.slow),
        (ONCE, "rmse", 8, 10.41, None),
        (ONCE, "max", None, 3.415, None),
        (FIVE, "rmse", 320, 7.69, 7.63),
        (FIVE, "rmse", 128, 8.90, None),
        (Participation(200, 5, 40), "rmse", 40, 6.220, None),
    ],
)
def test_toeplitz_reaches_the_published_error(
    participation, objective, bands, published, normalized
):
    fit = optimize("toeplitz", participation, objective=objective, bands=bands)
    found = error(fit, participation)
    reached = found.rmse if objective == "rmse" else found.max_error
    assert reached == pytest.approx(published, rel=5e-4)
    assert len(fit.coefficients) == (bands or participation.rounds)
    assert fit.sensitivity(participation).exact
    if normalized is not None:
        same = Toeplitz(participation.rounds, fit.coefficients, normalize_columns=True)
        assert error(same, participation).rmse == pytest.approx(normalized, rel=5e-4)


def test_dense_optimum_beats_every_other_kind():
    once = Participation(64)
    best = error(optimize("dense", once), once).rmse
    others = [
        optimize("toeplitz", once),
        optimize("blt", once, buffers=5),
        Toeplitz(64, optimize("toeplitz", once).coefficients, normalize_columns=True),
    ]
    assert best < min(error(other, once).rmse for other in others)
    # the same optimum by another route: n = 2, C = [[a, 0], [s, 1]] with unit columns; one number
    two = Participation(2)
    angles = np.linspace(0.0, 1.5, 20_001)
    variance = 1 / np.cos(angles) ** 2 + (1 - np.sin(angles)) ** 2 / np.cos(angles) ** 2 + 1
    found = error(optimize("dense", two), two).rmse
    assert found == pytest.approx(np.sqrt(variance.min() / 2), rel=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("objective", ["rmse", "max"])
def test_the_loss_is_the_logarithm_of_the_squared_error_and_has_its_gradient(objective, momentum):
    participation, mechanism = Participation(12, 3, 4), Toeplitz.square_root(12)
    aim = (participation, objective, Workload(momentum))
    loss, inverse = (made(*aim) for made in (coefficient_loss, _inverse_loss))
    column, found = mechanism.encoder()[:, 0], error(mechanism, participation, Workload(momentum))
    reached = found.rmse if objective == "rmse" else found.max_error
    assert loss(column)[0] == pytest.approx(2 * np.log(reached), rel=1e-12)
    bands = np.array([1.0, -0.4, -0.2, -0.1] + [0.0] * 8)
    found = error(BandedInverse(12, (1.0, -0.4, -0.2, -0.1)), participation, Workload(momentum))
    reached = found.rmse if objective == "rmse" else found.max_error
    assert inverse(bands)[0] == pytest.approx(2 * np.log(reached), rel=1e-12)
    for function, at, least in ((loss, column, 1), (inverse, bands, 0)):
        _, gradient = function(at)
        for index in range(least, len(at) if function is loss else 4):
            step = 1e-6 * np.eye(1, len(at), index)[0]
            slope = (function(at + step)[0] - function(at - step)[0]) / 2e-6
            assert gradient[index] == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_fits_of_small_runs_do_not_fail():
    for n in (1, 2, 3, 5):
        for k in {1, n}:
            participation = Participation(n, k)
            bounds = []
            for objective in ("rmse", "max"):
                blt = optimize("blt", participation, objective=objective)
                full = optimize("toeplitz", participation, objective=objective)
                banded = optimize("toeplitz", participation, objective=objective, bands=1)
                bounds += [error(m, participation).max_error for m in (blt, full, banded)]
            assert np.isfinite(bounds).all()


def test_more_buffers_never_do_worse_and_useless_ones_are_left_out():
    participation = Participation(400, 5, 80)
    errors = [
        error(optimize("blt", participation, buffers=m), participation).rmse for m in range(1, 6)
    ]
    assert errors == sorted(errors, reverse=True)
    assert optimize("blt", participation, buffers=5).buffers < 5


@pytest.mark.parametrize("participation", [Participation(64), Participation(64, 4, 16)], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [("blt", {"buffers": 2}), ("toeplitz", {"bands": 16}), ("banded-inverse", {"bands": 4})],
)
def test_a_fit_for_momentum_is_better_for_its_models_and_worse_for_prefix_sums(
    kind, options, participation
):
    heavy = Workload(momentum=0.95)
    plain, fitted = (
        optimize(kind, participation, workload=workload, **options)
        for workload in (Workload(), heavy)
    )
    models = [error(made, participation, heavy).rmse for made in (fitted, plain)]
    sums = [error(made, participation).rmse for made in (fitted, plain)]
    assert models[0] < models[1] * (1 - 1e-4)
    assert sums[0] > sums[1] * (1 + 1e-6)


def test_the_dense_optimum_is_that_of_its_workload():
    """No other fit, and no matrix near it, has a lower error, rates that change included."""
    once, draws = Participation(12), np.random.default_rng(5)
    rates = tuple(draws.uniform(0.1, 1.0, 12))
    for workload in (Workload(0.9), Workload(0.0, rates), Workload(0.8, rates)):
        best = optimize("dense", once, workload=workload)
        least = error(best, once, workload).rmse
        assert least < error(optimize("dense", once), once, workload).rmse
        for _ in range(200):
            near = np.tril(best.matrix + draws.normal(0, 0.02, (12, 12)))
            assert error(Dense(near), once, workload).rmse >= least * (1 - 1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "tree"}, "kind"),
        ({"kind": "blt", "objective": "mean"}, "objective"),
        ({"kind": "blt", "buffers": 6}, "at most 5"),
        ({"kind": "blt", "bands": 2}, "bands=2: only kind='toeplitz' and 'banded-inverse' have"),
        ({"kind": "banded-inverse"}, "bands is missing"),
        ({"kind": "toeplitz", "buffers": 2}, "only kind='blt' has buffers"),
        ({"kind": "toeplitz", "bands": 9}, "at most rounds=8"),
        ({"kind": "dense", "objective": "max"}, "dense optimum is for 'rmse'"),
        ({"kind": "dense", "participation": Participation(8, 2)}, "max_participations=2"),
        ({"kind": "blt", "workload": Workload(0.9, (1.0,) * 7 + (0.5,))}, "take a constant rate"),
        ({"kind": "dense", "workload": Workload(0.9, (1.0,))}, "1 of them, for 8 rounds"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ConfigError, match=message):
        optimize(**{"participation": Participation(8)} | options)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("objective", ["rmse", "max"])
@pytest.mark.parametrize(
    "participation",
    [Participation(1), Participation(2, 2), Participation(700, 20, 1), Participation(3000, 6, 314)],
    ids=str,
)
def test_the_closed_form_of_a_blt_is_that_of_its_coefficients(participation, objective, momentum):
    """Sums over few points instead of all rounds, for decays from 0.0001 to 0.99999."""
    n = participation.rounds
    loss = blt_loss(participation, objective, momentum)
    slow = coefficient_loss(participation, objective, Workload(momentum))
    draws = np.random.default_rng(3)
    for buffers in (1, 2, 5):
        rates = draws.uniform(np.log(0.01 / n), 2.0, buffers)
        logs = np.concatenate([rates, draws.uniform(-6, 2, buffers)])
        decay = np.exp(-np.exp(rates))
        scale = np.exp(logs[buffers:]) / (1 + np.exp(logs[buffers:]).sum())
        column = np.concatenate([[1.0], scale @ decay[:, None] ** np.arange(n - 1)])
        value, gradient = _with_gradient(loss)(logs)
        assert value == pytest.approx(slow(column)[0], abs=1e-9)
        assert np.isfinite(gradient).all()


@pytest.mark.slow
def test_a_million_rounds_are_fitted_in_closed_form_and_their_error_is_that_of_the_recurrence(
    monkeypatch,
):
    fits, plain = [], scipy.optimize.minimize
    monkeypatch.setattr(
        "scipy.optimize.minimize", lambda *_, **own: fits.append(plain(*_, **own)) or fits[-1]
    )
    participation = Participation(10**6, 5, 200_000)
    tracemalloc.start()
    fit = optimize("blt", participation, buffers=5)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 10**6  # not a byte per round
    assert 0 < sum(found.nfev for found in fits) < 5000  # 472
    assert error(fit, participation).rmse == pytest.approx(12.5757, rel=1e-4)
    assert fit.sensitivity(participation).exact
    state = [0.0] * fit.buffers
    sums, variance = [], 0.0
    for _ in range(3000):
        y = 1 - sum(o * s for o, s in zip(fit.scale, state, strict=True))
        state = [d * s + y for d, s in zip(fit.decay, state, strict=True)]
        variance += y * y
        sums.append(variance)
    np.testing.assert_allclose(fit.prefix_variance()[:3000], sums, rtol=1e-10)


@pytest.mark.parametrize("objective", ["rmse", "max"])
@pytest.mark.parametrize("participation", [Participation(300), Participation(400, 5, 80)], ids=str)
def test_a_fitted_banded_inverse_is_no_worse_than_the_square_root(participation, objective):
    for bands in (1, 2, 4, 16):
        fitted = optimize("banded-inverse", participation, bands=bands, objective=objective)
        root = BandedInverse.square_root(participation.rounds, bands)
        own, other = error(fitted, participation), error(root, participation)
        better = own.rmse <= other.rmse if objective == "rmse" else own.max_error <= other.max_error
        assert better
        assert fitted.bands == bands


def test_lambda_is_the_best_of_a_grid():
    participation = Participation(500, 3, 100)
    fitted = optimize("banded-inverse", participation, bands=2)
    reached = error(fitted, participation).rmse
    for strength in np.linspace(0.5, 0.999, 60):
        assert reached <= error(BandedInverse(500, (1, -strength)), participation).rmse * (1 + 1e-7)
