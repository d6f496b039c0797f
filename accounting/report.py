"""Privacy report: a guarantee together with everything that its epsilon depends on.

Epsilon is never stated without delta, unit, adjacency and the assumptions under which it holds
(Ponomareva et al. 2023, "How to DP-fy ML", section 5.3). The status is derived from the assumptions
and never set by hand.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

from accounting import checks
from accounting.checks import ConfigError
from accounting.guarantee import FORMULAS, Cost, CrossCheck, Guarantee, Method, mu_upper
from accounting.mechanisms import Mechanism, fingerprint
from accounting.participation import Participation
from accounting.realised import Realised
from accounting.selection import SelectedGuarantee, fields_of

_SCHEMA = "privpart/epsilon/1"

Unit = Literal["client", "example"]
Adjacency = Literal["zero-out", "add-or-remove"]
"""The second is that of sampled runs, in the sense of zero-out: the member's place stays empty."""
NoiseOrigin = Literal["unstated", "os", "seeded"]
ReportStatus = Literal["holds", "conditional", "does-not-hold", "not-private"]

_FALSE_POSITIVE_RATES = (0.1, 0.01, 0.001)
_MOST_PARAMETERS = 20_000  # numbers of a mechanism that a report still lists

_COVERED = ("every released iterate, and all that is computed from the iterates alone",)
_NOT_COVERED = (
    "choosing hyperparameters, checkpoints or when to stop on private data",
    "other releases about the same people, before, beside or after this run",
    "data that the model was pre-trained on",
    "losses, metrics, lists of who took part and counts that leave the server",
    "parts of the model that stay with a client, should they ever leave it",
    "side channels, such as time, memory and traffic",
)

_NOT_COVERED_OF_EXAMPLES = (
    *_NOT_COVERED[:3],
    "losses, metrics and single gradients, which the training loop can see",
    "a person of whom there are several examples, beyond each one of them",
    "side channels, such as time, memory and traffic",
)

_NOT_COVERED_OF_A_SELECTION = (
    "choosing the candidates, the score or when to stop on private data, and how long the "
    "selection took, which tells about the number of its trainings"
)

