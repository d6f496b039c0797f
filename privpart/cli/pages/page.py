"""Page: a report as one HTML file that loads nothing, in the reader's light or dark scheme.

A page is a title, a verdict and sections; a section is a list of blocks, each a small frozen value.
``page.html`` beside this file lays them out. Every text is escaped there, and characters that could
hide or reorder what stands beside them are shown as escapes; a picture is the only markup that a
page takes, and ``drawing.inline_svg`` makes it. The page has no script, and tells the browser to
run and fetch none.
"""

import base64
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from matplotlib.figure import Figure

from accounting.checks import ConfigError
from accounting.report import printable
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


_NUMBER = re.compile(r"[-+≤<>~ ]*[0-9]")


@dataclass(frozen=True, slots=True)
class Facts:
    """Names with their values.

    Attributes:
        rows: pairs.
        large: whether the values are the figures that the page is about.
    """

    rows: tuple[tuple[str, str], ...]
    large: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a header; the first column is on the left, and so is every column of prose.

    Attributes:
        title: what the table shows.
        header: names of the columns.
        rows: cells; one that is a pair (tone, text) is shown as a badge.
        prose: numbers of the columns whose cells are sentences.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str | tuple[Tone, str], ...], ...]
    prose: tuple[int, ...] = ()

    @property
    def words(self) -> frozenset[int]:
        """The columns in which no cell is a number, which stand on the left."""
        return frozenset(
            number
            for number in range(len(self.header))
            if not any(_NUMBER.match(str(row[number])) for row in self.rows)
        )


@dataclass(frozen=True, slots=True)
class Prose:
    """Paragraphs."""

    paragraphs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Points:
    """A list of sentences, under a heading if it has one."""

    items: tuple[str, ...]
    heading: str = ""


@dataclass(frozen=True, slots=True)
class Badged:
    """Statements with a badge each, such as assumptions with their status.

    Attributes:
        heading: of the list; "" for none.
        items: per statement, the tone and text of its badge, its name, what it says, and what
            stands below it in small print.
    """

    heading: str
    items: tuple[tuple[Tone, str, str, str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure that was drawn by the rules of ``drawing``.

    Attributes:
        figure: the picture.
        shows: what it shows, for who cannot see it.
        caption: below it.
    """

    figure: Figure
    shows: str
    caption: str


@dataclass(frozen=True, slots=True)
class Pictures:
    """Pictures side by side, where the page is wide enough."""

    items: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class Photograph:
    """An image in pixels.

    Attributes:
        png: its bytes.
        shows: as for ``Picture``.
        caption: below it.
    """

    png: bytes
    shows: str
    caption: str

    @property
    def address(self) -> str:
        """The bytes as an address that loads nothing."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


@dataclass(frozen=True, slots=True)
class Marked:
    """Text in pieces, each with a mark: "right", "moved", "false" or "" for none.

    Attributes:
        lines: per line, what stands before it, with a tone, and the pieces.
        heading: above them.
        glue: what stands between two pieces.
    """

    heading: str
    lines: tuple[tuple[Tone, str, str, tuple[tuple[str, str], ...]], ...]
    glue: str = " "


Block = Facts | Table | Prose | Points | Badged | Picture | Pictures | Photograph | Marked


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page.

    Attributes:
        title: also in the page's list of contents.
        blocks: in order; a section without any is left out.
        lead: a sentence below the title.
    """

    title: str
    blocks: tuple[Block, ...]
    lead: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A report for people.

    Attributes:
        title: what the report is about.
        tone: of the verdict.
        verdict: the conclusion in a few words; it comes first.
        says: sentences that explain it.
        sections: in order.
        foot: where the figures come from.
    """

    title: str
    tone: Tone
    verdict: str
    says: tuple[str, ...]
    sections: tuple[Section, ...]
    foot: tuple[str, ...] = ()

    def html(self) -> str:
        """Return the page as HTML."""
        shown = [section for section in self.sections if section.blocks]
        return _template().render(
            page=self,
            sections=shown,
            svg=partial(_svg, count(1)),
            light=Markup(_variables(dark=False)),
            dark=Markup(_variables(dark=True)),
        )

    def write(self, path: str | Path) -> None:
        """Write the page to a file, which is complete or not there.

        Raises:
            ConfigError: the file cannot be written.
        """
        target = Path(path)
        text = self.html()
        # Renamed when it is whole: a reader never sees half a page.
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(target)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise ConfigError(f"html={target}: cannot be written: {error.strerror}.") from None


def _svg(numbers: "count[int]", picture: Picture) -> Markup:
    """Return a picture whose ids are its own on the page."""
    name = f"p{next(numbers)}"
    return Markup(drawing.inline_svg(picture.figure, name, printable(picture.shows)))


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
    variables = [f"--accent: {ACCENT[dark]}"]
    for tone, colours in TONES.items():
        text, ground = colours[2:] if dark else colours[:2]
        variables += [f"--{tone}: {text}", f"--{tone}-ground: {ground}"]
    for name in ("INK", "FAINT", "RULE", "PAPER"):
        colour = getattr(drawing, name)
        variables.append(f"--{name.lower()}: {drawing.DARK[colour] if dark else colour}")
    return f"{drawing.colour_variables(dark=dark)}; {'; '.join(variables)}"


def table_of(
    title: str, header: Sequence[str], rows: Sequence[Sequence[Any]], prose: Sequence[int] = ()
) -> Table:
    """Return a table from sequences; what is not text or a badge is written by ``str``."""
    cells = tuple(tuple(c if isinstance(c, tuple) else str(c) for c in row) for row in rows)
    # A pair is a badge; anything else is shown as text.
    return Table(title, tuple(header), cells, tuple(prose))
