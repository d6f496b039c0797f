"""What attacks, scores and bounds refuse: one row for each kind of mistake."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from subjects import Transformer, dense, seeded
from torch import nn
from torch.nn.functional import multi_margin_loss

from accounting import ConfigError, Participation
from attacks import (
    Canaries,
    ImageAudit,
    LocalSteps,
    Observation,
    april,
    clopper_pearson,
    cosine_tv,
    defences,
    dense_then_invert,
    dlg,
    guesses,
    infer_labels,
    invert_dense,
    leakage,
    observe,
    one_run,
    one_run_gdp,
    paired,
    pooled_t,
    psnr,
    reid_rank,
    spear,
    ssim,
    view,
    worst_view,
)
from attacks.metrics import baseline_images, feature_error, match_batch, wilson
from attacks.networks import smooth_lenet, smooth_mlp
from attacks.reconstruction.analytic import invert_first_dense

NET = smooth_lenet(seeded(0))
X, Y = torch.rand(2, 1, 8, 8, generator=seeded(0)).double(), torch.tensor([3, 5])
SEEN = observe(NET, X[:1], Y[:1])
CONV = observe(NET, X[:1], Y[:1], visible=["conv1.*"])
TINY = CONV.restrict(["conv1.bias"])
ADAM = LocalSteps(learning_rate=0.01, optimizer="adam")
DROPPING = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
FULL, PART, STATE = {"full": ["*"]}, {"conv2": ["conv2.*"]}, {"dense.weight": torch.zeros(2, 3)}
SLOPE = torch.tensor([0.5, -0.5])
EYE = np.eye(3)
NOISE = EYE + np.arange(9.0).reshape(3, 3)
COINS, DRAWN = np.array([True, False] * 25), np.random.default_rng(0).standard_normal(50)
AT, CERTAIN = {"delta": 1e-5}, {"delta": 1e-5, "confidence": 1.0}


def given(made):
    """Audit with an update of one image, changed."""
    update = {name: made(value) for name, value in SEEN.update.items()}
    return leakage(NET, X[:1], Y[:1], views=FULL, update=update)


def hidden(net, count, **options):
    return dlg(net, observe(net, X[:count], Y[:count], reveal_labels=False, **options))


def swept(clips, noises):
    audit = ImageAudit(model=NET, x=X, y=Y, views=FULL)
    return defences(audit, clips=clips, noise_multipliers=noises)


def canaries(seed=0, count=2, dim=10, within=None):
    return Canaries(seed, count, dim, within)


def replayed(pushed=EYE, residual=NOISE, covariance=EYE, **options):
    return paired(pushed, residual, covariance, noise_multiplier=1.0, **options)


OF_IMAGES = [
    (lambda: observe(NET, X, Y, visible=["dense3.weight"]), "Did you mean dense2.weight, dense1.w"),
    (lambda: observe(NET, X, Y, visible=["dense1.*", "zzz"]), "Names: conv1.weight"),
    (lambda: observe(NET, X, Y, visible=[]), "empty view"),
    (lambda: observe(NET, X, Y, visible="dense1.*"), "list of patterns"),
    (lambda: observe(NET, X, Y, clip=math.nan), "clip=nan"),
    (lambda: observe(NET, X, Y, clip=1e-200), "clip=1e-200: must be above 1e-100"),
    (lambda: observe(NET, X, Y, noise_multiplier=1.0), "clip"),
    (lambda: observe(NET, X, Y, clip=1.0, noise_multiplier=math.nan), "noise_multiplier=nan"),
    (lambda: observe(NET, X, Y, clip=1.0, noise_multiplier=1.0), "Generator"),
    (lambda: observe(NET, X[0], Y[:1]), "shape"),
    (lambda: observe(NET, X * math.nan, Y), "finite"),
    (lambda: observe(NET, X[:0], Y[:0]), "^x:"),
    (lambda: observe(NET, X, Y[:1]), "^y:"),
    (lambda: observe(NET, X, Y.double()), "^y:"),
    (lambda: observe(DROPPING, X, Y), "drops out"),
    (lambda: Observation({}, STATE, (1, 1, 1, 3)), "empty"),
    (lambda: Observation({"dense.wieght": torch.ones(2, 3)}, STATE, (1, 1, 1, 3)), "wieght"),
    (lambda: Observation({"dense.weight": torch.ones(3, 2)}, STATE, (1, 1, 1, 3)), "shape"),
    (lambda: Observation({"dense.weight": math.nan * torch.ones(2, 3)}, STATE, (1, 3)), "finite"),
    (lambda: TINY.restrict(["conv1.weight"]), "not in view"),
    (lambda: LocalSteps(learning_rate=math.nan), "learning_rate=nan"),
    (lambda: LocalSteps(learning_rate=0.1, steps=0), "steps=0"),
    (lambda: LocalSteps(learning_rate=0.1, momentum=1.0), "momentum=1"),
    (lambda: LocalSteps(learning_rate=0.1, momentum=math.nan), "momentum=nan"),
    (lambda: LocalSteps(learning_rate=0.1, optimizer="lion"), "lion"),
    (lambda: LocalSteps(learning_rate=0.1, momentum=0.9, optimizer="adam"), "momentum"),
    (lambda: LocalSteps(learning_rate=(0.1, 0.2), steps=3), "one of each of the 3 steps"),
    (lambda: LocalSteps(learning_rate=(0.1, -1.0), steps=2), "learning_rate"),
    (lambda: LocalSteps(learning_rate=0.1, batch=0), "batch"),
    (lambda: list(LocalSteps(learning_rate=0.1, batch=2).rows(3)), "divide 3 examples"),
    (lambda: LocalSteps(learning_rate=0.1, weight_decay=float("nan")), "weight_decay"),
    (lambda: invert_dense(torch.zeros(2, 3), torch.ones(2)), "weight"),
    (lambda: invert_dense(torch.ones(2, 3), torch.zeros(2)), "bias"),
    (lambda: invert_dense(torch.ones(2, 3), torch.ones(3)), "shape"),
    (lambda: invert_dense(torch.full((2, 3), math.nan), torch.ones(2)), "finite"),
    (lambda: invert_dense(torch.ones(2, 3), torch.tensor([1.0, math.inf])), "finite"),
    (lambda: infer_labels(None, None, 1), "bias"),
    (lambda: infer_labels(torch.ones(3, 2), None, 2), "bias"),
    (lambda: infer_labels(torch.ones(2, 2), None, 1), "weight"),
    (lambda: infer_labels(None, SLOPE * torch.nan, 1), "finite"),
    (lambda: infer_labels(None, SLOPE[:1], 1), "K >= 2"),
    (lambda: infer_labels(None, SLOPE, 0), "batch"),
    (lambda: hidden(NET, 2, visible=["conv*"]), r"those of 2 images .* \(dense2\)"),
    (lambda: hidden(NET, 1, loss=multi_margin_loss), "only under cross-entropy"),
    (lambda: hidden(NET, 2, local=ADAM), "Adam"),
    (lambda: dlg(NET, replace(TINY, update={"conv1.bias": torch.zeros(8)})), "nothing to match"),
    (lambda: dlg(NET, SEEN, restarts=0), "restarts"),
    (lambda: dlg(NET, SEEN, max_evaluations=0), "max_evaluations"),
    (lambda: dlg(NET, SEEN, seed=-1), "seed"),
    (lambda: dlg(NET, SEEN, tv=()), r"tv=\(\)"),
    (lambda: dlg(NET, SEEN, statistics=1.0), "statistics"),
    (lambda: cosine_tv(NET, SEEN, tv=()), r"tv=\(\)"),
    (lambda: cosine_tv(NET, SEEN, steps=1, signed=()), "signed="),
    (lambda: cosine_tv(NET, SEEN, steps=1, signed="yes"), "signed="),
    (lambda: cosine_tv(NET, SEEN, steps=1, signed=[True, 1]), "signed="),
    (lambda: spear(dense(), observe(dense(), X, Y), draws=0), "draws"),
    (lambda: reid_rank(NET, SEEN, X[:1], X[:1], Y[:1]), "a label for every candidate"),
    (lambda: match_batch(torch.zeros(3, 3), torch.zeros(2, 3)), "shape"),
    (lambda: match_batch(torch.full((2, 3), math.nan), torch.zeros(2, 3)), "finite"),
    (lambda: psnr(X * math.nan, X), "^x: has NaN or"),
    (lambda: psnr(X, X + math.inf), "^reference: has NaN or"),
    (lambda: psnr(X, X + 1.01), "outside"),
    (lambda: psnr(X, X[:1]), "shape"),
    (lambda: baseline_images(X * math.nan), "NaN"),
    (lambda: ssim(X, X[:, :, :4]), "shape"),
    (lambda: feature_error(torch.tensor([math.nan]), torch.ones(1)), "finite"),
    (lambda: feature_error(torch.ones(1), torch.zeros(1)), "zero"),
    (lambda: feature_error(torch.ones(2), torch.ones(1)), "shape"),
    (lambda: wilson(3, 2), "=3"),
    (lambda: leakage(NET, X, Y[[0, 1, 1]], views=FULL), "labels"),
    (lambda: leakage(NET, X[:0], Y[:0], views=FULL), "images"),
    (lambda: leakage(NET, X, Y, views={}), "views"),
    (lambda: leakage(NET, X, Y, views={"none": []}), "empty view"),
    (lambda: leakage(NET, X, Y, views=FULL, batch=3), "must divide"),
    (lambda: leakage(NET, X, Y, views=FULL, schedule=["ful"]), "is not a valid view"),
    (lambda: leakage(NET, X, Y + 5, views=FULL), "labels: from 8 to 10; the model's are 0 to 9"),
    (lambda: given(lambda v: (1e6 * v).long()), "holds torch.int64"),
    (lambda: given(lambda v: v.to(torch.complex64)), "holds torch.complex64"),
    (lambda: given(lambda v: v[:1]), "must be"),
    (lambda: given(lambda v: v * torch.nan), "not finite"),
    (lambda: given(lambda v: v * 1e200), "too long for its norm"),
    (lambda: leakage(NET, X[:1], Y[:1], views=FULL, update={"a": SLOPE}), "is not a parameter"),
    (lambda: leakage(NET, X[:1], Y[:1], views=FULL, update={}), "is empty"),
    (lambda: leakage(NET, X, Y, views=PART, batch=2, reveal_labels=False), "labels=None"),
    (lambda: swept([], [1.0]), "clips"),
    (lambda: swept([1.0], [-1.0]), "noise_multiplier"),
]
OF_LOWER_BOUNDS = [
    (lambda: canaries(count=11), "Use fewer canaries"),
    (lambda: canaries(count=4, within=(3, 6)), "Use fewer canaries"),
    (lambda: canaries(within=(5, 11)), "from 0 to 10"),
    (lambda: canaries(count=0), "count=0"),
    (lambda: canaries(seed=-1), "seed=-1"),
    (lambda: canaries().project(torch.zeros(9)), r"shape \(9,\)"),
    (lambda: canaries().update(1, math.nan), "norm=nan"),
    (lambda: view(EYE, [0, 0, 0], 1.3), "not only 0"),
    (lambda: view(EYE, [0, 2, 0], 1.3), "each of 3 rounds"),
    (lambda: view(EYE * math.nan, [0, 1, 0], 1.3), "square and finite"),
    (lambda: worst_view(EYE, Participation(4), 1.3), "rounds=4"),
    (lambda: replayed(0 * EYE), "do not differ"),
    (lambda: replayed(residual=0 * EYE), "no noise"),
    (lambda: replayed(residual=EYE * math.nan), "not finite"),
    (lambda: replayed(EYE[:2], EYE[:2]), "row for each"),
    (lambda: replayed(EYE[:, :2]), "that of the residual"),
    (lambda: replayed(tensors={"bias": 10}), "must have 3"),
    (lambda: replayed(covariance=-EYE), "positive definite"),
    (lambda: pooled_t(1e200 * DRAWN, COINS, **AT), "too much"),
    (lambda: pooled_t(DRAWN, np.arange(50) < 50, **AT), "fell alike"),
    (lambda: pooled_t(DRAWN, np.arange(50) < 1, **AT), "at least two"),
    (lambda: pooled_t(0 * DRAWN, COINS, **AT), "vary"),
]


@pytest.mark.parametrize(("call", "said"), OF_IMAGES + OF_LOWER_BOUNDS)
def test_what_cannot_be_is_refused(call, said):
    with pytest.raises(ConfigError, match=said):
        call()


@pytest.mark.parametrize(
    ("attack", "model", "visible", "count"),
    [
        (april, smooth_lenet, ["*"], 1),
        (april, Transformer, ["*"], 2),
        (april, Transformer, ["head.*"], 1),
        (invert_first_dense, smooth_lenet, ["*"], 1),
        (invert_first_dense, smooth_mlp, ["dense1.weight"], 2),
        (dense_then_invert, smooth_lenet, ["conv2.*"], 1),
        (dense_then_invert, smooth_lenet, ["*"], 2),
        (spear, dense, ["*"], 1),
        (partial(spear, draws=5000), partial(dense, 32, nn.Tanh()), ["*"], 2),
        (partial(spear, draws=5000), partial(dense, 1), ["*"], 2),
    ],
)
def test_an_attack_that_does_not_apply_finds_nothing(attack, model, visible, count):
    net = model(seeded(0)) if model in (smooth_lenet, smooth_mlp) else model()
    assert attack(net, observe(net, X[:count], Y[:count], visible=visible)) is None


@pytest.mark.parametrize("bound", [one_run, one_run_gdp, guesses, clopper_pearson, pooled_t])
def test_scores_and_coins_that_cannot_be_used_are_refused(bound):
    own = {"claimed_mu": 1.0} if bound is guesses else {}
    for scores, coins, options, said in (
        (DRAWN * np.nan, COINS, AT, "scores"),
        (DRAWN[None], COINS, AT, "scores"),
        (DRAWN[:0], COINS, AT, "scores"),
        (DRAWN[:9], COINS, AT, "present"),
        (DRAWN, COINS.astype(int), AT, "truth value"),
        (DRAWN, COINS, {"delta": 0.0}, "delta"),
        (DRAWN, COINS, CERTAIN, "confidence"),
    ):
        with pytest.raises(ConfigError, match=said):
            bound(scores, coins, **options, **own)
