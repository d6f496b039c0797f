"""Task data: the users and test examples of a plan whose task is built in."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from accounting.checks import ConfigError
from privpart.data import federated_hdf5, partition, tasks
from privpart.data.tasks.shakespeare import BEGIN, WHEEL
from privpart.data.users import Users
from privpart.experiment.plan_file import Data
from privpart.models.transformer import LanguageModel


@dataclass(frozen=True, slots=True)
class PlanData:
    """Users and test examples of a plan. All of them are simulated or public.

    Attributes:
        users: the clients' examples.
        test_x: examples that no client holds.
        test_y: their labels; -100 does not count.
    """

    users: Users
    test_x: Tensor
    test_y: Tensor


def plan_data(data: Data, network: nn.Module) -> PlanData:
    """Read a task and deal its examples to users.

    Args:
        data: the plan's table.
        network: the plan's network; a language model determines the size of the vocabulary.

    Raises:
        ConfigError: missing or unexpected files, or more users than examples.
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
            f"model.sizes.vocabulary: must be at least {BEGIN + 2}, because {BEGIN + 1} entries "
            "are not words."
        )
    task = tasks.next_word(tasks.speaking_roles(folder / WHEEL), vocabulary=words)
    return PlanData(task.users, task.test_x, task.test_y)


def _fed_emnist(folder: Path) -> PlanData:
    """Return the users of TensorFlow Federated's split and the test examples of all of them."""
    users, _ = federated_hdf5(folder / "fed_emnist_train.h5")
    test, _ = federated_hdf5(folder / "fed_emnist_test.h5")
    if users.x.shape[1:] != test.x.shape[1:]:
        raise ConfigError(
            f"{folder}: the files for training and test have images of different shapes."
        )
    return PlanData(users, test.x, test.y)


def _dealt(task: tasks.Task, data: Data, users: int) -> list[Tensor]:
    """Return the rows of each user's training examples."""
    if data.alpha is not None:
        return partition.dirichlet_users(
            task.train_y, users=users, alpha=data.alpha, data_seed=data.seed
        )
    if data.classes_each is not None:
        return partition.pathological_users(
            task.train_y, users=users, classes_each=data.classes_each, data_seed=data.seed
        )
    return partition.iid_users(len(task.train_x), users=users, data_seed=data.seed)


def _images(data: Data) -> tasks.Task:
    if data.task is None:
        raise TypeError("a plan without a task has clients of its own")
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
