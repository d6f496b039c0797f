"""Training: what a plan file describes, put together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accounting.checks import ConfigError
from privpart import tasks
from privpart.admission import may_take_part
from privpart.engine import EmbeddedEngine, Users
from privpart.models import model as network
from privpart.partial import PartialModel
from privpart.plan import PrivacyPlan
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


def training(
    plan: PlanFile,
    *,
    workers: int = 1,
    deterministic: bool = False,
    report: Callable[[str], None] | None = None,
) -> Training:
    """Load the data and build model, users and cohorts of a plan.

    Args:
        plan: what to train.
        workers: processes of the engine.
        deterministic: the same bits for any number of workers, see ``EmbeddedEngine``.
        report: gets a sentence about how the engine computes; None writes it to standard error.

    Raises:
        ConfigError: unknown model or sizes, patterns that match nothing, missing data, more users
            than examples, or more clients in a round than users.
    """
    task = _task(plan.data)
    held = _dealt(task, plan.data)
    model = PartialModel(
        network(plan.model.name, **plan.model.sizes),
        train=plan.model.train,
        seed=plan.model.seed,
        groups=plan.groups(),
    )
    users = Users(task.train_x, task.train_y, held)
    return Training(
        model,
        EmbeddedEngine(
            model,
            users,
            local=plan.client,
            data_seed=plan.data.seed,
            workers=workers,
            deterministic=deterministic,
            report=report,
        ),
        tasks.cohorts_in_turn(
            users=plan.data.users,
            size=plan.data.clients_per_round,
            rounds=plan.privacy.rounds,
            data_seed=plan.data.seed,
        ),
        task.test_x,
        task.test_y,
    )


def refuse_short_cohorts(plan: PrivacyPlan, cohorts: Sequence[Sequence[int]]) -> None:
    """Check, before a run begins, that its limits let enough clients take part in every round.

    Raises:
        ConfigError: the first round that would fall short, if every client answered.
    """
    limits, taken = plan.participation, dict[int, list[int]]()
    for round_, cohort in enumerate(cohorts):
        came = 0
        for client in set(cohort):
            before = taken.setdefault(client, [])
            if may_take_part(limits, before, round_):
                before.append(round_)
                came += 1
        if came < plan.minimum_cohort:
            raise ConfigError(
                f"rounds={len(cohorts)}: from round {round_} on, the limits on participation leave "
                f"{came} clients, {plan.minimum_cohort} are the least. Plan fewer rounds, smaller "
                "cohorts, or more participations (which cost more)."
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


def _dealt(task: tasks.Task, data: Data) -> list[Tensor]:
    """Who holds which training examples."""
    for name, owner in (("alpha", "dirichlet"), ("classes_each", "pathological")):
        if (getattr(data, name) is not None) != (data.partition == owner):
            raise ConfigError(f"data.{name}: a {owner} partition needs it, and no other has it.")
    if data.alpha is not None:
        return tasks.dirichlet_users(
            task.train_y, users=data.users, alpha=data.alpha, data_seed=data.seed
        )
    if data.classes_each is not None:
        return tasks.pathological_users(
            task.train_y, users=data.users, classes_each=data.classes_each, data_seed=data.seed
        )
    return tasks.iid_users(len(task.train_x), users=data.users, data_seed=data.seed)


def _task(data: Data) -> tasks.Task:
    if data.task == "digits":
        return tasks.digits()
    if data.task == "fashion-mnist":
        return tasks.fashion_mnist(data.directory)
    if data.directory is None:
        raise ConfigError(
            f"data.directory: {data.task} is read from files; name their folder. Nothing is "
            "downloaded."
        )
    readers = {"emnist": tasks.emnist, "cifar10": tasks.cifar10, "cifar100": tasks.cifar100}
    return readers[data.task](data.directory)
