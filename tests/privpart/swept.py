"""A sweep in a process of its own that says when a cell is kept, in a module that it can import."""

from multiprocessing.connection import Connection
from pathlib import Path

import torch
from typer.testing import CliRunner

from privpart.cli.main import app
from privpart.experiment.sweep_store import SweepStore


def sweep_and_tell(folder: Path, told: Connection) -> None:
    torch.set_num_threads(1)
    keep = SweepStore.add

    def add(self: SweepStore, *row: object) -> None:
        keep(self, *row)
        told.send_bytes(b".")

    SweepStore.add = add
    CliRunner().invoke(
        app, ["sweep", str(folder / "sweep.toml"), "--out", str(folder / "out"), "-j", "1"]
    )
