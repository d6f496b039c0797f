"""Run by test_fault_sweep.py: a fault at every system call of a run on disk, then the run resumed.

    kill    before every call: the disk as it stands there, every byte written so far
    power   before every call: what a disk may keep when the power fails there (see ``disk``)
    errors  every call refused or cut short by the kernel, in a process of its own

One traced run gives every kill and every power failure: its calls build the model of a disk, which
is compared with the real folder at each call. After each fault the run is opened, resumed to its
end and compared with an undisturbed one. Prints one JSON object with what was counted.
"""

import errno
import gc
import hashlib
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from disk import Disk, Tree, put, read
from syscalls import Call, Kill, Refuse, Shorten, traced

from accounting import BinaryTree, Grouped, Participation
from accounting.checks import ConfigError
from accounting.metrics import Metrics
from privpart import PrivacyPlan, RunFolder, Server, ServerOptimizer, fit
from privpart.noise import stream
from privpart.noise.metrics import MetricsRelease
from privpart.noise.source import NoiseSource
from privpart.run.begin import create_run
from privpart.run.folder import holds_a_run
from privpart.run.log import VARIABLE
from privpart.run.report import run_report
from privpart.run.store import StorageError, decode_state
from privpart.training.verify import check_run

ROUNDS, DIM = 3, 8
PLAN = PrivacyPlan(
    mechanism=BinaryTree(ROUNDS, estimator="online"),
    participation=Participation(ROUNDS, 2, 2),
    clip_norm=4.0,
    noise_multiplier=1.0,
    report_goal=2,
)
SIZES = (5, 3)
GROUPED = Grouped([(0, 1), (0,), (1,)], [BinaryTree(2, estimator="online")] * 2, SIZES)
COHORTS = [[0, 1], [2, 3], [0, 1]]
METRICS = Metrics(names=("a", "b"), users=2, rounds=(0, 2), noise_multiplier=2.0)
EVALUATE = (8, 9)
CHANGES = ("open", "write", "truncate", "sync", "rename", "unlink", "link", "mkdir", "rmdir")
ROOT = "/disk"
MOST_SAID = 20
_RANDOM = re.compile("[0-9a-f]{32}")
Event = dict[str, Any]
Say = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run to disturb.

    Attributes:
        seed: of the noise; None is a secret key, whose clients answer differently at each attempt.
        groups: whether two groups of parameters take turns.
        closed_after: rounds after which the run is ended early; None runs all.
        released_first: the defect that clients are sent a model before it is committed.
        one_salt: the defect that every attempt of a round draws the same noise.
        unsynced: the defect that our own files and folders are not synced.
        metrics: whether noised metrics are released after the first and the last round.
    """

    seed: int | None = None
    groups: bool = False
    closed_after: int | None = None
    released_first: bool = False
    one_salt: bool = False
    unsynced: bool = False
    metrics: bool = False

    @property
    def plan(self) -> PrivacyPlan:
        if self.metrics:
            return replace(PLAN, metrics=METRICS)
        return replace(PLAN, mechanism=GROUPED) if self.groups else PLAN


SCENARIOS = {
    "seeded": Scenario(seed=7),
    "seeded groups": Scenario(seed=7, groups=True),
    "secret": Scenario(),
    "closed": Scenario(closed_after=1),
    "released first": Scenario(released_first=True),
    "one salt": Scenario(one_salt=True),
    "unsynced": Scenario(seed=7, unsynced=True),
    "metrics": Scenario(metrics=True),
    "seeded metrics": Scenario(seed=7, metrics=True),
    "metrics of one salt": Scenario(metrics=True, one_salt=True),
}


class Clients:
    """Send updates, and say what each round's clients are sent, which is when it is released."""

    def __init__(self, scenario: Scenario, say: Say) -> None:
        self.scenario, self.say = scenario, say
        self.sum = torch.zeros(DIM)

    def run(self, task, start):
        self.say("sent", round=task.round, model=start.tolist())
        self.sum = torch.zeros(DIM)
        parts = [] if task.active is None else task.active
        chosen = torch.cat([torch.tensor([not parts or g in parts] * SIZES[g]) for g in (0, 1)])
        for client in task.clients:
            seed = 10 * task.round + client
            if self.scenario.seed is None:
                seed = int.from_bytes(os.getrandom(7), "big")
            # far from each other, so that no two sums are equal, and shorter than the clip norm
            update = torch.randn(DIM, generator=torch.Generator().manual_seed(seed)) / 4
            self.sum += torch.where(chosen, update, 0)
            yield task.update(client, update[chosen])


