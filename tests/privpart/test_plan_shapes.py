"""Which networks take which tasks' examples; any other pair is one sentence before training."""

import pytest
import torch

from accounting import ConfigError
from privpart.data.users import Users
from privpart.models import MODELS, build_network
from privpart.training.plan_file import validated
from privpart.training.training import refuse_other_shapes, training

SHAPES = {
    "digits": (1, 8, 8), "fashion-mnist": (1, 28, 28), "emnist": (1, 28, 28),
    "cifar10": (3, 32, 32), "cifar100": (3, 32, 32),
}  # fmt: skip
CLASSES = {"digits": 10, "cifar10": 10, "cifar100": 100, "emnist": 47}
SMALL = {
    "small_cnn": {"channels": [2, 4], "hidden": 8, "image_size": 28},
    "resnet8": {"width": 8},
    "resnet18": {"width": 8},
}
TRAINS = {
    "small_cnn": ["fashion-mnist"],
    "emnist_cnn": ["fashion-mnist", "emnist"],
    "mcmahan_cnn": ["fashion-mnist", "emnist"],
    "mcmahan_2nn": ["fashion-mnist", "emnist"],
    "resnet18_gn": ["cifar10", "cifar100"],
    "resnet8": ["cifar10"],
    "resnet18": ["cifar10"],
}


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"word_lm"}))
def test_networks_take_a_tasks_examples_or_say_why_not(name):
    network = build_network(name, **SMALL.get(name, {}))
    for task, shape in SHAPES.items():
        y = torch.arange(CLASSES.get(task, 10))
        users = Users(torch.rand(len(y), *shape), y, [y])
        if task in TRAINS.get(name, ()):
            refuse_other_shapes(network, users)
        else:
            with pytest.raises(ConfigError, match=r"^model: [^\n]*[.]$"):
                refuse_other_shapes(network, users)


@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        (
            "bag_of_words",
            {"words": 8},
            r"outputs of shape \(1, 8, 500\) for one",
        ),  # of every row of the image
        ("resnet8", {"width": 8, "channels": 1}, "does not take .* more than 1 value per channel"),
    ],
)
def test_networks_that_only_look_as_if_they_fit(name, sizes, says):
    plan = {
        "schema": "privpart/plan/1",
        "privacy": {
            "rounds": 4,
            "clip_norm": 1.0,
            "noise_multiplier": 1.0,
            "delta": 1e-5,
            "mechanism": {"name": "tree"},
        },
        "model": {"name": name, "sizes": sizes, "seed": 7},
        "data": {"task": "digits", "users": 40, "clients_per_round": 4},
        "client": {"learning_rate": 0.1},
        "server": {},
    }
    with pytest.raises(ConfigError, match=says):
        training(validated(plan))
