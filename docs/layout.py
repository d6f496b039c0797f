"""What of the built site is cut off or out of the keyboard's reach, as Chromium lays it out.

Run: python docs/layout.py SITE [PAGE ...]

At the width of a laptop and of a phone: the page does not scroll sideways, nothing is wider than
what shows it unless it scrolls in its own box, and such a box takes the keyboard's focus. With
AXE_CORE, a path of axe.min.js from npm's axe-core, axe's rules too.
"""

import sys
import tempfile
from pathlib import Path

from chromium import AXE, Page, driven

LOOKS = ((1280, "light"), (390, "dark"))
"""Width in CSS pixels, and the scheme of colours in which axe judges contrast."""
# Drawers lie outside of a narrow screen until they are opened.
FAULTS = """(() => {
  const aside = '.sidebar-drawer, .toc-drawer, .skip-to-content, .visually-hidden, .unseen';
  const name = e => `${e.tagName.toLowerCase()}.${e.className} ` +
      JSON.stringify(e.textContent.trim().replace(/\\s+/g, ' ').slice(0, 50));
  const scrolls = e => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
  const hides = e => ['hidden', 'clip'].includes(getComputedStyle(e).overflowX);
  const within = (e, test) => { for (e = e.parentElement; e && e !== document.body;
      e = e.parentElement) if (test(e)) return true; return false };
  const seen = e => e.checkVisibility({checkVisibilityCSS: true}) && !e.closest(aside);
  const outside = e => { const box = e.getBoundingClientRect();
      return box.width && (box.right > innerWidth + 1 || box.left < -1) };
  const faults = [];
  const root = document.documentElement;
  if (Math.max(root.scrollWidth, document.body.scrollWidth) > innerWidth)
    faults.push('the page scrolls sideways');
  for (const e of document.body.querySelectorAll('*')) {
    if (!seen(e)) continue;
    if (outside(e) && !outside(e.parentElement) && !within(e, scrolls))
      faults.push('cut off at the edge: ' + name(e));
    if (e.clientWidth && e.scrollWidth > e.clientWidth + 1) {
      if (hides(e)) faults.push('cut off in its box: ' + name(e));
      if (scrolls(e) && e.tabIndex < 0) faults.push('not for the keyboard: ' + name(e));
    }
  }
  for (const e of document.querySelectorAll('article p, article li, article h1, article td,' +
      'article h2, article h3, article dd, article dt, article figure'))
    if (seen(e) && !within(e, scrolls) && getComputedStyle(e).display !== 'inline' &&
        e.clientWidth && e.scrollWidth > e.clientWidth + 16)
      faults.push('runs out of its box: ' + name(e));
  return faults;
})()"""


def faults_of(page: Page, file: Path, width: int, scheme: str) -> list[str]:
    """Return what is wrong with one page at one width."""
    page.show(file, width, scheme)
    faults = list(page.ask(FAULTS))
    if AXE.exists():
        faults += [f"axe {rule}: {nodes[0]}" for rule, nodes in page.violations()]
    return faults


def faults(site: Path, pages: list[Path]) -> list[str]:
    """Return a line for each fault of the site's pages, or of those that are named."""
    lines = []
    with tempfile.TemporaryDirectory() as profile, driven(Path(profile)) as page:
        for file in pages or sorted(site.rglob("*.html")):
            for width, scheme in LOOKS:
                here = f"{file.relative_to(site)} at {width}"
                lines += [f"{here}: {fault}" for fault in faults_of(page, file, width, scheme)]
    return lines


if __name__ == "__main__":
    built = Path(sys.argv[1]).resolve()
    print("\n".join(faults(built, [built / name for name in sys.argv[2:]])))
