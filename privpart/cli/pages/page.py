"""Page: a report as one HTML file that loads nothing, in the reader's scheme, or as a PDF.

A page is a title, verdicts and sections; a section is a list of blocks, and ``page.html`` beside
this file lays out each kind of block. Every text is escaped there, and characters that could hide
or reorder what stands beside them are shown as escapes; pictures are images inside the file. The
page has no script, and tells the browser to run and fetch none.
"""

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from matplotlib.figure import Figure

from accounting.checks import ConfigError
from accounting.report import printable
from privpart.cli.output import Table
from privpart.cli.pages import drawing

Tone = Literal["good", "caution", "bad", "plain"]
TONES: Mapping[Tone, tuple[str, str, str, str]] = {
    "good": ("#0b5d3b", "#e3f4ea", "#8fdcb4", "#12291f"),
    "caution": ("#7a4a00", "#fdf1d8", "#f3c772", "#2e2512"),
    "bad": ("#a3140f", "#fde7e5", "#ff9d94", "#35171a"),
    "plain": ("#27496d", "#e7eff7", "#a5c8ec", "#172534"),
}
"""Text and ground of a tone, on light and on dark paper."""
ACCENT = ("#005a8f", "#7cc4f5")
"""Colour of links, on light and on dark paper."""
Badge = tuple[Tone, str]


@dataclass(frozen=True, slots=True)
class Block:
    """A list of items of one kind, under a heading if it has one.

    Facts, and figures in large, are pairs of a name and a value; prose and points are sentences;
    pictures are ``Picture``. Badged are statements with tone and text of a badge, a name, a
    sentence, and lines in small print. Marked are lines with a badge and a name, and pairs of
    a mark ("right", "moved", "false", "") and a piece of text.
    """

    kind: Literal["facts", "figures", "prose", "points", "badged", "marked", "pictures"]
    items: Sequence[Any]
    heading: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawn figure, or a photograph as PNG; ``shows`` is for who cannot see it."""

    content: Figure | bytes
    shows: str
    caption: str

    @property
    def addresses(self) -> list[Markup]:
        """Addresses that load nothing, for light paper and, of a figure, for dark paper."""
        if isinstance(self.content, bytes):
            kind, images = "png", [self.content]
        else:
            kind, images = "svg+xml", [svg.encode() for svg in drawing.in_two_schemes(self.content)]
        encoded = [base64.b64encode(image).decode() for image in images]
        # Base64 has no character that is markup.
        return [Markup(f"data:image/{kind};base64,{text}") for text in encoded]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page, below a sentence; one without blocks is left out."""

    title: str
    blocks: Sequence[Block | Table]
    lead: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer in a few words, sentences that explain it, and the question if there are two."""

    tone: Tone
    answer: str
    lead: Sequence[str] = ()
    question: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A report for people.

    Attributes:
        title: what the report is about.
        verdicts: the conclusions, which come first.
        sections: in order.
        foot: where the figures come from.
        annex: sections for engineers, which begin on a new sheet of paper.
    """

    title: str
    verdicts: Sequence[Verdict]
    sections: Sequence[Section]
    foot: str = ""
    annex: Sequence[Section] = ()

    def html(self) -> str:
        """Return the page as HTML."""
        sections, annex = (
            [section for section in part if section.blocks] for part in (self.sections, self.annex)
        )
        schemes = [Markup(_variables(dark=dark)) for dark in (False, True)]
        return _template().render(page=self, sections=sections, annex=annex, schemes=schemes)

    def write(self, path: str | Path) -> None:
        """Write the page to a file, which is complete or not there; NAME.pdf gets a PDF.

        Raises:
            MissingExtraError: a PDF needs a package that is not installed.
            ConfigError: the file cannot be written.
        """
        target, content = Path(path), self.html().encode()
        if target.suffix.lower() == ".pdf":
            from privpart.cli.pages.pdf import pdf_of

            content = pdf_of(self.html())
        # Renamed when it is whole: a reader never sees half a page.
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            beside.write_bytes(content)
            beside.replace(target)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise ConfigError(f"html={target}: cannot be written: {error.strerror}.") from None


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("privpart.cli", "pages"),
        # Names and errors come from files that a stranger may have written.
        autoescape=True,
        # A name that the template misspells raises, and is not shown as nothing.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    return environment.get_template("page.html")


def _shown(value: object) -> object:
    """Return text that shows every character that it has; markup stays as it is."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


def _variables(*, dark: bool) -> str:
    """Return the colours of one scheme as CSS custom properties."""
    variables = [f"--accent: {ACCENT[dark]}"]
    for tone, colours in TONES.items():
        text, ground = colours[2:] if dark else colours[:2]
        variables += [f"--{tone}: {text}", f"--{tone}-ground: {ground}"]
    for name in ("INK", "FAINT", "RULE", "PAPER"):
        colour = getattr(drawing, name)
        variables.append(f"--{name.lower()}: {drawing.DARK[colour] if dark else colour}")
    return "; ".join(variables)
