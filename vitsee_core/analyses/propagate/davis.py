"""Videos and their masks in the layout of DAVIS-2017.

    JPEGImages/480p/<video>/00000.jpg, ...     the frames that a store was extracted from
    Annotations/480p/<video>/00000.png, ...    one mask per frame: pixels are numbers of objects, 0
                                               is background, 255 is left out
    ImageSets/2017/val.txt                     the names of videos, one per line

In a store of images a video is the run of images whose ids share a folder, which names it. In a
store of clips it is one clip, named by its folder or file; then only the frames that the store
sampled of it are used, in every store, and a clip is taken to have a frame for each of its masks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitsee_core.demo.indexed_masks import VOID
from vitsee_core.images import ImageError
from vitsee_core.images.decoding import FileOpener
from vitsee_core.images.folders import is_video, walk
from vitsee_core.images.selection import named_only
from vitsee_core.images.videos import STILL, Sampling, Timeline
from vitsee_core.truth.masks.orientation import say_oriented_files
from vitsee_stores.errors import StoreMismatch, VitseeError
from vitsee_stores.manifest import abbreviate

if TYPE_CHECKING:
    from vitsee_stores import Store
    from vitsee_stores.layout import TokenLayout

SCORED_FROM = 3  # frames; the first and the last are not scored
_ANNOTATIONS = "Annotations"
_RESOLUTION = "480p"


@dataclass(frozen=True)
class FrameRows:
    """The places of a video's frames in one store.

    Attributes:
        rows: of each frame, of a store of clips the clip's.
        places: of each frame its place among the frames as the model saw them, of clips; None of
            images, and of clips before their frames are known.
        clip: how frames were taken, of clips.
    """

    rows: Sequence[int]
    places: tuple[int, ...] | None = None
    clip: Sampling | None = None

    def cells(self, layout: TokenLayout) -> tuple[int, ...] | None:
        """The place in time of each frame in a site's grid; None of images."""
        if self.places is None or self.clip is None:
            return None
        return tuple(k * (layout.frames or 1) // self.clip.frames for k in self.places)

    def some(self, frames: Sequence[int]) -> FrameRows:
        """Those of some of the frames of a store of images."""
        return FrameRows([self.rows[k] for k in frames])


@dataclass(frozen=True)
class Video:
    """A video of the stores."""

    name: str
    frames: tuple[str, ...]  # their names without ending, in order
    rows: tuple[FrameRows, ...]  # in each store
    masks: tuple[str, ...]  # the file of each frame's mask below `MaskFiles.root`
    size: tuple[int, int]  # height and width of the frames


@dataclass(frozen=True)
class MaskFiles:
    """A folder with one folder of PNG masks per video.

    Attributes:
        of: video -> frame -> file below `root`.
        exif: whether masks are turned as the frames are, see `oriented_masks`.
    """

    root: Path
    of: dict[str, dict[str, str]]
    exif: bool = False

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
            image, _ = FileOpener(str(self.root), exif=self.exif).load(key)
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
        raise VitseeError(
            f"no folder {path}; expected that of DAVIS, or one folder per video"
        )
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


def oriented_masks(
    stores: Sequence[Store], masks: MaskFiles, videos: Sequence[Video]
) -> MaskFiles:
    """Return the masks turned as the frames are, and log how many have an orientation.

    Raises:
        StoreMismatch: masks have an orientation, and the frames are turned in some stores alone.
    """
    turned = [bool(store.manifest.transform.get("exif")) for store in stores]
    files = [masks.root / mask for video in videos for mask in video.masks]
    n_turned = say_oriented_files(str(masks.root), turned[0], files)
    if n_turned and len(set(turned)) > 1:
        with_exif = stores[turned.index(True)].label
        without = stores[turned.index(False)].label
        raise StoreMismatch(
            f"{n_turned} of the masks in {masks.root} have an EXIF orientation, and frames are "
            f"turned by theirs in {with_exif} and not in {without}; extract both with --exif, or "
            "both without"
        )
    return replace(masks, exif=turned[0])


def find_videos(
    stores: Sequence[Store], masks: MaskFiles, only: Path | None = None
) -> list[Video]:
    """The videos of these stores, in their order.

    Args:
        stores: with the same frames of the same videos, in the data set's order; of clips, sampled
            alike, the videos themselves.
        masks: of every frame.
        only: a file with the names of some of them, see `images.selection`.

    Raises:
        StoreMismatch: stores with other videos, frames or sizes.
        DataError: `only` cannot be read, or names a missing video.
        VitseeError: a store in another order, a video that is in pieces, too short or without
            masks, a frame that could not be read, or clips of one frame again and again.
    """
    runs = [_runs(store, only) for store in stores]
    names = list(runs[0])
    for store, own in zip(stores[1:], runs[1:], strict=True):
        if other := set(names) ^ set(own):
            raise StoreMismatch(
                f"{stores[0].label} and {store.label} hold other videos "
                f"({abbreviate(sorted(other), 3)} "
                "in one of them only); choose those of both with --only"
            )
    return [_video(name, stores, [own[name] for own in runs], masks) for name in names]


def _runs(store: Store, only: Path | None) -> dict[str, FrameRows]:
    """Video -> its rows."""
    if store.plan.clip is not None:
        return _clips(store, only)
    if store.shuffled:
        raise VitseeError(
            f"{store.label} holds its images in random order; propagate needs a video's frames "
            "one after the other: extract it with --order dataset"
        )
    ids, wanted = _wanted(store, only)
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
    return {name: FrameRows(rows) for name, rows in _readable(store, runs).items()}


def _wanted(store: Store, only: Path | None) -> tuple[list[str], NDArray[np.bool_]]:
    """The ids of a store's samples, and which of them `--only` names."""
    ids: list[str] = store.samples.id.tolist()
    return ids, np.ones(len(ids), bool) if only is None else named_only(
        only, ids, store.label
    )


def _clips(store: Store, only: Path | None) -> dict[str, FrameRows]:
    """The same of a store of clips, whose frames are not known yet."""
    said = store.manifest.transform.get("clip")
    if not isinstance(said, dict):
        raise VitseeError(
            f"{store.label} does not say which frames of a clip it holds; extract it anew"
        )
    sampling = Sampling(**said)
    if sampling.time == STILL:
        raise VitseeError(
            f"{store.label} holds one frame of each clip again and again (--time still), and "
            "nothing moves in it; expected clips with --time ordered or shuffled"
        )
    ids, wanted = _wanted(store, only)
    runs: dict[str, range] = {}
    folders: dict[str, str] = {}
    for row in np.flatnonzero(wanted).tolist():
        name = ids[row].rpartition("/")[2]
        name = name.rpartition(".")[0] if is_video(name) else name
        if name in folders:
            _check_new(store, name, ids[row], folders)
        folders[name], runs[name] = ids[row], range(row, row + 1)
    readable = _readable(store, runs)
    return {name: FrameRows(rows, clip=sampling) for name, rows in readable.items()}


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
    kept = {
        name: rows
        for name, rows in runs.items()
        if committed[rows.start : rows.stop].all()
    }
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


def _video(
    name: str, stores: Sequence[Store], runs: Sequence[FrameRows], masks: MaskFiles
) -> Video:
    store = stores[0]
    runs = _sampled(name, stores, runs, masks)
    frames = [
        _frames(store, run, masks.of.get(name, {}))
        for store, run in zip(stores, runs, strict=True)
    ]
    sizes = [store.sizes[list(run.rows)] for store, run in zip(stores, runs, strict=True)]
    for other, own, size in zip(stores[1:], frames[1:], sizes[1:], strict=True):
        if own != frames[0] or (size != sizes[0]).any():
            raise StoreMismatch(
                f"{store.label} and {other.label} hold other frames of {name}"
            )
    for before, after in pairwise(frames[0]):
        if not _natural(before) < _natural(after):
            raise VitseeError(
                f"{store.label}: in {name} frame {after} follows {before}; expected frames in the "
                "order of their names (00009 before 00010: pad the numbers)"
            )
    if len(frames[0]) < SCORED_FROM:
        raise VitseeError(
            f"{store.label}: {name} has {len(frames[0])} frames; expected at least {SCORED_FROM}, "
            "as the first and the last are not scored"
        )
    if (sizes[0] != sizes[0][0]).any():
        raise VitseeError(f"{store.label}: the frames of {name} have different sizes")
    sampled = any(run.clip is not None for run in runs)
    of_frames = _masks(name, frames[0], masks, every=not sampled)
    height, width = sizes[0][0].tolist()
    return Video(name, frames[0], tuple(runs), of_frames, (height, width))


def _sampled(
    name: str, stores: Sequence[Store], runs: Sequence[FrameRows], masks: MaskFiles
) -> list[FrameRows]:
    """The rows of the frames that the stores of clips sampled; as they are of images alone.

    Raises:
        StoreMismatch: clips that were sampled otherwise, or images without these frames.
        VitseeError: no masks, or fewer than frames were sampled.
    """
    clips = [k for k, run in enumerate(runs) if run.clip is not None]
    if not clips:
        return list(runs)
    every = _in_order(masks.of.get(name, {}))
    chosen: list[int] = []
    found = list(runs)
    for k in clips:
        store = stores[k]
        run = runs[k]
        assert run.clip is not None
        sample = str(store.samples.id[run.rows[0]])
        try:
            own = run.clip.chosen(sample, Timeline(range(len(every)), len(every)))
        except ImageError as error:
            raise VitseeError(
                f"{masks.root / name} has {len(every)} masks, too few for the frames that "
                f"{store.label} sampled ({error.reason}); expected a mask of each frame of the clip"
            ) from None
        if k == clips[0]:
            chosen = own
        elif own != chosen:
            raise StoreMismatch(
                f"{stores[clips[0]].label} and {store.label} sampled other frames of {name} "
                "(extract both with the same --frames and --every)"
            )
        order = run.clip.order(sample)
        places = tuple(order.index(frame) for frame in range(run.clip.frames))
        found[k] = FrameRows([run.rows[0]] * len(own), places, run.clip)
    wanted = [every[k] for k in chosen]
    for k, run in enumerate(runs):
        if run.clip is None:
            there = {frame: i for i, frame in enumerate(_frames(stores[k], run, {}))}
            if lacking := [frame for frame in wanted if frame not in there]:
                raise StoreMismatch(
                    f"{stores[k].label} has no frame {lacking[0]} of {name}, which "
                    f"{stores[clips[0]].label} sampled"
                )
            found[k] = run.some([there[frame] for frame in wanted])
    return found


def _in_order(masks: Mapping[str, str]) -> list[str]:
    """The frames of a video that have masks, in the order of their names."""
    return sorted(masks, key=_natural)


def _frames(store: Store, run: FrameRows, masks: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the frames; of a clip those of the masks that belong to its frames."""
    if run.clip is not None:
        every = _in_order(masks)
        sample = str(store.samples.id[run.rows[0]])
        line = Timeline(range(len(every)), len(every))
        return tuple(every[k] for k in run.clip.chosen(sample, line))
    ids = store.samples.id[list(run.rows)].tolist()
    return tuple(Path(i.rpartition("/")[2]).stem for i in ids)


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which 2 comes before 10."""
    return [
        (int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"([0-9]+)", name) if p
    ]


def _masks(
    name: str, frames: Sequence[str], masks: MaskFiles, every: bool
) -> tuple[str, ...]:
    """The file of each frame's mask. every: whether the frames are all of the video."""
    files = masks.of.get(name, {})
    lacking = [frame for frame in frames if frame not in files]
    where = masks.root / name
    if frames[0] in lacking:
        raise VitseeError(f"no mask {where / frames[0]}.png of the first frame of {name}")
    if lacking:
        raise VitseeError(
            f"{name} has {len(frames)} frames and no mask of {len(lacking)} of them "
            f"({abbreviate(lacking, 2)}): only videos with a mask per frame can be scored"
        )
    if every and (beyond := sorted(files.keys() - set(frames))):
        raise VitseeError(
            f"{where} has masks of frames that are not in the store "
            f"({abbreviate(beyond, 2)}); expected "
            f"all frames of {name}"
        )
    return tuple(files[frame] for frame in frames)
