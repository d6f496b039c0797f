"""Frame: what the benchmarks share: one thread, options, turns, processes, result file, table.

Scripts import it before numpy and torch, because it sets their number of threads. The machines are
shared, so what is compared takes turns in one run, and processor time, which other programs disturb
least, stands beside wall-clock time. Every script has ``--quick``, the smallest setting, which
writes no result, and ``--result FILE``.
"""

import argparse
import csv
import importlib.util
import json
import multiprocessing
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

RESULTS = Path(__file__).parent / "results"
DATA = Path(os.environ["FASHION_MNIST"]) if "FASHION_MNIST" in os.environ else None
"""Folder of Fashion-MNIST's four files; None for where Debian's package puts them."""
Job = Callable[[], object]
Clock = Callable[[], float]
Answer = TypeVar("Answer")


# What a run is asked for, and what it writes.


def options(
    doc: str | None, result: str | None = None, quick: Mapping[str, Any] | None = None, **own: Any
) -> argparse.Namespace:
    """Parse the command line.

    Args:
        doc: the script's docstring.
        result: the default of ``--result``, in ``benchmarks/results``.
        quick: what ``--quick`` puts in place of the defaults; an option that is typed counts.
        own: the default of each option of the script, or its arguments of ``add_argument``;
            those with a true "positional" are for an argument that is no option.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smallest setting; writes no result")
    if result:
        parser.add_argument("--result", type=Path, help=f"default: benchmarks/results/{result}")
        parser.set_defaults(result=RESULTS / result)
    for name, default in own.items():
        arguments = dict(default) if isinstance(default, dict) else _argument(default)
        positional = arguments.pop("positional", False)
        parser.add_argument(name if positional else f"--{name.replace('_', '-')}", **arguments)
    if "--quick" in sys.argv:
        parser.set_defaults(result=None, **(quick or {}))
    return parser.parse_args()


def _argument(default: Any) -> dict[str, Any]:
    if isinstance(default, bool):
        return {"action": argparse.BooleanOptionalAction, "default": default}
    if isinstance(default, list | tuple):
        return {"nargs": "*", "type": type(default[0]), "default": list(default)}
    return {"type": type(default), "default": default}


def among(choices: Iterable[str], default: Iterable[str] | None = None) -> dict[str, Any]:
    """Return the arguments of an option that takes several of the choices, all by default."""
    every = list(choices)
    return {"nargs": "*", "choices": every, "default": every if default is None else list(default)}


def needs(package: str, remedy: str) -> None:
    """End the script with a sentence if a package that it cannot do without is not installed."""
    if importlib.util.find_spec(package) is None:
        raise SystemExit(f"{package} is not installed for {sys.executable}: {remedy}")


class Result:
    """A result file; without a path nothing is written.

    Args:
        path: of the file; what it holds is ``old``.
        packages: whose versions are part of the machine's description.
        about: more facts about the machine.
    """

    def __init__(self, path: Path | None, *packages: str, indent: int = 2, **about: Any) -> None:
        text = path.read_text() if path is not None and path.exists() else ""
        self.old: dict[str, Any] = json.loads(text or "{}")
        self.path, self.indent = path, indent
        self.machine = machine(*packages) | about

    def write(self, *, method: Any = None, **parts: Any) -> None:
        """Write the whole file: method, machine, and the parts."""
        document = {} if method is None else {"method": method}
        document |= {"machine": self.machine, **parts}
        if self.path is not None:
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(json.dumps(document, indent=self.indent) + "\n")

    def cases(
        self, names: Iterable[str], measure: Callable[[str], Any], *, resume: bool, **parts: Any
    ) -> dict[str, Any]:
        """Measure each case, show its ratio, and write the file after each one.

        Args:
            names: of the cases.
            measure: gets a name; what it returns has a "ratio".
            resume: keep the cases that the file has.
            parts: what the file holds beside them.
        """
        found: dict[str, Any] = self.old.get("cases", {}) if resume else {}
        for name in (name for name in names if name not in found):
            found[name] = measure(name)
            show(name, found[name]["ratio"])
            self.write(cases=found, **parts)
        return found


def write_csv(path: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows under the names of the first one; without a path nothing is written."""
    if path is not None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def show(name: str, row: Any, *keys: str) -> None:
    """Print a row of the table, or only these keys: four digits, nested names joined by dots."""
    row = {key: row[key] for key in keys if key in row} if keys else row
    cells = "  ".join(f"{key} {_digits(value)}".strip() for key, value in flat(row).items())
    print(f"{name:40} {cells}", flush=True)


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Map the dotted names of nested mappings to their values."""
    if not isinstance(value, Mapping):
        return {name: value}
    parts = (flat(inner, f"{name}.{key}".lstrip(".")) for key, inner in value.items())
    return {key: inner for part in parts for key, inner in part.items()}


def _digits(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_digits, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = [head, *rows]
    text = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(head), *text[1:]])


def commit() -> str:
    """Return the commit that runs, or ""; with a "+" if files but results were changed since."""
    git = ["git", "-C", str(RESULTS.parent.parent)]
    try:
        answers = [
            subprocess.run([*git, *asked], check=True, capture_output=True, text=True).stdout
            for asked in (
                ("rev-parse", "--short", "HEAD"),
                ("status", "--porcelain", "-uno", ".", ":!benchmarks/results"),
            )
        ]
    except (OSError, subprocess.CalledProcessError):
        return ""
    return answers[0].strip() + "+" * bool(answers[1])


def machine(*packages: str) -> dict[str, Any]:
    """Describe what a reader needs to judge figures: processor, load, commit, versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "threads": 1,
        "load_average": os.getloadavg()[0],
        "commit": commit(),
        "python": platform.python_version(),
        "system": platform.system(),
        "packages": {name: metadata.version(name) for name in packages},
    }


