"""Study of text: the tables and the figure of docs/study-text.md, from what a study wrote.

Run: ``python examples/studies/who_speaks.py``; reads benchmarks/results/who_speaks*.csv, which
``privpart frontier`` wrote as frontier.csv and final.csv, and draws docs/study-text.png.
"""

import csv
from itertools import combinations
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

from matplotlib.figure import Figure
from scipy.stats import t as student

from accounting.pages import drawing

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
MAJORITY = 33.5  # share of the test passages in the largest class, %
GUESS = 33.2  # share of the kind that most training passages are of
LEVELS = {"none": "no noise", "8": "epsilon 8", "2": "epsilon 2"}
LORA = ("LoRA", "FFA-LoRA", "RoLoRA", "LA-LoRA")
PAIRS = (*combinations(LORA, 2), *((arm, "head") for arm in LORA), ("LoRA", "full"))
Key = tuple[str, str, str]


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a table; none if it is not there."""
    path = RESULTS / name
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def by_seed(name: str) -> dict[Key, dict[str, float]]:
    """Return mechanism, level and arm -> seed -> accuracy, %."""
    found: dict[Key, dict[str, float]] = {}
    for row in rows(name):
        key = row["mechanism"], row["level"], row["arm"]
        found.setdefault(key, {})[row["seed"]] = 100 * float(row["metric"])
    return found


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean and half of Student's 95 % interval."""
    if len(values) < 2:
        return mean(values), float("nan")
    half = student.ppf(0.975, len(values) - 1) * stdev(values) / sqrt(len(values))
    return mean(values), float(half)


def table(name: str) -> None:
    """Print a table: an arm per row, a mechanism and level per column."""
    found = by_seed(name)
    columns = list(dict.fromkeys((mechanism, level) for mechanism, level, _ in found))
    arms = list(dict.fromkeys(arm for _, _, arm in found))
    sent = {row["arm"]: row for row in rows(name.replace("_final", ""))}
    print(f"\n{name}")
    heads = [f"{LEVELS[level]}{', ' + m if m != 'none' else ''}" for m, level in columns]
    print("| arm | trained | KB up | " + " | ".join(heads) + " |")
    print("|---|---|---|" + "---|" * len(columns))
    for arm in arms:
        cells = []
        for mechanism, level in columns:
            values = list(found.get((mechanism, level, arm), {}).values())
            cells.append("{:.1f} ± {:.1f}".format(*interval(values)) if values else "not run")
        trained, up = int(sent[arm]["trained"]), float(sent[arm]["bytes_up"]) / 1000
        print(f"| {arm} | {trained:,} | {up:,.0f} | " + " | ".join(cells) + " |")


def differences(name: str) -> None:
    """Print paired differences between arms, by seed: bold where the interval excludes 0."""
    found = by_seed(name)
    print(f"\n{name}, paired differences")
    for first, second in PAIRS:
        cells = []
        for mechanism, level in dict.fromkeys((m, level) for m, level, _ in found):
            a, b = (found.get((mechanism, level, arm), {}) for arm in (second, first))
            both = sorted(a.keys() & b.keys())
            if len(both) > 1:
                middle, half = interval([a[seed] - b[seed] for seed in both])
                bold = "" if abs(middle) <= half else "**"
                cells.append(f" {bold}{middle:+.1f} ± {half:.1f}{bold} |")
            else:
                cells.append(" |")
        if len(set(cells)) > 1 or cells[0] != " |":
            print(f"| {second} - {first} |" + "".join(cells))


def draw(name: str, path: Path) -> None:
    """Draw accuracy by arm at each level of noise, and against what a client sends."""
    found = by_seed(name)
    arms = list(dict.fromkeys(arm for _, _, arm in found))
    columns = list(dict.fromkeys((mechanism, level) for mechanism, level, _ in found))
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    width = 0.8 / len(columns)
    for place, (mechanism, level) in enumerate(columns):
        points = [
            (x + place * width, *interval(list(found[mechanism, level, arm].values())))
            for x, arm in enumerate(arms)
            if (mechanism, level, arm) in found
        ]
        x, y, e = zip(*points, strict=True)
        label = LEVELS[level] + ("" if mechanism == "none" else f", {mechanism}")
        left.errorbar(x, y, e, fmt="o", markersize=4, capsize=2, label=label)
    left.set_xticks([k + 0.4 - width / 2 for k in range(len(arms))], arms)
    left.set_xlim(-0.3, len(arms))
    left.set_ylabel("test accuracy, %")
    left.axhline(MAJORITY, color="grey", linestyle=":", label="the largest class")
    left.set_ylim(top=left.get_ylim()[1] + 3)
    left.legend(fontsize=7, ncols=2)
    sent = {row["arm"]: float(row["bytes_up"]) / 1000 for row in rows(name.replace("_final", ""))}
    for arm, marker in zip(arms, "os^vDP", strict=True):
        right.plot([], [], marker, color="grey", label=arm)
        for colour, key in enumerate((("none", "none"), ("blt", "8"), ("blt", "2"))):
            if (*key, arm) in found:
                y = mean(found[*key, arm].values())
                right.plot([sent[arm]], [y], marker, color=f"C{colour}")
    drawing.log_axis(right.xaxis, "KB that a client sends per round, mean")
    right.legend(fontsize=7, loc="center")
    right.set_title("means: no noise (blue), epsilon 8 (orange) and 2 (green), BLT", fontsize=8)
    drawing.save(figure, path)


def main(docs: Path = DOCS) -> None:
    """Print and draw."""
    for name in ("who_speaks_final.csv", "who_speaks_start_final.csv", "who_speaks_iid_final.csv"):
        if rows(name):
            table(name)
            differences(name)
    draw("who_speaks_final.csv", docs / "study-text.png")


if __name__ == "__main__":
    main()
