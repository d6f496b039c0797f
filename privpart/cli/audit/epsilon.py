"""``privpart audit epsilon``: lower bounds on the epsilon of a run, or of a replica of a plan."""

import json
import math
import secrets
from contextlib import contextmanager
from dataclasses import asdict, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import Guarantee, checks
from accounting.checks import ConfigError
from accounting.report import up
from privpart.cli.idle import beside, without
from privpart.cli.options import Format, HtmlOption
from privpart.cli.output import as_csv

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from attacks.lower_bounds.planted import PlantedCanaries
    from privpart.cli.audit.replica import Replica, Step
    from privpart.cli.audit.verdict import EpsilonAudit
    from privpart.plan import PrivacyPlan
    from privpart.training.plan_file import PlanFile

THRESHOLD_PASSED = 4
PICTURE = "epsilon.png"
_LEAST_CANARIES = 20
_MOST_VALUES = 5 * 10**7
_SIMULATED = "With --simulate"
_OF_A_RUN = beside("run", "has a plan, canaries and noise of its own")
_OF_CANARIES = without("simulate", "no canaries are simulated")


class ViolationOnly(StrEnum):
    """Verdicts that can fail a job."""

    VIOLATION = "violation"


class Observer(StrEnum):
    """Who looks for the canaries."""

    ALL = "all"
    LAST = "last"


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
            help="Run a replica of --plan twice with the same noise, with and without one client.",
        ),
        _OF_A_RUN,
    ] = False,
    count: Annotated[
        int,
        typer.Option(help="Canaries per run.", rich_help_panel=_SIMULATED),
        (_OF_A_RUN, _OF_CANARIES),
    ] = 1000,
    runs: Annotated[
        int,
        typer.Option(help="Number of runs.", rich_help_panel=_SIMULATED),
        (_OF_A_RUN, _OF_CANARIES),
    ] = 4,
    observer: Annotated[
        Observer,
        typer.Option(
            help="'all' sees the model of every round, 'last' the last one only.",
            rich_help_panel=_SIMULATED,
        ),
        (_OF_A_RUN, _OF_CANARIES),
    ] = Observer.ALL,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of the replica's noise and coins, to repeat an audit; default: a fresh one, "
            "which the report names. A seed that was chosen by its result proves nothing.",
            show_default=False,
        ),
        _OF_A_RUN,
    ] = None,
    confidence: Annotated[float, typer.Option(help="Of each bound, in (0, 1).")] = 0.95,
    fail_on: Annotated[
        ViolationOnly | None, typer.Option(help="Exit with 4 at a violation.")
    ] = None,
    html: HtmlOption = None,
    form: Annotated[
        Format, typer.Option("--format", help="table, json, or csv: a line per bound.")
    ] = Format.TABLE,
) -> None:
    """Bound epsilon from below, and compare it with what the accountant says.

    Of a run, from the canaries that its plan put among the clients; of a plan, from canaries or a
    paired replay on a replica of its server with simulated clients.

    Example: privpart audit epsilon --plan examples/digits.toml --simulate --replay --out audit
    """
    checks.probability("confidence", confidence)
    if run is not None:
        from privpart.run.canaries import AUDIT

        folder = run / AUDIT if out is None else out
        found = _of_run(run, confidence)
    else:
        if plan is None:
            raise ConfigError("run is missing: name the folder of a run, or a plan (--plan).")
        if not simulate and not replay:
            raise ConfigError("plan: say how to audit it: --simulate, --replay or both.")
        if out is None:
            raise ConfigError("out is missing: name a folder for the report (--out).")
        checks.count("count", count, minimum=_LEAST_CANARIES)
        checks.count("runs", runs)
        chosen = secrets.randbits(48) if seed is None else checks.count("seed", seed, minimum=0)
        folder = out
        found = _of_plan(
            plan, confidence, chosen, replay, (count, runs, observer) if simulate else None
        )
    _write(found, folder, form)
    if html is not None:
        from privpart.cli.pages.lower_bounds import lower_bounds_page

        lower_bounds_page(found).write(html)
    if fail_on is not None and found.verdict == "VIOLATION":
        raise typer.Exit(THRESHOLD_PASSED)


