"""Hints for a path that was given in place of a model's name: what it is, and the name to give."""

from __future__ import annotations

import json
from pathlib import Path

from vitsee_stores.metadata import ZARR_JSON

WEIGHTS = (".pth", ".pt", ".safetensors", ".bin", ".ckpt")
MAX_CONFIG_BYTES = 1 << 20


def path_hint(name: str) -> str:
    """What is at a path, and what to give in its place, as a clause; "" where nothing is that a
    model could be made of."""
    if not name:  # pathlib reads it as the working folder
        return ""
    path = Path(name).expanduser()
    if (path / ZARR_JSON).is_file():
        return "is a store; expected a model (of which it is: vitsee info)"
    if path.is_dir():
        return f"is a folder; expected {_folder(path, name)}"
    if path.is_file() and path.suffix.lower() in WEIGHTS:
        return f"is a file of weights; expected the model's name, and --checkpoint {name}"
    return ""


def _folder(path: Path, name: str) -> str:
    """The name of the model in a folder, by its config.json."""
    config = path / "config.json"
    keys: set[str] = set()
    try:
        if config.stat().st_size <= MAX_CONFIG_BYTES:
            keys = {*json.loads(config.read_bytes())}
    except (OSError, ValueError, RecursionError, TypeError):
        pass
    if "architecture" in keys:
        return f"local-dir:{name}"
    if {"model_type", "architectures"} & keys:
        return f"transformers:{name}"
    if (path / "hubconf.py").is_file():
        return f"torchhub:{name}:ENTRY"
    if config.is_file():
        return "a config.json of timm (local-dir:FOLDER) or transformers (transformers:FOLDER)"
    return "a model's name, or a folder with config.json (transformers:FOLDER, local-dir:FOLDER)"
