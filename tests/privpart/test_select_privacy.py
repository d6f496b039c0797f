"""Federated Select under DP: what is charged, what is seen, and the two wrong variants.

Setting: N clients, K rows, every client selects some rows by its own data. One client's update has
norm C at most, whatever it selects. Wrong variant one adds noise only to the rows that somebody
selected; wrong variant two divides a row by the number of clients that selected it.
"""

import itertools
import math

import pytest
import torch
from no_noise import NoNoise

from accounting import ConfigError, Guarantee, Independent, Participation
from privpart import NoiseStream, PrivacyPlan, SecretSource, SeededSource, Server
from privpart.messages import RoundTask
from privpart.select import (
    DeviceOnly,
    KeyHistogram,
    SelectLedger,
    SelectReport,
    ServerSees,
)
from privpart.select.disclosure import Sighting

N, K, CLIP, Z = 8, 6, 0.5, 1.0
RARE = 4
"""A row that client 0 alone selects."""
KEYS = [(0, RARE)] + [(n % 3, 3) for n in range(1, N)]


def update(keys, scale=1.0):
    """A client's update on the server's rows, of norm CLIP."""
    full = torch.zeros(K)
    full[list(keys)] = CLIP * scale / math.sqrt(len(keys))
    return full


def world(*, without_client_0):
    """Updates and keys, with client 0's replaced by zero: the adjacency that is claimed."""
    updates = [update(z) for z in KEYS]
    if without_client_0:
        updates[0] = torch.zeros(K)
    keys = [() if without_client_0 and n == 0 else z for n, z in enumerate(KEYS)]
    return updates, keys


def release(*, without_client_0, seed):
    """The right way: the ordinary server."""
    plan = PrivacyPlan(
        mechanism=Independent(1),
        participation=Participation(1),
        clip_norm=CLIP,
        noise_multiplier=Z,
        report_goal=N,
    )
    server = Server(plan, torch.zeros(K), source=SeededSource(seed))
    updates, _ = world(without_client_0=without_client_0)
    task = RoundTask(0, tuple(range(N)), CLIP, plan.hash)
    server.run_round(task.update(n, u) for n, u in enumerate(updates))
    return server.parameters.detach()


def release_noise_on_selected_rows_only(*, without_client_0, seed):
    """The wrong way, number one."""
    updates, keys = world(without_client_0=without_client_0)
    selected = sorted({k for own in keys for k in own})
    total = torch.stack(updates).sum(dim=0)
    one = Independent(1)
    noise = NoiseStream(one, dim=len(selected), stddev=2.0**20, source=SeededSource(seed)).next()
    total[selected] += noise * (Z * CLIP / 2**20)
    return total / N


def mean_by_realised_count(updates, keys):
    """The wrong way, number two; before its noise."""
    counts = torch.zeros(K)
    for own in keys:
        counts[list(own)] += 1
    return torch.stack(updates).sum(dim=0) / counts.clamp(min=1)


def rate(how, *, without_client_0, runs=200):
    """How often an attacker sees something in the rare row."""
    rows = [how(without_client_0=without_client_0, seed=seed)[RARE] for seed in range(runs)]
    return sum(float(value) != 0 for value in rows) / runs


def test_noise_on_selected_rows_only_has_infinite_epsilon():
    """P[row is not zero] is 1 with the client and 0 without: e^epsilon 0 + delta >= 1 for no
    epsilon with delta < 1. The claimed mu = 1/Z would allow this test 0.1 % at 1e-9."""
    present = rate(release_noise_on_selected_rows_only, without_client_0=False)
    absent = rate(release_noise_on_selected_rows_only, without_client_0=True)
    assert (present, absent) == (1.0, 0.0)
    assert Guarantee(1 / Z).tpr_at_fpr(1e-9) < 1e-3


def test_noise_on_every_row_leaves_that_test_blind():
    """The twin, through the server: the row moves in every run, with or without the client."""
    assert rate(release, without_client_0=False) == rate(release, without_client_0=True) == 1.0


