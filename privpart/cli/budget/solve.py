"""What ``calibrate`` finds besides noise: the option that was left out, for noise that was given.

Most rounds, the greatest expected batch, most bins of a member, or the fewest bins within a target.
Cost grows with the first three and falls with the last, so a number that meets the target is sought
beside one that does not; both were accounted for, and both are printed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from accounting import ConfigError, checks
from accounting.cohorts import SAMPLERS, named_options
from accounting.report import up
from privpart.cli.budget.promise import FITS, Promise, shown_fits

_LOG = logging.getLogger(FITS)

Unknown = Literal["rounds", "expected_batch", "expected_batches", "batch", "bins", "chosen"]


@dataclass(frozen=True, slots=True)
class Solution:
    """The number that was found, and its neighbour that exceeds the target."""

    unknown: Unknown
    number: int
    promise: Promise
    neighbour: int | None
    exceeds: float | None

    @property
    def line(self) -> tuple[str, str]:
        """A line of the report's table."""
        name = self.unknown.replace("_", " ")
        if self.neighbour is None or self.exceeds is None:
            return name, f"{self.number}, as far as is accounted for"
        return name, f"{self.number}; {self.neighbour} would cost epsilon {up(self.exceeds, 5)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the solution as plain values, ready for JSON."""
        values = {"unknown": self.unknown, "number": self.number}
        return values | {"neighbour": self.neighbour, "epsilon_of_neighbour": self.exceeds}


def left_out(rounds: int | None, sampling: str | None) -> list[Unknown]:
    """Return the options that are missing, besides noise, for a run to be accounted for."""
    missing: list[Unknown] = ["rounds"] if rounds is None else []
    if sampling is not None:
        name, options = named_options(sampling)
        needed = cast("Unknown", SAMPLERS[name].needs[0])
        missing += [] if needed in options else [needed]
    return missing


def solve(
    promise: Callable[[int, str | None], Promise],
    target: float,
    rounds: int | None,
    sampling: str | None,
    population: int | None,
    least_rounds: int = 1,
) -> Solution:
    """Return the number within the target epsilon whose neighbour is beyond it.

    ``promise`` takes rounds and a sampler as it is typed; ``rounds`` and ``sampling`` lack what is
    sought; limits on participation need ``least_rounds``.

    Raises:
        ConfigError: nothing was left out, or more than one option; no number meets the target, or
            what was given fits no number.
    """
    missing = left_out(rounds, sampling)
    name, options = ("", {}) if sampling is None else named_options(sampling)
    if not missing and name == "balls-in-bins" and "chosen" not in options:
        missing = ["chosen"]
    if len(missing) != 1:
        fault = f"{' and '.join(missing)} are missing" if missing else "nothing is left out"
        raise ConfigError(f"--noise-multiplier: {fault}; leave out only what is to be found.")
    checks.positive("target_epsilon", target)
    if "draws" in options or name == "b-min-sep":
        raise ConfigError(f"{missing[0]} is missing: pass it; estimates by draws cannot find it.")
    if name == "scheduled-poisson":
        raise ConfigError(f"{missing[0]} is missing: pass it; nothing in a schedule can be found.")
    with shown_fits():
        if rounds is None:
            run, ends = lambda n: promise(n, sampling), (least_rounds, checks.MOST_ROUNDS)
            return _searched("rounds", run, *ends, target)
        key, joint = missing[0], "," if options else ":"
        first, last = 1, _whole(options.get("examples", str(population or 1)))
        if key == "bins":
            first, last = rounds, max(2, _whole(options.get("chosen", "1")))
        if key == "chosen":
            last = _whole(options["bins"])
        return _searched(
            key, lambda n: promise(rounds, f"{sampling}{joint}{key}={n}"), first, last, target
        )


def _whole(text: str) -> int:
    """Return the number that was typed; 1 for what the sampler refuses."""
    return int(text) if text.isdecimal() else 1


def _searched(
    unknown: Unknown, promise: Callable[[int], Promise], first: int, last: int, target: float
) -> Solution:
    """Search from the number that costs least to the one that costs most."""

    def priced(number: int) -> tuple[Promise, float]:
        run = promise(number)
        epsilon = run.guarantee().epsilon(run.delta)
        _LOG.info("%s=%d: epsilon %.5g", unknown, number, epsilon)
        return run, epsilon

    best, least = priced(first)
    if least > target:
        raise ConfigError(
            f"target_epsilon={target:g}: with {unknown}={first} this noise costs epsilon "
            f"{up(least, 5)}; use more noise."
        )
    within, beyond, exceeds, step = first, None, None, 1
    sign = 1 if last > first else -1
    while within != last and (beyond is None or abs(beyond - within) > 1):
        if beyond is None:
            number = first + sign * min(step, abs(last - first))
            step *= 2
        else:
            number = (within + beyond) // 2
        run, cost = priced(number)
        if cost <= target:
            within, best = number, run
        else:
            beyond, exceeds = number, cost
    return Solution(unknown, within, best, beyond, exceeds)
