"""The report cannot mislead: verdicts, baselines, sub-views, seeds, levels of noise."""

import json
import sys

import pytest
import torch
from subjects import seeded

from accounting import ConfigError
from attacks import ImageAudit, defences, dlg, leakage, suite
from attacks.networks import smooth_lenet
from attacks.reconstruction.reconstruct import Reconstruction
from attacks.report import ImageTrial, most_severe

FAST = suite(newton_steps=0, steps=0, tv=0)

VIEWS = {
    "full": ["*"],
    "conv2": ["conv2.*"],
    "dense2": ["dense2.*"],
    "all but dense1": ["conv*", "dense2.*"],
}


@pytest.fixture(scope="module")
def report(digits):
    x, y = digits[0][:2], digits[1][:2]
    return leakage(smooth_lenet(seeded()), x, y, views=VIEWS, attacks=FAST)


def handing_in(guess, label, match, calls=None):
    """Return an attack that finds the same whatever it sees."""

    def attack(*_):
        if calls is not None:
            calls.append(guess)
        return Reconstruction(guess, label, match, "matched", 1, (match,))

    return attack


def test_views_of_a_smooth_network(report):
    rows = {row.view: row for row in report.rows}
    assert list(rows) == list(VIEWS)
    assert [rows[view].visible for view in VIEWS] == [5122, 584, 330, 994]
    assert rows["conv2"].share == 584 / 5122
    for view in ("full", "conv2", "all but dense1"):
        assert rows[view].verdict == "recovered"
        assert min(rows[view].psnr) > 60
    assert rows["dense2"].verdict == "ambiguous"  # undetermined, which is not safe
    assert max(rows["dense2"].psnr) < 20
    assert all(trial.result.match <= 1e-16 for trial in rows["dense2"].own)
    full, *parts = (row.psnr for row in report.rows)
    assert all(whole >= max(part) for whole, *part in zip(full, *parts, strict=True))


def test_an_attacker_hands_in_the_least_residual_and_the_row_bounds_all(lenet, digits):
    x, y = digits[0][:1], digits[1][:1]
    near = {"far": handing_in(1 - x, y, 0.1), "near": handing_in((x + 0.1).clamp(0, 1), y, 0.2)}
    (row,) = leakage(lenet, x, y, views={"full": ["*"]}, attacks=near).rows
    assert row.own[0].attack == "far"
    assert row.best[0].attack == "near"
    assert row.verdict == most_severe(row.best)


def test_what_each_attack_found_stands_beside_the_verdict(lenet, digits):
    """Matching alone leaves the image open; with a prior it is recovered, and both are told."""
    x, y = digits[0][:2], digits[1][:2]
    never = []
    attacks = {
        "matching": handing_in(torch.full_like(x[:1], 0.5), y[:1], 1e-16),
        "prior": lambda m, o, s: handing_in(x[s : s + 1], y[:1], 1e-5)(m, o, s),
        "never": handing_in(x[:1], y[:1], 1.0, never),
    }
    (row,) = leakage(lenet, x, y, views={"conv1": ["conv1.*"]}, attacks=attacks).rows
    assert row.verdict == "recovered"
    told = row.to_dict()["by_attack"]
    assert {name: (one["images"], one["verdict"]) for name, one in told.items()} == {
        "matching": (2, "ambiguous"),
        "prior": (2, "recovered"),
    }
    assert told["matching"]["psnr_max"] < 20 < told["prior"]["psnr_median"]
    assert told["matching"]["verdicts"]["ambiguous"] == 2
    assert not never


def test_a_mistyped_view_is_an_error_before_the_first_attack(lenet, digits):
    called = []
    with pytest.raises(ConfigError, match="matches no parameter"):
        leakage(
            *(lenet, digits[0][:1], digits[1][:1]),
            views={"full": ["*"], "typo": ["dense9.*"]},
            attacks={"any": lambda *_: called.append(1)},
        )
    assert not called


def test_an_audit_without_an_attack_says_so(lenet, digits):
    none = {"nothing": lambda *_: None}
    report = leakage(lenet, digits[0][:1], digits[1][:1], views={"full": ["*"]}, attacks=none)
    assert report.verdict == "attack failed"
    assert list(report.rows[0].by_attack) == ["none"]


