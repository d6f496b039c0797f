"""Promise: a planned run, from typed options or from a plan file, and the report of what it costs.

Sampler and accountant are one choice. Poisson sampling: independent noise is DP-SGD; a banded
mechanism needs the members in as many groups as it has bands, which take turns. Truncated Poisson
sampling and sampling without replacement: independent noise only, by a bound. Balls in bins: any
mechanism of one stream, by a bound in closed form, or nearer by Monte Carlo. b-min-sep: encoders
with no more bands than rounds between two of one member, by Monte Carlo only.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from accounting import (
    BallsInBins,
    BMinSep,
    ComposedGuarantee,
    ConfigError,
    FixedOrder,
    Guarantee,
    Mechanism,
    Participation,
    PoissonSampling,
    PrivacyReport,
    Realised,
    calibrate,
    guarantee,
    participation_of,
    sampled_guarantee,
)
from accounting.calibrate import estimated_noise, least_sampled_noise
from accounting.claims import claim_of, known
from accounting.cohorts import Sampled, SamplingChoice, sampled_passes
from accounting.guarantee import Method
from accounting.mechanisms.by_name import MechanismChoice, MechanismName
from accounting.mechanisms.scheduled import read_schedule
from accounting.realised import read_log
from accounting.report import MetricsClaim, NoiseOrigin
from privpart.cli.output import say

if TYPE_CHECKING:
    from accounting.subsampled import SampledMethod

Histories = Mapping[str, list[int]]
"""Each client's rounds, by a log."""
FITS = "accounting.fit"
"""Name of the logger of what takes long."""
_PATIENCE = 2.0
"""Seconds between two lines about a fit."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Everything that the figures of a run depend on.

    Attributes:
        stated: whether somebody said how often a client takes part.
        sampled: the amplified guarantee, if the run hides who takes part.
        metrics: noised metrics that the run releases besides.
        about: what the plan's table [about] states.
    """

    choice: MechanismChoice
    mechanism: Mechanism
    participation: Participation
    noise_multiplier: float
    delta: float
    stated: bool = True
    population: int | None = None
    sampled: Sampled | None = None
    metrics: MetricsClaim | None = None
    about: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def planned(cls, path: Path, population: int | None) -> "Promise":
        """Read a plan file, without torch unless its clients select slices."""
        from privpart.training.plan_file import read

        plan = read(path)
        stated = plan.stated_population
        if None not in (stated, population) and stated != population:
            raise ConfigError(f"population={population}: the plan is for {stated} clients.")
        plan.accept_delta(population)
        with shown_fits():
            promised = plan.privacy_plan()
        return cls(
            plan.privacy.mechanism,
            promised.mechanism,
            promised.participation,
            promised.noise_multiplier,
            plan.privacy.delta,
            population=stated or population,
            sampled=promised.guarantee() if promised.sampling is not None else None,  # type: ignore[arg-type]
            metrics=None if promised.metrics is None else promised.metrics.claim(),
            about=plan.about.stated(),
        )

    def guarantee(self) -> Guarantee | Sampled:
        """Return what one run costs, amplified if it hides who takes part."""
        if self.sampled is not None:
            return self.sampled
        run = guarantee(self.mechanism, self.participation, noise_multiplier=self.noise_multiplier)
        return run if self.metrics is None else self.metrics.beside(run)

    def report(
        self,
        method: Method | None = None,
        *,
        histories: Histories | None = None,
        earlier: ComposedGuarantee | None = None,
        noise_source: NoiseOrigin = "unstated",
    ) -> PrivacyReport:
        """Return the report, with the cost by a log and of earlier runs if there are any."""
        plain: Method = "exact" if self.sampled is not None or method is None else method
        alone = self.sampled is None and earlier is None
        run, z, delta = (self.mechanism, self.participation), self.noise_multiplier, self.delta
        realised = None
        if histories is not None:
            realised = Realised.of(
                run[0], histories, run[1], noise_multiplier=z, delta=delta, method=plain
            )
        return PrivacyReport.of(
            *run,
            noise_multiplier=z,
            delta=delta,
            method=plain,
            population=self.population,
            noise_source=noise_source,
            earlier=None if earlier is None else known(earlier.releases),
            participation_stated=self.stated,
            realised=realised,
            sampled=None if alone else claim_of(self.guarantee(), delta, earlier),
            metrics=self.metrics,
        )


