"""Videos and their masks in the layout of DAVIS-2017.

    JPEGImages/480p/<video>/00000.jpg, ...     the frames that a store was extracted from
    Annotations/480p/<video>/00000.png, ...    one mask per frame: pixels are numbers of objects, 0
                                               is background, 255 is left out
    ImageSets/2017/val.txt                     the names of videos, one per line

In a store a video is the run of images whose ids share a folder, which names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitsee_core.images import ImageError
from vitsee_core.images.decoding import FileOpener
from vitsee_core.images.folders import walk
from vitsee_core.images.only import named_only
from vitsee_core.indexed_masks import VOID
from vitsee_stores.errors import StoreMismatch, VitseeError
from vitsee_stores.manifest import few

if TYPE_CHECKING:
    from vitsee_stores import Store

SCORED_FROM = 3  # frames; the first and the last are not scored
_ANNOTATIONS = "Annotations"
_RESOLUTION = "480p"


@dataclass(frozen=True)
class Video:
    """A video of the stores."""

    name: str
    frames: tuple[str, ...]  # their names without ending, in order
    rows: tuple[range, ...]  # in each store
    masks: tuple[str, ...]  # the file of each frame's mask below `MaskFiles.root`
    size: tuple[int, int]  # height and width of the frames


@dataclass(frozen=True)
class MaskFiles:
    """A folder with one folder of PNG masks per video. of: video -> frame -> file below `root`."""

    root: Path
    of: dict[str, dict[str, str]]

    def read(self, video: Video, frames: range | None = None) -> NDArray[np.uint8]:
        """(frames, height, width) numbers of objects, 0 where void. Raises VitseeError: a mask is
        damaged, in colour, or not of its frame's size; or the first shows no object."""
        wanted = range(len(video.frames)) if frames is None else frames
        labels = np.zeros((len(wanted), *video.size), np.uint8)
        for place, frame in enumerate(wanted):
            labels[place] = self._read(video.masks[frame], video.size)
        labels[labels == VOID] = 0
        if 0 in wanted and not labels[0].any():
            raise VitseeError(
                f"{self.root / video.masks[0]} shows no object; expected numbers from 1 in the "
                f"first mask of a video ({VOID} is void)"
            )
        return labels

    def _read(self, key: str, size: tuple[int, int]) -> NDArray[np.uint8]:
        where = self.root / key
        try:
            image, _ = FileOpener(str(self.root)).load(key)
        except ImageError as error:
            raise VitseeError(f"{where}: {error.reason}") from None
        if image.mode not in ("P", "L"):
            raise VitseeError(
                f"{where} has mode {image.mode}; expected a mask of numbers of objects (mode P, "
                "with a palette, or L)"
            )
        if (image.height, image.width) != size:
            raise VitseeError(
                f"{where} is {image.width} x {image.height} pixels, its frame {size[1]} x "
                f"{size[0]}; expected masks of the frames' size"
            )
        return np.asarray(image)


def find_masks(path: Path) -> MaskFiles:
    """The masks below DAVIS' own folder, its `Annotations`, or a folder of folders. Raises
    VitseeError: there is no such folder, or no PNG file in it."""
    if not path.is_dir():
        raise VitseeError(f"no folder {path}; expected that of DAVIS, or one folder per video")
    root = path
    if (root / _ANNOTATIONS).is_dir():
        root = root / _ANNOTATIONS
    if (root / _RESOLUTION).is_dir():
        root = root / _RESOLUTION
    masks: dict[str, dict[str, str]] = {}
    for key in walk(str(root)):
        folder, _, file = key.rpartition("/")
        if folder and file.lower().endswith(".png"):
            masks.setdefault(folder.rpartition("/")[2], {})[file[:-4]] = key
    if not masks:
        raise VitseeError(
            f"no masks in {root}; expected files like {_ANNOTATIONS}/{_RESOLUTION}/bear/00000.png"
        )
    return MaskFiles(root, masks)


def find_videos(stores: Sequence[Store], masks: MaskFiles, only: Path | None = None) -> list[Video]:
    """The videos of these stores, in their order.

    Args:
        stores: with the same frames of the same videos, in the data set's order.
        masks: of every frame.
        only: a file with the names of some of them, see `images.only`.

    Raises:
        StoreMismatch: stores with other videos, frames or sizes.
        DataError: `only` cannot be read, or names a missing video.
        VitseeError: a store in another order, a video that is in pieces, too short or without
            masks, or a frame that could not be read.
    """
    runs = [_runs(store, only) for store in stores]
    names = list(runs[0])
    for store, own in zip(stores[1:], runs[1:], strict=True):
        if other := set(names) ^ set(own):
            raise StoreMismatch(
                f"{stores[0].label} and {store.label} hold other videos ({few(sorted(other), 3)} "
                "in one of them only); choose those of both with --only"
            )
    return [_video(name, stores, [own[name] for own in runs], masks) for name in names]


