"""Half a sum on disk: a killed analysis goes on where it was.

A fold that has worked for `EVERY` seconds writes what it has merged beside the command's table,
`r.csv.partial/3.sum` for the third fold, and from then on as often as that costs at most
`COST` of its time. The same command, started again, goes on with the next slab. Slabs merge in
order, so the result is equal to the bit to that of a run that nobody stopped.

What decides a sum is its key: the command with its parameters and files, the stores with the
digests of their commits, the versions of vitsee's code and of what it computes with, the images,
which fold of the command it is, and its class. A file with another key is not read, but removed.

A file is a tree of structs as MessagePack, then its arrays, each piece with its checksum. Reading
it runs no code, as a pickle could that a stranger put into a folder of results: an object of
vitsee's own classes is restored by setting its attributes, without any of its methods, and nothing
else is restored but numbers, text, containers and arrays.
"""

from __future__ import annotations

import enum
import hashlib
import json
import logging
import math
import os
import struct
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, TypeAlias

import numpy as np
from msgspec import Meta, Struct, msgpack
from numpy.typing import NDArray

from vitsee_core.runtime.machine import human_bytes
from vitsee_core.types import Mask
from vitsee_stores import Store
from vitsee_stores.disk import PARTIAL, is_leftover, partial_name, remove_files, sync
from vitsee_stores.errors import reason

EVERY = 30.0  # seconds of work before anything is written, and at least between two times
COST = 0.01  # of the time, at most, that writing takes
ENDING = ".sum"
OLD_ENDING = ".npz"  # of sums that earlier versions kept, which are not read
RESTORED_MODULES = "vitsee_core."  # modules whose classes are restored
MAX_BYTES = 4 << 30
MAGIC = b"vitsee sum 1\n"
SIZE = struct.Struct("<Q")
CHECKSUM = struct.Struct("<I")

log = logging.getLogger(__name__)


@dataclass
class FoldCheckpoints:
    """The sums of one command, in a folder that exists only while there is something in it.

    Attributes:
        folder: `r.csv.partial` for `-o r.csv`.
        command: makes the command's part of every key; called only where there is a file to read
            or to write, as it looks at the command's files and at vitsee's code.
        within: prefix of the numbers of sums: the numbers of the outer items, where an item of
            `Execution.spread` folds itself.
        parent: the checkpoints of the whole command; None if these are.
    """

    folder: Path
    command: Callable[[], Any]
    within: str = ""
    parent: FoldCheckpoints | None = None
    status: str = ""  # what is kept, in words; empty before anything is
    _number: int = 0
    _command: str = field(default="", repr=False)
    _fails: bool = False

    def next_sum(self, about: Sequence[Any], unit: str, total: int) -> KeptSum:
        """Return the next fold, or series of results, of this command.

        Args:
            about: JSON values of its key, which tell it from one with the same number.
            unit: what it counts, a plural.
            total: how many of them.
        """
        self._number += 1
        return KeptSum(self, f"{self.within}{self._number}", [*about, total], unit, total)

    def inside(self, number: str, item: int) -> FoldCheckpoints:
        """Return the checkpoints for the folds of one item of the series `number`."""
        return FoldCheckpoints(self.folder, self.command, f"{number}.{item}.", self.root)

    def remove(self) -> None:
        """Remove the folder with all sums; other files in it stay."""
        with suppress(OSError):
            remove_files(self._files())
            self.folder.rmdir()

    @property
    def root(self) -> FoldCheckpoints:
        """The checkpoints of the whole command."""
        return self.parent or self

    def _files(self) -> list[Path]:
        return [
            path
            for path in self.folder.glob("*")
            if path.suffix in (ENDING, OLD_ENDING)
            or (path.suffix == PARTIAL and is_leftover(path))
        ]

    def key(self, number: str, about: Sequence[Any]) -> str:
        """Return the SHA-256 of everything that decides a sum."""
        root = self.root
        root._command = root._command or json.dumps(
            root.command(), sort_keys=True, default=str
        )
        text = json.dumps([root._command, number, *about], default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, number: str, about: Sequence[Any]) -> tuple[int, Any, int] | None:
        """Return how many are done, what they add up to, and the size of the file in bytes.

        None without a file, or with a file of another key or a damaged one, which is removed with
        all others of the folder.
        """
        path = self.folder / f"{number}{ENDING}"
        reason_to_refuse = "it is of another command, store, setting or version"
        if path.is_file():
            try:
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    key, done, state = read_plain(file)
                if key == self.key(number, about) and type(done) is int and done > 0:
                    return done, state, size
            except (NotPlain, OSError, TypeError, ValueError) as error:
                reason_to_refuse = f"{path.name} cannot be read ({error})"
        elif not (self.folder / f"{number}{OLD_ENDING}").is_file():
            return None
        log.warning(
            "%s is not used: %s; the work begins anew", self.folder, reason_to_refuse
        )
        self.remove()
        return None

    def write(self, number: str, about: Sequence[Any], done: int, state: Any) -> bool:
        """Write a sum, and return whether that worked; what prevents it is logged once.

        Args:
            number: of the sum.
            about: JSON values of its key.
            done: how many are in it.
            state: what `write_plain` takes.
        """
        root = self.root
        path = self.folder / f"{number}{ENDING}"
        temporary = partial_name(path)
        try:
            self.folder.mkdir(exist_ok=True)
            with open(temporary, "xb") as file:
                write_plain(file, [self.key(number, about), done, state])
            # On disk before it gets its name: after a crash a file of that name is whole.
            sync(temporary)
            os.replace(temporary, path)
            sync(self.folder)
        except (OSError, NotPlain) as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            if not root._fails:
                log.warning("%s: half of the work is not kept (%s)", self.folder, why)
            root._fails = True
            return False
        finally:
            with suppress(OSError):
                remove_files([temporary])
        return True


