"""Recipe: the trainings of the demo and of the freeze search, by noise, trained part and seed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from joblib import Parallel, delayed
from torch import Tensor

from accounting import BinaryTree, Participation
from privpart.client import LocalTraining
from privpart.data import partition, tasks
from privpart.data.users import Users
from privpart.engines.embedded import EmbeddedEngine
from privpart.experiment.training import accuracy
from privpart.loop import fit
from privpart.model import PartialModel
from privpart.models import small_cnn
from privpart.noise.source import SeededSource
from privpart.plan import PrivacyPlan
from privpart.server import Server, ServerOptimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything about a training that its cells share.

    Each simulated user holds equally many images and takes part in exactly one round; one tree
    spans all rounds.

    Attributes:
        task: "digits" or "fashion-mnist".
        data_dir: where the latter's files are; None is Debian's place.
        channels: of the network, see ``models.small_cnn``; likewise hidden and kernel.
        images_per_user: >= 1.
        users: simulated users, >= rounds.
        rounds: of training.
        local: how a client trains.
        clip_norm: of an update.
        learning_rate: the server's, without noise.
        damping: at noise multiplier z the server's rate is at most damping / z.
        momentum: the server's.
    """

    task: str
    data_dir: Path | None = None
    channels: tuple[int, int]
    hidden: int
    kernel: int
    users: int
    images_per_user: int
    rounds: int
    local: LocalTraining
    clip_norm: float
    learning_rate: float
    damping: float
    momentum: float

    def plan(self, noise_multiplier: float) -> PrivacyPlan:
        """What is promised at this noise."""
        return PrivacyPlan(
            mechanism=BinaryTree(self.rounds),
            participation=Participation(self.rounds),
            clip_norm=self.clip_norm,
            noise_multiplier=noise_multiplier,
            report_goal=self.users // self.rounds,
        )

    def load(self) -> tasks.Task:
        """Read the data."""
        return tasks.digits() if self.task == "digits" else tasks.fashion_mnist(self.data_dir)

    def model(self, train: Sequence[str], *, image_size: int, seed: int) -> PartialModel:
        """Build the network with the named part trainable."""
        network = small_cnn(
            channels=self.channels, hidden=self.hidden, kernel=self.kernel, image_size=image_size
        )
        return PartialModel(network, train=train, seed=seed, overwrite=True)


@dataclass(frozen=True, slots=True)
class Cell:
    """One training of many: a name for what trains, its patterns, the noise, the seed."""

    part: str
    train: tuple[str, ...]
    noise_multiplier: float
    seed: int


def train_cells(recipe: Recipe, cells: Sequence[Cell], *, jobs: int) -> Iterator[float]:
    """Yield the test accuracy of each cell, in order, as ``jobs`` processes finish them."""
    work = (delayed(train_cell)(recipe, cell) for cell in cells)
    results: Iterator[float] = Parallel(n_jobs=jobs, return_as="generator")(work)
    return results


def train_cell(recipe: Recipe, cell: Cell) -> float:
    """Train once, on one thread, and return the test accuracy in [0, 1].

    The seed decides the start values, who holds what, who comes when, and the noise: a simulation,
    whose noise is not secret.
    """
    torch.set_num_threads(1)
    task = recipe.load()
    model = recipe.model(cell.train, image_size=task.train_x.shape[-1], seed=cell.seed)
    plan = recipe.plan(cell.noise_multiplier)
    held = recipe.users * recipe.images_per_user
    users = Users(
        task.train_x[:held],
        task.train_y[:held],
        partition.iid_users(held, users=recipe.users, data_seed=cell.seed),
    )
    server = Server(
        plan,
        model.flat,
        source=SeededSource(cell.seed),
        optimizer=ServerOptimizer(
            learning_rate=_server_rate(recipe, cell.noise_multiplier), momentum=recipe.momentum
        ),
    )
    engine = EmbeddedEngine(model, users, local=recipe.local, data_seed=cell.seed, sums=True)
    cohorts = partition.cohorts_once_each(
        users=recipe.users, rounds=recipe.rounds, data_seed=cell.seed
    )

    def evaluate(parameters: Tensor) -> float:
        model.load(parameters)
        return accuracy(model.module, task.test_x, task.test_y)

    last = fit(server, engine, cohorts, evaluate=evaluate)[-1]
    return last.metric if last.metric is not None else float("nan")


def _server_rate(recipe: Recipe, noise_multiplier: float) -> float:
    if noise_multiplier == 0:
        return recipe.learning_rate
    return min(recipe.learning_rate, recipe.damping / noise_multiplier)
