"""PDF: a page on paper, made without a browser.

The file is tagged for screen readers (PDF/UA-1), has its fonts inside, and no address of the
machine that wrote it. The same page gives the same bytes where the same fonts are installed.
"""

import logging
import os

from accounting.checks import MissingExtraError


def pdf_of(html: str) -> bytes:
    """Return a page as a PDF of A4 sheets.

    Nothing is fetched: pictures are inside the page, and any other address is refused.

    Raises:
        MissingExtraError: WeasyPrint or the system's Pango, which it draws text with, is missing.
    """
    try:
        from weasyprint import HTML
        from weasyprint.urls import URLFetcher
    except (ImportError, OSError) as error:  # OSError: a library of the system
        raise MissingExtraError(
            "html: a PDF needs WeasyPrint and Pango: pip install 'privpart[pdf]', and on Debian "
            f"apt install libpango-1.0-0 libpangoft2-1.0-0 ({str(error).splitlines()[0]}). "
            "A name that ends in .html needs neither."
        ) from None
    logging.getLogger("fontTools").setLevel(logging.ERROR)  # it lists each table that it drops
    fetcher = URLFetcher(allowed_protocols=["data"])
    timed = os.environ.get("SOURCE_DATE_EPOCH")
    try:  # else each font in the file names the second in which it was cut to its letters
        os.environ["SOURCE_DATE_EPOCH"] = timed or "0"
        document: bytes = HTML(string=html, url_fetcher=fetcher).write_pdf(pdf_variant="pdf/ua-1")
        return document
    finally:
        if timed is None:
            del os.environ["SOURCE_DATE_EPOCH"]
