"""The studies of pretrained bodies: their networks, how files are made, and their arms."""

import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from privpart.noise.source import SeededSource
from privpart.study.study_file import read_study
from privpart.training.training import training

IMAGES = Path(__file__).parent.parent / "examples" / "pretrained_images"
TRAINED = {f"{body}-{part}": parameters for body in ("pretrained", "random")
           for part, parameters in (("head", 3_210), ("tail", 106_250))}  # fmt: skip
PARTS = ("users", "public", "test")
BODY = {"full": 76_037, "head": 485, "last-block": 19_493, "biases": 1_541, "adapters": 5_405,
        "lora-1": 1_637, "lora-4": 5_093, "lora-16": 18_917}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch, fresh_code):
    """Copy the example, with made-up outputs of the bodies in place of its files."""
    ignored = shutil.ignore_patterns("*.npz", "*.safetensors")
    monkeypatch.syspath_prepend(tmp_path / "images")
    return Path(shutil.copytree(IMAGES, tmp_path / "images", ignore=ignored))


def test_the_network_and_the_files_that_follow_from_it(folder):
    prepare = runpy.run_path(str(folder / "prepare.py"))
    network = prepare["Lite0"]()
    assert sum(p.numel() for p in network.parameters()) == 4_652_008 - 1_281_000
    images = torch.rand(6, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    wide = prepare["enlarged"](images)
    assert wide.shape == (6, 3, 64, 64)
    assert -1 <= float(wide.min()) < float(wide.max()) <= 1
    body, again = prepare["random"](wide), prepare["random"](wide)
    assert all(map(torch.equal, body.parameters(), again.parameters()))
    with torch.no_grad():
        assert body.body(wide).shape == (6, 320, 2, 2)
        alone = body(wide[:1])
        # running statistics: an image's outputs do not depend on the others
        assert torch.allclose(alone, body(wide)[:1], atol=1e-4)
    found = prepare["outputs"]([network, body], images)
    assert found.shape == (6, 2, 320)
    assert found.dtype == np.float16
    kept = prepare["tail"](body)
    assert torch.equal(kept["widen.weight"], body._conv_head.weight[::4, :, 0, 0])
    tail = runpy.run_path(str(folder / "network.py"))["Tail"](1, 320, 320, 10)
    lacks = tail.load_state_dict(kept, strict=False)
    assert (lacks.missing_keys, lacks.unexpected_keys) == (["head.weight", "head.bias"], [])


def test_arms_train_what_they_say_from_their_own_weights(folder):
    """Each starts from the weights of its body, moves its own part, and reads its own outputs."""
    rng = np.random.default_rng(0)
    counts = {"train": 40, "public": 40, "test": 40}
    np.savez(
        folder / "outputs.npz",
        **{f"{part}_x": rng.random((n, 2, 320), np.float32) for part, n in counts.items()},
        **{f"{part}_y": rng.integers(0, 10, n) for part, n in counts.items()},
    )
    shapes = {"widen.weight": (320, 320)} | {
        f"norm.{name}": (320,) for name in ("weight", "bias", "running_mean", "running_var")
    }
    files = {}
    for name in ("pretrained", "random"):
        generator = torch.Generator().manual_seed(len(name))
        files[name] = {k: 0.5 + torch.rand(s, generator=generator) for k, s in shapes.items()}
        save_file(files[name], folder / f"{name}.safetensors")
    plan = (folder / "plan.toml").read_text().replace("rounds = 70", "rounds = 2")
    (folder / "plan.toml").write_text(plan.replace("per_round = 100", "per_round = 5"))
    study = read_study(folder / "study.toml")
    tested = {group.arm: group for group in study.groups if group.level != "none"}
    assert tested.keys() == TRAINED.keys()
    for arm, group in tested.items():
        body = arm.split("-")[0]
        setup = training(study.final_cells(group, study.points[0])[0].plan, report=lambda _: None)
        assert setup.model.dim == TRAINED[arm]
        assert len(setup.clients.ids) == 10
        module = setup.model.module
        assert torch.equal(module.widen.weight, files[body]["widen.weight"])
        assert torch.equal(module.norm.running_var, files[body]["norm.running_var"])
        x = torch.zeros(1, 2, 320)
        x[:, ("pretrained", "random").index(body)] = 1.0
        assert not torch.equal(module(x), module(torch.zeros_like(x)))
        assert torch.equal(module(1 - x), module(torch.zeros_like(x)))
        server, _ = setup.run(setup.promise(), SeededSource(0))
        assert torch.isfinite(server.parameters).all()
        assert (server.parameters != setup.first).float().mean() > 0.99


def test_arms_of_a_body_that_trains_change_nothing_before_they_train(
    tmp_path, fresh_code, monkeypatch
):
    """LoRA and adapters leave the pretrained network as it is; each arm has its own part."""
    folder = Path(shutil.copytree(IMAGES.parent / "pretrained_body", tmp_path / "body"))
    monkeypatch.syspath_prepend(folder)
    rng = np.random.default_rng(0)
    np.savez(
        folder / "images.npz",
        **{f"{part}_x": rng.integers(0, 256, (100, 196), np.uint8) for part in PARTS},
        **{f"{part}_y": rng.integers(0, 5, 100) for part in PARTS},
    )
    whole = runpy.run_path(str(folder / "network.py"))["Residual"]()
    kept = {n: w for n, w in whole.state_dict().items() if not n.startswith("head.")}
    save_file(kept, folder / "pretrained.safetensors")
    plan = (folder / "plan.toml").read_text().replace("rounds = 40", "rounds = 1")
    (folder / "plan.toml").write_text(plan)
    study = read_study(folder / "study.toml")
    x, features = torch.rand(4, 196, generator=torch.Generator().manual_seed(0)), {}
    for group in study.groups:
        if group.level != "8":
            continue
        setup = training(study.final_cells(group, study.points[0])[0].plan, report=lambda _: None)
        assert setup.model.dim == BODY[group.arm]
        setup.model.module.head = torch.nn.Identity()
        features[group.arm] = setup.model.module(x)
    assert features.keys() == BODY.keys()
    assert all(torch.allclose(own, features["full"], atol=1e-6) for own in features.values())