def _runs(store: Store, only: Path | None) -> dict[str, range]:
    """Video -> its rows."""
    if store.shuffled:
        raise VitseeError(
            f"{store.label} holds its images in random order; propagate needs a video's frames "
            "one after the other: extract it with --order dataset"
        )
    ids = store.samples.id.tolist()
    wanted = np.ones(len(ids), bool) if only is None else named_only(only, ids, store.label)
    runs: dict[str, range] = {}
    folders: dict[str, str] = {}
    begin = 0
    for folder, of in groupby(ids, lambda i: i.rpartition("/")[0]):
        rows = range(begin, begin + len(list(of)))
        begin = rows.stop
        chosen = wanted[rows.start : rows.stop]
        if not chosen.any():
            continue
        if not folder:
            raise VitseeError(
                f"{store.label}: {ids[rows.start]} has no folder, which would name its video; "
                "expected ids like bear/00000.jpg"
            )
        if not chosen.all():
            raise VitseeError(
                f"{only} names some frames of {folder} and not all; expected the names of videos"
            )
        name = folder.rpartition("/")[2]
        _check_new(store, name, folder, folders)
        folders[name], runs[name] = folder, rows
    return _readable(store, runs)


def _check_new(store: Store, name: str, folder: str, folders: dict[str, str]) -> None:
    if folders.get(name) == folder:
        raise VitseeError(
            f"{store.label}: the frames of {folder} are not consecutive; expected one after the "
            "other, in the order of their names"
        )
    if name in folders:
        raise VitseeError(
            f"{store.label} has two videos called {name}: {folders[name]} and {folder}; give "
            "them different names"
        )


def _readable(store: Store, runs: dict[str, range]) -> dict[str, range]:
    """The videos with only readable frames; in an unfinished store the others are left out."""
    committed = np.repeat(store.committed, store.plan.slab)
    kept = {name: rows for name, rows in runs.items() if committed[rows.start : rows.stop].all()}
    for name, rows in kept.items():
        bad = [row for row in rows if not store.valid[row]]
        if bad:
            raise VitseeError(
                f"{store.label}: {store.samples.id[bad[0]]} could not be read; propagate needs "
                f"every frame of {name} (leave the video out with --only, or extract anew)"
            )
    if not kept:
        raise VitseeError(f"{store.label} holds no whole video")
    return kept


def _video(name: str, stores: Sequence[Store], runs: Sequence[range], masks: MaskFiles) -> Video:
    store = stores[0]
    frames = [_frames(store, rows) for store, rows in zip(stores, runs, strict=True)]
    sizes = [store.sizes[rows.start : rows.stop] for store, rows in zip(stores, runs, strict=True)]
    for other, own, size in zip(stores[1:], frames[1:], sizes[1:], strict=True):
        if own != frames[0] or (size != sizes[0]).any():
            raise StoreMismatch(f"{store.label} and {other.label} hold other frames of {name}")
    _check_order(store, name, frames[0])
    if len(frames[0]) < SCORED_FROM:
        raise VitseeError(
            f"{store.label}: {name} has {len(frames[0])} frames; expected at least {SCORED_FROM}, "
            "as the first and the last are not scored"
        )
    if (sizes[0] != sizes[0][0]).any():
        raise VitseeError(f"{store.label}: the frames of {name} have different sizes")
    files = _masks(name, frames[0], masks)
    return Video(name, frames[0], tuple(runs), files, (int(sizes[0][0, 0]), int(sizes[0][0, 1])))


def _frames(store: Store, rows: range) -> tuple[str, ...]:
    ids = store.samples.id[rows.start : rows.stop].tolist()
    return tuple(Path(i.rpartition("/")[2]).stem for i in ids)


def _check_order(store: Store, name: str, frames: Sequence[str]) -> None:
    for before, after in pairwise(frames):
        if not _natural(before) < _natural(after):
            raise VitseeError(
                f"{store.label}: in {name} frame {after} follows {before}; expected frames in the "
                "order of their names (00009 before 00010: pad the numbers)"
            )


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which 2 comes before 10."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"([0-9]+)", name) if p]


def _masks(name: str, frames: Sequence[str], masks: MaskFiles) -> tuple[str, ...]:
    """The file of each frame's mask."""
    files = masks.of.get(name, {})
    lacking = [frame for frame in frames if frame not in files]
    where = masks.root / name
    if frames[0] in lacking:
        raise VitseeError(f"no mask {where / frames[0]}.png of the first frame of {name}")
    if lacking:
        raise VitseeError(
            f"{name} has {len(frames)} frames and no mask of {len(lacking)} of them "
            f"({few(lacking, 2)}): only videos with a mask per frame can be scored"
        )
    if beyond := sorted(files.keys() - set(frames)):
        raise VitseeError(
            f"{where} has masks of frames that are not in the store ({few(beyond, 2)}); expected "
            f"all frames of {name}"
        )
    return tuple(files[frame] for frame in frames)
