"""Flower's side of ``peers.py``: FedAvg and Flower's own clipping, simulated on two Ray actors.

Run by ``peers.py`` in an environment with flwr: ``python peers_flower.py CASE.npz SUM.npz``. One
simulated node is one client, as in Flower's own examples; only trainable parameters are sent. Every
round begins with the same parameters.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM
from peers_work import CLIP, Work, next_round, read, train

_MANY = 10**9


class _EnoughError(Exception):
    """The benchmark needs no more rounds."""


class Turns(FedAvg):
    """FedAvg that waits for the benchmark before every round and never updates the model."""

    def __init__(self, work: Work, result: Path) -> None:
        super().__init__(fraction_evaluate=0.0, min_available_nodes=len(work.y))
        self.work, self.result = work, result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Wait for the turn, then configure the round as FedAvg does."""
        if not next_round():
            raise _EnoughError
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average as FedAvg does; save the sum of the first round."""
        replies = list(replies)
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed or len(replies) != len(self.work.y):
            raise RuntimeError(f"{len(replies)} replies, errors: {failed}")
        mean, metrics = super().aggregate_train(server_round, replies)
        if server_round == 1 and mean is not None:
            after, start = mean.to_torch_state_dict(), self.work.start
            total = {n: (after[n] - s).numpy() * len(self.work.y) for n, s in start.items()}
            np.savez(self.result, **total)
        return ArrayRecord(self.work.start), metrics


def client_app(case: Path) -> ClientApp:
    """Return the app of a node: it trains and applies Flower's clipping to the update."""
    app = ClientApp(mods=[fixedclipping_mod])

    @app.train()
    def train_node(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        work, client = read(case), int(context.node_config["partition-id"])
        after = train(work, message.content["arrays"].to_torch_state_dict(), client)
        metrics = MetricRecord({"num-examples": len(work.y[client])})
        content = RecordDict({"arrays": ArrayRecord(after), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


def server_app(work: Work, result: Path) -> ServerApp:
    """Return the app of the server: it runs rounds until the benchmark needs no more."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        start, config = ArrayRecord(work.start), ConfigRecord({KEY_CLIPPING_NORM: CLIP})
        try:
            Turns(work, result).start(grid, start, num_rounds=_MANY, train_config=config)
        except _EnoughError:
            print("enough", flush=True)

    return app


if __name__ == "__main__":
    case = Path(sys.argv[1])
    torch.set_num_threads(1)
    work = read(case)
    run_simulation(
        server_app(work, Path(sys.argv[2])),
        client_app(case),
        num_supernodes=len(work.y),
        backend_config={
            "init_args": {"num_cpus": 2, "_temp_dir": sys.argv[3], "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
