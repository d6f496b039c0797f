"""Mail: messages that a node alone can answer, and answers that hold up nobody."""

import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from privpart.flower.agreement import flower, plain_text
from privpart.messages import Reason

_LONGEST_LOOK, _SHORTEST_LOOK = 10.0, 0.05
"""Seconds that other answers wait for downloads at a time, which then continue beside them; and
seconds between two downloads that begin."""


SILENCE = {
    3: "the message expired, or is lost",
    4: "its answer expired, or is lost",
    5: "it is not connected",
    8: "its app stopped responding",
}
"""Flower's errors in the place of an answer that never came; all others are the node's own."""


class NoAnswerError(Exception):
    """A reply that Flower made in the place of a node that was lost, or too slow."""


class RefusedReplyError(Exception):
    """A reply of which nothing can be used, and why."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason: Reason = reason


def question(agreed: Mapping[str, str]) -> Any:  # noqa: ANN401  Flower's RecordDict
    """Return the message that asks a node which clients it has."""
    flwr = flower()
    return flwr.RecordDict({"task": flwr.ConfigRecord(dict(agreed))})


def pushed(
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
    message = flower().Message(content, node, kind, ttl=timeout, group_id=secret)
    ids = list(grid.push_messages([message]))
    return ids[0] if ids and isinstance(ids[0], str) else None


class Look(threading.Thread):
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
        """Download the answer; keep the error that it raises."""
        try:
            self.found = list(self._grid.pull_messages([self._name]))
        except Exception as error:
            # of the network, or of parsing what a stranger sent
            self.error = error


def replies(
    grid: Any,  # noqa: ANN401  Flower's Grid
    asked: Mapping[str, object],
    looks: dict[str, Look],
) -> Iterator[tuple[str, Any]]:
    """Yield the answers that came, or why one is refused, with the id of the message asked for.

    Each message is looked for by itself: what one node sent may make Flower raise an error, and
    other answers that came in the same look would be lost.
    """
    end = time.monotonic() + _LONGEST_LOOK
    for name in list(asked):
        look = looks.pop(name, None)
        if look is None:
            look = Look(grid, name)
            look.start()
            look.join(max(_SHORTEST_LOOK, end - time.monotonic()))
        if look.is_alive():
            # the download continues; the next call looks again
            looks[name] = look
            continue
        if look.error is not None:
            grid.get_node_ids()  # raises the error if it is the network's
            sentence = f"sent something that Flower cannot read ({type(look.error).__name__})"
            yield name, RefusedReplyError("malformed", sentence)
        for reply in look.found:
            yield name, reply


def replied(reply: Any) -> str:  # noqa: ANN401  Flower's Message
    """Return the id of the message that a reply answers; an empty text if it names none."""
    message_id = getattr(getattr(reply, "metadata", None), "reply_to_message_id", "")
    return message_id if isinstance(message_id, str) else ""


def content_of(reply: Any, node: int) -> Any:  # noqa: ANN401  Flower's Message and RecordDict
    """Return the records of a reply.

    Raises:
        NoAnswerError: it says that the node is lost, or too slow.
        RefusedReplyError: it is another error, from another node, or the node declines.
    """
    if reply.has_error():
        code = int(reply.error.code)
        if code in SILENCE:
            raise NoAnswerError(f"gave no answer: {SILENCE[code]} (Flower's error {code})")
        raise RefusedReplyError("declined", f"gave no answer (Flower's error {code})")
    if (source := reply.metadata.src_node_id) != node:
        raise RefusedReplyError("not asked", f"node {source} answered in its place")
    content = reply.content
    if set(content) == {"declined"}:
        why = content["declined"].get("why", "without a reason")
        raise RefusedReplyError("declined", f"declined: {plain_text(why)}")
    return content
