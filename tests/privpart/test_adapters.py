import ast
import pickle
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import TensorDataset

from accounting import ConfigError
from privpart import data
from privpart.data import (
    IndexedClients,
    Users,
    check_clients,
    cohorts_in_turn,
    cohorts_once_each,
    from_dataset,
    from_folders,
    from_frame,
    from_npz,
    from_tensors,
)
from privpart.data.index import Index

OWNERS = np.array(["b", "a", "b", "c"])
X = np.arange(8, dtype=np.float64).reshape(4, 2)
Y = np.array([0, 1, 2, 1], dtype=np.int8)
FRAME = pd.DataFrame(
    {
        "who": OWNERS,
        "age": [30, 40, 50, 60],
        "height": [1.5, 1.6, 1.7, 1.8],
        "label": [0, 1, 1, 0],
        "text": ["w", "x", "y", "z"],
    }
)


def equal(found, expected) -> bool:
    return all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


def refused(sentence):
    return pytest.raises(ConfigError, match=sentence)


# Users


@pytest.mark.parametrize(
    ("x", "y", "rows", "sentence"),
    [
        (torch.rand(4).double(), torch.arange(4), [[0]], r"x: has type torch.float64.*x\.float"),
        (torch.zeros(4, dtype=torch.uint8), torch.arange(4), [[0]], "x: has type torch.uint8"),
        (torch.rand(4), torch.arange(4).int(), [[0]], r"y: has type torch.int32.*y\.long"),
        (X, torch.arange(4), [[0]], "x: is a ndarray.*from_tensors converts"),
        (torch.rand(4), torch.arange(3), [[0]], "x has 4 rows, y has 3"),
        (torch.rand(4), torch.tensor(1), [[0]], "y: is a single number"),
        (torch.rand(4), torch.arange(4), {"a": [0], "z": [9]}, "row 9 of 4, which client 'z'"),
        (torch.rand(4), torch.arange(4), {"a": [0], "z": [-1]}, "row -1 of 4, which client 'z'"),
        (torch.rand(4), torch.arange(4), {"a": [0], "z": []}, "client 'z': has no example"),
        (
            torch.tensor([[0.0, 1.0], [torch.nan, 0.0]]),
            torch.arange(2),
            {"a": [0], "z": [1]},
            r"x, row 1 \(client 'z'\): holds NaN",
        ),
        (
            torch.rand(2),
            torch.tensor([0.5, torch.inf]),
            {"a": [0], "z": [1]},
            r"y, row 1 \(client 'z'\): holds NaN",
        ),
    ],
)
def test_users_that_could_not_train_are_refused(x, y, rows, sentence):
    with refused(sentence):
        Users(x, y, rows)


def test_users_without_examples_must_be_asked_for():
    x, y = torch.rand(2), torch.arange(2)
    assert len(Users(x, y, [[0], [], [1]], allow_empty=True).examples(1)[0]) == 0
    with refused(r"client 1 \(and 1 more\): has no example"):
        Users(x, y, [[0], [], []])


# cohorts


def test_cohorts_of_ids_are_those_of_numbers():
    ids = Index.of_owners([f"client {n}" for n in range(10)]).ids
    for call in (
        lambda **who: cohorts_once_each(**who, rounds=3, data_seed=1),
        lambda **who: cohorts_in_turn(**who, size=4, rounds=5, data_seed=1),
    ):
        assert call(ids=ids) == [[ids[n] for n in cohort] for cohort in call(users=10)]
        with refused("users, ids: pass one of them"):
            call(users=10, ids=ids)
        with refused("users, ids: pass one of them"):
            call()
        with refused("ids: must be a list"):
            call(ids="abc")


# arrays


def test_other_nests_are_general_clients():
    nest = {"ids": np.arange(12, dtype=np.int32).reshape(4, 3), "more": [torch.rand(4), Y > 0]}
    clients = from_tensors(nest, user=[5, 5, 6, 2**64 - 1])
    assert isinstance(clients, IndexedClients)
    assert list(clients.ids) == [5, 6, 2**64 - 1]
    found = clients.examples(5)
    assert found["ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert [t.dtype for t in (found["ids"], *found["more"])] == [
        torch.int64,
        torch.float32,
        torch.int64,
    ]
    assert equal([pickle.loads(pickle.dumps(clients)).examples(5)["ids"]], [found["ids"]])
    assert check_clients(clients) == 3