@dataclass(frozen=True, slots=True)
class TypedRun:
    """What was typed of a run, besides its noise, its rounds and its sampler.

    ``limits`` are the most rounds of a client, its separation, and whether the order is fixed.
    """

    mechanism: str | None
    schedule: Path | None
    limits: tuple[int | None, int | None, bool]
    population: int | None
    method: Method | None
    delta: float

    def promise(
        self,
        rounds: int,
        sampling: str | None,
        *,
        z: float | None = None,
        target: float = 0.0,
        histories: Histories | None = None,
    ) -> Promise:
        """Return the promise with the noise ``z``, or with the least that meets a target epsilon.

        Without limits it is of the participation in ``histories``, the log alone.
        """
        choice = typed_choice(self.mechanism, rounds, self.schedule)
        if sampling is not None:
            return self._sampled(choice, rounds, sampling, z, target)
        stated = self.limits[0] is not None
        if histories is not None and not stated:
            limits, stated = _logged(choice, rounds, histories), True
        else:
            limits = typed_participation(rounds, *self.limits)
        mechanism, by = built(choice, limits), self.method or "exact"
        if z is None:
            goal = {"target_epsilon": target, "delta": self.delta}
            z = calibrate(mechanism, limits, **goal, method=by)
        return Promise(choice, mechanism, limits, z, self.delta, stated, self.population)

    def _sampled(
        self, choice: MechanismChoice, rounds: int, sampling: str, z: float | None, target: float
    ) -> Promise:
        """Return the promise by the one accountant that covers the sampler."""
        sampler, draw_seed = SamplingChoice.parse(sampling)
        mechanism = built(choice, sampled_passes(rounds, sampler.bins))
        drawn = sampler.sampler(mechanism, self.population)
        by: SampledMethod = "rdp" if self.method == "rdp" else "pld"
        offered = (None, "pld", "rdp") if isinstance(drawn, PoissonSampling) else (None,)
        if self.method not in offered:
            raise ConfigError(
                f"method={self.method}: Poisson sampling has 'pld' (default) and 'rdp', every "
                "other sampler one accountant; leave it out."
            )
        estimate = sampler.estimate(draw_seed)
        if z is None and draw_seed is not None:
            raise ConfigError(
                f"draw_seed={draw_seed}: only with a given noise multiplier; leave it out."
            )
        goal = {"target_epsilon": target, "delta": self.delta}
        if z is None and estimate is not None and isinstance(drawn, BallsInBins | BMinSep):
            # The guarantee that met the target, not another one: each would be a second answer.
            estimated = estimated_noise(mechanism, drawn, **goal, draws=estimate.draws)
            cost: Sampled = estimated
            z = estimated.noise_multiplier
        else:
            z = least_sampled_noise(mechanism, drawn, **goal, method=by) if z is None else z
            cost = sampled_guarantee(
                mechanism, drawn, noise_multiplier=z, estimate=estimate, method=by
            )
        limits = participation_of(drawn, mechanism.rounds)
        return Promise(
            choice, mechanism, limits, z, self.delta, population=self.population, sampled=cost
        )


def typed_participation(
    rounds: int, max_participations: int | None, min_separation: int | None, fixed_order: bool
) -> Participation:
    """Return the participation that was typed; one round of each client if nothing was.

    Raises:
        ConfigError: a separation of nothing, or limits that do not fit.
    """
    k, b = max_participations, min_separation
    if fixed_order:
        if k is None or b is None:
            raise ConfigError(
                "fixed_order=True: needs the number of passes, --max-participations, and the "
                "rounds of a pass, --min-separation."
            )
        return FixedOrder(rounds, k, b)
    if b is not None and k in (None, 1):
        raise ConfigError(
            f"min_separation={b}: is between two rounds of one client; say "
            "--max-participations of 2 or more, or leave it out."
        )
    return Participation(rounds, 1 if k is None else k, 1 if b is None else b)


def typed_choice(
    mechanism: str | None, rounds: int, schedule: Path | None = None
) -> MechanismChoice:
    """Return the mechanism that was typed for so many rounds, or the default."""
    if schedule is not None:
        starts, factors = read_schedule(schedule)
        name = MechanismName("scheduled")
        return MechanismChoice(name=name, from_round=starts, factor=factors)
    choice = MechanismChoice.parse(mechanism or "tree")
    choice.refuse_late_restart(rounds)
    return choice


def _logged(choice: MechanismChoice, rounds: int, histories: Histories) -> Participation:
    # An encoder that is fitted to the log costs less than the one that ran.
    if choice.fitted:
        raise ConfigError(
            f"mechanism={choice}: is fitted to a promise, and fitted to a log it is not the one "
            "that ran. Say what was promised (--max-participations, --min-separation), or pass the "
            "mechanism that ran (file:PATH)."
        )
    return Participation.from_log(rounds, histories)


def built(choice: MechanismChoice, participation: Participation) -> Mechanism:
    """Return the mechanism; show what a fit reaches if it takes long."""
    with shown_fits():
        return choice.build(participation)


def histories_of(log: Path) -> dict[str, list[int]]:
    """Return each client's rounds, from a run folder or a CSV file."""
    if not log.is_dir():
        return read_log(log)
    from privpart.run.ledger import Ledger

    ledger = Ledger(log)
    if ledger.facts["plan"].get("sampling") is not None:
        raise ConfigError(
            f"log={log}: who took part in a run that samples is secret, and its epsilon holds "
            "only while it is; see `privpart report`."
        )
    # checks the chain
    ledger.rows()
    # JSON, because the number 1 and the string "1" are two clients
    histories = {json.dumps(client): r for client, r in ledger.rounds_by_client().items()}
    if not histories:
        raise ConfigError(f"log={log}: no client took part yet.")
    return histories


class _Lines(logging.Handler):
    """Print at most one record every ``_PATIENCE`` seconds, and none of a fit that is shorter."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        if time.monotonic() - self._last > _PATIENCE:
            self._last = time.monotonic()
            say(record.getMessage())


@contextmanager
def shown_fits() -> Iterator[None]:
    """Show on standard error what the fits inside reach, every two seconds."""
    log, lines = logging.getLogger(FITS), _Lines()
    level = log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(lines)
        log.setLevel(level)
