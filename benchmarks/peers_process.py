"""Peer process: rounds on demand in another environment, and their processor seconds.

A line "go" requests a round; the peer prints "@done" when it is ready and after every round.
"""

import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TIMEOUT = 300.0
_TICKS = os.sysconf("SC_CLK_TCK")
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class DiedError(Exception):
    """The peer ended, hung, or did other work; the message is the end of its output."""


class Peer:
    """A peer's script; it starts immediately, and ``round`` waits until it is ready."""

    def __init__(
        self, command: list[str], case: Path, folder: Path, *more: str, threads: int
    ) -> None:
        folder.mkdir()
        self.sum, self.log = folder / "sum.npz", folder / "log"
        inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RAY_ADDRESS")}
        own = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, str(case), str(self.sum), *more],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,
                env=inherited | QUIET | own | {"FLWR_HOME": str(folder)},
            )
        self.total: Tensor | None = None
        self.ready = False

    def round(self) -> Tensor:
        """Run a round; return the sum of the clipped updates of the first one.

        Raises:
            DiedError: the peer does not answer.
        """
        if not self.ready:
            self._wait()
            self.ready = True
        self._say("go")
        self._wait()
        if self.total is None:
            with np.load(self.sum, allow_pickle=False) as file:
                parts = [torch.from_numpy(file[name]).flatten() for name in file.files]
            self.total = torch.cat(parts)
        return self.total

    def cpu(self) -> float:
        """Return the processor seconds so far of the process and all its descendants."""
        return sum(_stat(pid)[1] for pid in _family(self.process.pid))

    def close(self) -> None:
        """End the process and all its descendants."""
        born = _family(self.process.pid)
        with suppress(DiedError):
            self._say("stop")
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        for pid, when in (born | _family(self.process.pid)).items():
            if when == _stat(pid)[2]:  # otherwise the id belongs to another program
                _kill(pid)
        self.process.wait()

    def _say(self, word: str) -> None:
        try:
            print(word, file=self.process.stdin, flush=True)
        except (BrokenPipeError, ValueError) as error:
            raise DiedError(self._last()) from error

    def _wait(self) -> None:
        timer = threading.Timer(TIMEOUT, lambda: [_kill(p) for p in _family(self.process.pid)])
        timer.start()
        try:
            for line in self.process.stdout or ():
                if line.strip() == "@done":
                    return
        finally:
            timer.cancel()
        raise DiedError(self._last())

    def _last(self) -> str:
        return " / ".join(self.log.read_text().strip().splitlines()[-5:])


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _family(pid: int) -> dict[int, int]:
    """Map the process and all its descendants to their start times."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children.setdefault(_stat(int(entry.name))[0], []).append(int(entry.name))
    members = [pid]
    for member in members:
        members.extend(children.get(member, ()))
    return {member: _stat(member)[2] for member in members}


def _stat(pid: int) -> tuple[int, float, int]:
    """Return parent, processor seconds and start time of a process; -1, 0, -1 if it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return -1, 0.0, -1
    return int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[19])
