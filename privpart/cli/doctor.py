"""``privpart doctor``: whether this machine and a plan are fit to train."""

import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from accounting import ConfigError
from accounting.report import up
from privpart.cli import options
from privpart.cli.idle import without
from privpart.cli.output import print_result

if TYPE_CHECKING:  # imported where used: the other commands must start without torch
    from privpart.training.plan_file import PlanFile
    from privpart.training.training import Training

_NEEDED = ("torch", "numpy", "scipy", "opacus", "dp-accounting", "safetensors", "cryptography")
_EXTRAS = {"frames": ("pandas", "pyarrow"), "huggingface": ("transformers", "peft", "datasets")}
_MARKS = {"ok": "  ", "note": "- ", "fault": "! "}
_CHECKED = 100
"""Clients whose examples are read without --all-clients."""


Status = Literal["ok", "note", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was checked, what was found, and whether it is as it should be."""

    check: str
    found: str
    status: Status = "ok"


def doctor(
    plan: Annotated[
        Path | None, typer.Option(help="Plan file to check as well; its code is imported.")
    ] = None,
    all_clients: Annotated[
        bool,
        typer.Option("--all-clients", help="Read every client's examples, not the first hundred."),
        without("plan", "there are no clients to read"),
    ] = False,
    suggest: Annotated[
        bool,
        typer.Option("--suggest", help="Also suggest settings, from rounds on public data."),
        without("plan", "there is nothing to suggest settings for"),
    ] = False,
    proxy: Annotated[
        str | None,
        typer.Option(
            help="Own function that returns public clients, in place of the plan's, for --suggest."
        ),
        without("suggest", "no other command looks at proxy data"),
    ] = None,
    form: options.FormatOption = "table",
) -> None:
    """Check this installation, and with --plan whether the plan trains and what it costs.

    Nothing is trained and no run is begun. Exit code 2 if something is at fault.

    Example: privpart doctor --plan plan.toml
    """
    with redirect_stdout(sys.stderr):  # what the plan's code prints is no part of the result
        findings = [*_installation()]
        if plan is not None:
            findings += _plan(plan, all_clients=all_clients)
            findings += _suggested(plan, proxy) if suggest else ()
    rows = [asdict(finding) for finding in findings]
    document = {"schema": "privpart/doctor/1", "findings": rows}
    width = max(len(finding.check) for finding in findings)
    lines = [f"{_MARKS[f.status]}{f.check:<{width}}  {f.found}" for f in findings]
    print_result(form, document, rows, lambda: typer.echo("\n".join(lines)))
    if any(finding.status == "fault" for finding in findings):
        raise typer.Exit(2)


def _installation() -> Iterator[Finding]:
    from privpart.run import package

    word, says = package.identity(package.facts(), version("privpart"))
    yield Finding("privpart", version("privpart"))
    yield Finding("its code", f"{word}: {says}", "note" if word == "modified" else "ok")
    yield Finding("files", package.running())
    yield Finding("Python", f"{platform.python_version()} on {platform.system()}")
    for name in _NEEDED:
        yield _package(name, f"missing: pip install {name}", "fault")
    for extra, names in _EXTRAS.items():
        for name in names:
            yield _package(name, f"not installed; pip install 'privpart[{extra}]'", "note")
    if find_spec("torch") is None:  # named above; what follows needs it
        return
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("processors", f"{cores}; torch uses {torch.get_num_threads()} threads")
    yield Finding("accelerator", "CUDA" if torch.cuda.is_available() else "none; the CPU is used")
    yield _guard()
    yield _writable("this folder", Path(), "; runs need --out elsewhere", "note")


def _package(name: str, missing: str, status: Status) -> Finding:
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        return Finding(name, missing, status)


def _writable(check: str, folder: Path, advice: str, status: Status = "fault") -> Finding:
    """Whether files can be written and flushed in a folder, or would be created there."""
    place = folder.resolve()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.NamedTemporaryFile(dir=place) as file:
            file.write(b"privpart")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Finding(check, f"{folder} cannot be written: {error.strerror}{advice}", status)
    return Finding(check, f"{folder.resolve()} can be written")


def _guard() -> Finding:
    """Whether the log of runs is this user's own."""
    from privpart.run.log import VARIABLE, directory
    from privpart.run.store import refuse_shared

    try:
        refuse_shared(directory())
    except FileNotFoundError:
        pass
    except (ConfigError, OSError) as error:
        return Finding("log of runs", str(error), "fault")
    return _writable("log of runs", directory(), f"; set {VARIABLE} to another folder")


def _plan(path: Path, *, all_clients: bool) -> Iterator[Finding]:
    """Check a plan; the first fault ends the list."""
    from privpart.cli.trainings import tell_of_code
    from privpart.data.clients import check_clients
    from privpart.training.plan_file import read
    from privpart.training.rounding import of_bfloat16
    from privpart.training.training import training

    try:
        plan = read(path)
        yield Finding("plan", f"{path} is valid")
        yield Finding("epsilon", _cost(plan))
        tell_of_code(plan)
        setup = training(plan, report=lambda _: None)
        warning = plan.accept_delta(len(setup.clients.ids))
        yield Finding("delta", warning or f"{plan.privacy.delta:g}", "note" if warning else "ok")
        yield from _parts(setup)
        count = len(setup.clients.ids)
        checked = count if all_clients else min(_CHECKED, count)
        check_clients(setup.clients, limit=checked)
        yield Finding("clients", f"{count:,}; the examples of {checked:,} were read")
        if (rounding := of_bfloat16(setup, setup.promise())) is not None:
            yield Finding("bfloat16", rounding)
    except ConfigError as error:
        yield Finding("plan", str(error), "fault")


def _suggested(path: Path, proxy: str | None) -> Iterator[Finding]:
    from privpart.training.plan_file import read
    from privpart.training.suggest import suggestions

    try:
        for check, found, status in suggestions(read(path), proxy):
            yield Finding(check, found, status)
    except ConfigError as error:
        yield Finding("suggest", str(error), "fault")


def _cost(plan: "PlanFile") -> str:
    promised = plan.privacy_plan()
    if not promised.noise_multiplier:
        return "none: the plan adds no noise"
    report = promised.report(plan.privacy.delta)
    limits = f"{plan.privacy.max_participations} of {plan.privacy.rounds} rounds"
    holds = f", for a client in at most {limits}"
    if report.sampling is not None:
        unhidden = up(report.guarantee.epsilon(report.delta), 5)
        holds = f" ({report.formula}), while nobody learns who takes part; {unhidden} if somebody "
        holds += "does"
    cost = f"{up(report.epsilon, 5)} at delta {plan.privacy.delta:g}{holds}"
    return f"{cost}; noise multiplier {up(promised.noise_multiplier, 5)}"


def _parts(setup: "Training") -> Iterator[Finding]:
    model = setup.model
    yield Finding("network", f"{type(model.module).__name__}, {model.parameter_count:,} parameters")
    share = model.dim / model.parameter_count
    yield Finding("trained", f"{model.dim:,} ({share:.2%}): {_names(model.trainable)}")
    yield Finding("frozen", _names(model.frozen) or "nothing")
    if model.kept:
        yield Finding("kept", f"{_names(model.kept)}; a client needs the frozen ones once")
    if model.local:
        yield Finding("local", f"{_names(model.local)}; never leaves a client")
    promised = setup.promise()
    setup.rehearse(promised)
    cohorts = f"{promised.rounds} rounds, sampled; about {promised.report_goal} clients each"
    if promised.sampling is None:
        cohorts = f"{len(setup.cohorts)} rounds of {len(setup.cohorts[0])} clients"
    yield Finding("cohorts", cohorts)
    if (evaluators := setup.evaluators) is not None:
        who = f"{len(evaluators.users.ids):,} users evaluate: {', '.join(evaluators.measures)}"
        yield Finding("metrics", who)
    if setup.metric is None:
        yield Finding("metric", "none; the model will not be evaluated", "note")
        return
    from privpart.loop import StopTraining

    try:
        (_, first), *others = setup.measures(setup.start).items()
        values = ", ".join([f"{first:.4g}", *(f"{name} {value:.4g}" for name, value in others)])
    except StopTraining:
        values = "would stop the training"
    yield Finding("metric", f"{values} before training")


def _names(names: tuple[str, ...], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown
