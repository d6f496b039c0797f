"""Every command of docs/published-budgets.md gives the figure beside it."""

import json
import re
from pathlib import Path

import pytest

ROW = re.compile(r"^\| ([\d.]+) \| .+ \| (\w+) \| `privpart (.+)` \|$", re.MULTILINE)
PAGE = Path("docs/published-budgets.md").read_text()
ROWS = ROW.findall(PAGE)


@pytest.mark.parametrize(("figure", "field", "command"), ROWS, ids=lambda value: value[:60])
def test_the_command_gives_the_figure(privpart, figure, field, command):
    done = privpart(*command.split(), "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (found,) = [row[field] for row in document.get("rows", [document])]
    digits = len(figure.partition(".")[2])
    assert found == pytest.approx(float(figure), abs=0.51 * 10.0**-digits)


def test_every_row_of_the_page_was_read():
    assert len(ROWS) == PAGE.count("`privpart epsilon") + PAGE.count("`privpart mechanisms") - 1
    assert len(ROWS) > 40
