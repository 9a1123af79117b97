"""Pickles of plain data, read without running anything that they name.

A pickle is a program that may call any function by its name. Here it may call six names,
implemented below: numpy's arrays, scalars and types as pickles of protocols 0 to 4
describe them, and bytes. Instructions that plain data does not need are refused, among
them those that reserve memory as the file claims. The interpreter is the standard
library's in Python, whose object table grows with the objects and not with the numbers
that a file gives them.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vitsee_core.tables.text import visible
from vitsee_stores.disk import open_regular
from vitsee_stores.errors import VitseeError, reason

MAX_BYTES = 16 << 20
JSON_INSTEAD = "give the same as JSON"
_INSTRUCTIONS = (
    # the frame of a pickle, its stack, and the constants
    "PROTO",
    "FRAME",
    "STOP",
    "MARK",
    "POP",
    "POP_MARK",
    "DUP",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    # numbers
    "INT",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG",
    "LONG1",
    "LONG4",
    "FLOAT",
    "BINFLOAT",
    # bytes, and text of Python 2
    "STRING",
    "BINSTRING",
    "SHORT_BINSTRING",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
    # text
    "UNICODE",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    # lists and dictionaries
    "EMPTY_LIST",
    "LIST",
    "APPEND",
    "APPENDS",
    "EMPTY_DICT",
    "DICT",
    "SETITEM",
    "SETITEMS",
    # tuples
    "EMPTY_TUPLE",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    # objects that occur again
    "GET",
    "BINGET",
    "LONG_BINGET",
    "PUT",
    "BINPUT",
    "LONG_BINPUT",
    "MEMOIZE",
    # names and what is made of them
    "GLOBAL",
    "STACK_GLOBAL",
    "REDUCE",
    "BUILD",
)
# Types of arrays: one letter with an optional size in bytes; U and S have a length.
_TYPE = re.compile(r"[?bBhHiIlLqQefd]|[biuf](1|2|4|8)|[US][1-9]\d{0,3}|O8?")


def load_plain(path: Path) -> Any:
    """Return the dicts, lists, texts, bytes and numbers of a pickle.

    Tuples and one-dimensional arrays become lists.

    Raises:
        VitseeError: the file cannot be read, is larger than `MAX_BYTES`, is not a pickle,
            or names anything else than plain data.
    """
    data = read_at_most(path, MAX_BYTES, f"pickled ground truth is; {JSON_INSTEAD}")
    try:
        # latin1: numpy's arrays in pickles of Python 2 are text whose characters are
        # bytes.
        value = _Unpickler(io.BytesIO(data), encoding="latin1").load()
        return _arrays_as_lists(value, {})
    except Exception as error:  # arbitrary bytes can raise anything
        why = _error_words(error)
        if isinstance(error, pickle.UnpicklingError):
            why = str(error)
        raise VitseeError(
            f"{path} cannot be read as a pickle of plain data: {visible(why)}"
        ) from None


def read_at_most(path: Path, limit: int, what: str) -> bytes:
    """Return the bytes of a file of limited size.

    Args:
        path: the file, which must not be a pipe or a device.
        limit: the largest size in bytes, a multiple of 1 MiB.
        what: the end of the message "which no ...", for instance "ground truth is".

    Raises:
        VitseeError: the file cannot be read, or is larger.
    """
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise VitseeError(f"cannot read {path}: {reason(error)}") from None
    if len(data) > limit:
        raise VitseeError(f"{path} is larger than {limit >> 20} MiB, which no {what}")
    return data


def _error_words(error: Exception) -> str:
    """Return the type of an error and the first line of its text."""
    text = str(error).partition("\n")[0][:120]
    if text:
        return f"{type(error).__name__}: {text}"
    return type(error).__name__


class _Callable:
    """A function that pickles may call; it takes no attributes and no state.

    A plain function would: a pickle may set `__code__` or `__defaults__` by BUILD.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        """Refuse the instruction BUILD."""
        raise pickle.UnpicklingError("it changes a function")


class _DType:
    """A numpy type of integers, floats, text or objects, as pickles describe it."""

    __slots__ = ("_code", "_order")

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not _TYPE.fullmatch(code):
            raise pickle.UnpicklingError("it has an array of an unknown type")
        self._code = code
        self._order = "="

    def __setstate__(self, state: Any) -> None:
        """Set the byte order, the second entry of numpy's state."""
        order = state[1]
        if order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("it has an array of an unknown type")
        self._order = order

    @property
    def holds_objects(self) -> bool:
        """Whether arrays of this type hold Python objects rather than bytes."""
        return self._code.startswith("O")

    def decode(self, raw: Any, n: int) -> list[Any]:
        """Return n values from their bytes."""
        order: Any = "=" if self._order == "|" else self._order
        dtype = np.dtype(self._code).newbyteorder(order)
        if isinstance(raw, str):  # protocols 0 to 2
            raw = raw.encode("latin1")
        if not isinstance(raw, bytes) or len(raw) != n * dtype.itemsize:
            raise pickle.UnpicklingError("it has an array without its bytes")
        return np.frombuffer(raw, dtype).tolist()


