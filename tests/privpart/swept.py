"""A sweep in a process of its own that says when a cell is kept, in a module that it can import."""

from multiprocessing.connection import Connection
from pathlib import Path

import torch
from typer.testing import CliRunner

from privpart.cli.main import app
from privpart.study.store import Store


def sweep_and_tell(folder: Path, told: Connection) -> None:
    torch.set_num_threads(1)
    keep = Store.add

    def add(self: Store, *row: object) -> None:
        keep(self, *row)
        told.send_bytes(b".")

    Store.add = add
    CliRunner().invoke(
        app, ["sweep", str(folder / "sweep.toml"), "--out", str(folder / "out"), "-j", "1"]
    )
