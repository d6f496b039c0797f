"""``privpart audit defences``: one sweep as table, JSON and picture; resumed; bad input."""

import json
from dataclasses import replace

import pytest

import attacks
from accounting import Independent, Participation, guarantee

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
    text = " ".join(done.stdout.split())
    assert "4.378 " in text  # rounded up
    assert "infinite" in text
    assert text.count("safe") == text.count("is not 'safe'") == 1


def test_the_same_command_goes_on_where_it_was(privpart, finished, tmp_path, monkeypatch):
    out, first = finished
    swept = attacks.defences

    def fails(*arguments, **options):
        return [replace(p, verdict="attack failed") for p in swept(*arguments, **options)]

    with monkeypatch.context() as patch:
        patch.setattr(attacks, "defences", fails)
        done = privpart(*SWEEP, *NOISES, "--out", str(out), "--format", "csv")
    assert "nothing follows" not in first.stderr
    assert "the attack failed at every clip and noise: nothing follows" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("clip,noise_multiplier,epsilon,delta,verdict,psnr_median")
    assert len(lines) == 1 + 3
    trials = sorted(out.glob("trials/*.safetensors"))
    assert len(trials) == 3
    trials[0].unlink()
    before = {path: path.stat().st_mtime_ns for path in trials[1:]}
    again = privpart(*SWEEP, *NOISES, "--out", str(out))
    assert again.stdout == first.stdout
    points = json.loads((out / "defences.json").read_text())["points"]
    assert [point["verdict"] for point in points] == ["recovered", "recovered", "ambiguous"]
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())
    (tmp_path / "settings.toml").write_text("seed = 1")
    settings = ("--settings", str(tmp_path / "settings.toml"))
    other = privpart(*SWEEP, *NOISES, "--out", str(out), *settings)
    assert (other.returncode, "holds another audit" in other.stderr) == (2, True)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        (["--clip", "0"], "--clip 0: must be positive"),
        (["--clip", "nan"], "--clip nan"),
        (["--noise-multiplier", "-1"], "--noise-multiplier -1"),
        (["--noise-multiplier", "inf"], "--noise-multiplier inf"),
        (["--view", "dense9.*"], "matches no parameter"),
    ],
)
def test_bad_input_is_one_sentence(privpart, tmp_path, changed, fault):
    done = privpart(*SWEEP, "--out", str(tmp_path), *changed)
    assert (done.returncode, done.stdout) == (2, "")
    assert fault in " ".join(done.stderr.split())
