"""Plan file: a whole training, as people write it in TOML.

The file contains everything that shapes the run. Its hash is part of the privacy plan, so the run
is fixed before it starts. Unknown keys are errors: a misspelt clip norm must not become a default.

Whatever the tables alone show to be impossible is refused when the file is read, so `privpart
epsilon --plan` says what `privpart train` would say. ``training`` refuses what depends on the data
or on how clients are computed.

A plan may name code of its author: a network, clients, a loss, a metric. Nothing here runs that
code, so a plan from elsewhere can be read and accounted for. ``PlanFile.code`` hashes its source,
and the hash becomes part of the privacy plan of a run.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import from_json, to_json

from accounting import Estimate, Guarantee, Mechanism, Participation, checks, gaussian
from accounting.calibrate import calibrate, least_sampled_noise
from accounting.checks import ConfigError
from accounting.cohorts import Sampling as Sampler
from accounting.cohorts import SamplingChoice, participation_of, sampled_passes
from accounting.guarantee import guarantee
from accounting.mechanisms.by_name import MechanismChoice
from accounting.metrics import Metrics
from accounting.report import up
from privpart.patterns import Outline, layer_groups, matching_parameters, trained_groups
from privpart.plan import AdaptiveClipping, ByRound, PrivacyPlan, Schedule
from privpart.run.population import PUBLIC_DATA, is_public, refuse_population
from privpart.secure.rules import SecureSums
from privpart.settings.about import About
from privpart.settings.client import LocalTraining, LossName
from privpart.settings.faults import sentence_of
from privpart.settings.outlines import GROUPS, OUTLINES, outline_of
from privpart.settings.ranges import seed_bytes
from privpart.settings.rates import LearningRates
from privpart.settings.select import SelectChoice
from privpart.settings.server import ServerOptimizer
from privpart.training import own_code

if TYPE_CHECKING:
    from torch import nn

    from privpart.model import PartialModel
    from privpart.select.keys import Turns

_MOST_PARAMETERS = 2**31
"""8 GB, of which a server holds several copies: parameters, sum and noise."""
_MOST_USERS = 10**8
_Users = Annotated[int, Field(ge=1, le=_MOST_USERS)]
_Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""Of a torch generator."""
BUILTIN_MEASURES = ("accuracy", "loss")
_LARGEST_ERROR = 0.1
"""Standard deviation of the noise of a metric, which is a number from 0 to 1."""
TaskName = Literal["digits", "fashion-mnist", "emnist", "cifar10", "cifar100", "shakespeare"]

