"""The scripts of benchmarks and studies: what they import is still there."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples/studies").glob("*.py")])
OURS = ("accounting", "attacks", "privpart")


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