def test_the_same_starting_points_for_every_view(lenet, digits, report):
    x, y = digits[0][1:2], digits[1][1:2]
    for row, view in zip(report.rows, VIEWS.values(), strict=True):
        alone = leakage(lenet, x, y, views={"one": view}, attacks=FAST, seed=1).rows[0].own[0]
        assert torch.equal(row.own[1].result.x, alone.result.x)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_whole_that_is_attacked_badly_takes_the_score_of_its_part(lenet, digits, clip):
    """The attack ruins whatever shows conv1, so the part alone is better than the whole."""

    def picky(model, seen, seed):
        if "conv1.weight" in seen.update:
            return dlg(model, seen, restarts=1, max_evaluations=1, newton_steps=0)
        return dlg(model, seen, restarts=1, seed=seed)

    views = {"full": ["*"], "conv2": ["conv2.*"]}
    full, part = leakage(
        *(lenet, digits[0][:2], digits[1][:2]), views=views, attacks={"dlg": picky}, clip=clip
    ).rows
    assert max(full.to_dict()["psnr_alone"]) < 30 < min(part.psnr)
    assert full.to_dict()["found_in"] == ["conv2", "conv2"]
    assert all(whole > 60 for whole in full.psnr)
    assert full.verdict == part.verdict == "recovered"
    if clip is None:
        assert full.psnr == part.psnr


@pytest.mark.parametrize(
    ("psnr", "match", "baseline", "truth_match", "chance", "verdict"),
    [
        (30.0, 1e-16, 27.0, 0.0, 29.0, "recovered"),
        (29.9, 1e-16, 20.0, 0.0, 29.0, "partial"),
        (28.9, 1e-16, 20.0, 0.0, 29.0, "ambiguous"),  # as other images of its class are
        (28.9, 1e-5, 20.0, 0.0, 29.0, "attack failed"),
        (31.0, 1e-16, 30.0, 0.0, 29.0, "no gain"),
        (12.9, 1e-6, 10.0, 0.0, 0.0, "ambiguous"),
        (12.9, 2e-6, 10.0, 0.0, 0.0, "attack failed"),
        (5.0, 0.3, 10.0, 0.4, 0.0, "ambiguous"),  # with noise the truth itself does not match
        (5.0, 0.3, 10.0, 0.2, 0.0, "attack failed"),
    ],
)
def test_verdicts(psnr, match, baseline, truth_match, chance, verdict):
    found = Reconstruction(torch.zeros(1, 1, 8, 8), torch.tensor([0]), match, "matched", 1, ())
    trial = ImageTrial("v", "dlg", found, psnr, baseline, chance=chance, truth_match=truth_match)
    assert trial.verdict == verdict


def test_no_attack_is_steered_by_the_score(lenet, digits, monkeypatch):
    one, arguments = {"dlg": FAST["dlg"]}, (lenet, digits[0][:1], digits[1][:1])
    views = {name: VIEWS[name] for name in ("full", "dense2")}
    seeing = leakage(*arguments, views=views, attacks=one)
    generator = seeded()
    monkeypatch.setattr(
        *(sys.modules["attacks.image_audit"], "psnr"),
        lambda x, _: 29 * torch.rand(len(x), generator=generator),
    )
    blind = leakage(*arguments, views=views, attacks=one)
    assert blind.rows[0].psnr != seeing.rows[0].psnr
    for ours, theirs in zip(blind.rows, seeing.rows, strict=True):
        for one, other in zip(ours.own, theirs.own, strict=True):
            assert torch.equal(one.result.x, other.result.x)


def test_json_with_the_same_numbers_for_the_same_seed(lenet, digits, report):
    views = {"conv2": VIEWS["conv2"]}
    again = leakage(lenet, digits[0][:2], digits[1][:2], views=views, attacks=FAST).to_dict()
    first = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    for row in (*first["rows"], *again["rows"]):
        assert row.pop("seconds") >= 0
    assert again.pop("rows") == first["rows"][1:2]
    assert again == {name: first[name] for name in again}
    assert first["schema"] == "privpart/leakage/3"
    assert first["images"] == 2
    assert first["rows"][0]["share"] == 1.0
    assert set(first["baselines"]) == {"grey", "noise", "mean of others"}
    assert set(first["oracles"]) == {"own mean"}


