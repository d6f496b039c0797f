"""Verdicts are the same whatever the processor can do, and on any number of threads.

test_sameness moves single roundings in one process; here whole audits run in their own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

AUDITS = Path(__file__).with_name("audits_by_processor.py")
PROCESSORS = {
    "default": {"ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "compatible": {"MKL_CBWR": "COMPATIBLE"},
}


def verdicts(settings, threads):
    counts = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    counts |= {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that spin wait long on a busy machine
    paths = os.pathsep.join([str(AUDITS.parent), str(AUDITS.parents[2])])
    done = subprocess.run(
        [sys.executable, AUDITS],
        env=os.environ | settings | counts | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_verdicts_are_equal_on_three_processors_and_one_two_and_four_threads():
    found = {
        (name, threads): verdicts(settings, threads)
        for name, settings in PROCESSORS.items()
        for threads in (1, 2, 4)
    }
    first = found["default", 1]
    assert len(first) == 16
    assert {verdict for of_case in first.values() for verdict in of_case} >= {
        "recovered",
        "partial",
        "void",
    }
    different = {
        (*setting, case): (first[case], of_case[case])
        for setting, of_case in found.items()
        for case in first
        if of_case[case] != first[case]
    }
    assert not different
