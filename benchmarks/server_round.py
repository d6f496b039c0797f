"""Server round: what one update, its noise, the step and the commit cost, beside the noise alone.

Run: ``python benchmarks/server_round.py``; writes benchmarks/results/server_round.json.
``--largest`` runs a few rounds of 10^8 parameters instead, under a tree over 2,048 rounds, and
measures the memory of a late one. Figures that a run does not measure stay in the file; each has
the commit, and the load of the machine, when it was measured.

A round is ``Server.run_round`` with one well-formed update, and ``RunFolder.commit`` into a
temporary folder. It takes turns with ``NoiseStream.next`` of the same mechanism, on one thread. The
parts of a round are timed inside it; those of a commit (hash, write, flush) are done again alone
with the bytes of the state. Then the noise is drawn ahead, by ``Server.task``, while nothing
happens that stands for the clients' work: what is left of the round is what the clients wait for.

Memory is the peak resident size within a round above that of the process after a round of a tiny
model, and counts the update. Noise needs most memory late, so the round is the last but one of
2,048, of a server that is restored there: the peaks are of restoring, of the round, and of writing
its state. Written bytes are those of all write calls of a commit. Both are
stated in vectors of 4 bytes per parameter.
"""

import frame

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import privpart.server
from accounting import BinaryTree, BufferedToeplitz, Independent, Mechanism, Participation
from privpart import (
    ClientUpdate,
    NoiseStream,
    PrivacyPlan,
    SecretSource,
    SeededSource,
    Server,
    ServerOptimizer,
)
from privpart.run.begin import create_run
from privpart.run.store import decode_state, write_state

LARGEST, LARGEST_ROUNDS = 100_000_000, 2048
ROUNDS, COUNTED, AHEAD = 16, 4, 2
"""Rounds that are planned; those that count, after one; and those whose noise is drawn ahead."""
MOMENTUM = 0.9
AIMS = {"ratio": 2.0, "memory": 9.0, "written": 3.0}
MECHANISMS: dict[str, Callable[[int], Mechanism]] = {
    "independent": Independent,
    "tree": BinaryTree,
    "BLT, 3 buffers": lambda rounds: BufferedToeplitz(
        rounds, decay=(0.703864, 0.970182, 0.998105), scale=(0.295937, 0.131099, 0.057899)
    ),
}


def plan_of(mechanism: Mechanism) -> PrivacyPlan:
    return PrivacyPlan(
        mechanism=mechanism,
        participation=Participation(mechanism.rounds),
        clip_norm=1.0,
        noise_multiplier=1.0,
        report_goal=100,
    )


class Run:
    """A run in a temporary folder, one client per round."""

    def __init__(self, mechanism: Mechanism, dim: int, momentum: float) -> None:
        self.scratch = tempfile.TemporaryDirectory()
        os.environ["PRIVPART_STATE_DIR"] = f"{self.scratch.name}/guard"
        torch.set_num_threads(1)
        plan = plan_of(mechanism)
        self.folder = create_run(Path(self.scratch.name) / "run", plan)
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

    def left(self, wait: float) -> frame.Seconds:
        """Draw the noise while the clients work; return the seconds of the rest of the round."""
        self.server.task([self.server.round])
        time.sleep(wait)
        return frame.seconds(self.step)

    def close(self) -> None:
        self.folder.close()
        self.scratch.cleanup()


