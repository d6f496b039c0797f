"""Own code: records find it without running it, and imports say in one sentence what went wrong."""

import json
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

from accounting import ConfigError
from privpart.training import own_code
from privpart.training.own_code import call, changes, is_reference, load, record, record_hash

pytestmark = pytest.mark.usefixtures("fresh_code")


@pytest.fixture
def write(tmp_path):
    def written(files: dict[str, str | bytes], folder: Path = tmp_path) -> Path:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return folder

    return written


def sentence(function, *arguments, **options) -> str:
    """Return the message of a ConfigError, which must be one line that ends with a full stop."""
    with pytest.raises(ConfigError) as caught:
        function(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 900
    return message


MARKS = 'with open({!r}, "a") as file: file.write(__name__ + " ")\n'
"""Source that leaves a mark when it is run."""


# References


def test_what_a_reference_may_be(tmp_path):
    allowed = ["./task.py:f", "../x/task.py:f", "/a b/task.py:f", "a:f", "a.b_1.c:_f", "ä.py:ö"]
    for text in allowed:
        assert is_reference(text)
        own_code.parsed(text)
    code = ["cross_entropy", "", "./task.py", "./task.py:f()", "./task:f", "./task.py:f\n"]
    code += ["https://example.org/task:f", "./ta\0sk.py:f", "a" * 10**6 + ":f"]
    refused = {
        "does not name code": code,
        "rename it": ["./my-task.py:f", "./class.py:f", "./1.py:f"],
        "part of Python": ["os:system", "importlib.machinery:SourceFileLoader"],
    }
    for words, text in ((words, text) for words, texts in refused.items() for text in texts):
        assert words in sentence(own_code.parsed, text)
        assert words in sentence(record, {"model.factory": text}, tmp_path)
        assert words in sentence(load, text, tmp_path)
    assert not is_reference("cross_entropy")


# What a record holds

PROJECT = {
    "task.py": dedent("""
        import json, helpers
        import numpy.linalg
        from lib import layers
        from lib.deep.far import thing as other
        import nothing_that_is_installed
        def network(width=3):
            import pandas
            return width
        loss = lambda module, batch: 0
    """),
    "helpers.py": "import task, os.path\n",
    "pages/notes.txt": "import nothing",
    ".git/hook.py": "",
    "env/pyvenv.cfg": "",
    "env/lib/installed.py": "",
    "lib/__init__.py": "",
    "lib/layers.py": "from . import blocks\nfrom .blocks import missing\n",
    "lib/blocks.py": "from .. import above_the_top\nfrom .deep import *\n",
    "lib/deep/__init__.py": "from ..layers import blocks\n",
    "lib/deep/far.py": "thing = 1\n",
    "lib/deep/unused.py": "",
}
READ = ["helpers.py", "lib/__init__.py", "lib/blocks.py", "lib/deep/__init__.py"]
READ += ["lib/deep/far.py", "lib/deep/unused.py", "lib/layers.py", "task.py"]


def test_a_record_holds_the_projects_files_and_the_versions_of_the_others(write):
    folder = write(PROJECT)
    named = {"model.factory": "./task.py:network", "client.loss": "./task.py:loss"}
    found = record(named, folder)
    assert list(found["files"]) == READ
    assert found["references"] == named
    assert found["distributions"].keys() == {"numpy", "pandas"}
    assert found["distributions"]["numpy"] == __import__("numpy").__version__
    assert found["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert json.loads(json.dumps(found)) == found


def test_a_moved_project_has_the_same_record_and_a_changed_file_another(write, tmp_path):
    references = {"model.factory": "./code/task.py:network"}
    inside = {f"code/{name}": text for name, text in PROJECT.items()}
    here = record(references, write(inside, tmp_path / "here"))
    assert "code/lib/deep/far.py" in here["files"]
    there = record(references, write(inside, tmp_path / "there"))
    assert here == there
    assert record_hash(here) == record_hash(there)
    inside[f"code/{READ[-2]}"] += "# a comment\n"
    again = record(references, write(inside, tmp_path / "there"))
    assert changes(here, again) == [f"code/{READ[-2]} has changed"]
    assert record_hash(again) != record_hash(here)


def test_a_record_does_not_depend_on_the_working_folder_nor_on_earlier_imports(
    write, monkeypatch, tmp_path
):
    folder = write(PROJECT | {"helpers.py": ""})
    before = record({"a": "./task.py:loss"}, folder)
    monkeypatch.chdir(folder / "lib")
    relative = Path(os.path.relpath(folder))
    assert record({"a": "./task.py:loss"}, relative) == before
    other = {"simple.py": "import helpers\ndef f(): pass\n", "helpers.py": ""}
    load("./simple.py:f", write(other, tmp_path.parent / f"{tmp_path.name}-other"))
    assert record({"a": "./task.py:loss"}, folder) == before


def test_packages_on_the_path_are_own_code_and_keep_their_names(write, tmp_path, monkeypatch):
    write({f"src/{name}": text for name, text in PROJECT.items()})
    write({"src/lib/fast.so": b"\x7fELF", "src/lib/data.csv": ""})
    monkeypatch.syspath_prepend(tmp_path / "src")
    files = record({"model.factory": "lib.layers:blocks"}, tmp_path / "elsewhere")["files"]
    assert list(files) == sorted(["lib/fast.so", *(n for n in READ if n.startswith("lib/"))])
    alone = record({"model.factory": "helpers:f"}, tmp_path / "elsewhere")["files"]
    assert set(alone) == {*READ, "lib/fast.so"}


def test_installed_packages_are_recorded_by_version(tmp_path, write):
    installed = record({"model.factory": "sklearn.svm:SVC"}, tmp_path)
    assert installed["files"] == {}
    assert installed["distributions"].keys() == {"scikit-learn"}
    source = "import os, sklearn.datasets as d, PIL.Image\nfrom privpart import data\nx = int\n"
    write({"task.py": f"if 1:\n  import yaml; import torch\n{source}"})
    versions = record({"model.factory": "./task.py:x"}, tmp_path)["distributions"]
    assert versions.keys() == {"pillow", "scikit-learn", "PyYAML", "torch"}


def test_changes_are_told_one_by_one():
    before = {"python": "3.11", "references": {"data.metric": "./a.py:m", "model.factory": "a:f"}}
    before["files"] = {"a.py": "1", "helpers.py": "2"}
    now = {"python": "3.12", "references": {"model.factory": "b:f"}}
    now["files"] = {"a.py": "3", "b.py": "4"}
    assert changes(before, before) == changes({}, {}) == []
    assert changes(before, now) == [
        "Python was 3.11 and is 3.12",
        "data.metric is gone",
        "model.factory was a:f and is b:f",
        "a.py has changed",
        "b.py is new",
        "helpers.py is gone",
    ]


# A record runs nothing


def test_nothing_is_run_by_a_record_and_everything_by_load(write, tmp_path):
    marks = tmp_path / "marks"
    mark = MARKS.format(str(marks))
    inside = ("helpers.py", "pkg/__init__.py", "pkg/inner/__init__.py", "pkg/inner/leaf.py")
    folder = write(dict.fromkeys([*inside, "conftest.py", "sitecustomize.py"], mark))
    source = mark + "import helpers, pkg.inner.leaf\ndef f(): pass\n"
    write({"task.py": source, "bad.pth": f"import os; exec({mark!r})"})
    assert len(record({"model.factory": "./task.py:f"}, folder)["files"]) == 7
    assert not marks.exists()
    load("./task.py:f", folder)
    assert marks.read_text() == "task helpers pkg pkg.inner pkg.inner.leaf "


# Hostile projects: bounded time and memory, one sentence


def test_files_that_are_not_ordinary(write, tmp_path):
    folder = write({"task.py": "import a, b, c, d, e\nf = 1\n", "folder.py/x": ""})
    write({"linked/shared.py": ""}, tmp_path / "elsewhere")
    os.mkfifo(folder / "a.py")
    (folder / "b.py").symlink_to("/dev/zero")
    (folder / "c.py").symlink_to("c.py")
    (folder / "d").symlink_to("d")
    (folder / "e").symlink_to(".")
    (folder / "f").symlink_to("elsewhere/linked")
    write({"pkg/bad.py": b"\xff\0 import ((("})
    files = record({"a": "./task.py:f"}, folder)["files"]
    shared = {"f/shared.py", "elsewhere/linked/shared.py"}
    assert {"task.py", "pkg/bad.py"} < set(files) <= {"task.py", "pkg/bad.py", *shared}
    assert shared & set(files)
    for name in ("a", "b", "c", "folder", "missing"):
        assert "there is no file" in sentence(record, {"a": f"./{name}.py:f"}, folder)
        assert "there is no file" in sentence(load, f"./{name}.py:f", folder)


def test_too_many_files_and_bytes(write, monkeypatch):
    folder = write({f"m{i}.py": f"import m{i + 1}\n" for i in range(30)} | {"task.py": ""})
    assert len(record({"a": "./task.py:f"}, folder)["files"]) == 31
    for limit, value in (("_MOST_FILES", 30), ("_MOST_BYTES", 2**8)):
        with monkeypatch.context() as smaller:
            smaller.setattr(own_code, limit, value)
            assert "a folder of its own" in sentence(record, {"a": "./task.py:f"}, folder)


def test_a_file_is_hashed_again_only_if_it_changed(write, monkeypatch):
    folder = write(PROJECT)
    first = record({"a": "./task.py:loss"}, folder)
    with monkeypatch.context() as unreadable:
        unreadable.setattr(Path, "read_bytes", lambda path: pytest.fail(str(path)))
        assert record({"a": "./task.py:loss"}, folder) == first
    write({"helpers.py": "import task, os.PATH\n"})  # as long as before
    assert changes(first, record({"a": "./task.py:loss"}, folder)) == ["helpers.py has changed"]


# Modules of the same name


@pytest.mark.parametrize("name", ["random", "privpart", "yaml"])
def test_a_file_with_the_name_of_another_module(name, write, tmp_path):
    marks = tmp_path / "marks"
    folder = write({f"{name}.py": MARKS.format(str(marks)) + "def f(): pass\n"})
    message = sentence(load, f"./{name}.py:f", folder)
    assert "another module has its name" in message
    assert message.endswith("rename the file.")
    assert not marks.exists()


# Importing


def test_classes_of_a_file_reach_a_spawned_process(write):
    source = "import helpers\nclass Net:\n  def width(self): return helpers.WIDTH\n"
    source += "def wide(net): return net.width()\n"
    folder = write({"task.py": source, "helpers.py": "WIDTH = 7\n"})
    net = load("./task.py:Net", folder)()
    wide = load("./task.py:wide", folder)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(wide, net).result(timeout=60) == 7


def test_code_that_changed_after_its_import_is_refused(write):
    task = """
import helpers
from importlib import import_module
def f(): return import_module("plug" + "in1").x
"""
    folder = write({"task.py": task, "helpers.py": "", "plugin1.py": "x = 1\n"})
    first = load("./task.py:f", folder)
    assert load("./task.py:f", folder) is first
    write({"helpers.py": "x = 1\n"})
    assert "start a new process" in sentence(load, "./task.py:f", folder)
    write({"helpers.py": ""})
    assert first() == 1
    load("./task.py:f", folder)  # sees the file of the computed name in memory
    write({"plugin1.py": "x = 2\n"})
    assert "plugin1.py: has changed since" in sentence(load, "./task.py:f", folder)


PROCESS = """
import sys
from pathlib import Path
folder = Path(sys.argv[1])
{before}
from privpart.training.own_code import ConfigError, load, record
record({{"a": "task:f"}}, folder)
try:
    print(load({reference!r}, folder)())
except ConfigError as error:
    print(error)
"""
WRITTEN = """
(folder / "app.py").write_text("import time\\ntime.sleep(0.01)\\n" + {lines!r})
(folder / "task.py").write_text("def f(): return 1\\n")
sys.path.insert(0, sys.argv[1])
import app
"""
IMPORTED = """
sys.path.insert(0, sys.argv[1])
import task
"""
EDITED = (
    IMPORTED
    + """
(folder / "helpers.py").write_text("RATE = 2\\n")
"""
)
OURS = "import privpart.training.own_code\n"
CHANGED = "helpers.py: may have changed since this process imported it; start a new"


@pytest.mark.parametrize(
    ("before", "reference", "printed"),
    [
        (WRITTEN.format(lines=OURS + "import task"), "./task.py:f", "1\n"),
        (
            WRITTEN.format(lines="import task\n" + OURS),
            "./task.py:f",
            "which imports privpart before it",
        ),
        (IMPORTED, "task:f", "1\n"),
        (EDITED, "task:f", CHANGED),
    ],
)
def test_code_imported_before_privpart_is_taken_only_if_it_cannot_have_changed(
    before, reference, printed, write
):
    """Flower's processes write and import an app's files at once."""
    source = "import helpers\ndef f(): return helpers.RATE\n"
    folder = write({"task.py": source, "helpers.py": "RATE = 1\n"})
    script = PROCESS.format(before=before, reference=reference)
    command = [sys.executable, "-c", script, str(folder)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output == printed if printed == "1\n" else printed in output


def test_another_file_under_the_name_of_a_recorded_one_is_refused(write, monkeypatch):
    task = "import helper\ndef f(): return helper.RATE\n"
    late = "def f(): import helper\n"
    folder = write({"one/task1.py": task, "two/task2.py": task, "three/task3.py": late})
    write({"one/helper.py": "RATE = 1\n", "two/helper.py": "RATE = 9\n", "three/helper.py": ""})
    assert load("./one/task1.py:f", folder)() == 1
    for later in ("./two/task2.py:f", "./three/task3.py:f"):
        message = sentence(load, later, folder)
        assert "one/helper.py; start a new process." in message
        assert "this process has another module helper" in message
    assert load("./one/task1.py:f", folder)() == 1
    with monkeypatch.context() as typed_in:
        typed_in.setitem(sys.modules, "helper", ModuleType("helper"))
        assert "another module helper, without a file" in sentence(load, "./one/task1.py:f", folder)


def test_a_file_that_a_later_import_would_miss_is_refused(write):
    late = "def f(): import helper\n"
    folder = write({"one/task1.py": late, "one/helper.py": ""})
    write({"two/task2.py": late, "two/helper.py": "RATE = 1\n"})
    load("./one/task1.py:f", folder)
    load("./two/task2.py:f", folder)  # its folder now comes first
    assert "two/helper.py; start a new process." in sentence(load, "./one/task1.py:f", folder)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\nraise ValueError('no\\nway.')\n", "task.py:2: ValueError: no."),
        ("import helpers\n", "helpers.py:2: KeyError: 'x'."),
        ("import sys\nsys.exit(0)\n", "task.py:2: SystemExit: 0."),
        ("def f(:\n", "task.py:1: SyntaxError: invalid syntax."),
        ("raise ValueError('x' * 10**7)\n", "ValueError: xxx"),
        ("class E(Exception):\n  def __str__(self): 1/0\nraise E\n", "task.py:3: E."),
    ],
)
def test_an_import_that_fails_is_one_sentence(source, words, write):
    folder = write({"task.py": source, "helpers.py": "\n{}['x']\n"})
    path = list(sys.path)
    message = sentence(load, "./task.py:f", folder)
    assert message.startswith("./task.py:f: its import failed: ")
    assert words in message
    assert sys.path == path
    assert "task" not in sys.modules


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "MemoryError"])
def test_an_interruption_is_passed_on(error, write):
    folder = write({"task.py": "def f(): raise " + error, "other.py": f"raise {error}\n"})
    function = load("./task.py:f", folder)
    with pytest.raises((KeyboardInterrupt, MemoryError)):
        call(function, "./task.py:f", "model.factory")
    with pytest.raises((KeyboardInterrupt, MemoryError)):
        load("./other.py:f", folder)


