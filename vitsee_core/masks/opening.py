"""From the user's path of the masks to a source of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitsee_core.masks.coco import open_coco
from vitsee_core.masks.folder import open_mask_folder
from vitsee_core.masks.labels import MaskSource
from vitsee_stores.errors import VitseeError

VOID_VALUE = 255


def open_masks(
    path: Path, background: Sequence[int] | None = None, void: int | str | None = None
) -> MaskSource:
    """A folder of PNG files, or a COCO annotation file.

    Args:
        path: of it.
        background: values of PNG pixels outside of objects; by default 0.
        void: the value of unlabelled PNG pixels, or "none"; by default 255.

    Raises:
        VitseeError: it is neither, or the options do not fit it.
    """
    if not path.exists():
        raise VitseeError(
            f"no file or folder {path}; expected a folder of PNG masks or a COCO .json file"
        )
    if path.is_dir():
        ignored = None if void == "none" else VOID_VALUE if void is None else int(void)
        return open_mask_folder(path, tuple(background or (0,)), ignored)
    if not path.is_file() or path.suffix.lower() != ".json":
        raise VitseeError(
            f"{path} has no masks; expected a folder of PNG masks or a COCO .json file"
        )
    if background or void is not None:
        raise VitseeError(
            f"--background and --void are values of PNG pixels; {path} is a COCO file: leave them "
            "out"
        )
    return open_coco(path)
