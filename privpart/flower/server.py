"""ServerApp: trains a plan in a run folder over a federation, and resumes the run that is there.

The server's own loop, admission, ledger and report are those of one process. Flower authenticates
nodes if the SuperLink was started so, which the ServerApp cannot see: it is declared when the run
is made, and kept in its ledger.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accounting import checks
from accounting.checks import ConfigError
from privpart.engines.options import EngineOptions
from privpart.flower.agreement import Report, agreement, flower, id_of, to_stderr
from privpart.flower.engine import FlowerEngine
from privpart.flower.mail import hosted
from privpart.loop import Callback, RoundRecord
from privpart.messages import ClientId
from privpart.model import PartialModel
from privpart.run.folder import holds_a_run
from privpart.run.ledger import Ledger
from privpart.run.report import AUTHENTICATED
from privpart.training.plan_file import PlanFile, read
from privpart.training.train import PLAN, begin, finish, kept_plan, resume_run
from privpart.training.training import Own, refuse_over_network


def server_app(
    plan: str | Path,
    *,
    out: str | Path | None = None,
    nodes: int | None = None,
    authenticated: bool | None = None,
    timeout: float | None = None,
    attempts: int | None = None,
    seed: int | None = None,
    evaluate_every: int | None = None,
    callbacks: Sequence[Callback] = (),
) -> Any:  # noqa: ANN401  Flower's ServerApp
    """Return a ServerApp that trains a plan in a run folder, and resumes the run that is there.

    What is None is read from the app's own table ``[tool.flwr.app.config]``, under the same name,
    so that ``flwr run --run-config`` can set it.

    Args:
        plan: path of the plan file.
        out: absolute path of the run folder, outside the app, whose files Flower copies.
        nodes: how many nodes must say which clients they have before the run begins.
        authenticated: whether the SuperLink runs with --enable-supernode-auth. Only then are
            limits on participation verified; the ledger keeps this.
        timeout: seconds to wait for the answers of a round; default 3600.
        attempts: how often a round is tried that has too few answers; default 3.
        seed: takes the noise from a seed, for simulations: the run is then not private.
        evaluate_every: rounds between evaluations by the plan's metric; default 10.
        callbacks: called after each committed round, see ``fit``.
    """
    flower()
    import flwr.serverapp

    given = {
        "out": None if out is None else str(out),
        "nodes": nodes,
        "authenticated": authenticated,
        "timeout": timeout,
        "attempts": attempts,
        "seed": seed,
        "evaluate_every": evaluate_every,
    }

    def main(grid: Any, context: Any) -> None:  # noqa: ANN401  Flower's Grid and Context
        try:
            settings = Settings.of(given, context.run_config)
            serve(grid, Path(plan), settings, callbacks=callbacks)
        except ConfigError as error:
            # Flower logs a trace, which says nothing of a wrong setting
            to_stderr(f"the run has stopped: {error}")
            raise error.with_traceback(None) from None
        except Exception as error:
            to_stderr(f"the run has stopped: {error}")
            raise

    app = flwr.serverapp.ServerApp()
    app.main()(main)
    return app


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a ServerApp runs; see ``server_app``.

    Raises:
        ConfigError: a value of another type or out of range.
    """

    out: str
    nodes: int
    authenticated: bool
    timeout: float = 3600.0
    attempts: int = 3
    seed: int | None = None
    evaluate_every: int = 10

    def __post_init__(self) -> None:
        if not isinstance(self.out, str) or not Path(self.out).is_absolute():
            raise ConfigError(
                f"out={self.out!r}: must be an absolute path. Flower runs a copy of the app, whose "
                "folder is not kept."
            )
        if not isinstance(self.authenticated, bool):
            raise ConfigError(f"authenticated={self.authenticated!r}: must be true or false.")
        for name in ("nodes", "attempts", "evaluate_every"):
            checks.count(name, getattr(self, name))
        checks.positive("timeout", self.timeout)
        if self.seed is not None:
            checks.count("seed", self.seed, minimum=0)

    @classmethod
    def of(cls, given: Mapping[str, Any], config: Mapping[str, Any]) -> "Settings":
        """Return the settings that were given in the code or in the app's table of settings.

        Raises:
            ConfigError: one was given in both, or is missing, or a name is almost that of one.
        """
        # others may be for clients of one's own
        for name in sorted(config.keys() - given.keys()):
            if near := difflib.get_close_matches(name.replace("-", "_"), given, 1, 0.8):
                raise ConfigError(f"{name}: is not a setting; write {near[0]}, or rename yours.")
        values = {name: value for name, value in given.items() if value is not None}
        for name in given.keys() & config.keys():
            if name in values:
                raise ConfigError(
                    f"{name}: is given to server_app and in [tool.flwr.app.config]; give it once."
                )
            values[name] = config[name]
        for name in ("out", "nodes", "authenticated"):
            if name not in values:
                raise ConfigError(
                    f"{name}: is missing; give it to server_app, or in [tool.flwr.app.config]."
                )
        return cls(**values)


def serve(
    grid: Any,  # noqa: ANN401  Flower's Grid
    plan: Path,
    settings: Settings,
    *,
    callbacks: Sequence[Callback] = (),
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
    resumes = holds_a_run(out)
    recorded = _recorded_owners(out, settings, chosen) if resumes else None

    def remote(model: PartialModel) -> FlowerEngine:
        owners = recorded
        if owners is None:
            agreed = agreement(model, _promised(chosen, model))
            owners = hosted(
                grid,
                agreed,
                nodes=settings.nodes,
                timeout=settings.timeout,
                poll=poll,
                report=say,
            )
        return FlowerEngine(
            grid,
            model,
            owners,
            minimum=chosen.privacy.minimum_cohort,
            authenticated=settings.authenticated,
            timeout=settings.timeout,
            attempts=settings.attempts,
            poll=poll,
            report=say,
        )

    objects = Own(remote=remote)
    if resumes:
        run, setup = resume_run(out, plan=chosen, objects=objects, options=EngineOptions())
    else:
        run, setup = begin(
            chosen,
            out,
            objects=objects,
            seed=settings.seed,
            options=EngineOptions(),
        )
    last = run.plan.rounds

    def tell(record: RoundRecord) -> None:
        metric = "" if record.metric is None else f"; metric {record.metric:.4g}"
        say(f"round {record.round} is committed, of {last} from 0{metric}.")

    with run:
        say(f"{run.path}: {run.rounds} of {last} rounds are committed.")
        watchers = [tell, *callbacks]
        finish(run, setup, settings.evaluate_every, callbacks=watchers, progress=False)


def _promised(plan: PlanFile, model: PartialModel) -> str:
    sizes = None if plan.schedule is None else model.group_sizes
    return plan.privacy_plan(code=plan.code(), sizes=sizes).hash


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
    was = facts["identity"] == AUTHENTICATED
    if was != settings.authenticated:
        raise ConfigError(
            f"authenticated={settings.authenticated}: the run in {out} was made with "
            f"authenticated={was}, and its report says so. Give the same, or begin another run."
        )
    if settings.seed not in (None, facts["seed"]):
        raise ConfigError(f"seed={settings.seed}: is not that of the run in {out}; leave it out.")
    owners: dict[ClientId, int] = {}
    for node, names in facts["owners"].items():
        for name in names:
            client = id_of(name)
            if client is None:
                raise ConfigError(f"{out}: the owners in its ledger are damaged.")
            owners[client] = int(node)
    return owners
