"""Committed figures: each says what made it, and those that take a minute or less are made anew.

docs/figures.toml lists pictures, tables of figures and results. What is made anew is compared as
words and as numbers, each to its last printed digit: processors round differently. A picture is
compared by the words and lines in its metadata, never by its pixels.
"""

import csv
import importlib
import json
import math
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from accounting import (
    BinaryTree,
    Grouped,
    Guarantee,
    Mechanism,
    Participation,
    PrunedTree,
    calibrate,
    error,
    gaussian,
    optimize,
)
from accounting.report import up
from attacks.defences import DefencePoint
from privpart.cli.pages.plots import draw_accuracy, draw_defences, draw_frontier

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LISTED = tomllib.loads((ROOT / "docs/figures.toml").read_text())["figure"]
NUMBER = r"(?<![\w.])[+-]?(?:\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?|\.\d+)(?!\w)"
Row = list[str]


def values(text: str) -> list[tuple[float, float]]:
    """Return the numbers of a text, each with one unit of its last digit."""
    found = []
    for token in re.findall(NUMBER, text):
        plain = token.replace(",", "")
        digits, _, power = plain.partition("e")
        found.append((float(plain), 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))))
    return found


def assert_alike(made: str, shown: str, within: float = 0.0) -> None:
    """Compare words, and numbers to one unit of the last digit, or ``within``."""
    assert re.sub(NUMBER, "#", " ".join(made.split())) == re.sub(
        NUMBER, "#", " ".join(shown.split())
    )
    for (own, unit), (other, _) in zip(values(made), values(shown), strict=True):
        assert own == pytest.approx(other, abs=max(within, 1.01 * unit)), (made, shown)


def parts(page: Path) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield each heading of a page with its tables' lines and its plain blocks."""
    heading, lines, blocks, block = "", list[str](), list[list[str]](), None
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            if block is None:
                block = [line]
            else:
                if block[0] == "```":
                    blocks.append(block[1:])
                block = None
        elif block is not None:
            block.append(line)
        elif re.match("#+ ", line):
            yield heading, lines, blocks
            heading, lines, blocks = line.lstrip("# "), [], []
        elif line.startswith("|"):
            lines.append(line)
    yield heading, lines, blocks


def rows_below(shows: str) -> list[Row]:
    """Return the cells of the tables below PAGE#HEADING, without their first two lines."""
    page, _, heading = shows.partition("#")
    (lines,) = [lines for own, lines, _ in parts(ROOT / page) if own == heading]
    rules = {i for i, line in enumerate(lines) if line.startswith("|---")}
    body = [line for i, line in enumerate(lines) if i not in rules and i + 1 not in rules]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


def is_figure(cell: str) -> bool:
    return bool(re.match(rf"[*~(]*{NUMBER}", cell) or re.search(r"^.{0,60}\d\.\d.{0,60}$", cell))


def has_figures(lines: list[str], blocks: list[list[str]]) -> bool:
    """Whether a third of the cells beside the first column are numbers, or a block has columns."""
    cells = [cell.strip() for line in lines for cell in line.strip("|").split("|")[1:]]
    numbers = sum(map(is_figure, cells))
    typed = [
        b for b in blocks if not any(re.match(r"(\$|privpart|python|make|pip) ", x) for x in b)
    ]
    columns = [line for block in typed for line in block if len(re.findall(NUMBER, line)) >= 3]
    return (numbers >= 4 and 3 * numbers >= len(cells)) or len(columns) >= 2


def test_every_figure_is_listed():
    shown = {f"{p.relative_to(ROOT)}" for p in (ROOT / "docs").glob("*.png")}
    shown |= {
        f"{p.relative_to(ROOT)}" for p in (ROOT / "benchmarks/results").rglob("*") if p.is_file()
    }
    shown |= {
        f"{page.relative_to(ROOT)}#{heading}"
        for page in PAGES
        if not page.is_relative_to(ROOT / "docs/generated")
        for heading, lines, blocks in parts(page)
        if has_figures(lines, blocks)
    }
    listed = [
        name
        for entry in LISTED
        for own in entry["shows"]
        for name in ([str(p.relative_to(ROOT)) for p in ROOT.glob(own)] if "*" in own else [own])
    ]
    assert len(listed) == len(set(listed))
    assert shown == set(listed)


