"""Sources of images, a module for each kind: what stands before the first slash or colon of a name
says which, or the ending of the files that it stands for."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
    found_paths,
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
_UNPACK = {
    ".gz": "gunzip",
    ".tgz": "gunzip",
    ".zst": "zstd -d",
    ".bz2": "bunzip2",
    ".xz": "unxz",
}
_OF_CLIPS = (
    "a folder of videos, or of folders of frames, a .csv, .tsv or .txt list of these, or .tar or "
    ".zip files of videos"
)
_CLIPS_BY_ENDING = (".csv", ".tsv", ".txt", ".zip", ".tar")
_OPENERS: dict[str, Callable[[SourceRequest, MatchedFiles], ImageSource]] = {
    ".csv": lambda asked, found: open_list(found.path, asked.data, asked.exif),
    ".tsv": lambda asked, found: open_list(found.path, asked.data, asked.exif),
    ".txt": lambda asked, found: open_list(found.path, asked.data, asked.exif),
    ".npz": lambda asked, found: open_npz(found.path, asked.data),
    ".mat": lambda asked, found: open_nyu(found.path, asked.data),
    ".zip": lambda asked, found: open_zips(found.paths, asked),
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
    """The samples of `data`, or of a split expression of it.

    `data` is an image folder (class folders or flat), a CSV, TSV or text list, an .npz file of
    arrays, a zip file, uncompressed tar or parquet files (one, a folder of them, a pattern with
    braces or stars, a .txt that lists them, or any of these at a URL), `torch/NAME[:FOLDER]`,
    `hfds/NAME[:CACHE]`, `demo:train`, `demo:test` or `demo:all`. `split` is a name, a slice of one
    (`train[:45000]`, `test[10%:20%]`), or several joined by '+'. For the other
    options see `SourceRequest`.

    With `clips` a sample is a video file, or a folder with the frames of one: a folder has videos,
    or else folders of frames, lists have paths of either, zip and tar files videos. With `exif`
    images are turned upright by their EXIF orientation. Raises DataError: there is no such data, or
    it cannot be read.
    """
    asked = SourceRequest(
        data=data,
        split=split,
        label_key=label_key,
        image_column=image_column,
        label_column=label_column,
        progress=progress,
        clips=clips,
        exif=exif,
    )
    source = _find(asked)
    if exif:
        return replace(source, opener=source.opener.upright())
    return source


def _find(asked: SourceRequest) -> ImageSource:
    """The samples of the data, or of its split. Raises DataError: as `open_source`."""
    data = asked.data
    split = asked.split
    clips = asked.clips
    if not data.strip():
        raise DataError(
            f"--data is empty (a variable that is not set?); expected {_EXPECTED}"
        )
    if data == "demo" or data.startswith("demo:"):
        _no_clips(asked)
        asked.check("")
        return open_demo(data, split)
    if data.startswith(ITERABLE[-1]):
        raise refuse_iterable(data)
    if not is_url(data) and not os.path.exists(os.path.expanduser(data)) and "/" in data:
        prefix = data.partition("/")[0].lower()
        if prefix in ITERABLE:
            raise refuse_iterable(data)
        if prefix in RANDOM_ACCESS:
            _no_clips(asked)
            asked.check("")
            return open_library(data, split)
    source = _open(asked)
    if source.class_names is not None and len(source.class_names) == 1 < len(source):
        log.info("all labels of %s are of one class, %s", data, source.class_names[0])
    source = as_clips(source) if clips else source
    return source if split is None else source.part(split)


def _no_clips(asked: SourceRequest) -> None:
    """Raises DataError: clips are asked of data that has images only."""
    if asked.clips:
        raise DataError(f"{asked.data} has images, no clips; expected {_OF_CLIPS}")


def placed(data: str, folder: Path) -> str:
    """The name that means the same in any working folder, if this one is used in `folder`."""
    name, _, place = data.partition(":")
    if name == "demo" or is_url(data) or not data:
        return data
    if not (folder / Path(data).expanduser()).exists():
        if name.startswith("torch/"):
            return f"{name}:{folder / Path(place or '.').expanduser()}"
        if name.startswith("hfds/"):
            return data
    return str(folder / Path(data).expanduser())


def _open(asked: SourceRequest) -> ImageSource:
    data = asked.data
    path = Path(data).expanduser()
    if is_url(data):
        found = find_remote(expand_braces(data))
        return _by_ending(asked, found if found.given else _of_folder(found, asked))
    if path.is_dir():
        return _open_folder(asked, path)
    if path.exists():
        if not path.is_file():
            raise DataError(f"{data} is a pipe or a device; expected {_EXPECTED}")
        listed = shards_listed(path)
        if listed and is_url(listed[0]):
            return _by_ending(asked, find_remote(listed))
        return _by_ending(asked, found_paths(_matched(listed) if listed else [str(path)]))
    if not GLOBS & set(data) and "{" not in data:
        raise DataError(f"no file or folder {data}; expected {_EXPECTED}")
    return _by_ending(asked, found_paths(_matched(expand_braces(str(path)))))


def _matched(texts: Sequence[str]) -> list[str]:
    """The paths that these names and globs stand for. Raises DataError: one stands for none."""
    paths: list[str] = []
    missing: list[str] = []
    for text in texts:
        found = [text]
        if not os.path.exists(text):
            found = sorted(glob.glob(text, recursive=True)) if GLOBS & set(text) else []
        paths += found
        missing += [] if found else [text]
    if missing:
        kind = "matches nothing" if GLOBS & set(missing[0]) else "does not exist"
        more = (
            f", nor {len(missing) - 1} more of {len(texts)}" if len(missing) > 1 else ""
        )
        raise DataError(f"{missing[0]} {kind}{more}; expected files there")
    return paths


def _by_ending(asked: SourceRequest, found: MatchedFiles) -> ImageSource:
    """The source for files of one kind. Raises DataError: they are of several, or of none."""
    for name in found.names:
        suffixes = PurePosixPath(name.lower()).suffixes[-2:]
        if suffixes[-1:] == [".tgz"] or (len(suffixes) == 2 and suffixes[0] == ".tar"):
            packed = found.shown(name)
            tool = _UNPACK.get(suffixes[-1], "unpack")
            raise DataError(
                f"{packed} is compressed, without random access; unpack it: {tool} {packed}"
            )
    if all(map(asked.wants, found.names)):
        if found.given and len(found.names) == 1:
            raise DataError(
                f"{asked.data} is a single file; expected its folder, or a list of paths"
            )
        asked.check("")
        paths = sorted(found.names)
        opener = FilesOpener(found.files)
        return ImageSource(asked.data, opener, paths, paths, *classify(paths))
    endings = sorted({PurePosixPath(name).suffix.lower() for name in found.names})
    if len(endings) > 1:
        raise DataError(f"{asked.data} has files of several kinds: {', '.join(endings)}")
    if endings[0] not in _OPENERS:
        raise DataError(f"{asked.data} is no data set; expected {_EXPECTED}")
    if endings[0] not in _CLIPS_BY_ENDING:
        _no_clips(asked)
    asked.check(endings[0])
    return _OPENERS[endings[0]](asked, found)


def _open_folder(asked: SourceRequest, path: Path) -> ImageSource:
    packed = [*path.glob("*.tar*"), *path.glob("*.tgz"), *path.glob("*.zip")]
    packed += [*path.glob("*.parquet"), *path.glob("*/*.parquet")]
    names = sorted(str(file) for file in packed if file.is_file())
    if names and not walk(str(path)) and not (asked.clips and walk(str(path), is_video)):
        return _by_ending(
            asked, _of_folder(replace(found_paths(names), given=False), asked)
        )
    asked.check("")
    if asked.clips:
        return _folder_of_clips(path, asked)
    source = open_folder(path, asked.data)
    if all(name.lower().endswith(".gif") for name in source.ids):
        videos = [
            name
            for name in walk(str(path), is_video)
            if not name.lower().endswith(".gif")
        ]
        if videos:
            log.warning(
                "%s beside GIFs in %s are left out: of clips give --frames N",
                *(plural(len(videos), "videos"), path),
            )
    return source


def _folder_of_clips(path: Path, asked: SourceRequest) -> ImageSource:
    """The videos below a folder, or else the folders below it that hold images, their frames.
    Raises DataError: neither, or images in the folder itself."""
    others = Counter[str]()
    paths = walk(str(path), is_video, others)
    images = [name for name in walk(str(path)) if not is_video(name)]
    if paths and images:
        log.warning(
            "%s beside videos in %s are left out", plural(len(images), "images"), path
        )
    if paths:
        asked.say_left_out(_but_images(others))
    else:
        paths = sorted({name.rpartition("/")[0] for name in images})
    if not paths:
        raise DataError(f"no clips in {path}; expected {_OF_CLIPS}")
    if "" in paths:
        raise DataError(
            f"images lie in {path} itself, which is one clip or none; expected a folder for each "
            "clip below it"
        )
    opener = FileOpener(str(path.absolute()))
    return ImageSource(asked.data, opener, paths, paths, *classify(paths))


def _but_images(others: Mapping[str, int]) -> dict[str, int]:
    return {ending: n for ending, n in others.items() if ending not in FORMAT_OF_ENDING}


def _of_folder(found: MatchedFiles, asked: SourceRequest) -> MatchedFiles:
    """The images among all files of a folder, or else its archives of one kind."""
    names = [
        name
        for name in found.names
        if not any(p.startswith(".") for p in name.split("/"))
    ]
    images = [name for name in names if asked.wants(name)]
    others = Counter[str]()
    for name in names:
        if not asked.wants(name):
            asked.count_other(others, name)
    tars = [name for name in names if re.search(r"\.(tar|tgz)$|\.tar\.", name.lower())]
    zips, parquets = (
        [n for n in names if n.lower().endswith(e)] for e in (".zip", ".parquet")
    )
    chosen = images or tars or zips or parquets
    if not chosen:
        line = left_out_line(found.root, others)
        nothing = asked.nothing.replace(" in ", " below ") % found.root
        raise DataError(nothing + (f" ({line})" if line else ""))
    if images:
        asked.say_left_out(others)
    return replace(found, names=chosen)
