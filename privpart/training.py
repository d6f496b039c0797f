"""Training: what a plan file describes, put together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from privpart import tasks
from privpart.engine import EmbeddedEngine, Users
from privpart.models import model as network
from privpart.partial import PartialModel
from privpart.plan_file import Data, PlanFile


@dataclass(frozen=True, slots=True)
class Training:
    """Model, clients and test images of a plan; everything in it is simulated or public.

    Attributes:
        model: in its start state.
        engine: runs the clients.
        cohorts: per round, the clients to ask.
        test_x: images that no client holds.
        test_y: their classes.
    """

    model: PartialModel
    engine: EmbeddedEngine
    cohorts: Sequence[Sequence[int]]
    test_x: Tensor
    test_y: Tensor

    def accuracy(self, parameters: Tensor) -> float:
        """Return the share of test images that the model with this trained part gets right."""
        self.model.load(parameters)
        return accuracy(self.model.module, self.test_x, self.test_y)


def training(plan: PlanFile) -> Training:
    """Load the data and build model, users and cohorts of a plan.

    Raises:
        ConfigError: unknown model or sizes, patterns that match nothing, missing data, more users
            than examples, or more clients in a round than users.
    """
    task = _task(plan.data)
    held = tasks.iid_users(len(task.train_x), users=plan.data.users, data_seed=plan.data.seed)
    model = PartialModel(
        network(plan.model.name, **plan.model.sizes), train=plan.model.train, seed=plan.model.seed
    )
    users = Users(task.train_x, task.train_y, held)
    return Training(
        model,
        EmbeddedEngine(model, users, local=plan.client, data_seed=plan.data.seed),
        tasks.cohorts_in_turn(
            users=plan.data.users,
            size=plan.data.clients_per_round,
            rounds=plan.privacy.rounds,
            data_seed=plan.data.seed,
        ),
        task.test_x,
        task.test_y,
    )


@torch.no_grad()
def accuracy(module: torch.nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of ``x`` that is classified as ``y``, in evaluation mode: no dropout."""
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        right = sum(
            int((module(some).argmax(dim=1) == classes).sum())
            for some, classes in zip(torch.split(x, 1000), torch.split(y, 1000), strict=True)
        )
    finally:
        for layer in training:
            layer.training = True
    return right / len(x)


def _task(data: Data) -> tasks.Task:
    return tasks.digits() if data.task == "digits" else tasks.fashion_mnist(data.directory)
