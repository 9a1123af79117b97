"""Objects as plain data: what a sum holds, written so that reading it back runs no code.

The tree of an object is JSON, its arrays are members of an uncompressed .npz, with a checksum each.
Pickle would be shorter, but a pickle in a folder of results runs what a stranger wrote into it, and
a list of harmless names has to be kept in step with numpy's. Here an object of vitsee's own classes
is restored by setting its attributes, without any of its methods, and nothing else is restored but
numbers, text, containers and arrays.
"""

from __future__ import annotations

import enum
import json
import sys
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.runtime.machine import human_bytes

OWN = "vitsee_core."  # modules whose classes are restored
TREE = "tree"
MOST_BYTES = 4 << 30


class NotPlain(Exception):
    """A value that cannot be written, or a file that is not what `write_plain` wrote."""


def write_plain(file: IO[bytes], value: Any, *, most: int = MOST_BYTES) -> None:
    """Write `value` to an open file, for `read_plain`.

    Args:
        file: open for writing; arrays go there one after the other, without a copy of all.
        value: None, booleans, numbers, text, slices, lists, tuples, dicts, sets, arrays, and
            instances of vitsee's own classes made of these.
        most: bytes of all arrays.

    Raises:
        NotPlain: it holds something else, or more bytes; nothing is written.
    """
    arrays: list[NDArray[Any]] = []
    tree = json.dumps(_encoded(value, arrays)).encode()
    size = len(tree) + sum(array.nbytes for array in arrays)
    if size > most:
        raise NotPlain(f"{human_bytes(size)}, of {human_bytes(most)} at most")
    members = {f"a{number}": array for number, array in enumerate(arrays)}
    members[TREE] = np.frombuffer(tree, np.uint8)
    np.savez(file, allow_pickle=False, **members)


def read_plain(file: IO[bytes]) -> Any:
    """The value that `write_plain` wrote. Raises NotPlain: damaged, compressed, or not written by
    it."""
    try:
        with zipfile.ZipFile(file) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise NotPlain("compressed members")
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            return _decoded(json.loads(arrays[TREE].tobytes()), arrays)
    except NotPlain:
        raise
    except Exception as error:  # whatever a damaged file makes json, zipfile and numpy raise
        raise NotPlain(f"{type(error).__name__}: {error}") from None


def is_plain(value: Any) -> bool:
    """Whether `write_plain` can write a value, its size apart."""
    try:
        _encoded(value, [])
    except NotPlain:
        return False
    return True


def _encoded(value: Any, arrays: list[NDArray[Any]]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, np.generic) or (kind is np.ndarray and value.dtype != object):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise NotPlain("an array of objects with fields")
        arrays.append(array)
        return {"scalar" if isinstance(value, np.generic) else "array": len(arrays) - 1}
    if kind is np.ndarray:
        items = [_encoded(item, arrays) for item in value.ravel().tolist()]
        return {"objects": items, "shape": list(value.shape)}
    if kind is list:
        return [_encoded(item, arrays) for item in value]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [_encoded(item, arrays) for item in value]}
    if kind is slice:
        return {"slice": [_encoded(v, arrays) for v in (value.start, value.stop, value.step)]}
    if kind is dict:
        pairs = value.items()
        return {"dict": [[_encoded(k, arrays), _encoded(v, arrays)] for k, v in pairs]}
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not hasattr(value, "__dict__") or _class(name) is not kind:
        raise NotPlain(f"a {name}")
    state = {key: _encoded(own, arrays) for key, own in vars(value).items()}
    return {"object": name, "state": state}


def _decoded(tree: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    if isinstance(tree, list):
        return [_decoded(item, arrays) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "object" in tree:
        kind = _class(tree["object"])
        if kind is None:
            raise NotPlain(f"no class of vitsee's: {tree['object']}")
        restored: Any = object.__new__(kind)
        vars(restored).update({k: _decoded(own, arrays) for k, own in tree["state"].items()})
        return restored
    if "objects" in tree:
        items = np.empty(len(tree["objects"]), object)
        for at, item in enumerate(tree["objects"]):
            items[at] = _decoded(item, arrays)
        return items.reshape(tree["shape"])
    ((kind, own),) = tree.items()
    if kind == "dict":
        return {_decoded(k, arrays): _decoded(v, arrays) for k, v in own}
    if kind in ("array", "scalar"):
        array = arrays[f"a{int(own)}"]
        return array if kind == "array" else array[()]
    make = {"tuple": tuple, "set": set, "frozenset": frozenset}.get(kind)
    if make is not None:
        return make(_decoded(item, arrays) for item in own)
    if kind == "slice":
        return slice(*(_decoded(item, arrays) for item in own))
    raise NotPlain(f"a {kind}")


class _Attributes:
    pass


def _class(name: str) -> type | None:
    """The class of this `module:name`, if it is one of vitsee's that is loaded, consists of its
    attributes and does nothing when it is freed."""
    module, _, qualified = name.partition(":")
    if not module.startswith(OWN) or module not in sys.modules:
        return None
    found = vars(sys.modules[module]).get(qualified)
    if not isinstance(found, type) or issubclass(found, enum.Enum) or hasattr(found, "__del__"):
        return None
    return found if found.__basicsize__ == _Attributes.__basicsize__ else None
