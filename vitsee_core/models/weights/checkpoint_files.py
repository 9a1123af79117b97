"""Checkpoint files read without running code of theirs, among them TorchScript archives, such as
OpenAI publishes CLIP in.

The first bytes of a file say what it is (`file_kinds`). Torch reads its own files itself, with
`weights_only`; where that refuses objects beside the tensors they are skipped (`unpickling`).
`torch.jit.save` writes a zip file: the module as a pickle (`NAME/data.pkl`), the bytes of its
tensors (`NAME/data/0`, ...) and its code. The pickle is read with an allow-list: tensors, plain
values, and the module's own classes as bare containers.
"""

from __future__ import annotations

import argparse
import logging
import pathlib
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.weights.file_kinds import is_safetensors, kind_of_file, shard_of
from vitsee_core.models.weights.unpickling import (
    Archive,
    Function,
    Unpickler,
    first,
    read_skipping,
)

log = logging.getLogger(__name__)

EXPECTED = "expected a .pth, .pt or .safetensors file"
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
# Functions that give typed lists back as they are: build_intlist, restore_type_tag, ...
_TAGS = ("torch.jit._pickle", "build_"), ("torch.jit._pickle", "restore_type_tag")


def read_file(path: Path) -> Any:
    """The content of a file of safetensors, of torch.save or of torch.jit.save, whatever its
    ending; no code of the file is run, and objects beside tensors and plain values are left out or
    empty.

    Raises:
        ModelError: no such file, or of another kind, which is named.
    """
    _require_weights(path)
    try:
        if is_safetensors(path) or (
            path.suffix == ".safetensors" and not _is_torch(path)
        ):
            return _read_safetensors(path)
        if is_torchscript(path):
            return read_torchscript(path)
        return _read_torch(path)
    except pickle.UnpicklingError as error:
        match = re.search(r"(?:GLOBAL|global) (\S+)", str(error))
        raise ModelError(_of_objects(path, match[1] if match else "")) from error
    except ModelError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:120]
        raise ModelError(
            f"{path} is no readable checkpoint ({type(error).__name__}: {text}); "
            "expected a whole file of torch.save or safetensors"
        ) from error


def _require_weights(path: Path) -> None:
    """Refuse what is not a file with the weights of one model. Raises ModelError: says what it is
    instead."""
    if path.is_dir():
        raise ModelError(f"{path} is a folder; {EXPECTED}")
    if not path.is_file():
        raise ModelError(f"no checkpoint at {path}; {EXPECTED}")
    if not path.stat().st_size:
        raise ModelError(f"{path} is empty; {EXPECTED}")
    try:
        kind = kind_of_file(path)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}); {EXPECTED}"
        ) from error
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ModelError(
            f"{path} is no readable checkpoint (a damaged zip archive)"
        ) from error
    if kind:
        raise ModelError(f"{path} is {kind}; {EXPECTED}")
    if shard := shard_of(path):
        raise ModelError(
            f"{path} is {shard}; expected one with all tensors, or the folder: "
            f"transformers:{path.parent}"
        )


def _is_torch(path: Path) -> bool:
    """Whether a file begins as those of torch.save do: a zip archive, or a pickle."""
    with path.open("rb") as file:
        return file.read(2) in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04")


def _read_safetensors(path: Path) -> Any:
    from safetensors.torch import load_file

    if path.suffix != ".safetensors":
        log.info("%s is in the format safetensors, whatever its ending", path)
    return load_file(path)


def _read_torch(path: Path) -> Any:
    """The content of a file of torch.save. Raises ModelError: it holds objects, no tensors."""
    try:
        with torch.serialization.safe_globals(_HARMLESS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the errors say what matters, in one line
            with path.open("rb") as file:  # of a path torch.load believes the ending
                return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        content, skipped = read_skipping(path)
    if skipped and not _holds_tensors(content):
        raise ModelError(_of_objects(path, skipped[0]))
    log.debug("%s: objects left out: %s", path, ", ".join(dict.fromkeys(skipped)))
    return content


def _holds_tensors(content: Any) -> bool:
    """Whether there are tensors in a file's content, or in a dict in it."""
    if not isinstance(content, Mapping):
        return isinstance(content, Tensor)
    return any(
        isinstance(value, Tensor)
        or (
            isinstance(value, Mapping)
            and any(isinstance(x, Tensor) for x in value.values())
        )
        for value in content.values()
    )


def _of_objects(path: Path, name: str) -> str:
    named = f" ({name})" if name else ""
    return (
        f"{path} holds objects besides tensors and plain values{named}; expected a file "
        "that torch.load(weights_only=True) reads: save its state dict alone"
    )


class _Module:
    """A module of the archive: its attributes, among them tensors and other modules."""

    def __setstate__(self, state: Any) -> None:
        self.attributes = state if isinstance(state, dict) else {}


class _ScriptUnpickler(Unpickler):
    """Makes tensors, plain values and `_Module`s, and refuses all else."""

    def other(self, module: str, name: str) -> Any:
        """Return the stand-in for a class of the archive, or for a function that types a list."""
        if module.split(".")[0] == "__torch__":
            return _Module
        if any(module == where and name.startswith(prefix) for where, prefix in _TAGS):
            return Function(first)
        raise pickle.UnpicklingError(
            f"GLOBAL {module}.{name} is no tensor, plain value or module"
        )


def is_torchscript(path: Path) -> bool:
    """Whether a file is an archive of `torch.jit.save`; those of `torch.save` have no constants."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def read_torchscript(path: Path) -> dict[str, Any]:
    """Return the state dict of a module that torch.jit.save wrote, with the integers among the
    module's attributes (`input_resolution`).

    Raises:
        pickle.UnpicklingError: it has objects besides tensors, plain values and modules.
        KeyError, RuntimeError, ValueError, zipfile.BadZipFile: a damaged archive.
    """
    with zipfile.ZipFile(path) as archive:
        constants_path = next(
            path for path in archive.namelist() if path.endswith("/constants.pkl")
        )
        root = constants_path.removesuffix("/constants.pkl")
        with archive.open(f"{root}/data.pkl") as file:
            module = _ScriptUnpickler(file, Archive(archive, root).storage).load()
    state: dict[str, Any] = {}
    _collect_attributes(module, prefix="", state=state, visited=set())
    return state


def _collect_attributes(
    module: Any, *, prefix: str, state: dict[str, Any], visited: set[int]
) -> None:
    """Add the tensors and integers of a module, and of the modules in it, to a state dict.

    Args:
        module: the module; other objects are passed over.
        prefix: what stands before the names of its attributes.
        state: the state dict, changed in place.
        visited: ids of the modules so far, as a module may hold itself.
    """
    if not isinstance(module, _Module) or id(module) in visited:
        return
    visited.add(id(module))
    for name, value in module.attributes.items():
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, Tensor) or is_integer:
            state[f"{prefix}{name}"] = value
        else:
            _collect_attributes(
                value, prefix=f"{prefix}{name}.", state=state, visited=visited
            )
