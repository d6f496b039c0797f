"""Server: sums clipped updates, adds noise, divides by a public constant, and takes a step.

In ``Server.run_round``, a ``RoundSum`` admits the updates of a round: it refuses malformed ones and
clips every other again, since nothing that a client sends is trusted. An update that is not finite
counts as zeros. A client counts once per round and at most as often as the plan allows. Only the
operator's own simulation may hand over sums that it clipped; they have an argument of their own.

Updates become integers on the plan's public grid, sums and noise are integers, and only the noised
sum becomes floating point (``privpart.grid``). It is divided by the plan's ``report_goal``, never
by the number of clients that came: that number is private, and dividing by it would let one client
weigh more than the accountant assumes. A ``ServerOptimizer`` moves the model by this noised mean.

The noise of a round does not depend on its updates, so it is drawn while the clients train.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from accounting import PrivacyReport
from accounting.checks import ConfigError
from privpart.clip import add_in_place, clip_and_measure, is_clipped
from privpart.engines.protocol import OPTIMIZER
from privpart.grid import Grid, quantise
from privpart.messages import (
    ClientId,
    ClientUpdate,
    CohortSum,
    Reason,
    RoundTask,
    id_order,
    is_client_id,
    limit_reached,
    named_clients,
    refusal,
)
from privpart.noise.source import NoiseSource
from privpart.noise.stream import NoiseStream, noise_and_grid
from privpart.optimizer import ExactOptimizer
from privpart.patterns import parts_of
from privpart.plan import PrivacyPlan, restarts
from privpart.secure.sums import ModularSum, wrap
from privpart.settings.server import ServerOptimizer

SERVER, CLIENTS = "server", "clients"
ANOTHER_ENGINE, ANOTHER_SERVER = "another engine", "another server"
"""Who may clip an update, besides this package's engines, which a ledger names by their class."""


def methods_of(kind: type) -> dict[str, object]:
    """Return the methods and properties that a class itself defines, by name."""
    return {n: v for n, v in vars(kind).items() if callable(v) or isinstance(v, property)}


def is_unchanged(
    thing: object, kind: type, methods: Mapping[str, object], *, but: Collection[str] = ()
) -> bool:
    """Whether an object is of a class itself, and no method was replaced in the class or in it.

    A subclass may do what it likes, and an object may say that it is of any class. What else code
    of the same process changes is not seen. Methods in ``but`` may be replaced in the object.
    """
    same = type(thing) is kind and methods_of(kind) == methods
    return same and not (vars(thing).keys() & methods.keys()) - {*but}


@dataclass(frozen=True, slots=True)
class RoundCounts:
    """Numbers of updates in a round. The guarantee does not cover them: never release them.

    Attributes:
        received: updates of any kind.
        counted: updates that entered the sum; 0 if nothing was released.
        refused: the others.
        summed: counted updates that were clipped and summed in the server's place.
        summed_by: engine of this package that did so for ``fit``; "" for any other code.
        released: False if too few updates were admitted, or most were refused; the server has then
            not changed.
        asked: number of clients that were asked, as ``run_round`` was told; 0 if it was not.
        refusals: number of refused updates by reason.
        refused_clients: number of clients that were asked, answered this round of this plan, and
            had every such answer refused; each counts once, however often it answered.
        self_clipped: those of ``summed`` whose clients clipped them, for a secure sum.
        rows_differ: of a step on examples, why nothing shows that their gradients are of the batch,
            by a name of ``privpart.run.report.ROWS``; "" if they were compared.
        not_finite: counted updates that were not finite, and are zeros in the sum. Of a secure sum,
            which shows no update, it is not known, and they are not in it.
    """

    received: int
    counted: int
    refused: int
    summed: int = 0
    released: bool = True
    asked: int = 0
    refusals: Mapping[Reason, int] = field(default_factory=dict, hash=False)
    refused_clients: int = 0
    self_clipped: int = 0
    rows_differ: str = ""
    not_finite: int = 0
    summed_by: str = ""

    @property
    def clipped_by(self) -> dict[str, int]:
        """Counted updates by who clipped them last: "server", "clients", or an engine's name."""
        numbers = {SERVER: self.counted - self.summed, CLIENTS: self.self_clipped}
        numbers[self.summed_by or ANOTHER_ENGINE] = self.summed - self.self_clipped
        # of a step of nobody, too: its optimizer added the noise
        return {name: number for name, number in numbers.items() if number or name == OPTIMIZER}

    @property
    def admitted(self) -> int:
        """Number of updates that were not refused, whether or not the round was released."""
        return self.received - self.refused

    @property
    def mostly_refused(self) -> bool:
        """Whether most clients that were asked had all their answers refused."""
        return 2 * self.refused_clients > self.asked


