"""The door for secure aggregation: sums modulo 2^k of clients that clip themselves."""

import numpy as np
import pytest
import torch
from plans import small_plan

from accounting import ConfigError, Independent
from privpart import AdaptiveClipping, SeededSource, Server, fit
from privpart.grid import Grid
from privpart.run.begin import create_run
from privpart.run.ledger import Ledger
from privpart.run.report import run_report
from privpart.secure.sums import (
    ModularSum,
    centred,
    is_modulus,
    modulus_bits,
    residues,
    wrap,
)

DIM, CLIENTS, ROUNDS = 5, 4, 2
COHORTS = [range(CLIENTS)] * ROUNDS


def plan(**changes):
    given = {"mechanism": ROUNDS, "noise_multiplier": 1.0, "minimum_cohort": 2}
    return small_plan(participation=(ROUNDS, 1), **given | changes)


def update(client, round_):
    generator = torch.Generator().manual_seed(10 * round_ + client)
    return 10.0 ** (client - 2) * torch.randn(DIM, generator=generator)


class Plain:
    def run(self, task, start):
        for client in task.clients:
            yield task.update(client, update(client, task.round))


class Masked:
    """A mock of the protocol: pairs of clients add masks that cancel in the sum."""

    def __init__(self, change=lambda part: part):
        self.change = change

    def run(self, task, start):
        raise AssertionError("no update leaves a client")

    def secure_sums(self, task, start):
        bits = modulus_bits(task.grid, len(task.clients))
        random = np.random.default_rng(task.round)
        sent = [
            residues(update(client, task.round), task.clip_norm, task.grid, bits)
            for client in task.clients
        ]
        for i in range(CLIENTS):
            for j in range(i):
                mask = random.integers(0, 2**bits, DIM)
                sent[i] = (sent[i] + mask) % 2**bits
                sent[j] = (sent[j] - mask) % 2**bits
        total = torch.from_numpy(sum(sent) % 2**bits)
        given = [task.clients, total, bits, task.clip_norm, task.round, task.plan, len(sent)]
        yield ModularSum(**self.change(dict(zip(ModularSum.__slots__, given, strict=True))))


def server(**changes):
    return Server(plan(**changes), torch.zeros(DIM), source=SeededSource(1))


def test_masks_that_cancel_give_the_same_model_as_updates_one_by_one():
    plain, masked = server(), server()
    fit(plain, Plain(), COHORTS)
    fit(masked, Masked(), COHORTS)
    assert torch.equal(plain.parameters, masked.parameters)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bits": -1}, "modulus"),  # one bit fewer than needed: a sum might wrap around
        ({"bits": "40"}, "modulus"),
        ({"total": torch.full((DIM,), -1)}, "modulus"),
        ({"total": torch.full((DIM,), 2**60)}, "modulus"),
        ({"total": torch.zeros(DIM)}, "wrong shape or type"),
        ({"total": torch.zeros(DIM + 1, dtype=torch.int64)}, "wrong shape or type"),
        ({"clients": (0, 1, 1)}, "twice in a round"),
        ({"clients": ()}, "malformed"),
        ({"round": 1}, "another round"),
        ({"plan": "another"}, "another plan"),
        ({"clip_norm": 1.0}, "another plan"),
    ],
)
def test_a_sum_that_is_not_of_this_round_or_might_have_wrapped_is_refused(change, reason):
    one = server()
    task = one.task(range(CLIENTS))

    def changed(given):
        found = {**given, **change}
        return found | ({"bits": given["bits"] - 1} if change == {"bits": -1} else {})

    before = one.parameters.clone()
    counts = one.run_round((), secure=Masked(changed).secure_sums(task, None), asked=task.clients)
    assert counts.refusals.keys() == {reason}
    assert not counts.released
    assert torch.equal(one.parameters, before)


@pytest.mark.parametrize("clients", [1, 2, 3, 100])
def test_the_least_modulus_holds_every_noised_sum_and_no_smaller_one_does(clients):
    grid = Grid(1, 1.0, norm=3.7, sum_norm=0.0)
    bits, most = modulus_bits(grid, clients), clients * 3
    sums = np.arange(-most, most + 1)
    assert (centred(sums & (2**bits - 1), bits) == sums).all()
    room = 64 * 2  # standard deviations of a draw
    noised = np.add.outer(sums, np.arange(-room, room + 1)).astype(float).ravel()
    for fewer in (0, 1):
        wrapped = noised.copy()
        wrap(wrapped, bits - fewer)
        assert (wrapped == noised).all() == (fewer == 0)
        assert is_modulus(bits - fewer, grid, clients) == (fewer == 0)


def test_whatever_a_hostile_client_adds_only_the_noised_sum_is_seen_and_always():
    """If a sum were refused, or wrapped around before its noise, others' sums could be told."""
    twin, bits = server(), modulus_bits(server().task(range(CLIENTS)).grid, CLIENTS)
    noise = twin._noise.next().to(torch.int64)
    edge = 2 ** (bits - 1)
    for total in ([0, edge - 1, edge, 2 * edge - 1, 1], (torch.tensor([edge]) - noise).tolist()):
        one, sent = server(), torch.tensor(total) % (2 * edge)
        task = one.task(range(CLIENTS))
        masked = Masked(lambda given, sent=sent: {**given, "total": sent})
        counts = one.run_round((), secure=masked.secure_sums(task, None), asked=task.clients)
        assert counts.released
        seen = (sent + noise + edge) % (2 * edge) - edge
        expected = seen.double() * task.grid.step(0.5) / CLIENTS
        assert torch.allclose(one.parameters.double(), expected, rtol=1e-5, atol=1e-12)


def test_sums_that_need_updates_or_noise_are_refused():
    adaptive = {"adaptive_clipping": AdaptiveClipping(bit_noise_multiplier=5.0)}
    for changes in ({"noise_multiplier": 0.0}, {**adaptive, "mechanism": Independent(ROUNDS)}):
        with pytest.raises(ConfigError, match="clip themselves need noise"):
            server(**changes).run_round((), secure=[object()])
    with pytest.raises(ConfigError, match="ask fewer"):
        modulus_bits(Grid.of(20, 1.0, 1, filter_charge=0.0), 2**33)


def test_the_report_asserts_the_clipping_from_the_first_secure_round_on(tmp_path):
    with create_run(tmp_path / "run", plan(), facts={"delta": 1e-5}) as run:
        one = Server(plan(), torch.zeros(DIM), source=run.source())
        fit(one, Masked(), COHORTS, commit=run.commit)
    found = {a.code: a for a in run_report(run.path).guarantee.assumptions}
    assert [row.clipped_by for row in Ledger(run.path).rows()] == [
        {"clients": len(cohort)} for cohort in COHORTS
    ]
    assert found["clipping"].status == found["floating-point"].status == "asserted"
    assert "since round 0 clients clip" in found["clipping"].evidence