def test_every_listed_figure_can_be_made_again():
    """A command whose scripts exist; a test that does so, or the commit that recorded it."""
    for entry in LISTED:
        scripts = re.findall(r"\b(?:benchmarks|examples)/\S+\.(?:py|toml)", entry["command"])
        assert all((ROOT / script).is_file() for script in scripts), entry
        if "test" in entry:
            path, _, name = entry["test"].partition("::")
            assert f"def {name}(" in (ROOT / path).read_text(), entry
        else:
            assert re.fullmatch("[0-9a-f]{7,40}", entry["commit"]), entry
        assert entry.get("seconds", 0) <= 60, entry


def test_every_commit_is_one_of_this_project():
    log = subprocess.run(
        ["git", "log", "--all", "--format=%H"], cwd=ROOT, capture_output=True, text=True
    )
    commits = log.stdout.split()
    if len(commits) < 2:
        pytest.skip("the history is not here")
    named = {entry["commit"] for entry in LISTED if "commit" in entry}
    assert not [own for own in named if not any(full.startswith(own) for full in commits)]


# Pictures


def drawn(path: Path) -> dict[str, Any]:
    """Return the words and the lines of a picture."""
    with Image.open(path) as picture:
        return dict(json.loads(picture.info["Description"]))


def assert_same_picture(made: Path, shown: Path) -> None:
    own, other = drawn(made), drawn(shown)
    assert own["words"] == other["words"]
    assert len(own["lines"]) == len(other["lines"])
    for line, kept in zip(own["lines"], other["lines"], strict=True):
        assert [v for row in line for v in row] == pytest.approx(
            [v for row in kept for v in row], rel=1e-4
        )


