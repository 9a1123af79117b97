"""PNG files below a folder whose pixels are numbers, not colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.decoding import FileOpener
from vitsee_core.images.folders import walk
from vitsee_stores.errors import VitseeError


def png_files(folder: Path, what: str) -> list[str]:
    """The paths of PNG files below a folder, sorted; other files are ignored. what: one of them.

    Raises:
        VitseeError: there are none.
    """
    found = [name for name in walk(str(folder)) if name.lower().endswith(".png")]
    if not found:
        raise VitseeError(
            f"no .png files below {folder}; expected one {what} per image, named as the image is"
        )
    return found


def read_numbers(folder: str, name: str, hint: str = "") -> NDArray[Any]:
    """(height, width) of a file below a folder: of palette images their indices, of 1-bit images 0
    and 1. hint: at the end of the error.

    Raises:
        VitseeError: the file cannot be read, or holds colours.
    """
    image, _ = FileOpener(folder).load(name)
    if len(image.getbands()) > 1 or image.mode == "F":
        raise VitseeError(
            f"{Path(folder, name)} holds colours (mode {image.mode}); expected one channel of "
            f"class numbers{hint}"
        )
    return np.asarray(image)
