"""Small runs on disk, for the tests of folders, ledgers, reports and verification."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accounting import BinaryTree, ConfigError, Participation
from privpart import PrivacyPlan, RunFolder, Server, ServerOptimizer, fit
from privpart.run.begin import create_run
from privpart.run.ledger import LEDGER, Ledger, Row, SigningKey

DIM = 8
COHORTS = [[0, 1], [2, "ada"], [4, 5], [6, 7]]
FACTS = {"delta": 1e-6, "parameters": [["weight", [2, 3]], ["bias", [2]]], "frozen": {}}
STATE = "state-000002.safetensors"


def plan(rounds=4, **change) -> PrivacyPlan:
    fields = {
        "mechanism": BinaryTree(rounds),
        "participation": Participation(rounds),
        "clip_norm": 0.5,
        "noise_multiplier": 1.0,
        "report_goal": 2,
    }
    return PrivacyPlan(**(fields | change))


PLAN = plan()


class Clients:
    def run(self, task, start):
        for client in task.clients:
            seed = zlib.crc32(repr((task.round, client)).encode())
            generator = torch.Generator().manual_seed(seed)
            yield task.update(client, torch.randn(start.shape, generator=generator))


def server(run: RunFolder, dim: int = DIM, **optimizer) -> Server:
    restored = Server(
        run.plan, torch.zeros(dim), source=run.source(), optimizer=ServerOptimizer(**optimizer)
    )
    run.restore(restored)
    return restored


def train(run: RunFolder, rounds: int, cohorts=COHORTS, **optimizer) -> Server:
    restored = server(run, **optimizer)
    fit(restored, Clients(), cohorts[:rounds], commit=run.commit)
    return restored


def begun(path: Path, rounds: int, **options) -> Path:
    with create_run(path, PLAN, **({"facts": FACTS} | options)) as run:
        train(run, rounds)
    return path


def refusal(folder: Path) -> str:
    """Return why a run is not opened and trained to its end."""
    with pytest.raises(ConfigError) as error, RunFolder.open(folder) as run:
        train(run, 4)
    return str(error.value)


def changed(folder: Path, change: Callable[[list], object]) -> None:
    """Change the entries of a ledger, and neither its chain nor its signatures."""
    lines = (folder / LEDGER).read_text().splitlines()
    parts = [line.split(" ", 2) for line in lines]
    entries = [json.loads(entry) for _, _, entry in parts]
    change(entries)
    text = (
        f"{chain} {signature} {json.dumps(entry)}\n"
        for (chain, signature, _), entry in zip(parts, entries, strict=False)
    )
    (folder / LEDGER).write_text("".join(text))


def add_row(folder: Path, *, clients, **fields) -> Row:
    """Append what somebody's own server would write and sign, whatever the plan says."""
    ledger = Ledger(folder)
    ledger.signer = SigningKey((folder / "signing-key").read_bytes())
    fields = {"state": "0" * 64, "model": "0" * 64, "received": 1, "clip_norm": 0.5} | fields
    clipped_by = {"server": len(clients)} if clients else {}
    ledger.append(Row(**{"clients": tuple(clients), "clipped_by": clipped_by} | fields))
    return ledger.rows()[-1]


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(bytes(data))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}
