"""Models of a membership audit: who trains each of them, and what each says of every user.

A fair coin per user decides who trains a model; whoever stays out counts as zero, which is the
adjacency of the plan's guarantee. What a model says is a file of OUT/models, written when the model
is whole: the same command trains only those that are missing. Coins lie there too.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from accounting.checks import ConfigError
from attacks.membership_inference import scores_of_models
from privpart.client import batch_loss, loss_gradients
from privpart.data.batches import count_rows, tensors_of
from privpart.noise.source import SeededSource
from privpart.plan import PrivacyPlan
from privpart.run.store import decode_state, encode_state, lock, tensor_hash, write_durably
from privpart.training.metric import Accuracy
from privpart.training.training import Training

Array = NDArray[np.float64]
Coins = NDArray[np.bool_]
SHADOWS = 16
"""Shadow models, in pairs of opposite coins, so that each user is in half of them."""
_PUBLIC = 500  # units of test examples for RMIA, at most
_COINS = "coins.safetensors"


@dataclass(frozen=True, slots=True)
class Population:
    """A plan put together, the users that it asks in any round, and units that train no model.

    Attributes:
        promised: the plan's privacy plan, under which every round is released.
        digest: hash of everything that what models say depends on.
    """

    setup: Training
    promised: PrivacyPlan
    users: Sequence[Any]
    public: Sequence[Any]
    digest: str

    @classmethod
    def of(cls, setup: Training, users: Sequence[Any]) -> "Population":
        """Return the population of a plan; all its users' examples are read once."""
        public = list(_public(setup, users))
        digest = hashlib.sha256(f"{setup.plan.hash} {setup.plan.code()}".encode())
        for package in ("privpart", "torch"):
            digest.update(f" {package} {version(package)}".encode())
        digest.update(f" {setup.model_hash} {tensor_hash(setup.start)}".encode())
        for unit in (*map(setup.clients.examples, users), *public):
            for _, tensor in tensors_of(unit):
                digest.update(tensor_hash(tensor).encode())
        return cls(setup, _releasing(setup.promise()), users, public, digest.hexdigest())


