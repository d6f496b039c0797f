"""Links inside the built site: every target exists, every anchor too. Run: python docs/links.py SITE

Links to other hosts are not fetched. A link that leaves the site is a fault.
"""

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The ids of a page, and where it leads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = {""}
        self.targets: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep ids, names of anchors, and the targets of links, images, scripts and styles."""
        for name, value in attrs:
            if name == "id" or (name == "name" and tag == "a"):
                self.ids.add(value or "")
            elif name in ("href", "src"):
                self.targets.append(value or "")


page = cache(Page)


def faults(site: Path) -> list[str]:
    """Return a line for every link of the site that leads nowhere."""
    found = []
    for path in sorted(site.rglob("*.html")):
        for target in page(path).targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            wrong = not there.is_relative_to(site.resolve()) or not there.is_file()
            if not wrong and there.suffix == ".html":
                wrong = unquote(parts.fragment) not in page(there).ids
            if wrong:
                found.append(f"{path.relative_to(site)}: {target}")
    return found


if __name__ == "__main__":
    lines = faults(Path(sys.argv[1]))
    print("\n".join(lines) or "links: every one leads somewhere")
    sys.exit(bool(lines))
