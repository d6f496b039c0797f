"""The report: its verdict follows from its parts, and its figures cannot be talked down."""

import json
import math
from dataclasses import replace

import pytest

from accounting import (
    BinaryTree,
    ConfigError,
    CrossCheck,
    Guarantee,
    Independent,
    Participation,
    PrivacyReport,
    checks,
)
from accounting.report import up

STACK_OVERFLOW = BinaryTree(1600), Participation(1600)


def make(**changes):
    settings = {"noise_multiplier": 4.03, "delta": 1e-6, "population": 34_247} | changes
    return PrivacyReport.of(*STACK_OVERFLOW, **settings)


REPORT = make()
FLAT = [
    "schema", "mechanism", "rounds", "max_participations", "min_separation", "noise_multiplier",
    "epsilon", "delta", "mu", "rho", "sensitivity_squared", "sensitivity_exact",
    "effective_noise_multiplier", "method", "unit", "adjacency", "assumptions",
]  # fmt: skip


def all_enforced(report):
    for assumption in report.assumptions:
        report = report.with_status(assumption.code, "enforced", "by a test")
    return report


def test_figures():
    assert REPORT.epsilon == pytest.approx(3.92020, abs=6e-6)
    assert REPORT.mu == pytest.approx(math.sqrt(11) / 4.03)
    assert REPORT.effective_noise_multiplier == pytest.approx(4.03 / math.sqrt(11))
    assert REPORT.guarantee == Guarantee(REPORT.mu)
    assert REPORT.advantage == REPORT.guarantee.advantage()
    assert [fpr for fpr, _ in REPORT.tpr_at_fpr] == [0.1, 0.01, 0.001]
    for fpr, tpr in REPORT.tpr_at_fpr:
        assert tpr == REPORT.guarantee.tpr_at_fpr(fpr)
    assert (REPORT.sensitivity_squared, REPORT.sensitivity_exact) == (11.0, True)
    assert REPORT.version.count(".") == 2
    assert REPORT.cross_check.method == "quadrature"
    assert REPORT.cross_check.agree_to < 1e-7


def test_flat_fields_of_the_command_line():
    values = REPORT.to_dict()
    assert set(FLAT) <= set(values)
    assert values["schema"] == "privpart/epsilon/1"
    assert (values["unit"], values["adjacency"]) == ("client", "zero-out")
    assert json.loads(json.dumps(values, allow_nan=False))["status"] == REPORT.status
    codes = {a["code"] for a in values["assumptions"]}
    assert codes >= {"participation", "clipping", "divisor", "noise", "choices"}


def test_verdict_is_conditional_until_everything_is_checked():
    assert REPORT.status == "conditional"
    checked = all_enforced(REPORT)
    assert checked.status == "holds"
    assert checked.with_status("noise", "verified", "covariance").status == "holds"
    assert checked.with_status("noise", "asserted", "").status == "conditional"
    # attacks on floating-point noise are known, so this condition is as serious as any other
    assert checked.with_status("floating-point", "violated", "float16").status == "does-not-hold"


def test_nothing_holds_without_evidence():
    with pytest.raises(ConfigError, match="evidence is empty: say why clipping is verified"):
        REPORT.with_status("clipping", "verified", "")


def test_verdict_of_a_violation_and_of_a_contradiction():
    checked = all_enforced(REPORT)
    assert checked.with_status("clipping", "violated", "").status == "does-not-hold"
    contradicted = replace(checked, cross_check=CrossCheck("pld", 9.0, 0.5, consistent=False))
    assert contradicted.status == "does-not-hold"
    assert "CONTRADICTS" in contradicted.statement()
    assert "DOES NOT HOLD" in contradicted.statement()


def test_seeded_noise_is_not_private_whatever_else_holds():
    seeded = all_enforced(make(noise_source="seeded"))
    assert seeded.status == "not-private"
    assert "IS NOT PRIVATE" in seeded.statement()
    assert any("seeded" in warning for warning in seeded.warnings)
    assert all_enforced(make(noise_source="os")).status == "holds"


