"""ServerApp: trains a plan in a run folder over a federation, and resumes the run that is there.

The server's own loop, admission, ledger and report are those of one process. Flower authenticates
nodes if the SuperLink was started so, which the ServerApp cannot see: it is declared when the run
is made, and kept in its ledger.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from accounting import checks
from accounting.checks import ConfigError
from privpart.engines.options import EngineOptions
from privpart.flower.agreement import Report, agreement, flower, id_of, to_stderr
from privpart.flower.engine import FlowerEngine
from privpart.flower.living import Living
from privpart.flower.mail import hosted
from privpart.flower.secure import SecureFlowerEngine, read_roster
from privpart.loop import Callback, RoundRecord
from privpart.messages import ClientId
from privpart.model import PartialModel
from privpart.plan import PrivacyPlan
from privpart.run.evidence import public_key_of
from privpart.run.folder import RunFolder, holds_a_run
from privpart.run.ledger import Ledger
from privpart.run.members import NODE_KEYS, OPERATOR, Statements
from privpart.run.report import AUTHENTICATED, DEADLINE, FIRST_ANSWERS
from privpart.training.callbacks import Logger, callbacks_of
from privpart.training.plan_file import PlanFile, read
from privpart.training.train import (
    PLAN,
    CanaryMaker,
    begin,
    canaries_of,
    finish,
    has_stopped,
    kept_plan,
    resume_run,
)
from privpart.training.training import Own, Training, refuse_over_network


def server_app(
    plan: str | Path,
    *,
    callbacks: Sequence[Callback | Logger] = (),
    canaries: CanaryMaker | None = None,
) -> Any:  # noqa: ANN401
    """Return Flower's ServerApp: it trains a plan in a run folder, or resumes the run there.

    Its settings are those of the app's own table ``[tool.flwr.app.config]``, by the names of
    ``Settings``, so that ``flwr run --run-config`` can set them.

    Args:
        plan: path of the plan file.
        callbacks: called after each committed round, or loggers; see ``privpart.train``.
        canaries: ``attacks.canary_clients``, for a plan with a table [canaries], which a node of
            the auditor's answers for; see ``client_app``.
    """
    flower()
    import flwr.serverapp

    def main(grid: Any, context: Any) -> None:  # noqa: ANN401  Flower's Grid and Context
        try:
            settings = Settings.of(context.run_config)
            serve(grid, Path(plan), settings, callbacks=callbacks, canaries=canaries)
        except Exception as error:
            to_stderr(f"the run has stopped: {error}")
            if isinstance(error, ConfigError):
                # Flower logs a trace, which says nothing of a wrong setting
                raise error.with_traceback(None) from None
            raise

    app = flwr.serverapp.ServerApp()
    app.main()(main)
    return app


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a ServerApp runs.

    Attributes:
        out: absolute path of the run folder, outside the app, whose files Flower copies.
        nodes: how many nodes must say which clients they have before the run begins.
        authenticated: whether the SuperLink runs with --enable-supernode-auth. Only then are
            limits on participation verified; the ledger keeps this.
        timeout: seconds to wait for the answers of a round.
        start_timeout: seconds to wait until ``nodes`` said which clients they have; None: timeout.
        first_answers: whether a round ends with the plan's ``report_goal`` answers, of more clients
            that were asked; see ``enough`` of ``FlowerEngine``. The ledger keeps this.
        deadline_percentile: ends a round by how long answers of past rounds took; see
            ``percentile`` of ``FlowerEngine``. The ledger keeps this.
        attempts: how often a round is tried that has too few answers.
        seed: takes the noise from a seed, for simulations: the run is then not private.
        evaluate_every: rounds between evaluations by the plan's metric.
        operator: public key, in hex, of whoever may move clients to another node; the ledger keeps
            it. See ``sign_move``.
        moves: absolute path of the file of what the operator signed, read between rounds.
        roster: path of the parties' public keys, for a plan with secure sums; see ``read_roster``.

    Raises:
        ConfigError: a value of another type or out of range.
    """

    out: str
    nodes: int
    authenticated: bool
    timeout: float = 3600.0
    start_timeout: float | None = None
    first_answers: bool = False
    deadline_percentile: float | None = None
    attempts: int = 3
    seed: int | None = None
    evaluate_every: int = 10
    operator: str | None = None
    moves: str | None = None
    roster: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.out, str) or not Path(self.out).is_absolute():
            raise ConfigError(
                f"out={self.out!r}: must be an absolute path. Flower runs a copy of the app, whose "
                "folder is not kept."
            )
        for name in ("authenticated", "first_answers"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name}={value!r}: must be true or false.")
        for name in ("nodes", "attempts", "evaluate_every"):
            checks.count(name, getattr(self, name))
        checks.positive("timeout", self.timeout)
        if self.start_timeout is not None:
            checks.positive("start_timeout", self.start_timeout)
        if (percentile := self.deadline_percentile) is not None:
            fault = "must be above 0 and at most 100"
            checks.between(DEADLINE, checks.positive(DEADLINE, percentile), 0, 100, fault)
        if self.seed is not None:
            checks.count("seed", self.seed, minimum=0)
        self._refuse_files()

    def _refuse_files(self) -> None:
        if self.roster is not None and not Path(str(self.roster)).is_absolute():
            raise ConfigError(f"roster={self.roster!r}: must be an absolute path, as out.")
        if self.operator is not None:
            public_key_of(self.operator)
        if self.moves is not None and (self.operator is None or not Path(self.moves).is_absolute()):
            raise ConfigError(
                f"moves={self.moves!r}: must be an absolute path, beside the operator who signs."
            )

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Settings":
        """Return the settings of an app's table.

        Raises:
            ConfigError: one is missing, or a name is almost that of one.
        """
        known = [field.name for field in fields(cls)]
        # others may be for clients of one's own
        for name in sorted(config.keys() - known):
            if near := difflib.get_close_matches(name.replace("-", "_"), known, 1, 0.8):
                raise ConfigError(f"{name}: is not a setting; write {near[0]}, or rename yours.")
        for name in ("out", "nodes", "authenticated"):
            if name not in config:
                raise ConfigError(f"{name}: is missing in [tool.flwr.app.config].")
        return cls(**{name: config[name] for name in known if name in config})