def test_rows_that_nobody_selected_carry_exactly_the_noise_of_the_stream():
    model = release(without_client_0=False, seed=3)
    stream = NoiseStream(Independent(1), dim=K, stddev=2.0**20, source=SeededSource(3))
    noise = (stream.next().double() * (CLIP * Z / 2**20) / N).float()
    nobody = 5
    assert model[nobody] == noise[nobody] != 0


def test_dividing_by_the_realised_count_makes_one_client_weigh_n_times_as_much():
    """Alone on its row a client moves the mean by its whole update, not by 1/N of it."""
    row = (RARE,)
    keys = [row, *KEYS[1:]]
    updates = [update(z) for z in keys]
    gone = [torch.zeros(K), *updates[1:]]
    wrong = mean_by_realised_count(updates, keys) - mean_by_realised_count(gone, keys)
    right = (torch.stack(updates).sum(dim=0) - torch.stack(gone).sum(dim=0)) / N
    assert float(right.norm()) == CLIP / N
    assert float(wrong.norm()) == CLIP
    assert float(wrong.norm() / right.norm()) == N
    # with noise of Z CLIP / N on the mean, mu is N times the one claimed, and epsilon more
    claimed, true = Guarantee(1 / Z), Guarantee(N / Z)
    assert true.epsilon(1e-5) > N * claimed.epsilon(1e-5)


@pytest.mark.parametrize("m", range(1, K + 1))
def test_sum_moves_by_at_most_clip_norm_whatever_a_client_selects(m):
    """All key sets of all sizes: zero fill keeps the norm, so keys may be private data."""
    others = torch.stack([update(z) for z in KEYS[1:]]).sum(dim=0)
    for keys in itertools.combinations(range(K), m):
        moved = (others + update(keys)) - others
        assert moved.norm() <= CLIP * (1 + 1e-6)


def histogram(m=2, z=3.0, rounds=4, k=1, source=None, size=K):
    return KeyHistogram(
        size=size,
        keys_per_client=m,
        noise_multiplier=z,
        participation=Participation(rounds, k),
        source=source or SeededSource(0),
    )


def counts_of(keys, **options):
    source = NoNoise()
    seen = {n: ServerSees(z) for n, z in enumerate(keys)}
    return histogram(source=source, **options).release(seen).value, source.stddev / 2**20


@pytest.mark.parametrize("m", [1, 2, 3])
def test_histogram_noise_is_scaled_to_its_brute_force_sensitivity(m):
    """Over all that one client may send, the counts move by sqrt(m) at most; noise is z of that."""
    base, stddev = counts_of([(0, 1)[:m]], m=m)
    moves = []
    for length in range(m + 2):
        for keys in itertools.product(range(K), repeat=length):
            counts, _ = counts_of([(0, 1)[:m], keys], m=m)
            moves.append(float((counts - base).norm()))
    assert max(moves) == pytest.approx(math.sqrt(m))
    assert stddev == pytest.approx(3.0 * math.sqrt(m))
    assert stddev >= 3.0 * math.sqrt(m)


def test_histogram_counts_clients():
    counts, _ = counts_of([(0, 1), (1, 2), (1,)])
    assert counts.tolist() == [1, 3, 1, 0, 0, 0]


@pytest.mark.parametrize("keys", [(1, 1), (0, 1, 2), (6, 1), (-1, 1), ("a", 1), (None,)])
def test_who_sends_malformed_keys_does_not_count(keys):
    counts, _ = counts_of([keys, (5,)])
    assert counts.tolist() == [0, 0, 0, 0, 0, 1]


def test_a_client_counts_as_often_as_planned():
    own = histogram(source=NoNoise(), k=2)
    seen = {7: ServerSees((0, 1))}
    totals = [float(own.release(seen).value.sum()) for _ in range(4)]
    assert totals == [2, 2, 0, 0]
    with pytest.raises(ConfigError, match="all 4 planned"):
        own.release(seen)


