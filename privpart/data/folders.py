"""Folders: clients whose examples are files, one folder per client."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accounting.checks import ConfigError
from privpart.data.clients import IndexedClients
from privpart.data.datasets import from_dataset


def from_folders(
    path: str | Path, *, load: Callable[[Path], Any], pattern: str = "*"
) -> IndexedClients:
    """Return a client for each folder in ``path``; its id is the folder's name.

    The files are listed now, and those of a client are read when it takes part. Names that begin
    with a dot are left out.

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
    folders = [p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")]
    if not folders:
        raise ConfigError(f"{root}: has no folder; must have one per client.")
    files: list[str] = []
    owners: list[str] = []
    for folder in sorted(folders):
        names = _files(folder, pattern)
        if not names:
            raise ConfigError(
                f"client {folder.name!r}: no file in {folder} fits {pattern!r}; each client must "
                "have one."
            )
        files += names
        owners += [folder.name] * len(names)
    return from_dataset(_Files(files, load), user=owners)


class _Files:
    """A dataset of files."""

    def __init__(self, files: list[str], load: Callable[[Path], Any]) -> None:
        self.files = files
        self.load = load

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> Any:  # noqa: ANN401
        try:
            return self.load(Path(self.files[row]))
        except Exception as error:  # the user's code, or a damaged file
            why = " ".join(str(error).split())[:500]
            kind = type(error).__name__
            raise ConfigError(f"load({self.files[row]!r}) raised {kind}: {why}") from error


def _files(folder: Path, pattern: str) -> list[str]:
    try:
        return sorted(
            str(file) for file in folder.glob(pattern) if file.is_file() and file.name[0] != "."
        )
    except (OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"{folder}, pattern={pattern!r}: {error}.") from None
