"""Privacy report: a guarantee with everything without which its epsilon means nothing.

Epsilon is never stated without delta, unit, adjacency and the assumptions under which it holds
(Ponomareva et al. 2023, "How to DP-fy ML", section 5.3). The verdict is derived from those, never
set by hand.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from importlib import metadata
from typing import Any, Literal, get_args

from accounting import assumptions, checks
from accounting.assumptions import Assumption, Status
from accounting.checks import ConfigError
from accounting.cross_check import CrossCheck
from accounting.guarantee import FORMULAS, METHODS, Adjacency, Guarantee, Method, Second, mu_upper
from accounting.mechanisms import Mechanism, fingerprint
from accounting.participation import Participation
from accounting.statement import write

SCHEMA = "privpart/epsilon/1"

Unit = Literal["client", "example"]
NoiseSource = Literal["unstated", "os", "seeded"]
Verdict = Literal["holds", "conditional", "does-not-hold", "not-private"]

FALSE_POSITIVE_RATES = (0.1, 0.01, 0.001)
DERIVED = ("schema", "status", "warnings", "tuning_epsilon")

COVERED = ("every released iterate, and all that is computed from the iterates alone",)
NOT_COVERED = (
    "choosing hyperparameters, checkpoints or when to stop on private data",
    "other releases about the same people, before, beside or after this run",
    "data that the model was pre-trained on",
    "losses, metrics, cohort lists and counts that leave the server",
    "parts of the model that stay with a client, should they ever leave it",
    "side channels, such as time, memory and traffic",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyReport:
    """One line of a budget; ``to_dict`` is the JSON of the command line.

    Attributes:
        mechanism_fingerprint: of all its parameters, see ``fingerprint``.
        noise_source: "os" (the operating system's random bits), "seeded" (repeatable, so not
            private), or "unstated".
        tpr_at_fpr: pairs (false-positive rate, most that the true-positive rate can be).
        population: number of units that delta is judged against, if it is public.
        tuning_runs: runs on the same data of which this is one, if known.
        version: of this package, as installed.

    Raises:
        ConfigError: a figure out of range, or an epsilon below what mu and delta allow.
    """

    mechanism: str
    mechanism_fingerprint: str
    rounds: int
    max_participations: int
    min_separation: int
    noise_multiplier: float
    epsilon: float
    delta: float
    mu: float
    rho: float
    advantage: float
    sensitivity_squared: float
    sensitivity_exact: bool
    sensitivity_rule: str
    effective_noise_multiplier: float
    method: Method
    assumptions: tuple[Assumption, ...]
    tpr_at_fpr: tuple[tuple[float, float], ...]
    cross_check: CrossCheck
    unit: Unit = "client"
    adjacency: Adjacency = "zero-out"
    trust_model: str = "central: the server sees every update; others see what it releases"
    covered: tuple[str, ...] = COVERED
    not_covered: tuple[str, ...] = NOT_COVERED
    formula: str = FORMULAS["exact"]
    version: str = "unknown"
    population: int | None = None
    tuning_runs: int | None = None
    noise_source: NoiseSource = "unstated"

    def __post_init__(self) -> None:
        Participation(self.rounds, self.max_participations, self.min_separation)
        for name in ("noise_multiplier", "sensitivity_squared", "effective_noise_multiplier"):
            checks.positive(name, getattr(self, name))
        for name in ("population", "tuning_runs"):
            if getattr(self, name) is not None:
                checks.count(name, getattr(self, name))
        checks.choice("method", self.method, METHODS)
        checks.choice("unit", self.unit, get_args(Unit))
        checks.choice("noise_source", self.noise_source, get_args(NoiseSource))
        checks.probability("delta", self.delta)
        for fpr, _ in self.tpr_at_fpr:
            checks.probability("false-positive rate", fpr)
        self._claims_no_more_than_mu_allows()

    def _claims_no_more_than_mu_allows(self) -> None:
        slack = 1 - 1e-9
        run = Guarantee(self.mu, "exact", self.adjacency)
        claims = [
            ("epsilon", self.epsilon, run.epsilon(self.delta)),
            ("rho", self.rho, run.rho),
            ("mu", self.mu, mu_upper(self.sensitivity_squared, self.noise_multiplier)),
            ("advantage", self.advantage, run.advantage()),
        ]
        claims += [
            (f"tpr_at_fpr {fpr:g}", tpr, run.tpr_at_fpr(fpr)) for fpr, tpr in self.tpr_at_fpr
        ]
        for name, claimed, least in claims:
            if not checks.nonnegative(name, claimed) >= least * slack:
                raise ConfigError(f"{name}={claimed:g}: the other figures give {least:g} or more.")
        if missing := assumptions.REQUIRED - {a.code for a in self.assumptions}:
            raise ConfigError(f"assumptions lack {', '.join(sorted(missing))}.")
        if not self.not_covered:
            raise ConfigError("not_covered is empty: no guarantee covers everything.")

    @classmethod
    def of(
        cls,
        mechanism: Mechanism,
        participation: Participation,
        *,
        noise_multiplier: float,
        delta: float,
        method: Method = "exact",
        unit: Unit = "client",
        population: int | None = None,
        tuning_runs: int | None = None,
        noise_source: NoiseSource = "unstated",
        cross_check: Second = "quadrature",
    ) -> "PrivacyReport":
        """Account for a planned run.

        Args:
            mechanism: as in ``guarantee``; so are participation, noise_multiplier and method.
            participation: how often one unit may take part.
            noise_multiplier: > 0.
            delta: in (0, 1).
            method: how epsilon is computed.
            unit: what one participation belongs to, "client" or "example".
            population: see the attributes.
            tuning_runs: see the attributes.
            noise_source: see the attributes.
            cross_check: the second accountant, see ``Guarantee.cross_check``.
        """
        sensitivity = mechanism.sensitivity(participation)
        run = Guarantee(mu_upper(sensitivity.squared, noise_multiplier), method)
        return cls(
            mechanism=mechanism.name,
            mechanism_fingerprint=fingerprint(mechanism),
            rounds=participation.rounds,
            max_participations=participation.max_participations,
            min_separation=participation.min_separation,
            noise_multiplier=float(noise_multiplier),
            epsilon=run.epsilon(delta),
            delta=float(delta),
            mu=run.mu,
            rho=run.rho,
            advantage=run.advantage(),
            sensitivity_squared=sensitivity.squared,
            sensitivity_exact=sensitivity.exact,
            sensitivity_rule=sensitivity.rule,
            effective_noise_multiplier=run.effective_noise_multiplier,
            method=method,
            assumptions=assumptions.of_run(mechanism, participation, unit),
            tpr_at_fpr=tuple((fpr, run.tpr_at_fpr(fpr)) for fpr in FALSE_POSITIVE_RATES),
            cross_check=run.cross_check(delta, cross_check),
            unit=unit,
            formula=FORMULAS[method],
            version=_version(),
            population=population,
            tuning_runs=tuning_runs,
            noise_source=noise_source,
        )

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee itself, for other deltas, groups or compositions."""
        return Guarantee(self.mu, self.method, self.adjacency)

    @property
    def status(self) -> Verdict:
        """What the claim is worth, derived from its assumptions, noise and cross-check."""
        if self.noise_source == "seeded":
            return "not-private"
        worst = {a.status for a in self.assumptions if a.severity == "critical"}
        if "violated" in worst or not self.cross_check.consistent:
            return "does-not-hold"
        open_ones = (a for a in self.assumptions if a.severity != "negligible")
        if any(a.status in ("asserted", "violated") for a in open_ones):
            return "conditional"
        return "holds"

    @property
    def tuning_epsilon(self) -> float | None:
        """Epsilon of all ``tuning_runs`` together, had each had this budget: mu sqrt(runs)."""
        if self.tuning_runs is None:
            return None
        together = math.nextafter(self.mu * math.sqrt(self.tuning_runs), math.inf)
        return Guarantee(together, self.method).epsilon(self.delta)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reviewer would object to."""
        found = []
        if self.population is not None and self.delta >= 1 / self.population:
            found.append(
                f"delta={self.delta:g} is 1/population or more: publishing one {self.unit}'s data "
                "at random would pass. Use a delta well below 1/population."
            )
        if self.epsilon > 10:
            found.append(f"epsilon={self.epsilon:.4g} is above 10: by itself it promises little.")
        if self.noise_source == "seeded":
            found.append("the noise is seeded: whoever knows the seed can subtract it.")
        return tuple(found)

    def with_status(self, code: str, status: Status, evidence: str) -> "PrivacyReport":
        """Return the report with one assumption's status set, and what it rests on."""
        if code not in (known := [a.code for a in self.assumptions]):
            raise ConfigError(f"code={code!r}: must be one of {', '.join(known)}.")
        changed = tuple(
            replace(a, status=status, evidence=evidence) if a.code == code else a
            for a in self.assumptions
        )
        return replace(self, assumptions=changed)

    def statement(self) -> str:
        """Say it in plain English, with every condition."""
        return write(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values under a schema name, ready for JSON."""
        values: dict[str, Any] = {"schema": SCHEMA, "status": self.status, **asdict(self)}
        values |= {"warnings": self.warnings, "tuning_epsilon": self.tuning_epsilon}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def to_json(self) -> str:
        """``to_dict`` as text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PrivacyReport":
        """Read what ``to_dict`` wrote, and check that its figures and its status belong together.

        Raises:
            ConfigError: another schema, missing or unknown fields, figures out of range, or
                a status that does not follow from the rest.
        """
        if (schema := values.get("schema")) != SCHEMA:
            raise ConfigError(f"schema={schema!r}: must be {SCHEMA}.")
        own = {k: v for k, v in values.items() if k not in DERIVED}
        if wrong := own.keys() ^ {f.name for f in fields(cls)}:
            raise ConfigError(f"missing or unknown fields: {', '.join(sorted(wrong))}.")
        try:
            own["assumptions"] = tuple(Assumption(**a) for a in own["assumptions"])
            own["tpr_at_fpr"] = tuple((fpr, tpr) for fpr, tpr in own["tpr_at_fpr"])
            own["covered"], own["not_covered"] = tuple(own["covered"]), tuple(own["not_covered"])
            own["cross_check"] = CrossCheck(**own["cross_check"])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"not a report: {error}") from None
        report = cls(**own)
        if values.get("status") != report.status:
            raise ConfigError(f"status={values.get('status')!r}: the rest says {report.status}.")
        return report

    @classmethod
    def from_json(cls, text: str) -> "PrivacyReport":
        """Read what ``to_json`` wrote; raises as ``from_dict``."""
        try:
            values = json.loads(text)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError("not a report: a JSON object was expected.")
        return cls.from_dict(values)


@lru_cache(maxsize=1)
def _version() -> str:
    try:
        return metadata.version("privpart")
    except metadata.PackageNotFoundError:
        return "unknown"
