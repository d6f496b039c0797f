"""Database: an SQLite file that is opened as if anybody could have made it.

A file from somebody else may hold a view on an endless query in the place of a table, triggers, a
tree of pages that leads into itself, or a journal that names another file for SQLite to delete. So
a file is read only if it holds exactly the tables and indexes that one of our versions writes; its
size, the length of its values and the work of a query are bounded; and every error of SQLite
becomes one sentence.

A reader never writes beside the file. What a crash left behind, a journal to be rolled back, is
rolled back in a copy.
"""

import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from accounting.checks import ConfigError
from privpart.run.files import write_durably

LONGEST_VALUE = 2**28
"""Bytes of the longest value; the matrix of a plan is the only one of more than a few thousand."""
_LARGEST_FILE = 2**34
_MAGIC = b"SQLite format 3\0"
_NAMES_ANOTHER_FILE = bytes.fromhex("d9d505f920a163d7")
"""Last bytes of a journal of several databases at once, which no database of ours has."""
_STEPS_PER_CALL = 10_000
_HANDLED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    sqlite3.Error,
)
"""What reading values of any kind may raise; a programming error of ours is found by the tests."""


_OF_THE_MACHINE = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
)
"""Errors of SQLite that say nothing about the file."""
_PATIENCE = 60.0
"""Seconds to wait for a reader of a large ledger, or for a commit."""


def create_database(
    path: Path, tables: str, contents: Mapping[str, list[tuple[object, ...]]]
) -> None:
    """Write a new database durably: ``tables``, and the rows of each table in ``contents``.

    Raises:
        OSError: the disk refused.
    """
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.executescript(tables)
        for table, rows in contents.items():
            marks = ", ".join("?" * len(rows[0]))
            db.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        write_durably(path, db.serialize())


@contextmanager
def snapshot(path: Path, accepted: Mapping[str, str]) -> Iterator[tuple[sqlite3.Connection, str]]:
    """Yield a connection that reads one state of a database, also while another process writes it.

    Args:
        path: the database; nothing is written beside it.
        accepted: tables that a file may hold, as the statements that create them, by version.

    Yields:
        The connection, and the version that the file has.

    Raises:
        ConfigError: the file is not a database of ours, or is damaged; also for any error that a
            value in it causes inside the ``with`` statement.
    """
    try:
        with ExitStack() as stack:
            with damage_said(path):
                refuse_odd_files(path)
                db, version = _opened_to_read(path, accepted, stack)
            stack.enter_context(closing(db))
            stack.enter_context(reading(db, path))
            db.execute("PRAGMA query_only = ON")
            yield db, version
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None


def open_database(path: Path, accepted: Mapping[str, str]) -> tuple[sqlite3.Connection, str]:
    """Return a connection that may write, and the version of the file; see ``snapshot``.

    Each commit is on the disk when it returns. What a crash left behind is rolled back.

    Raises:
        ConfigError: as for ``snapshot``.
        OSError, sqlite3.Error: a fault of the machine, such as a full disk or a lock.
    """
    with damage_said(path):
        refuse_odd_files(path)
        return _opened(path, accepted, "rw")


@contextmanager
def reading(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Read one state of a database with bounded work; errors are those of ``snapshot``."""
    with damage_said(path), _bounded(db, path.stat().st_size):
        yield


@contextmanager
def damage_said(path: Path) -> Iterator[None]:
    """Turn every error that a value of a damaged file can cause into one sentence."""
    try:
        yield
    except ConfigError:
        raise
    except _HANDLED as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _OF_THE_MACHINE:
            raise
        said = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{path} is damaged, or not from privpart: {said or type(error).__name__}."
        ) from None


def refuse_odd_files(path: Path) -> None:
    """Check, without opening it by SQLite, that a file is a database that SQLite may open.

    Raises:
        ConfigError: the file or its journal is a link, a pipe or too large, or it is not a database
            that rolls back by a journal, or the journal names another file.
    """
    if not os.path.lexists(path):
        raise ConfigError(f"{path.parent} holds no run: {path.name} is missing.")
    for own in (path, journal := _beside(path, "-journal")):
        if os.path.lexists(own) and not stat.S_ISREG(own.lstat().st_mode):
            raise ConfigError(f"{own}: must be a file, not a link, pipe or folder. Remove it.")
        if own.exists() and own.stat().st_size > _LARGEST_FILE:
            raise ConfigError(f"{own}: has more than {_LARGEST_FILE:,} bytes.")
    with path.open("rb") as file:
        head = file.read(100)
    if not head.startswith(_MAGIC) or head[18:20] != b"\x01\x01":
        raise ConfigError(
            f"{path} is damaged, or not from privpart: its first bytes are not those of one."
        )
    if journal.exists() and _ends_with(journal, _NAMES_ANOTHER_FILE):
        raise ConfigError(
            f"{journal}: names another file, which SQLite would delete; no run writes such a "
            "journal. Do not trust this folder."
        )


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _ends_with(path: Path, end: bytes) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) < len(end):
            return False
        file.seek(-len(end), os.SEEK_END)
        return file.read() == end


def _opened_to_read(
    path: Path, accepted: Mapping[str, str], stack: ExitStack
) -> tuple[sqlite3.Connection, str]:
    try:
        return _opened(path, accepted, "ro")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise
    scratch = stack.enter_context(TemporaryDirectory(prefix="privpart-"))
    copy = _copy(path, Path(scratch))
    refuse_odd_files(copy)  # whoever can write in the folder may have changed it since
    return _opened(copy, accepted, "rw")


def _copy(path: Path, folder: Path) -> Path:
    for suffix in ("-journal", ""):
        shutil.copyfile(_beside(path, suffix), folder / (path.name + suffix))
    return folder / path.name


def _opened(path: Path, accepted: Mapping[str, str], mode: str) -> tuple[sqlite3.Connection, str]:
    address = f"{path.absolute().as_uri()}?mode={mode}"
    db = sqlite3.connect(address, timeout=_PATIENCE, uri=True, isolation_level=None)
    try:
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
        db.execute("PRAGMA trusted_schema = OFF")
        db.execute("PRAGMA cell_size_check = ON")
        db.execute("PRAGMA synchronous = EXTRA")  # also flushes the directory after a commit
        with _bounded(db, path.stat().st_size):
            found = _master(db)
        for version, tables in accepted.items():
            if found == _master_of(tables):
                return db, version
        raise ConfigError(
            f"{path} is damaged, or not from privpart: its tables are not those that it writes."
        )
    except BaseException:
        db.close()
        raise


@contextmanager
def _bounded(db: sqlite3.Connection, size: int) -> Iterator[None]:
    """Run a transaction; interrupt it beyond the steps that a file of ``size`` bytes can need.

    A row takes about 10 steps and 10 bytes, but a page that leads into itself never ends.
    """
    left = (10_000_000 + 4 * size) // _STEPS_PER_CALL

    def count() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    db.set_progress_handler(count, _STEPS_PER_CALL)
    try:
        db.execute("BEGIN")
        yield
    finally:
        db.set_progress_handler(None, 0)
        if db.in_transaction:
            db.execute("ROLLBACK")


def _master(db: sqlite3.Connection) -> list[tuple[object, ...]]:
    return db.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name LIMIT 100"
    ).fetchall()


def _master_of(tables: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.executescript(tables)
        return _master(db)