AssumptionStatus = Literal["enforced", "verified", "vouched", "asserted", "violated"]
Severity = Literal["critical", "theoretical"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyReport:
    """A guarantee with its conditions; ``to_dict`` gives the JSON that the command line prints.

    Attributes:
        mechanism_fingerprint: hash of the mechanism's parameters, see ``fingerprint``.
        tpr_at_fpr: pairs (false-positive rate, upper bound on the true-positive rate).
        version: installed version of this package.
        population: number of units that delta is judged against, if that number is public.
        noise_source: "os" (the operating system's random bits), "seeded" (repeatable, so not
            private), or "unstated".
        earlier_mu: mu of earlier runs on the same data, whoever learns who took part; 0 without
            one. ``mu`` includes it: mu^2 adds.
        earlier_sampling: names of the samplers by which the cost of earlier runs is amplified.
        earlier_epsilon: of amplified earlier runs alone, at the same delta.
        mechanism_parameters: what the mechanism's ``to_dict`` returns, for ``mechanism_from_dict``;
            None if it holds more than 20,000 numbers.
        participation_stated: False if nobody said how often a client takes part, so that one
            participation was assumed.
        fixed_order: whether participation is in passes of a fixed order, see ``FixedOrder``.
        realised: cost of what happened, by a log, beside this promise; None without a log.
        metrics: what noised metrics are released beside the models, at what cost to those who
            evaluate; None without them. ``mu`` includes it, see ``MetricsClaim``.
        sampling: how the members of each round were drawn, if epsilon is amplified by that: its
            "name", parameters and "method". ``epsilon``, ``advantage`` and ``tpr_at_fpr`` are
            amplified; ``mu`` and ``rho`` hold whoever learns who was sampled.
        selection: how the run was selected among others, if its epsilon pays for that, see
            ``selected``. ``mu`` is then that of one Gaussian that costs no less.
        cost: what the amplified figures follow from; not among the JSON's fields.
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
    assumptions: "tuple[Assumption, ...]"
    tpr_at_fpr: tuple[tuple[float, float], ...]
    cross_check: CrossCheck
    unit: Unit = "client"
    adjacency: Adjacency = "zero-out"
    trust_model: str = "central: the server sees every update; others see what it releases"
    covered: tuple[str, ...] = _COVERED
    not_covered: tuple[str, ...] = _NOT_COVERED
    formula: str = FORMULAS["exact"]
    version: str = "unknown"
    population: int | None = None
    noise_source: NoiseOrigin = "unstated"
    earlier_mu: float = 0.0
    earlier_sampling: tuple[str, ...] = ()
    earlier_epsilon: float | None = None
    mechanism_parameters: Mapping[str, Any] | None = None
    participation_stated: bool = True
    fixed_order: bool = False
    realised: Realised | None = None
    sampling: Mapping[str, Any] | None = None
    metrics: Mapping[str, Any] | None = None
    selection: Mapping[str, Any] | None = None
    cost: Cost = field(repr=False, compare=False)

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
        noise_source: NoiseOrigin = "unstated",
        earlier: Guarantee | None = None,
        participation_stated: bool = True,
        realised: Realised | None = None,
        sampled: "SampledClaim | None" = None,
        metrics: "MetricsClaim | None" = None,
    ) -> "PrivacyReport":
        """Return the report of a planned run; see ``guarantee``, and the attributes.

        ``earlier`` is composed with this run, by mu. ``sampled`` is what amplifies this run,
        earlier ones, or both, see ``accounting.claims``; ``metrics`` is what is released besides.
        """
        checks.choice("unit", unit, get_args(Unit))
        checks.choice("noise_source", noise_source, get_args(NoiseOrigin))
        if sampled is not None and sampled.parameters is not None and metrics is not None:
            raise ConfigError("metrics: an amplified epsilon does not compose with others.")
        sensitivity = mechanism.sensitivity(participation)
        if sampled is not None and sampled.clips > 1:
            sensitivity = replace(
                sensitivity,
                squared=sensitivity.squared * sampled.clips**2,
                rule=f"{sensitivity.rule}; {sampled.clips} times a {unit} in each",
            )
        run = Guarantee(mu_upper(sensitivity.squared, noise_multiplier), method)
        run = run if metrics is None else metrics.beside(run)
        run = run if earlier is None else run.compose(earlier)
        cost: Cost = (sampled.cost if sampled else None) or run
        return cls(
            mechanism=mechanism.name,
            mechanism_fingerprint=fingerprint(mechanism),
            rounds=participation.rounds,
            max_participations=participation.max_participations,
            min_separation=participation.min_separation,
            noise_multiplier=float(noise_multiplier),
            epsilon=run.epsilon(delta) if sampled is None else sampled.epsilon,
            delta=float(delta),
            mu=run.mu,
            rho=run.rho,
            advantage=cost.advantage(),
            sensitivity_squared=sensitivity.squared,
            sensitivity_exact=sensitivity.exact,
            sensitivity_rule=sensitivity.rule,
            effective_noise_multiplier=run.effective_noise_multiplier,
            method=method,
            assumptions=(
                *_assumptions(participation, unit),
                *(() if sampled is None else sampled.assumptions),
                *(() if metrics is None else (metrics.assumption(),)),
                *large_delta(delta, population, unit),
            ),
            tpr_at_fpr=tuple((fpr, cost.tpr_at_fpr(fpr)) for fpr in _FALSE_POSITIVE_RATES),
            cross_check=run.cross_check(delta),
            unit=unit,
            adjacency="add-or-remove" if sampled and sampled.hides else "zero-out",
            **(_EXAMPLE_WORDS if unit == "example" else {}),
            **({} if metrics is None else metrics.coverage()),
            formula=FORMULAS[method] if sampled is None else _amplified_by(sampled),
            version=installed_version(),
            population=population,
            noise_source=noise_source,
            earlier_mu=0.0 if earlier is None else earlier.mu,
            earlier_sampling=() if sampled is None else sampled.earlier_sampling,
            earlier_epsilon=None if sampled is None else sampled.earlier_epsilon,
            mechanism_parameters=shown_parameters(mechanism),
            participation_stated=participation_stated,
            fixed_order=participation.fixed_order,
            realised=realised,
            sampling=sampled.parameters if sampled else None,
            metrics=None if metrics is None else metrics.to_dict(delta),
            cost=cost,
        )

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee whoever learns who was sampled, for other deltas or groups."""
        return Guarantee(self.mu, self.method)

    @property
    def samplers(self) -> tuple[str, ...]:
        """Names of the samplers that the claim rests on, in this run and in earlier ones."""
        sampler = () if self.sampling is None else (self.sampling["name"],)
        return tuple(dict.fromkeys((*sampler, *self.earlier_sampling)))

    @property
    def a_unit(self) -> str:
        """The unit with its article."""
        return f"an {self.unit}" if self.unit == "example" else f"a {self.unit}"

    @property
    def status(self) -> ReportStatus:
        """The verdict, derived from the assumptions, the noise source and the cross-check."""
        if self.noise_source == "seeded":
            return "not-private"
        worst = {a.status for a in self.assumptions if a.severity == "critical"}
        if "violated" in worst or not self.cross_check.consistent:
            return "does-not-hold"
        if any(a.status in ("asserted", "violated") for a in self.assumptions):
            return "conditional"
        if checks.is_large_delta(self.delta, self.population):
            return "conditional"  # whatever was vouched for
        return "holds"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Objections that a reviewer would raise."""
        objections = []
        if not self.participation_stated:
            objections.append(
                f"max_participations was not given, so this is for a {self.unit} that takes part "
                "in one round, which nothing here enforces. More participations cost more."
            )
        if self.realised is not None and self.realised.deviations:
            objections.append(f"the log breaks the promise: {'; '.join(self.realised.deviations)}.")
        if large := checks.delta_warning(self.delta, self.population, unit=self.unit):
            objections.append(large)
        if self.epsilon > 10:
            little = "is above 10: a weak guarantee on its own."
            objections.append(f"epsilon={up(self.epsilon)} {little}")
        if self.noise_source == "seeded":
            objections.append("the noise is seeded: whoever knows the seed can subtract it.")
        return tuple(objections)

    def selected(self, cost: SelectedGuarantee, candidates: int) -> "PrivacyReport":
        """Return the report of a run that was released as the best of a secret number of runs.

        Args:
            cost: of the whole selection, of Gaussian runs.
            candidates: number of listed settings, >= 1, from which each run drew its own.
        """
        checks.count("candidates", candidates)
        dominating, fields = Guarantee(cost.mu), fields_of(cost)
        conditions = [a for a in self.assumptions if a.code != "choices"]
        conditions += [
            Assumption(code, text.format(candidates=candidates), "asserted", consequence)
            for code, text, consequence in _ASSUMPTIONS_OF_A_SELECTION
        ]
        return replace(
            self,
            epsilon=cost.epsilon(self.delta),
            cost=cost,
            mu=dominating.mu,
            rho=dominating.rho,
            advantage=cost.advantage(),
            effective_noise_multiplier=dominating.effective_noise_multiplier,
            tpr_at_fpr=tuple((fpr, cost.tpr_at_fpr(fpr)) for fpr in _FALSE_POSITIVE_RATES),
            assumptions=tuple(conditions),
            formula="private selection (Liu and Talwar 2019), by a bound on its privacy profile",
            not_covered=(_NOT_COVERED_OF_A_SELECTION, *self.not_covered[1:]),
            metrics=self.metrics
            and {**self.metrics, "mu": dominating.mu, "epsilon": cost.epsilon(self.delta)},
            selection={
                "candidates": candidates,
                **fields,
                "epsilon_of_one": Guarantee(fields["mu"]).epsilon(self.delta),
            },
        )

    def with_status(self, code: str, status: AssumptionStatus, evidence: str) -> "PrivacyReport":
        """Return the report with another status, and its evidence, for one assumption."""
        if code not in (codes := [a.code for a in self.assumptions]):
            raise ConfigError(f"code={code!r}: must be one of {', '.join(codes)}.")
        changed = tuple(
            replace(a, status=status, evidence=evidence) if a.code == code else a
            for a in self.assumptions
        )
        return replace(self, assumptions=changed)

    def by_status(self) -> "Iterator[tuple[str, list[Assumption]]]":
        """Yield a title and the assumptions of each status, the most serious status first."""
        for status, title in _TITLES.items():
            if chosen := [a for a in self.assumptions if a.status == status]:
                yield title, chosen

    def statement(self) -> str:
        """Return the report in plain English, with every condition and figures rounded up."""
        parts = [STATUS_SENTENCES[self.status], *claims(self)]
        for title, assumptions in self.by_status():
            lines = (f"- {a.text} ({a.code}). If not, {a.consequence}." for a in assumptions)
            parts.append("\n".join((f"{title}:", *lines)))
        parts.append("\n".join(("Covered:", *(f"- {text}." for text in self.covered))))
        parts.append("\n".join(("Not covered:", *(f"- {text}." for text in self.not_covered))))
        return "\n\n".join([*parts, *(f"Warning: {text}" for text in self.warnings)])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values with the schema's name, ready for JSON."""
        fields = asdict(replace(self, cost=self.guarantee))
        del fields["cost"]
        values: dict[str, Any] = {"schema": _SCHEMA, "status": self.status, **fields}
        values["warnings"] = self.warnings
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @property
    def schedule(self) -> str:
        """The rounds, and how often a unit takes part in them."""
        text = f"{self.rounds} rounds, {self.a_unit} in at most {self.max_participations}"
        if self.fixed_order:
            return f"{text}, passes of {self.min_separation} rounds in one order"
        apart = f", {self.min_separation} or more apart" * (self.max_participations > 1)
        return text + apart + " (assumed)" * (not self.participation_stated)

    def figures(self) -> "dict[str, Figure]":
        """Map the name of each figure to its text; every page and table shows some of them."""
        second, bound = self.cross_check, "" if self.sensitivity_exact else ", an upper bound"
        agrees = "agrees" if second.consistent else "CONTRADICTS"
        one_over_mu = down(self.effective_noise_multiplier, 5)
        unsampled, sampled = up(self.guarantee.epsilon(self.delta), 5), bool(self.samplers)
        unaware = " that does not know who was sampled" * sampled
        best = (
            "" if self.selection is None else f"{_best_of(self.selection)}; mu above costs no less"
        )
        rows = {
            "epsilon": Figure(up(self.epsilon, 5), self.formula),
            "delta": Figure(up(self.delta, 6)),
            "not hidden": Figure(f"epsilon {unsampled}, if it is known who takes part" * sampled),
            "unit": Figure(f"{self.unit}, {self.adjacency} adjacency"),
            "covers": Figure("every model that the rounds release"),
            "mechanism": Figure(f"{self.mechanism}, {self.schedule}"),
            "noise multiplier": Figure(up(self.noise_multiplier, 6)),
            "sensitivity^2": Figure(up(self.sensitivity_squared, 5), self.sensitivity_rule + bound),
            "mu": Figure(up(self.mu, 5), f"effective noise multiplier 1/mu = {one_over_mu}"),
            "metrics": Figure(self._cost_of_metrics()),
            "earlier runs": Figure(f"{_earlier(self)}, which is included" * bool(self.earlier_mu)),
            "best of K": Figure(best),
            "rho": Figure(up(self.rho, 5)),
            "advantage": Figure(
                f"at most {up(self.advantage, 3)} for any membership test{unaware}"
            ),
            "cross-check": Figure(f"{agrees}: {second.method} says {up(second.epsilon, 5)}"),
        }
        return {name: figure for name, figure in rows.items() if figure.value}

    def _cost_of_metrics(self) -> str:
        if (shown := self.metrics) is None:
            return ""
        who = "who train, too: included" if shown["also_train"] else "who never train"
        return (
            f"epsilon {up(shown['epsilon'], 5)}, mu {up(shown['mu'], 5)} for the users who "
            f"evaluate, {who}; {shown['released']}"
        )


def _best_of(selection: Mapping[str, Any]) -> str:
    """Return what a selection is the best of."""
    named = {"eta": "negative binomial", "most": "binomial"}
    kind = next((text for name, text in named.items() if name in selection), "Poisson")
    return (
        f"the best of a secret number of trainings, {selection['expected']:g} on average ({kind}), "
        f"each with one of {selection['candidates']} candidates; one training alone has epsilon "
        f"{up(selection['epsilon_of_one'])}, mu {up(selection['mu'])}"
    )


class Figure(NamedTuple):
    """A figure of a report, rounded up, and a note on how it came about; "" if there is none."""

    value: str
    note: str = ""

    @property
    def text(self) -> str:
        """Both."""
        return f"{self.value}   ({self.note})" if self.note else self.value


@lru_cache(maxsize=1)
def installed_version() -> str:
    """Return the version of this package, or "unknown" if it is not installed."""
    from importlib import metadata  # takes as long to load as numpy's half

    try:
        return metadata.version("privpart")
    except metadata.PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, slots=True)