@dataclass(frozen=True, slots=True)
class Draw:
    """Who trains each model, (S + T, m) with the S shadow models first, and a seed of the noise."""

    coins: Coins
    shadows: int
    seed: int

    @classmethod
    def fresh(cls, users: int, targets: int, shadows: int) -> "Draw":
        """Draw the coins of an audit.

        Those of the targets come from the operating system: whoever knew them could guess them
        without a model.
        """
        seed = secrets.randbits(48)
        half = np.random.default_rng(seed).random((shadows // 2, users)) < 0.5
        own = np.array([[secrets.randbits(1) for _ in range(users)] for _ in range(targets)], bool)
        return cls(np.concatenate([half, ~half, own]), 2 * (shadows // 2), seed)

    @property
    def present(self) -> Coins:
        """The targets' coins, in one vector."""
        return self.coins[self.shadows :].ravel()


@dataclass(frozen=True, slots=True)
class Said:
    """What n models say.

    Attributes:
        losses: on each user's examples, (n, m).
        norms: of those losses' gradients, (n, m).
        public: losses on public units, (n, k); None without test examples.
    """

    losses: Array
    norms: Array
    public: Array | None

    def scores(self, draw: Draw) -> dict[str, Array]:
        """Return each attack's scores of the users of all targets."""
        return scores_of_models(
            self.losses, self.norms, draw.coins[: draw.shadows], public=self.public
        )


class ModelFolder:
    """The folder OUT/models: the coins, and a file with what each whole model says.

    A file that cannot be read, or is of other coins, counts as missing.

    Raises:
        ConfigError: the folder holds another audit, or another process uses it.
    """

    def __init__(
        self, out: Path, population: Population, targets: int, shadows: int | None = None
    ) -> None:
        self._folder = out / "models"
        self._shadows = SHADOWS if shadows is None else shadows
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock(
                self._folder / "lock", f"out={out}: another process writes to it; wait for it."
            )
            self.draw = self._drawn(out, population, targets)
        except OSError as error:
            raise ConfigError(f"out={out}: cannot be used: {error.strerror}.") from None

    def _drawn(self, out: Path, population: Population, targets: int) -> Draw:
        """Return the coins that lie here, or fresh ones where no model was trained by them."""
        path = self._folder / "coins.safetensors"
        shape = self._shadows + targets, len(population.users)
        draw = _draw_in(path, population.digest, self._shadows)
        if draw is not None and draw.coins.shape == shape:
            return self._by(draw)
        numbers = range(len(list(self._folder.iterdir())))
        if any(_state(self._path(number)) is not None for number in numbers):
            raise ConfigError(
                f"out={out}: holds another audit: its kind, plan, data, --runs or version differ, "
                "or its coins are damaged. Name another folder, or remove this one."
            )
        draw = Draw.fresh(shape[1], targets, self._shadows)
        values = {"seed": draw.seed, "digest": population.digest}
        write_durably(path, encode_state({"coins": _integers(draw.coins)}, values))
        return self._by(draw)

    def _by(self, draw: Draw) -> Draw:
        self._hash = f"{tensor_hash(_integers(draw.coins))} {draw.seed}"
        return draw

    def get(self, number: int) -> dict[str, Array] | None:
        """Return what a model says; None if there is no whole file of it."""
        if (state := _state(self._path(number))) is None or state[1].get("draw") != self._hash:
            return None
        said = {name: tensor.numpy() for name, tensor in state[0].items()}
        return said if all(np.isfinite(values).all() for values in said.values()) else None

    def put(self, number: int, said: dict[str, Array]) -> None:
        """Write what a model says."""
        tensors = {name: torch.from_numpy(values) for name, values in said.items()}
        write_durably(self._path(number), encode_state(tensors, {"draw": self._hash}))

    def close(self) -> None:
        """Let other processes use the folder."""
        self._lock.release()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:04d}.safetensors"


def _state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return tensors and values of a file; None if it is missing or cannot be read."""
    try:
        tensors, values = decode_state(path)
    except ConfigError:
        return None
    return (tensors, values) if isinstance(values, dict) else None


def _draw_in(path: Path, digest: str, shadows: int) -> Draw | None:
    """Return the draw in a file of this population; None if there is none."""
    if (state := _state(path)) is None or state[1].get("digest") != digest:
        return None
    coins, seed = state[0].get("coins"), state[1].get("seed")
    if coins is None or not isinstance(seed, int) or coins.dim() != 2:
        return None
    return Draw(coins.numpy().astype(bool), shadows, seed)


def _integers(coins: Coins) -> Tensor:
    return torch.from_numpy(coins.astype(np.int32))


def said_by_models(
    population: Population,
    draw: Draw,
    *,
    folder: ModelFolder | None = None,
    told: Callable[[int], None] = lambda _: None,
) -> Said:
    """Train a model for each row of coins, and ask it about every user.

    Args:
        population: whom the models are trained on.
        draw: who trains each.
        folder: keeps what whole models say; those that are there are not trained again.
        told: gets the number of models that are done.

    Raises:
        ConfigError: a model diverged.
    """
    rows = said_by_each(
        draw,
        lambda number: _said(population, draw.coins[number], draw.seed + number),
        folder=folder,
        told=told,
    )
    losses, norms, public = (
        np.array([row[name] for row in rows]) for name in ("losses", "norms", "public")
    )
    return Said(losses, norms, public if population.public else None)


def said_by_each(
    draw: Draw,
    say: Callable[[int], dict[str, Array]],
    *,
    folder: ModelFolder | None,
    told: Callable[[int], None],
) -> list[dict[str, Array]]:
    """Return what each model says: from the folder, or by ``say``, which trains a model.

    Raises:
        ConfigError: a model diverged.
    """
    rows = []
    told(0)
    for number in range(len(draw.coins)):
        said = folder.get(number) if folder is not None else None
        if said is None:
            said = say(number)
            for name, values in said.items():
                if not np.isfinite(values).all():
                    raise ConfigError(
                        f"plan: training diverged: {name} of its model are not finite, so nothing "
                        "can be measured. Lower server.learning_rate or client.learning_rate."
                    )
            if folder is not None:
                folder.put(number, said)
        rows.append(said)
        told(number + 1)
    return rows


def _said(population: Population, members: Coins, seed: int) -> dict[str, Array]:
    """Train a model on the members, (m,) truth values; return what it says."""
    setup = population.setup
    parameters = trained(population, members, seed)
    of_users = _told(setup, parameters, map(setup.clients.examples, population.users))
    losses, norms = np.array(list(of_users), dtype=np.float64).T.copy()
    public = np.array([loss for loss, _ in _told(setup, parameters, population.public)])
    return {"losses": losses, "norms": norms, "public": public.astype(np.float64)}


def trained(population: Population, members: Coins, seed: int) -> Tensor:
    """Return the last released parameters of a training on the members, (m,) truth values."""
    setup = population.setup
    names = {user for user, coin in zip(population.users, members, strict=True) if coin}
    cohorts = [[c for c in cohort if c in names] for cohort in setup.cohorts]
    server, _ = replace(setup, cohorts=cohorts).run(population.promised, SeededSource(seed))
    return server.parameters


def _releasing(promised: PrivacyPlan) -> PrivacyPlan:
    """Return the plan with which every round is released, also one that coins left empty.

    Whoever stays out is a zero. A plan itself may not say so without sampling, because a real round
    of nobody releases noise for nothing.
    """
    released = replace(promised, minimum_cohort=1)
    object.__setattr__(released, "minimum_cohort", 0)
    return released


def released(setup: Training, parameters: Tensor) -> nn.Module:
    """Return the network with released parameters, in eval mode."""
    setup.model.load(setup.whole(parameters))
    setup.model.train_only(None)
    return setup.model.module.eval()


def _told(
    setup: Training, parameters: Tensor, units: Iterable[Any]
) -> Iterator[tuple[float, float]]:
    """Yield the loss of a released model on each unit's examples, and the norm of its gradient."""
    module, loss = released(setup, parameters), setup.engine.local_of(0).loss
    trains = [p for p in module.parameters() if p.requires_grad]
    for batch in units:
        total = batch_loss(module, batch, loss)
        gradients = [g for g in loss_gradients(total, trains) if g is not None]
        norm = torch.linalg.vector_norm(torch.cat([g.detach().flatten() for g in gradients]))
        yield float(total.detach()), float(norm)


def _public(setup: Training, users: Sequence[Any]) -> Iterator[Any]:
    """Yield test examples in units of as many as a user has, if the metric is an accuracy."""
    if not isinstance(setup.metric, Accuracy):
        return
    size = count_rows(setup.clients.examples(users[0]))
    x, y = setup.test
    for start in range(0, min(len(x) - size + 1, _PUBLIC * size), size):
        yield x[start : start + size], y[start : start + size]
