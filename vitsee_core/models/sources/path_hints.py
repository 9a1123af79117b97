"""Hints for a path that stands in place of a model's name: what it is, and the name to use."""

from __future__ import annotations

import json
from pathlib import Path

from vitsee_stores.metadata import ZARR_JSON

WEIGHTS = (".pth", ".pt", ".safetensors", ".bin", ".ckpt")
MAX_CONFIG_BYTES = 1 << 20


def path_hint(name: str) -> str:
    """Return a clause that says what a path is, and which name is a model's: "is a folder; expected
    local-dir:PATH". "" where nothing is at the path that a model could be made of."""
    if not name:  # pathlib reads it as the working folder
        return ""
    path = Path(name).expanduser()
    if (path / ZARR_JSON).is_file():
        return "is a store; expected a model (of which it is: vitsee info)"
    if path.is_dir():
        return f"is a folder; expected {_folder_model(path, name)}"
    if path.is_file() and path.suffix.lower() in WEIGHTS:
        return f"is a file of weights; expected the model's name, and --checkpoint {name}"
    return ""


def _folder_model(path: Path, name: str) -> str:
    """Return the name of the model in a folder, which the keys of its config.json show."""
    config = path / "config.json"
    keys: set[str] = set()
    try:
        # A larger file is data, not a configuration, and would be read for a mere hint.
        if config.stat().st_size <= MAX_CONFIG_BYTES:
            keys = {*json.loads(config.read_bytes())}
    except (OSError, ValueError, RecursionError, TypeError):
        pass
    if "architecture" in keys:  # timm's
        return f"local-dir:{name}"
    if {"model_type", "architectures"} & keys:
        return f"transformers:{name}"
    if (path / "hubconf.py").is_file():
        return f"torchhub:{name}:ENTRY"
    if config.is_file():
        return "a config.json of timm (local-dir:FOLDER) or transformers (transformers:FOLDER)"
    return (
        "a model's name, or a folder with config.json (transformers:FOLDER, "
        "local-dir:FOLDER)"
    )
