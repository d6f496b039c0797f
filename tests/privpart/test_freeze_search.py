"""Freeze search: the paper's four steps, on accuracies that the test makes up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accounting import ConfigError
from privpart.experiment.freeze_search import freeze_search, layer_blocks
from privpart.models import small_cnn

NAMES = "abcdef"


def test_blocks_are_layers_without_normalisation():
    network = small_cnn(channels=(4, 8), hidden=16, image_size=8)
    assert layer_blocks(network) == {"conv1": 40, "conv2": 296, "dense1": 528, "dense2": 170}


def test_tied_parameters_count_once():
    first, last = nn.Embedding(7, 3), nn.Linear(3, 7)
    last.weight = first.weight
    assert layer_blocks(nn.Sequential(first, nn.Linear(3, 3), last)) == {"0": 21, "1": 12, "2": 7}


@given(
    st.lists(st.integers(1, 999), min_size=2, max_size=6, unique=True),
    st.lists(st.floats(0, 0.1), min_size=6, max_size=6),
    st.floats(0, 0.3),
)
def test_the_steps(sizes, harm, tolerance):
    blocks = dict(zip(NAMES, sizes, strict=False))
    costs = dict(zip(NAMES, harm, strict=True))
    asked = []

    def accuracy(frozen):
        asked.append(frozen)
        return 0.9 - sum(costs[name] for name in frozen)

    trials = list(freeze_search(blocks, accuracy, tolerance=tolerance))
    assert [t.frozen for t in trials] == asked
    assert trials[0].frozen == ()
    largest_first = sorted(blocks, key=blocks.get, reverse=True)
    assert trials[1].frozen == (largest_first[0],)
    standing = ()
    for trial, block in zip(trials[1:], largest_first, strict=False):
        assert trial.frozen == (*standing, block)
        assert trial.parameter_count == sum(blocks[name] for name in trial.frozen)
        assert trial.kept == (trial.accuracy >= trials[0].accuracy - tolerance)
        standing = trial.frozen if trial.kept else standing
    assert set(standing) < set(blocks)  # something trains
    tried = len(trials) - 1
    assert tried == len(blocks) or len(standing) == len(blocks) - 1 == tried


@pytest.mark.parametrize("value", [float("nan"), -0.1, 1.1])
def test_an_accuracy_that_is_none(value):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        list(freeze_search({"a": 1, "b": 2}, lambda frozen: value if frozen else 0.5, tolerance=0))


@pytest.mark.parametrize("value", [float("nan"), -0.1, float("inf")])
def test_bad_tolerance(value):
    with pytest.raises(ConfigError, match="tolerance"):
        list(freeze_search({"a": 1, "b": 2}, lambda _: 0.5, tolerance=value))


def test_one_block_leaves_nothing_to_search():
    with pytest.raises(ConfigError, match="at least two"):
        list(freeze_search({"a": 1}, lambda _: 0.5, tolerance=0.1))
