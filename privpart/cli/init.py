"""``privpart init``: a plan, a Python file, and files about them, which run as they are."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from accounting import ConfigError
from privpart.cli.output import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from privpart.training.starter import Kind

_ADVICE: "dict[Kind, tuple[str, ...]]" = {
    "training": (
        "train it with: privpart train --plan {folder}/plan.toml --out RUN",
        "ask what it costs with: privpart epsilon --plan {folder}/plan.toml",
    ),
    "flower": (
        "simulate it on this machine with: flwr run {folder} --stream",
        "run it over a network as {folder}/README.md says",
    ),
    "study": (
        "compare its arms with: privpart frontier {folder}/study.toml --out STUDY",
        "it trains 32 times, on public data or simulated clients: nothing is released",
    ),
    "sweep": ("train its grid with: privpart sweep {folder}/sweep.toml --out SWEEP",),
    "tune": (
        "ask what it costs with: privpart tune {folder}/tune.toml",
        "train, and release the best, with: privpart tune {folder}/tune.toml --out TUNED",
    ),
    "audit": (
        "train it with: privpart train --plan {folder}/audit.toml --out RUN",
        "then bound its epsilon from below with: privpart audit epsilon RUN",
    ),
}


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to write into; created if missing.")],
    kind: Annotated[
        Literal["training", "flower", "study", "sweep", "tune", "audit"],
        typer.Option(
            help="What to write: a training; or what a plan.toml in the folder, else the one of "
            "the starter, is for: a Flower app over a network, a study of what to train, a sweep, "
            "a private selection, or a training with an auditor's canaries."
        ),
    ] = "training",
) -> None:
    """Write a small training to change into your own, or files about one; they run as they are.

    Example: privpart init mine && privpart train --plan mine/plan.toml --out run

    Example: privpart init mine --kind study && privpart frontier mine/study.toml --out study
    """
    from privpart.training.starter import write_starter

    is_own = (folder / "plan.toml").exists()
    written = write_starter(folder, kind)
    if is_own and kind not in ("training", "flower"):
        _refuse_misfit(folder / "plan.toml", kind, written[0])
    for path in written:
        typer.echo(path)
    for line in _ADVICE[kind]:
        say(line.format(folder=quote(str(folder))))


def _refuse_misfit(plan: Path, kind: "Kind", written: Path) -> None:
    """Remove what was written beside a plan of somebody's own that it does not go with."""
    from privpart.study.study_file import read_study
    from privpart.study.sweep import read_sweep
    from privpart.study.tune import read_tune
    from privpart.training.plan_file import read

    readers: dict[str, Callable[[Path], object]]
    readers = {"study": read_study, "sweep": read_sweep, "tune": read_tune, "audit": read}
    try:
        readers[kind](written)
    except ConfigError as error:
        written.unlink()
        raise ConfigError(
            f"{plan}: does not go with the {kind} of privpart init, which was not written: {error} "
            "Write it in another folder, and take it as a model."
        ) from None
