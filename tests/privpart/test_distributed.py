"""Ranks of torch.distributed: two processes that speak over gloo, as two devices would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch

from accounting import ConfigError
from privpart.engines.distributed import DistributedEngine

HERE = Path(__file__).parent


def run_two(folder, *what):
    """Return the committed models of rank 0, and what each of the two ranks wrote."""
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    line = [sys.executable, str(HERE / "ranks.py")]
    both = [
        subprocess.Popen(
            [*line, str(rank), str(folder / "meeting"), str(folder), *what],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=300)[1] for process in both]
    return torch.load(folder / "committed.pt"), said


def in_one_process():
    return ranks.trained(*ranks.parts())


def test_a_rank_that_dies_ends_the_round_and_what_was_committed_is_that_of_one_process(tmp_path):
    committed, (said, _) = run_two(tmp_path, "die")
    assert len(committed) == 1
    assert torch.equal(committed[0], in_one_process()[0])
    assert "WorkerError: rank 1 was lost" in said
    assert "again: the process group is out of step: start all ranks again." in said


@pytest.mark.slow
def test_two_ranks_train_the_model_of_one_process(tmp_path):
    committed, said = run_two(tmp_path)
    assert all(map(torch.equal, committed, in_one_process()))
    assert len(committed) == len(ranks.COHORTS)
    assert said == ["", ""]


@pytest.mark.slow
def test_a_rank_that_fails_says_why_and_nothing_of_its_round_is_committed(tmp_path):
    committed, (said, other) = run_two(tmp_path, "fail")
    assert len(committed) == 1
    assert "WorkerError: rank 1: this one is broken" in said
    assert "WorkerError: this one is broken" in other


def test_without_a_process_group_it_says_what_to_do():
    with pytest.raises(ConfigError, match=r"init_process_group first.*torchrun"):
        DistributedEngine(ranks.parts()[1])
