"""TensorFlow Federated's files: read, trained on, and refused where they are not what they seem."""

import json
import sys
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from accounting import ConfigError
from accounting.checks import MissingExtraError
from privpart.cli.main import app
from privpart.data import federated_hdf5

ZEROS, CLASSES = np.zeros((2, 28, 28), np.float32), np.array([1, 2], np.int32)
ONE_NAN = np.where(np.arange(2).reshape(2, 1, 1) == 1, np.float32("nan"), ZEROS)
PLAN = """
schema = "privpart/plan/1"
[privacy]
rounds = 3
clip_norm = 0.3
noise_multiplier = 1.0
delta = 1e-5
mechanism = {{ name = "tree" }}
[model]
name = "emnist_cnn"
train = ["dense2.*"]
seed = 7
[data]
task = "fed-emnist"
directory = "{}"
clients_per_round = 4
[client]
learning_rate = 0.1
[server]
"""


@pytest.fixture
def h5py():
    return pytest.importorskip("h5py", reason="the extra 'tff' is not installed")


@pytest.fixture
def write(h5py, tmp_path):
    """Write users, name -> data set -> values, in TFF's layout; return the file."""

    def written(users, *, name="fed_emnist_train.h5"):
        with h5py.File(tmp_path / name, "w") as file:
            examples = file.create_group("examples")
            for user, sets in users.items():
                group = examples.create_group(user)
                for key, values in sets.items():
                    group.create_dataset(key, data=values)
        return tmp_path / name

    return written


@pytest.fixture
def writers(write):
    """Twelve users of fed_emnist, in its two files, and a plan."""
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        users = {}
        for user in range(12):
            n = int(rng.integers(1, 5))
            pixels, label = rng.random((n, 28, 28), np.float32), rng.integers(62, size=n)
            users[f"f{user:04d}_{user:02d}"] = {"pixels": pixels, "label": label.astype(np.int32)}
        path = write(users, name=f"fed_emnist_{part}.h5")
    (path.parent / "plan.toml").write_text(PLAN.format(path.parent))
    return path.parent


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_users_and_their_names_in_order(write):
    users, names = federated_hdf5(
        write(
            {
                "f0002": {"pixels": ZEROS + 1, "label": CLASSES},
                "f0001": {"pixels": ZEROS[:1], "label": np.array([61], np.int32)},
                "f0003": {"pixels": ZEROS[:0], "label": CLASSES[:0]},
            }
        )
    )
    assert names == ["f0001", "f0002", "f0003"]
    assert (users.x.shape, users.x.dtype, users.y.dtype) == (
        (3, 1, 28, 28),
        torch.float32,
        torch.int64,
    )
    assert [users.y[own].tolist() for own in users.indices] == [[61], [1, 2], []]
    assert [users.x[own].sum().item() for own in users.indices] == [0, 2 * 28 * 28, 0]


def test_a_plan_on_fed_emnist_trains(writers):
    told = call(
        "train", "--plan", writers / "plan.toml", "--out", writers / "run", "--format", "json"
    )
    assert told.exit_code == 0, told.output
    report = json.loads(told.stdout)
    assert (report["rounds"], report["complete"]) == (3, True)
    planned = json.loads(
        call("epsilon", "--plan", writers / "plan.toml", "--format", "json").stdout
    )
    assert report["guarantee"]["epsilon"] == planned["epsilon"]


def test_a_damaged_file_begins_no_run(writers, write):
    path = writers / "fed_emnist_test.h5"
    path.write_bytes(path.read_bytes()[:-1])
    for damage, words in (
        (lambda: None, "truncated"),
        (lambda: write({"u": {"pixels": ZEROS[:, :8, :8], "label": CLASSES}}, name=path.name),
         "images of different shapes"),
        (path.unlink, "fed_emnist_test.h5: put the file there"),
    ):  # fmt: skip
        damage()
        ended = call("train", "--plan", writers / "plan.toml", "--out", writers / "run")
        assert isinstance(ended.exception, ConfigError)
        assert words in str(ended.exception)
    assert not (writers / "run").exists()
    assert call("epsilon", "--plan", writers / "plan.toml").exit_code == 0  # a plan has its cost


def test_the_extra_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'privpart\[tff\]'"):
        federated_hdf5(tmp_path / "fed_emnist_train.h5")


