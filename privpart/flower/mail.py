"""Mail: messages that a node alone can answer, answers that hold up nobody, and who has whom."""

import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from accounting.checks import ConfigError
from privpart.flower.agreement import Report, flower, id_of, plain_text, to_stderr
from privpart.messages import ClientId, Reason

_LONGEST_LOOK, _SHORTEST_LOOK = 10.0, 0.05
"""Seconds that other answers wait for downloads at a time, which then continue beside them; and
seconds between two downloads that begin."""


_KEY = re.compile("[0-9a-f]{64}")
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


class LacksError(RefusedReplyError):
    """A reply of a node that does not have the rest of the model it was sent a part of."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A message that a node has not answered yet, about these clients.

    ``partial`` is whether it holds only the groups of the model that the node lacks, and ``since``
    when it was sent, by the monotonic clock.
    """

    node: int
    clients: tuple[ClientId, ...] = ()
    partial: bool = False
    since: float = 0.0


def pushed(
    grid: Any,  # noqa: ANN401  Flower's Grid
    kind: str,
    content: object,
    node: int,
    timeout: float,
) -> str | None:
    """Send a message that expires with its round; return its id, or None if it was not taken.

    A SuperLink refuses one that expired on its way by the error of a server that has failed.

    A node works off its messages in order: without an end, it would train for rounds that are over.
    The id is the hash of the message, and a SuperLink lets any node answer a message whose id it
    knows, in any name. So each message holds a secret, and only the node that got it knows its id.
    """
    secret, began = secrets.token_hex(16), time.monotonic()
    message = flower().Message(content, node, kind, ttl=timeout, group_id=secret)
    try:
        ids = list(grid.push_messages([message]))
    except Exception:
        if time.monotonic() - began < timeout:
            raise
        return None
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


def received(
    grid: Any,  # noqa: ANN401  Flower's Grid
    asked: dict[str, Asked],
    looks: dict[str, Look],
    *,
    patience: float = _LONGEST_LOOK,
) -> Iterator[tuple[Asked | None, Any]]:
    """Yield, for each message with an answer, its records or the error why there are none.

    The message is None if the answer is to one that was never sent. Each message is looked for by
    itself: what one node sent may make Flower raise an error, and other answers that came in the
    same look would be lost. Downloads are waited for ``patience`` seconds in all, or a little each.
    """
    end = time.monotonic() + min(patience, _LONGEST_LOOK)
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
            yield asked.pop(name), RefusedReplyError("malformed", sentence)
        for reply in look.found:
            # an empty text if it names none
            metadata = getattr(reply, "metadata", None)
            if getattr(metadata, "reply_to_message_id", "") != name or name not in asked:
                yield None, RefusedReplyError("not asked", "answered what was never sent")
                continue
            sender = asked.pop(name)
            try:
                content = content_of(reply, sender.node)
            except Exception as error:
                content = error if isinstance(error, NoAnswerError) else readable(error)
            yield sender, content


@dataclass(frozen=True, slots=True)
class Late:
    """Messages of rounds that are over.

    An answer that nobody takes lies in the SuperLink until the end of the run.
    """

    asked: dict[str, Asked] = field(default_factory=dict)
    looks: dict[str, Look] = field(default_factory=dict)

    def keep(self, asked: Mapping[str, Asked], looks: Mapping[str, Look]) -> None:
        """Note the messages of a round without an answer."""
        self.asked.update(asked)
        self.looks.update(looks)

    def take(self, grid: Any) -> None:  # noqa: ANN401  Flower's Grid
        """Take the answers that have come since, and drop them."""
        for _ in received(grid, self.asked, self.looks, patience=0.0):
            continue


def readable(error: Exception) -> RefusedReplyError:
    """Return an error of ours as it is, and whatever else the objects of a reply raise by name."""
    if isinstance(error, RefusedReplyError):
        return error
    why = f"sent something that cannot be read ({type(error).__name__})"
    return RefusedReplyError("malformed", why)


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
    if set(content) == {"lacks"}:
        raise LacksError("declined", "says that it lacks the rest of a model sent whole")
    return content


def hosted(
    grid: Any,  # noqa: ANN401  Flower's Grid
    agreed: Mapping[str, str],
    nodes: int,
    *,
    timeout: float,
    poll: float = 3.0,
    report: Report = to_stderr,
    keys: dict[int, str] | None = None,
) -> dict[ClientId, int]:
    """Ask all nodes which clients they have; return the node of each client.

    ``keys`` gets the public key, in hex, of each node that keeps a ledger.

    Raises:
        ConfigError: too few nodes answered, two nodes have one client, or there are no clients.
    """
    asked, looks = dict[str, Asked](), dict[str, Look]()
    owners, answered, refused, met = dict[ClientId, int](), set[int](), set[int](), set[int]()
    public_keys = {} if keys is None else keys
    flwr, end = flower(), time.monotonic() + timeout
    question = flwr.RecordDict({"task": flwr.ConfigRecord(dict(agreed))})
    while len(answered) < nodes:
        if time.monotonic() >= end:
            counts = {
                "not connected; start them": nodes - len(met),
                "refused, as said above; correct them": len(refused),
                "silent; raise start_timeout": len(met - answered - refused),
            }
            lacks = [f"{number} {what}" for what, number in counts.items() if number > 0]
            raise ConfigError(
                f"nodes={nodes}: {len(answered)} said in time which clients they have. The others: "
                f"{', '.join(lacks)}. Then run again."
            )
        new = sorted(set(grid.get_node_ids()) - met)
        sent = {pushed(grid, "query", question, node, timeout): node for node in new}
        asked |= {name: Asked(node) for name, node in sent.items() if name}
        met |= {to.node for to in asked.values()}
        for sender, content in received(grid, asked, looks):
            node = getattr(sender, "node", -1)
            try:
                clients, key = listed(content)
            except NoAnswerError as error:
                report(f"node {node}: {error}; it is asked again when it is connected.")
                met.discard(node)
            except Exception as error:
                refusal = readable(error)
                refused |= {node} & met
                report(f"node {node}: {refusal}; refused ({refusal.reason}).")
            else:
                _enter(owners, node, clients)
                answered.add(node)
                public_keys |= {node: key} if key else {}
        time.sleep(poll * (len(answered) < nodes))
    if not owners:
        raise ConfigError("nodes: none of them has a client; there is nobody to train with.")
    return owners


def _enter(owners: dict[ClientId, int], node: int, clients: list[ClientId]) -> None:
    for client in clients:
        if client in owners:
            raise ConfigError(
                f"client {client!r}: nodes {owners[client]} and {node} both say that they have it. "
                "Each client needs a name of its own, on one node. Where one data set serves two "
                "nodes, start each with its share: --node-config 'partition-id=0 num-partitions=2'."
            )
        owners[client] = node


def listed(content: Any) -> tuple[list[ClientId], str]:  # noqa: ANN401  of anybody
    """Return the ids in a node's answer, and the key of its ledger or "".

    Raises the error that stands in its place.
    """
    if isinstance(content, Exception):
        raise content
    if set(content) != {"clients"} or set(content["clients"]) - {"key"} != {"schema", "ids"}:
        raise RefusedReplyError("malformed", "did not answer with its clients")
    key = content["clients"].get("key", "")
    if type(key) is not str or (key and not _KEY.fullmatch(key)):
        raise RefusedReplyError("malformed", "its key is not 64 hex digits")
    clients = [id_of(name) for name in content["clients"]["ids"]]
    if None in clients or len(set(clients)) < len(clients):
        raise RefusedReplyError("malformed", "its clients are not a list of ids, each once")
    return cast("list[ClientId]", clients), key
