"""A policy judges plans and runs at its own delta and population."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import runs
from small_study import PLAN

from accounting import BinaryTree, ConfigError, Participation, PrivacyReport
from accounting.report import SampledClaim
from privpart.run.budget_book import AllRuns
from privpart.run.policy import Policy, plan_refusals, read_policy, run_refusals
from privpart.run.report import run_report

LIMITS = {"epsilon": 5.0, "delta": 1e-6, "population": 20_000}
POLICY = Policy(**LIMITS)


def report(z: float = 8.0, delta: float = 1e-6, **change: object) -> PrivacyReport:
    made = PrivacyReport.of(
        BinaryTree(100), Participation(100), noise_multiplier=z, delta=delta, noise_source="os"
    )
    return replace(made, **change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"epsilon": 5.01}, "epsilon 5.01 at delta 1e-06 is above the policy's 5"),
        ({"epsilon": float("nan")}, "is above the policy's 5"),
        ({"noise_source": "seeded"}, "the noise is from a seed"),
        ({"unit": "example"}, "the unit is one example"),
        ({"adjacency": "add-or-remove"}, "adjacency add-or-remove is not one of zero-out"),
        ({"sampling": {"name": "poisson"}}, "sampling poisson is not one of none"),
        ({"population": 10**9}, "the run claims 1,000,000,000 clients"),
    ],
)
def test_a_plan_is_refused_for_each_limit_alone(change, reason):
    assert plan_refusals(POLICY, report()) == []
    (refusal,) = plan_refusals(POLICY, report(**change))
    assert reason in refusal


def test_mechanisms_may_be_named():
    assert plan_refusals(Policy(**LIMITS, mechanisms=["tree"]), report()) == []
    (refusal,) = plan_refusals(Policy(**LIMITS, mechanisms=["blt"]), report())
    assert refusal == "mechanism tree is not one of blt"


def test_a_report_at_another_delta_is_not_judged():
    with pytest.raises(ValueError, match="not at the policy's delta"):
        plan_refusals(POLICY, report(delta=1e-3))


def judged(policy: Policy, made: PrivacyReport, **change) -> list[str]:
    facts = {"wrong": [], "all_runs": None, "vouchers": {}} | change
    return run_refusals(policy, made, **facts)


def test_conditions_are_checked_allowed_or_vouched_for_by_somebody_named():
    codes = [a.code for a in report().assumptions]
    assert len(judged(POLICY, report())) == len(codes)
    others = [code for code in codes if code != "choices"]
    policy = Policy(**LIMITS, asserted=others, vouchers=["Ada"])
    assert judged(policy, report()) == [
        "choices is asserted, and the policy wants it checked or vouched for"
    ]
    vouched = report().with_status("choices", "vouched", "not checked")
    assert judged(policy, vouched, vouchers={"choices": "Ada"}) == []
    for vouchers in ({}, {"choices": "Bob"}):
        (refusal,) = judged(policy, vouched, vouchers=vouchers)
        assert "not by one of Ada" in refusal
    violated = report().with_status("noise", "violated", "known")
    assert any("noise is violated" in why for why in judged(policy, violated))
    assert judged(policy, vouched, vouchers={"choices": "Ada"}, wrong=["key: changed"]) == [
        "key: changed"
    ]


def all_runs(status: str, epsilon: float | None) -> AllRuns:
    return AllRuns("people", status, 2, 1.0, epsilon, "2 runs")


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        (None, "the plan names no population"),
        (all_runs("holds", 8.1), "all runs together cost epsilon 8.1"),
        (all_runs("unknown", 1.0), "total_epsilon: 2 runs"),
        (all_runs("not-private", 1.0), "total_epsilon: 2 runs"),
        (all_runs("holds", None), "at delta 1e-06 it is not bounded: 2 runs"),
    ],
)
def test_all_runs_together_are_judged_by_the_log(runs, reason):
    codes = [a.code for a in report().assumptions]
    policy = Policy(**LIMITS, asserted=codes, total_epsilon=8.0)
    assert judged(policy, report(), all_runs=all_runs("holds", 8.0)) == []
    (refusal,) = judged(policy, report(), all_runs=runs)
    assert reason in refusal


def test_sampled_epsilon_is_that_at_the_policys_delta():
    sampled = SampledClaim(1.0, {"name": "poisson", "method": "pld"}, ())
    made = PrivacyReport.of(
        BinaryTree(100), Participation(100), noise_multiplier=1.0, delta=1e-6, sampled=sampled
    )
    limits = LIMITS | {"adjacency": ["zero-out", "add-or-remove"], "sampling": ["poisson"]}
    assert plan_refusals(Policy(**limits), made) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "epsilon: is missing"),
        ("epsilon = 1.0\ndelta = 1e-6", "population: is missing"),
        ("epsilon = nan\ndelta = 1e-6\npopulation = 9", "epsilon: "),
        ("epsilon = '5'\ndelta = 1e-6\npopulation = 9", "epsilon: Input should be a valid number"),
        ("epsilon = 5.0\ndelta = 1e-3\npopulation = 2000", "is 1 / 2,000 or more"),
        ("epsilon = 5.0\ndelta = 1e-6\npopulation = 2000\nsampler = []", "sampler: no such key"),
        ("epsilon = ", "is not valid TOML"),
        ("epsilon = " + "[" * 20_000, "is not valid TOML"),
        ("epsilon = " + "1" * 5_000, "is not valid TOML"),
        (PLAN, "epsilon: is missing"),
        ("#" * 70_000, "has more than 65,536 bytes"),
        ("\xff", "epsilon|TOML"),
    ],
)
def test_a_wrong_policy_file_is_one_sentence(tmp_path, text, reason):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_policy(path)


def test_what_is_no_file_is_refused(tmp_path):
    for path, why in ((tmp_path, "cannot be read"), (tmp_path / "missing.toml", "no such file")):
        with pytest.raises(ConfigError, match=why):
            read_policy(path)


@pytest.fixture
def policy(tmp_path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text("epsilon = 5.0\ndelta = 1e-6\npopulation = 20000\nasserted = []\n")
    return path


def test_a_strangers_delta_does_not_pass_the_gate(privpart, policy):
    typed = ["epsilon", "--rounds", "100", "--max-participations", "1", "--delta", "0.001"]
    passes = privpart(*typed, "--noise-multiplier", "8", "--policy", str(policy))
    assert passes.returncode == 0, passes.stderr
    z = ["--noise-multiplier", "2.2"]
    assert privpart(*typed, *z, "--max-epsilon", "5").returncode == 0
    refused = privpart(*typed, *z, "--policy", str(policy))
    assert refused.returncode == 3
    assert "the policy is not met: epsilon 6." in refused.stderr
    unstated = privpart("epsilon", "--rounds", "9", "--delta", "1e-6", *z, "--policy", str(policy))
    assert (unstated.returncode, unstated.stdout) == (2, "")
    assert "a gate needs --max-participations" in unstated.stderr


def test_the_best_of_several_runs_is_judged_by_its_own_cost(privpart, policy):
    typed = ["epsilon", "--rounds", "100", "--max-participations", "1", "--delta", "1e-6"]
    typed += ["--noise-multiplier", "3.5"]
    for gate in (["--max-epsilon", "5"], ["--policy", str(policy)]):
        assert privpart(*typed, *gate).returncode == 0
        refused = privpart(*typed, *gate, "--best-of", "10")
        assert refused.returncode == 3, refused.stderr
        assert "epsilon 5." in refused.stderr or "epsilon 6." in refused.stderr


def test_the_key_that_a_folder_names_is_nobodys_word(privpart, policy, tmp_path, monkeypatch):
    made = runs.begun(tmp_path / "run", 4)
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "another machine"))
    report = run_report(made)
    codes = [a.code for a in report.guarantee.assumptions if a.code != "participation"]
    policy.write_text(
        f"epsilon = 100.0\ndelta = 1e-6\npopulation = 9\nasserted = {json.dumps(codes)}\n"
    )
    (tmp_path / "key.txt").write_text(report.public_key)
    for command in ("report", "verify"):
        refused = privpart(command, str(made), "--policy", str(policy))
        assert refused.returncode == 3
        assert "participation is asserted" in refused.stderr
        known = [command, str(made), "--public-key", str(tmp_path / "key.txt")]
        assert privpart(*known, "--policy", str(policy)).returncode == 0


def test_train_judges_a_fork_with_its_parent_and_a_seed_as_no_noise(privpart, policy, tmp_path):
    (plan := tmp_path / "plan.toml").write_text(PLAN)
    train = ["train", "--plan", str(plan), "--policy", str(policy)]
    policy.write_text("epsilon = 1e6\ndelta = 1e-6\npopulation = 20000\n")
    seeded = privpart(*train, "--seed", "1", "--out", str(tmp_path / "seeded"))
    assert seeded.returncode == 3
    assert "the noise is from a seed" in seeded.stderr
    assert privpart(*train, "--out", str(tmp_path / "run")).returncode == 0
    alone = run_report(tmp_path / "run", delta=1e-6).guarantee.epsilon
    policy.write_text(f"epsilon = {alone * 1.01}\ndelta = 1e-6\npopulation = 20000\n")
    assert privpart(*train, "--out", str(tmp_path / "other")).returncode == 0
    fork = ["--fork-of", str(tmp_path / "run"), "--out", str(tmp_path / "fork")]
    forked = privpart(*train, *fork)
    assert forked.returncode == 3, forked.stderr
    assert not any((tmp_path / name).exists() for name in ("seeded", "fork"))


def test_train_refuses_before_anything_is_spent_and_runs_are_judged(privpart, policy, tmp_path):
    plan, out = tmp_path / "plan.toml", tmp_path / "run"
    plan.write_text(PLAN)
    refused = privpart("train", "--plan", str(plan), "--out", str(out), "--policy", str(policy))
    assert refused.returncode == 3
    assert not out.exists()
    policy.write_text("epsilon = 1e6\ndelta = 1e-6\npopulation = 20000\nvouchers = ['Ada']\n")
    trained = privpart("train", "--plan", str(plan), "--out", str(out), "--policy", str(policy))
    assert trained.returncode == 0, trained.stderr
    for command in ("report", "verify"):
        told = privpart(command, str(out), "--policy", str(policy), "--format", "json")
        assert told.returncode == 3
        refusals = json.loads(told.stdout)["policy"]["refusals"]
        assert any(line.startswith("choices is asserted") for line in refusals)
    vouching = [
        "--vouch",
        "choices",
        "--voucher",
        "Ada",
        "--policy",
        str(policy),
        "--format",
        "json",
    ]
    told = privpart("report", str(out), *vouching)
    assert told.returncode == 0, told.stderr
    document = json.loads(told.stdout)
    assert document["policy"]["refusals"] == []
    assert document["vouchers"]["choices"]["by"] == "Ada"
