"""ClientApp: answers for the clients of a node, under its own copy of the plan.

It compares a task with that copy, and declines one that differs. Nothing but updates leaves it, and
why it declines for reasons of its data stays in its log.
"""

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.data.clients import Clients
from privpart.engines.canaries import CanaryEngine
from privpart.engines.options import EngineOptions
from privpart.flower.agreement import (
    SCHEMA,
    DeclinedError,
    agreement,
    difference,
    float_vector,
    flower,
    id_of,
    id_text,
    plain_text,
    round_fields,
    to_stderr,
)
from privpart.flower.downlink import WHOLE, Held
from privpart.flower.people import Asked, People, moves_in
from privpart.flower.secure import NodeRound, answer_stage, start_hash
from privpart.messages import ClientId, RoundTask, id_order
from privpart.model import PartialModel
from privpart.plan import PrivacyPlan
from privpart.run.evidence import public_key_of
from privpart.run.population import spoken
from privpart.training.plan_file import PlanFile, read
from privpart.training.train import CanaryMaker, canaries_of
from privpart.training.training import Own, Training, refuse_over_network, training

_LONGEST_RUN = 64
"""Characters of the id of a run."""


def client_app(
    plan: str | Path,
    *,
    clients: Callable[[Any], Clients] | None = None,
    canaries: CanaryMaker | None = None,
    **options: Any,  # noqa: ANN401  EngineOptions checks them
) -> Any:  # noqa: ANN401  Flower's ClientApp
    """Return a ClientApp that answers for the clients of a node.

    It trains under this plan only, and declines every task of another one.

    Args:
        plan: path of the plan file; the same as the server's.
        clients: returns the node's clients from Flower's ``Context``; None takes those that the
            plan names. If the node has a ``partition-id`` and ``num-partitions``, it has every
            such client of the plan's, so that one data set serves a federation on one machine.
        canaries: ``attacks.canary_clients`` on a node of the auditor's, which answers for the
            canaries of the plan's table [canaries] and for nobody else. It learns which of them
            take part, and so belongs to whoever may know that.
        options: fields of ``EngineOptions`` by keyword; without any, ``deterministic=True``.
    """
    if clients is not None and canaries is not None:
        raise ConfigError("canaries: are on a node by themselves; leave clients out.")
    flower()
    import flwr.clientapp

    settings = EngineOptions(**(options or {"deterministic": True}))

    nodes: dict[tuple[object, tuple[int, int] | None], Node] = {}

    def node(context: Any) -> Node:  # noqa: ANN401  Flower's Context
        """Return the node of this process; simulations have several in one."""
        share = _share(context.node_config)
        # a simulation runs several nodes in one process
        key = (context.node_id, share)
        if key not in nodes:
            population = None if clients is None else clients(context)
            objects = Own(clients=population)
            if canaries is not None:
                objects = Own(remote=partial(_auditors, read(Path(plan)), canaries))
            node = Node.of(Path(plan), share, objects, settings)
            nodes[key] = replace(node, people=_people(context.node_config))
        return nodes[key]

    def train(message: Any, context: Any) -> Any:  # noqa: ANN401  Flower's Message and Context
        return _answered(message, lambda: node(context).updates(message.content))

    def secure(message: Any, context: Any) -> Any:  # noqa: ANN401
        return _answered(message, lambda: node(context).secure(message.content, context))

    def query(message: Any, context: Any) -> Any:  # noqa: ANN401
        return _answered(message, lambda: node(context).ids(message.content))

    app = flwr.clientapp.ClientApp()
    app.train()(train)
    app.train("secure")(secure)
    app.query()(query)
    return app


def _auditors(plan: PlanFile, canaries: CanaryMaker, model: PartialModel) -> CanaryEngine:
    """Return what answers for the canaries of a plan.

    Raises:
        ConfigError: the plan has none.
    """
    if plan.canaries is None:
        raise ConfigError("canaries: the plan has no table [canaries]; leave them out.")
    promised = plan.privacy_plan(sizes=model.group_sizes)
    return CanaryEngine(canaries_of(plan, promised, canaries, model.dim))


