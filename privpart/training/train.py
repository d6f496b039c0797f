"""Train: begin or resume a run of a plan in a folder, from the command line or from Python.

``privpart.train`` and the command ``privpart train`` both go through ``begin``, ``resume_run`` and
``finish``: what ``begin`` records in the ledger, ``resume_run`` compares.
"""

import difflib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from accounting import checks
from accounting.checks import ConfigError
from privpart.client import Loss
from privpart.data.batches import Batch
from privpart.data.clients import Clients, RemoteClients
from privpart.engines.canaries import CanaryClients, refuse_same_ids
from privpart.engines.options import EngineOptions
from privpart.loop import Callback, RoundRecord
from privpart.messages import client_id, id_order
from privpart.noise.cohorts import ids_hash
from privpart.plan import PrivacyPlan
from privpart.run.begin import create_run, fork
from privpart.run.canaries import (
    FACT,
    ReleaseLog,
    canary_key_hash,
    new_canary_key,
    read_canary_key,
    write_canary_key,
)
from privpart.run.folder import RECORDS, RunEndedError, RunFolder, holds_a_run
from privpart.run.ledger import Ledger
from privpart.run.noised_metrics import NoisedMetrics, noised_metrics
from privpart.run.population import is_public
from privpart.run.report import RunReport, run_report
from privpart.run.store import StorageError, one_line, tensor_hash, write_durably
from privpart.server import RoundCounts, Server
from privpart.training import own_code
from privpart.training.callbacks import Logger, MetricsFile, callbacks_of
from privpart.training.export import export, released_module
from privpart.training.metric import Accuracy, Metric
from privpart.training.own_code import described
from privpart.training.pace import paced
from privpart.training.passed import digest
from privpart.training.plan_file import PlanFile, plan_in, read, validated
from privpart.training.private_metrics import Restore, released_metrics
from privpart.training.progress import ProgressBar
from privpart.training.training import Own, Training, population_name, training, without_canaries

PLAN = "plan.toml"
CanaryMaker = Callable[..., CanaryClients]
"""From mechanism, participation, dim, count, seed and key to an auditor's clients."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run in a folder, as ``privpart.train`` returns it.

    Attributes:
        path: the run folder.
        history: a record per round that this call ran, with the metrics where they were evaluated;
            the first is that before training, if the plan evaluates there.
    """

    path: Path
    history: tuple[RoundRecord, ...]
    _setup: Training

    def report(self, delta: float | None = None) -> RunReport:
        """Return the guarantee, derived from the ledger; see ``privpart.run.report.run_report``."""
        return run_report(self.path, delta=delta)

    def noised_metrics(self) -> NoisedMetrics:
        """Return the noised metrics that the run released; see ``[privacy.metrics]``."""
        return noised_metrics(self.path)

    def metrics(self) -> list[dict[str, Any]]:
        """Return round and metrics on public data, of all rounds, also before a resume."""
        return MetricsFile(self.path).rows

    def statement(self) -> str:
        """Return the guarantee and what it rests on, as prose."""
        return self.report().promise()

    def module(self) -> nn.Module:
        """Return a copy of the network with the released parameters, in evaluation mode."""
        return released_module(self.path, self._setup)

    def export(self, out: str | Path, *, part: str = "full") -> Path:
        """Write the released model to a file; see ``privpart.training.export.export``."""
        return export(self.path, out, part=part, setup=self._setup)


