"""Traced process: see, refuse or cut short each system call by which a process changes files.

``traced`` forks a child and follows it with ptrace, stopping only at the calls that a seccomp
filter names; so it sees what any library does inside its C code, and needs no
compiler. For Linux on x86-64. The caller must have no other children.
"""

import ctypes
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

AVAILABLE = sys.platform == "linux" and platform.machine() == "x86_64"

_BY_NAME = {
    "read": 0, "write": 1, "open": 2, "pread": 17, "pwrite": 18, "readv": 19, "writev": 20,
    "sendfile": 40, "fsync": 74, "fdatasync": 75, "truncate": 76, "ftruncate": 77, "rename": 82,
    "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88,
    "openat": 257, "mkdirat": 258, "unlinkat": 263, "renameat": 264, "linkat": 265,
    "symlinkat": 266, "fallocate": 285, "pwritev": 296, "renameat2": 316,
    "copy_file_range": 326, "pwritev2": 328,
}  # fmt: skip
_NAMES = {number: name for name, number in _BY_NAME.items()}
_AT_REMOVEDIR = 0x200
_CONT, _GETREGS, _SETREGS, _SYSCALL = 7, 12, 13, 24
_TRACEME, _SETOPTIONS = 0, 0x4200
_SYSGOOD, _CLONE, _SECCOMP, _EXITKILL = 1, 8, 0x80, 0x100000
_SECCOMP_STOP = signal.SIGTRAP | 7 << 8
_EXIT_STOP = signal.SIGTRAP | 0x80
_ALL_THREADS = 0x40000000


@dataclass(frozen=True, slots=True)
class Call:
    """A system call on a file or folder, before it is made.

    Attributes:
        name: "open", "read", "write", "sync", "truncate", "rename", "unlink", "mkdir", "link" or
            the kernel's name of a call that is none of these.
        path: the file or folder; of a rename or link, the old name.
        to: of a rename or link, the new name.
        flags: of an open.
        offset: of a read or write; of a truncation, the new length.
        data: of a write.
    """

    name: str
    path: str
    to: str = ""
    flags: int = 0
    offset: int = 0
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Fail the call with this error number; the kernel never sees the call."""

    error: int


@dataclass(frozen=True, slots=True)
class Shorten:
    """Let the call write its first bytes only."""

    length: int


class Kill:
    """End the process with SIGKILL before the call."""


def traced(
    work: Callable[[], None],
    before: Callable[[Call], Refuse | Shorten | type[Kill] | None],
    after: Callable[[Call], None] = lambda call: None,
) -> int:
    """Run ``work`` in a child; return its exit status, or minus the signal that ended it.

    ``before`` is asked before each call, while the child and its disk stand still; ``after`` is
    told of each call that succeeded, with the bytes that were really written. The status is 70 if
    ``work`` raised an exception, which is printed to standard error.
    """
    child = os.fork()
    if child == 0:
        _be_traced(work)
    return _Tracer(child, before, after).run()


def _be_traced(work: Callable[[], None]) -> None:
    status = 70
    try:
        _ptrace(_TRACEME, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        _filter_calls()
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


_REGISTERS = """
    r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base
    gs_base ds es fs gs
