"""Cold start: CPU seconds of a whole budget command, beside what it is built on.

Run: ``python benchmarks/cold_start.py``. Prints the least of several runs of each, interleaved, so
that the ratios mean something on a shared machine.
"""

import os
import resource
import subprocess
import sys

_REPEATS = 9
_COMMAND = [
    "epsilon",
    "--rounds",
    "1600",
    "--noise-multiplier",
    "4.03",
    "--delta",
    "1e-6",
    "--max-participations",
    "1",
]
JOBS = {
    "import scipy.special, typer": [sys.executable, "-c", "import scipy.special, typer"],
    "import scipy.special": [sys.executable, "-c", "import scipy.special"],
    "import numpy, typer": [sys.executable, "-c", "import numpy, typer"],
    "privpart epsilon": [sys.executable, "-m", "privpart.cli.main", *_COMMAND],
    "privpart --help": [sys.executable, "-m", "privpart.cli.main", "--help"],
}
BASE = "import scipy.special, typer"


def cpu_seconds(command: list[str]) -> float:
    """Return the user and system time of one run of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages are compiled
    subprocess.run(
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print."""
    least = dict.fromkeys(JOBS, float("inf"))
    for _ in range(_REPEATS):
        for name, command in JOBS.items():
            least[name] = min(least[name], cpu_seconds(command))
    for name, seconds in least.items():
        print(f"{name:30} {seconds:6.3f} CPU s {seconds / least[BASE]:6.2f} x")


if __name__ == "__main__":
    main()
