"""Plan file: a whole training as people write it, in TOML.

Everything that shapes the run is in it, so its hash, which is part of the privacy plan, fixes the
run before it starts. Unknown keys are errors: a misspelt clip norm must not become a default.
"""

import hashlib
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import to_json
from torch import nn

from accounting import ConfigError, Mechanism, Participation, calibrate, checks
from privpart.client import LocalTraining
from privpart.data.tasks.shakespeare import BEGIN, UNKNOWN
from privpart.mechanism_choice import MechanismChoice
from privpart.model import PartialModel
from privpart.models import MODELS
from privpart.models import model as network
from privpart.patterns import layer_groups, matching_parameters, trained_groups
from privpart.plan import AdaptiveClipping, PrivacyPlan, Schedule
from privpart.plan_checks import refuse_misfits
from privpart.plan_faults import sentences
from privpart.select.choice import SelectChoice
from privpart.select.keys import Counts, KeyChooser
from privpart.select.layout import Layout
from privpart.select.networks import shrunk
from privpart.select.turns import Turns
from privpart.server import ServerOptimizer

SCHEMA = "privpart/plan/1"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Privacy(_Table):
    """Table ``[privacy]``: what is promised, as in ``PrivacyPlan``.

    Either ``noise_multiplier``, or ``target_epsilon`` for the least noise that meets it at
    ``delta``.
    """

    rounds: int
    clip_norm: float
    delta: float
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    report_goal: int | None = Field(default=None, description="None: clients_per_round")
    minimum_cohort: int = 1
    max_participations: int = 1
    min_separation: int = 1
    mechanism: MechanismChoice
    adaptive_clipping: AdaptiveClipping | None = None

    @model_validator(mode="after")
    def _limits_fit_the_rounds(self) -> Self:
        Participation(self.rounds, self.max_participations, self.min_separation)
        return self


class Model(_Table):
    """Table ``[model]``: a network of ``privpart.models``, and which part trains."""

    name: str
    sizes: dict[str, Any] = Field(default_factory=dict, description="keywords of the network")
    train: list[str] = Field(default_factory=lambda: ["*"])
    groups: list[list[str]] | None = Field(
        default=None, description="of [schedule]; None: the network's own, else one per layer"
    )
    seed: int

    def network(self) -> nn.Module:
        """Return the network, not yet initialised."""
        return network(self.name, **self.sizes)

    def partial(
        self,
        module: nn.Module | None = None,
        *,
        groups: tuple[tuple[str, ...], ...] | None = None,
        fingerprint: str | None = None,
    ) -> PartialModel:
        """Return the model in its start state; of a smaller ``module``, see ``PartialModel``."""
        return PartialModel(
            self.network() if module is None else module,
            train=self.train,
            seed=self.seed,
            initializers=MODELS[self.name].initializers,
            groups=groups,
            fingerprint=fingerprint,
        )

    def grouped(self) -> tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]:
        """Return the trainable parameters of each group by name, and how many numbers they are."""
        with torch.device("meta"):  # shapes only
            module = self.network()
        patterns = self.groups or MODELS[self.name].groups or layer_groups(module)
        groups = trained_groups(module, patterns, matching_parameters(module, self.train))
        sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
        return groups, tuple(sum(sizes[name] for name in names) for names in groups)


class Data(_Table):
    """Table ``[data]``: a task, and the simulated users who take part in turn."""

    task: Literal[
        "digits", "fashion-mnist", "emnist", "cifar10", "cifar100", "fed-emnist", "shakespeare"
    ]
    directory: Path | None = None
    users: int | None = Field(
        default=None, description="to deal the examples to; None where the task has its own"
    )
    clients_per_round: int
    partition: Literal["iid", "dirichlet", "pathological"] = "iid"
    alpha: float | None = Field(default=None, description="of a dirichlet partition")
    classes_each: int | None = Field(default=None, description="of a pathological one")
    seed: int = 0


