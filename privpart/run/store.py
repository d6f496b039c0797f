"""Store: durable and private files of runs, their locks and their states.

A new file is created under a random name that did not exist before, readable by its owner from its
first instant, and renamed when its bytes are on the disk. So whatever lies at the name that it gets
(a link, a pipe, a file with a second name elsewhere) is replaced, and never written to. Whoever may
write in the folder could still replace the file afterwards: folders that others can write in are
refused. What is read must be a regular file, which a pipe that never answers is not.

A state file holds tensors and plain values in one safetensors file; nothing in it is ever executed.
Its hash is that of the hashes of its header and of each tensor, so that a model that is released is
hashed once, alone and in its state.
"""

import hashlib
import json
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accounting.checks import ConfigError, parsed_json

_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int32: "I32", torch.int64: "I64"}
_SCRATCH = re.compile(r"\.privpart-[0-9a-f]{32}\.part")
"""Names of files that are not complete yet."""
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OVERWRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_BLOCK = 2**20
_LONGEST_HEADER = 2**24
_LARGE, _LEAST_FILLED = 2**28, 1 / 16
"""Bytes from which on a file is refused if less than this share of it lies on the disk."""
LONGEST_LINE = 2**28
"""Bytes of a line: a file of zeros costs nothing to send, and would fill the memory."""
HANDLED = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
"""What reading values of any kind may raise; a programming error of ours is found by the tests."""


class Hashes(NamedTuple):
    """Hashes, in hex, of a state file."""

    state: str  # of all of it
    tensors: dict[str, str]  # SHA-256 of the bytes of each tensor that has any


class StorageError(RuntimeError):
    """A round could not be saved. None of it was released, and no saved round was lost."""


def make_private(folder: Path) -> None:
    """Create a folder for its owner only if there is none; check the one that is there.

    Its name is on the disk when the call returns, and so are those of the folders above it that
    were created: otherwise a power failure could take away the folder with all that was flushed in
    it. Also names that are there already are flushed, since a call that was cut off may have made
    them.

    Raises:
        ConfigError: see ``refuse_shared``.
        OSError: it cannot be created.
    """
    # Before mkdir: these names have to be flushed, too.
    missing = [above for above in folder.parents if not above.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Another process may create it at the same time; then it is checked below.
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        # Whatever the umask is.
        folder.chmod(0o700)
    refuse_shared(folder)
    oldest = missing[-1].parent if missing else folder.parent
    for new in (folder, *missing, oldest):
        # A folder that may not be listed cannot be flushed.
        with suppress(PermissionError):
            flush_directory(new.parent)


def refuse_shared(folder: Path) -> None:
    """Check that nobody else can replace what lies in a folder.

    Raises:
        ConfigError: the folder belongs to somebody else, or others can write in it.
        OSError: there is no such folder.
    """
    about = folder.stat()
    if about.st_uid != os.geteuid():
        raise ConfigError(
            f"{folder} belongs to another user (number {about.st_uid}), who can replace every file "
            "in it. Use a folder of your own, for instance a copy made by cp -r."
        )
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{folder} can be written by other users (mode {stat.S_IMODE(about.st_mode):o}), who "
            f"could replace the key or the state. Run: chmod go-w {folder}, or use another folder."
        )


def warn_if_readable(folder: Path) -> None:
    """Warn on standard error if other users can look into a folder."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o055:
        sys.stderr.write(
            f"privpart: warning: {folder} is open to other users (mode {mode:o}), and what lies in "
            f"it is to be kept secret. Run: chmod go-rwx {folder}\n"
        )


def refuse_planted(folder: Path) -> None:
    """Check that a folder holds ordinary files and folders only; see ``refuse_odd``."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_dir():
            refuse_odd(path)


def refuse_odd(path: Path) -> None:
    """Check that a path is a file of this user's under one name, or that nothing is there.

    Raises:
        ConfigError: it is a link, a folder, a pipe or a device; or a file that belongs to somebody
            else, or has a second name, under which it would be changed too.
    """
    try:
        about = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(about.st_mode):
        raise ConfigError(f"{path} is {_kind(about.st_mode)}, not a file. Remove it.")
    if about.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to another user (number {about.st_uid}), who can change it. Remove "
            "it, or replace it by a copy of your own."
        )
    if about.st_nlink > 1:
        raise ConfigError(
            f"{path} has {about.st_nlink} names (hard links): what is written to it, or erased "
            f"from it, changes under all of them. Replace it by a copy, or remove the others."
        )


