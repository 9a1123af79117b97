"""Small image files and the check for one-line errors, for the tests of the data sources."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vitsee_core.images import open_source
from vitsee_stores.errors import VitseeError


def encoded(shade: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), (shade, 0, 255 - shade)).save(file, kind)
    return file.getvalue()


def plant(root: Path, *paths: str) -> Path:
    """Image files below `root`, each of a colour of its own."""
    for k, path in enumerate(paths):
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(encoded(k))
    return root


def refused(data: Any, split: str | None = None) -> str:
    """The one line with which opening fails."""
    with pytest.raises(VitseeError) as caught:
        open_source(str(data), split=split)
    line = str(caught.value)
    assert "\n" not in line and not line.endswith(".")
    return line
