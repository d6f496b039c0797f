"""FlowerEngine: asks nodes for the updates of their clients, by Flower's messages.

An answer is one float32 vector per client, never a sum, and no metric: losses and counts are not
accounted. A node answers for the clients that the run's owners name as its own. Whatever a node
sends is refused or clipped, and delays a round by no more than its time-out.
"""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from torch import Tensor

from accounting import checks
from accounting.checks import parsed_json
from privpart.data.clients import RemoteClients
from privpart.flower.agreement import (
    Report,
    agreement,
    difference,
    float_vector,
    flower,
    id_of,
    id_text,
    names_text,
    plain_text,
    round_fields,
    to_stderr,
)
from privpart.flower.downlink import Downlink, Groups
from privpart.flower.mail import (
    Asked,
    LacksError,
    Late,
    Look,
    NoAnswerError,
    RefusedReplyError,
    pushed,
    readable,
    received,
)
from privpart.messages import ClientId, ClientUpdate, Reason, RefusedAnswer, RoundTask, id_order
from privpart.model import PartialModel
from privpart.run.members import NODE_KEYS, STATEMENT, histories, unsealed
from privpart.run.report import AUTHENTICATED, DEADLINE, FIRST_ANSWERS, UNAUTHENTICATED
from privpart.run.store import HANDLED, StorageError

_MESSAGE_BYTES = 2**28
_PAST_ROUNDS, _PAST_ANSWERS = 5, 10_000
"""Rounds from which a percentile of answers says something, and the answers that it is of."""
_STATEMENT, _REASON, _NUMBER = 2048, 2048, 16
"""Characters of what a node signs, of why a client declines, and of a round, at most."""


@dataclass(frozen=True, slots=True)
class _Round:
    """A round that is being asked for.

    Attributes:
        task: the task.
        agreed: what nodes must agree on.
        down: what each node is sent of the model.
        asked: messages without an answer, of this attempt and of earlier ones.
        looks: looks for their answers that are not over yet.
        seconds: how long each answer of a node took.
        came: clients whose update was yielded.
        enough: answers with which the round ends, without those who are still awaited.
        waiting: clients that this attempt has no answer from.
        unasked: clients that this attempt has not asked, because their node is not connected.
        run: id of the run, for the nodes' own ledgers.
    """

    task: RoundTask
    agreed: dict[str, str]
    down: Downlink
    enough: int
    run: str = ""
    asked: dict[str, Asked] = field(default_factory=dict)
    looks: dict[str, Look] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    came: set[ClientId] = field(default_factory=set)
    waiting: set[ClientId] = field(default_factory=set)
    unasked: set[ClientId] = field(default_factory=set)

    def ask_the_missing(self) -> None:
        """Begin an attempt."""
        missing = set(self.task.clients) - self.came
        self.waiting.update(missing)
        self.unasked.update(missing)

    @property
    def is_full(self) -> bool:
        """Whether no further answer counts, by their number alone."""
        return len(self.came) >= self.enough

    def counts(self, answer: ClientUpdate | RefusedAnswer) -> bool:
        """Note an answer; return whether it counts: one of two attempts that one client made."""
        if isinstance(answer, RefusedAnswer):
            self.waiting.difference_update(answer.clients)
            return True
        self.waiting.discard(answer.client)
        # a slow node may answer both attempts
        if self.is_full or answer.client in self.came:
            return False
        self.came.add(answer.client)
        return True

    def lose(self, to: Asked) -> None:
        """Wait no longer in this attempt for a node that was lost; the next one asks it again."""
        expected = {client for other in self.asked.values() for client in other.clients}
        self.waiting.difference_update(set(to.clients) - expected - self.unasked)

    def content(
        self,
        clients: Sequence[ClientId],
        groups: Groups,
        moves: Sequence[Mapping[str, str]],
    ) -> Any:  # noqa: ANN401  records
        """Return the message that asks for these clients, with these groups of the model.

        Of clients that were moved to the node, it carries what the operator signed.
        """
        flwr, (parts, vector) = flower(), self.down.sent(groups)
        fields = {**self.agreed, **round_fields(self.task), **parts}
        fields["clients"] = [*map(id_text, clients)]
        fields |= {"run": self.run, "moves": json.dumps(moves)}
        return flwr.RecordDict(
            {
                "model": flwr.ArrayRecord({"trainable": vector}),
                "task": flwr.ConfigRecord(fields),
            }
        )


