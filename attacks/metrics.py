"""How close a reconstruction is, and how close a guess that saw no update would be."""

import numpy as np
import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError

FLOAT64_MSE = torch.finfo(torch.float64).eps ** 2


def psnr(x: Tensor, reference: Tensor, data_range: float = 1.0) -> Tensor:
    """Return the peak signal-to-noise ratio of each image, in dB: 10 log10(range^2 / MSE).

    The MSE is floored at float64's resolution, (2^-52 range)^2, so that equal images score
    313.07 dB and no average over images is ever infinite.

    Args:
        x: (B, ...) in [0, data_range].
        reference: the truth, of the same shape and range.
        data_range: greatest pixel value, > 0.

    Returns:
        (B,) float64.

    Raises:
        ConfigError: shapes that differ, NaN, values outside [0, data_range].

    >>> psnr(torch.full((1, 1, 2, 2), 0.5), torch.full((1, 1, 2, 2), 0.6)).round(decimals=3)
    tensor([20.], dtype=torch.float64)
    """
    top = checks.positive("data_range", data_range)
    if x.shape != reference.shape or x.ndim < 2:
        raise ConfigError(f"x: shape {tuple(x.shape)}; must be that of {tuple(reference.shape)}.")
    a, b = _in_range("x", x, top) / top, _in_range("reference", reference, top) / top
    mse = (a - b).square().flatten(1).mean(1)
    return -10 * mse.clamp(min=FLOAT64_MSE).log10()


def baselines(
    reference: Tensor,
    dataset_mean: Tensor | None = None,
    *,
    data_range: float = 1.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return the PSNR (B,) of images that nobody had to attack for.

    "grey" is half the range, "own mean" the image's mean colour, "noise" uniform, "dataset mean"
    the mean image of public data. A score that does not beat them is not a leak.

    Args:
        reference: (B, C, H, W) in [0, data_range].
        dataset_mean: (C, H, W), or None to leave that row out.
        data_range: greatest pixel value, > 0.
        seed: of the noise.
    """
    top = checks.positive("data_range", data_range)
    truth = _in_range("reference", reference, top)
    rng = np.random.default_rng([checks.count("seed", seed, minimum=0)])
    guesses = {
        "grey": torch.full_like(truth, top / 2),
        "own mean": truth.mean((2, 3), keepdim=True).expand_as(truth),
        "noise": torch.from_numpy(rng.uniform(0, top, truth.shape)),
    }
    if dataset_mean is not None:
        guesses["dataset mean"] = dataset_mean.double().expand_as(truth)
    return {name: psnr(guess, truth, top) for name, guess in guesses.items()}


def _in_range(name: str, value: Tensor, top: float) -> Tensor:
    value = value.detach().double()
    if not bool(((value >= 0) & (value <= top)).all()):
        raise ConfigError(
            f"{name}: has NaN or values outside [0, {top:g}]; clamp, or set data_range."
        )
    return value