@dataclass
class KeptSum:
    """One fold or series of results of a command, which `FoldCheckpoints.next_sum` makes."""

    sums: FoldCheckpoints
    number: str
    about: list[Any]
    unit: str
    total: int
    _next: float = 0.0
    _written: bool = False

    def resume(self) -> tuple[int, Any] | None:
        """Return how many are done, and their state; None if no earlier run kept any.

        From now on the seconds until the first writing count.
        """
        self._next = time.monotonic() + EVERY
        checkpoint = self.sums.read(self.number, self.about)
        if checkpoint is None:
            return None
        done, state, size = checkpoint
        self._note(done, size)
        log.info("goes on after %s", self.sums.root.status)
        return done, state

    def offer(self, done: int, state: Callable[[], Any], *, last: bool = False) -> None:
        """Write the state of the first `done` if it is time to.

        Args:
            done: how many are in it.
            state: makes it; raises NotPlain where that is impossible.
            last: nothing follows, so that a sum that took long is written, however recent its last
                writing is.
        """
        began = time.monotonic()
        if began < self._next and not (last and self._written):
            return
        try:
            state_to_write = state()
        except NotPlain as error:
            log.debug("sum %s cannot be kept: %s", self.number, error)
            self._next = float("inf")
            return
        if self.sums.write(self.number, self.about, done, state_to_write):
            self._written = True
            path = self.sums.folder / f"{self.number}{ENDING}"
            self._note(done, path.stat().st_size)
        seconds_of_writing = time.monotonic() - began
        self._next = time.monotonic() + max(EVERY, seconds_of_writing / COST)

    def _note(self, done: int, size: int) -> None:
        """Set the status of the command: `slab 12 of 40 (r.csv.partial, 3.1 MB)`."""
        self.sums.root.status = (
            f"{self.unit.removesuffix('s')} {done} of {self.total} "
            f"({self.sums.folder}, {human_bytes(size)})"
        )


class KeptFold:
    """A fold whose merged accumulator is kept.

    Args:
        sums: of the command.
        make: creates an empty accumulator.
        stores: one, or a pair.
        mask: (images,) which count.
        n_slabs: how many are folded.
    """

    def __init__(
        self,
        sums: FoldCheckpoints,
        make: Callable[[], Any],
        stores: Sequence[Store],
        mask: Mask,
        n_slabs: int,
    ) -> None:
        self._make = make
        kind = type(make())
        images_digest = hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()
        labels = [store.label for store in stores]
        about = [f"{kind.__module__}:{kind.__qualname__}", labels, images_digest]
        self._kept_sum = sums.next_sum(about, "slabs", n_slabs)
        self._n_slabs = n_slabs

    def resume(self) -> tuple[int, Any]:
        """Return how many slabs are merged already, and the accumulator.

        0 and None if no earlier run kept any.
        """
        resumed = self._kept_sum.resume()
        if resumed is None:
            return 0, None
        n_done, state = resumed
        # Stores, functions and settings are not in the state: a new accumulator has them.
        total = self._make()
        vars(total).update(state)
        return n_done, total

    def offer(self, done: int, total: Any) -> None:
        """Keep the sum of the first `done` slabs, if it is time to."""
        self._kept_sum.offer(
            done,
            lambda: state_of(total, self._make(), self._make()),
            last=done == self._n_slabs,
        )


def state_of(total: Any, fresh: Any, other: Any) -> dict[str, Any]:
    """Return the attributes of an accumulator that its slabs made.

    Left out is what `make` gives to every accumulator (stores, functions, settings): two empty
    accumulators share it, and `total` has the same object, or one that travelled from another
    process and cannot be written.

    Args:
        total: the accumulator.
        fresh: an empty one from `make`.
        other: another empty one.

    Raises:
        NotPlain: it has no attributes.
    """
    if not hasattr(total, "__dict__"):
        raise NotPlain(f"a {type(total).__name__}")
    state = {}
    for name, value in vars(total).items():
        initial = vars(fresh).get(name)
        is_shared = name in vars(fresh) and initial is vars(other)[name]
        if is_shared and (value is initial or not is_plain(initial)):
            continue
        state[name] = value
    return state


# ---------------------------------------------------------------- what a file holds


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


def write_plain(file: IO[bytes], value: Any, *, most: int = MAX_BYTES) -> None:
    """Write `value` to an open file, for `read_plain`.

    Args:
        file: open for writing; arrays go there one after the other, without a copy of all.
        value: None, booleans, numbers, text, slices, lists, tuples, dicts, sets, arrays, and
            instances of vitsee's own classes (NamedTuples, too) made of these.
        most: largest size of the file in bytes, about.

    Raises:
        NotPlain: it holds something else, or more bytes; nothing is written.
    """
    arrays: list[NDArray[Any]] = []
    tree = msgpack.encode(_encode_tree(value, arrays))
    size = len(tree) + sum(array.nbytes for array in arrays)
    if size > most:
        raise NotPlain(f"{human_bytes(size)}, of {human_bytes(most)} at most")
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
        crc = file.read(CHECKSUM.size) if file.readinto(buffer) == buffer.size else b""  # type: ignore[attr-defined]
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
