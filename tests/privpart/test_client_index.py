import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accounting import ConfigError
from privpart.data import Index
from privpart.data.index import ClientIds
from privpart.messages import id_order

NUMBERS = st.one_of(
    st.integers(-5, 5),
    st.integers(-(2**63) - 2, -(2**63) + 2),
    st.integers(2**63 - 2, 2**64 + 2),
    st.integers(-(2**256) + 1, 2**256 - 1),
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
IDS = st.one_of(NUMBERS, TEXTS, NUMBERS.map(str))


@given(st.lists(IDS, min_size=1, unique_by=lambda i: (type(i), i)), IDS)
def test_ids_are_found_and_come_in_order(ids, other):
    found, places = ClientIds.of(ids)
    assert list(found) == sorted(ids, key=id_order)
    assert [type(one) for one in found] == [type(one) for one in sorted(ids, key=id_order)]
    assert [ids[place] for place in places] == found[:] == list(found)
    assert [found.find(one) for one in found] == list(range(len(ids)))
    assert (other in found) == (other in ids)
    assert list(pickle.loads(pickle.dumps(found))) == list(found)
    assert list(found.shared()) == list(found)


@given(st.lists(IDS, min_size=1, max_size=30), st.sampled_from(["list", "objects"]))
def test_owners_hold_their_rows(owners, kind):
    column = owners if kind == "list" else np.array([*owners, None], dtype=object)[:-1]
    index = Index.of_owners(column)
    held = {(type(own), own): [] for own in owners}
    for row, own in enumerate(owners):
        held[type(own), own].append(row)
    assert len(index) == len(held)
    for client in index.ids:
        assert index[client].tolist() == held[type(client), client]
        assert index[client].dtype is torch.int64
    assert [rows.tolist() for rows in index] == [index[c].tolist() for c in index.ids]
    assert [index.owner(row) for row in range(len(owners))] == owners
    assert index.owner(len(owners)) is None
    assert index.owner(-1) is None
    copy = index.shared()
    assert list(copy.ids) == list(index.ids)
    assert [rows.tolist() for rows in copy] == [rows.tolist() for rows in index]


@pytest.mark.parametrize("kind", ["uint64", "int64", "int8"])
def test_arrays_of_whole_numbers_keep_every_bit(kind):
    limits = np.iinfo(kind)
    owners = np.array([limits.max, limits.min, limits.max, limits.max - 1], dtype=kind)
    index = Index.of_owners(owners)
    assert list(index.ids) == [int(limits.min), int(limits.max) - 1, int(limits.max)]
    assert index[int(limits.max)].tolist() == [0, 2]
    assert int(limits.max) + 1 not in index.ids
    assert torch.equal(Index.of_owners(torch.from_numpy(owners))[int(limits.max)], index[owners[0]])


def test_rows_per_client_by_list_dict_and_ids():
    rows = [torch.tensor([4, 0]), np.array([1]), [2, 3]]
    index = Index.of_rows(rows)
    assert list(index.ids) == [0, 1, 2]
    index[0].zero_()  # as code of a user's may: its client's rows stay
    assert [own.tolist() for own in index] == [[4, 0], [1], [2, 3]]
    named = Index.of_rows(rows, ids=["b", 7, "a"])
    assert list(named.ids) == [7, "a", "b"]
    assert named["b"].tolist() == [4, 0]
    assert named[np.int64(7)].tolist() == [1]
    assert Index.of_rows({"b": rows[0], 7: rows[1], "a": rows[2]})["a"].tolist() == [2, 3]
    twice = Index.of_rows([[5, 5], [5, 1]])
    assert twice[0].tolist() == [5, 5]
    assert (twice.owner(5), twice.owner(0)) == (0, None)
    assert twice.held(torch.tensor([0, 1, 2, 5])).tolist() == [1, 5]


@pytest.mark.parametrize(
    ("rows", "ids", "sentence"),
    [
        ([], None, "indices: is empty"),
        ([[0], [1]], [5, np.int64(5)], r"ids\[0\] and ids\[1\] are both client 5"),
        ([[0], [1]], ["a"], "1 ids for 2 clients"),
        ({"a": [0]}, ["a"], "ids: indices is a dict"),
        ([[0.5]], None, r"indices\[0\]: has type torch.float32"),
        ([0, 1], None, r"indices\[0\]: has type torch.int64 and shape \(\)"),
        ([["a"]], None, r"indices\[0\]: must be a list of rows"),
    ],
)
def test_rows_that_are_none(rows, ids, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Index.of_rows(rows, ids)


@pytest.mark.parametrize(
    ("owners", "sentence"),
    [
        ([1, None], r"user\[1\]: client id None of type NoneType"),
        (["a", float("nan")], r"user\[1\]: client id nan of type float"),
        ([True], r"user\[0\]: client id True of type bool"),
        (["a", ""], r"user\[1\]: client id '' of type str"),
        (["a", "b" * 257], r"user\[1\]: client id 'bbb"),
        (["a", "\ud800"], r"user\[1\]: client id"),
        ([0, 2**256], r"user\[1\]: client id"),
        ([], "user: is empty"),
        (np.array([1.0, np.nan]), r"user: has type float64.*no gap.*astype\(int\)"),
        (np.array([b"a"]), r"user: has type \|S1.*astype\(str\)"),
        (np.zeros((2, 2), int), r"user: has type int64 and shape \(2, 2\)"),
        ("abc", "user: is a str"),
    ],
)
def test_a_column_of_users_that_names_none(owners, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Index.of_owners(owners)


def test_an_unknown_client_is_named():
    index = Index.of_owners(["1", 2, "x"])
    for client in (1, "2", "y"):
        said = rf"client {client!r}: .* first of which is 2\. A num"
        with pytest.raises(ConfigError, match=said):
            index[client]
    with pytest.raises(ConfigError, match="of type float"):
        index[2.0]
    for wrong in (-1, 3, "0"):
        with pytest.raises(ConfigError, match="is not among the 3 clients"):
            Index.of_rows([[0], [1], [2]])[wrong]


def test_memory_of_a_million_clients():
    """Measured on 50 000, in bytes per client: a pickle holds all that an index refers to."""
    n, rng = 50_000, np.random.default_rng(0)
    index = Index.of_owners(rng.integers(2**63, size=n))
    assert len(index) == n
    assert len(pickle.dumps(index)) - 2000 <= 24.5 * n


@given(st.lists(st.tuples(IDS, st.lists(st.integers(0, 9), max_size=4)), min_size=1), st.data())
def test_some_clients_keep_their_rows(pairs, data):
    held = {(type(own), own): rows for own, rows in pairs}
    index = Index.of_rows({own: rows for (_, own), rows in held.items()})
    some = data.draw(st.lists(st.sampled_from(list(index.ids)), unique_by=lambda i: (type(i), i)))
    if not some:
        return
    found = index.only(some)
    assert list(found.ids) == sorted(some, key=id_order)
    assert [found[own].tolist() for own in some] == [held[type(own), own] for own in some]
