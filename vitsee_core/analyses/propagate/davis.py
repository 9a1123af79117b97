"""Videos and their masks in the layout of DAVIS-2017.

    JPEGImages/480p/<video>/00000.jpg, ...     the frames that a store was extracted from
    Annotations/480p/<video>/00000.png, ...    one mask per frame: pixels are numbers of
    objects, 0
                                               is background, 255 is left out unless
                                               another value is, or none
    ImageSets/2017/val.txt                     the names of videos, one per line

In a store of images a video is the run of images whose ids share a folder, which names it.
In a store of clips it is one clip, named by its folder or file; then only the frames that
the store sampled of it are used, in every store, and a clip is taken to have a frame for
each of its masks.
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

MIN_FRAMES = 3  # the first and the last are not scored
_ANNOTATIONS = "Annotations"
_RESOLUTION = "480p"


@dataclass(frozen=True)
class FrameRows:
    """The rows of a video's frames in one store.

    Attributes:
        rows: (frames,) row of each frame; in a store of clips the clip's row, for each of
            them.
        clip_positions: of clips, (frames,) the position of each frame among the frames as
            the model saw them; None for images, and for clips before their frames are
            known.
        clip: of clips, how frames were sampled; None for images.
    """

    rows: Sequence[int]
    clip_positions: tuple[int, ...] | None = None
    clip: Sampling | None = None

    def time_indices(self, layout: TokenLayout) -> tuple[int, ...] | None:
        """Return (frames,) each frame's index in time in a site's grid; None for images."""
        if self.clip_positions is None or self.clip is None:
            return None
        # A token may stand for several successive frames.
        n_times = layout.frames or 1
        return tuple(k * n_times // self.clip.frames for k in self.clip_positions)


@dataclass(frozen=True)
class Video:
    """A video of the stores.

    Attributes:
        name: the name of its folder.
        frames: names of its frames without ending, in order.
        rows: its rows in each store.
        masks: the file of each frame's mask, below `MaskFiles.root`.
        size: height and width of the frames in pixels.
    """

    name: str
    frames: tuple[str, ...]
    rows: tuple[FrameRows, ...]
    masks: tuple[str, ...]
    size: tuple[int, int]


@dataclass(frozen=True)
class MaskFiles:
    """A folder with one folder of PNG masks per video.

    Attributes:
        root: the folder.
        by_video: video -> frame -> file below `root`.
        exif: whether masks are turned by their EXIF orientation, as the frames are.
        void: the value of pixels that count as background; None if there is none.
    """

    root: Path
    by_video: dict[str, dict[str, str]]
    exif: bool = False
    void: int | None = VOID

    def read(self, video: Video, frames: range | None = None) -> NDArray[np.uint8]:
        """Return (frames, height, width) numbers of objects, 0 where void.

        A 255 that is not void is the object after the largest other number of the first
        mask: 1 in the masks of DAVIS-2016, whose values are 0 and 255. As it stands it
        would be one of 255 objects.

        Args:
            video: whose masks are read.
            frames: which of its frames; None for all.

        Raises:
            VitseeError: a mask is damaged, in colour, or not of its frame's size; or the
                first shows no object.
        """
        if frames is None:
            frames = range(len(video.frames))
        labels = np.zeros((len(frames), *video.size), np.uint8)
        for i, frame in enumerate(frames):
            labels[i] = self._read_mask(video.masks[frame], video.size)
        # Void first: a 255 that is left is an object then.
        if self.void is not None:
            labels[labels == self.void] = 0
        is_255 = labels == VOID
        if is_255.any():
            # By the first mask, so that the number is the same in every frame that is
            # read.
            first = self._read_mask(video.masks[0], video.size)
            other_numbers = first[(first != VOID) & (first != self.void)]
            labels[is_255] = int(other_numbers.max(initial=0)) + 1
        if 0 in frames and not labels[0].any():
            raise VitseeError(
                f"{self.root / video.masks[0]} shows no object; expected numbers from 1 "
                f"in the first mask of a video{self._void_words()}"
            )
        return labels

    def _void_words(self) -> str:
        """Return which value is void, for a message, with what makes it an object."""
        if self.void is None:
            return ""
        return f" ({self.void} is void; --void none makes it an object)"

    def _read_mask(self, key: str, size: tuple[int, int]) -> NDArray[np.uint8]:
        """Return (height, width) of one file below `root`; size: of the frame."""
        where = self.root / key
        try:
            image, _ = FileOpener(str(self.root), exif=self.exif).load(key)
        except ImageError as error:
            raise VitseeError(f"{where}: {error.reason}") from None
        if image.mode not in ("P", "L", "1"):
            raise VitseeError(
                f"{where} has mode {image.mode}; expected a mask of numbers of objects "
                "(mode P, with a palette, L, or 1)"
            )
        if (image.height, image.width) != size:
            raise VitseeError(
                f"{where} is {image.width} x {image.height} pixels, its frame {size[1]} x "
                f"{size[0]}; expected masks of the frames' size"
            )
        return np.asarray(image)


def find_masks(path: Path, void: int | None = VOID) -> MaskFiles:
    """Return the masks below DAVIS' own folder, its `Annotations`, or a folder of folders.

    Args:
        path: the folder.
        void: the value of pixels that count as background; None if there is none.

    Raises:
        VitseeError: there is no such folder, or no PNG file in it.
    """
    if not path.is_dir():
        raise VitseeError(
            f"no folder {path}; expected that of DAVIS, or one folder per video"
        )
    root = path
    # DAVIS/Annotations/480p/VIDEO/00000.png; any part of the way may be given.
    if (root / _ANNOTATIONS).is_dir():
        root = root / _ANNOTATIONS
    if (root / _RESOLUTION).is_dir():
        root = root / _RESOLUTION
    by_video: dict[str, dict[str, str]] = {}
    for key in walk(str(root)):
        folder, _, file = key.rpartition("/")
        if folder and file.lower().endswith(".png"):
            video_name = folder.rpartition("/")[2]
            by_video.setdefault(video_name, {})[file[: -len(".png")]] = key
    if not by_video:
        raise VitseeError(
            f"no masks in {root}; expected files like "
            f"{_ANNOTATIONS}/{_RESOLUTION}/bear/00000.png"
        )
    return MaskFiles(root, by_video, void=void)


def oriented_masks(
    stores: Sequence[Store], masks: MaskFiles, videos: Sequence[Video]
) -> MaskFiles:
    """Return the masks turned as the frames are, and log how many have an orientation.

    Raises:
        StoreMismatch: masks have an orientation, and the frames are turned in some stores
            alone.
    """
    is_turned = [bool(store.manifest.transform.get("exif")) for store in stores]
    files = [masks.root / mask for video in videos for mask in video.masks]
    # Logged once, for the first store: the masks are the same for all.
    n_turned = say_oriented_files(str(masks.root), is_turned[0], files)
    if n_turned and len(set(is_turned)) > 1:
        with_exif = stores[is_turned.index(True)].label
        without = stores[is_turned.index(False)].label
        raise StoreMismatch(
            f"{n_turned} of the masks in {masks.root} have an EXIF orientation, and "
            f"frames are turned by theirs in {with_exif} and not in {without}; extract "
            "both with --exif, or both without"
        )
    return replace(masks, exif=is_turned[0])


def find_videos(
    stores: Sequence[Store], masks: MaskFiles, only: Path | None = None
) -> list[Video]:
    """Return the videos of these stores, in their order.

    Args:
        stores: stores with the same frames of the same videos, in the data set's order; or
            of clips, sampled alike, where a sample is a video.
        masks: masks of each frame.
        only: a file with the names of the videos to use, one per line; None for all.

    Raises:
        StoreMismatch: stores with other videos, frames or sizes.
        DataError: `only` cannot be read, or names a missing video.
        VitseeError: a store in another order, a video that is in pieces, too short or
            without masks, a frame that could not be read, or clips of one frame again and
            again.
    """
    rows_by_store = [_rows_by_video(store, only) for store in stores]
    names = list(rows_by_store[0])
    for store, rows_by_name in zip(stores[1:], rows_by_store[1:], strict=True):
        in_one_only = set(names) ^ set(rows_by_name)
        if in_one_only:
            raise StoreMismatch(
                f"{stores[0].label} and {store.label} hold other videos "
                f"({abbreviate(sorted(in_one_only), 3)} "
                "in one of them only); choose those of both with --only"
            )
    videos = []
    for name in names:
        rows = [rows_by_name[name] for rows_by_name in rows_by_store]
        videos.append(_match_video(name, stores, rows, masks))
    return videos


def _rows_by_video(store: Store, only: Path | None) -> dict[str, FrameRows]:
    """Return name of a video -> its rows in a store."""
    if store.plan.clip is not None:
        return _clip_rows(store, only)
    if store.shuffled:
        raise VitseeError(
            f"{store.label} holds its images in random order; propagate needs a video's "
            "frames one after the other: extract it with --order dataset"
        )
    ids, is_named = _named_samples(store, only)
    runs: dict[str, range] = {}
    folder_of_video: dict[str, str] = {}
    start = 0
    # A video is a run of successive images from one folder.
    for folder, run_ids in groupby(ids, lambda i: i.rpartition("/")[0]):
        rows = range(start, start + len(list(run_ids)))
        start = rows.stop
        is_chosen = is_named[rows.start : rows.stop]
        if not is_chosen.any():
            continue
        if not folder:
            raise VitseeError(
                f"{store.label}: {ids[rows.start]} has no folder, which would name its "
                "video; expected ids like bear/00000.jpg"
            )
        if not is_chosen.all():
            raise VitseeError(
                f"{only} names some frames of {folder} and not all; expected the names "
                "of videos"
            )
        name = folder.rpartition("/")[2]
        _check_new_video(store, name, folder, folder_of_video)
        folder_of_video[name] = folder
        runs[name] = rows
    readable = _readable_videos(store, runs)
    return {name: FrameRows(rows) for name, rows in readable.items()}


def _named_samples(
    store: Store, only: Path | None
) -> tuple[list[str], NDArray[np.bool_]]:
    """Return the ids of a store's samples, and (samples,) which of them `--only` names."""
    ids: list[str] = store.samples.id.tolist()
    if only is None:
        return ids, np.ones(len(ids), bool)
    return ids, named_only(only, ids, store.label)


