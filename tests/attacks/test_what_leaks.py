"""The tables of docs/what-leaks.md are those of the results that the scripts wrote."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "what-leaks.md").read_text().splitlines()


@pytest.fixture(scope="module")
def printed():
    """Return the tables that both scripts print of what is in results/, as lines."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in ("benchmarks", "examples/studies"):
            patch.syspath_prepend(ROOT / folder)
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            patch.setenv(name, "1")  # which the scripts set, for themselves only
        peers, leaks = map(importlib.import_module, ("audit_peers", "leakage_map"))
    results = [json.loads(module.RESULT.read_text()) for module in (peers, leaks)]
    return [
        peers.table(peers.summary(results[0]["runs"])).splitlines(),
        leaks.table(results[1]).splitlines(),
    ]


def rows(lines):
    return [line for line in lines if line.startswith("|") and not line.startswith("|---")]


def test_every_printed_row_stands_in_the_docs(printed):
    for line in rows([*printed[0], *printed[1]]):
        assert DOCS.count(line) >= 1, line


def test_every_row_of_the_docs_with_a_share_or_a_rate_was_printed(printed):
    """A row that no result supports is found by its columns: a share, or an interval."""
    known = set(printed[0]) | set(printed[1])
    ours = DOCS[: DOCS.index("## Who took part")]  # whose rows tests/test_figures.py compares
    measured = [line for line in rows(ours) if " % | " in line or "% to " in line]
    assert len(measured) > 30
    assert [line for line in measured if line not in known] == []
