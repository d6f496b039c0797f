"""Checks: return an argument that is in its range, or raise an error that states the range.

Every test is written positively (``if not x > 0``): each comparison with NaN is false, so a test
written the other way round accepts NaN, which then becomes a plausible epsilon.
"""

import json
import math
import operator
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, SupportsFloat, SupportsIndex


class ConfigError(ValueError):
    """Invalid argument; the message says what was passed, what is allowed and what to do."""


class MissingExtraError(ConfigError):
    """An optional package is not installed; the message says how to install it."""


Faults = Mapping[str, object]  # sentence -> whether it is deserved
_GOOGOL = 10**100
"""As a float, this number and its square are finite. Python refuses to print very long integers."""
_ROUNDED = 1 + 1e-12  # so that a product of floats that is 1 is not rounded to less
MOST_ROUNDS = 1_000_000
"""Sensitivities of this many rounds take seconds with few participations, minutes with the most."""
MOST_SEED = 2**63 - 1
"""Generators of random numbers take a signed number of 64 bits."""


def refuse_first(faults: Faults) -> None:
    """Raise ``ConfigError`` with the first sentence that is deserved."""
    for sentence, fault in faults.items():
        if fault:
            raise ConfigError(sentence)


def count(
    name: str, value: SupportsIndex, *, minimum: int = 1, maximum: int = _GOOGOL, hint: str = ""
) -> int:
    """Return ``value`` as an int from ``minimum`` to ``maximum``; refuse booleans and floats."""
    if isinstance(value, bool):
        raise ConfigError(f"{name}={value}: must be a whole number, not a truth value.")
    try:
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name}={value!r}: must be a whole number.") from None
    if not number >= minimum:
        fault = f"{name}={_shown(number)}: must be at least {minimum}"
        raise ConfigError(_sentence(fault, hint))
    if number > maximum:
        fault = f"{name}={_shown(number)}: must be at most {_shown(maximum)}"
        raise ConfigError(_sentence(fault, hint))
    return number


def rounds(value: SupportsIndex) -> int:
    """Return a number of rounds, from 1 to ``MOST_ROUNDS``."""
    return count("rounds", value, maximum=MOST_ROUNDS)


def positive(name: str, value: SupportsFloat, *, hint: str = "") -> float:
    """Return ``value`` as a finite float above zero."""
    number = _real(name, value)
    if not 0 < number < math.inf:
        raise ConfigError(_sentence(f"{name}={number:g}: must be positive and finite", hint))
    return number


def between(name: str, value: SupportsFloat, least: float, most: float, fault: str) -> float:
    """Return ``value`` as a float from ``least`` > 0 to ``most``; ``fault`` names what is."""
    number = positive(name, value)
    if not least <= number <= most:
        raise ConfigError(f"{name}={number:g}: {fault}.")
    return number


def rate(name: str, value: SupportsFloat) -> float:
    """Return ``value`` as a float in (0, 1]."""
    return between(name, value, 0.0, 1.0, "must be at most 1")


def nonnegative(name: str, value: SupportsFloat, *, hint: str = "") -> float:
    """Return ``value`` as a finite float, zero or above."""
    number = _real(name, value)
    if not 0 <= number < math.inf:
        raise ConfigError(_sentence(f"{name}={number:g}: must be zero or more, and finite", hint))
    return number


def finite(name: str, value: SupportsFloat) -> float:
    """Return ``value`` as a finite float."""
    number = _real(name, value)
    if not math.isfinite(number):
        raise ConfigError(f"{name}={number:g}: must be finite.")
    return number


def probability(name: str, value: SupportsFloat, *, hint: str = "") -> float:
    """Return ``value`` as a float strictly between 0 and 1."""
    number = _real(name, value)
    if not 0 < number < 1:
        raise ConfigError(_sentence(f"{name}={number:g}: must lie strictly between 0 and 1", hint))
    return number


def is_large_delta(delta: SupportsFloat, population: int | None = None) -> bool:
    """Whether delta is 1 / population or more; 0.1 or more if the population is not known.

    Publishing the data of one unit, chosen at random, has such a delta (Dwork and Roth 2014,
    section 2.3).
    """
    number = probability("delta", delta)
    if population is None:
        return number >= 0.1
    return number * count("population", population) * _ROUNDED >= 1


def delta_warning(
    delta: SupportsFloat, population: int | None = None, *, unit: str = "client"
) -> str:
    """Return a warning if delta is not far below 1 / population; "" if it is.

    Far below is less than 0.1 / population. If the population is not known, less than 1e-4, which
    is sound for 1,000 units.

    >>> print(delta_warning(1e-5, 50_000))
    delta=1e-05: is 0.5 / 50,000; for 50,000 clients it should be below 0.1 / 50,000.
    >>> delta_warning(1e-6, 50_000)
    ''
    """
    number = probability("delta", delta)
    large = is_large_delta(number, population)
    random_one = f"publishing the data of one {unit}, chosen at random, has such a delta"
    if population is None:
        if large:
            return f"delta={number:g}: is too large for any number of {unit}s: {random_one}."
        if number < 1e-4:
            return ""
        return (
            f"delta={number:g}: is sound for fewer than {math.ceil(0.1 / number):,} {unit}s, and "
            "how many there are was not given (population)."
        )
    share = number * population * _ROUNDED
    if share < 0.1:
        return ""
    sound = f"for {population:,} {unit}s it should be below 0.1 / {population:,}."
    if large:
        return f"delta={number:g}: is 1 / {population:,} or more: {random_one}; {sound}"
    return f"delta={number:g}: is {share:.2g} / {population:,}; {sound}"