@pytest.fixture
def benchmark(monkeypatch):
    """Import a script of benchmarks or studies."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "examples" / "studies")
    return importlib.import_module


@pytest.mark.parametrize("script", ["figures", "who_speaks"])
def test_pictures_show_what_the_results_say(script, benchmark, tmp_path, capsys):
    benchmark(script).main(tmp_path)
    made = list(tmp_path.iterdir())
    assert made
    for path in made:
        assert_same_picture(path, ROOT / "docs" / path.name)


def test_a_picture_of_other_results_is_another_picture(benchmark, tmp_path, monkeypatch):
    """The power of the comparison: one result half a point away."""
    script = benchmark("figures")
    read = script.rows_of
    monkeypatch.setattr(
        script, "rows_of", lambda table: [r | {"metric": r["metric"] + 0.005} for r in read(table)]
    )
    monkeypatch.setattr(script, "FIGURES", {"study-images": script.FIGURES["study-images"]})
    script.main(tmp_path)
    with pytest.raises(AssertionError):
        assert_same_picture(tmp_path / "study-images.png", ROOT / "docs/study-images.png")


def test_pictures_round_epsilon_up(benchmark, tmp_path):
    """A budget of 2.00001 is never shown as 2, on an axis, above it or in a legend."""
    found = 2.00001
    rows = [r | {"epsilon": r["epsilon"] and found} for r in benchmark("figures").rows_of("words")]
    draw_frontier(rows, "", tmp_path)
    point = {"clip": 1.0, "baselines": (9.0,), "scores": (5.0,), "verdict": "no gain"}
    points = [
        DefencePoint(noise_multiplier=z, epsilon=found, delta=1e-5, **point) for z in (1.0, 2.0)
    ]
    draw_defences(points, tmp_path / "defences.png")
    report = SimpleNamespace(noise_multiplier=1.0, epsilon=found, delta=1e-5)
    row = {"part": "full", "noise_multiplier": 1.0, "trained": 1, "numbers": 2, "mean": 0.5}
    draw_accuracy([row | {"standard_deviation": None}], [report], tmp_path / "accuracy.png")
    for path in tmp_path.iterdir():
        words = " ".join(drawn(path)["words"])
        assert "2.001" in words, path.name
        assert not re.search(r"(ε = |epsilon )2(\s|$)", words)


# Tables from results


def printed_rows(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [x for x in capsys.readouterr().out.splitlines() if re.match(r"\| (?!arm|what)", x)]


@pytest.mark.parametrize(
    "script", ["accuracy_tables", "engine_tables", "figures", "who_speaks", "ratios"]
)
def test_pages_have_the_rows_that_the_results_give(
    script, benchmark, tmp_path, capsys, monkeypatch
):
    """Every row that is made stands on the page, and no row stands there that is not made."""
    module = benchmark(script)
    if script == "ratios":
        results = module.frame.RESULTS
        kept = (results / "ratios.md").read_text()
        for path in results.glob("*.json"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        monkeypatch.setattr(module.frame, "RESULTS", tmp_path)
        monkeypatch.setattr(sys, "argv", ["ratios.py"])
        module.main()
        assert_alike((tmp_path / "ratios.md").read_text(), kept)
        return
    module.main(*[tmp_path] * (script in {"figures", "who_speaks"}))
    made = printed_rows(capsys)
    if script == "who_speaks":  # the last tables are quoted in a sentence
        made = [row for row in made if len(row.split("|")) > 6]
    listed = [own for e in LISTED if e["command"].endswith(f"/{script}.py") for own in e["shows"]]
    shown = [
        "| " + " | ".join(row) + " |" for own in listed if "#" in own for row in rows_below(own)
    ]
    assert len(made) == len(shown) > 10
    for own, other in zip(made, shown, strict=True):
        assert_alike(own.replace("|", " | "), other.replace("|", " | "))


def numbers_of(found: object) -> Iterator[float]:
    """Yield the numbers of a document, those in its texts among them."""
    if isinstance(found, dict | list):
        for own in found.values() if isinstance(found, dict) else found:
            yield from numbers_of(own)
    elif isinstance(found, int | float):
        yield float(found)
    elif isinstance(found, str):
        yield from (value for value, _ in values(found))


FROM_RESULTS = {
    shows: entry["source"] for entry in LISTED if "source" in entry for shows in entry["shows"]
}
SCALES = (1, 100, 1e3, 1e-3, 1e-6, 1e-9, 2.0**-20)
"""Shares in percent; milliseconds; KB, MB, GB and MiB."""


@pytest.mark.parametrize("shows", sorted(FROM_RESULTS))
def test_numbers_of_a_table_are_in_its_source(shows, benchmark, capsys):
    """A table whose results were measured again has numbers that are nowhere."""
    known = set[float]()
    for source in FROM_RESULTS[shows]:
        if source == "printed":
            script = benchmark("example_level")
            script.table(ROOT / "benchmarks/results/example_level.csv")
            known |= set(numbers_of(capsys.readouterr().out))
        else:
            known |= set(numbers_of(json.loads((ROOT / source).read_text())))
    known |= {1 / value for value in known if value}
    places = sorted(value * scale for value in known for scale in SCALES)
    checked = 0
    for row in rows_below(shows):
        for value, unit in values(" ; ".join(row[1:])):
            checked += 1
            near = min(places, key=lambda other, value=value: abs(other - value))
            assert near == pytest.approx(value, abs=0.51 * unit + 1e-9 * abs(value)), (row, value)
    assert checked > 10


# Tables from formulas


FEDPART = (*[tuple(range(10))] * 5, *[(g,) for g in range(10) for _ in range(2)]) * 4
"""FedPart's rounds: five full ones, then two of each group, four times."""


def in_groups(
    schedule: tuple[tuple[int, ...], ...], build: Callable[[tuple[int, ...]], Mechanism]
) -> Grouped:
    """Return a mechanism per group of a schedule, over the rounds in which the group is active."""
    sizes = (9536, 36992, 36992, 73984, 147712, 8448, 295424, 590336, 33280, 2570)  # ResNet-8's
    count = 1 + max(map(max, schedule))
    active = [tuple(t for t, own in enumerate(schedule) if g in own) for g in range(count)]
    return Grouped(
        schedule, tuple(map(build, active)), sizes[:count] if count == 10 else (1,) * count
    )


