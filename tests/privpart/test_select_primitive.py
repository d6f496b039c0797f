"""Primitive: the paper's equations against literal loops, and its merging identities."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accounting import ConfigError
from privpart.select import aggregate_mean, fed_select
from privpart.select.primitive import (
    all_sequences,
    as_one_key,
    both,
    everything,
    pair_key,
    sequence_key,
    with_broadcast,
)


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


def equal(left, right):
    """Nested lists and tuples of tensors, number by number."""
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    return len(left) == len(right) and all(map(equal, left, right))


@given(problems(least=0), SELECTS)
def test_each_client_gets_its_slices_in_its_own_order(problem, select):
    x, keys = problem
    expected = []
    for own in keys:
        slices = []
        for key in own:
            slices.append(select(x, key))
        expected.append(slices)
    assert equal(fed_select(x, keys, select), expected)


@given(problems())
def test_broadcast_is_a_select(problem):
    x, keys = problem
    for (received,) in fed_select(x, [(0,)] * len(keys), everything):
        assert received is x


@given(problems(), SELECTS)
def test_a_broadcast_merges_into_a_select(problem, select):
    x, keys = problem
    y = torch.tensor([7.0, 8.0])
    merged = fed_select((x, y), keys, with_broadcast(select))
    assert equal([[one for one, _ in own] for own in merged], fed_select(x, keys, select))
    assert all(other is y for own in merged for _, other in own)


@given(problems(), problems(), SELECTS, SELECTS)
def test_two_selects_merge_into_one_of_mixed_radix(one, two, select1, select2):
    (x1, keys1), (x2, keys2) = one, two
    pairs = [list(zip(a, b, strict=False)) for a, b in zip(keys1, keys2, strict=False)]
    keys = [tuple(pair_key(a, b, len(x2)) for a, b in own) for own in pairs]
    assert all(0 <= key < len(x1) * len(x2) for own in keys for key in own)
    merged = fed_select((x1, x2), keys, both(select1, select2, len(x2)))
    first = fed_select(x1, [tuple(a for a, _ in own) for own in pairs], select1)
    second = fed_select(x2, [tuple(b for _, b in own) for own in pairs], select2)
    assert equal([[a for a, _ in own] for own in merged], first)
    assert equal([[b for _, b in own] for own in merged], second)


@given(st.integers(1, 4), st.integers(1, 4), SELECTS, st.data())
def test_m_keys_are_one_key_among_all_sequences(size, length, select, data):
    x = torch.arange(size * 2.0).view(size, 2)
    own = tuple(data.draw(st.integers(0, size - 1)) for _ in range(length))
    one = sequence_key(own, size)
    assert all_sequences(size, length)[one] == own
    at_once = fed_select(x, [(one,)], as_one_key(select, size, length))
    assert equal(at_once[0][0], fed_select(x, [own], select)[0])


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
