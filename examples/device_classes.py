"""Weak devices train fewer parameters than strong ones in the same rounds (FedPT, section 5).

Run: python examples/device_classes.py

Every device receives the server's whole vector, so it trains against the current model. A weak one
keeps some of the server's parameters fixed, and spends no gradient, optimiser state or uplink on
them. Its update covers its own parameters and is filled with zeros to the server's length.

Zeros leave the norm unchanged, so one client still moves the sum by at most clip_norm and the
accounting stays the same. The divisor is the plan's report_goal for every coordinate: dividing a
coordinate by the number of devices that trained it would let a single device move the mean there by
its whole update. A coordinate that half of the devices train therefore moves half as far.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from accounting import BinaryTree, Participation, checks
from accounting.checks import ConfigError
from accounting.report import up
from privpart import (
    EmbeddedEngine,
    LocalTraining,
    PartialModel,
    PrivacyPlan,
    SecretSource,
    Server,
    ServerOptimizer,
    Users,
    fit,
)
from privpart.data import cohorts_once_each, iid_users
from privpart.data.tasks import digits
from privpart.messages import ClientId, ClientUpdate, RoundTask
from privpart.models import small_cnn
from privpart.training.costs import message_bytes

ROUNDS, USERS, DELTA, SEED = 36, 1437, 1e-5, 7
PARTS = {"strong": ["*"], "weak": ["conv*", "norm.*", "dense2.*"]}


class DeviceClasses:
    """An engine over one ``EmbeddedEngine`` per class of devices.

    Args:
        server_model: trains every parameter that any class trains; starts and updates have the
            shape of its ``flat``, (d,).
        engines: one per class, each with its own ``PartialModel`` of the same network, built from
            the same seed. It trains a subset of the server's parameters.
        class_of: maps a client to the index of its engine, from 0. It is public, so it must not
            depend on what the client holds.

    This is a simulation inside one process.

    Raises:
        ConfigError: no engine, an engine with another network or frozen part than the server's, or
            with a parameter that the server does not train. ``run``: ``class_of`` gives an index
            without an engine.
    """

    def __init__(
        self,
        server_model: PartialModel,
        engines: Sequence[EmbeddedEngine],
        class_of: Callable[[ClientId], int],
    ) -> None:
        if not engines:
            raise ConfigError("engines=[]: must have at least one, one per class of devices.")
        spans = _spans(server_model)
        for number, engine in enumerate(engines):
            _refuse_another_model(server_model, engine.model, number)
        self.engines = engines
        self.class_of = class_of
        self._trained = [
            torch.cat([torch.arange(*spans[name]) for name in engine.model.trainable])
            for engine in engines
        ]
        self._fixed = [
            [
                (parameter, spans[name])
                for name, parameter in engine.model.module.named_parameters()
                if name in spans and not parameter.requires_grad
            ]
            for engine in engines
        ]

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield each client's clipped update, shape (d,), zero where its class does not train."""
        for client in task.clients:
            number = self._class(client)
            rows = self._trained[number]
            with torch.no_grad():
                for parameter, span in self._fixed[number]:
                    parameter.copy_(start[slice(*span)].view(parameter.shape))
            for update in self.engines[number].run(replace(task, clients=(client,)), start[rows]):
                filled = torch.zeros_like(start)
                filled[rows] = update.update
                yield replace(update, update=filled)

    @property
    def each_alone(self) -> bool:
        """Whether every bit of an update is a function of its client's own data."""
        return all(engine.each_alone for engine in self.engines)

    def _class(self, client: ClientId) -> int:
        number = checks.count("class_of", self.class_of(client), minimum=0)
        if number >= len(self.engines):
            raise ConfigError(
                f"class_of={number} for client {client}: must be below {len(self.engines)}, the "
                "number of engines."
            )
        return number


def _spans(model: PartialModel) -> dict[str, tuple[int, int]]:
    """Return where each trained parameter lies in ``model.flat``: its begin and end."""
    parameters = dict(model.module.named_parameters())
    spans = {}
    begin = 0
    for name in model.trainable:
        end = begin + parameters[name].numel()
        spans[name] = (begin, end)
        begin = end
    return spans


def _refuse_another_model(server: PartialModel, device: PartialModel, number: int) -> None:
    theirs, own = (dict(model.module.named_parameters()) for model in (server, device))
    same = server.module is not device.module and (
        {name: p.shape for name, p in theirs.items()} == {name: p.shape for name, p in own.items()}
        and all(torch.equal(theirs[name], own[name]) for name in server.frozen)
    )
    if not same:
        raise ConfigError(
            f"class {number} must have its own copy of the server's network, with the same frozen "
            f"part: build it from the server's seed, {server.seed}."
        )
    if more := [name for name in device.trainable if name not in server.trainable]:
        raise ConfigError(f"class {number} trains {', '.join(more)}, which the server does not.")


def class_of(client: int) -> int:
    """Return the class of a client: public and independent of its data; two of three are weak."""
    return min(client % 3, 1)


def network(train: list[str]) -> PartialModel:
    return PartialModel(
        lambda: small_cnn(channels=(8, 16), hidden=128, image_size=8), train=train, seed=SEED
    )


def main() -> None:
    torch.set_num_threads(1)
    task = digits()
    users = Users(task.train_x, task.train_y, iid_users(USERS, users=USERS, data_seed=0))
    plan = PrivacyPlan(
        mechanism=BinaryTree(ROUNDS),
        participation=Participation(ROUNDS),
        clip_norm=0.3,
        noise_multiplier=1.0,
        report_goal=USERS // ROUNDS,
    )
    engines = [
        EmbeddedEngine(
            network(train),
            users,
            local=LocalTraining(0.1, epochs=2),
            data_seed=0,
        )
        for train in PARTS.values()
    ]
    whole = network(["*"])
    optimizer = ServerOptimizer(learning_rate=0.5, momentum=0.9)
    server = Server(plan, whole.flat, source=SecretSource(), optimizer=optimizer)
    print("class    trains   would send (bytes)")
    for name, engine in zip(PARTS, engines, strict=True):
        share = engine.model.dim / whole.dim
        print(f"{name:<7} {share:>7.1%} {message_bytes(engine.model):>20,}")

    def accuracy(parameters: Tensor) -> float:
        whole.load(parameters)
        with torch.no_grad():
            return float((whole.module(task.test_x).argmax(1) == task.test_y).float().mean())

    records = fit(
        server,
        DeviceClasses(whole, engines, class_of),
        cohorts_once_each(range(USERS), rounds=ROUNDS, data_seed=0),
        evaluate=accuracy,
        evaluate_every=12,
    )
    print()
    for record in records:
        if record.metric is not None:
            print(f"round {record.round + 1:>2}: test accuracy {record.metric:.1%}")
    report = server.report(DELTA)
    print(f"\nepsilon {up(report.epsilon)} at delta {DELTA:g}, the same as for equal devices:")
    print("zeros do not lengthen an update, and one public constant divides the sum everywhere.")


if __name__ == "__main__":
    main()
