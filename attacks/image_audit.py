"""Image audit: what an update gives away of the images that a client trained on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from accounting.checks import ConfigError
from attacks.audit import Attack, Audit
from attacks.metrics import (
    ORACLES,
    baseline_images,
    feature_error,
    match_batch,
    psnr,
    rarely_passed,
    ssim,
)
from attacks.observation import Observation, observe
from attacks.reconstruction.analytic import invert_dense, invert_first_dense, visible_dense
from attacks.reconstruction.april import april
from attacks.reconstruction.batch_statistics import buffers_after, sent_statistics, with_buffers
from attacks.reconstruction.cosine import cosine_tv
from attacks.reconstruction.features import dense_then_invert, layer_input
from attacks.reconstruction.labels import label_candidates
from attacks.reconstruction.reconstruct import FALLING, Reconstruction, dlg, reid_rank
from attacks.reconstruction.single_step import before_step
from attacks.reconstruction.spear import spear
from attacks.report import RECOVERED_DB, ImageTrial, LeakageReport, LeakageRow
from attacks.update import as_double, norm, ready

ImageAttack = Attack[Observation, Reconstruction]
_STATISTICS = 1.0  # weight of the batch statistics beside the residual
_DRAWS = 30_000  # of spear: seconds
_DATASET = "dataset mean"
_OTHERS = "mean of others"


def suite(
    *,
    restarts: int = 2,
    max_evaluations: int = 500,
    newton_steps: int = 10,
    steps: int = 1000,
    tv: float = 1e-2,
) -> dict[str, ImageAttack]:
    """Return every attack on images by name, cheapest first; each returns None where it cannot.

    Args:
        restarts: of ``dlg`` and ``dense_then_invert``; ``cosine_tv`` takes twice as many.
        max_evaluations: of each search of those two, as ``newton_steps``.
        newton_steps: 0 leaves Gauss-Newton out.
        steps: of ``cosine_tv``; 0 leaves it out.
        tv: weight of the prior in "dlg + tv", and of the one between ten times and a tenth of it
            in "dlg + falling tv"; 0 leaves both out. The restarts of ``cosine_tv`` take 200
            times it and twice it in turn, in units of the distance at the start.
    """
    search = {
        "restarts": restarts,
        "max_evaluations": max_evaluations,
        "newton_steps": newton_steps,
    }
    sent: dict[str, Any] = {**search, "newton_steps": 0, "statistics": _STATISTICS}
    attacks: dict[str, ImageAttack] = {
        "invert_dense": lambda model, observed, _: invert_first_dense(model, observed),
        "april": lambda model, observed, _: april(model, observed),
        "spear": _seeded(spear, draws=_DRAWS),
        "dense_then_invert": _seeded(dense_then_invert, **search),
        "dlg": _seeded(dlg, **search),
        "dlg + statistics": lambda model, observed, seed: (
            dlg(model, observed, seed=seed, **sent) if sent_statistics(model, observed) else None
        ),
    }
    if steps:
        options = {"restarts": 2 * restarts, "steps": steps, "tv": (200 * tv, 2 * tv)}
        attacks["cosine_tv"] = _seeded(cosine_tv, **options)
    if tv:
        search["restarts"] = 1
        falling = tuple(10 * tv * weight / FALLING[0] for weight in FALLING)
        attacks["dlg + tv"] = _seeded(dlg, **search, tv=tv)
        attacks["dlg + falling tv"] = _seeded(dlg, **search, tv=falling)
    return attacks


def _seeded(attack: Callable[..., Reconstruction | None], **options: Any) -> ImageAttack:  # noqa: ANN401
    return lambda model, observed, seed: attack(model, observed, seed=seed, **options)


def leakage(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> LeakageReport:  # noqa: ANN401
    """Attack the update of each batch of images; ``views`` and all options are of ImageAudit."""
    return ImageAudit(model=model, x=x, y=y, **options).report()


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageAudit(Audit[Observation, Reconstruction, ImageTrial]):
    """Images, and what an attacker is told of them; for the other options see ``Audit``.

    The model has (B, K) logits and is in the mode in which clients train. Running statistics in a
    given update count too: their change beside local steps, else as they are after the round.

    Args:
        x: (N, C, H, W) in [0, 1].
        dataset_mean: (C, H, W) mean of public data, a baseline. None takes the mean of
            ``public``, else of the decoys, else of the images in the other batches; for want of all
            the report says that this baseline is missing.
        class_means: (N, C, H, W) mean of each image's class in public data, a baseline; an oracle
            where the attacker is not told the labels.
        decoys: (images, labels) that are not in ``x``, for the re-identification rank.
        public: (images, labels) that are not in ``x``. Only what is closer than all but one in a
            thousand of the image's class is partial. None compares with no other image.
        send_buffers: whether clients also send the running statistics of batch normalisation, after
            a gradient or one local step. A given update has them, or has not.
    """

    kind = "images"
    suite = staticmethod(suite)

    y: Tensor
    dataset_mean: Tensor | None = None
    class_means: Tensor | None = None
    decoys: tuple[Tensor, Tensor] | None = None
    public: tuple[Tensor, Tensor] | None = None
    send_buffers: bool = False

    def __post_init__(self) -> None:
        if len(self.x) < 1 or len(self.x) != len(self.y):
            raise ConfigError(
                f"x, y: {len(self.x)} images and {len(self.y)} labels; pass one label per image, "
                "and at least one image."
            )
        if self.update is not None and self.send_buffers:
            raise ConfigError("send_buffers: a given update has its buffers, or has not.")
        self.refuse()
        with torch.no_grad():
            net = ready(self.model, training=False).double()
            self.refuse_labels(net(self.x[:1].double()), self.y)
        if self.decoys is not None and self.examples > 1:
            raise ConfigError(
                f"decoys: rank an image by itself; leave them out of updates of {self.examples}."
            )
        if self.send_buffers and self.declared.clients > 1:
            raise ConfigError("send_buffers: those of a sum of clients are not matched.")

    def _computed(self, number: int, options: dict[str, Any]) -> Observation:
        x, y = self.client(number)
        observed = observe(self.model, x, y, **options)
        return with_buffers(self.model, observed, x) if self.send_buffers else observed

    def _given(self, fields: dict[str, Any]) -> Observation:
        buffers = buffers_after(self.model, self.update or {}, changes=self.local is not None)
        return Observation(**fields, training=self.model.training, buffers=buffers)

    def _told(self, sent: Observation) -> Observation:
        return before_step(sent)

    def _nothing(self, number: int) -> Reconstruction:
        x, y = self.client(number)
        grey = torch.full_like(x, 0.5, dtype=torch.float64)
        return Reconstruction(grey, y, math.inf, "not run", 0, ())

    def _scored(
        self, view: str, attack: str, result: Reconstruction, number: int, match: dict[str, Any]
    ) -> list[ImageTrial]:
        rows = self.rows_of(number)
        guesses = list(zip(self._floor[rows], self._chance[rows], strict=True))
        return score(view, attack, result, self.client(number)[0], guesses, match)

    def report(self) -> LeakageReport:
        """Run every attack on every view of every batch, for one adversary after the other."""
        seen = self.observe(next(iter(self.every_view)), self.everyone[0], 0)
        return LeakageReport(
            rows=self.rows(self._image_row),
            truth=self.x.detach().clone(),
            baselines={name: tuple(values.tolist()) for name, values in self._baselines.items()},
            baseline_images=self._guesses,
            decoys=0 if self.decoys is None else len(self.decoys[0]),
            chance=tuple(self._chance),
            oracles=self._oracles,
            missing=() if _DATASET in self._guesses or _OTHERS in self._guesses else (_DATASET,),
            **self.shared(
                {
                    "mode": "train" if self.model.training else "eval",
                    "buffers": "sent" if seen.buffers else "not sent",
                }
            ),
        )

    def _image_row(self, fields: dict[str, Any], observed: list[Observation]) -> LeakageRow:
        row = LeakageRow(**fields)
        sent = [
            n for n in self.batches if norm(observed[n].update) > 0 and self.explanation.explained
        ]
        errors = [feature_errors(self.model, observed[n], self.client(n)[0]) for n in sent] or [{}]
        ranks = []
        if self.decoys is not None and len(sent) == len(self.batches):
            decoys, labels = self.decoys
            for seen, n in zip(observed, self.batches, strict=True):
                x, y = self.client(n)
                ranks.append(reid_rank(self.model, seen, x, decoys, torch.cat([y, labels])))
        return replace(
            row,
            ranks=tuple(ranks),
            feature_error={k: max(error.get(k, 0.0) for error in errors) for k in errors[0]},
            labels_right=self.labels_right(row.own),
            labels_doubtful=any(len(label_candidates(self.model, observed[n])) > 1 for n in sent),
        )

    @cached_property
    def _guesses(self) -> dict[str, Tensor]:
        """Images (N, C, H, W) to compare with; those in ``_oracles`` know the truth."""
        public = self.dataset_mean
        for images, _ in (self.public or self._none, self.decoys or self._none):
            if public is None and len(images):
                public = images.double().mean(0).clamp(0, 1)
        guesses = baseline_images(self.x, public, self.class_means, seed=self.seed)
        if public is None and len(self.batches) > 1:
            x = self.x.detach().double()
            batch_sums = x.reshape(-1, self.examples, *x.shape[1:]).sum(1)
            means_of_others = ((x.sum(0) - batch_sums) / (len(x) - self.examples)).clamp(0, 1)
            guesses[_OTHERS] = means_of_others.repeat_interleave(self.examples, 0)
        return guesses

    @property
    def _none(self) -> tuple[Tensor, Tensor]:
        return self.x[:0], self.y[:0]

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
        fair = [values for name, values in self._baselines.items() if name not in self._oracles]
        best: list[float] = torch.stack(fair).amax(0).tolist()
        return best

    @cached_property
    def _chance(self) -> list[float]:
        """PSNR of each image that one in a thousand public images of its class passes, in dB.

        A public image of 30 dB or more is the same picture, and does not count.
        """
        images, labels = self.public or self._none
        chance = []
        for truth, label in zip(self.x, self.y, strict=True):
            alike = images[labels == label]
            scores = psnr(alike, truth.expand_as(alike)) if len(alike) else torch.empty(0)
            chance.append(rarely_passed(scores[scores < RECOVERED_DB].tolist()))
        return chance


def score(
    view: str,
    attack: str,
    result: Reconstruction,
    truth: Tensor,
    guesses: Sequence[tuple[float, float]],
    match: dict[str, Any],
) -> list[ImageTrial]:
    """Return a trial per image of the batch.

    ``guesses`` are, in dB, each image's best baseline, and what one in a thousand others passes.
    ``match`` has the truth_match of the trials, and why nothing was tried.
    """
    order = match_batch(result.x, truth)
    x = result.x[order]
    reference = truth.double()
    scores = zip(psnr(x, reference).tolist(), ssim(x, reference).tolist(), guesses, strict=True)
    return [
        ImageTrial(view, attack, result, found, floor, alike, int(order[i]), chance, **match)
        for i, (found, alike, (floor, chance)) in enumerate(scores)
    ]


def feature_errors(model: nn.Module, observed: Observation, x: Tensor) -> dict[str, float]:
    """Return the relative error of each visible dense layer's input, read off the update.

    Only for a batch of one, and for layers whose bias is in view. What is exact here identifies
    the image even where its pixels cannot be reconstructed.
    """
    errors = {}
    for name, weight, bias in visible_dense(model, observed) if observed.shape[0] == 1 else []:
        rows = layer_input(model, observed, name)(as_double(x)).detach()
        if len(rows) != 1:  # of a layer that acts on each token, or is not called
            continue
        if bias is not None and bool(bias.any()) and bool(rows[0].any()):
            errors[name] = feature_error(invert_dense(weight, bias), rows[0])
    return errors
