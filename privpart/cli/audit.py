"""``privpart audit leakage``: what an adversary recovers from a whole update and from its parts."""

import json
import sys
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import checks
from accounting.checks import ConfigError
from privpart.cli.options import Format

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from attacks import LeakageReport

INTERRUPTED, THRESHOLD_PASSED = 130, 4
_CLIENT, _ATTACK = "The client's training", "The attack"

app = typer.Typer(help="Attack what a client sends.", no_args_is_help=True)


@app.callback()
def _audit() -> None:
    """Keep ``leakage`` a command of its own, as long as it is the only one."""


class Effort(StrEnum):
    """How long each attack may take."""

    QUICK = "quick"
    NORMAL = "normal"
    LONG = "long"


class FailOn(StrEnum):
    """Verdicts from the most severe on."""

    RECOVERED = "recovered"
    PARTIAL = "partial"
    AMBIGUOUS = "ambiguous"


class Mode(StrEnum):
    """Mode of the model while a client trains."""

    TRAIN = "train"
    EVAL = "eval"


BUDGETS: dict[Effort, dict[str, float]] = {
    Effort.QUICK: {"restarts": 1, "max_evaluations": 300, "newton_steps": 0, "steps": 300},
    Effort.NORMAL: {"restarts": 2, "max_evaluations": 500, "newton_steps": 10, "steps": 1000},
    Effort.LONG: {"restarts": 4, "max_evaluations": 3000, "newton_steps": 30, "steps": 6000},
}