def _of_run(folder: Path, confidence: float) -> "EpsilonAudit":
    """Audit a finished run by its canaries. Its folder is only read, and no code of it is run."""
    from attacks.lower_bounds.planted import canary_clients
    from privpart.cli.audit.replica import Scored
    from privpart.cli.audit.verdict import judged
    from privpart.plan import PrivacyPlan
    from privpart.run.canaries import read_canary_key, read_releases
    from privpart.run.ledger import Ledger
    from privpart.training.train import kept_plan

    ledger = Ledger(folder)
    rows, histories = ledger.rows(), ledger.rounds_by_client()
    facts, rounds = ledger.facts, len(rows)
    key = read_canary_key(folder, facts)
    promised = PrivacyPlan.from_dict(facts["plan"])
    if "closed" in facts:
        raise ConfigError(
            f"{folder}: was ended after {rounds} of {promised.rounds} rounds, and canaries are "
            "scored over all rounds. Audit a replica of its plan (--plan FILE --simulate)."
        )
    if rounds < promised.rounds:
        raise ConfigError(
            f"{folder}: {rounds} of {promised.rounds} rounds are done, and coins stay secret until "
            "the end. Resume the run (privpart train --resume), then audit it."
        )
    kept = kept_plan(facts, folder, None)
    table = kept.canaries
    if table is None or "parameters" not in facts:
        raise ConfigError(f"{folder}: the plan in its ledger has no canaries; it was changed.")
    shapes = [shape for _, shape in facts["parameters"]]
    planted = canary_clients(
        promised.mechanism,
        promised.participation,
        dim=sum(math.prod(shape) for shape in shapes),
        momentum=kept.server.momentum,
        key=key,
        **table.model_dump(),
    )
    for client, own in planted.expected().items():
        if list(own) != list(histories.get(client, ())):
            raise ConfigError(
                f"{folder}: {client} did not take part as its coin says, so the scores would be "
                "wrong. Its update was refused, or the files are not those of this run."
            )
    releases = read_releases(folder, planted.width, rounds)
    _refuse_other_releases(folder, releases[-1], planted)
    seen = planted.seen(
        releases,
        noise_multiplier=promised.update_noise_multiplier,
        clip_norm=promised.clip_norm,
        report_goal=promised.report_goal,
        learning_rate=kept.server.learning_rate,
    )
    about = {
        "run_id": facts["run_id"],
        "plan": promised.hash,
        "observer": table.observer,
        "other_clients": "unknown to the auditor: what they add widens the scores",
        "clipping": _clipping_tested(sum(row.summed > 0 for row in rows), rounds),
        "noise": "secret" if facts["seed"] is None else "seeded: a simulation",
    }
    return judged(
        about,
        _unsampled(promised),
        delta=facts["delta"],
        confidence=confidence,
        scored=Scored(seen.scores, planted.present, float(seen.mu.mean())),
    )


def _clipping_tested(summed: int, rounds: int) -> str:
    """Say which updates of a run the server clipped, and an engine that sums in its place."""
    if not summed:
        return "by the server, of canaries and other clients alike"
    return (
        f"by the server, of canaries; in {summed} of {rounds} rounds the run's engine clipped the "
        "other clients, which is not tested"
    )


def _refuse_other_releases(
    folder: Path, last: "NDArray[np.float64]", planted: "PlantedCanaries"
) -> None:
    """Check the last row of products, the only one whose model is kept, against that model.

    Raises:
        ConfigError: it is another's.
    """
    from privpart.training.export import released_parameters

    products = planted.project(released_parameters(folder)[0]).numpy()
    if not abs(products - last).max() <= 1e-9 * abs(products).max():
        raise ConfigError(
            f"{folder}: the last row of canary-releases is not that of the released model: it is "
            "damaged or of another run. Restore it."
        )


def _unsampled(plan: "PrivacyPlan") -> Guarantee:
    """Return the guarantee of a plan; an amplified one has no Gaussian to measure.

    Raises:
        ConfigError: the plan samples its clients.
    """
    found = plan.guarantee()
    if not isinstance(found, Guarantee):
        raise ConfigError(
            "privacy.sampling: which rounds a canary takes part in is chosen here, and drawn in a "
            "plan that samples; its amplified epsilon is not audited. Leave the table out to audit "
            "the noise."
        )
    return found


def _of_plan(
    path: Path,
    confidence: float,
    seed: int,
    replay: bool,
    canaries: tuple[int, int, Observer] | None,
) -> "EpsilonAudit":
    """Audit a replica of a plan's server."""
    from privpart.cli.audit.replica import canary_scores, paired_replay
    from privpart.cli.audit.verdict import judged
    from privpart.training.plan_file import read

    table = read(path)
    replica, dim = _replica(table, path, replay)
    count, runs, observer = canaries or (0, 0, Observer.ALL)
    groups = replica.plan.mechanism.groups
    replayed = (1 + (1 if groups is None else len(groups.sizes))) * replay
    delta = table.privacy.delta
    with _progress(replica.plan.rounds * (runs + replayed)) as step:
        scored = None
        if canaries is not None:
            scored = canary_scores(
                replica, count=count, runs=runs, seed=seed, observer=observer.value, step=step
            )
        replays = (
            paired_replay(replica, seed=seed, delta=delta, confidence=confidence, step=step)
            if replay
            else []
        )
    about = {
        "replica": True,
        "plan": table.hash,
        "parameters": dim,
        "parameters_of_replica": replica.dim,
        "runs": runs,
        "observer": observer.value,
        "other_clients": "simulated: known to the auditor and subtracted",
        "clipping": "by the server; what an engine that hands over sums clips is not tested",
        "seed": seed,
        "server_optimizer": table.server.kind,
        "server_optimizer_of_replica": replica.optimizer.kind,
    }
    return judged(
        about,
        _unsampled(replica.plan),
        delta=delta,
        confidence=confidence,
        scored=scored,
        replays=replays,
    )


