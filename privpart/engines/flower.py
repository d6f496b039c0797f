"""Flower: the same server and clients over a network, by Flower's messages (flwr 1.42).

``FlowerEngine`` asks nodes for the updates of their clients; ``server_app`` trains a plan in a run
folder through it, and ``client_app`` answers for the clients of one node. The server's own loop,
admission, ledger and report are those of one process.

A task carries the whole trainable vector and what both sides must agree on: the hash of the plan,
the layout, fingerprint and seed of the model, the round, the clip norm and the active groups. The
client compares each with its own copy of the plan, and declines a task that differs. An answer is
one float32 vector per client, never a sum, and no metric: losses and counts are not accounted.

A node answers for the clients that the run's owners name as its own. Flower authenticates nodes if
the SuperLink was started so, which the server cannot see: it is declared when the run is made.
Whatever a node sends is refused or clipped, and delays a round by no more than its time-out.

This is the only module that imports flwr, inside functions: the other engines do not need it. It is
one file, because what one side of the network writes the other reads.
"""

import io
import json
import secrets
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from accounting import checks
from accounting.checks import ConfigError
from privpart.data.clients import Clients, RemoteClients
from privpart.engines.options import EngineOptions
from privpart.experiment.plan_file import PlanFile, read
from privpart.experiment.train import begin, finish, resume_run
from privpart.experiment.training import Own, Training, training
from privpart.loop import Callback, RoundRecord
from privpart.messages import (
    ClientId,
    ClientUpdate,
    Reason,
    RefusedAnswer,
    RoundTask,
    id_order,
    is_client_id,
)
from privpart.model import PartialModel
from privpart.plan import PrivacyPlan
from privpart.run.folder import holds_a_run
from privpart.run.ledger import Ledger
from privpart.run.report import AUTHENTICATED, UNAUTHENTICATED

SCHEMA = "privpart/flower/1"
_MESSAGE_BYTES = 2**28
_LONGEST_HEADER = 1024
_LONGEST_NAME = 4096
_SHOWN = 300
_LONGEST_LOOK, _SHORTEST_LOOK = 10.0, 0.05
"""Seconds that other answers wait for downloads at a time, which then continue beside them; and
seconds between two downloads that begin."""

Report = Callable[[str], None]


def _flwr() -> ModuleType:
    try:
        import flwr.app
    except ModuleNotFoundError:
        raise ConfigError(
            "Flower is not installed: pip install 'flwr>=1.42', in an environment of its own, "
            "since it pins packages that others use. docs/flower.md shows how."
        ) from None
    return cast("ModuleType", flwr.app)


def _name(client: ClientId) -> str:
    """Return a client's id as JSON: the number 1 and the string "1" are two clients."""
    return json.dumps(client)


def _client(name: object) -> ClientId | None:
    """Return the client with this name, from anybody; None if there is none."""
    if type(name) is not str or len(name) > _LONGEST_NAME:
        return None
    try:
        found = json.loads(name)
    except (ValueError, RecursionError):
        return None
    return found if is_client_id(found) and _name(found) == name else None


def _shown(text: object) -> str:
    """Return text from anybody on one line of plain characters."""
    return ascii(str(text)[:_SHOWN])[1:-1]


def agreement(
    model: PartialModel, plan: str, active: Sequence[int] | None = None
) -> dict[str, str]:
    """Return what server and client must have in common, as texts."""
    layout = model.trainable_hash if active is None else model.trainable_hash_of(active)
    return {
        "schema": SCHEMA,
        "plan": plan,
        "layout": layout,
        "fingerprint": model.fingerprint,
        "seed": "" if model.seed is None else str(model.seed),  # has 128 bits, a field only 64
    }


def difference(found: Mapping[str, object], own: Mapping[str, str]) -> str | None:
    """Return in which field another side's agreement differs from one's own; None if in none."""
    for name, value in own.items():
        if found.get(name) != value:
            return f"{name} is {_shown(found.get(name))!r}, here it is {value!r}"
    return None


class _RefusedError(Exception):
    """A reply of which nothing can be used, and why."""

    def __init__(self, reason: Reason, said: str) -> None:
        super().__init__(said)
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class _Asked:
    """A message that a node has not answered yet; without clients it asks which ones it has."""

    node: int
    clients: tuple[ClientId, ...] = ()


