"""Small networks, users with random examples, and the updates of a task's clients by one method."""

import os
import sys
from contextlib import redirect_stdout

import pytest
import torch

from privpart import Users
from privpart.engines.methods import LocalComputation
from privpart.models import mcmahan_2nn, small_cnn


def dense():
    return mcmahan_2nn(inputs=64, hidden=12, classes=10)


def cnn():
    return small_cnn(channels=(4, 8), hidden=16, image_size=8)


def random_users(sizes, shape=(1, 8, 8), classes=10):
    """A user for each size, who need not have examples; rows are shuffled."""
    generator, n = torch.Generator().manual_seed(2), sum(sizes)
    x = torch.rand(n, *shape, generator=generator)
    y = torch.randint(classes, (n,), generator=generator)
    rows = torch.randperm(n, generator=generator).split(list(sizes))
    return Users(x, y, rows, allow_empty=True)


def computed(model, data, method, local, task):
    """Clipped updates, shape (clients, dim), without an engine's choice of method."""
    out = torch.empty(len(task.clients), model.dim)
    work = LocalComputation(model, data, local=local, data_seed=5)
    work.updates(task, task.clients, model.flat.clone(), method, out)
    return out


def run_on_a_pretend_device(arguments, path):
    """Run tests in this process, which is another one's fork, and write what pytest says."""
    os.environ["PRIVPART_TEST_DEVICES"] = "pretend"
    with path.open("w") as said, redirect_stdout(said):
        status = pytest.main(["-q", "-p", "no:cacheprovider", *arguments])
    sys.exit(status)
