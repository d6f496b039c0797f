"""Gate: a policy beside a plan or a run, with one exit code for every command."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from accounting import ConfigError
from accounting.report import printable

if TYPE_CHECKING:
    from privpart.cli.budget.promise import Promise
    from privpart.run.report import RunReport

EXCEEDED = 3


def judged_plan(policy: Path, promise: "Promise") -> list[str]:
    """Return why a planned run does not meet a policy; see ``plan_refusals``."""
    from privpart.run.policy import plan_refusals, read_policy

    limits = read_policy(policy)
    if not promise.stated:
        raise ConfigError(
            f"policy={policy}: a gate needs --max-participations, the most rounds of one client; "
            "1 would be assumed, which nothing enforces."
        )
    people = promise.population or limits.population
    report = replace(promise, delta=limits.delta, population=people).report()
    return plan_refusals(limits, report)


def judged_run(policy: Path, run: Path, printed: "RunReport") -> list[str]:
    """Return why a run does not meet a policy; see ``run_refusals``.

    Args:
        policy: file of the policy.
        run: folder, which is reported on again at the policy's delta.
        printed: the report that the command prints, with what was vouched for.
    """
    from privpart.run.policy import read_policy, run_refusals
    from privpart.run.report import run_report, vouched

    limits = read_policy(policy)
    report = run_report(run, delta=limits.delta, public_key=printed.public_key)
    names = {code: voucher["by"] for code, voucher in printed.vouchers.items()}
    for code, name in names.items():
        report = vouched(report, code, name)
    return run_refusals(
        limits,
        report.guarantee,
        wrong=[f"{check.what}: {check.says}" for check in report.wrong] + [*report.deviations],
        all_runs=report.all_runs,
        vouchers={code: name for code, name in names.items() if name is not None},
    )


def as_field(policy: Path | None, refusals: list[str]) -> dict[str, Any]:
    """Return what a JSON document says of a policy; nothing without one."""
    return {} if policy is None else {"policy": {"file": policy.name, "refusals": refusals}}


def leave_if_refused(refusals: list[str]) -> None:
    """Exit with code 3 if a policy is not met, with a line for each reason."""
    for refusal in refusals:
        typer.echo(printable(f"privpart: the policy is not met: {refusal}."), err=True)
    if refusals:
        raise typer.Exit(EXCEEDED)
