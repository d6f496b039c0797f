"""JSON round trips and fingerprints of mechanisms."""

import json

import numpy as np
import pytest
from every_mechanism import FILTERS, TREES, short

from accounting import (
    BandedInverse,
    BinaryTree,
    BufferedToeplitz,
    ConfigError,
    Grouped,
    PrunedTree,
    Toeplitz,
    fingerprint,
    mechanism_from_dict,
)

GROUPED = Grouped([(0, 1), (1,)], [BinaryTree(1), PrunedTree(5, (0, 3))], [3, 4])
MECHANISMS = [
    *TREES,
    *FILTERS,
    BandedInverse(5, (1.0, -0.1)),
    BandedInverse(5, (1.0, -0.1), normalize_columns=True),
    BufferedToeplitz(5, (0.9, 0.1), (0.3, 1 / 3)),
    BufferedToeplitz(5, (0.1, 0.9), (1 / 3, 0.3)),
    GROUPED,
    Grouped([(0, 1), (1,)], [BinaryTree(1), BufferedToeplitz(2, (0.9,), (0.3,))], [3, 4]),
]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=short)
def test_round_trip(mechanism):
    again = mechanism_from_dict(json.loads(json.dumps(mechanism.to_dict())))
    assert again == mechanism
    assert type(again) is type(mechanism)
    assert fingerprint(again) == fingerprint(mechanism)


def test_fingerprints_tell_mechanisms_apart():
    assert len({fingerprint(mechanism) for mechanism in MECHANISMS}) == len(MECHANISMS)


def test_fingerprints_do_not_depend_on_how_numbers_were_written():
    assert fingerprint(Toeplitz(5, (1, 0.5))) == fingerprint(
        Toeplitz(np.int64(5), np.array([1.0, 0.5]))
    )
    assert fingerprint(BinaryTree(8, np.int32(4))) == fingerprint(BinaryTree(8, 4))


def test_fingerprints_are_stable():
    # written into checkpoints: a change here orphans them, and needs a new schema
    assert (
        fingerprint(BinaryTree(8))
        == "1894fab74204654785f1e311cade83cb5b79d1a2705eac9c48c4fe06cbc91e07"
    )
    assert (
        fingerprint(BufferedToeplitz(8, (0.5,), (0.25,)))
        == "90900dc279e0c731856601cfaed18b88aaa99ca1675a369927e1c359f7b7f887"
    )


TREE = BinaryTree(8).to_dict()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "schema=None: must be 'privpart/mechanism/1'"),
        (TREE | {"schema": "privpart/mechanism/2"}, "schema='privpart/mechanism/2'"),
        (
            TREE | {"name": "forest"},
            "one of banded-inverse, blt, dense, grouped, independent, pruned tree, scheduled, "
            "toeplitz, tree",
        ),
        (TREE | {"name": None}, "name=None"),
        (TREE | {"name": ["tree"]}, "name="),
        (TREE | {"depth": 3}, "unknown depth; its fields are completed, estimator"),
        ({k: v for k, v in TREE.items() if k != "release"}, "missing release; its fields"),
        (TREE | {"rounds": 2.5}, "rounds=2.5"),
        (TREE | {"restart_every": 0}, "restart_every=0"),
        (Toeplitz(2, (1,)).to_dict() | {"coefficients": [1, float("nan")]}, "finite"),
        ("tree", "must be an object"),
        *(
            (GROUPED.to_dict() | {"mechanisms": members}, "mechanism")
            for members in ([GROUPED.to_dict()], "tree", None, [3])
        ),
    ],
)
def test_what_cannot_be_read_says_why(data, message):
    with pytest.raises(ConfigError, match=message):
        mechanism_from_dict(data)
