"""Disk: what the log of a process's system calls may leave on it when the power fails.

The model is stricter than any file system in use. Until a file is synced, each 512-byte sector of
each write to it may be there or not, and so may its new length; until a folder is synced, each new,
renamed or removed name in it may be there or not, whatever was synced of the file. Nothing else is
lost: what was synced stays, and changes to one sector or name happen in their order.
"""

import copy
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from syscalls import Call

SECTOR = 512
_FILES = itertools.count()
Tree = dict[str, bytes | None]
"""Content by path; None is a folder."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change that is lost whole or not at all when the power fails.

    Attributes:
        place: number of the file that a sync of it makes durable; a folder has its path.
        names: new name -> number of the file, "folder", or None for removed.
        length: at least this long, or with ``cut`` exactly.
    """

    place: int | str
    names: tuple[tuple[str, int | str | None], ...] = ()
    offset: int = 0
    data: bytes = b""
    length: int = 0
    cut: bool = False


class Disk:
    """A folder's content as a log of calls builds it; the folder itself is durable."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.names: dict[str, int | str] = {root: "folder"}
        self.pending: list[Change] = []
        self._durable_names = dict(self.names)
        self._durable: dict[int | str, bytes] = {}

    def copy(self) -> "Disk":
        """Return a disk that goes its own way from here."""
        other = copy.copy(self)
        other.names, other.pending = dict(self.names), list(self.pending)
        other._durable_names, other._durable = dict(self._durable_names), dict(self._durable)
        return other

    def make(self, call: Call) -> None:
        """Add a call that succeeded."""
        if not self._is_mine(call):
            return
        if call.name == "open":
            self._open(call)
        elif call.name == "sync":
            self._sync(call.path)
        elif call.name in ("write", "truncate"):
            self._write(call)
        elif call.name not in ("read", "readv"):
            self._rename(call)

    def _is_mine(self, call: Call) -> bool:
        inside = call.path.startswith(self.root + "/") or call.path == self.root
        return inside and not call.path.endswith(" (deleted)")

    def _open(self, call: Call) -> None:
        if call.path not in self.names and call.flags & os.O_CREAT:
            self._name((call.path, next(_FILES)))
        elif call.flags & os.O_TRUNC:
            self.pending.append(Change(self.names[call.path], cut=True))

    def _write(self, call: Call) -> None:
        file = self.names[call.path]
        if call.name == "truncate":
            self.pending.append(Change(file, length=call.offset, cut=True))
            return
        end = call.offset + len(call.data)
        self.pending.append(Change(file, length=end))
        here = call.offset
        while here < end:
            until = min(end, here // SECTOR * SECTOR + SECTOR)
            part = call.data[here - call.offset : until - call.offset]
            self.pending.append(Change(file, offset=here, data=part))
            here = until

    def _rename(self, call: Call) -> None:
        if call.name in ("unlink", "rmdir"):
            self._name((call.path, None))
        elif call.name == "mkdir":
            self._name((call.path, "folder"))
        elif call.name == "rename":
            self._name((call.to, self.names[call.path]), (call.path, None))
        elif call.name == "link":
            self._name((call.to, self.names[call.path]))
        else:
            raise NotImplementedError(f"the model of a disk knows no {call.name}: {call.path}")

    def _name(self, *names: tuple[str, int | str | None]) -> None:
        folder = os.path.dirname(names[0][0])  # noqa: PTH120  thousands of calls
        self.pending.append(Change(folder, names=names))
        _set_names(self.names, names)

    def _sync(self, path: str) -> None:
        place = path if self.names[path] == "folder" else self.names[path]
        kept = [change for change in self.pending if change.place == place]
        self.pending = [change for change in self.pending if change.place != place]
        _apply(kept, self._durable_names, self._durable)

    def now(self) -> Tree:
        """Return what any process sees, and what is left if this one is killed."""
        return self._tree(self.pending)

    def after_power_loss(self, most: int, rng: np.random.Generator) -> Iterator[Tree]:
        """Yield what may be left: every subset of the pending changes, if there are at most ``most``.

        Otherwise ``most`` of these, and always the first: no change, all but one, one alone, every
        first part, and random subsets.
        """
        count = len(self.pending)
        if 2**count <= most:
            keeps = list(itertools.product((False, True), repeat=count))
        else:
            keeps = _some_subsets(count, rng)
            chosen = rng.choice(len(keeps) - 1, min(most, len(keeps)) - 1, replace=False)
            keeps = [keeps[0], *(keeps[i + 1] for i in chosen)]
        for keep in keeps:
            yield self._tree([c for c, kept in zip(self.pending, keep, strict=True) if kept])

    def _tree(self, changes: Sequence[Change]) -> Tree:
        names, contents = dict(self._durable_names), dict(self._durable)
        _apply(changes, names, contents)
        return {
            path: None if file == "folder" else contents.get(file, b"")
            for path, file in names.items()
            if _reachable(path, names, self.root)
        }


def _apply(changes: Sequence[Change], names: dict, contents: dict[int | str, bytes]) -> None:
    open_files: dict[int | str, bytearray] = {}
    for change in changes:
        _set_names(names, change.names)
        if not change.names:
            if change.place not in open_files:
                open_files[change.place] = bytearray(contents.get(change.place, b""))
            _write(open_files[change.place], change)
    contents.update((file, bytes(content)) for file, content in open_files.items())


def _set_names(names: dict, changes: Sequence[tuple[str, int | str | None]]) -> None:
    for name, file in changes:
        if file is None:
            names.pop(name, None)
        else:
            names[name] = file


def _write(content: bytearray, change: Change) -> None:
    end = max(change.length, change.offset + len(change.data))
    if change.cut:
        del content[change.length :]
    content.extend(bytes(max(0, end - len(content))))
    content[change.offset : change.offset + len(change.data)] = change.data


def _reachable(path: str, names: dict, root: str) -> bool:
    while path != root:
        path = os.path.dirname(path)  # noqa: PTH120
        if names.get(path) != "folder":
            return False
    return True


def _some_subsets(count: int, rng: np.random.Generator) -> list[Sequence[bool]]:
    found = [[False] * count]
    for i in range(count):
        found.append([j <= i for j in range(count)])
        found.append([j == i for j in range(count)])
        found.append([j != i for j in range(count)])
        found.append(list(rng.random(count) < 0.5))
    return found


def put(tree: Tree, root: str, folder: Path) -> None:
    """Write the tree under ``folder``, which does not exist, readable by the owner only."""
    for path in sorted(tree):
        here, content = folder / path[len(root) + 1 :], tree[path]
        if content is None:
            here.mkdir(mode=0o700)
        else:
            here.write_bytes(content)
            here.chmod(0o600)


def read(folder: Path, root: str) -> Tree:
    """Return what lies under ``folder`` as a tree."""
    paths = [folder, *folder.rglob("*")]
    return {
        str(Path(root) / path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in paths
    }
