"""``privpart audit defences``: one sweep as table, JSON and picture; resumed; bad input."""

import json
import sys
from dataclasses import replace

import pytest
import torch

import attacks
from accounting import Independent, Participation, guarantee
from privpart.cli.main import main

QUICK = ["--model", "lenet", "--data", "digits", "--effort", "quick", "--attack", "dlg"]
SWEEP = ["audit", "defences", *QUICK, "--view", "conv2.*", "--clip", "0.1", "--trials", "1"]
NOISES = ["--noise-multiplier", "0", "--noise-multiplier", "1e-3", "--noise-multiplier", "1"]


@pytest.fixture(scope="module")
def finished(privpart, tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep") / "new"
    return out, privpart(*SWEEP, *NOISES, "--out", str(out))


def test_noise_hides_and_epsilon_is_the_accountants(finished):
    out, done = finished
    assert done.returncode == 0, done.stderr
    points = json.loads((out / "defences.json").read_text())["points"]
    by_noise = {point["noise_multiplier"]: point for point in points}
    assert list(by_noise) == [0, 1e-3, 1]
    scores = [point["psnr_median"] for point in points]
    assert scores[0] > 60 > scores[1] > 30 > 15 > scores[2]
    assert [point["verdict"] for point in points] == ["recovered", "recovered", "ambiguous"]
    assert by_noise[0]["epsilon"] is None
    bound = guarantee(Independent(1), Participation(1), noise_multiplier=1.0)
    assert by_noise[1]["epsilon"] == bound.epsilon(1e-5)
    assert (out / "defences.png").read_bytes().startswith(b"\x89PNG")


def test_the_table(finished):
    text = " ".join(finished[1].stdout.split())
    assert "4.378 " in text  # rounded up
    assert "infinite" in text
    assert text.count("safe") == text.count("is not 'safe'") == 1


def test_the_same_command_goes_on_where_it_was(privpart, finished, tmp_path):
    out, first = finished
    lines = privpart(*SWEEP, *NOISES, "--out", str(out), "--format", "csv").stdout.splitlines()
    assert lines[0].startswith("clip,noise_multiplier,epsilon,delta,verdict,psnr_median")
    assert len(lines) == 1 + 3
    trials = sorted(out.glob("trials/*.safetensors"))
    assert len(trials) == 3
    trials[0].unlink()
    before = {path: path.stat().st_mtime_ns for path in trials[1:]}
    content = (out / "defences.json").read_text()
    again = privpart(*SWEEP, *NOISES, "--out", str(out))
    assert again.stdout == first.stdout
    assert (out / "defences.json").read_text() == content
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())
    (tmp_path / "settings.toml").write_text("seed = 1")
    settings = ("--settings", str(tmp_path / "settings.toml"))
    other = privpart(*SWEEP, *NOISES, "--out", str(out), *settings)
    assert (other.returncode, "holds another audit" in other.stderr) == (2, True)


def test_a_sweep_in_which_every_attack_failed_says_that_nothing_follows(
    privpart, finished, monkeypatch
):
    out, first = finished
    assert "nothing follows" not in first.stderr
    swept = attacks.defences

    def fails(*arguments, **options):
        return [replace(p, verdict="attack failed") for p in swept(*arguments, **options)]

    monkeypatch.setattr(attacks, "defences", fails)
    told = privpart(*SWEEP, *NOISES, "--out", str(out))
    assert "the attack failed at every clip and noise: nothing follows" in told.stderr


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        (["--clip", "0"], "--clip 0: must be positive"),
        (["--clip", "nan"], "--clip nan"),
        (["--noise-multiplier", "-1"], "--noise-multiplier -1"),
        (["--noise-multiplier", "inf"], "--noise-multiplier inf"),
        (["--trials", "0"], "--trials 0"),
        (["--view", "dense9.*"], "matches no parameter"),
        (["--model", "vgg"], "--model 'vgg'"),
    ],
)
def test_bad_input_is_one_sentence(monkeypatch, capsys, tmp_path, changed, fault):
    monkeypatch.setattr(sys, "argv", ["privpart", *SWEEP, "--out", str(tmp_path), *changed])
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as done:
        main()
    torch.set_num_threads(threads)
    assert done.value.code == 2
    out, err = capsys.readouterr()
    assert fault in " ".join(err.split())
    assert out == ""
