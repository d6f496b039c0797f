import os
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from accounting import BinaryTree, BufferedToeplitz, Dense, Independent, PrunedTree, Toeplitz

DEVICES = os.environ.get(
    "PRIVPART_TEST_DEVICES", "cpu cuda" if torch.cuda.is_available() else "cpu"
)
ACCELERATORS = [name for name in DEVICES.split() if name != "cpu"]

BLT3 = {"decay": (0.703864, 0.970182, 0.998105), "scale": (0.295937, 0.131099, 0.057899)}
SQUARE = Dense(
    np.tril(np.random.default_rng(0).uniform(-0.5, 1, (7, 7)), -1) + np.diag(range(1, 8))
)

TREES = [
    *(BinaryTree(n) for n in (1, 2, 3, 8, 13, 16)),
    *(BinaryTree(n, estimator="online") for n in (1, 2, 7, 8, 13)),
    *(BinaryTree(n, estimator="online", release="prefix") for n in (2, 8, 11)),
    BinaryTree(11, release="prefix"),
    *(
        BinaryTree(n, every, estimator=estimator, completed=completed)
        for n, every in ((13, 5), (12, 4), (11, 3), (5, 1), (6, 9), (13, 6))
        for estimator in ("vanilla", "online")
        for completed in (False, True)
    ),
    BinaryTree(12, 5, estimator="online", completed=True, release="prefix"),
    PrunedTree(1, (0,)),
    PrunedTree(16, (0, 1, 2, 3, 9, 12)),
    PrunedTree(100, (3, 4, 8, 31, 32, 64, 70, 99)),
]
FILTERS = [
    Independent(7),
    Toeplitz.square_root(1),
    Toeplitz.square_root(9),
    Toeplitz.square_root(9, bands=3),
    Toeplitz.square_root(9, bands=3, normalize_columns=True),
    Toeplitz.square_root(8, normalize_columns=True),
    Toeplitz(6, (2.0, 0.5, 0.0)),
    Toeplitz(6, (2.0, 0.5), normalize_columns=True),
    Toeplitz(8, (1.0, 0.25, -0.5)),
    BufferedToeplitz(1, **BLT3),
    BufferedToeplitz(11, **BLT3),
    BufferedToeplitz(6, decay=(0.0, 1.0), scale=(0.5, 0.25)),
    SQUARE,
]


def short(mechanism):
    return repr(mechanism)[:100].replace("\n", "")


@pytest.fixture(params=TREES + FILTERS, ids=short)
def mechanism(request):
    """Every mechanism of the accounting package with every option, at awkward lengths."""
    return request.param


def _exchange(tensor, other, _):
    mine = tensor.data.clone()
    tensor.data.copy_(other.data)
    other.data.copy_(mine)


def _move(tensor, *_):
    tensor.data = tensor.data.flip(0)


REWRITES = {
    "add": lambda tensor, other, number: tensor.data.add_(number),
    "permute": lambda tensor, *_: tensor.data.copy_(
        tensor.data.flatten()[tensor.data.flatten().argsort()].view_as(tensor)
    ),
    "swap": lambda tensor, *_: tensor.data.copy_(tensor.data.roll(1, 0)),
    "replace": lambda tensor, other, number: tensor.data.fill_(number),
    "sign": lambda tensor, *_: tensor.data.neg_(),
    "exchange": _exchange,
    "move": _move,
}


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
        monkeypatch.setattr("privpart.engines.workers.Workers.ready", lambda _: True)


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
