"""Pickles of plain data, read without running anything that they name.

A pickle is a program that may call any function by its name. Here it may call six names,
implemented below: numpy's arrays, scalars and types as pickles of protocols 0 to 4 describe them,
and bytes. Instructions that plain data does not need are refused, among them those that reserve
memory as the file claims. The interpreter is the standard library's in Python, whose object table
grows with the objects and not with the numbers that a file gives them.
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

MOST_BYTES = 16 << 20
JSON_INSTEAD = "give the same as JSON"
_INSTRUCTIONS = (
    *(
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
    ),
    *(
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
    ),
    *(
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
    ),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *(
        "EMPTY_LIST",
        "LIST",
        "APPEND",
        "APPENDS",
        "EMPTY_DICT",
        "DICT",
        "SETITEM",
        "SETITEMS",
    ),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
)
_TYPE = re.compile(r"[?bBhHiIlLqQefd]|[biuf](1|2|4|8)|[US][1-9]\d{0,3}|O8?")


def load_plain(path: Path) -> Any:
    """The dicts, lists, tuples, texts, bytes and numbers of a pickle; one-dimensional arrays become
    lists. Raises VitseeError: unreadable, larger than `MOST_BYTES`, not a pickle, or naming
    anything else."""
    data = read_at_most(path, MOST_BYTES, f"pickled ground truth is; {JSON_INSTEAD}")
    try:
        return _plain(_Unpickler(io.BytesIO(data), encoding="latin1").load(), {})
    except Exception as error:  # arbitrary bytes can raise anything
        why = str(error) if isinstance(error, pickle.UnpicklingError) else _kind(error)
        raise VitseeError(
            f"{path} cannot be read as a pickle of plain data: {visible(why)}"
        ) from None


def read_at_most(path: Path, limit: int, what: str) -> bytes:
    """The bytes of a file of at most `limit`. Raises VitseeError: unreadable, or larger, "which
    no `what`"."""
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise VitseeError(f"cannot read {path}: {reason(error)}") from None
    if len(data) > limit:
        raise VitseeError(f"{path} is larger than {limit >> 20} MiB, which no {what}")
    return data


def _kind(error: Exception) -> str:
    text = str(error).partition("\n")[0][:120]
    if text:
        return f"{type(error).__name__}: {text}"
    return type(error).__name__


class _Callable:
    """The object behind a name in a pickle; takes no attributes and no state."""

    __slots__ = ("_work",)

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work

    def __call__(self, *args: Any) -> Any:
        return self._work(*args)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes a function")


class _Type:
    """A numpy type of integers, floats, text or objects."""

    __slots__ = ("_code", "_order")

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not _TYPE.fullmatch(code):
            raise pickle.UnpicklingError("it has an array of an unknown type")
        self._code = code
        self._order = "="

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        if order not in ("<", ">", "|", "="):
            raise pickle.UnpicklingError("it has an array of an unknown type")
        self._order = order

    @property
    def of_objects(self) -> bool:
        return self._code.startswith("O")

    def values(self, raw: Any, n: int) -> list[Any]:
        """n values from their bytes."""
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
        _, shape, dtype, _, raw = state
        if (
            not isinstance(dtype, _Type)
            or len(shape) != 1
            or not isinstance(shape[0], int)
        ):
            raise pickle.UnpicklingError("it has an array that is no list of values")
        if not dtype.of_objects:
            self.values = dtype.values(raw, shape[0])
        elif isinstance(raw, list) and len(raw) == shape[0]:
            self.values = raw
        else:
            raise pickle.UnpicklingError("it has an array without its objects")


_NDARRAY = _Callable(lambda *_: _refuse("ndarray"))


def _refuse(name: str) -> Any:
    raise pickle.UnpicklingError(f"it calls {name}")


def _reconstruct(kind: Any, shape: Any, _code: Any) -> _Array:
    if kind is not _NDARRAY or shape != (0,):
        raise pickle.UnpicklingError("it has something else than a plain numpy array")
    return _Array()


def _scalar(dtype: Any, raw: Any) -> Any:
    if not isinstance(dtype, _Type) or dtype.of_objects:
        raise pickle.UnpicklingError("it has a numpy scalar of an unknown type")
    return dtype.values(raw, 1)[0]


def _encode(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("it encodes something else than bytes")
    return text.encode("latin1")


def _bytes(*args: Any) -> bytes:
    # bytes(10**12) would reserve that many.
    if args not in ((), ("",)):
        raise pickle.UnpicklingError("it calls bytes")
    return b""


_MULTIARRAY = {"_reconstruct": _Callable(_reconstruct), "scalar": _Callable(_scalar)}
_BUILTINS = {"bytes": _Callable(_bytes)}
_KNOWN = {
    "numpy.core.multiarray": _MULTIARRAY,
    "numpy._core.multiarray": _MULTIARRAY,
    "numpy": {"ndarray": _NDARRAY, "dtype": _Callable(_Type)},
    "_codecs": {"encode": _Callable(_encode)},
    "builtins": _BUILTINS,
    "__builtin__": _BUILTINS,
}
_INTERPRETER: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _Unpickler(_INTERPRETER):  # type: ignore[misc]
    """The standard interpreter with the instructions of plain data only."""

    dispatch: ClassVar[dict[int, Any]] = {
        getattr(pickle, name)[0]: _INTERPRETER.dispatch[getattr(pickle, name)[0]]
        for name in _INSTRUCTIONS
    }

    def load(self) -> Any:
        """The object. Raises UnpicklingError: an unknown instruction or name."""
        try:
            return super().load()
        except KeyError as error:
            code = error.args[0]
            text = (
                repr(bytes([code])) if isinstance(code, int) and 0 <= code < 256 else "?"
            )
            raise pickle.UnpicklingError(f"it has the instruction {text[1:]}") from None

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get(module, {}).get(name)
        if known is not None:
            return known
        more = (
            f" (an array of protocol 5: {JSON_INSTEAD})" if name == "_frombuffer" else ""
        )
        raise pickle.UnpicklingError(f"it asks for {module[:60]}.{name[:60]}{more}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of the file")


def _plain(value: Any, seen: dict[int, Any]) -> Any:
    """The value with arrays as lists. A shared object stays shared.

    seen: id -> converted object; None during its conversion.
    """
    if not isinstance(value, (_Array, list, tuple, dict)):
        return value
    if id(value) in seen:
        if seen[id(value)] is None:
            raise pickle.UnpicklingError("it has a list that contains itself")
        return seen[id(value)]
    if len(seen) > MOST_BYTES:
        raise pickle.UnpicklingError("it has too many lists")
    seen[id(value)] = None
    plain: Any
    if isinstance(value, dict):
        plain = {key: _plain(one, seen) for key, one in value.items()}
    else:
        plain = [
            _plain(one, seen)
            for one in (value.values if isinstance(value, _Array) else value)
        ]
    seen[id(value)] = plain
    return plain
