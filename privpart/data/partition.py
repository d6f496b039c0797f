"""Partition: who holds which examples, and who takes part in which round.

Heterogeneous users: partitions in which users hold different classes, or their own writing.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.data.users import Users


def iid_users(examples: int, *, users: int, data_seed: int) -> list[Tensor]:
    """Deal ``examples`` at random to ``users``, equally many to each; the remainder stays unused.

    Returns:
        Per user, the rows of their examples.
    """
    users = checks.count("users", users)
    each = examples // users
    if each == 0:
        raise ConfigError(f"users={users}: there are only {examples} examples to deal out.")
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(data_seed))
    return list(torch.split(order[: users * each], each))


def cohorts_once_each(*, users: int, rounds: int, data_seed: int) -> Sequence[Sequence[int]]:
    """Split all users at random into one cohort per round, so that each takes part at most once.

    Cohorts are of equal size; the remainder takes no part.
    """
    size = checks.count("users", users) // checks.count("rounds", rounds)
    if size == 0:
        raise ConfigError(f"rounds={rounds}: more than the {users} users, who take part once each.")
    order = torch.randperm(users, generator=torch.Generator().manual_seed(data_seed)).tolist()
    return [order[r * size : (r + 1) * size] for r in range(rounds)]


def cohorts_in_turn(
    *, users: int, size: int, rounds: int, data_seed: int
) -> Sequence[Sequence[int]]:
    """Deal all users at random into cohorts of ``size``, which take turns.

    A user comes back only when everyone else had a turn, exactly ``users // size`` rounds later:
    the largest separation that all users can have. The remainder takes no part.
    """
    turns = checks.count("users", users) // checks.count("size", size)
    if turns == 0:
        raise ConfigError(f"size={size}: must be at most users={users}.")
    once = cohorts_once_each(users=users, rounds=turns, data_seed=data_seed)
    cohorts = [cohort[:size] for cohort in once]  # one list each, however often it comes
    return [cohorts[r % turns] for r in range(checks.rounds(rounds))]


def dirichlet_users(y: Tensor, *, users: int, alpha: float, data_seed: int) -> list[Tensor]:
    """Deal equally many examples to each user, whose mix of classes is Dirichlet(alpha).

    As Hsu et al. 2019 (arXiv 1909.06335): a user draws a mix around the classes' frequencies, then
    its examples one by one; a class that is used up is drawn no more.

    Args:
        y: class of each example, shape (n,).
        users: number of users, 1 to n; the remainder of n / users stays unused.
        alpha: > 0; small makes users of one class, large makes them alike.
        data_seed: of all draws.

    Returns:
        Per user, the rows of their examples.
    """
    users, alpha = checks.count("users", users), checks.positive("alpha", alpha)
    each = _share(len(y), users)
    generator = np.random.default_rng(data_seed)
    classes = y.numpy()
    left = [
        generator.permutation(np.flatnonzero(classes == c)).tolist() for c in np.unique(classes)
    ]
    frequency = np.array([len(rows) for rows in left]) / len(classes)
    found = []
    for _ in range(users):
        logs = _log_gamma_draws(alpha * frequency, generator)
        own: list[int] = []
        while len(own) < each:
            open_ = np.array([bool(rows) for rows in left])
            # in logarithms: at a small alpha every open class may have a share that rounds to zero
            weights = np.exp(np.where(open_, logs - logs[open_].max(), -np.inf))
            wanted = generator.multinomial(each - len(own), weights / weights.sum())
            for rows, count in zip(left, wanted, strict=True):
                taken = min(int(count), len(rows))
                own += [rows.pop() for _ in range(taken)]
        found.append(torch.tensor(own))
    return found


def pathological_users(y: Tensor, *, users: int, classes_each: int, data_seed: int) -> list[Tensor]:
    """Deal ``classes_each`` shards of class-sorted examples to each user (McMahan et al. 2017).

    A shard seldom spans two classes, so a user has about ``classes_each`` of them. The remainder of
    n / (users * classes_each) stays unused.

    Returns:
        Per user, the rows of their examples.
    """
    users, classes_each = checks.count("users", users), checks.count("classes_each", classes_each)
    size = _share(len(y), users * classes_each)
    generator = torch.Generator().manual_seed(checks.count("data_seed", data_seed, minimum=0))
    order = torch.randperm(len(y), generator=generator)
    order = order[torch.sort(y[order], stable=True).indices]
    shards = torch.split(order[: size * users * classes_each], size)
    dealt = torch.randperm(len(shards), generator=generator).view(users, classes_each).tolist()
    return [torch.cat([shards[shard] for shard in own]) for own in dealt]


def natural_users(owners: Sequence[str | int]) -> dict[str | int, Tensor]:
    """Give each example to whoever made it.

    Args:
        owners: per example, a name or number of its user.

    Returns:
        User -> rows, in order of first appearance.
    """
    found: dict[str | int, list[int]] = {}
    for row, owner in enumerate(owners):
        found.setdefault(owner, []).append(row)
    return {owner: torch.tensor(rows) for owner, rows in found.items()}


class Partitions(Protocol):
    """What flwr-datasets' partitioners have, and anything else that hands out users by number."""

    @property
    def num_partitions(self) -> int:
        """Number of users."""
        ...

    def load_partition(self, partition_id: int) -> object:
        """Return the examples of one user."""
        ...


def users_of(partitions: Partitions, examples: Callable[[object], tuple[Tensor, Tensor]]) -> Users:
    """Return the users of any object with ``num_partitions`` and ``load_partition(i)``.

    Args:
        partitions: hands out the users.
        examples: makes (x, y) of what ``load_partition`` returns, shapes (n, ...) and (n,).

    Raises:
        ConfigError: no user, or x and y of different lengths.
    """
    if not partitions.num_partitions >= 1:
        raise ConfigError("partitions: there is no user in them.")
    parts = [examples(partitions.load_partition(user)) for user in range(partitions.num_partitions)]
    for user, (x, y) in enumerate(parts):
        if len(x) != len(y):
            raise ConfigError(f"user {user} has {len(x)} examples but {len(y)} classes.")
    lengths = [len(y) for _, y in parts]
    rows = torch.split(torch.arange(sum(lengths)), lengths)
    return Users(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), rows)


def _share(examples: int, parts: int) -> int:
    if examples // parts == 0:
        raise ConfigError(f"{parts} parts of {examples} examples: there are too few examples.")
    return examples // parts


def _log_gamma_draws(
    shapes: np.ndarray[tuple[int], np.dtype[np.float64]], generator: np.random.Generator
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Logarithms of Gamma(shape) draws, which make a Dirichlet draw when normalised.

    Gamma(a) = Gamma(a + 1) U^(1/a) (Marsaglia and Tsang 2000), so nothing underflows.
    """
    uniform = generator.random(len(shapes))
    return np.asarray(np.log(generator.gamma(shapes + 1)) + np.log1p(-uniform) / shapes)