WRONG = [
    ({"u": {"pixels": ZEROS}}, "user u has no data set label"),
    ({"KENT": {"snippets": np.array([b"to be", b"or not"])}}, "user KENT has no data set pixels"),
    ({"u": {"pixels": np.array([b"to", b"be"]), "label": CLASSES}}, "must be numbers"),
    ({"u": {"pixels": ZEROS, "label": CLASSES + 0.5}}, "labels whole numbers"),
    ({"u": {"pixels": ZEROS > 0, "label": CLASSES}}, "must be numbers"),
    ({"u": {"pixels": ZEROS, "label": CLASSES[:1]}}, "every input needs one label"),
    ({"u": {"pixels": 3.0, "label": 3}}, "every input needs one label"),
    ({"u": {"pixels": ONE_NAN, "label": CLASSES}}, "user u has NaN or infinity"),
    ({"u": {"pixels": ZEROS + np.float64(1e300), "label": CLASSES}}, "user u has NaN or inf"),
    ({"u": {"pixels": ZEROS, "label": -100 * CLASSES}}, "a label below 0"),
    ({"u": {"pixels": ZEROS, "label": np.array([1, 2**64 - 1], np.uint64)}}, "range of 64 bits"),
    ({"u": {"pixels": ZEROS[:0], "label": CLASSES[:0]}}, "no user has an example"),
    ({}, "no user has an example"),
]


@pytest.mark.parametrize(("users", "says"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_other_files_are_one_sentence(write, users, says):
    with pytest.raises(ConfigError, match=says) as refused:
        federated_hdf5(write(users))
    assert "is not a federated HDF5 file with pixels and label: " in str(refused.value)
    assert "\n" not in str(refused.value)


def loop(h5py, file):
    file["examples"] = h5py.SoftLink("/examples")


def no_group(_, file):
    file["examples"] = [1]


def user_without_group(_, file):
    file.create_group("examples")["u"] = [1]


def a_link(h5py, file):
    file.create_group("examples/u")["label"] = CLASSES
    file["examples/u/pixels"] = h5py.ExternalLink("other.h5", "/examples/v/pixels")


def foreign_bytes(_, file):
    group = file.create_group("examples/u")
    group["label"] = CLASSES
    group.create_dataset("pixels", (2, 28, 28), "u1", external=[(__file__, 0, 2 * 28 * 28)])


def virtual(h5py, file):
    layout = h5py.VirtualLayout((2, 28, 28), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "/examples/v/pixels", (2, 28, 28))
    file.create_group("examples/u")["label"] = CLASSES
    file["examples/u"].create_virtual_dataset("pixels", layout)


def bomb(_, file):
    group = file.create_group("examples/u")
    group.create_dataset("pixels", (10**7, 28, 28), "f4", chunks=(1, 28, 28))
    group.create_dataset("label", (10**7,), "i4", chunks=(1000,))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (loop, "too many links"),
        pytest.param(no_group, "examples is not a group", id="no_group-examples is no group"),
        (user_without_group, "user u has no data set pixels"),
        (a_link, "pixels of user u points to another file"),
        (foreign_bytes, "pixels of user u points to another file"),
        (virtual, "pixels of user u points to another file"),
        pytest.param(
            bomb,
            "declares 31400000000 bytes, more than it can contain",
            id="bomb-declares 31400000000 bytes, which cannot be in it",
        ),
    ],
)
def test_files_that_lead_elsewhere_or_fill_the_memory(h5py, write, make, says):
    write({"v": {"pixels": ZEROS, "label": CLASSES}}, name="other.h5")
    path = write({})
    with h5py.File(path, "w") as file:
        make(h5py, file)
    with pytest.raises(ConfigError, match=says):
        federated_hdf5(path)


def test_damaged_bytes_are_an_error_or_finite_numbers(writers):
    path, rng, found = writers / "fed_emnist_train.h5", np.random.default_rng(1), Counter()
    whole = path.read_bytes()
    for places in [partial(rng.integers, 4000), partial(rng.integers, len(whole))] * 8:
        damaged = bytearray(whole)
        for place in places(size=20):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            users, _ = federated_hdf5(path)
        except ConfigError:
            found["refused"] += 1
        else:
            assert users.x.isfinite().all()
            assert (users.y >= 0).all()
            found["read"] += 1
    assert min(found["refused"], found["read"]) > 1
