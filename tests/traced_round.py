"""Traced round: which files one round of training runs through, from the task to the release.

    python tests/traced_round.py

A reader who follows a round has to open these files. The round is an ordinary one: a plan with a
tree, a secret noise key, a run folder on disk, clients computed in this process. What is imported
or put together before the round does not count; only functions that run during it do.
"""
# ruff: noqa: T201

import sys
import tempfile
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import accounting
from accounting import BinaryTree, Participation
from privpart import (
    EmbeddedEngine,
    LocalTraining,
    PartialModel,
    PrivacyPlan,
    RunFolder,
    Server,
    Users,
    fit,
)

ROOT = Path(accounting.__file__).parent.parent
PACKAGES = tuple(str(ROOT / name) + "/" for name in ("accounting", "privpart", "attacks"))


def traced_files() -> dict[str, int]:
    """Return the files of one round, by path from the repository's root, with their lines."""
    with tempfile.TemporaryDirectory() as folder:
        seen: set[str] = set()

        def note(frame: FrameType, event: str, _argument: object) -> None:
            name = frame.f_code.co_filename
            if event == "call" and name.startswith(PACKAGES):
                seen.add(name)

        _train_one_round(Path(folder) / "run", note)
    counted = {name: len(Path(name).read_text().splitlines()) for name in sorted(seen)}
    return {str(Path(name).relative_to(ROOT)): lines for name, lines in counted.items()}


def _train_one_round(folder: Path, note: object) -> None:
    users = Users(
        torch.linspace(0, 1, 96).view(12, 8),
        torch.arange(12) % 3,
        [torch.arange(3 * k, 3 * k + 3) for k in range(4)],
    )
    model = PartialModel(
        lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)), train=["2.*"], seed=1
    )
    plan = PrivacyPlan(
        mechanism=BinaryTree(2),
        participation=Participation(2, 2),
        clip_norm=1.0,
        noise_multiplier=1.0,
        report_goal=4,
    )
    engine = EmbeddedEngine(
        model, users, local=LocalTraining(learning_rate=0.1), data_seed=0, batching="loop"
    )
    cohorts = [[0, 1, 2, 3], [0, 1, 2, 3]]
    with RunFolder.create(folder, plan) as run:
        server = Server(plan, model.flat, source=run.source())

        def trace_the_second_round(record: object) -> None:
            sys.setprofile(note)  # type: ignore[arg-type]

        fit(server, engine, cohorts, commit=run.commit, callbacks=[trace_the_second_round])
        sys.setprofile(None)


def main() -> None:
    """Print the files, and how many lines they have together."""
    files = traced_files()
    for name, lines in files.items():
        print(f"{lines:5}  {name}")
    print(f"{sum(files.values()):5}  lines in {len(files)} files")


if __name__ == "__main__":
    main()
