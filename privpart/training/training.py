"""Training: the model, clients and metric that a plan describes, and the run over them.

``training`` puts a plan together and ``Training.run`` trains it, for whichever command asks. What a
plan names of its author's code is imported and called here, and nowhere else.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, wraps
from itertools import islice
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from privpart.client import Loss, augmented, batch_loss, client_update, seeded
from privpart.data import partition
from privpart.data.batches import Batch, count_rows, take
from privpart.data.clients import Clients
from privpart.data.tasks.shakespeare import UNKNOWN
from privpart.data.users import Users
from privpart.engines.canaries import CanaryClients, cohorts_with_canaries
from privpart.engines.embedded import EmbeddedEngine
from privpart.engines.methods import client_generator, fetched, one_thread
from privpart.engines.options import EngineOptions
from privpart.engines.protocol import Engine
from privpart.grid import refuse_noise
from privpart.loop import RoundRecord, StopTraining, fit
from privpart.messages import ClientId, client_id, id_order
from privpart.model import PartialModel, logits_of
from privpart.noise.cohorts import SampledCohorts, distinct_ids
from privpart.noise.metrics import MetricsRelease
from privpart.noise.source import NoiseSource, SeededSource
from privpart.patterns import matching_parameters
from privpart.plan import PrivacyPlan
from privpart.run.population import PUBLIC_DATA
from privpart.select.choice import choosers_of, fetched_by, spaces_of
from privpart.select.delivery import SeenByParty, seen_in
from privpart.select.engine import SelectEngine, localize_tokens
from privpart.select.key_spaces import shrunk
from privpart.select.keys import Counts, Turns
from privpart.select.layout import Layout
from privpart.server import Server
from privpart.settings.client import LocalTraining
from privpart.settings.select import SelectChoice
from privpart.start_values import load_weights, unwrapped
from privpart.training import own_code
from privpart.training.metric import Accuracy, Metric, measured
from privpart.training.plan_file import Model, PlanFile, refuse_short_cohorts
from privpart.training.private_metrics import Evaluators, split
from privpart.training.task_data import Reader, held_out_of, holders, plan_data, read_task

_TRIED = 50
"""Clients that are asked for examples before the check for carriers is given up."""


class RemoteEngine(Engine, Protocol):
    """An engine whose clients are elsewhere."""

    @property
    def clients(self) -> Clients:
        """The population, whose examples are not here."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """What the ledger keeps of where the clients are when a run is made."""
        ...

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Training:
    """A plan put together. Its data are simulated or public.

    Attributes:
        model: in its start state.
        cohorts: per round, the clients to ask; empty if the plan samples them, from a run's key.
        metric: measures the model on data that no client holds; None if the plan has none.
        first: the model's flat vector before training, shape (d,).
        evaluators: users whose noised metrics are released; None if the plan has none.
    """

    plan: PlanFile
    model: PartialModel
    trainer: EmbeddedEngine | SelectEngine | RemoteEngine
    cohorts: Sequence[Sequence[ClientId]]
    metric: Metric | None
    first: Tensor
    canaries: CanaryClients | None = None
    evaluators: Evaluators | None = None

    @property
    def engine(self) -> EmbeddedEngine | SelectEngine:
        """The engine that simulates the clients."""
        if isinstance(self.trainer, EmbeddedEngine | SelectEngine):
            return self.trainer
        raise ConfigError("engine: the clients are elsewhere; this needs simulated ones.")

    @property
    def clients(self) -> Clients:
        """The population."""
        engine = self.trainer
        return engine.users if isinstance(engine, SelectEngine) else engine.clients

    @property
    def ids(self) -> Sequence[object]:
        """Ids of the whole population: of those who train, and then of those who only evaluate."""
        if self.evaluators is None or self.evaluators.also_train:
            return self.clients.ids
        return [*self.clients.ids, *self.evaluators.users.ids]

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """The examples and labels of a metric that is an accuracy."""
        if not isinstance(self.metric, Accuracy):
            raise ConfigError(
                "data: this needs test examples with labels, of a built-in task or an Accuracy; "
                "the metric of this plan is a function."
            )
        return self.metric.x, self.metric.y

    @property
    def _turns(self) -> Turns | None:
        return self.trainer.turns if isinstance(self.trainer, SelectEngine) else None

    @property
    def start(self) -> Tensor:
        """The server's start: ``first``, or the slices of it that take turns, shape (d',)."""
        return self.first if self._turns is None else self.first[self._turns.order]

    @property
    def model_hash(self) -> str:
        """Hash of everything about the model that the server's parameters do not contain.

        It covers the frozen part and which parameters train. Where slices take turns, it also
        covers their positions and the values of slices that never train.
        """
        digest = hashlib.sha256(f"{self.model.fingerprint} {self.model.trainable_hash}".encode())
        if self._turns is not None:
            never = self._turns.whole(self.first, torch.zeros_like(self.start))
            for tensor in (self._turns.order, never):
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def whole(self, parameters: Tensor) -> Tensor:
        """Return the model's flat vector, shape (d,), from the server's parameters."""
        return parameters if self._turns is None else self._turns.whole(self.first, parameters)

    def measures(self, parameters: Tensor) -> dict[str, float]:
        """Return the metrics of the model with these parameters; may raise ``StopTraining``."""
        if self.metric is None:
            raise ConfigError("data.metric: is missing; there is nothing to evaluate by.")
        self.model.load(self.whole(parameters))
        return measured(self.metric, self.model.module)

    def evaluate(self, parameters: Tensor) -> float:
        """Return the first metric of the model with these parameters, where nothing can stop."""
        try:
            return next(iter(self.measures(parameters).values()))
        except StopTraining:
            raise ConfigError(
                "metric: raised StopTraining where a model is measured after its training, or "
                "before it; return its numbers there, too."
            ) from None

    def seen(self) -> SeenByParty | None:
        """Return what parties will see of the clients' keys; None where clients select nothing."""
        if isinstance(self.trainer, SelectEngine):
            return seen_in(self.trainer.rehearse())
        return None

    def under(self, plan: PlanFile) -> "Training":
        """Return this training under a plan with other privacy and seeds; it has no metric."""
        return replace(self, plan=plan, cohorts=_cohorts(plan, self.clients), metric=None)

    def promise(self, code: dict[str, Any] | None = None) -> PrivacyPlan:
        """Return the plan's privacy plan, bound to ``code`` if that was recorded."""
        return self.plan.privacy_plan(code=code, sizes=self.model.group_sizes)

    def rehearse(self, promised: PrivacyPlan) -> None:
        """Try all that comes before a client trains in the first round, before anything exists.

        The noise is not kept.

        Raises:
            ConfigError: epsilon cannot be computed, the server, noise or cohorts cannot be made,
                processes cannot be sent the training, the examples of a client cannot be fetched,
                or the plan's own metric fails.
        """
        # Rounds to come must not fail where a run exists, and has entered a budget book.
        if self.plan.data.evaluate_at and self.metric is None:
            raise ConfigError("data.evaluate_at: there is no metric to evaluate by; leave it out.")
        source = SeededSource(0)
        refuse_noise(promised.update_noise_multiplier, self.start.numel())
        self.server(promised, source)
        self._rehearse_cohorts(promised, source)
        if isinstance(self.trainer, EmbeddedEngine):
            self.trainer.refuse_unsendable(self.trainer.local_of(0))
            if not isinstance(self.clients, Users):
                for client in self.cohorts[0] if self.cohorts else ():
                    fetched(self.clients, client, torch.Generator().manual_seed(0))
        if self.evaluators is not None:
            MetricsRelease(promised, source, self.evaluators.users.ids)
            self.evaluators.rehearse(self.model, self.first)
        # A metric that fails after a round could not be mended: the plan's code is recorded.
        if self.plan.data.task is None and self.metric is not None:
            with suppress(StopTraining):
                self.measures(self.start)

    def _rehearse_cohorts(self, promised: PrivacyPlan, source: NoiseSource) -> None:
        """Draw the cohorts of a plan that samples, and compute its epsilon."""
        if promised.sampling is None:
            return
        if promised.noise_multiplier:
            promised.guarantee().epsilon(self.plan.privacy.delta)
        SampledCohorts(promised, self.clients.ids, source)

    def server(self, promised: PrivacyPlan, source: NoiseSource) -> Server:
        """Return the server of round 0."""
        rates = self.plan.learning_rates.server_share(promised.rounds)
        optimizer = self.plan.server
        return Server(promised, self.start, source=source, optimizer=optimizer, rates=rates)

    def run(
        self,
        promised: PrivacyPlan,
        source: NoiseSource,
        *,
        sample: Callable[[Iterable[object]], SampledCohorts] | None = None,
        restore: Callable[[Server], None] | None = None,
        evaluate_every: int | None = None,
        **rounds: Any,  # noqa: ANN401  those of ``fit``
    ) -> tuple[Server, list[RoundRecord]]:
        """Train on one thread; return the server after the last round, and a record per round.

        Args:
            promised: the plan's privacy plan.
            source: of the noise.
            sample: draws the cohorts from the population, if the plan samples, such as
                ``RunFolder.sample``; None draws them from the source.
            restore: puts the server into the state of a run that is resumed.
            evaluate_every: rounds between evaluations by the metric; None leaves them out.
            rounds: other arguments of ``fit``.
        """
        if self.canaries is None and self.plan.canaries is not None:
            raise without_canaries()
        cohorts: Sequence[Sequence[ClientId]] = self.cohorts
        if self.canaries is not None:
            cohorts = cohorts_with_canaries(cohorts, self.canaries)
        # Small models lose time to more threads.
        torch.set_num_threads(1)
        server = self.server(promised, source)
        if restore is not None:
            restore(server)
        if promised.sampling is not None:
            ids = self.clients.ids
            cohorts = SampledCohorts(promised, ids, source) if sample is None else sample(ids)
        if evaluate_every is not None and self.metric is not None:
            at = self.plan.data.evaluate_at
            rounds = {"evaluate_at": at, **rounds}
            rounds |= {"evaluate": self.measures, "evaluate_every": evaluate_every}
        simulated = isinstance(self.trainer, EmbeddedEngine | SelectEngine)
        planted = self.canaries if simulated else None  # elsewhere, a node answers for them
        with self.trainer:
            records = fit(server, self.trainer, cohorts, canaries=planted, **rounds)
        return server, records


