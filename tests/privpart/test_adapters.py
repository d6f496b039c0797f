import ast
import pickle
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
    from_dataset,
    from_frame,
    from_tensors,
)

OWNERS = np.array(["b", "a", "b", "c"])
X = np.arange(8, dtype=np.float64).reshape(4, 2)
Y = np.array([0, 1, 2, 1], dtype=np.int8)
FRAME = pd.DataFrame(
    {"who": OWNERS, "age": [30, 40, 50, 60], "label": [0, 1, 1, 0], "text": list("wxyz")}
)


def equal(found, expected) -> bool:
    return all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


def refused(sentence):
    return pytest.raises(ConfigError, match=sentence)


# Users

BROKEN = torch.tensor([[0.0, 1.0], [torch.nan, 0.0]])


@pytest.mark.parametrize(
    ("x", "y", "rows", "sentence"),
    [
        (torch.rand(4).double(), torch.arange(4), [[0]], "x: is a Tensor of type torch.float64"),
        (torch.rand(4), torch.arange(4).int(), [[0]], "y: is a Tensor of type torch.int32"),
        (X, torch.arange(4), [[0]], "x: is a ndarray.*from_tensors converts"),
        (torch.rand(4), torch.arange(3), [[0]], "x has 4 rows, y has 3"),
        (torch.rand(4), torch.tensor(1), [[0]], "y: .*with a row per example"),
        (torch.rand(4), torch.arange(4), {"a": [0], "z": [9]}, "row 9 of 4, which client 'z'"),
        (torch.rand(4), torch.arange(4), {"a": [0], "z": [-1]}, "row -1 of 4, which client 'z'"),
        (BROKEN, torch.arange(2), {"a": [0], "z": [1]}, r"x, row 1 \(client 'z'\): holds NaN"),
        (torch.rand(2), BROKEN[:, 0], {"a": [0], "z": [1]}, r"y, row 1 \(client 'z'\): holds NaN"),
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


# arrays


def test_other_nests_are_general_clients():
    nest = {"ids": np.arange(12, dtype=np.int32).reshape(4, 3), "more": [torch.rand(4), Y > 0]}
    clients = from_tensors(nest, user=[5, 5, 6, 2**64 - 1])
    assert isinstance(clients, IndexedClients)
    assert list(clients.ids) == [5, 6, 2**64 - 1]
    found = clients.examples(5)
    assert found["ids"].tolist() == [[0, 1, 2], [3, 4, 5]]
    kinds = [tensor.dtype for tensor in (found["ids"], *found["more"])]
    assert kinds == [torch.int64, torch.float32, torch.int64]
    assert equal([pickle.loads(pickle.dumps(clients)).examples(5)["ids"]], [found["ids"]])
    assert check_clients(clients) == 3


@pytest.mark.parametrize(
    ("examples", "user", "sentence"),
    [
        ((X, Y[:3]), OWNERS, "y has 3 rows, and 4 ids"),
        ((X, Y), OWNERS[:3], "x has 4 rows, and 3 ids"),
        ((X * 1e300, Y), OWNERS, r"x, row 0 \(client 'b'\): holds NaN, infinity or a number too"),
        ((np.where(X == 3, np.nan, X), Y), OWNERS, r"x, row 1 \(client 'a'\)"),
        ((X, np.array([0, 1, None, 1], object)), OWNERS, "y: has type object; must be numbers"),
        ((X, OWNERS), OWNERS, "y: has type <U1.*tokenizer"),
        ((X + 1j, Y), OWNERS, "x: has type complex128"),
        ((np.zeros((4, 8, 8), np.uint8), Y), OWNERS, "x: has type uint8.*float32'\\) / 255"),
        ((X, np.full(4, 2**63, np.uint64)), OWNERS, "y: has whole numbers of 2\\^63"),
        ((X.tolist(), Y), OWNERS, r"x\[0\]\[0\]: is a float; must be a tensor"),
        ({"a": X, "b": Y[:3]}, OWNERS, r"examples\['b'\] has 3 rows"),
        ((FRAME, Y), OWNERS, r"x: is a DataFrame.*to_numpy\("),
        ((torch.tensor(1.0), Y), OWNERS, "x has no rows"),
    ],
)
def test_arrays_that_are_not_examples_are_refused(examples, user, sentence):
    with refused(sentence):
        from_tensors(examples, user=user)


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


GAP = pd.Series([1.0, np.nan, 2.0, 3.0])


@pytest.mark.parametrize(
    ("options", "columns", "sentence"),
    [
        ({"user": "whom"}, {}, "user='whom': must be one column of who, .*did you mean 'who'"),
        ({"x": ["weight"]}, {}, "x='weight': must be one column"),
        ({"y": "labels"}, {}, "y='labels': .*did you mean 'label'"),
        ({"x": "age"}, {}, "x='age', y='label': name the columns of the inputs, a list"),
        ({"x": ["age", "text"]}, {}, "column 'text': has type object; must .*tokenizer"),
        ({}, {"age": GAP.fillna(1e39)}, r"column 'age', row 1 \(client 'a'\): holds NaN"),
        ({}, {"label": GAP}, r"column 'label', row 1 \(client 'a'\)"),
        ({}, {"label": pd.to_datetime(["2020"] * 4)}, "column 'label': has type object"),
        ({}, {"label": np.full(4, 2**63, np.uint64)}, r"column 'label': .*2\^63"),
        ({}, {"who": [None, "a", "b", "c"]}, r"column 'who'\[0\]: client id"),
        ({}, {"who": pd.array([1, None, 2, 2], "Int64")}, "column 'who': .* no gap"),
        ({}, {"who": GAP}, "column 'who': has type float64.* no gap. Fill gaps, then"),
        ({}, {"who": [("a",)] * 4}, r"column 'who'\[0\]: client id"),
        ({"examples": len}, {}, "examples: cannot be combined"),
    ],
)
def test_frames_that_are_not_examples_are_refused(options, columns, sentence):
    fields = {"user": "who", "x": ["age"], "y": "label", **options}
    with refused(sentence):
        from_frame(FRAME.assign(**columns), **fields)
    for table in ("data.csv", FRAME[:0]):
        with refused("must be a pandas DataFrame|frame: has no rows"):
            from_frame(table, **fields)


def test_functions_that_make_examples():
    def lengths(rows: pd.DataFrame) -> dict[str, object]:
        return {"length": torch.tensor([len(t) for t in rows["text"]]), "y": rows["label"].values}

    clients = from_frame(FRAME, user="who", examples=lengths)
    assert clients.examples("b")["y"].tolist() == [0, 1]
    assert check_clients(clients) == 3
    for wrong, sentence in (
        (lambda rows: rows["nope"], r"client 'a': its examples \(rows \[1\]\).*KeyError: 'nope'"),
        (lambda rows: torch.zeros(3), "client 'a': 3 examples were made; must be one for each of "),
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
    pairs = from_dataset([(0.5, 1), (1.5, 0)], user=["a", "a"]).examples("a")
    assert pairs[0].tolist() == [0.5, 1.5]
    dicts = from_dataset([{"a": np.zeros(2), "b": True}], user=["a"]).examples("a")
    kinds = {name: tensor.dtype for name, tensor in dicts.items()}
    assert kinds == {"a": torch.float32, "b": torch.int64}


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
    with refused(r"client 2: .*rows \[3, 5\]\).* OSError: the disk is gone"):
        clients.examples(2)


UNLIKE = [torch.zeros(2), torch.zeros(3)]


@pytest.mark.parametrize(
    ("data", "user", "sentence"),
    [
        ([1.0, 2.0], [1], "user: has 1 ids, the dataset has 2 items"),
        ([1.0, 2.0], "who", "user='who': must be a column of a Hugging Face dataset"),
        (iter([1.0]), [1], "dataset: is a list_iterator; must have a length"),
        (
            {"train": [1.0]},
            [1],
            r"dataset: is a dict; must .*one split, such as dataset\['train'\]",
        ),
        (UNLIKE, [1, 1], r"client 1: .*torch.float32 \(2,\) and .*one structure, type and shape"),
        ([{"a": 1.0}, {"b": 1.0}], [1, 1], "client 1: .*dict of a and dict of b; all must"),
        ([1.0, "x"], [1, 1], "client 1: examples: is a str; .*tokenizer"),
        (UNLIKE, [1, 2], r"client 2: .* \(3,\); those of client 1 are .*\(2,\)"),
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
        (data, "whom", "user='whom': must be a column .* who, x, label, text"),
        (datasets.DatasetDict(train=data), "who", "dataset: is a DatasetDict; must have a length"),
        (gaps, "who", r"column 'who'\[1\]: client id None of type NoneType"),
    ):
        with refused(sentence):
            from_dataset(wrong, user=user)


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
        ([("a", torch.rand(0, 3))], "client 'a': 0 examples"),
    ]:
        with refused(sentence):
            check_clients(Own(held))


def test_importing_the_adapters_imports_no_library_of_tables():
    for path in (Path(data.__file__).parent).rglob("*.py"):
        at_once = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import)]
        names = {alias.name for node in at_once for alias in node.names}
        assert not names & {"pandas", "pyarrow", "datasets"}, path
