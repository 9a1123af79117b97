"""Files of values, reading which runs no code, as a pickle could: numbers, text, containers,
arrays, and objects of vitsee's own classes that are made of these.

A file is a tree of structs as MessagePack, then its arrays, each piece with its checksum. An object
is restored by setting its attributes, without any of its methods.
"""

from __future__ import annotations

import enum
import math
import os
import struct
import sys
import zlib
from collections.abc import Callable
from typing import IO, Annotated, Any, TypeAlias

import numpy as np
from msgspec import Meta, Struct, msgpack
from numpy.typing import NDArray

from vitsee_core.runtime.machine import human_bytes

RESTORED_MODULES = "vitsee_core."  # modules whose classes are restored
MAX_BYTES = 4 << 30
MAGIC = b"vitsee sum 1\n"
SIZE = struct.Struct("<Q")  # of the tree, which follows
CHECKSUM = struct.Struct("<I")  # CRC-32, behind each piece


class NotPlain(Exception):
    """A value that cannot be written, or a file that is not what `write_plain` wrote."""


class Array(Struct, tag=True):
    """An array, whose values follow the tree, or a number of numpy's."""

    dtype: str
    shape: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=32)]
    fortran: bool
    scalar: bool


class Items(Struct, tag=True):
    """A container. Integers beyond 64 bits are their digits, text that is no Unicode its bytes."""

    kind: Annotated[str, Meta(pattern=r"\A(list|tuple|set|frozenset|slice|int|str)\Z")]
    items: list[Node]


class Pairs(Struct, tag=True):
    """A dict."""

    items: list[tuple[Node, Node]]


class Objects(Struct, tag=True):
    """An array of objects."""

    shape: tuple[int, ...]
    items: list[Node]


class Instance(Struct, tag=True):
    """An object of one of vitsee's classes: its `module:name`, its attributes."""

    name: str
    state: dict[str, Node]


Node: TypeAlias = (
    bool | int | float | str | Array | Items | Pairs | Objects | Instance | None
)


def write_plain(file: IO[bytes], value: Any, *, max_bytes: int = MAX_BYTES) -> None:
    """Write `value` to an open file, for `read_plain`.

    Args:
        file: open for writing; arrays go there one after the other, without a copy of all.
        value: None, booleans, numbers, text, slices, lists, tuples, dicts, sets, arrays, and
            instances of vitsee's own classes (NamedTuples, too) made of these.
        max_bytes: largest size of the file in bytes, about.

    Raises:
        NotPlain: it holds something else, or more bytes; nothing is written.
    """
    arrays: list[NDArray[Any]] = []
    tree = msgpack.encode(_encode_tree(value, arrays))
    size = len(tree) + sum(array.nbytes for array in arrays)
    if size > max_bytes:
        raise NotPlain(f"{human_bytes(size)}, of {human_bytes(max_bytes)} at most")
    file.write(MAGIC + SIZE.pack(len(tree)) + tree + CHECKSUM.pack(zlib.crc32(tree)))
    for array in arrays:
        data = np.ascontiguousarray(array.T if _is_fortran(array) else array)
        body: Any = data.reshape(-1).view(np.uint8) if data.size else b""
        file.write(body)
        file.write(CHECKSUM.pack(zlib.crc32(body)))


def read_plain(file: IO[bytes]) -> Any:
    """Return the value that `write_plain` wrote, in memory of a few times the file's size at most.

    Raises:
        NotPlain: the file is damaged, or was not written by `write_plain`.
    """

    def read(buffer: Any) -> None:
        """Fill a buffer from the file, and check it against the checksum behind it."""
        crc = b""
        n_read = file.readinto(buffer)  # type: ignore[attr-defined]
        if n_read == buffer.size:
            crc = file.read(CHECKSUM.size)
        if crc != CHECKSUM.pack(zlib.crc32(buffer)):
            raise NotPlain("it is damaged")

    def restore(node: Array) -> Any:
        """Return the next array of the file, or the number of numpy's that it stands for."""
        dtype = np.dtype(node.dtype)
        shape = node.shape
        if dtype.hasobject or dtype.str != node.dtype:
            raise NotPlain(f"an array of {node.dtype}")
        # Before the memory is taken: a damaged shape may ask for terabytes.
        if math.prod(shape) * dtype.itemsize > n_bytes_left():
            raise NotPlain("it is cut short")
        array = np.empty(shape[::-1] if node.fortran else shape, dtype)
        read(array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8))
        if node.fortran:
            array = array.T
        return array[()] if node.scalar else array

    def n_bytes_left() -> int:
        """Return the bytes between the file's position and its end."""
        return end - file.tell()

    try:
        end = file.seek(0, os.SEEK_END)
        file.seek(0)
        if file.read(len(MAGIC)) != MAGIC:
            raise NotPlain("it is no sum of this version")
        (size,) = SIZE.unpack(file.read(SIZE.size))
        if size > n_bytes_left():
            raise NotPlain("it is cut short")
        tree: Any = np.empty(size, np.uint8)
        read(tree)
        value = _decode_tree(msgpack.decode(tree, type=Node), restore)
        if n_bytes_left():
            raise NotPlain("it is longer than it says")
        return value
    except NotPlain:
        raise
    except Exception as error:  # whatever a damaged file makes msgspec and numpy raise
        raise NotPlain(f"{type(error).__name__}: {error}") from None


