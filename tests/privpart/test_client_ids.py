"""Ids of any kind: every client counts, is written down as itself, and is read back as itself."""

import json
import secrets
import sqlite3
import tracemalloc
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import BinaryTree, ConfigError, Participation
from privpart import PrivacyPlan, RunFolder, Server, fit
from privpart.cli.budget.epsilon import histories_of
from privpart.engines.methods import client_generator
from privpart.messages import id_order
from privpart.run import folder as run_folder
from privpart.run.fork import fork
from privpart.run.ledger import Ledger, genesis, next_row
from privpart.run.report import run_report

ROUNDS, DIM = 6, 4
FACTS = {"schema": "privpart/ledger/3", "run_id": "0" * 32, "seed": 1, "plan": {}}
IDS = st.one_of(
    st.integers(1 - 2**256, 2**256 - 1),
    st.integers(-(2**64), 2**64),
    st.integers(-3, 3),
    st.text(min_size=1, max_size=256),
    st.text('0123456789-"\\[]', min_size=1, max_size=5),
)


def plan(k=2, b=3) -> PrivacyPlan:
    return PrivacyPlan(
        mechanism=BinaryTree(ROUNDS),
        participation=Participation(ROUNDS, k, b),
        clip_norm=0.5,
        noise_multiplier=4.0,
        report_goal=2,
    )


class Clients:
    def run(self, task, start):
        for client in task.clients:
            generator = client_generator(3, task.round, client)
            yield task.update(client, torch.randn(start.shape, generator=generator))


def train(run: RunFolder, cohorts) -> list:
    server = Server(run.plan, torch.zeros(DIM), source=run.source())
    run.restore(server)
    return fit(server, Clients(), cohorts, commit=run.commit)


def unsigned(n):
    return [secrets.randbits(64) for _ in range(n)]


def strings(n):
    return [secrets.token_urlsafe(16) for _ in range(n)]


def mixed(n):
    return [*unsigned(n - 4), 1, "1", -1, "-1"]


@pytest.mark.parametrize("kind", [unsigned, strings, mixed])
def test_a_population_trains_and_every_client_counts(tmp_path, kind):
    ids = kind(60)
    third = [ids[i::3] for i in range(3)]
    cohorts = [*third, *third]  # each client twice, 3 rounds apart
    with RunFolder.create(tmp_path / "run", plan(), facts={"delta": 1e-6}) as run:
        records = train(run, cohorts[:2])
    with RunFolder.open(tmp_path / "run") as run:
        records += train(run, cohorts)
    assert [r.counts.counted for r in records] == [20] * 6
    assert [r.counts.refusals for r in records] == [{}] * 6
    found = run_report(tmp_path / "run")
    assert found.complete
    assert found.deviations == ()
    assert found.realised == Participation(ROUNDS, 2, 3)
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite", read_only=True)
    ledger.rows()
    assert ledger.rounds_by_client() == {
        client: [i, i + 3] for i, clients in enumerate(third) for client in clients
    }
    ledger.close()


@pytest.mark.parametrize("ids", [[1, "1"], ["-5", -5], [2**64, str(2**64)]])
def test_limits_survive_a_resumption_for_each_of_two_alike(tmp_path, ids):
    with RunFolder.create(tmp_path / "run", plan(k=1, b=1)) as run:
        train(run, [ids[:1]])
    with RunFolder.open(tmp_path / "run") as run:
        server = Server(run.plan, torch.zeros(DIM), source=run.source())
        run.restore(server)
        assert server.eligible(ids) == ids[1:]
        fit(server, Clients(), [ids[:1], ids], commit=run.commit)
        assert server.eligible(ids) == []
    assert histories_of(tmp_path / "run") == {json.dumps(ids[0]): [0], json.dumps(ids[1]): [1]}
    assert run_report(tmp_path / "run", delta=1e-6).realised == Participation(ROUNDS, 1, 1)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sets(IDS, max_size=6), max_size=4))