def _clip_rows(store: Store, only: Path | None) -> dict[str, FrameRows]:
    """Return name of a video -> its row in a store of clips, whose frames are not known yet."""
    clip_description = store.manifest.transform.get("clip")
    if not isinstance(clip_description, dict):
        raise VitseeError(
            f"{store.label} does not say which frames of a clip it holds; extract it anew"
        )
    sampling = Sampling(**clip_description)
    if sampling.time == STILL:
        raise VitseeError(
            f"{store.label} holds one frame of each clip again and again (--time "
            "still), and nothing moves in it; expected clips with --time ordered or "
            "shuffled"
        )
    ids, is_named = _named_samples(store, only)
    runs: dict[str, range] = {}
    id_of_video: dict[str, str] = {}
    for row in np.flatnonzero(is_named).tolist():
        # A clip is a file of a video, or a folder of frames.
        name = ids[row].rpartition("/")[2]
        if is_video(name):
            name = name.rpartition(".")[0]
        _check_new_video(store, name, ids[row], id_of_video)
        id_of_video[name] = ids[row]
        runs[name] = range(row, row + 1)
    readable = _readable_videos(store, runs)
    return {name: FrameRows(rows, clip=sampling) for name, rows in readable.items()}


def _check_new_video(
    store: Store, name: str, folder: str, folders: dict[str, str]
) -> None:
    """Refuse a video whose name occurred before; folders: name -> folder of those before."""
    if folders.get(name) == folder:
        raise VitseeError(
            f"{store.label}: the frames of {folder} are not consecutive; expected one "
            "after the other, in the order of their names"
        )
    if name in folders:
        raise VitseeError(
            f"{store.label} has two videos called {name}: {folders[name]} and {folder}; "
            "give them different names"
        )


