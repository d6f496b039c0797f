"""``privpart audit leakage``: verdicts, exit codes, levels, resuming, updates of one's own."""

import csv
import json
import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
from page_checks import page_text
from safetensors.torch import save_file

from accounting import ConfigError, Independent, Participation, guarantee
from attacks import LocalSteps, observe
from attacks.networks import smooth_lenet
from privpart.cli.audit.image_inputs import image_audit
from privpart.cli.audit.inputs import digest
from privpart.cli.audit.leakage_gate import judged, read_limit, write_junit
from privpart.cli.audit.options import LeakageOptions
from privpart.cli.audit.store import TrialFolder, writing
from privpart.data.tasks import digits

QUICK = ["--model", "lenet", "--data", "digits", "--effort", "quick", "--attack", "dlg"]


MODELS = """
import torch
from attacks.networks import smooth_lenet
def lenet28(): return smooth_lenet(torch.Generator().manual_seed(0), size=28)
def two_classes(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
"""


def settings(folder, *lines):
    """Write these lines into a file, and return the option that names it."""
    path = folder / "settings.toml"
    path.write_text("\n".join(lines))
    return "--settings", str(path)


def test_a_recovered_image_fails_the_job_and_the_report_tells_each_attack(privpart, tmp_path):
    out, views = (
        tmp_path / "new",
        ["--view", "full", "--view", "conv2.*", "--view", "head=dense2.*"],
    )
    command = ["audit", "leakage", *QUICK, *views, "--trials", "1", "--out", str(out)]
    done = privpart(*command, "--fail-on", "recovered")
    assert done.returncode == 4, done.stderr
    assert "view conv2.*, adversary server: the verdict is 'recovered' or more" in done.stderr
    assert (out / "leakage.png").read_bytes().startswith(b"\x89PNG")
    text = " ".join(done.stdout.split())
    assert "Attack by attack" in text
    assert text.count("safe") == text.count("'ambiguous' is not 'safe'") == 1
    report = json.loads((out / "report.json").read_text())
    assert report["schema"] == "privpart/leakage/3"
    rows = {row["view"]: row for row in report["rows"]}
    verdicts = {"full": "recovered", "conv2.*": "recovered", "head": "ambiguous"}
    assert {view: row["verdict"] for view, row in rows.items()} == verdicts
    assert rows["head"]["by_attack"]["dlg"]["verdicts"] == {
        **{"recovered": 0, "partial": 0, "no gain": 0},
        **{"ambiguous": 1, "attack failed": 0, "nothing sent": 0, "void": 0},
    }
    assert rows["head"]["reid_rank"] == [1]
    assert set(report["baselines"]) == {"grey", "noise", "dataset mean", "class mean"}
    assert set(report["oracles"]) == {"own mean"}
    cases = ET.parse(out / "junit.xml").iter("testcase")
    failed = {case.get("name") for case in cases if case.find("failure") is not None}
    assert failed == {f"view {view}, adversary server" for view in ("full", "conv2.*")}
    (out / "report.json").rename(tmp_path / "baseline.json")
    done = privpart(*command, "--format", "csv", "--fail-on", str(tmp_path / "baseline.json"))
    assert done.returncode == 0, done.stderr
    lines = list(csv.DictReader(done.stdout.splitlines()))
    assert {line["view"]: line["verdict"] for line in lines} == verdicts
    assert float(lines[0]["psnr_median"]) > 60


BASELINE = {"a": "partial", "b": "ambiguous", "c": "attack failed", "d": "recovered"}


@pytest.mark.parametrize(
    ("now", "failures"),
    [
        (BASELINE, {}),
        (BASELINE | {"a": "no gain", "d": "ambiguous"}, {}),
        (BASELINE | {"b": "no gain"}, {"b": "no gain, and ambiguous in the baseline"}),
        (BASELINE | {"c": "void"}, {"c": "void, so nothing follows any more"}),
        (BASELINE | {"d": "attack failed"}, {"d": "attack failed, so nothing follows"}),
        (BASELINE | {"e": "ambiguous"}, {"e": "the baseline has no such row"}),
        ({"a": "partial"}, dict.fromkeys("bcd", "was not audited")),
    ],
)
def test_a_view_fails_that_is_worse_than_in_the_baseline_or_no_longer_audited(
    now, failures, tmp_path
):
    def rows(verdicts):
        return [{"view": view, "verdict": verdict} for view, verdict in verdicts.items()]

    path = tmp_path / "baseline.json"
    path.write_text(json.dumps({"rows": rows(BASELINE)}))
    results = judged(rows(now), read_limit(str(path)))
    failed = {row.name: row.failure for row in results if row.failure}
    assert failed.keys() == {f"view {view}" for view in failures}
    assert all(why in failed[f"view {view}"] for view, why in failures.items())
    write_junit(results, "images", tmp_path / "junit.xml")
    suite = ET.parse(tmp_path / "junit.xml").getroot()
    assert int(suite.get("failures")) == len(failures) == len(list(suite.iter("failure")))


