"""Task data: the users and test examples of a plan, and which users are held out of both.

Held-out users are public: nobody trains on them, and nothing is tested on them. Who they are does
not depend on the plan's seed, so that what was chosen on them in one training is never trained on
in another. A plan that is measured on them has no test examples at all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from accounting.checks import ConfigError
from privpart.data import partition, tasks
from privpart.data.batches import Batch, count_rows
from privpart.data.clients import Clients, SomeClients
from privpart.data.index import Index
from privpart.data.tasks.shakespeare import BEGIN, WHEEL
from privpart.data.users import Users
from privpart.engines.methods import client_generator, fetched
from privpart.messages import ClientId
from privpart.models.transformer import LanguageModel
from privpart.training.plan_file import Data

_HELD_OUT_SEED = 20_220_630
"""Of the draw of the held-out users, which is the same in every plan."""


@dataclass(frozen=True, slots=True)
class PlanData:
    """Users of a plan, and examples that no client holds, to measure on.

    A label of -100 does not count. ``words`` are the texts of tokens, by id.
    """

    users: Users
    test_x: Tensor
    test_y: Tensor
    words: tuple[str, ...] = ()


Reader = Callable[[str, Path | None, int], "tasks.Task | PlanData"]
"""``read_task``, or a function that keeps what it read."""


def plan_data(data: Data, network: nn.Module, read: "Reader | None" = None) -> PlanData:
    """Read a task and deal its examples to users; ``network`` determines a vocabulary's size."""
    if data.task is None:
        raise TypeError("a plan without a task has clients of its own")
    task = (read or read_task)(data.task, data.directory, _words(data, network))
    if isinstance(task, PlanData):
        return _without_held_out(task, data)
    # Each held-out user has as many examples as the others, all of which leave the training set.
    rows = torch.arange(len(task.train_y))
    public = rows[:0]
    if data.held_out:
        users = (data.users or 0) + data.held_out
        if len(rows) < users:
            raise ConfigError(f"data.held_out={data.held_out}: {users} users are more than images.")
        order = torch.randperm(len(rows), generator=_fixed())
        public, rows = order.tensor_split([data.held_out * (len(rows) // users)])
    x, y = (task.train_x, task.train_y) if not data.held_out else _at(task, rows)
    dealt = Users(x, y, _dealt(y, data, data.users or 0))
    if data.measured_on is not None:
        return PlanData(dealt, *_at(task, public))
    return PlanData(dealt, task.test_x, task.test_y)


def _at(task: tasks.Task, rows: Tensor) -> tuple[Tensor, Tensor]:
    return task.train_x[rows], task.train_y[rows]


def _fixed() -> torch.Generator:
    return torch.Generator().manual_seed(_HELD_OUT_SEED)


def _without_held_out(task: PlanData, data: Data) -> PlanData:
    """Return users of a task that says who they are, without those held out."""
    if not data.held_out:
        return task
    users, public = held_out_of(task.users, data.held_out)
    if not isinstance(users, Users):
        raise TypeError("some of Users are Users")
    if data.measured_on is None:
        return PlanData(users, task.test_x, task.test_y, task.words)
    rows = torch.cat([task.users.indices[client] for client in public])
    return PlanData(users, task.users.x[rows], task.users.y[rows], task.words)


def held_out_of(clients: Clients, count: int) -> tuple[Clients, list[ClientId]]:
    """Return the clients that remain, and the ids of those held out: a fixed draw.

    Raises:
        ConfigError: nobody would remain.
    """
    ids = list(clients.ids)
    if count >= len(ids):
        raise ConfigError(
            f"data.held_out={count}: there are {len(ids)} clients; at least one must remain."
        )
    # By place, not by id: who is public must not depend on how people are called.
    drawn = torch.randperm(len(ids), generator=_fixed()).tolist()
    public = sorted(drawn[:count])
    remaining = [ids[place] for place in sorted(drawn[count:])]
    return chosen(clients, remaining), [ids[place] for place in public]


def chosen(clients: Clients, ids: Sequence[ClientId]) -> Clients:
    """Return the clients with these ids, of the same kind."""
    if isinstance(clients, Users):
        return Users(clients.x, clients.y, clients.indices.only(ids), allow_empty=True)
    return SomeClients(clients, ids)


def read_task(task: str, directory: Path | None, words: int) -> tasks.Task | PlanData:
    """Return a task's examples, or its users where the files say who they are.

    ``words`` is the number of words that a language model knows; 0 for other networks.
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


def _dealt(y: Tensor, data: Data, users: int) -> Index | list[Tensor]:
    """Return the rows of each user's training examples."""
    if data.alpha is not None:
        return partition.dirichlet_users(y, users=users, alpha=data.alpha, data_seed=data.seed)
    if data.classes_each is not None:
        return partition.pathological_users(
            y, users=users, classes_each=data.classes_each, data_seed=data.seed
        )
    return partition.iid_users(len(y), users=users, data_seed=data.seed)


def holders(
    clients: Clients, ids: Iterable[ClientId], data_seed: int, round_: int
) -> Iterator[tuple[ClientId, Batch, torch.Generator]]:
    """Yield those who have examples, with these and the generator of their round."""
    for client in ids:
        generator = client_generator(data_seed, round_, client)
        if count_rows(examples := fetched(clients, client, generator)):
            yield client, examples, generator
