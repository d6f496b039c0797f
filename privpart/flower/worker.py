"""Worker: one process that answers all messages of a SuperNode, and keeps torch, model and data.

Flower starts a process for each message, which imports torch and builds the model anew. A SuperNode
started with ``--isolation process`` starts none, and waits for somebody who asks it for tasks:

    flower-supernode --isolation process ... &
    python -m privpart.flower.worker 127.0.0.1:9094

The app itself runs in a child of the worker, one for each version of the app: a child that crashes
costs its message, and an app that has changed is loaded in a new one.
"""

import argparse
import contextlib
import multiprocessing
import re
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from privpart.flower.agreement import flower, to_stderr

POLL = 0.5
"""Seconds between two questions for a task."""


def serve_node(address: str, certificates: bytes | None = None) -> None:
    """Answer the messages of a SuperNode, for as long as this process lives.

    Args:
        address: of the SuperNode's runtime API, such as 127.0.0.1:9094, its ``--port``.
        certificates: of the authority of that API; None where it has no TLS, on the same machine.

    Raises:
        MissingExtraError: Flower is not installed.
    """
    flower()
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType

    client = _client(address, certificates, "")
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    child: _Child | None = None
    try:
        while True:
            answer = client.AcquireTask(request)
            if not (answer.HasField("task") and answer.token):
                time.sleep(POLL)
                continue
            version = str(answer.task.fab_hash)
            if child is None or not child.runs(version):
                if child is not None:
                    child.end()
                child = _Child(version, address, certificates)
            child.answer(answer.token)
    finally:
        client.close()
        if child is not None:
            child.end()


class _Child:
    """A process with one version of an app."""

    def __init__(self, version: str, address: str, certificates: bytes | None) -> None:
        # fork would copy the threads' locks of this process
        start = multiprocessing.get_context("spawn")
        self._version = version
        self._tokens, theirs = start.Pipe()
        arguments = (theirs, address, certificates)
        self._process = start.Process(target=_answer_tasks, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def runs(self, version: str) -> bool:
        return self._version == version and self._process.is_alive()

    def answer(self, token: str) -> None:
        """Pass a task on, and wait until it is done, or the process has died."""
        try:
            self._tokens.send(token)
            self._tokens.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            to_stderr(f"the process of the app ended with {code}; the next message starts another.")

    def end(self) -> None:
        self._tokens.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _client(address: str, certificates: bytes | None, token: str) -> Any:  # noqa: ANN401
    """Return a client of a SuperNode's runtime API; it speaks of one task if it has its token."""
    from flwr.supercore.interceptors import (
        RuntimeTokenHttpInterceptor,
        RuntimeVersionHttpInterceptor,
    )
    from flwr.supercore.retry import make_simple_http_retry_invoker
    from flwr.supercore.runtime import RuntimeHttpClient

    name = "flwr-clientapp" if token else "SuperExec"
    interceptors: list[Any] = [RuntimeVersionHttpInterceptor(component_name=name)]
    if token:
        interceptors.append(RuntimeTokenHttpInterceptor(token))
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=certificates is None,
        root_certificates=certificates,
        interceptors=interceptors,
        retry_invoker=make_simple_http_retry_invoker(),
    )


def _answer_tasks(tokens: Connection, address: str, certificates: bytes | None) -> None:
    """Answer the tasks of a pipe, in a process of its own, until the pipe is closed."""
    app: Callable[..., Any] | None = None
    while True:
        try:
            token = tokens.recv()
        except EOFError:
            return
        client = _client(address, certificates, token)
        try:
            app = _answer(client, app)
        except Exception as error:
            # of the connection: the SuperNode notices that the task is silent
            to_stderr(f"a message was not answered ({type(error).__name__}: {error}).")
        finally:
            client.close()
        tokens.send(None)


def _answer(client: Any, app: Callable[..., Any] | None) -> Callable[..., Any] | None:  # noqa: ANN401
    """Answer one task; return the app, which is loaded first where there is none yet."""
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode, SubStatus
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supernode.runtime import run_clientapp as flwr_process

    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    context, status = None, SubStatus.FAILED
    try:
        message, context, run, fab = flwr_process.pull_task_input(client)
        try:
            app = app or _loaded(run, fab)
            reply = app(message, context)
            status = SubStatus.COMPLETED
        except (Exception, SystemExit) as error:
            # its text may tell of examples
            to_stderr(f"the app failed ({type(error).__name__}: {error}).")
            code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            reply = Message(Error(code=code, reason="see the log of the node"), reply_to=message)
        flwr_process.push_message(client, reply, context)
    finally:
        flwr_process.push_task_output(client, context, status, "")
        heartbeat.stop()
    return app


def _loaded(run: Any, fab: Any) -> Callable[..., Any]:  # noqa: ANN401  Flower's Run and Fab
    """Install an app as Flower's own process does, and load its ClientApp."""
    from flwr.cli.install import install_from_fab
    from flwr.clientapp.utils import get_load_client_app_fn

    install_from_fab(fab.content, skip_prompt=True)
    load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    app: Callable[..., Any] = load(run.fab_id, run.fab_version, fab.hash_str)
    return app


def main() -> None:
    """Read the command line, and serve."""
    reader = argparse.ArgumentParser("python -m privpart.flower.worker", description=__doc__)
    reader.add_argument("address", help="of the SuperNode's runtime API, such as 127.0.0.1:9094")
    reader.add_argument("--root-certificates", metavar="FILE", type=argparse.FileType("rb"))
    given = reader.parse_args()
    # Flower would try such an address forever, without a word about it
    if not re.fullmatch(r".+:\d+", given.address):
        reader.error(f"{given.address!r}: write HOST:PORT, such as 127.0.0.1:9094")
    file = given.root_certificates
    to_stderr(f"waits for messages at {given.address}; Ctrl-C ends it.")
    with contextlib.suppress(KeyboardInterrupt):
        serve_node(given.address, None if file is None else file.read())


if __name__ == "__main__":
    main()
