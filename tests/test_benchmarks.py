"""The scripts of benchmarks and studies: their frame, and that what they import is still there."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples/studies").glob("*.py")])
OURS = ("accounting", "attacks", "privpart")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@pytest.fixture
def frame(monkeypatch):
    for name in THREADS:
        monkeypatch.setenv(name, "1")  # which the frame sets, for the scripts only
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("frame")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_imports_names_that_exist(script):
    for node in ast.walk(ast.parse(script.read_text())):
        module = getattr(node, "module", None) or ""
        if isinstance(node, ast.ImportFrom) and module.partition(".")[0] in OURS:
            if module.startswith("privpart.flower"):  # needs flwr
                continue
            home = importlib.import_module(module)
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                known = hasattr(home, alias.name) or importlib.util.find_spec(inner)
                assert known or alias.name == "client_app", inner


def test_turns_alternate_after_one_that_does_not_count(frame):
    order = []
    jobs = {name: lambda name=name: order.append(name) for name in "ab"}
    times = frame.in_turns(jobs, 2, clocks={"a": lambda: float(len(order))})
    assert order == list("ababab")
    assert [spent.cpu for spent in times["a"]] == [1.0, 1.0]
    assert len(times["b"]) == 2
    fast, slow = [frame.Seconds(1, 2), frame.Seconds(3, 4)], [frame.Seconds(2, 2)] * 2
    assert frame.ratios(fast, slow)["wall_least"] == 0.5
    assert frame.spreads(fast, 10)["cpu_median"] == 30
