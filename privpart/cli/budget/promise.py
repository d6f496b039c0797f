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
        cross_check: bool = False,
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
            cross_check="dp-accounting" if cross_check else "quadrature",
            participation_stated=self.stated,
            realised=realised,
            sampled=None if self.sampled is None else sampled_claim(self.sampled, self.delta),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """A promise as typed; None where nothing was, since what was typed is never ignored."""

    rounds: int | None
    noise_multiplier: float | None
    delta: float | None
    mechanism: str | None
    limits: Limits
    sampling: str | None
    draw_seed: int | None
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

    def promise(
        self, population: int | None, histories: Histories | None, *, allow_large: bool
    ) -> Promise:
        """Return the promise; without limits, that of the log if there is one."""
        n, noise, delta = self.rounds, self.noise_multiplier, self.delta
        if n is None or noise is None or delta is None:
            raise ConfigError(
                "--rounds, --noise-multiplier and --delta are needed; or --plan FILE, which has "
                "them."
            )
        checks.accept_delta(delta, population, allow_large=allow_large)
        choice = typed_choice(self.mechanism, n)
        if self.sampling is not None:
            self.limits.refuse_beside("--sampling: decides who takes part, and how often")
            run = SampledRun.typed(
                self.sampling,
                choice,
                n,
                population=population,
                method=self.method,
                seed=self.draw_seed,
            )
            limits, sampled = run.participation, run.guarantee(noise)
            return Promise(
                choice, run.mechanism, limits, noise, delta, population=population, sampled=sampled
            )
        participation, stated = self.limits.of(n), self.limits.stated
        if histories is not None and not stated:  # no promise: the log alone
            if choice.fitted:
                raise ConfigError(
                    f"mechanism={choice}: is fitted to a promise, and fitted to a log it is not "
                    "the one that ran. Say what was promised (--max-participations, "
                    "--min-separation), or pass the mechanism that ran (file:PATH)."
                )
            participation, stated = Participation.from_log(n, histories), True
        mechanism = built(choice, participation)
        return Promise(choice, mechanism, participation, noise, delta, stated, population)


@dataclass(frozen=True, slots=True)
class SampledRun:
    """A sampler and what it needs besides, as typed; the noise is still open."""

    mechanism: Mechanism
    sampling: Sampling
    estimate: Estimate | None
    method: "SampledMethod"

    @classmethod
    def typed(
        cls,
        text: str,
        choice: MechanismChoice,
        rounds: int,
        *,
        population: int | None,
        method: MethodName | None,
        seed: int | None = None,
    ) -> "SampledRun":
        """Return the run that ``--sampling`` describes; fit the mechanism if it asks for it."""
        sampler = SamplingChoice.parse(text)
        mechanism = built(choice, sampled_passes(rounds, sampler.bins))
        sampling = sampler.sampler(mechanism, population)
        of_poisson = isinstance(sampling, PoissonSampling)
        if method is not None and not (of_poisson and method in (MethodName.PLD, MethodName.RDP)):
            raise ConfigError(
                f"method={method}: Poisson sampling has 'pld' (default) and 'rdp', every other "
                "sampler one accountant; leave it out."
            )
        by_rdp = method is MethodName.RDP
        return cls(mechanism, sampling, sampler.estimate(seed), "rdp" if by_rdp else "pld")

    @property
    def participation(self) -> Participation:
        """The limits that every draw of the sampler keeps to."""
        return participation_of(self.sampling, self.mechanism.rounds)

    def guarantee(self, noise_multiplier: float) -> Sampled:
        """Return the guarantee by the one accountant that covers sampler and mechanism."""
        return sampled_guarantee(
            self.mechanism,
            self.sampling,
            noise_multiplier=noise_multiplier,
            estimate=self.estimate,
            method=self.method,
        )

    def calibrated(
        self,
        choice: MechanismChoice,
        *,
        target_epsilon: float,
        delta: float,
        population: int | None,
    ) -> Promise:
        """Return the promise with the least noise found that meets the target."""
        target = {"target_epsilon": target_epsilon, "delta": delta}
        mechanism, sampling = self.mechanism, self.sampling
        sampled: Sampled
        if self.estimate is not None and not isinstance(sampling, PoissonSampling):
            draws = self.estimate.draws
            sampled = estimated_noise(mechanism, sampling, **target, draws=draws)
            z = sampled.noise_multiplier
        else:
            z = least_sampled_noise(mechanism, sampling, **target, method=self.method)
            sampled = self.guarantee(z)
        run = self.participation
        return Promise(choice, mechanism, run, z, delta, population=population, sampled=sampled)


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
    ledger.rows()  # checks the chain
    # JSON, because the number 1 and the string "1" are two clients
    histories = {json.dumps(client): r for client, r in ledger.rounds_by_client().items()}
    if not histories:
        raise ConfigError(f"log={log}: no client took part yet.")
    return histories
