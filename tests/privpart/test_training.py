"""What a plan trains: its clients, the engine's options, and networks that fit the examples."""

import re
from contextlib import nullcontext

import pytest
import torch
from plans import TABLES as PLAN
from plans import tables

from accounting import ConfigError
from privpart.data.users import Users
from privpart.engines.options import EngineOptions
from privpart.messages import RoundTask
from privpart.models import MODELS, build_network
from privpart.run.report import run_report
from privpart.training import rounding
from privpart.training.plan_file import validated
from privpart.training.train import begin, resume_run
from privpart.training.training import refuse_other_shapes, training


def setup(**data):
    return training(validated(tables(data={"users": 100, "clients_per_round": 5} | data)))


def distinct(found):
    users = found.engine.clients
    return sum(len(users.y[rows].unique()) for rows in users.indices) / len(users)


def test_partitions_of_a_plan():
    assert distinct(setup()) > 6
    assert distinct(setup(partition="dirichlet", alpha=0.01)) < 2.5
    assert distinct(setup(partition="pathological", classes_each=2)) < 3


SELECT = {"select": {"delivery": "on-demand", "filters": {"keys": "independent", "m": 2}}}
PROX = {"client": {"learning_rate": 0.1, "objective": "fedprox", "mu": 0.1}}
SMALL = {"data": {"task": "digits", "users": 100, "clients_per_round": 5}}


@pytest.mark.parametrize(
    ("tables", "options", "says"),
    [
        (SELECT, {"workers": 2}, "workers=2: clients that select"),
        (PROX, {"batching": "vmap"}, "batching=vmap: clients that select"),
        (SELECT, {"device": "cuda"}, "device=cuda: clients that select"),
        ({}, {"device": "cuda:99"}, "device='cuda:99': torch .* sees cpu"),
    ],
)
def test_options_that_would_be_ignored_are_refused(tables, options, says):
    with pytest.raises(ConfigError, match=says):
        training(validated(PLAN | SMALL | tables), options=EngineOptions(**options))


@pytest.mark.parametrize("options", [{"batching": "vmap"}, {"precision": "bfloat16"}])
def test_options_reach_the_engine(options):
    def trained(**options):
        chosen = EngineOptions(**{"batching": "loop"} | options)
        setup = training(validated(PLAN | SMALL), options=chosen, report=lambda _: None)
        task = RoundTask(0, (0, 1, 2, 3), 1.0, "plan")
        found = torch.stack([u.update for u in setup.engine.run(task, setup.start)])
        return found, setup.engine.method

    (exact, loop), (found, method) = trained(), trained(**options)
    assert (loop.vectorized, loop.bfloat16) == (False, False)
    assert (method.vectorized, method.bfloat16) == ("batching" in options, "precision" in options)
    assert 0 < (found - exact).norm() < 0.1 * exact.norm()
    assert (found.double().norm(dim=1) <= 1.0).all()


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_keeps_the_precision_with_which_it_began(precision, seed, tmp_path):
    path, other = tmp_path / "run", "float32" if precision == "bfloat16" else "bfloat16"
    options = EngineOptions(precision=precision)
    begin(validated(PLAN | SMALL), path, seed=seed, options=options)[0].close()
    assert run_report(path).cost.precision == precision
    for given, expected in (({}, precision), ({"precision": other}, other)):
        refused = seed is not None and given
        with pytest.raises(ConfigError, match="in " + precision) if refused else nullcontext():
            run, found = resume_run(path, options=given)
            assert found.engine.options.precision == expected
            run.close()


def test_a_run_in_tf32_is_resumed_with_a_device_or_another_precision(tmp_path):
    """Nobody typed it again, so "leave it out" was no advice."""
    path, tf32 = tmp_path / "run", {"precision": "tf32"}
    begin(validated(PLAN | SMALL), path, own=tf32, options=EngineOptions())[0].close()
    with pytest.raises(ConfigError, match="device=cpu; use device='cuda', or another precision"):
        resume_run(path, options={})
    run, found = resume_run(path, options={"precision": "float32"})
    run.close()
    assert found.engine.options.precision == "float32"


def test_clients_of_a_plan_that_take_one_step_may_be_summed():
    """All that a plan trains is simulated: the engine's word is as good as the server's."""
    one_step = {"client": {"learning_rate": 0.1, "steps": 1, "batch_size": 4}}
    setup = training(validated(PLAN | SMALL | one_step), report=lambda _: None)
    task = RoundTask(0, (0, 1, 2, 3), 1.0, "plan")
    updates = [u.update.double() for u in setup.engine.run(task, setup.start)]
    parts = list(setup.engine.sums(task, setup.start))
    assert sorted(client for part in parts for client in part.clients) == [0, 1, 2, 3]
    total = sum(part.total for part in parts)
    assert (total - sum(updates)).norm() < 1e-4 * total.norm()
    fixed = EngineOptions(deterministic=True)
    alone = training(validated(PLAN | SMALL | one_step), options=fixed, report=lambda _: None)
    assert alone.engine.sums(task, alone.start) is None


# Which networks take which tasks' examples; any other pair is one sentence before training.

SHAPES = {
    "digits": (1, 8, 8), "fashion-mnist": (1, 28, 28), "emnist": (1, 28, 28),
    "cifar10": (3, 32, 32), "cifar100": (3, 32, 32),
}  # fmt: skip
CLASSES = {"digits": 10, "cifar10": 10, "cifar100": 100, "emnist": 47}
NARROW = {
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
    network = build_network(name, **NARROW.get(name, {}))
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
        ("bag_of_words", {"words": 8}, r"outputs of shape \(1, 8, 500\) for one"),  # per image row
        ("resnet8", {"width": 8, "channels": 1}, "does not take .* more than 1 value per channel"),
    ],
)
def test_networks_that_only_look_as_if_they_fit(name, sizes, says):
    network = {"model": {"name": name, "sizes": sizes, "seed": 7}}
    with pytest.raises(ConfigError, match=says):
        training(validated(PLAN | SMALL | network))


TIMES = (
    r"would take [\d.e+]+ instead of [\d.e+]+ ms of processor time for 2 steps of \d+ clients, .*"
)
DIFFER = r"updates differ by ([\d.]+) of their length"


def test_what_bfloat16_would_change_is_seen_without_anybodys_examples(monkeypatch):
    """What the doctor prints: the difference of updates is a few per cent, and tells nothing."""
    monkeypatch.setattr(rounding, "_TURNS", 1)

    def said(change=lambda _: None, **changes):
        setup = training(validated(tables(**changes)), report=lambda _: None)
        change(setup)
        return rounding.of_bfloat16(setup, setup.promise())

    found = re.fullmatch(rf"{TIMES}; {DIFFER}, and the noise .* at least (\S+) times .*", said())
    assert 1e-4 < float(found[1]) < 0.2
    assert float(found[2]) > 1
    others = re.search(DIFFER, said(lambda setup: setup.clients.x.mul_(-3)))
    assert others[1] == found[1]
    moon = {"learning_rate": 0.1, "objective": "moon", "mu": 1.0}
    assert said(client=moon) is None
    one_step = {"learning_rate": 0.1, "steps": 1}
    assert said(client=one_step) == "would change nothing: clients are computed by ghost clipping"
