"""Whole path: replayed clients in a run as it really runs, from the round loop to the export.

``ReplayedClients`` ask and answer; everything else is privpart's own code under the plan: the
round loop, limits, the sampler, messages, clip, grid, sum, noise, divisor, step, commit to a run
folder, a round that is interrupted before its commit, resume, and the released model. The folder
and the log of runs are temporary. Three kinds of run are made:

contributions   two runs with the same seeded noise, with the clients' updates and with zeros in
                their place: the released models differ by what the clients added, exactly
noise           runs with secret keys of their own; what is left when the planned contributions
                are subtracted is the noise
keys            sources of noise drawn here, in a forked process and in fresh ones

A large model is replaced by a part of each of its tensors: what is tested does not depend on size.
"""

import os
import secrets
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from attacks.lower_bounds.bounds import Bound
from attacks.lower_bounds.canaries import round_covariance
from attacks.lower_bounds.checks import Check
from attacks.lower_bounds.planted import groups_of, sums_of_releases
from attacks.lower_bounds.repeats import gaussian, low_bits, missing, repeats
from attacks.lower_bounds.replay import FALSE_ALARM, Replay, joined, paired, whitened
from attacks.lower_bounds.replayed_clients import ReplayedClients, visible, worst_allocation
from privpart.cli.audit.replica import audited_optimizer
from privpart.cli.audit.sampled_path import fewer, population_of, sampled_bound, sampler_check
from privpart.grid import noise_bits
from privpart.loop import fit
from privpart.messages import ClientId, ClientUpdate, RoundTask
from privpart.noise.cohorts import ids_hash
from privpart.noise.source import SecretSource
from privpart.plan import PrivacyPlan
from privpart.run import log
from privpart.run.begin import create_run
from privpart.run.folder import RunFolder
from privpart.run.ledger import Ledger
from privpart.server import RoundCounts, Server
from privpart.settings.server import ServerOptimizer
from privpart.training.export import export

Array = NDArray[np.float64]
Step = Callable[[], None]
"""Called after each round."""
_VALUES = 2 * 10**6
"""Rounds times parameters of a replayed run, at most."""
_WHOLE = 2**24
"""Parameters of a model whose noise is tested at its own size, in one round, at most."""
_DRAWS = 4 * 10**5
"""Draws of noise that several runs have together, if one has fewer."""
_MOST_RUNS = 24
_MOST_COMMITS = 640
_WORK = 2.5e9
"""Nanoseconds that a run may spend on clients, by the estimate below."""
_OF_UPDATE, _OF_PARAMETER, _OF_ANSWER = 6e4, 12.0, 1e4
_LEAST_CLIENTS, _MOST_CLIENTS = 32, 2000
_KEYS = 30_000
_FRESH = "from privpart.noise.source import SecretSource; print(SecretSource().identity)"


class _InterruptedError(Exception):
    """A run that was killed after its noise was drawn, and before its commit."""


