"""Atomic files: written under a temporary name, then renamed."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from vitsee_stores.disk import PARTIAL, has_ended, is_left, partial_name, read_regular
from vitsee_stores.errors import VitseeError, reason
from vitsee_stores.folder import store_around

MOST_BYTES = 4 << 30  # of a table or a sidecar
TABLE_ENDINGS = (".csv", ".csv.gz", ".tsv", ".json", ".parquet")
HIDDEN = ".vitsee"  # begins the temporary names of outputs


def read_file(path: Path) -> bytes:
    """The contents of a table or sidecar.

    Raises:
        VitseeError: a pipe or a device, without blocking, or more than 4 GiB.
        OSError: it cannot be opened.
    """
    try:
        return read_regular(path, MOST_BYTES)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EFBIG):
            raise VitseeError(f"cannot read {path}: {reason(error)}") from None
        raise


def is_stream(path: Path) -> bool:
    """Whether a path is standard input (`-`, /dev/stdin) or another open descriptor of this
    process, as a shell puts it in place of `<(vitsee norms a.zarr)`."""
    return (
        re.fullmatch(r"-|/dev/stdin|/dev/fd/\d+|/proc/self/fd/\d+", str(path)) is not None
    )


def read_stream(path: Path) -> bytes:
    """All that comes from a stream, see `is_stream`.

    Raises:
        VitseeError: a terminal, or more than 4 GiB.
        OSError: it is not open.
    """
    standard = str(path) in ("-", "/dev/stdin")
    with open(0 if standard else path, "rb", closefd=not standard) as file:
        if file.isatty():
            raise VitseeError(f"{path} is a terminal; expected a table from a pipe")
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise VitseeError(f"cannot read {path}: more than {MOST_BYTES} bytes")
    return data


def check_place(path: Path, *, images: str = "") -> None:
    """Refuse an output inside a store, or inside a folder of images. path: the file or folder to be
    written. images: the command's --data; nothing is written below a folder of images, as the next
    command would read pictures there as images. Raises VitseeError: names the store or the
    folder."""
    if (store := store_around(path)) is not None:
        raise VitseeError(f"results do not go into a store ({store}); name another place")
    folder = Path(images).expanduser()
    if images and folder.is_dir() and path.resolve().is_relative_to(folder.resolve()):
        raise VitseeError(
            f"{path} is inside the image folder {images}, where it would become data of the next "
            "command; name a place outside"
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
    read = {path.resolve() for path in inputs}
    for path in paths:
        folder = path.absolute().parent
        if path.resolve() in read:
            raise VitseeError(
                f"{path} is an input of this command; give the output another name"
            )
        if path.resolve() in seen:
            raise VitseeError(f"{path} is named for two outputs; give each its own name")
        seen.add(path.resolve())
        check_place(path)
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
    """Write all the files or none: each under a temporary name beside its place, then renamed.

    For a link the target is replaced, not the link. The files appear in the order given; a file
    that belongs to another comes before it.

    Raises:
        VitseeError: as `check_new_files`; or the disk refused them, and nothing is left behind.
    """
    with new_files(list(contents), force=force) as partial:
        for temporary, data in zip(partial, contents.values(), strict=True):
            with open(temporary, "xb") as file:
                file.write(data)


@contextmanager
def new_files(paths: Sequence[Path], *, force: bool = False) -> Iterator[list[Path]]:
    """Context with temporary names for `paths`, which are renamed at its end; see `write_files`.
    Raises VitseeError: as `write_files`."""
    check_new_files(paths, force=force)
    places = [path.resolve() for path in paths]
    try:
        for folder in {place.parent for place in places}:
            remove_left(folder)
        with renamed(partial := {hidden_name(place): place for place in places}):
            yield list(partial)
    except OSError as error:
        raise VitseeError(
            f"cannot write {', '.join(map(str, paths))}: {reason(error)}"
        ) from error


@contextmanager
def renamed(places: Mapping[Path, Path]) -> Iterator[None]:
    """Context in which the caller writes files under temporary names. At the end they are renamed,
    in order; no temporary file remains, whatever happens. places: temporary name -> place, on one
    file system. If emptied meanwhile, nothing is renamed. Raises OSError: a file cannot be renamed,
    or was not written; those before it were renamed."""
    partial = tuple(places)
    try:
        yield
        for temporary, place in places.items():
            os.replace(temporary, place)
    finally:
        for temporary in partial:
            temporary.unlink(missing_ok=True)


def hidden_name(place: Path) -> Path:
    """A new name beside a file or folder, without its own, which may have the maximum length; see
    `remove_left`."""
    return Path(partial_name(place.with_name(HIDDEN)))


def remove_left(folder: Path) -> None:
    """Remove what killed processes left in a folder under a `hidden_name`, as far as that is
    allowed. Folders of other machines stay: their age does not tell whether a file in them is being
    written."""
    for left in folder.glob(f"{HIDDEN}.*{PARTIAL}"):
        if left.is_dir() and not left.is_symlink():
            if has_ended(left.name.split(".")[2]):
                shutil.rmtree(left, ignore_errors=True)
        elif is_left(left):
            with suppress(OSError):
                left.unlink()
