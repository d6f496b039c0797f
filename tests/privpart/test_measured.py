"""Measured step: what a process of its own reports about one local step."""

import sys

import pytest

from privpart import LocalTraining
from privpart.training import measured_step as measured
from privpart.training.measured_step import measured_step

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux resets a process's peak memory"
)


MODEL = 20_002_000  # bytes of 5,000,500 numbers


def test_a_step_holds_at_least_the_model_and_its_gradients():
    step = measured_step("bag_of_words", ["*"], local=LocalTraining(0.1, batch_size=2), repeats=3)
    assert len(step.seconds) == 3
    assert 0 < min(step.seconds) <= step.median_seconds <= max(step.seconds)
    # the model, its gradients, the values as received and the update, which is gone after the step;
    # and nowhere near what the process holds beside them
    assert 4 * MODEL < step.peak_bytes < 8 * MODEL


def test_what_building_the_model_took_is_no_part_of_a_step(monkeypatch):
    both, child = iter(("times", "memory")), measured._child

    def memory_only(*job):  # a process less
        return child(*job) if next(both) == "memory" else {"seconds": [1.0]}

    monkeypatch.setattr(measured, "_child", memory_only)
    local = LocalTraining(0.1, batch_size=2)
    step = measured_step("bag_of_words", ["*.bias"], local=local, repeats=1)
    assert MODEL < step.peak_bytes < 2 * MODEL  # building it took 3
