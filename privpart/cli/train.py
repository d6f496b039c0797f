"""``privpart train``: run a plan in a folder, from the start or from where it stopped."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accounting import ConfigError, checks
from privpart.cli import options
from privpart.cli.options import Format

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from privpart.plan_file import PlanFile
    from privpart.run_folder import RunFolder

_INTERRUPTED = 130
_PLAN = "plan.toml"


def train(
    out: Annotated[Path, typer.Option(help="Folder of the run.")],
    plan: Annotated[
        Path | None, typer.Option(help="TOML file with the whole training; for a new run.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt",
            help="With --resume: go on although this machine never saw the run. You vouch that "
            "the original will never be continued.",
        ),
    ] = False,
    fork_of: Annotated[
        Path | None,
        typer.Option(
            help="Begin from the model of another run, with a new key; its cost is added."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Noise from a seed, for simulations: the run is then NOT private."),
    ] = None,
    evaluate_every: Annotated[
        int, typer.Option(help="Rounds between evaluations on the test images.")
    ] = 10,
    workers: Annotated[
        int, typer.Option(help="Processes that simulate clients; 1 uses this one.")
    ] = 1,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write evaluations for TensorBoard, too.")
    ] = False,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Train under a plan; every round is committed to the folder before its model is released.

    Ctrl-C, a crash or a full disk leave a run that --resume goes on with. Evaluations are in
    metrics.jsonl and metrics.csv of the folder.

    Example: privpart train --plan examples/digits.toml --out run
    """
    from privpart.run_report import run_report

    if resume:
        if plan is not None or fork_of is not None or seed is not None:
            raise ConfigError(
                "resume=True: the run has its plan, its start and its noise; leave out --plan, "
                "--fork-of and --seed."
            )
        run, kept = _resumed(out, adopt)
    elif plan is None or adopt:
        raise ConfigError("plan is missing: pass --plan FILE to begin a run, or --resume.")
    else:
        run, kept = _begun(plan, out, fork_of, seed)
    with run:
        _train(
            run,
            kept,
            checks.count("evaluate_every", evaluate_every),
            workers=checks.count("workers", workers),
            tensorboard=tensorboard,
        )
    from privpart.cli.report import print_run

    print_run(run_report(out), form)


def _resumed(out: Path, adopt: bool) -> "tuple[RunFolder, PlanFile]":
    """Open a run; return it with the plan that its ledger keeps."""
    from privpart.plan_file import parse
    from privpart.run_folder import RunFolder

    run = RunFolder.open(out, adopt=adopt)
    try:
        kept = parse(run.facts.get("plan_file", ""), name=f"the plan of {out}")
        if kept.hash != run.plan.context:
            raise ConfigError(f"{out}: the plan file in the ledger is not the run's.")
    except BaseException:
        run.close()
        raise
    return run, kept


def _begun(
    plan: Path, out: Path, fork_of: Path | None, seed: int | None
) -> "tuple[RunFolder, PlanFile]":
    """Begin a run; return it with its plan."""
    from privpart.durable import write_durably
    from privpart.fork import fork
    from privpart.plan_file import read
    from privpart.run_folder import RunFolder

    chosen, text = read(plan), plan.read_text(encoding="utf-8")
    facts = {"delta": chosen.privacy.delta, "plan_file": text}
    if fork_of is None:
        run = RunFolder.create(out, chosen.privacy_plan(), seed=seed, facts=facts)
    elif seed is None:
        run = fork(fork_of, out, chosen.privacy_plan(), facts=facts)
    else:
        raise ConfigError(f"seed={seed}: a fork of a private run needs a secret key.")
    write_durably(out / _PLAN, text.encode())  # for people; the ledger's copy counts
    return run, chosen


def _train(
    run: "RunFolder", plan: "PlanFile", evaluate_every: int, *, workers: int, tensorboard: bool
) -> None:
    import torch

    from privpart.callbacks import Callback, MetricsFiles, ProgressBar, TensorBoard
    from privpart.loop import fit
    from privpart.server import Server
    from privpart.training import training

    torch.set_num_threads(1)  # small models lose time to more, and the result to none
    source = run.source()
    # noise from a seed is for runs that can be repeated: then their clients must not depend on
    # what a probe of the machine said
    setup = training(plan, workers=workers, deterministic=not source.private)
    server = Server(run.plan, setup.model.flat, source=source, optimizer=plan.server)
    run.restore(server)
    with ExitStack() as open_:
        open_.enter_context(setup.engine)
        progress = open_.enter_context(ProgressBar(run.plan.rounds, done=server.round))
        callbacks: list[Callback] = [progress, MetricsFiles(run.path)]
        if tensorboard:
            callbacks.append(open_.enter_context(TensorBoard(run.path / "tensorboard")))
        try:
            fit(
                server,
                setup.engine,
                setup.cohorts,
                commit=run.commit,
                evaluate=setup.accuracy,
                evaluate_every=evaluate_every,
                callbacks=callbacks,
            )
        except KeyboardInterrupt:
            progress.close()
            typer.echo(
                f"privpart: interrupted; {run.rounds} of {run.plan.rounds} rounds are committed. "
                f"Go on with: privpart train --resume --out {run.path}",
                err=True,
            )
            raise typer.Exit(_INTERRUPTED) from None
