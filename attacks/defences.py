"""Defences: the same attack at every clip and noise multiplier of a sweep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from accounting import checks
from accounting.checks import ConfigError
from attacks.audit import Audit
from attacks.report import Adversary, TextRow, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class DefencePoint:
    """What the attacks found at one clip and noise multiplier.

    Args:
        clip: joint L2 bound, or None.
        noise_multiplier: noise standard deviation / clip; 0 is the server's own view.
        scores: best score of each example over the attacks: PSNR in dB of images, ROUGE-L of text.
        baselines: best score of each example that needs no attack.
        verdict: the most severe one over the examples.
        epsilon: the accountant's epsilon of one release at ``delta``; None without noise.
        delta: at which epsilon is computed.
        missing: names of baselines that are missing, for want of data.
        exact: number of sentences that were read token for token; None of images.
        bag: of text, F1 of the distinct tokens of each sentence's batch.
    """

    clip: float | None
    noise_multiplier: float
    scores: tuple[float, ...]
    baselines: tuple[float, ...]
    verdict: Verdict
    epsilon: float | None
    delta: float
    missing: tuple[str, ...] = ()
    exact: int | None = None
    bag: tuple[float, ...] = field(default=())

    @property
    def of_text(self) -> bool:
        """Whether sentences were attacked, and not images."""
        return self.exact is not None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        shared = {
            "clip": self.clip,
            "noise_multiplier": self.noise_multiplier,
            "verdict": self.verdict,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "missing_baselines": list(self.missing),
        }
        if not self.of_text:
            return shared | {"psnr": list(self.scores), "baselines": list(self.baselines)}
        return shared | {
            "exact": self.exact,
            "rouge": list(self.scores),
            "bag_f1": list(self.bag),
            "guess_rouge": list(self.baselines),
        }


def defences(
    audit: Audit[Any, Any, Any],
    *,
    clips: Sequence[float | None],
    noise_multipliers: Sequence[float],
) -> list[DefencePoint]:
    """Return a point per clip and noise multiplier, on the same examples and seeds.

    Every attacker knows clip and noise. PSNR falls to the floor long before epsilon means
    anything: read PSNR as what these attacks can do, and epsilon as what any attack could do.

    The audit is of one view; its own clip and noise do not count, and one ``done`` serves all
    points. A clip of None does not clip, and then only without noise.

    Raises:
        ConfigError: nothing to sweep, several views, or an error of the audit.
    """
    if len(audit.views) != 1:
        raise ConfigError(f"views: a sweep is of one view, not of {len(audit.views)}.")
    if not clips or not noise_multipliers:
        raise ConfigError("clips, noise_multipliers: pass at least one of each.")
    for z in noise_multipliers:
        checks.nonnegative("noise_multipliers", z)
    looks: list[Adversary] = ["recipient" if z > 0 else "server" for z in noise_multipliers]
    return [
        _point(replace(audit, clip=clip, noise_multiplier=z, adversaries=(adversary,)))
        for clip in clips
        for z, adversary in zip(noise_multipliers, looks, strict=True)
        if clip is not None or z == 0
    ]


def _point(audit: Audit[Any, Any, Any]) -> DefencePoint:
    report = audit.report()
    (row,) = report.rows
    scores: Mapping[str, Any]
    if isinstance(row, TextRow):
        scores = {
            "scores": tuple(trial.score.rouge for trial in row.best),
            "baselines": tuple(trial.guess.rouge for trial in row.best),
            "bag": tuple(trial.bag for trial in row.best),
            "exact": row.exact,
        }
    else:
        baselines = tuple(trial.baseline for trial in row.best)
        scores = {"scores": row.psnr, "baselines": baselines}
    return DefencePoint(
        clip=audit.clip,
        noise_multiplier=audit.noise_multiplier,
        verdict=report.verdict,
        epsilon=None if report.bound is None else report.bound.epsilon(audit.delta),
        delta=audit.delta,
        missing=report.missing,
        **scores,
    )