class Server:
    """The trainable part of a model under DP-FTRL.

    Args:
        plan: the promise; fixes clip norm, noise, divisor, rounds and participation.
        start: trainable part before the first round, shape (d,), float32; public.
        source: source of the noise; ``SecretSource()`` unless the run is a simulation.
        optimizer: settings of the step on the noised mean; None is plain averaging.
        rates: gives the share of the optimiser's learning rate that a round takes, from 0 on; None
            is 1. It must depend on no data.

    Attributes:
        parameters: the trainable part, shape (d,), which the next round's clients receive. Engines
            and evaluations see this tensor itself; a round after they changed it is refused.
        plan_hash: hash of the plan, computed once.
        round: the next round, from 0; equal to ``plan.rounds`` in the end.
        clip_norm: clip norm of the next round.
        cohort: ids of the clients whose updates entered the last sum, in the order of ``id_order``;
            not for release.
        last_clip_norm: clip norm of the last round.
        last_counts: what was counted in the last round, as a run folder keeps it; None before it.

    Raises:
        ConfigError: ``start`` is not float32, or its length is not that of the plan's groups.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        start: Tensor,
        *,
        source: NoiseSource,
        optimizer: ServerOptimizer | None = None,
        rates: Callable[[int], float] | None = None,
    ) -> None:
        if start.dtype is not torch.float32:
            raise ConfigError(
                f"start has {start.dtype}: must be torch.float32, the type of the model that the "
                "clients receive."
            )
        self.plan = plan
        self.source = source
        self.parameters = start.detach().clone()
        self._released = self.parameters.clone()
        self.round = 0
        self.clip_norm = plan.clip_norm_at(0)
        self.plan_hash = plan.hash
        self._groups = parts_of(plan.mechanism, self.parameters)
        self._released_groups = parts_of(plan.mechanism, self._released)
        self._rates = rates
        self._optimizer = ExactOptimizer(optimizer or ServerOptimizer(), self._groups)
        # In units of the clip norm, which adaptive clipping may change.
        self._noise: NoiseStream | None = None
        self._grid: Grid | None = None
        # a plan without noise trains in floating point, and claims nothing
        if plan.noise_multiplier:
            z = plan.update_noise_multiplier
            self._noise, self._grid = noise_and_grid(plan, start.numel(), z, source, 0)
        self._restarts: frozenset[int] = frozenset()
        self._bit_noise: NoiseStream | None = None
        self._bit_grid: Grid | None = None
        if plan.adaptive_clipping is not None:
            self._restarts = restarts(plan.mechanism)
            z = plan.adaptive_clipping.bit_noise_multiplier
            self._bit_noise, self._bit_grid = noise_and_grid(plan, 1, z, source, 1)
        self._coming: Future[Tensor | None] | None = None
        # Vectors that every round reuses: fresh memory costs as much as the arithmetic.
        self._drawn: Tensor | None = None
        self._total = torch.empty(0, dtype=torch.float64)
        self._scratch = torch.empty(0)
        self._bits = 0.0  # noised sum of centred bits since the last restart
        self._participations: dict[ClientId, list[int]] = {}
        self._halted = ""
        # a client's generator could run a round inside the round that reads it
        self._adding_up = False
        # a fork has the key and the state, and would repeat the noise
        self._process = os.getpid()
        self._last = RecordedSum(self._total, 0.0, None)
        self.cohort: tuple[ClientId, ...] = ()
        self.last_clip_norm = self.clip_norm
        self.last_counts: RoundCounts | None = None

    def _active(self) -> tuple[int, ...] | None:
        """Groups that train in the next round; None without groups, none after the last round."""
        groups = self.plan.mechanism.groups
        if groups is None:
            return None
        return () if self.is_complete else groups.schedule[self.round]

    @property
    def is_complete(self) -> bool:
        """Whether all planned rounds are done."""
        return self.round >= self.plan.mechanism.rounds

    @property
    def private(self) -> bool:
        """Whether the plan's guarantee may be claimed: the run adds noise, from a secret key."""
        return self._noise is not None and self.source.private

    def report(self, delta: float) -> PrivacyReport:
        """Return the plan's guarantee at ``delta`` in (0, 1); it names the source of the noise."""
        return self.plan.report(delta, noise_source="os" if self.source.private else "seeded")

    def ineligible(self, clients: Iterable[ClientId]) -> dict[ClientId, Reason]:
        """Map each client that may not take part in the next round to the reason."""
        reasons = ((client, self._limit_reached(client)) for client in clients)
        return {client: reason for client, reason in reasons if reason is not None}

    def task(self, clients: Sequence[ClientId]) -> RoundTask:
        """Return the task of the next round for a cohort, and begin to draw the round's noise.

        Raises:
            ConfigError: the server was halted, so nobody may see its model.
        """
        self._check_running()
        if self._coming is None and not self.is_complete:
            # numpy releases the interpreter's lock in its loops, so the clients train meanwhile
            pool = ThreadPoolExecutor(1, thread_name_prefix="privpart-noise")
            self._coming = pool.submit(self._draw)
            pool.shutdown(wait=False)  # the thread ends with its work
        return self._task(clients)

    def _task(self, clients: Sequence[ClientId]) -> RoundTask:
        shorter = None if self._grid is None else self._grid.sum_clip_norm(self.clip_norm)
        fixed = self.plan_hash, self._active(), shorter, self._grid
        least = 0 if self.plan.secure is None else self.plan.secure.smallest_cohort
        return RoundTask(self.round, tuple(clients), self.clip_norm, *fixed, least)

    def _draw(self) -> Tensor | None:
        if self._noise is None:
            return None
        if self._drawn is None:
            self._drawn = torch.empty(self.parameters.numel(), dtype=self._noise.dtype)
        return self._noise.next(out=self._drawn)

    def run_round(
        self,
        updates: Iterable[ClientUpdate],
        *,
        sums: Iterable[CohortSum] = (),
        secure: Iterable[ModularSum] = (),
        asked: Collection[ClientId] = (),
    ) -> RoundCounts:
        """Aggregate one round of updates, take a step, and return what was counted.

        Args:
            updates: objects of any kind, from any sender.
            sums: sums of updates that the operator's own code clipped; their clipping is trusted.
            secure: sums of clients that clipped and rounded their updates themselves, which a
                protocol of secure aggregation made; the report then asserts the clipping.
            asked: ids of the clients that were asked. If they are given, a round in which most of
                them were refused releases nothing: the model would be divided as if they had come.
                Where the plan samples, nobody else is admitted, and every round is released,
                whoever came: a round that is missing would tell who was asked.

        Guarantees:
            No content of ``updates`` raises an error, and leaving one client out changes the sum
            by at most ``clip_norm``. Client ids must come from an authenticated channel: the
            limits count ids, so a client that chose its own id could evade them. If nothing is
            released, nothing changes: no step, no noise drawn, no participation counted. Whether
            a round is released does not depend on the values in an update.

        Raises:
            ConfigError: the server was halted, all planned rounds are done, or sums were given
                although the plan samples.
        """
        self._refuse_round(updates, sums, secure)
        asked, sampled = frozenset(asked), self.plan.sampling is not None
        dim = self._active_dim()
        if not len(self._total):
            self._total = torch.empty(self.parameters.numel(), dtype=torch.float64)
            self._scratch = torch.empty_like(self.parameters)

        def refused(client: ClientId) -> Reason | None:
            return "not asked" if sampled and client not in asked else self._limit_reached(client)

        total, scratch = self._total[:dim].zero_(), self._scratch[:dim]
        round_sum = RoundSum(self._task(()), total, scratch, refused, self._grid)
        self._adding_up = True
        try:
            doors = (ClientUpdate, updates), (CohortSum, sums), (ModularSum, secure)
            for kind, answers in doors:
                for answer in answers:
                    round_sum.add(answer, kind)
        finally:
            self._adding_up = False
        came = round_sum.came
        counts = round_sum.counts(asked)
        too_few = len(came) < self.plan.minimum_cohort or counts.mostly_refused
        # where members are secret, a missing round would tell how many were drawn
        if too_few and not sampled:
            return replace(
                counts, counted=0, summed=0, self_clipped=0, not_finite=0, released=False
            )
        self._refuse_changed_model()
        # From here on the round's noise is drawn. If anything fails before the end, a second try
        # would add the same noise to another sum, so the server stays halted.
        self.halt("a round was interrupted after its noise was drawn")
        self.cohort = tuple(sorted(came, key=id_order))
        self.last_clip_norm = self.clip_norm
        for client in came:
            self._participations.setdefault(client, []).append(self.round)
        self._last = RecordedSum(round_sum.total, round_sum.bits, round_sum.modulus_bits)
        self._release(self._last)
        self._halted = ""
        self.last_counts = counts
        return counts

    def _release(self, round_sum: "RecordedSum") -> None:
        """Add the round's noise to its sum, and take the step."""
        noise = self._draw() if self._coming is None else self._coming.result()
        self._coming = None
        self._step(round_sum, noise)
        self.round += 1
        self._adapt(round_sum.bits)

    def recorded(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the last round's sum, as integers, and what else ``replay`` needs of it.

        As secret as the noise: with it, the noise can be computed from the release.
        """
        salts = [stream.salt_of(self.round - 1).hex() for _, stream in self._streams()]
        values = {"bits": self._last.bits, "modulus_bits": self._last.modulus_bits, "salts": salts}
        return {"sum": self._last.total.to(torch.int64)}, values

    def replay(self, total: Tensor, values: Mapping[str, Any]) -> None:
        """Run a round again from what ``recorded`` returned of it; no run folder commits it.

        Raises:
            ConfigError: the server was halted, the sum is of another length or type, or a value is
                of another kind.
        """
        self._check_running()
        self.last_counts = None
        dim = self._active_dim()
        if self.is_complete or total.dtype is not torch.int64 or total.shape != (dim,):
            raise ConfigError(
                f"sum: has {total.dtype} of shape {tuple(total.shape)}; must be {dim} integers."
            )
        for (_, stream), salt in zip(self._streams(), values["salts"], strict=True):
            stream.draw_again(bytes.fromhex(salt))
        self.last_clip_norm = self.clip_norm
        self._release(RecordedSum(total.double(), float(values["bits"]), values["modulus_bits"]))

    def _active_dim(self) -> int:
        return sum(self._groups[group].numel() for group in self._active() or (0,))

    def _refuse_round(self, updates: object, sums: object, secure: object) -> None:
        self._check_running()
        if self.is_complete:
            raise ConfigError(
                f"all {self.plan.rounds} planned rounds are done, and the guarantee covers no "
                "further one. Plan more rounds from the start."
            )
        if self._adding_up:
            raise ConfigError(
                f"round {self.round} is being run: its updates must not run another round, nor "
                "may a second thread."
            )
        if self.plan.sampling is not None and sums != ():
            raise ConfigError(
                "sums: this plan samples who takes part, so each update comes alone. The report "
                "counts rounds with sums, and the rounding of a sum depends on who is in it."
            )
        if self.plan.secure is not None and (updates, sums) != ((), ()):
            raise ConfigError(
                "secure: this plan promises that the server sees sums of many parties only, so it "
                "takes no update in the clear. Use a SecureEngine, or plan without secure."
            )
        unseen = self.plan.sampling, self.plan.adaptive_clipping
        if secure != () and (self._grid is None or unseen != (None, None)):
            raise ConfigError(
                "secure: sums of clients that clip themselves need noise, whose grid they round "
                "to; and no sampling and no adaptive clipping, which need each update."
            )

    def _refuse_changed_model(self) -> None:
        """Check that the model is what the last round made it; no noise covers anything else."""
        # numpy compares in a quarter of torch's time; in parts, whose answers stay in the cache
        now, then = self.parameters.detach().numpy(), self._released.numpy()
        parts = (slice(start, start + _PART) for start in range(0, len(then), _PART))
        if now.shape != then.shape or not all(
            np.array_equal(now[here].view(np.int32), then[here].view(np.int32)) for here in parts
        ):
            raise ConfigError(
                "server.parameters: were changed by something else than a round, such as an engine "
                "that trains in place or an evaluation, and no noise covers that. Work on a copy: "
                "start.clone(). Make a new server and restore the last committed round."
            )

    def halt(self, reason: str) -> None:
        """Refuse all further rounds, since the last one's noise was drawn but not committed."""
        self._halted = reason

    def _check_running(self) -> None:
        if os.getpid() != self._process:
            raise ConfigError(
                "this process was forked from the one that holds the server, and would repeat its "
                "noise. Run rounds in the process that made the server."
            )
        if self._halted:
            raise ConfigError(
                f"this server is halted: {self._halted}. Nobody may see its model. Make a new "
                "server and restore the last committed round."
            )

    def _limit_reached(self, client: ClientId) -> Reason | None:
        rounds = self._participations.get(client, ())
        return limit_reached(self.plan.participation, rounds, self.round)

    def _step(self, round_sum: "RecordedSum", noise: Tensor | None) -> None:
        """Release the noised sum: divide it by a public constant and take a step.

        Piece by piece: vectors of the model's length would cost more than the arithmetic.
        """
        step = 1.0 if self._grid is None else self._grid.step(self.clip_norm)
        fixed, goal = self.plan.report_goals is None, self.plan.report_goal
        divisor = -(goal if fixed else self.plan.report_goal_at(self.round)) / step
        active, end = self._active() or (0,), 0
        # An inactive group has no gradient rather than a zero one, so that its momentum rests too.
        self._optimizer.begin(active, 1.0 if self._rates is None else self._rates(self.round))
        sums, gradients = np.empty(_PART), np.empty(_PART, np.float32)
        for group in active:
            part, released = self._groups[group].numpy(), self._released_groups[group].numpy()
            for start in range(0, len(part), _PART):
                here = slice(start, min(start + _PART, len(part)))
                first, end = end, end + here.stop - start
                noised, gradient = sums[: end - first], gradients[: end - first]
                np.copyto(noised, round_sum.total[first:end].numpy())
                if noise is not None:
                    noised += noise[first:end].numpy()
                    if round_sum.modulus_bits is not None:
                        wrap(noised, round_sum.modulus_bits)
                np.multiply(noised, 1 / divisor, out=gradient, casting="same_kind")
                self._optimizer.move(group, here, gradient)
                released[here] = part[here]

    def _adapt(self, bits: float) -> None:
        """Take the next round's clip norm: by the plan, or by the noised bits, at a restart."""
        adaptive, grid = self.plan.adaptive_clipping, self._bit_grid
        if self.plan.clip_norms is not None:
            self.clip_norm = self.plan.clip_norm_at(self.round)
        if adaptive is None or self._bit_noise is None or grid is None:
            return
        # A bit is half an update's norm in steps, an integer, and so is the noise.
        half = math.floor(grid.norm / 2)
        self._bits += (bits * 2 * half + int(self._bit_noise.next())) / (2 * half)
        if self.round in self._restarts:
            began = max((r for r in self._restarts if r < self.round), default=0)
            # The bits are +1/2 and -1/2, so their noised mean plus 1/2 is the share of unclipped
            # updates; the mean is over the public report_goal, not over the clients that came.
            share = 0.5 + self._bits / (self.plan.report_goal * (self.round - began))
            first = float(self.plan.clip_norm)
            self.clip_norm = adaptive.next_clip_norm(self.clip_norm, share, first=first)
            self._bits = 0.0

    def load_start(self, parameters: Tensor) -> None:
        """Replace the start of the trainable part, shape (d,), before the first round.

        Raises:
            ConfigError: another shape, or a round was run already.
        """
        if self.round or parameters.shape != self.parameters.shape:
            raise ConfigError(
                f"start has {parameters.numel()} parameters: it must have "
                f"{self.parameters.numel()}, as the model, and be loaded before the first round."
            )
        self.parameters.copy_(parameters)
        self._released.copy_(parameters)

    @property
    def checkpoint(self) -> int:
        """The last round, up to now, after which the registers of the noise are to be saved."""
        return max((stream.checkpoint for _, stream in self._streams()), default=0)

    @property
    def registers(self) -> list[str]:
        """Names of the tensors of a state that follow from the key, see ``load_state_dict``."""
        return [f"{name}.{key}" for name, stream in self._streams() for key in stream.registers]

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything that the next round depends on, except plan, key and participations.

        Returns:
            Tensors by name, which share memory with the server, and plain values, ready for JSON.
            The state of a complete run holds no noise: whoever read it could subtract it.

        Raises:
            ConfigError: a task was given out and its round was not run, or the parameters were
                changed since.
        """
        self._refuse_changed_model()
        if self._coming is not None:
            raise ConfigError(
                f"round {self.round} is under way and its noise is drawn: save the server after "
                "run_round, before the next task."
            )
        tensors = {"parameters": self.parameters.detach()}
        for name, tensor in self._optimizer.tensors().items():
            tensors[f"optimizer.{name}"] = tensor
        values: dict[str, Any] = {"plan": self.plan_hash, "round": self.round}
        values |= {"clip_norm": self.clip_norm, "bits": self._bits}
        for prefix, stream in () if self.is_complete else self._streams():
            state = stream.state_dict()
            tensors |= {f"{prefix}.{k}": v for k, v in state.items() if isinstance(v, Tensor)}
            values[prefix] = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
        return tensors, values

    def load_state_dict(
        self,
        tensors: dict[str, Tensor],
        values: dict[str, Any],
        participations: dict[ClientId, list[int]],
    ) -> None:
        """Continue where ``state_dict`` was called; bit for bit, given the same key.

        The registers are taken out of ``tensors``, so that their memory is free once they are read.
        ``participations`` are the rounds in which each client took part, ascending. The registers
        may be those after fewer rounds, which ``values`` name as "registers"."round"; the noise
        since then is drawn again, and no sum is.

        Raises:
            ConfigError: the state belongs to another plan or model.
        """
        if values["plan"] != self.plan_hash:
            raise ConfigError(
                f"the state belongs to plan {values['plan'][:12]}, this is {self.plan_hash[:12]}."
            )
        if (stored := tensors["parameters"]).shape != self.parameters.shape:
            numbers = f"{stored.numel()} parameters, the model {self.parameters.numel()}"
            raise ConfigError(f"the state has {numbers}.")
        if self.round or self._coming is not None:
            raise ConfigError("the server has begun: load a state into a new server.")
        # half of a state under the other half of another: no round may follow
        self.halt("a state was loaded in part")
        since = values["registers"]["round"] if "registers" in values else values["round"]
        for prefix, stream in self._streams() if values["round"] < self.plan.rounds else ():
            registers = _under(prefix, tensors)
            for key in registers:
                del tensors[f"{prefix}.{key}"]
            stream.load_state_dict({**values[prefix], **registers}, since=since)
            del registers
            if stream.round != values["round"]:
                raise ConfigError(
                    f"the state is that of round {values['round']}, its {prefix} that of round "
                    f"{stream.round}."
                )
        self.parameters.copy_(stored)
        self._released.copy_(self.parameters)
        self.round, self.clip_norm = values["round"], values["clip_norm"]
        self._bits = values["bits"]
        self._participations = participations
        self._optimizer.load({k: t.clone() for k, t in _under("optimizer", tensors).items()})
        self._halted = ""

    def __copy__(self) -> NoReturn:
        raise TypeError("Server: is never copied; a copy would repeat its noise.")

    def _streams(self) -> list[tuple[str, NoiseStream]]:
        both = (("noise", self._noise), ("bit_noise", self._bit_noise))
        return [(name, stream) for name, stream in both if stream is not None]


_PART = 2**15
_STALE: tuple[Reason, ...] = ("another round", "another plan")
"""Reasons that tell nothing of how a client answers this round."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSum:
    """What a round's step depends on besides its noise."""

    total: Tensor  # shape (c,), float64; integers on a grid
    bits: float  # the sum of the centred bits of adaptive clipping
    modulus_bits: int | None  # k of a sum modulo 2^k


@dataclass(eq=False)
class RoundSum:
    """The sum of one round's updates, and the clients that are in it.

    Guarantees:
        ``add`` raises nothing, whatever it is given, and leaving one client out changes the sum by
        at most the clip norm: on a grid by integers whose norm is at most ``grid.norm``.
    """

    _task: RoundTask
    total: Tensor  # zeros, shape of an update, float64; becomes the sum, on a grid in whole steps
    _scratch: Tensor  # as ``total``, float32; overwritten
    _refused: Callable[[ClientId], Reason | None]  # says why a client may not take part
    grid: Grid | None = None  # None for a run without noise
    came: set[ClientId] = field(default_factory=set)  # ids of the clients in the sum
    received: int = 0
    refusals: Counter[Reason] = field(default_factory=Counter)
    # in refused answers to this round of this plan; a client may be in ``came``, too
    refused: set[ClientId] = field(default_factory=set)
    summed: int = 0
    self_clipped: int = 0
    modulus_bits: int | None = None  # k of a sum modulo 2^k
    bits: float = 0.0  # +1/2 for each update that ``is_clipped`` says was not clipped, else -1/2
    not_finite: int = 0  # number of updates that were not finite, and count as zeros

    def add(self, answer: object, kind: type[Any] = ClientUpdate) -> None:
        """Add an answer of a kind, or refuse all of it.

        An update is clipped, whoever sent it; only the operator's own code may hand over a
        ``CohortSum``, and a protocol of secure aggregation a ``ModularSum``.
        """
        named = named_clients(answer, kind)
        # judged whole before anything of it is added: a half-added answer could not be taken back
        why = refusal(answer, kind, self._task, self.total.shape) or self._not_now(named)
        if why:
            size = 1 if kind is ClientUpdate else max(1, len(named))
            self.received += size
            self.refusals[why] += size
            # anybody may replay an old answer; it must not make its client look refused
            if why not in _STALE:
                self.refused.update(filter(is_client_id, named))
            return
        self.received += len(named)
        if isinstance(answer, ClientUpdate):
            norm = self._add(answer.update.detach())
            self.bits += -0.5 if is_clipped(norm, self._task.clip_norm) else 0.5
            self.not_finite += math.isnan(norm)
        else:
            self.summed += len(named)
        if isinstance(answer, CohortSum):
            self.bits += answer.unclipped - 0.5 * len(named)
            self.not_finite += answer.not_finite
            self._add_clipped(answer.total)
        if isinstance(answer, ModularSum):
            self.self_clipped += len(named)
            self.modulus_bits = min(answer.bits, self.modulus_bits or answer.bits)
            self.total += torch.from_numpy(answer.around_zero())
            wrap(self.total.numpy(), self.modulus_bits)
        self.came.update(filter(is_client_id, named))

    def _not_now(self, clients: Sequence[Any]) -> Reason | None:
        """Return why one of these clients may not be added to the sum."""
        if not self.came.isdisjoint(clients):
            return "twice in a round"
        return next(filter(None, map(self._refused, clients)), None)

    def _add(self, update: Tensor) -> float:
        """Clip and add an update; return its norm as it came, NaN if it is not finite."""
        clip_norm = self._task.clip_norm
        if self.grid is not None:
            whole = self._scratch.view(torch.int32)
            norm = quantise(update, clip_norm, self.grid, whole.numpy())
            add_in_place(self.total, whole)
            return norm
        clipped, norm = clip_and_measure(update, clip_norm)
        if not math.isnan(norm):
            add_in_place(self.total, clipped)
        return norm

    def _add_clipped(self, addend: Tensor) -> None:
        """Add a sum of clipped updates; on a grid, the integers nearest to it."""
        if self.grid is None:
            self.total += addend
            return
        factor = 1 / self.grid.step(self._task.clip_norm)
        parts = torch.split(self.total, _PART), torch.split(addend, _PART)
        for total, part in zip(*parts, strict=True):
            total.add_((part * factor).round_())

    def counts(self, asked: frozenset[ClientId]) -> RoundCounts:
        """Return what was counted and refused, of the clients that were asked."""
        return RoundCounts(
            self.received,
            len(self.came),
            sum(self.refusals.values()),
            self.summed,
            self_clipped=self.self_clipped,
            not_finite=self.not_finite,
            asked=len(asked),
            refusals=dict(+self.refusals),  # + drops zeros, of empty sums
            refused_clients=len(asked & self.refused - self.came),
        )


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    dot = f"{prefix}."
    return {name[len(dot) :]: t for name, t in tensors.items() if name.startswith(dot)}


OWN_SERVER = methods_of(Server)
