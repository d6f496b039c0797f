"""Pages in a real browser: no complaint on its console, both schemes, A4, the keyboard.

The browser is driven by docs/chromium.py, which also looks at the pages of the site.
"""

import base64
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colors
from page_checks import contrast

from accounting import BinaryTree, Participation, PrivacyReport
from attacks.lower_bounds.bounds import Bound
from privpart.cli.audit.replica import Scored
from privpart.cli.audit.verdict import EpsilonAudit
from privpart.cli.pages import drawing
from privpart.cli.pages.budget import budget_page
from privpart.cli.pages.lower_bounds import lower_bounds_page
from privpart.cli.pages.plots import sweep_figures
from privpart.cli.pages.run import run_page, unreadable_page
from privpart.cli.pages.sweep import sweep_page
from privpart.run.evidence import Check
from privpart.run.report import RunCost, RunReport

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
from chromium import AXE, BROWSER, DRIVER, driven

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (DRIVER and BROWSER), reason="no browser: install Debian's chromium, chromium-driver"
    ),
]
RUN = Participation(64, 2, 8)
GUARANTEE = PrivacyReport.of(BinaryTree(64), RUN, noise_multiplier=3.0, delta=1e-6)
LONG = "a-very-long-name-without-a-place-to-break-" * 4


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with driven(tmp_path_factory.mktemp("profile")) as page:
        yield page


def run_report() -> RunReport:
    """Report on an unfinished run, some of whose words are long."""
    checks = (Check("chain", "verified", "21 rounds hash to it"), Check("key", "asserted", LONG))
    return RunReport(
        run_id="0" * 32, plan="1" * 64, planned_rounds=64, rounds=21, complete=False, realised=RUN,
        deviations=(), guarantee=GUARANTEE, closed=False, public_key="2" * 64, head="3" * 64,
        checks=checks,
        cost=RunCost(10**6, 4 * 10**6, 6, 1.0), measured="epsilon at least 1.2",
    )  # fmt: skip


def _sweep():
    rows = [
        {"part": part, "noise": str(z), "noise_multiplier": z, "epsilon": 4 / z if z else None,
         "delta": 1e-5, "trained": 10, "mean_accuracy": 0.5 + z / 20, "mean_metric": None,
         "standard_deviation": 0.02, "seeds": 2, "failed": 0}
        for part in ("full", LONG) for z in (0.0, 1.0, 4.0)
    ]  # fmt: skip
    figures = sweep_figures(rows, ["part", "noise"], ["noise"])
    return sweep_page(rows, ["part", "noise"], figures, ["a note"], [f"failed: {LONG}"])


def _audit():
    draws = np.random.default_rng(0)
    present = draws.random(400) < 0.5
    scored = Scored(draws.normal(size=400) + 1.5 * present, present, 1.5)
    bound = Bound("guesses", "GDP, independent canaries", 1.0, 0.9, 1e-5, 0.95)
    claimed = GUARANTEE.guarantee
    return lower_bounds_page(
        EpsilonAudit(
            {"plan": "4" * 64}, claimed, 1e-5, claimed.epsilon(1e-5), scored, (), (bound,), ()
        )
    )


def _images(folder: Path) -> str:
    """Return the options that audit an image."""
    return "--model lenet --data digits --effort quick --view full --view conv1.* --view dense2.*"


def _text(folder: Path) -> str:
    """Return the options that audit the sentences of a plan, which is written."""
    example = runpy.run_path(str(Path(__file__).with_name("test_audit_text.py")))
    (folder / "text_code.py").write_text(example["CODE"])
    (folder / "plan.toml").write_text(example["PLAN"])
    return f"--plan {folder / 'plan.toml'}"


AUDITS = {"image audit": _images, "text audit": _text}
PAGES = {
    "unfinished run": lambda: run_page(run_report()),
    "unreadable run": lambda: unreadable_page("ledger.log is damaged", (), Path("run")),
    "budget": lambda: budget_page(GUARANTEE, 5.0),
    "sweep": _sweep,
    "lower bounds": _audit,
}


