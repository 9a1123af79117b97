"""From the user's name of the data to a source of images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vitsee_core import demo
from vitsee_core.images.archives import open_tars, open_zips
from vitsee_core.images.arrays import open_npz
from vitsee_core.images.errors import DataError
from vitsee_core.images.folders import is_image, open_folder, walk
from vitsee_core.images.image_source import ImageSource
from vitsee_core.images.libraries import ITERABLE, RANDOM_ACCESS, open_library, refuse_iterable
from vitsee_core.images.lists import open_list

_EXPECTED = (
    "an image folder, a .csv, .tsv or .txt list, an .npz file, a .zip or .tar file, torch/NAME, "
    "hfds/NAME, demo:train or demo:test"
)


def open_source(data: str, *, split: str | None = None) -> ImageSource:
    """The samples of `data`, or of a split expression of it.

    `data` is an image folder (class folders or flat), a CSV, TSV or text list, an .npz file of
    arrays, a zip or an uncompressed tar file or a folder of either, `torch/NAME[:FOLDER]`,
    `hfds/NAME[:CACHE]`, `demo:train`, `demo:test` or `demo:all`. `split` is a name, a slice of one
    (`train[:45000]`, `test[10%:20%]`), or several joined by '+'.

    Raises:
        DataError: there is no such data, or it cannot be read.
    """
    if not data.strip():
        raise DataError(f"--data is empty (a variable that is not set?); expected {_EXPECTED}")
    if data == "demo" or data.startswith("demo:"):
        return _open_demo(data, split)
    path = Path(data).expanduser()
    prefix = data.partition("/")[0].lower()
    if not path.exists() and "/" in data:
        if prefix in ITERABLE:
            raise refuse_iterable(data)
        if prefix in RANDOM_ACCESS:
            return open_library(data, split)
    source = _open_path(path, data)
    return source if split is None else source.part(split)


def _open_path(path: Path, data: str) -> ImageSource:
    if not path.exists():
        raise DataError(f"no file or folder {data}; expected {_EXPECTED}")
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file())
        tars, zips = ([f for f in files if f.suffix == end] for end in (".tar", ".zip"))
        if (tars or zips) and not walk(str(path)):
            return open_tars(tars, data) if tars else open_zips(zips, data)
        return open_folder(path, data)
    if not path.is_file():
        raise DataError(f"{data} is a pipe or a device; expected {_EXPECTED}")
    suffixes = "".join(path.suffixes[-2:]).lower()
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv", ".txt"):
        return open_list(path, data)
    if suffix == ".npz":
        return open_npz(path, data)
    if suffix == ".tar":
        return open_tars([path], data)
    if suffix == ".zip":
        return open_zips([path], data)
    if suffix == ".tgz" or suffixes.startswith(".tar."):
        raise DataError(f"{data} is compressed, without random access; unpack it to a folder")
    if is_image(path.name):
        raise DataError(f"{data} is a single file; expected its folder, or a list of paths")
    raise DataError(f"{data} is no data set; expected {_EXPECTED}")


def _open_demo(data: str, split: str | None) -> ImageSource:
    expression = data.partition(":")[2]
    if expression and split is not None:
        raise DataError(f"{data} names a split already; leave --split {split} out")
    if expression.removeprefix("demo:") in demo.models():
        known = ", ".join(f"demo:{name}" for name in demo.SPLITS)
        raise DataError(f"{data} is a model; the demo's data: {known}")
    return replace(open_npz(demo.data_file(), "demo").part(expression or split or "all"), name=data)
