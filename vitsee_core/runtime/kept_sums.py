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
from vitsee_stores.disk import PARTIAL, is_left, partial_name, remove_files, sync
from vitsee_stores.errors import reason

EVERY = 30.0  # seconds of work before anything is written, and at least between two times
COST = 0.01  # of the time, at most, that writing takes
ENDING = ".sum"
EARLIER = ".npz"  # of sums that earlier versions kept, which are not read
OWN = "vitsee_core."  # modules whose classes are restored
MOST_BYTES = 4 << 30
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
        within: numbers of the outer items, where an item of `Execution.spread` folds.
        parent: the command's own, of an item's.
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
        """The next fold, or series of results, of this command.

        Args:
            about: JSON; what tells it from those with the same number.
            unit: what it counts, a plural.
            total: how many of them.
        """
        self._number += 1
        return KeptSum(self, f"{self.within}{self._number}", [*about, total], unit, total)

    def inside(self, number: str, item: int) -> FoldCheckpoints:
        """The kept sums for the folds of one item of the series `number`."""
        return FoldCheckpoints(self.folder, self.command, f"{number}.{item}.", self.root)

    def remove(self) -> None:
        """Remove the folder with all sums; other files in it stay."""
        with suppress(OSError):
            remove_files(self._files())
            self.folder.rmdir()

    @property
    def root(self) -> FoldCheckpoints:
        return self.parent or self

    def _files(self) -> list[Path]:
        return [
            path
            for path in self.folder.glob("*")
            if path.suffix in (ENDING, EARLIER)
            or (path.suffix == PARTIAL and is_left(path))
        ]

    def key(self, number: str, about: Sequence[Any]) -> str:
        root = self.root
        root._command = root._command or json.dumps(
            root.command(), sort_keys=True, default=str
        )
        text = json.dumps([root._command, number, *about], default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, number: str, about: Sequence[Any]) -> tuple[int, Any, int] | None:
        """How many are done, what they add up to, and the file's bytes; None without a file, or
        with that of another key."""
        path = self.folder / f"{number}{ENDING}"
        why = "it is of another command, store, setting or version"
        if path.is_file():
            try:
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    key, done, state = read_plain(file)
                if key == self.key(number, about) and type(done) is int and done > 0:
                    return done, state, size
            except (NotPlain, OSError, TypeError, ValueError) as error:
                why = f"{path.name} cannot be read ({error})"
        elif not (self.folder / f"{number}{EARLIER}").is_file():
            return None
        log.warning("%s is not used: %s; the work begins anew", self.folder, why)
        self.remove()
        return None

    def write(self, number: str, about: Sequence[Any], done: int, state: Any) -> bool:
        """Whether it was written; what prevents it is logged once."""
        root = self.root
        path = self.folder / f"{number}{ENDING}"
        temporary = partial_name(path)
        try:
            self.folder.mkdir(exist_ok=True)
            with open(temporary, "xb") as file:
                write_plain(file, [self.key(number, about), done, state])
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
    """One fold or series of a command; see `FoldCheckpoints.next_sum`."""

    sums: FoldCheckpoints
    number: str
    about: list[Any]
    unit: str
    total: int
    _next: float = 0.0
    _written: bool = False

    def resume(self) -> tuple[int, Any] | None:
        """How many are done, and their state, if a run before this one kept some; the time until
        the first writing begins."""
        self._next = time.monotonic() + EVERY
        found = self.sums.read(self.number, self.about)
        if found is None:
            return None
        done, state, size = found
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
            wanted = state()
        except NotPlain as error:
            log.debug("sum %s cannot be kept: %s", self.number, error)
            self._next = float("inf")
            return
        if self.sums.write(self.number, self.about, done, wanted):
            self._written = True
            path = self.sums.folder / f"{self.number}{ENDING}"
            self._note(done, path.stat().st_size)
        self._next = time.monotonic() + max(EVERY, (time.monotonic() - began) / COST)

    def _note(self, done: int, size: int) -> None:
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
        images = hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()
        labels = [store.label for store in stores]
        about = [f"{kind.__module__}:{kind.__qualname__}", labels, images]
        self._kept = sums.next_sum(about, "slabs", n_slabs)
        self._n = n_slabs

    def resume(self) -> tuple[int, Any]:
        """How many slabs are merged already, and the accumulator; 0 and None to begin with."""
        if (found := self._kept.resume()) is None:
            return 0, None
        total = self._make()
        vars(total).update(found[1])
        return found[0], total

    def offer(self, done: int, total: Any) -> None:
        """Keep the sum of the first `done` slabs, if it is time to."""
        self._kept.offer(done, lambda: self._state(total), last=done == self._n)

    def _state(self, total: Any) -> dict[str, Any]:
        return state_of(total, self._make(), self._make())


def state_of(total: Any, fresh: Any, other: Any) -> dict[str, Any]:
    """The attributes of an accumulator that its slabs made.

    Left out is what `make` gives to every accumulator (stores, functions, settings): `fresh` and
    `other`, two empty ones, share it, and `total` has the same object, or one that travelled from
    another process and cannot be written.

    Raises:
        NotPlain: it has no attributes.
    """
    if not hasattr(total, "__dict__"):
        raise NotPlain(f"a {type(total).__name__}")
    state = {}
    for name, value in vars(total).items():
        given = vars(fresh).get(name)
        shared = name in vars(fresh) and given is vars(other)[name]
        if shared and (value is given or not is_plain(given)):
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