def serve(
    grid: Any,  # noqa: ANN401  Flower's Grid
    plan: Path,
    settings: Settings,
    *,
    callbacks: Sequence[Callback | Logger] = (),
    canaries: CanaryMaker | None = None,
    poll: float = 3.0,
    report: Report | None = None,
) -> None:
    """Begin the run of a plan over a federation, or resume it, and train to its end.

    Raises:
        ConfigError: see ``privpart.train``; or the run was made with other settings.
        BudgetExceededError, CohortTooSmallError, StorageError: see ``privpart.train``.
    """
    out, chosen, say = Path(settings.out), read(plan), report or to_stderr
    refuse_over_network(chosen)
    checks.refuse_first(
        {
            "canaries: a table [canaries] in the plan goes with server_app(..., "
            "canaries=attacks.canary_clients); give both, or neither.": (
                (chosen.canaries is None) != (canaries is None)
            )
        }
    )
    made = _engine(chosen, settings)
    resumes = holds_a_run(out)
    recorded = _recorded_owners(out, settings, chosen) if resumes else None
    named_keys = Ledger(out).facts.get(NODE_KEYS, {}) if resumes else {}
    recorded_keys = {int(node): key for node, key in named_keys.items()}
    given = callbacks_of(callbacks)
    if resumes and has_stopped(out):
        say(f"{out}: the training stopped itself; the run is finished.")
        return

    def remote(model: PartialModel) -> FlowerEngine:
        owners, timeout, keys = recorded, settings.timeout, dict(recorded_keys)
        promised = chosen.privacy_plan(code=chosen.code(), sizes=model.group_sizes)
        # without authentication a node that was started again is a new one
        if owners is None or not settings.authenticated:
            agreed, patience = agreement(model, promised.hash), settings.start_timeout or timeout
            named = hosted(
                grid, agreed, settings.nodes, timeout=patience, poll=poll, report=say, keys=keys
            )
            owners = {c: named.get(c, node) for c, node in (recorded or named).items()}
        planted = _planted_ids(chosen, promised, canaries, model.dim, owners)
        return made(
            grid,
            model,
            owners,
            keys=keys if settings.authenticated else {},
            most_answers=promised.participation.max_participations,
            planted=planted,
            minimum=chosen.privacy.minimum_cohort,
            authenticated=settings.authenticated,
            enough=promised.report_goal_at if settings.first_answers else None,
            timeout=timeout,
            percentile=settings.deadline_percentile,
            attempts=settings.attempts,
            poll=poll,
            report=say,
        )

    objects = Own(remote=remote)
    if resumes:
        run, setup = resume_run(out, plan=chosen, objects=objects, canaries=canaries, options={})
    else:
        run, setup = begin(
            chosen,
            out,
            objects=objects,
            canaries=canaries,
            seed=settings.seed,
            own={} if settings.operator is None else {OPERATOR: settings.operator},
            options=EngineOptions(),
        )
    last = run.plan.rounds

    def tell(record: RoundRecord) -> None:
        metrics = "".join(f"; {name} {value:.4g}" for name, value in record.metrics.items())
        if record.round < 0:
            say(f"before training{metrics}.")
        else:
            say(f"round {record.round} is committed, of {last} from 0{metrics}.")

    with run:
        say(f"{run.path}: {run.rounds} of {last} rounds are committed.")
        engine = cast("FlowerEngine", setup.trainer)
        engine.run_id, engine.sign = run.facts["run_id"], Statements(run.path).add
        setup, watchers = _living(engine, run, setup, settings, poll, say)
        watchers = [tell, *watchers, *given]
        finish(run, setup, settings.evaluate_every, callbacks=watchers, progress=False)


