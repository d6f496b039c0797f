"""Primitive: the paper's equations against literal loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accounting import ConfigError
from privpart.select import aggregate_mean, fed_select


def row(x, key):
    return x[key]


def doubled_row(x, key):
    return 2 * x[key] + key


SELECTS = st.sampled_from([row, doubled_row])


@st.composite
def problems(draw, least=1):
    size = draw(st.integers(1, 6))
    clients = draw(st.integers(1, 4))
    keys = st.lists(st.integers(0, size - 1), min_size=least, max_size=5).map(tuple)
    x = torch.arange(size * 3, dtype=torch.float32).view(size, 3) - draw(st.integers(-3, 9))
    return x, [draw(keys) for _ in range(clients)]


@given(problems(least=0), SELECTS)
def test_each_client_gets_its_slices_in_its_own_order(problem, select):
    x, keys = problem
    for own, slices in zip(keys, fed_select(x, keys, select), strict=True):
        assert len(own) == len(slices)
        assert all(torch.equal(part, select(x, key)) for part, key in zip(slices, own, strict=True))


def scatter(size):
    def phi(update, keys):
        full = torch.zeros(size, 3)
        for slice_, key in zip(update, keys, strict=True):
            full[key] += slice_
        return full

    return phi


@given(problems())
def test_deselection_is_the_adjoint_of_selection(problem):
    """<phi(u, z), x> = <u, psi(x, z)>, also where keys repeat: integers, so exactly."""
    x, keys = problem
    for own in keys:
        update = torch.arange(len(own) * 3.0).view(-1, 3) + 1
        selected = torch.stack(fed_select(x, [own], row)[0])
        assert (scatter(len(x))(update, own) * x).sum() == (update * selected).sum()


@given(problems())
def test_mean_is_over_the_public_divisor_whatever_was_selected(problem):
    x, keys = problem
    updates = [torch.full((len(own), 3), 1.0 + n) for n, own in enumerate(keys)]
    mean = aggregate_mean(updates, keys, scatter(len(x)), divisor=8)
    expected = torch.zeros(len(x), 3, dtype=torch.float64)
    for n, own in enumerate(keys):
        for key in own:
            expected[key] += (1.0 + n) / 8
    assert torch.equal(mean, expected)


def test_as_many_updates_as_lists_of_keys():
    with pytest.raises(ConfigError, match="1 updates and 2 lists"):
        aggregate_mean([torch.zeros(1, 3)], [(0,), (1,)], scatter(2), divisor=1)
    with pytest.raises(ConfigError, match="divisor=0"):
        aggregate_mean([torch.zeros(1, 3)], [(0,)], scatter(2), divisor=0)