@dataclass(frozen=True, slots=True)
class Own:
    """Objects that take the place of what a plan would name; None leaves it to the plan.

    ``remote`` makes the engine of clients elsewhere, from the model.
    """

    module: nn.Module | None = None
    clients: Clients | None = None
    loss: str | Loss | None = None
    augment: Callable[[Batch], Batch] | None = None
    metric: Metric | None = None
    remote: Callable[[PartialModel], RemoteEngine] | None = None


def training(
    plan: PlanFile,
    *,
    objects: Own | None = None,
    options: EngineOptions | None = None,
    report: Callable[[str], None] | None = None,
    part: bool = False,
    read: Reader = read_task,
) -> Training:
    """Load the data and build the model, clients and cohorts of a plan.

    Args:
        plan: what to train. The code that it names is imported and called.
        objects: objects in place of what the plan would name.
        options: how the engine computes clients; None takes the defaults.
        report: gets a sentence about how the engine computes; None writes it to standard error.
        part: whether the clients are a part of the population, such as those of one node; there
            are then no cohorts.
        read: reads the files of a built-in task, such as one that keeps them for the next plan.

    Raises:
        ConfigError: unknown model or sizes, patterns that match nothing, missing data, a model that
            does not fit them, more users than examples, more clients in a round than users,
            options that the clients of this plan would not follow, code that fails.
    """
    objects = objects or Own()
    _refuse_two(plan, objects)
    code = _named_code(plan)
    local = _local(plan, objects, code)
    options = _options(plan, local, options or EngineOptions())
    model = _model(plan, objects, code)
    _refuse_place(plan, elsewhere=part or objects.remote is not None)
    metric = objects.metric or cast("Metric | None", code.get("data.metric"))
    engine: EmbeddedEngine | SelectEngine | RemoteEngine
    if objects.remote is not None:
        # Nodes check their own examples.
        if plan.data.task is not None and metric is None:
            task = plan_data(plan.data, model.module)
            metric = Accuracy(task.test_x, task.test_y)
        engine = objects.remote(model)
        cohorts = () if part else _cohorts(plan, engine.clients)
        return Training(plan, model, engine, cohorts, metric, model.flat.clone())
    clients, accuracy = _clients(plan, objects, code, model.module, read)
    metric = metric or accuracy
    evaluators = None
    if (table := plan.privacy.metrics) is not None:
        clients, evaluators = split(clients, table, local.loss, code, plan.data.seed)
    refuse_misfit(model, clients, local, metric)
    # The package's own networks and losses keep nothing between clients; its tests show that.
    if plan.select is None and (plan.model.name is None or code or objects.loss or objects.augment):
        _refuse_carriers(model, clients, local)
    if plan.select is not None:
        engine = _select_engine(plan, plan.select, model, cast("Users", clients))
    else:
        engine = EmbeddedEngine(
            model,
            clients,
            local=plan.learning_rates.local(local, plan.privacy.rounds),
            data_seed=plan.data.seed,
            **asdict(options),
            report=report,
        )
    cohorts = () if part else _cohorts(plan, clients)
    first = model.flat.clone()
    return Training(plan, model, engine, cohorts, metric, first, evaluators=evaluators)