def accept_delta(
    delta: SupportsFloat,
    population: int | None = None,
    *,
    allow_large: bool = False,
    unit: str = "client",
) -> str:
    """Return the warning about a delta, "" if there is none, unless it must be refused."""
    number = probability("delta", delta)
    warning = delta_warning(number, population, unit=unit)
    if is_large_delta(number, population) == allow_large:
        return warning
    if allow_large:
        raise ConfigError(
            f"allow_large_delta=True: has no effect, delta={number:g} is allowed without it; leave "
            "it out."
        )
    raise ConfigError(
        f"{warning} Or allow it (allow_large_delta), and every report will repeat this."
    )


def reals(name: str, values: Iterable[SupportsFloat]) -> tuple[float, ...]:
    """Return ``values`` as a tuple of at least one finite float."""
    try:
        numbers = tuple(_real(f"{name}[{index}]", value) for index, value in enumerate(values))
    except TypeError:
        raise ConfigError(f"{name}={values!r}: must be a sequence of numbers.") from None
    if not numbers:
        raise ConfigError(f"{name}: must have at least one entry.")
    return tuple(finite(f"{name}[{index}]", number) for index, number in enumerate(numbers))


def choice(name: str, value: str, allowed: Sequence[str]) -> str:
    """Return ``value`` if it is one of ``allowed``."""
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(allowed)}.")
    return value


def text_of(path: str | Path, name: str, *, most: int = 10**7) -> str:
    """Return the text of a file that a person wrote, in UTF-8, with or without a byte order mark.

    Args:
        path: of a regular file; nothing else is waited for, such as a pipe.
        name: what the errors call it.
        most: bytes that it may have.

    Raises:
        ConfigError: it is missing, not a regular file, larger, unreadable, or not UTF-8.
    """
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise ConfigError(f"{name}: cannot be read: it is not a file.")
        with Path(path).open("rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise ConfigError(f"{name}: has more than {most:,} bytes.")
        return content.decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{name}: there is no such file.") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: is not UTF-8 text, from byte {error.start} on.") from None


def two_columns(
    path: Path, name: str, columns: tuple[str, str], kind: type[float], hint: str = ""
) -> list[tuple[Any, float]]:
    """Return the rows of a CSV file of two columns, the first of numbers of a ``kind``.

    Raises:
        ConfigError: the file cannot be read, or has other columns or something else than numbers.
    """
    lines = text_of(path, name).splitlines()
    header, *rows = [line.split(",") for line in lines if line.strip()] or [[]]
    if tuple(column.strip() for column in header) != columns or not rows:
        columns_named = " and ".join(columns)
        raise ConfigError(f"{name}: must be a CSV file with the columns {columns_named}{hint}.")
    try:
        return [(kind(first), float(second)) for first, second in rows]
    except ValueError as error:
        raise ConfigError(f"{name}: a line is not two numbers: {error}.") from None


def parsed_toml(text: str, name: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raises:
        ConfigError: it is not valid TOML; the message calls it ``name``.
    """
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # as for integers of 5,000 digits
        comma = re.search(r"=\s*-?\d+,\d", text)
        hint = " A decimal number has a point, such as 0.5." if comma else ""
        raise ConfigError(f"{name}: is not valid TOML: {error}.{hint}") from None


def parsed_json(text: str | bytes) -> Any:  # noqa: ANN401  any JSON
    """Return what a JSON text says.

    Raises:
        ValueError: it is not JSON, names a key twice, of which other readers take the other value,
            or holds NaN or an infinity.
        RecursionError: it is nested too deeply.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise ValueError(f"the key {key[:80]!a} is there twice")
            values[key] = value
        return values

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number")

    def finite(digits: str) -> float:
        # Such as 1e400, which is JSON.
        return number if math.isfinite(number := float(digits)) else refuse(digits[:80])

    return json.loads(text, object_pairs_hook=once, parse_constant=refuse, parse_float=finite)


def _shown(number: int) -> str:
    if number == _GOOGOL:
        return "10^100"
    return str(number) if abs(number) < _GOOGOL else "(more than 100 digits)"


def _real(name: str, value: SupportsFloat) -> float:
    if isinstance(value, bool | str):
        raise ConfigError(f"{name}={value!r}: must be a number.")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name}={value!r}: must be a number.") from None


def _sentence(fault: str, hint: str) -> str:
    return f"{fault}. {hint}".rstrip()
