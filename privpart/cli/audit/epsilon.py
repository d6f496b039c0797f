"""``privpart audit epsilon``: lower bounds on the epsilon of a run, or of a replica of a plan."""

import secrets
from pathlib import Path
from typing import Annotated, Literal

import typer

from accounting import checks
from accounting.checks import ConfigError
from privpart.cli.idle import beside, without
from privpart.cli.options import FormatOption, HtmlOption

THRESHOLD_PASSED = 4
CONFIDENCE = 0.95
"""Of each bound that an audit prints."""
_CANARIES = 1000
"""Canaries per run of a replica."""
_SIMULATED = "With --simulate"
_OF_A_RUN = beside("run", "has a plan, canaries and noise of its own")
_OF_CANARIES = without("simulate", "no canaries are simulated")


def epsilon(
    run: Annotated[
        Path | None, typer.Argument(help="Folder of a finished run whose plan had [canaries].")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Plan whose server is run again; nothing real is touched."),
        _OF_A_RUN,
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report.json and epsilon.png; default: RUN/audit."),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Run a replica of --plan with canaries."), _OF_A_RUN
    ] = False,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="Run the whole path of --plan with clients whose contributions are known.",
        ),
        _OF_A_RUN,
    ] = False,
    runs: Annotated[
        int,
        typer.Option(help="Number of runs.", rich_help_panel=_SIMULATED),
        (_OF_A_RUN, _OF_CANARIES),
    ] = 4,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of the replica's noise and coins, to repeat an audit; default: a fresh one, "
            "which the report names. A seed that was chosen by its result proves nothing.",
            show_default=False,
        ),
        _OF_A_RUN,
    ] = None,
    fail_on: Annotated[
        Literal["violation"] | None, typer.Option(help="Exit with 4 at a violation.")
    ] = None,
    html: HtmlOption = None,
    form: FormatOption = "table",
) -> None:
    """Bound epsilon from below, and compare it with what the accountant says.

    Of a run, from the canaries that its plan put among the clients; of a plan, from canaries in a
    replica of its server, or a replay of its whole path, with simulated clients.

    Example: privpart audit epsilon --plan examples/digits.toml --simulate --replay --out audit
    """
    if run is None:
        if plan is None:
            raise ConfigError("run is missing: name the folder of a run, or a plan (--plan).")
        if not simulate and not replay:
            raise ConfigError("plan: pass --simulate, --replay or both to say how to audit it.")
        if out is None:
            raise ConfigError("out is missing: name a folder for the report (--out).")
        checks.count("runs", runs)
        seed = secrets.randbits(48) if seed is None else checks.count("seed", seed, minimum=0)
    # Imported here: the other commands must not pay for torch.
    from privpart.cli.audit import lower_bounds
    from privpart.run.canaries import AUDIT

    if run is not None:
        audit, folder = lower_bounds.of_run(run, CONFIDENCE), out or run / AUDIT
    else:
        assert plan is not None  # noqa: S101  refused above
        assert seed is not None  # noqa: S101
        assert out is not None  # noqa: S101
        folder, canaries = out, (_CANARIES, runs) if simulate else None
        audit = lower_bounds.of_plan(plan, CONFIDENCE, seed, canaries=canaries, replay=replay)
    lower_bounds.write(audit, folder, form)
    if html is not None:
        from privpart.cli.pages.lower_bounds import lower_bounds_page

        lower_bounds_page(audit).write(html)
    if fail_on is not None and audit.verdict == "VIOLATION":
        raise typer.Exit(THRESHOLD_PASSED)
