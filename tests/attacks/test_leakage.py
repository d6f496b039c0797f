"""The report cannot mislead: verdicts, baselines, sub-views, seeds."""

import json
import subprocess
import sys

import pytest
import torch

from accounting import ConfigError
from attacks import dlg, leakage, observe
from attacks.analytic import invert_first_dense
from attacks.leakage import _attack, _row
from attacks.networks import smooth_lenet
from attacks.reconstruct import Reconstruction
from attacks.report import Trial

VIEWS = {
    "full": ["*"],
    "conv2": ["conv2.*"],
    "dense2": ["dense2.*"],
    "all but dense1": ["conv*", "dense2.*"],
}


@pytest.fixture(scope="module")
def report(digits):
    x, y = digits[0][:3], digits[1][:3]
    return leakage(smooth_lenet(torch.Generator().manual_seed(0)), x, y, views=VIEWS)


def trial(view, psnr, match=1e-16, baseline=10.0):
    x = torch.zeros(1, 1, 8, 8)
    found = Reconstruction(x, torch.tensor([0]), match, "matched", 1, 0.0, (match,))
    return Trial(view, "dlg", found, psnr, baseline)


def test_views_of_a_smooth_network(report):
    rows = {row.view: row for row in report.rows}
    assert list(rows) == list(VIEWS)
    assert [rows[view].visible for view in VIEWS] == [5122, 584, 330, 994]
    assert rows["conv2"].share == 584 / 5122
    assert all(row.unknowns == 64 for row in report.rows)
    for view in ("full", "conv2", "all but dense1"):
        assert rows[view].verdict == "recovered"
        assert min(rows[view].psnr) > 60


def test_an_undetermined_view_is_ambiguous_not_safe(report):
    row = report.rows[2]
    assert row.verdict == "ambiguous"
    assert max(row.psnr) < 20
    assert all(one.reconstruction.match <= 1e-16 for one in row.own)


def test_a_first_convolution_with_fewer_numbers_than_pixels_is_ambiguous(digits):
    x = torch.nn.functional.interpolate(digits[0][:1], size=28, mode="bilinear")
    model = smooth_lenet(torch.Generator().manual_seed(0), size=28)
    (row,) = leakage(model, x, digits[1][:1], views={"conv1": ["conv1.*"]}).rows
    assert (row.visible, row.unknowns, row.verdict) == (312, 784, "ambiguous")


def test_an_attack_that_is_cut_off_is_no_protection(lenet, digits):
    x, y = digits[0][:2], digits[1][:2]
    (row,) = leakage(lenet, x, y, views={"full": ["*"]}, max_evaluations=1).rows
    assert row.verdict == "attack failed"
    assert row.to_dict()["status"] == ["budget", "budget"]
    assert row.to_dict()["evaluations"] == 2 * 3


def test_the_closed_form_is_tried(mlp, digits):
    x, y = digits[0][:2], digits[1][:2]
    (row,) = leakage(mlp, x, y, views={"dense1": ["dense1.*"]}).rows
    assert min(row.psnr) > 140
    assert row.to_dict()["attack"] == "invert_dense"


def test_the_closed_form_and_the_search_are_compared_by_match(mlp, digits):
    x, y = digits[0][:1], digits[1][:1]
    generator = torch.Generator().manual_seed(0)
    noisy = observe(mlp, x, y, clip=1.0, noise_multiplier=1e-4, generator=generator)
    closed = invert_first_dense(mlp, noisy)
    assert closed.match > 1e-10
    attack, found = _attack(mlp, noisy, 1, 1, 0)
    assert (attack, found.match) == ("invert_dense", closed.match)
    attack, found = _attack(mlp, noisy, 1, 300, 0)
    assert attack == "dlg"
    assert found.match < closed.match


def test_the_same_starting_points_for_every_view(lenet, digits, report):
    x, y = digits[0][2:3], digits[1][2:3]
    for row, view in zip(report.rows, VIEWS.values(), strict=True):
        alone = dlg(lenet, observe(lenet, x, y, visible=view), seed=2)
        assert torch.equal(row.own[2].reconstruction.x, alone.x)


def test_labels_that_are_hidden_stay_hidden(lenet, digits):
    with pytest.raises(ConfigError, match="labels=None"):
        leakage(
            *(lenet, digits[0][:1], digits[1][:1]),
            views={"conv2": ["conv2.*"]},
            reveal_labels=False,
        )


def test_seeing_more_never_scores_less(report, lenet):
    full, conv2, dense2, rest = (row.psnr for row in report.rows)
    assert all(f >= max(c, d, r) for f, c, d, r in zip(full, conv2, dense2, rest, strict=True))
    names = {"full": frozenset({"conv2.weight", "dense2.bias"}), "part": frozenset({"dense2.bias"})}
    own = {
        "full": [trial("full", 8.0, 1e-2), trial("full", 50.0)],
        "part": [trial("part", 40.0)] * 2,
    }
    row = _row(lenet, "full", ["*"], names, own)
    assert row.psnr == (40.0, 50.0)
    assert row.to_dict()["psnr_alone"] == [8.0, 50.0]
    assert row.to_dict()["found_in"] == ["part", "full"]
    assert _row(lenet, "part", ["*"], names, own).psnr == (40.0, 40.0)


