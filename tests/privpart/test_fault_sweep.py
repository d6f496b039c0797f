"""A fault at every system call of a run on disk, then the run resumed: see fault_sweep.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import syscalls

pytestmark = pytest.mark.skipif(not syscalls.AVAILABLE, reason="traces Linux on x86-64 only")


def swept(*tasks: str) -> dict[str, dict]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fault_sweep.py")), *tasks],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_fault_at_any_call_loses_or_repeats_anything():
    """Bit-identical ends in seeded mode; in secret mode never one noise under two sums."""
    found = swept("seeded:power=16", "secret:power=4", "closed:power=4:errors=40")
    assert not any(result["faults"] for result in found.values()), found
    for result in found.values():
        assert result["counts"]["kill"] > 100
    assert found["seeded"]["counts"]["power loss"] > 900


def test_the_sweep_notices_what_it_looks_for():
    """Each defect is one that a version of this code could have."""
    found = swept("released first:power=0", "one salt:power=0", "unsynced:power=3")
    assert "two models of round" in str(found["released first"]["faults"])
    assert "one noise under two sums" in str(found["one salt"]["faults"])
    assert "power loss: 2 rounds were committed, 0 are left" in found["unsynced"]["faults"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        "seeded:power=400:twice=20:errors=1",
        "seeded groups:power=60:errors=7",
        "secret:power=200:twice=20:errors=1",
        "closed:power=200:twice=20:errors=1",
    ],
)
def test_no_fault_does_at_length(task):
    (result,) = swept(task).values()
    assert not result["faults"], result