class Assumption:
    """A condition that the guarantee depends on.

    Attributes:
        code: stable short name.
        text: the condition.
        status: "enforced" (the code that ran guarantees it), "verified" (checked afterwards, for
            example against a ledger), "vouched" (the person who asked for the report answers for
            it), "asserted" (nobody checked it) or "violated".
        consequence: what happens to the guarantee if the condition is false.
        severity: how serious that is: "critical" (the guarantee is lost) or "theoretical" (no
            attack is known).
        evidence: what the status rests on; empty if "asserted".
    """

    code: str
    text: str
    status: AssumptionStatus
    consequence: str
    severity: Severity = "critical"
    evidence: str = ""

    def __post_init__(self) -> None:
        checks.choice(f"status of {self.code}", self.status, get_args(AssumptionStatus))
        if self.status in ("enforced", "verified", "vouched") and not self.evidence:
            raise ConfigError(f"evidence is empty: say why {self.code} is {self.status}.")
        checks.choice(f"severity of {self.code}", self.severity, get_args(Severity))


@dataclass(frozen=True, slots=True)
class SampledClaim:
    """What an amplified guarantee adds to a report.

    Attributes:
        epsilon: the amplified one, of all runs together.
        parameters: how members are sampled and accounted for, with "name" and "method"; None if
            this run does not sample.
        assumptions: the conditions of this run's amplification.
        cost: of all runs together, from which the attacker's figures follow; None takes mu.
        earlier_sampling: names of the samplers of earlier runs.
        earlier_epsilon: of earlier runs alone, if they are amplified.
        composed: whether there are earlier runs.
        clips: most clip norms that one unit adds to a round, if it has several examples or places.
    """

    epsilon: float
    parameters: Mapping[str, Any] | None
    assumptions: tuple[Assumption, ...]
    cost: Cost | None = None
    earlier_sampling: tuple[str, ...] = ()
    earlier_epsilon: float | None = None
    composed: bool = False
    clips: int = 1

    @property
    def hides(self) -> bool:
        """Whether the claim rests on who was sampled being secret, in this run or before."""
        return self.parameters is not None or bool(self.earlier_sampling)


