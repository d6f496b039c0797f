"""Defences: the same attack at every clip and noise multiplier of a sweep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from attacks.audit import Audit
from attacks.report import Verdict
from attacks.suite import Attack


@dataclass(frozen=True, slots=True)
class DefencePoint:
    """What the attacks found at one clip and noise multiplier.

    Args:
        clip: joint L2 bound, or None.
        noise_multiplier: noise standard deviation / clip; 0 is the server's own view.
        psnr: best score of each image over the attacks, in dB.
        baselines: best score of each image that needs no attack, in dB.
        missing: names of baselines that are missing, for want of data.
        verdict: the most severe one over the images.
        epsilon: the accountant's epsilon of one release at ``delta``; None without noise.
        delta: at which epsilon is computed.
    """

    clip: float | None
    noise_multiplier: float
    psnr: tuple[float, ...]
    baselines: tuple[float, ...]
    verdict: Verdict
    epsilon: float | None
    delta: float
    missing: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return {
            "clip": self.clip,
            "noise_multiplier": self.noise_multiplier,
            "psnr": list(self.psnr),
            "baselines": list(self.baselines),
            "verdict": self.verdict,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "missing_baselines": list(self.missing),
        }


def defences(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    visible: Sequence[str],
    clips: Sequence[float | None],
    noise_multipliers: Sequence[float],
    delta: float = 1e-5,
    attacks: Mapping[str, Attack] | None = None,
    **options: Any,  # noqa: ANN401 - fields of Audit, which checks them
) -> list[DefencePoint]:
    """Return a point per clip and noise multiplier, on the same images and seeds.

    Every attacker knows clip and noise. PSNR falls to the floor long before epsilon means
    anything: read PSNR as what these attacks can do, and epsilon as what any attack could do.

    Args:
        model: see ``leakage``.
        x: see ``leakage``.
        y: see ``leakage``.
        visible: patterns of the parameters that the update shows.
        clips: each > 0; None does not clip, and then only without noise.
        noise_multipliers: each >= 0.
        delta: at which the accountant's epsilon is computed.
        attacks: see ``leakage``.
        options: other arguments of ``leakage``; one ``done`` serves all points.

    Raises:
        ConfigError: nothing to sweep, or an error of ``leakage``.
    """
    if not clips or not noise_multipliers:
        raise ConfigError("clips, noise_multipliers: pass at least one of each.")
    for z in noise_multipliers:
        checks.nonnegative("noise_multipliers", z)
    sweep = Audit(
        model=model, x=x, y=y, views={"swept": visible}, delta=delta, attacks=attacks, **options
    )
    return [
        _point(replace(sweep, clip=clip, noise_multiplier=z))
        for clip in clips
        for z in noise_multipliers
        if clip is not None or z == 0
    ]


def _point(audit: Audit) -> DefencePoint:
    noisy = audit.noise_multiplier > 0
    report = replace(audit, adversaries=("recipient",) if noisy else ("server",)).report()
    (row,) = report.rows
    return DefencePoint(
        clip=audit.clip,
        noise_multiplier=audit.noise_multiplier,
        psnr=row.psnr,
        baselines=tuple(trial.baseline for trial in row.best),
        verdict=row.verdict,
        epsilon=None if report.bound is None else report.bound.epsilon(audit.delta),
        delta=audit.delta,
        missing=report.missing,
    )
