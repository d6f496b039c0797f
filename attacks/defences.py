"""Defences: the same attack against one clip and noise after the other."""

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
    """One clip and noise multiplier.

    Args:
        clip: joint L2 bound, or None.
        noise_multiplier: noise standard deviation / clip; 0 is the server's own view.
        psnr: best of each image over the attacks, in dB.
        baselines: of each image, the best score that needs no attack.
        verdict: the worst.
        epsilon: the accountant's for one release at ``delta``; None without noise.
        delta: of that epsilon.
    """

    clip: float | None
    noise_multiplier: float
    psnr: tuple[float, ...]
    baselines: tuple[float, ...]
    verdict: Verdict
    epsilon: float | None
    delta: float

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
    **options: Any,  # noqa: ANN401 - passed on to leakage as it is
) -> list[DefencePoint]:
    """Return a point per clip and noise multiplier, on the same images and seeds.

    Every attacker knows clip and noise. A curve of PSNR falls to the floor long before epsilon
    means anything: read it as what the tried attacks can do, and epsilon as what any could.

    Args:
        model: see ``leakage``.
        x: see ``leakage``.
        y: see ``leakage``.
        visible: patterns of the parameters that the update shows.
        clips: each > 0; None does not clip, and then only without noise.
        noise_multipliers: each >= 0.
        delta: of the accountant's epsilon.
        attacks: see ``leakage``.
        options: see ``leakage``; one ``done`` serves all points.

    Raises:
        ConfigError: nothing to sweep, or as ``leakage``.
    """
    if not clips or not noise_multipliers:
        raise ConfigError("clips, noise_multipliers: name at least one of each.")
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
    )
