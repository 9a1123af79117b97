"""Pickles of torch read without building what is in them beside tensors and plain values.

A pickle is a list of calls: of functions that make tensors, and of whatever else its author kept
(the state of a random generator, dates, a configuration). Here names stand for functions of this
file. A name of another kind stands for `Skipped`, which takes any call and does nothing; nothing
that the file names is imported. Names of the standard library that hold no data, as os.system, are
refused: no training loop keeps them.

`pickle._Unpickler` is the standard library's own in Python. The one in C sets aside as much memory
as a damaged file asks for.
"""

from __future__ import annotations

import _compat_pickle
import builtins
import collections
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

DTYPES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
# Modules of the standard library whose objects are data.
DATA_MODULES = frozenset(
    {
        "_codecs",
        "argparse",
        "array",
        "collections",
        "copyreg",
        "datetime",
        "decimal",
        "enum",
        "fractions",
        "functools",
        "ipaddress",
        "pathlib",
        "random",
        "time",
        "types",
        "uuid",
        "zoneinfo",
    }
)
BUILTIN_DATA = frozenset(
    {
        "bool",
        "bytearray",
        "bytes",
        "complex",
        "dict",
        "float",
        "frozenset",
        "getattr",
        "int",
        "list",
        "object",
        "range",
        "set",
        "slice",
        "str",
        "tuple",
    }
)
# The standard library's own tables: name or module in Python 2 -> in Python 3.
_PYTHON2_NAMES: dict[tuple[str, str], tuple[str, str]] = _compat_pickle.NAME_MAPPING
_PYTHON2_MODULES: dict[str, str] = _compat_pickle.IMPORT_MAPPING
# torch.serialization writes these in front of files older than its zip archives.
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001


class Function:
    """One of this file's functions, under a name that a pickle has. Nothing is set on it."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"the file sets {name} of a function")

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("the file sets the state of a function")


class Skipped(dict[Any, Any]):
    """An object that is not built. It keeps the items of a mapping, as a state dict may be of a
    class of its own, and ignores all else that is done to it."""

    name = ""

    def __new__(cls, *args: Any, **named: Any) -> Skipped:
        return super().__new__(cls)

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__()

    def __call__(self, *args: Any, **named: Any) -> Skipped:
        return Skipped()

    def __setstate__(self, state: Any) -> None:
        pass

    def append(self, item: Any) -> None:
        pass

    def extend(self, items: Any) -> None:
        pass

    def add(self, item: Any) -> None:
        pass

    # Objects may be the keys of a mapping.
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


class NumpyType:
    """The type of a NumPy scalar: its code, and the order of its bytes."""

    def __init__(self, code: str = "", *_: Any) -> None:
        self.code = str(code)
        self.order = "<"

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] == ">":
            self.order = ">"


def numpy_scalar(kind: Any, data: Any = b"") -> Any:
    """The Python number that a NumPy scalar is, None if it is another thing."""
    simple = isinstance(kind, NumpyType) and kind.code[:1] in ("b", "i", "u", "f")
    if not simple or not isinstance(data, bytes):
        return None
    return np.frombuffer(data, np.dtype(f"{kind.order}{kind.code}"), count=1)[0].item()


def encoded(text: Any, encoding: Any = "latin1") -> bytes:
    """The bytes that Python's second protocol writes as text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes as {str(encoding)[:20]!r}; expected latin1")
    return str(text).encode("latin1")


def tensor_of(storage: Tensor, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    """The tensor over a flat storage."""
    return storage.as_strided(size, stride, offset)


def tensor_of_bytes(
    storage: Tensor, offset: int, size: Any, stride: Any, *more: Any
) -> Tensor:
    """The tensor over bytes, whose type is the third of what follows."""
    _requires_grad, _hooks, dtype = more[:3]
    return storage.view(dtype).as_strided(size, stride, offset)


def first(value: Any, *_: Any) -> Any:
    """The first argument, of functions that wrap a tensor or give a list its type."""
    return value


def tensor_of_type(rebuild: Any, _kind: Any, args: Any, *_: Any) -> Any:
    """The tensor below one of a class of its own, or with attributes."""
    if not isinstance(rebuild, Function):
        return Skipped()
    return rebuild(*args)


_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor"): Function(tensor_of),
    ("torch._utils", "_rebuild_tensor_v2"): Function(tensor_of),
    ("torch._utils", "_rebuild_tensor_v3"): Function(tensor_of_bytes),
    ("torch._utils", "_rebuild_parameter"): Function(first),
    ("torch._utils", "_rebuild_parameter_with_state"): Function(first),
    ("torch._tensor", "_rebuild_from_type_v2"): Function(tensor_of_type),
    ("torch", "Size"): Function(tuple),
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("_codecs", "encode"): Function(encoded),
    ("numpy", "dtype"): NumpyType,
    **{(module, "scalar"): Function(numpy_scalar) for module in _NUMPY},
}


