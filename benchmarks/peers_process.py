"""Peer process: rounds on demand in another environment, and their processor seconds.

A line "go" requests a round; the peer prints "@done" when it is ready and after every round.
"""

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

TIMEOUT = 300.0
_TICKS = os.sysconf("SC_CLK_TCK")


class _Stat(NamedTuple):
    """Parent, processor seconds and start time of a process."""

    parent: int
    cpu: float
    born: int


class DiedError(Exception):
    """The peer ended, hung, or did other work; the message is the end of its output."""


class Peer:
    """A peer's script; it starts immediately, and ``round`` waits until it is ready."""

    def __init__(
        self, command: list[str], case: Path, folder: Path, *more: str, threads: int
    ) -> None:
        folder.mkdir()
        self.sum, self.log = folder / "sum.npz", folder / "log"
        quiet = {
            "OMP_NUM_THREADS": str(threads),
            "FLWR_HOME": str(folder),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        dropped = ("PYTHONPATH", "RAY_ADDRESS")
        inherited = {k: v for k, v in os.environ.items() if k not in dropped}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, str(case), str(self.sum), *more],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,
                env=inherited | quiet,
            )
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
        if not hasattr(self, "total"):
            with np.load(self.sum, allow_pickle=False) as file:
                parts = [torch.from_numpy(file[name]).flatten() for name in file.files]
            self.total = torch.cat(parts)
        return self.total

    def cpu(self) -> float:
        """Return the processor seconds so far of the process and all its descendants."""
        return sum(_stat(pid).cpu for pid in _family(self.process.pid))

    def close(self) -> None:
        """End the process and all its descendants."""
        born = {pid: _stat(pid).born for pid in _family(self.process.pid)}
        self._say("stop")
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            born |= {pid: _stat(pid).born for pid in _family(self.process.pid)}
        for pid, when in born.items():
            if when == _stat(pid).born:  # otherwise the id belongs to another program
                _kill(pid)
        self.process.wait()

    def _say(self, word: str) -> None:
        try:
            print(word, file=self.process.stdin, flush=True)
        except (BrokenPipeError, ValueError) as error:
            if word != "stop":
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
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _family(pid: int) -> list[int]:
    """Return the process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children.setdefault(_stat(int(entry.name)).parent, []).append(int(entry.name))
    found = [pid]
    for member in found:
        found.extend(children.get(member, ()))
    return found


def _stat(pid: int) -> _Stat:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return _Stat(-1, 0.0, -1)
    return _Stat(int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[19]))
