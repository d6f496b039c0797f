"""What nodes send: every answer is used or refused, with a sentence, and delays no round."""

import threading
import time

import pytest
import torch
from plans import small_plan

pytest.importorskip("flwr", reason="Flower has an environment of its own: make messages")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from in_process import NODES, InProcessGrid
from torch import nn

from accounting import ConfigError
from privpart import PartialModel, SeededSource, Server, fit
from privpart.flower.agreement import SCHEMA, agreement, names_text, plain_text
from privpart.flower.engine import FlowerEngine, _Round
from privpart.flower.mail import SILENCE, Asked, hosted
from privpart.loop import CohortRefusedError, CohortTooSmallError
from privpart.run.members import STATEMENT, signed
from privpart.run.store import StorageError

FIRST, SECOND = NODES
MODEL = PartialModel(lambda: nn.Linear(3, 1), seed=7)
OWNERS = {0: FIRST, 1: FIRST, "1": SECOND, 3: SECOND}
COHORTS = [list(OWNERS)] * 2


def server(minimum=2):
    plan = small_plan(2, (2, 1), clip_norm=1.0, noise_multiplier=1.0, minimum_cohort=minimum)
    return Server(plan, MODEL.flat, source=SeededSource(1))


def honest(message):
    """Return the records of an answer; each update is a function of the client alone."""
    fields = message.content["task"]
    arrays = {n: Array(torch.full((4,), len(n) / 10.0).numpy()) for n in fields["clients"]}
    agreed = {n: fields[n] for n in ("schema", "plan", "layout", "fingerprint", "seed", "round")}
    return RecordDict({"updates": ArrayRecord(arrays), "task": ConfigRecord(agreed)})


def node(change=lambda content: content):
    return lambda message, _: Message(change(honest(message)), reply_to=message)


def engine(grid, said, minimum=2, owners=OWNERS, **changes):
    given = {"authenticated": True, "timeout": 0.05, "attempts": 1, "poll": 0.01}
    given |= {"minimum": minimum, "report": said.append}
    return FlowerEngine(grid, MODEL, owners, **given | changes)


def changed(change):
    """Return a change of an answer's content, which is made in place."""

    def apply(content):
        change(content)
        return content

    return apply


def one(array):
    return changed(lambda content: content["updates"].update({"3": array}))


def field(**values):
    return changed(lambda content: content["task"].update(values))


def record(name, value):
    return changed(lambda content: content.update({name: value}))


def other_name(name):
    return changed(lambda c: c["updates"].update({name: c["updates"].pop("3")}))


def odd_header():
    """Return an array whose header makes NumPy's parser raise an error of the tokenizer."""
    text = b"{'descr':("
    return Array("float32", (4,), "numpy.ndarray", b"\x93NUMPY\x01\x00\x0a\x00" + text + bytes(16))