def train(
    module: nn.Module | None = None,
    clients: Clients | None = None,
    *,
    plan: "str | Path | Mapping[str, Any] | PlanFile",
    out: str | Path,
    loss: str | Loss | None = None,
    metric: Metric | None = None,
    augment: Callable[[Batch], Batch] | None = None,
    resume: bool = False,
    seed: int | None = None,
    canaries: CanaryMaker | None = None,
    evaluate_every: int = 10,
    callbacks: Sequence[Callback | Logger] = (),
    progress: bool = True,
    **options: Any,  # noqa: ANN401  EngineOptions checks them
) -> Run:
    """Train a module on clients under a plan; commit every round to a folder before its release.

    Args:
        module: any network; it is copied. None takes the one that the plan names.
        clients: the population, see ``privpart.data``. None takes the plan's.
        plan: path of a plan file, or its tables. [model] and [data] need not name what is passed
            here. Without a seed in [model], the module keeps its weights.
        out: folder of the run. It must not exist yet or be empty, unless ``resume``.
        loss: name of a loss, or a function from module and batch to a scalar; None takes the
            plan's.
        metric: function from the module to a number, or to a dict of several, on public data: no
            epsilon covers it.
        augment: function from a batch to a batch, called on each batch of a client.
        resume: continue the run in ``out`` if it has begun, with the same arguments.
        seed: takes the noise from a seed, for simulations: the run is then not private. A run that
            is resumed keeps the noise that it was begun with.
        canaries: makes the clients of a plan's table [canaries]: ``attacks.canary_clients``.
        evaluate_every: rounds between evaluations by the metric, >= 1.
        callbacks: called after each committed round, see ``fit``; or loggers, which get its
            metrics: objects with ``log(metrics, step=...)``, such as ``TensorBoard`` or a run of
            Weights & Biases. One that raises ``StopTraining`` ends the run as finished so far.
        progress: show rounds on standard error.
        options: fields of ``EngineOptions`` by keyword, such as ``workers=2``.

    Raises:
        ConfigError: a plan that is not valid, or that the module, clients, loss or metric do not
            fit.
        BudgetExceededError: the run would pass the limit of its population (`privpart budget`).
        CohortTooSmallError, StorageError, WorkerError: nothing of the round was released; call
            again with ``resume=True``.
        DivergedError: most updates of a round were not finite; the round is committed.
        MetricsError: a file of metrics could not be written; the round is committed.
    """
    given = Own(module, clients, loss, augment, metric)
    _refuse_other_types(given, out, resume=resume, progress=progress)
    watchers = callbacks_of(callbacks)
    checks.count("evaluate_every", evaluate_every)
    engine = engine_options(options)
    chosen = _plan(plan)
    if canaries is not None and chosen.canaries is None:
        raise ConfigError(
            "canaries: the plan has no table [canaries]. Add it, with their count, or leave "
            "canaries out."
        )
    beside: dict[str, Any] = {"objects": given, "canaries": canaries}
    # A training runs on one thread; whoever calls this from Python keeps theirs.
    threads = torch.get_num_threads()
    try:
        if resume and holds_a_run(out):
            if has_stopped(Path(out), plan=chosen):
                _refuse_other_seed(Ledger(Path(out)).facts, out, seed)
                return Run(Path(out), (), released_setup(Path(out), plan=chosen, objects=given))
            run, setup = resume_run(Path(out), plan=chosen, options=options, **beside)
        else:
            run, setup = begin(chosen, Path(out), seed=seed, options=engine, **beside)
        with run:
            _refuse_other_seed(run.facts, run.path, seed)
            history = finish(run, setup, evaluate_every, callbacks=watchers, progress=progress)
    finally:
        torch.set_num_threads(threads)
    return Run(run.path, tuple(history), setup)


def _refuse_other_seed(facts: Mapping[str, Any], out: str | Path, seed: int | None) -> None:
    first = facts["seed"]
    if seed is not None and seed != first:
        origin = (
            "a secret key; leave seed out" if first is None else f"seed={first}; leave this out"
        )
        raise ConfigError(f"seed={seed}: the noise of {out} comes from {origin}.")


def _refuse_other_types(objects: Own, out: object, **switches: object) -> None:
    module, metric = objects.module, objects.metric
    for name, value, fits, must in (
        ("module", module, module is None or isinstance(module, nn.Module), "a torch.nn.Module"),
        ("metric", metric, metric is None or callable(metric), "a function from the module"),
        ("out", out, isinstance(out, str | os.PathLike), "the path of a folder"),
        *(
            (name, value, isinstance(value, bool), "True or False")
            for name, value in switches.items()
        ),
    ):
        if not fits:
            raise ConfigError(f"{name}: is {described(value)}; must be {must}.")


def engine_options(options: Mapping[str, Any]) -> EngineOptions:
    """Return the options with these names; one that there is none of is refused."""
    names = [field.name for field in fields(EngineOptions)]
    if unknown := sorted(options.keys() - set(names)):
        near = difflib.get_close_matches(unknown[0], names, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"{unknown[0]}: no such option. The nearest is {near}; all of the engine are "
            f"{', '.join(names)}."
        )
    return EngineOptions(**options)


