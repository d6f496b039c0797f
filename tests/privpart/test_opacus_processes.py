"""Several processes of one machine: one sum, one noise, and what one cannot do none does."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loops import BATCH, CLIP, net, private, sampled, step, steps_of, train

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
SCRIPT = Path(__file__).parent / "two_processes.py"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What each of two processes saw, by case."""
    folder = tmp_path_factory.mktemp("two")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, folder], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_processes_take_the_steps_of_one(both):
    for case, made in (("fixed", private(noise_multiplier=50.0)), ("samples", None)):
        alone = made or sampled(noise_multiplier=50.0)
        expected = train(*alone[1:]) if made else steps_of(alone)
        first, second = (found[case] for found in both)
        assert torch.equal(first["weights"], second["weights"])
        assert torch.equal(first["noised"], second["noised"])
        # each rounds to steps of the grid, of CLIP * 50 / 2^20
        assert (first["noised"] - expected).norm(dim=1).max() < 1e-3
    assert both[0]["fixed"]["epsilon"] == private(noise_multiplier=50.0)[0].epsilon(1e-5)


@pytest.mark.parametrize(("case", "whole"), [("fixed", True), ("noise_by_each", False)])
def test_the_noise_of_two_processes_is_the_accountants_once(both, case, whole):
    beside = both[0][case]["beside"]
    assert bool((beside <= BATCH * CLIP + 1e-3).all()) == whole


def test_each_example_of_a_sample_is_in_one_process(both):
    first, second = (found["samples"] for found in both)
    whole = torch.tensor(first["own"]) + torch.tensor(second["own"])
    assert torch.equal(whole, first["sizes"])
    # some steps are of one process's examples alone, some of nobody's
    assert ((torch.tensor(second["own"]) == 0) & (first["sizes"] > 0)).any()
    assert (first["sizes"] == 0).any()
    assert (first["beside"] <= first["sizes"] * CLIP + 1e-3).all()


def test_parts_of_a_batch_in_each_process(both):
    made = private()
    train(*made[1:])
    expected = torch.cat([p.detach().reshape(-1) for p in made[1].parameters()])
    assert torch.allclose(both[0]["parts"]["weights"], expected, atol=1e-5)
    assert torch.equal(both[0]["parts"]["weights"], both[1]["parts"]["weights"])


def test_a_run_of_two_is_resumed_and_reported(both):
    module = net()
    own = torch.optim.Adam(module.parameters(), lr=0.1)
    slower = torch.optim.lr_scheduler.StepLR(own, 2, gamma=0.5)
    made = private(module, optimizer=own, scheduler=slower)
    for _ in range(3):
        for batch in made[3]:
            step(*made[1:3], batch)
    expected = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    first, second = (found["resumed"] for found in both)
    assert torch.allclose(first["seeded"], expected, atol=1e-4)
    for name in ("seeded", "secret"):
        assert torch.equal(first[name], second[name])
    assert first["complete"]
    assert first["words"]["participation"] == "verified"
    assert first["words"]["clipping"] == first["words"]["noise"] == "enforced"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other_arguments", ("different arguments", "different arguments")),
        ("refused", ("process 1 of 2 stopped", "max_grad_norm")),
        ("fault", ("process 1 of 2 stopped", "examples, and the batch has")),
        ("disk_is_full", ("full", "process 0 of 2 stopped")),
    ],
)
def test_what_one_cannot_do_none_does(both, case, words):
    for found, text in zip(both, words, strict=True):
        assert text in found[case]["says"]
        assert found[case].get("same", True)
        assert found[case].get("drawn", 0) == 0
