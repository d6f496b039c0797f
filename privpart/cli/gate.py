"""Gate: a policy beside a plan or a run, with one exit code for every command."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import typer

from accounting import ConfigError
from accounting.report import up
from privpart.cli.output import say

if TYPE_CHECKING:
    from accounting import ComposedGuarantee
    from privpart.cli.budget.promise import Promise

EXCEEDED, UNSOUND, LEFT_ITS_PLAN = 3, 5, 6
"""Exit codes, see ``main.py``."""


def judged_plan(
    policy: Path,
    promise: "Promise",
    *,
    best_of: str | None = None,
    earlier: "ComposedGuarantee | None" = None,
    seed: int | None = None,
) -> list[str]:
    """Return why a planned run does not meet the policy in a file; see ``plan_refusals``.

    ``best_of`` such runs may compete for release; ``earlier`` are those that it is forked from; and
    a simulation has a ``seed``.
    """
    # Here, because the budget commands import this file.
    from privpart.cli.budget.best_of import selected
    from privpart.run.policy import plan_refusals, read_policy

    limits = read_policy(policy)
    if not promise.stated:
        raise ConfigError(
            f"policy={policy}: a gate needs --max-participations, the most rounds of one client; "
            "1 would be assumed, which nothing enforces."
        )
    people = promise.population or limits.population
    judged = replace(promise, delta=limits.delta, population=people)
    report = judged.report(earlier=earlier, noise_source="unstated" if seed is None else "seeded")
    if best_of is not None:
        selection = selected(promise.guarantee(), best_of, limits.delta)
        report = replace(report, epsilon=selection["epsilon"])
    return plan_refusals(limits, report)


def judged_run(
    policy: Path,
    run: Path,
    public_key: str | None,
    vouchers: Mapping[str, Mapping[str, str | None]] = MappingProxyType({}),
) -> list[str]:
    """Return why the run in a folder does not meet the policy in a file; see ``run_refusals``.

    It is reported on again at the policy's delta; ``vouchers`` are a report's.
    """
    from privpart.run.policy import read_policy, run_refusals
    from privpart.run.report import run_report, vouched

    limits = read_policy(policy)
    report = run_report(run, delta=limits.delta, public_key=public_key)
    names = {code: voucher["by"] for code, voucher in vouchers.items()}
    for code, name in names.items():
        report = vouched(report, code, name)
    wrong = [f"{check.what}: {check.says}" for check in report.wrong] + [*report.deviations]
    named = {code: name for code, name in names.items() if name is not None}
    return run_refusals(
        limits, report.guarantee, wrong=wrong, all_runs=report.all_runs, vouchers=named
    )


def as_field(policy: Path | None, refusals: list[str]) -> dict[str, Any]:
    """Return what a JSON document says of a policy; nothing without one."""
    return {} if policy is None else {"policy": {"file": policy.name, "refusals": refusals}}


def leave_if_above(epsilon: float, limit: float | None) -> None:
    """Exit with code 3 if epsilon is above the limit of ``--max-epsilon``."""
    if limit is not None and not epsilon <= limit:
        say(f"epsilon {up(epsilon)} exceeds {limit:g}.")
        raise typer.Exit(EXCEEDED)


def leave_if_refused(refusals: list[str]) -> None:
    """Exit with code 3 if a policy is not met, with a line for each reason."""
    for refusal in refusals:
        say(f"the policy is not met: {refusal}.")
    if refusals:
        raise typer.Exit(EXCEEDED)