def test_names_that_are_missing_or_not_callable(write):
    folder = write({"task.py": "network = 3\ndef __getattr__(name): raise AttributeError(name)\n"})
    assert sentence(load, "./task.py:netwerk", folder) == (
        "./task.py:netwerk: task does not define netwerk; near it: network."
    )
    assert "is of type int; must be a function or a class" in sentence(
        load, "./task.py:network", folder
    )


def test_a_package_that_is_not_importable(write, monkeypatch):
    folder = write({"mine/__init__.py": "", "mine/net.py": "def f(): pass\n"})
    for function, arguments in [(record, ({"a": "mine.net:f"},)), (load, ("mine.net:f",))]:
        message = sentence(function, *arguments, folder)
        assert "Python finds no module mine.net." in message
        assert "pip install -e" in message
        assert '"./mine/net.py:f"' in message
    monkeypatch.syspath_prepend(folder)
    assert callable(load("mine.net:f", folder))
    assert "finds no module mine.nett" in sentence(load, "mine.nett:f", folder)


# Calling

SOURCE = """
from accounting import ConfigError
import helpers

def network(width, *, depth=2):
    if width < 1:
        raise ConfigError(f"width={width}: must be at least 1.")
    return helpers.checked(width) * depth

class Network:
    def __init__(self, width=1):
        self.width = width
"""


def test_calls_return_what_the_function_returns_and_name_what_is_wrong(write):
    helpers = (
        "def checked(n):\n    if n > 9:\n        raise IndexError('too wide\\n...')\n    return n\n"
    )
    folder = write({"task.py": SOURCE, "helpers.py": helpers})
    name, key = "./task.py:network", "model.factory"
    network = load(name, folder)
    assert call(network, name, key, width=3) == 6
    assert call(network, name, key, 3, depth=1) == 3
    assert call(load("./task.py:Network", folder), "./task.py:Network", key, width=3).width == 3
    message = sentence(call, network, name, key, width=10)
    assert message == f"{key}: {name} failed: {folder}/helpers.py:3: IndexError: too wide."
    message = sentence(call, network, name, key, width=0)
    assert message.endswith("task.py:7: width=0: must be at least 1.")
    assert sentence(call, network, name, key, width=1, dept=2) == (
        f"{key}: {name}(width, *, depth=2): got an unexpected keyword argument 'dept'; the plan "
        "passes width, dept."
    )
    assert "missing a required argument: 'width'" in sentence(call, network, name, key)
    assert "too many positional arguments" in sentence(call, network, name, key, 1, 2)
