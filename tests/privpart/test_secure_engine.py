"""Secure sums under DP-FTRL: the same bits as in the clear, and no way around the promise."""

import base64

import numpy as np
import pytest
import torch
from plans import small_plan
from secure_parties import FIVE

from accounting import ConfigError, Independent, PoissonSampling, participation_of
from accounting.metrics import Metrics
from privpart import AdaptiveClipping, CohortTooSmallError, PrivacyPlan, SeededSource, Server, fit
from privpart.engines.secure import STAGES, SecureEngine
from privpart.run.begin import create_run
from privpart.run.report import run_report
from privpart.secure import party
from privpart.secure.sums import ModularSum, modulus_bits

DIM, ROUNDS, PARTIES = 7, 3, 5
CLIENTS = range(10)
HOMES = {number: [2 * number, 2 * number + 1] for number in range(PARTIES)}


def plan(**changes):
    given = {"mechanism": ROUNDS, "noise_multiplier": 1.0, "minimum_cohort": 2, "secure": FIVE}
    return small_plan(participation=(ROUNDS, 1), **given | changes)


class Plain:
    """Updates of all lengths, from far below the clip norm to far above."""

    def __init__(self, only=None):
        self.only = only

    def run(self, task, start):
        for client in task.clients:
            if self.only is None or client in self.only[task.round]:
                random = torch.Generator().manual_seed(100 * task.round + client)
                update = 10.0 ** (client % 5 - 2) * torch.randn(DIM, generator=random)
                yield task.update(client, update)


def server(promised):
    return Server(promised, torch.zeros(DIM), source=SeededSource(1))