def write_plain(file: IO[bytes], value: Any, *, most: int = MOST_BYTES) -> None:
    """Write `value` to an open file, for `read_plain`.

    Args:
        file: open for writing; arrays go there one after the other, without a copy of all.
        value: None, booleans, numbers, text, slices, lists, tuples, dicts, sets, arrays, and
            instances of vitsee's own classes made of these.
        most: bytes of the file, about.

    Raises:
        NotPlain: it holds something else, or more bytes; nothing is written.
    """
    arrays: list[NDArray[Any]] = []
    tree = msgpack.encode(_encoded(value, arrays))
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
    """The value that `write_plain` wrote, in memory of a few times the file's size at most.

    Raises:
        NotPlain: damaged, or not written by it.
    """

    def read(buffer: Any) -> None:
        crc = file.read(CHECKSUM.size) if file.readinto(buffer) == buffer.size else b""  # type: ignore[attr-defined]
        if crc != CHECKSUM.pack(zlib.crc32(buffer)):
            raise NotPlain("it is damaged")

    def restore(node: Array) -> Any:
        dtype = np.dtype(node.dtype)
        shape = node.shape
        if dtype.hasobject or dtype.str != node.dtype:
            raise NotPlain(f"an array of {node.dtype}")
        if math.prod(shape) * dtype.itemsize > left():
            raise NotPlain("it is cut short")
        array = np.empty(shape[::-1] if node.fortran else shape, dtype)
        read(array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8))
        array = array.T if node.fortran else array
        return array[()] if node.scalar else array

    def left() -> int:
        return end - file.tell()

    try:
        end = file.seek(0, os.SEEK_END)
        file.seek(0)
        if file.read(len(MAGIC)) != MAGIC:
            raise NotPlain("it is no sum of this version")
        (size,) = SIZE.unpack(file.read(SIZE.size))
        if size > left():
            raise NotPlain("it is cut short")
        tree: Any = np.empty(size, np.uint8)
        read(tree)
        value = _decoded(msgpack.decode(tree, type=Node), restore)
        if left():
            raise NotPlain("it is longer than it says")
        return value
    except NotPlain:
        raise
    except Exception as error:  # whatever a damaged file makes msgspec and numpy raise
        raise NotPlain(f"{type(error).__name__}: {error}") from None


def is_plain(value: Any) -> bool:
    """Whether `write_plain` can write a value, its size apart."""
    try:
        _encoded(value, [])
    except NotPlain:
        return False
    return True


def _is_fortran(array: NDArray[Any]) -> bool:
    return array.flags.f_contiguous and not array.flags.c_contiguous


def _encoded(value: Any, arrays: list[NDArray[Any]]) -> Node:
    """The tree of a value. arrays: receives its arrays, in order."""
    kind = type(value)
    if value is None or kind in (bool, float):
        return value
    if kind is int:
        if -(1 << 63) <= value < 1 << 63:
            return value
        return Items("int", [str(value)])
    if kind is str:
        plain = value.isascii() or value == value.encode(errors="ignore").decode()
        raw = value if plain else value.encode("utf-8", "surrogatepass").decode("latin-1")
        return raw if plain else Items("str", [raw])
    if isinstance(value, np.generic) or (kind is np.ndarray and value.dtype != object):
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.names:
            raise NotPlain("an array with fields")
        arrays.append(array)
        scalar = isinstance(value, np.generic)
        return Array(array.dtype.str, array.shape, _is_fortran(array), scalar)
    if kind is np.ndarray:
        return Objects(
            value.shape, [_encoded(item, arrays) for item in value.ravel().tolist()]
        )
    if kind in (list, tuple, set, frozenset):
        return Items(kind.__name__, [_encoded(item, arrays) for item in value])
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        return Items("slice", [_encoded(part, arrays) for part in parts])
    if kind is dict:
        return Pairs(
            [(_encoded(k, arrays), _encoded(v, arrays)) for k, v in value.items()]
        )
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not hasattr(value, "__dict__") or _class(name) is not kind:
        raise NotPlain(f"a {name}")
    return Instance(
        name, {key: _encoded(own, arrays) for key, own in vars(value).items()}
    )


def _decoded(node: Node, restore: Callable[[Array], Any]) -> Any:
    """The value of a tree. restore: reads the next array."""
    if isinstance(node, Array):
        return restore(node)
    if isinstance(node, Pairs):
        return {_decoded(k, restore): _decoded(v, restore) for k, v in node.items}
    if isinstance(node, Instance):
        if (found := _class(node.name)) is None:
            raise NotPlain(f"no class of vitsee's: {node.name}")
        restored: Any = object.__new__(found)
        vars(restored).update(
            {key: _decoded(own, restore) for key, own in node.state.items()}
        )
        return restored
    if not isinstance(node, (Items, Objects)):
        return node
    items = [_decoded(item, restore) for item in node.items]
    if isinstance(node, Objects):
        array = np.empty(len(items), object)
        for at, item in enumerate(items):
            array[at] = item
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
    pass


def _class(name: str) -> type | None:
    """The class of this `module:name`, if it is one of vitsee's that is loaded, consists of its
    attributes and does nothing when it is freed."""
    module, _, qualified = name.partition(":")
    if not module.startswith(OWN) or module not in sys.modules:
        return None
    found = vars(sys.modules[module]).get(qualified)
    if (
        not isinstance(found, type)
        or issubclass(found, enum.Enum)
        or hasattr(found, "__del__")
    ):
        return None
    if found.__basicsize__ == _Attributes.__basicsize__:
        return found
    return None
