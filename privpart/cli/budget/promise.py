"""Promise: a planned run, from typed options or from a plan file, and the report of what it costs.

Sampler and accountant are one choice. Poisson sampling: independent noise is DP-SGD; a banded
mechanism needs the members in as many groups as it has bands, which take turns. Balls in bins: any
mechanism of one stream, by a bound in closed form, or nearer by Monte Carlo. b-min-sep: encoders
with no more bands than rounds between two of one member, by Monte Carlo only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accounting import (
    ConfigError,
    Estimate,
    Mechanism,
    Participation,
    PoissonSampling,
    PrivacyReport,
    Realised,
    checks,
    participation_of,
    sampled_guarantee,
)
from accounting.calibrate import estimated_noise, least_sampled_noise
from accounting.cohorts import Sampled, Sampling, SamplingChoice, sampled_claim, sampled_passes
from accounting.mechanisms import MechanismChoice
from accounting.realised import read_log
from privpart.cli.budget.options import (
    Limits,
    accept_planned_delta,
    refuse_beside,
    typed_choice,
)
from privpart.cli.budget.progress import shown_fits
from privpart.cli.options import MethodName, method_of

if TYPE_CHECKING:
    from accounting.subsampled import SampledMethod

Histories = Mapping[str, list[int]]
"""Each client's rounds, by a log."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Everything that the figures of a run depend on.

    Attributes:
        stated: whether somebody said how often a client takes part.
        sampled: the amplified guarantee, if the run hides who takes part.
    """

    choice: MechanismChoice
    mechanism: Mechanism
    participation: Participation
    noise_multiplier: float
    delta: float
    stated: bool = True
    population: int | None = None
    sampled: Sampled | None = None

    @classmethod
    def planned(
        cls, path: Path, delta: float | None, population: int | None, *, allow_large: bool
    ) -> "Promise":
        """Read a plan file. It takes a second: plans contain optimisers, which need torch."""
        from privpart.training.plan_file import read

        plan = read(path)
        population = accept_planned_delta(plan, delta, population, allow_large=allow_large)
        with shown_fits():
            promised = plan.privacy_plan()
        return cls(
            plan.privacy.mechanism,
            promised.mechanism,
            promised.participation,
            promised.noise_multiplier,
            plan.privacy.delta if delta is None else delta,
            population=population,
            sampled=promised.guarantee() if promised.sampling is not None else None,  # type: ignore[arg-type]
        )

    def report(
        self,
        method: MethodName | None = None,
        *,
        histories: Histories | None = None,
    ) -> PrivacyReport:
        """Return the report, with the cost by a log if there is one."""
        plain = "exact" if self.sampled is not None else method_of(method)
        realised = None
        if histories is not None:
            realised = Realised.of(
                self.mechanism,
                histories,
                self.participation,
                noise_multiplier=self.noise_multiplier,
                delta=self.delta,
                method=plain,
            )
        return PrivacyReport.of(
            self.mechanism,
            self.participation,
            noise_multiplier=self.noise_multiplier,
            delta=self.delta,
            method=plain,
            population=self.population,
            participation_stated=self.stated,
            realised=realised,
            sampled=None if self.sampled is None else sampled_claim(self.sampled, self.delta),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """A run as typed; None where nothing was, since what was typed is never ignored."""

    rounds: int | None
    noise_multiplier: float | None
    delta: float | None
    mechanism: str | None
    limits: Limits
    sampling: str | None
    population: int | None
    method: MethodName | None

    def refuse_beside_plan(self) -> None:
        """Raise ``ConfigError`` if anything was typed that a plan file has."""
        owner = "--plan: already contains these values"
        refuse_beside(
            owner,
            rounds=self.rounds,
            noise_multiplier=self.noise_multiplier,
            mechanism=self.mechanism,
            sampling=self.sampling,
        )
        self.limits.refuse_beside(owner)

    def sampled(self, sampling: str, choice: MechanismChoice, rounds: int) -> "SampledRun":
        """Return the run that ``--sampling`` describes; fit the mechanism if it asks for it."""
        self.limits.refuse_beside("--sampling: decides who takes part, and how often")
        sampler, draw_seed = SamplingChoice.parse(sampling)
        method = self.method
        mechanism = built(choice, sampled_passes(rounds, sampler.bins))
        drawn = sampler.sampler(mechanism, self.population)
        of_poisson = isinstance(drawn, PoissonSampling)
        if method is not None and not (of_poisson and method in (MethodName.PLD, MethodName.RDP)):
            raise ConfigError(
                f"method={method}: Poisson sampling has 'pld' (default) and 'rdp', every other "
                "sampler one accountant; leave it out."
            )
        estimate, by_rdp = sampler.estimate(draw_seed), method is MethodName.RDP
        return SampledRun(choice, mechanism, drawn, estimate, "rdp" if by_rdp else "pld", draw_seed)

    def promise(self, histories: Histories | None, *, allow_large: bool) -> Promise:
        """Return the promise; without limits, that of the log if there is one."""
        n, z, delta = self.rounds, self.noise_multiplier, self.delta
        if n is None or z is None or delta is None:
            raise ConfigError(
                "--rounds, --noise-multiplier and --delta are needed; or --plan FILE, which has "
                "them."
            )
        checks.accept_delta(delta, self.population, allow_large=allow_large)
        choice = typed_choice(self.mechanism, n)
        if self.sampling is not None:
            run = self.sampled(self.sampling, choice, n)
            return run.promise(z, delta, run.guarantee(z), self.population)
        participation, stated = self.limits.of(n), self.limits.stated
        # no promise: the log alone
        if histories is not None and not stated:
            # An encoder that is fitted to the log costs less than the one that ran.
            if choice.fitted:
                raise ConfigError(
                    f"mechanism={choice}: is fitted to a promise, and fitted to a log it is not "
                    "the one that ran. Say what was promised (--max-participations, "
                    "--min-separation), or pass the mechanism that ran (file:PATH)."
                )
            participation, stated = Participation.from_log(n, histories), True
        mechanism = built(choice, participation)
        return Promise(choice, mechanism, participation, z, delta, stated, self.population)


@dataclass(frozen=True, slots=True)
class SampledRun:
    """A mechanism, a sampler and what it needs besides; the noise is still open."""

    choice: MechanismChoice
    mechanism: Mechanism
    sampling: Sampling
    estimate: Estimate | None
    method: "SampledMethod"
    draw_seed: int | None

    def guarantee(self, noise_multiplier: float) -> Sampled:
        """Return the guarantee by the one accountant that covers sampler and mechanism."""
        return sampled_guarantee(
            self.mechanism,
            self.sampling,
            noise_multiplier=noise_multiplier,
            estimate=self.estimate,
            method=self.method,
        )

    def calibrated(self, target_epsilon: float, delta: float) -> tuple[float, Sampled]:
        """Return the least noise found that meets the target, and its guarantee."""
        if self.draw_seed is not None:
            raise ConfigError(
                f"draw_seed={self.draw_seed}: noise is chosen by draws of its own; leave it out."
            )
        target = {"target_epsilon": target_epsilon, "delta": delta}
        mechanism, sampling = self.mechanism, self.sampling
        if self.estimate is not None and not isinstance(sampling, PoissonSampling):
            # The guarantee that met the target, not another one: each would be a second answer.
            run = estimated_noise(mechanism, sampling, **target, draws=self.estimate.draws)
            return run.noise_multiplier, run
        z = least_sampled_noise(mechanism, sampling, **target, method=self.method)
        return z, self.guarantee(z)

    def promise(self, z: float, delta: float, run: Sampled, population: int | None) -> Promise:
        """Return the promise of this run with so much noise."""
        limits = participation_of(self.sampling, self.mechanism.rounds)
        return Promise(
            self.choice, self.mechanism, limits, z, delta, population=population, sampled=run
        )


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
