"""Atomic files: written under a temporary name, then renamed."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from vitsee_stores.disk import PARTIAL, has_ended, is_leftover, partial_name, read_regular
from vitsee_stores.errors import VitseeError, reason
from vitsee_stores.folder import store_around

MAX_TABLE_BYTES = 4 << 30  # of a table, a sidecar, a page or a picture
TABLE_ENDINGS = (".csv", ".csv.gz", ".tsv", ".json", ".parquet")
HIDDEN = ".vitsee"  # begins the temporary names of outputs


def read_file(path: Path) -> bytes:
    """Return the contents of a table, a sidecar, a page or a picture.

    Raises:
        VitseeError: a pipe or a device (refused without blocking), or more than 4 GiB.
        OSError: it cannot be opened.
    """
    try:
        return read_regular(path, MAX_TABLE_BYTES)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EFBIG):
            raise VitseeError(f"cannot read {path}: {reason(error)}") from None
        raise


def is_stream(path: Path) -> bool:
    """Return whether a path is standard input or another open descriptor of this process.

    Standard input is `-` or /dev/stdin; a shell passes /dev/fd/63 in place of
    `<(vitsee norms a.zarr)`.
    """
    descriptor = r"-|/dev/stdin|/dev/fd/\d+|/proc/self/fd/\d+"
    return re.fullmatch(descriptor, str(path)) is not None


def read_stream(path: Path) -> bytes:
    """Return all that comes from a stream (a path for which `is_stream` holds).

    Raises:
        VitseeError: a terminal, or more than 4 GiB.
        OSError: it is not open.
    """
    is_standard = str(path) in ("-", "/dev/stdin")
    # Standard input stays open: it belongs to the process.
    with open(0 if is_standard else path, "rb", closefd=not is_standard) as file:
        if file.isatty():
            raise VitseeError(f"{path} is a terminal; expected a table from a pipe")
        data = file.read(MAX_TABLE_BYTES + 1)  # a byte more tells whether there is more
    if len(data) > MAX_TABLE_BYTES:
        raise VitseeError(f"cannot read {path}: more than {MAX_TABLE_BYTES} bytes")
    return data


def check_output_path(path: Path, *, images: str = "") -> None:
    """Refuse an output inside a store, or inside a folder of images.

    Args:
        path: the file or folder to be written.
        images: the command's --data. Nothing is written below a folder of images: the next command
            would read a picture there as an image.

    Raises:
        VitseeError: names the store or the folder.
    """
    store = store_around(path)
    if store is not None:
        raise VitseeError(f"results do not go into a store ({store}); name another place")
    folder = Path(images).expanduser()
    if images and folder.is_dir() and path.resolve().is_relative_to(folder.resolve()):
        raise VitseeError(
            f"{path} is inside the image folder {images}, where it would become data of "
            "the next command; name a place outside"
        )


def check_new_files(
    paths: Iterable[Path], *, force: bool = False, inputs: Iterable[Path] = ()
) -> None:
    """Refuse, before any work, files that could not or should not be written.

    Args:
        paths: the files to be written.
        force: existing files may be replaced.
        inputs: files that the work reads; these are never replaced.

    Raises:
        VitseeError: a file exists and `force` is off, is an input, a folder or not an ordinary file
            (`force` or not), is inside a store or in a folder that is missing or read-only, or is
            named twice.
    """
    seen: set[Path] = set()
    input_files = {path.resolve() for path in inputs}
    for path in paths:
        folder = path.absolute().parent
        if path.resolve() in input_files:
            raise VitseeError(
                f"{path} is an input of this command; give the output another name"
            )
        if path.resolve() in seen:
            raise VitseeError(f"{path} is named for two outputs; give each its own name")
        seen.add(path.resolve())
        check_output_path(path)
        if path.exists() and not path.is_file():
            raise VitseeError(f"cannot write {path}: it exists and is no ordinary file")
        if path.exists() and not force:
            raise VitseeError(
                f"{path} exists; give another name, or --force to replace it"
            )
        if not folder.is_dir():
            raise VitseeError(f"cannot write {path}: there is no folder {folder}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise VitseeError(f"cannot write {path}: the folder {folder} is not writable")


def write_files(contents: Mapping[Path, bytes], *, force: bool = False) -> None:
    """Write all the files or none: each under a temporary name in its folder, then renamed.

    For a link the target is replaced, not the link. The files appear in the order given; a file
    that belongs to another comes before it.

    Args:
        contents: path -> bytes.
        force: existing files may be replaced.

    Raises:
        VitseeError: `check_new_files` refuses one; or the disk did, and nothing is left behind.
    """
    with new_files(list(contents), force=force) as temporary_paths:
        for temporary, data in zip(temporary_paths, contents.values(), strict=True):
            with open(temporary, "xb") as file:
                file.write(data)


@contextmanager
def new_files(paths: Sequence[Path], *, force: bool = False) -> Iterator[list[Path]]:
    """Yield temporary paths for `paths`, and rename the files there when the context ends.

    Raises:
        VitseeError: `check_new_files` refuses a path; or the disk refused a file, and nothing is
            left behind.
    """
    check_new_files(paths, force=force)
    targets = [path.resolve() for path in paths]
    target_of = {temporary_path(target): target for target in targets}
    try:
        for folder in {target.parent for target in targets}:
            remove_leftovers(folder)
        with rename_at_end(target_of):
            yield list(target_of)
    except OSError as error:
        raise VitseeError(
            f"cannot write {', '.join(map(str, paths))}: {reason(error)}"
        ) from error


@contextmanager
def rename_at_end(target_of: Mapping[Path, Path]) -> Iterator[None]:
    """Rename files, in order, when the context ends in which the caller writes them.

    No temporary file remains, whatever happens.

    Args:
        target_of: temporary path -> final path, on one file system. If the caller empties it,
            nothing is renamed.

    Raises:
        OSError: a file was not written, or cannot be renamed; those before it were.
    """
    temporary_paths = tuple(target_of)  # also those that the caller takes out are removed
    try:
        yield
        for temporary, target in target_of.items():
            os.replace(temporary, target)
    finally:
        for temporary in temporary_paths:
            temporary.unlink(missing_ok=True)


def temporary_path(target: Path) -> Path:
    """Return a new path beside a file or folder, which `remove_leftovers` recognises.

    The name of the target is not in it: that may have the maximum length.
    """
    return Path(partial_name(target.with_name(HIDDEN)))


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left in a folder under temporary names, where that is allowed.

    Folders of other machines stay: their age does not tell whether a file in them is being written.
    """
    for path in folder.glob(f"{HIDDEN}.*{PARTIAL}"):
        if path.is_dir() and not path.is_symlink():
            process = path.name.split(".")[2]  # machine and process are in the name
            if has_ended(process):
                shutil.rmtree(path, ignore_errors=True)
        elif is_leftover(path):
            with suppress(OSError):
                path.unlink()