@dataclass(frozen=True, slots=True)
class _Round:
    """A round that is being asked for.

    Attributes:
        task: the task.
        agreed: what nodes must agree on.
        vector: the model, as Flower's ``Array``.
        asked: messages without an answer, of this attempt and of earlier ones.
        looks: looks for their answers that are not over yet.
        came: clients whose update was yielded.
        waiting: clients that this attempt has no answer from.
        unasked: clients that this attempt has not asked, because their node is not connected.
    """

    task: RoundTask
    agreed: dict[str, str]
    vector: Any
    asked: dict[str, _Asked] = field(default_factory=dict)
    looks: dict[str, "_Look"] = field(default_factory=dict)
    came: set[ClientId] = field(default_factory=set)
    waiting: set[ClientId] = field(default_factory=set)
    unasked: set[ClientId] = field(default_factory=set)

    @classmethod
    def of(cls, task: RoundTask, start: Tensor, agreed: dict[str, str]) -> "_Round":
        return cls(task, agreed, _flwr().Array(start.detach().numpy()))

    def ask_the_missing(self) -> None:
        """Begin an attempt."""
        missing = set(self.task.clients) - self.came
        self.waiting.update(missing)
        self.unasked.update(missing)

    def counts(self, answer: ClientUpdate | RefusedAnswer) -> bool:
        """Note an answer; return whether it counts: one of two attempts that one client made."""
        if isinstance(answer, RefusedAnswer):
            self.waiting.difference_update(answer.clients)
            return True
        self.waiting.discard(answer.client)
        if answer.client in self.came:
            return False
        self.came.add(answer.client)
        return True

    def content(self, clients: Sequence[ClientId]) -> Any:  # noqa: ANN401  Flower's RecordDict
        """Return the message that asks for these clients."""
        flwr = _flwr()
        fields = {**self.agreed, **_round_fields(self.task), "clients": [*map(_name, clients)]}
        return flwr.RecordDict(
            {
                "model": flwr.ArrayRecord({"trainable": self.vector}),
                "task": flwr.ConfigRecord(fields),
            }
        )