def test_one_image_recovered_is_a_view_that_leaks(lenet):
    names = {"v": frozenset({"dense2.bias"})}
    own = {"v": [trial("v", 5.0, 1e-2), trial("v", 90.0), trial("v", 5.0)]}
    row = _row(lenet, "v", ["*"], names, own)
    assert row.verdict == "recovered"
    assert row.to_dict()["verdicts"] == {
        **{"recovered": 1, "partial": 0, "ambiguous": 1, "attack failed": 1}
    }


@pytest.mark.parametrize(
    ("psnr", "match", "baseline", "verdict"),
    [
        (30.0, 1e-16, 27.0, "recovered"),
        (29.9, 1e-16, 20.0, "partial"),
        (31.0, 1e-16, 30.0, "ambiguous"),
        (12.9, 1e-6, 10.0, "ambiguous"),
        (12.9, 2e-6, 10.0, "attack failed"),
    ],
)
def test_verdicts(psnr, match, baseline, verdict):
    assert trial("v", psnr, match, baseline).verdict == verdict


def test_no_attack_is_steered_by_the_score(lenet, digits, monkeypatch, report):
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(
        *(sys.modules["attacks.leakage"], "psnr"),
        lambda x, _: 40 * torch.rand(len(x), generator=generator),
    )
    blind = leakage(lenet, digits[0][:3], digits[1][:3], views=VIEWS)
    assert blind.rows[0].psnr != report.rows[0].psnr
    for ours, theirs in zip(blind.rows, report.rows, strict=True):
        for one, other in zip(ours.own, theirs.own, strict=True):
            assert torch.equal(one.reconstruction.x, other.reconstruction.x)


def test_json_with_the_same_numbers_for_the_same_seed(lenet, digits, report):
    again = leakage(lenet, digits[0][:3], digits[1][:3], views=VIEWS).to_dict()
    first = report.to_dict()
    for row in (*first["rows"], *again["rows"]):
        assert row.pop("seconds") >= 0
    assert json.loads(json.dumps(first, allow_nan=False)) == again
    assert first["schema"] == "privpart/leakage/1"
    assert first["images"] == 3
    assert first["rows"][0]["share"] == 1.0
    assert set(first["baselines"]) == {"grey", "own mean", "noise"}


def test_baselines_stand_beside_every_score(report):
    best = [max(scores[i] for scores in report.baselines.values()) for i in range(3)]
    for row in report.rows:
        assert [one.baseline for one in row.best] == best
        assert row.reconstructions.shape == report.truth.shape == (3, 1, 8, 8)


def test_progress_and_hidden_labels(lenet, digits):
    lines = []
    result = leakage(
        *(lenet, digits[0][:2], digits[1][:2]),
        views={"full": ["*"]},
        dataset_mean=digits[0].mean(0),
        reveal_labels=False,
        progress=lines.append,
    )
    assert lines == ["full: image 1 of 2", "full: image 2 of 2"]
    assert min(result.rows[0].psnr) > 60
    assert result.to_dict()["threat"]["labels"] == "inferred"
    assert "dataset mean" in result.baselines


def test_bad_views(lenet, digits):
    for views in ({}, {"typo": ["dense9.*"]}, {"none": []}):
        with pytest.raises(ConfigError):
            leakage(lenet, digits[0][:1], digits[1][:1], views=views)


def test_an_auditor_shares_no_code_with_what_it_audits():
    code = (
        "import sys, attacks; sys.exit(bool({'privpart', 'sklearn', 'opacus'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_images_and_labels_must_pair(lenet, digits):
    x, y = digits
    for bad_x, bad_y in ((x[:2], y[:3]), (x[:3], y[:2]), (x[:0], y[:0])):
        with pytest.raises(ConfigError):
            leakage(lenet, bad_x, bad_y, views={"full": ["*"]})


@pytest.mark.parametrize(
    ("whole", "part", "verdict"),
    [
        (trial("full", 5.0, 1e-2), trial("part", 90.0), "recovered"),
        (trial("full", 5.0, 1e-16), trial("part", 6.0, 1e-2), "ambiguous"),
    ],
)
def test_the_verdict_is_the_most_severe_of_a_view_and_its_parts(lenet, whole, part, verdict):
    names = {
        "full": frozenset({"dense2.weight", "dense2.bias"}),
        "part": frozenset({"dense2.bias"}),
    }
    row = _row(lenet, "full", ["*"], names, {"full": [whole], "part": [part]})
    assert row.verdict == verdict