def _kind(mode: int) -> str:
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"}
    return kinds.get(stat.S_IFMT(mode), "a device or socket")


def lock(path: Path, busy: str, *, patience: float = 0.0) -> FileLock:
    """Return a lock on a file, created if there is none, that this process holds till ``release``.

    ``busy`` is what to say if another process holds it after ``patience`` seconds, >= 0.

    Raises:
        ConfigError: another process holds it, or the path is not an ordinary file.
    """
    # a link here could make the lock create or empty a file elsewhere
    refuse_odd(path)
    file_lock = FileLock(path, mode=0o600)
    try:
        file_lock.acquire(timeout=patience)
    except Timeout:
        raise ConfigError(busy) from None
    return file_lock


def write_durably(path: Path, data: bytes) -> None:
    """Replace the content of ``path`` by ``data``, readable by the owner only.

    A crash at any instant leaves either the old file or the new one. The bytes, and then the name,
    are flushed to the disk before the call returns.

    Raises:
        OSError: the disk refused; the old file stays.
        ConfigError: the folder is not this user's own, see ``refuse_shared``.
    """
    with _replaced(path) as file:
        file.write(data)


@contextmanager
def _replaced(path: Path) -> Iterator[IO[bytes]]:
    refuse_shared(path.parent)
    # A name that nobody can guess, so that nobody can plant a link there.
    scratch = path.with_name(f".privpart-{secrets.token_hex(16)}.part")
    try:
        with os.fdopen(os.open(scratch, _CREATE, 0o600), "wb") as file:
            # Whatever the umask is.
            os.fchmod(file.fileno(), 0o600)
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    # The rename is on the disk only when the directory is.
    flush_directory(path.parent)


def is_scratch(name: str) -> bool:
    """Whether only ``write_durably`` and ``write_state`` give files this name."""
    return _SCRATCH.fullmatch(name) is not None


def append_durably(path: Path, data: bytes, at: int) -> None:
    """Write the bytes of a file from ``at`` on, where it ends; they are on the disk afterwards.

    What lies beyond ``at`` was left by an append that failed. It is gone from the disk before the
    first new byte is written: a power failure could mix the two otherwise.

    Raises:
        OSError: the disk refused, or the path is a link, or the file is shorter.
    """
    with os.fdopen(os.open(path, _APPEND, 0o600), "wb", buffering=0) as file:
        if _is_longer(file, path, at):
            file.truncate(at)
            os.fsync(file.fileno())
        file.seek(at)
        remaining = memoryview(data)
        try:
            while remaining:
                remaining = remaining[file.write(remaining) :]
            os.fsync(file.fileno())
        except OSError:
            # Whoever reads the file would take for durable what the disk refused.
            with suppress(OSError):
                file.truncate(at)
            raise
    if not at:
        flush_directory(path.parent)


def flush_end(path: Path, line: bytes, end: int) -> None:
    """Flush a file whose last line ends at ``end``, without what lies beyond.

    The line is written again in its place. A disk that refused it says so once: whoever flushes the
    file afterwards is told that all is well, although the line may be in memory only.

    Raises:
        OSError: the disk refused, or the path is a link, or the file is shorter.
    """
    with os.fdopen(os.open(path, _OVERWRITE), "wb") as file:
        is_longer = _is_longer(file, path, end)
        file.seek(end - len(line))
        file.write(line)
        file.flush()
        if is_longer:
            file.truncate(end)
        os.fsync(file.fileno())


def _is_longer(file: IO[bytes], path: Path, end: int) -> bool:
    """Whether a file has more bytes; one with fewer has lost some, which is an OSError."""
    if (size := os.fstat(file.fileno()).st_size) < end:
        raise OSError(f"{path} has lost bytes: it has {size} of {end}")
    return size > end