class EnoughError(Exception):
    """All rounds that were asked for are committed."""


def train(
    base: Path, scenario: Scenario, say: Say, *, rounds: int = ROUNDS, again: bool = False
) -> None:
    """Begin or resume the run under ``base`` and run so many of its rounds, saying each step.

    To end a run early counts as one more round. ``again`` commits a second time, in the same
    process, what could not be saved at first.
    """
    os.environ[VARIABLE] = str(base / "disk" / "state")
    run = begun(base / "disk" / "run", scenario, say)
    if run is None:
        return
    with run:
        if not rounds:
            return
        first = run.rounds
        last = min(first + rounds, scenario.closed_after or ROUNDS)
        if first < last or run.evaluation_due:
            run_rounds(run, last, scenario, say, again)
        if run.rounds == scenario.closed_after and run.rounds < first + rounds:
            run.end_early("enough")
            say("closed")


def begun(folder: Path, scenario: Scenario, say: Say) -> RunFolder | None:
    """Return the run in a folder, a new one if there is none; None if it was ended early."""
    if not holds_a_run(folder):
        run = create_run(folder, scenario.plan, seed=scenario.seed)
        say("created")
        return run
    try:
        run = RunFolder.open(folder)
    except ConfigError as error:
        if scenario.closed_after is None or "ended early" not in str(error):
            raise
        say("closed")
        return None
    say("opened", rounds=run.rounds)
    for evaluation in run.evaluations:
        say("shown", round=evaluation.round, values=evaluation.values)
    return run


def run_rounds(run: RunFolder, last: int, scenario: Scenario, say: Say, again: bool) -> None:
    """Run rounds until so many are committed."""
    source = run.source()
    if scenario.one_salt:
        source.salt = lambda: bytes(16)
    settings = ServerOptimizer() if scenario.seed is None else ServerOptimizer(kind="adam")
    server = Server(scenario.plan, torch.zeros(DIM), source=source, optimizer=settings)
    run.restore(server)
    evaluate = evaluations_of(run, source, scenario, say)
    evaluate()
    before = [server.parameters.clone()]
    clients = Clients(scenario, say)

    def commit(server, counts):
        model = server.parameters
        noise = (model - before[0]) * PLAN.report_goal - clients.sum
        say("drawn", round=server.round - 1, noise=noise.tolist(), sum=clients.sum.tolist())
        before[0] = model.clone()
        if scenario.released_first:
            say("sent", round=server.round, model=model.tolist())
        try:
            run.commit(server, counts)
        except StorageError as error:
            if not again:
                raise
            say("fault", error="StorageError", text=str(error))
            run.commit(server, counts)
        say("committed", rounds=server.round)
        evaluate()
        if server.round == last:
            raise EnoughError

    with suppress(EnoughError):
        fit(server, clients, COHORTS, commit=commit)


def evaluations_of(
    run: RunFolder, source: NoiseSource, scenario: Scenario, say: Say
) -> Callable[[], None]:
    """Return what measures, noises and commits the metrics that are due, if any are."""
    if not scenario.metrics:
        return lambda: None
    release = MetricsRelease(run.plan, source, EVALUATE, done=len(run.evaluations))

    def evaluate() -> None:
        if not run.evaluation_due:
            return
        newest = run.rounds - 1
        seed = newest if scenario.seed is not None else int.from_bytes(os.getrandom(7), "big")
        numbers = torch.rand((2, 2), generator=torch.Generator().manual_seed(seed)).double()
        release.release(newest, zip(EVALUATE, numbers, strict=True))
        total = numbers.sum(dim=0)
        noise = torch.tensor(release.values) * METRICS.users - total
        say("measured", round=newest, noise=noise.tolist(), sum=total.tolist())
        run.commit_metrics(release)
        say("shown", round=newest, values=release.values)

    return evaluate