def _answered(message: Any, act: Callable[[], Any]) -> Any:  # noqa: ANN401  Flower's Message
    """Return the reply to a message; no text of an error that may tell of examples is in it."""
    flwr, why = flower(), "see the log of the node"
    try:
        return flwr.Message(act(), reply_to=message)
    except (ConfigError, DeclinedError) as error:
        to_stderr(f"declined a task: {error}")
        why = str(error) if isinstance(error, DeclinedError) else why
    except (Exception, SystemExit) as error:
        # Flower would send its text to the server, or nothing
        to_stderr(f"failed at a task ({type(error).__name__}):")
        traceback.print_exc()
        why = f"an error; {why}"
    declined = flwr.ConfigRecord({"schema": SCHEMA, "why": why})
    return flwr.Message(flwr.RecordDict({"declined": declined}), reply_to=message)


def _share(config: Mapping[str, Any]) -> tuple[int, int] | None:
    names = ("partition-id", "num-partitions")
    given = [config[name] for name in names if name in config]
    if not given:
        return None
    if len(given) < len(names):
        raise ConfigError("node_config: needs partition-id and num-partitions, or neither.")
    number, count = given
    checks.count("num-partitions", count)
    return checks.count("partition-id", number, minimum=0, maximum=count - 1), count


def _people(config: Mapping[str, Any]) -> People | None:
    """Return the node's own ledger, if its configuration names a folder for one.

    Raises:
        ConfigError: see ``People``; or settings of a ledger, and none.
    """
    names = ("most-answers", "operator")
    if "ledger" not in config:
        if given := [name for name in names if name in config]:
            raise ConfigError(f"node_config: {given[0]} is of a ledger; give ledger, a folder.")
        return None
    folder, most, operator = (config.get(name) for name in ("ledger", *names))
    if type(folder) is not str or not Path(folder).is_absolute():
        raise ConfigError(f"node_config: ledger={folder!r}: must be an absolute path of a folder.")
    return People(
        Path(folder),
        most=None if most is None else checks.count("most-answers", most),
        operator="" if operator is None else public_key_of(str(operator)),
    )