def test_no_other_file_is_a_baseline(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "not.json").write_text("{")
    (tmp_path / "other.json").write_text('{"rows": []}')
    (tmp_path / "deep.json").write_text("[" * 10**5)
    (tmp_path / "words.json").write_text('{"rows": [{"view": "a", "verdict": ["safe"]}]}')
    for name in ("pipe", "not.json", "other.json", "deep.json", "words.json", ".", "no gain"):
        typed = name if name == "no gain" else str(tmp_path / name)
        with pytest.raises(ConfigError, match="fail_on="):
            read_limit(typed)


def test_a_mistyped_option_does_not_occupy_the_folder(tmp_path):
    TrialFolder(tmp_path, {"view": ["dense9.*"]}, "0")
    right = TrialFolder(tmp_path, {"view": ["dense1.*"]}, "0")
    right["key"] = {}
    with pytest.raises(ConfigError, match="another audit"):
        TrialFolder(tmp_path, {"view": ["dense9.*"]}, "0")
    assert TrialFolder(tmp_path, {"view": ["dense1.*"]}, "0")["key"] == {}


def test_a_full_disk_is_one_sentence():
    with pytest.raises(ConfigError, match=r"on device\. The same"), writing(Path("out")):
        raise OSError(28, "No space left on device")


def test_interrupted_and_resumed_is_as_if_undisturbed(privpart, tmp_path, monkeypatch):
    out, straight = tmp_path / "cut", tmp_path / "straight"
    command = ["audit", "leakage", *QUICK, "--view", "conv2.*", "--trials", "3", "--out"]
    keep = TrialFolder.__setitem__

    def keep_two(folder, key, results):
        keep(folder, key, results)
        if len(folder) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrialFolder, "__setitem__", keep_two)
        cut = privpart(*command, str(out))
    assert (cut.returncode, cut.stdout) == (130, "")
    assert "resumes from there" in cut.stderr
    kept = {path: path.stat().st_mtime_ns for path in out.glob("trials/*.safetensors")}
    assert len(kept) == 2
    torn = next(iter(kept))
    torn.write_bytes(b"torn")  # counts as not there
    assert privpart(*command, str(out)).returncode == 0
    assert privpart(*command, str(straight), "--fail-on", "ambiguous").returncode == 4
    assert all(path.stat().st_mtime_ns == at for path, at in kept.items() if path != torn)
    ours, theirs = (
        [row | {"seconds": 0} for row in json.loads((folder / "report.json").read_text())["rows"]]
        for folder in (out, straight)
    )
    assert ours == theirs


def test_noise_hides_and_epsilon_is_the_accountants(privpart, tmp_path):
    command = ["audit", "leakage", *QUICK, "--view", "conv2.*", "--trials", "1"]
    command += ["--clip", "0.1,0.1", "--out", str(tmp_path), "--noise-multiplier"]
    done = privpart(*command, "0,1e-3,1", "--html", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    points = json.loads((tmp_path / "defences.json").read_text())["points"]
    assert [point["noise_multiplier"] for point in points] == [0, 1e-3, 1]
    scores = [point["psnr_median"] for point in points]
    assert scores[0] > 60 > scores[1] > 30 > 15 > scores[2]
    assert [point["verdict"] for point in points] == ["recovered", "recovered", "ambiguous"]
    bound = guarantee(Independent(1), Participation(1), noise_multiplier=1.0)
    assert [point["epsilon"] for point in points][::2] == [None, bound.epsilon(1e-5)]
    assert (tmp_path / "defences.png").read_bytes().startswith(b"\x89PNG")
    assert "What the update gives away" in page_text((tmp_path / "page.html").read_text())
    text = " ".join(done.stdout.split())
    assert "4.378 " in text  # rounded up
    assert "infinite" in text
    assert text.count("safe") == text.count("is not 'safe'") == 1
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("trials/*.safetensors")}
    assert len(before) == 3
    again = privpart(*command, "0,1e-3,1", "--format", "csv", "--fail-on", "partial")
    assert again.returncode == 4
    lines = again.stdout.splitlines()
    assert lines[0].startswith("clip,noise_multiplier,epsilon,delta,verdict,psnr_median")
    assert len(lines) == 1 + 3
    assert all(path.stat().st_mtime_ns == at for path, at in before.items())
    before = (tmp_path / "defences.json").read_bytes()
    other = privpart(*command, "0,1")
    assert (other.returncode, "holds another audit" in other.stderr) == (2, True)
    assert (tmp_path / "defences.json").read_bytes() == before


