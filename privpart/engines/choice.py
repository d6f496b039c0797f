"""Choice: finds the fastest method for a training while its first rounds run.

No round waits for a probe. A method is first checked against one client after another, before
either is clipped: on a client or two, by two steps if they take many, of a full batch and of the
last one. A method that fails, or computes something else, is dropped.
It is then timed; where clients take moments, on clients whose updates the round needs anyway, and
where they take long, by the check itself. All other work is thrown away, and bounded: by the work
of two clients in the first round, and in a later one by a twentieth of its cohort, or one method's
trial; and, where it takes long, by an eighth of all clients so far. What does not fit is tried in a
later round, until every method was.

The figures are cached by everything that they depend on (``_key``), so that the cells of a sweep
and later runs only check the method that was the fastest. The cache decides how clients are
computed and nothing else: a damaged file is ignored, and one that lies costs time. The choice and
its trials are one file, because what a trial may cost depends on what is still to be tried.
"""

import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accounting import ConfigError, checks, fit_cache
from privpart.client import LocalTraining, Watch
from privpart.clip import clip, clip_and_measure
from privpart.engines.device import clock, namespace, one_thread
from privpart.engines.methods import LocalComputation, Method, candidates
from privpart.engines.vectorized import single_step
from privpart.messages import ClientId, RoundTask

_FEW_STEPS = 2
"""Steps of a trial, for clients that take more than twice as many."""
_WASTED, _WASTED_LATER = 2.0, 0.05
"""Clients whose work may be thrown away: in the first round; in a later one per client of it."""
_CHEAP, _AFFORDED = 0.5, 1 / 8
"""Seconds of work that may be thrown away in any round; more only up to this part of all clients
so far, because a job of a few rounds is over before it would pay."""
_SHORT, _LONG = 0.25, 0.5
"""Seconds of a client below which whole clients are timed, because a few steps are too short; and
from which what was computed to check a method is its time."""
_ENOUGH = 0.05
"""Seconds of work that are timed if enough clients are there, of one client after another."""
_MOST_TIMED = 4
_LONG_RUN = 20.0
"""Seconds of rounds that pay for two of imports, which gradients by torch.func need."""
_BEHIND = 1.5
"""Times the best time that pairs of clients may take before a larger number of them is timed."""
_TIE = 0.95
"""A later method of the list is taken if its time is below this part of an earlier one's."""
_NOTHING = 1e-6
"""Part of the clip norm below which an update is that of a client with nothing to learn."""
_NEVER_REACHED = 1e30
"""Clip norm of updates that are compared: clipping would hide that one is twice as long."""
_TOLERANCE = 1e-2
"""Relative difference of updates above which a method computes something else than rounding."""


@dataclass(slots=True)
class Kept:
    """Results of a round that were computed to time a method.

    Attributes:
        updates: clipped updates of single clients, shape (c,).
        sums: clients, the sum of their clipped updates, shape (d,), and their norms before.
        seen: what ``Watch`` gets of each of these clients, if that was asked for.

    No client is in two of ``updates`` and ``sums``.
    """

    updates: dict[ClientId, Tensor] = field(default_factory=dict)
    sums: list[tuple[Sequence[ClientId], Tensor, Sequence[float]]] = field(default_factory=list)
    seen: dict[ClientId, tuple[float | None, float]] = field(default_factory=dict)


