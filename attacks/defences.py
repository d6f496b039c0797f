"""Defences: the same attack at every clip and noise multiplier of a sweep."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from attacks.audit import Audit
from attacks.report import Adversary, Report, Verdict
from attacks.setting import Setting
from attacks.suite import Attack
from attacks.text.audit import TextAudit, text_audit


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPoint:
    """What images and text share at one clip and noise multiplier.

    Args:
        clip: joint L2 bound, or None.
        noise_multiplier: noise standard deviation / clip; 0 is the server's own view.
        baselines: best score of each example that needs no attack.
        verdict: the most severe one over the examples.
        epsilon: the accountant's epsilon of one release at ``delta``; None without noise.
        delta: at which epsilon is computed.
        missing: names of baselines that are missing, for want of data.
    """

    measure: ClassVar[str]
    guess: ClassVar[str]

    clip: float | None
    noise_multiplier: float
    baselines: tuple[float, ...]
    verdict: Verdict
    epsilon: float | None
    delta: float
    missing: tuple[str, ...] = ()

    @property
    def scores(self) -> tuple[float, ...]:
        """Best score of each example over the attacks."""
        raise NotImplementedError

    def shared(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {
            "clip": self.clip,
            "noise_multiplier": self.noise_multiplier,
            "verdict": self.verdict,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "missing_baselines": list(self.missing),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DefencePoint(ScoredPoint):
    """What the attacks found in images at one clip and noise multiplier.

    Args:
        psnr: best score of each image over the attacks, in dB; ``baselines`` are in dB too.
    """

    measure: ClassVar[str] = "PSNR of the best attack (dB)"
    guess: ClassVar[str] = "best image that needs no attack"

    psnr: tuple[float, ...]

    @property
    def scores(self) -> tuple[float, ...]:
        """The PSNR of each image."""
        return self.psnr

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return self.shared() | {"psnr": list(self.psnr), "baselines": list(self.baselines)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDefencePoint(ScoredPoint):
    """What the attacks found in sentences at one clip and noise multiplier.

    Args:
        rouge: ROUGE-L of each sentence; ``baselines`` is that of the best guess.
        bag: F1 of the distinct tokens of each sentence's batch.
        exact: number of sentences that were read token for token.
    """

    measure: ClassVar[str] = "ROUGE-L of the best attack"
    guess: ClassVar[str] = "best guess without the update"

    rouge: tuple[float, ...]
    bag: tuple[float, ...]
    exact: int

    @property
    def scores(self) -> tuple[float, ...]:
        """The ROUGE-L of each sentence."""
        return self.rouge

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return self.shared() | {
            "exact": self.exact,
            "rouge": list(self.rouge),
            "bag_f1": list(self.bag),
            "guess_rouge": list(self.baselines),
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
    sweep = Audit(
        model=model, x=x, y=y, views={"swept": visible}, delta=delta, attacks=attacks, **options
    )
    return [_of_images(audit) for audit in _swept(sweep, clips, noise_multipliers)]


def text_defences(
    model: nn.Module,
    tokens: Tensor,
    labels: Tensor | None = None,
    *,
    visible: Sequence[str],
    clips: Sequence[float | None],
    noise_multipliers: Sequence[float],
    delta: float = 1e-5,
    **options: Any,  # noqa: ANN401 - of text_audit, which checks them
) -> list[TextDefencePoint]:
    """Return a point per clip and noise multiplier, on the same sentences and seeds.

    Args:
        model: see ``text_leakage``.
        tokens: see ``text_leakage``.
        labels: see ``text_leakage``.
        visible: patterns of the parameters that the update shows.
        clips: see ``defences``.
        noise_multipliers: see ``defences``.
        delta: see ``defences``.
        options: other arguments of ``text_leakage``; one ``done`` serves all points.

    Raises:
        ConfigError: nothing to sweep, or an error of ``text_leakage``.
    """
    views = {"swept": visible}
    sweep = text_audit(model, tokens, labels, views=views, delta=delta, **options)
    return [_of_text(audit) for audit in _swept(sweep, clips, noise_multipliers)]


AnyAudit = TypeVar("AnyAudit", bound=Setting)


def _swept(
    sweep: AnyAudit, clips: Sequence[float | None], noise_multipliers: Sequence[float]
) -> Iterator[AnyAudit]:
    """Yield the audit at every clip and noise multiplier, as its own adversary sees it."""
    if not clips or not noise_multipliers:
        raise ConfigError("clips, noise_multipliers: pass at least one of each.")
    for z in noise_multipliers:
        checks.nonnegative("noise_multipliers", z)
    for clip in clips:
        for z in noise_multipliers:
            if clip is not None or z == 0:
                who: Adversary = "recipient" if z > 0 else "server"
                yield replace(sweep, clip=clip, noise_multiplier=z, adversaries=(who,))


def _at(audit: Setting, report: Report) -> dict[str, Any]:
    """Return the fields that a point of any kind has."""
    return {
        "clip": audit.clip,
        "noise_multiplier": audit.noise_multiplier,
        "verdict": report.verdict,
        "epsilon": None if report.bound is None else report.bound.epsilon(audit.delta),
        "delta": audit.delta,
    }


def _of_images(audit: Audit) -> DefencePoint:
    report = audit.report()
    (row,) = report.rows
    return DefencePoint(
        **_at(audit, report),
        psnr=row.psnr,
        baselines=tuple(trial.baseline for trial in row.best),
        missing=report.missing,
    )


def _of_text(audit: TextAudit) -> TextDefencePoint:
    report = audit.report()
    (row,) = report.rows
    return TextDefencePoint(
        **_at(audit, report),
        rouge=tuple(trial.score.rouge for trial in row.best),
        bag=tuple(trial.bag for trial in row.best),
        exact=row.exact,
        baselines=tuple(trial.guess.rouge for trial in row.best),
        missing=report.missing,
    )