@pytest.mark.parametrize(
    ("examples", "user", "sentence"),
    [
        ((X, Y[:3]), OWNERS, "y has 3 rows, and 4 ids"),
        ((X, Y), OWNERS[:3], "x has 4 rows, and 3 ids"),
        ((X * 1e300, Y), OWNERS, r"x, row 0 \(client 'b'\): holds NaN, infinity or a number too"),
        ((np.where(X == 3, np.nan, X), Y), OWNERS, r"x, row 1 \(client 'a'\)"),
        ((X, np.array([0, 1, None, 1], object)), OWNERS, r"y, row 2 \(client 'b'\): is 'None'"),
        ((X, OWNERS), OWNERS, "y: has type <U1"),
        ((X + 1j, Y), OWNERS, "x: has type complex128"),
        ((X, Y.astype("datetime64[s]")), OWNERS, "y: has type datetime64"),
        ((np.zeros((4, 8, 8), np.uint8), Y), OWNERS, "x: has type uint8.*float32'\\) / 255"),
        ((X, np.full(4, 2**63, np.uint64)), OWNERS, "y: has whole numbers of 2\\^63"),
        ((X.tolist(), Y), OWNERS, r"x\[0\]\[0\]: is a float; must be a tensor"),
        ({"a": X, "b": Y[:3]}, OWNERS, r"examples\['b'\] has 3 rows"),
        ((FRAME, Y), OWNERS, r"x: is a DataFrame.*to_numpy"),
        ((torch.tensor(1.0), Y), OWNERS, "x has no rows"),
    ],
)
def test_arrays_that_are_not_examples_are_refused(examples, user, sentence):
    with refused(sentence):
        from_tensors(examples, user=user)


