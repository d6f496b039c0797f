"""Pages of leakage audits: what an adversary recovered of images, and of sentences."""

from collections.abc import Sequence
from pathlib import Path

from attacks import TextReport
from attacks.report import TextRow, TextTrial, Verdict
from privpart.cli.audit.tables import AnyReport, Summary
from privpart.cli.pages.page import (
    Block,
    Marked,
    Page,
    Photograph,
    Points,
    Prose,
    Section,
    Tone,
)

TONES: dict[Verdict, Tone] = {
    "recovered": "bad",
    "partial": "bad",
    "no gain": "caution",
    "ambiguous": "caution",
    "attack failed": "caution",
    "nothing sent": "plain",
    "void": "plain",
}
"""Tone of each verdict on a page, of images, too."""
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

_LEGEND = Marked(
    "Marks",
    (
        (
            "plain",
            "key",
            "",
            (
                ("right", "read, and in order"),
                ("moved", "known to be in the batch, its place not known"),
                ("", "not read"),
                ("false", "read, but false"),
            ),
        ),
    ),
    " \u00b7 ",
)
_Pieces = tuple[tuple[str, str], ...]


def leakage_page(
    report: AnyReport, summary: Summary, *, picture: Path, words: Sequence[str] = ()
) -> Page:
    """Return the page of an audit.

    Args:
        report: of the audit.
        summary: what the terminal says of it.
        picture: file of the reconstructions, as PNG; of images.
        words: text of each token by id; other tokens are shown as numbers.
    """
    blocks: tuple[Block, ...]
    if isinstance(report, TextReport):
        kind, blocks = "text", marked_sentences(report, words=words)
    else:
        photograph = Photograph(
            picture.read_bytes(),
            "True images beside the best reconstruction of each view.",
            "Truth, guesses that need no attack, and the best reconstruction of each view. The "
            "frame tells the verdict on that one picture; the table has the verdict on the view.",
        )
        kind, blocks = "images", (photograph,)
    return Page(
        f"What the update gives away: {kind}",
        TONES[report.verdict],
        _SAYS[report.verdict],
        (
            _VOID if report.verdict == "void" else _LEAD,
            *(f"Warning: {warning}" for warning in summary.warnings),
        ),
        (
            Section("What was found", blocks),
            Section("Scores", tuple(summary.tables)),
            Section("How to read them", (Points(tuple(summary.notes)),) if summary.notes else ()),
        ),
        ("By the rules of privpart audit leakage.",),
    )


def marked_sentences(
    report: TextReport, *, words: Sequence[str] = (), sentences: int = 24
) -> tuple[Block, ...]:
    """Return each true sentence with its tokens marked, and what was read, per view.

    Args:
        report: of the audit.
        words: text of each token by id; other tokens are shown as numbers.
        sentences: greatest number of sentences.
    """
    blocks: list[Block] = [_LEGEND]
    for number, truth in enumerate(report.truth[:sentences]):
        lines = [line for row in report.rows for line in _lines(row, number, truth, words)]
        sentence = _glue(words).join(_word(token, words) for token in truth)
        heading = f"Sentence {number + 1}: {sentence}"
        blocks.append(Marked(heading, tuple(lines), _glue(words)))
    if (more := len(report.truth) - sentences) > 0:
        blocks.append(Prose((f"{more} more sentences are in report.json.",)))
    return tuple(blocks)


def _lines(
    row: TextRow, number: int, truth: Sequence[int], words: Sequence[str]
) -> list[tuple[Tone, str, str, _Pieces]]:
    trial = row.best[number]
    who = "" if row.adversary == "server" else f", {row.adversary}"
    name = f"{row.view}, {row.share:.1%} sent{who}"
    tone = TONES[trial.verdict]
    # Nothing was read, so there is nothing to mark.
    if trial.untried is not None:
        return [(tone, trial.verdict, name, ())]
    guess = [(tone, str(trial.verdict), name, _marked(truth, trial, words))]
    if read := _read(truth, trial, words):
        guess.append((tone, str(trial.verdict), f"{row.view}, read as", read))
    return guess


def _marked(truth: Sequence[int], trial: TextTrial, words: Sequence[str]) -> _Pieces:
    """Return the true sentence with the tokens marked that were read."""
    bag = trial.result.bag.union(*trial.result.sentences)
    right = {i for i, _ in aligned(truth, trial.score.found)}
    return tuple(
        ("right" if i in right else "moved" if token in bag else "", _word(token, words))
        for i, token in enumerate(truth)
    )


def _read(truth: Sequence[int], trial: TextTrial, words: Sequence[str]) -> _Pieces:
    """Return the sentence as it was read, unless it is the true one."""
    guess = trial.score.found
    if trial.score.exact or not guess:
        return ()
    right = {j for _, j in aligned(truth, guess)}
    return tuple(("" if j in right else "false", _word(t, words)) for j, t in enumerate(guess))


def aligned(truth: Sequence[int], guess: Sequence[int]) -> list[tuple[int, int]]:
    """Return positions (i, j) of a longest common subsequence.

    >>> aligned([5, 6, 7], [6, 9, 7])
    [(1, 0), (2, 2)]
    """
    longest = [[0] * (len(guess) + 1) for _ in range(len(truth) + 1)]
    for i in reversed(range(len(truth))):
        for j in reversed(range(len(guess))):
            longest[i][j] = (
                1 + longest[i + 1][j + 1]
                if truth[i] == guess[j]
                else max(longest[i + 1][j], longest[i][j + 1])
            )
    pairs, i, j = [], 0, 0
    while i < len(truth) and j < len(guess):
        if truth[i] == guess[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif longest[i + 1][j] >= longest[i][j + 1]:
            i += 1
        else:
            j += 1
    return pairs


def _glue(words: Sequence[str]) -> str:
    """Return what stands between two tokens: nothing between characters."""
    return "" if words and max(map(len, words)) == 1 else " "


def _word(token: int, words: Sequence[str]) -> str:
    text = words[token] if 0 <= token < len(words) else f"#{token}"
    # A blank would be invisible between the marks.
    return text if text.strip() else "\u2423"
