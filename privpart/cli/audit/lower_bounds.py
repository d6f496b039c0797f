"""Lower bounds: audit a run by its canaries, or a plan by a replica of its server."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress

from accounting import Guarantee
from accounting.checks import ConfigError
from accounting.report import up
from attacks.lower_bounds.bounds import Bound
from attacks.lower_bounds.planted import canary_clients
from privpart.cli.audit.engine_path import engine_checks
from privpart.cli.audit.replica import Replica, Scored, Step, canary_scores
from privpart.cli.audit.verdict import EpsilonAudit, judged
from privpart.cli.audit.whole_path import PlannedPath, replay_path
from privpart.cli.options import Format
from privpart.cli.output import print_result
from privpart.cli.pages import drawing, plots
from privpart.cli.trainings import tell_of_code
from privpart.model import PartialModel
from privpart.plan import PrivacyPlan
from privpart.run.canaries import AUDIT_REPORT, read_canary_key, read_releases
from privpart.run.ledger import Ledger, Row
from privpart.server import SERVER
from privpart.training.export import released_parameters
from privpart.training.plan_file import PlanFile, read
from privpart.training.train import kept_plan
from privpart.training.training import Training, training

PICTURE = "epsilon.png"
_MOST_VALUES = 5 * 10**7


def of_run(folder: Path, confidence: float) -> EpsilonAudit:
    """Audit a finished run by its canaries. Its folder is only read, and no code of it is run.

    Raises:
        ConfigError: it has no canaries, is not complete, or is not what the run wrote.
    """
    ledger = Ledger(folder)
    rows, histories = ledger.rows(), ledger.rounds_by_client()
    facts, rounds = ledger.facts, len(rows)
    # The key is checked against the hash that the ledger had before the first round.
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
    plan = kept_plan(facts, folder, None)
    table = plan.canaries
    if table is None or "parameters" not in facts:
        raise ConfigError(f"{folder}: the plan in its ledger has no canaries; it was changed.")
    planted = canary_clients(
        promised.mechanism,
        promised.participation,
        dim=sum(math.prod(shape) for _, shape in facts["parameters"]),
        momentum=plan.server.momentum,
        key=key,
        **table.model_dump(),
    )
    # A canary whose update was refused would score as absent.
    for client, planned in planted.expected().items():
        if list(planned) != list(histories.get(client, ())):
            raise ConfigError(
                f"{folder}: {client} did not take part as its coin says, so the scores would be "
                "wrong. Its update was refused, or the files are not those of this run."
            )
    releases = read_releases(folder, planted.width, rounds)
    # Of the rows of products, the last is the only one whose model is kept.
    products = planted.project(released_parameters(folder)[0]).numpy()
    if not abs(products - releases[-1]).max() <= 1e-9 * abs(products).max():
        raise ConfigError(
            f"{folder}: the last row of canary-releases is not that of the released model: it is "
            "damaged or of another run. Restore it."
        )
    scores, visible = planted.seen(
        releases,
        noise_multiplier=promised.update_noise_multiplier,
        clip_norm=promised.clip_norm,
        report_goal=promised.report_goal,
        learning_rate=plan.server.learning_rate,
    )
    about = {
        "run_id": facts["run_id"],
        "plan": promised.hash,
        "other_clients": "unknown to the auditor: what they add widens the scores",
        "clipping": _clipping(rows),
        "noise": "secret" if facts["seed"] is None else "seeded: a simulation",
    }
    return judged(
        about,
        _unsampled(promised),
        delta=facts["delta"],
        confidence=confidence,
        scored=Scored(scores, planted.present, float(visible.mean())),
    )


def _clipping(rows: Sequence[Row]) -> str:
    """Say which clip the canaries of a run passed."""
    summed = [row.clipped_by for row in rows if row.clipped_by.keys() != {SERVER}]
    if not summed:
        return "by the server, of canaries and other clients alike"
    # An engine that takes no canaries leaves them to the server.
    beside = sum(SERVER in clipped_by for clipped_by in summed)
    engines = ", ".join(sorted({name for clipped_by in summed for name in clipped_by} - {SERVER}))
    said = []
    if alike := len(summed) - beside:
        said.append(
            f"by {engines} in {alike} of {len(rows)} rounds, of canaries and other clients alike "
            "(a dense layer's ghost norms aside)"
        )
    if beside:
        said.append(
            f"in {beside} rounds by the server, of canaries, and by the engine, of the other "
            "clients, which is not tested"
        )
    return "; ".join(said)


def _unsampled(plan: PrivacyPlan) -> Guarantee:
    """Return the guarantee of a plan; an amplified one has no Gaussian to measure.

    Raises:
        ConfigError: the plan samples its clients, or its clip norm or divisor changes.
    """
    guarantee = plan.guarantee()
    if plan.clip_norms is not None or plan.report_goals is not None:
        raise ConfigError(
            "privacy.clip_norms, privacy.report_goals: canaries are scored for one clip norm and "
            "one divisor. Leave them out to audit the noise, which does not depend on them."
        )
    if isinstance(guarantee, Guarantee):
        return guarantee
    raise ConfigError(
        "privacy.sampling: which rounds a canary takes part in is chosen here, and drawn in a plan "
        "that samples; its amplified epsilon is not audited. Leave the table out to audit the "
        "noise."
    )


def of_plan(
    path: Path, confidence: float, seed: int, *, canaries: tuple[int, int] | None, replay: bool
) -> EpsilonAudit:
    """Audit a plan: canaries in a replica of its server, a replay of its whole path, or both.

    Canaries are their number per run, and of runs; None simulates none. Their noise and coins are
    those of ``seed``, and so are the clients of a replay.

    Raises:
        ConfigError: no server of this plan can be audited.
    """
    table = read(path)
    if table.select is not None:
        raise ConfigError(f"plan {path}: has [select], whose updates are slices; not audited.")
    setup, model = _setup(table, clients=replay)
    promised = table.privacy_plan(sizes=model.group_sizes)
    count, runs = canaries or (0, 0)
    claimed = _unsampled(promised) if runs else promised.guarantee()
    about = {
        "replica": True,
        "plan": table.hash,
        "parameters": model.flat.numel(),
        "other_clients": "simulated: known to the auditor and subtracted",
        "seed": seed,
        "server_optimizer": table.server.kind,
    }
    evidence: dict[str, Any] = {}
    if runs:
        replica = _replica(promised, model.flat.numel(), table)
        count = min(count, replica.dim)  # each canary needs a parameter of its own
        with _progress("rounds of the replica", replica.plan.rounds * runs) as step:
            scored = canary_scores(replica, count=count, runs=runs, seed=seed, step=step)
        evidence["scored"] = scored
        about |= {"runs": runs, "parameters_of_replica": replica.dim}
        about["server_optimizer_of_replica"] = replica.optimizer.kind
    if replay:
        tensors = [(name, view.numel()) for name, view in model.views(model.flat).items()]
        rates = table.learning_rates.server_share(promised.rounds)
        whole = PlannedPath(promised, tensors, table.server, rates)
        with _progress("rounds that are replayed", promised.rounds * (2 + whole.runs)) as step:
            replayed = replay_path(whole, seed=seed, step=step)
        checks = [*replayed.checks, *engine_checks(setup, promised)]
        evidence |= {"replays": [replayed.replay], "checks": checks, "of_replay": replayed.bound}
        about |= {"replayed_clients": replayed.clients, "replayed_runs": 2 + replayed.runs}
        about["parameters_of_replay"] = replayed.parameters
        if (mu := replayed.visible_mu) is not None:
            most = up(Guarantee(mu).epsilon(table.privacy.delta), 5)
            about["models_show"] = f"epsilon {most}, of the client that is seen best"
        about["server_optimizer_of_replica"] = whole.optimizer.kind
    return judged(about, claimed, delta=table.privacy.delta, confidence=confidence, **evidence)


def _setup(plan: PlanFile, *, clients: bool) -> tuple[Training | None, PartialModel]:
    """Return the model that a plan trains, and its training with the clients, if it is needed."""
    if plan.model.name is not None and not clients:
        return None, plan.model.partial(groups=plan.groups())
    tell_of_code(plan)
    setup = training(plan, report=lambda _: None)
    return setup, setup.model


def _replica(promised: PrivacyPlan, dim: int, plan: PlanFile) -> Replica:
    """Return a replica of a plan's server for canaries.

    A large model is replaced by a part of it: mu does not depend on the number of parameters.
    """
    size = dim
    # Groups have sizes of their own, so that a part of the model would be another mechanism.
    if promised.mechanism.groups is None:
        size = min(dim, _MOST_VALUES // promised.rounds)
    return Replica(promised, size, plan.server)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Step]:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda: progress.advance(bar)


def write(audit: EpsilonAudit, folder: Path, form: Format) -> None:
    """Write an audit's report and picture into a folder, and print it.

    Raises:
        ConfigError: the folder cannot be written.
    """
    report, picture = folder / AUDIT_REPORT, folder / PICTURE
    scored = audit.scored
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A link would be followed, and a pipe would wait for a reader.
        for path in (report, picture):
            path.unlink(missing_ok=True)
        report.write_text(json.dumps(audit.to_dict(), indent=2, allow_nan=False) + "\n")
        if scored is not None:
            figure = plots.scores_figure(scored.scores, scored.present, audit.mu or 0.0)
            drawing.save(figure, picture)
    except OSError as error:
        raise ConfigError(f"out={folder}: cannot be used: {error.strerror}.") from None
    lines = audit.lines()
    width = max(len(name) for name, _ in lines)
    text = "\n".join(f"  {name:<{width}} {value}" for name, value in lines)
    # Without a bound, a row whose fields of the bound are empty.
    empty = dict.fromkeys(field.name for field in fields(Bound)) | {"delta": audit.delta}
    verdict = {"verdict": audit.verdict, "epsilon_of_accountant": audit.epsilon}
    rows = [verdict | bound for bound in [asdict(bound) for bound in audit.bounds] or [empty]]
    print_result(form, audit.to_dict(), rows, lambda: typer.echo(text))
    written = f"{report}" if scored is None else f"{report}, {picture}"
    typer.echo(f"privpart: written: {written}", err=True)