def test_arrays_on_disk_stay_there(tmp_path):
    file = tmp_path / "x"
    disk = np.memmap(file, np.float64, "w+", shape=(1000, 64))
    disk[:] = np.arange(1000)[:, None]
    disk.flush()
    own = np.memmap(file, np.float64, "r", shape=(1000, 64))
    clients = from_tensors((own, np.zeros(1000, np.int64)), user=np.arange(1000) // 10)
    sent = pickle.dumps(clients)
    assert len(sent) < 30_000 < own.nbytes
    copy = pickle.loads(sent)
    for some in (clients, copy):
        x, y = some.examples(7)
        assert x.dtype is torch.float32
        assert x[:, 0].tolist() == list(range(70, 80))
        assert y.tolist() == [0] * 10
    disk[75, 3] = np.nan
    disk.flush()
    with refused(r"client 7, row 75: examples\[0\] holds NaN"):
        copy.examples(7)
    slice_ = from_tensors((own[10:], np.zeros(990, np.int64)), user=np.arange(10, 1000) // 10)
    assert pickle.loads(pickle.dumps(slice_)).examples(3)[0][:, 0].tolist() == list(range(30, 40))


def test_npz(tmp_path):
    file = tmp_path / "data.npz"
    np.savez(file, images=X, y=Y, user=OWNERS, objects=np.array(["a", 1, 2, 3], object))
    users = from_npz(file, x="images")
    assert isinstance(users, Users)
    assert equal(users.examples("b"), from_tensors((X, Y), user=OWNERS).examples("b"))
    with refused("has no array 'x'; it has: images, y, user"):
        from_npz(file)
    with refused("'objects' holds Python objects, which are not read"):
        from_npz(file, x="images", user="objects")
    np.savez(file, x=np.where(X == 3, np.inf, X), y=Y, user=OWNERS)
    with refused(r"x, row 1 \(client 'a'\)"):
        from_npz(file)


def test_damaged_npz_files(tmp_path):
    file, whole, array = (tmp_path / name for name in ("data.npz", "whole.npz", "array.npy"))
    np.savez(whole, x=X, y=Y, user=OWNERS)
    np.save(array, X)
    raw = whole.read_bytes()
    place = raw.index(X.tobytes()[-8:])
    flipped = raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]
    for damaged in (None, raw[:-40], b"", array.read_bytes(), b"junk", flipped):
        if damaged is not None:
            file.write_bytes(damaged)
        with refused(r"data\.npz: (there is no|is not an|cannot be read)"):
            from_npz(file)
    with refused("is not an|cannot be read"):
        from_npz(tmp_path)


# frames


@pytest.mark.parametrize(
    ("column", "ids"),
    [
        (pd.array([3, 1, 3, 2], "Int64"), [1, 2, 3]),
        (pd.array(["b", "a", "b", "é"], "string"), ["a", "b", "é"]),
        (pd.Categorical(["b", "a", "b", "b"]), ["a", "b"]),
        (np.array([2**64 - 1, 0, 5, 5], np.uint64), [0, 5, 2**64 - 1]),
        (pd.Series([2**70, "x", 1, "1"], dtype=object), [1, 2**70, "1", "x"]),
    ],
)
def test_columns_of_users_of_any_type(column, ids):
    frame = FRAME.assign(who=column)
    assert list(from_frame(frame, user="who", x=["age"], y="label").ids) == ids


@pytest.mark.parametrize(
    ("written", "ids"),
    [
        ("7,8,7", [7, 8]),
        ("007,7,8", ["007", "7", "8"]),
        ("NA,null,b", ["NA", "b", "null"]),
        ("1.5,2,3", ["1.5", "2", "3"]),
        ("-1,18446744073709551616,0", [-1, 0, 2**64]),
    ],
)
def test_users_of_a_csv_file_are_what_is_written(tmp_path, written, ids):
    file = tmp_path / "data.csv"
    file.write_text("who,x,y\n" + "".join(f"{own},1.5,0\n" for own in written.split(",")))
    assert list(from_frame(file, user="who", x=["x"], y="y").ids) == ids


def test_frames_in_files(tmp_path):
    FRAME.to_csv(tmp_path / "data.csv.gz")
    FRAME.to_parquet(tmp_path / "data.parquet")
    expected = from_frame(FRAME, user="who", x=["age"], y="label")
    for name in ("data.csv.gz", "data.parquet"):
        found = from_frame(str(tmp_path / name), user="who", x=["age"], y="label")
        assert equal(found.examples("b"), expected.examples("b"))
    for name, text in (("no.csv", None), ("x.csv", ""), ("x.parquet", "junk"), ("x.txt", "a")):
        if text is not None:
            (tmp_path / name).write_text(text)
        with refused(rf"{name}: (there is no|cannot be read|must end in)"):
            from_frame(tmp_path / name, user="who", x=["age"], y="label")


GAP = pd.Series([1.0, np.nan, 2.0, 3.0])


@pytest.mark.parametrize(
    ("options", "columns", "sentence"),
    [
        ({"user": "whom"}, {}, "user='whom': the table has no such column.*did you mean 'who'"),
        ({"x": ["weight"]}, {}, "x='weight': the table has no such column"),
        ({"y": "labels"}, {}, "y='labels': .*did you mean 'label'"),
        ({"x": "age"}, {}, r"x='age': must be a list of columns"),
        ({"x": None}, {}, "x, y: name the columns"),
        ({"x": ["age", "text"]}, {}, r"column 'text', row 0 \(client 'b'\): is 'w', of type str"),
        ({}, {"age": GAP}, r"column 'age', row 1 \(client 'a'\): holds NaN"),
        ({}, {"age": GAP.fillna(np.inf)}, r"column 'age', row 1 \(client 'a'\): holds"),
        ({}, {"age": GAP.fillna(1e39)}, r"column 'age', row 1 \(client 'a'\): holds"),
        ({}, {"label": GAP}, r"column 'label', row 1 \(client 'a'\)"),
        ({}, {"label": pd.to_datetime(["2020"] * 4)}, "column 'label', row 0 .*of type Timestamp"),
        ({}, {"label": [1j] * 4}, "column 'label', row 0 .*of type complex"),
        ({}, {"label": np.full(4, 2**63, np.uint64)}, r"column 'label': .*2\^63"),
        ({}, {"who": [None, "a", "b", "c"]}, "column 'who', row 0: has no user"),
        ({}, {"who": GAP}, "column 'who', row 1: has no user"),
        ({}, {"who": GAP.fillna(0)}, "column 'who': has type float64"),
        ({}, {"who": [True] * 4}, "column 'who': has type bool"),
        ({}, {"who": [("a",)] * 4}, r"column 'who'\[0\]: client id"),
        ({"examples": len}, {}, "examples: cannot be combined"),
    ],
)
def test_frames_that_are_not_examples_are_refused(options, columns, sentence):
    frame = FRAME.assign(**columns)
    with refused(sentence):
        from_frame(frame, **{"user": "who", "x": ["age"], "y": "label", **options})


def test_functions_that_make_examples():
    def lengths(rows: pd.DataFrame) -> dict[str, object]:
        return {"length": torch.tensor([len(t) for t in rows["text"]]), "y": rows["label"].values}

    clients = from_frame(FRAME, user="who", examples=lengths)
    assert clients.examples("b")["y"].tolist() == [0, 1]
    assert check_clients(clients) == 3
    for wrong, sentence in (
        (lambda rows: rows["nope"], r"client 'a': its examples \(row 1\).*KeyError: 'nope'"),
        (lambda rows: torch.zeros(3), "client 'a': 3 examples were made of its 1 rows"),
        (lambda rows: torch.full((len(rows),), torch.nan), "'a', row 1: examples holds NaN"),
    ):
        with refused(sentence):
            from_frame(FRAME, user="who", examples=wrong)


# datasets


def test_a_dataset_of_torch():
    data = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    clients = from_dataset(data, user=OWNERS)
    assert equal(clients.examples("b"), from_tensors((X, Y), user=OWNERS).examples("b"))
    assert isinstance(clients.examples("b"), tuple)
    assert from_dataset([(0.5, 1), (1.5, 0)], user=["a", "a"]).examples("a")[0].tolist() == [
        0.5,
        1.5,
    ]
    dicts = from_dataset([{"a": np.zeros(2), "b": True}], user=["a"]).examples("a")
    assert {name: tensor.dtype for name, tensor in dicts.items()} == {
        "a": torch.float32,
        "b": torch.int64,
    }


class Read:
    def __init__(self) -> None:
        self.rows: list[int] = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> tuple[float, int]:
        self.rows.append(row)
        if row == 5:
            raise OSError("the disk is gone")
        return 0.5, row


def test_items_are_read_when_they_are_needed():
    data = Read()
    clients = from_dataset(data, user=[3, 1, 1, 2, 3, 2])
    assert data.rows == [1, 2]  # the first client's
    data.rows.clear()
    assert clients.examples(3)[1].tolist() == [0, 4]
    assert data.rows == [0, 4]
    with refused(r"client 2: dataset\[5\] raised OSError: the disk is gone"):
        clients.examples(2)


@pytest.mark.parametrize(
    ("data", "user", "sentence"),
    [
        ([1.0, 2.0], [1], "user: has 1 ids, the dataset has 2 items"),
        ([1.0, 2.0], "who", "user='who': only a Hugging Face dataset has columns"),
        (iter([1.0]), [1], "dataset: is a list_iterator; must have a length"),
        ({"train": [1.0]}, [1], r"dataset: is a dict with train: pass one.*dataset\['train'\]"),
        ([torch.zeros(2), torch.zeros(3)], [1, 1], "client 1: .*all must have one type and shape"),
        ([(1.0,), (1.0, 2)], [1, 1], "client 1: .*tuples or lists of different lengths"),
        ([{"a": 1.0}, {"b": 1.0}], [1, 1], "client 1: .*different keys"),
        ([1.0, "x"], [1, 1], "client 1: examples: is a str; .*tokenizer"),
        ([torch.zeros(2), torch.zeros(3)], [1, 2], r"client 2: an example of examples has shape"),
        ([1.0, 1], [1, 2], "client 2: examples has type torch.int64"),
        ([1.0, (1.0,)], [1, 2], r"client 2: its examples are examples\[0\]"),
        ([1.0, float("inf")], [1, 2], "client 2, row 1: examples holds NaN or infinity"),
    ],
)
def test_datasets_that_hold_no_examples_are_refused(data, user, sentence):
    with refused(sentence):
        check_clients(from_dataset(data, user=user))


def test_a_hugging_face_dataset():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict(
        {"who": OWNERS.tolist(), "x": X.tolist(), "label": Y.tolist(), "text": list("wxyz")}
    )
    plain = from_dataset(data.remove_columns("text"), user="who")
    assert plain.examples("b")["x"].tolist() == X[[0, 2]].tolist()
    assert {name: t.dtype for name, t in plain.examples("b").items()} == {
        "x": torch.float32,
        "label": torch.int64,
    }
    assert pickle.loads(pickle.dumps(plain)).examples("c")["label"].tolist() == [1]

    def lengths(rows: dict[str, list[str]]) -> dict[str, torch.Tensor]:
        return {"n": torch.tensor([len(text) for text in rows["text"]])}

    shuffled = data.shuffle(seed=1).select([2, 0, 1])
    found = from_dataset(shuffled, user="who", examples=lengths)
    owners = shuffled["who"][:]
    assert {c: found.index[c].tolist() for c in found.ids} == {
        c: [row for row, own in enumerate(owners) if own == c] for c in set(owners)
    }
    gaps = datasets.Dataset.from_dict({"who": ["a", None], "x": [1.0, 2.0]})
    for wrong, user, sentence in (
        (data, "who", "client 'a': column 'text': has type <U1.*tokenizer"),
        (data, "whom", "user='whom': the dataset has no such column, but who, x, label, text"),
        (datasets.DatasetDict(train=data), "who", "dataset: is a DatasetDict with train"),
        (data.to_iterable_dataset(), "who", "dataset: is a IterableDataset; must have a length"),
        (data, ["a"], "user: has 1 ids, the dataset has 4 items"),
        (gaps, "who", r"column 'who'\[1\]: is missing"),
    ):
        with refused(sentence):
            from_dataset(wrong, user=user)


# folders


def folder_of_arrays(root):
    for name, values in {"b": [1.0, 2.0], "a": [3.0]}.items():
        (root / name).mkdir()
        for number, value in enumerate(values):
            np.save(root / name / f"{number}.npy", np.full(2, value))
    (root / "a" / ".DS_Store").write_text("junk")
    (root / ".cache").mkdir()
    (root / "README").write_text("text")
    return root


def test_folders(tmp_path):
    clients = from_folders(folder_of_arrays(tmp_path), load=np.load)
    assert list(clients.ids) == ["a", "b"]
    assert clients.examples("b").tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert clients.examples("b").dtype is torch.float32
    assert pickle.loads(pickle.dumps(clients)).examples("a").tolist() == [[3.0, 3.0]]


def test_folders_that_hold_no_clients(tmp_path):
    with refused("has no folder; must have one per client"):
        from_folders(tmp_path, load=np.load)
    with refused("none: is not a folder"):
        from_folders(tmp_path / "none", load=np.load)
    root = folder_of_arrays(tmp_path)
    (root / "c").mkdir()
    with refused(r"client 'c': no file in .*c fits '\*\.npy'"):
        from_folders(root, load=np.load, pattern="*.npy")
    (root / "c").rmdir()
    clients = from_folders(root, load=np.load)
    (root / "b" / "2.npy").write_text("junk")
    assert len(clients.examples("b")) == 2  # files that came later are left out
    with refused(r"client 'b': load\('.*2\.npy'\) raised ValueError"):
        check_clients(from_folders(root, load=np.load))


# all


class Own:
    """What anybody may write."""

    def __init__(self, held):
        self.held = held

    @property
    def ids(self):
        return [client for client, _ in self.held]

    def examples(self, client):
        return dict(self.held)[client]


def test_anybodys_population_is_checked():
    pair = (torch.rand(2, 3), torch.tensor([0, 9]))
    assert check_clients(Own([("a", pair), (7, pair)])) == 2
    assert check_clients(Own([("a", pair), ("b", None)]), limit=1) == 1
    for held, sentence in [
        ([], "there is no client"),
        ([("a", pair), ("a", pair)], "client 'a': two clients have this id"),
        ([("a", pair), (1.5, pair)], "client id 1.5 of type float"),
        ([("a", pair), ("b", None)], "client 'b': examples: is a NoneType"),
        ([("a", pair), ("b", torch.rand(2))], "client 'b': its examples are examples"),
        ([("a", torch.rand(0, 3))], "client 'a': has no example"),
        ([("a", torch.tensor([0.0, torch.nan]))], "client 'a', row 1: examples holds NaN"),
    ]:
        with refused(sentence):
            check_clients(Own(held))


def test_importing_the_adapters_imports_no_library_of_tables():
    for path in (Path(data.__file__).parent).rglob("*.py"):
        at_once = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import)]
        names = {alias.name for node in at_once for alias in node.names}
        assert not names & {"pandas", "pyarrow", "datasets", "h5py"}, path


def test_without_pandas_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refused(r"pip install 'privpart\[frames\]'"):
        from_frame("data.csv", user="who", x=["x"], y="y")