def _replica(plan: "PlanFile", path: Path, replay: bool) -> "tuple[Replica, int]":
    """Return a replica of a plan's server, and the number of parameters that the plan trains.

    A large model is replaced by a part of it: mu does not depend on the number of parameters.
    """
    from privpart.cli.audit.replica import MOST_KEPT, Replica
    from privpart.cli.train import tell_of_code
    from privpart.training.training import training

    if plan.select is not None:
        raise ConfigError(f"plan {path}: has [select], whose updates are slices; not audited.")
    if plan.model.builtin is not None:
        model = plan.model.partial(groups=plan.groups())
    else:
        tell_of_code(plan)
        model = training(plan, report=lambda _: None).model
    sizes = None if plan.schedule is None else model.group_sizes
    promised = plan.privacy_plan(sizes=sizes)
    dim = model.flat.numel()
    most = (MOST_KEPT if replay else _MOST_VALUES) // promised.rounds
    if promised.mechanism.groups is not None:
        most = dim
    tensors = [(name, view.numel()) for name, view in model.views(model.flat).items()]
    return Replica(promised, min(dim, most), plan.server, tensors=tensors), dim


@contextmanager
def _progress(total: int) -> "Iterator[Step]":
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("rounds of the replica", total=total)
        yield lambda: progress.advance(bar)


def _write(found: "EpsilonAudit", folder: Path, form: Format) -> None:
    from privpart.cli.pages import drawing, plots
    from privpart.run.canaries import AUDIT_REPORT

    values = found.to_dict()
    text = json.dumps(values, indent=2, allow_nan=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (AUDIT_REPORT, PICTURE):  # a link would be followed, and a pipe would wait
            (folder / name).unlink(missing_ok=True)
        (folder / AUDIT_REPORT).write_text(text + "\n")
        written = str(folder / AUDIT_REPORT)
        if found.scored is not None:
            scored = found.scored
            figure = plots.scores_figure(scored.scores, scored.present, found.claimed.mu)
            drawing.save(figure, folder / PICTURE)
            written += f", {folder / PICTURE}"
    except OSError as error:
        raise ConfigError(f"out={folder}: cannot be used: {error.strerror}.") from None
    if form is Format.JSON:
        typer.echo(text)
    elif form is Format.CSV:
        typer.echo(as_csv(_lines(found)), nl=False)
    else:
        _show(found)
    typer.echo(f"privpart: written: {written}", err=True)


def _lines(found: "EpsilonAudit") -> list[dict[str, Any]]:
    """Return a line per bound; without a bound, one line whose fields of the bound are empty."""
    from attacks.lower_bounds.bounds import Bound

    names = [field.name for field in fields(Bound)]
    own = {"verdict": found.verdict, "epsilon_of_accountant": found.epsilon}
    bounds = [asdict(bound) for bound in found.bounds] or [
        dict.fromkeys(names) | {"delta": found.delta}
    ]
    return [own | bound for bound in bounds]


def _show(found: "EpsilonAudit") -> None:
    """Print the audit as text."""
    about = found.about
    lines = [("verdict", found.verdict), *(("", reason) for reason in found.reasons)]
    lines.append(("accountant", f"epsilon {up(found.epsilon, 5)}, mu {up(found.claimed.mu, 5)}"))
    lines.append(("delta", f"{found.delta:g}"))
    scored = found.scored
    if "noise" in about:
        lines.append(("noise", about["noise"]))
    if scored is not None:
        looks = "all released models" if about["observer"] == "all" else "the last model only"
        lines.append(
            (
                "canaries",
                f"{len(scored.scores)}, {int(scored.present.sum())} took part; seen are {looks}",
            )
        )
        lines.append(("visible", f"mu {up(scored.mu, 5)}, {found.visible:.0%} of the accountant's"))
        lines.append(("others", about["other_clients"]))
    if "clipping" in about:
        lines.append(("clipping", about["clipping"]))
    for replay in found.replays:
        lines.append(
            (
                "replay",
                f"signal {replay.signal:.5f} clip norms, noise {replay.sigma:.5f}, of the plan "
                f"{replay.planned:g} ({replay.draws:,} draws)",
            )
        )
    if about.get("parameters_of_replica", 0) < about.get("parameters", 0):
        lines.append(
            (
                "replica",
                f"{about['parameters_of_replica']:,} of {about['parameters']:,} parameters",
            )
        )
    if about.get("server_optimizer") != (used := about.get("server_optimizer_of_replica")):
        lines.append(("optimiser", f"{used} in place of {about['server_optimizer']}"))
    lines += [("bound", str(bound)) for bound in found.bounds]
    lines.append(("compared", found.comparison()))
    lines.append(("measured", found.measured()))
    for name, value in lines:
        typer.echo(f"  {name:<11} {value}")
