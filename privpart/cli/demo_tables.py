"""The demo's three tables, each followed by what it means and what it does not show."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median, stdev
from textwrap import fill
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from accounting import PrivacyReport
from accounting.report import up
from attacks import LeakageReport
from privpart.experiment.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Test accuracy of one trained part at one noise level, over seeds."""

    part: str
    noise_multiplier: float
    seeds: tuple[int, ...]
    accuracies: tuple[float, ...]
    trained: int
    numbers: int
    update_bytes: int

    @property
    def mean(self) -> float:
        """Mean over seeds, in [0, 1]."""
        return mean(self.accuracies)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None for a single one, which has none."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        return asdict(self) | {"mean": self.mean, "standard_deviation": self.spread}


def show(
    recipe: Recipe,
    budgets: Sequence[PrivacyReport],
    accuracies: Sequence[Accuracy],
    audits: Mapping[str, LeakageReport],
) -> None:
    """Print everything to standard output."""
    console = Console(width=100, highlight=False)
    budget_note, accuracy_note, leakage_note, limits = notes(recipe)
    console.print(_budget_table(recipe, budgets))
    console.print(fill(budget_note, 96), end="\n\n")
    console.print(_accuracy_table(budgets, accuracies))
    console.print(fill(_cost_note(accuracies) + " " + accuracy_note, 96), end="\n\n")
    console.print(_leakage_table(audits))
    console.print(fill(leakage_note, 96), end="\n\n")
    console.print(fill(limits, 96))


def notes(recipe: Recipe) -> list[str]:
    """Return what each table means, and last what none of them shows."""
    return [
        f"What it means: this bounds how much all {recipe.rounds} released models together depend "
        "on any one user. It is the same for full and for partial training: the price depends on "
        "the noise multiplier and on who takes part how often, not on how many parameters train.",
        "Each figure is a mean and standard deviation over seeds; full and partial share seeds. "
        "Differences below their spread mean nothing.",
        "What it means: one gradient of one image at untrained weights, without clip or noise, as "
        "an honest-but-curious server sees it; the attacker knows the network, the frozen part "
        "and the label. A view scores the best over itself and the views inside it, since whoever "
        "sees more may discard the rest. 'recovered' is 30 dB or more and 3 dB above the best "
        "image that needs no attack. 'ambiguous' is not 'safe': the gradients match and the image "
        "is not determined by them alone, so a prior may finish the job. Fewer parameters do not "
        "mean less leakage.",
        f"What this does not show: {recipe.users} simulated users cannot give a meaningful "
        "user-level epsilon at high accuracy; only the mechanics and the trade-off are real. "
        "The noise comes from a seed, so these models are not private. Learning rates and clip "
        "norm were chosen by hand, for digits on these test images; no epsilon covers that. "
        "Decibels certify nothing, and are never converted into an epsilon.",
    ]


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _budget_table(recipe: Recipe, budgets: Sequence[PrivacyReport]) -> Table:
    table = _table(
        f"1. Budget: one tree over {recipe.rounds} rounds, {recipe.users} users taking part once "
        f"each, clip norm {recipe.clip_norm:g}",
        ("noise multiplier", "sensitivity^2", "mu", "epsilon", "delta", "unit, adjacency"),
    )
    table.add_row("0", "", "", "no guarantee", "", "")
    for b in budgets:
        table.add_row(
            f"{b.noise_multiplier:g}",
            f"{b.sensitivity_squared:g}",
            up(b.mu, 4),
            up(b.epsilon, 4),
            f"{b.delta:g}",
            f"{b.unit}, {b.adjacency}",
        )
    return table


def _accuracy_table(budgets: Sequence[PrivacyReport], accuracies: Sequence[Accuracy]) -> Table:
    epsilon = {b.noise_multiplier: up(b.epsilon, 4) for b in budgets}
    seeds = accuracies[0].seeds
    table = _table(
        f"2. Test accuracy (%) by noise, seeds {seeds[0]} to {seeds[-1]}",
        ("noise multiplier", "epsilon", "full", "partial", "partial - full"),
    )
    by_cell = {(a.part, a.noise_multiplier): a for a in accuracies}
    for z in dict.fromkeys(a.noise_multiplier for a in accuracies):
        full, partial = by_cell["full", z], by_cell["partial", z]
        paired = [p - f for p, f in zip(partial.accuracies, full.accuracies, strict=True)]
        table.add_row(
            f"{z:g}",
            epsilon.get(z, "no guarantee"),
            _percent(full.accuracies),
            _percent(partial.accuracies),
            _percent(paired, sign="+"),
        )
    return table


def _percent(values: Sequence[float], sign: str = "") -> str:
    middle = f"{100 * mean(values):{sign}.1f}"
    return f"{middle} ± {100 * stdev(values):.1f}" if len(values) > 1 else middle


def _cost_note(accuracies: Sequence[Accuracy]) -> str:
    by_part = {a.part: a for a in accuracies}
    full, partial = by_part["full"], by_part["partial"]
    return (
        f"What it means: partial trains {partial.trained:,} of {partial.numbers:,} parameters "
        f"({partial.trained / partial.numbers:.1%}), the rest comes from a seed; a client sends "
        f"{partial.update_bytes:,} bytes instead of {full.update_bytes:,}, "
        f"{full.update_bytes / partial.update_bytes:.1f} times less."
    )


def _leakage_table(audits: Mapping[str, LeakageReport]) -> Table:
    images = len(next(iter(audits.values())).truth)
    table = _table(
        f"3. Leakage by view: PSNR in dB over {images} images, against images that need no attack",
        ("network", "view", "numbers seen", "median", "max", "best baseline", "verdict"),
    )
    for name, audit in audits.items():
        for row in audit.rows:
            table.add_row(
                name,
                row.view,
                f"{row.visible:,} ({row.share:.0%})",
                f"{median(row.psnr):.1f}",
                f"{max(row.psnr):.1f}",
                f"{median(trial.baseline for trial in row.best):.1f}",
                row.verdict,
            )
    return table
