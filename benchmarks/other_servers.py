"""Other servers: what ``attacks.replay`` finds in servers that are not this package's.

Run: ``python benchmarks/other_servers.py``; writes benchmarks/results/other_servers.json.

A DP-FTRL loop in 20 lines of NumPy, right and with faults; Opacus's engine and ``FTRLEngine``, of
whose loops examples are the clients; and, where they are installed (each in an environment of its
own, with ``--servers``; results are merged), Flower's central strategy with server-side fixed
clipping, and pfl-research's Gaussian mechanism and banded matrix factorization.
Each is driven through its public classes with 20 clients per round; what is stated of it, and hence
audited, is the row's mechanism, with one participation in each round that ``participation`` allows.
"""

import frame

import itertools
import logging
import math
import tempfile
import time
from collections.abc import Callable
from functools import partial, reduce
from importlib import metadata
from operator import add
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from opacus import PrivacyEngine

import attacks
from accounting import BinaryTree, Dense, Independent, Mechanism, Participation
from accounting.report import down, up
from privpart import FTRLEngine

ROUNDS, DIM, CLIENTS = 16, 4000, 20
CLIP, Z, DELTA = 0.5, 2.0, 1e-5
LAYERS, SEPARATION = 4, 4
Updates = list[np.ndarray]
Start = Callable[[], Callable[[Updates], np.ndarray]]


def cut(update: np.ndarray, *_: int) -> np.ndarray:
    """Clip; what is not finite counts as zeros."""
    norm = float(np.linalg.norm(update.astype(np.float64)))
    if not math.isfinite(norm):
        return np.zeros(DIM)
    return update * min(1.0, CLIP / max(norm, 1e-300))


def tree(rng: np.random.Generator) -> np.ndarray:
    """Return the noise of the rounds' sums: a tree's, drawn in advance."""
    decoder = BinaryTree(ROUNDS).decoder()
    return np.diff(decoder @ rng.normal(size=(decoder.shape[1], DIM)), axis=0, prepend=0.0)


def node_twice(rng: np.random.Generator) -> np.ndarray:
    decoder = BinaryTree(ROUNDS).decoder()
    nodes = rng.normal(size=(decoder.shape[1], DIM))
    nodes[3] = nodes[0]
    return np.diff(decoder @ nodes, axis=0, prepend=0.0)


def unnoised_bias(rng: np.random.Generator) -> np.ndarray:
    noise = tree(rng)
    noise[5, :10] = 0.0
    return noise