_UNSET_IS_ABSENT = {
    "privacy": "sampling clip_norms report_goals allow_large_delta round_seconds metrics secure",
    "privacy.mechanism": (
        "normalize_columns fit objective momentum file fingerprint from_round factor"
    ),
    "model": "name factory weights keep local",
    "data": "task clients options metric evaluate_at population held_out measured_on",
    "client": "augment alternate weight_decay",
    "server": "weight_decay",
}
"""Options that the hash of a plan leaves out unless they are used, by table."""
_HASHED = {"completed": False, "release": "nodes"}
"""What the hash of a plan says of every mechanism: options of trees that no plan has any more."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class MetricsTable(_Table):
    """Table ``[privacy.metrics]``: noised metrics of users who evaluate, which may be published.

    Each value is a mean over ``users`` of numbers in [0, 1], with noise of its own. The users are
    chosen by a hash of their ids and never train, unless ``also_train``.
    """

    measures: list[str] = Field(
        description="accuracy, loss, or own functions from a module and the examples of one user "
        "to a number, which is clipped to [0, 1]: 'module:f' or './file.py:f'"
    )
    users: _Users = Field(description="who evaluate; the public divisor of every mean")
    every: int = Field(ge=1, description="rounds between evaluations; the last round has one, too")
    noise_multiplier: float | None = Field(
        None,
        description="of a sum / sqrt(number of measures); None takes the least with which the "
        "users who evaluate pay no more than those who train",
    )
    also_train: bool = Field(
        False, description="whether the users who evaluate train, too, and pay for both"
    )
    loss_bound: float | None = Field(
        None, gt=0, description="loss that counts as 1, and beyond which it is clipped"
    )
    allow_large_noise: bool = Field(
        False, description="accepts noise of a mean with a standard deviation above 0.1"
    )

    @model_validator(mode="after")
    def _measures_are_complete(self) -> Self:
        if ("loss" in self.measures) != (self.loss_bound is not None):
            raise ConfigError(
                'loss_bound: is for the measure "loss", whose values must lie in [0, 1]; give '
                "both, or neither."
            )
        if self.also_train and self.noise_multiplier is None:
            raise ConfigError(
                "noise_multiplier: is missing; users who train as well pay for both, and only you "
                "can say how much of the budget the metrics may take."
            )
        if len(self.by_name()) < len(self.measures):
            raise ConfigError("measures: two have one name; each must have its own.")
        return self

    def by_name(self) -> dict[str, str]:
        """Map the name of each metric to a builtin one, or the key of the plan that names code."""
        keys = {measure: key for key, measure in self.code().items()}
        return {m.rpartition(":")[2]: keys.get(m, m) for m in self.measures}

    def code(self) -> dict[str, str]:
        """Map the keys that name code to what they name."""
        keys = ((f"privacy.metrics.measures.{i}", m) for i, m in enumerate(self.measures))
        return {key: m for key, m in keys if m not in BUILTIN_MEASURES}

    def metrics(self, rounds: int, training: Guarantee | None) -> Metrics:
        """Return the promise of the metrics.

        Args:
            rounds: of the run.
            training: what those who train pay, from which the noise follows if none is given.
        """
        after = [r for r in range(rounds) if not (r + 1) % self.every or r + 1 == rounds]
        noise = self.noise_multiplier
        if noise is None:
            if training is None:
                raise TypeError("without noise of its own, the metrics take it from the training")
            noise = math.sqrt(len(after)) / training.mu * (1 + 1e-12)
        promised = Metrics(
            names=tuple(self.by_name()),
            users=self.users,
            rounds=tuple(after),
            noise_multiplier=noise,
            also_train=self.also_train,
        )
        error = promised.standard_error
        if error > _LARGEST_ERROR and not self.allow_large_noise:
            raise ConfigError(
                f"privacy.metrics: the noise of a mean of {self.users} users has a standard "
                f"deviation of {error:.2g}, which hides what a number from 0 to 1 says; must be at "
                f"most {_LARGEST_ERROR:g}. Take more users or fewer of the {len(after)} "
                "evaluations (every), or accept it by allow_large_noise = true."
            )
        return promised


class Privacy(_Table):
    """Table ``[privacy]``: what is promised, as in ``PrivacyPlan``.

    It has either ``noise_multiplier`` or ``target_epsilon``, which asks for the least noise that
    meets it at ``delta``.
    """

    rounds: int = Field(description="each of which releases a model")
    clip_norm: float = Field(description="longest update of one client in one round, > 0")
    delta: float = Field(description="of the guarantee; far below 1 / number of clients")
    allow_large_delta: bool = Field(
        False, description="accepts a delta of 1 / clients or more; every report repeats it"
    )
    noise_multiplier: float | None = Field(
        None, description="standard deviation of the noise / clip_norm, of the sum"
    )
    target_epsilon: float | None = Field(
        None, description="instead of noise_multiplier: takes the least noise that meets it"
    )
    report_goal: int | None = Field(
        None, description="public divisor; None takes clients_per_round, or what sampling expects"
    )
    clip_norms: ByRound | None = Field(
        None,
        description="clip norm by round, as { from_round = [0, 100], value = [1.0, 0.5] }; the "
        "first is clip_norm, and the noise follows it",
    )
    report_goals: ByRound | None = Field(
        None,
        description="public divisor by round, likewise; None takes what scheduled-poisson expects",
    )
    minimum_cohort: int = Field(1, description="a round with fewer updates releases nothing")
    max_participations: int = Field(1, description="most rounds of one client")
    min_separation: int = Field(1, description="least distance between two rounds of one client")
    mechanism: MechanismChoice = Field(description="correlates the noise of the rounds")
    adaptive_clipping: AdaptiveClipping | None = Field(
        None, description="lets the clip norm follow the updates"
    )
    sampling: SamplingChoice | None = Field(
        None, description="draws each round's clients, in secret"
    )

    round_seconds: Annotated[float, Field(gt=0, le=86_400)] | None = Field(
        None, description="releases a round at the end of so many seconds, whoever came"
    )
    metrics: MetricsTable | None = Field(
        None, description="noised metrics of users, released beside the models"
    )
    secure: SecureSums | None = Field(
        None, description="lets the server see sums of many nodes only; over Flower"
    )

    @model_validator(mode="after")
    def _limits_fit_the_rounds(self) -> Self:
        Participation(self.rounds, self.max_participations, self.min_separation)
        self.mechanism.refuse_late_restart(self.rounds)
        if self.mechanism.file is not None and self.mechanism.fingerprint is None:
            raise ConfigError(
                "mechanism.fingerprint: is missing. A file can change, so a plan also names the "
                "mechanism_fingerprint that `privpart epsilon --mechanism file:... --format json` "
                "prints."
            )
        return self


class Model(_Table):
    """Table ``[model]``: a network of ``privpart.models`` or one's own, and which part trains."""

    name: str | None = Field(None, description="of a network in privpart.models")
    factory: str | None = Field(
        None, description="own function that returns a network: 'module:f' or './file.py:f'"
    )
    sizes: dict[str, Any] = Field({}, description="keyword arguments of the network")
    weights: str | None = Field(None, description="safetensors file of the parameters in keep")
    train: list[str] | None = Field(
        None, description="patterns of the parameters that train; None: those with requires_grad"
    )
    keep: list[str] | None = Field(None, description="patterns that keep the network's own weights")
    local: list[str] = Field([], description="patterns that train and never leave the client")
    groups: list[list[str]] | None = Field(
        None, description="of [schedule]; None takes the network's, or one per layer if it has none"
    )
    seed: int | None = Field(None, description="of what is not in keep; None keeps all weights")

    @property
    def outline(self) -> Outline | None:
        """The parameters of the network of ``privpart.models``; None of the author's own."""
        return None if self.name is None else outline_of(self.name, **self.sizes)

    def network(self) -> "nn.Module":
        """Return the network of ``privpart.models``, not yet initialised."""
        from privpart.models import build_network

        if self.name is None:
            raise ConfigError("model.name: is missing; this needs a network of privpart.models.")
        return build_network(self.name, **self.sizes)

    def partial(
        self,
        module: "nn.Module | Callable[[], nn.Module] | None" = None,
        *,
        groups: tuple[tuple[str, ...], ...] | None = None,
        fingerprint: str | None = None,
    ) -> "PartialModel":
        """Return the model in its start state; ``module`` takes the place of the table's own."""
        from torch.nn import Module

        from privpart.model import PartialModel
        from privpart.models import MODELS

        # An object's weights are somebody's work: only keep = [] says that a seed replaces them.
        overwritten = isinstance(module, Module) and self.seed is not None and not self.keep
        return PartialModel(
            self.network if module is None else module,
            train=self.train,
            seed=self.seed,
            keep=self.keep or (),
            local=self.local,
            overwrite=overwritten,
            initializers=None if self.name is None else MODELS[self.name].initializers,
            groups=groups,
            fingerprint=fingerprint,
        )

    def grouped(self) -> tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]:
        """Return the names of each group's trainable parameters, and each group's size.

        Of the author's own network, return the patterns of the groups, and size 1 for each: their
        names and sizes would need the author's code. What a schedule costs does not depend on them.
        """
        outline = self.outline
        if outline is None or self.name is None:
            if self.groups is None:
                raise ConfigError(
                    "model.groups: is missing; a schedule of one's own network names its groups."
                )
            return tuple(map(tuple, self.groups)), (1,) * len(self.groups)
        patterns = self.groups or GROUPS.get(self.name) or layer_groups(outline)
        groups = trained_groups(outline, patterns, matching_parameters(outline, self.train))
        return groups, tuple(map(outline.size, groups))