@dataclass(frozen=True)
class PlannedPath:
    """What is run: a plan, and its server as far as the path needs it.

    Args:
        plan: the promise.
        tensors: names and sizes of the parameters' tensors, in order.
        optimizer: of the server, see ``audited_optimizer``.
        rates: share of the learning rate in each round; None is 1.
        server: makes the server.
        values: rounds times parameters, at most; larger tensors are replaced by a part.

    Attributes:
        given: plan and tensors, before a part took the place of any.

    Raises:
        ConfigError: the plan adds no noise, or its clip norm follows the clients' updates.
    """

    plan: PrivacyPlan
    tensors: Sequence[tuple[str, int]]
    optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)
    rates: Callable[[int], float] | None = None
    server: Callable[..., Server] = Server
    values: int = _VALUES
    given: tuple[PrivacyPlan, Sequence[tuple[str, int]]] = field(init=False)

    def __post_init__(self) -> None:
        optimizer = audited_optimizer(self.plan, self.optimizer, "client")
        object.__setattr__(self, "optimizer", optimizer)
        object.__setattr__(self, "given", (self.plan, self.tensors))
        tensors = [(name, size) for name, size in self.tensors if size]
        sizes = _shortened([size for _, size in tensors], self.values // self.plan.rounds)
        mechanism = self.plan.mechanism
        if (groups := mechanism.groups) is not None:
            ends = np.searchsorted(
                np.cumsum([size for _, size in tensors]), np.cumsum(groups.sizes)
            )
            cuts = [0, *(ends + 1).tolist()]
            of_groups = [sum(sizes[i:j]) for i, j in pairwise(cuts)]
            mechanism = replace(cast("Any", groups), sizes=tuple(of_groups))
        object.__setattr__(
            self, "tensors", [(n, size) for (n, _), size in zip(tensors, sizes, strict=True)]
        )
        smallest = 0 if self.plan.sampling is not None else 1
        object.__setattr__(
            self,
            "plan",
            replace(self.plan, mechanism=mechanism, minimum_cohort=smallest, metrics=None),
        )

    @property
    def dim(self) -> int:
        """Number of parameters of the replayed run."""
        return sum(size for _, size in self.tensors)

    @property
    def rounds(self) -> range:
        """Numbers of all rounds."""
        return range(self.plan.rounds)

    @property
    def runs(self) -> int:
        """Number of runs whose noise is tested."""
        rounds = self.plan.rounds
        wanted = -(-_DRAWS // (rounds * self.dim))
        return max(1, min(_MOST_RUNS, max(2, wanted), _MOST_COMMITS // rounds))

    def groups(self) -> list[tuple[Any, Sequence[int], slice]]:
        """Return mechanism, rounds and place of each group of parameters."""
        return groups_of(self.plan.mechanism, self.dim)

    def clients(self, seed: int, *, few: bool = False) -> ReplayedClients:
        """Return the clients that are replayed; ``few`` are enough for a run whose noise counts."""
        plan, groups = self.plan, self.groups()
        rounds = plan.rounds
        allocation = np.zeros((rounds, len(groups)))
        if plan.sampling is None:
            allocation = worst_allocation(*self._covariances(), plan.participation)
        every = [(0,)] * rounds
        schedule = every if plan.mechanism.groups is None else plan.mechanism.groups.schedule
        if plan.sampling is not None:
            count = population_of(plan, self._members(few=few)) - 1
        else:
            p = plan.participation
            admitted = min(p.max_participations, -(-rounds // (2 * p.min_separation)))
            cost = admitted * self._of_update + _OF_ANSWER * rounds / 2
            most = _LEAST_CLIENTS if few else min(_MOST_CLIENTS, int(_WORK / cost))
            count = max(_LEAST_CLIENTS, 2 * rounds, most)
        parts = [part for _, _, part in groups]
        return ReplayedClients(plan.participation, parts, schedule, allocation, count, seed)

    def _covariances(self) -> tuple[list[Array], list[Sequence[int]]]:
        """Return the covariance of each group's noise at unit draws, and its rounds."""
        groups = self.groups()
        return [round_covariance(m.decoder()) for m, _, _ in groups], [
            decoder for _, decoder, _ in groups
        ]

    def visible_mu(self, clients: ReplayedClients) -> float | None:
        """Return what the released models show of the most visible client; None if sampled."""
        if self.plan.sampling is not None:
            return None
        squared = visible(clients.allocation, *self._covariances())
        return float(np.sqrt(squared)) / self.plan.update_noise_multiplier

    @property
    def _of_update(self) -> float:
        """Nanoseconds that an update takes, about."""
        return _OF_UPDATE + _OF_PARAMETER * self.dim

    def _members(self, *, few: bool) -> float:
        """Return the members of a round that a sampled plan is replayed with, on average."""
        return 8.0 if few else max(8.0, min(200.0, _WORK / self._of_update / self.plan.rounds))

    def sized(self, *, few: bool = False) -> Self:
        """Return the path with as many sampled members as a run is replayed with."""
        return replace(self, plan=fewer(self.plan, self._members(few=few)))

    def new_server(self, plan: PrivacyPlan, source: Any) -> Server:  # noqa: ANN401  a NoiseSource
        """Return the server of round 0."""
        start = torch.zeros(self.dim)
        given: dict[str, Any] = {"source": source, "optimizer": self.optimizer}
        if self.rates is not None:
            given["rates"] = self.rates
        return self.server(plan, start, **given)

    @cached_property
    def _shares(self) -> Array:
        """Share of the learning rate that each round takes."""
        return np.array([1.0 if self.rates is None else self.rates(t) for t in self.rounds])

    @cached_property
    def _factors(self) -> Array:
        """Clip norms of each round's sum in a unit of its mean."""
        plan = self.plan
        return np.array([plan.report_goal_at(t) / plan.clip_norm_at(t) for t in self.rounds])

    def sums(self, models: Array, rounds: Sequence[int]) -> Array:
        """Return the noised sums of rounds in clip norms, from models (n + 1, columns)."""
        steps = np.diff(models, axis=0) / self._shares[: len(models) - 1, None]
        undone = np.concatenate([models[:1] * 0, np.cumsum(steps, axis=0)])
        rates = self.optimizer.learning_rate, self.optimizer.momentum
        means = sums_of_releases(undone, rounds, learning_rate=rates[0], momentum=rates[1])
        return np.asarray(means * self._factors[list(rounds), None])

    def rounding(self, sizes: Array) -> Array:
        """Return the error, at most, that float32 adds to each round's sum, (n,), in clip norms.

        ``sizes`` (n + 1,) are of the models, all together or of one parameter.
        """
        nearby = np.maximum(np.maximum(sizes[1:], sizes[:-1]), np.roll(sizes, 1)[:-1])
        return np.asarray(
            2.0**-21 * nearby * self._factors / (self.optimizer.learning_rate * self._shares)
        )


def _shortened(sizes: Sequence[int], most: int) -> list[int]:
    """Return the sizes, the largest of them cut to one length, that sum to ``most`` or fewer."""
    longest = max(sizes)
    remaining = most
    for place, size in enumerate(sorted(sizes)):
        share = remaining // (len(sizes) - place)
        if size > share:
            longest = max(1, share)
            break
        remaining -= size
    return [min(size, longest) for size in sizes]


@dataclass(slots=True)
class _Engine:
    """Answers for the replayed clients, whoever is asked."""

    clients: ReplayedClients
    silent: bool
    each_alone: bool = True

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        for client, i in self.clients.answers(task.round, set(task.clients)):
            sent = self.clients.update(i, task.round, task.clip_norm)
            if self.silent:
                sent.zero_()
            yield task.update(cast("ClientId", client), sent)


@dataclass(frozen=True, slots=True)
class _Released:
    models: Array  # (n + 1, d), the start and every released model
    interrupted: Array  # (d,), the model of the round that was not committed; empty if none was
    identity: str  # of the source of the noise
    cohorts: list[set[ClientId]]  # who may take part by the sampler; empty without one
    rows: list[set[ClientId]]  # who took part by the ledger
    exported: dict[str, Array]  # by name; empty if nothing was written


def _released(
    path: PlannedPath, clients: ReplayedClients, *, seed: int | None, silent: bool, step: Step
) -> _Released:
    """Run all rounds in a folder; interrupt the one in the middle before its commit, and resume.

    A silent run is not interrupted: a resumed one reads from the ledger who took part, and would
    hide that the server forgets it.
    """
    plan, middle = path.plan, path.plan.rounds // 2
    asked = [[_spelled(i, clients.ids[i]) for i in clients.asking(t)] for t in range(plan.rounds)]
    engine = _Engine(clients, silent)
    rows = [np.zeros(path.dim)]
    tried: list[Array] = []
    with TemporaryDirectory(prefix="privpart-audit-") as place, log.apart(Path(place) / "log"):
        folder = Path(place) / "run"
        own = {"population": ids_hash(clients.ids), "delta": 1e-5}
        own["parameters"] = [(name, (size,)) for name, size in path.tensors]
        run = create_run(folder, plan, seed=seed, own=own)

        def keep(server: Server, counts: RoundCounts) -> None:
            model = server.parameters.numpy().astype(np.float64)
            if server.round == middle + 1 and not tried and not silent:
                tried.append(model)
                raise _InterruptedError
            run.commit(server, counts)
            rows.append(model)
            step()

        def rounds() -> str:
            source = run.source()
            server = path.new_server(plan, source)
            run.restore(server)
            cohorts: Any = asked if plan.sampling is None else run.sample(clients.ids)
            drawn[:] = [] if plan.sampling is None else [set(c) for c in cohorts]
            fit(server, engine, cohorts, commit=keep, stop_if_diverged=False)
            return source.identity

        drawn: list[set[ClientId]] = []
        try:
            identity = rounds()
        except _InterruptedError:
            run.close()
            run = RunFolder.open(folder)
            identity = rounds()
        run.close()
        took_part: list[set[ClientId]] = [set(row.clients) for row in Ledger(folder).rows()]
        exported = {}
        if seed is not None:  # a file costs as much as some rounds
            file = export(folder, Path(place) / "model.safetensors", part="trained")
            exported = {name: t.double().numpy().ravel() for name, t in load_file(file).items()}
    interrupted = tried[0] if tried else np.empty(0)
    return _Released(np.stack(rows), interrupted, identity, drawn, took_part, exported)


def _spelled(i: int, client: int | str) -> object:
    """Return an id as a caller may spell it in a cohort."""
    return np.int64(client) if i % 3 == 0 and isinstance(client, int) else client


@dataclass(frozen=True, slots=True)
class PathAudit:
    """What was found.

    Attributes:
        checks: a row for each comparison.
        replay: the noise of all groups together, and what the most visible client showed.
        bound: from the replay, delta and confidence to what it proves.
        visible_mu: what the released models show of that client if everything is as planned; the
            accountant's mu, or less where more is accounted for than is released, such as all nodes
            of a tree. None of a plan that samples.
        clients: how many were replayed.
        runs: how many had their noise tested.
        parameters: of the model that was replayed.
    """

    checks: tuple[Check, ...]
    replay: Replay
    bound: Callable[[Replay, float, float], Bound]
    visible_mu: float | None
    clients: int
    runs: int
    parameters: int


def replay_path(path: PlannedPath, *, seed: int, step: Step = lambda: None) -> PathAudit:
    """Run a plan's whole path with replayed clients, and compare everything with the plan."""
    whole, small = path.sized(), path.sized(few=True)
    clients, few = whole.clients(seed), small.clients(seed + 1, few=True)
    sent = _released(whole, clients, seed=seed, silent=False, step=step)
    silent = _released(whole, clients, seed=seed, silent=True, step=step)
    everything = range(path.plan.rounds)
    planned = _planned(clients, sent.cohorts)
    expected = np.stack([clients.contribution(t, planned[t]) for t in everything])
    added = _by_group(whole, sent.models) - _by_group(whole, silent.models)
    checks = [_contributions(whole, clients, planned, added - expected, (sent, silent))]
    checks.append(_members(clients, planned, (sent, silent)))
    worst = added - expected
    last = len(clients.ids) - 1
    for t in np.flatnonzero(clients.allocation.any(1)).tolist():
        worst[t] += clients.contribution(t, [last])
    shown = worst, clients.along_worst(worst)
    runs = [_released(small, few, seed=None, silent=False, step=step) for _ in range(path.runs)]
    of_noise, replay = _noise(small, few, runs, *shown)
    share = FALSE_ALARM / (len(path.groups()) + 8)
    checks += [_exported(whole, (sent, silent)), *of_noise, _low_bits(whole, silent, share)]
    checks += [*_whole_noise(path, share), _keys([run.identity for run in runs])]
    bound: Callable[[Replay, float, float], Bound] = Replay.bound
    if path.plan.sampling is not None:
        row, came, stated = sampler_check(path.plan, FALSE_ALARM / (len(path.groups()) + 8))
        checks.append(row)
        bound = partial(sampled_bound, path.plan, came, stated)
        # What all of a round's members added, along what they should have.
        replay = replace(replay, signal=float((added * expected).sum() / (expected**2).sum()))
    found = tuple(checks), replay, bound, whole.visible_mu(clients)
    return PathAudit(*found, len(clients.ids), len(runs), path.dim)


def _planned(clients: ReplayedClients, cohorts: Sequence[set[ClientId]]) -> list[list[int]]:
    """Return the numbers of the clients that the plan lets take part, by round."""
    rounds = clients.participation.rounds
    asking = [clients.asking(t) for t in range(rounds)]
    if cohorts:
        ids = clients.ids
        return [[i for i in asking[t] if ids[i] in cohorts[t]] for t in range(rounds)]
    of_round: list[list[int]] = [[] for _ in range(rounds)]
    for i in range(len(clients.ids)):
        for t in clients.planned(i):
            of_round[t].append(i)
    return of_round


def _by_group(path: PlannedPath, models: Array) -> Array:
    """Return the noised sums of all rounds, (n, d), in clip norms; zeros where nothing trains."""
    sums = np.zeros((path.plan.rounds, path.dim))
    for _, rounds, part in path.groups():
        sums[list(rounds), part] = path.sums(models[:, part], rounds)
    return sums


def _contributions(
    path: PlannedPath,
    clients: ReplayedClients,
    planned: Sequence[Sequence[int]],
    differences: Array,
    runs: Sequence[_Released],
) -> Check:
    """Compare what the clients added to each round with what the plan lets them add."""
    counts = np.array([len(round_) for round_ in planned])
    # A client's integers are off by half a step per coordinate, and some steps short.
    step = max(path.plan.update_noise_multiplier * 2.0**-20, 2.0**-25)
    entries = np.array([len(clients.direction(0, t)[0]) for t in range(len(planned))])
    limits = (6 * np.sqrt(counts) + 6) * (np.sqrt(entries) / 2 + 4) * step
    limits += sum(path.rounding(np.linalg.norm(run.models, axis=1)) for run in runs)
    norms = np.linalg.norm(differences, axis=1)
    faults = []
    for t in np.argsort(-norms / limits)[:3].tolist():
        if norms[t] > limits[t] or not np.isfinite(norms[t]):
            i, excess = clients.nearest(differences[t], t)
            faults.append(
                f"Round {t} adds {norms[t]:.3g} clip norms beside the plan; the nearest client is "
                f"{clients.ids[i]!r} with {excess:+.3g}, whom the plan gives "
                f"{'this round' if i in planned[t] else 'no part in it'}."
            )
    return Check(
        "contribution of every client in every round",
        sum(len(clients.asking(t)) for t in range(len(planned))),
        0.0,
        f"a client that adds {limits.max():.2g} clip norms beside the plan, exactly",
        tuple(faults),
    )


def _members(
    clients: ReplayedClients, planned: Sequence[Sequence[int]], runs: Sequence[_Released]
) -> Check:
    """Compare the clients of ledgers, resumed or not, with the plan's limits or its sampler."""
    faults = []
    for t, numbers in enumerate(planned):
        due = {clients.ids[i] for i in numbers}
        for row in (run.rows[t] for run in runs):
            if row != due:
                faults.append(
                    f"The ledger's round {t} has {len(row - due)} clients beside the plan's, and "
                    f"lacks {len(due - row)}."
                )
    drawn = sum(map(len, planned))
    name = "clients in the ledger"
    return Check(name, drawn, 0.0, "one client or round beside the plan", tuple(faults[:3]))


def _exported(path: PlannedPath, runs: Sequence[_Released]) -> Check:
    """Compare the file that is exported, of whatever it holds, with the last round's model."""
    ends = np.cumsum([size for _, size in path.tensors])[:-1]
    faults = []
    for run in runs:
        last = dict(zip([n for n, _ in path.tensors], np.split(run.models[-1], ends), strict=True))
        if run.exported.keys() != last.keys():
            faults.append(f"The exported file holds {', '.join(sorted(run.exported))}.")
        elif any(not np.array_equal(run.exported[name], last[name]) for name in last):
            faults.append("The exported model is not that of the last round.")
    return Check("exported model", len(runs), 0.0, "one bit, or something else", (*faults[:1],))


def _low_bits(path: PlannedPath, silent: _Released, false_alarm: float) -> Check:
    """Test the noise of the run without contributions in whole steps of the server's grid."""
    z = path.plan.update_noise_multiplier
    step = z * 2.0 ** -noise_bits(z, path.dim)
    noise = [path.sums(silent.models[:, part], rounds) for _, rounds, part in path.groups()]
    error = path.rounding(np.abs(silent.models).max(1)).max() / step
    return low_bits(np.concatenate([part.ravel() for part in noise]) / step, error, false_alarm)


def _whole_noise(path: PlannedPath, false_alarm: float) -> list[Check]:
    """Test one round's noise of a model that is replaced by a part, at its own size."""
    plan, tensors = path.given
    whole = replace(path, plan=plan, tensors=tensors, values=plan.rounds * _WHOLE)
    if whole.dim == path.dim:
        return []
    server = whole.new_server(whole.plan, SecretSource())
    active = server.task(()).active
    parts = [part for g, (_, _, part) in enumerate(whole.groups()) if active is None or g in active]
    zeros = torch.zeros(sum(part.stop - part.start for part in parts))
    updates = [] if plan.sampling is not None else [server.task((0,)).update(0, zeros)]
    server.run_round(updates)
    models = np.stack([np.zeros(whole.dim), server.parameters.double().numpy()])
    z = plan.update_noise_multiplier
    blocks = []
    for mechanism, rounds, part in whole.groups():
        if rounds[0] == 0:
            first = np.linalg.norm(mechanism.decoder()[0])
            blocks.append(("the whole model", whole.sums(models[:, part], [0]) / (z * first)))
    found = repeats(blocks, false_alarm), gaussian(blocks, false_alarm)
    return [replace(check, name=f"{check.name}, whole model") for check in found]


def _noise(
    path: PlannedPath,
    clients: ReplayedClients,
    runs: Sequence[_Released],
    worst: Array,
    seen: Array,
) -> tuple[list[Check], Replay]:
    """Test what is left of the runs when the planned contributions are subtracted.

    ``worst`` (n, d) is what the worst client added, and ``seen`` (n, groups) along its direction.
    """
    z = path.plan.update_noise_multiplier
    residuals = []
    for run in runs:
        planned = _planned(clients, run.cohorts)
        expected = np.stack([clients.contribution(t, planned[t]) for t in range(path.plan.rounds)])
        residuals.append(_by_group(path, run.models) - expected)
    groups = path.groups()
    share = FALSE_ALARM / (len(groups) + 8)
    checks, replays, blocks = [], [], []
    starts = [0, *accumulate(size for _, size in path.tensors)]
    for g, (mechanism, rounds, part) in enumerate(groups):
        covariance = round_covariance(mechanism.decoder())
        tensors = {
            name: size
            for (name, size), start in zip(path.tensors, starts, strict=False)
            if part.start <= start < part.stop
        }
        noise = [run[list(rounds), part] for run in residuals]
        together = _side_by_side(noise, list(tensors.values()))
        several = {name: size * len(runs) for name, size in tensors.items()}
        error = max(path.rounding(np.linalg.norm(run.models, axis=1)).max() for run in runs)
        error /= float(np.sqrt(path.dim * np.linalg.eigvalsh(covariance)[0]))
        one, along = worst[list(rounds), part], seen[list(rounds), g]
        if path.plan.sampling is not None:  # its bound is of the members, and of no client alone
            one, along = np.ones_like(one), np.ones(len(rounds))
        replays.append(
            paired(
                np.pad(one, ((0, 0), (0, together.shape[1] - one.shape[1]))),
                together,
                covariance,
                noise_multiplier=z,
                along=along,
                rounding=error,
                tensors=several,
                rounds=rounds,
                false_alarm=share,
            )
        )
        deviations = z * np.sqrt(np.diag(covariance))[:, None]
        checks.append(missing(together / deviations, several, rounds, share / 4))
        group = f"group {g}" if len(groups) > 1 else "all parameters"
        for number, draws in enumerate(noise):
            label = f"{group} of run {number + 1}" if len(noise) > 1 else group
            blocks.append((label, whitened(draws, covariance) / z))
    checks += [repeats(blocks, share), gaussian(blocks, share), _tried_twice(path, runs, share)]
    return [*checks, *_rows(replays, groups)], joined(replays)


def _rows(replays: Sequence[Replay], groups: Sequence[Any]) -> list[Check]:
    rows = []
    for g, replay in enumerate(replays):
        group = f" of group {g}" if len(groups) > 1 else ""
        level = FALSE_ALARM / (len(groups) + 8)
        rows.append(
            Check(
                f"deviation of the noise{group}",
                replay.draws,
                level,
                f"noise x {replay.least_seen(level):.4g}",
                (replay.off_plan,) if replay.off_plan else (),
            )
        )
        rows.append(
            Check(
                f"correlations and cells of the noise{group}",
                replay.draws,
                level,
                "a tensor in a round, see docs/how-to/audit-epsilon.md",
                replay.faults,
            )
        )
    return rows


def _side_by_side(runs: Sequence[Array], sizes: Sequence[int]) -> Array:
    """Return (T, runs x d): the columns of each tensor, of all runs, after one another."""
    ends = np.cumsum(sizes)[:-1]
    pieces = [np.split(run, ends, axis=1) for run in runs]
    return np.concatenate([piece for tensor in zip(*pieces, strict=True) for piece in tensor], 1)


def _tried_twice(path: PlannedPath, runs: Sequence[_Released], false_alarm: float) -> Check:
    """Compare the noise of the interrupted round with that of its second try: fresh draws."""
    middle = path.plan.rounds // 2
    z = path.plan.update_noise_multiplier
    values = []
    for mechanism, rounds, part in path.groups():
        if middle not in rounds:
            continue
        at = list(rounds).index(middle)
        steps = np.diff(np.asarray(mechanism.decoder()), axis=0, prepend=0.0)
        fresh = float(np.square(steps[at, ~steps[:at].any(0)]).sum())
        for run in runs:
            both = np.stack([run.models[: middle + 2, part]] * 2)
            both[1, middle + 1] = run.interrupted[part]
            padding = np.zeros((2, path.plan.rounds - middle - 1, both.shape[2]))
            models = np.concatenate([both, padding], axis=1)
            first, other = (path.sums(model, rounds)[at] for model in models)
            values.append((first - other) / (z * np.sqrt(2 * fresh) or 1.0))
    draws = np.concatenate(values)
    deviation = float(np.sqrt(np.square(draws).mean()))
    faults = (
        (
            f"A round that was interrupted and tried again has {deviation:.3g} times the "
            "independent noise of two tries: whoever sees both removes it.",
        )
        if deviation < 1 - 7 / np.sqrt(2 * len(draws)) and len(draws) > 60
        else ()
    )
    name = "noise of a round that is tried twice"
    return Check(name, len(draws), false_alarm, "draws that are the same in both tries", faults)


def _keys(identities: Sequence[str]) -> Check:
    """Draw sources of noise here, in a forked process and in fresh ones; no two may be alike."""
    drawn = [SecretSource().identity for _ in range(_KEYS)]
    salts = [SecretSource().salt() for _ in range(_KEYS // 10)]
    forked = [_forked_identity() for _ in range(2)]
    command = [sys.executable, "-c", _FRESH]
    fresh = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(2)
    ]
    faults = []
    everyone = [*identities, *drawn, *forked, *fresh]
    if len(set(everyone)) < len(everyone):
        twice = len(everyone) - len(set(everyone))
        faults.append(f"{twice} of {len(everyone)} sources of secret noise have another's key.")
    if len(set(salts)) < len(salts):
        faults.append(f"{len(salts) - len(set(salts))} of {len(salts)} salts occur twice.")
    first = {tuple(_first_draws(SecretSource())) for _ in range(200)}
    if len(first) < 200:
        faults.append(f"{200 - len(first)} of 200 sources draw another's noise.")
    sees = f"keys of fewer than {np.log2(_KEYS**2 / 2) - 4:.0f} bits"
    return Check("keys of the noise", len(everyone), 2.0**-60, sees, tuple(faults))


def _first_draws(source: SecretSource) -> list[float]:
    out = np.empty(4)
    source.draws(0, b"").real(0, 0, out)
    return [float(value) for value in out]


def _forked_identity() -> str:
    """Return the identity of a source that a forked process draws."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads; the child draws one key and ends.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            os.write(writing, SecretSource().identity.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        identity = pipe.read()
    os.waitpid(child, 0)
    return identity or f"none: {secrets.token_hex(8)}"