def complete_lines(file: BufferedReader) -> list[bytes]:
    """Return the lines of a file to which lines are appended, without what a crash left of one.

    Raises:
        OSError: a line is longer than ``LONGEST_LINE``.
    """
    lines, line = [], b""
    # No more than there is now: somebody may write faster than this reads.
    size = os.fstat(file.fileno()).st_size
    while file.tell() < size and (line := file.readline(LONGEST_LINE)).endswith(b"\n"):
        lines.append(line)
    if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
        raise OSError(f"line {len(lines)} is longer than {LONGEST_LINE} bytes")
    # Blocks that were never written read as zeros, which JSON never holds.
    if lines and b"\0" in lines[-1]:
        lines.pop()
    return lines


def read_small(path: Path, limit: int) -> bytes:
    """Return the content of a file of at most ``limit`` bytes.

    Raises:
        OSError: it cannot be read, is not a regular file (a link is not), or is larger.
    """
    with opened(path) as file:
        # one byte more tells a file that is too large, also one that grows meanwhile
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(f"it is larger than {limit} bytes")
    return data


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file for reading, and wait for nobody.

    Raises:
        OSError: it cannot be read, is not a regular file (a link is not), or is larger than this
            machine's memory; or it is a large hole, which costs nothing to send.
    """
    # Looked at before it is opened: a device may react to being opened.
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError(f"it is {_kind(mode)}, not a file")
    with os.fdopen(os.open(path, _READ), "rb") as file:
        # It may have been replaced between the two calls.
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError("it is not a file")
        if about.st_size > _memory():
            raise OSError(f"its {about.st_size} bytes do not fit into this machine's memory")
        if about.st_size > _LARGE and _is_hollow(file.fileno(), about):
            raise OSError(f"its {about.st_size} bytes are a hole: nearly none of them was written")
        yield file


def _is_hollow(handle: int, about: os.stat_result) -> bool:
    if about.st_blocks:
        return about.st_blocks * 512 < about.st_size * _LEAST_FILLED
    # Some file systems count no blocks, and say that byte 0 is data.
    with suppress(OSError):
        return os.lseek(handle, 0, os.SEEK_DATA) > 0
    return True


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def file_hash(path: Path) -> str:
    """Return the SHA-256, in hex, of a file; errors are those of ``opened``."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def erase_durably(path: Path) -> None:
    """Overwrite a file with zeros, flush it, and remove it, if it exists.

    A file with a second name is removed under this one only. A disk that writes elsewhere than it
    was told (flash memory, file systems that copy on write, snapshots, backups) may keep the old
    bytes: against whoever gets the disk, only encryption of the whole disk helps.

    Raises:
        OSError: the disk refused.
    """
    with suppress(FileNotFoundError):
        about = path.lstat()
        if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
            # Not truncated first: the blocks of the old bytes would be freed, not overwritten.
            with os.fdopen(os.open(path, _OVERWRITE), "wb") as file:
                for start in range(0, about.st_size, _BLOCK):
                    file.write(bytes(min(_BLOCK, about.st_size - start)))
                file.flush()
                os.fsync(file.fileno())
        remove_durably(path)


def remove_durably(path: Path) -> None:
    """Remove ``path`` if it exists, and flush its directory."""
    path.unlink(missing_ok=True)
    flush_directory(path.parent)


