"""Plan data: the users, and the test examples, that a plan's table ``[data]`` names."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from accounting.checks import ConfigError
from privpart.data import tasks
from privpart.data.tasks.shakespeare import BEGIN, WHEEL
from privpart.data.users import Users
from privpart.models.transformer import LanguageModel
from privpart.plan_file import Data


@dataclass(frozen=True, slots=True)
class PlanData:
    """Everything in it is simulated or public.

    Attributes:
        users: the clients' data.
        test_x: examples that no client holds.
        test_y: their classes; -100 does not count.
    """

    users: Users
    test_x: Tensor
    test_y: Tensor


def plan_data(data: Data, network: nn.Module) -> PlanData:
    """Read the task and deal it out.

    Args:
        data: of the plan.
        network: of the plan; a language model says how many words there are.

    Raises:
        ConfigError: missing or other files, or more users than examples.
    """
    if data.task == "shakespeare":
        return _next_word(_folder(data), network)
    if data.task == "fed-emnist":
        return _fed_emnist(_folder(data))
    task = _images(data)
    users = Users(task.train_x, task.train_y, _dealt(task, data, data.users or 0))
    return PlanData(users, task.test_x, task.test_y)


def _next_word(folder: Path, network: nn.Module) -> PlanData:
    if not isinstance(network, LanguageModel):
        raise TypeError("a plan with plays has a language model")
    words = network.embedding.num_embeddings - (BEGIN + 1)
    if words < 1:
        raise ConfigError(
            f"model.sizes.vocabulary: must be at least {BEGIN + 2}; two are no words."
        )
    task = tasks.next_word(tasks.speaking_roles(folder / WHEEL), vocabulary=words)
    return PlanData(task.users, task.test_x, task.test_y)


def _fed_emnist(folder: Path) -> PlanData:
    """The users of TensorFlow Federated's split, tested on everyone's test examples."""
    users, _ = tasks.federated_hdf5(folder / "fed_emnist_train.h5")
    test, _ = tasks.federated_hdf5(folder / "fed_emnist_test.h5")
    if users.x.shape[1:] != test.x.shape[1:]:
        raise ConfigError(f"{folder}: the files for training and test have images of other shapes.")
    return PlanData(users, test.x, test.y)


def _dealt(task: tasks.Task, data: Data, users: int) -> list[Tensor]:
    """Who holds which training examples."""
    if data.alpha is not None:
        return tasks.dirichlet_users(
            task.train_y, users=users, alpha=data.alpha, data_seed=data.seed
        )
    if data.classes_each is not None:
        return tasks.pathological_users(
            task.train_y, users=users, classes_each=data.classes_each, data_seed=data.seed
        )
    return tasks.iid_users(len(task.train_x), users=users, data_seed=data.seed)


def _images(data: Data) -> tasks.Task:
    if data.task == "digits":
        return tasks.digits()
    if data.task == "fashion-mnist":
        return tasks.fashion_mnist(data.directory)
    readers = {"emnist": tasks.emnist, "cifar10": tasks.cifar10, "cifar100": tasks.cifar100}
    return readers[data.task](_folder(data))


def _folder(data: Data) -> Path:
    if data.directory is None:
        raise TypeError("a plan names the folder of a task that is read from files")
    return data.directory


def refuse_other_shapes(network: nn.Module, data: PlanData) -> None:
    """Try the network on one example.

    Raises:
        ConfigError: it does not take it, or has too few outputs.
    """
    try:
        with torch.no_grad():
            *places, outputs = network(data.test_x[:1]).shape
    except (RuntimeError, IndexError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model: does not take the task's examples, of shape {tuple(data.test_x.shape[1:])} "
            f"and type {data.test_x.dtype}: {reason}."
        ) from None
    if places != list(data.test_y[:1].shape):
        raise ConfigError(
            "model: does not take the task's examples, of shape "
            f"{tuple(data.test_x.shape[1:])}: it gives outputs of shape {(*places[1:], outputs)} "
            "for one; must be one number per class."
        )
    most = max(int(data.users.y.max()), int(data.test_y.max()))
    if most >= outputs:
        raise ConfigError(f"model: has {outputs} outputs, but the task {most + 1} classes.")