def fedpart_noise() -> Iterator[str]:
    once = Participation(100)
    blt = {rounds: optimize("blt", Participation(rounds)) for rounds in (28, 100)}
    for mechanism in (
        in_groups(FEDPART, lambda own: BinaryTree(len(own))),
        in_groups(FEDPART, lambda own: PrunedTree(100, own)),
        BinaryTree(100),
        in_groups(FEDPART, lambda own: blt[len(own)]),
        blt[100],
    ):
        found, mu = error(mechanism, once), gaussian.mu(1.0, 1e-5)
        squared = mechanism.sensitivity(once).squared
        yield f"{squared} {found.rmse / mu} {found.max_error / mu}"


def noise_of_the_text_study() -> Iterator[str]:
    run, half = Participation(40, 2, 21), Participation(20, 2, 11)
    alternate = tuple((t % 2,) for t in range(40))
    blt = optimize("blt", half)
    for mechanism in (
        optimize("blt", run),
        in_groups(alternate, lambda _: blt),
        BinaryTree(40),
        in_groups(alternate, lambda own: BinaryTree(len(own))),
    ):
        z, low = (calibrate(mechanism, run, target_epsilon=e, delta=1e-4) for e in (8.0, 2.0))
        groups = mechanism.variance_by_group() if isinstance(mechanism, Grouped) else None
        variance = mechanism.prefix_variance()
        means = [variance.mean()] if groups is None else groups.mean(axis=0)
        noise = [z * math.sqrt(float(v)) for v in (*means, variance[-1])]
        yield f"{mechanism.sensitivity(run).squared} {z} {low} " + " ".join(map(str, noise))


def three_runs() -> Iterator[str]:
    for runs in (1, 2, 3):
        found = Guarantee(math.sqrt(runs) * 2 / 3)
        yield f"{found.mu} {found.epsilon(1e-6)}"


def curve() -> Iterator[str]:
    for mu in (0.1, 0.5, 1, 2, 4):
        found = Guarantee(mu)
        yield f"{found.epsilon(1e-6)} {found.advantage()} {100 * found.tpr_at_fpr(0.01)}"


def retrieval() -> Iterator[str]:
    for k, s, m in ((10_000, 384, 1_000), (10_000, 2_000, 1_000), (64, 103_556, 16)):
        up, down = m * k / 4, 2 * m * s
        sizes = [size / 1e6 for size in (m * s, up, down, up + down, k * s)]
        most = math.ceil(k * s / (k / 4 + 2 * s)) - 1
        yield " ".join(map(str, (k, s, m, *sizes, most)))


@pytest.mark.parametrize(
    ("shows", "formula"),
    [
        ("docs/fedpart.md#A noise stream per group", fedpart_noise),
        ("docs/study-text.md#What each arm costs", noise_of_the_text_study),
        (
            "docs/how-to/budget.md#The budget book: what was released about the same people",
            three_runs,
        ),
        ("docs/concepts/epsilon.md#A curve, not a number", curve),
        ("docs/federated-select.md#What does private retrieval cost?", retrieval),
    ],
)
def test_formulas_give_the_table(shows, formula):
    rows = rows_below(shows)
    for row, made in zip(rows, formula(), strict=True):
        found = [(value, unit) for value, unit in values(" ; ".join(row[1:]))]
        computed = [float(value) for value in made.split()]
        assert len(found) == len(computed), (row, computed)
        for (value, unit), own in zip(found, computed, strict=True):
            assert own - unit <= value <= own + 1.01 * unit, (row, own)


# What takes up to a minute


