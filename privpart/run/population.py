"""Names of populations: which people a run is about, and when two names mean the same people.

Names that differ only in what is not heard when they are read out (case, spaces, hyphens, forms of
a letter, characters without width) are one population.
"""

import re
import unicodedata
from functools import lru_cache

from accounting.checks import ConfigError

PUBLIC_DATA = "task:"
"""How the names of populations of built-in tasks begin. Nobody can type such a name in a plan."""
LONGEST_NAME = 100
_SILENT = {"Cc", "Cf", "Pc", "Pd", "Zl", "Zp", "Zs"}
"""Categories of characters that are not heard: controls, connectors, dashes and spaces."""
_WITHOUT_WIDTH = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\ufe00-\ufe0f\U0001d159\U000e0100-\U000e01ef]"
)
"""Characters of other categories that show nothing."""


@lru_cache(4096)
def spoken(name: str) -> str:
    """Return a name without what is not heard when it is read out."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    heard = (sign for sign in folded if unicodedata.category(sign) not in _SILENT)
    return _WITHOUT_WIDTH.sub("", "".join(heard))


def is_public(population: str) -> bool:
    """Return whether a name is that of a built-in task, whose data are public."""
    return spoken(population).startswith(PUBLIC_DATA)


def refuse_population(name: object) -> str:
    """Return the name of a population, after checking it.

    Raises:
        ConfigError: it is empty, too long, or not one line of printable characters in one form.
    """
    if not isinstance(name, str) or not _is_plain(name):
        raise ConfigError(
            f"population={str(name)[:LONGEST_NAME]!r}: must be 1 to {LONGEST_NAME} printable "
            'characters with a letter or digit, without spaces around them, such as "keyboard-de".'
        )
    return name


def _is_plain(name: str) -> bool:
    # NFC: two encodings of one accent would be two populations that look the same.
    shown = name.isprintable() and unicodedata.is_normalized("NFC", name) and name.strip() == name
    return shown and len(name) <= LONGEST_NAME and bool(spoken(name))
