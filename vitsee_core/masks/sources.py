"""Where masks come from: PNG files whose pixels are numbers (Pascal VOC, ADE20K, PartImageNet,
binary masks), or a COCO annotation file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitsee_core.images.decoding import FileOpener
from vitsee_core.images.folders import walk
from vitsee_core.masks.coco import open_coco
from vitsee_core.masks.labels import BACKGROUND, FOREGROUND, VOID, Labels, MaskSource
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


@dataclass(frozen=True)
class MaskFolder:
    """PNG files below a folder; see `MaskSource`.

    keys: paths below it. background, void_value: pixel values; every other is foreground. Pixels of
    palette images are their indices, those of 1-bit images 0 and 1.
    """

    name: str
    keys: list[str]
    background: tuple[int, ...]
    void_value: int | None

    @property
    def void(self) -> str:
        """What makes a pixel void."""
        return f"those of value {self.void_value} (--void none makes them foreground)"

    @property
    def rules(self) -> dict[str, str]:
        """How pixels become labels."""
        return {
            "background": ", ".join(map(str, self.background)),
            "void": "none" if self.void_value is None else str(self.void_value),
            "foreground": "every other value",
        }

    def where(self, i: int) -> str:
        """The file."""
        return str(Path(self.name, self.keys[i]))

    def read(self, i: int) -> Labels:
        """(height, width); see `MaskSource`."""
        image, _ = FileOpener(self.name).load(self.keys[i])
        if len(image.getbands()) > 1 or image.mode == "F":
            raise VitseeError(
                f"{self.where(i)} holds colours (mode {image.mode}); expected one channel of class "
                "numbers"
            )
        values = np.asarray(image)
        labels = np.where(np.isin(values, self.background), BACKGROUND, FOREGROUND)
        if self.void_value is not None:
            labels[values == self.void_value] = VOID
        return labels.astype(np.uint8)


def open_mask_folder(path: Path, background: tuple[int, ...], void: int | None) -> MaskFolder:
    """The PNG files below `path`; other files are ignored.

    Raises:
        VitseeError: there are none, or a value is both background and void.
    """
    if void in background:
        raise VitseeError(f"{void} is both --background and --void; expected different values")
    keys = [key for key in walk(str(path)) if key.lower().endswith(".png")]
    if not keys:
        raise VitseeError(
            f"no .png files below {path}; expected one mask per image, named as the image is"
        )
    return MaskFolder(str(path), keys, background, void)
