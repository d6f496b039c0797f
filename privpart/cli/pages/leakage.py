"""Pages of leakage audits: what an adversary recovered of images, and of sentences."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table as RichTable

from accounting.pages.page import Block, Page, Photograph, Points, Section, Table, table_of
from attacks import LeakageReport, TextReport
from attacks.report import Verdict
from attacks.text.page import TONES, marked_sentences
from privpart.cli.audit.tables import Told

_SAYS: dict[Verdict, str] = {
    "recovered": "Recovered: the update gives data of its client away",
    "partial": "Partly recovered: the update tells more than a guess would",
    "no gain": "Nothing beyond what needs no attack",
    "ambiguous": "Ambiguous: the update alone does not determine the data",
    "attack failed": "The attacks failed: nothing follows about privacy",
    "nothing sent": "Nothing was sent",
    "void": "Void: the given data do not explain the update",
}
_LEAD = (
    "What the attacks that were tried find is a lower bound on what leaks. An attack that fails "
    "shows nothing."
)
_VOID = "Nothing was attacked, and nothing follows about privacy."


def leakage_page(report: LeakageReport, told: Told, picture: Path) -> Page:
    """Return the page of an audit of images.

    Args:
        report: of the audit.
        told: what the terminal says of it.
        picture: file of the reconstructions, as PNG.
    """
    shown = Photograph(
        picture.read_bytes(),
        "True images beside the best reconstruction of each view.",
        "Truth, guesses that need no attack, and the best reconstruction of each view. The frame "
        "tells the verdict on that one picture; the table has the verdict on the view.",
    )
    return _page("What the update gives away: images", report.verdict, (shown,), told)


def text_leakage_page(report: TextReport, words: Sequence[str], told: Told) -> Page:
    """Return the page of an audit of sentences; arguments as for ``leakage_page``."""
    blocks = marked_sentences(report, words=words)
    return _page("What the update gives away: text", report.verdict, blocks, told)


def _page(title: str, verdict: Verdict, found: Sequence[Block], told: Told) -> Page:
    lead = _VOID if verdict == "void" else _LEAD
    return Page(
        title,
        TONES[verdict],
        _SAYS[verdict],
        (lead, *(f"Warning: {warning}" for warning in told.warnings)),
        (
            Section("What was found", tuple(found)),
            Section("Scores", tuple(page_table(table) for table in told.tables)),
            Section("How to read them", (Points(tuple(told.notes)),) if told.notes else ()),
        ),
        ("By the rules of privpart audit leakage.",),
    )


def page_table(table: RichTable) -> Table:
    """Return a table of the terminal as one of a page, its verdict where nobody must scroll."""
    columns = list(table.columns)
    columns[1:] = sorted(columns[1:], key=lambda column: column.header != "verdict")
    header = [str(column.header) for column in columns]
    rows = list(zip(*(map(str, column.cells) for column in columns), strict=True))
    return table_of(str(table.title or ""), header, rows)