@app.command()
def leakage(
    model: Annotated[
        str, typer.Option(help="lenet, relu-lenet, mlp, resnet8, or MODULE:FUNCTION of your own.")
    ],
    data: Annotated[
        str, typer.Option(help="digits, fashion-mnist, or a .safetensors file with x and y.")
    ],
    view: Annotated[
        list[str],
        typer.Option(help="'full', a pattern as 'dense1.*', or NAME=PATTERN,PATTERN; repeatable."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for report.json, leakage.png and trials/.")],
    trials: Annotated[int, typer.Option(help="Updates to attack, each of --batch images.")] = 10,
    batch: Annotated[int, typer.Option(help="Images per update.")] = 1,
    weights: Annotated[
        Path | None, typer.Option(help=".safetensors of the weights; by default untrained.")
    ] = None,
    gradient: Annotated[
        Path | None,
        typer.Option(help=".safetensors with an update of your own, of the first --batch images."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with Fashion-MNIST's four idx files.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Rounds by view, as 'full:5,head:20'; reports the worst.")
    ] = None,
    mode: Annotated[
        Mode, typer.Option(help="Mode of the model's layers.", rich_help_panel=_CLIENT)
    ] = Mode.TRAIN,
    local_steps: Annotated[
        int, typer.Option(help="Steps of SGD; 0 sends a gradient.", rich_help_panel=_CLIENT)
    ] = 0,
    learning_rate: Annotated[
        float, typer.Option(help="Of the local steps.", rich_help_panel=_CLIENT)
    ] = 0.1,
    clip: Annotated[
        float | None, typer.Option(help="Joint L2 bound on the update.", rich_help_panel=_CLIENT)
    ] = None,
    noise_multiplier: Annotated[
        float,
        typer.Option(help="Noise standard deviation / clip; 0 is none.", rich_help_panel=_CLIENT),
    ] = 0.0,
    delta: Annotated[
        float, typer.Option(help="Of the accountant's epsilon.", rich_help_panel=_CLIENT)
    ] = 1e-5,
    hide_labels: Annotated[
        bool, typer.Option("--hide-labels", help="Infer labels.", rich_help_panel=_ATTACK)
    ] = False,
    effort: Annotated[
        Effort, typer.Option(help="Budget of each attack.", rich_help_panel=_ATTACK)
    ] = Effort.NORMAL,
    attack: Annotated[
        list[str] | None, typer.Option(help="Only this one; repeatable.", rich_help_panel=_ATTACK)
    ] = None,
    decoys: Annotated[
        int, typer.Option(help="Images to hide the truth among.", rich_help_panel=_ATTACK)
    ] = 50,
    seed: Annotated[int, typer.Option(help="Of weights, starting points and noise.")] = 0,
    fail_on: Annotated[
        FailOn | None, typer.Option(help="Exit with 4 at this verdict or a more severe one.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="table or json.")] = Format.TABLE,
) -> None:
    """Attack the update of each batch, per view, and say what may be concluded.

    Interrupted with Ctrl-C, the same command goes on where it stopped.
    """
    checks.count("trials", trials)
    checks.count("decoys", decoys, minimum=0)
    if form is Format.CSV:
        raise ConfigError("format=csv: the report is nested; use table or json.")
    typed = {k: v for k, v in locals().items() if k not in ("out", "form", "fail_on")}
    report = _run(out, typed)
    _write(report, out, form)
    if fail_on is not None and _at_least(report, fail_on):
        typer.echo(f"privpart: {report.verdict}: threshold {fail_on.value} passed.", err=True)
        raise typer.Exit(THRESHOLD_PASSED)


def _run(out: Path, typed: dict[str, Any]) -> "LeakageReport":
    import torch

    import attacks
    from privpart.cli.audit_inputs import load_inputs, local_steps, rounds, views
    from privpart.cli.audit_store import TrialFolder

    torch.set_num_threads(1)  # so that the numbers do not depend on the machine's processors
    tried = _attacks(typed["effort"], typed["attack"])
    inputs = load_inputs(typed)
    done = TrialFolder(out, typed, inputs.digest())
    shown = views(typed["view"])
    adversaries = 2 if typed["noise_multiplier"] else 1
    try:
        with _progress(adversaries * len(shown) * len(inputs.x) // typed["batch"]) as progress:
            return attacks.leakage(
                inputs.model.train(typed["mode"] is Mode.TRAIN),
                inputs.x,
                inputs.y,
                views=shown,
                attacks=tried,
                batch=typed["batch"],
                update=inputs.update,
                local=local_steps(typed),
                clip=typed["clip"],
                noise_multiplier=typed["noise_multiplier"],
                delta=typed["delta"],
                schedule=rounds(typed["schedule"]),
                dataset_mean=inputs.dataset_mean,
                class_means=inputs.class_means,
                decoys=inputs.decoys,
                reveal_labels=not typed["hide_labels"],
                seed=typed["seed"],
                done=done,
                progress=progress,
            )
    except KeyboardInterrupt:
        typer.echo(
            f"privpart: interrupted; {len(done)} results are kept in {out}. "
            "The same command goes on from there.",
            err=True,
        )
        sys.exit(INTERRUPTED)


def _attacks(effort: Effort, names: list[str] | None) -> dict[str, Any]:
    from attacks import suite

    budget: Any = BUDGETS[effort]
    known = suite(**budget)
    for name in names or ():
        checks.choice("attack", name, list(known))
    return {name: attack for name, attack in known.items() if not names or name in names}


def _progress(total: int) -> AbstractContextManager[Any]:
    from privpart.cli.audit_tables import counted

    return counted(total)


def _write(report: "LeakageReport", out: Path, form: Format) -> None:
    from attacks import picture
    from privpart.cli import audit_tables

    text = json.dumps(report.to_dict(), indent=2, allow_nan=False)
    (out / "report.json").write_text(text + "\n")
    picture.grid([report], out / "leakage.png")
    if form is Format.JSON:
        typer.echo(text)
    else:
        audit_tables.show(report)
    for warning in audit_tables.warnings(report):
        typer.echo(f"privpart: warning: {warning}", err=True)
    typer.echo(f"privpart: written: {out / 'report.json'}, {out / 'leakage.png'}", err=True)


def _at_least(report: "LeakageReport", threshold: FailOn) -> bool:
    from attacks.report import VERDICTS

    return VERDICTS.index(report.verdict) <= VERDICTS.index(threshold.value)