@dataclass(frozen=True, slots=True)
class MetricsClaim:
    """What noised metrics on the data of users who evaluate add to a report.

    Attributes:
        cost: of all of them together, to a user who evaluates; its Gaussian noise is its own.
        released: what is released, for people.
        also_train: whether those who evaluate may train, too. Nobody pays for both otherwise, so
            what one user pays is the larger of the two guarantees, and not their composition.
    """

    cost: Guarantee
    released: str
    also_train: bool

    def beside(self, training: Guarantee) -> Guarantee:
        """Return what one user pays for training and metrics, whichever they take part in."""
        if self.also_train:
            return training.compose(self.cost)
        return replace(training, mu=max(training.mu, self.cost.mu))

    def to_dict(self, delta: float) -> dict[str, Any]:
        """Return the claim as plain values, with the epsilon of the metrics alone."""
        figures = {"mu": self.cost.mu, "epsilon": self.cost.epsilon(delta)}
        return {"released": self.released, "also_train": self.also_train, **figures}

    def assumption(self) -> Assumption:
        """Return the condition on who evaluates."""
        text = "each user evaluates once after each evaluated round at most"
        if not self.also_train:
            text += "; those who do were chosen before the data, by their ids, and never train"
        then = "what that user pays is larger than stated"
        return Assumption("metrics", text, "asserted", then)

    def coverage(self) -> dict[str, Any]:
        """Return what is covered with metrics, and what is not."""
        noised = "the noised metrics, and what is decided by them alone, such as when to stop"
        others = [
            f"{line}, other than the noised metrics" if line in _OF_METRICS else line
            for line in _NOT_COVERED
        ]
        return {"covered": (*_COVERED, noised), "not_covered": tuple(others)}


