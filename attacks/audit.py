"""Audit: every attack on every view of every batch, for one adversary after the other."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from accounting.checks import ConfigError
from attacks.matching import reid_rank
from attacks.observation import Observation, observe, select
from attacks.reconstruct import Reconstruction
from attacks.report import Adversary, LeakageRow, Trial
from attacks.scoring import feature_errors, most_severe, score, truth_residual
from attacks.suite import Attack
from attacks.update import as_double, double_state, norm

Found = dict[str, Reconstruction]  # what each attack found on one batch, by its name
Tried = list[list[Trial]]  # per image of a batch, the trials of all attacks


@dataclass(frozen=True, kw_only=True, eq=False)
class Audit:
    """The plan of an audit; ``leakage`` documents the fields, ``floor`` is the best baseline."""

    model: nn.Module
    x: Tensor
    y: Tensor
    views: Mapping[str, Sequence[str]]
    attacks: Mapping[str, Attack]
    batch: int
    options: Mapping[str, Any]
    update: Mapping[str, Tensor] | None
    noise_multiplier: float
    floor: Sequence[float]
    decoys: tuple[Tensor, Tensor] | None
    seed: int
    done: MutableMapping[str, Found]
    progress: Callable[[str], None] | None
    tried: dict[str, Tried] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _ = self.names  # a pattern that matches nothing is an error before the first attack

    @cached_property
    def names(self) -> dict[str, frozenset[str]]:
        """The parameters of each view."""
        known = [name for name, _ in self.model.named_parameters()]
        if self.update is not None:
            known = list(self.update)
        return {view: frozenset(select(known, pats)) for view, pats in self.views.items()}

    @property
    def batches(self) -> range:
        """Numbers of the batches."""
        return range(len(self.x) // self.batch)

    def rows(self, adversary: Adversary) -> list[LeakageRow]:
        """Attack as that adversary."""
        return [self._row(view, adversary) for view in self.views]

    def images(self, number: int) -> tuple[Tensor, Tensor]:
        """A batch and its labels."""
        rows = slice(number * self.batch, (number + 1) * self.batch)
        return self.x[rows], self.y[rows]

    def observe(self, view: str, adversary: Adversary, number: int) -> Observation:
        """What that adversary sees of that batch."""
        if self.update is not None:
            return self._given(self.update, view)
        noise: dict[str, Any] = {}
        if adversary == "recipient":
            generator = torch.Generator().manual_seed(self.seed + number)
            noise = {"noise_multiplier": self.noise_multiplier, "generator": generator}
        x, y = self.images(number)
        return observe(self.model, x, y, visible=self.views[view], **noise, **self.options)

    def _given(self, update: Mapping[str, Tensor], view: str) -> Observation:
        b, c, h, w = self.x.shape
        whole = Observation(
            update={name: as_double(value) for name, value in update.items()},
            state=double_state(self.model),
            shape=(b, c, h, w),
            labels=self.y if self.options["reveal_labels"] else None,
            clip=self.options["clip"],
            loss=self.options["loss"],
            local=self.options["local"],
            training=self.model.training,
        )
        return whole.restrict(select(list(whole.update), self.views[view]))

    def _row(self, view: str, adversary: Adversary) -> LeakageRow:
        seen = [self.observe(view, adversary, number) for number in self.batches]
        by_batch = [self._attack_with_parts(view, adversary, n, seen[n]) for n in self.batches]
        tried = [trials for batch in by_batch for trials in batch]
        alone = [[trial for trial in trials if trial.view == view] for trials in tried]
        sizes = {name: value.numel() for name, value in self.model.named_parameters()}
        visible = sum(sizes[name] for name in self.names[view])
        errors = [feature_errors(self.model, seen[n], self.images(n)[0]) for n in self.batches]
        return LeakageRow(
            view=view,
            patterns=tuple(self.views[view]),
            visible=visible,
            share=visible / sum(sizes.values()),
            unknowns=self.batch * self.x[0].numel(),
            own=tuple(min(one, key=lambda trial: trial.reconstruction.match) for one in alone),
            best=tuple(max(one, key=lambda trial: trial.psnr) for one in tried),
            alone=tuple(tuple(one) for one in alone),
            verdict=most_severe(trial for one in tried for trial in one),
            adversary=adversary,
            update_norm=median(norm(one.update) for one in seen),
            ranks=tuple(self._rank(n, seen[n]) for n in self.batches) if self._ranks else (),
            feature_error={k: max(one.get(k, 0.0) for one in errors) for k in errors[0]},
        )

    def _attack_with_parts(
        self, view: str, adversary: Adversary, number: int, seen: Observation
    ) -> Tried:
        """Attack what the view shows, and each audited part of it alone."""
        tried = self._attack(view, view, adversary, number, seen)
        for part, names in self.names.items():
            if not names < self.names[view]:
                continue
            if seen.clip is None and seen.local is None:
                sent = part  # a part of a gradient is what a client would send of that part
            elif all(most_severe(trials) == "recovered" for trials in tried):
                break
            else:
                sent = view
            more = self._attack(sent, part, adversary, number, seen.restrict(names))
            tried = [one + other for one, other in zip(tried, more, strict=True)]
        return tried

    def _attack(
        self, sent: str, view: str, adversary: Adversary, number: int, seen: Observation
    ) -> Tried:
        """Run the attacks in turn until all images are recovered; nothing is run twice."""
        key = "/".join((adversary, sent, view, str(number), *self._defence))
        if key not in self.tried:
            x, y = self.images(number)
            floor = self.floor[number * self.batch :][: self.batch]
            truth = truth_residual(self.model, seen, x, y)
            tried: Tried = [[] for _ in x]
            for name in self.attacks:
                found = self._found(key, name, seen, number)
                if found is None:
                    continue
                for one, trial in zip(
                    tried, score(view, name, found, x, floor, truth), strict=True
                ):
                    one.append(trial)
                if all(most_severe(one) == "recovered" for one in tried):
                    break
            if not tried[0]:
                raise ConfigError(
                    f"attacks: none of {', '.join(self.attacks)} applies to {view!r}."
                )
            self.tried[key] = tried
        return self.tried[key]

    def _found(self, key: str, name: str, seen: Observation, number: int) -> Reconstruction | None:
        before = self.done.get(key, {})
        if name in before:
            return before[name]
        if self.progress is not None:
            self.progress(f"{key}: {name}")
        found = self.attacks[name](self.model, seen, self.seed + number)
        if found is not None:
            self.done[key] = {**before, name: found}
        return found

    @property
    def _defence(self) -> tuple[str, ...]:
        """Part of a key, so that a sweep over clips and noises can keep its results together."""
        if self.options["clip"] is None:
            return ()
        return f"clip {self.options['clip']!r}", f"noise {self.noise_multiplier!r}"

    @property
    def _ranks(self) -> bool:
        return self.decoys is not None and self.batch == 1

    def _rank(self, number: int, seen: Observation) -> int:
        if self.decoys is None:
            return 0
        (x, y), (decoys, labels) = self.images(number), self.decoys
        return reid_rank(self.model, seen, x, decoys, torch.cat([y, labels]))
