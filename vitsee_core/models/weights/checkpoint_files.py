"""Checkpoint files read without running code of theirs, among them TorchScript archives, such as
OpenAI publishes CLIP in.

`torch.jit.save` writes a zip file: the module as a pickle (`NAME/data.pkl`), the bytes of its
tensors (`NAME/data/0`, ...) and its code. The pickle is read with an allow-list: tensors, plain
values, and the module's own classes as bare containers.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitsee_core.models.hook_points import ModelError

# Training arguments that such files carry beside the tensors; making one runs no foreign code.
_HARMLESS: list[Any] = [
    argparse.Namespace,
    pathlib.PosixPath,
    np.dtype,
    np.float64,
    np.int64,
    type(np.dtype(np.float64)),
    type(np.dtype(np.int64)),
    np.core.multiarray.scalar if np.__version__ < "2" else np._core.multiarray.scalar,  # type: ignore[attr-defined]
]
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


def read_file(path: Path) -> Any:
    """The content of a .safetensors file, a torch file or a TorchScript archive; no code of the
    file is run.

    Raises:
        ModelError: no such file, or not readable as either.
    """
    if not path.is_file():
        raise ModelError(f"no checkpoint at {path}; expected a .pth, .pt or .safetensors file")
    if not path.stat().st_size:
        raise ModelError(f"{path} is empty; expected a .pth, .pt or .safetensors file")
    if path.suffix in (".npz", ".npy"):
        raise ModelError(f"{path} is a NumPy archive; expected .pth, .pt or .safetensors")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        if is_torchscript(path):
            return read_torchscript(path)
        with torch.serialization.safe_globals(_HARMLESS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the errors below say what matters, in one line
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        match = re.search(r"(?:GLOBAL|global) (\S+)", str(error))
        what = f" ({match[1]})" if match else ""
        raise ModelError(
            f"{path} holds objects besides tensors and plain values{what}; expected a file that "
            "torch.load(weights_only=True) reads: save its state dict alone"
        ) from error
    except Exception as error:
        text = " ".join(str(error).split())[:120]
        raise ModelError(
            f"{path} is no readable checkpoint ({type(error).__name__}: {text}); expected a whole "
            "file of torch.save or safetensors"
        ) from error


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
