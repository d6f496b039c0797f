"""What holds of every page: its tags match, it loads nothing, and its ids are its own."""

import re
from html.parser import HTMLParser

import numpy as np

VOID = {"meta", "img", "br", "source"}


class WellFormed(HTMLParser):
    """Collects ids, addresses and text, and fails where tags do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.ids, self.loads, self.tags, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def linear_rgb(colour) -> np.ndarray:
    """Return red, green and blue in [0, 1] as amounts of light."""
    own = np.asarray(colour, dtype=float)
    return np.where(own <= 0.04045, own / 12.92, ((own + 0.055) / 1.055) ** 2.4)


def contrast(one, other) -> float:
    """Return the contrast of two colours, as WCAG defines it."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    low, high = sorted(float(weights @ linear_rgb(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def page_text(html: str) -> str:
    """Return the text of a page, after what holds of every page was checked."""
    found = WellFormed()
    found.feed(html)
    assert not found.open
    assert len(found.ids) == len(set(found.ids))
    assert not {"script", "iframe", "link", "object"} & set(found.tags)
    assert all(
        value.startswith(("#", "data:image/png;base64,", "data:image/svg+xml;base64,"))
        for value in found.loads
    )
    assert all(value[1:] in found.ids for value in found.loads if value.startswith("#"))
    assert not re.search(r"url\((?!#)", html)
    assert "@import" not in html
    return " ".join("".join(found.text).split())
