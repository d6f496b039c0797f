"""Server round: what one update, its noise, the step and the commit cost, beside the noise alone.

Run: ``python benchmarks/server_round.py``; writes benchmarks/results/server_round.json.
``--largest`` runs a few rounds of 10^8 parameters instead, under a tree over 2,048 rounds. Figures
that a run does not measure stay in the file; each has the load of the machine when it was measured.

A round is ``Server.run_round`` with one well-formed update, and ``RunFolder.commit`` into a
temporary folder. It takes turns with ``NoiseStream.next`` of the same mechanism, on one thread. The
parts of a round are timed inside it; those of a commit (hash, write, flush) are done again alone
with the bytes of the state. Then the noise is drawn ahead, by ``Server.task``, while nothing
happens that stands for the clients' work: what is left of the round is what the clients wait for.

Memory is the peak resident size within a round above that of the process after a round of a tiny
model, and counts the update. Written bytes are those of all write calls of a commit. Both are
stated in vectors of 4 bytes per parameter.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy loads

import torch
from machine import machine
from turns import Seconds, nanoseconds, ratios, seconds

import privpart.server
from accounting import BinaryTree, BufferedToeplitz, Independent, Mechanism, Participation
from privpart import (
    ClientUpdate,
    NoiseStream,
    PrivacyPlan,
    RunFolder,
    SecretSource,
    Server,
    ServerOptimizer,
)

RESULT = Path(__file__).parent / "results" / "server_round.json"
DIMS = (10_000_000, 40_000_000)
MEMORY_DIM, LARGEST_DIM, LARGEST_ROUNDS = 40_000_000, 100_000_000, 2048
ROUNDS = 16
FIRST, COUNTED, AHEAD = 1, 4, 2
"""Rounds before those that count; those; and those whose noise is drawn ahead."""
MOMENTUM = 0.9
STDDEV = 2.0**20
AIMS = {"ratio": 2.0, "memory": 9.0, "written": 3.0}

MECHANISMS: dict[str, Callable[[int], Mechanism]] = {
    "independent": Independent,
    "tree": BinaryTree,
    "BLT, 3 buffers": lambda rounds: BufferedToeplitz(
        rounds, decay=(0.703864, 0.970182, 0.998105), scale=(0.295937, 0.131099, 0.057899)
    ),
}


class Run:
    """A run in a temporary folder, one client per round."""

    def __init__(self, mechanism: Mechanism, dim: int, momentum: float, folder: Path) -> None:
        os.environ["PRIVPART_STATE_DIR"] = str(folder / "guard")
        rounds = mechanism.rounds
        plan = PrivacyPlan(
            mechanism=mechanism,
            participation=Participation(rounds),
            clip_norm=1.0,
            noise_multiplier=1.0,
            report_goal=100,
        )
        self.folder = RunFolder.create(folder / "run", plan)
        optimizer = ServerOptimizer(momentum=momentum)
        source = self.folder.source()
        self.server = Server(plan, torch.zeros(dim), source=source, optimizer=optimizer)
        self.update = torch.randn(dim).mul_(2 * dim**-0.5)  # twice the clip norm

    def step(self) -> None:
        """Run a round and commit it."""
        server = self.server
        answer = ClientUpdate(server.round, self.update, server.round, server.plan_hash)
        counts = server.run_round([answer])
        if counts.counted != 1:
            raise RuntimeError("the update was refused, so nothing was measured")
        self.folder.commit(server, counts)

    def ahead(self, wait: float) -> None:
        """Begin to draw the noise, and wait as long as the clients work."""
        self.server.task([self.server.round])
        time.sleep(wait)

    @property
    def state(self) -> bytes:
        """The state file of the last committed round."""
        return (self.folder.path / f"state-{self.server.round:06d}.safetensors").read_bytes()


@contextmanager
def watched(parts: dict[str, Seconds]) -> Iterator[None]:
    """Add up the seconds of the parts of rounds, by name."""
    places: list[tuple[Any, str, str]] = [
        (privpart.server, "quantise", "clip, round and add"),
        (NoiseStream, "next", "noise"),
        (privpart.server, "_quotient", "add noise, divide"),
        (torch.optim.SGD, "step", "optimiser"),
    ]
    before = [getattr(owner, name) for owner, name, _ in places]

    def timed(work: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:  # noqa: ANN401 (whatever the work takes)
            wall, cpu = time.perf_counter(), time.process_time()
            result = work(*args, **options)
            old = parts.get(part, Seconds(0.0, 0.0))
            parts[part] = Seconds(
                old.wall + time.perf_counter() - wall, old.cpu + time.process_time() - cpu
            )
            return result

        return call

    try:
        for (owner, name, part), work in zip(places, before, strict=True):
            setattr(owner, name, timed(work, part))
        yield
    finally:
        for (owner, name, _), work in zip(places, before, strict=True):
            setattr(owner, name, work)


def saving(state: bytes, folder: Path) -> dict[str, Seconds]:
    """Return the seconds of hashing, writing and flushing a state, each alone."""
    with (folder / "again").open("wb") as file:
        return {
            "hash": seconds(lambda: hashlib.sha256(state).digest()),
            "write": seconds(lambda: (file.write(state), file.flush())),
            "flush to the disk": seconds(lambda: os.fsync(file.fileno())),
        }


def case(name: str, dim: int, momentum: float, folder: Path) -> dict[str, Any]:
    """Measure the rounds of one mechanism beside its noise alone."""
    mechanism = MECHANISMS[name](ROUNDS)
    run = Run(mechanism, dim, momentum, folder)
    alone = NoiseStream(mechanism, dim=dim, stddev=STDDEV, source=SecretSource())
    out = torch.empty(dim, dtype=alone.dtype)
    times: dict[str, list[Seconds]] = {"round and commit": [], "noise alone": []}
    parts: dict[str, Seconds] = {}
    written = 0
    for t in range(FIRST + COUNTED):
        noise = seconds(lambda: alone.next(out=out))
        before = written_bytes()
        with watched(parts if t >= FIRST else {}):
            whole = seconds(run.step)
        written = written_bytes() - before
        if t >= FIRST:
            times["round and commit"].append(whole)
            times["noise alone"].append(noise)
    state = run.state
    again = [saving(state, folder) for _ in range(3)]
    del state
    means = {part: Seconds(s.wall / COUNTED, s.cpu / COUNTED) for part, s in parts.items()}
    for part in again[0]:
        means[part] = min((turn[part] for turn in again), key=lambda s: s.cpu)
    left = []
    for _ in range(AHEAD):
        run.ahead(3 * noise.wall)
        left.append(seconds(run.step))
    run.folder.close()
    return {
        "nanoseconds": {part: nanoseconds(spent, dim) for part, spent in times.items()},
        "ratio": ratios(times["round and commit"], times["noise alone"]),
        "parts_mean": {
            part: {"cpu": 1e9 * s.cpu / dim, "wall": 1e9 * s.wall / dim}
            for part, s in means.items()
        },
        "left_when_drawn_ahead": nanoseconds(left, dim),
        "written_vectors": written / (4 * dim),
    }


def memory(name: str, dim: int, folder: Path) -> dict[str, Any]:
    """Return the peak of each round, in vectors."""
    tiny = Run(MECHANISMS[name](2), 1000, MOMENTUM, folder / "tiny")
    tiny.step()
    tiny.folder.close()
    base = _status("VmRSS")
    run = Run(MECHANISMS[name](ROUNDS), dim, MOMENTUM, folder)
    peaks = []
    for _ in range(ROUNDS - 1 if name == "tree" else 3):  # a tree's stack grows
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        run.step()
        peaks.append((_status("VmHWM") - base) / (4 * dim))
    run.folder.close()
    return {"peak_vectors": max(peaks), "by_round": peaks}


def largest(dim: int, folder: Path) -> dict[str, Any]:
    """Run and commit a few rounds of a large model."""
    start = time.perf_counter()
    run = Run(BinaryTree(LARGEST_ROUNDS), dim, MOMENTUM, folder)
    before = time.perf_counter()
    spent = [seconds(run.step) for _ in range(3)]
    run.ahead(1.2 * spent[-1].wall)
    left = seconds(run.step)
    run.folder.close()
    return {
        "dim": dim,
        "rounds_planned": LARGEST_ROUNDS,
        "seconds_to_begin": before - start,
        "round_seconds": [spent_._asdict() for spent_ in spent],
        "left_when_drawn_ahead": left._asdict(),
        "peak_gib": _status("VmHWM") / 2**30,
    }


def written_bytes() -> int:
    """Return the bytes of all write calls of this process so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["wchar"])


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def in_a_process(*arguments: str) -> dict[str, Any]:
    """Run this script for one case in a fresh interpreter; return its figures."""
    command = [sys.executable, __file__, "--case", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def one_case(arguments: list[str]) -> dict[str, Any]:
    """Measure the case that ``in_a_process`` asked for."""
    torch.set_num_threads(1)
    what, name, dim, momentum = arguments
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tiny").mkdir()
        if what == "largest":
            return largest(int(dim), Path(folder))
        if what == "memory":
            return memory(name, int(dim), Path(folder))
        return case(name, int(dim), float(momentum), Path(folder))


def told(name: str, found: dict[str, Any]) -> str:
    """Return the figures of one case in words."""
    ratio, left = found["ratio"], found["left_when_drawn_ahead"]
    own, noise = (
        found["nanoseconds"][part]["cpu_median"] for part in ("round and commit", "noise alone")
    )
    parts = ", ".join(f"{part} {s['cpu']:.1f}" for part, s in found["parts_mean"].items())
    return (
        f"{name}: {own:.1f} ns of processor time per parameter, noise alone {noise:.1f}; ratio "
        f"{ratio['cpu_least']:.2f} and {ratio['cpu_median']:.2f} (wall {ratio['wall_least']:.2f} "
        f"and {ratio['wall_median']:.2f}; aim: {AIMS['ratio']:g})\n    {parts}; left when drawn "
        f"ahead: wall {left['wall_median']:.1f}; written {found['written_vectors']:.2f} vectors"
    )


def rounds_of(dims: Iterable[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure and print the rounds of every case; yield them by title."""
    for dim in dims:
        for name in MECHANISMS:
            for momentum in (0.0, MOMENTUM):
                title = f"{name}, {dim:.0e} parameters, momentum {momentum:g}"
                found = in_a_process("round", name, str(dim), str(momentum))
                print(told(title, found), flush=True)
                yield title, found


def peaks() -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure and print the memory of every mechanism; yield it by name."""
    for name in MECHANISMS:
        found = in_a_process("memory", name, str(MEMORY_DIM), str(MOMENTUM))
        by_round = ", ".join(f"{peak:.2f}" for peak in found["by_round"])
        print(f"{name}: peak vectors by round {by_round}; aim: {AIMS['memory']:g}", flush=True)
        yield name, found


def measured(options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield what was asked for: its part of the file, its name there, and its figures."""
    if options.largest:
        figures = in_a_process("largest", "tree", str(LARGEST_DIM), str(MOMENTUM))
        print(json.dumps(figures, indent=2))
        yield "largest", "tree", figures
        return
    if options.only != "memory":
        for title, figures in rounds_of(options.dims):
            yield "cases", title, figures
    if options.only != "rounds":
        for name, figures in peaks():
            yield "memory", name, figures


def main() -> None:
    """Measure, print and write each figure as it comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--only", choices=("rounds", "memory"))
    parser.add_argument("--dims", type=int, nargs="+", default=DIMS)
    parser.add_argument("--print-only", action="store_true", help="write no file")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(one_case(options.case)))
        return
    about = machine("cryptography", "numpy", "torch") | {"aims": AIMS}
    for part, name, figures in measured(options):
        found: dict[str, Any] = {"machine": about, "cases": {}, "memory": {}, "largest": {}}
        if RESULT.exists():
            found |= json.loads(RESULT.read_text()) | {"machine": about}
        found[part][name] = figures | {"load_average": os.getloadavg()[0]}
        if not options.print_only:
            RESULT.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