class FlowerEngine:
    """Trains clients on the nodes of a Flower federation; see ``Engine``.

    Args:
        grid: Flower's ``Grid``, as a ServerApp gets it.
        model: the model that is trained, to say what both sides must agree on.
        owners: which node answers for each client of the population.
        keys: public key of each node that keeps a ledger, in hex: it signs each answer.
        most_answers: of one client: the plan's ``max_participations``. No node signs more.
        planted: those of them that are canaries, whom the auditor puts into cohorts.
        minimum: answers without which a round is tried again: the plan's ``minimum_cohort``.
        enough: returns with how many answers a round ends: of those that arrive later none counts,
            and their clients have not taken part. None waits for everybody. Clients' values must
            not decide when they answer, see docs/how-to/flower.md; the report says
            that nothing checks it.
        authenticated: whether the SuperLink authenticates nodes.
        timeout: seconds to wait for the answers of a round.
        percentile: of the seconds that answers of past rounds took, > 0 and <= 100: from the sixth
            round on the first attempt waits twice as long, never longer than ``timeout``. None
            waits for ``timeout``. As with ``enough``, values must not decide when clients answer.
        attempts: how often a round with fewer answers than ``minimum`` is asked for, >= 1: the same
            task, for the clients that are missing.
        poll: seconds between two looks for answers.
        report: gets a sentence about each node that is lost or refused.

    Attributes:
        clients: the population, by ids, without canaries; its examples are on the nodes.
        owners: which node answers for each client now.
        keys: of nodes, likewise.
        run_id: of the run, once it is begun; nodes that keep a ledger decline without it.
        sign: gets, durably, what a node signed of its answer, before anything of it counts.
        moves: per node, what the operator signed of clients that were moved to it.

    Raises:
        ConfigError: an option that is not positive.
    """

    def __init__(
        self,
        grid: Any,  # noqa: ANN401  Flower's Grid
        model: PartialModel,
        owners: Mapping[ClientId, int],
        *,
        keys: Mapping[int, str] = MappingProxyType({}),
        most_answers: int = 1,
        planted: Collection[ClientId] = (),
        minimum: int,
        authenticated: bool,
        enough: Callable[[int], int] | None = None,
        timeout: float = 3600.0,
        percentile: float | None = None,
        attempts: int = 3,
        poll: float = 3.0,
        report: Report | None = None,
    ) -> None:
        self.grid = grid
        self.model = model
        self.owners = dict(owners)
        self.keys = dict(keys)
        self.most_answers = most_answers
        self.run_id = ""
        self.sign: Callable[[int, Mapping[str, str]], None] = lambda *_: None
        self.moves: dict[int, list[Mapping[str, str]]] = {}
        self.minimum = minimum
        self.authenticated = authenticated
        self.enough = enough
        self.timeout = checks.positive("timeout", timeout)
        self.percentile = percentile
        self._seconds: deque[float] = deque(maxlen=_PAST_ANSWERS)
        self._rounds = 0
        self.attempts = checks.count("attempts", attempts)
        self.poll = checks.positive("poll", poll)
        self.clients = RemoteClients(sorted(self.owners.keys() - set(planted), key=id_order))
        self._report = report or to_stderr
        self._down = Downlink(model)
        self.late = Late()

    def __enter__(self) -> "FlowerEngine":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @property
    def facts(self) -> dict[str, Any]:
        """What the ledger keeps of a federation when its run is made."""
        nodes: dict[str, list[str]] = {}
        for client, node in self.owners.items():
            nodes.setdefault(str(node), []).append(id_text(client))
        identity = AUTHENTICATED if self.authenticated else UNAUTHENTICATED
        first = {} if self.enough is None else {FIRST_ANSWERS: True}
        late = {} if self.percentile is None else {DEADLINE: self.percentile}
        keys = {str(node): key for node, key in self.keys.items()}
        keyed = {NODE_KEYS: keys} if keys else {}
        return {"identity": identity, "owners": nodes, **first, **late, **keyed}

    def run(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate]:
        """Yield the answers to a task as they arrive, and what was refused."""
        answers = self._answers(task, start)
        # a sum of integers is the same in any order
        if task.sum_clip_norm is not None:
            # the server counts the refusals
            yield from cast("Iterator[ClientUpdate]", answers)
            return
        # floats sum differently in another order, so the cohort's order is restored
        place = {client: number for number, client in enumerate(task.clients)}
        updates = []
        for answer in answers:
            if isinstance(answer, ClientUpdate):
                updates.append(answer)
            else:
                yield cast("ClientUpdate", answer)
        yield from sorted(updates, key=lambda update: place[update.client])

    def _answers(self, task: RoundTask, start: Tensor) -> Iterator[ClientUpdate | RefusedAnswer]:
        agreed = agreement(self.model, task.plan, task.active)
        self._down.begin(task, start)
        self.late.take(self.grid)
        enough = len(task.clients) if self.enough is None else self.enough(task.round)
        this = _Round(task, agreed, self._down, max(enough, self.minimum), self.run_id)
        for attempt in range(self.attempts):
            if attempt:
                self._report(
                    f"round {task.round}: {len(this.came)} of {len(task.clients)} clients "
                    f"answered, the plan needs {self.minimum}; asking the others again."
                )
            this.ask_the_missing()
            yield from self._attempt(this, self.timeout if attempt else self._patience())
            if len(this.came) >= self.minimum:
                break
        self._seconds.extend(this.seconds)
        self._rounds += 1
        self.late.keep(this.asked, this.looks)
        self._tell_missing(this)

    def _patience(self) -> float:
        """Return the seconds that the first attempt of a round waits for answers."""
        if self.percentile is None or self._rounds < _PAST_ROUNDS or not self._seconds:
            return self.timeout
        usual = float(np.percentile(self._seconds, self.percentile, method="higher"))
        return min(self.timeout, 2 * max(usual, self.poll))

    def _attempt(self, this: "_Round", patience: float) -> Iterator[ClientUpdate | RefusedAnswer]:
        """Yield answers until every client has answered, or the time is over."""
        end = time.monotonic() + patience
        while True:
            self._ask(this)
            yield from filter(this.counts, self._received(this))
            remaining = end - time.monotonic()
            if this.is_full or not this.waiting or remaining <= 0:
                return
            time.sleep(min(self.poll, remaining))

    def _ask(self, this: "_Round") -> None:
        """Send the task to the nodes that are here and have clients that were not asked yet."""
        connected = set(self.grid.get_node_ids())
        by_node: dict[int, list[ClientId]] = {}
        for client in this.unasked:
            by_node.setdefault(self.owners[client], []).append(client)
        limit = max(1, _MESSAGE_BYTES // (4 * self.model.dim))
        for node in sorted(connected & by_node.keys()):
            clients = sorted(by_node[node], key=id_order)
            groups = self._down.groups(node)
            for few in (clients[at : at + limit] for at in range(0, len(clients), limit)):
                content = this.content(few, groups, self.moves.get(node, ()))
                name = pushed(self.grid, "train", content, node, self.timeout)
                if name is None:
                    self._report(f"node {node}: the SuperLink took no message for it.")
                    continue
                now, part = time.monotonic(), groups is not None
                this.asked[name] = Asked(node, tuple(few), partial=part, since=now)
                this.unasked.difference_update(few)

    def _received(self, this: "_Round") -> Iterator[ClientUpdate | RefusedAnswer]:
        """Yield what was answered since the last look."""
        for sender, content in received(self.grid, this.asked, this.looks):
            if sender is None:
                self._report("an answer to a message that was never sent: refused.")
                yield RefusedAnswer("not asked")
            elif isinstance(content, NoAnswerError):
                self._report(f"node {sender.node}, round {this.task.round}: {content}.")
                this.lose(sender)
            elif isinstance(content, LacksError) and sender.partial:
                self._down.forgets.add(sender.node)
                this.unasked.update(set(sender.clients) & this.waiting)
            else:
                try:
                    yield from self._updates(content, sender, this)
                    this.seconds.append(time.monotonic() - sender.since)
                    self._down.answered(sender.node)
                except StorageError:
                    # of this side's disk
                    raise
                except Exception as error:
                    # whatever the objects of a reply raise
                    why = readable(error)
                    yield self._refused(sender, this, why.reason, str(why), sender.clients)

    def _refused(
        self, to: Asked, this: "_Round", why: Reason, sentence: str, clients: Iterable[ClientId]
    ) -> RefusedAnswer:
        self._report(f"node {to.node}, round {this.task.round}: {sentence}; refused ({why}).")
        return RefusedAnswer(why, tuple(clients))

    def _updates(
        self,
        content: Any,  # noqa: ANN401  Flower's RecordDict, of anybody
        to: Asked,
        this: "_Round",
    ) -> Iterator[ClientUpdate | RefusedAnswer]:
        """Yield the updates in an answer, and a refusal for each that is not one.

        Raises:
            RefusedReplyError: nothing of the answer can be used.
        """
        task, arrays = this.task, _arrays(content, this)
        dim = self.model.active_dim(task.active)
        missing, others = set(to.clients) - self._declined(content, to, this), list[str]()
        for name, array in arrays.items():
            client = id_of(name)
            if client is None or client not in missing:
                others.append(name)
                continue
            # a client counts once, whatever a node repeats
            missing.discard(client)
            vector = float_vector(array, dim)
            if vector is None:
                sentence = f"client {client!r} sent no float32 vector of {dim} parameters"
                yield self._refused(to, this, "wrong shape or type", sentence, (client,))
            else:
                yield task.update(client, vector)
        if others:
            # one line, however many names a node makes up
            sentence = (
                f"answered for {len(others)} clients whom it was not asked for, such as "
                f"{plain_text(others[0])}"
            )
            yield self._refused(to, this, "not asked", sentence, ())
        if missing:
            sentence = (
                f"left out {len(missing)} of the {len(to.clients)} clients that it was asked for"
            )
            yield self._refused(to, this, "malformed", sentence, missing)

    def _declined(self, content: Any, to: Asked, this: "_Round") -> set[ClientId]:  # noqa: ANN401
        """Keep what a node signed of its answer; return its clients that do not take part.

        Raises:
            RefusedReplyError: a node that keeps a ledger has not signed that the others answered.
        """
        if (key := self.keys.get(to.node)) is None:
            return set()
        try:
            entry, reasons = _statement(content["statement"], to, this, key, self.most_answers)
        except HANDLED as error:
            why = f"keeps a ledger, and what it signed cannot be used: {plain_text(error)}"
            raise RefusedReplyError("malformed", why) from None
        self.sign(to.node, entry)
        for client, why in reasons.items():
            self._report(
                f"node {to.node}, round {this.task.round}: client {client!r} declines: {why}."
            )
        this.waiting.difference_update(reasons)
        return {*reasons}

    def _tell_missing(self, this: "_Round") -> None:
        task = this.task
        if this.is_full and (late := set(task.clients) - this.came):
            names = ", ".join(map(id_text, sorted(late, key=id_order)))
            self._report(f"round {task.round} is full: neither counted nor charged: {names}.")
            return
        nodes = Counter(self.owners[client] for client in task.clients if client not in this.came)
        connected = set(self.grid.get_node_ids()) if nodes else set()
        for node, clients in sorted(nodes.items()):
            state = "is connected" if node in connected else "is not connected"
            self._report(
                f"node {node}, round {task.round}: {clients} of its clients are missing from the "
                f"round; it {state}."
            )


def _arrays(content: Any, this: _Round) -> Mapping[str, Any]:  # noqa: ANN401  of anybody
    """Return the arrays of an answer to this round.

    Raises:
        RefusedReplyError: it has other records, or is not of this round, plan or model; or what
            stands in the place of an answer.
    """
    if isinstance(content, Exception):
        raise content
    if set(content) - {"statement"} != {"updates", "task"}:
        why = f"sent the records {names_text(content)}; must be task and updates"
        raise RefusedReplyError("malformed", why)
    arrays, fields = content["updates"], content["task"]
    if type(arrays) is not flower().ArrayRecord or type(fields) is not flower().ConfigRecord:
        raise RefusedReplyError("malformed", "sent records of other types")
    if (other := difference(fields, this.agreed)) is not None:
        raise RefusedReplyError("another plan", other)
    if type(fields.get("round")) is not int or fields["round"] != this.task.round:
        why = f"answered round {plain_text(fields.get('round'))}"
        raise RefusedReplyError("another round", why)
    if set(fields) != {*this.agreed, "round"}:
        raise RefusedReplyError("malformed", f"sent the fields {names_text(fields)}")
    return cast("Mapping[str, Any]", arrays)


def _statement(
    said: Any,  # noqa: ANN401  of anybody
    to: Asked,
    this: _Round,
    key: str,
    most: int,
) -> tuple[dict[str, str], dict[ClientId, str]]:
    """Return what a node signed of its answer, and why each client that declines does.

    Raises what reading it does: the node has not signed that the others answered.
    """
    names = {id_text(client): client for client in to.clients}
    longest = _STATEMENT + sum(2 * len(name) + _REASON + most * _NUMBER for name in names)
    texts = {name: said[name] for name in ("text", "signature", "declined")}
    if any(len(text) > longest for text in texts.values()):
        raise ValueError(f"it is longer than {longest} characters")
    reasons = parsed_json(texts.pop("declined"))
    if type(reasons) is not dict or not reasons.keys() <= names.keys():
        raise ValueError("it names others as those that decline")
    declined = {names[name]: plain_text(why) for name, why in sorted(reasons.items())}
    values = unsealed(texts, key, STATEMENT)
    counted = histories(values, plan=this.task.plan, run=this.run)
    if values["round"] != this.task.round or set(counted) != set(to.clients) - declined.keys():
        raise ValueError("it is of another round, or of other clients")
    if any(this.task.round not in rounds for rounds in counted.values()):
        raise ValueError("it does not count this round")
    if max(map(len, counted.values()), default=0) > most:
        raise ValueError(f"it counts more rounds than the {most} of the plan")
    return texts, declined
