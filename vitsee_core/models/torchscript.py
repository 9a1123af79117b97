"""Tensors of a TorchScript archive, such as OpenAI publishes CLIP in; its code is not run.

`torch.jit.save` writes a zip file: the module as a pickle (`NAME/data.pkl`), the bytes of its
tensors (`NAME/data/0`, ...) and its code. The pickle is read with an allow-list: tensors, plain
values, and the module's own classes as bare containers.
"""

from __future__ import annotations

import collections
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
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
}
# Functions that give typed lists back as they are: build_intlist, restore_type_tag, ...
_TAGS = ("torch.jit._pickle", "build_"), ("torch.jit._pickle", "restore_type_tag")


class _Module:
    """A module of the archive: its attributes, among them tensors and other modules."""

    def __setstate__(self, state: Any) -> None:
        self.attributes = state if isinstance(state, dict) else {}


def is_torchscript(path: Path) -> bool:
    """Whether a file is an archive of `torch.jit.save`; those of `torch.save` have no constants."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def read_torchscript(path: Path) -> dict[str, Any]:
    """The module's state dict; numbers among its attributes (`input_resolution`) as they are.

    Raises:
        pickle.UnpicklingError: it has objects besides tensors, plain values and modules.
        KeyError, RuntimeError, ValueError, zipfile.BadZipFile: a damaged archive.
    """
    with zipfile.ZipFile(path) as archive:
        name = next(x for x in archive.namelist() if x.endswith("/constants.pkl"))
        root = name.removesuffix("/constants.pkl")
        with archive.open(f"{root}/data.pkl") as file:
            module = _Unpickler(file, archive, root).load()
    found: dict[str, Any] = {}
    _collect(module, "", found, set())
    return found


class _Unpickler(pickle.Unpickler):
    """Makes tensors, plain values and `_Module`s, and refuses all else."""

    def __init__(self, file: Any, archive: zipfile.ZipFile, root: str):
        super().__init__(file)
        self._archive, self._root = archive, root
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "__torch__":
            return _Module
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        known: dict[tuple[str, str], Callable[..., Any]] = {
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("collections", "OrderedDict"): collections.OrderedDict,
        }
        if (module, name) in known:
            return known[module, name]
        if any(module == where and name.startswith(prefix) for where, prefix in _TAGS):
            return _untagged
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is no tensor, plain value or module")

    def persistent_load(self, pid: Any) -> Tensor:
        _, dtype, key, *_ = pid
        if key not in self._storages:
            info = self._archive.getinfo(f"{self._root}/data/{key}")
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{info.filename} is compressed, which torch.jit.save never does")
            data = bytearray(self._archive.read(info))
            empty = torch.empty(0, dtype=dtype)
            self._storages[key] = torch.frombuffer(data, dtype=dtype) if data else empty
        return self._storages[key]


def _tensor(storage: Tensor, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    return storage.as_strided(size, stride, offset)


def _untagged(value: Any, *_: Any) -> Any:
    return value


def _collect(module: Any, prefix: str, found: dict[str, Any], seen: set[int]) -> None:
    if not isinstance(module, _Module) or id(module) in seen:
        return
    seen.add(id(module))
    for name, value in module.attributes.items():
        if isinstance(value, Tensor) or (isinstance(value, int) and not isinstance(value, bool)):
            found[f"{prefix}{name}"] = value
        else:
            _collect(value, f"{prefix}{name}.", found, seen)
