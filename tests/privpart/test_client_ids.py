"""Ids of any kind: every client counts, is written down as itself, and is read back as itself."""

import json
import secrets

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import small_plan

from accounting import ConfigError, Participation
from privpart import PrivacyPlan, RunFolder, Server, fit
from privpart.cli.budget.epsilon import histories_of
from privpart.engines.methods import client_generator
from privpart.messages import id_order
from privpart.run.begin import create_run
from privpart.run.ledger import (
    LEDGER,
    SCHEMA,
    Ledger,
    Row,
    SigningKey,
    _committed,
    _line,
    genesis,
)
from privpart.run.report import run_report

ROUNDS, DIM = 6, 4
SIGNER = SigningKey(bytes(32))
FACTS = {"schema": SCHEMA, "run_id": "0" * 32, "seed": 1, "plan": {}, "key": "seeded:1"}
FACTS["public_key"] = SIGNER.public_key
IDS = st.one_of(
    st.integers(1 - 2**256, 2**256 - 1),
    st.integers(-(2**64), 2**64),
    st.integers(-3, 3),
    st.text(min_size=1, max_size=256),
    st.text('0123456789-"\\[]', min_size=1, max_size=5),
)


def plan(k=2, b=3) -> PrivacyPlan:
    return small_plan(ROUNDS, (k, b), noise_multiplier=4.0, report_goal=2)


class Clients:
    def run(self, task, start):
        for client in task.clients:
            generator = client_generator(3, task.round, client)
            yield task.update(client, torch.randn(start.shape, generator=generator))


def train(run: RunFolder, cohorts) -> list:
    server = Server(run.plan, torch.zeros(DIM), source=run.source())
    run.restore(server)
    return fit(server, Clients(), cohorts, commit=run.commit)


def test_a_population_trains_and_every_client_counts(tmp_path):
    ids = [*(secrets.randbits(64) for _ in range(28)), 1, "1", -1, "-1"]
    ids += [secrets.token_urlsafe(16) for _ in range(28)]
    third = [ids[i::3] for i in range(3)]
    cohorts = [*third, *third]  # each client twice, 3 rounds apart
    with create_run(tmp_path / "run", plan(), facts={"delta": 1e-6}) as run:
        records = train(run, cohorts[:2])
    with RunFolder.open(tmp_path / "run") as run:
        records += train(run, cohorts)
    assert [r.counts.counted for r in records] == [20] * 6
    assert [r.counts.refusals for r in records] == [{}] * 6
    found = run_report(tmp_path / "run")
    assert found.complete
    assert found.deviations == ()
    assert found.realised == Participation(ROUNDS, 2, 3)
    assert Ledger(tmp_path / "run").rounds_by_client() == {
        client: [i, i + 3] for i, clients in enumerate(third) for client in clients
    }


@pytest.mark.parametrize("ids", [["-5", -5], [2**64, str(2**64)]])
def test_limits_survive_a_resumption_for_each_of_two_alike(tmp_path, ids):
    with create_run(tmp_path / "run", plan(k=1, b=1)) as run:
        train(run, [ids[:1]])
    with RunFolder.open(tmp_path / "run") as run:
        server = Server(run.plan, torch.zeros(DIM), source=run.source())
        run.restore(server)
        assert server.ineligible(ids).keys() == {ids[0]}
        fit(server, Clients(), [ids[:1], ids], commit=run.commit)
        assert server.ineligible(ids).keys() == {*ids}
    assert histories_of(tmp_path / "run") == {json.dumps(ids[0]): [0], json.dumps(ids[1]): [1]}
    assert run_report(tmp_path / "run", delta=1e-6).realised == Participation(ROUNDS, 1, 1)


def row_of(clients, round_=0) -> Row:
    by = {"server": len(clients)} if clients else {}
    fields = {"state": "", "model": "", "clip_norm": 1.0, "received": 9, "clipped_by": by}
    return Row(round=round_, clients=tuple(clients), **fields)


@settings(max_examples=8)
@given(st.lists(st.sets(IDS, max_size=6), max_size=4))
def test_the_ledger_gives_back_the_ids_that_it_was_given(tmp_path_factory, cohorts):
    folder = tmp_path_factory.mktemp("ledger")
    ledger, expected = Ledger.create(folder, FACTS, SIGNER), {}
    for round_, clients in enumerate(cohorts):
        ledger.append(row_of(sorted(clients, key=id_order), round_))
        for client in clients:
            expected.setdefault(client, []).append(round_)
    again = Ledger(folder)
    assert again.rows() == ledger.rows()
    assert (again.chains, again.head) == (ledger.chains, ledger.head)
    histories = again.rounds_by_client()
    assert histories == expected
    assert {(type(client), client) for client in histories} == {(type(c), c) for c in expected}


def read_error(folder, clients: str) -> str:
    """Return what is said of a signed ledger whose only row names clients by this text."""
    Ledger.create(folder, FACTS, SIGNER)
    entry = _committed(row_of(())).replace(
        b'"clients": []', b'"clients": [' + clients.encode() + b"]"
    )
    with (folder / LEDGER).open("ab") as file:
        file.write(_line(genesis(FACTS), entry, SIGNER))
    with pytest.raises(ConfigError) as error:
        Ledger(folder).rows()
    assert len(str(error.value)) < 400
    return str(error.value)


HOSTILE = [
    "7, 7", "007", "9" * 5000, str(2**256), "1e400", "NaN", "true", "null", "[7]",
    "[" * 60_000, "ada", '"ada', '"\\ud800"', '""', json.dumps("x" * 257), "7,",
]  # fmt: skip


@pytest.mark.parametrize("clients", HOSTILE, ids=lambda c: repr(c)[:20])
def test_an_id_that_the_ledger_never_writes_is_damage(tmp_path, clients):
    assert "is damaged, or not from privpart" in read_error(tmp_path, clients)


def test_the_chain_tells_a_number_from_a_string(tmp_path):
    def chain(*clients):
        return Ledger.create(tmp_path, FACTS, SIGNER).following(row_of(clients))

    assert len({chain(1), chain("1"), chain('"1"'), chain(1, 2), chain("1, 2"), chain()}) == 6


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