def test_an_update_of_ones_own(privpart, tmp_path):
    task, network = digits(), smooth_lenet(torch.Generator().manual_seed(0))
    x, y = task.test_x[:1], task.test_y[:1]
    seen = observe(network, x, y, local=LocalSteps(learning_rate=0.1, steps=2))
    wrapped = {f"_module.{name}": v.float() for name, v in seen.update.items()}
    save_file(wrapped, tmp_path / "update.safetensors")
    command = ["audit", "leakage", *QUICK, "--view", "full"]
    command += ["--format", "json", "--gradient", str(tmp_path / "update.safetensors"), "--out"]
    done = privpart(*command, str(tmp_path / "out"), *settings(tmp_path, "local_steps = 2"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["threat"]["origin"] == "given"
    assert report["threat"]["update"] == "delta"
    assert report["rows"][0]["verdict"] == "recovered"
    assert report["rows"][0]["truth_match_max"] < 1e-9
    other = privpart(
        *(*command, str(tmp_path / "other")),
        *settings(tmp_path, "local_steps = 2", "learning_rate = 0.2"),
        *("--fail-on", "ambiguous", "--format", "table"),
    )
    assert other.returncode == 5
    assert "void: the given images do not explain" in " ".join(other.stderr.split())
    assert "another loss or learning rate" in " ".join(other.stderr.split())
    assert "safe" not in other.stdout.replace("is not 'safe'", "")
    kept = json.loads((tmp_path / "other" / "report.json").read_text())
    assert (kept["verdict"], kept["rows"][0]["psnr_max"]) == ("void", None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_an_update_of_a_type_that_numpy_does_not_have(tmp_path, dtype):
    image = digits().test_x[:1]
    sent = observe(smooth_lenet(torch.Generator().manual_seed(0)), image, digits().test_y[:1])
    path = tmp_path / "narrow.safetensors"
    save_file({name: value.to(dtype) for name, value in sent.update.items()}, path)
    inputs = image_audit(
        LeakageOptions(out=tmp_path, model="lenet", data="digits", view=["full"], gradient=path)
    )
    assert torch.equal(
        inputs.update["conv1.bias"].double(), sent.update["conv1.bias"].to(dtype).double()
    )
    assert len(digest(inputs)) == 64


def test_images_of_a_file_that_are_not_attacked_are_public(tmp_path):
    x, y = digits().test_x[:5].double(), torch.tensor([1, 0, 1, 0, 50_000])
    save_file({"x": x, "y": y}, tmp_path / "images.safetensors")
    options = {"out": tmp_path, "model": "lenet", "view": ["full"], "trials": 2}
    audit = image_audit(LeakageOptions(data=str(tmp_path / "images.safetensors"), **options))
    assert torch.equal(audit.decoys[0], x[2:].float())
    assert torch.equal(audit.public[0], x[2:].float())
    assert torch.equal(audit._guesses["dataset mean"][0], x[2:].float().double().mean(0))
    assert torch.equal(audit.class_means, x[2:4].float())  # not one for each label below 50,000


def test_files_of_other_libraries_are_read_and_said_and_refused_in_one_sentence(privpart, tmp_path):
    """Weights of Keras, and an update of a compiled model in a checkpoint of torch."""
    task, network = digits(), smooth_lenet(torch.Generator().manual_seed(5))
    weights = network.state_dict().values()
    keras = [v.permute(*range(2, v.ndim), 1, 0) if v.ndim > 1 else v for v in weights]
    np.savez(tmp_path / "w.npz", *[value.numpy() for value in keras])
    np.savez(tmp_path / "x.npz", x=task.test_x[:4].numpy(), y=task.test_y[:4].numpy())
    sent = {
        f"_orig_mod.{n}": v
        for n, v in observe(network, task.test_x[:1], task.test_y[:1]).update.items()
    }
    torch.save({"epoch": 1, "update": sent}, tmp_path / "u.pt")
    command = ["audit", "leakage", *QUICK, "--view", "full", "--format", "json"]
    command += ["--data", str(tmp_path / "x.npz"), "--gradient", str(tmp_path / "u.pt")]
    done = privpart(*command, "--weights", str(tmp_path / "w.npz"), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    said = " ".join(report["threat"]["read"])
    for part in (
        "in the order of the state_dict",
        "layout of Keras",
        "'update' in a",
        "'_orig_mod",
    ):
        assert part in said
        assert part in done.stderr
    assert report["rows"][0]["verdict"] == "recovered"
    torch.save({"conv1.bias": torch.ones(3)}, tmp_path / "u.pt")
    np.savez(tmp_path / "w.npz", np.ones(3))
    done = privpart(*command, "--weights", str(tmp_path / "w.npz"), "--out", str(tmp_path / "two"))
    assert done.returncode == 2
    assert "--weights" in done.stderr
    assert "1 arrays without names" in done.stderr
    assert "gradient" in done.stderr
    assert "has shape (3,), not (8,)" in done.stderr


def test_weights_before_and_after(privpart, tmp_path):
    task, network = digits(), smooth_lenet(torch.Generator().manual_seed(5))
    local = LocalSteps(learning_rate=0.1, steps=2)
    seen = observe(network, task.test_x[:1], task.test_y[:1], local=local)
    before = {name: value.double() for name, value in network.state_dict().items()}
    after = {name: value + seen.update[name] for name, value in before.items()}
    np.savez(tmp_path / "before.npz", *(value.numpy() for value in before.values()))
    save_file(after, tmp_path / "after.safetensors")
    command = ["audit", "leakage", *QUICK, "--view", "full", "--format", "json", "--out"]
    command += [str(tmp_path / "out"), "--gradient", str(tmp_path / "after.safetensors")]
    before = f'before = "{tmp_path / "before.npz"}"'
    refused = privpart(*command, *settings(tmp_path, before))
    assert (refused.returncode, "say how the client trained" in refused.stderr) == (2, True)
    save_file({"conv1.bias": torch.full((8,), torch.nan)}, tmp_path / "nan.safetensors")
    nan = f'before = "{tmp_path / "nan.safetensors"}"'
    refused = privpart(*command, *settings(tmp_path, nan, "local_steps = 2"))
    assert "before=" in refused.stderr.splitlines()[-1]
    done = privpart(*command, *settings(tmp_path, before, "local_steps = 2"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0]["verdict"] == "recovered"


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        (["--view", "dense9.*"], "--view 'dense9.*': matches no parameter"),
        (["--view", "=dense1.*"], "must have a name"),
        (["--model", "vgg"], "--model 'vgg': must be lenet"),
        (["--model", "no_such_module:build"], "must be importable"),
        (["--data", "nothing.safetensors"], "cannot be read"),
        (["--data", "photos"], "--data 'photos'"),
        (["--trials", "0"], "--trials 0"),
        (["--trials", "100000"], "there are 360"),
        (["--attack", "magic"], "must be one of"),
        (["--noise-multiplier", "1"], "without --clip: noise has no scale; add --clip"),
        (["--clip", "1", "--noise-multiplier", "nan"], "--noise-multiplier nan"),
        (["--clip", "1", "--noise-multiplier", "0,-1"], "--noise-multiplier -1"),
        (["--clip", "1,0"], "--clip 0: must be positive"),
        (["--clip", "1;2"], "--clip '1;2': must be a number, or several as 0.1,1"),
        (["--clip", "1,2", "--view", "head=dense2.*"], "a sweep is of one view, not of 2"),
        (["--model", "attacks.networks:smooth_lenet"], "build a model without arguments"),
        (["--model", "torch.nn:Identity"], "gives (2, 1, 8, 8) for 2 images of 10 classes"),
        (["--model", "models_of_others:lenet28"], "does not take images of shape (1, 8, 8)"),
        (["--model", "models_of_others:two_classes"], "with K at least 10"),
        (["--data", "bytes.safetensors"], "in [0, 1] (divide bytes by 255)"),
        (["--data", "oblong.safetensors"], "needs square images"),
        (["--batch", "0"], "--batch 0"),
        (["--clip", "1", "--noise-multiplier", "1e300"], "must be above 1e-100 and below 1e+100"),
        (["--data", "many.safetensors"], "y must be whole numbers from 0, and below 100000"),
        (["--data", "half.safetensors"], "y must be whole numbers from 0"),
        (["--data", "empty.safetensors"], "x (3, 0, 8, 8), y (3,); must be real images"),
        (["--weights", "nan.safetensors"], "'conv1.bias' has values that are not finite"),
        (["--weights", "pipe"], "pipe: is not a file"),
        (
            ["--out", "taken", "--trials", "1"],
            "--out taken: cannot be written: Is a directory: taken/report.json",
        ),
        ("local_steps = -1", "local_steps: Input should be greater than or equal to 0"),
        ("local_steps = 100000000", "local_steps=100000000: must be at most 1000"),
        ("local_steps = 3\nlearning_rate = 1e300", "learning_rate=1e+300: must be above 1e-100"),
        ("local_steps = 2\nmomentum = 1", "and below 1"),
        ("momentum = 0.9", "local_steps = 0: sends a gradient; leave out momentum"),
        ('local_steps = 2\noptimizer = "adam"\nmomentum = 0.0', "leave out momentum"),
        ("delta = 2", "delta: Input should be less than 1"),
        ("delta = 1e-5", "noise_multiplier = 0: has no epsilon; leave out delta"),
        (f"seed = {2**63 - 1}", "must be at most 92233720368547757"),
        ('mode = "eval"\nsend_buffers = true', "mode = eval: statistics are not those of"),
        ("send_buffers = true", "has no buffers; leave out send_buffers"),
        ('before = "w.npz"\nlocal_steps = 1', "the weights after the round are missing"),
        ('data_dir = "x"', "is not read from a folder; leave out data_dir"),
        ("pad = 0", "tokens = None: a plan has its own; leave out pad"),
        ('words = "vocab.txt"', "leave out words"),
        ("length = 8", "leave out length"),
        ('optimizer = "lion"', "optimizer: Input should be 'sgd', 'adam' or 'adamw'"),
        ('local_steps = "2"', "local_steps: Input should be a valid integer"),
        ("view = 3", "view: no such key. The nearest is "),
        ("seed =", "is not valid TOML: Invalid value"),
    ],
)
def test_bad_input_is_one_sentence(privpart, monkeypatch, tmp_path, changed, fault):
    base = ["audit", "leakage", *QUICK, "--view", "full", "--out", str(tmp_path / "out")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "models_of_others", raising=False)  # an earlier test's
    (tmp_path / "models_of_others.py").write_text(MODELS)
    y = torch.tensor([0, 1, 2])
    save_file({"x": 255 * torch.ones(3, 1, 8, 8), "y": y}, tmp_path / "bytes.safetensors")
    oblong = {"x": torch.ones(12, 1, 8, 12), "y": y.repeat(4)}
    save_file(oblong, tmp_path / "oblong.safetensors")
    x = torch.ones(3, 1, 8, 8)
    save_file({"x": x, "y": 10**12 * y}, tmp_path / "many.safetensors")
    save_file({"x": x, "y": y + 0.5}, tmp_path / "half.safetensors")
    save_file({"x": x[:, :0].contiguous(), "y": y}, tmp_path / "empty.safetensors")
    save_file({"conv1.bias": torch.full((8,), torch.nan)}, tmp_path / "nan.safetensors")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "taken" / "report.json").mkdir(parents=True)
    done = privpart(*base, *(settings(tmp_path, changed) if type(changed) is str else changed))
    assert (done.returncode, done.stdout) == (2, "")
    assert fault in done.stderr.splitlines()[-1]


def test_transforms_are_declared_and_a_job_may_fail_where_nothing_follows(privpart, tmp_path):
    plain = ["audit", "leakage", *QUICK[:4], "--view", "full", "--trials", "1"]
    for name, transforms, options, verdict in (
        ("summed", ["bits:8", "sum:2"], QUICK[4:], "recovered"),
        ("unread", ["signs"], ["--attack", "invert_dense"], "attack failed"),
    ):
        declared = [word for kind in transforms for word in ("--transform", kind)]
        out = ["--out", str(tmp_path / name), "--fail-on", "attack failed"]
        done = privpart(*plain, *options, *declared, *out)
        assert done.returncode == 4, done.stderr
        report = json.loads((tmp_path / name / "report.json").read_text())
        assert (report["verdict"], report["threat"]["transform"]) == (verdict, transforms)
        text = " ".join(done.stdout.split())
        assert f"{', '.join(transforms)}, no clip" in text
        assert ("sum over clients" in text) == (name == "summed")
    done = privpart(*plain, "--transform", "zip", "--out", str(tmp_path / "wrong"))
    assert done.returncode == 2
    assert "--transform 'zip': must be one of top-k:0.1" in done.stderr