def test_a_run_of_secure_sums_is_the_run_in_the_clear_bit_by_bit():
    """In every round the same party is lost: lists of two rounds may not differ by one."""
    for lost in ((), *((stage,) for stage in STAGES)):
        engine = SecureEngine(
            Plain(), plan(), parties=HOMES, lost=lambda r, a, stage, who, lost=lost: {3} & {*who}
            if stage in lost else (),
        )  # fmt: skip
        one = server(plan())
        fit(one, engine, [CLIENTS] * ROUNDS)
        came = [c for c in CLIENTS if c // 2 != 3 or not {*lost} & {"keys", "shares", "vector"}]
        assert list(one.cohort) == came
        assert not engine.refused
        clear = server(plan(secure=None))
        fit(clear, Plain([came] * ROUNDS), [CLIENTS] * ROUNDS)
        assert torch.equal(one.parameters, clear.parameters)


@pytest.mark.parametrize("stage", STAGES)
def test_below_the_threshold_nothing_is_released_and_the_round_can_be_tried_again(stage):
    said = []

    def lost(round_, attempt, now, parties):
        return list(parties)[:2] if attempt == 0 and now == stage else ()

    engine = SecureEngine(Plain(), plan(), parties=HOMES, lost=lost, report=said.append)
    one, clear = server(plan()), server(plan(secure=None))
    with pytest.raises(CohortTooSmallError):
        fit(one, engine, [CLIENTS])
    assert one.round == 0
    assert not one.parameters.any()
    assert len(said) == 1
    fit(one, engine, [CLIENTS])
    fit(clear, Plain(), [CLIENTS])
    assert torch.equal(one.parameters, clear.parameters)
    again = SecureEngine(Plain(), plan(), parties=HOMES, lost=lost, attempts=2)
    second = server(plan())
    fit(second, again, [CLIENTS])
    assert torch.equal(second.parameters, clear.parameters)


def test_a_plan_of_secure_sums_takes_nothing_in_the_clear():
    one = server(plan())
    asked = []

    class Asks(Plain):
        def run(self, task, start):
            asked.append(task)
            yield from super().run(task, start)

    with pytest.raises(ConfigError, match="takes no update in the clear"):
        fit(one, Asks(), [CLIENTS])
    for given in ({"updates": [object()]}, {"updates": (), "sums": [object()]}):
        with pytest.raises(ConfigError, match="takes no update in the clear"):
            one.run_round(**given)
    assert not asked  # refused before a client trains


def test_a_sum_of_fewer_parties_than_planned_is_refused():
    one = server(plan())
    task = one.task(CLIENTS)
    bits = modulus_bits(task.grid, len(task.clients))
    for parties, reason in ((3, "too few parties"), (True, "malformed"), (4, None)):
        total = torch.zeros(DIM, dtype=torch.int64)
        fixed = task.clients, total, bits, task.clip_norm, task.round, task.plan
        counts = one.run_round((), secure=[ModularSum(*fixed, parties=parties)], asked=task.clients)
        assert counts.released == (reason is None)
        assert set(counts.refusals) == ({reason} if reason else set())


def test_a_plan_keeps_its_rules_and_its_hash_depends_on_them():
    with_rules, without = plan(), plan(secure=None)
    assert PrivacyPlan.from_dict(with_rules.to_dict()) == with_rules
    assert with_rules.hash != without.hash
    assert "secure" not in without.to_dict()
    values = with_rules.to_dict()
    values["secure"] |= {"threshold": 1}
    with pytest.raises(ConfigError, match="threshold=1"):
        PrivacyPlan.from_dict(values)


def test_what_needs_each_clients_answer_is_refused_beside_secure_sums():
    sampling = PoissonSampling(0.1, 100)
    adaptive = AdaptiveClipping(bit_noise_multiplier=5.0)
    for changes in (
        {"noise_multiplier": 0.0},
        {"mechanism": Independent(ROUNDS), "adaptive_clipping": adaptive},
        {"metrics": Metrics(names=("a",), users=4, rounds=(0,), noise_multiplier=1.0)},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="secure: needs noise"):
            plan(**changes)
    with pytest.raises(ConfigError, match="secure: needs noise"):
        small_plan(
            Independent(ROUNDS),
            participation_of(sampling, ROUNDS),
            noise_multiplier=1.0,
            minimum_cohort=0,
            sampling=sampling,
            secure=FIVE,
        )


def test_an_engine_of_another_plan_or_without_its_parties_is_refused():
    with pytest.raises(ConfigError, match="has no secure"):
        SecureEngine(Plain(), plan(secure=None), parties=HOMES)
    with pytest.raises(ConfigError, match="with two of them"):
        SecureEngine(Plain(), plan(), parties={0: [1], 1: [1]})
    engine = SecureEngine(Plain(), plan(), parties=HOMES)
    with pytest.raises(ConfigError, match="client 99 is with none"):
        fit(server(plan()), engine, [[*CLIENTS, 99]])
    with pytest.raises(ConfigError, match="another plan"):
        fit(server(plan(context="other")), engine, [CLIENTS])
    with pytest.raises(ConfigError, match="hands over secure sums only"):
        engine.run(None, None)


def test_no_secret_is_in_a_file_and_the_report_says_what_the_server_saw(tmp_path, monkeypatch):
    secrets = []
    plain = party.advertise

    def watched(*arguments):
        state, message = plain(*arguments)
        keys = state.mask_private, state.box_private, arguments[2]
        secrets.extend([state.seed, *(key.private_bytes_raw() for key in keys)])
        return state, message

    monkeypatch.setattr(party, "advertise", watched)
    with create_run(tmp_path / "run", plan(), facts={"delta": 1e-5}) as run:
        one = Server(plan(), torch.zeros(DIM), source=run.source())
        engine = SecureEngine(Plain(), plan(), parties=HOMES)
        fit(one, engine, [CLIENTS] * ROUNDS, commit=run.commit)
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(secrets) == 4 * PARTIES * ROUNDS
    assert files
    for secret in secrets:
        shapes = secret, secret.hex().encode(), base64.b64encode(secret)[:-2]
        assert not any(shape in content for shape in shapes for content in files)
    report = run_report(run.path)
    found = {a.code: a for a in report.guarantee.assumptions}
    assert found["clipping"].status == "asserted"
    saw = "sums of at least 4 parties, asserted by the parties"
    assert report.server_saw.startswith(saw)
    assert f"server saw {saw}" in report.statement()
    assert report.to_dict()["server_saw"] == report.server_saw
    assert ("server saw", report.server_saw) in report.summary()
    assert not report.deviations


def test_a_ledger_that_shows_updates_under_secure_sums_left_its_plan(tmp_path, monkeypatch):
    """As one that another server wrote."""
    with create_run(tmp_path / "run", plan(), facts={"delta": 1e-5}) as run:
        one = Server(plan(), torch.zeros(DIM), source=run.source())
        monkeypatch.setattr(one, "_refuse_round", lambda *_: None)
        task = one.task(CLIENTS)
        run.commit(one, one.run_round(Plain().run(task, None), asked=task.clients))
    report = run_report(run.path)
    assert report.deviations == ("round 0 shows updates to the server, the plan has secure sums",)


def test_a_party_adds_its_clients_modulo_the_plans_grid():
    """The sum of a party's clients is the sum of their integers, each clipped by itself."""
    engine = SecureEngine(Plain(), plan(), parties=HOMES)
    one = server(plan())
    task = one.task(CLIENTS)
    (total,) = engine.secure_sums(task, one.parameters)
    clear = server(plan(secure=None))
    clear.run_round(Plain().run(clear.task(CLIENTS), None), asked=task.clients)
    assert np.array_equal(total.around_zero(), clear.recorded()[0]["sum"].numpy())
    assert total.parties == PARTIES
    assert total.clients == tuple(CLIENTS)