_OF_METRICS = (_NOT_COVERED[0], _NOT_COVERED[3])
"""What is not covered unless it is by noised metrics."""


_AMPLIFIED = {
    "pld": "Poisson sampling, by dp-accounting's privacy loss distribution",
    "rdp": "Poisson sampling, by dp-accounting's Renyi DP",
    "convolution": "balls in bins, by convolution",
    "profile": "samples of bounded size, by a bound on each step's privacy profile",
    "mixture": "examples sampled on their own, by each step's mixture of Gaussians",
}


def _amplified_by(sampled: SampledClaim) -> str:
    """Return how an amplified epsilon was computed, and how likely an estimate is too low."""
    p = sampled.parameters
    if p is None or sampled.composed:
        return "this run and earlier ones, by composing dp-accounting's privacy loss distributions"
    if p["method"] != "monte-carlo":
        return _AMPLIFIED[p["method"]]
    return (
        f"{p['name']}, by Monte Carlo with {p['draws']} draws of seed {p['draw_seed']}; too low "
        f"for {up(p['failure_probability'])} of all seeds at most, which is part of delta"
    )


_Condition = tuple[str, str, str]
"""Code, text and consequence of an assumption that nobody checked yet."""


def _assumptions(participation: Participation, unit: str) -> tuple[Assumption, ...]:
    """Return the assumptions of a run without amplification, all still unchecked."""
    conditions = _common_assumptions(participation, unit)
    if unit == "example":
        conditions = (*map(_of_examples, conditions), *_ASSUMPTIONS_OF_EXAMPLES)
    return tuple(Assumption(code, text, "asserted", then) for code, text, then in conditions)