def watched(step: frame.Job, parts: dict[str, list[frame.Seconds]]) -> frame.Job:
    """Let a round note the seconds of its parts, by name."""
    places: list[tuple[Any, str, str]] = [
        (privpart.server, "quantise", "clip, round and add"),
        (NoiseStream, "next", "noise"),
        (privpart.server.Server, "_step", "add noise, divide, move"),
    ]

    def timed(work: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            result: list[Any] = []
            spent = frame.seconds(lambda: result.append(work(*args, **keywords)))
            parts.setdefault(part, []).append(spent)
            return result[0]

        return call

    def run() -> None:
        with ExitStack() as stack:
            for owner, name, part in places:
                stack.enter_context(patch.object(owner, name, timed(getattr(owner, name), part)))
            step()

    return run


def saving(run: Run) -> dict[str, frame.Seconds]:
    """Return the least seconds of hashing, writing and flushing the last state, each alone."""
    state = (run.folder.path / f"state-{run.server.round:06d}.safetensors").read_bytes()
    with Path(run.scratch.name, "again").open("wb") as file:
        jobs = {
            "hash": lambda: hashlib.sha256(state).digest(),
            "write": lambda: (file.seek(0), file.write(state), file.flush()),
            "flush to the disk": lambda: os.fsync(file.fileno()),
        }
        times = frame.in_turns(jobs, 3, warm=False)
    return {name: min(own, key=lambda s: s.cpu) for name, own in times.items()}


def case(name: str, dim: int, momentum: float) -> dict[str, Any]:
    """Measure the rounds of one mechanism beside its noise alone."""
    mechanism = MECHANISMS[name](ROUNDS)
    run = Run(mechanism, dim, momentum)
    alone = NoiseStream(mechanism, dim=dim, stddev=2.0**20, source=SecretSource())
    out = torch.empty(dim, dtype=alone.dtype)
    jobs = {"noise alone": lambda: alone.next(out=out), "round and commit": run.step}
    frame.in_turns(jobs, 1, warm=False)
    parts: dict[str, list[frame.Seconds]] = {}
    before = written_bytes()
    jobs["round and commit"] = watched(run.step, parts)
    times = frame.in_turns(jobs, COUNTED, warm=False)
    written = (written_bytes() - before) / COUNTED
    sums = {part: [sum(clock) for clock in zip(*own, strict=True)] for part, own in parts.items()}
    means = {part: frame.Seconds(*(s / COUNTED for s in own)) for part, own in sums.items()}
    means |= saving(run)
    left = [run.left(3 * times["noise alone"][-1].wall) for _ in range(AHEAD)]
    run.close()
    scale = 1e9 / dim
    return {
        "nanoseconds": {
            part: frame.spreads(own, scale) for part, own in sorted(times.items())[::-1]
        },
        "ratio": frame.ratios(times["round and commit"], times["noise alone"]),
        "parts_mean": {
            part: {"cpu": scale * s.cpu, "wall": scale * s.wall} for part, s in means.items()
        },
        "left_when_drawn_ahead": frame.spreads(left, scale),
        "written_vectors": written / (4 * dim),
    }


def memory(name: str, dim: int) -> dict[str, Any]:
    """Return the peaks of a late round, in vectors."""
    tiny = Run(MECHANISMS[name](2), 1000, MOMENTUM)
    tiny.step()
    tiny.close()
    base, peaks = frame.resident(), {}
    mechanism, late = MECHANISMS[name](LARGEST_ROUNDS), LARGEST_ROUNDS - 2
    plan, optimizer = plan_of(mechanism), ServerOptimizer(momentum=MOMENTUM)

    def peak(part: str, work: Callable[[], object]) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        work()
        peaks[part] = (frame.resident("VmHWM") - base) / (4 * dim)

    with tempfile.TemporaryDirectory() as scratch:
        state, registers = Path(scratch) / "state", Path(scratch) / "registers"
        first = Server(plan, torch.zeros(dim), source=SeededSource(0), optimizer=optimizer)
        values = first.state_dict()[1]
        del first
        values |= {"round": late, "noise": values["noise"] | {"round": late}}
        tensors = {"parameters": torch.zeros(dim), "optimizer.0.momentum_buffer": torch.zeros(dim)}
        write_state(state, tensors, values)
        tensors = {}
        if isinstance(mechanism, BufferedToeplitz):
            tensors["noise.state"] = torch.zeros(mechanism.buffers, dim, dtype=torch.float64)
        write_state(registers, tensors, {})
        del tensors
        server = Server(plan, torch.zeros(dim), source=SeededSource(0), optimizer=optimizer)

        def restore() -> None:
            tensors, values = decode_state(state)
            tensors |= decode_state(registers)[0]
            server.load_state_dict(tensors, values, {})

        peak("restored", restore)
        update = torch.full((dim,), 2 * dim**-0.5)
        peak("round", lambda: server.run_round([server.task([]).update(0, update)]))
        if server.round != late + 1:
            raise RuntimeError("the update was refused, so nothing was measured")
        tensors, values = server.state_dict()
        tensors = {key: tensors[key] for key in tensors.keys() - set(server.registers)}
        peak("written", lambda: write_state(state, tensors, values))
    vectors = max(peaks.values())
    return {"peak_vectors": vectors, "peak_gib": vectors * 4 * dim / 2**30, "by_part": peaks}


def largest(dim: int) -> dict[str, Any]:
    """Run and commit a few rounds of a large model."""
    made: list[Run] = []
    begin = frame.seconds(lambda: made.append(Run(BinaryTree(LARGEST_ROUNDS), dim, MOMENTUM)))
    (run,) = made
    spent = [frame.seconds(run.step) for _ in range(3)]
    left = run.left(1.2 * spent[-1].wall)
    run.close()
    return {
        "dim": dim,
        "rounds_planned": LARGEST_ROUNDS,
        "seconds_to_begin": begin.wall,
        "round_seconds": [one._asdict() for one in spent],
        "left_when_drawn_ahead": left._asdict(),
        "peak_gib": frame.resident("VmHWM") / 2**30,
    }


def written_bytes() -> int:
    """Return the bytes of all write calls of this process so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["wchar"])


def measured(dims: list[int], only: str | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each figure's part of the file, its name there, and the figure."""
    if only != "memory":
        for dim in dims:
            for name in MECHANISMS:
                for momentum in (0.0, MOMENTUM):
                    title = f"{name}, {dim:.0e} parameters, momentum {momentum:g}"
                    yield "cases", title, frame.apart(case, name, dim, momentum)
    if only != "rounds":
        yield from memories(max(dims))


def memories(dim: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the memory of a late round of each mechanism, as ``measured`` does."""
    for name in MECHANISMS:
        yield "memory", f"{name}, {dim:.0e} parameters", frame.apart(memory, name, dim)


def main() -> None:
    given = frame.options(
        __doc__,
        "server_round.json",
        quick={"dims": [100_000]},
        dims=[10_000_000],
        only={"choices": ("rounds", "memory")},
        largest=False,
    )
    result = frame.Result(given.result, "cryptography", "numpy", "torch", aims=AIMS)
    parts = {part: result.old.get(part, {}) for part in ("cases", "memory", "largest")}
    if given.largest:
        dim = given.dims[0] if given.quick else LARGEST
        first = "largest", "tree", frame.apart(largest, dim)
        figures = chain([first], memories(dim))
    else:
        figures = measured(given.dims, given.only)
    for part, name, figure in figures:
        when = {"load_average": os.getloadavg()[0], "commit": result.machine["commit"]}
        parts[part][name] = figure | when
        frame.show(
            name, figure, "ratio", "parts_mean", "written_vectors", "by_part", "round_seconds"
        )
        result.write(**parts)


if __name__ == "__main__":
    main()