class FlowerEngine:
    """Trains clients on the nodes of a Flower federation; see ``Engine``.

    Args:
        grid: Flower's ``Grid``, as a ServerApp gets it.
        model: the model that is trained, to say what both sides must agree on.
        owners: which node answers for each client of the population.
        minimum: answers without which a round is tried again: the plan's ``minimum_cohort``.
        authenticated: whether the SuperLink authenticates nodes. Owners then never change;
            otherwise a client goes to the node that says it has it once its own is gone.
        timeout: seconds to wait for the answers of a round.
        attempts: how often a round with fewer answers than ``minimum`` is asked for, >= 1: the same
            task, for the clients that are missing.
        poll: seconds between two looks for answers.
        report: gets a sentence about each node that is lost, refused or moved.

    Attributes:
        clients: the population, by ids; its examples are on the nodes.
        owners: as passed, as far as they have not changed.

    Raises:
        ConfigError: an option that is not positive.
    """

    def __init__(
        self,
        grid: Any,  # noqa: ANN401  Flower's Grid
        model: PartialModel,
        owners: Mapping[ClientId, int],
        *,
        minimum: int,
        authenticated: bool,
        timeout: float = 3600.0,
        attempts: int = 3,
        poll: float = 3.0,
        report: Report | None = None,
    ) -> None:
        self.grid = grid
        self.model = model
        self.owners = dict(owners)
        self.minimum = minimum
        self.authenticated = authenticated
        self.timeout = checks.positive("timeout", timeout)
        self.attempts = checks.count("attempts", attempts)
        self.poll = checks.positive("poll", poll)
        self.clients = RemoteClients(sorted(self.owners, key=id_order))
        self._report = report or _to_stderr
        self._met = set(self.owners.values())

    def __enter__(self) -> "FlowerEngine":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @property
    def facts(self) -> dict[str, Any]:
        """What the ledger keeps of a federation when its run is made."""
        nodes: dict[str, list[str]] = {}
        for client, node in self.owners.items():
            nodes.setdefault(str(node), []).append(_name(client))
        identity = AUTHENTICATED if self.authenticated else UNAUTHENTICATED
        return {"identity": identity, "owners": nodes}

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield the answers to a task as they arrive, and what was refused."""
        found = self._answers(task, start)
        if task.sum_clip_norm is not None:  # integers, which sum to the same in any order
            yield from cast("Iterator[ClientUpdate]", found)  # the server counts the refusals
            return
        place = {client: number for number, client in enumerate(task.clients)}
        updates = []
        for answer in found:
            if isinstance(answer, ClientUpdate):
                updates.append(answer)
            else:
                yield cast("ClientUpdate", answer)
        yield from sorted(updates, key=lambda update: place[update.client])

    def _answers(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate | RefusedAnswer]:
        this = _Round.of(task, start, agreement(self.model, task.plan, task.active))
        for attempt in range(self.attempts):
            if attempt:
                self._report(
                    f"round {task.round}: {len(this.came)} of {len(task.clients)} clients "
                    f"answered, the plan needs {self.minimum}; asking the others again."
                )
            this.ask_the_missing()
            yield from self._attempt(this)
            if len(this.came) >= self.minimum:
                break
        self._tell_missing(this)

    def _attempt(self, this: "_Round") -> Iterator[ClientUpdate | RefusedAnswer]:
        """Yield answers until every client has answered, or the time is over."""
        end = time.monotonic() + self.timeout
        while True:
            self._ask(this)
            yield from filter(this.counts, self._received(this))
            left = end - time.monotonic()
            if not this.waiting or left <= 0:
                return
            time.sleep(min(self.poll, left))

    def _ask(self, this: "_Round") -> None:
        """Send the task to the nodes that are here and have clients that were not asked yet."""
        here = set(self.grid.get_node_ids())
        by_node: dict[int, list[ClientId]] = {}
        for client in this.unasked:
            by_node.setdefault(self.owners[client], []).append(client)
        most = max(1, _MESSAGE_BYTES // (4 * self.model.dim))
        for node in sorted(here & by_node.keys()):
            clients = sorted(by_node[node], key=id_order)
            for few in (clients[at : at + most] for at in range(0, len(clients), most)):
                if self._push("train", this.content(few), _Asked(node, tuple(few)), this):
                    this.unasked.difference_update(few)
        for node in sorted(here - self._met) if not self.authenticated else ():
            if self._push("query", _question(this.agreed), _Asked(node), this):
                self._met.add(node)

    def _push(self, kind: str, content: object, to: "_Asked", this: "_Round") -> bool:
        name = _pushed(self.grid, kind, content, to.node, self.timeout)
        if name is None:
            self._report(f"node {to.node}: the SuperLink took no message for it.")
            return False
        this.asked[name] = to
        return True

    def _received(self, this: "_Round") -> Iterator[ClientUpdate | RefusedAnswer]:
        """Yield what was answered since the last look."""
        for name, reply in _replies(self.grid, this.asked, this.looks):
            if isinstance(reply, _RefusedError):
                to = this.asked.pop(name)
                yield self._refused(to, this, reply.reason, str(reply), to.clients)
                continue
            if _replied(reply) != name or name not in this.asked:
                self._report("an answer to a message that was never sent: refused.")
                yield RefusedAnswer("not asked")
                continue
            to = this.asked.pop(name)
            try:
                content = _content(reply, to.node)
                if to.clients:
                    yield from self._updates(content, to, this)
                else:
                    self._move(to.node, _listed(content))
            except _RefusedError as error:
                yield self._refused(to, this, error.reason, str(error), to.clients)
            except Exception as error:  # whatever the objects of a reply raise
                said = f"sent something that cannot be read ({type(error).__name__})"
                yield self._refused(to, this, "malformed", said, to.clients)

    def _refused(
        self, to: "_Asked", this: "_Round", why: Reason, said: str, clients: Iterable[ClientId]
    ) -> RefusedAnswer:
        self._report(f"node {to.node}, round {this.task.round}: {said}; refused ({why}).")
        return RefusedAnswer(why, tuple(clients))

    def _updates(
        self,
        content: Any,  # noqa: ANN401  Flower's RecordDict, of anybody
        to: "_Asked",
        this: "_Round",
    ) -> Iterator[ClientUpdate | RefusedAnswer]:
        """Yield the updates in an answer, and a refusal for each that is not one.

        Raises:
            _RefusedError: nothing of the answer can be used.
        """
        task, arrays = this.task, _arrays(content, this)
        dim = self.model.active_dim(task.active)
        missing = set(to.clients)
        for name, array in arrays.items():
            client = _client(name)
            if client is None or client not in missing:
                said = f"answered for client {_shown(name)}, whom it was not asked for"
                yield self._refused(to, this, "not asked", said, ())
                continue
            missing.discard(client)
            vector = _vector(array, dim)
            if vector is None:
                said = f"client {client!r} sent no float32 vector of {dim} parameters"
                yield self._refused(to, this, "wrong shape or type", said, (client,))
            else:
                yield task.update(client, vector)
        if missing:
            said = f"left out {len(missing)} of the {len(to.clients)} clients that it was asked for"
            yield self._refused(to, this, "malformed", said, missing)

    def _move(self, node: int, claimed: Iterable[ClientId]) -> None:
        """Let a node without authentication answer for clients whose own node is gone."""
        here = set(self.grid.get_node_ids())
        moved = 0
        for client in claimed:
            if client not in self.owners or self.owners[client] == node:
                continue
            if self.owners[client] in here:
                self._report(
                    f"node {node}: says that it has client {client!r}, which is one of node "
                    f"{self.owners[client]}; ignored."
                )
                continue
            self.owners[client] = node
            moved += 1
        if moved:
            self._report(
                f"node {node}: says that it has {moved} clients of a node that is gone; nodes are "
                "not authenticated, so it is believed."
            )

    def _tell_missing(self, this: "_Round") -> None:
        task = this.task
        nodes = Counter(self.owners[client] for client in task.clients if client not in this.came)
        here = set(self.grid.get_node_ids()) if nodes else set()
        for node, clients in sorted(nodes.items()):
            state = "is connected" if node in here else "is not connected"
            self._report(
                f"node {node}, round {task.round}: {clients} of its clients are missing from the "
                f"round; it {state}."
            )


def hosted(
    grid: Any,  # noqa: ANN401  Flower's Grid
    agreed: Mapping[str, str],
    *,
    nodes: int,
    timeout: float,
    poll: float = 3.0,
    report: Report | None = None,
) -> dict[ClientId, int]:
    """Ask all nodes which clients they have; return the node of each client.

    Args:
        grid: Flower's ``Grid``.
        agreed: what nodes must agree on.
        nodes: how many must answer, >= 1.
        timeout: seconds to wait for them.
        poll: seconds between two looks.
        report: gets a sentence about each node that declines.

    Raises:
        ConfigError: too few nodes answered, two nodes have one client, or there are no clients.
    """
    say, asked, looks = report or _to_stderr, dict[str, int](), dict[str, _Look]()
    owners, answered, met = dict[ClientId, int](), set[int](), set[int]()
    end = time.monotonic() + timeout
    while len(answered) < nodes:
        for node in sorted(set(grid.get_node_ids()) - met):
            name = _pushed(grid, "query", _question(agreed), node, timeout)
            if name is not None:
                met.add(node)
                asked[name] = node
        for name, reply in _replies(grid, asked, looks):
            answers = isinstance(reply, _RefusedError) or _replied(reply) == name
            node = asked.pop(name, -1) if answers else -1
            found = _hosted_by(reply, node, say)
            if found is not None:
                _enter(owners, node, found)
                answered.add(node)
        _wait_for_nodes(len(answered), nodes, f"{len(met)} were connected", end, poll)
    if not owners:
        raise ConfigError("nodes: none of them has a client; there is nobody to train with.")
    return owners


def _wait_for_nodes(answered: int, nodes: int, met: str, end: float, poll: float) -> None:
    if answered >= nodes:
        return
    if time.monotonic() >= end:
        raise ConfigError(
            f"nodes={nodes}: {answered} said in time which clients they have; {met}. Start the "
            "others, then run again."
        )
    time.sleep(poll)


def _hosted_by(reply: Any, node: int, say: Report) -> list[ClientId] | None:  # noqa: ANN401
    """Return the ids that a node answered with; None for anything else."""
    try:
        if isinstance(reply, _RefusedError):
            raise reply
        return _listed(_content(reply, node))
    except _RefusedError as error:
        say(f"node {node}: {error}; refused ({error.reason}).")
    except Exception as error:  # whatever the objects of a reply raise
        say(f"node {node}: sent something that cannot be read ({type(error).__name__}); refused.")
    return None


def _listed(content: Any) -> list[ClientId]:  # noqa: ANN401  of anybody
    """Return the ids in a node's answer.

    Raises:
        _RefusedError: it holds anything else.
    """
    if set(content) != {"clients"} or set(content["clients"]) != {"schema", "ids"}:
        raise _RefusedError("malformed", "did not answer with its clients")
    found = [_client(name) for name in content["clients"]["ids"]]
    if None in found or len(set(found)) < len(found):
        raise _RefusedError("malformed", "its clients are not a list of ids, each once")
    return cast("list[ClientId]", found)


def _enter(owners: dict[ClientId, int], node: int, clients: Iterable[ClientId]) -> None:
    for client in clients:
        if client in owners:
            raise ConfigError(
                f"client {client!r}: nodes {owners[client]} and {node} both say that they have it. "
                "Each client needs a name of its own, on one node."
            )
        owners[client] = node


def _round_fields(task: RoundTask) -> dict[str, Any]:
    return {
        "round": task.round,
        "clip_norm": float(task.clip_norm),
        "active": json.dumps(None if task.active is None else list(task.active)),
    }


def _question(agreed: Mapping[str, str]) -> Any:  # noqa: ANN401  Flower's RecordDict
    flwr = _flwr()
    return flwr.RecordDict({"task": flwr.ConfigRecord(dict(agreed))})


def _pushed(
    grid: Any,  # noqa: ANN401  Flower's Grid
    kind: str,
    content: object,
    node: int,
    timeout: float,
) -> str | None:
    """Send a message that expires with its round; return its id, or None if it was not taken.

    A node works off its messages in order: without an end, it would train for rounds that are over.
    The id is the hash of the message, and a SuperLink lets any node answer a message whose id it
    knows, in any name. So each message holds a secret, and only the node that got it knows its id.
    """
    secret = secrets.token_hex(16)
    message = _flwr().Message(content, node, kind, ttl=timeout, group_id=secret)
    ids = list(grid.push_messages([message]))
    return ids[0] if ids and isinstance(ids[0], str) else None


class _Look(threading.Thread):
    """A look for the answer to one message; ``found`` is what came, once the thread has ended.

    Flower downloads an answer within ``pull_messages``, and waits for hours for one that a node
    announces and never uploads. So a look may outlast its round, which does not wait for it.
    """

    def __init__(self, grid: Any, name: str) -> None:  # noqa: ANN401  Flower's Grid
        super().__init__(name=f"privpart-answer-{name[:8]}", daemon=True)
        self._grid = grid
        self._name = name
        self.found: list[Any] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.found = list(self._grid.pull_messages([self._name]))
        except Exception as error:  # of the network, or of parsing what a stranger sent
            self.error = error


def _replies(
    grid: Any,  # noqa: ANN401  Flower's Grid
    asked: Mapping[str, object],
    looks: dict[str, _Look],
) -> Iterator[tuple[str, Any]]:
    """Yield the answers that came, or why one is refused, with the id of the message asked for.

    Each message is looked for by itself: what one node sent may make Flower raise an error, and
    other answers that came in the same look would be lost.
    """
    end = time.monotonic() + _LONGEST_LOOK
    for name in list(asked):
        look = looks.pop(name, None)
        if look is None:
            look = _Look(grid, name)
            look.start()
            look.join(max(_SHORTEST_LOOK, end - time.monotonic()))
        if look.is_alive():
            looks[name] = look
            continue
        if look.error is not None:
            grid.get_node_ids()  # raises the error if it is the network's
            said = f"sent something that Flower cannot read ({type(look.error).__name__})"
            yield name, _RefusedError("malformed", said)
        for reply in look.found:
            yield name, reply


def _replied(reply: Any) -> str:  # noqa: ANN401  Flower's Message
    found = getattr(getattr(reply, "metadata", None), "reply_to_message_id", "")
    return found if isinstance(found, str) else ""


def _content(reply: Any, node: int) -> Any:  # noqa: ANN401  Flower's Message and RecordDict
    """Return the records of a reply.

    Raises:
        _RefusedError: it is an error, from another node, or the node declines.
    """
    if reply.has_error():
        raise _RefusedError("declined", f"gave no answer (Flower's error {int(reply.error.code)})")
    if reply.metadata.src_node_id != node:
        raise _RefusedError("not asked", f"node {reply.metadata.src_node_id} answered in its place")
    content = reply.content
    if set(content) == {"declined"}:
        why = content["declined"].get("why", "without a reason")
        raise _RefusedError("declined", f"declined: {_shown(why)}")
    return content


def _arrays(content: Any, this: _Round) -> Mapping[str, Any]:  # noqa: ANN401  of anybody
    """Return the arrays of an answer to this round.

    Raises:
        _RefusedError: it has other records, or is not of this round, plan or model.
    """
    if set(content) != {"updates", "task"}:
        said = f"sent the records {_shown(sorted(content))}, must be task and updates"
        raise _RefusedError("malformed", said)
    arrays, fields = content["updates"], content["task"]
    if type(arrays) is not _flwr().ArrayRecord or type(fields) is not _flwr().ConfigRecord:
        raise _RefusedError("malformed", "sent records of other types")
    if (other := difference(fields, this.agreed)) is not None:
        raise _RefusedError("another plan", other)
    if type(fields.get("round")) is not int or fields["round"] != this.task.round:
        raise _RefusedError("another round", f"answered round {_shown(fields.get('round'))}")
    if set(fields) != {*this.agreed, "round"}:
        raise _RefusedError("malformed", f"sent the fields {_shown(sorted(fields))}")
    return cast("Mapping[str, Any]", arrays)


def _vector(array: Any, dim: int) -> Tensor | None:  # noqa: ANN401  of anybody
    """Return a float32 vector of Flower's ``Array``; None for anything else.

    ``Array.numpy`` would reserve as much memory as the bytes of a stranger claim to need.
    """
    data = array.data
    if type(data) is not bytes or len(data) > 4 * dim + _LONGEST_HEADER:
        return None
    file = io.BytesIO(data)
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            return None
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    except Exception:  # NumPy's parser raises types of its own
        return None
    if shape != (dim,) or dtype != np.dtype("<f4") or len(data) - file.tell() != 4 * dim:
        return None
    return torch.from_numpy(np.frombuffer(data, "<f4", offset=file.tell()).copy())


def _to_stderr(sentence: str) -> None:
    sys.stderr.write(f"privpart: {sentence}\n")
    sys.stderr.flush()


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
        except Exception as error:  # Flower logs a trace, and its command ends with 0 all the same
            _to_stderr(f"the run has stopped: {error}")
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
            ConfigError: one was given in both, or is missing.
        """
        found = {name: value for name, value in given.items() if value is not None}
        for name in given.keys() & config.keys():
            if name in found:
                raise ConfigError(
                    f"{name}: is given to server_app and in [tool.flwr.app.config]; give it once."
                )
            found[name] = config[name]
        for name in ("out", "nodes", "authenticated"):
            if name not in found:
                raise ConfigError(
                    f"{name}: is missing; give it to server_app, or in [tool.flwr.app.config]."
                )
        return cls(**found)


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
    out, chosen = Path(settings.out), read(plan)
    refuse_over_network(chosen)
    resumes = holds_a_run(out)
    known = _recorded_owners(out, settings) if resumes else None

    def remote(model: PartialModel) -> FlowerEngine:
        owners = known
        if owners is None:
            agreed = agreement(model, _promised(chosen, model))
            owners = hosted(
                grid,
                agreed,
                nodes=settings.nodes,
                timeout=settings.timeout,
                poll=poll,
                report=report,
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
            report=report,
        )

    own = Own(remote=remote)
    if resumes:
        run, setup = resume_run(out, plan=chosen, own=own, options=EngineOptions())
    else:
        run, setup = begin(
            chosen,
            out,
            text=plan.read_text(encoding="utf-8"),
            own=own,
            seed=settings.seed,
            options=EngineOptions(),
        )
    say, last = report or _to_stderr, run.plan.rounds

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


