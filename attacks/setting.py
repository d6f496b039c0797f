"""Setting: what every audit is told of an update, and the rules that images and text share."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accounting import Guarantee, Independent, Participation, checks, guarantee
from accounting.checks import ConfigError
from attacks.explain import Explanation, explain
from attacks.observation import Observation, check_entries, noise_std_of, select
from attacks.report import Adversary, TrialT, Verdict, most_severe, with_union
from attacks.rounding import first_least
from attacks.update import LocalSteps, Loss, norm

SeenT = TypeVar("SeenT", bound=Observation)


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """Who sees which views of whose update, and what was done to it; ``leakage`` documents each.

    ``examples``, ``explanation``, ``observe`` and ``client`` are the audit's own.
    """

    kind: ClassVar[str] = "examples"

    model: nn.Module
    views: Mapping[str, Sequence[str]]
    loss: Loss
    batch: int = 1
    update: Mapping[str, Tensor] | None = None
    local: LocalSteps | None = None
    clip: float | None = None
    noise_multiplier: float = 0.0
    delta: float = 1e-5
    adversaries: Sequence[Adversary] | None = None
    schedule: Sequence[str] = ()
    reveal_labels: bool = True
    seed: int = 0
    progress: Callable[[str], None] | None = None

    @property
    def examples(self) -> int:
        """The number of examples."""
        raise NotImplementedError

    @property
    def explanation(self) -> Explanation:
        """Of the view, adversary and batch that the true examples explain least."""
        raise NotImplementedError

    def observe(self, view: str, adversary: Adversary, number: int) -> Observation:
        """Return what that adversary sees of batch ``number``."""
        raise NotImplementedError

    def client(self, number: int) -> tuple[Tensor, Tensor]:
        """Return batch ``number``, and what its loss predicts."""
        raise NotImplementedError

    def refuse_setting(self) -> None:
        """Raise a ConfigError for an option out of range, or two that contradict each other."""
        batch = checks.count("batch", self.batch)
        checks.count("seed", self.seed, minimum=0, maximum=checks.MOST_SEED - self.examples)
        checks.probability("delta", self.delta)
        noise_std_of(self.clip, self.noise_multiplier)
        for adversary in self.adversaries or ():
            checks.choice("adversaries", adversary, ["server", "recipient"])
        if self.update is not None:
            self._refuse_given(self.update, batch)
        if not self.views:
            raise ConfigError("views={}: name at least one, such as {'full': ['*']}.")
        if self.examples % batch:
            raise ConfigError(
                f"batch={batch}: must divide the number of {self.kind}, {self.examples}."
            )
        _ = self.names  # refuses a pattern that matches nothing

    def _refuse_given(self, update: Mapping[str, Tensor], batch: int) -> None:
        """Raise a ConfigError for an update that is not of this model, or contradicts options."""
        if not update:
            raise ConfigError("update: is empty; pass at least one tensor, by its name.")
        if batch != self.examples:
            raise ConfigError(
                f"update: a given update is of one batch; set batch to the number of {self.kind}, "
                f"{self.examples}."
            )
        every = self.model.named_parameters(remove_duplicate=False)  # a tied weight has two names
        known = dict(every) | dict(self.model.named_buffers())
        check_entries("update", update, known)
        if self.noise_multiplier and "server" in self.everyone:
            raise ConfigError(
                "adversaries: a given update already contains its noise, so that only the "
                "recipient can be audited; leave out the server."
            )

    def refuse_labels(self, logits: Tensor, labels: Tensor) -> None:
        """Raise a ConfigError for labels that the logits (..., K) do not have."""
        count = logits.shape[-1]
        if self.loss is cross_entropy and not bool(((labels >= 0) & (labels < count)).all()):
            raise ConfigError(
                f"labels: from {int(labels.min())} to {int(labels.max())}; the model's are 0 to "
                f"{count - 1}."
            )

    @cached_property
    def names(self) -> dict[str, frozenset[str]]:
        """The parameters of each view."""
        sent = [name for name, _ in self.model.named_parameters()]
        if self.update is not None:
            sent = [name for name in sent if name in self.update]
        return {view: frozenset(select(sent, pats)) for view, pats in self.every_view.items()}

    @cached_property
    def every_view(self) -> dict[str, Sequence[str]]:
        """The views, and the union of those of a schedule."""
        return with_union(self.views, self.schedule)

    @property
    def everyone(self) -> Sequence[Adversary]:
        """Who attacks."""
        if self.adversaries:
            return self.adversaries
        if not self.noise_multiplier:
            return ("server",)
        return ("server", "recipient") if self.update is None else ("recipient",)

    @property
    def batches(self) -> range:
        """The numbers of the batches."""
        return range(self.examples // self.batch)

    def rows_of(self, number: int) -> slice:
        """Return which examples are batch ``number``."""
        return slice(number * self.batch, (number + 1) * self.batch)

    def key(self, adversary: Adversary, sent: str, view: str, number: int) -> str:
        """Return the name of a result; a sweep over clips and noises can share one store."""
        what = (adversary, sent, view, str(number))
        if self.clip is None:
            return "/".join(what)
        return "/".join((*what, f"clip {self.clip!r}", f"noise {self.noise_multiplier!r}"))

    def untried(self, seen: Observation) -> Verdict | None:
        """Return the verdict on an update that cannot be attacked; None on others."""
        if not self.explanation.explained:
            return "void"
        return "nothing sent" if norm(seen.update) == 0 else None

    def with_parts(
        self,
        attack: Callable[[str, str, Adversary, int, SeenT], list[list[TrialT]]],
        view: str,
        adversary: Adversary,
        number: int,
        seen: SeenT,
    ) -> list[list[TrialT]]:
        """Attack the whole view, and then each audited view inside it alone.

        Whoever sees more may discard the rest, so a view must not score below a part of it.
        """
        tried = attack(view, view, adversary, number, seen)
        alone = seen.clip is None and seen.local is None
        for part, names in self.names.items():
            if not names < self.names[view] or tried[0][0].untried is not None:
                continue
            inside = seen.restrict(names)
            if norm(inside.update) == 0:
                continue
            if not alone and all(most_severe(trials) == "recovered" for trials in tried):
                break
            # a part of a gradient is what a client would send of that part
            more = attack(part if alone else view, part, adversary, number, inside)
            tried = [one + other for one, other in zip(tried, more, strict=True)]
        return tried

    def least_explained(self, net: nn.Module) -> Explanation:
        """Return the explanation of the view, adversary and batch that is explained least."""
        found = [
            explain(net, self.observe(view, adversary, number), *self.client(number))
            for adversary in self.everyone
            for view in self.every_view
            for number in self.batches
        ]
        return found[first_least([-one.excess for one in found], -math.inf)]

    def row_of(
        self, view: str, adversary: Adversary, seen: Sequence[Observation]
    ) -> dict[str, Any]:
        """Return the fields of a ``ViewRow`` that do not depend on what is found."""
        visible, share = self.visible(view)
        return {
            "view": view,
            "patterns": tuple(self.every_view[view]),
            "visible": visible,
            "share": share,
            "adversary": adversary,
            "update_norm": median(norm(one.update) for one in seen),
        }

    def visible(self, view: str) -> tuple[int, float]:
        """Return how many parameters a view shows, and their share."""
        sizes = {name: value.numel() for name, value in self.model.named_parameters()}
        count = sum(sizes[name] for name in self.names[view])
        return count, count / sum(sizes.values())

    def accounted(self) -> Guarantee | None:
        """Return what the accountant says of one noised release, whatever the attacks find."""
        if not self.noise_multiplier:
            return None
        return guarantee(Independent(1), Participation(1), noise_multiplier=self.noise_multiplier)

    def shared_threat(self) -> dict[str, Any]:
        """Return what the attacker knows and what was done to the update, as JSON types."""
        return {
            "update": "gradient" if self.local is None else "delta",
            "origin": "computed" if self.update is None else "given",
            "local": None if self.local is None else asdict(self.local),
            "batch": self.batch,
            "weights": "public",
            "labels": "revealed" if self.reveal_labels else "inferred",
            "clip": self.clip,
            "noise_multiplier": self.noise_multiplier,
            "noise_std": noise_std_of(self.clip, self.noise_multiplier),
            "recipient": "knows every other client's update",
        }
