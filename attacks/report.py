"""The leakage report: a row per view, with baselines, residuals and a verdict beside each score."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from torch import Tensor, cat

from attacks.reconstruct import Reconstruction

Verdict = Literal["recovered", "partial", "ambiguous", "attack failed"]
VERDICTS: tuple[Verdict, ...] = ("recovered", "partial", "ambiguous", "attack failed")
Attack = Literal["dlg", "invert_dense"]
SCHEMA = "privpart/leakage/1"

RECOVERED_DB = 30.0
GAIN_DB = 3.0  # over the best baseline, below which a score says nothing
MATCHED = 1e-6  # relative residual above which the attack did not do its job


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One image through one view's own attack: its score, and the best baseline's (dB)."""

    view: str
    attack: Attack
    reconstruction: Reconstruction
    psnr: float
    baseline: float

    @property
    def gain(self) -> float:
        """Decibels above the best image that nobody had to attack for."""
        return self.psnr - self.baseline

    @property
    def verdict(self) -> Verdict:
        """What may be concluded.

        "recovered": >= 30 dB and 3 dB above the baseline. "partial": 3 dB above it. "ambiguous":
        the gradients match and the image does not: the view does not determine the image, or only
        barely; a prior might finish the job, so it is not protected. "attack failed": the
        gradients do not match; nothing follows about privacy.
        """
        if self.gain >= GAIN_DB:
            return "recovered" if self.psnr >= RECOVERED_DB else "partial"
        return "ambiguous" if self.reconstruction.match <= MATCHED else "attack failed"


@dataclass(frozen=True, slots=True, eq=False)
class LeakageRow:
    """One view.

    Args:
        view: its name.
        patterns: of the parameter names that it shows.
        visible: how many numbers it shows.
        share: the same as a share of the model's parameters.
        unknowns: pixels to find.
        own: the trials of the attack on this view itself.
        best: per image the best of this view and of the audited views inside it. Whoever sees more
            may discard what is in the way, so a view can never score below a part of it. The best
            is chosen after the fact: the row bounds the attackers that were tried.
        verdict: the most severe one over all images and over this view and those inside it.
    """

    view: str
    patterns: tuple[str, ...]
    visible: int
    share: float
    unknowns: int
    own: tuple[Trial, ...]
    best: tuple[Trial, ...]
    verdict: Verdict

    @property
    def psnr(self) -> tuple[float, ...]:
        """Score of each image, in dB."""
        return tuple(trial.psnr for trial in self.best)

    @property
    def reconstructions(self) -> Tensor:
        """(N, C, H, W), the images that ``psnr`` scores."""
        return cat([trial.reconstruction.x for trial in self.best])

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types; only ``seconds`` differs between two equal runs."""
        found = [trial.reconstruction for trial in self.own]
        return {
            "view": self.view,
            "patterns": list(self.patterns),
            "visible": self.visible,
            "share": self.share,
            "unknowns": self.unknowns,
            "attack": " + ".join(sorted({trial.attack for trial in self.best})),
            "psnr_median": median(self.psnr),
            "psnr_max": max(self.psnr),
            "psnr": list(self.psnr),
            "psnr_alone": [trial.psnr for trial in self.own],
            "found_in": [trial.view for trial in self.best],
            "baseline_median": median(trial.baseline for trial in self.best),
            "gain_median": median(trial.gain for trial in self.best),
            "match_median": median(result.match for result in found),
            "match_max": max(result.match for result in found),
            "status": [result.status for result in found],
            "verdict": self.verdict,
            "verdicts": {v: sum(trial.verdict == v for trial in self.best) for v in VERDICTS},
            "evaluations": sum(result.evaluations for result in found),
            "seconds": sum(result.seconds for result in found),
        }


@dataclass(frozen=True, slots=True, eq=False)
class LeakageReport:
    """A row per view, on the same images, weights and seeds.

    Args:
        rows: in the order of the views.
        truth: (N, C, H, W).
        baselines: PSNR of each image by the name of the guess, in dB.
        labels_revealed: whether the attacker was told the labels.
        seed: of the starting points.
    """

    rows: tuple[LeakageRow, ...]
    truth: Tensor
    baselines: Mapping[str, tuple[float, ...]]
    labels_revealed: bool
    seed: int

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        return {
            "schema": SCHEMA,
            "images": len(self.truth),
            "shape": list(self.truth.shape[1:]),
            "seed": self.seed,
            "threat": {
                "update": "gradient",
                "batch": 1,
                "weights": "public",
                "labels": "revealed" if self.labels_revealed else "inferred",
                "clip": None,
                "noise_std": 0.0,
            },
            "thresholds": {
                "recovered_db": RECOVERED_DB,
                "gain_db": GAIN_DB,
                "matched": MATCHED,
            },
            "baselines": {
                name: {"median": median(scores), "max": max(scores), "psnr": list(scores)}
                for name, scores in self.baselines.items()
            },
            "rows": [row.to_dict() for row in self.rows],
        }