def test_progress_and_hidden_labels(lenet, digits):
    lines, x, y = [], digits[0][:1], digits[1][:1]
    options = {"views": {"full": ["*"]}, "dataset_mean": digits[0].mean(0), "reveal_labels": False}
    result = leakage(lenet, x, y, progress=lines.append, **options)
    run = ("invert_dense", "april", "spear", "dense_then_invert")
    assert lines == [f"server/full/full/0: {attack}" for attack in run]
    assert min(result.rows[0].psnr) > 60
    assert result.to_dict()["threat"]["labels"] == "inferred"
    assert "dataset mean" in result.baselines


def test_server_and_recipient(lenet, digits):
    result = leakage(
        *(lenet, digits[0][:2], digits[1][:2]),
        views={"conv2": ["conv2.*"]},
        attacks=FAST,
        clip=1.0,
        noise_multiplier=1.0,
        delta=1e-5,
    )
    server, recipient = result.rows
    assert (server.adversary, recipient.adversary) == ("server", "recipient")
    assert min(server.psnr) > 60
    assert max(recipient.psnr) < 20
    assert recipient.verdict == "ambiguous"
    assert recipient.to_dict()["truth_match_max"] > 0.5
    report = result.to_dict()
    assert report["accountant"]["epsilon"] == pytest.approx(4.37717, abs=1e-4)
    assert report["threat"]["noise_std"] == 1.0


def test_the_worst_round_of_a_schedule(lenet, digits):
    views = {"full": ["*"], "head": ["dense2.*"], "first": ["conv1.*"]}
    x, y = digits[0][:1], digits[1][:1]
    mixed = leakage(lenet, x, y, views=views, attacks=FAST, schedule=["full", "head", "head"])
    assert mixed.to_dict()["schedule"]["rounds"] == {"full": 1, "head": 2}
    assert (mixed.worst_round.view, mixed.worst_round.verdict) == ("full", "recovered")
    assert len(mixed.rows) == 3
    views.pop("full")
    parts = leakage(lenet, x, y, views=views, attacks=FAST, schedule=["head", "first"])
    union = parts.rows[-1]
    assert union.view == "all rounds together"
    assert union.visible == sum(row.visible for row in parts.rows[:2])
    assert union.psnr[0] >= max(row.psnr[0] for row in parts.rows[:2])


def test_the_last_layer_shows_features_exactly_and_tells_who_it_was(lenet, digits):
    x, y = digits
    (row,) = leakage(
        *(lenet, x[:2], y[:2]), views={"dense2": ["dense2.*"]}, attacks=FAST, decoys=(x[2:], y[2:])
    ).rows
    assert row.verdict == "ambiguous"
    assert row.feature_error["dense2"] < 1e-12
    assert row.ranks == (1, 1)


def test_noise_hides_at_the_accountants_epsilon_and_clipping_alone_does_not(lenet, digits):
    """A sweep taken up again must not take one clip's or noise's result for another."""
    x, y = digits[0][:2], digits[1][:2]
    done, views = {}, {"v": ["conv2.*"]}
    audit = ImageAudit(model=lenet, x=x, y=y, views=views, attacks=FAST, done=done)
    (first,) = defences(audit, clips=[0.1], noise_multipliers=[1.0])
    kept = dict(done)
    points = defences(audit, clips=[None, 0.1], noise_multipliers=[0, 1e-4, 1.0])
    assert points[-1] == first
    assert (len(kept), len(done)) == (2, 8)
    assert all(done[key] is found for key, found in kept.items())
    best = {(p.clip, p.noise_multiplier): max(p.scores) for p in points}
    assert set(best) == {(None, 0), (0.1, 0), (0.1, 1e-4), (0.1, 1.0)}
    assert min(best[None, 0], best[0.1, 0]) > 60
    assert best[0.1, 0] > best[0.1, 1e-4] > best[0.1, 1.0]
    epsilon = {p.noise_multiplier: p.epsilon for p in points}
    assert epsilon[0] is None
    assert epsilon[1.0] == pytest.approx(4.37717, abs=1e-4)
    assert epsilon[1e-4] > 1e6