class Choice:
    """The methods of one training, and what is known of them.

    Args:
        computation: of the clients.
        task: the first round that has clients with examples.
        chunk: clients that a round computes at once, if they are vectorized.
        workers: processes that compute rounds; more than one have a thread each.
        bfloat16: whether all methods round to bfloat16.
        sums: whether ghost clipping is allowed.
        watches: whether losses and norms of clients are measured.

    Attributes:
        each: the fastest method known for single updates.
        fastest: the fastest one known for updates or their sum.
        done: whether every method was tried.
        may_sum: whether sums can turn out to be the fastest.
    """

    def __init__(
        self,
        computation: LocalComputation,
        task: RoundTask,
        *,
        chunk: int,
        workers: int = 1,
        bfloat16: bool = False,
        sums: bool = False,
        watches: bool = False,
    ) -> None:
        self._why = computation.one_at_a_time
        self._methods = [Method(bfloat16=bfloat16)]
        if not self._why:
            self._methods = candidates(computation, task, bfloat16=bfloat16)
            if sums and computation.clients_per_ghost_sum(task):
                self._methods.append(Method(ghost_sum=True))
            self._why = "the only way for this network"
        self._plain, *others = self._methods
        self.each = self.fastest = self._plain
        self._chunk, self._workers, self._watches = chunk, workers, watches
        self._seconds: dict[Method, float] = {}  # of a typical client
        self._notes: dict[Method, str] = {}
        self._remembered: Mapping[str, float] | None = None
        self._begun = False
        self._spent = 0.0  # seconds of all rounds so far, about
        self._clients = 0  # of all rounds so far
        self._wasted = 0.0  # of them, work that was thrown away
        # What likely gains most is first, and last what takes an import first (``settled``).
        step = single_step(computation.local)
        if step or not computation.convolutional:
            others.sort(key=lambda m: (not m.ghost_sum, m.vectorized == step))
        self._pending = others
        if others:
            self._key = _key(computation, task, chunk, workers, self._methods)
            self._recall()
        self.done = not self._pending
        self.may_sum = Method(ghost_sum=True) in (*self._pending, self.fastest)

    def look(
        self,
        computation: LocalComputation,
        task: RoundTask,
        start: Tensor,
        timed: Callable[[float], None],
    ) -> Kept:
        """Try methods on clients of a round; return the results that the round can use.

        Args:
            computation: of the clients.
            task: the round; at least one of its clients must have examples.
            start: the round's trained part, shape (d,).
            timed: called with the seconds of a client as soon as one is computed.
        """
        kept = Kept()
        self._clients += len(task.clients)
        later = self._begun and self._may_waste() < 1
        # a schedule's training may be one at a time
        if later or computation.one_at_a_time or self.settled(computation):
            self._spent += self.seconds * len(task.clients)
            return kept
        wasted = max(_WASTED, _WASTED_LATER * len(task.clients) if self._begun else 0.0)
        with one_thread(self._workers > 1):
            trial = _Trial(
                computation, task, start, self._plain, kept, timed, watches=self._watches
            )
            if self._plain not in self._seconds:
                self._seconds[self._plain] = trial.one_by_one(self._plain)
            wasted, tried = min(wasted, self._may_waste()), False
            while not self.settled(computation):
                cost = trial.cost(self._pending[0], check_only=self._remembered is not None)
                # a method that never fits is tried at last by a round that tries nothing else
                if trial.wasted + cost > wasted and (tried or not self._begun):
                    break
                self._try(trial, self._pending.pop(0))
                tried = True
        self._begun = True
        self._wasted += trial.wasted
        self._decide()
        self._spent += self.seconds * len(task.clients)
        if not self._pending:
            self.done = True
            figures = {str(m): s for m, s in self._seconds.items()}
            fit_cache.write_cached({"engine": self._key}, figures)
        return kept

    @property
    def seconds(self) -> float:
        """Seconds of a typical client by the fastest method that is known; 0 if none is timed."""
        return self._seconds.get(self.fastest, 0.0)

    def _may_waste(self) -> float:
        """Return how many clients' work a round may throw away."""
        return max(
            _AFFORDED * self._clients - self._wasted,
            _CHEAP / max(1e-6, self._seconds[self._plain]),
        )

    def settled(self, computation: LocalComputation) -> bool:
        """Return whether every method was tried, but those that do not pay in a short run."""
        unready = single_step(computation.local) and "torch._dynamo" not in sys.modules
        if unready and self._spent < _LONG_RUN:
            return all(method.vectorized for method in self._pending)
        return not self._pending

    def explain(self, clients: int) -> str:
        """Return what was chosen and why, in one line.

        Args:
            clients: how many a round has, for the time that it should take.
        """
        if self.fastest not in self._seconds:
            return f"{self.fastest}: {self._why}"
        expected = self._seconds[self.fastest] * clients / max(1, min(self._workers, clients))
        known = ", remembered" if self._remembered is not None else ""
        times = ", ".join(f"{m} {1000 * s:.2f} ms" for m, s in self._seconds.items())
        notes = "".join(f"; {method} {note}" for method, note in self._notes.items())
        return (
            f"{self.fastest}: about {expected:.2g} s for a round of {clients} clients; a client "
            f"takes {times}{known}{notes}"
        )

    def _recall(self) -> None:
        """Take the figures of an earlier run, and check only the methods that it found fastest."""
        try:
            stored = fit_cache.read_cached({"engine": self._key})
            held = {str(m): checks.nonnegative(str(m), s) for m, s in stored.items()}
        except (ConfigError, AttributeError):  # none, or a damaged one
            return
        known = {m: held[str(m)] for m in self._methods if str(m) in held} if held else {}
        if self._plain not in known:
            return
        self._remembered = held
        self._seconds = known
        self._decide()
        fastest = (self.fastest, self.each)
        self._pending = [m for m in self._methods[1:] if m in fastest]
        self._seconds = {self._plain: known[self._plain]}
        self._decide()  # by what was checked

    def _forget(self) -> None:
        """Try all methods, because one that an earlier run had found does not work here."""
        self._remembered = None
        self._seconds = {}
        self._pending = [m for m in self._methods[1:] if m not in self._notes]

    def _try(self, trial: "_Trial", method: Method) -> None:
        try:
            if trial.agrees(method):
                held = self._remembered
                self._seconds[method] = (
                    trial.seconds(method, self._chunk, min(self._seconds.values()))
                    if held is None
                    else held[str(method)]
                )
                return
            self._notes[method] = "deviates"
        except Exception:
            self._notes[method] = "fails"  # torch.func does not support every network
        if self._remembered is not None:
            self._forget()
            self._seconds[self._plain] = trial.one_by_one(self._plain)

    def _decide(self) -> None:
        self.each = self.fastest = self._plain
        for method in self._methods[1:]:
            seconds = self._seconds.get(method, math.inf)
            if seconds < _TIE * self._seconds[self.fastest]:
                self.fastest = method
            if not method.ghost_sum and seconds < _TIE * self._seconds[self.each]:
                self.each = method


