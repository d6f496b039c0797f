"""Page of the tables that a command prints."""

from collections.abc import Sequence

from privpart.cli.output import Printed
from privpart.cli.pages.page import Block, Page, Picture, Section, Table, Tone, Verdict


def tables_page(
    title: str,
    parts: Sequence[Printed | str],
    *,
    answer: str,
    tone: Tone = "plain",
    pictures: Sequence[Picture] = (),
) -> Page:
    """Return the page of what ``print_all`` prints, below its answer in a few words.

    Sentences stand below the table that they follow.
    """
    blocks: list[Block | Table] = []
    for part in parts:
        if isinstance(part, str):
            blocks.append(Block("prose", part.strip().split("\n\n")))
        else:
            rows = [[str(cell) for cell in row] for row in part.rows]
            blocks.append(Table(part.title, part.header, rows))
    return Page(
        title,
        [Verdict(tone, answer)],
        [
            Section("Pictures", [Block("pictures", pictures)] if pictures else []),
            Section("Tables", blocks),
        ],
        "By the rules of privpart.",
    )
