"""The sources of masks, and the options that name them: PNG files whose pixels are numbers (Pascal
VOC, ADE20K, PartImageNet, binary masks), COCO annotation files, or both several times."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images.decoding import FileOpener
from vitsee_core.images.folders import walk
from vitsee_core.runtime.options import Option
from vitsee_core.truth.masks.annotations import read_annotations
from vitsee_core.truth.masks.coco import CocoMasks, open_coco
from vitsee_core.truth.masks.labels import (
    BACKGROUND,
    FOREGROUND,
    VOID,
    Labels,
    MaskSource,
    PixelSource,
    Segment,
)
from vitsee_core.truth.masks.panoptic import PanopticMasks, is_panoptic, open_panoptic
from vitsee_stores.errors import VitseeError

Source = TypeVar("Source", bound=PixelSource)
VOID_VALUE = 255
_EXPECTED = "a folder of PNG masks or a COCO .json file"


def parse_void(text: str) -> str | int:
    """A pixel value, or `none`. Raises VitseeError: neither of them."""
    if text == "none":
        return text
    if not text.isdigit():
        raise VitseeError(f"{text!r}; expected a pixel value like 255, or none")
    return int(text)


def objects(about: str = "", default: str | None = None) -> Option:
    """Masks of objects. about: what they add; default: what is done without them."""
    return Option(
        "A folder of PNG masks, whose paths or names are the images' but for the ending, or a COCO "
        f".json file{about}. Repeatable: splits of one data set.",
        "--masks",
        default=default,
    )


SEGMENTS = Option(
    "Take objects or parts in place of images, with their categories for labels: a COCO .json file "
    "(instances or panoptic), or a folder of PNG masks, named as the images are but for the "
    "ending, with one segment per value. Repeatable: splits of one data set.  [default: images and "
    "their labels]"
)
PANOPTIC = Option(
    "The PNG files of a panoptic .json file.",
    metavar="DIR",
    default="the folder beside it that is called as it is",
    only_with=("masks",),
)
BACKGROUND_OPTION = Option(
    "Pixel value of PNG masks outside of objects.",
    metavar="VALUE",
    default="0",
    least=0,
    only_with=("masks",),
)
VOID_OPTION = Option(
    "Pixel value of PNG masks to leave out, or none.",
    metavar="VALUE",
    default="255",
    parse=parse_void,
    only_with=("masks",),
)


def png_files(folder: Path, what: str) -> list[str]:
    """The paths of PNG files below a folder, sorted; other files are ignored. what: one of them.
    Raises VitseeError: there are none."""
    found = [name for name in walk(str(folder)) if name.lower().endswith(".png")]
    if not found:
        raise VitseeError(
            f"no .png files below {folder}; expected one {what} per image, named as the image is"
        )
    return found


def read_numbers(
    folder: str, name: str, hint: str = "", exif: bool = False
) -> NDArray[Any]:
    """(height, width) of a file below a folder: of palette images their indices, of 1-bit images 0
    and 1. hint: at the end of the error; exif: whether the file is turned upright. Raises
    VitseeError: the file cannot be read, or holds colours."""
    image, _ = FileOpener(folder, exif=exif).load(name)
    # Pillow gives palette images ("P") as indices, one band; "F" is a float image.
    if len(image.getbands()) > 1 or image.mode == "F":
        raise VitseeError(
            f"{Path(folder, name)} holds colours (mode {image.mode}); expected one channel of "
            f"class numbers{hint}"
        )
    return np.asarray(image)


@dataclass(frozen=True)
class Several(Generic[Source]):
    """One source after the other; see `PixelSource`."""

    sources: Sequence[Source]

    @property
    def name(self) -> str:
        return ", ".join(source.name for source in self.sources)

    @cached_property
    def keys(self) -> list[str]:
        return [key for source in self.sources for key in source.keys]

    def where(self, i: int) -> str:
        source, k = self._place(i)
        return source.where(k)

    def read(self, i: int) -> NDArray[Any]:
        source, k = self._place(i)
        return source.read(k)

    def _place(self, i: int) -> tuple[Source, int]:
        for source in self.sources:
            # The number among all sources, less the images of the sources before.
            if i < len(source.keys):
                return source, i
            i -= len(source.keys)
        raise IndexError(i)


class SeveralMasks(Several[MaskSource]):
    """Several sources of masks; rules and reasons for void are those of all, where they differ."""

    @property
    def rules(self) -> dict[str, str]:
        # Dictionaries as ordered sets: each rule once, in the order of the sources.
        found: dict[str, dict[str, None]] = {}
        for source in self.sources:
            for key, rule in source.rules.items():
                found.setdefault(key, {})[rule] = None
        return {key: "; ".join(rules) for key, rules in found.items()}

    @property
    def categories(self) -> list[str]:
        known = [source.categories for source in self.sources]
        # A folder knows its categories only after all files are read.
        if all(known):
            return list(dict.fromkeys(name for one in known for name in one))
        return []

    @property
    def void(self) -> str:
        return "; ".join(dict.fromkeys(source.void for source in self.sources))

    def segments(self, i: int) -> list[Segment]:
        source, k = self._place(i)
        return source.segments(k)


def lost_annotations(source: MaskSource) -> dict[str, str]:
    """Return which annotations of COCO files are in no mask, in words -> how many; of several
    files with their names."""
    if isinstance(source, CocoMasks):
        return dict(source.left_out)
    if not isinstance(source, SeveralMasks):
        return {}
    counts_by_kind: dict[str, list[str]] = {}
    for part in source.sources:
        for kind, count in lost_annotations(part).items():
            counts_by_kind.setdefault(kind, []).append(f"{count} in {part.name}")
    return {kind: "; ".join(counts) for kind, counts in counts_by_kind.items()}


def check_once(sources: Sequence[PixelSource]) -> None:
    """Raises VitseeError: an image is in two sources."""
    seen: dict[str, PixelSource] = {}
    for source in sources:
        # setdefault returns the source that had the image first; a single one may list it
        # twice.
        for key in source.keys:
            other = seen.setdefault(key, source)
            if other is not source:
                both = "twice" if other.name == source.name else f"and in {source.name}"
                raise VitseeError(
                    f"the image {key} is in {other.name} {both}; give each once"
                )


def open_masks(
    paths: Path | Sequence[Path],
    background: Sequence[int] | None = None,
    void: int | str | None = None,
    panoptic: Path | None = None,
) -> MaskSource:
    """Folders of PNG files, COCO annotation files, or panoptic ones; several of them as one.

    Args:
        paths: of them.
        background: values of PNG pixels outside of objects; by default 0.
        void: the value of unlabelled PNG pixels, or "none"; by default 255.
        panoptic: the folder of a panoptic file's PNG files; by default the one beside it that is
            called as it is.

    Raises:
        VitseeError: there is none, one is neither, the options do not fit them, or two have the
            same image.
    """
    paths = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not paths:
        raise VitseeError(f"no masks were given; expected {_EXPECTED}")
    found = [_open(Path(path), background, void, panoptic) for path in paths]
    folders = [source for source in found if isinstance(source, MaskFolder)]
    if (background or void is not None) and not folders:
        raise VitseeError(
            f"--background and --void are values of PNG pixels; {found[0].name} is a COCO file: "
            "leave them out"
        )
    # One folder cannot belong to two files.
    n_panoptic = sum(isinstance(one, PanopticMasks) for one in found)
    if panoptic is not None and n_panoptic != 1:
        raise VitseeError(
            f"--panoptic is the folder of one panoptic file's PNG files; {n_panoptic} of the masks "
            "are such files: leave it out"
        )
    check_once(found)
    return found[0] if len(found) == 1 else SeveralMasks(tuple(found))


def _open(
    path: Path,
    background: Sequence[int] | None,
    void: int | str | None,
    panoptic: Path | None,
) -> MaskSource:
    if not path.exists():
        raise VitseeError(f"no file or folder {path}; expected {_EXPECTED}")
    if path.is_dir():
        ignored = None if void == "none" else VOID_VALUE if void is None else int(void)
        background = tuple(background or (0,))
        if ignored in background:
            raise VitseeError(
                f"{ignored} is both --background and --void; expected different values"
            )
        return MaskFolder(str(path), png_files(path, "mask"), background, ignored)
    if not path.is_file() or path.suffix.lower() != ".json":
        raise VitseeError(f"{path} has no masks; expected {_EXPECTED}")
    content = read_annotations(path)
    # The two kinds of COCO files differ in their entries, not in their names.
    if is_panoptic(content):
        return open_panoptic(path, content, panoptic)
    return open_coco(path, content)


@dataclass(frozen=True)
class MaskFolder:
    """PNG files below a folder; see `MaskSource`.

    keys: paths below it. background, void_value: pixel values; every other is foreground. exif: see
    `oriented_as`.
    """

    name: str
    keys: list[str]
    background: tuple[int, ...]
    void_value: int | None
    exif: bool = False

    @property
    def categories(self) -> list[str]:
        """The categories, which are not known before the files are read."""
        return []

    @property
    def void(self) -> str:
        return f"those of value {self.void_value} (--void none makes them foreground)"

    @property
    def rules(self) -> dict[str, str]:
        return {
            "background": ", ".join(map(str, self.background)),
            "void": "none" if self.void_value is None else str(self.void_value),
            "foreground": "every other value",
        }

    def where(self, i: int) -> str:
        return str(Path(self.name, self.keys[i]))

    def read(self, i: int) -> Labels:
        values = read_numbers(self.name, self.keys[i], exif=self.exif)
        # Void last: a value that is none of both is foreground.
        labels = np.where(np.isin(values, self.background), BACKGROUND, FOREGROUND)
        if self.void_value is not None:
            labels[values == self.void_value] = VOID
        return labels.astype(np.uint8)

    def segments(self, i: int) -> list[Segment]:
        """One segment for each value that is neither background nor void, called by it; see
        `MaskSource`."""
        values = read_numbers(self.name, self.keys[i], exif=self.exif)
        # None for no void value, which equals no pixel.
        left_out = (*self.background, self.void_value)
        found = [value for value in np.unique(values).tolist() if value not in left_out]
        return [Segment(str(int(value)), values == value) for value in found]