"""


class _Registers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in _REGISTERS.split()]


class _Tracer:
    def __init__(self, child, before, after) -> None:
        self.child, self.before, self.after = child, before, after
        self.under_way: dict[int, Call] = {}
        self.seen: set[int] = set()

    def run(self) -> int:
        os.waitpid(self.child, 0)
        self.seen.add(self.child)
        _ptrace(_SETOPTIONS, self.child, 0, _SYSGOOD | _CLONE | _SECCOMP | _EXITKILL)
        _ptrace(_CONT, self.child, 0, 0)
        self.memory = os.open(f"/proc/{self.child}/mem", os.O_RDONLY)
        try:
            while True:
                thread, status = os.waitpid(-1, _ALL_THREADS)
                if os.WIFSTOPPED(status):
                    self._stopped(thread, status >> 8)
                elif thread == self.child:
                    return os.waitstatus_to_exitcode(status)
        finally:
            os.close(self.memory)

    def _stopped(self, thread: int, why: int) -> None:
        if why == _SECCOMP_STOP:
            self._entering(thread)
        elif why == _EXIT_STOP:
            self._leaving(thread)
        else:
            new = thread not in self.seen
            self.seen.add(thread)
            is_signal = why < signal.NSIG and not (new and why == signal.SIGSTOP)
            _ptrace(_CONT, thread, 0, why if is_signal and why != signal.SIGTRAP else 0)

    def _entering(self, thread: int) -> None:
        registers = _Registers()
        _ptrace(_GETREGS, thread, 0, ctypes.addressof(registers))
        call = self._decoded(thread, registers)
        answer = None if call is None else self.before(call)
        if call is None:
            _ptrace(_CONT, thread, 0, 0)
        elif answer is Kill:
            os.kill(self.child, signal.SIGKILL)
        elif isinstance(answer, Refuse):
            registers.orig_rax = 2**64 - 1  # no call
            registers.rax = 2**64 - answer.error
            _ptrace(_SETREGS, thread, 0, ctypes.addressof(registers))
            _ptrace(_CONT, thread, 0, 0)
        else:
            if isinstance(answer, Shorten):
                registers.rdx = answer.length
                _ptrace(_SETREGS, thread, 0, ctypes.addressof(registers))
            self.under_way[thread] = call
            _ptrace(_SYSCALL, thread, 0, 0)

    def _leaving(self, thread: int) -> None:
        registers = _Registers()
        _ptrace(_GETREGS, thread, 0, ctypes.addressof(registers))
        call, result = self.under_way.pop(thread), ctypes.c_longlong(registers.rax).value
        if result >= 0:
            if call.name == "write":
                call = Call("write", call.path, offset=call.offset, data=call.data[:result])
            self.after(call)
        _ptrace(_CONT, thread, 0, 0)

    def _decoded(self, thread: int, r: _Registers) -> Call | None:
        """Return the call, or None if it is not on a file, such as a write to a pipe."""
        name = _NAMES[r.orig_rax]
        if name in ("open", "creat", "mkdir", "rmdir", "unlink", "truncate"):
            path = self._path(thread, _AT_CWD, r.rdi)
            if name == "creat":
                return Call("open", path, flags=os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            if name == "truncate":
                return Call(name, path, offset=r.rsi)
            return Call(name, path, flags=r.rsi if name == "open" else 0)
        if name in ("openat", "mkdirat", "unlinkat"):
            path = self._path(thread, r.rdi, r.rsi)
            if name == "unlinkat":
                return Call("rmdir" if r.rdx & _AT_REMOVEDIR else "unlink", path)
            return Call(name[:-2], path, flags=r.rdx if name == "openat" else 0)
        if name in ("rename", "link"):
            old, new = (self._path(thread, _AT_CWD, pointer) for pointer in (r.rdi, r.rsi))
            return Call(name, old, new)
        if name in ("renameat", "renameat2", "linkat"):
            old, new = self._path(thread, r.rdi, r.rsi), self._path(thread, r.rdx, r.r10)
            return Call("link" if name == "linkat" else "rename", old, new)
        return self._on_handle(thread, name, r)

    def _on_handle(self, thread: int, name: str, r: _Registers) -> Call | None:
        path = _link(f"/proc/{thread}/fd/{ctypes.c_int(r.rdi).value}")
        if not path.startswith("/"):
            return None
        if name in ("fsync", "fdatasync"):
            return Call("sync", path)
        if name == "ftruncate":
            return Call("truncate", path, offset=r.rsi)
        offset = r.r10 if name in ("pread", "pwrite") else _position(thread, r.rdi)
        if name in ("write", "pwrite"):
            return Call("write", path, offset=offset, data=self._bytes(r.rsi, r.rdx))
        return Call("read" if name == "pread" else name, path, offset=offset)

    def _path(self, thread: int, folder: int, pointer: int) -> str:
        found = self._text(pointer)
        number = ctypes.c_int(folder).value
        base = "cwd" if number == _AT_CWD else f"fd/{number}"
        return found if found.startswith("/") else f"{_link(f'/proc/{thread}/{base}')}/{found}"

    def _text(self, pointer: int) -> str:
        """Return the text in the child's memory that ends with a zero byte."""
        found = b""
        while b"\0" not in found:
            here = pointer + len(found)
            found += os.pread(self.memory, 4096 - here % 4096, here)
        return found.split(b"\0")[0].decode()

    def _bytes(self, pointer: int, length: int) -> bytes:
        found = os.pread(self.memory, length, pointer) if length else b""
        if len(found) != length:
            raise RuntimeError(f"only {len(found)} of {length} bytes of the child could be read")
        return found


_AT_CWD = -100


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _position(thread: int, handle: int) -> int:
    said = Path(f"/proc/{thread}/fdinfo/{handle}").read_text()
    return int(said.split("pos:")[1].split()[0])


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_LIBC.ptrace.restype = ctypes.c_long


def _ptrace(request: int, thread: int, address: int, data: int) -> None:
    if _LIBC.ptrace(request, thread, address, data) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"ptrace request {request}: {os.strerror(error)}")


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("operand", ctypes.c_uint),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("first", ctypes.POINTER(_Instruction))]


def _filter_calls() -> None:
    """Stop this process at the calls in ``_BY_NAME``, and at no others."""
    load, equal, give = 0x20, 0x15, 0x06
    numbers = list(_BY_NAME.values())
    lines = [_Instruction(load, 0, 0, 0)]
    lines += [_Instruction(equal, len(numbers) - i, 0, n) for i, n in enumerate(numbers)]
    lines += [_Instruction(give, 0, 0, 0x7FFF0000), _Instruction(give, 0, 0, 0x7FF00000)]
    program = _Program(len(lines), (_Instruction * len(lines))(*lines))
    if _LIBC.prctl(38, 1, 0, 0, 0) or _LIBC.prctl(22, 2, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "the seccomp filter was refused")
