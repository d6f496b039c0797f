"""A federation in one process: Flower's own messages, as bytes, and ClientApps that answer them."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower has an environment of its own: make messages")

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from small import TASK, plan_of

NODES = (3, 2**64 - 5)
"""Node ids are unsigned numbers of 64 bits."""


def through_bytes(message: Message) -> Message:
    """Return a message after a way over the network: as the bytes that its objects become."""
    found = {name: thing.deflate() for name, thing in get_all_nested_objects(message).items()}
    proto = message_to_proto(message).SerializeToString()
    inflated = inflate_object_from_contents(message.object_id, dict(found))
    assert isinstance(inflated, Message)
    kind = type(message_to_proto(message))
    inflated.metadata.__dict__.update(message_from_proto(kind.FromString(proto)).metadata.__dict__)
    return inflated


class InProcessGrid:
    """A Grid whose nodes answer at once, when they are asked for what they have.

    Attributes:
        apps: per node, what answers its messages.
        offline: nodes that are not connected.
        sent: every message that was pushed.
        bytes: number of bytes that went each way.
    """

    def __init__(self, apps: dict[int, Callable], shares: bool = True) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in a ServerApp
        self.apps = apps
        self.offline: set[int] = set()
        self.sent: list[Message] = []
        self.bytes = {"to nodes": 0, "from nodes": 0}
        self._numbers = itertools.count()
        self._waiting: dict[str, Message] = {}
        self._shares = shares

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.apps if node not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            name = f"{next(self._numbers):064x}"
            message.metadata.__dict__.update(_message_id=name)
            self.bytes["to nodes"] += _size(message)
            arrived = through_bytes(message)
            self.sent.append(arrived)
            self._waiting[name] = arrived
            ids.append(name)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for name in message_ids:
            message = self._waiting.get(name)
            if message is None or message.metadata.dst_node_id in self.offline:
                continue
            del self._waiting[name]
            reply = self._answer(message)
            if reply is not None:
                found.append(reply)
        return found

    def _answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        order = sorted(self.apps).index(node)
        share = {"partition-id": order, "num-partitions": len(self.apps)} if self._shares else {}
        try:
            reply = self.apps[node](message, Context(1, node, share, RecordDict(), {}))
        except Exception as error:  # as a SuperNode does
            reply = Message(Error(2, str(error)), reply_to=message)
        if reply is None:
            return None
        reply.metadata.__dict__["_message_id"] = "f" * 64
        self.bytes["from nodes"] += _size(reply)
        return through_bytes(reply)


def _size(message: Message) -> int:
    return sum(len(thing.deflate()) for thing in get_all_nested_objects(message).values())


def write_plan(folder: Path) -> Path:
    """Write a plan and its code, of four rounds."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.py").write_text(TASK)
    path = folder / "plan.toml"
    path.write_text(plan_of(rounds=4))
    return path
