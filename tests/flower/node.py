"""A SuperNode in a thread of the test's process: its answers are what the test says.

It signs, and speaks to a SuperLink over TLS, as ``flower-supernode`` does and with the same code;
but it starts no process per message, and may answer late, twice, or with nonsense.
"""

import threading
import time
from collections.abc import Callable, Sequence

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from deployment import Deployment, DeploymentError
from flwr.app import Context, Message, RecordDict
from flwr.common.config import get_fused_config_from_fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

Answer = Callable[[Message, Context], Sequence[Message]]
"""From a message to the answers that are sent, in this order; none is silence."""
POLL = 0.5
"""Seconds between two looks for messages: each is signed, sent and checked."""


class Node:
    """A SuperNode whose key is registered. Use it as a context: leaving it ends the thread."""

    def __init__(
        self, deployment: Deployment, name: str, answer: Answer, port: int = 0, **config: int
    ) -> None:
        self.name = name
        self.answer = answer
        self.received: list[Message] = []
        self.fault: BaseException | None = None
        self.id: int | None = None
        self._config = {key.replace("_", "-"): value for key, value in config.items()}
        self._port = port or deployment.port
        self._deployment = deployment
        self._over = threading.Event()
        self._contexts: dict[int, Context] = {}
        self._thread = threading.Thread(target=self._guarded, name=name, daemon=True)

    def __enter__(self) -> "Node":
        self._thread.start()
        self._deployment.wait_for(lambda: self.id or self.fault, f"{self.name} is known")
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=30)

    def _guarded(self) -> None:
        try:
            self._serve()
            if not self._over.is_set():  # Flower logs what it catches and goes on after its context
                self.fault = DeploymentError(f"{self.name} lost its connection")
        except BaseException as fault:  # the test reads it: this thread has nobody to tell
            self.fault = fault

    def _serve(self) -> None:
        key = load_ssh_private_key(self._deployment.key(self.name).read_bytes(), None)
        trusted = (self._deployment.folder / "certificates" / "ca.crt").read_bytes()
        address = f"127.0.0.1:{self._port}"
        with http_request_response(address, False, trusted, (key, key.public_key())) as connection:
            self.id, receive, send, get_run, get_fab, pull, push, confirm = connection
            while not self._over.is_set():
                try:
                    got = receive()
                    if got is None:
                        time.sleep(POLL)
                        continue
                    message = self._whole(*got, pull, confirm)
                    self.received.append(message)
                    context = self._context(message.metadata.run_id, get_run, get_fab)
                    for reply in self.answer(message, context):
                        _send(reply, message.metadata.run_id, send, push)
                except RunNotRunningException:
                    time.sleep(POLL)

    def _whole(self, head: Message, tree, pull, confirm) -> Message:
        run, number = head.metadata.run_id, head.metadata.message_id
        objects = [one.object_id for one in iterate_object_tree(tree)]
        contents = pull_objects(objects, pull_object_fn=lambda one: pull(run, one))
        confirm(run, number)
        message = inflate_object_from_contents(number, contents)
        message.metadata.__dict__["_message_id"] = number
        return message

    def _context(self, run: int, get_run, get_fab) -> Context:
        if run not in self._contexts:
            told = get_run(run)
            config = get_fused_config_from_fab(get_fab(told.fab_hash, run).content, told)
            self._contexts[run] = Context(run, self.id, self._config, RecordDict(), config)
        return self._contexts[run]


def _send(reply: Message, run: int, send, push) -> None:
    reply.metadata.__dict__["_message_id"] = reply.object_id
    objects = get_all_nested_objects(reply)
    wanted, session = send(reply, get_object_tree(reply), 0.0)
    for number in objects:
        if number in wanted:
            push(run, session, number, objects[number].deflate())
