"""Mutants: faults of a careless engineer, planted in a copy of the package, and who finds them.

    python tests/audits/mutants.py            writes the table of docs/audited-faults.md
    python tests/audits/mutants.py --only X   mutants whose name has X; writes nothing
    python tests/audits/mutants.py --right    a hundred right plans; none may be a violation

The faults are in mutants.toml. Every process that the audit starts runs the copy with the fault,
and ``privpart audit epsilon`` audits a plan with it at its default settings. A fault is found if
the verdict is VIOLATION, or if the mutated code refuses to run where the right code does not.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

os.environ["OMP_NUM_THREADS"] = "1"
import dp_accounting  # noqa: F401  before the forks
import pydantic  # noqa: F401
import scipy.stats  # noqa: F401
import torch  # noqa: F401
from audited_plans import PLANS, right

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULT = ROOT / "benchmarks/results/mutants.json"
PAGE = ROOT / "docs/audited-faults.md"
BEGIN, END = "<!-- the table begins -->", "<!-- the table ends -->"
HEAD = "| room | fault | plan | verdict | found by | CPU s |\n|---|---|---|---|---|---|\n"
PACKAGES = ("privpart", "accounting", "attacks")
COMMAND = ("audit", "epsilon", "--replay")
MUTANTS: Mapping[str, Mapping[str, Any]] = {
    mutant["name"]: mutant
    for mutant in tomllib.loads((HERE / "mutants.toml").read_text())["mutant"]
}


Job = tuple[str, str, Mapping[str, Any] | None]
"""A name, a plan, and the fault that is planted."""


@dataclass(frozen=True)
class Found:
    """What an audit says: its verdict, or "refused" where the command ends in an error."""

    verdict: str
    reasons: tuple[str, ...]
    cpu_seconds: float

    @property
    def named(self) -> bool:
        return self.verdict in ("VIOLATION", "refused")


def planted(mutant: Mapping[str, Any] | None, folder: Path) -> None:
    """Copy the packages into a folder, with the fault."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package)
    for edit in mutant["edits"] if mutant else ():
        path = folder / edit["file"]
        text = path.read_text()
        if (count := text.count(edit["old"])) != 1:
            raise ValueError(f"{edit['file']} has {edit['old']!r} {count} times; must have it once")
        path.write_text(text.replace(edit["old"], edit["new"]))


def audits(jobs: Iterable[Job], at_once: int) -> Iterator[tuple[str, Found]]:
    """Audit plans, each in a process that imports the mutated copy, and whose children do."""
    running: dict[int, tuple[str, Path]] = {}
    with tempfile.TemporaryDirectory() as place:
        for number, (name, plan, mutant) in enumerate(jobs):
            folder = Path(place) / str(number)
            planted(mutant, folder)
            (folder / "plan.toml").write_text(plan)
            if not (child := os.fork()):
                _audit(folder)
            running[child] = name, folder
            if len(running) == at_once:
                yield _ended(running)
        while running:
            yield _ended(running)


def _ended(running: dict[int, tuple[str, Path]]) -> tuple[str, Found]:
    """Wait for one of the processes, and return what it found."""
    child, status, used = os.wait3(0)
    name, folder = running.pop(child)
    seconds = round(used.ru_utime + used.ru_stime, 1)
    if os.waitstatus_to_exitcode(status):
        said = (folder / "stderr").read_text().strip().splitlines() or ["died"]
        found = Found("refused", (said[-1][:300],), seconds)
    else:
        report = json.loads((folder / "out/report.json").read_text())
        found = Found(report["verdict"], tuple(report["reasons"]), seconds)
    shutil.rmtree(folder)
    return name, found


def _audit(folder: Path) -> NoReturn:
    """Run the command in a fork that has torch, which takes seconds to import, and no privpart."""
    code = 1
    try:
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": str(folder), "XDG_STATE_HOME": str(folder / "state")}
        sys.path.insert(0, str(folder))
        # canaries have fixed rounds and one clip norm, and are refused elsewhere
        plan = Path("plan.toml").read_text()
        canaries = [] if "sampling" in plan or "clip_norms" in plan else ["--simulate"]
        sys.argv = ["privpart", *COMMAND, *canaries, "--plan", "plan.toml", "--out", "out"]
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as error:
            sys.stdout, sys.stderr = out, error
            try:
                import_module("privpart.cli.main").main()
                code = 0
            except SystemExit as ended:
                code = int(ended.code or 0)
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(code)


def row(mutant: Mapping[str, Any], found: Found) -> str:
    """Return a row of the table."""
    by = re.sub(r"\s+", " ", found.reasons[0]).replace("|", "\\|") if found.reasons else ""
    more = f" (and {len(found.reasons) - 1} more)" if len(found.reasons) > 1 else ""
    verdict = f"**{found.verdict}**" if found.named else "not found"
    cells = mutant["room"], mutant["name"], mutant["plan"], verdict, by + more
    return f"| {' | '.join(cells)} | {found.cpu_seconds:.0f} |"


def write(results: Mapping[str, Found]) -> None:
    """Write the results, and the table of the page."""
    RESULT.write_text(json.dumps({n: asdict(f) for n, f in results.items()}, indent=2) + "\n")
    rows = "\n".join(row(MUTANTS[name], found) for name, found in results.items())
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{HEAD}{rows}\n{END}{rest.split(END)[1]}")


def run_mutants(only: str, at_once: int, say: Callable[[str], object]) -> None:
    """Audit the mutants whose name has a word; write the page after all of them."""
    chosen = {name: mutant for name, mutant in MUTANTS.items() if only in name}
    # where the right code refuses a plan, a mutant's refusal says nothing
    used = sorted({mutant["plan"] for mutant in chosen.values()})
    alone = dict(audits(((plan, PLANS[plan], None) for plan in used), at_once))
    say("; ".join(f"{plan} {found.verdict}" for plan, found in alone.items()))
    results: dict[str, Found] = {}
    jobs = ((name, PLANS[mutant["plan"]], mutant) for name, mutant in chosen.items())
    for name, found in audits(jobs, at_once):
        right = alone[chosen[name]["plan"]]
        known = right.verdict == "consistent"
        results[name] = found if known else Found("not audited", right.reasons, found.cpu_seconds)
        say(row(chosen[name], results[name]))
    say(f"{sum(found.named for found in results.values())} of {len(results)} found")
    if not only:
        write({name: results[name] for name in MUTANTS})


def run_right(only: str, at_once: int, say: Callable[[str], object]) -> None:
    """Audit plans that are right."""
    verdicts = Counter[str]()
    for name, found in audits(((n, plan, None) for n, plan in right() if only in n), at_once):
        verdicts[found.verdict] += 1
        say(f"{found.verdict} {found.cpu_seconds:.0f} s: {name} {'; '.join(found.reasons)}")
    say(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="word of the names of what is audited")
    parser.add_argument("--right", action="store_true", help="audit the right plans")
    parser.add_argument("--at-once", type=int, default=2, help="audits that run at a time")
    given = parser.parse_args()

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    (run_right if given.right else run_mutants)(given.only, given.at_once, say)


if __name__ == "__main__":
    main()
