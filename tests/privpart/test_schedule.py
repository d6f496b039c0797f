"""Who trains when: FedPart's own rounds, and groups that cover every model once."""

from itertools import groupby

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accounting import ConfigError
from privpart import PartialModel
from privpart.models import MODELS, build_network, example_network
from privpart.patterns import layer_groups, matching_parameters, trained_groups
from privpart.plan import Schedule, active_rounds

# First round of each stretch, from the pipeline of github.com/FLAIR-Community/Fling: (start, end,
# what), where "all" is a full stretch and a number the groups of a cycle, two rounds each.
FLING = {
    "resnet8": (
        10,
        [(0, 5), (25, 30), (50, 55), (75, 80), (100, 105)],
        [(5, 25), (30, 50), (55, 75), (80, 100), (105, 125)],
    ),
    "resnet18": (21, [(0, 5), (47, 52), (94, 99)], [(5, 47), (52, 94), (99, 141)]),
    "text_transformer": (
        8,
        [(0, 5), (21, 26), (42, 47), (63, 68), (84, 89)],
        [(5, 21), (26, 42), (47, 63), (68, 84), (89, 105)],
    ),
}


@pytest.mark.parametrize("name", FLING)
def test_the_rounds_of_the_paper_s_own_code(name):
    groups, full, cycles = FLING[name]
    rounds = Schedule(cycles=len(cycles)).rounds(groups)
    assert len(rounds) == cycles[-1][1] == Schedule(cycles=len(cycles)).length(groups)
    for start, end in full:
        assert rounds[start:end] == (tuple(range(groups)),) * (end - start)
    for start, end in cycles:
        assert rounds[start:end] == tuple(
            ((t - start) // 2 % groups,) for t in range(start, end)
        )  # fmt: skip
    assert len(MODELS[name].groups) == groups


def test_orders():
    def order(**change):
        rounds = Schedule(cycles=2, warm_up=0, between=0, **change).rounds(4)
        return [groups[0] for groups, _ in groupby(rounds)]

    assert order() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert order(order="reverse") == [3, 2, 1, 0, 3, 2, 1, 0]
    # public coins: the same list for ever, on every machine
    assert order(order="random", seed=1) == RANDOM_1
    assert order(order="random", seed=2) != RANDOM_1
    assert sorted(RANDOM_1[:4]) == sorted(RANDOM_1[4:]) == [0, 1, 2, 3]


RANDOM_1 = [0, 3, 1, 2, 3, 1, 2, 0]


@given(
    st.builds(
        Schedule,
        cycles=st.integers(1, 4),
        rounds_per_group=st.integers(1, 3),
        warm_up=st.integers(0, 3),
        between=st.integers(0, 3),
        order=st.sampled_from(["sequential", "reverse", "random"]),
    ),
    st.integers(1, 9),
)
def test_every_group_trains_as_often_as_every_other(schedule, groups):
    rounds = schedule.rounds(groups)
    assert len(rounds) == schedule.length(groups)
    full = schedule.warm_up + (schedule.cycles - 1) * schedule.between
    active = active_rounds(rounds)
    assert len(active) == groups
    if groups > 1:
        expected = full + schedule.cycles * schedule.rounds_per_group
        assert {len(own) for own in active} == {expected}
    assert schedule.rounds(groups) == rounds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cycles": 0}, "cycles=0"),
        ({"rounds_per_group": 0}, "rounds_per_group=0"),
        ({"warm_up": -1}, "warm_up=-1"),
        ({"between": 1.5}, "between=1.5"),
        ({"order": "shuffled"}, "order"),
        ({"seed": 3}, "seed=3"),
    ],
)
def test_what_is_no_schedule_says_why(change, message):
    with pytest.raises(ConfigError, match=message):
        Schedule(**{"cycles": 2} | change)
    with pytest.raises(ConfigError, match="groups"):
        Schedule(cycles=1).rounds(0)


@pytest.mark.parametrize("name", FLING)
def test_the_papers_groups_cover_the_network_once(name):
    with torch.device("meta"):
        module = build_network(name)
    everything = [n for n, _ in module.named_parameters()]
    groups = trained_groups(module, MODELS[name].groups, everything)
    assert sorted(n for names in groups for n in names) == sorted(everything)
    assert len(groups) == FLING[name][0]
    if name.startswith("resnet"):  # whose layers are the paper's groups
        assert layer_groups(module) == groups


def test_layers_cover_every_network_once():
    for name in MODELS:
        module = example_network(name)
        groups = layer_groups(module)
        everything = [n for n, _ in module.named_parameters()]
        assert sorted(n for names in groups for n in names) == sorted(everything)
        assert all(any("norm" not in n for n in names) for names in groups)
    # A norm that comes first joins what follows, and alone is a group.
    assert layer_groups(nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2, bias=False))) == (
        ("0.weight", "0.bias", "1.weight"),
    )
    assert layer_groups(nn.LayerNorm(3)) == (("weight", "bias"),)


def test_groups_may_leave_out_what_is_frozen():
    module = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    part = matching_parameters(module, ["2.*", "1.bias"])
    assert trained_groups(module, [["0.*"], ["1.*"], ["2.*"]], part) == (
        ("1.bias",),
        ("2.weight", "2.bias"),
    )


def test_a_grouped_model_lays_its_groups_one_after_the_other():
    groups = [["2.*", "0.bias"], ["0.weight"]]
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    grouped = PartialModel(module, seed=3, overwrite=True, groups=groups)
    assert grouped.trainable == ("0.bias", "2.weight", "2.bias", "0.weight")
    assert grouped.group_sizes == (3 + 6 + 2, 12)
    assert grouped.spans() == [slice(0, 23)] == grouped.spans([0, 1])
    assert grouped.spans([1]) == [slice(11, 23)]
    plain = PartialModel(lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), seed=3)
    assert plain.group_sizes == (23,)
    for (name, p), (_, q) in zip(
        grouped.module.named_parameters(), plain.module.named_parameters(), strict=True
    ):
        assert torch.equal(p, q), name  # the order of the vector changes no start value
    assert grouped.trainable_hash != plain.trainable_hash
    assert grouped.trainable_hash_of([1]) != grouped.trainable_hash_of([0])