def _options(plan: PlanFile, local: LocalTraining, options: EngineOptions) -> EngineOptions:
    """Complete options by what the plan allows; refuse those that its clients would not follow."""
    # The engine is trusted to sum, because it simulates every client; one step gains most by it.
    options = replace(options, sums=options.sums or local.steps == 1)
    one_pass = local.steps == 1 or (local.steps is None and local.epochs == 1)
    once = one_pass and plan.privacy.max_participations == 1 and plan.privacy.sampling is None
    if once:
        # No example comes again, so nothing of it would be used again.
        options = replace(options, cache_prefix=False)
    if plan.privacy.sampling is not None:
        # The members of a round are secret, so the rounding of others must not tell of them.
        try:
            options = replace(options, deterministic=True)
        except ConfigError as error:
            raise ConfigError(
                f"{error} A plan that samples needs deterministic=True too, so that no client's "
                "rounding tells who else was sampled."
            ) from None
    options.refuse(local, selects=plan.select is not None)
    return options


Code = dict[str, Callable[..., Any]]
"""Key of the plan -> what it names; a call turns errors of one's own code into sentences."""


def refuse_over_network(plan: PlanFile) -> None:
    """Check that clients on nodes can train a plan."""
    faults = {
        "privacy.sampling: its epsilon needs that nobody learns who was drawn, and nodes and the "
        "network see whom the server asks. Leave it out.": plan.privacy.sampling,
        "select: which slices a client asks for follows from its examples, and a server that "
        "is told learns it, which no epsilon covers. Use privpart train.": plan.select,
        "client.objective, model.local: a client's own models would have to stay on its node "
        "between rounds, and Flower may start a new process for each. Leave them out.": (
            plan.client.objective == "moon" or plan.model.local
        ),
    }
    checks.refuse_first(faults)
    _refuse_place(plan, elsewhere=True)


