"""Clip norm and divisor that change by round: what a round releases, and what it costs."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from accounting import (
    BinaryTree,
    BufferedToeplitz,
    ConfigError,
    Independent,
    Participation,
    PoissonSampling,
    Scheduled,
    Toeplitz,
    participation_of,
)
from privpart import PrivacyPlan, SeededSource, Server
from privpart.plan import AdaptiveClipping, ByRound
from privpart.run.begin import create_run
from privpart.run.ledger import Ledger
from privpart.run.report import _deviations
from privpart.training import plan_file

ROUNDS = 6
CLIPS = ByRound((0, 2, 5), (1.0, 0.25, 3.0))
GOALS = ByRound((0, 3), (2, 5))
LIMITS = Participation(ROUNDS, 3, 2)
MECHANISMS = [
    Independent(ROUNDS),
    Scheduled(ROUNDS, (0, 3), (1.0, 0.5)),
    BinaryTree(ROUNDS),
    Toeplitz.square_root(ROUNDS),
    BufferedToeplitz(ROUNDS, (0.9,), (0.2,)),
]


def plan(mechanism=MECHANISMS[0], **change) -> PrivacyPlan:
    fields = {
        "clip_norm": 1.0,
        "noise_multiplier": 2.0,
        "report_goal": 2,
        "clip_norms": CLIPS,
        "report_goals": GOALS,
    }
    return PrivacyPlan(mechanism=mechanism, participation=LIMITS, **fields | change)


def releases(one: PrivacyPlan, rounds=()) -> np.ndarray:
    """Steps of a seeded run, shape (rounds,); a client sends far too much in some rounds."""
    server, seen = Server(one, torch.zeros(1), source=SeededSource(7)), [0.0]
    for t in range(one.rounds):
        task = server.task(["a"])
        update = torch.tensor([100.0 if t in rounds else 0.0])
        sent = [task.update("a" if t in rounds else f"b{t}", update)]
        assert server.run_round(sent).released
        seen.append(float(server.parameters.double()))
    return np.diff(seen)


PATTERNS = [
    tuple(t for t, joins in enumerate(row) if joins)
    for row in product((0, 1), repeat=ROUNDS)
    if sum(row) <= 3 and not any(row[t] and row[t + 1] for t in range(ROUNDS - 1))
]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: m.name)
def test_a_schedule_of_clip_norms_costs_what_one_clip_norm_costs(mechanism):
    """All patterns of a client: C times what it moves, per clip norm, is within sensitivity."""
    own = plan(mechanism)
    clips = np.array([own.clip_norm_at(t) for t in range(ROUNDS)])
    goals = np.array([own.report_goal_at(t) for t in range(ROUNDS)])
    noise = releases(own)
    alone = releases(replace(own, clip_norms=None, report_goals=None))
    # Noise follows the clip norm of its round: one norm for all would tell of the rounds of 3.
    np.testing.assert_allclose(noise * goals / clips, alone * 2, rtol=2e-4, atol=2e-5)
    assert not np.allclose(noise * goals, alone * 2, rtol=0.1)
    encoder, worst = mechanism.encoder(), 0.0
    for pattern in PATTERNS:
        moved = (releases(own, pattern) - noise) * goals / clips
        worst = max(worst, float(((encoder @ moved) ** 2).sum()))
    claimed = mechanism.sensitivity(LIMITS)
    assert worst <= claimed.squared * (1 + 1e-3)  # steps are float32
    if claimed.exact:
        assert worst > 0.99 * claimed.squared
    assert own.guarantee() == replace(own, clip_norms=None).guarantee()


def test_a_server_that_continues_has_the_clip_norm_of_its_round():
    own, whole = plan(Toeplitz.square_root(ROUNDS)), []
    server = Server(own, torch.zeros(1), source=SeededSource(7))
    for t in range(ROUNDS):
        if t == 3:
            tensors, values = server.state_dict()
            tensors = {name: value.clone() for name, value in tensors.items()}
            server = Server(own, torch.zeros(1), source=SeededSource(7))
            server.load_state_dict(tensors, values, {})
        task = server.task(["a"])
        assert task.clip_norm == own.clip_norm_at(t)
        assert own.may_clip_to(task.clip_norm, t)
        assert not own.may_clip_to(task.clip_norm * 2, t)
        server.run_round([task.update(f"a{t}", torch.zeros(1))])
        whole.append(float(server.parameters.double()))
    np.testing.assert_array_equal(np.diff([0.0, *whole]), releases(own))


def test_a_round_at_another_clip_norm_is_a_deviation(tmp_path):
    own = plan()
    with create_run(tmp_path / "run", own, facts={"delta": 1e-6}) as run:
        server = Server(own, torch.zeros(1), source=run.source())
        for t in range(ROUNDS):
            task = server.task(["a"])
            counts = server.run_round([task.update(f"a{t}", torch.zeros(1))])
            run.commit(server, counts)
    rows = Ledger(tmp_path / "run").rows()
    assert _deviations(own, rows, None, "client") == ()
    (said,) = _deviations(own, [*rows[:2], replace(rows[2], clip_norm=1.0)], None, "client")
    assert said == "round 2 was clipped to 1, planned 0.25"
    again = PrivacyPlan.from_dict(json.loads(json.dumps(own.to_dict())))
    assert (again, again.hash) == (own, own.hash)
    assert "clip_norms" not in plan(clip_norms=None).to_dict()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"clip_norm": 2.0}, "clip_norms: begins with 1; must begin with the plan's clip_norm, 2"),
        ({"report_goal": 3}, "report_goals: begins with 2"),
        ({"clip_norms": ByRound((0, 6), (1.0, 2.0))}, "from_round=6: has no effect"),
        ({"report_goals": ByRound((0, 1), (2, 2.5))}, "must be whole numbers"),
        ({"report_goals": ByRound((0, 1), (2, 1e300))}, "must be whole numbers"),
        ({"clip_norms": ByRound((0, 1), (1.0, 1e-320))}, "clip"),
        ({"adaptive_clipping": AdaptiveClipping(bit_noise_multiplier=9)}, "leave one out"),
    ],
)
def test_schedules_that_do_not_fit_the_plan_are_refused(change, why):
    with pytest.raises(ConfigError, match=why):
        plan(**change)


@pytest.mark.parametrize("value", [(1.0, 0.0), (1.0, float("nan")), (1.0,), (), ("x", 1.0)])
def test_what_is_no_schedule_is_refused(value):
    with pytest.raises((ConfigError, TypeError)):
        ByRound((0, 1), value)


TEXT = """
schema = "privpart/plan/1"
[privacy]
rounds = 6
clip_norm = 1.0
clip_norms = { from_round = [0, 3], value = [1.0, 0.5] }
noise_multiplier = 4.0
delta = 1e-5
mechanism = { name = "independent" }
[privacy.sampling]
name = "scheduled-poisson"
from_round = [0, 4]
expected_batches = [3, 6.4]
population = 9
[model]
[data]
[client]
learning_rate = 0.1
[server]
"""


def test_a_plan_file_has_schedules_and_divides_by_what_is_expected():
    promised = plan_file.parse(TEXT, in_python=True).privacy_plan()
    assert promised.clip_norms == ByRound((0, 3), (1.0, 0.5))
    assert promised.report_goals == ByRound((0, 4), (3.0, 6.0))
    assert [promised.report_goal_at(t) for t in (3, 4)] == [3, 6]
    goal = TEXT.replace("rounds = 6", "rounds = 6\nreport_goal = 4")
    fixed = plan_file.parse(goal, in_python=True)
    assert fixed.privacy_plan().report_goals is None
    plain = plan_file.parse(TEXT.replace("clip_norms", "# "), in_python=True)
    assert plain.hash != plan_file.parse(TEXT, in_python=True).hash
    with pytest.raises(ConfigError, match="clip_norms"):
        plan_file.parse(TEXT.replace("value = [1.0", "value = [2.0"), in_python=True).privacy_plan()


def test_sampled_rounds_have_schedules_too():
    sampling = PoissonSampling(3, 9)
    limits = participation_of(sampling, ROUNDS)
    alone = plan(clip_norms=None)
    own = replace(alone, participation=limits, sampling=sampling, minimum_cohort=0)
    assert replace(own, clip_norms=CLIPS).guarantee() == own.guarantee()