def test_the_ledger_gives_back_the_ids_that_it_was_given(tmp_path_factory, cohorts):
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    ledger = Ledger.create(path, FACTS)
    head, expected = genesis(FACTS), {}
    for round_, clients in enumerate(cohorts):
        ordered = sorted(clients, key=id_order)
        row = next_row(head, round_=round_, state="", clip_norm=1.0, received=9, clients=ordered)
        ledger.append(row, ordered)
        head = row.chain
        for client in clients:
            expected.setdefault(client, []).append(round_)
    ledger.close()
    again = Ledger(path, read_only=True)
    assert [row.chain for row in again.rows()][-1:] == ([head] if cohorts else [])
    found = again.rounds_by_client()
    assert found == expected
    assert {(type(client), client) for client in found} == {(type(c), c) for c in expected}
    with closing(sqlite3.connect(path)) as db:
        kept = db.execute("SELECT typeof(client), client FROM participations").fetchall()
    for kind, text in kept:
        assert kind in ("integer", "text")
        assert json.loads(str(text)) in expected


def a_ledger(path, clients=(7, "ada")):
    ledger = Ledger.create(path, FACTS)
    ledger.append(
        next_row(genesis(FACTS), round_=0, state="", clip_norm=1.0, received=2, clients=clients),
        clients,
    )
    ledger.close()
    return path


def read_error(path) -> str:
    with pytest.raises(ConfigError) as error:
        Ledger(path, read_only=True).rows()
    assert len(str(error.value)) < 400
    return str(error.value)


HOSTILE = [
    "7",  # each id has one form only: this would be a second history of client 7
    "-0",
    "007",
    str(2**63 - 1),
    "9" * 5000,
    "9" * 79,
    str(2**256),
    "1e400",
    "1.5",
    "NaN",
    "true",
    "null",
    "[7]",
    "[" * 60_000,
    '{"a": 1}',
    "ada",
    '"ada',
    '"ada" ',
    '"\\u0061da"',
    '"\u00e9"',
    '"\\ud800"',
    '""',
    json.dumps("x" * 257),
    "",
    7.5,
    float("inf"),
    b"7",
    b'"ada"',
]


@pytest.mark.parametrize("column", HOSTILE, ids=lambda c: repr(c)[:20])
@pytest.mark.parametrize("change", ["UPDATE participations SET client = ?", "INSERT"])
def test_an_id_that_the_ledger_never_writes_is_damage(tmp_path, column, change):
    path = a_ledger(tmp_path / "ledger.sqlite", (7,))
    if change == "INSERT":
        change = "INSERT INTO participations VALUES (?, 0)"
    with sqlite3.connect(path) as db:
        db.execute(change, (column,))
    db.close()
    assert "is damaged, or not from privpart" in read_error(path)


def test_text_that_is_not_utf8_is_damage(tmp_path):
    path = a_ledger(tmp_path / "ledger.sqlite", ("ada",))
    with sqlite3.connect(path) as db:
        db.execute("""UPDATE participations SET client = CAST(X'22FF22' AS TEXT)""")
    db.close()
    assert "is damaged, or not from privpart" in read_error(path)