def _readable_videos(store: Store, runs: dict[str, range]) -> dict[str, range]:
    """Return the complete videos, all of whose frames must be readable.

    Args:
        store: the store; if it is unfinished, videos that it lacks in part are left out.
        runs: name of a video -> its rows.

    Raises:
        VitseeError: a frame could not be read, or no video is complete.
    """
    # (rows,) of the whole store: a slab is committed as one.
    is_committed = np.repeat(store.committed, store.plan.slab)
    complete = {
        name: rows
        for name, rows in runs.items()
        if is_committed[rows.start : rows.stop].all()
    }
    for name, rows in complete.items():
        unreadable = [row for row in rows if not store.valid[row]]
        if unreadable:
            raise VitseeError(
                f"{store.label}: {store.samples.id[unreadable[0]]} could not be read; "
                f"propagate needs every frame of {name} (leave the video out with "
                "--only, or extract anew)"
            )
    if not complete:
        raise VitseeError(f"{store.label} holds no whole video")
    return complete


def _match_video(
    name: str, stores: Sequence[Store], rows: Sequence[FrameRows], masks: MaskFiles
) -> Video:
    """Return a video whose frames are the same in all stores, with a mask for each frame.

    Args:
        name: the video's name.
        stores: the stores.
        rows: its rows in each store.
        masks: all masks.

    Raises:
        StoreMismatch: the stores have different frames, or frames of different sizes.
        VitseeError: frames in another order, too few, of several sizes, or without masks.
    """
    store = stores[0]
    rows = _restrict_to_sampled(name, stores, rows, masks)
    video_masks = masks.by_video.get(name, {})
    frames = _frame_names(store, rows[0], video_masks)
    sizes = store.sizes[list(rows[0].rows)]  # (frames, 2)
    for other_store, other_rows in zip(stores[1:], rows[1:], strict=True):
        other_frames = _frame_names(other_store, other_rows, video_masks)
        other_sizes = other_store.sizes[list(other_rows.rows)]
        if other_frames != frames or (other_sizes != sizes).any():
            raise StoreMismatch(
                f"{store.label} and {other_store.label} hold other frames of {name}"
            )
    # The order of the store is time: a frame behind its successor would be propagated
    # backwards.
    for before, after in pairwise(frames):
        if not _natural_key(before) < _natural_key(after):
            raise VitseeError(
                f"{store.label}: in {name} frame {after} follows {before}; expected "
                "frames in the order of their names (00009 before 00010: pad the "
                "numbers)"
            )
    if len(frames) < MIN_FRAMES:
        raise VitseeError(
            f"{store.label}: {name} has {len(frames)} frames; expected at least "
            f"{MIN_FRAMES}, as the first and the last are not scored"
        )
    if (sizes != sizes[0]).any():
        raise VitseeError(f"{store.label}: the frames of {name} have different sizes")
    is_sampled = any(frame_rows.clip is not None for frame_rows in rows)
    height, width = sizes[0].tolist()
    return Video(
        name=name,
        frames=frames,
        rows=tuple(rows),
        masks=_mask_paths(name, frames, masks, must_cover_video=not is_sampled),
        size=(height, width),
    )


