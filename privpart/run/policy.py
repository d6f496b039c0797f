"""Policy: what an organisation allows of a run, and the one function that judges by it.

The policy brings its own delta and population, and a report is judged at that delta: a plan cannot
pass by choosing a delta at which its epsilon is small, nor by claiming more people than there are.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from accounting import PrivacyReport, checks
from accounting.checks import ConfigError
from accounting.report import Adjacency, Unit, up
from privpart.run.budget_book import AllRuns
from privpart.settings.faults import sentence_of

_MOST_BYTES = 2**16
"""Of a policy file; a greater one is another file."""
Positive = Annotated[float, Field(gt=0)]


class Policy(BaseModel):
    """The limits of an organisation, as the tables of a TOML file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    epsilon: Positive  # the most that one run may cost a unit, at ``delta``
    delta: Annotated[float, Field(gt=0, lt=1)]  # at which every run is judged; below 1 / population
    population: Annotated[int, Field(ge=1)]  # number of units, which is public
    unit: Unit = "client"  # whose data one unit of protection is
    # those that epsilon may be about; "add-or-remove" is that of sampled runs
    adjacency: list[Adjacency] = ["zero-out"]
    # names of the mechanisms that are allowed, such as "blt"; None allows all
    mechanisms: list[str] | None = None
    # names of the samplers that may amplify epsilon, such as "poisson"; none allows runs without
    # amplification alone
    sampling: list[str] = []
    # codes of the conditions of a run that may stay asserted; the others must be enforced,
    # verified, or vouched for
    asserted: list[str] = []
    vouchers: list[str] = []  # names of the people who may vouch for a condition
    # the most that all runs about the same people may cost together, by the log of runs of the
    # machine that judges; None for no such limit
    total_epsilon: Positive | None = None


def read_policy(path: Path) -> Policy:
    """Return the policy of a TOML file.

    Raises:
        ConfigError: it cannot be read, has unknown keys or values out of range, or its delta is
            1 / population or more.
    """
    name = f"policy={path}"
    tables = checks.parsed_toml(checks.text_of(path, name, most=_MOST_BYTES), name)
    try:
        policy = Policy.model_validate(tables)
    except ValidationError as error:
        faults = " ".join(sentence_of(fault, Policy) for fault in error.errors())
        raise ConfigError(f"{name}: is not a valid policy: {faults}") from None
    if checks.is_large_delta(policy.delta, policy.population):
        raise ConfigError(f"{name}: {checks.delta_warning(policy.delta, policy.population)}")
    return policy


def plan_refusals(policy: Policy, report: PrivacyReport) -> list[str]:
    """Return why a plan may not run under a policy, a sentence each; none if it may.

    The report is at the policy's delta. Its conditions are not judged: nothing ran.
    """
    return [*_of_figures(policy, report), *_of_kind(policy, report)]


def run_refusals(
    policy: Policy,
    report: PrivacyReport,
    *,
    wrong: Sequence[str],
    all_runs: AllRuns | None,
    vouchers: Mapping[str, str],
) -> list[str]:
    """Return why a run does not meet a policy, a sentence each; none if it does.

    Report and ``all_runs`` are at the policy's delta. ``wrong`` is what evidence contradicts and
    how the run left its plan, ``vouchers`` maps the code of each condition to who vouched for it.
    """
    of_report = *plan_refusals(policy, report), *_of_conditions(policy, report, vouchers)
    return [*wrong, *of_report, *_of_total(policy, all_runs)]


def _of_figures(policy: Policy, report: PrivacyReport) -> Iterator[str]:
    if report.delta != policy.delta:
        raise ValueError(f"delta={report.delta:g}: the report is not at the policy's delta.")
    if report.status == "not-private":
        yield "the noise is from a seed, so that no epsilon holds"
    elif report.status == "does-not-hold":
        yield "the guarantee does not hold"
    if not report.epsilon <= policy.epsilon:
        yield (
            f"epsilon {up(report.epsilon)} at delta {policy.delta:g} is above the policy's "
            f"{policy.epsilon:g}"
        )
    if report.population is not None and report.population > policy.population:
        yield (
            f"the run claims {report.population:,} {report.unit}s; the policy is about "
            f"{policy.population:,}"
        )


def _of_kind(policy: Policy, report: PrivacyReport) -> Iterator[str]:
    if report.unit != policy.unit:
        yield f"the unit is one {report.unit}; the policy's is one {policy.unit}"
    if report.adjacency not in policy.adjacency:
        yield f"adjacency {report.adjacency} is not one of {_listed(policy.adjacency)}"
    if policy.mechanisms is not None and report.mechanism not in policy.mechanisms:
        yield f"mechanism {report.mechanism} is not one of {_listed(policy.mechanisms)}"
    for sampler in (name for name in report.samplers if name not in policy.sampling):
        yield f"sampling {sampler} is not one of {_listed(policy.sampling)}"


def _of_conditions(
    policy: Policy, report: PrivacyReport, vouchers: Mapping[str, str]
) -> Iterator[str]:
    for condition in report.assumptions:
        code, status = condition.code, condition.status
        if status == "violated":
            yield f"{code} is violated: {condition.evidence or condition.text}"
        elif status == "asserted" and code not in policy.asserted:
            yield f"{code} is asserted, and the policy wants it checked or vouched for"
        elif status == "vouched" and vouchers.get(code) not in policy.vouchers:
            who = vouchers.get(code) or "somebody who gave no name (--voucher)"
            yield f"{code} is vouched for by {who}, not by one of {_listed(policy.vouchers)}"


def _of_total(policy: Policy, all_runs: AllRuns | None) -> Iterator[str]:
    if policy.total_epsilon is None:
        return
    if all_runs is None:
        yield "total_epsilon: the plan names no population, so that no log adds its runs"
    elif all_runs.status not in ("holds", "nothing released"):
        yield f"total_epsilon: {all_runs.says}"
    elif all_runs.epsilon is None and all_runs.status == "holds":
        # Such as a stated release whose delta is above the policy's.
        yield f"total_epsilon: at delta {policy.delta:g} it is not bounded: {all_runs.says}"
    elif all_runs.epsilon is not None and not all_runs.epsilon <= policy.total_epsilon:
        yield (
            f"all runs together cost epsilon {up(all_runs.epsilon)}, above the policy's total of "
            f"{policy.total_epsilon:g}"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