def _of_examples(condition: _Condition) -> _Condition:
    code, text, consequence = condition
    if code == "participation":
        text += ", and in each step the network gets the rows of the examples dealt for it, each"
        text += " once"
    return code, _TEXTS_OF_EXAMPLES.get(code, text), consequence.replace("cohort", "batch")


def large_delta(delta: float, population: int | None, unit: str) -> tuple[Assumption, ...]:
    """Return a condition that is not met, so that no status of a large delta is "holds"."""
    if not checks.is_large_delta(delta, population):
        return ()
    of = "any number of" if population is None else f"{population:,}"
    return (
        Assumption(
            "delta",
            f"delta is far below 1 / number of {unit}s",
            "violated",
            f"publishing the data of one {unit}, chosen at random, has such a delta; read "
            "epsilon at a smaller one",
            "theoretical",
            f"delta {delta:g} for {of} {unit}s",
        ),
    )


_EXAMPLE_WORDS: dict[str, Any] = {
    "trust_model": "central: whoever trains sees every example; others see the parameters after "
    "each step",
    "not_covered": _NOT_COVERED_OF_EXAMPLES,
}
_TEXTS_OF_EXAMPLES = {
    "clipping": "each example's gradient is clipped to clip_norm over all trained parameters "
    "jointly",
    "divisor": "the noised sum is divided by a public constant: batch size, or 1 for a summed loss",
    "floating-point": "sums of gradients and noise are integers on a public grid, the noise is a "
    "Gaussian that was rounded exactly, and what floating point adds to a sum is taken from the "
    "clip norm",
}
_ASSUMPTIONS_OF_EXAMPLES = (
    (
        "gradients",
        "the gradient that is clipped as one example's depends on no other example: neither "
        "network nor loss, nor code that autograd runs for them, mixes the examples of a batch or "
        "takes data or labels from elsewhere",
        "clipping bounds nothing; Opacus's check_per_sample_gradients_are_correct compares them "
        "with those of one example at a time",
    ),
    (
        "loop",
        "the training loop releases nothing but the parameters after a step, and takes nothing "
        "from the examples but gradients",
        "what it releases or takes besides is not covered by this epsilon",
    ),
    (
        "data",
        "the data set gives the same example under the same number in every pass, another one "
        "under every other number, and no row of a batch depends on two of them",
        "an example takes part more often, or nearer together, than stated",
    ),
)


