"""Engine path: what an engine makes of many clients, beside each trained and clipped apart.

The plan's own network, and its clients' examples under many new ids, go through the engine by every
method that the plan may take on this machine: one client after another, vectorized, ghost clipping,
with and without cached prefixes, as single updates and as sums. They are also trained one after
another, without a clip, and clipped by the auditor; some of them each with nobody beside it. The
median update is as long as 64 clip norms, so that a clip that is left out adds many; what an engine
sums is clipped to nine tenths of that. What an engine hands over must be

updates     each at most the clip norm long, in the order of the task, once
sums        of the clients that each names: of their clipped updates, up to the methods' rounding

At the end the sums of a few clients pass the server's grid and noise, of one seed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accounting.checks import ConfigError
from attacks.lower_bounds.checks import Check
from privpart.data.clients import Clients
from privpart.data.users import Users
from privpart.engines.embedded import EmbeddedEngine
from privpart.engines.methods import Method
from privpart.engines.options import EngineOptions
from privpart.engines.protocol import Engine
from privpart.loop import CohortTooSmallError, fit
from privpart.messages import ClientId, ClientUpdate, RoundTask
from privpart.noise.source import SeededSource
from privpart.plan import PrivacyPlan
from privpart.server import RoundCounts, Server
from privpart.training.training import Training

Array = NDArray[np.float64]
_SHORT = 64.0
"""Median update in clip norms: what a clip that is left out adds."""
_CHUNK = 32
"""Clients that are compared as one sum."""
_ALONE = 4
"""Clients whose sums are of one client, and compared exactly."""
_SEPARATELY = 16
"""Clients that are trained once more, each with nobody beside it."""
_ROUNDING = {True: 1e-3, False: 0.02}
"""Of a clip norm per client, by which methods may differ in a sum: of plain SGD, and of others."""
_COARSE = 0.5
"""The same of products rounded to bfloat16; the sum of one client is never longer all the same."""
_LENGTH = 1e-6
_FLIPS = 50
"""Clients' worth of rounding that activations add which rounding moves across a kink."""
_SUMMED = 0.9
"""Clip norm of what an engine sums, in those of an update: another one is seen."""
_MOST_NUMBERS = 2 * 10**7
"""Clients times parameters that are kept."""
_NEVER_REACHED = 1e30
_WORK = 4e9
"""Products that a replayed method may take, by the estimate below."""
_LEAST, _MOST = 2 * _CHUNK, 512
_FEW = {"loop": 128, "loopbfloat16": 32}
"""Clients of methods that take each by itself, and the longest."""
_METHODS: Sequence[dict[str, Any]] = (
    {"batching": "loop"},
    {"batching": "loop", "precision": "bfloat16"},
    {"batching": "auto"},
    {"batching": "auto", "cache_prefix": False},
    {"batching": "vmap"},
    {"batching": "auto", "sums": True},
    {"batching": "auto", "sums": True, "cache_prefix": False},
    {"batching": "vmap", "sums": True},
    {"batching": "vmap", "precision": "bfloat16"},
    {"batching": "vmap", "precision": "bfloat16", "sums": True},
)


class _Again:
    """Clients of a population under new ids: number i has the examples of one of them."""

    def __init__(self, clients: Clients, count: int) -> None:
        self.ids: Sequence[ClientId] = range(count)
        self._clients = clients
        self._known = list(clients.ids[: min(count, len(clients.ids))])

    def examples(self, client: ClientId) -> Any:  # noqa: ANN401  a batch
        return self._clients.examples(self._known[int(client) % len(self._known)])


def _under_new_ids(clients: Clients, count: int) -> Clients:
    if not isinstance(clients, Users):
        return _Again(clients, count)
    known = list(clients.ids[: min(count, len(clients.ids))])
    rows = [clients.indices[known[i % len(known)]] for i in range(count)]
    return Users(clients.x, clients.y, rows, allow_empty=True)


