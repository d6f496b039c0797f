"""Schedule costs: what a whole run takes from one client, partial rounds beside full ones.

FedPart (Wang et al. 2024) counts the uplink only: of M groups a partial round sends one, so on
average 1/M of a full round's bytes (its Eq. 5). Its Eq. 6 for computation lets every layer between
the output and the trained one compute both gradients. Frozen layers need no weight gradient, so a
real client does less: see ``measured``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from accounting import checks
from privpart.client import LocalTraining
from privpart.costs import client_costs
from privpart.model import PartialModel
from privpart.plan import Rounds
from privpart.wire import encode_model


@dataclass(frozen=True, slots=True)
class RunCosts:
    """What all rounds that it takes part in take from one client.

    Attributes:
        rounds: that it takes part in.
        bytes_up: of its messages.
        bytes_down_whole: of the server's, if each holds the whole trainable part.
        bytes_down_changed: if each holds only the groups that changed since the client's last
            round; the first holds all.
        flops: of its local steps, forward and backward, as they ran.
    """

    rounds: int
    bytes_up: int
    bytes_down_whole: int
    bytes_down_changed: int
    flops: int


def sent_numbers(rounds: Rounds, sizes: Sequence[int]) -> int:
    """Return how many numbers a client sends that is in every round.

    >>> sent_numbers(((0, 1), (0,), (1,)), [10, 5])
    30
    """
    return sum(sizes[group] for active in rounds for group in active)


def equation_5(groups: int) -> float:
    """Return a partial round's mean share of a full round's bytes, 1/M."""
    return 1 / checks.count("groups", groups)


def equation_6(active: Sequence[int], groups: int) -> float:
    """Return a round's share of a full round's computation by FedPart's model.

    All layers cost the same, backward twice as much as forward, and the backward pass runs from the
    output, which is the last group, down to the lowest active one. The mean over all M groups is
    Eq. 6: (2 M + 1) / (3 M), about 2/3.

    >>> sum(equation_6([g], 10) for g in range(10)) / 10
    0.7
    """
    reached = checks.count("groups", groups) - min(active)
    return (1 + 2 * reached / groups) / 3


def changed(rounds: Rounds, since: int | None, now: int) -> tuple[int, ...]:
    """Return the groups that a client lacks before round ``now`` if it last was in ``since``.

    It has what the server sent it then, so it lacks what was trained in ``since`` and after; None
    is a client that is in its first round, and lacks all.
    """
    every = rounds if since is None else rounds[since:now]
    return tuple(sorted({group for active in every for group in active}))


def measured(
    model: PartialModel,
    rounds: Rounds,
    x: Tensor,
    y: Tensor,
    *,
    local: LocalTraining,
    examples: int,
    every: int = 1,
) -> RunCosts:
    """Encode the messages of a run and run one local step of each kind of round, and add up.

    Args:
        model: with the groups of the schedule; left as it was.
        rounds: see ``Schedule.rounds``.
        x: one batch.
        y: its classes.
        local: how the client trains.
        examples: that the client holds, >= 1.
        every: rounds from one of the client's to the next, >= 1; its first is round 0.
    """
    own = range(0, len(rounds), checks.count("every", every))
    kinds = {
        active: client_costs(model, x, y, local=local, examples=examples, active=active)
        for active in dict.fromkeys(rounds[t] for t in own)
    }
    lacks = [changed(rounds, t - every if t else None, t) for t in own]
    sizes = {groups: len(encode_model(model, active=groups)) for groups in dict.fromkeys(lacks)}
    costs = [kinds[rounds[t]] for t in own]
    return RunCosts(
        rounds=len(own),
        bytes_up=sum(c.bytes_up for c in costs),
        bytes_down_whole=sum(c.bytes_down for c in costs),
        bytes_down_changed=sum(sizes[groups] for groups in lacks),
        flops=sum(c.forward_flops + c.backward_flops for c in costs),
    )
