"""The house: rooms, arrows and words of the three packages."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import accounting
import attacks
import privpart

ROOT = Path(__file__).parent.parent
PACKAGES = ("accounting", "attacks", "privpart")
SOURCES = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
"""Every module of the three packages."""

LONG = 500
"""Lines above which a module's docstring says why it is one file."""

FAMILIES = (
    "accounting.mechanisms.",
    "attacks.",
    "privpart.cli.",
    "privpart.data.tasks.",
    "privpart.flower.",
    "privpart.models.",
)
"""Folders of alike modules behind one face, which may be their only importer."""

WALLS = {
    "accounting.quadrature": "the second accountant shares no file with the first",
    "accounting.cohorts": "public: draws what the accountant assumes",
    "accounting.random_allocation": "public: balls in bins",
    "accounting.subsampled": "public: amplified baselines",
    "privpart.data.arrays": "public: clients from tensors and arrays",
    "privpart.data.datasets": "public: clients from torch's and Hugging Face's datasets",
    "privpart.data.folders": "public: clients from a folder each",
    "privpart.data.frames": "hides pandas",
    "privpart.data.hdf5": "hides h5py",
    "privpart.engines.choice": "an idea of its own: which method is the fastest here",
    "privpart.engines.device_classes": "public: an engine over engines",
    "privpart.engines.ghost_sum": "an idea of its own: sums of clipped updates never written out",
    "privpart.engines.memory": "an idea of its own: clients with a memory",
    "privpart.engines.layers": "hides an internal operator of torch",
    "privpart.engines.recorded": "an idea of its own: steps that a CUDA device repeats",
    "privpart.experiment.isolation": "an idea of its own: a check by training clients in turn",
    "privpart.experiment.passed": "an idea of its own: what two Python objects have in common",
    "privpart.study.client_side": "an idea of its own: what a round takes from a client",
    "privpart.study.frontier": "intervals and verdicts",
    "privpart.experiment.own_code": "hides the import system and its hooks",
    "privpart.experiment.starter": "texts that people get to edit",
    "privpart.grid": "the integers that every update becomes, read beside the clip",
    "privpart.measure.gradients": "hides Opacus: gradients one by one, for any network",
    "privpart.measure.inspect": "public: FedPart's diagnostics",
    "privpart.measure.step": "hides a process of its own",
    "privpart.noise.executor": "the arithmetic of the noise, kept apart",
    "privpart.run.fork": "an idea of its own: a run begun from another",
    "privpart.run.verify": "public: every claim of a run, for a stranger",
    "privpart.run.witness": "the rollback guard, outside the run folder",
    "privpart.select.histogram": "public: a noised count of keys",
    "privpart.select.private_retrieval": "a protocol of its own, measured alone",
}
"""Modules with a single importer that stay apart, and why."""

NOT_OUR_WORDS = {
    r"\block ?step": "vectorized",
    r"\bclients together\b": "vectorized",
    r"(?<!there )\b(is|are) no (?!longer\b|more\b|less\b)": "is not a valid ...",
    r"\bgo(es)? on with\b": "continue, resume",
    r"\bsays? it all\b": "already contains these values",
    r"\bnumbers (of|in) (the|a|its) (model|network|part|group|layer|block)": "parameters",
    r"\bwitness(es)?\b": "rollback guard",
    r"\bwhat there is is\b": "a sentence with a subject",
}
"""Phrases that the design page's word list replaces, in docstrings of any module."""

NOT_OUR_NAMES = {"mask", "rest", "lockstep", "together", "numbers", "classes"}
"""Parts of public names that the word list replaces."""

NAMES_THAT_STAY = {"DeviceClasses", "MaskRatio", "classes_each", "mask_ratio"}
"""FedPT's classes of devices; FedPart's ratio of masks; a key of plan files."""

SHARED_NAMES = {"delta", "epsilon", "log_delta", "record"}
"""The same question to accountants that share no file, and own_code.record; used with the module's
name."""

