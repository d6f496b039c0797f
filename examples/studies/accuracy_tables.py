"""Tables of docs/study.md, from what ``privpart frontier`` and the study's other scripts wrote.

Run: ``python examples/studies/accuracy_tables.py``; prints Markdown from benchmarks/results/study.

Accuracies are means over seeds in percent. An interval is Student's t at 95 %, of a mean or of a
difference paired by seed, which is bold where the interval excludes zero.
"""

import csv
import math
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import stdev

from scipy.special import stdtrit
from scipy.stats import nct

from privpart.study.frontier import Interval

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "study"
ARMS = ("full", "freeze-dense1", "freeze-dense1-conv2", "last-layer")
STAGES = ("tuning", "final")
POWER = 0.8
CLAIMS = (
    *(("freeze-dense1", "tree", "full", level, 0.4) for level in ("8", "2")),
    ("freeze-dense1", "blt", "full", "2", 0.4),
    ("freeze-dense1", "bandmf", "full", "2", 0.4),
    ("freeze-dense1", "tree", "full", "none", 0.8),
    ("fedpart", "turns", "full", "none", 1.6),
    ("fedpart", "turns", "full", "8", 1.6),
    ("freeze-ffn", "words", "full", "8", 0.4),
    ("freeze-ffn", "words", "full", "none", 0.4),
)
"""Arm, study, reference, level, and the effect in points that a paper claims."""
RECORDED = (
    ("wide", "crossing", "wide-freeze", "wide-full", "8", "-9 [-15, -3]"),
    ("wide", "crossing", "wide-freeze", "wide-full", "2", "-4 [-9, +2]"),
    ("wide", "crossing", "wide-freeze", "wide-full", "none", ""),
    ("narrow", "crossing", "narrow-freeze", "narrow-full", "8", "0 [-5, +5]"),
    ("narrow", "crossing", "narrow-freeze", "narrow-full", "2", "0 [-5, +5]"),
    ("narrow", "crossing", "narrow-freeze", "narrow-full", "none", ""),
    ("narrow, new seeds", "seeds", "freeze-dense1", "full", "8", "+1.5 [-1, +4]"),
    ("narrow, new seeds", "seeds", "freeze-dense1", "full", "2", "0 [-3, +3]"),
    ("narrow, new seeds", "seeds", "freeze-dense1", "full", "none", "-0.5 [-3, +2]"),
    ("wide, new seeds", "wide", "freeze-dense1", "full", "8", "-5 [-9.5, -0.5]"),
    ("wide, new seeds", "wide", "freeze-dense1", "full", "2", "-1.5 [-6, +3]"),
    ("turns, 8 epochs", "drift", "fedpart", "full", "none", "-1 [-4, +2]"),
    ("turns, 8 epochs", "drift-noise", "fedpart", "full", "8", "0 [-5, +5]"),
    ("turns, 8 epochs", "drift-noise", "fedpart", "full", "none", ""),
)
"""What, study, part, whole, level, and the difference that was written down before."""
PARTS = ("head", "last-block", "biases", "adapters", "lora-1", "lora-4", "lora-16")
BRACKETS = (
    ("body", "8", (-5.5, -1.5)),
    ("body", "2", (-6.0, 0.0)),
    ("body", "0.5", (-10.0, 2.0)),
    ("body-seeds", "0.5", (-2.0, 4.0)),
    ("body-seeds", "0.25", (-3.0, 6.0)),
)
"""Predicted for a pretrained network, part less whole, by table and epsilon."""
WIDER = {"last-block": (-3.0, 0.0), "lora-16": (-3.0, 0.0)}
"""The same at epsilon 8 for parts that are larger."""
COSTS = (
    ("FedPT's network: tree", ("tree/tuning", "tree/final", "tree/leakage")),
    ("BLT", ("blt/tuning", "blt/final")),
    ("BandMF", ("bandmf/tuning", "bandmf/final")),
    ("turns and keys", ("turns/tuning", "turns/final")),
    ("turns, 28,000 users", ("fedpart/tuning", "fedpart/final")),
    ("users unlike", ("unlike/tuning", "unlike/final")),
    ("turns after 8 epochs", tuple(f"drift{k}/{n}" for k in ("", "-noise") for n in STAGES)),
    ("wide and narrow", tuple(f"{k}/{n}" for k in ("crossing", "seeds", "wide") for n in STAGES)),
    ("next word", ("words/tuning", "words/final")),
    ("images behind a frozen body", ("images/tuning", "images/final")),
    (
        "parts of a pretrained network",
        (
            *(f"{k}/{n}" for k in ("body", "body-seeds") for n in STAGES),
            "body/leakage",
            "body/membership",
        ),
    ),
    ("choices by `privpart tune`", ("chosen",)),
    (
        "who speaks ([text](study-text.md))",
        tuple(f"../who_speaks_{k}{n}" for k in ("", "start_") for n in STAGES),
    ),
)
"""What was computed, and the tables with its processor seconds."""
Seeds = dict[str, float]
"""Seed -> accuracy, or a difference of accuracies, in percent."""


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a table."""
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def seeds(table: str, arm: str, mechanism: str = "none", level: str = "none") -> Seeds:
    """Return what the final trainings of a group reached; nothing if it was not run."""
    if not (RESULTS / table / "final.csv").is_file():
        return {}
    group = [arm, mechanism, level]
    final = rows(f"{table}/final")
    return {r["seed"]: 100 * float(r["metric"]) for r in final if list(r.values())[:3] == group}


def less(first: Seeds, second: Seeds) -> Seeds:
    """Return the difference of two groups by seed; nothing if one was not run."""
    return {seed: first[seed] - second[seed] for seed in first if seed in second}


def rounded(value: float, digits: int = 1, *, sign: str = "-") -> str:
    """Return a number with so many digits; halves away from zero, whatever the last bit says."""
    tick = Decimal(1).scaleb(-digits)
    return f"{Decimal(repr(round(value, 9))).quantize(tick, ROUND_HALF_UP):{sign}f}"


def mean(values: Seeds, *, interval: bool = False, digits: int = 1) -> str:
    """Return a mean, with its interval if that is wanted."""
    found = Interval.of(list(values.values()))
    ends = ", ".join(rounded(end or 0.0, digits) for end in (found.low, found.high))
    return rounded(found.mean, digits) + f" [{ends}]" * interval


def gain(values: Seeds, *, sign: str = "+", digits: int = 1) -> str:
    """Return a difference with its interval; ``sign`` is "-" where its ends have no plus sign."""
    found = Interval.of(list(values.values()))
    ends = ", ".join(rounded(end or 0.0, digits, sign=sign) for end in (found.low, found.high))
    bold = "" if found.verdict("higher") == "undecided" else "**"
    return f"{bold}{rounded(found.mean, digits, sign='+')}{bold} [{ends}]"


def show(*cells: str) -> None:
    """Print a row of a table."""
    print("|" + "".join(f" {cell} |" if cell else " |" for cell in cells))


def frontier(table: str, arm: str, level: str = "none") -> dict[str, str]:
    """Return the row of a group in a frontier."""
    return next(r for r in rows(f"{table}/frontier") if (r["arm"], r["level"]) == (arm, level))


def beside_full(table: str, arms: Sequence[str], mechanism: str, level: str) -> list[str]:
    """Return a cell per arm: accuracy, and the difference to training everything."""
    full = seeds(table, "full", mechanism, level)
    found = [seeds(table, arm, mechanism, level) for arm in arms[1:]]
    others = [f"{mean(own)} ({gain(less(own, full))})" if own else "not run" for own in found]
    return [mean(full), *others]


def main_tables() -> None:
    """Print accuracy by noise and mechanism, and how noise closes the gap."""
    show("none", *beside_full("tree", ARMS, "none", "none"))
    for table, levels in (
        ("tree", ("8", "2", "0.5", "0.125")),
        ("blt", ("2", "0.5")),
        ("bandmf", ("2",)),
    ):
        for level in levels:
            z = float(frontier(table, "full", level)["noise_multiplier"])
            name = {"tree": "", "blt": "BLT, ", "bandmf": "BandMF, "}[table]
            arms = ARMS if table == "tree" else ARMS[:3]
            show(f"{name}epsilon {level}, z = {z:#.3g}", *beside_full(table, arms, table, level))
    for arm in ARMS[1:]:
        quiet = less(seeds("tree", arm), seeds("tree", "full"))
        noisy = [
            less(seeds("tree", arm, "tree", level), seeds("tree", "full", "tree", level))
            for level in ("8", "2", "0.5", "0.125")
        ]
        show(arm, *(gain(less(own, quiet), sign="-") for own in noisy))


def turns() -> None:
    """Print turns of layers and shared keys."""
    arms = ("full", "fedpart", "select-shared")
    columns = [beside_full("turns", arms, *group) for group in (("none", "none"), ("blt", "8"))]
    for arm, *cells in zip(arms, *columns, strict=True):
        row = frontier("turns", arm, "8")
        z = float(row["noise_multiplier"])
        show(arm, f"{float(row['bytes_up']):,.0f} bytes", *cells, f"{z:.3f}")


def unlike() -> None:
    """Print users who are unlike beside those who are alike."""
    gaps = {}
    for users, quiet, noisy in (
        ("unlike", "unlike", "unlike"),
        ("alike (main table)", "tree", "blt"),
    ):
        reached = {arm: (seeds(quiet, arm), seeds(noisy, arm, "blt", "2")) for arm in ARMS[:2]}
        if users == "unlike":
            for arm, pair in reached.items():
                show(f"{arm}, users unlike", *(mean(own, interval=True) for own in pair), "")
        pairs = zip(reached["freeze-dense1"], reached["full"], strict=True)
        gaps[users] = [less(own, full) for own, full in pairs]
    for users, (quiet_gap, noisy_gap) in gaps.items():
        closed = gain(less(noisy_gap, quiet_gap), sign="-") if users == "unlike" else ""
        show(f"freeze-dense1 - full, users {users}", gain(quiet_gap), gain(noisy_gap), closed)


def what_to_freeze() -> None:
    """Print what each arm takes from a client, reaches and gives away."""
    measured = {r["arm"]: r for r in rows("memory")}
    for row in rows("tree/leakage"):
        arm = row["arm"]
        own, memory = frontier("tree", arm), measured[arm]
        sizes = (int(memory[name]) / 1e6 for name in ("computed_bytes", "measured_bytes"))
        levels = (("none", "none"), ("tree", "8"), ("tree", "2"), ("tree", "0.5"))
        many = " " in row["inputs_read"]
        what = "inputs" if many else "input"
        show(
            arm,
            f"{int(own['bytes_up']):,} bytes",
            ", ".join(f"{size:.2f}" for size in sizes) + " MB",
            f"{int(own['client_flops']) / 1e6:.1f} million",
            ", ".join(mean(seeds("tree", arm, *level)) for level in levels),
            f"the {what} of {row['inputs_read'].replace(' ', ' and ')}{', exactly' * many}; "
            f"{'picture ' * many}{float(row['leakage_psnr']):.1f} dB; "
            f"rank {row['leakage_rank'].split()[0]}",
        )


def predicted() -> None:
    """Print what theory predicted beside what was measured."""
    found = {(r["level"], r["arm"]): r for r in rows("tree/predicted")}
    for level in ("8", "2", "0.5", "0.125"):
        full = found[level, "full"]
        for arm in ARMS[:2]:
            own = found[level, arm]
            values = [100 * float(own[f"{kind}_metric"]) for kind in ("predicted", "measured")]
            base = [100 * float(full[f"{kind}_metric"]) for kind in ("predicted", "measured")]
            apart = [
                rounded(v - b, sign="+") if arm != "full" else ""
                for v, b in zip(values, base, strict=True)
            ]
            share = f"{100 * float(own['noise_share']):.0f} %"
            show(level, arm, share, *map(rounded, values), *apart)


def words() -> None:
    """Print the study of next word."""
    groups = (("none", "none"), ("blt", "8"))
    for arm in ("full", "freeze-ffn"):
        sent = f"{float(frontier('words', arm)['bytes_up']):,.0f} bytes"
        found = (seeds("words", arm, *group) for group in groups)
        show(arm, sent, *(mean(own, interval=True, digits=2) for own in found))
    pairs = ([seeds("words", arm, *group) for arm in ("freeze-ffn", "full")] for group in groups)
    show("freeze-ffn - full", "", *(gain(less(*pair), digits=2) for pair in pairs))


def images() -> None:
    """Print the study of images behind a frozen body."""
    groups = (("none", "none"), ("blt", "2"))
    reached = {}
    for body in ("pretrained", "random"):
        for part in ("head", "tail"):
            arm = f"{body}-{part}"
            reached[body, part] = [seeds("images", arm, *group) for group in groups]
            row = frontier("images", arm)
            cells = [mean(own, interval=True) for own in reached[body, part]]
            sent = f"{float(row['bytes_up']):,.0f} bytes"
            show(f"{body} body, {part}", f"{int(row['trained']):,}", sent, *cells)

    def apart(first: tuple[str, str], second: tuple[str, str]) -> list[Seeds]:
        pairs = zip(reached[first], reached[second], strict=True)
        return [less(own, other) for own, other in pairs]

    gaps = {body: apart((body, "tail"), (body, "head")) for body in ("pretrained", "random")}
    for body, found in gaps.items():
        show(f"tail - head, {body}", "", "", *(gain(own, sign="-") for own in found))
    second = zip(gaps["random"], gaps["pretrained"], strict=True)
    show("the second less the first", "", "", *(gain(less(*pair), sign="-") for pair in second))
    bodies = apart(("pretrained", "head"), ("random", "head"))
    show("pretrained - random, head", "", "", *(gain(own, sign="-") for own in bodies))


def power(effect: float, deviation: float, pairs: int) -> float:
    """Return how likely a t-test of paired seeds, two-sided at 5 %, sees an effect of that size."""
    critical, shift = stdtrit(pairs - 1, 0.975), effect / deviation * math.sqrt(pairs)
    seen = nct.sf(critical, pairs - 1, shift) + nct.cdf(-critical, pairs - 1, shift)
    return float(seen)


def seeds_needed(effect: float, deviation: float) -> int:
    """Return the least number of seeds that see an effect with 80 % power; at least two."""
    low, high = 1, 2
    while power(effect, deviation, high) < POWER:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, deviation, middle) >= POWER else (middle, high)
    return high


def powers() -> None:
    """Print what the seeds of each comparison could see, and how many the claim needs."""
    for arm, table, base, level, effect in CLAIMS:
        kind = table if table in ("tree", "bandmf") else "blt"
        group = ("none", "none") if level == "none" else (kind, level)
        gaps = less(seeds(table, arm, *group), seeds(table, base, *group))
        spread, pairs = stdev(gaps.values()), len(gaps)
        visible = next(x / 100 for x in range(1, 10_000) if power(x / 100, spread, pairs) >= POWER)
        many = f"{seeds_needed(effect, spread):,}"
        noise = "none" if level == "none" else f"epsilon {level}"
        cells = (rounded(spread, 2), str(pairs), rounded(visible), f"{effect:g}", many)
        show(f"{arm} - {base}", table, noise, *cells)


def seen(spread: float, pairs: int) -> str:
    """Return the least effect, in points, that so many paired seeds see with 80 % power."""
    return rounded(next(x / 10 for x in range(1, 1_000) if power(x / 10, spread, pairs) >= POWER))


def recorded() -> None:
    """Print the predictions on record beside what came out."""
    for what, table, part, whole, level, predicted in RECORDED:
        group = ("none", "none") if level == "none" else ("blt", level)
        first, second = seeds(table, whole, *group), seeds(table, part, *group)
        if first and second:
            gaps = less(second, first)
            spread, count = stdev(gaps.values()), len(gaps)
            noise = "none" if level == "none" else f"epsilon {level}"
            cells = (predicted, mean(first), mean(second), gain(gaps), str(count))
            show(what, noise, *cells, rounded(spread), seen(spread, count))


def bodies() -> None:
    """Print the parts of a pretrained network; a dagger marks what left its predicted bracket."""
    shown = []
    for table, level, _ in BRACKETS:
        full = seeds(table, "full", "blt", level)
        shown.append(mean(full) if full else "not run")
    show("full", "76,037", *shown)
    sizes = {row["arm"]: int(row["trained"]) for row in rows("body/final")}
    for arm in PARTS:
        cells = []
        for table, level, bracket in BRACKETS:
            gaps = less(*(seeds(table, own, "blt", level) for own in (arm, "full")))
            if not gaps:
                cells.append("not run")
                continue
            low, high = WIDER.get(arm, bracket) if level == "8" else bracket
            count = len(gaps)
            mark = "" if low <= sum(gaps.values()) / count <= high else " †"
            cells.append(f"{gain(gaps)}{mark} ({seen(stdev(gaps.values()), count)})")
        show(arm, f"{sizes[arm]:,}", *cells)


def by_seed(found: Sequence[dict[str, str]]) -> Seeds:
    """Return the mean accuracy of the selections at each seed."""
    reached: dict[str, list[float]] = {}
    for row in found:
        reached.setdefault(row["seed"], []).append(100 * float(row["metric"]))
    return {seed: sum(values) / len(values) for seed, values in reached.items()}


def regret() -> None:
    """Print what a selection within the budget reaches, beside the best part and the whole."""
    real, level = rows("chosen"), "2"
    for task, table, parts in (
        ("pretrained", "body", ("full", *PARTS)),
        ("narrow", "seeds", ("full", "freeze-dense1")),
    ):
        tuned = by_seed([row for row in real if row["task"] == task])
        reached = {p: seeds(table, p, "blt", level) for p in parts}
        reached = {p: {s: values[s] for s in tuned} for p, values in reached.items()}
        show(f"{task}: `privpart tune`", mean(tuned, interval=True), "")
        if task == "pretrained":
            simulated = by_seed(rows("regret"))
            show(
                "the same, simulated", mean(simulated, interval=True), gain(less(simulated, tuned))
            )
        best = max(reached, key=lambda part: sum(reached[part].values()))
        names = {"full": "always the whole"} | {best: f"best in hindsight: {best}"}
        for part, name in names.items():
            own = reached[part]
            show(name, mean(own, interval=True), gain(less(own, tuned)))
        drawn = {s: sum(reached[p][s] for p in parts) / len(parts) for s in tuned}
        cells = mean(drawn, interval=True), gain(less(drawn, tuned))
        show(f"one of the {len(parts)}, drawn blindly", *cells)


def costs() -> None:
    """Print the processor seconds of each table, and of all in hours."""
    total = 0.0
    for name, tables in COSTS:
        spent = sum(float(row["cpu_seconds"]) for table in tables for row in rows(table))
        total += spent
        show(name, f"{spent:,.0f}")
    show("together", f"{total:,.0f}, {rounded(total / 3600)} hours")


def main() -> None:
    """Print every table."""
    for table in (
        recorded,
        main_tables,
        turns,
        unlike,
        what_to_freeze,
        predicted,
        words,
        images,
        bodies,
        regret,
        powers,
        costs,
    ):
        table()
        print()


if __name__ == "__main__":
    main()
