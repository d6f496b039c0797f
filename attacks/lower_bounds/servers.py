"""Servers of other libraries: does one keep what somebody states of it?

``replay`` knows a server as a function from the updates of a round to the vector that it releases,
and audits one statement: a mechanism, a participation, a clip norm, a noise multiplier and a
divisor. It runs the server five times under the same noise:

    nobody, nobody again     updates of zeros: the release is the noise; it must be repeatable
    one client               in the rounds of its worst pattern: the two runs differ by that client
    everybody                each client in parameters of its own: what each adds is read exactly

So the noise is tested as in any paired replay, and for repeats; the length that each client adds is
read without statistics, whether it sent 1.5 or a million clip norms. In a last run one sends NaN.

Who may take part, and how often, is stated and not tested: a function of updates sees no ids.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from accounting import Guarantee, Mechanism, Participation, checks, guarantee
from accounting.checks import ConfigError
from accounting.report import down, up
from attacks.lower_bounds.bounds import Bound, percent
from attacks.lower_bounds.canaries import Canaries, round_covariance, worst_view
from attacks.lower_bounds.repeats import gaussian, missing, repeats
from attacks.lower_bounds.replay import FALSE_ALARM, Replay, paired, whitened

Array = NDArray[np.float64]
Updates = list[NDArray[np.float32]]
Step = Callable[[Updates], ArrayLike]
"""One round: from the clients' updates, each (d,), to the vector (d,) that the server releases."""
MOST_VALUES = 10**7
"""Rounds times parameters that a replay keeps."""
_LENGTHS = (1.5, 4.0, 100.0, 1e6)
"""Lengths of the updates in clip norms, all of which must be clipped."""
_SURE = 0.9999
"""Confidence of a violation by a bound."""
_DELTA = 1e-5  # a bound on mu does not depend on it
_ROUNDED = 2.0**-20
"""What float32 adds, at most, to a released value and to the few sums and products before it."""


@dataclass(frozen=True, slots=True)
class ServerReplay:
    """What a server does, beside what was stated of it.

    Attributes:
        claimed: the guarantee of the statement.
        measured: the paired replay; None if there is no noise or no client.
        longest: the longest contribution of any client in any round, in clip norms, rounded down.
        faults: what contradicts the statement, a sentence each.
    """

    claimed: Guarantee
    measured: Replay | None
    longest: float
    faults: tuple[str, ...]

    @property
    def violation(self) -> bool:
        """Whether anything contradicts the statement; sound servers do in 1 of 9,800 audits."""
        return bool(self.faults)

    def bound(self, delta: float, confidence: float = 0.95) -> Bound | None:
        """Return the bound on epsilon; None if the noise is not the one that was stated."""
        sound = self.measured is not None and not self.measured.faults
        return self.measured.bound(delta, confidence) if self.measured and sound else None


