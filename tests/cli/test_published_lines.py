"""Every command of docs/published-budgets.md gives the figure beside it."""

import json
import re
from pathlib import Path

import pytest

PAGE = Path("docs/published-budgets.md").read_text()
PEERS = json.loads(Path("benchmarks/results/accountant_peers.json").read_text())
ROWS = re.findall(r"^\| ([\d.]+) \| .+ \| (\w+) \| `privpart (.+)` \|$", PAGE, re.MULTILINE)
BESIDE = re.findall(
    r"^\| ([\d.]+) \| (.+) \| (.+) \| ([\w.]+) \| ([\d.]+) \| `privpart (.+)` \| (.*) \|$",
    PAGE,
    re.MULTILINE,
)
"""Figures of others beside our own."""
LONG = re.compile(
    "calibrate .+ poisson|truncated|without-replacement|b-min-sep|redraw|10*00 .+ balls-in-bins|"
    "bins:bins=100|rounds 10000 |mechanisms --rounds (1600 --max-participations 5|2000)"
)
COMMANDS = [*ROWS, *((here, field, command) for *_, field, here, command, _ in BESIDE)]


@pytest.mark.parametrize(
    ("figure", "field", "command"),
    [
        pytest.param(*row, marks=[pytest.mark.slow] if LONG.search(row[2]) else [])
        for row in COMMANDS
    ],
    ids=lambda value: value[:60],
)
def test_the_command_gives_the_figure(privpart, figure, field, command):
    done = privpart(*command.split(), "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (found,) = document.get("rows", [document])
    for key in field.split("."):
        found = found[key]
    digits = len(figure.partition(".")[2])
    assert found == pytest.approx(float(figure), abs=0.51 * 10.0**-digits)


def test_a_figure_of_another_accountant_is_what_it_answered_and_a_difference_is_explained():
    calls = {row["call"]: row["figure"] for row in PEERS["rows"]}
    versions = {name.replace("-", "_").lower(): of for name, of in PEERS["packages"].items()}
    shown = set()
    for figure, of, call, _, here, _, why in BESIDE:
        digits = len(figure.partition(".")[2])
        assert bool(why) == (f"{float(here):.{digits}f}" != figure), (figure, here, why)
        if call[0] == "`":
            name, version = of.split()
            assert versions[name.lower()] == version
            assert f"{calls[call.strip('`')]:.{digits}f}" == figure
            shown.add(call.strip("`"))
    assert shown == set(calls)


def test_every_row_of_the_page_was_read():
    assert len(COMMANDS) == PAGE.count("| `privpart ")
    assert len(ROWS) >= 40
    assert len(BESIDE) >= 30