def where() -> str:
    """Describe the machine in a few words, for figures that come from several machines."""
    facts = machine("torch")
    return f"{facts['processor']}, {facts['cores']} cores, torch {facts['packages']['torch']}"


# Turns: jobs that run one after the other, again and again, so that other load slows them alike.


class Seconds(NamedTuple):
    """Seconds of a job."""

    wall: float
    cpu: float


def seconds(job: Job, *, clock: Clock = time.process_time, at_least: float = 0.0) -> Seconds:
    """Return the seconds of a job, the mean over runs that last so long together.

    Args:
        job: is run once or more often.
        clock: processor seconds so far.
        at_least: wall-clock seconds.
    """
    wall, cpu, runs = time.perf_counter(), clock(), 0
    while runs == 0 or time.perf_counter() - wall < at_least:
        job()
        runs += 1
    return Seconds((time.perf_counter() - wall) / runs, (clock() - cpu) / runs)


def children() -> float:
    """Return the processor seconds of all processes that this one has started and that ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def of_process(pid: int) -> float:
    """Return the processor seconds of a running process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def in_turns(
    jobs: Mapping[str, Job],
    turns: int,
    *,
    clocks: Mapping[str, Clock] | None = None,
    at_least: float = 0.0,
    warm: bool = True,
    limit: float = float("inf"),
) -> dict[str, list[Seconds]]:
    """Return the seconds of every job in every turn.

    Args:
        jobs: by name.
        turns: that count; at least one, and fewer once ``limit`` seconds are over.
        clocks: of jobs that other processes compute; see ``seconds``.
        at_least: seconds of each turn of a job.
        warm: whether a turn that does not count comes first.
        limit: on wall-clock seconds.
    """
    times: dict[str, list[Seconds]] = {name: [] for name in jobs}
    began = time.perf_counter()
    for turn in range(-warm, turns):
        if turn > 0 and time.perf_counter() - began > limit:
            break
        for name, job in jobs.items():
            clock = (clocks or {}).get(name, time.process_time)
            spent = seconds(job, clock=clock, at_least=at_least)
            if turn >= 0:
                times[name].append(spent)
    return times


WHICH = {"least": min, "median": statistics.median, "most": max}


def spread(values: Iterable[float], form: str = "{}") -> dict[str, float]:
    """Return the least, the median and the greatest value, under names of a form."""
    every = list(values)
    return {form.format(which): of(every) for which, of in WHICH.items()}


def spreads(times: Sequence[Seconds], scale: float = 1.0) -> dict[str, float]:
    """Return least, median and most of both clocks, scaled: ``wall_least`` and so on."""
    return {
        name: value
        for clock in Seconds._fields
        for name, value in spread(
            (scale * getattr(one, clock) for one in times), f"{clock}_{{}}"
        ).items()
    }


def ratios(times: Sequence[Seconds], base: Sequence[Seconds]) -> dict[str, float]:
    """Return times over the base's: of the least ones, and the median over the turns."""
    result = {}
    for clock in Seconds._fields:
        above, below = ([getattr(s, clock) for s in column] for column in (times, base))
        pairs = [a / b for a, b in zip(above, below, strict=True)]
        result[f"{clock}_least"] = min(above) / min(below)
        result[f"{clock}_median"] = statistics.median(pairs)
    return result


# Processes.


def finished(jobs: Sequence[Callable[[], Answer]], processes: int) -> Iterator[Answer]:
    """Yield the answers of jobs, which begin in their order, as they come.

    Jobs can be pickled. With one process they run in this one, so that a debugger sees them.
    """
    if processes < 2:
        yield from (job() for job in jobs)
        return
    spawn = multiprocessing.get_context("spawn")  # fork would copy the threads of autograd
    with ProcessPoolExecutor(min(processes, len(jobs) or 1), mp_context=spawn) as pool:
        for done in as_completed([pool.submit(job) for job in jobs]):
            yield done.result()


def apart(function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
    """Call a function of a script in a fresh interpreter; arguments and answer pass as JSON."""
    path = Path(function.__code__.co_filename)
    code = (
        f"import json, sys; sys.path.insert(0, {str(path.parent)!r}); import {path.stem} as script;"
        f"print(json.dumps(script.{function.__name__}(*json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    called = os.environ | environment
    called.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages are compiled
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=called)
    return json.loads(done.stdout.splitlines()[-1])


RETURN_FREED_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Environment in which malloc returns large blocks at once; freed ones would count as resident."""


def resident(name: str = "VmRSS") -> int:
    """Return the resident bytes of this process now, or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])