def shared_half(rng: np.random.Generator) -> np.ndarray:
    noise = tree(rng)
    noise[:, DIM // 2 :] = noise[:, : DIM // 2]
    return noise


def one_unclipped(update: np.ndarray, client: int, round_: int) -> np.ndarray:
    return update if (client, round_) == (7, 9) else cut(update)


def loosely(update: np.ndarray, *_: int) -> np.ndarray:
    return cut(update) if not np.linalg.norm(update) <= 2 * CLIP else update


def by_layer(update: np.ndarray, *_: int) -> np.ndarray:
    parts = [np.where(np.arange(DIM) // (DIM // LAYERS) == i, update, 0.0) for i in range(LAYERS)]
    return sum(map(cut, parts), start=np.zeros(DIM))


def mean(total: np.ndarray, noise: np.ndarray, _: Updates) -> np.ndarray:
    return (total + noise) / CLIENTS


def noise_where_sent(total: np.ndarray, noise: np.ndarray, _: Updates) -> np.ndarray:
    return np.where(total != 0, total + noise, 0.0) / CLIENTS


def mean_of_senders(total: np.ndarray, noise: np.ndarray, updates: Updates) -> np.ndarray:
    return (total + noise) / max(1, sum(bool(np.any(update)) for update in updates))


FAULTS: dict[str, dict[str, Callable[..., np.ndarray]]] = {
    "right": {},
    "noise x 0.98": {"noise": lambda rng: 0.98 * tree(rng)},
    "each round has noise of its own": {"noise": lambda rng: rng.normal(size=(ROUNDS, DIM))},
    "a node of the tree is used twice": {"noise": node_twice},
    "10 parameters of 4,000 have no noise in one round": {"noise": unnoised_bias},
    "half of the parameters repeat the other half's noise": {"noise": shared_half},
    "clip per layer": {"clip": by_layer},
    "one update of 320 is not clipped": {"clip": one_unclipped},
    "only updates of twice the clip norm are clipped": {"clip": loosely},
    "noise only where somebody sent something": {"released": noise_where_sent},
    "divided by the clients that sent something": {"released": mean_of_senders},
}


def loop(
    noise: Callable[..., np.ndarray] = tree,
    clip: Callable[..., np.ndarray] = cut,
    released: Callable[..., np.ndarray] = mean,
) -> Start:
    """A DP-FTRL loop as people write it, of three parts, each of which may have a fault."""

    def start() -> Callable[[Updates], np.ndarray]:
        rounds = enumerate(noise(np.random.default_rng(7)) * Z * CLIP)

        def step(updates: Updates) -> np.ndarray:
            t, added = next(rounds)
            total = sum((clip(u, j, t) for j, u in enumerate(updates)), start=np.zeros(DIM))
            return released(total, added, updates)

        return step

    return start


def flower(weights: list[int]) -> Start:
    """Flower's strategy for central DP with server-side fixed clipping, around its FedAvg."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in a ServerApp
    logging.getLogger("flwr").setLevel(logging.ERROR)
    sizes = np.cumsum([DIM // LAYERS] * LAYERS)[:-1]

    def arrays(vector: np.ndarray) -> Any:
        parts = np.split(vector.astype(np.float32), sizes)
        return ArrayRecord({f"layer{i}": Array(part) for i, part in enumerate(parts)})

    def start() -> Callable[[Updates], np.ndarray]:
        np.random.seed(7)  # noqa: NPY002  the generator that Flower draws from
        strategy = DifferentialPrivacyServerSideFixedClipping(FedAvg(), Z, CLIP, CLIENTS)
        strategy.current_arrays = arrays(np.zeros(DIM))

        def reply(update: np.ndarray, weight: int) -> Any:
            # an update of zeros ends the round in a division by zero; this one is lost in rounding
            sent = update if np.any(update) else np.full(DIM, 1e-15, np.float32)
            asked = Message(RecordDict(), dst_node_id=1, message_type="train")
            examples = MetricRecord({"num-examples": weight})
            return Message(RecordDict({"a": arrays(sent), "m": examples}), reply_to=asked)

        def step(updates: Updates) -> np.ndarray:
            replies = [reply(u, w) for u, w in zip(updates, weights, strict=True)]
            released, _ = strategy.aggregate_train(1, replies)
            return np.concatenate([released[name].numpy() for name in released])

        return step

    return start


def pfl(kind: str) -> tuple[Start, Mechanism, Participation]:
    """Mechanisms of pfl-research, applied centrally to statistics of users; the sum is released."""
    from pfl.internal.ops import pytorch_ops
    from pfl.internal.ops.selector import set_framework_module
    from pfl.internal.platform.selector import get_platform
    from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism
    from pfl.privacy.ftrl_mechanism import BandedMatrixFactorizationMechanism
    from pfl.stats import MappedVectorStatistics

    set_framework_module(pytorch_ops)
    # it keeps its matrix in a folder that outlives it
    get_platform().create_checkpoint_directories = lambda _: [tempfile.mkdtemp()]

    def banded() -> Any:
        return BandedMatrixFactorizationMechanism(
            CLIP, ROUNDS, SEPARATION, lambda _: SimpleNamespace(cohort_noise_parameter=Z)
        )

    def start() -> Callable[[Updates], np.ndarray]:
        seeds = np.random.default_rng(7)
        inner = GaussianMechanism(CLIP, Z) if kind == "gaussian" else banded()
        mechanism = CentrallyAppliedPrivacyMechanism(inner)

        def statistics(update: np.ndarray) -> Any:
            layers = torch.split(torch.from_numpy(update), DIM // LAYERS)
            return MappedVectorStatistics({f"layer{i}": layer for i, layer in enumerate(layers)})

        def step(updates: Updates) -> np.ndarray:
            # as pfl's algorithms do, a seed of its own for each round
            context = SimpleNamespace(seed=int(seeds.integers(2**31)), cohort_size=CLIENTS)
            users = (
                mechanism.postprocess_one_user(stats=statistics(update), user_context=context)[0]
                for update in updates
            )
            released, _ = mechanism.postprocess_server(
                stats=reduce(add, users), central_context=context, aggregate_metrics=None
            )
            return torch.cat([released[f"layer{i}"] for i in range(LAYERS)]).numpy()

        return step

    if kind == "gaussian":
        return start, Independent(ROUNDS), Participation(ROUNDS)
    limits = Participation(ROUNDS, ROUNDS // SEPARATION, SEPARATION)
    return start, Dense(banded().query_matrix), limits


class Given(torch.utils.data.Dataset[torch.Tensor]):
    """Examples that are the updates of the round: of a linear loss, they are its gradients."""

    def __init__(self) -> None:
        self.rows = torch.zeros(CLIENTS, DIM)
        self._next = itertools.cycle(range(CLIENTS))

    def __len__(self) -> int:
        return ROUNDS * CLIENTS

    def __getitem__(self, _: int) -> torch.Tensor:
        return self.rows[next(self._next)].clone()


def opacus(engine: Any, **options: Any) -> Start:
    """An ordinary loop of PyTorch under an engine of Opacus's kind; SGD of rate 1 steps."""

    def start() -> Callable[[Updates], np.ndarray]:
        module, given = torch.nn.Linear(DIM, 1, bias=False), Given()
        weight = torch.nn.init.zeros_(module.weight)
        private, optimizer, loader = engine().make_private(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
            data_loader=torch.utils.data.DataLoader(given, batch_size=CLIENTS),
            noise_multiplier=Z, max_grad_norm=CLIP, loss_reduction="sum", poisson_sampling=False,
            **{name: option() if callable(option) else option for name, option in options.items()},
        )  # fmt: skip
        batches = iter(loader)

        def step(updates: Updates) -> np.ndarray:
            given.rows = torch.from_numpy(np.stack(updates))
            before = weight.detach().clone()
            optimizer.zero_grad()
            private(next(batches)).sum().backward()
            optimizer.step()
            return (before - weight.detach()).view(-1).numpy()

        return step

    return start


def of_opacus(case: str) -> tuple[Start, Mechanism, Participation]:
    if case == "PrivacyEngine":
        seeded = {"noise_generator": lambda: torch.Generator().manual_seed(7)}
        start = opacus(PrivacyEngine, **seeded)
        return start, Independent(ROUNDS), Participation(ROUNDS)
    start = opacus(partial(FTRLEngine, seed=7), epochs=1, mechanism=BinaryTree(ROUNDS))
    return start, BinaryTree(ROUNDS), Participation(ROUNDS)


def audited(
    start: Start, mechanism: Mechanism, participation: Participation, divisor: int
) -> dict[str, Any]:
    """Return a row of the table."""
    began = time.process_time()
    found = attacks.replay(
        start, mechanism, participation, noise_multiplier=Z, clip_norm=CLIP, divisor=divisor,
        dim=DIM, clients=CLIENTS, tensors={f"layer{i}": DIM // LAYERS for i in range(LAYERS)},
    )  # fmt: skip
    bound = found.bound(DELTA)
    return {
        "stated": f"{mechanism.name}, epsilon {up(found.claimed.epsilon(DELTA), 4)}",
        "found": list(found.faults),
        "at_least": None if bound is None else down(bound.epsilon, 4),
        "longest": down(found.longest, 5),
        "cpu_seconds": round(time.process_time() - began, 2),
    }


def row(server: str, case: str) -> dict[str, Any]:
    if server == "loop":
        # a client in every fourth round: what the loop's author states
        return audited(
            loop(**FAULTS[case]), BinaryTree(ROUNDS), Participation(ROUNDS, 4, 4), CLIENTS
        )
    if server == "flower":
        weights = [1] * CLIENTS if case == "equal" else list(range(1, CLIENTS + 1))
        return audited(flower(weights), Independent(ROUNDS), Participation(ROUNDS), CLIENTS)
    return audited(*(of_opacus if server == "opacus" else pfl)(case), 1)


def main() -> None:
    cases = {
        "loop": list(FAULTS),
        "flower": ["equal", "unequal"],
        "pfl": ["gaussian", "banded"],
        "opacus": ["PrivacyEngine", "FTRLEngine"],
    }
    given = frame.options(
        __doc__,
        "other_servers.json",
        quick={"servers": ["loop"]},
        servers=frame.among(cases, ["loop", "opacus"]),
    )
    packages = {
        "loop": ["numpy"],
        "flower": ["numpy", "flwr"],
        "pfl": ["numpy", "torch", "pfl"],
        "opacus": ["torch", "opacus"],
    }
    result = frame.Result(given.result)
    rows = {}
    for server in given.servers:
        versions = {name: metadata.version(name) for name in packages[server]}
        rows[server] = {"versions": versions}
        for case in cases[server][: 2 if given.quick else None]:
            rows[server][case] = row(server, case)
            frame.show(f"{server}: {case}", rows[server][case])
    result.write(servers=result.old.get("servers", {}) | rows)


if __name__ == "__main__":
    main()
