"""Plan checks: what a plan's own tables show cannot be trained, said before anything is read.

Whoever asks for a plan's cost is told what `privpart train` would say. What needs the data is
checked in ``plan_data``; what depends on how clients are computed, in ``training``.
"""

from typing import TYPE_CHECKING

import torch

from accounting import checks
from accounting.checks import ConfigError
from privpart.model import refuse_batch_statistics
from privpart.models import MODELS
from privpart.patterns import matching_parameters
from privpart.start_values import seed_bytes

if TYPE_CHECKING:  # which checks its tables here
    from privpart.plan_file import Data, Model, PlanFile

NATURAL = ("fed-emnist", "shakespeare")
"""Tasks whose users are given, not dealt."""
_BUNDLED = ("digits", "fashion-mnist")
"""Tasks that need no folder: one comes with scikit-learn, one with Debian."""
_MOST_NUMBERS = 2**31
"""8 GB, of which a server keeps several: parameters, sum and noise."""
_MOST_PEOPLE = 10**8
_MOST_SEED = 2**63 - 1
"""What generators of torch take."""


def refuse_misfits(plan: "PlanFile") -> None:
    """Refuse tables that contradict each other, or that nothing could be trained with.

    Raises:
        ConfigError: the first fault, as `privpart train` says it.
    """
    _refuse_other_clients(plan)
    _refuse_other_data(plan.data)
    _refuse_other_users(plan.data)
    _refuse_other_networks(plan.model)
    if plan.schedule is None and plan.model.groups is not None:
        raise ConfigError("model.groups: need a table [schedule]; else all train always.")
    if plan.schedule is not None:
        groups = len(plan.model.grouped()[0])
        if (length := plan.schedule.length(groups)) != plan.privacy.rounds:
            raise ConfigError(
                f"privacy.rounds={plan.privacy.rounds}: the schedule has {length} rounds for "
                f"{groups} groups; both must be the same."
            )
    _refuse_short_cohorts(plan)


def _refuse_other_clients(plan: "PlanFile") -> None:
    """What clients cannot do together, or with this task."""
    if plan.select is not None and plan.schedule is not None:
        raise ConfigError("schedule: cannot be together with [select]; leave one of them out.")
    if plan.data.task == "shakespeare" and plan.model.name in set(MODELS) - {"word_lm"}:
        raise ConfigError(
            'model.name: shakespeare is next-word prediction; its model is "word_lm".'
        )
    if plan.data.task != "shakespeare" and plan.model.name == "word_lm":
        raise ConfigError('data.task: word_lm predicts the next word; its task is "shakespeare".')
    if plan.select is not None and plan.client.objective == "moon":
        raise ConfigError(
            "client.objective: clients that select keep no model of their own, which moon needs; "
            "use fedavg or fedprox."
        )
    if plan.client.loss != "cross_entropy":
        raise ConfigError(
            f"client.loss={plan.client.loss}: is for tags; every task of a plan has one class per "
            "example. Use cross_entropy."
        )


def _refuse_other_data(data: "Data") -> None:
    """Options of another task or partition, or missing ones."""
    natural = data.task in NATURAL
    if natural != (data.users is None) or (natural and data.partition != "iid"):
        says = "has users of its own; leave users and partition out" if natural else "needs users"
        raise ConfigError(f"data: {data.task} {says}.")
    for name, owner in (("alpha", "dirichlet"), ("classes_each", "pathological")):
        if (getattr(data, name) is not None) != (data.partition == owner):
            raise ConfigError(f"data.{name}: a {owner} partition needs it, and no other has it.")
    checks.count("data.seed", data.seed, minimum=0, maximum=_MOST_SEED)
    if data.directory is None and data.task not in _BUNDLED:
        raise ConfigError(
            f"data.directory: {data.task} is read from files; name their folder. Nothing is "
            "downloaded."
        )
    if data.directory is not None and data.task == "digits":
        raise ConfigError("data.directory: digits come with scikit-learn; leave it out.")


def _refuse_other_users(data: "Data") -> None:
    """Numbers of users that cannot be dealt examples, or fill no cohort."""
    size = checks.count("data.clients_per_round", data.clients_per_round, maximum=_MOST_PEOPLE)
    if data.alpha is not None:
        checks.positive("data.alpha", data.alpha)
    if data.classes_each is not None:
        checks.count("data.classes_each", data.classes_each)
    if data.users is not None:
        users = checks.count("data.users", data.users, maximum=_MOST_PEOPLE)
        if size > users:
            raise ConfigError(f"data.clients_per_round={size}: must be at most data.users={users}.")


def _refuse_other_networks(model: "Model") -> None:
    """Networks that cannot be built, trained in part, or held."""
    seed_bytes(model.seed)
    for name, value in model.sizes.items():
        for size in value if isinstance(value, list) else [value]:
            if isinstance(size, int):  # else the network says what is wrong
                checks.count(f"model.sizes.{name}", int(size), minimum=0, maximum=_MOST_NUMBERS)
    with torch.device("meta"):  # shapes only
        network = model.network()
    refuse_batch_statistics(network)
    matching_parameters(network, model.train)
    if (total := sum(own.numel() for own in network.parameters())) > _MOST_NUMBERS:
        raise ConfigError(
            f"model.sizes: the network has {total:,} numbers; must be at most {_MOST_NUMBERS:,}."
        )


def _refuse_short_cohorts(plan: "PlanFile") -> None:
    """Cohorts that take turns: all members of one may take part again, or none may."""
    limits, size = plan.privacy, plan.data.clients_per_round
    if size < limits.minimum_cohort:
        raise short_cohort(limits.rounds, 0, size, limits.minimum_cohort)
    if plan.data.users is None:
        return
    turns = plan.data.users // size
    short = turns * (limits.max_participations if turns >= limits.min_separation else 1)
    if short < limits.rounds:
        raise short_cohort(limits.rounds, short, 0, limits.minimum_cohort)


def short_cohort(rounds: int, round_: int, came: int, least: int) -> ConfigError:
    """Return what is said of a run whose limits leave too few clients from a round on."""
    return ConfigError(
        f"rounds={rounds}: from round {round_} on, the limits on participation leave "
        f"{came} clients, {least} are the least. Plan fewer rounds, smaller "
        "cohorts, or more participations (which cost more)."
    )