def _recorded_owners(out: Path, settings: Settings) -> dict[ClientId, int]:
    """Return the node of each client, as the ledger of a run has it."""
    ledger = Ledger(out / "ledger.sqlite", read_only=True)
    ledger.close()
    facts = ledger.facts
    if "owners" not in facts:
        raise ConfigError(f"{out}: is not a run over Flower; continue it with privpart train.")
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
            client = _client(name)
            if client is None:
                raise ConfigError(f"{out}: the owners in its ledger are damaged.")
            owners[client] = int(node)
    return owners


def refuse_over_network(plan: PlanFile) -> None:
    """Check that clients on nodes can train a plan.

    Raises:
        ConfigError: they cannot, and why.
    """
    if plan.privacy.sampling is not None:
        raise ConfigError(
            "privacy.sampling: its epsilon needs that nobody learns who was drawn, and nodes and "
            "the network see whom the server asks. Leave it out."
        )
    if plan.select is not None:
        raise ConfigError("select: is not sent over Flower; train it with privpart train.")
    if plan.canaries is not None:
        raise ConfigError("canaries: are for simulations; leave the table out.")
    if plan.client.objective == "moon" or plan.model.local:
        raise ConfigError(
            "client.objective, model.local: a client's own models would have to stay on its node "
            "between rounds, where Flower starts a new process for each. Leave them out."
        )


