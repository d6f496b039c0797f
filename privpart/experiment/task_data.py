"""Task data: the users and test examples of a plan whose task is built in."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from accounting.checks import ConfigError
from privpart.data import federated_hdf5, partition, tasks
from privpart.data.index import Index
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
        words: text of each token, by id; () of what is not text.
    """

    users: Users
    test_x: Tensor
    test_y: Tensor
    words: tuple[str, ...] = ()


Reader = Callable[[str, Path | None, int], "tasks.Task | PlanData"]
"""``read_task``, or a function that keeps what it read."""


def plan_data(data: Data, network: nn.Module, read: "Reader | None" = None) -> PlanData:
    """Read a task and deal its examples to users.

    Args:
        data: the plan's table.
        network: the plan's network; a language model determines the size of the vocabulary.
        read: reads the files; None takes ``read_task``. What it returns is not changed.

    Raises:
        ConfigError: missing or unexpected files, or more users than examples.
    """
    if data.task is None:
        raise TypeError("a plan without a task has clients of its own")
    found = (read or read_task)(data.task, data.directory, _words(data, network))
    if isinstance(found, PlanData):
        return found
    users = Users(found.train_x, found.train_y, _dealt(found, data, data.users or 0))
    return PlanData(users, found.test_x, found.test_y)


def read_task(task: str, directory: Path | None, words: int) -> tasks.Task | PlanData:
    """Return a task's examples, or its users where the files say who they are.

    Args:
        task: its name in a plan.
        directory: of its files; None where it needs none.
        words: number of words that a language model knows; 0 for other networks.

    Raises:
        ConfigError: missing or unexpected files.
    """
    if task == "digits":
        return tasks.digits()
    if task == "fashion-mnist":
        return tasks.fashion_mnist(directory)
    if directory is None:
        raise TypeError("a plan names the folder of a task that is read from files")
    if task == "shakespeare":
        plays = tasks.next_word(tasks.speaking_roles(directory / WHEEL), vocabulary=words)
        return PlanData(plays.users, plays.test_x, plays.test_y, ("?", "<begin>", *plays.words))
    if task == "fed-emnist":
        return _fed_emnist(directory)
    readers = {"emnist": tasks.emnist, "cifar10": tasks.cifar10, "cifar100": tasks.cifar100}
    return readers[task](directory)


def _words(data: Data, network: nn.Module) -> int:
    if data.task != "shakespeare":
        return 0
    if not isinstance(network, LanguageModel):
        raise TypeError("a plan with plays has a language model")
    words = network.embedding.num_embeddings - (BEGIN + 1)
    if words < 1:
        raise ConfigError(
            f"model.sizes.vocabulary: must be at least {BEGIN + 2}, because {BEGIN + 1} entries "
            "are not words."
        )
    return words


def _fed_emnist(folder: Path) -> PlanData:
    """Return the users of TensorFlow Federated's split and the test examples of all of them."""
    users, _ = federated_hdf5(folder / "fed_emnist_train.h5")
    test, _ = federated_hdf5(folder / "fed_emnist_test.h5")
    if users.x.shape[1:] != test.x.shape[1:]:
        raise ConfigError(
            f"{folder}: the files for training and test have images of different shapes."
        )
    return PlanData(users, test.x, test.y)


def _dealt(task: tasks.Task, data: Data, users: int) -> Index | list[Tensor]:
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
