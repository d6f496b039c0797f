"""Metrics: how close a reconstruction is, and how close an image is that needed no attack."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.signal.windows import gaussian
from torch import Tensor
from torch.nn.functional import conv2d

from accounting import checks
from accounting.checks import ConfigError

ORACLES = ("own mean",)  # baselines that know the truth: no attacker can hand them in
_Z = 1.96  # 95 %
FLOAT64_MSE = torch.finfo(torch.float64).eps ** 2


def psnr(x: Tensor, reference: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each image, (B,), in dB: -10 log10 MSE.

    As in FedPart's Table 9 (its formula lacks the minus sign), of images (B, ...) in [0, 1]. The
    MSE is floored at float64's resolution, 2^-104, so that equal images score 313.07 dB and no
    average over images is ever infinite.

    Raises:
        ConfigError: shapes that differ, NaN, or values outside [0, 1].

    >>> psnr(torch.full((1, 1, 2, 2), 0.5), torch.full((1, 1, 2, 2), 0.6)).round(decimals=3)
    tensor([20.], dtype=torch.float64)
    """
    if x.shape != reference.shape or x.ndim < 2:
        raise ConfigError(
            f"x: shape {tuple(x.shape)}; must be that of the reference, {tuple(reference.shape)}."
        )
    gap = _in_range("x", x) - _in_range("reference", reference)
    mse = gap.square().flatten(1).mean(1)
    return -10 * mse.clamp(min=FLOAT64_MSE).log10()


def ssim(x: Tensor, reference: Tensor) -> Tensor:
    """Return the structural similarity of each image, (B,), in [-1, 1] (Wang et al. 2004).

    As published, of images (B, C, H, W) in [0, 1]: an 11x11 Gaussian window of standard deviation
    1.5, only where it fits inside the image, k1 = 0.01, k2 = 0.03, population moments, the mean
    over positions and channels. Images under 11 pixels use the largest odd window that fits.
    """
    if x.shape != reference.shape or x.ndim != 4:
        raise ConfigError(
            f"x: shape {tuple(x.shape)}; must be (B, C, H, W), that of the reference."
        )
    a, b = _in_range("x", x), _in_range("reference", reference)
    line = gaussian(min(11, *((side - 1) // 2 * 2 + 1 for side in a.shape[-2:])), std=1.5)
    bell = torch.from_numpy(np.outer(line, line))
    window = (bell / bell.sum())[None, None]

    def blur(image: Tensor) -> Tensor:
        return conv2d(image.flatten(0, 1)[:, None], window)

    mean_a = blur(a)
    mean_b = blur(b)
    var_a = blur(a * a) - mean_a**2
    var_b = blur(b * b) - mean_b**2
    covariance = blur(a * b) - mean_a * mean_b
    c1 = 0.01**2
    c2 = 0.03**2
    light = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    structure = (2 * covariance + c2) / (var_a + var_b + c2)
    return (light * structure).reshape(*a.shape[:2], -1).mean((1, 2))


def feature_error(features: Tensor, truth: Tensor) -> float:
    """Return ||found - truth|| / ||truth||, for the input of a dense layer; 0 is exact."""
    a = features.detach().double()
    b = truth.detach().double()
    if a.shape != b.shape or not bool(a.isfinite().all() and b.isfinite().all()):
        raise ConfigError(f"found: shape {tuple(a.shape)}; must be finite and {tuple(b.shape)}.")
    if not bool(b.any()):
        raise ConfigError("truth: is zero, so the relative error is undefined.")
    return float((a - b).norm() / b.norm())


def match_batch(images: Tensor, truth: Tensor) -> Tensor:
    """Return the order of ``images`` that fits ``truth`` with the least total squared error.

    The gradient of a batch does not depend on the order of its images, so a score must not either.
    The Hungarian method finds the best one-to-one pairing; ``found[order]`` pairs with ``truth``.
    Only scoring uses it, never an attack.

    >>> match_batch(torch.tensor([[1.0], [0.0]]), torch.tensor([[0.1], [0.8]]))
    tensor([1, 0])
    """
    a = images.detach().double().flatten(1)
    b = truth.detach().double().flatten(1)
    if images.shape != truth.shape or not bool(a.isfinite().all() and b.isfinite().all()):
        raise ConfigError(
            f"images: shape {tuple(images.shape)}; must be finite and {tuple(truth.shape)}."
        )
    cost = (b[:, None] - a[None]).square().sum(2)
    _, order = linear_sum_assignment(cost.numpy())
    return torch.from_numpy(np.asarray(order))


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of a success rate.

    >>> tuple(round(end, 3) for end in wilson(9, 10))
    (0.596, 0.982)
    """
    n = checks.count("trials", trials)
    k = checks.count("successes", successes, minimum=0, maximum=n)
    spread = _Z * math.sqrt(k / n * (1 - k / n) / n + _Z**2 / (4 * n * n))
    middle, width = k / n + _Z**2 / (2 * n), 1 + _Z**2 / n
    return max(0.0, (middle - spread) / width), min(1.0, (middle + spread) / width)


def rarely_passed(scores: Sequence[float]) -> float:
    """Return the score that at most one in a thousand passes; -inf without scores.

    Of fewer than a thousand none passes it.
    """
    return sorted(scores, reverse=True)[len(scores) // 1000] if scores else -math.inf


def baseline_images(
    reference: Tensor,
    dataset_mean: Tensor | None = None,
    class_means: Tensor | None = None,
    *,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return images (B, C, H, W) that need no attack, by name.

    "grey" is half the range, "own mean" the image's mean colour, "noise" uniform noise, "dataset
    mean" the mean image of public data, "class mean" that of its class. A score that does not
    exceed theirs is not a leak; except "own mean", an oracle: only whoever has the image knows it.
    ``dataset_mean`` is (C, H, W), ``class_means`` are (B, C, H, W), that of each image's class.
    """
    truth = _in_range("reference", reference)
    rng = np.random.default_rng([checks.count("seed", seed, minimum=0)])
    guesses = {
        "grey": torch.full_like(truth, 0.5),
        "own mean": truth.mean((2, 3), keepdim=True).expand_as(truth),
        "noise": torch.from_numpy(rng.uniform(0, 1, truth.shape)),
    }
    if dataset_mean is not None:
        guesses["dataset mean"] = dataset_mean.double().expand_as(truth)
    if class_means is not None:
        guesses["class mean"] = class_means.double()
    return guesses


def _in_range(name: str, value: Tensor) -> Tensor:
    value = value.detach().double()
    if not bool(((value >= 0) & (value <= 1)).all()):
        raise ConfigError(f"{name}: has NaN or values outside [0, 1]; clamp or divide them.")
    return value
