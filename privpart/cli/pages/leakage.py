"""Pages of leakage audits: what an adversary recovered of images, and of sentences."""

from collections.abc import Sequence
from difflib import SequenceMatcher
from pathlib import Path

from attacks import TextReport
from attacks.report import TextRow, TextTrial, Verdict
from privpart.cli.audit.tables import Summary
from privpart.cli.pages.decision import glossary
from privpart.cli.pages.page import Badge, Block, Page, Picture, Section, Tone
from privpart.cli.pages.page import Verdict as Answer

_VERDICTS: dict[Verdict, Badge] = {
    "recovered": ("bad", "Recovered: the update gives data of its client away"),
    "partial": ("bad", "Partly recovered: the update tells more than a guess would"),
    "no gain": ("caution", "Nothing beyond what needs no attack"),
    "ambiguous": ("caution", "Ambiguous: the update alone does not determine the data"),
    "attack failed": ("caution", "The attacks failed: nothing follows about privacy"),
    "nothing sent": ("plain", "Nothing was sent"),
    "void": ("plain", "Void: the given data do not explain the update"),
}
_LEAD = (
    "What the attacks that were tried find is a lower bound on what leaks. An attack that fails "
    "shows nothing."
)
_VOID = "Nothing was attacked, and nothing follows about privacy."
_MOST_SENTENCES = 24
_KEY = (
    ("right", "read, and in order"),
    ("moved", "known to be in the batch, its place not known"),
    ("", "not read"),
    ("false", "read, but false"),
)
_Pieces = list[tuple[str, str]]


def leakage_page(summary: Summary, blocks: Sequence[Block]) -> Page:
    """Return the page of an audit: the data that came back, and what the terminal says of it."""
    lead = _VOID if summary.verdict == "void" else _LEAD
    warned = [lead, *(f"Warning: {warning}" for warning in summary.warnings)]
    return Page(
        f"What the update gives away: {summary.kind}",
        [Answer(*_VERDICTS[summary.verdict], warned)],
        [
            Section("What was found", blocks),
            Section("Scores", summary.tables),
            Section("How to read them", [Block("points", summary.notes)]),
            glossary("update", "view", "lower bound"),
        ],
        "By the rules of privpart audit leakage.",
    )


def photograph(picture: Path, shows: str, caption: str) -> list[Block]:
    """Return a picture in a file as the block of a page."""
    return [Block("pictures", [Picture(picture.read_bytes(), shows, caption)])]


def marked_sentences(report: TextReport, words: Sequence[str] = ()) -> list[Block]:
    """Return each true sentence with its tokens marked, and what was read, per view.

    Tokens without a word are shown as numbers.
    """
    blocks = [Block("marked", [("plain", "key", "", _spaced(list(_KEY), " · "))], "Marks")]
    glue = _glue(words)
    for number, truth in enumerate(report.truth[:_MOST_SENTENCES]):
        lines = [line for row in report.rows for line in _lines(row, number, truth, words)]
        sentence = glue.join(_word(token, words) for token in truth)
        blocks.append(Block("marked", lines, f"Sentence {number + 1}: {sentence}"))
    if (more := len(report.truth) - _MOST_SENTENCES) > 0:
        blocks.append(Block("prose", [f"{more} more sentences are in report.json."]))
    return blocks


def _spaced(pieces: _Pieces, glue: str) -> _Pieces:
    """Return pieces with what stands between two of them."""
    return [part for piece in pieces for part in (piece, ("", glue))][:-1]


def _lines(
    row: TextRow, number: int, truth: Sequence[int], words: Sequence[str]
) -> list[tuple[Tone, str, str, _Pieces]]:
    trial = row.best[number]
    who = "" if row.adversary == "server" else f", {row.adversary}"
    (tone, _), name = _VERDICTS[trial.verdict], f"{row.view}, {row.share:.1%} sent{who}"
    # Nothing was read, so there is nothing to mark.
    if trial.untried is not None:
        return [(tone, trial.verdict, name, [])]
    marked, read = _marked(truth, trial, words)
    lines = [(tone, str(trial.verdict), name, _spaced(marked, _glue(words)))]
    if read and not trial.score.exact:
        shown = _spaced(read, _glue(words))
        lines.append((tone, str(trial.verdict), f"{row.view}, read as", shown))
    return lines


def _marked(
    truth: Sequence[int], trial: TextTrial, words: Sequence[str]
) -> tuple[_Pieces, _Pieces]:  # fmt: skip
    """Return the true sentence with the tokens marked that were read, and the one that was read."""
    guess = trial.score.found
    bag = trial.result.bag.union(*trial.result.sentences)
    true, read = [], [("false", _word(token, words)) for token in guess]
    aligned = {
        block.a + i: block.b + i
        for block in SequenceMatcher(a=truth, b=guess, autojunk=False).get_matching_blocks()
        for i in range(block.size)
    }
    for i, token in enumerate(truth):
        mark = "right" if i in aligned else "moved" if token in bag else ""
        true.append((mark, _word(token, words)))
        if i in aligned:
            read[aligned[i]] = ("", _word(token, words))
    return true, read


def _glue(words: Sequence[str]) -> str:
    """Return what stands between two tokens: nothing between characters."""
    return "" if words and max(map(len, words)) == 1 else " "


def _word(token: int, words: Sequence[str]) -> str:
    text = words[token] if 0 <= token < len(words) else f"#{token}"
    # A blank would be invisible between the marks.
    return text if text.strip() else "\u2423"
