"""Own code: models, data and losses that a plan names, written by the people who train.

A plan names code as ``"package.module:function"`` or ``"./file.py:function"``; a file is relative
to the folder of the plan. ``record`` finds what such names refer to without running any of it, so
that a plan from elsewhere may be read, and its cost computed, without its code. ``load`` imports.
Commands that only ``record`` import nothing that the plan names. What Python itself finds first on
``PYTHONPATH`` or in the working folder is Python's choice, not the plan's, and may run, such as a
file there with the name of a package that torch looks for (``opt_einsum.py``).

A record holds the SHA-256 of the named files and, recursively, of the project's own files that they
import, and the versions of the installed distributions that these files import. It does not hold
privpart's version, since a newer one continues the runs of an older one, nor what no import
statement shows: data files, modules imported by a computed name, and what distributions import.
Python may run a cached compilation of a file (``__pycache__``), which it
takes for current if it names the file's time and size.

``load`` refuses a process whose memory holds other code than the files: another file under the name
of a recorded one, a recorded file that has changed, or may have, since the process imported it, or
any other of the project that has changed since ``load`` first saw it.

Both are one file, because ``load`` must import what ``record`` found.
"""

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import stat
import symtable
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from keyword import iskeyword
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, TypeVar

from accounting.checks import ConfigError, MissingExtraError

_SCHEMA = "privpart/own-code/1"
_LARGEST_SOURCE = 2**19
"""Bytes; at worst, Python needs 500 MB and 3 seconds to parse as many."""
_MOST_SOURCE = 2**21
_LARGEST_COMPILED = 2**28
_MOST_FILES = 2_000
_MOST_NAMES = 20_000
"""Each costs a look into every folder of ``sys.path``."""
_LONGEST = 300
"""Characters of other people's text in a sentence."""
_FORMS = '"./file.py:function" or "package.module:function"'
_OUR_ROOT = str(Path(__file__).resolve().parents[2])
_OUR_PACKAGES = ("accounting", "attacks", "privpart")
_SITES = {"site-packages", "dist-packages"}
_OUR_FOLDERS = tuple(f"{_OUR_ROOT}/{package}/" for package in _OUR_PACKAGES)
_PYTHON_FOLDERS = tuple(
    os.path.realpath(sysconfig.get_path(name, vars={"platbase": sys.base_exec_prefix})) + "/"
    for name in ("stdlib", "platstdlib")
)
_LOADERS: Any = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)
_SUFFIXES = tuple(suffix for _, suffixes in _LOADERS for suffix in suffixes)
_CODING = re.compile(rb"[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_IN_FILE = re.compile(r"(?P<path>.*\.py):(?P<name>[^\W\d]\w*)")
_IN_MODULE = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)")

_Tree = TypeVar("_Tree")

_added: list[str] = []
"""Folders that ``load`` has put on ``sys.path``; records do not depend on them."""
_imported: dict[str, str] = {}
"""Own files that this process has imported -> SHA-256 of each when ``load`` first saw them."""
_beside: dict[str, str] = {}
"""The same of files that no record may hold, such as those that are imported by a computed name."""


def is_reference(text: str) -> bool:
    """Return whether a value of a plan names code, rather than something that privpart has.

    >>> is_reference("./task.py:network"), is_reference("cross_entropy")
    (True, False)
    """
    return ":" in text


def refuse_malformed(text: str) -> None:
    """Check the form of a reference; look at no file.

    Raises:
        ConfigError: not a valid reference, or one to Python's own library.
    """
    _Reference.of(text)


