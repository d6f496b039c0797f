"""Own code: models, data and losses that a plan names, written by the people who train.

A plan names code as ``"./file.py:function"`` (relative to the folder of the plan) or
``"package.module:function"``. ``record`` hashes the project that such a name belongs to: every
Python file and compiled module in the folder of the file, or in the package. It runs none of them,
so that a plan from elsewhere can be read, and its cost computed, without its code. ``load``
imports, and refuses a process whose memory holds other code than the files.

A change of any file of the project is a change of the plan, whether or not the name needs it. Of
installed packages the record has the versions, of those that the project imports by name, except
privpart's, since a newer one continues the runs of an older one. It does not have data files, nor
what is imported by a computed name from outside of the project.
"""

import difflib
import hashlib
import importlib
import inspect
import json
import os
import re
import stat
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec, all_suffixes
from keyword import iskeyword
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, NamedTuple

from accounting.checks import ConfigError, MissingExtraError

_SCHEMA = "privpart/own-code/2"
_MOST_FILES = 2_000
_MOST_BYTES = 2**28
_LONGEST = 300
"""Characters of other people's text in a sentence."""
_FORMS = '"./file.py:function" or "package.module:function"'
_SITES = {"site-packages", "dist-packages"}
_ROOT = Path(__file__).resolve().parents[2]
_FOREIGN = (
    "<",
    *(f"{_ROOT / package}/" for package in ("accounting", "attacks", "privpart")),
    f"{os.path.realpath(sysconfig.get_path('stdlib'))}/",
)
"""Where the paths of files begin that are not the author's."""
_SUFFIXES = tuple(all_suffixes())
_REFERENCE = re.compile(
    r"(?:(?P<path>.*)\.py|(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*)):(?P<name>[^\W\d]\w*)"
)
_IMPORT = re.compile(
    rb"(?:^|[;:])[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import|import[ \t]+([^#;\n]+))", re.MULTILINE
)

_BEGAN, _EARLIER = time.time_ns(), frozenset(sys.modules)
_imported: dict[Path, str] = {}
"""Files in memory -> SHA-256 of each before ``load`` imported it, or when it first saw it."""


def is_reference(text: str) -> bool:
    """Whether a value of a plan names code, rather than something that privpart has."""
    return ":" in text


class _Reference(NamedTuple):
    """``text`` taken apart; without a path it names a module."""

    text: str
    path: str | None
    module: str
    name: str

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def file(self, folder: Path) -> Path:
        """Absolute path; links are kept, because Python imports beside the link."""
        return Path(os.path.normpath((folder / (self.path or "")).absolute()))


def parsed(text: str) -> _Reference:
    """Take a reference apart; look at no file.

    Raises:
        ConfigError: not a valid reference, or one to Python's own library.
    """
    match = _REFERENCE.fullmatch(text) if len(text) <= 1_000 and text.isprintable() else None
    if match is None:
        raise ConfigError(f"{_line(text)!r}: does not name code; must be {_FORMS}.")
    if match["path"] is not None:
        stem = Path(match["path"]).name
        if not stem.isidentifier() or iskeyword(stem):
            raise ConfigError(
                f"{text}: Python cannot import a file of this name; rename it, with letters, "
                "digits and _ only."
            )
        return _Reference(text, f"{match['path']}.py", stem, match["name"])
    reference = _Reference(text, None, match["module"], match["name"])
    if reference.top in sys.stdlib_module_names:
        raise ConfigError(f"{text}: {match['module']} is part of Python; name your own code.")
    return reference


