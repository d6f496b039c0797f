"""Check the built site: links lead somewhere, public names have an entry, search is for users.

Run: python docs/check.py SITE

Where Chromium and its driver are installed, the layout of every page too: docs/layout.py.
Links to other hosts are not fetched. A link that leaves the site is a fault.
"""

import ast
import json
import os
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from chromium import AXE, BROWSER, DRIVER
from layout import faults
from sphinx.util.inventory import InventoryFile

PACKAGES = ("accounting", "privpart", "attacks")


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


def broken_links(site: Path) -> list[str]:
    """Return a line for every link of the site that leads nowhere; ``site`` is an absolute path."""
    found = []
    for path in sorted(site.rglob("*.html")):
        for target in sorted(set(page(path).targets)):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            there = path
            if parts.path:
                there = Path(os.path.normpath(path.parent / unquote(parts.path)))
            right = there.is_relative_to(site) and there.is_file()
            if right and there.suffix == ".html":
                right = unquote(parts.fragment) in page(there).ids
            if not right:
                found.append(f"{path.relative_to(site)}: {target}")
    return found


def names_without_entry(site: Path) -> list[str]:
    """Return the public names that the site's inventory of Python objects lacks."""
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    described = {
        name
        for kind, entries in inventory.data.items()
        if kind.startswith("py:")
        for name in entries
    }
    return sorted({f"{p}.{name}" for p in PACKAGES for name in public_names(p)} - described)


def public_names(package: str) -> list[str]:
    """Return ``__all__`` of a package as its source has it; to import three takes seconds."""
    source = (Path(__file__).parent.parent / package / "__init__.py").read_text()
    assigned = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    (names,) = [a.value for a in assigned if ast.unparse(a.targets[0]) == "__all__"]
    return list(ast.literal_eval(names))


def evidence_pages() -> list[str]:
    """Return the pages under the caption "Evidence" of the table of contents."""
    text = (Path(__file__).parent / "index.md").read_text()
    listed = text.split(":caption: Evidence\n:hidden:\n\n")[1].split("```")[0]
    return listed.split()


def evidence_in_search(site: Path) -> list[str]:
    """Return the evidence pages whose text the site's search would find."""
    text = (site / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    postings = [[where] if isinstance(where, int) else where for where in index["terms"].values()]
    searched = {index["docnames"][page] for where in postings for page in where}
    return sorted(searched.intersection(evidence_pages()))


if __name__ == "__main__":
    built = Path(sys.argv[1]).resolve()
    lines = [f"broken link: {one}" for one in broken_links(built)]
    lines += [f"no entry: {one}" for one in names_without_entry(built)]
    lines += [f"evidence in the search: {one}" for one in evidence_in_search(built)]
    looked = "links lead somewhere, every public name has an entry"
    if DRIVER and BROWSER:
        lines += [f"layout: {one}" for one in faults(built, [])]
        looked = "nothing is cut off" + ", axe finds no violation" * AXE.exists()
    print(
        "\n".join(lines) or f"site: links lead somewhere, every public name has an entry; {looked}"
    )
    sys.exit(bool(lines))