def replay(
    start: Callable[[], Step],
    mechanism: Mechanism,
    participation: Participation,
    *,
    noise_multiplier: float,
    clip_norm: float,
    divisor: float,
    dim: int,
    clients: int = 20,
    tensors: Mapping[str, int] | None = None,
) -> ServerReplay:
    """Run a server on made-up updates, and compare it with what is stated of it.

    The audited statement: the release of each round, times ``divisor``, is the sum of the clients'
    updates, each clipped to ``clip_norm``, plus the noise of the mechanism; zeros in place of one
    client's updates change nothing else.

    Args:
        start: makes a new server, with the same noise at every call (seed it here), and returns
            its ``Step``, which is called once per round. A server that releases models is wrapped:
            its step returns the difference of two models.
        mechanism: without groups; of as many rounds as the participation.
        participation: how often a client may take part; taken as stated.
        noise_multiplier: standard deviation of one draw that enters the mechanism / ``clip_norm``,
            on the scale of the sum, > 0.
        clip_norm: > 0.
        divisor: of the sum, > 0; 1 if the sum itself is released.
        dim: length of an update, d >= clients; rounds times d up to 10^7.
        clients: updates of every round, >= 2.
        tensors: sizes, by name, of what a release consists of, in order; noise is tested in each.

    Raises:
        ConfigError: an argument out of range, a release of another length, or noise that is not
            the same at every start.

    >>> import numpy as np
    >>> from accounting import Independent, Participation
    >>> def start():
    ...     rng = np.random.default_rng(1)
    ...     def step(updates):
    ...         clipped = [u / max(1.0, float(np.linalg.norm(u)) / 0.5) for u in updates]
    ...         return (sum(clipped) + rng.normal(size=3000) * 2 * 0.5 * 0.9) / 20
    ...     return step
    >>> stated = {"noise_multiplier": 2.0, "clip_norm": 0.5, "divisor": 20, "dim": 3000}
    >>> audited = replay(start, Independent(8), Participation(8), **stated)
    >>> print(audited.faults[1])  # the first is about updates that are NaN
    24,000 draws of noise have a standard deviation of 1.786 clip norms; the plan says 2.
    """
    z = checks.positive("noise_multiplier", noise_multiplier)
    scale = checks.positive("divisor", divisor) / checks.positive("clip_norm", clip_norm)
    count = checks.count("clients", clients, minimum=2)
    rounds = mechanism.rounds
    if mechanism.groups is not None:
        raise ConfigError("mechanism: has groups; audit each group as a server of its own.")
    checks.count("dim", dim, minimum=count, maximum=MOST_VALUES // rounds)
    claimed = guarantee(mechanism, participation, noise_multiplier=z)
    covariance = round_covariance(mechanism.decoder())
    pattern = worst_view(covariance, participation, z).pattern
    canaries = Canaries(seed=0, count=count, dim=dim)
    directions = np.stack([canaries.update(j).numpy() for j in range(count)])

    def run(sent: Callable[[int, int], float]) -> Array:
        """Return the noised sums in clip norms, (rounds, d); j sends so many clip norms in t."""
        step = start()
        sums = np.empty((rounds, dim))
        for t in range(rounds):
            lengths = [np.float32(sent(t, j) * clip_norm) for j in range(count)]
            updates = [x * u for x, u in zip(lengths, directions, strict=True)]
            sums[t] = _released(step(updates), t, dim) * scale
        return sums

    noise = run(lambda *_: 0.0)
    if not np.array_equal(noise, run(lambda *_: 0.0), equal_nan=True):
        raise ConfigError(
            "start: two servers without clients released different vectors; seed the noise in "
            "start, so that every server has the same."
        )
    everybody = run(lambda t, j: _LENGTHS[(t + j) % len(_LENGTHS)])
    longest, faults = _contributions(everybody, noise, directions != 0)
    if not np.isfinite(run(lambda t, j: math.nan if j == t == 0 else 0.0)).all():
        faults.append(
            "A client whose update is NaN makes a release that is not finite: whoever sees it "
            "knows that the client came."
        )
    one = run(lambda t, j: float(pattern[t]) * _LENGTHS[1] * (j == 0))
    if not np.isfinite(noise).all() or not noise.any():
        return ServerReplay(claimed, None, longest, (*faults, "Without updates there is no noise."))
    if not np.isfinite(one).all() or np.array_equal(one, noise):
        return ServerReplay(
            claimed, None, longest, (*faults, "A client adds nothing, or too much.")
        )
    measured = paired(
        one - noise,
        noise,
        covariance,
        noise_multiplier=z,
        along=(one - noise) @ directions[0].astype(np.float64),
        rounding=_rounding(one, noise) / math.sqrt(float(np.linalg.eigvalsh(covariance)[0])),
        tensors=tensors,
    )
    faults += _against(claimed, measured)
    faults += _in_the_noise(noise / z, covariance, tensors or {"all parameters": dim})
    return ServerReplay(claimed, measured, longest, tuple(faults))


def _in_the_noise(noise: Array, covariance: Array, tensors: Mapping[str, int]) -> list[str]:
    """Return what missing draws, repeats and the histogram have against noise at unit draws."""
    deviations = np.sqrt(np.diag(covariance))[:, None]
    blocks = [("all parameters", whitened(noise, covariance))]
    found = (
        missing(noise / deviations, tensors, range(len(noise)), FALSE_ALARM / 4),
        repeats(blocks, FALSE_ALARM / 4),
        gaussian(blocks, FALSE_ALARM / 4),
    )
    return [fault for check in found for fault in check.faults]


def _released(value: ArrayLike, round_: int, dim: int) -> Array:
    released = np.asarray(value, dtype=np.float64)
    if released.shape != (dim,):
        raise ConfigError(f"start: round {round_} released {released.shape}; must be ({dim},).")
    return released


def _against(claimed: Guarantee, measured: Replay) -> list[str]:
    """Return what a paired replay has against a guarantee, a sentence each."""
    faults = [*measured.faults, *filter(None, [measured.off_plan])]
    least = 0.0 if measured.faults else measured.bound(_DELTA, _SURE).mu or 0.0
    if least > claimed.mu:
        faults.append(
            f"A client is visible by a mu of at least {down(least, 5)} ({percent(_SURE)}); the "
            f"statement says {up(claimed.mu, 5)}."
        )
    return faults


def _rounding(*sums: Array) -> Array:
    """Return the norm of what float32 adds to a parameter's sums over the rounds, at most; (d,)."""
    return np.asarray(_ROUNDED * sum(np.sqrt(np.square(rows).sum(0)) for rows in sums))


def _contributions(
    everybody: Array, noise: Array, supports: NDArray[np.bool_]
) -> tuple[float, list[str]]:
    """Return the longest contribution of a client in a round, and a sentence if one is too long."""
    with np.errstate(over="ignore", invalid="ignore"):
        added = np.sqrt(np.square(everybody - noise) @ supports.T)
        rounding = np.sqrt(np.square(_rounding(everybody, noise)) @ supports.T)
    added = np.nan_to_num(added, nan=math.inf)
    certain = np.maximum(0.0, np.where(np.isinf(added), math.inf, added - rounding))
    t, j = np.unravel_index(int(certain.argmax()), certain.shape)
    longest = float(certain[t, j])
    if longest <= 1 + _ROUNDED:
        return longest, []
    return longest, [
        f"{(certain > 1 + _ROUNDED).sum()} of {certain.size} updates add more than a clip norm to "
        f"the sum: in round {t}, one that was {_LENGTHS[int(t + j) % len(_LENGTHS)]:g} clip norms "
        f"long as sent adds {longest:.4g}."
    ]
