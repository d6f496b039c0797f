"""Training: the model, clients and test examples that a plan describes, and the run over them.

``training`` puts a plan together and ``Training.run`` trains it. ``privpart train``, ``sweep``,
``demo`` and ``freeze-search`` all train through these two functions.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from accounting.checks import ConfigError
from privpart.data import federated_hdf5, partition, tasks
from privpart.data.tasks.shakespeare import BEGIN, UNKNOWN, WHEEL
from privpart.data.users import Users
from privpart.engines.embedded import EmbeddedEngine
from privpart.engines.options import EngineOptions
from privpart.experiment.plan_file import Data, PlanFile, short_cohort
from privpart.experiment.select_table import SelectChoice
from privpart.loop import Callback, fit
from privpart.messages import may_take_part
from privpart.model import PartialModel
from privpart.models.transformer import LanguageModel
from privpart.noise.source import NoiseSource
from privpart.plan import PrivacyPlan
from privpart.select.disclosure import SeenByParty, seen_in
from privpart.select.engine import SelectEngine, localize_tokens
from privpart.select.key_spaces import shrunk
from privpart.select.keys import Counts
from privpart.select.layout import Layout
from privpart.select.turns import Turns
from privpart.server import RoundCounts, Server

_BATCH = 500


@dataclass(frozen=True, slots=True)
class Training:
    """A plan put together. Its data are simulated or public.

    Attributes:
        plan: what to train.
        model: in its start state.
        engine: computes the clients.
        cohorts: per round, the clients to ask.
        test_x: examples that no client holds.
        test_y: their labels; -100 does not count.
        first: the model's flat vector before training, shape (d,).
    """

    plan: PlanFile
    model: PartialModel
    engine: EmbeddedEngine | SelectEngine
    cohorts: Sequence[Sequence[int]]
    test_x: Tensor
    test_y: Tensor
    first: Tensor

    @property
    def _turns(self) -> Turns | None:
        return self.engine.turns if isinstance(self.engine, SelectEngine) else None

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
        found = hashlib.sha256(f"{self.model.fingerprint} {self.model.trainable_hash}".encode())
        if self._turns is not None:
            never = self._turns.whole(self.first, torch.zeros_like(self.start))
            for tensor in (self._turns.order, never):
                found.update(tensor.numpy().tobytes())
        return found.hexdigest()

    def whole(self, parameters: Tensor) -> Tensor:
        """Return the model's flat vector, shape (d,), from the server's parameters."""
        return parameters if self._turns is None else self._turns.whole(self.first, parameters)

    def accuracy(self, parameters: Tensor) -> float:
        """Return the share of test examples that the model gets right with these parameters."""
        self.model.load(self.whole(parameters))
        return accuracy(self.model.module, self.test_x, self.test_y)

    def seen(self) -> SeenByParty | None:
        """Return what parties will see of the clients' keys; None where clients select nothing."""
        if isinstance(self.engine, SelectEngine):
            return seen_in(self.engine.rehearse())
        return None

    def run(
        self,
        promised: PrivacyPlan,
        source: NoiseSource,
        *,
        restore: Callable[[Server], None] | None = None,
        commit: Callable[[Server, RoundCounts], None] | None = None,
        evaluate_every: int | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Server:
        """Train on one thread and return the server after the last round.

        Args:
            promised: the plan's privacy plan.
            source: of the noise.
            restore: puts the server into the state of a run that is resumed.
            commit: see ``fit``.
            evaluate_every: rounds between evaluations on the test examples; None leaves them out.
            callbacks: see ``fit``.

        Raises:
            ConfigError, CohortTooSmallError, WorkerError: see ``fit`` and the engine.
        """
        torch.set_num_threads(1)  # small models lose time to more threads
        server = Server(promised, self.start, source=source, optimizer=self.plan.server)
        if restore is not None:
            restore(server)
        with self.engine:
            fit(
                server,
                self.engine,
                self.cohorts,
                commit=commit,
                evaluate=None if evaluate_every is None else self.accuracy,
                evaluate_every=evaluate_every,
                callbacks=callbacks,
            )
        return server


def training(
    plan: PlanFile,
    *,
    options: EngineOptions | None = None,
    report: Callable[[str], None] | None = None,
) -> Training:
    """Load the data and build the model, users and cohorts of a plan.

    Args:
        plan: what to train.
        options: how the engine computes clients; None takes the defaults. ``sums`` is always
            allowed: the engine is trusted, because it simulates every client.
        report: gets a sentence about how the engine computes; None writes it to standard error.

    Raises:
        ConfigError: unknown model or sizes, patterns that match nothing, missing data, a model that
            does not fit them, more users than examples, more clients in a round than users,
            options that the clients of this plan would not follow.
    """
    options = replace(options or EngineOptions(), sums=True)
    options.refuse(
        plan.client, groups_take_turns=plan.schedule is not None, selects=plan.select is not None
    )
    model = plan.model.partial(groups=plan.groups())
    data = plan_data(plan.data, model.module)
    refuse_other_shapes(model.module, data)
    cohorts = partition.cohorts_in_turn(
        users=len(data.users),
        size=plan.data.clients_per_round,
        rounds=plan.privacy.rounds,
        data_seed=plan.data.seed,
    )
    engine: EmbeddedEngine | SelectEngine
    if plan.select is not None:
        engine = _select_engine(plan, plan.select, model, data.users)
    else:
        engine = EmbeddedEngine(
            model,
            data.users,
            local=plan.client,
            data_seed=plan.data.seed,
            **asdict(options),
            report=report,
        )
    return Training(plan, model, engine, cohorts, data.test_x, data.test_y, model.flat.clone())


def _select_engine(
    plan: PlanFile, choice: SelectChoice, model: PartialModel, users: Users
) -> SelectEngine:
    """Clients with smaller networks; those that select words read the others as unknown."""
    spaces = choice.spaces(model.module)
    layout = Layout.of(model, spaces)
    turns = plan.turns(model)

    @lru_cache(maxsize=4096)
    def counts(client: int) -> Counts:
        words = users.y[users.indices[client]]
        return np.asarray(np.bincount(words[words >= 0], minlength=layout.sizes[0]))

    def smaller(*kept: int) -> PartialModel:
        network = shrunk(plan.model.network(), spaces, kept)
        return plan.model.partial(network, fingerprint=model.fingerprint)  # same frozen part

    return SelectEngine(
        model,
        spaces,
        smaller,
        users,
        local=plan.client,
        choosers=plan.choosers(layout, counts=counts),
        data_seed=plan.data.seed,
        delivery=choice.fetch(),
        localize=None if choice.words is None else localize_tokens(UNKNOWN),
        turns=turns,
    )


def refuse_short_cohorts(plan: PrivacyPlan, cohorts: Sequence[Sequence[int]]) -> None:
    """Check that a plan's limits let enough clients take part in every round.

    Raises:
        ConfigError: the first round that falls short although every client answers.
    """
    limits, taken = plan.participation, dict[int, list[int]]()
    for round_, cohort in enumerate(cohorts):
        came = 0
        for client in set(cohort):
            before = taken.setdefault(client, [])
            if may_take_part(limits, before, round_):
                before.append(round_)
                came += 1
        if came < plan.minimum_cohort:
            raise short_cohort(len(cohorts), round_, came, plan.minimum_cohort)


@torch.no_grad()
def accuracy(module: torch.nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of correct labels in evaluation mode, without dropout.

    Args:
        module: returns logits, classes last.
        x: examples, shape (n, ...).
        y: labels, shape (n,), or (n, length) for a language model; -100 does not count.
    """
    training = [layer for layer in module.modules() if layer.training]
    module.eval()
    try:
        right = sum(
            int((module(some).argmax(dim=-1) == labels).sum())
            for some, labels in zip(torch.split(x, _BATCH), torch.split(y, _BATCH), strict=True)
        )
    finally:
        for layer in training:
            layer.training = True
    return right / int((y >= 0).sum())


@dataclass(frozen=True, slots=True)
class PlanData:
    """Users and test examples of a plan. All of them are simulated or public.

    Attributes:
        users: the clients' examples.
        test_x: examples that no client holds.
        test_y: their labels; -100 does not count.
    """

    users: Users
    test_x: Tensor
    test_y: Tensor


def plan_data(data: Data, network: nn.Module) -> PlanData:
    """Read a task and deal its examples to users.

    Args:
        data: the plan's table.
        network: the plan's network; a language model determines the size of the vocabulary.

    Raises:
        ConfigError: missing or unexpected files, or more users than examples.
    """
    if data.task == "shakespeare":
        return _next_word(_folder(data), network)
    if data.task == "fed-emnist":
        return _fed_emnist(_folder(data))
    task = _images(data)
    users = Users(task.train_x, task.train_y, _dealt(task, data, data.users or 0))
    return PlanData(users, task.test_x, task.test_y)


def _next_word(folder: Path, network: nn.Module) -> PlanData:
    if not isinstance(network, LanguageModel):
        raise TypeError("a plan with plays has a language model")
    words = network.embedding.num_embeddings - (BEGIN + 1)
    if words < 1:
        raise ConfigError(
            f"model.sizes.vocabulary: must be at least {BEGIN + 2}, because {BEGIN + 1} entries "
            "are not words."
        )
    task = tasks.next_word(tasks.speaking_roles(folder / WHEEL), vocabulary=words)
    return PlanData(task.users, task.test_x, task.test_y)


def _fed_emnist(folder: Path) -> PlanData:
    """Return the users of TensorFlow Federated's split and the test examples of all of them."""
    users, _ = federated_hdf5(folder / "fed_emnist_train.h5")
    test, _ = federated_hdf5(folder / "fed_emnist_test.h5")
    if users.x.shape[1:] != test.x.shape[1:]:
        raise ConfigError(
            f"{folder}: the files for training and test have images of different shapes."
        )
    return PlanData(users, test.x, test.y)


def _dealt(task: tasks.Task, data: Data, users: int) -> list[Tensor]:
    """Return the rows of each user's training examples."""
    if data.alpha is not None:
        return partition.dirichlet_users(
            task.train_y, users=users, alpha=data.alpha, data_seed=data.seed
        )
    if data.classes_each is not None:
        return partition.pathological_users(
            task.train_y, users=users, classes_each=data.classes_each, data_seed=data.seed
        )
    return partition.iid_users(len(task.train_x), users=users, data_seed=data.seed)


def _images(data: Data) -> tasks.Task:
    if data.task == "digits":
        return tasks.digits()
    if data.task == "fashion-mnist":
        return tasks.fashion_mnist(data.directory)
    readers = {"emnist": tasks.emnist, "cifar10": tasks.cifar10, "cifar100": tasks.cifar100}
    return readers[data.task](_folder(data))


def _folder(data: Data) -> Path:
    if data.directory is None:
        raise TypeError("a plan names the folder of a task that is read from files")
    return data.directory


def refuse_other_shapes(network: nn.Module, data: PlanData) -> None:
    """Check the network on one example.

    Raises:
        ConfigError: it does not take the example, or has too few outputs.
    """
    try:
        with torch.no_grad():
            *places, outputs = network(data.test_x[:1]).shape
    except (RuntimeError, IndexError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model: does not take the task's examples, of shape {tuple(data.test_x.shape[1:])} "
            f"and type {data.test_x.dtype}: {reason}."
        ) from None
    if places != list(data.test_y[:1].shape):
        raise ConfigError(
            "model: does not take the task's examples, of shape "
            f"{tuple(data.test_x.shape[1:])}: it gives outputs of shape {(*places[1:], outputs)} "
            "for one; must be one number per class."
        )
    most = max(int(data.users.y.max()), int(data.test_y.max()))
    if most >= outputs:
        raise ConfigError(f"model: has {outputs} outputs, but the task {most + 1} classes.")
