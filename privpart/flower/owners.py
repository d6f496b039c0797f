"""Owners: which node answers for which client, asked before the first round."""

import time
from collections.abc import Iterable, Mapping
from typing import Any, cast

from accounting.checks import ConfigError
from privpart.flower.agreement import Report, id_of, to_stderr
from privpart.flower.mail import (
    Look,
    NoAnswerError,
    RefusedReplyError,
    content_of,
    pushed,
    question,
    replied,
    replies,
)
from privpart.messages import ClientId


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
    say, asked, looks = report or to_stderr, dict[str, int](), dict[str, Look]()
    owners, answered, met = dict[ClientId, int](), set[int](), set[int]()
    end = time.monotonic() + timeout
    while len(answered) < nodes:
        for node in sorted(set(grid.get_node_ids()) - met):
            name = pushed(grid, "query", question(agreed), node, timeout)
            if name is not None:
                met.add(node)
                asked[name] = node
        for name, reply in replies(grid, asked, looks):
            answers = isinstance(reply, RefusedReplyError) or replied(reply) == name
            node = asked.pop(name, -1) if answers else -1
            try:
                clients = _hosted_by(reply, node, say)
            except NoAnswerError as error:
                say(f"node {node}: {error}; it is asked again when it is connected.")
                met.discard(node)
                continue
            if clients is not None:
                _enter(owners, node, clients)
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
    """Return the ids that a node answered with; None for anything else.

    Raises:
        NoAnswerError: the node was lost, or too slow.
    """
    try:
        if isinstance(reply, RefusedReplyError):
            raise reply
        return listed(content_of(reply, node))
    except NoAnswerError:
        raise
    except RefusedReplyError as error:
        say(f"node {node}: {error}; refused ({error.reason}).")
    except Exception as error:
        # whatever the objects of a reply raise
        say(f"node {node}: sent something that cannot be read ({type(error).__name__}); refused.")
    return None


def listed(content: Any) -> list[ClientId]:  # noqa: ANN401  of anybody
    """Return the ids in a node's answer.

    Raises:
        RefusedReplyError: it holds anything else.
    """
    if set(content) != {"clients"} or set(content["clients"]) != {"schema", "ids"}:
        raise RefusedReplyError("malformed", "did not answer with its clients")
    clients = [id_of(name) for name in content["clients"]["ids"]]
    if None in clients or len(set(clients)) < len(clients):
        raise RefusedReplyError("malformed", "its clients are not a list of ids, each once")
    return cast("list[ClientId]", clients)


def _enter(owners: dict[ClientId, int], node: int, clients: Iterable[ClientId]) -> None:
    for client in clients:
        if client in owners:
            raise ConfigError(
                f"client {client!r}: nodes {owners[client]} and {node} both say that they have it. "
                "Each client needs a name of its own, on one node. Where one data set serves two "
                "nodes, start each with its share: --node-config 'partition-id=0 num-partitions=2'."
            )
        owners[client] = node
