"""Defences: the same attack at every clip and noise multiplier of a sweep."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from accounting import checks
from accounting.checks import ConfigError
from attacks.audit import Audit
from attacks.report import Adversary, TextRow, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class DefencePoint:
    """What the attacks found at one clip and noise multiplier; 0 is the server's own view."""

    clip: float | None
    noise_multiplier: float
    scores: tuple[float, ...]  # best of each example: PSNR in dB of images, ROUGE-L of text
    baselines: tuple[float, ...]  # best of each example that needs no attack
    verdict: Verdict
    epsilon: float | None  # of one release, by the accountant; None without noise
    delta: float
    missing: tuple[str, ...] = ()  # names of baselines, for want of data
    exact: int | None = None  # number of sentences that were read token for token

    @property
    def of_text(self) -> bool:
        """Whether sentences were attacked, and not images."""
        return self.exact is not None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        score, baseline = ("rouge", "guess_rouge") if self.of_text else ("psnr", "baselines")
        return {
            "clip": self.clip,
            "noise_multiplier": self.noise_multiplier,
            "verdict": self.verdict,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "missing_baselines": list(self.missing),
            score: list(self.scores),
            baseline: list(self.baselines),
            **({"exact": self.exact} if self.of_text else {}),
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
    """
    if len(audit.views) != 1:
        raise ConfigError(f"views: a sweep is of one view, not of {len(audit.views)}.")
    if not clips or not noise_multipliers:
        raise ConfigError("clips, noise_multipliers: pass at least one of each.")
    for z in noise_multipliers:
        checks.nonnegative("noise_multipliers", z)
    return [
        _point(audit, clip, z)
        for clip in clips
        for z in noise_multipliers
        if clip is not None or z == 0
    ]


def _point(audit: Audit[Any, Any, Any], clip: float | None, z: float) -> DefencePoint:
    adversary: Adversary = "recipient" if z > 0 else "server"
    audit = replace(audit, clip=clip, noise_multiplier=z, adversaries=(adversary,))
    report = audit.report()
    (row,) = report.rows
    text = isinstance(row, TextRow)
    return DefencePoint(
        clip=clip,
        noise_multiplier=z,
        scores=tuple(t.score.rouge for t in row.best) if text else row.psnr,
        baselines=tuple(t.guess.rouge if text else t.baseline for t in row.best),
        verdict=report.verdict,
        epsilon=None if report.bound is None else report.bound.epsilon(audit.delta),
        delta=audit.delta,
        missing=report.missing,
        exact=row.exact if text else None,
    )