def _plan(plan: "str | Path | Mapping[str, Any] | PlanFile") -> PlanFile:
    if isinstance(plan, PlanFile):
        return plan
    if isinstance(plan, str | Path):
        return read(plan, in_python=True)
    if not isinstance(plan, Mapping):
        raise ConfigError(f"plan: is {described(plan)}; must be a path, or the tables of a plan.")
    tables = {"schema": "privpart/plan/1", "model": {}, "server": {}, **plan}
    return validated(tables, in_python=True)


def begin(
    plan: PlanFile,
    out: Path,
    *,
    objects: Own | None = None,
    fork_of: Path | None = None,
    seed: int | None = None,
    canaries: CanaryMaker | None = None,
    record_sums: bool = False,
    own: Mapping[str, Any] = MappingProxyType({}),
    options: EngineOptions,
) -> tuple[RunFolder, Training]:
    """Put a plan together, and begin its run only if that succeeds; see ``train``.

    With ``fork_of`` it starts from the model of another run, whose cost is added. With
    ``record_sums`` it can be replayed, which nobody's private data may be. ``own`` are more facts
    for which this package answers, such as the selection that it is a run of.
    """
    objects = objects or Own()
    # A seed would make the noise of a private run's continuation public.
    if seed is not None and fork_of is not None:
        raise ConfigError(f"seed={seed}: a fork of a private run needs a secret key.")
    code = plan.code()
    # A run with noise from a seed must be repeatable to the last bit, whoever shares a chunk.
    setup = training(
        plan, objects=objects, options=replace(options, deterministic=seed is not None)
    )
    # Hashed before and after its import, or what ran may not be what is recorded.
    if plan.code() != code:
        raise ConfigError("plan: the code that it names changed while it was loaded; begin again.")
    if warning := plan.accept_delta(len(setup.ids)):
        sys.stderr.write(f"privpart: warning: {warning}\n")
    promised = setup.promise(code)
    setup.rehearse(promised)
    # nodes compute as they like
    precision = {} if objects.remote is not None else {"precision": options.precision}
    facts = {**_facts(plan, setup, objects, code), **precision, **own}
    key = new_canary_key(seed)
    if plan.canaries is not None:
        facts[FACT] = {**plan.canaries.model_dump(), "key": canary_key_hash(key)}
    setup = _planted(setup, promised, canaries, key)
    if record_sums:
        _refuse_private_sums(plan, seed, str(facts["population_name"]))
        facts[RECORDS] = True
    if plan.privacy.round_seconds is not None:
        facts["round_seconds"] = plan.privacy.round_seconds
    facts |= {"plan_tables": plan.tables} if plan.text is None else {"plan_file": plan.text}
    # Nothing exists before this: whatever is refused leaves no folder and enters no budget book.
    if fork_of is None:
        start = setup.start if record_sums else None
        run = create_run(out, promised, seed=seed, own=facts, start=start)
    else:
        run = fork(fork_of, out, promised, own=facts)
    _write_beside(run, plan, key)
    return run, setup


def _refuse_private_sums(plan: PlanFile, seed: int | None, people: str) -> None:
    """Refuse sums beside a run of people whose data are not public."""
    if not plan.privacy.noise_multiplier:
        raise ConfigError("record_sums: the plan adds no noise, so there is nothing to replay.")
    if seed is None and not is_public(people):
        raise ConfigError(
            "record_sums: whoever has the sums can remove the noise. Record them with --seed, or "
            "of the public data of a built-in task."
        )


def _write_beside(run: RunFolder, plan: PlanFile, key: bytes) -> None:
    """Write the canaries' key, and the plan for people; the ledger's copy of that counts."""
    try:
        if plan.canaries is not None:
            write_canary_key(run.path, key)
        if plan.text is not None:
            write_durably(run.path / PLAN, plan.text.encode())
    except OSError as error:
        advice = _end_unspent(run)
        run.close()
        raise StorageError(
            f"{run.path}: the plan or the key of the canaries cannot be written: "
            f"{one_line(error)}. {advice}"
        ) from None


def _end_unspent(run: RunFolder) -> str:
    """End a new run before its first round, so that it costs nothing; return what is to be done."""
    try:
        run.end_early("refused before its first round")
    except (ConfigError, StorageError):
        return f"No round was run; end the run by: privpart train --close --out {run.path}"
    return "No round was run, and the run was closed: begin again in another folder."