def _common_assumptions(participation: Participation, unit: str) -> tuple[_Condition, ...]:
    k, b = participation.max_participations, participation.min_separation
    times = "one round" if k == 1 else f"{k} rounds, each {b} or more after the one before"
    if participation.fixed_order:
        times = f"{k} rounds, one in each of {k} passes of {b} rounds in one fixed order"
    return (
        (
            "participation",
            f"each {unit} takes part in at most {times}",
            "epsilon is larger than shown",
        ),
        (
            "clipping",
            "every update is clipped to clip_norm over all trained parameters jointly",
            "there is no guarantee",
        ),
        (
            "divisor",
            "the noised sum is divided by a fixed, public number, never by how many took part",
            f"the size of the cohort leaks, and one {unit} counts for more than assumed",
        ),
        ("noise", "the noise is secret, fresh, and the mechanism's", "there is no guarantee"),
        (
            "choices",
            "nobody looked at private data to choose layers, schedule or hyperparameters",
            "that choice leaks, too, and this epsilon does not cover it",
        ),
        (
            "floating-point",
            "noise is added in exact integer arithmetic: updates are integers on a public grid and "
            "noise is an exactly rounded Gaussian, as on this package's server",
            f"rounding errors can reveal whether a {unit} took part, whatever epsilon says "
            "(Mironov 2012)",
        ),
    )


_ASSUMPTIONS_OF_A_SELECTION: tuple[_Condition, ...] = (
    (
        "choices",
        "paid: which of {candidates} listed candidates is released was decided by a private "
        "selection, whose cost is in epsilon",
        "the choice is an additional release that this epsilon does not cover",
    ),
    (
        "selection",
        "the number of trainings was drawn from the stated distribution before the first one; all "
        "of them ended, and nothing of the others, nor their number, was released or kept",
        "all trainings count: mu is that of one times the square root of their number",
    ),
    (
        "candidates",
        "the list of candidates, the distribution of the number of trainings and the score were "
        "chosen without private data, and whoever ran the selection looked at no training before "
        "its end",
        "what was chosen by a look is an additional release that this epsilon does not cover",
    ),
    (
        "score",
        "the score by which the best training was found depends on its model, on public data, and "
        "on noised metrics whose cost is that of the training alone",
        "no guarantee for those whose data the score read",
    ),
)


STATUS_SENTENCES = {
    "holds": "The guarantee holds: all that it rests on was enforced, verified or vouched for.",
    "conditional": "The guarantee is conditional: part of what it rests on was not checked, or is "
    "not met.",
    "does-not-hold": "The guarantee DOES NOT HOLD; its figures are void.",
    "not-private": "This run IS NOT PRIVATE: its noise can be computed again from a seed.",
}
_TITLES: dict[AssumptionStatus, str] = {
    "violated": "Violated",
    "asserted": "Asserted, not checked",
    "enforced": "Enforced by the code that ran",
    "verified": "Verified afterwards",
    "vouched": "Vouched for by the user of this report",
}


def claims(report: PrivacyReport) -> tuple[str, str, str]:
    """Return what is claimed, what that allows an attacker, and how it was accounted for."""
    return _claim(report), _attacker(report), _accounting(report)


def _claim(report: PrivacyReport) -> str:
    neighbours = f"with one {report.unit}'s updates and with zeros in their place"
    stays = "cohort, schedule and divisor stay"
    if report.unit == "example":
        neighbours = neighbours.replace("updates", "gradients")
        stays = "batches and divisor stay"
    places = "steps" if report.unit == "example" else "rounds"
    k, b = report.max_participations, report.min_separation
    often = "once" if k == 1 else f"at most {k} times, {b} or more {places} apart"
    if report.fixed_order:
        often = f"once in each of {k} passes of {b} rounds in one fixed order"
    if report.sampling is not None:
        stays = (
            "population and divisor stay and everybody else is sampled alike; the members of "
            f"each round are secret ({report.sampling['name']} sampling)"
        )
    if report.earlier_sampling:
        names = " and ".join(report.earlier_sampling)
        stays += f"; the members of each round of earlier runs are secret ({names} sampling)"
    return (
        f"The claim is (epsilon = {up(report.epsilon)}, delta = {up(report.delta)})-differential "
        f"privacy. Unit: one {report.unit}, taking part {often} in {report.rounds} {places}. "
        f"Adjacency: {report.adjacency}; the run is compared {neighbours}, while {stays}. "
        f"Trust model: {report.trust_model}."
        + (f" The run is {_best_of(chosen)}." if (chosen := report.selection) else "")
    )