def flush_directory(directory: Path) -> None:
    """Flush the names in a directory: otherwise a power failure may undo a rename."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def encode_state(tensors: dict[str, Tensor], values: dict[str, Any]) -> bytes:
    """Return the bytes of a state file with these tensors and JSON values."""
    return b"".join(_parts(tensors, values).values())


def write_state(path: Path, tensors: dict[str, Tensor], values: dict[str, Any]) -> Hashes:
    """Write a state file as ``write_durably`` does; return its hashes.

    The tensors are hashed by a second thread while they are written, and never copied.

    Raises:
        OSError: the disk refused; the old file stays.
    """
    parts = _parts(tensors, values)
    with ThreadPoolExecutor(1) as thread:
        hashed = thread.map(hashlib.sha256, parts.values())
        with _replaced(path) as file:
            file.writelines(parts.values())
        return _hashes(dict(zip(parts, hashed, strict=True)))


def encoded_hash(data: bytes) -> str:
    """Return the hash of a state file with these bytes, see ``state_hash``."""
    return _hashed(BytesIO(data), len(data)).state


def state_hash(path: Path) -> str:
    """Return the hash of a state file.

    Raises:
        OSError: those of ``opened``, or the file is not a state file.
    """
    with opened(path) as file:
        return _hashed(file, os.fstat(file.fileno()).st_size).state


def _hashed(file: IO[bytes], size: int) -> Hashes:
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if length > min(size - 8, _LONGEST_HEADER):
        raise OSError("it is not a safetensors file")
    header = file.read(length)
    try:
        sizes = _sizes(parsed_json(header), size - 8 - length)
    except HANDLED:
        raise OSError("it is not a safetensors file") from None
    digests = {"": hashlib.sha256(start + header)}
    for name, count in sizes.items():
        digests[name] = hashlib.sha256()
        for at in range(0, count, _BLOCK):
            digests[name].update(file.read(min(_BLOCK, count - at)))
    return _hashes(digests)


def _sizes(header: dict[str, Any], size: int) -> dict[str, int]:
    """Return the bytes of each tensor that has any, in the order of the file, which is covered."""
    places = [(*v["data_offsets"], name) for name, v in header.items() if name != "__metadata__"]
    sizes: dict[str, int] = {}
    at = 0
    for begin, end, name in sorted(places):
        if not type(begin) is type(end) is int or begin != at or end < begin or not name:
            raise ValueError(name)
        sizes |= {name: end - begin} if end > begin else {}
        at = end
    if at != size:
        raise ValueError(at)
    return sizes


def _hashes(digests: dict[str, Any]) -> Hashes:
    """Return the hashes of a file from those of its parts; "" is the header's name."""
    whole = hashlib.sha256(b"".join(digest.digest() for digest in digests.values()))
    tensors = {name: digest.hexdigest() for name, digest in digests.items() if name}
    return Hashes(whole.hexdigest(), tensors)


def _parts(tensors: dict[str, Tensor], values: dict[str, Any]) -> dict[str, memoryview]:
    """Return a safetensors file: its header under the name "", and each tensor's bytes.

    Written here because the library's own writer copies every tensor; the library reads it.
    """
    header: dict[str, Any] = {"__metadata__": {"values": json.dumps(values, allow_nan=False)}}
    end = 0
    # The library wants wide types first, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        kind = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**kind, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # Tensors are read in place, so the first one has to be aligned.
    text += b" " * (-len(text) % 8)
    parts = {"": memoryview(len(text).to_bytes(8, "little") + text)}
    for name in names:
        flat = tensors[name].detach().contiguous().view(-1)
        if flat.numel():
            parts[name] = memoryview(flat.view(torch.uint8).numpy().data)
    return parts


def read_state(path: Path, expected: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and values of the state file whose hash is ``expected``.

    Raises:
        ConfigError: the file is missing, unreadable or larger than this machine's memory, or its
            hash differs.
    """
    try:
        digest = state_hash(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {one_line(error)}.") from None
    if digest != expected:
        raise ConfigError(
            f"{path} is not the state that the ledger names: it was changed, truncated, or "
            "restored from an older copy. Restore the newest copy, or begin a fork."
        )
    return decode_state(path)


def decode_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and values of a state file; nothing in it is ever executed.

    Raises:
        ConfigError: the file is not a valid state file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            values = parsed_json((file.metadata() or {})["values"])
    except (SafetensorError, OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{path} is not a valid state file: {error}.") from None
    return tensors, values


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Turn every error that a value of a damaged file can cause into one sentence."""
    try:
        yield
    except ConfigError:
        raise
    except HANDLED as error:
        reason = one_line(error) or type(error).__name__
        raise ConfigError(f"{path} is damaged, or not from privpart: {reason}.") from None


def one_line(error: BaseException) -> str:
    """Return the message of an error, which a library may have written, in one line.

    What a system refuses is said without its number.
    """
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        place = error.filename2 or error.filename
        text = f"{error.strerror}: {place}" if place else error.strerror
    return " ".join(text.split())[:200]


def model_hash(parameters: Tensor) -> str:
    """Return the SHA-256, in hex, of released parameters: float32, little endian, in flat order."""
    # The same bytes on every device and machine.
    flat = parameters.detach().to("cpu", torch.float32).contiguous().view(-1).numpy()
    return hashlib.sha256(flat.astype("<f4", copy=False).data).hexdigest()


def tensor_hash(tensor: Tensor) -> str:
    """Return the SHA-256, in hex, of a tensor's type, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}|".encode())
    if tensor.numel():
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