@pytest.mark.slow
def test_the_demo(privpart, tmp_path):
    """Accuracies within two points: rounding differs by processor, and training amplifies it."""
    done = privpart("demo", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    ((_, _, blocks),) = [
        own for own in parts(ROOT / "docs/start/install.md") if own[0] == "The demo"
    ]
    shown = [line for line in blocks[0] if re.match(r"  \S", line)]
    made = [line for line in done.stdout.splitlines() if re.match(r"  \S", line)]
    assert len(shown) == len(made) == 4 + 1 + 4 + 1 + 6 + 1
    for own, other in zip(made, shown, strict=True):
        kinds = {"±": 2.5, "recovered": 20.0, "ambiguous": 1.0}  # dB at the last bits of float64
        assert_alike(own, other, next((kinds[kind] for kind in kinds if kind in own), 0.0))
    picture, kept = drawn(tmp_path / "accuracy.png"), drawn(ROOT / "docs/accuracy.png")
    assert picture["words"] == kept["words"]
    for line, other in zip(picture["lines"], kept["lines"], strict=True):
        flat, known = ([v for row in own for v in row] for own in (line, other))
        assert flat == pytest.approx(known, abs=5.0)


@pytest.mark.slow
def test_the_picture_of_the_readme(privpart, tmp_path):
    """By the README's command. What is not recovered is an attack's best guess, and may differ."""
    (typed,) = [
        shlex.split(line.strip().removeprefix("privpart "))
        for line in (ROOT / "README.md").read_text().replace("\\\n", " ").splitlines()
        if line.startswith("privpart audit leakage")
    ]
    (entry,) = [own for own in LISTED if own["shows"] == ["docs/audit-digits.png"]]
    assert typed == shlex.split(entry["command"])[1:]
    done = privpart(*typed[: typed.index("--out")], "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    made, kept = (
        [word for word in drawn(path)["words"] if word not in ("ambiguous", "attack failed")]
        for path in (tmp_path / "leakage.png", ROOT / "docs/audit-digits.png")
    )
    for own, other in zip(made, kept, strict=True):
        recovered = own.endswith(" dB") and min(values(own)[0][0], values(other)[0][0]) > 60
        assert_alike(own, other, 20.0 if recovered else 3.0 if own.endswith(" dB") else 0.0)


def photographs_tell(path: Path) -> None:
    """The whole update gives a photograph away, the first layer shows it, the others do not."""
    scores = [values(word)[0][0] for word in drawn(path)["words"] if word.endswith(" dB")]
    for row in (scores[:5], scores[5:]):
        grey, whole, first, last, noised = row
        assert whole > 40
        assert 15 < first < 30
        assert last < grey + 3
        assert noised < grey + 1


def test_the_photographs_of_the_readme_tell_what_its_words_say():
    photographs_tell(ROOT / "docs/photographs.png")


@pytest.mark.slow
def test_the_photographs_of_the_readme(benchmark, tmp_path):
    threads = torch.get_num_threads()
    try:
        benchmark("photographs").main(tmp_path)
    finally:
        torch.set_num_threads(threads)
    photographs_tell(tmp_path / "photographs.png")


@pytest.mark.slow
def test_what_clip_and_noise_do_to_an_attack(privpart, tmp_path):
    (entry,) = [
        own for own in LISTED if own["shows"] == ["docs/how-to/audit-leakage.md#Clip and noise"]
    ]
    typed = shlex.split(entry["command"])[1:-1]
    assert "privpart " + shlex.join(typed) in " ".join(
        (ROOT / "docs/how-to/audit-leakage.md").read_text().replace("\\\n", " ").split()
    ), typed
    done = privpart(*typed, str(tmp_path), "--format", "csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    shown = rows_below("docs/how-to/audit-leakage.md#Clip and noise")
    for multiplier, epsilon, *medians in shown:
        own = [r for r in rows if float(r["noise_multiplier"]) == float(multiplier)]
        assert [r["clip"] for r in own] == ["0.1", "1.0"]
        printed = {up(float(r["epsilon"])) if r["epsilon"] else "infinite" for r in own}
        assert printed == {epsilon}
        for r, median in zip(own, medians, strict=True):
            within = 20 if float(median) > 60 else 2
            assert float(r["psnr_median"]) == pytest.approx(float(median), abs=within)
