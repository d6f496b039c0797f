import pytest

from accounting import ConfigError
from privpart.plan_file import validated
from privpart.training import training

PLAN = {
    "schema": "privpart/plan/1",
    "privacy": {
        "rounds": 4,
        "clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        "mechanism": {"name": "tree"},
    },
    "model": {
        "name": "small_cnn",
        "sizes": {"channels": [2, 4], "hidden": 8, "image_size": 8},
        "seed": 7,
    },
    "client": {"learning_rate": 0.1},
    "server": {},
}


def setup(**data):
    base = {"task": "digits", "users": 100, "clients_per_round": 5}
    return training(validated(PLAN | {"data": base | data}))


def distinct(found):
    users = found.engine.users
    return sum(len(users.y[rows].unique()) for rows in users.indices) / len(users)


def test_partitions_of_a_plan():
    assert distinct(setup()) > 6
    assert distinct(setup(partition="dirichlet", alpha=0.01)) < 2.5
    assert distinct(setup(partition="pathological", classes_each=2)) < 3


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"partition": "dirichlet"}, "alpha"),
        ({"alpha": 1.0}, "alpha"),
        ({"partition": "pathological", "alpha": 1.0}, "alpha"),
        ({"partition": "pathological"}, "classes_each"),
        ({"task": "cifar10"}, "data.directory: cifar10 is read from files"),
    ],
)
def test_data_that_do_not_fit(data, says):
    with pytest.raises(ConfigError, match=says):
        setup(**data)
