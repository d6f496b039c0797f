"""Kill -9 before every system call of every commit, then resume: see crash_driver.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("crash_driver.py")


def killed_everywhere(mode: str, folder: Path) -> dict:
    done = subprocess.run(
        [sys.executable, str(DRIVER), mode, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["killed"] == result["calls"] > 30
    return result


@pytest.mark.parametrize("mode", ["seeded", "seeded-groups"])
def test_a_seeded_run_ends_bit_identical_wherever_it_was_killed(mode, tmp_path):
    """Also one whose layers take turns, killed between the turns."""
    assert killed_everywhere(mode, tmp_path)["bit_identical"]


def test_secret_noise_is_never_released_with_two_sums(tmp_path):
    result = killed_everywhere("secret", tmp_path)
    assert result["conflicts"] == 0
    assert result["ends"] > 1  # clients answer differently each time, so this could fail


@pytest.mark.slow
def test_the_journal_notices_a_release_before_the_commit(tmp_path):
    assert killed_everywhere("released-first", tmp_path)["conflicts"] > 0
