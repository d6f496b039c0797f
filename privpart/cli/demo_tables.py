"""Demo tables: budget, accuracy and leakage, each followed by what it means."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median, stdev
from textwrap import fill
from typing import Any

import typer

from accounting import PrivacyReport
from accounting.report import up
from attacks import LeakageReport
from privpart.cli.output import print_table
from privpart.training.plan_file import PlanFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Test accuracy of one trained part at one noise level, over seeds."""

    part: str
    noise_multiplier: float
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    trained: int
    parameter_count: int
    update_bytes: int

    @property
    def mean(self) -> float:
        """Mean over seeds, in [0, 1]."""
        return mean(self.accuracies)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None for a single seed."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        values = asdict(self)
        values["numbers"] = values.pop("parameter_count")
        return values | {"mean": self.mean, "standard_deviation": self.spread}


def show(
    plan: PlanFile,
    budgets: Sequence[PrivacyReport],
    accuracies: Sequence[Accuracy],
    audits: Mapping[str, LeakageReport],
) -> None:
    """Print everything to standard output."""
    budget_note, accuracy_note, leakage_note, limits = notes(plan)
    _print_budgets(plan, budgets)
    typer.echo(fill(budget_note, 96) + "\n")
    _print_accuracies(budgets, accuracies)
    typer.echo(fill(_cost_note(accuracies) + " " + accuracy_note, 96) + "\n")
    _print_leakage(audits)
    typer.echo(fill(leakage_note, 96) + "\n\n" + fill(limits, 96))


def notes(plan: PlanFile) -> list[str]:
    """Return what each of the three tables means, and then what none of them shows."""
    return [
        f"What it means: this bounds how much all {plan.privacy.rounds} released models together "
        "depend on any one user. It is the same for full and for partial training: the cost "
        "depends on the noise multiplier and on how often a user takes part, not on how many "
        "parameters train.",
        "Each figure is a mean and standard deviation over seeds; full and partial share seeds. "
        "Differences below their standard deviation mean nothing.",
        "What it means: the attacker is an honest-but-curious server that sees one gradient of one "
        "image at untrained weights, without clipping or noise, and knows the network, the frozen "
        "part and the label. The score of a view is the best over itself and the views inside it, "
        "because an attacker who sees more may ignore some of it. 'recovered' means at least 30 dB "
        "and 3 dB above the best image that needs no attack. 'ambiguous' does not mean safe: the "
        "gradients match but do not determine the image, and a prior on images may. Fewer "
        "parameters do not mean less leakage.",
        f"What this does not show: {plan.data.users} simulated users cannot give a meaningful "
        "user-level epsilon at high accuracy; only the mechanics and the trade-off are real. "
        "The noise comes from a seed, so these models are not private. Learning rates and clip "
        "norm were chosen by hand, for digits on these test images; no epsilon covers that. "
        "Decibels certify nothing, and are never converted into an epsilon.",
    ]


def _print_budgets(plan: PlanFile, budgets: Sequence[PrivacyReport]) -> None:
    rows = [
        (
            f"{b.noise_multiplier:g}",
            f"{b.sensitivity_squared:g}",
            up(b.mu, 4),
            up(b.epsilon, 4),
            f"{b.delta:g}",
            f"{b.unit}, {b.adjacency}",
        )
        for b in budgets
    ]
    print_table(
        f"1. Budget: one tree over {plan.privacy.rounds} rounds, {plan.data.users} users taking "
        f"part at most once, clip norm {plan.privacy.clip_norm:g}",
        ("noise multiplier", "sensitivity^2", "mu", "epsilon", "delta", "unit, adjacency"),
        [("0", "", "", "no guarantee", "", ""), *rows],
    )


def _print_accuracies(budgets: Sequence[PrivacyReport], accuracies: Sequence[Accuracy]) -> None:
    epsilon = {b.noise_multiplier: up(b.epsilon, 4) for b in budgets}
    seeds = accuracies[0].seeds
    by_cell = {(a.part, a.noise_multiplier): a.accuracies for a in accuracies}
    rows = []
    for z in dict.fromkeys(a.noise_multiplier for a in accuracies):
        full, partial = by_cell["full", z], by_cell["partial", z]
        paired = [p - f for p, f in zip(partial, full, strict=True)]
        result = (_percent(full), _percent(partial), _percent(paired, sign="+"))
        rows.append((f"{z:g}", epsilon.get(z, "no guarantee"), *result))
    print_table(
        f"2. Test accuracy (%) by noise, seeds {seeds[0]} to {seeds[-1]}",
        ("noise multiplier", "epsilon", "full", "partial", "partial - full"),
        rows,
    )


def _percent(values: Sequence[float], sign: str = "") -> str:
    middle = f"{100 * mean(values):{sign}.1f}"
    return f"{middle} ± {100 * stdev(values):.1f}" if len(values) > 1 else middle


def _cost_note(accuracies: Sequence[Accuracy]) -> str:
    by_part = {a.part: a for a in accuracies}
    full, partial = by_part["full"], by_part["partial"]
    share = partial.trained / partial.parameter_count
    return (
        f"What it means: partial training changes {partial.trained:,} of "
        f"{partial.parameter_count:,} parameters ({share:.1%}); the others are rebuilt from a "
        f"seed. A client sends {partial.update_bytes:,} bytes instead of {full.update_bytes:,}, "
        f"{full.update_bytes / partial.update_bytes:.1f} times less."
    )


def _print_leakage(audits: Mapping[str, LeakageReport]) -> None:
    images = len(next(iter(audits.values())).truth)
    rows = [
        (
            name,
            row.view,
            f"{row.visible:,} ({row.share:.0%})",
            f"{median(row.psnr):.1f}",
            f"{max(row.psnr):.1f}",
            f"{median(trial.baseline for trial in row.best):.1f}",
            row.verdict,
        )
        for name, audit in audits.items()
        for row in audit.rows
    ]
    print_table(
        f"3. Leakage by view: PSNR in dB over {images} images, against images that need no attack",
        ("network", "view", "parameters seen", "median", "max", "best baseline", "verdict"),
        rows,
    )
