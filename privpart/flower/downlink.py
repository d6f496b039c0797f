"""Downlink: each node is sent the groups of parameters that changed since the model it has.

With a schedule a round changes its active groups alone. A node that answered a round has that
round's model in the memory of its process; of the next one it lacks what was trained since. A hash
of the whole vector goes with each message: a node that does not come to it says that it lacks the
rest, and is sent the whole model from then on.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from privpart.flower.agreement import float_vector, flower
from privpart.messages import RoundTask
from privpart.model import PartialModel

Groups = tuple[int, ...] | None
"""Numbers of groups of parameters; None is the whole vector."""
WHOLE = "all"
"""What stands for the whole vector in a message; otherwise the numbers of groups do."""


def digest_of(vector: Tensor) -> str:
    """Return the SHA-256 of a float32 vector's bytes, in hex."""
    return hashlib.sha256(vector.detach().contiguous().numpy().tobytes()).hexdigest()


@dataclass(slots=True)
class Downlink:
    """What a server sends to each node; see the module.

    Attributes:
        model: the model that is trained.
        active: groups that each round trained, by round, since this process began.
        has: the last round that each node answered.
        forgets: nodes that lacked what they were thought to have.
    """

    model: PartialModel
    active: dict[int, tuple[int, ...]] = field(default_factory=dict)
    has: dict[int, int] = field(default_factory=dict)
    forgets: set[int] = field(default_factory=set)
    _start: Tensor = field(default_factory=lambda: torch.zeros(0))
    _round: int = 0
    _digest: str = ""
    _arrays: dict[Groups, Any] = field(default_factory=dict)

    def begin(self, task: RoundTask, start: Tensor) -> None:
        """Begin a round, whose model is ``start``, shape (d,)."""
        self._start, self._round, self._arrays = start.detach(), task.round, {}
        self._digest = ""
        if task.active is not None:
            self.active[task.round] = tuple(task.active)
            self._digest = digest_of(start)

    def groups(self, node: int) -> Groups:
        """Return the groups that a node lacks of this round's model."""
        before = self.has.get(node)
        if not self._digest or before is None or node in self.forgets:
            return None
        rounds = range(before, self._round)
        if any(number not in self.active for number in rounds):
            return None
        changed = {group for number in rounds for group in self.active[number]}
        return None if len(changed) == len(self.model.groups) else tuple(sorted(changed))

    def sent(self, groups: Groups) -> tuple[dict[str, str], Any]:
        """Return the fields and Flower's ``Array`` that carry some groups of this round's model."""
        if groups not in self._arrays:
            parts = [self._start[span] for span in self.model.spans(groups)]
            vector = torch.cat(parts) if parts else self._start[:0]
            self._arrays[groups] = flower().Array(vector.numpy())
        named = WHOLE if groups is None else " ".join(map(str, groups))
        return {"groups": named, "start": self._digest}, self._arrays[groups]

    def answered(self, node: int) -> None:
        """Note that a node answered this round, and so has its model."""
        self.has[node] = self._round


@dataclass(slots=True)
class Held:
    """The model that a node has, between two messages to its process."""

    vector: Tensor | None = None

    def completed(
        self,
        model: PartialModel,
        fields: Mapping[str, Any],
        array: Any,  # noqa: ANN401  Flower's Array, of anybody
    ) -> Tensor | None:
        """Return the model of a message, and keep it; None if what it sends is not enough."""
        groups, digest = _groups_of(fields.get("groups"), len(model.groups)), fields.get("start")
        if groups is None:
            whole = float_vector(array, model.dim)
        elif self.vector is None or (part := float_vector(array, model.active_dim(groups))) is None:
            return None
        else:
            whole, at = self.vector.clone(), 0
            for span in model.spans(groups):
                size = span.stop - span.start
                whole[span] = part[at : at + size]
                at += size
        if whole is None or not digest:
            return whole
        if digest_of(whole) != digest:
            return None
        self.vector = whole
        return whole


def _groups_of(text: object, count: int) -> Groups:
    """Return the groups that a message names; None for the whole vector, and for anything else."""
    allowed = {str(group): group for group in range(count)}
    words = text.split() if type(text) is str and text != WHOLE else [WHOLE]
    if not allowed.keys() >= {*words}:
        return None
    groups = [allowed[word] for word in words]
    return tuple(groups) if sorted({*groups}) == groups else None
