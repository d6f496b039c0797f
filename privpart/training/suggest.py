"""Suggestions: settings for a plan, from a few rounds on public data, before any budget is spent.

The norms of updates, a loss, or how well updates agree say something of the people whose data they
are computed from. So only public data are looked at: a built-in task's, users whom the plan holds
out, or proxy data that somebody names. Nothing here looks at the plan's other clients.

The signal is what the updates of different users have in common, clipped: the inner product of the
sums of two halves of them, so that what is particular to a user cancels. It is taken to last for
all rounds, which is more than it does. The noise is that of the last model, in all coordinates.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any, Literal

import numpy as np
import torch

from accounting import Independent, Mechanism, Participation, calibrate
from accounting.checks import ConfigError
from accounting.report import up
from privpart.client import batch_loss, client_update
from privpart.clip import l2_norm
from privpart.data.batches import count_rows
from privpart.data.clients import SomeClients
from privpart.engines.embedded import EmbeddedEngine
from privpart.engines.methods import one_thread
from privpart.noise.source import SeededSource
from privpart.plan import PrivacyPlan
from privpart.settings.client import LocalTraining
from privpart.training import own_code
from privpart.training.plan_file import PlanFile
from privpart.training.task_data import held_out_of, holders
from privpart.training.training import Own, Training, training

Line = tuple[str, str, Literal["ok", "note"]]
"""What a suggestion is about, the suggestion, and whether it differs from the plan or warns."""
_ROUNDS, _COHORT = 10, 20
"""Of a trial."""
_FACTORS = (1 / 3, 1.0, 3.0)
"""Learning rates of clients that are tried, by the plan's."""
_HOPELESS = 0.15
"""Signal to noise below which the example plan on digits learns next to nothing: with 1.4, 0.5 and
0.14 its accuracy was 0.79, 0.48 and 0.17, one seed each, where guessing has 0.1."""
_UNCLIPPED = 1e30
_LOWER = 0.98
"""Share of the plan's loss below which another rate is a suggestion."""
_BETTER = 1.2
"""Gain in signal to noise from which on another clip norm is a suggestion."""


def suggestions(plan: PlanFile, proxy: str | None = None) -> Iterator[Line]:
    """Yield suggestions for clip norm, rate, rounds and participations, and a verdict.

    Args:
        plan: the plan, without [select], [schedule] and sampling.
        proxy: own function that returns public or proxy clients, in place of the plan's.

    Raises:
        ConfigError: the plan is of another kind, names no public data, or adds no noise.
    """
    for kind, present in (
        ("[select]", plan.select),
        ("[schedule]", plan.schedule),
        ("sampling", plan.privacy.sampling),
    ):
        if present is not None:
            raise ConfigError(f"suggest: there are no suggestions for plans with {kind}.")
    if plan.privacy.noise_multiplier == 0:
        raise ConfigError("suggest: the plan adds no noise, so there is no budget to spend well.")
    setup = _public(plan, proxy)
    if not isinstance(setup.trainer, EmbeddedEngine):
        raise TypeError("a plan without [select] is simulated by an EmbeddedEngine")
    local, clip_norm = setup.trainer.local_of(0), plan.privacy.clip_norm
    rates = [factor * local.learning_rate for factor in _FACTORS]
    with one_thread():
        trials = [_trial(setup, replace(local, learning_rate=rate), clip_norm) for rate in rates]
    mine = trials[_FACTORS.index(1.0)]
    if not math.isfinite(mine.loss):
        raise ConfigError(
            f"suggest: training on public users did not stay finite at the plan's learning rate "
            f"{local.learning_rate:g}. Look at the rate and at the data."
        )
    count = len(setup.clients.ids)
    yield "looked at", f"{_ROUNDS} rounds of up to {_COHORT} of {count:,} public users", "ok"
    yield _clip_norm(plan, setup, local, mine)
    yield _rate(rates, trials)
    yield from _budget(plan, setup, mine)


def _public(plan: PlanFile, proxy: str | None) -> Training:
    """Return the training of public clients only; the examples of no others are fetched."""
    data: dict[str, Any] = {"held_out": 0, "measured_on": None}
    reference, objects = proxy or plan.data.clients, Own()
    if proxy is not None:
        data |= {"clients": proxy, "task": None, "options": {}}
    elif reference is not None and plan.data.held_out:
        made = own_code.load(reference, plan.folder)
        everybody = own_code.call(made, reference, "data.clients", **plan.data.options)
        _, ids = held_out_of(everybody, plan.data.held_out)
        data |= {"clients": None, "options": {}}
        objects = Own(clients=SomeClients(everybody, ids))
    elif plan.data.task is None:
        raise ConfigError(
            "suggest: the plan's clients are private, and what their updates look like would be a "
            "release. Hold users out who are public (held_out in [data]), or name proxy data: "
            "--proxy ./task.py:function."
        )
    tables = {
        "data": plan.data.model_copy(update=data),
        "privacy": plan.privacy.model_copy(update={"metrics": None}),
    }
    changed = plan.model_copy(update=tables)
    return training(changed, objects=objects, report=lambda _: None, part=True)


@dataclass(frozen=True, slots=True)
class _Trial:
    """What a few rounds without noise showed.

    ``norms`` are of every update; ``signal`` is how long the part of an update, clipped as the plan
    says, is that all have in common; ``loss``, of the users that come next, is infinite if training
    did not stay finite.
    """

    norms: list[float]
    signal: float
    loss: float


