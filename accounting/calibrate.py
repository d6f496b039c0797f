"""Calibration: the least noise that meets a target without exceeding it."""

import math
from collections.abc import Callable
from functools import cache

from accounting import checks, gaussian
from accounting.bounded import WithReplacementSampling
from accounting.checks import ConfigError
from accounting.cohorts import Bounded, Estimate, Sampling, participation_of, sampled_guarantee
from accounting.guarantee import METHODS, Guarantee, Method, mu_upper
from accounting.mechanisms import Mechanism
from accounting.monte_carlo import BMinSep, EstimatedGuarantee
from accounting.participation import Participation
from accounting.random_allocation import BallsInBins
from accounting.report import up
from accounting.subsampled import SampledMethod
from accounting.user_level import ExampleSampling

_FAR = 4.0  # logarithm of epsilon / target, at most; of too little noise for an epsilon, this


def calibrate(
    mechanism: Mechanism,
    participation: Participation,
    *,
    target_epsilon: float,
    delta: float,
    method: Method = "exact",
) -> float:
    """Return the least noise multiplier whose guarantee is at most (target_epsilon, delta).

    Guarantees:
        ``guarantee(..., noise_multiplier=result).epsilon(delta) <= target_epsilon``. With method
        "exact" also within 1e-4 of it, relatively. An epsilon by dp-accounting jumps (a grid, a
        list of orders, a floor at 0), and where the target is inside a jump it is not reached: the
        result is then the least noise found on the near side.

    >>> from accounting import BinaryTree
    >>> run = Participation(1000)
    >>> round(calibrate(BinaryTree(1000), run, target_epsilon=2.0, delta=1e-6), 4)
    7.0534
    """
    squared = mechanism.sensitivity(participation).squared
    return least_noise(squared, target_epsilon=target_epsilon, delta=delta, method=method)


def least_noise(
    sensitivity_squared: float, *, target_epsilon: float, delta: float, method: Method = "exact"
) -> float:
    """Return the least noise multiplier for a squared sensitivity; otherwise as ``calibrate``."""
    target, delta = _target(target_epsilon, delta, method)
    squared = checks.positive("sensitivity_squared", sensitivity_squared)

    def epsilon(noise_multiplier: float) -> float:
        return Guarantee(mu_upper(squared, noise_multiplier), method).epsilon(delta)

    # "exact" is inverted directly; the other methods are never tighter, so the search starts there.
    noise = math.sqrt(squared) / gaussian.mu(target, delta)
    if method != "exact":
        return _descend(epsilon, target, noise, 1e-9)
    step = noise * 2.0**-48
    while epsilon(noise) > target:  # until the last roundings are covered
        noise, step = noise + step, 2 * step
    return noise


def least_sampled_noise(
    mechanism: Mechanism,
    sampling: Sampling,
    *,
    target_epsilon: float,
    delta: float,
    method: SampledMethod = "pld",
) -> float:
    """Return the least noise multiplier found whose amplified guarantee meets a target.

    Guarantees:
        ``sampled_guarantee(..., noise_multiplier=result).epsilon(delta) <= target_epsilon``, and
        within 1e-4 of it, relatively, unless the accountant jumps there.
    """
    target, delta = _target(target_epsilon, delta, "exact")
    enough = _unsampled_noise(mechanism, sampling, target, delta)

    def epsilon(noise: float) -> float:
        run = sampled_guarantee(mechanism, sampling, noise_multiplier=noise, method=method)
        return run.epsilon(delta)

    return _descend(epsilon, target, enough)


def estimated_noise(
    mechanism: Mechanism,
    sampling: BallsInBins | BMinSep,
    *,
    target_epsilon: float,
    delta: float,
    draws: int = 1_000_000,
) -> EstimatedGuarantee:
    """Return a guarantee by Monte Carlo that meets a target, with the noise that it needs.

    The noise is chosen by estimates of a tenth of the draws, whose wider bounds leave room. Then
    one estimate is made, under a fresh seed, so its probability of error is that of one answer. If
    it came out too high, choosing again would be a second answer, so this raises.
    """
    target, delta = _target(target_epsilon, delta, "exact")
    pilot = Estimate(max(10_000, checks.count("draws", draws, minimum=10_000) // 10))

    def epsilon(noise: float) -> float:
        run = sampled_guarantee(mechanism, sampling, noise_multiplier=noise, estimate=pilot)
        return run.epsilon(delta)

    noise = _descend(epsilon, target, _unsampled_noise(mechanism, sampling, target, delta), 1e-2)
    final = EstimatedGuarantee(noise, sampling, mechanism, draws)
    if (reached := final.epsilon(delta)) > target:
        raise ConfigError(
            f"target_epsilon={target:g}: the one estimate, with noise_multiplier={noise:g}, came "
            f"out at {up(reached, 5)}. Another estimate would be another answer, wrong with its "
            "own probability: allow for that, or use more draws."
        )
    return final


def _unsampled_noise(
    mechanism: Mechanism, sampling: Sampling, target: float, delta: float
) -> float:
    run = participation_of(sampling, mechanism.rounds)
    clips = sampling.per_user if isinstance(sampling, ExampleSampling) else 1
    clips = sampling.batch if isinstance(sampling, WithReplacementSampling) else clips
    enough = clips * calibrate(mechanism, run, target_epsilon=target, delta=delta)
    # Hardly less than the accountant takes; as the sample is hidden, so much may do.
    most = 9.999e3 if isinstance(sampling, Bounded | ExampleSampling) else 9.999e4
    return enough if isinstance(sampling, BallsInBins) else min(enough, most)


def _descend(
    epsilon: Callable[[float], float], target: float, enough: float, close: float = 8e-5
) -> float:
    """Return a noise below about ``enough`` whose epsilon is within ``close`` below the target.

    ``epsilon`` falls with the noise, and raises where there is too little for it. Its logarithm is
    nearly a line in that of the noise, so the root is sought there.
    """
    from scipy.optimize import brentq

    first = epsilon(enough)  # raises where this is too little, too
    if target * (1 - close) <= first <= target:
        return enough
    best = math.inf

    @cache
    def excess(log_noise: float) -> float:
        nonlocal best
        noise = math.exp(log_noise)
        try:
            reached = first if noise == enough else epsilon(noise)
        except ConfigError:
            return _FAR
        if reached <= target:
            best = min(best, noise)
        aim = target * (1 - close / 2)
        return max(-_FAR, math.log(reached / aim)) if reached > 0 else -_FAR

    low, high = _bracket(excess, math.log(enough))
    brentq(excess, low, high, xtol=close / 40, rtol=1e-12)
    return best


def _target(epsilon: float, delta: float, method: Method) -> tuple[float, float]:
    checks.choice("method", method, METHODS)
    fault = "must lie between 1e-50 and 1e50"
    target = checks.between("target_epsilon", epsilon, 1e-50, 1e50, fault)
    return target, checks.probability("delta", delta)


def _bracket(excess: Callable[[float], float], start: float) -> tuple[float, float]:
    """Return logarithms of noises with too much epsilon, and with too little."""
    high = start
    while excess(high) > 0:  # an accountant on a grid may be above the curve
        high += 0.05
        if high > start + math.log(16):  # it has no further orders
            raise ConfigError(
                "target_epsilon: no noise that this method takes reaches it at this delta. Use "
                'method="exact", or a greater target.'
            )
    # Epsilon falls at least about as fast as the noise grows.
    low = high + min(excess(high), -0.1)
    while (over := excess(low)) <= 0:
        high, low = low, low + min(over, -0.1)
    return low, high
