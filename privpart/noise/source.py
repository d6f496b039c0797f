"""Noise source: the key that the Gaussian draws of the noise come from.

Draws are addressed, not consumed: (stream, salt, index, coordinate) always gives the same number,
so any slice of any draw can be made again alone, and no number depends on what was drawn before.
``privpart.noise.ziggurat`` makes the numbers.

A salt is part of the address, so that a round which is tried twice never has one noise under two
sums, not even on a disk: every noise stream of a secret source begins with a fresh salt, also when
it resumes a run, and the state keeps the salts of the rounds that were committed. A seeded source
has one salt for good, so that a resumed simulation ends as an undisturbed one.
"""

import ctypes
import hashlib
import os
import resource
import secrets
from typing import NoReturn

from accounting import checks
from accounting.checks import ConfigError
from privpart.noise.ziggurat import Draws

SALT_BYTES = 16
_PR_SET_DUMPABLE = 4  # of prctl(2)


class NoiseSource:
    """Standard normal draws by address, from a key.

    Attributes:
        private: whether the draws are secret; if not, no guarantee may be claimed.
        identity: equal for sources of the same draws; reveals nothing about secret ones.
    """

    private: bool
    identity: str

    def __init__(self, key: bytes) -> None:
        self._key = key

    def claim(self, stream: int) -> None:
        """Take one stream of draws for one noise stream; a secret source refuses a second claim."""

    def salt(self) -> bytes:
        """Return the salt of a new attempt: none, so a resumed simulation draws what it did."""
        return b""

    def draws(self, stream: int, salt: bytes) -> Draws:
        """Return the draws of a stream, an id from 0 to 2^32 - 1, under a salt."""
        if type(stream) is not int or not 0 <= stream < 2**32:
            raise ConfigError(f"stream={stream!r}: must be a whole number from 0 to 2^32 - 1.")
        address = b"privpart draws|%d|" % stream + salt
        return Draws(hashlib.sha256(self._key + address).digest())

    def cohort_key(self) -> bytes:
        """Return the 32 bytes that the cohorts of a sampled run are drawn from.

        A hash of the noise key, so a run that is resumed draws the same cohorts, and whoever erases
        the noise key erases it, too. It is as secret as the noise.
        """
        return hashlib.sha256(b"privpart cohort key|" + self._key).digest()


class SecretSource(NoiseSource):
    """Draws under a secret key; for every run whose result is released.

    Args:
        key: 32 bytes; None draws them from the operating system. Never the seed of anything else,
            and never for two runs: the same key under the same salt repeats the same noise, and the
            difference of the two releases has none. To resume with the same draws, keep the key
            yourself; the source never shows it, and refuses to be copied or pickled.

    The first one turns off core dumps of this process for good, in which the key would lie. On
    Linux, other processes of the same user can then not read its memory either. Python and OpenSSL
    copy keys, so the key is in memory until the process ends, and may be in swap.
    """

    private = True

    def __init__(self, key: bytes | None = None) -> None:
        key = secrets.token_bytes(32) if key is None else key
        if not isinstance(key, bytes) or len(key) != 32:
            raise ConfigError("key: must be 32 bytes; leave it out to draw them from the system.")
        _forbid_core_dumps()
        # never shown, compared or copied: whoever has it can remove the noise
        super().__init__(key)
        self.identity = f"secret:{hashlib.sha256(b'privpart source identity|' + key).hexdigest()}"
        self._process = os.getpid()
        self._claimed: set[int] = set()

    def claim(self, stream: int) -> None:
        """Take ``stream`` for one run."""
        stream = checks.count("stream", stream, minimum=0)
        # two streams under one id would have the same noise, which cancels in their difference
        if stream in self._claimed:
            raise ConfigError(
                f"stream={stream}: this SecretSource already feeds a noise stream under that id; a "
                "second one would repeat its noise, which then cancels. Use another stream id for "
                "another group of parameters, and a SecretSource() for each run."
            )
        self._claimed.add(stream)

    def salt(self) -> bytes:
        """Return 16 bytes from the operating system."""
        return secrets.token_bytes(SALT_BYTES)

    def draws(self, stream: int, salt: bytes) -> Draws:
        """Return the draws of a stream under a salt."""
        # a fork has the key and the claims, and would draw what its parent draws
        if os.getpid() != self._process:
            raise ConfigError(
                "this process was forked from the one that holds the noise key, and would repeat "
                "its noise. Draw in the process that made the SecretSource."
            )
        return super().draws(stream, salt)

    def __repr__(self) -> str:
        return "SecretSource(<key>)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("SecretSource: is never copied or pickled; a copy would repeat its noise.")


class SeededSource(NoiseSource):
    """Draws from a public seed, for simulations: anyone who knows the seed can remove the noise.

    Args:
        seed: >= 0. A run that used it reports "seeded: not private".
    """

    private = False

    def __init__(self, seed: int) -> None:
        self.seed = checks.count("seed", seed, minimum=0)
        self.identity = f"seeded:{self.seed}"
        super().__init__(hashlib.sha256(f"privpart seeded source|{self.seed}".encode()).digest())

    def __repr__(self) -> str:
        return f"SeededSource({self.seed})"


def _forbid_core_dumps() -> None:
    """Let the system write no core dump of this process, and on Linux nobody trace it."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard_limit))
    try:
        # the limit does not bind a system that pipes core dumps to a program
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    except (AttributeError, OSError):
        return  # no Linux