def _planted(
    setup: Training, promised: PrivacyPlan, canaries: CanaryMaker | None, key: bytes
) -> Training:
    """Return a training with the canaries of its plan's table, if it has one."""
    if setup.plan.canaries is None:
        return setup
    if canaries is None:
        raise without_canaries()
    clients = canaries_of(setup.plan, promised, canaries, setup.start.numel(), key)
    # Also of absent canaries: whoever shares an id would be taken for one.
    refuse_same_ids(setup.clients.ids, clients)
    return replace(setup, canaries=clients)


def canaries_of(
    plan: PlanFile, promised: PrivacyPlan, canaries: CanaryMaker, dim: int, key: bytes = bytes(32)
) -> CanaryClients:
    """Return the canaries of a plan's table; their ids and updates do not depend on the key."""
    assert plan.canaries is not None  # noqa: S101  whoever asks has looked
    return canaries(
        promised.mechanism,
        promised.participation,
        dim=dim,
        key=key,
        momentum=plan.server.momentum,
        **plan.canaries.model_dump(),
    )


def passed_objects(objects: Own) -> dict[str, str] | None:
    """Digest of each Python object passed in, for the ledger; None if nothing was passed."""
    digests = {
        name: digest(value)
        for name in ("module", "loss", "augment", "metric")
        if (value := getattr(objects, name)) is not None
    }
    # The ids of clients have a fact of their own, see ids_hash.
    return digests | ({} if objects.clients is None else {"clients": "by id"}) or None


def _facts(
    plan: PlanFile, setup: Training, objects: Own, code: dict[str, Any] | None
) -> dict[str, Any]:
    """Return what the ledger keeps of a run besides its privacy plan."""
    facts: dict[str, Any] = {"delta": plan.privacy.delta}
    facts |= {"seen_in_clear": setup.seen(), "rest": setup.model_hash}
    if stated := plan.about.stated():
        facts["about"] = stated
    facts["population_name"] = population_name(plan, setup.ids)
    facts["population_size"] = len(setup.ids)
    # A built-in task deals the same users to the same plan; other ids may change under a run.
    if plan.data.task is None or plan.privacy.sampling is not None:
        facts["population"] = ids_hash(setup.ids)
    if code is not None:
        facts |= {"code": code, "plan_folder": str(plan.folder)}
    if (passed := passed_objects(objects)) is not None:
        facts["passed"] = passed
    if objects.remote is not None:
        facts |= cast("Any", setup.trainer).facts
    if plan.select is None:
        views = setup.model.views(setup.model.flat)
        facts["parameters"] = [[name, list(view.shape)] for name, view in views.items()]
        # Trained parameters are views of one flat tensor, so they share its storage.
        trained = setup.model.flat.untyped_storage().data_ptr()
        facts["frozen"] = {
            name: tensor_hash(tensor)
            for name, tensor in setup.model.module.state_dict().items()
            if tensor.untyped_storage().data_ptr() != trained
        }
    return facts


def resume_run(
    out: Path,
    *,
    plan: PlanFile | Path | None = None,
    objects: Own | None = None,
    adopt: bool = False,
    canaries: CanaryMaker | None = None,
    options: Mapping[str, Any],
    tell: Callable[[PlanFile], None] = lambda _: None,
) -> tuple[RunFolder, Training]:
    """Open a run and put together the plan that its ledger keeps; see ``train``.

    Args:
        out: folder of the run.
        plan: the run's plan, if its file was moved or to check that it is the same.
        objects: those that the run was begun with.
        adopt: see ``RunFolder.open``.
        canaries: see ``train``.
        options: fields of ``EngineOptions``; without a precision, the run keeps its own.
        tell: called with the plan before the code that it names is imported.
    """
    run = RunFolder.open(out, adopt=adopt)
    try:
        # As in ``begin``: noise from a seed must meet the same updates again.
        seeded = run.facts["seed"] is not None
        kept = {"precision": run.facts.get("precision", EngineOptions().precision)}
        if seeded and {**kept, **options}["precision"] != kept["precision"]:
            raise ConfigError(
                f"precision={options['precision']}: {out} takes its noise from a seed, so it must "
                f"end as it would have undisturbed, in {kept['precision']}; leave precision out."
            )
        engine = engine_options({**kept, **options, "deterministic": seeded})
        recorded = kept_plan(run.facts, out, plan)
        setup = _recorded_setup(run.facts, recorded, objects or Own(), out, tell, options=engine)
        key = b"" if recorded.canaries is None else read_canary_key(out, run.facts)
        return run, _planted(setup, run.plan, canaries, key)
    except BaseException:
        run.close()
        raise


