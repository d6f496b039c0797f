"""Hypothesis: the same examples on every machine, and no deadline on a shared one."""

import os

import pytest
from hypothesis import settings

# The tests run beside each other and start processes; several threads each make them wait for each
# other: a matrix decomposition then takes eight times as long. Before anything imports numpy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("ci", derandomize=True, database=None, deadline=None, max_examples=100)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _rollback_guards_of_tests_stay_out_of_the_home_directory(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path_factory.getbasetemp() / "witnesses"))


@pytest.fixture(autouse=True)
def _fits_of_tests_stay_out_of_the_home_directory(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PRIVPART_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