def told(base: Path, scenario: Scenario, rounds: int = ROUNDS, *, again: bool = False) -> None:
    """Train in a process that may be ended; its events go to a file, faults are among them."""
    handle = os.open(base / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(what: str, **values: object) -> None:
        os.write(handle, json.dumps({"what": what, **values}).encode() + b"\n")

    if scenario.unsynced:
        os.fsync = lambda handle: None
    try:
        train(base, scenario, say, rounds=rounds, again=again)
    except (StorageError, ConfigError) as error:
        say("fault", error=type(error).__name__, text=str(error))


@dataclass
class End:
    """What a run ended with."""

    events: list[Event]
    model: str = ""
    names: list[str] = field(default_factory=list)
    report: str = ""
    error: str = ""


def finished(base: Path, scenario: Scenario, rounds: int = ROUNDS) -> End:
    """Open or begin the run, run so many rounds, and say what it ended with."""
    events: list[Event] = []

    def say(what: str, **values: object) -> None:
        events.append({"what": what, **values})

    try:
        train(base, scenario, say, rounds=rounds)
        if rounds < ROUNDS:
            return End(events)
        folder = base / "disk" / "run"
        state = newest(folder)
        decode_state(state)
        report = run_report(folder, delta=1e-6)
        checked = [(check.what, check.status) for check in check_run(folder)]
        names = sorted(path.name for path in folder.iterdir())
        digest = hashlib.sha256(state.read_bytes()).hexdigest()
        says = f"{report.complete} {report.guarantee.mu} {checked}"
        if scenario.seed is not None and report.noised is not None:
            says += str(report.noised.evaluations)
        return End(events, digest, names, says)
    except Exception as error:  # whatever it is, it is counted
        text = str(error).replace(str(base), "")
        return End(events, error=f"{type(error).__name__}: {text}")


def newest(folder: Path) -> Path:
    """Return the file with the last model; there must be only one."""
    (found,) = folder.glob("*-0*.safetensors")
    return found


def wrong(before: list[Event], left: Tree, end: End, whole: End, scenario: Scenario) -> str:
    """Return what is wrong with a history: a run, the fault, what it left, and the resumed run."""
    if end.error:
        return end.error
    if end.names != whole.names:
        return f"the folder holds {end.names}, that of an undisturbed run {whole.names}"
    if end.report != whole.report:
        return f"report: {end.report}, not {whole.report}"
    if scenario.seed is not None and end.model != whole.model:
        return "the model differs from that of an undisturbed run"
    return lost(before, left, end, scenario) or two_sums(before + end.events)


def lost(before: list[Event], left: Tree, end: End, scenario: Scenario) -> str:
    """Return what was acknowledged before the fault and is not so any more; or ""."""
    said = {event["what"] for event in before}
    opened = next((event["rounds"] for event in end.events if event["what"] == "opened"), None)
    if end.events[0]["what"] == "closed":
        opened = scenario.closed_after
    elif "closed" in said:
        return "a run that was ended early is open again"
    # a process that opened a run has seen its rounds, and its clients are sent the model
    seen = [e["rounds"] for e in before if e["what"] in ("committed", "opened")]
    if opened is None and "created" in said:
        return "a run that was created is lost"
    if (opened or 0) < (committed := max(seen, default=0)):
        return f"{committed} rounds were committed, {opened} are left"
    shown = {event["round"] for event in before if event["what"] == "shown"}
    complete = committed == ROUNDS and not (scenario.metrics and ROUNDS - 1 not in shown)
    ended = complete or "closed" in said
    keys = [Path(path).name for path in left if path.endswith("key")]
    return f"a run that has ended has {keys}" if ended and keys else ""


def two_sums(events: list[Event]) -> str:
    """Return whether a round was released twice, or a noise was drawn under two sums."""
    models: dict[int, list] = {}
    for event in events:
        if event["what"] == "sent":
            models.setdefault(event["round"], event["model"])
            if models[event["round"]] != event["model"]:
                return f"two models of round {event['round'] - 1} were released"
    shown: dict[int, list] = {}
    for event in (e for e in events if e["what"] == "shown"):
        if shown.setdefault(event["round"], list(event["values"])) != list(event["values"]):
            return f"two metrics of round {event['round']} were released"
    faults = (repeated([e for e in events if e["what"] == w]) for w in ("drawn", "measured"))
    return next(filter(None, faults), "")


def repeated(drawn: list[Event]) -> str:
    """Return whether a noise was drawn under two sums."""
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            same = np.allclose(one["noise"], other["noise"], atol=1e-3)
            if same and not np.allclose(one["sum"], other["sum"], atol=1e-3):
                return f"one noise under two sums in round {one['round']} ({one['what']})"
    return ""


class Sweep:
    """Tries what a fault left, each distinct state once, and counts."""

    def __init__(self, scenario: Scenario, scratch: Path) -> None:
        self.scenario, self.scratch = scenario, scratch
        self.tried: dict[bytes, End] = {}
        self.ends: dict[bytes, End] = {}
        self.rng = np.random.default_rng(0)
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.whole = finished(self.new(), scenario)
        if self.whole.error:
            raise RuntimeError(self.whole.error)

    def new(self) -> Path:
        base = self.scratch / str(len(list(self.scratch.iterdir())))
        (base / "disk").mkdir(parents=True, mode=0o700)
        return base

    def stages(self) -> list[Tree]:
        """Return what lies there before the run is created, then after it and after each round."""
        base = self.new()
        found = [read(base / "disk", ROOT)]
        for rounds in (0, *[1] * ROUNDS):
            finished(base, self.scenario, rounds)
            found.append(read(base / "disk", ROOT))
        return found

    def after(self, kind: str, where: str, events: list[Event], left: Tree, root: str) -> None:
        """Resume from what a fault left, and judge the whole history."""
        self.counts[kind] += 1
        key = _digest(left)
        if key not in self.tried:
            self.counts["distinct states"] += 1
            with TemporaryDirectory(dir=self.scratch) as place:
                put(left, root, Path(place) / "disk")
                self.tried[key] = self._resumed(Path(place))
        self.judge(kind, where, events, left, self.tried[key])

    def _resumed(self, base: Path) -> End:
        """Open the run, and bring it to its end unless one that was opened as it was brought there.

        Many states are one as soon as the run is opened: what was left half done is removed.
        """
        opened = finished(base, self.scenario, 0)
        if opened.error:
            return opened
        left = read(base / "disk", ROOT)
        if opened.events[0]["what"] == "created":  # a new run, whose name and key are random
            left = {_RANDOM.sub("*", path): None for path in left}
        key = _digest(left)
        if key not in self.ends:
            self.counts["distinct resumed"] += 1
            self.ends[key] = finished(base, self.scenario)
        return replace(self.ends[key], events=opened.events + self.ends[key].events)

    def judge(self, kind: str, where: str, events: list, left: Tree, end: End) -> None:
        """Note what is wrong with a history, if anything is."""
        if fault := wrong(events, left, end, self.whole, self.scenario):
            self.note(f"{kind}: {fault}", where)

    def note(self, fault: str, where: str) -> None:
        """Count a fault, and say where it was first seen."""
        if fault not in self.faults and len(self.faults) < MOST_SAID:
            sys.stderr.write(f"{fault} (first at: {where})\n")
        self.faults[fault] += 1


def _digest(tree: Tree) -> bytes:
    digest = hashlib.sha256()
    for path, content in sorted(tree.items()):
        digest.update(f"{path}|{-1 if content is None else len(content)}|".encode())
        digest.update(content or b"")
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Point:
    """Where a process may be stopped: before which call, what was said until then, and the disk."""

    where: str
    events: list[Event]
    disk: Disk


def followed(sweep: Sweep, base: Path, disk: Disk, events: list[Event]) -> list[Point]:
    """Train in a traced process, from what lies there; return a point before each of its calls."""
    points: list[Point] = []
    root = base / "disk"

    def look(where: str) -> None:
        if disk.now() != read(root, str(root)):
            raise RuntimeError(f"{where}: the model of the disk is not what lies there")
        points.append(Point(where, list(events), disk.copy()))

    def before(call: Call) -> None:
        if call.path == str(base / "said") and call.name == "write":
            events.append(json.loads(call.data))
        elif call.path.startswith(str(root)) and call.name in CHANGES:
            look(f"{call.name} {call.path.removeprefix(str(root))}")

    if status := traced(lambda: told(base, sweep.scenario), before, disk.make):
        raise RuntimeError(f"the traced run ended with {status}")
    look("end")
    return points


def stopped(sweep: Sweep, effort: int, every: int, twice: int) -> None:
    """Kill before every call, and let the power fail there in at most ``effort`` ways.

    Only every ``every``-th call is tried. Then the run is resumed, and stopped everywhere again,
    from ``twice`` of the kills before a folder is synced, first those that follow a removal.
    """
    base = sweep.new()
    root = base / "disk"
    points = followed(sweep, base, Disk(str(root)), [])
    for point in points[::-every]:
        judged(sweep, effort, point, "")
    for point in sorted(filter(_has_names_to_lose, points), key=_removes_none)[:twice]:
        shutil.rmtree(root)
        (base / "said").unlink()
        put(point.disk.now(), str(root), root)
        for again in followed(sweep, base, point.disk.copy(), list(point.events)):
            judged(sweep, effort, again, f" after a kill ({point.where})")


def _has_names_to_lose(point: Point) -> bool:
    return point.where.startswith("sync") and any(c.names for c in point.disk.pending)


def _removes_none(point: Point) -> bool:
    last = [c.names for c in point.disk.pending if c.names][-1]
    return last[-1][1] is not None or len(last) > 1


def judged(sweep: Sweep, effort: int, point: Point, when: str) -> None:
    """Resume from all that may be left at a point."""
    root = point.disk.root
    where = point.where + when
    kind = "after a kill, " if when else ""
    sweep.after(f"{kind}kill", where, point.events, point.disk.now(), root)
    if effort:
        for left in point.disk.after_power_loss(effort, sweep.rng):
            sweep.after(f"{kind}power loss", where, point.events, left, root)


class Once:
    """Disturbs the call with a given number, and those after it if the fault lasts."""

    def __init__(self, root: str, at: int, fault: str) -> None:
        self.root, self.at, self.fault = root, at, fault
        self.made, self.where = 0, ""

    def __call__(self, call: Call) -> Refuse | Shorten | type[Kill] | None:
        watched = ("read", "readv") if self.fault == READ_FAULT else CHANGES
        if not call.path.startswith(self.root) or call.name not in watched:
            return None
        self.made += 1
        if self.made == self.at:
            self.where = f"{call.name} {call.path.removeprefix(self.root)}"
            return self._first(call)
        return self._later(call) if self.made > self.at else None

    def _first(self, call: Call) -> Refuse | Shorten | type[Kill] | None:
        if self.fault == "SIGKILL":
            return Kill
        if self.fault in ("short write", "full") and len(call.data) > 1:
            return Shorten(len(call.data) // 2)
        if self.fault == "short write":
            return None
        return Refuse(errno.EIO if self.fault.startswith("EIO") else errno.ENOSPC)

    def _later(self, call: Call) -> Refuse | None:
        if self.fault == "EIO from here on":
            return Refuse(errno.EIO)
        grows = call.name in ("write", "mkdir", "link") or call.flags & os.O_CREAT
        return Refuse(errno.ENOSPC) if self.fault == "full" and grows else None


READ_FAULT = "EIO in a read"
FAULTS = (
    "EIO",
    "EIO from here on",
    "EIO, tried again",
    "full",
    "ENOSPC",
    "short write",
    "SIGKILL",
    READ_FAULT,
)


def refused(sweep: Sweep, every: int) -> None:
    """Disturb each call of each stage of a run, in a process of its own, and resume what it left.

    Every ``every``-th pair of a call and a fault is tried.
    """
    pair = 0
    for stage, start in enumerate(sweep.stages()):
        reads = disturbed(sweep, start, stage, 0, READ_FAULT)
        changes = disturbed(sweep, start, stage, 0, FAULTS[0])
        sweep.counts["calls"] += reads + changes
        for fault in FAULTS:
            for at in range(1, (reads if fault == READ_FAULT else changes) + 1):
                pair += 1
                if pair % every == 0:
                    disturbed(sweep, start, stage, at, fault)


def disturbed(sweep: Sweep, start: Tree, stage: int, at: int, fault: str) -> int:
    """Run one stage, disturb its ``at``-th call and judge it; return how many calls it made."""
    with TemporaryDirectory(dir=sweep.scratch) as place:
        base = Path(place)
        put(start, ROOT, base / "disk")
        disturb = Once(str(base / "disk"), at, fault)
        again = fault == "EIO, tried again"
        status = traced(lambda: told(base, sweep.scenario, min(stage, 1), again=again), disturb)
        if at:
            if not disturb.where:
                raise RuntimeError(f"stage {stage} made fewer than {at} calls")
            where = f"stage {stage}, {disturb.where}"
            said = [json.loads(line) for line in (base / "said").read_text().splitlines()]
            if status not in (0, -9):
                sweep.note(f"{fault}: the process ended with {status}", where)
            sweep.after(fault, where, said, read(base / "disk", ROOT), ROOT)
        return disturb.made


def main(tasks: list[str]) -> None:
    """Do each task, such as "seeded:power=16:errors=30"."""
    torch.set_num_threads(1)
    # A run of three rounds saves its registers after the second one.
    stream.MOST_SECONDS = 2e-4
    gc.freeze()  # so that no child of a fork copies what it never changes
    fast = Path("/dev/shm")  # memory, where nothing waits for a real disk
    results = {}
    for task in tasks:
        name, *parts = task.split(":")
        effort = {what: int(number) for what, _, number in (part.partition("=") for part in parts)}
        with TemporaryDirectory(dir=fast if os.access(fast, os.W_OK) else None) as scratch:
            sweep = Sweep(SCENARIOS[name], Path(scratch))
            if "power" in effort:
                stopped(sweep, effort["power"], effort.get("every", 1), effort.get("twice", 0))
            if "errors" in effort:
                refused(sweep, effort["errors"])
        said = dict(sweep.faults.most_common(MOST_SAID))
        results[name] = {"counts": sweep.counts, "faults": said}
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
