"""``privpart train``: run a plan in a folder, from the start or where it stopped, or end it."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from accounting import ComposedGuarantee, ConfigError, checks
from accounting.claims import releases_of
from privpart.cli import options
from privpart.cli.gate import judged_plan, leave_if_refused
from privpart.cli.idle import Alone, Idle, beside, typed, without
from privpart.cli.options import Format
from privpart.cli.output import WIDTH, say
from privpart.cli.trainings import INTERRUPTED, tell_of_code
from privpart.engines.options import Batching, EngineOptions, Precision

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from typing import Any

    from attacks.lower_bounds.planted import PlantedCanaries
    from privpart.run.folder import RunFolder
    from privpart.training.plan_file import PlanFile
    from privpart.training.training import Training

_ENGINE = "Simulated clients: speed, never the guarantee"
_DEFAULTS = EngineOptions()


def train(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder of the run.")],
    plan: Annotated[
        Path | None, typer.Option(help="TOML file with the whole training; for a new run.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out.")] = False,
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt",
            help="With --resume or --close: take a copy of which this machine did not see every "
            "round. You vouch that no other copy will ever be continued.",
        ),
        Idle("resume", lambda v: not (v["resume"] or v["close"]), "there is no run to adopt"),
    ] = False,
    close: Annotated[
        bool,
        typer.Option(
            "--close",
            help="End the run in --out early, for good: erase its keys and its noise, and keep the "
            "model of the last round.",
        ),
        Alone("only ends a run", ("out", "adopt", "yes")),
    ] = False,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="With --close: do not ask; needed in scripts."),
        without("close", "nothing is asked"),
    ] = False,
    fork_of: Annotated[
        Path | None,
        typer.Option(
            help="Start from the model of another run, with a new key; its cost is added."
        ),
        beside("resume", "the run has its start and its noise"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Take the noise from this seed, for simulations: the run is then NOT private."
        ),
        (
            beside("resume", "the run has its start and its noise"),
            beside("fork_of", "a fork of a private run has a secret key"),
        ),
    ] = None,
    record_sums: Annotated[
        bool,
        typer.Option(
            "--record-sums",
            help="Keep each round's sum in the folder, so that `privpart verify --replay` can "
            "repeat the run: with --seed, or for a built-in task, whose data are public.",
        ),
        beside("resume", "it was decided when the run began"),
    ] = False,
    policy: Annotated[
        options.PolicyOption, beside("resume", "it was judged when the run began")
    ] = None,
    evaluate_every: Annotated[
        int, typer.Option(help="Rounds between evaluations on the test images.")
    ] = 10,
    workers: Annotated[
        int,
        typer.Option(
            help="Processes that simulate clients; 1 uses this process.", rich_help_panel=_ENGINE
        ),
    ] = _DEFAULTS.workers,
    batching: Annotated[
        Batching,
        typer.Option(
            help="'loop' computes one client after another, 'vmap' vectorizes over many; 'auto' "
            "takes the fastest way for the network and the training. With noise from a seed, "
            "'auto' is 'loop', so that the run can be repeated.",
            rich_help_panel=_ENGINE,
        ),
    ] = _DEFAULTS.batching,
    precision: Annotated[
        Precision | None,
        typer.Option(
            help="'bfloat16' rounds the factors of the clients' products to 8 bits. It is faster "
            "for large layers on processors with bfloat16 instructions, and slower for small "
            "networks. Updates and clipping stay float32. 'tf32' lets a CUDA device round them to "
            "10 bits. Default: float32, and with --resume what the run began with; it may change "
            "there, which does not affect privacy, but not with noise from a seed.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="Where clients are computed: 'cpu', or an accelerator such as 'cuda' or 'cuda:1', "
            "with one process and without --seed. It may change with --resume.",
            rich_help_panel=_ENGINE,
        ),
    ] = str(_DEFAULTS.device),
    form: options.FormatOption = "table",
) -> None:
    """Train under a plan; every round is committed to the folder before its model is released.

    After Ctrl-C, a crash or a full disk, --resume continues the run. Evaluations are in
    metrics.jsonl of the folder.

    As long as a run can be resumed, its folder holds the noise key, with which the noise can be
    removed from every released model. A complete run has erased it; --close does it for a run that
    will not be completed. It cannot be undone.

    Example: privpart train --plan examples/digits.toml --out run

    Example: privpart train --close --out run
    """
    if close:
        _close(out, adopt=adopt, is_asked=not yes)
        return
    checks.count("evaluate_every", evaluate_every)
    engine: dict[str, Any] = {"workers": workers, "batching": batching, "device": device}
    engine |= {} if precision is None else {"precision": precision}
    of_a_new_run = EngineOptions(**engine)

    def about(chosen: "PlanFile") -> None:
        measured = chosen.data.task is not None or chosen.data.metric is not None
        if not measured and "evaluate_every" in typed(context):
            raise ConfigError(
                "data.metric: the plan has none to evaluate by; leave out --evaluate-every."
            )
        tell_of_code(chosen)

    # what the plan's code prints is no part of the result
    with redirect_stdout(sys.stderr):
        from privpart.cli.budget.promise import Promise
        from privpart.training.plan_file import read
        from privpart.training.train import begin, has_stopped, resume_run

        if resume:
            if not has_stopped(out, plan=plan, adopt=adopt):
                resumed = resume_run(
                    out, plan=plan, adopt=adopt, canaries=_canaries, options=engine, tell=about
                )
                _train(*resumed, evaluate_every)
        elif plan is None:
            raise ConfigError("plan is missing: pass --plan FILE to begin a run, or --resume.")
        else:
            chosen = read(plan)
            if policy is not None:
                promise, earlier = Promise.planned(plan, None), _earlier(fork_of)
                leave_if_refused(judged_plan(policy, promise, earlier=earlier, seed=seed))
            about(chosen)
            begun = begin(
                chosen,
                out,
                fork_of=fork_of,
                seed=seed,
                canaries=_canaries,
                record_sums=record_sums,
                options=of_a_new_run,
            )
            _train(*begun, evaluate_every)
    _tell(out, form)


def _earlier(fork_of: Path | None) -> ComposedGuarantee | None:
    """Return what the run cost that another one is to be forked from, and those before it."""
    if fork_of is None:
        return None
    from privpart.run.report import run_report

    # For the cost, which does not depend on delta.
    return ComposedGuarantee(releases_of(run_report(fork_of, delta=0.5).guarantee.cost))


def _tell(run: Path, form: Format) -> None:
    from privpart.cli.report import print_run
    from privpart.plan import PrivacyPlan
    from privpart.run.ledger import Ledger
    from privpart.run.report import run_report, select_lines

    facts = Ledger(run).facts
    plan = PrivacyPlan.from_dict(facts["plan"])
    if (closed := facts.get("closed")) is not None:
        reason = f": {closed['reason']}" * bool(closed["reason"])
        say(
            f"the training stopped itself after {closed['rounds']} of {plan.rounds} "
            f"rounds{reason}. The run is finished."
        )
    if plan.noise_multiplier == 0:
        say("this plan adds no noise, so there is no guarantee.")
        for line in select_lines(None, facts["delta"], facts.get("seen_in_clear")) or ():
            say(line)
    else:
        print_run(run_report(run), form)


def _close(out: Path, *, adopt: bool, is_asked: bool) -> None:
    """End a run early, and print what was done and what its report then covers."""
    from privpart.run.folder import RunFolder

    with RunFolder.open(out, adopt=adopt) as run:
        planned = run.plan.rounds
        # A complete run has erased its keys already, so there is nothing to ask.
        if is_asked and run.rounds < planned:
            if not sys.stdin.isatty():
                raise ConfigError(
                    f"{out}: not a terminal, cannot ask. Nothing changed; pass --yes."
                )
            question = f"End {out} after {run.rounds} of {planned} rounds, for good?"
            typer.confirm(question, abort=True, err=True)
        run.end_early()
    lines = (
        f"{out}: ended after {run.rounds} of {planned} rounds; it cannot be resumed.",
        "Its keys and its noise state are erased. The keys were overwritten first; a disk of flash "
        "memory, a file system that copies on write, a snapshot or a backup may keep them.",
        _covered(run),
    )
    typer.echo("\n".join(fill(line, WIDTH) for line in lines))


def _covered(run: "RunFolder") -> str:
    """Return what the report of a run that was ended early covers."""
    from privpart.run.lives import life

    if run.rounds:
        return (
            f"The model after round {run.rounds} stays, and can be exported. `privpart report "
            f"{run.path}` covers the {run.rounds} released rounds by the guarantee of all "
            f"{run.plan.rounds} planned rounds: ending early does not lower epsilon."
        )
    if run.facts["seed"] is None and not life(run.facts["run_id"]).is_free:
        return (
            "This copy released no model. Whether others did is not known here, so the budget book "
            "charges the whole plan."
        )
    return "No model was released, so nobody has seen anything of this run."


def _canaries(*arguments: "Any", **options: "Any") -> "PlantedCanaries":  # noqa: ANN401
    """Return the canaries of a plan's table; runs without them never import the attacks."""
    from attacks.lower_bounds.planted import canary_clients

    return canary_clients(*arguments, **options)


def _train(run: "RunFolder", setup: "Training", evaluate_every: int) -> None:
    from privpart.training.train import finish

    with run:
        try:
            finish(run, setup, evaluate_every)
        except KeyboardInterrupt:
            say(
                f"interrupted; {run.rounds} of {run.plan.rounds} rounds are committed. "
                f"Resume with: privpart train --resume --out {run.path}"
            )
            raise typer.Exit(INTERRUPTED) from None
