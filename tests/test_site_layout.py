"""The check of the site's layout sees what it is for; ``make docs`` runs it over all pages."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from chromium import AXE, BROWSER, DRIVER, driven
from layout import FAULTS, faults_of

WIDE = "<table><tr>" + "<td>acolumnwithalongword</td>" * 12 + "</tr></table>"
PAGES = {
    "fits": ("<p>words</p>", ""),
    "scrolls": (f'<div tabindex="0" style="overflow-x: auto">{WIDE}</div>', ""),
    "cut off": (f'<div style="overflow-x: hidden">{WIDE}</div>', "cut off"),
    "hidden by the page": (f"<style>html, body {{overflow-x: hidden}}</style>{WIDE}", "cut off"),
    "page scrolls": (WIDE, "sideways"),
    "mouse only": (f'<div style="overflow-x: auto">{WIDE}</div>', "keyboard"),
    "formula": (f'<p style="width: 90%">{"word" * 60}</p>', "runs out"),
}


def test_what_is_looked_for_is_one_expression():
    assert FAULTS.startswith("(() => {")
    assert FAULTS.endswith("})()")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with driven(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.slow
@pytest.mark.skipif(not (DRIVER and BROWSER), reason="no browser: install Debian's chromium")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_with_a_fault_is_told_from_one_without(browser, name, tmp_path):
    body, fault = PAGES[name]
    page = tmp_path / "page.html"
    page.write_text(
        f'<!doctype html><html lang="en"><title>{name}</title><main><article><h1>{name}</h1>'
        f"{body}</article></main></html>"
    )
    lines = faults_of(browser, page, 390, "light")
    if fault:
        assert any(fault in line for line in lines)
    else:
        assert [line for line in lines if not line.startswith("axe")] == []


@pytest.mark.slow
@pytest.mark.skipif(not (DRIVER and BROWSER), reason="no browser: install Debian's chromium")
@pytest.mark.skipif(not AXE.exists(), reason="no axe: npm install axe-core, or set AXE_CORE")
def test_axe_is_asked_where_it_is_installed(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        '<!doctype html><html lang="en"><title>x</title><main><h1>x</h1><a href="#y">y</a>'
        '<p id="y"><img src="x.png"></p></main></html>'
    )
    assert any(line.startswith("axe image-alt") for line in faults_of(browser, page, 390, "light"))