def _restrict_to_sampled(
    name: str, stores: Sequence[Store], rows: Sequence[FrameRows], masks: MaskFiles
) -> list[FrameRows]:
    """Return the rows of the frames that the stores of clips sampled, in each store.

    Without a store of clips the rows stay as they are.

    Raises:
        StoreMismatch: clips that were sampled otherwise, or images without these frames.
        VitseeError: no masks, or fewer than frames were sampled.
    """
    clip_stores = [k for k, frame_rows in enumerate(rows) if frame_rows.clip is not None]
    if not clip_stores:
        return list(rows)
    restricted = list(rows)
    all_frames = _sorted_frames(masks.by_video.get(name, {}))
    first_store = stores[clip_stores[0]]
    sampled_indices: list[int] = []  # in all_frames
    for k in clip_stores:
        store = stores[k]
        clip_row = rows[k].rows[0]
        clip = rows[k].clip
        assert clip is not None
        sample = str(store.samples.id[clip_row])
        timeline = Timeline(range(len(all_frames)), len(all_frames))
        try:
            indices = clip.chosen(sample, timeline)
        except ImageError as error:
            raise VitseeError(
                f"{masks.root / name} has {len(all_frames)} masks, too few for the "
                f"frames that {store.label} sampled ({error.reason}); expected a mask "
                "of each frame of the clip"
            ) from None
        if k == clip_stores[0]:
            sampled_indices = indices
        elif indices != sampled_indices:
            raise StoreMismatch(
                f"{first_store.label} and {store.label} sampled other frames of {name} "
                "(extract both with the same --frames and --every)"
            )
        # The model may have seen the frames in another order (--time shuffled).
        order = clip.order(sample)
        positions = tuple(order.index(frame) for frame in range(clip.frames))
        restricted[k] = FrameRows(
            rows=[clip_row] * len(indices), clip_positions=positions, clip=clip
        )
    sampled_frames = [all_frames[i] for i in sampled_indices]
    for k, frame_rows in enumerate(rows):
        if frame_rows.clip is None:
            names = _frame_names(stores[k], frame_rows, {})
            row_of_frame = dict(zip(names, frame_rows.rows, strict=True))
            for frame in sampled_frames:
                if frame not in row_of_frame:
                    raise StoreMismatch(
                        f"{stores[k].label} has no frame {frame} of {name}, which "
                        f"{first_store.label} sampled"
                    )
            restricted[k] = FrameRows([row_of_frame[frame] for frame in sampled_frames])
    return restricted