def test_a_huge_id_is_refused_without_being_read(tmp_path):
    path = a_ledger(tmp_path / "ledger.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO participations VALUES (?, 0)", ('"' + "x" * 2**26 + '"',))
    db.close()
    tracemalloc.start()
    assert "too big" in read_error(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(IDS.map(json.dumps), IDS.map(str), st.text(max_size=9), st.binary(max_size=9),
              st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
)  # fmt: skip
def test_another_id_in_a_row_is_noticed(tmp_path_factory, column):
    path = a_ledger(tmp_path_factory.mktemp("ledger") / "ledger.sqlite")
    with sqlite3.connect(path) as db:
        query = "SELECT :id = client AND typeof(:id) = typeof(client) FROM participations"
        same = db.execute(f"{query} WHERE typeof(client) = 'text'", {"id": column}).fetchone()[0]
        db.execute("UPDATE participations SET client = ? WHERE typeof(client) = 'text'", (column,))
    db.close()
    if same:
        Ledger(path).rows()
    else:
        assert "is damaged" in (said := read_error(path)) or "does not follow" in said


def test_the_chain_of_whole_numbers_is_that_of_the_version_before():
    first = genesis({"schema": "privpart/ledger/2", "run_id": "0" * 32, "seed": 1, "plan": {}})
    a = next_row(first, round_=0, state="ab", clip_norm=0.5, received=3, clients=[0, 7, 2**62])
    b = next_row(a.chain, round_=1, state="cd", clip_norm=0.25, received=1, clients=[7], summed=1)
    assert (first[:16], a.chain[:16], b.chain[:16]) == (
        "7d9dea07f2cf0521",
        "73b082b854c57830",
        "2ec30414a7beaa21",
    )


def test_the_chain_tells_a_number_from_a_string():
    def chain(*clients):
        return next_row("", round_=0, state="", clip_norm=1.0, received=1, clients=clients).chain

    assert len({chain(1), chain("1"), chain('"1"'), chain(1, 2), chain("1, 2"), chain()}) == 6


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    """A run of two rounds whose ledger is as the version before wrote it."""
    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "SCHEMA", "privpart/ledger/2")
        with RunFolder.create(tmp_path / "old", plan(), facts={"delta": 1e-6}) as run:
            train(run, [[0, 9], [1, 8]])
    return tmp_path / "old"


def test_a_run_of_the_version_before_is_read_resumed_and_forked(old_run, tmp_path):
    cohorts = [[0, 9], [1, 8], [2, 7], [0, 9]]
    with RunFolder.open(old_run) as run:
        assert [r.counts.counted for r in train(run, cohorts)] == [2, 2]
    found = run_report(old_run)
    assert (found.rounds, found.deviations, found.realised.max_participations) == (4, (), 2)
    with fork(old_run, tmp_path / "new", plan(), facts={"delta": 1e-6}) as run:
        assert run.facts["schema"] == "privpart/ledger/5"
        assert train(run, [["ada", 2**64]])[0].counts.counted == 2


@pytest.mark.parametrize("client", ["ada", 2**63, -(2**63) - 1])
def test_a_new_kind_of_id_is_not_written_into_a_run_of_the_version_before(old_run, client):
    cohorts = [[0, 9], [1, 8], [2, client]]
    with RunFolder.open(old_run) as run:
        with pytest.raises(ConfigError, match="begun by an earlier version") as error:
            train(run, cohorts)
        assert f"client {client!r}" in str(error.value)
        assert "begin a fork" in str(error.value)
    with RunFolder.open(old_run) as run:  # nothing of it was committed
        assert run.rounds == 2
        assert train(run, [*cohorts[:2], [2, -7]])[0].counts.counted == 2
    assert run_report(old_run).rounds == 3


def test_the_draws_of_whole_numbers_are_those_of_the_version_before():
    clients = [(0, 0, 0), (5, 3, 4), (2**40, 9, 2**62 + 3), (1, 2, 2**63 - 1)]
    seeds = [client_generator(*client).initial_seed() for client in clients]
    assert seeds == [2968811710, 2158061083, 2284698574, 1607805790]


def test_clients_of_any_id_have_draws_of_their_own():
    ids = [0, 1, -1, "1", "-1", "0", 2**64, -(2**64), "ada", "Ada", "\u00e9", "e\u0301"]
    seeds = {(r, c): client_generator(0, r, c).initial_seed() for r in range(3) for c in ids}
    assert len(set(seeds.values())) == len(seeds)
    assert seeds[0, "ada"] == 1576438391  # on every machine, in every process


def test_sorting_is_by_number_then_by_letter():
    ids = ["b", 2**70, "a", -(2**70), 10, "10", 9]
    assert sorted(ids, key=id_order) == [-(2**70), 9, 10, 2**70, "10", "a", "b"]
