"""Realised: what the clients in a log did, as a cost beside the one that was promised.

A log is a fact about one run. It says what that run cost and whether it kept a promise. It promises
nothing about the next one.
"""

import csv
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accounting import checks
from accounting.checks import ConfigError
from accounting.guarantee import Guarantee, Method, mu_upper
from accounting.mechanisms import Mechanism
from accounting.participation import Participation
from accounting.sensitivity import Sensitivity, rounded_up

_MOST_ROWS = 20_000_000
_MOST_BYTES = 1_000_000_000
_MOST_DENSE_ROUNDS = 2048
_MOST_PATTERNS = 100_000
_LONGEST = 9  # digits of a round in a log; more cannot be a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Realised:
    """The cost of what happened.

    Attributes:
        clients: number of clients in the log.
        max_participations: most rounds of one client.
        min_separation: least distance between two rounds of one client.
        sensitivity_squared: of the worst client's own rounds, or an upper bound.
        sensitivity_exact: False if it is only an upper bound.
        mu: sensitivity / noise_multiplier.
        epsilon: at the report's delta and by its method.
        deviations: ways in which the log goes beyond what was promised; empty if it kept to it.
    """

    clients: int
    max_participations: int
    min_separation: int
    sensitivity_squared: float
    sensitivity_exact: bool
    mu: float
    epsilon: float
    deviations: tuple[str, ...]

    @classmethod
    def of(
        cls,
        mechanism: Mechanism,
        histories: Mapping[str, Iterable[int]],
        promised: Participation,
        *,
        noise_multiplier: float,
        delta: float,
        method: Method = "exact",
    ) -> "Realised":
        """Return what these clients' rounds cost."""
        worst = Participation.from_log(mechanism.rounds, histories)
        realised = realised_sensitivity(mechanism, histories, worst)
        run = Guarantee(mu_upper(realised.squared, noise_multiplier), method)
        return cls(
            clients=len(histories),
            max_participations=worst.max_participations,
            min_separation=worst.min_separation,
            sensitivity_squared=realised.squared,
            sensitivity_exact=realised.exact,
            mu=run.mu,
            epsilon=run.epsilon(delta),
            deviations=_deviations(worst, histories, promised),
        )


def realised_sensitivity(
    mechanism: Mechanism, histories: Mapping[str, Iterable[int]], worst: Participation
) -> Sensitivity:
    """Return the squared sensitivity of the patterns in a log.

    Up to 2,048 rounds by the Gram matrix of the encoder, pattern by pattern; else, and where that
    is less, that of the log's own limits ``worst``.
    """
    limits = mechanism.sensitivity(worst)
    patterns = {tuple(sorted(rounds)) for rounds in histories.values()} - {()}
    small = mechanism.rounds <= _MOST_DENSE_ROUNDS and len(patterns) <= _MOST_PATTERNS
    if mechanism.groups is not None or not small or not patterns:
        return Sensitivity(limits.squared, exact=False, rule=f"limits of the log: {limits.rule}")
    encoder = mechanism.encoder()
    gram = encoder.T @ encoder
    scores = {rounds: float(np.abs(gram[np.ix_(rounds, rounds)]).sum()) for rounds in patterns}
    pattern = max(scores, key=lambda rounds: scores[rounds])
    k = worst.max_participations
    squared = rounded_up(scores[pattern], (mechanism.rounds + k) * k)
    attained = bool(gram[np.ix_(pattern, pattern)].min() >= -1e-12 * gram.max())
    if squared >= limits.squared:
        exact = attained and squared <= limits.squared * (1 + 1e-9)
        return Sensitivity(limits.squared, exact, f"limits of the log: {limits.rule}")
    return Sensitivity(squared, attained, "the worst client's own rounds")


def _deviations(
    worst: Participation, histories: Mapping[str, Iterable[int]], promised: Participation
) -> tuple[str, ...]:
    deviations = []
    if worst.max_participations > promised.max_participations:
        deviations.append(
            f"a client took part {worst.max_participations} times, "
            f"{promised.max_participations} promised"
        )
    if worst.max_participations > 1 and worst.min_separation < promised.min_separation:
        deviations.append(
            f"a client came again after {worst.min_separation} rounds, "
            f"{promised.min_separation} promised"
        )
    if promised.fixed_order:
        b, taken = promised.min_separation, map(list, histories.values())
        last = promised.max_participations * b
        if any(len({r % b for r in rs}) > 1 or max(rs, default=0) >= last for rs in taken):
            deviations.append("a client did not keep to the fixed order")
    return tuple(deviations)


def read_log(path: Path) -> dict[str, list[int]]:
    """Return each client's rounds, from a CSV file with the columns client and round."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(
                f"log {path}: has {path.stat().st_size:,} bytes; at most {_MOST_BYTES:,} are read."
            )
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _histories(path, csv.reader(file, strict=True))
    except OSError as error:
        raise ConfigError(f"log {path}: cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"log {path}: is not a CSV file: {error}.") from None


def _histories(path: Path, rows: Any) -> dict[str, list[int]]:  # noqa: ANN401  csv's own type
    names: list[str] = next(rows, [])
    if missing := {"client", "round"} - set(names):
        raise ConfigError(
            f"log {path}: its first line must name the columns client and round; it lacks "
            f"{' and '.join(sorted(missing))}."
        )
    alike = Counter(unicodedata.normalize("NFKC", name).strip().casefold() for name in names)
    if twice := [name for name, count in alike.items() if count > 1]:
        raise ConfigError(f"log {path}: has two columns {twice[0][:80]!a}; leave one of them out.")
    client_at, round_at = names.index("client"), names.index("round")
    histories: dict[str, list[int]] = {}
    for count, row in enumerate(filter(None, rows), start=1):  # without empty lines
        if count > _MOST_ROWS:
            raise ConfigError(f"log {path}: has more than {_MOST_ROWS:,} rows.")
        fault = f"has {len(row)} fields, the first line {len(names)}"
        if len(row) == len(names):
            client, taken = row[client_at], row[round_at]
            fault = ("" if client in histories else _fault_of_name(client)) or _fault_of_round(
                taken
            )
        if fault:
            raise ConfigError(f"log {path}, line {rows.line_num}: {fault}.")
        histories.setdefault(client, []).append(int(taken))
    if not histories:
        raise ConfigError(f"log {path}: lists no participation.")
    return histories


_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef]"
)
"""Printable characters that no screen shows: joiners, fillers, variation selectors."""


def _fault_of_name(name: str) -> str:
    """Return why one client could be listed as two under such a name; "" if it could not."""
    if not name:
        return "must hold a client and a round"
    if name != name.strip():
        return f"client {name[:80]!a} has whitespace around it; remove it"
    if not name.isprintable() or _UNSEEN.search(name):
        return f"client {name[:80]!a} has characters that cannot be seen; remove them"
    if not unicodedata.is_normalized("NFKC", name):
        normal = unicodedata.normalize("NFKC", name)
        return f"client {name[:80]!a} is not in normal form (NFKC); write {normal[:80]!a}"
    return ""


def _fault_of_round(text: str) -> str:
    if not (text.isascii() and text.isdigit()):
        return "must hold a client and a round, a whole number from 0 on"
    return f"a round must be below {checks.MOST_ROUNDS:,}" if len(text) > _LONGEST else ""