@dataclass(frozen=True, slots=True)
class _Reference:
    """``text`` taken apart; without a path it names a module."""

    text: str
    path: str | None
    module: str
    name: str

    @classmethod
    def of(cls, text: str) -> "_Reference":
        if len(text) > 1_000 or not text.isprintable():
            raise ConfigError(f"{_line(text)!r}: does not name code; must be {_FORMS}.")
        if match := _IN_FILE.fullmatch(text):
            stem = Path(match["path"]).stem
            if not stem.isidentifier() or iskeyword(stem):
                raise ConfigError(
                    f"{text}: Python cannot import a file of this name; rename it, with letters, "
                    "digits and _ only."
                )
            return cls(text, match["path"], stem, match["name"])
        match = _IN_MODULE.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r}: does not name code; must be {_FORMS}.")
        if match["module"].partition(".")[0] in sys.stdlib_module_names:
            raise ConfigError(
                f"{text}: {match['module']} is part of Python; name a function of your own, as "
                f"{_FORMS}."
            )
        return cls(text, None, match["module"], match["name"])

    def file(self, folder: Path) -> Path:
        """Return the absolute path; links are kept, because Python imports beside the link."""
        return _absolute(folder / (self.path or ""))

    @property
    def prefix(self) -> str:
        """Return the file's folder as the plan names it."""
        above = Path(os.path.normpath(self.path or "")).parent.as_posix()
        return "" if above == "." else f"{above}/"


# What a reference means, without running it