@dataclass(frozen=True, slots=True)
class Node:
    """A node's own copy of the plan, and its clients.

    Attributes:
        setup: the plan put together over the node's clients.
        promised: its privacy plan.
        plan: the hash of that.
        clients: ids of the clients that the node answers for.
        held: the model that it was sent last.
        people: the node's own ledger of their answers; None if it keeps none.
    """

    setup: Training
    promised: PrivacyPlan
    plan: str
    clients: frozenset[ClientId]
    held: Held = field(default_factory=Held)
    people: People | None = None

    @classmethod
    def of(
        cls,
        plan: Path,
        share: tuple[int, int] | None,
        objects: Own,
        options: EngineOptions,
    ) -> "Node":
        """Put a plan together over all of its clients, and keep every ``share``-th of them.

        Raises:
            ConfigError: see ``training``.
        """
        chosen = read(plan, in_python=objects.clients is not None)
        refuse_over_network(chosen)
        code = chosen.code()
        setup = training(chosen, objects=objects, options=options, report=to_stderr, part=True)
        promised = setup.promise(code)
        # a fixed order, so that shares of all nodes are disjoint
        ids = sorted(setup.clients.ids, key=id_order)
        if share is not None:
            ids = ids[share[0] :: share[1]]
        return cls(setup, promised, promised.hash, frozenset(ids))

    def ids(self, content: Any) -> Any:  # noqa: ANN401  Flower's RecordDict
        """Return the ids of the node's clients, if the server has the same plan."""
        self._refuse(content["task"], None)
        flwr = flower()
        names = [id_text(client) for client in sorted(self.clients, key=id_order)]
        key = {} if self.people is None else {"key": self.people.public_key}
        about = flwr.ConfigRecord({"schema": SCHEMA, "ids": names, **key})
        return flwr.RecordDict({"clients": about})

    def updates(self, content: Any) -> Any:  # noqa: ANN401  Flower's RecordDict
        """Train the clients of a task; return their updates, one array each.

        Raises:
            DeclinedError: the task is not of this plan, or asks for clients of others.
        """
        if self.promised.secure is not None:
            raise DeclinedError("the server asks for updates; the plan has secure sums only")
        flwr, fields = flower(), content["task"]
        task = self.task(fields)
        start = self.held.completed(self.setup.model, fields, content["model"]["trainable"])
        if start is None and fields.get("groups") != WHOLE:
            return flwr.RecordDict({"lacks": flwr.ConfigRecord({"schema": SCHEMA})})
        start = _finite(start)
        beside, clients = {}, task.clients
        if self.people is not None:
            asked = self._asked(fields, task, start_hash(task, start))
            limits = self.promised.participation
            entry, declined = self.people.answer(asked, clients, limits)
            clients = tuple(client for client in clients if id_text(client) not in declined)
            said = {**entry, "declined": json.dumps(declined)}
            beside = {"statement": flwr.ConfigRecord(said)}
        # who trains beside whom changes no update
        task = replace(task, clients=clients)
        arrays = {
            id_text(answer.client): flwr.Array(answer.update.detach().numpy())
            for answer in self.setup.trainer.run(task, start)
        }
        reply = {**agreement(self.setup.model, self.plan, task.active), "round": task.round}
        return flwr.RecordDict(
            {"updates": flwr.ArrayRecord(arrays), "task": flwr.ConfigRecord(reply), **beside}
        )

    def _asked(self, fields: Mapping[str, Any], task: RoundTask, model: object) -> Asked:
        """Return what the server asks for, after what the operator says of clients moved here."""
        run = fields.get("run")
        if type(run) is not str or not 0 < len(run) <= _LONGEST_RUN or type(model) is not str:
            raise DeclinedError("the server does not say which run it is, or of which model")
        population = spoken(self.setup.plan.data.population or "")
        asked = Asked(population, self.plan, run, task.round, model)
        assert self.people is not None  # noqa: S101  whoever calls has looked
        self.people.take_over(asked, moves_in(fields.get("moves", "[]")))
        return asked

    def secure(self, content: Any, context: Any) -> Any:  # noqa: ANN401  of Flower
        """Answer a stage of a secure sum, see ``answer_stage``."""
        fields = content["task"]
        task = self.task(fields)
        this = NodeRound(self.promised, self.setup.model, self.setup.engine, task)
        if self.people is not None and fields.get("stage") == "keys":
            # a vector of another model than this one is refused by the party
            asked = self._asked(fields, task, fields.get("start"))
            limits = self.promised.participation
            _, declined = self.people.answer(asked, task.clients, limits, together=True)
            for name, why in declined.items():
                raise DeclinedError(f"client {name} declines: {why}")
        return answer_stage(
            this, lambda: self.start(content["model"]["trainable"]), content, context
        )

    def _refuse(self, fields: Mapping[str, Any], active: Sequence[int] | None) -> None:
        expected = agreement(self.setup.model, self.plan, active)
        if (why := difference(fields, expected)) is not None:
            raise DeclinedError(f"the server's {why}")

    def task(self, fields: Mapping[str, Any]) -> RoundTask:
        """Return the server's task, if it is of this node's plan and clients."""
        round_, clip_norm = fields.get("round"), fields.get("clip_norm")
        if type(round_) is not int or not 0 <= round_ < self.promised.rounds:
            raise DeclinedError(f"the server's round is {plain_text(round_)}; the plan has others")
        # by the node's own plan; the server's word must agree with it below
        active = self.promised.active(round_)
        self._refuse(fields, active)
        own_active = round_fields(RoundTask(round_, (), 1.0, "", active))["active"]
        if fields.get("active") != own_active:
            raise DeclinedError("the server names other active groups than the plan's schedule")
        if type(clip_norm) is not float or not self.promised.may_clip_to(clip_norm, round_):
            raise DeclinedError(
                f"the server's clip norm is {plain_text(clip_norm)}, the plan begins with "
                f"{self.promised.clip_norm:g} and does not come to that in round {round_}"
            )
        clients = [id_of(name) for name in fields.get("clients", ())]
        if not clients or not self.clients.issuperset(clients) or len({*clients}) < len(clients):
            raise DeclinedError(
                "the server asks for clients that this node does not have, or twice"
            )
        return RoundTask(
            round_, tuple(cast("list[ClientId]", clients)), clip_norm, self.plan, active
        )

    def start(self, array: Any) -> Tensor:  # noqa: ANN401  Flower's Array
        """Return the model that the server sent."""
        return _finite(float_vector(array, self.setup.model.dim))


def _finite(vector: Tensor | None) -> Tensor:
    if vector is None or not vector.isfinite().all():
        raise DeclinedError("the server sent no finite vector of the model's parameters")
    return vector
