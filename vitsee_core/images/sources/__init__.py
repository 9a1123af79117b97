"""Sources of images, a module for each kind.

`open_source` opens whatever `--data` names. The kind of source follows from what stands before the
first slash or colon of the name (`demo:`, `torch/`, `hfds/`, a URL), or else from the ending of the
files that it stands for.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from vitsee_core.images.clips import as_clips
from vitsee_core.images.decoding import FileOpener, FilesOpener
from vitsee_core.images.errors import DataError
from vitsee_core.images.folders import classify, is_video, open_folder, walk
from vitsee_core.images.formats import FORMAT_OF_ENDING
from vitsee_core.images.image_source import ImageSource
from vitsee_core.images.left_out import left_out_line
from vitsee_core.images.sources.archives import open_tars, open_zips
from vitsee_core.images.sources.arrays import open_demo, open_npz, open_nyu
from vitsee_core.images.sources.base import (
    MatchedFiles,
    SourceRequest,
    expand_braces,
    matched_paths,
)
from vitsee_core.images.sources.libraries import (
    ITERABLE,
    RANDOM_ACCESS,
    open_library,
    refuse_iterable,
)
from vitsee_core.images.sources.lists import open_list, shards_listed
from vitsee_core.images.sources.parquet import open_parquet
from vitsee_core.images.sources.remote import GLOBS, find_remote
from vitsee_core.runtime.machine import plural
from vitsee_core.runtime.progress import SILENT, Progress
from vitsee_stores.url import is_url

log = logging.getLogger(__name__)

_EXPECTED = (
    "an image folder, a .csv, .tsv or .txt list, an .npz file, NYU's .mat, .zip, .tar or .parquet "
    "files (also as 'shards/{0000..0063}.tar', 'shards/*.parquet', or at s3://, gs://, az://, "
    "https://, hf://datasets/), torch/NAME, hfds/NAME, demo:train or demo:test"
)
_UNPACK_TOOLS = {  # ending -> command
    ".gz": "gunzip",
    ".tgz": "gunzip",
    ".zst": "zstd -d",
    ".bz2": "bunzip2",
    ".xz": "unxz",
}
_EXPECTED_CLIPS = (
    "a folder of videos, or of folders of frames, a .csv, .tsv or .txt list of these, or .tar or "
    ".zip files of videos"
)
# Arrays and parquet files hold images, not videos.
_ENDINGS_WITH_CLIPS = (".csv", ".tsv", ".txt", ".zip", ".tar")
_OPENERS: dict[str, Callable[[SourceRequest, MatchedFiles], ImageSource]] = {
    ".csv": lambda request, matched: open_list(matched.path, request.data, request.exif),
    ".tsv": lambda request, matched: open_list(matched.path, request.data, request.exif),
    ".txt": lambda request, matched: open_list(matched.path, request.data, request.exif),
    ".npz": lambda request, matched: open_npz(matched.path, request.data),
    ".mat": lambda request, matched: open_nyu(matched.path, request.data),
    ".zip": lambda request, matched: open_zips(matched.paths, request),
    ".tar": open_tars,
    ".parquet": open_parquet,
}


def open_source(
    data: str,
    *,
    split: str | None = None,
    label_key: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    clips: bool = False,
    exif: bool = False,
    progress: Progress = SILENT,
) -> ImageSource:
    """Return the samples of `data`, or those that a split expression picks from it.

    Args:
        data: an image folder (class folders or flat), a CSV, TSV or text list, an .npz file of
            arrays, a zip file, uncompressed tar or parquet files (a single file, a folder of them,
            a pattern with braces or stars, a .txt that lists them, or any of these at a URL),
            `torch/NAME[:FOLDER]`, `hfds/NAME[:CACHE]`, `demo:train`, `demo:test` or `demo:all`.
        split: a name, a slice of a split (`train[:45000]`, `test[10%:20%]`), or several of these
            joined by '+'; everything by default.
        label_key: for tar files, the member or the JSON field with an image's label.
        image_column: for parquet files, the column of images.
        label_column: for parquet files, the column of labels.
        clips: whether a sample is a clip: a video file, or a folder with the frames of a clip. A
            folder then has videos, or else folders of frames; lists have paths of either; zip and
            tar files have videos.
        exif: whether images are turned upright by their EXIF orientation.
        progress: shown while many files are read for the first time.

    Raises:
        DataError: there is no such data, or it cannot be read.
    """
    request = SourceRequest(
        data=data,
        split=split,
        label_key=label_key,
        image_column=image_column,
        label_column=label_column,
        progress=progress,
        clips=clips,
        exif=exif,
    )
    source = _open_request(request)
    # Here, whatever the source: the opener turns an image when it decodes it.
    if exif:
        return replace(source, opener=source.opener.upright())
    return source


def _open_request(request: SourceRequest) -> ImageSource:
    """Return the samples of the data or of its split; raise DataError as `open_source` does."""
    data = request.data
    split = request.split
    clips = request.clips
    if not data.strip():
        raise DataError(
            f"--data is empty (a variable that is not set?); expected {_EXPECTED}"
        )
    # Before any path: the word means the demo even beside a file of that name.
    if data == "demo" or data.startswith("demo:"):
        _refuse_clips(request)
        request.check("")
        return open_demo(data, split)
    if data.startswith(ITERABLE[-1]):
        raise refuse_iterable(data)
    # A folder that is there wins over a library of the same name (torch/, hfds/).
    if not is_url(data) and not os.path.exists(os.path.expanduser(data)) and "/" in data:
        prefix = data.partition("/")[0].lower()
        if prefix in ITERABLE:
            raise refuse_iterable(data)
        if prefix in RANDOM_ACCESS:
            _refuse_clips(request)
            request.check("")
            return open_library(data, split)
    source = _open_files(request)
    # Probably a folder too high or too low was named.
    if source.class_names is not None and len(source.class_names) == 1 < len(source):
        log.info("all labels of %s are of one class, %s", data, source.class_names[0])
    if clips:
        source = as_clips(source)
    if split is None:
        return source
    return source.part(split)


def _refuse_clips(request: SourceRequest) -> None:
    """Raise DataError if clips are requested from data that has images only."""
    if request.clips:
        raise DataError(
            f"{request.data} has images, no clips; expected {_EXPECTED_CLIPS}"
        )


def placed(data: str, folder: Path) -> str:
    """Return the name that means in any working folder what `data` means in `folder`."""
    name, _, data_folder = data.partition(":")
    if name == "demo" or is_url(data) or not data:
        return data
    # Where there is no such file, the prefix names a library, whose own folder is placed.
    if not (folder / Path(data).expanduser()).exists():
        if name.startswith("torch/"):
            return f"{name}:{folder / Path(data_folder or '.').expanduser()}"
        if name.startswith("hfds/"):
            return data
    return str(folder / Path(data).expanduser())


def _open_files(request: SourceRequest) -> ImageSource:
    """Return the samples of files, a folder or URLs; raise DataError if there are none."""
    data = request.data
    path = Path(data).expanduser()
    if is_url(data):
        # Not explicit: all files of a folder, among them such as are not images.
        matched = find_remote(expand_braces(data))
        if not matched.explicit:
            matched = _images_or_archives(matched, request)
        return _open_by_ending(request, matched)
    if path.is_dir():
        return _open_folder(request, path)
    if path.exists():
        if not path.is_file():
            raise DataError(f"{data} is a pipe or a device; expected {_EXPECTED}")
        # A .txt may list shards in place of images.
        shards = shards_listed(path)
        if shards and is_url(shards[0]):
            return _open_by_ending(request, find_remote(shards))
        paths = _expand_globs(shards) if shards else [str(path)]
        return _open_by_ending(request, matched_paths(paths))
    # Without a pattern there is nothing to expand, and a plain line is the better error.
    if not GLOBS & set(data) and "{" not in data:
        raise DataError(f"no file or folder {data}; expected {_EXPECTED}")
    paths = _expand_globs(expand_braces(str(path)))
    return _open_by_ending(request, matched_paths(paths))


def _expand_globs(patterns: Sequence[str]) -> list[str]:
    """Return the paths that names and globs stand for; raise DataError if one matches nothing."""
    paths: list[str] = []
    missing: list[str] = []
    for pattern in patterns:
        if os.path.exists(pattern):  # also a name with a bracket or a star in it
            paths.append(pattern)
            continue
        matches = []
        if GLOBS & set(pattern):
            # Sorted, as the order of a file system's listing differs between machines.
            matches = sorted(glob.glob(pattern, recursive=True))
        if not matches:
            missing.append(pattern)
        paths += matches
    if missing:
        kind = "matches nothing" if GLOBS & set(missing[0]) else "does not exist"
        more = ""
        if len(missing) > 1:
            more = f", nor {len(missing) - 1} more of {len(patterns)}"
        raise DataError(f"{missing[0]} {kind}{more}; expected files there")
    return paths


def _open_by_ending(request: SourceRequest, matched: MatchedFiles) -> ImageSource:
    """Return the source for files of a single kind.

    Raises:
        DataError: the files are of several kinds, or of a kind that is not supported.
    """
    for name in matched.names:
        # The last two: .tar.gz.
        suffixes = PurePosixPath(name.lower()).suffixes[-2:]
        is_packed_tar = (
            len(suffixes) == 2 and suffixes[0] == ".tar"
        )  # .tar.gz and the like
        if suffixes[-1:] == [".tgz"] or is_packed_tar:
            packed = matched.shown(name)
            tool = _UNPACK_TOOLS.get(suffixes[-1], "unpack")
            raise DataError(
                f"{packed} is compressed, without random access; unpack it: {tool} {packed}"
            )
    # Images (or videos) at a URL, or matched by a pattern.
    if all(map(request.wants, matched.names)):
        if matched.explicit and len(matched.names) == 1:
            raise DataError(
                f"{request.data} is a single file; expected its folder, or a list of paths"
            )
        request.check("")
        paths = sorted(matched.names)
        opener = FilesOpener(matched.files)
        labels, splits, class_names = classify(paths)
        return ImageSource(
            name=request.data,
            opener=opener,
            locations=paths,
            ids=paths,
            labels=labels,
            splits=splits,
            class_names=class_names,
        )
    endings = sorted({PurePosixPath(name).suffix.lower() for name in matched.names})
    if len(endings) > 1:
        raise DataError(
            f"{request.data} has files of several kinds: {', '.join(endings)}"
        )
    if endings[0] not in _OPENERS:
        raise DataError(f"{request.data} is no data set; expected {_EXPECTED}")
    if endings[0] not in _ENDINGS_WITH_CLIPS:
        _refuse_clips(request)
    request.check(endings[0])
    return _OPENERS[endings[0]](request, matched)


def _open_folder(request: SourceRequest, path: Path) -> ImageSource:
    """Return the samples of a folder on this machine.

    A folder with any image (or video) is a folder of images, whatever archives lie beside them.
    """
    # One level, for parquet two: exports of data sets put them into a folder per split.
    archives = [*path.glob("*.tar*"), *path.glob("*.tgz"), *path.glob("*.zip")]
    archives += [*path.glob("*.parquet"), *path.glob("*/*.parquet")]
    names = sorted(str(file) for file in archives if file.is_file())
    if names:
        has_images = bool(walk(str(path)))
        has_clips = request.clips and bool(walk(str(path), is_video))
        if not has_images and not has_clips:
            matched = replace(matched_paths(names), explicit=False)
            return _open_by_ending(request, _images_or_archives(matched, request))
    request.check("")
    if request.clips:
        return _open_clip_folder(path, request)
    source = open_folder(path, request.data)
    # A GIF is an image and a video; beside other videos a clip is what was likely meant.
    if all(name.lower().endswith(".gif") for name in source.ids):
        videos = [
            name
            for name in walk(str(path), is_video)
            if not name.lower().endswith(".gif")
        ]
        if videos:
            log.warning(
                "%s beside GIFs in %s are left out: of clips give --frames N",
                plural(len(videos), "videos"),
                path,
            )
    return source


def _open_clip_folder(path: Path, request: SourceRequest) -> ImageSource:
    """Return the clips below a folder: its videos, or else the folders of images (frames) in it.

    Raises:
        DataError: it has neither, or has images itself and no videos.
    """
    others = Counter[str]()
    paths = walk(str(path), is_video, others)
    images = [name for name in walk(str(path)) if not is_video(name)]
    # Images beside videos are frames of none.
    if paths and images:
        log.warning(
            "%s beside videos in %s are left out", plural(len(images), "images"), path
        )
    if paths:
        # Images beside videos have a warning of their own, above.
        request.say_left_out(
            {ending: n for ending, n in others.items() if ending not in FORMAT_OF_ENDING}
        )
    else:
        # Each folder with images is a clip.
        paths = sorted({name.rpartition("/")[0] for name in images})
    if not paths:
        raise DataError(f"no clips in {path}; expected {_EXPECTED_CLIPS}")
    # The root's own images: one clip without a name, or images that are no clips.
    if "" in paths:
        raise DataError(
            f"images lie in {path} itself, which is one clip or none; expected a folder for each "
            "clip below it"
        )
    opener = FileOpener(str(path.absolute()))
    labels, splits, class_names = classify(paths)
    return ImageSource(
        name=request.data,
        opener=opener,
        locations=paths,
        ids=paths,
        labels=labels,
        splits=splits,
        class_names=class_names,
    )


def _images_or_archives(matched: MatchedFiles, request: SourceRequest) -> MatchedFiles:
    """Return the images among all files of a folder, or else its archives of one kind.

    Raises:
        DataError: there are none.
    """
    # Hidden files and folders, as in a folder on this machine.
    names = [
        name
        for name in matched.names
        if not any(p.startswith(".") for p in name.split("/"))
    ]
    images = [name for name in names if request.wants(name)]
    others = Counter[str]()
    for name in names:
        if not request.wants(name):
            request.count_other(others, name)
    tars = [name for name in names if re.search(r"\.(tar|tgz)$|\.tar\.", name.lower())]
    zips = [name for name in names if name.lower().endswith(".zip")]
    parquets = [name for name in names if name.lower().endswith(".parquet")]
    # Images first: archives beside them are usually the same data packed.
    chosen = images or tars or zips or parquets
    if not chosen:
        message = request.nothing.replace(" in ", " below ") % matched.root
        if line := left_out_line(matched.root, others):
            message += f" ({line})"
        raise DataError(message)
    if images:
        request.say_left_out(others)
    return replace(matched, names=chosen)