UPDATES = ("client", "clip", "messages", "server", "wire")
"""Files of privpart in which a delta would be an update: the word is DP's alone."""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in SOURCES}


def imported_by(path: Path) -> set[str]:
    """Return the modules of ours that a file imports, inside functions and for types too."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
    return (found & MODULES.keys()) - {module_name(path)}


ARROWS = {name: imported_by(path) for name, path in MODULES.items()}


def test_the_top_level_of_privpart_tells_a_round():
    inside = [path for path in (ROOT / "privpart").iterdir() if path.name != "__pycache__"]
    files = [path.name for path in inside if path.suffix == ".py"]
    assert len(files) <= 14
    assert len(inside) - len(files) <= 12


def test_no_import_circle():
    above: dict[str, set[str]] = {name: set() for name in MODULES}
    remaining = dict(ARROWS)
    while remaining:
        ground = [name for name, below in remaining.items() if not below & remaining.keys()]
        assert ground, f"a circle among {sorted(remaining)}"
        for name in ground:
            del remaining[name]
    assert above


def test_a_module_with_one_importer_is_a_member_of_a_family_or_a_listed_wall():
    importers = Counter(target for below in ARROWS.values() for target in below)
    faces = {name for name in MODULES if MODULES[name].name == "__init__.py"}
    lonely = {
        name
        for name in MODULES.keys() - faces
        if importers[name] <= 1 and not name.startswith(FAMILIES)
    }
    public = {f"privpart.{home}" for home in privpart._HOME.values()}
    assert lonely - public == set(WALLS) & lonely
    assert not WALLS.keys() - MODULES.keys()


def test_a_long_file_says_why_it_is_one():
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if len(path.read_text().splitlines()) > LONG
        and "one file" not in (ast.get_docstring(tree(path)) or "")
    ]
    assert not silent


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


def public_names(path: Path) -> list[str]:
    """Return classes, functions, methods and fields without an underscore in front."""
    found = []
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.append(node.name)
        if isinstance(node, ast.ClassDef):
            found += [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
            found += [
                n.target.id
                for n in node.body
                if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            ]
    return [name for name in found if not name.startswith("_")]


def test_public_names_use_the_words_of_the_field():
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in public_names(path)
        if NOT_OUR_NAMES & set(re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower().split("_"))
        and name not in NAMES_THAT_STAY
        and (path.name, name) != ("costs.py", "numbers")  # a key of its JSON
    ]
    assert not found


def test_delta_is_never_an_update():
    paths = [ROOT / "privpart" / f"{name}.py" for name in UPDATES]
    paths += (ROOT / "privpart" / "engines").glob("*.py")
    paths += (ROOT / "privpart" / "flower").glob("*.py")
    found = []
    for path in paths:
        for node in ast.walk(tree(path)):
            name = getattr(node, "id", None) or getattr(node, "arg", None)
            if name == "delta" and path.name != "server.py":  # which reports at DP's delta
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def test_a_public_function_or_class_has_its_name_to_itself():
    homes: dict[str, set[str]] = {}
    for path in SOURCES:
        if path.is_relative_to(ROOT / "privpart" / "cli"):
            continue  # a command bears the name of what it shows
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(str(path.relative_to(ROOT)))
    twice = {name: sorted(files) for name, files in homes.items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in SHARED_NAMES} == {}


def test_a_round_opens_at_most_20_files():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "traced_round.py"], capture_output=True, text=True
    )
    last = re.search(r"lines in (\d+) files", done.stdout)
    assert last, done.stderr
    assert 10 < int(last.group(1)) <= 20


@pytest.mark.parametrize("package", [accounting, attacks, privpart], ids=lambda p: p.__name__)
def test_every_public_name_is_listed_sorted_and_documented(package):
    assert list(package.__all__) == sorted(package.__all__, key=str.lower) or list(
        package.__all__
    ) == sorted(package.__all__)
    undocumented = [name for name in package.__all__ if not getattr(package, name).__doc__]
    assert not undocumented


def test_an_unknown_public_name_is_an_ordinary_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        privpart.nonsense  # noqa: B018


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
