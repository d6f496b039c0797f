"""Files of ``torch.save``, read as data: no name in a file is looked up, so no code can run.

``torch.load(weights_only=True)`` runs no code either, but a file of 400 bytes can keep it busy for
years: as a key of a dict, a tuple of tuples takes twice as long to hash at each depth.
"""

import io
import math
import pickletools
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_BYTES = 2**33  # of all tensors of a file, which may unpack to much more than its size
_MOST_PROGRAM = 2**26  # bytes of the pickle beside the tensors: names and settings
_DAMAGED = (AttributeError, IndexError, KeyError, TypeError, ValueError, ArithmeticError, EOFError)
OF_ZIP = (zipfile.BadZipFile, zlib.error, OSError, MemoryError, RuntimeError)
_DTYPES = {
    **{"Float": torch.float32, "Double": torch.float64, "Half": torch.float16},
    **{"BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32, "Short": torch.int16},
    **{"Char": torch.int8, "Byte": torch.uint8},
}
_VALUES = {
    *("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINFLOAT"),
    *("BININT", "BININT1", "BININT2", "LONG1"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True, slots=True, eq=False)
class Unread:
    """What a file names and this reader does not make: a class, a function, an object of one."""

    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: torch.dtype
    key: str


def unpickled(content: bytes) -> Any:  # noqa: ANN401  any of str, numbers, dict, list, tuple, Tensor
    """Return what a file of ``torch.save`` holds; what is neither tensor nor value is ``Unread``.

    Raises:
        ValueError: it is of another format, damaged, or unpacks to too much.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            (program,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            size = sum(member.file_size for member in archive.infolist())
            if size > MOST_BYTES or archive.getinfo(program).file_size > _MOST_PROGRAM:
                raise ValueError(f"it unpacks to {size} bytes, too much to read")
            folder = program.removesuffix("data.pkl")
            order = f"{folder}byteorder"
            if order in archive.namelist() and archive.read(order) != b"little":
                raise ValueError("its numbers are big-endian")
            return _Machine(lambda key: archive.read(f"{folder}data/{key}")).run(
                archive.read(program)
            )
    except (*_DAMAGED, *OF_ZIP) as error:
        raise ValueError(str(error) or type(error).__name__) from None


def the_tensors(found: object) -> tuple[str | None, dict[str, Tensor]]:
    """Return the tensors of a dict, a list or a checkpoint, and their name in the checkpoint.

    Those of a list are called "arr_0", "arr_1" and so on, as ``numpy.savez`` does.

    Raises:
        ValueError: it holds no tensors, several sets of them, or something beside them.
    """
    name, whole = None, _by_name(found)
    if not _tensors(whole):
        inside = {str(entry): _by_name(value) for entry, value in whole.items()}
        inside = {entry: values for entry, values in inside.items() if _tensors(values)}
        if len(inside) > 1:
            raise ValueError(f"{', '.join(inside)} are tensors each; save one of them alone")
        if not inside:
            kinds = [f"{entry!r} is {_kind(value)}" for entry, value in whole.items()][:1]
            held = "".join(kinds) or f"it is {_kind(found)}"
            raise ValueError(f"it holds no tensors ({held}); save model.state_dict()")
        ((name, whole),) = inside.items()
    for other, value in whole.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{other!r} is {_kind(value)}, and not a tensor; save tensors alone")
    return name, {str(key): value for key, value in _tensors(whole).items()}


def _tensors(values: dict[Any, object]) -> dict[Any, Tensor]:
    return {key: value for key, value in values.items() if isinstance(value, Tensor)}


def _by_name(value: object) -> dict[Any, object]:
    if isinstance(value, Tensor):
        value = [value]
    if isinstance(value, list | tuple):
        return {f"arr_{i}": entry for i, entry in enumerate(value)}
    return value if isinstance(value, dict) else {}


def _kind(value: object) -> str:
    return value.name if isinstance(value, Unread) else type(value).__name__


class _Machine:
    """Runs the instructions of a pickle that ``torch.save`` writes, on plain values and tensors."""

    def __init__(self, record: Callable[[str], bytes]) -> None:
        self.record = record
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # stacks under each mark
        self.memo: dict[int, Any] = {}
        self.read: dict[str, bytearray] = {}
        self.left = MOST_BYTES

    def run(self, program: bytes) -> Any:  # noqa: ANN401
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name == "STOP":
                break
            if opcode.name in _VALUES:
                self.stack.append(argument)
            elif opcode.name in _CONSTANTS:
                self.stack.append(_CONSTANTS[opcode.name])
            elif opcode.name in _TUPLES:
                count = _TUPLES[opcode.name]
                self.stack[-count:] = [tuple(self.stack[-count:])]
            elif opcode.name not in ("PROTO", "FRAME"):
                step = getattr(self, f"op_{opcode.name.lower()}", None)
                if step is None:
                    raise ValueError(f"torch.save does not write {opcode.name}")
                step(argument)
        (result,) = self.stack
        return result

    def _marked(self) -> list[Any]:
        """Take what stands above the last mark off the stack."""
        above, self.stack = self.stack, self.below.pop()
        return above

    def op_mark(self, _: object) -> None:
        self.below.append(self.stack)
        self.stack = []

    def op_tuple(self, _: object) -> None:
        above = tuple(self._marked())
        self.stack.append(above)

    def op_empty_dict(self, _: object) -> None:
        self.stack.append({})

    def op_empty_list(self, _: object) -> None:
        self.stack.append([])

    def op_append(self, _: object) -> None:
        value = self.stack.pop()
        self._extend([value])

    def op_appends(self, _: object) -> None:
        self._extend(self._marked())

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list | Unread):
            raise ValueError("it extends what is not a list")
        if isinstance(target, list):
            target.extend(values)

    def op_setitem(self, _: object) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def op_setitems(self, _: object) -> None:
        self._set(self._marked())

    def _set(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict | Unread):
            raise ValueError("it sets entries of what is not a dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(key, str | int):  # the hash of nothing else is quick
                raise ValueError(f"a {type(key).__name__} is a key")
            if isinstance(target, dict):
                target[key] = value

    def op_binput(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    op_long_binput = op_binput

    def op_memoize(self, _: object) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def op_binget(self, place: int) -> None:
        self.stack.append(self.memo[place])

    op_long_binget = op_binget

    def op_global(self, name: str) -> None:
        self.stack.append(Unread(name.replace(" ", ".", 1)))

    def op_empty_set(self, _: object) -> None:
        self.stack.append(Unread("set"))

    def op_additems(self, _: object) -> None:
        self._marked()

    def op_stack_global(self, _: object) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise ValueError("a name is not a text")
        self.stack.append(Unread(f"{module}.{name}"))

    def op_reduce(self, _: object) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        made: Any = function
        if function.name == "collections.OrderedDict" and not arguments:
            made = {}
        elif function.name == "torch._utils._rebuild_tensor_v2":
            made = self._tensor(*arguments)
        elif function.name == "torch._utils._rebuild_parameter":
            made = arguments[0]
        self.stack.append(made)

    def op_newobj(self, _: object) -> None:
        self.stack.pop()  # arguments; the class stands for its object

    def op_build(self, _: object) -> None:
        self.stack.pop()  # attributes, as the versions of the modules of a state_dict

    def op_binpersid(self, _: object) -> None:
        kind, storage, key, _device, _count = self.stack.pop()
        dtype = _DTYPES.get(storage.name.removeprefix("torch.").removesuffix("Storage"))
        if kind != "storage" or not isinstance(key, str):
            raise ValueError("it holds what is no tensor's")
        self.stack.append(Unread(storage.name) if dtype is None else _Storage(dtype, key))

    def _tensor(
        self, storage: object, offset: int, size: Sequence[int], stride: Sequence[int], *_: object
    ) -> object:
        """Return a tensor in memory of its own; a type that is unknown stays ``Unread``."""
        if not isinstance(storage, _Storage):
            return storage
        dtype, key = storage.dtype, storage.key
        if not all(isinstance(n, int) and 0 <= n < MOST_BYTES for n in (offset, *size, *stride)):
            raise ValueError("a shape is not of whole numbers")
        if key not in self.read:
            self.read[key] = bytearray(self.record(key))
        content = self.read[key]
        self.left -= math.prod(size) * torch.float64.itemsize
        if self.left < 0:
            raise ValueError(f"its tensors unpack to more than {MOST_BYTES} bytes")
        if 0 in size:
            return torch.empty(*size, dtype=dtype)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if last >= len(content) // dtype.itemsize:
            raise ValueError(f"a tensor of shape {tuple(size)} has {len(content)} bytes")
        whole = torch.frombuffer(content, dtype=dtype)
        return whole.as_strided(size, stride, offset).clone(memory_format=torch.contiguous_format)
