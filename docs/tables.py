"""Markdown for the generated pages."""

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; vertical bars in cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def sentence(text: str) -> str:
    """Return the first paragraph of a docstring on one line, in Markdown."""
    return markdown(" ".join((text or "").strip().split("\n\n")[0].split()))


def markdown(text: str) -> str:
    """Return text with Sphinx's literals as Markdown's."""
    return re.sub(r"``(.+?)``", r"`\1`", text)