class _Project(NamedTuple):
    """The files below ``folder``, which Python imports from ``root``.

    In a record, ``prefix`` stands in place of ``root``.
    """

    root: Path
    folder: Path
    prefix: str

    def files(self) -> Iterator[Path]:
        """Yield the project's own modules, sorted; links are followed, environments are not."""
        files: list[Path] = []
        visited: set[str] = set()
        size = 0
        for place, folders, names in os.walk(self.folder, followlinks=True):
            # Links may lead in a circle, and an environment is somebody else's code.
            real = os.path.realpath(place)
            if real in visited or "pyvenv.cfg" in names:
                folders.clear()
                continue
            visited.add(real)
            hidden = ("__pycache__", *_SITES)
            folders[:] = [name for name in folders if name[0] != "." and name not in hidden]
            for path in (Path(place, name) for name in names if name.endswith(_SUFFIXES)):
                if path.exists() and stat.S_ISREG((status := path.stat()).st_mode):
                    files.append(path)
                    size += status.st_size
            # Checked folder by folder, since a plan may lie beside a large data set.
            if len(files) > _MOST_FILES or size > _MOST_BYTES:
                raise ConfigError(
                    f"{_shown(str(self.folder))}: has more than {_MOST_FILES:,} Python files or "
                    f"{_MOST_BYTES >> 20} MiB of them; give the code of the plan a folder of its "
                    "own."
                )
        yield from sorted(files)

    def modules(self) -> dict[str, Path]:
        """Map the name under which Python imports each file to the file."""
        modules = {}
        for file in self.files():
            parts = [*file.relative_to(self.root).parts[:-1], file.name.partition(".")[0]]
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
        return modules