def _named_code(plan: PlanFile) -> Code:
    """Import what a plan names."""

    def calling(key: str, reference: str) -> Callable[..., Any]:
        try:
            function = own_code.load(reference, plan.folder)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error.__cause__

        # Wrapped, so that the attributes of a metric are kept, and workers find the function.
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401  somebody else's code
            return own_code.call(function, reference, key, *arguments, **options)

        return call

    return {key: calling(key, reference) for key, reference in plan.references().items()}


def _refuse_place(plan: PlanFile, *, elsewhere: bool) -> None:
    """Refuse what a plan asks for where its clients are not, or only where they are elsewhere."""
    faults = {
        f"data.held_out={plan.data.held_out}: the clients are elsewhere, where nobody is held "
        "out; leave it out, and let those nodes not take part.": elsewhere and plan.data.held_out,
        "privacy.metrics: the clients are elsewhere, and their engine evaluates nothing; leave "
        "the table out.": elsewhere and plan.privacy.metrics,
        "privacy.secure: its parties are nodes. Train the plan over Flower, or in Python with a "
        "SecureEngine, which simulates them.": not elsewhere and plan.privacy.secure,
    }
    checks.refuse_first(faults)


def _refuse_two(plan: PlanFile, objects: Own) -> None:
    """Refuse what is both passed and named by the plan."""
    named = {
        "module": plan.model.name or plan.model.factory,
        "clients": plan.data.task or plan.data.clients,
        "loss": "client.loss" in plan.references(),
        "augment": plan.client.augment,
        "metric": plan.data.metric,
    }
    for name, value in named.items():
        if value and getattr(objects, name) is not None:
            raise ConfigError(f"{name}: the plan names one as well; give one of them.")