def _trial(setup: Training, local: LocalTraining, clip_norm: float) -> _Trial:
    """Train a few rounds by the plan's server, without noise."""
    size, seed = min(_COHORT, len(setup.clients.ids)), setup.plan.data.seed
    quiet = PrivacyPlan(
        mechanism=Independent(_ROUNDS),
        participation=Participation(_ROUNDS, _ROUNDS, 1),
        clip_norm=clip_norm,
        noise_multiplier=0.0,
        report_goal=size,
    )
    server, norms = setup.server(quiet, SeededSource(0)), list[float]()
    # Of every other user each, so that what is particular to a user cancels in their product.
    halves = [torch.zeros(len(setup.start), dtype=torch.float64) for _ in range(2)]
    ids = cycle(setup.clients.ids)
    how: dict[str, Any] = {"local": local, "clip_norm": _UNCLIPPED}
    for _ in range(_ROUNDS):
        cohort = list(islice(ids, size))
        task, start = server.task(cohort), server.parameters.clone()
        answers = [
            task.update(c, client_update(setup.model, start, examples, generator=generator, **how))
            for c, examples, generator in holders(setup.clients, cohort, seed, task.round)
        ]
        lengths = [l2_norm(answer.update) for answer in answers]
        if not all(map(math.isfinite, lengths)) or not server.run_round(answers).counted:
            return _Trial(norms, 0.0, math.inf)
        for number, (answer, length) in enumerate(zip(answers, lengths, strict=True)):
            halves[number % 2] += answer.update * (min(1.0, clip_norm / length) if length else 1.0)
        norms += lengths
    pairs = max(1, len(norms[::2]) * len(norms[1::2]))
    signal = math.sqrt(max(0.0, float(halves[0] @ halves[1])) / pairs)
    # The mean loss of the users that come next, by the examples that each has.
    total, rows = 0.0, 0
    for _, examples, _ in holders(setup.clients, islice(ids, size), seed, 0):
        with setup.model.lent(server.parameters):
            loss = float(batch_loss(setup.model.module, examples, local.loss).detach())
        total, rows = total + count_rows(examples) * loss, rows + count_rows(examples)
    return _Trial(norms, signal, total / rows if rows and math.isfinite(total) else math.inf)


def _clip_norm(plan: PlanFile, setup: Training, local: LocalTraining, trial: _Trial) -> Line:
    """Suggest the quantile that adaptive clipping aims at, if it has more signal to noise."""
    adaptive, norms = plan.privacy.adaptive_clipping, np.array(trial.norms)
    quantile = 0.5 if adaptive is None else adaptive.quantile
    found, mine = float(np.quantile(norms, quantile)), plan.privacy.clip_norm
    with one_thread():
        other = _trial(setup, local, found)
    gain = (other.signal / found) / (trial.signal / mine) if trial.signal else math.inf
    unclipped = float(np.mean(norms <= mine))
    text = (
        f"{found:.3g} leaves {quantile:.0%} of {len(norms)} updates unclipped, with {gain:.2g} "
        f"times the signal to noise of the plan's {mine:g}, which leaves {unclipped:.0%}"
    )
    return "clip norm", text, "note" if gain > _BETTER else "ok"


def _rate(rates: list[float], trials: list[_Trial]) -> Line:
    losses = [trial.loss for trial in trials]
    shown = ", ".join(f"{r:.3g}: {loss:.3g}" for r, loss in zip(rates, losses, strict=True))
    best, mine = int(np.argmin(losses)), _FACTORS.index(1.0)
    if losses[best] > _LOWER * losses[mine]:
        best = mine
    text = f"learning rate {rates[best]:.3g}; loss of public users after {_ROUNDS} rounds, by rate "
    return "client", f"{text}({shown})", "ok" if best == mine else "note"


def _budget(plan: PlanFile, setup: Training, trial: _Trial) -> Iterator[Line]:
    """Yield the signal to noise of the plan, and of other rounds at the same epsilon."""
    promised, p = plan.privacy_plan(), plan.privacy
    epsilon = promised.guarantee().epsilon(p.delta)
    clip, dim = promised.clip_norm, setup.first.numel()
    per_noise = trial.signal * (plan.data.clients_per_round or 0) / clip / math.sqrt(dim)

    def ratio(mechanism: Mechanism, noise: float) -> float:
        spread = math.sqrt(float(mechanism.prefix_variance()[-1]))
        return mechanism.rounds * per_noise / (noise * spread)

    mine = ratio(promised.mechanism, promised.noise_multiplier)
    text = f"at most {mine:.2g} in the last of {p.rounds} models"
    if mine < _HOPELESS:
        text += f", which is hopeless (below {_HOPELESS:g}): train fewer parameters, in larger "
        text += "cohorts or more rounds, or spend more"
    yield "signal to noise", text, "note" if mine < _HOPELESS else "ok"
    for rounds in sorted({max(1, p.rounds // 2), p.rounds, 2 * p.rounds}):
        limits = _limits(plan, rounds)
        if limits is None:
            continue
        mechanism = p.mechanism.build(limits)
        noise = calibrate(mechanism, limits, target_epsilon=epsilon, delta=p.delta)
        often = f"max_participations = {limits.max_participations}"
        if limits.max_participations > 1:
            often += f", min_separation = {limits.min_separation}"
        found = f"{often}: noise_multiplier = {up(noise)} for epsilon {up(epsilon)}, "
        yield f"{rounds} rounds", f"{found}signal to noise {ratio(mechanism, noise):.2g}", "ok"


def _limits(plan: PlanFile, rounds: int) -> Participation | None:
    """Return how often a client takes part in so many rounds of cohorts that take turns."""
    users, size = plan.data.users, plan.data.clients_per_round
    if users is None or size is None:
        limits = plan.participation()
        return limits if limits.rounds == rounds else None
    metrics = plan.privacy.metrics
    turns = (users - (metrics.users if metrics and not metrics.also_train else 0)) // size
    often = math.ceil(rounds / turns)
    return Participation(rounds, often, turns if often > 1 else 1)
