"""Leakage by view: what attackers recover from the whole update and from parts of it.

The report separates "protected" from "the attack failed", and puts beside every score the one of
an image that nobody had to attack for. PSNR certifies nothing: it is a lower bound on what leaks,
never to be turned into an epsilon.

Audit: every attack on every view of every batch, for one adversary after the other.

Scoring: an attacker's result against the truth, which only the auditor has.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accounting import Guarantee, Independent, Participation, checks, guarantee
from accounting.checks import ConfigError
from attacks.analytic import invert_dense, is_dense, visible_dense
from attacks.features import layer_input
from attacks.matching import match_batch, reid_rank
from attacks.metrics import baseline_images, feature_error, psnr, ssim
from attacks.observation import Observation, observe, select
from attacks.reconstruct import Reconstruction, matching_loss
from attacks.report import (
    VERDICTS,
    Adversary,
    LeakageReport,
    LeakageRow,
    Trial,
    Verdict,
    summarise,
    with_union,
)
from attacks.suite import Attack, suite
from attacks.update import LocalSteps, Loss, as_double, double_state, norm, ready


def score(
    view: str,
    attack: str,
    found: Reconstruction,
    truth: Tensor,
    floor: Sequence[float],
    truth_match: float,
) -> list[Trial]:
    """Return a trial per image of the batch; ``floor`` is the best baseline of each, in dB."""
    order = match_batch(found.x, truth)
    x, reference = found.x[order], truth.double()
    decibels, alike = psnr(x, reference).tolist(), ssim(x, reference).tolist()
    return [
        Trial(view, attack, found, decibels[i], floor[i], alike[i], truth_match, int(order[i]))
        for i in range(len(truth))
    ]


def most_severe(trials: Iterable[Trial]) -> Verdict:
    """Return the worst verdict of several trials of one image."""
    return min((trial.verdict for trial in trials), key=VERDICTS.index)


def truth_residual(model: nn.Module, seen: Observation, x: Tensor, y: Tensor) -> float:
    """Return how well the truth itself matches: 0 but for rounding, noise, or a wrong model."""
    return float(matching_loss(model, seen, y)(as_double(x)).detach())


def feature_errors(model: nn.Module, seen: Observation, x: Tensor) -> dict[str, float]:
    """Return the relative error of each visible dense layer's input, read off the update.

    Only for a batch of one, and for layers whose bias is in view. What is exact here identifies
    the image even where its pixels do not come back.
    """
    if seen.shape[0] != 1:
        return {}
    layers = visible_dense(seen, [name for name, m in model.named_modules() if is_dense(m)])
    errors = {}
    for name, weight, bias in layers:
        reached = layer_input(model, seen, name)(as_double(x))[0].detach()
        if bias is not None and bool(bias.any()) and bool(reached.any()):
            errors[name] = feature_error(invert_dense(weight, bias), reached)
    return errors


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


def leakage(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    views: Mapping[str, Sequence[str]],
    attacks: Mapping[str, Attack] | None = None,
    batch: int = 1,
    loss: Loss = cross_entropy,
    update: Mapping[str, Tensor] | None = None,
    local: LocalSteps | None = None,
    clip: float | None = None,
    noise_multiplier: float = 0.0,
    delta: float = 1e-5,
    adversaries: Sequence[Adversary] | None = None,
    schedule: Sequence[str] = (),
    dataset_mean: Tensor | None = None,
    class_means: Tensor | None = None,
    decoys: tuple[Tensor, Tensor] | None = None,
    restarts: int = 2,
    max_evaluations: int = 500,
    reveal_labels: bool = True,
    seed: int = 0,
    done: MutableMapping[str, Found] | None = None,
    progress: Callable[[str], None] | None = None,
) -> LeakageReport:
    """Attack the update of each batch, once per view and adversary.

    The "server" sees the update after the clip and before noise. With noise there is also the
    "recipient" of the noised sum, who knows every other client's update, as the adversary of
    differential privacy does: to it the sum is one client's update plus noise.

    Args:
        model: with (B, K) logits, in the mode in which clients train; its own weights are those
            that the attacker knows.
        x: (N, C, H, W) in [0, 1].
        y: (N,) labels.
        views: name -> patterns of the parameters that the update shows, as in ``observe``. Only
            these train; the others are frozen, and public.
        attacks: tried in this order until one recovers the image; None is ``suite``.
        batch: images per update; must divide N.
        loss: see ``Observation``.
        update: of the images in ``x`` as one batch, from elsewhere; None computes it. Look at
            ``truth_match``: if the images do not explain it, weights, mode or loss are not its own.
        local: see ``Observation``.
        clip: see ``observe``.
        noise_multiplier: see ``observe``.
        delta: at which the accountant's epsilon of the noised release is printed.
        adversaries: None is the server, and the recipient where there is noise.
        schedule: the view that each round of a training sends; its worst round is reported, and
            the union of its views is audited too.
        dataset_mean: (C, H, W) mean of public data, a baseline; None leaves it out.
        class_means: (K, C, H, W) mean of each class in public data, likewise.
        decoys: (images, labels) that are not in ``x``, for the re-identification rank.
        restarts: of ``suite``.
        max_evaluations: of ``suite``.
        reveal_labels: whether the attacker is told ``y``.
        seed: of the starting points and of the noise; the same for all views.
        done: what was found before, by a key of (adversary, view, batch, clip, noise); filled as
            the audit goes, so that one that was cut off can go on. The caller keeps it to one set
            of the other options.
        progress: called with a line before each attack.

    Raises:
        ConfigError: a pattern that matches no parameter, values out of range.
    """
    batch = checks.count("batch", batch)
    if update is not None and (batch != len(x) or noise_multiplier):
        raise ConfigError("update: is of one batch, and has its own noise; set batch to len(x).")
    if not views:
        raise ConfigError("views={}: name at least one, such as {'full': ['*']}.")
    if len(x) < 1 or len(x) != len(y):
        raise ConfigError(f"x, y: {len(x)} images and {len(y)} labels; must be equally many.")
    if len(x) % batch:
        raise ConfigError(f"batch={batch}: must divide the number of images, {len(x)}.")
    means = None if class_means is None else class_means[y]
    guesses = baseline_images(x, dataset_mean, means, seed=seed)
    scores = {name: psnr(guess, x.double()) for name, guess in guesses.items()}
    audit = Audit(
        model=model,
        x=x.detach(),
        y=y,
        views=with_union(views, schedule),
        attacks=suite(restarts=restarts, max_evaluations=max_evaluations)
        if attacks is None
        else attacks,
        batch=batch,
        options={"loss": loss, "local": local, "clip": clip, "reveal_labels": reveal_labels},
        update=update,
        noise_multiplier=noise_multiplier,
        floor=torch.stack(list(scores.values())).amax(0).tolist(),
        decoys=decoys,
        seed=checks.count("seed", seed, minimum=0),
        done={} if done is None else done,
        progress=progress,
    )
    everyone: tuple[Adversary, ...] = ("server", "recipient") if noise_multiplier else ("server",)
    rows = tuple(row for adversary in adversaries or everyone for row in audit.rows(adversary))
    return LeakageReport(
        rows=rows,
        truth=x.detach().clone(),
        baselines={name: tuple(found.tolist()) for name, found in scores.items()},
        labels_revealed=reveal_labels,
        seed=seed,
        threat=_threat(audit),
        losses=tuple(_loss(model, *audit.images(number), loss) for number in audit.batches),
        baseline_images=guesses,
        bound=_bound(noise_multiplier),
        delta=checks.probability("delta", delta),
        schedule=summarise(rows, schedule) if schedule else None,
        decoys=0 if decoys is None else len(decoys[0]),
    )


def _bound(noise_multiplier: float) -> Guarantee | None:
    """What the accountant says of one noised release, whatever the attacks found."""
    if not noise_multiplier:
        return None
    return guarantee(Independent(1), Participation(1), noise_multiplier=noise_multiplier)


def _loss(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> float:
    twin = ready(model, model.training).double()
    with torch.no_grad():
        return float(loss(twin(x.double()), y))


def _threat(audit: Audit) -> dict[str, Any]:
    """What the attacker knows and what was done to the update, as JSON types."""
    local = audit.options["local"]
    clip = audit.options["clip"]
    return {
        "update": "gradient" if local is None else "delta",
        "origin": "computed" if audit.update is None else "given",
        "local": None if local is None else asdict(local),
        "batch": audit.batch,
        "mode": "train" if audit.model.training else "eval",
        "weights": "public",
        "labels": "revealed" if audit.options["reveal_labels"] else "inferred",
        "clip": clip,
        "noise_multiplier": audit.noise_multiplier,
        "noise_std": audit.noise_multiplier * clip if audit.noise_multiplier else 0.0,
        "recipient": "knows every other client's update",
        "attacks": list(audit.attacks),
    }
