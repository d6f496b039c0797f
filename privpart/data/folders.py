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
    folders = [p for p in root.glob("*") if p.is_dir() and not p.name.startswith(".")]
    if not folders:
        raise ConfigError(f"{root}: is not a folder with one folder per client.")
    files: list[Path] = []
    owners: list[str] = []
    for folder in sorted(folders):
        matching = sorted(p for p in folder.glob(pattern) if p.is_file() and p.name[0] != ".")
        if not matching:
            raise ConfigError(
                f"client {folder.name!r}: no file in {folder} fits {pattern!r}; each client must "
                "have one."
            )
        files += matching
        owners += [folder.name] * len(matching)
    return from_dataset(_Files(files, load), user=owners)


class _Files:
    """A dataset of files."""

    def __init__(self, files: list[Path], load: Callable[[Path], Any]) -> None:
        self.files = files
        self.load = load

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> Any:  # noqa: ANN401
        try:
            return self.load(self.files[row])
        except Exception as error:  # the user's code, or a damaged file
            why = " ".join(str(error).split())[:500]
            raise ConfigError(f"{self.files[row]}: {type(error).__name__}: {why}") from error
