"""Partition: who holds which examples, and who takes part in which round."""

from collections.abc import Sequence

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError


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