def _living(
    engine: FlowerEngine,
    run: RunFolder,
    setup: Training,
    settings: Settings,
    poll: float,
    report: Report,
) -> tuple[Training, list[Callback]]:
    """Return the training with cohorts that nodes may join, and what looks for them."""
    if not settings.authenticated or setup.plan.canaries is not None or run.plan.secure is not None:
        if settings.moves is not None:
            raise ConfigError(
                "moves: clients move between authenticated nodes only, of a plan without canaries "
                "and secure sums; leave it out."
            )
        return setup, []
    living = Living(engine, run, setup, settings.moves, report)
    if not run.is_new:
        living.settle(settings.start_timeout or settings.timeout, poll)
    return replace(setup, cohorts=living.cohorts), [living.look]


def _engine(plan: PlanFile, settings: Settings) -> Callable[..., FlowerEngine]:
    """Return what makes the engine: one of secure sums if the plan has them, and a roster."""
    rules, asked = plan.privacy.secure, plan.data.clients_per_round
    goals = plan.privacy.report_goals
    least = plan.privacy.report_goal if goals is None else min(goals.value)
    if settings.first_answers and (rules is not None or not (least and asked and least < asked)):
        raise ConfigError(
            "first_answers: needs clients_per_round above report_goal in the plan, and no secure "
            "sums, whose rounds end with those that the parties signed; or leave it out."
        )
    if settings.deadline_percentile is not None and rules is not None:
        raise ConfigError(
            f"{DEADLINE}: not with secure sums, whose stages wait for timeout. Leave it out."
        )
    if (rules is None) != (settings.roster is None):
        raise ConfigError(
            "roster: goes with [privacy.secure] of the plan, whose parties it lists; give both, or "
            "neither."
        )
    if rules is None:
        return FlowerEngine
    roster = read_roster(Path(settings.roster or ""))
    return partial(SecureFlowerEngine, rules=rules, roster=roster)


def _planted_ids(
    plan: PlanFile,
    promised: PrivacyPlan,
    canaries: CanaryMaker | None,
    dim: int,
    owners: Mapping[ClientId, int],
) -> Sequence[ClientId]:
    """Return the ids of the plan's canaries, absent ones included.

    Raises:
        ConfigError: no node answers for one of them.
    """
    if canaries is None:
        return ()
    ids = canaries_of(plan, promised, canaries, dim).ids
    if missing := [client for client in ids if client not in owners]:
        raise ConfigError(
            f"canaries: no node answers for {missing[0]!r}. Start the auditor's, whose app is "
            "client_app(..., canaries=attacks.canary_clients)."
        )
    return ids


def _recorded_owners(out: Path, settings: Settings, plan: PlanFile) -> dict[ClientId, int]:
    """Return the node of each client, as the ledger of a run has it.

    Raises:
        ConfigError: the run is of one machine, of another plan, or was made with other settings.
    """
    # facts only: the run is not opened before its settings are known to agree
    facts = Ledger(out).facts
    if "owners" not in facts:
        raise ConfigError(f"{out}: is not a run over Flower; continue it with privpart train.")
    if kept_plan(facts, out, None).hash != plan.hash:
        raise ConfigError(
            f"plan.toml: is not the plan of the run in {out}, which {out / PLAN} holds. Put that "
            "one back, or set another out."
        )
    recorded = {
        "authenticated": facts["identity"] == AUTHENTICATED,
        FIRST_ANSWERS: facts.get(FIRST_ANSWERS, False),
        DEADLINE: facts.get(DEADLINE),
    }
    if settings.seed is not None:
        recorded["seed"] = facts["seed"]
    if settings.operator is not None:
        recorded[OPERATOR] = facts.get(OPERATOR)
    for name, was in recorded.items():
        if (given := getattr(settings, name)) != was:
            raise ConfigError(
                f"{name}={given}: the run in {out} was made with {name}={was}, and its report says "
                "so. Give the same, or begin another run."
            )
    owners = {id_of(name): int(node) for node in facts["owners"] for name in facts["owners"][node]}
    if None in owners:
        raise ConfigError(f"{out}: the owners in its ledger are damaged.")
    return cast("dict[ClientId, int]", owners)
