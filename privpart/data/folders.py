"""Folders: clients whose examples are files, one folder per client."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accounting.checks import ConfigError
from privpart.data.batches import Batch, stack
from privpart.data.clients import IndexedClients
from privpart.data.index import ClientIds, Index


def from_folders(
    path: str | Path, *, load: Callable[[Path], Any], pattern: str = "*"
) -> IndexedClients:
    """Return a client for each folder in ``path``; its id is the folder's name.

    A client's files are read when it takes part. Names that begin with a dot are left out.

    Args:
        path: a folder of folders.
        load: reads a file and returns one example: a nest of tensors, arrays and numbers, of equal
            shapes for all files of a client.
        pattern: which files of a client's folder are examples, such as ``"*.png"``.

    Raises:
        ConfigError: no such folder, a client without a file, or as for ``IndexedClients``.
    """
    root = Path(path)
    if not root.is_dir():
        raise ConfigError(f"{root}: is not a folder; must be a folder with one folder per client.")
    folders = [p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")]
    if not folders:
        raise ConfigError(f"{root}: has no folder; must have one per client.")
    ids, _ = ClientIds.of(sorted(folders), str(root))
    counts = [len(_files(root / str(name), pattern)) for name in ids]
    for name, count in zip(ids, counts, strict=True):
        if not count:
            raise ConfigError(
                f"client {name!r}: no file in {root / str(name)} fits {pattern!r}; each client "
                "must have one."
            )
    index = Index(ids, torch.from_numpy(np.cumsum(counts)), None)
    return IndexedClients(index, _Files(root, pattern, load, index))


class _Files:
    """Reads the files of one client; a row is a file, counted through all folders."""

    def __init__(self, root: Path, pattern: str, load: Callable[[Path], Any], index: Index) -> None:
        self.root = root
        self.pattern = pattern
        self.load = load
        self.index = index

    def __call__(self, rows: Tensor) -> Batch:
        client = self.index.owner(int(rows[0]))
        folder = self.root / str(client)
        files = _files(folder, self.pattern)
        # a row is a number of a file, so a new file would move all later ones
        if len(files) != len(rows):
            raise ConfigError(
                f"{folder} has {len(files)} files that fit {self.pattern!r}, and had {len(rows)} "
                "at first: files must stay while they are in use."
            )
        return stack([self._loaded(file) for file in files])

    def _loaded(self, file: Path) -> Any:  # noqa: ANN401
        try:
            return self.load(file)
        except Exception as error:
            # the user's code, or a damaged file
            why = " ".join(str(error).split())[:500]
            raise ConfigError(
                f"load({str(file)!r}) raised {type(error).__name__}: {why}"
            ) from error


def _files(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(
            file for file in folder.glob(pattern) if file.is_file() and file.name[0] != "."
        )
    except (OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"{folder}, pattern={pattern!r}: {error}.") from None
