"""Federated Select under DP: what is charged, what is seen, and the two wrong variants.

Setting: N clients, K rows, every client selects some rows by its own data. One client's update has
norm C at most, whatever it selects. Wrong variant one adds noise only to the rows that somebody
selected; wrong variant two divides a row by the number of clients that selected it.
"""

import math

import pytest
import torch
from plans import small_plan

from accounting import ConfigError, Guarantee, Independent
from privpart import NoiseStream, SeededSource, Server
from privpart.messages import RoundTask
from privpart.select import select_claims

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
    plan = small_plan(Independent(1), (1,), noise_multiplier=Z, report_goal=N)
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


def rate(how, *, without_client_0, runs=20):
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


def test_the_report_keeps_recipients_and_operators_apart():
    seen = (("server", ("words keys, with the update",)), ("store", ("words keys",)))
    recipients, operators = select_claims(Guarantee(0.5), 1e-5, seen)
    assert recipients == "against recipients of the model: epsilon 1.994 at delta 1e-05"
    assert operators == (
        "keys seen in the clear, without any epsilon: server: words keys, with the update; "
        "store: words keys"
    )
    assert select_claims(None, 1e-5, ())[1].endswith("none")
    with pytest.raises(ConfigError, match="delta"):
        select_claims(None, 0.0, ())