@pytest.mark.parametrize(
    ("delta", "population", "says", "status"),
    [
        (1e-6, 99_999, "", "holds"),
        (1e-6, 100_000, "is 0.1 / 100,000; for 100,000 clients it should be below", "holds"),
        (1e-3, 999, "is 1 / 999; for 999 clients", "holds"),
        (1e-3, 1_000, "is 1 / 1,000 or more: publishing the data of one client", "conditional"),
        (0.999, 60, "should be below 0.1 / 60.", "conditional"),
        (0.5, 1, "is 0.5 / 1; for 1 clients", "holds"),
        (9.9e-5, None, "", "holds"),
        (1e-4, None, "is sound for fewer than 1,000 clients", "holds"),
        (0.1, None, "is too large for any number of clients", "conditional"),
    ],
)
def test_delta_is_judged_against_the_population(delta, population, says, status):
    report = make(delta=delta, population=population)
    told = [warning for warning in report.warnings if warning.startswith("delta=")]
    assert says in "".join(told)
    assert bool(told) is bool(says) is ("Warning: delta=" in report.statement())
    trusted = report
    for assumption in report.assumptions:
        if assumption.status == "asserted":
            trusted = trusted.with_status(assumption.code, "vouched", "by a test")
    assert trusted.status == status
    assert all_enforced(report).status == status  # nobody can vouch for it
    assert ("delta" in {a.code for a in report.assumptions}) is (status == "conditional")
    assert checks.accept_delta(delta, population, allow_large=status == "conditional") in (
        told or [""]
    )
    for allow_large in {True, False} - {status == "conditional"}:
        with pytest.raises(ConfigError, match="allow_large_delta"):
            checks.accept_delta(delta, population, allow_large=allow_large)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
        ('{"b": [{"a": 1, "\\u0061": 1}]}', "the key 'a' is there twice"),
        ('{"a": NaN}', "NaN is no number"),
        ("[-Infinity]", "-Infinity is no number"),
        ('{"a": -1e400}', "-1e400 is no number"),
    ],
)
def test_json_that_two_readers_would_read_differently(text, fault):
    with pytest.raises(ValueError, match=fault):
        checks.parsed_json(text)
    assert checks.parsed_json('{"a": {"a": 1}, "b": [{"a": 1}, {"a": 1}]}')["a"] == {"a": 1}


def test_large_epsilon_is_warned_of():
    assert any("above 10" in warning for warning in make(noise_multiplier=1.13).warnings)
    assert make().warnings == ()


def test_status_needs_a_known_code_and_word():
    with pytest.raises(ConfigError, match="must be one of participation, clipping"):
        REPORT.with_status("luck", "enforced", "")
    with pytest.raises(ConfigError, match="must be one of enforced, verified"):
        REPORT.with_status("noise", "hoped", "")
    for change in ({"unit": "sample"}, {"noise_source": "dice"}):
        with pytest.raises(ConfigError, match="must be one of"):
            make(**change)


def test_statement_never_says_epsilon_alone():
    text = REPORT.statement()
    claim = next(part for part in text.split("\n\n") if part.startswith("The claim"))
    for word in ("epsilon = 3.921", "delta = 1e-06", "Unit: one client", "Adjacency: zero-out"):
        assert word in claim
    assert "Trust model: central" in claim
    assert "taking part once in 1600 rounds" in claim
    for paragraph in text.split("\n\n"):
        if "epsilon = " in paragraph:
            assert "delta" in paragraph
            assert "unit" in paragraph.lower()
            assert "adjacency" in paragraph.lower()
    for assumption in REPORT.assumptions:
        assert assumption.text in text
        assert assumption.consequence in text
    for scope in (*REPORT.covered, *REPORT.not_covered):
        assert scope in text
    assert "A second accountant (quadrature) says 3.921" in text


def test_statement_of_other_reports():
    text = PrivacyReport.of(
        Independent(100), Participation(100, 4, 25), noise_multiplier=3.0, delta=1e-6,
        unit="example",
    ).statement()  # fmt: skip
    assert "Unit: one example, taking part at most 4 times, 25 or more steps apart" in text
    assert "one example's gradients and with zeros in their place, while batches and" in text
    assert "mixes the examples of a batch or takes data or labels from" in text
    assert "server" not in text
    assert "A second accountant (quadrature) says" in text
    assert "- each client takes part in at most one round (participation)" in make().statement()
    enforced = make().with_status("clipping", "enforced", "server").statement()
    assert "Enforced by the code that ran:\n- every update is clipped" in enforced


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.7420001, "1.743"), (0.1, "0.1"), (0.99999, "1"), (12345.0, "1.235e+04"), (2e-7, "2e-07")],
)
def test_shown_figures_round_up(value, text):
    assert up(value) == text
    assert float(up(value)) >= value


def test_an_earlier_run_is_included():
    before = Guarantee(2.0)
    alone, both = make(), make(earlier=before)
    assert both.mu == pytest.approx(math.hypot(alone.mu, 2.0))
    assert both.epsilon > alone.epsilon
