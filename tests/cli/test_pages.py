"""Pages and pictures: colours to tell apart, curves that bound, text that stays text."""

import base64
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colors
from page_checks import contrast, linear_rgb, page_text

from accounting import (
    BinaryTree,
    ComposedGuarantee,
    ConfigError,
    Participation,
    PrivacyReport,
    SampledGuarantee,
    StatedGuarantee,
)
from accounting.report import Assumption
from privpart.cli.output import Table
from privpart.cli.pages import decision, drawing, page
from privpart.cli.pages.guarantee import (
    LAYERS,
    attack_curve,
    badged,
    epsilon_curve,
    guarantee_section,
)

HOSTILE = "<script>alert(1)</script> \"'&{{ 7*7 }} $x^{ \x1b[2K \u202eoops"


@pytest.mark.parametrize("dark", [False, True])
def test_colours_have_the_contrast_that_wcag_asks_for(dark):
    def shown(colour):
        return drawing.DARK[colour] if dark else colour

    paper = shown(drawing.PAPER)
    for colour in (*drawing.SERIES, drawing.INK, drawing.FAINT, page.ACCENT[dark]):
        ink = shown(colour) if colour in drawing.DARK else colour
        assert contrast(*map(colors.to_rgb, (ink, paper))) >= 4.5
    for text, ground in [own[2:] if dark else own[:2] for own in page.TONES.values()]:
        for pair in ((text, ground), (shown(drawing.INK), ground), (text, paper)):
            assert contrast(*map(colors.to_rgb, pair)) >= 4.5


# Machado, Oliveira, Fernandes 2009, severity 1: what linear RGB becomes
SIGHT = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
               [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
               [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
               [0.004733, 0.691367, 0.303900]],
    "all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
}  # fmt: skip


def lab(linear) -> np.ndarray:
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722],
                    [0.0193, 0.1192, 0.9505]]) @ np.clip(linear, 0, 1)  # fmt: skip
    f = np.cbrt(xyz / [0.9505, 1.0, 1.089])
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", sorted(SIGHT))
@pytest.mark.parametrize("dark", [False, True])
def test_the_first_three_colours_differ_for_every_kind_of_sight(sight, dark):
    """Further parts are told apart by their marker, which differs for each colour, too."""
    shown = [drawing.DARK[c] if dark else c for c in drawing.SERIES]
    linear = [linear_rgb(colors.to_rgb(own)) for own in shown]
    seen = [lab(np.array(SIGHT[sight]) @ own) for own in linear]
    assert min(np.linalg.norm(one - other) for one, other in combinations(seen[:3], 2)) > 15
    assert len(set(drawing.MARKERS)) == len(drawing.MARKERS) >= len(drawing.SERIES)


@pytest.mark.parametrize(("low", "high"), [(0.5, 12), (1, 10), (3, 4), (0.9, 1.1), (1e-9, 1e9)])
def test_ticks_are_round_numbers_between_the_ends(low, high):
    ticks = drawing.round_ticks(low, high)
    assert 1 <= len(ticks) <= 14
    assert ticks == sorted(ticks)
    assert all(low <= tick <= high for tick in ticks)
    if high / low >= 10 and high < 1e3:
        assert {f"{t:e}"[0] for t in ticks} == {"1", "2", "5"}


def test_a_log_axis_shows_1_2_5_10_and_no_minor_ticks():
    figure, axes = drawing.panel()
    axes.plot([0.9, 11], [1, 2])
    drawing.log_axis(axes.xaxis, "x")
    figure.draw_without_rendering()
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1", "2", "5", "10"]
    assert len(axes.xaxis.get_minorticklocs()) == 0


def test_a_legend_names_what_is_drawn_once_and_nothing_else():
    styles = drawing.Styles()
    _, axes = drawing.panel()
    drawing.band(axes, [1, 2], [1, 2], [0.1, None], styles.of("head", "tree"))
    drawing.legend(axes)
    assert axes.get_legend() is None
    drawing.band(axes, [3], [2], [0.1], styles.of("full", "tree"))
    drawing.band(axes, [4], [2], [0.1], styles.of("full", "tree"))
    drawing.target(axes, 1, "")
    drawing.no_noise(axes, 2.0, 0.1, label="level")
    drawing.legend(axes)
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert shown == ["head, tree", "full, tree", "level"]
    assert styles.of("full", "tree")["color"] == styles.of("full", "blt")["color"]
    assert styles.of("full", "blt")["linestyle"] == styles.of("head", "blt")["linestyle"]
    assert styles.of("full", "tree")["linestyle"] != styles.of("full", "blt")["linestyle"]


