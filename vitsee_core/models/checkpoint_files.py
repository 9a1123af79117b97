"""Checkpoint files read without running code of theirs."""

from __future__ import annotations

import argparse
import pathlib
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitsee_core.models.hook_points import ModelError
from vitsee_core.models.torchscript import is_torchscript, read_torchscript

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