class PlanFile(_Table):
    """A whole training. ``read`` makes it from a TOML file.

    Attributes:
        plan_schema: "schema" in the file; names the version of this format.
        privacy: what is promised.
        model: what trains.
        data: who trains it on what.
        client: how a client trains.
        server: how the noised mean moves the model.
        schedule: which groups of the model train when; None trains all of it in every round.
        select: which slices of the model clients select; None sends them all of what trains.
    """

    plan_schema: Literal["privpart/plan/1"] = Field(alias="schema")
    privacy: Privacy
    model: Model
    data: Data
    client: LocalTraining
    server: ServerOptimizer
    schedule: Schedule | None = None
    select: SelectChoice | None = None

    @model_validator(mode="after")
    def _tables_fit_each_other(self) -> Self:
        refuse_misfits(self)
        return self

    @property
    def hash(self) -> str:
        """SHA-256, in hex, of all values, defaults included; not of spaces and comments."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """All values, defaults included, as canonical JSON."""
        return json.dumps(
            self.model_dump(mode="json", by_alias=True), sort_keys=True, separators=(",", ":")
        )

    def participation(self) -> Participation:
        """Return how often the plan lets one client take part."""
        p = self.privacy
        return Participation(p.rounds, p.max_participations, p.min_separation)

    def groups(self) -> tuple[tuple[str, ...], ...] | None:
        """Return the groups for ``PartialModel``; None without a schedule."""
        return None if self.schedule is None else self.model.grouped()[0]

    def mechanism(self) -> Mechanism:
        """Return the mechanism: the plan's choice, for each group of its own if there are any."""
        choice = self.privacy.mechanism
        if self.select is not None and (turns := self.turns(self.model.partial())) is not None:
            return choice.build_grouped(turns.schedule, turns.sizes, self.participation())
        if self.schedule is None:
            return choice.build(self.participation())
        _, sizes = self.model.grouped()
        return choice.build_grouped(self.schedule.rounds(len(sizes)), sizes, self.participation())

    def turns(self, model: PartialModel) -> Turns | None:
        """Return the groups of slices under shared keys, and when each trains.

        None where clients select nothing, or no keys are shared.

        Raises:
            ConfigError: a selection that the model does not have.
        """
        if self.select is None:
            return None
        spaces = self.select.spaces(model.module)
        layout = Layout.of(model, spaces)
        choosers = self.choosers(layout)
        with torch.device("meta"):  # whether there is such a network at all
            shrunk(self.model.network(), spaces, [own.m for own in self.select.chosen.values()])
        return Turns.of(layout, choosers, self.privacy.rounds) if self.select.takes_turns else None

    def choosers(
        self, layout: Layout, *, counts: Callable[[int], Counts] | None = None
    ) -> list[KeyChooser]:
        """Return what chooses the keys of a table [select], see ``SelectChoice.choosers``."""
        if self.select is None:
            return []
        return self.select.choosers(
            layout.sizes, counts=counts, always=(UNKNOWN, BEGIN), data_seed=self.data.seed
        )

    def privacy_plan(self) -> PrivacyPlan:
        """Return the promise; fits a BLT, and solves for the noise, if the file asks for it.

        Raises:
            ConfigError: values out of range, or both or none of noise and target.
        """
        p, participation = self.privacy, self.participation()
        checks.probability("delta", p.delta)
        mechanism = self.mechanism()
        return PrivacyPlan(
            mechanism=mechanism,
            participation=participation,
            clip_norm=p.clip_norm,
            noise_multiplier=_noise_multiplier(p, mechanism, participation),
            report_goal=self.data.clients_per_round if p.report_goal is None else p.report_goal,
            minimum_cohort=p.minimum_cohort,
            adaptive_clipping=p.adaptive_clipping,
            context=self.hash,
        )


def read(path: str | Path) -> PlanFile:
    """Return the plan in a TOML file.

    Raises:
        ConfigError: no such file, no TOML, unknown keys (with the nearest that exist), missing
            ones, or values out of range.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"plan {path} cannot be read: {error}.") from None
    return parse(text, name=str(path))


def parse(text: str, *, name: str = "plan") -> PlanFile:
    """Return the plan in a TOML text; raises as ``read``."""
    try:
        return validated(tomllib.loads(text), name=name)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise ConfigError(f"{name} is no TOML: {error}.") from None


def validated(values: dict[str, Any], *, name: str = "plan") -> PlanFile:
    """Return the plan with these tables; raises as ``read``.

    Strict, so that true is no number and "3" is none; as JSON, whose strictness still takes a list
    for a tuple, a table for a dataclass and a string for one of its names.
    """
    try:
        return PlanFile.model_validate_json(to_json(values), strict=True)
    except ValidationError as error:
        faults = "".join(f"\n  {sentence}" for sentence in sentences(error, PlanFile))
        raise ConfigError(f"{name} is no plan:{faults}") from None


def _noise_multiplier(p: Privacy, mechanism: Mechanism, participation: Participation) -> float:
    if (p.noise_multiplier is None) == (p.target_epsilon is None):
        raise ConfigError(
            "privacy: give either noise_multiplier or target_epsilon; "
            f"this plan has {'neither' if p.noise_multiplier is None else 'both'}."
        )
    if p.target_epsilon is None:
        return float(p.noise_multiplier or 0.0)
    return calibrate(mechanism, participation, target_epsilon=p.target_epsilon, delta=p.delta)
