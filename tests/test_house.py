"""The house: rooms, arrows and words of the three packages."""

import ast
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import accounting
import attacks
import privpart
from privpart import loop

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))  # which draws the same rooms

from rooms import MODULES, ROOT, SOURCES, floors, imported_by, rooms, tree

NOT_OUR_WORDS = {
    r"\block ?step": "vectorized",
    r"\bclients together\b": "vectorized",
    r"(?<!there )\b(is|are) no (?!longer\b|more\b|less\b)": "is not a valid ...",
    r"\bgo(es)? on with\b": "continue, resume",
    r"\bsays? it all\b": "already contains these values",
    r"\bnumbers (of|in) (the|a|its) (model|network|part|group|layer|block)": "parameters",
    r"\brollback guard\b": "log of runs",
    r"\bwhat there is is\b": "a sentence with a subject",
}
"""Phrases that the design page's word list replaces, in docstrings of any module."""


def test_the_top_level_of_privpart_tells_a_round():
    inside = {path for path in (ROOT / "privpart").iterdir() if path.name[:2] != "__"}
    assert len([path for path in inside if path.suffix == ".py"]) <= 12
    assert len([path for path in inside if path.is_dir()]) <= 13


def at_once(name: str) -> set[str]:
    """Importing a module imports the packages around it, too, from outside of them."""
    imported = imported_by(MODULES[name], at_once=True)
    parts = [target.split(".") for target in imported]
    around = {".".join(words[:i]) for words in parts for i in range(1, len(words))}
    return imported | {package for package in around if not f"{name}.".startswith(f"{package}.")}


@pytest.mark.parametrize("arrows", [lambda name: imported_by(MODULES[name]), at_once])
def test_no_import_circle(arrows):
    remaining = {name: arrows(name) for name in MODULES}
    while remaining:
        ground = [name for name, below in remaining.items() if not below & remaining.keys()]
        assert ground, f"a circle among {sorted(remaining)}"
        for name in ground:
            del remaining[name]


def test_rooms_stand_on_floors_and_nothing_imports_upwards():
    """The picture of the site; a room is a folder or file of privpart, or another package."""
    storeys = floors(rooms())
    assert storeys[-1] == ["privpart.cli"]
    assert "accounting" in storeys[0]


def test_what_a_mechanism_can_do_is_asked_of_it():
    names = set(accounting.mechanisms.__all__) - {"Mechanism"}
    asked = []
    for path in SOURCES:
        own = {n.name for n in tree(path).body if isinstance(n, ast.ClassDef)}
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                kinds = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                if kinds & names - own:
                    asked.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not asked


def docstrings(path: Path) -> list[tuple[int, str]]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (getattr(node, "lineno", 1), ast.get_docstring(node) or "")
        for node in ast.walk(tree(path))
        if isinstance(node, kinds)
    ]


def test_docstrings_use_the_words_of_the_field():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match.group()!r}; say {word!r}"
        for path in SOURCES
        for line, text in docstrings(path)
        for phrase, word in NOT_OUR_WORDS.items()
        for match in re.finditer(phrase, " ".join(text.split()), re.IGNORECASE)
    ]
    assert not found


WROTE_IT = {
    "accounting/checks.py",  # parsed_json
    "accounting/fit_cache.py",  # a tuple as a list
    "privpart/cli/audit/store.py",  # numbers may be infinite
    "privpart/example_level/state.py",
    "privpart/study/cell.py",  # TOML, which has no key twice
    "privpart/study/store.py",
    "privpart/training/train.py",  # ids, of which no reader takes an object
    "privpart/flower/agreement.py",
    "privpart/noise/stream.py",
    "privpart/run/begin.py",
}
"""Modules that read JSON that they wrote themselves, or that holds no object."""


def test_json_from_others_is_read_by_the_one_reader_that_refuses_a_key_twice():
    found = {path for path in SOURCES if re.search(r"\bjson\.loads?\(", path.read_text())}
    assert {str(path.relative_to(ROOT)) for path in found} <= WROTE_IT


