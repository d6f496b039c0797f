import os
from contextlib import nullcontext

import pytest
import torch
from every_mechanism import FILTERS, TREES, short
from rewrites import REWRITES
from runs import begun

DEVICES = os.environ.get(
    "PRIVPART_TEST_DEVICES", "cpu cuda" if torch.cuda.is_available() else "cpu"
)
# A search for doctests would import it, and it registers an accelerator for the whole process.
collect_ignore = ["pretend_device.py"]
ACCELERATORS = [name for name in DEVICES.split() if name != "cpu"]


@pytest.fixture(params=TREES + FILTERS, ids=short)
def mechanism(request):
    """Every mechanism of the accounting package with every option, at awkward lengths."""
    return request.param


@pytest.fixture(params=REWRITES.values(), ids=REWRITES)
def rewrite(request):
    """Every kind of write that torch does not count; takes a tensor, another and a number."""
    return request.param


@pytest.fixture(params=DEVICES.split())
def device(request):
    """Every device that is here; tests/privpart/test_device.py adds a pretend one."""
    with _ready(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _one_thread():
    """Whatever a test sets, the next one has what a worker has: another number, other rounding."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _workers_compute_from_the_first_client(request, monkeypatch):
    """And not only once they pay, but in tests of just that."""
    if "lazy_workers" not in request.fixturenames:
        monkeypatch.setattr("privpart.engines.embedded._ALONE", 0.0)
        monkeypatch.setattr("privpart.pool.Pool.ready", lambda _: True)


@pytest.fixture
def folder(tmp_path):
    """A secret run after two of its four rounds."""
    return begun(tmp_path / "run", 2)


@pytest.fixture
def lazy_workers():
    """Leave it to the engine when its workers start."""


NONE = pytest.param("cpu", marks=pytest.mark.skip(reason="no accelerator here"))


@pytest.fixture(params=ACCELERATORS or [NONE])
def accelerator(request):
    """Every device that is not the CPU."""
    with _ready(request.param):
        yield request.param


def _ready(name):
    if name != "pretend":
        return nullcontext()
    from pretend_device import Pretend

    return Pretend()
