"""Page: what was read of each sentence, marked token by token, as one HTML file without scripts."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from attacks.picture import COLOURS
from attacks.text.report import TextReport, TextRow, TextTrial

_STYLE = """
body { font: 15px/1.7 system-ui, sans-serif; margin: 2em auto; max-width: 60em; color: #2b2b2b }
h2 { font-size: 1em; margin: 1.6em 0 .3em } small { color: #6b6f73 }
td { vertical-align: top; padding: .15em .8em .15em 0 }
.right { background: #f2b8b0 } .moved { background: #fbe3c0 }
.false { color: #9aa0a6; text-decoration: line-through }
b { color: #fff; padding: 0 .4em; border-radius: .2em; font-weight: 600 }
"""
_LEGEND = (
    '<p><span class="right">read, and in order</span> &nbsp; <span class="moved">known to be in '
    'the batch, its place not known</span> &nbsp; not read &nbsp; <span class="false">read, but '
    "false</span></p>"
)


def text_page(
    report: TextReport, path: Path, *, words: Sequence[str] = (), sentences: int = 24
) -> None:
    """Write each true sentence with its tokens marked, and what was read, per view.

    Args:
        report: of the audit.
        path: file to write.
        words: text of each token by id; other tokens are shown as numbers.
        sentences: greatest number of sentences.
    """
    shown = range(min(sentences, len(report.truth)))
    parts = [
        f"<!doctype html><meta charset=utf-8><title>What the update gives away</title>"
        f"<style>{_STYLE}</style><h1>What the update gives away</h1>{_LEGEND}"
    ]
    for number in shown:
        truth = report.truth[number]
        parts.append(f"<h2>Sentence {number + 1}: {_plain(truth, words)}</h2><table>")
        parts += [_line(row, row.best[number], truth, words) for row in report.rows]
        parts.append("</table>")
    if len(report.truth) > len(shown):
        left = len(report.truth) - len(shown)
        parts.append(f"<p><small>{left} more sentences are in report.json.</small></p>")
    path.write_text("\n".join(parts) + "\n")


def _line(row: TextRow, trial: TextTrial, truth: Sequence[int], words: Sequence[str]) -> str:
    who = "" if row.adversary == "server" else f", {row.adversary}"
    verdict = trial.verdict
    name = f"{escape(row.view)}<br><small>{row.share:.1%} sent{who}</small>"
    badge = f'<b style="background:{COLOURS[verdict]}">{verdict}</b>'
    cells = [name, badge]
    if trial.untried is None:
        cells.append(_marked(truth, trial, words) + _read(truth, trial, words))
    return "<tr>" + "".join(f"<td>{cell}" for cell in cells)


def _marked(truth: Sequence[int], trial: TextTrial, words: Sequence[str]) -> str:
    """Return the true sentence with the tokens marked that were read."""
    known = trial.read.bag | {token for one in trial.read.sentences for token in one}
    right = {i for i, _ in aligned(truth, trial.score.found)}
    return _glue(words).join(
        _span("right" if i in right else "moved" if token in known else "", token, words)
        for i, token in enumerate(truth)
    )


def _read(truth: Sequence[int], trial: TextTrial, words: Sequence[str]) -> str:
    """Return the sentence as it was read, unless it is the true one."""
    found = trial.score.found
    if trial.score.exact or not found:
        return ""
    right = {j for _, j in aligned(truth, found)}
    told = _glue(words).join(
        _span("" if j in right else "false", token, words) for j, token in enumerate(found)
    )
    return f"<br><small>read as: {told}</small>"


def aligned(truth: Sequence[int], found: Sequence[int]) -> list[tuple[int, int]]:
    """Return positions (i, j) of a longest common subsequence.

    >>> aligned([5, 6, 7], [6, 9, 7])
    [(1, 0), (2, 2)]
    """
    longest = [[0] * (len(found) + 1) for _ in range(len(truth) + 1)]
    for i in reversed(range(len(truth))):
        for j in reversed(range(len(found))):
            longest[i][j] = (
                1 + longest[i + 1][j + 1]
                if truth[i] == found[j]
                else max(longest[i + 1][j], longest[i][j + 1])
            )
    pairs, i, j = [], 0, 0
    while i < len(truth) and j < len(found):
        if truth[i] == found[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif longest[i + 1][j] >= longest[i][j + 1]:
            i += 1
        else:
            j += 1
    return pairs


def _plain(tokens: Iterable[int], words: Sequence[str]) -> str:
    return _glue(words).join(_span("", token, words) for token in tokens)


def _glue(words: Sequence[str]) -> str:
    """Return what stands between two tokens: nothing between characters."""
    return "" if words and max(map(len, words)) == 1 else " "


def _span(mark: str, token: int, words: Sequence[str]) -> str:
    text = words[token] if 0 <= token < len(words) else f"#{token}"
    shown = escape(text if text.strip() else "\u2423")
    return f'<span class="{mark}">{shown}</span>' if mark else shown