class _Array:
    """A one-dimensional numpy array, filled by its state."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: list[Any] = []

    def __setstate__(self, state: Any) -> None:
        """Fill the array from numpy's state: version, shape, type, Fortran order, content."""
        _, shape, dtype, _, raw = state
        is_vector = len(shape) == 1 and isinstance(shape[0], int)
        if not isinstance(dtype, _DType) or not is_vector:
            raise pickle.UnpicklingError("it has an array that is no list of values")
        if not dtype.holds_objects:
            self.values = dtype.decode(raw, shape[0])
        elif isinstance(raw, list) and len(raw) == shape[0]:
            self.values = raw
        else:
            raise pickle.UnpicklingError("it has an array without its objects")


def _refuse_ndarray(*_: Any) -> Any:
    """Refuse a call of numpy.ndarray: it would reserve memory, and arrays only name it."""
    raise pickle.UnpicklingError("it calls ndarray")


_NDARRAY = _Callable(_refuse_ndarray)


def _reconstruct(array_type: Any, shape: Any, _code: Any) -> _Array:
    """Return an empty array, whose state follows: numpy's function of this name."""
    if array_type is not _NDARRAY or shape != (0,):
        raise pickle.UnpicklingError("it has something else than a plain numpy array")
    return _Array()


def _scalar(dtype: Any, raw: Any) -> Any:
    """Return a numpy scalar as a plain number or text: numpy's function `scalar`."""
    if not isinstance(dtype, _DType) or dtype.holds_objects:
        raise pickle.UnpicklingError("it has a numpy scalar of an unknown type")
    return dtype.decode(raw, 1)[0]


def _encode(text: Any, encoding: Any) -> bytes:
    """Return bytes from text: how protocols 0 to 2 of Python 3 have bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("it encodes something else than bytes")
    return text.encode("latin1")


def _empty_bytes(*args: Any) -> bytes:
    """Return b"": how protocols 0 to 2 have empty bytes."""
    # bytes(10**12) would reserve that many.
    if args not in ((), ("",)):
        raise pickle.UnpicklingError("it calls bytes")
    return b""


_MULTIARRAY = {"_reconstruct": _Callable(_reconstruct), "scalar": _Callable(_scalar)}
_BUILTINS = {"bytes": _Callable(_empty_bytes)}
# The only names that a pickle may use: module -> name -> what it gets. numpy 2 has
# `_core`.
_KNOWN = {
    "numpy.core.multiarray": _MULTIARRAY,
    "numpy._core.multiarray": _MULTIARRAY,
    "numpy": {"ndarray": _NDARRAY, "dtype": _Callable(_DType)},
    "_codecs": {"encode": _Callable(_encode)},
    "builtins": _BUILTINS,
    "__builtin__": _BUILTINS,
}
# The interpreter in Python: the one in C cannot be restricted to some instructions.
_INTERPRETER: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _Unpickler(_INTERPRETER):  # type: ignore[misc]
    """The standard interpreter with the instructions of plain data only."""

    dispatch: ClassVar[dict[int, Any]] = {
        getattr(pickle, name)[0]: _INTERPRETER.dispatch[getattr(pickle, name)[0]]
        for name in _INSTRUCTIONS
    }

    def load(self) -> Any:
        """Return the object of the pickle.

        Raises:
            UnpicklingError: an unknown instruction or name.
        """
        try:
            return super().load()
        except KeyError as error:
            # `dispatch` lacks the instruction, or a dictionary of the data lacks a key.
            code = error.args[0]
            text = ""
            if isinstance(code, int) and 0 <= code < 256:
                text = repr(bytes([code])).removeprefix("b")
            raise pickle.UnpicklingError(f"it has the instruction {text}") from None

    def find_class(self, module: str, name: str) -> Any:
        """Return our own function of a name; nothing is imported."""
        function = _KNOWN.get(module, {}).get(name)
        if function is not None:
            return function
        advice = ""
        if name == "_frombuffer":
            advice = f" (an array of protocol 5: {JSON_INSTEAD})"
        raise pickle.UnpicklingError(f"it asks for {module[:60]}.{name[:60]}{advice}")

    def persistent_load(self, pid: Any) -> Any:
        """Refuse objects that a program would supply."""
        raise pickle.UnpicklingError("it refers to objects outside of the file")


def _arrays_as_lists(value: Any, converted: dict[int, Any]) -> Any:
    """Return the value with arrays and tuples as lists. A shared object stays shared.

    converted: id of an object -> its conversion; None while it goes on, so that a list
        that contains itself is noticed.
    """
    if not isinstance(value, (_Array, list, tuple, dict)):
        return value
    if id(value) in converted:
        if converted[id(value)] is None:
            raise pickle.UnpicklingError("it has a list that contains itself")
        return converted[id(value)]
    if len(converted) > MAX_BYTES:
        raise pickle.UnpicklingError("it has too many lists")
    converted[id(value)] = None
    plain: Any
    if isinstance(value, dict):
        plain = {key: _arrays_as_lists(item, converted) for key, item in value.items()}
    else:
        items = value.values if isinstance(value, _Array) else value
        plain = [_arrays_as_lists(item, converted) for item in items]
    converted[id(value)] = plain
    return plain
