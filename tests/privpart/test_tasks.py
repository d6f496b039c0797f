import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from accounting import ConfigError
from privpart.data import cohorts_once_each, iid_users
from privpart.data.tasks import digits, fashion_mnist
from privpart.data.tasks.images import DEBIAN_FOLDER


def write_idx(path: Path, array: np.ndarray) -> None:
    magic = (0x800 + array.ndim).to_bytes(4, "big")
    shape = b"".join(n.to_bytes(4, "big") for n in array.shape)
    path.write_bytes(magic + shape + array.astype(np.uint8).tobytes())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("t10k", 4)):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", rng.integers(256, size=(count, 28, 28)))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", np.arange(count))
    return tmp_path


def test_digits_are_real_and_always_split_alike():
    task = digits()
    assert (len(task.train_x), len(task.test_x)) == (1437, 360)
    assert task.train_x.shape[1:] == (1, 8, 8)
    assert (float(task.train_x.min()), float(task.train_x.max())) == (0.0, 1.0)
    assert torch.equal(digits().test_y, task.test_y)
    assert set(task.test_y.tolist()) == set(range(10))


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


@pytest.mark.parametrize("damage", ["truncated", "empty", "other kind", "broken gzip"])
def test_damaged_files_are_named(folder, damage):
    images = folder / "train-images-idx3-ubyte"
    if damage == "truncated":
        images.write_bytes(images.read_bytes()[:-5])
    elif damage == "empty":
        images.write_bytes(b"")
    elif damage == "other kind":
        images.write_bytes((folder / "train-labels-idx1-ubyte").read_bytes())
    else:
        (folder / "train-images-idx3-ubyte.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="train-images-idx3-ubyte"):
        fashion_mnist(folder)


@pytest.mark.skipif(not DEBIAN_FOLDER.exists(), reason="needs dataset-fashion-mnist")
def test_the_real_files():
    task = fashion_mnist()
    assert task.train_x.shape == (60_000, 1, 28, 28)
    assert task.test_y.bincount().tolist() == [1000] * 10


def test_users_hold_disjoint_equal_shares():
    users = iid_users(100, users=7, data_seed=1)
    rows = torch.cat([*users])
    assert [len(u) for u in users] == [14] * 7
    assert len(set(rows.tolist())) == 98
    with pytest.raises(ConfigError, match="only 3 examples"):
        iid_users(3, users=4, data_seed=0)


def test_each_user_takes_part_at_most_once():
    cohorts = cohorts_once_each(users=20, rounds=6, data_seed=1)
    everyone = [client for cohort in cohorts for client in cohort]
    assert [len(cohort) for cohort in cohorts] == [3] * 6
    assert len(set(everyone)) == 18
    with pytest.raises(ConfigError, match="at most users=3"):
        cohorts_once_each(users=3, rounds=4, data_seed=0)