class Data(_Table):
    """Table ``[data]``: a task or one's own clients, whose cohorts take part in turn."""

    task: TaskName | None = Field(None, description="built-in data")
    clients: str | None = Field(
        None, description="own function that returns clients: 'module:f' or './file.py:f'"
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of that function")
    metric: str | None = Field(
        None,
        description="own function from a module to a number, or a dict of several, on public data",
    )
    evaluate_at: list[int] = Field(
        [],
        description="numbers of rounds after which the metric is evaluated beside evaluate_every; "
        "0 is before training",
    )
    population: str | None = Field(
        None, description="name of the people, who share one budget; None takes their ids"
    )
    directory: Path | None = Field(None, description="of a task's files; digits have none")
    users: _Users | None = Field(
        None, description="to deal the examples to; None if the task has its own users"
    )
    clients_per_round: _Users | None = Field(None, description="needed, unless they are sampled")
    partition: Literal["iid", "dirichlet", "pathological"] = Field(
        "iid", description="how a task's examples are dealt to the users"
    )
    alpha: float | None = Field(None, gt=0, description="of a dirichlet partition, > 0")
    classes_each: int | None = Field(None, ge=1, description="of a pathological partition, >= 1")
    held_out: int = Field(
        0,
        ge=0,
        le=_MOST_USERS,
        description="users who are public and whom nobody trains on, the same for every seed; "
        "where a task is dealt to users, beside those in users",
    )
    measured_on: Literal["held-out"] | None = Field(
        None, description="users in place of the test examples, of which none is kept then"
    )
    seed: _Seed = Field(0, description="of the deal, the cohorts and the clients' batches")


class CanaryTable(_Table):
    """Table ``[canaries]``: clients that an auditor makes up, to measure epsilon from below.

    They are clients like others: each that takes part by its secret coin is in the cohort, counts
    towards ``minimum_cohort`` and moves the sum by up to the clip norm; ``report_goal`` stays.
    """

    count: int = Field(ge=20, le=10**5, description="directions; about half of them take part")
    seed: _Seed = Field(0, description="of the directions, which are public")


class PlanFile(_Table):
    """A whole training. ``read`` makes it from a TOML file.

    Attributes:
        plan_schema: "schema" in the file; names the version of this format.
        privacy: what is promised.
        model: the network, and which part of it trains.
        data: the task and its users.
        client: how a client trains.
        server: how the noised mean moves the model; the default adds it.
        schedule: which groups of the model train when; None trains all of them in every round.
        learning_rates: how the learning rates change by round; the default leaves them.
        select: which slices of the model clients select; None sends the whole trained part.
        canaries: clients of an auditor, for ``privpart audit epsilon``.
        about: what a report tells whoever decides about the model; it is not in the hash.
    """

    plan_schema: Literal["privpart/plan/1"] = Field(alias="schema")
    privacy: Privacy
    model: Model
    data: Data
    client: LocalTraining
    server: ServerOptimizer = ServerOptimizer()
    schedule: Schedule | None = None
    learning_rates: LearningRates = LearningRates()
    select: SelectChoice | None = None
    canaries: CanaryTable | None = None
    about: About = About()
    _folder: Path = PrivateAttr(default_factory=Path)
    _tables: dict[str, Any] = PrivateAttr(default_factory=dict)
    _text: str | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _tables_fit_each_other(self) -> Self:
        _refuse_misfits(self)
        return self

    @property
    def folder(self) -> Path:
        """The folder that paths to one's own code and weights are relative to."""
        return self._folder

    @property
    def tables(self) -> dict[str, Any]:
        """The tables as they were given, without defaults."""
        return self._tables

    @property
    def text(self) -> str | None:
        """The file as it was written; None if the plan is not from a file."""
        return self._text

    @property
    def hash(self) -> str:
        """SHA-256, in hex, of all values, defaults included; spaces and comments do not count."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Return all values, defaults included, as canonical JSON.

        Some options are left out unless they are used: the tables of the studies were recorded with
        the hashes of plans that did not have them, and had others.
        """
        # A default is part of the plan: another version's default would train something else.
        values = self.model_dump(mode="json", by_alias=True, exclude={"about"})
        for table, options in _UNSET_IS_ABSENT.items():
            *path, last = table.split(".")
            parent = values
            for name in path:
                parent = parent[name]
            parent[last] = {
                key: value
                for key, value in parent[last].items()
                if key not in options.split() or value not in (None, False, [], {})
            }
        if self.canaries is None:
            del values["canaries"]
        if self.learning_rates == LearningRates():
            del values["learning_rates"]
        values["model"]["train"] = self.model.train or ["*"]
        values["privacy"]["mechanism"] |= _HASHED
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    def named(self) -> dict[str, object]:
        """Return the values that may name code, by key, such as "model.factory"."""
        return {
            "model.factory": self.model.factory,
            "data.clients": self.data.clients,
            "data.metric": self.data.metric,
            "client.loss": self.client.loss,
            "client.augment": self.client.augment,
            **({} if self.privacy.metrics is None else self.privacy.metrics.code()),
        }

    def references(self) -> dict[str, str]:
        """Return the code that the plan names, by key."""
        values = self.named().items()
        return {k: v for k, v in values if isinstance(v, str) and own_code.is_reference(v)}

    def code(self) -> dict[str, Any] | None:
        """Return hashes of the source and weights that the plan names, ready for JSON.

        None if it names nothing. The files are read; nothing in them is run.
        """
        named = self.references()
        if not named and self.model.weights is None:
            return None
        # Weights are data, but they decide what is trained as code does.
        record = own_code.record(named, self.folder)
        if self.model.weights is not None:
            record["files"][self.model.weights] = _file_hash(self.folder / self.model.weights)
        return record

    @property
    def stated_population(self) -> int | None:
        """How many clients there are, if the plan's tables say it."""
        sampling = self.privacy.sampling
        return self.data.users or (None if sampling is None else sampling.population)

    def accept_delta(self, population: int | None = None) -> str:
        """Return the warning about delta beside the number of clients; see ``checks.accept_delta``.

        ``population`` is their number; None takes ``stated_population``.
        """
        p, count = self.privacy, population or self.stated_population
        if p.noise_multiplier == 0:
            return ""
        # Training knows how many clients there are, and judges then.
        unjudged = count is None and p.allow_large_delta
        allowed = checks.is_large_delta(p.delta) if unjudged else p.allow_large_delta
        return checks.accept_delta(p.delta, count, allow_large=allowed)

    def population(self) -> int:
        """Return how many clients a plan that samples draws from."""
        stated = self.stated_population
        if stated is None:
            raise ConfigError(
                "privacy.sampling.population: is missing. The number of clients is public, and "
                "this plan's [data] does not say it."
            )
        return checks.count("privacy.sampling.population", stated)

    def participation(self) -> Participation:
        """Return how often the plan lets one client take part."""
        p = self.privacy
        # How often a sampled client comes follows from the sampler, not from limits.
        if p.sampling is not None:
            sampler = p.sampling.sampler(self.mechanism(), self.population())
            return participation_of(sampler, p.rounds)
        return Participation(p.rounds, p.max_participations, p.min_separation)

    def groups(self) -> tuple[tuple[str, ...], ...] | None:
        """Return the groups for ``PartialModel``; None without a schedule."""
        return None if self.schedule is None else self.model.grouped()[0]

    def mechanism(self, sizes: tuple[int, ...] | None = None) -> Mechanism:
        """Return the mechanism; with groups that take turns, one of the chosen kind per group.

        ``sizes`` are those of the groups, for the author's own network.
        """
        choice = self.privacy.mechanism
        if (sampling := self.privacy.sampling) is not None:
            return choice.build(sampled_passes(self.privacy.rounds, sampling.bins))
        if self.select is not None and (turns := self.turns(self.model.partial())) is not None:
            return choice.build_grouped(turns.schedule, turns.sizes, self.participation())
        if self.schedule is None:
            return choice.build(self.participation())
        sizes = self.model.grouped()[1] if sizes is None else sizes
        return choice.build_grouped(self.schedule.rounds(len(sizes)), sizes, self.participation())

    def turns(self, model: "PartialModel") -> "Turns | None":
        """Return the groups of slices under shared keys, and when each trains, if there are any."""
        if self.select is None:
            return None
        import torch

        from privpart.select.choice import choosers_of, spaces_of
        from privpart.select.key_spaces import shrunk
        from privpart.select.keys import Turns
        from privpart.select.layout import Layout

        spaces = spaces_of(self.select, model.module)
        layout = Layout.of(model, spaces)
        choosers = choosers_of(self.select, layout.sizes, data_seed=self.data.seed)
        sizes = [choice.m for choice in self.select.chosen.values()]
        with torch.device("meta"):  # refuses selections that no smaller network fits
            shrunk(self.model.network(), spaces, sizes)
        return Turns.of(layout, choosers, self.privacy.rounds) if self.select.takes_turns else None

    def context(self, code: dict[str, Any] | None = None) -> str:
        """Return the hash of the plan and of the code that it names, as ``code`` recorded it."""
        if code is None:
            return self.hash
        return hashlib.sha256(f"{self.hash} {own_code.record_hash(code)}".encode()).hexdigest()

    def privacy_plan(
        self, *, code: dict[str, Any] | None = None, sizes: tuple[int, ...] | None = None
    ) -> PrivacyPlan:
        """Return the promise; fit a BLT and solve for the noise if the file asks for it.

        Args:
            code: what ``code()`` returned, for a run; None leaves the named code out of the hash.
            sizes: numbers of parameters of the model's groups, which count only where groups take
                turns; needed where the network is the author's own. The cost does not depend on
                them.
        """
        p, sampling = self.privacy, self.privacy.sampling
        checks.probability("delta", p.delta)
        mechanism, sampler, estimate = self.mechanism(sizes), None, None
        cohort, least = self.data.clients_per_round or 0, p.minimum_cohort
        if sampling is not None:
            sampler = sampling.sampler(mechanism, self.population())
            estimate = sampling.estimate()
            # Every round of a sampled plan is released, also one in which nobody came.
            cohort, least = max(1, round(sampling.expected(self.population()))), 0
        # Not by ``self.participation``, which would fit the mechanism again.
        participation = (
            self.participation() if sampler is None else participation_of(sampler, p.rounds)
        )
        noise = self._noise_multiplier(mechanism, participation, sampler, estimate)
        goals, goal = self._goals(cohort)
        return PrivacyPlan(
            mechanism=mechanism,
            participation=participation,
            clip_norm=p.clip_norm,
            noise_multiplier=noise,
            report_goal=goal,
            clip_norms=p.clip_norms,
            report_goals=goals,
            minimum_cohort=least,
            adaptive_clipping=p.adaptive_clipping,
            sampling=sampler,
            estimate=estimate,
            metrics=self._metrics(mechanism, participation, noise),
            secure=p.secure,
            context=self.context(code),
        )

    def _goals(self, cohort: int) -> tuple[ByRound | None, int]:
        """Return the divisors by round, if they change, and the first one."""
        p, goals = self.privacy, self.privacy.report_goals
        batches = p.sampling.expected_batches if p.sampling is not None else None
        if goals is None and p.report_goal is None and p.sampling is not None and batches:
            rounded = tuple(float(max(1, round(batch))) for batch in batches)
            goals = ByRound(p.sampling.from_round or (), rounded)
        first = cohort if goals is None else int(goals.value[0])
        return goals, first if p.report_goal is None else p.report_goal

    def _metrics(
        self, mechanism: Mechanism, participation: Participation, noise: float
    ) -> Metrics | None:
        """Return the promise of the metrics, if the plan has any."""
        p, table = self.privacy, self.privacy.metrics
        if table is None:
            return None
        if not noise:
            raise ConfigError(
                "privacy.metrics: this plan trains without noise, so nothing is promised that they "
                "could keep. Measure on public data, or add noise."
            )
        training = guarantee(mechanism, participation, noise_multiplier=noise)
        metrics = table.metrics(p.rounds, training)
        alone = metrics.claim().cost.epsilon(p.delta)
        if p.target_epsilon is not None and alone > p.target_epsilon:
            raise ConfigError(
                f"privacy.metrics.noise_multiplier={table.noise_multiplier:g}: the metrics alone "
                f"cost epsilon {up(alone)}, above target_epsilon={p.target_epsilon:g}. Use more "
                "noise."
            )
        return metrics

    def _noise_multiplier(
        self,
        mechanism: Mechanism,
        participation: Participation,
        sampler: Sampler | None,
        estimate: Estimate | None,
    ) -> float:
        noise, target = self.privacy.noise_multiplier, self.privacy.target_epsilon
        if (noise is None) == (target is None):
            raise ConfigError(
                "privacy: give either noise_multiplier or target_epsilon; "
                f"this plan has {'neither' if noise is None else 'both'}."
            )
        if target is None:
            return float(noise or 0.0)
        delta = self.privacy.delta
        if (table := self.privacy.metrics) is not None and table.also_train:
            metrics = table.metrics(self.privacy.rounds, None).claim().cost
            target = _beside(metrics, target, delta)
        if sampler is None:
            return calibrate(mechanism, participation, target_epsilon=target, delta=delta)
        # A search over noise would choose among estimates, which none of their bounds allows.
        if estimate is not None:
            raise ConfigError(
                "privacy.target_epsilon: cannot be met by an estimate, which is made once, after "
                "everything else is chosen. Give the noise_multiplier that `privpart calibrate "
                "--sampling` found."
            )
        return least_sampled_noise(mechanism, sampler, target_epsilon=target, delta=delta)


def _beside(metrics: Guarantee, target: float, delta: float) -> float:
    """Return the epsilon that training may have, so that both together meet a target."""
    whole = gaussian.mu(target, delta)
    if not metrics.mu < whole * (1 - 1e-6):
        raise ConfigError(
            f"privacy.metrics.noise_multiplier: the metrics alone cost epsilon "
            f"{up(metrics.epsilon(delta))}, which leaves nothing of target_epsilon={target:g} for "
            "the training of the same users. Use more noise."
        )
    # The factors keep digits that a difference of squares loses; the last one rounds down.
    left = math.sqrt(whole - metrics.mu) * math.sqrt(whole + metrics.mu) * (1 - 1e-9)
    return Guarantee(left).epsilon(delta)


def read(path: str | Path, *, in_python: bool = False) -> PlanFile:
    """Return the plan in a TOML file; see ``validated`` for ``in_python``.

    Raises:
        ConfigError: no such file, not valid TOML, unknown keys (named with the nearest known one),
            missing keys, or values out of range.
    """
    text = checks.text_of(path, f"plan {path}")
    return parse(text, name=str(path), folder=Path(path).parent, in_python=in_python)


def parse(text: str, *, name: str = "plan", **options: Any) -> PlanFile:  # noqa: ANN401
    """Return the plan in a TOML text; options and errors are those of ``validated``."""
    plan = validated(checks.parsed_toml(text, name), name=name, **options)
    # The ledger keeps what a person wrote, comments included.
    plan._text = text
    return plan


def plan_in(
    facts: Mapping[str, Any], *, name: str = "the plan in the ledger", folder: Path | None = None
) -> PlanFile:
    """Return the plan that a ledger's facts hold, as tables or as the text of its file."""
    options: dict[str, Any] = {"name": name, "folder": folder, "in_python": True}
    if (tables := facts.get("plan_tables")) is not None:
        return validated(tables, **options)
    return parse(str(facts.get("plan_file", "")), **options)


def validated(
    values: Mapping[str, Any],
    *,
    name: str = "plan",
    folder: Path | None = None,
    in_python: bool = False,
) -> PlanFile:
    """Return the plan with these tables; raises as ``read``.

    Args:
        values: the tables.
        name: of the plan, for messages.
        folder: what paths to one's own code are relative to; None is the working folder.
        in_python: whether the network and the clients may be missing, because they are passed to
            ``privpart.train``.
    """
    try:
        # Strict keeps ``true`` and ``"3"`` from passing as numbers. Strict JSON, unlike strict
        # Python values, still takes a list for a tuple, a table for a dataclass, a string for an
        # enum. NumPy's numbers become Python's.
        tables = to_json(values, fallback=lambda value: value.item())
        plan = PlanFile.model_validate_json(tables, strict=True)
        plan._folder, plan._tables = (folder or Path()).resolve(), from_json(tables)
        plan.privacy.mechanism.refuse_idle(plan.tables["privacy"]["mechanism"].keys())
    except ConfigError as error:
        raise ConfigError(f"{name} is not a valid plan: privacy.mechanism: {error}") from None
    except ValidationError as error:
        faults = [sentence_of(fault, PlanFile) for fault in error.errors()]
        listed = (
            f" {faults[0]}" if len(faults) == 1 else "".join(f"\n  {fault}" for fault in faults)
        )
        raise ConfigError(f"{name} is not a valid plan:{listed}") from None
    if in_python:
        return plan
    missing = {
        'model: needs name, of a network in privpart.models, or factory, such as "./task.py:'
        'network".': plan.model.name is None and plan.model.factory is None,
        'data: needs task, a built-in one, or clients, such as "./task.py:clients".': (
            plan.data.task is None and plan.data.clients is None
        ),
    }
    checks.refuse_first(
        {f"{name} is not a valid plan: {text}": fault for text, fault in missing.items()}
    )
    return plan


def _file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise ConfigError(f"model.weights: {path}: there is no such file.") from None
    except OSError as error:
        raise ConfigError(f"model.weights: {path} cannot be read: {error.strerror}.") from None


def refuse_short_cohorts(privacy: Privacy, size: int, users: int | None) -> None:
    """Refuse plans whose cohorts of ``size`` run out of clients that may still take part.

    Cohorts take turns, so the limits let either all members of a cohort come again, or none. A
    number of users that is not known yet is taken to be large enough; training asks again.
    """
    if size < privacy.minimum_cohort:
        raise ConfigError(
            f"data.clients_per_round={size}: no round could be released, because "
            f"privacy.minimum_cohort is {privacy.minimum_cohort}. Ask more clients per round, or "
            "lower the minimum."
        )
    # All members of a cohort come again together, after every other cohort.
    turns = privacy.rounds if users is None else users // size
    repeats = privacy.max_participations if turns >= privacy.min_separation else 1
    if (first := turns * repeats) < privacy.rounds:
        raise ConfigError(
            f"rounds={privacy.rounds}: from round {first} on, the limits on participation leave "
            "no client. Plan fewer rounds, smaller cohorts, or more participations (which cost "
            "more)."
        )


_APART = (
    ("model.name", "model.factory"),
    ("data.task", "data.clients"),
    ("data.measured_on", "data.metric"),
    # Sampling draws the cohorts, and its proof covers nothing else (docs/concepts/sampling.md).
    ("data.clients_per_round", "privacy.sampling"),
    ("privacy.adaptive_clipping", "privacy.sampling"),
    ("schedule", "privacy.sampling"),
    ("privacy.metrics", "privacy.sampling"),
    # The users who evaluate have no slices, no part of their own and no times of release.
    ("privacy.metrics", "select"),
    ("privacy.metrics", "model.local"),
    ("privacy.metrics", "privacy.round_seconds"),
    ("privacy.metrics", "canaries"),
    ("select", "privacy.sampling"),
    ("privacy.sampling.population", "data.users"),
    # Clients that select train a smaller network from the seed.
    ("schedule", "select"),
    ("select", "model.keep"),
    ("select", "model.local"),
    ("select", "client.augment"),
    # A canary's rounds are chosen, and its update has a fixed length and touches everything.
    ("canaries", "select"),
    ("canaries", "privacy.sampling"),
    ("canaries", "privacy.adaptive_clipping"),
    ("canaries", "privacy.clip_norms"),
    ("canaries", "privacy.report_goals"),
    ("canaries", "privacy.secure"),
    ("privacy.clip_norms", "privacy.adaptive_clipping"),
)
"""Keys of which a plan has one at most."""


def _refuse_misfits(plan: "PlanFile") -> None:
    """Check that the tables can be trained together; the first fault is an error."""

    def has(key: str) -> bool:
        value: Any = plan
        for name in key.split("."):
            value = getattr(value, name, None)
        return bool(value)

    for key, other in _APART:
        if has(key) and has(other):
            raise ConfigError(f"{key}: cannot be combined with {other}; leave one of them out.")
    # In this order: a later fault may be the consequence of an earlier one.
    checks.refuse_first(_of_tables(plan))
    checks.refuse_first(_of_start(plan.model))
    _refuse_other_text(plan)
    _refuse_keys(plan.data)
    if plan.model.seed is not None:
        seed_bytes(plan.model.seed)
    if plan.model.name is not None:
        _refuse_network(plan.model.name, plan.model)
    _refuse_schedule(plan)
    if (size := plan.data.clients_per_round) is None:
        plan.population()
    else:
        refuse_short_cohorts(plan.privacy, size, _who_train(plan, size))
    plan.accept_delta()


def _who_train(plan: "PlanFile", size: int) -> int | None:
    """Return how many users train beside those who evaluate, if that is known."""
    users, metrics = plan.data.users, plan.privacy.metrics
    if users is None or metrics is None or metrics.also_train:
        return users
    evaluate = metrics.users
    if users - evaluate < size:
        raise ConfigError(
            f"privacy.metrics.users={evaluate}: of data.users={users}, {max(0, users - evaluate)} "
            f"remain to train, fewer than clients_per_round={size}. Use fewer, or also_train."
        )
    return users - evaluate


def _of_tables(plan: "PlanFile") -> checks.Faults:
    privacy, model, data, client = plan.privacy, plan.model, plan.data, plan.client
    limits = {"minimum_cohort", "max_participations", "min_separation"}
    decided = limits & privacy.model_fields_set if privacy.sampling else set()
    size, users, kind = data.clients_per_round, data.users, plan.server.kind
    plays, named_loss = data.task == "shakespeare", client.loss in get_args(LossName)
    return {
        "data.clients_per_round: is missing.": size is None and privacy.sampling is None,
        f"privacy.{min(decided, default='')}: follows from [privacy.sampling]; leave it out.": (
            decided
        ),
        "client.objective: clients that select keep no model of their own, which moon needs; "
        "use fedavg or fedprox.": plan.select and client.objective == "moon",
        "select: needs a network of privpart.models and a built-in task. privpart.select does "
        "the same for your own from Python.": (
            plan.select and (model.name is None or data.task is None)
        ),
        **{
            f"learning_rates.{side}: warmup and at must be below the plan's {privacy.rounds} "
            "rounds; a later one is never reached.": schedule
            and schedule.last_change >= privacy.rounds
            for side, schedule in dict(plan.learning_rates).items()
        },
        "learning_rates.client: clients that select train alike in all rounds; leave it out.": (
            plan.select and plan.learning_rates.client
        ),
        "learning_rates.server: the noised sums of canaries are computed from the models by one "
        "rate; leave it out, and weight_decay in [server] too.": (
            plan.canaries and (plan.learning_rates.server or plan.server.weight_decay)
        ),
        'model.name: shakespeare is next-word prediction; its model is "word_lm".': (
            plays and model.name in set(OUTLINES) - {"word_lm"}
        ),
        'data.task: word_lm predicts the next word; its task is "shakespeare".': (
            data.task and not plays and model.name == "word_lm"
        ),
        f"client.loss={client.loss}: every built-in task has one label per example. Use "
        "cross_entropy, or a function of your own.": (
            data.task and named_loss and client.loss != "cross_entropy"
        ),
        f"data.clients_per_round={size}: must be at most data.users={users}.": (
            size and users and size > users
        ),
        'data.measured_on="held-out": nobody is held out; set held_out.': (
            data.measured_on and not data.held_out
        ),
        f"data.evaluate_at={data.evaluate_at}: must ascend from 0, before training, to at most "
        f"{privacy.rounds}, all rounds.": (
            data.evaluate_at != sorted({n for n in data.evaluate_at if 0 <= n <= privacy.rounds})
        ),
        f"data.population={data.population!r}: {PUBLIC_DATA!r} is for the public data of built-in "
        "tasks, which have such a name without being given one; choose another.": (
            data.population is not None and is_public(data.population)
        ),
        "canaries: without noise there is no epsilon to audit; leave them out.": (
            plan.canaries and privacy.noise_multiplier == 0
        ),
        f"canaries: the noised sums cannot be computed from models that {kind} made. Use kind = "
        '"sgd" in [server], or audit a replica (privpart audit epsilon --plan FILE '
        "--simulate).": plan.canaries and kind != "sgd",
        "model.groups: need a table [schedule]; without it, all of them train in every round.": (
            plan.schedule is None and model.groups is not None
        ),
    }


def _of_start(model: "Model") -> checks.Faults:
    """Return start values that are ambiguous: nothing may replace pretrained weights unasked."""
    builtin, seeded = model.name is not None, model.seed is not None
    return {
        "model.seed: is missing; a network of privpart.models starts from it.": (
            builtin and not seeded
        ),
        "model.keep: a network of privpart.models has no weights of its own; name their file in "
        "weights.": builtin and model.keep and model.weights is None,
        "model.keep: without seed all weights are kept. Leave it out, or give a seed for the "
        "others.": not builtin and not seeded and model.keep is not None,
        f"model.seed={model.seed}: would replace the network's own weights. Say which stay: "
        'keep = ["*"] and the like, or keep = [] if none do.': (
            not builtin and seeded and model.keep is None
        ),
        "model.weights: no parameter takes its start value from the file. Name those that do in "
        "keep.": seeded and model.weights is not None and not model.keep,
    }


def _refuse_schedule(plan: "PlanFile") -> None:
    if (schedule := plan.schedule) is None:
        return
    rounds, groups = plan.privacy.rounds, len(plan.model.grouped()[0])
    if (length := schedule.length(groups)) != rounds:
        raise ConfigError(
            f"privacy.rounds={rounds}: the schedule has {length} rounds for {groups} groups; both "
            "must be the same."
        )


def _refuse_other_text(plan: "PlanFile") -> None:
    """Check names of code and of people by the rules of those who use them."""
    try:
        for key, reference in plan.named().items():
            if reference is not None and reference not in get_args(LossName):
                where = f"{key}: "
                own_code.parsed(str(reference))
        where = "data."
        if plan.data.population is not None:
            refuse_population(plan.data.population)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None


def _refuse_keys(data: "Data") -> None:
    """Refuse keys that this kind of data does not take, and ask for those that it needs."""
    skews = {"iid": [], "dirichlet": ["alpha"], "pathological": ["classes_each"]}
    dealt = data.task not in (None, "shakespeare")
    needs = ["users", *skews[data.partition]] if dealt else []
    takes = [*needs, "partition"] if dealt else []
    takes += ["options"] if data.clients else []
    if data.task not in (None, "digits"):
        takes += ["directory"]
        # Debian's package of Fashion-MNIST has a place that is known.
        needs += [] if data.task == "fashion-mnist" else ["directory"]
    kind: str = data.task or "clients of your own"
    kind += f" ({data.partition})" if dealt else ""
    for key in ("directory", "users", "options", "partition", "alpha", "classes_each"):
        present = key in data.model_fields_set and getattr(data, key) is not None
        if present and key not in takes:
            raise ConfigError(f"data.{key}: is not for {kind}; leave it out.")
        if key in needs and not present:
            files = " Its files are not downloaded for you." if key == "directory" else ""
            raise ConfigError(f"data.{key}: is missing; {kind} needs it.{files}")


def _refuse_network(name: str, model: "Model") -> None:
    """Refuse networks that cannot be built, trained in part, or held in memory."""
    for key, value in model.sizes.items():
        for size in value if isinstance(value, list) else [value]:
            # The network refuses other types; a size that fills the memory must not reach it.
            if isinstance(size, int):
                checks.count(f"model.sizes.{key}", int(size), minimum=0, maximum=_MOST_PARAMETERS)
    outline = outline_of(name, **model.sizes)
    if any("_BatchNorm" in kinds for kinds in outline.kinds.values()):
        import torch

        from privpart.model import refuse_batch_statistics

        with torch.device("meta"):  # shapes only
            refuse_batch_statistics(model.network())
    matching_parameters(outline, model.train)
    total = outline.size(outline.shapes)
    if total > _MOST_PARAMETERS:
        raise ConfigError(
            f"model.sizes: the network has {total:,} parameters; must be at most "
            f"{_MOST_PARAMETERS:,}."
        )