HEADER = Array(torch.zeros(4).numpy()).data[:128]
HOSTILE = {
    "metrics beside the update": (record("metrics", MetricRecord({"loss": 0.5})), "malformed"),
    "no update": (record("updates", ConfigRecord()), "malformed"),
    "left out": (changed(lambda content: content["updates"].pop("3")), "malformed"),
    "for a client of another node": (other_name("0"), "not asked"),
    "for nobody": (other_name("[" * 3000), "not asked"),
    "for the same client by another name": (other_name(" 3"), "not asked"),
    "another length": (one(Array(torch.zeros(5).numpy())), "wrong shape or type"),
    "another type": (one(Array(torch.zeros(4, dtype=torch.float64).numpy())), "wrong shape"),
    "a long one": (one(Array(torch.zeros(10**5).numpy())), "wrong shape or type"),
    "a pickle": (one(Array("object", (4,), "numpy.ndarray", b"\x80\x04N.")), "wrong shape or type"),
    "a header that lies": (one(Array("float32", (4,), "numpy.ndarray", HEADER)), "wrong shape"),
    "a header that is no literal": (one(odd_header()), "wrong shape or type"),
    "another round": (field(round=1), "another round"),
    "a round as text": (field(round="0"), "another round"),
    "another plan": (field(plan="0" * 64), "another plan"),
    "another version": (field(schema="privpart/flower/0"), "another plan"),
    "a field of its own": (field(loss=0.5), "malformed"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_answer_is_refused_with_a_sentence_and_the_others_count(kind):
    change, why = HOSTILE[kind]
    said, one_server = [], server()
    grid = InProcessGrid({FIRST: node(), SECOND: node(change)})
    (found,) = fit(one_server, engine(grid, said), COHORTS[:1])
    assert {0, 1} <= set(one_server.cohort) <= {0, 1, "1"}
    assert any(reason.startswith(why) for reason in found.counts.refusals), found.counts.refusals
    assert any(f"node {SECOND}, round 0: " in line and why in line for line in said), said


def test_names_that_a_node_makes_up_take_one_line_of_the_log():
    many = {str(n): Array(torch.zeros(1).numpy()) for n in range(100, 400)}
    said, one_server = [], server()
    grid = InProcessGrid(
        {FIRST: node(), SECOND: node(changed(lambda c: c["updates"].update(many)))}
    )
    (found,) = fit(one_server, engine(grid, said), COHORTS[:1])
    assert one_server.cohort == (0, 1, 3, "1")
    assert found.counts.refusals == {"not asked": 1}
    (line,) = said
    assert "answered for 300 clients whom it was not asked for, such as 100;" in line


class Unreadable(InProcessGrid):
    """A grid with a node whose answers Flower itself cannot read."""

    def _answer(self, message):
        reply = super()._answer(message)
        if message.metadata.dst_node_id != SECOND:
            return reply
        found = {name: thing.deflate() for name, thing in get_all_nested_objects(reply).items()}
        found[reply.content.object_id] = found[reply.content.object_id][:-1]  # half a JSON
        return inflate_object_from_contents(reply.object_id, found)


def test_an_answer_that_flower_cannot_read_loses_no_other_one():
    said, one_server = [], server()
    fit(one_server, engine(Unreadable({FIRST: node(), SECOND: node()}), said), COHORTS[:1])
    assert one_server.cohort == (0, 1)
    assert any(f"node {SECOND}" in line and "cannot read" in line for line in said), said


def test_an_answer_that_is_announced_and_never_uploaded_delays_a_round_no_longer(monkeypatch):
    monkeypatch.setattr("privpart.flower.mail._LONGEST_LOOK", 0.2)
    never, waited = threading.Event(), []

    def stuck(message, _):
        waited.append(never.wait(60))

    said, one_server = [], server()
    fit(one_server, engine(InProcessGrid({FIRST: stuck, SECOND: node()}), said), COHORTS[:1])
    assert not waited  # the round ended first
    never.set()
    assert one_server.cohort == (3, "1")


def test_a_node_cannot_answer_for_another_one():
    """What names its sender is a node's own words; and no node knows of messages to others."""
    sent, one_server, said = [], server(), []
    grid = InProcessGrid({FIRST: node(), SECOND: node()})

    def forged(message, _):
        victim = next(m for m in grid.sent if m.metadata.dst_node_id == FIRST)
        sent.extend([victim, message])
        zeros = {name: Array(torch.zeros(4).numpy()) for name in ("0", "1")}
        content = honest(victim)
        content["updates"] = ArrayRecord(zeros)
        reply = Message(content, reply_to=message)
        changed = {"_reply_to_message_id": victim.metadata.message_id, "_src_node_id": FIRST}
        reply.metadata.__dict__.update(changed)
        return reply

    grid.apps[SECOND] = forged
    alone = server()
    fit(alone, engine(InProcessGrid({FIRST: node()}), []), COHORTS[:1])
    fit(one_server, engine(grid, said), COHORTS[:1])
    assert torch.equal(one_server.parameters, alone.parameters)
    assert any("never sent" in line for line in said), said
    first, second = (message.metadata.group_id for message in sent)
    assert len(first) == len(second) == 32
    assert first != second
    name = sent[0].object_id
    sent[0].metadata.__dict__["_group_id"] = second
    assert sent[0].object_id != name  # the hash of what is secret


def test_a_node_that_fails_declines_or_says_nothing_is_named_and_the_round_ends_without_it():
    declined = ConfigRecord({"schema": SCHEMA, "why": "another plan\x1b[31m"})
    ways = {
        "declined: another plan\\x1b": lambda message, _: Message(
            RecordDict({"declined": declined}), reply_to=message
        ),
        "error 9": lambda message, _: Message(Error(9, "mine"), reply_to=message),
        "is connected": lambda message, _: None,
    }
    for words, act in ways.items():
        said, one_server = [], server()
        fit(one_server, engine(InProcessGrid({FIRST: node(), SECOND: act}), said), COHORTS[:1])
        assert one_server.cohort == (0, 1)
        assert any(words in line and str(SECOND) in line for line in said), said


ERRORS = {name: code for name, code in vars(ErrorCode).items() if type(code) is int}
LOST = {
    "MESSAGE_UNAVAILABLE",
    "REPLY_MESSAGE_UNAVAILABLE",
    "NODE_UNAVAILABLE",
    "CLIENT_APP_CRASHED",
}


def fails_with(code):
    return lambda message, _: Message(Error(code, "why"), reply_to=message)


def lists(*names):
    ids = ConfigRecord({"schema": SCHEMA, "ids": list(names)})
    return lambda message, _: Message(RecordDict({"clients": ids}), reply_to=message)


def at_first(first, later, tries):
    def act(message, context):
        tries.append(message)
        return (first if len(tries) == 1 else later)(message, context)

    return act


def test_every_error_of_flower_is_known():
    assert sorted(ERRORS.values()) == list(range(9))
    assert {ERRORS[name] for name in LOST} == set(SILENCE)


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_a_lost_or_slow_node_is_silent_and_one_that_fails_is_refused(name):
    """Three of four clients have no answer, and the two that are needed are there."""
    said, one_server = [], server(minimum=1)
    owners = {0: FIRST, 1: SECOND, "1": SECOND, 3: SECOND}
    grid = InProcessGrid({FIRST: node(), SECOND: fails_with(ERRORS[name])})
    nodes = engine(grid, said, minimum=1, owners=owners, timeout=20.0)
    if name in LOST:
        (found,) = fit(one_server, nodes, COHORTS[:1])
        assert (one_server.cohort, found.counts.refusals) == ((0,), {})
        assert (found.counts.received, found.counts.asked) == (1, 4)
    else:
        with pytest.raises(CohortRefusedError, match="Correct what they send"):
            fit(one_server, nodes, COHORTS[:1])
    assert any(f"node {SECOND}, round 0: gave no answer" in line for line in said), said
    assert len([m for m in grid.sent if m.metadata.dst_node_id == SECOND]) == 1


def test_a_node_that_was_lost_is_asked_again_and_an_old_message_that_expires_ends_no_wait():
    said, tries = [], []

    recovers = at_first(fails_with(5), node(), tries)
    grid, one_server = InProcessGrid({FIRST: node(), SECOND: recovers}), server(minimum=4)
    fit(one_server, engine(grid, said, minimum=4, attempts=2, timeout=20.0), COHORTS[:1])
    assert one_server.cohort == (0, 1, 3, "1")
    this = _Round(one_server.task(COHORTS[0]), {}, None, enough=4)
    this.ask_the_missing()
    this.unasked.discard(3)
    this.asked["new"] = Asked(SECOND, ("1",))
    this.lose(Asked(SECOND, ("1", 3)))
    assert this.waiting == {0, 1, "1"}  # 3 has no other message, and "1" has


def test_a_node_that_is_lost_before_it_says_which_clients_it_has_is_asked_again():
    tries = []

    recovers = at_first(fails_with(5), lists("1"), tries)
    said, grid = [], InProcessGrid({FIRST: recovers})
    waits = {"timeout": 20.0, "poll": 0.01, "report": said.append}
    assert hosted(grid, agreement(MODEL, "0" * 64), nodes=1, **waits) == {1: FIRST}
    assert "asked again" in said[0]


def test_a_round_of_a_node_that_is_lost_is_tried_again_with_the_same_task_and_one_noise():
    said, tries = [], []
    grid = InProcessGrid({FIRST: node(), SECOND: node()})
    whole, one_server = server(minimum=4), server(minimum=4)
    fit(whole, engine(InProcessGrid(dict(grid.apps)), [], minimum=4), COHORTS)

    grid.apps[SECOND] = at_first(lambda message, _: None, node(), tries)
    fit(one_server, engine(grid, said, minimum=4, attempts=3), COHORTS)
    assert torch.equal(one_server.parameters, whole.parameters)
    first, second = (message.content for message in tries[:2])
    assert first["task"] == second["task"]
    assert first["model"]["trainable"].data == second["model"]["trainable"].data
    assert any("2 of 4 clients answered, the plan needs 4" in line for line in said)


def test_a_node_that_joins_later_is_asked_when_it_is_there():
    grid, said = InProcessGrid({FIRST: node(), SECOND: node()}), []
    grid.offline.add(SECOND)
    one_server = server()
    patient = engine(grid, said, timeout=5.0)
    answers = patient.run(one_server.task(COHORTS[0]), MODEL.flat)
    assert {next(answers).client, next(answers).client} == {0, 1}
    grid.offline.clear()
    assert {update.client for update in answers} == {"1", 3}


def test_too_few_or_mostly_refused_clients_end_the_run_and_nothing_is_released():
    def fails(message, _):
        raise ValueError

    ends = {CohortRefusedError: fails, CohortTooSmallError: lambda message, _: None}
    for error, act in ends.items():
        one_server = server(minimum=3)
        grid = InProcessGrid({FIRST: act, SECOND: act})
        with pytest.raises(error, match="Nothing was released"):
            fit(one_server, engine(grid, [], minimum=3), COHORTS)
        assert one_server.round == 0
        # The same server, noise and task, once the nodes are back:
        grid = InProcessGrid({FIRST: node(), SECOND: node()})
        fit(one_server, engine(grid, [], minimum=3), COHORTS)
        whole = server(minimum=3)
        fit(whole, engine(grid, [], minimum=3), COHORTS)
        assert torch.equal(one_server.parameters, whole.parameters)


def test_hosted_refuses_one_client_on_two_nodes_and_too_few_nodes():
    agreed = agreement(MODEL, "0" * 64)
    waits = {"timeout": 0.05, "poll": 0.01, "report": lambda _: None}
    two = InProcessGrid({FIRST: lists("1", '"1"'), SECOND: lists("2")})
    assert hosted(two, agreed, nodes=2, **waits) == {1: FIRST, "1": FIRST, 2: SECOND}
    with pytest.raises(ConfigError, match=r"client 2: nodes 3 and \d+ both say"):
        hosted(InProcessGrid({FIRST: lists("2"), SECOND: lists("2")}), agreed, nodes=2, **waits)
    for odd in (lists("2", "2"), lists("0x"), lambda message, _: 1 / 0):
        with pytest.raises(ConfigError, match=r"nodes=2: 1 said .* others: 1 refused, as said"):
            hosted(InProcessGrid({FIRST: lists("1"), SECOND: odd}), agreed, nodes=2, **waits)
    silent = InProcessGrid({FIRST: lists("1"), SECOND: lambda message, _: None})
    with pytest.raises(
        ConfigError, match=r"others: 1 not .* them, 1 silent; raise start_timeout\."
    ):
        hosted(silent, agreed, nodes=3, **waits)
    with pytest.raises(ConfigError, match="none of them has a client"):
        hosted(InProcessGrid({FIRST: lists()}), agreed, nodes=1, **waits)


KEYS = {node: Ed25519PrivateKey.from_private_bytes(bytes([node % 251]) * 32) for node in NODES}


def counting(change=lambda said: None, **claims):
    """Return a node that keeps a ledger and signs what it counts; ``change`` is made in place."""

    def act(message, _):
        content, fields = honest(message), message.content["task"]
        about = {"schema": STATEMENT, "plan": fields["plan"], "run": "run", "round": 0}
        rounds = {"rounds": {name: [0] for name in fields["clients"]}}
        entry = signed(KEYS[message.metadata.dst_node_id], {**about, **rounds, **claims})
        said = ConfigRecord({**entry, "declined": "{}"})
        change(said)
        content["statement"] = said
        return Message(content, reply_to=message)

    return act


UNSIGNED = {
    "a text of another type": {"text": 1},
    "bytes": {"text": b"{}"},
    "another signature": {"signature": "0" * 128},
    "a text too long": {"text": "[" * 10**6},
    "reasons too long": {"declined": "[" + "[]," * 10**5 + "[]]"},
    "reasons that are a list": {"declined": '["3"]'},
    "reasons that are a text": {"declined": '"3"'},
    "reasons of others": {"declined": '{"0": "why"}'},
    "reasons nested": {"declined": "[" * 5000},
}
CLAIMS = {
    "another run": {"run": "another"},
    "another round": {"round": 1},
    "nobody": {"rounds": {}},
    "no round": {"rounds": {"3": [], '"1"': []}},
    "more than the plan": {"rounds": {"3": [0, 1, 2], '"1"': [0]}},
    "before the first": {"rounds": {"3": [-1, 0], '"1"': [0]}},
    "no plan's": {"rounds": {"3": [0, 2**64], '"1"': [0]}},
    "a number as text": {"rounds": {"3": ["0"], '"1"': [0]}},
}


def counted(app, **options):
    said, one_server, kept = [], server(), []
    keys = {node: key.public_key().public_bytes_raw().hex() for node, key in KEYS.items()}
    grid = InProcessGrid({FIRST: counting(), SECOND: app})
    nodes = engine(grid, said, keys=keys, most_answers=2, **options)
    nodes.run_id, nodes.sign = "run", lambda node, entry: kept.append((node, entry))
    return said, one_server, kept, nodes


@pytest.mark.parametrize("kind", [*UNSIGNED, *CLAIMS])
def test_an_answer_whose_count_is_not_the_nodes_own_is_refused_and_not_kept(kind):
    changes = UNSIGNED.get(kind, {})
    app = counting(lambda said: said.update(changes), **CLAIMS.get(kind, {}))
    said, one_server, kept, nodes = counted(app)
    (found,) = fit(one_server, nodes, COHORTS[:1])
    assert one_server.cohort == (0, 1)
    assert found.counts.refusals == {"malformed": 1}
    assert [node for node, _ in kept] == [FIRST]
    assert all(entry.keys() == {"text", "signature"} for _, entry in kept)
    assert any("what it signed cannot be used" in line for line in said), said


def test_clients_that_decline_are_no_refusal_and_a_disk_that_refuses_is_no_fault_of_a_node():
    app = counting(lambda said: said.update({"declined": '{"3": "often"}'}), rounds={'"1"': [0]})

    def without(message, context):
        reply = app(message, context)
        del reply.content["updates"]["3"]
        return reply

    said, one_server, _, nodes = counted(without)
    (found,) = fit(one_server, nodes, COHORTS[:1])
    assert (one_server.cohort, found.counts.refusals) == ((0, 1, "1"), {})
    assert any("client 3 declines: often." in line for line in said), said

    def full(node, entry):
        raise StorageError("no space")

    said, one_server, _, nodes = counted(counting())
    nodes.sign = full
    with pytest.raises(StorageError, match="no space"):
        fit(one_server, nodes, COHORTS[:1])
    assert one_server.round == 0


def test_answers_that_came_too_late_are_taken_and_dropped():
    """Otherwise each lies in the SuperLink until the run ends."""
    grid, held = InProcessGrid({FIRST: node(), SECOND: node()}), {SECOND}
    pull = grid.pull_messages

    def late(names):
        to = {name: grid._waiting[name].metadata.dst_node_id for name in names}
        return pull([name for name, asked in to.items() if asked not in held])

    grid.pull_messages = late
    nodes, task = engine(grid, []), server().task(COHORTS[0])
    assert {update.client for update in nodes.run(task, MODEL.flat)} == {0, 1}
    assert len(grid._waiting) == 1
    held.clear()
    assert {update.client for update in nodes.run(task, MODEL.flat)} == {*OWNERS}
    assert not grid._waiting
    assert not nodes.late.asked


def test_a_message_that_expires_on_its_way_ends_no_run():
    grid, said, slow = InProcessGrid({FIRST: node(), SECOND: node()}), [], [True]
    push = grid.push_messages

    def refuses(messages):
        (message,) = messages
        if slow and message.metadata.dst_node_id == SECOND:
            slow.clear()
            time.sleep(message.metadata.ttl)
            raise OSError("500 Internal Server Error")
        return push([message])

    grid.push_messages = refuses
    one_server = server(minimum=4)
    fit(one_server, engine(grid, said, minimum=4, attempts=2), COHORTS[:1])
    assert one_server.cohort == (0, 1, 3, "1")
    assert any("took no message" in line for line in said), said
    grid.push_messages = lambda messages: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(server(), engine(grid, said, timeout=60.0), COHORTS[:1])


def test_what_a_stranger_sent_is_shown_without_copies_of_it():
    class Long:
        def __str__(self):
            raise AssertionError("the whole of it was turned into text")

    assert plain_text(Long()) == "Long"
    assert plain_text([1] * 5) == "list"
    assert plain_text("a\x1b" + "b" * 10**6) == "a\\x1b" + "b" * 298
    assert [plain_text(v) for v in (None, 3, 0.5, ValueError("why"))] == ["None", "3", "0.5", "why"]
    assert len(names_text("n" * 10**4 for _ in range(10**4))) == 300