def engine_checks(setup: Training | None, promised: PrivacyPlan) -> list[Check]:
    """Return a row per method, and one for the server's way from sums to the model."""
    if setup is None or not isinstance(setup.engine, EmbeddedEngine):
        return []
    local = setup.engine.local_of(0)
    steps = min(local.steps or 2, max(2, len(local.alternate)))
    local = replace(local, epochs=1, steps=steps)
    products = 6.0 * setup.model.parameter_count * local.batch_size * steps
    most = min(_WORK / products, _MOST_NUMBERS / setup.model.flat.numel())
    count = max(_LEAST, min(_MOST, int(most) // _CHUNK * _CHUNK))
    clients = _under_new_ids(setup.clients, count)
    chunks = [range(i, i + _CHUNK) for i in range(0, count, _CHUNK)]
    given: dict[str, Any] = {"local": local, "data_seed": 0, "report": lambda _: None}

    def engine(**options: Any) -> EmbeddedEngine:  # noqa: ANN401  those of EngineOptions
        return EmbeddedEngine(setup.model, clients, **given, **options)

    active = promised.active(0)
    start = setup.model.flat.clone()
    task = RoundTask(0, (), _NEVER_REACHED, promised.hash, active)
    slow = partial(engine, batching="loop", deterministic=True)
    alone = slow()
    raw = _updates(alone, replace(task, clients=tuple(range(count))), start)
    lengths = raw.norm(dim=1)
    median = float(lengths[lengths > 0].median()) if bool((lengths > 0).any()) else 0.0
    if not np.isfinite(median) or not median > 0:
        return [Check("clip in the engine", 0, 0.0, "nothing: no client has a finite update")]
    clip_norm = median / _SHORT
    asked = tuple(range(count))
    task = replace(task, clip_norm=clip_norm, sum_clip_norm=_SUMMED * clip_norm, clients=asked)
    expected = _clipped(raw, _SUMMED * clip_norm)
    rounding = _ROUNDING[local.plain_sgd]
    last = promised.rounds - 1
    few = replace(task, round=last, active=promised.active(last), clients=asked[:_SEPARATELY])
    rows = {"alone": _alone(slow, few, start)}
    prefixed = bool(setup.model.frozen)
    for options in _METHODS:
        rounds = options.get("precision") == "bfloat16"
        method = Method(vectorized=True, bfloat16=rounds)
        counterpart = f"clip in the engine, {method}{', sums' * options.get('sums', False)}"
        alike = counterpart in rows and options["batching"] == "vmap"
        if alike or ("cache_prefix" in options and not prefixed):
            continue  # it is the method that was taken before
        try:
            EngineOptions(**options).refuse(local, fetches=not isinstance(clients, Users))
            made = engine(**options)
        except ConfigError:
            continue
        number = _FEW.get(options["batching"] + options.get("precision", ""), count)
        some, coarse = replace(task, clients=asked[:number]), _COARSE if rounds else rounding
        row = _row(made, some, start, expected, coarse)
        kept = rows.get(row.name)
        rows[row.name] = row if kept is None or row.faults else kept
    if promised.sampling is None:
        short = replace(promised, clip_norm=task.clip_norm, clip_norms=None, minimum_cohort=1)
        summing = engine(batching="auto", sums=True)
        rows["server"] = _through_server(setup, short, summing, alone, chunks, rounding)
    return [*rows.values()]


def _alone(engine: Callable[[], EmbeddedEngine], task: RoundTask, start: Tensor) -> Check:
    """Train clients among others, and each by itself: nobody else may change an update.

    In new engines: some objectives keep something of a client from round to round.
    """
    together = _updates(engine(), task, start)
    faults = [
        f"The update of client {client!r} is another one when it is asked alone: other clients' "
        "examples are in it."
        for update, client in zip(together, task.clients, strict=True)
        if not torch.equal(_updates(engine(), replace(task, clients=(client,)), start)[0], update)
    ]
    sees = "one bit that depends on another client"
    return Check("a client among others and alone", len(together), 0.0, sees, tuple(faults[:3]))


def _through_server(
    setup: Training,
    plan: PrivacyPlan,
    engine: EmbeddedEngine,
    alone: EmbeddedEngine,
    chunks: Sequence[range],
    rounding: float,
) -> Check:
    """Run two rounds with what the engine hands over, and with nothing, under the same noise."""
    rounds = min(2, plan.rounds)
    cohorts = [list(chunk) for chunk in chunks[:rounds]]
    expected: list[Tensor] = []

    def models(trainer: Engine) -> list[Tensor]:
        server = Server(plan, setup.model.flat.clone(), source=SeededSource(0))
        released = [server.parameters.clone()]

        def keep(server: Server, _: RoundCounts) -> None:
            released.append(server.parameters.clone())

        fit(server, trainer, cohorts, commit=keep, stop_if_diverged=False)
        return released

    name = "engine and server together"
    try:
        with engine:
            trained = models(engine)
    except CohortTooSmallError as error:
        return Check(name, 0, 0.0, "sums that the server refuses", (str(error),))
    for t, cohort in enumerate(cohorts):
        task = RoundTask(t, tuple(cohort), _NEVER_REACHED, plan.hash, plan.active(t))
        expected.append(_clipped(_updates(alone, task, trained[t]), plan.clip_norm).sum(0))
    silent = models(_Silent(setup))
    faults = []
    for t in range(rounds):
        spans = setup.model.spans(plan.active(t))
        steps = [(m[t + 1].double() - m[t].double()) for m in (trained, silent)]
        moved = torch.cat([(steps[0] - steps[1])[span] for span in spans])
        excess = moved * plan.report_goal_at(t) - expected[t]
        off = float(excess.norm()) / plan.clip_norm
        if not off <= rounding * (len(cohorts[t]) + _FLIPS):
            faults.append(
                f"Round {t} moves the model by {off:.4g} clip norms more or less than its clients' "
                "clipped updates and the noise."
            )
    sees = f"{rounding * (_CHUNK + _FLIPS):.2g} clip norms in a round"
    name = f"{name}, {engine.method}"
    return Check(name, sum(map(len, cohorts)), 0.0, sees, tuple(faults))


class _Silent:
    """Answers zeros for every client."""

    def __init__(self, setup: Training) -> None:
        self._model = setup.model

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        for client in task.clients:
            yield task.update(client, torch.zeros(self._model.active_dim(task.active)))


def _updates(engine: EmbeddedEngine, task: RoundTask, start: Tensor) -> Tensor:
    answers = list(engine.run(task, start))
    return torch.stack([answer.update.nan_to_num() for answer in answers])


def _clipped(updates: Tensor, clip_norm: float) -> Tensor:
    """Return updates (clients, c) at most ``clip_norm`` long."""
    norms = updates.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return torch.mul(updates, (clip_norm / norms).clamp(max=1.0))


def _row(
    engine: EmbeddedEngine, task: RoundTask, start: Tensor, expected: Tensor, rounding: float
) -> Check:
    with engine:
        sums = engine.sums(task, start)
        if sums is None:
            faults = [*_of_updates(engine, task, start)]
        else:
            faults = [*_of_sums(list(sums), task, expected, rounding)]
            for client in task.clients[:_ALONE]:
                faults += _of_one(engine, replace(task, clients=(client,)), start)
    name = f"clip in the engine, {engine.method}"
    sees = f"a client longer than the clip norm by {_LENGTH:g} of it"
    if sums is not None:
        name += ", sums"
        sees = f"{rounding:g} clip norms per client of a sum, and for {_FLIPS} more"
    return Check(name, len(task.clients), 0.0, sees, tuple(faults[:3]))


def _of_updates(engine: EmbeddedEngine, task: RoundTask, start: Tensor) -> Iterator[str]:
    answers = list(engine.run(task, start))
    if [answer.client for answer in answers] != list(task.clients):
        yield f"The engine answers for {len(answers)} clients, in place of {len(task.clients)}."
    for answer in answers:
        length = float(answer.update.double().norm()) / task.clip_norm
        if length > 1 + _LENGTH:
            yield f"The update of client {answer.client!r} is {length:.4g} clip norms long."


def _of_one(engine: EmbeddedEngine, task: RoundTask, start: Tensor) -> Iterator[str]:
    for part in engine.sums(task, start) or ():
        length = float(part.total.norm()) / (_SUMMED * task.clip_norm)
        if length > 1 + _LENGTH:
            yield f"The sum of client {task.clients[0]!r} alone is {length:.4g} clip norms long."


def _of_sums(
    sums: Sequence[Any], task: RoundTask, clipped: Tensor, rounding: float
) -> Iterator[str]:
    named = [client for part in sums for client in part.clients]
    if sorted(named) != sorted(task.clients):
        yield f"The engine's sums name {len(named)} clients, in place of {len(task.clients)}."
    for part in sums:
        rows = [int(client) for client in part.clients]
        excess = part.total - clipped[rows].sum(0, dtype=torch.float64)
        off = float(excess.norm()) / task.clip_norm
        if not off <= rounding * (len(rows) + _FLIPS):
            nearest = int((clipped[rows].double() @ excess).argmax())
            yield (
                f"A sum of {len(rows)} clients differs by {off:.4g} clip norms from their clipped "
                f"updates; the nearest client is {part.clients[nearest]!r}."
            )