class Unpickler(pickle._Unpickler):  # type: ignore[name-defined,misc]
    """Makes tensors, plain values and `Skipped`.

    Attributes:
        skipped: the names that stand for `Skipped`, in the order of the file.
    """

    def __init__(self, file: IO[bytes], storage_of: Callable[[Any], Any]) -> None:
        """Read `file`. storage_of: gives the storage, or the class of a module, to which the file
        refers by a tuple."""
        super().__init__(file, encoding="utf-8")
        self._storage_of = storage_of
        self.skipped: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        """Return the function or class that a name stands for.

        Raises:
            UnpicklingError: a name that no checkpoint needs.
        """
        if (module, name) in KNOWN:
            return KNOWN[module, name]
        if module in ("torch", "torch.cuda", "torch.storage") and name in DTYPES:
            return DTYPES[name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        return self.other(module, name)

    def other(self, module: str, name: str) -> Any:
        """Return the class that stands for a name that is not one of torch's for tensors."""
        package = module.partition(".")[0]
        is_standard = package in sys.stdlib_module_names or package == "__builtin__"
        if is_standard and not _is_data(*_python3_name(module, name)):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        self.skipped.append(f"{module}.{name}")
        return type("Skipped", (Skipped,), {"name": f"{module}.{name}"})

    def load_bytearray8(self) -> None:
        """Append a bytearray of the length that the file states, read before it is set aside: the
        standard library's own first makes one of that length, which may be 8 GB in a small file."""
        (length,) = struct.unpack("<Q", self.read(8))  # type: ignore[attr-defined]
        if length > sys.maxsize:
            raise pickle.UnpicklingError(f"a bytearray of {length} bytes")
        self.append(bytearray(self.read(length)))  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **pickle._Unpickler.dispatch,  # type: ignore[attr-defined]
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }

    def persistent_load(self, pid: Any) -> Any:
        """The storage of a tensor."""
        return self._storage_of(pid)


def _python3_name(module: str, name: str) -> tuple[str, str]:
    """Return module and name of a class or function today, where a pickle has those of Python 2, as
    the protocols that torch writes by default do (`__builtin__.xrange` for `range`)."""
    if (module, name) in _PYTHON2_NAMES:
        return _PYTHON2_NAMES[module, name]
    return _PYTHON2_MODULES.get(module, module), name


def _is_data(module: str, name: str) -> bool:
    """Return whether a name of the standard library is that of a class whose objects are data."""
    if module == "builtins":
        builtin = getattr(builtins, name, None)
        is_exception = isinstance(builtin, type) and issubclass(builtin, BaseException)
        return name in BUILTIN_DATA or is_exception
    return module.partition(".")[0] in DATA_MODULES and "." not in name


def refused(persistent_id: Any) -> Any:
    """Refuse a reference where there is nothing to refer to."""
    raise pickle.UnpicklingError("a reference to a storage, in front of them")


class Archive:
    """The storages of a zip archive of `torch.save` or `torch.jit.save`, by their keys."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        self._archive = archive
        self._root = root
        self._storages: dict[Any, Tensor] = {}

    def storage(self, persistent_id: Any) -> Tensor:
        """Return the 1-D tensor that `("storage", dtype, key, device, length)` refers to."""
        _, dtype, key, *_ = persistent_id
        if key not in self._storages:
            info = self._archive.getinfo(f"{self._root}/data/{key}")
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{info.filename} is compressed, which torch never does")
            data = bytearray(self._archive.read(info))
            empty = torch.empty(0, dtype=dtype)
            self._storages[key] = torch.frombuffer(data, dtype=dtype) if data else empty
        return self._storages[key]


def read_skipping(path: Path) -> tuple[Any, list[str]]:
    """The content of a file of `torch.save` without its objects of other kinds, and their names.

    Raises:
        pickle.UnpicklingError: it names functions that no checkpoint needs.
        Exception: a damaged file.
    """
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            return _read_legacy(file, path.stat().st_size)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        pickled = next(name for name in names if name.endswith("/data.pkl"))
        root = pickled.removesuffix("/data.pkl")
        if (
            f"{root}/byteorder" in names
            and archive.read(f"{root}/byteorder") != b"little"
        ):
            raise ValueError("its numbers begin with the high byte")
        with archive.open(pickled) as file:
            unpickler = Unpickler(file, Archive(archive, root).storage)
            return unpickler.load(), unpickler.skipped


class _LegacyStorages:
    """The storages of a file older than torch's zip archives, whose bytes follow the pickle."""

    def __init__(self, file_bytes: int) -> None:
        self._file_bytes = file_bytes
        self._by_key: dict[Any, Tensor] = {}

    def storage(self, persistent_id: Any) -> Any:
        """Return the 1-D tensor that `("storage", dtype, key, device, length, view)` refers to, or
        the class of `("module", class, file, source)`."""
        if persistent_id[0] == "module":
            return persistent_id[1]
        _, dtype, key, _, length, view = persistent_id
        if key not in self._by_key:
            if length * dtype.itemsize > self._file_bytes:
                raise ValueError("a tensor that is larger than the file")
            self._by_key[key] = torch.zeros(length, dtype=dtype)
        if view is None:
            return self._by_key[key]
        _, offset, view_length = view
        return self._by_key[key][offset : offset + view_length]

    def fill(self, key: Any, file: IO[bytes]) -> None:
        """Read the length, as 8 bytes, and the values of a storage."""
        storage = self._by_key[key]
        length = int.from_bytes(file.read(8), "little")
        data = bytearray(file.read(storage.nbytes))
        if length != len(storage) or len(data) != storage.nbytes:
            raise ValueError("its tensors are cut short")
        if length:
            storage.copy_(torch.frombuffer(data, dtype=storage.dtype))


def _read_legacy(file: IO[bytes], file_bytes: int) -> tuple[Any, list[str]]:
    """Read a file of torch before 1.6, five pickles and then storages, as `read_skipping` does."""
    if Unpickler(file, refused).load() != LEGACY_MAGIC:
        raise ValueError("it is not of torch.save")
    if Unpickler(file, refused).load() != LEGACY_PROTOCOL:
        raise ValueError("another protocol than torch's")
    system = Unpickler(file, refused).load()
    if isinstance(system, Mapping) and system.get("little_endian") is False:
        raise ValueError("its numbers begin with the high byte")
    storages = _LegacyStorages(file_bytes)
    unpickler = Unpickler(file, storages.storage)
    content = unpickler.load()
    for key in Unpickler(file, refused).load():
        storages.fill(key, file)
    return content, unpickler.skipped