def digits_left_out(path: Path) -> list[str]:
    """Return the f-strings that show an epsilon, mu or rho to the nearest of so many digits."""
    return [
        f"{path.name}:{node.lineno}: {ast.unparse(node.value)}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FormattedValue)
        if node.format_spec is not None and "." in ast.unparse(node.format_spec)
        if re.search(r"\b(epsilon|mu|rho)\b", ast.unparse(node.value))
    ]


def test_an_epsilon_is_rounded_up():
    """``up`` of accounting.report writes it, wherever it is shown; a lower bound is ``down``."""
    shown_elsewhere = [p for folder in ("docs", "examples") for p in (ROOT / folder).rglob("*.py")]
    assert not [one for path in (*SOURCES, *shown_elsewhere) for one in digits_left_out(path)]


def test_tables_show_names_as_they_are():
    """Results are printed by print_table: a console of rich drops [name] and draws :name:."""
    callers = {
        path.name
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node).startswith("Console(")
        if "stderr=True" not in ast.unparse(node)
    }
    assert not callers


def test_a_missing_package_has_its_own_error_and_exit_code():
    """What tells people to install one of our extras is MissingExtraError: exit code 7."""
    raised = [
        (path.name, ast.unparse(node.exc.func))
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        if re.search(r"pip install (?!-e)", ast.unparse(node.exc))
    ]
    assert raised
    assert {error for _, error in raised} == {"MissingExtraError"}, raised


HOUSE = (ROOT / "docs" / "project" / "house.md").read_text()


def test_a_round_of_the_shipped_command_opens_the_few_files_that_the_house_page_tells_of(
    privpart, tmp_path, monkeypatch
):
    """A reader who follows a round has to open no more; the first two also try methods."""
    names, run_round = set[str](), loop._run_round

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            names.add(frame.f_code.co_filename)

    def watched(server: Any, *arguments: Any, **options: Any) -> Any:
        if server.round < 2:
            return run_round(server, *arguments, **options)
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            run_round(server, *arguments, **options)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "_run_round", watched)
    plan = str(ROOT / "examples" / "digits.toml")
    assert privpart("train", "--plan", plan, "--out", str(tmp_path / "run")).returncode == 130
    files = [path for path in SOURCES if str(path) in names]
    opened = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in files}
    assert 10 < len(opened) <= 22
    assert sum(opened.values()) <= 7_515
    assert not opened.keys() - set(re.findall(r"`([\w/]+\.py)[:`]", HOUSE))


def test_the_house_page_names_what_there_is():
    named = re.findall(r"`((?:accounting|attacks|privpart)[\w/.]*)(?:: ([\w.]+))?`", HOUSE)
    assert len(named) > 40
    for path, name in named:
        assert (ROOT / path).exists(), path
        scope: Any = tree(ROOT / path) if name else None
        for part in name.split(".") if name else ():
            inner = [node for node in scope.body if getattr(node, "name", "") == part]
            assert inner, f"{path}: {name}"
            scope = inner[0]
    assert {room for room in rooms() if f"`{room.replace('.', '/')}" not in HOUSE} == set()


def test_no_room_is_longer_than_its_budget():
    table = HOUSE[HOUSE.index("### How long") : HOUSE.index("## One round")]
    counted = set()
    for row, most in re.findall(r"^\| (`.+`) \| ([\d,]+) \|$", table, re.MULTILINE):
        files = {path for glob in re.findall(r"`([^`]+)`", row) for path in _sources_in(glob)}
        length = sum(len(path.read_text().splitlines()) for path in files)
        assert length <= int(most.replace(",", "")), row
        counted |= files
    assert counted == set(SOURCES)


def _sources_in(glob: str) -> list[Path]:
    return [*ROOT.glob(glob)] if "*" in glob else [*(ROOT / glob).rglob("*.py")]


@pytest.mark.parametrize("package", [accounting, attacks, privpart], ids=lambda p: p.__name__)
def test_every_public_name_is_listed_sorted_and_documented(package):
    assert list(package.__all__) == sorted(package.__all__, key=str.lower) or list(
        package.__all__
    ) == sorted(package.__all__)
    undocumented = [name for name in package.__all__ if not getattr(package, name).__doc__]
    assert not undocumented


def test_every_silent_failure_names_tests_that_exist():
    text = (ROOT / "docs" / "silent-failures.md").read_text()
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", text))
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 30
    assert not named - defined