def _attacker(report: PrivacyReport) -> str:
    rates = ", ".join(
        f"{up(100 * tpr)} % at a false-positive rate of {100 * fpr:g} %"
        for fpr, tpr in report.tpr_at_fpr
    )
    unaware = " that does not know who was sampled" * bool(report.samplers)
    return (
        f"In these terms a test{unaware} of whether one {report.unit} took part has an advantage "
        f"of at most {up(report.advantage)}, and detects at most {rates}."
    )


def _accounting(report: PrivacyReport) -> str:
    bound = "exact" if report.sensitivity_exact else "an upper bound"
    text = (
        f"Mechanism: {report.mechanism}, noise multiplier {report.noise_multiplier:g} on the sum, "
        f"squared sensitivity {up(report.sensitivity_squared)} ({bound}; "
        f"{report.sensitivity_rule}), mu = {up(report.mu)}, rho = {up(report.rho)}. "
        f"Accounting: {report.formula}, privpart {report.version}."
    )
    if report.earlier_mu:
        text += f" An earlier run on the same data, {_earlier(report)}, is included."
    if (metrics := report.metrics) is not None:
        pays = "those who evaluate never train, so that a user pays the larger of the two"
        if metrics["also_train"]:
            pays = "those who evaluate may train, too, and mu includes both"
        text += f" Noised metrics ({metrics['released']}) cost mu = {up(metrics['mu'])}; {pays}."
    if report.samplers:
        text += (
            " Whoever learns who was sampled is covered by mu alone: epsilon = "
            f"{up(report.guarantee.epsilon(report.delta))}."
        )
    if (log := report.realised) is not None:
        text += (
            f" By the log of {log.clients} {report.unit}s, one took part in at most "
            f"{log.max_participations} rounds, which cost epsilon = {up(log.epsilon)}."
        )
    second = report.cross_check
    agrees = "agrees to" if second.consistent else "CONTRADICTS this by"
    if report.selection is not None:
        text += " mu is that of one Gaussian that costs no less than the selection."
    of = " of mu" * bool(report.samplers)
    of = of if report.selection is None else " of one training"
    return (
        f"{text} A second accountant{of} ({second.method}) says {up(second.epsilon)} at the same "
        f"delta; it {agrees} a relative {up(second.agree_to, 2)}."
    )


def _earlier(report: PrivacyReport) -> str:
    mu = f"mu {up(report.earlier_mu, 5)}"
    if report.earlier_epsilon is None:
        return mu
    names = " and ".join(report.earlier_sampling)
    hidden = f"while nobody learns who was sampled ({names})"
    return f"epsilon {up(report.earlier_epsilon, 5)} {hidden}, else {mu}"


def up(value: float, digits: int = 4) -> str:
    """Return ``value`` as text with ``digits`` significant digits, rounded up.

    >>> up(1.74298), up(1e-6), up(0.12345), up(0.0)
    ('1.743', '1e-06', '0.1235', '0')
    """
    return _rounded(value, digits, ROUND_CEILING)


def down(value: float, digits: int = 4) -> str:
    """Return ``value`` as text with ``digits`` significant digits, rounded down.

    >>> down(1.74298), down(0.12345)
    ('1.742', '0.1234')
    """
    return _rounded(value, digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    rounded = Context(prec=digits, rounding=rounding).create_decimal(Decimal(repr(float(value))))
    return f"{float(rounded):.{digits}g}"


def printable(text: str) -> str:
    r"""Return text whose characters a reader sees and no screen obeys: others as an escape.

    What a stranger's run says of itself could otherwise erase, or write over, what was found.

    >>> print(printable("done\x1b[2K"))
    done\x1b[2K
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def shown_parameters(mechanism: Mechanism) -> dict[str, Any] | None:
    """Return the mechanism's ``to_dict``, or None if it holds more than 20,000 numbers."""
    parameters = mechanism.to_dict()
    return parameters if _size(parameters) <= _MOST_PARAMETERS else None


def _size(value: object) -> int:
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, list):
        return sum(map(_size, value)) if value and isinstance(value[0], list | dict) else len(value)
    return 1