def _local(plan: PlanFile, objects: Own, code: Code) -> LocalTraining:
    """Return how clients train, with functions in place of the names of code."""
    changes: dict[str, Any] = {}
    for name, given in (("loss", objects.loss), ("augment", objects.augment)):
        if given is not None:
            changes[name] = given
        elif (key := f"client.{name}") in code:
            # The function itself, which worker processes find by its name.
            changes[name] = vars(code[key])["__wrapped__"]
    return replace(plan.client, **changes)


def _model(plan: PlanFile, objects: Own, code: Code) -> PartialModel:
    table = plan.model
    if objects.module is None and table.name is None and table.factory is None:
        raise ConfigError("module: is missing; pass one, or name it in the plan's table [model].")
    try:
        # A copy, because a PartialModel takes a module's parameters over.
        module = _built(table, code) if objects.module is None else deepcopy(objects.module)
        module = unwrapped(module)
    except (RuntimeError, TypeError) as error:
        if objects.module is None:
            raise
        raise ConfigError(
            f"module: cannot be copied ({error}): it may keep an output of its own. Name a factory "
            "in the plan, which builds it, or drop what it keeps."
        ) from None
    if table.weights is not None:
        names = matching_parameters(module, table.keep or ["*"], "keep")
        load_weights(module, plan.folder / table.weights, names)
    if plan.select is not None:
        return table.partial(groups=plan.groups())
    _refuse_frozen(module, table.train)
    model = table.partial(module, groups=plan.groups())
    if plan.schedule is not None and len(model.groups) != len(plan.model.grouped()[0]):
        raise ConfigError(
            "model.groups: a group has no trainable parameter. Leave it out, so that the schedule "
            "counts the groups that train."
        )
    return model


def _refuse_frozen(module: nn.Module, train: Sequence[str] | None) -> None:
    """Refuse patterns that train what the network's author froze: one of the two is a mistake."""
    trained = dict(module.named_parameters())
    frozen = [n for n in matching_parameters(module, train) if not trained[n].requires_grad]
    if frozen:
        more = f" and {len(frozen) - 1} more" if len(frozen) > 1 else ""
        raise ConfigError(
            f"model.train={train}: trains {frozen[0]!r}{more}, which the network says is frozen "
            "(requires_grad=False). Leave model.train out, which trains what requires gradients, "
            "or call requires_grad_(True) on it."
        )


def _built(table: Model, code: Code) -> nn.Module:
    if table.factory is None:
        return table.network()
    # What the factory draws must be the same when the run is resumed.
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed((table.seed or 0) % 2**63)
        module = code["model.factory"](**table.sizes)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model.factory: {table.factory} returned {own_code.described(module)}; must return a "
            "torch.nn.Module."
        )
    return module


def _clients(
    plan: PlanFile, objects: Own, code: Code, network: nn.Module, read: Reader
) -> tuple[Clients, Accuracy | None]:
    """Return the population, and the accuracy on a task's test examples or on held-out users."""
    data = plan.data
    if data.task is not None:
        task = plan_data(data, network, read)
        return task.users, Accuracy(task.test_x, task.test_y)
    clients = objects.clients
    if clients is None:
        if data.clients is None:
            raise ConfigError("clients: are missing; pass them, or name them in [data].")
        clients = code["data.clients"](**data.options)
    _refuse_other_clients(clients)
    if not data.held_out:
        return clients, None
    remaining, public = held_out_of(clients, data.held_out)
    return remaining, None if data.measured_on is None else _accuracy_on(clients, public)


