"""Leakage audit: attack what one client sends, whole and in parts, and report what came back.

The report separates "protected" from "the attack failed", and puts the score of an image that
needs no attack beside every score. PSNR certifies nothing: it is a lower bound on what leaks,
never to be turned into an epsilon. An update that the true images do not explain is not attacked.

It is one file above 500 lines because the options are documented once, where they are checked.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accounting.checks import ConfigError
from attacks.explain import Explanation
from attacks.metrics import ORACLES, baseline_images, feature_error, match_batch, psnr, ssim
from attacks.observation import Observation, noise_std_of, observe, select
from attacks.reconstruction.analytic import invert_dense, is_dense, visible_dense
from attacks.reconstruction.batch_statistics import buffers_after, sent_statistics, with_buffers
from attacks.reconstruction.features import layer_input
from attacks.reconstruction.labels import label_candidates
from attacks.reconstruction.reconstruct import Reconstruction, matching_loss, reid_rank
from attacks.report import (
    Adversary,
    LeakageReport,
    LeakageRow,
    Trial,
    Verdict,
    most_severe,
    summarise,
)
from attacks.setting import Setting
from attacks.suite import Attack, suite
from attacks.update import LocalSteps, Loss, as_double, double_state, norm, ready

_DATASET = "dataset mean"
_OTHERS = "mean of others"

Found = dict[str, Reconstruction]  # what each attack found on one batch, by the attack's name
TrialsByImage = list[list[Trial]]  # for each image of a batch, the trials of all attacks


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
    reveal_labels: bool = True,
    send_buffers: bool = False,
    seed: int = 0,
    done: MutableMapping[str, Found] | None = None,
    progress: Callable[[str], None] | None = None,
) -> LeakageReport:
    """Attack the update of each batch, once per view and adversary.

    The "server" sees the update after the clip and before noise. With noise there is also the
    "recipient" of the noised sum, who knows every other client's update, as the adversary of
    differential privacy does: to it the sum is one client's update plus noise.

    Args:
        model: has (B, K) logits and is in the mode in which clients train; the attacker knows
            its present weights.
        x: (N, C, H, W) in [0, 1].
        y: (N,) labels.
        views: name -> patterns of the parameters that the update shows, as in ``observe``. Only
            these train; the others are frozen, and public.
        attacks: tried in this order until one recovers the image; None is ``suite()``.
        batch: images per update; must divide N.
        loss: see ``Observation``.
        update: a given update of the images in ``x`` as one batch; None computes it. If the images
            do not explain it, nothing is attacked: the report is void and says what is likely
            wrong. ``clip`` and ``noise_multiplier`` state what was done to it. Running statistics
            in it count too: their change beside local steps, else as they are after the round.
        local: see ``Observation``.
        clip: see ``observe``.
        noise_multiplier: see ``observe``.
        delta: at which the accountant's epsilon of the noised release is printed.
        adversaries: None is the server, and the recipient where there is noise.
        schedule: the view that each round of a training sends. The report then names the worst
            round, and the union of these views is audited too.
        dataset_mean: (C, H, W) mean of public data, a baseline. None takes the mean of the decoys,
            or without decoys that of the images in the other batches; for want of both the report
            says that this baseline is missing.
        class_means: (K, C, H, W) mean of each class in public data, a baseline; None leaves it
            out. An attacker who is not told the labels does not know which: an oracle then.
        decoys: (images, labels) that are not in ``x``, for the re-identification rank.
        reveal_labels: whether the attacker is told ``y``.
        send_buffers: whether clients also send the running statistics of batch normalisation, after
            a gradient or one local step. A given update has them, or has not.
        seed: of the starting points and of the noise; the same for all views.
        done: results so far, by a key of (adversary, view, batch, clip, noise). The audit reads
            and fills it, so that an interrupted audit can resume. One mapping serves one set of
            the other options; the caller sees to that.
        progress: called with a line before each attack.

    Raises:
        ConfigError: a pattern that matches no parameter, or an option out of range.
    """
    audit = Audit(
        model=model,
        x=x,
        y=y,
        views=views,
        attacks=attacks,
        batch=batch,
        loss=loss,
        update=update,
        local=local,
        clip=clip,
        noise_multiplier=noise_multiplier,
        delta=delta,
        adversaries=adversaries,
        schedule=schedule,
        dataset_mean=dataset_mean,
        class_means=class_means,
        decoys=decoys,
        reveal_labels=reveal_labels,
        send_buffers=send_buffers,
        seed=seed,
        done=done,
        progress=progress,
    )
    return audit.report()


@dataclass(frozen=True, kw_only=True, eq=False)
class Audit(Setting):
    """A model, images and the options of ``leakage``, which documents them; checked when made.

    Raises:
        ConfigError: an option out of range, or two that contradict each other.
    """

    kind: ClassVar[str] = "images"

    x: Tensor
    y: Tensor
    attacks: Mapping[str, Attack] | None = None
    loss: Loss = cross_entropy
    dataset_mean: Tensor | None = None
    class_means: Tensor | None = None
    decoys: tuple[Tensor, Tensor] | None = None
    send_buffers: bool = False
    done: MutableMapping[str, Found] | None = None
    _tried: dict[str, TrialsByImage] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.refuse()

    @property
    def examples(self) -> int:
        """The number of images."""
        return len(self.x)

    def refuse(self) -> None:
        """Raise a ConfigError for options with which no audit is possible, before any attack."""
        if len(self.x) < 1 or len(self.x) != len(self.y):
            raise ConfigError(
                f"x, y: {len(self.x)} images and {len(self.y)} labels; pass one label per image, "
                "and at least one image."
            )
        if self.update is not None and self.send_buffers:
            raise ConfigError("send_buffers: a given update has its buffers, or has not.")
        self.refuse_setting()
        with torch.no_grad():
            net = ready(self.model, training=False).double()
            self.refuse_labels(net(self.x[:1].double()), self.y)
        if self.decoys is not None and self.batch > 1:
            raise ConfigError(
                f"decoys: rank an image by itself; leave them out at batch={self.batch}."
            )

    def report(self) -> LeakageReport:
        """Run every attack on every view of every batch, for one adversary after the other.

        If the true images do not explain the update, nothing is attacked.
        """
        rows = tuple(row for adversary in self.everyone for row in self.rows(adversary))
        return LeakageReport(
            rows=rows,
            truth=self.x.detach().clone(),
            baselines={name: tuple(found.tolist()) for name, found in self._baselines.items()},
            labels_revealed=self.reveal_labels,
            seed=self.seed,
            threat=self._threat(),
            losses=tuple(self._client_loss(number) for number in self.batches),
            baseline_images=self._guesses,
            bound=self.accounted(),
            delta=self.delta,
            schedule=summarise(rows, self.schedule) if self.schedule else None,
            decoys=0 if self.decoys is None else len(self.decoys[0]),
            oracles=self._oracles,
            missing=() if _DATASET in self._guesses or _OTHERS in self._guesses else (_DATASET,),
            explanation=self.explanation,
        )

    def rows(self, adversary: Adversary) -> list[LeakageRow]:
        """Return a row per view, as attacked by that adversary."""
        return [self._row(view, adversary) for view in self.every_view]

    def client(self, number: int) -> tuple[Tensor, Tensor]:
        """Return batch ``number`` and its labels."""
        rows = self.rows_of(number)
        return self.x[rows].detach(), self.y[rows]

    def observe(self, view: str, adversary: Adversary, number: int) -> Observation:
        """Return what that adversary sees of batch ``number``."""
        if self.update is not None:
            return self._observe_given(self.update, view)
        noise: dict[str, Any] = {}
        if adversary == "recipient":
            generator = torch.Generator().manual_seed(self.seed + number)
            noise = {"noise_multiplier": self.noise_multiplier, "generator": generator}
        x, y = self.client(number)
        seen = observe(
            *(self.model, x, y),
            visible=self.every_view[view],
            loss=self.loss,
            local=self.local,
            clip=self.clip,
            reveal_labels=self.reveal_labels,
            **noise,
        )
        return with_buffers(self.model, seen, x) if self.send_buffers else seen

    @cached_property
    def _attacks(self) -> Mapping[str, Attack]:
        return suite() if self.attacks is None else self.attacks

    @cached_property
    def _done(self) -> MutableMapping[str, Found]:
        return {} if self.done is None else self.done  # an empty store is false, and still a store

    @cached_property
    def explanation(self) -> Explanation:
        """Of the view, adversary and batch that the true images explain least."""
        return self.least_explained(self.model)

    @cached_property
    def _guesses(self) -> dict[str, Tensor]:
        """Images (N, C, H, W) to compare with; those in ``_oracles`` know the truth."""
        means = None if self.class_means is None else self.class_means[self.y]
        public = self.dataset_mean
        if public is None and self.decoys is not None and len(self.decoys[0]):
            public = self.decoys[0].double().mean(0).clamp(0, 1)
        guesses = baseline_images(self.x, public, means, seed=self.seed)
        if public is None and len(self.batches) > 1:
            guesses[_OTHERS] = _mean_of_others(self.x.detach().double(), self.batch)
        return guesses

    @property
    def _oracles(self) -> tuple[str, ...]:
        labelled = () if self.reveal_labels or self.class_means is None else ("class mean",)
        return (*ORACLES, *labelled)

    @cached_property
    def _baselines(self) -> dict[str, Tensor]:
        truth = self.x.double()
        return {name: psnr(guess, truth) for name, guess in self._guesses.items()}

    @cached_property
    def _floor(self) -> list[float]:
        """The best baseline of each image that does not know the truth, in dB."""
        fair = [found for name, found in self._baselines.items() if name not in self._oracles]
        best: list[float] = torch.stack(fair).amax(0).tolist()
        return best

    def _observe_given(self, update: Mapping[str, Tensor], view: str) -> Observation:
        b, c, h, w = self.x.shape
        buffers = dict(self.model.named_buffers())
        whole = Observation(
            update={name: as_double(v) for name, v in update.items() if name not in buffers},
            state=double_state(self.model),
            shape=(b, c, h, w),
            labels=self.y if self.reveal_labels else None,
            clip=self.clip,
            noise_std=noise_std_of(self.clip, self.noise_multiplier),
            loss=self.loss,
            local=self.local,
            training=self.model.training,
            buffers=buffers_after(self.model, update, changes=self.local is not None),
        )
        return whole.restrict(select(list(whole.update), self.every_view[view]))

    def _row(self, view: str, adversary: Adversary) -> LeakageRow:
        seen = [self.observe(view, adversary, number) for number in self.batches]
        by_batch = [
            self.with_parts(self._attack, view, adversary, n, seen[n]) for n in self.batches
        ]
        tried = [trials for batch in by_batch for trials in batch]
        alone = [[trial for trial in trials if trial.view == view] for trials in tried]
        sent = [n for n in self.batches if norm(seen[n].update) > 0 and self.explanation.explained]
        errors = [feature_errors(self.model, seen[n], self.client(n)[0]) for n in sent] or [{}]
        ranked = self.decoys is not None and self.batch == 1 and len(sent) == len(self.batches)
        own = tuple(min(one, key=lambda trial: trial.reconstruction.match) for one in alone)
        return LeakageRow(
            **self.row_of(view, adversary, seen),
            unknowns=self.batch * self.x[0].numel(),
            own=own,
            best=tuple(max(one, key=lambda trial: trial.psnr) for one in tried),
            alone=tuple(tuple(one) for one in alone),
            verdict=most_severe(trial for one in tried for trial in one),
            ranks=tuple(self._rank(n, seen[n]) for n in self.batches) if ranked else (),
            feature_error={k: max(one.get(k, 0.0) for one in errors) for k in errors[0]},
            labels_right=None if self.reveal_labels else self._labels_right(own),
            labels_doubtful=any(len(self._label_guesses(seen[n])) > 1 for n in sent),
        )

    def _labels_right(self, own: Sequence[Trial]) -> float | None:
        """Return the share of the labels that the attacks inferred right, in any order."""
        tried = [n for n in self.batches if own[n * self.batch].untried is None]
        right = 0
        for number in tried:
            truth = Counter(self.client(number)[1].tolist())
            guess = Counter(own[number * self.batch].reconstruction.labels.tolist())
            right += (truth & guess).total()
        return right / (len(tried) * self.batch) if tried else None

    def _label_guesses(self, seen: Observation) -> list[Tensor]:
        try:
            return label_candidates(self.model, seen)
        except ConfigError:  # an attack of one's own may do without
            return []

    def _attack(
        self, sent: str, view: str, adversary: Adversary, number: int, seen: Observation
    ) -> TrialsByImage:
        """Run the attacks in turn until all images are recovered; never run one twice."""
        key = self.key(adversary, sent, view, number)
        if key not in self._tried:
            x, y = self.client(number)
            floor = self._floor[self.rows_of(number)]
            untried = self.untried(seen)
            if untried is not None:
                return _nothing_attacked(view, untried, x, y, floor, self.explanation.residual)
            truth = truth_residual(self.model, seen, x, y)
            tried: TrialsByImage = [[] for _ in x]
            for name in self._attacks:
                found = self._find(key, name, seen, number)
                if found is None:
                    continue
                trials = score(view, name, found, x, floor, truth)
                for one, trial in zip(tried, trials, strict=True):
                    one.append(trial)
                if all(most_severe(one) == "recovered" for one in tried):
                    break
            if not tried[0]:
                raise ConfigError(
                    f"attacks: none of {', '.join(self._attacks)} applies to {view!r}."
                )
            self._tried[key] = tried
        return self._tried[key]

    def _find(self, key: str, name: str, seen: Observation, number: int) -> Reconstruction | None:
        before = self._done.get(key, {})
        if name in before:
            return before[name]
        if self.progress is not None:
            self.progress(f"{key}: {name}")
        found = self._attacks[name](self.model, seen, self.seed + number)
        if found is not None:
            self._done[key] = {**before, name: found}
        return found

    def _rank(self, number: int, seen: Observation) -> int:
        if self.decoys is None:
            return 0
        x, y = self.client(number)
        decoys, labels = self.decoys
        return reid_rank(self.model, seen, x, decoys, torch.cat([y, labels]))

    def _client_loss(self, number: int) -> float:
        x, y = self.client(number)
        twin = ready(self.model, self.model.training).double()
        with torch.no_grad():
            return float(self.loss(twin(x.double()), y))

    def _buffers_told(self) -> str:
        """Return whether batch statistics were sent, and can be told from the buffers."""
        seen = self.observe(next(iter(self.every_view)), self.everyone[0], 0)
        if not seen.buffers:
            return "not sent"
        usable = bool(sent_statistics(self.model, seen))
        return "sent" if usable else "sent, but not of one batch in training mode: not used"

    def _threat(self) -> dict[str, Any]:
        """Return what the attacker knows and what was done to the update, as JSON types."""
        return self.shared_threat() | {
            "mode": "train" if self.model.training else "eval",
            "buffers": self._buffers_told(),
            "attacks": list(self._attacks),
        }


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
    x = found.x[order]
    reference = truth.double()
    decibels = psnr(x, reference).tolist()
    alike = ssim(x, reference).tolist()
    return [
        Trial(view, attack, found, decibels[i], floor[i], alike[i], truth_match, int(order[i]))
        for i in range(len(truth))
    ]


def _nothing_attacked(
    view: str, untried: Verdict, x: Tensor, y: Tensor, floor: Sequence[float], residual: float
) -> TrialsByImage:
    """Return a trial per image that holds a grey image."""
    grey = torch.full_like(x, 0.5, dtype=torch.float64)
    none = Reconstruction(grey, y, math.inf, "not run", 0, 0.0, ())
    trials = score(view, "none", none, x, floor, residual)
    return [[replace(trial, untried=untried)] for trial in trials]


def truth_residual(model: nn.Module, seen: Observation, x: Tensor, y: Tensor) -> float:
    """Return how well the truth itself matches: 0 up to rounding, noise, or a wrong model."""
    return float(matching_loss(model, seen, y)(as_double(x)).detach())


def feature_errors(model: nn.Module, seen: Observation, x: Tensor) -> dict[str, float]:
    """Return the relative error of each visible dense layer's input, read off the update.

    Only for a batch of one, and for layers whose bias is in view. What is exact here identifies
    the image even where its pixels cannot be reconstructed.
    """
    if seen.shape[0] != 1:
        return {}
    layers = visible_dense(seen, [name for name, m in model.named_modules() if is_dense(m)])
    errors = {}
    for name, weight, bias in layers:
        rows = layer_input(model, seen, name)(as_double(x)).detach()
        if len(rows) != 1:  # of a layer that acts on each token, or is not called
            continue
        reached = rows[0]
        if bias is not None and bool(bias.any()) and bool(reached.any()):
            errors[name] = feature_error(invert_dense(weight, bias), reached)
    return errors


def _mean_of_others(x: Tensor, batch: int) -> Tensor:
    """Return for each image the mean of the images in the other batches, (N, C, H, W)."""
    own = x.reshape(-1, batch, *x.shape[1:]).sum(1)
    means: Tensor = (x.sum(0) - own) / (len(x) - batch)
    return means.clamp(0, 1).repeat_interleave(batch, 0)