def _sorted_frames(masks: Mapping[str, str]) -> list[str]:
    """Return the frames of a video that have masks, in the order of their names."""
    return sorted(masks, key=_natural_key)


def _frame_names(
    store: Store, rows: FrameRows, masks: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the names of a video's frames in a store.

    A clip does not name its frames: they are taken from the masks, frame -> file.
    """
    if rows.clip is not None:
        all_frames = _sorted_frames(masks)
        sample = str(store.samples.id[rows.rows[0]])
        timeline = Timeline(range(len(all_frames)), len(all_frames))
        return tuple(all_frames[k] for k in rows.clip.chosen(sample, timeline))
    ids = store.samples.id[list(rows.rows)].tolist()
    return tuple(Path(i.rpartition("/")[2]).stem for i in ids)


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which 2 comes before 10: numbers as such, text behind -1."""
    key = []
    for piece in re.split(r"([0-9]+)", name):
        if piece.isdigit():
            key.append((int(piece), ""))
        elif piece:
            key.append((-1, piece))
    return key


def _mask_paths(
    name: str, frames: Sequence[str], masks: MaskFiles, *, must_cover_video: bool
) -> tuple[str, ...]:
    """Return the file of each frame's mask.

    must_cover_video: refuse masks of frames that the stores lack.
    """
    files = masks.by_video.get(name, {})
    without_mask = [frame for frame in frames if frame not in files]
    where = masks.root / name
    if frames[0] in without_mask:
        raise VitseeError(f"no mask {where / frames[0]}.png of the first frame of {name}")
    if without_mask:
        raise VitseeError(
            f"{name} has {len(frames)} frames and no mask of {len(without_mask)} of them "
            f"({abbreviate(without_mask, 2)}): only videos with a mask per frame can be "
            "scored"
        )
    without_frame = sorted(files.keys() - set(frames))
    if must_cover_video and without_frame:
        raise VitseeError(
            f"{where} has masks of frames that are not in the store "
            f"({abbreviate(without_frame, 2)}); expected "
            f"all frames of {name}"
        )
    return tuple(files[frame] for frame in frames)