class _Trial:
    """Trials on the clients of one round.

    Args:
        computation: of the clients.
        task: the round.
        start: the round's trained part.
        plain: the method that others are compared with.
        kept: gets results of whole clients.
        timed: called with the seconds of a client as soon as one is computed.
        watches: whether it also gets their losses and norms.

    Attributes:
        wasted: clients whose work was thrown away so far; a part of a client counts in part.
    """

    def __init__(
        self,
        computation: LocalComputation,
        task: RoundTask,
        start: Tensor,
        plain: Method,
        kept: Kept,
        timed: Callable[[float], None],
        *,
        watches: bool,
    ) -> None:
        self._computation, self._task, self._start = computation, task, start
        self._plain, self._kept, self._watches = plain, kept, watches
        self._local = computation.local
        held = {c: len(computation.users.indices[c]) for c in dict.fromkeys(task.clients)}
        sizes = sorted(size for size in held.values() if size)
        self._size = sizes[len(sizes) // 2]
        # clients of about the same size are timed
        asked = [client for client, size in held.items() if size]
        asked.sort(key=lambda client: abs(held[client] - self._size))
        steps = _steps(self._local, self._size)
        enough = max(_FEW_STEPS, len(self._local.alternate))  # so that everything moves
        few = steps > 2 * enough
        self._few = replace(self._local, epochs=1, steps=enough) if few else self._local
        self._part = enough / steps if few else 1.0
        # A single step pads short batches, so the client with the oddest size is checked, too.
        self._checked = asked[:1] if few else list(dict.fromkeys([asked[0], asked[-1]]))
        asked = self._checked + [client for client in asked if client not in self._checked]
        self._asked = asked
        self._unused = asked[len(self._checked) :]
        self.wasted = 0.0
        self._reference: list[Tensor] = []
        self._checks: dict[Method, float] = {}  # seconds of a typical client, of its first steps
        self._client = math.inf  # at most: the first steps prepare, too
        for client in self._checked:
            computed = self._unclipped([client], plain)
            self._reference += computed.updates
            self._client = min(self._client, self._typical(computed, [client], self._few))
            clipped = clip_and_measure(computed.updates[0], task.clip_norm)[0].unsqueeze(0)
            self._keep([client], replace(computed, updates=clipped), few=True)
            if client == self._checked[0]:
                timed(self._client)

    @property
    def _whole(self) -> bool:
        """Whether whole clients are timed."""
        return self._part == 1 or self._client <= _SHORT

    @property
    def _long(self) -> bool:
        """Whether the work of a check is its time."""
        return self._client >= _LONG

    def cost(self, method: Method, *, check_only: bool) -> float:
        """Return how many clients' work ``agrees`` and ``seconds`` will throw away about."""
        clients = min(2 if method.vectorized or method.ghost_sum else 1, len(self._asked))
        reused = self._long or (self._whole and len(self._unused) >= clients)
        timing = clients * (1.0 if self._whole else self._part)
        return self._part * clients + (0.0 if check_only or reused else timing)

    def one_by_one(self, method: Method) -> float:
        """Return the seconds of a typical client, of those that are computed one by one."""
        if self._long:
            return self._checks.get(method, self._client)
        if not self._whole:
            seconds = self._timed(self._asked[:1], method, few=True)
            self._client = min(self._client, seconds)
            if not self._whole:
                return seconds
        wanted = min(_MOST_TIMED, math.ceil(_ENOUGH / max(self._client, 1e-6)))
        wanted = min(wanted, 1 + len(self._unused) // 4)  # some are left for other methods
        clients = self._fresh(wanted) or self._asked[:1]
        return self._timed(clients, method, few=False)

    def agrees(self, method: Method) -> bool:
        """Return whether a method computes what ``plain`` does, up to rounding."""
        if method.ghost_sum:
            return self._sums_agree()
        clients = self._asked[:2] if method.vectorized else self._asked[:1]
        found = self._unclipped(clients, method)
        self.wasted += self._part * len(clients)
        self._checks[method] = self._typical(found, clients, self._few)
        return all(map(self._agree, found.updates, self._reference))  # of those that were checked

    def _sums_agree(self) -> bool:
        most = self._computation.clients_per_ghost_sum(self._task)
        clients = self._checked[: min(2, most)]
        if not clients:
            raise RuntimeError("this round's training has no sums")
        total, _, _, _ = self._sum(clients)
        self.wasted += len(clients)
        task = self._task
        longest = task.clip_norm if task.sum_clip_norm is None else task.sum_clip_norm
        expected = sum(clip(update, longest) for update in self._reference[: len(clients)])
        return self._agree(total.float(), torch.as_tensor(expected))

    def _agree(self, found: Tensor, reference: Tensor) -> bool:
        """Return whether ``found`` equals ``reference``, both of shape (c,), up to rounding."""
        # This has found a bug: oneDNN is wrong about some channels-last convolutions of one channel
        # (torch 2.13, kernel (2, 3), stride (1, 2)).
        found, reference = found.nan_to_num(), reference.nan_to_num()  # what is not finite is zeros
        length = max(float(reference.norm()), _NOTHING * self._task.clip_norm)
        return float((found - reference).norm()) < _TOLERANCE * length

    def seconds(self, method: Method, chunk: int, best: float) -> float:
        """Return the seconds of a typical client, at the number that a round computes at once.

        Args:
            method: has agreed.
            chunk: that number, for vectorized clients.
            best: the least seconds so far; a method that is behind is not timed further.
        """
        if method.ghost_sum:
            return self._summed()
        if self._long or not method.vectorized:
            return self.one_by_one(method)
        if not self._whole:
            pair = self._timed(self._asked[:2], method, few=True)
            most = int((_WASTED - self.wasted) / self._part)
            more = self._asked[: min(chunk, most)]
            if len(more) <= 2 or pair > _BEHIND * best:
                return pair
            return min(pair, self._timed(more, method, few=True))
        two = self._fresh(2) if len(self._unused) >= 2 else self._asked[:2]
        pair = self._timed(two, method, few=False)
        found = [pair]
        while len(found) <= 2 and min(found) * chunk < max(_SHORT, _BEHIND * best * chunk):
            more = self._fresh(chunk)
            if len(more) <= 2:
                break
            found.append(self._timed(more, method, few=False))
            if found[-1] * len(more) > _SHORT:
                break
        return min(found)

    def _summed(self) -> float:
        """Return the seconds of a client in sums of as many as a round has in one."""
        most = self._computation.clients_per_ghost_sum(self._task)
        clients, found = self._fresh(most), math.inf
        again = not clients
        clients = clients or self._asked[:most]
        while clients:
            total, norms, seconds, seen = self._sum(clients)
            if again:
                self.wasted += len(clients)
            else:
                self._kept.sums.append((clients, total, norms))
                self._kept.seen.update(zip(clients, seen, strict=self._watches))
            prepared = math.isfinite(found)  # by the first call, if that was of the same size
            found = min(found, seconds / len(clients))
            clients = [] if prepared or seconds > _SHORT else self._fresh(most)
        return found

    def _fresh(self, most: int) -> list[ClientId]:
        """Return clients of the round that have not been computed, at most so many."""
        found, self._unused = self._unused[:most], self._unused[most:]
        return found

    def _keep(self, clients: Sequence[ClientId], computed: "_Computed", *, few: bool) -> None:
        """Keep the updates if they are whole clients'; else count them as wasted."""
        if few and self._part < 1:
            self.wasted += len(clients) * self._part
            return
        self.wasted += sum(client in self._kept.updates for client in clients)
        self._kept.updates.update(zip(clients, computed.updates, strict=True))
        self._kept.seen.update(zip(clients, computed.seen, strict=self._watches))

    def _timed(self, clients: Sequence[ClientId], method: Method, *, few: bool) -> float:
        """Return the seconds of a typical client; keep what the round can use."""
        local = self._few if few else self._local
        computed = self._computed(clients, method, self._task, local)
        self._keep(clients, computed, few=few)
        return self._typical(computed, clients, local)

    def _typical(
        self, computed: "_Computed", clients: Sequence[ClientId], local: LocalTraining
    ) -> float:
        """Return the seconds of a typical client, from those of some clients' training."""
        rows = sum(_rows(local, len(self._computation.users.indices[c])) for c in clients)
        return computed.seconds / rows * _rows(self._local, self._size)

    def _unclipped(self, clients: Sequence[ClientId], method: Method) -> "_Computed":
        """Compute updates that are not clipped, which would hide their length; of few steps."""
        task = replace(self._task, clip_norm=_NEVER_REACHED)
        self._computation.ends_only = self._part < 1
        try:
            return self._computed(clients, method, task, self._few)
        finally:
            self._computation.ends_only = False

    def _computed(
        self, clients: Sequence[ClientId], method: Method, task: RoundTask, local: LocalTraining
    ) -> "_Computed":
        computation = self._computation
        out = torch.empty(len(clients), computation.model.active_dim(task.active))
        computation.prepare(clients)
        seen: list[tuple[float | None, float]] = []
        computation.local = local
        try:
            began = clock(computation.device)
            computation.updates(task, clients, self._start, method, out, self._watch(seen))
            return _Computed(out, clock(computation.device) - began, seen)
        finally:
            computation.local = self._local

    def _sum(
        self, clients: Sequence[ClientId]
    ) -> tuple[Tensor, Sequence[float], float, list[tuple[float | None, float]]]:
        computation = self._computation
        total = torch.empty(computation.model.dim, dtype=torch.float64)
        computation.prepare(clients)
        seen: list[tuple[float | None, float]] = []
        began = clock(computation.device)
        norms = computation.sum(self._task, clients, self._start, total, self._watch(seen))
        return total, norms, clock(computation.device) - began, seen

    def _watch(self, seen: list[tuple[float | None, float]]) -> Watch | None:
        return (lambda *one: seen.append(one)) if self._watches else None


@dataclass(frozen=True, slots=True)
class _Computed:
    """Updates of clients, shape (clients, c), the seconds that they took, and what was watched."""

    updates: Tensor
    seconds: float
    seen: Sequence[tuple[float | None, float]]


def _steps(local: LocalTraining, examples: int) -> int:
    return local.steps or local.epochs * -(-examples // local.batch_size)


def _rows(local: LocalTraining, examples: int) -> int:
    """Return the number of rows of all batches of a client with examples."""
    passes, more = divmod(_steps(local, examples), -(-examples // local.batch_size))
    return passes * examples + min(more * local.batch_size, examples)


def _key(
    computation: LocalComputation,
    task: RoundTask,
    chunk: int,
    workers: int,
    methods: Sequence[Method],
) -> dict[str, Any]:
    """Return what the times of the methods depend on; rates, seeds and noise are not among it."""
    local, index = computation.local, computation.users.indices
    module, device = computation.model.module, computation.device
    parts = [(name, tuple(p.shape), p.requires_grad) for name, p in module.named_parameters()]
    kinds = [f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in module.modules()]
    network = f"{module}{parts}{kinds}"
    return {
        "methods": [str(method) for method in methods],
        "code": _code(),
        "torch": torch.__version__,
        "processor": _processor() if device.type == "cpu" else _accelerator(device),
        "tf32": computation.tf32,
        "threads": 1 if workers > 1 else torch.get_num_threads(),
        "network": hashlib.sha256(network.encode()).hexdigest(),
        "x": [*computation.x.shape[1:], str(computation.x.dtype)],
        "y": [*computation.users.y.shape[1:], str(computation.users.y.dtype)],
        "active": task.active,
        "local": {k: v for k, v in asdict(local).items() if k not in ("learning_rate", "mu")},
        # a cohort that is one larger, or another split of the examples, takes about as long
        "examples": round(2 * math.log2(max(1.0, index.rows / len(index)))),
        "chunk": math.ceil(math.log2(chunk)),
    }


@cache
def _code() -> str:
    """Return the hash of the code that is timed, or of nothing if it is not in files."""
    engines = Path(__file__).parent
    digest = hashlib.sha256()
    try:
        for path in (*sorted(engines.glob("*.py")), engines.parent / "client.py"):
            digest.update(path.read_bytes())
    except OSError:
        return ""
    return digest.hexdigest()


@cache
def _processor() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return capability
    return next((f"{line} {capability}" for line in lines if line.startswith("model name")), "")


def _accelerator(device: torch.device) -> str:
    name = getattr(namespace(device), "get_device_name", str)
    return str(name(device))