def test_a_band_is_drawn_in_order_and_is_a_bar_at_a_lone_point():
    _, axes = drawing.panel()
    drawing.band(axes, [2, 1], [20, 10], [[1, 2], [3, 4]], drawing.Styles().of())
    assert axes.lines[0].get_ydata().tolist() == [10, 20]
    corners = {tuple(point) for point in axes.collections[0].get_paths()[0].vertices.tolist()}
    assert corners == {(1, 8), (1, 14), (2, 19), (2, 23)}
    drawing.band(axes, [1], [2], [0.5], drawing.Styles().of())
    assert axes.collections[1].get_segments()[0].tolist() == [[1, 1.5], [1, 2.5]]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_ending_sets_the_format_and_no_file_holds_a_date(tmp_path, suffix):
    files = [tmp_path / f"{i}{suffix}" for i in range(2)]
    for file in files:
        figure, axes = drawing.panel(2, 2)
        drawing.title(axes, "costs $5 and $x^{")
        axes.set_xlabel("an author's \x1b[2K")
        drawing.save(figure, file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert not re.search(rb"20[23][0-9]-[01][0-9]-|CreationDate", files[0].read_bytes())
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert files[0].read_bytes().startswith(start)


@pytest.mark.parametrize("name", ["x.gif", "x", "missing/x.png"])
def test_a_picture_that_cannot_be_written_is_an_error(tmp_path, name):
    with pytest.raises(ConfigError, match="plot="):
        drawing.save(drawing.panel()[0], tmp_path / name)


@pytest.fixture(scope="module")
def report() -> PrivacyReport:
    return PrivacyReport.of(
        BinaryTree(64), Participation(64, 2, 8), noise_multiplier=3.0, delta=1e-6
    )


def stairs(x: float, xs, ys, where: str) -> float:
    """Return what a line of stairs shows at x."""
    i = int(np.searchsorted(xs, x, side="left" if where == "steps-pre" else "right"))
    return ys[i] if where == "steps-pre" else ys[i - 1]


@pytest.mark.parametrize("sampled", [False, True])
def test_the_curves_bound_at_every_point_that_is_drawn(report, sampled):
    drawn = np.random.default_rng(0)
    cost = report.cost
    if sampled:
        releases = (SampledGuarantee(1.0, 0.1, 20), StatedGuarantee(0.5, 1e-7))
        cost = ComposedGuarantee(releases)
    line = epsilon_curve(cost, 1e-6, cost.epsilon(1e-6), hidden=sampled).axes[0].lines[0]
    xs, ys = line.get_xdata(), line.get_ydata()
    for delta in 10 ** drawn.uniform(np.log10(xs[0]), np.log10(xs[-1]), 200):
        shown = stairs(delta, xs, ys, line.get_drawstyle())
        assert cost.epsilon(delta) <= shown <= cost.epsilon(delta) * 1.05
    assert xs[0] > (1e-7 if sampled else 1e-11)  # below, what is stated to fail has no epsilon
    line = attack_curve(cost).axes[0].lines[0]
    xs, ys = np.array(line.get_xdata()) / 100, np.array(line.get_ydata()) / 100
    for fpr in drawn.uniform(1e-4, 1, 200):
        shown = stairs(fpr, xs, ys, line.get_drawstyle())
        assert cost.tpr_at_fpr(fpr) <= shown <= cost.tpr_at_fpr(fpr) + 0.03


def test_every_assumption_has_its_layer():
    """A new one would be of the middle layer, silently: whoever adds it decides."""
    sources = (Path(__file__).parents[2] / "accounting").glob("*.py")
    found = set()
    for path in sources:
        found |= set(re.findall(r'Assumption\(\s*"([a-z-]+)"', path.read_text()))
        found |= set(re.findall(r'\(\s*"([a-z-]+)",\s*f?"[^"]* [^"]*"', path.read_text()))
    assert len(found) > 9
    assert found <= {code for codes in LAYERS.values() for code in codes}


def hostile_page(report: PrivacyReport) -> page.Page:
    bad = Assumption(HOSTILE, HOSTILE, "verified", HOSTILE, evidence=HOSTILE)
    figure, axes = drawing.panel()
    drawing.band(axes, [1], [1], [0], drawing.Styles().of(HOSTILE, "b"))
    drawing.target(axes, 1, HOSTILE)
    drawing.title(axes, HOSTILE)
    drawing.legend(axes)
    picture = page.Picture(figure, HOSTILE, HOSTILE)
    photograph = page.Picture(b"\x89PNG", HOSTILE, HOSTILE)
    facts = [(HOSTILE, HOSTILE)]
    pieces = [(mark, HOSTILE) for mark in ("right", "moved", "false", "")]
    blocks = (
        page.Block("facts", facts, HOSTILE),
        page.Block("figures", facts),
        Table(HOSTILE, (HOSTILE,), [(HOSTILE,), ("3",)]),
        page.Block("prose", [HOSTILE]),
        page.Block("points", [HOSTILE], HOSTILE),
        badged([bad], HOSTILE),
        page.Block("pictures", [picture, photograph]),
        page.Block("marked", [("bad", HOSTILE, HOSTILE, pieces)], HOSTILE),
    )
    sections = [page.Section(HOSTILE, blocks, HOSTILE), guarantee_section(report)]
    return page.Page(HOSTILE, [page.Verdict("bad", HOSTILE, [HOSTILE])], sections, HOSTILE)


def test_what_a_stranger_wrote_is_text(report):
    html = hostile_page(report).html()
    told = page_text(html)
    assert told.count("alert(1)") > 20
    assert told.count("{{ 7*7 }}") == told.count("alert(1)")
    images = re.findall(r"data:image/svg[^,]*,([^\"]+)", html)
    for text in (html, *(base64.b64decode(image).decode() for image in images)):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "<script" not in text
    assert len(images) == 2 * 3
    assert "default-src 'none'" in html


def test_a_section_without_blocks_is_left_out_and_a_page_is_written_whole(tmp_path):
    own = page.Section("own", [page.Block("prose", ["text"])])
    shown = page.Page("t", [page.Verdict("good", "v")], [page.Section("empty", []), own])
    assert "empty" not in shown.html()
    shown.write(tmp_path / "p.html")
    assert [path.name for path in tmp_path.iterdir()] == ["p.html"]
    with pytest.raises(ConfigError, match="html="):
        shown.write(tmp_path / "missing" / "p.html")


@pytest.mark.parametrize(
    ("command", "cells"),
    [
        (("mechanisms", "--rounds", "8", "--delta", "1e-6", "--max-participations", "1",
          "--mechanism", "tree", "--mechanism", "blt"), ("8 rounds, a client", "rmse ratio")),
        (("costs", "mcmahan_2nn"), ("mcmahan_2nn: one client", "Memory of one local step")),
    ],
)  # fmt: skip
def test_what_prints_a_table_writes_it_as_a_page_too(privpart, tmp_path, command, cells):
    """Every cell that is printed is on the page; what is printed stays the same."""
    done = privpart(*command, "--html", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == privpart(*command).stdout
    page = page_text((tmp_path / "page.html").read_text())
    assert all(cell in page for cell in cells)
    shown = {cell.strip() for line in done.stdout.splitlines() for cell in line.split("   ")}
    shown = {cell for cell in shown if cell and "─" not in cell}
    assert len(shown) > 20
    assert [cell for cell in shown if " ".join(cell.split()) not in " ".join(page.split())] == []


def test_a_page_of_tables_shows_names_as_text(tmp_path):
    tables = [Table(HOSTILE, ["a", HOSTILE], [[HOSTILE, 1]]), HOSTILE]
    html = decision.tables_page(HOSTILE, tables, answer=HOSTILE).html()
    page_text(html)
    assert "<script>" not in html
    assert "\u202e" not in html