@pytest.mark.parametrize(("factor", "fits"), [(1.0, True), (1.05, False)])
def test_histogram_noise_has_the_planned_size(factor, fits):
    """Chi-square over 20,000 counts, 5 standard deviations wide; the twin is 5 % off."""
    own = histogram(m=4, z=3.0, size=20_000)
    noise = own.release({}).value.double() * factor
    statistic = float((noise / (3.0 * 2)).square().sum())
    assert (abs(statistic - 20_000) < 5 * math.sqrt(2 * 20_000)) is fits


def test_a_forked_histogram_does_not_repeat_its_noise(monkeypatch):
    own = histogram(source=SecretSource())
    own.release({})
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(ConfigError, match="forked"):
        own.release({})


def test_histograms_of_two_rounds_have_other_noise():
    own = histogram()
    assert not torch.equal(own.release({}).value, own.release({}).value)


@pytest.mark.parametrize("k", [1, 3])
def test_histogram_and_updates_compose(k):
    """Effective z = (z^-2 + z_c^-2 k)^(-1/2): mu^2 adds, over the rounds of a client as well."""
    own = histogram(z=3.0, k=k)
    both = own.with_updates(Guarantee(1 / 2.0))
    assert both.mu == pytest.approx(math.sqrt(1 / 4 + k / 9))
    assert both.mu >= math.sqrt(1 / 4 + k / 9)
    assert both.epsilon(1e-5) > Guarantee(1 / 2.0).epsilon(1e-5)


def test_secret_histograms_are_released_with_their_price_and_once():
    source = SecretSource()
    released = histogram(source=source).release({})
    assert released.why == Guarantee(histogram().guarantee().mu)
    assert "seeded" in histogram().release({}).why
    with pytest.raises(ConfigError, match="already feeds"):
        histogram(source=source)


@pytest.mark.parametrize(
    "wrong", [{"m": 0}, {"m": 7}, {"z": 0.0}, {"z": math.nan}, {"z": math.inf}, {"size": 0}]
)
def test_impossible_histograms_are_refused(wrong):
    with pytest.raises(ConfigError):
        histogram(**wrong)


def ledger(*seen):
    own = SelectLedger()
    own.sightings |= {Sighting(party, 0, client, what) for party, what in seen for client in (0, 1)}
    return own


def test_the_report_keeps_recipients_and_operators_apart():
    seen = ledger(("store", "words keys"), ("server", "words keys, with the update"))
    recipients, operators = SelectReport.of(Guarantee(0.5), 1e-5, seen).lines()
    assert recipients == "against recipients of the model: epsilon 1.994 at delta 1e-05"
    assert operators == (
        "keys seen in the clear, without any epsilon: server: words keys, with the update; "
        "store: words keys"
    )


def test_the_report_names_the_assumption_of_private_retrieval():
    asked = "number of words keys"
    seen = ledger(("store", asked), ("second store", asked))
    _, operators = SelectReport.of(Guarantee(0.5), 1e-5, seen).lines()
    assert operators.endswith("(and the keys themselves, should the two stores collude)")


def test_the_report_claims_nothing_without_noise():
    recipients, operators = SelectReport.of(None, 1e-5, SelectLedger()).lines()
    assert recipients.endswith("no guarantee")
    assert operators.endswith("none")
    with pytest.raises(ConfigError, match="delta"):
        SelectReport.of(None, 0.0, SelectLedger())


def test_keys_reach_the_histogram_only_as_what_the_server_sees():
    own = DeviceOnly((1, 2))
    seen = own.show(SelectLedger(), "server", round_=0, client=0, what="keys")
    assert histogram(source=NoNoise()).release({0: seen}).value.tolist() == [0, 1, 1, 0, 0, 0]
    with pytest.raises(AttributeError):
        histogram().release({0: own})