def has_stopped(out: Path, *, plan: PlanFile | Path | None = None, adopt: bool = False) -> bool:
    """Return whether ``StopTraining`` ended the run in a folder, so that it is finished.

    What a crash left of that end is completed, such as keys that were not erased yet. ``plan`` and
    ``adopt`` are those of ``resume_run``.
    """
    facts = Ledger(out).facts
    if not facts.get("closed", {}).get("by_training"):
        return False
    kept_plan(facts, out, plan)
    with suppress(RunEndedError):
        RunFolder.open(out, adopt=adopt).close()
    return True


def released_setup(
    out: Path,
    *,
    plan: Path | PlanFile | None = None,
    objects: Own | None = None,
    tell: Callable[[PlanFile], None] = lambda _: None,
) -> Training:
    """Put together what a run trains, which is only read and may still be running."""
    facts = Ledger(out).facts
    objects = objects or Own()
    if "owners" in facts:
        named = [json.loads(name) for names in facts["owners"].values() for name in names]
        nodes = RemoteClients(sorted(map(client_id, named), key=id_order))
        # Nothing runs, so the engine of a federation need only say who its clients are.
        objects = Own(remote=lambda _: cast("Any", SimpleNamespace(clients=nodes)))
    recorded = kept_plan(facts, out, plan)
    return _recorded_setup(facts, recorded, objects, out, tell, report=lambda _: None)


def _recorded_setup(
    facts: Mapping[str, Any],
    recorded: PlanFile,
    objects: Own,
    out: Path,
    tell: Callable[[PlanFile], None],
    **options: Any,  # noqa: ANN401  those of ``training``
) -> Training:
    """Put together the plan of a run, and check that it is what the run trains."""
    _refuse_changed(facts, recorded, objects, out)
    tell(recorded)
    setup = training(recorded, objects=objects, **options)
    if facts.get("rest", setup.model_hash) != setup.model_hash:
        raise ConfigError(
            f"{out}: the network differs from the run's in its frozen weights, or in which "
            "parameters train. A factory must return the same network every time: load the weights "
            "from a file, or give [model] a seed."
        )
    if "population" in facts and facts["population"] != ids_hash(setup.ids):
        raise ConfigError(
            f"{out}: the clients' ids are not those that the run was begun with. Pass the same "
            "clients, in the same order."
        )
    return setup


def kept_plan(facts: Mapping[str, Any], out: Path, plan: PlanFile | Path | None) -> PlanFile:
    """Return the plan in a run's ledger; ``plan`` must be the same, and says where its code is."""
    if facts.get("unit") == "example":
        raise ConfigError(
            f"{out}: is a run of FTRLEngine on examples, whose network only its own loop has. "
            "Continue it there: make_private(..., out=..., resume=True); export its parameters "
            "with --part trained, or from Python."
        )
    folder = Path(facts.get("plan_folder", "."))
    recorded = plan_in(facts, name=f"the plan of {out}", folder=folder)
    if plan is None:
        return recorded
    chosen = plan if isinstance(plan, PlanFile) else read(plan, in_python=True)
    if chosen.hash != recorded.hash:
        argument = f"plan={plan}" if isinstance(plan, Path) else "plan"
        raise ConfigError(f"{argument}: is not the run's plan; leave it out, or begin another run.")
    return chosen