def record(references: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Return what references refer to, ready for JSON; no line of it is run.

    Args:
        references: by key of the plan, such as "model.factory".
        folder: of the plan; the record is the same wherever the project lies.

    Raises:
        ConfigError: a file is missing, too large, or not valid Python; a name is not defined in its
            file; a module cannot be found; or two modules have the same name, one of which may be
            Python's.

    Returns:
        "references"; "files", each with its SHA-256, as paths relative to ``folder`` or, for
        modules that are found on ``sys.path``, to their place there; "distributions", each with its
        version; and "python", its version.
    """
    parsed = {key: _Reference.of(text) for key, text in sorted(references.items())}
    roots = {
        str(reference.file(folder).parent): reference.prefix
        for reference in parsed.values()
        if reference.path is not None
    }
    reader = _Reader(_Search(roots))
    for key, reference in parsed.items():
        reader.read(key, reference, folder)
    return {
        "schema": _SCHEMA,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "references": {key: reference.text for key, reference in parsed.items()},
        "files": dict(sorted(reader.files.items())),
        "distributions": dict(sorted(reader.distributions.items())),
    }


def record_hash(record: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of a record."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each difference of two records, without a full stop."""
    found = []
    if before.get("python") != now.get("python"):
        found.append(f"Python was {before.get('python')} and is {now.get('python')}")
    for table in ("references", "files", "distributions"):
        old, new = before.get(table, {}), now.get(table, {})
        for name in sorted(old.keys() | new.keys()):
            if name not in new:
                found.append(f"{name} is gone")
            elif name not in old:
                found.append(f"{name} is new")
            elif old[name] != new[name]:
                found.append(
                    f"{name} has changed"
                    if table == "files"
                    else f"{name} was {old[name]} and is {new[name]}"
                )
    return found


@dataclass(frozen=True, slots=True)
class _Module:
    """A module as it would be imported.

    Attributes:
        name: its full name.
        file: its source or binary; None for a folder without ``__init__.py``.
        folders: where its submodules are; empty unless it is a package.
        label: the file's name in a record.
        distribution: name and version; None for the project's own code.
    """

    name: str
    file: str | None
    folders: tuple[str, ...]
    label: str = ""
    distribution: tuple[str, str] | None = None


class _Search:
    """Finds modules as the import system would, with its own reader of folders.

    Neither the finders nor the hooks of other people are asked: they are code, and importing a
    package to look into it would run it. Finders of editable installs are replaced by their tables.

    Args:
        roots: folders of named files -> what their labels begin with; searched first.
    """

    def __init__(self, roots: Mapping[str, str]) -> None:
        self._roots = roots
        path = [
            str(_absolute(Path(entry)))
            for entry in sys.path
            if isinstance(entry, str) and entry not in _added
        ]
        self._path = list(dict.fromkeys([*roots, *path]))
        self._finders: dict[str, FileFinder] = {}
        self._lists: dict[str, list[tuple[Distribution, str]]] = {}
        self._known: dict[str, _Module | None] = {}

    def module(self, name: str) -> _Module | None:
        """Return a module; None if it is part of Python, or if there is none.

        The modules above ``name`` are found first.

        Raises:
            ConfigError: a file beside a named one has the name of another module, or the names are
                too many.
        """
        if name in self._known:
            return self._known[name]
        if len(self._known) == _MOST_NAMES:
            raise ConfigError(
                f"own code: imports more than {_MOST_NAMES:,} names; install the packages that it "
                "uses, so that their versions are recorded instead."
            )
        parent, _, tail = name.rpartition(".")
        if not parent:
            found = self._top(name)
        else:
            above = self.module(parent)
            own = above is not None and above.distribution is None
            found = self._inside(name, tail, above.folders) if above and own else None
        self._known[name] = found
        return found

    def _top(self, name: str) -> _Module | None:
        if name in sys.stdlib_module_names:
            self._refuse_instead_of_pythons(name)
            return None
        found = self._inside(name, name, self._path)
        if found is None or found.file is None:
            mapped = self._editable.get(name)
            inside = mapped and self._inside(name, mapped.name, [str(mapped.parent)])
            return inside or found
        if _is_pythons(found.file):  # such as its package test
            return None
        self._refuse_two(name, found.file)
        return found

    def _refuse_instead_of_pythons(self, name: str) -> None:
        """Refuse a file that Python would run in place of a module of its own."""
        # what is built in comes before all folders but is refused beside a named file, to be plain
        folders = self._roots if name in sys.builtin_module_names else self._path
        specs = (self._spec(name, folder) for folder in folders)
        first = next((spec for spec in specs if spec is not None and spec.loader is not None), None)
        if first is not None and not _is_pythons(str(first.origin)):
            raise ConfigError(
                f"{_shown(str(first.origin))}: has the name of another module, one of Python's "
                "own; rename it."
            )

    def _refuse_two(self, name: str, file: str) -> None:
        """Refuse a file beside a named one if ``import`` could mean another one, too."""
        place = Path(file).parents[1 if Path(file).name.startswith("__init__.") else 0]
        if str(place) not in self._roots:
            return
        others = []
        for folder in self._path:
            spec = self._spec(name, folder)
            if spec is not None and spec.loader is not None and not _same(spec.origin, file):
                others.append(str(spec.origin))
        mapped = self._editable.get(name)
        if mapped and not any(_same(file, f"{mapped}{end}") for end in (".py", "/__init__.py")):
            others.append(str(mapped))
        if others:
            raise ConfigError(
                f"{_shown(file)}: has the name of another module, {others[0]}; rename it."
            )

    def _inside(self, name: str, tail: str, folders: Iterable[str]) -> _Module | None:
        spaces: list[str] = []
        for folder in folders:
            spec = self._spec(tail, folder)
            if spec is None:
                continue
            if spec.loader is not None:
                return self._described(name, spec)
            spaces += spec.submodule_search_locations or []
        return _Module(name, None, tuple(spaces)) if spaces else None

    def _spec(self, tail: str, folder: str) -> ModuleSpec | None:
        if folder not in self._finders:
            self._finders[folder] = FileFinder(folder, *_LOADERS)
        return self._finders[folder].find_spec(tail)

    def _described(self, name: str, spec: ModuleSpec) -> _Module:
        file = Path(str(spec.origin))
        inside = spec.submodule_search_locations
        parts = name.split(".")
        above = parts if inside is not None else parts[:-1]
        root = str(file.parents[len(above)])
        label = self._roots.get(root, "") + "/".join([*above, file.name])
        distribution = self._distribution(parts[0], root, "/".join([*above, file.name]))
        return _Module(name, str(file), tuple(inside or ()), label, distribution)

    def _distribution(self, top: str, root: str, file: str) -> tuple[str, str] | None:
        """Return name and version of what installed a file; None if nothing did."""
        if root == _OUR_ROOT and top in _OUR_PACKAGES:
            ours = next(_installed(self._path, "privpart"), None)
            return "privpart", ours.version if ours else "not installed"
        owners = self._owners(root, top)
        if len(owners) > 1:  # a namespace that distributions share
            owners = [owner for owner in owners if f"\n{file}," in _recorded(owner)] or owners
        if owners:
            return owners[0].name or top, owners[0].version
        return (top, "of unknown version") if _SITES & set(Path(root).parts) else None

    @cached_property
    def _editable(self) -> dict[str, Path]:
        """By top-level name, where editable installs have it, without the ending of a file."""
        places = {}
        for name, module in list(sys.modules.items()):
            if name.startswith("__editable__") and isinstance(module, ModuleType):
                table = vars(module).get("MAPPING")
                if isinstance(table, dict):
                    rows = [pair for pair in table.items() if set(map(type, pair)) == {str}]
                    places.update({top: Path(place) for top, place in rows})
        return places

    def _owners(self, root: str, top: str) -> list[Distribution]:
        """Return the distributions that installed a top-level module into a folder."""
        if root not in self._lists:
            found = _installed([root] if root in self._path else [])
            self._lists[root] = [(each, _recorded(each) + _tops(each, root)) for each in found]
        begins = tuple(f"\n{top}{end}" for end in "/.,")
        return [
            each for each, names in self._lists[root] if any(begin in names for begin in begins)
        ]


def _installed(path: list[str], name: str | None = None) -> Iterator[Distribution]:
    context = DistributionFinder.Context(path=path, name=name)
    return iter(MetadataPathFinder.find_distributions(context))


def _recorded(distribution: Distribution) -> str:
    """Return the list of installed files, each after a line break and before a comma."""
    return "\n" + (distribution.read_text("RECORD") or "")


def _tops(distribution: Distribution, root: str) -> str:
    """Return the top-level modules that a distribution names, written as ``_recorded`` does."""
    if not _is_in_site(f"{root}/"):  # elsewhere, an editable install says so, too
        return ""
    return "".join(f"\n{top}," for top in (distribution.read_text("top_level.txt") or "").split())


class _Reader:
    """Reads named files, and all own files that they import."""

    def __init__(self, search: _Search) -> None:
        self._search = search
        self.own: dict[str, str] = {}  # name of each own module -> its file
        self._starred: set[str] = set()
        self._bytes = 0
        self.files: dict[str, str] = {}
        self.distributions: dict[str, str] = {}

    def read(self, key: str, reference: _Reference, folder: Path) -> None:
        """Read what a reference refers to.

        Raises:
            ConfigError: see ``record``.
        """
        where = f"{key}: {reference.text}"
        if reference.path is not None:
            file = reference.file(folder)
            if not file.is_file():
                raise ConfigError(f"{where}: there is no file {file}.")
        module = self._search.module(reference.module)
        if module is None or module.file is None:
            raise ConfigError(f"{where}: {_not_found(reference, folder)}")
        if reference.path is not None and not _same(module.file, reference.file(folder)):
            raise ConfigError(
                f"{where}: {_shown(module.file)} has the same name, and Python prefers it; rename "
                "one of them."
            )
        self.follow(reference.module)
        if module.distribution is None and module.file.endswith(tuple(SOURCE_SUFFIXES)):
            names = _names(_content(module.file, module.label), module.label)
            if reference.name not in names and not {"*", "__getattr__"} & names:
                near = _near(reference.name, names)
                raise ConfigError(
                    f"{where}: {module.label} does not define {reference.name}{near}."
                )

    def follow(self, first: str) -> None:
        """Note a module and all that it imports."""
        waiting = [first]
        while waiting:
            name, star, _ = waiting.pop().partition(".*")
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                module = self._search.module(".".join(parts[:end]))
                if module is None or self._is_installed(module):
                    break
                if module.file is not None and module.name not in self.own:
                    waiting += self._own_file(module, module.file)
            if star and name not in self._starred:
                self._starred.add(name)
                waiting += self._of_star(name)

    def _of_star(self, name: str) -> list[str]:
        """Return what ``from name import *`` may import besides ``name``: the names in its __all__.

        Where these are computed, they may be any of its submodules.
        """
        module = self._search.module(name)
        if module is None or module.distribution is not None or module.file is None:
            return []
        if not module.folders or not module.file.endswith(tuple(SOURCE_SUFFIXES)):
            return []
        source = _content(module.file, module.label)
        tails = _listed(_parsed(source, module.label, ast.parse))
        if tails is None:
            tails = {tail for folder in module.folders for tail in _modules_in(folder)}
        return [f"{name}.{tail}" for tail in sorted(tails)]

    def _is_installed(self, module: _Module) -> bool:
        if module.distribution is not None and module.name.partition(".")[0] not in _OUR_PACKAGES:
            name, version = module.distribution
            self.distributions[name] = version
        return module.distribution is not None

    def _own_file(self, module: _Module, file: str) -> Iterator[str]:
        """Note a file; return the modules that it imports."""
        if len(self.own) == _MOST_FILES:
            raise ConfigError(
                f"own code: is more than {_MOST_FILES:,} files; install the packages that it uses, "
                "so that their versions are recorded instead."
            )
        self.own[module.name] = file
        if not file.endswith(tuple(SOURCE_SUFFIXES)):
            self._note(module, _digest(file, module.label))
            return iter(())
        source = _content(file, module.label)
        self._bytes += len(source)
        if self._bytes > _MOST_SOURCE:
            raise ConfigError(
                f"own code: is more than {_MOST_SOURCE // 2**20} MiB; install the packages that it "
                "uses, so that their versions are recorded instead."
            )
        self._note(module, hashlib.sha256(source).hexdigest())
        package = module.name if module.folders else module.name.rpartition(".")[0]
        return _imports(_parsed(source, module.label, ast.parse), package)

    def _note(self, module: _Module, digest: str) -> None:
        taken = self.files.get(module.label, digest) != digest  # by a file found elsewhere
        self.files[f"{module.label} ({module.name})" if taken else module.label] = digest


def _content(file: str, label: str) -> bytes:
    """Return the bytes of an ordinary file, at most ``_LARGEST_SOURCE``."""
    try:
        # not blocking: opening a pipe would wait for a writer
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as opened:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ConfigError(f"{label}: is not an ordinary file.")
            data = opened.read(_LARGEST_SOURCE + 1)
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read: {error}.") from None
    if len(data) > _LARGEST_SOURCE:
        raise ConfigError(
            f"{label}: is larger than {_LARGEST_SOURCE // 2**10} KiB; keep data in data files."
        )
    return data


def _digest(file: str, label: str) -> str:
    """Return the SHA-256 of a compiled module."""
    try:
        with open(file, "rb") as opened:  # noqa: PTH123
            if os.fstat(opened.fileno()).st_size > _LARGEST_COMPILED:
                raise ConfigError(f"{label}: is larger than {_LARGEST_COMPILED // 2**20} MiB.")
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read: {error}.") from None


def _parsed(source: bytes, label: str, parse: Callable[[str], _Tree]) -> _Tree:
    """Return what Python's own parser makes of a file."""
    text = _decoded(source, label)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{label}:{error.lineno}: is not valid Python: {error.msg}.") from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = _line(str(error)) or "it is nested too deeply"
        raise ConfigError(f"{label}: is not valid Python: {reason}.") from None


def _names(source: bytes, label: str) -> set[str]:
    """Return the names that a file defines at its top; "*" stands for whatever a star imports."""
    table = _parsed(source, label, lambda text: symtable.symtable(text, label, "exec"))
    names = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    tree = _parsed(source, label, ast.parse)
    stars = (node for node in _statements(tree) if isinstance(node, ast.ImportFrom))
    return names | {"*" for node in stars if node.names[0].name == "*"}


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all statements of a file; expressions hold none."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for inside in ("body", "handlers", "orelse", "finalbody", "cases"):
            nodes = getattr(node, inside, ())
            waiting += nodes if isinstance(nodes, list) else ()


def _decoded(source: bytes, label: str) -> str:
    for line in source.split(b"\n", 2)[:2]:
        coding = _CODING.match(line)
        if coding and coding[1].lower().replace(b"_", b"-") not in {b"utf-8", b"utf8", b"ascii"}:
            raise ConfigError(f"{label}: is not in UTF-8, but in {coding[1].decode()}; convert it.")
    try:
        return source.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line_number = source.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{label}:{line_number}: is not in UTF-8; convert the file.") from None


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the full names that a file imports, and those that could be submodules."""
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) + 1 - node.level]
                if not package or not above:
                    continue
                base = ".".join([*above, base]).rstrip(".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)  # ".*", too


def _listed(tree: ast.Module) -> set[str] | None:
    """Return the strings of a file's ``__all__``, none without one; None if it is computed."""
    found: set[str] = set()
    literal = 0
    for node in _statements(tree):
        if isinstance(node, ast.ImportFrom) and any(
            "__all__" in (alias.name, alias.asname) for alias in node.names
        ):
            return None
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if not any(_is_all(target) for target in targets) or not isinstance(
            value, ast.List | ast.Tuple
        ):
            continue
        texts = [item.value for item in value.elts if isinstance(item, ast.Constant)]
        found |= {text for text in texts if isinstance(text, str)}
        literal += len(texts) == len(value.elts)
    return found if literal == sum(map(_is_all, ast.walk(tree))) else None


def _is_all(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Name) and node.id == "__all__"


def _modules_in(folder: str) -> Iterator[str]:
    """Yield the names of the modules and packages in a folder of a package."""
    for entry in Path(folder).iterdir():
        tail = entry.name.partition(".")[0]
        if (
            tail.isidentifier()
            and tail[:2] != "__"
            and (tail == entry.name or entry.name.endswith(_SUFFIXES))
        ):
            yield tail


# Importing and calling it


def load(reference: str, folder: Path) -> Callable[..., Any]:
    """Import the code that a reference names, and return it.

    A file is imported under its own name with its folder on ``sys.path``, so that it may import
    files beside it and that worker processes find its classes.

    Args:
        reference: see the module.
        folder: of the plan.

    Raises:
        ConfigError: there is no such module or name; it cannot be called; its import fails; another
            module has its name, or that of an own module that it imports; or one of them has
            changed, or may have, since this process imported it.
    """
    parsed = _Reference.of(reference)
    _memory.look()
    module = _run(parsed, folder) if parsed.path is None else _import_file(parsed, folder)
    _memory.look()
    _refuse_another(parsed, folder)
    _refuse_stale(module)
    try:
        found = getattr(module, parsed.name)
    except AttributeError:
        near = _near(parsed.name, vars(module))
        raise ConfigError(
            f"{reference}: {module.__name__} does not define {parsed.name}{near}."
        ) from None
    if not callable(found):
        raise ConfigError(
            f"{reference}: is of type {type(found).__name__}; must be a function or a class."
        )
    return found  # type: ignore[no-any-return]


def _import_file(reference: _Reference, folder: Path) -> ModuleType:
    file = reference.file(folder)
    if not file.is_file():
        raise ConfigError(f"{reference.text}: there is no file {file}.")
    root = str(file.parent)
    found = _Search({root: ""}).module(reference.module)
    if found is None or not _same(found.file, file):
        raise ConfigError(
            f"{reference.text}: {found and found.file} has the same name, and Python prefers it; "
            "rename one of them."
        )
    already = sys.modules.get(reference.module)
    if already is not None:
        other = getattr(already, "__file__", None)
        if not _same(other, file):
            raise ConfigError(
                f"{reference.text}: this process has another module of that name, "
                f"{other or 'built in'}; rename the file."
            )
        return already
    added = root not in sys.path
    if added:
        sys.path.insert(0, root)
        _added.append(root)
    importlib.invalidate_caches()
    try:
        return _run(reference, folder)
    except ConfigError:
        if added:
            sys.path.remove(root)
            _added.remove(root)
        raise


def _run(reference: _Reference, folder: Path) -> ModuleType:
    try:
        return importlib.import_module(reference.module)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{reference.module}.".startswith(f"{missing}."):
            raise ConfigError(f"{reference.text}: {_not_found(reference, folder)}") from None
        raise ConfigError(f"{reference.text}: its import failed: {_told(error)}") from error


def _process_start() -> int:
    """Return the time (ns) at which this process began; 0, before all files, if none tells it."""
    try:
        ticks = int(Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()[19])
        # one tick later, since Python needs longer to begin than the time is rounded by
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - (ticks + 1) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0
    return time.time_ns() - int(age * 1e9)


class _Memory:
    """Since when this process may hold its own files.

    A file that was last changed before its module came into memory is what the module was made
    from. When a module came is known from both sides only for what ``load`` imports; any other came
    after the last look that did not see it, and after this module if it is below it in
    ``sys.modules``, which is in the order of import.

    Attributes:
        since: by file, a time (ns) before its import.
    """

    def __init__(self) -> None:
        self.since: dict[str, int] = {}
        self._began = time.time_ns()
        self._last = _process_start()

    def look(self) -> None:
        """Note the own files that have come into memory, and when."""
        now = time.time_ns()
        order = list(sys.modules)
        before = order.index(__name__) if __name__ in order else len(order)
        since: dict[str, int] = {}
        for place, file in _own_files():
            after = self._last if place < before else max(self._last, self._began)
            since[file] = min(since.get(file, now), self.since.get(file, after))
        self.since, self._last = since, now


_memory = _Memory()


def _own_files() -> Iterator[tuple[int, str]]:
    """Yield the own source files of the modules in memory, and the place of each in the order."""
    for place, (name, module) in enumerate(list(sys.modules.items())):
        file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if name != "__main__" and isinstance(file, str) and file.endswith(".py") and _is_own(file):
            yield place, file


def _refuse_changed(file: str) -> None:
    with suppress(OSError):
        # not the time that a file says it was modified, which anyone may set
        changed = Path(file).stat().st_ctime_ns
        now = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        if file not in _imported and changed >= _memory.since.get(file, 0):
            raise ConfigError(
                f"{_shown(file)}: may have changed since this process imported it; start a new "
                "process, which imports privpart before it."
            )
        if _imported.setdefault(file, now) != now:
            raise _has_changed(file)


def _refuse_stale(module: ModuleType) -> None:
    """Check that no file of the module's project has changed since ``load`` first saw it.

    No record need hold such a file, so one that may have changed earlier is not refused:
    Flower writes an app's files and imports some in one process, before privpart.
    """
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not _is_own(file):
        return
    depth = module.__name__.count(".") + hasattr(module, "__path__")
    root = f"{Path(file).parents[depth]}/".replace("//", "/")
    for path in filter(lambda path: path.startswith(root), _memory.since):
        with suppress(OSError):
            now = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            if _beside.setdefault(path, now) != now:
                raise _has_changed(path)


def _has_changed(file: str) -> ConfigError:
    return ConfigError(
        f"{_shown(file)}: has changed since this process imported it; start a new process."
    )


def _refuse_another(reference: _Reference, folder: Path) -> None:
    """Check that the names of recorded files mean these files in this process, and no others."""
    roots = {} if reference.path is None else {str(reference.file(folder).parent): ""}
    reader = _Reader(_Search(roots))
    reader.follow(reference.module)
    for name, file in reader.own.items():
        if name in sys.modules:
            other = getattr(sys.modules[name], "__file__", None)
        elif "." in name or (spec := importlib.util.find_spec(name)) is None:
            continue  # one that is not in memory may be imported later
        else:
            other = spec.origin
        if not _same(other, file):
            raise ConfigError(
                f"{_shown(file)}: this process has another module {name}, "
                f"{other or 'without a file'}; start a new process."
            )
        if other in _memory.since:
            _refuse_changed(other)


def call(
    function: Callable[..., Any],
    reference: str,
    key: str,
    /,
    *arguments: Any,  # noqa: ANN401  whatever people's functions take
    **options: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Return what a function of the plan returns; turn what it raises into one sentence.

    Args:
        function: what ``load`` returned.
        reference: its name in the plan.
        key: of the plan, such as "model.factory".
        arguments: for ``function``.
        options: for ``function``, by name.

    Raises:
        ConfigError: it does not take these arguments, or it raises.
        MissingExtraError: it needs a package that is not installed, and an adapter said so.
    """
    _refuse_other_options(function, f"{key}: {reference}", arguments, options)
    try:
        return function(*arguments, **options)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        kind = MissingExtraError if isinstance(error, MissingExtraError) else ConfigError
        raise kind(f"{key}: {reference} failed: {_told(error)}") from error


def _refuse_other_options(
    function: Callable[..., Any], name: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    try:
        signature = inspect.signature(function)
    except Exception:  # compiled functions have none, and __signature__ may be anything
        return
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        passed = f"; the plan passes {', '.join(options)}" if options else ""
        raise ConfigError(f"{name}{_line(str(signature))}: {_line(str(error))}{passed}.") from None


def _told(error: BaseException) -> str:
    """Return where in own code an error was raised, its type and its message."""
    if isinstance(error, SyntaxError) and error.filename:
        place, text = f"{_shown(error.filename)}:{error.lineno}", error.msg
    else:
        frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
        own = [(file, line) for file, line in frames if _is_own(file)]
        file, line = (own or frames)[-1]
        place, text = f"{_shown(file)}:{line}", _message(error)
    kind = type(error).__name__
    if isinstance(error, ConfigError) and text:
        return f"{place}: {text}."  # ours, a sentence already
    return f"{place}: {kind}: {text}." if text else f"{place}: {kind}."


def described(value: object) -> str:
    """Return what a value is, for a message.

    >>> described(None), described((1, 2)), described(dict)
    ('None', 'a tuple', 'the class dict itself')
    """
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return f"a {type(value).__name__}"


def _message(error: BaseException) -> str:
    try:
        return _line(str(error)).rstrip(".")
    except Exception:  # people's own errors may fail to print
        return ""


def _line(text: str) -> str:
    """Return the first line that says something, cut to a bearable length."""
    lines = (" ".join(line.split()) for line in text[: 20 * _LONGEST].splitlines())
    first = next((line for line in lines if line), "")
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]}..."


def _not_found(reference: _Reference, folder: Path) -> str:
    beside = reference.module.replace(".", "/") + ".py"
    name = beside if (folder / beside).is_file() else "file.py"
    return (
        f"Python finds no module {reference.module}. Install its package (pip install -e FOLDER), "
        f'put its folder on PYTHONPATH, or name the file, as in "./{name}:{reference.name}".'
    )


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, [known for known in names if known[:1] != "_"], n=3)
    return f"; near it: {', '.join(near)}" if near else ""


def _is_own(file: str) -> bool:
    """Return whether a file is neither Python's, nor installed, nor ours."""
    if file.startswith(("<", *_OUR_FOLDERS)):
        return False
    return not (_is_in_site(file) or _is_pythons(file))


def _is_pythons(file: str) -> bool:
    if _is_in_site(file):
        return False
    # load asks this of every module in memory, and to resolve a path takes longer than all else
    plain = file.startswith(_PYTHON_FOLDERS) and ".." not in file and not Path(file).is_symlink()
    return plain or os.path.realpath(file).startswith(_PYTHON_FOLDERS)


def _is_in_site(file: str) -> bool:
    return not _SITES.isdisjoint(file.split("/"))


def _same(file: object, other: str | Path) -> bool:
    return isinstance(file, str) and os.path.realpath(file) == os.path.realpath(other)


def _absolute(path: Path) -> Path:
    return Path(os.path.normpath(path.absolute()))


def _shown(file: str) -> str:
    """Return a path as people would write it: from here, where it lies below."""
    here = f"{os.getcwd()}/"  # noqa: PTH109
    return file.removeprefix(here)