def client_app(
    plan: str | Path,
    *,
    clients: Callable[[Any], Clients] | None = None,
    **options: Any,  # noqa: ANN401  EngineOptions checks them
) -> Any:  # noqa: ANN401  Flower's ClientApp
    """Return a ClientApp that answers for the clients of a node.

    It trains under this plan only, and declines every task of another one.

    Args:
        plan: path of the plan file; the same as the server's.
        clients: returns the node's clients from Flower's ``Context``; None takes those that the
            plan names. If the node has a ``partition-id`` and ``num-partitions``, it has every
            such client of the plan's, so that one data set serves a federation on one machine.
        options: fields of ``EngineOptions`` by keyword; none is ``deterministic=True``.
    """
    import flwr.clientapp

    settings = EngineOptions(**(options or {"deterministic": True}))

    nodes: dict[tuple[object, tuple[int, int] | None], Node] = {}

    def node(context: Any) -> Node:  # noqa: ANN401  Flower's Context
        """Return the node of this process; simulations have several in one."""
        share = _share(context.node_config)
        key = (context.node_id, share)
        if key not in nodes:
            own = None if clients is None else clients(context)
            nodes[key] = Node.of(Path(plan), share, own, settings)
        return nodes[key]

    def train(message: Any, context: Any) -> Any:  # noqa: ANN401  Flower's Message and Context
        return _answered(message, lambda: node(context).updates(message.content))

    def query(message: Any, context: Any) -> Any:  # noqa: ANN401
        return _answered(message, lambda: node(context).ids(message.content))

    app = flwr.clientapp.ClientApp()
    app.train()(train)
    app.query()(query)
    return app