@pytest.fixture(scope="module", params=sorted([*PAGES, *AUDITS]))
def file(request, privpart, tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "page.html"
    if request.param in AUDITS:
        words = ["audit", "leakage", *AUDITS[request.param](path.parent).split(), "--trials", "2"]
        done = privpart(*words, "--out", str(path.parent / "audit"), "--html", str(path))
        assert done.returncode == 0, done.stderr
        return path
    PAGES[request.param]().write(path)
    return path


WIDER = """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') &&
    !e.matches('.skip') && e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.tagName + ': ' + e.textContent.slice(0, 60))"""
TEXTS = """[...document.querySelectorAll(`h1, h2, h3, p, dd, dt, li, td, th, a, .badge, figcaption,
    strong, footer`)].filter(e => e.textContent.trim()).map(e => {
    let ground = e, own = getComputedStyle(e);
    while (ground && getComputedStyle(ground).backgroundColor === 'rgba(0, 0, 0, 0)')
        ground = ground.parentElement;
    return [e.textContent.trim().slice(0, 40), own.color,
        getComputedStyle(ground || document.documentElement).backgroundColor] })"""


def rgb(text: str) -> list[float]:
    """Return a colour as the browser writes it, in [0, 1]."""
    return [int(n) / 255 for n in re.findall(r"\d+", text)[:3]]


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [400, 1280])
def test_a_page_fits_is_readable_and_makes_no_complaint(browser, file, width, scheme):
    browser.show(file, width, scheme)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask(WIDER) == []
    paper = browser.ask("getComputedStyle(document.documentElement).backgroundColor")
    assert colors.to_hex(rgb(paper)) == ("#15181c" if scheme == "dark" else "#ffffff")
    texts = browser.ask(TEXTS)
    assert len(texts) > 5
    contrasts = [(text, contrast(rgb(ink), rgb(ground))) for text, ink, ground in texts]
    assert [pair for pair in contrasts if pair[1] < 4.5] == []
    shown = browser.ask("[...document.images].map(e => [e.naturalWidth, e.alt, e.currentSrc])")
    assert all(width > 0 and alt for width, alt, _ in shown)
    for _, _, address in shown:
        picture = base64.b64decode(address.partition(",")[2])
        if address.startswith("data:image/svg"):
            assert (
                drawing.DARK[drawing.INK] if scheme == "dark" else drawing.INK
            ).encode() in picture
    assert browser.complaints() == []


@pytest.mark.skipif(not AXE.exists(), reason="no axe: npm install axe-core, or set AXE_CORE")
@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_no_violation(browser, file, width, scheme):
    browser.show(file, width, scheme)
    assert browser.violations() == []


def test_the_keyboard_goes_through_a_page_from_top_to_bottom(browser, file):
    browser.show(file, 1280, "light")
    wanted = browser.ask("document.querySelectorAll('a, [tabindex]').length")
    seen = []
    for _ in range(wanted):
        browser.tab()
        seen.append(
            browser.ask(
                "(e => [[...document.querySelectorAll('a, [tabindex]')].indexOf(e), "
                "getComputedStyle(e).outlineStyle])(document.activeElement)"
            )
        )
    assert [number for number, _ in seen] == list(range(wanted))
    assert {outline for _, outline in seen} == {"solid"}
    assert browser.ask("document.querySelector('.skip').getAttribute('href')") == "#content"


def test_a_page_prints_on_a4_and_nothing_is_cut_off(browser, file, tmp_path):
    browser.show(file, 1280, "dark")
    printed = tmp_path / "page.pdf"
    printed.write_bytes(browser.printed())
    sizes = re.findall(rb"/MediaBox\s*\[0 0 ([0-9.]+) ([0-9.]+)\]", printed.read_bytes())
    assert 1 <= len(sizes) <= 8
    assert {(round(float(w)), round(float(h))) for w, h in sizes} <= {(595, 842), (596, 842)}
    # what the page is as wide as on paper: 180 mm within the margins, at 96 dots an inch
    browser.cdp("Emulation.setDeviceMetricsOverride", width=680, height=900, deviceScaleFactor=1,
                mobile=False)  # fmt: skip
    browser.cdp("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.ask("document.documentElement.scrollWidth") <= 680
    assert browser.ask(WIDER.replace("!e.closest('.scroll') &&", "")) == []
    paper = browser.ask("getComputedStyle(document.documentElement).backgroundColor")
    assert paper == "rgb(255, 255, 255)"
    if shutil.which("pdftotext"):
        done = subprocess.run(["pdftotext", printed, "-"], capture_output=True, text=True)
        told = "".join(done.stdout.split())
        shown = browser.ask("[...document.querySelectorAll('h1, h2, h3, strong, footer')]"
                            ".map(e => e.innerText)")  # fmt: skip
        assert [text for text in shown if "".join(text.split()) not in told] == []