def is_plain(value: Any) -> bool:
    """Return whether `write_plain` can write a value, its size apart."""
    try:
        _encode_tree(value, [])
    except NotPlain:
        return False
    return True


def _is_fortran(array: NDArray[Any]) -> bool:
    """Return whether an array lies column by column; sums over it depend on that to the bit."""
    return array.flags.f_contiguous and not array.flags.c_contiguous


def _encode_tree(value: Any, arrays: list[NDArray[Any]]) -> Node:
    """Return the tree of a value.

    arrays: receives the value's arrays, in the order in which the file has them.

    Raises:
        NotPlain: the value, or one within it, cannot be written.
    """
    kind = type(value)
    # By the exact type: a subclass could restore itself by running code.
    if value is None or kind in (bool, float):
        return value
    if kind is int:
        if -(1 << 63) <= value < 1 << 63:
            return value
        return Items("int", [str(value)])
    if kind is str:
        # MessagePack holds Unicode; a file's name may have bytes that are none.
        if value.isascii() or value == value.encode(errors="ignore").decode():
            return value
        return Items("str", [value.encode("utf-8", "surrogatepass").decode("latin-1")])
    if isinstance(value, np.generic) or (kind is np.ndarray and value.dtype != object):
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.names:
            raise NotPlain("an array with fields")
        arrays.append(array)
        return Array(
            dtype=array.dtype.str,
            shape=array.shape,
            fortran=_is_fortran(array),
            scalar=isinstance(value, np.generic),
        )
    if kind is np.ndarray:
        return Objects(
            value.shape, [_encode_tree(item, arrays) for item in value.ravel().tolist()]
        )
    if kind in (list, tuple, set, frozenset):
        return Items(kind.__name__, [_encode_tree(item, arrays) for item in value])
    if kind is slice:
        bounds = (value.start, value.stop, value.step)
        return Items("slice", [_encode_tree(bound, arrays) for bound in bounds])
    if kind is dict:
        return Pairs(
            [(_encode_tree(k, arrays), _encode_tree(v, arrays)) for k, v in value.items()]
        )
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _restorable_class(name) is not kind:
        raise NotPlain(f"a {name}")
    if _is_named_tuple(kind):
        attributes = value._asdict()
    elif hasattr(value, "__dict__"):
        attributes = vars(value)
    else:
        raise NotPlain(f"a {name}")
    state = {
        key: _encode_tree(attribute, arrays) for key, attribute in attributes.items()
    }
    return Instance(name, state)


def _is_named_tuple(kind: type) -> bool:
    """Return whether a class is a NamedTuple: its values are its fields, in their order."""
    return kind.__bases__ == (tuple,) and "_fields" in vars(kind)


def _decode_tree(node: Node, restore: Callable[[Array], Any]) -> Any:
    """Return the value of a tree; restore: reads the next array."""
    if isinstance(node, Array):
        return restore(node)
    if isinstance(node, Pairs):
        return {_decode_tree(k, restore): _decode_tree(v, restore) for k, v in node.items}
    if isinstance(node, Instance):
        kind = _restorable_class(node.name)
        if kind is None:
            raise NotPlain(f"no class of vitsee's: {node.name}")
        state = {
            key: _decode_tree(attribute, restore) for key, attribute in node.state.items()
        }
        # Without `__init__` and `__new__`: reading a file runs none of a class' methods.
        if _is_named_tuple(kind):
            if tuple(state) != vars(kind)["_fields"]:
                raise NotPlain(f"{node.name} with the fields {', '.join(state)}")
            return tuple.__new__(kind, state.values())
        instance: Any = object.__new__(kind)
        vars(instance).update(state)
        return instance
    if not isinstance(node, (Items, Objects)):
        return node
    items = [_decode_tree(item, restore) for item in node.items]
    if isinstance(node, Objects):
        # One by one: `np.array` would make an array of lists two-dimensional.
        array = np.empty(len(items), object)
        for i, item in enumerate(items):
            array[i] = item
        return array.reshape(node.shape)
    if node.kind == "int":
        return int(items[0])
    if node.kind == "str":
        return items[0].encode("latin-1").decode("utf-8", "surrogatepass")
    if node.kind == "slice":
        return slice(*items)
    make = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[node.kind]
    return make(items)


class _Attributes:
    """A class whose instances are attributes alone, for its size."""


def _restorable_class(name: str) -> type | None:
    """Return the class of `module:name` if instances may be restored from a file; else None.

    It has to be one of vitsee's that is loaded, consist of its attributes (no slots, no subclass
    of a builtin) or be a NamedTuple, and do nothing when an instance is freed.
    """
    module, _, qualified_name = name.partition(":")
    if not module.startswith(RESTORED_MODULES) or module not in sys.modules:
        return None
    kind = vars(sys.modules[module]).get(qualified_name)
    if not isinstance(kind, type) or issubclass(kind, enum.Enum):
        return None
    if hasattr(kind, "__del__"):
        return None
    if _is_named_tuple(kind) or kind.__basicsize__ == _Attributes.__basicsize__:
        return kind
    return None