def _refuse_changed(facts: Mapping[str, Any], recorded: PlanFile, objects: Own, out: Path) -> None:
    """Check, without running it, that the code of a run is what it was when the run began."""
    if "owners" in facts and objects.remote is None:
        raise ConfigError(
            f"{out}: the clients of this run are on nodes of a Flower federation; continue it "
            "there, with flwr run."
        )
    code = facts.get("code")
    if code is not None and (differences := own_code.changes(code, recorded.code() or {})):
        raise ConfigError(
            f"{out}: the code of this run has changed: {'; '.join(differences)}. Restore it, or "
            "begin a new run or a fork (--fork-of)."
        )
    if recorded.context(code) != facts["plan"].get("context"):
        raise ConfigError(f"{out}: the plan file in its ledger is not the run's.")
    # Objects are compared by source and values, since they cannot be kept in a ledger.
    passed, now = facts.get("passed"), passed_objects(objects)
    if passed is not None and now is None:
        raise ConfigError(
            f"{out}: this run was begun from Python, with {', '.join(passed)} passed to "
            "privpart.train. Continue or load it there: privpart.train(..., resume=True)."
        )
    for name in sorted({*(passed or {}), *(now or {})}):
        if (passed or {}).get(name) != (now or {}).get(name):
            raise ConfigError(
                f"{name}: is not what {out} was begun with. Pass the same, or begin a new run."
            )


def finish(
    run: RunFolder,
    setup: Training,
    evaluate_every: int,
    *,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
) -> list[RoundRecord]:
    """Train the rounds of a run that are not committed yet; return their records."""
    accuracy = isinstance(setup.metric, Accuracy)
    bar = ProgressBar(run.plan.rounds, done=run.rounds, accuracy=accuracy)
    watchers: list[Callback] = [bar] if progress else []
    file = MetricsFile(run.path)
    # A crash may have come between the line that says so and the end of the run.
    if _ended_as_asked(run, file):
        return []
    commit: Callable[[Server, RoundCounts], None] = run.commit
    restore: Restore = run.restore
    if setup.canaries is not None:
        commit, restore = _logging(run, setup.canaries)
    if (seconds := setup.plan.privacy.round_seconds) is not None:
        commit = paced(run, commit, seconds)
    with ExitStack() as open_, _unspent_if_refused(run):
        source = run.source()
        measured = setup.evaluators, setup.model, setup.whole
        evaluate, restore = released_metrics(run, *measured, source, restore)

        def begin_to_show(server: Server) -> None:
            restore(server)
            if progress:
                # Not before: a run that is refused shows no progress.
                open_.enter_context(bar)

        _, records = setup.run(
            run.plan,
            source,
            sample=run.sample,
            restore=begin_to_show,
            commit=commit,
            evaluate_every=evaluate_every,
            # First, so that whoever is told of a round finds what was released of it.
            callbacks=[*evaluate, *watchers, *callbacks, file],
            # how many were sampled is secret
            heard=bar.heard if progress and run.plan.sampling is None else None,
            **_left_untold(run, setup, file),
        )
    _ended_as_asked(run, file)
    return records


def _ended_as_asked(run: RunFolder, file: MetricsFile) -> bool:
    """End a run that ``StopTraining`` asked to end after its newest round; return whether it did.

    A run whose last round asked is complete, and has nothing to end.
    """
    reason = file.asked_to_stop(run.rounds - 1)
    if reason is None or run.is_complete:
        return False
    run.end_early(reason, by_training=True)
    return True


def _left_untold(run: RunFolder, setup: Training, file: MetricsFile) -> dict[str, Any]:
    """Return the arguments of ``fit`` by which no record is lost in a crash, or told again."""
    if run.rounds == 0:
        at = setup.plan.data.evaluate_at
        return {"evaluate_at": [n for n in at if n - 1 > file.last_round]}
    if file.last_round >= run.rounds - 1:
        return {}
    row = run.newest_row
    return {"untold": RoundCounts(row.received, row.counted, 0)}


def _logging(run: RunFolder, canaries: CanaryClients) -> tuple[Callable[..., None], ...]:
    """Return commit and restore of a run that also keep what its models say about canaries."""
    log = ReleaseLog(run.path, canaries.width)

    def commit(server: Server, counts: RoundCounts) -> None:
        # The log first: a row too many is dropped on resume, a missing one could not be made again.
        log.append(canaries.project(server.parameters))
        run.commit(server, counts)

    def restore(server: Server) -> None:
        run.restore(server)
        log.resume(run.rounds, canaries.project(server.parameters))

    return commit, restore


@contextmanager
def _unspent_if_refused(run: RunFolder) -> Iterator[None]:
    """End a new run whose first round is refused."""
    try:
        yield
    except ConfigError as error:
        if not run.is_new or run.rounds:
            raise
        raise ConfigError(f"{error} {_end_unspent(run)}") from error
