"""Rounding: what bfloat16 would save a plan on this machine, and what it would change.

Time and updates are those of random examples with the shapes of a client's own, so that neither
tells of anybody's data.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accounting.checks import ConfigError
from accounting.report import down
from privpart.data.batches import Batch, map_tensors
from privpart.data.clients import Clients
from privpart.data.users import Users
from privpart.engines.embedded import EmbeddedEngine
from privpart.engines.methods import one_thread
from privpart.messages import ClientId, RoundTask
from privpart.plan import PrivacyPlan
from privpart.training.training import Training

_CLIENTS, _STEPS, _TURNS = 10, 2, 3
_SECONDS = 0.3
"""Of processor time that clients may take together, if they are more than one."""
_UNCLIPPED = 1e30


def of_bfloat16(setup: Training, promised: PrivacyPlan) -> str | None:
    """Return what bfloat16 would save and change; None where clients compute in float32 only.

    Raises:
        ConfigError: the plan's code fails on random examples.
    """
    engine = setup.trainer
    if not isinstance(engine, EmbeddedEngine):
        return None
    local, rounding = engine.local_of(0), replace(engine.options, precision="bfloat16")
    try:
        rounding.refuse(local, local_parts=setup.model.own.numel() > 0)
    except ConfigError:
        return None
    steps = min(local.steps or _STEPS, max(_STEPS, len(local.alternate)))
    batch = local.batch_size
    if isinstance(setup.clients, Users):
        index = setup.clients.indices
        batch = min(batch, -(-index.rows // len(index)))
    clients = _random(setup.clients, steps * batch)
    short = replace(local, epochs=1, steps=steps, batch_size=batch)
    given: dict[str, Any] = {"local": short, "data_seed": 0, "report": lambda _: None}
    both = [
        EmbeddedEngine(setup.model, clients, **given, **asdict(options))
        for options in (replace(rounding, precision="float32"), rounding)
    ]
    active = promised.active(0)
    task = RoundTask(0, (0,), _UNCLIPPED, promised.hash, active)
    start = setup.model.flat.clone()
    with one_thread():
        _seconds(both[0], task, start)
        one = _seconds(both[0], task, start)
        count = min(_CLIENTS, promised.report_goal, max(1, int(_SECONDS / max(one, 1e-3))))
        task = replace(task, clients=tuple(range(count)))
        exact, rounded = (_updates(engine, task, start) for engine in both)
        times = [[_seconds(engine, task, start) for engine in both] for _ in range(1 + _TURNS)]
    method = both[1].method
    if method is None or not method.bfloat16:
        return f"would change nothing: clients are computed by {method}"
    before, after = (1000 * min(turns) for turns in zip(*times[1:], strict=True))
    text = (
        f"would take {after:.3g} instead of {before:.3g} ms of processor time for {steps} steps of "
        f"{count} clients, on random examples"
    )
    difference = statistics.median(
        ((rounded - exact).norm(dim=1) / exact.norm(dim=1)).nan_to_num(math.inf).tolist()
    )
    if not math.isfinite(difference):
        return f"{text}, of which some updates are not finite or zero"
    text += f"; updates differ by {difference:.2g} of their length"
    spread = promised.update_noise_multiplier
    if spread and active is None and promised.clip_norms is None:
        spread *= math.sqrt(float(promised.mechanism.prefix_variance()[-1]) * start.numel())
        most = promised.rounds * promised.report_goal * difference
        text += f", and the noise of the last model is at least {down(spread / most, 2)} times "
        text += "what that adds up to"
    return text


def _random(clients: Clients, rows: int) -> Clients:
    """Return clients with random examples of the same shapes."""
    generator = torch.Generator().manual_seed(0)

    def alike(tensor: Tensor) -> Tensor:
        shape = (rows * (_CLIENTS if isinstance(clients, Users) else 1), *tensor.shape[1:])
        if tensor.is_floating_point():
            return torch.rand(shape, generator=generator)
        # words and labels that every vocabulary has
        return torch.randint(2, shape, generator=generator).to(tensor.dtype)

    if isinstance(clients, Users):
        x, y = alike(clients.x[:1]), alike(clients.y[:1])
        return Users(x, y, torch.split(torch.arange(len(x)), rows))
    return _Same(map_tensors(alike, clients.examples(clients.ids[0])))


@dataclass(frozen=True, slots=True)
class _Same:
    """Clients that all have these examples."""

    batch: Batch
    ids: Sequence[ClientId] = range(_CLIENTS)

    def examples(self, _: ClientId, /) -> Batch:
        """Return them."""
        return self.batch


def _updates(engine: EmbeddedEngine, task: RoundTask, start: Tensor) -> Tensor:
    return torch.stack([answer.update for answer in engine.run(task, start)])


def _seconds(engine: EmbeddedEngine, task: RoundTask, start: Tensor) -> float:
    """Return the processor seconds of a round's clients."""
    began = time.process_time()
    sums: Any = engine.sums(task, start)
    for _ in engine.run(task, start) if sums is None else sums:
        pass
    return time.process_time() - began
