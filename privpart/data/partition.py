"""Partition: which user holds which examples, and which users form the cohort of a round.

Users are alike (``iid_users``) or differ in their mix of labels (``dirichlet_users``,
``pathological_users``). ``Index.of_owners`` deals examples to their authors.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.data.index import Index
from privpart.messages import ClientId


def iid_users(examples: int, *, users: int, data_seed: int) -> Index:
    """Assign ``examples`` at random, the same number to each user; a remainder stays unused."""
    users = checks.count("users", users)
    _share(checks.count("examples", examples), users)
    return Index.of_equal_parts(torch.randperm(examples, generator=_coins(data_seed)), users)


def cohorts_once_each(
    ids: Sequence[ClientId], *, rounds: int, data_seed: int
) -> list[list[ClientId]]:
    """Split the users at random into one cohort per round; each takes part at most once.

    Cohorts have equal size; a remainder of users takes no part.

    The ids are such as ``clients.ids`` or ``range(100)``.
    """
    size = len(ids) // checks.count("rounds", rounds)
    if size == 0:
        raise ConfigError(f"rounds={rounds}: must be at most the number of users, {len(ids)}.")
    order = [ids[place] for place in torch.randperm(len(ids), generator=_coins(data_seed)).tolist()]
    return [order[r * size : (r + 1) * size] for r in range(rounds)]


def cohorts_in_turn(
    ids: Sequence[ClientId], *, size: int, rounds: int, data_seed: int
) -> list[list[ClientId]]:
    """Split the users at random into cohorts of ``size`` and cycle through the cohorts.

    A user takes part again after all other cohorts, exactly ``len(ids) // size`` rounds later: the
    largest separation that all users can have. A remainder of users takes no part.

    The arguments are those of ``cohorts_once_each``; ``size`` is the number of users of a cohort.
    """
    turns = len(ids) // checks.count("size", size)
    if turns == 0:
        raise ConfigError(f"size={size}: must be at most the number of users, {len(ids)}.")
    once = cohorts_once_each(ids, rounds=turns, data_seed=data_seed)
    # cycles share these lists
    cohorts = [cohort[:size] for cohort in once]
    return [cohorts[r % turns] for r in range(checks.rounds(rounds))]


def dirichlet_users(y: Tensor, *, users: int, alpha: float, data_seed: int) -> list[Tensor]:
    """Assign the same number of examples to each user, with Dirichlet(alpha) mixes of labels.

    Follows Hsu et al. 2019 (arXiv 1909.06335): each user draws a mix of labels around their overall
    frequencies, then examples one by one from that mix; a label with no examples left is skipped.

    Args:
        y: label of each example, shape (n,).
        users: number of users, 1 to n; the remainder of n / users stays unused.
        alpha: concentration > 0; small values give users of one label, large values equal users.
        data_seed: seed of all draws.
    """
    users = checks.count("users", users)
    alpha = checks.positive("alpha", alpha)
    size = _share(len(y), users)
    generator = np.random.default_rng(checks.count("data_seed", data_seed, minimum=0))
    labels = y.numpy()
    pools = [generator.permutation(np.flatnonzero(labels == c)).tolist() for c in np.unique(labels)]
    frequency = np.array([len(rows) for rows in pools]) / len(labels)
    users_rows = []
    for _ in range(users):
        logs = _log_gamma_draws(alpha * frequency, generator)
        user_rows: list[int] = []
        while len(user_rows) < size:
            open_ = np.array([bool(rows) for rows in pools])
            # in logarithms: at a small alpha the share of every remaining label may round to zero
            weights = np.exp(np.where(open_, logs - logs[open_].max(), -np.inf))
            # a label may run out within a draw; the loop draws what is missing from the others
            wanted = generator.multinomial(size - len(user_rows), weights / weights.sum())
            for rows, count in zip(pools, wanted, strict=True):
                taken = min(int(count), len(rows))
                user_rows += [rows.pop() for _ in range(taken)]
        users_rows.append(torch.tensor(user_rows))
    return users_rows


def pathological_users(y: Tensor, *, users: int, classes_each: int, data_seed: int) -> list[Tensor]:
    """Assign ``classes_each`` shards of examples, sorted by label, to each user.

    Follows McMahan et al. 2017. A shard seldom spans two labels, so a user holds about
    ``classes_each`` labels. The remainder of n / (users * classes_each) stays unused.
    """
    users = checks.count("users", users)
    classes_each = checks.count("classes_each", classes_each)
    size = _share(len(y), users * classes_each)
    generator = _coins(data_seed)
    order = torch.randperm(len(y), generator=generator)
    # stable, so that examples of one label stay shuffled
    order = order[torch.sort(y[order], stable=True).indices]
    shards = torch.split(order[: size * users * classes_each], size)
    dealt = torch.randperm(len(shards), generator=generator).view(users, classes_each).tolist()
    return [torch.cat([shards[shard] for shard in numbers]) for numbers in dealt]


def _coins(data_seed: int) -> torch.Generator:
    seed = checks.count("data_seed", data_seed, minimum=0, maximum=2**63 - 1)
    return torch.Generator().manual_seed(seed)


def _share(examples: int, parts: int) -> int:
    if examples // parts == 0:
        raise ConfigError(f"{parts} parts of {examples} examples: use at most {examples} parts.")
    return examples // parts


def _log_gamma_draws(
    shapes: np.ndarray[tuple[int], np.dtype[np.float64]], generator: np.random.Generator
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the logarithms of Gamma(shape) draws; normalised, they are a Dirichlet draw.

    Uses Gamma(a) = Gamma(a + 1) U^(1/a) (Marsaglia and Tsang 2000), so nothing underflows.
    """
    uniform = generator.random(len(shapes))
    return np.asarray(np.log(generator.gamma(shapes + 1)) + np.log1p(-uniform) / shapes)
