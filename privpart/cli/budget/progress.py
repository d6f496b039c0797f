"""Progress of fits: what they have reached, on standard error, if they take long."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer

_PATIENCE = 2.0
"""Seconds between two lines."""


class _Lines(logging.Handler):
    """Print at most one record every ``_PATIENCE`` seconds, and none of a fit that is shorter."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record if the last line is long ago."""
        if time.monotonic() - self._last > _PATIENCE:
            self._last = time.monotonic()
            typer.echo(f"privpart: {record.getMessage()}", err=True)


@contextmanager
def shown_fits() -> Iterator[None]:
    """Show on standard error what the fits inside reach, every two seconds."""
    log = logging.getLogger("accounting.fit")
    lines = _Lines()
    before = log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(lines)
        log.setLevel(before)