def _answered(message: Any, act: Callable[[], Any]) -> Any:  # noqa: ANN401  Flower's Message
    """Return the reply to a message; no text of an error that may tell of examples is in it."""
    flwr = _flwr()
    try:
        content = act()
    except ConfigError as error:
        _to_stderr(f"declined a task: {error}")
        content = _decline("see the log of the node")
    except DeclinedError as error:
        _to_stderr(f"declined a task: {error}")
        content = _decline(str(error))
    except Exception as error:  # Flower would send its text to the server
        _to_stderr(f"failed at a task ({type(error).__name__}):")
        traceback.print_exc()
        content = _decline("an error; see the log of the node")
    return flwr.Message(content, reply_to=message)


class DeclinedError(Exception):
    """A task that is not of this node's plan or clients; the message holds nothing of examples."""


def _decline(why: str) -> Any:  # noqa: ANN401  Flower's RecordDict
    flwr = _flwr()
    return flwr.RecordDict({"declined": flwr.ConfigRecord({"schema": SCHEMA, "why": why})})


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


@dataclass(frozen=True, slots=True)
class Node:
    """A node's own copy of the plan, and its clients.

    Attributes:
        setup: the plan put together over the node's clients.
        promised: its privacy plan.
        plan: the hash of that.
        clients: ids of the clients that the node answers for.
    """

    setup: Training
    promised: PrivacyPlan
    plan: str
    clients: frozenset[ClientId]

    @classmethod
    def of(
        cls,
        plan: Path,
        share: tuple[int, int] | None,
        clients: Clients | None,
        options: EngineOptions,
    ) -> "Node":
        """Put a plan together over all of its clients, and keep every ``share``-th of them.

        Raises:
            ConfigError: see ``training``.
        """
        chosen = read(plan, in_python=clients is not None)
        refuse_over_network(chosen)
        code = chosen.code()
        own = Own(clients=clients)
        setup = training(chosen, own=own, options=options, report=_to_stderr, part=True)
        promised = setup.promise(code)
        ids = sorted(setup.clients.ids, key=id_order)
        if share is not None:
            ids = ids[share[0] :: share[1]]
        return cls(setup, promised, promised.hash, frozenset(ids))

    def ids(self, content: Any) -> Any:  # noqa: ANN401  Flower's RecordDict
        """Return the ids of the node's clients, if the server has the same plan.

        Raises:
            DeclinedError: it has another one.
        """
        fields = content["task"]
        self._refuse(fields, None)
        flwr = _flwr()
        names = [_name(client) for client in sorted(self.clients, key=id_order)]
        return flwr.RecordDict({"clients": flwr.ConfigRecord({"schema": SCHEMA, "ids": names})})

    def updates(self, content: Any) -> Any:  # noqa: ANN401  Flower's RecordDict
        """Train the clients of a task; return their updates, one array each.

        Raises:
            DeclinedError: the task is not of this plan, or asks for clients of others.
        """
        flwr, fields = _flwr(), content["task"]
        task, start = self._task(fields), self._start(content["model"]["trainable"])
        arrays = {
            _name(found.client): flwr.Array(found.update.detach().numpy())
            for found in self.setup.engine.run(task, start)
        }
        said = {**agreement(self.setup.model, self.plan, task.active), "round": task.round}
        return flwr.RecordDict(
            {"updates": flwr.ArrayRecord(arrays), "task": flwr.ConfigRecord(said)}
        )

    def _refuse(self, fields: Mapping[str, Any], active: Sequence[int] | None) -> None:
        own = agreement(self.setup.model, self.plan, active)
        if (said := difference(fields, own)) is not None:
            raise DeclinedError(f"the server's {said}")

    def _task(self, fields: Mapping[str, Any]) -> RoundTask:
        round_, clip_norm = fields.get("round"), fields.get("clip_norm")
        if type(round_) is not int or not 0 <= round_ < self.promised.rounds:
            raise DeclinedError(f"the server's round is {_shown(round_)}; the plan has others")
        active = self.promised.active(round_)
        self._refuse(fields, active)
        own_active = _round_fields(RoundTask(round_, (), 1.0, "", active))["active"]
        if fields.get("active") != own_active:
            raise DeclinedError("the server names other active groups than the plan's schedule")
        if type(clip_norm) is not float or not self.promised.may_clip_to(clip_norm, round_):
            raise DeclinedError(
                f"the server's clip norm is {_shown(clip_norm)}, the plan begins with "
                f"{self.promised.clip_norm:g} and does not come to that in round {round_}"
            )
        clients = [_client(name) for name in fields.get("clients", ())]
        if not clients or not self.clients.issuperset(clients):
            raise DeclinedError("the server asks for clients that this node does not have")
        return RoundTask(
            round_, tuple(cast("list[ClientId]", clients)), clip_norm, self.plan, active
        )

    def _start(self, array: Any) -> Tensor:  # noqa: ANN401  Flower's Array
        found = _vector(array, self.setup.model.dim)
        if found is None or not found.isfinite().all():
            raise DeclinedError("the server sent no finite vector of the model's parameters")
        return found