def record(references: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Return hashes of the projects that references belong to, ready for JSON; nothing is run.

    Args:
        references: by key of the plan, such as "model.factory".
        folder: of the plan; the record is the same wherever the project lies. Its files are named
            relative to ``folder`` or, in packages, to where Python finds them.

    Raises:
        ConfigError: a file or a package is missing, or a project is too large.
    """
    files: dict[str, str] = {}
    imported: set[str] = set()
    projects: set[_Project] = set()
    for key, text in sorted(references.items()):
        reference = parsed(text)
        imported.add(reference.top)
        if (project := _project(reference, folder, f"{key}: {text}")) is not None:
            projects.add(project)
    for project in projects:
        for path in project.files():
            digest, names = _read(path)
            files[f"{project.prefix}{path.relative_to(project.root).as_posix()}"] = digest
            imported |= names
    owners = _distributions()
    versions = {name: owners[name] for name in imported if name in owners}
    return {
        "schema": _SCHEMA,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "references": dict(sorted(references.items())),
        "files": dict(sorted(files.items())),
        "distributions": dict(sorted(item for items in versions.values() for item in items)),
    }


def _project(reference: _Reference, folder: Path, where: str) -> _Project | None:
    """Return the project of a reference; None for an installed package, which has a version."""
    if reference.path is not None:
        file = reference.file(folder)
        if not file.is_file():
            raise ConfigError(f"{where}: there is no file {file}.")
        above = Path(os.path.normpath(reference.path)).parent.as_posix()
        return _Project(file.parent, file.parent, "" if above == "." else f"{above}/")
    importlib.invalidate_caches()
    spec = _find(reference.top)
    places = list(spec.submodule_search_locations or ()) if spec else []
    origin = spec.origin if spec and spec.has_location else None
    if not places and origin is None:
        raise ConfigError(f"{where}: {_not_found(reference, folder)}")
    home = Path(os.path.normpath(Path(places[0] if places else str(origin)).absolute()))
    if _is_in_site(str(home)):
        return None
    return _Project(home.parent, home if places else home.parent, "")


def _read(path: Path) -> tuple[str, frozenset[str]]:
    status = path.stat()
    return _read_once(path, status.st_ctime_ns, status.st_mtime_ns, status.st_size)


@cache
def _read_once(path: Path, *_status: int) -> tuple[str, frozenset[str]]:
    """Return a file's SHA-256, and the top-level modules that it imports."""
    data = path.read_bytes()
    names = set()
    for source, several in _IMPORT.findall(data) if path.suffix == ".py" else ():
        for name in [source] if source else several.split(b","):
            names.add(name.strip().partition(b".")[0].split(b" ")[0].decode(errors="replace"))
    return hashlib.sha256(data).hexdigest(), frozenset(names)


@cache
def _distributions() -> dict[str, list[tuple[str, str]]]:
    """Return the installed distributions that have each top-level module, with their versions."""
    return {
        top: [(name, metadata.version(name)) for name in sorted({*names} - {"privpart"})]
        for top, names in metadata.packages_distributions().items()
    }


def record_hash(record: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of a record."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each difference of two records, without a full stop."""
    sentences = []
    for table in ("python", "references", "files", "distributions"):
        old, new = (
            {"Python": values} if isinstance(values, str) else values
            for values in (record.get(table, {}) for record in (before, now))
        )
        for name in sorted(name for name in {*old, *new} if old.get(name) != new.get(name)):
            # Hashes say nothing to people; versions and references do.
            what = "has changed"
            if name not in new or name not in old:
                what = "is gone" if name in old else "is new"
            elif table != "files":
                what = f"was {old[name]} and is {new[name]}"
            sentences.append(f"{name} {what}")
    return sentences


def load(reference: str, folder: Path) -> Callable[..., Any]:
    """Import the code that a reference names, and return it.

    A file is imported under its own name with its folder on ``sys.path``, so that it may import
    files beside it and that worker processes find its classes.

    Raises:
        ConfigError: there is no such module or name; it cannot be called; its import fails; another
            module has its name, or that of an own module that the project imports; or one of them
            has changed, or may have, since this process imported it.
    """
    named = parsed(reference)
    project = _project(named, folder, reference)
    modules = {} if project is None else project.modules()
    digests = {path: _read(path)[0] for path in modules.values()}
    earlier = set(sys.modules)
    module = _import(named, folder)
    # What changes from here on differs from these digests, which were taken before the import.
    fresh = [name for name in modules if name in sys.modules and name not in earlier]
    _imported.update({modules[name]: digests[modules[name]] for name in fresh})
    _refuse_others(modules, named)
    if not hasattr(module, named.name):
        names = [name for name in vars(module) if name[:1] != "_"]
        near = ", ".join(difflib.get_close_matches(named.name, names, n=3))
        hint = f"; near it: {near}" if near else ""
        raise ConfigError(f"{reference}: {module.__name__} does not define {named.name}{hint}.")
    value: Callable[..., Any] = getattr(module, named.name)
    if not callable(value):
        raise ConfigError(
            f"{reference}: is of type {type(value).__name__}; must be a function or a class."
        )
    return value


def _import(reference: _Reference, folder: Path) -> ModuleType:
    before = list(sys.path)
    importlib.invalidate_caches()
    if reference.path is not None:
        _add_to_path(reference, reference.file(folder))
    try:
        return importlib.import_module(reference.module)
    except (Exception, SystemExit) as error:
        sys.path[:] = before
        if isinstance(error, MemoryError):
            raise
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{reference.module}.".startswith(f"{missing}."):
            raise ConfigError(f"{reference.text}: {_not_found(reference, folder)}") from None
        raise ConfigError(f"{reference.text}: its import failed: {_told(error)}") from error


def _add_to_path(reference: _Reference, file: Path) -> None:
    """Let Python find a file by its name; refuse a file whose name another module has."""
    place = str(file.parent)
    # Its folder comes first, where it would hide a module of this name; and a package of this name
    # beside the file would be imported in its place.
    other, added = _origin(reference.module) or str(file), place not in sys.path
    if added:
        sys.path.insert(0, place)
    for origin in (other, _origin(reference.module)):
        if not _same(origin, file):
            if added:
                sys.path.remove(place)
            raise ConfigError(
                f"{reference.text}: another module has its name, {origin or 'built into Python'}; "
                "rename the file."
            )


def _refuse_others(modules: Mapping[str, Path], reference: _Reference) -> None:
    """Check that modules of the project's names, in memory or imported later, are its files."""
    imported = {reference.top}.union(*(_read(path)[1] for path in modules.values()))
    for name, path in modules.items():
        needed = name.partition(".")[0] in imported
        if name not in sys.modules and ("." in name or not needed):
            continue
        other = _origin(name)
        if _same(other, path):
            if name in sys.modules:
                _refuse_changed(name, path, needed=needed)
        elif needed:
            raise ConfigError(
                f"{_shown(str(path))}: this process has another module {name}, "
                f"{other or 'without a file'}; start a new process."
            )


def _origin(name: str) -> str | None:
    """Return the file of a module in memory, or the one that Python would import."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None)
    spec = _find(name)
    return spec.origin if spec and spec.loader else None


def _find(name: str) -> ModuleSpec | None:
    """Find a module without looking at what is in memory, where an editable install may be."""
    # All finders, since an editable install may be an import hook.
    specs = (finder.find_spec(name, None) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _process_start() -> int:
    """Return the time (ns) at which this process began; 0, before all files, if none tells it."""
    try:
        ticks = int(Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()[19])
        # One tick later, since Python needs longer to begin than the time is rounded by.
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - (ticks + 1) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0
    return time.time_ns() - int(age * 1e9)


def _refuse_changed(name: str, path: Path, *, needed: bool) -> None:
    """Check that a module in memory was made from the file as it is now.

    Of a module that something else imported, the time at which the file last changed tells, not the
    one that it says it was modified, which anyone may set. A module that no file of the project
    imports may have been written and imported by this process, as Flower does with an app.
    """
    if path not in _imported and needed:
        began = _process_start() if name in _EARLIER else _BEGAN
        if path.stat().st_ctime_ns >= began:
            raise ConfigError(
                f"{_shown(str(path))}: may have changed since this process imported it; start a "
                "new process, which imports privpart before it."
            )
    # By content: a file that was written again with the same text is the same code.
    digest = _read(path)[0]
    if _imported.setdefault(path, digest) != digest:
        raise ConfigError(
            f"{_shown(str(path))}: has changed since this process imported it; start a new process."
        )


def call(
    function: Callable[..., Any],
    reference: str,
    key: str,
    /,
    *arguments: Any,  # noqa: ANN401  whatever people's functions take
    **options: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Return what a function of the plan returns; turn what it raises into one sentence.

    Raises:
        ConfigError: it does not take these arguments, or it raises.
        MissingExtraError: it needs a package that is not installed, and an adapter said so.
    """
    where = f"{key}: {reference}"
    signature = None
    with suppress(Exception):  # compiled functions have none, and __signature__ may be anything
        signature = inspect.signature(function)
    try:
        if signature is not None:
            signature.bind(*arguments, **options)
    except TypeError as error:
        passed = f"; the plan passes {', '.join(options)}" if options else ""
        taken = f"{_line(str(signature))}: {_line(str(error))}"
        raise ConfigError(f"{where}{taken}{passed}.") from None
    try:
        return function(*arguments, **options)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        kind = MissingExtraError if isinstance(error, MissingExtraError) else ConfigError
        raise kind(f"{where} failed: {_told(error)}") from error


def _told(error: BaseException) -> str:
    """Return where in own code an error was raised, its type and its message."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}."
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    theirs = [
        (file, line)
        for file, line in frames
        if not (os.path.realpath(file).startswith(_FOREIGN) or file[0] == "<" or _is_in_site(file))
    ]
    file, line = (theirs or frames)[-1]
    text = ""
    # People's own errors may fail to print.
    with suppress(Exception):
        text = _line(str(error)).rstrip(".")
    # Ours is a sentence already.
    kind = [] if isinstance(error, ConfigError) and text else [type(error).__name__]
    return ": ".join([f"{_shown(file)}:{line}", *kind, *([text] if text else [])]) + "."


def described(value: object) -> str:
    """Return what a value is, for a message, such as "a tuple" or "the class dict itself"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


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


def _is_in_site(file: str) -> bool:
    return not _SITES.isdisjoint(file.split("/"))


def _same(file: object, other: str | Path) -> bool:
    return isinstance(file, str) and os.path.realpath(file) == os.path.realpath(other)


def _shown(file: str) -> str:
    """Return a path as people would write it: from here, where it lies below."""
    folder = f"{os.getcwd()}/"  # noqa: PTH109
    return file.removeprefix(folder)
