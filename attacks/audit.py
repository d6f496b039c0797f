"""Audit: attack what one client sends, whole and in parts, and report what came back.

The report separates "protected" from "the attack failed", and puts the score of a guess that needs
no attack beside every score. A score certifies nothing: it is a lower bound on what leaks, never to
be turned into an epsilon. An update that the true examples do not explain is not attacked.
"""

import itertools
import math
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accounting import Independent, Participation, checks, guarantee
from accounting.checks import ConfigError
from attacks.explain import Explanation, explain
from attacks.observation import Observation, check_entries, noise_std_of, residual_of, select
from attacks.report import UNION, Adversary, Report, ResultT, RowT, TrialT, most_severe
from attacks.rounding import first_least
from attacks.transforms import Declared, declared
from attacks.update import LocalSteps, Loss, Smoothed, double_state, norm, ready

SeenT = TypeVar("SeenT", bound=Observation)
Attack = Callable[[nn.Module, SeenT, int], ResultT | None]  # model, what was seen, seed
NO_ATTACK = "none"  # name of the attack in a row of a view that none applies to


@dataclass(frozen=True, kw_only=True, eq=False)
class Audit(Generic[SeenT, ResultT, TrialT]):
    """Who sees which views of whose update, and what was done to it.

    The "server" sees the update after the clip and before noise. With noise there is also the
    "recipient" of the noised sum, who knows every other client's update, as the adversary of
    differential privacy does: to it the sum is one client's update plus noise.

    A given update is of all the examples as one batch; ``transform``, ``clip`` and
    ``noise_multiplier`` state what was done to it. If the examples do not explain it, nothing is
    attacked: the report is void and says what is likely wrong.

    Args:
        views: name -> patterns of the parameters that the update shows, as in ``observe``. Only
            these train; the others are frozen, and public.
        transform: what clients do to their update before the clip, such as "top-k:0.1": a text, a
            function, or several in their order; see ``attacks.transforms``. Of "sum:20" an update
            is the sum of 20 clients', each of a batch, and nobody sees more than that.
        attacks: tried in this order until one recovers the batch; None is the whole suite. Each
            maps (model, observation, seed) to a result, or to None where it does not apply.
        schedule: the view that each round of a training sends. The report then names the worst
            round, and the union of these views is audited too.
        done: results so far, by a key of (adversary, view, batch, clip, noise), read and filled, so
            that an audit can resume. The caller sees to it that the other options are the same.
        progress: called with a line before each attack.
        read: what was done to files of weights and updates when they were read, for the report.
    """

    model: nn.Module  # the attacker knows its present weights
    x: Tensor  # the examples
    y: Tensor | None = None  # their labels
    views: Mapping[str, Sequence[str]]
    attacks: Mapping[str, Attack[SeenT, ResultT]] | None = None
    batch: int = 1  # examples per client; divides their number, as do those of a sum
    loss: Loss | None = None  # None takes cross-entropy
    update: Mapping[str, Tensor] | None = None  # a given one; None computes it
    local: LocalSteps | None = None
    clip: float | None = None
    noise_multiplier: float = 0.0
    transform: Any = ()
    delta: float = 1e-5  # at which the accountant's epsilon of the noised release is printed
    adversaries: Sequence[Adversary] | None = None  # None: the recipient, too, where there is noise
    schedule: Sequence[str] = ()
    reveal_labels: bool = True  # whether the attacker is told the labels
    seed: int = 0  # of the starting points and of the noise; the same for all views
    done: MutableMapping[str, dict[str, ResultT]] | None = None
    progress: Callable[[str], None] | None = None
    read: Sequence[str] = ()
    _tried: dict[str, list[list[TrialT]]] = field(init=False, default_factory=dict)

    # What images and sentences differ in.

    kind: ClassVar[str]
    suite: ClassVar[Callable[[], Mapping[str, Attack[Any, Any]]]]

    @property
    def client_loss(self) -> Loss:
        """The loss that the client minimises."""
        return self.loss or cross_entropy

    @property
    def net(self) -> nn.Module:
        """The model as the client runs it."""
        return self.model

    @abstractmethod
    def _computed(self, number: int, options: dict[str, Any]) -> SeenT:
        """Return what the client sends of batch ``number``, with these options of ``observe``."""

    @abstractmethod
    def _given(self, fields: dict[str, Any]) -> SeenT:
        """Return the observation of a given update; ``fields`` are those of any observation."""

    def _told(self, sent: SeenT) -> SeenT:
        """Return what an attacker computes of what it saw, before any attack."""
        return sent

    @abstractmethod
    def _scored(
        self, view: str, attack: str, result: ResultT, number: int, match: dict[str, Any]
    ) -> list[TrialT]:
        """Return a trial per example of the batch; ``match`` has its truth_match and untried."""

    @abstractmethod
    def _nothing(self, number: int) -> ResultT:
        """Return what stands for the result where nothing was attacked."""

    @abstractmethod
    def report(self) -> Report[Any]:
        """Run every attack on every view of every batch, for one adversary after the other."""

    # The options.

    @cached_property
    def declared(self) -> Declared:
        """The transforms between an update and what is sent."""
        return declared(self.transform)

    @property
    def examples(self) -> int:
        """The number of examples per update that is seen."""
        return self.batch * self.declared.clients

    def refuse(self) -> None:
        """Raise a ConfigError for options with which no audit is possible, before any attack."""
        batch = checks.count("batch", self.batch)
        checks.count("seed", self.seed, minimum=0, maximum=checks.MOST_SEED - len(self.x))
        checks.probability("delta", self.delta)
        noise_std_of(self.clip, self.noise_multiplier)
        if not self.views:
            raise ConfigError("views={}: name at least one, such as {'full': ['*']}.")
        if len(self.x) % self.examples:
            times = f" times {self.declared.clients} clients" if self.declared.clients > 1 else ""
            raise ConfigError(
                f"batch={batch}{times}: must divide the number of {self.kind}, {len(self.x)}."
            )
        if self.update is not None:
            if not self.update:
                raise ConfigError("update: is empty; pass at least one tensor, by its name.")
            if self.examples != len(self.x):
                raise ConfigError(
                    f"update: a given update is of one batch; set batch to the number of "
                    f"{self.kind}, {len(self.x)}, shared by the clients of a sum."
                )
            parameters = dict(self.model.named_parameters(remove_duplicate=False))  # tied ones too
            check_entries("update", self.update, parameters | dict(self.model.named_buffers()))
        _ = self.names  # refuses a pattern that matches nothing

    def refuse_labels(self, logits: Tensor, labels: Tensor) -> None:
        """Raise a ConfigError for labels that the logits (..., K) do not have."""
        count = logits.shape[-1]
        of_labels = self.client_loss is cross_entropy or isinstance(self.client_loss, Smoothed)
        if of_labels and not bool(((labels >= 0) & (labels < count)).all()):
            raise ConfigError(
                f"labels: from {int(labels.min())} to {int(labels.max())}; the model's are 0 to "
                f"{count - 1}."
            )

    @cached_property
    def every_view(self) -> dict[str, Sequence[str]]:
        """The views, and the union of those that the schedule sends unless one of them is all."""
        for view in self.schedule:
            if view not in self.views:
                raise ConfigError(
                    f"schedule={view!r}: is not a valid view; views are {', '.join(self.views)}."
                )
        sent = list(dict.fromkeys(self.schedule))
        if len(sent) < 2 or any("*" in self.views[view] for view in sent):
            return dict(self.views)
        return {**self.views, UNION: [pattern for view in sent for pattern in self.views[view]]}

    @cached_property
    def names(self) -> dict[str, frozenset[str]]:
        """The parameters of each view."""
        sent = [name for name, _ in self.model.named_parameters()]
        if self.update is not None:
            sent = [name for name in sent if name in self.update]
        return {
            view: frozenset(select(sent, patterns, "view"))
            for view, patterns in self.every_view.items()
        }

    @property
    def everyone(self) -> Sequence[Adversary]:
        """Who attacks."""
        if self.adversaries:
            return self.adversaries
        if not self.noise_multiplier:
            return ("server",)
        # a given update already contains its noise
        return ("server", "recipient") if self.update is None else ("recipient",)

    @property
    def batches(self) -> range:
        """The numbers of the batches."""
        return range(len(self.x) // self.examples)

    def rows_of(self, number: int) -> slice:
        """Return which examples are batch ``number``."""
        return slice(number * self.examples, (number + 1) * self.examples)

    def client(self, number: int) -> tuple[Tensor, Tensor]:
        """Return batch ``number``, and what its loss predicts: labels, or the examples."""
        rows = self.rows_of(number)
        return self.x[rows].detach(), (self.x if self.y is None else self.y)[rows]

    @cached_property
    def _done(self) -> MutableMapping[str, dict[str, ResultT]]:
        return {} if self.done is None else self.done  # an empty store is false, and still a store

    @cached_property
    def _attacks(self) -> Mapping[str, Attack[SeenT, ResultT]]:
        return type(self).suite() if self.attacks is None else self.attacks

    # What is seen, and whether the examples explain it.

    @property
    def _options(self) -> dict[str, Any]:
        """What a client does, as the attacker knows."""
        trained = {"loss": self.client_loss, "local": self.local}
        return trained | {"clip": self.clip, "transform": self.declared}

    def _sent(self) -> SeenT:
        """Return all of a given update."""
        update = self.update or {}
        names = [name for name, _ in self.model.named_parameters() if name in update]
        return self._given(
            self._options
            | {
                "update": {name: update[name] for name in names},
                "state": double_state(self.model),
                "shape": tuple(self.x.shape),
                "labels": self.y if self.reveal_labels else None,
                "noise_std": noise_std_of(self.clip, self.noise_multiplier),
            }
        )

    def observe(self, view: str, adversary: Adversary, number: int) -> SeenT:
        """Return what that adversary sees of batch ``number``."""
        options = self._options
        if self.update is not None:
            return self._sent().restrict(self.names[view])
        options |= {"visible": self.every_view[view], "reveal_labels": self.reveal_labels}
        if adversary == "recipient":
            options["noise_multiplier"] = self.noise_multiplier
            options["generator"] = torch.Generator().manual_seed(self.seed + number)
        return self._computed(number, options)

    @cached_property
    def explanation(self) -> Explanation:
        """Of the view, adversary and batch that the true examples explain least.

        If a view of a given update is not explained, that of all that was sent says why.
        """
        explanations = [
            self._explained(self.observe(view, adversary, number), number)
            for adversary in self.everyone
            for view in self.every_view
            for number in self.batches
        ]
        worst = explanations[first_least([-item.excess for item in explanations], -math.inf)]
        if self.update is None or worst.explained:
            return worst
        whole = explain(self.net, self._sent(), *self.client(0))
        return worst if whole.explained else whole

    def _explained(self, sent: SeenT, number: int) -> Explanation:
        """Return how well the examples explain what was sent, and what attackers compute of it."""
        explanation = explain(self.net, sent, *self.client(number))
        told = self._told(sent)
        if told is sent or not explanation.explained:
            return explanation
        finer = explain(self.net, told, *self.client(number))
        cause = "the gradient of its single step is another: another rate, weight decay or epsilon"
        return explanation if finer.explained else replace(finer, causes=(cause,))

    # The attacks.

    def rows(self, row: Callable[[dict[str, Any], list[SeenT]], RowT]) -> tuple[RowT, ...]:
        """Return a row per adversary and view, made by ``row`` of its fields and observations."""
        sizes = {name: value.numel() for name, value in self.model.named_parameters()}
        rows = []
        for adversary, view in itertools.product(self.everyone, self.every_view):
            sent = [self.observe(view, adversary, number) for number in self.batches]
            observed = [self._told(item) for item in sent]
            visible = sum(sizes[name] for name in self.names[view])
            fields = {
                "view": view,
                "patterns": tuple(self.every_view[view]),
                "visible": visible,
                "share": visible / sum(sizes.values()),
                "trials": tuple(
                    tuple(of_example)
                    for number in self.batches
                    for of_example in self._with_parts(view, adversary, number, observed[number])
                ),
                "adversary": adversary,
                "update_norm": median(norm(item.update) for item in sent),
            }
            rows.append(row(fields, observed))
        return tuple(rows)

    def _with_parts(
        self, view: str, adversary: Adversary, number: int, observed: SeenT
    ) -> list[list[TrialT]]:
        """Attack the whole view, and then each audited view inside it alone.

        Whoever sees more may discard the rest, so a view must not score below a part of it.
        """
        trials = self._attack(view, view, adversary, number, observed)
        plain = observed.clip is None and observed.local is None
        separable = plain and not observed.transform.steps
        for part, names in self.names.items():
            if not names < self.names[view] or trials[0][0].untried is not None:
                continue
            inside = observed.restrict(names)
            if norm(inside.update) == 0:
                continue
            if not separable and all(most_severe(of_image) == "recovered" for of_image in trials):
                break
            # a part of a gradient is what a client would send of that part
            more = self._attack(part if separable else view, part, adversary, number, inside)
            trials = [a + b for a, b in zip(trials, more, strict=True)]
        return trials

    def _attack(
        self, sent: str, view: str, adversary: Adversary, number: int, observed: SeenT
    ) -> list[list[TrialT]]:
        """Run the attacks in turn until every example is recovered; never run one twice."""
        key = "/".join((adversary, sent, view, str(number)))
        if self.clip is not None:  # a sweep over clips and noises can share one store
            key += f"/clip {self.clip!r}/noise {self.noise_multiplier!r}"
        if key in self._tried:
            return self._tried[key]
        attacks: Iterable[str] = self._attacks
        if norm(observed.update) == 0 or not self.explanation.explained:
            untried = "nothing sent" if self.explanation.explained else "void"
            match = {"truth_match": self.explanation.residual, "untried": untried}
            attacks = ()
        else:
            net = ready(self.net, observed.training)
            match = {"truth_match": residual_of(net, observed, *self.client(number))}
        trials: list[list[TrialT]] = [[] for _ in range(self.examples)]
        for name in attacks:
            if (result := self._result(key, name, observed, number)) is not None:
                scored = self._scored(view, name, result, number, match)
                trials = [[*a, b] for a, b in zip(trials, scored, strict=True)]
                if all(most_severe(of_example) == "recovered" for of_example in trials):
                    break
        if not trials[0]:  # no attack applies
            scored = self._scored(view, NO_ATTACK, self._nothing(number), number, match)
            trials = [[trial] for trial in scored]
        self._tried[key] = trials
        return trials

    def _result(self, key: str, name: str, observed: SeenT, number: int) -> ResultT | None:
        before = self._done.get(key, {})
        if name in before:
            return before[name]
        if self.progress is not None:
            self.progress(f"{key}: {name}")
        started = time.perf_counter()
        result = self._attacks[name](self.model, observed, self.seed + number)
        if result is not None:
            result = replace(result, seconds=time.perf_counter() - started)
            self._done[key] = {**before, name: result}
        return result

    # The report.

    def labels_right(self, trials: Sequence[TrialT]) -> float | None:
        """Return the share of the labels that the trials inferred right, in any order."""
        if self.y is None or self.reveal_labels:
            return None
        right = count = 0
        for number in self.batches:
            trial = trials[number * self.examples]
            if trial.untried is None:
                guesses = [] if trial.result.labels is None else trial.result.labels.tolist()
                labels = self.y[self.rows_of(number)].tolist()
                right += (Counter(labels) & Counter(guesses)).total()
                count += self.examples
        return right / count if count else None

    def shared(self, threat: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that any report has; ``threat`` is what its kind adds to the threat."""
        z = self.noise_multiplier
        # what the accountant says of one noised release, whatever the attacks find
        bound = guarantee(Independent(1), Participation(1), noise_multiplier=z) if z else None
        return {
            "seed": self.seed,
            "threat": {
                "update": "gradient" if self.local is None else "delta",
                "origin": "computed" if self.update is None else "given",
                "local": None if self.local is None else asdict(self.local),
                "batch": self.batch,
                "transform": [str(step) for step in self.declared.steps],
                "labels": "revealed" if self.reveal_labels else "inferred",
                "clip": self.clip,
                "noise_multiplier": z,
                "noise_std": noise_std_of(self.clip, z),
                **threat,
                "read": list(self.read),
                "attacks": list(self._attacks),
            },
            "bound": bound,
            "delta": self.delta,
            "schedule": tuple(self.schedule),
            "explanation": self.explanation,
        }