def _accuracy_on(clients: Clients, public: Sequence[ClientId]) -> Accuracy:
    """Return the accuracy on the examples of held-out users, which must have labels."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for client in public:
        match clients.examples(client):
            case (Tensor() as x, Tensor() as y):
                pairs.append((x, y))
            case _:
                raise ConfigError(
                    f"data.measured_on: the examples of client {client!r} are not a pair of "
                    "tensors (x, y), so there is no accuracy; name a metric of your own that "
                    "measures on held-out users (metric in a study's table [tuning])."
                )
    x, y = map(torch.cat, zip(*pairs, strict=True))
    return Accuracy(x, y)


def _refuse_other_clients(clients: Clients) -> None:
    """Check that a population has what the protocol asks for, and a client."""
    has_both = hasattr(clients, "ids") and callable(getattr(clients, "examples", None))
    if not has_both or isinstance(clients, type):
        raise ConfigError(
            f"clients: are {own_code.described(clients)}; must have ids and examples(client). Make "
            "them by an adapter of privpart.data, such as from_tensors."
        )
    if not isinstance(clients.ids, Sequence | np.ndarray) or isinstance(clients.ids, str):
        raise ConfigError(
            f"clients: their ids are {own_code.described(clients.ids)}; must be a sequence or a "
            "property that returns one."
        )
    if not len(clients.ids):
        raise ConfigError("clients: there are none; must be at least one.")


def _cohorts(plan: PlanFile, clients: Clients) -> Sequence[Sequence[ClientId]]:
    ids = distinct_ids(clients.ids)
    plan.accept_delta(len(ids))
    size = plan.data.clients_per_round
    if size is None:
        if len(ids) != (stated := plan.population()):
            raise ConfigError(
                f"privacy.sampling: the plan is for a population of {stated}, there are "
                f"{len(ids)} clients; both must be the same."
            )
        # A run draws them from its secret key, round by round.
        return ()
    if size > len(ids):
        raise ConfigError(
            f"data.clients_per_round={size}: there are {len(ids)} clients; must be at most as many."
        )
    refuse_short_cohorts(plan.privacy, size, len(ids))
    return partition.cohorts_in_turn(
        ids, size=size, rounds=plan.privacy.rounds, data_seed=plan.data.seed
    )


def without_canaries() -> ConfigError:
    """Return the error of a plan with a table [canaries] that nothing makes."""
    return ConfigError(
        "canaries: the plan has a table [canaries], and nothing here makes them. Train it with "
        "privpart train, or privpart.train(..., canaries=attacks.canary_clients); or leave the "
        "table out."
    )


def population_name(plan: PlanFile, ids: Iterable[object]) -> str:
    """Return the name under which the budget book keeps what these people have spent.

    It is the plan's own. Without one, a built-in task is one population however its examples are
    dealt, and other clients are one if their ids are the same in any order. More or fewer ids are
    another population: which of two contains the other is not inferred.
    """
    if plan.data.population is not None:
        return plan.data.population
    if plan.data.task is not None:
        return PUBLIC_DATA + plan.data.task
    # Sorted, so that the order in which a loader lists people does not make another population.
    digest = hashlib.sha256()
    for name in sorted(map(client_id, ids), key=id_order):
        digest.update(f"{name!r}\n".encode())
    return f"ids:{digest.hexdigest()[:20]}"


def _select_engine(
    plan: PlanFile, choice: SelectChoice, model: PartialModel, users: Users
) -> SelectEngine:
    """Clients with smaller networks; those that select words read the others as unknown."""
    spaces = spaces_of(choice, model.module)
    layout = Layout.of(model, spaces)
    turns = plan.turns(model)

    @lru_cache(maxsize=4096)
    def counts(client: int) -> Counts:
        words = users.y[users.indices[client]]
        return np.asarray(np.bincount(words[words >= 0], minlength=layout.sizes[0]))

    def smaller(*sizes: int) -> PartialModel:
        network = shrunk(plan.model.network(), spaces, sizes)
        # A smaller network's frozen part is the whole one's, which its fingerprint says.
        return plan.model.partial(network, fingerprint=model.fingerprint)

    return SelectEngine(
        model,
        spaces,
        smaller,
        users,
        local=plan.client,
        choosers=choosers_of(choice, layout.sizes, counts=counts, data_seed=plan.data.seed),
        data_seed=plan.data.seed,
        delivery=fetched_by(choice),
        localize=None if choice.words is None else localize_tokens(UNKNOWN),
        turns=turns,
    )


def refuse_misfit(
    model: PartialModel, clients: Clients, local: LocalTraining, metric: Metric | None
) -> None:
    """Check the network and the loss on examples of one client; reset the model afterwards.

    Raises:
        ConfigError: the network does not take them, the loss is not one number with a gradient, or
            a label is not below the number of outputs.
    """
    network = model.module
    # Lent, so that nothing that this trial leaves in the module stays in the start state.
    with model.lent(model.flat.clone()), seeded(0, torch.device("cpu"), everything=True):
        if isinstance(clients, Users) and local.loss == "cross_entropy":
            refuse_other_shapes(network, clients, metric)
        batch, _ = first_batch(clients, local)
        loss = batch_loss(network, batch, local.loss)
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    model.verify()
    if all(gradient is None for gradient in gradients):
        raise ConfigError("client.loss: does not depend on any parameter that trains.")


def first_batch(clients: Clients, local: LocalTraining) -> tuple[Batch, int]:
    """Return a batch of the first client, as it trains on it, and how many examples it holds."""
    first = client_id(clients.ids[0])
    examples = fetched(clients, first, torch.Generator().manual_seed(0))
    batch = take(examples, torch.arange(min(local.batch_size, count_rows(examples))))
    if local.augment is not None:
        with seeded(0, torch.device("cpu")):
            batch = augmented(batch, local.augment)
    return batch, count_rows(examples)


def refuse_other_shapes(network: nn.Module, users: Users, metric: Metric | None = None) -> None:
    """Check that the network gives one number per class for an example."""
    x, y = (tensor[:1] for tensor in users.examples(users.ids[0]))
    shape = tuple(x.shape[1:])
    try:
        with torch.no_grad():
            *places, outputs = logits_of(network(x)).shape
    except (RuntimeError, IndexError, ValueError, TypeError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(
            f"model: does not take the examples, of shape {shape} and type {x.dtype}: {reason}."
        ) from None
    if places != list(y.shape):
        raise ConfigError(
            f"model: does not take the examples, of shape {shape}: it gives outputs of shape "
            f"{(*places[1:], outputs)} for one; must be one number per class."
        )
    beyond = (users.y.flatten(1) if users.y.dim() > 1 else users.y[:, None]) >= outputs
    rows = users.indices.held(beyond.any(dim=1).nonzero().flatten()).tolist()
    if rows:
        raise ConfigError(
            f"model: has {outputs} outputs, but client {users.indices.owner(rows[0])!r} has the "
            f"label {int(users.y[rows[0]].max())} in row {rows[0]}; labels count from 0."
        )
    if isinstance(metric, Accuracy) and int(metric.y.max()) >= outputs:
        raise ConfigError(
            f"model: has {outputs} outputs, but a test example has the label {int(metric.y.max())}."
        )


def _refuse_carriers(model: PartialModel, clients: Clients, local: LocalTraining) -> None:
    """Refuse networks, losses and augmentations that carry data from client to client.

    Otherwise one client moves the sum by more than the clip norm. ``PartialModel.lent`` puts back
    what a module keeps; a function, a global or an object inside it may keep more. So two clients
    train in turn, each twice, and the two updates of each must have the same bits. That finds what
    two steps show; it proves nothing about code that means to hide something.
    """
    pair = [client for client, *_ in islice(holders(clients, clients.ids[:_TRIED], 0, 0), 2)]
    if len(pair) < 2:
        return
    start = model.flat.clone()
    short = replace(local, epochs=1, steps=min(2, local.steps or 2))

    def update(client: ClientId) -> Tensor:
        generator = client_generator(0, 0, client)
        examples = fetched(clients, client, generator)
        # A clip could hide a difference.
        how: dict[str, Any] = {"local": short, "generator": generator, "clip_norm": 1e6}
        return client_update(model, start, examples, **how)

    with one_thread():
        before, after = ([update(client) for client in pair] for _ in range(2))
    model.verify()
    for client, first, second in zip(pair, before, after, strict=True):
        if not torch.equal(first.nan_to_num(), second.nan_to_num()):
            raise ConfigError(
                f"clients: client {client!r} trained twice, with another one in between, and gave "
                "two different updates. The network, the loss, the augmentation or the data keeps "
                "something of a client (a list, a global, a hook), or is not the same when called "
                "again. Keep nothing between clients."
            )
